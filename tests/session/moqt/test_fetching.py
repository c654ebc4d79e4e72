"""FETCH and TRACK_STATUS: ranges, orders, ends, what is not kept, and giving up."""

from collections.abc import Sequence
from typing import Any

import pytest

from moqt.codepoints import (
    MAX_VI64,
    GroupOrder,
    MessageType,
    ObjectStatus,
    RangeMarkerKind,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.codepoints import ParameterType as P
from moqt.location import Location
from moqt.session.budget import ByteBudget
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    FetchAccepted,
    FetchEnded,
    FetchReceived,
    FillEnded,
    ObjectReceived,
    PeerRequestEnded,
    RangeMarked,
    RequestRefused,
    SubscribeReceived,
    SubscriptionEnded,
    TrackStatusAccepted,
    Via,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.parameters import Parameters
from tests.session.lone import Lone
from tests.session.pair import (
    DESCENDING,
    NAME,
    Pair,
    locations,
    make_track,
    payload_of,
    publish_group,
    whole,
)

F = LocationFilter
FROM_START = F.absolute_start(0, 0)
Pairs = Sequence[tuple[int, int]]


def fetched(track: LocalTrack, wanted: LocationFilter, **options: Any) -> Pair:
    """Return a pair after a FETCH has run to its end."""
    pair = Pair(chunk=50)
    pair.server.publish(track)
    pair.client.session.fetch(NAME, location_filter=wanted, **options)
    pair.settle()
    assert pair.leave_behind() == []
    return pair


RANGES: list[tuple[LocationFilter, Pairs, tuple[int, int]]] = [
    # Of groups 0 to 3 with three Objects each: what comes, and FETCH_OK's End Location.
    (F.none(), whole(4, 3), (3, 2)),
    (F.absolute_start(0, 0), whole(4, 3), (3, 2)),
    (F.absolute_start(2, 1), whole(4, 3)[7:], (3, 2)),
    (F.absolute_start(2, 99), whole(4, 3)[9:], (3, 2)),
    (F.group_end(1, 1, 1), [(1, 1), (1, 2)], (1, 2)),
    (F.group_end(1, 1, 2), whole(4, 3)[4:9], (2, 2)),
    (F.group_end(0, 0, 99), whole(4, 3), (3, 2)),
    (F.range(1, 1, 1, 1), [(1, 1)], (1, 1)),
    (F.range(0, 2, 2, 0), whole(4, 3)[2:7], (2, 0)),
    (F.range(0, 0, 9999, 5), whole(4, 3), (3, 2)),
    (F.range(1, 50, 1, 60), [], (1, 60)),
    (F.relative(1), whole(4, 3)[9:], (3, 2)),
    (F.relative(2), whole(4, 3)[6:], (3, 2)),
    (F.relative(MAX_VI64), whole(4, 3), (3, 2)),
]


@pytest.mark.parametrize(("wanted", "expected", "end"), RANGES)
def test_a_range_brings_exactly_its_objects_ascending(
    wanted: LocationFilter, expected: Pairs, end: tuple[int, int]
) -> None:
    pair = fetched(make_track(4, 3), wanted)

    objects = pair.client.take(ObjectReceived)
    assert locations(objects) == expected
    assert {e.via for e in objects} <= {Via.FETCH}
    assert pair.client.one(FetchAccepted).end_location == end
    ended = pair.client.one(FetchEnded)
    assert (ended.complete, ended.code) == (True, None)


@pytest.mark.parametrize(("wanted", "expected", "end"), RANGES)
def test_a_range_descending_brings_the_groups_from_the_last_to_the_first(
    wanted: LocationFilter, expected: Pairs, end: tuple[int, int]
) -> None:
    pair = fetched(make_track(4, 3), wanted, group_order=DESCENDING)

    assert locations(pair.client.take(ObjectReceived)) == sorted(
        expected, key=lambda at: (-at[0], at[1])
    )
    assert pair.client.one(FetchAccepted).end_location == end


@pytest.mark.parametrize(
    "wanted",
    [F.NEXT_OBJECT, F.relative(0), F.absolute_start(3, 3), F.absolute_start(99, 0),
     F.range(2, 2, 2, 1)],
)  # fmt: skip
def test_a_range_that_can_hold_nothing_is_an_invalid_range(wanted: LocationFilter) -> None:
    pair = fetched(make_track(4, 3), wanted)

    assert pair.client.one(RequestRefused).code == RequestErrorCode.INVALID_RANGE
    assert pair.data_streams(pair.server) == []


def test_a_track_without_objects_has_no_range() -> None:
    pair = fetched(LocalTrack(NAME), F.none())

    assert pair.client.one(RequestRefused).code == RequestErrorCode.INVALID_RANGE


def test_objects_of_several_subgroups_come_in_order_of_their_ids() -> None:
    track = LocalTrack(NAME)
    even, odd = (track.open_subgroup(0, n, priority=n + 1) for n in (0, 1))
    for object_id in range(6):
        (even, odd)[object_id % 2].publish(object_id, payload_of(Location(0, object_id)))
    pair = fetched(track, F.none())

    objects = pair.client.take(ObjectReceived)
    assert locations(objects) == whole(1, 6)
    assert [(e.subgroup_id, e.publisher_priority) for e in objects] == [(0, 1), (1, 2)] * 3


def test_priorities_properties_and_empty_objects_are_kept() -> None:
    track = LocalTrack(NAME, properties=((0x3801, b"shape"),))
    subgroup = track.open_subgroup(2, 3, priority=9, has_properties=True)
    subgroup.publish(0, b"x", properties=((0x3803, b"p"),))
    subgroup.publish(1)
    pair = fetched(track, F.none())

    assert pair.client.one(FetchAccepted).track_properties == ((0x3801, b"shape"),)
    first, second = pair.client.take(ObjectReceived)
    assert (first.properties, first.publisher_priority) == (((0x3803, b"p"),), 9)
    assert (second.payload, second.status) == (b"", ObjectStatus.NORMAL)


def test_the_end_of_the_track_is_told_and_statuses_are_not_sent() -> None:
    track = make_track(2, 3, ended=False)
    last = track.open_subgroup(2)
    last.publish(0, status=ObjectStatus.END_OF_TRACK)
    last.close()
    pair = fetched(track, F.none())

    accepted = pair.client.one(FetchAccepted)
    assert (accepted.end_of_track, accepted.end_location) == (True, (1, 2))
    assert locations(pair.client.take(ObjectReceived)) == whole(2, 3)
    before_the_end = fetched(track, F.group_end(0, 0, 0)).client.one(FetchAccepted)
    assert (before_the_end.end_of_track, before_the_end.end_location) == (False, (0, 2))
    beyond = fetched(track, F.absolute_start(2, 0)).client.one(FetchAccepted)
    assert (beyond.end_of_track, beyond.end_location) == (False, (2, 0))


def test_range_filters_apply_to_a_fetch() -> None:
    only = RangeFilter(P.OBJECTID_FILTER, ranges=((1, 1),))
    pair = fetched(make_track(3, 3), F.none(), range_filters=[only])

    assert locations(pair.client.take(ObjectReceived)) == [(0, 1), (1, 1), (2, 1)]


def test_an_object_that_is_still_being_made_is_delivered_whole() -> None:
    pair = Pair(chunk=7)
    track = pair.server.publish(make_track(1, 2, ended=False))
    subgroup = track.open_subgroup(1)
    begun = subgroup.begin(0, 100)
    subgroup.extend(begun, payload_of(Location(1, 0), 100)[:30])
    pair.client.session.fetch(NAME, location_filter=F.none())
    pair.settle()
    assert locations(pair.client.take(ObjectReceived)) == whole(1, 2)

    subgroup.extend(begun, payload_of(Location(1, 0), 100)[30:])
    publish_group(track, 2, 1)
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [Location(1, 0)]
    assert pair.client.one(FetchEnded).complete
    assert pair.leave_behind() == []


def test_a_fetch_of_an_object_that_is_never_finished_is_reset_when_its_track_ends() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    track.open_subgroup(0).begin(0, 100)
    pair.client.session.fetch(NAME, location_filter=F.none())
    pair.settle()

    track.end()
    pair.settle()

    ended = pair.client.one(FetchEnded)
    assert (ended.complete, ended.code) == (False, StreamErrorCode.INTERNAL_ERROR)
    assert pair.leave_behind() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_answer_and_objects_may_come_in_any_order(order: tuple[int, ...]) -> None:
    peer = Lone(Role.CLIENT)
    request_id = peer.session.fetch(NAME, location_filter=F.none())
    peer.drain()
    stream_id, data = peer.last_stream(), peer.uni()
    steps = [
        lambda: peer.say(stream_id, FetchOk(False, Location(0, 0)), fin=True),
        lambda: peer.data(data, bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61")),
        lambda: peer.data(data, b"", fin=True),
    ]

    for number in order:
        steps[number]()

    assert len(peer.seen(ObjectReceived)) == 1
    assert [e.complete for e in peer.seen(FetchEnded)] == [True]
    assert peer.session.open_requests == 0


def test_a_cancel_ends_both_streams() -> None:
    pair = Pair(chunk=20)
    pair.server.budget = 100
    pair.server.publish(make_track(2, 200))
    request_id = pair.client.session.fetch(NAME, location_filter=F.none())
    while not pair.client.take(ObjectReceived):
        pair.drain(pair.client)
        pair.drain(pair.server)
        pair.deliver_one()

    pair.client.session.cancel(request_id)
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled
    assert pair.client.take(FetchEnded) == []
    assert pair.leave_behind() == []
    assert pair.open_streams() == []


def test_a_stopped_data_stream_ends_the_fetch_for_the_publisher() -> None:
    pair = Pair(chunk=20)
    pair.server.budget = 100
    pair.server.publish(make_track(2, 200))
    pair.client.session.fetch(NAME, location_filter=F.none())
    while not pair.client.take(ObjectReceived):
        pair.drain(pair.client)
        pair.drain(pair.server)
        pair.deliver_one()

    pair.stop(pair.client, pair.data_streams(pair.server)[0])
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled is False
    assert pair.client.one(FetchEnded).complete is False
    assert pair.leave_behind() == []


def test_a_fetch_lost_by_its_publisher_ends_incomplete() -> None:
    pair = Pair()
    pair.server.publish(make_track(1, 3))
    pair.server.budget = 0
    pair.client.session.fetch(NAME, location_filter=F.none())
    pair.settle()
    [asked] = pair.server.take(FetchReceived)

    pair.server.session.cancel(asked.request_id)
    pair.settle()

    assert pair.client.one(FetchEnded).complete is False
    assert pair.leave_behind() == []


def test_the_priority_of_a_fetch_can_be_changed_and_its_token_is_looked_at() -> None:
    peer = Lone(Role.SERVER)
    stream_id = peer.bidi()
    peer.say(stream_id, Fetch(peer.request_id(), NAME))
    [asked] = peer.seen(FetchReceived)
    track = LocalTrack(NAME)
    track.open_subgroup(0).begin(0, 10)  # so that the FETCH stays open
    peer.session.accept_fetch(asked.request_id, track)
    peer.drain()
    peer.commands.clear()
    peer.say(stream_id, RequestUpdate(100, Parameters({P.SUBSCRIBER_PRIORITY: 3})))

    assert [type(m) for m in peer.messages(stream_id, MessageType.FETCH)] == [RequestOk]
    flow = peer.session._requests.by_id[asked.request_id]._flow  # type: ignore[attr-defined]
    assert flow.rank()[0] == 3


def test_descending_markers_and_objects_agree_with_what_the_reader_expects() -> None:
    track = LocalTrack(NAME, group_order=GroupOrder.DESCENDING)
    for group in range(5):
        publish_group(track, group, 2)
    pair = Pair()
    pair.server.publish(track)
    pair.client.session.subscribe(NAME, fill=FROM_START, group_order=DESCENDING)
    pair.settle()

    assert [at.group for at in locations(pair.client.take(ObjectReceived))] == [
        group for group in (4, 3, 2, 1, 0) for _ in range(2)
    ]


# -- TRACK_STATUS ----------------------------------------------------------------------------------


def test_track_status_tells_what_a_subscribe_would_and_keeps_nothing() -> None:
    pair = Pair()
    pair.server.publish(make_track(2, 3, properties=((0x3800, 7),)))
    request_id = pair.client.session.track_status(NAME)

    pair.settle()

    assert pair.client.one(TrackStatusAccepted) == TrackStatusAccepted(
        request_id=request_id, largest=Location(1, 2), track_properties=((0x3800, 7),)
    )
    assert pair.leave_behind() == []
    assert pair.open_streams() == []


def test_track_status_of_an_empty_and_of_an_unknown_track() -> None:
    pair = Pair()
    pair.server.publish(LocalTrack(NAME))
    pair.client.session.track_status(NAME)
    pair.client.session.track_status(type(NAME)(NAME.namespace, b"unknown"))

    pair.settle()

    assert pair.client.one(TrackStatusAccepted).largest is None
    assert pair.client.one(RequestRefused).code == RequestErrorCode.DOES_NOT_EXIST


# -- Tracks that do not keep their past ------------------------------------------------------------


def test_what_was_sent_to_everybody_is_let_go() -> None:
    budget = ByteBudget(1000)
    pairs = [Pair(), Pair()]
    track = LocalTrack(NAME, retain=False, budget=budget)
    for pair in pairs:
        pair.server.publish(track)
        pair.client.session.subscribe(NAME)
        pair.settle()
    for group in range(4):
        publish_group(track, group, 2, octets=100)
    assert (track.octets, budget.used, budget.has_room) == (800, 800, True)

    pairs[0].settle()
    assert track.octets == 800
    pairs[1].settle()

    assert (track.octets, budget.used) == (0, 0)
    for pair in pairs:
        assert locations(pair.client.take(ObjectReceived)) == whole(4, 2)


def test_a_cancelled_subscriber_holds_nothing_back() -> None:
    slow, fast = Pair(), Pair()
    track = LocalTrack(NAME, retain=False)
    requests = []
    for pair in (slow, fast):
        pair.server.publish(track)
        requests.append(pair.client.session.subscribe(NAME))
        pair.settle()
    slow.server.budget = 0
    publish_group(track, 0, 5)
    fast.settle()
    slow.settle()
    assert track.octets == 5 * 64

    slow.client.session.cancel(requests[0])
    slow.settle()

    assert track.octets == 0


def test_a_paused_subscriber_holds_nothing_back() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME, retain=False))
    request_id = pair.client.session.subscribe(NAME)
    pair.settle()
    subgroup = track.open_subgroup(0)
    subgroup.publish(0, payload_of(Location(0, 0)))
    pair.settle()
    pair.client.session.update(request_id, Parameters({P.FORWARD: 0}))
    pair.settle()

    subgroup.publish(1, payload_of(Location(0, 1)))
    publish_group(track, 1, 3)
    pair.settle()

    assert track.octets == 0


