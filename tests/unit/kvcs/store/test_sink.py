import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.store.sink import (
    ArraySink,
    BlockSink,
    GrowingSafetensorsSink,
    GrowingSink,
    SafetensorsSink,
)
from kvcs.store.source import SafetensorsSource, SyntheticSource

BLOCKS = 3


def descriptor(**changed: Any) -> Descriptor:
    members: dict[str, Any] = {
        "model": "tiny",
        "revision": "1",
        "layers": 2,
        "block_tokens": 4,
        "dtype": "bfloat16",
        "k_shape": (2, 8),
        "v_shape": (1, 4),
    }
    return Descriptor(**(members | changed))


def cut(about: Descriptor) -> tuple[SyntheticSource, list[tuple[int, int, Any, Any]]]:
    """Return a source, and its tensors block by block, the last one first."""
    source = SyntheticSource(about, BLOCKS * about.block_tokens)
    pieces = [
        (layer, block, k[block * 4 : block * 4 + 4], v[block * 4 : block * 4 + 4])
        for layer, k, v in source.layers(0, BLOCKS)
        for block in range(BLOCKS)
    ]
    return source, pieces[::-1]


def as_arrays(sink: BlockSink, layer: int, block: int, k: NDArray[Any], v: NDArray[Any]) -> None:
    sink.place(Component.K, layer, block, k)
    sink.place(Component.V, layer, block, v)


def as_octets(sink: BlockSink, layer: int, block: int, k: NDArray[Any], v: NDArray[Any]) -> None:
    sink.place(Component.V, layer, block, memoryview(v.tobytes()))
    sink.place(Component.K, layer, block, k.tobytes())


def jointly(sink: BlockSink, layer: int, block: int, k: NDArray[Any], v: NDArray[Any]) -> None:
    sink.place(Component.KV, layer, block, k.tobytes() + v.tobytes())


@pytest.mark.parametrize("place", [as_arrays, as_octets, jointly])
@pytest.mark.parametrize("v_shape", [(1, 4), (0, 0)])
def test_blocks_placed_in_any_order_and_form_make_the_arrays(
    place: Callable[..., None], v_shape: tuple[int, int]
) -> None:
    source, pieces = cut(descriptor(v_shape=v_shape))
    sink = ArraySink()
    sink.begin(source.descriptor, BLOCKS)
    for piece in pieces:
        place(sink, *piece)
    sink.done()

    assert sink.complete
    for layer, k, v in source.layers(0, BLOCKS):
        assert sink.k[layer].tobytes() == k.tobytes()
        assert sink.v[layer].tobytes() == v.tobytes()
        assert (sink.k[layer].shape, sink.v[layer].shape) == (k.shape, v.shape)


def test_tensors_land_in_the_callers_own_arrays() -> None:
    source, pieces = cut(descriptor())
    layout = Layout.of(source.descriptor)
    k = [np.zeros((20, 2, 8), layout.dtype) for _ in range(2)]
    v = [np.zeros((12, 1, 4), layout.dtype) for _ in range(2)]
    sink = ArraySink(k, v)
    sink.begin(source.descriptor, BLOCKS)
    for piece in pieces:
        as_arrays(sink, *piece)

    for layer, found_k, found_v in source.layers(0, BLOCKS):
        assert k[layer][:12].tobytes() == found_k.tobytes()
        assert v[layer].tobytes() == found_v.tobytes()
        assert not k[layer][12:].any()


