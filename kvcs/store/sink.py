"""BlockSink: where the tensors of a retrieved cache land.

A sink is told once what will come, gets each tensor once, in any order, and is told how it
ended. It is called from one thread at a time.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.store.tensorfile import TensorFile, TensorSpec

T = TypeVar("T")

#: Octets that :class:`ArraySink` allocates when the caller provides no arrays.
DEFAULT_LIMIT_OCTETS = 8 << 30


@runtime_checkable
class BlockSink(Protocol):
    """What a retrieval asks of a sink."""

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        """Make room.

        Args:
            descriptor: The publication's descriptor: layers, shapes and element type.
            blocks: How many blocks of the context will be placed, from the first wanted on.

        Raises:
            ConfigError: If there is no room, or what the caller provided does not fit.
        """
        ...

    def place(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Take one verified tensor, and copy it: the memory is the caller's again afterwards.

        Args:
            component: K, V, or KV: the elements of K followed by those of V.
            layer: From 0.
            block: Counted from the first wanted block, below ``blocks`` of :meth:`begin`.
            tensor: The decoded tensor of the block: an array, or its raw octets.

        Raises:
            ValueError: If the length does not fit, or the place does not exist.
        """
        ...

    def done(self) -> None:
        """Everything has been placed."""
        ...

    def abandon(self) -> None:
        """Nothing more will be placed, and something is missing. Allowed after ``done``."""
        ...


@runtime_checkable
class GrowingSink(BlockSink, Protocol):
    """A sink that can take a context that grows (:attr:`kvcs.consumer.selection.Wish.follow`)."""

    def grow(self, blocks: int) -> None:
        """Make room for more blocks; those that were placed stay as they are.

        Args:
            blocks: How many there will be by now, from the first wanted on: never fewer than
                ``begin`` or the call before said.

        Raises:
            ConfigError: If there is no room. What was placed stays.
        """
        ...


