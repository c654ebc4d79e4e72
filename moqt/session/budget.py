"""How many payload octets are held, over any number of Tracks, against a limit."""

from collections.abc import Callable


class ByteBudget:
    """Counts payload octets held by any number of Tracks, against a limit.

    Nothing here blocks: a publisher that wants to wait for room registers with ``when_room``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def has_room(self) -> bool:
        """Whether an Object may be added now. The last one added may pass the limit."""
        return self.used < self.limit

    def take(self, octets: int) -> None:
        """Count octets that are held from now on."""
        self.used += octets

    def give_back(self, octets: int) -> None:
        """Count octets that are held no longer, and tell those who wait once there is room."""
        self.used -= octets
        if self.has_room and self._waiting:
            waiting, self._waiting = self._waiting, []
            for watcher in waiting:
                watcher()

    def when_room(self, watcher: Callable[[], None]) -> None:
        """Have ``watcher`` called once, the next time octets are given back and there is room."""
        self._waiting.append(watcher)
