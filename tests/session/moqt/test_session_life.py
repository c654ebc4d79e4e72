"""The session itself: SETUP, Request IDs, GOAWAY, the end, and what waits for its place."""

import pytest

from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, RequestErrorCode, SessionErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import (
    CloseSession,
    ReleaseCredit,
    SendStreamData,
    StopSending,
    StreamId,
)
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    GoawayReceived,
    ObjectReceived,
    RequestRefused,
    SessionEstablished,
    SessionTerminated,
    StreamDiscarded,
    SubscribeReceived,
    UpdateAccepted,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.request import RequestError
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import Subscribe, SubscribeOk
from moqt.wire.parameters import Parameters
from tests.session.lone import Lone
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)
EXPIRED = PublishDoneCode.EXPIRED


# -- SETUP -----------------------------------------------------------------------------------------


def test_each_side_sends_setup_at_once_and_only_a_client_says_where_to() -> None:
    pair = Pair(
        client=SessionConfig(path="/kv?tenant=a", authority="relay.example:4443"),
        server=SessionConfig(path="/ignored", authority="ignored", max_filter_ranges=5),
        start=False,
    )
    pair.client.session.start()
    pair.server.session.start()
    pair.settle()

    to_client = pair.client.one(SessionEstablished).peer_setup
    to_server = pair.server.one(SessionEstablished).peer_setup
    assert (to_server.path, to_server.authority) == ("/kv?tenant=a", "relay.example:4443")
    assert (to_client.path, to_client.authority) == (None, None)
    assert to_client.max_filter_ranges == 5
    assert pair.client.session.peer_setup == to_client


def test_requests_may_leave_ahead_of_the_peers_setup() -> None:
    pair = Pair(start=False)
    pair.server.publish(make_track(2, 2))
    pair.held = lambda end, stream_id: stream_id in (2, 3)
    pair.client.session.start()
    pair.server.session.start()
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    assert pair.server.take(SubscribeReceived) == []

    pair.held = lambda end, stream_id: stream_id == 3  # the server's SETUP comes last of all
    pair.settle()
    assert pair.client.take(ObjectReceived) == []
    pair.held = lambda end, stream_id: False
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == whole(2, 2)
    assert pair.leave_behind() == []


def test_filters_wait_for_the_peers_setup() -> None:
    pair = Pair(start=False)
    only = RangeFilter(P.OBJECTID_FILTER, ranges=((1, 1),))
    with pytest.raises(UsageError, match="limit 0"):
        pair.client.session.subscribe(NAME, range_filters=[only])


# -- Request IDs -----------------------------------------------------------------------------------


def test_request_ids_count_up_by_two_on_each_side() -> None:
    pair = Pair()
    client = [pair.client.session.track_status(NAME) for _ in range(3)]
    server = [pair.server.session.track_status(NAME) for _ in range(3)]

    assert (client, server) == ([0, 2, 4], [1, 3, 5])


def test_a_request_that_cannot_be_sent_uses_up_nothing() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, ended=False))
    session = pair.client.session
    backwards = RangeFilter(P.OBJECTID_FILTER, ranges=((5, 6), (1, 2)))
    with pytest.raises(UsageError, match="out of order"):
        session.subscribe(NAME, range_filters=[backwards], fill=FROM_START)
    with pytest.raises(UsageError, match="priority 256"):
        session.fetch(NAME, location_filter=FROM_START, priority=256)
    assert (session.open_requests, session._delivery._fetch_owners) == (0, {})

    request_id = session.subscribe(track.name)
    pair.settle()
    with pytest.raises(UsageError, match="misplaced"):
        session.update(request_id, Parameters({P.INCLUDE_PROPERTIES: 1}))
    session.update(request_id, Parameters({P.SUBSCRIBER_PRIORITY: 1}))
    pair.settle()

    assert request_id == 0
    assert len(pair.client.take(UpdateAccepted)) == 1
    with pytest.raises(UsageError):
        pair.server.session.goaway("x" * 8193)
    assert not pair.server.session.is_going_away


# -- GOAWAY ----------------------------------------------------------------------------------------


