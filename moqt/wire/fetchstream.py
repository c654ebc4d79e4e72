"""Fetch streams: FETCH_HEADER, its Objects, end-of-range markers (MOQT, "Fetch Header").

An Object states only what it does not share with the one before. Unlike on a subgroup stream, an
Object ID Delta of 1 is the next Object; where the Group changes it is no delta but the Object ID;
and without one the Object ID is the prior plus one, *even if the Group changed*.
"""

from dataclasses import dataclass
from typing import Final, Self

from moqt.codepoints import MAX_VI64, GroupOrder, RangeMarkerKind, StreamType
from moqt.codepoints import FetchFlag as F
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.values import hot_value
from moqt.wire.objects import ObjectReader
from moqt.wire.pairs import Properties, encode_object_properties
from moqt.wire.subgroup import encode_priority
from moqt.wire.varint import Octets, decode_vi64, encode_vi64

#: Serialization Flags of an Object; anything above is a marker or nothing.
_FLAGS: Final = 0x7F


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """What a fetch stream begins with (MOQT, "Fetch Header")."""

    request_id: int
    """The FETCH it answers, or the SUBSCRIBE or REQUEST_UPDATE that asked for a fill."""

    def encode(self) -> bytes:
        """Return the header."""
        return encode_vi64(StreamType.FETCH_HEADER) + encode_vi64(self.request_id)

    @classmethod
    def decode(cls, data: Octets, offset: int = 0) -> tuple[Self, int] | None:
        """Return the header at ``offset`` and the offset after it, or None if it is not all here.

        Raises:
            ProtocolError: If the stream type is no FETCH_HEADER.
        """
        if (got := decode_vi64(data, offset)) is None:
            return None
        number, at = got
        if number != StreamType.FETCH_HEADER:
            raise ProtocolError(f"stream type {number:#x} is no fetch")
        if (got := decode_vi64(data, at)) is None:
            return None
        request_id, at = got
        return cls(request_id), at


@hot_value()
class FetchObject:
    """One Object of a fetch stream. Its status is always Normal."""

    location: Location

    subgroup_id: int | None
    """None: it was published as a datagram."""

    publisher_priority: int

    properties: Properties

    payload: bytes


@dataclass(frozen=True, slots=True)
class RangeMarker:
    """What became of what lies between the entry before and here (MOQT, "End of Range").

    The Location itself is included, that of the entry before is not.
    """

    kind: RangeMarkerKind

    location: Location


