"""Tracks whose Objects come in pieces: Subgroups cut and resumed, a past that arrives meanwhile."""

import random

import pytest

from moqt.codepoints import GroupOrder, PublishDoneCode, RangeMarkerKind, StreamErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.session.budget import ByteBudget
from moqt.session.commands import ResetStream, SendStreamData, StreamId
from moqt.session.coverage import Coverage, Knowledge
from moqt.session.events import (
    FetchAccepted,
    FetchEnded,
    FillEnded,
    ObjectPiece,
    ObjectReceived,
    RangeMarked,
    RequestId,
    SubscriptionEnded,
    Via,
)
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)
GONE = StreamErrorCode.DELIVERY_TIMEOUT
FIRST_OBJECT = 0x40


def subscribed(pair: Pair, track: LocalTrack, **options: LocationFilter) -> RequestId:
    pair.server.publish(track)
    request_id = pair.client.session.subscribe(NAME, **options)  # type: ignore[arg-type]
    pair.settle()
    pair.client.take()
    return request_id


def put(subgroup: LocalSubgroup, *object_ids: int, octets: int = 64) -> None:
    for object_id in object_ids:
        location = Location(subgroup.group_id, object_id)
        subgroup.publish(object_id, payload_of(location, octets))


def resets(pair: Pair) -> list[tuple[StreamId, int]]:
    return [(c.stream_id, c.code) for _, c in pair.log if isinstance(c, ResetStream)]


def heads(pair: Pair) -> list[int]:
    """Return the type of each data stream of the server, in order of opening."""
    return [
        next(
            c.data[0]
            for _, c in pair.log
            if isinstance(c, SendStreamData) and c.stream_id == stream_id and c.data
        )
        for stream_id in pair.data_streams(pair.server)
    ]


def test_who_is_told_once_of_a_batch_is_told_of_the_next_one_too() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 30)
    subgroup.extend(begun, b"xx")
    session = pair.client.session
    fetch = session.fetch(NAME, location_filter=LocationFilter.none(), pieces=True)
    fill = session.subscribe(NAME, fill=FROM_START, pieces=True)
    pair.settle()

    for _ in range(3):
        pair.client.take()
        subgroup.extend(begun, b"12345")
        subgroup.extend(begun, b"678")
        assert pair.server.woken
        pair.settle()
        came = {fetch: b"", fill: b""}
        for event in pair.client.take(ObjectPiece):
            came[event.request_id] += bytes(event.data)
        assert came == {fetch: b"12345678", fill: b"12345678"}


# -- cut -------------------------------------------------------------------------------------------


def test_what_is_whole_is_sent_before_a_cut_subgroup_is_reset_with_its_code() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0, 1)
    subgroup.cut(GONE)

    pair.drain(pair.server)
    [stream_id] = pair.data_streams(pair.server)

    sent = [c for _, c in pair.log if getattr(c, "stream_id", None) == stream_id]
    assert sent[-1] == ResetStream(stream_id, GONE, after_delivery=True)
    assert sum(len(c.data) for c in sent if isinstance(c, SendStreamData)) > 2 * 64
    assert not any(c.fin for c in sent if isinstance(c, SendStreamData))


def test_a_code_that_nobody_registered_is_passed_on() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    pair.settle()
    subgroup.cut(0x7777)
    pair.settle()

    assert [code for _, code in resets(pair)] == [0x7777]


def test_half_an_object_is_neither_kept_nor_the_largest_nor_sent_further() -> None:
    budget = ByteBudget(1 << 20)
    pair = Pair()
    track = LocalTrack(NAME, budget=budget)
    subscribed(pair, track)
    subgroup = track.open_subgroup(3)
    put(subgroup, 0)
    half = subgroup.begin(1, 1000)
    subgroup.extend(half, bytes(400))
    pair.settle()
    assert track.largest == Location(3, 1)

    subgroup.cut(GONE)
    pair.settle()

    assert track.largest == Location(3, 0)
    assert (track.octets, budget.used) == (64, 64)
    assert [obj.object_id for _, obj in track.objects_of(3)] == [0]
    assert [code for _, code in resets(pair)] == [GONE]
    assert locations(pair.client.take(ObjectReceived)) == [Location(3, 0)]
    with pytest.raises(UsageError, match="given up"):
        subgroup.extend(half, bytes(600))


