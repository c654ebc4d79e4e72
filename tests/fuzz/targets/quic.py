"""Targets of :mod:`moqt.aio.aioquic`: datagrams, and the frames in packets of a peer.

A connection with its keys is put together without a handshake, which costs a thousand times what
reading a packet does. What a peer could not know, the keys, is not fuzzed; what it may put into
packets is.
"""

from collections.abc import Iterable
from functools import cache
from itertools import count
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnectionState, QuicNetworkPath
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite

from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.inbound import Inbound
from moqt.aio.aioquic.varint import encode_varint
from moqt.aio.settings import QuicSettings
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target

PEER = ("192.0.2.1", 1)
SIZE = 1200
#: Small, so that limits are reached.
WINDOWS = QuicSettings(stream_window=1 << 16, connection_window=1 << 16, max_datagram_octets=SIZE)
_SECRETS = b"to the server".ljust(32), b"to the client".ljust(32)
_SUITE = CipherSuite.AES_128_GCM_SHA256
_PEER_CID = b"the peer"
#: What a connection keeps of a peer's streams at most, in number: aioquic's own limit, both kinds.
_MAX_STREAMS = 2 * 128


@cache
def configuration() -> QuicConfiguration:
    made = QuicConfiguration(is_client=False, alpn_protocols=["x"])
    made.connection_id_length = 8
    made.max_data, made.max_stream_data = WINDOWS.connection_window, WINDOWS.stream_window
    made.max_datagram_frame_size = 65_535
    made.max_datagram_size = SIZE
    unused: Any = object()  # there is no handshake
    made.certificate = made.private_key = unused
    return made


def established() -> Connection:
    """Return a server's connection as it is when the handshake is over."""
    connection: Any = Connection(
        WINDOWS, configuration=configuration(), original_destination_connection_id=b"x" * 8
    )
    connection._version = QuicProtocolVersion.VERSION_1
    connection._initialize(_PEER_CID)
    connection._peer_cid.cid, connection._peer_cid.sequence_number = _PEER_CID, 0
    _set_keys(connection._crypto, *_SECRETS)
    connection._network_paths = [QuicNetworkPath(PEER, is_validated=True)]
    connection._handshake_complete = connection._handshake_confirmed = True
    connection._handshake_done_pending = False
    connection._loss.peer_completed_address_validation = True
    connection._remote_max_data = connection._remote_max_streams_bidi = 1 << 20
    connection._remote_max_streams_uni = connection._remote_max_stream_data_uni = 1 << 20
    connection._set_state(QuicConnectionState.CONNECTED)
    connection._note_keys()
    # Something of ours is under way: two streams, and packets that can be acknowledged or lost.
    connection.write(1, b"asked", fin=False)
    connection.write(3, b"told" * 400, fin=True)
    connection.datagrams_to_send(0.0)
    assert connection._is_open()
    return connection  # type: ignore[no-any-return]


def _set_keys(pair: CryptoPair, received: bytes, sent: bytes) -> None:
    version = QuicProtocolVersion.VERSION_1
    pair.recv.setup(cipher_suite=_SUITE, secret=received, version=version)
    pair.send.setup(cipher_suite=_SUITE, secret=sent, version=version)


def settle(connection: Connection, now: float) -> None:
    """Do what the transport does after datagrams came."""
    for event in list(connection.pending_events):
        if isinstance(event, Inbound):
            pieces, event.pieces = event.pieces or [], None
            octets = sum(map(len, pieces))
            if octets % 3:  # sometimes nobody reads
                connection.consume(int(event.stream.stream_id or 0), octets)
    connection.pending_events.clear()
    connection.datagrams_to_send(now)
    due = connection.get_timer()
    if due is not None and due < now:
        connection.handle_timer(now)
    connection.lost()
    inner: Any = connection
    assert len(inner._streams) <= _MAX_STREAMS + 8, "more streams than were allowed"
    held = sum(len(stream.receiver._buffer) for stream in inner._streams.values())
    assert held <= WINDOWS.connection_window, "more is held than the window allows"
    assert len(inner._space.ack_queue) <= 300, "packet numbers are remembered without a bound"


