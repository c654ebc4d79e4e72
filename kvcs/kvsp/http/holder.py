"""What a block service serves from: whoever holds blocks, in memory, on disk or elsewhere.

No event loop is known here. A holder that waits for a disk does so in a thread of its own.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import Protocol, runtime_checkable

import numpy as np

from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.sealed import SealedLayer
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Layout, Octets
from kvcs.store.source import BlockSource


class HeldBlock(Protocol):
    """One block, or as much of it as is held."""

    @property
    def identity(self) -> bytes | None:
        """What digests are remembered under: the same only for what has the same octets.

        ``None`` has them computed for every request.
        """
        ...

    @property
    def layout(self) -> Layout:
        """How many layers there are, and how long their sections are."""
        ...

    def has(self, layer: int) -> bool:
        """Say whether K and V of a layer are there; False for a layer that does not exist."""
        ...

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        """Return the K and the V section of a layer, raw; ``None`` if they are gone by now.

        Whoever gets them may keep them as long as an answer takes: they do not change.
        """
        ...


@runtime_checkable
class SealedBlock(Protocol):
    """A held block of a scope that seals: nothing of it can be read in clear."""

    async def read_sealed(self, layer: int) -> SealedLayer | None:
        """Return a layer as it was sealed; ``None`` if it is not there, or gone by now."""
        ...


class BlockHolder(Protocol):
    """Finds blocks."""

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        """Return a block, the one with the most layers where it is held several times.

        Args:
            name: Which block.
            publication: A Publication ID that it must be of, if given.
        """
        ...


class MemoryHolder:
    """Blocks in memory, added by hand or from a source. What was added does not change."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[BlockName, bytes | None], _InMemory] = {}
        self._serial = count()

    def add(
        self,
        name: BlockName,
        layout: Layout,
        layer: int,
        k: Octets,
        v: Octets,
        *,
        publication: bytes | None = None,
    ) -> None:
        """Add one layer of a block.

        Args:
            name: Which block.
            layout: The descriptor's.
            layer: From 0.
            k: Its K section, raw. It must not change any more, like ``v``.
            v: Its V section.
            publication: Which publication it is of, if that should make a difference.

        Raises:
            ValueError: If there is no such layer, a section has another length, or the layer
                was added before.
        """
        if not 0 <= layer < layout.layers:
            raise ValueError(f"layer {layer} of {layout.layers}")
        if (len(k), len(v)) != (layout.k_octets, layout.v_octets):
            expected = f"{layout.k_octets} and {layout.v_octets}"
            raise ValueError(f"sections of {len(k)} and {len(v)} octets, expected {expected}")
        held = self._blocks.get((name, publication))
        if held is None:
            serial = next(self._serial).to_bytes(8, "big")
            held = self._blocks[name, publication] = _InMemory(layout, serial)
        held.add(layer, k, v)

    def add_source(self, scope_key: ScopeKey, source: BlockSource) -> list[BlockName]:
        """Add every whole block of a source; return their names, in order."""
        descriptor, layout = source.descriptor, Layout.of(source.descriptor)
        compatibility_id = scope_key.compatibility_id(descriptor)
        names = [
            BlockName(scope_key.scope_id, compatibility_id, key)
            for key in scope_key.block_keys(descriptor, source.tokens)
        ]
        for layer, k, v in source.layers(0, len(names)):
            sections = [
                np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes() for array in (k, v)
            ]
            for index, name in enumerate(names):
                self.add(
                    name,
                    layout,
                    layer,
                    *(
                        octets[index * each : (index + 1) * each]
                        for octets, each in zip(
                            sections, (layout.k_octets, layout.v_octets), strict=True
                        )
                    ),
                )
        return names

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        """See :class:`BlockHolder`."""
        if publication is not None:
            return self._blocks.get((name, publication))
        found = [held for (other, _), held in self._blocks.items() if other == name]
        return max(found, key=_InMemory.count, default=None)


class _InMemory:
    """A block of a :class:`MemoryHolder`."""

    def __init__(self, layout: Layout, serial: bytes) -> None:
        self.layout = layout
        self._serial = serial
        self._layers: dict[int, tuple[Octets, Octets]] = {}

    @property
    def identity(self) -> bytes:
        return self._serial

    def add(self, layer: int, k: Octets, v: Octets) -> None:
        if layer in self._layers:
            raise ValueError(f"layer {layer} was added before")
        self._layers[layer] = k, v

    def count(self) -> int:
        return len(self._layers)

    def has(self, layer: int) -> bool:
        return layer in self._layers

    async def read(self, layer: int) -> tuple[Octets, Octets] | None:
        return self._layers.get(layer)


def digest_of(sections: Sequence[Octets]) -> bytes:
    """Return SHA-256 over sections, one after the other: the layer digest of K and V."""
    digest = sha256()
    for section in sections:
        digest.update(section)
    return digest.digest()
