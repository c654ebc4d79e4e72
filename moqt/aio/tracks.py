"""What an application holds of a request of its own: subscriptions, fetches, announcements.

Each is an asynchronous iterator over its events. What has not been iterated over counts against
the receive windows, so an application that stops reading stops its publisher, and memory stays
bounded. Who wants no more says so with ``cancel()``: leaving the loop is not enough, for the
windows of the connection are shared.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from moqt.codepoints import ParameterType, PublishDoneCode, StreamErrorCode
from moqt.errors import MoqtError, RequestRejected, SessionClosed, UsageError
from moqt.location import Location
from moqt.session.events import (
    Event,
    FetchAccepted,
    FetchEnded,
    FillEnded,
    NamespaceAppeared,
    NamespaceGone,
    NamespacePublished,
    NamespaceRevoked,
    NamespacesEnded,
    NamespacesSubscribed,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    PublicationEnded,
    PublishAccepted,
    PublishReceived,
    RangeMarked,
    RequestId,
    RequestRefused,
    StateNotified,
    SubgroupClosed,
    SubgroupOpened,
    SubscribeAccepted,
    SubscriptionEnded,
    TracksEnded,
    TrackSkipped,
    TracksSubscribed,
    TrackStatusAccepted,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.wire.pairs import Pairs
from moqt.wire.parameters import Parameters
from moqt.wire.token import AuthorizationToken

if TYPE_CHECKING:  # a connection makes these, and these call it back
    from moqt.aio.connection import MoqtConnection

#: What a subscription or a fetch brings.
TrackEvent = (
    ObjectReceived
    | SubgroupOpened
    | ObjectBegan
    | ObjectPiece
    | SubgroupClosed
    | FillEnded
    | RangeMarked
    | StateNotified
)
#: Events that count against the receive windows until they are taken.
_COUNTED = (ObjectReceived, ObjectPiece)
#: Events of which there are many, which are handed on without a look at what else it could be.
_MANY = frozenset({ObjectReceived, ObjectBegan, ObjectPiece})
NamespaceEvent = NamespaceAppeared | NamespaceGone
Sink = Callable[[TrackEvent], None]
E = TypeVar("E", bound=Event)

#: Events of one request that wait to be iterated over. Small ones take next to nothing of the
#: receive windows, so they are counted besides: one more gives the request up, TOO_FAR_BEHIND.
MAX_WAITING_EVENTS = 262_144


class Route:
    """Where the events of one request go. Not for applications."""

    #: For error messages: what was asked.
    what = "the request"

    def __init__(self, connection: "MoqtConnection", request_id: RequestId) -> None:
        self.request_id = request_id
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._updates = _Updates(connection)

    async def renew(
        self, tokens: Sequence[AuthorizationToken], *, timeout_s: float = 10.0
    ) -> UpdateAccepted:
        """Show fresh tokens, so that the request goes on when those it was granted on end.

        Args:
            tokens: With values; what the request needed is asked of them.
            timeout_s: How long the answer may take.

        Raises:
            RequestRejected: If the peer refuses; the request ends then.
            TimeoutError: If it does not answer in time.
            SessionClosed: If the session ends first.
            UsageError: If the request is not accepted yet, over, or ends first.
        """
        update_id = self._connection.session.renew(self.request_id, tokens)
        return await self._updates.wait(update_id, timeout_s)

    def handle(self, event: Event) -> bool:
        """Take an event of the request; return whether it was the last one."""
        if isinstance(event, RequestRefused):
            self._fail(RequestRejected(event.code, event.reason, event.retry_ms))
            return True
        if isinstance(event, UpdateAccepted | UpdateRefused):
            self._updates.answered(event)
            return False
        is_over = self._handle(event)
        if is_over:
            self._updates.fail(UsageError(f"the {self.what} ended"))
        return is_over

    def _handle(self, event: Event) -> bool:
        raise NotImplementedError

    def session_closed(self, closed: SessionClosed) -> None:
        """The session ended: nothing more will come."""
        self._fail(closed)

    def cancel(self) -> None:
        """Give the request up. Nothing happens if it is over."""
        self._connection.forget(self.request_id)

    def _accept(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)

    def _fail(self, error: MoqtError) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
            self.answered.exception()  # the asker may be gone
        self._updates.fail(error)


class EventStream(Route, Generic[E]):
    """A request whose events are iterated over."""

    def __init__(self, connection: "MoqtConnection", request_id: RequestId) -> None:
        super().__init__(connection, request_id)
        self._queue: deque[E] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._released = False  # what waits has left the receive windows already
        self._error: MoqtError | None = None

    def __aiter__(self) -> AsyncIterator[E]:
        return self

    async def __anext__(self) -> E:
        """Return the next event; what came before the end is handed out before it.

        Raises:
            SessionClosed: If the session ended before the request did.
        """
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise UsageError(f"two tasks iterate over {self.what}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._queue.popleft()
        if isinstance(event, _COUNTED) and not self._released:
            self._connection.session.consumed(event)
            self._connection.wake()
        return event

    def cancel(self) -> None:
        """Give the request up; what waits is dropped, and iteration ends."""
        self._release()
        self._queue.clear()
        self._finish()
        super().cancel()

    def _put(self, event: E) -> None:
        if len(self._queue) < MAX_WAITING_EVENTS:
            self._queue.append(event)
            self._notify()
            return
        self._fall_behind(f"{MAX_WAITING_EVENTS} events wait")
        self._release()
        if isinstance(event, _COUNTED):
            self._connection.session.consumed(event)
        self._finish()
        super().cancel()

    def _fall_behind(self, reason: str) -> None:
        """Note in ``ended`` that the request was given up because nobody iterates."""
        raise NotImplementedError

    def _release(self) -> None:
        """Take what waits out of the receive windows; it is bounded by its own limits."""
        if not self._released:
            self._released = True
            for event in self._queue:
                if isinstance(event, _COUNTED):
                    self._connection.session.consumed(event)

    def _finish(self) -> None:
        self._finished = True
        self._notify()

    def _fail(self, error: MoqtError) -> None:
        super()._fail(error)
        if not self._finished:
            self._error = error
            self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _ObjectStream(EventStream[Any]):
    def __init__(
        self, connection: "MoqtConnection", request_id: RequestId, sink: Sink | None
    ) -> None:
        super().__init__(connection, request_id)
        self._sink = sink

    def handle(self, event: Event) -> bool:
        """Take an event of the request; return whether it was the last one."""
        if type(event) in _MANY:
            return self._bring(cast(TrackEvent, event))
        return super().handle(event)

    def _bring(self, event: TrackEvent) -> bool:
        if self._sink is None:
            self._put(event)
        else:
            self._sink(event)
            if isinstance(event, _COUNTED):
                self._connection.session.consumed(event)
        return False


class _Updates:
    """REQUEST_UPDATEs of one request that wait for their answers."""

    def __init__(self, connection: "MoqtConnection") -> None:
        self._connection = connection
        self._waiting: dict[RequestId, asyncio.Future[UpdateAccepted]] = {}

    async def wait(self, update_id: RequestId, timeout_s: float) -> UpdateAccepted:
        answer: asyncio.Future[UpdateAccepted] = asyncio.get_running_loop().create_future()
        self._waiting[update_id] = answer
        self._connection.wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(update_id, None)

    def answered(self, event: UpdateAccepted | UpdateRefused) -> None:
        future = self._waiting.get(event.update_id)
        if future is None or future.done():
            return
        if isinstance(event, UpdateAccepted):
            future.set_result(event)
        else:
            future.set_exception(RequestRejected(event.code, event.reason, None))

    def fail(self, error: MoqtError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class Subscription(_ObjectStream):
    """An Established subscription: iterate over it for Objects and what goes with them.

    It began with a SUBSCRIBE of ours or with a PUBLISH of the peer. Iteration ends when the
    subscription does; ``ended`` then says how. TRACK_ENDED is a hint and no proof that everything
    came: count.
    """

    what = "SUBSCRIBE"

    def __init__(
        self, connection: "MoqtConnection", request_id: RequestId, sink: Sink | None = None
    ) -> None:
        super().__init__(connection, request_id, sink)
        self.largest: Location | None = None
        """Largest Object as the publisher saw it when it answered; None: nothing yet."""

        self.fill_expected = False
        """Whether a fill will come: it was asked for, and there was something to fill with."""

        self.expires_ms = 0
        self.track_properties: Pairs = ()
        self.ended: SubscriptionEnded | None = None
        self.finished = asyncio.Event()
        """Set when nothing more will come, for whatever reason."""

    def published(self, request: PublishReceived) -> None:
        """Note what the peer's PUBLISH said; it stands for our SUBSCRIBE (not for applications)."""
        self.largest = request.largest
        self.expires_ms = request.parameters.get(ParameterType.EXPIRES, 0)
        self.track_properties = request.track_properties
        self._accept()

    async def update(self, parameters: Parameters, *, timeout_s: float = 10.0) -> UpdateAccepted:
        """Change the subscription: priority, filters, FORWARD, or ask for a fill.

        Raises:
            RequestRejected: If the publisher refuses; the subscription ends then.
            TimeoutError: If it does not answer in time.
            SessionClosed: If the session or the subscription ends first.
            UsageError: If the subscription is over, or the peer's limits forbid the update.
        """
        update_id = self._connection.session.update(self.request_id, parameters)
        return await self._updates.wait(update_id, timeout_s)

    def _handle(self, event: Event) -> bool:
        match event:
            case ObjectReceived() | FillEnded() | RangeMarked() | StateNotified():
                return self._bring(event)
            case SubgroupOpened() | ObjectBegan() | ObjectPiece() | SubgroupClosed():
                return self._bring(event)
            case SubscribeAccepted():
                self.largest = event.largest
                self.fill_expected = event.fill_expected
                self.expires_ms = event.expires_ms
                self.track_properties = event.track_properties
                self._accept()
            case SubscriptionEnded():
                self.ended = event
                if event.code == PublishDoneCode.TOO_FAR_BEHIND and not event.by_peer:
                    self._release()  # lest the other requests stand still until it is read
                self._finish()
                return True
        return False

    def _fall_behind(self, reason: str) -> None:
        self.ended = SubscriptionEnded(
            request_id=self.request_id,
            code=PublishDoneCode.TOO_FAR_BEHIND,
            reason=reason,
            complete=False,
            by_peer=False,
        )

    def _fail(self, error: MoqtError) -> None:
        super()._fail(error)
        self.finished.set()

    def _finish(self) -> None:
        super()._finish()
        self._updates.fail(UsageError("the subscription ended"))
        self.finished.set()


