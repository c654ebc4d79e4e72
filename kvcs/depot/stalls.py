"""Readers that take nothing of what waits for them. Pure: the time is an argument."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class Stalls(Generic[R]):
    """Notices who waits at the same place for too long.

    Args:
        patience_s: For how long.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._standing: dict[R, tuple[int, float]] = {}

    def look(self, places: Mapping[R, int | None], now: float) -> list[R]:
        """Return who has waited at its place for too long.

        Args:
            places: Of each reader, how many octets it was sent; ``None`` if nothing waits for it.
                Who is not in it any more is forgotten.
            now: Seconds of a steady clock.
        """
        before, self._standing = self._standing, {}
        for reader, place in places.items():
            if place is not None:
                seen, since = before.get(reader, (place, now))
                self._standing[reader] = place, since if seen == place else now
        return [r for r, (_, since) in self._standing.items() if now - since >= self._patience_s]

    def forget(self) -> None:
        """Begin anew: nobody was looked at for a while."""
        self._standing.clear()
