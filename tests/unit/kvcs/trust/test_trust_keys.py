"""Keys that sign tokens: thumbprints, and what is a signature."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcs.errors import ConfigError
from kvcs.trust.keys import (
    Algorithm,
    PrivateKey,
    PublicKey,
    algorithm_of,
    default_kid,
    is_signed,
    sign,
    thumbprint,
)
from tests.unit.kvcs.trust.vectors import ALL, ED25519, P256, TOKENS

PRODUCER = Ed25519PublicKey.from_public_bytes(bytes.fromhex(ALL["manifest"]["producer_public"]))
SIGNERS: list[PrivateKey | bytes] = [
    Ed25519PrivateKey.generate(),
    generate_private_key(SECP256R1()),
    bytes(range(32)),
]


def verifier(key: PrivateKey | bytes) -> PublicKey | bytes:
    return key if isinstance(key, bytes) else key.public_key()


@pytest.mark.parametrize(
    ("key", "case"),
    list(zip((ED25519, PRODUCER, P256), TOKENS["thumbprints_rfc9679"], strict=True)),
    ids=lambda value: value["key"] if isinstance(value, dict) else "",
)
def test_thumbprints_are_those_of_the_vectors(key: PublicKey, case: dict[str, str]) -> None:
    assert thumbprint(key).hex() == case["thumbprint"]
    assert default_kid(key).hex() == case["thumbprint"][:16]


@pytest.mark.parametrize("key", SIGNERS, ids=["EdDSA", "ES256", "HMAC"])
def test_what_is_signed_is_signed_and_nothing_else_is(key: PrivateKey | bytes) -> None:
    signature = sign(key, b"message")

    assert is_signed(verifier(key), b"message", signature)
    assert not is_signed(verifier(key), b"massage", signature)
    for cut in (b"", signature[:-1], signature + b"\0", bytes(len(signature))):
        assert not is_signed(verifier(key), b"message", cut)
    for other in SIGNERS:
        if other is not key:
            assert not is_signed(verifier(other), b"message", signature)


def test_a_key_has_one_algorithm() -> None:
    assert algorithm_of(ED25519) is Algorithm.EDDSA
    assert algorithm_of(P256) is Algorithm.ES256
    other: EllipticCurvePrivateKey = generate_private_key(SECP384R1())
    with pytest.raises(ConfigError, match="secp384r1, expected Ed25519 or P-256"):
        algorithm_of(other.public_key())
