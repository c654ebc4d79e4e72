"""Retrieving a publication: discover, subscribe, verify, deliver (KVCS Sections 5.1, 5.2, 5.4).

The shell of the consumer: connections, discovery, and what the caller sees. What is wanted, ready,
missing or trusted is decided by the pure modules beside it; here are the waits, and each has a
deadline.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from kvcs.consumer.candidates import Candidates, prefix_lengths, rank
from kvcs.consumer.download import (
    Download,
    Failure,
    Job,
    Opened,
    Refused,
    Tasks,
    connection_lost,
    open_publication,
    set_within,
    tasks,
)
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
from kvcs.consumer.selection import Wish
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.trust import Expectations
from kvcs.errors import (
    BadManifest,
    BadName,
    ConfigError,
    Expired,
    Incomplete,
    KvcsError,
    NotFound,
    PublicationFailed,
)
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.standard import standard_codecs
from kvcs.link import REDIAL_S, Backoff, why_not_there
from kvcs.profile.naming import PublicationName
from kvcs.store.sink import BlockSink
from kvcs.telemetry import LogEvent
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    MoqtUri,
    NamespaceSubscription,
    QuicSettings,
    open_connection,
)
from moqt.aio.tls import check_client_tls
from moqt.aio.transport import TransportStats
from moqt.errors import MoqtError
from moqt.session.config import SessionConfig
from moqt.session.events import NamespaceAppeared, NamespaceGone

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

#: Prefixes that are looked for at the same time.
PREFIXES_AT_ONCE = 16
#: Publications of one prefix whose manifests are compared before one is chosen.
CANDIDATES_AT_ONCE = 4
#: Seconds that closing a connection waits for the last words to be acknowledged.
DRAIN_S = 0.2
#: Failures that no other way and no other time make good.
FINAL = (FailureReason.CONTRADICTED, FailureReason.UNUSABLE)


class Unreachable(KvcsError):
    """No relay and no producer could be reached, or all that were reached were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSpec:
    """A relay or a producer to retrieve from."""

    uri: str
    """``moqt://host:port/path``."""

    tls: ClientTls = field(default_factory=ClientTls)
    quic: QuicSettings = field(default_factory=QuicSettings)
    config: SessionConfig = field(default_factory=SessionConfig)


@dataclass(slots=True, eq=False)
class _Way:
    """A relay or a producer of the caller's list."""

    spec: ConnectionSpec

    conn: MoqtConnection | None = None
    """The session with it, if there is one, whatever became of it."""

    sent_to: str | None = None
    """Where its GOAWAY sends us. It is dialled there once; whatever is lost there, we go home."""

    @property
    def usable(self) -> MoqtConnection | None:
        """The session, if requests can be made over it."""
        conn = self.conn
        if conn is None or conn.closed is not None or conn.going_away is not None:
            return None
        return conn


