"""A producer that encodes, a consumer that decodes, and what each says of how it was done."""

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from kvcs.cli.main import main, make_parser
from kvcs.consumer.events import (
    Failed,
    FailureReason,
    LayerReady,
    ObjectRejected,
    PublicationComplete,
    PublicationRefused,
)
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import BadManifest, ConfigError, Rejection
from kvcs.kvsp.codecs import Codec, CodecRegistry
from kvcs.kvsp.layout import Octets
from kvcs.kvsp.standard import standard_codecs
from kvcs.producer.segment import Encoding
from kvcs.profile.manifest import CodecEntry
from kvcs.store.sink import ArraySink
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.desk import Desk
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    SCOPE,
    TOKENS,
    Scene,
    of_kind,
    on_stage,
    ready,
    run,
)

pytestmark = pytest.mark.network

STANDARD = standard_codecs()
OFFERS = ["shuffle-zstd", "kv.shuffle-zstd", "shuffle-lz4", "kv.shuffle-lz4", "int8", "fp8"]


def finite(layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of a layer, as caches have them: with nothing in them that is not a number."""
    rng = np.random.default_rng(layer)
    k, v = (
        rng.normal(size=(BLOCKS * BLOCK_TOKENS, *shape)).astype(np.float16)
        for shape in (COMPAT.k_shape, COMPAT.v_shape)
    )
    return k, v


async def publish(scene: Scene) -> Any:
    async with scene.open() as handle:
        await handle.add_segment()
        for layer in range(LAYERS):
            await handle.add_layer(layer, *finite(layer))
        return handle.publication


def assert_decoded(sink: ArraySink, codec: Codec) -> None:
    for layer in range(LAYERS):
        for found, made in zip((sink.k[layer], sink.v[layer]), finite(layer), strict=True):
            expected = (
                made if codec.lossless else codec.decode(codec.encode(made), made.shape, made.dtype)
            )
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("offer", OFFERS)
async def test_what_was_encoded_is_decoded_and_every_layer_says_by_what(
    certificates: CertificateFiles, offer: str
) -> None:
    encoding, sink = Encoding.parse(offer), ArraySink()
    codec = STANDARD[encoding.codec]

    async with on_stage(certificates, encodings=(encoding,)) as scene:
        publication = await publish(scene)
        events = await run(scene.retrieve(sink, wish=Wish(codecs=(codec.name,))))

    complete = events[-1]
    assert isinstance(complete, PublicationComplete)
    assert (complete.codecs, complete.lossless) == ((codec.name,), codec.lossless)
    assert ready(events) == list(range(LAYERS))
    told = {(event.codec, event.lossless) for event in of_kind(events, LayerReady)}
    assert told == {(codec.name, codec.lossless)}
    assert_decoded(sink, codec)
    # Names and identifiers are those of the same cache in any encoding.
    assert publication.name.compatibility_id == SCOPE.compatibility_id(COMPAT)
    manifest = publication.draft_manifest().manifest
    assert manifest.compat == COMPAT
    assert manifest.codecs == {codec.name: CodecEntry(value=codec.value, lossless=codec.lossless)}


@pytest.mark.parametrize("offer", ["shuffle-zstd", "kv.shuffle-lz4"])
async def test_a_consumer_that_is_told_nothing_takes_what_is_lossless(
    certificates: CertificateFiles, offer: str
) -> None:
    sink, encoding = ArraySink(), Encoding.parse(offer)

    async with on_stage(certificates, encodings=(Encoding("int8"), encoding)) as scene:
        await publish(scene)
        events = await run(scene.retrieve(sink))

    assert isinstance(events[-1], PublicationComplete)
    assert events[-1].codecs == (encoding.codec,)
    assert_decoded(sink, STANDARD["raw"])


@pytest.mark.parametrize(
    ("offer", "wish", "says"),
    [
        ("int8", Wish(), "int8 is lossy, expected a lossless codec"),
        ("fp8", Wish(require_lossless=True), "fp8 is lossy, expected a lossless codec"),
        ("shuffle-zstd", Wish(codecs=("raw",)), "as k.shuffle-zstd.s0, v.shuffle-zstd.s0: not "),
    ],
)
async def test_what_is_not_accepted_is_refused_before_anything_of_it_is_used(
    certificates: CertificateFiles, offer: str, wish: Wish, says: str
) -> None:
    async with on_stage(certificates, encodings=(Encoding.parse(offer),)) as scene:
        await publish(scene)
        retrieval = scene.retrieve(wish=wish)
        events = await run(retrieval)

    [refused] = of_kind(events, PublicationRefused)
    assert says in refused.text
    assert isinstance(events[-1], Failed)
    assert events[-1].reason is FailureReason.REFUSED
    assert events[-1].summary.objects == 0
    with pytest.raises(BadManifest, match=says[-9:]):
        await retrieval.result()


async def test_a_lossy_codec_cannot_be_named_where_lossless_ones_are_required(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        with pytest.raises(ConfigError, match="codec 'int8' is lossy, but lossless"):
            scene.retrieve(wish=Wish(codecs=("raw", "int8"), require_lossless=True))


async def test_a_consumer_without_the_library_says_which_one_it_lacks(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_stage(certificates, encodings=(Encoding("shuffle-lz4"),)) as scene:
        await publish(scene)
        monkeypatch.setitem(sys.modules, "lz4.block", None)
        events = await run(scene.retrieve())

    assert isinstance(events[-1], Failed)
    assert events[-1].text.endswith(
        "; shuffle-lz4 cannot be read: it needs the package lz4: pip install lz4"
    )


class Spoiling:
    """A codec of a producer that means no good: one of its tensors ends an octet early."""

    def __init__(self, codec: Codec, spoiled: NDArray[Any]) -> None:
        self._codec = codec
        self._spoiled = spoiled.tobytes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, array: NDArray[Any]) -> bytes:
        data = self._codec.encode(array)
        return data[:-1] if array.tobytes() == self._spoiled else data

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return self._codec.decode(data, shape, dtype)


def registry_of(codec: Any) -> CodecRegistry:
    codecs = standard_codecs()
    codecs._by_name[codec.name] = codecs._by_value[codec.value] = codec
    return codecs


@pytest.mark.parametrize("name", ["shuffle-zstd", "shuffle-lz4", "int8", "fp8"])
async def test_data_that_cannot_be_decoded_cost_their_object_and_nothing_else(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    k, _ = finite(3)
    spoiling = Spoiling(STANDARD[name], k[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS])
    monkeypatch.setattr("kvcs.producer.daemon.standard_codecs", lambda: registry_of(spoiling))

    async with on_stage(certificates, encodings=(Encoding(name),)) as scene:
        await publish(scene)
        events = await run(scene.retrieve(wish=Wish(codecs=(name,))))

    # Header, digest and manifest are right: only the codec can tell.
    rejected = of_kind(events, ObjectRejected)
    places = {(str(event.track), event.layer, event.block) for event in rejected}
    assert places == {(f"k.{name}.s0", 3, 2)}
    assert {event.reason for event in rejected} == {Rejection.DATA_LENGTH}
    assert ready(events) == [layer for layer in range(LAYERS) if layer != 3]


class Watched:
    """A codec, and the threads that it worked in."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.encoding: set[str] = set()
        self.decoding: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, array: NDArray[Any]) -> bytes:
        self.encoding.add(threading.current_thread().name)
        return self._codec.encode(array)

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        self.decoding.add(threading.current_thread().name)
        return self._codec.decode(data, shape, dtype)


