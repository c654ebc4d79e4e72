"""Objects out: the flows that turn a LocalTrack into subgroup streams and fetch streams.

A flow is a cursor. It holds no payload, only a place in a Track, and produces octets when it is
asked for them. Both kinds work alike: the head of an Object (a few octets that depend on what
the stream carried before) and then the payload's own pieces, uncopied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moqt.codepoints import GroupOrder, ObjectStatus, RangeMarkerKind, StreamErrorCode
from moqt.location import Location
from moqt.session.commands import SendStreamData, StreamId
from moqt.session.context import Context
from moqt.session.events import RequestId
from moqt.session.localtrack import LocalObject, LocalSubgroup, LocalTrack
from moqt.session.sendqueue import Rank
from moqt.wire.fetchstream import FetchHeader, FetchWriter
from moqt.wire.filters import LocationRange, RangeFilter, passes
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object

#: Pieces up to this many octets are joined with what goes before and after them.
_SMALL = 1024
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

    def __init__(self, context: Context, selection: Selection) -> None:
        self.selection = selection
        self.stream_id: StreamId | None = None
        self.finished = False
        """FIN or a reset has been handed over, or there was nothing to send at all."""

        self._context = context
        self._object: LocalObject | None = None  # the one whose payload is being sent
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
            return obj.dropped or self._part < len(obj.parts)
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
                    self._object, self._part, self._offset = obj, 0, 0
                continue
            if obj.dropped:
                self.cut(StreamErrorCode.INTERNAL_ERROR)
                return [], 0
            if self._part == len(obj.parts):
                break  # the rest of a payload that is still being made
            part = obj.parts[self._part]
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
                if self._part == len(obj.parts) and obj.is_whole:
                    self._object = None
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

    @property
    def sent_upto(self) -> int:
        """Index of the first Object of which octets may still be needed."""
        return self.index - 1 if self._object is not None else self.index

    @property
    def is_between_objects(self) -> bool:
        """Whether every Object that was begun has been handed over whole."""
        return self._object is None

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
        end = selection.range.end
        while self.index < len(subgroup.objects):
            obj = subgroup.objects[self.index]
            if end is not None and Location(subgroup.group_id, obj.object_id) > end:
                return None
            if selection.wants(subgroup, obj):
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

    def _open(self) -> bytes:
        subgroup, selection = self.subgroup, self.selection
        end = selection.range.end
        # The bit promises that nothing lies beyond the last Object on the stream, which would be
        # a lie where a filter may hide the tail of the Group.
        tail_is_safe = not selection.filters and (end is None or end.group > subgroup.group_id)
        self._peek()
        return SubgroupHeader(
            track_alias=self._track_alias,
            group_id=subgroup.group_id,
            subgroup_id=subgroup.subgroup_id,
            publisher_priority=subgroup.priority,
            has_properties=subgroup.has_properties,
            end_of_group=subgroup.holds_end_of_group and tail_is_safe,
            first_object=self.index == 0,
        ).encode()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step of a fetch stream: one Object."""

    subgroup: LocalSubgroup
    object: LocalObject


@dataclass(frozen=True, slots=True)
class _Gone:
    """A step of a fetch stream: the Objects up to ``upto`` were let go."""

    upto: Location


_Step = _Stored | _Gone


class FetchFlow(ObjectFlow):
    """A stored range of a Track, on one fetch stream: a FETCH, or the fill of a subscription."""

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
        self._writer = FetchWriter(selection.group_order)
        self._steps = self._walk(track)
        self._step: _Step | None = None

    def rank(self) -> Rank:
        """The next Object's priority, then its Group's place, ahead of what is live there."""
        subgroup = self._step.subgroup if isinstance(self._step, _Stored) else None
        selection = self.selection
        return (
            selection.priority,
            subgroup.priority if subgroup is not None else 0,
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
        return self._step is not None

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        if not self._has_next():
            return None
        step, self._step = self._step, None
        assert step is not None
        if isinstance(step, _Gone):
            return self._writer.marker(RangeMarkerKind.UNKNOWN, step.upto), None
        subgroup, obj = step.subgroup, step.object
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
        start, end = self.selection.range.start, self.selection.range.end
        assert end is not None, "the range of a fetch is closed"
        descending = self.selection.group_order is GroupOrder.DESCENDING
        groups = list(track.group_ids(start.group, end.group))
        if descending:
            groups.reverse()
        lost = track.lost_before
        gone: Location | None = None
        if lost is not None and start < lost and not descending and lost.object:
            gone = min(Location(lost.group, lost.object - 1), end)
        for group_id in groups:
            for subgroup, obj in track.objects_of(group_id):
                location = Location(group_id, obj.object_id)
                if not start <= location <= end:
                    continue
                if obj.dropped:
                    gone = location
                    continue
                if obj.status is not ObjectStatus.NORMAL:
                    continue
                if not self.selection.wants(subgroup, obj):
                    continue
                if gone is not None:
                    yield _Gone(gone)
                    gone = None
                yield _Stored(subgroup, obj)
        if gone is not None:
            yield _Gone(gone)
