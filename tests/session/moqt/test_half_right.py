"""A peer that speaks MOQT half right: whatever was said before, each mistake has its one answer.

A peer makes requests and answers ours, cancels, sends data and is silent, all of it allowed, in any
order. So the session lives. Then it makes one mistake, of which the reference says what it costs.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import CloseSession, StreamId
from moqt.session.config import Role, SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    ObjectReceived,
    PublishNamespaceReceived,
    PublishReceived,
    RequestId,
    SessionTerminated,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.namespace import PublishNamespace, SubscribeNamespace, SubscribeTracks
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk
from moqt.wire.messages.setup import Goaway
from moqt.wire.messages.subscribe import PublishDone, Subscribe, SubscribeOk, TrackStatus
from moqt.wire.streamtype import padding_stream
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object
from moqt.wire.token import AuthorizationToken as Token
from tests.session.lone import NAME, Lone
from tests.session.pair import make_track

PV = SessionErrorCode.PROTOCOL_VIOLATION
CONFIG = SessionConfig(
    authority="a",
    max_requests=30,
    max_parked_streams=4,
    max_parked_octets=2_000,
    max_partial_octets=4_000,
    max_object_octets=2_000,
    max_auth_token_cache_octets=64,
)
Deed = Callable[[Lone], object]


def octets(where: str, text: str, *, fin: bool = False) -> Deed:
    """Octets on the control stream, or on a stream that is opened for them."""

    def do(peer: Lone) -> None:
        stream_id = {"control": lambda: peer.control, "uni": peer.uni, "bidi": peer.bidi}[where]()
        peer.data(stream_id, bytes.fromhex(text), fin=fin)

    return do


def datagram(text: str) -> Deed:
    def do(peer: Lone) -> None:
        peer.session.receive_datagram(bytes.fromhex(text))
        peer.drain()

    return do


def asks_with(request_id: Callable[[Lone], int]) -> Deed:
    """A request with a Request ID that is not the peer's to use."""
    return lambda peer: peer.say(peer.bidi(), Subscribe(request_id(peer), NAME))


def asks_twice(peer: Lone) -> None:
    number = peer.request_id()
    for _ in range(2):
        peer.say(peer.bidi(), Subscribe(number, NAME))


def registers_twice(peer: Lone) -> None:
    token = Token.register(1, 0, b"t")
    for _ in range(2):
        peer.ask(parameters={P.AUTHORIZATION_TOKEN: (token,)})


def says_goaway_twice(peer: Lone) -> None:
    peer.say(peer.control, Goaway(), Goaway())


#: Mistakes, and the code that the session closes with, whatever was said before.
MISTAKES: dict[str, tuple[Deed, SessionErrorCode]] = {
    "an unknown stream type": (octets("uni", "2a00"), PV),
    "a stream that ends in its type": (octets("uni", "c0", fin=True), PV),
    "a second control stream": (octets("uni", "af000000"), PV),
    "a request stream that begins with an answer": (octets("bidi", "07000200 00"), PV),
    "a request stream that begins with SETUP": (octets("bidi", "af000000"), PV),
    "an unknown message": (octets("control", "3f0000"), PV),
    "an unknown message on a request stream": (octets("bidi", "3f0000"), PV),
    "a request that is cut": (octets("bidi", "0300ff00", fin=True), PV),
    "a second SETUP": (octets("control", "af000000"), PV),
    "an answer on the control stream": (octets("control", "07000200 00"), PV),
    "the end of the control stream": (octets("control", "", fin=True), PV),
    "a reset of the control stream": (lambda peer: peer.reset(peer.control), PV),
    "an unknown datagram": (datagram("3f00"), PV),
    "a datagram that is cut": (datagram("0001"), PV),
    "GOAWAY twice": (says_goaway_twice, PV),
    "a Request ID of ours": (
        asks_with(lambda peer: peer.request_id() + 1),
        SessionErrorCode.INVALID_REQUEST_ID,
    ),
    "a Request ID again": (asks_twice, SessionErrorCode.INVALID_REQUEST_ID),
    "a token alias again": (registers_twice, SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS),
    "more tokens than there is room for": (
        lambda peer: peer.ask(
            parameters={P.AUTHORIZATION_TOKEN: (Token.register(9, 0, b"t" * 80),)}
        ),
        SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW,
    ),
}

