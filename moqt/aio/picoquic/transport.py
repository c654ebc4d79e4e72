"""One connection on the event loop: its turns, its timer, its end."""

import asyncio
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from moqt.aio.picoquic.inbound import ReceiveWindows
from moqt.aio.picoquic.library import Command, Event
from moqt.aio.picoquic.outbound import SendQueues
from moqt.aio.picoquic.streams import Stream, is_of_client, is_unidirectional
from moqt.aio.picoquic.worker import Told, Worker, stream_window
from moqt.aio.settings import DATAGRAM_BACKLOG, HANDSHAKE_LIMIT_S, QuicSettings
from moqt.aio.transport import (
    INTERNAL_ERROR,
    ConnectionLost,
    QuicReceiver,
    ReceiverFactory,
    TransportStats,
)

log = structlog.get_logger()

#: While octets wait for the wire, they are looked at so often: between these, in seconds.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.05

#: The figures of the connection are asked for no more often, unless a close waits for them.
FIGURES_S = 0.025

#: picoquic ends a connection, closing period and all, well within this. Then it is forgotten.
CLOSING_S = 1.0

#: Octets of one DATAGRAM at most, and of all that wait.
DATAGRAM_OCTETS, DATAGRAM_RING = 1200, 1 << 20


@dataclass(slots=True)
class _Delivery:
    """What is awaited before a stream is reset."""

    code: int
    fresh_from: int | None = None
    """How many figures must have come, so that they tell of its last octet."""

    awaited: int | None = None
    """Octets sent on the connection that must have been acknowledged."""

    lost: int = 0
    """Packets that were lost when that was noted."""


