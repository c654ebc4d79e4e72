"""What is left of the goodput on a path that loses datagrams."""

from statistics import median
from typing import Any

from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, column, megabytes, quotients, spread
from benchcases.proxy import Path, ProxyEnd
from benchcases.raw import RawSenderEnd
from benchcases.roles import ProducerEnd
from benchcases.transfers import let_through, retrieved, streamed
from benchcases.turns import in_turn

#: In each direction.
_LOSS = 0.01
_ROUND_TRIP_S = 0.02


def _lossy(case: Case, place: Place, options: Options) -> Result:
    """Transfer a finished cache over a lossy path, in turn with a raw stream over the same one.

    Both of a pair lose the first, the second, ... datagram, or both do not.
    """
    cache = Cache.of_octets(options.octets(20e6))
    unimpaired = let_through(place, max(cache.octets, 100_000_000))
    with End(ProducerEnd, place) as producer, End(RawSenderEnd, place) as sender:
        producer.ask("publish", cache)

        def over(seed: int, end: End) -> dict[str, Any]:
            path = Path(delay_s=_ROUND_TRIP_S / 2, loss=_LOSS, seed=seed)
            with End(ProxyEnd, place, port=end.ask("port"), path=path) as proxy:
                port = proxy.ask("port")
                run = (
                    retrieved(place, producer, cache, port=port)
                    if end is producer
                    else streamed(place, sender, cache.octets, port=port)
                )
                down = proxy.ask("counts")["down"]
            run["lost"] = down["lost"] / (down["lost"] + down["datagrams"])
            return run

        runs, raw = in_turn(
            case.name,
            options.pairs,
            lambda seed: over(seed, producer),
            lambda seed: over(seed, sender),
        )
    found = quotients(runs, raw, "mb_per_s")
    figures = {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "round_trip_s": _ROUND_TRIP_S,
        "loss": _LOSS,
        "lost_of_the_data": round(median(column(runs, "lost")), 4),
        "mb_per_s": round(median(column(runs, "mb_per_s")), 2),
        "mb_per_s_spread": spread(column(runs, "mb_per_s"), 2),
        "raw_mb_per_s": round(median(column(raw, "mb_per_s")), 2),
        "raw_mb_per_s_spread": spread(column(raw, "mb_per_s"), 2),
        "vs_raw_runs": [round(q, 3) for q in found],
        "proxy_unimpaired": unimpaired,
    }
    return Result(case.name, figures, {"vs_raw": round(median(found), 3)}, case.targets)


CASES = (
    Case(
        "lossy",
        "1 % lost, round trips of 20 ms: verified MB/s, to those of the engine's raw stream there",
        (Target("vs_raw", at_least=0.9),),
        _lossy,
        pairs=5,
    ),
)
