"""PublishedBlocks: what a block service serves of what a producer holds.

Of a scope that seals, the Objects as they were sealed, and nothing in clear (decision 17).

Only raw tracks have the sections of a container (KVSP Section 4), K and V apart or together. A
layer is there as soon as it is published, whether the publication is finished or not. Nothing is
copied.
"""

from dataclasses import dataclass

from kvcs.kvsp.http.holder import HeldBlock
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.sealed import SealedLayer
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.producer.answers import Answers
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding, Segment
from kvcs.profile.naming import publisher_priority
from kvcs.profile.payload import HEADER_OCTETS
from moqt.codepoints import ObjectStatus
from moqt.session.localobjects import LocalObject
from moqt.session.localtrack import LocalTrack


class PublishedBlocks:
    """Finds blocks among the publications of a producer, the newest publication first.

    Args:
        answers: The publications.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        """See :class:`~kvcs.kvsp.http.holder.BlockHolder`."""
        best: _PublishedBlock | None = None
        for held in reversed(self._answers.publications):
            if (held.name.scope_id, held.name.compatibility_id) != (
                name.scope_id,
                name.compatibility_id,
            ) or publication not in (None, held.name.publication_id):
                continue
            block = _block_of(held, name.block_key)
            if block is not None and (best is None or block.layers > best.layers):
                best = block
                if best.layers == held.layout.layers:
                    break
        return best


@dataclass(frozen=True, slots=True)
class _PublishedBlock:
    """A block of a segment."""

    publication: Publication
    segment: Segment
    index: int
    encoding: Encoding

    @property
    def identity(self) -> bytes:
        """The publication and the position: what was published is never changed."""
        position = self.segment.first_block + self.index
        return self.publication.name.publication_id + position.to_bytes(4, "big")

    @property
    def layout(self) -> Layout:
        return self.publication.layout

    @property
    def layers(self) -> int:
        """How many layers are there, counted from the first."""
        return self.segment.next_layer

    def has(self, layer: int) -> bool:
        return 0 <= layer < self.layers

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        if self.publication.is_sealed:
            return None
        tracks = self.publication.tracks
        parts: list[Octets] = []
        for track in self.encoding.tracks(self.segment.number):
            data = _data(tracks[track.name], layer, self.index)
            if data is None:
                return None
            if track.component is Component.KV:
                return self.layout.split(data)
            parts.append(data)
        k, v = parts
        return k, v


class _SealedBlock(_PublishedBlock):
    """A block of a segment whose Objects are sealed."""

    __slots__ = ()

    async def read_sealed(self, layer: int) -> SealedLayer | None:
        publication, segment = self.publication, self.segment
        tracks = publication.tracks
        objects = tuple(
            _payload(tracks[track.name], layer, self.index)
            for track in self.encoding.tracks(segment.number)
        )
        if any(payload is None for payload in objects):
            return None
        return SealedLayer(
            anchor_key=publication.name.anchor_key,
            publication_id=publication.name.publication_id,
            segment=segment.number,
            index=self.index,
            priority=publisher_priority(layer, self.layout.layers),
            objects=tuple(payload for payload in objects if payload is not None),
        )


def _block_of(publication: Publication, key: bytes) -> _PublishedBlock | None:
    encoding = next((one for one in publication.encodings if one.codec == "raw"), None)
    if encoding is None:
        return None
    for segment in publication.segments:
        if (index := segment.index_of(key)) is not None:
            made = _SealedBlock if publication.is_sealed else _PublishedBlock
            return made(publication, segment, index, encoding)
    return None


def _data(track: LocalTrack, layer: int, index: int) -> Octets | None:
    """Return the Data of an Object, without its header; ``None`` if it was let go."""
    if (obj := _object(track, layer, index)) is None:
        return None
    if len(obj.parts) == 2 and len(obj.parts[0]) == HEADER_OCTETS:
        return obj.parts[1]  # as it was published: the header by itself
    return memoryview(b"".join(obj.parts))[HEADER_OCTETS:]


def _payload(track: LocalTrack, layer: int, index: int) -> Octets | None:
    """Return the payload of an Object as it was published; ``None`` if it was let go."""
    obj = _object(track, layer, index)
    if obj is None:
        return None
    return obj.parts[0] if len(obj.parts) == 1 else b"".join(obj.parts)


def _object(track: LocalTrack, layer: int, index: int) -> LocalObject | None:
    found = track.objects_from(layer, index, 1)
    if not found:
        return None
    _, obj = found[0]
    if obj.object_id != index or obj.status is not ObjectStatus.NORMAL or obj.dropped:
        return None
    return obj
