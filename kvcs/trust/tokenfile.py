"""The token that a client shows: read from a file, and again before it is of no use any more.

Whoever renews a token writes the file anew; the client finds it, at half of the lifetime of the one
it has, or when the file changes, and goes on without a restart.
"""

import base64
import binascii
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcs.errors import BadToken, ConfigError
from kvcs.profile.naming import short_hex
from kvcs.trust.issuers import read_secret_file
from kvcs.trust.policy import Stamp, stamp_of
from kvcs.trust.tokens import CAT_TOKEN_TYPE, LEEWAY_S, MAX_TOKEN_OCTETS, read_unverified
from moqt.authority import Denial
from moqt.wire.token import AuthorizationToken

#: As text a token is a third longer; and some white space around it.
_MAX_FILE_OCTETS: Final = 2 * MAX_TOKEN_OCTETS
#: No text begins with one of these, and every token does: its first tag.
_FIRST_OCTETS: Final = (b"\xd8", b"\xd2", b"\xd1")
#: Seconds between looks at a file that was not renewed when it should have been.
_MIN_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class HeldToken:
    """A token of one's own. What is told of it is what it says itself."""

    value: bytes = field(repr=False)
    expires_at: float
    """Wall clock, in seconds."""

    token_id: bytes = b""

    @property
    def to_show(self) -> AuthorizationToken:
        """The token as MOQT carries it."""
        return AuthorizationToken.use_value(CAT_TOKEN_TYPE, self.value)

    @property
    def mark(self) -> str:
        """For logs: the first digits of its identifier."""
        return short_hex(self.token_id)


class TokenFile:
    """The file that a client's token is in.

    Args:
        path: A file of its owner alone, with one token: in base64url, or as it is.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stamp: Stamp = None
        self._held: HeldToken | None = None
        self._look_at = 0.0

    def read(self, now: float) -> HeldToken:
        """Read the file.

        Args:
            now: Wall clock, in seconds.

        Raises:
            ConfigError: If it cannot be read, others than its owner may, it holds no token, or one
                that has expired; the message names the file and never shows what is in it.
        """
        self._stamp = stamp_of(self._path)
        # Raised where no variable holds the token: some programs print those of a traceback.
        found, wrong = self._try_to_read(now)
        if found is None:
            raise ConfigError(wrong)
        self._held = found
        return found

    def _try_to_read(self, now: float) -> tuple[HeldToken | None, str]:
        """Return the token, or what is wrong; note when to look again."""
        try:
            octets = read_secret_file(self._path, limit=_MAX_FILE_OCTETS, what="token file")
        except ConfigError as exc:
            return None, str(exc)
        try:
            value = token_from_octets(octets)
            claims = read_unverified(value).claims
        except BadToken as exc:
            return None, f"token file {self._path}: {exc}"
        if now >= claims.expires_at + LEEWAY_S:
            ago = f"expired {now - claims.expires_at:.0f} s ago"
            return None, f"token file {self._path}: the token {ago}"
        begin = now if claims.issued_at is None else min(claims.issued_at, now)
        half = begin + (claims.expires_at - begin) / 2
        if half <= now:  # it is late already, so in ever shorter steps
            half = now + (claims.expires_at - now) / 2
        self._look_at = max(half, now + _MIN_WAIT_S)
        return HeldToken(value, claims.expires_at, claims.token_id), ""

    def renewed(self, now: float) -> HeldToken | None:
        """Look whether there is another token: to be called about once a second.

        Returns:
            The new token; None if it is the one that was read last, or it is not time to look.

        Raises:
            ConfigError: As :meth:`read`, once for each change of the file. The one that was read
                before is still good until it expires.
        """
        if now < self._look_at and stamp_of(self._path) == self._stamp:
            return None
        held = self._held
        self._look_at = now + _MIN_WAIT_S  # should it not be readable
        found = self.read(now)
        return None if held is not None and found.value == held.value else found


def token_from_octets(octets: bytes) -> bytes:
    """Return the token that a file holds: in base64url with white space around it, or as it is.

    Raises:
        BadToken: If it is neither; MALFORMED. Whether it is a token at all, is not looked at.
    """
    if octets[:1] in _FIRST_OCTETS:
        return octets
    text = octets.strip().rstrip(b"=")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadToken(Denial.MALFORMED, "neither a token nor one in base64url") from None


def token_to_text(value: bytes) -> str:
    """Return a token in base64url, without padding."""
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
