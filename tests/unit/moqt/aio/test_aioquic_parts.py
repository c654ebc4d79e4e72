"""The parts of the engine that need no network, and why each of them is there.

Every workaround has a test here that passes only while aioquic needs it. When one of those
fails, the workaround can go.
"""

import hashlib
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aioquic._crypto import HeaderProtection
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicErrorCode, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder, QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender
from aioquic.tls import Epoch

from moqt.aio.aioquic import (
    RTT_EPOCH_S,
    Pacer,
    QuicSettings,
    _Reno,
    _short,
    _varint,
    _varint_size,
)
from moqt.aio.tls import ClientTls, ServerTls, client_configuration, make_certificates
from moqt.aio.tls import server_configuration as server_configuration_of

OCTETS = 1452


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_datagram_octets": 1199}, "max_datagram_octets"),
        ({"max_datagram_octets": 16_001}, "max_datagram_octets"),
        ({"stream_window": 1000}, "stream_window"),
        ({"stream_window": 2 << 20, "connection_window": 1 << 20}, "connection_window"),
        ({"idle_timeout_s": 0.0}, "idle_timeout_s"),
        ({"key_update_packets": 0}, "key_update_packets"),
        ({"key_update_packets": (1 << 23) + 1}, "key_update_packets"),
        ({"congestion_control": "vegas"}, "congestion_control"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        QuicSettings(**settings)


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 9000 Appendix A.1.
    [
        (37, "25"),
        (15_293, "7bbd"),
        (494_878_333, "9d7f3e7d"),
        (151_288_809_941_952_652, "c2197c5eff14e88c"),
    ],
)
def test_integers_are_encoded_as_the_rfc_does(value: int, encoded: str) -> None:
    assert _varint(value).hex() == encoded
    assert _varint_size(value) == len(encoded) // 2


def test_a_long_reason_is_cut_between_characters() -> None:
    assert _short("x" * 10) == "x" * 10
    assert len(_short("é" * 2000).encode()) == 500
    assert _short("x" + "é" * 2000) == "x" + "é" * 249


# The pacer


def packets_in(pacer: QuicPacketPacer, ticks: int, tick_s: float) -> int:
    """Count what leaves if a timer of ``tick_s`` is all that wakes the sender."""
    sent = 0
    for tick in range(1, ticks + 1):
        now = tick * tick_s
        while sent < 1_000_000 and pacer.next_send_time(now) is None:
            pacer.update_after_send(now)
            sent += 1
    return sent


@pytest.mark.parametrize("window", [20_000, 1_000_000, 20_000_000])
def test_the_pacer_lets_the_window_pass_per_round_trip(window: int) -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(window, 0.050)

    sent = packets_in(pacer, ticks=50, tick_s=0.001) * OCTETS

    assert window <= sent <= 1.25 * window + 17 * OCTETS + 0.005 * 1.25 * window / 0.050


def test_the_pacer_says_when_to_come_again() -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(100_000, 0.100)
    while (again := pacer.next_send_time(1.0)) is None:
        pacer.update_after_send(1.0)

    assert 1.001 <= again <= 1.0 + OCTETS / (1.25 * 1_000_000) + 1e-9


def test_the_pacer_keeps_out_of_the_way_of_paths_too_short_for_timers() -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(20_000_000, 0.0003)
    for _ in range(10_000):
        pacer.update_after_send(1.0)

    assert pacer.next_send_time(1.0) is None


def test_aioquic_needs_it_while_its_own_pacer_stalls() -> None:
    stock = QuicPacketPacer(max_datagram_size=OCTETS)
    stock.update_rate(congestion_window=20_000_000, smoothed_rtt=0.001)

    assert packets_in(stock, ticks=50, tick_s=0.001) <= 50 * 3


# The congestion window