def test_without_a_subscriber_nothing_is_kept_but_what_is_being_made() -> None:
    track = LocalTrack(NAME, retain=False)
    publish_group(track, 0, 5)
    subgroup = track.open_subgroup(1)
    begun = subgroup.begin(0, 100)
    subgroup.extend(begun, bytes(60))
    assert track.octets == 60

    subgroup.extend(begun, bytes(40))

    assert track.octets == 0
    assert track.largest == Location(1, 0)


UNKNOWN = RangeMarkerKind.UNKNOWN


def markers(pair: Pair) -> list[tuple[tuple[int, int] | None, tuple[int, int]]]:
    found = pair.client.take(RangeMarked)
    assert {e.kind for e in found} <= {UNKNOWN}
    return [(e.start, e.end) for e in found]


def half_gone() -> LocalTrack:
    """Return a Track whose groups 0, 1 and a part of 3 were let go; 2 waits for a reader."""
    track = LocalTrack(NAME, retain=False)
    publish_group(track, 0, 2)
    publish_group(track, 1, 2)
    kept = track.open_subgroup(2)
    track.attach(Holding(kept.group_id))
    kept.publish(0, payload_of(Location(2, 0)))
    later = track.open_subgroup(3)
    for object_id in range(4):
        later.publish(object_id, payload_of(Location(3, object_id)))
    track.trim()
    return track


