"""Requests: their IDs, and the bidirectional stream each of them lives on (MOQT, "Request IDs").

A request is an object that owns its stream. Its kind lives in the file of its chapter; here is
what all kinds share: cutting the stream into messages, FIN, reset, STOP_SENDING, and the end.
"""

from collections import deque
from typing import Any

from moqt.authority import Denial
from moqt.codepoints import MessageType, RequestErrorCode, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import InvalidRequestId, ProtocolError, TooManyRequestUpdates, UsageError
from moqt.names import TrackNamespace
from moqt.session.commands import StreamId
from moqt.session.config import Role
from moqt.session.context import Context
from moqt.session.events import (
    GoawayReceived,
    PeerRequestEnded,
    RequestId,
    RequestRefused,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.guard import REQUEST_CODES, stream_code
from moqt.session.tokens import UnknownTokenAlias
from moqt.wire.framing import MessageBuffer
from moqt.wire.messages.base import Message
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.setup import Goaway
from moqt.wire.parameters import Parameters

#: Why something is refused: the code, and a reason for people.
Refusal = tuple[RequestErrorCode, str]

#: Request IDs remembered that came ahead of lower ones.
_MAX_SKIPPED = 4096


class RequestIds:
    """Hands out our Request IDs and checks the peer's."""

    def __init__(self, role: Role) -> None:
        self._next = 0 if role is Role.CLIENT else 1
        self._peer_parity = 1 - self._next
        self._below = self._peer_parity  # every ID of the peer below this one was used
        self._seen: set[int] = set()

    @property
    def following(self) -> RequestId:
        """What :meth:`next_id` will return."""
        return RequestId(self._next)

    def next_id(self) -> RequestId:
        """Return a fresh Request ID of ours."""
        self._next += 2
        return RequestId(self._next - 2)

    def take(self, request_id: int) -> RequestId:
        """Note a Request ID that the peer used; order does not matter, streams are independent.

        Raises:
            InvalidRequestId: If its parity is ours, or it was used before.
        """
        if request_id % 2 != self._peer_parity:
            raise InvalidRequestId(f"Request ID {request_id} has our parity")
        if request_id < self._below or request_id in self._seen:
            raise InvalidRequestId(f"Request ID {request_id} used twice")
        self._seen.add(request_id)
        self._move_on()
        if len(self._seen) > _MAX_SKIPPED:
            # Those in between were given up before they came, or will never be used. Whoever
            # does use one of the lower half now uses it twice.
            self._below = sorted(self._seen)[_MAX_SKIPPED // 2]
            self._seen = {seen for seen in self._seen if seen >= self._below}
            self._move_on()
        return RequestId(request_id)

    def _move_on(self) -> None:
        while self._below in self._seen:
            self._seen.remove(self._below)
            self._below += 2


class RequestStream:
    """One request on its stream, whoever asked.

    ``over`` tells the session that nothing is left to do for it. Then what still arrives on the
    stream is ignored.
    """

    #: The message that opens the stream; decides which parameters the others may carry.
    kind: MessageType

    def __init__(self, context: Context, request_id: RequestId, stream_id: StreamId) -> None:
        self.request_id = request_id
        self.stream_id = stream_id
        self.over = False
        self._context = context
        self._buffer = MessageBuffer()
        self._sent_fin = False
        self._asked_to_stop = False
        self.got_fin = False
        self._got_goaway = False

    @property
    def half_octets(self) -> int:
        """Octets of a message of the peer that is not whole yet."""
        return 0 if self.over else self._buffer.pending

    # -- what happens on the wire ----------------------------------------------------------------

    def receive(self, data: bytes, fin: bool) -> None:
        """Take octets of the peer's direction."""
        self.got_fin |= fin
        if self.over:
            if data:  # perhaps a message was on its way; whoever goes on talks to nobody
                self._ask_to_stop(StreamErrorCode.CANCELLED)
            return
        self._buffer.feed(data)
        for message in self._buffer.messages(self.kind):
            if isinstance(message, Goaway):
                self._goaway_received(message)
            else:
                self.message_received(message)
            if self.over:
                return
        if fin:
            self._buffer.finish()
            self.fin_received()

    def continue_with(self, buffer: MessageBuffer) -> None:
        """Go on with the buffer that the first message of the stream was read from."""
        self._buffer = buffer

    def message_received(self, message: Message) -> None:
        """Take one message of the peer."""
        raise NotImplementedError

    def fin_received(self) -> None:
        """The peer has no more messages. Not a cancel."""

    def reset_received(self, code: int) -> None:
        """The peer gave up its direction."""
        self.got_fin = True
        if not self.over:
            self.cancelled(code)

    def stop_received(self, code: int) -> None:
        """The peer wants nothing more on our direction."""
        self._sent_fin = True
        if not self.over:
            self.cancelled(code)

    def cancelled(self, code: int) -> None:
        """The peer gave the request up, in either direction."""
        raise NotImplementedError

    def given_up(self, code: StreamErrorCode) -> None:
        """Give it up because of how the peer behaves: as if the peer had."""
        self.cancelled(code)
        if not self.over:
            self.abort(code)

    def timer_expired(self) -> None:
        """The timer kept under this request is due."""

    # -- what the kinds do -----------------------------------------------------------------------

    def admit_update(
        self, ids: RequestIds, message: RequestUpdate
    ) -> tuple[RequestId, Refusal | None]:
        """Take the Request ID and the tokens of an update; say why it is refused, if it is."""
        update_id, context = ids.take(message.request_id), self._context
        parameters = message.parameters
        context.pace.update(context.now)
        try:
            tokens = context.tokens.resolve(parameters.get(P.AUTHORIZATION_TOKEN, ()))
        except UnknownTokenAlias as exc:
            return update_id, (RequestErrorCode.MALFORMED_AUTH_TOKEN, str(exc))
        denied = context.guard.admit_update(
            self.request_id, tokens, parameters.get(P.TRACK_NAMESPACE_PREFIX)
        )
        if denied is not None:
            return update_id, (REQUEST_CODES[denied.why], "")
        return update_id, None

    def lose_right(self, why: Denial) -> None:
        """End it: what it was granted on has expired, or was revoked."""
        raise NotImplementedError

    def expires(self) -> dict[P, Any]:
        """Return the parameter that tells how long the request may go on, if that is limited."""
        left_ms = self._context.guard.expires_ms(self.request_id)
        return {} if left_ms is None else {P.EXPIRES: left_ms}

    def unexpected(self, message: Message) -> ProtocolError:
        """Return the error for a message that has no place here."""
        return ProtocolError(f"{message.type.name} on the stream of a {self.kind.name}")

    def send(self, message: Message, *, fin: bool = False) -> None:
        """Send a message on our direction."""
        if not self._sent_fin:
            self._sent_fin = fin
            self._context.send(self.stream_id, message, fin=fin)

    def finish(self) -> None:
        """Close our direction: no more messages from us."""
        if not self._sent_fin:
            self._sent_fin = True
            self._context.finish(self.stream_id)

    def close(self) -> None:
        """End an orderly request: FIN our direction if it is open, and be over."""
        self.finish()
        self._end()

    def abort(self, code: StreamErrorCode) -> None:
        """Cancel: reset our direction and stop the peer's, where they are open; be over."""
        if not self._sent_fin:
            self._sent_fin = True
            self._context.reset(self.stream_id, code)
        self._ask_to_stop(code)
        self._end()

    def _ask_to_stop(self, code: StreamErrorCode) -> None:
        if not (self.got_fin or self._asked_to_stop):
            self._asked_to_stop = True
            self._context.stop(self.stream_id, code)

    def _end(self) -> None:
        self.over = True
        self._context.timers.stop(self)
        self._context.ended.append(self.request_id)

    def _goaway_received(self, message: Goaway) -> None:
        if self._got_goaway:
            raise ProtocolError("second GOAWAY on a stream")
        if self._context.role is Role.SERVER and message.new_session_uri:
            raise ProtocolError("GOAWAY with a URI from a client")
        self._got_goaway = True
        self._context.emit(
            GoawayReceived(
                request_id=self.request_id,
                new_session_uri=message.new_session_uri,
                timeout_ms=message.timeout_ms,
            )
        )

    def check_redirect(self, message: RequestError) -> None:
        """Refuse a Redirect that has no place in this answer (MOQT, "REQUEST_ERROR")."""
        redirect = message.redirect
        if redirect is not None and redirect.connect_uri and self._context.role is Role.SERVER:
            raise ProtocolError("Redirect with a Connect URI from a client")


class OwnRequest(RequestStream):
    """A request that we sent. Exactly one answer comes: an OK of its kind, or REQUEST_ERROR."""

    def __init__(self, context: Context, request_id: RequestId, stream_id: StreamId) -> None:
        super().__init__(context, request_id, stream_id)
        self.answered = False
        self._renewals: deque[RequestId] = deque()

    def renew(self, update_id: RequestId, parameters: Parameters, limit: int) -> None:
        """Show another token with a REQUEST_UPDATE that says nothing else.

        ``limit`` is the peer's MAX_REQUEST_UPDATES, 0 for none.
        """
        if not self.answered or self.over:
            raise UsageError("only a request that was accepted and goes on can be renewed")
        if limit and len(self._renewals) >= limit:
            raise UsageError(f"{limit} updates are unanswered, which is the peer's limit")
        self._renewals.append(update_id)
        self.send(RequestUpdate(update_id, parameters))

    def renewal_answered(self, message: Message) -> bool:
        """Take the answer to a renewal; return whether ``message`` was one.

        A request does not survive an update that was refused.
        """
        if not self._renewals or not isinstance(message, RequestOk | RequestError):
            return False
        update_id = self._renewals.popleft()
        if isinstance(message, RequestOk):
            self._context.emit(
                UpdateAccepted(
                    request_id=self.request_id,
                    update_id=update_id,
                    largest=message.parameters.get(P.LARGEST_OBJECT),
                    fill_expected=False,
                )
            )
            return True
        self.check_redirect(message)
        self._context.emit(
            UpdateRefused(
                request_id=self.request_id,
                update_id=update_id,
                code=message.error_code,
                reason=message.reason,
            )
        )
        self.cancelled(StreamErrorCode.CANCELLED)
        return True

    def refused(self, message: RequestError) -> None:
        """Handle REQUEST_ERROR as the first answer."""
        self.check_redirect(message)
        self.answered = True
        self._refuse(message)

    def fin_received(self) -> None:
        """A FIN ahead of the answer: the request failed."""
        if not self.answered:
            self._fail("the stream ended without an answer")

    def stop_received(self, code: int) -> None:
        """The responder reads no more of what we say here. It may still have an answer to give.

        It cancels by resetting its own direction (MOQT, "Request Cancellation"); a responder
        that has answered, or refused, may stop ours besides, and that can come first.
        """
        self._sent_fin = True

    def cancelled(self, code: int) -> None:
        """A reset ahead of the answer: the request failed."""
        if not self.answered:
            self._fail(f"the stream was reset with code {code:#x} before an answer")

    def cancel(self) -> None:
        """Give the request up."""
        self.abort(StreamErrorCode.CANCELLED)

    def _refuse(self, message: RequestError) -> None:
        self._context.emit(
            RequestRefused(
                request_id=self.request_id,
                code=message.error_code,
                reason=message.reason,
                retry_ms=message.retry_ms,
                redirect=message.redirect,
            )
        )
        self.close()

    def _fail(self, reason: str) -> None:
        self.answered = True
        self._context.emit(
            RequestRefused(
                request_id=self.request_id,
                code=RequestErrorCode.INTERNAL_ERROR,
                reason=reason,
                retry_ms=None,
            )
        )
        self.abort(StreamErrorCode.CANCELLED)


class PeerRequest(RequestStream):
    """A request that the peer sent, and that we answer."""

    def __init__(
        self, context: Context, request_id: RequestId, stream_id: StreamId, ids: RequestIds
    ) -> None:
        super().__init__(context, request_id, stream_id)
        self.answered = False
        self._ids = ids
        self._waiting_updates: list[tuple[RequestId, RequestUpdate, Refusal | None]] = []
        context.timers.start(self, context.config.answer_timeout_s)

    def message_received(self, message: Message) -> None:
        """A requester sends nothing but REQUEST_UPDATE."""
        if not isinstance(message, RequestUpdate):
            raise self.unexpected(message)
        update_id, refusal = self.admit_update(self._ids, message)
        if self.answered:
            self._update(update_id, message, refusal)
            return
        limit, waiting = self._context.config.max_request_updates, self._waiting_updates
        if limit and len(waiting) >= limit:
            raise TooManyRequestUpdates(f"{len(waiting) + 1} unanswered updates, limit {limit}")
        waiting.append((update_id, message, refusal))

    def _update(
        self, update_id: RequestId, message: RequestUpdate, refusal: Refusal | None
    ) -> None:
        if refusal is None:
            self.update_received(update_id, message)
        else:
            self.refuse_update(*refusal)

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Apply one REQUEST_UPDATE and answer it. By default there is nothing to change."""
        raise self.unexpected(message)

    def refuse_update(self, code: RequestErrorCode, reason: str) -> None:
        """Answer an update REQUEST_ERROR; the request does not survive it."""
        self.send(RequestError(error_code=code, reason=shortened(reason)), fin=True)
        self.stopped_by_peer()
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))
        self.close()

    def cancelled(self, code: int) -> None:
        """The peer has lost interest."""
        self.stopped_by_peer()
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=True))
        self.abort(StreamErrorCode.CANCELLED)

    def stopped_by_peer(self) -> None:
        """Let go of what was kept for the request."""

    def lose_right(self, why: Denial) -> None:
        """Refuse it, if it was not answered yet; reset its stream otherwise."""
        if not self.answered:
            self.decline(REQUEST_CODES[why], "")
            return
        self.stopped_by_peer()
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))
        self.abort(stream_code(why))

    def mark_answered(self) -> None:
        """Note that the answer is out, and apply the updates that came ahead of it."""
        self.answered = True
        self._context.timers.stop(self)
        waiting, self._waiting_updates = self._waiting_updates, []
        for update_id, message, refusal in waiting:
            if not self.over:
                self._update(update_id, message, refusal)

    def reject(
        self, code: RequestErrorCode, reason: str = "", *, retry_ms: int | None = None
    ) -> None:
        """Answer REQUEST_ERROR, and be over. A reason of more than 1024 octets is cut."""
        self.answered = True
        retry = 0 if retry_ms is None else retry_ms + 1
        self.send(RequestError(code, retry, shortened(reason)), fin=True)
        self.close()

    def decline(self, code: RequestErrorCode, reason: str) -> None:
        """Reject what the application did not reject, and tell it that the request is over."""
        self.reject(code, reason)
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))

    def timer_expired(self) -> None:
        """The application has not answered in time."""
        if not self.answered:
            self.decline(RequestErrorCode.TIMEOUT, "no answer in time")


def shortened(reason: str, limit: int = 1024) -> str:
    """Return ``reason``, cut to ``limit`` octets of UTF-8."""
    return reason.encode()[:limit].decode(errors="ignore")


def overlaps(one: TrackNamespace, other: TrackNamespace) -> bool:
    """Whether one namespace is a prefix of the other."""
    return one.is_prefix_of(other) or other.is_prefix_of(one)
