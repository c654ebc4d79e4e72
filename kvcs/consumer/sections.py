"""What is missing, had from a block service instead of a Track (KVCS Section 5.4). Pure.

A block service is asked by scope, Compatibility ID, Block Key and layer, and gives the K section
and the V section as raw tensors; of the publication whose Objects are missing, if it has that, else
of any. They are believed as far as somebody answers for them:

* where the manifest lists the Data Digest of the ``raw`` Object of that place, they are that
  Object's Data if they have it, and refused if not;
* where it lists none, they are another publication's: they are taken only if both say that they are
  deterministic (:mod:`kvcs.consumer.joining`);
* a layer digest that comes with them, SHA-256 over K and then V, has to fit in any case.

In a scope that seals they are Objects of some publication of the scope, sealed for their place
there. They are opened first, and nothing in clear is taken; where the manifest lists no digest,
they must also be of a publication of which it is known that its prefix is the prompt's.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, Protocol

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.joining import may_mix
from kvcs.consumer.trust import Expectations
from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.http.sealed import SealedLayer
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import HEADER_OCTETS, Block

_RAW = "raw"


class SectionKey(NamedTuple):
    """One layer of one block, as a block service knows it."""

    block_key: bytes
    """32 octets."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a block service has of it."""

    key: SectionKey

    k: Octets = field(default=b"", repr=False)
    """The K section: the raw tensor; empty where the model has none."""

    v: Octets = field(default=b"", repr=False)

    layer_digest: bytes | None = None
    """SHA-256 over K and then V, if whoever gave it says so; 32 octets."""

    sealed: SealedLayer | None = field(default=None, repr=False)
    """Instead of all three, in a scope that seals."""


class SectionSource(Protocol):
    """A block service, as a retrieval uses it."""

    @property
    def name(self) -> str:
        """What it is called in logs, such as its URI."""

    @property
    def deterministic(self) -> bool:
        """Whether it says that every publication of the same content is bit-identical."""

    def sections(
        self,
        scope_id: bytes,
        compatibility_id: bytes,
        wanted: Sequence[SectionKey],
        layout: Layout,
        publication_id: bytes,
    ) -> AsyncGenerator[Section, None]:
        """Yield what it has of what is wanted, as it comes, in any order.

        What it does not have is left out. Whoever iterates has a deadline for each section, and
        closes the generator, perhaps before its end.

        Args:
            scope_id: The scope.
            compatibility_id: The model.
            wanted: Each of them once, a few hundred at most, the lowest layers first.
            layout: How long the sections are.
            publication_id: Whose Objects are missing. What it has of this publication is better
                than what it has of another one, which may have been computed otherwise.

        Raises:
            NotFound: From the iteration, if it has nothing of the model or does not know us.
            KvcsError: If it cannot be asked or does not answer as it should.
            OSError: If it cannot be reached.
            TimeoutError: If it does not answer in time.
        """
        ...


class Place(NamedTuple):
    """A missing Object that a section can stand for."""

    track: DataTrack
    layer: int
    block: int
    """Object ID."""


class Found(NamedTuple):
    """A section, or a half of it, as the Data of a missing Object."""

    place: Place
    digest: bytes
    data: Octets


def wanted_sections(
    assembler: Assembler, block_keys: Sequence[bytes], *, deterministic: bool
) -> dict[SectionKey, list[Place]]:
    """Return what a block service can be asked for, the lowest layers first.

    Args:
        assembler: How far the publication is; it has accepted a manifest.
        block_keys: Of the prompt, from its first block on.
        deterministic: Whether the service says so of itself.

    Returns:
        The sections, and for each the Objects that it stands for. What is not in a ``raw`` track,
        or is not listed and may not be mixed, is not in it.
    """
    manifest = assembler.manifest
    assert manifest is not None
    mixed = may_mix(manifest, deterministic=deterministic)
    found: list[tuple[int, int, Place]] = []
    for track, layer, block in _missing(assembler):
        entry, _ = assembler.entry(track)
        number = entry.first_block + block
        if number >= len(block_keys):
            continue
        if mixed or _listed(entry, track, layer, block):
            found.append((layer, number, Place(track, layer, block)))
    sections: dict[SectionKey, list[Place]] = {}
    for layer, number, place in sorted(found, key=lambda one: one[:2]):
        sections.setdefault(SectionKey(block_keys[number], layer), []).append(place)
    return sections


def check_section(
    section: Section,
    places: Sequence[Place],
    assembler: Assembler,
    expected: Expectations | None = None,
) -> list[Found | tuple[Place, BadObject]]:
    """Check a section against all that is known, and cut it into the Data of Objects.

    Costs a SHA-256 over it for each half, and one over the whole where there is a layer digest.

    Args:
        section: What came.
        places: The Objects that it stands for, one at least.
        assembler: How far the publication is.
        expected: What the publication is held against; None: nothing but that it is in clear.
    """
    checked: list[Found | tuple[Place, BadObject]] = []
    try:
        # What is found of one of them is true of all: they are halves of one section.
        section = _in_clear(section, places[0], assembler, expected)
    except BadObject as exc:
        return [(place, exc) for place in places]
    for place in places:
        try:
            checked.append(_check(section, place, assembler))
        except BadObject as exc:
            checked.append((place, exc))
    return checked


