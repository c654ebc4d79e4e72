import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.ranges import RangeSet

NUMBERS = st.lists(st.integers(0, 40), max_size=80)


def numbers_of(ranges: RangeSet) -> list[int]:
    return [number for run in ranges.ranges() for number in run]


@given(NUMBERS)
def test_holds_what_was_added_whatever_the_order(added: list[int]) -> None:
    ranges, model = RangeSet(), set[int]()

    for number in added:
        assert ranges.add(number) == (number not in model)
        model.add(number)

    assert numbers_of(ranges) == sorted(model)
    assert len(ranges) == len(model)
    assert all((number in ranges) == (number in model) for number in range(45))


@given(NUMBERS)
def test_neighbouring_ranges_never_touch(added: list[int]) -> None:
    ranges = RangeSet()
    for number in added:
        ranges.add(number)

    runs = list(ranges.ranges())

    assert all(a.stop < b.start for a, b in itertools.pairwise(runs))


@given(NUMBERS, NUMBERS)
def test_what_is_discarded_is_gone_and_nothing_else(added: list[int], taken: list[int]) -> None:
    ranges, model = RangeSet(), set(added)
    for number in added:
        ranges.add(number)

    for number in taken:
        assert ranges.discard(number) == (number in model)
        model.discard(number)

    assert numbers_of(ranges) == sorted(model)
    assert len(ranges) == len(model)


@given(NUMBERS, st.integers(0, 40), st.integers(0, 40))
def test_gaps_are_exactly_what_is_not_there(added: list[int], start: int, stop: int) -> None:
    ranges = RangeSet()
    for number in added:
        ranges.add(number)

    gaps = [number for gap in ranges.gaps(range(start, stop)) for number in gap]

    assert gaps == [number for number in range(start, stop) if number not in set(added)]


def test_blocks_that_come_in_order_are_one_range() -> None:
    ranges = RangeSet()

    for number in range(10_000):
        ranges.add(number)

    assert list(ranges.ranges()) == [range(10_000)]
