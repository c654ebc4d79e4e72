"""Objects of the past out: what a fetch stream says of every Location of its range."""

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
from moqt.session.context import Context
from moqt.session.coverage import Knowledge, before
from moqt.session.events import RequestId
from moqt.session.localobjects import Held, LocalObject, LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.session.publishing import FILL_RANK, ObjectFlow, Selection
from moqt.session.sendqueue import Rank
from moqt.wire.fetchstream import FetchHeader, FetchWriter

#: Publisher Priority of a fetch stream that has had no Object yet.
_DEFAULT_PRIORITY = 128


@dataclass(frozen=True, slots=True)
class _Marked:
    """A step of a fetch stream that is no Object: what became of all after the step before.

    Up to ``upto``, that included.
    """

    kind: RangeMarkerKind
    upto: Location


_Step = Held | _Marked
#: At hand, since it is asked for with each Object: members of an Enum are looked up slowly.
_NORMAL = ObjectStatus.NORMAL
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
        """It waits at a Location of which the Track does not know yet, or for a payload that is to
        be brought."""

        self._step: _Step | None = None
        self._subgroup: LocalSubgroup | None = None  # of the Object that the rank is taken from

    def rank(self) -> Rank:
        """The Object's priority, then its Group's place, ahead of what is live there.

        That is the Object being sent, or else the next one; a marker, and the end, are as urgent
        as the Object before them.
        """
        step = self._step
        if self._object is None and step is not None and not isinstance(step, _Marked):
            self._subgroup = step[0]
        subgroup, selection = self._subgroup, self.selection
        return (
            selection.priority,
            subgroup.priority if subgroup is not None else _DEFAULT_PRIORITY,
            self._order_differs,
            selection.group_rank(subgroup.group_id) if subgroup is not None else 0,
            FILL_RANK,
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
        if step is None:
            return False
        if not isinstance(step, _Marked):
            _, obj = step
            if obj.dropped:  # since it was looked up
                self._step = _Marked(RangeMarkerKind.UNKNOWN, obj.location)
            elif self.patience.is_over and not obj.is_whole:
                self._step = _Marked(RangeMarkerKind.TIMED_OUT, obj.location)
            elif not obj.at_hand():
                self.is_pending = True
                return False
            self.is_pending = False
        return True

    def _next(self) -> tuple[bytes, LocalObject | None] | None:
        if not self._has_next():
            return None
        step, self._step = self._step, None
        assert step is not None
        if isinstance(step, _Marked):
            return self._writer.marker(step.kind, step.upto), None
        subgroup, obj = step
        self._subgroup = subgroup
        head = self._writer.object_header(
            obj.location,
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
            for held in batch:
                subgroup, obj = held
                location = obj.location
                while at is not None and at != location and revision == self._track.revision:
                    at = yield from self._pass(at, location)
                if revision != self._track.revision:
                    break
                if obj.dropped:
                    yield from self._note(Knowledge.UNKNOWN, location)
                elif obj.status is _NORMAL and self._selection.wants(subgroup, obj):
                    if self._gap is not None:
                        yield from self._say(marker_follows=False)
                    yield held
                else:  # Object Status is not carried on fetch streams (MOQT, "Object Status")
                    yield from self._note(Knowledge.COMPLETE, location)
                at = self._after(location)
            if at is not None and not batch:
                at = yield from self._pass(at, None)
        yield from self._say(marker_follows=False)

    def _look_up(self, at: Location) -> tuple[Sequence[Held], int]:
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
