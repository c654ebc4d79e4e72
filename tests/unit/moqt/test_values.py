from moqt.values import hot_value


@hot_value()
class Point:
    x: int
    y: int = 0


@hot_value(kw_only=True)
class Named:
    name: str


def test_values_are_equal_and_hashed_by_what_they_are() -> None:
    assert Point(1) == Point(1, 0) != Point(1, 2)
    assert len({Point(1, 2), Point(1, 2), Point(2, 1)}) == 2
    assert repr(Named(name="a")) == "Named(name='a')"
    match Point(3, 4):
        case Point(x, y):
            assert (x, y) == (3, 4)


def test_the_type_checker_sees_that_they_are_frozen() -> None:
    Point(1).x = 2  # type: ignore[misc]  # mypy tells of an ignore that is not needed
    assert not hasattr(Point(1), "__dict__")
