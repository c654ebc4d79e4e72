"""Retrieving a publication: discover, subscribe, verify, deliver (KVCS Sections 5.1, 5.2, 5.4).

The shell of the consumer: connections, discovery, and what the caller sees. What is wanted, ready,
missing or trusted is decided by the pure modules beside it; here are the waits, and each has a
deadline.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from kvcs.consumer.discovery import Discovery
from kvcs.consumer.download import Download
from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
    Summary,
)
from kvcs.consumer.failures import (
    FINAL,
    Failure,
    Unreachable,
    connection_lost,
    last_event,
    more_telling,
)
from kvcs.consumer.lanes import Lane, Lanes, LocalLane
from kvcs.consumer.opening import Job, Opened, Refused, open_publication, refused
from kvcs.consumer.prefixes import Index, Questions, prefix_lengths
from kvcs.consumer.processes import Processes
from kvcs.consumer.replicas import Replicas
from kvcs.consumer.selection import Wish
from kvcs.consumer.sessions import ConnectionSpec, Sessions
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.tasks import Tasks, tasks
from kvcs.consumer.telling import Telling
from kvcs.consumer.trust import Expectations
from kvcs.consumer.ways import Way
from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.standard import standard_codecs
from kvcs.link import REDIAL_S, Backoff
from kvcs.profile.naming import PublicationName
from kvcs.store.shared import SharedSink
from kvcs.store.sink import BlockSink
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection
from moqt.aio.transport import TransportStats

__all__ = [
    "ConnectionSpec",
    "Expectations",
    "Retrieval",
    "RetrievalSettings",
    "Unreachable",
    "Wish",
    "consume",
]

log = structlog.get_logger("kvcs.consumer")

#: Relays and producers that are tried at most, those that an index names included.
MAX_WAYS = 16


class _Moved(NamedTuple):
    """Another way that stands, for one that does not or that is to be left."""

    way: Way
    opened: Opened | None
    """The publication being retrieved, as it was opened there."""


def consume(
    expected: Expectations,
    connections: Sequence[ConnectionSpec],
    sink: BlockSink,
    *,
    wish: Wish | None = None,
    settings: RetrievalSettings | None = None,
    codecs: CodecRegistry | None = None,
    publication: PublicationName | None = None,
    index: Index | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> "Retrieval":
    """Retrieve one publication; see :class:`Retrieval`.

    ::

        async with consume(expected, [ConnectionSpec(uri="moqt://relay:4443")], sink) as retrieval:
            await retrieval.layer(0)
            ...
            complete = await retrieval.result()
    """
    return Retrieval(
        expected,
        connections,
        sink,
        wish=wish,
        settings=settings,
        codecs=codecs,
        publication=publication,
        index=index,
        on_event=on_event,
    )


class Retrieval:
    """One retrieval, from discovery to the last layer. An asynchronous context manager.

    It runs from the start of the block, and is ended with the block. Events can be had in three
    ways, also at once: iterate over the retrieval (from the first event on, by any number of
    tasks), pass ``on_event`` (called on the event loop, must not block), or await
    :meth:`layer` and :meth:`result`.

    Args:
        expected: What a publication is held against.
        connections: Relays and producers, to be tried in order, each over as many connections
            as ``settings`` say. If one is lost or lacks something, the next one goes on with the
            same publication. Once something was lost that had been there, a connection or a
            publisher behind a relay, all are tried again and again, until everything is there or
            the deadline has passed.
        sink: Where tensors land. It is told of ``begin`` when the first manifest is accepted;
            where a publication fails before any of its layers was ready, ``abandon`` and another
            ``begin`` may follow.
        wish: What is wanted; by default everything.
        settings: How long to wait for what.
        codecs: The codecs that this end knows; by default those that come with kvcs.
        publication: Retrieve exactly this one, without discovery.
        index: Asked once, ahead of everybody else, which publications begin as the prompt does;
            those that do for longest are tried first.
        on_event: Called with every event.

    Raises:
        ConfigError: If the arguments do not fit each other, or a file of ``tls`` cannot be used.
    """

    def __init__(
        self,
        expected: Expectations,
        connections: Sequence[ConnectionSpec],
        sink: BlockSink,
        *,
        wish: Wish | None = None,
        settings: RetrievalSettings | None = None,
        codecs: CodecRegistry | None = None,
        publication: PublicationName | None = None,
        index: Index | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._expected = expected
        self._settings = settings or RetrievalSettings()
        self._telling = Telling(on_event)
        self._job = Job(
            expected=expected,
            wish=wish or Wish(),
            settings=self._settings,
            codecs=standard_codecs() if codecs is None else codecs,
            sink=sink,
            pool=ThreadPoolExecutor(self._settings.workers, "kvcs-examine"),
            tell=self._telling.tell,
        )
        self._job.wish.check(expected.descriptor, self._job.codecs)
        if self._settings.processes:
            if not isinstance(sink, SharedSink):
                raise ConfigError(f"{type(sink).__name__} cannot be shared with other processes")
            if codecs is not None:
                raise ConfigError("codecs of one's own cannot be had in other processes")
        if not connections:
            raise ConfigError("no relay and no producer to retrieve from")
        for spec in connections:
            spec.check()
        self._ways = [Way(spec) for spec in connections]
        self._sessions = Sessions()
        self._processes = Processes(self._settings)
        self._something_lost = False
        self._last: Failure | None = None
        self._only = publication
        self._index = index
        self._replicas = Replicas(self._job)
        self._deadline_at: float | None = None
        self._prefixes: tuple[int, ...] = ()
        if publication is None:
            if not expected.block_keys:
                raise ConfigError("neither the tokens nor the publication are known")
            self._prefixes = tuple(
                prefix_lengths(self._settings.prefixes, len(expected.block_keys))
            )
        self._current: Download | None = None
        self._known: set[PublicationName] = set()  # that were told of
        self._refused: set[PublicationName] = set()  # that were told to be refused
        self._task: asyncio.Task[None] | None = None

    # -- for the caller --------------------------------------------------------------------------

    @property
    def complete(self) -> PublicationComplete | None:
        """The last event, if the retrieval succeeded."""
        last = self._telling.last
        return last if isinstance(last, PublicationComplete) else None

    @property
    def failed(self) -> Failed | None:
        """The last event, if the retrieval failed: why, and exactly what is missing."""
        last = self._telling.last
        return last if isinstance(last, Failed) else None

    @property
    def summary(self) -> Summary:
        """The figures so far."""
        if self._current is None:
            return Summary()
        telling = self._telling
        return self._current.assembler.summary(telling.first_layer_s, telling.last_layer_s)

    def stats(self) -> tuple[TransportStats, ...]:
        """Return the figures of its connections; of those that it has left, none."""
        return tuple(conn.stats() for conn in self._sessions.open)

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ConfigError("a retrieval runs once")
        # Awaited by __aexit__.
        self._task = asyncio.create_task(self._run(), name="kvcs retrieval")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        # If it is over, it closes its connections, which nothing may cut short.
        if not self._telling.is_over:
            self._task.cancel()
        await asyncio.wait([self._task])
        if error is None and self._telling.crash is not None:
            raise self._telling.crash

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over all events, from the first to the last."""
        self._check_started()
        async for event in self._telling.events():
            yield event

    async def layer(
        self, layer: int, segment: int = 0, *, timeout_s: float | None = None
    ) -> LayerReady:
        """Wait until a layer is ready.

        Args:
            layer: From 0.
            segment: From 0.
            timeout_s: How long at most; None: as long as the retrieval lasts, which is bounded.

        Raises:
            Expired: If it takes longer.
            KvcsError: If the retrieval ends without it; see :meth:`result`.
        """
        self._check_started()
        return await self._telling.layer(layer, segment, timeout_s)

    async def result(self) -> PublicationComplete:
        """Wait for the end.

        Returns:
            The last event, with the figures of the retrieval.

        Raises:
            NotFound: If no publication was found.
            Unreachable: If no connection could be made, or all were lost.
            BadManifest: If every publication found was refused.
            PublicationFailed: If the publication was abandoned or contradicts itself.
            Incomplete: If something is missing, or not attested.
            Expired: If a deadline passed; :attr:`failed` tells what is missing.
            ConfigError: If the sink cannot take what comes.
            KvcsError: If the retrieval was ended by the caller.
        """
        self._check_started()
        await self._telling.end()
        if (complete := self.complete) is not None:
            return complete
        raise self._telling.error("the retrieval failed")

    def _check_started(self) -> None:
        if self._task is None:
            raise ConfigError("the retrieval has not been started: use it with async with")

    # -- the life of a retrieval -----------------------------------------------------------------

    async def _run(self) -> None:
        self._telling.start()
        if self._settings.processes:
            self._processes.start()
        failure: Failure | None = Failure(FailureReason.CANCELLED, "ended by the caller")
        deadline = asyncio.timeout(self._settings.deadline_s)
        try:
            try:
                async with deadline:
                    self._deadline_at = deadline.when()
                    if self._index is not None and self._only is None:
                        await self._replicas.ask(self._index)
                        specs = [way.spec for way in self._ways]
                        self._ways += map(Way, self._replicas.ways(specs, MAX_WAYS))
                    failure = await self._try_ways()
            except TimeoutError:
                if not deadline.expired():
                    raise
                text = f"not complete within {self._settings.deadline_s:g} s"
                if self._last is not None:
                    text = f"{text}: {self._last.text}"
                failure = Failure(FailureReason.EXPIRED, text)
            except asyncio.CancelledError:
                pass  # by __aexit__ alone: nobody else has the task
            self._finish(failure)
        except Exception as exc:
            # The outermost line of the task. Whoever waits, or leaves the block, gets it raised.
            if self._current is not None:
                self._current.abandon()
            self._telling.finish(crash=exc)
            log.warning(LogEvent.RETRIEVAL_FAILED, reason="crashed", text=type(exc).__name__)
        finally:
            self._job.pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.gather(self._sessions.close(), self._processes.close())

    def _finish(self, failure: Failure | None) -> None:
        """Tell the last event."""
        current, summary = self._current, self.summary
        if failure is None and current is not None:
            extent = current.assembler.extent
            assert extent is not None
            tokens = extent.stop * self._expected.descriptor.block_tokens
            codecs = current.assembler.used_codecs
            self._job.tell(
                PublicationComplete(
                    publication=current.name,
                    token_end=tokens,
                    summary=summary,
                    codecs=tuple(codecs),
                    lossless=all(codecs.values()),
                )
            )
            log.info(
                LogEvent.RETRIEVAL_COMPLETE, publication=str(current.name), **summary.to_json()
            )
        else:
            assert failure is not None
            if current is not None:
                current.abandon()
            assembler = current.assembler if current is not None else None
            self._job.tell(last_event(failure, assembler, summary))
            log.warning(
                LogEvent.RETRIEVAL_FAILED,
                publication=str(current.name) if current is not None else None,
                reason=str(failure.reason),
                text=failure.text,
            )
        self._telling.finish()

    async def _try_ways(self) -> Failure | None:
        """Try one way after the other, and all of them again as long as that may help."""
        failure: Failure | None = None
        ways, backoff = deque(self._ways), self._backoff()
        left, again, opened = len(ways), False, None
        while True:
            before = self.summary.objects
            found = await self._try_way(ways[0], opened)
            opened = None
            if self.summary.objects > before:
                backoff.reset()
            if isinstance(found, _Moved):
                ways.rotate(-ways.index(found.way))
                left, again, opened = len(ways), False, found.opened
                continue
            if found is None:
                return None
            failure = more_telling(failure, found)
            self._last = found
            given_up = found.reason is FailureReason.ABANDONED and self._is_bound
            if given_up or found.reason in FINAL:
                return failure
            again |= found.again
            self._something_lost |= found.lost
            ways.rotate(-1)
            left -= 1
            if left:
                continue
            if not (self._something_lost and again):
                return failure
            left, again = len(ways), False
            await asyncio.sleep(backoff.next_s())

    async def _try_way(self, way: Way, opened: Opened | None) -> Failure | _Moved | None:
        """Retrieve over one way for as long as it stands."""
        if (lanes := way.usable) is None:
            uri, way.sent_to, opened = way.sent_to or way.spec.uri, None, None
            dialled = await self._dial(way.spec, uri)
            if isinstance(dialled, Failure):
                return dialled
            lanes = self._adopt(way, uri, dialled)
        async with tasks() as group:
            if self._settings.is_spread:
                group.start(lanes.widen())
            work = group.start(self._retrieve(lanes, opened))
            leave = group.start(self._another_way(way, lanes))
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_whole and (moved := leave.result()) is not None:
                log.info(LogEvent.WAY_TAKEN, uri=moved.way.spec.uri, instead_of=way.spec.uri)
                lanes.leave()
                return moved
            found = await work
        if found is None or found.reason is FailureReason.ABANDONED:
            return found
        if not lanes.is_good:
            way.sent_to = way.where_sent(lanes.lead)
            return found._replace(again=True, lost=True)
        return found

    @property
    def _is_bound(self) -> bool:
        """Whether no other publication can take over from the one being retrieved."""
        current = self._current
        return current is not None and (current.assembler.any_ready or self._only is not None)

    @property
    def _is_whole(self) -> bool:
        """Whether everything is there, and only the sink is still busy with it."""
        return self._current is not None and self._current.assembler.is_complete

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.again_s, self._settings.again_max_s)

    # -- connections -----------------------------------------------------------------------------

    async def _dial(self, spec: ConnectionSpec, uri: str) -> MoqtConnection | Failure:
        timeout_s = self._settings.connect_timeout_s
        if self._something_lost:
            timeout_s = min(timeout_s, REDIAL_S)
        return await self._sessions.dial(spec, uri, timeout_s)

    def _adopt(self, way: Way, uri: str, conn: MoqtConnection) -> Lanes:
        """Make a session the first of a way; what it had before is of no use any more."""

        async def dial() -> LocalLane | Failure:
            made = await self._dial(way.spec, uri)
            return made if isinstance(made, Failure) else LocalLane(made, self._sessions.let_go)

        async def dial_apart() -> Lane | Failure:
            return await self._processes.dial(way.spec, uri, self._settings.connect_timeout_s)

        if way.lanes is not None:
            way.lanes.leave()
        first = LocalLane(conn, self._sessions.let_go)
        way.lanes = Lanes(uri, first, self._settings, dial=dial, dial_apart=dial_apart)
        return way.lanes

    async def _another_way(self, way: Way, lanes: Lanes) -> _Moved | None:
        """Return another way once it stands, after this one is silent or is to be left.

        Until then this one stands on: a relay that was only busy is not left, and one that goes
        away serves on for a while. Returns None when its sessions are over.
        """
        made: dict[tuple[Way, str], MoqtConnection] = {}
        backoff = self._backoff()
        try:
            while True:
                await lanes.until_in_doubt()
                if lanes.is_lost:
                    return None
                self._something_lost = True
                conn = lanes.lead
                reason = "silent" if conn.going_away is None else "goes away"
                log.info(LogEvent.WAY_IN_DOUBT, uri=way.spec.uri, reason=reason)
                while lanes.is_in_doubt:
                    for other, uri in self._elsewhere(way, conn):
                        found = await self._make(made, other, uri)
                        if isinstance(found, Failure):
                            self._last = found
                        elif lanes.is_in_doubt:
                            self._adopt(other, uri, made.pop((other, uri)))
                            other.sent_to = None
                            return _Moved(other, found)
                    await asyncio.sleep(backoff.next_s())
                self._let_go_all(made)
        finally:
            self._let_go_all(made)

    def _let_go_all(self, made: dict[tuple[Way, str], MoqtConnection]) -> None:
        while made:
            self._sessions.let_go(made.popitem()[1])

    async def _make(
        self, made: dict[tuple[Way, str], MoqtConnection], way: Way, uri: str
    ) -> Opened | Failure | None:
        """Make a session beside those in use, and open there what is being retrieved.

        Where nothing has been used yet, it need not be there: anything else will do.
        """
        session = made.get((way, uri))
        if session is None or session.closed is not None or session.going_away is not None:
            dialled = await self._dial(way.spec, uri)
            if isinstance(dialled, Failure):
                return dialled
            session = made[way, uri] = dialled
        current = self._current
        if current is None or not self._is_bound:
            return None
        try:
            async with tasks() as group:
                opening = group.start(
                    open_publication(
                        session, current.name, current.job, track=current.manifest_track
                    )
                )
                silence = group.start(session.wait_silent(self._settings.silence_s))
                await asyncio.wait({opening, silence}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    return opening.result()
        except Refused as exc:
            return Failure(FailureReason.REFUSED, str(exc))
        self._sessions.let_go(made.pop((way, uri)))
        return Failure(FailureReason.UNREACHABLE, f"{uri}: silent")

    def _elsewhere(self, way: Way, conn: MoqtConnection) -> list[tuple[Way, str]]:
        """Return where else to go: where a GOAWAY sends us, the other ways, and at last home."""
        at = self._ways.index(way)
        found = [(other, other.spec.uri) for other in self._ways[at + 1 :] + self._ways[:at]]
        if (uri := way.where_sent(conn)) is not None:
            found.insert(0, (way, uri))
        return [*found, (way, way.spec.uri)]

    # -- publications ----------------------------------------------------------------------------

    async def _retrieve(self, lanes: Lanes, opened: Opened | None) -> Failure | None:
        """Retrieve over the connections of one way; return None when everything is there."""
        while True:
            lead = await lanes.next_lead() or lanes.lead
            failure = await self._retrieve_over(lead, lanes, opened)
            opened = None
            if failure is None or failure.reason in (*FINAL, FailureReason.ABANDONED):
                return failure
            if lead.closed is None or await lanes.next_lead() is None:
                return failure
            # Another connection is the lead now.

    async def _retrieve_over(
        self, lead: MoqtConnection, lanes: Lanes, opened: Opened | None
    ) -> Failure | None:
        if (current := self._current) is not None:
            # Another relay may have what is missing of the publication that was begun.
            failure = await self._run_publication(lead, lanes, current, opened)
            if failure is None or self._is_bound or lead.closed is not None:
                return failure
        if self._only is not None:
            blocks = self._expected.blocks_of(self._only)
            self._job.tell(PublicationFound(publication=self._only, blocks=blocks))
            return await self._run_publication(lead, lanes, self._begin(self._only), None)
        async with tasks() as group:
            return await self._discover(lead, lanes, group)

    async def _discover(self, lead: MoqtConnection, lanes: Lanes, group: Tasks) -> Failure | None:
        """Find publications and try one after the other."""
        discovery = Discovery(
            lead,
            self._job,
            self._tell_found,
            job_of=self._replicas.job_of,
            octets_per_s=lanes.pace.octets_per_s or self._settings.octets_per_s,
            deadline_at=self._deadline_at,
        )
        for replica in self._replicas:
            discovery.noted(replica.publication, replica.blocks)
        if self._current is not None and not self._something_lost:
            discovery.tried(self._current.name)
        failure: Failure | None = None
        has_asked = False
        patience = self._settings.discovery_timeout_s
        if self._something_lost and self._current is not None:
            patience = self._settings.another_s
        while True:
            names = discovery.best()
            if not names and not has_asked:
                has_asked = True
                refusal = await self._look_for(discovery, group)
                if refusal is not None:  # nobody is left to tell of a publication
                    lost = lead.closed is not None
                    refusal = more_telling(failure, refusal)
                    return more_telling(refusal, connection_lost(lead.closed)) if lost else refusal
                continue
            if not names:
                if lead.closed is not None:
                    return more_telling(failure, connection_lost(lead.closed))
                if not await discovery.appears(patience):
                    text = f"no publication appeared within {patience:g} s"
                    return failure or Failure(FailureReason.NOT_FOUND, text)
                continue
            patience = self._settings.another_s
            opened = None
            if not self._settings.eager or len(names) > 1:
                opened, refusal = await discovery.choose(self._note_refusal)
                if opened is None:
                    failure = refusal or failure
                    continue
            name = names[0] if opened is None else opened.name
            discovery.tried(name)
            current = self._current
            if current is None or current.name != name:  # it may have come back
                self._drop_current(failure)
                current = self._begin(name)
            failure = await self._run_publication(lead, lanes, current, opened)
            if (
                failure is None
                or current.assembler.any_ready
                or failure.reason in (FailureReason.UNREACHABLE, FailureReason.UNUSABLE)
            ):
                return failure

    async def _look_for(self, discovery: Discovery, group: Tasks) -> Failure | None:
        if self._settings.prefixes == "auto":
            questions = Questions(len(self._expected.block_keys))
            return await discovery.look_through(questions, group)
        return await discovery.look_for(self._prefixes, group)

    async def _run_publication(
        self,
        lead: MoqtConnection,
        lanes: Lanes,
        publication: Download,
        opened: Opened | None,
    ) -> Failure | None:
        try:
            failure = await publication.run(lanes, opened)
        except Refused as exc:
            if lead.closed is not None:
                return connection_lost(lead.closed)
            failure = refused(exc)
        if failure is not None and failure.reason is FailureReason.REFUSED:
            self._note_refusal(publication.name, failure)
        return failure

    def _note_refusal(self, name: PublicationName, failure: Failure) -> None:
        """Tell of a publication that cannot be used, unless it may come back."""
        if not ((self._something_lost or failure.lost) and failure.again):
            self._tell_refused(name, failure.text)

    def _tell_found(self, name: PublicationName, blocks: int) -> None:
        if name not in self._known:
            self._known.add(name)
            self._job.tell(PublicationFound(publication=name, blocks=blocks))

    def _tell_refused(self, name: PublicationName, text: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._job.tell(PublicationRefused(publication=name, text=text))

    def _begin(self, name: PublicationName) -> Download:
        self._current = Download(name, self._replicas.job_of(name))
        return self._current

    def _drop_current(self, why: Failure | None) -> None:
        """Make way for another publication."""
        if (current := self._current) is None:
            return
        self._tell_refused(current.name, why.text if why is not None else "another one was found")
        current.abandon()
        self._current = None
