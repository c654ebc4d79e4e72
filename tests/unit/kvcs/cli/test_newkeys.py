"""``kvcs keys new-scope`` and the others: files that are what they say, and nothing secret told."""

import json
import stat
import time
from pathlib import Path

import pytest

from kvcs.cli.main import main
from kvcs.profile.signing import ProducerKey
from kvcs.trust.scope import Protection, Suite
from kvcs.trust.scopefile import read_scope


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keys(*arguments: str) -> int:
    return main(["keys", *arguments])


@pytest.mark.parametrize(
    ("flags", "protection"),
    [
        ((), Protection()),
        (("--suite", "aes-256-gcm"), Protection(Suite.AES_256_GCM_SHA512_128)),
        (("--clear",), None),
    ],
)
def test_a_scope_is_sealed_unless_it_is_said_to_be_clear(
    flags: tuple[str, ...], protection: Protection | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys("new-scope", "scope.toml", *flags, "--json") == 0

    scope, told = read_scope("scope.toml"), capsys.readouterr()
    assert scope.protection == protection
    assert stat.S_IMODE(Path("scope.toml").stat().st_mode) == 0o600
    event = json.loads(told.out)
    assert event["scope"] == scope.key.scope_id.hex()
    assert event["sealing"] == ("clear" if protection is None else "sealed")
    [line] = [line for line in Path("scope.toml").read_text().splitlines() if line[:3] == "key"]
    assert line.split('"')[1] not in told.out + told.err


def test_a_producer_that_is_made_is_listed_and_its_key_is_for_its_owner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys("new-scope", "scope.toml")
    before = time.time()
    for name, flags in (("one", ("--days", "90", "--name", "one")), ("two", ("--es256",))):
        assert keys("new-producer", f"{name}.pem", "--scope-file", "scope.toml", *flags) == 0

    one, two = read_scope("scope.toml").producers
    for listed, file in ((one, "one.pem"), (two, "two.pem")):
        assert ProducerKey.from_file(file).public_key == listed.key
        assert ProducerKey.from_file(file).kid == listed.kid
        assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
        assert Path(file).read_text().splitlines()[1] not in capsys.readouterr().out
    assert (one.name, two.not_after) == ("one", None)
    assert one.not_after == pytest.approx(before + 90 * 86_400, abs=60)


def test_a_key_that_was_made_elsewhere_is_listed() -> None:
    keys("new-scope", "scope.toml")
    key = ProducerKey.generate()
    Path("public.pem").write_bytes(key.public_pem())
    dates = ("--not-before", "2026-11-30T00:00:00Z", "--not-after", "2027-11-30T01:00:00+01:00")

    assert keys("add-producer", "public.pem", "--scope-file", "scope.toml", *dates) == 0
    [listed] = read_scope("scope.toml").producers
    assert (listed.key, listed.kid) == (key.public_key, key.kid)
    assert (listed.not_after or 0) - (listed.not_before or 0) == 365 * 86_400


WRONG = [
    (("new-scope",), "no FILE given, expected one"),
    (("new-scope", "there"), "scope file there: File exists"),
    (("new-scope", "none/scope.toml"), "scope file none/scope.toml: No such file or directory"),
    (("new-scope", "x", "--clear", "--suite", "aes-128-gcm"), "--suite is set, expected not since"),
    (("new-producer", "x"), "--scope-file is not set, expected the one file"),
    (("new-producer", "x", *["--scope-file", "there"] * 2), "2 of --scope-file, expected the one"),
    (("new-producer", "x", "--scope-file", "there"), "scope file there"),
    (("new-producer", "there", "--scope-file", "scope.toml"), "key file there: File exists"),
    (("new-producer", "x", "--scope-file", "scope.toml", "--days", "0"), "--days is 0.0, expected"),
    (
        ("new-producer", "x", "--scope-file", "scope.toml", "--not-after", "tomorrow"),
        "--not-after is 'tomorrow', expected a time with its zone",
    ),
    (
        ("new-producer", "x", "--scope-file", "scope.toml", "--not-before", "2026-11-30T00:00:00"),
        "expected a time with its zone",
    ),
    (
        ("new-producer", "x", "--scope-file", "scope.toml", "--name", "a\nb"),
        "name of 3 characters",
    ),
    (("add-producer", "there", "--scope-file", "scope.toml"), "public key file there"),
    (("old-scope", "x"), "'old-scope' before a second FILE, expected new-scope, new-producer"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing_behind(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").write_text("something")
    keys("new-scope", "scope.toml")
    before = Path("scope.toml").read_bytes()
    capsys.readouterr()

    assert keys(*arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith("kvcs: ")
    assert says in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert sorted(path.name for path in Path().iterdir()) == ["scope.toml", "there"]
    assert Path("scope.toml").read_bytes() == before
    assert Path("there").read_text() == "something"
