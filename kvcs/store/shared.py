"""Sinks that several processes place into at once, through memory that all of them map.

The one that began the sink tells the others which file it is: a tensor file, on a disk or in memory
only. They open it by its path, and write to other places than it does.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.store.sink import DEFAULT_LIMIT_OCTETS, ArraySink, BlockSink, Places, specs_of, tensors_of
from kvcs.store.tensorfile import TensorFile


@runtime_checkable
class SharedSink(BlockSink, Protocol):
    """A sink that other processes can place into."""

    def share(self) -> Path:
        """Return the tensor file, for processes of the same user, from ``begin`` to the end.

        Raises:
            ValueError: Before and after that.
        """
        ...


class SharedArraySink(ArraySink):
    """Tensors in memory that other processes can map: ``k[layer]``, ``v[layer]``.

    Args:
        limit_octets: Most that is allocated.

    Attributes:
        k: The arrays, once begun; they stay valid as long as they live.
        v: The arrays, once begun.
        complete: Whether everything has been placed.
    """

    def __init__(self, *, limit_octets: int = DEFAULT_LIMIT_OCTETS) -> None:
        super().__init__(limit_octets=limit_octets)
        self._file: TensorFile | None = None

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        """Allocate. See :meth:`BlockSink.begin`."""
        self._close()
        layout = Layout.of(descriptor)
        octets = blocks * layout.container_octets
        if octets > self._limit:
            raise ConfigError(f"the cache takes {octets} octets, limit {self._limit}")
        self._file = TensorFile.in_memory(specs_of(descriptor, blocks))
        self.k, self.v = tensors_of(self._file, layout.layers)
        self._places = Places(layout, blocks, self.k, self.v)

    def share(self) -> Path:
        """Return the file that the arrays are. See :meth:`SharedSink.share`."""
        if self._file is None:
            raise ValueError("share() before begin(), or after the end")
        return self._file.path

    def done(self) -> None:
        """Note that the arrays are whole."""
        super().done()
        self._close()

    def abandon(self) -> None:
        """Let nobody else place any more; what was placed stays in the arrays."""
        super().abandon()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class SharedPlaces:
    """The places of a sink that another process has begun. Close it at the end.

    Args:
        path: What its ``share`` returned.
        descriptor: What it was begun with.
        blocks: What it was begun with.

    Raises:
        ConfigError: If the file cannot be opened, or is not one of such a cache.
    """

    def __init__(self, path: str | Path, descriptor: Descriptor, blocks: int) -> None:
        self._file = TensorFile.open(path, writable=True)
        if self._file.specs != specs_of(descriptor, blocks):
            self._file.close()
            raise ConfigError(f"{path} is not the file of a cache of {blocks} blocks")
        layout = Layout.of(descriptor)
        self._places = Places(layout, blocks, *tensors_of(self._file, layout.layers))

    def put(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Copy one tensor to its place. See :meth:`BlockSink.place`."""
        self._places.put(component, layer, block, tensor)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
