"""How a subscription ends: PUBLISH_DONE and its streams, in any order; cancels; limits of ours."""

import pytest

from moqt.codepoints import (
    MAX_VI64,
    ObjectStatus,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.errors import UsageError
from moqt.location import Location
from moqt.session.commands import ReleaseCredit, ResetStream, SendStreamData, StopSending
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    FillEnded,
    ObjectReceived,
    PeerRequestEnded,
    RequestRefused,
    StreamDiscarded,
    SubscribeAccepted,
    SubscribeReceived,
    SubscriptionEnded,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.subscribe import PublishDone, SubscribeOk
from tests.session.lone import Lone
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)
ENDED = PublishDoneCode.TRACK_ENDED
ONE_OBJECT = bytes.fromhex("10 07 00 80 00 01 61")


def done(peer: Lone, stream_id: int, count: int) -> None:
    peer.say(stream_id, PublishDone(ENDED, count), fin=True)


# -- the publisher's count -------------------------------------------------------------------------


def test_every_stream_counts_the_fill_and_empty_ones_too() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(3, 2, ended=False))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    for group in (3, 4):
        publish_group(track, group, 2)
    cut_off = track.open_subgroup(5)
    cut_off.publish(0, payload_of(Location(5, 0)))
    pair.settle()
    track.end()
    pair.settle()

    [sent] = [
        bytes(c.data)
        for end, c in pair.log
        if end is pair.server and isinstance(c, SendStreamData) and c.stream_id == 0 and c.fin
    ]
    assert sent == encode_message(PublishDone(ENDED, 4))
    assert len(pair.data_streams(pair.server)) == 4
    assert pair.client.one(SubscriptionEnded).complete


def test_publish_done_leaves_after_the_last_stream_and_with_fin() -> None:
    pair = Pair()
    pair.server.publish(make_track(3, 2))
    pair.client.session.subscribe(NAME, fill=FROM_START)

    pair.settle()

    last = [c for end, c in pair.log if end is pair.server and isinstance(c, SendStreamData)][-1]
    assert (last.stream_id, last.fin) == (0, True)


@pytest.mark.parametrize("held", range(4))
def test_the_end_waits_for_a_stream_that_is_late(held: int) -> None:
    pair = Pair()
    pair.server.publish(make_track(1, 2, ended=False))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    streams = [7, 11, 15, 19]
    pair.held = lambda end, stream_id: stream_id == streams[held]
    pair.settle()
    track = pair.server.tracks[NAME]
    for group in (1, 2, 3):
        publish_group(track, group, 2)
    track.end()
    pair.settle()
    assert pair.client.take(SubscriptionEnded) == []

    pair.held = lambda end, stream_id: False
    pair.settle()

    assert pair.client.one(SubscriptionEnded).complete
    assert sorted(locations(pair.client.take(ObjectReceived))) == whole(4, 2)
    assert pair.leave_behind() == []


def test_publish_done_may_be_the_first_to_arrive() -> None:
    pair = Pair()
    pair.server.publish(make_track(3, 2))
    pair.held = lambda end, stream_id: stream_id > 4
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    assert pair.client.take(SubscribeAccepted)

    pair.held = lambda end, stream_id: False
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == whole(3, 2)
    assert pair.client.one(SubscriptionEnded).complete


# -- the subscriber's patience ---------------------------------------------------------------------


def test_streams_that_never_come_end_it_incomplete_after_the_timer() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(done_timeout_s=3.0))
    _, stream_id = peer.subscribed(7)
    peer.data(peer.uni(), ONE_OBJECT, fin=True)
    done(peer, stream_id, 2)

    peer.later(2.9)
    assert peer.seen(SubscriptionEnded) == []
    peer.later(0.2)

    [ended] = peer.seen(SubscriptionEnded)
    assert (ended.code, ended.complete, ended.by_peer) == (ENDED, False, True)
    assert peer.session.open_requests == 0
    peer.assert_alive()


def test_a_stream_that_stays_open_is_stopped_then() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(done_timeout_s=3.0))
    _, stream_id = peer.subscribed(7)
    late = peer.uni()
    peer.data(late, ONE_OBJECT)
    for event in peer.seen(ObjectReceived):
        peer.session.consumed(event)
    done(peer, stream_id, 1)

    peer.later(3.1)
    peer.later(3.1)

    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [False]
    assert StopSending(late, StreamErrorCode.CANCELLED) in peer.commands


