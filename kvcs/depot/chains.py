"""Chains: which block of a publication that is held has which Block Key. Pure.

A store has no tokens, so it can compute no Block Key, and a manifest states a digest over those of
each segment instead of the keys. Whoever tells them, an index or the disk, is believed once all of
them have those digests: nobody can make up others that do, short of breaking SHA-256.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvcs.kvsp.keys import ID_OCTETS
from kvcs.kvsp.layout import Component, Layout
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName

_RAW = "raw"


@dataclass(frozen=True, slots=True)
class Part:
    """A segment whose blocks are known."""

    first_block: int
    """Index of its first block in the whole context."""

    blocks: int
    tracks: tuple[DataTrack, ...]
    """Those that carry raw tensors: K and V, or one for both; none if there is neither."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of a publication."""

    name: PublicationName
    layout: Layout
    keys: tuple[bytes, ...] = field(repr=False)
    """Their Block Keys, one after the other."""

    encodings: tuple[str, ...]
    """Forms in which every one of them is held: ``CODEC``, or ``kv.CODEC``."""

    parts: tuple[Part, ...]

    @property
    def first_block(self) -> int:
        """Index of its first block in the whole context."""
        return self.parts[0].first_block

    def part_of(self, index: int) -> tuple[Part, int]:
        """Return where the block of ``keys[index]`` is: the segment, and its Object ID there."""
        position = self.first_block + index
        for part in self.parts:
            if position < part.first_block + part.blocks:
                return part, position - part.first_block
        raise IndexError(f"block {index} of {len(self.keys)}")


def chain_of(
    name: PublicationName, manifest: Manifest, first_block: int, keys: Sequence[bytes]
) -> Chain | None:
    """Return the blocks of a publication; ``None`` if these keys are not all of theirs.

    Args:
        name: The publication.
        manifest: Its newest manifest.
        first_block: The block, in the whole context, that the first key is said to be of.
        keys: Block Keys, one after the other; there may be others before and behind.
    """
    found: list[bytes] = []
    for entry in manifest.segments:
        at = entry.first_block - first_block
        own = keys[at : at + entry.blocks] if at >= 0 else ()
        if len(own) != entry.blocks:
            return None
        if sha256(b"".join(own)).digest() != entry.block_keys_sha256:
            return None
        found += own
    if not found:
        return None
    forms = [_encodings(entry) for entry in manifest.segments]
    return Chain(
        name,
        Layout.of(manifest.compat),
        tuple(found),
        tuple(form for form in forms[0] if all(form in others for others in forms)),
        tuple(
            Part(entry.first_block, entry.blocks, _raw_tracks(entry)) for entry in manifest.segments
        ),
    )


def joined(keys: Sequence[bytes]) -> bytes:
    """Return Block Keys as they are noted on disk: one behind the other."""
    return b"".join(keys)


def parted(octets: bytes) -> list[bytes]:
    """Return Block Keys that :func:`joined` has put together; a rest is left out."""
    whole = len(octets) // ID_OCTETS * ID_OCTETS
    return [octets[at : at + ID_OCTETS] for at in range(0, whole, ID_OCTETS)]


def _encodings(entry: SegmentEntry) -> dict[str, None]:
    """Return the forms that a segment has, each once, in the order of its tracks."""
    found: dict[str, None] = {}
    for track in entry.tracks:
        if track.component is Component.KV:
            found[f"kv.{track.codec}"] = None
        elif {
            DataTrack(part, track.codec, entry.segment) for part in (Component.K, Component.V)
        } <= set(entry.tracks):
            found[track.codec] = None
    return found


def _raw_tracks(entry: SegmentEntry) -> tuple[DataTrack, ...]:
    apart = tuple(DataTrack(part, _RAW, entry.segment) for part in (Component.K, Component.V))
    joint = (DataTrack(Component.KV, _RAW, entry.segment),)
    return next((form for form in (apart, joint) if set(form) <= set(entry.tracks)), ())
