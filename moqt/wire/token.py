"""Authorization Token: its wire form, in a Setup Option or a Message Parameter."""

from dataclasses import dataclass, field
from typing import Final, Self

from moqt.codepoints import TokenAliasType as A
from moqt.errors import KeyValueFormattingError, ProtocolError, UsageError
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

#: What a registered token takes of the receiver's cache besides its value, in octets.
_CACHE_OVERHEAD: Final = 16


@dataclass(frozen=True, slots=True)
class AuthorizationToken:
    """A token, or a reference to one (MOQT, "Authorization Token").

    Build it with the constructor of its kind. The value is a secret: it is left out of
    ``repr()``, and so out of every log line that prints a message.

    Raises:
        UsageError: If a field is set that its kind lacks, or one is missing.
    """

    alias_type: A
    alias: int | None = None
    """The number it is registered under, per session and direction. Not for USE_VALUE."""

    token_type: int | None = None
    """How ``value`` is to be read; 0 was agreed out of band. Only with a value."""

    value: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        has_alias, has_value = _FIELDS[self.alias_type]
        if has_alias != (self.alias is not None) or has_value != (self.token_type is not None):
            raise UsageError(f"{self.alias_type.name} token with fields it lacks, or without its")
        if self.value and not has_value:
            raise UsageError(f"{self.alias_type.name} token with a value")

    @classmethod
    def delete(cls, alias: int) -> Self:
        """Return the wish to forget a registered token."""
        return cls(A.DELETE, alias)

    @classmethod
    def register(cls, alias: int, token_type: int, value: bytes) -> Self:
        """Return a token to use now and to keep under ``alias``."""
        return cls(A.REGISTER, alias, token_type, value)

    @classmethod
    def use_alias(cls, alias: int) -> Self:
        """Return a reference to a registered token."""
        return cls(A.USE_ALIAS, alias)

    @classmethod
    def use_value(cls, token_type: int, value: bytes) -> Self:
        """Return a token to use once."""
        return cls(A.USE_VALUE, None, token_type, value)

    @property
    def cache_octets(self) -> int:
        """What it takes of MAX_AUTH_TOKEN_CACHE_SIZE while it is registered."""
        return _CACHE_OVERHEAD + len(self.value)

    def encode(self) -> bytes:
        """Return the token without the Length that precedes it."""
        w = Writer()
        w.vi64(self.alias_type)
        if self.alias is not None:
            w.vi64(self.alias)
        if self.token_type is not None:
            w.vi64(self.token_type)
            w.octets(self.value)
        return w.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the token that fills ``data``.

        Raises:
            KeyValueFormattingError: If it does not, or its alias type is unknown.
        """
        r = Reader(data)
        try:
            alias_type = A(r.vi64())
            has_alias, has_value = _FIELDS[alias_type]
            alias = r.vi64() if has_alias else None
            token_type = r.vi64() if has_value else None
            value = r.rest() if has_value else b""
            r.expect_end()
        except (ProtocolError, ValueError) as exc:
            raise KeyValueFormattingError(f"authorization token: {exc}") from None
        return cls(alias_type, alias, token_type, value)


#: Whether a kind has an alias, and whether it has a type and value.
_FIELDS: Final = {
    A.DELETE: (True, False),
    A.REGISTER: (True, True),
    A.USE_ALIAS: (True, False),
    A.USE_VALUE: (False, True),
}
