"""BlockSource: a cache that can be published, and what it is the cache of.

A source hands out one layer at a time, for the blocks it is asked for, so that a cache larger
than memory can be published, and so that several passes over the layers (chunked prefill) can be
played back. It says at which pace its layers become ready; it does not wait itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadDescriptor, ConfigError
from kvcs.kvsp import strictjson
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import MAX_TOKEN
from kvcs.kvsp.layout import Layout, numpy_dtype
from kvcs.store.tensorfile import TensorFile, TensorSpec

#: Octets of the JSON file beside a tensor file: a million tokens, and room for notes.
MAX_SIDE_OCTETS = 64 << 20
MAX_SIDE_VALUES = 1 << 23
MAX_SIDE_DEPTH = 32


class Layer(NamedTuple):
    """K and V of one layer, ``[tokens, heads, dim]`` each. Valid until the next one is taken."""

    layer: int
    k: NDArray[Any]
    v: NDArray[Any]


@runtime_checkable
class BlockSource(Protocol):
    """What a producer asks of a source."""

    @property
    def descriptor(self) -> Descriptor:
        """What must match before the cache can be used."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens that the cache is of, whole blocks and what is left after them."""
        ...

    @property
    def ready_at_s(self) -> Sequence[float]:
        """Seconds from the start of a pass until each layer is ready; empty for at once."""
        ...

    def layers(self, first_block: int, blocks: int) -> Iterator[Layer]:
        """Yield every layer in order, for ``blocks`` blocks from ``first_block`` on."""
        ...


class ArraySource:
    """A cache in memory.

    Args:
        descriptor: Its Compatibility Descriptor.
        tokens: The tokens it is of.
        k: One array for each layer, ``[tokens, heads, dim]``, of the descriptor's element type.
        v: The same for V; may be left out if there is no V section.
        ready_at_s: See :attr:`BlockSource.ready_at_s`.

    Raises:
        ConfigError: If an array does not fit; the message names it, and what was expected.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        tokens: Sequence[int],
        k: Sequence[NDArray[Any]],
        v: Sequence[NDArray[Any]] = (),
        *,
        ready_at_s: Sequence[float] = (),
    ) -> None:
        self.descriptor = descriptor
        self.tokens = tokens
        self.ready_at_s = ready_at_s
        layout = Layout.of(descriptor)
        _check_pace(ready_at_s, layout.layers)
        if len(v) == 0 and not layout.v_octets:
            v = [np.empty((len(tokens), 0, 0), layout.dtype)] * layout.layers
        for name, side, shape in (("k", k, layout.k_shape), ("v", v, layout.v_shape)):
            if len(side) != layout.layers:
                raise ConfigError(f"{name}: {len(side)} arrays for {layout.layers} layers")
            expected = (len(tokens), *shape[1:])
            for layer, array in enumerate(side):
                if array.shape != expected or array.dtype != layout.dtype:
                    raise ConfigError(
                        f"{name}.{layer} is {array.dtype} {list(array.shape)}, "
                        f"expected {layout.dtype} {list(expected)}"
                    )
        self._k, self._v = k, v

    def layers(self, first_block: int, blocks: int) -> Iterator[Layer]:
        """Yield views of the arrays. See :meth:`BlockSource.layers`."""
        part = _part(self, first_block, blocks)
        for layer, (k, v) in enumerate(zip(self._k, self._v, strict=True)):
            yield Layer(layer, k[part], v[part])


class SafetensorsSource:
    """A ``.safetensors`` file with tensors ``k.LAYER`` and ``v.LAYER``, mapped into memory.

    Beside it lies a JSON file of the same name with the members ``descriptor`` and ``tokens``;
    other members are ignored. Every tensor is ``[tokens, heads, dim]``.

    Args:
        path: The tensor file.
        side: The JSON file, if it has another name.
        ready_at_s: See :attr:`BlockSource.ready_at_s`.

    Raises:
        ConfigError: If a file is missing or not what it should be, or if a tensor contradicts
            the descriptor; the message names file and tensor, and what was expected.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        side: str | Path | None = None,
        ready_at_s: Sequence[float] = (),
    ) -> None:
        self.path = Path(path)
        self._file = TensorFile.open(self.path)
        self.descriptor, self.tokens = _read_side(
            self.path.with_suffix(".json") if side is None else Path(side)
        )
        self._layout = Layout.of(self.descriptor)
        self.ready_at_s = ready_at_s
        _check_pace(ready_at_s, self._layout.layers)
        self._check()

    def layers(self, first_block: int, blocks: int) -> Iterator[Layer]:
        """Yield views of the mapped file; octets are read when they are used."""
        part = _part(self, first_block, blocks)
        nothing = np.empty((len(self.tokens), 0, 0), self._layout.dtype)
        for layer in range(self._layout.layers):
            k, v = (
                self._file.tensor(name) if name in self._file else nothing
                for name in (f"k.{layer}", f"v.{layer}")
            )
            yield Layer(layer, k[part], v[part])

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _check(self) -> None:
        layout, count = self._layout, len(self.tokens)
        expected = {
            f"{name}.{layer}": TensorSpec(self.descriptor.dtype, (count, *shape[1:]))
            for name, shape in (("k", layout.k_shape), ("v", layout.v_shape))
            for layer in range(layout.layers)
        }
        for name, spec in expected.items():
            found = self._file.specs.get(name)
            if found is None and spec.octets:
                raise ConfigError(f"{self.path}: no tensor {name!r}, expected {spec}")
            if found is not None and found != spec:
                raise ConfigError(f"{self.path}: tensor {name!r} is {found}, expected {spec}")
        if unknown := [name for name in self._file if name not in expected]:
            raise ConfigError(
                f"{self.path}: tensor {unknown[0]!r} is not one of the descriptor's "
                f"{layout.layers} layers"
            )


