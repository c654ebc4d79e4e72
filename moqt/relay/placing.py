"""Where in a Track the Objects go that its sources bring, and what becomes of what breaks off.

Live Objects go on in their Subgroups, those of the past are stored beside them. What comes ahead of
its turn waits, as long as somebody is there who brings what is before it.
"""

from collections import deque
from collections.abc import Iterable

from moqt.codepoints import MAX_VI64, ObjectStatus, PropertyType, StreamErrorCode
from moqt.location import Location
from moqt.relay.awaited import Awaited
from moqt.relay.feeds import Feed, MalformedTrack, Part, Waiting
from moqt.relay.gaps import QUIET_S, Gaps
from moqt.relay.lanes import Lane, LiveGroup
from moqt.session.coverage import FIRST, LAST, Knowledge, before
from moqt.session.events import ObjectBegan
from moqt.session.localobjects import Held, Payload, StoredSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.pairs import find_property

#: Octets that may wait, of one Subgroup, for what comes before them on slower streams. At the limit
#: it goes on without that.
MAX_WAITING = 64 << 20

#: How many Objects are looked at, to find that there is nothing between two others.
_MAX_BETWEEN = 4096


class Placing:
    """The Objects of one Track that are coming, and the Subgroups that they go to.

    Args:
        local: The Track.
        awaited: What is still to come of it, and what is known.
    """

    def __init__(self, local: LocalTrack, awaited: Awaited) -> None:
        self._local = local
        self._awaited = awaited
        self.past: Location | None = None
        """Up to here nothing is live, for any subscriber."""

        self.changed_at = 0.0
        """When an Object came last."""

        self.may_expire = False
        """Objects may not be kept for ever, and it is noted when they came."""

        self.has_expired = False
        """Some of them have been let go."""

        self._came: deque[tuple[float, Held]] = deque()
        self._parts: dict[Location, Part] = {}  # Objects that are not whole
        self._groups: dict[int, LiveGroup] = {}
        self._gaps = Gaps()

    # -- what comes ------------------------------------------------------------------------------

    def open(self, feed: Feed, source: int, now: float) -> None:
        """A source has opened a stream of a Subgroup."""
        group = self._group(feed.group_id, now)
        group.open_streams += 1
        lane = self._lane_of(group, feed)
        lane.feeds.append(feed)
        lane.openers.add(source)

    def began(self, feed: Feed, event: ObjectBegan, now: float) -> None:
        """An Object has begun on a stream of a Subgroup."""
        self.changed_at = now
        previous, feed.last = feed.last, event.location.object
        feed.leave()
        if feed.waiting or not self._place(feed, event, previous):
            feed.waiting.append(Waiting(event, previous))
        else:
            self._moved(feed)

    def began_past(self, feed: Feed, event: ObjectBegan, now: float) -> None:
        """An Object has begun on the stream of a fill or a fetch."""
        self.changed_at = now
        location, largest = event.location, self._local.largest
        feed.leave()
        feed.group_id, feed.last = location.group, location.object
        held = self._held(location)
        if held is not None:
            self._enter(feed, held, event)
        elif self._awaited.coverage[location] is Knowledge.COMPLETE:
            pass  # it was said not to exist, and is not to come back to life
        elif event.subgroup_id is None or largest is None or location > largest:
            self._awaited.coverage.settle(location, location, Knowledge.UNKNOWN)
        elif self._is_past(location):
            self._store(feed, event)
        else:
            feed.subgroup_id = event.subgroup_id
            self._group(location.group, now).idle_since = now
            if not self._place(feed, event, None):
                # Others are further back, and will bring it after what comes before it.
                self._awaited.coverage.settle(location, location, Knowledge.UNKNOWN)
        self._moved(feed)
        if location.group in self._groups:
            self.review([location.group])

    def add(self, feed: Feed, data: Payload) -> None:
        """Octets of the Object that began last on a stream have come."""
        if not feed.waiting:
            feed.add(data)
            self._moved(feed)
            return
        waiting = feed.waiting[-1]
        waiting.parts.append(data)
        waiting.have += len(data)
        lane = self._groups[feed.group_id].lanes[feed.subgroup_id]
        if lane.octets_waiting > MAX_WAITING:
            self._go_on_at_any_rate(lane)

    def close(self, feed: Feed, code: StreamErrorCode | int | None, now: float) -> None:
        """A stream of a Subgroup is over: by FIN if ``code`` is None, else by a reset."""
        feed.is_over, feed.code = True, code
        if code is not None and feed.waiting and not feed.waiting[-1].is_whole:
            feed.waiting.pop()
        group = self._groups.get(feed.group_id)
        if group is None:
            feed.leave()
            return
        group.open_streams -= 1
        lane = group.lanes[feed.subgroup_id]
        lane.moved_at = group.idle_since = now
        if code is not None and lane.last <= (-1 if feed.last is None else feed.last):
            lane.reset_code = code
        self._go_on(lane)
        ends = code is None and feed.opened is not None and feed.opened.end_of_group
        if ends and not lane.is_broken and lane.last >= 0:
            first, last = Location(feed.group_id, lane.last + 1), Location(feed.group_id, MAX_VI64)
            self._awaited.coverage.settle(first, last, Knowledge.COMPLETE)
            self._local.coverage_changed()

    def close_past(self, feeds: Iterable[Feed], *, complete: bool) -> None:
        """The streams of a fill or a fetch, which is not awaited any more, are over."""
        for feed in feeds:
            feed.leave()
        for part in list(self._parts.values()):  # also of others, whose rest was to come on these
            self._drop_if_lost(part, StreamErrorCode.INTERNAL_ERROR)
        self.review(is_lost=not complete)

    def review(self, group_ids: Iterable[int] | None = None, *, is_lost: bool = False) -> None:
        """Look again at what waits for a fill or fetch, which has got further, is over or lost."""
        for group_id in tuple(self._groups if group_ids is None else group_ids):
            group = self._groups.get(group_id)
            for lane in tuple(group.lanes.values()) if group is not None else ():
                if lane.has_waiting:
                    self._go_on(lane)
                if not lane.is_whole or (is_lost and not lane.feeds):
                    self._cut_if_lost(lane, group_id, StreamErrorCode.INTERNAL_ERROR)

    def holds_all(self, first: Location, last: Location) -> bool:
        """Whether every Location of a range has an Object that is held."""
        if first.group != last.group:
            return False
        count = last.object - first.object + 1
        if count > _MAX_BETWEEN:
            return False
        held = self._local.objects_from(first.group, first.object, count)
        return len(held) == count and held[-1][1].object_id == last.object

    # -- what cannot come any more ---------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Settle what has not come for so long that it will not."""
        due = now - QUIET_S
        for group_id, group in list(self._groups.items()):
            if not group.open_streams and group.idle_since <= due and self._is_quiet(group_id):
                self._close_group(group_id, self._groups.pop(group_id))
                continue
            for lane in group.lanes.values():
                if lane.moved_at <= due and (lane.has_waiting or not lane.is_whole):
                    # A source that was to open a stream of it has not.
                    self._go_on(lane, patient=False)
                    self._cut_if_lost(lane, group_id, StreamErrorCode.INTERNAL_ERROR, patient=False)
        for first, last in self._gaps.settled(now, self._may_still_come):
            self._awaited.settle(first, last, Knowledge.COMPLETE)
            self._local.coverage_changed()

    def expire(self, born_before: float) -> None:
        """Let go of what began to come before a time, unless it has yet to be sent."""
        old: list[Held] = []
        while self._came and self._came[0][0] < born_before:
            old.append(self._came.popleft()[1])
        if old:
            stay = self._local.let_go(old)
            self.has_expired |= len(stay) < len(old)
            self._came.extendleft((born_before, held) for held in reversed(stay))

    def forget_waiting(self) -> None:
        """Nobody is left: whoever comes next brings what waits, after what comes before it."""
        for group in self._groups.values():
            for lane in group.lanes.values():
                lane.forget_waiting()

    def stop(
        self, *, well: bool = False, code: StreamErrorCode = StreamErrorCode.INTERNAL_ERROR
    ) -> None:
        """Nothing is live any more.

        Args:
            well: The Track has ended, and what has come of a Subgroup is all of it.
            code: What streams are reset with.
        """
        for group_id, group in self._groups.items():
            for lane in group.lanes.values():
                if well and not lane.is_broken:
                    lane.close()
                self._cut(lane, group_id, code)
        self._groups.clear()
        self._gaps.clear()

    def drop_parts(self, code: StreamErrorCode) -> None:
        """Let go of every Object of the past that is not whole."""
        for part in list(self._parts.values()):
            self._drop(part, code)

    # -- inside: where an Object goes ------------------------------------------------------------

    def _is_past(self, location: Location) -> bool:
        local = self._local
        return local.ended is not None or (self.past is not None and location <= self.past)

    def _moved(self, feed: Feed) -> None:
        """A stream has got further: if an Object is whole by that, what waits for it may go on."""
        part = feed.part
        if part is None or not part.obj.is_whole:
            return
        self._parts.pop(part.obj.location, None)
        group = self._groups.get(part.home.group_id)
        lane = group.lanes.get(part.home.subgroup_id) if group is not None else None
        if lane is not None and lane.has_waiting:
            self._go_on(lane)

    def _place(
        self, feed: Feed, event: ObjectBegan, previous: int | None, *, patient: bool = True
    ) -> bool:
        """Find the place of an Object that began; False: what comes before it has yet to come."""
        held = self._held(event.location)
        group = self._groups[feed.group_id]
        if held is not None:
            self._enter(feed, held, event)
            return True
        if self._is_past(event.location):
            self._store(feed, event)
            return True
        lane = self._lane_of(group, feed)
        if event.location.object < lane.last:
            self._store(feed, event)  # too late to be live, in its place
            return True
        if not self._follows(lane, feed, event.location, previous):
            if self._may_come(lane, event.location, besides=feed, patient=patient):
                return False
            self._skip(lane)
        self._append(lane, feed, event, previous)
        return True

    def _skip(self, lane: Lane) -> None:
        """What comes next in a Subgroup is not what follows."""
        if lane.subgroup is not None:
            lane.has_gap = True
            self._cut(lane, lane.subgroup.group_id, _code_of(lane))

    def _cut(self, lane: Lane, group_id: int, code: StreamErrorCode | int) -> None:
        if not lane.is_whole:
            self._parts.pop(Location(group_id, lane.last), None)
        lane.cut(code)

    def _append(self, lane: Lane, feed: Feed, event: ObjectBegan, previous: int | None) -> None:
        if lane.subgroup is None:
            opened = feed.opened
            lane.begin(
                self._local.open_subgroup(
                    feed.group_id,
                    feed.subgroup_id,
                    priority=event.publisher_priority,
                    holds_end_of_group=opened is not None and opened.end_of_group,
                    has_properties=opened is None or opened.has_properties,
                    first_object=opened is not None and opened.first_object and previous is None,
                )
            )
        lane.moved_at = self.changed_at
        highest = self._local.largest
        self._enter(feed, lane.append(event), None)
        self._note_end(event)
        self._note_gap(event, previous)
        if highest is not None and event.location < highest:
            self._local.coverage_changed()

    def _lane_of(self, group: LiveGroup, feed: Feed) -> Lane:
        lane = group.lanes.get(feed.subgroup_id)
        if lane is None:
            pieces = self._local.pieces_of(feed.group_id, feed.subgroup_id)
            lane = group.lanes[feed.subgroup_id] = Lane(pieces)
        return lane

    def _follows(self, lane: Lane, feed: Feed, location: Location, previous: int | None) -> bool:
        """Whether an Object is known to be the next one of its Subgroup, and can be."""
        if not lane.is_whole:
            return False
        first = lane.last + 1
        if location.object == first or previous == lane.last:
            return True
        if previous is None and first == 0 and feed.opened is not None and feed.opened.first_object:
            return True
        start, end = Location(location.group, first), before(location)
        return all(
            knowledge is Knowledge.COMPLETE or self.holds_all(at, upto)
            for at, upto, knowledge in self._awaited.coverage.runs(start, end)
        )

    def _may_come(self, lane: Lane, until: Location, *, besides: Feed, patient: bool) -> bool:
        """Whether something that comes before an Object is still on its way."""
        if patient and self._may_open(lane, until):
            return True
        first = lane.last + 1
        if not lane.is_whole:
            first = lane.last
            part = self._parts.get(Location(until.group, first))
            if part is not None and part.feeds:
                return True
        if lane.may_get(until.object - 1, besides=besides):
            return True
        start = Location(until.group, max(first, 0))
        if self.past is not None:
            start = max(start, self.past.next())
        return start < until and self._awaited.may_bring(start, before(until))

    def _may_open(self, lane: Lane, location: Location) -> bool:
        """Whether a source is left that brings an Object and has opened no stream for it yet."""
        return any(
            live_from <= location and number not in lane.openers
            for number, live_from in self._awaited.live.items()
        )

    def _store(self, feed: Feed, event: ObjectBegan) -> None:
        assert event.subgroup_id is not None, "a datagram is not stored"
        if event.status is not ObjectStatus.NORMAL:
            self._note_end(event)
            return
        stored = self._local.store_subgroup(
            event.location.group, event.subgroup_id, priority=event.publisher_priority
        )
        obj = stored.begin(event.location.object, event.length, properties=event.properties)
        self._enter(feed, Part(stored, obj), None)

    def _enter(self, feed: Feed, part: Part, event: ObjectBegan | None) -> None:
        """Have a stream be inside an Object; ``event`` says how it shows one that is held."""
        obj = part.obj
        location = obj.location
        if event is not None and not (
            obj.status is event.status
            and obj.length == event.length
            and part.home.priority == event.publisher_priority
            and (event.subgroup_id is None or part.home.subgroup_id == event.subgroup_id)
            and tuple(obj.properties) == tuple(event.properties)
        ):
            raise MalformedTrack(f"two versions of Object {location}")
        if not obj.is_whole:
            self._parts[location] = part
        if event is None and self.may_expire:
            self._came.append((self.changed_at, (part.home, obj)))
        feed.enter(part)

    def _note_end(self, event: ObjectBegan) -> None:
        """Note what an Object that is a status says of what comes after it."""
        if event.status is not ObjectStatus.NORMAL:
            is_last = event.status is ObjectStatus.END_OF_TRACK
            end = LAST if is_last else Location(event.location.group, MAX_VI64)
            self._awaited.coverage.settle(event.location, end, Knowledge.COMPLETE)
            self._local.coverage_changed()

    def _note_gap(self, event: ObjectBegan, previous: int | None) -> None:
        """Note what an Object shows of the Locations just before it.

        Its publisher may say that they do not exist; else that shows in time, if they are of other
        Subgroups that do not come.
        """
        location = event.location
        gap = find_property(event.properties, PropertyType.PRIOR_OBJECT_ID_GAP)
        if isinstance(gap, int) and 0 < gap <= location.object:
            first = Location(location.group, location.object - gap)
            self._awaited.coverage.settle(first, before(location), Knowledge.COMPLETE)
            self._local.coverage_changed()
        elif previous is not None and previous + 1 < location.object:
            first = Location(location.group, previous + 1)
            self._gaps.add(first, before(location), self.changed_at)

    def _may_still_come(self, first: Location, last: Location) -> bool:
        """Whether streams are open that may bring something of a gap."""
        if first.group != last.group or last.object == MAX_VI64:
            return any(first.group <= group_id <= last.group for group_id in self._groups)
        group = self._groups.get(first.group)
        return group is not None and any(
            not feed.is_over and (feed.last is None or feed.last <= last.object)
            for lane in group.lanes.values()
            for feed in lane.feeds
        )

    # -- inside: what ends -----------------------------------------------------------------------

    def _go_on(self, lane: Lane, *, patient: bool = True) -> None:
        """Place what waits and can be placed now, and be done with streams that are over.

        Args:
            lane: Its Subgroup.
            patient: Wait for sources that have not opened a stream of it yet.
        """
        again = True
        while again:
            again = False
            for feed in tuple(lane.feeds):
                while feed.waiting:
                    waiting = feed.waiting[0]
                    if not self._place(feed, waiting.event, waiting.previous, patient=patient):
                        break
                    self._placed(feed)
                    again = True
                if feed.is_over and not feed.waiting:
                    lane.feeds.remove(feed)
                    self._finish(lane, feed)
                    again = True

    def _go_on_at_any_rate(self, lane: Lane) -> None:
        """Too much waits: go on with the nearest Object, without what comes before it."""
        feed = min(
            (feed for feed in lane.feeds if feed.waiting),
            key=lambda feed: feed.waiting[0].event.location,
        )
        waiting = feed.waiting[0]
        self._skip(lane)
        self._append(lane, feed, waiting.event, waiting.previous)
        self._placed(feed)
        self._go_on(lane)

    def _placed(self, feed: Feed) -> None:
        """The first Object that waits on a stream has its place: so has what came of it."""
        waiting = feed.waiting.pop(0)
        for data in waiting.parts:
            feed.add(data)
        if feed.part is not None and feed.part.obj.is_whole:
            self._parts.pop(waiting.event.location, None)

    def _finish(self, lane: Lane, feed: Feed) -> None:
        """A stream is over, and all that it brought has its place."""
        self._leave_part(feed, feed.code)
        if feed.code is not None:
            self._cut_if_lost(lane, feed.group_id, feed.code)
        elif lane.is_whole and lane.last <= (-1 if feed.last is None else feed.last):
            lane.close()

    def _leave_part(self, feed: Feed, code: StreamErrorCode | int | None) -> None:
        """A stream brings nothing more of the Object that it was inside."""
        part = feed.part
        feed.leave()
        if part is not None:
            self._drop_if_lost(part, StreamErrorCode.INTERNAL_ERROR if code is None else code)

    def _cut_if_lost(
        self, lane: Lane, group_id: int, code: StreamErrorCode | int, *, patient: bool = True
    ) -> None:
        """Cut a Subgroup if nobody is left who brings what comes next in it."""
        if not lane.is_whole:
            part = self._parts.get(Location(group_id, lane.last))
            if part is not None and self._is_lost(part, lane, patient=patient):
                self._cut(lane, group_id, code)
        elif not lane.feeds:
            first, last = Location(group_id, lane.last + 1), Location(group_id, MAX_VI64)
            if not (self._awaited.may_bring(first, last) or self._may_open(lane, last)):
                lane.cut(code)

    def _is_lost(self, part: Part, lane: Lane | None, *, patient: bool = True) -> bool:
        """Whether nobody is left who brings the rest of an Object."""
        location = part.obj.location
        if part.feeds or self._awaited.may_bring(location, location):
            return False
        if lane is None:
            return True
        return not (lane.may_get(location.object) or (patient and self._may_open(lane, location)))

    def _drop_if_lost(self, part: Part, code: StreamErrorCode | int) -> None:
        stored = isinstance(part.home, StoredSubgroup)
        if stored and not part.obj.is_whole and self._is_lost(part, None):
            self._drop(part, code)

    def _drop(self, part: Part, code: StreamErrorCode | int) -> None:
        if isinstance(part.home, StoredSubgroup):
            location = part.obj.location
            self._parts.pop(location, None)
            part.home.give_up(part.obj, code)
            self._awaited.settle(location, location, Knowledge.UNKNOWN)

    # -- inside: Groups --------------------------------------------------------------------------

    def _group(self, group_id: int, now: float) -> LiveGroup:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = LiveGroup(idle_since=now)
            # Also the rest of the last Group, which may have been over when a source was joined:
            # then no stream of it comes that could show where it ends.
            largest = self._local.largest
            first = FIRST if largest is None else largest.next()
            if first < Location(group_id, 0):
                self._gaps.add(first, before(Location(group_id, 0)), now)
        return group

    def _is_quiet(self, group_id: int) -> bool:
        """Whether nothing of a Group is on its way or waits for something that is."""
        start, end = Location(group_id, 0), Location(group_id, MAX_VI64)
        return not self._awaited.may_bring(start, end)

    def _close_group(self, group_id: int, group: LiveGroup) -> None:
        for lane in group.lanes.values():
            if group.is_broken or not lane.is_whole:
                self._cut(lane, group_id, _code_of(lane))
            else:
                lane.close()
        largest, end = self._local.largest, Location(group_id, MAX_VI64)
        if largest is not None and largest.group == group_id:
            end = largest
        knowledge = Knowledge.UNKNOWN if group.is_broken else Knowledge.COMPLETE
        self._awaited.settle(Location(group_id, 0), end, knowledge)
        self._local.coverage_changed()

    def _held(self, location: Location) -> Part | None:
        part = self._parts.get(location)
        if part is not None:
            return part
        for subgroup, obj in self._local.objects_from(location.group, location.object, 1):
            if obj.object_id == location.object:
                return Part(subgroup, obj)
        return None


def _code_of(lane: Lane) -> StreamErrorCode | int:
    """Return what a Subgroup is to be reset with that does not go on."""
    return StreamErrorCode.INTERNAL_ERROR if lane.reset_code is None else lane.reset_code
