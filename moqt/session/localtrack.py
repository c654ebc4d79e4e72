"""LocalTrack: the Objects of a Track that this program publishes.

It is shared: any number of sessions may serve subscriptions and fetches from one LocalTrack, each
with cursors of its own, and no payload is copied for any of them. It knows nothing of sessions,
streams or priorities between subscribers; it tells its watchers that something changed, and they
look for themselves.

What is never changed here: an Object that was published, the end of a Group, the end of the Track.

Whoever passes a Track on has it in pieces. What one stream of its publisher carries is one
:class:`~moqt.session.localobjects.LocalSubgroup`, also where a Subgroup goes on after a reset; what
came for the past, in any order, is in a :class:`~moqt.session.localobjects.StoredSubgroup`; and
what is known of the rest is the Track's ``coverage``.
"""

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moqt.codepoints import GroupOrder, ObjectStatus, PublishDoneCode, StreamErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.budget import ByteBudget
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge, Run, before
from moqt.session.localobjects import (
    Held,
    LocalObject,
    LocalSubgroup,
    StoredSubgroup,
    check_id,
    check_priority,
    object_id_of,
)
from moqt.wire.pairs import Pairs, encode_pairs

Watcher = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TrackEnd:
    """Why no further Object will be published."""

    code: PublishDoneCode
    reason: str


class TrackReader(Protocol):
    """A subscription, as a Track that does not keep its past sees it."""

    def needs_from(self, subgroup: LocalSubgroup, position: int) -> int:
        """Return the index of the first Object of ``subgroup`` that is still to be sent.

        ``position`` counts the Subgroups of the Track in order of their opening.
        """

    @property
    def is_running(self) -> bool:
        """Whether it is not paused, or wants to go on."""


