"""A retrieval over loopback QUIC, against publications that are honest, broken or hostile."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ManifestAccepted,
    ObjectRejected,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
    SegmentComplete,
    Trust,
)
from kvcs.consumer.examining import Examined, Examiner
from kvcs.consumer.retrieval import (
    ConnectionSpec,
    Retrieval,
    RetrievalSettings,
    consume,
)
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import (
    BadManifest,
    ConfigError,
    Expired,
    KvcsError,
    NotFound,
    PublicationFailed,
    Rejection,
)
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component, Octets
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import MANIFEST_COSE, PublicationName, new_publication_id
from kvcs.profile.signing import ProducerKey
from kvcs.store.sink import ArraySink
from moqt.aio import ClientTls, MoqtConnection, RequestHandler, Server, ServerTls, serve
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.codepoints import PublishDoneCode, RequestErrorCode
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    PeerRequestEnded,
    SubscribeNamespaceReceived,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack

pytestmark = pytest.mark.network

LAYERS, BLOCK_TOKENS, BLOCKS = 6, 4, 5
SCOPE = ScopeKey(bytes(range(32)))
TOKENS = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 2))
COMPAT = Descriptor(
    model="model",
    revision="revision",
    layers=LAYERS,
    block_tokens=BLOCK_TOKENS,
    dtype="float16",
    k_shape=(2, 8),
    v_shape=(2, 8),
)
KEYS = SCOPE.block_keys(COMPAT, TOKENS)
QUICK = RetrievalSettings(
    deadline_s=10, discovery_timeout_s=5, another_s=0.1, request_timeout_s=5, stall_timeout_s=5
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tensors(layer: int, blocks: int = BLOCKS, first: int = 0, compat: Descriptor = COMPAT) -> Any:
    """K and V of a layer, ``[tokens, heads, dim]``, different in every place."""
    tokens = blocks * compat.block_tokens
    shape = (tokens, *compat.k_shape)
    rng = np.random.default_rng((layer, first))
    return tuple(rng.integers(0, 1 << 15, shape, np.uint16).view(np.float16) for _ in range(2))


def name_of(blocks: int = BLOCKS, compat: Descriptor = COMPAT) -> PublicationName:
    return PublicationName(
        SCOPE.scope_id, SCOPE.compatibility_id(compat), KEYS[blocks - 1], new_publication_id()
    )


def publication(blocks: int = BLOCKS, **options: Any) -> Publication:
    return Publication(name_of(blocks), COMPAT, **options)


def fill(
    target: Publication,
    layers: Sequence[int] = range(LAYERS),
    *,
    blocks: int = BLOCKS,
    finish: bool | None = None,
) -> Publication:
    """Publish layers of segment 0, which is opened first."""
    segment = target.segments[0] if target.segments else target.open_segment(KEYS[:blocks])
    for layer in layers:
        k, v = tensors(layer, blocks)
        target.add_layer(segment, layer, k, v)
    if segment.complete if finish is None else finish:
        target.finish()
    return target


class Stage(RequestHandler):
    """Serves publications, and misbehaves where a test wants it to."""

    def __init__(self) -> None:
        self.publications: dict[Any, Publication] = {}
        self.directory = NamespaceDirectory()
        self.refuse: dict[bytes, RequestErrorCode] = {}
        self.silent: set[bytes] = set()
        self.instead: dict[bytes, list[LocalTrack]] = {}
        self.asked: list[bytes] = []
        self.connections: list[MoqtConnection] = []

    def add(self, *publications: Publication) -> None:
        for one in publications:
            self.publications[one.name.namespace] = one
            self.directory.add(one.name.namespace)

    def withdraw(self, one: Publication) -> None:
        self.directory.remove(one.name.namespace)

    def connection_made(self, connection: MoqtConnection) -> None:
        self.connections.append(connection)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        session, track = connection.session, request.track
        self.asked.append(track.name)
        if track.name in self.silent:
            return
        if (code := self.refuse.get(track.name)) is not None:
            session.reject(request.request_id, code, "as the test wants")
            return
        found = self.publications.get(track.namespace)
        local = found.tracks.get(track.name) if found is not None else None
        if self.instead.get(track.name):
            local = self.instead[track.name].pop(0)
        if local is None:
            session.reject(request.request_id, RequestErrorCode.DOES_NOT_EXIST, "no such track")
        else:
            session.accept_subscribe(request.request_id, local)

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        connection.session.accept_namespaces(request.request_id, self.directory)

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        pass


@dataclass
class Loopback:
    """A server with its stage, and what a retrieval needs to reach it."""

    server: Server
    stage: Stage
    spec: ConnectionSpec

    def retrieve(
        self,
        sink: Any = None,
        *,
        expected: Expectations | None = None,
        more: Sequence[ConnectionSpec] = (),
        **options: Any,
    ) -> Retrieval:
        options.setdefault("settings", QUICK)
        return consume(
            expected or expectations(),
            [self.spec, *more],
            ArraySink() if sink is None else sink,
            **options,
        )


def expectations(**others: Any) -> Expectations:
    return Expectations.of_tokens(SCOPE, COMPAT, TOKENS, **others)


@asynccontextmanager
async def loopback(files: CertificateFiles, *publications: Publication) -> AsyncIterator[Loopback]:
    stage = Stage()
    stage.add(*publications)
    server = await serve(
        "127.0.0.1", 0, tls=ServerTls(files.certificate_file, files.key_file), handler=stage
    )
    try:
        spec = ConnectionSpec(
            uri=f"moqt://127.0.0.1:{server.address[1]}/", tls=ClientTls(ca_file=files.ca_file)
        )
        yield Loopback(server, stage, spec)
    finally:
        await server.close(drain_s=0)


def of_kind(events: Sequence[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def ready(events: Sequence[Event]) -> list[int]:
    return [event.layer for event in of_kind(events, LayerReady)]


async def run(retrieval: Retrieval) -> list[Event]:
    """Run a retrieval to its end and return everything that it told."""
    async with asyncio.timeout(20), retrieval:
        return [event async for event in retrieval]


def assert_equal(sink: ArraySink, layers: Sequence[int] = range(LAYERS)) -> None:
    for layer in layers:
        k, v = tensors(layer)
        np.testing.assert_array_equal(sink.k[layer].view(np.uint16), k.view(np.uint16))
        np.testing.assert_array_equal(sink.v[layer].view(np.uint16), v.view(np.uint16))


def location_of(failed: Failed) -> list[str]:
    return [str(gap) for gap in failed.missing]


class CountingSink(ArraySink):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: Counter[tuple[Component, int, int]] = Counter()
        self.calls: list[str] = []

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        self.calls.append("begin")
        self.placed.clear()
        super().begin(descriptor, blocks)

    def place(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        self.placed[component, layer, block] += 1
        super().place(component, layer, block, tensor)

    def done(self) -> None:
        self.calls.append("done")
        super().done()

    def abandon(self) -> None:
        self.calls.append("abandon")
        super().abandon()


EVERYTHING = Counter(
    (component, layer, block)
    for component in (Component.K, Component.V)
    for layer in range(LAYERS)
    for block in range(BLOCKS)
)


# -- what should happen --------------------------------------------------------------------------


async def test_a_finished_publication_is_retrieved_whole_and_in_order(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())
    sink = CountingSink()

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(sink))

    assert [type(event) for event in events] == [
        PublicationFound,
        ManifestAccepted,
        *[LayerReady] * LAYERS,
        SegmentComplete,
        PublicationComplete,
    ]
    assert ready(events) == list(range(LAYERS))
    assert sink.placed == EVERYTHING
    assert sink.calls == ["begin", "done"]
    assert_equal(sink)
    complete = of_kind(events, PublicationComplete)[0]
    assert complete.publication == one.name
    assert complete.token_end == BLOCKS * BLOCK_TOKENS
    summary = complete.summary
    assert (summary.objects, summary.attested) == (60, 60)
    assert summary.octets == 60 * BLOCK_TOKENS * 2 * 8 * 2
    assert (summary.duplicates, summary.rejected, summary.unwanted) == (0, 0, 0)
    assert 0 < summary.first_layer_s <= summary.last_layer_s


async def test_whoever_joins_at_any_moment_gets_each_object_once(
    certificates: CertificateFiles,
) -> None:
    one = publication(manifest_every=2)
    moments = random.Random(7)
    sinks = [CountingSink() for _ in range(50)]

    async with loopback(certificates, one) as net, asyncio.timeout(50):
        joined: list[asyncio.Task[list[Event]]] = []
        waiting = list(sinks)
        async with asyncio.TaskGroup() as group:
            for step in range(LAYERS + 1):
                while waiting and (step == LAYERS or moments.random() < 0.85):
                    retrieval = net.retrieve(waiting.pop(), settings=replace(QUICK, deadline_s=40))
                    joined.append(group.create_task(run(retrieval)))
                    await asyncio.sleep(moments.choice((0, 0, 0.002, 0.01)))
                if step < LAYERS:
                    fill(one, [step])

    assert len(joined) == len(sinks)
    for task, sink in zip(joined, reversed(sinks), strict=True):
        [complete] = of_kind(task.result(), PublicationComplete)
        assert complete.summary.duplicates == 0
        assert sink.placed == EVERYTHING


async def test_several_segments_are_retrieved_as_they_are_added(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    sink = ArraySink()

    async with loopback(certificates, one) as net, net.retrieve(sink) as retrieval:
        first = one.open_segment(KEYS[:2])
        for layer in range(LAYERS):
            k, v = tensors(layer)
            one.add_layer(first, layer, k[: 2 * BLOCK_TOKENS], v[: 2 * BLOCK_TOKENS])
        await retrieval.layer(LAYERS - 1, 0, timeout_s=5)
        second = one.open_segment(KEYS[2:])
        for layer in range(LAYERS):
            k, v = tensors(layer)
            one.add_layer(second, layer, k[2 * BLOCK_TOKENS :], v[2 * BLOCK_TOKENS :])
        event = await retrieval.layer(0, 1, timeout_s=5)
        await retrieval.result()

    assert (event.token_start, event.token_end) == (2 * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS)
    assert_equal(sink)


async def test_many_segments_are_retrieved_a_few_at_a_time(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    for block in range(BLOCKS):
        segment = one.open_segment(KEYS[block : block + 1])
        rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        for layer in range(LAYERS):
            k, v = tensors(layer)
            one.add_layer(segment, layer, k[rows], v[rows])
    one.finish()
    sink = CountingSink()

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(sink, settings=replace(QUICK, segments_at_once=1)))

    assert [event.segment for event in of_kind(events, SegmentComplete)] == list(range(BLOCKS))
    assert sink.placed == EVERYTHING
    assert_equal(sink)


async def test_a_layer_is_told_while_later_ones_are_still_computed(
    certificates: CertificateFiles,
) -> None:
    one = publication()

    async with loopback(certificates, one) as net, net.retrieve() as retrieval:
        for layer in range(LAYERS):
            fill(one, [layer])
            event = await retrieval.layer(layer, timeout_s=5)
            assert event.layer == layer
        assert (await retrieval.result()).publication == one.name
        assert await retrieval.layer(0) is not None
        with pytest.raises(NotFound):
            await retrieval.layer(LAYERS)


async def test_a_consumer_may_come_before_the_publication(certificates: CertificateFiles) -> None:
    async with loopback(certificates) as net, net.retrieve() as retrieval:
        with pytest.raises(Expired, match="layer 0 of segment 0"):
            await retrieval.layer(0, timeout_s=0.1)
        net.stage.add(fill(publication()))

        assert isinstance(await retrieval.result(), PublicationComplete)


async def test_events_are_also_called_back_and_seen_by_every_iterator(
    certificates: CertificateFiles,
) -> None:
    called: list[Event] = []

    async with loopback(certificates, fill(publication())) as net:
        retrieval = net.retrieve(on_event=called.append)
        async with retrieval:
            await retrieval.result()
            one = [event async for event in retrieval]
            two = [event async for event in retrieval]

    assert one == two == called


@pytest.mark.parametrize("encodings", [("kv.raw",), ("raw", "kv.raw"), ("kv.raw", "raw")])
async def test_the_joint_track_brings_the_same_cache(
    certificates: CertificateFiles, encodings: tuple[str, ...]
) -> None:
    one = fill(publication(encodings=[Encoding.parse(text) for text in encodings]))
    sink = ArraySink()

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(sink))

    assert isinstance(events[-1], PublicationComplete)
    assert_equal(sink)


async def test_a_part_is_retrieved_without_the_rest(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    wish = Wish(layers=range(2, 4), blocks=range(1, 4))

    async with loopback(certificates, fill(publication())) as net:
        events = await run(net.retrieve(sink, wish=wish))

    assert ready(events) == [2, 3]
    assert sink.placed == Counter(
        (component, layer, block)
        for component in (Component.K, Component.V)
        for layer in (2, 3)
        for block in range(3)
    )
    k, _ = tensors(2)
    expected = k[BLOCK_TOKENS : 4 * BLOCK_TOKENS].view(np.uint16)
    np.testing.assert_array_equal(sink.k[2].view(np.uint16), expected)
    # The fill was limited to the layers, and the filter to the blocks.
    assert of_kind(events, PublicationComplete)[0].summary.unwanted == 0


async def test_asking_eagerly_brings_the_same(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    one = publication()
    fill(one, range(3))

    async with loopback(certificates, one) as net:
        async with net.retrieve(sink, settings=replace(QUICK, eager=True)) as retrieval:
            await retrieval.layer(2, timeout_s=5)
            fill(one, range(3, LAYERS))
            complete = await retrieval.result()
        asked = net.stage.asked

    assert asked.index(b"k.raw.s0") < asked.index(b"manifest")
    assert asked.count(b"k.raw.s0") == 1
    assert sink.placed == EVERYTHING
    assert complete.summary.duplicates == 0


async def test_asking_eagerly_without_room_asks_again(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    settings = replace(QUICK, eager=True, early_octets=300)

    async with loopback(certificates, fill(publication())) as net:
        events = await run(net.retrieve(sink, settings=settings))

    assert isinstance(events[-1], PublicationComplete)
    assert sink.placed == EVERYTHING


async def test_asking_eagerly_for_what_is_not_offered_does_no_harm(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication(encodings=[Encoding(joint=True)]))

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(settings=replace(QUICK, eager=True)))

    assert isinstance(events[-1], PublicationComplete)


class Inverting:
    """A codec that turns every octet round, and notes where it was asked to."""

    name = "inverting"
    value = 0x8001
    components = frozenset(Component)
    lossless = True
    fixed_length = False

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def encode(self, array: NDArray[Any]) -> bytes:
        return bytes(octet ^ 0xFF for octet in array.tobytes())

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        self.threads.add(threading.current_thread().name)
        turned = np.frombuffer(data, np.uint8) ^ 0xFF
        return turned.view(dtype).reshape(tuple(shape))


async def test_a_codec_of_ones_own_decodes_what_it_encoded(certificates: CertificateFiles) -> None:
    codec = Inverting()
    one = publication(encodings=[Encoding("inverting")], codecs=CodecRegistry(codec))
    sink = ArraySink()

    async with loopback(certificates, fill(one)) as net:
        events = await run(net.retrieve(sink, codecs=CodecRegistry(codec)))

    assert isinstance(events[-1], PublicationComplete)
    assert_equal(sink)


async def test_large_objects_are_examined_in_threads(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    examine = Examiner.examine

    def noting(*args: Any) -> Examined:
        threads.add(threading.current_thread().name)
        return examine(*args)

    monkeypatch.setattr(Examiner, "examine", noting)
    settings = replace(QUICK, large_octets=1, pending_octets=500)
    sink = CountingSink()

    async with loopback(certificates, fill(publication())) as net:
        events = await run(net.retrieve(sink, settings=settings))

    assert isinstance(events[-1], PublicationComplete)
    assert sink.placed == EVERYTHING
    assert_equal(sink)
    assert threads
    assert all(name.startswith("kvcs-examine") for name in threads)


# -- trust ---------------------------------------------------------------------------------------


async def test_with_a_signed_manifest_layers_wait_to_be_attested(
    certificates: CertificateFiles,
) -> None:
    key = ProducerKey.generate()
    one = publication(producer_key=key, manifest_every=2)
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)

    async with loopback(certificates, one) as net, net.retrieve(expected=expected) as retrieval:
        fill(one, [0])
        with pytest.raises(Expired):
            await retrieval.layer(0, timeout_s=0.3)
        fill(one, range(1, LAYERS))
        await retrieval.result()
        events = [event async for event in retrieval]

    assert {event.trust for event in of_kind(events, LayerReady)} == {Trust.ATTESTED}
    assert all(event.signed for event in of_kind(events, ManifestAccepted))


async def test_a_producer_that_is_not_trusted_is_refused(certificates: CertificateFiles) -> None:
    trusted = ProducerKey.generate()
    one = fill(publication(producer_key=ProducerKey.generate()))

    async with (
        loopback(certificates, one) as net,
        net.retrieve(expected=expectations(trusted={trusted.kid: trusted.public_key})) as retrieval,
    ):
        with pytest.raises(BadManifest):
            await retrieval.result()


async def test_without_a_signature_nothing_is_taken_where_one_is_required(
    certificates: CertificateFiles,
) -> None:
    key = ProducerKey.generate()
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)

    async with loopback(certificates, fill(publication())) as net:
        events = await run(net.retrieve(expected=expected))

        assert b"manifest" not in net.stage.asked
    assert of_kind(events, Failed)[0].reason is FailureReason.REFUSED


@pytest.mark.parametrize(
    "code",
    # REDIRECT would have to say where to go, which this stage does not.
    sorted(set(RequestErrorCode) - {RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.REDIRECT}),
    ids=lambda code: code.name,
)
async def test_no_other_refusal_makes_it_do_without_a_signature(
    certificates: CertificateFiles, code: RequestErrorCode
) -> None:
    async with loopback(certificates, fill(publication())) as net:
        net.stage.refuse[MANIFEST_COSE] = code

        events = await run(net.retrieve(settings=replace(QUICK, deadline_s=1.0)))

        assert b"manifest" not in net.stage.asked
    # Where there is no room now, it asks until its deadline.
    asks_on = code is RequestErrorCode.EXCESSIVE_LOAD
    reason = FailureReason.EXPIRED if asks_on else FailureReason.REFUSED
    assert of_kind(events, Failed)[0].reason is reason


async def test_silence_does_not_make_it_do_without_a_signature(
    certificates: CertificateFiles,
) -> None:
    async with loopback(certificates, fill(publication())) as net:
        net.stage.silent.add(MANIFEST_COSE)

        events = await run(net.retrieve(settings=replace(QUICK, request_timeout_s=0.2)))

        assert b"manifest" not in net.stage.asked
    assert of_kind(events, Failed)[0].reason is FailureReason.REFUSED


async def test_another_descriptor_is_refused_by_the_member_that_differs(
    certificates: CertificateFiles,
) -> None:
    other = replace(COMPAT, revision="another")
    one = Publication(name_of(), other)  # announced as if it were ours

    async with loopback(certificates, fill(one)) as net, net.retrieve() as retrieval:
        with pytest.raises(BadManifest, match='revision: "revision" and "another"'):
            await retrieval.result()


async def test_a_publication_of_other_tokens_is_refused(certificates: CertificateFiles) -> None:
    one = publication()
    segment = one.open_segment([bytes(32)] * BLOCKS)
    for layer in range(LAYERS):
        one.add_layer(segment, layer, *tensors(layer))

    async with loopback(certificates, one) as net, net.retrieve() as retrieval:
        with pytest.raises(BadManifest, match="other tokens"):
            await retrieval.result()


# -- Objects that are wrong ----------------------------------------------------------------------


def corrupt(
    one: Publication, layer: int, block: int, change: Callable[[bytearray], None], track: str
) -> None:
    """Change the payload of one published Object."""
    [subgroup] = one.tracks[track.encode()]._groups[layer]
    obj = subgroup.objects[block]
    payload = bytearray(b"".join(obj.parts))
    change(payload)
    obj.parts[:] = [bytes(payload)]


def flip(octet: int) -> Callable[[bytearray], None]:
    def change(payload: bytearray) -> None:
        payload[octet] ^= 1

    return change


#: One octet of each header field that is checked, and the first and last of the data.
FIELDS = {
    0: Rejection.MAGIC,
    4: Rejection.VERSION,
    5: Rejection.COMPONENT,
    11: Rejection.LAYER,
    15: Rejection.BLOCK_INDEX,
    23: Rejection.TOKEN_START,
    27: Rejection.TOKEN_COUNT,
    29: Rejection.CODEC,
    35: Rejection.LENGTH,
    36: Rejection.DIGEST,
    68: Rejection.DIGEST,
    68 + 127: Rejection.DIGEST,
}


@pytest.mark.parametrize(("octet", "reason"), FIELDS.items(), ids=lambda value: str(value))
async def test_one_changed_octet_costs_its_layer_and_nothing_else(
    certificates: CertificateFiles, octet: int, reason: Rejection
) -> None:
    one = fill(publication())
    corrupt(one, 2, 3, flip(octet), "v.raw.s0")
    sink = CountingSink()

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(sink))

    [rejected] = of_kind(events, ObjectRejected)
    assert (str(rejected.track), rejected.layer, rejected.block) == ("v.raw.s0", 2, 3)
    assert rejected.reason is reason
    assert ready(events) == [0, 1, 3, 4, 5]
    failed = of_kind(events, Failed)[0]
    assert failed.reason is FailureReason.INCOMPLETE
    assert location_of(failed) == ["v.raw.s0 layer 2 block 3"]
    assert failed.summary.rejected == 1
    assert sink.calls == ["begin", "abandon"]
    assert sink.placed == EVERYTHING - Counter([(Component.V, 2, 3)])


@pytest.mark.parametrize("octet", [6, 7, 30, 31])
async def test_reserved_octets_are_ignored(certificates: CertificateFiles, octet: int) -> None:
    one = fill(publication())
    corrupt(one, 2, 3, flip(octet), "v.raw.s0")

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve())

    assert isinstance(events[-1], PublicationComplete)


async def test_data_that_contradict_the_manifest_are_rejected_though_their_digest_fits(
    certificates: CertificateFiles,
) -> None:
    def change(payload: bytearray) -> None:
        payload[100] ^= 1
        payload[36:68] = sha256(payload[68:]).digest()

    one = fill(publication())
    corrupt(one, 2, 3, change, "k.raw.s0")

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve())

    [rejected] = of_kind(events, ObjectRejected)
    assert rejected.reason is Rejection.DIGEST
    assert "the manifest lists" in rejected.text
    assert ready(events) == [0, 1, 3, 4, 5]


async def test_a_manifest_that_contradicts_what_was_used_ends_the_publication(
    certificates: CertificateFiles,
) -> None:
    def change(payload: bytearray) -> None:
        payload[100] ^= 1
        payload[36:68] = sha256(payload[68:]).digest()

    one = publication(manifest_every=3)
    fill(one, [0, 1])
    corrupt(one, 1, 3, change, "k.raw.s0")

    async with loopback(certificates, one) as net, net.retrieve() as retrieval:
        await retrieval.layer(1, timeout_s=5)
        fill(one, [2])
        with pytest.raises(PublicationFailed, match=r"k\.raw\.s0 layer 1 block 3"):
            await retrieval.result()
        assert retrieval.failed is not None
        assert retrieval.failed.reason is FailureReason.CONTRADICTED


async def test_a_codec_that_fails_rejects_its_object(certificates: CertificateFiles) -> None:
    class Failing(Inverting):
        def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
            if data[0] == self.bad:
                raise ZeroDivisionError("no")
            return super().decode(data, shape, dtype)

        bad = -1

    codec = Failing()
    one = publication(encodings=[Encoding("inverting")], codecs=CodecRegistry(codec))
    fill(one)
    [subgroup] = one.tracks[b"k.inverting.s0"]._groups[4]
    codec.bad = subgroup.objects[1].parts[1][0]

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(codecs=CodecRegistry(codec)))

    rejected = of_kind(events, ObjectRejected)
    assert {event.reason for event in rejected} == {Rejection.DECODE}
    assert ("k.inverting.s0", 4, 1) in [(str(e.track), e.layer, e.block) for e in rejected]


async def test_a_flood_of_bad_objects_ends_the_publication(certificates: CertificateFiles) -> None:
    one = fill(publication())
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            corrupt(one, layer, block, flip(0), "k.raw.s0")

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(settings=replace(QUICK, max_rejected=7)))

    assert len(of_kind(events, ObjectRejected)) == 7
    assert "7 Objects were rejected" in of_kind(events, Failed)[0].text


# -- hints that are wrong ------------------------------------------------------------------------


def cut_off(one: Publication, track: str, layers: int, code: PublishDoneCode) -> LocalTrack:
    """Make what a relay may make of a track: it ends before everything came."""
    whole = one.tracks[track.encode()]
    short = LocalTrack(whole.name)
    for layer in range(layers):
        [subgroup] = whole._groups[layer]
        copy = short.open_subgroup(layer, 0, priority=0, holds_end_of_group=True)
        for obj in subgroup.objects:
            copy.publish(obj.object_id, *obj.parts, status=obj.status)
        copy.close()
    short.end(code)
    return short


@pytest.mark.parametrize("code", [PublishDoneCode.TRACK_ENDED, PublishDoneCode.TOO_FAR_BEHIND])
async def test_a_track_that_ends_too_early_is_asked_for_again(
    certificates: CertificateFiles, code: PublishDoneCode
) -> None:
    one = fill(publication())
    sink = CountingSink()

    async with loopback(certificates, one) as net:
        net.stage.instead[b"k.raw.s0"] = [cut_off(one, "k.raw.s0", 2, code)]
        events = await run(net.retrieve(sink))

        assert net.stage.asked.count(b"k.raw.s0") == 2
    assert sink.placed == EVERYTHING
    # Only what was missing was asked for.
    assert of_kind(events, PublicationComplete)[0].summary.duplicates == 0


async def test_a_track_that_always_ends_too_early_is_not_asked_for_for_ever(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())

    async with loopback(certificates, one) as net:
        net.stage.instead[b"k.raw.s0"] = [
            cut_off(one, "k.raw.s0", layers, PublishDoneCode.TRACK_ENDED) for layers in (2, 3, 4)
        ]
        events = await run(net.retrieve(settings=replace(QUICK, eager=False)))

        assert net.stage.asked.count(b"k.raw.s0") == 2
    assert ready(events) == [0, 1, 2]
    assert location_of(of_kind(events, Failed)[0]) == ["k.raw.s0 layers 3-5 blocks 0-4"]


@pytest.mark.parametrize(
    "code", [code for code in PublishDoneCode if code is not PublishDoneCode.TRACK_ENDED]
)
async def test_a_track_that_breaks_off_again_and_again_is_asked_for_until_it_is_whole(
    certificates: CertificateFiles, code: PublishDoneCode
) -> None:
    one = fill(publication())
    sink = CountingSink()

    async with loopback(certificates, one) as net:
        net.stage.instead[b"k.raw.s0"] = [
            cut_off(one, "k.raw.s0", layers, code) for layers in (1, 2, 2, 2, 3)
        ]
        events = await run(net.retrieve(sink, settings=replace(QUICK, again_s=0.01)))

        assert net.stage.asked.count(b"k.raw.s0") == 6
        assert len(net.stage.connections) == 1
    assert isinstance(events[-1], PublicationComplete)
    assert ready(events) == list(range(LAYERS))
    assert sink.placed == EVERYTHING
    assert len(of_kind(events, PublicationFound)) == 1
    assert not of_kind(events, PublicationRefused)


async def test_a_track_that_breaks_off_for_ever_is_an_exact_list_at_the_deadline(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())
    broken = cut_off(one, "k.raw.s0", 2, PublishDoneCode.INTERNAL_ERROR)

    async with loopback(certificates, one) as net:
        net.stage.instead[b"k.raw.s0"] = [broken] * 1000
        settings = replace(QUICK, deadline_s=0.7, again_s=0.05)
        events = await run(net.retrieve(settings=settings))

    failed = of_kind(events, Failed)[0]
    assert failed.reason is FailureReason.EXPIRED
    assert "broke off" in failed.text
    assert ready(events) == [0, 1]
    assert location_of(failed) == ["k.raw.s0 layers 2-5 blocks 0-4"]


async def test_a_track_that_is_complete_needs_no_proper_end(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())
    wrong_end = cut_off(one, "k.raw.s0", LAYERS, PublishDoneCode.INTERNAL_ERROR)

    async with loopback(certificates, one) as net:
        net.stage.instead[b"k.raw.s0"] = [wrong_end]
        events = await run(net.retrieve())

    assert isinstance(events[-1], PublicationComplete)


async def test_a_track_that_is_refused_is_missing_whole(certificates: CertificateFiles) -> None:
    async with loopback(certificates, fill(publication())) as net:
        net.stage.refuse[b"v.raw.s0"] = RequestErrorCode.INTERNAL_ERROR
        events = await run(net.retrieve())

    assert ready(events) == []
    assert location_of(of_kind(events, Failed)[0]) == ["v.raw.s0 layers 0-5 blocks 0-4"]


async def test_a_manifest_that_ends_without_attesting_is_an_error(
    certificates: CertificateFiles,
) -> None:
    key = ProducerKey.generate()
    one = publication(producer_key=key)
    segment = one.open_segment(KEYS)
    for layer in range(LAYERS):
        one.publish(segment.copy(layer, *tensors(layer), kv=None).prepare())
    one.tracks[MANIFEST_COSE].end()
    expected = expectations(trusted={key.kid: key.public_key})

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(expected=expected))

    failed = of_kind(events, Failed)[0]
    assert failed.reason is FailureReason.UNATTESTED
    assert failed.missing == ()
    assert [str(gap) for gap in failed.unattested] == [
        "k.raw.s0 layers 0-5 blocks 0-4",
        "v.raw.s0 layers 0-5 blocks 0-4",
    ]


async def test_segments_that_never_come_are_told(certificates: CertificateFiles) -> None:
    one = publication()
    segment = one.open_segment(KEYS[:3])
    for layer in range(LAYERS):
        k, v = tensors(layer)
        one.add_layer(segment, layer, k[: 3 * BLOCK_TOKENS], v[: 3 * BLOCK_TOKENS])
    one.finish()

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve())

    failed = of_kind(events, Failed)[0]
    assert (failed.reason, failed.missing) == (FailureReason.INCOMPLETE, ())
    assert failed.unlisted == (3, 4)
    assert ready(events) == list(range(LAYERS))


# -- ends ----------------------------------------------------------------------------------------


async def test_a_publisher_that_falls_silent_is_told_with_all_that_is_missing(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    fill(one, [0, 1])
    half = one.segments[0].copy(2, *tensors(2), kv=None).prepare()
    subgroup = one.tracks[b"k.raw.s0"].open_subgroup(2, 0, priority=0, holds_end_of_group=True)
    for block, (header, data) in enumerate(half.tracks[0].objects[:3]):
        subgroup.publish(block, header, data)

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(settings=replace(QUICK, stall_timeout_s=0.5)))

    failed = of_kind(events, Failed)[0]
    assert failed.reason is FailureReason.STALLED
    assert ready(events) == [0, 1]
    assert location_of(failed) == [
        "k.raw.s0 layer 2 blocks 3-4",
        "k.raw.s0 layers 3-5 blocks 0-4",
        "v.raw.s0 layers 2-5 blocks 0-4",
    ]
    assert sum(gap.objects for gap in failed.missing) + failed.summary.objects == 60


async def test_the_deadline_ends_everything(certificates: CertificateFiles) -> None:
    one = publication()
    fill(one, [0])

    async with (
        loopback(certificates, one) as net,
        net.retrieve(settings=replace(QUICK, deadline_s=0.7)) as retrieval,
    ):
        with pytest.raises(Expired, match=r"not complete within 0\.7 s"):
            await retrieval.result()
        failed = retrieval.failed

    assert failed is not None
    assert failed.reason is FailureReason.EXPIRED
    assert sum(gap.objects for gap in failed.missing) == 50


async def test_a_connection_that_is_lost_is_told_with_all_that_is_missing(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    fill(one, [0, 1])

    async with (
        loopback(certificates, one) as net,
        net.retrieve(settings=replace(QUICK, deadline_s=1.5)) as retrieval,
    ):
        await retrieval.layer(1, timeout_s=5)
        await net.server.close(drain_s=0)
        with pytest.raises(Expired, match=r"not complete within 1\.5 s: .*nobody listens"):
            await retrieval.result()
        failed = retrieval.failed

    assert failed is not None
    assert failed.reason is FailureReason.EXPIRED
    assert location_of(failed) == [
        "k.raw.s0 layers 2-5 blocks 0-4",
        "v.raw.s0 layers 2-5 blocks 0-4",
    ]


async def test_another_relay_goes_on_with_the_same_publication(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    fill(one, [0, 1])
    sink = CountingSink()

    async with (
        loopback(certificates, one) as first,
        loopback(certificates, one) as second,
        first.retrieve(sink, more=[second.spec]) as retrieval,
    ):
        await retrieval.layer(1, timeout_s=5)
        await first.server.close(drain_s=0)
        fill(one, range(2, LAYERS))
        complete = await retrieval.result()
        events = [event async for event in retrieval]

    assert ready(events) == list(range(LAYERS))
    assert sink.placed == EVERYTHING
    assert sink.calls == ["begin", "done"]
    assert complete.summary.duplicates == 0


async def test_a_relay_that_cannot_be_reached_is_passed_over(
    certificates: CertificateFiles,
) -> None:
    async with loopback(certificates) as gone:
        nobody = gone.spec
    async with loopback(certificates, fill(publication())) as net:
        settings = replace(QUICK, connect_timeout_s=0.5)
        retrieval = consume(expectations(), [nobody, net.spec], ArraySink(), settings=settings)
        events = await run(retrieval)
        alone = await run(consume(expectations(), [nobody], ArraySink(), settings=settings))

    assert isinstance(events[-1], PublicationComplete)
    assert of_kind(alone, Failed)[0].reason is FailureReason.UNREACHABLE


async def test_nothing_announced_is_not_found(certificates: CertificateFiles) -> None:
    async with loopback(certificates) as net:
        settings = replace(QUICK, discovery_timeout_s=0.2)
        async with net.retrieve(settings=settings) as retrieval:
            with pytest.raises(NotFound):
                await retrieval.result()


async def test_an_abandoned_publication_makes_way_for_the_next(
    certificates: CertificateFiles,
) -> None:
    bad, good = publication(), publication()
    bad.open_segment(KEYS)
    bad.publish_manifest()
    sink = CountingSink()

    async with (
        loopback(certificates, bad) as net,
        net.retrieve(sink, settings=replace(QUICK, another_s=5)) as retrieval,
    ):
        async for event in retrieval:
            if isinstance(event, ManifestAccepted):
                break
        bad.abandon("found an error")
        net.stage.withdraw(bad)
        net.stage.add(fill(good))
        complete = await retrieval.result()

    assert complete.publication == good.name
    assert sink.calls == ["begin", "abandon", "begin", "done"]
    assert sink.placed == EVERYTHING


async def test_an_abandoned_publication_of_which_layers_were_used_is_an_error(
    certificates: CertificateFiles,
) -> None:
    one = publication()
    fill(one, [0])

    async with (
        loopback(
            certificates,
            one,
        ) as net,
        net.retrieve() as retrieval,
    ):
        await retrieval.layer(0, timeout_s=5)
        one.abandon("found an error")
        with pytest.raises(PublicationFailed, match="found an error"):
            await retrieval.result()


async def test_leaving_the_block_ends_the_retrieval(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    one = publication()
    fill(one, [0])

    async with loopback(certificates, one) as net:
        async with net.retrieve(sink) as retrieval:
            await retrieval.layer(0, timeout_s=5)
        with pytest.raises(KvcsError, match="ended by the caller"):
            await retrieval.result()
        with pytest.raises(KvcsError, match="ended by the caller"):
            await retrieval.layer(1)

    assert retrieval.failed is not None
    assert retrieval.failed.reason is FailureReason.CANCELLED
    assert sink.calls == ["begin", "abandon"]


async def test_a_sink_without_room_is_an_error(certificates: CertificateFiles) -> None:
    async with (
        loopback(certificates, fill(publication())) as net,
        net.retrieve(ArraySink(limit_octets=100)) as retrieval,
    ):
        with pytest.raises(ConfigError, match="limit 100"):
            await retrieval.result()


async def test_a_callback_that_raises_ends_the_retrieval_with_its_error(
    certificates: CertificateFiles,
) -> None:
    def callback(event: Event) -> None:
        if isinstance(event, LayerReady):
            raise ZeroDivisionError

    async with loopback(certificates, fill(publication())) as net:
        with pytest.raises(ZeroDivisionError):
            async with net.retrieve(on_event=callback) as retrieval:
                await retrieval.result()


# -- several publications ------------------------------------------------------------------------


async def test_a_bad_publication_makes_way_for_a_good_one(certificates: CertificateFiles) -> None:
    bad = Publication(name_of(), replace(COMPAT, revision="another"))
    good = fill(publication())

    async with (
        loopback(certificates, bad) as net,
        net.retrieve(settings=replace(QUICK, another_s=5)) as retrieval,
    ):
        async for event in retrieval:
            if isinstance(event, PublicationRefused):
                break
        net.stage.add(good)
        complete = await retrieval.result()

    assert complete.publication == good.name


async def test_of_several_publications_the_complete_one_is_taken(
    certificates: CertificateFiles,
) -> None:
    begun = [fill(publication(), [0]) for _ in range(2)]
    whole = fill(publication())
    bad = Publication(name_of(), replace(COMPAT, revision="another"))

    async with loopback(certificates, begun[0], bad, whole, begun[1]) as net:
        events = await run(net.retrieve(settings=replace(QUICK, settle_s=0.2)))

    assert len(of_kind(events, PublicationFound)) == 4
    assert of_kind(events, PublicationComplete)[0].publication == whole.name


async def test_one_that_is_alone_is_taken_without_waiting_for_others(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())

    async with loopback(certificates, one) as net:
        settings = replace(QUICK, settle_s=60, deadline_s=10)
        events = await run(net.retrieve(settings=settings))

    assert of_kind(events, PublicationComplete)[0].publication == one.name


async def test_one_that_is_withdrawn_leaves_the_others(certificates: CertificateFiles) -> None:
    one, other = fill(publication(), [0]), fill(publication(), [0])

    async with loopback(certificates, one, other) as net, net.retrieve() as retrieval:
        await retrieval.layer(0, timeout_s=5)
        [used] = [e async for e in _until(retrieval, ManifestAccepted)]
        unused = other if used.publication == one.name else one
        net.stage.withdraw(unused)
        fill(one, range(1, LAYERS))
        fill(other, range(1, LAYERS))

        assert (await retrieval.result()).publication == used.publication


async def _until(retrieval: Retrieval, kind: type[Event]) -> AsyncIterator[Any]:
    async for event in retrieval:
        if isinstance(event, kind):
            yield event
            return


async def test_a_shorter_prefix_is_found_if_the_caller_allows_it(
    certificates: CertificateFiles,
) -> None:
    short = fill(publication(3), blocks=3)

    async with loopback(certificates, short) as net:
        any_length = replace(QUICK, prefixes="any", discovery_timeout_s=0.3)
        events = await run(net.retrieve(settings=any_length))
        listed = await run(net.retrieve(settings=replace(any_length, prefixes=(2, 3))))
        alone = await run(net.retrieve(settings=replace(any_length, prefixes="longest")))

    for found in (events, listed):
        assert of_kind(found, PublicationFound)[0].blocks == 3
        assert of_kind(found, PublicationComplete)[0].token_end == 3 * BLOCK_TOKENS
    assert of_kind(alone, Failed)[0].reason is FailureReason.NOT_FOUND


async def test_of_several_prefixes_the_longest_is_taken(certificates: CertificateFiles) -> None:
    short, long = fill(publication(2), blocks=2), fill(publication(4), blocks=4)

    async with loopback(certificates, short, long) as net:
        settings = replace(QUICK, prefixes="any", settle_s=0.1)
        events = await run(net.retrieve(settings=settings))

    assert of_kind(events, PublicationComplete)[0].publication == long.name


async def test_exactly_one_publication_can_be_asked_for(certificates: CertificateFiles) -> None:
    wanted, other = fill(publication()), fill(publication())

    async with loopback(certificates, other, wanted) as net:
        events = await run(net.retrieve(publication=wanted.name))
        refused = await run(net.retrieve(publication=name_of()))

    assert of_kind(events, PublicationComplete)[0].publication == wanted.name
    assert of_kind(refused, Failed)[0].reason is FailureReason.REFUSED


async def test_a_publication_found_elsewhere_needs_no_tokens(
    certificates: CertificateFiles,
) -> None:
    one = fill(publication())
    expected = Expectations(scope_key=SCOPE, descriptor=COMPAT)

    async with loopback(certificates, one) as net:
        events = await run(net.retrieve(expected=expected, publication=one.name))

    assert of_kind(events, PublicationComplete)[0].token_end == BLOCKS * BLOCK_TOKENS


def test_arguments_that_do_not_fit_are_refused() -> None:
    spec = ConnectionSpec(uri="moqt://localhost")
    nothing = Expectations(scope_key=SCOPE, descriptor=COMPAT)

    with pytest.raises(ConfigError, match="no relay"):
        consume(expectations(), [], ArraySink())
    with pytest.raises(ConfigError, match="moqt"):
        consume(expectations(), [ConnectionSpec(uri="https://localhost")], ArraySink())
    with pytest.raises(ConfigError, match="tokens"):
        consume(nothing, [spec], ArraySink())
    with pytest.raises(ConfigError, match="layers"):
        consume(expectations(), [spec], ArraySink(), wish=Wish(layers=range(99)))
    with pytest.raises(ConfigError, match="prefix of 9 blocks"):
        consume(expectations(), [spec], ArraySink(), settings=replace(QUICK, prefixes=(9,)))
    with pytest.raises(ConfigError, match="deadline_s"):
        RetrievalSettings(deadline_s=0)


async def test_waiting_for_a_retrieval_that_was_not_started_is_an_error() -> None:
    retrieval = consume(expectations(), [ConnectionSpec(uri="moqt://localhost")], ArraySink())

    with pytest.raises(ConfigError, match="async with"):
        await retrieval.result()
    with pytest.raises(ConfigError, match="async with"):
        await retrieval.layer(0)


async def test_files_that_cannot_be_used_are_an_error(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with loopback(certificates) as net:
        spec = replace(net.spec, tls=ClientTls(ca_file=tmp_path / "missing.pem"))
        with pytest.raises(ConfigError, match=r"missing\.pem"):
            consume(expectations(), [spec], ArraySink(), settings=QUICK)
