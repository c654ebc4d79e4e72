"""The producer over real QUIC on loopback: what a consumer sees of it, at any time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.errors import ConfigError, Expired
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, block_keys_sha256
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.segment import Encoding
from kvcs.profile.manifest import Manifest
from kvcs.profile.payload import Block
from kvcs.profile.signing import ProducerKey, verify_manifest
from kvcs.store.source import SafetensorsSource, SyntheticSource
from kvcs.telemetry import Counter, Counters
from moqt.aio import ClientTls, MoqtConnection, ServerTls, connect
from moqt.aio.tls import make_certificates
from moqt.codepoints import ObjectStatus, PublishDoneCode, RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import (
    FillEnded,
    NamespaceAppeared,
    NamespaceGone,
    ObjectReceived,
)
from moqt.wire.filters import LocationFilter

pytestmark = pytest.mark.network

SCOPE = ScopeKey(bytes(range(32)))
DATA = Path(__file__).parents[2] / "data" / "smollm2-128.safetensors"
LAYERS, BLOCK_TOKENS, BLOCKS = 6, 4, 5
FROM_THE_START = LocationFilter.absolute_start(0, 0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServerTls, ClientTls]:
    files = make_certificates(tmp_path_factory.mktemp("tls"))
    return ServerTls(files.certificate_file, files.key_file), ClientTls(files.ca_file)


Certificates = tuple[ServerTls, ClientTls]


class Noticing(Counters):
    """Counters that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = asyncio.Event()

    def add(self, counter: Counter, amount: int = 1) -> None:
        super().add(counter, amount)
        self._counted.set()

    async def noticed(self, counter: Counter) -> None:
        while not self[counter]:
            self._counted.clear()
            await self._counted.wait()


@asynccontextmanager
async def producing(
    certificates: Certificates, *, producer_key: ProducerKey | None = None, **options: Any
) -> AsyncIterator[tuple[Producer, str]]:
    made = Producer(
        SCOPE,
        ProducerOptions(**({"drain_s": 1.0} | options)),
        producer_key=producer_key,
        counters=Noticing(),
    )
    async with asyncio.timeout(30), made as producer:
        host, port = await producer.listen("127.0.0.1", 0, tls=certificates[0])
        yield producer, f"moqt://{host}:{port}"


def descriptor(**changed: Any) -> Descriptor:
    members: dict[str, Any] = {
        "model": "tiny",
        "revision": "1",
        "layers": LAYERS,
        "block_tokens": BLOCK_TOKENS,
        "dtype": "float16",
        "k_shape": (2, 8),
        "v_shape": (2, 4),
    }
    return Descriptor(**(members | changed))


def tensors(layer: int, tokens: int = BLOCKS * BLOCK_TOKENS) -> Sequence[NDArray[Any]]:
    noise = np.random.Generator(np.random.PCG64(layer))
    return [noise.random((tokens, 2, dim)).astype(np.float16) for dim in (8, 4)]


def pairs(tokens: int, first: int = 0) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """K and V of all layers, from one on."""
    return [(k, v) for k, v in (tensors(layer, tokens) for layer in range(first, LAYERS))]


def opened(producer: Producer) -> PublicationHandle:
    return producer.open(descriptor(), range(BLOCKS * BLOCK_TOKENS + 1))


async def fill(handle: PublicationHandle, layers: int = LAYERS) -> None:
    for layer in range(layers):
        await handle.add_layer(layer, *tensors(layer))


async def retrieve(connection: MoqtConnection, track: FullTrackName) -> dict[Location, bytes]:
    """Subscribe with the exactly-once pattern, until the track ends; each Object once."""
    subscription = await connection.subscribe(track, fill=FROM_THE_START)
    found: dict[Location, bytes] = {}
    async for event in subscription:
        if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
            assert event.location not in found, f"{event.location} came twice"
            found[event.location] = event.payload
        assert not isinstance(event, FillEnded) or event.complete
    assert subscription.ended is not None
    assert subscription.ended.code == PublishDoneCode.TRACK_ENDED
    return found


