"""Publications that were proven bad are remembered for a while, and not too many of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.badlist import BadPublications
from kvcs.errors import ConfigError
from kvcs.profile.naming import PublicationName

HERE, THERE = "moqt://here:1/", "moqt://there:1/"


def name(number: int) -> PublicationName:
    return PublicationName(bytes(32), bytes(32), bytes(32), bytes([number]) * 16)


def test_what_is_bad_is_bad_where_it_was_seen_for_a_while() -> None:
    subject = BadPublications(remembered_s=10)
    subject.add(name(1), "another Compatibility ID", 100.0, at=HERE)

    assert subject.why_bad(name(1), 109.9, at=HERE) == "another Compatibility ID"
    assert subject.why_bad(name(1), 109.9, at=THERE) is None
    assert subject.why_bad(name(2), 109.9, at=HERE) is None
    assert subject.why_bad(name(1), 110.0, at=HERE) is None
    assert len(subject) == 0


def test_one_that_is_found_bad_again_is_remembered_from_then_on() -> None:
    subject = BadPublications(remembered_s=10, limit=2)
    for at, number in ((100.0, 1), (101.0, 2), (109.0, 1)):
        subject.add(name(number), "why", at, at=HERE)

    subject.add(name(3), "why", 109.5, at=HERE)
    assert subject.why_bad(name(2), 109.5, at=HERE) is None  # the oldest made room
    assert subject.why_bad(name(1), 118.9, at=HERE) == "why"


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5)), max_size=60))
def test_whatever_is_added_no_more_are_kept_than_the_limit_and_none_too_long(
    added: list[tuple[int, float]],
) -> None:
    subject, now, last = BadPublications(remembered_s=10, limit=4), 0.0, dict[int, float]()
    for number, seconds in added:
        now += seconds
        subject.add(name(number), "why", now, at=HERE)
        last.pop(number, None)
        last[number] = now

    newest = {number for number, at in list(last.items())[-4:] if at + 10 > now}
    known = {number for number in range(10) if subject.why_bad(name(number), now, at=HERE)}
    assert known == newest
    assert len(subject) == len(newest)


@pytest.mark.parametrize("wrong", [{"remembered_s": 0.0}, {"limit": 0}])
def test_a_limit_that_is_none_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is 0"):
        BadPublications(**wrong)
