"""DepotHandler: requests of every session, answered from what lies on disk. Shell.

An answer may wait for the image of its publication; the Objects follow as they are read.
"""

import asyncio
from collections.abc import Callable

import structlog

from kvcs.audit import AuditEvent, Outcome, Subject, note
from kvcs.depot.depot import Depot
from kvcs.depot.stalls import Stalls
from kvcs.errors import BadName, NotFound
from kvcs.producer.answers import Refusal, check_prefix, missing
from kvcs.producer.handler import CountingHandler
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter, LogEvent
from moqt.aio import MoqtConnection
from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import (
    FetchReceived,
    PublishNamespaceReceived,
    RequestId,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from moqt.session.localtrack import LocalTrack

log = structlog.get_logger("kvcs.depot")

Reader = tuple[MoqtConnection, RequestId]

#: Seconds between looks at who takes nothing.
_LOOK_S = 1.0

_GOING = Refusal(RequestErrorCode.GOING_AWAY, "the store is stopping")


class DepotHandler(CountingHandler):
    """Serves the publications of one scope.

    Args:
        depot: What is held.
        scope_id: The scope; no other is answered for.
        stall_s: Seconds that a reader may take nothing while there is no room for others.

    Attributes:
        draining: Set when the store stops: what is under way goes on, nothing new begins.
    """

    def __init__(self, depot: Depot, scope_id: bytes, stall_s: float = 10.0) -> None:
        super().__init__(depot.counters)
        self._stall_s = stall_s
        self._stalls: Stalls[Reader] = Stalls(stall_s)
        self.draining = False
        self._depot = depot
        self._scope_id = scope_id
        self._answering: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Answer nothing more."""
        for task in self._answering:
            task.cancel()

    async def leave_stalled(self) -> None:
        """End who takes nothing while what they read keeps others out, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if self._depot.is_short:
                self.look(loop.time())
            else:
                self._stalls.forget()
            await asyncio.sleep(_LOOK_S)

    def look(self, now: float) -> None:
        """Look once, as :meth:`leave_stalled` does again and again."""
        places = {
            (connection, request_id): connection.session.waits_at(request_id)
            for connection, reads in self._reads.items()
            for request_id in reads
        }
        reason = f"nothing was taken for {self._stall_s:g} s, and there is no room"
        for connection, request_id in self._stalls.look(places, now):
            session = connection.session
            session.end_subscription(request_id, PublishDoneCode.TOO_FAR_BEHIND, reason)
            session.end_fetch(request_id, StreamErrorCode.TOO_FAR_BEHIND)
            connection.wake()
            who = Subject(sub=session.peer_name, address=connection.peer_address[0])
            note(AuditEvent.LIMIT, Outcome.REFUSED, who=who, reason=reason)

    def reading(self, namespace: TrackNamespace, change: int) -> None:
        """Have what is read stay."""
        self._depot.reading(PublicationName.from_namespace(namespace), change)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        """Serve the track that was asked for."""
        self._serve(connection, request, connection.session.accept_subscribe)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        """Serve past Objects of the track that was asked for."""
        self._serve(connection, request, connection.session.accept_fetch)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        """Tell how the track stands."""
        self._serve(connection, request, connection.session.accept_track_status, is_read=False)

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        """Refuse: a store asks for what it wants by itself."""
        refusal = Refusal(RequestErrorCode.UNINTERESTED, "a store follows, it is not published to")
        self._refuse(connection, request.request_id, refusal)

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        """Tell which publications there are."""
        self._counters.add(Counter.REQUESTS)
        refusal = _GOING if self.draining else check_prefix(request.prefix, self._scope_id)
        if refusal is not None:
            self._refuse(connection, request.request_id, refusal)
        else:
            connection.session.accept_namespaces(request.request_id, self._depot.served)

    # -- parts -----------------------------------------------------------------------------------

    def _serve(
        self,
        connection: MoqtConnection,
        request: SubscribeReceived | FetchReceived | TrackStatusReceived,
        accept: Callable[[RequestId, LocalTrack], bool],
        *,
        is_read: bool = True,
    ) -> None:
        self._counters.add(Counter.REQUESTS)
        found = self._find(request.track)
        if isinstance(found, Refusal):
            self._refuse(connection, request.request_id, found)
            return
        if is_read:
            # From now on, so that it stays while its image is made.
            self._begin_read(connection, request.request_id, request.track)
        task = asyncio.create_task(self._answer(connection, request, found, accept))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _find(self, track: FullTrackName) -> PublicationName | Refusal:
        if self.draining:
            return _GOING
        try:
            name = PublicationName.from_namespace(track.namespace)
        except BadName as exc:
            return missing(f"not a namespace of KVCS: {exc}")
        if name.scope_id != self._scope_id:
            return missing("no such scope here")
        if not self._depot.is_served(name):
            return missing("no such publication here")
        return name

    async def _answer(
        self,
        connection: MoqtConnection,
        request: SubscribeReceived | FetchReceived | TrackStatusReceived,
        name: PublicationName,
        accept: Callable[[RequestId, LocalTrack], bool],
    ) -> None:
        try:
            image = await self._depot.image(name)
            track = image.tracks.get(request.track.name)
            if track is None:
                refusal = missing("the publication has no such track")
            else:
                accept(request.request_id, track.local)
                connection.wake()
                return
        except NotFound:  # dropped since
            refusal = missing("no such publication here")
        except Exception as exc:
            log.error(LogEvent.STORE_FAILED, error=str(exc))
            refusal = Refusal(RequestErrorCode.INTERNAL_ERROR, "the store cannot be read")
        self._refuse(connection, request.request_id, refusal)
        self._end_read(connection, request.request_id)
        connection.wake()
