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
