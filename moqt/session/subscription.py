"""Subscriptions, in both roles (MOQT, "Subscriptions").

:class:`OwnSubscription` is one that we asked for, :class:`PeerSubscription` one that we serve.
Both obey the draft's state diagram, which is a table here; nothing else changes a state.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

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
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import (
    Event,
    FillEnded,
    PeerRequestEnded,
    RequestId,
    RequestRefused,
    StateNotified,
    SubscribeAccepted,
    SubscriptionEnded,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.localtrack import LocalSubgroup, LocalTrack
from moqt.session.malformed import TrackShape
from moqt.session.publishing import FetchFlow, ObjectFlow, Selection, SubgroupFlow
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds, shortened
from moqt.session.sendqueue import Admission, Flow, SendQueue
from moqt.wire.filters import (
    RANGE_FILTERS,
    FillParameters,
    LocationFilter,
    LocationRange,
    RangeFilter,
    filter_defect,
    range_filters,
)
from moqt.wire.messages.base import Message
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.subscribe import PublishDone, PublishStateNotify, SubscribeOk
from moqt.wire.pairs import Pairs, mandatory_property
from moqt.wire.parameters import Parameters


class State(Enum):
    """Where a subscription stands."""

    IDLE = auto()
    PENDING_SUBSCRIBER = auto()
    PENDING_PUBLISHER = auto()
    ESTABLISHED = auto()
    TERMINATED = auto()


class Input(Enum):
    """What can happen to it."""

    SUBSCRIBE = auto()
    PUBLISH = auto()
    ACCEPTED = auto()  # SUBSCRIBE_OK, or REQUEST_OK answering a PUBLISH
    REJECTED = auto()  # REQUEST_ERROR
    UPDATED = auto()  # REQUEST_UPDATE
    CANCELLED = auto()  # STOP_SENDING or a reset by the subscriber
    DONE = auto()  # PUBLISH_DONE
    LOST = auto()  # the stream ended where a message was due


#: The state diagram of the draft. What is not a row is a protocol violation.
TRANSITIONS: Mapping[tuple[State, Input], State] = {
    (State.IDLE, Input.SUBSCRIBE): State.PENDING_SUBSCRIBER,
    (State.IDLE, Input.PUBLISH): State.PENDING_PUBLISHER,
    (State.PENDING_SUBSCRIBER, Input.ACCEPTED): State.ESTABLISHED,
    (State.PENDING_SUBSCRIBER, Input.REJECTED): State.TERMINATED,
    (State.PENDING_SUBSCRIBER, Input.CANCELLED): State.TERMINATED,
    (State.PENDING_SUBSCRIBER, Input.LOST): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.ACCEPTED): State.ESTABLISHED,
    (State.PENDING_PUBLISHER, Input.REJECTED): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.DONE): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.LOST): State.TERMINATED,
    (State.ESTABLISHED, Input.UPDATED): State.ESTABLISHED,
    (State.ESTABLISHED, Input.CANCELLED): State.TERMINATED,
    (State.ESTABLISHED, Input.DONE): State.TERMINATED,
    (State.ESTABLISHED, Input.LOST): State.TERMINATED,
}


def advance(state: State, event: Input) -> State:
    """Return the next state, or raise :exc:`ProtocolError` naming both."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ProtocolError(f"{event.name} is not allowed in {state.name}") from None


def replaced(filters: tuple[RangeFilter, ...], by: Mapping[P, Any]) -> tuple[RangeFilter, ...]:
    """Return ``filters`` as changed by the parameters of an update or of a fill.

    A type that is present replaces all filters of its type; an empty one removes them.
    """
    return (*[f for f in filters if f.type not in by], *range_filters(by))


# -- a subscription that we asked for ------------------------------------------------------------


