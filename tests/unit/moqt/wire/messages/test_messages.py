"""What each chapter demands beyond its layout. The layouts are in the vectors and round trips."""

import pytest

from moqt.codepoints import MessageType as M
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.codepoints import SetupOption as O
from moqt.errors import (
    KeyValueFormattingError,
    MalformedAuthority,
    MalformedPath,
    ProtocolError,
    UsageError,
)
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.framing import encode_message
from moqt.wire.messages.fetch import FetchOk
from moqt.wire.messages.namespace import PublishSkipped
from moqt.wire.messages.request import Redirect, RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import PublishDone
from moqt.wire.pairs import Pairs, encode_pairs
from moqt.wire.parameters import Parameters
from moqt.wire.reader import Reader
from moqt.wire.token import AuthorizationToken
from moqt.wire.writer import Writer

NAMESPACE_REQUESTS = [M.PUBLISH_NAMESPACE, M.SUBSCRIBE_NAMESPACE, M.SUBSCRIBE_TRACKS]
TRACK_REQUESTS = [M.SUBSCRIBE, M.PUBLISH, M.FETCH, M.TRACK_STATUS]
LARGEST = Parameters({P.LARGEST_OBJECT: Location(3, 7)})


def setup_from(options: Pairs) -> Setup:
    return Setup.decode_body(Reader(encode_pairs(options)))


def test_setup_tells_what_was_put_into_it() -> None:
    token = AuthorizationToken.use_value(1, b"secret")
    made = Setup.of(
        path="/kv?tenant=a",
        authority="relay.example:4443",
        implementation="kvcs/0.1",
        max_filter_ranges=16,
        max_request_updates=4,
        max_auth_token_cache_size=256,
        tokens=(token, AuthorizationToken.register(0, 1, b"x")),
    )
    w = Writer()
    made.encode_body(w)
    read = Setup.decode_body(Reader(w.getvalue()))

    assert read == made
    assert (read.path, read.authority) == ("/kv?tenant=a", "relay.example:4443")
    assert read.implementation == "kvcs/0.1"
    assert (read.max_filter_ranges, read.max_request_updates) == (16, 4)
    assert read.max_auth_token_cache_size == 256
    assert read.tokens == (token, AuthorizationToken.register(0, 1, b"x"))


def test_an_empty_setup_has_the_defaults_of_the_draft() -> None:
    assert Setup.of() == Setup()
    assert (Setup().path, Setup().authority, Setup().implementation) == (None, None, None)
    assert (Setup().max_filter_ranges, Setup().max_auth_token_cache_size) == (0, 0)
    assert Setup().max_request_updates is None
    assert setup_from(((O.MAX_REQUEST_UPDATES, 0),)).max_request_updates is None


@pytest.mark.parametrize("option", [o for o in O if o is not O.AUTHORIZATION_TOKEN])
def test_a_known_option_comes_once(option: O) -> None:
    pair = (int(option), b"/" if option is O.PATH else b"a" if option % 2 else 1)

    with pytest.raises(ProtocolError, match=f"{option.name} twice"):
        setup_from((pair, pair))


def test_unknown_options_may_repeat_and_mean_nothing() -> None:
    grease: Pairs = ((0x9D, b"\xaa"), (0x9D, b"\xbb"), (0x11C, 5))

    assert setup_from(grease).options == grease


@pytest.mark.parametrize(
    "path", ["", "/", "/kv", "//", "/a/b?c=d/e?f", "/%2f", "?x", "/.well-known/x"]
)
def test_a_path_and_query_of_a_uri_is_taken(path: str) -> None:
    assert setup_from(((O.PATH, path.encode()),)).path == path


@pytest.mark.parametrize("path", ["kv", "/a b", "/a#b", "/%2", "/\xff", "/a\n", "moqt://h/"])
def test_any_other_path_closes_with_its_own_code(path: str) -> None:
    with pytest.raises(MalformedPath) as caught:
        setup_from(((O.PATH, path.encode("latin-1")),))

    assert caught.value.code is SessionErrorCode.MALFORMED_PATH
    with pytest.raises(UsageError):
        encode_message(Setup.of(path=path))


@pytest.mark.parametrize(
    "authority", ["h", "h:4443", "127.0.0.1:1", "[::1]:9", "[::1]", "u:p@h", "h:"]
)
def test_an_authority_with_a_host_is_taken(authority: str) -> None:
    assert setup_from(((O.AUTHORITY, authority.encode()),)).authority == authority


@pytest.mark.parametrize("authority", ["", ":4443", "h/", "h:x", "a b", "[::1", "@", "h\n", "::1"])
def test_any_other_authority_closes_with_its_own_code(authority: str) -> None:
    with pytest.raises(MalformedAuthority) as caught:
        setup_from(((O.AUTHORITY, authority.encode()),))

    assert caught.value.code is SessionErrorCode.MALFORMED_AUTHORITY


@pytest.mark.parametrize(
    "pair", [(O.AUTHORIZATION_TOKEN, b"\x07"), (O.MOQT_IMPLEMENTATION, b"\xff")]
)
def test_a_known_option_that_cannot_be_read_has_its_own_code(pair: tuple[int, bytes]) -> None:
    with pytest.raises(KeyValueFormattingError):
        setup_from((pair,))


def test_a_goaway_uri_has_8192_octets_at_most() -> None:
    most = Goaway("u" * 8192, 5)

    assert encode_message(Goaway()).hex() == "1000020000"
    assert Goaway.decode_body(Reader(encode_message(most)[3:])) == most
    with pytest.raises(UsageError, match="8193 octets, limit 8192"):
        encode_message(Goaway("u" * 8193))


