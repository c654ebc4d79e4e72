"""The subscriber's side of a subscription, whoever began it (MOQT, "Subscriptions").

:class:`OwnSubscription` is a SUBSCRIBE of ours, :class:`PeerPublication` a PUBLISH of the peer
that we take. Once Established they do the same.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from moqt.authority import Denial
from moqt.codepoints import (
    MAX_VI64,
    GroupOrder,
    MessageType,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import (
    Event,
    FillEnded,
    RequestId,
    RequestRefused,
    StateNotified,
    SubscribeAccepted,
    SubscriptionEnded,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.guard import done_code, stream_code
from moqt.session.malformed import TrackShape
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds, RequestStream, shortened
from moqt.session.subscription import AliasDirectory, Input, State, advance, fill_range
from moqt.wire.filters import FillParameters, range_filters
from moqt.wire.messages.base import Message
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.subscribe import PublishDone, PublishStateNotify, SubscribeOk
from moqt.wire.pairs import Pairs, find_property, mandatory_property
from moqt.wire.parameters import Parameters


class Subscriber(RequestStream):
    """What a subscription is to its subscriber, whoever began it.

    Streams bring it Objects through :mod:`moqt.session.delivery`.
    """

    def __init__(
        self,
        *request: Any,
        begun_by: Input,
        track: FullTrackName,
        parameters: Mapping[P, Any],
        directory: AliasDirectory,
    ) -> None:
        super().__init__(*request)
        self.track = track
        self.track_alias: int | None = None
        self.track_properties: Pairs = ()
        self.held = 0
        self.waits_for_application = False
        self.is_moving = False
        self.pieces = False
        self.shape = TrackShape(self._context.config.max_malformed_groups)
        self.is_filtered = bool(range_filters(parameters))
        self._state = advance(State.IDLE, begun_by)
        self._directory = directory
        self._parameters = dict(parameters)
        self._updates: deque[tuple[RequestId, Parameters]] = deque()
        self._fills: dict[RequestId, GroupOrder] = {}
        self._open: set[StreamId] = set()
        self._seen = 0
        self._done: PublishDone | None = None

    @property
    def default_priority(self) -> int:
        """Publisher Priority of streams that state none."""
        wanted = PropertyType.DEFAULT_PUBLISHER_PRIORITY
        return next((int(v) for t, v in self.track_properties if t == wanted), 128)

    # -- verbs -----------------------------------------------------------------------------------

    def update(self, update_id: RequestId, parameters: Parameters, limit: int) -> None:
        """Send a REQUEST_UPDATE; ``limit`` is the peer's MAX_REQUEST_UPDATES, 0 for none."""
        if self._state is not State.ESTABLISHED or self._done is not None:
            raise UsageError("only an Established subscription can be updated")
        if limit and len(self._updates) >= limit:
            raise UsageError(f"{limit} updates are unanswered, which is the peer's limit")
        self._updates.append((update_id, parameters))
        self._parameters |= {k: v for k, v in parameters.items() if k != P.FILL_PARAMETERS}
        self.is_filtered |= bool(range_filters(parameters))
        self._expect_fill(update_id, parameters)
        self.send(RequestUpdate(update_id, parameters))

    def cancel(self) -> None:
        """Unsubscribe; no event follows."""
        self._state = advance(self._state, Input.CANCELLED)
        self._drop(StreamErrorCode.CANCELLED)

    # -- messages --------------------------------------------------------------------------------

    def message_received(self, message: Message) -> None:
        """Take what follows the answer."""
        match message:
            case RequestOk() | RequestError() if self._updates:
                self._update_answered(message)
            case PublishStateNotify() if self._established:
                self._context.emit(
                    StateNotified(request_id=self.request_id, parameters=message.parameters)
                )
            case PublishDone() if self._established:
                self._done = message
                self._await_streams()
            case _:
                raise self.unexpected(message)

    @property
    def _established(self) -> bool:
        return self._state is State.ESTABLISHED and self._done is None

    def _update_answered(self, message: RequestOk | RequestError) -> None:
        update_id, parameters = self._updates.popleft()
        if isinstance(message, RequestOk):
            self._state = advance(self._state, Input.UPDATED)
            largest = message.parameters.get(P.LARGEST_OBJECT)
            self._emit(
                UpdateAccepted(
                    request_id=self.request_id,
                    update_id=update_id,
                    largest=largest,
                    fill_expected=self._fill_expected(parameters, largest),
                )
            )
            return
        self.check_redirect(message)
        self._emit(
            UpdateRefused(
                request_id=self.request_id,
                update_id=update_id,
                code=message.error_code,
                reason=message.reason,
            )
        )

    def _expect_fill(self, request_id: RequestId, parameters: Parameters) -> None:
        fill: FillParameters | None = parameters.get(P.FILL_PARAMETERS)
        if fill is not None:
            outer = self._parameters.get(P.GROUP_ORDER, GroupOrder.ASCENDING)
            order = GroupOrder(fill.parameters.get(P.GROUP_ORDER, outer))
            self._fills[request_id] = order
            self._directory.expect_fetch_stream(request_id, self)

    def _fill_expected(self, parameters: Mapping[P, Any], largest: Location | None) -> bool:
        fill: FillParameters | None = parameters.get(P.FILL_PARAMETERS)
        if fill is None:
            return False
        return (
            bool(self._parameters.get(P.FORWARD, 1))
            and fill_range(fill, self._parameters.get(P.LOCATION_FILTER), largest) is not None
        )

    # -- data streams ----------------------------------------------------------------------------

    def group_order_of(self, request_id: RequestId) -> GroupOrder:
        """Return the Group Order of the fill that ``request_id`` asked for."""
        return self._fills[request_id]

    def open_streams(self) -> Iterable[StreamId]:
        """Return the data streams that showed their header and have not ended."""
        return tuple(self._open)

    def stream_opened(self, stream_id: StreamId) -> None:
        """A data stream of this subscription showed its header."""
        self._open.add(stream_id)
        self._seen += 1

    def stream_ended(self, stream_id: StreamId) -> None:
        """A data stream of this subscription saw its FIN or reset."""
        self._open.discard(stream_id)
        self._settle()

    def fetch_stream_ended(
        self, stream_id: StreamId, request_id: RequestId, code: int | None
    ) -> None:
        """The stream of a fill is over: by FIN if ``code`` is None, else by a reset."""
        if self.over:
            return
        self._fills.pop(request_id, None)
        self._emit(
            FillEnded(
                request_id=self.request_id,
                fill_id=request_id,
                complete=code is None,
                code=code,
            )
        )
        self.stream_ended(stream_id)

    def malformed(self, reason: str) -> None:
        """The Track broke its own rules: leave it, and keep the session."""
        self._finish(PublishDoneCode.MALFORMED_TRACK, reason, by_peer=False)

    def too_far_behind(self) -> None:
        """The application does not take what comes."""
        limit = self._context.config.max_subscription_octets
        self._finish(
            PublishDoneCode.TOO_FAR_BEHIND, f"{self.held} octets unread, limit {limit}",
            by_peer=False,
        )  # fmt: skip

    # -- the end ---------------------------------------------------------------------------------

    def fin_received(self) -> None:
        """A FIN ahead of PUBLISH_DONE: the subscription failed."""
        if self._done is None:
            self._finish(
                PublishDoneCode.INTERNAL_ERROR, "the stream ended without PUBLISH_DONE",
                by_peer=True,
            )  # fmt: skip

    def cancelled(self, code: int) -> None:
        """The publisher gave the request up."""
        if self._done is None:
            self._finish(
                PublishDoneCode.INTERNAL_ERROR, f"the request was reset with code {code:#x}",
                by_peer=True,
            )  # fmt: skip

    def timer_expired(self) -> None:
        """Give up streams that PUBLISH_DONE counted, if nothing came and nothing is held up."""
        if self._open and (self.is_moving or self.held):
            self._wait_for_streams()
        else:
            self._settle(give_up=True)

    def _await_streams(self) -> None:
        """PUBLISH_DONE has come: end with the last stream that it counts."""
        self._settle()
        if not self.over:
            self._wait_for_streams()

    def _wait_for_streams(self) -> None:
        self.is_moving = False
        self._context.timers.start(self, self._context.config.done_timeout_s)

    def _settle(self, *, give_up: bool = False) -> None:
        done = self._done
        if done is None or self.over:
            return
        complete = not self._open and self._seen >= done.stream_count
        if complete or give_up:
            self._state = advance(self._state, Input.DONE)
            self._close_streams(StreamErrorCode.CANCELLED)
            self.close()
            self._emit(
                SubscriptionEnded(
                    request_id=self.request_id,
                    code=done.status_code,
                    reason=done.reason,
                    complete=complete or (done.stream_count == MAX_VI64 and not self._open),
                    by_peer=True,
                )
            )

    def _finish(
        self,
        code: PublishDoneCode,
        reason: str,
        *,
        by_peer: bool,
        reset_with: StreamErrorCode = StreamErrorCode.CANCELLED,
    ) -> None:
        self._state = advance(self._state, Input.LOST)
        self._drop(reset_with)
        self._emit(
            SubscriptionEnded(
                request_id=self.request_id,
                code=code,
                reason=reason,
                complete=False,
                by_peer=by_peer,
            )
        )

    def _drop(self, code: StreamErrorCode) -> None:
        self._close_streams(code)
        self.abort(code)

    def _close_streams(self, code: StreamErrorCode) -> None:
        open_streams, self._open = self._open, set()
        for stream_id in open_streams:
            self._directory.stop_stream(stream_id, code)
        self._directory.forget(self)

    def _emit(self, event: Event) -> None:
        self._context.emit(event)


