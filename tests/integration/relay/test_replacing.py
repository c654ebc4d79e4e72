"""Publishers that are lost and replaced: by another one, or by themselves a little later."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.aio import MoqtConnection, Subscription, connect, open_connection
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode, RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.relay.options import RelayOptions
from moqt.session.events import ObjectReceived, RangeMarked, SubscribeReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.relay.stage import Serving, Stage, relaying
from tests.session.pair import NAME, make_track, payload_of, publish_group

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
#: Longer than any test takes: who waits for its end fails.
LONG = RelayOptions(publisher_grace_s=60.0)
SHORT_S = 0.3
SHORT = RelayOptions(publisher_grace_s=SHORT_S)
NONE = RelayOptions(publisher_grace_s=0.0)


@asynccontextmanager
async def staged(
    files: CertificateFiles, options: RelayOptions
) -> AsyncIterator[tuple[Stage, MoqtConnection]]:
    """A relay, and a subscriber's session."""
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(files, options=options) as stage,
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as consumer,
    ):
        yield stage, consumer


async def publisher(stage: Stage, track: LocalTrack) -> tuple[MoqtConnection, Serving]:
    """Return the session of a publisher that is announced at a relay."""
    handler = Serving(track)
    connection = await open_connection(stage.farthest.uri, tls=stage.farthest.tls, handler=handler)
    await connection.publish_namespace(track.name.namespace)
    return connection, handler


async def next_object(subscription: Subscription) -> Location:
    while not isinstance(event := await anext(subscription), ObjectReceived) or not event.payload:
        pass
    assert event.payload == payload_of(event.location)
    return event.location


async def rest_of(subscription: Subscription) -> Counter[Location]:
    events = [event async for event in subscription]
    return Counter(e.location for e in events if isinstance(e, ObjectReceived) and e.payload)


def code_of(subscription: Subscription) -> PublishDoneCode | int | None:
    return None if subscription.ended is None else subscription.ended.code


def group_of(*groups: int) -> list[Location]:
    return [Location(group, number) for group in groups for number in range(4)]


