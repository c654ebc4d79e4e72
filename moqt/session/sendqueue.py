"""Which waiting Object leaves next (MOQT, "Priorities").

The QUIC stack below serves streams round robin and buffers whatever it is given, so Objects can
only be ordered while they are still here. And they do not wait here as octets: a *flow* is a
stream that could send, with a cursor into a shared Track. Its octets are looked up when the
transport has room for them, so that memory does not grow with what waits, and a change of
priority, a cancel or a more urgent Object takes effect at the next octet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from moqt.session.commands import SendStreamData, StreamId

#: Smaller leaves first. (Subscriber Priority, Publisher Priority); what follows only orders the
#: flows of one request: live ahead of a fill of other order, Group Order, fill before live,
#: Subgroup ID.
Rank = tuple[int, int, int, int, int, int]


class Credit(Protocol):
    """What the transport would take now. Asked, never guessed."""

    def stream(self, stream_id: StreamId) -> int:
        """Octets that flow control lets us add to a stream; 0 if it cannot be opened yet."""


class Flow(Protocol):
    """One data stream that we send, or could open."""

    stream_id: StreamId | None
    finished: bool
    serves_past: bool
    """It carries what was asked for, a FETCH or a fill, and not what is being published."""

    def has_data(self) -> bool:
        """Whether :meth:`pull` would send something: octets, or the FIN."""

    def rank(self) -> Rank:
        """Return how urgent its next Object is."""

    def pull(self, limit: int) -> tuple[list[SendStreamData], int]:
        """Take the next octets, about ``limit`` of them, opening the stream if need be.

        Returns the commands, and how many octets they carry.
        """


#: Says whether a flow may send now: flow control, and the number of streams open.
Admission = Callable[[Flow], bool]


class Source(Protocol):
    """One request of the peer, with all the flows that serve it."""

    def candidate(self, admit: Admission) -> Flow | None:
        """Return its most urgent flow that has something to send and is admitted."""

    has_waiting: bool
    """Whether a flow had something to send, admitted or not, at the last look."""

    sent_octets: int
    """What its flows have handed over so far."""

    def stream_stopped(self, flow: Flow) -> None:
        """The peer wants no more of one of its streams."""


#: Streams that the peer grants and that are kept for what is more urgent than all that is open.
RESERVED_STREAMS = 16


class OpenStreams:
    """The data streams we send on, and whether one more may be opened.

    Each open stream costs the QUIC stack time on every packet, and the peer grants only so many.
    So few are kept open, as long as those few have something to send: a stream that waits for
    its publisher, or for flow control, keeps no other from being opened.

    Args:
        limit: From how many open streams on another one must be urgent, or the others idle.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streams: dict[StreamId, tuple[Source, Flow]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def opened(self, stream_id: StreamId, source: Source, flow: Flow) -> None:
        """Note that ``flow``, of ``source``, sends on a stream."""
        self._streams[stream_id] = source, flow

    def ended(self, stream_id: StreamId) -> tuple[Source, Flow] | None:
        """Note that a stream is over; return what sent on it, if it was open."""
        return self._streams.pop(stream_id, None)

    def may_open(self, flow: Flow, next_id: StreamId, credit: Credit) -> bool:
        """Whether ``flow`` may open the stream ``next_id`` now."""
        if credit.stream(next_id) <= 0:
            return False
        if len(self._streams) < self._limit or flow.serves_past:
            return True
        rank = flow.rank()
        rivals = [
            (stream_id, other)
            for stream_id, (_, other) in self._streams.items()
            if other.rank() <= rank
        ]
        if not rivals:
            return True
        return credit.stream(StreamId(next_id + 4 * RESERVED_STREAMS)) > 0 and not any(
            other.has_data() and credit.stream(stream_id) > 0 for stream_id, other in rivals
        )


@dataclass(slots=True, eq=False)
class _Standing:
    """What is known of one source that may have something to send."""

    source: Source
    served: int
    """The turn it had last, or the one in which it came."""

    arrival: int
    flow: Flow | None = None
    """Its most urgent flow at the last look."""

    priority: tuple[int, int] = (0, 0)
    """The two priorities of that flow."""

    seen: int = -1
    """The turn before which it was looked at."""

    ticket: int = 0
    """The entry of the heap that speaks of it; older ones are void."""


#: Priorities, turn, arrival, ticket: what is least is next.
_Entry = tuple[tuple[int, int], int, int, int, _Standing]


class SendQueue:
    """Orders the flows of all requests of a session.

    A source is looked at when something happened to it, when it was served, and, if a flow of it
    was refused, when the reason may be gone; not for every write, of which there are thousands
    for each change. What is found is kept in a heap, and looked at once more before it is chosen.
    """

    def __init__(self) -> None:
        self._active: dict[Source, _Standing] = {}
        self._unseen: dict[Source, None] = {}  # to be looked at, in the order it was noticed
        self._refused: dict[Source, None] = {}
        self._heap: list[_Entry] = []
        self._admit: Admission | None = None
        self._turn = 0
        self._arrivals = 0
        self._tickets = 0
        self._last: Flow | None = None
        self._settled = True
        """Nothing was sent or dropped since all that was refused was looked at."""

    def wake(self, source: Source) -> None:
        """Note that ``source`` may have something to send, or something more or less urgent."""
        if source not in self._active:
            self._arrivals += 1
            self._active[source] = _Standing(source, self._turn, self._arrivals)
        self._unseen[source] = None

    def forget(self, source: Source) -> None:
        """Note that ``source`` is over."""
        standing = self._active.pop(source, None)
        if standing is not None:
            standing.ticket = 0
        self._unseen.pop(source, None)
        self._refused.pop(source, None)
        self._settled = False  # a stream of it may have made room

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._active

    def look(self, admit: Admission) -> None:
        """Look at the sources that something happened to, so that those that are over end."""
        if admit is not self._admit:  # another drain: credit may have come
            self._admit = admit
            self._look_again_at_refused()
        unseen, self._unseen = self._unseen, {}
        for source in unseen:
            standing = self._active.get(source)
            if standing is not None:
                self._look_at(standing, admit)

    def next(self, admit: Admission) -> tuple[Source, Flow] | None:
        """Return the flow whose turn it is and whose it is, or None when none may send.

        Flows of different requests whose two priorities are equal take turns. ``admit`` is the
        same object for as long as nothing but what was returned here has changed what it says.
        """
        last, self._last = self._last, None
        if last is not None and self._refused and not (last.has_data() and admit(last)):
            self._look_again_at_refused()  # a stream that waits, or is over, makes room
        while True:
            self.look(admit)
            chosen = self._choose(admit)
            if chosen is not None:
                break
            if self._settled:
                return None
            self._look_again_at_refused()
        self._turn += 1
        chosen.served = self._turn
        self._unseen[chosen.source] = None
        self._settled = False
        assert chosen.flow is not None
        self._last = chosen.flow
        return chosen.source, chosen.flow

    def _choose(self, admit: Admission) -> _Standing | None:
        heap = self._heap
        while heap:
            priority, _, _, ticket, standing = heap[0]
            flow = standing.flow
            if ticket == standing.ticket and flow is not None:
                fresh = standing.seen == self._turn
                if fresh or (flow.has_data() and flow.rank()[:2] == priority and admit(flow)):
                    standing.ticket = 0
                    heappop(heap)
                    return standing
                self._look_at(standing, admit)
            if heap and heap[0][3] == ticket:  # it is void, by now or as before
                heappop(heap)
        return None

    def _look_at(self, standing: _Standing, admit: Admission) -> None:
        source = standing.source
        refused = False

        def noticed(flow: Flow) -> bool:
            nonlocal refused
            admitted = admit(flow)
            refused |= not admitted
            return admitted

        standing.ticket, standing.seen = 0, self._turn
        standing.flow = flow = source.candidate(noticed)
        if self._active.get(source) is not standing:
            return  # it was over
        if refused:
            self._refused[source] = None
        else:
            self._refused.pop(source, None)
        if flow is None:
            if not source.has_waiting:
                self._active.pop(source)
                self._refused.pop(source, None)
            return
        self._tickets += 1
        standing.ticket, standing.priority = self._tickets, flow.rank()[:2]
        heappush(
            self._heap,
            (standing.priority, standing.served, standing.arrival, standing.ticket, standing),
        )
        if len(self._heap) > 2 * len(self._active) + 16:
            self._heap[:] = [entry for entry in self._heap if entry[3] == entry[4].ticket]
            heapify(self._heap)

    def _look_again_at_refused(self) -> None:
        self._unseen |= self._refused
        self._settled = True