class Holding:
    """A reader that has sent all but one Group, and of Group 3 the first two Objects."""

    is_running = True

    def __init__(self, group_id: int) -> None:
        self._group_id = group_id

    def needs_from(self, subgroup: object, position: int) -> int:
        group_id = subgroup.group_id  # type: ignore[attr-defined]
        return 0 if group_id == self._group_id else 2 if group_id == 3 else 99


def test_what_was_let_go_is_told_as_unknown_ascending() -> None:
    pair = fetched(half_gone(), F.none())

    assert locations(pair.client.take(ObjectReceived)) == [(2, 0), (3, 2), (3, 3)]
    assert markers(pair) == [(None, (1, MAX_VI64)), ((2, 1), (3, 1))]
    assert pair.client.one(FetchEnded).complete


def test_what_was_let_go_is_told_as_unknown_descending() -> None:
    pair = fetched(half_gone(), F.none(), group_order=DESCENDING)

    assert locations(pair.client.take(ObjectReceived)) == [(3, 2), (3, 3), (2, 0)]
    assert markers(pair) == [(None, (3, 1)), ((2, 1), (0, MAX_VI64))]


def test_a_range_that_was_let_go_altogether_is_one_marker() -> None:
    track = LocalTrack(NAME, retain=False)
    publish_group(track, 0, 3)
    for order in GroupOrder:
        pair = fetched(track, F.none(), group_order=order)

        assert pair.client.take(ObjectReceived) == []
        assert markers(pair) == [(None, (0, 2))]
        assert pair.client.one(FetchAccepted).end_location == (0, 2)


