"""Two ends of the QUIC engine over loopback, in one process."""

import asyncio
import datetime
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import uvloop
from aioquic._buffer import Buffer

from moqt.aio import tls
from moqt.aio.aioquic import dial, listen
from moqt.aio.aioquic.configuration import CONNECTION_ID_OCTETS
from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.inboxes import ROUND_OCTETS
from moqt.aio.aioquic.listener import MAX_WAITING_OCTETS, Listener
from moqt.aio.aioquic.outbound import MAX_UNSENT
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.aio.errors import AlpnMismatchError, DialError, TlsAlertError
from moqt.aio.settings import (
    CONTROL_RESERVE,
    DATAGRAM_BACKLOG,
    CongestionControl,
    QuicSettings,
)
from moqt.aio.tls import CertificateFiles, ClientTls, ServerTls, make_certificates
from moqt.aio.transport import (
    INTERNAL_ERROR,
    ConnectionLost,
    QuicTransport,
    ReceiverFactory,
)
from moqt.aio.udp import Address, UdpEndpoint, connected_socket, cut

pytestmark = pytest.mark.network

PATIENCE_S = 20.0
SMALL = QuicSettings(stream_window=64 << 10, connection_window=128 << 10)
FIXED = QuicSettings(max_datagram_octets=1200)


class Recorder:
    """A receiver that notes all it is told, and consumes what arrives unless told not to."""

    def __init__(self, transport: QuicTransport) -> None:
        assert isinstance(transport, AioquicTransport)
        self.transport = transport
        self.consumes = True
        self.is_connected = False
        self.data: dict[int, bytearray] = {}
        self.fins: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.datagrams: list[bytes] = []
        self.losses: list[ConnectionLost] = []
        self.on_data: Callable[[int], None] = lambda stream_id: None
        self.on_flush: Callable[[], None] = lambda: None
        self._news = asyncio.Event()

    @property
    def received(self) -> int:
        return sum(map(len, self.data.values()))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def connected(self) -> None:
        self.is_connected = True
        self._news.set()

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.data.setdefault(stream_id, bytearray()).extend(data)
        if fin:
            self.fins.add(stream_id)
        if self.consumes:
            self.transport.consumed(stream_id, len(data))
        self._news.set()
        self.on_data(stream_id)

    def stream_reset_received(self, stream_id: int, code: int) -> None:
        self.resets[stream_id] = code
        self._news.set()

    def stop_sending_received(self, stream_id: int, code: int) -> None:
        self.stops[stream_id] = code
        self._news.set()

    def datagram_received(self, data: bytes) -> None:
        self.datagrams.append(data)
        self._news.set()

    def flush(self) -> None:
        self.on_flush()
        self._news.set()

    def connection_lost(self, lost: ConnectionLost) -> None:
        self.losses.append(lost)
        self._news.set()


