"""Objects that are held of a Track, and the Subgroups that they are in.

Whoever adds to them calls these; what a change means for the Track, and who is told of it, is
decided by :class:`~moqt.session.localtrack.LocalTrack`.
"""

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from moqt.codepoints import MAX_VI64, ObjectStatus, StreamErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.wire.pairs import Pairs, encode_pairs

if TYPE_CHECKING:  # a Track makes these, and these call it back
    from moqt.session.localtrack import LocalTrack

Payload = bytes | memoryview

#: The parts of each Object whose payload is elsewhere. Nothing is added to it: it is replaced.
_AWAY: list[Payload] = []


class LocalObject:
    """One published Object. ``parts`` together are the payload, as far as it has been given.

    Octets are added at the end of the list, until the Object is whole: then another list, of one
    part, may take its place. Who reads it meanwhile keeps the list that it began with.
    """

    __slots__ = (
        "cut_code", "dropped", "have", "length", "location", "object_id", "parts", "properties",
        "status",
    )  # fmt: skip

    def __init__(
        self,
        location: Location,
        length: int,
        parts: list[Payload],
        status: ObjectStatus,
        properties: Pairs,
    ) -> None:
        self.location = location
        self.object_id = location.object
        self.length = length
        self.parts = parts
        self.have = length if parts else 0
        self.status = status
        self.properties = properties
        self.dropped = False
        """Its payload was let go, or its rest will not come."""

        self.cut_code: StreamErrorCode | int | None = None
        """What the streams that carry a part of it are reset with, if its rest will not come."""

    @property
    def is_whole(self) -> bool:
        """Whether every octet of the payload has been given."""
        return self.have == self.length

    def at_hand(self) -> bool:
        """Whether a fill or a fetch can begin to send it. Asked by each that comes to it."""
        return True


class DeferredObject(LocalObject):
    """A whole Object of the past whose payload lies elsewhere, on a disk perhaps.

    Made by :meth:`StoredSubgroup.defer`. Fills and fetches wait for its payload before they say a
    word of it, so that one which turns out to be damaged is told as unknown and costs no stream.
    """

    __slots__ = ("_wanted",)

    def __init__(
        self,
        location: Location,
        length: int,
        properties: Pairs,
        wanted: "Callable[[DeferredObject], None]",
    ) -> None:
        super().__init__(location, length, _AWAY, ObjectStatus.NORMAL, properties)
        self.have = length
        self._wanted = wanted

    def at_hand(self) -> bool:
        """Whether its payload is here; whoever brings it learns that it is wanted."""
        self._wanted(self)
        return bool(self.parts) or not self.length

    def bring(self, payload: Payload) -> None:
        """Take the payload. Call the Track's ``changed`` once all that came is in its place.

        Raises:
            UsageError: If it does not have the length that was told.
        """
        if len(payload) != self.length:
            raise UsageError(f"{len(payload)} octets for an Object of {self.length}")
        self.parts = [payload]

    def put_away(self) -> None:
        """Let go of the payload until it is wanted again. Streams that carry it go on."""
        self.parts = _AWAY

    def lose(self) -> None:
        """The payload cannot be had: it is told as unknown from now on.

        Call the Track's ``coverage_changed`` afterwards.
        """
        self.parts, self.dropped = _AWAY, True


