"""The pacer and NewReno's window, and why each is there.

Every workaround has a test here that passes only while aioquic needs it. When one of those
fails, the workaround can go.
"""

import math

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace
from aioquic.tls import Epoch

from moqt.aio.aioquic.bbr import Bbr
from moqt.aio.aioquic.congestion import (
    RTT_EPOCH_S,
    Pacer,
    Recovery,
    Reno,
    recovery_for,
)
from moqt.aio.aioquic.pathmodel import initial_window
from moqt.aio.aioquic.pathmtu import BlackHole, PathMtu
from moqt.aio.settings import QuicSettings

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


def paced(window: int, rtt: float, octets: int = OCTETS) -> Pacer:
    """Return the pacer of a controller that has a window, on a path of an RTT."""
    control = Reno(max_datagram_size=octets)
    control.on_rtt_measurement(now=0.0, rtt=rtt)
    control.congestion_window = window
    pacer = Pacer(max_datagram_size=octets, control=control)
    pacer.update_rate(window, rtt)
    return pacer


@pytest.mark.parametrize("window", [20_000, 1_000_000, 20_000_000])
def test_the_pacer_lets_the_window_pass_per_round_trip(window: int) -> None:
    pacer = paced(window, 0.050)

    sent = packets_in(pacer, ticks=50, tick_s=0.001) * OCTETS

    assert window <= sent <= 1.25 * window + 17 * OCTETS + 0.005 * 1.25 * window / 0.050


def test_the_pacer_says_when_to_come_again() -> None:
    pacer = paced(100_000, 0.100)
    while (again := pacer.next_send_time(1.0)) is None:
        pacer.update_after_send(1.0)

    assert 1.001 <= again <= 1.0 + OCTETS / (1.25 * 1_000_000) + 1e-9


def test_the_pacer_keeps_out_of_the_way_of_paths_too_short_for_timers() -> None:
    pacer = paced(20_000_000, 0.0003)
    for _ in range(10_000):
        pacer.update_after_send(1.0)

    assert pacer.next_send_time(1.0) is None


@pytest.mark.parametrize(("path_s", "paces"), [(0.0005, False), (0.020, True)])
def test_a_slow_reader_at_the_end_of_a_short_path_makes_it_no_longer(
    path_s: float, paces: bool
) -> None:
    control = Reno(max_datagram_size=OCTETS)
    pacer = Pacer(max_datagram_size=OCTETS, control=control)
    for now, rtt in enumerate((0.030, path_s, 0.040, 0.050)):
        control.on_rtt_measurement(now=float(now), rtt=rtt)
    pacer.update_rate(1_000_000, 0.040)

    assert pacer.is_active is paces


@pytest.mark.parametrize("octets", [1200, 1472, 8972, 16_000])
@pytest.mark.parametrize("window", [32_000, 2_000_000])
def test_no_more_leaves_at_once_than_an_initial_window_or_a_late_timer_owes(
    octets: int, window: int
) -> None:
    pacer = paced(window, 0.050, 1200)
    pacer.resize(octets)
    burst = packets_in(pacer, ticks=1, tick_s=1.0) * octets

    owed = 1.25 * window / 0.050 * Pacer.TIMER_S
    assert burst < max(initial_window(octets), owed) + octets
    assert burst >= max(initial_window(octets), owed)


def test_no_more_leaves_at_once_than_a_socket_buffer_holds() -> None:
    pacer = paced(10_000_000, 0.010, 1200)
    pacer.buffer_octets = 100_000
    pacer.update_rate(10_000_000, 0.010)

    assert packets_in(pacer, ticks=1, tick_s=1.0) * 1200 < 100_000 + 1200


def test_a_small_packet_is_not_paced_as_if_it_were_a_full_one() -> None:
    pacer = paced(32_000, 0.050, 16_000)
    assert pacer.next_send_time(1.0) is None
    for _ in range(100):
        pacer.update_after_send(1.0, 40)

    assert pacer.next_send_time(1.0) is None


def test_aioquic_needs_it_while_its_own_pacer_stalls() -> None:
    stock = QuicPacketPacer(max_datagram_size=OCTETS)
    stock.update_rate(congestion_window=20_000_000, smoothed_rtt=0.001)

    assert packets_in(stock, ticks=50, tick_s=0.001) <= 50 * 3


def test_the_pacer_of_a_model_takes_the_rate_of_the_model() -> None:
    model = Bbr(max_datagram_size=OCTETS)
    pacer = Pacer(max_datagram_size=OCTETS, control=model)
    pacer.update_rate(1_000_000, 0.050)
    assert not pacer.is_active  # nothing was measured yet

    model.on_rtt_measurement(now=0.0, rtt=0.050)
    pacer.update_rate(1_000_000, 0.050)
    rate = model.pacing_rate

    assert rate is not None
    sent = packets_in(pacer, ticks=1000, tick_s=0.001) * OCTETS
    assert sent == pytest.approx(rate, abs=20 * OCTETS)