class Pump:
    """Writes ``total`` octets to streams of its side, as fast as budget and credit allow."""

    def __init__(self, recorder: Recorder, total: int, streams: tuple[int, ...]) -> None:
        self.left = {stream_id: total // len(streams) for stream_id in streams}
        self._transport = recorder.transport
        recorder.on_flush = self.write
        recorder.transport.wake()

    def write(self) -> None:
        for stream_id in list(self.left):
            octets = min(
                self.left[stream_id],
                self._transport.send_budget(),
                self._transport.stream_credit(stream_id),
            )
            if octets > 0:
                self.left[stream_id] -= octets
                fin = not self.left[stream_id]
                self._transport.send_stream_data(stream_id, bytes(octets), fin)
                if fin:
                    del self.left[stream_id]


@dataclass
class Pair:
    client: Recorder
    server: Recorder
    listener: Listener


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def listening(
    certificates: CertificateFiles,
    settings: QuicSettings | None = None,
    *,
    alpn: tuple[str, ...] = ("test",),
    factory: ReceiverFactory = Recorder,
) -> AsyncIterator[Listener]:
    listener = await listen(
        "127.0.0.1",
        0,
        settings or QuicSettings(),
        ServerTls(certificates.certificate_file, certificates.key_file),
        factory,
        alpn=alpn,
    )
    try:
        yield listener
    finally:
        listener.close()
        await listener.wait_closed()


async def dialled(
    listener: Listener,
    certificates: CertificateFiles,
    settings: QuicSettings | None = None,
    *,
    alpn: tuple[str, ...] = ("test",),
    client_tls: ClientTls | None = None,
) -> Recorder:
    made: list[Recorder] = []

    def factory(transport: QuicTransport) -> Recorder:
        made.append(Recorder(transport))
        return made[0]

    await dial(
        *listener.address,
        settings or QuicSettings(),
        client_tls or ClientTls(certificates.ca_file),
        factory,
        alpn=alpn,
        timeout_s=PATIENCE_S,
    )
    return made[0]


@asynccontextmanager
async def connected(
    certificates: CertificateFiles,
    client: QuicSettings | None = None,
    server: QuicSettings | None = None,
) -> AsyncIterator[Pair]:
    arrived: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory(transport: QuicTransport) -> Recorder:
        recorder = Recorder(transport)
        arrived.put_nowait(recorder)
        return recorder

    async with listening(certificates, server, factory=factory) as listener:
        dialling = await dialled(listener, certificates, client)
        try:
            async with asyncio.timeout(PATIENCE_S):
                accepted = await arrived.get()
            yield Pair(dialling, accepted, listener)
        finally:
            dialling.transport.abandon()


# Handshake


async def test_both_ends_agree_on_the_protocol_before_anything_else(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates) as pair:
        transport: QuicTransport = pair.client.transport

        assert pair.client.is_connected
        assert pair.server.is_connected
        assert transport.alpn == pair.server.transport.alpn == "test"
        assert transport.peer_address == pair.listener.address
        assert transport.peer_accepts_datagrams


async def test_a_dial_without_a_common_protocol_says_so(certificates: CertificateFiles) -> None:
    async with listening(certificates, alpn=("moqt-22",)) as listener:
        with pytest.raises(AlpnMismatchError, match="none of the protocols"):
            await dialled(listener, certificates, alpn=("moqt-18",))


async def test_a_certificate_of_another_ca_is_refused(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path)
    async with listening(certificates) as listener:
        with pytest.raises(TlsAlertError, match="bad_certificate") as caught:
            await dialled(listener, certificates, client_tls=ClientTls(other.ca_file))

    assert caught.value.alert == "bad_certificate"


async def test_a_certificate_for_another_name_is_refused(certificates: CertificateFiles) -> None:
    wrong = ClientTls(certificates.ca_file, server_name="example.org")
    async with listening(certificates) as listener:
        with pytest.raises(TlsAlertError, match=r"example\.org"):
            await dialled(listener, certificates, client_tls=wrong)


async def test_an_expired_certificate_is_refused_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    monkeypatch.setattr(tls, "_utc_now", lambda: long_ago)
    expired = make_certificates(tmp_path, days=2)
    async with listening(expired) as listener:
        with pytest.raises(TlsAlertError, match="certificate_expired"):
            await dialled(listener, expired)


async def test_nobody_is_asked_to_verify_when_that_was_chosen(
    certificates: CertificateFiles,
) -> None:
    async with listening(certificates) as listener:
        recorder = await dialled(listener, certificates, client_tls=ClientTls(verify=False))

        assert recorder.is_connected
        recorder.transport.abandon()


async def test_a_port_nobody_listens_on_is_told_at_once(certificates: CertificateFiles) -> None:
    async with listening(certificates) as listener:
        pass

    with pytest.raises(DialError, match="nobody listens on 127"):
        await dialled(listener, certificates)


async def test_a_silent_server_is_a_timeout() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(TimeoutError, match="no answer from 127"):
            await dial(
                "127.0.0.1",
                silent.getsockname()[1],
                QuicSettings(),
                ClientTls(),
                Recorder,
                alpn=["test"],
                timeout_s=0.1,
            )


async def test_an_unknown_host_is_named() -> None:
    with pytest.raises(DialError, match=r"host\.invalid"):
        await dial(
            "host.invalid",
            1,
            QuicSettings(),
            ClientTls(),
            Recorder,
            alpn=["test"],
            timeout_s=PATIENCE_S,
        )


async def test_a_port_in_use_is_named(certificates: CertificateFiles) -> None:
    async with listening(certificates) as listener:
        host, port = listener.address
        with pytest.raises(OSError, match=f"cannot listen on {host}:{port}"):
            await listen(
                host,
                port,
                QuicSettings(),
                ServerTls(certificates.certificate_file, certificates.key_file),
                Recorder,
                alpn=["test"],
            )


async def test_a_retry_proves_the_address_and_then_connects(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, server=QuicSettings(retry=True)) as pair:
        assert pair.client.transport._connection._retry_count == 1
        assert pair.client.is_connected


async def test_connections_over_the_limit_are_refused(certificates: CertificateFiles) -> None:
    async with connected(certificates, server=QuicSettings(max_connections=1)) as pair:
        with pytest.raises(DialError, match="CONNECTION_REFUSED"):
            await dialled(pair.listener, certificates)


async def test_a_listener_that_stopped_accepting_goes_on_with_the_connections_it_has(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates) as pair:
        pair.listener.stop_accepting()
        with pytest.raises(DialError, match="CONNECTION_REFUSED"):
            await dialled(pair.listener, certificates)
        pair.client.transport.send_stream_data(0, b"still here", True)

        await pair.server.until(lambda: 0 in pair.server.fins)


async def test_an_unknown_version_is_answered_with_those_known(
    certificates: CertificateFiles,
) -> None:
    loop = asyncio.get_running_loop()
    async with listening(certificates) as listener:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(listener.address)
            long_header = bytes.fromhex("c0 0a0a0a0a 08 0102030405060708 08 1112131415161718")
            await loop.sock_sendall(sock, long_header.ljust(1200, b"\0"))
            async with asyncio.timeout(PATIENCE_S):
                answer = await loop.sock_recv(sock, 2000)

    assert answer[1:5] == bytes(4)
    assert answer[5:23] == bytes.fromhex("08 1112131415161718 08 0102030405060708")
    assert bytes.fromhex("00000001") in answer[23:]


# Data


async def test_octets_arrive_whole_and_in_order_both_ways(certificates: CertificateFiles) -> None:
    there, back = os.urandom(300_000), os.urandom(300_000)
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(0, there, True)
        await pair.server.until(lambda: 0 in pair.server.fins)
        pair.server.transport.send_stream_data(0, memoryview(back), True)
        await pair.client.until(lambda: 0 in pair.client.fins)

        assert pair.server.data[0] == there
        assert pair.client.data[0] == back


@pytest.mark.parametrize("octets", [1200, 1452, 8900, 16_000])
async def test_twenty_megabytes_go_one_way_in_one_process(
    certificates: CertificateFiles, octets: int
) -> None:
    settings = QuicSettings(max_datagram_octets=octets)
    async with connected(certificates, settings, settings) as pair:
        Pump(pair.client, 20_000_000, (6, 10))
        await pair.server.until(lambda: pair.server.fins == {6, 10})

        assert pair.server.received == 20_000_000


@pytest.mark.parametrize(
    "settings",
    [QuicSettings(congestion_control=name) for name in get_args(CongestionControl)],
    ids=get_args(CongestionControl),
)
def test_the_engine_runs_on_uvloop_with_each_congestion_control(
    certificates: CertificateFiles, settings: QuicSettings
) -> None:

    async def main() -> int:
        async with connected(certificates, settings, settings) as pair:
            Pump(pair.server, 4_000_000, (7,))
            await pair.client.until(lambda: 7 in pair.client.fins)
            return pair.client.received

    assert uvloop.run(main()) == 4_000_000


async def test_lost_packets_are_repaired(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        deliver = pair.server.transport.feed
        count = 0

        def lossy(data: bytes, size: int, address: Address) -> None:
            nonlocal count
            kept = []
            for datagram in cut(data, size):
                count += 1
                if count % 50:
                    kept.append(datagram)
            # Out of order as well: the frames of a gap are put together again.
            whole = [datagram for datagram in kept if len(datagram) == size]
            deliver(b"".join(whole[::-1] + kept[len(whole) :]), size, address)

        monkeypatch.setattr(pair.server.transport, "feed", lossy)
        payload = os.urandom(2_000_000)
        pair.client.transport.send_stream_data(6, payload, True)
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert pair.server.data[6] == payload
        assert pair.client.transport.stats().packets_lost > 0


async def test_a_reader_that_does_not_consume_stops_the_writer_and_consuming_resumes_it(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        pump = Pump(pair.client, 1_000_000, (6, 10, 14))
        transport = pair.client.transport
        window = SMALL.connection_window - CONTROL_RESERVE
        await pair.client.until(
            lambda: not transport.send_budget() and not transport._connection.unacked
        )
        assert pair.server.received == window
        # What could arrive beyond the window would have to overtake this answer.
        pair.client.transport.send_stream_data(0, b"?", True)
        await pair.server.until(lambda: 0 in pair.server.fins)

        assert pair.server.received <= SMALL.connection_window
        assert all(len(data) <= SMALL.stream_window for data in pair.server.data.values())
        assert pump.left

        pair.server.consumes = True
        for stream_id, data in pair.server.data.items():
            pair.server.transport.consumed(stream_id, len(data))
        await pair.server.until(lambda: pair.server.fins == {0, 6, 10, 14})


class _Turns:
    """Who took how much in each turn."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.news = asyncio.Event()

    @property
    def octets(self) -> int:
        return sum(octets for _, octets in self.taken)


class _Taker:
    """Stands in for a connection of a listener."""

    def __init__(self, name: str, turns: _Turns) -> None:
        self._name, self._turns = name, turns
        self._taken = 0

    def feed(self, data: bytes, size: int, address: Address) -> None:
        self._taken += len(data)

    def answer(self) -> None:
        self._turns.taken.append((self._name, self._taken))
        self._turns.news.set()
        self._taken = 0


async def test_what_one_connection_brings_does_not_stand_before_what_others_wait_for(
    certificates: CertificateFiles,
) -> None:
    turns = _Turns()
    async with listening(certificates) as listener:
        ids = {name: name.encode() * CONNECTION_ID_OCTETS for name in "ab"}
        for name, octets in ids.items():
            listener._routes[octets] = _Taker(name, turns)  # type: ignore[assignment]
        much = b"".join((b"\x40" + ids["a"]).ljust(1200, b"-") for _ in range(50))
        for _ in range(40):
            listener.datagrams_received(much, 1200, ("127.0.0.1", 1))
        listener.datagrams_received(b"\x40" + ids["b"], 9, ("127.0.0.1", 2))
        listener.batch_received()
        assert turns.taken[0] == ("b", 1 + CONNECTION_ID_OCTETS)
        assert len(turns.taken) == 2

        listener.datagrams_received(b"\x40" + ids["b"], 9, ("127.0.0.1", 2))
        listener.batch_received()
        async with asyncio.timeout(PATIENCE_S):
            while turns.octets < 40 * len(much) + 2 * (1 + CONNECTION_ID_OCTETS):
                turns.news.clear()
                await turns.news.wait()

        assert [name for name, _ in turns.taken[:4]] == ["b", "a", "b", "a"]
        assert max(octets for _, octets in turns.taken) < ROUND_OCTETS + len(much)


async def test_what_waits_to_be_taken_is_bounded(certificates: CertificateFiles) -> None:
    turns = _Turns()
    async with listening(certificates) as listener:
        octets = b"a" * CONNECTION_ID_OCTETS
        listener._routes[octets] = _Taker("a", turns)  # type: ignore[assignment]
        for _ in range(300):
            listener.datagrams_received((b"\x40" + octets).ljust(60_000, b"-"), 60_000, ("", 1))
        listener.batch_received()

        assert 300 * 60_000 - turns.octets <= MAX_WAITING_OCTETS


async def test_no_more_is_to_be_handed_over_than_leaves_soon_however_large_the_window_is(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        transport._connection._loss._cc.congestion_window = 8 << 20
        first = transport.send_budget()
        transport.send_stream_data(6, bytes(first))

        assert MAX_UNSENT <= first < MAX_UNSENT + 2000  # something of the handshake is on its way
        assert transport.send_budget() == 0


async def test_what_was_held_back_is_handed_over_as_soon_as_there_is_room(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        transport._connection._loss._cc.congestion_window = 8 << 20
        # Not with an acknowledgement: none is heard.
        monkeypatch.setattr(transport, "feed", lambda data, size, address: None)
        monkeypatch.setattr(transport, "answer", lambda: None)
        Pump(pair.client, 2 << 20, (6,))
        await pair.server.until(lambda: 6 in pair.server.fins)

        assert pair.server.received == 2 << 20


async def test_control_leaves_before_data_when_both_wait(certificates: CertificateFiles) -> None:
    order: list[int] = []
    async with connected(certificates) as pair:
        pair.server.on_data = order.append
        pair.client.transport.send_stream_data(6, bytes(100_000), True)
        pair.client.transport.send_stream_data(2, b"control", False)
        pair.client.transport.send_stream_data(0, b"request", True)
        await pair.server.until(lambda: pair.server.fins == {0, 6})

        assert order.index(2) < order.index(0) < order.index(6)


async def test_streams_may_be_written_in_another_order_than_their_ids(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(14, b"urgent", True)
        pair.client.transport.send_stream_data(6, b"later", True)
        pair.client.transport.reset_stream(10, 7)
        await pair.server.until(lambda: pair.server.fins == {14, 6} and 10 in pair.server.resets)

        assert pair.server.data == {14: b"urgent", 6: b"later"}
        assert pair.server.resets == {10: 7}


async def test_three_hundred_streams_open_as_credit_comes(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        waiting = [2 + 4 * index for index in range(300)]
        held: list[int] = []

        def open_some() -> None:
            while waiting and transport.stream_credit(waiting[0]) > 0:
                held.append(waiting.pop(0))
                transport.send_stream_data(held[-1], b"x", True)

        pair.client.on_flush = open_some
        assert transport.stream_credit(2 + 4 * 127) > 0
        assert transport.stream_credit(2 + 4 * 128) == 0
        transport.wake()
        await pair.server.until(lambda: len(pair.server.fins) == 300)

        assert not waiting


async def test_two_thousand_short_streams_leave_nothing_behind(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        bidi = [4 * index for index in range(1000)]
        uni = [2 + 4 * index for index in range(1000)]

        def open_some() -> None:
            for waiting in (bidi, uni):
                while waiting and transport.stream_credit(waiting[0]) > 0:
                    transport.send_stream_data(waiting.pop(0), b"question", True)

        def answer(stream_id: int) -> None:
            if stream_id % 4 == 0 and stream_id in pair.server.fins:
                pair.server.transport.send_stream_data(stream_id, b"answer", True)

        pair.client.on_flush = open_some
        pair.server.on_data = answer
        transport.wake()
        await pair.server.until(lambda: len(pair.server.fins) == 2000)
        await pair.client.until(lambda: len(pair.client.fins) == 1000)
        # Everything is acknowledged when a drained close is through.
        pair.client.transport.close(0, "", drain_s=PATIENCE_S)
        await pair.server.until(lambda: bool(pair.server.losses))

        server = pair.server.transport._connection
        server._discard_ended()
        assert not server._inbound
        assert server._consumed == server._local_max_data.used == 2000 * len(b"question")
        client = pair.client.transport._connection
        client._discard_ended()
        assert not client._streams
        assert not client._outbound
        assert not client._inbound
        assert client.unacked == 0


async def test_two_connections_share_a_listener_and_not_their_fate(
    certificates: CertificateFiles,
) -> None:
    made: list[Recorder] = []

    def factory(transport: QuicTransport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    async with listening(certificates, factory=factory) as listener:
        first = await dialled(listener, certificates)
        second = await dialled(listener, certificates)
        first.transport.send_stream_data(0, b"one", True)
        await first.until(lambda: len(made) == 2 and bool(made[0].fins))
        first.transport.close(5, "bye")
        await made[0].until(lambda: bool(made[0].losses))
        second.transport.send_stream_data(0, b"two", True)
        await made[1].until(lambda: bool(made[1].fins))

        assert made[0].losses == [ConnectionLost(5, "bye", application=True, by_peer=True)]
        assert not made[1].losses
        assert made[1].data == {0: b"two"}
        second.transport.abandon()
        await first.transport.wait_closed()


async def test_a_client_whose_address_changes_goes_on(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        await pair.client.until(lambda: transport._connection._handshake_confirmed)
        before = pair.server.transport.peer_address
        old = transport._endpoint
        transport._endpoint = UdpEndpoint(
            connected_socket(socket.AF_INET, pair.listener.address), old._receiver
        )
        old.close()
        transport.send_stream_data(0, b"from elsewhere", True)
        await pair.server.until(lambda: 0 in pair.server.fins)
        # More than may be sent to an address that was not validated.
        pair.server.transport.send_stream_data(0, bytes(500_000), True)
        await pair.client.until(lambda: 0 in pair.client.fins)

        assert pair.server.transport.peer_address != before
        assert pair.client.received == 500_000
        transport._endpoint.close()


async def test_frames_of_the_peer_that_break_the_rules_close_the_connection(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, server=SMALL) as pair:
        # A client that takes no notice of the limits it was given.
        pair.server.consumes = False
        pair.client.transport._connection._remote_max_data = 1 << 30
        pair.client.transport._connection._remote_max_stream_data_uni = 1 << 30
        pair.client.transport.send_stream_data(6, bytes(200_000))
        await pair.client.until(lambda: bool(pair.client.losses))

        assert pair.client.losses == [
            ConnectionLost(3, "Over stream data limit", application=False, by_peer=True)
        ]
        assert len(pair.server.losses) == 1
        assert not pair.server.losses[0].by_peer


async def test_an_abandon_amid_a_batch_ends_it(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        pair.server.on_data = lambda stream_id: pair.server.transport.abandon()
        pair.client.transport.send_stream_data(0, b"one", True)
        pair.client.transport.send_stream_data(6, b"two", True)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert list(pair.server.data) == [0]
        assert pair.server.losses[0].reason == "abandoned"


# Giving up on streams


async def begin(pair: Pair, stream_id: int) -> None:
    """Write more than the stream's window to it, and see that it begins to arrive."""
    transport = pair.client.transport
    await pair.client.until(lambda: transport.stream_credit(stream_id) >= 50_000)
    transport.send_stream_data(stream_id, bytes(100_000))
    await pair.server.until(lambda: stream_id in pair.server.data)


async def test_a_reset_is_told_and_its_credit_comes_back(certificates: CertificateFiles) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        transport = pair.client.transport
        for stream_id in range(6, 6 + 4 * 20, 4):
            await begin(pair, stream_id)
            await pair.server.until(
                partial(lambda s: len(pair.server.data[s]) >= 50_000, stream_id)
            )
            transport.reset_stream(stream_id, 9)
            await pair.server.until(partial(pair.server.resets.__contains__, stream_id))

        # Twenty times 50,000 octets or more went through a window of 131,072, and none was
        # consumed.
        assert set(pair.server.resets.values()) == {9}
        assert not pair.server.transport._connection._inbound


async def test_a_reset_after_delivery_takes_nothing_back(certificates: CertificateFiles) -> None:
    async with connected(certificates, server=SMALL) as pair:
        transport = pair.client.transport
        for stream_id in (6, 10, 14):  # each more than the window of its stream
            transport.send_stream_data(stream_id, bytes(100_000))
            transport.reset_stream(stream_id, 9, after_delivery=True)
            transport.send_stream_data(stream_id, b"too late")
        transport.reset_stream(18, 9, after_delivery=True)  # nothing to wait for
        await pair.server.until(lambda: {6, 10, 14, 18} <= pair.server.resets.keys())

        assert {s: len(data) for s, data in pair.server.data.items()} == {
            6: 100_000, 10: 100_000, 14: 100_000,
        }  # fmt: skip
        assert set(pair.server.resets.values()) == {9}


async def test_a_reset_at_once_overtakes_one_that_waits(certificates: CertificateFiles) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        await begin(pair, 6)
        pair.client.transport.reset_stream(6, 9, after_delivery=True)
        pair.client.transport.reset_stream(6, 5)
        await begin(pair, 10)
        pair.client.transport.reset_stream(10, 9, after_delivery=True)
        pair.server.transport.stop_sending(10, 3)
        await pair.server.until(lambda: {6, 10} <= pair.server.resets.keys())

        assert pair.server.resets[6] == 5
        assert len(pair.server.data[10]) < 100_000


async def test_a_stopped_stream_is_reset_and_its_credit_comes_back(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        for stream_id in range(6, 6 + 4 * 20, 4):
            await begin(pair, stream_id)
            pair.server.transport.stop_sending(stream_id, 3)
            await pair.client.until(partial(pair.client.stops.__contains__, stream_id))
            await pair.server.until(partial(pair.server.resets.__contains__, stream_id))

        assert set(pair.client.stops.values()) == {3}
        assert not pair.server.transport._connection._inbound


async def test_octets_of_a_stopped_stream_are_credited_if_the_peer_goes_on(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore(self: object, context: object, frame_type: int, buf: Buffer) -> None:
        buf.pull_uint_var()
        buf.pull_uint_var()

    monkeypatch.setattr(Connection, "_handle_stop_sending_frame", ignore)
    async with connected(certificates, server=SMALL) as pair:
        stopped: set[int] = set()

        def stop_once(stream_id: int) -> None:
            if stream_id not in stopped:
                stopped.add(stream_id)
                pair.server.transport.stop_sending(stream_id, 3)

        pair.server.on_data = stop_once
        pair.server.consumes = False
        Pump(pair.client, 20 * 50_000, tuple(range(6, 6 + 4 * 20, 4)))
        await pair.server.until(lambda: len(pair.server.fins) == 20)

        assert pair.server.received < 20 * 50_000
        assert not pair.server.transport._connection._inbound


async def test_a_reset_waits_for_the_credit_of_its_stream(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        for stream_id in range(2, 2 + 4 * 130, 4):
            transport.send_stream_data(stream_id, b"x")
        transport.reset_stream(2 + 4 * 129, 4)
        await pair.server.until(lambda: len(pair.server.data) == 128)
        for stream_id in range(2, 2 + 4 * 129, 4):
            transport.send_stream_data(stream_id, b"", True)
        await pair.server.until(lambda: 2 + 4 * 129 in pair.server.resets)

        assert not pair.client.losses


def deafen(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> asyncio.Event:
    """Lose what ``recorder`` is sent; the event tells that something was lost."""
    lost = asyncio.Event()
    monkeypatch.setattr(recorder.transport, "feed", lambda *arguments: lost.set())
    return lost


async def test_a_reset_that_got_lost_is_repeated(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(6, b"header")
        await pair.server.until(lambda: 6 in pair.server.data)
        lost = deafen(monkeypatch, pair.server)
        pair.client.transport.reset_stream(6, 4)
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        monkeypatch.undo()

        await pair.server.until(lambda: pair.server.resets == {6: 4})


async def test_a_stop_that_got_lost_is_repeated(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(6, b"header")
        await pair.server.until(lambda: 6 in pair.server.data)
        lost = deafen(monkeypatch, pair.client)
        pair.server.transport.stop_sending(6, 4)
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        monkeypatch.undo()

        await pair.client.until(lambda: pair.client.stops == {6: 4})


async def test_window_updates_that_got_lost_are_repeated(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        pair.client.transport.send_stream_data(6, bytes(100_000), True)
        await pair.server.until(lambda: pair.server.received == SMALL.stream_window)
        await pair.client.until(lambda: not pair.client.transport.stats().octets_in_flight)
        lost = deafen(monkeypatch, pair.client)
        pair.server.transport.consumed(6, SMALL.stream_window)
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        monkeypatch.undo()

        await pair.server.until(lambda: 6 in pair.server.fins)


async def test_writing_after_stop_reset_or_fin_is_quiet(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        transport.send_stream_data(6, b"header")
        await pair.server.until(lambda: 6 in pair.server.data)
        pair.server.transport.stop_sending(6, 1)
        await pair.client.until(lambda: 6 in pair.client.stops)
        transport.send_stream_data(6, b"payload", True)
        transport.reset_stream(6, 2)
        transport.send_stream_data(10, b"all", True)
        transport.send_stream_data(10, b"too much")
        await pair.server.until(lambda: 10 in pair.server.fins)
        transport.send_stream_data(10, b"far too late", True)
        transport.reset_stream(14, 4)
        transport.send_stream_data(14, b"after a reset")
        await pair.server.until(lambda: 14 in pair.server.resets)

        assert pair.server.data == {6: b"header", 10: b"all"}
        assert pair.server.resets == {6: 1, 14: 4}
        assert transport.send_budget() > 0


async def test_stopping_what_is_unknown_or_over_is_quiet(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(6, b"all", True)
        await pair.server.until(lambda: 6 in pair.server.fins)
        for stream_id in (6, 10, 7, 0, 1):
            pair.server.transport.stop_sending(stream_id, 1)
        pair.client.transport.send_stream_data(10, b"next", True)
        await pair.server.until(lambda: 10 in pair.server.fins)

        assert not pair.client.stops
        assert not pair.client.losses


# Datagrams


async def test_a_datagram_that_cannot_fit_is_refused_and_the_next_one_goes(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, FIXED) as pair:
        transport = pair.client.transport
        largest = max(n for n in range(1200) if transport.send_datagram(bytes(n)))
        refused = transport.send_datagram(bytes(largest + 1))
        await pair.server.until(lambda: len(pair.server.datagrams) == largest + 1)

        assert not refused
        assert largest > 1150
        assert sorted(map(len, pair.server.datagrams)) == list(range(largest + 1))


async def test_datagrams_that_wait_are_bounded(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        accepted = [pair.client.transport.send_datagram(bytes(100)) for _ in range(5000)]

        assert sum(accepted) == DATAGRAM_BACKLOG
        await pair.client.until(lambda: pair.client.transport.send_datagram(b"again"))


# The end of a connection


@pytest.mark.parametrize("run", range(20))
async def test_a_drained_close_right_after_a_write_loses_nothing(
    certificates: CertificateFiles, run: int
) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.send_stream_data(6, bytes(4 << 20), True)
        pair.client.transport.close(17, "done", drain_s=PATIENCE_S)
        pair.client.transport.send_stream_data(10, b"after the close", True)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.received == 4 << 20
        assert pair.server.fins == {6}
        assert pair.server.losses == [ConnectionLost(17, "done", application=True, by_peer=True)]
        assert pair.client.losses == [ConnectionLost(17, "done", application=True, by_peer=False)]


async def test_a_drain_has_a_deadline(certificates: CertificateFiles) -> None:
    async with connected(certificates, server=SMALL) as pair:
        pair.server.consumes = False
        pair.client.transport.send_stream_data(6, bytes(1 << 20), True)
        pair.client.transport.close(0, "", drain_s=0.05)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.received <= SMALL.stream_window


async def test_everything_is_quiet_after_the_end(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        transport = pair.client.transport
        pair.server.transport.close(1, "gone")
        await pair.client.until(lambda: bool(pair.client.losses))
        transport.send_stream_data(0, b"data", True)
        transport.reset_stream(2, 0)
        transport.stop_sending(3, 0)
        transport.consumed(3, 1)
        transport.wake()
        transport.close(0, "again")

        assert not transport.send_datagram(b"data")
        assert transport.send_budget() == 0
        assert transport.stream_credit(0) == 0
        await transport.wait_closed()
        assert pair.client.losses == [ConnectionLost(1, "gone", application=True, by_peer=True)]


async def test_a_close_that_got_lost_is_repeated(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        monkeypatch.setattr(pair.client.transport, "_send", lambda datagrams: None)
        pair.client.transport.close(3, "bye")
        await pair.client.until(lambda: bool(pair.client.losses))
        monkeypatch.undo()
        pair.server.transport.send_stream_data(7, b"anyone?")
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.losses == [ConnectionLost(3, "bye", application=True, by_peer=True)]


async def test_a_receiver_that_raises_closes_its_connection_once(
    certificates: CertificateFiles,
) -> None:
    def raising(stream_id: int) -> None:
        raise RuntimeError(f"no use for stream {stream_id}")

    async with connected(certificates) as pair:
        pair.server.on_data = raising
        pair.client.transport.send_stream_data(0, b"data", True)
        pair.client.transport.send_stream_data(6, b"more", True)
        await pair.client.until(lambda: bool(pair.client.losses))

        expected = ConnectionLost(INTERNAL_ERROR, "internal error", application=True, by_peer=True)
        assert pair.client.losses == [expected]
        assert pair.server.losses == [replace(expected, by_peer=False)]


async def test_silence_beyond_the_idle_timeout_is_broken_by_pings(
    certificates: CertificateFiles,
) -> None:
    brief = QuicSettings(idle_timeout_s=0.6)
    loop = asyncio.get_running_loop()
    async with connected(certificates, brief, replace(brief, keepalive=False)) as pair:
        beyond, passed = loop.time() + 1.5, asyncio.Event()
        loop.call_at(beyond, passed.set)
        async with asyncio.timeout(PATIENCE_S):
            await passed.wait()
        pair.client.transport.send_stream_data(0, b"still here", True)
        await pair.server.until(lambda: 0 in pair.server.fins)

        assert not pair.client.losses


async def test_an_idle_timeout_is_told_as_one(certificates: CertificateFiles) -> None:
    brief = QuicSettings(idle_timeout_s=0.3, keepalive=False)
    async with connected(certificates, brief, brief) as pair:
        await pair.client.until(lambda: bool(pair.client.losses))
        await pair.server.until(lambda: bool(pair.server.losses))

        [lost] = pair.client.losses
        assert not lost.application
        assert not lost.by_peer
        assert lost.reason.startswith("idle timeout")
        assert lost.code == 0


async def test_an_abandoned_connection_tells_the_peer_nothing(
    certificates: CertificateFiles,
) -> None:
    async with connected(certificates, server=QuicSettings(idle_timeout_s=0.3)) as pair:
        pair.client.transport.abandon()
        await pair.client.until(lambda: bool(pair.client.losses))
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.client.losses[0].reason == "abandoned"
        assert pair.server.losses[0].reason.startswith("idle timeout")


async def test_a_closed_listener_tells_its_connections(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        pair.listener.close()
        await pair.client.until(lambda: bool(pair.client.losses))

        assert pair.client.losses == [
            ConnectionLost(0, "listener closed", application=True, by_peer=True)
        ]
        assert len(pair.server.losses) == 1


async def test_connections_that_ended_are_not_kept(certificates: CertificateFiles) -> None:
    async with connected(certificates) as pair:
        pair.client.transport.close(0, "")
        await pair.server.until(lambda: bool(pair.server.losses))
        await pair.server.transport.wait_closed()

        assert not pair.listener.transports
        assert not pair.listener._routes
    gc.collect()  # a socket that was not closed would be an error here


# Keys


async def test_keys_are_updated_by_packet_count_while_data_flow(
    certificates: CertificateFiles,
) -> None:
    settings = QuicSettings(key_update_packets=500, max_datagram_octets=1200)
    async with connected(certificates, settings, settings) as pair:
        Pump(pair.client, 3_000_000, (6,))
        Pump(pair.server, 3_000_000, (7,))
        await pair.server.until(lambda: 6 in pair.server.fins)
        await pair.client.until(lambda: 7 in pair.client.fins)

        assert pair.client.transport.stats().key_updates >= 4
        assert pair.server.transport.stats().key_updates >= 4
        assert pair.server.received == pair.client.received == 3_000_000


async def test_packets_under_the_last_keys_are_still_read(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(certificates) as pair:
        connection = pair.client.transport._connection
        await pair.client.until(lambda: connection._handshake_confirmed)
        # The server never hears of the update, so all it sends is under the old keys.
        monkeypatch.setattr(pair.server.transport, "feed", lambda *arguments: None)
        connection._key_update_packets = 1
        connection._update_keys_if_due()
        pair.server.transport.send_stream_data(7, b"under the old keys", True)
        await pair.client.until(lambda: 7 in pair.client.fins)

        assert connection.key_updates == 1
