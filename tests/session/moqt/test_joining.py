"""Next Object and a fill from {0, 0}: each Object exactly once, whenever one joins."""

import random
from collections.abc import Callable

import pytest

from moqt.codepoints import GroupOrder, ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.session.config import SessionConfig
from moqt.session.events import (
    FillEnded,
    ObjectReceived,
    RequestId,
    SubscribeAccepted,
    SubscriptionEnded,
    Via,
)
from moqt.session.localobjects import LocalObject, LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)
GROUPS, OBJECTS, OCTETS = 4, 5, 40


def join(
    pair: Pair, *, fill: LocationFilter | None = FROM_START, forward: bool = True
) -> RequestId:
    return pair.client.session.subscribe(NAME, fill=fill, forward=forward)


def production(track: LocalTrack) -> list[Callable[[], None]]:
    """Return the steps of making a Track, three for each Object: begun, half there, whole."""
    steps: list[Callable[[], None]] = []
    subgroups: dict[int, LocalSubgroup] = {}
    begun: dict[Location, LocalObject] = {}

    def open_group(g: int) -> None:
        subgroups[g] = track.open_subgroup(g, priority=g, holds_end_of_group=True)

    def begin(at: Location) -> None:
        begun[at] = subgroups[at.group].begin(at.object, OCTETS)

    def extend(at: Location, part: slice) -> None:
        subgroups[at.group].extend(begun[at], payload_of(at, OCTETS)[part])

    def close(g: int) -> None:
        subgroups[g].publish(OBJECTS, status=ObjectStatus.END_OF_GROUP)
        subgroups[g].close()

    for g in range(GROUPS):
        steps.append(lambda g=g: open_group(g))  # type: ignore[misc]
        for at in (Location(g, o) for o in range(OBJECTS)):
            steps.append(lambda at=at: begin(at))  # type: ignore[misc]
            steps.append(lambda at=at: extend(at, slice(0, 15)))  # type: ignore[misc]
            steps.append(lambda at=at: extend(at, slice(15, OCTETS)))  # type: ignore[misc]
        steps.append(lambda g=g: close(g))  # type: ignore[misc]
    steps.append(track.end)
    return steps


STEPS = 1 + GROUPS * (2 + 3 * OBJECTS)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("moment", range(STEPS + 1))
def test_each_object_comes_exactly_once_whenever_one_joins(moment: int, chunk: int) -> None:
    pair = Pair(chunk=chunk)
    track = pair.server.publish(LocalTrack(NAME))
    steps = production(track)

    for step in steps[:moment]:
        step()
    request_id = join(pair)
    pair.settle()
    for step in steps[moment:]:
        step()
        pair.settle()

    objects = [e for e in pair.client.take(ObjectReceived) if e.status is ObjectStatus.NORMAL]
    assert sorted(locations(objects)) == whole(GROUPS, OBJECTS)
    accepted = pair.client.one(SubscribeAccepted)
    split = accepted.largest
    assert {e.location for e in objects if e.via is Via.FILL} == {
        e.location for e in objects if split is not None and e.location <= split
    }
    assert accepted.fill_expected is (split is not None)
    assert [e.complete for e in pair.client.take(FillEnded)] == [True] * accepted.fill_expected
    ended = pair.client.one(SubscriptionEnded)
    assert ended == SubscriptionEnded(
        request_id=request_id,
        code=PublishDoneCode.TRACK_ENDED,
        reason="",
        complete=True,
        by_peer=True,
    )
    assert pair.leave_behind() == []


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_or_doubled_when_streams_overtake_each_other(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(chunk=rng.choice([1, 7, 50, 400]), rng=rng, stream_window=rng.choice([64, 4096]))
    pair.server.budget = rng.choice([1, 10, 100, 1 << 20])
    track = pair.server.publish(LocalTrack(NAME))
    steps = production(track)
    joins = sorted(rng.randrange(len(steps)) for _ in range(4))

    requests: list[RequestId] = []
    for number, step in enumerate(steps):
        for _ in range(joins.count(number)):
            order = rng.choice(list(GroupOrder))
            requests.append(pair.client.session.subscribe(NAME, fill=FROM_START, group_order=order))
        step()
        for _ in range(rng.randrange(4)):
            pair.drain(pair.client)
            pair.drain(pair.server)
            pair.deliver_one()
    pair.settle()

    objects = [e for e in pair.client.take(ObjectReceived) if e.status is ObjectStatus.NORMAL]
    for request_id in requests:
        mine = locations(e for e in objects if e.request_id == request_id)
        assert sorted(mine) == whole(GROUPS, OBJECTS)
    assert all(e.complete for e in pair.client.take(SubscriptionEnded))
    assert pair.leave_behind() == []


def test_within_a_group_objects_come_in_order_and_the_fill_before_what_is_live() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(2, 3, ended=False))
    subgroup = track.open_subgroup(2)
    subgroup.publish(0, payload_of(Location(2, 0)))
    join(pair)
    subgroup.publish(1, payload_of(Location(2, 1)))

    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [*whole(2, 3), (2, 0), (2, 1)]


