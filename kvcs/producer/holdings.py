"""Holdings: the publications of a producer, the room that they take, and how they go.

What goes first is decided by :mod:`kvcs.producer.retention`. Here are the waiting for room and
the waiting for the end of a time to live.
"""

import asyncio

import structlog

from kvcs.audit import Outcome, note_publication
from kvcs.errors import ConfigError, Expired
from kvcs.producer.answers import Answers
from kvcs.producer.publication import Publication
from kvcs.producer.retention import Retention
from kvcs.telemetry import Counter, Counters, LogEvent
from moqt.session.budget import ByteBudget

log = structlog.get_logger("kvcs.producer")


class Holdings:
    """What a producer holds.

    Args:
        answers: Told of what comes and goes.
        counters: Where things are counted.
        store_octets: Payload octets that are held at most.
        ttl_s: Seconds that a finished publication is kept.
        store_wait_s: Seconds that a layer waits for room.

    Attributes:
        answers: As given.
        budget: The room, for publications to be made with.
    """

    def __init__(
        self,
        answers: Answers,
        counters: Counters,
        *,
        store_octets: int,
        ttl_s: float,
        store_wait_s: float,
    ) -> None:
        self.answers = answers
        self.budget = ByteBudget(store_octets)
        self._counters = counters
        self._store_wait_s = store_wait_s
        self._retention = Retention(ttl_s)
        self._kept_changed = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()

    # -- publications come and go ----------------------------------------------------------------

    def opened(self, publication: Publication) -> None:
        """Answer for a publication from now on, and let it be discovered."""
        self.answers.add(publication)
        note_publication(publication.name, Outcome.PUBLISHED)
        self._counters.add(Counter.PUBLICATIONS)
        self._counters.add(Counter.MANIFESTS_PUBLISHED)

    def finished(self, publication: Publication) -> None:
        """Keep a publication that was finished for its time to live."""
        self._retention.finished(publication, asyncio.get_running_loop().time())
        self._kept_changed.set()
        self._wake_waiters()  # it can make room now
        self._counters.add(Counter.PUBLICATIONS_FINISHED)
        note_publication(publication.name, Outcome.FINISHED)
        log.info(
            LogEvent.PUBLICATION_FINISHED,
            publication=str(publication.name),
            octets=publication.octets,
            segments=len(publication.segments),
        )

    def abandoned(self, publication: Publication, reason: str) -> None:
        """Give a publication up that has not ended, and withdraw it (decision 5)."""
        if publication.ended:
            return
        publication.abandon(reason)
        self._counters.add(Counter.PUBLICATIONS_ABANDONED)
        log.warning(
            LogEvent.PUBLICATION_ABANDONED, publication=str(publication.name), reason=reason
        )
        self._let_go(publication, "abandoned")

    def reading(self, publication_id: bytes, change: int) -> None:
        """Count requests that are served from a publication: +1 for a new one, -1 at its end."""
        self._retention.reading(publication_id, change)
        if change < 0:
            self._kept_changed.set()  # its time may be over by now

    def stop(self) -> None:
        """Begin nothing new: requests are refused, and what is unfinished is abandoned."""
        self.answers.draining = True
        for publication in self.answers.publications:
            self.abandoned(publication, "the producer is stopping")

    def drop_all(self) -> None:
        """Let go of everything."""
        for publication in self.answers.publications:
            self._let_go(publication, "the producer has stopped")

    async def expire(self) -> None:
        """Let go of finished publications when their time is over, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            deadline = self._retention.next_deadline()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._kept_changed.wait()
            except TimeoutError:
                pass
            self._kept_changed.clear()
            for publication in self._retention.expired(loop.time()):
                self._counters.add(Counter.PUBLICATIONS_EXPIRED)
                log.info(LogEvent.PUBLICATION_EXPIRED, publication=str(publication.name))
                self._let_go(publication, "expired")

    # -- room ------------------------------------------------------------------------------------

    def check_fits(self, publication: Publication, blocks: int) -> None:
        """Refuse blocks for which there will not be room, whatever else is let go.

        Raises:
            ConfigError: Naming what is needed and what the store holds.
        """
        covered = sum(segment.blocks for segment in publication.segments)
        needed = publication.octets_of(covered + blocks)
        if needed > self.budget.limit:
            raise ConfigError(
                f"publication {publication.name} takes {needed} octets, "
                f"store_octets is {self.budget.limit}"
            )

    async def reserve(self, octets: int) -> None:
        """Take room in the store, letting go of finished publications if it must be.

        Raises:
            Expired: If there was none within ``store_wait_s``.
        """
        if not self._find_room(octets):
            await self._wait_for_room(octets)
        self.budget.take(octets)

    def unreserve(self, octets: int) -> None:
        """Give reserved room back."""
        self.budget.give_back(octets)
        self._wake_waiters()

    # -- parts -----------------------------------------------------------------------------------

    def _let_go(self, publication: Publication, why: str) -> None:
        self.answers.remove(publication, why)
        note_publication(publication.name, Outcome.WITHDRAWN, why)
        self._retention.forget(publication)
        publication.drop()
        self._wake_waiters()

    def _find_room(self, octets: int) -> bool:
        budget = self.budget
        while budget.used + octets > budget.limit:
            victim = self._retention.victim()
            if victim is None:
                return False
            self._counters.add(Counter.PUBLICATIONS_EVICTED)
            log.info(LogEvent.PUBLICATION_EVICTED, publication=str(victim.name))
            self._let_go(victim, "no longer kept")
        return True

    async def _wait_for_room(self, octets: int) -> None:
        self._counters.add(Counter.BUDGET_WAITS)
        limit_s = self._store_wait_s
        try:
            async with asyncio.timeout(limit_s):
                while not self._find_room(octets):
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        except TimeoutError:
            self._counters.add(Counter.BUDGET_WAITS_EXPIRED)
            raise Expired(
                f"no room for {octets} octets within {limit_s} s: "
                f"{self.budget.used} of store_octets {self.budget.limit} are in use"
            ) from None

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
