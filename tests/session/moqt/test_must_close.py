"""What MUST close a session, row by row, and with which code.

Octets that no codec of ours would write are spelled out; the number in a name is the row of the
draft's list of violations that it stands for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moqt.codepoints import GroupOrder, SessionErrorCode
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode as R
from moqt.codepoints import SessionErrorCode as C
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import CloseSession
from moqt.session.config import Role, SessionConfig
from moqt.session.events import PublishReceived, SessionTerminated
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.namespace import (
    Namespace,
    NamespaceDone,
    PublishNamespace,
    PublishSkipped,
    SubscribeNamespace,
)
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
from moqt.wire.token import AuthorizationToken as Token
from tests.session.lone import NAME, Lone

PV = C.PROTOCOL_VIOLATION
SERVER, CLIENT = Role.SERVER, Role.CLIENT
Deed = Callable[[Lone], None]
CACHE = SessionConfig(max_auth_token_cache_octets=40)


@dataclass(frozen=True)
class Row:
    """A deed of the peer, and what the session closes with."""

    name: str
    do: Deed
    code: SessionErrorCode = PV
    role: Role = SERVER
    established: bool = True
    config: SessionConfig | None = None


def uni(*pieces: str, fin: bool = False) -> Deed:
    """A unidirectional stream with these octets."""
    return lambda peer: peer.data(peer.uni(), bytes.fromhex("".join(pieces)), fin=fin)


def bidi(*pieces: str, fin: bool = False) -> Deed:
    """A bidirectional stream with these octets."""
    return lambda peer: peer.data(peer.bidi(), bytes.fromhex("".join(pieces)), fin=fin)


def control(*pieces: str, fin: bool = False) -> Deed:
    """More octets on the peer's control stream."""
    return lambda peer: peer.data(peer.control, bytes.fromhex("".join(pieces)), fin=fin)


def control_begins(octets: str) -> Deed:
    """The first octets of the peer's control stream."""
    return lambda peer: peer.data(peer.control, bytes.fromhex(octets))


def datagram(octets: str) -> Deed:
    def do(peer: Lone) -> None:
        peer.session.receive_datagram(bytes.fromhex(octets))
        peer.drain()

    return do


def setup(*pieces: str) -> Deed:
    """A SETUP with these options as the first message."""
    body = bytes.fromhex("".join(pieces))
    data = bytes.fromhex("af00") + len(body).to_bytes(2, "big") + body
    return lambda peer: peer.data(peer.control, data)


def subscribe(parameters: str, count: int = 1) -> Deed:
    """A SUBSCRIBE with these parameters."""
    tail = bytes([count]) + bytes.fromhex(parameters)
    body = bytes.fromhex("00 01 01 61 01 62") + tail
    data = b"\x03" + len(body).to_bytes(2, "big") + body
    return lambda peer: peer.data(peer.bidi(), data)


def named(namespace: str, name: str = "0162") -> Deed:
    """A SUBSCRIBE for a name with these octets."""
    body = bytes.fromhex("00" + namespace + name + "00")
    return lambda peer: peer.data(peer.bidi(), b"\x03" + len(body).to_bytes(2, "big") + body)


def twice(request_id: int, first_id: int = 0) -> Deed:
    """Two requests with these Request IDs."""

    def do(peer: Lone) -> None:
        peer.say(peer.bidi(), Subscribe(first_id, NAME))
        peer.say(peer.bidi(), SubscribeNamespace(request_id, TrackNamespace.of("x")))

    return do


Answer = Message | bytes


def answering(ask: Callable[[Lone], object], *answers: Answer) -> Deed:
    """These answers to a request of the session's."""

    def do(peer: Lone) -> None:
        ask(peer)
        peer.drain()
        stream_id = peer.last_stream()
        for answer in answers:
            peer.data(stream_id, answer if isinstance(answer, bytes) else encode_message(answer))

    return do


def answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.subscribe(NAME), *answers)


def fetch_answered(*answers: Answer) -> Deed:
    wanted = LocationFilter.absolute_start(3, 0)
    return answering(lambda peer: peer.session.fetch(NAME, location_filter=wanted), *answers)


def namespaces_answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.subscribe_namespace(NS), *answers)


