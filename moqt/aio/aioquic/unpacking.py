"""Packets in: those of an established path are taken apart here, a batch at a time."""

from typing import Any

from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import CryptoError
from aioquic.quic.connection import QuicConnectionError, QuicReceiveContext
from aioquic.quic.packet import QuicErrorCode, decode_packet_number
from aioquic.quic.recovery import MAX_ACK_RANGES
from aioquic.quic.stream import StreamFinishedError

from moqt.aio.aioquic.base import ONE_RTT
from moqt.aio.aioquic.configuration import CONNECTION_ID_OCTETS
from moqt.aio.aioquic.inbound import InboundStreams
from moqt.aio.aioquic.keys import KeyUpdates
from moqt.aio.aioquic.protection import SAMPLE, InvalidTag, Protection
from moqt.aio.settings import QuicSettings
from moqt.aio.udp import Address

#: A short header with a connection ID of ours, the longest packet number, and a sample.
MIN_OCTETS = 1 + CONNECTION_ID_OCTETS + 4 + SAMPLE


class Unpacking(KeyUpdates, InboundStreams):
    """A connection that receives the packets of an established path the short way."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._heard = False  # an authentic packet, since the idle timer was set
        self.packets_received = 0
        self.heard_at = 0.0
        """When an authentic packet came last; 0 before the first."""

    def receive(self, data: bytes, size: int, address: Address, now: float) -> None:
        """Take datagrams that came from one address.

        They are end to end in ``data``, each of ``size`` octets, the last perhaps of fewer.
        """
        self.packets_received += -(-len(data) // size)
        closes_at = self._close_at
        at = 0
        while at < len(data):
            context = self._fast_context(address, now)
            if context is not None:
                at = self._receive_run(data, size, at, context)
                if at >= len(data):
                    break
            self.receive_datagram(data[at : at + size], address, now)
            self._note_keys()
            at += size
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

    def _receive_run(self, data: bytes, size: int, at: int, context: QuicReceiveContext) -> int:
        """Receive 1-RTT packets of the established path, up to the first of another kind.

        Returns:
            Where that one begins, or the end of ``data``.
        """
        numbers, payloads, reached = self._unprotect(data, size, at, context.host_cid)
        tail = self._tail
        tail.follow(self._last_inbound, self._local_max_data)
        first = following = -1  # a run of packet numbers that is not noted yet
        eliciting = 0
        for number, payload in zip(numbers, payloads, strict=True):
            if number != following or number < self._space.expected_packet_number:
                if first >= 0:
                    self._note_received(first, following, context.time)
                if number in self._space.received_packets:
                    first = following = -1
                    continue
                first = number
            following = number + 1
            if tail.append(payload):
                eliciting += 1
                continue
            tail.put_back(self._local_max_data)
            try:
                is_eliciting, _ = self._payload_received(context, payload)
            except QuicConnectionError as error:
                self.close(error.error_code, error.frame_type, error.reason_phrase)
            if not self._is_open():
                return len(data)  # what follows comes too late
            eliciting += is_eliciting
            tail.follow(self._last_inbound, self._local_max_data)
        tail.put_back(self._local_max_data)
        if first >= 0:
            self._note_received(first, following, context.time)
        if eliciting:
            self._unanswered += eliciting
            if self._space.ack_at is None:
                self._space.ack_at = context.time + self._ack_delay
        return reached

    def _unprotect(
        self, data: bytes, size: int, begin: int, host_cid: bytes
    ) -> tuple[list[int], list[bytes], int]:
        """Take the protection off 1-RTT packets, up to the first of another kind.

        What aioquic's receive_datagram does for such packets, less the general cases and the
        copies of each (RFC 9001 Section 5.4). Those that are not authentic are left out.

        Returns:
            Packet numbers, payloads, and where the first of another kind begins.
        """
        starts = range(begin, len(data), size) if size >= MIN_OCTETS else range(0)
        samples: list[bytes] = []
        for at in starts:
            if data[at] & 0xC0 != 0x40 or data[at + 1 : at + 9] != host_cid:
                break
            samples.append(data[at + 13 : at + 29])
        if samples and len(samples[-1]) < SAMPLE:
            samples.pop()  # the last datagram, and too short
        if not samples:
            return [], [], begin
        keys, previous = Protection(self._crypto.recv), self._previous_aead
        masks, phase, iv, decrypt = keys.masks(samples), keys.phase, keys.iv, keys.open
        expected = self._space.expected_packet_number
        numbers: list[int] = []
        payloads: list[bytes] = []
        with memoryview(data) as view:
            for at, mask in zip(starts, range(0, len(masks), SAMPLE), strict=False):
                first = data[at] ^ masks[mask] & 0x1F
                if first & 0x18:
                    return numbers, payloads, at
                octets = (first & 0x03) + 1
                start = at + 9 + octets
                truncated = int.from_bytes(data[at + 9 : start]) ^ int.from_bytes(
                    masks[mask + 1 : mask + 1 + octets]
                )
                number = decode_packet_number(truncated, octets * 8, expected)
                header = bytes((first,)) + host_cid + truncated.to_bytes(octets)
                nonce = (iv ^ number).to_bytes(12)
                protected = view[start : at + size]
                try:
                    if first & 0x04 == phase:
                        payload = decrypt(nonce, protected, header)
                    elif previous is None:
                        return numbers, payloads, at
                    else:
                        # Sent before the peer heard of our key update, or the peer's own update.
                        payload = previous.decrypt(bytes(protected), header, number)
                except InvalidTag:
                    continue
                except CryptoError:  # another key may fit
                    return numbers, payloads, at
                finally:
                    protected.release()
                numbers.append(number)
                payloads.append(payload)
                if number >= expected:
                    expected = number + 1
        return numbers, payloads, begin + len(samples) * size

    def _note_received(self, first: int, following: int, now: float) -> None:
        """Note that packets ``first`` to ``following - 1`` were received and are to be acked."""
        self._heard = True
        space = self._space
        space.expected_packet_number = max(space.expected_packet_number, following)
        if following > space.largest_received_packet:
            space.largest_received_packet = following - 1
            space.largest_received_time = now
        space.ack_queue.add(first, following)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        # What is older than the window counts as received.
        for number in range(max(first, following - 2 * MAX_ACK_RANGES), following):
            space.received_packets.add(number)

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
