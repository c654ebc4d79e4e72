"""What a relay keeps of a Track: all of each Object, for as long as it may, and nothing else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from moqt.aio import MoqtConnection, connect
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Fetch, NamespaceSubscription, Subscription
from moqt.codepoints import ObjectStatus, PropertyType, RangeMarkerKind, RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import FillEnded, NamespaceAppeared, ObjectReceived, RangeMarked
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.pairs import Pairs
from tests.integration.relay.origin import held_by, publishing, rest_of
from tests.integration.relay.stage import Stage, relaying
from tests.session.pair import make_track, payload_of, publish_group, whole

pytestmark = pytest.mark.network

NAME = FullTrackName.of("kept", b"\x00/", "track")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0


@asynccontextmanager
async def consuming(stage: Stage) -> AsyncIterator[MoqtConnection]:
    async with (
        asyncio.timeout(PATIENCE_S),
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as connection,
    ):
        yield connection


# -- every field ---------------------------------------------------------------------------------


class Told(NamedTuple):
    """An Object as a subscriber is told of it."""

    location: Location
    subgroup_id: int | None
    priority: int
    status: ObjectStatus
    properties: Pairs
    payload: bytes


async def told(stream: Subscription | Fetch) -> set[Told]:
    found = [
        Told(
            event.location,
            event.subgroup_id,
            event.publisher_priority,
            event.status,
            tuple(event.properties),
            bytes(event.payload),
        )
        async for event in stream
        if isinstance(event, ObjectReceived)
    ]
    assert len(found) == len(set(found))
    return set(found)


def publish_of_every_kind(track: LocalTrack) -> set[Told]:
    """Publish Objects that differ in every field; return them as they should be told."""
    normal, published = ObjectStatus.NORMAL, set()
    for group, subgroup_id, priority in ((0, 0, 10), (0, 3, 200), (4, 0, 0), (4, 1, 255)):
        has_properties = priority < 200
        subgroup = track.open_subgroup(
            group, subgroup_id, priority=priority, has_properties=has_properties
        )
        for number in (subgroup_id, subgroup_id + 5):
            location = Location(group, number)
            payload = b"" if number == 5 else payload_of(location, 2000)
            properties: Pairs = ()
            if has_properties and number == subgroup_id:
                properties = ((0x3800, 2**63 + number), (0x3801, b"\x00octets"), (0x3801, b""))
            subgroup.publish(number, payload, properties=properties)
            published.add(Told(location, subgroup_id, priority, normal, properties, payload))
        subgroup.close()
    for group, number, status in (
        (0, 9, ObjectStatus.END_OF_GROUP),
        (9, 0, ObjectStatus.END_OF_TRACK),
    ):
        subgroup = track.open_subgroup(group, 9, priority=77)
        subgroup.publish(number, status=status)
        subgroup.close()
        published.add(Told(Location(group, number), 9, 77, status, (), b""))
    track.end()
    return published


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("was_there", [True, False], ids=["live", "as a fill"])
async def test_fill_and_fetch_tell_every_field_of_an_object_as_it_was_told_live(
    certificates: CertificateFiles, hops: int, was_there: bool
) -> None:
    track = LocalTrack(NAME, properties=((0x3800, 5), (0x3803, b"of the track")))
    async with relaying(certificates, hops=hops) as stage, consuming(stage) as consumer:
        async with publishing(stage, track):
            if was_there:
                live = await consumer.subscribe(NAME)
                published = publish_of_every_kind(track)
                assert await told(live) == published
                assert tuple(live.track_properties) == track.properties
            else:  # all that the relay has of it came as its past
                published = publish_of_every_kind(track)
                await told(await consumer.subscribe(NAME, fill=FROM_START))
        objects = {one for one in published if one.status is ObjectStatus.NORMAL}
        late = await consumer.subscribe(NAME, fill=FROM_START)
        assert tuple(late.track_properties) == track.properties
        assert await told(late) == objects
        fetch = await consumer.fetch(NAME, location_filter=FROM_START)
        assert tuple(fetch.track_properties) == track.properties
        # An end is told where a FETCH ends, and not as an Object (MOQT, "Object Status"); so who
        # came for the past was not told where the end is, but that nothing comes after the last.
        end = Location(4, 6) if was_there else Location(9, 0)
        assert (fetch.end_of_track, fetch.end_location) == (was_there, end)
        assert await told(fetch) == objects


# -- each Object once ----------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2])
async def test_who_wants_the_future_is_not_sent_what_is_kept_of_the_past(
    certificates: CertificateFiles, hops: int
) -> None:
    track = make_track(4, 3, octets=20_000, ended=False, name=NAME)
    async with (
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track) as origin,
        consuming(stage) as consumer,
    ):
        # The first one comes while the relay itself is still being sent the past.
        first = await consumer.subscribe(NAME)
        filled = await consumer.subscribe(NAME, fill=FROM_START)
        async for event in filled:
            if isinstance(event, ObjectReceived) and event.location == Location(3, 2):
                break
        # To the second one all of it could be sent from what is kept.
        second = await consumer.subscribe(NAME)
        assert second.largest == Location(3, 2)
        publish_group(track, 4, 3, octets=20_000)
        for number in range(3):
            event = await anext(second)
            assert isinstance(event, ObjectReceived)
            assert event.location == Location(4, number)
        # And the third one comes after some that the relay was sent live.
        third = await consumer.subscribe(NAME)
        publish_group(track, 5, 3, octets=20_000)
        track.end()
        newest = Counter(Location(5, number) for number in range(3))
        assert await rest_of(third) == await rest_of(second) == newest
        new = newest + Counter(Location(4, number) for number in range(3))
        assert await rest_of(first) == await rest_of(filled) == new
        again = await consumer.subscribe(NAME, fill=FROM_START)
        assert await rest_of(again) == Counter(whole(6, 3))
    assert len(origin.subscribed) == 1


# -- after the end -------------------------------------------------------------------------------


async def check_after_the_end(consumer: MoqtConnection) -> None:
    """A Track that has ended is answered with its Largest Object, and then with its end."""
    future = await consumer.subscribe(NAME)
    assert future.largest == Location(2, 2)
    assert await rest_of(future) == Counter()
    past = await consumer.subscribe(NAME, fill=FROM_START)
    assert past.largest == Location(2, 2)
    assert await rest_of(past) == Counter(whole(3, 3))
    fetch = await consumer.fetch(NAME, location_filter=FROM_START)
    events = [event async for event in fetch]
    assert not [event for event in events if isinstance(event, RangeMarked)]
    assert [e.location for e in events if isinstance(e, ObjectReceived)] == whole(3, 3)
    status = await consumer.track_status(NAME)
    assert status.largest == Location(2, 2)


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("was_there", [True, False], ids=["was there", "comes late"])
async def test_a_track_that_has_ended_is_still_answered(
    certificates: CertificateFiles, hops: int, was_there: bool
) -> None:
    track = make_track(3, 3, ended=False, name=NAME)
    async with (
        relaying(certificates, hops=hops) as stage,
        publishing(stage, track) as origin,
        consuming(stage) as consumer,
    ):
        if was_there:
            live = await consumer.subscribe(NAME, fill=FROM_START)
            track.end()
            assert await rest_of(live) == Counter(whole(3, 3))
        else:
            track.end()  # and the relay has never heard of it: its publisher keeps answering
        await check_after_the_end(consumer)
        await check_after_the_end(consumer)
        # It is served from what is kept: nobody is asked again.
        assert len(origin.subscribed) == 1
        async with connect(stage.farthest.uri, tls=stage.farthest.tls, drain_s=0.1) as other:
            await check_after_the_end(other)
        assert len(origin.subscribed) == 1


# -- for how long --------------------------------------------------------------------------------

BRIEFLY_MS = 300


def brief_track() -> LocalTrack:
    return make_track(2, 3, name=NAME, properties=((PropertyType.MAX_CACHE_DURATION, BRIEFLY_MS),))


async def gone(found: NamespaceSubscription) -> None:
    """Return when a namespace is no longer told of."""
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(await anext(found), NamespaceAppeared):
            pass


@pytest.mark.parametrize("hops", [1, 2])
async def test_what_may_be_kept_no_longer_is_not_served(
    certificates: CertificateFiles, hops: int
) -> None:
    async with relaying(certificates, hops=hops) as stage, consuming(stage) as consumer:
        found = await consumer.subscribe_namespace(TrackNamespace())
        async with publishing(stage, brief_track()):
            live = await consumer.subscribe(NAME, fill=FROM_START)
            assert await rest_of(live) == Counter(whole(2, 3))
        await gone(found)  # kept for as long as it may be, although nobody publishes it
        for request in (
            consumer.subscribe(NAME, fill=FROM_START),
            consumer.fetch(NAME, location_filter=FROM_START),
            consumer.track_status(NAME),
        ):
            with pytest.raises(RequestRejected) as refused:
                await request
            assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST
        assert held_by(stage.relays[-1], NAME) is None
        assert stage.relays[-1].octets_held == 0


async def test_what_may_be_kept_no_longer_is_asked_for_again(
    certificates: CertificateFiles,
) -> None:
    track = brief_track()
    async with (
        relaying(certificates) as stage,
        consuming(stage) as consumer,
        publishing(stage, track) as origin,
    ):
        live = await consumer.subscribe(NAME, fill=FROM_START)
        assert await rest_of(live) == Counter(whole(2, 3))
        # Its publisher has announced it too, so what the relay tells of it tells nothing.
        await dropped(stage, consumer)
        again = await consumer.subscribe(NAME, fill=FROM_START)
        assert await rest_of(again) == Counter(whole(2, 3))
        assert len(origin.subscribed) == 2


async def dropped(stage: Stage, consumer: MoqtConnection) -> None:
    """Return when the nearest relay holds nothing of the Track any more."""
    async with asyncio.timeout(PATIENCE_S):
        while held_by(stage.relays[-1], NAME) is not None:
            with pytest.raises(RequestRejected):  # a round trip at a time
                await consumer.track_status(FullTrackName.of("no", "such"))


async def test_an_object_of_a_live_track_is_served_no_longer_than_it_may_be_kept(
    certificates: CertificateFiles,
) -> None:
    track = make_track(
        1, 3, ended=False, name=NAME,
        properties=((PropertyType.MAX_CACHE_DURATION, BRIEFLY_MS),),
    )  # fmt: skip
    too_old = asyncio.Event()
    async with (
        relaying(certificates) as stage,
        consuming(stage) as consumer,
        publishing(stage, track),
    ):
        live = await consumer.subscribe(NAME, fill=FROM_START)
        while not isinstance(await anext(live), FillEnded):
            pass
        asyncio.get_running_loop().call_later(BRIEFLY_MS / 1000 + 0.5, too_old.set)
        await too_old.wait()
        publish_group(track, 1, 3)
        assert isinstance(await anext(live), ObjectReceived)
        new = await consumer.fetch(NAME, location_filter=LocationFilter.range(1, 0, 1, 0))
        assert [event.location async for event in new] == [Location(1, 0)]
        # Group 0 is too old to be served from the cache, and its state is unknown.
        old = await consumer.fetch(NAME, location_filter=LocationFilter.range(0, 0, 0, 2))
        [marked] = [event async for event in old]
        assert isinstance(marked, RangeMarked)
        assert marked.kind is RangeMarkerKind.UNKNOWN


async def test_what_is_known_not_to_exist_is_not_served_when_another_brings_it(
    certificates: CertificateFiles,
) -> None:
    one, two = LocalTrack(NAME), LocalTrack(NAME)
    span = LocationFilter.range(0, 0, 0, 2)
    async with (
        relaying(certificates) as stage,
        consuming(stage) as consumer,
        publishing(stage, one),
    ):
        live = await consumer.subscribe(NAME)
        subgroup = one.open_subgroup(0, holds_end_of_group=True)
        for number in (0, 2):
            subgroup.publish(number, payload_of(Location(0, number)))
            await anext(live)
        subgroup.close()
        before = await consumer.fetch(NAME, location_filter=span)
        assert [e.location async for e in before] == [Location(0, 0), Location(0, 2)]  # 1 is not
        publish_group(two, 0, 3)
        async with publishing(stage, two) as second:
            await second.until(lambda: second.subscribed)
            two.end()
            await second.until(lambda: second.ended)  # all of it has been sent to the relay
            after = await consumer.fetch(NAME, location_filter=span)
            assert [e.location async for e in after] == [Location(0, 0), Location(0, 2)]
