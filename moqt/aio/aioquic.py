"""The QUIC engine: aioquic's protocol core under our own shell.

aioquic (written for 1.7.2) does the handshake, loss detection and the rare frames. This file
drives it without its asyncio package, and replaces what does not fit:

* packets full of stream data are built and taken apart here, a batch at a time;
* receive windows follow what the application consumed, not what arrived;
* control and request streams leave before data streams, and data in the order it was written;
* the pacer cannot stall, and a congestion window that is not used does not grow;
* keys are updated before the AEAD's limit, idle connections are kept alive.

All that aioquic keeps private is touched in this file and nowhere else. There is one clock, that
of :func:`time.monotonic`.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import structlog
from aioquic import tls as aioquic_tls
from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import AEAD, CryptoError
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.cubic import CubicCongestionControl
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import (
    END_STATES,
    MAX_STREAM_DATA_FRAME_CAPACITY,
    RESET_STREAM_FRAME_CAPACITY,
    STOP_SENDING_FRAME_CAPACITY,
    TRANSPORT_CLOSE_FRAME_CAPACITY,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    QuicStreamFrame,
    decode_packet_number,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import (
    QuicDeliveryState,
    QuicPacketBuilder,
    QuicPacketBuilderStop,
    QuicSentPacket,
)
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.quic.stream import FinalSizeError, QuicStream, QuicStreamSender, StreamFinishedError

from moqt.aio.tls import ClientTls, ServerTls, client_configuration, server_configuration
from moqt.aio.transport import ConnectionLost, QuicReceiver, TransportStats
from moqt.aio.udp import Address, UdpEndpoint, bound_socket, connected_socket

log = structlog.get_logger()

#: Below this, no timer of an event loop could space packets out.
PACING_FLOOR_S = 0.004

#: Octets built, sent and then forgotten about before the next are built: one segmented send.
BURST_OCTETS = 64_000

#: Bursts before the event loop gets a turn, in which acknowledgements are read.
BURSTS_PER_TURN = 4

#: Connection-level flow control credit that data streams leave to control and request streams.
CONTROL_RESERVE = 16 << 10

#: What may always be written while nothing is in flight.
IDLE_BUDGET = 16 << 10

#: QUIC DATAGRAMs kept at most while the congestion window is full.
DATAGRAM_BACKLOG = 4096

#: A server forgets a connection whose handshake takes longer.
HANDSHAKE_LIMIT_S = 10.0

#: MOQT, "Session termination": what the application closes with when it failed itself.
INTERNAL_ERROR = 0x1

_MAX_DATAGRAM_FRAME = 65_535
_AEAD_TAG = 16
_CONNECTION_ID = 8
_ONE_RTT = aioquic_tls.Epoch.ONE_RTT

ReceiverFactory = Callable[["AioquicTransport"], QuicReceiver]


@dataclass(frozen=True, slots=True)
class QuicSettings:
    """What a connection can be told before it starts.

    Raises:
        ValueError: If a value is out of its range; the message names it.
    """

    max_datagram_octets: int = 1200
    """UDP payload sent at most, 1200 to 16000. The path must take it: nothing probes for it."""

    connection_window: int = 16 << 20
    """Octets that may have arrived and not been consumed, over all streams."""

    stream_window: int = 8 << 20
    """The same for one stream."""

    idle_timeout_s: float = 30.0
    """Silence that ends a connection; the smaller one of both ends counts."""

    keepalive: bool = True
    """Whether to break the silence, at a third of the idle timeout."""

    key_update_packets: int = 1 << 22
    """Packets under one key; AES-GCM is safe for 2**23 (RFC 9001 Section 6.6)."""

    congestion_control: Literal["reno", "cubic"] = "reno"

    retry: bool = False
    """Whether a listener makes clients prove their address first, at the cost of a round trip."""

    max_connections: int = 1024
    """Connections of one listener; more are refused."""

    def __post_init__(self) -> None:
        if not 1200 <= self.max_datagram_octets <= 16_000:
            # aioquic writes the length of a STREAM frame in 14 bits, so more cannot be parsed.
            raise ValueError(f"max_datagram_octets is {self.max_datagram_octets}, not 1200..16000")
        if self.stream_window < 1 << 16 or self.connection_window < self.stream_window:
            raise ValueError(
                f"stream_window {self.stream_window} must be 65536 or more and not above "
                f"connection_window {self.connection_window}"
            )
        if self.idle_timeout_s <= 0:
            raise ValueError(f"idle_timeout_s is {self.idle_timeout_s}, not above 0")
        if not 1 <= self.key_update_packets <= 1 << 23:
            raise ValueError(f"key_update_packets is {self.key_update_packets}, not 1..2**23")
        if self.congestion_control not in ("reno", "cubic"):
            raise ValueError(f"congestion_control {self.congestion_control!r} is not known")
        if self.max_connections < 1:
            raise ValueError(f"max_connections is {self.max_connections}, not 1 or more")


class DialError(ConnectionError):
    """A connection could not be made. The message says to whom and what failed."""


class TlsAlertError(DialError):
    """The TLS handshake failed. ``alert`` is the name RFC 8446 gives the reason."""

    def __init__(self, message: str, alert: str) -> None:
        super().__init__(message)
        self.alert = alert


class AlpnMismatchError(TlsAlertError):
    """The peer speaks none of the protocols that were offered."""


# --------------------------------------------------------------------------------------------
# Congestion: aioquic's algorithms, with two corrections
# --------------------------------------------------------------------------------------------


class _UsedWindow:
    """Mixin: a window grows only while it is used (RFC 9002 Section 7.8).

    aioquic 1.7.2 grows it with every acknowledgement, so an application that sends little ends
    up with a window that allows a burst no path can take.
    """

    bytes_in_flight: int
    congestion_window: int
    in_flight_at_ack = 0

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        if self.in_flight_at_ack * 2 < self.congestion_window:
            self.bytes_in_flight -= packet.sent_bytes
        else:
            super().on_packet_acked(now=now, packet=packet)  # type: ignore[misc]


class _Reno(_UsedWindow, RenoCongestionControl):
    pass


class _Cubic(_UsedWindow, CubicCongestionControl):
    pass


class Pacer(QuicPacketPacer):
    """Spaces packets out where that can work, and never stalls.

    aioquic 1.7.2 sizes its bucket in time, a fraction of the window at the window's own rate: as
    the window grows, the bucket shrinks below one packet, and each timer tick then lets two
    packets out. Here the bucket is counted in octets and holds what a late timer would owe.
    """

    #: How far the rate is above window / RTT, so that pacing does not limit (RFC 9002 Section 7.7).
    GAIN = 1.25
    #: How late a timer may be without a loss of rate.
    TIMER_S = 0.004
    MIN_PACKETS = 16

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._rate: float | None = None
        self._bucket = self._bucket_octets = float(self.MIN_PACKETS * max_datagram_size)

    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]
        """Return when the next packet may leave, or None for now."""
        if self._rate is None:
            return None
        if now > self.evaluation_time:
            earned = self._rate * (now - self.evaluation_time)
            self._bucket = min(self._bucket + earned, self._bucket_octets)
            self.evaluation_time = now
        if self._bucket > 0:
            return None
        return now + max(0.001, -self._bucket / self._rate)

    def update_after_send(self, now: float) -> None:
        """Account for one packet."""
        if self._rate is not None:
            self._bucket -= self._max_datagram_size

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Take over a new window and RTT."""
        if smoothed_rtt < PACING_FLOOR_S:
            self._rate = None
            return
        self._rate = self.GAIN * congestion_window / smoothed_rtt
        self._bucket_octets = max(
            self.MIN_PACKETS * self._max_datagram_size, self._rate * self.TIMER_S
        )


class _Recovery(QuicPacketRecovery):
    """Loss recovery that knows how full the window was, and counts losses."""

    lost = 0

    def on_ack_received(self, **arguments: Any) -> None:
        self._cc.in_flight_at_ack = self._cc.bytes_in_flight  # type: ignore[attr-defined]
        super().on_ack_received(**arguments)

    def _on_packets_lost(
        self,
        *,
        congestion_event: bool = True,
        packets: Iterable[QuicSentPacket],
        **arguments: Any,
    ) -> None:
        packets = list(packets)
        if congestion_event:
            self.lost += len(packets)
        super()._on_packets_lost(congestion_event=congestion_event, packets=packets, **arguments)


