"""One retrieval over several connections, in one process and in processes of their own."""

from statistics import median
from typing import Any

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, column, first_layer_s, megabytes
from benchcases.roles import ConsumerEnd, ProducerEnd

#: Connections, and whether each is in a process of its own; by the name in the figures.
WAYS = {
    "one": (1, False),
    "two": (2, False),
    "four": (4, False),
    "one_process": (1, True),
    "two_processes": (2, True),
}


def _connections(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_octets(options.octets(200e6))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with End(ProducerEnd, place) as producer:
        producer.ask("publish", cache)
        with End(ConsumerEnd, place, port=producer.ask("port")) as consumer:
            for _ in range(options.pairs):
                for name, (connections, processes) in WAYS.items():
                    before = producer.ask("usage")["cpu_s"]
                    run = consumer.ask(
                        "consume", cache, "shared", connections=connections, processes=processes
                    )
                    run["producer_cpu_s"] = producer.ask("usage")["cpu_s"] - before
                    run["mb_per_s"] = run["octets"] / run["seconds"] / 1e6
                    runs[name].append(run)
    figures: dict[str, Any] = {"mb": megabytes(cache.octets)}
    for name, several in runs.items():
        sent = median(run["octets"] / run["producer_cpu_s"] / 1e6 for run in several)
        figures[name] = {
            "mb_per_s": round(median(column(several, "mb_per_s")), 1),
            "first_layer_s": round(median(map(first_layer_s, several)), 4),
            "manifest_s": round(median(column(several, "manifest_s")), 4),
            "producer_mb_per_cpu_s": round(sent, 1),
            "consumer_cpu_s": round(median(column(several, "cpu_s")), 2),
            "runs": [round(rate, 1) for rate in column(several, "mb_per_s")],
        }
    ratios: dict[str, float | None] = {
        f"{name}_vs_one": round(
            median(
                run["mb_per_s"] / one["mb_per_s"]
                for run, one in zip(several, runs["one"], strict=True)
            ),
            3,
        )
        for name, several in runs.items()
        if name != "one"
    }
    return Result(case.name, figures, ratios, case.targets)


CASES = (
    Case(
        "spread",
        "one consumer of 200 MB over 1, 2 and 4 connections, and in 1 and 2 processes",
        (Target("four_vs_one", at_least=0.8),),
        _connections,
    ),
)
