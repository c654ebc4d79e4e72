"""Session: the doors and the routing, no rules.

What a stream or a request means is decided in the file of its chapter; here is only which of
them an octet, a verb or a timer goes to, and that one broken rule closes the session exactly once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from moqt.authority import Authority
from moqt.codepoints import (
    GroupOrder,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
    known,
)
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, TooManyRequests, TooManyRequestUpdates, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.admission import Admission
from moqt.session.arrivals import Arrivals
from moqt.session.commands import CloseSession, Command, StreamId
from moqt.session.config import Role, SessionConfig
from moqt.session.context import GUARD_TIMER, Context
from moqt.session.control import FAREWELL_TIMER, GOAWAY_TIMER, SETUP_TIMER, ControlStreams
from moqt.session.delivery import Delivery
from moqt.session.discovery import (
    NamespaceDirectory,
    OwnNamespace,
    OwnNamespaceSubscription,
    PeerNamespace,
    PeerNamespaceSubscription,
)
from moqt.session.events import (
    Event,
    ObjectPiece,
    ObjectReceived,
    RequestId,
    SessionTerminated,
)
from moqt.session.fetching import OwnFetch, OwnTrackStatus, PeerFetch, PeerTrackStatus
from moqt.session.guard import SESSION_CODES
from moqt.session.guests import Guests
from moqt.session.localtrack import LocalTrack
from moqt.session.publisher import OwnPublication, PeerSubscription, Publisher
from moqt.session.registry import Requests
from moqt.session.requests import (
    OwnRequest,
    PeerRequest,
    RequestIds,
    RequestStream,
    shortened,
)
from moqt.session.sendqueue import Credit, Flow, SendQueue
from moqt.session.streams import StreamIds, is_unidirectional
from moqt.session.subscriber import OwnSubscription, PeerPublication, Subscriber
from moqt.session.tracks import OwnTracks, PeerTracks
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter, filter_defect
from moqt.wire.framing import encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.fetch import Fetch
from moqt.wire.messages.namespace import PublishNamespace, SubscribeNamespace, SubscribeTracks
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestUpdate
from moqt.wire.messages.setup import Setup
from moqt.wire.messages.subscribe import Subscribe, TrackStatus
from moqt.wire.parameters import ALLOWED, Parameters, Scope
from moqt.wire.token import AuthorizationToken

#: Requests of ours that Objects come for.
_RECEIVERS = (Subscriber, OwnFetch)
#: STOP_SENDINGs remembered that came ahead of the request they cancel.
_EARLY_STOPS = 256


class _TimerTarget(Protocol):
    def timer_expired(self) -> None:
        """The timer is due."""


class _Unlimited:
    """Credit of a transport that takes everything; for sessions back to back."""

    def stream(self, stream_id: StreamId) -> int:
        return 1 << 62


UNLIMITED: Credit = _Unlimited()


class Session:
    """One MOQT session, without I/O (MOQT, "Sessions").

    Feed it with ``receive_*``, steer it with the verbs (``subscribe``, ``accept_subscribe``, ...),
    and after *every* call drain it: tell it the time with ``handle_timer``, carry out
    ``data_to_send()``, then handle ``events()``. ``receive_*`` never raises for what the peer
    did; that becomes a close and an event.

    Args:
        role: Which side opened the QUIC connection.
        config: Limits and Setup Options.
        wake: Called when a Track or directory that other sessions share has something new for
            this one: drain it soon. Called at any time, also from inside a verb.
        authority: Asked about each request of the peer, before anything else is; None: everything
            is allowed.
        wall_clock: Seconds since the epoch, for the authority.
        guests: What each peer has of this endpoint, over all its sessions; None: not counted.
    """

    def __init__(
        self,
        role: Role,
        config: SessionConfig | None = None,
        *,
        wake: Callable[[], None] | None = None,
        authority: Authority | None = None,
        wall_clock: Callable[[], float] = lambda: 0.0,
        guests: Guests | None = None,
    ) -> None:
        self.role = role
        self.config = config or SessionConfig()
        self._context = Context(
            role,
            self.config,
            StreamIds(role),
            authority=authority,
            wall_clock=wall_clock,
            guests=guests,
            wake=wake,
        )
        self._ends_with: SessionErrorCode | None = None
        self._terminated: SessionTerminated | None = None
        self._ids = RequestIds(role)
        self._control = ControlStreams(self._context)
        self._delivery = Delivery(self._context, self._control_received)
        self._queue = SendQueue()
        self._next_alias = 1
        self._requests = Requests()
        admission = Admission(
            self._context, self._ids, self._requests, self._control, self._delivery, self._queue
        )
        self._arrivals = Arrivals(self._context, self._requests, admission.take)

    # -- state -----------------------------------------------------------------------------------

    @property
    def terminated(self) -> SessionTerminated | None:
        """How the session ended, once it has."""
        return self._terminated

    @property
    def peer_setup(self) -> Setup | None:
        """The peer's SETUP, once it has come."""
        return self._context.peer_setup

    @property
    def open_requests(self) -> int:
        """Requests of both sides that are alive."""
        return len(self._requests.by_id)

    @property
    def is_going_away(self) -> bool:
        """Whether either side has sent GOAWAY."""
        return self._control.goaway_received or self._control.goaway_sent

    @property
    def has_data_waiting(self) -> bool:
        """Whether a stream of Objects may have something to send."""
        return not self._queue.is_idle

    @property
    def peer_name(self) -> str:
        """Whose session it is: who was granted it, else what stands for where it comes from."""
        return self._context.guard.whose()

    # -- doors: what happened on the wire --------------------------------------------------------

    def tell_time(self, now: float) -> None:
        """Take note of the time ahead of what comes on request streams, which is counted by it.

        :meth:`handle_timer` says it, too, but only after what came, and it may be long ago.
        """
        self._context.now = now

    def start(self, *, address: str = "", certificate: bytes | None = None) -> None:
        """Open the control stream and send SETUP. Once, when the connection is up.

        Args:
            address: The host that the peer comes from, for the authority.
            certificate: DER of the peer's certificate, if it has one that was verified.
        """
        guard = self._context.guard
        guard.address, guard.certificate = address, certificate
        self._control.open()

    def receive_stream_data(self, stream_id: StreamId, data: bytes, *, fin: bool = False) -> None:
        """Take octets that arrived on a stream, in order."""
        if self._terminated is not None:
            return
        try:
            if not is_unidirectional(stream_id):
                self._context.release(stream_id, len(data))
                self._arrivals.receive(stream_id, data, fin)
            elif self._control.is_peer_stream(stream_id):
                self._control_received(stream_id, data, fin)
            else:
                self._delivery.receive(stream_id, data, fin)
        except ProtocolError as exc:
            self._violated(exc)

    def receive_reset(self, stream_id: StreamId, code: int) -> None:
        """The peer gave up sending on a stream."""
        if self._terminated is not None:
            return
        if self._control.is_peer_stream(stream_id):
            self._terminate(
                SessionErrorCode.PROTOCOL_VIOLATION, "control stream reset", by_peer=False
            )
        elif is_unidirectional(stream_id):
            with self._closing_on_violation():
                self._delivery.reset(stream_id, code)
        else:
            with self._closing_on_violation():
                self._arrivals.reset(stream_id, code)

    def receive_stop_sending(self, stream_id: StreamId, code: int) -> None:
        """The peer wants no more of a stream. The transport has reset it already."""
        if self._terminated is not None:
            return
        if self._control.is_own_stream(stream_id):
            self._terminate(
                SessionErrorCode.PROTOCOL_VIOLATION, "control stream stopped", by_peer=False
            )
        elif is_unidirectional(stream_id):
            if (sending := self._context.open_streams.ended(stream_id)) is not None:
                source, flow = sending
                source.stream_stopped(flow)
        else:
            with self._closing_on_violation():
                self._arrivals.stop(stream_id, code)

    def receive_datagram(self, data: bytes) -> None:
        """Take one QUIC DATAGRAM."""
        if self._terminated is not None:
            return
        with self._closing_on_violation():
            self._delivery.datagram(data)

    def receive_connection_lost(self, code: int, reason: str, *, by_peer: bool) -> None:
        """The connection is gone: everything ends."""
        self._terminate(known(SessionErrorCode, code), reason, by_peer=by_peer, close=False)

    def handle_timer(self, now: float) -> None:
        """Do what is due at ``now`` (seconds of any steady clock). Call it before each drain."""
        if self._terminated is not None:
            return
        self._context.now = now
        for key in self._context.timers.expired(now):
            if self._terminated is not None:
                return
            if key == SETUP_TIMER:
                self._terminate(
                    SessionErrorCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP in time", by_peer=False
                )
            elif key == GOAWAY_TIMER:
                self._goaway_due()
            elif key == GUARD_TIMER:
                self._look_again()
            elif key == FAREWELL_TIMER and self._ends_with is not None:
                self._terminate(self._ends_with, "", by_peer=False)
            else:
                cast(_TimerTarget, key).timer_expired()
        self._context.timers.fix(now)  # what these have started is waited for, too

    def next_deadline(self) -> float | None:
        """Return when to call :meth:`handle_timer` at the latest; None if nothing is due."""
        return None if self._terminated is not None else self._context.timers.next_deadline()

    # -- drains ----------------------------------------------------------------------------------

    def data_to_send(self, budget: int = 1 << 62, credit: Credit = UNLIMITED) -> Iterator[Command]:
        """Yield what the transport must do now. Carry each command out before taking the next.

        Control and request messages are never held back. Of Objects, about ``budget`` octets are
        taken, the most urgent first, from streams for which ``credit`` has room at that moment.
        """
        yield from self._context.take_commands()
        quantum = self.config.write_quantum
        next_uni = self._context.stream_ids.next_uni
        open_streams = self._context.open_streams

        def admit(flow: Flow) -> bool:
            if budget <= 0:
                return False
            if flow.stream_id is not None:
                return credit.stream(flow.stream_id) > 0
            return open_streams.may_open(flow, next_uni(), credit)

        while self._terminated is None:
            if budget <= 0:
                self._queue.look(admit)  # what is over ends, room or not
                break
            if (turn := self._queue.next(admit)) is None:
                break
            source, flow = turn
            stream_id = flow.stream_id if flow.stream_id is not None else next_uni()
            pieces, octets = flow.pull(min(budget, quantum, credit.stream(stream_id)))
            budget -= max(octets, 1)
            source.sent_octets += octets
            if flow.finished:
                open_streams.ended(stream_id)
            else:
                open_streams.opened(stream_id, source, flow)
            yield from self._context.take_commands()
            yield from pieces
        yield from self._context.take_commands()

    def events(self) -> list[Event]:
        """Return, and forget, what happened since the last call."""
        context = self._context
        for request_id in context.ended:
            context.guard.forget(request_id)
            context.visit.done(request_id)
            self._requests.remove(request_id)
        context.ended.clear()
        if self._control.goaway_received and not self._requests.by_id:
            self._terminate(SessionErrorCode.NO_ERROR, "going away", by_peer=False)
        events, context.events = context.events, []
        return events

    def consumed(self, event: ObjectReceived | ObjectPiece) -> None:
        """The application took an Object: the receive windows may move on by its octets.

        Once for each Object, or piece of one, also when its request is over by then.
        """
        if self._terminated is not None:
            return
        request = self._requests.by_id.get(event.request_id)
        owner = request if isinstance(request, _RECEIVERS) else None
        self._delivery.consumed(event, owner)

    # -- verbs: our requests ---------------------------------------------------------------------

    def subscribe(
        self,
        track: FullTrackName,
        *,
        location_filter: LocationFilter = LocationFilter.NEXT_OBJECT,
        fill: LocationFilter | FillParameters | None = None,
        range_filters: Iterable[RangeFilter] = (),
        priority: int = 128,
        group_order: GroupOrder = GroupOrder.ASCENDING,
        forward: bool = True,
        pieces: bool = False,
        tokens: Iterable[AuthorizationToken] = (),
    ) -> RequestId:
        """Ask for the future Objects of a Track (MOQT, "SUBSCRIBE").

        Args:
            track: Its Full Track Name.
            location_filter: Which of the future Objects.
            fill: Which of the past ones, on a stream of their own. Next Object and a fill from
                {0, 0} bring each Object of the Track exactly once.
            range_filters: Further conditions, within the peer's MAX_FILTER_RANGES.
            priority: Subscriber Priority, 0 to 255, smaller is more urgent.
            group_order: Always sent, since a fill cannot be read without knowing it.
            forward: False: paused; no Object flows and no fill is opened.
            pieces: Take Objects as they come: SubgroupOpened, ObjectBegan, ObjectPiece and
                SubgroupClosed instead of ObjectReceived, but for datagrams.
            tokens: To show for this request, with values; empty: those of SETUP count.

        Returns:
            The Request ID at once; SubscribeAccepted or RequestRefused answers it.

        Raises:
            UsageError: If the session is over or going away, or the peer takes no such filter.
                Nothing was sent.
        """
        values: dict[P, Any] = {P.LOCATION_FILTER: location_filter, P.GROUP_ORDER: group_order}
        if fill is not None:
            if isinstance(fill, LocationFilter):
                fill = FillParameters(Parameters({P.LOCATION_FILTER: fill}))
            values[P.FILL_PARAMETERS] = fill
        if not forward:
            values[P.FORWARD] = 0
        self._show(values, tokens)
        parameters = self._checked(values, range_filters, priority)
        request_id, stream_id = self._open_request(Subscribe(0, track, parameters))
        subscription = OwnSubscription(
            self._context,
            request_id,
            stream_id,
            track=track,
            parameters=parameters,
            directory=self._delivery,
        )
        subscription.pieces = pieces
        self._begin(subscription, Subscribe(request_id, track, parameters))
        return request_id

    def fetch(
        self,
        track: FullTrackName,
        *,
        location_filter: LocationFilter,
        range_filters: Iterable[RangeFilter] = (),
        priority: int = 128,
        group_order: GroupOrder = GroupOrder.ASCENDING,
        fill_timeout_ms: int | None = None,
        pieces: bool = False,
        tokens: Iterable[AuthorizationToken] = (),
    ) -> RequestId:
        """Ask for past Objects of a Track (MOQT, "FETCH").

        Returns and raises as :meth:`subscribe`; FetchAccepted or RequestRefused answers, Objects
        may come ahead of it, FetchEnded is the last event. With ``pieces`` they come as
        ObjectBegan and ObjectPiece.

        ``fill_timeout_ms``: milliseconds that a relay may wait for what it has not, in total;
        then that comes as RangeMarked. 0: what is at hand. None: as it likes.
        """
        values: dict[P, Any] = {P.LOCATION_FILTER: location_filter, P.GROUP_ORDER: group_order}
        if fill_timeout_ms is not None:
            values[P.FILL_TIMEOUT] = fill_timeout_ms
        self._show(values, tokens)
        parameters = self._checked(values, range_filters, priority)
        request_id, stream_id = self._open_request(Fetch(0, track, parameters))
        fetch = OwnFetch(
            self._context,
            request_id,
            stream_id,
            track=track,
            parameters=parameters,
            directory=self._delivery,
        )
        fetch.pieces = pieces
        self._begin(fetch, Fetch(request_id, track, parameters))
        return request_id

    def track_status(
        self, track: FullTrackName, *, tokens: Iterable[AuthorizationToken] = ()
    ) -> RequestId:
        """Ask what a SUBSCRIBE would be told (MOQT, "TRACK_STATUS"); raises as subscribe."""
        parameters = self._show({}, tokens)
        request_id, stream_id = self._open_request(TrackStatus(0, track, parameters))
        request = OwnTrackStatus(self._context, request_id, stream_id)
        self._begin(request, TrackStatus(request_id, track, parameters))
        return request_id

    def publish_namespace(
        self, prefix: TrackNamespace, *, tokens: Iterable[AuthorizationToken] = ()
    ) -> RequestId:
        """Tell that there are Tracks under ``prefix``; raises as subscribe.

        Stands until :meth:`cancel`, or until NamespaceRevoked.
        """
        parameters = self._show({}, tokens)
        request_id, stream_id = self._open_request(PublishNamespace(0, prefix, parameters))
        request = OwnNamespace(self._context, request_id, stream_id)
        self._begin(request, PublishNamespace(request_id, prefix, parameters))
        return request_id

    def subscribe_namespace(
        self, prefix: TrackNamespace, *, tokens: Iterable[AuthorizationToken] = ()
    ) -> RequestId:
        """Ask which namespaces begin with ``prefix``, now and later; raises as subscribe."""
        parameters = self._show({}, tokens)
        request_id, stream_id = self._open_request(SubscribeNamespace(0, prefix, parameters))
        request = OwnNamespaceSubscription(self._context, request_id, stream_id, prefix=prefix)
        self._begin(request, SubscribeNamespace(request_id, prefix, parameters))
        return request_id

    def publish(
        self,
        track: LocalTrack,
        *,
        wanted_by: RequestId | None = None,
        forward: bool = True,
        priority: int = 128,
        group_order: GroupOrder | None = None,
        tokens: Iterable[AuthorizationToken] = (),
    ) -> RequestId:
        """Offer a Track to the peer (MOQT, "PUBLISH").

        What is published from now on is sent at once, ahead of the answer; what it brings is
        served as a subscription is. PublishAccepted or RequestRefused answers, and
        PublicationEnded is the last event. The end of the Track is told once the answer is here.

        Args:
            track: What to publish.
            wanted_by: The peer's SUBSCRIBE_TRACKS that asks for it. What that states goes before
                the arguments below, and its filters are applied; a pause of either side counts.
            forward: False: nothing is sent until the subscriber sets FORWARD to 1.
            priority: Subscriber Priority, 0 to 255, until the subscriber changes it.
            group_order: Which of two Groups comes first; None: as the Track says.
            tokens: To show for this request, with values; empty: those of SETUP count.

        Raises:
            UsageError: If the session is over or going away, the SUBSCRIBE_TRACKS does not ask
                for the Track (see :meth:`wants_track`), or the peer may not have it. Nothing was
                sent.
        """
        values: dict[P, Any] = {P.GROUP_ORDER: group_order or track.group_order}
        if not forward:
            values[P.FORWARD] = 0
        properties = track.properties
        initial = self._checked(values, (), priority)
        if wanted_by is not None:
            wish = self._wanted(wanted_by, track).initial(track)
            initial = initial | wish
            if not forward:
                initial = initial | {P.FORWARD: 0}
            properties = properties if wish.get(P.INCLUDE_PROPERTIES, 1) else ()
        stated = {key: value for key, value in initial.items() if key in ALLOWED[Scope.PUBLISH]}
        if track.largest is not None:
            stated[P.LARGEST_OBJECT] = track.largest
        alias, told = self._next_alias, self._show(stated, tokens)
        self._check_open(Publish(0, track.name, alias, told, properties))
        if self._context.guard.admit_offer(self._ids.following, track.name, wanted_by) is not None:
            raise UsageError(f"the peer has no right to {track.name}")
        request_id, stream_id = self._open_request(Publish(0, track.name, alias, told, properties))
        self._next_alias += 1
        publication = OwnPublication(
            self._context, request_id, stream_id, self._ids, parameters=initial, queue=self._queue
        )
        self._begin(publication, Publish(request_id, track.name, alias, told, properties))
        publication.begin(track, alias)
        return request_id

    def subscribe_tracks(
        self,
        prefix: TrackNamespace,
        *,
        range_filters: Iterable[RangeFilter] = (),
        group_order: GroupOrder | None = None,
        forward: bool = True,
        tokens: Iterable[AuthorizationToken] = (),
    ) -> RequestId:
        """Ask for a PUBLISH of every Track under ``prefix``; raises as subscribe.

        TracksSubscribed or RequestRefused answers. Each Track comes as a PublishReceived, or is
        told of as TrackSkipped; TracksEnded is the last event.

        Args:
            prefix: With which the Track Namespaces begin; empty: all Tracks.
            range_filters: Of Objects, and with TRACK_PROPERTY_FILTER of Tracks.
            group_order: Which of two Groups comes first; None: as each Track says.
            forward: False: the subscriptions begin paused.
            tokens: To show for this request, with values; empty: those of SETUP count.
        """
        values: dict[P, Any] = {}
        self._show(values, tokens)
        if group_order is not None:
            values[P.GROUP_ORDER] = group_order
        if not forward:
            values[P.FORWARD] = 0
        parameters = self._checked(values, range_filters, 128)
        request_id, stream_id = self._open_request(SubscribeTracks(0, prefix, parameters))
        request = OwnTracks(
            self._context, request_id, stream_id, prefix=prefix, parameters=parameters
        )
        self._begin(request, SubscribeTracks(request_id, prefix, parameters))
        return request_id

    def update(self, request_id: RequestId, parameters: Parameters) -> RequestId:
        """Change a subscription or a SUBSCRIBE_TRACKS of ours (MOQT, "REQUEST_UPDATE").

        A PUBLISH that was accepted is a subscription of ours.

        Returns the update's own Request ID; UpdateAccepted or UpdateRefused answers it.

        Raises:
            UsageError: If there is no such Established subscription, or the peer's limits forbid
                the update. Nothing was sent.
        """
        request = self._requests.find(request_id, RequestStream)
        if not isinstance(request, Subscriber | OwnTracks):
            raise UsageError(f"no subscription {request_id}")
        self._check_filters(parameters)
        encode_message(RequestUpdate(0, parameters), request.kind)  # it must be sendable
        setup = self._context.peer_setup
        limit = (setup.max_request_updates or 0) if setup is not None else 0
        update_id = self._ids.next_id()
        request.update(update_id, parameters, limit)
        return update_id

    def renew(self, request_id: RequestId, tokens: Iterable[AuthorizationToken]) -> RequestId:
        """Show fresh tokens for a request of ours that goes on (MOQT, "REQUEST_UPDATE").

        UpdateAccepted or UpdateRefused answers; what is refused ends the request. Those of SETUP
        cannot be renewed: dial again before they end.

        Args:
            request_id: Of any request that was accepted and goes on, PUBLISHes that we took
                among them.
            tokens: With values.

        Raises:
            UsageError: If there is no such request, or the peer's limits forbid the update.
                Nothing was sent.
        """
        request = self._requests.find(request_id, RequestStream)
        if not isinstance(request, OwnRequest | Subscriber):
            raise UsageError(f"no request {request_id} of ours goes on")
        shown = self._context.wallet.to_show(tokens, register=False)
        parameters = Parameters({P.AUTHORIZATION_TOKEN: shown})
        if isinstance(request, Subscriber | OwnTracks):
            return self.update(request_id, parameters)
        setup = self._context.peer_setup
        limit = (setup.max_request_updates or 0) if setup is not None else 0
        encode_message(RequestUpdate(0, parameters), request.kind)  # it must be sendable
        request.renew(self._ids.following, parameters, limit)
        return self._ids.next_id()

    def ask_again(self) -> None:
        """Ask the authority again about all that goes on: something was revoked, perhaps."""
        if self._terminated is None:
            self._look_again(everything=True)

    def cancel(self, request_id: RequestId) -> None:
        """Give up a request of ours, or withdraw what it announced. No event follows.

        For a request of the peer: revoke it; for a PUBLISH of the peer: unsubscribe. Nothing
        happens if it is over already.
        """
        request = self._requests.find(request_id, RequestStream)
        if isinstance(request, OwnRequest | Subscriber):
            request.cancel()
        elif isinstance(request, PeerRequest):
            request.stopped_by_peer()
            request.abort(StreamErrorCode.CANCELLED)

    # -- verbs: answers to the peer's requests ---------------------------------------------------
    #
    # Each returns False, and does nothing, when the peer has given the request up meanwhile.

    def accept_subscribe(self, request_id: RequestId, track: LocalTrack) -> bool:
        """Serve a subscription from ``track``: SUBSCRIBE_OK, the fill, what is published."""
        request = self._requests.unanswered(request_id, PeerSubscription)
        if request is not None:
            self._next_alias += 1
            request.accept(track, self._next_alias - 1)
        return request is not None

    def accept_publish(self, request_id: RequestId, *, pieces: bool = False) -> bool:
        """Take a PUBLISH: from now on it is a subscription of ours, and SubscriptionEnded follows.

        What its publisher has sent already is delivered. If it began paused, ``update`` with
        FORWARD 1 has it send. ``pieces`` as in :meth:`subscribe`.
        """
        request = self._requests.unanswered(request_id, PeerPublication)
        if request is not None:
            request.pieces = pieces
            with self._closing_on_violation():
                request.accept()
        return request is not None

    def accept_tracks(self, request_id: RequestId) -> bool:
        """Take a SUBSCRIBE_TRACKS; then ``publish`` what it asks for, now and later."""
        request = self._requests.unanswered(request_id, PeerTracks)
        if request is not None:
            request.accept()
        return request is not None

    def accept_fetch(self, request_id: RequestId, track: LocalTrack) -> bool:
        """Serve a FETCH from ``track``.

        A range that holds nothing is refused INVALID_RANGE, and PeerRequestEnded follows.
        """
        request = self._requests.unanswered(request_id, PeerFetch)
        if request is not None:
            request.accept(track)
        return request is not None

    def accept_track_status(self, request_id: RequestId, track: LocalTrack) -> bool:
        """Answer a TRACK_STATUS."""
        request = self._requests.unanswered(request_id, PeerTrackStatus)
        if request is not None:
            request.accept(track)
        return request is not None

    def accept_namespace(self, request_id: RequestId) -> bool:
        """Take a PUBLISH_NAMESPACE; PeerRequestEnded tells when it is withdrawn."""
        request = self._requests.unanswered(request_id, PeerNamespace)
        if request is not None:
            request.accept()
        return request is not None

    def accept_namespaces(self, request_id: RequestId, directory: NamespaceDirectory) -> bool:
        """Serve a SUBSCRIBE_NAMESPACE from ``directory``.

        Too many matches are refused NAMESPACE_TOO_LARGE, and PeerRequestEnded follows.
        """
        request = self._requests.unanswered(request_id, PeerNamespaceSubscription)
        if request is not None:
            request.accept(directory)
        return request is not None

    def reject(
        self,
        request_id: RequestId,
        code: RequestErrorCode,
        reason: str = "",
        *,
        retry_ms: int | None = None,
    ) -> bool:
        """Answer REQUEST_ERROR.

        Args:
            request_id: The request.
            code: Why.
            reason: For people; what does not fit 1024 octets is cut.
            retry_ms: Milliseconds after which a retry makes sense; None: never.
        """
        request = self._requests.unanswered(request_id, PeerRequest)
        if request is not None:
            request.reject(code, reason, retry_ms=retry_ms)
        return request is not None

    def wants_track(self, request_id: RequestId, track: LocalTrack) -> bool:
        """Whether a SUBSCRIBE_TRACKS of the peer that we took asks for ``track``.

        By prefix and by the Track's Properties. A Track that was skipped is asked for no more,
        and for one that a SUBSCRIBE of the peer waits for, the answer to that is enough.
        """
        request = self._requests.find(request_id, PeerTracks)
        return (
            request is not None and request.wants(track) and not self._requests.awaits(track.name)
        )

    def publish_skipped(self, request_id: RequestId, track: LocalTrack) -> bool:
        """Tell that a Track which a SUBSCRIBE_TRACKS asks for will not be published for it.

        Raises:
            UsageError: If it does not ask for the Track, or that was skipped before.
        """
        request = self._requests.find(request_id, PeerTracks)
        if request is not None:
            request.skip(track)
        return request is not None

    # -- verbs: subscriptions that we serve, SUBSCRIBEs of the peer and PUBLISHes of ours ---------

    def end_subscription(
        self, request_id: RequestId, code: PublishDoneCode, reason: str = ""
    ) -> bool:
        """End a subscription that we serve although its Track goes on."""
        request = self._requests.served(request_id)
        if request is not None:
            request.end(code, reason)
        return request is not None

    def backlog(self, request_id: RequestId) -> int:
        """Return the octets that a subscription which we serve has not been sent yet.

        Of what is live, whole or in parts; fills and fetches are not counted. 0 if there is no
        such subscription.
        """
        request = self._requests.served(request_id)
        return 0 if request is None else request.backlog

    def end_fetch(self, request_id: RequestId, code: StreamErrorCode) -> bool:
        """End a fetch that we serve by a reset: what it was not sent is not sent."""
        request = self._requests.find(request_id, PeerFetch)
        if request is not None:
            request.end(code)
        return request is not None

    def waits_at(self, request_id: RequestId) -> int | None:
        """Return how many octets a request was sent that waits to be sent more.

        A subscription or a fetch that we serve; None if it has nothing to send at the moment, or
        there is no such request. Whoever takes nothing waits at the same place for long.
        """
        request = self._requests.served(request_id) or self._requests.find(request_id, PeerFetch)
        return request.sent_octets if request is not None and request.has_waiting else None

    def notify_state(self, request_id: RequestId) -> bool:
        """Tell the subscriber the Largest Object (MOQT, "PUBLISH_STATE_NOTIFY").

        Who is paused, or has filters, does not see it in what comes.
        """
        request = self._requests.served(request_id)
        if request is not None:
            request.notify_state()
        return request is not None

    # -- verbs: the session ----------------------------------------------------------------------

    def goaway(self, new_session_uri: str = "", timeout_ms: int = 0) -> None:
        """Ask the peer to leave; its new requests are refused GOING_AWAY from now on.

        Args:
            new_session_uri: Where to go instead. Only a server may say.
            timeout_ms: After which the session is closed, GOAWAY_TIMEOUT if requests are open.

        Raises:
            UsageError: If a client states a URI, or it has more than 8192 octets.
        """
        if new_session_uri and self.role is Role.CLIENT:
            raise UsageError("a client cannot send the server elsewhere")
        if self._terminated is None:
            self._control.goaway(new_session_uri, timeout_ms)

    def close(
        self, code: SessionErrorCode | int = SessionErrorCode.NO_ERROR, reason: str = ""
    ) -> None:
        """Close the session; the second call does nothing."""
        self._terminate(code, reason, by_peer=False)

    # -- inside: requests ------------------------------------------------------------------------

    def _checked(
        self, values: dict[P, Any], filters: Iterable[RangeFilter], priority: int
    ) -> Parameters:
        if not 0 <= priority <= 255:
            raise UsageError(f"subscriber priority {priority}, expected 0 to 255")
        if priority != 128:
            values[P.SUBSCRIBER_PRIORITY] = priority
        for range_filter in filters:
            kind = range_filter.type
            values[kind] = (*values.get(kind, ()), range_filter)
        parameters = Parameters(values)
        self._check_filters(parameters)
        return parameters

    def _check_filters(self, parameters: Parameters) -> None:
        setup = self._context.peer_setup
        limit = setup.max_filter_ranges if setup is not None else 0
        if (defect := filter_defect(parameters, limit)) is not None:
            raise UsageError(f"the peer would refuse the filter: {defect}")

    def _show(self, values: dict[P, Any], tokens: Iterable[AuthorizationToken]) -> Parameters:
        """Add to the parameters of a request the tokens to show for it, if there are any."""
        if shown := self._context.wallet.to_show(tokens):
            values[P.AUTHORIZATION_TOKEN] = shown
        return Parameters(values)

    def _check_open(self, message: Message) -> None:
        if self._terminated is not None:
            raise UsageError("the session is over")
        if self._control.goaway_received:
            raise UsageError("the peer is going away")
        encode_message(message)

    def _open_request(self, message: Message) -> tuple[RequestId, StreamId]:
        """Return the IDs of a new request, once it is sure that one like ``message`` can be sent.

        An ID that is handed out must be used: the peer sees every stream below one it knows.
        """
        self._check_open(message)
        return self._ids.next_id(), self._context.stream_ids.bidi()

    def _begin(self, request: OwnRequest, message: Message) -> None:
        self._requests.add(request)
        parameters: Parameters = cast(Any, message).parameters
        self._context.wallet.shown(parameters.get(P.AUTHORIZATION_TOKEN, ()), request)
        request.send(message)

    def _wanted(self, request_id: RequestId, track: LocalTrack) -> PeerTracks:
        request = self._requests.find(request_id, PeerTracks)
        if request is None or not self.wants_track(request_id, track):
            raise UsageError(f"SUBSCRIBE_TRACKS {request_id} does not ask for {track.name}")
        return request

    # -- inside: the session ---------------------------------------------------------------------

    def _look_again(self, *, everything: bool = False) -> None:
        """End what lost its right, and have the peer leave if it is the session that did."""
        lost = self._context.guard.look(everything=everything)
        for request_id, why in lost.requests:
            request = self._requests.find(request_id, RequestStream)
            if request is not None:
                request.lose_right(why)
        if lost.farewell is not None:
            seconds, why = lost.farewell
            self._control.goaway("", max(1, round(seconds * 1000)))
            self._context.timers.stop(GOAWAY_TIMER)
            self._ends_with = SESSION_CODES[why]
            self._context.timers.start(FAREWELL_TIMER, seconds)

    def _control_received(self, stream_id: StreamId, data: bytes, fin: bool) -> None:
        self._context.release(stream_id, len(data))
        if self._control.receive(stream_id, data, fin):
            self._arrivals.setup_done()
            self._delivery.setup_done()

    def _goaway_due(self) -> None:
        if count := self._requests.open_count:
            self._terminate(
                SessionErrorCode.GOAWAY_TIMEOUT, f"{count} requests are open", by_peer=False
            )
        else:
            self._terminate(SessionErrorCode.NO_ERROR, "going away", by_peer=False)

    @contextmanager
    def _closing_on_violation(self) -> Iterator[None]:
        try:
            yield
        except ProtocolError as exc:
            self._violated(exc)

    def _violated(self, error: ProtocolError) -> None:
        flooded = isinstance(error, TooManyRequests | TooManyRequestUpdates)
        self._terminate(error.code, str(error), by_peer=False, flooded=flooded)

    def _terminate(
        self,
        code: SessionErrorCode | int,
        reason: str,
        *,
        by_peer: bool,
        close: bool = True,
        flooded: bool = False,
    ) -> None:
        if self._terminated is not None:
            return
        reason = shortened(reason)
        self._terminated = SessionTerminated(
            code=code, reason=reason, by_peer=by_peer, flooded=flooded
        )
        self._requests.is_closed = True
        for request in self._requests.by_id.values():
            if isinstance(request, PeerRequest | Publisher) and not request.over:
                request.stopped_by_peer()
        self._context.visit.leave()
        self._context.take_commands()  # what is not done by now is not worth doing
        if close:
            self._context.commands.append(CloseSession(code, reason))
        self._context.emit(self._terminated)
