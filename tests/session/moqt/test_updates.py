"""REQUEST_UPDATE: priority, filters, pause and resume, a fill asked for later, and failure."""

from typing import Any

import pytest

from moqt.codepoints import ObjectStatus, PublishDoneCode, RequestErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.location import Location
from moqt.session.commands import ResetStream, SendStreamData
from moqt.session.config import SessionConfig
from moqt.session.events import (
    FillEnded,
    ObjectReceived,
    PeerRequestEnded,
    RequestId,
    SubscriptionEnded,
    UpdateAccepted,
    UpdateRefused,
    Via,
)
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.messages.request import RequestUpdate
from moqt.wire.parameters import Parameters
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)


def put(subgroup: LocalSubgroup, *object_ids: int) -> None:
    for object_id in object_ids:
        subgroup.publish(object_id, payload_of(Location(subgroup.group_id, object_id)))


def objects_only(*ranges: tuple[int, int | None]) -> RangeFilter:
    return RangeFilter(P.OBJECTID_FILTER, ranges=ranges)


def update(pair: Pair, request_id: RequestId, **values: object) -> RequestId:
    parameters = Parameters({P[name]: value for name, value in values.items()})
    return pair.client.session.update(request_id, parameters)


def subscribed(pair: Pair, track: LocalTrack, **options: Any) -> RequestId:
    pair.server.publish(track)
    request_id = pair.client.session.subscribe(NAME, **options)
    pair.settle()
    return request_id


def received(pair: Pair) -> list[Location]:
    return locations(pair.client.take(ObjectReceived))


def resets(pair: Pair) -> int:
    return sum(isinstance(c, ResetStream) for _, c in pair.log)


# -- answers ---------------------------------------------------------------------------------------


def test_each_update_is_answered_once_and_carries_the_largest_object() -> None:
    pair = Pair()
    request_id = subscribed(pair, make_track(1, 3, ended=False))
    update_ids = [update(pair, request_id, SUBSCRIBER_PRIORITY=n) for n in range(5)]

    pair.settle()

    answers = pair.client.take(UpdateAccepted)
    assert [(a.update_id, a.largest) for a in answers] == [(u, (0, 2)) for u in update_ids]


def test_an_empty_update_is_a_legal_sign_of_life() -> None:
    pair = Pair()
    request_id = subscribed(pair, LocalTrack(NAME))
    update(pair, request_id)

    pair.settle()

    assert pair.client.one(UpdateAccepted).largest is None


def test_more_updates_than_the_peer_takes_are_not_sent() -> None:
    pair = Pair(server=SessionConfig(max_request_updates=2))
    request_id = subscribed(pair, LocalTrack(NAME))
    update(pair, request_id)
    update(pair, request_id)

    with pytest.raises(UsageError, match="2 updates are unanswered"):
        update(pair, request_id)
    pair.settle()
    update(pair, request_id)
    pair.settle()

    assert len(pair.client.take(UpdateAccepted)) == 3


def test_no_limit_on_updates_means_none() -> None:
    pair = Pair(server=SessionConfig(max_request_updates=0))
    pair.server.answers = False
    pair.client.session.subscribe(NAME)
    pair.settle()
    request = pair.client.session._requests.by_id[RequestId(0)]
    for n in range(100):  # ahead of the answer, which this side does not do by itself
        request.send(RequestUpdate(1000 + 2 * n))
    pair.settle()

    assert pair.server.closed is None


def test_an_update_needs_an_established_subscription() -> None:
    pair = Pair()
    pair.server.answers = False
    request_id = pair.client.session.subscribe(NAME)

    with pytest.raises(UsageError, match="Established"):
        update(pair, request_id)
    with pytest.raises(UsageError, match="no subscription 99"):
        update(pair, RequestId(99))


def test_a_failed_update_ends_the_subscription_and_its_streams() -> None:
    pair = Pair(server=SessionConfig(max_filter_ranges=3))
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track, range_filters=[objects_only((0, 0), (2, 2))])
    put(track.open_subgroup(0), 0, 1, 2)
    pair.settle()
    # Two more ranges of another type: together with those in force they pass the limit.
    priorities = RangeFilter(P.PRIORITY_FILTER, ranges=((0, 1), (3, 4)))
    update_id = update(pair, request_id, PRIORITY_FILTER=priorities)

    pair.settle()

    refused = pair.client.one(UpdateRefused)
    assert (refused.update_id, refused.code) == (update_id, RequestErrorCode.INVALID_FILTER)
    ended = pair.client.one(SubscriptionEnded)
    assert (ended.code, ended.by_peer) == (PublishDoneCode.UPDATE_FAILED, True)
    assert pair.server.one(PeerRequestEnded).cancelled is False
    assert received(pair) == [(0, 0), (0, 2)]
    assert pair.leave_behind() == []


