"""SUBSCRIBE_TRACKS, both roles: every Track under a prefix is published, or said to be skipped."""

from typing import Any

import pytest

from moqt.codepoints import GroupOrder, RequestErrorCode, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import SendStreamData
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    ObjectReceived,
    PeerRequestEnded,
    PublicationEnded,
    PublishReceived,
    RequestId,
    RequestRefused,
    SubscribeTracksReceived,
    SubscriptionEnded,
    TracksEnded,
    TrackSkipped,
    TracksSubscribed,
    TracksUpdated,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.namespace import PublishSkipped, SubscribeNamespace, SubscribeTracks
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.parameters import Parameters
from tests.session.lone import Lone
from tests.session.pair import Pair, locations, make_track, publish_group, whole

of = TrackNamespace.of
KV = of("kvcs-1")
LAYERS = 0x3800


def named(*fields: str, **options: Any) -> LocalTrack:
    return LocalTrack(FullTrackName.of(*fields), **options)


def asking(*tracks: LocalTrack, prefix: TrackNamespace = KV, **options: Any) -> Pair:
    """Have the client ask a server that holds ``tracks``."""
    pair = Pair(chunk=3)
    for track in tracks:
        pair.server.publish(track)
    pair.client.session.subscribe_tracks(prefix, **options)
    pair.settle()
    return pair


def offered(pair: Pair) -> list[FullTrackName]:
    return [e.track for e in pair.client.take(PublishReceived)]


def request_of(pair: Pair) -> RequestId:
    return pair.server.one(SubscribeTracksReceived).request_id


# -- what matches ----------------------------------------------------------------------------------


def test_every_track_under_the_prefix_is_published() -> None:
    held = [named("kvcs-1", "a", "t"), named("kvcs-1", "t"), named("kvcs-11", "t"), named("x", "t")]
    pair = asking(*held)

    assert pair.client.one(TracksSubscribed).request_id == 0
    assert offered(pair) == [held[0].name, held[1].name]
    for track in held[:2]:
        publish_group(track, 0, 2)
        track.end()
    pair.settle()
    assert sorted(locations(pair.client.take(ObjectReceived))) == sorted(whole(1, 2) * 2)
    assert len(pair.server.take(PublicationEnded)) == 2


def test_tracks_that_come_later_are_published_as_they_come() -> None:
    pair = asking()
    request_id = request_of(pair)
    later, other = named("kvcs-1", "later"), named("other", "later")
    assert pair.server.session.wants_track(request_id, later)
    assert not pair.server.session.wants_track(request_id, other)

    pair.server.session.publish(later, wanted_by=request_id)
    with pytest.raises(UsageError, match="does not ask for"):
        pair.server.session.publish(other, wanted_by=request_id)
    pair.settle()

    assert offered(pair) == [later.name]


def test_track_properties_choose_tracks_and_the_other_filters_objects() -> None:
    chosen = named("kvcs-1", "chosen", properties=((LAYERS, 32),))
    held = [chosen, named("kvcs-1", "small", properties=((LAYERS, 3),)), named("kvcs-1", "none")]
    pair = asking(
        *held,
        range_filters=(
            RangeFilter(P.TRACK_PROPERTY_FILTER, property_type=LAYERS, ranges=((10, 99),)),
            RangeFilter(P.OBJECTID_FILTER, ranges=((0, 1),)),
        ),
    )

    assert offered(pair) == [chosen.name]
    publish_group(chosen, 0, 4)
    chosen.end()
    pair.settle()
    assert locations(pair.client.take(ObjectReceived)) == whole(1, 2)
    assert pair.client.one(SubscriptionEnded).complete


def test_the_wish_becomes_the_parameters_of_each_publish_and_is_restated() -> None:
    track = named("kvcs-1", "t", properties=((LAYERS, 1),))
    pair = asking(track, forward=False, group_order=GroupOrder.DESCENDING)

    asked = pair.client.one(PublishReceived)
    assert asked.is_paused
    assert asked.parameters == {P.FORWARD: 0, P.GROUP_ORDER: GroupOrder.DESCENDING}
    assert asked.track_properties == ((LAYERS, 1),)
    publish_group(track, 0, 2)
    pair.settle()
    assert pair.client.take(ObjectReceived) == []


