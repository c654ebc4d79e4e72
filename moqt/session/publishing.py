"""Objects out: the flows that turn a LocalTrack into subgroup streams and fetch streams.

A flow is a cursor. It holds no payload, only a place in a Track, and produces octets when it is
asked for them. Both kinds work alike: the head of an Object (a few octets that depend on what
the stream carried before) and then the payload's own pieces, uncopied.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
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
from moqt.session.coverage import Knowledge, before
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
                if not small and not pieces:
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
        if self._object is None and not self._has_next():
            self.finished = self._at_end()
            if not self.finished and not small and not pieces:
                if (code := self._cut_code()) is not None:
                    self.cut(code, after_delivery=True)
                return [], 0
        if small or not pieces:
            pieces.append(bytes(small))
            taken += len(small)
        last = len(pieces) - 1
        return [
            SendStreamData(self.stream_id, piece, fin=self.finished and index == last)
            for index, piece in enumerate(pieces)
        ], taken

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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step of a fetch stream: one Object."""

    subgroup: LocalSubgroup
    object: LocalObject


@dataclass(frozen=True, slots=True)
class _Marked:
    """A step of a fetch stream: what became of all between the step before and ``upto``.

    That includes ``upto`` itself.
    """

    kind: RangeMarkerKind
    upto: Location


_Step = _Stored | _Marked
_MARKERS = {
    Knowledge.COMPLETE: RangeMarkerKind.NON_EXISTENT,
    Knowledge.UNKNOWN: RangeMarkerKind.UNKNOWN,
    Knowledge.TIMED_OUT: RangeMarkerKind.TIMED_OUT,
}
#: Objects looked up at once: looking one up costs more than passing over it.
_BATCH = 64


class Patience:
    """How long a fetch stream waits for what its Track does not know yet (MOQT, "FILL_TIMEOUT").

    Args:
        context: Of the session; its ``fill_timeout_s`` counts where nothing is stated.
        stated_ms: FILL_TIMEOUT: from now on, in total. 0: what is at hand. None: not stated; then
            only the time counts in which the stream stands still.
        on_over: Called when it is over, and when an Object that was begun is not waited for
            any longer.
    """

    def __init__(
        self, context: Context, stated_ms: int | None, on_over: Callable[[], None]
    ) -> None:
        self._timers = context.timers
        self._on_over = on_over
        self._limit_s = context.config.fill_timeout_s
        self._waits = False
        self.is_over = stated_ms == 0
        """What is missing is told as timed out from now on."""

        self.is_stalled = False
        """Nor is the rest of an Object waited for that was begun."""

        self._is_total = stated_ms is not None
        if stated_ms:
            self._limit_s = self._limit_s or stated_ms / 1000
            self._timers.start(self, stated_ms / 1000)

    def waits(self, waits: bool) -> None:
        """Note whether the stream stands still for want of something to send."""
        if waits is self._waits:
            return
        self._waits = waits
        if not self._is_total or self.is_over:
            self._watch()

    def stop(self) -> None:
        """The stream is over."""
        self._timers.stop(self)

    def timer_expired(self) -> None:
        """The time is over."""
        if self._is_total and not self.is_over:
            self.is_over = True
            self._watch()  # an Object that was begun may still come to its end
        else:
            self.is_over = self.is_stalled = True
        self._on_over()

    def _watch(self) -> None:
        if self._waits and self._limit_s is not None:
            self._timers.start(self, self._limit_s)
        else:
            self._timers.stop(self)


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
        patience: Patience | None = None,
        order_differs: bool = False,
    ) -> None:
        super().__init__(context, selection)
        self.request_id = request_id
        self.patience = patience or Patience(context, None, lambda: None)
        self._order_differs = int(order_differs)
        self._writer = FetchWriter(selection.group_order)
        self._steps = _Walk(track, selection, self.patience).steps()
        self._is_over = False
        self._given_up: StreamErrorCode | None = None
        self.is_pending = False
        """It waits at a Location of which the Track does not know yet."""

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

    def has_data(self) -> bool:
        """Whether :meth:`pull` would send something: octets, or the end."""
        found = super().has_data()
        self.patience.waits(not found and not self.finished)
        return found

    def _is_stalled(self) -> bool:
        return self.patience.is_stalled

    def _opens_empty(self) -> bool:
        return True  # a FETCH whose range holds nothing is a header and FIN

    def give_up(self, code: StreamErrorCode) -> None:
        """End by a reset; a stream that is not open yet shows first whose it is."""
        if self.stream_id is None:
            self._given_up = code
        else:
            self.cut(code)

    def _cut_code(self) -> StreamErrorCode | int | None:
        return self._given_up

    def _open(self) -> bytes:
        return FetchHeader(self.request_id).encode()

    def _has_next(self) -> bool:
        if self._given_up is not None:
            return False
        if self._step is None and not self._is_over:
            self._step = next(self._steps, _OVER)
            self._is_over = self._step is _OVER
            self.is_pending = self._step is None
            if self._is_over:
                self._step = None
        step = self._step
        if isinstance(step, _Stored):
            kind: RangeMarkerKind | None = None
            if step.object.dropped:  # since it was looked up
                kind = RangeMarkerKind.UNKNOWN
            elif self.patience.is_over and not step.object.is_whole:
                kind = RangeMarkerKind.TIMED_OUT
            if kind is not None:
                upto = Location(step.subgroup.group_id, step.object.object_id)
                self._step = _Marked(kind, upto)
        return step is not None

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        if not self._has_next():
            return None
        step, self._step = self._step, None
        assert step is not None
        if isinstance(step, _Marked):
            return self._writer.marker(step.kind, step.upto), None
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
        return not self._has_next() and self._is_over and self._given_up is None