class PicoquicTransport:
    """A :class:`~moqt.aio.transport.QuicTransport` over picoquic; see there for most methods.

    Made by ``dial`` and by a ``Listener``, for a connection of a worker. The receiver is made when
    the handshake is complete, so a connection that fails before has none.
    """

    def __init__(
        self,
        worker: Worker,
        connection: int,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
        *,
        is_client: bool,
    ) -> None:
        self._worker = worker
        self._context = worker.context
        self._cnx = connection
        self._settings = settings
        self._receiver_factory = receiver_factory
        self._is_client = is_client
        self._loop = asyncio.get_running_loop()
        self._receiver: QuicReceiver | None = None
        self._early: list[Told] = []  # came ahead of the end of the handshake
        self._alpn: str | None = None
        self._peer_address: tuple[str, int] = ("", 0)
        self._accepts_datagrams = False

        self._records: set[int] = set()
        self._streams: dict[int, Stream] = {}
        self._next_ids = [0, 0]  # of ours that were never used: bidirectional, unidirectional
        self._passed_over: set[int] = set()  # of ours, below those, and not used either
        self._inbound = ReceiveWindows(
            worker, connection, stream_window(settings), settings.connection_window
        )
        self._outbound = SendQueues(worker, connection, is_client, self._records)
        self._resets: dict[
            Stream, _Delivery
        ] = {}  # that wait for what was written to be acknowledged
        self._datagrams = 0  # aiopquic's ring, once there is one
        self._datagram_mark_owed = False

        self._closing = False  # nothing more is accepted
        self._failed = False  # the receiver raised
        self._close_after: tuple[int, str, float] | None = None  # code, reason, drain deadline
        self._lost: ConnectionLost | None = None
        self._over = asyncio.Event()
        self._turn: asyncio.Handle | None = None
        self._in_turn = False
        self._flush_wanted = False
        self._more = False  # the worker's ring of commands was full
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._pause_s = LEAST_PAUSE_S
        self._looked_at = self._figures_at = self._made_at = self._heard_at = time.monotonic()
        self._figures: dict[str, Any] = {}
        self._figures_asked = False
        self._figures_count = 0
        self._quiet_figures = 0  # fresh ones in a row that tell of nothing in flight
        self.on_connected: Callable[[], None] = lambda: None
        """Called after the receiver's ``connected``; for the one who made this transport."""
        self.on_lost: Callable[[ConnectionLost], None] = lambda lost: None
        """Called after the receiver's ``connection_lost``, and if there is no receiver."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when no more packets of this connection are expected."""

    @property
    def alpn(self) -> str | None:
        """The protocol that was negotiated, once connected."""
        return self._alpn

    @property
    def peer_address(self) -> tuple[str, int]:
        """Address and UDP port of the peer, as they were at the end of the handshake."""
        return self._peer_address

    @property
    def client_certificate(self) -> bytes | None:
        """None: picoquic asks no client for a certificate."""
        return None

    @property
    def peer_accepts_datagrams(self) -> bool:
        """Whether the DATAGRAM extension was negotiated."""
        return self._accepts_datagrams

    @property
    def heard_at(self) -> float:
        """When the peer was last found to have given a sign of life."""
        return self._heard_at

    def ping(self) -> None:
        """Look for a sign of life. PINGs are sent in any case while ``keepalive`` is set."""
        self._ask_for_figures()
        self._take_turn()

    def send_stream_data(self, stream_id: int, data: bytes | memoryview, fin: bool = False) -> None:
        """Append to a stream, opening it if this is its first data. Copies ``data``.

        Raises:
            ValueError: If the stream is not ours to write: a mistake of the caller.
        """
        if self._closing:
            return
        stream = self._stream_to_send(stream_id)
        if stream is not None and stream.writable:
            self._outbound.write(stream, data, fin)
            self._take_turn()

    def reset_stream(self, stream_id: int, code: int, *, after_delivery: bool = False) -> None:
        """Give up on a stream we were sending.

        With ``after_delivery`` that waits until everything written is believed to have been
        acknowledged. picoquic tells so of whole connections only: packets that were sent in
        another order than they arrive can deceive it by a round trip.
        """
        if self._closing:
            return
        stream = self._stream_to_send(stream_id)
        if stream is None or stream.reset:
            return
        if after_delivery and (stream.record or stream.waiting):
            if stream.resetting:
                return
            stream.resetting = True
            self._resets[stream] = _Delivery(code)
        else:
            self._resets.pop(stream, None)
            self._outbound.reset(stream, code)
        self._take_turn()

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to give up on a stream; what still arrives is dropped and credited."""
        stream = self._streams.get(stream_id)
        if self._closing or stream is None or stream.dropped or stream.fin_received:
            return
        if is_unidirectional(stream_id) and is_of_client(stream_id) == self._is_client:
            return
        self._inbound.drop(stream)
        self._worker.ask(Command.STOP_SENDING, self._cnx, stream, code)

    def send_datagram(self, data: bytes) -> bool:
        """Send a QUIC DATAGRAM; False, and nothing queued, if it is too large or many wait."""
        if self._closing or self._receiver is None or not self._accepts_datagrams:
            return False
        context = self._context
        if len(data) > min(DATAGRAM_OCTETS, context.datagram_payload_ceiling(self._cnx)) - 3:
            return False
        if not self._datagrams:
            self._datagrams = context.dgram_ring_create(DATAGRAM_RING, DATAGRAM_OCTETS)
        if self._datagrams_waiting >= DATAGRAM_BACKLOG:
            return False
        outcome = context.dgram_send(self._cnx, self._datagrams, bytes(data))
        self._datagram_mark_owed |= outcome == 2
        self._take_turn()
        return bool(outcome > 0)

    def wake(self) -> None:
        """Have ``flush`` called soon, once, however often this was called before."""
        self._flush_wanted = True
        self._take_turn()

    def send_budget(self) -> int:
        """Octets worth handing over now."""
        return 0 if self._closing else self._outbound.budget()

    def stream_credit(self, stream_id: int) -> int:
        """Octets worth adding to a stream now."""
        if self._closing or self._is_over(stream_id):
            return 0
        return self._outbound.credit(stream_id, self._streams.get(stream_id))

    def unread_octets(self) -> int:
        """Octets on control and request streams that have not gone into packets."""
        return self._outbound.unread_octets

    def consumed(self, stream_id: int, octets: int) -> None:
        """The application is done with received octets: the receive windows may move on."""
        if not self._over.is_set():
            self._inbound.consumed(stream_id, self._streams.get(stream_id), octets)

    def close(self, code: int, reason: str, *, drain_s: float = 0.0) -> None:
        """Close, once everything written has been acknowledged or ``drain_s`` has passed.

        The peer gets the code and no reason.
        """
        if not self._closing:
            self._closing = True
            self._close_after = (code, reason, time.monotonic() + drain_s)
            self._quiet_figures = 0
            self._take_turn()

    def abandon(self) -> None:
        """Forget the connection at once.

        An accepted one is closed with code 0, since picoquic cannot be told to forget it.
        """
        if self._over.is_set():
            return
        self._closing = True
        if not self._is_client:
            self._worker.ask(Command.CLOSE, self._cnx)
        self._end()
        lost = ConnectionLost(0, "abandoned", application=False, by_peer=False)
        self._loop.call_soon(self._report_lost, lost)

    def stats(self) -> TransportStats:
        """Return the figures of the last look; what picoquic does not tell is 0."""
        self._ask_for_figures()
        figures = self._figures
        return TransportStats(
            smoothed_rtt_s=figures.get("rtt", 0) / 1e6,
            congestion_window=figures.get("cwin", 0),
            octets_in_flight=figures.get("bytes_in_transit", 0),
            packets_sent=figures.get("sent", 0),
            packets_received=0,
            packets_expected=0,
            packets_lost=figures.get("lost", 0),
            key_updates=0,
            datagram_octets=None,
        )

    async def wait_closed(self) -> None:
        """Return when the connection is over and its closing period has passed."""
        await self._over.wait()

    # For the worker

    def tell(self, told: Told) -> None:
        """Tell the receiver what happened (called by the worker)."""
        self._heard_at = time.monotonic()
        tell = _TELL.get(told.kind)
        if tell is None or self._over.is_set():
            return
        if self._receiver is None and told.kind in _OF_RECEIVER:
            self._keep_for_later(told)
        else:
            tell(self, told)

    def answer(self) -> None:
        """Let the receiver write, and hand over."""
        self._flush_wanted = True
        self._run()

    def _keep_for_later(self, told: Told) -> None:
        """Keep what overtook the end of the handshake; records live and die meanwhile."""
        stream = self._streams.get(told.stream_id)
        if told.kind == Event.STREAM_DESTROY:
            self._records.discard(told.record)
            if stream is not None:
                stream.detach()
        elif told.record:
            self._stream_that_sends(told)
        self._early.append(told._replace(record=0))

    def _tell_ready(self, told: Told) -> None:
        context = self._context
        if self._receiver is not None or self._closing:
            return
        self._alpn = context.get_negotiated_alpn(self._cnx)
        self._peer_address = context.peer_address(self._cnx) or self._peer_address
        self._accepts_datagrams = context.datagram_payload_ceiling(self._cnx) > 0
        self._outbound.granted(context.transport_parameters(self._cnx))
        try:
            self._receiver = self._receiver_factory(self)
        except Exception:
            _log_failure("no receiver for a connection, closing it", peer=self.peer_address)
            self._fail()
            return
        self._call(self._receiver.connected)
        self.on_connected()
        early, self._early = self._early, []
        for kept in early:
            _TELL[kept.kind](self, kept)

    def _tell_data(self, told: Told) -> None:
        stream = self._stream_that_sends(told)
        data = b"" if told.data is None else bytes(told.data)
        fin = told.kind == Event.STREAM_FIN
        if fin:
            stream.fin_received = True
        if stream.dropped:
            data = b""
        else:
            self._inbound.received(stream, len(data))
        if self._receiver is not None and (data or fin):
            self._call(self._receiver.stream_data_received, stream.stream_id, data, fin)
        if fin and not stream.record and is_unidirectional(stream.stream_id):
            self._forget(stream)  # nothing but a FIN came: nobody tells its end

    def _tell_reset(self, told: Told) -> None:
        stream = self._stream_that_sends(told)
        stream.fin_received = True
        self._inbound.drop(stream)
        if self._receiver is not None:
            self._call(self._receiver.stream_reset_received, stream.stream_id, told.code)
        if not stream.record and is_unidirectional(stream.stream_id):
            self._forget(stream)

    def _tell_stopped(self, told: Told) -> None:
        stream = self._streams.get(told.stream_id)
        if stream is None:
            return
        self._adopt(stream, told.record)
        if not stream.reset:
            self._resets.pop(stream, None)
            self._outbound.reset(stream, told.code)
        if self._receiver is not None:
            self._call(self._receiver.stop_sending_received, told.stream_id, told.code)

    def _tell_datagram(self, told: Told) -> None:
        if self._receiver is not None:
            data = b"" if told.data is None else bytes(told.data)
            self._call(self._receiver.datagram_received, data)

    def _tell_destroyed(self, told: Told) -> None:
        self._records.discard(told.record)
        stream = self._streams.get(told.stream_id)
        if stream is not None:
            self._forget(stream)

    def _tell_closed(self, told: Told) -> None:
        lost: ConnectionLost
        if told.kind == Event.APP_CLOSE:
            lost = ConnectionLost(told.code, "", application=True, by_peer=True)
        elif told.code:
            lost = ConnectionLost(told.code, "", application=False, by_peer=True)
        elif self._receiver is None:
            lost = ConnectionLost(0, "the handshake failed", application=False, by_peer=False)
        else:
            reason = (
                f"idle timeout: nothing was received for {self._settings.idle_timeout_s:.1f} s, "
                "or the peer broke the rules of QUIC"
            )
            lost = ConnectionLost(0, reason, application=False, by_peer=False)
        self._report_lost(lost)
        # After the batch, in which the records of this connection are still named.
        self._loop.call_soon(partial(self._end, is_over=True))

    # Streams

    def _stream_that_sends(self, told: Told) -> Stream:
        stream = self._streams.get(told.stream_id)
        if stream is None:
            stream = self._streams[told.stream_id] = Stream(told.stream_id)
        self._adopt(stream, told.record)
        return stream

    def _stream_to_send(self, stream_id: int) -> Stream | None:
        """Return a stream of ours, perhaps a new one, or of the peer; None if it is over."""
        stream = self._streams.get(stream_id)
        is_ours = is_of_client(stream_id) == self._is_client
        if is_unidirectional(stream_id) and not is_ours:
            raise ValueError(f"stream {stream_id} is not ours to write")
        if stream is not None or not is_ours or self._is_over(stream_id):
            return stream
        kind = is_unidirectional(stream_id)
        index = stream_id // 4
        if index >= self._next_ids[kind]:
            first = stream_id & 3
            self._passed_over.update(range(first + 4 * self._next_ids[kind], first + 4 * index, 4))
            self._next_ids[kind] = index + 1
        self._passed_over.discard(stream_id)
        stream = self._streams[stream_id] = Stream(stream_id)
        return stream

    def _is_over(self, stream_id: int) -> bool:
        return (
            is_of_client(stream_id) == self._is_client
            and stream_id // 4 < self._next_ids[is_unidirectional(stream_id)]
            and stream_id not in self._streams
            and stream_id not in self._passed_over
        )

    def _adopt(self, stream: Stream, record: int) -> None:
        if record:
            self._records.add(record)
            stream.attach(record)

    def _forget(self, stream: Stream) -> None:
        self._inbound.forget(stream)
        self._outbound.forget(stream)
        self._resets.pop(stream, None)
        stream.detach()
        self._streams.pop(stream.stream_id, None)

    # One turn of the event loop

    def _take_turn(self) -> None:
        if self._turn is None and not self._in_turn and not self._over.is_set():
            self._turn = self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Let the receiver write, hand over, and set the timer."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._over.is_set():
            return
        self._in_turn = True
        try:
            now = time.monotonic()
            self._look(now)
            if self._flush_wanted:
                self._flush_wanted = False
                if self._receiver is not None:
                    self._call(self._receiver.flush)
            if not self._over.is_set() and self._lost is None:
                self._hand_over(now)
        finally:
            self._in_turn = False
        if not self._over.is_set():
            if self._flush_wanted:
                self._take_turn()
            self._set_timer()

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
        self._close_after = (INTERNAL_ERROR, "internal error", 0.0)
        self._take_turn()

    def _look(self, now: float) -> None:
        """See what became of what was handed over."""
        outbound = self._outbound
        waiting_since = self._looked_at
        self._looked_at = now
        idle = outbound.is_empty and self._close_after is None and not self._resets
        if self._figures_asked or not idle:
            self._read_figures(now, ask_again=not idle)
        if idle:
            self._pause_s = LEAST_PAUSE_S
            return
        if outbound.look(now, self._figures.get("rtt", 0) / 1e6):
            self._pause_s = LEAST_PAUSE_S
            self._flush_wanted = True
        elif now - waiting_since >= self._pause_s / 2:
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def _hand_over(self, now: float) -> None:
        if self._datagram_mark_owed:
            owed = self._context.dgram_mark_ready(self._cnx, self._datagrams)
            self._datagram_mark_owed = bool(owed)
        self._more = not self._outbound.hand_over(now)
        self._reset_what_was_delivered()
        if self._close_after is not None:
            code, reason, deadline = self._close_after
            if self._is_drained or now >= deadline:
                self._close_after = None
                self._worker.ask(Command.CLOSE, self._cnx, code=code)
                self._ending = self._loop.call_later(CLOSING_S, self._end)
                self._report_lost(ConnectionLost(code, reason, application=True, by_peer=False))

    def _reset_what_was_delivered(self) -> None:
        """Reset streams of which nothing can be in flight any more.

        When the last octet has left the ring, all octets that the connection sent until the next
        figures are awaited, and those sent until then once more whenever a packet was lost.
        """
        sent, lost = self._figures.get("bytes_sent", 0), self._figures.get("lost", 0)
        for stream in list(self._resets):
            delivery = self._resets[stream]
            if stream.queued:
                continue
            if delivery.fresh_from is None:
                delivery.fresh_from = self._figures_count + 2
            elif self._figures_count < delivery.fresh_from:
                continue
            elif delivery.awaited is None or delivery.lost != lost:
                delivery.awaited, delivery.lost = sent, lost
            elif sent - self._figures.get("bytes_in_transit", 0) >= delivery.awaited:
                del self._resets[stream]
                self._outbound.reset(stream, delivery.code)

    @property
    def _datagrams_waiting(self) -> int:
        if not self._datagrams:
            return 0
        stats = self._context.dgram_ring_stats(self._datagrams)
        return int(stats["records_pushed"] - stats["records_popped"])

    @property
    def _is_drained(self) -> bool:
        """Whether all that was written is believed to have been acknowledged."""
        return (
            self._receiver is None
            or self._failed
            or (
                self._outbound.is_empty
                and not self._outbound.unacknowledged
                and not self._datagrams_waiting
                and self._quiet_figures >= 2
            )
        )

    # Figures, which the worker sends when asked

    def _ask_for_figures(self) -> None:
        if not self._figures_asked and not self._over.is_set():
            self._figures_asked = True
            self._context.path_quality(self._cnx)

    def _read_figures(self, now: float, *, ask_again: bool) -> None:
        """Take the figures that were asked for, once they are there, and ask for the next."""
        patient = self._close_after is None and not self._resets
        if self._figures_asked and not self._context.tx_event_ring_count:
            figures = self._context.path_quality(self._cnx)
            if figures.get("bytes_received") != self._figures.get("bytes_received"):
                self._heard_at = now
            self._figures = figures
            self._figures_at = now
            self._figures_asked = False
            self._figures_count += 1
            self._outbound.window_is(figures.get("cwin", 0))
            idle = self._outbound.is_empty and not figures.get("bytes_in_transit", 1)
            self._quiet_figures = self._quiet_figures + 1 if idle else 0
        if ask_again and (not patient or now - self._figures_at >= FIGURES_S):
            self._ask_for_figures()

    # Time

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lost is not None:
            return
        pause_s: float | None = None
        awaits_figures = self._close_after is not None or bool(self._resets)
        if self._more or (self._outbound.is_empty and awaits_figures):
            pause_s = LEAST_PAUSE_S
        elif not self._outbound.is_empty:
            pause_s = self._pause_s
            if pause_s > LEAST_PAUSE_S and self._outbound.ask_for_progress():
                pause_s = LEAST_PAUSE_S
        elif self._figures_asked:
            pause_s = LEAST_PAUSE_S
        if self._close_after is not None and pause_s is not None:
            pause_s = min(pause_s, self._close_after[2] - time.monotonic())
        if self._receiver is None and not self._is_client:
            left = self._made_at + HANDSHAKE_LIMIT_S - time.monotonic()
            pause_s = left if pause_s is None else min(pause_s, left)
        if pause_s is not None:
            self._timer = self._loop.call_later(max(LEAST_PAUSE_S, pause_s), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        now = time.monotonic()
        handshaking = self._receiver is None and not self._is_client and not self._closing
        if handshaking and now - self._made_at >= HANDSHAKE_LIMIT_S:
            self._worker.ask(Command.CLOSE, self._cnx)
            self._report_lost(
                ConnectionLost(0, "handshake took too long", application=False, by_peer=False)
            )
            self._end()
            return
        self._run()

    # The end

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

    def _end(self, *, is_over: bool = False) -> None:
        """Forget the connection; ``is_over`` when the worker said that it is."""
        if self._over.is_set():
            return
        self._closing = True
        self._over.set()
        for handle in (self._timer, self._turn, self._ending):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = self._ending = None
        for stream in self._streams.values():
            self._inbound.forget(stream)
            stream.detach()
        self._streams.clear()
        self._resets.clear()
        self._worker.bury(self._cnx, set(self._records), is_over=is_over)
        self._records.clear()
        if self._datagrams:
            self._context.dgram_ring_release(self._datagrams, self._cnx)
            self._datagrams = 0
        self.on_over()


#: What becomes of each kind of event; the kinds that are missing wake the connection, no more.
_TELL: dict[int, Callable[[PicoquicTransport, Told], None]] = {
    Event.READY: PicoquicTransport._tell_ready,
    Event.STREAM_DATA: PicoquicTransport._tell_data,
    Event.STREAM_FIN: PicoquicTransport._tell_data,
    Event.STREAM_RESET: PicoquicTransport._tell_reset,
    Event.STOP_SENDING: PicoquicTransport._tell_stopped,
    Event.DATAGRAM: PicoquicTransport._tell_datagram,
    Event.STREAM_DESTROY: PicoquicTransport._tell_destroyed,
    Event.CLOSE: PicoquicTransport._tell_closed,
    Event.APP_CLOSE: PicoquicTransport._tell_closed,
}


#: Those that only a receiver can take.
_OF_RECEIVER = frozenset(_TELL) - {Event.READY, Event.CLOSE, Event.APP_CLOSE}


def _log_failure(text: str, **values: Any) -> None:
    """Log the exception that is being handled: its lines, never the values of its variables."""
    log.error(text, traceback=traceback.format_exc(), **values)
