"""Exceptions, sorted by whose fault it is and how far the damage reaches.

* :exc:`MoqtError`
    * :exc:`ProtocolError`: the peer broke the protocol; the whole session closes
        * :exc:`KeyValueFormattingError`, :exc:`InvalidRequestId`, ...: with a code of their own
    * :exc:`ObjectTooLarge`: an Object beyond our own limit; ends its stream, nothing else
    * :exc:`RequestRejected`: the peer refused one request; the session goes on
    * :exc:`SessionClosed`: the session is gone; pending calls end with this
    * :exc:`UsageError`: this program asked for something the rules forbid; nothing changed
"""

from collections.abc import Sequence
from typing import Any

from moqt.codepoints import RequestErrorCode, SessionErrorCode


class MoqtError(Exception):
    """Base of every exception this package raises on purpose."""


class ProtocolError(MoqtError):
    """The peer broke the protocol. ``code`` is what the session closes with."""

    code: SessionErrorCode = SessionErrorCode.PROTOCOL_VIOLATION


class KeyValueFormattingError(ProtocolError):
    """A known Key-Value-Pair or an Authorization Token did not match its definition."""

    code = SessionErrorCode.KEY_VALUE_FORMATTING_ERROR


class InvalidRequestId(ProtocolError):
    """A Request ID was used twice, or belongs to the other side."""

    code = SessionErrorCode.INVALID_REQUEST_ID


class DuplicateTrackAlias(ProtocolError):
    """One Track Alias was given to two established Tracks."""

    code = SessionErrorCode.DUPLICATE_TRACK_ALIAS


class InvalidPath(ProtocolError):
    """PATH came from a server, over WebTransport, or names nothing served here."""

    code = SessionErrorCode.INVALID_PATH


class MalformedPath(ProtocolError):
    """PATH does not have the syntax of a URI's path and query."""

    code = SessionErrorCode.MALFORMED_PATH


class InvalidAuthority(ProtocolError):
    """AUTHORITY came from a server, over WebTransport, or names nobody served here."""

    code = SessionErrorCode.INVALID_AUTHORITY


class MalformedAuthority(ProtocolError):
    """AUTHORITY does not have the syntax of a URI's authority."""

    code = SessionErrorCode.MALFORMED_AUTHORITY


class TooManyRequestUpdates(ProtocolError):
    """More REQUEST_UPDATEs stand unanswered on one request than this side allows."""

    code = SessionErrorCode.TOO_MANY_REQUEST_UPDATES


class TooManyRequests(ProtocolError):
    """The peer goes on asking although it was told to wait. The draft has no code for it."""

    code = SessionErrorCode.INTERNAL_ERROR


class TooManySessions(ProtocolError):
    """The peer has as many sessions as it may have. The draft has no code for it."""

    code = SessionErrorCode.INTERNAL_ERROR


class DuplicateAuthTokenAlias(ProtocolError):
    """A token was registered under an alias that is still taken."""

    code = SessionErrorCode.DUPLICATE_AUTH_TOKEN_ALIAS


class AuthTokenCacheOverflow(ProtocolError):
    """The registered tokens outgrew the cache this side offered."""

    code = SessionErrorCode.AUTH_TOKEN_CACHE_OVERFLOW


class UnknownAuthTokenAlias(ProtocolError):
    """A SETUP uses a token alias that is not registered."""

    code = SessionErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS


class SetupRefused(ProtocolError):
    """What the peer shows in its SETUP does not allow it a session. It broke no rule.

    Attributes:
        code: Which of the three codes for tokens, or UNAUTHORIZED.
    """

    code = SessionErrorCode.UNAUTHORIZED

    def __init__(self, code: SessionErrorCode) -> None:
        super().__init__("")
        self.code = code


class ObjectTooLarge(MoqtError):
    """An Object declares more octets than this side takes.

    The limit is ours and not the draft's, so the peer did nothing wrong: stop the stream the
    Object came on, and keep the session.

    Attributes:
        completed: The Objects before it that the same octets completed, in order. They are
            whole and good, and given nowhere else.
    """

    completed: Sequence[Any] = ()


class RequestRejected(MoqtError):
    """The peer answered one request with REQUEST_ERROR.

    Attributes:
        code: Why; an unregistered code is kept as it came.
        reason: For people.
        retry_ms: The same request may be tried again after so many milliseconds; None: never.
    """

    def __init__(self, code: RequestErrorCode | int, reason: str, retry_ms: int | None) -> None:
        super().__init__(f"request rejected: {code!r} {reason!r}")
        self.code, self.reason, self.retry_ms = code, reason, retry_ms


class SessionClosed(MoqtError):
    """The session is over.

    Attributes:
        code: Why; an unregistered code is kept as it came.
        reason: For people.
        by_peer: Whether the other side closed it.
    """

    def __init__(self, code: SessionErrorCode | int, reason: str, by_peer: bool) -> None:
        closer = "the peer" if by_peer else "this side"
        super().__init__(f"session closed by {closer}: {code!r} {reason!r}")
        self.code, self.reason, self.by_peer = code, reason, by_peer


class UsageError(MoqtError):
    """This program asked for something the rules or the state forbid. Nothing was changed."""
