"""Integers as QUIC writes them (RFC 9000 Section 16). MOQT's are others: ``moqt.wire.varint``."""

from aioquic._buffer import Buffer


def encode_varint(value: int) -> bytes:
    """Encode an integer in as few octets as it takes."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


def varint_size(value: int) -> int:
    """Return how many octets :func:`encode_varint` makes of ``value``."""
    if value < 0x4000:
        return 1 if value < 0x40 else 2
    return 4 if value < 0x40000000 else 8


def peek_varint(buf: Buffer) -> int:
    """Read an integer and leave it unread."""
    position = buf.tell()
    value = buf.pull_uint_var()
    buf.seek(position)
    return value
