"""A publisher behind relays that can be waited for, and streams as a subscriber sees them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from moqt.aio import MoqtConnection, RequestHandler, connect
from moqt.aio.tracks import Subscription
from moqt.codepoints import ObjectStatus, PublishDoneCode, StreamErrorCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.server import Relay
from moqt.session.commands import StreamId
from moqt.session.events import (
    FetchReceived,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    PeerRequestEnded,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack
from tests.integration.relay.stage import Stage
from tests.session.pair import payload_of

PATIENCE_S = 20.0


class Origin(RequestHandler):
    """A publisher of some Tracks, which notes what is asked of it."""

    def __init__(self, *tracks: LocalTrack) -> None:
        self.tracks = {track.name: track for track in tracks}
        self.subscribed: list[SubscribeReceived] = []
        self.ended: list[RequestId] = []
        self.connection: MoqtConnection
        self._news = asyncio.Event()

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        self.subscribed.append(request)
        track = self.tracks.get(request.track)
        if track is None:
            super().subscribe_received(connection, request)
        else:
            connection.session.accept_subscribe(request.request_id, track)
        self._news.set()

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        raise AssertionError("a relay asks by SUBSCRIBE and fill")

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        self.ended.append(event.request_id)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that a request of the relay brings about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def publishing(stage: Stage, *tracks: LocalTrack, **options: Any) -> AsyncIterator[Origin]:
    """Have a publisher of some Tracks announced at the farthest relay."""
    origin = Origin(*tracks)
    async with connect(
        stage.farthest.uri, tls=stage.farthest.tls, handler=origin, drain_s=0.1, **options
    ) as origin.connection:
        for namespace in {track.name.namespace for track in tracks}:
            await origin.connection.publish_namespace(namespace)
        yield origin


async def rest_of(
    subscription: Subscription, code: PublishDoneCode | None = PublishDoneCode.TRACK_ENDED
) -> Counter[Location]:
    """Return how often each Object comes that is left of a Track, and check how it ended."""
    found: Counter[Location] = Counter()
    async with asyncio.timeout(PATIENCE_S):
        async for event in subscription:
            if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
                assert event.payload == payload_of(event.location, len(event.payload))
                found[event.location] += 1
    assert subscription.ended is not None
    assert subscription.ended.code is code
    return found


@dataclass
class SeenStream:
    """One live stream of a subscription, as it came."""

    opened: SubgroupOpened
    objects: dict[int, bytearray] = field(default_factory=dict)
    closed: SubgroupClosed | None = None

    @property
    def end(self) -> StreamErrorCode | int | str | None:
        """How it ended; None: not yet."""
        if self.closed is None:
            return None
        return "fin" if self.closed.fin else self.closed.code


class Watched:
    """The live streams of a subscription that is taken in pieces."""

    def __init__(self) -> None:
        self.streams: dict[StreamId, SeenStream] = {}
        self._news = asyncio.Event()

    def sink(self, event: Any) -> None:
        match event:
            case SubgroupOpened():
                self.streams[event.stream_id] = SeenStream(event)
            case ObjectBegan() if event.stream_id in self.streams:
                self.streams[event.stream_id].objects[event.location.object] = bytearray()
            case ObjectPiece() if event.stream_id in self.streams:
                objects = self.streams[event.stream_id].objects
                objects[max(objects)] += event.data
            case SubgroupClosed():
                self.streams[event.stream_id].closed = event
        self._news.set()

    @property
    def in_order(self) -> list[SeenStream]:
        """The streams in the order in which they came."""
        return list(self.streams.values())

    async def until(self, condition: Callable[[list[SeenStream]], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.in_order):
                self._news.clear()
                await self._news.wait()


def held_by(relay: Relay, name: FullTrackName) -> LocalTrack | None:
    """Return what a relay has of a Track."""
    track = relay._tracks.get(name)
    return None if track is None or track.merged is None else track.merged.local