def frames(data: bytes) -> None:
    """Packets with any payload, protected as a peer does, some of them in one batch."""
    connection, choices = established(), Octets(data)
    peer = CryptoPair()
    _set_keys(peer, _SECRETS[1], _SECRETS[0])
    host_cid = connection.host_cid
    now, numbers = 0.1, count()
    while not choices.is_exhausted:
        batch: list[bytes] = []
        for _ in range(1 + choices.below(4)):
            number = next(numbers) + (choices.byte() if choices.below(8) == 7 else 0)
            payload = choices.octets(250) or b"\x01"
            payload += bytes(max(0, 24 - len(payload)))  # padding, so that there is a sample
            header = b"\x43" + host_cid + (number & 0xFFFF_FFFF).to_bytes(4, "big")
            batch.append(peer.encrypt_packet(header, payload, number))
        size = max(map(len, batch))
        whole = [packet for packet in batch if len(packet) == size]
        for run in (whole, *([packet] for packet in batch if len(packet) != size)):
            connection.receive(b"".join(run), size, PEER, now)
        settle(connection, now)
        now += 0.01 * (1 << choices.below(8))
        if not connection._is_open():
            break


def datagrams(data: bytes) -> None:
    """Datagrams that are no packets of the peer, or of no use."""
    connection, choices = established(), Octets(data)
    now = 0.1
    while not choices.is_exhausted:
        size = 1 + choices.below(300)
        run = choices.take(size * (1 + choices.below(3)))
        if choices.below(2):  # addressed to this connection
            run = run[:1] + connection.host_cid + run[9:]
        if run:
            connection.receive(run, size, PEER if choices.below(4) else ("192.0.2.9", 9), now)
        settle(connection, now)
        now += 0.1


def _frame_seeds() -> Iterable[bytes]:
    v = encode_varint
    stream = b"\x0e" + v(0) + v(0) + v(5) + b"hello"
    bodies = [
        stream,
        b"\x0f" + v(2) + v(0) + v(3) + b"abc",
        b"\x08" + v(6) + b"to the end of the packet",
        b"\x0e" + v(2) + v(1 << 16) + v(200) + b"x" * 200,  # beyond the window
        stream + b"\x0e" + v(0) + v(5) + v(1) + b"!",
        b"\x02" + v(1) + v(0) + v(0) + v(1),
        b"\x02" + v(2) + v(0) + v(1) + v(0) + v(0) + v(0),
        b"\x03" + v(1) + v(0) + v(0) + v(0) + v(1) + v(2) + v(3),
        b"\x04" + v(0) + v(7) + v(5),
        b"\x05" + v(3) + v(7),
        b"\x06" + v(0) + v(4) + b"\x04\x00\x00\x00",
        b"\x10" + v(1 << 40),
        b"\x11" + v(3) + v(1 << 40),
        b"\x12" + v(1 << 20),
        b"\x13" + v(1 << 20),
        b"\x14" + v(1),
        b"\x15" + v(0) + v(1),
        b"\x16" + v(9),
        b"\x17" + v(9),
        b"\x18" + v(1) + v(0) + b"\x08" + b"c" * 8 + b"t" * 16,
        b"\x19" + v(0),
        b"\x1a" + b"p" * 8,
        b"\x1b" + b"p" * 8,
        b"\x1c" + v(0) + v(0) + v(3) + b"bye",
        b"\x1d" + v(3) + v(3) + b"bye",
        b"\x31" + v(5) + b"hello",
        b"\x30hello",
    ]
    for body in bodies:
        # How many packets, whether a number is skipped, how long; then how late the next one is.
        yield bytes([0, 0, len(body)]) + body + b"\x00"
        yield bytes([1, 0, len(body)]) + body + bytes([0, len(stream)]) + stream + b"\x03"


def _datagram_seeds() -> Iterable[bytes]:
    yield bytes([99]) + b"\x40" + bytes(60)
    yield bytes([40]) + b"\xc0\x00\x00\x00\x01\x08" + b"x" * 8 + b"\x00" * 30
    yield bytes([30]) + b"\x80\x00\x00\x00\x00\x08" + b"x" * 8 + b"\x00" * 40
    yield bytes([250, 2]) + b"\x43" + bytes(200)


TARGETS = (
    Target(name="quic_frames", run=frames, seeds=_frame_seeds, max_octets=2048),
    Target(name="quic_datagrams", run=datagrams, seeds=_datagram_seeds, max_octets=2048),
)
