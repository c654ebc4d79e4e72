"""What must NOT close a session. After each the session still serves, and still asks."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import ResetStream, StopSending
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    FetchEnded,
    FetchReceived,
    FillEnded,
    GoawayReceived,
    ObjectReceived,
    PeerRequestEnded,
    PublishNamespaceReceived,
    PublishReceived,
    RequestRefused,
    SessionEstablished,
    StateNotified,
    SubscribeAccepted,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    SubscriptionEnded,
    TrackStatusReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.datagram import padding_datagram
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.namespace import PublishNamespace, SubscribeNamespace, SubscribeTracks
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import (
    PublishDone,
    PublishStateNotify,
    Subscribe,
    SubscribeOk,
    TrackStatus,
)
from moqt.wire.parameters import Parameters
from moqt.wire.streamtype import padding_stream
from moqt.wire.token import AuthorizationToken as Token
from tests.session.lone import NAME, Lone

SERVER, CLIENT = Role.SERVER, Role.CLIENT
Deed = Callable[[Lone], None]


@dataclass(frozen=True)
class Row:
    """A deed of the peer, and what else is checked behind it."""

    name: str
    do: Deed
    role: Role = SERVER
    established: bool = True
    config: SessionConfig | None = None


def refused_with(peer: Lone, code: int, stream_id: int | None = None) -> None:
    """Check that the session refused the request on a stream, by default the last one."""
    wanted = peer.last_stream() if stream_id is None else stream_id
    answers = [m for m in peer.messages(wanted) if isinstance(m, RequestError)]
    assert [m.error_code for m in answers] == [code], answers


# -- SETUP -----------------------------------------------------------------------------------------


def unknown_options(peer: Lone) -> None:
    options = bytes.fromhex("05 01 618098 01 aa00 01 bb")  # AUTHORITY, then 0x9D twice
    peer.data(peer.control, bytes.fromhex("af00") + len(options).to_bytes(2, "big") + options)
    assert peer.seen(SessionEstablished)


def setup_cut_everywhere(peer: Lone) -> None:
    for octet in encode_message(Setup.of(authority="a", implementation="x" * 300)):
        peer.data(peer.control, bytes([octet]))
    assert peer.seen(SessionEstablished)


def register_beyond_the_limit_in_setup(peer: Lone) -> None:
    peer.say(peer.control, Setup.of(tokens=(Token.register(1, 0, b"x" * 20_000),)))
    assert peer.seen(SessionEstablished)
    # It counts as used once: the alias is free.
    stream_id = peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.use_alias(1),)})
    refused_with(peer, RequestErrorCode.MALFORMED_AUTH_TOKEN, stream_id)


def everything_ahead_of_setup(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.say(stream_id, Subscribe(peer.request_id(), NAME))
    early = peer.uni()
    peer.data(early, bytes.fromhex("10 07 00 80"))
    peer.data(peer.uni(), bytes.fromhex("05 01 1c 00 00 80 01 61"), fin=True)
    peer.data(early, bytes.fromhex("00 01 61"), fin=True)
    peer.session.receive_datagram(bytes.fromhex("00 07 00 00 80 61"))
    peer.drain()
    assert not peer.events
    peer.say(peer.control, Setup())
    assert peer.seen(SubscribeReceived)


def many_requests_ahead_of_setup(peer: Lone) -> None:
    streams = [peer.bidi() for _ in range(70)]
    for stream_id in streams:
        peer.say(stream_id, Subscribe(peer.request_id(), NAME))
    assert [c.stream_id for c in peer.commands if isinstance(c, StopSending)] == streams[64:]
    peer.say(peer.control, Setup())
    assert len(peer.seen(SubscribeReceived)) == 64


def a_flood_on_one_request_ahead_of_setup(peer: Lone) -> None:
    stream_id = peer.bidi()
    for _ in range(70):
        peer.data(stream_id, bytes(1 << 16))
    assert [c.stream_id for c in peer.commands if isinstance(c, StopSending)][:1] == [stream_id]
    peer.say(peer.control, Setup())


# -- requests --------------------------------------------------------------------------------------


def request_ids_out_of_order(peer: Lone) -> None:
    for request_id in (40, 2, 1000, 0):
        peer.say(peer.bidi(), Subscribe(request_id, NAME))
    assert len(peer.seen(SubscribeReceived)) == 4
    peer._request_id = 2000


def non_minimal_integers(peer: Lone) -> None:
    # SUBSCRIBE of (a)/b with every integer two octets long.
    body = bytes.fromhex("8000 8001 8001 61 8001 62 8001 8021 8005")
    peer.data(peer.bidi(), bytes.fromhex("8003") + len(body).to_bytes(2, "big") + body)
    [asked] = peer.seen(SubscribeReceived)
    assert asked.track == FullTrackName.of("a", "b")
    peer._request_id = 0


def a_namespace_of_no_fields(peer: Lone) -> None:
    name = FullTrackName(TrackNamespace(), b"")
    peer.say(peer.bidi(), Subscribe(peer.request_id(), name))
    assert [e.track for e in peer.seen(SubscribeReceived)] == [name]


def a_name_of_exactly_4096_octets(peer: Lone) -> None:
    name = FullTrackName(TrackNamespace((b"\x00\xff/" * 1000,)), b"x" * 1096)
    peer.say(peer.bidi(), Subscribe(peer.request_id(), name))
    assert [e.track for e in peer.seen(SubscribeReceived)] == [name]


def fin_behind_a_request(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.say(stream_id, Subscribe(peer.request_id(), NAME), fin=True)
    [asked] = peer.seen(SubscribeReceived)
    track = LocalTrack(NAME)
    peer.session.accept_subscribe(asked.request_id, track)
    peer.drain()
    track.open_subgroup(0).publish(0, b"after the FIN")
    peer.drain()
    assert b"after the FIN" in peer.sent(peer.last_stream())
    assert not peer.seen(PeerRequestEnded)


def fin_behind_an_update(peer: Lone) -> None:
    stream_id = peer.ask()
    [asked] = peer.seen(SubscribeReceived)
    peer.session.accept_subscribe(asked.request_id, LocalTrack(NAME))
    peer.say(stream_id, RequestUpdate(peer.request_id()))
    peer.data(stream_id, b"", fin=True)
    assert not peer.seen(PeerRequestEnded)


def an_empty_request_stream(peer: Lone) -> None:
    peer.data(peer.bidi(), b"", fin=True)


def a_request_stream_reset_in_the_middle_of_its_request(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.data(stream_id, bytes.fromhex("03 0007 00"))
    peer.reset(stream_id)
    assert not peer.seen(SubscribeReceived)


def a_stop_that_overtakes_its_request(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.stop(stream_id)
    peer.say(stream_id, Subscribe(peer.request_id(), NAME), fin=True)
    assert [e.cancelled for e in peer.seen(PeerRequestEnded)] == [True]
    assert peer.session.open_requests == 0


def requests_of_every_kind(peer: Lone) -> None:
    for message in (
        Fetch(peer.request_id(), NAME),
        TrackStatus(peer.request_id(), NAME),
        PublishNamespace(peer.request_id(), NAME.namespace),
        SubscribeNamespace(peer.request_id(), NAME.namespace),
        Publish(peer.request_id(), NAME, 99),
        SubscribeTracks(peer.request_id(), NAME.namespace),
    ):
        peer.say(peer.bidi(), message)
    for kind in (
        FetchReceived,
        TrackStatusReceived,
        PublishNamespaceReceived,
        SubscribeNamespaceReceived,
        PublishReceived,
        SubscribeTracksReceived,
    ):
        assert len(peer.seen(kind)) == 1


def a_publish_that_nobody_wants(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 99))
    early, late = peer.uni(), peer.uni()
    peer.data(early, bytes.fromhex("10 8063 00 80 00 01 61"))
    [asked] = peer.seen(PublishReceived)
    peer.session.reject(asked.request_id, RequestErrorCode.UNINTERESTED)
    peer.drain()
    refused_with(peer, RequestErrorCode.UNINTERESTED, stream_id)
    # What the refused PUBLISH sends, ahead of the answer and behind it, is unwanted.
    peer.data(late, bytes.fromhex("10 8063 01 80 00 01 61"))
    for stream_id in (early, late):
        assert StopSending(stream_id, StreamErrorCode.CANCELLED) in peer.commands
    assert not peer.seen(ObjectReceived)


def a_publish_with_an_unknown_mandatory_property(peer: Lone) -> None:
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 99, track_properties=((0x4000, 1),)))
    refused_with(peer, RequestErrorCode.UNSUPPORTED_EXTENSION, stream_id)
    assert not peer.seen(PublishReceived)


def an_alias_published_again_once_its_track_is_over(peer: Lone) -> None:
    for _ in range(2):
        stream_id = peer.bidi()
        peer.say(stream_id, Publish(peer.request_id(), NAME, 99))
        peer.session.accept_publish(peer.seen(PublishReceived)[-1].request_id)
        peer.drain()
        peer.data(peer.uni(), bytes.fromhex("10 8063 00 80 00 01 61"), fin=True)
        peer.say(stream_id, PublishDone(PublishDoneCode.TRACK_ENDED, 1), fin=True)
    assert len(peer.seen(ObjectReceived)) == 2
    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True, True]


def a_stop_by_the_publisher_of_a_publish(peer: Lone) -> None:
    # It only means that nothing more is read, once the PUBLISH is accepted.
    stream_id = peer.bidi()
    peer.say(stream_id, Publish(peer.request_id(), NAME, 99))
    peer.session.accept_publish(peer.seen(PublishReceived)[-1].request_id)
    peer.stop(stream_id)
    peer.data(peer.uni(), bytes.fromhex("10 8063 00 80 00 01 61"), fin=True)
    assert len(peer.seen(ObjectReceived)) == 1


def an_update_by_the_publisher_of_a_publish(peer: Lone) -> None:
    stream_id = peer.bidi()
    update = RequestUpdate(peer.request_id() + 100, Parameters({P.SUBSCRIBER_PRIORITY: 3}))
    peer.say(stream_id, Publish(peer.request_id(), NAME, 99), update)
    peer.session.accept_publish(peer.seen(PublishReceived)[-1].request_id)
    peer.drain()
    assert peer.sent(stream_id) == encode_message(RequestOk()) * 2
    assert [e.parameters for e in peer.seen(StateNotified)] == [update.parameters]


def reserved_names(peer: Lone) -> None:
    for name in (FullTrackName.of(".session", "x"), FullTrackName.of(".", "x")):
        for message in (Subscribe(0, name), Fetch(0, name), TrackStatus(0, name)):
            stream_id = peer.bidi()
            peer.say(stream_id, type(message)(peer.request_id(), name))
            refused_with(peer, RequestErrorCode.DOES_NOT_EXIST, stream_id)
    assert not peer.seen(SubscribeReceived)


def unknown_reserved_names_go_to_the_application(peer: Lone) -> None:
    peer.say(peer.bidi(), Subscribe(peer.request_id(), FullTrackName.of(".new", "x")))
    assert len(peer.seen(SubscribeReceived)) == 1


def invalid_filters(peer: Lone) -> None:
    for octets in (
        "26 23 00" + "0001" * 17,  # 17 ranges where 16 are allowed
        "26 02 00 0500 02 00 06",  # the same filter twice in one set
        "28 03 00 07 05",  # of an odd property
        "27 03 00 8100",  # a priority of 256
        "26 0b 00 01 ffffffffffffffffff",  # past the last number
        "26 01 00",  # without a range
    ):
        count = 2 if octets.count("00 02 00 06") else 1
        number = peer.request_id()
        body = bytes([number, 1, 1, 0x61, 1, 0x62, count]) + bytes.fromhex(octets)
        stream_id = peer.bidi()
        peer.data(stream_id, b"\x03" + len(body).to_bytes(2, "big") + body)
        refused_with(peer, RequestErrorCode.INVALID_FILTER, stream_id)
    assert not peer.seen(SubscribeReceived)


def tokens_of_every_kind(peer: Lone) -> None:
    peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.register(1, 0, b"a"),)})
    peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.use_alias(1),)})
    peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.delete(1),)})
    peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.register(1, 0, b"b" * 24),)})
    assert len(peer.seen(SubscribeReceived)) == 4
    for token in (Token.use_alias(2), Token.delete(2)):
        stream_id = peer.ask(parameters={P.AUTHORIZATION_TOKEN: (token,)})
        refused_with(peer, RequestErrorCode.MALFORMED_AUTH_TOKEN, stream_id)
    # Registered although its request is refused.
    stream_id = peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.delete(1), Token.delete(8))})
    refused_with(peer, RequestErrorCode.MALFORMED_AUTH_TOKEN, stream_id)
    peer.ask(parameters={P.AUTHORIZATION_TOKEN: (Token.register(1, 0, b"c" * 24),)})


def an_unknown_alias_in_an_update(peer: Lone) -> None:
    update = RequestUpdate(100, Parameters({P.AUTHORIZATION_TOKEN: (Token.use_alias(5),)}))
    stream_id = peer.ask(update)
    [asked] = peer.seen(SubscribeReceived)
    peer.session.accept_subscribe(asked.request_id, LocalTrack(NAME))
    peer.drain()
    answers = peer.messages(stream_id)
    assert [type(m) for m in answers] == [SubscribeOk, RequestError, PublishDone]


def goaway_on_a_request_stream(peer: Lone) -> None:
    peer.ask(Goaway("", 500))
    assert [e.request_id for e in peer.seen(GoawayReceived)] == [0]


# -- answers ---------------------------------------------------------------------------------------


def unknown_codes(peer: Lone) -> None:
    request_id = peer.session.subscribe(NAME)
    peer.drain()
    peer.say(peer.last_stream(), RequestError(0x9D, 1, "?"), fin=True)
    assert [(e.request_id, e.code) for e in peer.seen(RequestRefused)] == [(request_id, 0x9D)]
    request_id, stream_id = peer.subscribed(7)
    peer.say(stream_id, PublishDone(0x11C, 0, "?"), fin=True)
    assert [e.code for e in peer.seen(SubscriptionEnded)] == [0x11C]
    _, stream_id = peer.subscribed(8)
    peer.reset(stream_id, 0x9D)
    assert len(peer.seen(SubscriptionEnded)) == 2


def a_stop_ahead_of_the_answer(peer: Lone) -> None:
    # A responder that refuses may stop our direction besides, and packets overtake each other.
    peer.session.subscribe(NAME)
    peer.drain()
    stream_id = peer.last_stream()
    peer.stop(stream_id)
    peer.say(stream_id, RequestError(RequestErrorCode.UNAUTHORIZED), fin=True)
    assert [e.code for e in peer.seen(RequestRefused)] == [RequestErrorCode.UNAUTHORIZED]


def a_stop_ahead_of_publish_done(peer: Lone) -> None:
    _, stream_id = peer.subscribed(7)
    peer.stop(stream_id)
    peer.say(stream_id, PublishDone(PublishDoneCode.TRACK_ENDED, 0), fin=True)
    assert [e.code for e in peer.seen(SubscriptionEnded)] == [PublishDoneCode.TRACK_ENDED]


def fin_instead_of_an_answer(peer: Lone) -> None:
    peer.session.subscribe(NAME)
    peer.session.fetch(NAME, location_filter=LocationFilter.none())
    peer.session.publish_namespace(NAME.namespace)
    peer.session.subscribe_namespace(NAME.namespace)
    peer.session.track_status(NAME)
    peer.drain()
    for stream_id in (0, 4, 8):
        peer.data(stream_id, b"", fin=True)
    for stream_id in (12, 16):
        peer.reset(stream_id)
    assert len(peer.seen(RequestRefused)) == 5
    assert peer.session.open_requests == 0


def fin_without_publish_done(peer: Lone) -> None:
    _, stream_id = peer.subscribed(7)
    peer.data(stream_id, b"", fin=True)
    [ended] = peer.seen(SubscriptionEnded)
    assert (ended.code, ended.complete) == (PublishDoneCode.INTERNAL_ERROR, False)


def state_notified(peer: Lone) -> None:
    _, stream_id = peer.subscribed(7)
    peer.say(stream_id, PublishStateNotify(Parameters({P.LARGEST_OBJECT: Location(3, 4)})))
    assert len(peer.seen(StateNotified)) == 1


def publish_done_ahead_of_its_streams(peer: Lone) -> None:
    _, stream_id = peer.subscribed(7)
    peer.say(stream_id, PublishDone(PublishDoneCode.TRACK_ENDED, 1), fin=True)
    assert not peer.seen(SubscriptionEnded)
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80 00 01 61"), fin=True)
    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]


def more_streams_than_counted(peer: Lone) -> None:
    _, stream_id = peer.subscribed(7)
    for group in range(3):
        peer.data(peer.uni(), bytes([0x10, 7, group, 128, 0, 1, 97]), fin=True)
    peer.say(stream_id, PublishDone(PublishDoneCode.TRACK_ENDED, 1), fin=True)
    assert [e.complete for e in peer.seen(SubscriptionEnded)] == [True]


# -- data ------------------------------------------------------------------------------------------


def objects_ahead_of_subscribe_ok(peer: Lone) -> None:
    peer.session.subscribe(NAME)
    peer.drain()
    stream_id = peer.last_stream()
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80 00 01 61"), fin=True)
    assert not peer.seen(ObjectReceived)
    peer.say(stream_id, SubscribeOk(7))
    assert [type(e) for e in peer.events[-2:]] == [SubscribeAccepted, ObjectReceived]


def a_fill_ahead_of_subscribe_ok(peer: Lone) -> None:
    request_id = peer.session.subscribe(NAME, fill=LocationFilter.none())
    peer.drain()
    stream_id = peer.last_stream()
    peer.data(peer.uni(), bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61"), fin=True)
    peer.say(stream_id, SubscribeOk(7))
    assert len(peer.seen(ObjectReceived)) == 1
    assert [e.complete for e in peer.seen(FillEnded)] == [True]


def a_fill_ahead_of_the_refusal(peer: Lone) -> None:
    request_id = peer.session.subscribe(NAME, fill=LocationFilter.none())
    peer.drain()
    stream_id, fill = peer.last_stream(), peer.uni()
    peer.data(fill, bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61"))
    peer.say(stream_id, RequestError(RequestErrorCode.INTERNAL_ERROR), fin=True)
    assert StopSending(fill, StreamErrorCode.CANCELLED) in peer.commands
    peer.data(fill, bytes.fromhex("00 01 62"))
    assert len(peer.seen(ObjectReceived)) == 1


def objects_ahead_of_fetch_ok(peer: Lone) -> None:
    request_id = peer.session.fetch(NAME, location_filter=LocationFilter.none())
    peer.drain()
    stream_id = peer.last_stream()
    peer.data(peer.uni(), bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61"), fin=True)
    assert not peer.seen(FetchEnded)
    peer.say(stream_id, FetchOk(False, Location(0, 0)), fin=True)
    assert [e.complete for e in peer.seen(FetchEnded)] == [True]


def objects_ahead_of_a_refused_fetch(peer: Lone) -> None:
    request_id = peer.session.fetch(NAME, location_filter=LocationFilter.none())
    peer.drain()
    stream_id = peer.last_stream()
    peer.data(peer.uni(), bytes([5, request_id]) + bytes.fromhex("1c 00 00 80 01 61"))
    peer.say(stream_id, RequestError(RequestErrorCode.INTERNAL_ERROR), fin=True)
    assert len(peer.seen(RequestRefused)) == 1
    assert peer.session.open_requests == 0


def an_unknown_alias(peer: Lone) -> None:
    stream_id = peer.uni()
    peer.data(stream_id, bytes.fromhex("10 873f 00 80 00 01 61"))
    assert not [c for c in peer.commands if isinstance(c, StopSending)]
    peer.later(11.0)
    assert StopSending(stream_id, StreamErrorCode.EXCESSIVE_LOAD) in peer.commands
    peer.session.receive_datagram(bytes.fromhex("00 873f 00 00 80 61"))


def a_cancelled_alias(peer: Lone) -> None:
    request_id, _ = peer.subscribed(7)
    peer.session.cancel(request_id)
    peer.drain()
    late = peer.uni()
    peer.data(late, bytes.fromhex("10 07 00 80 00 01 61"))
    assert StopSending(late, StreamErrorCode.CANCELLED) in peer.commands
    peer.data(late, bytes(1000))
    peer.reset(late)
    peer.session.receive_datagram(bytes.fromhex("00 07 00 00 80 61"))
    assert not peer.seen(ObjectReceived)


def a_fetch_stream_of_an_unknown_request(peer: Lone) -> None:
    stream_id = peer.uni()
    peer.data(stream_id, bytes.fromhex("05 8fff 1c 00 00 80 01 61"))
    assert StopSending(stream_id, StreamErrorCode.CANCELLED) in peer.commands


def strays_outside_the_filter(peer: Lone) -> None:
    peer.subscribed(7, location_filter=LocationFilter.absolute_start(5, 0))
    peer.data(peer.uni(), bytes.fromhex("10 07 01 80 00 01 61"), fin=True)
    assert len(peer.seen(ObjectReceived)) == 1


def unknown_properties(peer: Lone) -> None:
    peer.session.subscribe(NAME)
    peer.drain()
    peer.data(peer.last_stream(), bytes.fromhex("04 0009 07 00 809d 02 aabb 0105"))
    assert len(peer.seen(SubscribeAccepted)) == 1
    peer.data(peer.uni(), bytes.fromhex("11 07 00 80 00 05 809d 02 aabb 01 61"), fin=True)
    assert len(peer.seen(ObjectReceived)) == 1


def a_mandatory_property_that_nobody_knows(peer: Lone) -> None:
    peer.session.subscribe(NAME)
    peer.drain()
    peer.data(peer.last_stream(), bytes.fromhex("04 0006 07 00 c04000 01"))
    assert [e.code for e in peer.seen(RequestRefused)] == [RequestErrorCode.UNSUPPORTED_EXTENSION]


def padding_of_every_kind(peer: Lone) -> None:
    stream_id = peer.uni()
    peer.data(stream_id, padding_stream(100_000))
    peer.data(stream_id, bytes(100_000), fin=True)
    peer.session.receive_datagram(padding_datagram(1000))


def a_malformed_track(peer: Lone) -> None:
    _, first = peer.subscribed(7)
    other = peer.session.subscribe(FullTrackName.of("another", "track"))
    peer.drain()
    peer.say(peer.last_stream(), SubscribeOk(8))
    # {0, 0}, the end of the group at 1, and on another stream {0, 5}.
    peer.data(peer.uni(), bytes.fromhex("10 07 00 80 00 01 61 00 00 03"), fin=True)
    peer.data(peer.uni(), bytes.fromhex("14 07 00 01 80 05 01 61"))
    [ended] = peer.seen(SubscriptionEnded)
    assert (ended.code, ended.by_peer) == (PublishDoneCode.MALFORMED_TRACK, False)
    assert ResetStream(first, StreamErrorCode.CANCELLED) in peer.commands
    assert StopSending(first, StreamErrorCode.CANCELLED) in peer.commands
    peer.data(peer.uni(), bytes.fromhex("10 08 00 80 00 01 61"), fin=True)
    assert peer.seen(ObjectReceived)[-1].request_id == other


def an_object_beyond_our_limit(peer: Lone) -> None:
    peer.subscribed(7)
    stream_id = peer.uni()
    # One whole Object, and one of 2**56 octets in the same piece.
    peer.data(stream_id, bytes.fromhex("10 07 00 80 00 01 61 00 ff0100000000000000 61"))
    assert [e.location for e in peer.seen(ObjectReceived)] == [Location(0, 0)]
    assert StopSending(stream_id, StreamErrorCode.EXCESSIVE_LOAD) in peer.commands


def an_answer_to_a_cancelled_request(peer: Lone) -> None:
    for _ in range(2):
        request_id = peer.session.subscribe(NAME)
        peer.drain()
        stream_id = peer.last_stream()
        peer.session.cancel(request_id)
        peer.drain()
        peer.say(stream_id, SubscribeOk(7))
        peer.say(stream_id, RequestOk(), fin=True)
    assert not peer.seen(SubscribeAccepted)
    assert peer.session.open_requests == 0


ROWS = [
    Row("unknown setup options", unknown_options, established=False),
    Row("SETUP cut at every octet", setup_cut_everywhere, established=False),
    Row("registration beyond the limit in SETUP", register_beyond_the_limit_in_setup,
        established=False),
    Row("data and requests ahead of SETUP", everything_ahead_of_setup, established=False),
    Row("many requests ahead of SETUP", many_requests_ahead_of_setup, established=False),
    Row("a flood ahead of SETUP", a_flood_on_one_request_ahead_of_setup, established=False),
    Row("Request IDs out of order", request_ids_out_of_order),
    Row("integers longer than they need be", non_minimal_integers),
    Row("a namespace of no fields", a_namespace_of_no_fields),
    Row("a name of exactly 4096 octets", a_name_of_exactly_4096_octets),
    Row("FIN behind a request", fin_behind_a_request),
    Row("FIN behind an update", fin_behind_an_update),
    Row("an empty request stream", an_empty_request_stream),
    Row("a reset in the middle of a request", a_request_stream_reset_in_the_middle_of_its_request),
    Row("a STOP_SENDING that overtakes its request", a_stop_that_overtakes_its_request),
    Row("requests of every kind", requests_of_every_kind),
    Row("a PUBLISH that nobody wants", a_publish_that_nobody_wants),
    Row("a PUBLISH with an unknown mandatory property",
        a_publish_with_an_unknown_mandatory_property),
    Row("an alias published again", an_alias_published_again_once_its_track_is_over),
    Row("STOP_SENDING by the publisher of a PUBLISH", a_stop_by_the_publisher_of_a_publish),
    Row("update by the publisher of a PUBLISH", an_update_by_the_publisher_of_a_publish),
    Row("reserved names", reserved_names),
    Row("unknown reserved names", unknown_reserved_names_go_to_the_application),
    Row("invalid filters", invalid_filters, config=SessionConfig(max_filter_ranges=16)),
    Row("tokens of every kind", tokens_of_every_kind,
        config=SessionConfig(max_auth_token_cache_octets=40)),
    Row("unknown alias in an update", an_unknown_alias_in_an_update),
    Row("GOAWAY on a request stream", goaway_on_a_request_stream),
    Row("unknown codes", unknown_codes, CLIENT),
    Row("STOP_SENDING ahead of a refusal", a_stop_ahead_of_the_answer, CLIENT),
    Row("STOP_SENDING ahead of PUBLISH_DONE", a_stop_ahead_of_publish_done, CLIENT),
    Row("streams that end without an answer", fin_instead_of_an_answer, CLIENT),
    Row("FIN without PUBLISH_DONE", fin_without_publish_done, CLIENT),
    Row("PUBLISH_STATE_NOTIFY", state_notified, CLIENT),
    Row("PUBLISH_DONE ahead of its streams", publish_done_ahead_of_its_streams, CLIENT),
    Row("more streams than counted", more_streams_than_counted, CLIENT),
    Row("Objects ahead of SUBSCRIBE_OK", objects_ahead_of_subscribe_ok, CLIENT),
    Row("a fill ahead of SUBSCRIBE_OK", a_fill_ahead_of_subscribe_ok, CLIENT),
    Row("a fill ahead of a refusal", a_fill_ahead_of_the_refusal, CLIENT),
    Row("Objects ahead of FETCH_OK", objects_ahead_of_fetch_ok, CLIENT),
    Row("Objects ahead of a refused FETCH", objects_ahead_of_a_refused_fetch, CLIENT),
    Row("an unknown alias", an_unknown_alias, CLIENT),
    Row("a cancelled alias", a_cancelled_alias, CLIENT),
    Row("a fetch stream of nobody's", a_fetch_stream_of_an_unknown_request, CLIENT),
    Row("strays outside the filter", strays_outside_the_filter, CLIENT),
    Row("unknown properties", unknown_properties, CLIENT),
    Row("an unknown mandatory property", a_mandatory_property_that_nobody_knows, CLIENT),
    Row("padding", padding_of_every_kind, CLIENT),
    Row("a malformed track", a_malformed_track, CLIENT),
    Row("an Object beyond our limit", an_object_beyond_our_limit, CLIENT),
    Row("an answer to a cancelled request", an_answer_to_a_cancelled_request, CLIENT),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_session_lives_on(row: Row) -> None:
    peer = Lone(row.role, config=row.config, established=row.established)

    row.do(peer)

    peer.assert_alive()
