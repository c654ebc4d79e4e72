"""The UDP endpoint on real sockets, some of which refuse to cooperate."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from moqt.aio import udp
from moqt.aio.udp import (
    SO_RCVBUFFORCE,
    SO_SNDBUFFORCE,
    Address,
    UdpEndpoint,
    bound_socket,
    connected_socket,
    cut,
)

pytestmark = pytest.mark.network

PATIENCE_S = 10.0


class Inbox:
    """Collects what an endpoint receives, and the sizes of its batches."""

    def __init__(self) -> None:
        self.datagrams: list[bytes] = []
        self.addresses: set[Address] = set()
        self.batches: list[int] = []
        self.errors: list[OSError] = []
        self._in_batch = 0
        self._news = asyncio.Event()

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        datagrams = cut(data, size)
        self.datagrams += datagrams
        self.addresses.add(address)
        self._in_batch += len(datagrams)

    def batch_received(self) -> None:
        self.batches.append(self._in_batch)
        self._in_batch = 0
        self._news.set()

    def error_received(self, error: OSError) -> None:
        self.errors.append(error)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Moody(socket.socket):
    """A socket that refuses the first sends, every segmented one, or what is above its limit."""

    refusals: list[int]
    segmented: list[int]
    limit = 1 << 16
    answer_to_runs = errno.EMSGSIZE

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        if ancdata:
            self.segmented.append(len(buffers))
        if ancdata and errno.EIO in self.refusals:
            raise OSError(errno.EIO, "no segmentation here")
        if max(map(len, buffers)) > self.limit:
            raise OSError(self.answer_to_runs if ancdata else errno.EMSGSIZE, "too large")
        for number in (errno.EAGAIN, errno.EMSGSIZE):
            if number in self.refusals:
                self.refusals.remove(number)
                raise OSError(number, "not now")
        return super().sendmsg(buffers, ancdata, flags, *([address] if address else []))


@asynccontextmanager
async def receiving(family: int = socket.AF_INET, host: str = "127.0.0.1") -> AsyncIterator[Any]:
    inbox = Inbox()
    endpoint = UdpEndpoint(bound_socket(family, (host, 0)), inbox)
    try:
        yield endpoint, inbox
    finally:
        endpoint.close()


@asynccontextmanager
async def moody(address: Address, *refusals: int) -> AsyncIterator[tuple[UdpEndpoint, Moody]]:
    sock = Moody(socket.AF_INET, socket.SOCK_DGRAM)
    sock.refusals, sock.segmented = list(refusals), []
    sock.setblocking(False)
    sock.connect(address)
    endpoint = UdpEndpoint(sock, Inbox())
    try:
        yield endpoint, sock
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
async def test_datagrams_are_never_cut_neither_of_ipv4_nor_of_ipv6(family: int, host: str) -> None:
    async with receiving(family, host) as (endpoint, _):
        # Of an IPv6 socket, too: it may serve IPv4.
        assert endpoint._sock.getsockopt(socket.IPPROTO_IP, udp._IP_MTU_DISCOVER) == 3
        if family == socket.AF_INET6:
            assert endpoint._sock.getsockopt(socket.IPPROTO_IPV6, udp._IPV6_MTU_DISCOVER) == 3


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
async def test_datagrams_arrive_as_they_were_sent(family: int, host: str) -> None:
    sent = [bytes([n]) * 1200 for n in range(100)] + [b"short"]
    async with receiving(family, host) as (there, inbox):
        here = UdpEndpoint(connected_socket(family, there.address), Inbox())
        here.send(sent, None)
        await inbox.until(lambda: len(inbox.datagrams) == len(sent))

        assert inbox.datagrams == sent
        assert inbox.addresses == {here.address}
        here.close()


async def test_a_wakeup_hands_over_what_has_queued_up_as_one_batch() -> None:
    async with receiving() as (there, inbox):
        here = UdpEndpoint(connected_socket(socket.AF_INET, there.address), Inbox())
        here.send([bytes(1200)] * 20, None)
        await inbox.until(lambda: len(inbox.datagrams) == 20)

        assert inbox.batches == [20]
        here.close()


async def test_without_segmentation_datagrams_leave_one_by_one() -> None:
    sent = [bytes([n]) * 1200 for n in range(50)]
    async with receiving() as (there, inbox), moody(there.address, errno.EIO) as (here, sock):
        here.send(sent, None)
        here.send(sent, None)
        await inbox.until(lambda: len(inbox.datagrams) == 100)

        assert inbox.datagrams == sent * 2
        assert sock.segmented == [50]


async def test_a_datagram_that_the_system_refuses_for_its_size_is_told() -> None:
    async with receiving() as (there, inbox), moody(there.address) as (here, _):
        assert not here.send([bytes(66_000)], None)
        assert not here.send([b"before", bytes(66_000), b"behind"], None)
        assert here.send([b"after"], None)
        await inbox.until(lambda: len(inbox.datagrams) == 3)

        assert inbox.datagrams == [b"before", b"behind", b"after"]


async def test_what_a_router_returned_is_not_held_against_what_is_sent_next() -> None:
    async with receiving() as (there, inbox), moody(there.address, errno.EMSGSIZE) as (here, sock):
        assert here.send([b"small"], None)
        await inbox.until(lambda: bool(inbox.datagrams))

        assert not sock.refusals


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EMSGSIZE])
async def test_a_run_of_datagrams_too_large_does_not_end_segmentation(number: int) -> None:
    sent = [bytes([n]) * 1200 for n in range(50)]
    async with receiving() as (there, inbox), moody(there.address) as (here, sock):
        sock.limit, sock.answer_to_runs = 1300, number
        assert not here.send([bytes(1400)] * 5, None)
        sock.segmented.clear()
        assert here.send(sent, None)
        await inbox.until(lambda: len(inbox.datagrams) == 50)

        assert inbox.datagrams == sent
        assert sock.segmented == [50]


async def test_what_a_full_socket_refuses_leaves_later_and_in_order() -> None:
    sent = [bytes([n]) * (1200 + n) for n in range(50)]
    full = [errno.EAGAIN] * 3
    async with receiving() as (there, inbox), moody(there.address, *full) as (here, _):
        here.send(sent[:25], None)
        here.send(sent[25:], None)
        assert not inbox.datagrams
        await inbox.until(lambda: len(inbox.datagrams) == len(sent))

        assert inbox.datagrams == sent


async def test_a_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moqt.aio.udp.SEND_BACKLOG", 3000)
    async with receiving() as (there, inbox), moody(there.address, errno.EAGAIN) as (here, _):
        for n in range(5):
            here.send([bytes([n]) * 1000], None)
        await inbox.until(lambda: len(inbox.datagrams) == 3)
        here.send([b"after"], None)
        await inbox.until(lambda: len(inbox.datagrams) == 4)

        assert [d[:1] for d in inbox.datagrams] == [b"\0", b"\1", b"\2", b"a"]


class Stingy(socket.socket):
    """A socket whose system grants small buffers, and more only to who may insist."""

    may_insist = False
    granted = 0

    def setsockopt(self, level: int, option: int, value: Any) -> None:  # type: ignore[override]
        if level != socket.SOL_SOCKET:
            super().setsockopt(level, option, value)
        elif option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.granted = min(value, 100_000)
        elif option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            if not self.may_insist:
                raise PermissionError(errno.EPERM, "not permitted")
            self.granted = value

    def getsockopt(self, level: int, option: int) -> int:  # type: ignore[override]
        return 2 * self.granted


@pytest.mark.parametrize("may_insist", [False, True])
def test_small_buffers_are_told_once_with_the_setting_that_helps(
    monkeypatch: pytest.MonkeyPatch, may_insist: bool
) -> None:
    monkeypatch.setattr(Stingy, "may_insist", may_insist)
    monkeypatch.setattr("moqt.aio.udp.socket.socket", Stingy)
    monkeypatch.setattr(udp, "_tell_small_buffer", cache(udp._tell_small_buffer.__wrapped__))
    with capture_logs() as logs:
        for _ in range(3):
            bound_socket(socket.AF_INET, ("127.0.0.1", 0)).close()

    told = [(line["log_level"], line["granted"], line["help"].split("=")[0]) for line in logs]
    small = [
        ("info", 100_000, "sysctl -w net.core.wmem_max"),
        ("info", 100_000, "sysctl -w net.core.rmem_max"),
    ]
    assert told == ([] if may_insist else small)


async def test_a_port_nobody_listens_on_is_reported() -> None:
    async with receiving() as (there, _):
        address = there.address
    inbox = Inbox()
    here = UdpEndpoint(connected_socket(socket.AF_INET, address), inbox)
    here.send([b"anyone?"], None)
    await inbox.until(lambda: bool(inbox.errors))

    assert isinstance(inbox.errors[0], ConnectionRefusedError)
    here.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_error_of_the_socket_does_not_make_it_deaf(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        async with receiving() as (there, _):
            address = there.address
        inbox = Inbox()
        here = UdpEndpoint(connected_socket(socket.AF_INET, address), inbox)
        here.send([b"anyone?"], None)
        await inbox.until(lambda: bool(inbox.errors))
        there = UdpEndpoint(bound_socket(socket.AF_INET, address), Inbox())
        there.send([b"now there is"], here.address)
        await inbox.until(lambda: bool(inbox.datagrams))
        here.close()
        there.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_a_closed_endpoint_sends_nothing_and_closes_again() -> None:
    async with receiving() as (there, _):
        here = UdpEndpoint(connected_socket(socket.AF_INET, there.address), Inbox())
        here.close()
        here.close()
        here.send([b"late"], None)

        assert here.closed
