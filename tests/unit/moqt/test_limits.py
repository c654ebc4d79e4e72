import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.limits import FailedTokens, Rate, Rates, Tally, peer_of


def test_a_burst_is_let_through_and_then_so_many_a_second() -> None:
    rate = Rate(10.0, 3)

    assert [rate.take(100.0) for _ in range(3)] == [0.0] * 3
    assert rate.take(100.0) == pytest.approx(0.1)
    assert rate.take(100.05) == pytest.approx(0.05)
    assert rate.take(100.1) == 0.0
    assert rate.take(100.1) > 0
    assert not rate.is_whole(100.2)
    assert rate.is_whole(100.5)


def test_who_waits_as_long_as_told_is_let_through() -> None:
    rate, now = Rate(3.0, 2), 12345.678
    for _ in range(50):
        now += rate.take(now)
        assert rate.take(now) == 0.0 or rate.take(now + 1e-6) == 0.0


@given(
    st.floats(0.1, 1000),
    st.integers(1, 50),
    st.lists(st.floats(0, 2), max_size=200),
)
def test_never_more_than_the_burst_and_what_the_time_brings(
    per_s: float, burst: int, pauses: list[float]
) -> None:
    rate, now, taken = Rate(per_s, burst), 0.0, 0
    for pause_s in pauses:
        now += pause_s
        taken += rate.take(now) == 0.0
    assert taken <= burst + now * per_s + 1
    if len(pauses) <= burst:
        assert taken == len(pauses)


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_a_rate_that_lets_nothing_through_is_refused(per_s: float, burst: float) -> None:
    with pytest.raises(ValueError, match="a second"):
        Rate(per_s, burst)


def test_each_has_a_rate_of_its_own() -> None:
    rates = Rates(1.0, 1, rest="")

    assert rates.take("a", 0.0) == 0.0
    assert rates.take("a", 0.0) > 0
    assert rates.take("b", 0.0) == 0.0


def test_those_for_whom_there_is_no_room_share_one_rate_until_there_is() -> None:
    rates = Rates(1.0, 2, rest="", max_keys=2)
    for who in "ab":
        assert rates.take(who, 0.0) == rates.take(who, 0.0) == 0.0

    assert rates.take("c", 0.0) == rates.take("d", 0.0) == 0.0
    assert rates.take("e", 0.0) > 0
    assert len(rates) == 3
    assert rates.take("e", 10.0) == 0.0, "the others have been forgotten"
    assert len(rates) == 1


def test_a_tally_counts_up_to_its_limit_and_forgets_who_has_none() -> None:
    tally = Tally[str](2)

    assert [tally.take("a") for _ in range(3)] == [True, True, False]
    assert tally.take("b")
    assert (tally["a"], tally["b"], tally["c"]) == (2, 1, 0)
    tally.give_back("b")
    tally.give_back("a")
    assert tally.take("a")
    assert len(tally) == 1


def test_tokens_are_looked_at_again_once_the_peer_has_kept_still() -> None:
    failed = FailedTokens(per_s=1.0, burst=3)
    for _ in range(3):
        assert failed.wait_s("192.0.2.1", 0.0) == 0.0
        failed.failed("192.0.2.1", 0.0)
    assert failed.wait_s("192.0.2.1", 0.0) == 0.0
    failed.failed("192.0.2.1", 0.0)

    assert failed.wait_s("192.0.2.1", 0.0) == pytest.approx(1.0)
    assert failed.wait_s("192.0.2.1", 0.5) == pytest.approx(0.5)
    assert failed.wait_s("192.0.2.2", 0.5) == 0.0
    assert failed.wait_s("192.0.2.1", 1.0) == 0.0


def test_of_many_who_fail_no_more_is_kept_than_there_is_room_for() -> None:
    failed = FailedTokens(per_s=1.0, burst=1, max_keys=10)
    for number in range(1000):
        for _ in range(2):
            failed.failed(f"192.0.{number // 250}.{number % 250}", 0.0)

    assert len(failed._until) <= 10
    assert len(failed._rates) <= 11


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_a_peer_is_its_address_or_its_network(address: str, peer: str) -> None:
    assert peer_of(address) == peer


@pytest.mark.parametrize("now", [0.0, 1.8e9])
def test_it_is_the_same_by_any_clock(now: float) -> None:
    rate = Rate(100.0, 5)

    assert [rate.take(now) > 0 for _ in range(7)] == [False] * 5 + [True] * 2
    assert rate.take(now + 0.0101) == 0.0
