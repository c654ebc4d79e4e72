"""SETUP and GOAWAY: how a session begins, and how it is moved (MOQT, "SETUP", "GOAWAY")."""

import re
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from moqt.codepoints import MessageType
from moqt.codepoints import SetupOption as O
from moqt.errors import (
    KeyValueFormattingError,
    MalformedAuthority,
    MalformedPath,
    ProtocolError,
    UsageError,
)
from moqt.wire.messages.base import Message
from moqt.wire.pairs import Pair, Pairs, decode_pairs, encode_pairs
from moqt.wire.reader import Reader
from moqt.wire.token import AuthorizationToken
from moqt.wire.writer import Writer

#: Octets of a GOAWAY's New Session URI.
MAX_URI_OCTETS: Final = 8192

_PCHAR = rb"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
#: RFC 3986: path-abempty, and perhaps a query.
_PATH = re.compile(rb"(?:/%b*)*(?:\?(?:%b|[/?])*)?" % (_PCHAR, _PCHAR))
_REG_NAME = rb"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
#: RFC 3986: authority with a host that is not empty.
_AUTHORITY = re.compile(
    rb"(?:(?:%b|:)*@)?(?:\[[0-9A-Fa-f:.]+\]|\[v[0-9A-Fa-f]+\.[^\]@/?#\s]+\]|%b+)(?::[0-9]*)?"
    % (_REG_NAME, _REG_NAME)
)
_KNOWN: Final = frozenset(O)


@dataclass(frozen=True, slots=True, repr=False)
class Setup(Message):
    """SETUP: what each side tells the other before anything else (MOQT, "SETUP").

    Build one to send with :meth:`of`; read one through the properties. Options nobody knows are
    kept in ``options`` and mean nothing.
    """

    type: ClassVar = MessageType.SETUP

    options: Pairs = ()
    """As on the wire: an int for an even option, octets for an odd one."""

    @classmethod
    def of(
        cls,
        *,
        path: str | None = None,
        authority: str | None = None,
        implementation: str | None = None,
        max_filter_ranges: int = 0,
        max_request_updates: int = 0,
        max_auth_token_cache_size: int = 0,
        tokens: tuple[AuthorizationToken, ...] = (),
    ) -> Self:
        """Return a SETUP with these options; 0 and None are what their absence means.

        Args:
            path: Path and query of the connection URI, ``/kv?tenant=a``. Client only.
            authority: Authority of the connection URI, ``host:4443``. Client only.
            implementation: Name and version of the program, for people.
            max_filter_ranges: Ranges this side accepts per request.
            max_request_updates: Unanswered updates this side accepts per request; 0: any number.
            max_auth_token_cache_size: Octets of registered tokens this side stores.
            tokens: Authorization for the session.
        """
        options: list[Pair] = [(O.AUTHORIZATION_TOKEN, token.encode()) for token in tokens]
        for option, text in (
            (O.PATH, path),
            (O.AUTHORITY, authority),
            (O.MOQT_IMPLEMENTATION, implementation),
        ):
            if text is not None:
                options.append((option, text.encode()))
        for option, number in (
            (O.MAX_FILTER_RANGES, max_filter_ranges),
            (O.MAX_REQUEST_UPDATES, max_request_updates),
            (O.MAX_AUTH_TOKEN_CACHE_SIZE, max_auth_token_cache_size),
        ):
            if number:
                options.append((option, number))
        return cls(tuple(sorted(options, key=lambda pair: pair[0])))

    @property
    def path(self) -> str | None:
        """Path and query of the URI the client dialled; None if it sent none."""
        return self._text(O.PATH)

    @property
    def authority(self) -> str | None:
        """Authority of the URI the client dialled; None if it sent none."""
        return self._text(O.AUTHORITY)

    @property
    def implementation(self) -> str | None:
        """What the peer calls itself. Free text: clean it before it reaches a log."""
        return self._text(O.MOQT_IMPLEMENTATION)

    @property
    def max_filter_ranges(self) -> int:
        """Ranges the sender accepts in the Range Filters of one request."""
        return self._number(O.MAX_FILTER_RANGES)

    @property
    def max_request_updates(self) -> int | None:
        """Unanswered REQUEST_UPDATEs the sender accepts per request; None: any number."""
        return self._number(O.MAX_REQUEST_UPDATES) or None

    @property
    def max_auth_token_cache_size(self) -> int:
        """Octets of registered tokens the sender stores for its peer; 0: no aliases."""
        return self._number(O.MAX_AUTH_TOKEN_CACHE_SIZE)

    @property
    def tokens(self) -> tuple[AuthorizationToken, ...]:
        """The Authorization Tokens, in order."""
        return tuple(
            [
                AuthorizationToken.decode(value)
                for option, value in self.options
                if option == O.AUTHORIZATION_TOKEN and isinstance(value, bytes)
            ]
        )

    def encode_body(self, w: Writer) -> None:
        data = encode_pairs(self.options)
        try:
            _check_all(self.options)
        except ProtocolError as exc:
            raise UsageError(str(exc)) from None
        w.octets(data)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        options = decode_pairs(r)
        _check_all(options)
        return cls(options)

    def _first(self, option: O) -> int | bytes | None:
        return next((value for number, value in self.options if number == option), None)

    def _text(self, option: O) -> str | None:
        value = self._first(option)
        return value.decode(errors="replace") if isinstance(value, bytes) else None

    def _number(self, option: O) -> int:
        value = self._first(option)
        return value if isinstance(value, int) else 0

    def __repr__(self) -> str:
        # A token is a secret, and a message gets printed.
        shown = [(o, "..." if o == O.AUTHORIZATION_TOKEN else v) for o, v in self.options]
        return f"Setup(options={tuple(shown)!r})"


def _check_all(options: Pairs) -> None:
    seen: set[int] = set()
    for option, value in options:
        if option in seen and option in _KNOWN and option != O.AUTHORIZATION_TOKEN:
            raise ProtocolError(f"setup option {O(option).name} twice")
        seen.add(option)
        if isinstance(value, bytes):
            _check(option, value)


def _check(option: int, value: bytes) -> None:
    match option:
        case O.PATH if _PATH.fullmatch(value) is None:
            raise MalformedPath(f"PATH of {len(value)} octets is no path and query of a URI")
        case O.AUTHORITY if _AUTHORITY.fullmatch(value) is None:
            raise MalformedAuthority(f"AUTHORITY of {len(value)} octets is no authority of a URI")
        case O.AUTHORIZATION_TOKEN:
            AuthorizationToken.decode(value)
        case O.MOQT_IMPLEMENTATION:
            try:
                value.decode()
            except UnicodeDecodeError:
                raise KeyValueFormattingError("MOQT_IMPLEMENTATION is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class Goaway(Message):
    """GOAWAY: leave soon. On a request stream it concerns that request alone (MOQT, "GOAWAY")."""

    type: ClassVar = MessageType.GOAWAY

    new_session_uri: str = ""
    """Where to go; empty: the URI in use. Only a server may state one. At most 8192 octets."""

    timeout_ms: int = 0
    """After which the sender closes what is left; 0: not stated."""

    def encode_body(self, w: Writer) -> None:
        w.text(self.new_session_uri, MAX_URI_OCTETS)
        w.vi64(self.timeout_ms)

    @classmethod
    def decode_body(cls, r: Reader) -> Self:
        return cls(new_session_uri=r.text(MAX_URI_OCTETS), timeout_ms=r.vi64())
