import pytest

from moqt import errors
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.errors import (
    MoqtError,
    ObjectTooLarge,
    ProtocolError,
    RequestRejected,
    SessionClosed,
    UsageError,
)

#: What the session closes with, by the class of the violation.
CODES = {
    "ProtocolError": SessionErrorCode.PROTOCOL_VIOLATION,
    "KeyValueFormattingError": SessionErrorCode.KEY_VALUE_FORMATTING_ERROR,
    "InvalidRequestId": SessionErrorCode.INVALID_REQUEST_ID,
    "DuplicateTrackAlias": SessionErrorCode.DUPLICATE_TRACK_ALIAS,
    "InvalidPath": SessionErrorCode.INVALID_PATH,
    "MalformedPath": SessionErrorCode.MALFORMED_PATH,
    "InvalidAuthority": SessionErrorCode.INVALID_AUTHORITY,
    "MalformedAuthority": SessionErrorCode.MALFORMED_AUTHORITY,
    "TooManyRequests": SessionErrorCode.INTERNAL_ERROR,
    "TooManySessions": SessionErrorCode.INTERNAL_ERROR,
    "TooManyRequestUpdates": SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
    "DuplicateAuthTokenAlias": SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS,
    "AuthTokenCacheOverflow": SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW,
    "UnknownAuthTokenAlias": SessionErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS,
    "SetupRefused": SessionErrorCode.UNAUTHORIZED,
}


def test_each_violation_closes_with_its_own_code() -> None:
    found = {
        name: value.code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ProtocolError)
    }

    assert found == CODES


@pytest.mark.parametrize("kind", [ObjectTooLarge, RequestRejected, SessionClosed, UsageError])
def test_what_is_no_violation_does_not_close_the_session(kind: type[MoqtError]) -> None:
    assert issubclass(kind, MoqtError)
    assert not issubclass(kind, ProtocolError)


def test_a_rejection_says_why_and_when_to_come_back() -> None:
    rejected = RequestRejected(RequestErrorCode.EXCESSIVE_LOAD, "busy", 250)

    assert (rejected.code, rejected.reason, rejected.retry_ms) == (0x9, "busy", 250)
    assert "EXCESSIVE_LOAD" in str(rejected)


@pytest.mark.parametrize(("by_peer", "word"), [(True, "the peer"), (False, "this side")])
def test_a_closed_session_says_who_closed_it(by_peer: bool, word: str) -> None:
    closed = SessionClosed(SessionErrorCode.NO_ERROR, "done", by_peer)

    assert (closed.code, closed.reason, closed.by_peer) == (0, "done", by_peer)
    assert word in str(closed)
