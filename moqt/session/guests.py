"""Who is served by all sessions of an endpoint together, and how much of it one peer may have.

A peer is who the authority says it is, and where it says nothing, where it comes from
(:func:`moqt.limits.peer_of`). Sessions share one :class:`Guests`, and each has its :class:`Visit`.
"""

from dataclasses import dataclass

from moqt.limits import Rates, Tally
from moqt.session.events import RequestId
from moqt.session.pace import BURST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLimits:
    """What one peer may have of an endpoint, over all of its sessions.

    Raises:
        ValueError: If a limit lets nothing through; the message names it.
    """

    max_sessions_of_peer: int = 512
    """Sessions; one more is closed INTERNAL_ERROR, since the draft has no code for it."""

    max_requests_of_peer: int = 16_384
    """Requests that are alive, announcements and subscriptions included; one more is answered
    EXCESSIVE_LOAD."""

    max_requests_per_s_of_peer: float = 2000.0
    """Requests in a second, on average, and four times as many at once; one more is answered
    EXCESSIVE_LOAD with a Retry Interval."""

    def __post_init__(self) -> None:
        for name in ("max_sessions_of_peer", "max_requests_of_peer", "max_requests_per_s_of_peer"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, not above 0")


@dataclass(frozen=True, slots=True)
class Busy:
    """Why a request is not taken now."""

    reason: str
    retry_ms: int | None = None


class Guests:
    """Counts what each peer has; shared by the sessions of an endpoint.

    Args:
        limits: What one may have.
    """

    def __init__(self, limits: GuestLimits | None = None) -> None:
        self.limits = limits = limits or GuestLimits()
        self._sessions = Tally[str](limits.max_sessions_of_peer)
        self._requests = Tally[str](limits.max_requests_of_peer)
        per_s = limits.max_requests_per_s_of_peer
        self._rates = Rates[str](per_s, max(1.0, per_s * BURST_S), rest="")

    def sessions_of(self, who: str) -> int:
        """Return how many sessions a peer has."""
        return self._sessions[who]

    def requests_of(self, who: str) -> int:
        """Return how many requests of a peer are alive."""
        return self._requests[who]

    def enter(self, who: str) -> bool:
        """Count a session; False, and not counted, if it is one too many."""
        return self._sessions.take(who)

    def leave(self, who: str) -> None:
        """A session that was counted is over."""
        self._sessions.give_back(who)

    def ask(self, who: str, now: float) -> Busy | None:
        """Count a request; return why it is not taken, and not counted as alive, if it is not."""
        wait_s = self._rates.take(who, now)
        if wait_s:
            per_s = self.limits.max_requests_per_s_of_peer
            return Busy(f"more than {per_s:g} requests a second", max(1, round(wait_s * 1000)))
        if not self._requests.take(who):
            return Busy(f"{self.limits.max_requests_of_peer} requests are open")
        return None

    def done(self, who: str) -> None:
        """A request that was counted is over."""
        self._requests.give_back(who)


class Visit:
    """What one session has of its endpoint.

    Args:
        guests: Where it counts; None: nowhere, as in a session that we dialled.
    """

    def __init__(self, guests: Guests | None) -> None:
        self._guests = guests
        self._who: str | None = None
        self._requests: dict[RequestId, str] = {}

    def enter(self, who: str) -> bool:
        """Count the session, once; False if it is one too many."""
        if self._guests is None:
            return True
        if not self._guests.enter(who):
            return False
        self._who = who
        return True

    def ask(self, request_id: RequestId, who: str, now: float) -> Busy | None:
        """Count a request; return why it is not taken, if it is not."""
        if self._guests is None:
            return None
        busy = self._guests.ask(who, now)
        if busy is None:
            self._requests[request_id] = who
        return busy

    def done(self, request_id: RequestId) -> None:
        """A request is over, whether it was counted or not."""
        who = self._requests.pop(request_id, None)
        if who is not None and self._guests is not None:
            self._guests.done(who)

    def leave(self) -> None:
        """The session is over, and all of its requests."""
        for request_id in list(self._requests):
            self.done(request_id)
        if self._guests is not None and self._who is not None:
            self._guests.leave(self._who)
            self._who = None
