"""The cases with a relay between producer and consumers: what passing on costs, and who pays.

Every relay is a process of its own, as are producer and consumers, and nothing is in its cache
when a measurement begins. What is compared is measured in pairs, within a minute.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchcases.case import GROWTH_MIB, PUBLICATIONS_SLOPE_MIB, Case, Options
from benchcases.ends import LIMIT_S, Cache, End, Place
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
from benchcases.roles import ConsumerEnd, ProducerEnd, RelayEnd
from benchcases.turns import say

MIB = 1 << 20
#: What a producer may send of a publication, however many consumers there are: headers, manifests,
#: requests and announcements are in it.
COPIES = 1.02
#: MiB by which a relay's memory may rise for each 100 times that somebody comes and leaves: 5 KiB
#: each, a fraction of what is held for a connection, or for two subscriptions. The allocator gives
#: 4 MiB back and takes them again, so 1,000 visits cannot tell it from nothing; 3,000 can.
VISITS_SLOPE_MIB = 0.5


# -- goodput ---------------------------------------------------------------------------------------


def _relayed(case: Case, place: Place, options: Options, *, consumers: int, mb: float) -> Result:
    """Have so many consumers retrieve a finished publication at once, direct and through a relay.

    The first of them makes the relay ask for it: the relay forwards what it is receiving.
    """
    cache = Cache.of_octets(options.octets(mb * 1e6))
    direct, relayed = direct_and_relayed(case.name, place, cache, options.pairs, consumers)
    figures: dict[str, Any] = {
        "mb": megabytes(cache.octets),
        "consumers": consumers,
        "copies": round(max(column(relayed, "copies")), 4),
    }
    for what, runs in (("direct", direct), ("relayed", relayed)):
        figures[what] = {
            "total_mb_per_s": round(median(column(runs, "total_mb_per_s")), 1),
            "each_mb_per_s": round(median(column(runs, "each_mb_per_s")), 1),
            "slowest_mb_per_s": round(median(column(runs, "slowest_mb_per_s")), 1),
            "copies": round(median(column(runs, "copies")), 4),
            "producer_cpu_s": round(median(column(runs, "producer_cpu_s")), 2),
            "relay_cpu_s": round(median(column(runs, "relay_cpu_s")), 2),
            "consumer_cpu_s": round(median(column(runs, "consumer_cpu_s")), 2),
            "runs": [round(rate, 1) for rate in column(runs, "total_mb_per_s")],
        }
    found = {name: quotients(relayed, direct, name) for name in _RATES}
    figures["total_vs_direct_runs"] = [round(q, 3) for q in found["total_mb_per_s"]]
    ratios: dict[str, float | None] = {
        ratio: round(median(found[name]), 3) for name, ratio in _RATES.items()
    }
    return Result(case.name, figures, ratios, case.targets)


_RATES = {
    "total_mb_per_s": "total_vs_direct",
    "each_mb_per_s": "each_vs_direct",
    "mb_per_cpu_s": "per_cpu_s_vs_direct",
}


def direct_and_relayed(
    what: str, place: Place, cache: Cache, pairs: int, consumers: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Have consumers retrieve a cache at once, direct and through a relay that has not seen it.

    Returns:
        What was found without the relay, and through it, in pairs.
    """
    direct: list[dict[str, Any]] = []
    relayed: list[dict[str, Any]] = []
    for index in range(pairs):
        say(f"{what}: {index + 1} of {pairs}")
        with End(ProducerEnd, place) as producer, End(RelayEnd, place) as relay:
            octets = producer.ask("publish", cache)["octets"]
            producer.ask("announce", relay.ask("port"))
            through: list[End | None] = [None, relay]
            for hop in reversed(through) if index % 2 else through:
                found = _at_once(place, producer, hop, cache, consumers)
                found["copies"] = found["sent_octets"] / octets
                (direct if hop is None else relayed).append(found)
    return direct, relayed