def test_the_largest_that_another_knows_stays_when_half_an_object_goes() -> None:
    track = LocalTrack(NAME)
    subgroup = track.open_subgroup(3)
    subgroup.begin(1, 1000)
    track.raise_largest(Location(3, 1))
    subgroup.cut(GONE)
    assert track.largest == Location(3, 1)

    alone = LocalTrack(NAME)
    alone.open_subgroup(0).begin(0, 5)
    [(only, _)] = alone.objects_of(0)
    only.cut(GONE)
    assert alone.largest is None


def test_nothing_is_opened_for_a_subgroup_of_which_nothing_came() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track)
    track.open_subgroup(0).cut(GONE)
    publish_group(track, 1, 1)
    track.end()
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [Location(1, 0)]
    assert len(pair.data_streams(pair.server)) == 1
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_fetch_in_the_middle_of_an_object_that_is_cut_is_reset_with_its_code() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, 2, ended=False))
    subgroup = track.open_subgroup(1)
    half = subgroup.begin(0, 1000)
    subgroup.extend(half, bytes(400))
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()

    subgroup.cut(GONE)
    pair.settle()

    ended = pair.client.one(FetchEnded)
    assert (ended.complete, ended.code) == (False, GONE)
    assert locations(pair.client.take(ObjectReceived)) == whole(1, 2)


@pytest.mark.parametrize("pending", [False, True])
def test_where_half_an_object_was_cut_nothing_is_said_not_to_exist(pending: bool) -> None:
    pair = Pair()
    coverage = Coverage()
    track = pair.server.publish(LocalTrack(NAME, coverage=coverage))
    track.raise_largest(Location(0, 3))
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    subgroup.begin(1, 100)
    if pending:
        coverage.mark(Location(0, 1), Location(0, 1), Knowledge.PENDING)
    subgroup.cut(GONE)
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()

    found = [(e.kind, e.end) for e in pair.client.take(RangeMarked)]
    assert found == [] if pending else found == [(RangeMarkerKind.UNKNOWN, Location(0, 1))]
    assert [e.complete for e in pair.client.take(FetchEnded)] == [True] * (not pending)


def test_what_was_let_go_is_unknown_also_where_all_was_known() -> None:
    coverage = Coverage()
    coverage.mark(Location(0, 7), Location(0, 8), Knowledge.PENDING)
    track = LocalTrack(NAME, retain=False, coverage=coverage)
    publish_group(track, 0, 5)
    publish_group(track, 1, 1)

    assert track.lost_before == Location(1, 1)
    assert [track.run_at(at)[1:] for at in (Location(0, 0), Location(0, 7), Location(0, 9))] == [
        (Location(0, 6), Knowledge.UNKNOWN),
        (Location(0, 8), Knowledge.PENDING),
        (Location(1, 0), Knowledge.UNKNOWN),
    ]
    assert track.run_at(Location(5, 0))[::2] == (Location(1, 1), Knowledge.COMPLETE)


