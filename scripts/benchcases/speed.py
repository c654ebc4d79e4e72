"""What becomes of the engine's speed: over time, by the session, with more of everything.

Each pair is judged by itself, since what else the machine does changes from minute to minute.
"""

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from benchcases import cores
from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import (
    Result,
    Target,
    column,
    first_layer_s,
    megabytes,
    quarters,
    quotients,
    spread,
)
from benchcases.raw import RawSenderEnd
from benchcases.roles import ConsumerEnd, ProducerEnd
from benchcases.transfers import measured, retrieved, streamed
from benchcases.turns import in_turn

#: UDP payloads: that of an ordinary path, and one of a path with jumbo frames.
_DATAGRAMS = (1452, 8900)
#: Times that a consumer looks at the clock; the quarters end at some of them.
_LOOKS = 64


def _steady(case: Case, place: Place, options: Options, *, datagram: int) -> Result:
    """Transfer much over one connection, and see whether its end is as fast as its beginning."""
    cache = Cache.of_octets(options.octets(2e9))
    with End(ProducerEnd, place, datagram=datagram) as producer:
        producer.ask("publish", cache)

        def run(_: int) -> dict[str, Any]:
            # A cache has a multiple of as many Objects.
            every = cache.objects // _LOOKS
            return retrieved(place, producer, cache, "discard", datagram=datagram, every=every)

        [runs] = in_turn(case.name, options.pairs, run)
    rates = [[q * cache.object_octets / 1e6 for q in quarters(run["marks"])] for run in runs]
    shares = [found[-1] / found[0] for found in rates]
    figures = {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "datagram_octets": datagram,
        "mb_per_s": round(median(column(runs, "mb_per_s")), 1),
        "quarters_mb_per_s": [round(median(quarter), 1) for quarter in zip(*rates, strict=True)],
        "last_vs_first_runs": [round(share, 3) for share in shares],
    }
    return Result(case.name, figures, {"last_vs_first": round(median(shares), 3)}, case.targets)


def _session(case: Case, place: Place, options: Options) -> Result:
    """Transfer a finished cache, in turn with as many octets without session and digests."""
    cache = Cache.of_octets(options.octets(500e6))
    figures: dict[str, Any] = {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
    }
    ratios: dict[str, float | None] = {}
    for datagram in _DATAGRAMS:
        verified, raw = _verified_and_raw(case, place, options, cache, datagram)
        found = quotients(verified, raw, "mb_per_s")
        figures[f"datagrams_{datagram}"] = {
            "mb_per_s": round(median(column(verified, "mb_per_s")), 1),
            "raw_mb_per_s": round(median(column(raw, "mb_per_s")), 1),
            "producer_cpu_s": round(median(column(verified, "producer_cpu_s")), 2),
            "consumer_cpu_s": round(median(column(verified, "cpu_s")), 2),
            "raw_sender_cpu_s": round(median(column(raw, "producer_cpu_s")), 2),
            "raw_receiver_cpu_s": round(median(column(raw, "cpu_s")), 2),
            "vs_raw_runs": [round(q, 3) for q in found],
        }
        ratios[f"vs_raw_{datagram}"] = round(median(found), 3)
    return Result(case.name, figures, ratios, case.targets)


def _verified_and_raw(
    case: Case, place: Place, options: Options, cache: Cache, datagram: int
) -> list[list[dict[str, Any]]]:
    with (
        End(ProducerEnd, place, datagram=datagram) as producer,
        End(RawSenderEnd, place, datagram=datagram) as sender,
    ):
        producer.ask("publish", cache)
        return in_turn(
            f"{case.name}, datagrams of {datagram}",
            options.pairs,
            lambda _: retrieved(place, producer, cache, datagram=datagram),
            lambda _: streamed(place, sender, cache.octets, datagram=datagram),
        )


# -- more connections ------------------------------------------------------------------------------

#: Connections side by side; each has a producer and a consumer of its own, on a core each.
_CONNECTIONS = 2


