"""A producer that listens on loopback, retrievals from it, and ways to look at both closely."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs import telemetry
from kvcs.consumer.events import Event, Failed, LayerReady
from kvcs.consumer.retrieval import (
    ConnectionSpec,
    Retrieval,
    RetrievalSettings,
    consume,
)
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component, Octets
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Segment
from kvcs.store.sink import ArraySink
from kvcs.trust.scope import Scope
from moqt.aio import ClientTls, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus

LAYERS, BLOCK_TOKENS, BLOCKS = 6, 4, 5
SCOPE = ScopeKey(bytes(range(32)))
#: A few more than whole blocks: a prompt seldom ends where a block does.
TOKENS = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 2))
COMPAT = Descriptor(
    model="model",
    revision="revision",
    layers=LAYERS,
    block_tokens=BLOCK_TOKENS,
    dtype="float16",
    k_shape=(2, 8),
    v_shape=(2, 4),
    extra={"rope": {"theta": "10000.0"}},
)
QUICK = RetrievalSettings(
    deadline_s=10, discovery_timeout_s=5, another_s=0.1, request_timeout_s=5, stall_timeout_s=5
)
#: Seconds that any one wait of a test may take.
PATIENCE_S = 20.0

Place = tuple[Component, int, int]
#: Every tensor of the cache, once.
EVERYTHING: Counter[Place] = Counter(
    (component, layer, block)
    for component in (Component.K, Component.V)
    for layer in range(LAYERS)
    for block in range(BLOCKS)
)


def tensors(layer: int, first: int = 0, blocks: int = BLOCKS) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of some blocks of a layer, ``[tokens, heads, dim]``, different in every place."""
    part = slice(first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS)
    noise = np.random.default_rng(layer)
    k, v = (
        noise.integers(0, 1 << 15, (BLOCKS * BLOCK_TOKENS, *shape), np.uint16).view(np.float16)
        for shape in (COMPAT.k_shape, COMPAT.v_shape)
    )
    return k[part], v[part]


def expectations(scope: Scope | ScopeKey = SCOPE, **others: Any) -> Expectations:
    return Expectations.of_tokens(scope, COMPAT, TOKENS, **others)


