"""Subscribers and publishers beside others: one that stands still, one that leaves, one of two."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvcs.consumer.events import PublicationComplete
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import DataTrack
from moqt.aio import MoqtConnection, NamespacePublication, QuicSettings, connect, open_connection
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import NamespaceSubscription, Subscription
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import FillEnded, NamespaceAppeared, ObjectReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs import scene as scenes
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    CountingSink,
    Scene,
    assert_same_cache,
    fill,
    run,
)
from tests.integration.relay.stage import (
    Serving,
    Stage,
    counting_sent_octets,
    producing_behind,
    relaying,
    vanish,
)
from tests.session.pair import locations, payload_of, publish_group, whole

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
#: A publisher that says nothing for so long is lost.
BRISK = QuicSettings(idle_timeout_s=1.0)
#: The windows of who stands still: a fraction of a track, and of one Object more than that.
NARROW = QuicSettings(stream_window=1 << 16, connection_window=1 << 16)


async def retrieved(scene: Scene) -> None:
    """Retrieve everything, once."""
    sink = CountingSink()
    events = await run(scene.retrieve(sink))
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sink.placed == EVERYTHING
    assert_same_cache(sink)


async def rest_of(subscription: Subscription) -> Counter[Location]:
    """Return how often each Object comes that is left of a Track, which must end as it should."""
    found: Counter[Location] = Counter()
    async with asyncio.timeout(PATIENCE_S):
        async for event in subscription:
            if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
                found[event.location] += 1
            assert not isinstance(event, FillEnded) or event.complete
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
    return found


# -- subscribers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2])
async def test_who_stands_still_delays_nobody_and_goes_on_where_it_stood(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch, hops: int
) -> None:
    wide = replace(scenes.COMPAT, k_shape=(16, 256), v_shape=(16, 128))
    monkeypatch.setattr(scenes, "COMPAT", wide)
    with counting_sent_octets() as sent:
        async with (
            relaying(certificates, hops=hops) as stage,
            producing_behind(stage, certificates) as scene,
            connect(stage.nearest.uri, tls=stage.nearest.tls, quic=NARROW) as still,
            asyncio.timeout(PATIENCE_S),
        ):
            [link] = scene.producer._relays
            handle = scene.open()
            segment = await handle.add_segment()
            await link.wait_announced(5)
            gone = await open_connection(stage.nearest.uri, tls=stage.nearest.tls)
            track = handle.name.track(DataTrack(Component.K, "raw", 0))
            frozen = await still.subscribe(track, fill=FROM_START)
            await gone.subscribe(track, fill=FROM_START)
            vanish(gone)  # it acknowledges nothing any more
            before = asyncio.create_task(retrieved(scene))
            await fill(handle, segment=segment)
            await handle.finish()
            await before
            await retrieved(scene)
            assert not frozen.finished.is_set()

            everything = {
                Location(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)
            }
            assert await rest_of(frozen) == Counter(everything)
            assert link.connection is not None
            octets = sum(track.octets for track in handle.publication.tracks.values())
            assert 1.0 <= sent[link.connection] / octets <= 1.02


# -- publishers of one namespace -----------------------------------------------------------------

NAME = FullTrackName.of("twice", "track")
BARRIER = TrackNamespace.of("barrier")
LENGTH = 9000


def slow_but_for(ordinary: list[tuple[Any, ...]], *axes: tuple[Any, ...]) -> list[Any]:
    """Return every combination as parameters of a test; most of them only on request."""
    return [
        pytest.param(*case, marks=() if case in ordinary else pytest.mark.slow)
        for case in product(*axes)
    ]


class Publisher:
    """One session that announces the namespace and serves the Track."""

    def __init__(self) -> None:
        self.track = LocalTrack(NAME)
        self.handler = Serving(self.track)
        self.connection: MoqtConnection
        self.seen: MoqtConnection
        """The session as the relay has it."""

        self._announcement: NamespacePublication

    async def announce(self, stage: Stage) -> None:
        routes = stage.relays[0]._routes
        before = {holder for holder, _ in routes._prefixes}
        self.connection = await open_connection(
            stage.farthest.uri, tls=stage.farthest.tls, handler=self.handler
        )
        self._announcement = await self.connection.publish_namespace(NAME.namespace)
        [self.seen] = {holder for holder, _ in routes._prefixes} - before

    async def leave(self, way: str) -> None:
        """Return when the relay has seen it."""
        if way == "withdraws":
            self._announcement.withdraw()
            with pytest.raises(RequestRejected):  # a round trip later the relay has seen it
                await self.connection.track_status(FullTrackName.of("no", "such"))
        elif way == "closes":
            await self.connection.close(drain_s=1.0)
            await self.seen.wait_closed()
        else:
            vanish(self.connection)
            await self.seen.wait_closed()


@asynccontextmanager
async def two_publishers(
    files: CertificateFiles, hops: int
) -> AsyncIterator[tuple[Stage, list[Publisher], MoqtConnection]]:
    """Two publishers of one namespace, and a session with the nearest relay."""
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(files, hops=hops, quic=BRISK) as stage,
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as consumer,
    ):
        publishers = [Publisher(), Publisher()]
        for publisher in publishers:
            await publisher.announce(stage)
        try:
            yield stage, publishers, consumer
        finally:
            for publisher in publishers:
                await publisher.connection.close(drain_s=0.1)


async def told(found: NamespaceSubscription) -> tuple[bool, TrackNamespace]:
    """Return whether a namespace appeared or went, and which."""
    event = await anext(found)
    return isinstance(event, NamespaceAppeared), event.namespace


@pytest.mark.parametrize(
    ("hops", "way", "first"),
    slow_but_for(
        [(1, "withdraws", 0), (1, "closes", 1), (1, "is lost", 0), (2, "withdraws", 1)],
        (1, 2), ("withdraws", "closes", "is lost"), (0, 1),
    ),
)  # fmt: skip
async def test_a_namespace_of_two_publishers_is_gone_with_the_last_of_them(
    certificates: CertificateFiles, hops: int, way: str, first: int
) -> None:
    async with (
        two_publishers(certificates, hops) as (stage, publishers, consumer),
        connect(stage.farthest.uri, tls=stage.farthest.tls, drain_s=0.1) as other,
    ):
        found = await consumer.subscribe_namespace(TrackNamespace())
        assert await told(found) == (True, NAME.namespace)
        await publishers[first].leave(way)
        await other.publish_namespace(BARRIER)
        assert await told(found) == (True, BARRIER)  # what was told before would come before it
        await publishers[1 - first].leave(way)
        assert await told(found) == (False, NAME.namespace)


@pytest.mark.parametrize(
    ("hops", "way", "other_has"),
    slow_but_for(
        [(1, "closes", 0), (1, "is lost", LENGTH // 3), (1, "closes", LENGTH)],
        (1, 2), ("closes", "is lost"), (0, LENGTH // 3, LENGTH),
    ),
)  # fmt: skip
async def test_a_track_of_two_publishers_goes_on_with_the_one_that_stays(
    certificates: CertificateFiles, hops: int, way: str, other_has: int
) -> None:
    data = payload_of(Location(1, 0), LENGTH)
    async with two_publishers(certificates, hops) as (_, (leaving, staying), consumer):
        subscription = await consumer.subscribe(NAME, fill=FROM_START)
        for publisher in (leaving, staying):
            await publisher.handler.asked.wait()
            publish_group(publisher.track, 0, 4)
        received = [await anext(subscription) for _ in range(4)]
        halves = []
        # The one that leaves has two thirds of an Object; the other one less, or more.
        for publisher, have in ((leaving, 2 * LENGTH // 3), (staying, other_has)):
            subgroup = publisher.track.open_subgroup(1, holds_end_of_group=True)
            obj = subgroup.begin(0, LENGTH)
            subgroup.extend(obj, data[:have])
            halves.append((subgroup, obj))
        await leaving.leave(way)
        subgroup, obj = halves[1]
        subgroup.extend(obj, data[other_has:])
        subgroup.publish(1, payload_of(Location(1, 1)))
        subgroup.close()
        staying.track.end()
        received += [event async for event in subscription]

    objects = [event for event in received if isinstance(event, ObjectReceived)]
    assert sorted(locations(objects)) == [*whole(1, 4), Location(1, 0), Location(1, 1)]
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