def test_the_timer_waits_as_long_as_something_comes_or_waits_to_be_taken() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(done_timeout_s=3.0))
    _, stream_id = peer.subscribed(7)
    slow = peer.uni()
    peer.data(slow, bytes.fromhex("10 07 00 80"))
    done(peer, stream_id, 1)
    for octet in bytes.fromhex("00 04 61 61 61 61 00 01 61"):
        peer.later(2.0)
        peer.data(slow, bytes([octet]))
    peer.later(100.0)  # two Objects have not been taken: the peer may be held up by that
    assert peer.seen(SubscriptionEnded) == []

    for event in peer.seen(ObjectReceived):
        peer.session.consumed(event)
    peer.data(slow, b"", fin=True)

    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]


def test_an_unknown_count_ends_by_the_timer_and_is_complete_if_nothing_is_open() -> None:
    peer = Lone(Role.CLIENT)
    _, stream_id = peer.subscribed(7)
    peer.data(peer.uni(), ONE_OBJECT, fin=True)
    done(peer, stream_id, MAX_VI64)
    assert peer.seen(SubscriptionEnded) == []

    peer.later(11.0)

    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]


def test_a_reset_stream_counts_as_seen() -> None:
    peer = Lone(Role.CLIENT)
    _, stream_id = peer.subscribed(7)
    broken = peer.uni()
    peer.data(broken, bytes.fromhex("10 07 00 80 00 05 61"))
    done(peer, stream_id, 1)

    peer.reset(broken, 2)

    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]


# -- giving up -------------------------------------------------------------------------------------


def test_a_cancel_resets_every_stream_and_nothing_is_left_behind() -> None:
    pair = Pair(chunk=10)
    track = pair.server.publish(make_track(3, 50, ended=False))
    request_id = pair.client.session.subscribe(NAME, fill=FROM_START)
    for _ in range(40):
        pair.drain(pair.client)
        pair.drain(pair.server)
        pair.deliver_one()
    open_one = track.open_subgroup(3)
    open_one.publish(0, payload_of(Location(3, 0)))

    pair.client.session.cancel(request_id)
    pair.settle()
    open_one.publish(1, payload_of(Location(3, 1)))
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled
    assert pair.client.take(SubscriptionEnded) == []
    assert pair.leave_behind() == []
    assert pair.open_streams() == []
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    assert len(pair.client.take(ObjectReceived)) >= 152


def test_a_cancel_ahead_of_the_answer_is_enough() -> None:
    pair = Pair()
    pair.server.answers = False
    pair.server.publish(make_track(1))
    request_id = pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)

    pair.client.session.cancel(request_id)
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled
    assert pair.server.session.accept_subscribe(asked.request_id, make_track(1)) is False
    assert pair.server.session.reject(asked.request_id, RequestErrorCode.TIMEOUT) is False
    assert pair.leave_behind() == []


def test_the_publisher_can_end_it_although_the_track_goes_on() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    track.open_subgroup(0).publish(0, payload_of(Location(0, 0)))
    pair.client.session.subscribe(NAME)
    pair.settle()
    track.open_subgroup(1).publish(0, payload_of(Location(1, 0)))
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)

    assert pair.server.session.end_subscription(
        asked.request_id, PublishDoneCode.TOO_FAR_BEHIND, "é" * 2000
    )
    pair.settle()

    ended = pair.client.one(SubscriptionEnded)
    assert (ended.code, ended.reason) == (PublishDoneCode.TOO_FAR_BEHIND, "é" * 512)
    assert pair.server.session.end_subscription(asked.request_id, ENDED) is False
    assert pair.leave_behind() == []


def test_a_revoked_subscription_ends_without_publish_done() -> None:
    pair = Pair()
    pair.server.publish(make_track(1, ended=False))
    pair.client.session.subscribe(NAME)
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)

    pair.server.session.cancel(asked.request_id)
    pair.settle()

    ended = pair.client.one(SubscriptionEnded)
    assert (ended.code, ended.by_peer) == (PublishDoneCode.INTERNAL_ERROR, True)
    assert pair.leave_behind() == []


