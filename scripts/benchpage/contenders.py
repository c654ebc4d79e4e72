"""Who is compared on the page, where its figure comes from, and what it promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: What is asked of each, and what that means. The order of the columns.
GUARANTEES: Mapping[str, str] = MappingProxyType(
    {
        "encrypted": "nobody on the way reads along, and the other end has shown who it is",
        "checked": "each object's digest is verified by its consumer, whoever passed it on",
        "late join": "who comes while it is being sent gets all of it, each object once",
        "fan-out": "one copy leaves the sender however many receivers there are",
        "sender may die": "what it has sent can still be had when it is gone",
    }
)


@dataclass(frozen=True)
class Contender:
    """One row of the comparison."""

    what: str
    sources: tuple[tuple[str, ...], ...]
    """The name of a run and where its result has the rate, members joined by dots; of several
    places the best counts, of several runs the first that was made."""

    guarantees: Mapping[str, str]
    lacks: str
    ours: bool = False


def _promises(*words: str) -> Mapping[str, str]:
    return MappingProxyType(dict(zip(GUARANTEES, words, strict=True)))


_KVCS = _promises("yes", "yes", "yes", "yes, by relays", "yes, at a relay")
_STREAM = _promises("yes", "no", "no", "no", "no")

#: What the others are divided by.
FIRST = Contender(
    "kvcs, engine aioquic, datagrams of 1,452",
    (("goodput-1452", "figures.mb_per_s"),),
    _KVCS,
    "cheap packets: each costs an interpreter its time",
    ours=True,
)

CONTENDERS: tuple[Contender, ...] = (
    FIRST,
    Contender(
        "kvcs, engine aioquic, datagrams of 8,900",
        (("goodput-8900", "figures.mb_per_s"),),
        _KVCS,
        "the same; a path that takes them",
        ours=True,
    ),
    Contender(
        "kvcs, engine picoquic",
        (
            ("goodput-1452-picoquic", "figures.mb_per_s"),
            ("vs-tls", "figures.mb_per_s"),
            ("vs-peer", "figures.mb_per_s"),
        ),
        _KVCS,
        "the same; Python 3.12, and it listens on every address",
        ours=True,
    ),
    Contender(
        "kvcs, engine aioquic, through a relay",
        (("relayed-1", "figures.relayed.total_mb_per_s"),),
        _KVCS,
        "a core for the relay, here of the same ones",
        ours=True,
    ),
    Contender(
        "stock aioquic, one raw stream, datagrams of 1,452",
        (("goodput-1452", "figures.baseline_mb_per_s"),),
        _STREAM,
        "messages, names, layers, priorities",
    ),
    Contender(
        "stock aioquic, one raw stream, datagrams of 8,900",
        (("goodput-8900", "figures.baseline_mb_per_s"),),
        _STREAM,
        "the same",
    ),
    Contender(
        "TLS 1.3 over TCP in asyncio, one stream",
        (("tls", "mb_per_s"), ("vs-tls", "figures.tls_mb_per_s")),
        _STREAM,
        "the same; a lost packet holds up everything behind it",
    ),
    Contender(
        "aiomoqt, another implementation of MOQT, its own bench",
        (
            (
                "vs-peer",
                "figures.peer_in_one_process_mb_per_s",
                "figures.peer_in_two_processes_mb_per_s",
            ),
        ),
        _promises("yes", "no", "yes", "yes, by its relay", "no"),
        "layers, manifests; its relay forgets a track that has ended",
    ),
    Contender(
        "Mooncake's transfer engine over TCP, one object",
        (("mooncake", "mb_per_s"),),
        _promises("no", "no", "no", "no", "no"),
        "anything but reading memory by address; its store, not measured here, adds keys and "
        "replicas; nor is RDMA, which it is made for",
    ),
    Contender(
        "Mooncake's transfer engine over TCP, objects of 32 KiB",
        (("mooncake-32k", "mb_per_s"),),
        _promises("no", "no", "no", "no", "no"),
        "the same",
    ),
)