def acknowledged(algorithm: RenoCongestionControl, in_flight: int, rounds: int) -> int:
    """Send and acknowledge ``in_flight`` packets so many times; return the window then."""
    for turn in range(1, rounds + 1):
        packets = [
            QuicSentPacket(
                epoch=Epoch.ONE_RTT,
                in_flight=True,
                is_ack_eliciting=True,
                is_crypto_packet=False,
                packet_number=number,
                packet_type=QuicPacketType.ONE_RTT,
                sent_time=float(turn),
                sent_bytes=OCTETS,
            )
            for number in range(in_flight)
        ]
        for packet in packets:
            algorithm.on_packet_sent(packet=packet)
        algorithm.in_flight_at_ack = algorithm.bytes_in_flight  # type: ignore[attr-defined]
        for packet in packets:
            algorithm.on_packet_acked(now=turn + 0.5, packet=packet)
    assert algorithm.bytes_in_flight == 0
    return algorithm.congestion_window


def test_a_window_that_is_not_used_does_not_grow() -> None:
    assert acknowledged(_Reno(max_datagram_size=OCTETS), in_flight=2, rounds=100) == 10 * OCTETS


def test_a_window_that_is_used_grows() -> None:
    assert acknowledged(_Reno(max_datagram_size=OCTETS), in_flight=10, rounds=1) == 20 * OCTETS


def measured(algorithm: _Reno, *rtts_s: float, start: int = 1) -> _Reno:
    """Have round-trip times measured, one a second."""
    for second, rtt_s in enumerate(rtts_s, start):
        algorithm.on_rtt_measurement(now=float(second), rtt=rtt_s)
    return algorithm


def test_a_window_does_not_grow_once_it_fills_a_queue() -> None:
    algorithm = measured(_Reno(max_datagram_size=OCTETS), 0.010, 0.034, 0.040)

    assert algorithm.queue_s == pytest.approx(0.030)
    assert algorithm.ssthresh == 10 * OCTETS
    assert acknowledged(algorithm, in_flight=10, rounds=100) == 10 * OCTETS


def test_a_window_grows_again_when_the_queue_is_gone() -> None:
    algorithm = measured(_Reno(max_datagram_size=OCTETS), 0.010, 0.040, 0.012)

    assert acknowledged(algorithm, in_flight=10, rounds=100) > 10 * OCTETS


def test_one_quick_packet_in_a_round_trip_shows_that_there_is_no_queue() -> None:
    algorithm = _Reno(max_datagram_size=OCTETS)
    for now, rtt_s in ((1.0, 0.010), (2.0, 0.050), (2.01, 0.011), (2.02, 0.090), (2.06, 0.080)):
        algorithm.on_rtt_measurement(now=now, rtt=rtt_s)

    assert algorithm.queue_s == pytest.approx(0.001)


def test_a_longer_route_is_not_taken_for_a_queue_for_ever() -> None:
    algorithm = measured(_Reno(max_datagram_size=OCTETS), 0.010, *[0.150] * 60)
    assert algorithm.queue_s == pytest.approx(0.140)

    measured(algorithm, *[0.150] * int(2 * RTT_EPOCH_S), start=62)

    assert algorithm.queue_s == 0.0


def test_aioquic_needs_it_while_its_own_window_grows_unused() -> None:
    stock = RenoCongestionControl(max_datagram_size=OCTETS)

    assert acknowledged(stock, in_flight=2, rounds=100) > 100 * OCTETS


# What aioquic itself does, in memory


