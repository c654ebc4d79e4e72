"""The publisher's side of a subscription, whoever began it (MOQT, "Subscriptions").

:class:`PeerSubscription` is a SUBSCRIBE of the peer that we serve, :class:`OwnPublication` a
PUBLISH of ours. Which Objects go on which stream is the same for both.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from moqt.authority import Denial
from moqt.codepoints import (
    GroupOrder,
    MessageType,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, TooManyRequestUpdates
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import PeerRequestEnded, PublicationEnded, PublishAccepted, RequestId
from moqt.session.fetchflow import FetchFlow, Patience
from moqt.session.guard import done_code, stream_code
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.session.publishing import ObjectFlow, Selection, SubgroupFlow
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds, RequestStream, shortened
from moqt.session.sendqueue import Admission, Flow, SendQueue
from moqt.session.subscription import Input, State, advance, fill_range, replaced
from moqt.wire.filters import (
    RANGE_FILTERS,
    FillParameters,
    LocationFilter,
    LocationRange,
    filter_defect,
    range_filters,
)
from moqt.wire.messages.base import Message
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.subscribe import PublishDone, PublishStateNotify, SubscribeOk
from moqt.wire.parameters import Parameters, Scope, stray


class Publisher(RequestStream):
    """What a subscription is to its publisher, whoever began it.

    Cursors into one LocalTrack, and the streams they feed.
    """

    answered: bool

    def __init__(
        self, *request: Any, begun_by: Input, parameters: Mapping[P, Any], queue: SendQueue
    ) -> None:
        super().__init__(*request)
        self.has_waiting = False
        self.sent_octets = 0
        self._parameters = dict(parameters)
        self._queue = queue
        self._state = advance(State.IDLE, begun_by)
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
        self._held_updates: deque[tuple[RequestId, RequestUpdate]] = deque()

    # -- verbs -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether it is not paused, or wants to go on."""
        return self._forward or bool(self._held_updates)

    @property
    def is_served(self) -> bool:
        """Whether there is a Track that it is served from."""
        return self._track is not None

    def notify_state(self) -> None:
        """Send PUBLISH_STATE_NOTIFY: the Largest Object, which who is paused does not see."""
        if self._track is not None:
            self.send(PublishStateNotify(Parameters(self._largest(self._track))))

    @property
    def backlog(self) -> int:
        """Payload octets that are published and due and wait to be handed over; no fills."""
        if self._track is None or not self._forward:
            return 0
        waiting = sum(
            obj.have
            for _, flow in self._live
            if not flow.finished
            for obj in flow.subgroup.objects[flow.sent_upto :]
        )
        return waiting + sum(
            obj.have
            for _, subgroup in self._track.subgroups_since(self._position)
            for obj in subgroup.objects
        )

    def end(self, code: PublishDoneCode, reason: str) -> None:
        """End it from our side although the Track goes on: reset what is open, PUBLISH_DONE."""
        behind = code is PublishDoneCode.TOO_FAR_BEHIND
        self._cut_all(StreamErrorCode.TOO_FAR_BEHIND if behind else StreamErrorCode.CANCELLED)
        self._finish(code, reason)

    # -- the send queue asks ---------------------------------------------------------------------

    def candidate(self, admit: Admission) -> Flow | None:
        """Return the most urgent flow that may send."""
        track = self._track
        if self.over or track is None:
            return None
        track.when_changed(self.track_changed)
        self._adopt_new_subgroups(track)
        if track.is_malformed:
            self._cut_all(StreamErrorCode.MALFORMED_TRACK)
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
        self._retire(track)
        return best

    def track_changed(self) -> None:
        """The Track has more, or has ended. Told once, until it is looked at again."""
        track = self._track
        if self._held_updates and track is not None:
            if track.is_asleep:
                track.when_changed(self.track_changed)
            else:
                self._answer_held_updates()
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
        if self._held_updates or (track.is_asleep and parameters.get(P.FORWARD, self._forward)):
            self._hold(track, update_id, message)
            return
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
        self.send(RequestOk(Parameters({**self._largest(track), **self.expires()}), ()))
        self._open_fill(update_id, parameters.get(P.FILL_PARAMETERS))
        self._queue.wake(self)

    def _hold(self, track: LocalTrack, update_id: RequestId, message: RequestUpdate) -> None:
        """Keep an update until the Track is awake, and those behind it."""
        limit, held = self._context.config.max_request_updates, self._held_updates
        if limit and len(held) >= limit:
            raise TooManyRequestUpdates(f"{len(held) + 1} unanswered updates, limit {limit}")
        held.append((update_id, message))
        track.when_changed(self.track_changed)
        track.want()

    def _answer_held_updates(self) -> None:
        held, self._held_updates = self._held_updates, deque()
        for update_id, message in held:
            if not self.over:
                self.update_received(update_id, message)

    def refuse_update(self, code: RequestErrorCode, reason: str) -> None:
        """Answer REQUEST_ERROR, and end the subscription UPDATE_FAILED."""
        self.send(RequestError(error_code=code, reason=shortened(reason)))
        self.end(PublishDoneCode.UPDATE_FAILED, reason)

    # -- the end ---------------------------------------------------------------------------------

    def lose_right(self, why: Denial) -> None:
        """Reset what is open, and send PUBLISH_DONE."""
        self._cut_all(stream_code(why))
        self._finish(done_code(why), "")

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
        self._tell_end(code)
        self.close()

    def _tell_end(self, code: PublishDoneCode) -> None:
        """Tell the application that PUBLISH_DONE went out."""
        raise NotImplementedError

    def _detach(self) -> None:
        self._queue.forget(self)
        self._live.clear()
        self._flow_of.clear()
        for fill in self._fills:
            fill.patience.stop()
        self._fills.clear()
        self._held_updates.clear()
        if self._track is not None:
            self._track.unwatch(self.track_changed)
            self._track.detach(self)

    # -- flows -----------------------------------------------------------------------------------

    def _serve(self, track: LocalTrack, track_alias: int) -> None:
        """From now on send what is published, and the fill that was asked for."""
        self._track, self._alias = track, track_alias
        parameters, selection = self._parameters, self._selection
        selection.group_order = GroupOrder(parameters.get(P.GROUP_ORDER, track.group_order))
        wanted: LocationFilter = parameters.get(P.LOCATION_FILTER) or LocationFilter.none()
        selection.range = wanted.resolve(track.largest)
        self._position = track.opened
        self._adopt_open_subgroups()
        self._open_fill(self.request_id, parameters.get(P.FILL_PARAMETERS))
        track.when_changed(self.track_changed)
        track.attach(self)
        self._queue.wake(self)

    def _largest(self, track: LocalTrack) -> dict[P, Any]:
        """Return the parameter that tells the Largest Object, if there is one."""
        return {} if track.largest is None else {P.LARGEST_OBJECT: track.largest}

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
        )  # equals stay in the order in which they were opened
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
        pending = any(fill.is_pending for fill in self._fills)
        ended = track.ended is not None and not self.has_waiting and not pending
        if ended:
            # What has no data now and is not finished never will be: it was cut off.
            self._cut_all(StreamErrorCode.INTERNAL_ERROR)
        done = [flow for flow in self._flows() if flow.finished]
        if done:
            self._stream_count += sum(flow.stream_id is not None for flow in done)
            self._live = [entry for entry in self._live if not entry[1].finished]
            self._fills = [fill for fill in self._fills if not fill.finished]
            for flow in done:
                if isinstance(flow, SubgroupFlow):
                    self._flow_of.pop(flow.subgroup, None)
                elif isinstance(flow, FetchFlow):
                    flow.patience.stop()
        track.trim()
        # A subscriber that answers a PUBLISH can still ask for a fill, so the answer is waited for.
        over = ended and self.answered and not self._fills and not self._live
        if over and track.ended is not None:
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
                patience=Patience(self._context, inner.get(P.FILL_TIMEOUT), self.track_changed),
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