class Fetch(_ObjectStream):
    """An accepted FETCH: iterate over it for Objects and range markers.

    Iteration ends with the data stream; ``ended.complete`` says whether by FIN. Only then do
    gaps mean anything (MOQT, "Fetch").
    """

    what = "FETCH"

    def __init__(
        self, connection: "MoqtConnection", request_id: RequestId, sink: Sink | None = None
    ) -> None:
        super().__init__(connection, request_id, sink)
        self.end_of_track = False
        self.end_location: Location | None = None
        self.track_properties: Pairs = ()
        self.ended: FetchEnded | None = None
        self.finished = asyncio.Event()
        """Set when nothing more will come, for whatever reason."""

    def _handle(self, event: Event) -> bool:
        match event:
            case ObjectReceived() | RangeMarked() | ObjectBegan() | ObjectPiece():
                return self._bring(event)
            case FetchAccepted():
                self.end_of_track = event.end_of_track
                self.end_location = event.end_location
                self.track_properties = event.track_properties
                self._accept()
            case FetchEnded():
                self.ended = event
                self._finish()
                return True
        return False

    def _fall_behind(self, reason: str) -> None:
        self.ended = FetchEnded(
            request_id=self.request_id, complete=False, code=StreamErrorCode.TOO_FAR_BEHIND
        )

    def _fail(self, error: MoqtError) -> None:
        super()._fail(error)
        self.finished.set()

    def _finish(self) -> None:
        super()._finish()
        self.finished.set()