def _recovery_for(connection: QuicConnection, settings: QuicSettings) -> _Recovery:
    """Return the recovery that replaces the one ``connection`` was made with."""
    octets = settings.max_datagram_octets
    recovery = _Recovery(
        congestion_control_algorithm=settings.congestion_control,
        initial_rtt=connection.configuration.initial_rtt,
        max_datagram_size=octets,
        peer_completed_address_validation=not connection.configuration.is_client,
        send_probe=connection._send_probe,
        logger=connection._logger,
    )
    algorithm = _Reno if settings.congestion_control == "reno" else _Cubic
    recovery._cc = algorithm(max_datagram_size=octets)
    recovery._pacer = Pacer(max_datagram_size=octets)
    return recovery


# --------------------------------------------------------------------------------------------
# The connection
# --------------------------------------------------------------------------------------------


class _Sender(QuicStreamSender):
    """What waits and what is unacknowledged on one stream, for data sent and acknowledged in order.

    aioquic 1.7.2 keeps everything that waits as a set of ranges. Here only what was lost is one;
    the rest begins where sending has got to, which saves most of the work for each packet.
    """

    def write(self, data: bytes | memoryview, end_stream: bool = False) -> None:
        self.buffer_is_empty = False
        self._buffer += data
        self._buffer_stop += len(data)
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self._pending_eof = True

    @property
    def next_offset(self) -> int:
        return self._pending[0].start if len(self._pending) else self.highest_offset

    def take(self, room: int, credit: int) -> tuple[int, int, bytearray, bool] | None:
        """Take the next ``room`` octets at most: their range, themselves, whether they are last.

        Args:
            room: Octets that fit.
            credit: Offset that flow control lets us reach.
        """
        lost = self._pending
        if len(lost):
            start = lost[0].start
            stop = min(lost[0].stop, start + room)
            if stop > start:
                lost.subtract(start, stop)
        else:
            start = self.highest_offset
            stop = min(self._buffer_stop, start + room, credit)
            if stop > start:
                self.highest_offset = stop
            elif start != self._buffer_fin or not self._pending_eof:
                return None
            else:
                stop = start
        if stop == start and len(lost):
            return None
        fin = stop == self._buffer_fin
        if fin:
            self._pending_eof = False
        if stop == self._buffer_stop and not len(lost):
            self.buffer_is_empty = True
        first = self._buffer_start
        return start, stop, self._buffer[start - first : stop - first], fin

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        if (
            fin
            or delivery is not QuicDeliveryState.ACKED
            or start != self._buffer_start
            or len(self._acked)
        ):
            super().on_data_delivery(delivery, start, stop, fin)
        else:
            self._buffer_start = stop
            del self._buffer[: stop - start]


class _Outbound:
    """A stream we send on."""

    __slots__ = (
        "fin",
        "id_octets",
        "queued",
        "reset",
        "sender",
        "stream",
        "stream_id",
        "unacked",
        "urgent",
    )

    def __init__(self, stream: QuicStream) -> None:
        self.stream = stream
        self.stream_id = stream_id = _id_of(stream)
        self.sender = stream.sender = _Sender(stream_id, writable=True)
        self.id_octets = _varint(stream_id)
        # Control and request streams, which a few octets keep alive and which others wait for.
        self.urgent = not stream_is_unidirectional(stream_id) or stream_id < 4
        self.unacked = 0  # octets written and not acknowledged; the FIN counts as one
        self.queued = False
        self.fin = False
        self.reset = False

    @property
    def writable(self) -> bool:
        return not (self.fin or self.reset or self.sender.is_finished)


class _Inbound:
    """A stream we receive on; queued among the events while ``pieces`` waits to be told."""

    __slots__ = ("consumed", "dropped", "fin", "pieces", "stream")

    def __init__(self, stream: QuicStream) -> None:
        self.stream = stream
        self.consumed = 0  # octets the windows have moved past
        self.dropped = False  # nobody wants what arrives any more
        self.pieces: list[bytes] | None = None
        self.fin = False


