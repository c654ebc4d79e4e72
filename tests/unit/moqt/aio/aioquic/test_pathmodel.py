"""What is made of acknowledgements: rates, lumps, the least RTT."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.aioquic.pathmodel import TURN_S, DeliveryRate, LeastRtt, Lumps, Peak

OCTETS = 1000
RTT_S = 0.020


def rates(
    acked_at: list[tuple[float, float]], measured: DeliveryRate | None = None
) -> list[float | None]:
    """Send a packet at each first time, have it acknowledged at the second; return the rates."""
    measured = measured or DeliveryRate()
    turns: dict[float, list[float]] = {}
    for sent_at, at in acked_at:
        turns.setdefault(at, []).append(sent_at)
    sends = sorted(sent_at for sent_at, _ in acked_at)
    found: list[float | None] = []
    flying = 0
    for at in sorted(turns):
        while sends and sends[0] < at:
            measured.sent(sends.pop(0), idle=not flying)
            flying += 1
        flying -= len(turns[at])
        sample = measured.acked(at, OCTETS * len(turns[at]), max(turns[at]))
        found.append(sample and sample.rate)
    return found


def test_the_rate_is_what_is_delivered_in_a_round_trip() -> None:
    found = rates([(n / 1000, n / 1000 + RTT_S) for n in range(200)])

    assert found[-1] == pytest.approx(1000 * OCTETS)


def test_acknowledgements_that_come_all_at_once_make_no_path_look_fast() -> None:
    # A packet a millisecond; those of every 50 ms are acknowledged together, at the end of it.
    found = rates([(n / 1000, math.ceil((n + 1 + 20) / 50) * 0.05) for n in range(1000)])

    assert max(rate for rate in found if rate is not None) <= 1000 * OCTETS * 1.05


def test_acknowledgements_that_were_held_up_make_no_path_look_fast() -> None:
    # For a while none come, then those of the time since with the next one.
    def at(sent_at: float) -> float:
        due = sent_at + RTT_S
        return 0.160 if 0.100 < due < 0.160 else due

    found = rates([(n / 1000, at(n / 1000)) for n in range(400)])

    assert max(rate for rate in found if rate is not None) <= 1000 * OCTETS * 1.05


def test_acknowledgements_that_become_quicker_make_no_path_look_fast() -> None:
    # Each takes 20 ms longer than it might; then none does, and a lump of them comes at once.
    due = [n / 1000 + RTT_S + (0.02 if n < 200 else 0.0) for n in range(400)]
    found = rates([(n / 1000, max(due[: n + 1])) for n in range(400)])

    assert max(rate for rate in found if rate is not None) <= 1000 * OCTETS * 1.05


def test_no_rate_is_told_of_less_than_a_turn_of_a_busy_end() -> None:
    found = rates([(n / 10_000, n / 10_000 + 0.0005) for n in range(200)])

    turn = int((TURN_S - 0.0005) * 10_000)
    assert not any(found[: turn - 1])
    assert all(found[turn + 1 :])
    assert found[-1] == pytest.approx(10_000 * OCTETS, rel=0.05)


def test_the_time_in_which_nothing_was_sent_does_not_count() -> None:
    measured = DeliveryRate()
    rates([(n / 1000, n / 1000 + RTT_S) for n in range(100)], measured)

    found = rates([(9 + n / 1000, 9 + n / 1000 + RTT_S) for n in range(100)], measured)

    assert found[-1] == pytest.approx(1000 * OCTETS)


@given(st.lists(st.floats(0.0, 0.05), min_size=40, max_size=80))
def test_no_rate_is_above_that_at_which_was_sent(held_up: list[float]) -> None:
    """However acknowledgements are held up: the time that sending took counts as well."""
    packets, latest = [], 0.0
    for n, held_up_s in enumerate(held_up):
        latest = max(latest, n / 1000 + RTT_S + held_up_s)  # nothing overtakes
        packets.append((n / 1000, latest))

    for rate in rates(packets):
        assert rate is None or rate <= 1000 * OCTETS * 1.1


def test_a_peak_lasts_for_two_periods_with_values() -> None:
    peak = Peak()
    peak.note(5.0)
    peak.turn()
    peak.note(3.0)
    assert peak.value == 5.0

    peak.turn()
    peak.turn()  # nothing came in between: this one does not count
    assert peak.value == 3.0


def test_what_comes_evenly_is_no_lump() -> None:
    lumps = Lumps()
    for turn in range(1, 100):
        lumps.acked(turn * 0.001, OCTETS, 1000.0 * OCTETS)

    assert lumps.octets == pytest.approx(OCTETS)


def test_what_comes_at_once_is_a_lump_and_is_forgotten_after_a_while() -> None:
    lumps = Lumps()
    for turn in range(1, 10):
        lumps.acked(turn * 0.050, 50 * OCTETS, 1000.0 * OCTETS)
    assert lumps.octets == pytest.approx(50 * OCTETS)

    for turn in range(1, 2 * Lumps.PERIOD + 1):
        lumps.acked(0.5 + turn * 0.001, OCTETS, 1000.0 * OCTETS)
        lumps.turn()

    assert lumps.octets < 50 * OCTETS


def test_the_least_rtt_is_old_when_it_was_not_found_for_long() -> None:
    least = LeastRtt()
    assert not least.is_old(100.0)

    least.note(1.0, 0.020)
    least.note(9.0, 0.022)  # as good as found
    assert least.value == 0.020
    assert not least.is_old(18.0)

    least.note(18.0, 0.050)
    assert least.is_old(19.5)


def test_what_meets_no_queue_replaces_a_least_rtt_that_is_old() -> None:
    least = LeastRtt()
    least.note(0.0, 0.020)
    least.sent_when_idle(5.0)
    least.note(5.1, 0.050)
    assert least.value == 0.020

    least.sent_when_idle(11.0)
    least.note(11.1, 0.050)

    assert least.value == 0.050
    assert not least.is_old(20.0)