def _connections(case: Case, place: Place, options: Options) -> Result:
    """Retrieve a cache over two connections at once, half the layers each, in turn with over one.

    Every connection has a producer of its own, which has published the cache whole.
    """
    cache = Cache.of_octets(options.octets(500e6))
    free = cores.free()
    places, reason = cores.assigned(free, cores.permitted(), _CONNECTIONS)
    with End(ProducerEnd, place) as first, End(ProducerEnd, place) as second:
        producers = (first, second)
        for producer, (sending, _) in zip(producers, places, strict=True):
            producer.ask("publish", cache)
            producer.ask("pin", [sending])
        one, two = in_turn(
            case.name,
            options.pairs,
            lambda _: _side_by_side(place, cache, producers[:1], places),
            lambda _: _side_by_side(place, cache, producers, places),
        )
    found = quotients(two, one, "mb_per_s")
    ratio = round(median(found), 3)
    figures = {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "cores": cores.permitted(),
        "free_cores": free,
        "pinned": [{"sender": sending, "receiver": receiving} for sending, receiving in places],
        "one_mb_per_s": round(median(column(one, "mb_per_s")), 1),
        "two_mb_per_s": round(median(column(two, "mb_per_s")), 1),
        "here": ratio,
        "two_vs_one_runs": [round(q, 3) for q in found],
    }
    told = ratio if reason is None else None
    return Result(case.name, figures, {"two_vs_one": told}, case.targets, reason)


def _side_by_side(
    place: Place, cache: Cache, producers: tuple[End, ...], places: list[tuple[int, int]]
) -> dict[str, float]:
    """Have as many consumers as producers take an equal part of the layers each, at once."""
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(End(ConsumerEnd, place, port=producer.ask("port")))
            for producer in producers
        ]
        for consumer, (_, receiving) in zip(consumers, places, strict=False):
            consumer.ask("pin", [receiving])
        for consumer, part in zip(consumers, parts(cache.layers, len(consumers)), strict=True):
            consumer.begin("consume", cache, layers=part)
        runs = [consumer.answer() for consumer in consumers]
    began = min(column(runs, "began"))
    ended = max(run["began"] + run["seconds"] for run in runs)
    return {"mb_per_s": sum(column(runs, "octets")) / (ended - began) / 1e6}


