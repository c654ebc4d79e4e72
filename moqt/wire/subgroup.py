"""Subgroup streams: SUBGROUP_HEADER and the Objects after it (MOQT, "Subgroup Header").

Here the first Object ID is stated and each later one is a delta, less one, from the one before.
"""

from dataclasses import dataclass
from typing import Final, Self

from moqt.codepoints import MAX_VI64, ObjectStatus
from moqt.codepoints import SubgroupFlag as F
from moqt.errors import ProtocolError, UsageError
from moqt.values import hot_value
from moqt.wire.objects import ObjectReader
from moqt.wire.pairs import Properties, encode_object_properties
from moqt.wire.varint import Octets, decode_vi64, encode_vi64

#: The bits that may be set, beside the two whose combination 0b11 means nothing.
_FLAGS: Final = 0x7F


def is_subgroup_type(number: int) -> bool:
    """Whether a stream type is one of the forms of SUBGROUP_HEADER."""
    return (
        number <= _FLAGS
        and bool(number & F.SUBGROUP_HEADER)
        and number & F.SUBGROUP_ID_MODE != F.SUBGROUP_ID_MODE
    )


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """What all Objects of a subgroup stream share (MOQT, "Subgroup Header")."""

    track_alias: int

    group_id: int

    subgroup_id: int | None
    """None: it is the ID of the first Object on this stream."""

    publisher_priority: int | None
    """0 to 255, 0 first. None: the default of the Track."""

    has_properties: bool = False
    """Every Object has a Properties Length, 0 included."""

    end_of_group: bool = False
    """At FIN, nothing in the Group exists above the last Object here. Void after a reset."""

    first_object: bool = False
    """The first Object here is the first that was ever published in the Subgroup."""

    def encode(self) -> bytes:
        """Return the header.

        Raises:
            UsageError: If a value has no form on the wire.
        """
        flags = F.SUBGROUP_HEADER | (
            F.PROPERTIES * self.has_properties
            | F.END_OF_GROUP * self.end_of_group
            | F.FIRST_OBJECT * self.first_object
            | F.DEFAULT_PRIORITY * (self.publisher_priority is None)
        )
        subgroup = b""
        if self.subgroup_id is None:
            flags |= F.FIRST_OBJECT_ID
        elif self.subgroup_id:
            flags |= F.EXPLICIT_ID
            subgroup = encode_vi64(self.subgroup_id)
        ids = encode_vi64(self.track_alias) + encode_vi64(self.group_id)
        return encode_vi64(flags) + ids + subgroup + encode_priority(self.publisher_priority)

    @classmethod
    def decode(cls, data: Octets, offset: int = 0) -> tuple[Self, int] | None:
        """Return the header at ``offset`` and the offset after it, or None if it is not all here.

        Raises:
            ProtocolError: If the stream type is no SUBGROUP_HEADER.
        """
        if (got := decode_vi64(data, offset)) is None:
            return None
        flags, at = got
        if not is_subgroup_type(flags):
            raise ProtocolError(f"stream type {flags:#x} is no subgroup")
        fields: list[int] = []
        for _ in range(3 if flags & F.EXPLICIT_ID else 2):
            if (got := decode_vi64(data, at)) is None:
                return None
            value, at = got
            fields.append(value)
        priority = None
        if not flags & F.DEFAULT_PRIORITY:
            if at >= len(data):
                return None
            priority = data[at]
            at += 1
        header = cls(
            track_alias=fields[0],
            group_id=fields[1],
            subgroup_id=None if flags & F.FIRST_OBJECT_ID else fields[2] if fields[2:] else 0,
            publisher_priority=priority,
            has_properties=bool(flags & F.PROPERTIES),
            end_of_group=bool(flags & F.END_OF_GROUP),
            first_object=bool(flags & F.FIRST_OBJECT),
        )
        return header, at


def encode_priority(priority: int | None) -> bytes:
    """Return the octet of a Publisher Priority, or nothing for None."""
    if priority is None:
        return b""
    if not 0 <= priority <= 0xFF:
        raise UsageError(f"publisher priority {priority}, not 0 to 255")
    return bytes([priority])