class PeerSubscription(Publisher, PeerRequest):
    """A SUBSCRIBE of the peer."""

    kind = MessageType.SUBSCRIBE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        track: FullTrackName,
        parameters: Parameters,
        queue: SendQueue,
    ) -> None:
        super().__init__(
            context,
            request_id,
            stream_id,
            ids,
            begun_by=Input.SUBSCRIBE,
            parameters=parameters,
            queue=queue,
        )
        self.track = track

    def accept(self, track: LocalTrack, track_alias: int) -> None:
        """Send SUBSCRIBE_OK, and from now on what is published."""
        self._state = advance(self._state, Input.ACCEPTED)
        include = self._parameters.get(P.INCLUDE_PROPERTIES, 1)
        properties = track.properties if include else ()
        parameters = Parameters({**self._largest(track), **self.expires()})
        self.send(SubscribeOk(track_alias, parameters, properties))
        self._serve(track, track_alias)
        self.mark_answered()

    def reject(
        self, code: RequestErrorCode, reason: str = "", *, retry_ms: int | None = None
    ) -> None:
        """Answer REQUEST_ERROR; no Object was or will be sent."""
        self._state = advance(self._state, Input.REJECTED)
        super().reject(code, reason, retry_ms=retry_ms)

    def lose_right(self, why: Denial) -> None:
        """Refuse it, if it waits for its answer; end it otherwise."""
        if self.answered:
            Publisher.lose_right(self, why)
        else:
            PeerRequest.lose_right(self, why)

    def _tell_end(self, code: PublishDoneCode) -> None:
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))


