"""FETCH and TRACK_STATUS, in both roles (MOQT, "Fetch", "TRACK_STATUS")."""

from collections.abc import Iterable, Mapping
from typing import Any

from moqt.authority import Denial
from moqt.codepoints import (
    GroupOrder,
    LocationFilterType,
    MessageType,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.coverage import Knowledge
from moqt.session.events import (
    FetchAccepted,
    FetchEnded,
    PeerRequestEnded,
    RequestId,
    RequestRefused,
    TrackStatusAccepted,
)
from moqt.session.fetchflow import FetchFlow, Patience
from moqt.session.guard import stream_code
from moqt.session.localtrack import LocalTrack
from moqt.session.publishing import Selection
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds
from moqt.session.sendqueue import Admission, Flow, SendQueue
from moqt.session.subscription import AliasDirectory
from moqt.wire.filters import LocationFilter, LocationRange, range_filters
from moqt.wire.messages.base import Message
from moqt.wire.messages.fetch import FetchOk
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.pairs import mandatory_property
from moqt.wire.parameters import Parameters

_ABSOLUTE = frozenset(
    {
        LocationFilterType.ABSOLUTE_START,
        LocationFilterType.ABSOLUTE_START_GROUP_END,
        LocationFilterType.ABSOLUTE_RANGE,
    }
)


class OwnFetch(OwnRequest):
    """A FETCH of ours: an answer on its request stream, Objects on one data stream, any order."""

    kind = MessageType.FETCH

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
        super().__init__(context, request_id, stream_id)
        self.track = track
        self.held = 0
        self.waits_for_application = False
        self.is_moving = False
        self.pieces = False
        self.is_filtered = bool(range_filters(parameters))
        self._directory = directory
        self._order = GroupOrder(parameters.get(P.GROUP_ORDER, GroupOrder.ASCENDING))
        wanted: LocationFilter | None = parameters.get(P.LOCATION_FILTER)
        known = wanted is not None and wanted.type in _ABSOLUTE
        self._start = wanted.resolve(None).start if known and wanted is not None else None
        self._data_stream: StreamId | None = None
        self._accepted = False
        self._data_ended: tuple[bool, int | None] | None = None
        directory.expect_fetch_stream(request_id, self)

    def message_received(self, message: Message) -> None:
        """Take the one answer."""
        match message:
            case FetchOk() if not self.answered:
                self._accept(message)
            case RequestError() if not self.answered:
                self._stop_data()
                self.refused(message)
            case _ if self.renewal_answered(message):
                pass
            case _:
                raise self.unexpected(message)

    def _accept(self, message: FetchOk) -> None:
        if self._start is not None and message.end_location < self._start:
            raise ProtocolError(f"FETCH_OK ends at {message.end_location}, before {self._start}")
        self.answered = self._accepted = True
        if (kind := mandatory_property(message.track_properties)) is not None:
            self._stop_data()
            self._context.emit(
                RequestRefused(
                    request_id=self.request_id,
                    code=RequestErrorCode.UNSUPPORTED_EXTENSION,
                    reason=f"the track has the unknown mandatory property {kind:#x}",
                    retry_ms=None,
                )
            )
            self.abort(StreamErrorCode.CANCELLED)
            return
        self._context.emit(
            FetchAccepted(
                request_id=self.request_id,
                end_of_track=message.end_of_track,
                end_location=message.end_location,
                track_properties=message.track_properties,
            )
        )
        self._settle()

    def fin_received(self) -> None:
        """The publisher has nothing left to say; the Objects come on the data stream."""
        super().fin_received()
        if not self.over and self._data_stream is None:
            self._context.timers.start(self, self._context.config.done_timeout_s)

    def timer_expired(self) -> None:
        """Give up a data stream that has not shown itself."""
        if self._data_stream is None:
            self._end_with(complete=False, code=StreamErrorCode.INTERNAL_ERROR)

    def cancelled(self, code: int) -> None:
        """The publisher gave the request up."""
        if not self.answered:
            self._stop_data()
            super().cancelled(code)
        else:
            self._end_with(complete=False, code=code)

    def cancel(self) -> None:
        """Give the fetch up, on both streams; no event follows."""
        self._stop_data()
        super().cancel()

    def _fail(self, reason: str) -> None:
        self._stop_data()
        super()._fail(reason)

    # -- the data stream -------------------------------------------------------------------------

    def group_order_of(self, request_id: RequestId) -> GroupOrder:
        """Return the Group Order that was asked for."""
        return self._order

    def stream_opened(self, stream_id: StreamId) -> None:
        """The data stream showed its header."""
        self._data_stream = stream_id

    def fetch_stream_ended(
        self, stream_id: StreamId, request_id: RequestId, code: int | None
    ) -> None:
        """The data stream is over; so is the fetch, once it has been answered."""
        self._data_stream = None
        self._data_ended = code is None, code
        self._settle()

    def malformed(self, reason: str) -> None:
        """The Track broke its own rules."""
        self._end_with(complete=False, code=StreamErrorCode.MALFORMED_TRACK)

    def too_far_behind(self) -> None:
        """One stream is bounded by its own window."""

    def open_streams(self) -> Iterable[StreamId]:
        """Return the data stream, if it is open."""
        return () if self._data_stream is None else (self._data_stream,)

    def _settle(self) -> None:
        if self._data_ended is not None and self._accepted and not self.over:
            complete, code = self._data_ended
            self._end_with(complete=complete, code=code)

    def _end_with(self, *, complete: bool, code: int | None) -> None:
        if self.over:
            return
        self._stop_data()
        self._context.emit(FetchEnded(request_id=self.request_id, complete=complete, code=code))
        if complete:
            self.close()
        else:
            self.abort(StreamErrorCode.CANCELLED)

    def _stop_data(self) -> None:
        self._directory.forget(self)
        if self._data_stream is not None:
            self._directory.stop_stream(self._data_stream, StreamErrorCode.CANCELLED)
            self._data_stream = None


class PeerFetch(PeerRequest):
    """A FETCH that we serve from a LocalTrack."""

    kind = MessageType.FETCH

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
        self.sent_octets = 0
        self._parameters = parameters
        self._queue = queue
        self._track: LocalTrack | None = None
        self._flow: FetchFlow | None = None
        # The time until the application answers counts, too.
        self._patience = Patience(context, parameters.get(P.FILL_TIMEOUT), self.track_changed)

    def accept(self, track: LocalTrack) -> None:
        """Send FETCH_OK and then the Objects; INVALID_RANGE if there can be none."""
        if track.is_malformed:
            self.decline(RequestErrorCode.MALFORMED_TRACK, "the track broke its own rules")
            return
        wanted: LocationFilter = self._parameters.get(P.LOCATION_FILTER) or LocationFilter.none()
        span = wanted.resolve_fetch(track.largest)
        if span is None or span.end is None:
            asked = wanted.resolve(track.largest).start
            self.decline(
                RequestErrorCode.INVALID_RANGE,
                f"nothing from {asked} on: the Largest Object is {track.largest}",
            )
            return
        parameters = self._parameters
        order = GroupOrder(parameters.get(P.GROUP_ORDER, GroupOrder.ASCENDING))
        selection = Selection(
            range=span,
            filters=range_filters(parameters),
            priority=parameters.get(P.SUBSCRIBER_PRIORITY, 128),
            group_order=order,
        )
        self._track = track
        self._flow = FetchFlow(
            self._context,
            selection,
            track,
            request_id=self.request_id,
            patience=self._patience,
        )
        end_of_track, end = _end_location(track, span)
        include = parameters.get(P.INCLUDE_PROPERTIES, 1)
        self.send(
            FetchOk(
                end_of_track=end_of_track,
                end_location=end,
                parameters=Parameters(),
                track_properties=track.properties if include else (),
            )
        )
        track.when_changed(self.track_changed)
        self._queue.wake(self)
        self.mark_answered()

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Only the priority can change."""
        if self._flow is not None:
            selection = self._flow.selection
            changed = message.parameters.get(P.SUBSCRIBER_PRIORITY, selection.priority)
            selection.priority = changed
            self._queue.wake(self)
        self.send(RequestOk(Parameters(self.expires())))

    def end(self, code: StreamErrorCode) -> None:
        """End it from our side: reset both of its streams."""
        if self._flow is not None:
            self._flow.cut(code)
        self._release()
        self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))
        self.abort(code)

    def lose_right(self, why: Denial) -> None:
        """Refuse it, if it waits for its answer; reset both of its streams otherwise."""
        if self.answered:
            self.end(stream_code(why))
        else:
            super().lose_right(why)

    def candidate(self, admit: Admission) -> Flow | None:
        """Return the one flow, if it may send."""
        flow, track = self._flow, self._track
        if flow is not None and track is not None:
            track.when_changed(self.track_changed)
            if track.is_malformed:
                flow.give_up(StreamErrorCode.MALFORMED_TRACK)  # (MOQT, "Malformed Tracks")
        self.has_waiting = flow is not None and flow.has_data()
        if flow is None:
            return None
        over = track is not None and track.ended is not None and not flow.is_pending
        if over and not self.has_waiting:
            # Only the rest of an Object is waited for here, and that will not come any more.
            flow.cut(StreamErrorCode.INTERNAL_ERROR)
        if flow.finished:
            self._release()
            self.close()
            self._context.emit(PeerRequestEnded(request_id=self.request_id, cancelled=False))
            return None
        return flow if self.has_waiting and admit(flow) else None

    def track_changed(self) -> None:
        """The Track has more. Told once, until it is looked at again."""
        self._queue.wake(self)
        if self._context.wake is not None:
            self._context.wake()

    def stream_stopped(self, flow: Flow) -> None:
        """The peer wants no more Objects."""
        flow.finished = True
        self._queue.wake(self)

    def stopped_by_peer(self) -> None:
        """Reset the data stream."""
        if self._flow is not None:
            self._flow.cut(StreamErrorCode.CANCELLED)
        self._release()

    def _end(self) -> None:
        super()._end()
        self._patience.stop()

    def _release(self) -> None:
        self._queue.forget(self)
        self._flow = None
        if self._track is not None:
            self._track.unwatch(self.track_changed)


def _end_location(track: LocalTrack, span: LocationRange) -> tuple[bool, Location]:
    """Return FETCH_OK's End Of Track and End Location for a range that is not empty."""
    end, largest = span.end, track.largest
    assert end is not None, "the range of a fetch is closed"
    assert largest is not None, "a track without objects has no range"
    if track.end_of_track and end >= largest:
        final = track.last_object()
        if track.coverage is not None and final is not None:
            _, known, knowledge = track.coverage.run_at(final.next())
            if knowledge is not Knowledge.COMPLETE or known.next() < largest:
                return False, end  # nor is it known yet which Object is the last
        return (True, final) if final is not None and final >= span.start else (False, end)
    if track.coverage is not None:
        return False, end  # what lies at the end may not have come yet
    # "To the end of a Group" has no Object ID of its own: name the last one there is.
    last = track.last_of(end.group)
    return False, min(end, last) if last is not None and last >= span.start else end


class OwnTrackStatus(OwnRequest):
    """A TRACK_STATUS of ours."""

    kind = MessageType.TRACK_STATUS

    def message_received(self, message: Message) -> None:
        """Take the one answer."""
        match message:
            case RequestOk() if not self.answered:
                self.answered = True
                self._context.emit(
                    TrackStatusAccepted(
                        request_id=self.request_id,
                        largest=message.parameters.get(P.LARGEST_OBJECT),
                        track_properties=message.track_properties,
                    )
                )
                self.close()
            case RequestError() if not self.answered:
                self.refused(message)
            case _:
                raise self.unexpected(message)


class PeerTrackStatus(PeerRequest):
    """A TRACK_STATUS that we answer; it keeps no state."""

    kind = MessageType.TRACK_STATUS

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        parameters: Mapping[P, Any],
    ) -> None:
        super().__init__(context, request_id, stream_id, ids)
        self._include = bool(parameters.get(P.INCLUDE_PROPERTIES, 1))

    def message_received(self, message: Message) -> None:
        """Nothing may follow a TRACK_STATUS."""
        raise self.unexpected(message)

    def accept(self, track: LocalTrack) -> None:
        """Answer what a SUBSCRIBE_OK would have said."""
        answer: dict[P, Any] = {}
        if track.largest is not None:
            answer[P.LARGEST_OBJECT] = track.largest
        self.send(RequestOk(Parameters(answer), track.properties if self._include else ()))
        self.mark_answered()
        self.close()