class OwnSubscription(OwnRequest):
    """The subscriber's side. Streams bring it Objects through :mod:`moqt.session.delivery`."""

    kind = MessageType.SUBSCRIBE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        *,
        track: FullTrackName,
        parameters: Parameters,
        directory: "AliasDirectory",
    ) -> None:
        super().__init__(context, request_id, stream_id)
        self.track = track
        self.track_alias: int | None = None
        self.track_properties: Pairs = ()
        self.held = 0
        self.waits_for_application = False
        self.is_moving = False
        self.shape = TrackShape(context.config.max_malformed_groups)
        self.is_filtered = bool(range_filters(parameters))
        self._state = advance(State.IDLE, Input.SUBSCRIBE)
        self._directory = directory
        self._parameters = dict(parameters)
        self._updates: deque[tuple[RequestId, Parameters]] = deque()
        self._fills: dict[RequestId, GroupOrder] = {}
        self._open: set[StreamId] = set()
        self._seen = 0
        self._done: PublishDone | None = None
        self._expect_fill(request_id, parameters)

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
        """Take the answer, or what follows it."""
        match message:
            case SubscribeOk():
                self._state = advance(self._state, Input.ACCEPTED)
                self._accepted(message)
            case RequestError() if self._state is State.PENDING_SUBSCRIBER:
                self._state = advance(self._state, Input.REJECTED)
                self._close_streams(StreamErrorCode.CANCELLED)
                self.refused(message)
            case RequestOk() | RequestError() if self._updates:
                self._update_answered(message)
            case PublishStateNotify() if self._established:
                self._context.emit(
                    StateNotified(request_id=self.request_id, parameters=message.parameters)
                )
            case PublishDone() if self._established:
                self._done = message
                self._settle()
                if not self.over:
                    self._wait_for_streams()
            case _:
                raise self.unexpected(message)

    @property
    def _established(self) -> bool:
        return self._state is State.ESTABLISHED and self._done is None

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
        """A FIN ahead of SUBSCRIBE_OK or of PUBLISH_DONE: the request failed."""
        if self._state is State.PENDING_SUBSCRIBER:
            self._state = advance(self._state, Input.LOST)
            self._close_streams(StreamErrorCode.CANCELLED)
            super().fin_received()
        elif self._done is None:
            self._finish(
                PublishDoneCode.INTERNAL_ERROR, "the stream ended without PUBLISH_DONE",
                by_peer=True,
            )  # fmt: skip

    def cancelled(self, code: int) -> None:
        """The publisher gave the request up."""
        if self._state is State.PENDING_SUBSCRIBER:
            self._state = advance(self._state, Input.LOST)
            self._close_streams(StreamErrorCode.CANCELLED)
            super().cancelled(code)
        elif self._done is None:
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

    def _finish(self, code: PublishDoneCode, reason: str, *, by_peer: bool) -> None:
        self._state = advance(self._state, Input.LOST)
        self._drop(StreamErrorCode.CANCELLED)
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


class AliasDirectory:
    """What a subscription asks of the place where data streams arrive.

    Implemented by :class:`moqt.session.delivery.Delivery`; here so that the two files need not
    know each other's insides.
    """

    def bind(self, track_alias: int, subscription: OwnSubscription) -> None:
        """Bind a Track Alias; raises DuplicateTrackAlias if another Track has it."""
        raise NotImplementedError

    def deliver_parked(self, track_alias: int) -> None:
        """Deliver what streams brought ahead of their alias."""
        raise NotImplementedError

    def expect_fetch_stream(self, request_id: RequestId, owner: Any) -> None:
        """A fetch stream with this Request ID belongs to ``owner``."""
        raise NotImplementedError

    def stop_stream(self, stream_id: StreamId, code: StreamErrorCode) -> None:
        """Ask the peer to stop a data stream, and ignore what still comes on it."""
        raise NotImplementedError

    def forget(self, owner: Any) -> None:
        """``owner`` is over: drop its alias and what is expected for it."""
        raise NotImplementedError


def fill_range(
    fill: FillParameters, outer: LocationFilter | None, largest: Location | None
) -> LocationRange | None:
    """Return what a fill covers, or None when it is empty and no stream is opened.

    The inner LOCATION_FILTER counts, else the subscription's, else the whole Track; judged by the
    rules of a FETCH (MOQT, "FILL_PARAMETERS").
    """
    wanted: LocationFilter = (
        fill.parameters.get(P.LOCATION_FILTER) or outer or LocationFilter.none()
    )
    return wanted.resolve_fetch(largest)


