"""How long the event loops of both ends stand still while they publish and retrieve."""

from functools import partial
from typing import Any

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, column, megabytes
from benchcases.roles import ConsumerEnd, ProducerEnd
from benchcases.turns import in_turn

#: Milliseconds in which anybody else who waits on the loop should have had a turn.
_AT_MOST_MS = 20.0


def _stalls(case: Case, place: Place, options: Options) -> Result:
    """Publish and retrieve caches of three kinds, and look at the longest pause of each loop."""
    kinds = {
        "objects_32k": (Cache.of_octets(options.octets(500e6)), "raw"),
        "objects_1m": (_of_large_objects(options.octets(500e6)), "raw"),
        "compressed": (Cache.of_octets(options.octets(100e6)), "shuffle-zstd"),
    }
    figures: dict[str, Any] = {}
    worst = 0.0
    for kind, (cache, codec) in kinds.items():
        [runs] = in_turn(
            f"{case.name}, {kind}",
            options.pairs,
            partial(_pauses, place, cache, codec),
        )
        found = {name: sorted(column(runs, name)) for name in runs[0]}
        # The machine's own pauses are in the longest of all, those of ours are in every run.
        typical = {name: values[(len(values) - 1) // 2] for name, values in found.items()}
        figures[kind] = {"mb": megabytes(cache.octets), "object_octets": cache.object_octets}
        figures[kind] |= {name: round(value, 1) for name, value in typical.items()}
        figures[kind]["longest_ms"] = round(max(max(values) for values in found.values()), 1)
        worst = max(worst, *(ms for name, ms in typical.items() if name.endswith("stall_ms")))
    figures["stall_ms"] = round(worst, 1)
    return Result(case.name, figures, {}, case.targets)


def _of_large_objects(octets: float) -> Cache:
    one = Cache(blocks=1, block_tokens=512)
    return Cache(blocks=max(1, -(-int(octets) // one.octets)), block_tokens=512)


def _pauses(place: Place, cache: Cache, codec: str, _: int) -> dict[str, float]:
    with End(ProducerEnd, place, datagram=None, codec=codec) as producer:
        producer.ask("watch")
        producer.ask("publish", cache)
        publishing = producer.ask("watched")
        with End(ConsumerEnd, place, port=producer.ask("port"), datagram=None) as consumer:
            producer.ask("watch")
            ends = {
                "publishing": publishing,
                "retrieving": consumer.ask("consume", cache, codec=codec),
                "serving": producer.ask("watched"),
            }
    return {
        f"{end}_{name}": found[name]
        for end, found in ends.items()
        for name in ("stall_ms", "stall_cpu_ms")
    }


CASES = (
    Case(
        "stalls",
        "the longest pause of the event loops that publish, serve and retrieve 500 MB, in ms",
        (Target("stall_ms", at_most=_AT_MOST_MS),),
        _stalls,
        pairs=5,
    ),
)
