"""One connection on the event loop: its turns, its timers, its end."""

import asyncio
import time
import traceback
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

import structlog
from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.inbound import Inbound
from moqt.aio.settings import HANDSHAKE_LIMIT_S, QuicSettings
from moqt.aio.transport import (
    INTERNAL_ERROR,
    ConnectionLost,
    QuicReceiver,
    ReceiverFactory,
    TransportStats,
)
from moqt.aio.udp import Address, UdpEndpoint

log = structlog.get_logger()

#: Bursts before the event loop gets a turn, in which acknowledgements are read.
BURSTS_PER_TURN = 4


class AioquicTransport:
    """A :class:`~moqt.aio.transport.QuicTransport` over aioquic; see there for most methods.

    Made by ``dial`` and by a ``Listener``. The receiver is made when the handshake is
    complete, so a connection that fails before has none.
    """

    def __init__(
        self,
        connection: Connection,
        endpoint: UdpEndpoint,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
        *,
        remote: Address | None,
    ) -> None:
        self._connection = connection
        self._endpoint = endpoint
        # What the peer was granted is not told; systems have like defaults, and ends like needs.
        connection.expect_buffer(endpoint.receive_buffer)
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
        self._last_ping = now = time.monotonic()
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
    def client_certificate(self) -> bytes | None:
        """DER of the certificate of the client, if one was asked for: it was verified then."""
        return self._connection.client_certificate

    @property
    def peer_accepts_datagrams(self) -> bool:
        """Whether the DATAGRAM extension was negotiated."""
        return self._connection.peer_accepts_datagrams

    def send_stream_data(self, stream_id: int, data: bytes | memoryview, fin: bool = False) -> None:
        """Append to a stream, opening it if this is its first data. Copies ``data``.

        Raises:
            ValueError: If the stream is not ours to write: a mistake of the caller.
        """
        if not self._closing:
            self._connection.write(stream_id, data, fin)
            self._take_turn()

    def reset_stream(self, stream_id: int, code: int, *, after_delivery: bool = False) -> None:
        """Give up on a stream we were sending, at once or once what was sent has arrived."""
        if not self._closing:
            self._connection.reset(stream_id, code, after_delivery=after_delivery)
            self._take_turn()

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to give up on a stream; what still arrives is dropped and credited."""
        if not self._closing:
            self._connection.stop(stream_id, code)
            self._take_turn()

    def send_datagram(self, data: bytes) -> bool:
        """Send a QUIC DATAGRAM; False, and nothing queued, if it is too large or many wait."""
        if self._closing or not self._connection.queue_datagram(data):
            return False
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

    def unread_octets(self) -> int:
        """Octets on control and request streams that the peer has not acknowledged."""
        return self._connection.unread_octets

    def consumed(self, stream_id: int, octets: int) -> None:
        """The application is done with received octets: the receive windows may move on."""
        if self._connection.consume(stream_id, octets):
            self._take_turn()

    @property
    def heard_at(self) -> float:
        """When the peer gave the last sign of life."""
        return self._connection.heard_at

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._last_ping = time.monotonic()
        if self._lost is None:
            self._connection.send_ping(0)
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
        return self._connection.stats()

    async def wait_closed(self) -> None:
        """Return when the connection is over and its closing period has passed."""
        await self._over.wait()

    # For the owner of the endpoint

    def start(self, address: Address) -> None:
        """Begin the handshake of a client."""
        self._handshake_deadline = None  # dial() has its own
        self._connection.connect(address, time.monotonic())
        self._take_turn()

    def feed(self, data: bytes, size: int, address: Address) -> None:
        """Take datagrams of ``size`` octets, end to end, the last one perhaps shorter.

        :meth:`answer` must follow at the end of the batch.
        """
        if self._farewell:
            # RFC 9000 Section 10.2.1: repeat it, ever more rarely, to who has not heard it.
            self._late_batches += 1
            if self._late_batches & (self._late_batches - 1) == 0:
                self._send(self._farewell)
            return
        try:
            self._connection.receive(data, size, address, time.monotonic())
        except Exception:  # a packet must not take down the other connections of the endpoint
            _log_failure("QUIC engine failed on a packet")
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
            was_full = self._connection.is_full
            more = not self._over.is_set() and self._transmit()
            if was_full and not self._connection.is_full:
                self._flush_wanted = True  # for what was not taken for want of room
            self._look_for_end()
        finally:
            self._in_turn = False
        if not self._over.is_set():
            if more or self._flush_wanted or self._connection.pending_events:
                self._take_turn()
            self._set_timer()

    def _tell_events(self) -> None:
        queue = self._connection.pending_events
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
            _log_failure("receiver failed, closing the connection", peer=self.peer_address)
            self._fail()

    def _fail(self) -> None:
        self._failed = self._closing = True
        self._close_after = None
        self._connection.close(INTERNAL_ERROR, None, "internal error")

    def _tell_data(self, inbound: Inbound) -> None:
        pieces, inbound.pieces = inbound.pieces or [], None
        data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        if inbound.dropped:
            data = b""
        if self._receiver is not None and (data or inbound.fin):
            self._call(
                self._receiver.stream_data_received, inbound.stream.stream_id, data, inbound.fin
            )

    def _tell_connected(self, event: events.HandshakeCompleted) -> None:
        self._alpn = event.alpn_protocol
        self._handshake_deadline = None
        if self._connection.is_stranger:
            # The handshake has seen to that, unless the library completes one in another way.
            log.error("client without a certificate, closing", peer=self.peer_address)
            self._fail()
            return
        try:
            self._receiver = self._receiver_factory(self)
        except Exception:
            _log_failure("no receiver for a connection, closing it", peer=self.peer_address)
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
            if connection.is_drained or now >= deadline:
                self._close_after = None
                connection.close(code, None, _short(reason))
        for _ in range(BURSTS_PER_TURN):
            is_farewell = connection.is_about_to_close
            try:
                datagrams = connection.datagrams_to_send(now)
            except Exception:
                self._engine_failed()
                return False
            if not datagrams:
                return False
            taken = self._send(datagrams)
            if is_farewell:
                self._farewell = datagrams
            if not taken:
                self._note_refused(max(len(data) for data, _ in datagrams), now)
            elif not connection.more_to_send:
                return False
            now = time.monotonic()
        return True

    def _send(self, datagrams: list[tuple[bytes, Address]]) -> bool:
        """Send; False when one of them is larger than the system takes."""
        if self._remote is not None:
            here = [data for data, address in datagrams if address == self._remote]
            return self._endpoint.send(here, None)
        taken = True
        for address, group in groupby(datagrams, itemgetter(1)):
            taken &= self._endpoint.send([data for data, _ in group], address)
        return taken

    def _note_refused(self, octets: int, now: float) -> None:
        if not self._connection.refused(octets, now):
            self._endpoint.warn_too_large(octets)

    def _look_for_end(self) -> None:
        if self._over.is_set():
            return
        lost = self._connection.lost()
        if lost is None:
            return
        # Not after the closing period, in which only stray packets may come.
        self._report_lost(lost)
        if self._connection.is_terminated:
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
                _log_failure("receiver failed on the end of its connection")
        self.on_lost(lost)

    def _engine_failed(self) -> None:
        _log_failure("QUIC engine failed, connection dropped", peer=self.peer_address)
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
        return max(self.heard_at, self._last_ping) + self._connection.idle_timeout_s / 3

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
            self.ping()
        self._run()


#: What becomes of each kind of event; the kinds that are missing concern nobody here.
_TELL: dict[type, Callable[[AioquicTransport, Any], None]] = {
    Inbound: AioquicTransport._tell_data,
    events.HandshakeCompleted: AioquicTransport._tell_connected,
    events.StreamReset: AioquicTransport._tell_reset,
    events.StopSendingReceived: AioquicTransport._tell_stopped,
    events.DatagramFrameReceived: AioquicTransport._tell_datagram,
    events.ConnectionIdIssued: AioquicTransport._tell_id_issued,
    events.ConnectionIdRetired: AioquicTransport._tell_id_retired,
}


def _short(reason: str) -> str:
    """Cut a reason so that it fits into the one packet that carries it."""
    return reason.encode()[:500].decode(errors="ignore")


def _log_failure(text: str, **values: Any) -> None:
    """Log the exception that is being handled: its lines, never the values of its variables.

    Some renderers print those when they are handed the exception itself, payloads among them.
    """
    log.error(text, traceback=traceback.format_exc(), **values)