class _Connection(QuicConnection):
    """aioquic's connection with our flow control and our way of filling packets."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loss: _Recovery = _recovery_for(self, settings)
        self._key_update_packets = settings.key_update_packets
        self._stream_window = settings.stream_window
        self._connection_window = settings.connection_window
        self._inbound: dict[int, _Inbound] = {}
        self._outbound: dict[int, _Outbound] = {}
        self._urgent: deque[_Outbound] = deque()
        self._bulk: deque[_Outbound] = deque()
        self._blocked: dict[int, _Outbound] = {}
        self._signals: dict[int, QuicStream] = {}  # STOP_SENDING or RESET_STREAM to send
        self._raised: dict[int, QuicStream] = {}  # MAX_STREAM_DATA to send
        self._ended: list[QuicStream] = []  # perhaps over in both directions
        self._consumed = 0
        self._handed_over = 0  # octets of connection credit that written data uses or will use
        self._heard = False  # an authentic packet, since the idle timer was set
        self._unanswered = 0  # ack-eliciting packets since the last ACK
        self._phase_start = 0  # first packet number under the present key
        self._known_aead: AEAD | None = None
        self._previous_aead: AEAD | None = None
        self.unacked = 0
        self.more_to_send = False
        self.packets_received = 0
        self.key_updates = 0

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self._crypto: CryptoPair = self._cryptos[_ONE_RTT]
        self._space: QuicPacketSpace = self._spaces[_ONE_RTT]

    # Receiving

    def receive(self, datagrams: Sequence[bytes], address: Address, now: float) -> None:
        """Take datagrams that came from one address."""
        self.packets_received += len(datagrams)
        fast = self._fast_context(address, now)
        for data in datagrams:
            if fast is None or not self._receive_short(data, fast):
                self.receive_datagram(data, address, now)
                self._note_keys()
                fast = self._fast_context(address, now)
        if self._heard and self._is_open():
            # Once a batch is enough for the idle timer.
            self._heard = False
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = False

    def _is_open(self) -> bool:
        return self._state is QuicConnectionState.CONNECTED and not self._close_pending

    def _fast_context(self, address: Address, now: float) -> QuicReceiveContext | None:
        """Return what frames are received in, or None while packets need the whole machinery."""
        if not (self._handshake_confirmed and self._is_open()):
            return None
        path = self._network_paths[0]
        if path.addr != address or not path.is_validated:
            return None
        return QuicReceiveContext(
            epoch=_ONE_RTT,
            host_cid=self.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=now,
            version=None,
        )

    def _receive_short(self, data: bytes, context: QuicReceiveContext) -> bool:
        """Receive one 1-RTT packet of the established path; False if it is another kind.

        What aioquic's receive_datagram does for such a packet, less the general cases and one
        copy of the packet (RFC 9001 Section 5.4).
        """
        if len(data) < 29 or data[0] & 0xC0 != 0x40 or data[1:9] != context.host_cid:
            return False
        if not self._is_open():
            return True  # an earlier packet of the batch has ended it
        recv: Any = self._crypto.recv
        mask = recv.hp._mask(data[13:29])
        first = data[0] ^ (mask[0] & 0x1F)
        if first & 0x18:
            return False
        octets = (first & 0x03) + 1
        start = 9 + octets
        truncated = int.from_bytes(data[9:start], "big") ^ int.from_bytes(
            mask[1 : 1 + octets], "big"
        )
        space = self._space
        number = decode_packet_number(truncated, octets * 8, space.expected_packet_number)
        header = bytes((first,)) + data[1:9] + truncated.to_bytes(octets, "big")
        aead = recv.aead
        if (first >> 2) & 1 != recv.key_phase:
            # Sent before the peer heard of our key update, or the peer's own update.
            aead = self._previous_aead
            if aead is None:
                return False
        try:
            plain = aead.decrypt(data[start:], header, number)
        except CryptoError:
            return aead is recv.aead  # dropped, unless another key may fit
        if number in space.received_packets:
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        try:
            is_ack_eliciting, _ = self._payload_received(context, plain)
        except QuicConnectionError as error:
            self.close(error.error_code, error.frame_type, error.reason_phrase)
        if not self._is_open():
            return True
        self._heard = True
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = context.time
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > 64:
            space.ack_queue.shift()
        if is_ack_eliciting:
            self._unanswered += 1
            if space.ack_at is None:
                space.ack_at = context.time + self._ack_delay
        return True

    def _payload_received(
        self, context: QuicReceiveContext, plain: bytes, crypto_frame_required: bool = False
    ) -> tuple[bool, bool]:
        """Handle leading STREAM and ACK frames here, the rest as aioquic does."""
        if context.epoch is not _ONE_RTT:
            return super()._payload_received(context, plain, crypto_frame_required)
        buf = Buffer(data=plain)
        end = len(plain)
        position = 0
        is_ack_eliciting = False
        try:
            while position < end:
                kind = plain[position]
                if 0x08 <= kind <= 0x0F:
                    buf.seek(position + 1)
                    is_ack_eliciting = True
                    handle = self._handle_stream_frame
                elif kind == 0x02:
                    buf.seek(position + 1)
                    handle = self._handle_ack_frame
                else:
                    break
                try:  # noqa: SIM105  # a context manager for each frame would cost
                    handle(context, kind, buf)
                except StreamFinishedError:
                    pass  # the stream is over and forgotten, as is this frame
                position = buf.tell()
        except BufferReadError:
            raise QuicConnectionError(
                QuicErrorCode.FRAME_ENCODING_ERROR, kind, "Failed to parse frame"
            ) from None
        if position == end:
            return is_ack_eliciting, False
        if not position:
            return super()._payload_received(context, plain, crypto_frame_required)
        rest_is_ack_eliciting, _ = super()._payload_received(context, plain[position:])
        return is_ack_eliciting or rest_is_ack_eliciting, False

    def _handle_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """Take a STREAM frame, without copying again what came in order."""
        stream_id = buf.pull_uint_var()
        offset = buf.pull_uint_var() if frame_type & 4 else 0
        length = buf.pull_uint_var() if frame_type & 2 else buf.capacity - buf.tell()
        data = buf.pull_bytes(length)
        fin = bool(frame_type & 1)
        end = offset + length
        inbound = self._inbound.get(stream_id)
        if inbound is None:
            self._assert_stream_can_receive(frame_type, stream_id)
            stream = self._get_or_create_stream(frame_type, stream_id)
            inbound = _Inbound(stream)
            if not stream.receiver.is_finished:
                self._inbound[stream_id] = inbound
        else:
            stream = inbound.stream
        if end > stream.max_stream_data_local:
            raise QuicConnectionError(
                QuicErrorCode.FLOW_CONTROL_ERROR, frame_type, "Over stream data limit"
            )
        receiver = stream.receiver
        fresh = max(0, end - receiver.highest_offset)
        if self._local_max_data.used + fresh > self._local_max_data.value:
            raise QuicConnectionError(
                QuicErrorCode.FLOW_CONTROL_ERROR, frame_type, "Over connection data limit"
            )
        self._local_max_data.used += fresh
        if (
            offset == receiver._buffer_start == receiver.highest_offset
            and receiver._final_size is None
        ):
            receiver._buffer_start = receiver.highest_offset = end
            if fin:
                receiver._final_size = end
                receiver.is_finished = True
        else:
            try:
                event = receiver.handle_frame(QuicStreamFrame(data, fin, offset))
            except FinalSizeError as error:
                raise QuicConnectionError(
                    QuicErrorCode.FINAL_SIZE_ERROR, frame_type, str(error)
                ) from None
            data, fin = (event.data, event.end_stream) if event is not None else (b"", False)
        if inbound.dropped:
            self._forgo(inbound)
            data = b""
        if data or fin:
            if inbound.pieces is None:
                inbound.pieces = []
                self._events.append(inbound)  # type: ignore[arg-type]  # told by _tell_data
            inbound.pieces.append(data)
            inbound.fin = fin
            if fin:
                self._ended.append(stream)
                self._forget_if_done(stream_id, inbound)

    def _handle_reset_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """Take a RESET_STREAM; its octets will never be consumed, so the windows move on."""
        stream_id = _peek_varint(buf)
        known = self._streams.get(stream_id)
        was_finished = known is not None and known.receiver.is_finished
        super()._handle_reset_stream_frame(context, frame_type, buf)
        stream = self._streams[stream_id]
        if not was_finished:
            inbound = self._inbound.pop(stream_id, None) or _Inbound(stream)
            self._forgo(inbound)
            self._ended.append(stream)

    def _handle_stop_sending_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """Take a STOP_SENDING, which aioquic answers with a reset."""
        stream_id = _peek_varint(buf)
        self._assert_stream_can_send(frame_type, stream_id)
        out = self._outbound_of(self._get_or_create_stream(frame_type, stream_id))
        super()._handle_stop_sending_frame(context, frame_type, buf)
        self._note_reset(out)

    def _handle_max_data_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        super()._handle_max_data_frame(context, frame_type, buf)
        self._retry_blocked()

    def _handle_max_stream_data_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        super()._handle_max_stream_data_frame(context, frame_type, buf)
        self._retry_blocked()

    def _unblock_streams(self, is_unidirectional: bool) -> None:
        super()._unblock_streams(is_unidirectional)
        self._retry_blocked()

    # Receive windows

    def consume(self, stream_id: int, octets: int) -> None:
        """Move the windows past octets the application is done with."""
        inbound = self._inbound.get(stream_id)
        if inbound is None:
            return
        receiver = inbound.stream.receiver
        octets = min(octets, receiver._buffer_start - inbound.consumed)
        if octets <= 0:
            return
        inbound.consumed += octets
        self._credit(octets)
        self._forget_if_done(stream_id, inbound)
        stream, window = inbound.stream, self._stream_window
        limit = inbound.consumed + window
        if receiver._final_size is None and limit - stream.max_stream_data_local >= window // 4:
            stream.max_stream_data_local = limit
            self._raised[stream_id] = stream

    def _credit(self, octets: int) -> None:
        self._consumed += octets
        limit, window = self._consumed + self._connection_window, self._connection_window
        if limit - self._local_max_data.value >= window // 4:
            self._local_max_data.value = limit

    def _forgo(self, inbound: _Inbound) -> None:
        """Give back the connection credit of all that a stream carried and nobody will consume."""
        octets = inbound.stream.receiver.highest_offset - inbound.consumed
        inbound.consumed += octets
        self._credit(octets)

    def _forget_if_done(self, stream_id: int, inbound: _Inbound) -> None:
        receiver = inbound.stream.receiver
        if receiver.is_finished and inbound.consumed >= receiver.highest_offset:
            self._inbound.pop(stream_id, None)

    def stop(self, stream_id: int, code: int) -> None:
        """Send STOP_SENDING, if there is still something to stop, and drop what comes."""
        inbound = self._inbound.get(stream_id)
        stream = self._streams.get(stream_id)
        if inbound is None and stream is not None and self._stream_can_receive(stream_id):
            inbound = _Inbound(stream)
            if not stream.receiver.is_finished:
                self._inbound[stream_id] = inbound
        if inbound is not None:
            inbound.dropped = True
            self._forgo(inbound)
            self._forget_if_done(stream_id, inbound)
            if not inbound.stream.receiver.is_finished:
                inbound.stream.receiver.stop(code)
                self._signals[stream_id] = inbound.stream

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        """Raise MAX_DATA and MAX_STREAMS if needed.

        aioquic 1.7.2 doubles MAX_DATA here when half of it has *arrived*; keeping ``used`` out of
        its sight leaves the value to :meth:`consume`.
        """
        limit = self._local_max_data
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        """Raise MAX_STREAM_DATA. aioquic 1.7.2 doubles it by what arrived; :meth:`consume` not."""
        buf = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            MAX_STREAM_DATA_FRAME_CAPACITY,
            self._on_max_stream_data_delivery,
            (stream,),
        )
        buf.push_uint_var(_id_of(stream))
        buf.push_uint_var(stream.max_stream_data_local)

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            self._raised[_id_of(stream)] = stream

    # Streams we send on

    def write(self, stream_id: int, data: bytes | memoryview, fin: bool) -> None:
        """Append to a stream; a no-op on one that is finished, reset or stopped."""
        out = self._outbound.get(stream_id)
        if out is None:
            if self._is_over(stream_id):
                return
            out = self._outbound_of(self._get_or_create_stream_for_send(stream_id))
        if not out.writable:
            return
        out.sender.write(data, end_stream=fin)
        octets = len(data)
        out.fin = fin
        out.unacked += octets + fin
        self.unacked += octets + fin
        self._handed_over += octets
        self._enqueue(out)

    def reset(self, stream_id: int, code: int) -> None:
        """Send RESET_STREAM in place of what has not been sent and acknowledged."""
        out = self._outbound.get(stream_id)
        if out is None:
            if self._is_over(stream_id):
                return
            # Also for a stream that was never opened: opening a later one would open it too, and
            # then it would stay open for ever.
            out = self._outbound_of(self._get_or_create_stream_for_send(stream_id))
        out.sender.reset(code)
        self._note_reset(out)

    def send_credit(self, stream_id: int) -> int:
        """Return what the limits of the stream and the connection leave."""
        credit = self._remote_max_data - self._handed_over
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.is_blocked:
                return 0
            credit = min(credit, stream.max_stream_data_remote - stream.sender._buffer_stop)
        elif stream_is_client_initiated(stream_id) != self._is_client:
            return 0
        elif stream_is_unidirectional(stream_id):
            if stream_id < self._local_next_stream_id_uni:
                return 0
            if stream_id // 4 >= self._remote_max_streams_uni:
                return 0
            credit = min(credit, self._remote_max_stream_data_uni)
        else:
            if stream_id < self._local_next_stream_id_bidi:
                return 0
            if stream_id // 4 >= self._remote_max_streams_bidi:
                return 0
            credit = min(credit, self._remote_max_stream_data_bidi_remote)
        return max(0, credit)

    def send_budget(self) -> int:
        """Return the free part of the congestion window, within flow control."""
        budget = self._loss.congestion_window - self.unacked
        if not self.unacked:
            budget = max(budget, IDLE_BUDGET)
        credit = self._remote_max_data - self._handed_over - CONTROL_RESERVE
        return max(0, min(budget, credit))

    def _is_over(self, stream_id: int) -> bool:
        return self._stream_can_send(stream_id) and self._stream_is_discarded(stream_id)

    def _outbound_of(self, stream: QuicStream) -> _Outbound:
        out = self._outbound.get(_id_of(stream))
        if out is None:
            out = _Outbound(stream)
            self._outbound[out.stream_id] = out
        return out

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        """Open a stream, and before it those with a lower ID that nobody has written to yet.

        aioquic 1.7.2 takes a stream that was passed over for one that is finished, although it
        may be written to later: streams leave here in the order of their priority.
        """
        if stream_is_client_initiated(stream_id) == self._is_client:
            following = (
                self._local_next_stream_id_uni
                if stream_is_unidirectional(stream_id)
                else self._local_next_stream_id_bidi
            )
            for passed_over in range(following, stream_id, 4):
                super()._get_or_create_stream_for_send(passed_over)
        return super()._get_or_create_stream_for_send(stream_id)

    def _note_reset(self, out: _Outbound) -> None:
        """Stop counting what a reset stream has not sent or got acknowledged."""
        if out.reset or out.sender.is_finished:
            return
        out.reset = True
        self.unacked -= out.unacked
        out.unacked = 0
        self._handed_over -= out.sender._buffer_stop - out.sender.highest_offset
        out.sender._buffer = bytearray()
        self._signals[out.stream_id] = out.stream

    def _enqueue(self, out: _Outbound, *, first: bool = False) -> None:
        if not out.queued:
            out.queued = True
            queue = self._urgent if out.urgent else self._bulk
            queue.appendleft(out) if first else queue.append(out)

    def _retry_blocked(self) -> None:
        blocked, self._blocked = self._blocked, {}
        for out in blocked.values():
            self._enqueue(out)

    def _next_frame(
        self, queue: deque[_Outbound], room: int
    ) -> tuple[bytes, bytearray, tuple[_Outbound, int, int, bool]] | None:
        """Take the next STREAM frame from ``queue`` that fits into ``room`` octets.

        Returns:
            Its header, its data, and what :meth:`_on_frame_delivery` wants to know of it; None
            when nothing can be sent or does not fit.
        """
        while queue:
            out = queue[0]
            sender = out.sender
            overhead = 3 + len(out.id_octets) + _varint_size(sender.next_offset)
            if room < overhead + 1:
                return None
            before = sender.highest_offset
            taken = None
            if not sender.buffer_is_empty and not out.stream.is_blocked:
                taken = sender.take(
                    room - overhead,
                    min(
                        before + self._remote_max_data - self._remote_max_data_used,
                        out.stream.max_stream_data_remote,
                    ),
                )
            if taken is None:
                queue.popleft()
                out.queued = False
                if not sender.buffer_is_empty:
                    self._blocked[out.stream_id] = out
                continue
            self._remote_max_data_used += sender.highest_offset - before
            start, stop, data, fin = taken
            header = (
                (b"\x0f" if fin else b"\x0e")
                + out.id_octets
                + _varint(start)
                + (stop - start | 0x4000).to_bytes(2, "big")
            )
            return header, data, (out, start, stop, fin)
        return None

    def _on_frame_delivery(
        self, delivery: QuicDeliveryState, out: _Outbound, start: int, stop: int, fin: bool
    ) -> None:
        """Note that a STREAM frame was acknowledged or lost."""
        if out.reset:
            return
        out.sender.on_data_delivery(delivery, start, stop, fin)
        if delivery is QuicDeliveryState.ACKED:
            octets = stop - start + fin
            out.unacked -= octets
            self.unacked -= octets
            if out.sender.is_finished:
                self._ended.append(out.stream)
        else:
            self._enqueue(out, first=True)

    def _on_reset_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        stream.sender.on_reset_delivery(delivery)
        if delivery is QuicDeliveryState.ACKED:
            self._ended.append(stream)
        else:
            self._signals[_id_of(stream)] = stream

    def _on_stop_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            stream.receiver.stop_pending = True
            self._signals[_id_of(stream)] = stream

    def _discard_ended(self) -> None:
        """Forget streams that are over in both directions, and let the peer open others."""
        for stream in self._ended:
            stream_id = _id_of(stream)
            if stream.is_finished and self._streams.pop(stream_id, None) is not None:
                self._outbound.pop(stream_id, None)
                self._blocked.pop(stream_id, None)
                self._signals.pop(stream_id, None)
                self._raised.pop(stream_id, None)
                if stream_is_client_initiated(stream_id) != self._is_client:
                    self._stream_limit(stream_id).value += 1
        self._ended.clear()
        # aioquic's own order of service; streams are served from our queues.
        self._streams_queue.clear()

    # Filling packets

    def _write_application(
        self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float
    ) -> None:
        """Fill 1-RTT packets: what keeps the connection going, urgent streams, then data.

        Takes the place of aioquic 1.7.2's loop, which visits every stream for every packet,
        serves streams in the order of a set, and sends all the window allows in one go.
        """
        self.more_to_send = False
        crypto, space, pacer = self._crypto, self._space, self._loss._pacer
        if not crypto.send.is_valid():
            return
        self._discard_ended()
        self._update_keys_if_due()
        if space.ack_at is not None and (self._unanswered > 1 or self._urgent or self._bulk):
            space.ack_at = min(space.ack_at, now)
        data_only = self._handshake_confirmed and network_path.is_validated
        while True:
            if space.ack_at is None or space.ack_at > now:
                self._pacing_at = pacer.next_send_time(now)
                if self._pacing_at is not None:
                    return
            builder.start_packet(QuicPacketType.ONE_RTT, crypto)
            full = False
            try:
                self._write_frames(builder, network_path, space, now)
            except QuicPacketBuilderStop:
                full = True
            if builder.packet_is_empty:
                break
            pacer.update_after_send(now)
            if not (full or self._urgent) and (data_only or not self._bulk):
                break
        if data_only and self._bulk:
            self._write_data_packets(builder, now)

    def _write_frames(
        self,
        builder: QuicPacketBuilder,
        path: QuicNetworkPath,
        space: QuicPacketSpace,
        now: float,
    ) -> None:
        """Write what waits into the current packet, in the order of its importance.

        Raises:
            QuicPacketBuilderStop: If something did not fit, or must wait for the window.
        """
        if space.ack_at is not None and space.ack_at <= now:
            self._write_ack_frame(builder, space, now)
            self._unanswered = 0
        if self._handshake_complete:
            self._write_connection_frames(builder, path, space, now)
        while self._raised:
            stream_id, stream = next(iter(self._raised.items()))
            self._write_stream_limits(builder, space, stream)
            del self._raised[stream_id]
        if self._ping_pending:
            self._write_ping_frame(builder, self._ping_pending)
            self._ping_pending.clear()
        if self._probe_pending:
            self._write_ping_frame(builder, comment="probe")
            self._probe_pending = False
        crypto_stream = self._crypto_streams[_ONE_RTT]
        if not crypto_stream.sender.buffer_is_empty:
            self._write_crypto_frame(builder, space, crypto_stream)
        self._write_signals(builder)
        self._write_stream_frames(builder, self._urgent)
        while self._datagrams_pending:
            data = self._datagrams_pending[0]
            self._write_datagram_frame(builder, data, QuicFrameType.DATAGRAM_WITH_LENGTH)
            self._datagrams_pending.popleft()
        if builder.remaining_flight_space >= builder.remaining_buffer_space:
            # Data fill whole packets: the rest of a window is not worth a packet of its own.
            self._write_stream_frames(builder, self._bulk)

    def _write_connection_frames(
        self,
        builder: QuicPacketBuilder,
        path: QuicNetworkPath,
        space: QuicPacketSpace,
        now: float,
    ) -> None:
        """Write the frames about the connection itself, as aioquic does and in its order."""
        if not (path.is_validated or path.local_challenge_sent):
            self._write_path_challenge_frame(builder, path)
            if path.validation_deadline is None:  # RFC 9000 Section 8.2.4
                path.validation_deadline = now + 3 * max(
                    self._loss.get_probe_timeout(), 2 * self._configuration.initial_rtt
                )
        if self._handshake_done_pending:
            self._write_handshake_done_frame(builder)
            self._handshake_done_pending = False
        while path.remote_challenges:
            self._write_path_response_frame(builder, path.remote_challenges[0])
            path.remote_challenges.popleft()
        for connection_id in self._host_cids:
            if not connection_id.was_sent:
                self._write_new_connection_id_frame(builder, connection_id)
        while self._retire_connection_ids:
            self._write_retire_connection_id_frame(builder, self._retire_connection_ids[0])
            self._retire_connection_ids.pop(0)
        if self._streams_blocked_pending:
            if self._streams_blocked_bidi:
                self._write_streams_blocked_frame(
                    builder, QuicFrameType.STREAMS_BLOCKED_BIDI, self._remote_max_streams_bidi
                )
            if self._streams_blocked_uni:
                self._write_streams_blocked_frame(
                    builder, QuicFrameType.STREAMS_BLOCKED_UNI, self._remote_max_streams_uni
                )
            self._streams_blocked_pending = False
        self._write_connection_limits(builder, space)

    def _write_signals(self, builder: QuicPacketBuilder) -> None:
        """Write STOP_SENDING and RESET_STREAM."""
        for stream_id, stream in list(self._signals.items()):
            receiver, sender = stream.receiver, stream.sender
            if receiver.stop_pending and not receiver.is_finished:
                buf = builder.start_frame(
                    QuicFrameType.STOP_SENDING,
                    STOP_SENDING_FRAME_CAPACITY,
                    self._on_stop_delivery,
                    (stream,),
                )
                stop = receiver.get_stop_frame()
                buf.push_uint_var(stop.stream_id)
                buf.push_uint_var(stop.error_code)
            if stream.is_blocked:
                continue  # the peer does not allow the stream yet, so not even its reset
            if sender.reset_pending:
                buf = builder.start_frame(
                    QuicFrameType.RESET_STREAM,
                    RESET_STREAM_FRAME_CAPACITY,
                    self._on_reset_delivery,
                    (stream,),
                )
                reset = sender.get_reset_frame()
                buf.push_uint_var(reset.stream_id)
                buf.push_uint_var(reset.error_code)
                buf.push_uint_var(reset.final_size)
            del self._signals[stream_id]

    def _write_stream_frames(self, builder: QuicPacketBuilder, queue: deque[_Outbound]) -> None:
        """Write STREAM frames into the current packet until it is full."""
        while queue:
            frame = self._next_frame(queue, builder.remaining_flight_space)
            if frame is None:
                return
            header, data, delivery = frame
            buf = builder.start_frame(header[0], len(header), self._on_frame_delivery, delivery)
            buf.push_bytes(header[1:])
            buf.push_bytes(bytes(data))

    def _write_data_packets(self, builder: QuicPacketBuilder, now: float) -> None:
        """Fill whole packets with stream data, one burst of them.

        What QuicPacketBuilder does for such packets, without its general cases. All but the last
        have the same size, so that one system call can send them.
        """
        if builder._packet is not None:
            builder._end_packet()
        crypto, pacer, octets = self._crypto, self._loss._pacer, self._max_datagram_size
        send: Any = crypto.send
        aead, mask_of = send.aead, send.hp._mask
        peer_cid = self._peer_cid.cid
        plain_first = 0x40 | self._spin_bit << 5 | send.key_phase << 2 | 1
        first_octet, room = bytes((plain_first,)), octets - 3 - len(peer_cid) - _AEAD_TAG
        number, queue = builder._packet_number, self._bulk
        window: Any = builder.max_flight_bytes
        burst = min(window - builder._flight_bytes, BURST_OCTETS)
        while burst >= octets and queue:
            self._pacing_at = pacer.next_send_time(now)
            if self._pacing_at is not None:
                break
            pieces: list[bytes | bytearray] = []
            handlers: list[tuple[Callable[..., None], Any]] = []
            left = room
            while left > 32 and (frame := self._next_frame(queue, left)) is not None:
                pieces += frame[:2]
                handlers.append((self._on_frame_delivery, frame[2]))
                left -= len(frame[0]) + len(frame[1])
            if not pieces:
                break
            if queue or left > room - 4:
                pieces.append(bytes(left))  # PADDING
            number_octets = (number & 0xFFFF).to_bytes(2, "big")
            protected = aead.encrypt(
                b"".join(pieces), first_octet + peer_cid + number_octets, number
            )
            mask = mask_of(protected[2:18])
            datagram = b"".join(
                (
                    bytes((plain_first ^ mask[0] & 0x1F,)),
                    peer_cid,
                    bytes((number_octets[0] ^ mask[1], number_octets[1] ^ mask[2])),
                    protected,
                )
            )
            size = len(datagram)
            builder._datagrams.append(datagram)
            builder._packets.append(
                QuicSentPacket(
                    epoch=_ONE_RTT,
                    in_flight=True,
                    is_ack_eliciting=True,
                    is_crypto_packet=False,
                    packet_number=number,
                    packet_type=QuicPacketType.ONE_RTT,
                    sent_bytes=size,
                    delivery_handlers=handlers,
                )
            )
            builder._flight_bytes += size
            number += 1
            burst -= size
            pacer.update_after_send(now)
        builder._packet_number = number
        self.more_to_send = (
            bool(queue) and self._pacing_at is None and window - builder._flight_bytes >= octets
        )

    # Keys

    def _update_keys_if_due(self) -> None:
        """Change the keys after so many packets; aioquic 1.7.2 never does by itself."""
        sent = self._packet_number - self._phase_start
        if (
            sent >= self._key_update_packets
            and self._handshake_confirmed
            # An update must not follow another before that was acknowledged (RFC 9001 6.1).
            and self._space.largest_acked_packet >= self._phase_start
        ):
            self._crypto._update_key("local_update")
            self._note_keys()

    def _note_keys(self) -> None:
        """Notice that keys changed, and keep the last ones for packets that were under way.

        aioquic 1.7.2 forgets them at once, and so loses what the peer sent within the last round
        trip (RFC 9001 Section 6.5).
        """
        if not self._handshake_confirmed:
            return
        aead = self._crypto.recv.aead
        if aead is not self._known_aead:
            if self._known_aead is not None:
                self._previous_aead = self._known_aead
                self._phase_start = self._packet_number
                self.key_updates += 1
            self._known_aead = aead


def _id_of(stream: QuicStream) -> int:
    stream_id: Any = stream.stream_id  # None only for what carries the handshake
    return int(stream_id)


def _varint(value: int) -> bytes:
    """Encode a QUIC integer (RFC 9000 Section 16; MOQT's is another)."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


def _varint_size(value: int) -> int:
    if value < 0x4000:
        return 1 if value < 0x40 else 2
    return 4 if value < 0x40000000 else 8


def _peek_varint(buf: Buffer) -> int:
    position = buf.tell()
    value = buf.pull_uint_var()
    buf.seek(position)
    return value


# --------------------------------------------------------------------------------------------
# The transport
# --------------------------------------------------------------------------------------------


class AioquicTransport:
    """A :class:`~moqt.aio.transport.QuicTransport` over aioquic; see there for most methods.

    Made by :func:`dial` and by a :class:`Listener`. The receiver is made when the handshake is
    complete, so a connection that fails before has none.
    """

    def __init__(
        self,
        connection: _Connection,
        endpoint: UdpEndpoint,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
        *,
        remote: Address | None,
    ) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._settings = settings
        self._receiver_factory = receiver_factory
        self._remote = remote  # the only address of a client's peer; None for a server
        self._loop = asyncio.get_running_loop()
        self._receiver: QuicReceiver | None = None
        self._alpn: str | None = None
        self._closing = False  # nothing more is accepted
        self._failed = False  # the receiver raised
        self._lost: ConnectionLost | None = None
        self._farewell: list[tuple[bytes, Address]] = []  # the CONNECTION_CLOSE, to repeat
        self._late_batches = 0
        self._close_after: tuple[int, str, float] | None = None  # code, reason, drain deadline
        self._turn: asyncio.Handle | None = None
        self._in_turn = False
        self._flush_wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._last_heard = self._last_ping = now = time.monotonic()
        self._handshake_deadline: float | None = now + HANDSHAKE_LIMIT_S
        self._over = asyncio.Event()
        self.on_connected: Callable[[], None] = lambda: None
        """Called after the receiver's ``connected``; for the one who made this transport."""
        self.on_lost: Callable[[ConnectionLost], None] = lambda lost: None
        """Called after the receiver's ``connection_lost``, and if there is no receiver."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when no more packets of this connection are expected."""
        self.on_connection_id: Callable[[bytes, bool], None] = lambda octets, issued: None
        """Called when the peer may use a connection ID from now on (or no longer)."""

    @property
    def alpn(self) -> str | None:
        """The protocol that was negotiated, once connected."""
        return self._alpn

    @property
    def peer_address(self) -> tuple[str, int]:
        """Address and UDP port of the peer."""
        address = self._connection.get_peer_address() or self._remote or ("", 0)
        return address[0], address[1]

    @property
    def peer_accepts_datagrams(self) -> bool:
        """Whether the DATAGRAM extension was negotiated."""
        return bool(self._connection._remote_max_datagram_frame_size)

    def send_stream_data(self, stream_id: int, data: bytes | memoryview, fin: bool = False) -> None:
        """Append to a stream, opening it if this is its first data. Copies ``data``.

        Raises:
            ValueError: If the stream is not ours to write: a mistake of the caller.
        """
        if not self._closing:
            self._connection.write(stream_id, data, fin)
            self._take_turn()

    def reset_stream(self, stream_id: int, code: int) -> None:
        """Give up on a stream we were sending."""
        if not self._closing:
            self._connection.reset(stream_id, code)
            self._take_turn()

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to give up on a stream; what still arrives is dropped and credited."""
        if not self._closing:
            self._connection.stop(stream_id, code)
            self._take_turn()

    def send_datagram(self, data: bytes) -> bool:
        """Send a QUIC DATAGRAM; False, and nothing queued, if it is too large or many wait."""
        connection = self._connection
        accepted = min(
            connection._remote_max_datagram_frame_size or 0,
            # A short header, two octets of packet number, and the tag of the AEAD.
            connection._max_datagram_size - 3 - len(connection._peer_cid.cid) - _AEAD_TAG,
        )
        if self._closing or 1 + _varint_size(len(data)) + len(data) > accepted:
            return False
        if len(connection._datagrams_pending) >= DATAGRAM_BACKLOG:
            return False
        connection.send_datagram_frame(data)
        self._take_turn()
        return True

    def wake(self) -> None:
        """Have ``flush`` called soon, once, however often this was called before."""
        self._flush_wanted = True
        self._take_turn()

    def send_budget(self) -> int:
        """Octets worth handing over now."""
        return 0 if self._closing else self._connection.send_budget()

    def stream_credit(self, stream_id: int) -> int:
        """Octets that flow control lets us add to a stream now."""
        return 0 if self._closing else self._connection.send_credit(stream_id)

    def consumed(self, stream_id: int, octets: int) -> None:
        """The application is done with received octets: the receive windows may move on."""
        connection = self._connection
        before = connection._local_max_data.value
        connection.consume(stream_id, octets)
        if connection._raised or connection._local_max_data.value != before:
            self._take_turn()

    def close(self, code: int, reason: str, *, drain_s: float = 0.0) -> None:
        """Close, once everything written has been acknowledged or ``drain_s`` has passed."""
        if not self._closing:
            self._closing = True
            self._close_after = (code, reason, time.monotonic() + drain_s)
            self._take_turn()

    def abandon(self) -> None:
        """Forget the connection at once, telling the peer nothing (tests, crashes)."""
        if self._over.is_set():
            return
        self._closing = True
        self._end()
        lost = ConnectionLost(0, "abandoned", application=False, by_peer=False)
        self._loop.call_soon(self._report_lost, lost)

    def stats(self) -> TransportStats:
        """Return the figures of the moment."""
        connection, recovery = self._connection, self._connection._loss
        return TransportStats(
            smoothed_rtt_s=recovery._rtt_smoothed,
            congestion_window=recovery.congestion_window,
            octets_in_flight=recovery.bytes_in_flight,
            packets_sent=connection._packet_number,
            packets_received=connection.packets_received,
            packets_lost=recovery.lost,
            key_updates=connection.key_updates,
        )

    async def wait_closed(self) -> None:
        """Return when the connection is over and its closing period has passed."""
        await self._over.wait()

    # For the owner of the endpoint

    def start(self, address: Address) -> None:
        """Begin the handshake of a client."""
        self._handshake_deadline = None  # dial() has its own
        self._connection.connect(address, time.monotonic())
        self._take_turn()

    def feed(self, datagrams: Sequence[bytes], address: Address) -> None:
        """Take datagrams; :meth:`answer` must follow at the end of the batch."""
        if self._farewell:
            # RFC 9000 Section 10.2.1: repeat it, ever more rarely, to who has not heard it.
            self._late_batches += 1
            if self._late_batches & (self._late_batches - 1) == 0:
                self._send(self._farewell)
            return
        self._last_heard = now = time.monotonic()
        try:
            self._connection.receive(datagrams, address, now)
        except Exception:  # a packet must not take down the other connections of the endpoint
            log.exception("QUIC engine failed on a packet")
            self._connection.close(QuicErrorCode.INTERNAL_ERROR, QuicFrameType.PADDING)

    def answer(self) -> None:
        """Tell the receiver what arrived, let it write, and send."""
        self._flush_wanted = True
        self._run()

    # One turn of the event loop

    def _take_turn(self) -> None:
        if self._turn is None and not self._in_turn and not self._over.is_set():
            self._turn = self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Tell what happened, let the receiver write, transmit, and set the timer."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._over.is_set():
            return
        self._in_turn = True
        try:
            self._tell_events()
            if self._flush_wanted:
                self._flush_wanted = False
                if self._receiver is not None:
                    self._call(self._receiver.flush)
            more = not self._over.is_set() and self._transmit()
            self._look_for_end()
        finally:
            self._in_turn = False
        if not self._over.is_set():
            if more or self._flush_wanted or self._connection._events:
                self._take_turn()
            self._set_timer()

    def _tell_events(self) -> None:
        queue = self._connection._events
        while queue and not self._over.is_set():
            event: Any = queue.popleft()
            tell = _TELL.get(type(event))
            if tell is not None:
                tell(self, event)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call the receiver. It must not raise; if it does, it cannot be trusted to go on."""
        if self._lost is not None or self._failed or self._over.is_set():
            return
        try:
            method(*arguments)
        except Exception:
            log.exception("receiver failed, closing the connection", peer=self.peer_address)
            self._fail()

    def _fail(self) -> None:
        self._failed = self._closing = True
        self._close_after = None
        self._connection.close(INTERNAL_ERROR, None, "internal error")

    def _tell_data(self, inbound: _Inbound) -> None:
        pieces, inbound.pieces = inbound.pieces or [], None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if inbound.dropped:
            data = b""
        if self._receiver is not None and (data or inbound.fin):
            self._call(
                self._receiver.stream_data_received, inbound.stream.stream_id, data, inbound.fin
            )

    def _tell_connected(self, event: events.HandshakeCompleted) -> None:
        self._alpn = event.alpn_protocol
        self._handshake_deadline = None
        try:
            self._receiver = self._receiver_factory(self)
        except Exception:
            log.exception("no receiver for a connection, closing it", peer=self.peer_address)
            self._fail()
            return
        self._call(self._receiver.connected)
        self.on_connected()

    def _tell_reset(self, event: events.StreamReset) -> None:
        if self._receiver is not None:
            self._call(self._receiver.stream_reset_received, event.stream_id, event.error_code)

    def _tell_stopped(self, event: events.StopSendingReceived) -> None:
        if self._receiver is not None:
            self._call(self._receiver.stop_sending_received, event.stream_id, event.error_code)

    def _tell_datagram(self, event: events.DatagramFrameReceived) -> None:
        if self._receiver is not None:
            self._call(self._receiver.datagram_received, event.data)

    def _tell_id_issued(self, event: events.ConnectionIdIssued) -> None:
        self.on_connection_id(event.connection_id, True)

    def _tell_id_retired(self, event: events.ConnectionIdRetired) -> None:
        self.on_connection_id(event.connection_id, False)

    def _transmit(self) -> bool:
        """Send what may be sent, some bursts of it; return whether there is more."""
        connection = self._connection
        now = time.monotonic()
        if self._close_after is not None:
            code, reason, deadline = self._close_after
            drained = not connection.unacked and not connection._datagrams_pending
            if drained or now >= deadline:
                self._close_after = None
                connection.close(code, None, _short(reason))
        for _ in range(BURSTS_PER_TURN):
            is_farewell = connection._close_pending
            try:
                datagrams = connection.datagrams_to_send(now)
            except Exception:
                self._engine_failed()
                return False
            if not datagrams:
                return False
            self._send(datagrams)
            if is_farewell:
                self._farewell = datagrams
            if not connection.more_to_send:
                return False
            now = time.monotonic()
        return True

    def _send(self, datagrams: list[tuple[bytes, Address]]) -> None:
        if self._remote is not None:
            here = [data for data, address in datagrams if address == self._remote]
            self._endpoint.send(here, None)
        else:
            for address, group in groupby(datagrams, itemgetter(1)):
                self._endpoint.send([data for data, _ in group], address)

    def _look_for_end(self) -> None:
        connection = self._connection
        event, state = connection._close_event, connection._state
        if event is None or state not in END_STATES or self._over.is_set():
            return
        # Not after the closing period, in which only stray packets may come.
        self._report_lost(_lost_of(event, state, connection._idle_timeout()))
        if state is QuicConnectionState.TERMINATED:
            self._end()

    def _report_lost(self, lost: ConnectionLost) -> None:
        if self._lost is not None:
            return
        self._lost = lost
        self._closing = True
        if self._receiver is not None:
            try:
                self._receiver.connection_lost(lost)
            except Exception:
                log.exception("receiver failed on the end of its connection")
        self.on_lost(lost)

    def _engine_failed(self) -> None:
        log.exception("QUIC engine failed, connection dropped", peer=self.peer_address)
        self._end()
        self._report_lost(
            ConnectionLost(
                QuicErrorCode.INTERNAL_ERROR, "QUIC engine failed", application=False, by_peer=False
            )
        )

    def _end(self) -> None:
        if self._over.is_set():
            return
        self._closing = True
        self._over.set()
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None
        self.on_over()

    # Time

    def _set_timer(self) -> None:
        """Arm one timer for whatever comes first.

        A timer that is early does no harm, and moving it with every batch would cost more than
        the few that find nothing to do.
        """
        deadlines = [self._connection.get_timer(), self._handshake_deadline]
        if self._close_after is not None:
            deadlines.append(self._close_after[2])
        if self._keeps_alive:
            deadlines.append(self._keepalive_at)
        deadline = min((d for d in deadlines if d is not None), default=None)
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        # A delay and not a time, since the loop's clock may be another; and not below what a
        # uvloop timer can tell from nothing, lest it fires early again and again.
        delay = max(0.001, deadline - time.monotonic())
        self._timer = self._loop.call_later(delay, self._timer_fired)

    @property
    def _keeps_alive(self) -> bool:
        return self._settings.keepalive and self._receiver is not None and self._lost is None

    @property
    def _keepalive_at(self) -> float:
        return max(self._last_heard, self._last_ping) + self._connection._idle_timeout() / 3

    def _timer_fired(self) -> None:
        self._timer = None
        now = time.monotonic()
        if self._handshake_deadline is not None and now >= self._handshake_deadline:
            self._end()
            self._report_lost(
                ConnectionLost(0, "handshake took too long", application=False, by_peer=False)
            )
            return
        due = self._connection.get_timer()
        if due is not None and now >= due:
            try:
                self._connection.handle_timer(now)
            except Exception:
                self._engine_failed()
                return
        if self._keeps_alive and now >= self._keepalive_at:
            self._last_ping = now
            self._connection.send_ping(0)
        self._run()


#: What becomes of each kind of event; the kinds that are missing concern nobody here.
_TELL: dict[type, Callable[[AioquicTransport, Any], None]] = {
    _Inbound: AioquicTransport._tell_data,
    events.HandshakeCompleted: AioquicTransport._tell_connected,
    events.StreamReset: AioquicTransport._tell_reset,
    events.StopSendingReceived: AioquicTransport._tell_stopped,
    events.DatagramFrameReceived: AioquicTransport._tell_datagram,
    events.ConnectionIdIssued: AioquicTransport._tell_id_issued,
    events.ConnectionIdRetired: AioquicTransport._tell_id_retired,
}


def _lost_of(
    event: events.ConnectionTerminated, state: QuicConnectionState, idle_timeout_s: float
) -> ConnectionLost:
    """Say in our words why a connection is over.

    aioquic 1.7.2 calls an idle timeout INTERNAL_ERROR, which is also an application's code.
    """
    if state is QuicConnectionState.TERMINATED and event.reason_phrase == "Idle timeout":
        reason = f"idle timeout: nothing was received for {idle_timeout_s:.1f} s"
        return ConnectionLost(QuicErrorCode.NO_ERROR, reason, application=False, by_peer=False)
    return ConnectionLost(
        event.error_code,
        event.reason_phrase,
        application=event.frame_type is None,
        by_peer=state is QuicConnectionState.DRAINING,
    )


def _short(reason: str) -> str:
    """Cut a reason so that it fits into the one packet that carries it."""
    return reason.encode()[:500].decode(errors="ignore")


# --------------------------------------------------------------------------------------------
# Dialling and listening
# --------------------------------------------------------------------------------------------


async def dial(
    host: str,
    port: int,
    settings: QuicSettings,
    tls: ClientTls,
    receiver_factory: ReceiverFactory,
    *,
    alpn: Sequence[str],
    timeout_s: float,
) -> AioquicTransport:
    """Connect to a server and complete the handshake.

    Args:
        host: Name or address; every address of a name is tried in turn.
        port: UDP port.
        settings: Limits of the connection.
        tls: Whom to believe.
        receiver_factory: Makes the receiver, when the handshake is complete; its ``connected``
            has been called when this returns.
        alpn: Protocols to offer, the preferred one first.
        timeout_s: For all of it.

    Raises:
        TlsSettingsError: If a file of ``tls`` cannot be used.
        AlpnMismatchError: If the server speaks none of ``alpn``.
        TlsAlertError: If the handshake failed otherwise, as for a certificate not believed.
        DialError: If the host is not known or not reachable, or refused the connection.
        TimeoutError: If nobody answered in time.
    """
    configuration = client_configuration(tls, alpn, host)
    _apply(settings, configuration)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except TimeoutError:
        raise TimeoutError(f"no address for {host!r} within {timeout_s} s") from None
    except (OSError, UnicodeError) as error:
        raise DialError(f"no address for {host!r}: {error}") from error
    failure: OSError = DialError(f"no address for {host!r}")
    for index, (family, _, _, _, address) in enumerate(found):
        share = (deadline - loop.time()) / (len(found) - index)
        attempt = _Attempt(_spell(address))
        try:
            return await attempt.run(
                family, address, settings, configuration, receiver_factory, share
            )
        except TlsAlertError:
            raise  # somebody answered: another address is no better
        except OSError as error:
            failure = error
    raise failure


class _Attempt:
    """One address being dialled, and afterwards the socket of that connection."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: Address = ()
        self._transport: AioquicTransport | None = None

    async def run(
        self,
        family: int,
        address: Address,
        settings: QuicSettings,
        configuration: QuicConfiguration,
        receiver_factory: ReceiverFactory,
        timeout_s: float,
    ) -> AioquicTransport:
        try:
            sock = connected_socket(family, address)
        except OSError as error:
            raise DialError(f"cannot reach {self._where}: {error.strerror}") from error
        endpoint = UdpEndpoint(sock, self)
        connection = _Connection(settings, configuration=configuration)
        transport = AioquicTransport(
            connection, endpoint, settings, receiver_factory, remote=address
        )
        self._transport, self._remote = transport, address
        transport.on_connected = self._connected
        transport.on_lost = self._lost
        transport.on_over = endpoint.close
        transport.start(address)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except BaseException as error:
            transport.abandon()
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"no answer from {self._where} within {timeout_s:.1f} s"
                ) from None
            raise
        return transport

    def datagrams_received(self, datagrams: list[bytes], address: Address) -> None:
        # The socket is connected, so no other address can be in ``address``.
        if self._transport is not None:
            self._transport.feed(datagrams, self._remote)

    def batch_received(self) -> None:
        if self._transport is not None:
            self._transport.answer()

    def error_received(self, error: OSError) -> None:
        if isinstance(error, ConnectionRefusedError):
            self._give_up(DialError(f"nobody listens on {self._where}"))

    def _connected(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _lost(self, lost: ConnectionLost) -> None:
        self._give_up(_dial_error(self._where, lost))

    def _give_up(self, error: OSError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)


def _dial_error(where: str, lost: ConnectionLost) -> DialError:
    alert = lost.code - QuicErrorCode.CRYPTO_ERROR
    if lost.application or not 0 <= alert < 256:
        with contextlib.suppress(ValueError):
            name = QuicErrorCode(lost.code).name
            return DialError(f"{where} ended the handshake with {name}: {lost.reason or '-'}")
        return DialError(f"{where} ended the handshake with code {lost.code}: {lost.reason or '-'}")
    who = where if lost.by_peer else "this end"
    try:
        name = aioquic_tls.AlertDescription(alert).name
    except ValueError:
        name = str(alert)
    if name == "no_application_protocol":
        return AlpnMismatchError(f"{where} speaks none of the protocols offered", name)
    return TlsAlertError(
        f"TLS with {where} failed, {who} sent the alert {name}: {lost.reason or '-'}", name
    )


async def listen(
    host: str,
    port: int,
    settings: QuicSettings,
    tls: ServerTls,
    receiver_factory: ReceiverFactory,
    *,
    alpn: Sequence[str],
) -> "Listener":
    """Accept connections on a UDP port.

    Args:
        host: Name or address to bind; the first address of a name is taken.
        port: UDP port, 0 for any that is free.
        settings: Limits of each connection, and how many there may be.
        tls: The certificate to show.
        receiver_factory: Makes the receiver of each connection whose handshake is complete.
        alpn: Protocols accepted, the preferred one first.

    Raises:
        TlsSettingsError: If a file of ``tls`` cannot be used.
        OSError: If the address is not known or cannot be bound; the message names it.
    """
    configuration = server_configuration(tls, alpn)
    _apply(settings, configuration)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = bound_socket(family, address)
    except OSError as error:
        where = _spell((host, port))
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error
    return Listener(sock, settings, configuration, receiver_factory)


class Listener:
    """Many connections on one UDP socket, told apart by connection ID. Made by :func:`listen`."""

    def __init__(
        self,
        sock: socket.socket,
        settings: QuicSettings,
        configuration: QuicConfiguration,
        receiver_factory: ReceiverFactory,
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._receiver_factory = receiver_factory
        self._retry = QuicRetryTokenHandler() if settings.retry else None
        self._routes: dict[bytes, AioquicTransport] = {}
        self._transports: dict[AioquicTransport, set[bytes]] = {}
        self._touched: dict[AioquicTransport, None] = {}
        self._accepting = True
        self._closed = asyncio.Event()
        self._endpoint = UdpEndpoint(sock, self)
        self._address = self._endpoint.address

    @property
    def address(self) -> tuple[str, int]:
        """Address and UDP port that are listened on."""
        return self._address[0], self._address[1]

    @property
    def transports(self) -> tuple[AioquicTransport, ...]:
        """The connections of the moment, those in their handshake or closing included."""
        return tuple(self._transports)

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; those there are go on."""
        self._accepting = False

    def close(self) -> None:
        """Close what connections there are, with code 0, and then the socket."""
        self._accepting = False
        for transport in tuple(self._transports):
            transport.close(0, "listener closed")
        # After the turn in which the connections say so.
        asyncio.get_running_loop().call_soon(self._close_socket)

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
        await self._closed.wait()

    def _close_socket(self) -> None:
        for transport in tuple(self._transports):
            transport.abandon()
        self._endpoint.close()
        self._closed.set()

    def datagrams_received(self, datagrams: list[bytes], address: Address) -> None:
        """Hand each datagram to its connection (called by the endpoint)."""
        run: list[bytes] = []
        previous: AioquicTransport | None = None
        for data in datagrams:
            transport = self._route(data, address)
            if transport is None:
                continue
            if transport is not previous and previous is not None:
                previous.feed(run, address)
                run = []
            previous = transport
            self._touched[transport] = None
            run.append(data)
        if previous is not None:
            previous.feed(run, address)

    def batch_received(self) -> None:
        """Let each connection that was touched answer, once (called by the endpoint)."""
        touched, self._touched = self._touched, {}
        for transport in touched:
            transport.answer()

    def error_received(self, error: OSError) -> None:
        """Errors of one peer are no concern of the others (called by the endpoint)."""

    def _route(self, data: bytes, address: Address) -> AioquicTransport | None:
        if not data:
            return None
        if not data[0] & 0x80:
            return self._routes.get(data[1 : 1 + _CONNECTION_ID])
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_CONNECTION_ID)
        except ValueError:
            return None
        if header.version not in self._configuration.supported_versions:
            # Never answer a Version Negotiation packet with another, and nothing that is
            # smaller than the answer could be (RFC 9000 Section 6.1).
            if header.packet_type is not QuicPacketType.VERSION_NEGOTIATION and len(data) >= 1200:
                answer = encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=self._configuration.supported_versions,
                )
                self._endpoint.send([answer], address)
            return None
        transport = self._routes.get(header.destination_cid)
        if transport is not None:
            return transport
        if header.packet_type is not QuicPacketType.INITIAL or len(data) < 1200:
            return None
        return self._accept(header, address)

    def _accept(self, header: QuicHeader, address: Address) -> AioquicTransport | None:
        """Make a connection for a client's first packet, or refuse it."""
        if not self._accepting or len(self._transports) >= self._settings.max_connections:
            self._refuse(header, QuicErrorCode.CONNECTION_REFUSED, address)
            return None
        original, retried = header.destination_cid, None
        if self._retry is not None:
            if not header.token:
                self._send_retry(self._retry, header, address)
                return None
            try:
                original = self._retry.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=time.monotonic(),
                )
            except ValueError:
                self._refuse(header, QuicErrorCode.INVALID_TOKEN, address)
                return None
            retried = header.destination_cid
        connection = _Connection(
            self._settings,
            configuration=self._configuration,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        transport = AioquicTransport(
            connection, self._endpoint, self._settings, self._receiver_factory, remote=None
        )
        self._transports[transport] = set()

        def note_id(octets: bytes, issued: bool) -> None:
            if issued:
                self._routes[octets] = transport
                self._transports[transport].add(octets)
            else:
                self._routes.pop(octets, None)
                self._transports[transport].discard(octets)

        def forget() -> None:
            for octets in self._transports.pop(transport, ()):
                self._routes.pop(octets, None)

        transport.on_connection_id = note_id
        transport.on_over = forget
        note_id(header.destination_cid, True)
        note_id(connection.host_cid, True)
        return transport

    def _send_retry(
        self, handler: QuicRetryTokenHandler, header: QuicHeader, address: Address
    ) -> None:
        """Make a client prove that it is where it says (RFC 9000 Section 8.1.2)."""
        source_cid = os.urandom(_CONNECTION_ID)
        retry = encode_quic_retry(
            version=header.version or 0,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=handler.create_token(
                address=address,
                original_destination_connection_id=header.destination_cid,
                retry_source_connection_id=source_cid,
                now=time.monotonic(),
            ),
        )
        self._endpoint.send([retry], address)

    def _refuse(self, header: QuicHeader, code: QuicErrorCode, address: Address) -> None:
        """Answer a client's first packet with CONNECTION_CLOSE, and keep nothing of it."""
        crypto = CryptoPair()
        crypto.setup_initial(
            cid=header.destination_cid, is_client=False, version=header.version or 0
        )
        builder = QuicPacketBuilder(
            host_cid=header.destination_cid,
            is_client=False,
            max_datagram_size=1200,
            peer_cid=header.source_cid,
            version=header.version or 0,
        )
        builder.start_packet(QuicPacketType.INITIAL, crypto)
        buf = builder.start_frame(
            QuicFrameType.TRANSPORT_CLOSE, capacity=TRANSPORT_CLOSE_FRAME_CAPACITY
        )
        buf.push_uint_var(code)
        buf.push_uint_var(QuicFrameType.PADDING)
        buf.push_uint_var(0)
        self._endpoint.send(builder.flush()[0], address)


def _apply(settings: QuicSettings, configuration: QuicConfiguration) -> None:
    configuration.connection_id_length = _CONNECTION_ID
    configuration.congestion_control_algorithm = settings.congestion_control
    configuration.idle_timeout = settings.idle_timeout_s
    configuration.max_data = settings.connection_window
    configuration.max_stream_data = settings.stream_window
    configuration.max_datagram_size = settings.max_datagram_octets
    configuration.max_datagram_frame_size = _MAX_DATAGRAM_FRAME


def _spell(address: Address) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
