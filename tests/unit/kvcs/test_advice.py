"""Fetch or recompute: sums that can be done by hand, and what holds for every link."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.advice import CODECS, MAX_TOKENS, CacheShape, Link, Question
from kvcs.errors import ConfigError
from kvcs.kvsp.standard import STANDARD
from kvcs.measurement import Measurement, Retrieved, Setting
from kvcs.store.source import ModelShape

#: 1,000 octets a token, 10 layers.
SHAPE = CacheShape(layers=10, octets_per_token=1000)
#: A thousand tokens a second, after a second.
LINK = Link(octets_per_s=1e6, start_s=1.0)
#: What the arithmetic of a processor may add.
ROUNDING = 1 + 1e-9


def question(prefill: float = 500.0, link: Link = LINK, new_tokens: int = 0) -> Question:
    return Question(shape=SHAPE, link=link, prefill=prefill, new_tokens=new_tokens)


links = st.builds(
    Link,
    octets_per_s=st.floats(1e3, 1e12),
    start_s=st.floats(0, 60),
    rtt_s=st.just(0.0) | st.floats(1e-6, 2),
    window_octets=st.floats(1e3, 1e6),
)
questions = st.builds(
    Question,
    shape=st.builds(CacheShape, layers=st.integers(1, 100), octets_per_token=st.integers(1, 10**7)),
    link=links,
    prefill=st.floats(1, 1e6),
    new_tokens=st.integers(0, 10**5),
)
lengths = st.integers(1, 10**7)


# -- by hand -------------------------------------------------------------------------------------


def test_fetching_takes_the_start_and_time_in_proportion() -> None:
    row = question().compare(4000)

    assert (row.fetch_s, row.recompute_s, row.cache_octets) == (5.0, 8.0, 4_000_000)
    assert row.first_layer_s == pytest.approx(1.4)
    assert row.faster


def test_the_break_even_is_where_both_take_as_long_and_one_token_further() -> None:
    # 1 s + n / 1000 = n / 500 at n = 1000.
    assert question().break_even() == 1001
    assert not question().compare(1000).faster


def test_a_link_that_brings_no_more_than_computing_makes_never_wins() -> None:
    assert question(prefill=1000.0).break_even() is None
    assert question(prefill=2000.0).break_even() is None
    assert question(prefill=999.0).break_even() is not None


def test_the_rate_that_a_length_needs_is_told() -> None:
    # 2,000 tokens are computed in 1 s, after which half a second remains.
    asked = question(prefill=2000.0, link=replace(LINK, start_s=0.5))

    assert asked.needed(2000) == pytest.approx(4e6)
    assert asked.needed(1000) is None


def test_new_tokens_are_computed_while_layers_come() -> None:
    # A layer of the cache takes 0.4 s, and 0.1 s to compute 500 new tokens in it.
    row = question(prefill=500.0, new_tokens=500).compare(4000)

    assert row.fetch_then_s == 6.0
    assert row.overlapped_s == pytest.approx(5.1)
    assert row.recompute_then_s == 9.0
    # Where computing is the slower of the two, all but the first layer comes for nothing.
    slow = question(prefill=500.0, new_tokens=5000).compare(4000)
    assert slow.overlapped_s == pytest.approx(1.4 + 10.0)


def test_overlap_can_win_where_fetching_alone_does_not() -> None:
    row = question(prefill=1000.0, new_tokens=20_000).compare(4000)

    assert not row.faster
    assert row.overlapped_faster


def test_the_window_doubles_each_round_trip_until_the_rate_is_reached() -> None:
    link = Link(octets_per_s=1e9, rtt_s=0.1, window_octets=10_000)

    assert link.transfer_s(10_000) == pytest.approx(0.1)
    assert link.transfer_s(70_000) == pytest.approx(0.3)
    # A hundred milliseconds of the rate are on their way in the end, after some 14 doublings.
    late = link.transfer_s(2e9) - link.transfer_s(1e9)
    assert late == pytest.approx(1.0)
    assert 1.0 < link.transfer_s(1e9) - 1.0 < 1.5


def test_a_codec_makes_the_cache_smaller_and_decodes_so_fast() -> None:
    zstd = CODECS["shuffle-zstd"]

    assert Link.told(70e6, 0.0, zstd).octets_per_s == pytest.approx(100e6)
    assert Link.told(7e9, 0.0, zstd).octets_per_s == zstd.decoded_octets_per_s
    assert Link.told(70e6, 0.02, zstd).start_s == pytest.approx(0.13)


def test_what_was_measured_is_taken_as_it_is() -> None:
    found = Measurement.of(
        Setting(
            uri="moqt://far:1/", engine="aioquic", codec="int8", lossless=False, model="m",
            layers=10, tokens=1000, cache_octets=100_000_000, object_octets=1, datagram_octets=1200,
        ),
        [Retrieved(seconds=2.3, first_layer_s=0.5, data_octets=1, cpu_s=1.0)],
        rtt_s=0.05,
    )  # fmt: skip

    link = Link.measured(found)

    assert link.octets_per_s == pytest.approx(50e6)
    assert link.start_s == pytest.approx(0.3)
    assert link.start_s + link.transfer_s(100_000_000) == pytest.approx(2.3)


def test_shapes_are_those_of_the_descriptors() -> None:
    shape = CacheShape.of(ModelShape.parse("llama-3.1-8b").descriptor("llama-3.1-8b"))

    assert shape == CacheShape(layers=32, octets_per_token=131_072)
    assert CacheShape.of(ModelShape.parse("4,2,64,int8").descriptor("m")).octets_per_token == 1024


def test_every_codec_has_its_figures() -> None:
    assert list(CODECS) == ["raw", *STANDARD]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"octets_per_s": 0.0}, "octets_per_s is 0.0"),
        ({"octets_per_s": float("inf")}, "octets_per_s is inf"),
        ({"start_s": -1.0}, "start_s is -1.0"),
        ({"rtt_s": float("nan")}, "rtt_s is nan"),
        ({"window_octets": -1.0}, "window_octets is -1.0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(LINK, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prefill": 0.0}, "prefill is 0.0"),
        ({"prefill": float("nan")}, "prefill is nan"),
        ({"new_tokens": -1}, "new_tokens is -1"),
        ({"new_tokens": MAX_TOKENS + 1}, "new_tokens is"),
    ],
)
def test_a_question_that_cannot_be_is_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        question(**change)  # type: ignore[arg-type]


# -- for every link ------------------------------------------------------------------------------


@given(questions, lengths, lengths)
def test_more_tokens_never_come_sooner(asked: Question, one: int, other: int) -> None:
    few, many = asked.compare(min(one, other)), asked.compare(max(one, other))

    assert few.fetch_s <= many.fetch_s * ROUNDING
    assert few.first_layer_s <= many.first_layer_s * ROUNDING
    assert few.overlapped_s <= many.overlapped_s * ROUNDING


@given(questions, lengths, st.floats(1, 1000))
def test_a_faster_link_never_takes_longer(asked: Question, tokens: int, times: float) -> None:
    faster = replace(asked, link=replace(asked.link, octets_per_s=asked.link.octets_per_s * times))

    assert faster.fetch_s(tokens) <= asked.fetch_s(tokens) * ROUNDING
    at, then = asked.break_even(), faster.break_even()
    assert at is None or (then is not None and then <= at * ROUNDING + 1)


@given(questions)
def test_at_the_break_even_fetching_is_faster_and_one_token_before_it_is_not(
    asked: Question,
) -> None:
    at = asked.break_even()

    if at is None:
        assert not asked.is_faster(10**6) or asked.link.octets_per_s > asked.computed_octets_per_s
    else:
        assert asked.is_faster(at)
        assert at == 1 or not asked.is_faster(at - 1)


@given(questions, lengths)
def test_one_length_divides_those_at_which_fetching_wins_from_the_others(
    asked: Question, tokens: int
) -> None:
    at = asked.break_even()

    expected = at is not None and tokens >= at
    if asked.is_faster(tokens) != expected:
        # Nothing but rounding may make a difference.
        assert asked.fetch_s(tokens) == pytest.approx(asked.recompute_s(tokens), rel=1e-9)


@given(questions, lengths)
def test_computing_as_layers_come_is_never_later_and_never_for_nothing(
    asked: Question, tokens: int
) -> None:
    row = asked.compare(tokens)
    new_s = asked.new_tokens / asked.prefill

    assert row.overlapped_s <= row.fetch_then_s * ROUNDING
    assert row.overlapped_s * ROUNDING >= max(row.fetch_s, row.first_layer_s + new_s)


@given(questions, lengths)
def test_the_rate_that_is_needed_is_just_enough(asked: Question, tokens: int) -> None:
    needed = asked.needed(tokens)

    if needed is not None:
        enough = replace(asked, link=replace(asked.link, octets_per_s=needed))
        less = replace(asked, link=replace(asked.link, octets_per_s=needed * 0.999))
        assert enough.is_faster(tokens)
        # Where the start is nearly all of it, rounding hides what the rate changes.
        if enough.fetch_s(tokens) - asked.link.start_s > 1e-6 * asked.recompute_s(tokens):
            assert not less.is_faster(tokens)
