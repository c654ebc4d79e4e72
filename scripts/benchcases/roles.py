"""What the processes do: a producer, a relay, consumers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from benchcases import tokens, usage
from benchcases.counting import Asked, SentOctets
from benchcases.ends import LIMIT_S, Cache, Place, Role, engine
from kvcs.consumer.events import Event, LayerReady, ManifestAccepted
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, Wish, consume
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import MAX_MANIFEST_EVERY
from kvcs.producer.relay import Relay as RelayLink
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import PublicationName
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink, BlockSink
from kvcs.telemetry import Counter, Counters
from moqt.aio import ClientTls, MoqtConnection, QuicSettings, ServerTls, connect
from moqt.aio.tracks import Subscription
from moqt.relay.server import Relay, RelayOptions
from moqt.session.config import SessionConfig
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter

#: Data tracks of segment 0.
_TRACKS = ("k.raw.s0", "v.raw.s0")
#: Seconds that an announcement may take.
_ANNOUNCE_S = 10.0


class _Noticing(Counters):
    """Counters that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def add(self, counter: Counter, amount: int = 1) -> None:
        super().add(counter, amount)
        self._changed.set()

    async def changed(self) -> None:
        """Return once something has been counted after this was called."""
        self._changed.clear()
        await self._changed.wait()


class ProducerEnd(Role):
    """A producer that listens."""

    def __init__(
        self,
        place: Place,
        *,
        datagram: int | None = 1452,
        ttl_s: float = 3600.0,
        store_octets: int = 4 << 30,
        manifest_every: int = MAX_MANIFEST_EVERY,
        codec: str = "raw",
    ) -> None:
        super().__init__(place)
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=engine())
        self._options = ProducerOptions(
            encodings=(Encoding(codec),),
            ttl_s=ttl_s,
            store_octets=store_octets,
            drain_s=0.2,
            manifest_every=manifest_every,
        )
        self._counters = _Noticing()
        self._layers_at: list[float] = []
        self._producing: asyncio.Task[None] | None = None
        self._links: list[RelayLink] = []
        self._sent, self._asked = SentOctets(), Asked()

    async def start(self, stack: AsyncExitStack) -> None:
        scope, key = self.place.shared, self.place.producer_key
        self._producer = await stack.enter_async_context(
            Producer(scope, self._options, producer_key=key, counters=self._counters)
        )
        files, asks = self.place.certificates, self.place.issuer is not None
        _, self._port = await self._producer.listen(
            "127.0.0.1",
            0,
            tls=ServerTls(files.certificate_file, files.key_file, files.ca_file if asks else None),
            quic=self._quic,
            authority=tokens.authority(self.place) if asks else None,
        )

    async def port(self) -> int:
        return self._port

    async def announce(self, port: int) -> None:
        """Dial a relay; everything is announced there from now on."""
        link = self._producer.announce_at(
            f"moqt://127.0.0.1:{port}/",
            tls=ClientTls(ca_file=self.place.certificates.ca_file),
            quic=self._quic,
        )
        self._links.append(link)
        await link.wait_announced(_ANNOUNCE_S)

    async def publish(self, cache: Cache) -> dict[str, Any]:
        """Publish a cache whole; return once the relay knows of it."""
        began = time.monotonic()
        handle = self._open(cache)
        await handle.feed(cache.source)
        seconds = time.monotonic() - began
        await self._announced()
        return {"seconds": seconds, "octets": handle.publication.octets}

    async def prepare(self, cache: Cache) -> None:
        """Open a publication, of which layers are handed over on demand."""
        self._handle = self._open(cache)
        self._layers = deque(cache.source.layers(0, cache.blocks))
        await self._handle.add_segment()
        await self._announced()

    async def hand_over(self, layers: int) -> None:
        """Publish so many more layers of it."""
        for _ in range(layers):
            await self._handle.add_layer(*self._layers.popleft())

    async def finish(self) -> None:
        """Publish what is left of it."""
        await self.hand_over(len(self._layers))
        await self._handle.finish()

    async def sent_octets(self) -> int:
        """Octets that were handed to connections so far, each once however often it is sent."""
        return self._sent.octets

    async def subscribed(self) -> dict[str, int]:
        """How many subscriptions were asked for here so far, and how many stand."""
        return {"asked": self._asked.subscriptions, "open": len(self._asked.open)}

    async def until_unsubscribed(self, wait_s: float) -> int:
        """Wait until nobody is subscribed here; return how many are after that time at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._asked.open:
                    self._asked.changed.clear()
                    await self._asked.changed.wait()
        return len(self._asked.open)

    async def produce(self, cache: Cache, interval_s: float, lead_s: float) -> None:
        """Begin to publish a cache layer by layer, some time after the next request came."""
        self._layers_at = []
        handle = self._open(cache)
        await handle.add_segment()
        await self._announced()
        self._producing = asyncio.create_task(self._produce(handle, cache, interval_s, lead_s))

    async def reached(self, layers: int) -> None:
        """Return when so many layers have been handed over."""
        while len(self._layers_at) < layers:
            await self._counters.changed()

    async def produced(self) -> list[float]:
        """Wait for the end; return when each layer was handed over, by the monotonic clock."""
        assert self._producing is not None
        await self._producing
        return self._layers_at

    async def name(self) -> PublicationName:
        """The publication opened last."""
        return self._name

    async def left(self, wait_s: float) -> dict[str, int]:
        """Return what is still held when nothing should be, after a while at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._producer.octets_held:
                    await self._counters.changed()
        return {
            "publications": len(tuple(self._producer.answers.publications)),
            "octets": self._producer.octets_held,
        }

    async def _announced(self) -> None:
        for link in self._links:
            await link.wait_announced(_ANNOUNCE_S)

    def _open(self, cache: Cache) -> PublicationHandle:
        source = cache.source
        handle = self._producer.open(source.descriptor, source.tokens)
        self._name = handle.name
        return handle

    async def _produce(
        self, handle: PublicationHandle, cache: Cache, interval_s: float, lead_s: float
    ) -> None:
        layers = list(cache.source.layers(0, cache.blocks))
        before = self._counters[Counter.REQUESTS]
        while self._counters[Counter.REQUESTS] == before:
            await self._counters.changed()
        await asyncio.sleep(lead_s)
        for layer in layers:
            self._layers_at.append(time.monotonic())
            await handle.add_layer(*layer)
            await asyncio.sleep(interval_s)
        await handle.finish()


