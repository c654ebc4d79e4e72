import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcs.errors import BadDescriptor, ConfigError
from kvcs.kvsp.descriptor import ELEMENT_OCTETS, Descriptor
from kvcs.kvsp.layout import Layout
from kvcs.store.source import (
    MODEL_SHAPES,
    ArraySource,
    BlockSource,
    ModelShape,
    SafetensorsSource,
    SyntheticSource,
)
from kvcs.store.tensorfile import TensorFile, TensorSpec

DATA = Path(__file__).parents[3] / "data" / "smollm2-128.safetensors"
LAYERS, TOKENS = 3, 10


def descriptor(**changed: Any) -> Descriptor:
    members: dict[str, Any] = {
        "model": "tiny",
        "revision": "1",
        "layers": LAYERS,
        "block_tokens": 4,
        "dtype": "bfloat16",
        "k_shape": (2, 8),
        "v_shape": (1, 4),
    }
    return Descriptor(**(members | changed))


def write(folder: Path, about: Descriptor, **changed: TensorSpec | None) -> Path:
    """Write a cache of zeros, with some tensors changed or (None) left out."""
    layout = Layout.of(about)
    specs = {
        f"{name}_{layer}": TensorSpec(about.dtype, (TOKENS, *shape[1:]))
        for name, shape in (("k", layout.k_shape), ("v", layout.v_shape))
        for layer in range(LAYERS)
    }
    present = {name: spec for name, spec in (specs | changed).items() if spec is not None}
    path = folder / "cache.safetensors"
    with TensorFile.create(path, {n.replace("_", "."): s for n, s in present.items()}) as file:
        for number, name in enumerate(file):
            file.tensor(name).view(f"u{ELEMENT_OCTETS[file.specs[name].dtype]}")[:] = number
    side = {"descriptor": about.members(), "tokens": list(range(TOKENS)), "prompt": "ignored"}
    path.with_suffix(".json").write_text(json.dumps(side))
    return path


def test_every_source_is_one() -> None:
    about = descriptor()
    k, v = (
        [np.zeros((TOKENS, *shape), Layout.of(about).dtype)] * LAYERS for shape in ((2, 8), (1, 4))
    )

    for source in (
        SafetensorsSource(DATA),
        ArraySource(about, range(TOKENS), k, v),
        SyntheticSource(about, TOKENS),
    ):
        assert isinstance(source, BlockSource)


def test_the_recorded_cache_is_read_layer_by_layer_and_part_by_part() -> None:
    source = SafetensorsSource(DATA)

    layers = list(source.layers(0, 8))
    assert [layer for layer, _, _ in layers] == list(range(30))
    assert {k.shape for _, k, _ in layers} == {(128, 3, 64)}
    for (_, k, v), (_, part_k, part_v) in zip(layers, source.layers(2, 3), strict=True):
        assert part_k.tobytes() == k[32:80].tobytes()
        assert part_v.tobytes() == v[32:80].tobytes()


def test_a_mapped_tensor_is_not_read_into_memory() -> None:
    source = SafetensorsSource(DATA)

    _, k, _ = next(source.layers(0, 8))
    assert not k.flags.owndata
    assert not k.flags.writeable


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"k_1": None}, r"no tensor 'k.1', expected bfloat16 \[10, 2, 8\]"),
        (
            {"v_2": TensorSpec("bfloat16", (TOKENS, 1, 5))},
            r"'v.2' is bfloat16 \[10, 1, 5\], expected bfloat16 \[10, 1, 4\]",
        ),
        (
            {"k_0": TensorSpec("float16", (TOKENS, 2, 8))},
            r"'k.0' is float16 .*expected bfloat16",
        ),
        ({"k_0": TensorSpec("bfloat16", (9, 2, 8))}, r"'k.0' is bfloat16 \[9, 2, 8\], expected"),
        ({"k_3": TensorSpec("bfloat16", (TOKENS, 2, 8))}, r"'k.3' is not one of .* 3 layers"),
        ({"other": TensorSpec("int8", (1,))}, "'other' is not one of"),
    ],
)
def test_a_tensor_that_contradicts_the_descriptor_is_named_with_both_shapes(
    tmp_path: Path, changed: dict[str, TensorSpec | None], text: str
) -> None:
    path = write(tmp_path, descriptor(), **changed)

    with pytest.raises(ConfigError, match=text):
        SafetensorsSource(path)


