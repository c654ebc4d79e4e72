"""What ``kvcs bench`` transfers: a cache that both ends know by a few flags."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import Codec
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Layout
from kvcs.store.source import Layer, ModelShape, SyntheticSource

#: Tokens of a block, if nothing is said.
BLOCK_TOKENS = 16
#: MB of the cache, if nothing is said.
MEGABYTES = 64.0
#: How far the channels of a head differ in size, as the spread of a logarithm: so that the lossless
#: codecs find in the noise what they find in the cache of a real model.
_SPREAD = 1.0


@dataclass(frozen=True, slots=True)
class BenchCache:
    """A cache of a model's shape, and the codec that it is offered in."""

    model: str
    """The shape, as it was asked for."""

    megabytes: float
    """The size, as it was asked for."""

    descriptor: Descriptor
    tokens: int
    codec: Codec

    @classmethod
    def of(cls, model: str, *, megabytes: float, block_tokens: int, codec: Codec) -> "BenchCache":
        """Return the least cache of at least so many octets: whole blocks.

        Args:
            model: See :meth:`~kvcs.store.source.ModelShape.parse`.
            megabytes: Of its tensors, 10**6 octets each.
            block_tokens: Tokens of a block.
            codec: How it is encoded.

        Raises:
            ConfigError: If there is no such model, or no such size.
            BadDescriptor: If there can be no cache of such numbers.
        """
        descriptor = ModelShape.parse(model).descriptor(model, block_tokens=block_tokens)
        if not 0 < megabytes < math.inf:
            raise ConfigError(f"--mb is {megabytes}, expected more than 0")
        blocks = math.ceil(megabytes * 1e6 / Layout.of(descriptor).container_octets)
        return cls(model, megabytes, descriptor, blocks * block_tokens, codec)

    @property
    def octets(self) -> int:
        """Of its tensors."""
        layout = Layout.of(self.descriptor)
        return self.tokens // layout.block_tokens * layout.container_octets

    def flags(self) -> tuple[str, ...]:
        """Return the flags by which the other end means the same cache."""
        return (
            "--model", self.model, "--mb", f"{self.megabytes!r}".removesuffix(".0"),
            "--block-tokens", str(self.descriptor.block_tokens), "--codec", self.codec.name,
        )  # fmt: skip

    def source(self) -> "LikelySource":
        """Return what a producer publishes of it; a consumer needs its tokens alone."""
        return LikelySource(self.descriptor, self.tokens)


class LikelySource(SyntheticSource):
    """A synthetic cache whose numbers are spread as those of a real one are.

    Floating point numbers are normal, in channels of different size, so that codecs compress
    them about as they do a model's: plain noise they could not compress at all. One segment.
    """

    def layers(self, first_block: int, blocks: int) -> Iterator[Layer]:
        """Make the layers, one after the other. See :meth:`BlockSource.layers`."""
        layout = Layout.of(self.descriptor)
        if layout.dtype.kind in "iu":
            yield from super().layers(first_block, blocks)
            return
        tokens = blocks * layout.block_tokens

        def tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
            size = np.exp(_SPREAD * rng.standard_normal(shape, np.float32))
            numbers: NDArray[Any] = rng.standard_normal((tokens, *shape), np.float32) * size
            return numbers.astype(layout.dtype)

        for layer in range(layout.layers):
            rng = np.random.Generator(np.random.PCG64([self.seed, 3, layer]))
            yield Layer(layer, tensor(rng, layout.k_shape[1:]), tensor(rng, layout.v_shape[1:]))