class _Moved(NamedTuple):
    """Another way that stands, for one that does not or that is to be left."""

    way: _Way
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
        connections: Relays and producers, to be tried in order. If one is lost or lacks
            something, the next one goes on with the same publication. Once something was lost
            that had been there, a connection or a publisher behind a relay, all are tried again
            and again, until everything is there or the deadline has passed.
        sink: Where tensors land. It is told of ``begin`` when the first manifest is accepted;
            where a publication fails before any of its layers was ready, ``abandon`` and another
            ``begin`` may follow.
        wish: What is wanted; by default everything.
        settings: How long to wait for what.
        codecs: The codecs that this end knows; by default those that come with kvcs.
        publication: Retrieve exactly this one, without discovery.
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
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._expected = expected
        self._settings = settings or RetrievalSettings()
        self._job = Job(
            expected=expected,
            wish=wish or Wish(),
            settings=self._settings,
            codecs=standard_codecs() if codecs is None else codecs,
            sink=sink,
            pool=ThreadPoolExecutor(self._settings.workers, "kvcs-examine"),
            tell=self._tell,
        )
        self._job.wish.check(expected.descriptor, self._job.codecs)
        if not connections:
            raise ConfigError("no relay and no producer to retrieve from")
        for spec in connections:
            try:
                MoqtUri.parse(spec.uri)
            except ValueError as exc:
                raise ConfigError(str(exc)) from None
            try:
                check_client_tls(spec.tls)
            except ValueError as exc:
                raise ConfigError(f"{spec.uri}: {exc}") from None
        self._ways = [_Way(spec) for spec in connections]
        self._something_lost = False
        self._last: Failure | None = None
        self._only = publication
        self._prefixes: tuple[int, ...] = ()
        if publication is None:
            if not expected.block_keys:
                raise ConfigError("neither the tokens nor the publication are known")
            self._prefixes = tuple(
                prefix_lengths(self._settings.prefixes, len(expected.block_keys))
            )
        self._on_event = on_event
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._ready: dict[tuple[int, int], LayerReady] = {}
        self._waiters: dict[tuple[int, int], asyncio.Future[LayerReady]] = {}
        self._candidates = Candidates()
        self._found = asyncio.Event()
        self._current: Download | None = None
        self._known: set[PublicationName] = set()  # that were told of
        self._refused: set[PublicationName] = set()  # that were told to be refused
        self._open: list[MoqtConnection] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._crash: BaseException | None = None
        self._started_at = 0.0
        self._first_layer_s: float | None = None
        self._last_layer_s: float | None = None

    # -- for the caller --------------------------------------------------------------------------

    @property
    def complete(self) -> PublicationComplete | None:
        """The last event, if the retrieval succeeded."""
        last = self._events[-1] if self._events else None
        return last if isinstance(last, PublicationComplete) else None

    @property
    def failed(self) -> Failed | None:
        """The last event, if the retrieval failed: why, and exactly what is missing."""
        last = self._events[-1] if self._events else None
        return last if isinstance(last, Failed) else None

    @property
    def summary(self) -> Summary:
        """The figures so far."""
        if self._current is None:
            return Summary()
        return self._current.assembler.summary(self._first_layer_s, self._last_layer_s)

    def stats(self) -> tuple[TransportStats, ...]:
        """Return the figures of its connections; of those that it has left, none."""
        return tuple(conn.stats() for conn in self._open)

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
        if not self._is_over:  # if it is, it closes its connections, which nothing may cut short
            self._task.cancel()
        await asyncio.wait([self._task])
        if error is None and self._crash is not None:
            raise self._crash

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over all events, from the first to the last."""
        self._check_started()
        at = 0
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self._is_over:
                return
            self._news.clear()
            await self._news.wait()

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
        key = segment, layer
        if (event := self._ready.get(key)) is not None:
            return event
        if self._is_over:
            raise self._error(f"layer {layer} of segment {segment} is not ready")
        waiter = self._waiters.get(key)
        if waiter is None:
            waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiter)
        except TimeoutError:
            raise Expired(
                f"layer {layer} of segment {segment} was not ready within {timeout_s} s"
            ) from None

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
        while not self._is_over:
            self._news.clear()
            await self._news.wait()
        if (complete := self.complete) is not None:
            return complete
        raise self._error("the retrieval failed")

    # -- events ----------------------------------------------------------------------------------

    def _check_started(self) -> None:
        if self._task is None:
            raise ConfigError("the retrieval has not been started: use it with async with")

    @property
    def _is_over(self) -> bool:
        return self._crash is not None or self.complete is not None or self.failed is not None

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, LayerReady):
            self._last_layer_s = asyncio.get_running_loop().time() - self._started_at
            if self._first_layer_s is None:
                self._first_layer_s = self._last_layer_s
            key = event.segment, event.layer
            self._ready[key] = event
            if (waiter := self._waiters.pop(key, None)) is not None:
                waiter.set_result(event)
        self._news.set()
        if self._on_event is not None:
            self._on_event(event)

    def _error(self, what: str) -> BaseException:
        """Return what :meth:`layer` and :meth:`result` raise after the end."""
        if self._crash is not None:
            return self._crash
        failed = self.failed
        if failed is None:
            return NotFound(f"{what}: it was not wanted, or there is no such layer")
        text = f"{what}: {failed.text}"
        match failed.reason:
            case FailureReason.NOT_FOUND:
                return NotFound(text)
            case FailureReason.UNREACHABLE:
                return Unreachable(text)
            case FailureReason.REFUSED:
                return BadManifest(text)
            case FailureReason.ABANDONED | FailureReason.CONTRADICTED:
                return PublicationFailed(text)
            case FailureReason.INCOMPLETE | FailureReason.UNATTESTED:
                return Incomplete(text, _expanded(failed))
            case FailureReason.STALLED | FailureReason.EXPIRED:
                return Expired(text)
            case FailureReason.UNUSABLE:
                return ConfigError(text)
        return KvcsError(text)

    # -- the life of a retrieval -----------------------------------------------------------------

    async def _run(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        failure: Failure | None = Failure(FailureReason.CANCELLED, "ended by the caller")
        deadline = asyncio.timeout(self._settings.deadline_s)
        try:
            try:
                async with deadline:
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
            self._crash = exc
            if self._current is not None:
                self._current.abandon()
            self._finish_waiters()
            self._news.set()
            log.warning(LogEvent.RETRIEVAL_FAILED, reason="crashed", text=type(exc).__name__)
        finally:
            self._job.pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.gather(
                *self._closing, *(conn.close(drain_s=DRAIN_S) for conn in self._open)
            )

    def _finish(self, failure: Failure | None) -> None:
        """Tell the last event."""
        current, summary = self._current, self.summary
        if failure is None and current is not None:
            extent = current.assembler.extent
            assert extent is not None
            tokens = extent.stop * self._expected.descriptor.block_tokens
            codecs = current.assembler.used_codecs
            self._tell(
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
            unlisted = assembler.unlisted if assembler is not None else range(0)
            self._tell(
                Failed(
                    reason=failure.reason,
                    text=failure.text,
                    publication=current.name if current is not None else None,
                    missing=tuple(assembler.gaps()) if assembler is not None else (),
                    unlisted=(unlisted[0], unlisted[-1]) if unlisted else None,
                    unattested=tuple(assembler.unattested()) if assembler is not None else (),
                    summary=summary,
                )
            )
            log.warning(
                LogEvent.RETRIEVAL_FAILED,
                publication=str(current.name) if current is not None else None,
                reason=str(failure.reason),
                text=failure.text,
            )
        self._finish_waiters()

    def _finish_waiters(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for (segment, layer), waiter in waiters.items():
            if not waiter.done():
                waiter.set_exception(self._error(f"layer {layer} of segment {segment}"))
                waiter.exception()  # the one who asked may be gone

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
            failure = _more_telling(failure, found)
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

    async def _try_way(self, way: _Way, opened: Opened | None) -> Failure | _Moved | None:
        """Retrieve over one way for as long as it stands."""
        if (conn := way.usable) is None:
            uri, way.sent_to, opened = way.sent_to or way.spec.uri, None, None
            dialled = await self._dial(way.spec, uri)
            if isinstance(dialled, Failure):
                return dialled
            self._adopt(way, dialled)
            conn = dialled
        async with tasks() as group:
            work = group.start(self._retrieve(conn, opened))
            leave = group.start(self._another_way(way, conn))
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_whole and (moved := leave.result()) is not None:
                log.info(LogEvent.WAY_TAKEN, uri=moved.way.spec.uri, instead_of=way.spec.uri)
                self._let_go(conn)
                return moved
            found = await work
        if found is None or found.reason is FailureReason.ABANDONED:
            return found
        if conn.closed is not None or conn.going_away is not None or self._is_silent(conn):
            way.sent_to = self._where_sent(way, conn)
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

    def _is_silent(self, conn: MoqtConnection) -> bool:
        return time.monotonic() - conn.heard_at >= self._settings.silence_s

    def _is_in_doubt(self, conn: MoqtConnection) -> bool:
        """Whether a session still stands, and another one had better be found."""
        return conn.closed is None and (conn.going_away is not None or self._is_silent(conn))

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.again_s, self._settings.again_max_s)

    # -- connections -----------------------------------------------------------------------------

    async def _dial(self, spec: ConnectionSpec, uri: str) -> MoqtConnection | Failure:
        timeout_s = self._settings.connect_timeout_s
        if self._something_lost:
            timeout_s = min(timeout_s, REDIAL_S)
        try:
            conn = await open_connection(
                uri, tls=spec.tls, quic=spec.quic, config=spec.config, timeout_s=timeout_s
            )
        except ValueError as exc:  # TlsSettingsError is one: the caller's files, not a peer
            return Failure(FailureReason.UNUSABLE, f"{uri}: {exc}")
        except (OSError, TimeoutError, MoqtError) as exc:
            text = f"{uri}: {str(exc) or type(exc).__name__}"
            return Failure(FailureReason.UNREACHABLE, text, again=True)
        self._open.append(conn)
        return conn

    def _adopt(self, way: _Way, conn: MoqtConnection) -> None:
        """Make a session the one of a way; what it had before is of no use any more."""
        previous, way.conn = way.conn, conn
        if previous is not None:
            self._let_go(previous)

    def _let_go(self, conn: MoqtConnection) -> None:
        """Close a session, without waiting for that. Twice is once."""
        if conn in self._open:
            self._open.remove(conn)
            # Awaited at the end of the retrieval.
            task = asyncio.create_task(conn.close(drain_s=0.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _another_way(self, way: _Way, conn: MoqtConnection) -> _Moved | None:
        """Return another way once it stands, after this one is silent or is to be left.

        Until then this one stands on: a relay that was only busy is not left, and one that goes
        away serves on for a while. Returns None when its session is over.
        """
        made: dict[tuple[_Way, str], MoqtConnection] = {}
        backoff = self._backoff()
        try:
            while True:
                await self._until_in_doubt(conn)
                if conn.closed is not None:
                    return None
                self._something_lost = True
                reason = "silent" if conn.going_away is None else "goes away"
                log.info(LogEvent.WAY_IN_DOUBT, uri=way.spec.uri, reason=reason)
                while self._is_in_doubt(conn):
                    for other, uri in self._elsewhere(way, conn):
                        found = await self._make(made, other, uri)
                        if isinstance(found, Failure):
                            self._last = found
                        elif self._is_in_doubt(conn):
                            self._adopt(other, made.pop((other, uri)))
                            other.sent_to = None
                            return _Moved(other, found)
                    await asyncio.sleep(backoff.next_s())
                self._let_go_all(made)
        finally:
            self._let_go_all(made)

    async def _until_in_doubt(self, conn: MoqtConnection) -> None:
        """Return when a session is silent or is to be left, or is over."""
        async with tasks() as group:
            waits = (conn.wait_silent(self._settings.silence_s), conn.wait_going_away())
            started = [group.start(wait) for wait in waits]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)

    def _let_go_all(self, made: dict[tuple[_Way, str], MoqtConnection]) -> None:
        while made:
            self._let_go(made.popitem()[1])

    async def _make(
        self, made: dict[tuple[_Way, str], MoqtConnection], way: _Way, uri: str
    ) -> Opened | Failure | None:
        """Make a session beside the one in use, and open there what is being retrieved.

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
                    open_publication(session, current.name, self._job, track=current.manifest_track)
                )
                silence = group.start(session.wait_silent(self._settings.silence_s))
                await asyncio.wait({opening, silence}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    return opening.result()
        except Refused as exc:
            return Failure(FailureReason.REFUSED, str(exc))
        self._let_go(made.pop((way, uri)))
        return Failure(FailureReason.UNREACHABLE, f"{uri}: silent")

    def _elsewhere(self, way: _Way, conn: MoqtConnection) -> list[tuple[_Way, str]]:
        """Return where else to go: where a GOAWAY sends us, the other ways, and at last home."""
        at = self._ways.index(way)
        found = [(other, other.spec.uri) for other in self._ways[at + 1 :] + self._ways[:at]]
        if (uri := self._where_sent(way, conn)) is not None:
            found.insert(0, (way, uri))
        return [*found, (way, way.spec.uri)]

    def _where_sent(self, way: _Way, conn: MoqtConnection) -> str | None:
        """Return the URI of a GOAWAY, if there is one and we may be sent there."""
        uri = conn.going_away.new_session_uri if conn.going_away is not None else ""
        if not uri:
            return None
        if (reason := why_not_there(uri, way.spec.uri, way.spec.tls)) is not None:
            log.warning(LogEvent.RELAY_MOVE_REFUSED, relay=way.spec.uri, reason=reason)
            return None
        return uri

    # -- publications ----------------------------------------------------------------------------

    async def _retrieve(self, conn: MoqtConnection, opened: Opened | None) -> Failure | None:
        """Retrieve over one connection; return None when everything is there."""
        if (current := self._current) is not None:
            # Another relay may have what is missing of the publication that was begun.
            failure = await self._run_publication(conn, current, opened)
            if failure is None or self._is_bound or conn.closed is not None:
                return failure
        if self._only is not None:
            blocks = self._expected.blocks_of(self._only)
            self._tell(PublicationFound(publication=self._only, blocks=blocks))
            return await self._run_publication(conn, self._begin(self._only), None)
        async with tasks() as group:
            return await self._discover(conn, group)

    async def _discover(self, conn: MoqtConnection, group: Tasks) -> Failure | None:
        """Find publications and try one after the other."""
        self._candidates, self._found = Candidates(), asyncio.Event()
        if self._current is not None and not self._something_lost:
            self._candidates.tried(self._current.name)
        failure = await self._look_for_prefixes(conn, group)
        if failure is not None:  # nobody is left to tell of a publication
            return failure if conn.closed is None else _more_telling(failure, connection_lost(conn))
        patience = self._settings.discovery_timeout_s
        if self._something_lost and self._current is not None:
            patience = self._settings.another_s
        while True:
            names = self._candidates.best(CANDIDATES_AT_ONCE)
            if not names:
                if conn.closed is not None:
                    return _more_telling(failure, connection_lost(conn))
                self._found.clear()
                if not await set_within(self._found, patience):
                    text = f"no publication appeared within {patience:g} s"
                    return failure or Failure(FailureReason.NOT_FOUND, text)
                continue
            patience = self._settings.another_s
            opened = None
            if len(names) > 1:
                opened, refusal = await self._choose(conn, names)
                if opened is None:
                    failure = refusal or failure
                    continue
            name = names[0] if opened is None else opened.name
            self._candidates.tried(name)
            current = self._current
            if current is None or current.name != name:  # it may have come back
                self._drop_current(failure)
                current = self._begin(name)
            failure = await self._run_publication(conn, current, opened)
            if (
                failure is None
                or current.assembler.any_ready
                or failure.reason in (FailureReason.UNREACHABLE, FailureReason.UNUSABLE)
            ):
                return failure

    async def _run_publication(
        self, conn: MoqtConnection, publication: Download, opened: Opened | None
    ) -> Failure | None:
        try:
            failure = await publication.run(conn, opened)
        except Refused as exc:
            if conn.closed is not None:
                return connection_lost(conn)
            # Who has no room now has it later, until the deadline, like one that was lost.
            failure = Failure(FailureReason.REFUSED, str(exc), again=exc.again, lost=exc.busy)
        if (
            failure is not None
            and failure.reason is FailureReason.REFUSED
            and not ((self._something_lost or failure.lost) and failure.again)  # it may come back
        ):
            self._tell_refused(publication.name, failure.text)
        return failure

    def _tell_refused(self, name: PublicationName, text: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._tell(PublicationRefused(publication=name, text=text))

    # -- discovery -------------------------------------------------------------------------------

    async def _look_for_prefixes(self, conn: MoqtConnection, group: Tasks) -> Failure | None:
        """Subscribe to prefixes, the longest first, until one has a publication.

        The subscriptions of the first group stay, so that the longest prefix is found also when
        it is published later.
        """
        refusals: list[str] = []
        answered = 0
        for start in range(0, len(self._prefixes), PREFIXES_AT_ONCE):
            lengths = self._prefixes[start : start + PREFIXES_AT_ONCE]
            asked = [self._subscribe_namespace(conn, blocks) for blocks in lengths]
            watched: list[asyncio.Task[None]] = []
            for blocks, answer in zip(lengths, await asyncio.gather(*asked), strict=True):
                if isinstance(answer, str):
                    refusals.append(answer)
                else:
                    answered += 1
                    watched.append(group.start(self._watch(answer, blocks)))
            is_last = start + PREFIXES_AT_ONCE >= len(self._prefixes)
            wait_s = self._settings.settle_s * (1 if is_last else 10)
            if await set_within(self._found, wait_s):
                # More may be on its way, of a longer prefix or a better publication.
                await asyncio.sleep(self._settings.settle_s)
                return None
            if start and not is_last:
                for task in watched:
                    task.cancel()
        if answered:
            return None
        return Failure(FailureReason.NOT_FOUND, f"discovery was refused: {refusals[0]}")

    async def _subscribe_namespace(
        self, conn: MoqtConnection, blocks: int
    ) -> NamespaceSubscription | str:
        try:
            return await conn.subscribe_namespace(
                self._expected.prefix(blocks), timeout_s=self._settings.request_timeout_s
            )
        except (MoqtError, TimeoutError) as exc:
            return str(exc)

    async def _watch(self, announcements: NamespaceSubscription, blocks: int) -> None:
        prefix = self._expected.prefix(blocks)
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
                        if self._candidates.appeared(name, blocks) and name not in self._known:
                            self._known.add(name)
                            self._tell(PublicationFound(publication=name, blocks=blocks))
                        self._found.set()
                    case NamespaceGone():
                        self._candidates.gone(name)
        except MoqtError:
            self._found.set()  # the session is gone, as whoever waits will find
        finally:
            announcements.cancel()

    async def _choose(
        self, conn: MoqtConnection, names: Sequence[PublicationName]
    ) -> tuple[Opened | None, Failure | None]:
        """Open publications side by side and keep the best; the rest stays untried."""
        opened: list[Opened] = []
        refusal: Failure | None = None
        async with tasks() as group:
            opening = {group.start(self._try_to_open(conn, name)): name for name in names}
            pending = set(opening)
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=self._settings.settle_s if opened else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                for task in done:
                    found = task.result()
                    if isinstance(found, Opened):
                        opened.append(found)
                        continue
                    self._candidates.tried(opening[task])
                    refusal = Failure(FailureReason.REFUSED, found)
                    self._tell_refused(opening[task], found)
        if not opened:
            return None, refusal
        opened.sort(key=lambda one: rank(one.manifest, one.version))
        best = opened.pop()
        for other in opened:
            other.subscription.cancel()
        return best, None

    async def _try_to_open(self, conn: MoqtConnection, name: PublicationName) -> Opened | str:
        try:
            return await open_publication(conn, name, self._job)
        except Refused as exc:
            return str(exc)

    def _begin(self, name: PublicationName) -> Download:
        self._current = Download(name, self._job)
        return self._current

    def _drop_current(self, why: Failure | None) -> None:
        """Make way for another publication."""
        if (current := self._current) is None:
            return
        self._tell_refused(current.name, why.text if why is not None else "another one was found")
        current.abandon()
        self._current = None


def _more_telling(one: Failure | None, other: Failure) -> Failure:
    """Return the later failure, unless it says less: that there was nobody to ask."""
    vague = (FailureReason.UNREACHABLE, FailureReason.NOT_FOUND)
    return other if one is None or one.reason in vague or other.reason not in vague else one


def _expanded(failed: Failed, limit: int = 1 << 20) -> list[tuple[int, str, int]]:
    """List the missing Objects one by one, as far as that is bearable; the event has them all."""
    found: list[tuple[int, str, int]] = []
    for gap in failed.missing:
        for layer in range(gap.first_layer, gap.last_layer + 1):
            room = limit - len(found)
            if room <= 0:
                return found
            blocks = range(gap.first_block, gap.last_block + 1)[:room]
            found += ((layer, str(gap.track), block) for block in blocks)
    return found
