"""Whom a listener lets begin a handshake, and who must prove its address first. Pure.

A handshake costs a signature and some memory before anything is known of who asks, and whoever
begins one and leaves may write any address as its own (RFC 9000 Section 8.1).
"""

from enum import Enum

from moqt.aio.settings import QuicSettings
from moqt.limits import MAX_KEYS, Rates, Tally

#: Of the handshakes under way at once one peer may have this part.
_PART_OF_PEER = 4
#: Seconds whose handshakes may come at once.
_BURST_S = 4.0
#: Seconds for which a peer is refused that did not stop asking. Otherwise it is back at once, and
#: its next handshake and requests cost as much again.
BARRED_S = 5.0


class Verdict(Enum):
    """What is answered to a client's first packet."""

    ACCEPT = "accept"
    RETRY = "retry"
    REFUSE = "refuse"


class Door:
    """Counts connections and handshakes, by peer; see :func:`moqt.limits.peer_of`.

    Args:
        settings: The limits.
    """

    def __init__(self, settings: QuicSettings) -> None:
        self._settings = settings
        self._connections = Tally[str](settings.max_connections_of_peer)
        part = max(1, settings.max_handshakes // _PART_OF_PEER)
        self._handshakes = Tally[str](part)
        self._begun = 0
        self._there = 0
        self._barred: dict[str, float] = {}
        per_s = settings.max_handshakes_per_s_of_peer
        self._rates = Rates[str](per_s, max(1.0, per_s * _BURST_S), rest="")

    @property
    def handshakes(self) -> int:
        """Handshakes under way."""
        return self._begun

    @property
    def asks_for_proof(self) -> bool:
        """Whether who comes now must prove its address."""
        return self._settings.retry or self._begun >= self._settings.retry_above

    def asked(self, peer: str, now: float, *, proved: bool) -> Verdict:
        """Decide about a client's first packet, and count it if it is accepted.

        Args:
            peer: Who asks.
            now: Seconds of a steady clock.
            proved: Whether it came with a token that we sent to its address.
        """
        settings = self._settings
        if self._there >= settings.max_connections or self._is_barred(peer, now):
            return Verdict.REFUSE
        if self.asks_for_proof and not proved:
            return Verdict.RETRY
        if self._begun >= settings.max_handshakes or self._rates.take(peer, now):
            return Verdict.REFUSE
        if not self._handshakes.take(peer):
            return Verdict.REFUSE
        if not self._connections.take(peer):
            self._handshakes.give_back(peer)
            return Verdict.REFUSE
        self._begun += 1
        self._there += 1
        return Verdict.ACCEPT

    def bar(self, peer: str, now: float) -> None:
        """Refuse a peer for :data:`BARRED_S`: it asks and asks although it was told to wait."""
        self._barred.pop(peer, None)
        while self._barred and next(iter(self._barred.values())) <= now:  # the first of all
            del self._barred[next(iter(self._barred))]
        if len(self._barred) < MAX_KEYS:
            self._barred[peer] = now + BARRED_S

    def _is_barred(self, peer: str, now: float) -> bool:
        until = self._barred.get(peer)
        if until is not None and until <= now:
            del self._barred[peer]
            return False
        return until is not None

    def established(self, peer: str) -> None:
        """A handshake that was accepted is complete."""
        self._handshakes.give_back(peer)
        self._begun -= 1

    def left(self, peer: str, *, established: bool) -> None:
        """A connection that was accepted is over; its handshake was completed, or not."""
        if not established:
            self.established(peer)
        self._connections.give_back(peer)
        self._there -= 1
