"""Codecs that round: by how much at most, what they refuse, and that they never make infinities."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.descriptor import ELEMENT_OCTETS
from kvcs.kvsp.layout import Component, numpy_dtype
from kvcs.kvsp.quantized import Fp8, Int8

INT8, FP8 = Int8(), Fp8()
Rounding = Int8 | Fp8
each_codec = pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
FLOATS = ("float16", "bfloat16", "float32")
each_float = pytest.mark.parametrize("dtype", FLOATS)
BF16 = numpy_dtype("bfloat16")
#: Of each type: the step above 1, the least number above 0, the largest one.
LIMITS = {
    "float16": (2.0**-10, 2.0**-24, 65504.0),
    "bfloat16": (2.0**-7, 2.0**-133, (2.0 - 2.0**-7) * 2.0**127),
    "float32": (2.0**-23, 2.0**-149, (2.0 - 2.0**-23) * 2.0**127),
}


@st.composite
def tensors(draw: st.DrawFn) -> NDArray[Any]:
    """Any finite elements, from the smallest to the largest."""
    dtype = numpy_dtype(draw(st.sampled_from(FLOATS)))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)))
    count = int(np.prod(shape))
    octets = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    bits = np.frombuffer(octets, f"<u{dtype.itemsize}").copy()
    exponent = int(np.array([np.inf], dtype).view(bits.dtype)[0])
    bits[(bits & exponent) == exponent] &= ~np.array(exponent, bits.dtype)
    return bits.view(dtype).reshape(shape)


def scales(codec: Rounding, array: NDArray[Any]) -> NDArray[np.float64]:
    rows = array.shape[0] * array.shape[1]
    found = np.frombuffer(codec.encode(array), ml_dtypes.bfloat16, rows)
    return found.astype(np.float64).reshape(*array.shape[:2], 1)


def spacing(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return how far, at most, an element is rounded when it enters its type again."""
    wide = np.abs(array.astype(np.float64))
    eps, smallest, _ = LIMITS[str(array.dtype)]
    return np.maximum(wide * eps, smallest)


@given(tensors())
def test_int8_is_wrong_by_half_a_step_at_most(array: NDArray[Any]) -> None:
    back = INT8.decode(INT8.encode(array), array.shape, array.dtype)

    exact = array.astype(np.float64)
    bound = 0.5001 * scales(INT8, array) + spacing(back) + spacing(array)
    assert (np.abs(back.astype(np.float64) - exact) <= bound).all()


@given(tensors())
def test_fp8_is_wrong_by_a_sixteenth_at_most_or_half_its_smallest_step(array: NDArray[Any]) -> None:
    back = FP8.decode(FP8.encode(array), array.shape, array.dtype)

    exact = array.astype(np.float64)
    steps = np.maximum(np.abs(exact) / 16, scales(FP8, array) * 2.0**-10) * 1.0001
    bound = steps + spacing(back) + spacing(array)
    assert (np.abs(back.astype(np.float64) - exact) <= bound).all()


@each_codec
@given(tensors())
def test_what_is_decoded_is_finite_and_of_a_known_length(
    codec: Rounding, array: NDArray[Any]
) -> None:
    data = codec.encode(array)

    assert len(data) == 2 * array.shape[0] * array.shape[1] + array.size
    back = codec.decode(data, array.shape, array.dtype)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert np.isfinite(back.astype(np.float32)).all()


@each_codec
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_have_a_scale_of_zero_and_come_back(codec: Rounding, zero: float) -> None:
    array = np.full((2, 1, 4), zero, BF16)
    array[1, 0, 2] = 3.0

    data = codec.encode(array)
    assert data[:2] == b"\0\0"
    assert codec.decode(data, array.shape, BF16).astype(float).tolist() == array.tolist()


@each_codec
@each_float
def test_the_largest_elements_come_back_nearly(codec: Rounding, dtype: str) -> None:
    _, _, largest = LIMITS[dtype]
    array = np.array([[[largest, -largest, 0.0]]]).astype(numpy_dtype(dtype))

    back = codec.decode(codec.encode(array), array.shape, array.dtype).astype(np.float64)
    assert np.abs(back - array.astype(np.float64)).max() <= 0.07 * largest


def test_a_row_is_written_as_it_can_be_read_by_hand() -> None:
    array = np.array([[[127.0, -64.0, 0.4, 0.6]], [[0.5, 0.0, 0.0, -0.5]]], np.float32)

    # Scales 1.0 and the first bfloat16 from 0.5 / 127 on, 0x3b82; 0.5 is 126.03 of those.
    assert INT8.encode(array).hex() == "803f823b" + "7fc00001" + "7e000082"


