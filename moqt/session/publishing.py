"""Objects out: the flows that turn a LocalTrack into subgroup streams and fetch streams.

A flow is a cursor. It holds no payload, only a place in a Track, and produces octets when it is
asked for them. Both kinds work alike: the head of an Object (a few octets that depend on what
the stream carried before) and then the payload's own pieces, uncopied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moqt.codepoints import (
    MAX_VI64,
    GroupOrder,
    ObjectStatus,
    RangeMarkerKind,
    StreamErrorCode,
)
from moqt.location import Location
from moqt.session.commands import SendStreamData, StreamId
from moqt.session.context import Context
from moqt.session.events import RequestId
from moqt.session.localtrack import LocalObject, LocalSubgroup, LocalTrack, Payload
from moqt.session.sendqueue import Rank
from moqt.wire.fetchstream import FetchHeader, FetchWriter
from moqt.wire.filters import LocationRange, RangeFilter, passes
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object

#: Pieces up to this many octets are joined with what goes before and after them.
_SMALL = 1024
#: Publisher Priority of a fetch stream that has had no Object yet.
_DEFAULT_PRIORITY = 128
#: Rank of the fill of a Group, and of what is live in it: fill first (MOQT, "Priorities").
_FILL, _LIVE = 0, 1


@dataclass(slots=True)
class Selection:
    """What one request wants of a Track, and how urgently."""

    range: LocationRange
    filters: tuple[RangeFilter, ...]
    priority: int
    group_order: GroupOrder

    def wants(self, subgroup: LocalSubgroup, obj: LocalObject) -> bool:
        """Whether the range filters let an Object pass. The range is looked at elsewhere."""
        return not self.filters or passes(
            self.filters,
            subgroup_id=subgroup.subgroup_id,
            object_id=obj.object_id,
            priority=subgroup.priority,
            properties=obj.properties,
        )

    def group_rank(self, group_id: int) -> int:
        """Return the place of a Group in the Group Order, smaller first."""
        return -group_id if self.group_order is GroupOrder.DESCENDING else group_id


class ObjectFlow:
    """What subgroup and fetch streams have in common: pulling octets, Object after Object."""

    serves_past: bool = False

    def __init__(self, context: Context, selection: Selection) -> None:
        self.selection = selection
        self.stream_id: StreamId | None = None
        self.finished = False
        """FIN or a reset has been handed over, or there was nothing to send at all."""

        self._context = context
        self._object: LocalObject | None = None  # the one whose payload is being sent
        self._parts: list[Payload] = []  # kept here, so that one begun can end if it is let go
        self._part = 0
        self._offset = 0

    # -- for the kinds to say --------------------------------------------------------------------

    def _open(self) -> bytes:
        """Return the header of the stream."""
        raise NotImplementedError

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        """Move to the next Object, or marker, and return its head; None: nothing for now."""
        raise NotImplementedError

    def _has_next(self) -> bool:
        """Whether :meth:`_next` would return something."""
        raise NotImplementedError

    def _at_end(self) -> bool:
        """Whether nothing will ever come after what was sent."""
        raise NotImplementedError

    # -- for the send queue ----------------------------------------------------------------------

    def rank(self) -> Rank:
        """Return how urgent the next Object is."""
        raise NotImplementedError

    def has_data(self) -> bool:
        """Whether :meth:`pull` would send something: octets, or the FIN."""
        if self.finished:
            return False
        obj = self._object
        if obj is not None:
            return self._part < len(self._parts) or obj.dropped
        if self._has_next():
            return True
        if not self._at_end():
            return False
        if self.stream_id is None and not self._opens_empty():
            self.finished = True
            return False
        return True

    def _opens_empty(self) -> bool:
        """Whether a stream is opened although no Object will be on it."""
        return False

    def pull(self, limit: int) -> tuple[list[SendStreamData], int]:
        """Take the next octets, about ``limit`` of them."""
        small = bytearray()
        pieces: list[bytes | memoryview] = []
        taken = 0
        if self.stream_id is None:
            self.stream_id = self._context.stream_ids.uni()
            small += self._open()
        while taken + len(small) < limit:
            obj = self._object
            if obj is None:
                step = self._next()
                if step is None:
                    break
                head, obj = step
                small += head
                if obj is not None and obj.length:
                    self._object, self._parts, self._part, self._offset = obj, obj.parts, 0, 0
                continue
            if self._part == len(self._parts):
                if obj.dropped and not small and not pieces:
                    # Its rest will never come. What shows whose stream this is has been sent.
                    self.cut(StreamErrorCode.INTERNAL_ERROR)
                    return [], 0
                break  # the rest of a payload that is still being made
            part = self._parts[self._part]
            size = min(len(part) - self._offset, limit - taken - len(small))
            piece = memoryview(part)[self._offset : self._offset + size]
            if size <= _SMALL:
                small += piece
            else:
                if small:
                    pieces.append(bytes(small))
                    taken += len(small)
                    small.clear()
                pieces.append(piece)
                taken += size
            self._offset += size
            if self._offset == len(part):
                self._part, self._offset = self._part + 1, 0
                if self._part == len(self._parts) and obj.is_whole:
                    self._object, self._parts = None, []
        self.finished = self._object is None and not self._has_next() and self._at_end()
        if small or not pieces:
            pieces.append(bytes(small))
            taken += len(small)
        last = len(pieces) - 1
        return [
            SendStreamData(self.stream_id, piece, fin=self.finished and index == last)
            for index, piece in enumerate(pieces)
        ], taken

    def cut(self, code: StreamErrorCode) -> None:
        """End the stream by a reset; what it had not sent is not sent."""
        if not self.finished and self.stream_id is not None:
            self._context.open_streams.ended(self.stream_id)
            self._context.reset(self.stream_id, code)
        self.finished = True


class SubgroupFlow(ObjectFlow):
    """The live Objects of one Subgroup, on one stream."""

    def __init__(
        self,
        context: Context,
        selection: Selection,
        subgroup: LocalSubgroup,
        *,
        track_alias: int,
        first: int,
    ) -> None:
        super().__init__(context, selection)
        self.subgroup = subgroup
        self.index = first
        """Index in the Subgroup of the next Object to look at."""

        self._track_alias = track_alias
        self._previous: int | None = None
        self._promises_end = False

    @property
    def sent_upto(self) -> int:
        """Index of the first Object of which octets may still be needed."""
        return self.index - 1 if self._object is not None else self.index

    @property
    def is_between_objects(self) -> bool:
        """Whether every Object that was begun has been handed over whole."""
        return self._object is None

    def refilter(self) -> bool:
        """Go on, on the stream that is open, as a changed selection says.

        Returns False if the stream cannot: nothing more of the Group is wanted, or the stream
        promised the end of a Group whose tail is now hidden.
        """
        wanted, group_id = self.selection.range, self.subgroup.group_id
        if group_id < wanted.start.group or (
            wanted.end is not None and group_id > wanted.end.group
        ):
            return False
        return self._tail_is_safe() or not self._promises_end

    def rank(self) -> Rank:
        """Live: the Subgroup's priority, then its Group's place."""
        subgroup = self.subgroup
        selection = self.selection
        return (
            selection.priority,
            subgroup.priority,
            0,
            selection.group_rank(subgroup.group_id),
            _LIVE,
            subgroup.subgroup_id,
        )

    def _peek(self) -> LocalObject | None:
        subgroup, selection = self.subgroup, self.selection
        start, end = selection.range.start, selection.range.end
        while self.index < len(subgroup.objects):
            obj = subgroup.objects[self.index]
            location = Location(subgroup.group_id, obj.object_id)
            if end is not None and location > end:
                return None
            if location >= start and selection.wants(subgroup, obj):
                return obj
            self.index += 1
        return None

    def _has_next(self) -> bool:
        return self._peek() is not None

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        obj = self._peek()
        if obj is None:
            return None
        self.index += 1
        head = encode_subgroup_object(
            self._previous,
            obj.object_id,
            properties=obj.properties if self.subgroup.has_properties else None,
            payload_length=obj.length,
            status=obj.status,
        )
        self._previous = obj.object_id
        return head, obj

    def _at_end(self) -> bool:
        if self._past_range():
            # Nothing more is wanted. A reset could overtake what was, so the stream ends by FIN;
            # END_OF_GROUP was not promised on it.
            return True
        return self.subgroup.closed and self.index >= len(self.subgroup.objects)

    def _past_range(self) -> bool:
        end, subgroup = self.selection.range.end, self.subgroup
        if end is None:
            return False
        if subgroup.group_id != end.group:
            return subgroup.group_id > end.group
        if self.index < len(subgroup.objects):
            return subgroup.objects[self.index].object_id > end.object
        return self._previous is not None and self._previous >= end.object

    def _tail_is_safe(self) -> bool:
        """Whether no filter may hide the tail of the Group."""
        end = self.selection.range.end
        return not self.selection.filters and (end is None or end.group > self.subgroup.group_id)

    def _open(self) -> bytes:
        subgroup = self.subgroup
        # The bit promises that nothing lies beyond the last Object on the stream.
        self._promises_end = subgroup.holds_end_of_group and self._tail_is_safe()
        self._peek()
        return SubgroupHeader(
            track_alias=self._track_alias,
            group_id=subgroup.group_id,
            subgroup_id=subgroup.subgroup_id,
            publisher_priority=subgroup.priority,
            has_properties=subgroup.has_properties,
            end_of_group=self._promises_end,
            first_object=self.index == 0,
        ).encode()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step of a fetch stream: one Object."""

    subgroup: LocalSubgroup
    object: LocalObject