def test_what_the_draft_lets_ride_besides_is_taken() -> None:
    # Location filter, priority and fill; the fill has the ID of the PUBLISH.
    peer = Lone(Role.SERVER)
    track = make_track(2, 2, ended=False, properties=((LAYERS, 1),))
    body = bytes.fromhex("00 01 06") + b"kvcs-1" + bytes.fromhex("04 20 09 01 05 02 01 00 12 00")
    stream_id = peer.bidi()
    peer.data(stream_id, b"\x51" + len(body).to_bytes(2, "big") + body)
    [asked] = peer.seen(SubscribeTracksReceived)
    assert asked.parameters == {
        P.SUBSCRIBER_PRIORITY: 9,
        P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT,
        P.FILL_PARAMETERS: FillParameters(Parameters()),
        P.INCLUDE_PROPERTIES: 0,
    }
    peer.session.accept_tracks(asked.request_id)
    request_id = peer.session.publish(track, wanted_by=asked.request_id)
    peer.drain()

    stated = {
        P.LARGEST_OBJECT: Location(1, 1),
        P.SUBSCRIBER_PRIORITY: 9,
        P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT,
        P.GROUP_ORDER: GroupOrder.ASCENDING,
    }
    said = [bytes(c.data) for c in peer.commands if isinstance(c, SendStreamData)]
    assert encode_message(Publish(request_id, track.name, 1, Parameters(stated))) in said
    # The inner filter is absent, so the subscription's counts: nothing past is asked for.
    assert not [c for c in said if c[:1] == b"\x05"]


def test_the_filters_of_the_wish_are_no_proof_of_a_malformed_track() -> None:
    peer = Lone(Role.CLIENT)
    only = RangeFilter(P.OBJECTID_FILTER, ranges=((0, 0),))
    peer.session.subscribe_tracks(KV, range_filters=[only])
    peer.drain()
    peer.say(peer.last_stream(), RequestOk())
    peer.say(peer.bidi(), Publish(peer.request_id(), FullTrackName.of("kvcs-1", "t"), 7))
    peer.session.accept_publish(peer.seen(PublishReceived)[0].request_id)
    # END_OF_GROUP on the stream of Object 0, and Object 5 on another.
    peer.data(peer.uni(), bytes.fromhex("18 07 00 80 00 01 61"), fin=True)
    peer.data(peer.uni(), bytes.fromhex("14 07 00 01 80 05 01 61"), fin=True)

    assert len(peer.seen(ObjectReceived)) == 2


# -- skipped ---------------------------------------------------------------------------------------


def test_a_skipped_track_is_told_by_suffix_and_not_published_for_that_wish() -> None:
    track = named("kvcs-1", "a", "t")
    pair = asking()
    request_id = request_of(pair)
    pair.log.clear()

    assert pair.server.session.publish_skipped(request_id, track)
    pair.settle()

    assert pair.client.one(TrackSkipped).track == track.name
    assert [bytes(c.data) for _, c in pair.log if isinstance(c, SendStreamData)] == [
        encode_message(PublishSkipped(of("a"), b"t"))
    ]
    assert not pair.server.session.wants_track(request_id, track)
    with pytest.raises(UsageError, match="does not ask for"):
        pair.server.session.publish(track, wanted_by=request_id)
    with pytest.raises(UsageError, match="skipped before"):
        pair.server.session.publish_skipped(request_id, track)
    # Another Track of that name, published by somebody else later, is another attempt.
    assert pair.server.session.wants_track(request_id, named("kvcs-1", "a", "t"))


def test_a_track_whose_subscribe_waits_is_not_published_besides() -> None:
    track = named("kvcs-1", "t")
    pair = asking()
    request_id = request_of(pair)
    pair.server.answers = False
    subscribed = pair.client.session.subscribe(track.name)
    pair.settle()

    assert not pair.server.session.wants_track(request_id, track)
    with pytest.raises(UsageError, match="does not ask for"):
        pair.server.session.publish(track, wanted_by=request_id)
    pair.server.session.accept_subscribe(subscribed, track)
    publish_group(track, 0, 1)
    pair.settle()

    assert [e.request_id for e in pair.client.take(ObjectReceived)] == [subscribed]
    assert offered(pair) == []


def test_the_subscriber_may_subscribe_to_what_was_skipped() -> None:
    track = named("kvcs-1", "t")
    pair = asking()
    pair.server.session.publish_skipped(request_of(pair), track)
    pair.server.publish(track)
    pair.settle()

    pair.client.session.subscribe(pair.client.one(TrackSkipped).track)
    pair.settle()
    publish_group(track, 0, 1)
    pair.settle()

    assert locations(pair.client.take(ObjectReceived)) == whole(1, 1)


