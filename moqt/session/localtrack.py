"""LocalTrack: the Objects of a Track that this program publishes.

It is shared: any number of sessions may serve subscriptions and fetches from one LocalTrack, each
with cursors of its own, and no payload is copied for any of them. It knows nothing of sessions,
streams or priorities between subscribers; it tells its watchers that something changed, and they
look for themselves.

What is never changed here: an Object that was published, the end of a Group, the end of the Track.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moqt.codepoints import MAX_VI64, GroupOrder, ObjectStatus, PublishDoneCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.wire.pairs import Pairs, encode_pairs

Payload = bytes | memoryview
Watcher = Callable[[], None]


class ByteBudget:
    """Counts payload octets held by any number of Tracks, against a limit.

    Nothing here blocks: a publisher that wants to wait for room registers with ``when_room``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[Watcher] = []

    @property
    def has_room(self) -> bool:
        """Whether an Object may be added now. The last one added may pass the limit."""
        return self.used < self.limit

    def take(self, octets: int) -> None:
        """Count octets that are held from now on."""
        self.used += octets

    def give_back(self, octets: int) -> None:
        """Count octets that are held no longer, and tell those who wait once there is room."""
        self.used -= octets
        if self.has_room and self._waiting:
            waiting, self._waiting = self._waiting, []
            for watcher in waiting:
                watcher()

    def when_room(self, watcher: Watcher) -> None:
        """Have ``watcher`` called once, the next time octets are given back and there is room."""
        self._waiting.append(watcher)


class LocalObject:
    """One published Object. ``parts`` together are the payload, as far as it has been given."""

    __slots__ = ("dropped", "have", "length", "object_id", "parts", "properties", "status")

    def __init__(
        self,
        object_id: int,
        length: int,
        parts: list[Payload],
        status: ObjectStatus,
        properties: Pairs,
    ) -> None:
        self.object_id = object_id
        self.length = length
        self.parts = parts
        self.have = sum(map(len, parts))
        self.status = status
        self.properties = properties
        self.dropped = False

    @property
    def is_whole(self) -> bool:
        """Whether every octet of the payload has been given."""
        return self.have == self.length


class LocalSubgroup:
    """The Objects of one Subgroup, in ascending order. Made by :meth:`LocalTrack.open_subgroup`."""

    __slots__ = (
        "_track",
        "closed",
        "freed",
        "group_id",
        "has_properties",
        "holds_end_of_group",
        "objects",
        "priority",
        "subgroup_id",
    )

    def __init__(
        self,
        track: "LocalTrack",
        group_id: int,
        subgroup_id: int,
        priority: int,
        *,
        holds_end_of_group: bool,
        has_properties: bool,
    ) -> None:
        self._track = track
        self.group_id = group_id
        self.subgroup_id = subgroup_id
        self.priority = priority
        self.holds_end_of_group = holds_end_of_group
        self.has_properties = has_properties
        self.objects: list[LocalObject] = []
        self.closed = False
        self.freed = 0
        """Objects from the front whose payload was let go."""

    def publish(
        self,
        object_id: int,
        *payload: Payload,
        status: ObjectStatus = ObjectStatus.NORMAL,
        properties: Pairs = (),
    ) -> None:
        """Publish one whole Object.

        Args:
            object_id: Larger than every Object ID published in this Subgroup.
            payload: The payload, in any number of pieces, which are kept and not copied: they
                must never change afterwards.
            status: Anything but NORMAL goes with an empty payload and marks an end.
            properties: Object Properties; only if the Subgroup was opened ``has_properties``.

        Raises:
            UsageError: If the order, the Subgroup's state or the status forbids it. Nothing
                was published.
        """
        length = sum(map(len, payload))
        if status is not ObjectStatus.NORMAL and (length or properties):
            raise UsageError(f"an Object with status {status.name} has no payload or properties")
        self._append(object_id, length, list(payload), status, properties)

    def begin(self, object_id: int, length: int, *, properties: Pairs = ()) -> LocalObject:
        """Publish an Object whose payload of ``length`` octets is still being made.

        Subscribers receive what there is; :meth:`extend` adds the rest.
        """
        return self._append(object_id, length, [], ObjectStatus.NORMAL, properties)

    def extend(self, obj: LocalObject, payload: Payload) -> None:
        """Add octets to an Object that was begun.

        Raises:
            UsageError: If that is more than the length it was begun with, or the Track ended.
        """
        self._track.check_open()
        if obj.have + len(payload) > obj.length:
            raise UsageError(f"{obj.have + len(payload)} octets for an Object of {obj.length}")
        obj.parts.append(payload)
        obj.have += len(payload)
        self._track.changed(len(payload))

    def close(self) -> None:
        """No further Object will be published in this Subgroup.

        Raises:
            UsageError: If its last Object is not whole.
        """
        if self.objects and not self.objects[-1].is_whole:
            raise UsageError(f"Object {self.objects[-1].object_id} is not whole")
        self.closed = True
        self._track.changed(0)

    def _append(
        self,
        object_id: int,
        length: int,
        parts: list[Payload],
        status: ObjectStatus,
        properties: Pairs,
    ) -> LocalObject:
        if self.closed:
            raise UsageError(f"subgroup {self.subgroup_id} of group {self.group_id} is closed")
        if self.objects:
            last = self.objects[-1]
            if object_id <= last.object_id:
                raise UsageError(f"Object {object_id} after Object {last.object_id}")
            if not last.is_whole:
                raise UsageError(f"Object {object_id} while Object {last.object_id} is not whole")
        if properties and not self.has_properties:
            raise UsageError("the Subgroup was opened without properties")
        _check_id("Object", object_id)
        encode_pairs(properties)  # what cannot be sent is refused here, not by every session
        self._track.check_location(Location(self.group_id, object_id), status)
        obj = LocalObject(object_id, length, parts, status, properties)
        self.objects.append(obj)
        self._track.published(self, obj)
        return obj


