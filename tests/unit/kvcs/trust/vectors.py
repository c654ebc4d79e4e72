"""The vectors of tokens: made by one library, checked with three others, none of them ours."""

import json
from pathlib import Path
from typing import Any

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
    *(int(KEYS["issuer-2"][name], 16) for name in ("x", "y")), SECP256R1()
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
