"""One stream of a source, and an Object that several of them bring at once.

An Object is held once, however many streams bring it: whoever is furthest adds to it, and what the
others bring is compared with that. So it does not matter which of them breaks off, or stalls.
"""

from dataclasses import dataclass, field

from moqt.codepoints import StreamErrorCode
from moqt.session.events import ObjectBegan, SubgroupOpened
from moqt.session.localobjects import LocalObject, LocalSubgroup, Payload


class MalformedTrack(Exception):
    """Two sources, or one at two times, contradict each other: nobody can say which is right."""


@dataclass(slots=True, eq=False)
class Part:
    """An Object that is held, whole or not yet, and the streams that are inside it."""

    home: LocalSubgroup
    obj: LocalObject
    feeds: "set[Feed]" = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Waiting:
    """An Object whose place in its Subgroup is not known yet, as far as it has come."""

    event: ObjectBegan
    previous: int | None
    """Object ID of the one before it on its stream."""

    parts: list[Payload] = field(default_factory=list)
    have: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of its payload is here."""
        return self.have == self.event.length


@dataclass(slots=True, eq=False)
class Feed:
    """One stream of a source."""

    group_id: int
    subgroup_id: int
    opened: SubgroupOpened | None = None
    """None for the stream of a fill or a fetch."""

    last: int | None = None
    """Object ID of the last Object on it."""

    waiting: list[Waiting] = field(default_factory=list)
    """Objects of it that have no place yet, in their order; what follows them waits as well."""

    is_over: bool = False
    """It has ended, though what it brought may still be waiting."""

    code: StreamErrorCode | int | None = None
    """What it was reset with; None: by FIN, or not at all."""

    part: Part | None = None
    _have: int = 0
    _index: int = 0  # where in the held parts the next octets are to be compared
    _offset: int = 0

    def enter(self, part: Part) -> None:
        """From now on its octets are those of an Object, from the first on."""
        self.leave()
        self.part = part
        self._have = self._index = self._offset = 0
        part.feeds.add(self)

    def leave(self) -> None:
        """Be done with the Object that it is inside."""
        if self.part is not None:
            self.part.feeds.discard(self)
            self.part = None

    def add(self, data: Payload) -> None:
        """Take the next octets of the Object that it is inside.

        Raises:
            MalformedTrack: If others brought something else.
        """
        part = self.part
        if part is None or part.obj.dropped:
            return  # nobody asks any more
        known = min(part.obj.have - self._have, len(data))
        if known:
            self._compare(part.obj, data[:known] if known < len(data) else data)
        self._have += len(data)
        if known < len(data):
            part.home.extend(part.obj, memoryview(data)[known:] if known else data)
            self._index, self._offset = len(part.obj.parts), 0

    def _compare(self, obj: LocalObject, data: Payload) -> None:
        at, parts = 0, obj.parts
        if self._index >= len(parts):  # it has become whole since, and one part
            self._index, self._offset = 0, self._have
        while at < len(data):
            held = parts[self._index]
            size = min(len(held) - self._offset, len(data) - at)
            if bytes(held[self._offset : self._offset + size]) != bytes(data[at : at + size]):
                raise MalformedTrack(f"two payloads for Object {obj.object_id}")
            at += size
            self._offset += size
            if self._offset == len(held):
                self._index, self._offset = self._index + 1, 0
