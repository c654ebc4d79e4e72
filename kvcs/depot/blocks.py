"""StoredBlocks: what a block service serves of what a store holds whole. Pure.

Of a scope that seals, the Objects as they were sealed, and nothing in clear (decision 17).

Only raw tracks have the sections of a container (KVSP Section 4), K and V apart or together. Every
section is read from the disk when it is asked for, and checked.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvcs.depot.chains import Chain
from kvcs.errors import NotFound
from kvcs.kvsp.http.holder import HeldBlock
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.sealed import SealedLayer
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.profile.naming import DataTrack, PublicationName, publisher_priority
from kvcs.profile.payload import HEADER_OCTETS
from moqt.location import Location

#: Blocks that are found by their keys, at some 300 octets of memory each.
MAX_BLOCKS = 262_144

#: Reads the payload of an Object, as ``Depot.read`` does.
Read = Callable[[PublicationName, bytes, Location], Awaitable[bytes]]


class StoredBlocks:
    """Finds blocks among the publications of a store, the one that was known last first.

    Args:
        read: Reads payloads.
        sealed: Whether the scope seals.
        max_blocks: Blocks that are found at most.
    """

    def __init__(self, read: Read, *, sealed: bool = False, max_blocks: int = MAX_BLOCKS) -> None:
        self._read = read
        self._made = _SealedBlock if sealed else _StoredBlock
        self._max_blocks = max_blocks
        self._chains: dict[PublicationName, Chain] = {}
        self._by_key: dict[tuple[bytes, bytes], dict[PublicationName, int]] = {}
        self._blocks = 0

    def put(self, chain: Chain) -> bool:
        """Have the blocks of a publication found from now on; return whether there is room."""
        self.remove(chain.name)
        if self._blocks + len(chain.keys) > self._max_blocks:
            return False
        self._chains[chain.name] = chain
        self._blocks += len(chain.keys)
        for index, key in enumerate(chain.keys):
            self._by_key.setdefault((chain.name.compatibility_id, key), {})[chain.name] = index
        return True

    def remove(self, name: PublicationName) -> None:
        """Find nothing of a publication any more."""
        chain = self._chains.pop(name, None)
        if chain is None:
            return
        self._blocks -= len(chain.keys)
        for key in chain.keys:
            place = name.compatibility_id, key
            found = self._by_key[place]
            del found[name]
            if not found:
                del self._by_key[place]

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        """See :class:`~kvcs.kvsp.http.holder.BlockHolder`."""
        found = self._by_key.get((name.compatibility_id, name.block_key), {})
        for held, index in reversed(found.items()):
            if held.scope_id != name.scope_id or publication not in (None, held.publication_id):
                continue
            chain = self._chains[held]
            part, object_id = chain.part_of(index)
            if part.tracks:
                position = part.first_block + object_id
                return self._made(chain, part.tracks, object_id, position, self._read)
        return None


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    """A block of a publication that is held whole."""

    chain: Chain
    tracks: tuple[DataTrack, ...]
    object_id: int
    position: int
    reader: Read

    @property
    def identity(self) -> bytes:
        """The publication and the position: what was kept is never changed."""
        return self.chain.name.publication_id + self.position.to_bytes(4, "big")

    @property
    def layout(self) -> Layout:
        return self.chain.layout

    def has(self, layer: int) -> bool:
        return 0 <= layer < self.layout.layers

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        payloads = await self.payloads(layer)
        if payloads is None:
            return None
        parts: list[Octets] = []
        for track, payload in zip(self.tracks, payloads, strict=True):
            data = memoryview(payload)[HEADER_OCTETS:]
            if len(data) != self.layout.section_octets(track.component):
                return None
            if track.component is Component.KV:
                return self.layout.split(data)
            parts.append(data)
        k, v = parts
        return k, v

    async def payloads(self, layer: int) -> tuple[bytes, ...] | None:
        """Return the Objects of a layer as they were published; None if they are not all there."""
        place = Location(layer, self.object_id)
        try:
            return tuple(
                [await self.reader(self.chain.name, track.name, place) for track in self.tracks]
            )
        except NotFound:  # damaged, or let go meanwhile
            return None


class _SealedBlock(_StoredBlock):
    """A block of a publication that is held whole, and sealed."""

    __slots__ = ()

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        return None  # nothing in clear

    async def read_sealed(self, layer: int) -> SealedLayer | None:
        objects = await self.payloads(layer)
        if objects is None:
            return None
        return SealedLayer(
            anchor_key=self.chain.name.anchor_key,
            publication_id=self.chain.name.publication_id,
            segment=self.tracks[0].segment,
            index=self.object_id,
            priority=publisher_priority(layer, self.layout.layers),
            objects=objects,
        )
