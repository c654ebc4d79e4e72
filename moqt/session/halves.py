"""Messages on request streams that have begun and not ended: how many octets, and for how long."""

from collections.abc import Callable

from moqt.session.commands import StreamId
from moqt.session.context import Context


class HalfMessages:
    """Keeps account of them, and has those given up that pass a limit.

    Args:
        context: With the limits, and the timers.
        give_up: Called with the stream that is to be given up.
    """

    def __init__(self, context: Context, give_up: Callable[[StreamId], None]) -> None:
        self._context = context
        self._give_up = give_up
        self._octets: dict[StreamId, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._octets)

    def note(self, stream_id: StreamId, octets: int) -> None:
        """Note how many octets of a message there are on a stream that is not whole; 0: none."""
        before = self._octets.pop(stream_id, 0)
        if not octets and not before:
            return
        self._total += octets - before
        timer = _Timer(self, stream_id)
        if octets:
            self._octets[stream_id] = octets
        if not octets or octets < before:  # the message that was waited for is here
            self._context.timers.stop(timer)
        if octets and not (before and octets >= before):
            self._context.timers.start(timer, self._context.config.message_timeout_s)
        if octets and self._total > self._context.config.max_half_octets:
            self.over(stream_id)

    def forget(self, stream_id: StreamId) -> None:
        """Nothing more comes on a stream."""
        self.note(stream_id, 0)

    def over(self, stream_id: StreamId) -> None:
        """Have a stream given up."""
        self.forget(stream_id)
        self._give_up(stream_id)


class _Timer:
    """Key of the timer of a stream."""

    __slots__ = ("_halves", "_stream_id")

    def __init__(self, halves: HalfMessages, stream_id: StreamId) -> None:
        self._halves = halves
        self._stream_id = stream_id

    def __hash__(self) -> int:
        return hash((_Timer, self._stream_id))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Timer) and other._stream_id == self._stream_id

    def timer_expired(self) -> None:
        """The message has not come to its end in time."""
        self._halves.over(self._stream_id)