#: A shape in numbers.
_NUMBERS = re.compile(
    r"(?P<layers>\d{1,9}),(?P<heads>\d{1,9}),(?P<dim>\d{1,9})(,(?P<dtype>\w+))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a model's cache."""

    layers: int
    k_shape: tuple[int, int]
    v_shape: tuple[int, int]
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> "ModelShape":
        """Return the shape that a person means: a name, or numbers.

        Args:
            text: One of :data:`MODEL_SHAPES`, or ``LAYERS,HEADS,DIM`` for K and V alike, and
                behind it ``,DTYPE`` where the element type is not bfloat16.

        Raises:
            ConfigError: If it is neither; the message tells what could be said.
        """
        if (known := MODEL_SHAPES.get(text)) is not None:
            return known
        match = _NUMBERS.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"no shape of model {text!r}; known are {', '.join(MODEL_SHAPES)}, and "
                "LAYERS,HEADS,DIM[,DTYPE] such as 32,8,128,bfloat16"
            )
        heads = int(match["heads"]), int(match["dim"])
        return cls(int(match["layers"]), heads, heads, match["dtype"] or "bfloat16")

    def descriptor(self, name: str, *, block_tokens: int = 16, seed: int = 0) -> Descriptor:
        """Return the descriptor of a synthetic cache of this shape.

        Args:
            name: What the model is called.
            block_tokens: Tokens of a block.
            seed: What its numbers follow from.

        Raises:
            BadDescriptor: If there can be no such cache; the message names the member.
        """
        return Descriptor(
            model=f"synthetic/{name}",
            revision=f"seed-{seed}",
            layers=self.layers,
            block_tokens=block_tokens,
            dtype=self.dtype,
            k_shape=self.k_shape,
            v_shape=self.v_shape,
        )


#: Shapes of caches of well-known models, for measurements and demonstrations.
MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape(32, (8, 128), (8, 128)),
        "llama-3.3-70b": ModelShape(80, (8, 128), (8, 128)),
        "qwen3-8b": ModelShape(36, (8, 128), (8, 128)),
        "qwen3-32b": ModelShape(64, (8, 128), (8, 128)),
        "mistral-7b": ModelShape(32, (8, 128), (8, 128)),
        "phi-4": ModelShape(40, (10, 128), (10, 128)),
        "gemma-3-12b": ModelShape(48, (8, 256), (8, 256)),
        "gemma-3-27b": ModelShape(62, (16, 128), (16, 128)),
        "gpt-oss-20b": ModelShape(24, (8, 64), (8, 64)),
        "gpt-oss-120b": ModelShape(36, (8, 64), (8, 64)),
        "deepseek-v3": ModelShape(61, (1, 512), (1, 64)),
        "smollm2-135m": ModelShape(30, (3, 64), (3, 64)),
    }
)