class OwnPublication(Publisher, OwnRequest):
    """A PUBLISH of ours. Objects flow at once, unless it begins paused."""

    kind = MessageType.PUBLISH

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        parameters: Mapping[P, Any],
        queue: SendQueue,
    ) -> None:
        super().__init__(
            context,
            request_id,
            stream_id,
            begun_by=Input.PUBLISH,
            parameters=parameters,
            queue=queue,
        )
        self._ids = ids

    def begin(self, track: LocalTrack, track_alias: int) -> None:
        """Send from now on what is published. PUBLISH has been sent."""
        self._serve(track, track_alias)

    def message_received(self, message: Message) -> None:
        """Take the answer, or an update by the subscriber."""
        match message:
            case RequestOk() if not self.answered:
                self._accepted(message)
            case RequestError() if not self.answered:
                self._state = advance(self._state, Input.REJECTED)
                self._cut_all(StreamErrorCode.CANCELLED)
                self._detach()
                self.refused(message)
            case RequestUpdate() if self.answered:
                update_id, refusal = self.admit_update(self._ids, message)
                if refusal is None:
                    self.update_received(update_id, message)
                else:
                    self.refuse_update(*refusal)
            case _ if self.renewal_answered(message):
                pass
            case _:
                raise self.unexpected(message)

    def lose_right(self, why: Denial) -> None:
        """End it, or give it up if it was not answered yet."""
        if self.answered:
            super().lose_right(why)
        else:
            self._fail("the peer has no right to it any more")

    def stop_received(self, code: int) -> None:
        """The subscriber wants nothing more. If it has not answered yet, its answer may follow."""
        super().stop_received(code)
        if self.over:
            return
        if self.answered:
            self.cancelled(code)
        else:
            self._cut_all(StreamErrorCode.CANCELLED)
            self._detach()

    def cancelled(self, code: int) -> None:
        """The subscriber gave the subscription up; or, ahead of its answer, failed."""
        if not self.answered:
            super().cancelled(code)
            return
        self.stopped_by_peer()
        self._context.emit(PublicationEnded(request_id=self.request_id, code=None))
        self.abort(StreamErrorCode.CANCELLED)

    def cancel(self) -> None:
        """Give it up without PUBLISH_DONE; no event follows."""
        self.stopped_by_peer()
        super().cancel()

    def stopped_by_peer(self) -> None:
        """Reset every data stream, fills included."""
        if self._state is State.PENDING_PUBLISHER:
            self._state = advance(self._state, Input.LOST)
        super().stopped_by_peer()

    def _accepted(self, message: RequestOk) -> None:
        if (misplaced := stray(message.parameters, Scope.PUBLISH_OK)) is not None:
            raise ProtocolError(f"{misplaced.name} in the answer to a PUBLISH")
        self._state = advance(self._state, Input.ACCEPTED)
        self.answered = True
        expires = message.parameters.get(P.EXPIRES, 0)
        self._context.emit(PublishAccepted(request_id=self.request_id, expires_ms=expires))
        if self._sent_fin:  # it stopped our direction ahead of its answer
            self.cancelled(StreamErrorCode.CANCELLED)
        else:
            self._queue.wake(self)

    def _fail(self, reason: str) -> None:
        self.stopped_by_peer()
        super()._fail(reason)

    def _tell_end(self, code: PublishDoneCode) -> None:
        self._context.emit(PublicationEnded(request_id=self.request_id, code=code))


def _key(entry: tuple[tuple[int, ...], SubgroupFlow]) -> tuple[int, ...]:
    return entry[0]
