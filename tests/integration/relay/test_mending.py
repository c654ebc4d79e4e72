"""What is missing of a live Track is asked for when somebody wants it, but not of who asks."""

import asyncio
import time

import pytest

from moqt.aio import MoqtConnection, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.session.events import (
    FetchReceived,
    ObjectReceived,
    RangeMarked,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.relay.stage import Serving, relaying
from tests.session.pair import NAME, make_track, payload_of, publish_group

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0


class Offering(Serving):
    """Serves a Track that it also offers, and counts what is fetched of it."""

    def __init__(self, track: LocalTrack, *, fetches: bool = True) -> None:
        super().__init__(track)
        self.fetched = 0
        self._serves_fetches = fetches

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        self.fetched += 1
        if self._serves_fetches:
            connection.session.accept_fetch(request.request_id, self.track)
        else:
            connection.session.reject(request.request_id, RequestErrorCode.UNAUTHORIZED, "no")


def whole(*groups: int) -> list[Location]:
    return [Location(group, number) for group in groups for number in range(4)]


@pytest.mark.parametrize("hops", [1, 2])
async def test_the_past_of_a_track_that_was_offered_in_its_middle_can_be_had(
    certificates: CertificateFiles, hops: int
) -> None:
    track = make_track(2, ended=False)
    offering = Offering(track)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        connect(stage.farthest.uri, tls=stage.farthest.tls, handler=offering) as publisher,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        await publisher.publish_namespace(NAME.namespace)
        await publisher.publish(track)
        fetched = await consumer.fetch(NAME, location_filter=FROM_START)
        events = [event async for event in fetched]
        assert [e.location for e in events if isinstance(e, ObjectReceived)] == whole(0, 1)
        assert not [event for event in events if isinstance(event, RangeMarked)]

        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        publish_group(track, 2, 4)
        track.end()
        objects = [event async for event in subscription if isinstance(event, ObjectReceived)]
        assert sorted(e.location for e in objects) == whole(0, 1, 2)
        assert all(e.payload == payload_of(e.location) for e in objects)
        assert offering.fetched <= 1


async def test_what_cannot_be_had_is_told_as_unknown_and_not_asked_for_all_the_time(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    offering = Offering(track, fetches=False)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates) as stage,
        connect(stage.farthest.uri, tls=stage.farthest.tls, handler=offering) as publisher,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        await publisher.publish(track)
        began = time.monotonic()
        for _ in range(20):
            fetched = await consumer.fetch(NAME, location_filter=FROM_START)
            events = [event async for event in fetched]
            assert [type(event) for event in events] == [RangeMarked]
        assert 1 <= offering.fetched <= 1 + (time.monotonic() - began) / 1.0


async def test_whoever_brings_a_track_is_not_served_with_it(certificates: CertificateFiles) -> None:
    track = make_track(1, ended=False)

    class Asking(Serving):
        """Asks back when it is asked."""

        answer: "asyncio.Task[object] | None" = None

        def subscribe_received(
            self, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            self.answer = asyncio.create_task(connection.subscribe(NAME, fill=FROM_START))
            super().subscribe_received(connection, request)

    asking = Asking(track)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates) as stage,
        connect(stage.farthest.uri, tls=stage.farthest.tls, handler=asking) as publisher,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        await publisher.publish_namespace(NAME.namespace)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert asking.answer is not None
        with pytest.raises(RequestRejected) as refused:
            await asking.answer
        assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST
        track.end()
        objects = [event async for event in subscription if isinstance(event, ObjectReceived)]
        assert [event.location for event in objects] == whole(0)
