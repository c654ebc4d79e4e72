"""One transfer, measured: a consumer that retrieves a cache, or a raw stream without one."""

from typing import Any

from benchcases.ends import Cache, End, Place
from benchcases.proxy import Path, ProxyEnd
from benchcases.raw import RawReceiverEnd, RawSenderEnd
from benchcases.roles import ConsumerEnd


def retrieved(
    place: Place,
    producer: End,
    cache: Cache,
    sink: str = "arrays",
    *,
    port: int | None = None,
    datagram: int | None = 1452,
    **how: Any,
) -> dict[str, Any]:
    """Have a consumer in a process of its own retrieve what a producer has published.

    Args:
        place: Keys and certificates.
        producer: Who has it.
        cache: Which; verified Object by Object.
        sink: Where to, see :meth:`ConsumerEnd.consume`.
        port: Where to dial, if not at the producer.
        datagram: Octets of the consumer's datagrams.
        how: More for :meth:`ConsumerEnd.consume`.

    Returns:
        What the consumer found, ``mb_per_s``, and ``producer_cpu_s``.
    """
    port = producer.ask("port") if port is None else port
    with End(ConsumerEnd, place, port=port, datagram=datagram) as consumer:
        return measured(producer, consumer, "consume", cache, sink, **how)


def streamed(
    place: Place, sender: End, octets: int, *, port: int | None = None, datagram: int = 1452
) -> dict[str, Any]:
    """Have octets taken in a process of their own, from a :class:`RawSenderEnd`.

    Returns:
        As :func:`retrieved` does.
    """
    port = sender.ask("port") if port is None else port
    with End(RawReceiverEnd, place, port=port, datagram=datagram) as receiver:
        return measured(sender, receiver, "receive", octets)


def measured(sender: End, receiver: End, verb: str, *args: Any, **options: Any) -> dict[str, Any]:
    """Ask a receiver; add how fast it was, and what the sender's processor had to do."""
    before = sender.ask("usage")["cpu_s"]
    run: dict[str, Any] = receiver.ask(verb, *args, **options)
    run["producer_cpu_s"] = sender.ask("usage")["cpu_s"] - before
    run["mb_per_s"] = run["octets"] / run["seconds"] / 1e6
    return run


def let_through(place: Place, octets: int) -> dict[str, float]:
    """Say what the proxy lets through where it neither loses nor delays anything.

    Returns:
        MB/s of a raw stream, and MB for each CPU second of the proxy.
    """
    with (
        End(RawSenderEnd, place) as sender,
        End(ProxyEnd, place, port=sender.ask("port"), path=Path()) as proxy,
    ):
        before = proxy.ask("usage")["cpu_s"]
        run = streamed(place, sender, octets, port=proxy.ask("port"))
        cpu_s = proxy.ask("usage")["cpu_s"] - before
    return {
        "mb_per_s": round(run["mb_per_s"], 1),
        "mb_per_proxy_cpu_s": round(run["octets"] / 1e6 / cpu_s, 1),
    }
