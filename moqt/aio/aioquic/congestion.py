"""Congestion and loss: aioquic's NewReno and its recovery, corrected, and where BBR is put in.

The pacer cannot stall, and the congestion window grows only while that brings more. Datagrams may
become larger and smaller meanwhile.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace
from aioquic.tls import Epoch

from moqt.aio.aioquic.bbr import Bbr
from moqt.aio.aioquic.pathmodel import PACING_FLOOR_S, initial_window
from moqt.aio.aioquic.pathmtu import BASE, PathMtu
from moqt.aio.settings import QuicSettings

ONE_RTT = Epoch.ONE_RTT
ACKED = QuicDeliveryState.ACKED

#: A queue on the path that is not made longer.
QUEUE_S = 0.025

#: How far the rate is above window / RTT, so that pacing does not limit (RFC 9002 Section 7.7).
PACING_GAIN = 1.25

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


class Reno(RenoCongestionControl):
    """NewReno (RFC 9002 Section 7), whose window grows only while more would bring more.

    aioquic 1.7.2 grows it with every acknowledgement. So an application that sends little ends up
    with a window that allows a burst no path can take (RFC 9002 Section 7.8). And one that sends
    much fills whatever queue the path has, although everything urgent then stands behind it: a
    queue of :data:`QUEUE_S` keeps the path as busy as a longer one. Between neighbours the only
    queue is the receiver's socket buffer, which loses what it cannot hold.
    """

    in_flight_at_ack = 0
    #: The size of packets whose arrival is worth knowing, and the last such packet.
    watched_octets = math.inf
    witness = -1
    #: How long what is sent waits on its way, by the quickest packet of the last round trip.
    queue_s = 0.0
    #: What a socket buffer holds. On a path too short for pacing all of the window may meet in one.
    buffer_octets = math.inf
    #: Whether the path itself is too short for pacing, however long ends take to read.
    is_short = False
    _floors = (math.inf, math.inf)  # least RTT of this epoch, and of the one before
    _epoch_end = 0.0
    _round_least = math.inf
    _round_end = 0.0

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.congestion_window = initial_window(max_datagram_size)

    def resize(self, octets: int) -> None:
        """Go on with datagrams of another size. The window never shrinks by it.

        It holds two datagrams at least, and while it never had to give way, what it would have
        begun with (RFC 9002 Section 7.2).
        """
        self._max_datagram_size = octets
        least = 2 * octets if self.ssthresh is not None else initial_window(octets)
        self.congestion_window = max(self.congestion_window, least)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """Note a packet that arrived."""
        if packet.sent_bytes >= self.watched_octets:
            self.witness = packet.packet_number
        self._take_acked(now, packet)

    def on_data_acked(self, now: float, packet: DataPacket) -> None:
        """Note packets that left at one time, as the sum of them."""
        self._take_acked(now, packet)

    def _take_acked(self, now: float, packet: QuicSentPacket | DataPacket) -> None:
        window = self.congestion_window
        super().on_packet_acked(now=now, packet=packet)  # type: ignore[arg-type]
        if self.congestion_window > window and (
            self.in_flight_at_ack * 2 < window
            or self.queue_s > QUEUE_S
            or (self.is_short and window >= self.buffer_octets)
        ):
            self.congestion_window = window

    def on_acks_taken(self, now: float) -> bool:
        """Leave it at what each acknowledgement of a batch has changed; return False."""
        return False

    def on_starved(self, now: float) -> None:
        """Make nothing of an application that has no more to send: see ``in_flight_at_ack``."""

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Take the RTT of the newest packet that an acknowledgement is about."""
        super().on_rtt_measurement(now=now, rtt=rtt)
        if now >= self._epoch_end:  # routes change, so what was least does not count for ever
            self._floors = math.inf, self._floors[0]
            self._epoch_end = now + RTT_EPOCH_S
        least, before = self._floors
        if rtt < least:
            self._floors = least, before = rtt, before
            self.is_short = min(rtt, before) < PACING_FLOOR_S
        if rtt < self._round_least:
            self._round_least = rtt
        if now >= self._round_end:
            self.queue_s = self._round_least - min(least, before)
            self._round_least = math.inf
            self._round_end = now + rtt
            if self.queue_s > QUEUE_S and self.ssthresh is None:
                self.ssthresh = self.congestion_window

    def pace(self, smoothed_rtt: float) -> float | None:
        """Return how many octets per second to send; None if nothing can be paced.

        Without an RTT, 0 here, there is no rate: packets may be lost before one was measured. An
        end that takes long to read makes the RTT longer, and not the path: there the timer of an
        end that takes as long would only be later than what acknowledgements ask for.
        """
        if self.is_short or smoothed_rtt <= 0:
            return None
        return PACING_GAIN * self.congestion_window / smoothed_rtt


