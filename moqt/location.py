"""Location: where an Object stands in its Track, and the order of places."""

from typing import NamedTuple

from moqt.codepoints import MAX_VI64


class Location(NamedTuple):
    """A place in a Track; the Group counts first, then the Object (MOQT, "Location")."""

    group: int
    object: int

    def next(self) -> "Location":
        """Return the least Location after this one.

        After the last Object ID of a Group comes Object 0 of the next. What follows the very
        last Location compares as greater than all, and cannot be put on the wire.
        """
        group, object_ = self
        if object_ < MAX_VI64:
            # As Location(...) does in twice the time. It is done several times for each Object.
            return tuple.__new__(Location, (group, object_ + 1))
        return Location(self.group + 1, 0)

    def __str__(self) -> str:
        return f"{{{self.group}, {self.object}}}"
