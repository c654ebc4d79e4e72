"""Request streams of the peer, until their first message is read, and messages that are not whole.

Streams overtake each other, so a request may come ahead of SETUP, and what cancels it ahead of the
request. All of that is kept for a while, within limits.
"""

from collections.abc import Callable

from moqt.codepoints import StreamErrorCode
from moqt.errors import ProtocolError
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.halves import HalfMessages
from moqt.session.registry import Requests
from moqt.session.requests import PeerRequest
from moqt.session.streams import is_opened_by
from moqt.wire.framing import REQUESTS, MessageBuffer
from moqt.wire.messages.base import Message

#: STOP_SENDINGs remembered that came ahead of the request they cancel.
_EARLY_STOPS = 256


class Arrivals:
    """Takes what comes on request streams, whoever opened them.

    Args:
        context: Of the session.
        requests: Whose streams those are that are known.
        admit: Makes a request of the first message of a stream; it may raise ProtocolError.
    """

    def __init__(
        self,
        context: Context,
        requests: Requests,
        admit: Callable[[StreamId, Message], PeerRequest],
    ) -> None:
        self._context = context
        self._requests = requests
        self._admit = admit
        self.opening: dict[StreamId, tuple[MessageBuffer, bool]] = {}
        """What has come of first messages that are not read yet, and whether all has."""
        self._discarded: set[StreamId] = set()  # requests that were not even looked at
        self.early_stops: dict[StreamId, int] = {}
        """Error codes of STOP_SENDINGs that came ahead of everything else on their stream."""
        self.half = HalfMessages(context, self._give_up_half)

    def receive(self, stream_id: StreamId, data: bytes, fin: bool) -> None:
        """Take octets of the peer's direction of a request stream.

        Raises:
            ProtocolError: If they break a rule.
        """
        request = self._requests.by_stream.get(stream_id)
        if request is not None:
            request.receive(data, fin)
            self.half.note(stream_id, request.half_octets)
            self._requests.forget_stream(request)
            return
        if is_opened_by(stream_id, self._context.role):
            return  # a request of ours that is over
        if stream_id in self._discarded:
            if fin:
                self._discarded.remove(stream_id)
            return
        buffer, _ = self.opening.get(stream_id, (MessageBuffer(), False))
        buffer.feed(data)
        self.opening[stream_id] = buffer, fin
        if self._context.peer_setup is not None:
            self._open(stream_id)
        elif self._too_much_waits():
            self._discard(stream_id)

    def reset(self, stream_id: StreamId, code: int) -> None:
        """The peer gave up its direction of a request stream.

        Raises:
            ProtocolError: If it may not do so.
        """
        self.half.forget(stream_id)
        request = self._requests.by_stream.get(stream_id)
        if request is not None:
            request.reset_received(code)
            self._requests.forget_stream(request)
        else:
            self.opening.pop(stream_id, None)
            self._discarded.discard(stream_id)

    def stop(self, stream_id: StreamId, code: int) -> None:
        """The peer wants no more of our direction of a request stream.

        Raises:
            ProtocolError: If it may not do so.
        """
        request = self._requests.by_stream.get(stream_id)
        if request is not None:
            request.stop_received(code)
            self._requests.forget_stream(request)
        elif not is_opened_by(stream_id, self._context.role):
            # Perhaps of a request that is still on its way: packets overtake each other.
            self.early_stops[stream_id] = code
            if len(self.early_stops) > _EARLY_STOPS:
                del self.early_stops[next(iter(self.early_stops))]

    def setup_done(self) -> None:
        """The peer's SETUP is here: read the requests that came ahead of it.

        Raises:
            ProtocolError: If one of them breaks a rule.
        """
        for waiting in list(self.opening):
            self._open(waiting)

    def _open(self, stream_id: StreamId) -> None:
        buffer, fin = self.opening[stream_id]
        message = next(buffer.messages(None), None)
        if message is None:
            if fin:
                buffer.finish()
                del self.opening[stream_id]
                self._context.reset(stream_id, StreamErrorCode.CANCELLED)
            else:
                self.half.note(stream_id, buffer.pending)
            return
        del self.opening[stream_id]
        if message.type not in REQUESTS:
            raise ProtocolError(f"{message.type.name} opens a request stream")
        request = self._admit(stream_id, message)
        request.continue_with(buffer)
        if (stopped := self.early_stops.pop(stream_id, None)) is not None:
            request.stop_received(stopped)
        request.receive(b"", fin)
        self.half.note(stream_id, request.half_octets)
        self._requests.forget_stream(request)

    def _too_much_waits(self) -> bool:
        """Whether the requests that came ahead of SETUP pass a limit."""
        waiting, config = self.opening, self._context.config
        return (
            len(waiting) > config.max_parked_streams
            or sum(buffer.pending for buffer, _ in waiting.values()) > config.max_parked_octets
        )

    def _discard(self, stream_id: StreamId) -> None:
        """Give up a request stream whose first message has not been read."""
        _, fin = self.opening.pop(stream_id)
        if not fin:
            self._discarded.add(stream_id)
            self._context.stop(stream_id, StreamErrorCode.EXCESSIVE_LOAD)
        self._context.reset(stream_id, StreamErrorCode.EXCESSIVE_LOAD)

    def _give_up_half(self, stream_id: StreamId) -> None:
        """Give up a request stream on which a message does not come to its end."""
        self._context.limited("a message on a request stream did not come to its end")
        if stream_id in self.opening:
            self._discard(stream_id)
            return
        request = self._requests.by_stream.get(stream_id)
        if request is not None and not request.over:
            request.given_up(StreamErrorCode.EXCESSIVE_LOAD)
