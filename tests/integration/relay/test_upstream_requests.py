"""What a relay asks of publishers, and when: once, of all of them, no longer than it is needed."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from moqt.aio import MoqtConnection, QuicSettings, connect
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Publication
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.server import RelayOptions
from moqt.session.events import FillEnded, ObjectReceived
from moqt.session.localtrack import LocalTrack
from moqt.session.publisher import OwnPublication
from moqt.wire.filters import LocationFilter
from tests.integration.relay.origin import held_by, publishing, rest_of
from tests.integration.relay.stage import Stage, counting_sent_octets, relaying, vanish
from tests.session.pair import make_track, publish_group, whole

pytestmark = pytest.mark.network

NAME = FullTrackName.of("asked", "track")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
#: A publisher that says nothing for so long is lost.
BRISK = QuicSettings(idle_timeout_s=1.0)


# -- no longer than it is needed -----------------------------------------------------------------


async def come_and_leave(consumer: MoqtConnection, chance: random.Random) -> None:
    """Subscribe, and give it up at some moment. Nobody may be refused."""
    way = chance.randrange(4)
    if way == 0:
        hasty = asyncio.ensure_future(consumer.subscribe(NAME, fill=FROM_START))
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        hasty.cancel()  # perhaps ahead of the answer
        await asyncio.gather(hasty, return_exceptions=True)
        if not hasty.cancelled():
            hasty.result().cancel()
        return
    subscription = await consumer.subscribe(NAME, fill=FROM_START)
    if way > 1:
        event = await anext(subscription)
        assert isinstance(event, ObjectReceived)
        assert event.location == Location(0, 0)
    if way > 2:
        async for event in subscription:
            if isinstance(event, FillEnded):
                assert event.complete
                break
    subscription.cancel()


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hops", [1, 2])
async def test_whoever_comes_as_the_last_one_leaves_is_served(
    certificates: CertificateFiles, hops: int, times: int
) -> None:
    chance = random.Random(times + hops)
    track = make_track(2, 3, ended=False, name=NAME)
    async with (
        asyncio.timeout(50),
        relaying(certificates, hops=hops, options=RelayOptions(linger_s=0)) as stage,
        publishing(stage, track) as origin,
        AsyncExitStack() as stack,
    ):
        consumers = [
            await stack.enter_async_context(connect(stage.nearest.uri, tls=stage.nearest.tls))
            for _ in range(2)
        ]
        for _ in range(times):
            await come_and_leave(chance.choice(consumers), chance)
        # Every request of the relay is over, and there were no more of them than of ours.
        await origin.until(
            lambda: origin.subscribed and len(origin.ended) == len(origin.subscribed)
        )
        assert len(origin.subscribed) <= times
        assert origin.connection.session.open_requests == 1  # that it is announced
        for consumer in consumers:
            assert consumer.session.open_requests == 0
        last = await consumers[0].subscribe(NAME, fill=FROM_START)
        track.end()
        assert await rest_of(last) == Counter(whole(2, 3))
        assert len(origin.subscribed) <= times + 1


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_who_comes_within_the_time_to_linger_is_served_by_the_same_request(
    certificates: CertificateFiles, times: int
) -> None:
    chance = random.Random(times)
    track = make_track(2, 3, ended=False, name=NAME)
    async with (
        asyncio.timeout(50),
        relaying(certificates, options=RelayOptions(linger_s=60)) as stage,
        publishing(stage, track) as origin,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        with counting_sent_octets() as sent:
            for _ in range(times):
                await come_and_leave(consumer, chance)
        assert len(origin.subscribed) == 1
        assert origin.ended == []
        assert sent[origin.connection] < 2 * track.octets


# -- of all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("way", ["closes", "is lost"])
async def test_a_publisher_that_comes_later_is_asked_too_and_goes_on_alone(
    certificates: CertificateFiles, hops: int, way: str
) -> None:
    one, two = LocalTrack(NAME), LocalTrack(NAME)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops, quic=BRISK) as stage,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
        publishing(stage, one) as first,
    ):
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        publish_group(one, 0, 3)
        received = [await anext(subscription) for _ in range(3)]
        publish_group(two, 0, 3)  # it has the same
        async with publishing(stage, two) as second:
            await second.until(lambda: second.subscribed)
            for track in (one, two):
                publish_group(track, 1, 3)
            received += [await anext(subscription) for _ in range(3)]
            # Of one publisher the relay has seen all, and then it is gone.
            publish_group(one, 2, 3)
            received += [await anext(subscription) for _ in range(3)]
            if way == "closes":
                await first.connection.close(drain_s=1.0)
            else:
                vanish(first.connection)  # which the relay will notice a second later
            publish_group(two, 2, 3)
            publish_group(two, 3, 3)
            two.end()
            rest = await rest_of(subscription)
    objects = [event.location for event in received if isinstance(event, ObjectReceived)]
    assert sorted(objects) == whole(3, 3)
    assert rest == Counter(Location(3, number) for number in range(3))
    assert len(first.subscribed) == len(second.subscribed) == 1


# -- what is paused ------------------------------------------------------------------------------


@asynccontextmanager
async def offering(stage: Stage, track: LocalTrack) -> AsyncIterator[Publication]:
    """Have a publisher offer a Track, paused."""
    async with publishing(stage, track) as origin:
        yield await origin.connection.publish(track, forward=False)


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_paused_publication_is_resumed_for_who_subscribes(
    certificates: CertificateFiles, hops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = asyncio.Event()
    resume = OwnPublication._resume

    def noting(publication: OwnPublication, track: LocalTrack) -> None:
        resume(publication, track)
        resumed.set()

    monkeypatch.setattr(OwnPublication, "_resume", noting)
    track = LocalTrack(NAME)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(certificates, hops=hops) as stage,
        offering(stage, track) as publication,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        publish_group(track, 0, 3)
        assert not resumed.is_set()
        held = held_by(stage.relays[0], NAME)
        assert held is not None
        assert held.octets == 0
        subscription = await consumer.subscribe(NAME)
        await resumed.wait()
        # Nothing was sent while nobody wanted it, and everything is from now on.
        publish_group(track, 1, 3)
        track.end()
        assert await rest_of(subscription) == Counter(Location(1, n) for n in range(3))
        await publication.finished.wait()
