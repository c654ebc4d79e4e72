"""Sets of integers that come nearly in order: a few ranges instead of many numbers."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """Integers, kept as ascending ranges that do not touch.

    Blocks of a layer arrive in order, or as one run before a join and one after it, so there
    is a range or two however many blocks there are; adding at the end of a range is what is
    made cheap. Memory grows with what was added, never with how large a number is.
    """

    __slots__ = ("_count", "_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # not included
        self._count = 0

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        starts, ends = self._starts, self._ends
        # Index of the range that begins last among those not after the number.
        at = bisect_right(starts, number) - 1
        if at >= 0 and number < ends[at]:
            return False
        self._count += 1
        joins_before = at >= 0 and ends[at] == number
        joins_after = at + 1 < len(starts) and starts[at + 1] == number + 1
        if joins_before and joins_after:
            ends[at] = ends[at + 1]
            del starts[at + 1], ends[at + 1]
        elif joins_before:
            ends[at] = number + 1
        elif joins_after:
            starts[at + 1] = number
        else:
            starts.insert(at + 1, number)
            ends.insert(at + 1, number + 1)
        return True

    def discard(self, number: int) -> bool:
        """Take a number out; return whether it was in."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, number) - 1
        if at < 0 or number >= ends[at]:
            return False
        self._count -= 1
        start, end = starts[at], ends[at]
        pieces = [(a, b) for a, b in ((start, number), (number + 1, end)) if a < b]
        starts[at : at + 1] = [a for a, _ in pieces]
        ends[at : at + 1] = [b for _, b in pieces]
        return True

    def ranges(self) -> Iterator[range]:
        """Return its ranges, ascending."""
        return map(range, self._starts, self._ends)

    def gaps(self, within: range) -> Iterator[range]:
        """Return the ranges of ``within``, whose step is 1, that are not in the set."""
        at = within.start
        for start, end in zip(self._starts, self._ends, strict=True):
            if start >= within.stop:
                break
            if start > at:
                yield range(at, start)
            at = max(at, end)
        if at < within.stop:
            yield range(at, within.stop)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        return self._count


def runs(numbers: Iterable[int]) -> Iterator[range]:
    """Return numbers as the ascending ranges that they form."""
    found = RangeSet()
    for number in numbers:
        found.add(number)
    return found.ranges()
