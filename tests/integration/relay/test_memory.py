"""Memory of a relay that has been in use for long: flat, whatever came and went."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moqt.aio import MoqtConnection, RequestHandler, connect
from moqt.aio.tls import CertificateFiles
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.server import RelayOptions
from moqt.session.events import NamespaceAppeared, NamespaceGone, ObjectReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.relay.origin import Origin, rest_of
from tests.integration.relay.stage import Stage, relaying
from tests.memory import MIB, objects_alive, resident_octets
from tests.session.pair import make_track, payload_of, publish_group, whole

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)


@asynccontextmanager
async def sessions(
    files: CertificateFiles, options: RelayOptions, origin: RequestHandler
) -> AsyncIterator[tuple[Stage, MoqtConnection, MoqtConnection]]:
    """A relay, a publisher's session with it and a subscriber's."""
    async with (
        relaying(files, options=options) as stage,
        connect(stage.farthest.uri, tls=stage.farthest.tls, handler=origin, drain_s=0.1) as near,
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as consumer,
    ):
        yield stage, near, consumer


@pytest.mark.parametrize(
    ("publications", "groups", "most_mib"),
    [
        pytest.param(60, 10, 0, id="briefly"),
        pytest.param(
            1000, 100, 16, id="100,000 groups",
            marks=[pytest.mark.slow, pytest.mark.timeout(120)],
        ),
    ],
)  # fmt: skip
async def test_publications_that_were_let_go_leave_nothing_behind(
    certificates: CertificateFiles, publications: int, groups: int, most_mib: int
) -> None:
    octets = 100
    # Some ten publications are kept; all others have to make room.
    options = RelayOptions(cache_octets=10 * groups * octets, linger_s=0)
    origin = Origin()
    settled, before = 0, 0
    async with (
        asyncio.timeout(100),
        sessions(certificates, options, origin) as (stage, publisher, consumer),
    ):
        [relay] = stage.relays
        for number in range(publications):
            if number == publications // 3:
                settled, before = objects_alive(), resident_octets()
            track = make_track(
                groups - 1, 1, octets=octets, ended=False,
                name=FullTrackName.of("soak", str(number), "track"),
            )  # fmt: skip
            origin.tracks[track.name] = track
            announced = await publisher.publish_namespace(track.name.namespace)
            subscription = await consumer.subscribe(track.name, fill=FROM_START)
            publish_group(track, groups - 1, 1, octets=octets)
            track.end()
            assert await rest_of(subscription) == Counter(whole(groups, 1))
            announced.withdraw()
            del origin.tracks[track.name], track, subscription, announced
            origin.subscribed.clear()
            origin.ended.clear()
        assert relay.octets_held <= options.cache_octets + groups * octets
        assert relay.tracks_held <= 12
        # In two thirds of the time far less than one object for each Group that came and went.
        assert objects_alive() - settled < 200 + publications * groups // 20
        if most_mib:
            assert resident_octets() - before < most_mib * MIB


@pytest.mark.parametrize("times", [100, pytest.param(3000, marks=pytest.mark.slow)])
async def test_announcements_and_wishes_that_are_over_leave_nothing_behind(
    certificates: CertificateFiles, times: int
) -> None:
    async with (
        asyncio.timeout(55),
        sessions(certificates, RelayOptions(linger_s=0), Origin()) as (stage, publisher, consumer),
    ):
        settled = 0
        for number in range(times):
            if number == times // 3:
                settled = objects_alive()
            namespace = TrackNamespace.of("soak", str(number))
            found = await consumer.subscribe_namespace(namespace)
            announced = await publisher.publish_namespace(namespace)
            assert isinstance(await anext(found), NamespaceAppeared)
            announced.withdraw()
            assert isinstance(await anext(found), NamespaceGone)
            found.cancel()
            wish = await consumer.subscribe_tracks(namespace)
            wish.cancel()
        await consumer.subscribe_namespace(TrackNamespace())  # a round trip later all is over
        # A request that was left behind would be several objects.
        assert objects_alive() - settled < 200 + times // 20
        assert publisher.session.open_requests == 0
        for connection in stage.relays[0]._servers[0].connections:
            assert connection.session.open_requests <= 1


@pytest.mark.parametrize(
    "groups", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
async def test_a_group_that_is_kept_costs_little_besides_its_payload(
    certificates: CertificateFiles, groups: int
) -> None:
    track = LocalTrack(FullTrackName.of("soak", "track"), retain=False)
    origin = Origin(track)
    most_octets = 4096
    async with (
        asyncio.timeout(100),
        sessions(certificates, RelayOptions(), origin) as (stage, publisher, consumer),
    ):
        await publisher.publish_namespace(track.name.namespace)
        subscription = await consumer.subscribe(track.name)
        before, settled = objects_alive(), resident_octets()
        for group in range(groups):
            subgroup = track.open_subgroup(group, holds_end_of_group=True)
            subgroup.publish(0, payload_of(Location(group, 0), 10))
            subgroup.close()
            event: Any = await anext(subscription)
            assert isinstance(event, ObjectReceived)
            assert event.location == Location(group, 0)
        [relay] = stage.relays
        assert relay.octets_held == 10 * groups
        # The Subgroup, its list, the Object and its list, and their places; and in the sessions
        # what tells a malformed Track, for the first thousands of Groups.
        assert (objects_alive() - before) / groups < 25
        if groups > 1000:
            assert (resident_octets() - settled) / groups < most_octets