#: What is wrong, and costs the session nothing.
SLIPS: dict[str, Deed] = {
    "data of nobody's": octets("uni", "50 bf40 00 80 00 05 68656c6c6f", fin=True),
    "a fetch stream of nobody's": octets("uni", "05 bf40", fin=True),
    "padding": lambda peer: peer.data(peer.uni(), padding_stream(40), fin=True),
    "a padding datagram": datagram("f0132b3e2900000000"),
    "a datagram of nobody's": datagram("00 bf40 05 03 80 deadbeef"),
    "a token alias that nobody registered": lambda peer: peer.ask(
        parameters={P.AUTHORIZATION_TOKEN: (Token.use_alias(77),)}
    ),
    "a name of the session": lambda peer: peer.say(
        peer.bidi(), Subscribe(peer.request_id(), FullTrackName.of(".session", "x"))
    ),
    "an early STOP_SENDING": lambda peer: peer.stop(StreamId(4 * 5000 + (peer.control & 1))),
}


class HalfRight(RuleBasedStateMachine):
    """One session of ours, and a peer that does what may be done."""

    @initialize(role=st.sampled_from(Role))
    def begin(self, role: Role) -> None:
        self.peer = Lone(role, config=CONFIG)
        self.track = make_track(2, 3, octets=100, ended=False)
        self.names = 0
        #: Requests of the peer: their streams, and what waits for our application.
        self.asked: list[StreamId] = []
        self.waiting: list[Any] = []
        #: Requests of ours that are not answered, with what accepts them; and aliases in use.
        self.ours: list[tuple[RequestId, StreamId, Message]] = []
        self.aliases: list[tuple[int, RequestId, StreamId]] = []
        self.group = 10
        self._take_events()

    def _take_events(self) -> None:
        for event in self.peer.events:
            match event:
                case ObjectReceived():
                    self.peer.session.consumed(event)
                case (
                    SubscribeReceived()
                    | FetchReceived()
                    | TrackStatusReceived()
                    | SubscribeNamespaceReceived()
                    | PublishNamespaceReceived()
                    | SubscribeTracksReceived()
                    | PublishReceived()
                ):
                    self.waiting.append(event)
        self.peer.events.clear()
        self.peer.drain()

    def _name(self) -> FullTrackName:
        self.names += 1
        return FullTrackName.of("kvcs-1", f"n{self.names}", "t")

    # -- the peer asks -----------------------------------------------------------------------

    @rule(kind=st.integers(0, 6), cut=st.integers(1, 40))
    def a_request_comes(self, kind: int, cut: int) -> None:
        peer, name = self.peer, self._name()
        number, stream_id = peer.request_id(), peer.bidi()
        messages: list[Callable[[], Message]] = [
            lambda: Subscribe(number, name),
            lambda: Fetch(number, name),
            lambda: TrackStatus(number, name),
            lambda: SubscribeNamespace(number, name.namespace),
            lambda: PublishNamespace(number, name.namespace),
            lambda: SubscribeTracks(number, name.namespace),
            lambda: Publish(number, name, 1000 + number),
        ]
        message = messages[kind]()
        data = encode_message(message)
        peer.data(stream_id, data[:cut])
        if data[cut:]:
            peer.data(stream_id, data[cut:])
        self.asked.append(stream_id)
        self._take_events()

    @rule(which=st.integers(0, 99), accepts=st.booleans())
    def it_is_answered(self, which: int, accepts: bool) -> None:
        if not self.waiting:
            return
        event, session = self.waiting.pop(which % len(self.waiting)), self.peer.session
        if not accepts:
            session.reject(event.request_id, RequestErrorCode.DOES_NOT_EXIST, "no")
        else:
            match event:
                case SubscribeReceived():
                    session.accept_subscribe(event.request_id, self.track)
                case FetchReceived():
                    session.accept_fetch(event.request_id, self.track)
                case TrackStatusReceived():
                    session.accept_track_status(event.request_id, self.track)
                case SubscribeNamespaceReceived():
                    session.accept_namespaces(event.request_id, NamespaceDirectory())
                case PublishNamespaceReceived():
                    session.accept_namespace(event.request_id)
                case SubscribeTracksReceived():
                    session.accept_tracks(event.request_id)
                case PublishReceived():
                    session.accept_publish(event.request_id)
        self._take_events()

    @rule(which=st.integers(0, 99), how=st.integers(0, 3))
    def a_request_is_given_up(self, which: int, how: int) -> None:
        if not self.asked:
            return
        stream_id = self.asked.pop(which % len(self.asked))
        match how:
            case 0:
                self.peer.data(stream_id, b"", fin=True)
            case 1:
                self.peer.reset(stream_id)
            case 2:
                self.peer.stop(stream_id)
            case _:
                self.peer.stop(stream_id)
                self.peer.reset(stream_id)
        self._take_events()

    # -- we ask ------------------------------------------------------------------------------

    @rule(kind=st.integers(0, 5))
    def we_ask(self, kind: int) -> None:
        session, name = self.peer.session, self._name()
        self.group += 1
        asks: list[tuple[Callable[[], RequestId], Message]] = [
            (lambda: session.subscribe(name), SubscribeOk(self.group)),
            (
                lambda: session.fetch(name, location_filter=LocationFilter.group_end(0, 0, 1)),
                FetchOk(False, Location(1, 0)),
            ),
            (lambda: session.track_status(name), RequestOk()),
            (lambda: session.subscribe_namespace(name.namespace), RequestOk()),
            (lambda: session.publish_namespace(name.namespace), RequestOk()),
            (lambda: session.subscribe_tracks(name.namespace), RequestOk()),
        ]
        ask, answer = asks[kind]
        request_id = ask()
        self.peer.drain()
        self.ours.append((request_id, self.peer.last_stream(), answer))

    @rule(which=st.integers(0, 99), accepts=st.booleans())
    def we_are_answered(self, which: int, accepts: bool) -> None:
        if not self.ours:
            return
        request_id, stream_id, answer = self.ours.pop(which % len(self.ours))
        if not accepts:
            answer = RequestError(RequestErrorCode.DOES_NOT_EXIST)
        self.peer.say(stream_id, answer)
        if isinstance(answer, SubscribeOk):
            self.aliases.append((answer.track_alias, request_id, stream_id))
        self._take_events()

    @rule(which=st.integers(0, 99))
    def we_cancel(self, which: int) -> None:
        if self.ours:
            self.peer.session.cancel(self.ours[which % len(self.ours)][0])
            self.peer.drain()

    @rule(which=st.integers(0, 99), objects=st.integers(0, 4), ends=st.integers(0, 2))
    def data_come(self, which: int, objects: int, ends: int) -> None:
        if not self.aliases:
            return
        self.group += 1
        alias = self.aliases[which % len(self.aliases)][0]
        stream_id = self.peer.uni()
        parts = [SubgroupHeader(alias, self.group, 0, publisher_priority=7).encode()]
        for number in range(objects):
            before = number - 1 if number else None
            parts += [encode_subgroup_object(before, number, payload_length=200), b"x" * 200]
        self.peer.data(stream_id, b"".join(parts), fin=ends == 1)
        if ends == 2:
            self.peer.reset(stream_id)
        self._take_events()

    @rule(which=st.integers(0, 99))
    def a_subscription_ends(self, which: int) -> None:
        if self.aliases:
            _, _, stream_id = self.aliases.pop(which % len(self.aliases))
            self.peer.say(stream_id, PublishDone(2, 0), fin=True)
            self._take_events()

    # -- and the rest ------------------------------------------------------------------------

    @rule(name=st.sampled_from(sorted(SLIPS)))
    def a_slip(self, name: str) -> None:
        SLIPS[name](self.peer)
        self._take_events()

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.peer.later(seconds)
        self._take_events()

    @invariant()
    def it_lives_and_holds_little(self) -> None:
        if not hasattr(self, "peer"):
            return
        session: Any = self.peer.session
        assert self.peer.close is None, self.peer.close
        assert len(session._arrivals.opening) <= len(self.asked)
        assert session._delivery._parked_octets <= CONFIG.max_parked_octets
        assert len(session._arrivals.early_stops) <= 256

    @rule(name=st.sampled_from(sorted(MISTAKES)))
    def nothing_yet(self, name: str) -> None:
        """Choose the mistake that is made in the end."""
        self.mistake = name

    def teardown(self) -> None:
        if not hasattr(self, "peer"):
            return
        self.peer.assert_alive()
        do, code = MISTAKES[getattr(self, "mistake", "an unknown message")]
        self.peer.commands.clear()
        self.peer.events.clear()
        do(self.peer)

        assert [c.code for c in self.peer.commands if isinstance(c, CloseSession)] == [code]
        assert isinstance(self.peer.commands[-1], CloseSession)
        assert isinstance(self.peer.events[-1], SessionTerminated)
        self.peer.commands.clear()
        self.peer.events.clear()
        with suppress(UsageError):
            self.peer.session.subscribe(NAME)
        SLIPS["padding"](self.peer)
        self.peer.later(100.0)
        assert (self.peer.commands, self.peer.events) == ([], [])


HalfRight.TestCase.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestHalfRight = HalfRight.TestCase
