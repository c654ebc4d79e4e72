"""The vectors of tokens: made by one library, checked with three others, none of them ours."""

import json
from pathlib import Path
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicNumbers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcs.trust.issuers import IssuerKey, Issuers

ALL: dict[str, Any] = json.loads((Path(__file__).parents[3] / "vectors" / "trust.json").read_text())
TOKENS: dict[str, Any] = ALL["tokens"]
NOW: float = TOKENS["time"]
AUDIENCE: str = TOKENS["audience"]
ISSUER: str = TOKENS["issuer"]
KEYS: dict[str, dict[str, str]] = TOKENS["keys"]

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(KEYS["issuer-1"]["private"]))
ED25519 = Ed25519PublicKey.from_public_bytes(bytes.fromhex(KEYS["issuer-1"]["public"]))
P256 = EllipticCurvePublicNumbers(
    int(KEYS["issuer-2"]["x"], 16), int(KEYS["issuer-2"]["y"], 16), SECP256R1()
).public_key()
SECRET = bytes.fromhex(KEYS["issuer-3"]["key"])

ISSUERS = Issuers(
    [
        IssuerKey(ISSUER, b"issuer-1", ED25519),
        IssuerKey(ISSUER, b"issuer-2", P256),
        IssuerKey(ISSUER, b"issuer-3", SECRET),
    ]
)


def valid(name: str) -> bytes:
    """Return the token whose name begins so."""
    [token] = [case["token"] for case in TOKENS["valid"] if case["name"].startswith(name)]
    return bytes.fromhex(token)


def claims_of(token: bytes) -> dict[int, Any]:
    """Return the claims of a token, as another library reads them."""
    claims: dict[int, Any] = cbor2.loads(cbor2.loads(token).value.value[2])
    return claims


def signed(
    claims: object,
    *,
    header: dict[Any, Any] | None = None,
    unprotected: dict[Any, Any] | None = None,
    payload: bytes | None = None,
) -> bytes:
    """Sign anything as issuer-1 would, without the code under test."""
    protected = cbor2.dumps({1: -8, 4: b"issuer-1", 16: "CAT"} if header is None else header)
    body = cbor2.dumps(claims) if payload is None else payload
    signature = PRIVATE.sign(cbor2.dumps(["Signature1", protected, b"", body]))
    parts = [protected, unprotected or {}, body, signature]
    octets: bytes = cbor2.dumps(cbor2.CBORTag(61, cbor2.CBORTag(18, parts)))
    return octets


CONSUMER = claims_of(valid("consumer, EdDSA"))


def token_with(**changes: Any) -> bytes:
    """Return the consumer's token with other claims; None leaves one out. Names end in numbers."""
    claims = CONSUMER | {int(name.rpartition("_")[2]): value for name, value in changes.items()}
    return signed({claim: value for claim, value in claims.items() if value is not None})
