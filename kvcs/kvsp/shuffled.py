"""Codecs that shuffle the octets of a tensor and compress them, without loss.

The elements of a KV cache have random mantissas and much alike exponents. So that a compressor
finds the exponents, a tensor is taken apart before it is compressed:

1. Elements of two and four octets, which are floats, are rotated left by one bit: the sign goes to
   the end, and the exponent to the front.
2. The octets of all elements become *planes*: all the most significant ones, then all the next,
   down to the least significant. A plane has an octet for each element, in C order.
3. Each plane is compressed by itself, or left as it is where that would not make it shorter.

Data is, for each plane, the number of octets that follow for it (32 bits, big-endian), and those
octets: as many as the tensor has elements for a plane as it is, fewer for a compressed one. The
Data of a tensor without elements is empty. Hence Data is never longer than the tensor and four
octets for each plane.

What a compressor makes of the same tensor may differ between its versions. Who promises
``deterministic`` publications therefore promises one version of it, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.layout import Component, Octets

#: Octets of the number in front of each plane.
_LENGTH_OCTETS = 4

#: Steps that transpose 8 x 8 bits in a 64-bit integer: shift, and the bits that change places.
_TRANSPOSE = (
    (np.uint64(7), np.uint64(0x00AA00AA00AA00AA)),
    (np.uint64(14), np.uint64(0x0000CCCC0000CCCC)),
    (np.uint64(28), np.uint64(0x00000000F0F0F0F0)),
)


@dataclass(frozen=True, slots=True)
class ShuffleZstd:
    """Planes compressed with Zstandard: each a frame that says how much it holds (RFC 8878).

    Raises:
        ConfigError: If the package ``zstandard`` is not installed.
    """

    name: str = "shuffle-zstd"
    value: int = 0xC001
    components: frozenset[Component] = frozenset(Component)
    lossless: bool = True
    fixed_length: bool = False
    level: int = 1
    """Of the compressor. Higher ones take longer, and gain nothing on planes this short."""

    _zstandard: Any = field(init=False, repr=False, compare=False)
    # What compresses and decompresses costs as much to make as to use, and is for one thread at a
    # time: whoever needs one takes it out of its list, or makes one.
    _compressors: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    _decompressors: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_zstandard", _library("zstandard", "zstandard"))

    def encode(self, array: NDArray[Any]) -> bytes:
        """Shuffle and compress. Costs about two copies and the compressor's work."""
        try:
            compressor = self._compressors.pop()
        except IndexError:
            compressor = self._zstandard.ZstdCompressor(level=self.level, write_content_size=True)
        encoded = _joined(
            (plane, compressor.compress(plane)) for plane in map(bytes, _planes_of(array))
        )
        self._compressors.append(compressor)
        return encoded

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Decompress and put together again.

        Raises:
            BadObject: If a length, a frame or what is in it is not that of such a tensor. A frame
                that says that it holds anything but one plane is not decompressed at all.
        """
        return _tensor(data, shape, dtype, self._expand)

    def _expand(self, packed: memoryview, elements: int) -> NDArray[np.uint8]:
        try:
            decompressor = self._decompressors.pop()
        except IndexError:
            decompressor = self._zstandard.ZstdDecompressor()
        try:
            holds = self._zstandard.get_frame_parameters(packed).content_size
            if holds != elements:
                raise _bad(f"a Zstandard frame holds {_told(holds)}, expected {elements}")
            plane = decompressor.decompress(packed, allow_extra_data=False)
        except self._zstandard.ZstdError as exc:
            raise _bad(f"not a Zstandard frame: {exc}") from None
        self._decompressors.append(decompressor)
        return np.frombuffer(plane, np.uint8)


@dataclass(frozen=True, slots=True)
class ShuffleLz4:
    """Planes taken apart into their bits and compressed with LZ4.

    LZ4 finds repetitions and nothing else, and exponents, though alike, do not repeat. Their first
    bits do. So a plane that is compressed becomes, before it is, the distance of each octet from
    the largest one, and then eight planes of bits: the most significant bit of every octet, eight
    in an octet with the first one in the most significant bit, then the next bit of every octet.
    The number of octets is rounded up to a multiple of eight with octets of 0. Its form in the
    Data is the largest octet, followed by an LZ4 block.

    Raises:
        ConfigError: If the package ``lz4`` is not installed.
    """

    name: str = "shuffle-lz4"
    value: int = 0xC002
    components: frozenset[Component] = frozenset(Component)
    lossless: bool = True
    fixed_length: bool = False

    _block: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_block", _library("lz4.block", "lz4"))

    def encode(self, array: NDArray[Any]) -> bytes:
        """Shuffle and compress. Costs about four copies and the compressor's work."""
        return _joined((plane.tobytes(), self._pack(plane)) for plane in _planes_of(array))

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Decompress and put together again.

        Raises:
            BadObject: If a length, or what an LZ4 block holds, is not that of such a tensor. No
                block is decompressed beyond one plane.
        """
        return _tensor(data, shape, dtype, self._expand)

    def _pack(self, plane: NDArray[np.uint8]) -> bytes:
        largest = plane.max()
        padded = np.zeros(-(-plane.size // 8) * 8, np.uint8)
        np.subtract(largest, plane, out=padded[: plane.size])
        bits = np.ascontiguousarray(_transposed(padded).reshape(-1, 8).T)
        return b"".join((bytes([largest]), self._block.compress(bits, store_size=False)))

    def _expand(self, packed: memoryview, elements: int) -> NDArray[np.uint8]:
        eighth = -(-elements // 8)
        if not packed:
            raise _bad("no LZ4 block where one was expected")
        try:
            bits = self._block.decompress(packed[1:], uncompressed_size=8 * eighth)
        except self._block.LZ4BlockError as exc:
            raise _bad(f"not an LZ4 block of {8 * eighth} octets: {exc}") from None
        if len(bits) != 8 * eighth:
            raise _bad(f"an LZ4 block holds {len(bits)} octets, expected {8 * eighth}")
        planes = np.frombuffer(bits, np.uint8).reshape(8, eighth)
        distances = _transposed(np.ascontiguousarray(planes.T).reshape(-1))[:elements]
        return np.subtract(np.uint8(packed[0]), distances)


def _planes_of(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the planes of a tensor, the most significant one first; none if it is empty."""
    if not array.size:
        return
    width = array.dtype.itemsize
    native = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(native).reshape(-1).view(f"<u{width}")
    if width > 1:
        flat = (flat << 1) | (flat >> (8 * width - 1))
    octets = flat.view(np.uint8).reshape(-1, width)
    for place in reversed(range(width)):
        yield np.ascontiguousarray(octets[:, place])