@pytest.mark.parametrize("order", GroupOrder)
def test_groups_opened_out_of_order_are_still_told_in_order(order: GroupOrder) -> None:
    track = LocalTrack(NAME, retain=False)
    publish_group(track, 5, 2)  # let go at once
    track.attach(Holding(3))
    track.open_subgroup(3).publish(1, payload_of(Location(3, 1)))
    pair = fetched(track, F.none(), group_order=order)

    assert locations(pair.client.take(ObjectReceived)) == [(3, 1)]
    ascending = [(None, (3, 0)), ((3, 2), (5, 1))]
    descending = [(None, (3, 0)), ((3, 2), (0, MAX_VI64))]
    assert markers(pair) == (ascending if order is GroupOrder.ASCENDING else descending)


def test_a_fill_ends_the_object_it_was_at_although_that_is_let_go_meanwhile() -> None:
    pair = Pair(server=SessionConfig(write_quantum=100))
    track = pair.server.publish(LocalTrack(NAME, retain=False))
    holder = Holding(0)
    track.attach(holder)
    publish_group(track, 0, 2, octets=5000)
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.server.budget = 100
    while not pair.data_streams(pair.server):
        pair.drain(pair.client)
        pair.drain(pair.server)
        pair.deliver_one()

    track.detach(holder)
    assert track.octets == 0
    pair.server.budget = 1 << 20
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [(0, 0)]
    assert markers(pair) == [((0, 1), (0, 1))]
    assert pair.client.one(FillEnded).complete


