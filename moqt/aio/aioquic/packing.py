"""Packets out: what goes into one, in which order."""

from collections import deque

from aioquic.quic.connection import (
    RESET_STREAM_FRAME_CAPACITY,
    STOP_SENDING_FRAME_CAPACITY,
    QuicNetworkPath,
    stream_is_client_initiated,
)
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.recovery import QuicPacketSpace

from moqt.aio.aioquic.base import AEAD_TAG, ONE_RTT, id_of
from moqt.aio.aioquic.datapackets import DataPackets
from moqt.aio.aioquic.inbound import InboundStreams
from moqt.aio.aioquic.outbound import Outbound


class Packing(DataPackets, InboundStreams):
    """A connection that fills its 1-RTT packets itself."""

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
        if data_only and self._bulk and self._only_data_wait(network_path, space, now):
            self._write_data_packets(builder, now)
            return
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
            pacer.update_after_send(now, builder._buffer.tell() + AEAD_TAG)
            if not (full or self._urgent) and (data_only or not self._bulk):
                break
        if data_only and self._bulk:
            self._write_data_packets(builder, now)

    def _only_data_wait(self, path: QuicNetworkPath, space: QuicPacketSpace, now: float) -> bool:
        """Whether :meth:`_write_frames` would find nothing to write but data."""
        return not (
            (space.ack_at is not None and space.ack_at <= now)
            or self._urgent
            or self._signals
            or self._raised
            or self._datagrams_pending
            or self._probe_pending
            or self._ping_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._streams_blocked_pending
            or path.remote_challenges
            or self._local_max_data.value != self._local_max_data.sent
            or self._local_max_streams_bidi.value != self._local_max_streams_bidi.sent
            or self._local_max_streams_uni.value != self._local_max_streams_uni.sent
            or not self._crypto_streams[ONE_RTT].sender.buffer_is_empty
            or not all(connection_id.was_sent for connection_id in self._host_cids)
        )

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
        crypto_stream = self._crypto_streams[ONE_RTT]
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

    def _write_stream_frames(self, builder: QuicPacketBuilder, queue: deque[Outbound]) -> None:
        """Write STREAM frames into the current packet until it is full."""
        while queue:
            frame = self._next_frame(queue, builder.remaining_flight_space)
            if frame is None:
                return
            header, data, delivery = frame
            buf = builder.start_frame(header[0], len(header), self._on_frame_delivery, delivery)
            buf.push_bytes(header[1:])
            buf.push_bytes(bytes(data))

    def _discard_ended(self) -> None:
        """Forget streams that are over in both directions, and let the peer open others."""
        for stream in self._ended:
            stream_id = id_of(stream)
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