class FetchWriter:
    """Makes what precedes each payload on one fetch stream; keeps what the next is relative to.

    Args:
        group_order: Order of the Groups on this stream. The receiver must know it.
    """

    def __init__(self, group_order: GroupOrder = GroupOrder.ASCENDING) -> None:
        self._descending = group_order is GroupOrder.DESCENDING
        self._prior: Location | None = None
        self._subgroup_id: int | None = None
        self._priority: int | None = None

    def object_header(
        self,
        location: Location,
        *,
        subgroup_id: int | None,
        publisher_priority: int,
        properties: Properties = (),
        payload_length: int,
    ) -> bytes:
        """Return what precedes the payload of an Object, which then goes out uncopied.

        Args:
            location: After all that went out before, in the order of this stream.
            subgroup_id: None if the Object was published as a datagram.
            publisher_priority: 0 to 255.
            properties: Object Properties.
            payload_length: Octets of payload; 0 is an empty Normal Object.

        Raises:
            UsageError: If the Object is out of order or a value has no form on the wire.
        """
        flags, fields = self._location_fields(location)
        if subgroup_id is None:
            flags |= F.DATAGRAM
        elif subgroup_id == 0:
            pass
        elif self._subgroup_id is not None and subgroup_id == self._subgroup_id:
            flags |= F.PRIOR_SUBGROUP
        elif self._subgroup_id is not None and subgroup_id == self._subgroup_id + 1:
            flags |= F.NEXT_SUBGROUP
        else:
            flags |= F.EXPLICIT_SUBGROUP
            fields.insert(1 if flags & F.GROUP_ID_DELTA else 0, encode_vi64(subgroup_id))
        if publisher_priority != self._priority:
            flags |= F.PRIORITY
            fields.append(encode_priority(publisher_priority))
        if properties:
            flags |= F.PROPERTIES
            fields.append(encode_object_properties(properties))
        header = b"".join((encode_vi64(flags), *fields, encode_vi64(payload_length)))
        # Readers differ on what "prior" means after a datagram; so it is never referred to.
        self._prior, self._subgroup_id, self._priority = location, subgroup_id, publisher_priority
        return header

    def marker(self, kind: RangeMarkerKind, location: Location) -> bytes:
        """Return a marker: what became of all after the entry before, up to ``location``.

        Raises:
            UsageError: If the Location is out of order.
        """
        self._check_order(location)
        group, object_ = location
        entry = encode_vi64(kind) + encode_vi64(group) + encode_vi64(object_)
        # The Object after a marker states its Subgroup and priority again: readers that disagree
        # on what a marker leaves behind then still agree on the Object.
        self._prior, self._subgroup_id, self._priority = location, None, None
        return entry

    def _location_fields(self, location: Location) -> tuple[int, list[bytes]]:
        """Return the flags and fields that say where the Object is."""
        prior = self._prior
        group, object_ = location
        if prior is not None and group == prior.group and object_ == prior.object + 1 <= MAX_VI64:
            return 0, []
        self._check_order(location)
        if prior is None:
            delta = group
        elif group == prior.group:
            return F.OBJECT_ID_DELTA, [encode_vi64(object_ - prior.object)]
        else:
            delta = (prior.group - group if self._descending else group - prior.group) - 1
        # A new Group always states its Object ID, although prior + 1 could be left out: the rule
        # is easily missed by readers, and an octet per Group is cheap.
        return F.GROUP_ID_DELTA | F.OBJECT_ID_DELTA, [encode_vi64(delta), encode_vi64(object_)]

    def _check_order(self, location: Location) -> None:
        if not all(0 <= value <= MAX_VI64 for value in location):
            raise UsageError(f"{location} has no form on the wire")
        prior = self._prior
        if prior is None:
            return
        if location.group == prior.group:
            after = location.object > prior.object
        else:
            after = (location.group < prior.group) is self._descending
        if not after:
            raise UsageError(f"{location} after {prior} on one fetch stream")


