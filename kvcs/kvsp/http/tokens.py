"""Who may do what at a service: bearer tokens (RFC 6750), each good for one scope.

The seam is :class:`Authorizer`. For now it is filled by :class:`TokenFile`: a file of its owner
alone, with a line for each token::

    # scope id, rights, token
    9f…64 hex digits…  read        8Qb0…
    9f…64 hex digits…  read,write  x3Lm…

A token is compared in constant time with every one there is, found or not. No message shows one.
"""

import hmac
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from os import fstat
from pathlib import Path
from typing import Protocol, Self

from kvcs.errors import BadName, ConfigError
from kvcs.kvsp.http.names import from_hex
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.profile.naming import short_hex

#: Fewer characters could be guessed.
MIN_TOKEN = 32
MAX_TOKEN = 1024
MAX_FILE_OCTETS = 4 << 20
#: What each request is compared with.
MAX_TOKENS = 4096

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9._~+/-]+=*) *")


class Right(StrEnum):
    """What one may do in a scope."""

    #: Get blocks, and look up who holds them.
    READ = "read"
    #: Register holders, renew and withdraw them.
    WRITE = "write"


class Bearer(Protocol):
    """Somebody whose token is known."""

    @property
    def subject(self) -> str:
        """Who it is, for logs and for limits of each; no secret."""
        ...

    def may(self, right: Right, scope_id: bytes, compatibility_id: bytes) -> bool:
        """Say whether the token is good for this, of the caches of this model in this scope."""
        ...


class Authorizer(Protocol):
    """Knows tokens."""

    def identify(self, token: bytes, now: float) -> Bearer | None:
        """Return who bears a token; ``None`` if it is nobody's, or not good at this time.

        Takes as long for the one as for the other.

        Args:
            token: As it was presented.
            now: Seconds since 1970, for tokens that expire.
        """
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """One line of a token file."""

    scope_id: bytes
    rights: frozenset[Right]
    digest: bytes = field(repr=False)
    """SHA-256 of the token, which itself is not kept."""

    @property
    def subject(self) -> str:
        """The first digits of the token's digest."""
        return short_hex(self.digest)

    def may(self, right: Right, scope_id: bytes, compatibility_id: bytes) -> bool:
        """See :meth:`Bearer.may`; a token of a file is good for every model of its scope."""
        return hmac.compare_digest(self.scope_id, scope_id) and right in self.rights


class TokenFile:
    """The tokens of a file.

    Args:
        grants: What each is good for. No two of one token.

    Raises:
        ConfigError: If there are none, or too many, or one twice.
    """

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._grants = tuple(grants)
        if not self._grants:
            raise ConfigError("no token: expected lines of SCOPE_ID RIGHTS TOKEN")
        if len(self._grants) > MAX_TOKENS:
            raise ConfigError(f"{len(self._grants)} tokens, limit {MAX_TOKENS}")
        if len({grant.digest for grant in self._grants}) != len(self._grants):
            raise ConfigError("a token stands in two lines, expected one scope for each")

    def __len__(self) -> int:
        return len(self._grants)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: If it cannot be read, others than its owner may read it, or a line is
                none; the message names the file and the line, and never a token.
        """
        # Raised where no variable holds a secret: some programs print those of a traceback.
        found, wrong = cls._try_to_read(path)
        if found is None:
            raise ConfigError(f"tokens file {path}{wrong}")
        return found

    @classmethod
    def _try_to_read(cls, path: str | Path) -> tuple[Self | None, str]:
        """Return the tokens, or what is wrong with the file."""
        try:
            with Path(path).open("rb") as file:
                mode = stat.S_IMODE(fstat(file.fileno()).st_mode)
                text = file.read(MAX_FILE_OCTETS + 1)
        except OSError as exc:
            return None, f": {exc.strerror or exc}"
        if mode & 0o077:
            return None, f" has mode {mode:04o}, expected 0600: it is for its owner"
        if len(text) > MAX_FILE_OCTETS:
            return None, f" has more than {MAX_FILE_OCTETS} octets"
        try:
            return cls(parse_lines(text)), ""
        except ConfigError as exc:
            return None, f": {exc}"

    def identify(self, token: bytes, now: float) -> Grant | None:
        """See :class:`Authorizer`. These tokens do not expire."""
        digest, found = sha256(token).digest(), None
        for grant in self._grants:  # all of them, whichever it is
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found


def parse_lines(text: bytes) -> list[Grant]:
    """Read the lines of a token file.

    Raises:
        ConfigError: If one is none; the message names the line, and never a token.
    """
    try:
        lines = text.decode("ascii").splitlines()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"octet {exc.start} is not ASCII") from None
    grants = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3:
            found = f"line {number} has {len(words)} words"
            raise ConfigError(f"{found}, expected 3: SCOPE_ID RIGHTS TOKEN")
        scope, rights, token = words
        try:
            scope_id = from_hex("Scope ID", scope, ID_OCTETS)
        except BadName as exc:
            raise ConfigError(f"line {number}: {exc}") from None
        if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"line {number}: token of {len(token)} characters, expected {MIN_TOKEN} to "
                f"{MAX_TOKEN} of A-Z a-z 0-9 and -._~+/, such as `openssl rand -hex 32` makes"
            )
        grants.append(Grant(scope_id, _rights(number, rights), sha256(token.encode()).digest()))
    return grants


def read_token(path: str | Path) -> str:
    """Read the one token of a client, from a file that holds nothing else.

    Raises:
        ConfigError: If it cannot be read or is no token; the message never shows it.
    """
    token, wrong = _try_to_read_token(path)
    if wrong:
        raise ConfigError(f"token file {path}{wrong}")
    return token


def _try_to_read_token(path: str | Path) -> tuple[str, str]:
    """Return the token, or nothing and what is wrong with the file."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_TOKEN + 64).strip()
    except OSError as exc:
        return "", f": {exc.strerror or exc}"
    token = text.decode("ascii", errors="replace")
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not _TOKEN.fullmatch(token):
        return "", (
            f" holds {len(token)} characters, expected one token of {MIN_TOKEN} to {MAX_TOKEN} "
            "characters"
        )
    return token, ""


def bearer_token(field: str | None) -> bytes | None:
    """Return the token of an Authorization field; ``None`` if it has none of the scheme Bearer."""
    if field is None or len(field) > MAX_TOKEN + 16:
        return None
    match = _BEARER.fullmatch(field)
    return None if match is None else match[1].encode()


def _rights(number: int, text: str) -> frozenset[Right]:
    try:
        return frozenset(Right(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"line {number}: rights {text[:32]!r}, expected read, write or read,write"
        ) from None
