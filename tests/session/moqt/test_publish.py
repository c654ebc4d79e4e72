"""PUBLISH, both roles: a subscription that its publisher begins."""

import random

import pytest

from moqt.codepoints import GroupOrder, MessageType, ObjectStatus, PublishDoneCode, RequestErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import CloseSession, ResetStream, SendStreamData, StreamId
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    FillEnded,
    ObjectReceived,
    PeerRequestEnded,
    PublicationEnded,
    PublishAccepted,
    PublishReceived,
    RequestId,
    RequestRefused,
    StateNotified,
    StreamDiscarded,
    SubscriptionEnded,
    UpdateAccepted,
    UpdateRefused,
    Via,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.framing import MessageBuffer, encode_message
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.subscribe import PublishDone
from moqt.wire.parameters import Parameters
from tests.session.lone import Lone
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

ENDED = PublishDoneCode.TRACK_ENDED
FROM_START = FillParameters(Parameters({P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)}))


def offered(
    pair: Pair, track: LocalTrack, *, answers: bool = True, forward: bool = True
) -> RequestId:
    """Have the server publish to the client."""
    pair.client.answers = answers
    request_id = pair.server.session.publish(track, forward=forward)
    pair.settle()
    return request_id


def received(pair: Pair) -> list[Location]:
    return sorted(locations(pair.client.take(ObjectReceived)))


def update(pair: Pair, request_id: RequestId, **values: object) -> RequestId:
    parameters = Parameters({P[name]: value for name, value in values.items()})
    return pair.client.session.update(request_id, parameters)


def done_counts(pair: Pair) -> list[int]:
    """Return the Stream Count of each PUBLISH_DONE that the server sent."""
    buffer = MessageBuffer()
    for end, command in pair.log:
        if end is pair.server and isinstance(command, SendStreamData) and not command.stream_id & 2:
            buffer.feed(bytes(command.data))
    said = buffer.messages(MessageType.PUBLISH)
    return [message.stream_count for message in said if isinstance(message, PublishDone)]


# -- accepted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_an_accepted_publish_brings_what_is_published_from_then_on(chunk: int) -> None:
    pair = Pair(chunk=chunk)
    track = make_track(2, 3, ended=False, properties=((0x3800, 7),))
    request_id = offered(pair, track)

    asked = pair.client.one(PublishReceived)
    assert (asked.request_id, asked.track, asked.largest) == (request_id, NAME, (1, 2))
    assert (asked.is_paused, asked.track_properties) == (False, ((0x3800, 7),))
    assert pair.server.one(PublishAccepted).request_id == request_id
    for group in (2, 3):
        publish_group(track, group, 3)
        pair.settle()
    track.end(reason="all")
    pair.settle()

    assert received(pair) == whole(4, 3)[6:]
    ended = pair.client.one(SubscriptionEnded)
    assert (ended.request_id, ended.code, ended.reason) == (request_id, ENDED, "all")
    assert (ended.complete, ended.by_peer) == (True, True)
    assert pair.server.one(PublicationEnded).code is ENDED
    assert done_counts(pair) == [2]
    assert pair.leave_behind() == []


def test_the_messages_are_those_of_the_draft() -> None:
    pair = Pair()
    track = make_track(1, 2, ended=False)
    offered(pair, track, forward=False)

    sent = {end.role: bytes(c.data) for end, c in pair.log if isinstance(c, SendStreamData)}
    parameters = {
        P.LARGEST_OBJECT: Location(0, 1),
        P.FORWARD: 0,
        P.GROUP_ORDER: GroupOrder.ASCENDING,
    }
    assert sent == {
        Role.SERVER: encode_message(Publish(1, NAME, 1, Parameters(parameters))),
        Role.CLIENT: encode_message(RequestOk()),
    }


