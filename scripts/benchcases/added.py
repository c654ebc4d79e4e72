"""What one relay adds: time to the first layer, and how much less comes through it."""

from itertools import count
from statistics import median

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import (
    Result,
    Target,
    column,
    first_layer_s,
    megabytes,
    quotients,
    spread,
)
from benchcases.relayed import MIB, direct_and_relayed
from benchcases.roles import ConsumerEnd, ProducerEnd, RelayEnd
from benchcases.turns import in_turn

#: Of the cache whose first layer is waited for; a run is short.
_FIRST_OCTETS = 100e6
#: Runs for each pair that is asked for: one of these differs from the next by milliseconds.
_FIRST_TIMES = 3


def _relay_added(case: Case, place: Place, options: Options) -> Result:
    direct, through = _first_layers(case, place, options)
    added = [b - a for a, b in zip(direct, through, strict=True)]
    cache = Cache.of_octets(options.octets(500e6))
    alone, relayed = direct_and_relayed(
        f"{case.name}, goodput", place, cache, options.pairs, consumers=1
    )
    found = quotients(relayed, alone, "each_mb_per_s")
    figures = {
        "first_layer_mb": megabytes(options.octets(_FIRST_OCTETS)),
        "first_layer_s": round(median(direct), 4),
        "first_layer_relayed_s": round(median(through), 4),
        "added_first_layer_s": round(median(added), 4),
        "added_first_layer_spread_s": spread(added, 4),
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "mb_per_s": round(median(column(alone, "each_mb_per_s")), 1),
        "relayed_mb_per_s": round(median(column(relayed, "each_mb_per_s")), 1),
        "relay_cpu_s": round(median(column(relayed, "relay_cpu_s")), 2),
        "goodput_vs_direct_runs": [round(q, 3) for q in found],
    }
    ratios: dict[str, float | None] = {"goodput_vs_direct": round(median(found), 3)}
    return Result(case.name, figures, ratios, case.targets)


def _first_layers(case: Case, place: Place, options: Options) -> list[list[float]]:
    """Retrieve publications that no relay has seen, direct and through one.

    Returns:
        Seconds from connecting to the first layer, direct and through the relay, in pairs.
    """
    blocks = Cache.of_octets(options.octets(_FIRST_OCTETS)).blocks
    seeds = count()
    with (
        End(ProducerEnd, place, store_octets=512 * MIB) as producer,
        End(RelayEnd, place, cache_octets=512 * MIB) as relay,
        End(ConsumerEnd, place, port=producer.ask("port")) as direct,
        End(ConsumerEnd, place, port=relay.ask("port")) as through,
    ):
        producer.ask("announce", relay.ask("port"))

        def first_s(consumer: End) -> float:
            cache = Cache(blocks, seed=next(seeds))
            producer.ask("publish", cache)
            return first_layer_s(consumer.ask("consume", cache))

        found = in_turn(
            f"{case.name}, first layer",
            1 + _FIRST_TIMES * options.pairs,
            lambda _: first_s(direct),
            lambda _: first_s(through),
        )
    # The first time, modules are loaded and the relay is met.
    return [seconds[1:] for seconds in found]


CASES = (
    Case(
        "relay-added",
        "a relay between: seconds added to the first layer of 100 MB, MB/s to those without it",
        (
            Target("added_first_layer_s", at_most=0.015),
            Target("goodput_vs_direct", at_least=0.8),
        ),
        _relay_added,
        pairs=5,
    ),
)
