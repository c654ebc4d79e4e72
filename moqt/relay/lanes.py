"""One Subgroup of a Track as a relay passes it on: the streams that bring it, and one that leaves.

An Object goes on an open stream only if it is known to be the next one of its Subgroup (MOQT,
"Closing Subgroup Streams"); else the stream is reset and another one opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moqt.codepoints import ObjectStatus, StreamErrorCode
from moqt.relay.feeds import Feed, MalformedTrack, Part
from moqt.session.events import ObjectBegan
from moqt.session.localobjects import LocalSubgroup


class Lane:
    """One Subgroup that is live: where it goes, and which streams bring it.

    Args:
        pieces: The Subgroup as it is held, in the pieces that its resets made of it; none if
            nothing of it has come.
    """

    def __init__(self, pieces: Iterable[LocalSubgroup] = ()) -> None:
        self._pieces = list(pieces)
        self.feeds: list[Feed] = []
        self.openers: set[int] = set()
        """Numbers of the sources that have opened a stream of it."""

        self.moved_at = 0.0
        """When something came of it last, or a stream of it ended."""

        self.has_gap = False
        """It went on with an Object that is not known to be the next one."""

        self.is_complete = False
        """A stream of it ended by FIN, and all that it brought is held."""

        self.reset_code = self._pieces[-1].cut_code if self._pieces else None
        """What a stream of it was reset with, if nothing has followed what it brought."""

    @property
    def subgroup(self) -> LocalSubgroup | None:
        """Where it goes on; None: it has not begun."""
        return self._pieces[-1] if self._pieces else None

    @property
    def is_open(self) -> bool:
        """Whether it has begun and goes on."""
        return bool(self._pieces) and not self._pieces[-1].closed

    @property
    def last(self) -> int:
        """Object ID of the last Object in it, whole or not; -1: there is none."""
        for piece in reversed(self._pieces):  # each goes on behind the one before
            if piece.objects:
                return piece.objects[-1].object_id
        return -1

    @property
    def is_whole(self) -> bool:
        """Whether every Object in it is."""
        objects = self._pieces[-1].objects if self._pieces else ()
        return not objects or objects[-1].is_whole

    @property
    def is_broken(self) -> bool:
        """Whether something of it was lost, or may have been."""
        return self.has_gap or (self.reset_code is not None and not self.is_complete)

    @property
    def has_waiting(self) -> bool:
        """Whether Objects of it wait for those before them."""
        return any(feed.waiting for feed in self.feeds)

    @property
    def octets_waiting(self) -> int:
        """Payload octets of Objects that wait."""
        return sum(waiting.have for feed in self.feeds for waiting in feed.waiting)

    def may_get(self, object_id: int, *, besides: Feed | None = None) -> bool:
        """Whether a stream is left that is not past an Object yet."""
        return any(
            (not feed.is_over and (feed.last is None or feed.last < object_id))
            or any(waiting.event.location.object <= object_id for waiting in feed.waiting)
            for feed in self.feeds
            if feed is not besides
        )

    def begin(self, subgroup: LocalSubgroup) -> None:
        """Begin with the Subgroup as it was opened."""
        self._pieces.append(subgroup)

    def append(self, event: ObjectBegan) -> Part:
        """Go on with an Object, on the stream that is open or, if that was cut, on another one.

        Raises:
            MalformedTrack: If the Subgroup was over before it.
            UsageError: If it cannot be what it is said to be.
        """
        subgroup = self._pieces[-1]
        if subgroup.priority != event.publisher_priority:
            raise MalformedTrack(f"two priorities for Object {event.location}")
        object_id = event.location.object
        if subgroup.closed:
            if subgroup.cut_code is None:
                raise MalformedTrack(f"Object {event.location} in a Subgroup that was over")
            subgroup = subgroup.resume(object_id)
            self._pieces.append(subgroup)
        self.reset_code = None
        if event.status is ObjectStatus.NORMAL:
            subgroup.begin(object_id, event.length, properties=event.properties)
        else:
            subgroup.publish(object_id, status=event.status)
        return Part(subgroup, subgroup.objects[-1])

    def cut(self, code: StreamErrorCode | int) -> None:
        """What comes next will not come, or not in its place."""
        if self.is_open:
            self.reset_code = code
            self._pieces[-1].cut(code)

    def forget_waiting(self) -> None:
        """Nobody is left who brings what comes before the Objects that wait."""
        for feed in self.feeds:
            if feed.waiting:
                feed.waiting.clear()
                feed.code = StreamErrorCode.INTERNAL_ERROR  # also after FIN: not all is held

    def close(self) -> None:
        """Nothing comes any more."""
        self.is_complete = True
        if self.is_open and self.is_whole:
            self._pieces[-1].close()


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A Group of which something is live."""

    lanes: dict[int, Lane] = field(default_factory=dict)
    open_streams: int = 0
    idle_since: float = 0.0

    @property
    def is_broken(self) -> bool:
        """Whether something of it was lost, or may have been."""
        return any(lane.is_broken for lane in self.lanes.values())
