"""MoqtConnection: carries octets and events between a QUIC transport and a Session.

It decides nothing. One table in (what the transport tells), one loop out (what the session wants
done), and a route from each Request ID to whoever waits for its events.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import structlog

from moqt.aio.tracks import (
    Fetch,
    NamespacePublication,
    NamespaceSubscription,
    Publication,
    Route,
    Sink,
    StatusQuery,
    Subscription,
    TracksSubscription,
)
from moqt.aio.transport import ConnectionLost, QuicTransport, TransportStats
from moqt.authority import Authority
from moqt.codepoints import GroupOrder, RequestErrorCode, SessionErrorCode
from moqt.errors import SessionClosed, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import (
    CloseSession,
    Command,
    ReleaseCredit,
    ResetStream,
    SendStreamData,
    StopSending,
    StreamId,
)
from moqt.session.config import Role, SessionConfig
from moqt.session.core import Session
from moqt.session.events import (
    AccessDecided,
    Event,
    FetchReceived,
    GoawayReceived,
    ObjectPiece,
    ObjectReceived,
    PeerLimited,
    PeerRequestEnded,
    PublishNamespaceReceived,
    PublishReceived,
    RequestId,
    SessionEstablished,
    SessionTerminated,
    StreamDiscarded,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusAccepted,
    TrackStatusReceived,
    TracksUpdated,
)
from moqt.session.guests import Guests
from moqt.session.localtrack import LocalTrack
from moqt.session.streams import is_unidirectional
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.token import AuthorizationToken

log = structlog.get_logger("moqt")

#: How long an orderly end that the session decides by itself, after GOAWAY, waits for what was
#: sent to be acknowledged.
GOAWAY_DRAIN_S = 5.0
#: How often a silent peer is asked for a sign of life before it counts as silent.
SILENT_PINGS = 3
A = TypeVar("A", bound=Route)


class RequestHandler:
    """What is done with requests of the peer. Override what is served.

    Every method is called on the event loop and returns soon; the answer may be given in it, or
    later through ``connection.session`` (then ``connection.wake()`` sends it). What is not
    answered within ``SessionConfig.answer_timeout_s`` is refused TIMEOUT. An exception closes
    the session with INTERNAL_ERROR.
    """

    def connection_made(self, connection: "MoqtConnection") -> None:
        """Both SETUPs are through."""

    def subscribe_received(self, connection: "MoqtConnection", request: SubscribeReceived) -> None:
        """Answer with ``session.accept_subscribe`` or ``session.reject``."""
        connection.session.reject(
            request.request_id, RequestErrorCode.DOES_NOT_EXIST, "no such track"
        )

    def fetch_received(self, connection: "MoqtConnection", request: FetchReceived) -> None:
        """Answer with ``session.accept_fetch`` or ``session.reject``."""
        connection.session.reject(
            request.request_id, RequestErrorCode.DOES_NOT_EXIST, "no such track"
        )

    def track_status_received(
        self, connection: "MoqtConnection", request: TrackStatusReceived
    ) -> None:
        """Answer with ``session.accept_track_status`` or ``session.reject``."""
        connection.session.reject(
            request.request_id, RequestErrorCode.DOES_NOT_EXIST, "no such track"
        )

    def publish_received(self, connection: "MoqtConnection", request: PublishReceived) -> None:
        """Answer with ``connection.accept_publish`` or ``session.reject``."""
        connection.session.reject(
            request.request_id, RequestErrorCode.UNINTERESTED, "nobody asked for it"
        )

    def subscribe_tracks_received(
        self, connection: "MoqtConnection", request: SubscribeTracksReceived
    ) -> None:
        """Answer with ``session.accept_tracks`` or ``session.reject``; then publish."""
        connection.session.reject(
            request.request_id, RequestErrorCode.NOT_SUPPORTED, "no tracks are offered"
        )

    def tracks_updated(self, connection: "MoqtConnection", event: TracksUpdated) -> None:
        """A SUBSCRIBE_TRACKS that was accepted asks for other Tracks now: publish those."""

    def publish_namespace_received(
        self, connection: "MoqtConnection", request: PublishNamespaceReceived
    ) -> None:
        """Answer with ``session.accept_namespace`` or ``session.reject``."""
        connection.session.reject(request.request_id, RequestErrorCode.NOT_SUPPORTED, "no relay")

    def subscribe_namespace_received(
        self, connection: "MoqtConnection", request: SubscribeNamespaceReceived
    ) -> None:
        """Answer with ``session.accept_namespaces`` or ``session.reject``."""
        connection.session.reject(
            request.request_id, RequestErrorCode.NOT_SUPPORTED, "no namespaces"
        )

    def request_ended(self, connection: "MoqtConnection", event: PeerRequestEnded) -> None:
        """A request that was handed out is over."""

    def access_decided(self, connection: "MoqtConnection", event: AccessDecided) -> None:
        """The authority said whether the peer may do something; it was told so already."""

    def peer_limited(self, connection: "MoqtConnection", event: PeerLimited) -> None:
        """The peer was at a limit of the session or its endpoint, and was told so."""

    def connection_closed(self, connection: "MoqtConnection") -> None:
        """The session is over; ``connection.closed`` says why. Always the last call."""


class Clock(Protocol):
    """Seconds of a steady clock."""

    def __call__(self) -> float:
        """Return the time."""


class _Credit:
    """Flow control as the session asks for it."""

    def __init__(self, transport: QuicTransport) -> None:
        self.stream: Callable[[StreamId], int] = transport.stream_credit


class MoqtConnection:
    """One MOQT session over one QUIC connection, from either side.

    Made by :func:`moqt.aio.client.connect` and :func:`moqt.aio.server.serve`.
    """

    def __init__(
        self,
        transport: QuicTransport,
        role: Role,
        config: SessionConfig,
        handler: RequestHandler,
        authority: Authority | None = None,
        guests: Guests | None = None,
    ) -> None:
        self.session = Session(
            role,
            config,
            wake=transport.wake,
            authority=authority,
            wall_clock=time.time,
            guests=guests,
        )
        self.going_away: GoawayReceived | None = None
        """The peer's GOAWAY for the whole session, once it has come."""

        self.on_terminated: Callable[[MoqtConnection, SessionTerminated], None] = lambda *_: None
        """Called when the session has ended; for the one who made this connection."""

        self._transport = transport
        self._credit = _Credit(transport)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._routes: dict[RequestId, Route] = {}
        self._established: asyncio.Future[None] = self._loop.create_future()
        self._over = asyncio.Event()
        self._leave = asyncio.Event()
        self._flushed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._drain_s: float | None = None
        self._said = 0  # octets on control and request streams since it was looked who reads them

    # -- state -----------------------------------------------------------------------------------

    @property
    def closed(self) -> SessionTerminated | None:
        """How the session ended, once it has."""
        return self.session.terminated

    @property
    def peer_address(self) -> tuple[str, int]:
        """Address and UDP port of the peer."""
        return self._transport.peer_address

    @property
    def client_certificate(self) -> bytes | None:
        """DER of the certificate of the client, if one was asked for: it was verified then."""
        return self._transport.client_certificate

    def stats(self) -> TransportStats:
        """Return the figures of the QUIC connection at the moment."""
        return self._transport.stats()

    def wake(self) -> None:
        """Have what was asked of the session carried out soon. Call it after using its verbs."""
        self._transport.wake()

    async def wait_established(self, timeout_s: float) -> None:
        """Return when both SETUPs are through.

        Raises:
            TimeoutError: If that takes longer.
            SessionClosed: If the session ended first.
        """
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._established)

    async def wait_closed(self) -> None:
        """Return when the connection is gone."""
        await self._over.wait()

    async def wait_going_away(self) -> None:
        """Return when the peer has sent GOAWAY (see ``going_away``), or the connection is gone."""
        await self._leave.wait()

    @property
    def heard_at(self) -> float:
        """When the peer gave the last sign of life, by :func:`time.monotonic`."""
        return self._transport.heard_at

    async def wait_silent(self, seconds: float) -> None:
        """Return when the peer gives no sign of life any more, or the connection is gone.

        It is asked when it has nothing to say, and counts as silent when it has answered none of
        several questions for ``seconds``. An event loop of ours that stands still meanwhile costs
        one question at most. The connection goes on: the peer may be busy. Compare ``heard_at``
        to know whether it was heard again.

        Args:
            seconds: How long; more than a round trip, and than a peer's event loop may stand
                still. Silence that ends the connection is ``QuicSettings.idle_timeout_s``.
        """
        pause_s = seconds / (SILENT_PINGS + 1)
        unanswered, heard_at = 0, self.heard_at
        while unanswered < SILENT_PINGS and self.closed is None:
            # Less than a whole pause, since timers may be early by a little.
            if asked := time.monotonic() - heard_at > 0.9 * pause_s:
                self._transport.ping()
            try:
                async with asyncio.timeout(pause_s):
                    await self._over.wait()
            except TimeoutError:
                pass
            if self.heard_at != heard_at:
                unanswered, heard_at = 0, self.heard_at
            elif asked:
                unanswered += 1

    async def close(
        self,
        code: SessionErrorCode | int = SessionErrorCode.NO_ERROR,
        reason: str = "",
        *,
        drain_s: float = 5.0,
    ) -> None:
        """Close, once what waits has been sent and acknowledged, or ``drain_s`` has passed.

        Returns when the connection is gone. Objects that a subscriber does not take, for want of
        flow control credit, are given up at the deadline.
        """
        deadline = self._loop.time() + drain_s
        self.wake()
        while self.closed is None and self.session.has_data_waiting:
            left = deadline - self._loop.time()
            if left <= 0 or not await self._wait_flushed(left):
                break
        left = max(0.0, deadline - self._loop.time())
        if self.closed is None:
            self._drain_s = left
        self.session.close(code, reason)
        self.wake()
        try:
            async with asyncio.timeout(left + 1.0):
                await self._over.wait()
                # A client's socket is open until then; an event loop may end when we return.
                await self._transport.wait_closed()
        except TimeoutError:
            self._transport.abandon()

    def ask_again(self) -> None:
        """Have all that goes on checked now; see :meth:`moqt.session.core.Session.ask_again`."""
        self.session.ask_again()
        self.wake()

    def renew(self, tokens: Sequence[AuthorizationToken]) -> None:
        """Show fresh tokens for all requests of ours that were accepted and go on.

        Whoever waits for their events is told how each was answered. Those of SETUP cannot be
        renewed: dial again before they end.
        """
        for request_id in tuple(self._routes):
            with suppress(UsageError):  # not accepted yet, or over, or of a kind that does not last
                self.session.renew(request_id, tokens)
        self.wake()

    def goaway(self, new_session_uri: str = "", timeout_ms: int = 0) -> None:
        """Ask the peer to leave; see :meth:`moqt.session.core.Session.goaway`."""
        self.session.goaway(new_session_uri, timeout_ms)
        self.wake()

    # -- requests --------------------------------------------------------------------------------
    #
    # Each waits for the peer's answer, at most ``timeout_s``, and raises: RequestRejected if the
    # peer refuses, TimeoutError, SessionClosed if the session ends first, UsageError if the
    # session is over already or forbids the request. After a timeout the request is cancelled.

    async def subscribe(
        self,
        track: FullTrackName,
        *,
        location_filter: LocationFilter = LocationFilter.NEXT_OBJECT,
        fill: LocationFilter | FillParameters | None = None,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int = 128,
        group_order: GroupOrder = GroupOrder.ASCENDING,
        forward: bool = True,
        pieces: bool = False,
        sink: Sink | None = None,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> Subscription:
        """Ask for the future Objects of a Track, and for past ones with ``fill``.

        Args:
            track: Its Full Track Name.
            location_filter: Which of the future Objects.
            fill: Which of the past ones. With Next Object and a fill from {0, 0} each Object
                of the Track comes exactly once.
            range_filters: Further conditions, within the peer's MAX_FILTER_RANGES.
            priority: Subscriber Priority, 0 to 255, smaller is more urgent.
            group_order: Which of two Groups comes first.
            forward: False begins paused.
            pieces: Take Objects as they come, and not when they are whole.
            sink: Called with every event instead of queueing it for iteration. It must not
                block; Objects count as taken when it returns.
            tokens: To show for this request, with values; empty: those of SETUP count.
            timeout_s: How long the answer may take.
        """
        request_id = self.session.subscribe(
            track,
            location_filter=location_filter,
            fill=fill,
            range_filters=range_filters,
            priority=priority,
            group_order=group_order,
            forward=forward,
            pieces=pieces,
            tokens=tokens,
        )
        return await self._answered(Subscription(self, request_id, sink), timeout_s)

    async def fetch(
        self,
        track: FullTrackName,
        *,
        location_filter: LocationFilter,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int = 128,
        group_order: GroupOrder = GroupOrder.ASCENDING,
        fill_timeout_ms: int | None = None,
        pieces: bool = False,
        sink: Sink | None = None,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> Fetch:
        """Ask for past Objects of a Track. Objects that come ahead of the answer are kept.

        With ``pieces`` they are taken as they come, and not when they are whole;
        ``fill_timeout_ms`` as in :meth:`moqt.session.core.Session.fetch`.
        """
        request_id = self.session.fetch(
            track,
            location_filter=location_filter,
            range_filters=range_filters,
            priority=priority,
            group_order=group_order,
            fill_timeout_ms=fill_timeout_ms,
            pieces=pieces,
            tokens=tokens,
        )
        return await self._answered(Fetch(self, request_id, sink), timeout_s)

    async def track_status(
        self,
        track: FullTrackName,
        *,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> TrackStatusAccepted:
        """Ask how a Track stands, without subscribing."""
        request_id = self.session.track_status(track, tokens=tokens)
        query = await self._answered(StatusQuery(self, request_id), timeout_s)
        return query.answer

    async def subscribe_namespace(
        self,
        prefix: TrackNamespace,
        *,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> NamespaceSubscription:
        """Ask which namespaces begin with ``prefix``, now and from now on."""
        request_id = self.session.subscribe_namespace(prefix, tokens=tokens)
        return await self._answered(NamespaceSubscription(self, request_id), timeout_s)

    async def publish_namespace(
        self,
        prefix: TrackNamespace,
        *,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> NamespacePublication:
        """Tell the peer that there are Tracks under ``prefix``, until withdrawn."""
        request_id = self.session.publish_namespace(prefix, tokens=tokens)
        return await self._answered(NamespacePublication(self, request_id), timeout_s)

    async def publish(
        self,
        track: LocalTrack,
        *,
        wanted_by: RequestId | None = None,
        forward: bool = True,
        priority: int = 128,
        group_order: GroupOrder | None = None,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> Publication:
        """Offer a Track to the peer; what is published from now on is sent ahead of the answer.

        Args:
            track: What to publish.
            wanted_by: The peer's SUBSCRIBE_TRACKS that asks for it, if one does.
            forward: False: nothing is sent until the subscriber asks for it.
            priority: Subscriber Priority that it begins with.
            group_order: Which of two Groups comes first; None: as the Track says.
            tokens: To show for this request, with values; empty: those of SETUP count.
            timeout_s: How long the answer may take.
        """
        publication = self.offer(
            track,
            wanted_by=wanted_by,
            forward=forward,
            priority=priority,
            group_order=group_order,
            tokens=tokens,
        )
        return await self._answered(publication, timeout_s)

    def offer(
        self,
        track: LocalTrack,
        *,
        wanted_by: RequestId | None = None,
        forward: bool = True,
        priority: int = 128,
        group_order: GroupOrder | None = None,
        tokens: Sequence[AuthorizationToken] = (),
    ) -> Publication:
        """Offer a Track as :meth:`publish` does, without waiting for the answer.

        For who must not miss what is published meanwhile; the publication's ``answered`` and
        ``finished`` tell the rest.
        """
        request_id = self.session.publish(
            track,
            wanted_by=wanted_by,
            forward=forward,
            priority=priority,
            group_order=group_order,
            tokens=tokens,
        )
        publication = Publication(self, request_id)
        self._routes[request_id] = publication
        self.wake()
        return publication

    def accept_publish(
        self, request: PublishReceived, *, pieces: bool = False, sink: Sink | None = None
    ) -> Subscription | None:
        """Take a Track that the peer publishes: it is a subscription of ours from now on.

        Args:
            request: What ``RequestHandler.publish_received`` was called with. If it is paused,
                nothing comes until ``update`` sets FORWARD to 1.
            pieces: Take Objects as they come, and not when they are whole.
            sink: Called with every event instead of queueing it for iteration.

        Returns:
            None if the peer has given it up meanwhile.

        Raises:
            UsageError: If it has been answered.
        """
        subscription = Subscription(self, request.request_id, sink)
        if not self.session.accept_publish(request.request_id, pieces=pieces):
            return None
        subscription.published(request)
        self._routes[request.request_id] = subscription
        self.wake()
        return subscription

    async def subscribe_tracks(
        self,
        prefix: TrackNamespace,
        *,
        range_filters: tuple[RangeFilter, ...] = (),
        group_order: GroupOrder | None = None,
        forward: bool = True,
        tokens: Sequence[AuthorizationToken] = (),
        timeout_s: float = 10.0,
    ) -> TracksSubscription:
        """Ask for a PUBLISH of every Track under ``prefix``, now and from now on.

        They come as calls of ``RequestHandler.publish_received``.

        Args:
            prefix: With which the Track Namespaces begin.
            range_filters: Of Objects, and with TRACK_PROPERTY_FILTER of Tracks.
            group_order: Which of two Groups comes first; None: as each Track says.
            forward: False: the subscriptions begin paused.
            tokens: To show for this request, with values; empty: those of SETUP count.
            timeout_s: How long the answer may take.
        """
        request_id = self.session.subscribe_tracks(
            prefix,
            range_filters=range_filters,
            group_order=group_order,
            forward=forward,
            tokens=tokens,
        )
        return await self._answered(TracksSubscription(self, request_id), timeout_s)

    async def _answered(self, route: A, timeout_s: float) -> A:
        request_id = route.request_id
        self._routes[request_id] = route
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await route.answered
        except TimeoutError:
            route.cancel()
            raise TimeoutError(f"{route.what} was not answered within {timeout_s} s") from None
        except BaseException:
            route.cancel()
            raise
        return route

    def forget(self, request_id: RequestId) -> None:
        """Give up a request of ours (called by its route; applications call ``cancel`` there)."""
        self._routes.pop(request_id, None)
        self.session.cancel(request_id)
        self.wake()

    # -- QuicReceiver ----------------------------------------------------------------------------

    def connected(self) -> None:
        """Open the session (called by the engine)."""
        if not self._transport.peer_accepts_datagrams:
            # DATAGRAM must be negotiated even if never used (MOQT, "Transport").
            self.session.close(
                SessionErrorCode.PROTOCOL_VIOLATION, "the DATAGRAM extension was not negotiated"
            )
            return
        self.session.start(address=self.peer_address[0], certificate=self.client_certificate)

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Hand octets of a stream to the session (called by the engine)."""
        if not is_unidirectional(StreamId(stream_id)):
            self.session.tell_time(time.monotonic())  # requests are counted by it
        self.session.receive_stream_data(StreamId(stream_id), data, fin=fin)

    def stream_reset_received(self, stream_id: int, code: int) -> None:
        """Hand a reset to the session (called by the engine)."""
        self.session.receive_reset(StreamId(stream_id), code)

    def stop_sending_received(self, stream_id: int, code: int) -> None:
        """Hand a STOP_SENDING to the session (called by the engine)."""
        self.session.receive_stop_sending(StreamId(stream_id), code)

    def datagram_received(self, data: bytes) -> None:
        """Hand a datagram to the session (called by the engine)."""
        self.session.receive_datagram(data)

    def connection_lost(self, lost: ConnectionLost) -> None:
        """Everything ends (called by the engine, last)."""
        code = lost.code if lost.application else SessionErrorCode.INTERNAL_ERROR
        reason = lost.reason if lost.application else f"connection lost: {lost.reason or lost.code}"
        self.session.receive_connection_lost(code, reason, by_peer=lost.by_peer)
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._dispatch()
        finally:  # whatever a handler does, nobody may wait for this connection for ever
            self._over.set()
            self._leave.set()
            self._tell_flushed()

    def flush(self) -> None:
        """Carry out what the session wants and tell its events, until it has no more of either.

        Called by the engine after each batch of datagrams, and after :meth:`wake`.
        """
        session, transport = self.session, self._transport
        while True:
            session.handle_timer(time.monotonic())
            for command in session.data_to_send(transport.send_budget(), self._credit):
                self._carry_out(command)
            if not self._dispatch():
                break
        self._set_timer()
        self._tell_flushed()

    # -- inside ----------------------------------------------------------------------------------

    def _carry_out(self, command: Command) -> None:
        transport = self._transport
        match command:
            case SendStreamData(stream_id, data, fin):
                transport.send_stream_data(stream_id, data, fin)
                if not is_unidirectional(stream_id):
                    self._look_who_reads(len(data))
            case ReleaseCredit(stream_id, octets):
                transport.consumed(stream_id, octets)
            case ResetStream(stream_id, stream_code, after_delivery):
                transport.reset_stream(stream_id, stream_code, after_delivery=after_delivery)
            case StopSending(stream_id, stream_code):
                transport.stop_sending(stream_id, stream_code)
            case CloseSession(code, reason):
                drain_s = self._drain_s
                if drain_s is None:
                    drain_s = GOAWAY_DRAIN_S if code == SessionErrorCode.NO_ERROR else 0.0
                transport.close(code, reason, drain_s=drain_s)

    def _look_who_reads(self, octets: int) -> None:
        """Leave a peer that makes us answer and does not take the answers."""
        self._said += octets
        limit = self.session.config.max_unread_octets
        if self._said > limit // 8:
            self._said = 0
            unread = self._transport.unread_octets()
            if unread > limit:
                self.session.close(
                    SessionErrorCode.CONTROL_MESSAGE_TIMEOUT, f"{unread} octets were not taken"
                )

    def _dispatch(self) -> bool:
        """Hand out the session's events; return whether there were any."""
        events = self.session.events()
        for event in events:
            request_id = getattr(event, "request_id", None)
            route = self._routes.get(request_id) if request_id is not None else None
            if route is not None:
                if route.handle(event):
                    self._routes.pop(route.request_id, None)
            else:
                self._handle(event)
        return bool(events)

    def _handle(self, event: Event) -> None:
        handler = self._handler
        match event:
            case SubscribeReceived():
                handler.subscribe_received(self, event)
            case FetchReceived():
                handler.fetch_received(self, event)
            case TrackStatusReceived():
                handler.track_status_received(self, event)
            case PublishReceived():
                handler.publish_received(self, event)
            case SubscribeTracksReceived():
                handler.subscribe_tracks_received(self, event)
            case TracksUpdated():
                handler.tracks_updated(self, event)
            case PublishNamespaceReceived():
                handler.publish_namespace_received(self, event)
            case SubscribeNamespaceReceived():
                handler.subscribe_namespace_received(self, event)
            case PeerRequestEnded():
                handler.request_ended(self, event)
            case AccessDecided():
                handler.access_decided(self, event)
            case PeerLimited():
                handler.peer_limited(self, event)
            case SessionEstablished():
                if not self._established.done():
                    self._established.set_result(None)
                handler.connection_made(self)
            case GoawayReceived(request_id=None):
                self.going_away = event
                self._leave.set()
                log.info("peer goes away", peer=self.peer_address, uri=event.new_session_uri)
            case StreamDiscarded(stream_id=stream_id, reason=reason):
                log.warning("stream discarded", peer=self.peer_address, stream=stream_id,
                            reason=reason)  # fmt: skip
            case SessionTerminated():
                self._terminated(event)
            case ObjectReceived() | ObjectPiece():
                self.session.consumed(event)  # its request was cancelled since
            case _:
                pass  # the last words of a request that was cancelled here

    def _terminated(self, event: SessionTerminated) -> None:
        closed = SessionClosed(event.code, event.reason, event.by_peer)
        if not self._established.done():
            self._established.set_exception(closed)
            self._established.exception()  # nobody may be waiting
        routes, self._routes = self._routes, {}
        for route in routes.values():
            route.session_closed(closed)
        level = log.info if event.code == SessionErrorCode.NO_ERROR else log.warning
        level(
            "session ended",
            peer=self.peer_address,
            code=getattr(event.code, "name", event.code),
            reason=event.reason,
            by_peer=event.by_peer,
        )
        self.on_terminated(self, event)
        self._handler.connection_closed(self)

    def _set_timer(self) -> None:
        at = self.session.next_deadline()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return  # one that fires early finds nothing due, and sets the next
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._timer_due)

    def _timer_due(self) -> None:
        self._timer = None
        self.wake()

    async def _wait_flushed(self, timeout_s: float) -> bool:
        if self._flushed is None:
            self._flushed = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._flushed)
        except TimeoutError:
            return False
        return True

    def _tell_flushed(self) -> None:
        flushed, self._flushed = self._flushed, None
        if flushed is not None and not flushed.done():
            flushed.set_result(None)
