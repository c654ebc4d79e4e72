"""What is asked for with FETCH: what is missing, cut into few requests (KVCS Section 5.3). Pure.

A FETCH asks for consecutive layers and, where the peer takes Range Filters, for the same blocks of
each. So what is missing of a track is cut into bands of layers. When that would be too many
requests, neighbours are asked for together with what lies between them, where that is least; what
comes in excess is discarded on arrival.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvcs.consumer.spreading import Rectangle
from moqt.codepoints import ParameterType
from moqt.wire.filters import LocationFilter, RangeFilter

#: Requests that one share of a track is cut into at most.
MAX_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Band:
    """Objects of a track that one FETCH asks for: some layers, and of each the same blocks."""

    layers: range
    """Group IDs."""

    blocks: tuple[range, ...]
    """Object IDs, in ascending ranges that do not touch."""

    missing: tuple[Rectangle, ...]
    """What is missing of them; the rest comes in excess."""

    @property
    def objects(self) -> int:
        """How many Objects are asked for."""
        return len(self.layers) * _count(self.blocks)

    @property
    def location_filter(self) -> LocationFilter:
        """The whole of its layers: Absolute Start, Group End (KVCS Section 5.3)."""
        return LocationFilter.group_end(self.layers.start, 0, self.layers.stop - 1)

    def range_filters(self, blocks: int) -> tuple[RangeFilter, ...]:
        """Return the filter that lets its blocks pass; none if they are all of the segment's.

        Args:
            blocks: Blocks of the segment.
        """
        if self.blocks == (range(blocks),):
            return ()
        ranges = tuple((run.start, run.stop - 1) for run in self.blocks)
        return (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges),)


def cut(
    missing: Iterable[Rectangle], blocks: int, *, max_ranges: int, max_requests: int = MAX_REQUESTS
) -> list[Band]:
    """Cut what is missing of a track into requests.

    Together they ask for all that is missing, for no Object twice, and in ascending layers.
    Nothing else is asked for as long as the peer's filters and ``max_requests`` allow.

    Args:
        missing: What is missing. Costs time with the square of its different layers.
        blocks: Blocks of the segment.
        max_ranges: Ranges that a filter may have at the peer (MAX_FILTER_RANGES); 0: it takes no
            filters, and whole layers come.
        max_requests: How many requests there may be, at least one.
    """
    bands: list[Band] = []
    for layers, parts in _rows(missing):
        runs = _narrowed(_union(parts), max_ranges) if max_ranges else (range(blocks),)
        clipped = tuple(Rectangle(layers, part.blocks) for part in parts)
        last = bands[-1] if bands else None
        if last is not None and last.layers.stop == layers.start and last.blocks == runs:
            joined = range(last.layers.start, layers.stop)
            bands[-1] = Band(joined, runs, last.missing + clipped)
        else:
            bands.append(Band(layers, runs, clipped))
    while len(bands) > max_requests:
        # Of neighbours those between which the least lies that nobody needs.
        at = min(range(len(bands) - 1), key=lambda i: _excess(bands[i], bands[i + 1], max_ranges))
        bands[at : at + 2] = [_together(bands[at], bands[at + 1], max_ranges)]
    return bands


def _rows(missing: Iterable[Rectangle]) -> Iterator[tuple[range, list[Rectangle]]]:
    """Yield consecutive layers, ascending, and what of the missing reaches over all of them."""
    by_start = sorted((part for part in missing if part.blocks), key=lambda p: p.layers.start)
    edges = sorted({edge for p in by_start for edge in (p.layers.start, p.layers.stop)})
    over: list[Rectangle] = []
    following = 0
    for start, stop in pairwise(edges):
        over = [part for part in over if part.layers.stop > start]
        while following < len(by_start) and by_start[following].layers.start == start:
            over.append(by_start[following])
            following += 1
        if over:
            yield range(start, stop), over


def _union(parts: Iterable[Rectangle]) -> tuple[range, ...]:
    """Return the blocks of all parts."""
    runs: list[range] = []
    for run in sorted((part.blocks for part in parts), key=lambda run: run.start):
        if runs and run.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, run.stop))
        else:
            runs.append(run)
    return tuple(runs)


def _narrowed(runs: tuple[range, ...], max_ranges: int) -> tuple[range, ...]:
    """Close the smallest gaps between ranges until there are no more than ``max_ranges``."""
    if len(runs) <= max_ranges:
        return runs
    gaps = [(after.start - before.stop, at) for at, (before, after) in enumerate(pairwise(runs))]
    kept = sorted(at for _, at in sorted(gaps, reverse=True)[: max_ranges - 1])
    firsts, lasts = [0, *(at + 1 for at in kept)], [*kept, len(runs) - 1]
    pairs = zip(firsts, lasts, strict=True)
    return tuple(range(runs[first].start, runs[last].stop) for first, last in pairs)


def _together(one: Band, other: Band, max_ranges: int) -> Band:
    """Return one request for two, the first of which has the lower layers."""
    both = [Rectangle(range(1), run) for run in one.blocks + other.blocks]
    runs = _narrowed(_union(both), max_ranges) if max_ranges else one.blocks
    return Band(range(one.layers.start, other.layers.stop), runs, one.missing + other.missing)


def _excess(one: Band, other: Band, max_ranges: int) -> int:
    """Return how many Objects more are asked for with one request for two."""
    return _together(one, other, max_ranges).objects - one.objects - other.objects


def _count(runs: Iterable[range]) -> int:
    return sum(map(len, runs))


class Awaited:
    """The missing Objects of a request, to tell them from what comes in excess."""

    def __init__(self, missing: Iterable[Rectangle]) -> None:
        self._blocks: dict[int, list[range]] = {}
        for part in missing:
            for layer in part.layers:
                self._blocks.setdefault(layer, []).append(part.blocks)

    def __contains__(self, place: tuple[int, int]) -> bool:
        layer, block = place
        return any(block in blocks for blocks in self._blocks.get(layer, ()))
