"""Congestion control by a model of the path: what it delivers, and how long it takes.

After BBR (draft-ietf-ccwg-bbr), for two ends that look at their sockets every few milliseconds.
Packets leave at the rate at which they were delivered, and about twice as many are on their way
as the path holds, whatever is lost on it at random. Every few seconds a little more is tried.

Loss counts as congestion where it comes with a queue, or if it is heavy. Then no more is kept on
its way than came through, and no more is sent than was delivered, until the next trial.

No clock, no sockets: times are arguments, in seconds; amounts are octets.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from moqt.aio.aioquic.pathmodel import (
    PACING_FLOOR_S,
    TURN_S,
    DeliveryRate,
    LeastRtt,
    Lumps,
    Peak,
    initial_window,
)

INITIAL_PACKETS = 10
#: Fewer on their way would leave the acknowledging to a timer.
MIN_PACKETS = 4

#: Growth of the rate in a round trip that shows that the path was not full.
GROWTH = 1.25
#: Round trips without it until it is believed to be.
FLAT_ROUNDS = 3

#: Share of what was sent that is lost when a queue overflows; and without any sign of one.
LOSS_WITH_QUEUE = 0.02
LOSS_WITHOUT_QUEUE = 0.1
#: Packets over which a loss is judged: one of ten says nothing.
JUDGED_PACKETS = 50
#: What is left, at least, of the rate and the ceiling after a round trip of congestion.
BETA = 0.7
#: What of the ceiling is used while nothing is tried; the rest is for others.
HEADROOM = 0.85

#: What of the rate is sent while there is a queue and nothing is tried. The highest estimate is
#: always a little too high, and the queue that comes of it would stay.
QUEUED_RATE = 0.95

#: A queue at the bottleneck that is longer than others make it.
QUEUE_S = 0.025
#: The longest lump that is allowed for.
LUMP_S = 0.05

#: Seconds, and round trips, from one trial to the next; a random part is added, so that those
#: who share a path do not try at one time.
TRIAL_S = (2.0, 3.0)
TRIAL_ROUNDS = (48, 63)
#: Round trips to the first one: STARTUP ends at the first sign that the path is full.
FIRST_TRIAL_ROUNDS = 8
#: How much more the rate must be for a trial to go on, and round trips until that can be seen.
TRIAL_GROWTH = 1.1
TRIAL_SEEN = 2
#: Round trips in which a queue is waited for to empty.
DRAIN_ROUNDS = 4

#: Seconds for which little is kept on its way, to measure the least RTT anew.
RTT_PROBE_S = 0.05


class Sent(Protocol):
    """What is known of a packet on its way."""

    @property
    def sent_time(self) -> float | None:
        """When it left."""

    @property
    def sent_bytes(self) -> int:
        """Its octets."""

    @property
    def packet_number(self) -> int:
        """Its number."""


class State(Enum):
    """What the controller is after."""

    STARTUP = auto()
    """Find out what the path delivers, doubling every round trip."""

    DRAIN = auto()
    """Empty the queue that this has made."""

    CRUISE = auto()
    """Send what the path delivers."""

    UP = auto()
    """Try whether it delivers more."""

    DOWN = auto()
    """Empty the queue that this has made."""

    PROBE_RTT = auto()
    """Find out how long the path is without a queue."""


class Gain(NamedTuple):
    """How a state differs from the model: factors of its rate, and of what the path holds."""

    rate: float
    window: float


GAINS: Mapping[State, Gain] = {
    State.STARTUP: Gain(4 * math.log(2), 2.0),
    State.DRAIN: Gain(0.5, 1.0),
    State.CRUISE: Gain(0.99, 2.0),
    State.UP: Gain(1.25, 2.25),
    State.DOWN: Gain(0.75, 1.0),
    State.PROBE_RTT: Gain(0.99, 0.5),
}


@dataclass(slots=True)
class _Round:
    """What came of a round trip, which ends when something is acknowledged that was sent in it."""

    began_at: float
    delivered: int = 0
    lost: int = 0
    rate: float = 0.0
    """At which it was delivered, by the last estimate."""

    best: float = 0.0
    """By the highest one."""

    rtt: float = math.inf
    """The least."""

    limited: bool = False
    """Whether the application had not enough to send."""

    @property
    def octets(self) -> int:
        """All of which it is known what became of them."""
        return self.delivered + self.lost

    @property
    def carried(self) -> float:
        """What the path carried, with its queue, in a round trip; 0 if that was not measured."""
        return self.best * self.rtt if self.rtt < math.inf else 0.0


class Bbr:
    """A window and a rate that follow a model of the path."""

    def __init__(
        self, *, max_datagram_size: int, between: Callable[[float, float], float] = random.uniform
    ) -> None:
        self.bytes_in_flight = 0
        self.in_flight_at_ack = 0
        """What was on its way before the acknowledgement that is being taken."""

        self.watched_octets = math.inf
        """The size of packets whose arrival is worth knowing."""

        self.witness = -1
        """The last such packet that arrived."""

        self.buffer_octets = math.inf
        """What a socket buffer holds; where nothing is paced, all of the window may meet in one."""

        self.congestion_window = initial_window(max_datagram_size)
        self.state = State.STARTUP
        self.least_rtt = LeastRtt()
        self._packet_octets = max_datagram_size
        self._between = between
        # Of the batch that is being taken.
        self._acked = 0
        self._newest = 0.0
        # The model.
        self._delivery = DeliveryRate()
        self._peak = Peak()
        self._lumps = Lumps()
        self._rate_cap = math.inf  # after congestion, until the next trial
        self._ceiling = math.inf  # of what may be on its way, since more was lost
        self._lowered_at = -math.inf
        self._is_queued = False  # all that came of the last round trip had to wait
        self._is_starved = True  # since the application had less to send than it might
        self._starved_at = -math.inf  # when that was so last
        # Where we are.
        self._round = _Round(0.0)
        self._rounds = 0  # in this state
        self._full_rate = 0.0  # what has to grow in STARTUP and UP
        self._flat_rounds = 0
        self._trial_at = math.inf
        self._trial_rounds = 0.0  # left
        self._is_full = False  # the path has been, once
        self._rtt_probe_ends: float | None = None
        self._rtt_probed = math.inf  # the least since it began

    @property
    def rate(self) -> float:
        """What the path delivers, in octets per second; 0 if that is not known yet."""
        return min(self._peak.value, self._rate_cap)

    def pace(self, smoothed_rtt: float) -> float | None:
        """Return :attr:`pacing_rate`: the model has an RTT of its own."""
        return self.pacing_rate

    @property
    def pacing_rate(self) -> float | None:
        """Octets per second to send; None if nothing can be paced, or no RTT was measured yet."""
        if self._is_short or self.least_rtt.value == math.inf:
            return None
        packets = INITIAL_PACKETS if self.state is State.STARTUP else MIN_PACKETS
        least = packets * self._packet_octets / self.least_rtt.value
        gain = GAINS[self.state].rate
        if self.state is State.CRUISE and self._is_queued:
            gain = QUEUED_RATE
        return gain * max(self.rate, least)

    # What is told by loss recovery

    def on_packet_sent(self, *, packet: Sent) -> None:
        """Note a packet, or several as the sum of them."""
        now = packet.sent_time or 0.0
        idle = self._is_starved and not self.bytes_in_flight
        self._delivery.sent(now, idle=idle)
        if idle:
            self.least_rtt.sent_when_idle(now)
        self._is_starved = False
        self.bytes_in_flight += packet.sent_bytes

    def resize(self, octets: int) -> None:
        """Go on with datagrams of another size. The window never shrinks by it."""
        self._packet_octets = octets
        least = self._least_window if self._is_full else initial_window(octets)
        self.congestion_window = max(self.congestion_window, least)

    def on_packet_acked(self, *, now: float, packet: Sent) -> None:
        """Note a packet that arrived; :meth:`on_acks_taken` follows."""
        if packet.sent_bytes >= self.watched_octets:
            self.witness = packet.packet_number
        self.on_data_acked(now, packet)

    def on_data_acked(self, now: float, packet: Sent) -> None:
        """Note packets that left at one time, as the sum of them; :meth:`on_acks_taken` follows."""
        self.bytes_in_flight -= packet.sent_bytes
        self._acked += packet.sent_bytes
        self._newest = max(self._newest, packet.sent_time or 0.0)

    def on_packets_expired(self, *, packets: Iterable[Sent]) -> None:
        """Forget packets of which nobody will hear."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[Sent]) -> None:
        """Note losses. They are judged together, when the round trip is over.

        What was sent before the ceiling was lowered has been judged.
        """
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            if (packet.sent_time or 0.0) >= self._lowered_at:
                self._round.lost += packet.sent_bytes

    def on_persistent_congestion(self) -> None:
        """Begin again with the least that can be, and let acknowledgements say how much more."""
        self.congestion_window = self._least_window

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """Take the RTT of the newest packet of a batch."""
        self._round.rtt = min(self._round.rtt, rtt)
        self._rtt_probed = min(self._rtt_probed, rtt)
        self.least_rtt.note(now, rtt)

    def on_starved(self, now: float) -> None:
        """Note that the application has nothing more to send: what follows says little."""
        self._is_starved = self.bytes_in_flight < self.congestion_window * 0.875
        if self._is_starved:
            self._starved_at = now

    def on_acks_taken(self, now: float) -> bool:
        """Draw the conclusions, at the end of a batch of acknowledgements.

        Returns:
            Whether window and rate may be others now.
        """
        acked, self._acked = self._acked, 0
        if not acked:
            return False
        self._note_delivery(now, acked)
        ended = self._round
        is_over = self._newest >= ended.began_at and now - ended.began_at >= TURN_S
        if is_over or self._is_urgent(ended):
            self._end_round(now, ended)
        if self.state in (State.DRAIN, State.DOWN) and self._is_drained:
            self._enter(State.CRUISE, now)
        self._measure_rtt(now)
        self._move_window(acked)
        return True

    # The model

    @property
    def _least_window(self) -> int:
        return MIN_PACKETS * self._packet_octets

    @property
    def _is_short(self) -> bool:
        """Whether the window alone says what leaves when. Queues are no reason to begin to pace."""
        return self.least_rtt.value < PACING_FLOOR_S

    @property
    def _held(self) -> float:
        """What the path holds without a queue."""
        return self.rate * self.least_rtt.value if self.rate else 0.0

    @property
    def _is_drained(self) -> bool:
        return (
            self.bytes_in_flight <= self._held
            or self._round.rtt <= self.least_rtt.with_jitter
            or self._rounds >= DRAIN_ROUNDS
        )

    def _note_delivery(self, now: float, acked: int) -> None:
        measured, sample = self._round, self._delivery.acked(now, acked, self._newest)
        measured.delivered += acked
        if sample is not None:
            measured.limited |= self._starved_at >= sample.sent_since
            measured.rate = sample.rate
            measured.best = max(measured.best, sample.rate)
            if self.state is State.STARTUP:
                self._peak.note(sample.rate)
        if self.rate:
            self._lumps.acked(now, acked, self.rate)

    def _was_queued(self, ended: _Round) -> bool:
        """Whether all that was measured had to wait."""
        return self.least_rtt.with_jitter < ended.rtt < math.inf

    def _is_congested(self, ended: _Round) -> bool:
        share = LOSS_WITH_QUEUE if self._was_queued(ended) else LOSS_WITHOUT_QUEUE
        return self._is_judged(ended) and ended.lost > share * ended.octets

    def _is_judged(self, ended: _Round) -> bool:
        enough = JUDGED_PACKETS * self._packet_octets
        if self._was_queued(ended):
            enough = min(enough, self.congestion_window)  # less was never on its way
        return ended.octets >= enough

    def _is_urgent(self, ended: _Round) -> bool:
        """Whether a round trip is not waited for: what doubles has to be stopped at once."""
        if self.state is State.STARTUP:
            # Where acknowledgements are few and far between, a little loss says little.
            share = LOSS_WITH_QUEUE if self._is_short else LOSS_WITHOUT_QUEUE
            return self._is_judged(ended) and ended.lost > share * ended.octets
        return self._newest >= ended.began_at and self._is_congested(ended)

    # Round trips

    def _end_round(self, now: float, ended: _Round) -> None:
        judged = self._is_judged(ended)
        self._round = _Round(now) if judged else _Round(now, ended.delivered, ended.lost)
        self._rounds += 1
        self._trial_rounds -= 1
        self._lumps.turn()
        self._is_queued = self._was_queued(ended)
        if ended.rate > self._peak.value or not ended.limited:
            self._peak.note(ended.rate)
        congested = self.state is not State.PROBE_RTT and self._is_congested(ended)
        if congested:
            kept = 0.5 if self.state is State.STARTUP else BETA  # what doubled is halved
            window = min(self._ceiling, self.congestion_window)
            self._ceiling = max(ended.carried, kept * window)
            self._lowered_at = now
        _STEPS[self.state](self, now, ended, congested)

    def _startup_step(self, now: float, ended: _Round, congested: bool) -> None:
        if self._peak.value >= GROWTH * self._full_rate:
            self._full_rate = self._peak.value
            self._flat_rounds = 0
        elif ended.rate and not ended.limited:
            self._flat_rounds += 1
        if congested or self._flat_rounds >= FLAT_ROUNDS:
            self._is_full = True
            self._plan_trial(now)
            self._trial_rounds = FIRST_TRIAL_ROUNDS
            self._enter(State.DRAIN, now)

    def _cruise_step(self, now: float, ended: _Round, congested: bool) -> None:
        if ended.limited:
            return
        if congested or self._is_slower(ended):
            self._rate_cap = max(ended.best, BETA * self.rate)
        if not congested:
            # As Reno would, which is all that a path too short for trials needs.
            self._ceiling += self._packet_octets * ended.delivered / self.congestion_window
        if now >= self._trial_at or self._trial_rounds <= 0:
            self._rate_cap = math.inf
            self._full_rate = ended.rate
            self._enter(State.UP, now)

    def _up_step(self, now: float, ended: _Round, congested: bool) -> None:
        seen = self._rounds >= TRIAL_SEEN
        if congested or (seen and ended.rate < TRIAL_GROWTH * self._full_rate):
            self._peak.turn()
            self._plan_trial(now)
            self._enter(State.DOWN, now)
            return
        if seen:
            self._full_rate = ended.rate
        if not self._is_short:
            self._ceiling *= GROWTH
        if self._ceiling > self._window_at(GAINS[State.UP].window):
            self._ceiling = math.inf

    def _other_step(self, now: float, ended: _Round, congested: bool) -> None:
        """Learn nothing from a path that is being emptied."""

    def _is_slower(self, ended: _Round) -> bool:
        """Whether the path has become slower, which shows in a queue that is not for lumps."""
        least = self.least_rtt.value
        explained = least + max(least, QUEUE_S) + self._lumps.octets / max(self.rate, 1.0)
        return ended.rtt > explained and 0 < ended.best < 0.95 * self.rate

    def _plan_trial(self, now: float) -> None:
        self._trial_at = now + self._between(*TRIAL_S)
        self._trial_rounds = self._between(*TRIAL_ROUNDS)

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self._rounds = 0
        self._round = _Round(now)

    # The least RTT

    def _measure_rtt(self, now: float) -> None:
        """Keep little on its way for a moment, when the least RTT was not found for long."""
        least, ends = self.least_rtt, self._rtt_probe_ends
        if self.state is not State.PROBE_RTT:
            if least.is_old(now):
                self._rtt_probe_ends = None
                self._enter(State.PROBE_RTT, now)
        elif ends is None:
            if self.bytes_in_flight <= self._window_limit():
                # Only what is sent from now on meets no queue of ours: a round trip more.
                self._rtt_probe_ends = now + RTT_PROBE_S + least.value
                self._rtt_probed = math.inf
        elif now >= ends and self._rtt_probed < math.inf:
            least.replace(now, self._rtt_probed)
            self._enter(State.CRUISE if self._is_full else State.STARTUP, now)

    # The window

    def _window_at(self, gain: float) -> float:
        """Return what the path holds so many times, and what it takes to ride out a busy end."""
        rate, lump = self.rate, self._lumps.octets
        if self.state is not State.STARTUP:  # in which too much is on its way anyhow
            lump = max(lump, rate * TURN_S)
        lump = min(lump, rate * LUMP_S)
        return gain * self._held + lump

    def _window_limit(self) -> float:
        gain = GAINS[self.state].window
        match self.state:
            case _ if not self.rate:
                limit = min(self.congestion_window, self._ceiling)
            case State.PROBE_RTT:
                limit = gain * self._held
            case State.UP | State.STARTUP:
                limit = min(self._window_at(gain), self._ceiling)
            case _:
                headroom = 1.0 if self._is_short else HEADROOM
                ceiling = min(self._ceiling, max(self._ceiling * headroom, self._held))
                limit = min(self._window_at(gain), ceiling)
        if self._is_short:
            limit = min(limit, self.buffer_octets)
        return max(limit, self._least_window)

    def _move_window(self, acked: int) -> None:
        """Move towards the limit, upwards by no more than what was acknowledged.

        In STARTUP, as long as the window is used, and never downwards: what is known then of the
        path is still growing.
        """
        window = self.congestion_window
        if self.state is not State.STARTUP:
            self.congestion_window = int(min(window + acked, self._window_limit()))
        elif self.in_flight_at_ack * 2 >= window and (
            not self.rate or window < self._window_limit()
        ):
            self.congestion_window = window + acked


#: What the end of a round trip means in each state.
_STEPS: Mapping[State, Callable[[Bbr, float, _Round, bool], None]] = {
    State.STARTUP: Bbr._startup_step,
    State.DRAIN: Bbr._other_step,
    State.CRUISE: Bbr._cruise_step,
    State.UP: Bbr._up_step,
    State.DOWN: Bbr._other_step,
    State.PROBE_RTT: Bbr._other_step,
}
