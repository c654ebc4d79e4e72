"""Authorization tokens: CBOR Web Tokens inside COSE, the part of C4M that KVCS has.

A token is read in one order: form, key and algorithm, signature, issuer and audience, restrictions
and the forms of claims, and then the time. What is in a token whose signature is not good is never
used, nor told: it may be anybody's. Its length and key identifier are all that a message has of it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import cbor2
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcs.errors import BadToken
from kvcs.trust.cbor import BadCbor, read_map
from kvcs.trust.claims import Claims, claims_from_cbor, issuer_and_audience
from kvcs.trust.envelope import (
    Envelope,
    Kind,
    Label,
    Rules,
    open_envelope,
    seal_envelope,
    to_be_signed,
)
from kvcs.trust.issuers import IssuerKey, Issuers, shown_kid
from kvcs.trust.keys import (
    MAX_KID_OCTETS,
    Algorithm,
    PrivateKey,
    PublicKey,
    algorithm_of,
    is_signed,
    sign,
)
from moqt.authority import Denial

#: Token Type of a Common Access Token in MOQT (C4M, "CAT Token Type").
CAT_TOKEN_TYPE: Final = 0x01
MAX_TOKEN_OCTETS: Final = 8192
#: Seconds by which clocks may differ.
LEEWAY_S: Final = 30.0
#: Seconds from ``iat`` to ``exp`` at most, if nobody says otherwise.
MAX_LIFETIME_S: Final = 86_400.0

_TYP: Final = "CAT"
_CWT_PREFIX: Final = b"\xd8\x3d"
#: The tag of COSE must be there: which kind of message it is, is never guessed.
_RULES: Final = Rules(
    kinds=(Kind.SIGN1, Kind.MAC0),
    header_octets=MAX_TOKEN_OCTETS,
    payload_octets=MAX_TOKEN_OCTETS,
    tag_needed=True,
    cwt_tag=True,
)
_KINDS: Final = {
    Algorithm.EDDSA: Kind.SIGN1,
    Algorithm.ES256: Kind.SIGN1,
    Algorithm.HMAC_256: Kind.MAC0,
}
#: Keys that sign nothing. Where no key fits, one of these is asked, so that who tries to find out
#: which keys there are waits as long as for a wrong signature.
_DECOYS: Final[Mapping[Algorithm, PublicKey | bytes]] = {
    Algorithm.EDDSA: Ed25519PrivateKey.generate().public_key(),
    Algorithm.ES256: generate_private_key(SECP256R1()).public_key(),
    Algorithm.HMAC_256: bytes(32),
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token whose signature, issuer and audience are good. Whether it is time, is asked apart."""

    claims: Claims
    key: IssuerKey
    """That it is signed with."""

    def check_bearer(self, thumbprint: bytes | None) -> None:
        """Check that it is shown by whom it is bound to.

        Args:
            thumbprint: Of the public key of the verified TLS certificate; None without one.

        Raises:
            BadToken: MALFORMED, if it is bound to another key.
        """
        bound = self.claims.thumbprint
        if bound is None or bound == thumbprint:
            return
        found = "there is none" if thumbprint is None else "another one is shown"
        _refuse(f"token bound to a client certificate, and {found}")

    def check_time(
        self, now: float, *, leeway_s: float = LEEWAY_S, max_lifetime_s: float = MAX_LIFETIME_S
    ) -> None:
        """Check that it may be used now.

        Args:
            now: Wall clock, in seconds.
            leeway_s: By which clocks may differ.
            max_lifetime_s: What a token may have from ``iat``; from now, if it has none or one
                that is ahead.

        Raises:
            BadToken: MALFORMED, if its key is trusted no more, or it lives longer than is allowed;
                UNAUTHORIZED, if it is not valid yet; EXPIRED.
        """
        claims = self.claims
        if not self.key.is_trusted_at(now):
            _refuse(f"key {shown_kid(self.key.kid)} of the token is trusted no more")
        issued_at = now if claims.issued_at is None else min(claims.issued_at, now + leeway_s)
        lifetime = claims.expires_at - issued_at
        if lifetime > max_lifetime_s:
            _refuse(f"token for {lifetime:.0f} s, limit {max_lifetime_s:.0f}")
        if claims.not_before is not None and now < claims.not_before - leeway_s:
            wait = claims.not_before - leeway_s - now
            text = f"token not valid for another {wait:.0f} s"
            raise BadToken(Denial.UNAUTHORIZED, text, retry_after_s=wait)
        if now >= claims.expires_at + leeway_s:
            raise BadToken(Denial.EXPIRED, f"token expired {now - claims.expires_at:.0f} s ago")


def read_token(value: bytes, issuers: Issuers, audience: Collection[str]) -> Token:
    """Read a token and check everything that does not depend on the time and on who shows it.

    Args:
        value: Token Value of MOQT.
        issuers: The keys that are believed.
        audience: Names of this endpoint, of which the token must have one.

    Raises:
        BadToken: MALFORMED, whatever is wrong: more would help only those who forge.

    Costs one verification: some 90 us with Ed25519.
    """
    envelope, claims = _open(value)
    key = _check_signature(envelope, issuers)
    issuer, names = issuer_and_audience(claims)
    if issuer != key.issuer:
        _refuse(f"token of {issuer!r}, its key is of {key.issuer!r}")
    if not set(names) & set(audience):
        expected = " or ".join(sorted(audience)) or "nothing: this endpoint has no name"
        _refuse(f"token for {', '.join(names)!r:.200}, expected {expected}")
    return Token(claims_from_cbor(claims), key)


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """What a token says of itself. Nobody vouches for any of it."""

    kid: bytes
    algorithm: Algorithm
    claims: Claims