def _in_clear(
    section: Section, place: Place, assembler: Assembler, expected: Expectations | None
) -> Section:
    """Open a section, if the scope seals; refuse the other kind (decision 17)."""
    sealing = None if expected is None else expected.sealing
    if expected is None or sealing is None:
        if section.sealed is not None:
            raise BadObject(Rejection.PROTECTED, "a sealed section, the scope is in clear")
        return section
    if (sealed := section.sealed) is None:
        raise BadObject(Rejection.UNPROTECTED, "a section in clear, the scope seals")
    entry, descriptor = assembler.entry(place.track)
    layout, number = Layout.of(descriptor), entry.first_block + place.block
    keys = expected.block_keys
    # Sealed by a member of the scope, but for which prompt? Its Anchor Key tells.
    is_ours = sealed.anchor_key in keys[number:]
    if not is_ours and not _listed(entry, place.track, place.layer, place.block):
        raise BadObject(Rejection.DIGEST, "a section of another prompt, or nobody knows")
    name = sealed.name(assembler.publication.scope_id, assembler.publication.compatibility_id)
    at, data = sealed.location(place.layer), list[Octets]()
    for track, payload in zip(sealed.tracks, sealed.objects, strict=True):
        octets = HEADER_OCTETS + layout.section_octets(track.component)
        opener = sealing.track(name.track(track))
        longest = opener.longest(octets, fixed_length=True)
        opened = opener.open(at, sealed.cover, payload, longest)
        block = Block.decode(opened, group_id=at.group, object_id=at.object, max_data=octets)
        if block.component is not track.component:
            raise BadObject(Rejection.COMPONENT, f"Component is {block.component.name} of {track}")
        if block.token_start != (start := number * descriptor.block_tokens):
            raise BadObject(
                Rejection.TOKEN_START, f"Token Start is {block.token_start}, expected {start}"
            )
        if len(block.data) != octets - HEADER_OCTETS:
            raise BadObject(
                Rejection.DATA_LENGTH,
                f"Data Length is {len(block.data)}, expected {octets - HEADER_OCTETS}",
            )
        data.append(block.data)
    k, v = layout.split(data[0]) if len(data) == 1 else data
    return replace(section, k=k, v=v, sealed=None)


def _check(section: Section, place: Place, assembler: Assembler) -> Found:
    entry, descriptor = assembler.entry(place.track)
    layout = Layout.of(descriptor)
    for name, octets, component in (("K", section.k, Component.K), ("V", section.v, Component.V)):
        if len(octets) != (expected := layout.section_octets(component)):
            text = f"{name} section of {len(octets)} octets, expected {expected}"
            raise BadObject(Rejection.DATA_LENGTH, text)
    whole = DataTrack(Component.KV, _RAW, place.track.segment)
    joint = entry.digest(whole, place.layer, place.block)
    claims = [digest for digest in (section.layer_digest, joint) if digest is not None]
    if claims or place.track.component is Component.KV:
        found = sha256(section.k)
        found.update(section.v)
        for claimed in claims:
            if found.digest() != claimed:
                raise _contradicts(found.digest(), claimed)
    match place.track.component:
        case Component.K:
            data, digest = section.k, sha256(section.k).digest()
        case Component.V:
            data, digest = section.v, sha256(section.v).digest()
        case _:
            data, digest = b"".join((section.k, section.v)), found.digest()
    listed = entry.digest(place.track, place.layer, place.block)
    if listed is not None and listed != digest:
        raise _contradicts(digest, listed)
    return Found(place, digest, data)


def _contradicts(found: bytes, expected: bytes) -> BadObject:
    return BadObject(
        Rejection.DIGEST, f"the section has the digest {found.hex()}, expected {expected.hex()}"
    )


def _missing(assembler: Assembler) -> Iterator[Place]:
    for plan in assembler.plans:
        if assembler.is_segment_ready(plan.segment) or plan.codec != _RAW:
            continue
        for track in plan.tracks:
            for gap in assembler.gaps(track):
                for layer in range(gap.first_layer, gap.last_layer + 1):
                    for block in range(gap.first_block, gap.last_block + 1):
                        yield Place(track, layer, block)


def _listed(entry: SegmentEntry, track: DataTrack, layer: int, block: int) -> bool:
    """Whether the manifest answers for a place, alone or together with its other half."""
    whole = DataTrack(Component.KV, _RAW, track.segment)
    return any(entry.digest(one, layer, block) is not None for one in (track, whole))