def test_one_stopped_stream_ends_alone() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.session.subscribe(NAME)
    pair.settle()
    first, second = track.open_subgroup(0), track.open_subgroup(1)
    first.publish(0, payload_of(Location(0, 0)))
    second.publish(0, payload_of(Location(1, 0)))
    pair.settle()

    pair.stop(pair.client, pair.data_streams(pair.server)[0])
    first.publish(1, payload_of(Location(0, 1)))
    second.publish(1, payload_of(Location(1, 1)))
    first.close()
    second.close()
    track.end()
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [(0, 0), (1, 0), (1, 1)]
    assert len(pair.data_streams(pair.server)) == 2  # not opened again
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_stopped_fill_leaves_the_subscription_alone() -> None:
    pair = Pair(chunk=10)
    track = pair.server.publish(make_track(2, 50, ended=False))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    while not pair.data_streams(pair.server):
        pair.drain(pair.client)
        pair.drain(pair.server)
        pair.deliver_one()
    [fill] = pair.data_streams(pair.server)
    for _ in range(20):
        pair.deliver_one()

    pair.stop(pair.client, fill, StreamErrorCode.CANCELLED)
    pair.settle()
    publish_group(track, 2, 1)
    track.end()
    pair.settle()

    assert pair.client.one(FillEnded).complete is False
    assert locations(pair.client.take(ObjectReceived))[-1] == Location(2, 0)
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_track_that_is_dropped_resets_what_was_not_sent() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(2, 50))
    pair.server.budget = 0
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()

    track.drop()
    pair.server.budget = 1 << 20
    pair.settle()

    assert pair.client.take(ObjectReceived) == []
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


# -- answers ---------------------------------------------------------------------------------------


def test_no_answer_in_time_is_a_timeout_of_the_publisher() -> None:
    pair = Pair(server=SessionConfig(answer_timeout_s=2.0))
    pair.server.answers = False
    session = pair.client.session
    session.subscribe(NAME, fill=FROM_START)
    session.fetch(NAME, location_filter=FROM_START)
    session.track_status(NAME)
    session.publish_namespace(NAME.namespace)
    session.subscribe_namespace(NAME.namespace)
    pair.settle()

    pair.advance(1.9)
    assert pair.client.take(RequestRefused) == []
    pair.advance(0.2)

    assert [e.code for e in pair.client.take(RequestRefused)] == [RequestErrorCode.TIMEOUT] * 5
    assert [e.cancelled for e in pair.server.take(PeerRequestEnded)] == [False] * 5
    assert pair.leave_behind() == []


def test_a_refusal_carries_its_code_reason_and_retry_interval() -> None:
    pair = Pair()
    pair.server.answers = False
    request_id = pair.client.session.subscribe(NAME)
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)

    pair.server.session.reject(
        asked.request_id, RequestErrorCode.EXCESSIVE_LOAD, "x" * 3000, retry_ms=0
    )
    pair.settle()

    assert pair.client.one(RequestRefused) == RequestRefused(
        request_id=request_id,
        code=RequestErrorCode.EXCESSIVE_LOAD,
        reason="x" * 1024,
        retry_ms=0,
    )
    assert pair.leave_behind() == []


def test_a_second_answer_is_a_mistake_of_the_application() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, ended=False))
    pair.client.session.subscribe(NAME)
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)

    with pytest.raises(UsageError, match="has been answered"):
        pair.server.session.accept_subscribe(asked.request_id, track)
    with pytest.raises(UsageError, match="is a SUBSCRIBE"):
        pair.server.session.accept_fetch(asked.request_id, track)


def test_more_requests_than_we_serve_are_refused_and_ours_do_not_count() -> None:
    pair = Pair(server=SessionConfig(max_requests=2, authority="x"))
    pair.server.publish(make_track(1, ended=False))
    for _ in range(5):
        pair.server.session.track_status(NAME)
    pair.client.answers = False
    for _ in range(3):
        pair.client.session.subscribe(NAME)

    pair.settle()

    assert [e.code for e in pair.client.take(RequestRefused)] == [RequestErrorCode.EXCESSIVE_LOAD]


# -- limits of the subscriber ----------------------------------------------------------------------


def test_an_application_that_falls_behind_loses_its_subscription_and_no_other() -> None:
    pair = Pair(client=SessionConfig(max_subscription_octets=10_000))
    track = pair.server.publish(LocalTrack(NAME))
    other = pair.server.publish(
        make_track(1, 1, ended=False, name=type(NAME)(NAME.namespace, b"other"))
    )
    pair.client.consumes = False
    request_id = pair.client.session.subscribe(NAME)
    pair.client.session.subscribe(other.name)
    pair.settle()

    for group in range(20):
        publish_group(track, group, 1, octets=1000)
        pair.settle()

    ended = pair.client.one(SubscriptionEnded)
    assert (ended.request_id, ended.code) == (request_id, PublishDoneCode.TOO_FAR_BEHIND)
    assert pair.server.one(PeerRequestEnded).cancelled
    objects = pair.client.take(ObjectReceived)
    assert len(objects) == 11
    publish_group(other, 1, 1)
    pair.settle()
    assert locations(pair.client.take(ObjectReceived)) == [Location(1, 0)]
    for event in objects:
        pair.client.session.consumed(event)
    pair.settle()
    assert pair.unreleased(pair.client) == 64  # the other subscription's Object