def announcement_answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.publish_namespace(NS), *answers)


def tracks_answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.subscribe_tracks(NS), *answers)


def publish_answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.publish(LocalTrack(NAME)), *answers)


def published(*more: Message, accept: bool = True) -> Deed:
    """A PUBLISH of the peer with Track Alias 7, accepted, and these messages behind it."""

    def do(peer: Lone) -> None:
        stream_id = peer.bidi()
        peer.say(stream_id, Publish(peer.request_id(), NAME, 7))
        if accept:
            peer.session.accept_publish(peer.seen(PublishReceived)[0].request_id)
        peer.say(stream_id, *more)

    return do


def two_publishes_of_one_alias(peer: Lone) -> None:
    for track in (NAME, FullTrackName.of("another", "track")):
        peer.say(peer.bidi(), Publish(peer.request_id(), track, 7))
    for asked in peer.seen(PublishReceived):
        peer.session.accept_publish(asked.request_id)
    peer.drain()


def a_publish_of_an_alias_in_use(peer: Lone) -> None:
    peer.subscribed(7)
    peer.say(peer.bidi(), Publish(peer.request_id(), FullTrackName.of("another", "track"), 7))


def parked_for_a_publish(octets: str) -> Deed:
    """Data ahead of the answer to a PUBLISH with Track Alias 7, looked at with the answer."""

    def do(peer: Lone) -> None:
        peer.say(peer.bidi(), Publish(peer.request_id(), NAME, 7))
        peer.data(peer.uni(), bytes.fromhex(octets), fin=True)
        peer.session.accept_publish(peer.seen(PublishReceived)[0].request_id)
        peer.drain()

    return do


def status_answered(*answers: Answer) -> Deed:
    return answering(lambda peer: peer.session.track_status(NAME), *answers)


def on_subscription(octets: str, *, fin: bool = False) -> Deed:
    """A data stream of an Established subscription, with Track Alias 7."""

    def do(peer: Lone) -> None:
        peer.subscribed(7)
        peer.data(peer.uni(), bytes.fromhex(octets), fin=fin)

    return do


def datagram_on_subscription(octets: str) -> Deed:
    def do(peer: Lone) -> None:
        peer.subscribed(7)
        datagram(octets)(peer)

    return do


def on_fetch(octets: str, *, fin: bool = False, order: GroupOrder = GroupOrder.ASCENDING) -> Deed:
    """The data stream of a FETCH of the session's; ``octets`` follow its header."""

    def do(peer: Lone) -> None:
        request_id = peer.session.fetch(
            NAME, location_filter=LocationFilter.absolute_start(0, 0), group_order=order
        )
        peer.drain()
        peer.data(peer.uni(), bytes([5, request_id]) + bytes.fromhex(octets), fin=fin)

    return do


def two_tracks_of_one_alias(peer: Lone) -> None:
    peer.subscribed(7)
    peer.session.subscribe(FullTrackName.of("another", "track"))
    peer.drain()
    peer.say(peer.last_stream(), SubscribeOk(7))


def with_tokens(*tokens: Token) -> Deed:
    def do(peer: Lone) -> None:
        for token in tokens:
            peer.ask(parameters={P.AUTHORIZATION_TOKEN: (token,)})

    return do


def tokens_in_an_update(*tokens: Token) -> Deed:
    def do(peer: Lone) -> None:
        updates = [
            RequestUpdate(100 + 2 * n, Parameters({P.AUTHORIZATION_TOKEN: (token,)}))
            for n, token in enumerate(tokens)
        ]
        peer.ask(*updates)

    return do


def asking(*more: Message) -> Deed:
    """A SUBSCRIBE, and these messages behind it."""

    def do(peer: Lone) -> None:
        peer.ask(*more)

    return do


def updates(count: int) -> Deed:
    """So many REQUEST_UPDATEs ahead of the answer to a SUBSCRIBE."""
    return asking(*(RequestUpdate(100 + 2 * n) for n in range(count)))


def no_setup(peer: Lone) -> None:
    peer.later(9.9)
    assert peer.close is None
    peer.later(0.2)


