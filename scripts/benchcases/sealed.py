"""What it costs that relays cannot read: sealed Objects turn about with the same in clear."""

from dataclasses import replace
from statistics import median
from typing import Any

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, column, megabytes, quotients
from benchcases.roles import ProducerEnd
from benchcases.transfers import retrieved
from benchcases.turns import in_turn
from kvcs.trust.scope import Protection


def _sealed(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_octets(options.octets(500e6))
    sealing = replace(place, protection=Protection())
    with End(ProducerEnd, place) as clear, End(ProducerEnd, sealing) as sealed:
        stored = {name: end.ask("publish", cache) for name, end in _named(clear, sealed)}

        def run(where: Place, producer: End) -> dict[str, Any]:
            found = retrieved(where, producer, cache)
            return found | {"mb_per_cpu_s": found["octets"] / found["cpu_s"] / 1e6}

        plain, protected = in_turn(
            case.name, options.pairs, lambda _: run(place, clear), lambda _: run(sealing, sealed)
        )
    found = quotients(protected, plain, "mb_per_s")
    cheap = quotients(protected, plain, "mb_per_cpu_s")
    figures: dict[str, Any] = {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "added": round(stored["sealed"]["octets"] / stored["clear"]["octets"] - 1, 5),
        "vs_clear_runs": [round(q, 3) for q in found],
    }
    for name, runs in (("clear", plain), ("sealed", protected)):
        figures[name] = {
            "mb_per_s": round(median(column(runs, "mb_per_s")), 1),
            "producer_cpu_s": round(median(column(runs, "producer_cpu_s")), 2),
            "consumer_cpu_s": round(median(column(runs, "cpu_s")), 2),
            "publish_mb_per_s": round(stored[name]["octets"] / stored[name]["seconds"] / 1e6, 1),
        }
    published = figures["sealed"]["publish_mb_per_s"] / figures["clear"]["publish_mb_per_s"]
    ratios: dict[str, float | None] = {
        "vs_clear": round(median(found), 3),
        "per_consumer_cpu_s_vs_clear": round(median(cheap), 3),
        "publish_vs_clear": round(published, 3),
    }
    return Result(case.name, figures, ratios, case.targets)


def _named(clear: End, sealed: End) -> tuple[tuple[str, End], ...]:
    return ("clear", clear), ("sealed", sealed)


CASES = (
    Case(
        "sealed",
        "verified goodput of sealed Objects to that of the same in clear, 500 MB",
        (Target("vs_clear", at_least=0.85),),
        _sealed,
    ),
)
