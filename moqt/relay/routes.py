"""Who publishes what (MOQT, "Namespaces"): from a Track Namespace to those that announced it.

Pure: a publisher is whatever the caller has for one, and only its identity counts.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from moqt.errors import UsageError
from moqt.names import TrackNamespace
from moqt.session.discovery import NamespaceDirectory

P = TypeVar("P", bound=Hashable)


class Routes(Generic[P]):
    """Announcements, each by a publisher and the number of its request.

    Args:
        directory: What is told to those who discover: each namespace for as long as anybody
            holds it.
    """

    def __init__(self, directory: NamespaceDirectory) -> None:
        self._directory = directory
        self._prefixes: dict[tuple[P, int], TrackNamespace] = {}
        self._numbers: dict[P, set[int]] = {}
        self._holders: dict[TrackNamespace, list[P]] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def count_of(self, publisher: P) -> int:
        """Return how many announcements of a publisher stand."""
        return len(self._numbers.get(publisher, ()))

    def add(self, publisher: P, number: int, prefix: TrackNamespace) -> None:
        """Note an announcement.

        Raises:
            UsageError: If the publisher has one of that number already.
        """
        if (publisher, number) in self._prefixes:
            raise UsageError(f"announcement {number} stands already")
        self._prefixes[publisher, number] = prefix
        self._numbers.setdefault(publisher, set()).add(number)
        self._holders.setdefault(prefix, []).append(publisher)
        self._directory.add(prefix)

    def remove(self, publisher: P, number: int) -> TrackNamespace | None:
        """Note that an announcement was withdrawn; return of what, if there was one."""
        prefix = self._prefixes.pop((publisher, number), None)
        if prefix is None:
            return None
        numbers = self._numbers[publisher]
        numbers.remove(number)
        if not numbers:
            del self._numbers[publisher]
        holders = self._holders[prefix]
        holders.remove(publisher)
        if not holders:
            del self._holders[prefix]
        self._directory.remove(prefix)
        return prefix

    def forget(self, publisher: P) -> list[TrackNamespace]:
        """Withdraw all that a publisher announced, which is gone; return what that was."""
        removed = [
            self.remove(publisher, number) for number in sorted(self._numbers.get(publisher, ()))
        ]
        return [prefix for prefix in removed if prefix is not None]

    def publishers_of(
        self, namespace: TrackNamespace, may_be_asked: Callable[[P], bool] = lambda _: True
    ) -> list[P]:
        """Return who announced the longest prefix of ``namespace`` that anybody did, each once.

        Args:
            namespace: Of the Track that is asked for.
            may_be_asked: Who counts: nobody is sent a request of its own, for instance.
        """
        for length in range(len(namespace.fields), -1, -1):
            holders = self._holders.get(TrackNamespace(namespace.fields[:length]), ())
            found = [holder for holder in dict.fromkeys(holders) if may_be_asked(holder)]
            if found:
                return found
        return []