class OwnSubscription(Subscriber, OwnRequest):
    """A SUBSCRIBE of ours."""

    kind = MessageType.SUBSCRIBE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        *,
        track: FullTrackName,
        parameters: Parameters,
        directory: AliasDirectory,
    ) -> None:
        super().__init__(
            context,
            request_id,
            stream_id,
            begun_by=Input.SUBSCRIBE,
            track=track,
            parameters=parameters,
            directory=directory,
        )
        self._expect_fill(request_id, parameters)

    def message_received(self, message: Message) -> None:
        """Take the answer, or what follows it."""
        match message:
            case SubscribeOk():
                self._state = advance(self._state, Input.ACCEPTED)
                self._accepted(message)
            case RequestError() if self._state is State.PENDING_SUBSCRIBER:
                self._state = advance(self._state, Input.REJECTED)
                self._close_streams(StreamErrorCode.CANCELLED)
                self.refused(message)
            case _:
                super().message_received(message)

    def fin_received(self) -> None:
        """A FIN ahead of SUBSCRIBE_OK or of PUBLISH_DONE: the request failed."""
        if self._state is State.PENDING_SUBSCRIBER:
            self._lost()
            OwnRequest.fin_received(self)
        else:
            super().fin_received()

    def cancelled(self, code: int) -> None:
        """The publisher gave the request up."""
        if self._state is State.PENDING_SUBSCRIBER:
            self._lost()
            OwnRequest.cancelled(self, code)
        else:
            super().cancelled(code)

    def _lost(self) -> None:
        self._state = advance(self._state, Input.LOST)
        self._close_streams(StreamErrorCode.CANCELLED)

    def _accepted(self, message: SubscribeOk) -> None:
        self.answered = True
        if (kind := mandatory_property(message.track_properties)) is not None:
            self._emit(
                RequestRefused(
                    request_id=self.request_id,
                    code=RequestErrorCode.UNSUPPORTED_EXTENSION,
                    reason=f"the track has the unknown mandatory property {kind:#x}",
                    retry_ms=None,
                )
            )
            self._drop(StreamErrorCode.CANCELLED)
            return
        self._directory.bind(message.track_alias, self)
        self.track_alias = message.track_alias
        self.track_properties = message.track_properties
        largest = message.parameters.get(P.LARGEST_OBJECT)
        self._emit(
            SubscribeAccepted(
                request_id=self.request_id,
                largest=largest,
                fill_expected=self._fill_expected(self._parameters, largest),
                expires_ms=message.parameters.get(P.EXPIRES, 0),
                track_properties=message.track_properties,
            )
        )
        self._directory.deliver_parked(message.track_alias)


