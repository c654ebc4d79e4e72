"""Which waiting Object leaves next (MOQT, "Priorities").

The QUIC stack below serves streams round robin and buffers whatever it is given, so Objects can
only be ordered while they are still here. And they do not wait here as octets: a *flow* is a
stream that could send, with a cursor into a shared Track. Its octets are looked up when the
transport has room for them, so that memory does not grow with what waits, and a change of
priority, a cancel or a more urgent Object takes effect at the next octet.
"""

from collections.abc import Callable
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


class SendQueue:
    """Orders the flows of all requests of a session."""

    def __init__(self) -> None:
        self._active: dict[Source, int] = {}
        self._turn = 0

    def wake(self, source: Source) -> None:
        """Note that ``source`` may have something to send."""
        self._active.setdefault(source, self._turn)

    def forget(self, source: Source) -> None:
        """Note that ``source`` is over."""
        self._active.pop(source, None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._active

    def next(self, admit: Admission) -> tuple[Source, Flow] | None:
        """Return the flow whose turn it is and whose it is, or None when none may send.

        Flows of different requests whose two priorities are equal take turns.
        """
        best: tuple[tuple[int, int], int] | None = None
        chosen: tuple[Source, Flow] | None = None
        for source, served in list(self._active.items()):
            flow = source.candidate(admit)
            if flow is None:
                if not source.has_waiting:
                    self._active.pop(source, None)  # it may be over, and forgotten, by now
                continue
            key = (flow.rank()[:2], served)
            if best is None or key < best:
                best, chosen = key, (source, flow)
        if chosen is None:
            return None
        self._turn += 1
        self._active[chosen[0]] = self._turn
        return chosen
