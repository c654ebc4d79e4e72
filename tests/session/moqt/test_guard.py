"""Who may do what, at two sessions back to back: every request, at once and while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moqt.authority import Action, Denied, Granted
from moqt.codepoints import ParameterType as P
from moqt.codepoints import (
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
    TokenAliasType,
)
from moqt.errors import UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import ResetStream, SendStreamData, StreamId
from moqt.session.config import SessionConfig
from moqt.session.core import Session
from moqt.session.events import (
    AccessDecided,
    FetchEnded,
    GoawayReceived,
    NamespaceRevoked,
    NamespacesEnded,
    NamespacesSubscribed,
    PeerRequest,
    PeerRequestEnded,
    PublicationEnded,
    PublishAccepted,
    RequestId,
    RequestRefused,
    SessionTerminated,
    SubscribeAccepted,
    SubscriptionEnded,
    TracksEnded,
    UpdateAccepted,
    UpdateRefused,
)
from moqt.session.guard import FAREWELL_S, REVOKED_S
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.framing import MessageBuffer
from moqt.wire.parameters import Parameters
from moqt.wire.token import AuthorizationToken
from tests.authorities import EVERYTHING, SCOPE, Pass, Showing, Table, token
from tests.session.pair import Pair

NAME = FullTrackName(SCOPE, b"k.raw.s0")
MISSING = FullTrackName(SCOPE, b"no such track")
ELSEWHERE = TrackNamespace((b"kvcs-1", b"other"))
FOREIGN = FullTrackName(ELSEWHERE, b"k.raw.s0")
FROM_START = LocationFilter.absolute_start(0, 0)
Ask = Callable[[Session], RequestId]


@dataclass(frozen=True)
class Kind:
    """A kind of request: how it is asked, and what it needs."""

    name: str
    ask: Callable[..., RequestId]
    needs: frozenset[Action]


def _subscribe(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.subscribe(name, **more)  # type: ignore[arg-type]


def _fetch(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.fetch(name, location_filter=FROM_START, **more)  # type: ignore[arg-type]


def _status(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.track_status(name, **more)  # type: ignore[arg-type]


def _publish(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.publish(LocalTrack(name), **more)  # type: ignore[arg-type]


def _announce(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.publish_namespace(name.namespace, **more)  # type: ignore[arg-type]


def _discover(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.subscribe_namespace(name.namespace, **more)  # type: ignore[arg-type]


def _wish(session: Session, name: FullTrackName = NAME, **more: object) -> RequestId:
    return session.subscribe_tracks(name.namespace, **more)  # type: ignore[arg-type]


KINDS = (
    Kind("SUBSCRIBE", _subscribe, frozenset({Action.SUBSCRIBE})),
    Kind("FETCH", _fetch, frozenset({Action.FETCH})),
    Kind("TRACK_STATUS", _status, frozenset({Action.TRACK_STATUS})),
    Kind("PUBLISH", _publish, frozenset({Action.PUBLISH})),
    Kind("PUBLISH_NAMESPACE", _announce, frozenset({Action.PUBLISH_NAMESPACE})),
    Kind("SUBSCRIBE_NAMESPACE", _discover, frozenset({Action.SUBSCRIBE_NAMESPACE})),
    Kind("SUBSCRIBE_TRACKS", _wish, frozenset({Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE})),
)
LASTING = tuple(kind for kind in KINDS if kind.name != "TRACK_STATUS")
by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
by_lasting = pytest.mark.parametrize("kind", LASTING, ids=lambda kind: kind.name)


def pair_with(table: Table, *shown: bytes, cache: int = 16 * 1024) -> Pair:
    """Return a pair whose client shows tokens in SETUP, and whose server serves one Track."""
    pair = Pair(
        client=SessionConfig(authority="relay.example", tokens=Showing(*shown)),
        server=SessionConfig(max_auth_token_cache_octets=cache),
        authority=table,
    )
    track = pair.server.publish(LocalTrack(NAME))
    subgroup = track.open_subgroup(0, 0)
    subgroup.publish(0, b"object")
    pair.server.directory.add(SCOPE)
    # A fetch would be over at once, if it could be sent.
    pair.frozen |= {StreamId(n) for n in range(7, 400, 4)}
    return pair


def good(**more: object) -> Table:
    """Return an Authority that lets ``setup`` have a session, and ``good`` everything."""
    return Table({b"setup": Pass(frozenset({Action.CLIENT_SETUP})), b"good": Pass(**more)})  # type: ignore[arg-type]


def tokens_sent(pair: Pair) -> list[AuthorizationToken]:
    """Return the tokens of the requests that the client sent, in order."""
    found: list[AuthorizationToken] = []
    for end, command in pair.log:
        if (
            end is pair.client
            and isinstance(command, SendStreamData)
            and command.stream_id % 4 == 0
        ):
            buffer = MessageBuffer()
            buffer.feed(bytes(command.data))
            for message in buffer.messages(None):
                found += getattr(message, "parameters", {}).get(P.AUTHORIZATION_TOKEN, ())
    return found


# -- SETUP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        ((), SessionErrorCode.UNAUTHORIZED),
        ((b"forged",), SessionErrorCode.MALFORMED_AUTH_TOKEN),
        ((b"old",), SessionErrorCode.EXPIRED_AUTH_TOKEN),
        ((b"revoked",), SessionErrorCode.UNAUTHORIZED),
        ((b"no-setup",), SessionErrorCode.UNAUTHORIZED),
    ],
)
def test_a_setup_that_is_not_allowed_closes_the_session(
    shown: tuple[bytes, ...], code: SessionErrorCode
) -> None:
    table = Table(
        {
            b"old": Pass(expires_at=999.0),
            b"revoked": Pass(revoked=True),
            b"no-setup": Pass(EVERYTHING - {Action.CLIENT_SETUP}),
        }
    )
    pair = Pair(
        client=SessionConfig(authority="relay.example", tokens=Showing(*shown)),
        authority=table,
        start=False,
    )
    pair.client.session.start()
    pair.server.session.start()
    pair.settle()

    assert pair.server.closed is not None
    assert (pair.server.closed.code, pair.server.closed.reason) == (code, "")
    decided, over = pair.server.seen
    assert isinstance(decided, AccessDecided)
    assert (decided.action, decided.namespace) == (Action.CLIENT_SETUP, None)
    assert isinstance(decided.answer, Denied)
    assert isinstance(over, SessionTerminated)


def test_a_server_that_was_dialled_is_asked_for_no_token() -> None:
    table = Table({b"setup": Pass()})
    pair = pair_with(table, b"setup")
    pair.server.session.subscribe(NAME)
    pair.settle()

    assert [action for action, _, _ in table.asked] == [Action.CLIENT_SETUP]
    assert pair.server.one(RequestRefused).code == RequestErrorCode.DOES_NOT_EXIST


def test_the_authority_hears_where_the_peer_comes_from_and_what_it_shows() -> None:
    table = Table({b"setup": Pass()})
    pair = Pair(
        client=SessionConfig(authority="relay.example", tokens=Showing(b"setup")),
        authority=table,
        start=False,
    )
    pair.client.session.start()
    pair.server.session.start(address="192.0.2.7", certificate=b"der")
    pair.settle()

    [bearer] = table.bearers
    assert (bearer.address, bearer.certificate) == ("192.0.2.7", b"der")
    assert [t.value for t in bearer.tokens] == [b"setup"]


# -- every request ---------------------------------------------------------------------------------


@by_name
def test_what_is_allowed_reaches_the_application_with_what_was_shown(kind: Kind) -> None:
    pair = pair_with(good(), b"setup")
    heard: list[PeerRequest] = []
    pair.server.on_event = lambda e: heard.append(e) if isinstance(e, PeerRequest) else None

    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    [request] = heard
    assert [t.value for t in request.tokens] == [b"good"]
    assert not pair.client.take(RequestRefused)


@by_name
def test_the_tokens_of_setup_count_for_a_request_without_any(kind: Kind) -> None:
    pair = pair_with(Table({b"setup": Pass()}), b"setup")
    heard: list[PeerRequest] = []
    pair.server.on_event = lambda e: heard.append(e) if isinstance(e, PeerRequest) else None

    kind.ask(pair.client.session)
    pair.settle()

    assert [[t.value for t in request.tokens] for request in heard] == [[b"setup"]]


@by_name
def test_the_tokens_of_a_request_count_instead_of_those_of_setup(kind: Kind) -> None:
    table = Table({b"setup": Pass(), b"useless": Pass(frozenset())})
    pair = pair_with(table, b"setup")

    kind.ask(pair.client.session, tokens=[token(b"useless")])
    pair.settle()

    assert pair.client.one(RequestRefused).code == RequestErrorCode.UNAUTHORIZED


@by_name
@pytest.mark.parametrize("name", [NAME, MISSING], ids=["exists", "does not"])
@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (None, RequestErrorCode.UNAUTHORIZED),
        (b"forged", RequestErrorCode.MALFORMED_AUTH_TOKEN),
        (b"old", RequestErrorCode.EXPIRED_AUTH_TOKEN),
        (b"revoked", RequestErrorCode.UNAUTHORIZED),
        (b"elsewhere", RequestErrorCode.UNAUTHORIZED),
        (b"other-actions", RequestErrorCode.UNAUTHORIZED),
    ],
)
def test_what_is_not_allowed_is_refused_unseen_with_nothing_but_a_code(
    kind: Kind, name: FullTrackName, shown: bytes | None, code: RequestErrorCode
) -> None:
    table = good()
    table.passes |= {
        b"old": Pass(expires_at=999.0),
        b"revoked": Pass(revoked=True),
        b"elsewhere": Pass(prefix=ELSEWHERE),
        b"other-actions": Pass(EVERYTHING - kind.needs),
    }
    pair = pair_with(table, b"setup")

    kind.ask(pair.client.session, name, tokens=[] if shown is None else [token(shown)])
    pair.settle()

    refused = pair.client.one(RequestRefused)
    assert (refused.code, refused.reason, refused.retry_ms) == (code, "", None)
    assert refused.redirect is None
    decided = pair.server.one(AccessDecided)
    assert isinstance(decided.answer, Denied)
    assert decided.namespace == name.namespace
    assert pair.server.take() == []
    assert pair.client.session.terminated is None


@by_name
def test_each_action_that_a_request_needs_is_asked_for(kind: Kind) -> None:
    for missing in kind.needs:
        table = good()
        table.passes[b"less"] = Pass(EVERYTHING - {missing})
        pair = pair_with(table, b"setup")
        kind.ask(pair.client.session, tokens=[token(b"less")])
        pair.settle()
        assert pair.client.one(RequestRefused).code == RequestErrorCode.UNAUTHORIZED


@by_name
def test_a_token_that_is_not_valid_yet_is_told_when_to_come_again(kind: Kind) -> None:
    pair = pair_with(good(valid_from=1007.0), b"setup")
    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    refused = pair.client.one(RequestRefused)
    assert (refused.code, refused.retry_ms) == (RequestErrorCode.UNAUTHORIZED, 7000)


def test_a_prefix_is_asked_about_as_a_prefix_and_a_track_as_a_track() -> None:
    table = Table({b"setup": Pass()})
    pair = pair_with(table, b"setup")
    table.asked.clear()
    for kind in KINDS:
        if kind.name not in ("SUBSCRIBE_NAMESPACE", "SUBSCRIBE_TRACKS", "PUBLISH_NAMESPACE"):
            kind.ask(pair.client.session)
    pair.settle()
    assert {(namespace, track) for _, namespace, track in table.asked} == {(SCOPE, NAME.name)}

    table.asked.clear()
    _announce(pair.client.session)
    _discover(pair.client.session)
    _wish(pair.client.session)
    pair.settle()
    prefixes = [(n, t) for a, n, t in table.asked if a is not Action.SUBSCRIBE or t is None]
    assert set(prefixes) == {(SCOPE, None)}


def test_a_publish_of_ours_for_a_wish_is_judged_by_the_tokens_of_the_wish() -> None:
    table = good(expires_at=1100.0)
    pair = pair_with(table, b"setup")
    _wish(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    assert pair.server.take(PublishAccepted)

    pair.advance(101.0)

    assert pair.client.one(SubscriptionEnded).code == PublishDoneCode.EXPIRED
    assert pair.server.one(PublicationEnded).code == PublishDoneCode.EXPIRED
    assert pair.client.one(TracksEnded).code == StreamErrorCode.EXPIRED_AUTH_TOKEN


def test_a_publish_of_ours_does_not_go_to_who_may_not_subscribe() -> None:
    table = Table({b"setup": Pass(EVERYTHING - {Action.SUBSCRIBE})})
    pair = pair_with(table, b"setup")

    with pytest.raises(UsageError, match="no right"):
        pair.server.session.publish(LocalTrack(NAME))


# -- while something runs --------------------------------------------------------------------------


@by_lasting
def test_a_request_ends_when_its_token_does(kind: Kind) -> None:
    pair = pair_with(good(expires_at=1060.0, check_every_s=20.0), b"setup")
    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    pair.client.take()
    pair.server.take()
    pair.log.clear()

    pair.advance(59.0)
    assert pair.client.take() == []
    pair.advance(1.0)
    check_ended(pair, kind, PublishDoneCode.EXPIRED, StreamErrorCode.EXPIRED_AUTH_TOKEN)


@by_lasting
def test_a_request_whose_token_was_revoked_ends_when_it_is_next_asked_about(kind: Kind) -> None:
    table = good(expires_at=5000.0, check_every_s=20.0)
    pair = pair_with(table, b"setup")
    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    pair.client.take()
    pair.server.take()
    pair.log.clear()

    pair.advance(19.0)
    table.passes[b"good"].revoked = True
    pair.advance(0.5)
    assert pair.client.take() == []
    pair.advance(0.5)
    check_ended(pair, kind, PublishDoneCode.UNAUTHORIZED, StreamErrorCode.CANCELLED)


@by_lasting
def test_it_ends_at_once_if_the_session_is_told_to_ask_again(kind: Kind) -> None:
    table = good()  # checked once and not again, as far as time goes
    pair = pair_with(table, b"setup")
    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    pair.client.take()
    pair.server.take()
    pair.log.clear()

    pair.server.session.ask_again()
    pair.settle()
    assert pair.client.take() == []
    table.passes[b"good"].revoked = True
    pair.server.session.ask_again()
    pair.settle()
    check_ended(pair, kind, PublishDoneCode.UNAUTHORIZED, StreamErrorCode.CANCELLED)


def check_ended(pair: Pair, kind: Kind, done: PublishDoneCode, code: StreamErrorCode) -> None:
    """Check how each kind of request ends, at both ends."""
    client, server = pair.client, pair.server
    resets = [c.code for end, c in pair.log if end is server and isinstance(c, ResetStream)]
    match kind.name:
        case "SUBSCRIBE":
            over = client.one(SubscriptionEnded)
            assert (over.code, over.reason, over.by_peer) == (done, "", True)
            assert server.take(PeerRequestEnded)
            return  # nothing had been published since, so that no stream was open
        case "FETCH":
            ended = client.one(FetchEnded)
            assert (ended.complete, ended.code) == (False, code)
        case "PUBLISH":
            assert client.one(PublicationEnded).code is None
            assert server.one(SubscriptionEnded).code == done
        case "PUBLISH_NAMESPACE":
            assert client.one(NamespaceRevoked).code == code
            assert server.take(PeerRequestEnded)
        case "SUBSCRIBE_NAMESPACE":
            assert client.one(NamespacesEnded).code == code
            assert server.take(PeerRequestEnded)
        case "SUBSCRIBE_TRACKS":
            assert client.one(TracksEnded).code == code
            assert server.take(PeerRequestEnded)
    assert code in resets


@pytest.mark.parametrize("revoked", [False, True])
def test_the_open_streams_of_a_subscription_that_loses_its_right_are_reset(revoked: bool) -> None:
    table = good(expires_at=1060.0)
    pair = pair_with(table, b"setup")
    subgroup = pair.server.tracks[NAME].open_subgroup(1, 0)
    pair.frozen.clear()
    pair.client.session.subscribe(NAME, tokens=[token(b"good")])
    pair.settle()
    subgroup.publish(0, b"object")
    pair.settle()

    table.passes[b"good"].revoked = revoked
    pair.advance(60.0)

    want = StreamErrorCode.CANCELLED if revoked else StreamErrorCode.EXPIRED_AUTH_TOKEN
    [stream] = pair.data_streams(pair.server)
    resets = {c.stream_id: c.code for _, c in pair.log if isinstance(c, ResetStream)}
    assert resets[stream] == want
    code = PublishDoneCode.UNAUTHORIZED if revoked else PublishDoneCode.EXPIRED
    assert pair.client.one(SubscriptionEnded).code == code


@by_lasting
def test_a_request_that_waits_for_its_answer_is_refused_when_its_token_ends(kind: Kind) -> None:
    pair = pair_with(good(expires_at=1010.0), b"setup")
    pair.server.answers = False
    kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    pair.advance(10.0)

    refused = pair.client.one(RequestRefused)
    assert (refused.code, refused.reason) == (RequestErrorCode.EXPIRED_AUTH_TOKEN, "")
    assert pair.server.take(PeerRequestEnded)


def test_an_answer_tells_how_long_it_holds() -> None:
    pair = pair_with(good(expires_at=1060.0), b"setup")
    _subscribe(pair.client.session, tokens=[token(b"good")])
    _publish(pair.client.session, FullTrackName(SCOPE, b"mine"), tokens=[token(b"good")])
    pair.settle()

    assert pair.client.one(SubscribeAccepted).expires_ms == 60_000
    assert pair.client.one(PublishAccepted).expires_ms == 60_000


def test_nothing_is_said_of_an_end_that_there_is_not() -> None:
    pair = pair_with(good(), b"setup")
    _subscribe(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    assert pair.client.one(SubscribeAccepted).expires_ms == 0


@by_lasting
def test_a_renewed_request_goes_on(kind: Kind) -> None:
    table = good(expires_at=1060.0)
    table.passes[b"fresh"] = Pass(expires_at=2000.0)
    pair = pair_with(table, b"setup")
    if kind.name == "SUBSCRIBE_TRACKS":
        pair.server.tracks.clear()  # what comes of it is renewed by itself
    request_id = kind.ask(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    pair.client.session.renew(request_id, [token(b"fresh")])
    pair.settle()
    assert pair.client.one(UpdateAccepted).request_id == request_id
    pair.client.take()
    pair.advance(100.0)
    assert pair.client.take() == []


@by_lasting
def test_a_renewal_needs_all_that_the_request_needed(kind: Kind) -> None:
    for missing in kind.needs | {Action.REQUEST_UPDATE}:
        table = good()
        table.passes[b"less"] = Pass(EVERYTHING - {missing})
        pair = pair_with(table, b"setup")
        request_id = kind.ask(pair.client.session, tokens=[token(b"good")])
        pair.settle()

        pair.client.session.renew(request_id, [token(b"less")])
        pair.settle()
        if kind.name == "PUBLISH":  # its STOP_SENDING overtakes the answer
            assert pair.client.one(PublicationEnded).code is None
        else:
            refused = pair.client.one(UpdateRefused)
            assert (refused.code, refused.reason) == (RequestErrorCode.UNAUTHORIZED, "")
        assert pair.client.session.terminated is None


def test_an_update_without_a_token_needs_only_the_right_to_update() -> None:
    for allowed in (True, False):
        actions = EVERYTHING if allowed else EVERYTHING - {Action.REQUEST_UPDATE}
        pair = pair_with(good(actions=actions), b"setup")
        request_id = _subscribe(pair.client.session, tokens=[token(b"good")])
        pair.settle()

        pair.client.session.update(request_id, Parameters({P.SUBSCRIBER_PRIORITY: 1}))
        pair.settle()
        if allowed:
            assert pair.client.take(UpdateAccepted)
        else:
            assert pair.client.one(UpdateRefused).code == RequestErrorCode.UNAUTHORIZED
            assert pair.client.one(SubscriptionEnded).code == PublishDoneCode.UPDATE_FAILED


def test_a_wish_cannot_be_moved_to_where_nothing_is_allowed() -> None:
    pair = pair_with(good(), b"setup")
    request_id = _wish(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    moved = Parameters({P.TRACK_NAMESPACE_PREFIX: ELSEWHERE})
    pair.client.session.update(request_id, moved)
    pair.settle()

    assert pair.client.one(UpdateRefused).code == RequestErrorCode.UNAUTHORIZED
    assert pair.client.take(TracksEnded)


# -- the session -----------------------------------------------------------------------------------


def test_a_session_is_asked_to_leave_before_its_token_ends_and_closed_when_it_does() -> None:
    pair = pair_with(Table({b"setup": Pass(expires_at=1060.0)}), b"setup")
    _discover(pair.client.session)
    pair.settle()

    pair.advance(60.0 - FAREWELL_S)
    assert pair.client.one(GoawayReceived).timeout_ms == FAREWELL_S * 1000
    pair.advance(FAREWELL_S - 0.1)
    assert pair.server.closed is None
    pair.advance(0.2)
    assert pair.server.closed is not None
    assert pair.server.closed.code == SessionErrorCode.EXPIRED_AUTH_TOKEN


def test_a_session_whose_token_was_revoked_is_closed_soon() -> None:
    table = Table({b"setup": Pass(expires_at=5000.0, check_every_s=60.0)})
    pair = pair_with(table, b"setup")
    _discover(pair.client.session)
    pair.settle()

    table.passes[b"setup"].revoked = True
    pair.server.session.ask_again()
    pair.settle()
    assert pair.client.take(GoawayReceived)
    assert pair.client.one(NamespacesEnded).code == StreamErrorCode.CANCELLED
    pair.advance(REVOKED_S)
    assert pair.server.closed is None or pair.server.closed.code == SessionErrorCode.UNAUTHORIZED
    assert pair.server.session.terminated is not None


def test_a_session_with_a_short_token_is_left_half_of_its_time() -> None:
    pair = pair_with(Table({b"setup": Pass(expires_at=1004.0)}), b"setup")
    _discover(pair.client.session)
    pair.advance(1.9)
    assert not pair.client.take(GoawayReceived)
    pair.advance(0.1)
    assert pair.client.take(GoawayReceived)


def test_a_token_that_is_good_for_longer_than_was_said_goes_on() -> None:
    table = good(expires_at=1060.0)
    pair = pair_with(table, b"setup")
    pair.client.session.subscribe_namespace(SCOPE, tokens=[token(b"good")])
    pair.settle()
    assert pair.client.take(NamespacesSubscribed)
    pair.client.take()

    table.passes[b"good"].expires_at = 1200.0
    pair.advance(100.0)
    assert pair.client.take() == []
    pair.advance(100.0)
    assert pair.client.take(NamespacesEnded)


# -- how tokens go ---------------------------------------------------------------------------------


def test_a_token_is_registered_once_and_named_by_its_alias_after_the_answer() -> None:
    pair = pair_with(good(), b"setup")
    shown = [token(b"good")]
    _subscribe(pair.client.session, tokens=shown)
    _status(pair.client.session, tokens=shown)  # ahead of the answer
    pair.settle()
    _fetch(pair.client.session, tokens=shown)
    pair.settle()

    kinds = [t.alias_type for t in tokens_sent(pair)]
    assert kinds == [TokenAliasType.REGISTER, TokenAliasType.USE_VALUE, TokenAliasType.USE_ALIAS]
    assert not pair.client.take(RequestRefused)


@pytest.mark.parametrize("room", [0, 19])
def test_a_token_for_which_the_peer_has_no_room_goes_by_value(room: int) -> None:
    pair = pair_with(good(), b"setup", cache=room)
    for _ in range(2):
        _status(pair.client.session, tokens=[token(b"good")])
        pair.settle()

    assert [t.alias_type for t in tokens_sent(pair)] == [TokenAliasType.USE_VALUE] * 2
    assert not pair.client.take(RequestRefused)


def test_what_was_registered_fills_the_room() -> None:
    table = good()
    table.passes[b"more"] = Pass()
    pair = pair_with(table, b"setup", cache=20 + 19)
    for value in (b"good", b"more", b"good", b"more"):
        _status(pair.client.session, tokens=[token(value)])
        pair.settle()

    A = TokenAliasType
    kinds = [t.alias_type for t in tokens_sent(pair)]
    assert kinds == [A.REGISTER, A.USE_VALUE, A.USE_ALIAS, A.USE_VALUE]
    assert pair.server.session.terminated is None


def test_no_token_is_in_any_text_about_what_was_asked() -> None:
    pair = pair_with(good(), b"setup")
    heard: list[object] = []
    pair.server.on_event = heard.append
    _subscribe(pair.client.session, tokens=[token(b"good")])
    pair.settle()

    assert "good" not in repr(heard)
    assert "tokens=" in repr(heard)


def test_requests_that_are_over_are_forgotten() -> None:
    pair = pair_with(good(), b"setup")
    for kind in KINDS:
        request_id = kind.ask(pair.client.session, tokens=[token(b"good")])
        pair.settle()
        pair.client.session.cancel(request_id)
        pair.settle()
    _subscribe(pair.client.session, FOREIGN, tokens=[token(b"good")])
    pair.settle()

    kept = pair.server.session._context.guard._permits
    assert len(kept) == pair.server.session.open_requests


def test_each_decision_is_told_once_and_again_when_it_changes() -> None:
    table = good(expires_at=2000.0, check_every_s=5.0)
    pair = pair_with(table, b"setup")
    _wish(pair.client.session, tokens=[token(b"good")])
    pair.settle()
    [asked, offered] = pair.server.take(AccessDecided)
    assert (asked.action, asked.namespace) == (Action.SUBSCRIBE_NAMESPACE, SCOPE)
    assert (offered.action, offered.namespace) == (Action.SUBSCRIBE, SCOPE)
    assert isinstance(asked.answer, Granted)
    assert asked.answer.who == "somebody"
    assert not asked.is_running

    pair.advance(20.0)
    assert not pair.server.take(AccessDecided)
    table.passes[b"good"].revoked = True
    pair.advance(5.0)
    over = pair.server.take(AccessDecided)
    assert [event.is_running for event in over] == [True, True]
    assert all(isinstance(event.answer, Denied) for event in over)


def test_nothing_is_told_where_nobody_is_asked() -> None:
    pair = Pair()
    _subscribe(pair.client.session)
    pair.settle()

    assert not pair.server.take(AccessDecided)
