"""A Track as a relay holds it: what its sources bring, made one (MOQT, "Relays").

A source is a subscription that some publisher serves, streams that are live and a fill of the past,
or a fetch of what is missing. What comes goes into one LocalTrack, from which every subscriber is
served; what is not known of the Track is in its Coverage. Nothing is forwarded as complete that was
not: a stream that broke is reset, an Object of which the rest is lost is let go, a Track that
failed ends with an error.

What is live for one publisher may be past for another one. It is live here if it comes after what
the first of them told to be its Largest Object: then every subscriber of ours either has it in its
fill or waits for it on a live stream.

Pure: events in, changes of the LocalTrack out, the time an argument.
"""

from dataclasses import dataclass, field

from moqt.codepoints import (
    GroupOrder,
    PropertyType,
    PublishDoneCode,
    RangeMarkerKind,
    StreamErrorCode,
)
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.awaited import Asked, Awaited
from moqt.relay.feeds import Feed, MalformedTrack
from moqt.relay.gaps import QUIET_S
from moqt.relay.placing import Placing
from moqt.session.budget import ByteBudget
from moqt.session.commands import StreamId
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge
from moqt.session.events import (
    FetchEnded,
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    RangeMarked,
    StateNotified,
    SubgroupClosed,
    SubgroupOpened,
    Via,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.pairs import Pairs, find_property

__all__ = ["QUIET_S", "Brought", "MalformedTrack", "MergedTrack"]

Brought = (
    SubgroupOpened
    | ObjectBegan
    | ObjectPiece
    | SubgroupClosed
    | ObjectReceived
    | FillEnded
    | FetchEnded
    | RangeMarked
    | StateNotified
)
#: At hand, since it is asked for with each Object: members of an Enum are looked up slowly.
_SUBGROUP = Via.SUBGROUP
_KNOWN = {
    RangeMarkerKind.NON_EXISTENT: Knowledge.COMPLETE,
    RangeMarkerKind.UNKNOWN: Knowledge.UNKNOWN,
    RangeMarkerKind.TIMED_OUT: Knowledge.TIMED_OUT,
}


@dataclass(slots=True, eq=False)
class _Source:
    live: dict[StreamId, Feed] = field(default_factory=dict)
    past: dict[StreamId, Feed] = field(default_factory=dict)
    asked: Asked | None = None
    """What its fill, or its fetch, is to bring; None: nothing, or no more."""


class MergedTrack:
    """What a relay knows of one Track.

    Args:
        name: Its Full Track Name.
        properties: Track Properties, as its publisher states them.
        budget: Where payload octets are counted.
    """

    def __init__(
        self, name: FullTrackName, *, properties: Pairs = (), budget: ByteBudget | None = None
    ) -> None:
        order = find_property(properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER)
        self.coverage = Coverage(Knowledge.PENDING)
        self.local = LocalTrack(
            name,
            properties=properties,
            group_order=GroupOrder.DESCENDING
            if order == GroupOrder.DESCENDING
            else GroupOrder.ASCENDING,
            budget=budget,
            coverage=self.coverage,
        )
        duration = find_property(properties, PropertyType.MAX_CACHE_DURATION)
        self.max_age_s = duration / 1000 if isinstance(duration, int) else None
        """How long an Object may be kept after it came; None: for ever."""

        self._awaited = Awaited(self.coverage)
        self._placing = Placing(self.local, self._awaited)
        self._placing.may_expire = self.max_age_s is not None
        self._sources: dict[int, _Source] = {}
        self._next_source = 0
        self._ended: str | None = None  # one source saw the Track to its end

    # -- state -----------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether there is a source of what is to come."""
        return bool(self._awaited.live)

    @property
    def changed_at(self) -> float:
        """When an Object came last."""
        return self._placing.changed_at

    @property
    def is_complete(self) -> bool:
        """Whether the Track has ended and all of it is known, and may still be served."""
        ended = self.local.ended
        return (
            ended is not None
            and ended.code is PublishDoneCode.TRACK_ENDED
            and not self._placing.has_expired
            and not self.missing()
        )

    def missing(
        self, first: Location = FIRST, last: Location | None = None
    ) -> list[tuple[Location, Location]]:
        """Return the ranges that are neither known nor on their way, up to the Largest Object.

        Args:
            first: Where to begin.
            last: Where to end, if that is below the Largest Object.
        """
        largest = self.local.largest
        if largest is None:
            return []
        end = largest if last is None else min(last, largest)
        found = []
        for start, stop, knowledge in self.coverage.runs(first, end) if first <= end else ():
            if knowledge is Knowledge.PENDING and self._sources:
                continue
            if knowledge is not Knowledge.COMPLETE and not self._placing.holds_all(start, stop):
                found.append((start, stop))
        return found

    # -- sources come and go ---------------------------------------------------------------------

    def join(self, *, largest: Location | None, filling: bool) -> int:
        """Note a source of what is to come; return its number, for the other calls.

        Args:
            largest: Largest Object as its publisher told it.
            filling: Whether it will bring all of the past, up to ``largest``.
        """
        if not self._next_source:
            self._placing.past = largest
        is_first = not self._sources
        number, source = self._new_source()
        self._awaited.live[number] = FIRST if largest is None else largest.next()
        if largest is None:
            return number
        self.local.raise_largest(largest)
        if filling:
            source.asked = self._awaited.ask(FIRST, largest)
        elif is_first:
            self._awaited.settle(FIRST, largest, Knowledge.UNKNOWN)
        self.local.coverage_changed()
        return number

    def ask(self, first: Location, last: Location) -> int:
        """Note a fetch of what is missing, as a source that is over when it has ended.

        Args:
            first: First Location that it brings.
            last: The last one.
        """
        number, source = self._new_source()
        source.asked = self._awaited.ask(first, last)
        self.local.coverage_changed()
        return number

    def leave(
        self, number: int, code: PublishDoneCode | int | None, reason: str, now: float
    ) -> None:
        """Note that a source is over.

        Args:
            number: What :meth:`join` or :meth:`ask` returned.
            code: Why; TRACK_ENDED only if all that was due has come. None: it was given up by
                us, and the Track may go on with another one.
            reason: For people.
            now: The time.
        """
        was_live = number in self._awaited.live
        self._remove(number, now, Knowledge.UNKNOWN)
        if code == PublishDoneCode.TRACK_ENDED:
            self._ended = reason
        if not was_live or self.is_live or self.local.ended is not None:
            return
        if self._ended is not None:
            self._end_well(self._ended)
        elif code is not None:
            self.fail(code, reason)
        else:
            self._stop(Knowledge.UNKNOWN)

    def lose(self, number: int, now: float) -> None:
        """Note that a source is lost, though another one will be asked for the same.

        Streams that only it brought are reset, and what it was to bring stays pending. In the end
        another source joins, or the Track fails.
        """
        is_last = self._awaited.live.keys() == {number}
        if is_last:
            self._placing.forget_waiting()
        self._remove(number, now, None if is_last else Knowledge.UNKNOWN)
        if not is_last or self.local.ended is not None:
            return
        if self._ended is not None:
            self._end_well(self._ended)
        else:
            self._stop(None)

    def fail(self, code: PublishDoneCode | int, reason: str) -> None:
        """There will not be another source."""
        if self.local.ended is None and not self.is_live:
            self._stop(Knowledge.UNKNOWN)
            self.coverage.settle(FIRST, LAST, Knowledge.UNKNOWN)
            known = code if isinstance(code, PublishDoneCode) else None
            self.local.end(known or PublishDoneCode.INTERNAL_ERROR, reason)
            self.local.coverage_changed()

    def end_malformed(self, reason: str) -> None:
        """Nobody can say what the Track is: its subscribers are told so, and it is not kept."""
        self._sources.clear()
        self._awaited.live.clear()
        self._placing.stop(code=StreamErrorCode.MALFORMED_TRACK)
        self._placing.drop_parts(StreamErrorCode.MALFORMED_TRACK)
        self.coverage.settle(FIRST, LAST, Knowledge.UNKNOWN)
        self.local.end(PublishDoneCode.MALFORMED_TRACK, reason)
        self.local.coverage_changed()

    # -- what a source brings --------------------------------------------------------------------

    def take(self, number: int, event: Brought, now: float) -> None:
        """Take what a source brings. What is left of one that is gone is ignored.

        Raises:
            MalformedTrack: If it contradicts what is held.
        """
        source = self._sources.get(number)
        if source is None:
            return
        try:
            if isinstance(event, ObjectPiece):  # of which there are most
                feed = source.live.get(event.stream_id) or source.past.get(event.stream_id)
                if feed is not None:
                    self._placing.add(feed, event.data)
            elif isinstance(event, ObjectBegan):
                self._take_object(source, event, now)
            else:
                self._take_other(number, source, event, now)
        except UsageError as exc:
            raise MalformedTrack(str(exc)) from None

    def tick(self, now: float) -> None:
        """Settle what cannot come any more. Call it a few times a second."""
        self._placing.tick(now)
        if self.max_age_s is not None:
            self._placing.expire(now - self.max_age_s)

    # -- inside ----------------------------------------------------------------------------------

    def _new_source(self) -> tuple[int, _Source]:
        number, self._next_source = self._next_source, self._next_source + 1
        source = self._sources[number] = _Source()
        return number, source

    def _remove(self, number: int, now: float, rest: Knowledge | None) -> None:
        """Take a source out; ``rest`` is what is known of what it was still to bring."""
        source = self._sources.pop(number, None)
        if source is None:
            return
        self._awaited.live.pop(number, None)
        for feed in source.live.values():
            self._placing.close(feed, StreamErrorCode.INTERNAL_ERROR, now)
        self._end_past(source, rest)

    def _end_past(self, source: _Source, rest: Knowledge | None) -> None:
        """A fill or a fetch brings nothing more; ``rest`` is what is known of what it did not."""
        if source.asked is not None:
            asked, source.asked = source.asked, None
            self._awaited.over(asked, rest)
        self._placing.close_past(source.past.values(), complete=rest is Knowledge.COMPLETE)
        source.past.clear()

    def _stop(self, rest: Knowledge | None) -> None:
        """Nothing is live any more; ``rest`` is what is known of what was."""
        self._placing.stop()
        if rest is not None and (largest := self.local.largest) is not None:
            self._awaited.settle(FIRST, largest, rest)
        self.local.coverage_changed()

    def _end_well(self, reason: str) -> None:
        self._placing.stop(well=True)
        self._awaited.settle(FIRST, LAST, Knowledge.COMPLETE)
        self.local.end(PublishDoneCode.TRACK_ENDED, reason)
        self.local.coverage_changed()

    def _take_object(self, source: _Source, event: ObjectBegan, now: float) -> None:
        placing, stream_id, location = self._placing, event.stream_id, event.location
        if event.via is _SUBGROUP:
            placing.began(source.live[stream_id], event, now)
            return
        if source.asked is not None:
            self._awaited.reached(source.asked, location)
        if (feed := source.past.get(stream_id)) is None:
            feed = source.past[stream_id] = Feed(location.group, 0)
        placing.began_past(feed, event, now)
        self.local.coverage_changed()

    def _take_other(self, number: int, source: _Source, event: Brought, now: float) -> None:
        placing = self._placing
        match event:
            case SubgroupOpened():
                feed = source.live[event.stream_id] = Feed(event.group_id, event.subgroup_id, event)
                placing.open(feed, number, now)
            case SubgroupClosed(stream_id=stream_id, code=code):
                closed = source.live.pop(stream_id, None)
                if closed is not None:
                    placing.close(closed, code, now)
            case FillEnded() | FetchEnded():
                self._end_past(source, Knowledge.COMPLETE if event.complete else Knowledge.UNKNOWN)
                self.local.coverage_changed()
            case RangeMarked():
                if source.asked is not None:
                    self._awaited.passed(source.asked, event.end, _KNOWN[event.kind])
                    placing.review()
                    self.local.coverage_changed()
            case _:
                pass  # a datagram is not forwarded; the Largest Object is seen in what comes