def test_goaway_lets_what_there_is_run_out_and_then_the_session_ends() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, 2, ended=False))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()

    pair.server.session.goaway("moqt://elsewhere/kv", 5000)
    pair.server.session.goaway("moqt://elsewhere/kv", 5000)
    pair.settle()
    goaway = pair.client.one(GoawayReceived)
    assert (goaway.request_id, goaway.new_session_uri, goaway.timeout_ms) == (
        None, "moqt://elsewhere/kv", 5000,
    )  # fmt: skip
    assert pair.client.session.is_going_away
    with pytest.raises(UsageError, match="going away"):
        pair.client.session.subscribe(NAME)
    publish_group(track, 1, 2)
    track.end()
    pair.settle()

    assert sorted(locations(pair.client.take(ObjectReceived))) == whole(2, 2)
    assert pair.client.closed == CloseSession(SessionErrorCode.NO_ERROR, "going away")
    assert pair.server.one(SessionTerminated).by_peer


def test_new_requests_are_refused_after_our_goaway() -> None:
    pair = Pair()
    pair.server.publish(make_track(1, ended=False))
    pair.held = lambda end, stream_id: end is pair.server and stream_id == 3
    pair.server.session.goaway()
    for ask in ("track_status", "subscribe"):
        getattr(pair.client.session, ask)(NAME)
    pair.settle()

    assert [e.code for e in pair.client.take(RequestRefused)] == [RequestErrorCode.GOING_AWAY] * 2


def test_a_goaway_that_is_followed_ends_without_an_error() -> None:
    pair = Pair()
    pair.server.session.goaway(timeout_ms=1000)
    pair.held = lambda end, stream_id: True
    pair.settle()
    pair.advance(1.1)

    assert pair.server.closed == CloseSession(SessionErrorCode.NO_ERROR, "going away")


def test_a_goaway_that_is_not_followed_ends_with_a_timeout() -> None:
    pair = Pair()
    pair.server.publish(make_track(1, ended=False))
    pair.client.session.subscribe(NAME)
    pair.settle()
    pair.server.session.goaway(timeout_ms=1000)
    pair.settle()

    pair.advance(0.9)
    assert pair.server.closed is None
    pair.advance(0.2)

    assert pair.server.closed == CloseSession(
        SessionErrorCode.GOAWAY_TIMEOUT, "1 requests are open"
    )
    assert pair.client.one(SessionTerminated).code == SessionErrorCode.GOAWAY_TIMEOUT


def test_a_client_may_say_goaway_but_not_where_to() -> None:
    pair = Pair()
    with pytest.raises(UsageError):
        pair.client.session.goaway("moqt://elsewhere")
    pair.server.session.track_status(NAME)
    pair.client.session.goaway()
    pair.client.answers = False
    pair.settle()

    assert pair.server.one(GoawayReceived).new_session_uri == ""


def test_goaway_for_one_request_names_it() -> None:
    peer = Lone(Role.CLIENT)
    request_id, stream_id = peer.subscribed(7)
    peer.say(stream_id, Goaway("moqt://elsewhere", 100))

    [event] = peer.seen(GoawayReceived)
    assert (event.request_id, event.new_session_uri) == (request_id, "moqt://elsewhere")
    peer.session.subscribe(NAME)


# -- the end ---------------------------------------------------------------------------------------


def test_the_end_comes_once_and_last_whoever_closes() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, ended=False))
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    pair.client.session.close(SessionErrorCode.INTERNAL_ERROR, "é" * 2000)
    pair.client.session.close()
    pair.settle()
    publish_group(track, 1, 2)
    pair.settle()

    for end, by_peer in ((pair.client, False), (pair.server, True)):
        [ended] = end.take(SessionTerminated)
        assert (ended.code, ended.by_peer) == (SessionErrorCode.INTERNAL_ERROR, by_peer)
        assert ended.reason == "é" * 512
        assert end.session.terminated == ended
    assert not track.is_watched
    assert track._readers == {}


def test_after_the_end_nothing_can_be_asked_and_answers_are_dropped() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, ended=False))
    pair.server.answers = False
    request_id = pair.client.session.subscribe(NAME)
    pair.settle()
    [asked] = pair.server.take(SubscribeReceived)
    pair.client.session.close()
    pair.settle()

    for ask in ("subscribe", "track_status"):
        with pytest.raises(UsageError, match="over"):
            getattr(pair.client.session, ask)(NAME)
    with pytest.raises(UsageError):
        pair.client.session.update(request_id, Parameters())
    pair.client.session.cancel(request_id)
    pair.server.session.cancel(asked.request_id)
    assert pair.server.session.accept_subscribe(asked.request_id, track) is False
    assert pair.server.session.end_subscription(asked.request_id, EXPIRED) is False
    for end in pair.ends:
        assert list(end.session.data_to_send()) == []


