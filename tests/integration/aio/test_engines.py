"""What every QUIC engine must do, by the seam alone: two ends over loopback, in one process."""

import asyncio
import datetime
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

from moqt.aio import tls
from moqt.aio.engine import Engine, EngineUnavailableError, engine_named
from moqt.aio.errors import AlpnMismatchError, DialError, TlsAlertError
from moqt.aio.settings import CongestionControl, EngineName, QuicSettings
from moqt.aio.tls import CertificateFiles, ClientTls, ServerTls, make_certificates
from moqt.aio.transport import (
    INTERNAL_ERROR,
    ConnectionLost,
    QuicListener,
    QuicTransport,
    ReceiverFactory,
)

pytestmark = pytest.mark.network

PATIENCE_S = 20.0
SMALL = QuicSettings(stream_window=64 << 10, connection_window=128 << 10)


@pytest.fixture(params=["aioquic", "picoquic"])
def engine(request: pytest.FixtureRequest) -> Engine:
    name: EngineName = request.param
    try:
        return engine_named(name)
    except EngineUnavailableError as error:
        pytest.skip(str(error))


class Recorder:
    """A receiver that notes all it is told, and consumes what arrives unless told not to."""

    def __init__(self, transport: QuicTransport) -> None:
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
    listener: QuicListener


