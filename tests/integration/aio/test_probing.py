"""The engine aioquic on paths that take so much and no more, and less after a while."""

import asyncio
import errno
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aioquic.quic import connection as aioquic_connection
from structlog.testing import capture_logs

from moqt.aio.aioquic import pathmtu
from moqt.aio.aioquic.pathmodel import initial_window
from moqt.aio.aioquic.pathmtu import BASE, CEILING
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.aio.engine import engine_named
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import CertificateFiles
from moqt.aio.transport import QuicTransport
from moqt.aio.udp import Address, UdpEndpoint, bound_socket, connected_socket, cut
from tests.integration.aio.test_engines import Ends, Pair, Pump, Recorder

pytestmark = pytest.mark.network


class Narrow:
    """A path to ``server``: datagrams above ``limit`` vanish in it, of either direction.

    It is one of the network's: neither end is told.
    """

    def __init__(self, server: Address, limit: float = math.inf) -> None:
        self.limit = limit
        self.passed: list[int] = []
        self.vanished: list[int] = []
        self._server = server
        self._front = UdpEndpoint(bound_socket(socket.AF_INET, ("127.0.0.1", 0)), self)
        self._backs: dict[Address, UdpEndpoint] = {}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._front.address
        return host, port

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        back = self._backs.get(address)
        if back is None:
            sock = connected_socket(socket.AF_INET, self._server)
            back = self._backs[address] = UdpEndpoint(sock, _Back(self, address))
        back.send(self.squeeze(cut(data, size)), None)

    def batch_received(self) -> None: ...

    def error_received(self, error: OSError) -> None: ...

    def returned(self, datagrams: list[bytes], address: Address) -> None:
        self._front.send(self.squeeze(datagrams), address)

    def squeeze(self, datagrams: list[bytes]) -> list[bytes]:
        sizes = list(map(len, datagrams))
        self.passed += [size for size in sizes if size <= self.limit]
        self.vanished += [size for size in sizes if size > self.limit]
        return [data for data in datagrams if len(data) <= self.limit]

    def close(self) -> None:
        for endpoint in (self._front, *self._backs.values()):
            endpoint.close()


class _Back:
    """What comes back to one client."""

    def __init__(self, path: Narrow, client: Address) -> None:
        self._path, self._client = path, client

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        self._path.returned(cut(data, size), self._client)

    def batch_received(self) -> None: ...

    def error_received(self, error: OSError) -> None: ...


@pytest.fixture
def ends(certificates: CertificateFiles) -> Ends:
    return Ends(engine_named("aioquic"), certificates)


@asynccontextmanager
async def through(
    ends: Ends, limit: float = math.inf, settings: QuicSettings | None = None
) -> AsyncIterator[tuple[Pair, Narrow]]:
    """Connect through a path that takes datagrams of ``limit`` octets."""
    arrived: asyncio.Queue[Recorder] = asyncio.Queue()

    def arriving(transport: QuicTransport) -> Recorder:
        recorder = Recorder(transport)
        arrived.put_nowait(recorder)
        return recorder

    async with ends.listening(settings, factory=arriving) as listener:
        path = Narrow(listener.address, limit)
        try:
            dialling = await ends.dialled(path.address, settings)
            async with asyncio.timeout(10.0):
                accepted = await arrived.get()
            yield Pair(dialling, accepted, listener), path
            dialling.transport.abandon()
        finally:
            path.close()


def size_of(recorder: Recorder) -> int | None:
    return recorder.transport.stats().datagram_octets


def connection_of(recorder: Recorder) -> Any:
    assert isinstance(recorder.transport, AioquicTransport)
    return recorder.transport._connection


def has_found(recorder: Recorder) -> bool:
    """Say whether the search is over for now."""
    path_mtu = connection_of(recorder)._path_mtu
    return path_mtu is not None and (
        path_mtu.resumes_at is not None or path_mtu.size == path_mtu._ceiling
    )