def test_a_byte_budget_tells_once_that_there_is_room() -> None:
    budget = ByteBudget(100)
    told: list[int] = []
    budget.take(150)
    budget.when_room(lambda: told.append(budget.used))
    assert not budget.has_room

    budget.give_back(40)
    assert told == []
    budget.give_back(40)
    budget.give_back(40)

    assert told == [70]


def test_memory_stays_flat_over_many_groups() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME, retain=False))
    pair.client.session.subscribe(NAME)
    pair.settle()
    for group in range(500):
        publish_group(track, group, 1)
        pair.settle()
        pair.log.clear()
        pair.client.seen.clear()

    [asked] = pair.server.take(SubscribeReceived)
    served = pair.server.session._requests.by_id[asked.request_id]
    assert (len(track._recent), len(track._groups), len(track._group_ends)) == (0, 0, 0)
    assert (len(served._live), len(served._flow_of)) == (0, 0)  # type: ignore[attr-defined]
    track.end()
    pair.settle()
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_refused_fetch_after_objects_leaves_nothing() -> None:
    peer = Lone(Role.CLIENT)
    request_id = peer.session.fetch(NAME, location_filter=F.none())
    peer.drain()
    stream_id = peer.last_stream()
    peer.data(peer.uni(), bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61"), fin=True)
    peer.say(stream_id, RequestError(RequestErrorCode.MALFORMED_TRACK), fin=True)

    assert [e.code for e in peer.seen(RequestRefused)] == [RequestErrorCode.MALFORMED_TRACK]
    assert peer.seen(FetchEnded) == []
    assert peer.session.open_requests == 0


def test_a_data_stream_that_was_reset_before_it_showed_itself_is_given_up() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(done_timeout_s=3.0))
    peer.session.fetch(NAME, location_filter=F.none())
    peer.drain()
    peer.reset(peer.uni())
    peer.say(peer.last_stream(), FetchOk(False, Location(0, 0)), fin=True)
    peer.later(2.9)
    assert peer.seen(FetchEnded) == []

    peer.later(0.2)

    assert [e.complete for e in peer.seen(FetchEnded)] == [False]
    assert peer.session.open_requests == 0
    assert peer.session.next_deadline() is None


