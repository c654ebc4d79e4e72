"""Discovery: which publications of a prompt are announced, and which of them is opened. Shell.

Implements KVCS Section 5.1 over one connection. Which one to try next is decided by
:mod:`kvcs.consumer.candidates`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvcs.consumer.candidates import Candidates, rank
from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.opening import Job, Opened, Refused, open_publication, refused
from kvcs.consumer.tasks import Tasks, set_within, tasks
from kvcs.errors import BadName
from kvcs.profile.naming import PublicationName
from moqt.aio import MoqtConnection, NamespaceSubscription
from moqt.errors import MoqtError
from moqt.session.events import NamespaceAppeared, NamespaceGone

#: Prefixes that are looked for at the same time.
PREFIXES_AT_ONCE = 16
#: Publications of one prefix whose manifests are compared before one is chosen.
CANDIDATES_AT_ONCE = 4


class Discovery:
    """What is announced on one connection.

    Args:
        conn: The connection.
        job: The retrieval that looks for publications.
        found: Called with each publication that is announced, and the blocks of its prefix.
    """

    def __init__(
        self, conn: MoqtConnection, job: Job, found: Callable[[PublicationName, int], None]
    ) -> None:
        self._conn = conn
        self._job = job
        self._settings = job.settings
        self._told = found
        self._candidates = Candidates()
        self._appeared = asyncio.Event()

    def tried(self, name: PublicationName) -> None:
        """Note that a publication need not be tried again."""
        self._candidates.tried(name)

    def best(self) -> list[PublicationName]:
        """Return those worth a look, the best first."""
        return self._candidates.best(CANDIDATES_AT_ONCE)

    async def appears(self, seconds: float) -> bool:
        """Wait until something is announced; return whether that was in time."""
        self._appeared.clear()
        return await set_within(self._appeared, seconds)

    async def look_for(self, prefixes: Sequence[int], group: Tasks) -> Failure | None:
        """Subscribe to prefixes, the longest first, until one has a publication.

        The subscriptions of the first group stay, so that the longest prefix is found also when
        it is published later.

        Args:
            prefixes: Their lengths in blocks.
            group: For whoever watches the subscriptions.
        """
        refusals: list[str] = []
        answered = 0
        for start in range(0, len(prefixes), PREFIXES_AT_ONCE):
            lengths = prefixes[start : start + PREFIXES_AT_ONCE]
            asked = [self._subscribe(blocks) for blocks in lengths]
            watched: list[asyncio.Task[None]] = []
            for blocks, answer in zip(lengths, await asyncio.gather(*asked), strict=True):
                if isinstance(answer, str):
                    refusals.append(answer)
                else:
                    answered += 1
                    watched.append(group.start(self._watch(answer, blocks)))
            is_last = start + PREFIXES_AT_ONCE >= len(prefixes)
            wait_s = self._settings.settle_s * (1 if is_last else 10)
            if await set_within(self._appeared, wait_s):
                if len(prefixes) > 1:
                    # That of a longer one may be on its way.
                    await asyncio.sleep(self._settings.settle_s)
                return None
            if start and not is_last:
                for task in watched:
                    task.cancel()
        if answered:
            return None
        return Failure(FailureReason.NOT_FOUND, f"discovery was refused: {refusals[0]}")

    async def choose(
        self, tell_refused: Callable[[PublicationName, Failure], None]
    ) -> tuple[Opened | None, Failure | None]:
        """Open the best publications side by side and keep one; the rest stays untried.

        Those that are announced meanwhile are opened, too. Once one is open, the others are waited
        for briefly, if there are any: one alone costs no wait.

        Args:
            tell_refused: Called with each that cannot be used, and why.
        """
        opened: list[Opened] = []
        refusal: Failure | None = None
        async with tasks() as group:
            opening: dict[asyncio.Task[Opened | Failure], PublicationName] = {}
            pending: set[asyncio.Task[Any]] = set()
            until_s: float | None = None
            loop = asyncio.get_running_loop()
            while True:
                self._appeared.clear()
                for name in self.best():
                    if name not in opening.values() and len(opening) < CANDIDATES_AT_ONCE:
                        task = group.start(self._try_to_open(name))
                        opening[task] = name
                        pending.add(task)
                if not pending:
                    break
                news = group.start(self._appeared.wait())
                done, _ = await asyncio.wait(
                    {*pending, news},
                    timeout=None if until_s is None else until_s - loop.time(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                news.cancel()
                if not done:
                    break
                pending -= done
                for task in opening.keys() & done:
                    found = task.result()
                    if isinstance(found, Opened):
                        opened.append(found)
                        until_s = until_s or loop.time() + self._settings.settle_s
                        continue
                    self._candidates.tried(opening[task])
                    refusal = found
                    tell_refused(opening[task], found)
        if not opened:
            return None, refusal
        opened.sort(key=lambda one: rank(one.manifest, one.version))
        best = opened.pop()
        for other in opened:
            other.subscription.cancel()
        return best, None

    async def _subscribe(self, blocks: int) -> NamespaceSubscription | str:
        try:
            return await self._conn.subscribe_namespace(
                self._job.expected.prefix(blocks), timeout_s=self._settings.request_timeout_s
            )
        except (MoqtError, TimeoutError) as exc:
            return str(exc)

    async def _watch(self, announcements: NamespaceSubscription, blocks: int) -> None:
        prefix = self._job.expected.prefix(blocks)
        try:
            async for event in announcements:
                try:
                    name = PublicationName.from_namespace(event.namespace)
                except BadName:
                    continue  # whatever it is, it is no publication
                if name.prefix != prefix:
                    continue
                match event:
                    case NamespaceAppeared():
                        if self._candidates.appeared(name, blocks):
                            self._told(name, blocks)
                        self._appeared.set()
                    case NamespaceGone():
                        self._candidates.gone(name)
        except MoqtError:
            self._appeared.set()  # the session is gone, as whoever waits will find
        finally:
            announcements.cancel()

    async def _try_to_open(self, name: PublicationName) -> Opened | Failure:
        try:
            return await open_publication(self._conn, name, self._job)
        except Refused as exc:
            return refused(exc)
