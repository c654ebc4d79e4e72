"""Which publication to try next (KVCS Section 5.1). Pure.

Publications appear and go while a retrieval is under way. One that was tried is not tried again:
its Objects are not mixed with those of another, unless :mod:`kvcs.consumer.joining` says that they
may be (KVCS Section 5.4).
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvcs.consumer.selection import Wish, plan_segment
from kvcs.errors import NotFound
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.layout import Layout
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName


class Candidates:
    """The publications that are announced, and which of them were tried."""

    def __init__(self) -> None:
        self._announced: dict[PublicationName, int] = {}  # to blocks, in order of appearance
        self._tried: set[PublicationName] = set()

    def appeared(self, name: PublicationName, blocks: int) -> bool:
        """Note an announcement; return whether the publication is a new one.

        Args:
            name: The publication.
            blocks: Blocks of the prefix it was found under.
        """
        is_new = name not in self._announced and name not in self._tried
        self._announced.pop(name, None)  # announced again: it counts as the newest
        self._announced[name] = blocks
        return is_new

    def gone(self, name: PublicationName) -> None:
        """Note that a publication was withdrawn. The others remain."""
        self._announced.pop(name, None)

    def tried(self, name: PublicationName) -> None:
        """Note that a publication need not be tried again."""
        self._tried.add(name)

    def best(self, count: int, *, shorter: bool = False) -> list[PublicationName]:
        """Return those worth a look: untried, of the longest prefix, the newest first.

        Args:
            count: How many at most.
            shorter: Whether those of shorter prefixes follow.
        """
        open_ = [(n, b) for n, b in reversed(self._announced.items()) if n not in self._tried]
        open_.sort(key=lambda pair: -pair[1])
        longest = open_[0][1] if open_ else 0
        return [name for name, blocks in open_ if shorter or blocks == longest][:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is known of a publication when one of several is chosen."""

    manifest: Manifest
    """The newest version that came."""

    version: int
    """Its Group ID."""

    blocks: int | None
    """Blocks of the prefix that it was found under; None: the tokens are not known."""

    wish: Wish
    codecs: CodecRegistry

    octets_per_s: float | None = None
    """How fast finished Objects came over the connection it would come over; None: not known."""

    left_s: float | None = None
    """Seconds until everything must be there; None: any time will do."""


class Rank(NamedTuple):
    """A key by which the best offer is the greatest."""

    is_offered: bool
    """What is wanted of the segments listed so far is offered in a codec that is wanted."""

    is_in_time: bool
    """What is wanted can come before the deadline, at the speed that was measured."""

    worth: float
    """Of those that can: blocks of the prompt, the longest prefix saves most. Of those that
    cannot: how late they would be, the least first, since their first layers are of use."""

    is_complete: bool
    """Nothing has to be waited for."""

    reach: int
    """How far its segments reach into the context."""

    held: int
    """Wanted Groups that are finished and attested."""

    version: int


def rank(offer: Offer) -> Rank:
    """Say how good an offer is.

    A codec that compresses is not credited for it: how much, only its Objects tell.
    """
    manifest, wish = offer.manifest, offer.wish
    reach = manifest.segments[-1].end_block if manifest.segments else 0
    held, is_offered = 0, True
    for entry in manifest.segments:
        try:
            plan = plan_segment(
                entry, manifest.compat, wish, offer.codecs, offer.blocks, manifest.codecs
            )
        except NotFound:
            is_offered = False
            continue
        if plan is not None:
            held += sum(
                len(
                    range(plan.layers.start, min(_listed(manifest, entry, track), plan.layers.stop))
                )
                for track in plan.tracks
            )
    blocks = reach if offer.blocks is None else offer.blocks
    first = 0
    if wish.blocks is not None:
        first, blocks = wish.blocks.start, min(blocks, wish.blocks.stop)
    late_s = 0.0
    if offer.octets_per_s is not None and offer.left_s is not None:
        layers = manifest.layers if wish.layers is None else len(wish.layers)
        octets = max(blocks - first, 0) * layers * Layout.of(manifest.compat).layer_octets
        late_s = max(octets / offer.octets_per_s - offer.left_s, 0.0)
    return Rank(
        is_offered=is_offered,
        is_in_time=late_s == 0,
        worth=-late_s if late_s else blocks,
        is_complete=manifest.complete,
        reach=reach,
        held=held,
        version=offer.version,
    )


def _listed(manifest: Manifest, entry: SegmentEntry, track: DataTrack) -> int:
    """Return of how many Groups digests are listed, here or in an earlier version."""
    return manifest.layers if entry.digests_in is not None else entry.groups(track)


#: Octets from which on a speed has been measured, and not the start of a connection.
_MEASURED_OCTETS = 1 << 20


class Pace:
    """How fast finished Objects come over the connections of a peer, several requests at a time.

    What is still produced comes as fast as that goes, and tells nothing. Times are arguments,
    seconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._running = 0
        self._began = (0.0, 0)
        self._seconds = 0.0
        self._octets = 0

    def begin(self, now: float, octets: int) -> None:
        """A request is on its way; ``octets`` have come so far."""
        if not self._running:
            self._began = now, octets
        self._running += 1

    def end(self, now: float, octets: int) -> None:
        """It has ended."""
        self._running -= 1
        if not self._running:
            began_at, before = self._began
            self._seconds += now - began_at
            self._octets += octets - before

    @property
    def octets_per_s(self) -> float | None:
        """Octets of Data in a second; None: too few have come to tell."""
        if self._octets < _MEASURED_OCTETS or not self._seconds:
            return None
        return self._octets / self._seconds
