"""Issuers and revocations, as people write them; and everything they may write wrongly."""

import datetime
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ConfigError
from kvcs.trust.issuers import (
    MAX_ISSUERS,
    MAX_REVOKED,
    IssuerKey,
    Issuers,
    Revocations,
    issuers_from,
    read_secret_file,
    shown_kid,
)
from kvcs.trust.keys import Algorithm, default_kid
from kvcs.trust.policy import PolicyFiles
from tests.unit.kvcs.trust.vectors import ED25519, ISSUER, KEYS, P256, SECRET

UTC = datetime.UTC
ED25519_HEX = KEYS["issuer-1"]["public"]
P256_HEX = "04" + KEYS["issuer-2"]["x"] + KEYS["issuer-2"]["y"]
TABLE: dict[str, Any] = {"issuer": ISSUER, "kid": "issuer-1", "public_key": ED25519_HEX}


def pem(key: Any) -> bytes:
    octets: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return octets


def test_a_file_of_issuers_reads_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "second.pem").write_bytes(pem(P256))
    secret = tmp_path / "third.secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET.hex() + "\n")
    path = tmp_path / "issuers.toml"
    path.write_text(
        f"""
        [[issuers]]
        issuer = "{ISSUER}"
        kid = "issuer-1"
        public_key = "{ED25519_HEX}"
        not_after = 2027-06-01T00:00:00Z

        [[issuers]]
        issuer = "{ISSUER}"
        public_key_file = "second.pem"

        [[issuers]]
        issuer = "elsewhere.example"
        kid_hex = "00ff"
        secret_file = "third.secret"
        """
    )

    issuers = PolicyFiles(path).read().issuers

    assert list(issuers) == [b"issuer-1", default_kid(P256), b"\x00\xff"]
    first, second, third = issuers.values()
    assert (first.issuer, first.algorithm) == (ISSUER, Algorithm.EDDSA)
    assert first.not_after == datetime.datetime(2027, 6, 1, tzinfo=UTC).timestamp()
    assert (second.algorithm, second.not_after) == (Algorithm.ES256, None)
    assert (third.issuer, third.algorithm, third.key) == (
        "elsewhere.example", Algorithm.HMAC_256, SECRET,
    )  # fmt: skip


def test_a_key_is_trusted_until_its_date() -> None:
    key = IssuerKey(ISSUER, b"k", ED25519, not_after=100.0)

    assert key.is_trusted_at(99.9)
    assert not key.is_trusted_at(100.0)
    assert IssuerKey(ISSUER, b"k", ED25519).is_trusted_at(1e12)


@pytest.mark.parametrize("form", ["04", "compressed"])
def test_a_p256_key_may_be_written_in_both_forms_of_a_point(form: str) -> None:
    text = P256_HEX
    if form == "compressed":
        text = P256.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()

    [key] = issuers_from([TABLE | {"public_key": text}]).values()

    assert key.key == P256


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"issuer": None}, "issuer is not set, expected text"),
        ({"issuer": 5}, "issuer is a int, expected text"),
        ({"issuer": ""}, "issuer of 0 characters, expected 1 to 256"),
        ({"kid": ""}, "kid of 0 octets, expected 1 to 64"),
        ({"kid": "x" * 65}, "kid of 65 octets, expected 1 to 64"),
        ({"kid_hex": "00"}, "kid and kid_hex are both set"),
        ({"kid": None, "kid_hex": "0x"}, "kid_hex is not hex"),
        ({"public_key": "zz"}, "public_key is not hex, or no key"),
        ({"public_key": "00" * 31}, "public_key of 31 octets, expected 32"),
        ({"public_key": "04" + "00" * 64}, "public_key is not hex, or no key"),
        ({"public_key": None}, "found none of public_key"),
        ({"secret_file": "x"}, "found public_key and secret_file"),
        ({"not_after": "2027"}, "not_after is '2027', expected a time with its zone"),
        (
            {"not_after": datetime.datetime(2027, 6, 1)},
            "not_after is '2027-06-01 00:00:00', expected a time with its zone",
        ),
        ({"public_kee": "x"}, "public_kee is not known, expected some of issuer"),
    ],
)
def test_a_table_that_is_none_is_named(change: dict[str, Any], says: str) -> None:
    table = {name: value for name, value in (TABLE | change).items() if value is not None}

    with pytest.raises(ConfigError, match=f"^issuers 2: {says}"):
        issuers_from([TABLE, table])


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("x", "issuers is str, expected tables"),
        ({"issuer": "x"}, "issuers is dict, expected tables"),
        ([5], "issuers 1: a int, expected a table"),
        ([TABLE, TABLE], "two keys of issuers have the kid issuer-1"),
        ([TABLE] * (MAX_ISSUERS + 1), f"{MAX_ISSUERS + 1} keys of issuers, limit {MAX_ISSUERS}"),
    ],
)
def test_tables_that_are_none_are_refused(tables: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        issuers_from(tables)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", r"nobody is believed, expected a table \[\[issuers\]\] at least"),
        (b"issuers = []", "nobody is believed"),
        (b"issuers = 5", "issuers is int, expected tables"),
        (b"identities = 5", "identities is int, expected tables"),
        (b"[issuers", "not TOML"),
        (b"\xff", "not TOML"),
        (b"[[issuers]]\n[other]", r"other is not known, expected tables \[\[identities\]\]"),
    ],
)
def test_a_file_that_holds_no_issuers_is_named(text: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    path.write_bytes(text)

    with pytest.raises(ConfigError, match=says) as caught:
        PolicyFiles(path).read()
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"revocations file .*nowhere: No such file"):
        Revocations.from_file(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"issuers file .*nowhere: No such file"):
        PolicyFiles(tmp_path / "nowhere").read()
    with pytest.raises(ConfigError, match=r"public key file .*nowhere\.pem: No such file"):
        issuers_from([{"issuer": "x", "public_key_file": "nowhere.pem"}], folder=tmp_path)