def test_a_client_may_publish_to_a_server() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    pair.client.session.publish(track)
    publish_group(track, 0, 2)
    track.end()
    pair.settle()

    assert locations(pair.server.take(ObjectReceived)) == whole(1, 2)
    assert pair.server.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_objects_flow_ahead_of_the_answer_and_are_kept_for_it() -> None:
    pair = Pair(chunk=5)
    track = LocalTrack(NAME)
    request_id = offered(pair, track, answers=False)
    publish_group(track, 0, 3)
    pair.settle()
    assert received(pair) == []

    pair.client.session.accept_publish(request_id)
    pair.settle()

    assert received(pair) == whole(1, 3)
    assert pair.server.take(PublicationEnded) == []


def test_a_track_that_has_ended_before_the_answer_is_whole_for_who_takes_it() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track, answers=False)
    publish_group(track, 0, 3)
    track.end()
    pair.settle()
    assert pair.server.take(PublicationEnded) == [], "the answer is waited for"

    pair.client.session.accept_publish(request_id)
    pair.settle()

    assert received(pair) == whole(1, 3)
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_publish_done_ahead_of_the_answer_is_kept_for_it() -> None:
    # This publisher does not wait, as it may.
    peer = Lone(Role.CLIENT)
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 7), PublishDone(ENDED, 1), fin=True)
    [asked] = peer.seen(PublishReceived)
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80 00 01 61"), fin=True)
    assert peer.seen(SubscriptionEnded) == []

    peer.session.accept_publish(asked.request_id)
    peer.drain()

    assert [e.payload for e in peer.seen(ObjectReceived)] == [b"a"]
    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]
    assert peer.session.open_requests == 0


def test_publish_done_by_the_application_needs_no_answer() -> None:
    pair = Pair()
    request_id = offered(pair, LocalTrack(NAME), answers=False)

    pair.server.session.end_subscription(request_id, PublishDoneCode.EXPIRED, "too late")
    pair.settle()
    assert pair.server.one(PublicationEnded).code is PublishDoneCode.EXPIRED
    pair.client.session.accept_publish(request_id)
    pair.settle()

    assert pair.client.one(SubscriptionEnded).code is PublishDoneCode.EXPIRED
    assert pair.server.take(PublishAccepted) == []
    assert pair.leave_behind() == []


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_a_fill_behind_the_answer_makes_each_object_come_exactly_once(
    seed: int, forward: bool
) -> None:
    rng = random.Random(seed)
    pair = Pair(chunk=rng.choice([3, 50, 1 << 20]), rng=rng)
    track = make_track(3, 2, ended=False)
    accept_at = rng.randrange(3)
    request_id = offered(pair, track, answers=False, forward=forward)
    # What flows from the start begins behind the Largest Object that the PUBLISH tells.
    past = LocationFilter.range(0, 0, 2, 1) if forward else LocationFilter.absolute_start(0, 0)
    fill = FillParameters(Parameters({P.LOCATION_FILTER: past}))

    for step in range(3):
        if step == accept_at:
            pair.client.session.accept_publish(request_id)
            update(pair, request_id, FORWARD=1, FILL_PARAMETERS=fill)
        for _ in range(rng.randrange(12)):
            pair.drain(rng.choice(pair.ends))
            pair.deliver_one()
        publish_group(track, 3 + step, 2)
    pair.settle()
    track.end()
    pair.settle()

    assert received(pair) == whole(6, 2)
    assert pair.client.one(FillEnded).complete
    assert pair.client.one(SubscriptionEnded).complete
    assert pair.leave_behind() == []


def test_a_fill_counts_in_publish_done_and_names_the_update() -> None:
    pair = Pair()
    track = make_track(2, 2, ended=False)
    request_id = offered(pair, track)
    update_id = update(pair, request_id, FILL_PARAMETERS=FROM_START)
    pair.settle()
    publish_group(track, 2, 2)
    track.end()
    pair.settle()

    assert pair.client.one(UpdateAccepted).fill_expected
    assert pair.client.one(FillEnded).fill_id == update_id
    fills = [e.location for e in pair.client.take(ObjectReceived) if e.via is Via.FILL]
    assert fills == whole(2, 2)
    assert done_counts(pair) == [2]