# -- a subscription that we serve ----------------------------------------------------------------


class PeerSubscription(PeerRequest):
    """The publisher's side: cursors into one LocalTrack, and the streams they feed."""

    kind = MessageType.SUBSCRIBE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        parameters: Parameters,
        queue: SendQueue,
    ) -> None:
        super().__init__(context, request_id, stream_id, ids)
        self.has_waiting = False
        self._parameters = dict(parameters)
        self._queue = queue
        self._state = advance(State.IDLE, Input.SUBSCRIBE)
        self._track: LocalTrack | None = None
        self._alias = 0
        self._forward = bool(parameters.get(P.FORWARD, 1))
        self._selection = Selection(
            range=LocationRange(Location(0, 0), None),
            filters=range_filters(parameters),
            priority=parameters.get(P.SUBSCRIBER_PRIORITY, 128),
            group_order=GroupOrder.ASCENDING,
        )
        self._position = 0
        self._live: list[tuple[tuple[int, ...], SubgroupFlow]] = []
        self._flow_of: dict[LocalSubgroup, SubgroupFlow] = {}
        self._fills: list[FetchFlow] = []
        self._stream_count = 0

    # -- verbs -----------------------------------------------------------------------------------

    def accept(self, track: LocalTrack, track_alias: int) -> None:
        """Send SUBSCRIBE_OK, and from now on what is published."""
        self._state = advance(self._state, Input.ACCEPTED)
        self._track, self._alias = track, track_alias
        parameters = self._parameters
        selection = self._selection
        selection.group_order = GroupOrder(parameters.get(P.GROUP_ORDER, track.group_order))
        wanted: LocationFilter = parameters.get(P.LOCATION_FILTER) or LocationFilter.none()
        selection.range = wanted.resolve(track.largest)
        self._position = track.opened
        answer: dict[P, Any] = {}
        if track.largest is not None:
            answer[P.LARGEST_OBJECT] = track.largest
        include = parameters.get(P.INCLUDE_PROPERTIES, 1)
        self.send(SubscribeOk(track_alias, Parameters(answer), track.properties if include else ()))
        self._adopt_open_subgroups()
        self._open_fill(self.request_id, parameters.get(P.FILL_PARAMETERS))
        track.watch(self.track_changed)
        track.attach(self)
        self._queue.wake(self)
        self.mark_answered()

    def reject(
        self, code: RequestErrorCode, reason: str = "", *, retry_ms: int | None = None
    ) -> None:
        """Answer REQUEST_ERROR; no Object was or will be sent."""
        self._state = advance(self._state, Input.REJECTED)
        super().reject(code, reason, retry_ms=retry_ms)

    def end(self, code: PublishDoneCode, reason: str) -> None:
        """End it from our side although the Track goes on: reset what is open, PUBLISH_DONE."""
        self._cut_all(StreamErrorCode.CANCELLED)
        self._finish(code, reason)

    # -- the send queue asks ---------------------------------------------------------------------

    def candidate(self, admit: Admission) -> Flow | None:
        """Return the most urgent flow that may send."""
        if self.over or self._track is None:
            return None
        self._adopt_new_subgroups(self._track)
        self.has_waiting = False
        best: ObjectFlow | None = None
        may_open = True
        if self._forward:
            for _, flow in self._live:  # the most urgent first
                if flow.has_data():
                    self.has_waiting = True
                    if not may_open and flow.stream_id is None:
                        continue  # nor may one that is less urgent than one refused
                    if admit(flow):
                        best = flow
                        break
                    may_open = may_open and flow.stream_id is not None
        for fill in self._fills:
            if fill.has_data():
                self.has_waiting = True
                if admit(fill) and (best is None or fill.rank() < best.rank()):
                    best = fill
        self._retire(self._track)
        return best

    def track_changed(self) -> None:
        """The Track has more, or has ended."""
        self._queue.wake(self)
        if self._context.wake is not None:
            self._context.wake()

    def stream_stopped(self, flow: Flow) -> None:
        """The peer wants no more of one data stream; its Subgroup is not opened again."""
        flow.finished = True
        self._queue.wake(self)

    def needs_from(self, subgroup: LocalSubgroup, position: int) -> int:
        """Say from which Object on a Subgroup is still to be sent (see LocalTrack)."""
        if not self._forward:
            return len(subgroup.objects)  # after a pause it goes on with what comes then
        flow = self._flow_of.get(subgroup)
        if flow is not None and not flow.finished:
            return flow.sent_upto
        return 0 if position >= self._position else len(subgroup.objects)

    # -- updates ---------------------------------------------------------------------------------

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Apply a REQUEST_UPDATE as a whole, or refuse it and end the subscription."""
        track = self._track
        assert track is not None, "updates wait until the request is answered"
        parameters = message.parameters
        in_force = self._parameters | {k: v for k, v in parameters.items() if k in RANGE_FILTERS}
        asked = {**in_force, P.FILL_PARAMETERS: parameters.get(P.FILL_PARAMETERS)}
        limit = self._context.config.max_filter_ranges
        if (defect := filter_defect(asked, limit)) is not None:
            self.refuse_update(RequestErrorCode.INVALID_FILTER, defect)
            return
        self._state = advance(self._state, Input.UPDATED)
        selection = self._selection
        selection.priority = parameters.get(P.SUBSCRIBER_PRIORITY, selection.priority)
        filters = replaced(selection.filters, parameters)
        if P.LOCATION_FILTER in parameters or filters != selection.filters:
            self._parameters = in_force
            selection.filters = filters
            if (wanted := parameters.get(P.LOCATION_FILTER)) is not None:
                # Judged once, now; what an update does not state keeps its meaning.
                self._parameters[P.LOCATION_FILTER] = wanted
                selection.range = wanted.resolve(track.largest)
            self._readmit()
        forward = bool(parameters.get(P.FORWARD, self._forward))
        if forward != self._forward:
            self._forward = forward
            if forward:
                self._resume(track)
            else:
                self._pause()
        answer: dict[P, Any] = {}
        if track.largest is not None:
            answer[P.LARGEST_OBJECT] = track.largest
        self.send(RequestOk(Parameters(answer), ()))
        self._open_fill(update_id, parameters.get(P.FILL_PARAMETERS))
        self._queue.wake(self)

    def refuse_update(self, code: RequestErrorCode, reason: str) -> None:
        """Answer REQUEST_ERROR, and end the subscription UPDATE_FAILED."""
        self.send(RequestError(error_code=code, reason=shortened(reason)))
        self.end(PublishDoneCode.UPDATE_FAILED, reason)

    # -- the end ---------------------------------------------------------------------------------

    def stopped_by_peer(self) -> None:
        """Reset every data stream, fills included."""
        if self._state is not State.TERMINATED:
            self._state = advance(self._state, Input.CANCELLED)
        self._cut_all(StreamErrorCode.CANCELLED)
        self._detach()

    def _cut_all(self, code: StreamErrorCode) -> None:
        for flow in self._flows():
            flow.cut(code)

    def _finish(self, code: PublishDoneCode, reason: str) -> None:
        self._state = advance(self._state, Input.DONE)
        count = self._stream_count + sum(flow.stream_id is not None for flow in self._flows())
        self.send(PublishDone(code, count, shortened(reason)), fin=True)
        self._detach()
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))
        self.close()

    def _detach(self) -> None:
        self._queue.forget(self)
        self._live.clear()
        self._flow_of.clear()
        self._fills.clear()
        if self._track is not None:
            self._track.unwatch(self.track_changed)
            self._track.detach(self)

    # -- flows -----------------------------------------------------------------------------------

    def _flows(self) -> Iterator[ObjectFlow]:
        for _, flow in self._live:
            yield flow
        yield from self._fills

    def _add(self, subgroup: LocalSubgroup, first: int) -> None:
        selection, range_ = self._selection, self._selection.range
        if range_.end is not None and subgroup.group_id > range_.end.group:
            return
        if subgroup.group_id < range_.start.group:
            return
        flow = SubgroupFlow(
            self._context, selection, subgroup, track_alias=self._alias, first=first
        )
        self._flow_of[subgroup] = flow
        key = (
            subgroup.priority,
            selection.group_rank(subgroup.group_id),
            subgroup.subgroup_id,
            id(flow),
        )
        insort(self._live, (key, flow), key=_key)

    def _adopt_open_subgroups(self) -> None:
        """Continue open Subgroups with what is published from now on; the past is for fills."""
        assert self._track is not None
        for _, subgroup in self._track.subgroups_since(0):
            if not subgroup.closed and subgroup not in self._flow_of:
                self._add(subgroup, len(subgroup.objects))

    def _adopt_new_subgroups(self, track: LocalTrack) -> None:
        if self._position == track.opened or not self._forward:
            return
        for _, subgroup in track.subgroups_since(self._position):
            self._add(subgroup, 0)
        self._position = track.opened

    def _retire(self, track: LocalTrack) -> None:
        """Let go of flows that are over, and of the subscription with the last of them."""
        ended = track.ended is not None and not self.has_waiting
        if ended:
            # What has no data now and is not finished never will be: it was cut off.
            self._cut_all(StreamErrorCode.INTERNAL_ERROR)
        done = [flow for flow in self._flows() if flow.finished]
        if done:
            self._stream_count += sum(over.stream_id is not None for over in done)
            self._live = [entry for entry in self._live if not entry[1].finished]
            self._fills = [fill for fill in self._fills if not fill.finished]
            for over in done:
                if isinstance(over, SubgroupFlow):
                    self._flow_of.pop(over.subgroup, None)
        track.trim()
        if ended and not self._fills and not self._live and track.ended is not None:
            self._finish(track.ended.code, track.ended.reason)

    def _open_fill(self, request_id: RequestId, fill: FillParameters | None) -> None:
        track = self._track
        if fill is None or not self._forward or track is None:
            return
        wanted = fill_range(fill, self._parameters.get(P.LOCATION_FILTER), track.largest)
        if wanted is None:
            return
        inner, outer = fill.parameters, self._selection
        order = GroupOrder(inner.get(P.GROUP_ORDER, outer.group_order))
        selection = Selection(
            range=wanted,
            filters=replaced(outer.filters, inner),
            priority=inner.get(P.SUBSCRIBER_PRIORITY, outer.priority),
            group_order=order,
        )
        self._fills.append(
            FetchFlow(
                self._context,
                selection,
                track,
                request_id=request_id,
                order_differs=order is not outer.group_order,
            )
        )

    def _readmit(self) -> None:
        """After a change of filters: go on with what passes now, on the same streams if possible.

        A reset could take with it what was sent and has not arrived, so only a stream that would
        no longer be true is given up for another one.
        """
        for flow in [flow for _, flow in self._live]:
            if flow.stream_id is None or not flow.refilter():
                subgroup, index = flow.subgroup, flow.sent_upto
                self._remove(flow)
                self._add(subgroup, index)
        self._adopt_open_subgroups()

    def _pause(self) -> None:
        """Streams that stand between Objects may go on later; the others are ended."""
        for flow in [flow for _, flow in self._live]:
            if flow.stream_id is None or not flow.is_between_objects:
                self._remove(flow)

    def _resume(self, track: LocalTrack) -> None:
        """Go on with what comes from now on; a stream that would skip an Object is ended."""
        self._position = track.opened
        for flow in [flow for _, flow in self._live]:
            if flow.index < len(flow.subgroup.objects):
                self._remove(flow)
        self._adopt_open_subgroups()

    def _remove(self, flow: SubgroupFlow) -> None:
        flow.cut(StreamErrorCode.CANCELLED)
        self._stream_count += flow.stream_id is not None
        self._live = [entry for entry in self._live if entry[1] is not flow]
        self._flow_of.pop(flow.subgroup, None)


def _key(entry: tuple[tuple[int, ...], SubgroupFlow]) -> tuple[int, ...]:
    return entry[0]
