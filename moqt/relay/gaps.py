"""Gaps in what came live: what is not seen for a while, though what comes after it was.

Streams overtake each other, so a gap means nothing at first. After a second in which nothing shows
itself there, it is known that there is nothing.
"""

from collections.abc import Callable

from moqt.location import Location

#: Seconds after which what has not come does not exist: after the last stream of a Group ended, or
#: after something behind a gap came.
QUIET_S = 1.0

#: Gaps remembered. At the limit the oldest are left to be settled with their Group.
MAX_GAPS = 4096


class Gaps:
    """Ranges of Locations of which nothing was seen, and since when."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Location, Location, float]] = []

    def add(self, first: Location, last: Location, now: float) -> None:
        """Note that what comes after a range was seen."""
        self._waiting = [*self._waiting[-MAX_GAPS + 1 :], (first, last, now)]

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()

    def settled(
        self, now: float, is_open: Callable[[Location, Location], bool]
    ) -> list[tuple[Location, Location]]:
        """Take out the ranges in which nothing will come any more.

        Args:
            now: The time.
            is_open: Whether streams are open that may still bring something of a range.
        """
        due = now - QUIET_S
        over = [(a, b, at) for a, b, at in self._waiting if at <= due and not is_open(a, b)]
        if over:
            left = set(over)
            self._waiting = [gap for gap in self._waiting if gap not in left]
        return [(first, last) for first, last, _ in over]
