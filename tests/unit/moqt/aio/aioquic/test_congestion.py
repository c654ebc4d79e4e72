"""The pacer and the congestion window, and why each is there.

Every workaround has a test here that passes only while aioquic needs it. When one of those
fails, the workaround can go.
"""

import pytest
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer
from aioquic.tls import Epoch

from moqt.aio.aioquic.congestion import RTT_EPOCH_S, Pacer, Reno

OCTETS = 1452


# The pacer


def packets_in(pacer: QuicPacketPacer, ticks: int, tick_s: float) -> int:
    """Count what leaves if a timer of ``tick_s`` is all that wakes the sender."""
    sent = 0
    for tick in range(1, ticks + 1):
        now = tick * tick_s
        while sent < 1_000_000 and pacer.next_send_time(now) is None:
            pacer.update_after_send(now)
            sent += 1
    return sent


@pytest.mark.parametrize("window", [20_000, 1_000_000, 20_000_000])
def test_the_pacer_lets_the_window_pass_per_round_trip(window: int) -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(window, 0.050)

    sent = packets_in(pacer, ticks=50, tick_s=0.001) * OCTETS

    assert window <= sent <= 1.25 * window + 17 * OCTETS + 0.005 * 1.25 * window / 0.050


def test_the_pacer_says_when_to_come_again() -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(100_000, 0.100)
    while (again := pacer.next_send_time(1.0)) is None:
        pacer.update_after_send(1.0)

    assert 1.001 <= again <= 1.0 + OCTETS / (1.25 * 1_000_000) + 1e-9


def test_the_pacer_keeps_out_of_the_way_of_paths_too_short_for_timers() -> None:
    pacer = Pacer(max_datagram_size=OCTETS)
    pacer.update_rate(20_000_000, 0.0003)
    for _ in range(10_000):
        pacer.update_after_send(1.0)

    assert pacer.next_send_time(1.0) is None


def test_aioquic_needs_it_while_its_own_pacer_stalls() -> None:
    stock = QuicPacketPacer(max_datagram_size=OCTETS)
    stock.update_rate(congestion_window=20_000_000, smoothed_rtt=0.001)

    assert packets_in(stock, ticks=50, tick_s=0.001) <= 50 * 3


# The congestion window


def acknowledged(algorithm: RenoCongestionControl, in_flight: int, rounds: int) -> int:
    """Send and acknowledge ``in_flight`` packets so many times; return the window then."""
    for turn in range(1, rounds + 1):
        packets = [
            QuicSentPacket(
                epoch=Epoch.ONE_RTT,
                in_flight=True,
                is_ack_eliciting=True,
                is_crypto_packet=False,
                packet_number=number,
                packet_type=QuicPacketType.ONE_RTT,
                sent_time=float(turn),
                sent_bytes=OCTETS,
            )
            for number in range(in_flight)
        ]
        for packet in packets:
            algorithm.on_packet_sent(packet=packet)
        algorithm.in_flight_at_ack = algorithm.bytes_in_flight  # type: ignore[attr-defined]
        for packet in packets:
            algorithm.on_packet_acked(now=turn + 0.5, packet=packet)
    assert algorithm.bytes_in_flight == 0
    return algorithm.congestion_window


def test_a_window_that_is_not_used_does_not_grow() -> None:
    assert acknowledged(Reno(max_datagram_size=OCTETS), in_flight=2, rounds=100) == 10 * OCTETS


def test_a_window_that_is_used_grows() -> None:
    assert acknowledged(Reno(max_datagram_size=OCTETS), in_flight=10, rounds=1) == 20 * OCTETS


def measured(algorithm: Reno, *rtts_s: float, start: int = 1) -> Reno:
    """Have round-trip times measured, one a second."""
    for second, rtt_s in enumerate(rtts_s, start):
        algorithm.on_rtt_measurement(now=float(second), rtt=rtt_s)
    return algorithm


def test_a_window_does_not_grow_once_it_fills_a_queue() -> None:
    algorithm = measured(Reno(max_datagram_size=OCTETS), 0.010, 0.034, 0.040)

    assert algorithm.queue_s == pytest.approx(0.030)
    assert algorithm.ssthresh == 10 * OCTETS
    assert acknowledged(algorithm, in_flight=10, rounds=100) == 10 * OCTETS


def test_a_window_grows_again_when_the_queue_is_gone() -> None:
    algorithm = measured(Reno(max_datagram_size=OCTETS), 0.010, 0.040, 0.012)

    assert acknowledged(algorithm, in_flight=10, rounds=100) > 10 * OCTETS


def test_one_quick_packet_in_a_round_trip_shows_that_there_is_no_queue() -> None:
    algorithm = Reno(max_datagram_size=OCTETS)
    for now, rtt_s in ((1.0, 0.010), (2.0, 0.050), (2.01, 0.011), (2.02, 0.090), (2.06, 0.080)):
        algorithm.on_rtt_measurement(now=now, rtt=rtt_s)

    assert algorithm.queue_s == pytest.approx(0.001)


def test_a_longer_route_is_not_taken_for_a_queue_for_ever() -> None:
    algorithm = measured(Reno(max_datagram_size=OCTETS), 0.010, *[0.150] * 60)
    assert algorithm.queue_s == pytest.approx(0.140)

    measured(algorithm, *[0.150] * int(2 * RTT_EPOCH_S), start=62)

    assert algorithm.queue_s == 0.0


def test_aioquic_needs_it_while_its_own_window_grows_unused() -> None:
    stock = RenoCongestionControl(max_datagram_size=OCTETS)

    assert acknowledged(stock, in_flight=2, rounds=100) > 100 * OCTETS
