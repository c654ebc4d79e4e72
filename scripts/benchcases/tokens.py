"""Tokens of a run: who issues them, and who believes them."""

import secrets
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchcases.ends import Place
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.claims import Claims
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.issuers import Issuers
from kvcs.trust.policy import Policy
from kvcs.trust.tokens import CAT_TOKEN_TYPE, SigningKey, issue
from moqt.wire.token import AuthorizationToken

_AUDIENCE, _ISSUER = "moqt://bench.example:4433", "issuer.bench.example"


def authority(place: Place) -> TokenAuthority:
    """Return what believes the issuer of a place."""
    return TokenAuthority(Policy(Issuers([_key(place).verifier])), [_AUDIENCE])


def issued(place: Place) -> tuple[AuthorizationToken, ...]:
    """Return a token of a consumer of the place's scope, another one each time."""
    now = time.time()
    claims = Claims(
        issuer=_ISSUER,
        audience=(_AUDIENCE,),
        expires_at=now + 600.0,
        subject="bench",
        issued_at=now,
        token_id=secrets.token_bytes(16),
        permissions=permissions_of(Role.CONSUMER, [place.shared.key.scope_id]),
        revalidate_s=60.0,
    )
    return (AuthorizationToken.use_value(CAT_TOKEN_TYPE, issue(claims, _key(place))),)


def _key(place: Place) -> SigningKey:
    assert place.issuer is not None, "nobody is asked for a token"
    return SigningKey(_ISSUER, b"bench-1", Ed25519PrivateKey.from_private_bytes(place.issuer))