def test_a_pem_file_with_another_kind_of_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    table = {"issuer": "x", "public_key_file": "k.pem"}
    for content, says in (
        (b"none", "not a public key in PEM"),
        (pem(generate_private_key(SECP384R1()).public_key()), "secp384r1"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            issuers_from([table], folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("00" * 31, 0o600, "shared secret of 31 octets, expected at least 32"),
        ("not hex", 0o600, "not in hex"),
        ("00" * 32, 0o640, "has mode 0640, expected 0600"),
        ("00" * 32, 0o604, "has mode 0604, expected 0600"),
        ("00" * 2000, 0o600, "more than 2048 octets"),
    ],
)
def test_a_secret_that_is_none_or_for_others_too_is_refused(
    content: str, mode: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)

    with pytest.raises(ConfigError, match=says) as caught:
        issuers_from([{"issuer": "x", "kid": "k", "secret_file": "secret"}], folder=tmp_path)
    assert content not in str(caught.value)


def test_a_shared_secret_needs_a_kid_and_is_in_no_text(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(SECRET.hex())
    assert os.stat(path).st_mode & 0o77 == 0

    with pytest.raises(ConfigError, match="kid is not set, which a shared secret must have"):
        issuers_from([{"issuer": "x", "secret_file": "secret"}], folder=tmp_path)
    key = IssuerKey("x", b"k", SECRET)
    assert "\\x" not in repr(key)
    assert SECRET.hex() not in repr(Issuers([key]))


def test_a_list_of_what_is_revoked_reads_as_it_is_written() -> None:
    revoked = Revocations.parse(
        b"# of the 3rd\n\ncti 00112233445566778899aabbccddeeff  # lost laptop\nkid 6b31\ncti 00\n"
    )

    assert revoked == Revocations(
        frozenset({bytes.fromhex("00112233445566778899aabbccddeeff"), b"\0"}), frozenset({b"k1"})
    )
    assert Revocations.parse(b"") == Revocations()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"cti", "line 1 is 'cti', expected"),
        (b"\ncti 0g", "line 2 is 'cti 0g', expected"),
        (b"cti 00 11", "line 1 is 'cti 00 11'"),
        (b"jti 00", "line 1 is 'jti 00'"),
        (b"cti " + b"00" * 65, "line 1"),
        (b"kid \xff", "octet 4 is not ASCII"),
    ],
)
def test_a_list_with_a_line_that_is_none_is_refused_whole(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Revocations.parse(text)


def test_a_list_that_is_too_long_is_refused() -> None:
    lines = b"".join(b"cti %08x\n" % n for n in range(MAX_REVOKED + 1))

    with pytest.raises(ConfigError, match=f"limit {MAX_REVOKED}"):
        Revocations.parse(lines)


@given(st.binary(max_size=60))
def test_only_config_error_leaves_the_reader_of_noise(noise: bytes) -> None:
    with suppress(ConfigError):
        Revocations.parse(noise)


def test_key_identifiers_are_shown_as_text_or_in_hex() -> None:
    assert shown_kid(b"issuer-1") == "issuer-1"
    assert shown_kid(b"\x00\xff") == "00ff"
    assert shown_kid(b"a\nb") == "610a62"


def test_a_secret_file_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(ConfigError, match="token file a\0b: "):
        read_secret_file("a\0b", limit=10, what="token file")
