"""Congestion and loss: aioquic's algorithms, corrected.

The pacer cannot stall, and the congestion window grows only while that brings more.
"""

import math
from collections.abc import Iterable
from typing import Any

from aioquic.quic.congestion.cubic import CubicCongestionControl
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery

from moqt.aio.settings import QuicSettings

#: Below this, no timer of an event loop could space packets out.
PACING_FLOOR_S = 0.004

#: A queue on the path that is not made longer.
QUEUE_S = 0.025

#: Seconds after which the least RTT is measured anew; it counts for as long again.
RTT_EPOCH_S = 60.0


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

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        window = self.congestion_window
        super().on_packet_acked(now=now, packet=packet)  # type: ignore[misc]
        if self.congestion_window > window and (
            self.in_flight_at_ack * 2 < window or self.queue_s > QUEUE_S
        ):
            self.congestion_window = window

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

    def on_ack_received(self, **arguments: Any) -> None:
        """Note how much was in flight before this acknowledgement, then take it."""
        self._cc.in_flight_at_ack = self._cc.bytes_in_flight  # type: ignore[attr-defined]
        super().on_ack_received(**arguments)

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