@dataclass
class Ends:
    """Makes connections of one engine."""

    engine: Engine
    certificates: CertificateFiles

    @asynccontextmanager
    async def listening(
        self,
        settings: QuicSettings | None = None,
        *,
        files: CertificateFiles | None = None,
        alpn: tuple[str, ...] = ("test",),
        factory: ReceiverFactory = Recorder,
    ) -> AsyncIterator[QuicListener]:
        files = files or self.certificates
        listener = await self.engine.listen(
            "127.0.0.1",
            0,
            settings or QuicSettings(),
            ServerTls(files.certificate_file, files.key_file),
            factory,
            alpn=alpn,
        )
        try:
            yield listener
        finally:
            listener.close()
            await listener.wait_closed()

    async def dialled(
        self,
        address: tuple[str, int],
        settings: QuicSettings | None = None,
        *,
        alpn: tuple[str, ...] = ("test",),
        client_tls: ClientTls | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Recorder:
        made: list[Recorder] = []

        def factory(transport: QuicTransport) -> Recorder:
            made.append(Recorder(transport))
            return made[0]

        await self.engine.dial(
            *address,
            settings or QuicSettings(),
            client_tls or ClientTls(self.certificates.ca_file),
            factory,
            alpn=alpn,
            timeout_s=timeout_s,
        )
        return made[0]

    @asynccontextmanager
    async def connected(
        self,
        client: QuicSettings | None = None,
        server: QuicSettings | None = None,
        factory: Callable[[QuicTransport], Recorder] = Recorder,
    ) -> AsyncIterator[Pair]:
        arrived: asyncio.Queue[Recorder] = asyncio.Queue()

        def arriving(transport: QuicTransport) -> Recorder:
            recorder = factory(transport)
            arrived.put_nowait(recorder)
            return recorder

        async with self.listening(server, factory=arriving) as listener:
            dialling = await self.dialled(listener.address, client)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    accepted = await arrived.get()
                yield Pair(dialling, accepted, listener)
            finally:
                dialling.transport.abandon()


@pytest.fixture
def ends(engine: Engine, certificates: CertificateFiles) -> Ends:
    return Ends(engine, certificates)


# Handshake


async def test_both_ends_agree_on_the_protocol_before_anything_else(ends: Ends) -> None:
    async with ends.connected() as pair:
        transport = pair.client.transport

        assert pair.client.is_connected
        assert pair.server.is_connected
        assert transport.alpn == pair.server.transport.alpn == "test"
        assert transport.peer_address == pair.listener.address
        assert transport.peer_accepts_datagrams


async def test_the_size_of_datagrams_is_told_where_it_is_known(ends: Ends) -> None:
    fixed = QuicSettings(max_datagram_octets=1300)
    async with ends.connected(fixed, fixed) as pair:
        for end in (pair.client, pair.server):
            assert end.transport.stats().datagram_octets in (1300, None)


async def test_the_first_protocol_in_common_is_taken(ends: Ends) -> None:
    async with ends.listening(alpn=("new", "old")) as listener:
        recorder = await ends.dialled(listener.address, alpn=("older", "old"))

        assert recorder.transport.alpn == "old"
        recorder.transport.abandon()


async def test_a_dial_without_a_common_protocol_says_so(ends: Ends) -> None:
    async with ends.listening(alpn=("moqt-22",)) as listener:
        with pytest.raises(AlpnMismatchError, match="none of the protocols"):
            await ends.dialled(listener.address, alpn=("moqt-18",))


async def test_a_certificate_of_another_ca_is_refused(ends: Ends, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)
    async with ends.listening() as listener:
        with pytest.raises(TlsAlertError, match="bad_certificate") as caught:
            await ends.dialled(listener.address, client_tls=ClientTls(other.ca_file))

    assert caught.value.alert == "bad_certificate"


async def test_a_certificate_for_another_name_is_refused(ends: Ends) -> None:
    wrong = ClientTls(ends.certificates.ca_file, server_name="example.org")
    async with ends.listening() as listener:
        with pytest.raises(TlsAlertError, match=r"example\.org"):
            await ends.dialled(listener.address, client_tls=wrong)


async def test_an_expired_certificate_is_refused_by_the_client(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    monkeypatch.setattr(tls, "_utc_now", lambda: long_ago)
    expired = make_certificates(tmp_path, days=2)
    async with ends.listening(files=expired) as listener:
        with pytest.raises(TlsAlertError, match="expired"):
            await ends.dialled(listener.address, client_tls=ClientTls(expired.ca_file))


async def test_nobody_is_asked_to_verify_when_that_was_chosen(ends: Ends) -> None:
    async with ends.listening() as listener:
        recorder = await ends.dialled(listener.address, client_tls=ClientTls(verify=False))

        assert recorder.is_connected
        recorder.transport.abandon()


async def test_a_port_nobody_listens_on_is_told_at_once(ends: Ends) -> None:
    async with ends.listening() as listener:
        pass

    with pytest.raises(DialError, match="nobody listens on 127"):
        await ends.dialled(listener.address)


async def test_a_silent_server_is_a_timeout(ends: Ends) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(TimeoutError, match="no answer from 127"):
            await ends.dialled(silent.getsockname(), timeout_s=0.1)


async def test_a_port_in_use_is_named(ends: Ends) -> None:
    files = ends.certificates
    async with ends.listening() as listener:
        host, port = listener.address
        with pytest.raises(OSError, match=f"cannot listen on {host}:{port}"):
            await ends.engine.listen(
                host,
                port,
                QuicSettings(),
                ServerTls(files.certificate_file, files.key_file),
                Recorder,
                alpn=["test"],
            )


async def test_a_retry_proves_the_address_and_then_connects(ends: Ends) -> None:
    async with ends.connected(server=QuicSettings(retry=True)) as pair:
        assert pair.client.is_connected


async def test_connections_over_the_limit_are_refused(ends: Ends) -> None:
    async with ends.connected(server=QuicSettings(max_connections=1)) as pair:
        with pytest.raises(DialError, match="CONNECTION_REFUSED"):
            await ends.dialled(pair.listener.address)


async def test_a_listener_that_stopped_accepting_goes_on_with_the_connections_it_has(
    ends: Ends,
) -> None:
    made: list[Recorder] = []

    def factory(transport: QuicTransport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    async with ends.connected(factory=factory) as pair:
        pair.listener.stop_accepting()
        try:
            refused = await ends.dialled(pair.listener.address)
        except DialError:
            pass
        else:  # it may learn so when its own part of the handshake is through
            await refused.until(lambda: bool(refused.losses))
        assert len(made) == 1
        pair.client.transport.send_stream_data(0, b"still here", True)

        await pair.server.until(lambda: 0 in pair.server.fins)


async def test_what_is_written_first_reaches_a_client_that_is_not_done_with_its_handshake(
    ends: Ends,
) -> None:
    class Eager(Recorder):
        def connected(self) -> None:
            super().connected()
            self.transport.send_stream_data(3, b"setup")

    async with ends.listening(factory=Eager) as listener:
        for _ in range(20):
            client = await ends.dialled(listener.address)
            await client.until(partial(client.data.__contains__, 3))

            assert client.data == {3: b"setup"}
            client.transport.abandon()


# Data


async def test_octets_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    there, back = os.urandom(3_000_000), os.urandom(3_000_000)
    async with ends.connected() as pair:
        pair.client.transport.send_stream_data(0, there, True)
        await pair.server.until(lambda: 0 in pair.server.fins)
        pair.server.transport.send_stream_data(0, memoryview(back), True)
        await pair.client.until(lambda: 0 in pair.client.fins)

        assert pair.server.data[0] == there
        assert pair.client.data[0] == back


async def test_twenty_megabytes_go_one_way_in_one_process(ends: Ends) -> None:
    async with ends.connected() as pair:
        Pump(pair.client, 20_000_000, (6, 10))
        await pair.server.until(lambda: pair.server.fins == {6, 10})

        assert pair.server.received == 20_000_000


@pytest.mark.parametrize(
    "settings",
    [QuicSettings(congestion_control=name) for name in get_args(CongestionControl)],
    ids=get_args(CongestionControl),
)
def test_the_engine_runs_on_uvloop_with_each_congestion_control(
    ends: Ends, settings: QuicSettings
) -> None:

    async def main() -> int:
        async with ends.connected(settings, settings) as pair:
            Pump(pair.server, 4_000_000, (7,))
            await pair.client.until(lambda: 7 in pair.client.fins)
            return pair.client.received

    assert uvloop.run(main()) == 4_000_000


async def test_a_reader_that_does_not_consume_stops_the_writer_and_consuming_resumes_it(
    ends: Ends,
) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        pump = Pump(pair.client, 900_000, (6, 10, 14))
        settled = asyncio.Event()
        quiet: list[int] = []

        def look() -> None:
            """Settled when nothing came for ten looks in a row."""
            quiet.append(pair.server.received)
            if pair.server.received and quiet[-10:] == [pair.server.received] * 10:
                settled.set()
            else:
                asyncio.get_running_loop().call_later(0.02, look)

        look()
        async with asyncio.timeout(PATIENCE_S):
            await settled.wait()

        assert all(len(data) <= SMALL.stream_window for data in pair.server.data.values())
        assert pair.server.received <= 3 * SMALL.stream_window
        assert pump.left

        pair.server.consumes = True
        for stream_id, data in pair.server.data.items():
            pair.server.transport.consumed(stream_id, len(data))
        await pair.server.until(lambda: pair.server.fins == {6, 10, 14})
        assert pair.server.received == 900_000


async def test_a_stream_that_is_not_consumed_does_not_stop_the_others(ends: Ends) -> None:
    server = replace(SMALL, connection_window=1 << 20)
    async with ends.connected(server=server) as pair:
        pair.server.consumes = False

        def consume(stream_id: int) -> None:
            if stream_id == 10:
                pair.server.transport.consumed(10, len(pair.server.data[10]) - done[0])
                done[0] = len(pair.server.data[10])

        done = [0]
        pair.server.on_data = consume
        pump = Pump(pair.client, 3_000_000, (6, 10))
        await pair.server.until(lambda: 10 in pair.server.fins)

        assert len(pair.server.data[6]) <= SMALL.stream_window
        assert list(pump.left) == [6]


async def test_control_leaves_before_data_when_both_wait(ends: Ends) -> None:
    order: list[int] = []
    async with ends.connected() as pair:
        pair.server.on_data = order.append
        pair.client.transport.send_stream_data(6, bytes(400_000), True)
        pair.client.transport.send_stream_data(2, b"control", False)
        pair.client.transport.send_stream_data(0, b"request", True)
        await pair.server.until(lambda: pair.server.fins == {0, 6})

        last = len(order) - 1 - order[::-1].index(6)
        assert max(order.index(2), order.index(0)) < last


async def test_streams_may_be_written_in_another_order_than_their_ids(ends: Ends) -> None:
    async with ends.connected() as pair:
        pair.client.transport.send_stream_data(14, b"urgent", True)
        pair.client.transport.send_stream_data(6, b"later", True)
        pair.client.transport.reset_stream(10, 7)
        await pair.server.until(lambda: pair.server.fins == {14, 6} and 10 in pair.server.resets)

        assert pair.server.data == {14: b"urgent", 6: b"later"}
        assert pair.server.resets == {10: 7}


async def test_two_thousand_short_streams_open_as_credit_comes(ends: Ends) -> None:
    async with ends.connected() as pair:
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
        pair.client.transport.close(0, "", drain_s=PATIENCE_S)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert set(map(bytes, pair.server.data.values())) == {b"question"}


async def test_two_connections_share_a_listener_and_not_their_fate(ends: Ends) -> None:
    arrived: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory(transport: QuicTransport) -> Recorder:
        recorder = Recorder(transport)
        arrived.put_nowait(recorder)
        return recorder

    async with ends.listening(factory=factory) as listener, asyncio.timeout(PATIENCE_S):
        first = await ends.dialled(listener.address)
        first_accepted = await arrived.get()
        second = await ends.dialled(listener.address)
        second_accepted = await arrived.get()
        first.transport.send_stream_data(0, b"one", True)
        await first_accepted.until(lambda: bool(first_accepted.fins))
        first.transport.close(5, "bye")
        await first_accepted.until(lambda: bool(first_accepted.losses))
        second.transport.send_stream_data(0, b"two", True)
        await second_accepted.until(lambda: bool(second_accepted.fins))

        [lost] = first_accepted.losses
        assert (lost.code, lost.application, lost.by_peer) == (5, True, True)
        assert not second_accepted.losses
        assert second_accepted.data == {0: b"two"}
        second.transport.abandon()
        await first.transport.wait_closed()


async def test_an_abandon_amid_a_batch_ends_it(ends: Ends) -> None:
    async with ends.connected() as pair:
        pair.server.on_data = lambda stream_id: pair.server.transport.abandon()
        pair.client.transport.send_stream_data(0, b"one", True)
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


async def test_a_reset_is_told_and_its_credit_comes_back(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        transport = pair.client.transport
        for stream_id in range(6, 6 + 4 * 20, 4):
            await begin(pair, stream_id)
            transport.reset_stream(stream_id, 9)
            await pair.server.until(partial(pair.server.resets.__contains__, stream_id))

        assert set(pair.server.resets.values()) == {9}


async def test_a_stopped_stream_is_reset_and_its_credit_comes_back(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        for stream_id in range(6, 6 + 4 * 20, 4):
            await begin(pair, stream_id)
            pair.server.transport.stop_sending(stream_id, 3)
            await pair.client.until(partial(pair.client.stops.__contains__, stream_id))
            await pair.server.until(partial(pair.server.resets.__contains__, stream_id))

        assert set(pair.client.stops.values()) == {3}


async def test_a_stream_is_reset_although_its_end_waits_for_credit(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        pair.client.transport.send_stream_data(6, bytes(100_000), True)
        await pair.server.until(lambda: pair.server.received == SMALL.stream_window)
        pair.client.transport.reset_stream(6, 9)

        await pair.server.until(lambda: pair.server.resets == {6: 9})


async def test_writing_after_stop_reset_or_fin_is_quiet(ends: Ends) -> None:
    async with ends.connected() as pair:
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


async def test_stopping_what_is_unknown_or_over_is_quiet(ends: Ends) -> None:
    async with ends.connected() as pair:
        pair.client.transport.send_stream_data(6, b"all", True)
        await pair.server.until(lambda: 6 in pair.server.fins)
        for stream_id in (6, 10, 7, 0, 1):
            pair.server.transport.stop_sending(stream_id, 1)
        pair.client.transport.send_stream_data(10, b"next", True)
        await pair.server.until(lambda: 10 in pair.server.fins)

        assert not pair.client.stops
        assert not pair.client.losses


# Datagrams


async def test_a_datagram_that_cannot_fit_is_refused_and_the_next_one_goes(ends: Ends) -> None:
    async with ends.connected() as pair:
        transport = pair.client.transport
        largest = max(n for n in range(1100, 1300) if transport.send_datagram(bytes(n)))
        refused = transport.send_datagram(bytes(largest + 1))
        await pair.server.until(lambda: len(pair.server.datagrams) == largest - 1099)

        assert not refused
        assert largest > 1150
        assert sorted(map(len, pair.server.datagrams)) == list(range(1100, largest + 1))


async def test_datagrams_that_wait_are_bounded(ends: Ends) -> None:
    async with ends.connected() as pair:
        accepted = [pair.client.transport.send_datagram(bytes(1000)) for _ in range(50_000)]

        assert not all(accepted)
        await pair.client.until(lambda: pair.client.transport.send_datagram(b"again"))


# The end of a connection


@pytest.mark.parametrize("run", range(5))
async def test_a_drained_close_right_after_a_write_loses_nothing(ends: Ends, run: int) -> None:
    async with ends.connected() as pair:
        pair.client.transport.send_stream_data(6, bytes(4 << 20), True)
        pair.client.transport.send_stream_data(2, b"no end of this")
        pair.client.transport.close(17, "done", drain_s=PATIENCE_S)
        pair.client.transport.send_stream_data(10, b"after the close", True)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.received == (4 << 20) + len(b"no end of this")
        assert pair.server.fins == {6}
        [lost] = pair.server.losses
        assert (lost.code, lost.application, lost.by_peer) == (17, True, True)
        assert pair.client.losses == [ConnectionLost(17, "done", application=True, by_peer=False)]


async def test_a_drain_has_a_deadline(ends: Ends) -> None:
    async with ends.connected(server=SMALL) as pair:
        pair.server.consumes = False
        pair.client.transport.send_stream_data(6, bytes(1 << 20), True)
        pair.client.transport.close(0, "", drain_s=0.05)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.received <= SMALL.stream_window


async def test_everything_is_quiet_after_the_end(ends: Ends) -> None:
    async with ends.connected() as pair:
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
        [lost] = pair.client.losses
        assert (lost.code, lost.application, lost.by_peer) == (1, True, True)


async def test_a_receiver_that_raises_closes_its_connection_once(ends: Ends) -> None:
    def raising(stream_id: int) -> None:
        raise RuntimeError(f"no use for stream {stream_id}")

    async with ends.connected() as pair:
        pair.server.on_data = raising
        pair.client.transport.send_stream_data(0, b"data", True)
        pair.client.transport.send_stream_data(6, b"more", True)
        await pair.client.until(lambda: bool(pair.client.losses))

        for losses, by_peer in ((pair.client.losses, True), (pair.server.losses, False)):
            [lost] = losses
            assert (lost.code, lost.application) == (INTERNAL_ERROR, True)
            assert lost.by_peer is by_peer


async def test_silence_beyond_the_idle_timeout_is_broken_by_pings(ends: Ends) -> None:
    brief = QuicSettings(idle_timeout_s=0.6)
    loop = asyncio.get_running_loop()
    async with ends.connected(brief, replace(brief, keepalive=False)) as pair:
        beyond, passed = loop.time() + 1.5, asyncio.Event()
        loop.call_at(beyond, passed.set)
        async with asyncio.timeout(PATIENCE_S):
            await passed.wait()
        pair.client.transport.send_stream_data(0, b"still here", True)
        await pair.server.until(lambda: 0 in pair.server.fins)

        assert not pair.client.losses


async def test_an_idle_timeout_is_told_as_one(ends: Ends) -> None:
    brief = QuicSettings(idle_timeout_s=0.3, keepalive=False)
    async with ends.connected(brief, brief) as pair:
        await pair.client.until(lambda: bool(pair.client.losses))
        await pair.server.until(lambda: bool(pair.server.losses))

        [lost] = pair.client.losses
        assert not lost.application
        assert not lost.by_peer
        assert lost.reason.startswith("idle timeout")
        assert lost.code == 0


async def test_an_abandoned_client_tells_the_peer_nothing(ends: Ends) -> None:
    async with ends.connected(server=QuicSettings(idle_timeout_s=0.3, keepalive=False)) as pair:
        pair.client.transport.abandon()
        await pair.client.until(lambda: bool(pair.client.losses))
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.client.losses[0].reason == "abandoned"
        assert pair.server.losses[0].reason.startswith("idle timeout")


async def test_a_closed_listener_tells_its_connections(ends: Ends) -> None:
    async with ends.connected() as pair:
        pair.listener.close()
        await pair.client.until(lambda: bool(pair.client.losses))

        [lost] = pair.client.losses
        assert (lost.code, lost.application, lost.by_peer) == (0, True, True)
        assert len(pair.server.losses) == 1


async def test_keys_are_updated_by_packet_count_while_data_flow(ends: Ends) -> None:
    settings = QuicSettings(key_update_packets=500)
    async with ends.connected(settings, settings) as pair:
        Pump(pair.client, 3_000_000, (6,))
        Pump(pair.server, 3_000_000, (7,))
        await pair.server.until(lambda: 6 in pair.server.fins)
        await pair.client.until(lambda: 7 in pair.client.fins)

        assert pair.server.received == pair.client.received == 3_000_000


# Between engines


@pytest.mark.parametrize("dialler", ["aioquic", "picoquic"])
async def test_the_engines_understand_each_other(
    certificates: CertificateFiles, dialler: EngineName
) -> None:
    try:
        engines = {name: engine_named(name) for name in ("aioquic", "picoquic")}
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    other = engines.pop(dialler)
    mixed = Engine(other.dial, next(iter(engines.values())).listen)
    async with Ends(mixed, certificates).connected(SMALL, SMALL) as pair:
        Pump(pair.client, 2_000_000, (6, 10))
        Pump(pair.server, 2_000_000, (7, 11))
        await pair.server.until(lambda: pair.server.fins == {6, 10})
        await pair.client.until(lambda: pair.client.fins == {7, 11})
        pair.client.transport.close(3, "", drain_s=PATIENCE_S)
        await pair.server.until(lambda: bool(pair.server.losses))

        assert pair.server.received == pair.client.received == 2_000_000
        assert pair.server.losses[0].code == 3
