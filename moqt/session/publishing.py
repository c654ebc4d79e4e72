"""Objects out: the flow that turns a Subgroup of a LocalTrack into a stream, and what flows share.

A flow is a cursor. It holds no payload, only a place in a Track, and produces octets when it is
asked for them. Both kinds work alike: the head of an Object (a few octets that depend on what
the stream carried before) and then the payload's own pieces, uncopied.
"""

from dataclasses import dataclass

from moqt.codepoints import GroupOrder, StreamErrorCode
from moqt.session.commands import SendStreamData, StreamId
from moqt.session.context import Context
from moqt.session.localobjects import LocalObject, LocalSubgroup, Payload
from moqt.session.sendqueue import Rank
from moqt.wire.filters import LocationRange, RangeFilter, passes
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object

#: Pieces up to this many octets are joined with what goes before and after them: to copy them costs
#: less than to hand them over one by one.
_SMALL = 8 * 1024
#: Rank of the fill of a Group, and of what is live in it: fill first (MOQT, "Priorities").
FILL_RANK, LIVE_RANK = 0, 1


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

    def wants_all_of(self, group_id: int) -> bool:
        """Whether every Object of a Group is wanted."""
        start, end = self.range.start, self.range.end
        return not self.filters and start <= (group_id, 0) and (end is None or end.group > group_id)

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

    def _is_stalled(self) -> bool:
        """Whether the rest of an Object is waited for no longer."""
        return False

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
            return self._part < len(self._parts) or obj.dropped or self._is_stalled()
        if self._has_next():
            return True
        if not self._at_end() and self._cut_code() is None:
            return False
        if self.stream_id is None and not self._opens_empty():
            self.finished = True
            return False
        return True

    def _cut_code(self) -> StreamErrorCode | int | None:
        """What the stream is reset with once all there is has been sent; None: it goes on."""
        return None

    def _opens_empty(self) -> bool:
        """Whether a stream is opened although no Object will be on it."""
        return False

    def pull(self, limit: int) -> tuple[list[SendStreamData], int]:
        """Take the next octets, about ``limit`` of them."""
        pieces: list[bytes | memoryview] = []
        run: list[bytes | memoryview] = []  # small ones, which leave as one
        taken = 0
        if self.stream_id is None:
            self.stream_id = self._context.stream_ids.uni()
            run.append(self._open())
            taken = len(run[0])
        while taken < limit:
            obj = self._object
            if obj is None:
                step = self._next()
                if step is None:
                    break
                head, obj = step
                run.append(head)
                taken += len(head)
                if obj is not None and obj.length:
                    self._object, self._parts, self._part, self._offset = obj, obj.parts, 0, 0
                continue
            if self._part == len(self._parts):
                if not taken:
                    # What shows whose stream this is has been sent.
                    if obj.dropped:  # its rest will never come
                        code = obj.cut_code
                        code = StreamErrorCode.INTERNAL_ERROR if code is None else code
                        self.cut(code, after_delivery=True)
                        return [], 0
                    if self._is_stalled():
                        self.cut(StreamErrorCode.DELIVERY_TIMEOUT, after_delivery=True)
                        return [], 0
                break  # the rest of a payload that is still being made
            piece = self._take_from(obj, limit - taken)
            taken += len(piece)
            if len(piece) <= _SMALL:
                run.append(piece)
                continue
            if run:
                pieces.append(b"".join(run))
                run.clear()
            pieces.append(piece)
        if self._object is None and not self._has_next():
            self.finished = self._at_end()
            if not self.finished and not taken:
                if (code := self._cut_code()) is not None:
                    self.cut(code, after_delivery=True)
                return [], 0
        if run or not pieces:
            pieces.append(b"".join(run))
        last = len(pieces) - 1
        return [
            SendStreamData(self.stream_id, piece, fin=self.finished and index == last)
            for index, piece in enumerate(pieces)
        ], taken

    def _take_from(self, obj: LocalObject, room: int) -> Payload:
        """Take octets of the payload that is being sent, ``room`` of them at most."""
        part, offset = self._parts[self._part], self._offset
        if len(part) - offset > room:
            self._offset = offset + room
            return memoryview(part)[offset : offset + room]
        self._part, self._offset = self._part + 1, 0
        if self._part == len(self._parts) and obj.is_whole:
            self._object, self._parts = None, []
        return memoryview(part)[offset:] if offset else part

    def cut(self, code: StreamErrorCode | int, *, after_delivery: bool = False) -> None:
        """End the stream by a reset; what it had not sent is not sent.

        Args:
            code: What it is reset with.
            after_delivery: Let what was sent arrive first: the Objects before are good.
        """
        if not self.finished and self.stream_id is not None:
            self._context.open_streams.ended(self.stream_id)
            self._context.reset(self.stream_id, code, after_delivery=after_delivery)
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
        """Index in the Subgroup of the next Object to look at: what comes later for the past is
        stored beside it, so that no index shifts."""

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
            LIVE_RANK,
            subgroup.subgroup_id,
        )

    def _peek(self) -> LocalObject | None:
        subgroup, selection = self.subgroup, self.selection
        objects, index = subgroup.objects, self.index
        if index < len(objects) and selection.wants_all_of(subgroup.group_id):
            return objects[index]
        start, end = selection.range.start, selection.range.end
        while self.index < len(objects):
            obj = objects[self.index]
            location = obj.location
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
        subgroup = self.subgroup
        return subgroup.closed and subgroup.cut_code is None and self.index >= len(subgroup.objects)

    def _cut_code(self) -> StreamErrorCode | int | None:
        return self.subgroup.cut_code

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
            first_object=subgroup.first_object and self.index == 0,
        ).encode()