# -- overlaps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (of("a"), of("a"), True),
        (of("a"), of("a", "b"), True),
        (of("a", "b"), of("a"), True),
        (of("a", "b"), of("a", "c"), False),
        (of("a"), of("ab"), False),
        (TrackNamespace(), of("a"), True),
    ],
)
def test_prefixes_of_one_session_must_not_overlap(
    first: TrackNamespace, second: TrackNamespace, overlap: bool
) -> None:
    pair = asking(prefix=first)
    pair.client.session.subscribe_tracks(second)
    pair.settle()

    codes = [e.code for e in pair.client.take(RequestRefused)]
    assert codes == ([RequestErrorCode.PREFIX_OVERLAP] if overlap else [])


def test_namespaces_and_tracks_overlap_only_among_themselves() -> None:
    peer = Lone(Role.SERVER)
    for message in (
        SubscribeNamespace(peer.request_id(), KV),
        SubscribeTracks(peer.request_id(), KV),
    ):
        peer.say(peer.bidi(), message)

    assert len(peer.seen(SubscribeTracksReceived)) == 1
    assert not [c for c in peer.commands if isinstance(c, SendStreamData)], "neither is refused"


def test_a_prefix_is_free_again_once_its_wish_is_over() -> None:
    pair = asking()
    pair.client.session.cancel(RequestId(0))
    pair.settle()
    pair.client.session.subscribe_tracks(KV)
    pair.settle()

    assert len(pair.client.take(TracksSubscribed)) == 2


# -- updates ---------------------------------------------------------------------------------------


def test_an_update_moves_the_prefix_and_pauses_only_what_comes_later() -> None:
    first, second = named("kvcs-1", "t"), named("b", "t")
    pair = asking(first)
    request_id = request_of(pair)
    offered(pair)

    update_id = pair.client.session.update(
        request_id, Parameters({P.TRACK_NAMESPACE_PREFIX: of("b"), P.FORWARD: 0})
    )
    pair.settle()
    updated = pair.server.one(TracksUpdated)
    assert (updated.request_id, updated.prefix) == (request_id, of("b"))
    assert updated.parameters == {P.FORWARD: 0}
    assert pair.client.one(UpdateAccepted).update_id == update_id
    assert not pair.server.session.wants_track(request_id, first)
    pair.server.session.publish(second, wanted_by=request_id)
    pair.server.session.publish_skipped(request_id, named("b", "c", "u"))
    pair.settle()

    asked = pair.client.one(PublishReceived)
    assert (asked.track, asked.is_paused) == (second.name, True)
    assert pair.client.one(TrackSkipped).track == FullTrackName.of("b", "c", "u")
    publish_group(first, 0, 1)
    pair.settle()
    assert len(pair.client.take(ObjectReceived)) == 1, "the first one is not paused"


def test_an_update_of_the_filters_replaces_those_of_its_kind() -> None:
    def layers(first: int) -> RangeFilter:
        return RangeFilter(P.TRACK_PROPERTY_FILTER, property_type=LAYERS, ranges=((first, None),))

    small = named("kvcs-1", "small", properties=((LAYERS, 3),))
    pair = asking(small, range_filters=[layers(10)])
    request_id = request_of(pair)
    assert offered(pair) == []

    pair.client.session.update(request_id, Parameters({P.TRACK_PROPERTY_FILTER: layers(2)}))
    pair.settle()
    assert pair.server.session.wants_track(request_id, small)
    removal = RangeFilter.removal(P.TRACK_PROPERTY_FILTER)
    pair.client.session.update(request_id, Parameters({P.TRACK_PROPERTY_FILTER: removal}))
    pair.settle()

    assert pair.server.session.wants_track(request_id, named("kvcs-1", "without"))


def test_a_refused_update_ends_the_wish_and_no_subscription() -> None:
    track = named("kvcs-1", "t")
    pair = asking(track)
    other = pair.client.session.subscribe_tracks(of("other"))
    pair.settle()

    pair.client.session.update(other, Parameters({P.TRACK_NAMESPACE_PREFIX: of("kvcs-1", "a")}))
    pair.settle()
    publish_group(track, 0, 1)
    pair.settle()

    assert pair.client.one(UpdateRefused).code == RequestErrorCode.PREFIX_OVERLAP
    assert pair.client.one(TracksEnded).request_id == other
    assert pair.server.one(PeerRequestEnded).request_id == other
    assert len(pair.client.take(ObjectReceived)) == 1


