"""The files of a policy: read as a whole, and found to have changed."""

import os
from pathlib import Path

import pytest

from kvcs.errors import ConfigError
from kvcs.trust.policy import Policy, PolicyFiles
from tests.unit.kvcs.trust.vectors import ISSUER, KEYS, SECRET

ISSUERS = f"""
[[issuers]]
issuer = "{ISSUER}"
kid = "issuer-1"
public_key = "{KEYS["issuer-1"]["public"]}"
"""
IDENTITIES = f"""
[[identities]]
uri = "spiffe://cluster.example/*"
role = "producer"
scopes = ["{"00" * 32}"]
"""


@pytest.fixture
def issuers(tmp_path: Path) -> Path:
    path = tmp_path / "issuers.toml"
    path.write_text(ISSUERS + IDENTITIES)
    return path


@pytest.fixture
def revocations(tmp_path: Path) -> Path:
    path = tmp_path / "revoked"
    path.write_text("cti 00\n")
    return path


def later(path: Path, text: str) -> None:
    """Put another text in place of a file, at once and with a time that tells."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    other = path.with_name(path.name + ".new")
    other.touch(mode=path.stat().st_mode & 0o777 if path.exists() else 0o600)
    other.write_text(text)
    os.utime(other, ns=(before + 10**9, before + 10**9))
    other.replace(path)


def test_a_policy_is_read_from_its_files(issuers: Path, revocations: Path) -> None:
    policy = PolicyFiles(issuers, revocations).read()

    assert list(policy.issuers) == [b"issuer-1"]
    assert [identity.uri for identity in policy.identities] == ["spiffe://cluster.example/*"]
    assert policy.revocations.token_ids == {b"\0"}
    assert PolicyFiles(issuers).read().revocations == Policy().revocations


def test_clients_may_be_known_by_certificates_alone(issuers: Path) -> None:
    issuers.write_text(IDENTITIES)

    policy = PolicyFiles(issuers).read()
    assert (len(policy.issuers), len(policy.identities)) == (0, 1)


def test_a_change_of_any_file_is_noticed_until_it_was_read(
    issuers: Path, revocations: Path
) -> None:
    files = PolicyFiles(issuers, revocations)
    files.read()
    assert not files.have_changed()

    for path, text in ((issuers, ISSUERS), (revocations, "kid 00\n")):
        later(path, text)
        assert files.have_changed()
        files.read()
        assert not files.have_changed()


def test_a_file_that_is_put_in_its_place_is_noticed(issuers: Path, tmp_path: Path) -> None:
    files = PolicyFiles(issuers)
    files.read()
    other = tmp_path / "other"
    other.write_text(issuers.read_text())
    found = issuers.stat()
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))

    other.replace(issuers)

    assert files.have_changed()


def test_files_of_keys_that_the_tables_name_are_watched_even_before_they_are_there(
    issuers: Path, tmp_path: Path
) -> None:
    files = PolicyFiles(issuers)
    issuers.write_text(
        f'[[issuers]]\nissuer = "{ISSUER}"\nkid = "k"\nsecret_file = "issuer.secret"\n'
    )
    with pytest.raises(ConfigError, match=r"issuer\.secret: No such file"):
        files.read()
    assert not files.have_changed()

    secret = tmp_path / "issuer.secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET.hex())
    assert files.have_changed()
    assert files.read().issuers[b"k"].key == SECRET
    later(secret, "11" * 32)
    assert files.have_changed()


def test_what_is_wrong_is_told_once_and_the_next_change_is_noticed(
    issuers: Path, revocations: Path
) -> None:
    files = PolicyFiles(issuers, revocations)
    files.read()
    later(revocations, "nonsense\n")
    with pytest.raises(ConfigError, match=r"revocations file .*revoked: line 1 is 'nonsense'"):
        files.read()
    assert not files.have_changed()

    later(revocations, "")

    assert files.have_changed()
    assert files.read().revocations == Policy().revocations


def test_a_file_that_is_gone_has_changed(issuers: Path) -> None:
    files = PolicyFiles(issuers)
    files.read()

    issuers.unlink()

    assert files.have_changed()
    with pytest.raises(ConfigError, match=r"issuers\.toml: No such file"):
        files.read()
