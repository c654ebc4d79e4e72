"""Streams we receive on: what arrives in order, and receive windows that follow consumption.

Windows move past what the application consumed, not past what arrived, so that a reader that
stops stops the peer. What nobody will consume is credited at once, so that nothing leaks.
"""

from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.connection import (
    MAX_STREAM_DATA_FRAME_CAPACITY,
    Limit,
    QuicConnectionError,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, QuicStream

from moqt.aio.aioquic.base import BaseConnection, id_of
from moqt.aio.aioquic.varint import encode_varint, peek_varint
from moqt.aio.settings import QuicSettings

#: Octets from which a view of data costs less than a copy.
LARGE = 4096

#: What of a varint of so many octets is its value.
_VALUE_BITS = {1: 0x3F, 2: 0x3FFF, 4: 0x3FFF_FFFF, 8: 0x3FFF_FFFF_FFFF_FFFF}


class Inbound:
    """A stream we receive on; queued among the events while ``pieces`` waits to be told."""

    __slots__ = ("consumed", "dropped", "fin", "pieces", "stream")

    def __init__(self, stream: QuicStream) -> None:
        self.stream = stream
        self.consumed = 0  # octets the windows have moved past
        self.dropped = False  # nobody wants what arrives any more
        self.pieces: list[bytes | memoryview] | None = None
        self.fin = False


class Tail:
    """The end of the stream on which data are arriving.

    Most packets carry the next octets of the stream that the one before belonged to, and nothing
    else. Those are taken here, and the stream learns of them once for all.
    """

    def __init__(self) -> None:
        self._stream: QuicStream | None = None
        self._pieces: list[bytes | memoryview] = []
        self._prefix = b""  # how such a frame begins
        self._begin = self._end = -1  # offsets of what was taken
        self._limit = 0

    def follow(self, inbound: Inbound | None, credit: Limit) -> None:
        """Take what continues ``inbound``, as far as ``credit`` of the connection allows."""
        if inbound is None or inbound.dropped or inbound.pieces is None:
            return
        stream = inbound.stream
        receiver = stream.receiver
        if receiver._final_size is not None or receiver._buffer_start < receiver.highest_offset:
            return
        self._stream, self._pieces = stream, inbound.pieces
        self._prefix = b"\x0e" + encode_varint(id_of(stream))
        self._begin = self._end = receiver.highest_offset
        self._limit = min(stream.max_stream_data_local, self._end + credit.value - credit.used)

    def append(self, payload: bytes) -> bool:
        """Take a packet's payload if it is what is expected next; return whether it was."""
        if self._end < 0 or not payload.startswith(self._prefix):
            return False
        at = len(self._prefix)
        try:
            octets = 1 << (payload[at] >> 6)
            offset = int.from_bytes(payload[at : at + octets]) & _VALUE_BITS[octets]
            at += octets
            octets = 1 << (payload[at] >> 6)
            length = int.from_bytes(payload[at : at + octets]) & _VALUE_BITS[octets]
            at += octets
        except IndexError:
            return False
        end = offset + length
        if offset != self._end or at + length != len(payload) or end > self._limit:
            return False
        self._pieces.append(memoryview(payload)[at:] if length >= LARGE else payload[at:])
        self._end = end
        return True

    def put_back(self, credit: Limit) -> None:
        """Let the stream and the connection know of what was taken, and follow no more."""
        if self._stream is not None:
            receiver = self._stream.receiver
            receiver._buffer_start = receiver.highest_offset = self._end
            credit.used += self._end - self._begin
            self._stream = None
            self._end = -1


class InboundStreams(BaseConnection):
    """A connection whose windows are moved by :meth:`consume` and by nothing else."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._stream_window = settings.stream_window
        self._connection_window = settings.connection_window
        self._inbound: dict[int, Inbound] = {}
        self._last_inbound: Inbound | None = None  # that a STREAM frame came on
        self._tail = Tail()
        self._raised: dict[int, QuicStream] = {}  # MAX_STREAM_DATA to send
        self._consumed = 0

    def consume(self, stream_id: int, octets: int) -> bool:
        """Move the windows past octets the application is done with.

        Returns:
            Whether there is a window to tell the peer of.
        """
        before = self._local_max_data.value
        self._move_windows(stream_id, octets)
        return bool(self._raised) or self._local_max_data.value != before

    def _move_windows(self, stream_id: int, octets: int) -> None:
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

    def stop(self, stream_id: int, code: int) -> None:
        """Send STOP_SENDING, if there is still something to stop, and drop what comes."""
        inbound = self._inbound.get(stream_id)
        stream = self._streams.get(stream_id)
        if inbound is None and stream is not None and self._stream_can_receive(stream_id):
            inbound = Inbound(stream)
            if not stream.receiver.is_finished:
                self._inbound[stream_id] = inbound
        if inbound is not None:
            inbound.dropped = True
            self._forgo(inbound)
            self._forget_if_done(stream_id, inbound)
            if not inbound.stream.receiver.is_finished:
                inbound.stream.receiver.stop(code)
                self._signals[stream_id] = inbound.stream

    # Frames

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
            inbound = Inbound(stream)
            if not stream.receiver.is_finished:
                self._inbound[stream_id] = inbound
        else:
            stream = inbound.stream
        self._last_inbound = inbound
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
        stream_id = peek_varint(buf)
        known = self._streams.get(stream_id)
        was_finished = known is not None and known.receiver.is_finished
        super()._handle_reset_stream_frame(context, frame_type, buf)
        stream = self._streams[stream_id]
        if not was_finished:
            inbound = self._inbound.pop(stream_id, None) or Inbound(stream)
            self._forgo(inbound)
            self._ended.append(stream)

    def _on_stop_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            stream.receiver.stop_pending = True
            self._signals[id_of(stream)] = stream

    # Windows

    def _credit(self, octets: int) -> None:
        self._consumed += octets
        limit, window = self._consumed + self._connection_window, self._connection_window
        if limit - self._local_max_data.value >= window // 4:
            self._local_max_data.value = limit

    def _forgo(self, inbound: Inbound) -> None:
        """Give back the connection credit of all that a stream carried and nobody will consume."""
        octets = inbound.stream.receiver.highest_offset - inbound.consumed
        inbound.consumed += octets
        self._credit(octets)

    def _forget_if_done(self, stream_id: int, inbound: Inbound) -> None:
        receiver = inbound.stream.receiver
        if receiver.is_finished and inbound.consumed >= receiver.highest_offset:
            self._inbound.pop(stream_id, None)

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
        buf.push_uint_var(id_of(stream))
        buf.push_uint_var(stream.max_stream_data_local)

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            self._raised[id_of(stream)] = stream
