"""``kvcs keys``: what it prints is what the library computes, and bad input is named."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcs.cli.main import main
from kvcs.kvsp.keys import ScopeKey, block_keys_sha256
from tests.unit.kvcs.cli.samples import DESCRIPTOR, SECRET, TOKENS, Folder

KEYS = ScopeKey(SECRET).block_keys(DESCRIPTOR, TOKENS)


def test_every_identifier_is_in_the_json(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "--scope-key-file", folder.key, folder.side, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    scope, compat = ScopeKey(SECRET).scope_id, ScopeKey(SECRET).compatibility_id(DESCRIPTOR)
    assert found == {
        "scope_id": scope.hex(),
        "compatibility_id": compat.hex(),
        "block_tokens": 4,
        "tokens": 10,
        "blocks": 2,
        "tokens_covered": 8,
        "anchor_key": KEYS[-1].hex(),
        "block_keys_sha256": block_keys_sha256(KEYS).hex(),
        "prefix": f"kvcs-1/{scope.hex()}/{compat.hex()}/{KEYS[-1].hex()}",
        "block_keys": [key.hex() for key in KEYS],
    }


def test_people_see_every_block_when_they_ask(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "--scope-key-file", folder.key, folder.side]) == 0
    short = capsys.readouterr().out
    assert main(["keys", "--scope-key-file", folder.key, folder.side, "--blocks"]) == 0

    assert capsys.readouterr().out.startswith(short)
    assert KEYS[-1].hex() in short
    assert KEYS[0].hex() not in short
    assert "10: 2 blocks of 4, 2 left over" in short


@pytest.mark.parametrize(
    "text",
    ["[0,1,2,3,4,5,6,7,8,9]", '{"tokens": [0,1,2,3,4,5,6,7,8,9]}', "0 1 2 3,4,5\n6 7 8 9\n"],
)
def test_tokens_come_in_three_forms(
    text: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = folder.write("tokens", text)

    argv = ["keys", "--scope-key-file", folder.key, folder.descriptor, "--tokens", tokens]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_keys"] == [key.hex() for key in KEYS]


def test_standard_input_is_a_file_like_any_other(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"0 1 2 3 4 5 6 7 8 9")))

    argv = ["keys", "--scope-key-file", folder.key, folder.descriptor, "--tokens", "-", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["anchor_key"] == KEYS[-1].hex()


def test_without_tokens_only_the_scope_and_the_descriptor_have_identifiers(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "--scope-key-file", folder.key, folder.descriptor, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert sorted(found) == ["block_tokens", "compatibility_id", "scope_id"]


def test_a_prompt_shorter_than_a_block_has_no_anchor(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = folder.write("tokens", "1 2 3")

    argv = ["keys", "--scope-key-file", folder.key, folder.descriptor, "--tokens", tokens]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["anchor_key"], found["prefix"]) == (0, None, None)
    assert main(argv) == 0
    assert "Anchor Key" not in capsys.readouterr().out


def test_the_key_may_come_from_the_environment_or_the_settings_file(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("kvcs.toml", f'scope_key_file = "{folder.key}"')
    assert main(["keys", folder.side]) == 0
    by_file = capsys.readouterr().out
    (folder.path / "kvcs.toml").unlink()
    monkeypatch.setenv("KVCS_SCOPE_KEY", SECRET.hex())

    assert main(["keys", folder.side]) == 0
    assert capsys.readouterr().out == by_file


def test_a_new_key_is_secret_and_works(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder.path / "new.key")

    assert main(["keys", "--new", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert json.loads(out)["scope_id"] == ScopeKey.from_file(path).scope_id.hex()
    assert Path(path).read_text().strip() not in out + err


def test_a_new_key_never_replaces_a_file(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(folder.key).read_bytes()

    assert main(["keys", "--new", folder.key]) == 2
    assert "scope.key: File exists" in capsys.readouterr().err
    assert Path(folder.key).read_bytes() == before


Case = Callable[[Folder], list[str]]
BAD: dict[str, tuple[Case, int, str]] = {
    "no descriptor": (lambda f: ["--scope-key-file", f.key], 2, "no descriptor given"),
    "no such file": (
        lambda f: ["--scope-key-file", f.key, "nowhere.json"],
        2,
        "nowhere.json: No such file or directory",
    ),
    "not json": (
        lambda f: ["--scope-key-file", f.key, f.write("bad.json", "{")],
        2,
        "bad.json: not JSON",
    ),
    "not a descriptor": (
        lambda f: ["--scope-key-file", f.key, f.json("bad.json", {"kvsp": 1})],
        6,
        "bad.json: descriptor has no member 'model'",
    ),
    "a float": (
        lambda f: [
            "--scope-key-file",
            f.key,
            f.json("bad.json", {**DESCRIPTOR.members(), "rope": 1.5}),
        ],
        6,
        "write it as a string",
    ),
    "no key": (lambda f: [f.side], 2, "no scope key: set scope_file"),
    "a short key": (
        lambda f: ["--scope-key-file", f.write("short", "00" * 31), f.side],
        2,
        "has 31 octets, at least 32",
    ),
    "a token that is none": (
        lambda f: ["--scope-key-file", f.key, f.descriptor, "--tokens", f.write("t", "1 2 x")],
        2,
        "token 2 is 'x'",
    ),
    "a token of 33 bits": (
        lambda f: [
            "--scope-key-file",
            f.key,
            f.descriptor,
            "--tokens",
            f.write("t", "[4294967296]"),
        ],
        2,
        "token 0 is 4294967296",
    ),
    "a token that is true": (
        lambda f: ["--scope-key-file", f.key, f.descriptor, "--tokens", f.write("t", "[true]")],
        2,
        "token 0 is True",
    ),
    "tokens that are no array": (
        lambda f: ["--scope-key-file", f.key, f.descriptor, "--tokens", f.write("t", '{"a": 1}')],
        2,
        "no member 'tokens'",
    ),
    "both from standard input": (
        lambda f: ["--scope-key-file", f.key, "-", "--tokens", "-"],
        2,
        "cannot both be standard input",
    ),
    "a new key and more": (lambda f: ["--new", "k", f.side], 2, "does nothing else"),
    "an unknown setting": (
        lambda f: ["--config", f.write("c.toml", "scope_kee_file = 'x'"), f.side],
        2,
        "did you mean scope_key_file?",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_it(
    case: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, code, text = BAD[case]

    assert main(["keys", *arguments(folder)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcs: ")
    assert text in err
    assert err.count("\n") == 1
