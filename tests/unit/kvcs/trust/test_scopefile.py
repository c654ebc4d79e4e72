"""A scope in a file: what it says, who may read it, and what is said of one that cannot be used."""

import contextlib
import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey, SigningAlgorithm, key_id
from kvcs.trust.producers import KeysByDate, KnownProducer, check_listed
from kvcs.trust.scope import Protection, Scope, Suite
from kvcs.trust.scopefile import add_producer, new_scope, read_scope
from tests.unit.kvcs.trust.vectors import KEYS

SECRET = bytes(range(32))
KEY = f'key = "{SECRET.hex()}"\n'
#: RFC 8032 Section 7.1, test 1.
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
PRODUCERS = f'[[producers]]\npublic_key = "{PUBLIC}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "scope.toml"


def write(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


# -- what it says --------------------------------------------------------------------------------


def test_a_scope_that_does_not_say_is_clear_and_lists_nobody(file: Path) -> None:
    scope = read_scope(write(file, KEY))

    assert scope == Scope(ScopeKey(SECRET))
    assert scope.protection is None
    assert scope.producers == ()
    assert len(scope.issuers) == 0


@pytest.mark.parametrize(
    ("text", "protection"),
    [
        ('sealing = "clear"', None),
        ('sealing = "sealed"', Protection()),
        (
            'sealing = "sealed"\nprotection = "secure-objects-01"\nsuite = "aes-256-gcm"\n'
            'padding = "bucket"',
            Protection(Suite.AES_256_GCM_SHA512_128, "bucket"),
        ),
    ],
)
def test_how_objects_are_sealed_is_said_beside_the_key(
    file: Path, text: str, protection: Protection | None
) -> None:
    assert read_scope(write(file, KEY + text)).protection == protection


def test_producers_and_issuers_are_listed_with_their_dates(file: Path) -> None:
    text = f"""{KEY}
[[producers]]
name = "prefill-1"
public_key = "{PUBLIC}"
not_before = 2026-11-30T00:00:00Z
not_after = 2027-11-30T02:00:00+02:00
[[producers]]
public_key_file = "other.pem"
kid_hex = "0102"
[[issuers]]
issuer = "cluster.example"
public_key = "{PUBLIC}"
"""
    other = ProducerKey.generate(SigningAlgorithm.ES256)
    (file.parent / "other.pem").write_bytes(other.public_pem())
    scope = read_scope(write(file, text))

    one, two = scope.producers
    assert one.key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex() == PUBLIC
    assert (one.name, one.kid) == ("prefill-1", key_id(one.key))
    assert one.not_before == datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC).timestamp()
    assert one.not_after == datetime.datetime(2027, 11, 30, tzinfo=datetime.UTC).timestamp()
    assert (two.key, two.kid, two.not_after) == (other.public_key, b"\1\2", None)
    assert [issuer.issuer for issuer in scope.issuers.values()] == ["cluster.example"]


def test_the_kinds_of_keys_are_those_of_the_vectors(file: Path) -> None:
    """The public keys of the vectors that another program made: Ed25519, and P-256."""
    p256 = "04" + KEYS["issuer-2"]["x"] + KEYS["issuer-2"]["y"]
    text = PRODUCERS + f'[[producers]]\npublic_key = "{p256}"\n'

    one, two = read_scope(write(file, KEY + text)).producers
    assert one.key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex() == PUBLIC
    assert two.key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint).hex() == p256


# -- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o660, 0o666, 0o610, 0o601])
def test_a_file_that_is_not_for_its_owner_alone_is_refused(file: Path, mode: int) -> None:
    with pytest.raises(ConfigError) as refused:
        read_scope(write(file, KEY, mode))

    assert str(refused.value) == (
        f"scope file {file} has mode {mode:04o}, expected 0600: it is for its owner alone"
    )


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_one_that_is_may_be_read(file: Path, mode: int) -> None:
    assert read_scope(write(file, KEY, mode)).key == ScopeKey(SECRET)


