"""Sealed layers: how the Objects of a scope that seals go over HTTP. Pure.

As they were sealed for their tracks, so that neither the service nor anybody in between needs a
key. What opens them follows from where they were published, which is said ahead of them::

    0   32 Anchor Key
    32  16 Publication ID
    48  4  Segment
    52  4  Object ID             index of the block in the segment
    56  1  Publisher Priority
    57  1  Objects               1 K and V together, 2 K and then V
    58  2  Reserved              0
    60  4  Octets                of the first Object

and then the first Object and the second one, if there are two. Their tracks are ``raw``; the Group
ID is the layer.
"""

import struct
from dataclasses import dataclass, field
from typing import Self

from kvcs.kvsp.layout import Component, Octets
from kvcs.profile.naming import DataTrack, PublicationName
from kvcs.profile.payload import HEADER_OCTETS
from kvcs.trust.sealing import PROPERTIES, Cover, sealed_octets
from moqt.location import Location

_HEAD = struct.Struct(">32s16sIIBBHI")
HEAD_OCTETS = _HEAD.size  # 64


class BadSealedLayer(ValueError):
    """What arrived is none."""


def longest(section_octets: int) -> int:
    """Return how long a sealed layer of a block can be whose sections take so many octets."""
    return HEAD_OCTETS + 2 * sealed_octets(HEADER_OCTETS + section_octets, padded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLayer:
    """One layer of one block, sealed."""

    anchor_key: bytes
    publication_id: bytes
    segment: int
    index: int
    """Object ID: index of the block in the segment."""

    priority: int
    objects: tuple[Octets, ...] = field(repr=False)
    """The payloads as they were published: of K and V together, or of K and of V."""

    def parts(self) -> tuple[Octets, ...]:
        """Return it in pieces, as it goes out."""
        head = _HEAD.pack(
            self.anchor_key, self.publication_id, self.segment, self.index, self.priority,
            len(self.objects), 0, len(self.objects[0]),
        )  # fmt: skip
        return (head, *self.objects)

    @classmethod
    def parse(cls, octets: Octets) -> Self:
        """Read one.

        Raises:
            BadSealedLayer: If it is none.
        """
        view = memoryview(octets)
        if len(view) < HEAD_OCTETS:
            raise BadSealedLayer(f"{len(view)} octets, expected {HEAD_OCTETS} at least")
        anchor, publication, segment, index, priority, count, reserved, first = _HEAD.unpack_from(
            view
        )
        if count not in (1, 2) or reserved:
            raise BadSealedLayer(f"{count} Objects and {reserved}, expected 1 or 2 and 0")
        body = view[HEAD_OCTETS:]
        if first > len(body) or (count == 1 and first != len(body)):
            raise BadSealedLayer(f"a first Object of {first} octets, {len(body)} are there")
        return cls(
            anchor_key=anchor,
            publication_id=publication,
            segment=segment,
            index=index,
            priority=priority,
            objects=(body,) if count == 1 else (body[:first], body[first:]),
        )

    def name(self, scope_id: bytes, compatibility_id: bytes) -> PublicationName:
        """Return the publication that it was published in."""
        return PublicationName(scope_id, compatibility_id, self.anchor_key, self.publication_id)

    @property
    def tracks(self) -> tuple[DataTrack, ...]:
        """The tracks that its Objects were published on."""
        components = (Component.KV,) if len(self.objects) == 1 else (Component.K, Component.V)
        return tuple(DataTrack(component, "raw", self.segment) for component in components)

    @property
    def cover(self) -> Cover:
        """What its Objects were published with."""
        return Cover(self.priority, PROPERTIES)

    def location(self, layer: int) -> Location:
        """Return where in their tracks they are."""
        return Location(layer, self.index)