@each_codec
def test_one_token_and_head_does_not_change_what_becomes_of_another(codec: Rounding) -> None:
    rng = np.random.default_rng(5)
    array = rng.normal(size=(3, 2, 16)).astype(BF16)
    louder = array.copy()
    louder[1, 0] *= BF16.type(1000)

    one, other = (codec.decode(codec.encode(a), a.shape, BF16) for a in (array, louder))
    same = np.ones((3, 2), bool)
    same[1, 0] = False
    assert (one[same].view(np.uint16) == other[same].view(np.uint16)).all()
    assert not (one[1, 0].view(np.uint16) == other[1, 0].view(np.uint16)).all()


@each_codec
def test_strides_and_byte_order_do_not_matter(codec: Rounding) -> None:
    array = np.random.default_rng(1).normal(size=(4, 2, 8)).astype("<f2")

    assert codec.encode(np.asfortranarray(array)) == codec.encode(array)
    assert codec.encode(array.astype(">f2")) == codec.encode(array)


# -- what is refused -----------------------------------------------------------------------------


@each_codec
@each_float
@pytest.mark.parametrize("element", [np.inf, -np.inf, np.nan])
def test_elements_that_are_not_finite_are_refused(
    codec: Rounding, dtype: str, element: float
) -> None:
    array = np.ones((2, 2, 4), numpy_dtype(dtype))
    array[1, 1, 3] = element

    with pytest.raises(ConfigError, match=f"'{codec.name}' cannot carry elements that are not fin"):
        codec.encode(array)


@each_codec
@pytest.mark.parametrize("dtype", sorted(set(ELEMENT_OCTETS) - set(FLOATS)))
def test_elements_of_an_octet_are_refused_both_ways(codec: Rounding, dtype: str) -> None:
    array = np.ones((1, 1, 4), numpy_dtype(dtype))

    with pytest.raises(ConfigError, match=f"cannot carry {dtype}, expected float16, bfloat16, fl"):
        codec.encode(array)
    with pytest.raises(BadObject, match=f"cannot carry {dtype}"):
        codec.decode(bytes(6), (1, 1, 4), array.dtype)


@each_codec
def test_every_length_but_the_right_one_is_refused(codec: Rounding) -> None:
    for octets in range(40):
        if octets == 2 * 6 + 24:
            codec.decode(bytes(octets), (3, 2, 4), BF16)
            continue
        with pytest.raises(BadObject, match=f"data of {octets} octets, expected 36") as caught:
            codec.decode(bytes(octets), (3, 2, 4), BF16)
        assert caught.value.reason is Rejection.DATA_LENGTH


@each_codec
def test_a_tensor_without_elements_has_no_data(codec: Rounding) -> None:
    assert codec.encode(np.empty((16, 0, 0), BF16)) == b""
    assert codec.decode(b"", (16, 0, 0), BF16).shape == (16, 0, 0)
    with pytest.raises(BadObject, match="expected 0"):
        codec.decode(b"\0\0", (16, 0, 0), BF16)


@pytest.mark.parametrize(
    ("codec", "data", "says"),
    [
        (INT8, "807f" + "01", "a scale is negative or not finite"),
        (INT8, "c07f" + "01", "a scale is negative or not finite"),
        (INT8, "80bf" + "01", "a scale is negative or not finite"),
        (INT8, "0080" + "01", "a scale is negative or not finite"),
        (INT8, "803f" + "80", "an element is -128, expected -127 to 127"),
        (FP8, "807f" + "01", "a scale is negative or not finite"),
        (FP8, "803f" + "7f", "an element is not a number"),
        (FP8, "803f" + "ff", "an element is not a number"),
    ],
)
def test_what_is_never_encoded_is_refused(codec: Rounding, data: str, says: str) -> None:
    with pytest.raises(BadObject, match=says) as caught:
        codec.decode(bytes.fromhex(data), (1, 1, 1), BF16)
    assert caught.value.reason is Rejection.DECODE


@each_codec
@given(st.binary(max_size=60), st.sampled_from(sorted(ELEMENT_OCTETS)), st.integers(0, 12))
def test_whatever_comes_only_a_bad_object_leaves_and_no_infinity(
    codec: Rounding, data: bytes, dtype: str, dim: int
) -> None:
    for octets in (data, (data * 60)[: 2 * 4 + 4 * dim]):
        try:
            found = codec.decode(octets, (2, 2, dim), numpy_dtype(dtype))
        except BadObject:
            continue
        assert found.shape == (2, 2, dim)
        assert np.isfinite(found.astype(np.float32)).all()


@each_codec
def test_k_and_v_cannot_be_carried_together(codec: Rounding) -> None:
    assert codec.components == {Component.K, Component.V}