class RelayEnd(Role):
    """A relay.

    Args:
        place: See :class:`Role`.
        datagram: UDP payload sent at most; None has it found.
        upstream: Port of the relay to ask at.
        options: See :class:`RelayOptions`.
    """

    def __init__(
        self,
        place: Place,
        *,
        datagram: int | None = 1452,
        upstream: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(place)
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=engine())
        self._upstream = upstream
        self._options = RelayOptions(**options)

    async def start(self, stack: AsyncExitStack) -> None:
        files = self.place.certificates
        self._relay = await stack.enter_async_context(Relay(self._options, quic=self._quic))
        tls = ServerTls(files.certificate_file, files.key_file)
        _, self._port = await self._relay.listen("127.0.0.1", 0, tls=tls)
        if self._upstream is not None:
            self._relay.ask_at(
                f"moqt://127.0.0.1:{self._upstream}/", tls=ClientTls(ca_file=files.ca_file)
            )

    async def port(self) -> int:
        return self._port

    async def held(self) -> dict[str, int]:
        """What is in its cache."""
        return {"octets": self._relay.octets_held, "tracks": self._relay.tracks_held}


class DiscardingSink:
    """Takes verified tensors and keeps none of them; looks around every so often."""

    def __init__(self, every: int, look: Callable[[int], None]) -> None:
        self.placed = 0
        self._every = every
        self._look = look

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        self._look(0)

    def place(self, component: Component, layer: int, block: int, tensor: Any) -> None:
        self.placed += 1
        if self._every and not self.placed % self._every:
            self._look(self.placed)

    def done(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class ConsumerEnd(Role):
    """A consumer. Everything it takes is verified, against signed manifests."""

    def __init__(
        self, place: Place, *, port: int, datagram: int | None = 1452, stream_window: int = 8 << 20
    ) -> None:
        super().__init__(place)
        self._uri = f"moqt://127.0.0.1:{port}/"
        files = place.certificates
        self._tls, self._config = ClientTls(ca_file=files.ca_file), SessionConfig()
        if place.issuer is not None:
            shown = files.client_certificate_file, files.client_key_file
            self._tls = ClientTls(files.ca_file, certificate_file=shown[0], key_file=shown[1])
            self._config = SessionConfig(tokens=partial(tokens.issued, place))
        self._quic = QuicSettings(
            max_datagram_octets=datagram, stream_window=stream_window, engine=engine()
        )
        key = place.producer_key
        self._trusted = {key.kid: key.public_key}
        self._standing: MoqtConnection | None = None
        self._stalled: list[Subscription] = []
        self._stack = AsyncExitStack()

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._stack)

    async def consume(
        self,
        cache: Cache,
        sink: str = "arrays",
        *,
        eager: bool = False,
        every: int = 0,
        other: int | None = None,
        layers: range | None = None,
        codec: str = "raw",
        stall_s: float = 30.0,
        connections: int = 1,
        processes: bool = False,
    ) -> dict[str, Any]:
        """Retrieve a cache once, over connections of its own.

        Args:
            cache: Which.
            sink: ``arrays`` that are there already, as an engine has them; ``allocate`` them;
                ``shared``, where other processes can place, too; or ``discard``.
            eager: See :class:`RetrievalSettings`.
            every: Note the time every so many Objects, from when the first is asked for; for
                ``discard``.
            other: Process id of the producer, to note the memory of both ends as well.
            layers: Which; None: all.
            codec: In which its tensors are to come.
            stall_s: How long nothing new may come.
            connections: See :class:`RetrievalSettings`.
            processes: See :class:`RetrievalSettings`.
        """
        marks: list[tuple[int, float]] = []
        samples: list[tuple[int, int, int]] = []

        def look(objects: int) -> None:
            marks.append((objects, time.monotonic()))
            if other is not None:
                samples.append((objects, usage.resident(), usage.resident(other)))

        source = cache.source
        where: BlockSink
        if sink == "discard":
            where = DiscardingSink(every, look)
        elif sink == "shared":
            where = SharedArraySink()
        else:
            where = _arrays(cache, sink == "arrays")
        expected = Expectations.of_tokens(
            self.place.shared,
            source.descriptor,
            source.tokens,
            trusted=self._trusted,
            require_signature=True,
        )
        spec = ConnectionSpec(uri=self._uri, tls=self._tls, quic=self._quic, config=self._config)
        times: dict[str, list[float]] = {"ready": [], "manifest": []}
        settings = RetrievalSettings(
            deadline_s=LIMIT_S,
            stall_timeout_s=stall_s,
            eager=eager,
            connections=connections,
            processes=processes,
        )
        wish = Wish(layers=layers, codecs=(codec,))
        before = await self.reset_peak()
        self._ticking.begin()
        cpu, began = usage.cpu_s(), time.monotonic()
        async with consume(
            expected, [spec], where, wish=wish, settings=settings, on_event=partial(_note, times)
        ) as retrieval:
            complete = await retrieval.result()
            seconds = time.monotonic() - began
        stalls = self._ticking.end()
        summary = complete.summary
        return stalls | {
            "seconds": seconds,
            "octets": summary.octets,
            "objects": summary.objects,
            "attested": summary.attested,
            "duplicates": summary.duplicates,
            "rejected": summary.rejected,
            "cpu_s": usage.cpu_s() - cpu,
            "rss_before": before,
            "peak": usage.peak(),
            "began": began,
            "ready_at": times["ready"],
            "manifest_s": times["manifest"][0] - began,
            "marks": marks,
            "samples": samples,
        }

    async def stall(self, name: PublicationName, objects: int) -> int:
        """Subscribe to the data tracks of segment 0, take some Objects of each, and no more."""
        if self._standing is None:
            self._standing = await self._connect(self._stack)
        taken = 0
        for subscription in await self._subscribe(self._standing, name):
            self._stalled.append(subscription)
            for _ in range(objects):
                item = await anext(subscription)
                taken += isinstance(item, ObjectReceived)
        return taken

    async def stalled(self) -> dict[str, Any]:
        """Whether that connection is still there, and how those subscriptions ended that did."""
        ended = (subscription.ended for subscription in self._stalled)
        return {
            "connected": self._standing is not None and self._standing.closed is None,
            "ended": sorted({getattr(end.code, "name", "?") for end in ended if end is not None}),
        }

    async def visit(self, name: PublicationName, times: int, *, anew: bool) -> None:
        """Subscribe to the data tracks of segment 0, take an Object of each, and leave.

        Args:
            name: The publication.
            times: How often, one after the other.
            anew: Each time over a connection of its own, which is closed to leave; else over one,
                where the subscriptions are cancelled.
        """
        for _ in range(times):
            async with AsyncExitStack() as stack:
                if anew:
                    connection = await self._connect(stack)
                else:
                    if self._standing is None:
                        self._standing = await self._connect(self._stack)
                    connection = self._standing
                subscriptions = await self._subscribe(connection, name)
                for subscription in subscriptions:
                    while not isinstance(await anext(subscription), ObjectReceived):
                        pass
                if not anew:
                    for subscription in subscriptions:
                        subscription.cancel()

    async def _connect(self, stack: AsyncExitStack) -> MoqtConnection:
        return await stack.enter_async_context(connect(self._uri, tls=self._tls, quic=self._quic))

    async def _subscribe(
        self, connection: MoqtConnection, name: PublicationName
    ) -> list[Subscription]:
        return [
            await connection.subscribe(
                name.track(track.encode()), fill=LocationFilter.absolute_start(0, 0)
            )
            for track in _TRACKS
        ]


def _note(times: dict[str, list[float]], event: Event) -> None:
    if isinstance(event, LayerReady):
        times["ready"].append(time.monotonic())
    elif isinstance(event, ManifestAccepted):
        times["manifest"].append(time.monotonic())


def _arrays(cache: Cache, at_hand: bool) -> ArraySink:
    if not at_hand:
        return ArraySink()
    layout = Layout.of(cache.source.descriptor)
    tokens = cache.blocks * cache.block_tokens
    k, v = (
        [np.full((tokens, *shape[1:]), 0, layout.dtype) for _ in range(layout.layers)]
        for shape in (layout.k_shape, layout.v_shape)
    )
    return ArraySink(k, v)