def _at_once(
    place: Place, producer: End, relay: End | None, cache: Cache, consumers: int
) -> dict[str, float]:
    port = (relay or producer).ask("port")
    with ExitStack() as stack:
        ends = [stack.enter_context(End(ConsumerEnd, place, port=port)) for _ in range(consumers)]
        busy, sent = _cpu_s(producer), producer.ask("sent_octets")
        relay_busy = _cpu_s(relay)
        for end in ends:
            end.begin("consume", cache)
        runs = [end.answer() for end in ends]
        found = {
            "producer_cpu_s": _cpu_s(producer) - busy,
            "relay_cpu_s": _cpu_s(relay) - relay_busy,
            "consumer_cpu_s": sum(column(runs, "cpu_s")),
            "sent_octets": producer.ask("sent_octets") - sent,
        }
    began = min(column(runs, "began"))
    ended = max(run["began"] + run["seconds"] for run in runs)
    octets = sum(column(runs, "octets"))
    rates = [run["octets"] / run["seconds"] / 1e6 for run in runs]
    cpu_s = sum(found[name] for name in ("producer_cpu_s", "relay_cpu_s", "consumer_cpu_s"))
    return found | {
        "total_mb_per_s": octets / (ended - began) / 1e6,
        "each_mb_per_s": median(rates),
        "slowest_mb_per_s": min(rates),
        "mb_per_cpu_s": octets / cpu_s / 1e6,
    }


def _cpu_s(end: End | None) -> float:
    return 0.0 if end is None else float(end.ask("usage")["cpu_s"])


# -- the first layer -------------------------------------------------------------------------------

#: A cache that is still being made: 8 MB, a layer every 50 ms.
_LIVE = Cache(blocks=4)
_LIVE_INTERVAL_S = 0.05
_HOPS = ("direct", "one_relay", "two_relays")


def _first_layer_relayed(case: Case, place: Place, options: Options) -> Result:
    """Retrieve publications that no relay has seen, through none, one and two of them in turn."""
    rounds = 3 * options.pairs
    octets = options.octets(100e6)
    seeds = iter(range(1 << 20))
    cold: dict[str, list[dict[str, Any]]] = {hops: [] for hops in _HOPS}
    again: dict[str, list[dict[str, Any]]] = {hops: [] for hops in _HOPS}
    delays: dict[str, list[float]] = {hops: [] for hops in _HOPS}
    with (
        End(ProducerEnd, place, store_octets=512 * MIB, manifest_every=1) as producer,
        End(RelayEnd, place, cache_octets=512 * MIB) as far,
        End(RelayEnd, place, cache_octets=512 * MIB, upstream=far.ask("port")) as near,
        ExitStack() as stack,
    ):
        producer.ask("announce", far.ask("port"))
        consumers = {
            hops: stack.enter_context(End(ConsumerEnd, place, port=end.ask("port")))
            for hops, end in zip(_HOPS, (producer, far, near), strict=True)
        }
        for index in range(rounds + 1):
            for hops, consumer in consumers.items():
                cache = Cache(Cache.of_octets(octets).blocks, seed=next(seeds))
                producer.ask("publish", cache)
                first, second = consumer.ask("consume", cache), consumer.ask("consume", cache)
                if index:  # the first time, modules are loaded and relays find each other
                    cold[hops].append(first)
                    again[hops].append(second)
        for _ in range(options.pairs):
            for hops, consumer in consumers.items():
                live = Cache(_LIVE.blocks, seed=next(seeds))
                producer.ask("produce", live, _LIVE_INTERVAL_S, lead_s=0.5)
                ready, handed = consumer.ask("consume", live)["ready_at"], producer.ask("produced")
                delays[hops] += [at - since for at, since in zip(ready, handed, strict=True)]
    figures: dict[str, Any] = {
        "mb": megabytes(Cache.of_octets(octets).octets),
        "rounds": rounds,
        "live_mb": megabytes(_LIVE.octets),
        "live_interval_s": _LIVE_INTERVAL_S,
    }
    firsts = {hops: [first_layer_s(run) for run in runs] for hops, runs in cold.items()}
    for hops in _HOPS:
        figures[hops] = {
            "first_layer_s": round(median(firsts[hops]), 4),
            "first_layer_spread_s": [round(f(firsts[hops]), 4) for f in (min, max)],
            "manifest_s": round(median(column(cold[hops], "manifest_s")), 4),
            "complete_s": round(median(column(cold[hops], "seconds")), 3),
            "again_first_layer_s": round(median(map(first_layer_s, again[hops])), 4),
            "live_delay_s": round(median(delays[hops]), 4),
            "live_delay_max_s": round(max(delays[hops]), 4),
        }
    ratios: dict[str, float | None] = {
        f"{hops}_vs_direct": round(
            median(a / b for a, b in zip(firsts[hops], firsts["direct"], strict=True)), 3
        )
        for hops in _HOPS[1:]
    }
    return Result(case.name, figures, ratios, case.targets)