class ArraySink:
    """Tensors in memory: ``k[layer]`` and ``v[layer]``, each ``[tokens, heads, dim]``.

    Where the context grows, so do they: look at ``k`` and ``v`` anew whenever a layer is ready.
    Arrays made here are then views of larger ones, which are doubled where they are full; one that
    was taken before stays as it was.

    Args:
        k: Arrays to write to, one for each layer, C-contiguous and of the descriptor's element
            type; ``tokens`` may be more than will come. Allocated if left out.
        v: The same for V. Either both are given or none, but for a cache without a V section.
        limit_octets: Most that is allocated here.
        reserve_blocks: Blocks that there is to be room for from the start, if the arrays are made
            here: up to that nothing is copied as the context grows.

    Attributes:
        k: The arrays, once begun.
        v: The arrays, once begun.
        complete: Whether everything has been placed.
    """

    def __init__(
        self,
        k: Sequence[NDArray[Any]] | None = None,
        v: Sequence[NDArray[Any]] | None = None,
        *,
        limit_octets: int = DEFAULT_LIMIT_OCTETS,
        reserve_blocks: int = 0,
    ) -> None:
        self.k: Sequence[NDArray[Any]] = () if k is None else k
        self.v: Sequence[NDArray[Any]] = () if v is None else v
        self.complete = False
        self._provided = k is not None or v is not None
        self._limit = limit_octets
        self._reserve = reserve_blocks
        self._capacity = 0
        """Blocks that there is room for in the arrays made here."""

        self._whole: tuple[list[NDArray[Any]], list[NDArray[Any]]] = [], []
        """Those arrays."""

        self._layout: Layout | None = None
        self._places: Places | None = None

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        """Allocate, or check what was provided. See :meth:`BlockSink.begin`."""
        self._layout = layout = Layout.of(descriptor)
        if not self._provided:
            self._check_limit(layout, blocks)
            self._capacity = self._bounded(layout, max(blocks, self._reserve))
            self._whole = self._allocate(descriptor, self._capacity)
        self._show(layout, blocks)

    def grow(self, blocks: int) -> None:
        """Make room for more, in larger arrays if need be. See :meth:`GrowingSink.grow`."""
        layout = _begun(self._layout)
        if not self._provided:
            self._check_limit(layout, blocks)
            if blocks > self._capacity:
                self._enlarge(layout, self._bounded(layout, max(blocks, 2 * self._capacity)))
        self._show(layout, blocks)

    def _allocate(
        self, descriptor: Descriptor, blocks: int
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        layout = Layout.of(descriptor)
        k, v = (
            [_empty(layout, shape, blocks) for _ in range(layout.layers)]
            for shape in (layout.k_shape, layout.v_shape)
        )
        return k, v

    def _enlarge(self, layout: Layout, blocks: int) -> None:
        """Move what is there to larger arrays, layer by layer: no more than one is there twice."""
        shown = list(self.k), list(self.v)
        self.k, self.v = shown
        for side, parts, shape in zip(
            self._whole, shown, (layout.k_shape, layout.v_shape), strict=True
        ):
            for layer, part in enumerate(parts):
                side[layer] = _empty(layout, shape, blocks)
                side[layer][: len(part)] = part
                parts[layer] = side[layer][: len(part)]
        self._capacity = blocks

    def _show(self, layout: Layout, blocks: int) -> None:
        """Have ``k`` and ``v`` be so many blocks long, and the places be theirs."""
        tokens = blocks * layout.block_tokens
        if self._provided:
            _check_provided("k", self.k, layout, layout.k_shape, tokens)
            _check_provided("v", self.v, layout, layout.v_shape, tokens)
        else:
            self.k, self.v = ([array[:tokens] for array in side] for side in self._whole)
        self._places = Places(layout, blocks, self.k, self.v)

    def _check_limit(self, layout: Layout, blocks: int) -> None:
        octets = blocks * layout.container_octets
        if octets > self._limit:
            raise ConfigError(f"the cache takes {octets} octets, limit {self._limit}")

    def _bounded(self, layout: Layout, blocks: int) -> int:
        """Return as many blocks as may be allocated, and no more than were asked for."""
        return min(blocks, self._limit // layout.container_octets)

    def place(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Copy one tensor to its place. See :meth:`BlockSink.place`."""
        _begun(self._places).put(component, layer, block, tensor)

    def done(self) -> None:
        """Note that the arrays are whole."""
        self.complete = True

    def abandon(self) -> None:
        """Nothing to do: what was placed stays in the arrays."""


class SafetensorsSink:
    """Tensors in a ``.safetensors`` file, and a JSON file beside it that says what they are.

    Written to a temporary file in the same folder, mapped into memory, and renamed when
    everything is there: a file of the final name is always whole. The JSON file has the
    members ``descriptor`` and, where they are known, ``tokens``, as
    :class:`~kvcs.store.source.SafetensorsSource` reads them.

    Args:
        path: The file; one that exists is replaced when the new one is whole.
        tokens: The tokens that the cache is of.
        notes: Further members of the JSON file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokens: Sequence[int] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._tokens = tokens
        self._notes = dict(notes or {})
        self._places: Places | None = None
        self._file: TensorFile | None = None
        self._side: dict[str, Any] = {}

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        """Make the temporary file. See :meth:`BlockSink.begin`."""
        self.abandon()
        layout = Layout.of(descriptor)
        tokens = blocks * layout.block_tokens
        # The random part keeps two processes that write the same file apart.
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        self._file = TensorFile.create(temporary, specs_of(descriptor, blocks))
        self._places = Places(layout, blocks, *tensors_of(self._file, layout.layers))
        self._side = {"descriptor": descriptor.members()}
        if self._tokens is not None:
            self._side["tokens"] = [int(token) for token in self._tokens[:tokens]]
        self._side |= self._notes

    def place(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Copy one tensor into the file. See :meth:`BlockSink.place`."""
        _begun(self._places).put(component, layer, block, tensor)

    def share(self) -> Path:
        """Return the temporary file. See :meth:`kvcs.store.shared.SharedSink.share`."""
        return _begun(self._file).path

    def done(self) -> None:
        """Give the file its name.

        Raises:
            ConfigError: If it cannot be written; the message names it.
        """
        if self._file is None:
            raise ValueError("done() before begin(), or after the end")
        temporary, side = self._file.path, self.path.with_suffix(".json")
        try:
            self._release()
            _sync(temporary)
            draft = side.with_name(f"{temporary.name}.json")
            draft.write_text(json.dumps(self._side, indent=1) + "\n")
            draft.replace(side)
            temporary.replace(self.path)
        except OSError as exc:
            raise ConfigError(f"{self.path}: {exc.strerror or exc}") from None

    def abandon(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            temporary = self._file.path
            self._release()
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _release(self) -> None:
        assert self._file is not None
        file, self._file, self._places = self._file, None, None
        file.close()


class GrowingSafetensorsSink(ArraySink):
    """A context that grows, in memory until it is whole, and then in a file.

    How long the tensors of a file are stands at its beginning, so it is written at the end, as a
    :class:`SafetensorsSink` writes it. ``tokens`` is left out of the JSON file where those that
    are known are fewer than those that came.

    Args:
        path: The file; one that exists is replaced when the new one is whole.
        tokens: The tokens that are known.
        limit_octets: Most that is allocated.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokens: Sequence[int] = (),
        limit_octets: int = DEFAULT_LIMIT_OCTETS,
    ) -> None:
        super().__init__(limit_octets=limit_octets)
        self._path, self._tokens = path, tokens
        self._descriptor: Descriptor | None = None
        self._blocks = 0

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        """Allocate. See :meth:`BlockSink.begin`."""
        self._descriptor, self._blocks = descriptor, blocks
        super().begin(descriptor, blocks)

    def grow(self, blocks: int) -> None:
        """Make room for more. See :meth:`GrowingSink.grow`."""
        super().grow(blocks)
        self._blocks = blocks

    def done(self) -> None:
        """Write the file.

        Raises:
            ConfigError: If it cannot be written; the message names it.
        """
        descriptor = _begun(self._descriptor)
        size = descriptor.block_tokens
        known = self._tokens if len(self._tokens) >= self._blocks * size else None
        file = SafetensorsSink(self._path, tokens=known)
        try:
            file.begin(descriptor, self._blocks)
            for component, side in ((Component.K, self.k), (Component.V, self.v)):
                for layer, array in enumerate(side):
                    for block in range(self._blocks):
                        file.place(component, layer, block, array[block * size :][:size])
            file.done()
        except BaseException:
            file.abandon()
            raise
        super().done()


class Places:
    """The arrays of all layers, seen as octets, block by block.

    Args:
        layout: Of the descriptor.
        blocks: How many blocks there is room for.
        k: K of each layer, C-contiguous.
        v: V of each layer.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: int,
        k: Sequence[NDArray[Any]],
        v: Sequence[NDArray[Any]],
    ) -> None:
        self._layout = layout
        self._blocks = blocks
        self._k, self._v = ([_octets(array) for array in side] for side in (k, v))

    def put(
        self, component: Component, layer: int, block: int, tensor: NDArray[Any] | Octets
    ) -> None:
        """Copy one tensor to its place; see :meth:`BlockSink.place`.

        Raises:
            ValueError: If the length does not fit, or the place does not exist.
        """
        if not (0 <= layer < self._layout.layers and 0 <= block < self._blocks):
            raise ValueError(
                f"layer {layer}, block {block}: there are {self._layout.layers} layers "
                f"and {self._blocks} blocks"
            )
        octets = _octets(tensor) if isinstance(tensor, np.ndarray) else memoryview(tensor)
        if component is Component.KV:
            k, v = self._layout.split(octets)
            self._copy(self._k, layer, block, k, self._layout.k_octets)
            self._copy(self._v, layer, block, v, self._layout.v_octets)
        elif component is Component.K:
            self._copy(self._k, layer, block, octets, self._layout.k_octets)
        else:
            self._copy(self._v, layer, block, octets, self._layout.v_octets)

    @staticmethod
    def _copy(
        side: list[memoryview], layer: int, block: int, octets: memoryview, section: int
    ) -> None:
        if len(octets) != section:
            raise ValueError(f"section of {len(octets)} octets, expected {section}")
        if section:
            side[layer][block * section : (block + 1) * section] = octets


def specs_of(descriptor: Descriptor, blocks: int) -> dict[str, TensorSpec]:
    """Return the tensors of a cache of so many blocks, by their names in a file."""
    layout = Layout.of(descriptor)
    tokens = blocks * layout.block_tokens
    return {
        f"{name}.{layer}": TensorSpec(descriptor.dtype, (tokens, *shape[1:]))
        for name, shape in (("k", layout.k_shape), ("v", layout.v_shape))
        for layer in range(layout.layers)
    }


def tensors_of(file: TensorFile, layers: int) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return K and V of every layer of a file made of :func:`specs_of`."""
    k, v = ([file.tensor(f"{name}.{layer}") for layer in range(layers)] for name in "kv")
    return k, v


def _empty(layout: Layout, shape: tuple[int, int, int], blocks: int) -> NDArray[Any]:
    return np.empty((blocks * layout.block_tokens, *shape[1:]), layout.dtype)


def _begun(what: T | None) -> T:
    if what is None:
        raise ValueError("a tensor before begin(), or after the end")
    return what


def _octets(array: NDArray[Any]) -> memoryview:
    """Return a C-contiguous array as octets, without copying it; otherwise a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _check_provided(
    name: str,
    arrays: Sequence[NDArray[Any]],
    layout: Layout,
    shape: tuple[int, int, int],
    tokens: int,
) -> None:
    if not any(shape[1:]) and len(arrays) == 0:
        return
    if len(arrays) != layout.layers:
        raise ConfigError(f"{name}: {len(arrays)} arrays were provided for {layout.layers} layers")
    for layer, array in enumerate(arrays):
        found = f"{name}.{layer} is {array.dtype} {list(array.shape)}"
        expected = f"expected {layout.dtype} {[tokens, *shape[1:]]}"
        if array.ndim != 3 or array.shape[1:] != shape[1:] or array.shape[0] < tokens:
            raise ConfigError(f"{found}, {expected}")
        if array.dtype != layout.dtype:
            raise ConfigError(f"{found}, {expected}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ConfigError(f"{found}, but not writable memory in C order")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
