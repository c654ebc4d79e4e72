"""The relay itself: sessions of both kinds, and what passes between them.

What a Track is, is decided in :mod:`moqt.relay.merge`; who is asked for it, in
:mod:`moqt.relay.routes`; what is kept, in :mod:`moqt.relay.cache`. Here are the sessions and the
waits. Subscribers are served by their sessions, each at its own pace, from the one LocalTrack; a
relay does not touch an Object for any of them.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import structlog

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    Server,
    ServerTls,
    Subscription,
    serve,
)
from moqt.aio.tracks import Publication, TrackEvent
from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.cache import Cache
from moqt.relay.merge import MalformedTrack, MergedTrack
from moqt.relay.routes import Routes
from moqt.relay.upstream import Upstream
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    PeerRequestEnded,
    PublishNamespaceReceived,
    PublishReceived,
    RequestId,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
    TracksUpdated,
)
from moqt.session.localtrack import ByteBudget, LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.parameters import Parameters

log = structlog.get_logger("moqt.relay")

#: How often it is looked at what has become quiet or old.
_TICK_S = 0.25
_FROM_START = LocationFilter.absolute_start(0, 0)

#: A request that is answered once its Track is there.
Asked = SubscribeReceived | FetchReceived
Reader = tuple[MoqtConnection, RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """Limits of a relay. Each limit says what happens at it."""

    cache_octets: int = 4 << 30
    """Payload octets held. Above it, publications that nobody uses are let go, and if that does
    not help, new Tracks are refused EXCESSIVE_LOAD."""

    linger_s: float = 5.0
    """How long a Track is still received after its last subscriber has left."""

    max_tracks: int = 65_536
    """Tracks held; when there are more, as with ``cache_octets``."""

    max_namespaces: int = 4096
    """Namespaces that one session may announce; one more is refused EXCESSIVE_LOAD."""

    max_behind_octets: int = 256 << 20
    """What a subscriber may be behind what is live; then it is ended TOO_FAR_BEHIND."""

    request_timeout_s: float = 10.0
    """How long a publisher may take to answer; then TIMEOUT is passed on."""

    max_rendezvous_s: float = 25.0
    """How long a SUBSCRIBE may wait for a publisher, whatever it asks for; then TIMEOUT."""


class _Source:
    """A publisher's subscription that a Track is received by."""

    def __init__(self, track: "_Track", connection: MoqtConnection) -> None:
        self.track = track
        self.connection = connection
        self.subscription: Subscription | None = None
        self.number: int | None = None
        self.is_own = True
        """It began with a SUBSCRIBE of ours, not with a PUBLISH."""

        self.is_paused = False
        self.is_given_up = False
        self._early: list[TrackEvent] = []

    def sink(self, event: TrackEvent) -> None:
        """Take what the publisher sends."""
        if self.number is None:
            self._early.append(event)  # ahead of the answer being looked at
        else:
            self.track.take(self, event)

    def joined(self, number: int) -> None:
        """From now on its events are for this source of the Track."""
        self.number = number
        early, self._early = self._early, []
        for event in early:
            self.track.take(self, event)

    def give_up(self) -> None:
        """Receive no more."""
        self.is_given_up = True
        if self.subscription is not None:
            self.subscription.cancel()


