"""Congestion and loss: aioquic's algorithms, corrected.

The pacer cannot stall, and the congestion window grows only while that brings more.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from aioquic.quic.congestion.cubic import CubicCongestionControl
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace
from aioquic.tls import Epoch

from moqt.aio.settings import QuicSettings

ONE_RTT = Epoch.ONE_RTT
ACKED = QuicDeliveryState.ACKED

#: Below this, no timer of an event loop could space packets out.
PACING_FLOOR_S = 0.004

#: A queue on the path that is not made longer.
QUEUE_S = 0.025

#: Seconds after which the least RTT is measured anew; it counts for as long again.
RTT_EPOCH_S = 60.0


class DataPacket:
    """A packet on its way that carries STREAM frames alone; stands in for a QuicSentPacket."""

    __slots__ = ("deliver", "frames", "packet_number", "sent_bytes", "sent_time")

    epoch = ONE_RTT
    packet_type = QuicPacketType.ONE_RTT
    in_flight = True
    is_ack_eliciting = True
    is_crypto_packet = False

    def __init__(
        self,
        packet_number: int,
        sent_time: float,
        sent_bytes: int,
        frames: Sequence[tuple[Any, int, int, bool]],
        deliver: Callable[..., None],
    ) -> None:
        self.packet_number = packet_number
        self.sent_time = sent_time
        self.sent_bytes = sent_bytes
        self.frames = frames
        self.deliver = deliver

    @property
    def delivery_handlers(self) -> list[tuple[Callable[..., None], Any]]:
        """Whom aioquic tells what became of each frame."""
        return [(self.deliver, frame) for frame in self.frames]


class _ModestWindow:
    """Mixin: a window grows only while more of it would bring more.

    aioquic 1.7.2 grows it with every acknowledgement. So an application that sends little ends up
    with a window that allows a burst no path can take (RFC 9002 Section 7.8). And one that sends
    much fills whatever queue the path has, although everything urgent then stands behind it: a
    queue of :data:`QUEUE_S` keeps the path as busy as a longer one.
    """

    bytes_in_flight: int
    congestion_window: int
    ssthresh: int | None
    in_flight_at_ack = 0
    #: How long what is sent waits on its way, by the quickest packet of the last round trip.
    queue_s = 0.0
    _floors = (math.inf, math.inf)  # least RTT of this epoch, and of the one before
    _epoch_end = 0.0
    _round_least = math.inf
    _round_end = 0.0

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket | DataPacket) -> None:
        window = self.congestion_window
        super().on_packet_acked(now=now, packet=packet)  # type: ignore[misc]
        if self.congestion_window > window and (
            self.in_flight_at_ack * 2 < window or self.queue_s > QUEUE_S
        ):
            self.congestion_window = window

    def on_data_acked(self, now: float, packet: DataPacket, packets: int) -> None:
        """Take ``packets`` that were sent at one time for one, the sum of them."""
        self.on_packet_acked(now=now, packet=packet)

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        super().on_rtt_measurement(now=now, rtt=rtt)  # type: ignore[misc]
        if now >= self._epoch_end:  # routes change, so what was least does not count for ever
            self._floors = math.inf, self._floors[0]
            self._epoch_end = now + RTT_EPOCH_S
        least, before = self._floors
        if rtt < least:
            self._floors = least, before = rtt, before
        if rtt < self._round_least:
            self._round_least = rtt
        if now >= self._round_end:
            self.queue_s = self._round_least - min(least, before)
            self._round_least = math.inf
            self._round_end = now + rtt
            if self.queue_s > QUEUE_S and self.ssthresh is None:
                self.ssthresh = self.congestion_window


class Reno(_ModestWindow, RenoCongestionControl):
    """NewReno (RFC 9002 Section 7)."""


class Cubic(_ModestWindow, CubicCongestionControl):
    """CUBIC (RFC 9438)."""

    def on_data_acked(self, now: float, packet: DataPacket, packets: int) -> None:
        """Take ``packets`` one by one, as aioquic's formula wants them."""
        octets, more = divmod(packet.sent_bytes, packets)
        for index in range(packets):
            packet.sent_bytes = octets + (index < more)
            self.on_packet_acked(now=now, packet=packet)


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

    @property
    def is_active(self) -> bool:
        """Whether packets are spaced out at all."""
        return self._rate is not None

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


