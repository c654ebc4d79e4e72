"""What a token says: the claims of CWT, CAT and C4M that KVCS understands (RFC 8392, C4M).

What is not understood and might limit a token is refused: the other claims of CAT, proofs of
possession. What merely says more is ignored. A claim of another form than it must have makes the
whole token worthless, since nobody can say what was meant.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn

from kvcs.errors import BadToken
from kvcs.trust.grants import BadPermission, Permission, permissions_from_cbor
from kvcs.trust.issuers import MAX_CTI_OCTETS
from moqt.authority import Denial

#: Characters of each text. ``sub`` goes into logs, so it must also be printable.
MAX_TEXT: Final = 256
_THUMBPRINT_OCTETS: Final = 32
#: Member of ``cnf`` with a COSE Key Thumbprint (RFC 9679).
_CNF_THUMBPRINT: Final = 5


class Claim(IntEnum):
    """Claims that are understood, by their numbers (RFC 8392; C4M, "IANA Considerations").

    Those of C4M are not assigned yet; these are the ones of its examples.
    """

    ISS = 1
    SUB = 2
    AUD = 3
    EXP = 4
    NBF = 5
    IAT = 6
    CTI = 7
    CNF = 8
    CATV = 310
    MOQT = 327
    MOQT_REVAL = 328


#: Claims of CAT that limit a token, none of which is evaluated here; ``catv`` limits nothing.
_RESTRICTIONS: Final = frozenset(range(308, 327)) - {Claim.CATV}


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says, once its forms are checked. The times are wall clock, in seconds."""

    issuer: str
    audience: tuple[str, ...]
    """Names of the endpoints that it is for."""

    expires_at: float
    subject: str = ""
    """Who it is for; printable."""

    not_before: float | None = None
    issued_at: float | None = None
    token_id: bytes = b""
    """``cti``: what a revocation list has, and whose beginning logs have."""

    thumbprint: bytes | None = None
    """Of the key that the bearer's TLS certificate must have (RFC 9679); None: a bearer token."""

    permissions: tuple[Permission, ...] = ()
    """None of them where there is no claim of MOQT: a token that allows nothing."""

    revalidate_s: float = 0.0
    """Seconds after which it is checked again while something runs; 0: it is not."""

    @property
    def who(self) -> str:
        """Issuer and subject, for limits and logs."""
        return f"{self.issuer}/{self.subject}" if self.subject else self.issuer

    def to_cbor(self) -> dict[int, object]:
        """Return what :func:`claims_from_cbor` reads; whole numbers as integers."""
        claims: dict[int, object] = {
            Claim.ISS: self.issuer,
            Claim.SUB: self.subject or None,
            Claim.AUD: list(self.audience),
            Claim.EXP: _whole(self.expires_at),
            Claim.NBF: _whole(self.not_before),
            Claim.IAT: _whole(self.issued_at),
            Claim.CTI: self.token_id or None,
            Claim.CNF: None if self.thumbprint is None else {_CNF_THUMBPRINT: self.thumbprint},
            Claim.MOQT: [permission.to_cbor() for permission in self.permissions] or None,
            Claim.MOQT_REVAL: _whole(self.revalidate_s) or None,
        }
        return {int(claim): value for claim, value in claims.items() if value is not None}


def issuer_and_audience(claims: Mapping[Any, Any]) -> tuple[str, tuple[str, ...]]:
    """Read ``iss`` and ``aud``, which are judged before anything else is.

    Raises:
        BadToken: MALFORMED, if one is missing or has another form.
    """
    audience = claims.get(Claim.AUD)
    listed = audience if isinstance(audience, list) else [audience]
    if not listed or not all(isinstance(name, str) for name in listed):
        _refuse("aud", "neither text nor an array of texts")
    return _text(claims, Claim.ISS), tuple(listed)


def claims_from_cbor(claims: Mapping[Any, Any]) -> Claims:
    """Read all that is understood.

    Raises:
        BadToken: MALFORMED, if a claim that must be there is missing, one has another form, or one
            restricts the token in a way that is not evaluated here.
    """
    issuer, audience = issuer_and_audience(claims)
    for claim in claims:
        if type(claim) is int and claim in _RESTRICTIONS:
            _refuse(f"claim {claim}", "a restriction that is not evaluated")
    expires_at = _number(claims, Claim.EXP)
    if expires_at is None:
        _refuse("exp", "missing")
    return Claims(
        issuer=issuer,
        audience=audience,
        expires_at=expires_at,
        subject=_text(claims, Claim.SUB) if Claim.SUB in claims else "",
        not_before=_number(claims, Claim.NBF),
        issued_at=_number(claims, Claim.IAT),
        token_id=_token_id(claims),
        thumbprint=_thumbprint(claims),
        permissions=_permissions(claims),
        revalidate_s=_revalidate_s(claims),
    )


def _text(claims: Mapping[Any, Any], claim: Claim) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        _refuse(claim.name.lower(), f"not printable text of at most {MAX_TEXT} characters")
    return value


def _number(claims: Mapping[Any, Any], claim: Claim) -> float | None:
    if claim not in claims:
        return None
    value = claims[claim]
    if type(value) not in (int, float) or not math.isfinite(value):
        _refuse(claim.name.lower(), "not a finite number")
    return float(value)


def _token_id(claims: Mapping[Any, Any]) -> bytes:
    if Claim.CTI not in claims:
        return b""
    value = claims[Claim.CTI]
    if not isinstance(value, bytes) or not 1 <= len(value) <= MAX_CTI_OCTETS:
        _refuse("cti", f"not 1 to {MAX_CTI_OCTETS} octets")
    return value


def _thumbprint(claims: Mapping[Any, Any]) -> bytes | None:
    if Claim.CNF not in claims:
        return None
    value = claims[Claim.CNF]
    if not isinstance(value, dict) or set(value) != {_CNF_THUMBPRINT}:
        _refuse("cnf", "not a thumbprint alone")
    found = value[_CNF_THUMBPRINT]
    if not isinstance(found, bytes) or len(found) != _THUMBPRINT_OCTETS:
        _refuse("cnf", f"not a thumbprint of {_THUMBPRINT_OCTETS} octets")
    return found


def _permissions(claims: Mapping[Any, Any]) -> tuple[Permission, ...]:
    if Claim.MOQT not in claims:
        return ()
    try:
        return permissions_from_cbor(claims[Claim.MOQT])
    except BadPermission as exc:
        _refuse("moqt", str(exc))


def _revalidate_s(claims: Mapping[Any, Any]) -> float:
    seconds = _number(claims, Claim.MOQT_REVAL) or 0.0
    if seconds < 0 or 0 < seconds < 1:
        # Shorter than can be kept up with, so it would be a promise that is not held.
        _refuse("moqt-reval", f"{seconds:g} s, expected 0, or at least 1")
    return seconds


def _whole(number: float | None) -> float | None:
    return int(number) if number is not None and float(number).is_integer() else number


def _refuse(claim: str, found: str) -> NoReturn:
    raise BadToken(Denial.MALFORMED, f"{claim} of the token: {found}")
