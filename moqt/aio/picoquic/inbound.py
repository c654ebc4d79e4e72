"""The receive windows: they follow what the application consumed.

The binding widens the window of a stream by itself, after it has told what it read of it. What it
grants is the free part of the ring less the octets that
:class:`~moqt.aio.picoquic.library.Withheld` says: those that the application has not consumed. For
those it consumes later the worker is asked to grant once more.
"""

from moqt.aio.picoquic.library import Command, Withheld
from moqt.aio.picoquic.streams import Stream
from moqt.aio.picoquic.worker import Worker

#: Windows are widened when so much of them was consumed, in parts of the whole.
STEP = 4


class ReceiveWindows:
    """What arrived on the streams of one connection and was not consumed.

    Args:
        worker: Who is asked to widen a window.
        connection: Of whom they are.
        stream_window: Octets of one stream.
        connection_window: Octets of all streams, above which no window is widened.
    """

    def __init__(
        self, worker: Worker, connection: int, stream_window: int, connection_window: int
    ) -> None:
        self._worker = worker
        self._connection = connection
        self._step = stream_window // STEP
        self._limit = connection_window
        self._refused: dict[Stream, None] = {}  # since the connection's window is exhausted
        self._leftover: dict[int, int] = {}  # not consumed of streams that are over
        self.unconsumed = 0

    def received(self, stream: Stream, octets: int) -> None:
        """Note octets that are about to be handed to the application."""
        stream.unconsumed += octets
        self.unconsumed += octets
        self._withhold(stream)

    def consumed(self, stream_id: int, stream: Stream | None, octets: int) -> None:
        """Note that the application is done with octets of a stream."""
        if stream is None:
            left = self._leftover.get(stream_id, 0)
            octets = min(octets, left)
            self._leftover[stream_id] = left - octets
            if left == octets:
                self._leftover.pop(stream_id, None)
        elif stream.dropped:
            return
        else:
            octets = min(octets, stream.unconsumed)
            stream.unconsumed -= octets
            stream.owed += octets
        self.unconsumed -= octets
        if stream is not None and stream.owed >= self._step:
            self._widen(stream)
        if self._refused and self.unconsumed <= self._limit:
            refused, self._refused = self._refused, {}
            for waiting in refused:
                self._widen(waiting)

    def drop(self, stream: Stream) -> None:
        """Nobody will consume what arrived on a stream, nor what still arrives."""
        if not stream.dropped:
            stream.dropped = True
            self.unconsumed -= stream.unconsumed
            stream.unconsumed = 0
            self._widen(stream)

    def forget(self, stream: Stream) -> None:
        """Note that a stream is over; what is not consumed still counts."""
        self._refused.pop(stream, None)
        if stream.unconsumed:
            self._leftover[stream.stream_id] = stream.unconsumed

    def _widen(self, stream: Stream) -> None:
        stream.owed = 0
        if self._withhold(stream):
            self._worker.ask(Command.OPEN_FLOW_CONTROL, self._connection, stream)

    def _withhold(self, stream: Stream) -> bool:
        """Say what is not to be granted; return whether anything may be."""
        if stream.withheld is None or stream.fin_received:
            return False
        if self.unconsumed > self._limit:
            self._refused[stream] = None
            stream.withheld.set(Withheld.ALL)
            return False
        stream.withheld.set(stream.unconsumed)
        return True