def _joined(planes: Iterator[tuple[bytes, bytes]]) -> bytes:
    """Return the Data: of each plane the shorter form, as it is or compressed."""
    parts: list[bytes] = []
    for plane, packed in planes:
        shorter = packed if len(packed) < len(plane) else plane
        parts += (len(shorter).to_bytes(_LENGTH_OCTETS, "big"), shorter)
    return b"".join(parts)


def _tensor(data: Octets, shape: Sequence[int], dtype: np.dtype[Any], expand: Any) -> NDArray[Any]:
    """Put a tensor together. ``expand`` makes a plane of the octets of a compressed one."""
    elements, width = prod(shape), dtype.itemsize
    rest = memoryview(data).cast("B")
    result = np.empty(elements, f"<u{width}")
    octets = result.view(np.uint8).reshape(-1, width)
    for place in reversed(range(width)) if elements else ():
        if len(rest) < _LENGTH_OCTETS:
            raise _length(f"{len(rest)} octets where the length of a plane was expected")
        size = int.from_bytes(rest[:_LENGTH_OCTETS], "big")
        plane, rest = rest[_LENGTH_OCTETS:][:size], rest[_LENGTH_OCTETS + size :]
        if size > elements or len(plane) != size:
            raise _length(f"a plane of {size} octets, {len(plane)} are there, at most {elements}")
        octets[:, place] = plane if size == elements else expand(plane, elements)
    if rest:
        raise _length(f"{len(rest)} octets behind the last plane")
    if width > 1:
        result = (result >> 1) | (result << (8 * width - 1))
    return result.view(dtype).reshape(tuple(shape))


def _transposed(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Make of every eight octets those of their bits: the most significant ones in the first."""
    # In a big-endian integer the first octet is the first row, and its first bit the first column.
    rows = octets.view(">u8").astype(np.uint64)
    for shift, mask in _TRANSPOSE:
        swapped = (rows ^ (rows >> shift)) & mask
        rows ^= swapped ^ (swapped << shift)
    return rows.astype(">u8").view(np.uint8)


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"it needs the package {package}: pip install {package}") from None


def _told(octets: int) -> str:
    # The library says -1, in two's complement, of a frame that does not say.
    return "an unknown number of octets" if octets >= 1 << 63 else f"{octets} octets"


def _bad(text: str) -> BadObject:
    return BadObject(Rejection.DECODE, text)


def _length(text: str) -> BadObject:
    return BadObject(Rejection.DATA_LENGTH, text)
