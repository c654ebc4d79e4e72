"""How large datagrams are: probes of the path leave here, and all who reckon with a size are told.

What to probe, and when a size no longer holds, is decided in ``pathmtu.py``.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from aioquic._buffer import Buffer
from aioquic.quic.connection import PING_FRAME_CAPACITY, QuicNetworkPath
from aioquic.quic.packet import (
    QuicFrameType,
    QuicPacketType,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder

from moqt.aio.aioquic.base import AEAD_TAG
from moqt.aio.aioquic.packing import Packing
from moqt.aio.aioquic.pathmtu import BASE, CEILING, PathMtu
from moqt.aio.aioquic.varint import varint_size
from moqt.aio.settings import QuicSettings
from moqt.aio.udp import FORBIDS_FRAGMENTS, Address

log = structlog.get_logger()


class Probing(Packing):
    """A connection whose datagrams are as large as the path takes, unless their size is fixed."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        # Where a datagram may be cut on its way, what passes says nothing of the path.
        self._finds_size = settings.max_datagram_octets is None and FORBIDS_FRAGMENTS
        self._peer_takes = CEILING
        self._path_mtu: PathMtu | None = None
        self._measured_path: QuicNetworkPath | None = None

    @property
    def datagram_octets(self) -> int:
        """UDP payload of the largest datagrams that are sent now, in octets."""
        return self._max_datagram_size

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Address]]:
        """Return what is to be sent: a probe by itself, or what aioquic returns."""
        path_mtu = self._path_mtu_of_the_moment() if self._is_open() else None
        if path_mtu is None:
            return super().datagrams_to_send(now)
        if path_mtu.size != self._max_datagram_size:
            tell = log.debug if path_mtu.size > self._max_datagram_size else log.info
            tell("size of datagrams", octets=path_mtu.size, before=self._max_datagram_size)
            self._resize(path_mtu.size)
            self._give_up_larger(now)
        if self._probe_pending:
            # Where large packets vanish without a word, what asks for one must not be large.
            with self._at_base():
                return super().datagrams_to_send(now)
        size = path_mtu.next_probe(now)
        if size is not None and self._network_paths[0].is_validated:
            return self._probe_of(size, path_mtu, now)
        return super().datagrams_to_send(now)

    def get_timer(self) -> float | None:
        """Return when the connection wants to be woken, also to go on searching."""
        timer_at = super().get_timer()
        resumes_at = self._path_mtu.resumes_at if self._path_mtu is not None else None
        if timer_at is None or resumes_at is None or not self._is_open():
            return timer_at
        return min(timer_at, resumes_at)

    def refused(self, octets: int, now: float) -> bool:
        """The system took no datagram of this size.

        Returns:
            Whether others will be smaller; False where the size is fixed.
        """
        if self._path_mtu is None:
            return False
        self._path_mtu.refused(octets, now)
        self._give_up_larger(now)
        return True

    def _path_mtu_of_the_moment(self) -> PathMtu | None:
        """Return what is known of the path, once there is one; of a new one it is nothing."""
        if not (self._finds_size and self._handshake_confirmed):
            return None
        path = self._network_paths[0]
        if path is not self._measured_path:
            self._measured_path = path
            self._path_mtu = self._loss.path_mtu = PathMtu(min(CEILING, self._peer_takes))
            self._resize(BASE)
        return self._path_mtu

    def _probe_of(self, size: int, path_mtu: PathMtu, now: float) -> list[tuple[bytes, Address]]:
        """Return one datagram of ``size`` octets that says nothing (RFC 9000 Section 14.4)."""
        builder = QuicPacketBuilder(
            host_cid=self.host_cid,
            is_client=self._is_client,
            max_datagram_size=size,
            packet_number=self._packet_number,
            peer_cid=self._peer_cid.cid,
            spin_bit=self._spin_bit,
            version=self._version or 0,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, self._crypto)
        builder.start_frame(
            QuicFrameType.PING, PING_FRAME_CAPACITY, self._on_probe_delivery, (path_mtu, size)
        )
        builder._datagram_needs_padding = True
        number = builder.packet_number
        probe = self._flush_builder(
            builder=builder,
            network_path=self._network_paths[0],
            peer_cid=self._peer_cid.cid,
            now=now,
        )
        self._loss.set_apart(self._space.sent_packets[number])
        path_mtu.probe_sent(size)
        self.more_to_send = True
        return probe

    def _on_probe_delivery(self, delivery: QuicDeliveryState, path_mtu: PathMtu, size: int) -> None:
        if delivery is QuicDeliveryState.ACKED:
            path_mtu.probe_acked(size)
        else:
            path_mtu.probe_lost(size)

    def _resize(self, octets: int) -> None:
        """Have packets of another size from now on."""
        before, self._max_datagram_size = self._max_datagram_size, octets
        self._loss.resize(octets)
        if octets < before:
            # aioquic 1.7.2 sends none behind one that fits into no packet.
            self._datagrams_pending = deque(filter(self._fits, self._datagrams_pending))

    def _give_up_larger(self, now: float) -> None:
        """Have sent again what was in packets that are larger than the path takes."""
        size = self._path_mtu.size if self._path_mtu is not None else CEILING
        packets = self._space.sent_packets.values()
        larger = [packet for packet in packets if packet.sent_bytes > size]
        if larger:
            self._loss.give_up(larger, now=now, space=self._space)

    def _fits(self, data: bytes) -> bool:
        """Say whether a QUIC DATAGRAM fits into a packet, and is small enough for the peer."""
        accepted = min(
            self._remote_max_datagram_frame_size or 0,
            # A short header, two octets of packet number, and the tag of the AEAD.
            self._max_datagram_size - 3 - len(self._peer_cid.cid) - AEAD_TAG,
        )
        return 1 + varint_size(len(data)) + len(data) <= accepted

    @contextmanager
    def _at_base(self) -> Iterator[None]:
        octets, self._max_datagram_size = (
            self._max_datagram_size,
            min(BASE, self._max_datagram_size),
        )
        try:
            yield
        finally:
            self._max_datagram_size = octets

    # Where aioquic reckons with a size

    def _send_probing_frames(
        self, network_path: QuicNetworkPath, now: float
    ) -> list[tuple[bytes, Address]]:
        """Ask at an address that is new: of its path only the least is known."""
        with self._at_base():
            return super()._send_probing_frames(network_path, now)

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        """Take the peer's parameters. aioquic 1.7.2 forgets how large a datagram may be for it."""
        super()._parse_transport_parameters(data, from_session_ticket)
        takes = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if takes is not None:
            self._peer_takes = takes
            if takes < self._max_datagram_size:
                self._resize(takes)
