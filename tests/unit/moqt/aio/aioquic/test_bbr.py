"""A controller that follows a model of the path, on paths in virtual time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.aio.aioquic.bbr import INITIAL_PACKETS, MIN_PACKETS, Bbr, State
from moqt.aio.aioquic.congestion import DataPacket
from moqt.aio.settings import CongestionControl
from tests.unit.moqt.aio.aioquic.simulator import (
    DATA,
    OCTETS,
    Bottleneck,
    Flow,
    Path,
    World,
    share,
    transfer,
)

#: Narrow enough for a second of it to be some thousand packets.
NARROW = Path(rate=5e6)
WHOLE = NARROW.rate * DATA / OCTETS
#: Narrower still, for what takes many seconds.
THIN = Path(rtt_s=0.040, rate=1.5e6)


class Watched:
    """One endless BBR flow on a path, and what it did."""

    def __init__(self, path: Path, packets: float = math.inf) -> None:
        self.world = World()
        self.bottleneck = Bottleneck(self.world, path)
        self.flow = Flow(self.world, self.bottleneck, "bbr", packets=packets)
        self.control: Bbr = self.flow.control
        self.states: list[State] = [self.control.state]
        self.flow.watch = self._look
        self.flow.start()

    def _look(self) -> None:
        if self.control.state is not self.states[-1]:
            self.states.append(self.control.state)

    def during(self, seconds: float) -> float:
        """Let time pass; return the goodput in it."""
        before, since = self.flow.delivered, self.world.now
        self.world.run(since + seconds)
        return (self.flow.delivered - before) * DATA / (self.world.now - since)


# The model


def test_it_finds_out_what_the_path_delivers_and_how_long_it_is() -> None:
    watched = Watched(NARROW)
    watched.during(1.0)

    assert watched.states[:3] == [State.STARTUP, State.DRAIN, State.CRUISE]
    assert watched.control.rate == pytest.approx(NARROW.rate, rel=0.05)
    assert watched.control.least_rtt.value == pytest.approx(NARROW.rtt_s, rel=0.1)


def test_it_tries_for_more_now_and_then_and_empties_the_queue_of_it() -> None:
    watched = Watched(NARROW)
    watched.during(4.0)

    tried = [at for at, state in enumerate(watched.states) if state is State.UP]
    assert 2 <= len(tried) <= 5
    assert all(watched.states[at : at + 3] == [State.UP, State.DOWN, State.CRUISE] for at in tried)


@pytest.mark.parametrize("queue", [1.0, 4.0])
def test_it_fills_the_path_and_not_its_queue(queue: float) -> None:
    watched = Watched(replace(NARROW, queue=queue))
    watched.during(1.0)
    bottleneck = watched.bottleneck
    passed, queued_s = bottleneck.passed, bottleneck.queued_s

    assert watched.during(3.0) > 0.93 * WHOLE
    assert (bottleneck.queued_s - queued_s) / (bottleneck.passed - passed) < 0.008


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_it_follows_a_path_that_becomes_slower_or_faster(factor: float) -> None:
    watched = Watched(replace(NARROW, queue=8.0))
    watched.during(2.0)
    watched.bottleneck.path = replace(watched.bottleneck.path, rate=NARROW.rate * factor)
    watched.during(6.0)

    assert watched.during(2.0) > 0.9 * WHOLE * factor
    assert watched.control.rate == pytest.approx(NARROW.rate * factor, rel=0.1)


@pytest.mark.slow
def test_it_follows_a_path_that_becomes_longer() -> None:
    watched = Watched(THIN)
    watched.during(2.0)
    watched.bottleneck.path = replace(THIN, rtt_s=0.120)
    watched.during(14.0)

    assert State.PROBE_RTT in watched.states
    assert watched.control.least_rtt.value == pytest.approx(0.120, rel=0.1)
    assert watched.during(2.0) > 0.9 * THIN.rate * DATA / OCTETS


@pytest.mark.slow
def test_it_measures_the_least_rtt_only_when_it_is_not_found_anyway() -> None:
    watched = Watched(THIN)
    watched.during(25.0)

    assert State.PROBE_RTT not in watched.states


def test_busy_ends_cost_little() -> None:
    for turn_s in (0.005, 0.010):
        watched = Watched(replace(NARROW, turn_s=turn_s))
        watched.during(2.0)

        assert watched.during(4.0) > 0.8 * WHOLE


def test_an_application_that_has_little_to_send_changes_nothing_about_the_model() -> None:
    watched = Watched(NARROW, packets=4000)
    watched.during(2.0)
    before = watched.control.rate
    for _ in range(100):
        watched.flow.add(5)
        watched.during(0.1)

    assert watched.flow.is_over
    assert watched.control.rate == pytest.approx(before)


def test_an_application_that_has_little_to_send_does_not_widen_the_window() -> None:
    watched = Watched(NARROW, packets=2)
    for _ in range(100):
        watched.during(0.1)
        watched.flow.add(2)

    assert watched.control.congestion_window == INITIAL_PACKETS * OCTETS


# Loss


@pytest.mark.parametrize(("loss", "least"), [(0.001, 0.9), (0.01, 0.85), (0.03, 0.7)])
def test_random_loss_costs_little_more_than_what_is_lost(loss: float, least: float) -> None:
    path = replace(NARROW, loss=loss)

    assert transfer(path, "bbr", octets=15_000_000).rate > least * WHOLE


def test_reno_is_what_it_is_measured_by() -> None:
    path = replace(NARROW, loss=0.01)

    assert transfer(path, "reno", octets=15_000_000, limit_s=5.0).rate < 0.3 * WHOLE


@pytest.mark.parametrize("rtt_s", [0.002, 0.020, 0.080])
def test_a_shallow_queue_is_not_driven_into_heavy_loss(rtt_s: float) -> None:
    watched = Watched(replace(NARROW, rtt_s=rtt_s, queue=0.25))
    watched.during(1.0)
    lost, sent = watched.flow.recovery.lost, watched.flow.sent

    assert watched.during(5.0) > 0.75 * WHOLE
    assert watched.flow.recovery.lost - lost < 0.03 * (watched.flow.sent - sent)


def test_heavy_loss_is_yielded_to_whatever_it_comes_of() -> None:
    watched = Watched(NARROW)
    watched.during(2.0)
    before = watched.control.congestion_window
    watched.bottleneck.path = replace(NARROW, loss=0.3)
    watched.during(1.0)
    sent = watched.flow.sent
    watched.during(2.0)

    assert watched.control.congestion_window < 0.5 * before
    assert (watched.flow.sent - sent) * OCTETS < 0.5 * NARROW.rate * 2.0


def test_the_search_does_not_end_in_heavy_loss_where_the_queue_is_short() -> None:
    near = Path(rtt_s=0.0003, rate=50e6, queue=6.0, turn_s=0.0003)
    watched = Watched(near)
    watched.during(0.05)

    assert watched.flow.recovery.lost < 0.1 * watched.flow.sent


def test_persistent_congestion_leaves_the_least_window() -> None:
    watched = Watched(NARROW)
    watched.during(1.0)
    watched.control.on_persistent_congestion()

    assert watched.control.congestion_window == MIN_PACKETS * OCTETS


@pytest.mark.slow
def test_what_was_yielded_is_taken_back_soon() -> None:
    long = replace(NARROW, rtt_s=0.080)
    watched = Watched(long)
    watched.during(2.0)
    watched.bottleneck.path = replace(long, loss=0.3)
    watched.during(1.0)
    watched.bottleneck.path = long
    watched.during(8.0)

    assert watched.during(2.0) > 0.9 * WHOLE


@pytest.mark.slow
def test_after_an_outage_it_goes_on() -> None:
    watched = Watched(NARROW)
    watched.during(2.0)
    watched.bottleneck.path = replace(NARROW, loss=1.0)
    watched.during(3.0)
    watched.bottleneck.path = NARROW
    watched.during(5.0)

    assert watched.during(2.0) > 0.9 * WHOLE


# Beside others


@pytest.mark.slow
@pytest.mark.parametrize("queue", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("pair", [("bbr", "bbr"), ("bbr", "reno"), ("reno", "bbr")], ids=":".join)
def test_nobody_gets_less_than_a_fifth_of_a_fair_share(
    pair: Sequence[CongestionControl], queue: float
) -> None:
    whole = THIN.rate * DATA / OCTETS
    for outcome in share(replace(THIN, queue=queue), pair, seconds=15.0, after_s=3.0):
        assert outcome.rate > whole / 2 / 5


# Short paths


def test_a_path_too_short_for_timers_is_not_paced() -> None:
    watched = Watched(replace(NARROW, rtt_s=0.002))
    watched.during(0.5)
    assert watched.control.pacing_rate is None

    watched = Watched(NARROW)
    watched.during(0.5)
    assert watched.control.pacing_rate is not None


@pytest.mark.parametrize("turn_s", [0.0005, 0.002])
@pytest.mark.parametrize("queue", [10.0, 40.0, 200.0])
def test_where_nothing_is_far_it_is_as_fast_as_reno(queue: float, turn_s: float) -> None:
    near = Path(rtt_s=0.0002, rate=100e6, queue=queue, turn_s=turn_s)

    bbr, reno = (transfer(near, name, octets=20_000_000).rate for name in ("bbr", "reno"))
    assert bbr > 0.97 * reno


def test_a_window_that_is_acknowledged_all_at_once_is_no_idle_time() -> None:
    """Nothing is on its way then for a moment, and still the rate is that of all the time."""
    control = Bbr(max_datagram_size=OCTETS)
    for turn in range(100):
        sent_at, acked_at = turn * 0.002, turn * 0.002 + 0.0019
        packet = DataPacket(turn, sent_at, 10 * OCTETS, (), lambda *_: None)
        control.on_packet_sent(packet=packet)
        control.on_packet_acked(now=acked_at, packet=packet)
        control.on_rtt_measurement(now=acked_at, rtt=0.0019)
        control.on_acks_taken(acked_at)

    assert control.rate == pytest.approx(10 * OCTETS / 0.002, rel=0.05)


@pytest.mark.parametrize("rtt_s", [0.002, 0.020])
def test_an_application_that_has_little_to_send_does_not_end_the_search(rtt_s: float) -> None:
    watched = Watched(NARROW, packets=2)
    watched.during(0.1)
    watched.bottleneck.path = replace(NARROW, rtt_s=rtt_s)
    for _ in range(30):
        watched.flow.add(3)
        watched.during(0.1)

    assert watched.control.state is State.STARTUP


def test_the_time_in_which_the_application_had_nothing_does_not_count() -> None:
    watched = Watched(NARROW, packets=4000)
    watched.during(5.0)
    watched.flow.add(2000)

    assert watched.during(0.4) > 0.8 * WHOLE


# Whatever happens


@settings(deadline=None, max_examples=30)
@given(
    rtt_s=st.sampled_from([0.0002, 0.002, 0.02, 0.2]),
    rate=st.sampled_from([1e5, 1e6, 1e7]),
    queue=st.sampled_from([0.0, 0.25, 1.0, 10.0]),
    loss=st.sampled_from([0.0, 0.01, 0.1, 0.3]),
    turn_s=st.sampled_from([0.0, 0.001, 0.02]),
    seed=st.integers(0, 1000),
)
def test_all_data_are_sent_in_the_end(
    rtt_s: float, rate: float, queue: float, loss: float, turn_s: float, seed: int
) -> None:
    path = Path(rtt_s=rtt_s, rate=rate, queue=queue, loss=loss, turn_s=turn_s, seed=seed)
    watched = Watched(path, packets=200)
    # Where a third of all packets is lost, many probes in a row are, each twice as late.
    watched.world.run(1e7, lambda: watched.flow.is_over)

    assert watched.flow.is_over
    assert watched.control.bytes_in_flight == 0


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 300))
def test_window_and_rate_stay_within_their_bounds_whatever_is_acknowledged(
    seed: int, turns: int
) -> None:
    """Any packets, acknowledged or lost in any order, at any time."""
    draw = Random(seed)
    control = Bbr(max_datagram_size=OCTETS, between=draw.uniform)
    now, number, acked = 0.0, 0, 0
    flying: list[DataPacket] = []
    for _ in range(turns):
        now += draw.choice([0.0, 0.0001, 0.003, 0.05, 3.0]) * draw.random()
        while control.bytes_in_flight + OCTETS <= control.congestion_window and draw.random() < 0.9:
            octets = draw.randint(40, OCTETS)
            flying.append(DataPacket(number, now, octets, (), lambda *_: None))
            control.on_packet_sent(packet=flying[-1])
            number += 1
        draw.shuffle(flying)
        gone = [flying.pop() for _ in range(draw.randint(0, len(flying)))]
        lost = [gone.pop() for _ in range(draw.randint(0, len(gone)) // 4)]
        control.in_flight_at_ack = control.bytes_in_flight
        for packet in gone:
            control.on_packet_acked(now=now, packet=packet)
            acked += packet.sent_bytes
            if draw.random() < 0.5:
                control.on_rtt_measurement(now=now, rtt=max(0.0001, now - packet.sent_time))
        if lost:
            control.on_packets_lost(now=now, packets=lost)
        if draw.random() < 0.1:
            control.on_starved(now)
        if draw.random() < 0.01:
            control.on_persistent_congestion()
        control.on_acks_taken(now)

        assert control.bytes_in_flight == sum(packet.sent_bytes for packet in flying)
        assert control.congestion_window >= MIN_PACKETS * OCTETS
        assert control.congestion_window <= INITIAL_PACKETS * OCTETS + acked
        assert control.pacing_rate is None or 0 < control.pacing_rate < math.inf
        assert 0 <= control.rate < math.inf