async def test_loopback_takes_the_largest_at_the_first_probe(ends: Ends) -> None:
    async with through(ends) as (pair, path):
        for end in (pair.client, pair.server):
            await end.until(lambda end=end: has_found(end))  # type: ignore[misc]

        assert size_of(pair.client) == size_of(pair.server) == CEILING
        assert sorted(size for size in path.passed if size > BASE) == [CEILING, CEILING]


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        (1200, 1200), (1231, 1200), (1300, 1280), (1452, 1452), (1480, 1472), (5000, 1472),
        (8971, 8952), (9000, 8972), (15_999, 8972), (20_000, 16_000),
    ],
)  # fmt: skip
async def test_the_largest_size_that_passes_is_found_and_no_probe_counts_as_congestion(
    ends: Ends, limit: int, size: int
) -> None:
    async with through(ends, limit) as (pair, path):
        for end in (pair.client, pair.server):
            await end.until(lambda end=end: has_found(end))  # type: ignore[misc]
            stats = end.transport.stats()

            assert stats.datagram_octets == size
            assert stats.packets_lost == 0
            assert stats.congestion_window >= initial_window(size)
        assert len(path.vanished) <= 2 * 9

        Pump(pair.client, 2_000_000, (6, 10))
        await pair.server.until(lambda: pair.server.fins == {6, 10})

        assert max(path.passed) == size
        assert pair.server.received == 2_000_000