def check(found: dict[Location, bytes], which: int) -> None:
    assert sorted(found) == [Location(g, o) for g in range(LAYERS) for o in range(BLOCKS)]
    for layer in range(LAYERS):
        whole = b"".join(
            bytes(Block.decode(found[Location(layer, n)], group_id=layer, object_id=n).data)
            for n in range(BLOCKS)
        )
        assert whole == tensors(layer)[which].tobytes()


async def test_a_consumer_that_comes_before_during_or_after_gets_each_object_once(
    certificates: Certificates,
) -> None:
    async with producing(certificates) as (producer, uri):
        handle = opened(producer)
        await handle.add_segment()
        tracks = [handle.name.track(name) for name in (b"k.raw.s0", b"v.raw.s0")]
        async with connect(uri, tls=certificates[1]) as before:
            early = [asyncio.ensure_future(retrieve(before, track)) for track in tracks]
            await fill(handle, LAYERS // 2)
            async with connect(uri, tls=certificates[1]) as during:
                middle = [asyncio.ensure_future(retrieve(during, track)) for track in tracks]
                for layer in range(LAYERS // 2, LAYERS):
                    await handle.add_layer(layer, *tensors(layer))
                await handle.finish()
                for which, (one, other) in enumerate(zip(early, middle, strict=True)):
                    check(await one, which)
                    check(await other, which)
        async with connect(uri, tls=certificates[1]) as after:
            for which, track in enumerate(tracks):
                check(await retrieve(after, track), which)


async def test_a_late_consumer_gets_the_current_manifest_and_an_early_one_every_version(
    certificates: Certificates,
) -> None:
    key = ProducerKey.generate()
    async with (
        producing(certificates, producer_key=key, manifest_every=2) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = opened(producer)
        name = handle.name.track(b"manifest.cose")
        early = await consumer.subscribe(name, fill=LocationFilter.relative(1))
        await handle.add_segment()
        await fill(handle)
        await handle.finish()
        versions = [e async for e in early if isinstance(e, ObjectReceived)]
        late = await consumer.subscribe(name, fill=LocationFilter.relative(1))
        [current] = [e async for e in late if isinstance(e, ObjectReceived)]

    assert [e.location for e in versions] == [Location(n, 0) for n in range(len(versions))]
    assert len(versions) == 2 + LAYERS // 2
    assert current.location == versions[-1].location
    assert current.payload == versions[-1].payload
    manifest = Manifest.from_json(verify_manifest(current.payload, {key.kid: key.public_key}))
    assert manifest.complete
    assert manifest.check_tokens(SCOPE.block_keys(descriptor(), range(BLOCKS * BLOCK_TOKENS))) == (
        0,
    )


async def test_a_finished_publication_answers_a_fetch_of_some_layers(
    certificates: Certificates,
) -> None:
    async with (
        producing(certificates) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = opened(producer)
        async with handle:
            await handle.add_segment()
            await fill(handle)
        fetch = await consumer.fetch(
            handle.name.track(b"k.raw.s0"),
            location_filter=LocationFilter.group_end(2, 0, 3),
        )
        found = [e.location for e in [e async for e in fetch] if isinstance(e, ObjectReceived)]
        assert fetch.ended is not None
        assert fetch.ended.complete

    assert found == [Location(g, o) for g in (2, 3) for o in range(BLOCKS)]


async def test_publications_are_discovered_as_they_come_and_go(certificates: Certificates) -> None:
    async with (
        producing(certificates) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        one = opened(producer)
        seen = await consumer.subscribe_namespace(one.name.prefix)
        assert await anext(seen) == NamespaceAppeared(
            request_id=seen.request_id, namespace=one.name.namespace
        )
        other = opened(producer)
        assert await anext(seen) == NamespaceAppeared(
            request_id=seen.request_id, namespace=other.name.namespace
        )
        await one.abandon("no longer wanted")
        assert await anext(seen) == NamespaceGone(
            request_id=seen.request_id, namespace=one.name.namespace
        )


async def test_what_does_not_exist_is_refused_as_such_and_the_session_goes_on(
    certificates: Certificates,
) -> None:
    async with (
        producing(certificates) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = opened(producer)
        for name in (b"manifest.cose", b"k.raw.s7", b""):
            with pytest.raises(RequestRejected) as refused:
                await consumer.subscribe(handle.name.track(name))
            assert refused.value.code == RequestErrorCode.DOES_NOT_EXIST
        with pytest.raises(RequestRejected) as refused:
            await consumer.subscribe_namespace(TrackNamespace.of(b"kvcs-1"))
        assert refused.value.code == RequestErrorCode.UNAUTHORIZED
        with pytest.raises(RequestRejected) as refused:
            await consumer.publish_namespace(handle.name.namespace)
        assert refused.value.code == RequestErrorCode.UNINTERESTED
        status = await consumer.track_status(handle.name.track(b"manifest"))
        assert status.largest == Location(0, 0)
        assert producer.counters[Counter.REQUESTS_REFUSED] == 5


async def test_an_abandoned_publication_ends_with_an_error_and_is_gone(
    certificates: Certificates,
) -> None:
    async with (
        producing(certificates) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = opened(producer)
        await handle.add_segment()
        await fill(handle, 2)
        subscription = await consumer.subscribe(handle.name.track(b"k.raw.s0"))
        await handle.abandon("the engine failed")
        async for _ in subscription:
            pass
        assert subscription.ended is not None
        assert subscription.ended.code == PublishDoneCode.INTERNAL_ERROR
        assert subscription.ended.reason == "abandoned: the engine failed"
        with pytest.raises(RequestRejected) as refused:
            await consumer.subscribe(handle.name.track(b"k.raw.s0"))
        assert refused.value.code == RequestErrorCode.DOES_NOT_EXIST
        assert producer.octets_held == 0


async def test_layers_may_be_handed_over_from_another_thread_which_reuses_its_memory(
    certificates: Certificates,
) -> None:
    async with producing(certificates) as (producer, uri):
        handle = opened(producer)
        await handle.add_segment()
        loop = asyncio.get_running_loop()
        futures = []

        def prefill() -> None:
            k, v = (np.empty_like(a) for a in tensors(0))
            for layer in range(LAYERS):
                k[:], v[:] = tensors(layer)
                adding = handle.add_layer(layer, k, v)
                futures.append(asyncio.run_coroutine_threadsafe(adding, loop))

        thread = threading.Thread(target=prefill)
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.gather(*map(asyncio.wrap_future, futures))
        await handle.finish()
        async with connect(uri, tls=certificates[1]) as consumer:
            check(await retrieve(consumer, handle.name.track(b"k.raw.s0")), 0)


async def test_a_recorded_cache_is_published_in_segments_and_comes_back_whole(
    certificates: Certificates,
) -> None:
    source = SafetensorsSource(DATA)
    async with (
        producing(certificates, encodings=(Encoding(joint=True),)) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = await producer.publish(source, segment_blocks=3)
        assert handle.usable_tokens == 128
        assert [s.blocks for s in handle.publication.segments] == [3, 3, 2]
        found = [
            await retrieve(consumer, handle.name.track(b"kv.raw.s%d" % number))
            for number in range(3)
        ]

    section = 16 * 3 * 64 * 2
    for layer, k, v in source.layers(0, 8):
        data = [
            payload[68:]
            for part in found
            for location, payload in sorted(part.items())
            if location.group == layer
        ]
        assert b"".join(d[:section] for d in data) == k.tobytes()
        assert b"".join(d[section:] for d in data) == v.tobytes()


async def test_a_source_is_published_at_its_pace(certificates: Certificates) -> None:
    source = SyntheticSource(descriptor(), 20, layer_interval_s=0.02)
    loop = asyncio.get_running_loop()
    async with producing(certificates) as (producer, _):
        start = loop.time()
        await producer.publish(source)

    assert loop.time() - start >= LAYERS * 0.02


async def test_a_source_that_fails_leaves_an_abandoned_publication(
    certificates: Certificates,
) -> None:
    class Failing(SyntheticSource):
        def layers(self, first_block: int, blocks: int) -> Any:
            yield from list(super().layers(first_block, blocks))[:2]
            raise OSError("the disk is gone")

    async with producing(certificates) as (producer, _):
        with pytest.raises(OSError, match="the disk is gone"):
            await producer.publish(Failing(descriptor(), 20))

        assert producer.answers.publications == ()
        assert producer.octets_held == 0
        assert producer.counters[Counter.PUBLICATIONS_ABANDONED] == 1


async def test_a_prompt_has_usable_tokens_in_whole_blocks_only(certificates: Certificates) -> None:
    async with producing(certificates) as (producer, _):
        handle = producer.open(descriptor(), range(BLOCKS * BLOCK_TOKENS + 3))
        assert handle.usable_tokens == BLOCKS * BLOCK_TOKENS
        with pytest.raises(ConfigError, match="3 tokens have 0 whole blocks of 4"):
            producer.open(descriptor(), range(3))
        with pytest.raises(ConfigError, match="before add_segment"):
            await handle.add_layer(0, *tensors(0))
        with pytest.raises(ConfigError, match="a segment of 6 blocks, 5 are left"):
            await handle.add_segment(6)


async def test_tokens_that_are_appended_become_a_segment_of_the_same_publication(
    certificates: Certificates,
) -> None:
    tokens = range(BLOCKS * BLOCK_TOKENS)
    async with producing(certificates) as (producer, _):
        handle = producer.open(descriptor(), tokens)
        anchor = handle.name.anchor_key
        await handle.add_segment()
        await fill(handle)
        await handle.add_segment(appended=[100, 101, 102, 103, 104])
        assert handle.usable_tokens == (BLOCKS + 1) * BLOCK_TOKENS
        for layer in range(LAYERS):
            await handle.add_layer(layer, *tensors(layer, BLOCK_TOKENS))
        await handle.finish()

    keys = SCOPE.block_keys(descriptor(), [*tokens, 100, 101, 102, 103])
    entries = [segment.entry() for segment in handle.publication.segments]
    assert anchor == keys[BLOCKS - 1]
    assert [(e.first_block, e.blocks) for e in entries] == [(0, BLOCKS), (BLOCKS, 1)]
    assert entries[1].block_keys_sha256 == block_keys_sha256(keys[BLOCKS:])


async def test_a_block_that_fills_up_takes_the_tokens_left_over_and_one_version(
    certificates: Certificates,
) -> None:
    tokens = range(BLOCKS * BLOCK_TOKENS + 1)
    async with producing(certificates) as (producer, _):
        handle = opened(producer)
        await handle.add_segment()
        await fill(handle)
        versions = handle.publication.versions
        with pytest.raises(ConfigError, match="at least one whole block"):
            await handle.append([100, 101], pairs(3))
        with pytest.raises(ConfigError, match=r"float16 \[3, 2, 8\], expected"):
            await handle.append([100, 101, 102], pairs(3))
        with pytest.raises(ConfigError, match=f"{LAYERS - 1} layers of segment 1, expected"):
            await handle.append([100, 101, 102], pairs(4, first=1))
        assert (list(handle.tokens), handle.publication.versions) == (list(tokens), versions)

        # One more token than the block takes, whose K and V are there already.
        layers = pairs(5)
        segment = await handle.append([100, 101, 102, 103], layers)

        assert (segment.first_block, segment.blocks, segment.complete) == (BLOCKS, 1, True)
        assert handle.publication.versions == versions + 1
        keys = SCOPE.block_keys(descriptor(), [*tokens, 100, 101, 102])
        assert segment.entry().block_keys_sha256 == block_keys_sha256(keys[BLOCKS:])
        assert handle.blocks_left == 0
        await handle.append([104, 105, 106], pairs(4))
        await handle.finish()
        with pytest.raises(ConfigError, match="is finished"):
            await handle.append([1, 2, 3, 4], layers)


async def test_what_is_appended_waits_for_room_and_fails_without_it(
    certificates: Certificates,
) -> None:
    handle_octets = 6 * BLOCKS * (2 * 68 + BLOCK_TOKENS * 2 * 12 * 2) + 40_000
    async with producing(certificates, store_octets=handle_octets, store_wait_s=0.05) as (
        producer,
        _,
    ):
        handle = opened(producer)
        await handle.add_segment()
        await fill(handle)
        tokens = [100 + number for number in range(BLOCK_TOKENS * BLOCKS * 9)]
        layers = pairs(len(tokens))
        with pytest.raises(ConfigError, match="store_octets"):
            await handle.append(tokens, layers)
        assert len(handle.tokens) == BLOCKS * BLOCK_TOKENS + 1


async def test_what_a_source_has_beyond_the_prefix_is_appended(
    certificates: Certificates,
) -> None:
    source = SyntheticSource(descriptor(), 9 * BLOCK_TOKENS + 2)
    async with producing(certificates) as (producer, _):
        handle = producer.open(descriptor(), source.tokens[: 4 * BLOCK_TOKENS])
        await handle.feed(source, segment_blocks=2, append_blocks=2)

    entries = [segment.entry() for segment in handle.publication.segments]
    assert [(e.first_block, e.blocks) for e in entries] == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 1)]
    assert handle.publication.ended
    keys = SCOPE.block_keys(descriptor(), source.tokens)
    assert handle.name.anchor_key == keys[3]
    assert entries[-1].block_keys_sha256 == block_keys_sha256(keys[8:9])


async def test_a_source_of_another_descriptor_is_refused_naming_the_member(
    certificates: Certificates,
) -> None:
    async with producing(certificates) as (producer, _):
        handle = opened(producer)
        with pytest.raises(ConfigError, match='revision: "1" and "2"'):
            await handle.feed(SyntheticSource(descriptor(revision="2"), 20))


async def test_a_block_of_code_that_fails_abandons_its_publication(
    certificates: Certificates,
) -> None:
    async with producing(certificates) as (producer, _):
        handle = opened(producer)
        with pytest.raises(ZeroDivisionError):
            async with handle:
                raise ZeroDivisionError
        assert handle.publication.abandoned == "production failed: ZeroDivisionError"
        early = opened(producer)
        await early.add_segment()
        with pytest.raises(ConfigError, match="0 of 6 layers"):
            async with early:
                pass
        assert early.publication.abandoned == "production ended early"


# -- room ----------------------------------------------------------------------------------------


def room_for(publications: float) -> int:
    """Return octets for so many whole publications, manifests included."""
    layer = 2 * BLOCKS * 68 + sum(a.nbytes for a in tensors(0))
    return int(publications * (LAYERS * layer + 5_600))


async def test_finished_publications_make_room_oldest_first(certificates: Certificates) -> None:
    async with producing(certificates, store_octets=room_for(2.5)) as (producer, _):
        made = []
        for _ in range(4):
            async with opened(producer) as handle:
                await handle.add_segment()
                await fill(handle)
            made.append(handle.publication)

        assert producer.answers.publications == tuple(made[-2:])
        assert producer.counters[Counter.PUBLICATIONS_EVICTED] == 2
        assert producer.octets_held <= room_for(2.5)


async def test_who_was_refused_a_fetch_of_nothing_does_not_keep_a_publication(
    certificates: Certificates,
) -> None:
    async with (
        producing(certificates, store_octets=room_for(2.5)) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        made = []
        for number in range(3):
            async with opened(producer) as handle:
                await handle.add_segment()
                await fill(handle)
            made.append(handle.publication)
            if number == 0:
                beyond = LocationFilter.absolute_start(LAYERS + 1, 0)
                with pytest.raises(RequestRejected) as refused:
                    await consumer.fetch(handle.name.track(b"k.raw.s0"), location_filter=beyond)
                assert refused.value.code == RequestErrorCode.INVALID_RANGE

        assert producer.answers.publications == tuple(made[1:])


async def test_a_layer_that_finds_no_room_in_time_fails_and_may_be_added_later(
    certificates: Certificates,
) -> None:
    async with producing(certificates, store_octets=room_for(1.2), store_wait_s=0.05) as (
        producer,
        _,
    ):
        one, other = opened(producer), opened(producer)
        await one.add_segment()
        await other.add_segment()
        await fill(one)
        with pytest.raises(Expired, match="store_octets"):
            await fill(other)
        reached = other.publication.segments[0].next_layer
        assert reached < LAYERS
        assert producer.counters[Counter.BUDGET_WAITS_EXPIRED] == 1
        await one.finish()
        for layer in range(reached, LAYERS):
            await other.add_layer(layer, *tensors(layer))
        await other.finish()

        assert producer.answers.publications == (other.publication,)


async def test_a_layer_that_waits_for_room_goes_on_when_another_publication_is_finished(
    certificates: Certificates,
) -> None:
    async with producing(certificates, store_octets=room_for(1.2)) as (producer, _):
        one, other = opened(producer), opened(producer)
        await one.add_segment()
        await other.add_segment()
        await fill(one)
        filling = asyncio.ensure_future(fill(other))
        assert isinstance(producer.counters, Noticing)
        await producer.counters.noticed(Counter.BUDGET_WAITS)
        assert not filling.done()
        await one.finish()
        await filling

        assert other.publication.segments[0].complete


async def test_what_can_never_fit_is_refused_at_once(certificates: Certificates) -> None:
    async with producing(certificates, store_octets=1000) as (producer, _):
        handle = opened(producer)
        with pytest.raises(ConfigError, match="store_octets is 1000"):
            await handle.add_segment()


async def test_a_finished_publication_expires(certificates: Certificates) -> None:
    async with (
        producing(certificates, ttl_s=0.1) as (producer, uri),
        connect(uri, tls=certificates[1]) as consumer,
    ):
        handle = opened(producer)
        async with handle:
            await handle.add_segment()
            await fill(handle)
        seen = await consumer.subscribe_namespace(handle.name.scope_prefix)
        assert isinstance(await anext(seen), NamespaceAppeared)
        assert isinstance(await anext(seen), NamespaceGone)
        with pytest.raises(RequestRejected, match="expired"):
            await consumer.subscribe(handle.name.track(b"manifest"))
        assert producer.octets_held == 0


# -- life ----------------------------------------------------------------------------------------


async def test_a_port_in_use_and_an_unusable_certificate_are_named(
    certificates: Certificates, tmp_path: Path
) -> None:
    async with producing(certificates) as (producer, uri):
        port = int(uri.rpartition(":")[2])
        with pytest.raises(ConfigError, match=str(port)):
            await producer.listen("127.0.0.1", port, tls=certificates[0])
        missing = ServerTls(tmp_path / "missing.pem", tmp_path / "missing.key")
        with pytest.raises(ConfigError, match=r"missing\.pem"):
            await producer.listen("127.0.0.1", 0, tls=missing)


async def test_a_stopping_producer_lets_a_consumer_finish_and_then_closes(
    certificates: Certificates,
) -> None:
    async with producing(certificates, drain_s=10.0) as (producer, uri):
        handle = opened(producer)
        async with handle:
            await handle.add_segment()
            await fill(handle)
        unfinished = opened(producer)
        async with connect(uri, tls=certificates[1]) as consumer:
            track = handle.name.track(b"k.raw.s0")
            subscription = await consumer.subscribe(track, fill=FROM_THE_START)
            stopping = asyncio.ensure_future(producer.__aexit__(None, None, None))
            found = {
                event.location: event.payload
                async for event in subscription
                if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL
            }
            await consumer.wait_closed()
            await stopping

    check(found, 0)
    assert unfinished.publication.abandoned is not None


async def test_what_a_block_raises_leaves_the_producer_as_it_was(
    certificates: Certificates,
) -> None:
    with pytest.raises(ConfigError, match="as it was"):
        async with producing(certificates):
            raise ConfigError("as it was")


async def test_nothing_is_opened_once_the_producer_has_stopped(certificates: Certificates) -> None:
    async with producing(certificates) as (producer, _):
        pass

    with pytest.raises(ConfigError, match="is stopping"):
        opened(producer)
