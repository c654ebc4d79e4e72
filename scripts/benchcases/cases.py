"""The cases: what each does, and what it must reach.

Judge ratios, not absolutes: what they divide was measured in one run, turn about.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchcases import (
    added,
    baseline,
    codecs,
    depots,
    guarded,
    losses,
    relayed,
    rivals,
    sealed,
    speed,
    spread,
    stalls,
    ways,
)
from benchcases.case import GROWTH_MIB, PUBLICATIONS_SLOPE_MIB, Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import (
    Point,
    Result,
    Target,
    column,
    first_layer_s,
    mebibytes,
    megabytes,
    quotients,
    rise,
    settled,
    slope,
)
from benchcases.roles import ConsumerEnd, ProducerEnd
from benchcases.transfers import retrieved
from benchcases.turns import in_turn

#: MiB by which memory may rise for each 10,000 Objects: 105 octets an Object, less than the
#: smallest record of one could take, and more than the noise of the allocator.
OBJECTS_SLOPE_MIB = 1.0


# -- goodput ---------------------------------------------------------------------------------------


#: What the baseline is told where the size of our datagrams is found; it finds none.
_ETHERNET = 1452


def _goodput(
    case: Case, place: Place, options: Options, cache: Cache, datagram: int | None
) -> Result:
    """Transfer a finished cache, turn about with the baseline."""
    script = baseline.script(options.checkout)
    reason = None if script is not None else baseline.missing()

    def raw(_: int) -> dict[str, Any]:
        nonlocal script, reason
        if script is None:
            return {}
        try:
            found = baseline.aioquic(script, cache.octets, datagram or _ETHERNET)
        except baseline.BaselineFailed as exc:
            script, reason = None, str(exc)
            return {}
        return found | {"mb_per_cpu_s": found["mb"] / found["receiver_cpu_s"]}

    with End(ProducerEnd, place, datagram=datagram) as producer:
        store = producer.ask("publish", cache)

        def verified(_: int) -> dict[str, Any]:
            run = retrieved(place, producer, cache, datagram=datagram)
            return run | {
                "mb_per_cpu_s": run["octets"] / run["cpu_s"] / 1e6,
                "objects_per_s": run["objects"] / run["seconds"],
            }

        tried, runs = in_turn(case.name, options.pairs, raw, verified)
        peak = producer.ask("usage")["peak"]
    baselines = [found for found in tried if found]
    ours = median(column(runs, "mb_per_s"))
    figures = {
        "mb": megabytes(cache.octets),
        "objects": runs[0]["objects"],
        "object_octets": cache.object_octets,
        "datagram_octets": datagram,
        "mb_per_s": round(ours, 1),
        "objects_per_s": round(median(column(runs, "objects_per_s"))),
        "seconds": round(median(column(runs, "seconds")), 2),
        "producer_cpu_s": round(median(column(runs, "producer_cpu_s")), 2),
        "consumer_cpu_s": round(median(column(runs, "cpu_s")), 2),
        "producer_peak_mib": mebibytes(peak),
        "consumer_peak_mib": mebibytes(max(column(runs, "peak"))),
        "publish_mb_per_s": round(store["octets"] / store["seconds"] / 1e6, 1),
        "baseline_mb_per_s": None,
        "baseline_receiver_cpu_s": None,
        "runs": [round(rate, 1) for rate in column(runs, "mb_per_s")],
        "baseline_runs": column(baselines, "mb_per_s"),
    }
    ratios: dict[str, float | None] = {"vs_aioquic": None, "per_consumer_cpu_s_vs_aioquic": None}
    if baselines:
        theirs = median(column(baselines, "mb_per_s"))
        figures["baseline_mb_per_s"] = round(theirs, 1)
        figures["baseline_receiver_cpu_s"] = median(column(baselines, "receiver_cpu_s"))
        ratios["vs_aioquic"] = round(ours / theirs, 3)
        cheap, cheaper = (median(column(rows, "mb_per_cpu_s")) for rows in (baselines, runs))
        ratios["per_consumer_cpu_s_vs_aioquic"] = round(cheaper / cheap, 3)
    return Result(case.name, figures, ratios, case.targets, reason)


def _goodput_1452(case: Case, place: Place, options: Options) -> Result:
    return _goodput(case, place, options, Cache.of_octets(options.octets(500e6)), 1452)


def _goodput_8900(case: Case, place: Place, options: Options) -> Result:
    return _goodput(case, place, options, Cache.of_octets(options.octets(500e6)), 8900)


def _goodput_found(case: Case, place: Place, options: Options) -> Result:
    return _goodput(case, place, options, Cache.of_octets(options.octets(500e6)), None)


def _objects_6k(case: Case, place: Place, options: Options) -> Result:
    # SmolLM2 135M: 30 layers, 3 heads of 64.
    cache = Cache.of_objects(
        options.objects or round(options.octets(123e6) / 6144), layers=30, heads=3, dim=64
    )
    return _goodput(case, place, options, cache, 8900)


def _objects_32k(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_objects(options.objects or round(options.octets(328e6) / 32768))
    return _goodput(case, place, options, cache, 1452)


# -- the first layer -------------------------------------------------------------------------------


def _first_layer(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_octets(options.octets(200e6))
    finished: list[dict[str, Any]] = []
    eager: list[dict[str, Any]] = []
    with End(ProducerEnd, place) as producer:
        producer.ask("publish", cache)
        with End(ConsumerEnd, place, port=producer.ask("port")) as consumer:
            for _ in range(options.pairs):
                finished.append(consumer.ask("consume", cache))
                eager.append(consumer.ask("consume", cache, eager=True))
    # A layer waits for a signed manifest that lists it, so their distance decides.
    every_eighth, every_one = (_live(place, options.pairs, every) for every in (8, 1))
    firsts = [first_layer_s(run) for run in finished]
    figures = {
        "mb": megabytes(cache.octets),
        "layers": cache.layers,
        "finished_manifest_s": round(median(column(finished, "manifest_s")), 4),
        "finished_first_layer_s": round(median(firsts), 4),
        "finished_complete_s": round(median(column(finished, "seconds")), 3),
        "eager_first_layer_s": round(median(map(first_layer_s, eager)), 4),
        "live_mb": megabytes(_LIVE.octets),
        "live_interval_s": _LIVE_INTERVAL_S,
        "live_delay_s": every_one.delay_s,
        "live_delay_max_s": every_one.delay_max_s,
        "live_joining_first_layer_s": every_one.joining_s,
        "manifest_every_8": every_eighth.to_json(),
    }
    # From the manifest on: what goes before does not depend on the size of the cache.
    shares = (
        (first - run["manifest_s"]) / (run["seconds"] - run["manifest_s"])
        for first, run in zip(firsts, finished, strict=True)
    )
    ratios: dict[str, float | None] = {"first_of_whole": round(median(shares), 4)}
    return Result(case.name, figures, ratios, case.targets)


#: A cache that is still being made: 8 MB, a layer every 50 ms.
_LIVE = Cache(blocks=4)
_LIVE_INTERVAL_S = 0.05


@dataclass(frozen=True)
class _Live:
    """How far behind its producer a consumer is."""

    delay_s: float
    """From the hand-over of a layer to the layer ready at the other end, median of all."""

    delay_max_s: float
    joining_s: float
    """From connecting in the middle of production to the first layer ready."""

    def to_json(self) -> dict[str, float]:
        return {
            "live_delay_s": self.delay_s,
            "live_delay_max_s": self.delay_max_s,
            "live_joining_first_layer_s": self.joining_s,
        }


def _live(place: Place, pairs: int, manifest_every: int) -> _Live:
    delays: list[float] = []
    joins: list[float] = []
    with End(ProducerEnd, place, manifest_every=manifest_every) as producer:
        port = producer.ask("port")
        with (
            End(ConsumerEnd, place, port=port) as first,
            End(ConsumerEnd, place, port=port) as second,
        ):
            for index in range(pairs):
                cache = Cache(_LIVE.blocks, seed=index)
                producer.ask("produce", cache, _LIVE_INTERVAL_S, lead_s=0.5)
                first.begin("consume", cache)
                producer.ask("reached", cache.layers // 2)
                joins.append(first_layer_s(second.ask("consume", cache)))
                ready, handed = first.answer()["ready_at"], producer.ask("produced")
                delays += [at - since for at, since in zip(ready, handed, strict=True)]
    return _Live(round(median(delays), 4), round(max(delays), 4), round(median(joins), 4))


# -- memory ----------------------------------------------------------------------------------------


def _memory(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_octets(options.octets(500e6))
    with End(ProducerEnd, place) as producer:
        idle = producer.ask("reset_peak")
        store = producer.ask("publish", cache)["octets"]
        full = producer.ask("reset_peak")
        with End(ConsumerEnd, place, port=producer.ask("port")) as consumer:
            found = consumer.ask("consume", cache, "allocate")
        serving = producer.ask("usage")["peak"]
    figures = {
        "mb": megabytes(cache.octets),
        "store_mib": mebibytes(store),
        "producer_idle_mib": mebibytes(idle),
        "producer_published_mib": mebibytes(full),
        "producer_peak_mib": mebibytes(serving),
        "producer_growth_mib": mebibytes(serving - idle - store),
        "producer_growth_serving_mib": mebibytes(serving - full),
        "consumer_idle_mib": mebibytes(found["rss_before"]),
        "consumer_peak_mib": mebibytes(found["peak"]),
        "consumer_growth_mib": mebibytes(found["peak"] - found["rss_before"] - cache.octets),
        "seconds": round(found["seconds"], 2),
    }
    return Result(case.name, figures, {}, case.targets)


def _soak_objects(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_objects(options.objects or 100_000, heads=1, dim=32)
    every = max(1, cache.objects // 40)
    with End(ProducerEnd, place) as producer:
        producer.ask("publish", cache)
        pid = producer.ask("pid")
        with End(ConsumerEnd, place, port=producer.ask("port")) as consumer:
            found = consumer.ask("consume", cache, "discard", every=every, other=pid)
    samples = found["samples"]
    ours = settled([(objects / 10_000, rss / (1 << 20)) for objects, rss, _ in samples])
    theirs = settled([(objects / 10_000, rss / (1 << 20)) for objects, _, rss in samples])
    figures = {
        "objects": found["objects"],
        "object_octets": cache.object_octets,
        "objects_per_s": round(found["objects"] / found["seconds"]),
        "seconds": round(found["seconds"], 2),
        "consumer_slope_mib_per_10000": round(slope(ours), 3),
        "producer_slope_mib_per_10000": round(slope(theirs), 3),
        "consumer_mib": rise(ours),
        "producer_mib": rise(theirs),
    }
    return Result(case.name, figures, {}, case.targets)


def _soak_publications(case: Case, place: Place, options: Options) -> Result:
    count = options.publications or 1000
    producer_points: list[Point] = []
    consumer_points: list[Point] = []
    seconds: list[float] = []
    with End(ProducerEnd, place, ttl_s=2.0) as producer:
        with End(ConsumerEnd, place, port=producer.ask("port")) as consumer:
            for index in range(count):
                cache = Cache(blocks=4, layers=4, heads=2, dim=64, seed=index)
                producer.ask("publish", cache)
                seconds.append(consumer.ask("consume", cache, "allocate")["seconds"])
                if not index % 10 or index == count - 1:
                    at = index / 100
                    producer_points.append((at, producer.ask("usage")["rss"] / (1 << 20)))
                    consumer_points.append((at, consumer.ask("usage")["rss"] / (1 << 20)))
        left = producer.ask("left", wait_s=10.0)
    ours, theirs = settled(consumer_points), settled(producer_points)
    figures = {
        "publications": count,
        "payload_octets": cache.octets,
        "retrieval_s": round(median(seconds), 4),
        "consumer_slope_mib_per_100": round(slope(ours), 3),
        "producer_slope_mib_per_100": round(slope(theirs), 3),
        "consumer_mib": rise(ours),
        "producer_mib": rise(theirs),
        "publications_left": left["publications"],
        "octets_left": left["octets"],
    }
    return Result(case.name, figures, {}, case.targets)


def _slow_consumer(case: Case, place: Place, options: Options) -> Result:
    cache = Cache.of_octets(options.octets(float(1 << 30)))
    alone: list[dict[str, float]] = []
    beside: list[dict[str, float]] = []
    still_there = True
    with End(ProducerEnd, place) as producer:
        idle = producer.ask("reset_peak")
        store = producer.ask("publish", cache)["octets"]
        full = producer.ask("reset_peak")
        port, name = producer.ask("port"), producer.ask("name")
        for _ in range(options.pairs):
            alone.append(_transfer(producer, place, cache))
            with End(ConsumerEnd, place, port=port) as stalled:
                stalled.ask("stall", name, 10)
                beside.append(_transfer(producer, place, cache))
                still_there &= stalled.ask("stalled")["connected"]
        peak = producer.ask("usage")["peak"]
    figures = {
        "mb": megabytes(cache.octets),
        "store_mib": mebibytes(store),
        "producer_peak_mib": mebibytes(peak),
        "producer_growth_mib": mebibytes(peak - idle - store),
        "producer_growth_serving_mib": mebibytes(peak - full),
        "stalled_still_connected": still_there,
        "alone_mb_per_s": round(median(column(alone, "mb_per_s")), 1),
        "beside_mb_per_s": round(median(column(beside, "mb_per_s")), 1),
        "alone_runs": [round(rate, 1) for rate in column(alone, "mb_per_s")],
        "beside_runs": [round(rate, 1) for rate in column(beside, "mb_per_s")],
        "alone_cpu_s": round(median(column(alone, "cpu_s")), 2),
        "beside_cpu_s": round(median(column(beside, "cpu_s")), 2),
    }
    # Each pair by itself: what else the machine does changes from minute to minute.
    ratio = median(quotients(beside, alone, "mb_per_s"))
    return Result(case.name, figures, {"beside_vs_alone": round(ratio, 3)}, case.targets)


def _transfer(producer: End, place: Place, cache: Cache) -> dict[str, float]:
    run = retrieved(place, producer, cache, "discard")
    return {"mb_per_s": run["mb_per_s"], "cpu_s": run["cpu_s"] + run["producer_cpu_s"]}


# -- all of them -----------------------------------------------------------------------------------

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "goodput-1452",
            "verified MB/s of one consumer, 500 MB, datagrams of 1452 octets",
            (Target("vs_aioquic", at_least=2.0),),
            _goodput_1452,
            pairs=5,
        ),
        Case(
            "goodput-8900",
            "the same with datagrams of 8900 octets",
            (Target("vs_aioquic", at_least=1.4),),
            _goodput_8900,
            pairs=5,
        ),
        Case(
            "goodput-found",
            "the same with datagrams as large as the path is found to take",
            (Target("vs_aioquic", at_least=0.7),),
            _goodput_found,
        ),
        Case(
            "objects-6k",
            "20,000 objects of 6 KiB, datagrams of 8900 octets: objects per second",
            (Target("objects_per_s", at_least=15_000),),
            _objects_6k,
            pairs=5,
        ),
        Case(
            "objects-32k",
            "10,000 objects of 32 KiB: objects per second",
            (Target("vs_aioquic", at_least=0.7),),
            _objects_32k,
        ),
        Case(
            "first-layer",
            "from connecting to the first layer ready: finished cache of 200 MB, live one",
            (Target("first_of_whole", at_most=round(1 / 32 + 0.05, 4)),),
            _first_layer,
        ),
        Case(
            "memory",
            "most memory of both ends beyond the cache itself, 500 MB",
            (
                Target("producer_growth_mib", at_most=GROWTH_MIB),
                Target("consumer_growth_mib", at_most=GROWTH_MIB),
            ),
            _memory,
        ),
        Case(
            "soak-objects",
            "100,000 objects through one connection: MiB gained for each 10,000",
            (
                Target("producer_slope_mib_per_10000", at_most=OBJECTS_SLOPE_MIB),
                Target("consumer_slope_mib_per_10000", at_most=OBJECTS_SLOPE_MIB),
            ),
            _soak_objects,
        ),
        Case(
            "soak-publications",
            "1,000 publications made, consumed and expired: MiB gained for each 100",
            (
                Target("producer_slope_mib_per_100", at_most=PUBLICATIONS_SLOPE_MIB),
                Target("consumer_slope_mib_per_100", at_most=PUBLICATIONS_SLOPE_MIB),
                Target("octets_left", at_most=0),
            ),
            _soak_publications,
        ),
        Case(
            "slow-consumer",
            "a consumer that stops reading 1 GiB: the producer's memory, and another's speed",
            (
                Target("producer_growth_mib", at_most=GROWTH_MIB),
                Target("beside_vs_alone", at_least=0.85),
            ),
            _slow_consumer,
        ),
        *spread.CASES,
        *relayed.CASES,
        *speed.CASES,
        *rivals.CASES,
        *added.CASES,
        *losses.CASES,
        *stalls.CASES,
        *codecs.CASES,
        *depots.CASES,
        *ways.CASES,
        *sealed.CASES,
        *guarded.CASES,
    )
}
