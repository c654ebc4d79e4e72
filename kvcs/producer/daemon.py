"""Producer: publications served to any number of consumers, over connections of both directions.

What is published is decided by :mod:`kvcs.producer.publication`, what is answered by
:mod:`kvcs.producer.answers`, what is kept by :mod:`kvcs.producer.retention`. Here are the event
loop, the threads that hash, the room in memory, and the ways to the outside: a listener, and
relays that are dialled and announced at.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from kvcs.config import ProducerSettings
from kvcs.errors import ConfigError, Expired
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.answers import Answers, Refusal
from kvcs.producer.publication import (
    MAX_MANIFEST_EVERY,
    CopiedLayer,
    Encoding,
    Publication,
    Segment,
    Tensor,
)
from kvcs.producer.retention import Retention
from kvcs.profile.naming import PublicationName, new_publication_id, short_hex
from kvcs.profile.signing import ProducerKey
from kvcs.store.source import BlockSource
from kvcs.telemetry import Counter, Counters, LogEvent
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    MoqtUri,
    NamespacePublication,
    QuicSettings,
    RequestHandler,
    Server,
    ServerTls,
    TlsSettingsError,
    open_connection,
    serve,
)
from moqt.aio.alpn import ALPN
from moqt.aio.tls import client_configuration
from moqt.codepoints import ParameterType, SessionErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.events import (
    FetchReceived,
    PeerRequestEnded,
    PublishNamespaceReceived,
    RequestId,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from moqt.session.localtrack import ByteBudget, LocalTrack
from moqt.wire.filters import LocationFilter

log = structlog.get_logger("kvcs.producer")
T = TypeVar("T")

#: Work on fewer octets is done on the event loop: a thread costs more than it saves.
_THREAD_OCTETS = 256 << 10
_HASH_THREADS = 2
#: Seconds between attempts to reach a relay: doubled each time, and shortened at random so that
#: the producers of a relay that restarts do not all come back at once.
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 30.0
#: Seconds that what was sent may take to be acknowledged when a session is closed.
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """What a producer can be told, but for keys and codecs."""

    encodings: tuple[Encoding, ...] = (Encoding(),)
    """Forms in which every segment is offered."""

    deterministic: bool = False
    """Promise that every run gives bit-identical Objects."""

    manifest_every: int = MAX_MANIFEST_EVERY
    """Completed layers between two versions of the manifest, 1 to 8."""

    store_octets: int = 4 << 30
    """Payload octets that are held, over all publications. A layer that is being added counts
    from the moment it gets its turn; its copy before that does not."""

    ttl_s: float = 3600.0
    """Seconds that a finished publication is kept."""

    store_wait_s: float = 30.0
    """Seconds that a layer waits for room."""

    drain_s: float = 10.0
    """Seconds that consumers have to finish when the producer stops."""

    connect_timeout_s: float = 10.0
    """Seconds until a relay must be reached."""

    request_timeout_s: float = 10.0
    """Seconds until a relay must answer."""

    @classmethod
    def of(cls, settings: ProducerSettings) -> Self:
        """Take the options out of the settings of a command."""
        return cls(
            encodings=tuple(Encoding.parse(text) for text in settings.encodings),
            deterministic=settings.deterministic,
            manifest_every=settings.manifest_every,
            store_octets=settings.store_octets,
            ttl_s=settings.ttl_s,
            store_wait_s=settings.store_wait_s,
            drain_s=settings.drain_s,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
        )


class PublicationHandle:
    """One publication of a producer, to be filled layer after layer. From :meth:`Producer.open`.

    As an asynchronous context manager it finishes the publication at the end of the block, and
    abandons it if the block fails.

    Attributes:
        publication: What is published; read it, and leave changes to the handle.
        tokens: The tokens that the cache is of.
    """

    def __init__(
        self,
        producer: "Producer",
        publication: Publication,
        tokens: Sequence[int],
        extra: Sequence[bytes],
        first_block: int,
    ) -> None:
        self.publication = publication
        self.tokens = tokens
        self._producer = producer
        self._extra = extra
        self._keys = producer.scope_key.block_keys(publication.descriptor, tokens, extra)
        self._next_block = first_block
        self._lock = asyncio.Lock()  # asyncio's locks are fair: layers keep the callers' order

    @property
    def name(self) -> PublicationName:
        """Its namespace, and the Publication ID in it."""
        return self.publication.name

    @property
    def usable_tokens(self) -> int:
        """Tokens in whole blocks. Those after them are not published, and are recomputed."""
        return len(self._keys) * self.publication.descriptor.block_tokens

    @property
    def blocks_left(self) -> int:
        """Whole blocks that no segment covers yet."""
        return len(self._keys) - self._next_block

    async def add_segment(
        self, blocks: int | None = None, *, appended: Sequence[int] = ()
    ) -> Segment:
        """Begin a pass over the layers, for the next blocks.

        Args:
            blocks: How many; all that are left by default. One pass of a chunked prefill is
                one segment.
            appended: Tokens that follow all those known so far. The Anchor Key stays that of
                the tokens that the publication was opened with.

        Raises:
            ConfigError: If there are not as many blocks, or if the publication would not fit
                the store even if it were the only one.
        """
        publication = self.publication
        async with self._lock:
            if appended:
                tokens = [*self.tokens, *appended]
                self._keys = self._producer.scope_key.block_keys(
                    publication.descriptor, tokens, self._extra
                )
                self.tokens = tokens
            count = self.blocks_left if blocks is None else blocks
            if not 1 <= count <= self.blocks_left:
                raise ConfigError(f"a segment of {count} blocks, {self.blocks_left} are left")
            self._producer.check_fits(publication, count)
            keys = self._keys[self._next_block : self._next_block + count]
            segment = publication.open_segment(keys)
            self._next_block += count
            await self._publish_manifest()
        log.debug(
            LogEvent.SEGMENT_OPENED,
            publication=str(self.name),
            segment=segment.number,
            blocks=count,
        )
        return segment

    def add_layer(
        self,
        layer: int,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        kv: Tensor | None = None,
        segment: Segment | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Hand over one layer.

        Copies at once, in the calling thread, before it returns: the memory is the caller's
        again. What it returns must be awaited, on the producer's event loop
        (``asyncio.run_coroutine_threadsafe`` from another thread); that encodes, hashes and
        publishes. Layers are published in the order in which they are awaited.

        Args:
            layer: From 0, in order.
            k: ``[tokens, heads, dim]`` of the descriptor's element type, or raw octets; see
                :meth:`Segment.copy <kvcs.producer.publication.Segment.copy>`.
            v: The same for V.
            kv: Instead of both: the raw octets of K and V for each block.
            segment: Which pass; the one begun last by default.

        Raises:
            ConfigError: If a tensor does not fit or, when awaited, if the layer is out of
                order. Nothing was published.
            Expired: When awaited, if there was no room in time. Nothing was published.
        """
        segments = self.publication.segments
        if segment is None:
            if not segments:
                raise ConfigError("add_layer() before add_segment()")
            segment = segments[-1]
        return self._add(segment.copy(layer, k, v, kv=kv))

    async def feed(self, source: BlockSource, *, segment_blocks: int | None = None) -> None:
        """Publish everything that a source has, at its pace, and finish.

        Abandons the publication if that fails or is cancelled.

        Args:
            source: A cache of the tokens that the publication was opened with.
            segment_blocks: Blocks of one segment; all in one by default.

        Raises:
            ConfigError: If the source is of another descriptor, or does not fit.
            Expired: If there was no room in time.
        """
        if differing := self.publication.descriptor.differences(source.descriptor):
            raise ConfigError(f"the source has another descriptor: {'; '.join(differing)}")
        try:
            while self.blocks_left:
                first = self._next_block
                segment = await self.add_segment(
                    min(self.blocks_left, segment_blocks or self.blocks_left)
                )
                await self._feed_segment(source, segment, first)
            await self.finish()
        except BaseException as exc:
            await self.abandon(f"production failed: {type(exc).__name__}")
            raise

    async def finish(self) -> None:
        """End the publication. It is served on for the producer's time to live.

        Raises:
            ConfigError: If a segment lacks layers, or the publication has ended.
        """
        async with self._lock:
            await self._publish_manifest()
            self.publication.finish()
        self._producer.finished(self.publication)

    async def abandon(self, reason: str) -> None:
        """Give the publication up (decision 5). To try again, open a new one.

        Does nothing if it has ended.
        """
        self._producer.abandoned(self.publication, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            await self.abandon(f"production failed: {kind.__name__}")
        elif not self.publication.ended:
            try:
                await self.finish()
            except ConfigError:
                await self.abandon("production ended early")
                raise

    # -- parts -----------------------------------------------------------------------------------

    async def _add(self, copied: CopiedLayer) -> None:
        producer, publication, segment = self._producer, self.publication, copied.segment
        octets = segment.layer_octets
        async with self._lock:
            await producer.reserve(octets)
            try:
                prepared = await producer.heavy(octets, copied.prepare)
            finally:
                producer.unreserve(octets)
            # Nothing runs between giving the reservation back and taking it for good.
            publication.publish(prepared)
            producer.counters.add(Counter.LAYERS_PUBLISHED)
            producer.counters.add(Counter.OBJECTS_PUBLISHED, segment.blocks * len(prepared.tracks))
            producer.counters.add(Counter.OCTETS_PUBLISHED, prepared.octets)
            await self._publish_manifest()
        log.debug(
            LogEvent.LAYER_PUBLISHED,
            publication=str(self.name),
            segment=segment.number,
            layer=copied.layer,
        )

    async def _publish_manifest(self) -> None:
        """Publish the version that is due, if one is. The lock is held."""
        publication = self.publication
        if publication.ended or not publication.manifest_due:
            return
        draft = publication.draft_manifest()
        payload = await self._producer.heavy(draft.octets_estimate, draft.encode)
        if not publication.ended:  # abandoned meanwhile
            publication.publish_manifest(draft, payload)
            self._producer.counters.add(Counter.MANIFESTS_PUBLISHED)

    async def _feed_segment(self, source: BlockSource, segment: Segment, first: int) -> None:
        loop = asyncio.get_running_loop()
        start, layers = loop.time(), source.layers(first, segment.blocks)

        def take() -> CopiedLayer | None:
            # Reading a mapped file waits for the disk, so it happens in the thread, too.
            tensors = next(layers, None)
            return None if tensors is None else segment.copy(*tensors)

        while (copied := await self._producer.heavy(_THREAD_OCTETS, take)) is not None:
            if source.ready_at_s:
                await asyncio.sleep(start + source.ready_at_s[copied.layer] - loop.time())
            await self._add(copied)


class Producer:
    """Publishes caches and serves them. An asynchronous context manager.

    Args:
        scope_key: Of the scope that is published in.
        options: Everything that has a default.
        producer_key: Signs manifests; without it they are plain.
        codecs: Codecs beyond ``raw``.
        counters: Where things are counted.

    Attributes:
        scope_key: As given.
        counters: As given, or new.
        answers: What requests are answered from.
    """

    def __init__(
        self,
        scope_key: ScopeKey,
        options: ProducerOptions | None = None,
        *,
        producer_key: ProducerKey | None = None,
        codecs: CodecRegistry | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.scope_key = scope_key
        self.counters = Counters() if counters is None else counters
        self.answers = Answers(scope_key.scope_id)
        self._options = options or ProducerOptions()
        self._producer_key = producer_key
        self._codecs = CodecRegistry() if codecs is None else codecs
        self._budget = ByteBudget(self._options.store_octets)
        self._retention = Retention(self._options.ttl_s)
        self._kept_changed = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        self._handler = _Handler(self)
        self._servers: list[Server] = []
        self._relays: list[Relay] = []
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._pool = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="kvcs-hash")

    @property
    def octets_held(self) -> int:
        """Payload octets held, and reserved for layers that are being added."""
        return self._budget.used

    # -- ways to the outside ---------------------------------------------------------------------

    async def listen(
        self,
        host: str,
        port: int,
        *,
        tls: ServerTls,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
    ) -> tuple[str, int]:
        """Accept sessions.

        Returns:
            Address and UDP port, for ``port`` 0 the one that was free.

        Raises:
            ConfigError: If the address cannot be bound or a certificate file cannot be used;
                the message names it.
        """
        try:
            server = await serve(
                host, port, tls=tls, handler=self._handler, quic=quic, config=config
            )
        except (OSError, TlsSettingsError) as exc:
            raise ConfigError(f"cannot listen on {host} port {port}: {exc}") from None
        self._servers.append(server)
        log.info(LogEvent.LISTENING, host=server.address[0], port=server.address[1])
        return server.address

    def announce_at(
        self,
        uri: str,
        *,
        tls: ClientTls | None = None,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
    ) -> "Relay":
        """Dial a relay, and keep every publication announced there from now on.

        The connection is made in the background, and made again whenever it is lost.

        Raises:
            ConfigError: If the URI or a file of ``tls`` cannot be used; the message names it.
        """
        tls = tls or ClientTls()
        try:
            client_configuration(tls, [ALPN], MoqtUri.parse(uri).host)
        except ValueError as exc:
            raise ConfigError(f"relay {uri}: {exc}") from None
        relay = Relay(uri, tls, quic, config, self._options, self.counters, self._handler)
        self._relays.append(relay)
        relay.start(self._tasks)
        return relay

    # -- publishing ------------------------------------------------------------------------------

    def open(
        self,
        descriptor: Descriptor,
        tokens: Sequence[int],
        *,
        extra: Sequence[bytes] = (),
        first_block: int = 0,
    ) -> PublicationHandle:
        """Begin a publication under a new Publication ID, and let it be discovered.

        Args:
            descriptor: What must match before the cache can be used.
            tokens: All tokens of the prefix; the last whole block gives the Anchor Key.
            extra: Extra key material of block i at index i (KVSP Section 3).
            first_block: The first block that will be published; above 0 for window layers.

        Raises:
            ConfigError: If the tokens do not fill a block, or an argument cannot be used.
        """
        keys = self.scope_key.block_keys(descriptor, tokens, extra)
        if first_block >= len(keys) or first_block < 0:
            raise ConfigError(
                f"{len(tokens)} tokens have {len(keys)} whole blocks of "
                f"{descriptor.block_tokens}, expected more than {first_block}"
            )
        name = PublicationName(
            scope_id=self.scope_key.scope_id,
            compatibility_id=self.scope_key.compatibility_id(descriptor),
            anchor_key=keys[-1],
            publication_id=new_publication_id(),
        )
        publication = Publication(
            name,
            descriptor,
            encodings=self._options.encodings,
            codecs=self._codecs,
            producer_key=self._producer_key,
            deterministic=self._options.deterministic,
            manifest_every=self._options.manifest_every,
            budget=self._budget,
            first_block=first_block,
        )
        self.answers.add(publication)
        self.counters.add(Counter.PUBLICATIONS)
        self.counters.add(Counter.MANIFESTS_PUBLISHED)
        log.info(
            LogEvent.PUBLICATION_OPENED,
            publication=str(name),
            model=descriptor.model,
            layers=descriptor.layers,
            blocks=len(keys) - first_block,
        )
        return PublicationHandle(self, publication, tokens, extra, first_block)

    async def publish(
        self, source: BlockSource, *, segment_blocks: int | None = None
    ) -> PublicationHandle:
        """Open a publication for a source and feed it to its end. See the handle's ``feed``."""
        handle = self.open(source.descriptor, source.tokens)
        await handle.feed(source, segment_blocks=segment_blocks)
        return handle

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._stack.callback(self._pool.shutdown, wait=False, cancel_futures=True)
        await self._stack.enter_async_context(self._tasks)
        self._expiry = self._tasks.create_task(self._expire())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            await self._close(0.0 if kind is not None else self._options.drain_s)
        finally:
            suppressed = await self._stack.__aexit__(kind, exc, traceback)
        return suppressed

    async def _close(self, drain_s: float) -> None:
        """Begin nothing new, let consumers finish, close everything."""
        log.info(LogEvent.STOPPING, drain_s=drain_s)
        self.answers.draining = True
        for publication in self.answers.publications:
            if not publication.ended:
                self.abandoned(publication, "the producer is stopping")
        self._expiry.cancel()
        await asyncio.gather(
            *(
                server.close(goaway_timeout_s=drain_s, drain_s=min(drain_s, _CLOSE_S))
                for server in self._servers
            ),
            *(relay.close(drain_s) for relay in self._relays),
        )
        for publication in self.answers.publications:
            self.answers.remove(publication, "the producer has stopped")
            publication.drop()
        log.info(LogEvent.STOPPED, counters=repr(self.counters))

    async def _expire(self) -> None:
        """Let go of finished publications when their time is over."""
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
                self.counters.add(Counter.PUBLICATIONS_EXPIRED)
                log.info(LogEvent.PUBLICATION_EXPIRED, publication=str(publication.name))
                self._let_go(publication, "expired")

    # -- for handles -----------------------------------------------------------------------------

    def check_fits(self, publication: Publication, blocks: int) -> None:
        """Refuse blocks for which there will not be room, whatever else is let go.

        Raises:
            ConfigError: Naming what is needed and what the store holds.
        """
        covered = sum(segment.blocks for segment in publication.segments)
        needed = publication.octets_of(covered + blocks)
        if needed > self._budget.limit:
            raise ConfigError(
                f"publication {publication.name} takes {needed} octets, "
                f"store_octets is {self._budget.limit}"
            )

    async def reserve(self, octets: int) -> None:
        """Take room in the store, letting go of finished publications if it must be.

        Raises:
            Expired: If there was none within ``store_wait_s``.
        """
        if not self._find_room(octets):
            await self._wait_for_room(octets)
        self._budget.take(octets)

    def unreserve(self, octets: int) -> None:
        """Give reserved room back."""
        self._budget.give_back(octets)
        self._wake_waiters()

    async def heavy(self, octets: int, work: Callable[[], T]) -> T:
        """Do work on ``octets`` octets: in a thread, unless that would cost more than it saves."""
        if octets < _THREAD_OCTETS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def finished(self, publication: Publication) -> None:
        """Keep a publication that was finished for its time to live."""
        self._retention.finished(publication, asyncio.get_running_loop().time())
        self._kept_changed.set()
        self._wake_waiters()  # it can make room now
        self.counters.add(Counter.PUBLICATIONS_FINISHED)
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
        self.counters.add(Counter.PUBLICATIONS_ABANDONED)
        log.warning(
            LogEvent.PUBLICATION_ABANDONED, publication=str(publication.name), reason=reason
        )
        self._let_go(publication, "abandoned")

    # -- parts -----------------------------------------------------------------------------------

    def reading(self, publication_id: bytes, change: int) -> None:
        """Count requests that are served from a publication. For the handler."""
        self._retention.reading(publication_id, change)

    def _let_go(self, publication: Publication, why: str) -> None:
        self.answers.remove(publication, why)
        self._retention.forget(publication)
        publication.drop()
        self._wake_waiters()

    def _find_room(self, octets: int) -> bool:
        budget = self._budget
        while budget.used + octets > budget.limit:
            victim = self._retention.victim()
            if victim is None:
                return False
            self.counters.add(Counter.PUBLICATIONS_EVICTED)
            log.info(LogEvent.PUBLICATION_EVICTED, publication=str(victim.name))
            self._let_go(victim, "no longer kept")
        return True

    async def _wait_for_room(self, octets: int) -> None:
        self.counters.add(Counter.BUDGET_WAITS)
        limit_s = self._options.store_wait_s
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
            self.counters.add(Counter.BUDGET_WAITS_EXPIRED)
            raise Expired(
                f"no room for {octets} octets within {limit_s} s: "
                f"{self._budget.used} of store_octets {self._budget.limit} are in use"
            ) from None

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class _Handler(RequestHandler):
    """Carries requests to :class:`Answers` and the answers back; keeps count of readers."""

    def __init__(self, producer: Producer) -> None:
        self.answers = producer.answers
        self._producer = producer
        self._reads: dict[MoqtConnection, dict[RequestId, bytes]] = {}
        self._idle: dict[MoqtConnection, asyncio.Event] = {}

    async def wait_idle(self, connection: MoqtConnection) -> None:
        """Return when nothing is served on a connection."""
        while self._reads.get(connection):
            await self._idle.setdefault(connection, asyncio.Event()).wait()

    def connection_made(self, connection: MoqtConnection) -> None:
        self._producer.counters.add(Counter.SESSIONS)
        log.info(LogEvent.SESSION_BEGAN, peer=connection.peer_address)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        track = self._find(connection, request.request_id, request.track)
        if track is not None:
            self._begin_read(connection, request.request_id, request.track)
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        track = self._find(connection, request.request_id, request.track)
        if track is None:
            return
        wanted = request.parameters.get(ParameterType.LOCATION_FILTER) or LocationFilter.none()
        if wanted.resolve_fetch(track.largest) is not None:  # otherwise the session refuses it
            self._begin_read(connection, request.request_id, request.track)
        connection.session.accept_fetch(request.request_id, track)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        track = self._find(connection, request.request_id, request.track)
        if track is not None:
            connection.session.accept_track_status(request.request_id, track)

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        self._refuse(connection, request.request_id, self.answers.published_namespace())

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        self._producer.counters.add(Counter.REQUESTS)
        answer = self.answers.namespaces(request.prefix)
        if isinstance(answer, Refusal):
            self._refuse(connection, request.request_id, answer)
        else:
            connection.session.accept_namespaces(request.request_id, answer)

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        reads = self._reads.get(connection, {})
        publication_id = reads.pop(event.request_id, None)
        if publication_id is not None:
            self._producer.reading(publication_id, -1)
        if not reads:
            self._forget(connection)

    def connection_closed(self, connection: MoqtConnection) -> None:
        for publication_id in self._reads.get(connection, {}).values():
            self._producer.reading(publication_id, -1)
        self._forget(connection)

    def _find(
        self, connection: MoqtConnection, request_id: RequestId, name: FullTrackName
    ) -> LocalTrack | None:
        self._producer.counters.add(Counter.REQUESTS)
        answer = self.answers.track(name)
        if isinstance(answer, Refusal):
            self._refuse(connection, request_id, answer)
            return None
        return answer

    def _begin_read(
        self, connection: MoqtConnection, request_id: RequestId, name: FullTrackName
    ) -> None:
        publication_id = name.namespace.fields[-1]
        self._reads.setdefault(connection, {})[request_id] = publication_id
        self._producer.reading(publication_id, +1)

    def _refuse(self, connection: MoqtConnection, request_id: RequestId, refusal: Refusal) -> None:
        self._producer.counters.add(Counter.REQUESTS_REFUSED)
        log.debug(
            LogEvent.REQUEST_REFUSED,
            peer=connection.peer_address,
            code=refusal.code.name,
            reason=refusal.reason,
        )
        connection.session.reject(request_id, refusal.code, refusal.reason)

    def _forget(self, connection: MoqtConnection) -> None:
        self._reads.pop(connection, None)
        idle = self._idle.pop(connection, None)
        if idle is not None:
            idle.set()


@dataclass(slots=True)
class _Announcement:
    publication: NamespacePublication
    watch: asyncio.Task[None]


class Relay:
    """A relay that is dialled, and at which every publication is kept announced.

    Made by :meth:`Producer.announce_at`. When the connection is lost, it is made again, with
    growing pauses, and all is announced again under the same Publication IDs.

    Attributes:
        uri: Where it is.
        connection: The session, while there is one.
    """

    def __init__(
        self,
        uri: str,
        tls: ClientTls,
        quic: QuicSettings | None,
        config: SessionConfig | None,
        options: ProducerOptions,
        counters: Counters,
        handler: _Handler,
    ) -> None:
        self.uri = uri
        self.connection: MoqtConnection | None = None
        self._tls = tls
        self._quic = quic
        self._config = config
        self._options = options
        self._counters = counters
        self._handler = handler
        self._directory = handler.answers.directory
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._updated = asyncio.Event()
        self._announced: dict[TrackNamespace, _Announcement] = {}
        self._retry_at: dict[TrackNamespace, float] = {}

    @property
    def announced(self) -> frozenset[TrackNamespace]:
        """The namespaces that the relay has taken and not revoked."""
        return frozenset(self._announced)

    async def wait_announced(self, timeout_s: float) -> None:
        """Return when the relay has taken every publication that there is.

        Raises:
            TimeoutError: If that takes longer.
        """
        async with asyncio.timeout(timeout_s):
            while not self._announced.keys() >= self._directory.matching(TrackNamespace()):
                self._updated.clear()
                await self._updated.wait()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Dial, in a task of the producer's group. For the producer."""
        self._task = tasks.create_task(self._run())

    async def close(self, drain_s: float) -> None:
        """Let the relay finish what it reads, then close. For the producer."""
        self._stopping = True
        self._changed.set()
        connection = self.connection
        if connection is None:
            if self._task is not None:
                self._task.cancel()  # it dials, or waits to dial
            return
        if drain_s > 0 and connection.closed is None:
            connection.goaway("", round(drain_s * 1000))
            try:
                async with asyncio.timeout(drain_s):
                    await self._handler.wait_idle(connection)
            except TimeoutError:
                pass
        await connection.close(
            SessionErrorCode.NO_ERROR, "producer stopped", drain_s=min(drain_s, _CLOSE_S)
        )

    async def _run(self) -> None:
        uri, backoff_s = self.uri, _FIRST_BACKOFF_S
        while not self._stopping:
            connection = self.connection = await self._dial(uri)
            uri = self.uri
            if connection is not None:
                if await self._keep_announced(connection):
                    backoff_s = _FIRST_BACKOFF_S
                if connection.going_away is not None and connection.going_away.new_session_uri:
                    uri = connection.going_away.new_session_uri
            if not self._stopping:
                self._changed.clear()
                await self._pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _dial(self, uri: str) -> MoqtConnection | None:
        try:
            connection = await open_connection(
                uri,
                tls=self._tls,
                quic=self._quic,
                config=self._config,
                handler=self._handler,
                timeout_s=self._options.connect_timeout_s,
            )
        except (OSError, ValueError, MoqtError) as exc:  # time-outs are among OSError
            self._counters.add(Counter.RELAY_FAILURES)
            log.warning(LogEvent.RELAY_UNREACHABLE, relay=uri, error=str(exc))
            return None
        self._counters.add(Counter.RELAY_CONNECTS)
        log.info(LogEvent.RELAY_CONNECTED, relay=uri)
        return connection

    async def _keep_announced(self, connection: MoqtConnection) -> bool:
        """Follow the directory until the session ends; return whether it ever got through."""
        self._directory.watch(self._changed.set)
        over = asyncio.ensure_future(connection.wait_closed())  # cancelled below
        over.add_done_callback(lambda _: self._changed.set())
        got_through = False
        try:
            while connection.closed is None and not self._stopping:
                self._changed.clear()
                if not await self._update(connection):
                    break
                got_through = True
                self._updated.set()
                await self._pause(self._next_retry())
        finally:
            self._directory.unwatch(self._changed.set)
            over.cancel()
            for announcement in self._announced.values():
                announcement.watch.cancel()
            self._announced.clear()
            self._retry_at.clear()
        if not self._stopping:
            log.warning(LogEvent.RELAY_LOST, relay=self.uri)
            await connection.close(drain_s=0.0)
            self.connection = None
        return got_through

    async def _update(self, connection: MoqtConnection) -> bool:
        """Withdraw what is gone and announce what is new; return whether the session can go on."""
        wanted = self._directory.matching(TrackNamespace())
        for namespace in [n for n in self._announced if n not in wanted]:
            announcement = self._announced.pop(namespace)
            announcement.watch.cancel()
            announcement.publication.withdraw()
            log.debug(LogEvent.WITHDRAWN, relay=self.uri, publication=_short(namespace))
        self._retry_at = {n: at for n, at in self._retry_at.items() if n in wanted}
        now = asyncio.get_running_loop().time()
        for namespace in sorted(wanted):
            if namespace in self._announced or self._retry_at.get(namespace, now) > now:
                continue
            try:
                publication = await connection.publish_namespace(
                    namespace, timeout_s=self._options.request_timeout_s
                )
            except RequestRejected as exc:
                # It may be taken later: a relay can be overloaded, or know a ghost of ours.
                retry_s = _LAST_BACKOFF_S if exc.retry_ms is None else exc.retry_ms / 1000
                self._retry_at[namespace] = now + max(retry_s, _FIRST_BACKOFF_S)
                log.warning(LogEvent.ANNOUNCE_FAILED, relay=self.uri, error=str(exc))
                continue
            except (MoqtError, TimeoutError) as exc:
                log.warning(LogEvent.ANNOUNCE_FAILED, relay=self.uri, error=str(exc))
                return False
            self._announced[namespace] = _Announcement(
                publication, asyncio.ensure_future(self._watch(namespace, publication))
            )
            log.info(LogEvent.ANNOUNCED, relay=self.uri, publication=_short(namespace))
        return True

    async def _watch(self, namespace: TrackNamespace, publication: NamespacePublication) -> None:
        """Have a namespace announced again, after a pause, that the relay revoked."""
        await publication.gone.wait()
        del self._announced[namespace]
        self._retry_at[namespace] = asyncio.get_running_loop().time() + _FIRST_BACKOFF_S
        self._changed.set()

    def _next_retry(self) -> float | None:
        if not self._retry_at:
            return None
        return max(0.0, min(self._retry_at.values()) - asyncio.get_running_loop().time())

    async def _pause(self, seconds: float | None) -> None:
        """Wait for a change, or for some time."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def _short(namespace: TrackNamespace) -> str:
    return "/".join(("kvcs-1", *(short_hex(octets) for octets in namespace.fields[1:])))
