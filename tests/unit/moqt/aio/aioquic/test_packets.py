"""Two connections back to back, without a network, and what becomes of packets between them.

Nearly all packets take a short way in and out, which must not differ from aioquic's own in what
arrives, in what is counted, and in what is forgotten.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import pull_quic_header
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.aio.aioquic.configuration import client_configuration, server_configuration
from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.inbound import Inbound
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ClientTls, ServerTls, make_certificates

CLIENT, SERVER = ("192.0.2.1", 1), ("192.0.2.2", 2)
#: Server streams that carry bulk data.
STREAMS = (7, 11, 15)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClientTls, ServerTls]:
    files = make_certificates(Path(tmp_path_factory.mktemp("tls")))
    return ClientTls(ca_file=files.ca_file), ServerTls(files.certificate_file, files.key_file)


FATES = ("arrive", "lost", "late", "doubled", "forged", "alone")


class Fate:
    """What becomes of each datagram: by default it arrives."""

    def __init__(self, seed: int = 0, weights: Sequence[int] = (1, 0, 0, 0, 0, 0)) -> None:
        self._random, self._weights = Random(seed), weights

    def next(self) -> str:
        [fate] = self._random.choices(FATES, self._weights)
        return fate


class Pair:
    """A client and a server between which time is a number."""

    def __init__(self, tls: tuple[ClientTls, ServerTls], octets: int, **limits: Any) -> None:
        self.settings = QuicSettings(max_datagram_octets=octets, **limits)
        self.now = 100.0
        self.fate = Fate()
        self.received: dict[int, bytes] = {}
        self.fins: set[int] = set()
        self.late: list[bytes] = []
        self.client = Connection(self.settings, configuration=self._client(tls[0]))
        self.client.connect(SERVER, self.now)
        first = [data for data, _ in self.client.datagrams_to_send(self.now)]
        header = pull_quic_header(Buffer(data=first[0]), host_cid_length=8)
        self.server = Connection(
            self.settings,
            configuration=server_configuration(self.settings, tls[1], ["x"]),
            original_destination_connection_id=header.destination_cid,
        )
        for data in first:
            self.server.receive(data, len(data), CLIENT, self.now)
        while not (self.client._handshake_confirmed and self.server._handshake_confirmed):
            self.turn()
            assert self.now < 110

    def _client(self, tls: ClientTls) -> QuicConfiguration:
        return client_configuration(self.settings, tls, ["x"], "localhost")

    def turn(self) -> None:
        """Carry everything over, once in each direction."""
        self._carry(self.server, self.client, SERVER)
        for event in list(self.client.pending_events):
            if isinstance(event, Inbound):
                pieces, event.pieces = event.pieces or [], None
                stream_id = int(event.stream.stream_id or 0)
                data = b"".join(pieces)
                self.received[stream_id] = self.received.get(stream_id, b"") + data
                self.client.consume(stream_id, len(data))
                if event.fin:
                    self.fins.add(stream_id)
        self.client.pending_events.clear()
        self.server.pending_events.clear()
        self._carry(self.client, self.server, CLIENT)
        self.now += 0.02
        for connection in (self.client, self.server):
            due = connection.get_timer()
            if due is not None and due <= self.now:
                connection.handle_timer(self.now)

    def _carry(self, sender: Connection, receiver: Connection, address: Any) -> None:
        run: list[bytes] = []
        datagrams = [data for data, _ in sender.datagrams_to_send(self.now)]
        is_bulk = sender is self.server and sender._handshake_confirmed
        size = max(map(len, datagrams), default=1)
        for data in datagrams:
            fate = self.fate.next() if is_bulk else "arrive"
            if fate == "lost":
                continue
            if fate == "late":
                self.late.append(data)
                continue
            copies = [data] * (2 if fate == "doubled" else 1)
            if fate == "forged":
                copies.insert(0, data[:-1] + bytes((data[-1] ^ 1,)))
            for copy in copies:
                run.append(copy)
                if len(copy) < size or fate == "alone":
                    receiver.receive(b"".join(run), size, address, self.now)
                    run = []
        if run:
            receiver.receive(b"".join(run), size, address, self.now)
        if is_bulk:
            for data in self.late[: len(self.late) // 2 + 1]:
                receiver.receive(data, len(data), address, self.now)
            del self.late[: len(self.late) // 2 + 1]

    def until_all_is_acknowledged(self) -> None:
        deadline = self.now + 300
        while self.server.unacked > 0:
            self.turn()
            assert self.now < deadline, "something never arrived"


@pytest.fixture(scope="module")
def pair_of(tls: tuple[ClientTls, ServerTls]) -> Callable[..., Pair]:
    return lambda octets, **limits: Pair(tls, octets, **limits)


#: Less than half is lost or late, or it takes long.
fates = st.builds(
    Fate, st.integers(0, 1 << 32), st.tuples(st.just(6), *(st.integers(0, 2) for _ in FATES[1:]))
)
writes = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.integers(0, 40_000)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1200, 1452, 8900, 16_000]), writes, fates)
def test_what_is_written_arrives_whatever_becomes_of_packets(
    pair_of: Any, octets: int, writes: list[tuple[int, int]], fate: Fate
) -> None:
    pair = pair_of(octets)
    pair.fate = fate
    written: dict[int, bytes] = {}
    for index, (stream_id, count) in enumerate(writes):
        data = bytes((index + 1,)) * count
        pair.server.write(stream_id, data, False)
        written[stream_id] = written.get(stream_id, b"") + data
        if index % 3 == 2:
            pair.turn()
    for stream_id in written:
        pair.server.write(stream_id, b"", True)
    pair.until_all_is_acknowledged()

    assert {key: pair.received.get(key, b"") for key in written} == written
    assert pair.fins == set(written)
    assert pair.client._local_max_data.used == sum(map(len, written.values()))


@settings(max_examples=25, deadline=None)
@given(fates)
def test_nothing_is_kept_of_what_was_acknowledged(pair_of: Any, fate: Fate) -> None:
    pair = pair_of(1452)
    pair.fate = fate
    for stream_id in STREAMS:
        pair.server.write(stream_id, bytes(150_000), True)
    pair.until_all_is_acknowledged()
    pair.fate = Fate()
    for _ in range(10):
        pair.turn()

    recovery, space = pair.server._loss, pair.server._space
    in_flight = [packet for packet in space.sent_packets.values() if packet.in_flight]
    assert recovery.bytes_in_flight == sum(packet.sent_bytes for packet in in_flight)
    assert space.ack_eliciting_in_flight == sum(p.is_ack_eliciting for p in in_flight)
    assert pair.server.unacked == 0
    assert not pair.server._outbound
    assert not set(STREAMS) & set(pair.client._inbound)


def test_a_fin_that_is_acknowledged_twice_is_counted_once(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(1200)
    pair.server.write(7, b"x", False)
    pair.server.datagrams_to_send(pair.now)  # lost
    pair.server.write(7, b"", True)
    pair.until_all_is_acknowledged()

    assert pair.received[7] == b"x"
    assert pair.server.unacked == 0


def test_a_window_of_the_connection_is_not_exceeded_by_packets_that_go_on(pair_of: Any) -> None:
    pair = pair_of(8900, connection_window=200_000, stream_window=150_000)
    for stream_id in STREAMS:
        pair.server.write(stream_id, bytes(300_000), True)
    pair.until_all_is_acknowledged()

    assert {key: len(data) for key, data in pair.received.items()} == dict.fromkeys(
        STREAMS, 300_000
    )
    assert pair.client.lost() is None


@pytest.mark.parametrize("octets", [1452, 16_000])
def test_a_peer_that_exceeds_a_window_within_one_batch_is_closed(pair_of: Any, octets: int) -> None:
    pair = pair_of(octets, connection_window=1 << 16, stream_window=1 << 16)
    pair.server._remote_max_data = 1 << 30
    pair.server._remote_max_stream_data_uni = 1 << 30
    pair.server.write(7, bytes(100_000), False)
    for _ in range(50):
        for data, _ in pair.server.datagrams_to_send(pair.now):
            pair.client.receive(data, len(data), SERVER, pair.now)
        pair._carry(pair.client, pair.server, CLIENT)
        pair.now += 0.02

    lost = pair.client.lost()
    assert lost is not None
    assert lost.code == 0x3  # FLOW_CONTROL_ERROR


def test_keys_are_updated_within_a_transfer(pair_of: Any) -> None:
    pair = pair_of(1200, key_update_packets=50)
    pair.fate = Fate(1, (3, 0, 1, 0, 0, 0))
    pair.server.write(7, bytes(400_000), True)
    pair.until_all_is_acknowledged()

    assert pair.received[7] == bytes(400_000)
    assert pair.server.key_updates > 3
    assert pair.client.key_updates == pair.server.key_updates


@pytest.mark.parametrize("size", range(30))
def test_datagrams_too_short_for_a_packet_are_dropped(pair_of: Any, size: int) -> None:
    pair = pair_of(1200)
    stray = (b"\x40" + pair.client.host_cid + bytes(40))[:size]
    pair.client.receive(stray * 3, max(size, 1), SERVER, pair.now)
    pair.server.write(7, b"whole", True)
    pair.until_all_is_acknowledged()

    assert pair.received == {7: b"whole"}
