"""What acknowledgements say of a path: how fast it delivers, how long it takes, in which lumps.

Times are arguments, in seconds of one steady clock; amounts are octets.
"""

import math
from collections import deque
from typing import NamedTuple

#: How long an end may take between two looks at its socket. Acknowledgements come in lumps of
#: that length, and what lies closer together says nothing about the path.
TURN_S = 0.008

#: On shorter paths no timer of an event loop could space packets out.
PACING_FLOOR_S = 0.004


def initial_window(octets: int) -> int:
    """Return what may be on its way before anything is known of a path (RFC 9002 Section 7.2).

    aioquic 1.7.2 always takes ten datagrams, which is right up to those of Ethernet.

    Args:
        octets: The size of a datagram.
    """
    return min(10 * octets, max(14_720, 2 * octets))


class Peak:
    """The highest value of this period and the one before it."""

    def __init__(self) -> None:
        self._highest = self._before = 0.0

    @property
    def value(self) -> float:
        """That value; 0 before the first."""
        return max(self._highest, self._before)

    def note(self, value: float) -> None:
        """Take a value into account."""
        if value > self._highest:
            self._highest = value

    def turn(self) -> None:
        """Begin another period, unless this one had no value at all."""
        if self._highest:
            self._before, self._highest = self._highest, 0.0


class Sample(NamedTuple):
    """One estimate of the rate at which a path delivers."""

    rate: float
    """Octets per second."""

    sent_since: float
    """When sending began of what it is about."""


class _Mark(NamedTuple):
    """How far things had got when packets were sent."""

    sent_at: float
    delivered: int
    delivered_at: float
    newest: float


class DeliveryRate:
    """How fast a path delivers: an estimate for each batch of acknowledgements.

    It is about a round trip, or :data:`TURN_S` where that is longer: all that was acknowledged
    since, by the time that took or the time that sending it took, whichever was longer. So
    acknowledgements that were held up somewhere and come all at once make no path look faster
    than it was fed.
    """

    def __init__(self) -> None:
        self._delivered = 0
        self._delivered_at = 0.0
        self._newest = 0.0  # when the newest packet that is acknowledged was sent
        self._marks: deque[_Mark] = deque()

    def sent(self, now: float, *, idle: bool) -> None:
        """Note that packets leave, ``idle`` if for a while there were none to send."""
        if idle:
            # What had been delivered before says nothing about the time since.
            self._delivered_at = self._newest = now
            self._marks.clear()
        if not self._marks or self._marks[-1].sent_at < now:
            self._marks.append(_Mark(now, self._delivered, self._delivered_at, self._newest))

    def acked(self, now: float, octets: int, newest: float) -> Sample | None:
        """Take a batch of acknowledgements.

        Args:
            now: When it came.
            octets: What it acknowledges.
            newest: When the newest packet was sent that is acknowledged.

        Returns:
            The rate; None while too little time has passed to tell.
        """
        self._delivered += octets
        self._delivered_at = now
        self._newest = max(self._newest, newest)
        latest, marks = min(self._newest, now - TURN_S), self._marks
        while len(marks) > 1 and marks[1].sent_at <= latest:
            marks.popleft()
        if not marks or marks[0].sent_at > latest:
            return None
        mark = marks[0]
        taken_s = max(now - mark.delivered_at, self._newest - mark.newest)
        return Sample((self._delivered - mark.delivered) / taken_s, mark.newest)


class Lumps:
    """How much more is acknowledged at once than the rate of the path explains.

    So much has to be on its way beyond what the path holds, or nothing would be while one end is
    busy with something else.
    """

    #: Round trips after which a lump does not count any more, twice.
    PERIOD = 5

    def __init__(self) -> None:
        self._peak = Peak()
        self._rounds = 0
        self._since = 0.0
        self._acked = 0

    @property
    def octets(self) -> float:
        """The largest lump of late."""
        return self._peak.value

    def acked(self, now: float, octets: int, rate: float) -> None:
        """Take a batch of acknowledgements, of a path that delivers at ``rate``."""
        if self._acked <= rate * (now - self._since):
            self._since, self._acked = now, 0
        self._acked += octets
        self._peak.note(self._acked - rate * (now - self._since))

    def turn(self) -> None:
        """Note that a round trip has passed."""
        self._rounds += 1
        if self._rounds % self.PERIOD == 0:
            self._peak.turn()


class LeastRtt:
    """The RTT of a path without queues.

    It lasts as long as it is found again. Nothing else says that it has become longer.
    """

    #: What an RTT may be above it, in parts of it or seconds, and still be the same.
    PART = 0.125
    JITTER_S = 0.001
    #: Seconds for which it is believed.
    LASTS_S = 10.0

    def __init__(self) -> None:
        self.value = math.inf
        """Seconds; infinite before the first measurement."""

        self._found_at = 0.0
        self._is_replaceable = False

    @property
    def with_jitter(self) -> float:
        """The longest RTT that shows no queue."""
        return self.value + max(self.value * self.PART, self.JITTER_S)

    def is_old(self, now: float) -> bool:
        """Whether it was not found for long."""
        return now - self._found_at > self.LASTS_S and self.value < math.inf

    def sent_when_idle(self, now: float) -> None:
        """Note that what leaves meets no queue of ours: what it takes is believed, if need be."""
        self._is_replaceable = self.is_old(now)

    def note(self, now: float, rtt: float) -> None:
        """Take a measurement into account."""
        if rtt < self.value or self._is_replaceable:
            self.value = rtt
            self._is_replaceable = False
        if rtt <= self.with_jitter:
            self._found_at = now

    def replace(self, now: float, rtt: float) -> None:
        """Believe what was measured with next to nothing on its way."""
        self.value, self._found_at = rtt, now
