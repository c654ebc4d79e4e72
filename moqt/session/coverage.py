"""What is known of the Locations of a Track of which not every Object is held.

A publisher that makes a Track itself knows all of it: what it does not hold does not exist. One
that passes a Track on has parts of it: some it has been told everything about, some it has asked
for, some nobody could tell. A fetch stream says which is which (MOQT, "End of Range"), and its
reader takes silence for absence, so the difference is kept here, Location by Location.
"""

from bisect import bisect_left, bisect_right
from enum import Enum, auto

from moqt.codepoints import MAX_VI64
from moqt.errors import UsageError
from moqt.location import Location

FIRST = Location(0, 0)
LAST = Location(MAX_VI64, MAX_VI64)


class Knowledge(Enum):
    """What is known of a Location. An Object that is held stands for itself."""

    #: All of it: where no Object is held, there is none.
    COMPLETE = auto()
    #: Nothing, and nothing is expected.
    UNKNOWN = auto()
    #: It was asked for, and not obtained in the time there was.
    TIMED_OUT = auto()
    #: It was asked for, and an answer will come: COMPLETE, UNKNOWN or TIMED_OUT.
    PENDING = auto()


#: Where a run begins and ends, both included, and what is known of all of it.
Run = tuple[Location, Location, Knowledge]


def before(location: Location) -> Location:
    """Return the greatest Location below one that is not the first of all."""
    group, object_ = location
    if object_:
        return tuple.__new__(Location, (group, object_ - 1))  # see Location.next
    return Location(group - 1, MAX_VI64)


class Coverage:
    """Every Location of a Track with what is known of it: a few runs, neighbours merged.

    Args:
        otherwise: What is known of what was never marked.
        limit: Runs kept. At the bound the lowest ones become one that is UNKNOWN: it is always
            true that one does not know any more.
    """

    def __init__(self, otherwise: Knowledge = Knowledge.COMPLETE, *, limit: int = 4096) -> None:
        if limit < 3:
            raise UsageError(f"{limit} runs cannot hold one range and what lies around it")
        self.revision = 0
        """Grows with every change."""

        self._limit = limit
        # Run ``n`` is from ``_starts[n]`` to just below ``_starts[n + 1]``.
        self._starts: list[Location] = [FIRST]
        self._known: list[Knowledge] = [otherwise]

    def __len__(self) -> int:
        return len(self._starts)

    def mark(self, first: Location, last: Location, knowledge: Knowledge) -> None:
        """Note what is known of the Locations from ``first`` to ``last``, both included."""
        self._replace(first, last, knowledge, None)

    def settle(self, first: Location, last: Location, knowledge: Knowledge) -> None:
        """Note it of those Locations in the range that are PENDING, and of no others.

        For the end of a request that was to bring them, however it ended.
        """
        self._replace(first, last, knowledge, Knowledge.PENDING)

    def run_at(self, location: Location) -> Run:
        """Return the longest run of equal knowledge around a Location."""
        at = bisect_right(self._starts, location) - 1
        last = before(self._starts[at + 1]) if at + 1 < len(self._starts) else LAST
        return self._starts[at], last, self._known[at]

    def __getitem__(self, location: Location) -> Knowledge:
        return self._known[bisect_right(self._starts, location) - 1]

    def runs(self, first: Location = FIRST, last: Location = LAST) -> list[Run]:
        """Return what is known of a range, ascending."""
        found: list[Run] = []
        at = first
        while at <= last:
            _, end, knowledge = self.run_at(at)
            found.append((at, min(end, last), knowledge))
            at = end.next()
        return found

    def _replace(
        self, first: Location, last: Location, knowledge: Knowledge, only: Knowledge | None
    ) -> None:
        if not FIRST <= first <= last <= LAST:
            raise UsageError(f"no range of Locations: {first} to {last}")
        left = bisect_right(self._starts, first) - 1
        if self._moves(left, first, last, knowledge, only):
            return
        starts: list[Location] = []
        known: list[Knowledge] = []
        right = bisect_left(self._starts, last.next())  # the first run that is not touched
        runs = [(max(s, first), e, k) for s, e, k in self.runs(first, last)]
        pieces = [(s, knowledge if only is None or k is only else k) for s, _, k in runs]
        if self._starts[left] < first:
            pieces.insert(0, (self._starts[left], self._known[left]))
        end = last.next()
        if end <= LAST and (right == len(self._starts) or self._starts[right] != end):
            pieces.append((end, self._known[right - 1]))
        if left:
            left -= 1  # it may merge with what begins here
            pieces.insert(0, (self._starts[left], self._known[left]))
        if right < len(self._starts):
            pieces.append((self._starts[right], self._known[right]))
            right += 1
        for start, value in pieces:
            if not known or known[-1] is not value:
                starts.append(start)
                known.append(value)
        if self._starts[left:right] == starts and self._known[left:right] == known:
            return
        self._starts[left:right], self._known[left:right] = starts, known
        self.revision += 1
        while len(self._starts) > self._limit:
            self._known[0] = Knowledge.UNKNOWN
            del self._starts[1], self._known[1]
            if self._known[1:] and self._known[1] is Knowledge.UNKNOWN:
                del self._starts[1], self._known[1]

    def _moves(
        self, at: int, first: Location, last: Location, knowledge: Knowledge, only: Knowledge | None
    ) -> bool:
        """Have the run before run ``at`` go on into it, if that is all there is to change.

        So it is whenever a stream that brings the past gets further.
        """
        starts, known = self._starts, self._known
        if not at or starts[at] != first or known[at - 1] is not knowledge:
            return False
        if known[at] is knowledge or (only is not None and known[at] is not only):
            return False
        after = last.next()
        if after >= (starts[at + 1] if at + 1 < len(starts) else LAST):
            return False  # nothing would be left of it
        starts[at] = after
        self.revision += 1
        return True