class StockPair:
    """Two of aioquic's own connections, after a handshake without a network."""

    def __init__(self, folder: Path) -> None:
        files = make_certificates(folder)
        self.now = time.monotonic()
        self.client = self._connection(
            client_configuration(ClientTls(files.ca_file), ["x"], "localhost")
        )
        self.client.connect(("server", 1), self.now)
        self.server = self._connection(
            server_configuration_of(ServerTls(files.certificate_file, files.key_file), ["x"]),
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.exchange()

    def _connection(self, configuration: QuicConfiguration, **more: Any) -> QuicConnection:
        return QuicConnection(configuration=configuration, **more)

    def exchange(self) -> None:
        busy = True
        while busy:
            self.now += 0.01
            busy = False
            for source, sink, address in (
                (self.client, self.server, ("client", 1)),
                (self.server, self.client, ("server", 1)),
            ):
                if not source._network_paths:
                    continue
                for data, _ in source.datagrams_to_send(self.now):
                    sink.receive_datagram(data, address, self.now)
                    busy = True


@pytest.fixture
def stock(tmp_path: Path) -> StockPair:
    return StockPair(tmp_path)


def test_aioquic_opens_windows_for_octets_that_nobody_consumed(stock: StockPair) -> None:
    stock.client.send_stream_data(2, bytes(3 << 20))
    for _ in range(20):
        stock.exchange()

    assert stock.server._local_max_data.value > 4 << 20
    assert stock.server._streams[2].max_stream_data_local > 4 << 20


def test_aioquic_takes_a_stream_that_was_passed_over_for_a_finished_one(stock: StockPair) -> None:
    stock.client.send_stream_data(10, b"first")

    with pytest.raises(ValueError, match="finished stream"):
        stock.client.send_stream_data(6, b"second")


def test_aioquic_raises_on_a_write_after_stop_sending(stock: StockPair) -> None:
    stock.client.send_stream_data(2, b"x")
    stock.exchange()
    stock.server.stop_stream(2, 1)
    stock.exchange()

    with pytest.raises(ValueError, match="finished stream"):
        stock.client.send_stream_data(2, b"y")


def test_aioquic_calls_an_idle_timeout_an_internal_error(stock: StockPair) -> None:
    stock.client.handle_timer(stock.now + 1000)
    found = [e for e in stock.client._events if isinstance(e, events.ConnectionTerminated)]

    assert [(e.error_code, e.reason_phrase) for e in found] == [
        (QuicErrorCode.INTERNAL_ERROR, "Idle timeout")
    ]


def test_aioquic_forgets_the_last_keys_at_an_update(stock: StockPair) -> None:
    stock.server.send_stream_data(3, b"under the old keys")
    late = stock.server.datagrams_to_send(stock.now)
    stock.client._cryptos[Epoch.ONE_RTT]._update_key("local_update")
    for data, _ in late:
        stock.client.receive_datagram(data, ("server", 1), stock.now)

    assert 3 not in stock.client._streams


def test_aioquic_lets_an_oversized_datagram_block_the_queue(stock: StockPair) -> None:
    stock.client._remote_max_datagram_frame_size = 65_535
    stock.client.send_datagram_frame(bytes(1400))
    stock.client.send_datagram_frame(b"behind it")
    stock.exchange()

    assert len(stock.client._datagrams_pending) == 2


#: What this project replaces or mirrors of aioquic. If one changes, so may have to we.
MIRRORED: list[Callable[..., Any]] = [
    QuicConnection.receive_datagram,
    QuicConnection.datagrams_to_send,
    QuicConnection._flush_builder,
    QuicConnection._payload_received,
    QuicConnection._handle_stream_frame,
    QuicConnection._handle_reset_stream_frame,
    QuicConnection._handle_stop_sending_frame,
    QuicConnection._write_application,
    QuicConnection._write_connection_limits,
    QuicConnection._write_stream_limits,
    QuicConnection._write_reset_stream_frame,
    QuicConnection._write_stop_sending_frame,
    QuicConnection._write_stream_frame,
    QuicConnection._get_or_create_stream_for_send,
    QuicPacketBuilder.start_packet,
    QuicPacketBuilder.flush,
    QuicPacketBuilder._end_packet,
    QuicPacketBuilder._flush_current_datagram,
    CryptoContext.decrypt_packet,
    CryptoContext.encrypt_packet,
    HeaderProtection.apply,
    HeaderProtection.remove,
    QuicStreamReceiver.handle_frame,
    QuicStreamSender.get_frame,
    QuicStreamSender.on_data_delivery,
    QuicStreamSender.write,
    QuicStreamSender.reset,
]


def test_aioquic_is_what_the_engine_was_written_for() -> None:
    source = "".join(inspect.getsource(function) for function in MIRRORED)

    assert hashlib.sha256(source.encode()).hexdigest()[:16] == "d0d49fc0645291f1"
