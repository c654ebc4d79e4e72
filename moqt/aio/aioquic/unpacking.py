"""Packets in: those of an established path are taken apart here, a batch at a time."""

from collections.abc import Sequence
from typing import Any

from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import CryptoError
from aioquic.quic.connection import QuicConnectionError, QuicReceiveContext
from aioquic.quic.packet import QuicErrorCode, decode_packet_number
from aioquic.quic.stream import StreamFinishedError

from moqt.aio.aioquic.base import ONE_RTT
from moqt.aio.aioquic.keys import KeyUpdates
from moqt.aio.settings import QuicSettings
from moqt.aio.udp import Address


class Unpacking(KeyUpdates):
    """A connection that receives the packets of an established path the short way."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._heard = False  # an authentic packet, since the idle timer was set
        self.packets_received = 0
        self.heard_at = 0.0
        """When an authentic packet came last; 0 before the first."""

    def receive(self, datagrams: Sequence[bytes], address: Address, now: float) -> None:
        """Take datagrams that came from one address."""
        self.packets_received += len(datagrams)
        closes_at = self._close_at
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
        if self._close_at != closes_at:
            # What moves the idle timer is a sign of life, and nothing else is: a peer that has
            # forgotten the connection may answer everything with a stateless reset.
            self.heard_at = now

    def _fast_context(self, address: Address, now: float) -> QuicReceiveContext | None:
        """Return what frames are received in, or None while packets need the whole machinery."""
        if not (self._handshake_confirmed and self._is_open()):
            return None
        path = self._network_paths[0]
        if path.addr != address or not path.is_validated:
            return None
        return QuicReceiveContext(
            epoch=ONE_RTT,
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
        if context.epoch is not ONE_RTT:
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