def test_objects_taken_after_the_end_change_nothing() -> None:
    pair = Pair()
    pair.server.publish(make_track(1, ended=False))
    pair.client.consumes = False
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.settle()
    pair.client.session.close()
    pair.settle()

    for event in pair.client.take(ObjectReceived):
        pair.client.session.consumed(event)

    assert list(pair.client.session.data_to_send()) == []


def test_two_timers_at_once_end_the_session_once() -> None:
    peer = Lone(Role.SERVER, established=False)
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80"))

    peer.later(11.0)

    assert isinstance(peer.events[-1], SessionTerminated)
    assert [type(e) for e in peer.events].count(SessionTerminated) == 1


# -- streams that wait for their place -------------------------------------------------------------


def early(peer: Lone, alias: int, octets: int = 1) -> StreamId:
    """Open a stream of an alias that is not known yet, with so many octets."""
    stream_id = peer.uni()
    head = bytes([0x10]) + bytes([alias]) + bytes.fromhex("00 80 00 ff00ffffffffffffff")
    peer.data(stream_id, (head + bytes(octets))[:octets])
    return stream_id


def stopped(peer: Lone) -> list[int]:
    return [c.stream_id for c in peer.commands if isinstance(c, StopSending)]


def test_only_so_many_streams_wait_for_their_alias() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(max_parked_streams=3))
    streams = [early(peer, alias, 4) for alias in range(10, 15)]

    assert stopped(peer) == streams[3:]
    assert len(peer.seen(StreamDiscarded)) == 2
    peer.assert_alive()


def test_only_so_many_octets_wait_for_their_alias() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(max_parked_octets=1000))
    first, second = early(peer, 10, 600), early(peer, 11, 300)
    assert stopped(peer) == []
    assert not [c for c in peer.commands if isinstance(c, ReleaseCredit)]

    peer.data(second, bytes(200))

    assert stopped(peer) == [second]
    assert [c for c in peer.commands if isinstance(c, ReleaseCredit)] == [
        ReleaseCredit(second, 500)
    ]
    peer.data(second, bytes(5000))
    assert peer.commands[-1] == ReleaseCredit(second, 5000)
    early(peer, 12, 300)
    assert stopped(peer) == [second]
    peer.reset(first)
    peer.assert_alive()


@pytest.mark.parametrize("established", [True, False])
def test_a_flood_of_streams_for_nobody_is_bounded_and_gives_all_its_credit_back(
    established: bool,
) -> None:
    peer = Lone(Role.CLIENT, established=established)
    config, mebibyte = SessionConfig(), bytes(1 << 20)
    most, waiting, arrived = 0, set(), 0
    # An Object larger than what is sent of it, so that nothing of it could be handed out.
    head = bytes.fromhex("10 83e7 00 80 00 e3000000")
    for _ in range(100):
        stream_id = peer.uni()
        for piece in (head, mebibyte[: 1 << 19], mebibyte[1 << 19 :]):
            peer.data(stream_id, piece)
            arrived += len(piece)
            held = peer.session._delivery._streams.values()
            most = max(most, sum(len(stream.buffer) for stream in held))
        waiting.add(stream_id)
    assert peer.close is None
    assert 0 < most <= config.max_parked_octets + len(mebibyte)
    kept = waiting - set(stopped(peer))
    assert len(kept) <= 4
    if not established:
        peer.say(peer.control, Setup())
    peer.later(config.park_timeout_s + 0.1)

    assert set(stopped(peer)) == waiting
    released = sum(
        c.octets for c in peer.commands if isinstance(c, ReleaseCredit) and c.stream_id in waiting
    )
    assert released == arrived
    assert not any(s.buffer for s in peer.session._delivery._streams.values())
    peer.assert_alive()


def test_a_stream_waits_so_long_and_no_longer() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(park_timeout_s=5.0))
    waiting = early(peer, 10, 20)
    peer.later(4.9)
    assert stopped(peer) == []

    peer.later(0.2)

    assert stopped(peer) == [waiting]
    assert [e.stream_id for e in peer.seen(StreamDiscarded)] == [waiting]
    assert peer.session.next_deadline() is None
    peer.assert_alive()


