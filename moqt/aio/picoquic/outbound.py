"""What is handed to picoquic, and when.

Each stream has a ring, from which picoquic takes octets when a packet has room. What is in a ring
cannot be ordered any more, so only about a congestion window is put into all of them together.
What the peer's flow control allows is not told: a stream from whose ring nothing is taken for
longer than a round trip can explain is *blocked*, and counts no more, so that others may go on.
"""

from typing import Any

from moqt.aio.picoquic.library import Command, stream_ctx_create
from moqt.aio.picoquic.streams import TRIAL_OCTETS, Stream, is_of_client, is_unidirectional
from moqt.aio.picoquic.worker import Worker

#: Octets of a stream's ring.
RING_OCTETS = 512 << 10

#: Octets that are handed over ahead of the wire, over all streams that are not blocked: about a
#: congestion window, between these. The most is what lasts for a turn or two of the event loop at
#: the rate that picoquic has. Where it always finds more, it sends a few packets at a time, as its
#: pacing lets it, and each time costs it a system call.
LEAST_AHEAD, MOST_AHEAD = 64 << 10, 384 << 10

#: Octets that wait at most, those of blocked streams included.
MOST_WAITING = 1 << 20

#: A stream is blocked when nothing was taken for so many round trips, and for so long.
BLOCKED_RTTS, BLOCKED_S = 2.0, 0.02

#: Streams that may be opened beyond what the peer is known to grant; it may have granted more.
STREAMS_AHEAD = 32

#: Priority of control and request streams; picoquic gives others 9, and takes the smaller first.
URGENT = 2

#: Pieces of so many octets and more are handed over one by one, smaller ones together.
_LARGE = 8 << 10

#: What an attempt to hand over came to, as aiopquic says it.
_TAKEN, _NO_COMMANDS, _NO_ROOM = 0, 1, 2


