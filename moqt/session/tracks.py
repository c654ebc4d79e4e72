"""SUBSCRIBE_TRACKS, in both roles (MOQT, "SUBSCRIBE_TRACKS").

It asks for a PUBLISH of every Track under a prefix. Those come on streams of their own and live
and end by themselves; here are only the wish, its changes, and word of Tracks that are skipped.
"""

from collections import deque
from collections.abc import Callable
from weakref import WeakSet

from moqt.codepoints import MessageType, RequestErrorCode, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import (
    RequestId,
    TracksEnded,
    TrackSkipped,
    TracksSubscribed,
    TracksUpdated,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.localtrack import LocalTrack
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds
from moqt.wire.filters import RANGE_FILTERS, filter_defect, for_track, range_filters, track_passes
from moqt.wire.messages.base import Message
from moqt.wire.messages.namespace import PublishSkipped
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.parameters import Parameters, Scope, stray

#: Parameters of a SUBSCRIBE_TRACKS that say something of the wish and nothing of subscriptions.
_OF_THE_WISH = frozenset(
    {P.AUTHORIZATION_TOKEN, P.RENDEZVOUS_TIMEOUT, P.TRACK_NAMESPACE_PREFIX, P.NEW_GROUP_REQUEST}
)


class OwnTracks(OwnRequest):
    """A SUBSCRIBE_TRACKS of ours."""

    kind = MessageType.SUBSCRIBE_TRACKS

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        *,
        prefix: TrackNamespace,
        parameters: Parameters,
    ) -> None:
        super().__init__(context, request_id, stream_id)
        self.prefix = prefix
        self._is_filtered = bool(range_filters(parameters))
        self._updates: deque[tuple[RequestId, TrackNamespace]] = deque()

    def may_filter(self, track: FullTrackName) -> bool:
        """Whether a PUBLISH of ``track`` may lack Objects because of the filters asked for here."""
        wanted = (self.prefix, *(prefix for _, prefix in self._updates))
        return self._is_filtered and any(p.is_prefix_of(track.namespace) for p in wanted)

    def update(self, update_id: RequestId, parameters: Parameters, limit: int) -> None:
        """Send a REQUEST_UPDATE; ``limit`` is the peer's MAX_REQUEST_UPDATES, 0 for none."""
        if not self.answered:
            raise UsageError("only a SUBSCRIBE_TRACKS that was accepted can be updated")
        if limit and len(self._updates) >= limit:
            raise UsageError(f"{limit} updates are unanswered, which is the peer's limit")
        last = self._updates[-1][1] if self._updates else self.prefix
        self._updates.append((update_id, parameters.get(P.TRACK_NAMESPACE_PREFIX, last)))
        self._is_filtered |= bool(range_filters(parameters))
        self.send(RequestUpdate(update_id, parameters))

    def message_received(self, message: Message) -> None:
        """The answer must come first; skipped Tracks are relative to the prefix."""
        match message:
            case RequestOk() if not self.answered:
                if (misplaced := stray(message.parameters, Scope.NAMESPACE_OK)) is not None:
                    raise ProtocolError(f"{misplaced.name} in the answer to a SUBSCRIBE_TRACKS")
                self.answered = True
                self._context.emit(TracksSubscribed(request_id=self.request_id))
            case RequestError() if not self.answered:
                self.refused(message)
            case RequestOk() if self._updates:
                update_id, self.prefix = self._updates.popleft()
                self._context.emit(
                    UpdateAccepted(
                        request_id=self.request_id,
                        update_id=update_id,
                        largest=None,
                        fill_expected=False,
                    )
                )
            case RequestError() if self._updates:
                self._update_refused(message)
            case PublishSkipped() if self.answered:
                self._context.emit(
                    TrackSkipped(request_id=self.request_id, track=self._whole(message))
                )
            case _:
                raise self.unexpected(message)

    def fin_received(self) -> None:
        """The publisher has no more to say."""
        if not self.answered:
            super().fin_received()
        else:
            self._finish(None)

    def cancelled(self, code: int) -> None:
        """The publisher gave up."""
        if not self.answered:
            super().cancelled(code)
        else:
            self._finish(code)

    def _update_refused(self, message: RequestError) -> None:
        self.check_redirect(message)
        update_id, _ = self._updates.popleft()
        self._context.emit(
            UpdateRefused(
                request_id=self.request_id,
                update_id=update_id,
                code=message.error_code,
                reason=message.reason,
            )
        )
        self._finish(None)  # it does not survive a refused update

    def _whole(self, message: PublishSkipped) -> FullTrackName:
        try:
            return FullTrackName(self.prefix + message.suffix, message.name)
        except UsageError as exc:
            raise ProtocolError(str(exc)) from None

    def _finish(self, code: int | None) -> None:
        self._context.emit(TracksEnded(request_id=self.request_id, code=code))
        self.abort(StreamErrorCode.CANCELLED)


class PeerTracks(PeerRequest):
    """A SUBSCRIBE_TRACKS of the peer. The application publishes; here is what is wanted."""

    kind = MessageType.SUBSCRIBE_TRACKS

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        prefix: TrackNamespace,
        parameters: Parameters,
        overlaps: Callable[["PeerTracks", TrackNamespace], bool],
    ) -> None:
        super().__init__(context, request_id, stream_id, ids)
        self.prefix = prefix
        self._parameters = parameters
        self._overlaps = overlaps
        self._skipped: WeakSet[LocalTrack] = WeakSet()

    def accept(self) -> None:
        """Take it."""
        self.send(RequestOk(Parameters(self.expires())))
        self.mark_answered()

    def wants(self, track: LocalTrack) -> bool:
        """Whether a PUBLISH of ``track`` is asked for, and has not been declared skipped."""
        return (
            self.answered
            and self.prefix.is_prefix_of(track.name.namespace)
            and track not in self._skipped
            and track_passes(range_filters(self._parameters), track.properties)
        )

    def skip(self, track: LocalTrack) -> None:
        """Send PUBLISH_SKIPPED. The Track cannot be published for this wish any more."""
        if not self.wants(track):
            raise UsageError(f"{track.name} is not asked for, or was skipped before")
        self._skipped.add(track)
        self.send(PublishSkipped(track.name.namespace.suffix(self.prefix), track.name.name))

    def initial(self, track: LocalTrack) -> Parameters:
        """Return the parameters that a subscription to ``track`` begins with."""
        filters = for_track(range_filters(self._parameters), track.properties)
        values = {
            key: value
            for key, value in self._parameters.items()
            if key not in RANGE_FILTERS and key not in _OF_THE_WISH
        }
        for kind in {f.type for f in filters}:
            values[kind] = tuple(f for f in filters if f.type is kind)
        return Parameters(values)

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Change what is wanted of Tracks that are published from now on."""
        prefix: TrackNamespace = message.parameters.get(P.TRACK_NAMESPACE_PREFIX, self.prefix)
        if self._overlaps(self, prefix):
            self.refuse_update(RequestErrorCode.PREFIX_OVERLAP, f"{prefix} overlaps another")
            return
        changes = {k: v for k, v in message.parameters.items() if k not in _OF_THE_WISH}
        parameters = self._parameters | changes
        defect = filter_defect(parameters, self._context.config.max_filter_ranges)
        if defect is not None:
            self.refuse_update(RequestErrorCode.INVALID_FILTER, defect)
            return
        self.prefix, self._parameters = prefix, parameters
        self.send(RequestOk(Parameters(self.expires())))
        self._context.emit(
            TracksUpdated(request_id=self.request_id, prefix=prefix, parameters=parameters)
        )
