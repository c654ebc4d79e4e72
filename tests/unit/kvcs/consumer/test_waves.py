"""Waves: of very many segments early layers first, and in the end everything once."""

from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.events import Gap
from kvcs.consumer.waves import LAST, clipped, first_wave, stop_of
from kvcs.profile.naming import DataTrack

TRACK = DataTrack.parse("k.raw.s0")


def gap(first: int, last: int) -> Gap:
    return Gap(
        segment=0, track=TRACK, first_layer=first, last_layer=last, first_block=0, last_block=3
    )  # fmt: skip


def test_only_more_segments_than_are_asked_for_at_a_time_are_had_in_waves() -> None:
    assert [first_wave(segments, 32) for segments in (0, 1, 32, 33, 200)] == [LAST] * 3 + [0] * 2


@given(st.integers(0, 100), st.integers(1, 100))
def test_waves_go_on_and_the_last_one_ends_with_the_layers(first: int, count: int) -> None:
    wanted = range(first, first + count)
    stops = [stop_of(wanted, wave) for wave in range(LAST + 1)]

    assert stops == sorted(stops)
    assert stops[0] > first
    assert stops[-1] == wanted.stop


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(0, 11))
def test_what_is_left_of_gaps_is_what_lies_before(runs: list[tuple[int, int]], stop: int) -> None:
    gaps = [gap(min(run), max(run)) for run in runs]

    left = [layer for one in clipped(gaps, stop) for layer in _layers(one)]
    assert left == [layer for one in gaps for layer in _layers(one) if layer < stop]


def _layers(one: Gap) -> range:
    return range(one.first_layer, one.last_layer + 1)
