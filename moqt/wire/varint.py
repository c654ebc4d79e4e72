"""vi64, the integer of MOQT (MOQT, "Variable-Length Integers"). It is not QUIC's varint.

The leading one bits of the first octet count the octets that follow, so there are 1 to 9.
Any length that fits may arrive; the shortest is sent.
"""

from typing import Final

from moqt.codepoints import MAX_VI64
from moqt.errors import UsageError

Octets = bytes | bytearray | memoryview

#: Octets of the whole integer, by its first octet.
_SIZES: Final = bytes([min(9 - (octet ^ 0xFF).bit_length(), 9) for octet in range(256)])
#: Which bits are the value, by the number of octets. The last form has no room for a zero bit.
_MASKS: Final = (0, *((1 << 7 * size) - 1 for size in range(1, 9)), MAX_VI64)
#: The leading ones, already in place, by the number of octets.
_MARKS: Final = (0, *((0xFF00 >> (size - 1) & 0xFF) << 8 * (size - 1) for size in range(1, 9)))
_ONE_OCTET: Final = [bytes([value]) for value in range(0x80)]


def encode_vi64(value: int) -> bytes:
    """Return the shortest form of ``value``.

    Raises:
        UsageError: If ``value`` is negative or above 2**64 - 1.
    """
    if 0 <= value < 0x80:
        return _ONE_OCTET[value]
    if 0 < value < 0x4000:
        return (_MARKS[2] | value).to_bytes(2, "big")
    size = size_vi64(value)
    if size == 9:
        return b"\xff" + value.to_bytes(8, "big")
    return (_MARKS[size] | value).to_bytes(size, "big")


def decode_vi64(data: Octets, offset: int = 0) -> tuple[int, int] | None:
    """Return the integer at ``offset`` and the offset after it, or None if it is not all here."""
    if offset >= len(data):
        return None
    first = data[offset]
    if first < 0x80:
        return first, offset + 1
    size = _SIZES[first]
    end = offset + size
    if end > len(data):
        return None
    return int.from_bytes(data[offset:end], "big") & _MASKS[size], end


def size_vi64(value: int) -> int:
    """Return how many octets the shortest form of ``value`` has.

    Raises:
        UsageError: If ``value`` is negative or above 2**64 - 1.
    """
    if not 0 <= value <= MAX_VI64:
        raise UsageError(f"{value} does not fit a vi64")
    return min((max(value.bit_length(), 1) + 6) // 7, 9)