def test_an_update_that_replaces_filters_counts_only_what_is_in_force() -> None:
    pair = Pair(server=SessionConfig(max_filter_ranges=2))
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track, range_filters=[objects_only((0, 0), (2, 2))])
    update(pair, request_id, OBJECTID_FILTER=objects_only((1, 1), (3, 3)))
    pair.settle()
    put(track.open_subgroup(0), 0, 1, 2, 3)
    pair.settle()

    assert pair.client.take(UpdateRefused) == []
    assert received(pair) == [(0, 1), (0, 3)]


def test_filters_the_peer_would_refuse_are_not_sent() -> None:
    pair = Pair(server=SessionConfig(max_filter_ranges=1))
    request_id = subscribed(pair, LocalTrack(NAME))

    with pytest.raises(UsageError, match="2 filter ranges, limit 1"):
        update(pair, request_id, OBJECTID_FILTER=objects_only((0, 0), (2, 2)))
    with pytest.raises(UsageError, match="2 filter ranges, limit 1"):
        pair.client.session.subscribe(NAME, range_filters=[objects_only((0, 0), (2, 2))])


# -- filters ---------------------------------------------------------------------------------------


def test_a_range_filter_hides_objects_and_the_stream_still_ends_by_fin() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track, range_filters=[objects_only((1, 2), (5, None))])
    for group in range(2):
        publish_group(track, group, 7)
    track.end()
    pair.settle()

    assert received(pair) == [(g, o) for g in range(2) for o in (1, 2, 5, 6)]
    assert resets(pair) == 0
    assert pair.client.one(SubscriptionEnded).complete


def first_octets(pair: Pair) -> list[int]:
    """Return the type of every data stream that the server opened."""
    types: dict[int, int] = {}
    for end, command in pair.log:
        if end is pair.server and isinstance(command, SendStreamData):
            types.setdefault(command.stream_id, command.data[0])
    return [types[stream_id] for stream_id in pair.data_streams(pair.server)]


@pytest.mark.parametrize(
    ("options", "promised"),
    [
        ({}, [True, True]),
        ({"location_filter": LocationFilter.group_end(0, 0, 0)}, [False]),
        ({"location_filter": LocationFilter.range(0, 0, 1, 3)}, [True, False]),
        ({"range_filters": [objects_only((0, 9))]}, [False, False]),
    ],
)
def test_the_end_of_a_group_is_promised_only_where_no_filter_may_hide_it(
    options: dict[str, Any], promised: list[bool]
) -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track, **options)
    for group in range(2):
        publish_group(track, group, 3)
    pair.settle()

    assert [bool(octet & 0x08) for octet in first_octets(pair)] == promised


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (LocationFilter.none(), [(1, 1), (1, 2), *whole(5, 3)[6:]]),
        (LocationFilter.NEXT_OBJECT, [(1, 1), (1, 2), *whole(5, 3)[6:]]),
        (LocationFilter.relative(0), whole(5, 3)[6:]),
        (LocationFilter.relative(1), [(1, 1), (1, 2), *whole(5, 3)[6:]]),
        (LocationFilter.relative(100), [(1, 1), (1, 2), *whole(5, 3)[6:]]),
        (LocationFilter.absolute_start(3, 1), [(3, 1), (3, 2), *whole(5, 3)[12:]]),
        (LocationFilter.group_end(0, 0, 2), [(1, 1), (1, 2), *whole(5, 3)[6:9]]),
        (LocationFilter.range(1, 2, 3, 0), [(1, 2), *whole(5, 3)[6:10]]),
        (LocationFilter.group_end(0, 0, 0), []),
    ],
    ids=str,
)
def test_a_location_filter_lets_pass_what_it_says_of_the_future(
    wanted: LocationFilter, expected: list[tuple[int, int]]
) -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    publish_group(track, 0, 3)
    current = track.open_subgroup(1)
    put(current, 0)
    subscribed(pair, track, location_filter=wanted)
    put(current, 1, 2)
    current.close()
    for group in (2, 3, 4):
        publish_group(track, group, 3)
    track.end()
    pair.settle()

    assert received(pair) == expected
    assert resets(pair) == 0
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_objects_of_a_lower_group_pass_an_absolute_start_when_they_come_later() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    put(track.open_subgroup(5), 0)
    subscribed(pair, track, location_filter=FROM_START)
    put(track.open_subgroup(3), 0)
    pair.settle()

    assert received(pair) == [(3, 0)]


