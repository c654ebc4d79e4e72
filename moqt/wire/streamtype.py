"""What a unidirectional stream is, by its first integer (MOQT, "Unidirectional Streams")."""

from typing import Final

from moqt.codepoints import StreamType
from moqt.errors import ProtocolError
from moqt.wire.subgroup import is_subgroup_type
from moqt.wire.varint import encode_vi64

#: What :func:`classify_uni` returns for every form of SUBGROUP_HEADER.
SUBGROUP: Final = StreamType.SUBGROUP_HEADER


def classify_uni(number: int) -> StreamType:
    """Return what a unidirectional stream is.

    Args:
        number: The first vi64 of the stream. It stays part of what its reader is fed: a control
            stream begins with a SETUP message whose type this is.

    Raises:
        ProtocolError: If there is no such stream.
    """
    if is_subgroup_type(number):
        return SUBGROUP
    if number not in StreamType._value2member_map_:
        raise ProtocolError(f"unknown unidirectional stream type {number:#x}")
    return StreamType(number)


def padding_stream(octets: int) -> bytes:
    """Return a stream of padding: its type and so many zeros. The receiver discards it."""
    return encode_vi64(StreamType.PADDING) + bytes(octets)