# -- paused, updated -------------------------------------------------------------------------------


def test_a_paused_publish_sends_nothing_until_the_subscriber_wants_it() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track, forward=False)
    assert pair.client.one(PublishReceived).is_paused
    publish_group(track, 0, 2)
    pair.settle()
    assert received(pair) == []

    update(pair, request_id, FORWARD=1)
    pair.settle()
    publish_group(track, 1, 2)
    track.end()
    pair.settle()

    assert received(pair) == whole(2, 2)[2:]
    assert pair.client.one(UpdateAccepted).largest == (0, 1)
    assert done_counts(pair) == [1]


def test_the_subscriber_pauses_it_and_filters_it() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track)
    update(pair, request_id, FORWARD=0)
    pair.settle()
    publish_group(track, 0, 2)
    pair.settle()
    even = RangeFilter(P.OBJECTID_FILTER, ranges=((0, 0), (2, 2)))
    update(pair, request_id, FORWARD=1, OBJECTID_FILTER=even)
    pair.settle()
    publish_group(track, 1, 4)
    track.end()
    pair.settle()

    assert received(pair) == [(1, 0), (1, 2)]
    assert pair.client.one(SubscriptionEnded).complete


def test_a_bad_update_ends_it_update_failed() -> None:
    pair = Pair(server=SessionConfig(max_filter_ranges=2))
    track = LocalTrack(NAME)
    request_id = offered(pair, track)
    bad = RangeFilter(P.OBJECTID_FILTER, ranges=((0, 0), (2, 2), (4, 4)))
    setup = pair.client.session.peer_setup
    assert setup is not None
    with pytest.raises(UsageError):
        update(pair, request_id, OBJECTID_FILTER=bad)
    request = pair.client.session._requests.by_id[request_id]
    request.send(RequestUpdate(20, Parameters({P.OBJECTID_FILTER: bad})))
    request._updates.append((RequestId(20), Parameters()))  # type: ignore[attr-defined]
    pair.settle()

    assert pair.client.one(UpdateRefused).code == RequestErrorCode.INVALID_FILTER
    assert pair.client.one(SubscriptionEnded).code is PublishDoneCode.UPDATE_FAILED
    assert pair.server.one(PublicationEnded).code is PublishDoneCode.UPDATE_FAILED
    assert pair.leave_behind() == []


@pytest.mark.parametrize("begun_by", ["PUBLISH", "SUBSCRIBE"])
def test_the_largest_object_can_be_told_to_who_is_paused(begun_by: str) -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    if begun_by == "PUBLISH":
        request_id = offered(pair, track, forward=False)
    else:
        request_id = pair.client.session.subscribe(NAME, forward=False)
        pair.settle()
    publish_group(track, 4, 2)

    assert pair.server.session.notify_state(request_id)
    pair.settle()

    told = pair.client.one(StateNotified)
    assert told.request_id == request_id
    assert told.parameters == {P.LARGEST_OBJECT: Location(4, 1)}


def test_there_is_no_state_to_tell_of_what_is_over_or_not_served() -> None:
    pair = Pair()
    pair.server.answers = False
    pending = pair.client.session.subscribe(NAME)
    pair.settle()

    assert not pair.server.session.notify_state(pending)
    assert not pair.server.session.end_subscription(pending, ENDED)
    assert not pair.server.session.notify_state(RequestId(99))


# -- refused, cancelled, lost ----------------------------------------------------------------------


