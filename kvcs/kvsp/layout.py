"""Where the octets of a block are: sections, containers, layer digests (KVSP Section 4).

Arithmetic over a descriptor, and nothing else. Lengths are in octets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from kvcs.kvsp.descriptor import ELEMENT_OCTETS, Descriptor

#: Octets as they are handed around: whole, or a view of somebody's buffer.
Octets = bytes | bytearray | memoryview


class Component(IntEnum):
    """What an Object carries of a layer: the numbers of KVCS Section 3.5."""

    #: The key tensor.
    K = 1
    #: The value tensor.
    V = 2
    #: Both, K first.
    KV = 3


_NUMPY: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy element type that a descriptor's ``dtype`` names.

    Raises:
        KeyError: If no descriptor can name it.
    """
    return _NUMPY[name]


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths, shapes and offsets of the blocks that one descriptor describes.

    A container holds, for each layer in order, the K section and then the V section.
    """

    layers: int
    block_tokens: int
    element_octets: int
    k_shape: tuple[int, int, int]
    """Shape of the K tensor of one block in one layer: tokens, heads, elements of a head."""
    v_shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    @staticmethod
    def of(descriptor: Descriptor) -> "Layout":
        """Return the layout of a descriptor. Cheap for descriptors seen before."""
        return _layout_of(descriptor)

    @property
    def k_octets(self) -> int:
        """Length of the K section of one layer of a block; 0 if there is none."""
        return prod(self.k_shape) * self.element_octets

    @property
    def v_octets(self) -> int:
        """Length of the V section of one layer of a block; 0 if there is none."""
        return prod(self.v_shape) * self.element_octets

    @property
    def layer_octets(self) -> int:
        """Length of one layer of a block, K and V."""
        return self.k_octets + self.v_octets

    @property
    def container_octets(self) -> int:
        """Length of the whole container of a block."""
        return self.layers * self.layer_octets

    def section_octets(self, component: Component) -> int:
        """Length of what ``component`` carries of one layer of a block, raw."""
        match component:
            case Component.K:
                return self.k_octets
            case Component.V:
                return self.v_octets
            case Component.KV:
                return self.layer_octets

    def shape(self, component: Component) -> tuple[int, ...]:
        """Shape of the tensor that ``component`` carries of one layer of a block.

        K and V are ``(block_tokens, heads, dim)``. Since their heads may differ, KV is flat:
        the elements of K, then those of V; :meth:`split` takes it apart.
        """
        match component:
            case Component.K:
                return self.k_shape
            case Component.V:
                return self.v_shape
            case Component.KV:
                return (prod(self.k_shape) + prod(self.v_shape),)

    def span(self, layer: int, component: Component) -> slice:
        """Where in a container the section (for KV: both sections) of a layer lies.

        Raises:
            IndexError: If the model has no such layer.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        start = layer * self.layer_octets
        if component is Component.V:
            start += self.k_octets
        return slice(start, start + self.section_octets(component))

    def split(self, section: Octets) -> tuple[memoryview, memoryview]:
        """Take the raw octets of one layer apart into K and V, without copying.

        Raises:
            ValueError: If the length is not :attr:`layer_octets`.
        """
        if len(section) != self.layer_octets:
            raise ValueError(f"layer of {len(section)} octets, expected {self.layer_octets}")
        view = memoryview(section)
        return view[: self.k_octets], view[self.k_octets :]

    def sections(self, container: Octets) -> Iterator[tuple[memoryview, memoryview]]:
        """Return K and V of each layer of a container in order, without copying.

        Raises:
            ValueError: If the length is not :attr:`container_octets`.
        """
        if len(container) != self.container_octets:
            found = f"container of {len(container)} octets"
            raise ValueError(f"{found}, expected {self.container_octets}")
        view = memoryview(container)
        return (self.split(view[self.span(i, Component.KV)]) for i in range(self.layers))


def layer_digest(k: Octets, v: Octets) -> bytes:
    """Return the digest of one block and layer: SHA-256 over the K, then the V section."""
    digest = sha256(k)
    digest.update(v)
    return digest.digest()


@lru_cache(maxsize=64)
def _layout_of(descriptor: Descriptor) -> Layout:
    return Layout(
        layers=descriptor.layers,
        block_tokens=descriptor.block_tokens,
        element_octets=ELEMENT_OCTETS[descriptor.dtype],
        k_shape=(descriptor.block_tokens, *descriptor.k_shape),
        v_shape=(descriptor.block_tokens, *descriptor.v_shape),
        dtype=numpy_dtype(descriptor.dtype),
    )