_OVER = _Marked(RangeMarkerKind.NON_EXISTENT, Location(0, 0))


class _Walk:
    """The way of a fetch stream through a Track: what it says of every Location of its range.

    In Group Order, and ascending in each Group. The Track may change on the way: more of the past
    may be stored, more become known. What has been passed is not looked at again.

    Args:
        track: What is walked through.
        selection: The range, which is closed, and what is wanted of it.
        patience: How long it waits.
    """

    def __init__(self, track: LocalTrack, selection: Selection, patience: Patience) -> None:
        self._track = track
        self._patience = patience
        self._selection = selection
        self._start = selection.range.start
        assert selection.range.end is not None, "the range of a fetch is closed"
        self._end = selection.range.end
        self._descending = selection.group_order is GroupOrder.DESCENDING
        #: Where what is not held is known Location by Location, a mixed gap is split. Elsewhere
        #: all of a gap of which a part was let go is unknown.
        self._is_exact = track.coverage is not None
        self._gap: tuple[Knowledge, Location] | None = None  # not said yet, up to where

    def steps(self) -> Iterator[_Step | None]:
        """Yield the steps; None where the walk must wait until the Track has changed."""
        at: Location | None = self._start
        if self._descending:
            at = self._first(self._end.group)
        while at is not None:
            batch, revision = self._look_up(at)
            for subgroup, obj in batch:
                location = Location(subgroup.group_id, obj.object_id)
                while at is not None and at != location and revision == self._track.revision:
                    at = yield from self._pass(at, location)
                if revision != self._track.revision:
                    break
                if obj.dropped:
                    yield from self._note(Knowledge.UNKNOWN, location)
                elif obj.status is ObjectStatus.NORMAL and self._selection.wants(subgroup, obj):
                    yield from self._say(marker_follows=False)
                    yield _Stored(subgroup, obj)
                else:  # Object Status is not carried on fetch streams (MOQT, "Object Status")
                    yield from self._note(Knowledge.COMPLETE, location)
                at = self._after(location)
            if at is not None and not batch:
                at = yield from self._pass(at, None)
        yield from self._say(marker_follows=False)

    def _look_up(self, at: Location) -> tuple[Sequence[tuple[LocalSubgroup, LocalObject]], int]:
        """Return the next Objects of one Group, none if no more are held in the range."""
        track, end, descending = self._track, self._end, self._descending
        revision = track.revision
        step = -1 if descending else 1
        group = track.next_group(at.group, descending=descending)
        while group is not None and self._start.group <= group <= end.group:
            lowest = at.object if group == at.group else self._first(group).object
            batch = track.objects_from(group, lowest, _BATCH)
            if group == end.group and batch and batch[-1][1].object_id > end.object:
                batch = [pair for pair in batch if pair[1].object_id <= end.object]
            if batch:
                return batch, revision
            group = track.next_group(group + step, descending=descending)
        return (), revision

    def _pass(
        self, at: Location, held: Location | None
    ) -> Generator[_Step | None, None, Location | None]:
        """Go on from ``at``, where no Object is held; return where to, None at the end.

        Args:
            at: The Location that is next.
            held: The next one, in order, of which an Object is held; None: none up to the end.
        """
        first, last, knowledge = self._track.run_at(at)
        if knowledge is Knowledge.PENDING and self._patience.is_over:
            knowledge = Knowledge.TIMED_OUT
        if knowledge is Knowledge.PENDING:
            if self._gap is not None and self._gap[0] is not Knowledge.COMPLETE:
                yield from self._say(marker_follows=True)
            yield None
            return at
        if not self._descending:
            last = min(last, self._end if held is None else before(held))
            yield from self._note(knowledge, last)
            return self._after(last)
        if held is not None and held.group == at.group:
            last = min(last, before(held))
        elif last >= (top := self._last(at.group)):
            # As many Groups below as are known alike, down to where something is held.
            group = first.group + (first.object > 0)
            if held is not None:
                group = max(group, held.group + 1)
            elif first <= self._start:
                group = self._start.group
            last = top if group >= at.group else self._last(group)
        yield from self._note(knowledge, last)
        return self._after(last)

    def _note(self, knowledge: Knowledge, upto: Location) -> Iterator[_Step | None]:
        """Add what lies up to ``upto`` to the gap; say what went before, if it was another."""
        if self._gap is not None and self._gap[0] is not knowledge:
            if self._is_exact:
                yield from self._say(marker_follows=knowledge is not Knowledge.COMPLETE)
            elif knowledge is Knowledge.COMPLETE:
                knowledge = self._gap[0]
        self._gap = knowledge, upto

    def _say(self, *, marker_follows: bool) -> Iterator[_Step]:
        """Mark the gap, unless silence says it.

        Args:
            marker_follows: A marker follows, which would speak of this gap too.
        """
        gap, self._gap = self._gap, None
        if gap is None:
            return
        knowledge, upto = gap
        if knowledge is not Knowledge.COMPLETE:
            yield _Marked(_MARKERS[knowledge], upto)
        elif marker_follows and not self._selection.filters:
            # With filters there may be Objects in the gap, and silence says nothing of it.
            yield _Marked(RangeMarkerKind.NON_EXISTENT, upto)

    def _after(self, location: Location) -> Location | None:
        """Return the Location that is next in order; None at the end of the range."""
        if not self._descending:
            return location.next() if location < self._end else None
        if location < self._last(location.group):
            return location.next()
        return self._first(location.group - 1) if location.group > self._start.group else None

    def _first(self, group_id: int) -> Location:
        return max(self._start, Location(group_id, 0))

    def _last(self, group_id: int) -> Location:
        return min(self._end, Location(group_id, MAX_VI64))