def test_a_refused_publish_ends_its_streams_and_leaves_nothing() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track, answers=False)
    open_subgroup = track.open_subgroup(0)
    open_subgroup.publish(0, payload_of(Location(0, 0)))
    pair.settle()

    pair.client.session.reject(request_id, RequestErrorCode.UNINTERESTED, "no", retry_ms=5)
    pair.settle()
    open_subgroup.publish(1, payload_of(Location(0, 1)))
    pair.settle()

    refused = pair.server.one(RequestRefused)
    assert (refused.code, refused.reason) == (RequestErrorCode.UNINTERESTED, "no")
    assert received(pair) == []
    assert pair.server.take(PublicationEnded) == []
    assert not track.is_watched
    assert not track._readers
    assert pair.leave_behind() == []


def test_an_unanswered_publish_is_refused_in_time() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track, answers=False)
    publish_group(track, 0, 1)
    pair.settle()
    pair.advance(11.0)
    assert len(pair.client.take(StreamDiscarded)) == 1, "parked streams do not wait as long"
    pair.advance(20.0)

    assert pair.server.one(RequestRefused).code == RequestErrorCode.TIMEOUT
    ended = pair.client.one(PeerRequestEnded)
    assert (ended.request_id, ended.cancelled) == (request_id, False)
    assert pair.client.session.accept_publish(request_id) is False
    pair.settle()
    assert pair.leave_behind() == []


def test_the_subscriber_cancels_and_the_publisher_resets_every_stream() -> None:
    pair = Pair()
    track = make_track(1, 500, ended=False)
    request_id = offered(pair, track)
    held = track.open_subgroup(1)
    held.publish(0, payload_of(Location(1, 0)))
    pair.settle()

    pair.client.session.cancel(request_id)
    pair.settle()

    ended = pair.server.one(PublicationEnded)
    assert (ended.request_id, ended.code) == (request_id, None)
    assert len(pair.client.take(SubscriptionEnded)) == 0
    streams = [pair.server.outgoing[s] for s in pair.data_streams(pair.server)]
    assert [stream.reset is not None for stream in streams] == [True]
    assert not track.is_watched
    assert pair.leave_behind() == []


def test_a_subscriber_may_turn_away_without_an_answer() -> None:
    pair = Pair()
    request_id = offered(pair, LocalTrack(NAME), answers=False)

    pair.client.session.cancel(request_id)
    pair.settle()

    assert pair.server.one(RequestRefused).code == RequestErrorCode.INTERNAL_ERROR
    assert pair.leave_behind() == []


@pytest.mark.parametrize("answered", [True, False])
def test_the_publisher_may_give_it_up(answered: bool) -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    request_id = offered(pair, track, answers=answered)
    track.open_subgroup(0).publish(0, b"x")
    pair.settle()

    pair.server.session.cancel(request_id)
    pair.settle()

    assert pair.server.take(PublicationEnded) == []
    if answered:
        ended = pair.client.one(SubscriptionEnded)
        assert (ended.code, ended.complete) == (PublishDoneCode.INTERNAL_ERROR, False)
    else:
        assert pair.client.one(PeerRequestEnded).cancelled
    assert pair.leave_behind() == []


@pytest.mark.parametrize("answered", [True, False])
def test_a_fin_without_publish_done_is_a_failure(answered: bool) -> None:
    peer = Lone(Role.CLIENT)
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 7))
    [asked] = peer.seen(PublishReceived)
    if answered:
        peer.session.accept_publish(asked.request_id)
    peer.data(stream_id, b"", fin=True)

    if answered:
        assert [e.code for e in peer.seen(SubscriptionEnded)] == [PublishDoneCode.INTERNAL_ERROR]
    else:
        assert [e.cancelled for e in peer.seen(PeerRequestEnded)] == [True]
    assert peer.session.open_requests == 0
    peer.assert_alive()


