"""What codecs make of the cache of a real model: its size, and the time it takes over a link.

The cache is the recorded one, as often as it takes. Codecs see one Object at a time, so that a
copy is as hard for them as the first.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.environments import CHECKOUT
from benchcases.figures import Result, Target, column, megabytes, quotients
from benchcases.proxy import Path, ProxyEnd
from benchcases.roles import ConsumerEnd, ProducerEnd
from benchcases.transfers import let_through
from benchcases.turns import in_turn
from kvcs.kvsp.standard import standard_codecs
from kvcs.store.source import ArraySource, BlockSource, SafetensorsSource

RECORDED = CHECKOUT / "tests" / "data" / "smollm2-128.safetensors"
#: The codec that a consumer likes best of those that lose nothing and make smaller.
_LOSSLESS = "shuffle-zstd"
#: What such a cache is sent over: a fifth of a gigabit link.
_LINK_OCTETS_PER_S = 25e6
#: Seconds between the request and the first layer handed over.
_LEAD_S = 0.2


@dataclass(frozen=True)
class Recorded(Cache):
    """The recorded cache, over and over. Its shape cannot be chosen."""

    layers: int = 30
    heads: int = 3
    dim: int = 64

    @property
    def source(self) -> BlockSource:
        recorded = SafetensorsSource(RECORDED)
        tokens = self.blocks * self.block_tokens
        times = -(-tokens // len(recorded.tokens))

        def repeated(tensor: NDArray[Any]) -> NDArray[Any]:
            return np.tile(np.asarray(tensor), (times, 1, 1))[:tokens]

        layers = list(recorded.layers(0, len(recorded.tokens) // self.block_tokens))
        return ArraySource(
            recorded.descriptor,
            (list(recorded.tokens) * times)[:tokens],
            [repeated(layer.k) for layer in layers],
            [repeated(layer.v) for layer in layers],
        )


def size_to_raw(name: str) -> float:
    """Return what a codec leaves of the Data of all recorded Objects."""
    codec = standard_codecs()[name]
    source = SafetensorsSource(RECORDED)
    step = source.descriptor.block_tokens
    blocks = len(source.tokens) // step
    tensors = [
        np.asarray(tensor)[at * step : (at + 1) * step]
        for _, *pair in source.layers(0, blocks)
        for tensor in pair
        for at in range(blocks)
    ]
    encoded = sum(len(codec.encode(tensor)) for tensor in tensors)
    return encoded / sum(tensor.nbytes for tensor in tensors)


def _lossless(case: Case, place: Place, options: Options) -> Result:
    """Send a cache that is being made over a link, encoded in turn with as it is."""
    cache = Recorded.of_octets(options.octets(50e6))
    unimpaired = let_through(place, 100_000_000)

    def run(codec: str) -> dict[str, Any]:
        path = Path(octets_per_s=_LINK_OCTETS_PER_S)
        with (
            End(ProducerEnd, place, codec=codec) as producer,
            End(ProxyEnd, place, port=producer.ask("port"), path=path) as link,
            End(ConsumerEnd, place, port=link.ask("port")) as consumer,
        ):
            producer.ask("produce", cache, 0.0, lead_s=_LEAD_S)
            consumer.begin("consume", cache, codec=codec)
            handed, found = producer.ask("produced"), consumer.answer()
            counts = link.ask("counts")["down"]
        # From the hand-over of the first layer: encoding is part of it.
        seconds = found["ready_at"][-1] - handed[0]
        return {
            "seconds": seconds,
            "mb_per_s": cache.octets / seconds / 1e6,
            "crossed": counts["octets"] / 1e6,
            "overflowed": counts["overflowed"],
            "cpu_s": found["cpu_s"],
        }

    raw, encoded = in_turn(case.name, options.pairs, lambda _: run("raw"), lambda _: run(_LOSSLESS))
    found = quotients(encoded, raw, "mb_per_s")
    figures: dict[str, Any] = {
        "codec": _LOSSLESS,
        "mb": megabytes(cache.octets),
        "objects": cache.objects,
        "object_octets": cache.object_octets,
        "link_mb_per_s": _LINK_OCTETS_PER_S / 1e6,
        "vs_raw_runs": [round(q, 3) for q in found],
        "proxy_unimpaired": unimpaired,
    }
    for what, runs in (("raw", raw), ("encoded", encoded)):
        figures[what] = {
            "seconds": round(median(column(runs, "seconds")), 3),
            "mb_per_s": round(median(column(runs, "mb_per_s")), 1),
            "mb_crossed": round(median(column(runs, "crossed")), 1),
            "datagrams_overflowed": round(median(column(runs, "overflowed"))),
            "consumer_cpu_s": round(median(column(runs, "cpu_s")), 2),
        }
    ratios: dict[str, float | None] = {
        "size": round(size_to_raw(_LOSSLESS), 4),
        "vs_raw": round(median(found), 3),
        "vs_raw_worst": round(min(found), 3),
    }
    return Result(case.name, figures, ratios, case.targets)


def _int8(case: Case, place: Place, options: Options) -> Result:
    figures = {"codec": "int8", "recorded": RECORDED.stem}
    return Result(case.name, figures, {"size": round(size_to_raw("int8"), 4)}, case.targets)


CASES = (
    Case(
        "codec-lossless",
        "a real model's cache over a link of 25 MB/s, without loss to the tensors: size and speed",
        (Target("size", at_most=0.8), Target("vs_raw_worst", at_least=1.0)),
        _lossless,
        pairs=5,
    ),
    Case(
        "codec-int8",
        "a real model's cache in int8: its size",
        (Target("size", at_most=0.52),),
        _int8,
    ),
)