class StatusQuery(Route):
    """A TRACK_STATUS on its way."""

    what = "TRACK_STATUS"
    answer: TrackStatusAccepted

    def _handle(self, event: Event) -> bool:
        if isinstance(event, TrackStatusAccepted):
            self.answer = event
            self._accept()
            return True
        return False


class NamespaceSubscription(EventStream[NamespaceEvent]):
    """An accepted SUBSCRIBE_NAMESPACE: iterate over what appears and goes.

    Iteration ends when the publisher ends it; then all that had appeared is gone.
    """

    what = "SUBSCRIBE_NAMESPACE"
    ended: NamespacesEnded | None = None

    def _handle(self, event: Event) -> bool:
        match event:
            case NamespaceAppeared() | NamespaceGone():
                self._put(event)
            case NamespacesSubscribed():
                self._accept()
            case NamespacesEnded():
                self.ended = event
                self._finish()
                return True
        return False

    def _fall_behind(self, reason: str) -> None:
        self.ended = NamespacesEnded(
            request_id=self.request_id, code=StreamErrorCode.TOO_FAR_BEHIND, by_peer=False
        )


class TracksSubscription(EventStream[TrackSkipped]):
    """An accepted SUBSCRIBE_TRACKS: iterate over it for Tracks that will not be published.

    Those that are come as calls of ``RequestHandler.publish_received``. Iteration ends when the
    publisher ends it; subscriptions that came of it go on.
    """

    what = "SUBSCRIBE_TRACKS"

    def __init__(self, connection: "MoqtConnection", request_id: RequestId) -> None:
        super().__init__(connection, request_id)
        self.ended: TracksEnded | None = None

    async def update(self, parameters: Parameters, *, timeout_s: float = 10.0) -> UpdateAccepted:
        """Change what is wanted: prefix, Track Property Filters, FORWARD of Tracks to come.

        Raises as :meth:`Subscription.update`.
        """
        update_id = self._connection.session.update(self.request_id, parameters)
        return await self._updates.wait(update_id, timeout_s)

    def _handle(self, event: Event) -> bool:
        match event:
            case TrackSkipped():
                self._put(event)
            case TracksSubscribed():
                self._accept()
            case TracksEnded():
                self.ended = event
                self._finish()
                return True
        return False

    def _fall_behind(self, reason: str) -> None:
        self.ended = TracksEnded(request_id=self.request_id, code=StreamErrorCode.TOO_FAR_BEHIND)

    def _finish(self) -> None:
        super()._finish()
        self._updates.fail(UsageError("the SUBSCRIBE_TRACKS ended"))


