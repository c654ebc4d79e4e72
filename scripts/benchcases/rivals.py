"""picoquic's goodput beside what others carry on the same machine, in the same minutes."""

from statistics import median
from typing import Any

from benchcases import baseline, environments, peer
from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place
from benchcases.figures import Result, Target, column, megabytes, quotients, spread
from benchcases.roles import ProducerEnd
from benchcases.transfers import retrieved
from benchcases.turns import in_turn

#: Seconds that the peer is measured for, if there is no hurry.
_PEER_S = 5


def _vs_peer(case: Case, place: Place, options: Options) -> Result:
    """Retrieve a finished cache, in turn with the peer's own bench in the forms that it has.

    What counts is the form that is the faster one here.
    """
    cache = Cache.of_octets(options.octets(500e6))
    seconds = max(1, min(_PEER_S, round(cache.octets / 100e6)))
    commands = environments.PEER.made()
    with End(ProducerEnd, place) as producer:
        producer.ask("publish", cache)

        def ours(_: int) -> dict[str, Any]:
            return retrieved(place, producer, cache)

        def alone(_: int) -> dict[str, Any]:
            rate = peer.loopback(commands, place, cache.object_octets, seconds)
            return {"mb_per_s": rate}

        def apart(_: int) -> dict[str, Any]:
            rate = peer.two_processes(commands, place, cache.object_octets, seconds)
            return {"mb_per_s": rate}

        runs, *theirs = in_turn(case.name, options.pairs, ours, alone, apart)
    in_one, in_two = (median(column(rates, "mb_per_s")) for rates in theirs)
    found = quotients(runs, theirs[0 if in_one > in_two else 1], "mb_per_s")
    figures = _ours(cache, runs) | {
        "peer": environments.PEER.stamp,
        "peer_in_one_process_mb_per_s": round(in_one, 1),
        "peer_in_two_processes_mb_per_s": round(in_two, 1),
        "vs_peer_runs": [round(q, 3) for q in found],
    }
    return Result(case.name, figures, {"vs_peer": round(median(found), 3)}, case.targets)


def _vs_tls(case: Case, place: Place, options: Options) -> Result:
    """Retrieve a finished cache, in turn with as many octets through TLS over TCP."""
    cache = Cache.of_octets(options.octets(500e6))
    script = baseline.needed(options.checkout)
    with End(ProducerEnd, place) as producer:
        producer.ask("publish", cache)
        runs, theirs = in_turn(
            case.name,
            options.pairs,
            lambda _: retrieved(place, producer, cache),
            lambda _: baseline.tls(script, cache.octets),
        )
    found = quotients(runs, theirs, "mb_per_s")
    figures = _ours(cache, runs) | {
        "tls_mb_per_s": round(median(column(theirs, "mb_per_s")), 1),
        "tls_receiver_cpu_s": round(median(column(theirs, "receiver_cpu_s")), 2),
        "vs_tls_runs": [round(q, 3) for q in found],
    }
    return Result(case.name, figures, {"vs_tls": round(median(found), 3)}, case.targets)


def _ours(cache: Cache, runs: list[dict[str, Any]]) -> dict[str, Any]:
    rates = column(runs, "mb_per_s")
    return {
        "mb": megabytes(cache.octets),
        "object_octets": cache.object_octets,
        "mb_per_s": round(median(rates), 1),
        "mb_per_s_spread": spread(rates, 1),
        "producer_cpu_s": round(median(column(runs, "producer_cpu_s")), 2),
        "consumer_cpu_s": round(median(column(runs, "cpu_s")), 2),
    }


CASES = (
    Case(
        "vs-peer",
        "picoquic: verified MB/s, to those of another implementation, which verifies nothing",
        (Target("vs_peer", at_least=1.0),),
        _vs_peer,
        pairs=5,
        engine="picoquic",
    ),
    Case(
        "vs-tls",
        "picoquic: verified MB/s, to those of TLS over TCP in asyncio",
        (Target("vs_tls", at_least=0.5),),
        _vs_tls,
        pairs=5,
        engine="picoquic",
    ),
)
