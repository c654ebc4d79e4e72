"""Images: publications that are held, as Tracks that sessions serve; their payloads stay on disk.

Pure. An image is made of the index alone, in any thread, before anybody else sees it. It never
changes: when more of a publication is kept, a new image is made for those who ask from then on.

Every Object of an image is of the past, for fills and fetches: what is live is for a relay. Of a
Group of which everything is held all is known; elsewhere what is not held is unknown. A Track of
which something is missing ends with an error, which says to a consumer that more may be had from
somebody else.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from kvcs.depot.archive import Wanted
from kvcs.depot.records import MANIFESTS, SEAL_OCTETS, Entry, TrackNote
from kvcs.depot.shelf import Holding
from moqt.codepoints import MAX_VI64, PublishDoneCode
from moqt.location import Location
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge
from moqt.session.localobjects import DeferredObject
from moqt.session.localtrack import LocalTrack

#: Octets of memory that an Object of an image takes while its payload is on disk.
OBJECT_OCTETS = 400


class ShelvedTrack:
    """One Track of an image.

    Attributes:
        number: The publication's, in the index.
        local: What sessions serve.
        objects: Its Objects, by Location.
        is_whole: Whether everything is held that belongs to it.
    """

    def __init__(
        self,
        holding: Holding,
        name: bytes,
        note: TrackNote,
        entries: Sequence[Entry],
        wanted: "Callable[[ShelvedTrack, DeferredObject], None]",
    ) -> None:
        coverage = Coverage(Knowledge.UNKNOWN)
        self.number = holding.number
        self.name = name
        self.local = LocalTrack(
            holding.name.track(name), properties=note.properties, coverage=coverage
        )
        entries = _of_one_priority(entries)
        self.objects: list[DeferredObject] = []
        self._offsets = array("Q", (entry.offset for entry in entries))
        self._seals = b"".join(entry.seal for entry in entries)
        self._starts: dict[int, int] = {}  # of Groups, in ``objects``
        self._priorities = {entry.location.group: entry.priority for entry in entries}
        largest = [at for at in (note.largest, entries[-1].location if entries else None) if at]
        if largest:
            self.local.raise_largest(max(largest))
        on_wanted = partial(wanted, self)
        for entry in entries:
            group, object_id = entry.location
            self._starts.setdefault(group, len(self.objects))
            stored = self.local.store_subgroup(group, priority=entry.priority)
            self.objects.append(
                stored.defer(object_id, entry.length, on_wanted, properties=entry.properties)
            )
        whole = list(self._whole_groups(note))
        for first, last in _runs(whole):
            coverage.mark(Location(first, 0), Location(last, MAX_VI64), Knowledge.COMPLETE)
        if name in MANIFESTS:
            # Earlier versions may be missing; the last one is what counts.
            self.is_whole = holding.finished and bool(entries)
        else:
            self.is_whole = bool(note.groups) and len(whole) == note.groups
            if self.is_whole:
                coverage.mark(FIRST, LAST, Knowledge.COMPLETE)
        if self.is_whole:
            self.local.end(PublishDoneCode.TRACK_ENDED)
        else:
            self.local.end(PublishDoneCode.INTERNAL_ERROR, "not all of it is kept here")

    def __len__(self) -> int:
        return len(self.objects)

    def position(self, obj: DeferredObject) -> int:
        """Return the place of an Object in ``objects``."""
        group, object_id = obj.location
        guess = self._starts[group] + object_id
        if (
            guess < len(self.objects) and self.objects[guess] is obj
        ):  # as it is with nothing missing
            return guess
        return bisect_left(self.objects, obj.location, key=_location_of)

    def find(self, location: Location) -> int | None:
        """Return the place in ``objects`` of the Object of a Location; None: it is not held."""
        at = bisect_left(self.objects, location, key=_location_of)
        return at if at < len(self.objects) and self.objects[at].location == location else None

    def wanted(self, position: int) -> Wanted:
        """Return what is to be read to have an Object's payload."""
        obj = self.objects[position]
        at = position * SEAL_OCTETS
        return Wanted(
            self.name,
            obj.location,
            self._priorities[obj.location.group],
            obj.properties,
            self._offsets[position],
            obj.length,
            self._seals[at : at + SEAL_OCTETS],
        )

    def _whole_groups(self, note: TrackNote) -> Iterator[int]:
        """Yield the Groups of which every Object is held."""
        starts = [*self._starts.items(), (-1, len(self.objects))]
        expected = 1 if self.name in MANIFESTS else note.blocks
        for (group, start), (_, stop) in pairwise(starts):
            if expected and stop - start == expected:
                yield group


class Image:
    """What is served of one publication.

    Attributes:
        tracks: By Track Name.
        octets: Octets of memory that it takes without payloads.
    """

    def __init__(self, tracks: Mapping[bytes, ShelvedTrack]) -> None:
        self.tracks = tracks
        self.octets = OBJECT_OCTETS * (16 + sum(map(len, tracks.values())))


def _of_one_priority(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out what has another priority than its Group, as no good Object has."""
    counts: dict[int, Counter[int]] = {}
    for entry in entries:
        counts.setdefault(entry.location.group, Counter())[entry.priority] += 1
    usual = {group: found.most_common(1)[0][0] for group, found in counts.items()}
    return [entry for entry in entries if entry.priority == usual[entry.location.group]]


def _location_of(obj: DeferredObject) -> Location:
    return obj.location


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of numbers that follow each other, ascending."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], numbers[at - 1]
            start = at