class Recovery(QuicPacketRecovery):
    """Loss recovery that knows how full the window was, and counts losses."""

    lost = 0

    _cc: Reno | Cubic
    _pacer: Pacer

    def on_data_sent(
        self, packets: Sequence[DataPacket], space: QuicPacketSpace, now: float
    ) -> int:
        """Register packets that are sent together; return their octets."""
        for packet in packets:
            space.sent_packets[packet.packet_number] = packet  # type: ignore[assignment]
        space.ack_eliciting_in_flight += len(packets)
        self._time_of_last_sent_ack_eliciting_packet = now
        total: Any = _sum_of(packets)
        self._cc.on_packet_sent(packet=total)
        return int(total.sent_bytes)

    def on_ack_received(
        self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace
    ) -> None:
        """Note how much was in flight before this acknowledgement, then take it."""
        self._cc.in_flight_at_ack = self._cc.bytes_in_flight
        if space.is_application_data:
            self._take_data_packets(ack_rangeset, now, space)
        super().on_ack_received(
            ack_rangeset=ack_rangeset, ack_delay=ack_delay, now=now, space=space
        )

    def _take_data_packets(
        self, ack_rangeset: RangeSet, now: float, space: QuicPacketSpace
    ) -> None:
        """Take what was acknowledged of data packets, all but the last packet.

        That one aioquic finds and measures the RTT by. Frames that follow each other on a stream
        are told as one.
        """
        sent: dict[int, Any] = space.sent_packets
        numbers = list(sent)
        acked: list[int] = []
        for known in ack_rangeset:
            acked += numbers[bisect_left(numbers, known.start) : bisect_left(numbers, known.stop)]
        packets = [sent[number] for number in acked[:-1] if type(sent[number]) is DataPacket]
        if not packets:
            return
        for _, together in groupby(packets, attrgetter("sent_time")):
            burst = list(together)
            self._cc.on_data_acked(now, _sum_of(burst), len(burst))
        space.ack_eliciting_in_flight -= len(packets)
        deliver = packets[0].deliver
        told: Any = None
        first = following = 0
        for packet in packets:
            del sent[packet.packet_number]
            for stream, start, stop, fin in packet.frames:
                if stream is not told or start != following:
                    if told is not None:
                        deliver(ACKED, told, first, following, False)
                    told, first = stream, start
                following = stop
                if fin:
                    deliver(ACKED, told, first, following, True)
                    told = None
        if told is not None:
            deliver(ACKED, told, first, following, False)

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


def _sum_of(packets: Sequence[DataPacket]) -> DataPacket:
    last = packets[-1]
    octets = sum([packet.sent_bytes for packet in packets])
    return DataPacket(last.packet_number, last.sent_time, octets, (), last.deliver)


def recovery_for(connection: QuicConnection, settings: QuicSettings) -> Recovery:
    """Return the recovery that replaces the one ``connection`` was made with."""
    octets = settings.max_datagram_octets
    recovery = Recovery(
        congestion_control_algorithm=settings.congestion_control,
        initial_rtt=connection.configuration.initial_rtt,
        max_datagram_size=octets,
        peer_completed_address_validation=not connection.configuration.is_client,
        send_probe=connection._send_probe,
        logger=connection._logger,
    )
    algorithm = Reno if settings.congestion_control == "reno" else Cubic
    recovery._cc = algorithm(max_datagram_size=octets)
    recovery._pacer = Pacer(max_datagram_size=octets)
    return recovery