class LocalTrack:
    """A Track published by this program (MOQT, "Tracks").

    Args:
        name: Its Full Track Name.
        properties: Track Properties, told in SUBSCRIBE_OK, FETCH_OK and TRACK_STATUS answers.
        group_order: The order in which Groups are sent to a subscriber that does not say.
        retain: Keep every Object, so that a subscriber may fill or fetch from the start. Without
            it an Object is let go once it was sent to every subscriber, and a fill is told that
            what is gone is unknown.
        budget: Where the payload octets held are counted.
        coverage: What is known of Locations where no Object is held; None: everything, but for
            what was let go. After a change of it, call :meth:`coverage_changed`.

    Raises:
        UsageError: If ``properties`` cannot be sent.
    """

    def __init__(
        self,
        name: FullTrackName,
        *,
        properties: Pairs = (),
        group_order: GroupOrder = GroupOrder.ASCENDING,
        retain: bool = True,
        budget: ByteBudget | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        encode_pairs(properties)
        self.name = name
        self.properties = properties
        self.group_order = group_order
        self.largest: Location | None = None
        """Greatest Location published, from the first octet of an Object on."""

        self.end_of_track: bool = False
        """Whether an End of Track Object has been published: ``largest`` is its Location."""

        self.ended: TrackEnd | None = None
        self.opened = 0
        """Subgroups opened so far, those let go included."""

        self.lost_before: Location | None = None
        """With ``retain=False``: everything below was let go."""

        self.coverage = coverage
        self.revision = 0
        """Grows when something changes other than at the end of what is there."""

        self._retain = retain
        self._budget = budget
        self._octets = 0
        self._recent: list[LocalSubgroup] = []  # in order of opening; the front may be let go
        self._groups: dict[int, list[LocalSubgroup]] = {}
        self._group_ids: list[int] = []  # the keys of _groups, ascending
        self._stored: dict[tuple[int, int], StoredSubgroup] = {}  # by Group ID and Subgroup ID
        self._stored_groups: set[int] = set()
        self._told: Location | None = None  # the Largest as somebody else knows it
        self._group_ends: dict[int, int] = {}  # of Groups that are held
        self._watchers: dict[Watcher, None] = {}
        self._waiting: dict[Watcher, None] = {}
        self._readers: dict[TrackReader, None] = {}
        self._on_wanted: Watcher | None = None

    @property
    def octets(self) -> int:
        """Payload octets held."""
        return self._octets

    @property
    def is_malformed(self) -> bool:
        """Whether it ended because it broke its own rules: nothing more is sent of it."""
        return self.ended is not None and self.ended.code is PublishDoneCode.MALFORMED_TRACK

    # -- publishing ------------------------------------------------------------------------------

    def open_subgroup(
        self,
        group_id: int,
        subgroup_id: int = 0,
        *,
        priority: int = 128,
        holds_end_of_group: bool = False,
        has_properties: bool = False,
        first_object: bool = True,
    ) -> LocalSubgroup:
        """Begin a Subgroup; each is carried by a stream of its own.

        Args:
            group_id: Its Group.
            subgroup_id: Its Subgroup ID, used once in the Group.
            priority: Publisher Priority of its Objects, 0 to 255, smaller is more urgent.
            holds_end_of_group: It will hold the Group's largest Object (END_OF_GROUP).
            has_properties: Its Objects may have Object Properties.
            first_object: Its first Object here is the first ever published in the Subgroup.

        Raises:
            UsageError: If the Track has ended, the Subgroup exists, or a number is none that can
                be sent.
        """
        self.check_open()
        check_id("Group", group_id)
        check_id("Subgroup", subgroup_id)
        if not 0 <= priority <= 255:
            raise UsageError(f"publisher priority {priority}, expected 0 to 255")
        for other in self._siblings(group_id, subgroup_id):
            if not isinstance(other, StoredSubgroup):
                raise UsageError(f"subgroup {subgroup_id} of group {group_id} exists")
            check_priority(other, priority)
        subgroup = LocalSubgroup(
            self,
            group_id,
            subgroup_id,
            priority,
            holds_end_of_group=holds_end_of_group,
            has_properties=has_properties,
            first_object=first_object,
        )
        self._enter(subgroup)
        self._recent.append(subgroup)
        self.opened += 1
        return subgroup

    def resume(self, subgroup: LocalSubgroup, object_id: int) -> LocalSubgroup:
        """Go on with a Subgroup that was cut; see :meth:`LocalSubgroup.resume`."""
        self.check_open()
        group_id, subgroup_id = subgroup.group_id, subgroup.subgroup_id
        live = self.pieces_of(group_id, subgroup_id)
        if subgroup.cut_code is None or (live and live[-1] is not subgroup):
            raise UsageError(f"subgroup {subgroup_id} of group {group_id} goes on elsewhere")
        last = max((other.objects[-1].object_id for other in live if other.objects), default=-1)
        if object_id <= last:
            raise UsageError(f"Object {object_id} after Object {last}")
        following = LocalSubgroup(
            self,
            group_id,
            subgroup_id,
            subgroup.priority,
            holds_end_of_group=subgroup.holds_end_of_group,
            has_properties=subgroup.has_properties,
            first_object=False,
            floor=object_id,
        )
        self._enter(following)
        self._recent.append(following)
        self.opened += 1
        return following

    def store_subgroup(
        self, group_id: int, subgroup_id: int = 0, *, priority: int = 128
    ) -> StoredSubgroup:
        """Return where Objects of a Subgroup go that came as part of the past.

        Raises:
            UsageError: If the Subgroup has another priority, or a number is none that can be sent.
        """
        if (stored := self._stored.get((group_id, subgroup_id))) is not None:
            check_priority(stored, priority)
            return stored
        check_id("Group", group_id)
        check_id("Subgroup", subgroup_id)
        if not 0 <= priority <= 255:
            raise UsageError(f"publisher priority {priority}, expected 0 to 255")
        for other in self._siblings(group_id, subgroup_id):
            check_priority(other, priority)
        stored = StoredSubgroup(
            self, group_id, subgroup_id, priority, holds_end_of_group=False, has_properties=True
        )
        self._stored[group_id, subgroup_id] = stored
        self._stored_groups.add(group_id)
        self._enter(stored)
        return stored

    def pieces_of(self, group_id: int, subgroup_id: int) -> list[LocalSubgroup]:
        """Return a Subgroup in the pieces that it was opened and resumed in, in that order."""
        return [
            subgroup
            for subgroup in self._siblings(group_id, subgroup_id)
            if not isinstance(subgroup, StoredSubgroup)
        ]

    def raise_largest(self, location: Location) -> None:
        """Note a Largest Object that somebody else knows of; a smaller one changes nothing."""
        if self._told is None or location > self._told:
            self._told = location
        if self.largest is None or location > self.largest:
            self.largest = location
            self.changed(0)

    def coverage_changed(self) -> None:
        """Tell the watchers that more is known of the Track, or less."""
        self.revision += 1
        self.changed(0)

    def _siblings(self, group_id: int, subgroup_id: int) -> list[LocalSubgroup]:
        return [s for s in self._groups.get(group_id, ()) if s.subgroup_id == subgroup_id]

    def _enter(self, subgroup: LocalSubgroup) -> None:
        group_id = subgroup.group_id
        if group_id not in self._groups:
            self._groups[group_id] = []
            if self._group_ids and group_id < self._group_ids[-1]:
                insort(self._group_ids, group_id)
            else:
                self._group_ids.append(group_id)
        self._groups[group_id].append(subgroup)

    def end(self, code: PublishDoneCode = PublishDoneCode.TRACK_ENDED, reason: str = "") -> None:
        """No further Object will be published. The second call changes nothing.

        Subscribers get PUBLISH_DONE once they have been sent everything; those that come later
        still get SUBSCRIBE_OK, their fill, and then PUBLISH_DONE.

        A Subgroup that is still open was cut off: its streams are reset.
        """
        if self.ended is None:
            self.ended = TrackEnd(code, reason)
            self.changed(0)

    def drop(self) -> None:
        """Let go of every Object, in order to forget the Track. It must have ended."""
        for subgroups in self._groups.values():
            for subgroup in subgroups:
                if isinstance(subgroup, StoredSubgroup):
                    subgroup.freed = 0  # it was not filled from the front
                self._free(subgroup, len(subgroup.objects))

    def let_go(self, objects: Sequence[Held]) -> list[Held]:
        """Let go of the payloads of Objects that may not be kept any longer.

        Fills and fetches are told that they are unknown. Return those that stay for now: that are
        not whole, or that a subscription has still to be sent.
        """
        places = {subgroup: position for position, subgroup in self.subgroups_since(0)}
        stay: list[Held] = []
        octets = 0
        for subgroup, obj in objects:
            position = places.get(subgroup)
            index = bisect_left(subgroup.objects, obj.object_id, key=object_id_of)
            if not obj.dropped and (
                not obj.is_whole
                or (
                    position is not None
                    and any(r.needs_from(subgroup, position) <= index for r in self._readers)
                )
            ):
                stay.append((subgroup, obj))
            else:
                octets += self._empty(obj)
        self._give_back(octets)
        return stay

    # -- reading ---------------------------------------------------------------------------------

    def subgroups_since(self, position: int) -> Iterator[tuple[int, LocalSubgroup]]:
        """Yield the Subgroups from ``position`` on, with their positions, in order of opening."""
        base = self.opened - len(self._recent)
        for index in range(max(position - base, 0), len(self._recent)):
            yield base + index, self._recent[index]

    def group_ids(self, first: int, last: int) -> Sequence[int]:
        """Return the IDs of the Groups held from ``first`` to ``last``, ascending."""
        ids = self._group_ids
        return ids[bisect_left(ids, first) : bisect_right(ids, last)]

    def next_group(self, group_id: int, *, descending: bool) -> int | None:
        """Return the first Group held in an order, from ``group_id`` on; None: no more."""
        ids = self._group_ids
        if descending:
            at = bisect_right(ids, group_id) - 1
            return ids[at] if at >= 0 else None
        at = bisect_left(ids, group_id)
        return ids[at] if at < len(ids) else None

    def objects_from(
        self, group_id: int, object_id: int, limit: int
    ) -> Sequence[tuple[LocalSubgroup, LocalObject]]:
        """Return the first ``limit`` Objects of a Group from ``object_id`` on, ascending."""
        merged: list[tuple[LocalSubgroup, LocalObject]] = []
        subgroups = self._groups.get(group_id, [])
        for subgroup in subgroups:
            objects = subgroup.objects
            if not objects or objects[-1].object_id < object_id:
                continue
            at = bisect_left(objects, object_id, key=object_id_of) if object_id else 0
            merged += [(subgroup, obj) for obj in objects[at : at + limit]]
        if len(subgroups) > 1:
            merged.sort(key=lambda pair: pair[1].object_id)
        return merged[:limit]

    def run_at(self, location: Location) -> Run:
        """Return what is known of a Location where no Object is held, and of its neighbours."""
        first, last, knowledge = FIRST, LAST, Knowledge.COMPLETE
        if self.coverage is not None:
            first, last, knowledge = self.coverage.run_at(location)
        lost = self.lost_before
        if lost is None or knowledge is not Knowledge.COMPLETE:
            return first, last, knowledge
        if location < lost:  # what was known of it was let go
            return first, min(last, before(lost)), Knowledge.UNKNOWN
        return max(first, lost), last, knowledge

    def objects_of(self, group_id: int) -> Sequence[tuple[LocalSubgroup, LocalObject]]:
        """Return the Objects of a Group as they stand now, ascending, Subgroups merged."""
        return self.objects_from(group_id, 0, sys.maxsize)

    def last_of(self, group_id: int) -> Location | None:
        """Return the Location of the last Object of a Group, statuses included."""
        ids = [s.objects[-1].object_id for s in self._groups.get(group_id, []) if s.objects]
        return Location(group_id, max(ids)) if ids else None

    def last_object(self) -> Location | None:
        """Return the Location of the last real Object, ends not counted."""
        for group_id in reversed(self._group_ids):
            for _, obj in reversed(self.objects_of(group_id)):
                if obj.status is ObjectStatus.NORMAL:
                    return obj.location
        return None

    # -- watching --------------------------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether anybody is told of the next change."""
        return bool(self._watchers or self._waiting)

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher`` called after every change, until :meth:`unwatch`."""
        self._watchers[watcher] = None

    def when_changed(self, watcher: Watcher) -> None:
        """Have ``watcher`` called once, after the next change.

        For who looks for itself what there is, and asks again before it does: a reader is told
        once of all the pieces that come before it has a look.
        """
        self._waiting[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling ``watcher``."""
        self._watchers.pop(watcher, None)
        self._waiting.pop(watcher, None)

    def attach(self, reader: TrackReader) -> None:
        """Keep Objects for ``reader`` until it has sent them."""
        self._readers[reader] = None
        if reader.is_running:
            self.want()

    def detach(self, reader: TrackReader) -> None:
        """Keep nothing for ``reader`` any more."""
        if self._readers.pop(reader, self) is None:
            self.trim()

    # -- sleeping --------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether a subscription to it runs, or wants to go on."""
        return any(reader.is_running for reader in self._readers)

    @property
    def is_asleep(self) -> bool:
        """Whether its publisher was told to pause; see :meth:`sleep`."""
        return self._on_wanted is not None and self.ended is None

    def sleep(self, on_wanted: Watcher) -> None:
        """Nothing will be published until somebody wants it: for who passes a Track on.

        ``on_wanted`` is called each time a subscription begins or wants to go on. An update by
        which it does is answered after :meth:`wake`, since up to where there are Objects is not
        known before that.
        """
        self._on_wanted = on_wanted

    def wake(self) -> None:
        """The Largest Object is known again, and more is published. Also when awake."""
        if self._on_wanted is not None:
            self._on_wanted = None
            self.changed(0)

    def want(self) -> None:
        """A subscription wants what is published from now on (called by readers)."""
        if self.is_asleep and self._on_wanted is not None:
            self._on_wanted()

    # -- called by Subgroups and by readers ------------------------------------------------------

    def check_open(self) -> None:
        """Raise :exc:`UsageError` if the Track has ended."""
        if self.ended is not None:
            raise UsageError(f"the track ended: {self.ended.code.name}")

    def check_location(self, location: Location, status: ObjectStatus) -> None:
        """Raise :exc:`UsageError` if an Object of this status must not exist at ``location``."""
        self.check_open()
        if self.end_of_track and self.largest is not None and location >= self.largest:
            raise UsageError(f"{location} is past the End of Track at {self.largest}")
        end = self._group_ends.get(location.group)
        if end is not None and location.object >= end:
            raise UsageError(f"{location} is past the end of its Group at Object {end}")
        if self._stored_groups and location.group in self._stored_groups:
            self._check_free(location)
        last = self.largest if status is ObjectStatus.END_OF_TRACK else None
        if status is ObjectStatus.END_OF_GROUP:
            last = self.last_of(location.group)
        if last is not None and location <= last:
            raise UsageError(f"{status.name} at {location}, not after {last}")

    def check_past(self, location: Location) -> None:
        """Raise :exc:`UsageError` if no Object can be stored at ``location``."""
        if self.largest is None or location > self.largest:
            raise UsageError(f"{location} is past the Largest Object, {self.largest}")
        if self.end_of_track and location == self.largest:
            raise UsageError(f"{location} is past the End of Track at {self.largest}")
        end = self._group_ends.get(location.group)
        if end is not None and location.object >= end:
            raise UsageError(f"{location} is past the end of its Group at Object {end}")
        self._check_free(location)

    def _check_free(self, location: Location) -> None:
        for _, obj in self.objects_from(location.group, location.object, 1):
            if obj.object_id == location.object:
                raise UsageError(f"there is an Object at {location}")

    def stored(self, obj: LocalObject) -> None:
        """Note an Object of the past."""
        self.revision += 1
        self.changed(obj.have)

    def discard(self, obj: LocalObject, code: StreamErrorCode | int) -> int:
        """Forget an Object that is not whole, gone from its Subgroup; return its octets."""
        obj.dropped, obj.cut_code, obj.parts = True, code, []
        self.revision += 1
        location = obj.location
        if self.coverage is not None and self.coverage[location] is Knowledge.COMPLETE:
            self.coverage.mark(location, location, Knowledge.UNKNOWN)
        if self.largest == location:
            # Half an Object is neither kept nor known (MOQT, "Closing Subgroup Streams").
            self.largest = self._greatest_known()
        return obj.have

    def _greatest_known(self) -> Location | None:
        known = [at for at in (self._told, self._let_go()) if at is not None]
        for group_id in reversed(self._group_ids):
            if (last := self.last_of(group_id)) is not None:
                known.append(last)
                break
        return max(known, default=None)

    def _let_go(self) -> Location | None:
        return None if self.lost_before is None else before(self.lost_before)

    def published(self, obj: LocalObject) -> None:
        """Note a new Object."""
        location = obj.location
        if self.largest is None or location > self.largest:
            self.largest = location
        if obj.status is ObjectStatus.END_OF_TRACK:
            self.end_of_track = True
        if obj.status is ObjectStatus.END_OF_GROUP:
            self._group_ends[location.group] = obj.object_id
        self.changed(obj.have)

    def changed(self, octets: int) -> None:
        """Count new payload octets, or those that are gone, and tell the watchers."""
        self._octets += octets
        if self._budget is not None and octets:
            if octets > 0:
                self._budget.take(octets)
            else:
                self._budget.give_back(-octets)
        if not self._retain and not self._readers:
            self.trim()
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for watcher in waiting:
                watcher()
        for watcher in tuple(self._watchers):
            watcher()

    def trim(self) -> None:
        """Let go of what every reader has sent. Nothing to do for a Track that keeps its past."""
        if self._retain:
            return
        base = self.opened - len(self._recent)
        gone = 0
        for index, subgroup in enumerate(self._recent):
            keep = len(subgroup.objects)
            if keep and not subgroup.objects[-1].is_whole:
                keep -= 1
            for reader in self._readers:
                keep = min(keep, reader.needs_from(subgroup, base + index))
            self._free(subgroup, keep)
            if index == gone and subgroup.closed and subgroup.freed == len(subgroup.objects):
                gone += 1
        for subgroup in self._recent[:gone]:
            self._forget(subgroup)
        del self._recent[:gone]

    def _free(self, subgroup: LocalSubgroup, upto: int) -> None:
        octets = 0
        for obj in subgroup.objects[subgroup.freed : upto]:
            octets += self._empty(obj)
        subgroup.freed = max(subgroup.freed, upto)
        self._give_back(octets)

    def _empty(self, obj: LocalObject) -> int:
        """Let go of a payload, if that has not been done; return its octets."""
        octets = 0 if obj.dropped else obj.have
        obj.parts, obj.dropped = [], True
        return octets

    def _give_back(self, octets: int) -> None:
        self._octets -= octets
        if self._budget is not None and octets:
            self._budget.give_back(octets)

    def _forget(self, subgroup: LocalSubgroup) -> None:
        siblings = self._groups[subgroup.group_id]
        siblings.remove(subgroup)
        self.revision += 1
        if not siblings:
            del self._groups[subgroup.group_id]
            del self._group_ids[bisect_left(self._group_ids, subgroup.group_id)]
            self._group_ends.pop(subgroup.group_id, None)
        if subgroup.objects:
            after = Location(subgroup.group_id, subgroup.objects[-1].object_id + 1)
            if self.lost_before is None or after > self.lost_before:
                self.lost_before = after