def encode_subgroup_object(
    previous_id: int | None,
    object_id: int,
    *,
    properties: Properties | None = None,
    payload_length: int,
    status: ObjectStatus = ObjectStatus.NORMAL,
) -> bytes:
    """Return what precedes the payload of an Object, which then goes out uncopied.

    Args:
        previous_id: The Object before it on this stream; None for the first.
        object_id: Its Object ID, above ``previous_id``.
        properties: Object Properties; None on a stream whose header says it has none.
        payload_length: Octets of payload.
        status: Anything but NORMAL goes without payload and properties.

    Raises:
        UsageError: If the Objects are out of order, or the status does not allow the rest.
    """
    if previous_id is not None and object_id <= previous_id:
        raise UsageError(f"Object {object_id} after Object {previous_id} of one subgroup")
    if status is not ObjectStatus.NORMAL and (payload_length or properties):
        raise UsageError(f"{status.name} with payload or properties")
    delta = object_id if previous_id is None else object_id - previous_id - 1
    if object_id > MAX_VI64:
        raise UsageError(f"Object ID {object_id} does not fit a vi64")
    head = encode_vi64(delta)
    if properties is not None:
        head += encode_object_properties(properties)
    head += encode_vi64(payload_length)
    return head if payload_length else head + encode_vi64(status)


@hot_value()
class SubgroupObject:
    """One Object of a subgroup stream."""

    object_id: int

    status: ObjectStatus
    """Anything but NORMAL has neither payload nor properties."""

    properties: Properties

    payload: bytes


class SubgroupReader(ObjectReader[SubgroupObject]):
    """Turns the octets of one subgroup stream into whole Objects.

    Args:
        max_object_octets: Properties and payload of the largest Object to take.
        header: None if the octets begin with the stream's type; the header, if it has been
            read and they begin after it.
    """

    __slots__ = ("_object_id", "_properties", "_status", "header", "subgroup_id")

    def __init__(self, max_object_octets: int, header: SubgroupHeader | None = None) -> None:
        super().__init__(max_object_octets)
        #: The header of the stream, as soon as it is here.
        self.header = header
        #: The Subgroup ID, as soon as it is known: with the header or with the first Object.
        self.subgroup_id = header.subgroup_id if header is not None else None
        self._object_id: int | None = None
        self._status = ObjectStatus.NORMAL
        self._properties: Properties = ()

    @property
    def started(self) -> int | None:
        """The Object whose header has been read and whose payload is not all here."""
        return self._object_id if self._missing else None

    def finish(self) -> None:
        """Take note that the stream ended with FIN.

        Raises:
            ProtocolError: If it ended inside an Object or before the end of its header.
        """
        super().finish()
        if self.header is None:
            raise ProtocolError("stream ended before its header")

    def _read_header(self, data: bytes | bytearray, offset: int) -> int | None:
        header = self.header
        if header is None:
            if (read := SubgroupHeader.decode(data, offset)) is None:
                return None
            self.header, at = read
            self.subgroup_id = self.header.subgroup_id
            self._length = None
            return at
        if (got := decode_vi64(data, offset)) is None:
            return None
        object_id, at = got
        if self._object_id is not None:
            object_id += self._object_id + 1
            if object_id > MAX_VI64:
                raise ProtocolError(f"Object ID {object_id} exceeds 2**64 - 1")
        properties: Properties = ()
        octets = 0
        if header.has_properties:
            if (block := self._read_properties(data, offset, at)) is None:
                return None
            properties, octets, at = block
        if (got := decode_vi64(data, at)) is None:
            return None
        length, at = got
        self._check_size(octets + length)
        status = ObjectStatus.NORMAL
        if not length:
            if (got := decode_vi64(data, at)) is None:
                return None
            number, at = got
            status = object_status(number, properties)
        if self.subgroup_id is None:
            self.subgroup_id = object_id
        self._object_id, self._length = object_id, length
        self._status, self._properties = status, properties
        return at

    def _item(self, payload: bytes) -> SubgroupObject:
        assert self._object_id is not None  # a header comes before every payload
        return SubgroupObject(self._object_id, self._status, self._properties, payload)


def object_status(number: int, properties: Properties) -> ObjectStatus:
    """Return the Object Status of an Object without payload.

    Raises:
        ProtocolError: If nobody registered it, or it does not go with ``properties``.
    """
    if number not in ObjectStatus._value2member_map_:
        raise ProtocolError(f"unknown Object Status {number:#x}")
    status = ObjectStatus(number)
    if properties and status is not ObjectStatus.NORMAL:
        raise ProtocolError(f"{status.name} with Object Properties")
    return status