def test_the_pacer_of_a_model_keeps_out_of_the_way_of_paths_too_short_for_timers() -> None:
    model = Bbr(max_datagram_size=OCTETS)
    pacer = Pacer(max_datagram_size=OCTETS, control=model)
    model.on_rtt_measurement(now=0.0, rtt=0.0003)
    pacer.update_rate(20_000_000, 0.050)  # a queue, and not a long path

    assert not pacer.is_active


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        (QuicSettings(), Reno),
        (QuicSettings(congestion_control="bbr"), Bbr),
        (QuicSettings(congestion_control="reno"), Reno),
    ],
)
def test_the_settings_say_which_algorithm_it_is(settings: QuicSettings, algorithm: type) -> None:
    recovery = recovery_for(QuicConnection(configuration=QuicConfiguration()), settings)

    assert type(recovery._cc) is algorithm
    assert type(recovery._pacer) is Pacer
    assert recovery._pacer._control is recovery._cc


# The window of NewReno


def packet_of(octets: int, number: int, sent_at: float) -> QuicSentPacket:
    return QuicSentPacket(
        epoch=Epoch.ONE_RTT,
        in_flight=True,
        is_ack_eliciting=True,
        is_crypto_packet=False,
        packet_number=number,
        packet_type=QuicPacketType.ONE_RTT,
        sent_time=sent_at,
        sent_bytes=octets,
    )


def acknowledged(algorithm: QuicCongestionControl, in_flight: int, rounds: int) -> int:
    """Send and acknowledge ``in_flight`` packets so many times; return the window then."""
    for turn in range(1, rounds + 1):
        packets = [packet_of(OCTETS, number, float(turn)) for number in range(in_flight)]
        for packet in packets:
            algorithm.on_packet_sent(packet=packet)
        algorithm.in_flight_at_ack = algorithm.bytes_in_flight  # type: ignore[attr-defined]
        for packet in packets:
            algorithm.on_packet_acked(now=turn + 0.5, packet=packet)
    assert algorithm.bytes_in_flight == 0
    return algorithm.congestion_window


@pytest.mark.parametrize(
    ("octets", "window"),
    [(1200, 12_000), (1452, 14_520), (1472, 14_720), (8972, 17_944), (16_000, 32_000)],
)
@pytest.mark.parametrize("kind", [Reno, Bbr])
def test_a_window_begins_with_what_the_rfc_allows(
    kind: type[Reno] | type[Bbr], octets: int, window: int
) -> None:
    resized = kind(max_datagram_size=1200)
    resized.resize(octets)

    assert kind(max_datagram_size=octets).congestion_window == window
    assert resized.congestion_window == window


def test_a_size_that_changes_never_shrinks_the_window() -> None:
    algorithm = Reno(max_datagram_size=OCTETS)
    grown = acknowledged(algorithm, in_flight=10, rounds=3)
    for octets in (8972, 1200, 16_000):
        algorithm.resize(octets)

        assert algorithm.congestion_window == max(grown, 32_000 if octets == 16_000 else 0)


def test_a_model_whose_path_was_full_grows_with_the_size_to_its_least_window() -> None:
    model = Bbr(max_datagram_size=1200)
    model._is_full = True
    model.on_persistent_congestion()
    model.resize(8972)

    assert model.congestion_window == 4 * 8972


def test_a_window_that_had_to_give_way_grows_with_the_size_to_two_datagrams() -> None:
    algorithm = Reno(max_datagram_size=1200)
    algorithm.ssthresh = algorithm.congestion_window = 2400
    algorithm.resize(1472)

    assert algorithm.congestion_window == 2944

    algorithm.on_persistent_congestion()

    assert algorithm.congestion_window == 2944


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


