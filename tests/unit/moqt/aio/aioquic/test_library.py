"""What aioquic itself does, in memory: why the engine replaces so much of it.

Every workaround has a test here, or beside its own, that passes only while aioquic needs it.
When one of those fails, the workaround can go.
"""

import hashlib
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aioquic._buffer import Buffer
from aioquic._crypto import HeaderProtection
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicTransportParameters,
    push_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender
from aioquic.tls import Epoch

from moqt.aio.tls import make_certificates


class StockPair:
    """Two of aioquic's own connections, after a handshake without a network."""

    def __init__(self, folder: Path) -> None:
        files = make_certificates(folder)
        self.now = time.monotonic()
        believing = QuicConfiguration(is_client=True, alpn_protocols=["x"], server_name="localhost")
        believing.load_verify_locations(str(files.ca_file))
        self.client = QuicConnection(configuration=believing)
        self.client.connect(("server", 1), self.now)
        serving = QuicConfiguration(is_client=False, alpn_protocols=["x"])
        serving.load_cert_chain(files.certificate_file, files.key_file)
        self.server = QuicConnection(
            configuration=serving,
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.exchange()

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


def test_aioquic_takes_no_notice_of_how_large_a_datagram_may_be_for_the_peer() -> None:
    buf = Buffer(capacity=100)
    push_quic_transport_parameters(buf, QuicTransportParameters(max_udp_payload_size=1300))
    client = QuicConnection(configuration=QuicConfiguration(max_datagram_size=1400))
    client._parse_transport_parameters(buf.data, from_session_ticket=True)

    assert client._max_datagram_size == 1400


def test_aioquic_begins_with_ten_datagrams_however_large_they_are() -> None:
    assert RenoCongestionControl(max_datagram_size=16_000).congestion_window == 160_000


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
