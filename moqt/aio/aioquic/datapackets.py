"""Packets that carry stream data and nothing else: filled, sealed and registered many at a time.

Nearly all packets of a transfer are of this kind. The way they take here is aioquic's own, less
what only other packets need.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from aioquic.quic.connection import QuicNetworkPath
from aioquic.quic.packet_builder import QuicPacketBuilder

from moqt.aio.aioquic.base import AEAD_TAG
from moqt.aio.aioquic.congestion import DataPacket
from moqt.aio.aioquic.keys import KeyUpdates
from moqt.aio.aioquic.outbound import Frame, OutboundStreams
from moqt.aio.aioquic.protection import SAMPLE, Protection
from moqt.aio.aioquic.varint import varint_size
from moqt.aio.settings import QuicSettings
from moqt.aio.udp import Address

#: Octets built, sent and then forgotten about before the next are built: one segmented send.
BURST_OCTETS = 64_000

#: What tells a varint of so many octets from others, and where those end that fit into it.
_TAGS = {1: 0, 2: 0x4000, 4: 0x8000_0000, 8: 0xC000_0000_0000_0000}
_ENDS = {1: 0x40, 2: 0x4000, 4: 0x4000_0000, 8: 0x4000_0000_0000_0000}


class DataPackets(KeyUpdates, OutboundStreams):
    """A connection that sends bulk data in whole packets."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self.more_to_send = False
        self._sealed: list[bytes] = []
        self._fresh: list[DataPacket] = []  # sealed and not registered yet

    def _write_data_packets(self, builder: QuicPacketBuilder, now: float) -> None:
        """Fill whole packets with stream data, one burst of them.

        All but the last have the same size, so that one system call can send them.
        """
        if builder._packet is not None:
            builder._end_packet()
        pacer, octets = self._loss._pacer, self._max_datagram_size
        keys, peer_cid = Protection(self._crypto.send), self._peer_cid.cid
        encrypt, iv = keys.seal, keys.iv
        first = 0x40 | self._spin_bit << 5 | keys.phase | 1
        header = bytes((first,)) + peer_cid
        number = builder._packet_number
        window: Any = builder.max_flight_bytes
        window -= builder._flight_bytes
        burst = min(window, BURST_OCTETS)
        protected: list[bytes] = []
        fresh, deliver = self._fresh, self._on_frame_delivery
        overhead = len(header) + 2 + AEAD_TAG
        with closing(self._payloads(octets - overhead)) as payloads:
            while burst >= octets:
                if pacer.is_active:
                    self._pacing_at = pacer.next_send_time(now)
                    if self._pacing_at is not None:
                        break
                payload, frames = next(payloads, _NOTHING)
                if not payload:
                    break
                nonce = (iv ^ number).to_bytes(12)
                protected.append(encrypt(nonce, payload, header + (number & 0xFFFF).to_bytes(2)))
                size = len(payload) + overhead
                pacer.update_after_send(now, size)
                fresh.append(DataPacket(number, now, size, frames, deliver))
                number += 1
                burst -= size
                window -= size
        masks = keys.masks([text[2:18] for text in protected]) if protected else b""
        number = builder._packet_number
        for at, text in zip(range(0, len(masks), SAMPLE), protected, strict=True):
            head = bytes((first ^ masks[at] & 0x1F,))
            tail = bytes((number >> 8 & 0xFF ^ masks[at + 1], number & 0xFF ^ masks[at + 2]))
            self._sealed.append(b"".join((head, peer_cid, tail, text)))
            number += 1
        builder._packet_number = number
        self.more_to_send = bool(self._bulk) and self._pacing_at is None and window >= octets

    def _payloads(self, room: int) -> Generator[tuple[bytes, list[Frame]], None, None]:
        """Take what waits, in payloads of ``room`` octets; the last one may be shorter."""
        queue = self._bulk
        while queue:
            yield from self._whole_payloads(queue[0], room)
            frames: list[Frame] = []
            pieces: list[bytes | bytearray] = []
            left = room
            while left > 32 and (frame := self._next_frame(queue, left)) is not None:
                pieces += frame[:2]
                frames.append(frame[2])
                left -= len(frame[0]) + len(frame[1])
            if not pieces:
                return
            if queue or left > room - 4:
                pieces.append(bytes(left))  # PADDING
            yield b"".join(pieces), frames

    def _whole_payloads(self, out: Any, room: int) -> Iterator[tuple[bytes, list[Frame]]]:
        """Take payloads that are one frame each, as long as that fills them."""
        sender, limit = out.sender, self._send_limit(out)
        if len(sender._pending) or out.stream.is_blocked:
            return
        start = sender.highest_offset
        width = varint_size(start)
        size = room - 3 - len(out.id_octets) - width
        # The end of what was written is not taken: it may come with a FIN, or empty the stream.
        stop = min(sender._buffer_stop - 1, limit, _ENDS[width])
        prefix, length = b"\x0e" + out.id_octets, (size | 0x4000).to_bytes(2)
        tag, first = _TAGS[width], sender._buffer_start
        with memoryview(sender._buffer) as waiting:
            for at in range(start, stop - size + 1, size):
                end = at + size
                data = waiting[at - first : end - first]
                payload = b"".join((prefix, (at | tag).to_bytes(width), length, data))
                data.release()
                sender.highest_offset = end
                self._remote_max_data_used += size
                yield payload, [(out, at, end, False)]

    def _flush_builder(
        self,
        builder: QuicPacketBuilder,
        network_path: QuicNetworkPath,
        peer_cid: bytes,
        now: float,
    ) -> list[tuple[bytes, Address]]:
        """Register packets and return their datagrams: the builder's, then those of data."""
        datagrams: list[tuple[bytes, Address]] = super()._flush_builder(
            builder=builder, network_path=network_path, peer_cid=peer_cid, now=now
        )
        if self._fresh:
            self._packet_number = builder.packet_number
            network_path.bytes_sent += self._loss.on_data_sent(self._fresh, self._space, now)
            if not self._ack_eliciting_sent_since_receipt:  # RFC 9000 Section 10.1
                self._close_at = now + self._idle_timeout()
                self._ack_eliciting_sent_since_receipt = True
            address = network_path.addr
            datagrams += [(data, address) for data in self._sealed]
            self._sealed, self._fresh = [], []
        if not (self._bulk or self._urgent):
            self._loss.on_starved(now)
        return datagrams


_NOTHING: tuple[bytes, list[Frame]] = (b"", [])