@pytest.mark.parametrize(("rtt_s", "is_limited"), [(0.001, True), (0.020, False)])
def test_between_neighbours_a_window_grows_no_larger_than_a_socket_buffer(
    rtt_s: float, is_limited: bool
) -> None:
    algorithm = measured(Reno(max_datagram_size=OCTETS), rtt_s)
    algorithm.buffer_octets = 100_000
    for _ in range(20):
        acknowledged(algorithm, in_flight=algorithm.congestion_window // OCTETS, rounds=1)
        if algorithm.congestion_window > 1_000_000:
            break

    assert (algorithm.congestion_window <= 100_000 + OCTETS) == is_limited
    assert algorithm.congestion_window >= 100_000


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


# Probes of a path, and packets too large for it


class Sent:
    """A recovery, and the packets it was told of; one is acknowledged, a second after the last."""

    def __init__(self, path_mtu: PathMtu | None = None, control: Reno | Bbr | None = None) -> None:
        self.recovery = Recovery(
            congestion_control_algorithm="reno",
            initial_rtt=0.1,
            max_datagram_size=1200,
            peer_completed_address_validation=True,
            send_probe=lambda: None,
        )
        self.recovery._cc = control = control or Reno(max_datagram_size=1200)
        self.recovery._pacer = Pacer(max_datagram_size=1200, control=control)
        self.recovery.path_mtu = path_mtu
        self.space = QuicPacketSpace(is_application_data=True)
        self.recovery.spaces = [self.space]
        self.now = 0.0
        self._number = 0

    def send(self, octets: int, *, after_s: float = 0.001, eliciting: bool = True) -> int:
        self.now += after_s
        self._number += 1
        packet = packet_of(octets, self._number, self.now)
        packet.is_ack_eliciting = packet.in_flight = eliciting
        self.recovery.on_packet_sent(packet=packet, space=self.space)
        return self._number

    def probe(self, octets: int) -> int:
        number = self.send(octets)
        self.recovery.set_apart(self.space.sent_packets[number])
        return number

    def ack(self, number: int, *, after_s: float = 0.05) -> None:
        self.now += after_s
        ranges = RangeSet([range(number, number + 1)])
        self.recovery.on_ack_received(
            ack_rangeset=ranges, ack_delay=0.0, now=self.now, space=self.space
        )


@pytest.mark.parametrize("algorithm", [Reno, Bbr])
def test_what_is_lost_before_an_rtt_was_measured_leaves_nothing_to_pace_by(
    algorithm: type[Reno | Bbr],
) -> None:
    # A peer asked nothing of an acknowledgement measures no RTT, but shows what was lost before.
    sent = Sent(control=algorithm(max_datagram_size=1200))
    sent.send(1200)
    sent.ack([sent.send(100, eliciting=False) for _ in range(3)][-1])

    assert sent.recovery.lost == 1
    assert not sent.recovery._pacer.is_active
    sent.ack(sent.send(1200))
    assert sent.recovery._pacer.is_active


def test_the_loss_of_a_probe_is_neither_congestion_nor_counted() -> None:
    sent = Sent()
    sent.ack(sent.send(1200))
    window = sent.recovery.congestion_window
    sent.probe(8972)
    assert sent.recovery._cc.bytes_in_flight == 0
    sent.ack(sent.send(1200))
    sent.ack(sent.send(1200))

    assert not sent.space.sent_packets
    assert sent.recovery._cc.bytes_in_flight == 0
    assert sent.recovery.lost == 0
    assert isinstance(sent.recovery._cc, Reno)
    assert sent.recovery._cc.ssthresh is None
    assert sent.recovery.congestion_window >= window


def test_a_lost_probe_makes_no_congestion_persistent() -> None:
    for octets, probe in ((1200, False), (8972, True)):
        sent = Sent()
        sent.ack(sent.send(1200))
        first = sent.probe(octets) if probe else sent.send(octets)
        second = sent.send(1200, after_s=5.0)
        sent.ack([sent.send(1200) for _ in range(3)][-1])

        assert not sent.space.sent_packets.keys() & {first, second}
        assert (sent.recovery.congestion_window == 2 * 1200) == (not probe)


def test_large_packets_that_keep_getting_lost_while_small_ones_arrive_are_given_up() -> None:
    path_mtu = PathMtu()
    path_mtu.size = 8972
    sent = Sent(path_mtu)
    sent.ack(sent.send(1200))
    for occasion in range(1, BlackHole.OCCASIONS + 1):
        assert path_mtu.size == 8972
        sent.send(8972)
        for _ in range(3):
            number = sent.send(100)
        sent.ack(number)

        assert (path_mtu.size == 1200) == (occasion == BlackHole.OCCASIONS)
    assert sent.recovery._cc.watched_octets == math.inf


def test_large_packets_that_get_lost_now_and_then_are_kept() -> None:
    path_mtu = PathMtu()
    path_mtu.size = 8972
    sent = Sent(path_mtu)
    for _ in range(3 * BlackHole.OCCASIONS):
        sent.send(8972)
        for _ in range(3):
            number = sent.send(8972)
        sent.ack(number)

    assert sent.recovery.lost >= 2 * BlackHole.OCCASIONS
    assert path_mtu.size == 8972


def test_what_is_given_up_for_its_size_is_lost_and_no_congestion() -> None:
    sent = Sent()
    window = sent.recovery.congestion_window
    sent.send(1200)
    sent.send(5000)
    larger = [p for p in sent.space.sent_packets.values() if p.sent_bytes > 1200]
    sent.recovery.give_up(larger, now=sent.now, space=sent.space)

    assert sent.recovery._cc.bytes_in_flight == 1200
    assert sent.recovery.lost == 1
    assert sent.recovery.congestion_window == window
