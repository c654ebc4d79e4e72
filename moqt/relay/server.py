"""The relay itself: its sessions, and which part of it each of their requests goes to.

What a Track is, is decided in :mod:`moqt.relay.merge`; where it comes from, in
:mod:`moqt.relay.sources`; which request gets which answer, in :mod:`moqt.relay.answers`; what is
kept, in :mod:`moqt.relay.holdings`. Subscribers are served by their sessions, each at its own
pace, from the one LocalTrack; a relay does not touch an Object for any of them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import structlog

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    Server,
    ServerTls,
    serve,
)
from moqt.authority import Authority
from moqt.codepoints import RequestErrorCode
from moqt.names import TrackNamespace
from moqt.relay.answers import Answers
from moqt.relay.holdings import Holdings
from moqt.relay.mending import Mending
from moqt.relay.neighbours import Neighbours
from moqt.relay.observer import Peer, RelayObserver
from moqt.relay.offers import Offers
from moqt.relay.options import RelayOptions
from moqt.relay.pausing import Pausing
from moqt.relay.readers import Readers
from moqt.relay.sources import Sources
from moqt.relay.tasks import Tasks
from moqt.relay.upstream import Upstream
from moqt.session.config import SessionConfig, TokenSource, no_tokens
from moqt.session.events import (
    AccessDecided,
    FetchReceived,
    PeerLimited,
    PeerRequestEnded,
    PublishNamespaceReceived,
    PublishReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
    TracksUpdated,
)
from moqt.session.guests import Guests

__all__ = ["Relay", "RelayOptions"]

log = structlog.get_logger("moqt.relay")

#: How often it is looked at what has become quiet or old.
_TICK_S = 0.25


class Relay(RequestHandler):
    """Passes Tracks on between its sessions. An asynchronous context manager.

    Args:
        options: Its limits.
        quic: Limits of its QUIC connections.
        config: Limits of its sessions; ``fill_timeout_s`` is that of ``options``.
        authority: Asked about each session and each request of those who connect here, whether
            what they want is held or not; None: everything is allowed.
        guests: Counts what each of them has, over all listeners; by default with the limits that it
            comes with.
        observer: Is told what an operator wants to know.
    """

    def __init__(
        self,
        options: RelayOptions | None = None,
        *,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
        authority: Authority | None = None,
        guests: Guests | None = None,
        observer: RelayObserver | None = None,
    ) -> None:
        self._authority = authority
        self._guests = guests or Guests()
        self._observer = observer or RelayObserver()
        self.options = options = options or RelayOptions()
        self._quic = quic
        self._config = replace(
            config or SessionConfig(), fill_timeout_s=options.fill_timeout_s or None
        )
        self._tasks = Tasks()
        self._neighbours = Neighbours()
        self._routes = self._neighbours.routes
        self._tracks = Holdings(options, self._neighbours, self._observer.track_malformed)
        self._readers = Readers(
            self._tracks, max_behind_octets=options.max_behind_octets, stall_s=options.stall_s
        )
        self._sources = Sources(options, self._neighbours, self._tracks, self._readers, self._tasks)
        self._pausing = Pausing(options, self._sources, self._readers, self._tasks)
        self._answers = Answers(
            options,
            self._neighbours,
            self._tracks,
            self._readers,
            self._sources,
            self._pausing,
            Mending(options, self._tasks),
            self._tasks,
        )
        self._offers = Offers(self._tracks, self._readers, self._tasks)
        self._servers: list[Server] = []

    @property
    def octets_held(self) -> int:
        """Payload octets in the cache."""
        return self._tracks.budget.used

    @property
    def tracks_held(self) -> int:
        """Tracks that it has to do with."""
        return len(self._tracks)

    async def __aenter__(self) -> Self:
        self._tasks.spawn(self._tick())
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
            host,
            port,
            tls=tls,
            handler=self,
            quic=self._quic,
            config=self._config,
            authority=self._authority,
            guests=self._guests,
        )
        self._servers.append(server)
        return server.address

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on; sessions go on.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """
        for server in self._servers:
            server.identify(tls)

    def ask_again(self) -> None:
        """Have the authority asked again about all that goes on: something was revoked, perhaps."""
        for server in self._servers:
            server.ask_again()

    def ask_at(
        self,
        uri: str,
        *,
        tls: ClientTls | None = None,
        tokens: TokenSource = no_tokens,
        prefixes: Sequence[TrackNamespace] = (TrackNamespace(),),
    ) -> None:
        """Ask another relay for Tracks that nobody publishes here; it is kept connected.

        Args:
            uri: Where it is.
            tls: Whom to believe.
            tokens: What this relay shows there of itself. What its clients show is never passed
                on: it was given for this relay.
            prefixes: Which namespaces it is asked for, none of them a prefix of another; all by
                default. A token may allow to ask for some only.
        """
        upstream = Upstream(
            uri,
            self,
            own=self._neighbours.own,
            found=self._neighbours.known,
            tls=tls,
            quic=self._quic,
            config=replace(self._config, tokens=tokens),
            prefixes=prefixes,
            timeout_s=self.options.request_timeout_s,
        )
        self._neighbours.add_upstream(upstream)
        self._tasks.spawn(upstream.run(self._answers.publisher_came))

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
        self._tracks.close()
        await self._tasks.cancel()

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
            self._observer.namespace_announced(_peer_of(connection), request.prefix)
            self._answers.publisher_came()

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        """Tell of what can be had, here and further up."""
        connection.session.accept_namespaces(
            request.request_id, self._neighbours.directory_for(connection)
        )

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        """Serve it, now or once a publisher has answered."""
        self._answers.asked(connection, request)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        """Serve it from what is held; what is not is received first."""
        self._answers.asked(connection, request)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        """Answer it, or pass it on."""
        self._answers.status_asked(connection, request)

    def publish_received(self, connection: MoqtConnection, request: PublishReceived) -> None:
        """Take the Track; who wants it gets it."""
        track = self._tracks.to_receive(request.track)
        if track is None:
            connection.session.reject(
                request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "the cache is in use"
            )
            return
        source = self._sources.offered(track, connection, request)
        if source is None:
            self._tracks.tidy(track)
            return
        if request.is_paused:
            self._pausing.began_paused(source)
        self._observer.track_offered(_peer_of(connection), request.track)
        self._offers.published(track, connection)

    def subscribe_tracks_received(
        self, connection: MoqtConnection, request: SubscribeTracksReceived
    ) -> None:
        """Offer the Tracks that are published here, now and from now on."""
        if connection.session.accept_tracks(request.request_id):
            self._offers.wished(connection, request.request_id, request.prefix)

    def tracks_updated(self, connection: MoqtConnection, event: TracksUpdated) -> None:
        """Offer what is asked for now."""
        self._offers.wished(connection, event.request_id, event.prefix)

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        """Forget it."""
        reader = connection, event.request_id
        if (prefix := self._routes.remove(*reader)) is not None:
            self._observer.namespace_withdrawn(_peer_of(connection), prefix)
        else:
            self._offers.withdrawn(reader)
            self._readers.ended(reader)

    def access_decided(self, connection: MoqtConnection, event: AccessDecided) -> None:
        """Tell of it."""
        peer = _peer_of(connection)
        self._observer.access_decided(peer, event.action, event.namespace, event.answer)

    def peer_limited(self, connection: MoqtConnection, event: PeerLimited) -> None:
        """Tell of it."""
        self._observer.peer_limited(_peer_of(connection), event.reason)

    def connection_closed(self, connection: MoqtConnection) -> None:
        """Forget everything of it; its own sources end by themselves."""
        for prefix in self._routes.forget(connection):
            self._observer.namespace_withdrawn(_peer_of(connection), prefix)
        self._offers.left(connection)
        self._readers.left(connection)

    # -- time ------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for track in self._tracks:
                if track.merged is not None:
                    track.merged.tick(now)
                self._readers.leave_behind(track)
                self._pausing.look(track, now)
            self._tracks.tick(now)
            self._readers.leave_stalled(now)


def _peer_of(connection: MoqtConnection) -> Peer:
    return Peer(connection.peer_address[0], connection.session.peer_name)