class PeerPublication(Subscriber, PeerRequest):
    """A PUBLISH of the peer: a subscription of ours, once it is accepted.

    What its publisher says and sends ahead of the answer is kept for it: Objects where streams
    are parked, PUBLISH_DONE here.
    """

    kind = MessageType.PUBLISH

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        message: Publish,
        is_filtered: bool,
        directory: AliasDirectory,
    ) -> None:
        default = find_property(
            message.track_properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER
        )
        order = GroupOrder.ASCENDING if default is None else default
        super().__init__(
            context,
            request_id,
            stream_id,
            ids,
            begun_by=Input.PUBLISH,
            track=message.track,
            parameters={P.GROUP_ORDER: order, **message.parameters},
            directory=directory,
        )
        self.is_filtered = is_filtered
        self.track_properties = message.track_properties
        self._offered_alias = message.track_alias

    def accept(self) -> None:
        """Send REQUEST_OK; what waited for it follows."""
        self._state = advance(self._state, Input.ACCEPTED)
        self._directory.bind(self._offered_alias, self)
        self.track_alias = self._offered_alias
        self.send(RequestOk(Parameters(self.expires())))
        self.mark_answered()
        self._directory.deliver_parked(self._offered_alias)
        if self._done is not None and not self.over:
            self._await_streams()

    def reject(
        self, code: RequestErrorCode, reason: str = "", *, retry_ms: int | None = None
    ) -> None:
        """Answer REQUEST_ERROR; what was sent ahead of it is dropped."""
        self._state = advance(self._state, Input.REJECTED)
        self._directory.refuse_alias(self._offered_alias)
        super().reject(code, reason, retry_ms=retry_ms)

    def lose_right(self, why: Denial) -> None:
        """Refuse it, if it waits for its answer; unsubscribe otherwise."""
        if self.answered:
            self._finish(done_code(why), "", by_peer=False, reset_with=stream_code(why))
        else:
            PeerRequest.lose_right(self, why)

    def cancel(self) -> None:
        """Unsubscribe, or turn away without an answer; no event follows."""
        if self.answered:
            super().cancel()
        else:
            self.stopped_by_peer()
            self.abort(StreamErrorCode.CANCELLED)

    def message_received(self, message: Message) -> None:
        """The publisher may say all that follows an answer ahead of ours."""
        match message:
            case RequestUpdate():
                PeerRequest.message_received(self, message)
            case PublishDone() if not self.answered and self._done is None:
                self._done = message
            case PublishStateNotify() if not self.answered and self._done is None:
                self._emit(StateNotified(request_id=self.request_id, parameters=message.parameters))
            case _:
                super().message_received(message)

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """The publisher changes its own request; the application is told what it says."""
        self.send(RequestOk(Parameters(self.expires())))
        self._emit(StateNotified(request_id=self.request_id, parameters=message.parameters))

    def refuse_update(self, code: RequestErrorCode, reason: str) -> None:
        """Answer an update of the publisher's REQUEST_ERROR; the subscription is over."""
        self.send(RequestError(error_code=code, reason=shortened(reason)), fin=True)
        self._finish(PublishDoneCode.UPDATE_FAILED, reason, by_peer=False)

    def fin_received(self) -> None:
        """A FIN ahead of PUBLISH_DONE: the request failed."""
        if self.answered:
            super().fin_received()
        elif self._done is None:
            PeerRequest.cancelled(self, StreamErrorCode.INTERNAL_ERROR)

    def stop_received(self, code: int) -> None:
        """The publisher reads no more of what we say here.

        It cancels by resetting its own direction, and that may come later. Ahead of our answer,
        and of its PUBLISH_DONE, it cannot mean anything else.
        """
        if self.answered or self._done is not None:
            self._sent_fin = True
        else:
            super().stop_received(code)

    def cancelled(self, code: int) -> None:
        """The publisher gave the request up."""
        if self.answered:
            super().cancelled(code)
        else:
            PeerRequest.cancelled(self, code)

    def stopped_by_peer(self) -> None:
        """Let go of the streams, and of the alias."""
        if self._state is State.PENDING_PUBLISHER:
            self._state = advance(self._state, Input.LOST)
            self._directory.refuse_alias(self._offered_alias)
        self._close_streams(StreamErrorCode.CANCELLED)

    def timer_expired(self) -> None:
        """No answer in time, or no streams in time after PUBLISH_DONE."""
        if self.answered:
            super().timer_expired()
        else:
            PeerRequest.timer_expired(self)