# -- resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("sent", [True, False])
def test_a_subgroup_goes_on_on_a_new_stream_that_is_not_its_first(chunk: int, sent: bool) -> None:
    pair = Pair(chunk=chunk)
    track = LocalTrack(NAME)
    subscribed(pair, track)
    subgroup = track.open_subgroup(0, holds_end_of_group=True)
    put(subgroup, 0, 1)
    half = subgroup.begin(2, 64)
    subgroup.extend(half, payload_of(Location(0, 2))[:30])
    if sent:
        pair.settle()
    subgroup.cut(GONE)
    following = subgroup.resume(2)
    put(following, 2, 3)
    following.close()
    track.end()
    pair.settle()
    pair.advance(11.0)  # a stream may be reset before anybody sees whose it is

    found = locations(pair.client.take(ObjectReceived))
    assert len(found) == len(set(found))
    # What a reset overtook is lost on its stream; where it had arrived, nothing is missing.
    assert set(found) >= {(0, 2), (0, 3)} | ({(0, 0), (0, 1)} if sent else set())
    first, second = heads(pair)
    assert first & FIRST_OBJECT
    assert not second & FIRST_OBJECT
    assert pair.client.one(SubscriptionEnded).code == PublishDoneCode.TRACK_ENDED
    assert [obj.object_id for _, obj in track.objects_of(0)] == [0, 1, 2, 3]


def test_only_what_was_cut_goes_on_and_only_once_and_further_up() -> None:
    track = LocalTrack(NAME)
    subgroup = track.open_subgroup(0)
    put(subgroup, 4)
    with pytest.raises(UsageError, match="goes on elsewhere"):
        subgroup.resume(5)
    subgroup.cut(GONE)
    subgroup.cut(StreamErrorCode.CANCELLED)
    assert subgroup.cut_code is GONE
    with pytest.raises(UsageError, match="Object 4 after Object 4"):
        subgroup.resume(4)
    following = subgroup.resume(7)
    with pytest.raises(UsageError, match="goes on elsewhere"):
        subgroup.resume(8)
    with pytest.raises(UsageError, match="from 7"):
        following.publish(6, b"x")
    with pytest.raises(UsageError, match="exists"):
        track.open_subgroup(0)


# -- the past --------------------------------------------------------------------------------------


def test_what_can_be_stored_is_what_is_missing_of_the_past() -> None:
    track = LocalTrack(NAME)
    live = track.open_subgroup(1, 0, priority=7)
    put(live, 5)
    with pytest.raises(UsageError, match="has priority 7"):
        track.store_subgroup(1, 0, priority=8)
    past = track.store_subgroup(1, 0, priority=7)
    assert track.store_subgroup(1, 0, priority=7) is past
    put(past, 3, 1, 2)
    with pytest.raises(UsageError, match="past the Largest"):
        put(past, 6)
    for taken in (3, 5):
        with pytest.raises(UsageError, match="there is an Object"):
            put(past, taken)
    put(track.store_subgroup(0), 9)
    with pytest.raises(UsageError, match="there is an Object"):
        put(track.open_subgroup(0), 9)
    track.store_subgroup(2)
    with pytest.raises(UsageError, match="has priority 128"):
        track.open_subgroup(2, 0, priority=1)

    assert [obj.object_id for _, obj in track.objects_of(1)] == [1, 2, 3, 5]
    assert track.largest == Location(1, 5)


def test_an_object_of_the_past_that_is_given_up_resets_the_fetches_that_carry_it() -> None:
    pair = Pair()
    coverage = Coverage()
    track = pair.server.publish(LocalTrack(NAME, coverage=coverage))
    track.raise_largest(Location(0, 3))
    past = track.store_subgroup(0)
    half = past.begin(1, 100)
    past.extend(half, bytes(10))
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()
    past.give_up(half, GONE)
    pair.settle()

    assert pair.client.one(FetchEnded).code == GONE
    assert track.octets == 0
    past.publish(1, payload_of(Location(0, 1)))
    assert track.largest == Location(0, 3)