async def test_a_publisher_that_comes_back_in_time_is_taken_up_and_nobody_sees_an_end(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with staged(certificates, LONG) as (stage, consumer):
        first, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert [await next_object(subscription) for _ in range(4)] == group_of(0)
        await first.close(drain_s=0.1)
        late = asyncio.create_task(consumer.subscribe(NAME, fill=FROM_START))
        again, handler = await publisher(stage, track)
        await handler.asked.wait()
        second = await late
        publish_group(track, 1, 4)
        track.end()

        assert await rest_of(subscription) == Counter(group_of(1))
        assert await rest_of(second) == Counter(group_of(0, 1))
        assert code_of(subscription) is code_of(second) is PublishDoneCode.TRACK_ENDED
        await again.close(drain_s=0.1)


async def test_a_publisher_that_comes_back_by_itself_is_taken_up_too(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates, LONG) as (stage, consumer):
        for group in range(2):
            connection = await open_connection(stage.farthest.uri, tls=stage.farthest.tls)
            await connection.publish(track)
            if group == 0:
                subscription = await consumer.subscribe(NAME)
            publish_group(track, group, 4)
            assert [await next_object(subscription) for _ in range(4)] == group_of(group)
            if group == 0:
                await connection.close(drain_s=0.1)
        track.end()

        assert await rest_of(subscription) == Counter()
        assert code_of(subscription) is PublishDoneCode.TRACK_ENDED
        await connection.close(drain_s=0.1)


async def test_what_was_published_in_between_comes_to_who_is_subscribed(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with staged(certificates, LONG) as (stage, consumer):
        first, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert [await next_object(subscription) for _ in range(4)] == group_of(0)
        await first.close(drain_s=0.1)
        publish_group(track, 1, 4)
        again, handler = await publisher(stage, track)
        await handler.asked.wait()
        second = await consumer.subscribe(NAME, fill=FROM_START)
        publish_group(track, 2, 4)
        track.end()
        assert await rest_of(subscription) == Counter(group_of(1, 2))
        assert await rest_of(second) == Counter(group_of(0, 1, 2))
        assert code_of(subscription) is code_of(second) is PublishDoneCode.TRACK_ENDED
        await again.close(drain_s=0.1)


async def test_when_nobody_comes_in_time_all_are_told_the_error_and_what_there_is_of_it(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with staged(certificates, SHORT) as (stage, consumer):
        connection, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert [await next_object(subscription) for _ in range(4)] == group_of(0)
        began = time.monotonic()
        await connection.close(drain_s=0.1)
        waiting = asyncio.create_task(consumer.subscribe(NAME, fill=FROM_START))
        fetching = asyncio.create_task(consumer.fetch(NAME, location_filter=FROM_START))
        assert await rest_of(subscription) == Counter()
        assert time.monotonic() - began >= SHORT_S
        assert code_of(subscription) is PublishDoneCode.INTERNAL_ERROR

        second = await waiting
        assert await rest_of(second) == Counter(group_of(0))
        assert code_of(second) is PublishDoneCode.INTERNAL_ERROR
        events = [event async for event in await fetching]
        assert [e.location for e in events if isinstance(e, ObjectReceived)] == group_of(0)
        assert not [event for event in events if isinstance(event, RangeMarked)]


async def test_another_relay_that_has_the_track_is_asked_before_anybody_is_told(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with (
        relaying(certificates, options=NONE) as upper,
        staged(certificates, NONE) as (stage, consumer),
    ):
        stage.relays[0].ask_at(upper.nearest.uri, tls=upper.nearest.tls)
        near, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        assert [await next_object(subscription) for _ in range(4)] == group_of(0)
        far, handler = await publisher(upper, track)
        # It is known that it can be had there; but there is a publisher here.
        found = await consumer.subscribe_namespace(NAME.namespace)
        await anext(found)
        assert not handler.asked.is_set()
        await near.close(drain_s=0.1)
        await handler.asked.wait()
        publish_group(track, 1, 4)
        track.end()

        assert await rest_of(subscription) == Counter(group_of(1))
        assert code_of(subscription) is PublishDoneCode.TRACK_ENDED
        await far.close(drain_s=0.1)


async def test_a_publisher_that_says_that_it_failed_is_believed_and_not_asked_again(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    asked = 0

    class Counting(Serving):
        def subscribe_received(
            self, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            nonlocal asked
            asked += 1
            super().subscribe_received(connection, request)

    async with staged(certificates, LONG) as (stage, consumer):
        connection = await open_connection(
            stage.farthest.uri, tls=stage.farthest.tls, handler=Counting(track)
        )
        await connection.publish_namespace(NAME.namespace)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        track.end(PublishDoneCode.INTERNAL_ERROR, "the engine failed")

        assert await rest_of(subscription) == Counter(group_of(0))
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.INTERNAL_ERROR
        assert subscription.ended.reason == "the engine failed"
        assert asked == 1
        await connection.close(drain_s=0.1)


async def test_one_that_refuses_in_place_of_the_lost_one_ends_the_wait_no_sooner(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with staged(certificates, SHORT) as (stage, consumer):
        lost, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        await next_object(subscription)
        began = time.monotonic()
        await lost.close(drain_s=0.1)
        async with connect(stage.farthest.uri, tls=stage.farthest.tls) as other:
            await other.publish_namespace(NAME.namespace)  # and refuses what it is asked for
            await rest_of(subscription)
            assert time.monotonic() - began >= SHORT_S
            assert code_of(subscription) is PublishDoneCode.INTERNAL_ERROR
            with pytest.raises(RequestRejected) as refused:
                await consumer.subscribe(NAME)
            assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST


async def test_who_leaves_during_the_wait_leaves_nothing_behind(
    certificates: CertificateFiles,
) -> None:
    track = make_track(1, ended=False)
    async with staged(certificates, LONG) as (stage, consumer):
        lost, _ = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        await next_object(subscription)
        await lost.close(drain_s=0.1)
        subscription.cancel()
        again, handler = await publisher(stage, track)
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        await handler.asked.wait()
        publish_group(track, 1, 4)
        track.end()

        assert await rest_of(subscription) == Counter(group_of(0, 1))
        assert code_of(subscription) is PublishDoneCode.TRACK_ENDED
        await again.close(drain_s=0.1)