def test_a_changed_range_filter_applies_to_open_streams_and_loses_nothing() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0, 1)
    pair.held = lambda end, stream_id: end is pair.server and stream_id != 0
    pair.settle()
    update(pair, request_id, OBJECTID_FILTER=objects_only((3, 3)))
    pair.settle()
    put(subgroup, 2, 3, 4)
    pair.settle()
    update(pair, request_id, OBJECTID_FILTER=RangeFilter.removal(P.OBJECTID_FILTER))
    pair.settle()
    put(subgroup, 5)
    pair.held = lambda end, stream_id: False
    pair.settle()

    assert received(pair) == [(0, 0), (0, 1), (0, 3), (0, 5)]
    assert resets(pair) == 0


def test_a_stream_that_promised_an_end_now_hidden_is_given_up_for_another() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0, holds_end_of_group=True)
    put(subgroup, 0)
    pair.settle()
    update(pair, request_id, OBJECTID_FILTER=objects_only((0, 1)))
    pair.settle()
    put(subgroup, 1, 2)
    subgroup.close()
    track.end()
    pair.settle()

    assert received(pair) == [(0, 0), (0, 1)]
    assert [bool(octet & 0x08) for octet in first_octets(pair)] == [True, False]
    assert resets(pair) == 1
    assert pair.client.one(SubscriptionEnded).complete


def test_a_range_filter_does_not_move_the_location_range() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track, location_filter=LocationFilter.NEXT_OBJECT)
    pair.server.budget = 0
    put(track.open_subgroup(0), 0, 1, 2)
    update(pair, request_id, OBJECTID_FILTER=objects_only((1, 2)))
    pair.settle()
    pair.server.budget = 1 << 20
    pair.settle()

    assert received(pair) == [(0, 1), (0, 2)]


def test_a_location_filter_that_moves_on_skips_what_has_not_been_sent() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    pair.settle()
    pair.server.budget = 0
    put(subgroup, 1, 2, 3)
    publish_group(track, 1, 2)
    update(pair, request_id, LOCATION_FILTER=LocationFilter.absolute_start(0, 3))
    pair.settle()
    pair.server.budget = 1 << 20
    pair.settle()

    assert received(pair) == [(0, 0), (0, 3), (1, 0), (1, 1)]
    assert resets(pair) == 0


def test_a_location_filter_that_leaves_a_group_resets_its_streams() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    put(track.open_subgroup(0), 0)
    pair.settle()
    update(pair, request_id, LOCATION_FILTER=LocationFilter.absolute_start(1, 0))
    pair.settle()

    assert resets(pair) == 1
    publish_group(track, 1, 1)
    track.end()
    pair.settle()
    assert received(pair) == [(0, 0), (1, 0)]
    assert pair.client.one(SubscriptionEnded).complete


def test_a_narrow_range_can_be_widened_again() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track, location_filter=LocationFilter.range(0, 0, 0, 1))
    subgroup = track.open_subgroup(0)
    put(subgroup, 0, 1, 2)
    pair.settle()
    update(pair, request_id, LOCATION_FILTER=LocationFilter.none())
    pair.settle()
    put(subgroup, 3)
    publish_group(track, 1, 1)
    pair.settle()

    assert received(pair) == [(0, 0), (0, 1), (0, 3), (1, 0)]


# -- pause and resume ------------------------------------------------------------------------------


