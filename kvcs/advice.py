"""Whether fetching a cache beats computing it again: the arithmetic behind ``kvcs advise``.

Fetching costs a start (handshakes, discovery, the manifest), then time in proportion to the
length; over a path with a round trip, the first octets come slowly, since the congestion window
grows from a few datagrams (RFC 9002 Section 7). Computing costs time in proportion to the length
alone. So of two lengths at which fetching is faster, it is at every one between them, and one
length says it all: the break-even.

What is not in it: attention, which makes long prompts dearer than their length; a producer or a
link that others use as well; that a fetch leaves the accelerator to others. Octets are those of
the cache as tensors, and times are seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Self

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Layout
from kvcs.measurement import Measurement

#: From dialling until layers come: the handshake, SETUP, discovery, the manifest, the tracks. As it
#: was found over a path of 300 ms, where nothing else takes time.
ROUND_TRIPS = 6
#: That a consumer waits besides for further publications to choose from.
SETTLE_S = 0.01
#: What may be sent before anything is acknowledged (RFC 9002 Section 7.2), in datagrams of 1200.
WINDOW_OCTETS = 12_000

#: Beyond every context: a break-even above it is none.
MAX_TOKENS = 1 << 40
#: Beyond every link.
MAX_OCTETS_PER_S = 1e15


class CodecFigures(NamedTuple):
    """What ``scripts/codec-quality`` found of a codec."""

    ratio: float
    """Octets of Data for each octet of the cache."""

    decoded_octets_per_s: float
    """Octets of the cache that one core decodes in a second."""


#: Of the recorded cache of a real model in bfloat16, on two cores of a shared machine.
CODECS: Mapping[str, CodecFigures] = MappingProxyType(
    {
        "raw": CodecFigures(1.0, math.inf),
        "shuffle-zstd": CodecFigures(0.70, 260e6),
        "shuffle-lz4": CodecFigures(0.73, 180e6),
        "int8": CodecFigures(0.52, 240e6),
        "fp8": CodecFigures(0.52, 180e6),
    }
)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How large a cache is."""

    layers: int
    octets_per_token: int
    """Over all layers."""

    @classmethod
    def of(cls, descriptor: Descriptor) -> Self:
        """Return the shape of the caches that a descriptor describes."""
        layout = Layout.of(descriptor)
        return cls(layout.layers, layout.container_octets // layout.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast a cache comes. Times grow with the start, and shrink with the rate.

    Raises:
        ConfigError: If a figure is out of its range; the message names it.
    """

    octets_per_s: float
    """Of the cache, decoded and verified, once it runs."""

    start_s: float = 0.0
    """From dialling to the first octet of a layer."""

    rtt_s: float = 0.0
    """The round trip in which the window doubles at first; 0 where :attr:`start_s` has it all."""

    window_octets: float = float(WINDOW_OCTETS)
    """Of the cache, that come in the first round trip."""

    def __post_init__(self) -> None:
        for name in ("octets_per_s", "window_octets"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value}, expected a number above 0")
        for name in ("start_s", "rtt_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value}, expected a number, 0 or more")

    @classmethod
    def told(
        cls, data_octets_per_s: float, rtt_s: float, codec: CodecFigures = CODECS["raw"]
    ) -> Self:
        """Return a link of which rate and round trip are known.

        Args:
            data_octets_per_s: What it carries of Data, encoded as ``codec`` does.
            rtt_s: The round trip.
            codec: What the codec makes of the cache, and how fast.
        """
        return cls(
            octets_per_s=min(data_octets_per_s / codec.ratio, codec.decoded_octets_per_s),
            start_s=ROUND_TRIPS * rtt_s + SETTLE_S,
            rtt_s=rtt_s,
            window_octets=WINDOW_OCTETS / codec.ratio,
        )

    @classmethod
    def measured(cls, found: Measurement) -> Self:
        """Return the link that ``kvcs bench`` measured, engine, codec and machines included."""
        return cls(octets_per_s=found.steady_mb_per_s * 1e6, start_s=found.start_s)

    def transfer_s(self, octets: float) -> float:
        """How long octets take from the first one on; continuous, and never less for more."""
        if not self.rtt_s:
            return octets / self.octets_per_s
        # The window doubles each round trip, until the rate is reached.
        growth = self.window_octets * math.log(2) / self.rtt_s
        times = self.octets_per_s / growth
        if times <= 1:
            return octets / self.octets_per_s
        in_growth = self.window_octets * (times - 1)
        if octets <= in_growth:
            return self.rtt_s * math.log2(1 + octets / self.window_octets)
        return self.rtt_s * math.log2(times) + (octets - in_growth) / self.octets_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One length, fetched and computed; behind it, tokens that are computed in any case."""

    tokens: int
    """Of the prefix that may be fetched."""

    cache_octets: int
    first_layer_s: float
    """Until computing could begin with the first layer."""

    fetch_s: float
    """Until the whole cache is there."""

    recompute_s: float
    """Until it has been computed."""

    new_tokens: int
    """Tokens behind it."""

    fetch_then_s: float
    """Until those are computed, if that begins when the whole cache is there."""

    overlapped_s: float
    """Until those are computed, if each layer is computed when it is there, and not before."""

    recompute_then_s: float
    """Until those are computed behind the computed prefix."""

    @property
    def faster(self) -> bool:
        """Whether the prefix is there sooner if it is fetched."""
        return self.fetch_s < self.recompute_s

    @property
    def overlapped_faster(self) -> bool:
        """Whether the tokens behind it are computed sooner if it is fetched, layer by layer."""
        return self.overlapped_s < self.recompute_then_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A cache, a link, and how fast an engine computes.

    Raises:
        ConfigError: If a figure is out of its range; the message names it.
    """

    shape: CacheShape
    link: Link
    prefill: float
    """Tokens that are computed in a second."""

    new_tokens: int = 0
    """Tokens behind the prefix, computed in any case."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill < math.inf:
            raise ConfigError(f"prefill is {self.prefill}, expected a number of tokens/s above 0")
        if not 0 <= self.new_tokens <= MAX_TOKENS:
            raise ConfigError(f"new_tokens is {self.new_tokens}, expected 0 to {MAX_TOKENS}")

    @property
    def computed_octets_per_s(self) -> float:
        """Octets of cache that computing makes in a second: what a link must beat."""
        return self.prefill * self.shape.octets_per_token

    def fetch_s(self, tokens: int) -> float:
        """Seconds until a cache of so many tokens is there."""
        return self.link.start_s + self.link.transfer_s(tokens * self.shape.octets_per_token)

    def recompute_s(self, tokens: int) -> float:
        """Seconds until so many tokens have been computed."""
        return tokens / self.prefill

    def compare(self, tokens: int) -> Comparison:
        """Hold fetching a prefix of so many tokens against computing it."""
        octets, layers = tokens * self.shape.octets_per_token, self.shape.layers
        ready_s = [
            self.link.start_s + self.link.transfer_s(octets * (layer + 1) / layers)
            for layer in range(layers)
        ]
        fetch_s, recompute_s = self.fetch_s(tokens), self.recompute_s(tokens)
        new_s = self.new_tokens / self.prefill
        return Comparison(
            tokens=tokens,
            cache_octets=octets,
            first_layer_s=ready_s[0],
            fetch_s=fetch_s,
            recompute_s=recompute_s,
            new_tokens=self.new_tokens,
            fetch_then_s=fetch_s + new_s,
            # One layer is waited for longest; it and those behind it are computed without a wait.
            overlapped_s=max(
                at + new_s * (layers - layer) / layers for layer, at in enumerate(ready_s)
            ),
            recompute_then_s=recompute_s + new_s,
        )

    def break_even(self) -> int | None:
        """Return the least length in tokens from which on fetching is faster; None: there is none.

        Below it fetching is not faster, from it on it always is: its time grows ever more slowly
        than the length until the rate is reached, and in proportion from there on.
        """
        if self.link.octets_per_s <= self.computed_octets_per_s:
            return None
        low, high = 0, 1
        while not self.is_faster(high):
            low, high = high, 2 * high
            if high > MAX_TOKENS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.is_faster(middle) else (middle, high)
        return high

    def needed(self, tokens: int) -> float | None:
        """Return the octets of cache a second at which a fetch takes as long as computing.

        None if no rate does: the start alone, or the growth of the window, takes longer.
        """
        low, high = 0.0, 2.0 * self.computed_octets_per_s
        while not self._at(high).is_faster(tokens):
            low, high = high, 2 * high
            if high > MAX_OCTETS_PER_S:
                return None
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self._at(middle).is_faster(tokens) else (middle, high)
        return high

    def is_faster(self, tokens: int) -> bool:
        """Whether a prefix of so many tokens is there sooner if it is fetched."""
        return self.fetch_s(tokens) < self.recompute_s(tokens)

    def _at(self, octets_per_s: float) -> "Question":
        return replace(self, link=replace(self.link, octets_per_s=octets_per_s))
