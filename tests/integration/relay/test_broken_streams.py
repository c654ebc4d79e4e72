"""Streams that break on their way to a relay: its own go no further than it knows."""

import asyncio
from typing import Any

import pytest

from moqt.aio import connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode, StreamErrorCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.localtrack import LocalTrack
from tests.integration.relay.origin import Watched, publishing
from tests.integration.relay.stage import relaying
from tests.session.pair import payload_of

pytestmark = pytest.mark.network

NAME = FullTrackName.of("broken", "track")
LENGTH = 6000


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["between Objects", "within an Object"])
async def test_an_object_that_is_not_known_to_be_the_next_comes_on_a_stream_of_its_own(
    certificates: CertificateFiles, hops: int, half: bool
) -> None:
    track, watched = LocalTrack(NAME), Watched()
    async with (
        asyncio.timeout(20),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track),
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        subscription = await consumer.subscribe(NAME, pieces=True, sink=watched.sink)
        subgroup = track.open_subgroup(7, 3, priority=9)
        for number in (0, 1):
            subgroup.publish(number, payload_of(Location(7, number), LENGTH))
        have = LENGTH // 2 if half else 0
        if half:
            obj = subgroup.begin(2, LENGTH)
            subgroup.extend(obj, payload_of(Location(7, 2), LENGTH)[:have])
        wanted = 2 * LENGTH + have
        await watched.until(
            lambda streams: streams and sum(map(len, streams[0].objects.values())) == wanted
        )
        subgroup.cut(StreamErrorCode.DELIVERY_TIMEOUT)
        following = subgroup.resume(5)
        following.publish(5, payload_of(Location(7, 5), LENGTH))
        following.close()
        track.end()
        await subscription.finished.wait()

    first, second = watched.in_order
    assert list(first.objects) == ([0, 1, 2] if half else [0, 1])
    assert first.end is StreamErrorCode.DELIVERY_TIMEOUT
    assert first.opened.first_object
    assert {n: bytes(data) for n, data in second.objects.items()} == {
        5: payload_of(Location(7, 5), LENGTH)
    }
    assert second.end == "fin"
    assert not second.opened.first_object
    for stream in (first, second):
        opened = stream.opened
        assert (opened.group_id, opened.subgroup_id, opened.publisher_priority) == (7, 3, 9)
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED


@pytest.mark.parametrize("hops", [1, 2])
async def test_an_object_of_any_declared_length_costs_its_stream_alone(
    certificates: CertificateFiles, hops: int
) -> None:
    track, watched = LocalTrack(NAME), Watched()
    async with (
        asyncio.timeout(20),
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track) as origin,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        subscription = await consumer.subscribe(NAME, pieces=True, sink=watched.sink)
        track.open_subgroup(0).publish(0, payload_of(Location(0, 0)))
        await watched.until(lambda streams: streams and streams[0].objects.get(0))
        session: Any = origin.connection.session
        [(_, flow)] = session._requests.by_id[origin.subscribed[0].request_id]._live
        # Object 1, of 2**56 - 1 octets of which ten come.
        origin.connection._transport.send_stream_data(
            flow.stream_id, bytes.fromhex("00 feffffffffffffff 00010203040506070809"), False
        )
        await watched.until(lambda streams: streams[0].closed is not None)
        following = track.open_subgroup(1)
        following.publish(0, payload_of(Location(1, 0)))
        following.close()
        await watched.until(lambda streams: len(streams) == 2 and streams[1].closed)
        for relay in stage.relays:
            assert relay.octets_held == 2 * len(payload_of(Location(0, 0)))
        assert origin.connection.closed is None
        assert subscription.ended is None

    first, second = watched.in_order
    assert list(first.objects) == [0]
    assert first.end == StreamErrorCode.EXCESSIVE_LOAD
    assert list(second.objects) == [0]
    assert second.end == "fin"