class LocalSubgroup:
    """The Objects of one Subgroup, in ascending order. Made by :meth:`LocalTrack.open_subgroup`.

    One that was cut goes on as another of the same IDs; see :meth:`resume`. Objects are only ever
    added at the end, so that a cursor into ``objects`` stays where it is.
    """

    __slots__ = (
        "_floor",
        "_track",
        "closed",
        "cut_code",
        "first_object",
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
        first_object: bool = True,
        floor: int = 0,
    ) -> None:
        self._track = track
        self._floor = floor
        self.group_id = group_id
        self.subgroup_id = subgroup_id
        self.priority = priority
        self.holds_end_of_group = holds_end_of_group
        self.has_properties = has_properties
        self.first_object = first_object
        """Its first Object is the first that was ever published in the Subgroup."""

        self.objects: list[LocalObject] = []
        self.closed = False
        self.cut_code: StreamErrorCode | int | None = None
        """What its streams are reset with, once it was cut."""

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
            UsageError: If that is more than the length it was begun with, or the Object was cut,
                or the Track ended.
        """
        self._track.check_open()
        self._extend(obj, payload)

    def _extend(self, obj: LocalObject, payload: Payload) -> None:
        if obj.cut_code is not None:
            raise UsageError(f"Object {obj.object_id} was given up")
        if obj.have + len(payload) > obj.length:
            raise UsageError(f"{obj.have + len(payload)} octets for an Object of {obj.length}")
        obj.parts.append(payload)
        obj.have += len(payload)
        if obj.have == obj.length and len(obj.parts) > 1:
            obj.parts = [b"".join(obj.parts)]  # readers to come hand it over at once
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

    def cut(self, code: StreamErrorCode | int) -> None:
        """The rest of this Subgroup will not come, at least not in this place.

        What is whole is still sent; then its streams are reset with ``code``. An Object that is
        not whole is let go, does not count as the Largest any more, and its streams are reset
        where they are, fetch streams too; in the Track's coverage its Location is UNKNOWN then,
        unless it is PENDING. What else was missed is for the caller to mark. Nothing happens if
        the Subgroup is closed.
        """
        if self.closed:
            return
        self.closed, self.cut_code = True, code
        octets = 0
        if self.objects and not self.objects[-1].is_whole:
            octets = self._track.discard(self.objects.pop(), code)
        self._track.changed(-octets)

    def resume(self, object_id: int) -> "LocalSubgroup":
        """Go on with a Subgroup that was cut, from ``object_id`` on: on new streams.

        Raises:
            UsageError: If it was not cut, has been resumed, or ``object_id`` is not past what is
                there; if the Track has ended.
        """
        return self._track.resume(self, object_id)

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
        if object_id < self._floor:
            raise UsageError(f"Object {object_id} in a Subgroup that goes on from {self._floor}")
        if self.objects:
            last = self.objects[-1]
            if object_id <= last.object_id:
                raise UsageError(f"Object {object_id} after Object {last.object_id}")
            if not last.is_whole:
                raise UsageError(f"Object {object_id} while Object {last.object_id} is not whole")
        if properties and not self.has_properties:
            raise UsageError("the Subgroup was opened without properties")
        check_id("Object", object_id)
        if properties:
            encode_pairs(properties)  # what cannot be sent is refused here, not by every session
        location = Location(self.group_id, object_id)
        self._track.check_location(location, status)
        obj = LocalObject(location, length, parts, status, properties)
        self.objects.append(obj)
        self._track.published(obj)
        return obj


class StoredSubgroup(LocalSubgroup):
    """Objects of the past of one Subgroup. Made by :meth:`LocalTrack.store_subgroup`.

    They may come in any order and below what is live, any number of them unfinished at once; only
    fills and fetches are served with them. It stays open for as long as the Track is.
    """

    __slots__ = ()

    def extend(self, obj: LocalObject, payload: Payload) -> None:
        """Add octets to an Object that was begun; also when the Track has ended.

        Raises:
            UsageError: If that is more than the length it was begun with, or it was given up.
        """
        self._extend(obj, payload)

    def close(self) -> None:
        """Refused: more of the past may come at any time."""
        raise UsageError("a StoredSubgroup is not closed")

    def cut(self, code: StreamErrorCode | int) -> None:
        """Refused: one Object at a time is given up, see :meth:`give_up`."""
        raise UsageError("a StoredSubgroup is not cut")

    def give_up(self, obj: LocalObject, code: StreamErrorCode | int) -> None:
        """The rest of an Object that was begun will not come: fetch streams that carry a part of
        it are reset with ``code``.
        """  # noqa: D205  # one sentence
        if obj.is_whole or obj.dropped:
            return
        self.objects.remove(obj)
        self._track.changed(-self._track.discard(obj, code))

    def defer(
        self,
        object_id: int,
        length: int,
        wanted: Callable[[DeferredObject], None],
        *,
        properties: Pairs = (),
    ) -> DeferredObject:
        """Store an Object whose payload of ``length`` octets lies elsewhere.

        Args:
            object_id: As for :meth:`publish`.
            length: Octets of its payload. They count as held by the Track from now on.
            wanted: Called whenever a fill or a fetch comes to the Object, also if its payload is
                here already. It must not block, and bring nothing before it has returned.
            properties: Object Properties.

        Raises:
            UsageError: As :meth:`publish` does.
        """
        check_id("Object", object_id)
        if properties:
            encode_pairs(properties)
        location = Location(self.group_id, object_id)
        self._track.check_past(location)
        obj = DeferredObject(location, length, properties, wanted)
        self._insert(obj)
        return obj

    def _append(
        self,
        object_id: int,
        length: int,
        parts: list[Payload],
        status: ObjectStatus,
        properties: Pairs,
    ) -> LocalObject:
        if status is not ObjectStatus.NORMAL:
            raise UsageError(f"{status.name} is not stored: it is known by what is absent")
        check_id("Object", object_id)
        if properties:
            encode_pairs(properties)
        location = Location(self.group_id, object_id)
        self._track.check_past(location)
        obj = LocalObject(location, length, parts, status, properties)
        self._insert(obj)
        return obj

    def _insert(self, obj: LocalObject) -> None:
        if self.objects and obj.object_id < self.objects[-1].object_id:
            insort(self.objects, obj, key=object_id_of)
        else:
            self.objects.append(obj)
        self._track.stored(obj)


def object_id_of(obj: LocalObject) -> int:
    """Return its Object ID, by which Objects are found."""
    return obj.object_id


def check_id(what: str, number: int) -> None:
    """Raise :exc:`UsageError` if the ID of ``what`` cannot be put on the wire."""
    if not 0 <= number <= MAX_VI64:
        raise UsageError(f"{what} ID {number} is not 0 to 2**64 - 1")


def check_priority(subgroup: LocalSubgroup, priority: int) -> None:
    """Raise :exc:`UsageError` if a Subgroup has another Publisher Priority."""
    if subgroup.priority != priority:
        raise UsageError(
            f"subgroup {subgroup.subgroup_id} of group {subgroup.group_id} "
            f"has priority {subgroup.priority}, not {priority}"
        )


#: An Object that is held, and where.
Held = tuple[LocalSubgroup, LocalObject]