def _check_id(what: str, number: int) -> None:
    if not 0 <= number <= MAX_VI64:
        raise UsageError(f"{what} ID {number} is not 0 to 2**64 - 1")


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

        self._retain = retain
        self._budget = budget
        self._octets = 0
        self._recent: list[LocalSubgroup] = []  # in order of opening; the front may be let go
        self._groups: dict[int, list[LocalSubgroup]] = {}
        self._group_ends: dict[int, int] = {}  # of Groups that are held
        self._watchers: dict[Watcher, None] = {}
        self._readers: dict[TrackReader, None] = {}

    @property
    def octets(self) -> int:
        """Payload octets held."""
        return self._octets

    # -- publishing ------------------------------------------------------------------------------

    def open_subgroup(
        self,
        group_id: int,
        subgroup_id: int = 0,
        *,
        priority: int = 128,
        holds_end_of_group: bool = False,
        has_properties: bool = False,
    ) -> LocalSubgroup:
        """Begin a Subgroup; each is carried by a stream of its own.

        Args:
            group_id: Its Group.
            subgroup_id: Its Subgroup ID, used once in the Group.
            priority: Publisher Priority of its Objects, 0 to 255, smaller is more urgent.
            holds_end_of_group: It will hold the Group's largest Object (END_OF_GROUP).
            has_properties: Its Objects may have Object Properties.

        Raises:
            UsageError: If the Track has ended, the Subgroup exists, or a number is none that can
                be sent.
        """
        self.check_open()
        _check_id("Group", group_id)
        _check_id("Subgroup", subgroup_id)
        if not 0 <= priority <= 255:
            raise UsageError(f"publisher priority {priority}, expected 0 to 255")
        siblings = self._groups.setdefault(group_id, [])
        if any(other.subgroup_id == subgroup_id for other in siblings):
            raise UsageError(f"subgroup {subgroup_id} of group {group_id} exists")
        subgroup = LocalSubgroup(
            self,
            group_id,
            subgroup_id,
            priority,
            holds_end_of_group=holds_end_of_group,
            has_properties=has_properties,
        )
        siblings.append(subgroup)
        self._recent.append(subgroup)
        self.opened += 1
        return subgroup

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
                self._free(subgroup, len(subgroup.objects))

    # -- reading ---------------------------------------------------------------------------------

    def subgroups_since(self, position: int) -> Iterator[tuple[int, LocalSubgroup]]:
        """Yield the Subgroups from ``position`` on, with their positions, in order of opening."""
        base = self.opened - len(self._recent)
        for index in range(max(position - base, 0), len(self._recent)):
            yield base + index, self._recent[index]

    def group_ids(self, first: int, last: int) -> Sequence[int]:
        """Return the IDs of the Groups held from ``first`` to ``last``, ascending."""
        return sorted(group for group in self._groups if first <= group <= last)

    def objects_of(self, group_id: int) -> Iterable[tuple[LocalSubgroup, LocalObject]]:
        """Return the Objects of a Group as they stand now, ascending, Subgroups merged."""
        subgroups = self._groups.get(group_id, [])
        if len(subgroups) == 1:
            return [(subgroups[0], obj) for obj in subgroups[0].objects]
        merged = [(subgroup, obj) for subgroup in subgroups for obj in subgroup.objects]
        merged.sort(key=lambda pair: pair[1].object_id)
        return merged

    def last_of(self, group_id: int) -> Location | None:
        """Return the Location of the last Object of a Group, statuses included."""
        ids = [s.objects[-1].object_id for s in self._groups.get(group_id, []) if s.objects]
        return Location(group_id, max(ids)) if ids else None

    def last_object(self) -> Location | None:
        """Return the Location of the last real Object, ends not counted."""
        for group_id in sorted(self._groups, reverse=True):
            for _, obj in reversed(list(self.objects_of(group_id))):
                if obj.status is ObjectStatus.NORMAL:
                    return Location(group_id, obj.object_id)
        return None

    # -- watching --------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher`` called after every change, until :meth:`unwatch`."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling ``watcher``."""
        self._watchers.pop(watcher, None)

    def attach(self, reader: TrackReader) -> None:
        """Keep Objects for ``reader`` until it has sent them."""
        self._readers[reader] = None

    def detach(self, reader: TrackReader) -> None:
        """Keep nothing for ``reader`` any more."""
        if self._readers.pop(reader, self) is None:
            self.trim()

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
        last = self.largest if status is ObjectStatus.END_OF_TRACK else None
        if status is ObjectStatus.END_OF_GROUP:
            last = self.last_of(location.group)
        if last is not None and location <= last:
            raise UsageError(f"{status.name} at {location}, not after {last}")

    def may_have_lost(self, lowest: Location) -> bool:
        """Whether there may have been Objects from ``lowest`` on that were let go."""
        return self.lost_before is not None and lowest < self.lost_before

    def published(self, subgroup: LocalSubgroup, obj: LocalObject) -> None:
        """Note a new Object of ``subgroup``."""
        location = Location(subgroup.group_id, obj.object_id)
        if self.largest is None or location > self.largest:
            self.largest = location
        if obj.status is ObjectStatus.END_OF_TRACK:
            self.end_of_track = True
        if obj.status is ObjectStatus.END_OF_GROUP:
            self._group_ends[subgroup.group_id] = obj.object_id
        self.changed(obj.have)

    def changed(self, octets: int) -> None:
        """Count new payload octets and tell the watchers."""
        self._octets += octets
        if self._budget is not None and octets:
            self._budget.take(octets)
        if not self._retain and not self._readers:
            self.trim()
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
            octets += obj.have
            obj.parts, obj.dropped = [], True
        subgroup.freed = max(subgroup.freed, upto)
        if octets:
            self._octets -= octets
            if self._budget is not None:
                self._budget.give_back(octets)

    def _forget(self, subgroup: LocalSubgroup) -> None:
        siblings = self._groups[subgroup.group_id]
        siblings.remove(subgroup)
        if not siblings:
            del self._groups[subgroup.group_id]
            self._group_ends.pop(subgroup.group_id, None)
        if subgroup.objects:
            after = Location(subgroup.group_id, subgroup.objects[-1].object_id + 1)
            if self.lost_before is None or after > self.lost_before:
                self.lost_before = after
