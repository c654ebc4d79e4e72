"""TrackPublisher: a ready-made handler that serves Tracks of this program to whoever asks.

For applications that decide nothing but which Tracks there are. Who has rules of its own about
who may ask for what writes a :class:`~moqt.aio.connection.RequestHandler` instead.
"""

import asyncio

from moqt.aio.connection import MoqtConnection, RequestHandler
from moqt.codepoints import GroupOrder, ObjectStatus, RequestErrorCode
from moqt.errors import UsageError
from moqt.names import FullTrackName
from moqt.session.budget import ByteBudget
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from moqt.session.localobjects import LocalSubgroup, Payload
from moqt.session.localtrack import LocalTrack
from moqt.wire.pairs import Pairs


class TrackPublisher(RequestHandler):
    """Serves any number of Tracks, to the sessions of a server or over a dialled connection.

    Args:
        budget_octets: Payload octets held over all Tracks. :meth:`publish` waits while they
            are used up: until subscribers have been sent what is held, for Tracks that do not
            keep their past.
    """

    def __init__(self, *, budget_octets: int = 64 << 20) -> None:
        self.directory = NamespaceDirectory()
        """The namespaces of the Tracks, for SUBSCRIBE_NAMESPACE."""

        self._budget = ByteBudget(budget_octets)
        self._tracks: dict[FullTrackName, LocalTrack] = {}

    @property
    def octets_held(self) -> int:
        """Payload octets held, over all Tracks."""
        return self._budget.used

    def add(
        self,
        name: FullTrackName,
        *,
        properties: Pairs = (),
        group_order: GroupOrder = GroupOrder.ASCENDING,
        retain: bool = False,
    ) -> LocalTrack:
        """Begin a Track, and serve it from now on.

        Args:
            name: Its Full Track Name.
            properties: Track Properties.
            group_order: The order for subscribers that do not say.
            retain: Keep every Object, so that a subscriber may fill or fetch from the start.
                Without it an Object is let go once it was sent to every subscriber.

        Raises:
            UsageError: If there is such a Track.
        """
        if name in self._tracks:
            raise UsageError(f"{name} is published already")
        track = LocalTrack(
            name,
            properties=properties,
            group_order=group_order,
            retain=retain,
            budget=self._budget,
        )
        self._tracks[name] = track
        self.directory.add(name.namespace)
        return track

    def remove(self, track: LocalTrack) -> None:
        """Serve a Track no longer, and let go of what it holds. It must have ended.

        Raises:
            UsageError: If it has not, or is not one of these.
        """
        if self._tracks.get(track.name) is not track:
            raise UsageError(f"{track.name} is not published here")
        if track.ended is None:
            raise UsageError(f"{track.name} has not ended")
        del self._tracks[track.name]
        self.directory.remove(track.name.namespace)
        track.drop()

    async def publish(
        self,
        subgroup: LocalSubgroup,
        object_id: int,
        *payload: Payload,
        status: ObjectStatus = ObjectStatus.NORMAL,
        properties: Pairs = (),
        timeout_s: float | None = None,
    ) -> None:
        """Publish one whole Object, once there is room for it.

        Args:
            subgroup: Of one of these Tracks.
            object_id: See :meth:`LocalSubgroup.publish
                <moqt.session.localobjects.LocalSubgroup.publish>`, as for the others.
            payload: The payload, in any number of pieces, which must never change afterwards.
            status: Anything but NORMAL has no payload.
            properties: Object Properties.
            timeout_s: How long to wait for room at most.

        Raises:
            TimeoutError: If there was no room in time. Nothing was published.
            UsageError: If the Object must not be published. Nothing was.
        """
        async with asyncio.timeout(timeout_s):
            while not self._budget.has_room:
                room = asyncio.Event()
                self._budget.when_room(room.set)
                await room.wait()
        subgroup.publish(object_id, *payload, status=status, properties=properties)

    # -- RequestHandler --------------------------------------------------------------------------

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        """Serve a Track that there is."""
        track = self._tracks.get(request.track)
        if track is None:
            super().subscribe_received(connection, request)
        else:
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        """Serve a stored range of a Track that there is."""
        track = self._tracks.get(request.track)
        if track is None:
            super().fetch_received(connection, request)
        else:
            connection.session.accept_fetch(request.request_id, track)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        """Tell how a Track stands."""
        track = self._tracks.get(request.track)
        if track is None:
            super().track_status_received(connection, request)
        else:
            connection.session.accept_track_status(request.request_id, track)

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        """Tell of the Tracks' namespaces, now and as they come and go."""
        if request.prefix.is_reserved:
            connection.session.reject(
                request.request_id, RequestErrorCode.DOES_NOT_EXIST, "a reserved namespace"
            )
        else:
            connection.session.accept_namespaces(request.request_id, self.directory)
