from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64
from moqt.location import Location

IDS = st.integers(0, MAX_VI64) | st.integers(MAX_VI64 - 3, MAX_VI64)


def test_the_group_counts_before_the_object() -> None:
    assert Location(1, 9) < Location(2, 0) < Location(2, 1)
    assert max(Location(3, 7), Location(2, 99)) == Location(3, 7)


@given(IDS, IDS, IDS, IDS)
def test_nothing_lies_between_a_location_and_the_next(a: int, b: int, c: int, d: int) -> None:
    location, other = Location(a, b), Location(c, d)

    assert location < location.next()
    assert other <= location or other >= location.next()


def test_the_next_location_after_a_full_group_begins_the_next_group() -> None:
    assert Location(4, 7).next() == Location(4, 8)
    assert Location(4, MAX_VI64).next() == Location(5, 0)


def test_prints_as_the_draft_writes_it() -> None:
    assert str(Location(3, 7)) == "{3, 7}"
