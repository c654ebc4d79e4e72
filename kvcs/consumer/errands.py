"""Errands: what a process that reads for a retrieval is told, and what it tells. Pure.

Values, and how they go through a socket: four octets of length and a value, as
:mod:`kvcs.consumer.passing` writes it. Both ends are this program, and no one else has the socket.
The scope's key is not among them: a manifest has been checked before the first errand, and what an
errand needs to know of it goes along. So does the key that opens the Objects of its track, and of
no other, where they are sealed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from kvcs.consumer import passing
from kvcs.consumer.failures import Failure
from kvcs.consumer.ranges import RangeSet
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.spreading import Rectangle
from kvcs.errors import Rejection
from kvcs.kvsp.descriptor import Descriptor
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.trust.sealing import TrackKey
from moqt.names import FullTrackName
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.token import AuthorizationToken

#: Octets in front of a value that say how long it is.
LENGTH_OCTETS = 4
#: Octets of a value at most. A report of 65,536 Objects, the most there can be, is a tenth of it.
MAX_OCTETS: Final = 64 << 20


class BadErrand(ValueError):
    """What came through the socket is no message of these; whoever sent it is not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What has to be known to examine the Objects of a track, and to place them."""

    track: DataTrack
    file: str
    """The tensor file that the sink shares."""

    descriptor: bytes
    """JSON."""

    first_block: int
    blocks: int
    """Of the segment."""

    position: int
    """Where in the file the segment's block 0 is, in blocks; may be below 0."""

    places: int
    """Blocks in the file."""

    missing: tuple[Rectangle, ...]
    """What is to be placed, each Object once."""

    max_data_octets: int

    key: TrackKey | None = None
    """Opens the Objects of the track; None: they are in clear."""

    def entry(self) -> SegmentEntry:
        """Return what the manifest says of the segment, as far as Objects are examined by it."""
        return SegmentEntry(
            segment=self.track.segment,
            first_block=self.first_block,
            blocks=self.blocks,
            block_keys_sha256=bytes(32),  # has been checked
            tracks=(self.track,),
        )

    def compat(self) -> Descriptor:
        """Return the manifest's descriptor."""
        return Descriptor.from_json(self.descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One request for a part of a track, each Object once."""

    track: FullTrackName
    past: LocationFilter
    """Which of the Objects that there are."""

    range_filters: tuple[RangeFilter, ...]
    is_live: bool = True
    """Whether what will be published is wanted as well: that is a SUBSCRIBE with a fill, and a
    FETCH if it is not."""

    timeout_s: float
    placing: Placing | None = None
    """None: whoever asks examines and places by itself."""


class Wanted:
    """What is still to be placed on an errand; each Object can be claimed once."""

    def __init__(self, missing: Iterable[Rectangle]) -> None:
        self._missing = tuple(missing)
        self._claimed: dict[int, RangeSet] = {}

    def __contains__(self, place: tuple[int, int]) -> bool:
        layer, block = place
        if not any(layer in part.layers and block in part.blocks for part in self._missing):
            return False
        claimed = self._claimed.get(layer)
        return claimed is None or block not in claimed

    def claim(self, layer: int, block: int) -> bool:
        """Take an Object out of what is wanted; return whether it was in."""
        if (layer, block) not in self:
            return False
        return self._claimed.setdefault(layer, RangeSet()).add(block)


@dataclass(frozen=True, slots=True)
class Shown:
    """Gives the tokens that a connection shows, as they were when it was to be made."""

    tokens: tuple[AuthorizationToken, ...] = ()

    def __call__(self) -> tuple[AuthorizationToken, ...]:
        """Return them."""
        return self.tokens


# -- to the process ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Make a connection."""

    spec: Any
    """The :class:`~kvcs.consumer.ways.ConnectionSpec`; its tokens are :class:`Shown`."""

    uri: str
    timeout_s: float
    settings: RetrievalSettings


@dataclass(frozen=True, slots=True)
class Run:
    """Run an errand over the connection."""

    number: int
    errand: Errand


@dataclass(frozen=True, slots=True)
class Stop:
    """Give an errand up: place nothing more, then say that it has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Give a sign of life."""


# -- from the process ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started."""


@dataclass(frozen=True, slots=True)
class Pong:
    """A sign of life of the process; what its connection gives is another matter."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """The connection stands."""

    max_ranges: int
    """Ranges of a filter that its peer takes."""


@dataclass(frozen=True, slots=True)
class NotDialled:
    """The connection could not be made."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Silent:
    """The connection's peer gives no sign of life, or (False) gives one again."""

    is_silent: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """The peer goes away: what was asked for comes, but nothing more can be asked for."""


@dataclass(frozen=True, slots=True)
class HungUp:
    """The connection is gone, and every errand has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The peer has accepted the request of an errand."""

    number: int


@dataclass(frozen=True, slots=True)
class Placed:
    """An Object passed its examination, and is in its place."""

    layer: int
    block: int
    digest: bytes
    octets: int


@dataclass(frozen=True, slots=True)
class Bad:
    """An Object did not pass."""

    layer: int
    block: int
    reason: Rejection
    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """An Object came that was not to be placed."""

    layer: int
    block: int


@dataclass(frozen=True, slots=True)
class Misplaced:
    """An Object could not be placed: the memory does not fit."""

    text: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The peer could not get a part of what was asked for in time."""


Report = Placed | Bad | Dropped | Misplaced | TimedOut


@dataclass(frozen=True, slots=True)
class Brought:
    """What became of Objects that came on an errand, in order."""

    number: int
    reports: tuple[Report, ...]


class How(Enum):
    """How an errand ended."""

    #: The subscription ended.
    DONE = auto()
    #: All that the peer has of what was asked for with FETCH has come.
    FETCHED = auto()
    #: The stream of a FETCH was reset.
    RESET = auto()
    #: The request was refused.
    REFUSED = auto()
    #: The request was not answered in time.
    UNANSWERED = auto()
    #: The connection was lost, or it does not take requests any more.
    LOST = auto()
    #: It was given up.
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Ended:
    """An errand is over: nothing more is placed on it."""

    number: int
    how: How
    code: int = 0
    """Of PUBLISH_DONE, REQUEST_ERROR or the reset."""

    reason: str = ""
    """For people."""


#: Everything that goes through the socket, in either direction.
Message = (
    Dial | Run | Stop | HangUp | Ping | Ready | Pong | Dialled | NotDialled | Silent | Leaving
    | HungUp | Accepted | Brought | Ended
)  # fmt: skip


def pack(value: object) -> bytes:
    """Return a value as it goes through the socket."""
    octets = passing.dumps(value)
    return len(octets).to_bytes(LENGTH_OCTETS, "big") + octets


def length_of(octets: bytes) -> int:
    """Return how many octets the value behind these has.

    Raises:
        BadErrand: If it has more than a message can have.
    """
    length = int.from_bytes(octets, "big")
    if length > MAX_OCTETS:
        raise BadErrand(f"a message of {length} octets, limit {MAX_OCTETS}")
    return length


def unpack(octets: bytes) -> Message:
    """Return the value, without the length in front of it.

    Raises:
        BadErrand: If it is none of the messages above.
    """
    try:
        value = passing.loads(octets)
    except passing.Unpassable as exc:
        raise BadErrand(f"no message: {exc}") from None
    if not isinstance(value, Message):
        raise BadErrand(f"a {type(value).__name__}, expected a message")
    return value
