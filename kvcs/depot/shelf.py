"""The shelf: which publications are held, the room that they take, and which of them go. Pure.

A publication is kept or let go as a whole: of one that is half gone nobody could make anything.
The least recently used one goes first, and none that is being read or written. The time is an
argument, in seconds since the epoch: it is kept on disk.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvcs.profile.naming import PublicationName

#: Octets of disk that an Object takes besides its payload: its row of the index.
OBJECT_OCTETS = 160


@dataclass(slots=True, eq=False)
class Holding:
    """One publication that is held."""

    name: PublicationName
    number: int
    """Its number in the index."""

    octets: int = 0
    """Payload octets, those included that are being written."""

    objects: int = 0
    finished: bool = False
    """Everything came that its last manifest promises."""

    ended: bool = False
    """And its publisher said that nothing will be added."""

    damaged: bool = False
    """Something was lost of it since."""

    kept_at: float = 0.0
    """When an Object of it was kept last."""

    used_at: float = 0.0
    """When it was asked for last."""

    readers: int = 0
    is_written: bool = False

    @property
    def cost(self) -> int:
        """Octets of disk that it takes."""
        return self.octets + OBJECT_OCTETS * self.objects

    @property
    def is_pinned(self) -> bool:
        """Whether it must stay for now."""
        return self.is_written or self.readers > 0


class Shelf:
    """Publications in the order of their last use, within a budget.

    Args:
        limit: Octets of disk that all of them may take.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._holdings: OrderedDict[PublicationName, Holding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holdings)

    def __iter__(self) -> Iterator[Holding]:
        """Yield the publications, the least recently used first."""
        return iter(tuple(self._holdings.values()))

    def get(self, name: PublicationName) -> Holding | None:
        """Return what is held of a publication."""
        return self._holdings.get(name)

    def put(self, holding: Holding) -> None:
        """Take a publication in; it is the most recently used one.

        Raises:
            ValueError: If it is held already: a mistake of the caller.
        """
        if holding.name in self._holdings:
            raise ValueError(f"{holding.name} is held already")
        self._holdings[holding.name] = holding
        self.used += holding.cost

    def remove(self, name: PublicationName) -> Holding | None:
        """Let go of a publication; return it, if it was held."""
        holding = self._holdings.pop(name, None)
        if holding is not None:
            self.used -= holding.cost
        return holding

    def touch(self, holding: Holding, now: float) -> None:
        """Note that a publication is used."""
        holding.used_at = now
        if self._holdings.get(holding.name) is holding:
            self._holdings.move_to_end(holding.name)

    def grow(self, holding: Holding, octets: int, objects: int) -> None:
        """Count Objects that are being written to a publication, or with less than 0 are not."""
        self.used -= holding.cost
        holding.octets += octets
        holding.objects += objects
        self.used += holding.cost

    def room_for(self, octets: int, objects: int) -> list[Holding] | None:
        """Return what must go so that Objects fit, the first of them first; None: they cannot.

        What is returned is still held: the caller removes it.
        """
        wanted = self.used + octets + OBJECT_OCTETS * objects - self.limit
        victims: list[Holding] = []
        for holding in self._holdings.values():
            if wanted <= 0:
                break
            if not holding.is_pinned:
                victims.append(holding)
                wanted -= holding.cost
        return victims if wanted <= 0 else None

    def could_hold(self, octets: int, objects: int) -> bool:
        """Whether Objects would fit if nothing else were held."""
        return octets + OBJECT_OCTETS * objects <= self.limit

    def stale(self, now: float, partial_s: float) -> list[Holding]:
        """Return what is not finished, and of which nothing came for so many seconds.

        What is being read or written is not among it.
        """
        return [
            holding
            for holding in self._holdings.values()
            if not holding.finished and not holding.is_pinned
            and holding.kept_at + partial_s <= now
        ]  # fmt: skip