class Pacer(QuicPacketPacer):
    """Spaces packets out where that can work, and never stalls.

    aioquic 1.7.2 sizes its bucket in time, a fraction of the window at the window's own rate: as
    the window grows, the bucket shrinks below one packet, and each timer tick then lets two
    packets out. Here the bucket is counted in octets and holds what a late timer would owe, and at
    least an initial window (RFC 9002 Section 7.7).
    """

    #: How late a timer may be without a loss of rate.
    TIMER_S = 0.004
    #: What a socket buffer holds.
    buffer_octets = math.inf

    def __init__(self, *, max_datagram_size: int, control: Reno | Bbr) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._control = control
        self._rate: float | None = None
        self._bucket = self._bucket_octets = float(initial_window(max_datagram_size))

    def resize(self, octets: int) -> None:
        """Go on with datagrams of another size."""
        self._max_datagram_size = octets
        self._fit_bucket()

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

    def update_after_send(self, now: float, octets: int | None = None) -> None:
        """Account for one packet, of the full size if ``octets`` does not say otherwise."""
        if self._rate is not None:
            self._bucket -= octets or self._max_datagram_size

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Take over the rate that the controller has for its window, and an RTT."""
        self._rate = self._control.pace(smoothed_rtt)
        if self._rate is not None:
            self._fit_bucket()

    def _fit_bucket(self) -> None:
        owed = min((self._rate or 0.0) * self.TIMER_S, self.buffer_octets)
        self._bucket_octets = max(initial_window(self._max_datagram_size), owed)


class Recovery(QuicPacketRecovery):
    """Loss recovery that knows how full the window was, counts losses, and knows probes of size."""

    _cc: Reno | Bbr  # type: ignore[assignment]  # only what is called here
    _pacer: Pacer
    lost = 0
    #: What is told of packets larger than the base; None where the size is fixed.
    path_mtu: PathMtu | None = None
    #: The packet that probed for a larger size last.
    probe_number = -1

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
        if self._cc.watched_octets != math.inf:
            self._judge(space.largest_acked_packet, now)
        if self._cc.on_acks_taken(now) and self._rtt_initialized:
            self._pacer.update_rate(self._cc.congestion_window, self._rtt_smoothed)

    def on_starved(self, now: float) -> None:
        """Note that all has been sent that there is to send."""
        self._cc.on_starved(now)

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
            self._cc.on_data_acked(now, _sum_of(burst))
        space.ack_eliciting_in_flight -= len(packets)
        watched = self._cc.watched_octets
        if watched != math.inf:
            arrived = [p.packet_number for p in packets if p.sent_bytes >= watched]
            self._cc.witness = max(arrived, default=self._cc.witness)
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

    def expect_buffer(self, octets: int) -> None:
        """Send no more at once than what a socket buffer of this size holds."""
        self._cc.buffer_octets = self._pacer.buffer_octets = octets

    def resize(self, octets: int) -> None:
        """Go on with datagrams of another size."""
        self._cc.resize(octets)
        self._pacer.resize(octets)

    def set_apart(self, probe: QuicSentPacket) -> None:
        """Keep a probe out of the congestion window, in which data would have to wait behind it.

        It is one datagram, of a few in all, and its loss says nothing of congestion (RFC 9000
        Section 14.4).
        """
        self._cc.on_packets_expired(packets=[probe])
        probe.in_flight = False
        self.probe_number = probe.packet_number

    def give_up(self, packets: list[QuicSentPacket], *, now: float, space: QuicPacketSpace) -> None:
        """Take packets for lost that were too large for the path: no sign of congestion."""
        self.lost += sum(packet.packet_number != self.probe_number for packet in packets)
        super()._on_packets_lost(congestion_event=False, now=now, packets=packets, space=space)

    def _on_packets_lost(
        self,
        *,
        congestion_event: bool = True,
        now: float,
        packets: Iterable[QuicSentPacket],
        space: QuicPacketSpace,
        **arguments: Any,
    ) -> None:
        packets = list(packets)
        if not packets:
            return
        data = [packet for packet in packets if packet.packet_number != self.probe_number]
        if congestion_event:
            self.lost += len(data)
        self._suspect(data)
        super()._on_packets_lost(
            congestion_event=congestion_event, now=now, packets=packets, space=space, **arguments
        )

    def _in_persistent_congestion(self, *, packets: list[QuicSentPacket]) -> bool:
        probe = self.probe_number
        return super()._in_persistent_congestion(
            packets=[packet for packet in packets if packet.packet_number != probe]
        )

    def _suspect(self, packets: list[QuicSentPacket]) -> None:
        """Tell of the loss of what may have been too large."""
        large = [packet for packet in packets if packet.sent_bytes > BASE]
        if self.path_mtu is not None and large:
            self.path_mtu.lost(
                first=large[0].packet_number,
                last=large[-1].packet_number,
                octets=min(packet.sent_bytes for packet in large),
            )
            self._cc.watched_octets = self.path_mtu.suspected

    def _judge(self, largest_acked: int, now: float) -> None:
        """Tell of what arrived in spite of a suspicion."""
        path_mtu = self.path_mtu
        if path_mtu is not None:
            path_mtu.arrived(self._cc.witness)
            path_mtu.heard(largest_acked, now)
            self._cc.watched_octets = path_mtu.suspected


def _sum_of(packets: Sequence[DataPacket]) -> DataPacket:
    last = packets[-1]
    octets = sum([packet.sent_bytes for packet in packets])
    return DataPacket(last.packet_number, last.sent_time, octets, (), last.deliver)


def recovery_for(connection: QuicConnection, settings: QuicSettings) -> Recovery:
    """Return the recovery that replaces the one ``connection`` was made with."""
    octets = connection.configuration.max_datagram_size
    recovery = Recovery(
        congestion_control_algorithm="reno",  # of those that aioquic knows; replaced below
        initial_rtt=connection.configuration.initial_rtt,
        max_datagram_size=octets,
        peer_completed_address_validation=not connection.configuration.is_client,
        send_probe=connection._send_probe,
        logger=connection._logger,
    )
    control: Reno | Bbr
    if settings.congestion_control == "bbr":
        control = Bbr(max_datagram_size=octets)
    else:
        control = Reno(max_datagram_size=octets)
    recovery._cc = control
    recovery._pacer = Pacer(max_datagram_size=octets, control=control)
    return recovery
