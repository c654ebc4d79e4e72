"""Stock: what of one publication is held, against what its manifests promise. Pure.

The counterpart of a consumer's assembler for one who wants everything. What is listed and what is
held are compared here, so that a producer that contradicts itself is found out also by Objects
that came before they were listed (decision 8); and a publication is complete when every Object
that its manifest promises has been kept, whatever else was announced (decision 9).
"""

from collections.abc import Iterable, Iterator

from kvcs.errors import BadManifest
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack
from moqt.location import Location


class Stock:
    """What is held of one publication.

    Attributes:
        manifest: The newest version that was accepted; None before the first.
        version: Its Group ID; -1 before the first.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.version = -1
        self._held: dict[DataTrack, dict[int, int]] = {}  # by layer, a bit for each block
        self._unlisted: dict[DataTrack, dict[int, dict[int, bytes]]] = {}

    def accept(self, manifest: Manifest, version: int) -> bool:
        """Take a version of the manifest; return whether it is a newer one.

        Raises:
            BadManifest: If it contradicts an earlier one, or Objects that are held. Nothing of
                the publication can be relied on.
        """
        if version <= self.version:
            return False
        if self.manifest is not None:
            manifest.check_follows(self.manifest)
        for entry in manifest.segments:
            for track in entry.tracks:
                self._check_listed(entry, track)
        self.manifest, self.version = manifest, version
        return True

    def _check_listed(self, entry: SegmentEntry, track: DataTrack) -> None:
        unlisted, groups = self._unlisted.get(track, {}), entry.object_digests.get(track, ())
        for layer in [layer for layer in unlisted if layer < len(groups)]:
            held = unlisted[layer]
            # At once where all of the layer is held: there may be thousands.
            if b"".join(digest for _, digest in sorted(held.items())) != groups[layer]:
                for block, digest in held.items():
                    self._check_digest(track, Location(layer, block), digest, entry)
            del unlisted[layer]

    def entry_of(self, track: DataTrack) -> SegmentEntry | None:
        """Return what the manifest says of a track's segment; None if it does not list it."""
        segments = () if self.manifest is None else self.manifest.segments
        if track.segment < len(segments) and track in segments[track.segment].tracks:
            return segments[track.segment]
        return None

    @property
    def tracks(self) -> Iterator[DataTrack]:
        """The data tracks that the manifest lists."""
        for entry in () if self.manifest is None else self.manifest.segments:
            yield from entry.tracks

    @property
    def promised_objects(self) -> int:
        """How many Objects the manifest promises, itself not counted."""
        manifest = self.manifest
        if manifest is None:
            return 0
        return sum(entry.blocks * len(entry.tracks) for entry in manifest.segments) * (
            manifest.layers
        )

    def wants(self, track: DataTrack, location: Location) -> bool:
        """Whether an Object is promised and not held."""
        entry, manifest = self.entry_of(track), self.manifest
        if entry is None or manifest is None:
            return False
        layer, block = location
        if layer >= manifest.layers or block >= entry.blocks:
            return False
        return not self._held.get(track, {}).get(layer, 0) >> block & 1

    def hold(self, track: DataTrack, locations: Iterable[tuple[Location, bytes]]) -> None:
        """Note Objects that are kept, with their Data Digests.

        Raises:
            BadManifest: If the manifest lists another digest for one.
        """
        held = self._held.setdefault(track, {})
        entry = self.entry_of(track)
        for (layer, block), digest in locations:
            if not self._check_digest(track, Location(layer, block), digest, entry):
                self._unlisted.setdefault(track, {}).setdefault(layer, {})[block] = digest
            held[layer] = held.get(layer, 0) | 1 << block

    def _check_digest(
        self, track: DataTrack, at: Location, digest: bytes, entry: SegmentEntry | None
    ) -> bool:
        """Check a digest against what is listed; return whether any is."""
        listed = None if entry is None else entry.digest(track, at.group, at.object)
        if listed is not None and listed != digest:
            raise BadManifest(
                f"{track} layer {at.group} block {at.object} is held with digest {digest.hex()}, "
                f"the manifest lists {listed.hex()}"
            )
        return listed is not None

    def first_missing(self, track: DataTrack) -> Location | None:
        """Return the first Object of a track that is promised and not held; None: all are held."""
        entry, manifest = self.entry_of(track), self.manifest
        if entry is None or manifest is None:
            return None
        for layer in range(manifest.layers):
            missing = self._missing(track, entry, layer)
            if missing:
                return Location(layer, (missing & -missing).bit_length() - 1)
        return None

    def last_missing_layer(self, track: DataTrack) -> int | None:
        """Return the last layer of which something is promised and not held."""
        entry, manifest = self.entry_of(track), self.manifest
        if entry is None or manifest is None:
            return None
        layers = reversed(range(manifest.layers))
        return next((layer for layer in layers if self._missing(track, entry, layer)), None)

    def _missing(self, track: DataTrack, entry: SegmentEntry, layer: int) -> int:
        """Return a bit for each block of a layer that is missing."""
        return ((1 << entry.blocks) - 1) & ~self._held.get(track, {}).get(layer, 0)

    @property
    def is_complete(self) -> bool:
        """Whether all is held that the manifest promises, and it says that all is published."""
        manifest = self.manifest
        return (
            manifest is not None
            and manifest.complete
            and all(self.first_missing(track) is None for track in self.tracks)
        )