def test_tensors_of_an_empty_section_may_be_left_out(tmp_path: Path) -> None:
    about = descriptor(v_shape=(0, 0))
    path = write(tmp_path, about, v_0=None, v_1=None)

    assert [v.shape for _, _, v in SafetensorsSource(path).layers(1, 1)] == [(4, 0, 0)] * LAYERS


@pytest.mark.parametrize(
    ("side", "text"),
    [
        (None, "No such file"),
        ("{", "not acceptable JSON"),
        ("{}", "expected the members"),
        ('{"descriptor": {}, "tokens": []}', "no member 'kvsp'"),
        ('{"descriptor": {}, "tokens": [1, -1]}', "token 1 is -1"),
        ('{"descriptor": {}, "tokens": [true]}', "token 0 is True"),
    ],
)
def test_a_side_file_that_cannot_be_used_is_named(
    tmp_path: Path, side: str | None, text: str
) -> None:
    path = write(tmp_path, descriptor())
    path.with_suffix(".json").unlink()
    if side is not None:
        path.with_suffix(".json").write_text(side)

    with pytest.raises(ConfigError, match=rf"cache\.json: .*{text}"):
        SafetensorsSource(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.safetensors: No such file"):
        SafetensorsSource(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize(("first", "blocks"), [(0, 3), (-1, 1), (0, 0), (2, 1)])
def test_blocks_that_a_source_does_not_have_are_refused(first: int, blocks: int) -> None:
    source = SyntheticSource(descriptor(), TOKENS)

    with pytest.raises(ConfigError, match="2 blocks"):
        list(source.layers(first, blocks))


def test_an_array_that_does_not_fit_is_named() -> None:
    about = descriptor()
    k = [np.zeros((TOKENS, 2, 8), Layout.of(about).dtype)] * LAYERS

    with pytest.raises(ConfigError, match="v: 0 arrays for 3 layers"):
        ArraySource(about, range(TOKENS), k)
    with pytest.raises(ConfigError, match=r"v.0 is bfloat16 \[10, 2, 8\], expected .*\[10, 1, 4\]"):
        ArraySource(about, range(TOKENS), k, k)
    with pytest.raises(ConfigError, match="2 times for 3 layers"):
        ArraySource(about, range(TOKENS), k, k, ready_at_s=[1, 2])


# -- synthetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(ELEMENT_OCTETS))
def test_a_synthetic_cache_has_the_shape_that_was_asked_for_and_finite_elements(dtype: str) -> None:
    about = descriptor(dtype=dtype)

    for _, k, v in SyntheticSource(about, TOKENS).layers(0, 2):
        assert (k.shape, v.shape) == ((8, 2, 8), (8, 1, 4))
        assert k.dtype == v.dtype == Layout.of(about).dtype
        assert np.isfinite(k.astype(np.float64)).all()
        assert len(np.unique(k.reshape(-1).view(f"u{k.dtype.itemsize}"))) > 8


def test_a_synthetic_cache_follows_from_its_seed_in_whatever_parts_it_is_read() -> None:
    about = descriptor()
    one, same, other = (SyntheticSource(about, TOKENS, seed=seed) for seed in (7, 7, 8))

    assert one.tokens == same.tokens
    assert one.tokens != other.tokens
    whole = [(k.tobytes(), v.tobytes()) for _, k, v in one.layers(0, 2)]
    parts = [
        (k0.tobytes() + k1.tobytes(), v0.tobytes() + v1.tobytes())
        for (_, k0, v0), (_, k1, v1) in zip(same.layers(0, 1), same.layers(1, 1), strict=True)
    ]
    assert whole == parts
    assert whole != [(k.tobytes(), v.tobytes()) for _, k, v in other.layers(0, 2)]
    assert len(set(whole)) == LAYERS


def test_layers_become_ready_one_interval_after_the_other() -> None:
    source = SyntheticSource(descriptor(), TOKENS, layer_interval_s=0.5)

    assert source.ready_at_s == (0.5, 1.0, 1.5)
    assert SyntheticSource(descriptor(), TOKENS).ready_at_s == ()


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_models_are_known_by_name(name: str) -> None:
    source = SyntheticSource.of_model(name, 16)

    assert source.descriptor.layers == MODEL_SHAPES[name].layers
    layer, k, v = next(source.layers(0, 1))
    assert (layer, k.shape[1:], v.shape[1:]) == (
        0,
        MODEL_SHAPES[name].k_shape,
        MODEL_SHAPES[name].v_shape,
    )


def test_a_shape_may_be_said_in_numbers() -> None:
    half, eighth = ModelShape.parse("3,2,64"), ModelShape.parse("3,2,64,float8_e4m3fn")

    assert half == ModelShape(3, (2, 64), (2, 64), "bfloat16")
    assert eighth.dtype == "float8_e4m3fn"
    assert ModelShape.parse("phi-4") is MODEL_SHAPES["phi-4"]
    source = SyntheticSource.of_model("3,2,64", 16, seed=2)
    assert source.descriptor == half.descriptor("3,2,64", seed=2)
    assert next(source.layers(0, 1)).k.shape == (16, 2, 64)


@pytest.mark.parametrize("text", ["", "3", "3,2", "3,2,64,", "3,-2,64", "3, 2, 64", "3,2,64,a,b"])
def test_what_is_neither_a_name_nor_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"known are llama-3\.1-8b, .* LAYERS,HEADS,DIM"):
        ModelShape.parse(text)


@pytest.mark.parametrize(("text", "named"), [("0,2,64", "layers is 0"), ("3,2,64,int4", "int4")])
def test_numbers_of_no_cache_are_refused(text: str, named: str) -> None:
    with pytest.raises(BadDescriptor, match=named):
        SyntheticSource.of_model(text, 16)


def test_octets_of_a_token_are_those_that_are_known_of_the_models() -> None:
    """Octets of one token over all layers, as published for these models."""
    for name, octets in (("llama-3.1-8b", 131_072), ("deepseek-v3", 70_272)):
        layout = Layout.of(SyntheticSource.of_model(name, 16).descriptor)
        assert layout.container_octets == 16 * octets


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SyntheticSource.of_model("gpt-9", 16), "known are llama-3.1-8b"),
        (lambda: SyntheticSource(descriptor(), 0), "tokens is 0"),
        (lambda: SyntheticSource(descriptor(), 1, seed=-1), "seed is -1"),
        (lambda: SyntheticSource(descriptor(), 1, layer_interval_s=-1), "layer_interval_s is -1"),
    ],
)
def test_what_cannot_be_made_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


