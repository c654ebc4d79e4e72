"""What is kept of an Object, and the checks it passes on its way in and on its way out. Pure.

On its way in an Object passes every check of KVCS Section 3.5 and decision 7, and the digest that
the manifest lists for it. On its way out the digest of its Data is computed again. That covers the
Data; the header is covered by a *seal*, the first half of a SHA-256, which lies in the index and is
over all that the index says of the Object, too: its Location, priority and properties. So nothing
that changed on the disk leaves it, Flags and Reserved included. The seal of a manifest is over all
of it, and so is that of an Object which is kept sealed: no key is needed to read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.codecs import Codec, CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Octets
from kvcs.profile.manifest import CodecEntry, SegmentEntry
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack
from kvcs.profile.payload import HEADER_OCTETS, MAX_DATA_OCTETS, Block
from kvcs.trust.sealing import BARE, IN_CLEAR, Cover, Opener, is_sealed
from moqt.location import Location
from moqt.wire.pairs import Pairs, encode_pairs

#: Octets of a seal.
SEAL_OCTETS = 16
#: The tracks that carry manifests.
MANIFESTS = frozenset({MANIFEST, MANIFEST_COSE})


class Item(NamedTuple):
    """An Object that is to be kept, as it came."""

    track: bytes
    """Track Name."""

    location: Location
    priority: int
    """Publisher Priority that it came with."""

    properties: Pairs
    payload: bytes
    digest: bytes
    """Data Digest, hidden if the Object is sealed, or of a manifest the SHA-256 over all of it; 32
    octets."""

    @property
    def seal(self) -> bytes:
        """What the index keeps, to know the payload by."""
        return seal(self.track, self.location, self.priority, self.properties, self.payload)


class Entry(NamedTuple):
    """What the index says of an Object that is kept."""

    location: Location
    offset: int
    """Where its payload begins in the file of its publication."""

    length: int
    priority: int
    properties: Pairs
    digest: bytes
    seal: bytes


@dataclass(frozen=True, slots=True)
class TrackNote:
    """What is known of a Track besides its Objects."""

    groups: int = 0
    """Layers of the model; 0 for a manifest track."""

    blocks: int = 0
    """Objects of each Group; 0 for a manifest track."""

    properties: Pairs = ()
    """Track Properties."""

    largest: Location | None = None
    """Largest Object as the publisher told it; what is held may be greater."""

    def merged(self, other: Self) -> "TrackNote":
        """Return what is known now that ``other`` came later."""
        known = [at for at in (self.largest, other.largest) if at is not None]
        return TrackNote(
            other.groups or self.groups,
            other.blocks or self.blocks,
            other.properties or self.properties,
            max(known, default=None),
        )


def seal(
    track: bytes, location: Location, priority: int, properties: Pairs, payload: Octets
) -> bytes:
    """Return the seal of an Object: over its header, or all of it if it is a manifest or sealed by
    its producer, and what goes with it.
    """  # noqa: D205  # one sentence
    more = encode_pairs(properties)
    place = b"%d %d %d %d %d " % (*location, priority, len(more), len(track))
    covered = payload if _is_opaque(track, properties) else payload[:HEADER_OCTETS]
    return sha256(b"".join((place, more, track, covered))).digest()[:SEAL_OCTETS]


def is_intact(
    track: bytes,
    location: Location,
    priority: int,
    properties: Pairs,
    payload: Octets,
    sealed: bytes,
) -> bool:
    """Whether an Object that was read is, octet for octet, the one that was kept.

    Costs one SHA-256 over the payload.
    """
    if seal(track, location, priority, properties, payload) != sealed:
        return False
    if _is_opaque(track, properties):
        return True
    try:
        # The limit was kept on the way in.
        Block.decode(
            payload, group_id=location.group, object_id=location.object, max_data=len(payload)
        )
    except BadObject:
        return False
    return True


def _is_opaque(track: bytes, properties: Pairs) -> bool:
    """Whether an Object has no header that can be read here."""
    return track in MANIFESTS or is_sealed(properties)


@dataclass(frozen=True, slots=True)
class _Opaque:
    """A codec of which only the value is known: what it carries can be kept, and not decoded."""

    name: str
    value: int
    lossless: bool
    components: frozenset[Component] = frozenset(Component)
    fixed_length: bool = False

    def encode(self, array: NDArray[Any]) -> bytes:
        raise NotImplementedError(f"codec {self.name!r} is known by its value alone")

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        raise NotImplementedError(f"codec {self.name!r} is known by its value alone")


class DeclaredCodecs(CodecRegistry):
    """The codecs of one publication: those known here, and those that its manifest declares.

    What is kept need not be decoded, so a codec that nobody here knows is taken at the manifest's
    word.
    """

    def __init__(self, known: CodecRegistry, declared: Mapping[str, CodecEntry]) -> None:
        super().__init__()
        self._known = known
        self._declared = {
            name: _Opaque(name, entry.value, entry.lossless)
            for name, entry in declared.items()
            if name not in known
        }

    def get(self, name: str) -> Codec | None:
        """Return the codec of that name, or ``None``."""
        return self._known.get(name) or self._declared.get(name)


def examine(
    track: DataTrack,
    location: Location,
    payload: bytes,
    *,
    entry: SegmentEntry,
    descriptor: Descriptor,
    codecs: CodecRegistry,
    max_data_octets: int = MAX_DATA_OCTETS,
    opener: Opener = IN_CLEAR,
    cover: Cover = BARE,
) -> bytes:
    """Check an Object that came; return its Data Digest (KVCS Section 3.5, decision 7).

    Raises:
        BadObject: If a check fails, or the manifest lists another digest. It counts as missing.
    """
    layer, block = location
    longest = opener.longest(HEADER_OCTETS + max_data_octets, fixed_length=False)
    opened = opener.open(location, cover, payload, longest)
    found = Block.decode(opened, group_id=layer, object_id=block, max_data=max_data_octets)
    found.check_against(entry, descriptor, track, codecs)
    listed = entry.digest(track, layer, block)
    if listed is not None and listed != found.digest:
        raise BadObject(
            Rejection.DIGEST,
            f"digest of the data is {found.digest.hex()}, the manifest lists {listed.hex()}",
        )
    return found.digest