def test_streams_that_waited_are_delivered_in_order_of_their_arrival() -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe(NAME)
    peer.drain()
    stream_id = peer.last_stream()
    for group in (3, 1, 2):
        peer.data(peer.uni(), bytes([0x10, 7, group, 128, 0, 1, 97]), fin=group != 1)
    peer.say(stream_id, SubscribeOk(7))

    assert [e.location.group for e in peer.seen(ObjectReceived)] == [3, 1, 2]
    assert peer.session._delivery._parked_octets == 0
    assert peer.session.next_deadline() is None


def test_streams_ahead_of_setup_have_the_same_limits() -> None:
    peer = Lone(
        Role.CLIENT,
        established=False,
        config=SessionConfig(max_parked_streams=2, max_parked_octets=1000),
    )
    kept, flood, third = early(peer, 10, 20), early(peer, 11, 2000), early(peer, 12, 20)
    fourth = early(peer, 13, 20)
    assert stopped(peer) == [flood, fourth]

    peer.say(peer.control, Setup())
    peer.later(11.0)

    assert stopped(peer) == [flood, fourth, kept, third]
    peer.assert_alive()


def test_a_reset_of_a_stream_that_waits_forgets_it() -> None:
    peer = Lone(Role.CLIENT)
    waiting = early(peer, 10, 20)
    peer.reset(waiting)

    assert peer.commands[-1] == ReleaseCredit(waiting, 20)
    assert peer.session.next_deadline() is None
    assert peer.session._delivery._streams == {}


# -- in between ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 20])
def test_messages_may_be_cut_anywhere(chunk: int) -> None:
    pair = Pair(chunk=chunk, start=False)
    pair.server.publish(make_track(2, 3, properties=((0x3801, b"x" * 200),)))
    for end in pair.ends:
        end.session.start()
    pair.client.session.subscribe(NAME, fill=FROM_START)
    pair.client.session.subscribe(FullTrackName.of("no", "such"))
    pair.client.session.publish_namespace(NAME.namespace)
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == whole(2, 3)
    assert pair.client.one(RequestRefused).code == RequestErrorCode.DOES_NOT_EXIST


def test_an_endpoint_may_subscribe_to_what_the_other_asks_of_it() -> None:
    pair = Pair()
    for end in pair.ends:
        end.publish(make_track(2, 2))
        end.session.subscribe(NAME, fill=FROM_START)
    pair.settle()

    for end in pair.ends:
        assert locations(end.take(ObjectReceived)) == whole(2, 2)
    assert pair.leave_behind() == []


def test_a_refusal_of_one_request_leaves_the_others_alone() -> None:
    peer = Lone(Role.SERVER)
    good, bad = peer.bidi(), peer.bidi()
    peer.say(good, Subscribe(peer.request_id(), NAME))
    peer.say(bad, Subscribe(peer.request_id(), FullTrackName.of("x", "y")))
    first, second = peer.seen(SubscribeReceived)
    track = LocalTrack(NAME)
    peer.session.reject(second.request_id, RequestErrorCode.UNAUTHORIZED)
    peer.session.accept_subscribe(first.request_id, track)
    peer.drain()
    track.open_subgroup(0).publish(0, payload_of(Location(0, 0)))
    peer.drain()

    assert peer.sent(bad) == encode_message(RequestError(RequestErrorCode.UNAUTHORIZED))
    assert payload_of(Location(0, 0)) in peer.sent(peer.last_stream())
    assert SendStreamData(good, encode_message(SubscribeOk(1))) in peer.commands


def test_stop_sending_on_something_unknown_is_nothing() -> None:
    peer = Lone(Role.SERVER)
    for stream_id in (0, 4, 1, 5, 3, 7, 1001):
        if stream_id != 3:
            peer.stop(stream_id)
    for stream_id in (0, 1, 6, 1002):
        peer.reset(stream_id)
    peer.session._arrivals.early_stops.clear()

    assert not [c for c in peer.commands if not isinstance(c, ReleaseCredit)]
    peer.assert_alive()


def test_stops_ahead_of_requests_are_remembered_only_so_far() -> None:
    peer = Lone(Role.SERVER)
    for number in range(1000):
        peer.stop(4000 + 4 * number)

    assert len(peer.session._arrivals.early_stops) == 256


def test_codes_of_stream_errors_need_not_be_known() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.session.subscribe(NAME)
    pair.settle()
    track.open_subgroup(0).publish(0, payload_of(Location(0, 0)))
    pair.settle()
    pair.stop(pair.client, pair.data_streams(pair.server)[0], 0x1F1F)
    pair.settle()

    assert pair.server.closed is None
