"""Retrieving a publication: discover, subscribe, verify, deliver (KVCS Sections 5.1, 5.2, 5.4).

The shell of the consumer. What is wanted, ready, missing or trusted is decided by the pure
modules beside it; here are the waits, and each has a deadline.

All state belongs to the event loop. The only thing that other threads do is to examine an
Object or a manifest that is large, which touches nothing but its arguments.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import structlog

from kvcs.consumer.assembler import EARLY_OCTETS, Assembler, Contradicted, Expected
from kvcs.consumer.candidates import Candidates, Prefixes, prefix_lengths, rank
from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ObjectRejected,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
    SegmentComplete,
    Summary,
)
from kvcs.consumer.selection import SegmentPlan, Wish
from kvcs.consumer.trust import Examined, Expectations, check_manifest, examine
from kvcs.errors import (
    BadManifest,
    BadName,
    BadObject,
    ConfigError,
    Expired,
    Incomplete,
    KvcsError,
    NotFound,
    PublicationFailed,
)
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack, PublicationName
from kvcs.store.sink import BlockSink
from kvcs.telemetry import LogEvent
from moqt.aio.aioquic import QuicSettings
from moqt.aio.client import MoqtUri, open_connection
from moqt.aio.connection import MoqtConnection
from moqt.aio.tls import ClientTls
from moqt.aio.tracks import NamespaceSubscription, Subscription
from moqt.codepoints import ObjectStatus, ParameterType, PublishDoneCode, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.session.config import SessionConfig
from moqt.session.events import NamespaceAppeared, NamespaceGone, ObjectReceived
from moqt.wire.filters import LocationFilter, RangeFilter

log = structlog.get_logger("kvcs.consumer")
T = TypeVar("T")

#: Subscriber Priority of the manifest track, ahead of all data.
MANIFEST_PRIORITY = 0
#: Prefixes that are looked for at the same time.
PREFIXES_AT_ONCE = 16
#: Publications of one prefix whose manifests are compared before one is chosen.
CANDIDATES_AT_ONCE = 4
#: Octets from which a manifest is read in another thread.
LARGE_MANIFEST_OCTETS = 64 << 10
#: Octets from which a codec other than ``raw`` decodes in another thread.
LARGE_ENCODED_OCTETS = 16 << 10
#: Seconds that closing a connection waits for the last words to be acknowledged.
DRAIN_S = 0.2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """How long a retrieval waits for what, and how much it holds. Seconds and octets.

    Raises:
        ConfigError: If a value is out of its range; the message names it.
    """

    deadline_s: float = 300.0
    """The whole retrieval, from its start to its last event."""

    connect_timeout_s: float = 10.0
    """One connection, handshakes included."""

    request_timeout_s: float = 10.0
    """The answer to one request, and then the first manifest."""

    discovery_timeout_s: float = 10.0
    """For a publication to appear at all, on one connection."""

    settle_s: float = 0.01
    """For further announcements and manifests after the first, to have a choice; ten times
    that for announcements of one group of prefixes, before shorter ones are tried."""

    another_s: float = 1.0
    """For another publication to appear after one that failed before a layer was ready."""

    stall_timeout_s: float = 30.0
    """Without an Object or a manifest that is new."""

    prefixes: Prefixes = "longest"
    """Which prefixes of the prompt are looked for."""

    eager: bool = False
    """Ask for the ``raw`` tracks of segment 0 together with the manifest: a round trip less to
    the first layer, and wasted if the publication is refused or offers something else."""

    resubscribe: int = 1
    """How often a track is subscribed to again that ended before everything came."""

    segments_at_once: int = 32
    """Segments whose tracks are subscribed to at the same time."""

    workers: int = 2
    """Threads that examine what is large."""

    large_octets: int = 128 << 10
    """Payload from which an Object is examined in a thread: less takes less than the way."""

    pending_octets: int = 32 << 20
    """Payload under examination in threads; at the limit nothing more is read."""

    early_octets: int = EARLY_OCTETS
    """Payload kept ahead of the manifest; at the limit nothing more is read."""

    max_rejected: int = 1000
    """Objects that are rejected before the publication is given up."""

    def __post_init__(self) -> None:
        for name in (
            "deadline_s", "connect_timeout_s", "request_timeout_s", "discovery_timeout_s",
            "stall_timeout_s", "segments_at_once", "workers", "pending_octets", "max_rejected",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in ("settle_s", "another_s", "resubscribe", "large_octets", "early_octets"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")


class _Failure(NamedTuple):
    reason: FailureReason
    text: str


class _Refused(Exception):
    """A publication cannot be used, before anything of it was."""


class _Opened(NamedTuple):
    """A publication whose manifest track is subscribed to and whose first manifest is good."""

    name: PublicationName
    track: bytes
    subscription: Subscription
    manifest: Manifest
    version: int


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
            something, the next one goes on with the same publication.
        sink: Where tensors land. It is told of ``begin`` when the first manifest is accepted;
            where a publication fails before any of its layers was ready, ``abandon`` and another
            ``begin`` may follow.
        wish: What is wanted; by default everything.
        settings: How long to wait for what.
        codecs: The codecs that this end knows.
        publication: Retrieve exactly this one, without discovery.
        on_event: Called with every event.

    Raises:
        ConfigError: If the arguments do not fit each other.
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
        self.expected = expected
        self.wish = wish or Wish()
        self.settings = settings or RetrievalSettings()
        self.codecs = codecs or CodecRegistry()
        self.sink = sink
        self.wish.check(expected.descriptor, self.codecs)
        if not connections:
            raise ConfigError("no relay and no producer to retrieve from")
        for spec in connections:
            try:
                MoqtUri.parse(spec.uri)
            except ValueError as exc:
                raise ConfigError(str(exc)) from None
        self._connections = tuple(connections)
        self._only = publication
        self._prefixes: tuple[int, ...] = ()
        if publication is None:
            if not expected.block_keys:
                raise ConfigError("neither the tokens nor the publication are known")
            self._prefixes = tuple(prefix_lengths(self.settings.prefixes, len(expected.block_keys)))
        self._on_event = on_event
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._ready: dict[tuple[int, int], LayerReady] = {}
        self._waiters: dict[tuple[int, int], asyncio.Future[LayerReady]] = {}
        self._candidates = Candidates()
        self._found = asyncio.Event()
        self._current: _Publication | None = None
        self._began_sink = False
        self._open: list[MoqtConnection] = []
        self._task: asyncio.Task[None] | None = None
        self._crash: BaseException | None = None
        self._started_at = 0.0
        self._first_layer_s: float | None = None
        self._last_layer_s: float | None = None
        self.pool = ThreadPoolExecutor(self.settings.workers, "kvcs-examine")

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
        if self.complete is None and self.failed is None:
            self._task.cancel()
        await asyncio.wait([self._task])
        if error is None and self._crash is not None:
            raise self._crash

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over all events, from the first to the last."""
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
        while not self._is_over:
            self._news.clear()
            await self._news.wait()
        if (complete := self.complete) is not None:
            return complete
        raise self._error("the retrieval failed")

    # -- events ----------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._crash is not None or self.complete is not None or self.failed is not None

    def tell(self, *events: Event) -> None:
        """Pass events on (for the parts of a retrieval, not for callers)."""
        for event in events:
            self._events.append(event)
            if isinstance(event, LayerReady):
                self._last_layer_s = asyncio.get_running_loop().time() - self._started_at
                if self._first_layer_s is None:
                    self._first_layer_s = self._last_layer_s
                key = event.segment, event.layer
                self._ready[key] = event
                if (waiter := self._waiters.pop(key, None)) is not None:
                    waiter.set_result(event)
            if self._on_event is not None:
                self._on_event(event)
        self._news.set()

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
        failure: _Failure | None = _Failure(FailureReason.CANCELLED, "ended by the caller")
        deadline = asyncio.timeout(self.settings.deadline_s)
        try:
            try:
                async with deadline:
                    failure = await self._try_connections()
            except TimeoutError:
                if not deadline.expired():
                    raise
                text = f"not complete within {self.settings.deadline_s:g} s"
                failure = _Failure(FailureReason.EXPIRED, text)
            except asyncio.CancelledError:
                pass  # by __aexit__ alone: nobody else has the task
            self._finish(failure)
        except Exception as exc:
            # The outermost line of the task: whoever waits must learn of it.
            self._crash = exc
            self._finish_waiters()
            self._news.set()
            log.exception(LogEvent.RETRIEVAL_FAILED)
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.gather(*(conn.close(drain_s=DRAIN_S) for conn in self._open))

    def _finish(self, failure: _Failure | None) -> None:
        """Tell the last event."""
        current, summary = self._current, self.summary
        if failure is None and current is not None:
            extent = current.assembler.extent
            assert extent is not None
            tokens = extent.stop * self.expected.descriptor.block_tokens
            self.tell(
                PublicationComplete(publication=current.name, token_end=tokens, summary=summary)
            )
            log.info(
                LogEvent.RETRIEVAL_COMPLETE, publication=str(current.name), **summary.to_json()
            )
        else:
            assert failure is not None
            self._abandon_sink()
            assembler = current.assembler if current is not None else None
            unlisted = assembler.unlisted if assembler is not None else range(0)
            self.tell(
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

    async def _try_connections(self) -> _Failure | None:
        failure: _Failure | None = None
        for spec in self._connections:
            try:
                conn = await open_connection(
                    spec.uri,
                    tls=spec.tls,
                    quic=spec.quic,
                    config=spec.config,
                    timeout_s=self.settings.connect_timeout_s,
                )
            except ValueError as exc:  # TlsSettingsError is one: the caller's files, not a peer
                return _Failure(FailureReason.UNUSABLE, f"{spec.uri}: {exc}")
            except (OSError, TimeoutError, MoqtError) as exc:
                text = f"{spec.uri}: {str(exc) or type(exc).__name__}"
                failure = _more_telling(failure, _Failure(FailureReason.UNREACHABLE, text))
                continue
            self._open.append(conn)
            found = await self._retrieve(conn)
            if found is None:
                return None
            failure = _more_telling(failure, found)
            if found.reason in (FailureReason.CONTRADICTED, FailureReason.UNUSABLE):
                break
        return failure

    async def _retrieve(self, conn: MoqtConnection) -> _Failure | None:
        """Retrieve over one connection; return None when everything is there."""
        if (current := self._current) is not None:
            # Another relay may have what is missing of the publication that was begun.
            failure = await self._run_publication(conn, current, None)
            if failure is None or current.assembler.any_ready or self._only is not None:
                return failure
        if self._only is not None:
            blocks = self.expected.blocks_of(self._only)
            self.tell(PublicationFound(publication=self._only, blocks=blocks))
            return await self._run_publication(conn, self._begin(self._only), None)
        async with _tasks() as group:
            return await self._discover(conn, group)

    async def _discover(self, conn: MoqtConnection, group: "_Tasks") -> _Failure | None:
        """Find publications and try one after the other."""
        self._candidates, self._found = Candidates(), asyncio.Event()
        if self._current is not None:
            self._candidates.tried(self._current.name)
        failure = await self._look_for_prefixes(conn, group)
        patience = self.settings.discovery_timeout_s
        while True:
            names = self._candidates.best(CANDIDATES_AT_ONCE)
            if not names:
                if conn.closed is not None:
                    return _more_telling(failure, _connection_lost(conn))
                self._found.clear()
                if not await _set_within(self._found, patience):
                    text = f"no publication appeared within {patience:g} s"
                    return failure or _Failure(FailureReason.NOT_FOUND, text)
                continue
            patience = self.settings.another_s
            opened = None
            if len(names) > 1:
                opened, refusal = await self._choose(conn, names)
                if opened is None:
                    failure = refusal or failure
                    continue
            name = names[0] if opened is None else opened.name
            self._candidates.tried(name)
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
        self, conn: MoqtConnection, publication: "_Publication", opened: _Opened | None
    ) -> _Failure | None:
        try:
            failure = await publication.run(conn, opened)
        except _Refused as exc:
            if conn.closed is not None:
                return _connection_lost(conn)
            failure = _Failure(FailureReason.REFUSED, str(exc))
        if failure is not None and failure.reason is FailureReason.REFUSED:
            self.tell(PublicationRefused(publication=publication.name, text=failure.text))
        return failure

    # -- discovery -------------------------------------------------------------------------------

    async def _look_for_prefixes(self, conn: MoqtConnection, group: "_Tasks") -> _Failure | None:
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
            wait_s = self.settings.settle_s * (1 if is_last else 10)
            if await _set_within(self._found, wait_s):
                # More may be on its way, of a longer prefix or a better publication.
                await asyncio.sleep(self.settings.settle_s)
                return None
            if start and not is_last:
                for task in watched:
                    task.cancel()
        if answered:
            return None
        return _Failure(FailureReason.NOT_FOUND, f"discovery was refused: {refusals[0]}")

    async def _subscribe_namespace(
        self, conn: MoqtConnection, blocks: int
    ) -> NamespaceSubscription | str:
        try:
            return await conn.subscribe_namespace(
                self.expected.prefix(blocks), timeout_s=self.settings.request_timeout_s
            )
        except (MoqtError, TimeoutError) as exc:
            return str(exc)

    async def _watch(self, announcements: NamespaceSubscription, blocks: int) -> None:
        prefix = self.expected.prefix(blocks)
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
                            self.tell(PublicationFound(publication=name, blocks=blocks))
                        self._found.set()
                    case NamespaceGone():
                        self._candidates.gone(name)
        except MoqtError:
            self._found.set()  # the session is gone, as whoever waits will find
        finally:
            announcements.cancel()

    async def _choose(
        self, conn: MoqtConnection, names: Sequence[PublicationName]
    ) -> tuple[_Opened | None, _Failure | None]:
        """Open publications side by side and keep the best; the rest stays untried."""
        opened: list[_Opened] = []
        refusal: _Failure | None = None
        async with _tasks() as group:
            tasks = {group.start(self._try_to_open(conn, name)): name for name in names}
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=self.settings.settle_s if opened else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                for task in done:
                    found = task.result()
                    if isinstance(found, _Opened):
                        opened.append(found)
                        continue
                    self._candidates.tried(tasks[task])
                    refusal = _Failure(FailureReason.REFUSED, found)
                    self.tell(PublicationRefused(publication=tasks[task], text=found))
        if not opened:
            return None, refusal
        opened.sort(key=lambda one: rank(one.manifest, one.version))
        best = opened.pop()
        for other in opened:
            other.subscription.cancel()
        return best, None

    async def _try_to_open(self, conn: MoqtConnection, name: PublicationName) -> _Opened | str:
        try:
            return await self.open_publication(conn, name)
        except _Refused as exc:
            return str(exc)

    # -- one publication -------------------------------------------------------------------------

    async def open_publication(self, conn: MoqtConnection, name: PublicationName) -> _Opened:
        """Subscribe to a publication's manifest and check the current version.

        ``manifest`` is tried only if ``manifest.cose`` does not exist, by that very code, and
        only if no signature is required: anything else would let whoever stands in between
        take the signature away (KVCS Section 5.2). (For the parts of a retrieval.)

        Raises:
            _Refused: If the publication cannot be used.
        """
        track = MANIFEST_COSE
        try:
            subscription = await self._subscribe_manifest(conn, name, track)
        except RequestRejected as exc:
            if exc.code != RequestErrorCode.DOES_NOT_EXIST or self.expected.require_signature:
                raise _Refused(f"manifest.cose: {exc}") from None
            track = MANIFEST
            try:
                subscription = await self._subscribe_manifest(conn, name, track)
            except (MoqtError, TimeoutError) as again:
                raise _Refused(f"manifest: {again}") from None
        except (MoqtError, TimeoutError) as exc:
            raise _Refused(f"manifest.cose: {exc}") from None
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                async for item in subscription:
                    if isinstance(item, ObjectReceived) and item.status is ObjectStatus.NORMAL:
                        version = item.location.group
                        manifest = await self.check_manifest(item.payload, track, name, version)
                        return _Opened(name, track, subscription, manifest, version)
            ended = subscription.ended
            why = f"{ended.code!r} {ended.reason}" if ended is not None else ""
            text = f"{track.decode()}: ended without a manifest: {why}"
        except TimeoutError:
            text = f"{track.decode()}: none came within {self.settings.request_timeout_s:g} s"
        except (MoqtError, BadManifest) as exc:
            text = f"{track.decode()}: {exc}"
        except asyncio.CancelledError:
            subscription.cancel()
            raise
        subscription.cancel()
        raise _Refused(text)

    async def _subscribe_manifest(
        self, conn: MoqtConnection, name: PublicationName, track: bytes
    ) -> Subscription:
        return await conn.subscribe(
            name.track(track),
            location_filter=LocationFilter.NEXT_OBJECT,
            fill=LocationFilter.relative(1),
            priority=MANIFEST_PRIORITY,
            timeout_s=self.settings.request_timeout_s,
        )

    async def check_manifest(
        self, payload: bytes, track: bytes, name: PublicationName, version: int
    ) -> Manifest:
        """Check a manifest, in a thread if it is large (for the parts of a retrieval).

        Raises:
            BadManifest: If a check fails.
        """
        check = partial(
            check_manifest, payload, track=track, name=name, version=version, expected=self.expected
        )
        if len(payload) < LARGE_MANIFEST_OCTETS:
            return check()
        return await asyncio.get_running_loop().run_in_executor(self.pool, check)

    def _begin(self, name: PublicationName) -> "_Publication":
        self._current = _Publication(self, name)
        return self._current

    def _drop_current(self, why: _Failure | None) -> None:
        """Make way for another publication."""
        if (current := self._current) is None:
            return
        if why is not None and why.reason is not FailureReason.REFUSED:
            self.tell(PublicationRefused(publication=current.name, text=why.text))
        self._abandon_sink()
        self._current = None

    def begin_sink(self, blocks: int) -> None:
        """Make room in the sink (for the parts of a retrieval).

        Raises:
            ConfigError: If there is none.
        """
        self._began_sink = True
        self.sink.begin(self.expected.descriptor, blocks)

    def _abandon_sink(self) -> None:
        if self._began_sink:
            self._began_sink = False
            self.sink.abandon()


