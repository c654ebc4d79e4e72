"""A Track as a relay holds it: what its sources bring, made one (MOQT, "Relays").

A source is a subscription that some publisher serves: streams that are live, and a fill of the
past. What comes goes into one LocalTrack, from which every subscriber is served; what is not known
of the Track is in its Coverage. Nothing is forwarded as complete that was not: a stream that broke
is reset, an Object of which the rest is lost is let go, a Track that failed ends with an error.

Pure: events in, changes of the LocalTrack out, the time an argument.
"""

from dataclasses import dataclass, field

from moqt.codepoints import (
    MAX_VI64,
    GroupOrder,
    ObjectStatus,
    PropertyType,
    PublishDoneCode,
    RangeMarkerKind,
    StreamErrorCode,
)
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge, before
from moqt.session.events import (
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
from moqt.session.localtrack import (
    ByteBudget,
    LocalObject,
    LocalSubgroup,
    LocalTrack,
    Payload,
    StoredSubgroup,
)
from moqt.wire.pairs import Pairs, find_property

#: Seconds after the last stream of a Group ended, in which another one may still show itself:
#: streams overtake each other. After that, what of the Group has not come does not exist.
QUIET_S = 1.0

Brought = (
    SubgroupOpened
    | ObjectBegan
    | ObjectPiece
    | SubgroupClosed
    | ObjectReceived
    | FillEnded
    | RangeMarked
    | StateNotified
)
_Place = tuple[int, int]
_KNOWN = {
    RangeMarkerKind.NON_EXISTENT: Knowledge.COMPLETE,
    RangeMarkerKind.UNKNOWN: Knowledge.UNKNOWN,
    RangeMarkerKind.TIMED_OUT: Knowledge.TIMED_OUT,
}


class MalformedTrack(Exception):
    """Two sources, or one at two times, contradict each other: nobody can say which is right."""


@dataclass(slots=True, eq=False)
class _Copy:
    """An Object that is held already, as another source brings it."""

    held: LocalObject
    length: int
    parts: list[Payload] = field(default_factory=list)
    have: int = 0

    def add(self, data: Payload) -> None:
        self.parts.append(data)
        self.have += len(data)
        if self.have == self.length:
            mine, held = b"".join(self.parts), b"".join(self.held.parts)
            if not self.held.dropped and mine[: len(held)] != held:
                raise MalformedTrack(f"two payloads for Object {self.held.object_id}")


@dataclass(slots=True, eq=False)
class _Feed:
    """One stream of a source."""

    group_id: int
    subgroup_id: int
    opened: SubgroupOpened | None = None
    """None for the stream of a fill."""

    last: int | None = None
    """Object ID of the last Object on it."""

    subgroup: LocalSubgroup | None = None
    object: LocalObject | None = None
    """The Object that it adds octets to."""

    copy: _Copy | None = None

    def add(self, data: Payload) -> None:
        if self.copy is not None:
            self.copy.add(data)
        elif self.object is not None and self.subgroup is not None and not self.object.dropped:
            self.subgroup.extend(self.object, data)


@dataclass(slots=True, eq=False)
class _Lane:
    """One Subgroup that is live: where it goes, and which streams bring it."""

    subgroup: LocalSubgroup
    feeds: list[_Feed]


@dataclass(slots=True, eq=False)
class _Group:
    """A Group of which something is live."""

    lanes: dict[int, _Lane] = field(default_factory=dict)
    open_streams: int = 0
    idle_since: float = 0.0
    is_broken: bool = False
    """A stream of it was reset, and no other brought the rest."""


@dataclass(slots=True, eq=False)
class _Source:
    feeds: dict[StreamId, _Feed] = field(default_factory=dict)
    fills: dict[StreamId, _Feed] = field(default_factory=dict)
    fill_at: Location = FIRST
    fill_end: Location | None = None
    """Up to where its fill goes; None: there is none, or it is over."""


def _others_bring_the_rest(lane: _Lane) -> bool:
    """Whether a stream of the Subgroup is left, and none of them is past what is held."""
    whole = [obj.object_id for obj in lane.subgroup.objects if obj.is_whole]
    last = max(whole, default=-1)
    return bool(lane.feeds) and all(f.last is None or f.last <= last for f in lane.feeds)


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

        self.changed_at = 0.0
        """When an Object came last."""

        self._sources: dict[int, _Source] = {}
        self._next_source = 0
        self._groups: dict[int, _Group] = {}
        self._over: dict[_Place, LocalSubgroup] = {}  # of Groups that are live no more
        self._skipped: list[tuple[Location, Location, float]] = []  # of which nothing was seen
        self._ended: str | None = None  # one source saw the Track to its end

    # -- state -----------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether there is a source."""
        return bool(self._sources)

    @property
    def is_complete(self) -> bool:
        """Whether the Track has ended and all of it is known."""
        ended, largest = self.local.ended, self.local.largest
        if ended is None or ended.code is not PublishDoneCode.TRACK_ENDED:
            return False
        return largest is None or all(
            known is Knowledge.COMPLETE for _, _, known in self.coverage.runs(FIRST, largest)
        )

    # -- sources come and go ---------------------------------------------------------------------

    def join(self, *, largest: Location | None, filling: bool) -> int:
        """Note a source; return its number, for the other calls.

        Args:
            largest: Largest Object as its publisher told it.
            filling: Whether it will bring all of the past, up to ``largest``.
        """
        number, self._next_source = self._next_source, self._next_source + 1
        source = self._sources[number] = _Source()
        if largest is None:
            return number
        known = self.local.largest
        self.local.raise_largest(largest)
        if filling:
            source.fill_end = largest
            for first, last, knowledge in self.coverage.runs(FIRST, largest):
                if knowledge in (Knowledge.UNKNOWN, Knowledge.TIMED_OUT):
                    self.coverage.mark(first, last, Knowledge.PENDING)
        elif len(self._sources) == 1:
            first = FIRST if known is None else known.next()
            if first <= largest:
                self.coverage.settle(first, largest, Knowledge.UNKNOWN)
        self.local.coverage_changed()
        return number

    def leave(
        self, number: int, code: PublishDoneCode | int | None, reason: str, now: float
    ) -> None:
        """Note that a source is over.

        Args:
            number: What :meth:`join` returned.
            code: Why; TRACK_ENDED only if all that was due has come. None: it was given up by
                us, and the Track may go on with another one.
            reason: For people.
            now: The time.
        """
        source = self._sources.pop(number, None)
        if source is None:
            return
        for stream_id in list(source.feeds):
            self._close(source, stream_id, StreamErrorCode.INTERNAL_ERROR, now)
        self._end_fill(source, complete=False)
        if code == PublishDoneCode.TRACK_ENDED:
            self._ended = reason
        if self._sources or self.local.ended is not None:
            return
        for group_id, state in self._groups.items():
            self._over |= {(group_id, n): lane.subgroup for n, lane in state.lanes.items()}
        self._groups.clear()
        self._skipped.clear()
        if self._ended is not None:
            self.coverage.settle(FIRST, LAST, Knowledge.COMPLETE)
            self.local.end(PublishDoneCode.TRACK_ENDED, self._ended)
        else:
            if (largest := self.local.largest) is not None:
                self.coverage.settle(FIRST, largest, Knowledge.UNKNOWN)
            if code is not None:
                self.coverage.settle(FIRST, LAST, Knowledge.UNKNOWN)
                known = code if isinstance(code, PublishDoneCode) else None
                self.local.end(known or PublishDoneCode.INTERNAL_ERROR, reason)
        self.local.coverage_changed()

    def end_malformed(self, reason: str) -> None:
        """Nobody can say what the Track is: its subscribers are told so, and it is not kept."""
        self._sources.clear()
        for group in self._groups.values():
            for lane in group.lanes.values():
                lane.subgroup.cut(StreamErrorCode.MALFORMED_TRACK)
        self._groups.clear()
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
            self._take(source, event, now)
        except UsageError as exc:
            raise MalformedTrack(str(exc)) from None

    def tick(self, now: float) -> None:
        """Settle what cannot come any more. Call it a few times a second."""
        due = now - QUIET_S
        done = [g for g, s in self._groups.items() if not s.open_streams and s.idle_since <= due]
        for group_id in done:
            state = self._groups.pop(group_id)
            self._over |= {(group_id, n): lane.subgroup for n, lane in state.lanes.items()}
            self._settle_group(group_id, Knowledge.UNKNOWN if state.is_broken else None)
        waiting: list[tuple[Location, Location, float]] = []
        for first, last, since in self._skipped:
            if since > due or any(first.group <= g <= last.group for g in self._groups):
                waiting.append((first, last, since))
            else:
                self.coverage.settle(first, last, Knowledge.COMPLETE)
                self.local.coverage_changed()
        self._skipped = waiting

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, source: _Source, event: Brought, now: float) -> None:
        match event:
            case SubgroupOpened():
                feed = _Feed(event.group_id, event.subgroup_id, event)
                source.feeds[event.stream_id] = feed
                group = self._group(event.group_id, now)
                group.open_streams += 1
                if (lane := group.lanes.get(event.subgroup_id)) is not None:
                    lane.feeds.append(feed)
            case ObjectBegan(via=Via.SUBGROUP):
                self.changed_at = now
                self._began(source.feeds[event.stream_id], event)
            case ObjectBegan():
                self.changed_at = now
                self._began_past(source, event)
            case ObjectPiece(stream_id=stream_id, data=data):
                found = source.feeds.get(stream_id) or source.fills.get(stream_id)
                if found is not None:
                    found.add(data)
            case SubgroupClosed(stream_id=stream_id):
                self._close(source, stream_id, event.code, now)
            case FillEnded():
                self._end_fill(source, complete=event.complete)
                self.local.coverage_changed()
            case RangeMarked():
                if source.fill_at <= event.end:
                    self.coverage.settle(source.fill_at, event.end, _KNOWN[event.kind])
                    source.fill_at = event.end.next()
                    self.local.coverage_changed()
            case ObjectReceived() | StateNotified():
                pass  # a datagram is not forwarded; the Largest Object is seen in what comes

    def _began(self, feed: _Feed, event: ObjectBegan) -> None:
        location, previous = event.location, feed.last
        feed.last, feed.object, feed.copy = location.object, None, None
        lane = self._groups[feed.group_id].lanes.get(feed.subgroup_id)
        if lane is not None and feed not in lane.feeds:
            lane.feeds.append(feed)  # it was there before the lane was
        held = self._held(location)
        if held is not None:
            feed.copy = self._copy_of(*held, event)
            return
        subgroup = self._next_in(feed, event, previous)
        if subgroup is None:
            return
        highest = self.local.largest
        feed.subgroup = subgroup
        if event.status is ObjectStatus.NORMAL:
            feed.object = subgroup.begin(location.object, event.length, properties=event.properties)
        else:
            subgroup.publish(location.object, status=event.status)
            if event.status is ObjectStatus.END_OF_TRACK:
                self.coverage.settle(location, LAST, Knowledge.COMPLETE)
        self._note_gap(feed, previous, location)
        if highest is not None and location < highest:
            self.local.coverage_changed()

    def _next_in(
        self, feed: _Feed, event: ObjectBegan, previous: int | None
    ) -> LocalSubgroup | None:
        """Return the Subgroup that goes on with an Object; None if it is not to go on here."""
        assert feed.opened is not None, "it is a stream of a Subgroup"
        group, object_id = self._groups[feed.group_id], event.location.object
        lane = group.lanes.get(feed.subgroup_id)
        if lane is None and (past := self._over.pop((feed.group_id, feed.subgroup_id), None)):
            lane = group.lanes[feed.subgroup_id] = _Lane(past, [])
            lane.feeds.append(feed)
        if lane is None:
            subgroup = self.local.open_subgroup(
                feed.group_id,
                feed.subgroup_id,
                priority=event.publisher_priority,
                holds_end_of_group=feed.opened.end_of_group,
                has_properties=feed.opened.has_properties,
                first_object=feed.opened.first_object and previous is None,
            )
            group.lanes[feed.subgroup_id] = _Lane(subgroup, [feed])
            return subgroup
        subgroup = lane.subgroup
        if subgroup.priority != event.publisher_priority:
            raise MalformedTrack(f"two priorities for Object {event.location}")
        last = subgroup.objects[-1].object_id if subgroup.objects else None
        if last is not None and object_id < last:
            return None  # too late to be in its place
        if not subgroup.closed:
            if previous == last and (last is None or subgroup.objects[-1].is_whole):
                return subgroup  # it is known to be the next one
            if len(lane.feeds) > 1:
                return None  # who is further back will bring all that lies between
            subgroup.cut(StreamErrorCode.INTERNAL_ERROR)
        if subgroup.cut_code is None:
            raise MalformedTrack(f"Object {event.location} in a Subgroup that was over")
        lane.subgroup = subgroup.resume(object_id)
        return lane.subgroup

    def _note_gap(self, feed: _Feed, previous: int | None, location: Location) -> None:
        """Between two Objects of a stream there is nothing, if the Group has one Subgroup."""
        assert feed.opened is not None, "it is a stream of a Subgroup"
        first = 0 if previous is None else previous + 1
        known = previous is not None or feed.opened.first_object
        if known and first < location.object and len(self._groups[feed.group_id].lanes) == 1:
            self.coverage.settle(
                Location(location.group, first), before(location), Knowledge.COMPLETE
            )
            self.local.coverage_changed()

    def _began_past(self, source: _Source, event: ObjectBegan) -> None:
        location, largest = event.location, self.local.largest
        feed = source.fills.setdefault(event.stream_id, _Feed(location.group, 0))
        feed.subgroup, feed.object, feed.copy = None, None, None
        if source.fill_at < location:
            self.coverage.settle(source.fill_at, before(location), Knowledge.COMPLETE)
        source.fill_at = max(source.fill_at, location.next())
        held = self._held(location)
        if held is not None:
            feed.copy = self._copy_of(*held, event)
        elif event.subgroup_id is None or largest is None or location > largest:
            self.coverage.settle(location, location, Knowledge.UNKNOWN)
        else:
            stored = self.local.store_subgroup(
                location.group, event.subgroup_id, priority=event.publisher_priority
            )
            feed.subgroup = stored
            feed.object = stored.begin(location.object, event.length, properties=event.properties)
        self.local.coverage_changed()

    def _end_fill(self, source: _Source, *, complete: bool) -> None:
        for feed in source.fills.values():
            if isinstance(feed.subgroup, StoredSubgroup) and feed.object is not None:
                feed.subgroup.give_up(feed.object, StreamErrorCode.INTERNAL_ERROR)
        source.fills.clear()
        if source.fill_end is not None:
            end, source.fill_end = source.fill_end, None
            if not any(other.fill_end is not None for other in self._sources.values()):
                knowledge = Knowledge.COMPLETE if complete else Knowledge.UNKNOWN
                self.coverage.settle(FIRST, end, knowledge)
            elif complete:
                self.coverage.settle(FIRST, end, Knowledge.COMPLETE)

    def _close(
        self,
        source: _Source,
        stream_id: StreamId,
        code: StreamErrorCode | int | None,
        now: float,
    ) -> None:
        feed = source.feeds.pop(stream_id, None)
        group = self._groups.get(feed.group_id) if feed is not None else None
        if feed is None or group is None:
            return
        group.open_streams -= 1
        group.idle_since = now
        lane = group.lanes.get(feed.subgroup_id)
        if lane is None or feed not in lane.feeds:
            group.is_broken |= code is not None
            return
        lane.feeds.remove(feed)
        subgroup = lane.subgroup
        if code is None:
            at_end = not subgroup.objects or subgroup.objects[-1].object_id == feed.last
            if (
                at_end
                and not subgroup.closed
                and all(obj.is_whole for obj in subgroup.objects[-1:])
            ):
                subgroup.close()
            ends = feed.opened is not None and feed.opened.end_of_group
            if ends and len(group.lanes) == 1 and not group.open_streams and not group.is_broken:
                self._settle_group(feed.group_id, None, whole=True)
        elif feed.object is not None and not feed.object.is_whole:
            subgroup.cut(code)
            group.is_broken |= not self._go_on_with_copy(lane, feed)
        elif not _others_bring_the_rest(lane):
            subgroup.cut(code)
            group.is_broken = True

    def _go_on_with_copy(self, lane: _Lane, broken: _Feed) -> bool:
        """Another stream may have the Object that broke off: go on with that one."""
        for other in lane.feeds:
            if other.copy is not None and other.copy.held is broken.object:
                copy, other.copy = other.copy, None
                object_id = copy.held.object_id
                lane.subgroup = other.subgroup = lane.subgroup.resume(object_id)
                other.object = lane.subgroup.begin(
                    object_id, copy.length, properties=copy.held.properties
                )
                for part in copy.parts:
                    lane.subgroup.extend(other.object, part)
                return True
        return _others_bring_the_rest(lane)

    def _settle_group(
        self, group_id: int, knowledge: Knowledge | None, *, whole: bool = False
    ) -> None:
        largest = self.local.largest
        end = Location(group_id, MAX_VI64)
        if largest is not None and largest.group == group_id and not whole:
            end = largest
        if end >= Location(group_id, 0):
            self.coverage.settle(Location(group_id, 0), end, knowledge or Knowledge.COMPLETE)
            self.local.coverage_changed()

    def _group(self, group_id: int, now: float) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
            # Also the rest of the last Group, which may have been over when a source was joined:
            # then no stream of it comes that could show where it ends.
            largest = self.local.largest
            first = FIRST if largest is None else largest.next()
            if first < Location(group_id, 0):
                self._skipped.append((first, before(Location(group_id, 0)), now))
        return group

    def _held(self, location: Location) -> tuple[LocalSubgroup, LocalObject] | None:
        for subgroup, obj in self.local.objects_from(location.group, location.object, 1):
            if obj.object_id == location.object:
                return subgroup, obj
        return None

    def _copy_of(
        self, subgroup: LocalSubgroup, obj: LocalObject, event: ObjectBegan
    ) -> _Copy | None:
        same = (
            obj.status is event.status
            and obj.length == event.length
            and subgroup.priority == event.publisher_priority
            and (event.subgroup_id is None or subgroup.subgroup_id == event.subgroup_id)
            and tuple(obj.properties) == tuple(event.properties)
        )
        if not same:
            raise MalformedTrack(f"two versions of Object {event.location}")
        return _Copy(obj, event.length)