class Publication(Route):
    """An accepted PUBLISH: the peer is sent what is published in the Track."""

    what = "PUBLISH"

    def __init__(self, connection: "MoqtConnection", request_id: RequestId) -> None:
        super().__init__(connection, request_id)
        self.expires_ms = 0
        self.ended: PublicationEnded | None = None
        self.finished = asyncio.Event()
        """Set when the subscription is over, or the session."""

    def end(self, code: PublishDoneCode = PublishDoneCode.TRACK_ENDED, reason: str = "") -> None:
        """End the subscription although the Track goes on: PUBLISH_DONE."""
        self._connection.session.end_subscription(self.request_id, code, reason)
        self._connection.wake()

    def notify_state(self) -> None:
        """Tell the subscriber the Largest Object."""
        self._connection.session.notify_state(self.request_id)
        self._connection.wake()

    def cancel(self) -> None:
        """Give it up at once, without PUBLISH_DONE."""
        self.finished.set()
        super().cancel()

    def _handle(self, event: Event) -> bool:
        match event:
            case PublishAccepted():
                self.expires_ms = event.expires_ms
                self._accept()
            case PublicationEnded():
                self.ended = event
                self._accept()  # it may have ended ahead of the answer
                self.finished.set()
                return True
        return False

    def _fail(self, error: MoqtError) -> None:
        super()._fail(error)
        self.finished.set()


class NamespacePublication(Route):
    """An accepted PUBLISH_NAMESPACE."""

    what = "PUBLISH_NAMESPACE"

    def __init__(self, connection: "MoqtConnection", request_id: RequestId) -> None:
        super().__init__(connection, request_id)
        self.gone = asyncio.Event()
        """Set when the peer revoked it, or the session ended."""

    def withdraw(self) -> None:
        """Tell the peer that there are no such Tracks any more."""
        self.cancel()

    def _handle(self, event: Event) -> bool:
        match event:
            case NamespacePublished():
                self._accept()
            case NamespaceRevoked():
                self.gone.set()
                return True
        return False

    def _fail(self, error: MoqtError) -> None:
        super()._fail(error)
        self.gone.set()