def test_one_object_above_the_limit_is_let_through() -> None:
    pair = Pair(client=SessionConfig(max_subscription_octets=10_000))
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.consumes = False
    pair.client.session.subscribe(NAME)
    pair.settle()

    publish_group(track, 0, 1, octets=50_000)
    pair.settle()

    assert len(pair.client.take(ObjectReceived)) == 1
    assert pair.client.take(SubscriptionEnded) == []


def test_an_object_that_is_too_large_costs_its_stream_and_counts_as_reset() -> None:
    pair = Pair(client=SessionConfig(max_object_octets=1000), chunk=300)
    track = pair.server.publish(make_track(1, 2, ended=False))
    subgroup = track.open_subgroup(1)
    subgroup.publish(0, payload_of(Location(1, 0)))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()

    subgroup.publish(1, bytes(1001))
    publish_group(track, 2, 2, octets=1000)
    subgroup.close()
    track.end()
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == [*whole(1, 2), (1, 0), (2, 0), (2, 1)]
    assert len(pair.client.take(StreamDiscarded)) == 1
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_too_many_unfinished_objects_cost_the_stream_that_passes_the_limit() -> None:
    pair = Pair(client=SessionConfig(max_partial_octets=10_000), chunk=1000)
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.session.subscribe(NAME)
    pair.settle()
    for group in range(3):
        subgroup = track.open_subgroup(group)
        subgroup.extend(subgroup.begin(0, 6000), bytes(4000))

    pair.settle()

    [discarded] = pair.client.take(StreamDiscarded)
    assert discarded.stream_id == pair.data_streams(pair.server)[2]
    assert pair.client.take(SubscriptionEnded) == []


def test_an_alias_shared_by_two_subscriptions_outlives_the_first() -> None:
    peer = Lone(Role.CLIENT)
    first, _ = peer.subscribed(7)
    second, _ = peer.subscribed(7)
    peer.data(peer.uni(), ONE_OBJECT, fin=True)
    peer.session.cancel(first)
    peer.data(peer.uni(), ONE_OBJECT, fin=True)
    peer.session.cancel(second)
    peer.data(peer.uni(), ONE_OBJECT, fin=True)

    assert [e.request_id for e in peer.seen(ObjectReceived)] == [first, second]
    peer.assert_alive()


def test_an_alias_may_be_used_again_for_another_subscription() -> None:
    peer = Lone(Role.CLIENT)
    first, stream_id = peer.subscribed(7)
    done(peer, stream_id, 0)
    second = peer.session.subscribe(type(NAME)(NAME.namespace, b"other"))
    peer.drain()
    peer.say(peer.last_stream(), SubscribeOk(7))
    peer.data(peer.uni(), ONE_OBJECT, fin=True)

    assert first != second
    assert [e.request_id for e in peer.seen(ObjectReceived)] == [second]


def test_statuses_reach_the_application_as_objects() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.session.subscribe(NAME)
    pair.settle()
    subgroup = track.open_subgroup(0, holds_end_of_group=True)
    subgroup.publish(0, b"")
    subgroup.publish(1, status=ObjectStatus.END_OF_GROUP)
    subgroup.close()
    last = track.open_subgroup(1)
    last.publish(0, status=ObjectStatus.END_OF_TRACK)
    last.close()
    pair.settle()

    assert [(e.location, e.status) for e in pair.client.take(ObjectReceived)] == [
        ((0, 0), ObjectStatus.NORMAL),
        ((0, 1), ObjectStatus.END_OF_GROUP),
        ((1, 0), ObjectStatus.END_OF_TRACK),
    ]
    assert pair.client.take(SubscriptionEnded) == []


def test_a_reset_request_stream_takes_its_data_streams_with_it() -> None:
    peer = Lone(Role.CLIENT)
    _, stream_id = peer.subscribed(7)
    data = peer.uni()
    peer.data(data, ONE_OBJECT)

    peer.reset(stream_id, 4)

    [ended] = peer.seen(SubscriptionEnded)
    assert (ended.complete, ended.by_peer) == (False, True)
    assert StopSending(data, StreamErrorCode.CANCELLED) in peer.commands
    assert ResetStream(stream_id, StreamErrorCode.CANCELLED) in peer.commands
    assert ReleaseCredit(data, 6) in peer.commands
    peer.session.consumed(peer.seen(ObjectReceived)[0])
    peer.drain()
    assert peer.commands[-1] == ReleaseCredit(data, 1)
