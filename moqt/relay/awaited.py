"""What is still to come of a Track: what was asked for, and what its sources will publish.

What was asked for is PENDING until the stream that was to bring it has passed it or has ended.
Whoever else finds out what does not exist says so of the rest only: an Object that is on its way on
a slow stream is not absent because its Group has ended meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moqt.location import Location
from moqt.session.coverage import Coverage, Knowledge, before


@dataclass(slots=True, eq=False)
class Asked:
    """A range that one request is to bring, ascending."""

    at: Location
    """How far it has got: nothing below comes any more, and an Object here is not whole yet."""

    end: Location
    """Its last Location."""


class Awaited:
    """The ranges that were asked for, and from where on each source is live.

    Args:
        coverage: What is known of the Track.
    """

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.live: dict[int, Location] = {}
        """Sources that bring what is published, by number, each from a Location on."""

        self._asked: list[Asked] = []

    def ask(self, first: Location, last: Location) -> Asked:
        """Note that a range was asked for. What of it was not to be had before is PENDING again."""
        asked = Asked(first, last)
        self._asked.append(asked)
        for start, end, knowledge in self.coverage.runs(first, last):
            if knowledge in (Knowledge.UNKNOWN, Knowledge.TIMED_OUT):
                self.coverage.mark(start, end, Knowledge.PENDING)
        return asked

    def passed(self, asked: Asked, upto: Location, knowledge: Knowledge) -> None:
        """Note what a request says of everything from where it was to ``upto``."""
        if asked.at <= upto:
            first, asked.at = asked.at, upto.next()
            self._settle(first, upto, knowledge)

    def reached(self, asked: Asked, location: Location) -> None:
        """Note that a request has brought an Object: what it passed on the way does not exist."""
        if asked.at < location:
            first, asked.at = asked.at, location
            self.coverage.settle(first, before(location), Knowledge.COMPLETE)

    def over(self, asked: Asked, knowledge: Knowledge | None) -> None:
        """Note that a request brings nothing more.

        Args:
            asked: What :meth:`ask` returned.
            knowledge: What is known by that of what it has not passed; None: nothing, and it is
                PENDING still, since somebody else will be asked.
        """
        self._asked.remove(asked)
        if knowledge is not None and asked.at <= asked.end:
            self._settle(asked.at, asked.end, knowledge)

    def may_bring(self, first: Location, last: Location) -> bool:
        """Whether some of a range is still on its way."""
        return any(a.at <= last and first <= a.end for a in self._asked)

    def settle(self, first: Location, last: Location, knowledge: Knowledge) -> None:
        """Say what is known of PENDING Locations of a range, but for those on their way."""
        for start, end in self._besides_asked(first, last):
            self.coverage.settle(start, end, knowledge)

    def _settle(self, first: Location, last: Location, knowledge: Knowledge) -> None:
        """Note what one request says. That it could not tell means little if others may yet."""
        if knowledge is Knowledge.COMPLETE:
            self.coverage.settle(first, last, knowledge)
            return
        live_from = min(self.live.values(), default=None)
        if live_from is not None:
            if first >= live_from:
                return
            last = min(last, before(live_from))
        self.settle(first, last, knowledge)

    def _besides_asked(
        self, first: Location, last: Location
    ) -> Iterator[tuple[Location, Location]]:
        for asked in sorted(self._asked, key=lambda a: a.at):
            if asked.at > last:
                break
            if asked.at <= asked.end and first <= asked.end:
                if first < asked.at:
                    yield first, before(asked.at)
                first = asked.end.next()
        if first <= last:
            yield first, last
