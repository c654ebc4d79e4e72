"""Publishers that contradict each other or break the rules: what that ends, and what goes on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from moqt.aio import MoqtConnection, connect
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Subscription
from moqt.codepoints import (
    ObjectStatus,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.events import ObjectReceived, SubscribeReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.relay.origin import Origin, Watched, held_by, publishing, rest_of
from tests.integration.relay.stage import Stage, relaying
from tests.session.pair import make_track, payload_of, publish_group, whole

pytestmark = pytest.mark.network

NAME = FullTrackName.of("doubtful", "track")
SOUND = FullTrackName.of("sound", "track")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
PAYLOAD = payload_of(Location(0, 0))


def _same(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, 0, priority=10, has_properties=True)
    subgroup.publish(0, PAYLOAD, properties=((0x3800, 1),))


def _payload(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, 0, priority=10, has_properties=True)
    subgroup.publish(0, PAYLOAD[:-1] + b"?", properties=((0x3800, 1),))


def _length(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, 0, priority=10, has_properties=True)
    subgroup.publish(0, PAYLOAD + b"?", properties=((0x3800, 1),))


def _priority(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, 0, priority=11, has_properties=True)
    subgroup.publish(0, PAYLOAD, properties=((0x3800, 1),))


def _subgroup(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, 1, priority=10, has_properties=True)
    subgroup.publish(0, PAYLOAD, properties=((0x3800, 1),))


async def is_idle(stage: Stage, consumer: MoqtConnection) -> None:
    """Return when each relay has seen what was sent to it so far, asked for by the nearest."""
    with pytest.raises(RequestRejected):
        await consumer.track_status(FullTrackName.of("no", "such"))


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("version", [_payload, _length, _priority, _subgroup])
async def test_a_second_version_of_an_object_ends_its_track_malformed_and_is_not_kept(
    certificates: CertificateFiles, hops: int, version: Callable[[LocalTrack], None]
) -> None:
    one, two = LocalTrack(NAME), LocalTrack(NAME)
    sound = LocalTrack(SOUND)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, one, sound) as first,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        async with publishing(stage, two) as second:
            other = await consumer.subscribe(SOUND)
            watched = Watched()
            subscription = await consumer.subscribe(NAME, pieces=True, sink=watched.sink)
            for origin in (first, second):
                await origin.until(lambda origin=origin: any(  # type: ignore[misc]
                    request.track == NAME for request in origin.subscribed
                ))  # fmt: skip
            _same(one)
            half = one.open_subgroup(1)
            half.extend(half.begin(0, 100), bytes(50))
            await watched.until(lambda streams: len(streams) == 2 and all(
                stream.objects.get(0) for stream in streams
            ))  # fmt: skip
            fetch = await consumer.fetch(NAME, location_filter=LocationFilter.range(0, 0, 1, 0))
            assert isinstance(await anext(fetch), ObjectReceived)
            version(two)
            await subscription.finished.wait()
            await fetch.finished.wait()
            await is_idle(stage, consumer)

            assert subscription.ended is not None
            assert subscription.ended.code is PublishDoneCode.MALFORMED_TRACK
            assert fetch.ended is not None
            assert fetch.ended.code == StreamErrorCode.MALFORMED_TRACK
            # Neither version is kept: nobody can say which is right.
            for relay in stage.relays:
                assert held_by(relay, NAME) is None
                assert relay.octets_held == 0
            # All sessions live, and other tracks go on.
            publish_group(sound, 0, 3)
            sound.end()
            assert sorted(await rest_of(other)) == whole(1, 3)
            for origin in (first, second):
                assert origin.connection.closed is None
        # With one of them gone there is nothing to doubt any more.
        half.extend(half.objects[0], bytes(50))
        again = await consumer.subscribe(NAME, fill=FROM_START)
        event = await anext(again)
        assert isinstance(event, ObjectReceived)
        assert event.payload == PAYLOAD
        assert consumer.closed is None


async def test_a_track_that_two_publish_alike_is_no_contradiction(
    certificates: CertificateFiles,
) -> None:
    one, two = LocalTrack(NAME), LocalTrack(NAME)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates) as stage,
        publishing(stage, one) as first,
        publishing(stage, two) as second,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        for origin in (first, second):
            await origin.until(lambda origin=origin: origin.subscribed)  # type: ignore[misc]
        for track in (one, two):
            _same(track)
            for _, subgroup in track.subgroups_since(0):
                subgroup.close()
            track.end()
        assert sorted(await rest_of(subscription)) == [Location(0, 0)]


# -- one publisher that breaks the rules ---------------------------------------------------------


def request_of(origin: Origin, subscribed: SubscribeReceived) -> Any:
    """What the publisher's session has of the relay's subscription."""
    session: Any = origin.connection.session
    return session._requests.by_id[subscribed.request_id]


def on_its_data_stream(octets: str, *, fin: bool = False) -> Callable[[Origin, Any], None]:
    """Octets that follow what the session sent of Group 0."""

    def do(origin: Origin, request: Any) -> None:
        [flow] = [flow for _, flow in request._live]
        origin.connection._transport.send_stream_data(flow.stream_id, bytes.fromhex(octets), fin)

    return do


def on_its_request_stream(octets: str) -> Callable[[Origin, Any], None]:
    def do(origin: Origin, request: Any) -> None:
        origin.connection._transport.send_stream_data(
            request.stream_id, bytes.fromhex(octets), False
        )

    return do


#: What the publisher of a Track does wrong once Object 0 of Group 0 has come.
OFFENCES = {
    "an Object Status that nobody knows": on_its_data_stream("00 00 01"),
    "an Object that ends before its length": on_its_data_stream("00 05 6161", fin=True),
    "a message of no known type": on_its_request_stream("7e 0000"),
    "a PUBLISH_DONE longer than its fields": on_its_request_stream("0b 0004 02 00 00 ff"),
    "an answer to what was answered": on_its_request_stream("04 0003 07 00 00"),
}


@asynccontextmanager
async def three_subscribers(
    stage: Stage,
) -> AsyncIterator[list[tuple[MoqtConnection, Subscription, Subscription]]]:
    """Three sessions, each with a subscription of the doubtful Track and of the sound one."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(3):
            connection = await stack.enter_async_context(
                connect(stage.nearest.uri, tls=stage.nearest.tls)
            )
            doubtful = await connection.subscribe(NAME, fill=FROM_START)
            found.append((connection, doubtful, await connection.subscribe(SOUND)))
        yield found


