from hypothesis import given
from hypothesis import strategies as st

from kvcs.repeats import Repeats


def test_the_first_of_a_kind_is_told_at_once_and_the_others_together() -> None:
    repeats = Repeats[str](10.0, rest="rest")

    assert repeats.add("a", 0.0) == "a"
    assert [repeats.add("a", now) for now in (1.0, 2.0, 9.9)] == [None] * 3
    assert repeats.add("b", 3.0) == "b"
    assert repeats.next_end == 10.0
    assert repeats.over(9.9) == {}
    assert repeats.over(10.0) == {"a": 3}
    assert repeats.next_end == 13.0
    assert repeats.over(13.0) == {}, "nothing followed the first"
    assert repeats.add("a", 13.0) == "a"


def test_more_kinds_than_there_is_room_for_are_one() -> None:
    repeats = Repeats[str](10.0, rest="rest", max_kinds=2)

    told = [repeats.add(kind, 0.0) for kind in "abcdeb"]

    assert told == ["a", "b", "rest", None, None, None]
    assert len(repeats) == 3
    assert repeats.over() == {"rest": 2, "b": 1}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 4), st.integers(1, 5))))
def test_whatever_happens_is_told_once_or_counted_once(
    happened: list[tuple[str, float, int]],
) -> None:
    repeats = Repeats[str](10.0, rest="rest", max_kinds=3)
    now, told = 0.0, 0
    for kind, pause_s, count in happened:
        now += pause_s
        told += sum(repeats.over(now).values())
        told += count if repeats.add(kind, now, count) is not None else 0
        assert len(repeats) <= 4
    told += sum(repeats.over().values())

    assert told == sum(count for _, _, count in happened)
    assert len(repeats) == 0