# -- a subscriber that stands still ----------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What passes through the relay, finished before, and what the relay may hold of it."""

    caches: tuple[Cache, ...]
    frozen: int
    """Publications, from the first on, that are subscribed to by those who stand still."""

    cache_octets: int
    max_behind_octets: int

    @property
    def octets(self) -> int:
        return sum(cache.octets for cache in self.caches)

    @classmethod
    def of_many(cls, octets: float) -> "Load":
        """Publications, one after the other, eight times what the cache may hold.

        Those who stand still keep half of the cache in use.
        """
        count = 64 if octets >= 128 * MIB else 32
        blocks = Cache.of_octets(octets / count).blocks
        caches = tuple(Cache(blocks, seed=seed) for seed in range(count))
        total = sum(cache.octets for cache in caches)
        return cls(caches, count // 16, total // 8, total // 32)

    @classmethod
    def of_one(cls, octets: float) -> "Load":
        """One publication, as large as the cache may be: with the headers of its Objects.

        A cache that it fills is refused to the manifest, and small ones come faster than that is
        asked for.
        """
        cache = Cache.of_octets(octets)
        return cls((cache,), 1, cache.octets + cache.octets // 256, cache.octets // 8)


def _relay_slow(case: Case, place: Place, options: Options) -> Result:
    octets = options.octets(2 * 1024 * MIB)
    figures: dict[str, Any] = {}
    ratios: dict[str, float | None] = {}
    for what, load in (("many", Load.of_many(octets)), ("one", Load.of_one(octets))):
        alone: list[dict[str, Any]] = []
        beside: list[dict[str, Any]] = []
        for index in range(options.pairs):
            for is_beside in (index % 2 == 1, index % 2 == 0):
                (beside if is_beside else alone).append(_slowed(place, load, is_beside))
        by_pairs = quotients(beside, alone, "mb_per_s")
        figures[what] = {
            "mb": megabytes(load.octets),
            "publications": len(load.caches),
            "frozen_on": load.frozen,
            "cache_mib": mebibytes(load.cache_octets),
            "max_behind_mib": mebibytes(load.max_behind_octets),
            "alone_runs": [round(rate, 1) for rate in column(alone, "mb_per_s")],
            "beside_runs": [round(rate, 1) for rate in column(beside, "mb_per_s")],
            "beside_vs_alone_runs": [round(q, 3) for q in by_pairs],
            "relay_idle_mib": mebibytes(median(column(beside, "idle"))),
            "relay_peak_mib": mebibytes(max(column(beside, "peak"))),
            "relay_alone_peak_mib": mebibytes(max(column(alone, "peak"))),
            "relay_alone_cpu_s": round(median(column(alone, "relay_cpu_s")), 2),
            "relay_beside_cpu_s": round(median(column(beside, "relay_cpu_s")), 2),
            "cache_held_mib": mebibytes(max(column(beside, "held"))),
            "copies": round(max(column(beside, "copies")), 4),
            "stalled_still_connected": all(run["stalled"]["connected"] for run in beside),
            "stalled_ended": sorted({code for run in beside for code in run["stalled"]["ended"]}),
        }
        budgets = load.cache_octets + load.max_behind_octets
        figures[what]["relay_peak_beyond_budgets_mib"] = mebibytes(
            max(column(beside, "peak")) - budgets
        )
        figures[f"{what}_growth_mib"] = mebibytes(
            max(run["peak"] - run["idle"] for run in beside) - budgets
        )
        ratios[f"{what}_beside_vs_alone"] = round(median(by_pairs), 3)
    return Result(case.name, figures, ratios, case.targets)


def _slowed(place: Place, load: Load, beside: bool) -> dict[str, Any]:
    """Retrieve everything through a relay, alone or beside two that stand still.

    One of them is a session that stays and takes nothing any more, the other one a process that
    was stopped and does not even acknowledge.
    """
    limits = {"cache_octets": load.cache_octets, "max_behind_octets": load.max_behind_octets}
    with ExitStack() as stack:
        producer = stack.enter_context(End(ProducerEnd, place))
        relay = stack.enter_context(End(RelayEnd, place, **limits))
        port = relay.ask("port")
        producer.ask("announce", port)
        names = []
        for cache in load.caches:
            producer.ask("publish", cache)
            names.append(producer.ask("name"))
        idle, busy, sent = relay.ask("reset_peak"), _cpu_s(relay), producer.ask("sent_octets")
        stalled = stopped = None
        if beside:
            # Windows that leave a session room for its requests while all its streams stand.
            stalled, stopped = (
                stack.enter_context(End(ConsumerEnd, place, port=port, stream_window=MIB))
                for _ in range(2)
            )
            for name in names[: load.frozen]:
                for end in (stalled, stopped):
                    end.ask("stall", name, 10)
            stopped.freeze()
        seconds, octets, held = 0.0, 0, 0
        with End(ConsumerEnd, place, port=port) as consumer:
            for cache in load.caches:
                found = consumer.ask("consume", cache, "discard")
                seconds, octets = seconds + found["seconds"], octets + found["octets"]
                held = max(held, relay.ask("held")["octets"])
        usage = relay.ask("usage")
        return {
            "mb_per_s": octets / seconds / 1e6,
            "idle": idle,
            "peak": usage["peak"],
            "held": held,
            "relay_cpu_s": usage["cpu_s"] - busy,
            "copies": (producer.ask("sent_octets") - sent) / octets,
            "stalled": None if stalled is None else stalled.ask("stalled"),
        }


# -- soaks -----------------------------------------------------------------------------------------

#: Tracks of a publication that a consumer asks for: the signed manifest, K and V.
_TRACKS = 3
#: Visits between two looks at the relay's memory.
_VISITS_AT_ONCE = 10
#: Seconds that the relay of the soak is subscribed to a Track after its last subscriber has left.
_LINGER_S = 1.0


def _relay_soak(case: Case, place: Place, options: Options) -> Result:
    figures = _visited(place, options.visits or 3000) | _passed_on(
        place, options.publications or 2000
    )
    return Result(case.name, figures, {}, case.targets)


def _visited(place: Place, visits: int) -> dict[str, Any]:
    """Come and leave at a relay, beside somebody who stays, and with nobody there.

    The publication is being made all the while, so that the relay has something to be subscribed
    to. With nobody there, it is given the time to leave, too, after each few visits. Half as many
    visits go before those that count: after so many connections the allocator has all it needs.
    """
    batches = max(2, visits // _VISITS_AT_ONCE)
    each = visits // batches
    pauses = batches // 2
    points: list[Point] = []
    asked: list[int] = []
    verified: list[int] = []
    cache = Cache(blocks=4)
    every = -(-batches // cache.layers)  # lest the layers come to an end before the visits
    with (
        End(ProducerEnd, place) as producer,
        End(RelayEnd, place, linger_s=_LINGER_S) as relay,
        End(ConsumerEnd, place, port=relay.ask("port")) as staying,
        End(ConsumerEnd, place, port=relay.ask("port")) as visitor,
    ):
        producer.ask("announce", relay.ask("port"))
        for stays in (True, False):
            part = Cache(cache.blocks, seed=int(stays))
            producer.ask("prepare", part)
            producer.ask("hand_over", cache.layers // 2)
            name = producer.ask("name")
            if stays:
                for batch in range(pauses):
                    visitor.ask("visit", name, each, anew=bool(batch % 2))
            before = producer.ask("subscribed")["asked"]
            if stays:  # a new layer comes now and then, on a busy machine less than every 30 s
                staying.begin("consume", part, "discard", stall_s=LIMIT_S)
            first = 0 if stays else pauses
            for batch in range(first, first + pauses):
                visitor.ask("visit", name, each, anew=bool(batch % 2))
                if not stays:
                    _none_left(producer)
                elif not batch % every:
                    producer.ask("hand_over", 1)
                # What is cached grows as the publication does, and is no cost of a visit.
                beyond = relay.ask("usage")["rss"] - relay.ask("held")["octets"]
                points.append(((batch + 1) * each / 100, beyond / MIB))
            producer.ask("finish")
            if not stays:
                staying.begin("consume", part, "discard")
            verified.append(staying.answer()["objects"])
            asked.append(producer.ask("subscribed")["asked"] - before)
        left = _none_left(producer)
    steady = settled(points)
    return {
        "visits": 2 * pauses * each,
        "visits_slope_mib_per_100": round(slope(steady), 3),
        "visits_relay_beyond_cache_mib": rise(steady),
        "visits_objects_short": 2 * cache.objects - sum(verified),
        "beside_one_upstream_subscriptions": asked[0],
        "alone_upstream_subscriptions": asked[1],
        "alone_upstream_per_pause": round((asked[1] - _TRACKS) / pauses, 3),
        "upstream_left": left,
    }


def _none_left(producer: End) -> int:
    """Wait until the relay is subscribed to nothing; return to how much it is, if it stays so."""
    left: int = producer.ask("until_unsubscribed", _LINGER_S + 5.0)
    return left


def _passed_on(place: Place, count: int) -> dict[str, Any]:
    """Publish, retrieve through the relay, expire: many times what the relay may hold."""
    budget = 8 * MIB
    points: list[Point] = []
    seconds: list[float] = []
    held = tracks = 0
    with (
        End(ProducerEnd, place, ttl_s=2.0) as producer,
        End(RelayEnd, place, cache_octets=budget) as relay,
        End(ConsumerEnd, place, port=relay.ask("port")) as consumer,
    ):
        producer.ask("announce", relay.ask("port"))
        for index in range(count):
            cache = Cache(blocks=4, layers=4, heads=2, dim=64, seed=index)
            octets = producer.ask("publish", cache)["octets"]
            found = consumer.ask("consume", cache, "allocate")
            seconds.append(found["seconds"])
            now = relay.ask("held")
            held, tracks = max(held, now["octets"]), max(tracks, now["tracks"])
            if not index % 10 or index == count - 1:
                points.append((index / 100, relay.ask("usage")["rss"] / MIB))
        asked = producer.ask("subscribed")["asked"]
    steady = settled(points)
    return {
        "publications": count,
        "publication_octets": octets,
        "retrieval_s": round(median(seconds), 4),
        "publications_slope_mib_per_100": round(slope(steady), 3),
        "publications_relay_mib": rise(steady),
        "upstream_per_publication": round(asked / count, 3),
        "cache_budget_octets": budget,
        "cache_held_octets": held,
        "cache_overrun_publications": round(max(0, held - budget) / octets, 3),
        "tracks_held": tracks,
        "last_objects_short": cache.objects - found["objects"],
    }


# -- all of them -----------------------------------------------------------------------------------

CASES = (
    *(
        Case(
            f"relayed-{consumers}",
            f"{consumers} at once through a relay and direct, {mb} MB each: MB/s, copies sent",
            (Target("copies", at_most=COPIES),),
            partial(_relayed, consumers=consumers, mb=mb),
        )
        for consumers, mb in ((1, 500), (4, 200), (16, 64))
    ),
    Case(
        "first-layer-relayed",
        "to the first layer of 100 MB that no relay has seen: direct, through one, through two",
        (),
        _first_layer_relayed,
    ),
    Case(
        "relay-slow",
        "who stands still at a relay during 2 GiB: another's speed, the relay's memory",
        (
            Target("many_beside_vs_alone", at_least=0.85),
            Target("one_beside_vs_alone", at_least=0.85),
            Target("many_growth_mib", at_most=GROWTH_MIB),
            Target("one_growth_mib", at_most=GROWTH_MIB),
        ),
        _relay_slow,
    ),
    Case(
        "relay-soak",
        "3,000 come and leave, 2,000 publications pass: MiB a relay gains for each 100",
        (
            Target("visits_slope_mib_per_100", at_most=VISITS_SLOPE_MIB),
            Target("visits_objects_short", at_most=0),
            Target("beside_one_upstream_subscriptions", at_most=_TRACKS),
            Target("alone_upstream_per_pause", at_most=2),
            Target("upstream_left", at_most=0),
            Target("publications_slope_mib_per_100", at_most=PUBLICATIONS_SLOPE_MIB),
            Target("upstream_per_publication", at_most=_TRACKS),
            Target("cache_overrun_publications", at_most=1),
            Target("last_objects_short", at_most=0),
        ),
        _relay_soak,
    ),
)
