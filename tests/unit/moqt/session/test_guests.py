import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.session.events import RequestId
from moqt.session.guests import GuestLimits, Guests, Visit


def test_a_peer_has_so_many_sessions_whoever_else_has_some() -> None:
    guests = Guests(GuestLimits(max_sessions_of_peer=2))
    visits = [Visit(guests) for _ in range(4)]

    assert [visit.enter("a") for visit in visits[:3]] == [True, True, False]
    assert visits[3].enter("b")
    visits[2].leave()
    assert guests.sessions_of("a") == 2
    visits[0].leave()
    assert visits[2].enter("a")


def test_requests_are_counted_over_all_sessions_of_a_peer() -> None:
    guests = Guests(GuestLimits(max_requests_of_peer=2))
    one, other = Visit(guests), Visit(guests)

    assert one.ask(RequestId(0), "a", 0.0) is None
    assert other.ask(RequestId(0), "a", 0.0) is None
    busy = one.ask(RequestId(2), "a", 0.0)
    assert busy is not None
    assert (busy.reason, busy.retry_ms) == ("2 requests are open", None)
    other.done(RequestId(0))
    assert one.ask(RequestId(4), "a", 0.0) is None


def test_the_rate_is_that_of_the_peer_and_says_when_to_come_again() -> None:
    guests = Guests(GuestLimits(max_requests_per_s_of_peer=1.0))
    visits = [Visit(guests) for _ in range(2)]
    for number in range(4):
        assert visits[number % 2].ask(RequestId(number), "a", 5.0) is None

    busy = visits[0].ask(RequestId(8), "a", 5.5)
    assert busy is not None
    assert (busy.reason, busy.retry_ms) == ("more than 1 requests a second", 500)
    assert visits[0].ask(RequestId(10), "b", 5.5) is None


def test_one_session_may_ask_for_several_peers() -> None:
    """As a relay does for its clients, with tokens of theirs or its own."""
    guests = Guests(GuestLimits(max_requests_of_peer=1))
    visit = Visit(guests)

    assert visit.ask(RequestId(0), "a", 0.0) is None
    assert visit.ask(RequestId(2), "b", 0.0) is None
    assert visit.ask(RequestId(4), "a", 0.0) is not None


def test_a_session_that_was_dialled_counts_nowhere() -> None:
    visit = Visit(None)

    assert visit.enter("a")
    assert all(visit.ask(RequestId(n), "a", 0.0) is None for n in range(100_000))
    visit.done(RequestId(0))
    visit.leave()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "ask", "done", "leave"]),
            st.integers(0, 3),
            st.sampled_from("ab"),
            st.integers(0, 5),
        )
    )
)
def test_whatever_happens_the_limits_hold_and_nothing_is_left_when_all_have_left(
    steps: list[tuple[str, int, str, int]],
) -> None:
    limits = GuestLimits(max_sessions_of_peer=2, max_requests_of_peer=4)
    guests, now = Guests(limits), 0.0
    visits = [Visit(guests) for _ in range(4)]
    entered: set[int] = set()
    asked: set[tuple[int, int]] = set()
    for step, number, who, request in steps:
        now += 1.0
        match step:
            case "enter" if number not in entered:
                if visits[number].enter(who):
                    entered.add(number)
            case "ask" if (number, request) not in asked:
                if visits[number].ask(RequestId(request), who, now) is None:
                    asked.add((number, request))
            case "done":
                visits[number].done(RequestId(request))
                asked.discard((number, request))
            case "leave":
                visits[number].leave()
                entered.discard(number)
                asked = {pair for pair in asked if pair[0] != number}
        assert sum(guests.sessions_of(w) for w in "ab") == len(entered)
        assert sum(guests.requests_of(w) for w in "ab") == len(asked)
        assert all(guests.sessions_of(w) <= 2 and guests.requests_of(w) <= 4 for w in "ab")
    for visit in visits:
        visit.leave()
    assert len(guests._sessions) == len(guests._requests) == 0


@pytest.mark.parametrize(
    "name", ["max_sessions_of_peer", "max_requests_of_peer", "max_requests_per_s_of_peer"]
)
def test_a_limit_that_lets_nothing_through_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, not above 0"):
        GuestLimits(**{name: 0})