@pytest.mark.parametrize("hops", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("offence", OFFENCES)
async def test_what_a_publisher_does_wrong_costs_its_own_session_and_its_tracks(
    certificates: CertificateFiles, hops: int, offence: str
) -> None:
    track, sound = LocalTrack(NAME), LocalTrack(SOUND)
    subgroup = track.open_subgroup(0)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, sound),
        publishing(stage, track) as origin,
        three_subscribers(stage) as subscribers,
    ):
        subgroup.publish(0, payload_of(Location(0, 0)))
        for _, doubtful, _ in subscribers:
            assert isinstance(await anext(doubtful), ObjectReceived)
        [subscribed] = origin.subscribed
        OFFENCES[offence](origin, request_of(origin, subscribed))
        await origin.connection.wait_closed()

        assert origin.connection.closed is not None
        assert origin.connection.closed.code is SessionErrorCode.PROTOCOL_VIOLATION
        for _, doubtful, _ in subscribers:
            assert not await rest_of(doubtful, PublishDoneCode.INTERNAL_ERROR)
        publish_group(sound, 0, 3)
        sound.end()
        for connection, _, other in subscribers:
            assert sorted(await rest_of(other)) == whole(1, 3)
            assert connection.closed is None


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_track_that_breaks_its_own_rules_ends_alone(
    certificates: CertificateFiles, hops: int
) -> None:
    track, sound = LocalTrack(NAME), LocalTrack(SOUND)
    subgroup = track.open_subgroup(0)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track, sound) as origin,
        three_subscribers(stage) as subscribers,
    ):
        subgroup.publish(0, payload_of(Location(0, 0)))
        subgroup.publish(1, status=ObjectStatus.END_OF_GROUP)
        for _, doubtful, _ in subscribers:
            assert isinstance(await anext(doubtful), ObjectReceived)
        asked = next(request for request in origin.subscribed if request.track == NAME)
        past_the_end = on_its_data_stream("00 01 61")
        past_the_end(origin, request_of(origin, asked))
        for _, doubtful, _ in subscribers:
            assert not await rest_of(doubtful, PublishDoneCode.MALFORMED_TRACK)
        publish_group(sound, 0, 3)
        sound.end()
        for connection, _, other in subscribers:
            assert sorted(await rest_of(other)) == whole(1, 3)
            assert connection.closed is None
        assert origin.connection.closed is None


@pytest.mark.parametrize("hops", [1, 2])
async def test_what_a_subscriber_does_wrong_costs_its_own_session(
    certificates: CertificateFiles, hops: int
) -> None:
    track = make_track(1, 3, name=SOUND, ended=False)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track) as origin,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as good,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as bad,
    ):
        kept = await good.subscribe(SOUND, fill=FROM_START)
        lost = await bad.subscribe(SOUND, fill=FROM_START)
        request: Any = bad.session
        stream_id = request._requests.by_id[lost.request_id].stream_id
        bad._transport.send_stream_data(stream_id, bytes.fromhex("7e 0000"), False)
        await bad.wait_closed()
        assert bad.closed is not None
        assert bad.closed.code is SessionErrorCode.PROTOCOL_VIOLATION
        publish_group(track, 1, 3)
        track.end()
        assert sorted(await rest_of(kept)) == whole(2, 3)
        assert origin.connection.closed is None
        with pytest.raises(RequestRejected) as refused:
            await good.subscribe(NAME)
        assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST
