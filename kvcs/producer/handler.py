"""ServingHandler: requests of every session, answered, and who reads what."""

import asyncio

import structlog

from kvcs.audit import AuditEvent, Outcome, Subject, note, note_access
from kvcs.producer.answers import Refusal
from kvcs.producer.holdings import Holdings
from kvcs.telemetry import Counter, Counters, LogEvent
from moqt.aio import MoqtConnection, RequestHandler
from moqt.authority import Denied
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import (
    AccessDecided,
    FetchReceived,
    PeerLimited,
    PeerRequestEnded,
    PublishNamespaceReceived,
    RequestId,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from moqt.session.localtrack import LocalTrack

log = structlog.get_logger("kvcs.producer")


class CountingHandler(RequestHandler):
    """Keeps count of readers: what is being read is not let go, and a session where nothing is
    read can be closed.

    Args:
        counters: Where things are counted.
    """  # noqa: D205  # one sentence

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._reads: dict[MoqtConnection, dict[RequestId, TrackNamespace]] = {}
        self._idle: dict[MoqtConnection, asyncio.Event] = {}

    def reading(self, namespace: TrackNamespace, change: int) -> None:
        """Take note of a request that is served from a namespace: +1, and -1 at its end."""
        raise NotImplementedError

    async def wait_idle(self, connection: MoqtConnection) -> None:
        """Return when nothing is served on a connection."""
        while self._reads.get(connection):
            await self._idle.setdefault(connection, asyncio.Event()).wait()

    def connection_made(self, connection: MoqtConnection) -> None:
        """Count the session."""
        self._counters.add(Counter.SESSIONS)
        log.info(LogEvent.SESSION_BEGAN, peer=connection.peer_address)

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        """Count its reader out."""
        self._end_read(connection, event.request_id)

    def access_decided(self, connection: MoqtConnection, event: AccessDecided) -> None:
        """Count a refusal, and write down what was said."""
        if isinstance(event.answer, Denied):
            self._counters.add(Counter.REQUESTS_REFUSED)
        note_access(connection.peer_address[0], event.action, event.namespace, event.answer)

    def peer_limited(self, connection: MoqtConnection, event: PeerLimited) -> None:
        """Count it, and write it down."""
        self._counters.add(Counter.REQUESTS_REFUSED)
        who = Subject(sub=event.who, address=connection.peer_address[0])
        note(AuditEvent.LIMIT, Outcome.REFUSED, who=who, reason=event.reason)

    def connection_closed(self, connection: MoqtConnection) -> None:
        """Count all its readers out."""
        for namespace in self._reads.get(connection, {}).values():
            self.reading(namespace, -1)
        self._forget(connection)

    def _begin_read(
        self, connection: MoqtConnection, request_id: RequestId, name: FullTrackName
    ) -> None:
        self._reads.setdefault(connection, {})[request_id] = name.namespace
        self.reading(name.namespace, +1)

    def _end_read(self, connection: MoqtConnection, request_id: RequestId) -> None:
        reads = self._reads.get(connection, {})
        namespace = reads.pop(request_id, None)
        if namespace is not None:
            self.reading(namespace, -1)
        if not reads:
            self._forget(connection)

    def _refuse(self, connection: MoqtConnection, request_id: RequestId, refusal: Refusal) -> None:
        self._counters.add(Counter.REQUESTS_REFUSED)
        log.debug(
            LogEvent.REQUEST_REFUSED,
            peer=connection.peer_address,
            code=refusal.code.name,
            reason=refusal.reason,
        )
        connection.session.reject(request_id, refusal.code, refusal.reason)

    def _forget(self, connection: MoqtConnection) -> None:
        self._reads.pop(connection, None)
        idle = self._idle.pop(connection, None)
        if idle is not None:
            idle.set()


class ServingHandler(CountingHandler):
    """Carries requests to :class:`~kvcs.producer.answers.Answers` and the answers back."""

    def __init__(self, holdings: Holdings, counters: Counters) -> None:
        super().__init__(counters)
        self._holdings = holdings
        self._answers = holdings.answers

    def reading(self, namespace: TrackNamespace, change: int) -> None:
        """Have what is read stay."""
        self._holdings.reading(namespace.fields[-1], change)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        """Serve the track that was asked for."""
        track = self._find(connection, request.request_id, request.track)
        if track is not None:
            self._begin_read(connection, request.request_id, request.track)
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        """Serve past Objects of the track that was asked for."""
        track = self._find(connection, request.request_id, request.track)
        if track is not None:
            self._begin_read(connection, request.request_id, request.track)
            connection.session.accept_fetch(request.request_id, track)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        """Tell how the track stands."""
        track = self._find(connection, request.request_id, request.track)
        if track is not None:
            connection.session.accept_track_status(request.request_id, track)

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        """Refuse: a producer takes nothing."""
        self._refuse(connection, request.request_id, self._answers.published_namespace())

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        """Tell which publications there are."""
        self._counters.add(Counter.REQUESTS)
        answer = self._answers.namespaces(request.prefix)
        if isinstance(answer, Refusal):
            self._refuse(connection, request.request_id, answer)
        else:
            connection.session.accept_namespaces(request.request_id, answer)

    def _find(
        self, connection: MoqtConnection, request_id: RequestId, name: FullTrackName
    ) -> LocalTrack | None:
        self._counters.add(Counter.REQUESTS)
        answer = self._answers.track(name)
        if isinstance(answer, Refusal):
            self._refuse(connection, request_id, answer)
            return None
        return answer