@pytest.mark.parametrize("order", GroupOrder)
def test_a_fetch_waits_for_what_is_pending_also_when_the_track_has_ended(
    order: GroupOrder,
) -> None:
    pair = Pair()
    coverage = Coverage()
    coverage.mark(Location(0, 1), Location(1, 0), Knowledge.PENDING)
    track = pair.server.publish(LocalTrack(NAME, coverage=coverage))
    track.raise_largest(Location(1, 1))
    put(track.store_subgroup(0), 0)
    put(track.store_subgroup(1), 1)
    track.end()
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none(), group_order=order)
    pair.client.session.subscribe(NAME, fill=FROM_START, group_order=order)
    pair.settle()
    assert pair.client.take(FetchEnded) == []
    assert pair.client.take(SubscriptionEnded) == []
    assert pair.client.one(FetchAccepted).end_location == Location(1, 1)

    put(track.store_subgroup(0), 2)
    coverage.settle(Location(0, 1), Location(0, 2), Knowledge.COMPLETE)
    coverage.settle(Location(0, 3), Location(1, 0), Knowledge.TIMED_OUT)
    track.coverage_changed()
    pair.settle()

    objects = pair.client.take(ObjectReceived)
    for via in (Via.FETCH, Via.FILL):
        mine = sorted(locations(e for e in objects if e.via is via))
        assert mine == [(0, 0), (0, 2), (1, 1)]
    assert {e.kind for e in pair.client.take(RangeMarked)} == {RangeMarkerKind.TIMED_OUT}
    assert pair.client.one(FetchEnded).complete
    assert pair.client.one(FillEnded).complete
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


GROUPS, OBJECTS = 3, 4


@pytest.mark.parametrize("seed", range(80))
def test_each_object_comes_once_while_the_past_arrives_in_any_order(seed: int) -> None:
    """As behind a relay that joined late: what is live goes on, and what was is filled in."""
    rng = random.Random(seed)
    pair = Pair(chunk=rng.choice([1, 9, 400]), rng=rng, stream_window=rng.choice([64, 4096]))
    pair.server.budget = rng.choice([1, 10, 100, 1 << 20])
    places = whole(GROUPS, OBJECTS)
    split = rng.randrange(len(places) - 1)
    past, live = places[: split + 1], places[split + 1 :]
    coverage = Coverage()
    coverage.mark(Location(0, 0), places[split], Knowledge.PENDING)
    track = pair.server.publish(LocalTrack(NAME, coverage=coverage))
    track.raise_largest(places[split])
    rng.shuffle(past)
    subgroups: dict[int, LocalSubgroup] = {}
    requests: list[RequestId] = []

    def publish(at: Location) -> None:
        if at.group not in subgroups:
            subgroups[at.group] = track.open_subgroup(at.group, first_object=at.object == 0)
        put(subgroups[at.group], at.object)

    def fill_in(at: Location) -> None:
        stored = track.store_subgroup(at.group)
        payload = payload_of(at)
        if rng.random() < 0.5:
            begun = stored.begin(at.object, len(payload))
            for part in (payload[:9], payload[9:]):
                stored.extend(begun, part)
                pair.drain(pair.server)
        else:
            stored.publish(at.object, payload)
        coverage.settle(at, at, Knowledge.COMPLETE)
        track.coverage_changed()

    while past or live or not requests:
        match rng.randrange(4):
            case 0 if live:
                publish(live.pop(0))
            case 1 | 2 if past:
                fill_in(past.pop())
            case 3 if len(requests) < 5:
                order = rng.choice(list(GroupOrder))
                requests.append(
                    pair.client.session.subscribe(NAME, fill=FROM_START, group_order=order)
                )
        for _ in range(rng.randrange(4)):
            pair.drain(pair.client)
            pair.drain(pair.server)
            pair.deliver_one()
    coverage.settle(Location(0, 0), places[split], Knowledge.COMPLETE)
    track.coverage_changed()
    for subgroup in subgroups.values():
        subgroup.close()
    track.end()
    pair.settle()

    objects = pair.client.take(ObjectReceived)
    for request_id in requests:
        assert sorted(locations(e for e in objects if e.request_id == request_id)) == places
    assert all(e.complete for e in pair.client.take(SubscriptionEnded))
    assert pair.client.take(RangeMarked) == []
    assert pair.leave_behind() == []
