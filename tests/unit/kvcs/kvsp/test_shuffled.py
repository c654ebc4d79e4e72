"""Codecs that shuffle and compress: nothing is lost, and nothing sent can make them do harm."""

import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.descriptor import ELEMENT_OCTETS
from kvcs.kvsp.layout import numpy_dtype
from kvcs.kvsp.shuffled import ShuffleLz4, ShuffleZstd
from kvcs.kvsp.standard import standard_codecs

Shuffle = ShuffleZstd | ShuffleLz4
ZSTD, LZ4 = ShuffleZstd(), ShuffleLz4()
each_codec = pytest.mark.parametrize("codec", [ZSTD, LZ4], ids=lambda codec: codec.name)

BF16 = numpy_dtype("bfloat16")


def plane(octets: bytes) -> bytes:
    """Return one plane of Data: how many octets follow, and the octets."""
    return struct.pack(">I", len(octets)) + octets


def frame(elements: int, octet: int, says: int | None = None) -> bytes:
    """Write a Zstandard frame of one octet repeated (RFC 8878, Section 3.1.1)."""
    size = struct.pack("<Q", elements if says is None else says)
    block = ((elements << 3) | (1 << 1) | 1).to_bytes(3, "little")  # run-length, the last one
    return bytes.fromhex("28b52ffd") + b"\xe0" + size + block + bytes([octet])


def cache_like(dtype: str, shape: tuple[int, ...], seed: int = 3) -> NDArray[Any]:
    """Return what a cache looks like: normally distributed, some channels larger than others."""
    rng = np.random.default_rng(seed)
    channels = np.exp(rng.normal(size=shape[-1]))
    return (rng.normal(size=shape) * channels).astype(numpy_dtype(dtype))