@pytest.mark.parametrize(
    ("k", "text"),
    [
        ([np.zeros((12, 2, 8), np.uint16)] * 2, r"k.0 is uint16 \[12, 2, 8\], expected bfloat16"),
        ([np.zeros((12, 2, 8), "<f2")], "k: 1 arrays were provided for 2 layers"),
        ([np.zeros((11, 2, 8), np.int8)] * 2, r"k.0 is int8 \[11, 2, 8\], expected .*\[12, 2, 8\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(k: list[NDArray[Any]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ArraySink(k, []).begin(descriptor(), BLOCKS)


def test_arrays_of_which_views_cannot_be_written_are_refused() -> None:
    dtype = Layout.of(descriptor()).dtype
    strided = [np.zeros((12, 2, 16), dtype)[:, :, ::2]] * 2

    with pytest.raises(ConfigError, match="C order"):
        ArraySink(strided, []).begin(descriptor(), BLOCKS)


def test_more_than_the_limit_is_not_allocated() -> None:
    with pytest.raises(ConfigError, match="takes 960 octets, limit 959"):
        ArraySink(limit_octets=959).begin(descriptor(), BLOCKS)
    ArraySink(limit_octets=960).begin(descriptor(), BLOCKS)


@pytest.mark.parametrize(
    ("component", "layer", "block", "octets"),
    [
        (Component.K, 2, 0, 128),
        (Component.K, 0, BLOCKS, 128),
        (Component.K, -1, 0, 128),
        (Component.K, 0, 0, 127),
        (Component.V, 0, 0, 128),
        (Component.KV, 0, 0, 128),
    ],
)
def test_what_has_no_place_is_refused(
    component: Component, layer: int, block: int, octets: int
) -> None:
    sink = ArraySink()
    sink.begin(descriptor(), BLOCKS)

    with pytest.raises(ValueError, match=r"layer|octets"):
        sink.place(component, layer, block, bytes(octets))


def test_nothing_is_placed_before_the_beginning() -> None:
    with pytest.raises(ValueError, match="before begin"):
        ArraySink().place(Component.K, 0, 0, b"")


@pytest.mark.parametrize("v_shape", [(1, 4), (0, 0)])
def test_a_file_appears_when_it_is_whole_and_can_be_published_again(
    tmp_path: Path, v_shape: tuple[int, int]
) -> None:
    source, pieces = cut(descriptor(v_shape=v_shape))
    path = tmp_path / "cache.safetensors"
    sink = SafetensorsSink(path, tokens=[*source.tokens, 99], notes={"origin": "test"})
    sink.begin(source.descriptor, BLOCKS)
    for piece in pieces:
        as_arrays(sink, *piece)
        assert not path.exists()
    sink.done()

    again = SafetensorsSource(path)
    assert again.descriptor == source.descriptor
    assert again.tokens == source.tokens
    for (_, k, v), (_, k2, v2) in zip(
        source.layers(0, BLOCKS), again.layers(0, BLOCKS), strict=True
    ):
        assert (k.tobytes(), v.tobytes()) == (k2.tobytes(), v2.tobytes())
    assert json.loads(path.with_suffix(".json").read_text())["origin"] == "test"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache.json", "cache.safetensors"]


def test_a_retrieval_that_fails_leaves_no_file_and_an_older_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_bytes(b"older")
    sink = SafetensorsSink(path)
    sink.begin(descriptor(), BLOCKS)
    sink.place(Component.K, 0, 0, bytes(128))
    sink.abandon()
    sink.abandon()

    assert path.read_bytes() == b"older"
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]
    with pytest.raises(ValueError, match="after the end"):
        sink.done()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    sink = SafetensorsSink(tmp_path / "nowhere" / "cache.safetensors")

    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        sink.begin(descriptor(), BLOCKS)


def test_every_sink_is_one(tmp_path: Path) -> None:
    assert isinstance(ArraySink(), BlockSink)
    assert isinstance(SafetensorsSink(tmp_path / "x"), BlockSink)


# -- a context that grows ------------------------------------------------------------------------


def place_all(sink: BlockSink, pieces: list[Any], blocks: range) -> None:
    for piece in pieces:
        if piece[1] in blocks:
            as_arrays(sink, *piece)


@pytest.mark.parametrize("reserve", [0, 2, 3])
def test_a_sink_that_grows_keeps_what_was_placed_and_ends_with_the_same_arrays(
    reserve: int,
) -> None:
    source, pieces = cut(descriptor())
    sink = ArraySink(reserve_blocks=reserve)
    assert isinstance(sink, GrowingSink)
    sink.begin(source.descriptor, 1)
    place_all(sink, pieces, range(1))
    assert [array.shape for array in sink.k] == [(4, 2, 8)] * 2

    for blocks in (2, 2, BLOCKS):
        sink.grow(blocks)
        place_all(sink, pieces, range(blocks - 1, blocks))
    sink.done()

    for layer, k, v in source.layers(0, BLOCKS):
        assert sink.k[layer].tobytes() == k.tobytes()
        assert sink.v[layer].tobytes() == v.tobytes()
        assert sink.k[layer].shape == k.shape


def test_growing_copies_as_often_as_the_logarithm_of_what_it_grows_to() -> None:
    sink = ArraySink()
    sink.begin(descriptor(), 1)
    moves = 0
    for blocks in range(2, 200):
        before = sink.k[0].__array_interface__["data"][0]
        sink.grow(blocks)
        moves += sink.k[0].__array_interface__["data"][0] != before

    assert moves <= 8


def test_memory_that_was_reserved_is_not_moved() -> None:
    sink = ArraySink(reserve_blocks=100)
    sink.begin(descriptor(), 1)
    before = sink.k[1].__array_interface__["data"][0]

    sink.grow(100)

    assert sink.k[1].__array_interface__["data"][0] == before
    assert len(sink.k[1]) == 400


def test_growing_beyond_the_limit_is_refused_and_leaves_what_there_is() -> None:
    source, pieces = cut(descriptor())
    octets = Layout.of(source.descriptor).container_octets
    # Doubling would take more than there may be, as many as are needed would not.
    sink = ArraySink(limit_octets=3 * octets)
    sink.begin(source.descriptor, 2)
    place_all(sink, pieces, range(2))

    sink.grow(3)
    place_all(sink, pieces, range(2, 3))
    with pytest.raises(ConfigError, match=f"takes {4 * octets} octets, limit {3 * octets}"):
        sink.grow(4)

    for layer, k, _ in source.layers(0, BLOCKS):
        assert sink.k[layer].tobytes() == k.tobytes()


def test_arrays_of_the_callers_own_are_grown_into_and_no_further() -> None:
    source, pieces = cut(descriptor())
    layout = Layout.of(source.descriptor)
    k = [np.zeros((12, 2, 8), layout.dtype) for _ in range(2)]
    v = [np.zeros((12, 1, 4), layout.dtype) for _ in range(2)]
    sink = ArraySink(k, v)
    sink.begin(source.descriptor, 1)
    with pytest.raises(ValueError, match="1 blocks"):
        place_all(sink, pieces, range(1, 2))

    sink.grow(3)
    place_all(sink, pieces, range(3))

    assert sink.k is k
    *_, last = source.layers(0, BLOCKS)
    assert k[1].tobytes() == last.k.tobytes()
    with pytest.raises(
        ConfigError, match=r"k\.0 is bfloat16 \[12, 2, 8\], expected .*\[16, 2, 8\]"
    ):
        sink.grow(4)


def test_a_file_cannot_grow() -> None:
    assert not isinstance(SafetensorsSink("cache.safetensors"), GrowingSink)


@pytest.mark.parametrize(
    ("tokens", "noted"),
    [(range(14), list(range(12))), (range(8), None), ((), None)],
    ids=["known", "fewer than came", "not known"],
)
def test_a_context_that_grew_is_written_to_a_file_once_it_is_whole(
    tmp_path: Path, tokens: range, noted: list[int] | None
) -> None:
    source, pieces = cut(descriptor())
    path = tmp_path / "cache.safetensors"
    sink = GrowingSafetensorsSink(path, tokens=tokens)
    assert isinstance(sink, GrowingSink)
    sink.begin(source.descriptor, 1)
    place_all(sink, pieces, range(1))
    sink.grow(BLOCKS)
    place_all(sink, pieces, range(1, BLOCKS))
    assert list(tmp_path.iterdir()) == []

    sink.done()

    side = json.loads(path.with_suffix(".json").read_text())
    assert side.get("tokens") == noted
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "cache.json", "cache.safetensors"
    ]  # fmt: skip
    if noted is not None:
        for ours, found in zip(
            source.layers(0, BLOCKS), SafetensorsSource(path).layers(0, BLOCKS), strict=True
        ):
            assert (ours.k.tobytes(), ours.v.tobytes()) == (found.k.tobytes(), found.v.tobytes())


def test_a_context_that_cannot_be_written_leaves_no_file_behind(tmp_path: Path) -> None:
    source, pieces = cut(descriptor())
    sink = GrowingSafetensorsSink(tmp_path / "missing" / "cache.safetensors")
    sink.begin(source.descriptor, BLOCKS)
    place_all(sink, pieces, range(BLOCKS))

    with pytest.raises(ConfigError, match="missing"):
        sink.done()

    assert not sink.complete
    assert list(tmp_path.iterdir()) == []
