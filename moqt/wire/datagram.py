"""Datagrams: one Object each, or padding (MOQT, "Object Datagram", "Padding Datagram")."""

from dataclasses import dataclass
from typing import Final

from moqt.codepoints import DatagramFlag as F
from moqt.codepoints import DatagramType, ObjectStatus
from moqt.errors import ProtocolError, UsageError
from moqt.wire.pairs import Properties, decode_object_properties, encode_object_properties
from moqt.wire.reader import Reader
from moqt.wire.subgroup import encode_priority, object_status
from moqt.wire.varint import encode_vi64

_FLAGS: Final = F.PROPERTIES | F.END_OF_GROUP | F.ZERO_OBJECT_ID | F.DEFAULT_PRIORITY | F.STATUS


@dataclass(frozen=True, slots=True)
class ObjectDatagram:
    """One Object whose Delivery Mode is Datagram (MOQT, "Object Datagram")."""

    track_alias: int

    group_id: int

    object_id: int

    publisher_priority: int | None = None
    """0 to 255, 0 first. None: the default of the Track."""

    end_of_group: bool = False
    """Nothing in the Group exists above this Object."""

    properties: Properties = ()

    status: ObjectStatus = ObjectStatus.NORMAL
    """Anything but NORMAL has neither payload nor properties, and is no end of group."""

    payload: bytes = b""


def encode_datagram(datagram: ObjectDatagram) -> bytes:
    """Return the whole datagram.

    Raises:
        UsageError: If the status does not allow the rest, or a value has no form on the wire.
    """
    d = datagram
    ended = d.status is not ObjectStatus.NORMAL
    if ended and (d.payload or d.properties or d.end_of_group):
        raise UsageError(f"{d.status.name} with payload, properties or end of group")
    flags = (
        F.PROPERTIES * bool(d.properties)
        | F.END_OF_GROUP * d.end_of_group
        | F.ZERO_OBJECT_ID * (not d.object_id)
        | F.DEFAULT_PRIORITY * (d.publisher_priority is None)
        | F.STATUS * ended
    )
    return b"".join(
        (
            encode_vi64(flags),
            encode_vi64(d.track_alias),
            encode_vi64(d.group_id),
            encode_vi64(d.object_id) if d.object_id else b"",
            encode_priority(d.publisher_priority),
            encode_object_properties(d.properties) if d.properties else b"",
            encode_vi64(d.status) if ended else d.payload,
        )
    )


def decode_datagram(data: bytes) -> ObjectDatagram | None:
    """Return the Object in a datagram, or None if it is padding.

    Raises:
        ProtocolError: If its type is unknown, its fields are cut, or they exclude each other.
    """
    r = Reader(data)
    flags = r.vi64()
    if flags == DatagramType.PADDING:
        return None
    if flags & ~_FLAGS:
        raise ProtocolError(f"unknown datagram type {flags:#x}")
    if flags & F.STATUS and flags & F.END_OF_GROUP:
        raise ProtocolError("a datagram with a status that also ends its Group by a flag")
    track_alias, group_id = r.vi64(), r.vi64()
    object_id = 0 if flags & F.ZERO_OBJECT_ID else r.vi64()
    priority = None if flags & F.DEFAULT_PRIORITY else r.uint8()
    properties: Properties = ()
    if flags & F.PROPERTIES:
        block = r.prefixed()
        if not block:
            raise ProtocolError("a datagram announces properties and has none")
        properties = decode_object_properties(block)
    status = ObjectStatus.NORMAL
    if flags & F.STATUS:
        status = object_status(r.vi64(), properties)
        r.expect_end()
    return ObjectDatagram(
        track_alias=track_alias,
        group_id=group_id,
        object_id=object_id,
        publisher_priority=priority,
        end_of_group=bool(flags & F.END_OF_GROUP),
        properties=properties,
        status=status,
        payload=r.rest(),
    )


def padding_datagram(octets: int) -> bytes:
    """Return a datagram of padding: its type and so many zeros. The receiver discards it."""
    return encode_vi64(DatagramType.PADDING) + bytes(octets)