# -- the file ------------------------------------------------------------------------------------


def test_a_file_is_the_one_that_the_format_describes(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    specs = {"a": TensorSpec("float32", (2, 3)), "b": TensorSpec("int8", (5,))}
    with TensorFile.create(path, specs) as file:
        file.tensor("a")[:] = np.arange(6).reshape(2, 3)
        file.tensor("b")[:] = -1

    from safetensors.numpy import load_file  # the format's own library

    loaded = load_file(path)
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["b"].tolist() == [-1] * 5


def header(members: Any, body: bytes = b"") -> bytes:
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    return struct.pack("<Q", len(text)) + text + body


MEMBER = {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "at least 8"),
        (b"\xff" * 16, "header of"),
        (header(b"{nothing"), "not JSON"),
        (header(b"[" * 5000), "not JSON"),
        (header([]), "not a JSON object"),
        (header({"a": 1}), "lacks dtype"),
        (header({"a": MEMBER | {"dtype": "I64"}}, bytes(32)), "of type I64"),
        (header({"a": MEMBER | {"shape": [-4]}}, bytes(4)), "lacks dtype"),
        (header({"a": MEMBER}, bytes(3)), "at octets 0 to 4 of 3"),
        (header({"a": MEMBER | {"data_offsets": [0, 3]}}, bytes(4)), "at octets 0 to 3"),
        (header({"a": MEMBER | {"data_offsets": [-4, 0]}}, bytes(4)), "at octets -4"),
        (header({"a": MEMBER | {"shape": [1 << 60], "data_offsets": [0, 1 << 60]}}), "octets 0"),
    ],
)
def test_what_is_not_a_tensor_file_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"bad\.safetensors is not .*{text}"):
        TensorFile.open(path)


def test_metadata_in_a_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(header({"__metadata__": {"format": "pt"}, "a": MEMBER}, b"\1\2\3\4"))

    with TensorFile.open(path) as file:
        assert list(file) == ["a"]
        assert file.tensor("a").tolist() == [1, 2, 3, 4]


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    file = TensorFile.create(tmp_path / "t.safetensors", {"a": TensorSpec("int8", (1,))})
    file.close()

    with pytest.raises(ValueError, match="is closed"):
        file.tensor("a")


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"precious")

    with pytest.raises(ConfigError, match="File exists"):
        TensorFile.create(tmp_path / "t", {})
    assert (tmp_path / "t").read_bytes() == b"precious"