def test_an_update_with_too_many_ranges_is_refused() -> None:
    peer = Lone(Role.SERVER, config=SessionConfig(max_filter_ranges=1))
    stream_id = peer.bidi()
    peer.say(stream_id, SubscribeTracks(peer.request_id(), KV))
    peer.session.accept_tracks(peer.seen(SubscribeTracksReceived)[0].request_id)
    wanted = RangeFilter(P.TRACK_PROPERTY_FILTER, property_type=LAYERS, ranges=((0, 1), (5, 6)))
    peer.say(
        stream_id, RequestUpdate(peer.request_id(), Parameters({P.TRACK_PROPERTY_FILTER: wanted}))
    )

    refusal = RequestError(RequestErrorCode.INVALID_FILTER, 0, "2 filter ranges, limit 1")
    assert peer.sent(stream_id) == encode_message(RequestOk()) + encode_message(refusal)


def test_what_was_not_accepted_cannot_be_updated() -> None:
    pair = Pair()
    pair.server.answers = False
    request_id = pair.client.session.subscribe_tracks(KV)
    pair.settle()

    with pytest.raises(UsageError):
        pair.client.session.update(request_id, Parameters({P.FORWARD: 0}))


# -- the end ---------------------------------------------------------------------------------------


def test_a_cancelled_wish_leaves_its_subscriptions() -> None:
    track = named("kvcs-1", "t")
    pair = asking(track)

    pair.client.session.cancel(RequestId(0))
    pair.settle()
    publish_group(track, 0, 1)
    track.end()
    pair.settle()

    assert pair.server.one(PeerRequestEnded).cancelled
    assert pair.client.one(SubscriptionEnded).complete
    assert len(pair.client.take(ObjectReceived)) == 1
    assert not pair.server.session.wants_track(RequestId(0), named("kvcs-1", "u"))
    assert pair.server.session.publish_skipped(RequestId(0), named("kvcs-1", "u")) is False
    assert pair.leave_behind() == []


@pytest.mark.parametrize("fin", [True, False])
def test_the_publisher_may_end_it(fin: bool) -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe_tracks(KV)
    peer.drain()
    stream_id = peer.last_stream()
    peer.say(stream_id, RequestOk())
    if fin:
        peer.data(stream_id, b"", fin=True)
    else:
        peer.reset(stream_id, StreamErrorCode.GOING_AWAY)

    [ended] = peer.seen(TracksEnded)
    assert ended.code == (None if fin else StreamErrorCode.GOING_AWAY)
    assert peer.session.open_requests == 0
    peer.assert_alive()


@pytest.mark.parametrize("fin", [True, False])
def test_an_end_ahead_of_the_answer_is_a_refusal(fin: bool) -> None:
    peer = Lone(Role.CLIENT)
    peer.session.subscribe_tracks(KV)
    peer.drain()
    stream_id = peer.last_stream()
    if fin:
        peer.data(stream_id, b"", fin=True)
    else:
        peer.reset(stream_id)

    assert len(peer.seen(RequestRefused)) == 1
    assert peer.seen(TracksEnded) == []


def test_an_unanswered_wish_is_refused_in_time() -> None:
    pair = Pair()
    pair.server.answers = False
    pair.client.session.subscribe_tracks(KV)
    pair.settle()
    pair.advance(31.0)

    assert pair.client.one(RequestRefused).code == RequestErrorCode.TIMEOUT
    assert pair.leave_behind() == []


def test_a_fill_that_rides_on_the_wish_has_the_id_of_the_publish() -> None:
    peer = Lone(Role.SERVER)
    track = make_track(1, 2, ended=False)
    body = bytes.fromhex("00 01 06") + b"kvcs-1" + bytes.fromhex("01 23 05 01 21 02 00 00")
    peer.data(peer.bidi(), b"\x51" + len(body).to_bytes(2, "big") + body)
    [asked] = peer.seen(SubscribeTracksReceived)
    peer.session.accept_tracks(asked.request_id)
    request_id = peer.session.publish(track, wanted_by=asked.request_id)
    peer.drain()

    fills = [
        bytes(c.data)
        for c in peer.commands
        if isinstance(c, SendStreamData) and c.stream_id & 2 and bytes(c.data[:1]) == b"\x05"
    ]
    assert [fill[:2] for fill in fills] == [bytes([5, request_id])]