@pytest.mark.parametrize(("before", "after"), [(CEILING, 1400), (8972, 8960), (1472, 1200)])
async def test_a_path_that_narrows_amid_a_transfer_costs_nothing_but_a_pause(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    monkeypatch.setattr(pathmtu, "RETREAT_S", 0.05)
    payload = os.urandom(6_000_000)
    async with through(ends, before) as (pair, path):
        await pair.client.until(lambda: size_of(pair.client) == before)
        pair.client.transport.send_stream_data(6, payload, True)
        await pair.server.until(lambda: pair.server.received > 1_000_000)
        path.limit = after
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert pair.server.data[6] == payload

        pair.client.transport.ping()
        expected = max(size for size in (BASE, *pathmtu.LIKELY) if size <= after)
        await pair.client.until(lambda: has_found(pair.client) and size_of(pair.client) == expected)
        assert not pair.client.losses
        assert not pair.server.losses


async def test_small_objects_come_through_a_path_that_has_narrowed_while_nothing_was_sent(
    ends: Ends,
) -> None:
    async with through(ends, 1472) as (pair, path):
        await pair.client.until(lambda: size_of(pair.client) == 1472)
        path.limit = 1200
        for stream_id in range(6, 46, 4):
            # Of each some packets are too large, and the last one is not.
            pair.client.transport.send_stream_data(stream_id, bytes(4000), True)
            await pair.server.until(lambda stream_id=stream_id: stream_id in pair.server.fins)  # type: ignore[misc]

        assert size_of(pair.client) == BASE
        assert pair.server.received == 40_000


async def test_a_size_is_found_while_data_fill_the_window(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathmtu, "RETREAT_S", 0.01)
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        connection = connection_of(pair.client)
        pump = Pump(pair.client, 1 << 40, (6,))
        await pair.client.until(
            lambda: connection._loss.bytes_in_flight > connection._loss.congestion_window // 2
        )
        connection.refused(CEILING, time.monotonic())
        in_flight = [packet.sent_bytes for packet in connection._space.sent_packets.values()]
        assert max(in_flight, default=0) <= BASE
        assert connection._bulk  # what was in the others waits to be sent again
        await pair.client.until(lambda: size_of(pair.client) == BASE)
        await pair.client.until(lambda: size_of(pair.client) == CEILING)

        assert pump.left


async def test_a_search_goes_on_by_itself(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathmtu, "RETREAT_S", 0.05)
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        connection = connection_of(pair.client)
        connection.refused(CEILING, time.monotonic())
        assert connection.get_timer() <= connection._path_mtu.resumes_at
        pair.client.transport.wake()
        await pair.client.until(lambda: size_of(pair.client) == BASE)
        await pair.client.until(lambda: size_of(pair.client) == CEILING)


async def test_no_larger_buffer_is_expected_of_the_peer_than_was_granted_here(ends: Ends) -> None:
    async with ends.connected() as pair:
        transport: Any = pair.client.transport
        recovery = connection_of(pair.client)._loss

        assert recovery._cc.buffer_octets == transport._endpoint.receive_buffer >= 50_000
        assert recovery._pacer.buffer_octets == recovery._cc.buffer_octets


async def test_a_probe_leaves_alone_and_data_right_behind_it(ends: Ends) -> None:
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        connection, now = connection_of(pair.client), time.monotonic()
        connection._path_mtu.refused(CEILING, now)
        connection._path_mtu.resumes_at = None
        window = connection._loss.congestion_window
        connection._loss._pacer._rate = None  # nothing waits for its turn
        connection.write(6, bytes(2 * window), True)
        probe = connection.datagrams_to_send(now)
        had_more = connection.more_to_send
        data = connection.datagrams_to_send(now)

        assert [len(datagram) for datagram, _ in probe] == [CEILING]
        assert had_more
        assert window - BASE < sum(len(datagram) for datagram, _ in data) <= window
        assert max(len(datagram) for datagram, _ in data) == BASE


async def test_what_was_too_large_is_sent_again_as_soon_as_that_is_known(ends: Ends) -> None:
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        connection, now = connection_of(pair.client), time.monotonic()
        connection.write(6, bytes(10_000), True)
        large = connection.datagrams_to_send(now)
        assert max(len(datagram) for datagram, _ in large) > 9000
        connection._path_mtu.refused(9000, now)
        again = connection.datagrams_to_send(now)

        assert max(len(datagram) for datagram, _ in again) == BASE
        assert sum(len(datagram) for datagram, _ in again) > 10_000


async def test_a_small_packet_is_paced_as_one(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        charged: list[int | None] = []
        pacer = connection_of(pair.client)._loss._pacer
        monkeypatch.setattr(
            pacer, "update_after_send", lambda now, octets=None: charged.append(octets)
        )
        pair.client.transport.send_stream_data(0, bytes(50), True)
        await pair.server.until(lambda: 0 in pair.server.fins)

        assert charged
        assert all(octets is not None and octets < 200 for octets in charged)


async def test_a_size_that_is_fixed_is_neither_probed_nor_left(ends: Ends) -> None:
    settings = QuicSettings(max_datagram_octets=1300)
    async with through(ends, settings=settings) as (pair, path):
        Pump(pair.client, 1_000_000, (6,))
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert max(path.passed) == 1300
        assert size_of(pair.client) == size_of(pair.server) == 1300
        assert connection_of(pair.client)._path_mtu is None


# A system that refuses


class Device:
    """Sends of more than ``limit`` octets are refused, as on an interface of that MTU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.sent: list[int] = []
        self.refused: list[int] = []
        send_run = UdpEndpoint._send_run

        def refusing(endpoint: UdpEndpoint, run: Sequence[bytes], address: Address | None) -> None:
            if max(map(len, run)) > self.limit:
                self.refused.append(max(map(len, run)))
                raise OSError(errno.EMSGSIZE, "Message too long")
            self.sent += map(len, run)
            send_run(endpoint, run, address)

        monkeypatch.setattr(UdpEndpoint, "_send_run", refusing)


async def test_a_probe_that_the_system_refuses_has_failed_and_is_no_warning(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, 1472)
    with capture_logs() as logs:
        async with ends.connected() as pair:
            for end in (pair.client, pair.server):
                await end.until(lambda end=end: has_found(end))  # type: ignore[misc]
                assert size_of(end) == 1472
                assert end.transport.stats().packets_lost == 0

    assert sorted(device.refused) == [8952, 8952, CEILING, CEILING]
    assert not [line for line in logs if line["log_level"] == "warning"]


async def test_data_that_the_system_refuses_leave_again_at_once_and_smaller(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, CEILING)
    payload = os.urandom(3_000_000)
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        pair.client.transport.send_stream_data(6, payload, True)
        await pair.server.until(lambda: pair.server.received > 500_000)
        device.limit = 1452
        refused_before = len(device.refused)
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert pair.server.data[6] == payload
        # No more than one burst was lost by it.
        assert len(device.refused) - refused_before <= 64_000 // CEILING
        assert not pair.client.losses


async def test_data_of_which_all_was_refused_leave_again_without_being_asked_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, CEILING)
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        device.limit = 1452
        transport: Any = pair.client.transport
        connection_of(pair.client).write(6, bytes(10_000), True)
        connection_of(pair.client)._loss._pacer._rate = None  # nothing waits for its turn
        transport._transmit()

        assert device.refused[-1] > 9000
        assert not connection_of(pair.client)._bulk
        await pair.server.until(lambda: 6 in pair.server.fins)
        assert pair.server.received == 10_000


async def test_a_fixed_size_that_the_system_refuses_is_a_warning(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, CEILING)
    with capture_logs() as logs:
        async with ends.connected(QuicSettings(max_datagram_octets=1400)) as pair:
            device.limit = 1300
            pair.client.transport.send_stream_data(6, bytes(5000), True)
            await pair.client.until(lambda: bool(device.refused))

    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert warnings == [
        {
            "event": "datagram is larger than the path takes",
            "octets": 1400,
            "log_level": "warning",
        }
    ]


# The peer, and its address


@pytest.mark.parametrize("settings", [None, QuicSettings(max_datagram_octets=8000)])
async def test_nothing_larger_is_sent_than_the_peer_says_it_takes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, settings: QuicSettings | None
) -> None:
    aioquic: Any = aioquic_connection
    push = aioquic.push_quic_transport_parameters

    def with_a_limit(buf: Any, parameters: Any) -> None:
        parameters.max_udp_payload_size = 1500
        push(buf, parameters)

    monkeypatch.setattr(aioquic, "push_quic_transport_parameters", with_a_limit)
    async with ends.connected(settings, settings) as pair:
        await pair.client.until(lambda: size_of(pair.client) == 1500)
        await pair.server.until(lambda: size_of(pair.server) == 1500)
        device = Device(monkeypatch, CEILING)
        Pump(pair.client, 1_000_000, (6,))
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert max(device.sent) == 1500


async def test_the_size_of_a_new_path_is_found_anew(ends: Ends) -> None:
    async with ends.connected() as pair:
        for end in (pair.client, pair.server):
            await end.until(lambda end=end: has_found(end))  # type: ignore[misc]
        known = connection_of(pair.server)._path_mtu
        client: Any = pair.client.transport
        old = client._endpoint
        client._endpoint = UdpEndpoint(
            connected_socket(socket.AF_INET, pair.listener.address), old._receiver
        )
        old.close()
        client.send_stream_data(0, b"from elsewhere", True)
        await pair.server.until(lambda: 0 in pair.server.fins)
        await pair.server.until(
            lambda: connection_of(pair.server)._path_mtu is not known and has_found(pair.server)
        )

        assert size_of(pair.server) == CEILING
        client._endpoint.close()


async def test_an_address_that_has_not_proved_itself_gets_no_probe(ends: Ends) -> None:
    async with ends.connected() as pair:
        await pair.server.until(lambda: size_of(pair.server) == CEILING)
        connection, now = connection_of(pair.server), time.monotonic()
        connection._path_mtu.refused(CEILING, now)
        connection._path_mtu.resumes_at = None
        connection._network_paths[0].is_validated = False
        before = connection.datagrams_to_send(now)
        connection._network_paths[0].is_validated = True
        after = connection.datagrams_to_send(now)

        assert CEILING not in [len(datagram) for datagram, _ in before]
        assert CEILING in [len(datagram) for datagram, _ in after]


async def test_datagrams_that_no_longer_fit_are_dropped_and_those_behind_them_go(
    ends: Ends,
) -> None:
    async with ends.connected() as pair:
        await pair.client.until(lambda: size_of(pair.client) == CEILING)
        assert pair.client.transport.send_datagram(bytes(9000))
        assert pair.client.transport.send_datagram(b"behind it")
        connection_of(pair.client).refused(CEILING, 0.0)
        await pair.server.until(lambda: bool(pair.server.datagrams))

        assert pair.server.datagrams == [b"behind it"]
