"""The codec registry, and the one codec that everybody has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import compress, decompress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.codecs import PRIVATE_USE, RAW, Codec, CodecRegistry
from kvcs.kvsp.descriptor import ELEMENT_OCTETS
from kvcs.kvsp.layout import Component, Octets, numpy_dtype


@dataclass(frozen=True)
class Deflate:
    """A codec as an application would write one."""

    name: str = "deflate"
    value: int = 0x8001
    components: frozenset[Component] = frozenset({Component.KV})
    lossless: bool = True
    fixed_length: bool = False

    def encode(self, array: NDArray[Any]) -> bytes:
        return compress(RAW.encode(array))

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return RAW.decode(decompress(data), shape, dtype)


def tensor(dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    octets = np.random.default_rng(7).bytes(int(np.prod(shape)) * ELEMENT_OCTETS[dtype])
    return np.frombuffer(octets, dtype=numpy_dtype(dtype)).reshape(shape)


@pytest.mark.parametrize("codec", [RAW, Deflate()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ELEMENT_OCTETS)
@pytest.mark.parametrize("shape", [(16, 8, 128), (1, 1, 1), (3, 3, 80), (16, 0, 0)])
def test_a_tensor_of_any_element_type_comes_back_bit_by_bit(
    codec: Codec, dtype: str, shape: tuple[int, ...]
) -> None:
    array = tensor(dtype, shape)

    back = codec.decode(codec.encode(array), shape, numpy_dtype(dtype))

    assert back.shape == shape
    assert back.dtype == numpy_dtype(dtype)
    assert back.tobytes() == array.tobytes()


def test_raw_writes_c_order_little_endian_whatever_it_is_given() -> None:
    values = np.array([[1, 2], [3, 4]], dtype="<f2")

    assert RAW.encode(values) == values.tobytes()
    assert RAW.encode(values.astype(">f2")) == values.tobytes()
    assert RAW.encode(np.asfortranarray(values)) == values.tobytes()
    assert RAW.encode(values.T) == values.T.tobytes()


def test_raw_decodes_without_copying_and_does_not_make_octets_writable() -> None:
    buffer = bytearray(16)
    view = memoryview(buffer)

    array = RAW.decode(view, (2, 4), numpy_dtype("float16"))
    buffer[0:2] = b"\x00\x3c"

    assert float(array[0, 0]) == 1.0
    assert not RAW.decode(view.toreadonly(), (2, 4), numpy_dtype("float16")).flags.writeable


@given(st.integers(0, 40))
def test_raw_refuses_every_length_but_the_right_one(octets: int) -> None:
    if octets == 24:
        RAW.decode(bytes(octets), (2, 2, 3), numpy_dtype("bfloat16"))
    else:
        with pytest.raises(BadObject, match=f"{octets} octets, expected 24") as caught:
            RAW.decode(bytes(octets), (2, 2, 3), numpy_dtype("bfloat16"))
        assert caught.value.reason is Rejection.DATA_LENGTH


def test_a_registry_begins_with_raw_and_takes_more() -> None:
    codecs = CodecRegistry(Deflate())

    assert [codec.name for codec in codecs] == ["raw", "deflate"]
    assert codecs["raw"] is codecs.get("raw") is codecs.by_value(0) is RAW
    assert codecs["deflate"] == codecs.by_value(0x8001) == Deflate()
    assert "deflate" in codecs
    assert len(codecs) == 2


def test_registries_share_nothing() -> None:
    CodecRegistry().register(Deflate())

    assert "deflate" not in CodecRegistry()
    assert CodecRegistry().get("deflate") is None
    assert CodecRegistry().by_value(0x8001) is None
    with pytest.raises(ConfigError, match="no codec 'deflate' is registered; known are raw"):
        CodecRegistry()["deflate"]


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (Deflate(name="raw"), "'raw' is already registered"),
        (Deflate(name="mine"), "already that of 'taken'"),
        (Deflate(value=0), "private use"),
        (Deflate(value=0x7FFF), "private use: 0x8000 to 0xffff"),
        (Deflate(value=0x10000), "private use"),
        (Deflate(value=True), "private use"),
        (Deflate(name=""), "expected 1 to 32"),
        (Deflate(name="x" * 33), "expected 1 to 32"),
        (Deflate(name="Deflate"), "expected 1 to 32"),
        (Deflate(name="a.b"), "expected 1 to 32"),
        (Deflate(name="a\n"), "expected 1 to 32"),
        (Deflate(value=0x8002, components=frozenset()), "no component"),
        (object(), "object is not a codec"),
    ],
)
def test_what_cannot_be_registered_is_refused_and_leaves_no_trace(codec: Any, says: str) -> None:
    codecs = CodecRegistry(Deflate(name="taken"))

    with pytest.raises(ConfigError, match=says):
        codecs.register(codec)
    assert [known.name for known in codecs] == ["raw", "taken"]


@pytest.mark.parametrize("value", [PRIVATE_USE[0], PRIVATE_USE[-1]])
def test_both_ends_of_the_private_range_can_be_used(value: int) -> None:
    assert CodecRegistry(Deflate(value=value)).by_value(value) == Deflate(value=value)
