"""Whether one publication may go on where another one ended (KVCS Section 5.4). Pure.

Objects of two publications are never mixed in a segment, unless the manifests of both say
``deterministic``; then they may be, Object by Object, where both publish the same segment: same
number, same blocks, same Block Keys, same tracks, and no digest on which they differ. A segment of
which everything came from one publication stays as it is, and one of which nothing has come yet is
anybody's. One that was begun and may not be mixed keeps every other publication out: the one that
began it may come back, and a sink gets each tensor once. All of it within one scope and one
Compatibility ID, and never across the line between signed and unsigned manifests: nobody is to take
a signature away by being second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvcs.consumer.selection import SegmentPlan
from kvcs.errors import KvcsError
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName


class CannotJoin(KvcsError):
    """A publication cannot go on where the other one ended; the text says why."""


class Bond(Enum):
    """How a retrieval is bound to the publication that it has begun."""

    #: Nothing of it was handed out: any other publication of the prefix may take its place.
    FREE = auto()
    #: Something was, and another publication may be able to go on.
    JOINABLE = auto()
    #: Nobody else can go on: what is missing comes from this publication, or from computing.
    BOUND = auto()


class Joint(Enum):
    """What becomes of a segment when another publication goes on."""

    #: Everything of it is there: nothing is asked for.
    KEPT = auto()
    #: Objects of both may be mixed: what is missing is asked for.
    CONTINUED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What there is of one segment."""

    plan: SegmentPlan
    entry: SegmentEntry

    begun: bool
    """Whether an Object of it was taken."""

    complete: bool
    """Whether every wanted layer of it was told to be ready."""

    unlisted: tuple[tuple[DataTrack, int, int, bytes], ...] = ()
    """Track, layer, block and Data Digest of Objects whose digest no manifest has listed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """What there is of a publication: all that another one has to fit."""

    name: PublicationName
    manifest: Manifest
    signed: bool
    segments: Mapping[int, Held]


def bond_of(estate: Estate | None, *, told: bool, unlisted: bool) -> Bond:
    """Say who else may bring what is missing.

    Args:
        estate: What there is; None: no manifest was accepted.
        told: Whether a layer was handed out.
        unlisted: Whether wanted blocks are in no segment that was listed.
    """
    if estate is None or not told:
        return Bond.FREE
    held = estate.segments.values()
    if any(one.begun and not one.complete for one in held):
        return Bond.JOINABLE if estate.manifest.deterministic else Bond.BOUND
    return Bond.JOINABLE if unlisted or any(not one.begun for one in held) else Bond.BOUND


def join(
    estate: Estate, name: PublicationName, manifest: Manifest, *, signed: bool
) -> dict[int, Joint]:
    """Say of each segment of which something is there what becomes of it.

    Args:
        estate: What there is.
        name: The publication that is to go on.
        manifest: Its manifest, which passed every check.
        signed: Whether that is a signed one.

    Returns:
        By number of the segment; those that are not in it are the other publication's alone.

    Raises:
        CannotJoin: If it cannot go on at all. Nothing has changed.
    """
    ours, theirs = estate.name, name
    if (ours.scope_id, ours.compatibility_id) != (theirs.scope_id, theirs.compatibility_id):
        raise CannotJoin("it is of another scope or Compatibility ID")
    if signed != estate.signed:
        found, expected = ("signed", "not") if signed else ("not signed", "signed")
        raise CannotJoin(f"its manifest is {found}, that of what is there is {expected}")
    deterministic = manifest.deterministic and estate.manifest.deterministic
    joints: dict[int, Joint] = {}
    for number, held in estate.segments.items():
        if not held.begun:
            continue
        if number >= len(manifest.segments):
            raise CannotJoin(f"it does not list segment {number}, of which something is there")
        entry = manifest.segments[number]
        _check_same_blocks(held.entry, entry)
        if held.complete:
            joints[number] = Joint.KEPT
        elif not deterministic:
            raise CannotJoin(f"segment {number} was begun, and not both are deterministic")
        else:
            _check_same_objects(held, entry)
            joints[number] = Joint.CONTINUED
    return joints


def _check_same_blocks(held: SegmentEntry, entry: SegmentEntry) -> None:
    ours, theirs = (
        (one.first_block, one.end_block, one.block_keys_sha256) for one in (held, entry)
    )
    if ours != theirs:
        raise CannotJoin(
            f"segment {entry.segment} has other blocks: {entry.first_block} to "
            f"{entry.end_block - 1}, or other keys, expected {held.first_block} to "
            f"{held.end_block - 1}"
        )


def _check_same_objects(held: Held, entry: SegmentEntry) -> None:
    """Check that both publish the same Objects in the same tracks, as far as they tell."""
    where = f"segment {entry.segment}"
    if lacking := [str(track) for track in held.plan.tracks if track not in entry.tracks]:
        raise CannotJoin(f"{where} does not have the tracks {', '.join(lacking)}")
    for track in held.plan.tracks:
        pairs = zip(
            held.entry.object_digests.get(track, ()),
            entry.object_digests.get(track, ()),
            strict=False,
        )
        for layer, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                raise CannotJoin(f"both are deterministic, but differ in {track} layer {layer}")
    for track, layer, block, digest in held.unlisted:
        if entry.digest(track, layer, block) not in (None, digest):
            raise CannotJoin(
                f"both are deterministic, but differ in {track} layer {layer} block {block}"
            )


def may_mix(manifest: Manifest, *, deterministic: bool) -> bool:
    """Whether what nobody lists may go into a segment that holds Objects of this publication.

    Args:
        manifest: The publication's.
        deterministic: Whether who has it says the same of it.
    """
    return manifest.deterministic and deterministic
