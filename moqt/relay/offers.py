"""SUBSCRIBE_TRACKS: who wants to be offered Tracks, and which are offered (MOQT, "PUBLISH")."""

import structlog

from moqt.aio import MoqtConnection
from moqt.aio.tracks import Publication
from moqt.errors import MoqtError, UsageError
from moqt.names import TrackNamespace
from moqt.relay.holdings import Holdings
from moqt.relay.readers import Readers
from moqt.relay.tasks import Tasks
from moqt.relay.track import Reader, RelayedTrack
from moqt.session.events import RequestId

log = structlog.get_logger("moqt.relay")


class Offers:
    """Passes on, to those that asked for it, that a Track is published."""

    def __init__(self, holdings: Holdings, readers: Readers, tasks: Tasks) -> None:
        self._holdings = holdings
        self._readers = readers
        self._tasks = tasks
        self._wishes: dict[Reader, TrackNamespace] = {}

    def wished(
        self, connection: MoqtConnection, request_id: RequestId, prefix: TrackNamespace
    ) -> None:
        """Offer the Tracks under ``prefix`` that are published here, now and from now on."""
        self._wishes[connection, request_id] = prefix
        for track in self._holdings:
            offered = any(
                not source.is_own and source.connection is not connection
                for source in track.sources
            )
            if offered and prefix.is_prefix_of(track.name.namespace):
                self._offer(track, connection, request_id)

    def published(self, track: RelayedTrack, publisher: MoqtConnection) -> None:
        """Offer a Track to all that want it."""
        for (connection, request_id), prefix in list(self._wishes.items()):
            if connection is not publisher and prefix.is_prefix_of(track.name.namespace):
                self._offer(track, connection, request_id)

    def withdrawn(self, reader: Reader) -> None:
        """A wish is over, if there was one."""
        self._wishes.pop(reader, None)

    def left(self, connection: MoqtConnection) -> None:
        """A session is over."""
        for reader in [reader for reader in self._wishes if reader[0] is connection]:
            del self._wishes[reader]

    def _offer(
        self, track: RelayedTrack, connection: MoqtConnection, request_id: RequestId
    ) -> None:
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
        self._tasks.spawn(self._publish(track, connection, publication))

    async def _publish(
        self, track: RelayedTrack, connection: MoqtConnection, publication: Publication
    ) -> None:
        reader = connection, publication.request_id
        try:
            await publication.answered
        except MoqtError:
            return  # refused, or the session is gone
        if not publication.finished.is_set():
            self._readers.began(track, reader)
            await publication.finished.wait()
        self._readers.ended(reader)
