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

    They all map it as it was at the beginning, so it grows up to ``reserve_blocks`` and no further.
    Memory that nothing was placed in yet takes no room.

    Args:
        limit_octets: Most that is allocated.
        reserve_blocks: Blocks that there is to be room for.

    Attributes:
        k: The arrays, once begun; they stay valid as long as they live.
        v: The arrays, once begun.
        complete: Whether everything has been placed.
    """

    def __init__(
        self, *, limit_octets: int = DEFAULT_LIMIT_OCTETS, reserve_blocks: int = 0
    ) -> None:
        super().__init__(limit_octets=limit_octets, reserve_blocks=reserve_blocks)
        self._file: TensorFile | None = None

    def _allocate(
        self, descriptor: Descriptor, blocks: int
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        self._close()
        self._file = TensorFile.in_memory(specs_of(descriptor, blocks))
        return tensors_of(self._file, descriptor.layers)

    def _enlarge(self, layout: Layout, blocks: int) -> None:
        raise ConfigError(
            f"memory shared with other processes has room for {self._capacity} blocks, more are "
            "needed: expected reserve_blocks to say how many there will be"
        )

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
        blocks: What it was begun with, or has grown to; it may have room for more.

    Raises:
        ConfigError: If the file cannot be opened, or is not one of such a cache.
    """

    def __init__(self, path: str | Path, descriptor: Descriptor, blocks: int) -> None:
        self._file = TensorFile.open(path, writable=True)
        specs = self._file.specs
        tokens = max((spec.shape[0] for spec in specs.values() if spec.shape), default=0)
        room = tokens // descriptor.block_tokens
        if room < blocks or specs != specs_of(descriptor, room):
            self._file.close()
            raise ConfigError(f"{path} is not the file of a cache of {blocks} blocks")
        layout = Layout.of(descriptor)
        # All that there is room for: the sink may grow while somebody places here.
        self._places = Places(layout, room, *tensors_of(self._file, layout.layers))

    def put(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Copy one tensor to its place. See :meth:`BlockSink.place`."""
        self._places.put(component, layer, block, tensor)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