def parts(layers: int, count: int) -> list[range]:
    """Cut layers into equal parts, as far as that goes."""
    return [range(layers * n // count, layers * (n + 1) // count) for n in range(count)]


# -- more Objects ----------------------------------------------------------------------------------

#: Times that the smaller caches are retrieved for each time that the large one is.
_TIMES = 10


def _object_cost(case: Case, place: Place, options: Options) -> Result:
    """Say what an Object costs both ends, among many and among few.

    They are of 1 KiB, so that it is the Object that costs, and not its octets. What a retrieval
    costs however small it is, is taken from both.
    """
    shape = {"heads": 1, "dim": 32}
    many = Cache.of_objects(options.objects or round(options.octets(512e6) / 1024), **shape)
    least = Cache(1, seed=1, **shape)
    few = Cache.of_objects(max(20 * least.objects, many.objects // 100), seed=2, **shape)
    with (
        End(ProducerEnd, place) as producer,
        End(ConsumerEnd, place, port=producer.ask("port")) as consumer,
    ):
        for cache in (many, few, least):
            producer.ask("publish", cache)

        def cost_s(cache: Cache, times: int) -> float:
            runs = [measured(producer, consumer, "consume", cache, "discard") for _ in range(times)]
            return sum(column(runs, "cpu_s") + column(runs, "producer_cpu_s")) / times

        cost_s(few, _TIMES)  # what is costly once, such as what an interpreter learns
        among_many, among_few, at_least = in_turn(
            case.name,
            options.pairs,
            lambda _: cost_s(many, 1),
            lambda _: cost_s(few, _TIMES),
            lambda _: cost_s(least, _TIMES),
        )
    always = median(at_least)
    each_many, each_few = (
        [(cost - always) / (cache.objects - least.objects) for cost in costs]
        for cache, costs in ((many, among_many), (few, among_few))
    )
    ratio = median(a / b for a, b in zip(each_many, each_few, strict=True))
    figures = {
        "objects": {"many": many.objects, "few": few.objects},
        "object_octets": many.object_octets,
        "among_many_us": round(1e6 * median(each_many), 2),
        "among_few_us": round(1e6 * median(each_few), 2),
        "among_many_spread_us": spread([1e6 * cost for cost in each_many], 2),
        "among_few_spread_us": spread([1e6 * cost for cost in each_few], 2),
        "retrieval_cpu_s": round(always, 4),
    }
    return Result(case.name, figures, {"many_vs_few": round(ratio, 3)}, case.targets)


# -- the first layer -------------------------------------------------------------------------------


def _first_of_layers(case: Case, place: Place, options: Options) -> Result:
    """Hold the time to the first layer, from connecting, against its share of the time to the last.

    What goes before the first Object counts in both, and so for more in the first.
    """
    cache, another = Cache.of_octets(options.octets(500e6)), Cache(1, seed=1)
    with (
        End(ProducerEnd, place) as producer,
        End(ConsumerEnd, place, port=producer.ask("port")) as consumer,
    ):
        producer.ask("publish", another)
        producer.ask("publish", cache)
        consumer.ask("consume", another)  # the first time, modules are loaded
        [runs] = in_turn(case.name, options.pairs, lambda _: consumer.ask("consume", cache))
    firsts = [first_layer_s(run) for run in runs]
    lasts = [run["ready_at"][-1] - run["began"] for run in runs]
    manifests = column(runs, "manifest_s")
    ratios = [cache.layers * first / last for first, last in zip(firsts, lasts, strict=True)]
    beyond = [
        cache.layers * (first - manifest) / (last - manifest)
        for first, last, manifest in zip(firsts, lasts, manifests, strict=True)
    ]
    figures = {
        "mb": megabytes(cache.octets),
        "layers": cache.layers,
        "object_octets": cache.object_octets,
        "manifest_s": round(median(manifests), 4),
        "first_layer_s": round(median(firsts), 4),
        "last_layer_s": round(median(lasts), 3),
        "first_vs_share_runs": [round(ratio, 3) for ratio in ratios],
    }
    return Result(
        case.name,
        figures,
        {
            "first_vs_share": round(median(ratios), 3),
            "first_vs_share_from_manifest": round(median(beyond), 3),
        },
        case.targets,
    )


# -- all of them -----------------------------------------------------------------------------------

CASES = (
    *(
        Case(
            f"steady-{datagram}",
            f"2 GB over one connection, datagrams of {datagram}: its last quarter to its first",
            (Target("last_vs_first", at_least=0.9),),
            partial(_steady, datagram=datagram),
            pairs=5,
        )
        for datagram in _DATAGRAMS
    ),
    Case(
        "session",
        "verified MB/s, to those of the engine's raw stream, datagrams of 1452 and of 8900",
        tuple(Target(f"vs_raw_{datagram}", at_least=0.85) for datagram in _DATAGRAMS),
        _session,
        pairs=5,
    ),
    Case(
        "connections",
        "verified MB/s over two connections, each with a core for either end, to those over one",
        (Target("two_vs_one", at_least=1.5),),
        _connections,
        pairs=5,
    ),
    Case(
        "object-cost",
        "CPU seconds of both ends for an object among 500,000, to those for one among 5,000",
        (Target("many_vs_few", at_most=1.1),),
        _object_cost,
        pairs=5,
    ),
    Case(
        "first-of-layers",
        "from connecting to the first layer of 500 MB, to 1/32 of the time to the last",
        (Target("first_vs_share", at_most=1.3),),
        _first_of_layers,
        pairs=5,
    ),
)