@dataclass(frozen=True, slots=True)
class _Gone:
    """A step of a fetch stream: something was let go of what lies between the one before and here.

    That includes ``upto`` itself.
    """

    upto: Location


_Step = _Stored | _Gone


class FetchFlow(ObjectFlow):
    """A stored range of a Track, on one fetch stream: a FETCH, or the fill of a subscription."""

    serves_past = True

    def __init__(
        self,
        context: Context,
        selection: Selection,
        track: LocalTrack,
        *,
        request_id: RequestId,
        order_differs: bool = False,
    ) -> None:
        super().__init__(context, selection)
        self.request_id = request_id
        self._order_differs = int(order_differs)
        self._descending = selection.group_order is GroupOrder.DESCENDING
        assert selection.range.end is not None, "the range of a fetch is closed"
        self._end = selection.range.end
        self._writer = FetchWriter(selection.group_order)
        self._steps = self._walk(track)
        self._step: _Step | None = None
        self._subgroup: LocalSubgroup | None = None  # of the Object that the rank is taken from

    def rank(self) -> Rank:
        """The Object's priority, then its Group's place, ahead of what is live there.

        That is the Object being sent, or else the next one; a marker, and the end, are as urgent
        as the Object before them.
        """
        if self._object is None and isinstance(self._step, _Stored):
            self._subgroup = self._step.subgroup
        subgroup, selection = self._subgroup, self.selection
        return (
            selection.priority,
            subgroup.priority if subgroup is not None else _DEFAULT_PRIORITY,
            self._order_differs,
            selection.group_rank(subgroup.group_id) if subgroup is not None else 0,
            _FILL,
            0,
        )

    def _opens_empty(self) -> bool:
        return True  # a FETCH whose range holds nothing is a header and FIN

    def _open(self) -> bytes:
        return FetchHeader(self.request_id).encode()

    def _has_next(self) -> bool:
        if self._step is None:
            self._step = next(self._steps, None)
        step = self._step
        if isinstance(step, _Stored) and step.object.dropped:  # since it was looked up
            self._step = _Gone(Location(step.subgroup.group_id, step.object.object_id))
        return step is not None

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        if not self._has_next():
            return None
        step, self._step = self._step, None
        assert step is not None
        if isinstance(step, _Gone):
            return self._writer.marker(RangeMarkerKind.UNKNOWN, step.upto), None
        subgroup, obj = step.subgroup, step.object
        self._subgroup = subgroup
        head = self._writer.object_header(
            Location(subgroup.group_id, obj.object_id),
            subgroup_id=subgroup.subgroup_id,
            publisher_priority=subgroup.priority,
            properties=obj.properties,
            payload_length=obj.length,
        )
        return head, obj

    def _at_end(self) -> bool:
        return not self._has_next()

    def _walk(self, track: LocalTrack) -> Iterator[_Step]:
        """Yield the steps of the range in Group Order; a Group is looked up when it is reached.

        Object Status is not carried on fetch streams (MOQT, "Object Status").
        """
        wanted = self.selection.range
        start, end = wanted.start, self._end
        groups = list(track.group_ids(start.group, end.group))
        if self._descending:
            groups.reverse()
        previous: Location | None = None
        has_gap = False
        for group_id in groups:
            for subgroup, obj in track.objects_of(group_id):
                location = Location(group_id, obj.object_id)
                if location not in wanted:
                    continue
                if obj.dropped:
                    has_gap = True
                elif obj.status is ObjectStatus.NORMAL and self.selection.wants(subgroup, obj):
                    gap = self._gap(previous, location)
                    if gap is not None and (has_gap or track.may_have_lost(gap.lowest)):
                        yield _Gone(gap.last)
                    yield _Stored(subgroup, obj)
                    previous, has_gap = location, False
        gap = self._gap(previous, None)
        if gap is not None and (has_gap or track.may_have_lost(gap.lowest)):
            yield _Gone(gap.last)

    def _gap(self, previous: Location | None, following: Location | None) -> "_Gap | None":
        """Return what lies between two steps in Group Order; None if nothing can.

        Args:
            previous: The step before; None at the start of the range.
            following: The step after; None at the end of the range.
        """
        start, end = self.selection.range.start, self._end
        if not self._descending:
            lowest = start if previous is None else previous.next()
            if following is None:
                return _Gap(lowest, end) if lowest <= end else None
            return _Gap(lowest, _before(following)) if lowest < following else None
        # Descending: up to the end of the Group of ``previous``, then Group after Group below it,
        # each from its first Object on, to ``following``.
        group = start.group if following is None else following.group
        first = max(start, Location(group, 0))
        if previous is not None and previous.group == group:
            first = previous.next()
        last = min(end, Location(group, MAX_VI64)) if following is None else _before(following)
        if first <= last:
            return _Gap(first, last)
        above = end.group if previous is None else previous.group
        if following is None or above == group:
            return None
        # The whole of its Group follows: the gap is what remained above.
        lowest = Location(group + 1, 0)
        if previous is not None and above == group + 1:
            lowest = previous.next()
        return _Gap(lowest, min(end, Location(group + 1, MAX_VI64)))


@dataclass(frozen=True, slots=True)
class _Gap:
    """What lies between two steps of a fetch stream."""

    lowest: Location
    last: Location
    """The last one in Group Order."""


def _before(location: Location) -> Location:
    """Return the greatest Location below one that is not the first of all."""
    if location.object:
        return Location(location.group, location.object - 1)
    return Location(location.group - 1, MAX_VI64)