def test_a_data_stream_that_has_shown_itself_may_take_its_time() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(done_timeout_s=3.0))
    request_id = peer.session.fetch(NAME, location_filter=F.none())
    peer.drain()
    peer.say(peer.last_stream(), FetchOk(False, Location(0, 0)), fin=True)
    data = peer.uni()
    peer.data(data, bytes([5, request_id]))
    peer.later(1000.0)
    peer.data(data, bytes.fromhex("1c 00 00 80 01 61"), fin=True)

    assert [e.complete for e in peer.seen(FetchEnded)] == [True]


@pytest.mark.parametrize("way", ["subscription", "fill", "fetch"])
def test_what_others_keep_in_immutable_properties_is_passed_on_and_not_obeyed(way: str) -> None:
    # Type 0x02 is a delivery timeout, of 1 ms here; of a sealed Object it is the Key ID.
    properties = ((0x0B, bytes.fromhex("0201")),)
    track, pair = LocalTrack(NAME), Pair()
    pair.server.publish(track)
    if way == "subscription":
        pair.client.session.subscribe(NAME)
        pair.settle()
    subgroup = track.open_subgroup(0, has_properties=True)
    subgroup.publish(0, b"sealed", properties=properties)
    subgroup.close()
    if way == "subscription":
        pair.now += 60  # before it was sent
    else:
        pair.advance(60)
    if way == "fill":
        pair.client.session.subscribe(NAME, fill=FROM_START)
    elif way == "fetch":
        pair.client.session.fetch(NAME, location_filter=F.none())
    pair.settle()

    [found] = pair.client.take(ObjectReceived)
    assert (found.payload, found.properties) == (b"sealed", properties)