class FetchReader(ObjectReader[FetchObject | RangeMarker]):
    """Turns the octets of one fetch stream, after its FETCH_HEADER, into Objects and markers.

    The header is read first, by :meth:`FetchHeader.decode`: only the request it names tells the
    Group Order, without which nothing after the first Group can be read.

    Args:
        group_order: Order of the Groups, as requested or as the publisher's default.
        max_object_octets: Properties and payload of the largest Object to take.
    """

    __slots__ = (
        "_datagram",
        "_descending",
        "_marker",
        "_prior",
        "_priority",
        "_properties",
        "_subgroup_id",
    )

    def __init__(self, group_order: GroupOrder, max_object_octets: int) -> None:
        super().__init__(max_object_octets)
        self._descending = group_order is GroupOrder.DESCENDING
        #: The entry before: what the next is relative to.
        self._prior: Location | None = None
        #: Of the last Object that has a Subgroup, and of the last Object.
        self._subgroup_id: int | None = None
        self._priority: int | None = None
        self._datagram = False
        self._properties: Properties = ()
        self._marker: RangeMarker | None = None

    @property
    def started(self) -> Location | None:
        """The Object whose header has been read and whose payload is not all here."""
        return self._prior if self._missing else None

    def _read_header(self, data: bytes | bytearray, offset: int) -> int | None:
        if (got := decode_vi64(data, offset)) is None:
            return None
        flags, at = got
        prior = self._prior
        if not flags and prior is not None and self._priority is not None:
            return self._read_next(prior, data, at)
        if flags > _FLAGS:
            return self._read_marker(flags, data, at)
        group_delta = object_delta = explicit = priority = None
        if flags & F.GROUP_ID_DELTA:
            if (got := decode_vi64(data, at)) is None:
                return None
            group_delta, at = got
        datagram = bool(flags & F.DATAGRAM)
        mode = 0 if datagram else flags & F.SUBGROUP_ID_MODE
        if mode == F.EXPLICIT_SUBGROUP:
            if (got := decode_vi64(data, at)) is None:
                return None
            explicit, at = got
        if flags & F.OBJECT_ID_DELTA:
            if (got := decode_vi64(data, at)) is None:
                return None
            object_delta, at = got
        if flags & F.PRIORITY:
            if at >= len(data):
                return None
            priority = data[at]
            at += 1
        location = self._locate(group_delta, object_delta)
        subgroup_id = self._subgroup_id if datagram else self._subgroup(mode, explicit)
        if priority is None and (priority := self._priority) is None:
            raise ProtocolError("an Object refers to the priority of one before it; there is none")
        properties: Properties = ()
        octets = 0
        if flags & F.PROPERTIES:
            if (block := self._read_properties(data, offset, at)) is None:
                return None
            properties, octets, at = block
        if (got := decode_vi64(data, at)) is None:
            return None
        length, at = got
        self._check_size(octets + length)
        self._prior, self._subgroup_id, self._priority = location, subgroup_id, priority
        self._datagram, self._properties, self._marker = datagram, properties, None
        self._length = length
        return at

    def _read_next(self, prior: Location, data: bytes | bytearray, at: int) -> int | None:
        """Read an Object that says nothing but its length, as most do: it is the next one."""
        if (got := decode_vi64(data, at)) is None:
            return None
        length, at = got
        self._check_size(length)
        if prior.object == MAX_VI64:
            raise ProtocolError(f"an Object after {prior}: outside 0 to 2**64 - 1")
        self._prior, self._subgroup_id = Location(prior.group, prior.object + 1), 0
        self._datagram, self._properties, self._marker = False, (), None
        self._length = length
        return at

    def _read_marker(self, flags: int, data: bytes | bytearray, at: int) -> int | None:
        if flags not in RangeMarkerKind._value2member_map_:
            raise ProtocolError(f"serialization flags {flags:#x} are no Object and no marker")
        if (got := decode_vi64(data, at)) is None:
            return None
        group, at = got
        if (got := decode_vi64(data, at)) is None:
            return None
        object_, at = got
        self._prior = Location(group, object_)
        self._marker = RangeMarker(RangeMarkerKind(flags), self._prior)
        self._length = 0
        return at

    def _locate(self, group_delta: int | None, object_delta: int | None) -> Location:
        prior = self._prior
        if prior is None:
            if group_delta is None or object_delta is None:
                raise ProtocolError("the first entry of a fetch stream does not say where it is")
            return Location(group_delta, object_delta)
        group = prior.group
        if group_delta is not None:
            group += -(group_delta + 1) if self._descending else group_delta + 1
        if object_delta is None:
            object_ = prior.object + 1
        elif group_delta is None:
            object_ = prior.object + object_delta
        else:
            object_ = object_delta
        if not 0 <= group <= MAX_VI64 or object_ > MAX_VI64:
            raise ProtocolError(f"an Object at {group}, {object_}: outside 0 to 2**64 - 1")
        return Location(group, object_)

    def _subgroup(self, mode: int, explicit: int | None) -> int:
        if explicit is not None:
            return explicit
        if mode == 0:
            return 0
        if self._subgroup_id is None:
            raise ProtocolError("an Object refers to the Subgroup of one before it; there is none")
        subgroup_id = self._subgroup_id + (mode == F.NEXT_SUBGROUP)
        if subgroup_id > MAX_VI64:
            raise ProtocolError(f"Subgroup ID {subgroup_id} exceeds 2**64 - 1")
        return subgroup_id

    def _item(self, payload: bytes) -> FetchObject | RangeMarker:
        if self._marker is not None:
            return self._marker
        assert self._prior is not None  # a header comes before every payload
        assert self._priority is not None
        return FetchObject(
            self._prior,
            None if self._datagram else self._subgroup_id,
            self._priority,
            self._properties,
            payload,
        )