def read_unverified(value: bytes) -> UnverifiedToken:
    """Look into a token without believing it: to show it, or to know when to renew one's own.

    Raises:
        BadToken: MALFORMED, if no server could believe it. Its cause says what is wrong with the
            form, which is not for the log of a server.
    """
    envelope, claims = _open(value)
    kid, algorithm = _kid_and_algorithm(envelope)
    return UnverifiedToken(kid, algorithm, claims_from_cbor(claims))


@dataclass(frozen=True, slots=True)
class SigningKey:
    """What tokens are issued with."""

    issuer: str
    kid: bytes
    key: PrivateKey | bytes = field(repr=False)
    """Secret; octets are the shared secret of HMAC 256/256."""

    @property
    def algorithm(self) -> Algorithm:
        """The one that its tokens name."""
        if isinstance(self.key, bytes):
            return Algorithm.HMAC_256
        return algorithm_of(self.key.public_key())

    @property
    def verifier(self) -> IssuerKey:
        """What a server must have to believe its tokens."""
        key = self.key if isinstance(self.key, bytes) else self.key.public_key()
        return IssuerKey(self.issuer, self.kid, key)


def issue(claims: Claims, key: SigningKey) -> bytes:
    """Sign claims.

    Returns:
        The token in the form that is taken everywhere: both tags, deterministic CBOR.

    Raises:
        BadToken: If no server would believe it: it is of another issuer than the key, has no
            audience, a claim of a form that is not taken, or too many octets.
        ConfigError: If the key cannot be an issuer's.
    """
    kind = _KINDS[key.algorithm]
    header = {int(Label.ALG): int(key.algorithm), int(Label.KID): key.kid, int(Label.TYP): _TYP}
    protected: bytes = cbor2.dumps(header, canonical=True)
    payload: bytes = cbor2.dumps(claims.to_cbor(), canonical=True)
    signature = sign(key.key, to_be_signed(kind, protected, payload))
    token = _CWT_PREFIX + seal_envelope(kind, protected, payload, signature)
    read_token(token, Issuers([key.verifier]), claims.audience)
    return token


def _open(value: bytes) -> tuple[Envelope, dict[Any, Any]]:
    if len(value) > MAX_TOKEN_OCTETS:
        _refuse(f"token of {len(value)} octets, limit {MAX_TOKEN_OCTETS}")
    try:
        envelope = open_envelope(value, _RULES)
        return envelope, read_map(envelope.payload, "the payload", wide=True)
    except BadCbor as exc:
        # What is wrong may quote it, and so is for the cause alone.
        text = f"token of {len(value)} octets is not in the form that is taken"
        raise BadToken(Denial.MALFORMED, text) from exc


def _kid_and_algorithm(envelope: Envelope) -> tuple[bytes, Algorithm]:
    """Check the headers, as far as they can be without a key."""
    header, unprotected = envelope.header, envelope.unprotected
    if Label.CRIT in header or Label.CRIT in unprotected:
        _refuse("token with a critical header")
    if set(header) & set(unprotected) or Label.ALG in unprotected:
        _refuse("token with a header outside the protected ones")
    if Label.TYP in header and header[Label.TYP] != _TYP:
        _refuse("token of another type than CAT")
    kid, number = header.get(Label.KID), header.get(Label.ALG)
    if not isinstance(kid, bytes) or not 1 <= len(kid) <= MAX_KID_OCTETS:
        _refuse(f"token without a kid of 1 to {MAX_KID_OCTETS} octets")
    if type(number) is not int or number not in Algorithm._value2member_map_:
        _refuse(f"token of key {shown_kid(kid)}: another algorithm than EdDSA, ES256 and HMAC")
    algorithm = Algorithm(number)
    if envelope.kind is not _KINDS[algorithm]:
        _refuse(f"token of key {shown_kid(kid)}: an algorithm of another kind of message")
    return kid, algorithm


def _check_signature(envelope: Envelope, issuers: Issuers) -> IssuerKey:
    kid, algorithm = _kid_and_algorithm(envelope)
    key = issuers.get(kid)
    is_known = key is not None and key.algorithm is algorithm
    verifier = key.key if key is not None and is_known else _DECOYS[algorithm]
    is_good = is_signed(verifier, envelope.to_be_signed, envelope.signature)
    if key is None:
        _refuse(f"token of key {shown_kid(kid)}, which is not trusted")
    if not is_known:
        _refuse(f"token of key {shown_kid(kid)} with another algorithm than {key.algorithm.name}")
    if not is_good:
        _refuse(f"token of key {shown_kid(kid)} with a wrong signature")
    return key


def _refuse(text: str) -> NoReturn:
    raise BadToken(Denial.MALFORMED, text)
