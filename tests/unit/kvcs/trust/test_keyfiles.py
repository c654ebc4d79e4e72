"""Files with secrets: for their owner alone from the beginning, and never half written."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from kvcs.errors import ConfigError
from kvcs.trust.keyfiles import (
    private_key_from_file,
    private_key_to_pem,
    replace_secret,
    write_new_secret,
)
from kvcs.trust.keys import PrivateKey

KEY = Ed25519PrivateKey.generate()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("key", [KEY, generate_private_key(SECP256R1())], ids=["EdDSA", "ES256"])
def test_a_private_key_travels_in_a_file_of_its_owner(key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "issuer.key"

    write_new_secret(path, private_key_to_pem(key), what="issuer key file")

    assert mode_of(path) == 0o600
    found = private_key_from_file(path)
    assert found.public_key() == key.public_key()


def test_a_key_is_never_written_over_another(tmp_path: Path) -> None:
    path = tmp_path / "issuer.key"
    write_new_secret(path, b"first", what="issuer key file")

    with pytest.raises(ConfigError, match=r"^issuer key file .*issuer\.key: File exists"):
        write_new_secret(path, b"second", what="issuer key file")
    assert path.read_bytes() == b"first"


def test_a_token_takes_the_place_of_another_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for octets in (b"first", b"second"):
        replace_secret(path, octets, what="token file")
        assert path.read_bytes() == octets
        assert mode_of(path) == 0o600

    with pytest.raises(ConfigError, match=r"token file .*nowhere/token: No such file"):
        replace_secret(tmp_path / "nowhere" / "token", b"x", what="token file")
    with pytest.raises(ConfigError, match="token file"):
        replace_secret(tmp_path, b"x", what="token file")
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


def pem(key: Any, encryption: Any = None) -> bytes:
    octets: bytes = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()
    )
    return octets


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (b"", "not a private key in PEM"),
        (b"secret", "not a private key in PEM"),
        (  # of another algorithm than its length fits, as fuzzing found
            b"-----BEGIN PRIVATE KEY-----\n"
            b"MC4CAQAwBQYDK2VxBCIEIJ6Jl+fFwJ0Egq9qMre8Gx3yI3Wa2gSGw/DMtTw9PrrR\n"
            b"-----END PRIVATE KEY-----\n",
            "not a private key in PEM",
        ),
        (pem(KEY, BestAvailableEncryption(b"x")), "expected a key without a password"),
        (pem(Ed448PrivateKey.generate()), "expected Ed25519 or P-256"),
        (pem(generate_private_key(SECP384R1())), "secp384r1, expected Ed25519 or P-256"),
        (bytes(70_000), "more than 65536 octets"),
    ],
    # Octets that hold a random key would name a case anew in each run.
    ids=["empty", "no PEM", "damaged", "with a password", "Ed448", "P-384", "too long"],
)
def test_a_file_without_a_usable_key_is_named_and_never_shown(
    octets: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "issuer.key"
    write_new_secret(path, octets, what="x")

    with pytest.raises(ConfigError, match=rf"^issuer key file .*issuer\.key.*{says}") as caught:
        private_key_from_file(path)
    assert "secret" not in str(caught.value)


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "issuer.key"
    path.write_bytes(private_key_to_pem(KEY))
    path.chmod(0o640)

    with pytest.raises(ConfigError, match="has mode 0640, expected 0600"):
        private_key_from_file(path)
