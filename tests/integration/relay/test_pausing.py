"""Publishers are paused when all subscribers are, and nobody misses anything for it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moqt.aio import MoqtConnection, Subscription, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode
from moqt.location import Location
from moqt.relay.options import RelayOptions
from moqt.relay.pausing import Pausing
from moqt.relay.track import RelayedTrack
from moqt.session.config import Role
from moqt.session.events import ObjectReceived, RequestId
from moqt.session.localtrack import LocalTrack
from moqt.session.publisher import PeerSubscription, Publisher
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.messages.request import RequestUpdate
from moqt.wire.parameters import Parameters
from tests.integration.relay.stage import Serving, Stage, relaying, vanish
from tests.session.pair import NAME, payload_of, publish_group

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
QUICK = RelayOptions(pause_after_s=0.05, publisher_grace_s=0.1, request_timeout_s=0.5)


class Told:
    """What the publisher of a Track was told of FORWARD, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[int | None] = []
        self.ignores_resumption = False
        self._looks = 0
        self._news = asyncio.Event()
        received = Publisher.update_received

        def note(publisher: Publisher, update_id: RequestId, message: RequestUpdate) -> None:
            forward = message.parameters.get(P.FORWARD)
            # Relays are servers here, but for those that ask another one.
            if isinstance(publisher, PeerSubscription) and publisher._context.role is Role.CLIENT:
                if forward == 1 and self.ignores_resumption:
                    return
                self.values.append(forward)
                self._news.set()
            received(publisher, update_id, message)

        monkeypatch.setattr(Publisher, "update_received", note)
        look = Pausing.look

        def count(pausing: Pausing, track: RelayedTrack, now: float) -> None:
            look(pausing, track, now)
            self._looks += 1
            self._news.set()

        monkeypatch.setattr(Pausing, "look", count)

    async def looked_again(self, times: int = 4) -> None:
        """Wait until it was looked so often whether the Track is wanted, and answered."""
        upto = self._looks + times
        async with asyncio.timeout(PATIENCE_S):
            while self._looks < upto:
                self._news.clear()
                await self._news.wait()

    async def until(self, *values: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.values != list(values):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@asynccontextmanager
async def published(
    files: CertificateFiles, *, hops: int = 1, options: RelayOptions = QUICK
) -> AsyncIterator[tuple[Stage, LocalTrack, MoqtConnection, MoqtConnection]]:
    """A Track behind relays, its publisher's session and a subscriber's."""
    track = LocalTrack(NAME)
    publish_group(track, 0, 3)
    async with (
        asyncio.timeout(PATIENCE_S),
        relaying(files, hops=hops, options=options) as stage,
        connect(
            stage.farthest.uri, tls=stage.farthest.tls, handler=Serving(track), drain_s=0.1
        ) as publisher,
        connect(stage.nearest.uri, tls=stage.nearest.tls, drain_s=0.1) as consumer,
    ):
        await publisher.publish_namespace(NAME.namespace)
        yield stage, track, publisher, consumer


async def following(consumer: MoqtConnection, groups: int = 1) -> Subscription:
    """Return a subscription to which everything has come that there is."""
    subscription = await consumer.subscribe(NAME, fill=FROM_START)
    assert await next_objects(subscription, groups) == Counter(group_of(*range(groups)))
    return subscription


async def next_objects(subscription: Subscription, groups: int) -> Counter[Location]:
    """Return the Objects of so many Groups that come next."""
    found: Counter[Location] = Counter()
    while found.total() < 3 * groups:
        event = await anext(subscription)
        if isinstance(event, ObjectReceived) and event.payload:
            assert event.payload == payload_of(event.location)
            found[event.location] += 1
    return found


async def rest_of(subscription: Subscription) -> Counter[Location]:
    events = [event async for event in subscription]
    return Counter(e.location for e in events if isinstance(e, ObjectReceived) and e.payload)


def group_of(*groups: int) -> list[Location]:
    return [Location(group, number) for group in groups for number in range(3)]


async def pause(subscription: Subscription) -> None:
    await subscription.update(Parameters({P.FORWARD: 0}))


async def go_on(subscription: Subscription, after: Location | None = None) -> Location | None:
    """Have a subscription go on; with ``after``, ask for what came since then."""
    values: dict[P, Any] = {P.FORWARD: 1}
    if after is not None:
        start = LocationFilter.absolute_start(after.group + 1, 0)
        values[P.FILL_PARAMETERS] = FillParameters(Parameters({P.LOCATION_FILTER: start}))
    return (await subscription.update(Parameters(values))).largest


@pytest.mark.parametrize("hops", [1, 2])
async def test_the_publisher_is_paused_with_the_last_subscriber_and_goes_on_with_the_first(
    certificates: CertificateFiles, told: Told, hops: int
) -> None:
    async with published(certificates, hops=hops) as (stage, track, _, consumer):
        one, other = await following(consumer), await following(consumer)
        await pause(one)
        await told.looked_again()
        publish_group(track, 1, 3)
        assert await next_objects(other, 1) == Counter(group_of(1))
        assert told.values == []
        await pause(other)
        await told.until(0)
        held = stage.relays[-1].octets_held
        publish_group(track, 2, 3)
        assert await go_on(one, after=Location(1, 0)) == Location(2, 2)
        assert told.values == [0, 1]
        assert await next_objects(one, 1) == Counter(group_of(2))  # of the time of the pause
        assert stage.relays[-1].octets_held > held
        publish_group(track, 3, 3)
        track.end()

        assert await rest_of(one) == Counter(group_of(3))
        assert await rest_of(other) == Counter()
        for subscription in (one, other):
            assert subscription.ended is not None
            assert subscription.ended.code is PublishDoneCode.TRACK_ENDED


async def test_whoever_comes_during_the_pause_gets_all_of_it_and_is_told_of_no_hole(
    certificates: CertificateFiles, told: Told
) -> None:
    async with published(certificates) as (_, track, _, consumer):
        paused = await following(consumer)
        await pause(paused)
        await told.until(0)
        publish_group(track, 1, 3)
        await consumer.subscribe(NAME, forward=False)  # which changes nothing
        assert told.values == [0]
        fetch = await consumer.fetch(NAME, location_filter=FROM_START)
        fetched = [event.location async for event in fetch if isinstance(event, ObjectReceived)]
        assert fetched == group_of(0, 1)
        await told.until(0, 1, 0)  # the FETCH is over
        publish_group(track, 2, 3)
        late = await following(consumer, 3)
        assert told.values == [0, 1, 0, 1]
        track.end()

        assert await rest_of(late) == Counter()
        assert await rest_of(paused) == Counter()


async def test_a_stream_that_is_open_goes_on_after_the_pause(
    certificates: CertificateFiles, told: Told
) -> None:
    async with published(certificates) as (_, track, _, consumer):
        subscription = await following(consumer)
        subgroup = track.open_subgroup(1, holds_end_of_group=True)
        for number in range(3):
            subgroup.publish(number, payload_of(Location(1, number)))
        assert await next_objects(subscription, 1) == Counter(group_of(1))
        await pause(subscription)
        await told.until(0)
        await go_on(subscription)
        await told.until(0, 1)
        subgroup.publish(3, payload_of(Location(1, 3)))
        subgroup.close()
        track.end()

        assert await rest_of(subscription) == Counter([Location(1, 3)])


async def test_who_changes_their_mind_all_the_time_costs_no_updates(
    certificates: CertificateFiles, told: Told
) -> None:
    patient = RelayOptions(pause_after_s=60.0)
    async with published(certificates, options=patient) as (_, track, _, consumer):
        subscription = await following(consumer)
        for _ in range(50):
            await pause(subscription)
            await go_on(subscription)
        await pause(subscription)
        await told.looked_again()
        assert told.values == []
        await go_on(subscription)
        publish_group(track, 1, 3)
        track.end()

        assert await rest_of(subscription) == Counter(group_of(1))


@pytest.mark.parametrize("way", ["closes", "is lost while asked to go on"])
async def test_who_is_paused_learns_that_the_publisher_was_lost(
    certificates: CertificateFiles, told: Told, way: str
) -> None:
    async with published(certificates) as (_, _, publisher, consumer):
        subscription = await following(consumer)
        await pause(subscription)
        await told.until(0)
        if way == "closes":
            await publisher.close(drain_s=0.1)
        else:
            vanish(publisher)
            assert await go_on(subscription) == Location(0, 2)  # as far as is known

        assert await rest_of(subscription) == Counter()
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.INTERNAL_ERROR


async def test_a_publisher_that_does_not_go_on_is_lost(
    certificates: CertificateFiles, told: Told
) -> None:
    async with published(certificates) as (_, _, _, consumer):
        subscription = await following(consumer)
        await pause(subscription)
        await told.until(0)
        told.ignores_resumption = True
        await go_on(subscription)

        assert await rest_of(subscription) == Counter()
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.INTERNAL_ERROR