def goaway_ignored(peer: Lone) -> None:
    peer.ask()
    peer.session.goaway(timeout_ms=5000)
    peer.later(0.0)
    peer.later(4.9)
    assert peer.close is None
    peer.later(0.2)


def two_control_streams(peer: Lone) -> None:
    peer.say(peer.uni(), Setup())


def reset_of_control(peer: Lone) -> None:
    peer.reset(peer.control)


def stop_of_control(peer: Lone) -> None:
    own = peer.session._control._own
    assert own is not None
    peer.stop(own)


def update_of(request: Subscribe | Fetch | TrackStatus | PublishNamespace, octets: str) -> Deed:
    """A REQUEST_UPDATE with these parameters, behind a request."""
    body = bytes.fromhex("40" + octets)
    data = b"\x02" + len(body).to_bytes(2, "big") + body
    return lambda peer: peer.data(peer.bidi(), encode_message(request) + data)


LONG = "01" + "9000" + "61" * 4096  # one field of 4096 octets
OK = encode_message(SubscribeOk(7))
NS = TrackNamespace.of("kvcs-1")
SUBSCRIBE = Subscribe(0, NAME)
STATUS = TrackStatus(0, NAME)

ROWS = [
    # 1-6: streams, messages, framing
    Row("1 unknown unidirectional stream", uni("2a 00")),
    Row("1 unknown stream type of many octets", uni("f0132b3e29")),
    Row("1 unidirectional stream without a whole type", uni("c0", fin=True)),
    Row("2 bidirectional stream begins with an answer", bidi("07 0002 00 00")),
    Row("2 bidirectional stream begins with GOAWAY", bidi("10 0002 00 00")),
    Row("2 bidirectional stream begins with SETUP", bidi("af00 0000")),
    Row("3 control stream ends", control("", fin=True)),
    Row("3 control stream ends with SETUP", lambda p: p.say(p.control, Setup(), fin=True),
        established=False),
    Row("3 control stream reset", reset_of_control),
    Row("3 our control stream stopped", stop_of_control),
    Row("3 second control stream", two_control_streams),
    Row("3 second SETUP", lambda p: p.say(p.control, Setup())),
    Row("3 second SETUP in the same piece", control_begins("af00 0000 af00 0000"),
        established=False),
    Row("3 request on the control stream", lambda p: p.say(p.control, SUBSCRIBE)),
    Row("4 unknown message on the control stream", control("7e 0000")),
    Row("4 unknown message opens a request stream", bidi("7e 0000")),
    Row("4 unknown message behind a request", lambda p: p.data(p.ask(), bytes.fromhex("7e0000"))),
    Row("4 message numbers of older drafts", bidi("1e 0001 00")),
    Row("5 message longer than its fields", bidi("03 0009 00 010161 0162 00 0000")),
    Row("5 message shorter than its fields", bidi("03 0006 00 010161 0162")),
    Row("5 request cut by FIN", bidi("03 0007 00 0101", fin=True)),
    Row("5 update cut by FIN", lambda p: p.data(p.ask(), bytes.fromhex("02 0003 40"), fin=True)),
    Row("6 unknown datagram", datagram("10 07 00 00 80")),
    Row("6 datagram type beyond one octet", datagram("8080 07 00 00")),
    # 7: Request IDs
    Row("7 Request ID of the wrong side", lambda p: p.say(p.bidi(), Subscribe(1, NAME)),
        C.INVALID_REQUEST_ID),
    Row("7 Request ID of the wrong side, from a server",
        lambda p: p.say(p.bidi(), Subscribe(0, NAME)), C.INVALID_REQUEST_ID, CLIENT),
    Row("7 Request ID used twice, by other kinds", twice(0), C.INVALID_REQUEST_ID),
    Row("7 Request ID used twice, out of order", twice(40, 40), C.INVALID_REQUEST_ID),
    Row("7 update with the ID of its request", asking(RequestUpdate(0)),
        C.INVALID_REQUEST_ID),
    # 8, 9: pairs
    Row("8 type of a pair overflows", setup("ffffffffffffffffff 00" "02 00"), established=False),
    Row("8 value of a pair too long", setup("07 c10000" + "61" * 20), established=False),
    Row("9 undecodable token in SETUP", setup("03 01 09"), C.KEY_VALUE_FORMATTING_ERROR,
        established=False),
    Row("9 MOQT_IMPLEMENTATION is no text", setup("07 01 ff"), C.KEY_VALUE_FORMATTING_ERROR,
        established=False),
    Row("9 immutable properties are no pairs", answered(bytes.fromhex("04 0005 07 00 0b 01 03")),
        C.KEY_VALUE_FORMATTING_ERROR, CLIENT),
    # 10, 11: names and reasons
    Row("10 reason phrase too long", answered(
        bytes.fromhex("05 0405 10 00 8401") + b"x" * 1025), role=CLIENT),
    Row("11 namespace of 33 fields", named("21" + "0161" * 33)),
    Row("11 empty field", named("01 00")),
    Row("11 namespace of more than 4096 octets", named("02" + "9000" + "61" * 4096 + "0161")),
    Row("11 full name of more than 4096 octets", named(LONG, "0162")),
    Row("11 prefix and skipped track together too long", tracks_answered(
        RequestOk(), PublishSkipped(TrackNamespace(), b"x" * 4091)), role=CLIENT),
    Row("11 prefix and suffix together too long", namespaces_answered(
        RequestOk(), Namespace(TrackNamespace((b"x" * 4091,)))), role=CLIENT),
    # 12-15: tokens
    Row("12 token with an unknown alias type", subscribe("03 01 09"),
        C.KEY_VALUE_FORMATTING_ERROR),
    Row("12 token with octets left over", subscribe("03 03 02 00 00"),
        C.KEY_VALUE_FORMATTING_ERROR),
    Row("12 token cut short", subscribe("03 01 01"), C.KEY_VALUE_FORMATTING_ERROR),
    Row("13 alias registered twice",
        with_tokens(Token.register(1, 0, b"a"), Token.register(1, 0, b"b")),
        C.DUPLICATE_AUTH_TOKEN_ALIAS, config=CACHE),
    Row("13 alias registered twice, by updates",
        tokens_in_an_update(Token.register(1, 0, b"a"), Token.register(1, 0, b"b")),
        C.DUPLICATE_AUTH_TOKEN_ALIAS, config=CACHE),
    Row("14 token cache exceeded", with_tokens(Token.register(1, 0, b"x" * 25)),
        C.AUTH_TOKEN_CACHE_OVERFLOW, config=CACHE),
    Row("14 token cache exceeded by many", with_tokens(
        Token.register(1, 0, b"x" * 4), Token.register(2, 0, b"x" * 5)),
        C.AUTH_TOKEN_CACHE_OVERFLOW, config=CACHE),
    Row("14 registered without a cache", with_tokens(Token.register(1, 0, b"")),
        C.AUTH_TOKEN_CACHE_OVERFLOW, config=SessionConfig(max_auth_token_cache_octets=0)),
    Row("15 alias deleted in SETUP", setup("03 02 00 01"), established=False),
    Row("15 alias used in SETUP", setup("03 02 02 01"), established=False),
    # 16-18: where the session is to lead
    Row("16 PATH from a server", setup("01 03 2f6b76"), C.INVALID_PATH, CLIENT, False),
    Row("17 PATH without a slash", setup("01 02 6b76"), C.MALFORMED_PATH, established=False),
    Row("18 AUTHORITY from a server", setup("05 01 61"), C.INVALID_AUTHORITY, CLIENT, False),
    Row("18 AUTHORITY with a slash", setup("05 02 612f"), C.MALFORMED_AUTHORITY,
        established=False),
    Row("18 AUTHORITY twice", setup("05 01 61 00 01 61"), established=False),
    # 19, 20: updates and GOAWAY
    Row("19 too many updates", updates(33), C.TOO_MANY_REQUEST_UPDATES),
    Row("20 second GOAWAY", lambda p: p.say(p.control, Goaway(), Goaway())),
    Row("20 second GOAWAY on a request stream", asking(Goaway(), Goaway())),
    Row("20 GOAWAY with a URI too long", control("10 2004 a001" + "61" * 8193 + "00")),
    Row("20 GOAWAY with a URI from a client", lambda p: p.say(p.control, Goaway("moqt://x"))),
    Row("20 the same on a request stream", asking(Goaway("moqt://x"))),
    # 21-24: answers out of place
    Row("21 properties where none belong", answered(
        SubscribeOk(7), bytes.fromhex("07 0003 00 0201")), role=CLIENT),
    Row("21 properties in the answer to a namespace request",
        namespaces_answered(bytes.fromhex("07 0003 00 0201")), role=CLIENT),
    Row("22 redirect to another URI, from a client", answered(
        bytes.fromhex("05 0008 34 00 00 0178 00 0179")), role=SERVER),
    Row("22 redirect of a namespace request with a track name", namespaces_answered(
        bytes.fromhex("05 0009 34 00 00 00 0101 6e 0178")), role=CLIENT),
    Row("23 update of a TRACK_STATUS", update_of(STATUS, "00")),
    Row("23 update by the subscriber of a PUBLISH ahead of its answer", publish_answered(
        RequestUpdate(1))),
    Row("23 update by the publisher of a SUBSCRIBE_TRACKS", tracks_answered(
        RequestOk(), bytes.fromhex("02 0002 01 00")), role=CLIENT),
    Row("23 update by the publisher of a SUBSCRIBE", answered(OK, bytes.fromhex("02 0002 01 00")),
        role=CLIENT),
    Row("24 PUBLISH_STATE_NOTIFY by a subscriber", lambda p: p.say(p.ask(), PublishStateNotify())),
    Row("24 PUBLISH_STATE_NOTIFY by the subscriber of a PUBLISH", publish_answered(
        RequestOk(), PublishStateNotify())),
    Row("24 PUBLISH_STATE_NOTIFY on a SUBSCRIBE_TRACKS", tracks_answered(
        RequestOk(), PublishStateNotify()), role=CLIENT),
    Row("24 PUBLISH_STATE_NOTIFY on a FETCH", fetch_answered(PublishStateNotify()), role=CLIENT),
    # 25-28: aliases, ends, namespaces
    Row("25 one alias for two tracks", two_tracks_of_one_alias, C.DUPLICATE_TRACK_ALIAS, CLIENT),
    Row("25 one alias for two tracks that are published", two_publishes_of_one_alias,
        C.DUPLICATE_TRACK_ALIAS),
    Row("25 published alias that is in use", a_publish_of_an_alias_in_use,
        C.DUPLICATE_TRACK_ALIAS),
    Row("26 FETCH_OK that ends before its start", fetch_answered(
        FetchOk(False, Location(2, 9))), role=CLIENT),
    Row("27 NAMESPACE ahead of the answer", namespaces_answered(Namespace(TrackNamespace())),
        role=CLIENT),
    Row("27 PUBLISH_SKIPPED ahead of the answer", tracks_answered(
        PublishSkipped(TrackNamespace(), b"x")), role=CLIENT),
    Row("28 NAMESPACE_DONE ahead of its NAMESPACE", namespaces_answered(
        RequestOk(), NamespaceDone(TrackNamespace.of("a"))), role=CLIENT),
    Row("28 NAMESPACE_DONE of what went before another did", namespaces_answered(
        RequestOk(), Namespace(NS), NamespaceDone(NS), Namespace(TrackNamespace.of("a")),
        NamespaceDone(TrackNamespace.of("a")), NamespaceDone(NS)), role=CLIENT),
    # 29-32: parameters
    Row("29 unknown parameter", subscribe("803f 01")),
    Row("29 parameter type overflows", subscribe("02 1001 ffffffffffffffffff 00", 3)),
    Row("29 parameter out of place", subscribe("08 00")),
    Row("29 parameter twice", subscribe("20 01 00 01", 2)),
    Row("29 fewer parameters than counted", subscribe("20 01", 2)),
    Row("29 parameter out of place in an update", update_of(SUBSCRIBE, "01 22 01")),
    Row("29 filter in the update of a FETCH", update_of(Fetch(0, NAME), "01 21 05")),
    Row("29 Largest Object in the answer to a namespace request",
        namespaces_answered(bytes.fromhex("07 0004 01 09 01 01")), role=CLIENT),
    Row("29 Largest Object in the answer to a SUBSCRIBE_TRACKS",
        tracks_answered(bytes.fromhex("07 0004 01 09 01 01")), role=CLIENT),
    Row("29 Largest Object in the answer to a PUBLISH",
        publish_answered(bytes.fromhex("07 0004 01 09 01 01"))),
    Row("29 parameter in FETCH_OK", fetch_answered(bytes.fromhex("18 0006 00 0501 01 08 05")),
        role=CLIENT),
    Row("30 FORWARD is 2", subscribe("10 02")),
    Row("30 GROUP_ORDER is 0", subscribe("22 00")),
    Row("30 GROUP_ORDER is 3", subscribe("22 03")),
    Row("30 INCLUDE_PROPERTIES is 2", subscribe("35 02")),
    Row("31 location filter of type 6", subscribe("21 06")),
    Row("31 location filter beyond the last group",
        subscribe("21 03 ffffffffffffffffff 00 01")),
    Row("32 fill within a fill", subscribe("23 03 01 23 00")),
    Row("32 token within a fill", subscribe("23 04 01 03 01 09")),
    Row("32 INCLUDE_PROPERTIES within a fill", subscribe("23 03 01 35 00")),
    # 33-36: properties, statuses, datagrams
    Row("33 default group order is 3", answered(bytes.fromhex("04 0004 07 00 22 03")), role=CLIENT),
    Row("33 DYNAMIC_GROUPS is 2", answered(bytes.fromhex("04 0004 07 00 30 02")), role=CLIENT),
    Row("34 properties on an end of group", on_subscription("11 07 00 80 00 02 0201 00 03"),
        role=CLIENT),
    Row("35 unknown Object Status", on_subscription("10 07 00 80 00 00 01"), role=CLIENT),
    Row("36 datagram with a status that ends its group", datagram("22 07 00 00 80 03")),
    Row("36 datagram with properties of length 0", datagram("01 07 00 00 80 00 61")),
    Row("36 datagram with a status and properties", datagram("21 07 00 00 80 02 0201 03")),
    Row("36 datagram cut short", datagram("00 07 00")),
    Row("36 empty datagram", datagram("")),
    # 37-40: data streams
    Row("37 subgroup ID mode 3", uni("16 07 00 80")),
    Row("37 subgroup flags of 128 and more", uni("8090 07 00 80")),
    Row("38 Object ID beyond the last", on_subscription(
        "10 07 00 80 ffffffffffffffffff 0161 00 0161"), role=CLIENT),
    Row("39 FIN inside an Object", on_subscription("10 07 00 80 00 05 6161", fin=True),
        role=CLIENT),
    Row("39 FIN inside the head of an Object", on_subscription("10 07 00 80 00", fin=True),
        role=CLIENT),
    Row("39 FIN inside a subgroup header", uni("10 07", fin=True)),
    Row("39 FIN inside an Object of a fetch", on_fetch("1c 00 00 80 05 61", fin=True),
        role=CLIENT),
    Row("39 FIN inside an Object that waited for its PUBLISH",
        parked_for_a_publish("10 07 00 80 00 05 6161")),
    Row("40 fetch flags of 128 and more", on_fetch("8080"), role=CLIENT),
    Row("40 first Object without a group", on_fetch("14 00 80 00"), role=CLIENT),
    Row("40 first Object without a priority", on_fetch("0c 00 00 00"), role=CLIENT),
    Row("40 first Object refers to the subgroup before", on_fetch("1d 00 00 80 00"), role=CLIENT),
    Row("40 group beyond the last", on_fetch(
        "1c ffffffffffffffffff 00 80 00 0c 00 00 00"), role=CLIENT),
    Row("40 group below the first", on_fetch(
        "1c 00 00 80 00 0c 00 00 00", order=GroupOrder.DESCENDING), role=CLIENT),
    Row("40 Object beyond the last", on_fetch("1c 00 ffffffffffffffffff 80 00 00 00"),
        role=CLIENT),
    Row("40 priority before a marker and no Object", on_fetch("810c 00 05 0c 00 00 00"),
        role=CLIENT),
    # 41: answers twice
    Row("41 SUBSCRIBE_OK twice", answered(SubscribeOk(7), SubscribeOk(7)), role=CLIENT),
    Row("41 REQUEST_ERROR behind SUBSCRIBE_OK", answered(
        SubscribeOk(7), RequestError(R.TIMEOUT)), role=CLIENT),
    Row("41 REQUEST_OK answers a SUBSCRIBE", answered(RequestOk()), role=CLIENT),
    Row("41 REQUEST_OK without an update", answered(SubscribeOk(7), RequestOk()), role=CLIENT),
    Row("41 PUBLISH_DONE ahead of the answer", answered(PublishDone(2, 0)), role=CLIENT),
    Row("41 PUBLISH_DONE twice", answered(
        SubscribeOk(7), PublishDone(2, 1), PublishDone(2, 1)), role=CLIENT),
    Row("41 FETCH_OK twice", fetch_answered(
        FetchOk(False, Location(5, 0)), FetchOk(False, Location(5, 0))), role=CLIENT),
    Row("41 REQUEST_ERROR behind FETCH_OK", fetch_answered(
        FetchOk(False, Location(5, 0)), RequestError(R.TIMEOUT)), role=CLIENT),
    Row("41 REQUEST_OK twice for namespaces", namespaces_answered(RequestOk(), RequestOk()),
        role=CLIENT),
    Row("41 REQUEST_OK twice for an announcement",
        announcement_answered(RequestOk(), RequestOk()), role=CLIENT),
    Row("41 REQUEST_OK twice for a PUBLISH", publish_answered(RequestOk(), RequestOk())),
    Row("41 REQUEST_ERROR behind REQUEST_OK for a PUBLISH", publish_answered(
        RequestOk(), RequestError(R.UNINTERESTED))),
    Row("41 SUBSCRIBE_OK answers a PUBLISH", publish_answered(SubscribeOk(7))),
    Row("41 REQUEST_OK by the publisher", published(RequestOk())),
    Row("41 PUBLISH_DONE twice for a PUBLISH", published(PublishDone(2, 1), PublishDone(2, 1))),
    Row("41 PUBLISH_DONE twice ahead of the answer", published(
        PublishDone(2, 1), PublishDone(2, 1), accept=False)),
    Row("41 REQUEST_OK twice for tracks", tracks_answered(RequestOk(), RequestOk()), role=CLIENT),
    Row("41 NAMESPACE on a SUBSCRIBE_TRACKS", tracks_answered(
        RequestOk(), Namespace(TrackNamespace())), role=CLIENT),
    Row("41 FETCH_OK answers a TRACK_STATUS", status_answered(FetchOk(False, Location(5, 0))),
        role=CLIENT),
    # 43: too slow
    Row("43 no SETUP in time", no_setup, C.CONTROL_MESSAGE_TIMEOUT, established=False),
    Row("43 GOAWAY not followed in time", goaway_ignored, C.GOAWAY_TIMEOUT),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_closes_once_and_with_the_right_code(row: Row) -> None:
    peer = Lone(row.role, config=row.config, established=row.established)

    row.do(peer)

    closes = [c for c in peer.commands if isinstance(c, CloseSession)]
    assert [c.code for c in closes] == [row.code], closes
    assert peer.commands[-1] is closes[0]
    assert isinstance(peer.events[-1], SessionTerminated)
    assert len(peer.seen(SessionTerminated)) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nothing_happens_after_the_close(row: Row) -> None:
    peer = Lone(row.role, config=row.config, established=row.established)
    row.do(peer)
    peer.commands.clear()
    peer.events.clear()

    peer.say(peer.bidi(), Subscribe(2000, NAME))
    peer.data(peer.control, b"\x10\x00\x02\x00\x00")
    peer.later(1000.0)
    peer.session.goaway()
    peer.session.close()
    peer.session.receive_connection_lost(0, "", by_peer=True)
    peer.drain()

    assert (peer.commands, peer.events) == ([], [])
    assert peer.session.next_deadline() is None


def test_the_rows_of_the_draft_are_all_here() -> None:
    numbers = {int(row.name.split()[0]) for row in ROWS}

    assert numbers == set(range(1, 44)) - {
        42,  # more streams than counted: MAY, and tolerated; a relay may rewrite the count
    }