def test_a_pause_stops_objects_and_a_resume_goes_on_with_what_comes_then() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    pair.settle()
    update(pair, request_id, FORWARD=0)
    pair.settle()
    put(subgroup, 1, 2)
    publish_group(track, 1, 2)
    later = track.open_subgroup(2)
    put(later, 0)
    pair.settle()
    assert received(pair) == [(0, 0)]

    update(pair, request_id, FORWARD=1)
    pair.settle()
    put(subgroup, 3)
    put(later, 1)
    subgroup.close()
    later.close()
    publish_group(track, 3, 1)
    track.end()
    pair.settle()

    assert sorted(received(pair)) == [(0, 3), (2, 1), (3, 0)]
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_pause_that_skips_nothing_keeps_its_streams() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    pair.settle()
    for forward in (0, 1):
        update(pair, request_id, FORWARD=forward)
        pair.settle()
    put(subgroup, 1)
    pair.settle()

    assert received(pair) == [(0, 0), (0, 1)]
    assert (resets(pair), len(pair.data_streams(pair.server))) == (0, 1)


def test_a_stream_is_reset_when_a_pause_cuts_an_object() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = subscribed(pair, track)
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 10)
    subgroup.extend(begun, b"12345")
    pair.settle()
    update(pair, request_id, FORWARD=0)
    pair.settle()
    subgroup.extend(begun, b"67890")
    pair.settle()

    assert resets(pair) == 1
    assert received(pair) == []


def test_a_track_that_ends_during_a_pause_ends_the_subscription() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subscribed(pair, track, forward=False)
    publish_group(track, 0, 2)
    track.end()
    pair.settle()

    assert received(pair) == []
    assert pair.client.one(SubscriptionEnded).complete


# -- fills -----------------------------------------------------------------------------------------


def test_an_update_can_ask_for_a_fill() -> None:
    pair = Pair()
    track = make_track(3, 2, ended=False)
    request_id = subscribed(pair, track)
    fill = FillParameters(Parameters({P.LOCATION_FILTER: LocationFilter.relative(2)}))
    update_id = update(pair, request_id, FILL_PARAMETERS=fill)
    pair.settle()

    assert pair.client.one(UpdateAccepted).fill_expected
    assert pair.client.one(FillEnded).fill_id == update_id
    assert received(pair) == whole(3, 2)[2:]


def test_a_fill_asked_for_in_a_pause_is_none_and_one_with_the_resume_is_served() -> None:
    pair = Pair()
    track = make_track(2, 2, ended=False)
    request_id = subscribed(pair, track, forward=False)
    fill = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START}))
    update(pair, request_id, FILL_PARAMETERS=fill)
    pair.settle()
    assert pair.client.one(UpdateAccepted).fill_expected is False
    assert pair.data_streams(pair.server) == []

    update(pair, request_id, FILL_PARAMETERS=fill, FORWARD=1)
    pair.settle()

    assert pair.client.one(UpdateAccepted).fill_expected
    assert received(pair) == whole(2, 2)


def test_a_fill_has_filters_of_its_own_over_those_of_the_subscription() -> None:
    pair = Pair()
    track = make_track(1, 6, ended=False)
    inner = Parameters({P.LOCATION_FILTER: FROM_START, P.OBJECTID_FILTER: objects_only((2, 3))})
    subscribed(
        pair, track, fill=FillParameters(inner), range_filters=[objects_only((0, 0), (4, 4))]
    )
    publish_group(track, 1, 6)
    pair.settle()

    objects = pair.client.take(ObjectReceived)
    assert locations(e for e in objects if e.via is Via.FILL) == [(0, 2), (0, 3)]
    assert locations(e for e in objects if e.via is Via.SUBGROUP) == [(1, 0), (1, 4)]


def test_a_fill_without_a_filter_takes_that_of_the_subscription() -> None:
    pair = Pair()
    track = make_track(3, 2, ended=False)
    subscribed(
        pair,
        track,
        location_filter=LocationFilter.absolute_start(1, 1),
        fill=FillParameters(Parameters()),
    )

    assert received(pair) == [(1, 1), (2, 0), (2, 1)]


def test_statuses_are_not_part_of_a_fill() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    subgroup = track.open_subgroup(0)
    put(subgroup, 0)
    subgroup.publish(1, status=ObjectStatus.END_OF_GROUP)
    subgroup.close()
    subscribed(pair, track, fill=FROM_START)

    assert [e.status for e in pair.client.take(ObjectReceived)] == [ObjectStatus.NORMAL]
    assert pair.client.one(FillEnded).complete


def test_fills_in_descending_order_come_group_by_group() -> None:
    pair = Pair()
    track = make_track(3, 2, ended=False)
    inner = Parameters({P.LOCATION_FILTER: FROM_START, P.GROUP_ORDER: 2})
    subscribed(pair, track, fill=FillParameters(inner))

    assert received(pair) == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