async def test_encoding_and_decoding_leave_the_event_loop_alone(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(STANDARD["shuffle-zstd"])
    for module in ("kvcs.producer.daemon", "kvcs.consumer.retrieval"):
        monkeypatch.setattr(f"{module}.standard_codecs", lambda: registry_of(watched))
    wide = replace(COMPAT, layers=1, k_shape=(8, 256), v_shape=(8, 256))
    tensor = np.zeros((BLOCK_TOKENS * BLOCKS, 8, 256), np.float16)  # 16 KiB a block, 50 encoded

    async with on_stage(certificates, encodings=(Encoding("shuffle-zstd"),)) as scene:
        async with scene.producer.open(wide, TOKENS) as handle:
            await handle.add_segment()
            await handle.add_layer(0, tensor, tensor)
        assert handle.publication.octets < 16 << 10
        expected = Expectations.of_tokens(SCOPE, wide, TOKENS)
        events = await run(scene.retrieve(expected=expected))

    assert isinstance(events[-1], PublicationComplete)
    assert {name.rstrip("0123456789") for name in watched.encoding} == {"kvcs-hash_"}
    assert {name.rstrip("0123456789") for name in watched.decoding} == {"kvcs-examine_"}


async def test_a_layer_that_cannot_be_encoded_is_an_error_of_its_caller(
    certificates: CertificateFiles,
) -> None:
    k, v = finite(0)
    k[7, 1, 3] = np.nan

    async with on_stage(certificates, encodings=(Encoding("int8"),)) as scene:
        handle = scene.open()
        await handle.add_segment()
        with pytest.raises(ConfigError, match="'int8' cannot carry elements that are not finite"):
            await handle.add_layer(0, k, v)
        await handle.add_layer(0, *finite(0))
        await handle.abandon("enough seen")


# -- the commands --------------------------------------------------------------------------------


async def test_the_command_takes_a_codec_or_says_why_not(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    async def consume(scene: Scene, *flags: str) -> list[dict[str, Any]]:
        port = int(scene.spec.uri.rpartition(":")[2].strip("/"))
        args = make_parser().parse_args(desk.consume("--json", *flags, port=port))
        capsys.readouterr()
        assert await args.run(args) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    async with on_stage(desk.certificates, encodings=(Encoding("int8"),)) as scene:
        await publish(scene)
        events = await consume(scene, "--codec", "int8,raw", "--out", desk["out.safetensors"])
        with pytest.raises(BadManifest, match="int8 is lossy, expected a lossless codec"):
            await consume(scene, "--require-lossless")

    assert (events[-1]["codecs"], events[-1]["lossless"]) == (["int8"], False)
    codec, out = STANDARD["int8"], load_file(desk["out.safetensors"])
    for layer in range(LAYERS):
        k, _ = finite(layer)
        expected = codec.decode(codec.encode(k), k.shape, k.dtype)
        assert out[f"k.{layer}"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--codec", "int8", "--require-lossless"), "codec 'int8' is lossy, but lossless"),
        (("--codec", "gzip"), "no codec 'gzip' is registered; known are raw, shuffle-zstd"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_before_anybody_is_asked(
    desk: Desk, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert main(desk.consume(*flags)) == 2
    assert says in capsys.readouterr().err