WRONG = [
    ("", "key is not set, expected the scope key in hex"),
    ("key = 5", "key is a int, expected the scope key in hex"),
    ('key = "5e5e5e"', "scope key has 3 octets, at least 32"),
    ('key = "secret!"', "key is not hex"),
    (f"key = {SECRET.hex()}", "not TOML: "),
    (KEY + "secret = 1", "secret is not known, expected some of issuers, key, padding"),
    (KEY + f'"{SECRET.hex()}" = 1', "a member is not known, expected"),
    (KEY + 'sealing = "either"', "sealing is 'either', expected sealed or clear"),
    (KEY + 'sealing = ["sealed"]', "sealing is .*, expected sealed or clear"),
    (KEY + 'sealing = "sealed"\nsuite = 4', "suite is 4, expected aes-128-gcm or aes-256-gcm"),
    (
        KEY + 'sealing = "sealed"\nprotection = "secure-objects-02"',
        "protection is 'secure-objects-02', expected secure-objects-01",
    ),
    (KEY + 'suite = "aes-128-gcm"', "suite is set, expected sealing to be sealed then"),
    (KEY + "producers = 5", "producers is a int, expected tables"),
    (KEY + "producers = [5]", "producers 1: a int, expected a table"),
    (KEY + "[[producers]]", "producers 1: found none of public_key and public_key_file"),
    (KEY + '[[producers]]\npublic_key = "0102"', "producers 1: public_key of 2 octets"),
    (KEY + '[[producers]]\npublic_key_file = "none.pem"', "producers 1: public key file .*none"),
    (KEY + PRODUCERS + PRODUCERS, "producers 2: the key [0-9a-f]{8} is listed before"),
    (KEY + PRODUCERS + "not_after = 2027-11-30", "not_after is '2027-11-30', expected a time with"),
    (KEY + PRODUCERS + "not_after = 2027-11-30T00:00:00", "expected a time with its zone"),
    (
        KEY + PRODUCERS + "not_before = 2027-01-01T00:00:00Z\nnot_after = 2027-01-01T00:00:00Z",
        "not_after is not later than not_before",
    ),
    (KEY + PRODUCERS + 'kid_hex = "no"', "producers 1: kid_hex is not hex"),
    (KEY + PRODUCERS + f'kid_hex = "{"00" * 257}"', "kid of 257 octets"),
    (KEY + PRODUCERS + "name = 7", "name is a int, expected text"),
    (KEY + PRODUCERS + "role = 7", "producers 1: role is not known"),
    (KEY + "[[issuers]]", "issuers 1: "),
    (KEY + "#" * (1 << 20), "more than 1048576 octets"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_wrong_is_said_without_a_secret(file: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read_scope(write(file, text))

    message = str(refused.value)
    assert message.startswith(f"scope file {file}")
    assert "\n" not in message
    for secret in (SECRET.hex(), "5e5e", "secret!"):
        assert secret not in message


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_whatever_is_in_a_file_only_documented_errors_leave(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.touch(mode=0o600)
    for written in (content, KEY.encode() + content):
        file.write_bytes(written)
        with contextlib.suppress(ConfigError):
            read_scope(file)


# -- made by our own tools -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "protection", [None, Protection(), Protection(Suite.AES_256_GCM_SHA512_128, "none")]
)
def test_a_scope_that_is_made_is_read_back_and_is_for_its_owner(
    file: Path, protection: Protection | None
) -> None:
    mask = os.umask(0)
    try:
        made = new_scope(file, protection)
    finally:
        os.umask(mask)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_scope(file) == made
    assert made.protection == protection
    assert new_scope(file.with_name("next"), protection).key != made.key


def test_a_scope_is_never_written_over(file: Path) -> None:
    before = new_scope(file, None)

    with pytest.raises(ConfigError, match="File exists"):
        new_scope(file, None)
    assert read_scope(file) == before


names = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=40)
times = st.none() | st.integers(0, 1 << 32).map(float)


@given(st.lists(st.tuples(names, times, st.booleans()), max_size=4))
def test_producers_that_are_added_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, listed: list[tuple[str, float | None, bool]]
) -> None:
    file = tmp_path_factory.mktemp("scope") / "scope.toml"
    made = new_scope(file, Protection())
    comment = "# what a person wrote\n"
    file.write_text(file.read_text() + comment)
    expected = []
    for name, at, elliptic in listed:
        algorithm = SigningAlgorithm.ES256 if elliptic else SigningAlgorithm.EDDSA
        key = ProducerKey.generate(algorithm).public_key
        expected.append(KnownProducer(key, name=name, not_after=at))
        add_producer(file, expected[-1])

    scope = read_scope(file)
    assert scope.key == made.key
    assert list(scope.producers) == expected
    assert comment in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["scope.toml"]


def test_what_cannot_be_added_leaves_the_file_as_it_was(file: Path) -> None:
    new_scope(file, None)
    one = KnownProducer(ProducerKey.generate().public_key)
    add_producer(file, one)
    before = file.read_bytes()

    with pytest.raises(ConfigError, match=r"lists the key .* already"):
        add_producer(file, one)
    busy = file.with_name(".scope.toml.new")
    busy.touch()
    with pytest.raises(ConfigError, match="beside it: File exists"):
        add_producer(file, KnownProducer(ProducerKey.generate().public_key))
    busy.unlink()
    write(file, KEY + "producers = []")  # to which no table can be appended
    with pytest.raises(ConfigError, match="nothing can be added"):
        add_producer(file, KnownProducer(ProducerKey.generate().public_key))
    assert file.read_text() == KEY + "producers = []"
    assert not busy.exists()
    file.write_bytes(before)
    assert read_scope(file).producers == (one,)


# -- keys by date --------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(times, times, st.integers(0, 1 << 32))
def test_a_key_is_believed_from_its_first_date_to_its_last(
    first: float | None, last: float | None, now: int
) -> None:
    if first is not None and last is not None and first >= last:
        return
    one = KnownProducer(ProducerKey.generate().public_key, b"1", "", first, last)

    expected = (first or 0) <= now < (last if last is not None else now + 1)
    assert one.is_trusted_at(now) == expected
    keys = KeysByDate([one], lambda: now)
    assert (b"1" in keys, len(keys), list(keys)) == (expected, int(expected), [b"1"] * expected)


def test_a_key_expires_in_a_program_that_runs_and_then_nobody_is_believed() -> None:
    clock, key = Clock(), ProducerKey.generate().public_key
    keys = KeysByDate([KnownProducer(key, b"1", not_after=200.0)], clock)
    assert keys.get(b"1") == key

    clock.now = 200.0
    assert keys.get(b"1") is None
    assert keys, "who believed everybody now would check no signature any more"
    assert not KeysByDate([], clock)


def test_keys_that_are_always_believed_stand_beside_and_an_identifier_is_of_one_key() -> None:
    one, two = ProducerKey.generate(), ProducerKey.generate()
    listed = KnownProducer(one.public_key)
    keys = KeysByDate([listed], Clock(), {one.kid: one.public_key, two.kid: two.public_key})

    assert dict(keys) == {one.kid: one.public_key, two.kid: two.public_key}
    with pytest.raises(ConfigError, match="two producers have the key identifier"):
        KeysByDate([listed], Clock(), {one.kid: two.public_key})


def test_a_producer_whom_the_scope_would_not_believe_is_told_before_it_starts() -> None:
    own = ProducerKey.generate()
    listed = KnownProducer(own.public_key, name="mine", not_before=50.0, not_after=200.0)

    assert check_listed([], None, 100.0) is None
    assert check_listed([], own, 100.0) is None
    assert check_listed([listed], own, 100.0) == listed
    for key, now, says in (
        (None, 100.0, "producer_key_file is not set, expected one since the scope lists"),
        (ProducerKey.generate(), 100.0, "is none of the 1 that the scope lists"),
        (own, 49.0, "not yet"),
        (own, 200.0, "no more"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_listed([listed], key, now)