def test_a_late_joiner_gets_everything_and_then_the_end() -> None:
    pair = Pair()
    pair.server.publish(make_track(3, 4))
    for _ in range(2):
        join(pair)

        pair.settle()

        assert locations(pair.client.take(ObjectReceived)) == whole(3, 4)
        assert pair.client.one(SubscriptionEnded).complete
        assert pair.leave_behind() == []


def test_a_joiner_of_an_ended_track_without_fill_gets_only_the_end() -> None:
    pair = Pair()
    pair.server.publish(make_track(3, 4))
    join(pair, fill=None)

    pair.settle()

    assert pair.client.take(ObjectReceived) == []
    assert pair.client.one(SubscribeAccepted).largest == Location(2, 3)
    assert pair.client.one(SubscriptionEnded).complete


def test_a_joiner_of_an_empty_track_waits_and_no_fill_is_opened() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    join(pair)
    pair.settle()
    accepted = pair.client.one(SubscribeAccepted)

    publish_group(track, 0, 2)
    track.end()
    pair.settle()

    assert (accepted.largest, accepted.fill_expected) == (None, False)
    assert {e.via for e in pair.client.take(ObjectReceived)} == {Via.SUBGROUP}
    assert pair.client.take(FillEnded) == []
    assert pair.client.one(SubscriptionEnded).complete


def test_a_stream_that_goes_on_in_the_middle_of_a_subgroup_is_not_marked_as_its_first() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    subgroup = track.open_subgroup(0)
    for object_id in range(3):
        subgroup.publish(object_id, payload_of(Location(0, object_id)))
    join(pair, fill=None)
    pair.settle()

    subgroup.publish(3, payload_of(Location(0, 3)))
    pair.settle()

    [stream_id] = pair.data_streams(pair.server)
    first = next(c for end, c in pair.log if getattr(c, "stream_id", None) == stream_id)
    assert getattr(first, "data")[0] & 0x40 == 0  # noqa: B009  # FIRST_OBJECT
    assert locations(pair.client.take(ObjectReceived)) == [Location(0, 3)]


def test_fifty_subscribers_share_one_copy_and_each_gets_all() -> None:
    server = SessionConfig()
    pairs = [Pair(server=server) for _ in range(50)]
    track = LocalTrack(NAME)
    for pair in pairs:
        pair.server.publish(track)
    half = track.open_subgroup(0)
    largest = half.begin(0, 100_000)
    half.extend(largest, payload_of(Location(0, 0), 100_000)[:60_000])
    for pair in pairs:
        join(pair)
        pair.settle()

    half.extend(largest, payload_of(Location(0, 0), 100_000)[60_000:])
    half.close()
    publish_group(track, 1, 3)
    track.end()

    assert track.octets == 100_000 + 3 * 64
    for pair in pairs:
        pair.settle()
        assert sorted(locations(pair.client.take(ObjectReceived))) == [(0, 0), *whole(2, 3)[3:]]


def test_a_paused_subscription_brings_nothing_and_opens_no_fill() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, 2, ended=False))
    join(pair, forward=False)
    publish_group(track, 1, 2)

    pair.settle()

    assert pair.client.one(SubscribeAccepted).fill_expected is False
    assert pair.client.take(ObjectReceived) == []
    assert pair.data_streams(pair.server) == []


def test_the_current_group_can_be_asked_for() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(3, 2, ended=False))
    join(pair, fill=LocationFilter.relative(1))
    pair.settle()
    publish_group(track, 3, 1)
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [(2, 0), (2, 1), (3, 0)]


def test_an_object_that_is_never_finished_ends_its_streams_and_the_subscription() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, 2, ended=False))
    subgroup = track.open_subgroup(1)
    begun = subgroup.begin(0, 1000)
    subgroup.extend(begun, bytes(100))
    join(pair)
    pair.settle()

    track.end(PublishDoneCode.INTERNAL_ERROR, "the producer failed")
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == whole(1, 2)
    assert pair.client.one(FillEnded).complete is False
    ended = pair.client.one(SubscriptionEnded)
    assert (ended.code, ended.reason) == (PublishDoneCode.INTERNAL_ERROR, "the producer failed")
    assert pair.leave_behind() == []
