"""Publishers that vanish: what came whole is kept, and of the rest nobody says that it is not."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from kvcs.consumer.events import Failed
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import DataTrack
from moqt.aio import MoqtConnection, QuicSettings, connect, open_connection
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Fetch, Subscription
from moqt.codepoints import ObjectStatus, PublishDoneCode, RangeMarkerKind, StreamErrorCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.events import (
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    RangeMarked,
    SubgroupClosed,
)
from moqt.session.localobjects import LocalObject, LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    CountingSink,
    Place,
    Scene,
    assert_same_cache,
    fill,
    hasty,
    in_halves,
    missing,
    missing_places,
    on_stage,
    ready,
)
from tests.integration.relay.origin import held_by
from tests.integration.relay.stage import Serving, Stage, relaying, vanish
from tests.session.pair import payload_of, publish_group

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
#: A publisher that says nothing for so long is lost.
BRISK = QuicSettings(idle_timeout_s=1.0)
PATIENCE_S = 20.0
SLACK_S = 2.0


async def fetched(fetch: Fetch) -> tuple[Counter[Location], list[tuple[Location, Location]]]:
    """Return how often each whole Object came, and the ranges that are told to be unknown.

    Checks that the ranges are in order, that no Object is in one, and how the FETCH ended.
    """
    found: Counter[Location] = Counter()
    unknown: list[tuple[Location, Location]] = []
    at = Location(0, 0)
    async with asyncio.timeout(PATIENCE_S):
        async for event in fetch:
            match event:
                case ObjectReceived(location=location):
                    assert location >= at
                    found[location] += 1
                    at = location.next()
                case RangeMarked():
                    assert event.kind is RangeMarkerKind.UNKNOWN
                    unknown.append((event.start or Location(0, 0), event.end))
                    at = event.end.next()
    assert fetch.ended is not None
    assert fetch.ended.complete
    return found, unknown


def is_in(location: Location, ranges: list[tuple[Location, Location]]) -> bool:
    return any(first <= location <= last for first, last in ranges)


# -- half a publication --------------------------------------------------------------------------


@asynccontextmanager
async def half_a_publication(
    stage: Stage, files: CertificateFiles, *, layers: int, steps: int
) -> AsyncIterator[tuple[Scene, Any, MoqtConnection]]:
    """A producer that has sent some layers, and so many thirds of Objects of the next one."""
    async with on_stage(files) as scene:
        handle = scene.open()
        origin = await open_connection(
            stage.farthest.uri, tls=stage.farthest.tls, handler=scene.producer._handler
        )
        await origin.publish_namespace(handle.name.namespace)
        segment = await handle.add_segment()
        await fill(handle, range(layers))
        for _ in islice(in_halves(handle.publication, segment, layers), steps):
            pass
        scene.spec = stage.nearest
        try:
            yield scene, handle, origin
        finally:
            await origin.close(drain_s=0)


def placed_before(layers: int, objects: int) -> Counter[Place]:
    return Counter(
        place
        for place in EVERYTHING
        if place[1] < layers or (place[1] == layers and place[2] < objects)
    )


@pytest.mark.slow
@pytest.mark.parametrize("hops", [1, 2])
async def test_half_a_publication_without_its_producer_is_served_and_the_rest_told_as_unknown(
    certificates: CertificateFiles, hops: int
) -> None:
    layers, objects = 2, 3
    sink, loop = CountingSink(), asyncio.get_running_loop()
    # The Object of K after those is half sent, and the one of V not begun.
    steps = 3 * 2 * objects + 2
    deadline_s = 8.0
    async with (
        relaying(certificates, hops=hops, quic=BRISK) as stage,
        half_a_publication(stage, certificates, layers=layers, steps=steps) as (
            scene,
            handle,
            origin,
        ),
        asyncio.timeout(PATIENCE_S),
    ):
        began = loop.time()
        retrieval = scene.retrieve(sink, settings=hasty(deadline_s=deadline_s, stall_timeout_s=3))
        async with retrieval:
            await sink.reached(placed_before(layers, objects).total())
            vanish(origin)
            events = [event async for event in retrieval]
        assert loop.time() - began < deadline_s + SLACK_S

        async with connect(stage.nearest.uri, tls=stage.nearest.tls) as late:
            for component in (Component.K, Component.V):
                track = handle.name.track(DataTrack(component, "raw", 0))
                fetch = await late.fetch(track, location_filter=FROM_START)
                found, unknown = await fetched(fetch)
                kept = {
                    Location(layer, block)
                    for of, layer, block in placed_before(layers, objects)
                    if of is component
                }
                assert dict.fromkeys(kept, 1) == dict(found)
                half = component is Component.K
                assert fetch.end_location == Location(layers, objects if half else objects - 1)
                assert is_in(Location(layers, objects), unknown) is half
                for layer in range(LAYERS):
                    for block in range(BLOCKS):
                        at = Location(layer, block)
                        assert at > fetch.end_location or (at in kept) is not is_in(at, unknown)

    failed = events[-1]
    assert isinstance(failed, Failed), failed
    assert ready(events) == list(range(layers))
    assert missing(failed) == [
        "k.raw.s0 layer 2 blocks 3-4",
        "k.raw.s0 layers 3-5 blocks 0-4",
        "v.raw.s0 layer 2 blocks 3-4",
        "v.raw.s0 layers 3-5 blocks 0-4",
    ]
    assert sink.placed == placed_before(layers, objects)
    assert missing_places(failed) + sink.placed == EVERYTHING
    assert_same_cache(sink, range(layers))


# -- the middle of an Object ---------------------------------------------------------------------

LENGTH = 9000
GROUPS, WHOLE = 2, 3
HALF = Location(GROUPS, WHOLE)
#: Everything that came whole: two Groups to their end, and a part of the third.
KEPT = Counter(
    [Location(group, number) for group in range(GROUPS) for number in range(WHOLE)]
    + [Location(GROUPS, number) for number in range(WHOLE)]
)


@dataclass
class Break:
    """One Track of which an Object breaks off."""

    track: LocalTrack
    sent: int
    """Octets of the last Object that are sent before."""

    is_reset: bool
    """Its stream is reset and its publisher stays for a while, or the publisher vanishes."""

    late: bool
    """Whether the subscriber, and so the relay, comes when the Object is half sent already."""

    async def run(self, stage: Stage, consumer: MoqtConnection) -> None:
        """Break the Object off once the subscriber has what was sent of it."""
        origin = await open_connection(
            stage.farthest.uri, tls=stage.farthest.tls, handler=Serving(self.track)
        )
        await origin.publish_namespace(self.track.name.namespace)
        subgroup = self._whole_objects()
        if self.late:
            self._half(subgroup)
        subscription = await consumer.subscribe(self.track.name, fill=FROM_START, pieces=True)
        if not self.late:
            self._half(subgroup)
        got: dict[int, tuple[Location, int]] = {}
        events: list[Any] = []
        broken = False
        async for event in subscription:
            events.append(event)
            if isinstance(event, ObjectBegan):
                got[event.stream_id] = event.location, 0
            elif isinstance(event, ObjectPiece):
                location, have = got[event.stream_id]
                got[event.stream_id] = location, have + len(event.data)
            elif broken and self.is_reset and origin.closed is None and self._tells_it(event, got):
                await self.check_while_it_goes_on(stage, subscription, consumer)
                vanish(origin)
            if not broken and (HALF, self.sent) in got.values():
                broken = True
                if self.is_reset:
                    subgroup.cut(StreamErrorCode.INTERNAL_ERROR)
                else:
                    vanish(origin)
        assert broken
        self.check(subscription, events)
        self.check_relays(stage)
        await self.check_cache(consumer)
        self.check_relays(stage)

    def _whole_objects(self) -> LocalSubgroup:
        for group in range(GROUPS):
            publish_group(self.track, group, WHOLE)
        subgroup = self.track.open_subgroup(GROUPS, 0, holds_end_of_group=True)
        for number in range(WHOLE):
            subgroup.publish(number, payload_of(Location(GROUPS, number)))
        return subgroup

    def _half(self, subgroup: LocalSubgroup) -> LocalObject:
        obj = subgroup.begin(WHOLE, LENGTH)
        subgroup.extend(obj, payload_of(HALF, LENGTH)[: self.sent])
        return obj

    def _tells_it(self, event: Any, got: dict[int, tuple[Location, int]]) -> bool:
        """Whether an event tells of the end of the stream that carried the half Object."""
        if self.late:
            return isinstance(event, FillEnded)
        return isinstance(event, SubgroupClosed) and got[event.stream_id][0] == HALF

    async def check_while_it_goes_on(
        self, stage: Stage, subscription: Subscription, consumer: MoqtConnection
    ) -> None:
        """After a reset nobody is told that anything is over but the stream."""
        assert subscription.ended is None
        self.check_relays(stage)
        found, _ = await fetched(
            await consumer.fetch(
                self.track.name, location_filter=LocationFilter.range(0, 0, GROUPS, WHOLE - 1)
            )
        )
        assert found == KEPT
        assert subscription.ended is None

    def check(self, subscription: Subscription, events: list[Any]) -> None:
        began: Counter[Location] = Counter()
        at: dict[int, Location] = {}
        octets: Counter[Location] = Counter()
        broken_off = []
        for event in events:
            match event:
                case ObjectBegan(status=ObjectStatus.NORMAL):
                    began[event.location] += 1
                    at[event.stream_id] = event.location
                case ObjectPiece():
                    octets[at[event.stream_id]] += len(event.data)
                case SubgroupClosed(fin=True):
                    assert at[event.stream_id] != HALF
                case SubgroupClosed(fin=False):
                    broken_off.append(at[event.stream_id])
                case FillEnded(complete=True):
                    assert not self.late  # or else it was to bring the Object
        assert began == KEPT + Counter([HALF])
        assert octets[HALF] == self.sent
        assert self.late or broken_off == [HALF]
        assert subscription.ended is not None
        assert subscription.ended.code is not PublishDoneCode.TRACK_ENDED

    def check_relays(self, stage: Stage) -> None:
        """No relay holds a part of an Object, nor has one that it saw as the Largest."""
        for relay in stage.relays:
            track = held_by(relay, self.track.name)
            assert track is not None
            held = {
                Location(group, obj.object_id): b"".join(obj.parts)
                for group in track.group_ids(0, GROUPS + 1)
                for _, obj in track.objects_of(group)
                if obj.status is ObjectStatus.NORMAL
            }
            assert held == {location: payload_of(location) for location in KEPT}
            assert track.octets == sum(map(len, held.values()))
            assert track.ended is None or track.ended.code is not PublishDoneCode.TRACK_ENDED
            # It stays the Largest where the publisher's answer had said so, and nowhere else.
            assert track.largest == (HALF if self.late else Location(GROUPS, WHOLE - 1))

    async def check_cache(self, consumer: MoqtConnection) -> None:
        """What is cached is whole; and where the half Object was, nothing is said to be absent."""
        fetch = await consumer.fetch(
            self.track.name, location_filter=LocationFilter.range(0, 0, GROUPS, WHOLE + 5)
        )
        found, unknown = await fetched(fetch)
        assert found == KEPT
        # Who was told of the half Object as the largest one is told that it is not known.
        assert fetch.end_location == (HALF if self.late else Location(GROUPS, WHOLE - 1))
        assert is_in(HALF, unknown) is self.late
        assert not fetch.end_of_track
        again = await consumer.subscribe(self.track.name, fill=FROM_START)
        filled = [event async for event in again]
        assert Counter(e.location for e in filled if isinstance(e, ObjectReceived)) == KEPT
        assert again.ended is not None
        assert again.ended.code is not PublishDoneCode.TRACK_ENDED


#: In each round both ways to break off, at a place in each third of the Object: 30 in all.
ROUNDS = 5


@pytest.mark.parametrize(
    ("number", "hops"),
    [
        pytest.param(number, 1 + number % 2, marks=() if number < 2 else pytest.mark.slow)
        for number in range(ROUNDS)
    ],
)
async def test_an_object_that_breaks_off_at_any_third_is_never_taken_for_the_end(
    certificates: CertificateFiles, number: int, hops: int
) -> None:
    chance = random.Random(number)
    third = LENGTH // 3
    breaks = [
        Break(
            LocalTrack(FullTrackName.of("lost", str(case), "track")),
            # Also just at its beginning, before the first octet of its payload.
            sent=case // 2 * third + (0 if number == 0 else chance.randrange(third)),
            is_reset=case % 2 == 1,
            late=(case + case // 2 + number) % 2 == 1,
        )
        for case in range(6)
    ]
    async with (
        relaying(certificates, hops=hops, quic=BRISK) as stage,
        asyncio.timeout(PATIENCE_S),
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
        asyncio.TaskGroup() as group,
    ):
        for one in breaks:
            group.create_task(one.run(stage, consumer))
