"""How fast a peer may ask, and what becomes of who does not keep to it."""

from moqt.errors import TooManyRequests, TooManyRequestUpdates
from moqt.limits import Rate

#: Seconds whose requests may come at once.
BURST_S = 4.0


class Pace:
    """Counts the requests and the updates of a peer.

    Args:
        per_s: How many of each it may send in a second.
    """

    def __init__(self, per_s: float) -> None:
        burst = max(1.0, per_s * BURST_S)
        self._per_s = per_s
        self._requests = Rate(per_s, burst)
        self._refusals = Rate(per_s, burst)
        self._updates = Rate(per_s, burst)

    def request(self, now: float) -> int | None:
        """Count a request; return after how many milliseconds to ask again if it is one too many.

        Raises:
            TooManyRequests: If the peer was told so often that it is not going to listen.
        """
        wait_s = self._requests.take(now)
        if not wait_s:
            return None
        if self._refusals.take(now):
            raise TooManyRequests(
                f"more than {self._per_s:g} requests a second in spite of refusals"
            )
        return max(1, round(wait_s * 1000))

    def update(self, now: float) -> None:
        """Count a REQUEST_UPDATE.

        Raises:
            TooManyRequestUpdates: If it is one too many.
        """
        if self._updates.take(now):
            raise TooManyRequestUpdates(f"more than {self._per_s:g} updates a second")
