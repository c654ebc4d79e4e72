"""Counting what could not be opened: how its receiver alone learns of it. Pure."""

from collections import Counter

from kvcs.errors import UNOPENED, BadObject, Rejection


class Unopened:
    """Counts Objects that could not be opened, by reason.

    Attributes:
        counts: How many there were for each reason.
    """

    def __init__(self) -> None:
        self.counts: Counter[Rejection] = Counter()

    def note(self, why: BadObject) -> int | None:
        """Count one; return how many there are by now, if that is worth a line in the log.

        The first one is, the tenth, the hundredth and so on: whoever sends such Objects does not
        decide how much is written.

        Raises:
            ValueError: If it was rejected for another reason.
        """
        if why.reason not in UNOPENED:
            raise ValueError(f"{why.reason} is not a reason for which an Object is not opened")
        self.counts[why.reason] += 1
        digits = str(count := self.counts[why.reason])
        return count if digits.rstrip("0") == "1" else None

    def __str__(self) -> str:
        """For people: ``2 tag, 1 unprotected``; empty if there were none."""
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())