@st.composite
def tensors(draw: st.DrawFn) -> NDArray[Any]:
    """Any bits at all, as any element type: random, repeated, or with a few changes."""
    dtype = draw(st.sampled_from(sorted(ELEMENT_OCTETS)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    octets = prod(shape) * ELEMENT_OCTETS[dtype]
    pattern = draw(st.binary(min_size=1, max_size=64))
    content = bytearray((pattern * (octets // len(pattern) + 1))[:octets])
    for _ in range(draw(st.integers(0, 3)) if octets else 0):
        content[draw(st.integers(0, octets - 1))] = draw(st.integers(0, 255))
    return np.frombuffer(bytes(content), numpy_dtype(dtype)).reshape(shape)


@each_codec
@given(tensors())
def test_every_bit_comes_back_and_data_is_bounded(codec: Shuffle, array: NDArray[Any]) -> None:
    data = codec.encode(array)

    assert len(data) <= array.nbytes + (4 * array.itemsize if array.size else 0)
    back = codec.decode(data, array.shape, array.dtype)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert back.tobytes() == array.tobytes()


@each_codec
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cache_becomes_shorter(codec: Shuffle, dtype: str) -> None:
    array = cache_like(dtype, (16, 8, 128))

    data = codec.encode(array)
    assert len(data) < 0.95 * array.nbytes
    assert codec.decode(data, array.shape, array.dtype).tobytes() == array.tobytes()


@each_codec
def test_strides_and_byte_order_do_not_matter(codec: Shuffle) -> None:
    array = cache_like("float16", (8, 2, 16))

    assert codec.encode(np.asfortranarray(array)) == codec.encode(array)
    assert codec.encode(array.astype(">f2")) == codec.encode(array)
    assert codec.encode(array[::2, :, ::2]) == codec.encode(array[::2, :, ::2].copy())


def test_zstandard_written_by_hand_is_read() -> None:
    # 1.0 is 0x3f80, rotated by a bit 0x7f00.
    data = plane(frame(64, 0x7F)) + plane(bytes(64))

    found = ZSTD.decode(data, (4, 2, 8), BF16)
    assert found.tobytes() == b"\x80\x3f" * 64


def test_lz4_written_by_hand_is_read() -> None:
    # One literal, a match of 58 octets at a distance of 1, five literals: 64 octets of 0.
    zeros = bytes.fromhex("1f 00 0100 27 50 0000000000")
    data = plane(b"\x7f" + zeros) + plane(bytes(64))

    found = LZ4.decode(data, (4, 2, 8), BF16)
    assert found.tobytes() == b"\x80\x3f" * 64


def test_the_signs_go_to_the_end_and_each_plane_is_as_long_as_there_are_elements() -> None:
    array = np.array([[1.0, -1.0]], "<f4")

    # 0x3f800000 and 0xbf800000, rotated by a bit.
    expected = plane(b"\x7f\x7f") + plane(b"\0\0") + plane(b"\0\0") + plane(b"\0\1")
    assert ZSTD.encode(array) == LZ4.encode(array) == expected


# -- what strangers send -------------------------------------------------------------------------


@each_codec
@given(st.binary(max_size=200), st.integers(0, 40), st.sampled_from(sorted(ELEMENT_OCTETS)))
def test_whatever_comes_only_a_bad_object_leaves(
    codec: Shuffle, data: bytes, elements: int, dtype: str
) -> None:
    try:
        found = codec.decode(data, (elements,), numpy_dtype(dtype))
    except BadObject:
        return
    assert found.shape == (elements,)


@each_codec
@given(st.binary(max_size=80), st.integers(1, 64))
def test_whatever_is_in_a_plane_only_a_bad_object_leaves(
    codec: Shuffle, packed: bytes, elements: int
) -> None:
    for start in (b"", bytes.fromhex("28b52ffd"), frame(elements, 1)[:13]):
        try:
            codec.decode(plane(start + packed), (elements,), numpy_dtype("uint8"))
        except BadObject:
            continue


@each_codec
def test_a_changed_octet_is_noticed_or_changes_values_and_nothing_else(codec: Shuffle) -> None:
    array = cache_like("bfloat16", (8, 1, 64))
    data = codec.encode(array)

    for octet in range(len(data)):
        for bit in (0x01, 0x80):
            changed = bytearray(data)
            changed[octet] ^= bit
            try:
                found = codec.decode(bytes(changed), array.shape, array.dtype)
            except BadObject:
                continue
            assert (found.shape, found.dtype) == (array.shape, array.dtype)


@each_codec
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_cut_or_an_octet_too_many_is_a_wrong_length(codec: Shuffle, dtype: str) -> None:
    array = cache_like(dtype, (4, 1, 16))
    data = codec.encode(array)

    for wrong in (*(data[:cut] for cut in range(len(data))), data + b"\0"):
        with pytest.raises(BadObject) as caught:
            codec.decode(wrong, array.shape, array.dtype)
        assert caught.value.reason is Rejection.DATA_LENGTH
    with pytest.raises(BadObject):
        codec.decode(data, (4, 1, 17), array.dtype)
    with pytest.raises(BadObject):
        codec.decode(data, (4, 0, 0), array.dtype)


@each_codec
def test_a_plane_is_not_longer_for_being_compressed(codec: Shuffle) -> None:
    packed = frame(4, 9) if codec is ZSTD else b"\x09" + bytes.fromhex("80") + bytes(8)
    assert codec._expand(memoryview(packed), 4).tobytes() == b"\x09" * 4

    with pytest.raises(BadObject, match="at most 4") as caught:
        codec.decode(plane(packed), (4,), numpy_dtype("uint8"))
    assert caught.value.reason is Rejection.DATA_LENGTH


@each_codec
def test_a_tensor_without_elements_has_no_data(codec: Shuffle) -> None:
    assert codec.encode(np.empty((16, 0, 0), BF16)) == b""
    assert codec.decode(b"", (16, 0, 0), BF16).shape == (16, 0, 0)
    with pytest.raises(BadObject, match="1 octets behind the last plane"):
        codec.decode(b"\0", (16, 0, 0), BF16)


NO_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
LONG = bytes(1 << 20)
BOMBS: dict[str, tuple[Shuffle, bytes, str]] = {
    "says more": (ZSTD, frame(64, 0, says=1 << 40), "holds 1099511627776 octets, expected 64"),
    "says less": (ZSTD, frame(64, 0, says=63), "holds 63 octets, expected 64"),
    "says nothing": (ZSTD, NO_SIZE, "holds an unknown number of octets, expected 64"),
    "holds more than it says": (ZSTD, frame(1 << 16, 0, says=64), "not a Zstandard frame"),
    "holds less than it says": (ZSTD, frame(63, 0, says=64), "not a Zstandard frame"),
    "two frames": (ZSTD, frame(64, 0) + frame(64, 0), "not a Zstandard frame"),
    "octets behind it": (ZSTD, frame(64, 0) + b"\0", "not a Zstandard frame"),
    "a frame to skip": (
        ZSTD,
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 64) + bytes(40),
        "not a Zstandard frame",
    ),
    "is a million": (ZSTD, zstandard.ZstdCompressor().compress(LONG), "holds 1048576 octets"),
    "lz4 of more": (
        LZ4,
        b"\0" + bytes.fromhex("1f 00 0100") + b"\xff" * 20 + bytes.fromhex("27 50 0000000000"),
        "not an LZ4 block of 64 octets",
    ),
    "lz4 of less": (
        LZ4,
        b"\0" + bytes.fromhex("1f 00 0100 26 50 0000000000"),
        "holds 63 octets, expected 64",
    ),
    "no lz4": (LZ4, b"", "no LZ4 block"),
    "lz4 of nothing": (LZ4, b"\0", "LZ4 block"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_holds_anything_but_a_plane_is_refused_without_unpacking_it(bomb: str) -> None:
    codec, packed, says = BOMBS[bomb]
    assert len(packed) < 64

    tracemalloc.start()
    try:
        with pytest.raises(BadObject, match=says) as caught:
            codec.decode(plane(packed), (64,), numpy_dtype("uint8"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.reason is Rejection.DECODE
    assert peak < 1 << 18


def test_after_a_bad_frame_the_next_one_is_read() -> None:
    codec = ShuffleZstd()
    good = plane(frame(64, 5))

    for _ in range(3):
        with pytest.raises(BadObject):
            codec.decode(plane(frame(1 << 16, 0, says=64)), (64,), numpy_dtype("uint8"))
        assert codec.decode(good, (64,), numpy_dtype("uint8")).tobytes() == b"\5" * 64


@each_codec
def test_threads_may_share_a_codec(codec: Shuffle) -> None:
    arrays = [cache_like("bfloat16", (16, 2, 64), seed) for seed in range(8)]
    alone = [codec.encode(array) for array in arrays]

    def both_ways(number: int) -> bool:
        array = arrays[number % 8]
        data = codec.encode(array)
        back = codec.decode(data, array.shape, array.dtype)
        return data == alone[number % 8] and back.tobytes() == array.tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both_ways, range(400)))


# -- without its library -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("shuffle-zstd", "zstandard", "zstandard"), ("shuffle-lz4", "lz4.block", "lz4")],
)
def test_a_codec_without_its_library_says_which_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    codecs = standard_codecs()
    assert name not in codecs
    assert codecs.get(name) is None
    assert codecs.unavailable(name) == f"it needs the package {package}: pip install {package}"
    assert len(codecs) == 4
    with pytest.raises(ConfigError, match=f"codec '{name}' cannot be used here: it needs the"):
        codecs[name]
