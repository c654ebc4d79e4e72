"""Streams we send on: what waits, what is unacknowledged, who is served next, and how much more.

Control and request streams leave before data streams, and data in the order it was written.
"""

from collections import deque
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.connection import (
    QuicReceiveContext,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.stream import QuicStream, QuicStreamSender

from moqt.aio.aioquic.base import BaseConnection, id_of
from moqt.aio.aioquic.varint import encode_varint, peek_varint, varint_size
from moqt.aio.settings import CONTROL_RESERVE, IDLE_BUDGET, QuicSettings

#: Octets that may be written and not sent yet, about: what leaves in two turns of the event loop.
MAX_UNSENT = 512 << 10


class Sender(QuicStreamSender):
    """What waits and what is unacknowledged on one stream, for data sent and acknowledged in order.

    aioquic 1.7.2 keeps everything that waits as a set of ranges. Here only what was lost is one;
    the rest begins where sending has got to, which saves most of the work for each packet.
    """

    def write(self, data: bytes | memoryview, end_stream: bool = False) -> None:
        """Append ``data``, and perhaps the end of the stream."""
        self.buffer_is_empty = False
        self._buffer += data
        self._buffer_stop += len(data)
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self._pending_eof = True

    @property
    def next_offset(self) -> int:
        """Where the octets begin that :meth:`take` returns next."""
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
        """Forget what was acknowledged, and have what was lost taken again."""
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


class Outbound:
    """A stream we send on."""

    __slots__ = (
        "fin",
        "fin_acked",
        "id_octets",
        "queued",
        "reset",
        "reset_code",
        "sender",
        "stream",
        "stream_id",
        "unacked",
        "urgent",
    )

    def __init__(self, stream: QuicStream) -> None:
        self.stream = stream
        self.stream_id = stream_id = id_of(stream)
        self.sender = stream.sender = Sender(stream_id, writable=True)
        self.id_octets = encode_varint(stream_id)
        # Control and request streams, which a few octets keep alive and which others wait for.
        self.urgent = not stream_is_unidirectional(stream_id) or stream_id < 4
        self.unacked = 0  # octets written and not acknowledged; the FIN counts as one
        self.queued = False
        self.fin = False
        self.fin_acked = False
        self.reset = False
        self.reset_code: int | None = None  # of a reset that waits until all has been acknowledged

    @property
    def writable(self) -> bool:
        """Whether more may be appended."""
        return not (
            self.fin or self.reset or self.reset_code is not None or self.sender.is_finished
        )


#: What was sent of a stream in one frame: its first octet, the one after its last, its FIN.
Frame = tuple[Outbound, int, int, bool]


class OutboundStreams(BaseConnection):
    """A connection that serves its streams from two queues, and counts what they hold."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._outbound: dict[int, Outbound] = {}
        self._urgent: deque[Outbound] = deque()
        self._bulk: deque[Outbound] = deque()
        self._blocked: dict[int, Outbound] = {}
        self._handed_over = 0  # octets of connection credit that written data uses or will use
        self.unacked = 0

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

    def reset(self, stream_id: int, code: int, *, after_delivery: bool = False) -> None:
        """Send RESET_STREAM in place of what has not been sent and acknowledged.

        With ``after_delivery``, once everything has been.
        """
        out = self._outbound.get(stream_id)
        if out is None:
            if self._is_over(stream_id):
                return
            # Also for a stream that was never opened: opening a later one would open it too, and
            # then it would stay open for ever.
            out = self._outbound_of(self._get_or_create_stream_for_send(stream_id))
        if out.reset or (after_delivery and out.fin):
            return
        if after_delivery and out.unacked:
            out.reset_code = code
            return
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

    @property
    def unread_octets(self) -> int:
        """Octets written to control and request streams and not acknowledged."""
        return sum(out.unacked for out in self._outbound.values() if out.urgent)

    def send_budget(self) -> int:
        """Return the free part of the congestion window, within flow control.

        It is no more than what makes :data:`MAX_UNSENT` wait: the first packet does not wait until
        a whole window has been handed over, and what becomes urgent meanwhile overtakes the rest.
        """
        budget = self._loss.congestion_window - self.unacked
        if not self.unacked:
            budget = max(budget, IDLE_BUDGET)
        credit = self._remote_max_data - self._handed_over - CONTROL_RESERVE
        return max(0, min(budget, credit, self._unsent_room))

    @property
    def is_full(self) -> bool:
        """Whether as much waits to be sent as may."""
        return self._unsent_room <= 0

    @property
    def _unsent_room(self) -> int:
        waiting: int = self.unacked - self._loss.bytes_in_flight
        return MAX_UNSENT - waiting

    # Frames that say what may be sent

    def _handle_stop_sending_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        """Take a STOP_SENDING, which aioquic answers with a reset."""
        stream_id = peek_varint(buf)
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

    # Opening, queueing, taking

    def _is_over(self, stream_id: int) -> bool:
        return self._stream_can_send(stream_id) and self._stream_is_discarded(stream_id)

    def _outbound_of(self, stream: QuicStream) -> Outbound:
        out = self._outbound.get(id_of(stream))
        if out is None:
            out = Outbound(stream)
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

    def _note_reset(self, out: Outbound) -> None:
        """Stop counting what a reset stream has not sent or got acknowledged."""
        if out.reset or out.sender.is_finished:
            return
        out.reset = True
        self.unacked -= out.unacked
        out.unacked = 0
        self._handed_over -= out.sender._buffer_stop - out.sender.highest_offset
        out.sender._buffer = bytearray()
        self._signals[out.stream_id] = out.stream

    def _enqueue(self, out: Outbound, *, first: bool = False) -> None:
        if not out.queued:
            out.queued = True
            queue = self._urgent if out.urgent else self._bulk
            queue.appendleft(out) if first else queue.append(out)

    def _retry_blocked(self) -> None:
        blocked, self._blocked = self._blocked, {}
        for out in blocked.values():
            self._enqueue(out)

    def _next_frame(
        self, queue: deque[Outbound], room: int
    ) -> tuple[bytes, bytearray, Frame] | None:
        """Take the next STREAM frame from ``queue`` that fits into ``room`` octets.

        Returns:
            Its header, its data, and what :meth:`_on_frame_delivery` wants to know of it; None
            when nothing can be sent or does not fit.
        """
        while queue:
            out = queue[0]
            sender = out.sender
            overhead = 3 + len(out.id_octets) + varint_size(sender.next_offset)
            if room < overhead + 1:
                return None
            before = sender.highest_offset
            taken = None
            if not sender.buffer_is_empty and not out.stream.is_blocked:
                taken = sender.take(room - overhead, self._send_limit(out))
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
                + encode_varint(start)
                + (stop - start | 0x4000).to_bytes(2, "big")
            )
            return header, data, (out, start, stop, fin)
        return None

    def _send_limit(self, out: Outbound) -> int:
        """Return the offset that flow control lets a stream reach."""
        return min(
            out.sender.highest_offset + self._remote_max_data - self._remote_max_data_used,
            out.stream.max_stream_data_remote,
        )

    # What became of it

    def _on_frame_delivery(
        self, delivery: QuicDeliveryState, out: Outbound, start: int, stop: int, fin: bool
    ) -> None:
        """Note that a STREAM frame was acknowledged or lost."""
        if out.reset:
            return
        out.sender.on_data_delivery(delivery, start, stop, fin)
        if delivery is QuicDeliveryState.ACKED:
            # A FIN goes with the last octets again when those were lost, acknowledged or not.
            octets = stop - start + (fin and not out.fin_acked)
            out.fin_acked |= fin
            out.unacked -= octets
            self.unacked -= octets
            if out.sender.is_finished:
                self._ended.append(out.stream)
            elif out.reset_code is not None and not out.unacked:
                self.reset(out.stream_id, out.reset_code)
        else:
            self._enqueue(out, first=True)

    def _on_reset_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        stream.sender.on_reset_delivery(delivery)
        if delivery is QuicDeliveryState.ACKED:
            self._ended.append(stream)
        else:
            self._signals[id_of(stream)] = stream
