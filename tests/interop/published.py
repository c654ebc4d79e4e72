"""Tracks for the peer to take: what is published, and what must then have arrived."""

import asyncio
import hashlib
import random
from collections.abc import Iterable

from moqt.aio import MoqtConnection, RequestHandler
from moqt.codepoints import ObjectStatus, RequestErrorCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.events import (
    FetchReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from moqt.session.localtrack import LocalTrack

#: Five fields with the octets that text handling would trip over: 00, `.`, `/`, 80 and above.
BINARY_FIELDS = (
    b"kvcs-test",
    bytes.fromhex("00ff2f2e80c3"),
    bytes(range(32)),
    b"../" + bytes.fromhex("fffe00"),
    bytes.fromhex("2e2f2e"),
)
#: One octet, none, what fits a packet, what does not, and more than a block of a small model.
SIZES = (1, 0, 900, 5_000, 66_000)


def binary_track(distinction: str, name: bytes = b"\x00k.raw/.") -> FullTrackName:
    """Return a name whose fields are binary; ``distinction`` makes it this test's own."""
    first, second, *rest = BINARY_FIELDS
    return FullTrackName.of(first, distinction.encode() + second, *rest, name)


def payload(group: int, object_id: int, size: int) -> bytes:
    """Return octets that belong to one Location and to no other."""
    return random.Random(f"{group}/{object_id}").randbytes(size)


class TrackMaker:
    """Publishes Groups whose content is known, each in one Subgroup of its own."""

    def __init__(self, name: FullTrackName, sizes: tuple[int, ...] = SIZES) -> None:
        self.track = LocalTrack(name)
        self.expected: dict[Location, bytes] = {}
        self._sizes = sizes

    @property
    def digests(self) -> dict[Location, str]:
        """SHA-256 of each payload, in hexadecimal."""
        return {at: hashlib.sha256(data).hexdigest() for at, data in self.expected.items()}

    def publish_groups(self, groups: Iterable[int], *, end_status: bool = True) -> None:
        """Publish whole Groups; with ``end_status`` each is closed by an END_OF_GROUP Object."""
        for group in groups:
            subgroup = self.track.open_subgroup(
                group, priority=group % 256, holds_end_of_group=True
            )
            for object_id, size in enumerate(self._sizes):
                data = payload(group, object_id, size)
                self.expected[Location(group, object_id)] = data
                # In two pieces, as a header and its data are.
                subgroup.publish(object_id, data[:68], data[68:])
            if end_status:
                subgroup.publish(len(self._sizes), status=ObjectStatus.END_OF_GROUP)
            subgroup.close()

    def end(self, *, end_status_group: int | None = None) -> None:
        """End the Track, with an END_OF_TRACK Object in the Group named, if one is."""
        if end_status_group is not None:
            subgroup = self.track.open_subgroup(end_status_group)
            subgroup.publish(0, status=ObjectStatus.END_OF_TRACK)
            subgroup.close()
        self.track.end(reason="all was published")


class Publisher(RequestHandler):
    """Serves the Tracks it is given, and tells of every SUBSCRIBE and FETCH."""

    def __init__(self, *tracks: LocalTrack) -> None:
        self.tracks = {track.name: track for track in tracks}
        self.subscribes: asyncio.Queue[FullTrackName] = asyncio.Queue()
        self.fetches: asyncio.Queue[FullTrackName] = asyncio.Queue()

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        if track := self._track(connection, request):
            connection.session.accept_subscribe(request.request_id, track)
            self.subscribes.put_nowait(request.track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        if track := self._track(connection, request):
            connection.session.accept_fetch(request.request_id, track)
            self.fetches.put_nowait(request.track)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        if track := self._track(connection, request):
            connection.session.accept_track_status(request.request_id, track)

    def _track(
        self,
        connection: MoqtConnection,
        request: SubscribeReceived | FetchReceived | TrackStatusReceived,
    ) -> LocalTrack | None:
        track = self.tracks.get(request.track)
        if track is None:
            connection.session.reject(
                request.request_id, RequestErrorCode.DOES_NOT_EXIST, "no such track"
            )
        return track