class SyntheticSource:
    """A cache of any shape, made of numbers that look like noise and follow from a seed.

    The octets of a block depend on the seed, the layer and the block alone: two sources of
    one seed have identical caches, in whichever segments they are read.

    Args:
        descriptor: Shape and element type. See :meth:`of_model` for well-known ones.
        tokens: How many tokens; which ones follows from the seed.
        seed: Any integer of 64 bits.
        layer_interval_s: Seconds from one layer to the next; 0 for all at once.

    Raises:
        ConfigError: If there are no tokens, or the interval is negative.
    """

    def __init__(
        self, descriptor: Descriptor, tokens: int, *, seed: int = 0, layer_interval_s: float = 0.0
    ) -> None:
        if tokens < 1:
            raise ConfigError(f"tokens is {tokens}, expected at least 1")
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed is {seed}, expected 0 to 2**64 - 1")
        if layer_interval_s < 0:
            raise ConfigError(f"layer_interval_s is {layer_interval_s}, expected at least 0")
        self.descriptor = descriptor
        self.seed = seed
        self._mask = _finite(descriptor.dtype)
        self.tokens: Sequence[int] = (
            np.random.Generator(np.random.PCG64([seed, 1])).integers(0, 32_000, tokens).tolist()
        )
        self.ready_at_s: Sequence[float] = (
            tuple(accumulate([layer_interval_s] * descriptor.layers)) if layer_interval_s else ()
        )

    @classmethod
    def of_model(
        cls,
        name: str,
        tokens: int,
        *,
        block_tokens: int = 16,
        seed: int = 0,
        layer_interval_s: float = 0.0,
    ) -> "SyntheticSource":
        """Make a source of a model's shape.

        Args:
            name: A name or numbers; see :meth:`ModelShape.parse`.
            tokens: How many.
            block_tokens: Tokens of a block.
            seed: See the class, as for the next one.
            layer_interval_s: Seconds from one layer to the next.

        Raises:
            ConfigError: If no such model is known here; the message tells which are.
            BadDescriptor: If there can be no cache of such numbers.
        """
        descriptor = ModelShape.parse(name).descriptor(name, block_tokens=block_tokens, seed=seed)
        return cls(descriptor, tokens, seed=seed, layer_interval_s=layer_interval_s)

    def layers(self, first_block: int, blocks: int) -> Iterator[Layer]:
        """Make the layers, one after the other. See :meth:`BlockSource.layers`."""
        _part(self, first_block, blocks)
        layout = Layout.of(self.descriptor)
        tokens = blocks * layout.block_tokens
        for layer in range(layout.layers):
            k = np.empty((blocks, layout.k_octets), np.uint8)
            v = np.empty((blocks, layout.v_octets), np.uint8)
            for index in range(blocks):
                octets = self._octets(layer, first_block + index, layout.layer_octets)
                k[index], v[index] = octets[: layout.k_octets], octets[layout.k_octets :]
            yield Layer(
                layer,
                k.reshape(-1).view(layout.dtype).reshape(tokens, *layout.k_shape[1:]),
                v.reshape(-1).view(layout.dtype).reshape(tokens, *layout.v_shape[1:]),
            )

    def _octets(self, layer: int, block: int, count: int) -> NDArray[np.uint8]:
        words = np.random.PCG64([self.seed, 2, layer, block]).random_raw(-(-count // 8))
        words &= self._mask
        return words.view(np.uint8)[:count]


def _finite(dtype: str) -> np.uint64:
    """Return what eight octets are masked with, so that no element is infinite or no number.

    It clears the highest bit of the exponent, which is bit 6 of an element's last octet in
    every type with an exponent; what is left is below 2 in magnitude.
    """
    size = numpy_dtype(dtype).itemsize
    last = b"\xbf" if "float" in dtype else b"\xff"
    return np.uint64(int.from_bytes((b"\xff" * (size - 1) + last) * (8 // size), "little"))


def _part(source: BlockSource, first_block: int, blocks: int) -> slice:
    """Return which tokens the blocks cover, or refuse blocks that the source does not have."""
    size = source.descriptor.block_tokens
    whole = len(source.tokens) // size
    if first_block < 0 or blocks < 1 or first_block + blocks > whole:
        raise ConfigError(
            f"blocks {first_block} to {first_block + blocks - 1} of a source with {whole} blocks"
        )
    return slice(first_block * size, (first_block + blocks) * size)


def _check_pace(ready_at_s: Sequence[float], layers: int) -> None:
    if len(ready_at_s) not in (0, layers):
        raise ConfigError(f"ready_at_s has {len(ready_at_s)} times for {layers} layers")


def _read_side(path: Path) -> tuple[Descriptor, Sequence[int]]:
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_SIDE_OCTETS + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from None
    try:
        members = strictjson.loads(
            text, octets=MAX_SIDE_OCTETS, depth=MAX_SIDE_DEPTH, values=MAX_SIDE_VALUES
        )
    except strictjson.StrictJsonError as exc:
        raise ConfigError(f"{path}: not acceptable JSON: {exc}") from None
    match members:
        case {"descriptor": dict(descriptor), "tokens": list(tokens)}:
            pass
        case _:
            raise ConfigError(f"{path}: expected the members 'descriptor' and 'tokens'")
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise ConfigError(f"{path}: token {position} is {token!r:.40}, expected 0 to 2**32 - 1")
    try:
        return Descriptor.from_json(descriptor), tokens
    except BadDescriptor as exc:
        raise ConfigError(f"{path}: {exc}") from None
