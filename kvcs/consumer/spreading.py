"""Which Objects are asked for over which connection, and with which filters. Pure.

A layer can be used when all of it is there, and layer 0 is needed first. So every layer is cut, and
not the model: each connection is asked for some consecutive blocks of all layers, and brings its
part of layer 0 first. On the wire that is the request of KVCS Section 5.2 with an OBJECTID_FILTER
of one range (Section 5.3), which holds for what is past and for what is live alike. A peer that
takes no such filter is asked for whole tracks, one on this connection, the next on another.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcs.consumer.events import Gap
from kvcs.consumer.selection import SegmentPlan
from kvcs.profile.naming import DataTrack
from moqt.codepoints import ParameterType
from moqt.location import Location
from moqt.wire.filters import LocationFilter, RangeFilter


@dataclass(frozen=True, slots=True)
class Share:
    """Objects that are asked for with one request."""

    track: DataTrack

    blocks: range | None
    """Object IDs, in each wanted layer; None: whatever the track brings."""

    def __str__(self) -> str:
        if self.blocks is None:
            return str(self.track)
        return f"{self.track} blocks {self.blocks.start}-{self.blocks.stop - 1}"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Objects of one track: some layers, and in each the same blocks."""

    layers: range
    blocks: range


class Dealer:
    """Deals out what is wanted, to as many connections as there are.

    As long as their number stays the same, none gets more than one block more than another, of
    however many tracks; where tracks are not cut, than one track more.
    """

    def __init__(self) -> None:
        self._turn = 0

    def deal(
        self, track: DataTrack, blocks: range, ways: int, *, may_cut: bool
    ) -> list[tuple[int, Share]]:
        """Say who is asked for which blocks of a track.

        Args:
            track: The track.
            blocks: Object IDs that nobody is asked for yet, at least one.
            ways: Connections, at least one.
            may_cut: Whether the peer can be asked for some of the blocks only.

        Returns:
            Shares, each with the number of its connection, from 0. They are the blocks, each
            once, in ascending order, and no connection has more than one of them.
        """
        pieces = ways if may_cut else 1
        each, more = divmod(len(blocks), pieces)
        dealt: list[tuple[int, Share]] = []
        start = blocks.start
        for piece in range(pieces):
            stop = start + each + (piece < more)
            if start < stop:
                number = (self._turn + piece) % ways
                dealt.append((number, Share(track, range(start, stop))))
            start = stop
        # Whoever comes after those that got one more is the first to get more of the next.
        self._turn = (self._turn + (more if may_cut else 1)) % ways
        return dealt


def not_asked_for(blocks: range, shares: Iterable[Share]) -> Iterator[range]:
    """Yield what none of the shares has of the blocks of their track, in ascending order."""
    at = blocks.start
    asked = [blocks if share.blocks is None else share.blocks for share in shares]
    for run in sorted(asked, key=lambda run: run.start):
        if at < min(run.start, blocks.stop):
            yield range(at, min(run.start, blocks.stop))
        at = max(at, run.stop)
    if at < blocks.stop:
        yield range(at, blocks.stop)


def missing_of(share: Share, gaps: Iterable[Gap]) -> Iterator[Rectangle]:
    """Yield what is missing of a share, in the order of the gaps of its track."""
    for gap in gaps:
        start, stop = gap.first_block, gap.last_block + 1
        if share.blocks is not None:
            start, stop = max(start, share.blocks.start), min(stop, share.blocks.stop)
        if start < stop:
            yield Rectangle(range(gap.first_layer, gap.last_layer + 1), range(start, stop))


def worth_asking(
    share: Share, gaps: Iterable[Gap], rejected: Iterable[tuple[DataTrack, int, int]]
) -> Iterator[Rectangle]:
    """Yield what is missing of a share and may be good.

    Gaps of a layer of which everything has been rejected are left out: they would come as bad
    again.

    Args:
        share: What is asked for.
        gaps: Of its track.
        rejected: Track, layer and block of Objects that failed a check.
    """
    bad = {(layer, block) for track, layer, block in rejected if track == share.track}
    suspect = sorted({layer for layer, _ in bad})
    for part in missing_of(share, gaps):
        start = part.layers.start
        for layer in suspect:
            if layer in part.layers and all((layer, block) in bad for block in part.blocks):
                if start < layer:
                    yield Rectangle(range(start, layer), part.blocks)
                start = layer + 1
        if start < part.layers.stop:
            yield Rectangle(range(start, part.layers.stop), part.blocks)


def first_missing(
    share: Share, gaps: Iterable[Gap], rejected: Iterable[tuple[DataTrack, int, int]]
) -> Location | None:
    """Return where the first Object is of those that are :func:`worth_asking` for, if any is."""
    parts = worth_asking(share, gaps, rejected)
    return min((Location(part.layers.start, part.blocks.start) for part in parts), default=None)


def fill_from(first: Location, plan: SegmentPlan | None, layers: int) -> LocationFilter:
    """Return what to be filled with: all that is wanted, from ``first`` on (KVCS Section 5.2).

    Args:
        first: The first Object that is missing.
        plan: What is wanted of the segment; None: that is not known yet.
        layers: Layers of the model.
    """
    if plan is None or plan.layers.stop == layers:
        return LocationFilter.absolute_start(*first)
    return LocationFilter.group_end(*first, plan.layers.stop - 1)


def block_filters(share: Share, blocks: int, *, may_cut: bool) -> tuple[RangeFilter, ...]:
    """Return the filter that lets the blocks of a share pass (KVCS Section 5.3).

    Args:
        share: What is asked for.
        blocks: Blocks of the segment.
        may_cut: Whether the peer takes a filter. If not, what is not wanted is discarded on
            arrival.
    """
    if share.blocks is None or len(share.blocks) == blocks or not may_cut:
        return ()
    ranges = ((share.blocks.start, share.blocks.stop - 1),)
    return (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges),)