class _Publication:
    """The retrieval of one publication, over one connection after the other."""

    def __init__(self, retrieval: Retrieval, name: PublicationName) -> None:
        expected, settings = retrieval.expected, retrieval.settings
        self.name = name
        blocks = expected.blocks_of(name)
        self.assembler = Assembler(
            name,
            wish=retrieval.wish,
            codecs=retrieval.codecs,
            signed=False,  # until its manifest track is known
            blocks=blocks,
            known_blocks=blocks or len(expected.block_keys) or None,
            early_octets=settings.early_octets,
        )
        self._retrieval = retrieval
        self._settings = settings
        self._sink = retrieval.sink
        self._loop = asyncio.get_running_loop()
        self._manifest_track: bytes | None = None
        self._sink_began = False
        self._rejected: set[tuple[DataTrack, int, int]] = set()
        self._pending = 0  # payload octets under examination in threads
        self._room = asyncio.Event()
        self._reset()

    def _reset(self) -> None:
        """Begin anew on a connection."""
        self._wake = asyncio.Event()
        self._failure: _Failure | None = None
        self._crash: BaseException | None = None
        self._readers: dict[DataTrack, asyncio.Task[None]] = {}
        self._manifest_ended = False
        self._closed = False
        self._progress_at = self._loop.time()

    async def run(self, conn: MoqtConnection, opened: _Opened | None) -> _Failure | None:
        """Retrieve what is missing over ``conn``; return None when everything is there.

        Args:
            conn: The connection.
            opened: The publication's manifest, if it has been opened there already.

        Raises:
            _Refused: If the manifest cannot be used.
        """
        self._reset()
        try:
            async with _tasks() as group:
                if opened is None:
                    if self._retrieval.settings.eager and self.assembler.manifest is None:
                        self._start_eagerly(conn, group)
                    opened = await self._retrieval.open_publication(conn, self.name)
                if self._manifest_track not in (None, opened.track):
                    raise _Refused("signed at one relay, not signed at another")
                self._manifest_track = opened.track
                self.assembler.signed = opened.track == MANIFEST_COSE
                if (failure := self._accept(opened.manifest, opened.version)) is not None:
                    return failure
                self._drop_readers_in_vain()
                group.start(self._read_manifests(opened.subscription, opened.track))
                if (failure := await self._supervise(conn, group)) is not None:
                    return failure
            return await self._close_sink()
        finally:
            self._closed = True
            if opened is not None:
                opened.subscription.cancel()

    async def _supervise(self, conn: MoqtConnection, group: "_Tasks") -> _Failure | None:
        while True:
            self._wake.clear()
            if self._crash is not None:
                raise self._crash
            if self.assembler.is_complete:
                return None
            if self._failure is not None and not self._pending:
                return self._failure
            if self._failure is None:
                self._start_readers(conn, group)
                if (failure := self._exhausted()) is not None:
                    return failure
            left = self._progress_at + self._settings.stall_timeout_s - self._loop.time()
            if left <= 0:
                stall_s = self._settings.stall_timeout_s
                return _Failure(FailureReason.STALLED, f"nothing new came for {stall_s:g} s")
            await _set_within(self._wake, left)

    def _exhausted(self) -> _Failure | None:
        """Say what is wrong if nothing more can come; decision 9: hints alone do not count."""
        assembler = self.assembler
        if self._pending or any(not task.done() for task in self._readers.values()):
            return None
        may_grow = bool(assembler.unlisted) or assembler.extent is None
        may_attest = any(True for _ in assembler.unattested())
        if not self._manifest_ended and (may_grow or may_attest):
            return None
        if (gap := next(assembler.gaps(), None)) is not None:
            more = sum(other.objects for other in assembler.gaps()) - gap.objects
            rest = f", and {more} more Objects" if more else ""
            return _Failure(FailureReason.INCOMPLETE, f"{gap} did not come{rest}")
        if unlisted := assembler.unlisted:
            text = f"blocks {unlisted[0]} to {unlisted[-1]} are in no segment that can be used"
            return _Failure(FailureReason.INCOMPLETE, text)
        if may_attest:
            gap = next(assembler.unattested())
            text = f"the manifest ended without the digests of {gap}"
            return _Failure(FailureReason.UNATTESTED, text)
        return _Failure(FailureReason.INCOMPLETE, "the manifest lists nothing that is wanted")

    # -- the manifest ----------------------------------------------------------------------------

    async def _read_manifests(self, subscription: Subscription, track: bytes) -> None:
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                version = item.location.group
                if version <= self.assembler.version:
                    continue
                manifest = await self._retrieval.check_manifest(
                    item.payload, track, self.name, version
                )
                if (failure := self._accept(manifest, version)) is not None:
                    self._fail(failure)
                    return
        except BadManifest as exc:
            self._fail(_Failure(FailureReason.CONTRADICTED, f"manifest refused: {exc}"))
            return
        except MoqtError as exc:
            self._lost(exc)
            return
        ended = subscription.ended
        if ended is not None and ended.code == PublishDoneCode.INTERNAL_ERROR:
            text = f"abandoned: {ended.reason or 'no reason given'}"
            self._fail(_Failure(FailureReason.ABANDONED, text))
        self._manifest_ended = True
        self._wake.set()

    def _accept(self, manifest: Manifest, version: int) -> _Failure | None:
        assembler = self.assembler
        try:
            events = assembler.accept(manifest, version)
        except Contradicted as exc:
            return _Failure(FailureReason.CONTRADICTED, str(exc))
        except NotFound as exc:
            return _Failure(FailureReason.REFUSED, str(exc))
        if events:
            self._progress_at = self._loop.time()
            log.debug(LogEvent.MANIFEST_ACCEPTED, publication=str(self.name), version=version)
        if not self._sink_began and (extent := assembler.extent) is not None:
            try:
                self._retrieval.begin_sink(len(extent))
            except ConfigError as exc:
                return _Failure(FailureReason.UNUSABLE, str(exc))
            self._sink_began = True
        for event in events:
            self._tell(event)
        if self._sink_began:
            for early in assembler.release():
                self._take(early.track, early.layer, early.block, early.payload)
        self._wake.set()
        return None

    # -- data tracks -----------------------------------------------------------------------------

    def _start_eagerly(self, conn: MoqtConnection, group: "_Tasks") -> None:
        for name in ("k.raw.s0", "v.raw.s0"):
            track = DataTrack.parse(name)
            self._readers[track] = group.start(self._read(conn, track, None))

    def _drop_readers_in_vain(self) -> None:
        """End what was begun eagerly and is not wanted, and have begun anew what ended."""
        for track, task in list(self._readers.items()):
            if task.done() or not self.assembler.is_wanted(track):
                task.cancel()
                del self._readers[track]

    def _start_readers(self, conn: MoqtConnection, group: "_Tasks") -> None:
        """Subscribe to tracks of which something is missing, of so many segments at once."""
        if not self._sink_began:
            return
        active = {track.segment for track, task in self._readers.items() if not task.done()}
        for plan in self.assembler.plans:
            if self.assembler.is_segment_ready(plan.segment):
                continue
            for track in plan.tracks:
                if track in self._readers:
                    continue
                if len(active | {plan.segment}) > self._settings.segments_at_once:
                    return
                active.add(plan.segment)
                self._readers[track] = group.start(self._read(conn, track, plan))

    async def _read(self, conn: MoqtConnection, track: DataTrack, plan: SegmentPlan | None) -> None:
        """Read one track until nothing is missing of it, or nothing more comes."""
        try:
            for _ in range(1 + self._settings.resubscribe):
                if not await self._read_once(conn, track, plan):
                    break
        except RequestRejected as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=str(track), reason=str(exc))
        except MoqtError as exc:
            self._lost(exc)
        except TimeoutError:
            pass  # SUBSCRIBE was not answered: what it would have brought stays missing
        self._wake.set()

    async def _read_once(
        self, conn: MoqtConnection, track: DataTrack, plan: SegmentPlan | None
    ) -> bool:
        """Subscribe once; return whether it is worth trying again."""
        first: int | None = 0
        blocks = 0
        if plan is not None:
            first = self._first_missing(track)
            blocks = self.assembler.entry(track)[0].blocks
        if first is None:
            return False
        subscription = await conn.subscribe(
            self.name.track(track),
            location_filter=LocationFilter.NEXT_OBJECT,
            fill=_fill(first, plan, self._retrieval.expected.descriptor.layers),
            range_filters=_block_filter(conn, plan, blocks),
            timeout_s=self._settings.request_timeout_s,
        )
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue  # what announces an end is a hint (decision 9)
                group, number = item.location
                if not self._take(track, group, number, item.payload):
                    return False  # ahead of the manifest and out of room
                if self._pending > self._settings.pending_octets:
                    await self._examined_down_to(self._settings.pending_octets // 2)
        finally:
            subscription.cancel()
        await self._examined_down_to(0)
        if self._first_missing(track) is None:
            return False
        ended = subscription.ended
        if ended is not None and ended.code == PublishDoneCode.INTERNAL_ERROR:
            text = f"{track} was abandoned: {ended.reason or 'no reason given'}"
            self._fail(_Failure(FailureReason.ABANDONED, text))
            return False
        return plan is not None

    def _first_missing(self, track: DataTrack) -> int | None:
        """Return the first layer of which something is missing that was not rejected."""
        for gap in self.assembler.gaps(track):
            width = gap.last_block - gap.first_block + 1
            rejected = Counter(
                layer
                for of, layer, block in self._rejected
                if of == track and gap.first_block <= block <= gap.last_block
            )
            for layer in range(gap.first_layer, gap.last_layer + 1):
                if rejected[layer] < width:
                    return layer
        return None

    async def _examined_down_to(self, octets: int) -> None:
        """Wait until no more than that is under examination in threads."""
        while self._pending > octets:
            self._room.clear()
            await self._room.wait()

    # -- Objects ---------------------------------------------------------------------------------

    def _take(self, track: DataTrack, layer: int, block: int, payload: bytes) -> bool:
        """Examine and place one Object, or see to it; return False if there is no room yet."""
        match self.assembler.expects(track, layer, block):
            case Expected.EXAMINE:
                pass
            case Expected.EARLY:
                return self.assembler.hold(track, layer, block, payload)
            case _:
                return True
        if self._closed or self._failure is not None:
            return True
        settings = self._settings
        entry, descriptor = self.assembler.entry(track)
        work = partial(
            examine,
            payload,
            track=track,
            layer=layer,
            block=block,
            entry=entry,
            descriptor=descriptor,
            codecs=self._retrieval.codecs,
            max_data_octets=self._retrieval.expected.max_data_octets,
        )
        large = settings.large_octets if track.codec == "raw" else LARGE_ENCODED_OCTETS
        if len(payload) < large:
            try:
                examined = work()
            except BadObject as exc:
                self._reject(track, layer, block, exc)
            else:
                self._place(track, layer, block, examined)
            return True
        self._pending += len(payload)
        future = self._loop.run_in_executor(self._retrieval.pool, work)
        future.add_done_callback(partial(self._examined, track, layer, block, len(payload)))
        return True

    def _examined(
        self,
        track: DataTrack,
        layer: int,
        block: int,
        octets: int,
        future: "asyncio.Future[Examined]",
    ) -> None:
        """Go on with an Object that was examined in a thread."""
        self._pending -= octets
        try:
            if future.cancelled() or self._closed:
                return
            error = future.exception()
            if error is None:
                self._place(track, layer, block, future.result())
            elif isinstance(error, BadObject):
                self._reject(track, layer, block, error)
            else:
                self._crash = error
        except Exception as exc:
            # In a callback nobody would learn of it; the supervisor raises it.
            self._crash = exc
        finally:
            self._room.set()
            if not self._pending or self._crash is not None:
                self._wake.set()

    def _place(self, track: DataTrack, layer: int, block: int, examined: Examined) -> None:
        assembler = self.assembler
        try:
            if not assembler.admit(track, layer, block, examined.digest, examined.octets):
                return
        except BadObject as exc:
            self._reject(track, layer, block, exc)
            return
        try:
            self._sink.place(
                track.component, layer, assembler.position(track, block), examined.tensor
            )
        except (ValueError, ConfigError) as exc:
            self._fail(_Failure(FailureReason.UNUSABLE, f"{track} layer {layer}: {exc}"))
            return
        self._progress_at = self._loop.time()
        for event in assembler.placed(track, layer, block):
            self._tell(event)

    def _reject(self, track: DataTrack, layer: int, block: int, why: BadObject) -> None:
        self._tell(self.assembler.reject(track, layer, block, why))

    def _tell(self, event: Event) -> None:
        if isinstance(event, ObjectRejected):
            self._rejected.add((event.track, event.layer, event.block))
            log.warning(
                LogEvent.OBJECT_REJECTED,
                track=str(event.track),
                layer=event.layer,
                block=event.block,
                reason=str(event.reason),
                text=event.text,
            )
            rejected = self.assembler.summary().rejected
            if rejected >= self._settings.max_rejected:
                text = f"{rejected} Objects were rejected"
                self._fail(_Failure(FailureReason.INCOMPLETE, text))
        elif isinstance(event, SegmentComplete):
            for track, task in self._readers.items():
                if track.segment == event.segment:
                    task.cancel()
            self._wake.set()
        self._retrieval.tell(event)

    # -- ends ------------------------------------------------------------------------------------

    def _fail(self, failure: _Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake.set()

    def _lost(self, error: MoqtError) -> None:
        self._fail(_Failure(FailureReason.UNREACHABLE, f"connection lost: {error}"))

    async def _close_sink(self) -> _Failure | None:
        # In a thread, since a file takes as long as its disk.
        done = self._loop.run_in_executor(self._retrieval.pool, self._sink.done)
        try:
            await asyncio.shield(done)
        except ConfigError as exc:
            return _Failure(FailureReason.UNUSABLE, str(exc))
        except asyncio.CancelledError:
            await asyncio.wait([done])  # a sink is used by one thread at a time
            raise
        return None


class _Tasks:
    """Starts tasks that live as long as the block of :func:`_tasks`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._started: set[asyncio.Task[Any]] = set()

    def start(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; if it raises, the block is cancelled and raises the same."""
        task = self._group.create_task(job)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    def cancel(self) -> None:
        """End all that still runs."""
        for task in tuple(self._started):
            task.cancel()


@asynccontextmanager
async def _tasks() -> AsyncIterator[_Tasks]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = _Tasks(group)
            try:
                yield tasks
            finally:
                tasks.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _more_telling(one: _Failure | None, other: _Failure) -> _Failure:
    """Return the later failure, unless it says less: that there was nobody to ask."""
    vague = (FailureReason.UNREACHABLE, FailureReason.NOT_FOUND)
    return other if one is None or one.reason in vague or other.reason not in vague else one


def _connection_lost(conn: MoqtConnection) -> _Failure:
    closed = conn.closed
    why = "" if closed is None else closed.reason or f"{closed.code!r}"
    return _Failure(FailureReason.UNREACHABLE, f"connection lost: {why}")


def _fill(first: int, plan: SegmentPlan | None, layers: int) -> LocationFilter:
    """Return what to be filled with, from the first layer that is missing on."""
    if plan is None or plan.layers.stop == layers:
        return LocationFilter.absolute_start(first, 0)
    return LocationFilter.group_end(first, 0, plan.layers.stop - 1)


def _block_filter(
    conn: MoqtConnection, plan: SegmentPlan | None, blocks: int
) -> tuple[RangeFilter, ...]:
    """Return a filter for the wanted blocks, if the peer takes one (KVCS Section 5.3)."""
    setup = conn.session.peer_setup
    if plan is None or len(plan.blocks) == blocks or setup is None or not setup.max_filter_ranges:
        return ()  # what is not wanted is discarded on arrival
    ranges = ((plan.blocks.start, plan.blocks.stop - 1),)
    return (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges),)


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
