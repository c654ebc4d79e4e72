"""Keys that tokens are signed with: algorithms, identifiers, signatures (RFC 9052, 9053, 9679).

Made on ``cryptography`` alone. A signature is judged by the key's own algorithm, whatever a token
says of itself.
"""

import hmac
from enum import IntEnum
from hashlib import sha256

import cbor2
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256

from kvcs.errors import ConfigError

PublicKey = Ed25519PublicKey | EllipticCurvePublicKey
PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey

#: The least that a shared secret of HMAC 256/256 may have, in octets.
MIN_SECRET_OCTETS = 32
MAX_KID_OCTETS = 64
#: Of a key identifier that nobody chose: the beginning of the thumbprint.
KID_OCTETS = 8
_COORDINATE = 32


class Algorithm(IntEnum):
    """What tokens may be signed with, by the numbers of COSE (RFC 9053)."""

    #: ECDSA on P-256 with SHA-256; the signature is r and s, 32 octets each.
    ES256 = -7
    #: Here always with Ed25519.
    EDDSA = -8
    #: HMAC with SHA-256, not shortened. Whoever can verify can mint.
    HMAC_256 = 5


#: Octets of a signature or tag.
SIGNATURE_OCTETS = {Algorithm.ES256: 64, Algorithm.EDDSA: 64, Algorithm.HMAC_256: 32}


def algorithm_of(key: PublicKey) -> Algorithm:
    """Return the one algorithm that a public key is used with.

    Raises:
        ConfigError: If it is on another curve than P-256 and Ed25519.
    """
    if isinstance(key, Ed25519PublicKey):
        return Algorithm.EDDSA
    if not isinstance(key.curve, SECP256R1):
        raise ConfigError(f"the key is on {key.curve.name}, expected Ed25519 or P-256")
    return Algorithm.ES256


def thumbprint(key: PublicKey) -> bytes:
    """Return the COSE Key Thumbprint of a public key: SHA-256, 32 octets (RFC 9679).

    Raises:
        ConfigError: If it is on another curve than P-256 and Ed25519.
    """
    if algorithm_of(key) is Algorithm.EDDSA:
        assert isinstance(key, Ed25519PublicKey), "that is how the algorithm was found"
        members: dict[int, object] = {1: 1, -1: 6, -2: key.public_bytes_raw()}
    else:
        assert isinstance(key, EllipticCurvePublicKey), "that is how the algorithm was found"
        numbers = key.public_numbers()
        x, y = (n.to_bytes(_COORDINATE, "big") for n in (numbers.x, numbers.y))
        members = {1: 2, -1: 1, -2: x, -3: y}
    return sha256(cbor2.dumps(members, canonical=True)).digest()


def default_kid(key: PublicKey) -> bytes:
    """Return the key identifier of a key that nobody gave one: 8 octets of its thumbprint."""
    return thumbprint(key)[:KID_OCTETS]


def is_signed(key: PublicKey | bytes, message: bytes, signature: bytes) -> bool:
    """Say whether a signature, or the tag of a shared secret, is this key's over the message."""
    if isinstance(key, bytes):
        return hmac.compare_digest(hmac.digest(key, message, "sha256"), signature)
    if len(signature) != SIGNATURE_OCTETS[algorithm_of(key)]:
        return False
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        else:
            r, s = (int.from_bytes(part, "big") for part in (signature[:32], signature[32:]))
            key.verify(encode_dss_signature(r, s), message, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def sign(key: PrivateKey | bytes, message: bytes) -> bytes:
    """Sign a message in the form of COSE; with a shared secret, return its tag."""
    if isinstance(key, bytes):
        return hmac.digest(key, message, "sha256")
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(message)
    r, s = decode_dss_signature(key.sign(message, ECDSA(SHA256())))
    return r.to_bytes(_COORDINATE, "big") + s.to_bytes(_COORDINATE, "big")