@dataclass(eq=False)
class _Track:
    """A Track that the relay has to do with."""

    name: FullTrackName
    merged: MergedTrack | None = None
    """None: nobody has said yet that it exists."""

    sources: list[_Source] = field(default_factory=list)
    readers: set[Reader] = field(default_factory=set)
    waiting: list[tuple[MoqtConnection, Asked]] = field(default_factory=list)
    deadlines: dict[Reader, asyncio.TimerHandle] = field(default_factory=dict)
    behind: set[Reader] = field(default_factory=set)
    """Readers that were too far behind when it was last looked."""

    linger: asyncio.TimerHandle | None = None
    is_announced: bool = False
    """It is told of as something that can be had here."""

    @property
    def is_in_use(self) -> bool:
        """Whether it is being sent, or waited for, or a publisher keeps it here."""
        return bool(self.readers or self.waiting or self.sources)

    @property
    def expires_at(self) -> float | None:
        """When MAX_CACHE_DURATION has passed since an Object came."""
        merged = self.merged
        if merged is None or merged.max_age_s is None:
            return None
        return merged.changed_at + merged.max_age_s

    @property
    def is_served(self) -> bool:
        """Whether a request for it can be answered at once."""
        merged = self.merged
        return merged is not None and (merged.is_live or merged.is_complete)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added to it any more, however it ended."""
        return self.merged is not None and self.merged.local.ended is not None

    def take(self, source: _Source, event: TrackEvent) -> None:
        """Take what a source brings; a Track that contradicts itself ends."""
        if self.merged is None or source.number is None:
            return
        try:
            self.merged.take(source.number, event, time.monotonic())
        except MalformedTrack as exc:
            log.warning("malformed track", track=str(self.name), reason=str(exc))
            self.merged.end_malformed(str(exc))
            for other in list(self.sources):
                other.give_up()


class Relay(RequestHandler):
    """Passes Tracks on between its sessions. An asynchronous context manager.

    Args:
        options: Its limits.
        quic: Limits of its QUIC connections.
        config: Limits of its sessions.
    """

    def __init__(
        self,
        options: RelayOptions | None = None,
        *,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
    ) -> None:
        self.options = options or RelayOptions()
        self._quic = quic
        self._config = config or SessionConfig()
        self._budget = ByteBudget(self.options.cache_octets)
        self._tracks: Cache[_Track] = Cache(self._budget, self._released)
        self._own = NamespaceDirectory()  # what can be had here
        self._known = NamespaceDirectory()  # and what relays further up tell of
        self._routes: Routes[MoqtConnection] = Routes(_Both(self._own, self._known))
        self._wishes: dict[Reader, TrackNamespace] = {}
        self._reads: dict[Reader, _Track] = {}
        self._upstreams: list[Upstream] = []
        self._servers: list[Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def octets_held(self) -> int:
        """Payload octets in the cache."""
        return self._budget.used

    @property
    def tracks_held(self) -> int:
        """Tracks that it has to do with."""
        return len(self._tracks)

    async def __aenter__(self) -> Self:
        self._spawn(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def listen(self, host: str, port: int, *, tls: ServerTls) -> tuple[str, int]:
        """Accept sessions; return the address that was bound.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used.
            OSError: If the address cannot be bound.
        """
        server = await serve(
            host, port, tls=tls, handler=self, quic=self._quic, config=self._config
        )
        self._servers.append(server)
        return server.address

    def ask_at(self, uri: str, *, tls: ClientTls | None = None) -> None:
        """Ask another relay for Tracks that nobody publishes here; it is kept connected."""
        upstream = Upstream(
            uri,
            self,
            own=self._own,
            found=self._known,
            tls=tls,
            quic=self._quic,
            config=self._config,
            timeout_s=self.options.request_timeout_s,
        )
        self._upstreams.append(upstream)
        self._spawn(upstream.run(self._route_appeared))

    async def close(self, *, drain_s: float = 0.0, new_session_uri: str = "") -> None:
        """Ask everybody to leave, wait for that for ``drain_s`` at most, and end.

        Args:
            drain_s: Seconds; 0: at once.
            new_session_uri: Where sessions are told to go.
        """
        await asyncio.gather(
            *(
                server.close(goaway_timeout_s=drain_s, new_session_uri=new_session_uri)
                for server in self._servers
            )
        )
        self._servers.clear()
        for track in list(self._tracks.values()):
            for timer in (track.linger, *track.deadlines.values()):
                if timer is not None:
                    timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- requests of peers -----------------------------------------------------------------------

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        """Take note; who waits for such a Track is connected with it."""
        if self._routes.count_of(connection) >= self.options.max_namespaces:
            connection.session.reject(
                request.request_id,
                RequestErrorCode.EXCESSIVE_LOAD,
                f"{self.options.max_namespaces} namespaces are announced",
            )
            return
        if connection.session.accept_namespace(request.request_id):
            self._routes.add(connection, request.request_id, request.prefix)
            self._route_appeared()

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        """Tell of what can be had, here and further up."""
        is_upstream = any(up.connection is connection for up in self._upstreams)
        connection.session.accept_namespaces(
            request.request_id, self._own if is_upstream else self._known
        )

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        """Serve it, now or once a publisher has answered."""
        self._asked(connection, request)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        """Serve it from what is held; what is not is received first."""
        self._asked(connection, request)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        """Answer it, or pass it on."""
        track = self._tracks.get(request.track)
        if track is not None and track.is_served and track.merged is not None:
            connection.session.accept_track_status(request.request_id, track.merged.local)
            return
        publishers = self._publishers(request.track.namespace, besides=connection)
        if not publishers:
            self._refuse(connection, request.request_id)
            return
        self._spawn(self._ask_status(connection, request, publishers))

    def publish_received(self, connection: MoqtConnection, request: PublishReceived) -> None:
        """Take the Track; who wants it gets it."""
        track = self._tracks.get(request.track)
        if track is not None and track.has_ended:
            self._tracks.drop(track)
            track = None
        if track is None:
            if not self._has_room():
                connection.session.reject(
                    request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "the cache is in use"
                )
                return
            track = self._new_track(request.track)
        source = _Source(track, connection)
        source.is_own, source.is_paused = False, request.is_paused
        subscription = connection.accept_publish(request, pieces=True, sink=source.sink)
        if subscription is None:
            return
        self._joined(source, subscription)
        for (other, request_id), prefix in list(self._wishes.items()):
            if other is not connection and prefix.is_prefix_of(request.track.namespace):
                self._offer(track, other, request_id)

    def subscribe_tracks_received(
        self, connection: MoqtConnection, request: SubscribeTracksReceived
    ) -> None:
        """Offer the Tracks that are published here, now and from now on."""
        if connection.session.accept_tracks(request.request_id):
            self._wishes[connection, request.request_id] = request.prefix
            self._offer_all(connection, request.request_id, request.prefix)

    def tracks_updated(self, connection: MoqtConnection, event: TracksUpdated) -> None:
        """Offer what is asked for now."""
        self._wishes[connection, event.request_id] = event.prefix
        self._offer_all(connection, event.request_id, event.prefix)

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        """Forget it."""
        key = connection, event.request_id
        if self._routes.remove(*key):
            return
        self._wishes.pop(key, None)
        self._read_ended(key)

    def connection_closed(self, connection: MoqtConnection) -> None:
        """Forget everything of it; its own sources end by themselves."""
        self._routes.forget(connection)
        for key in [key for key in self._wishes if key[0] is connection]:
            del self._wishes[key]
        for key in [key for key in self._reads if key[0] is connection]:
            self._read_ended(key)
        for track in self._tracks.values():
            for other, request in track.waiting:
                if other is connection:
                    self._waits_no_more(track, other, request)

    # -- from a request to its Track -------------------------------------------------------------

    def _asked(self, connection: MoqtConnection, request: Asked) -> None:
        self._tracks.touch_if_held(request.track)
        track = self._tracks.get(request.track)
        if track is not None and track.is_served:
            self._serve(track, connection, request)
            return
        if track is not None and track.waiting and track.sources:
            self._wait(track, connection, request)  # it is being asked for
            return
        publishers = self._publishers(request.track.namespace, besides=connection)
        if publishers:
            track = self._track_to_ask_for(track, request.track)
            if track is None:
                connection.session.reject(
                    request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "the cache is in use"
                )
                return
            self._wait(track, connection, request)
            self._ask(track, publishers)
            return
        if (
            track is not None
            and track.merged is not None
            and (isinstance(request, FetchReceived) or track.has_ended)
        ):
            self._serve(track, connection, request)  # what there is of it
            return
        patience_ms = 0
        if isinstance(request, SubscribeReceived):
            patience_ms = request.parameters.get(P.RENDEZVOUS_TIMEOUT, 0)
        if not patience_ms:
            self._refuse(connection, request.request_id)
            return
        track = self._track_to_ask_for(track, request.track)
        if track is None:
            connection.session.reject(
                request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "the cache is in use"
            )
            return
        self._wait(track, connection, request)
        patience_s = min(patience_ms / 1000, self.options.max_rendezvous_s)
        track.deadlines[connection, request.request_id] = asyncio.get_running_loop().call_later(
            patience_s, self._rendezvous_failed, track, connection, request
        )

    def _track_to_ask_for(self, track: _Track | None, name: FullTrackName) -> _Track | None:
        """Return the Track that a publisher is to be asked for; None if there is no room."""
        if track is not None and track.has_ended:
            self._tracks.drop(track)  # it failed; somebody else begins anew
            track = None
        if track is not None:
            return track
        return self._new_track(name) if self._has_room() else None

    def _new_track(self, name: FullTrackName) -> _Track:
        track = _Track(name)
        self._tracks.keep(track)
        return track

    def _has_room(self) -> bool:
        return self._tracks.make_room(self.options.max_tracks)

    def _publishers(
        self, namespace: TrackNamespace, *, besides: MoqtConnection | None
    ) -> list[MoqtConnection]:
        found = self._routes.publishers_of(namespace, besides=besides)
        if not found:
            above = (upstream.connection for upstream in self._upstreams)
            found = [c for c in above if c is not None and c is not besides]
        return [c for c in found if c.closed is None and not c.session.is_going_away]

    def _wait(self, track: _Track, connection: MoqtConnection, request: Asked) -> None:
        track.waiting.append((connection, request))
        self._reads[connection, request.request_id] = track

    def _waits_no_more(self, track: _Track, connection: MoqtConnection, request: Asked) -> None:
        track.waiting = [w for w in track.waiting if w != (connection, request)]
        timer = track.deadlines.pop((connection, request.request_id), None)
        if timer is not None:
            timer.cancel()

    def _rendezvous_failed(self, track: _Track, connection: MoqtConnection, request: Asked) -> None:
        if (connection, request) in track.waiting and not track.sources:
            connection.session.reject(
                request.request_id, RequestErrorCode.TIMEOUT, "no publisher has come"
            )
            connection.wake()
            self._waits_no_more(track, connection, request)
            self._read_ended((connection, request.request_id))

    def _refuse(
        self,
        connection: MoqtConnection,
        request_id: RequestId,
        code: RequestErrorCode = RequestErrorCode.DOES_NOT_EXIST,
        reason: str = "nobody publishes it",
    ) -> None:
        connection.session.reject(request_id, code, reason)
        connection.wake()

    # -- upstream subscriptions ------------------------------------------------------------------

    def _ask(self, track: _Track, publishers: Iterable[MoqtConnection]) -> None:
        asked = {source.connection for source in track.sources}
        for connection in publishers:
            if connection not in asked:
                source = _Source(track, connection)
                track.sources.append(source)
                self._spawn(self._subscribe(source))

    async def _subscribe(self, source: _Source) -> None:
        track = source.track
        try:
            subscription = await source.connection.subscribe(
                track.name,
                fill=_FROM_START,
                pieces=True,
                sink=source.sink,
                timeout_s=self.options.request_timeout_s,
            )
        except RequestRejected as exc:
            self._not_joined(source, exc.code, str(exc))
        except TimeoutError:
            self._not_joined(source, RequestErrorCode.TIMEOUT, "its publisher did not answer")
        except MoqtError as exc:
            self._not_joined(source, RequestErrorCode.INTERNAL_ERROR, str(exc))
        else:
            if source.is_given_up and not track.waiting:
                subscription.cancel()
                self._not_joined(source, RequestErrorCode.INTERNAL_ERROR, "")
            else:
                source.is_given_up = False  # somebody came while it was being given up
                self._joined(source, subscription)

    def _not_joined(self, source: _Source, code: RequestErrorCode | int, reason: str) -> None:
        track = source.track
        if source in track.sources:
            track.sources.remove(source)
        if not track.sources and (track.merged is None or not track.merged.is_live):
            known = code if isinstance(code, RequestErrorCode) else RequestErrorCode.INTERNAL_ERROR
            for connection, request in list(track.waiting):
                if (connection, request.request_id) in track.deadlines:
                    continue  # somebody else may come yet
                self._waits_no_more(track, connection, request)
                self._refuse(connection, request.request_id, known, reason)
                self._read_ended((connection, request.request_id))
        self._tidy(track)

    def _joined(self, source: _Source, subscription: Subscription) -> None:
        """A publisher serves a Track: so can we."""
        track = source.track
        source.subscription = subscription
        if source not in track.sources:
            track.sources.append(source)
        if track.merged is None:
            track.merged = MergedTrack(
                track.name, properties=subscription.track_properties, budget=self._budget
            )
        number = track.merged.join(largest=subscription.largest, filling=subscription.fill_expected)
        source.joined(number)
        self._spawn(self._until_over(source, subscription))
        for connection, request in list(track.waiting):
            self._waits_no_more(track, connection, request)
            self._serve(track, connection, request)

    async def _until_over(self, source: _Source, subscription: Subscription) -> None:
        await subscription.finished.wait()
        track, merged, ended = source.track, source.track.merged, subscription.ended
        if source in track.sources:
            track.sources.remove(source)
        if merged is None or source.number is None:
            return
        code: PublishDoneCode | int | None = PublishDoneCode.INTERNAL_ERROR
        reason = "its publisher was lost"
        if ended is not None:
            code, reason = ended.code, ended.reason
            if code == PublishDoneCode.TRACK_ENDED and not ended.complete:
                code, reason = PublishDoneCode.INTERNAL_ERROR, "not all of it came"
        elif source.is_given_up:
            code, reason = None, ""
        merged.leave(source.number, code, reason, time.monotonic())
        if merged.is_complete and not track.is_announced:
            track.is_announced = True
            self._announce(track.name.namespace)
        self._tidy(track)
        self._has_room()

    # -- serving ---------------------------------------------------------------------------------

    def _serve(self, track: _Track, connection: MoqtConnection, request: Asked) -> None:
        assert track.merged is not None, "somebody has said that it exists"
        local, request_id = track.merged.local, request.request_id
        if isinstance(request, SubscribeReceived):
            served = connection.session.accept_subscribe(request_id, local)
        else:
            served = connection.session.accept_fetch(request_id, local)
        if served:
            self._reads_now(track, (connection, request_id))
        else:
            self._read_ended((connection, request_id))
        connection.wake()

    def _reads_now(self, track: _Track, reader: Reader) -> None:
        self._reads[reader] = track
        track.readers.add(reader)
        if track.linger is not None:
            track.linger.cancel()
            track.linger = None
        for source in track.sources:
            if source.is_paused and source.subscription is not None:
                source.is_paused = False
                self._spawn(self._resume(source.subscription))

    async def _resume(self, subscription: Subscription) -> None:
        try:
            await subscription.update(
                Parameters({P.FORWARD: 1}), timeout_s=self.options.request_timeout_s
            )
        except (MoqtError, TimeoutError) as exc:
            log.warning("publisher stays paused", error=str(exc))

    def _read_ended(self, reader: Reader) -> None:
        track = self._reads.pop(reader, None)
        if track is not None:
            track.readers.discard(reader)
            timer = track.deadlines.pop(reader, None)
            if timer is not None:
                timer.cancel()
            track.waiting = [
                (c, request) for c, request in track.waiting if (c, request.request_id) != reader
            ]
            self._tidy(track)

    def _tidy(self, track: _Track) -> None:
        """Look at what is to become of a Track that may be in use no more."""
        if track.readers or track.waiting:
            return
        if track.merged is None and not track.sources:
            self._tracks.drop(track)
        elif track.sources and track.linger is None:
            track.linger = asyncio.get_running_loop().call_later(
                self.options.linger_s, self._lingered, track
            )
        elif track.merged is not None:
            ended = track.merged.local.ended
            if ended is not None and ended.code is PublishDoneCode.MALFORMED_TRACK:
                self._tracks.drop(track)

    def _lingered(self, track: _Track) -> None:
        track.linger = None
        if not track.readers and not track.waiting:
            for source in list(track.sources):
                if source.is_own:  # what was offered unasked is the offerer's to end
                    source.give_up()

    def _released(self, track: _Track) -> None:
        """A Track is let go of."""
        if track.linger is not None:
            track.linger.cancel()
        for source in track.sources:
            source.give_up()
        if track.is_announced:
            track.is_announced = False
            self._announce(track.name.namespace, -1)
        if track.merged is not None and not track.readers:
            track.merged.local.end(PublishDoneCode.EXPIRED)
            track.merged.local.drop()

    def _announce(self, namespace: TrackNamespace, by: int = 1) -> None:
        for directory in (self._own, self._known):
            if by > 0:
                directory.add(namespace)
            else:
                directory.remove(namespace)

    # -- SUBSCRIBE_TRACKS ------------------------------------------------------------------------

    def _offer_all(
        self, connection: MoqtConnection, request_id: RequestId, prefix: TrackNamespace
    ) -> None:
        for track in list(self._tracks.values()):
            offered = any(
                not source.is_own and source.connection is not connection
                for source in track.sources
            )
            if offered and prefix.is_prefix_of(track.name.namespace):
                self._offer(track, connection, request_id)

    def _offer(self, track: _Track, connection: MoqtConnection, request_id: RequestId) -> None:
        if track.merged is None or (connection, request_id) not in self._wishes:
            return
        local = track.merged.local
        if not connection.session.wants_track(request_id, local):
            return
        try:
            publication = connection.offer(local, wanted_by=request_id)
        except UsageError as exc:
            log.info("not offered", track=str(track.name), reason=str(exc))
            return
        self._spawn(self._publish(track, connection, publication))

    async def _publish(
        self, track: _Track, connection: MoqtConnection, publication: Publication
    ) -> None:
        reader = connection, publication.request_id
        try:
            await publication.answered
        except MoqtError:
            return  # refused, or the session is gone
        if not publication.finished.is_set():
            self._reads_now(track, reader)
            await publication.finished.wait()
        self._read_ended(reader)

    # -- the rest --------------------------------------------------------------------------------

    def _route_appeared(self) -> None:
        """Somebody new may have Tracks that are waited for, or that others bring already."""
        for track in list(self._tracks.values()):
            if not (track.waiting or track.readers):
                continue
            if track.has_ended:
                continue
            asking = {connection for connection, _ in (*track.waiting, *track.readers)}
            publishers = [
                c for c in self._publishers(track.name.namespace, besides=None) if c not in asking
            ]
            self._ask(track, publishers)

    async def _ask_status(
        self,
        connection: MoqtConnection,
        request: TrackStatusReceived,
        publishers: list[MoqtConnection],
    ) -> None:
        code, reason = RequestErrorCode.DOES_NOT_EXIST, "nobody publishes it"
        for publisher in publishers:
            try:
                status = await publisher.track_status(
                    request.track, timeout_s=self.options.request_timeout_s
                )
            except TimeoutError:
                code, reason = RequestErrorCode.TIMEOUT, "its publisher did not answer"
            except MoqtError as exc:
                reason = str(exc)
            else:
                local = LocalTrack(request.track, properties=status.track_properties)
                if status.largest is not None:
                    local.raise_largest(status.largest)
                connection.session.accept_track_status(request.request_id, local)
                connection.wake()
                return
        self._refuse(connection, request.request_id, code, reason)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for track in self._tracks.values():
                if track.merged is not None and track.merged.is_live:
                    track.merged.tick(now)
                self._leave_behind(track)
            self._tracks.expire(now)
            if not self._budget.has_room:
                self._has_room()

    def _leave_behind(self, track: _Track) -> None:
        """End who is too far behind. It can still fetch what is held."""
        limit = self.options.max_behind_octets
        behind = {
            (connection, request_id)
            for connection, request_id in track.readers
            if connection.session.backlog(request_id) > limit
        }
        late, track.behind = behind & track.behind, behind  # for longer than a burst
        for connection, request_id in late:
            if connection.closed is None:
                connection.session.end_subscription(
                    request_id, PublishDoneCode.TOO_FAR_BEHIND, f"{limit} octets behind"
                )
                connection.wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a task of the relay failed", exc_info=exc)


class _Both(NamespaceDirectory):
    """Tells two directories of what is added and removed."""

    def __init__(self, *directories: NamespaceDirectory) -> None:
        super().__init__()
        self._directories = directories

    def add(self, namespace: TrackNamespace) -> None:
        for directory in self._directories:
            directory.add(namespace)

    def remove(self, namespace: TrackNamespace) -> None:
        for directory in self._directories:
            directory.remove(namespace)
