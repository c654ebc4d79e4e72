"""What it costs to ask who comes: a token and a client's certificate, turn about with neither."""

import secrets
from dataclasses import replace
from statistics import median

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, first_layer_s, megabytes, spread
from benchcases.roles import ConsumerEnd, ProducerEnd
from benchcases.turns import in_turn


def _guarded(case: Case, place: Place, options: Options) -> Result:
    """Retrieve a cache from who asks everybody for both, and from who asks nobody for anything.

    Each time a new session shows a token that has not been seen before.
    """
    cache = Cache.of_octets(options.octets(32e6))
    asking = replace(place, issuer=secrets.token_bytes(32))
    with (
        End(ProducerEnd, place) as plain,
        End(ProducerEnd, asking) as guarded,
        End(ConsumerEnd, place, port=plain.ask("port")) as anybody,
        End(ConsumerEnd, asking, port=guarded.ask("port")) as known,
    ):
        for producer, consumer in ((plain, anybody), (guarded, known)):
            producer.ask("publish", cache)
            consumer.ask("consume", cache)  # the first time, modules are loaded
        without, with_both = in_turn(
            case.name,
            2 * options.pairs,
            lambda _: first_layer_s(anybody.ask("consume", cache)),
            lambda _: first_layer_s(known.ask("consume", cache)),
        )
    added = [1e3 * (b - a) for a, b in zip(without, with_both, strict=True)]
    figures = {
        "mb": megabytes(cache.octets),
        "first_layer_ms": round(1e3 * median(without), 2),
        "guarded_first_layer_ms": round(1e3 * median(with_both), 2),
        "added_ms": round(median(added), 2),
        "added_spread_ms": spread(added, 2),
    }
    return Result(case.name, figures, {}, case.targets)


CASES = (
    Case(
        "guarded",
        "time to the first layer that a token and a client certificate add, 32 MB",
        (Target("added_ms", at_most=10.0),),
        _guarded,
    ),
)