@pytest.mark.parametrize("answer", [RequestOk(), RequestError(RequestErrorCode.UNINTERESTED)])
def test_a_stop_may_overtake_the_answer(answer: RequestOk | RequestError) -> None:
    peer = Lone(Role.SERVER)
    track = LocalTrack(NAME)
    peer.session.publish(track)
    peer.drain()
    stream_id = peer.last_stream()
    peer.stop(stream_id)
    peer.say(stream_id, answer)

    if isinstance(answer, RequestOk):
        assert [e.code for e in peer.seen(PublicationEnded)] == [None]
    else:
        assert [e.code for e in peer.seen(RequestRefused)] == [RequestErrorCode.UNINTERESTED]
    assert peer.session.open_requests == 0
    assert not track.is_watched


def test_the_fin_of_a_subscriber_is_no_cancel() -> None:
    peer = Lone(Role.SERVER)
    track = LocalTrack(NAME)
    peer.session.publish(track)
    peer.drain()
    stream_id = peer.last_stream()
    peer.say(stream_id, RequestOk(), fin=True)
    publish_group(track, 0, 1)
    peer.drain()

    assert peer.seen(PublicationEnded) == []
    assert payload_of(Location(0, 0)) in peer.sent(peer.last_stream())


def test_the_end_of_the_session_lets_go_of_the_track() -> None:
    pair = Pair()
    track = LocalTrack(NAME)
    offered(pair, track, answers=False)
    assert track.is_watched

    pair.server.session.close()
    pair.settle()

    assert not track.is_watched
    assert not track._readers


# -- beside other subscriptions --------------------------------------------------------------------


def test_a_subscribe_and_a_publish_of_one_track_both_bring_its_objects() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    subscribed = pair.client.session.subscribe(NAME)
    published = offered(pair, track)
    publish_group(track, 0, 2)
    track.end()
    pair.settle()

    objects = pair.client.take(ObjectReceived)
    for request_id in (subscribed, published):
        assert locations(e for e in objects if e.request_id == request_id) == whole(1, 2)
    assert len(pair.client.take(SubscriptionEnded)) == 2


def test_an_endpoint_that_is_gone_or_told_to_go_publishes_nothing() -> None:
    pair = Pair()
    pair.client.session.goaway()
    pair.settle()
    track = LocalTrack(NAME)

    with pytest.raises(UsageError):
        pair.server.session.publish(track)

    assert not track.is_watched


def test_one_alias_for_two_tracks_closes_as_soon_as_it_is_published() -> None:
    peer = Lone(Role.CLIENT)
    peer.subscribed(7)

    peer.say(peer.bidi(), Publish(peer.request_id(), FullTrackName.of("another", "track"), 7))

    assert isinstance(peer.close, CloseSession)
    assert peer.close.code == 5


def test_statuses_and_the_shape_of_the_track_are_checked_as_for_any_subscription() -> None:
    peer = Lone(Role.CLIENT)
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 7))
    peer.session.accept_publish(peer.seen(PublishReceived)[0].request_id)
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80 00 01 61 00 00 03"), fin=True)
    peer.data(peer.uni(), bytes.fromhex("14 07 00 01 80 05 01 61"))

    assert [e.status for e in peer.seen(ObjectReceived)][1] is ObjectStatus.END_OF_GROUP
    [ended] = peer.seen(SubscriptionEnded)
    assert (ended.code, ended.by_peer) == (PublishDoneCode.MALFORMED_TRACK, False)
    assert ResetStream(StreamId(stream_id), 1) in peer.commands
    peer.assert_alive()


def test_who_does_not_take_objects_falls_too_far_behind() -> None:
    pair = Pair(client=SessionConfig(authority="a", max_subscription_octets=1000))
    pair.client.consumes = False
    track = LocalTrack(NAME)
    offered(pair, track)
    publish_group(track, 0, 30)
    publish_group(track, 1, 30)
    pair.settle()

    assert pair.client.one(SubscriptionEnded).code is PublishDoneCode.TOO_FAR_BEHIND
    assert pair.server.one(PublicationEnded).code is None
    for event in pair.client.take(ObjectReceived):
        pair.client.session.consumed(event)
    pair.settle()
    assert pair.leave_behind() == []
