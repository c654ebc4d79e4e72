"""A cache of many layers and blocks, retrievals of a part of it, and what comes over the wire."""

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from kvcs.consumer.events import Event, ManifestAccepted, PublicationComplete, Summary
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.producer.daemon import Producer
from kvcs.producer.publication import Publication
from kvcs.profile.payload import HEADER_OCTETS
from moqt.aio import MoqtConnection
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.aio.transport import QuicTransport
from moqt.codepoints import StreamType
from tests.integration.kvcs.scene import SCOPE, CountingSink, hasty, of_kind, run

LAYERS, BLOCKS, BLOCK_TOKENS = 16, 64, 4
TOKENS = list(range(7, 7 + BLOCKS * BLOCK_TOKENS))
COMPAT = Descriptor(
    model="model",
    revision="revision",
    layers=LAYERS,
    block_tokens=BLOCK_TOKENS,
    dtype="float16",
    k_shape=(8, 64),
    v_shape=(8, 64),
)
#: Layers 8 to 15, and of each the first 10 of 64 blocks.
PART = Wish(layers=range(8, 16), blocks=range(10))
PATIENT = hasty(deadline_s=30)
#: Payload of one Object.
OCTETS = HEADER_OCTETS + Layout.of(COMPAT).section_octets(Component.K)


def tensor(component: Component, layer: int, blocks: int = BLOCKS) -> NDArray[Any]:
    """``[tokens, heads, dim]`` of a layer, different in every place."""
    noise = np.random.default_rng((component, layer))
    shape = (blocks * BLOCK_TOKENS, *COMPAT.k_shape)
    return noise.integers(0, 1 << 15, shape, np.uint16).view(np.float16)


async def publish_all(producer: Producer) -> Publication:
    """Publish the whole cache, and finish."""
    handle = producer.open(COMPAT, TOKENS)
    await handle.add_segment()
    for layer in range(LAYERS):
        await handle.add_layer(layer, tensor(Component.K, layer), tensor(Component.V, layer))
    await handle.finish()
    return handle.publication


def payload_octets(layers: int, blocks: int) -> int:
    """Octets of the Objects that so many blocks of so many layers are, K and V."""
    return 2 * layers * blocks * OCTETS


@dataclass
class Taken:
    """What came of a retrieval, and how much came with it once its manifest was there."""

    events: list[Event]
    sink: CountingSink
    streams: int
    """Octets of fetch streams that were opened since: Objects and what frames them."""

    datagrams: int
    """Octets of UDP payload since: all that QUIC adds, and a manifest that comes twice."""

    @property
    def summary(self) -> Summary:
        [complete] = of_kind(self.events, PublicationComplete)
        found: Summary = complete.summary
        return found


async def retrieve(
    spec: ConnectionSpec, *, wish: Wish = PART, settings: RetrievalSettings = PATIENT
) -> Taken:
    """Retrieve a part, and count what comes."""
    streams: Counter[tuple[MoqtConnection, int]] = Counter()
    earlier: set[tuple[MoqtConnection, int]] = set()
    datagrams: Counter[QuicTransport] = Counter()
    figures: list[tuple[int, int]] = []
    take, feed = MoqtConnection.stream_data_received, AioquicTransport.feed

    def taken(connection: MoqtConnection, stream_id: int, data: bytes, fin: bool) -> None:
        key = connection, stream_id
        if key in streams or data[:1] == bytes([StreamType.FETCH_HEADER]):
            streams[key] += len(data)
        take(connection, stream_id, data, fin)

    def fed(transport: AioquicTransport, data: bytes, size: int, address: Any) -> None:
        datagrams[transport] += len(data)
        feed(transport, data, size, address)

    def told(event: Event) -> None:
        if isinstance(event, ManifestAccepted | PublicationComplete):
            ours = retrieval._sessions.open
            of_udp = sum(datagrams[connection._transport] for connection in ours)
            new = streams.keys() - earlier
            of_streams = sum(streams[key] for key in new if key[0] in ours)
            figures.append((of_streams, of_udp))
            if isinstance(event, ManifestAccepted):
                earlier.update(streams)

    sink = CountingSink()
    expected = Expectations.of_tokens(SCOPE, COMPAT, TOKENS)
    retrieval = consume(expected, [spec], sink, wish=wish, settings=settings, on_event=told)
    with (
        mock.patch.object(MoqtConnection, "stream_data_received", taken),
        mock.patch.object(AioquicTransport, "feed", fed),
    ):
        events = await run(retrieval)
    assert isinstance(events[-1], PublicationComplete), events[-1]
    (_, udp_before), (of_streams, udp_after) = figures[0], figures[-1]
    return Taken(events, sink, of_streams, udp_after - udp_before)


def assert_is(sink: CountingSink, wish: Wish = PART) -> None:
    """What is wanted is there, octet for octet, and nothing else was placed."""
    assert wish.layers is not None
    assert wish.blocks is not None
    part = slice(wish.blocks.start * BLOCK_TOKENS, wish.blocks.stop * BLOCK_TOKENS)
    assert set(sink.placed.values()) == {1}
    assert sink.placed.total() == 2 * len(wish.layers) * len(wish.blocks)
    for layer in wish.layers:
        for component, found in ((Component.K, sink.k[layer]), (Component.V, sink.v[layer])):
            expected = tensor(component, layer)[part]
            np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