class SendQueues:
    """The streams of one connection on which something waits to be sent.

    Args:
        worker: Who sends.
        connection: Of whom they are.
        is_client: Whether this end dialled.
        records: Where the records that are made here are noted.
    """

    def __init__(self, worker: Worker, connection: int, is_client: bool, records: set[int]) -> None:
        self._records = records
        self._worker = worker
        self._context = worker.context
        self._connection = connection
        self._is_client = is_client
        self._active: dict[Stream, None] = {}
        self._grants = [0, 0]  # streams that the peer grants: bidirectional, unidirectional
        self._windows = [0, 0, 0]  # octets of a stream: bidirectional of ours, ours, the peer's
        self._ahead = LEAST_AHEAD
        self.octets_sent = 0
        """Octets of streams that went into packets, repeated ones not counted."""
        self.unacknowledged: dict[Stream, None] = {}
        """Streams that end with what was written, of which this was not acknowledged."""

    def granted(self, parameters: dict[str, Any] | None) -> None:
        """Note the peer's transport parameters."""
        if parameters is not None:
            self._grants = [
                parameters["initial_max_streams_bidi"],
                parameters["initial_max_streams_uni"],
            ]
            self._windows = [
                parameters["initial_max_stream_data_bidi_remote"],
                parameters["initial_max_stream_data_uni"],
                parameters["initial_max_stream_data_bidi_local"],
            ]

    def window_is(self, octets: int) -> None:
        """Note the congestion window."""
        self._ahead = min(max(octets, LEAST_AHEAD), MOST_AHEAD)

    @property
    def is_empty(self) -> bool:
        """Whether all that was written is in packets, as of the last look."""
        return not self._active

    @property
    def unread_octets(self) -> int:
        """Octets of control and request streams that are not in packets, as of the last look."""
        return sum(stream.queued for stream in self._active if stream.urgent)

    # Writing

    def write(self, stream: Stream, data: bytes | memoryview, fin: bool) -> None:
        """Append to a stream; :meth:`hand_over` follows."""
        if data:
            stream.waiting.append(bytes(data))
            stream.waiting_octets += len(data)
        if fin:
            stream.fin_wanted = True
            if is_unidirectional(stream.stream_id):
                self.unacknowledged[stream] = None
        self._active[stream] = None

    def hand_over(self, now: float) -> bool:
        """Fill the rings; return whether all went that has room there."""
        worker = self._worker
        for urgent in (True, False):
            for stream in [s for s in self._active if s.urgent is urgent]:
                while stream.waiting or (stream.fin_wanted and not stream.fin_handed):
                    if not stream.record:
                        if not worker.hand_over():
                            return False
                        self._attach(stream)
                        if urgent:
                            worker.ask(
                                Command.SET_STREAM_PRIORITY, self._connection, stream, URGENT
                            )
                    outcome = self._put(stream, now)
                    if outcome == _NO_COMMANDS:
                        return False
                    if outcome != _TAKEN:
                        break
        return True

    def _put(self, stream: Stream, now: float) -> int:
        """Put the first octets that wait into the ring of a stream, as many as fit.

        What is large goes there as it is: joined with others it would be copied once more.
        """
        waiting = stream.waiting
        room = RING_OCTETS - self._context.tx_data_ring_used(stream.record)
        if waiting and room <= 0:
            return _NO_ROOM
        run: list[bytes] = []
        octets = 0
        while waiting and octets < room:
            if run and max(octets, len(waiting[0])) >= _LARGE:
                break
            part = waiting.popleft()
            if octets + len(part) > room:
                waiting.appendleft(part[room - octets :])
                part = part[: room - octets]
            run.append(part)
            octets += len(part)
        fin = stream.fin_wanted and not waiting
        data = run[0] if len(run) == 1 else b"".join(run)
        outcome: int = self._context.tx_send_atomic(
            stream.stream_id, data, fin, self._connection, stream.record, RING_OCTETS
        )
        if outcome != _TAKEN:
            waiting.extendleft(reversed(run))
            return outcome
        if stream.handed == stream.sent:
            stream.stalled_since = now
        stream.handed += octets
        stream.waiting_octets -= octets
        stream.fin_handed = fin
        return outcome

    def reset(self, stream: Stream, code: int) -> None:
        """Send RESET_STREAM in place of what has not been sent."""
        if not stream.record:
            # picoquic resets no stream that it has not seen, and a later one would open it.
            self._attach(stream)
            self._worker.ask(Command.SET_STREAM_PRIORITY, self._connection, stream, URGENT)
        stream.reset = True
        stream.waiting.clear()
        stream.waiting_octets = 0
        self._active.pop(stream, None)
        self.unacknowledged.pop(stream, None)
        self._worker.ask(Command.STREAM_RESET, self._connection, stream, code)

    def _attach(self, stream: Stream) -> None:
        record = stream_ctx_create()
        self._records.add(record)
        stream.attach(record)

    def forget(self, stream: Stream) -> None:
        """Note that a stream is over and acknowledged, which grants the peer's next one."""
        if stream.record and not stream.reset:
            self._look_at(stream, 0.0)
        self._active.pop(stream, None)
        self.unacknowledged.pop(stream, None)
        if is_of_client(stream.stream_id) == self._is_client:
            self._grants[is_unidirectional(stream.stream_id)] += 1

    # What may be written

    def budget(self) -> int:
        """Octets worth handing over now."""
        ahead = blocked = 0
        for stream in self._active:
            if stream.blocked:
                blocked += stream.queued
            else:
                ahead += stream.queued
        return max(0, min(self._ahead, MOST_WAITING - blocked) - ahead)

    def credit(self, stream_id: int, stream: Stream | None) -> int:
        """Octets worth adding to a stream now, or 0 if it is believed that it cannot be opened."""
        is_ours = is_of_client(stream_id) == self._is_client
        kind = is_unidirectional(stream_id)
        if stream is None or not (stream.handed or stream.waiting):
            if not is_ours:
                return self._window_of(stream_id) if stream is not None else 0
            if stream_id // 4 < self._grants[kind]:
                return self._window_of(stream_id)
            return TRIAL_OCTETS if stream_id // 4 < self._grants[kind] + STREAMS_AHEAD else 0
        if stream.blocked:
            return 0
        known = max(self._window_of(stream_id), stream.sent + stream.trial) - stream.sent
        return max(0, min(known, RING_OCTETS) - stream.queued)

    def _window_of(self, stream_id: int) -> int:
        """Return what the peer grants a stream that it has not heard of."""
        is_ours = is_of_client(stream_id) == self._is_client
        return self._windows[is_unidirectional(stream_id) if is_ours else 2]

    # What became of it

    def look(self, now: float, rtt_s: float) -> bool:
        """See what was taken since the last look; return whether anything was."""
        patience_s = max(BLOCKED_S, BLOCKED_RTTS * rtt_s)
        progress = False
        for stream in list(self._active):
            if self._look_at(stream, now):
                progress = True
            if not stream.queued and stream.fin_handed >= stream.fin_wanted:
                del self._active[stream]
            elif not stream.blocked and now - stream.stalled_since >= patience_s:
                stream.blocked = True
                stream.trial = TRIAL_OCTETS
        return progress

    def _look_at(self, stream: Stream, now: float) -> bool:
        if not stream.record:
            return False
        sent = self._context.tx_data_ring_sent(stream.record)
        if sent == stream.sent:
            return False
        if not stream.sent and is_of_client(stream.stream_id) == self._is_client:
            kind = is_unidirectional(stream.stream_id)
            self._grants[kind] = max(self._grants[kind], stream.stream_id // 4 + 1)
        self.octets_sent += sent - stream.sent
        stream.sent = sent
        if sent >= self._window_of(stream.stream_id) and stream.queued <= stream.trial // 2:
            stream.trial = min(2 * stream.trial, RING_OCTETS)
        stream.stalled_since = now
        stream.blocked = False
        return True

    def ask_for_progress(self) -> bool:
        """Have the worker tell when it next takes something; return whether it did meanwhile."""
        for stream in self._active:
            if stream.record:
                self._context.set_tx_data_drain_pending(stream.record)
        return any(
            s.record and self._context.tx_data_ring_sent(s.record) != s.sent for s in self._active
        )
