"""Publications that were proven bad, remembered for a while. Pure; times are seconds of one clock.

A publication is proven bad by a manifest that cannot be this publication's (its Compatibility ID,
its signature, its tokens), that takes back an earlier one, or that lists another digest for what
was used. All of it may have been made up by whoever stands in between. So what is bad is bad at the
relay or producer where it was seen, and the same publication may be good at another one.
"""

from kvcs.errors import ConfigError
from kvcs.profile.naming import PublicationName

#: Seconds that one is remembered, and how many are.
REMEMBERED_S, REMEMBERED = 600.0, 1024


class BadPublications:
    """What several retrievals of one process know of bad publications.

    Share one among retrievals that trust the same producers: a signature that one of them does not
    believe makes a publication bad for all.

    Args:
        remembered_s: How long one is remembered, in seconds.
        limit: How many are; beyond it the one that was found first is forgotten.

    Raises:
        ConfigError: If a value is not more than 0.
    """

    def __init__(self, *, remembered_s: float = REMEMBERED_S, limit: int = REMEMBERED) -> None:
        for name, value in (("remembered_s", remembered_s), ("limit", limit)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}, expected more than 0")
        self._remembered_s = remembered_s
        self._limit = limit
        # In the order in which they are forgotten.
        self._known: dict[tuple[PublicationName, str], tuple[float, str]] = {}

    def add(self, name: PublicationName, why: str, now: float, *, at: str) -> None:
        """Note that a publication is bad.

        Args:
            name: The publication.
            why: What proves it, for people.
            now: The time.
            at: URI of the relay or producer where it was seen.
        """
        self._forget(now)
        self._known.pop((name, at), None)
        self._known[name, at] = now + self._remembered_s, why
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def why_bad(self, name: PublicationName, now: float, *, at: str) -> str | None:
        """Return what proves a publication bad at a relay; None: nothing is known."""
        self._forget(now)
        found = self._known.get((name, at))
        return None if found is None else found[1]

    def __len__(self) -> int:
        return len(self._known)

    def _forget(self, now: float) -> None:
        while self._known:
            oldest = next(iter(self._known))
            if self._known[oldest][0] > now:
                return
            del self._known[oldest]
