"""The ledger of an assembler: what of each segment, track and layer is there, and what is missing.

Pure. Values that :mod:`kvcs.consumer.assembler` keeps; nothing is decided here.
"""

from collections.abc import Iterable, Iterator

from kvcs.consumer.events import Gap
from kvcs.consumer.ranges import RangeSet
from kvcs.consumer.selection import SegmentPlan
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack


class Row:
    """The Objects of one track in one layer."""

    __slots__ = ("have", "placing", "waiting")

    def __init__(self) -> None:
        self.have = RangeSet()
        """Object IDs that were admitted."""

        self.placing: set[int] = set()
        """Those of them whose tensors are not in place yet."""

        self.waiting: dict[int, tuple[bytes, int]] = {}
        """Digest and octets of those that no manifest has listed yet."""


class Layer:
    """How far one layer of a segment is."""

    __slots__ = ("remaining", "reported", "unattested")

    def __init__(self, objects: int) -> None:
        self.remaining = objects
        """Wanted Objects that are not in place."""

        self.unattested = objects
        """Wanted Objects that are not attested, in place or not."""

        self.reported = False


class Track:
    """How far one wanted track is."""

    __slots__ = ("listed", "name", "rows", "segment")

    def __init__(self, name: DataTrack, segment: "Segment") -> None:
        self.name = name
        self.segment = segment
        self.rows: dict[int, Row] = {}
        """By layer; only those of which something was admitted."""

        self.listed = 0
        """Groups whose listed digests have been compared with what came."""


class Segment:
    """How far one segment is."""

    __slots__ = ("confirmed", "entry", "layers", "plan", "tracks", "unready")

    def __init__(self, plan: SegmentPlan, entry: SegmentEntry, *, confirmed: bool) -> None:
        self.plan = plan
        self.entry = entry
        self.confirmed = confirmed
        self.tracks = [Track(name, self) for name in plan.tracks]
        self.layers: dict[int, Layer] = {}
        self.unready = len(plan.layers)

    def layer(self, layer: int) -> Layer:
        """Return the state of a wanted layer."""
        if (state := self.layers.get(layer)) is None:
            state = self.layers[layer] = Layer(self.plan.objects_per_layer)
        return state


def missing(track: Track) -> Iterator[tuple[range, tuple[range, ...]]]:
    """Yield layers and the blocks missing in them; those of which nothing came in runs."""
    plan = track.segment.plan
    untouched = plan.layers.start
    for layer, row in sorted(track.rows.items()):
        if untouched < layer:
            yield range(untouched, layer), (plan.blocks,)
        yield range(layer, layer + 1), tuple(row.have.gaps(plan.blocks))
        untouched = layer + 1
    if untouched < plan.layers.stop:
        yield range(untouched, plan.layers.stop), (plan.blocks,)


def rectangles(track: DataTrack, rows: Iterable[tuple[range, tuple[range, ...]]]) -> Iterator[Gap]:
    """Join consecutive layers that have the same blocks."""
    layers, blocks = range(0), tuple[range, ...]()
    for next_layers, next_blocks in (*rows, (range(0), ())):
        if next_blocks == blocks and layers.stop == next_layers.start:
            layers = range(layers.start, next_layers.stop)
            continue
        for run in blocks:
            yield Gap(
                segment=track.segment,
                track=track,
                first_layer=layers.start,
                last_layer=layers.stop - 1,
                first_block=run.start,
                last_block=run.stop - 1,
            )
        layers, blocks = next_layers, next_blocks
