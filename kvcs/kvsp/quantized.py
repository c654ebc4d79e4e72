"""Codecs that round: a scale for each token and head, and an octet for each element. Lossy.

For each token and head, the scale is the largest magnitude among its elements divided by the
largest one that an octet can hold, rounded up to a bfloat16, and at least 2**-126; 0 where all
elements are. An element becomes the octet whose value times the scale is nearest to it.

Data is the scales, as bfloat16 in little-endian, then the octets of the elements, both in C order.
The Data of a tensor without elements is empty. Float16, bfloat16 and float32 can be carried; all
elements must be finite. The scales are needed for each head, so K and V are carried apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.layout import Component, Octets, numpy_dtype

#: Element types that are rounded; the others are octets already.
CARRIED = tuple(numpy_dtype(name) for name in ("float16", "bfloat16", "float32"))

_SCALE_OCTETS = 2
#: Bits of the least bfloat16 that is normal: not every processor computes with smaller ones.
_LEAST = 0x0080
#: Bits of the least bfloat16 that is not finite.
_NOT_FINITE = 0x7F80
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: The largest finite number of each type.
_LIMITS: dict[np.dtype[Any], np.float32] = {
    numpy_dtype("float16"): np.float32(65504.0),
    numpy_dtype("bfloat16"): np.float32(ml_dtypes.bfloat16(3.3895314e38)),
    numpy_dtype("float32"): np.finfo(np.float32).max,
}


class _Quantizing:
    """What both codecs do, but for what an octet stands for."""

    __slots__ = ()

    name: str
    #: The largest magnitude that an octet stands for.
    largest: ClassVar[float]

    def encode(self, array: NDArray[Any]) -> bytes:
        """Round a tensor ``[tokens, heads, dim]``.

        Raises:
            ConfigError: If its element type is another one, or an element is not finite.
        """
        if array.dtype.newbyteorder("<") not in CARRIED:
            known = ", ".join(map(str, CARRIED))
            raise ConfigError(f"codec {self.name!r} cannot carry {array.dtype}, expected {known}")
        if not array.size:
            return b""
        rows = np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1])
        peaks = np.abs(rows).max(axis=1)
        if not np.isfinite(peaks).all():
            raise ConfigError(f"codec {self.name!r} cannot carry elements that are not finite")
        bits = _bfloat16_above(peaks / np.float32(self.largest))
        divisors = _float32(np.maximum(bits, _LEAST))
        bits = np.where(peaks > 0, np.maximum(bits, _LEAST), 0)
        return bits.astype("<u2").tobytes() + self._octets(rows / divisors[:, None])

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return values times scales, in the nearest elements of the type.

        Raises:
            BadObject: If the length is not that of such a tensor, or if a scale or an octet is
                one that is never encoded.
        """
        if dtype not in CARRIED:
            raise BadObject(Rejection.DECODE, f"codec {self.name!r} cannot carry {dtype}")
        elements = prod(shape)
        rows = elements // shape[-1] if elements else 0
        expected = _SCALE_OCTETS * rows + elements
        if len(data) != expected:
            raise BadObject(
                Rejection.DATA_LENGTH,
                f"{self.name} data of {len(data)} octets, expected {expected} for shape "
                f"{tuple(shape)}",
            )
        if not elements:
            return np.empty(tuple(shape), dtype)
        bits = np.frombuffer(data, "<u2", rows)
        if (bits >= _NOT_FINITE).any():  # the sign bit is above it
            raise BadObject(Rejection.DECODE, "a scale is negative or not finite")
        octets = np.frombuffer(data, np.uint8, elements, _SCALE_OCTETS * rows)
        with np.errstate(over="ignore"):  # what is out of range ends at its limits
            values = self._values(octets).reshape(rows, -1) * _float32(bits)[:, None]
        limit = _LIMITS[dtype]
        return np.clip(values, -limit, limit, out=values).astype(dtype).reshape(tuple(shape))

    def _octets(self, scaled: NDArray[np.float32]) -> bytes:
        raise NotImplementedError

    def _values(self, octets: NDArray[np.uint8]) -> NDArray[np.float32]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Int8(_Quantizing):
    """An octet is an integer from -127 to 127."""

    largest: ClassVar[float] = 127.0

    name: str = "int8"
    value: int = 0xC003
    components: frozenset[Component] = frozenset({Component.K, Component.V})
    lossless: bool = False
    fixed_length: bool = False

    def _octets(self, scaled: NDArray[np.float32]) -> bytes:
        return np.rint(scaled, out=scaled).astype(np.int8).tobytes()

    def _values(self, octets: NDArray[np.uint8]) -> NDArray[np.float32]:
        if (octets == 0x80).any():
            raise BadObject(Rejection.DECODE, "an element is -128, expected -127 to 127")
        return octets.view(np.int8).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Fp8(_Quantizing):
    """An octet is a float of 4 bits of exponent and 3 of mantissa (E4M3), of at most 448."""

    largest: ClassVar[float] = 448.0

    name: str = "fp8"
    value: int = 0xC004
    components: frozenset[Component] = frozenset({Component.K, Component.V})
    lossless: bool = False
    fixed_length: bool = False

    def _octets(self, scaled: NDArray[np.float32]) -> bytes:
        return scaled.astype(_E4M3).tobytes()

    def _values(self, octets: NDArray[np.uint8]) -> NDArray[np.float32]:
        if (octets & 0x7F == 0x7F).any():
            raise BadObject(Rejection.DECODE, "an element is not a number")
        return _E4M3_VALUES[octets]


_E4M3_VALUES: NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)


def _bfloat16_above(values: NDArray[np.float32]) -> NDArray[Any]:
    """Return the bits of the least bfloat16 that is not below each value; none is negative."""
    return (values.view(np.uint32) + 0xFFFF) >> 16


def _float32(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return what the bits of a bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