def test_a_retry_interval_is_milliseconds_plus_one() -> None:
    assert RequestError(RequestErrorCode.EXCESSIVE_LOAD).retry_ms is None
    assert RequestError(RequestErrorCode.EXCESSIVE_LOAD, 1).retry_ms == 0
    assert RequestError(RequestErrorCode.EXCESSIVE_LOAD, 251).retry_ms == 250


def test_codes_nobody_registered_are_kept_as_they_came() -> None:
    error = RequestError.decode_body(Reader(bytes.fromhex("809d0000")))
    done = PublishDone.decode_body(Reader(bytes.fromhex("030000")))

    assert error.error_code == 0x9D
    assert done.status_code == 3
    assert isinstance(RequestError.decode_body(Reader(b"\x10\0\0")).error_code, RequestErrorCode)


REDIRECT = RequestError(
    RequestErrorCode.REDIRECT, 1, "moved", Redirect("moqt://b/", FullTrackName.of("kv", "k"))
)
PREFIX_REDIRECT = RequestError(
    RequestErrorCode.REDIRECT, 1, "", Redirect("", FullTrackName.of("kv", ""))
)


@pytest.mark.parametrize("context", NAMESPACE_REQUESTS)
def test_a_redirect_of_a_namespace_request_names_no_track(context: M) -> None:
    body = encode_message(REDIRECT)[3:]

    with pytest.raises(ProtocolError, match="Track Name"):
        RequestError.decode_body(Reader(body, context))
    with pytest.raises(UsageError, match="Track Name"):
        encode_message(REDIRECT, context)
    assert (
        RequestError.decode_body(Reader(encode_message(PREFIX_REDIRECT, context)[3:], context))
        == PREFIX_REDIRECT
    )


@pytest.mark.parametrize("context", TRACK_REQUESTS)
def test_a_redirect_of_a_track_request_may_name_one(context: M) -> None:
    body = encode_message(REDIRECT, context)[3:]

    assert RequestError.decode_body(Reader(body, context)) == REDIRECT


@pytest.mark.parametrize(
    "message",
    [
        RequestError(RequestErrorCode.REDIRECT),
        RequestError(RequestErrorCode.TIMEOUT, redirect=REDIRECT.redirect),
    ],
)
def test_a_redirect_goes_with_its_code_and_no_other(message: RequestError) -> None:
    with pytest.raises(UsageError, match="redirect"):
        encode_message(message)


@pytest.mark.parametrize(
    "context", [c for c in TRACK_REQUESTS + NAMESPACE_REQUESTS if c != M.TRACK_STATUS]
)
def test_only_the_answer_to_a_track_status_has_track_properties(context: M) -> None:
    message = RequestOk(track_properties=((4, 60_000),))
    body = encode_message(message)[3:]

    assert RequestOk.decode_body(Reader(body, M.TRACK_STATUS)) == message
    with pytest.raises(ProtocolError, match="TRACK_STATUS"):
        RequestOk.decode_body(Reader(body, context))
    with pytest.raises(UsageError, match="TRACK_STATUS"):
        encode_message(message, context)


def test_the_answer_to_a_track_status_carries_no_expiry() -> None:
    body = encode_message(RequestOk(Parameters({P.EXPIRES: 5})), M.SUBSCRIBE)[3:]

    with pytest.raises(ProtocolError, match="EXPIRES is not allowed in TRACK_STATUS_OK"):
        RequestOk.decode_body(Reader(body, M.TRACK_STATUS))
    assert RequestOk.decode_body(
        Reader(encode_message(RequestOk(LARGEST), M.TRACK_STATUS)[3:], M.TRACK_STATUS)
    ) == RequestOk(LARGEST)


@pytest.mark.parametrize("cls", [RequestOk, RequestUpdate])
def test_answers_and_updates_need_a_request(cls: type[RequestOk | RequestUpdate]) -> None:
    with pytest.raises(ProtocolError, match="where"):
        cls.decode_body(Reader(b"\x00\x00"))


def test_a_track_status_cannot_be_updated() -> None:
    with pytest.raises(ProtocolError, match="nothing to update"):
        RequestUpdate.decode_body(Reader(b"\x02\x00", M.TRACK_STATUS))
    with pytest.raises(UsageError, match="TRACK_STATUS cannot be updated"):
        encode_message(RequestUpdate(2), M.TRACK_STATUS)


def test_an_update_carries_what_its_request_allows() -> None:
    body = encode_message(RequestUpdate(2, Parameters({P.FORWARD: 1})), M.SUBSCRIBE)[3:]

    assert RequestUpdate.decode_body(Reader(body, M.PUBLISH)).parameters == {P.FORWARD: 1}
    with pytest.raises(ProtocolError, match="UPDATE_FETCH"):
        RequestUpdate.decode_body(Reader(body, M.FETCH))
    with pytest.raises(UsageError, match="misplaced"):
        encode_message(RequestUpdate(2, Parameters({P.FORWARD: 1})), M.FETCH)


def test_end_of_track_is_a_flag() -> None:
    with pytest.raises(ProtocolError, match="End Of Track is 2"):
        FetchOk.decode_body(Reader(bytes.fromhex("02000000")))


def test_a_skipped_name_has_the_limit_of_a_full_name() -> None:
    skipped = PublishSkipped(TrackNamespace((b"n" * 4096,)), b"x")
    w = Writer()
    w.track_namespace(skipped.suffix)
    w.prefixed(skipped.name)

    with pytest.raises(UsageError, match="4097"):
        encode_message(skipped)
    with pytest.raises(ProtocolError, match="4097"):
        PublishSkipped.decode_body(Reader(w.getvalue()))
