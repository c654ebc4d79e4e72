"""How large a datagram a path takes: found by probing, given up when it does not hold any more.

DPLPMTUD (RFC 8899) as RFC 9000 Section 14.3 has it for QUIC. It is told what became of packets and
says what to try next; packets, sockets and clocks are the business of others.
"""

import math

#: What every path takes (RFC 9000 Section 14), in octets of UDP payload, as all sizes here.
BASE = 1200

#: The largest that is tried: the length of a STREAM frame is written in two octets.
CEILING = 16_000

#: What is tried below the ceiling: sizes that links are known for.
LIKELY = (
    1232,  # the least MTU that IPv6 allows
    1280,
    1372,  # tunnels over Ethernet, their own headers taken off
    1412,
    1452,  # Ethernet, IPv6
    1472,  # Ethernet, IPv4
    8952,  # jumbo frames, IPv6
    8972,  # jumbo frames, IPv4
)

#: Tried after the ceiling and before what is smaller: nearly every path takes it.
ETHERNET = 1452

#: Losses in a row that mean a size does not pass (RFC 8899 Section 5.1.2).
MAX_PROBES = 3

#: Seconds after which a larger size is tried again (RFC 8899 Section 5.1.1).
RAISE_S = 600.0

#: Seconds until the search after a size that ceased to hold. The next one waits twice as long, and
#: so on, until a size has held for :data:`RAISE_S`.
RETREAT_S = 1.0


class PathMtu:
    """Finds the largest size that a path takes, by one probe at a time.

    The ceiling comes first, once: where it passes, as over loopback, all is found in one round
    trip, and a system that refuses it does so at once. Then the sizes that are likely, upwards,
    until one of them has failed three times.

    Args:
        ceiling: The largest size that is tried.
    """

    def __init__(self, ceiling: int = CEILING) -> None:
        self.size = BASE
        """What packets may have: the largest size that has passed."""
        self.resumes_at: float | None = None
        """When searching goes on; None while it goes on, or has found the ceiling."""
        self._ceiling = max(ceiling, BASE)
        self._sizes = (*(size for size in LIKELY if size < self._ceiling), self._ceiling)
        self._failures: dict[int, int] = {}
        self._probed: int | None = None  # on its way
        self._retreat_s = RETREAT_S
        self._forgotten_at = 0.0
        self._hole = BlackHole()

    def next_probe(self, now: float) -> int | None:
        """Return the size to probe now; None while one is on its way, or none is to be tried."""
        if self.resumes_at is not None:
            if now < self.resumes_at:
                return None
            self.resumes_at = None
            self._failures.clear()
        if self._probed is not None or self.size == self._ceiling:
            return None
        size = self._candidate()
        if size is None:
            self.resumes_at = now + RAISE_S
        return size

    def _candidate(self) -> int | None:
        fails = [size for size, count in self._failures.items() if count >= MAX_PROBES]
        limit = min(fails, default=self._ceiling + 1)
        candidates = [size for size in self._sizes if self.size < size < limit]
        if self._ceiling not in self._failures:
            return self._ceiling
        if ETHERNET in candidates:
            return ETHERNET
        return candidates[0] if candidates else None

    def probe_sent(self, size: int) -> None:
        """A probe is on its way."""
        self._probed = size

    def probe_acked(self, size: int) -> None:
        """A probe has arrived: its size holds."""
        if size == self._probed:
            self._probed = None
            self.size = size

    def probe_lost(self, size: int) -> None:
        """A probe was lost, for whatever reason."""
        if size == self._probed:
            self._probed = None
            self._failures[size] = self._failures.get(size, 0) + 1

    def refused(self, size: int, now: float) -> None:
        """The system did not take a datagram of this size: of a probe, or of one with data."""
        if size == self._probed:
            self._probed = None
            self._failures[size] = MAX_PROBES
        elif BASE < size <= self.size:
            self._retreat(now)

    # Packets with data, where they are larger than the base

    @property
    def suspected(self) -> float:
        """The size whose arrival would show that the path still takes it; infinite mostly."""
        return self._hole.octets

    def lost(self, first: int, last: int, octets: int) -> None:
        """Packets larger than the base were found lost, or given up unheard, at one time.

        Args:
            first: Number of the first of them.
            last: Number of the last of them.
            octets: What the smallest of them had.
        """
        self._hole.lost(first, last, octets)

    def arrived(self, number: int) -> None:
        """A packet of at least the :attr:`suspected` size was acknowledged."""
        if self._hole.is_disproved_by(number):
            self._hole = BlackHole()

    def heard(self, number: int, now: float) -> None:
        """The peer has acknowledged packet ``number``, whatever its size, and none after it."""
        if self._hole.is_certain(number):
            self._retreat(now)

    def _retreat(self, now: float) -> None:
        if now >= self._forgotten_at:
            self._retreat_s = RETREAT_S
        self.size = BASE
        self.resumes_at = now + self._retreat_s
        self._forgotten_at = self.resumes_at + RAISE_S
        self._retreat_s = min(2 * self._retreat_s, RAISE_S)
        self._probed = None
        self._hole = BlackHole()


class BlackHole:
    """Tells a path that no longer takes a size from one that is congested, or a peer that pauses.

    RFC 8899 Section 4.3. The path is to blame when packets were lost on several occasions, each
    time something smaller came through that was sent later, and nothing as large ever did.
    """

    OCCASIONS = 3

    def __init__(self) -> None:
        self.octets = math.inf
        """The least size that was lost."""
        self._occasions = 0
        self._goes_on = False  # nothing was heard since the last loss
        self._first = self._last = 0  # numbers of packets lost

    def lost(self, first: int, last: int, octets: int) -> None:
        """Note that packets were lost, ``octets`` the least of their sizes."""
        if not self._occasions:
            self._first = first
        if not self._goes_on:
            self._occasions += 1
            self._goes_on = True
        self._last = max(self._last, last)
        self.octets = min(self.octets, octets)

    def is_disproved_by(self, number: int) -> bool:
        """Say whether the arrival of this packet, of at least :attr:`octets`, clears the path."""
        return number > self._first

    def is_certain(self, number: int) -> bool:
        """Note that packet ``number`` has arrived, of whatever size; return if that is enough."""
        if number > self._last:
            self._goes_on = False
        return self._occasions >= self.OCCASIONS and not self._goes_on