class Noticing(telemetry.Counters):
    """Counters that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = asyncio.Event()

    def add(self, counter: telemetry.Counter, amount: int = 1) -> None:
        super().add(counter, amount)
        self._counted.set()

    async def reached(self, counter: telemetry.Counter, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self[counter] < count:
                self._counted.clear()
                await self._counted.wait()


@dataclass
class Scene:
    """A producer that listens, and what is needed to reach it."""

    producer: Producer
    counters: Noticing
    spec: ConnectionSpec

    def open(self) -> PublicationHandle:
        return self.producer.open(COMPAT, TOKENS)

    def retrieve(
        self,
        sink: Any = None,
        *,
        expected: Expectations | None = None,
        more: Sequence[ConnectionSpec] = (),
        **options: Any,
    ) -> Retrieval:
        return consume(
            expected or expectations(self.producer.scope),
            [self.spec, *more],
            ArraySink() if sink is None else sink,
            **({"settings": QUICK} | options),
        )


@asynccontextmanager
async def on_stage(
    files: CertificateFiles,
    *,
    scope: Scope | ScopeKey = SCOPE,
    producer_key: Any = None,
    patience_s: float = 60.0,
    **options: Any,
) -> AsyncIterator[Scene]:
    """Have a producer listen; what the test does with it may take a minute, or what it says."""
    counters = Noticing()
    made = Producer(
        scope,
        ProducerOptions(**({"drain_s": 0.0} | options)),
        producer_key=producer_key,
        counters=counters,
    )
    async with asyncio.timeout(patience_s), made as producer:
        host, port = await producer.listen(
            "127.0.0.1", 0, tls=ServerTls(files.certificate_file, files.key_file)
        )
        spec = ConnectionSpec(uri=f"moqt://{host}:{port}/", tls=ClientTls(ca_file=files.ca_file))
        yield Scene(producer, counters, spec)


async def fill(
    handle: PublicationHandle, layers: Sequence[int] = range(LAYERS), segment: Segment | None = None
) -> None:
    """Publish layers of a segment, of one that is opened for all blocks by default."""
    if segment is None:
        segments = handle.publication.segments
        segment = segments[-1] if segments else await handle.add_segment()
    for layer in layers:
        k, v = tensors(layer, segment.first_block, segment.blocks)
        await handle.add_layer(layer, k, v, segment=segment)


async def filled(handle: PublicationHandle, segments: Sequence[int] = (BLOCKS,)) -> Publication:
    """Publish everything, in segments of so many blocks, and finish."""
    for blocks in segments:
        await fill(handle, segment=await handle.add_segment(blocks))
    await handle.finish()
    return handle.publication


def in_halves(publication: Publication, segment: Segment, layer: int) -> Iterator[None]:
    """Publish one layer; stop while each Object is half sent, and again when it is whole."""
    prepared = segment.copy(layer, *tensors(layer, segment.first_block, segment.blocks)).prepare()
    subgroups = [
        publication._open_subgroup(part.track.name, layer, priority=layer)
        for part in prepared.tracks
    ]
    for block in range(segment.blocks):
        for part, subgroup in zip(prepared.tracks, subgroups, strict=True):
            payload = b"".join(part.objects[block])
            obj = subgroup.begin(block, len(payload))
            yield
            subgroup.extend(obj, payload[: len(payload) // 2])
            yield
            subgroup.extend(obj, payload[len(payload) // 2 :])
            yield
    for subgroup in subgroups:
        subgroup.publish(segment.blocks, status=ObjectStatus.END_OF_GROUP)
        subgroup.close()
    # The rest is the publication's business; its Objects are out already.
    publication.__dict__["_publish_objects"] = lambda *_: None
    publication.publish(prepared)
    del publication.__dict__["_publish_objects"]
    if publication.manifest_due:
        publication.publish_manifest()


def corrupt(
    publication: Publication,
    track: str,
    layer: int,
    block: int,
    change: Callable[[bytearray], None],
) -> None:
    """Change the payload of one published Object, which nothing in the program can do."""
    [subgroup] = publication.tracks[track.encode()]._groups[layer]
    obj = subgroup.objects[block]
    payload = bytearray(b"".join(obj.parts))
    change(payload)
    obj.parts[:] = [bytes(payload)]


def flip(octet: int) -> Callable[[bytearray], None]:
    def change(payload: bytearray) -> None:
        payload[octet] ^= 1

    return change


class CountingSink(ArraySink):
    """Counts every placement, and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: Counter[Place] = Counter()
        self.calls: list[str] = []
        self._changed = asyncio.Event()

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        self.calls.append("begin")
        self.placed.clear()
        super().begin(descriptor, blocks)

    def place(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        self.placed[component, layer, block] += 1
        super().place(component, layer, block, tensor)
        self._changed.set()

    def done(self) -> None:
        self.calls.append("done")
        super().done()

    def abandon(self) -> None:
        self.calls.append("abandon")
        super().abandon()

    async def reached(self, count: int) -> None:
        """Return when so many tensors are in place."""
        async with asyncio.timeout(PATIENCE_S):
            while self.placed.total() < count:
                self._changed.clear()
                await self._changed.wait()


def assert_same_cache(sink: ArraySink, layers: Sequence[int] = range(LAYERS)) -> None:
    for layer in layers:
        for found, expected in zip((sink.k[layer], sink.v[layer]), tensors(layer), strict=True):
            np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


async def run(retrieval: Retrieval, patience_s: float = PATIENCE_S) -> list[Event]:
    """Run a retrieval to its end and return everything that it told."""
    async with asyncio.timeout(patience_s), retrieval:
        return [event async for event in retrieval]


def of_kind(events: Sequence[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def ready(events: Sequence[Event]) -> list[int]:
    """Return the layers that became ready, in that order."""
    return [event.layer for event in of_kind(events, LayerReady)]


def missing(failed: Failed) -> list[str]:
    """Return what is missing, as people read it."""
    return [str(gap) for gap in failed.missing]


def missing_places(failed: Failed) -> Counter[Place]:
    """Return what is missing tensor by tensor; of segments that lie one behind the other."""
    return Counter(
        (gap.track.component, layer, block)
        for gap in failed.missing
        for layer in range(gap.first_layer, gap.last_layer + 1)
        for block in range(gap.first_block, gap.last_block + 1)
    )


def hasty(**changed: Any) -> RetrievalSettings:
    return replace(QUICK, **changed)
