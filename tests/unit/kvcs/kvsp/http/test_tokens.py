"""Tokens: who may what, and what of it is ever shown."""

import hmac
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ConfigError
from kvcs.kvsp.http import tokens
from kvcs.kvsp.http.tokens import Right, TokenFile, bearer_token, parse_lines, read_token

SCOPE, OTHER, MODEL = b"s" * 32, b"o" * 32, b"c" * 32
READER, WRITER = "r" * 32, "w" * 43


def line(token: str, rights: str = "read", scope: bytes = SCOPE) -> str:
    return f"{scope.hex()} {rights} {token}\n"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_good_for_its_scope_and_its_rights(tmp_path: Path) -> None:
    known = TokenFile.read(
        written(tmp_path, f"# people\n\n{line(READER)}{line(WRITER, 'read,write', OTHER)}")
    )
    reader, writer = known.identify(READER.encode(), 0.0), known.identify(WRITER.encode(), 0.0)

    assert len(known) == 2
    assert reader is not None
    assert writer is not None
    assert [reader.may(right, SCOPE, MODEL) for right in Right] == [True, False]
    assert [writer.may(right, OTHER, MODEL) for right in Right] == [True, True]
    assert not any(reader.may(right, OTHER, MODEL) for right in Right)
    assert not any(writer.may(right, SCOPE, MODEL) for right in Right)
    assert reader.subject != writer.subject


@pytest.mark.parametrize("token", ["", READER[:-1], READER + "r", READER.upper(), "x" * 32])
def test_any_other_token_is_nobodys(tmp_path: Path, token: str) -> None:
    known = TokenFile.read(written(tmp_path, line(READER)))

    assert known.identify(token.encode(), 0.0) is None


@pytest.mark.parametrize("presented", [READER, WRITER, "x" * 32])
def test_a_token_is_compared_with_every_one_in_constant_time(
    presented: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TokenFile(parse_lines((line(READER) + line(WRITER) + line("z" * 32)).encode()))
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(tokens, "hmac", type("Fake", (), {"compare_digest": compare}))

    known.identify(presented.encode(), 0.0)
    assert len(compared) == 3
    assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no token: expected lines"),
        ("# nobody\n", "no token"),
        ("a b\n", "line 1 has 2 words, expected 3"),
        ("\n" + line(READER).strip() + " more\n", "line 2 has 4 words"),
        (line(READER, "admin"), "line 1: rights 'admin', expected read, write or read,write"),
        (line(READER, ""), "line 1 has 2 words"),
        (line("short"), "line 1: token of 5 characters, expected 32 to 1024"),
        (line("ü" * 32), "octet .* is not ASCII"),
        (line("a b" * 32), "words, expected 3"),
        (line('"' * 32), "token of 32 characters"),
        (f"{'ab' * 31} read {READER}", "line 1: Scope ID of 62 characters"),
        (line(READER) + line(READER, scope=OTHER), "a token stands in two lines"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_no_token_shown(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        TokenFile.read(written(tmp_path, text))

    assert str(tmp_path) in str(refused.value)
    assert READER not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, line(READER), mode)

    with pytest.raises(ConfigError, match=f"has mode 0{mode:o}, expected 0600"):
        TokenFile.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: No such file"):
        TokenFile.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="none: No such file"):
        read_token(tmp_path / "none")


def test_there_may_not_be_more_tokens_than_are_compared() -> None:
    many = "".join(line(f"{n:032}") for n in range(tokens.MAX_TOKENS + 1))

    with pytest.raises(ConfigError, match="4097 tokens, limit 4096"):
        TokenFile(parse_lines(many.encode()))


def test_neither_the_token_nor_its_digest_is_in_any_text(tmp_path: Path) -> None:
    known = TokenFile.read(written(tmp_path, line(READER)))
    grant = known.identify(READER.encode(), 0.0)

    assert grant is not None
    for text in (repr(grant), str(grant), repr(known), grant.subject):
        assert READER not in text
        assert grant.digest.hex() not in text


def test_the_token_of_a_client_is_read_from_its_file(tmp_path: Path) -> None:
    assert read_token(written(tmp_path, f" {READER}\n")) == READER
    with pytest.raises(ConfigError, match="holds 5 characters, expected one token"):
        read_token(written(tmp_path, "short"))


@pytest.mark.parametrize(
    ("field", "token"),
    [
        (f"Bearer {READER}", READER.encode()),
        (f"bearer   {READER}=", f"{READER}=".encode()),
        (None, None),
        ("", None),
        (READER, None),
        ("Bearer", None),
        ("Bearer ", None),
        (f"Basic {READER}", None),
        (f"Bearer {READER} {READER}", None),
        (f"Bearer {READER}, Bearer {READER}", None),
        (f"Bearer {'x' * 2000}", None),
        ("Bearer ü" + READER, None),
    ],
)
def test_only_a_bearer_token_is_taken(field: str | None, token: bytes | None) -> None:
    assert bearer_token(field) == token


@given(st.text())
def test_no_field_raises(text: str) -> None:
    bearer_token(text)
    bearer_token("Bearer " + text)


@given(st.one_of(st.binary(), st.text().map(lambda t: (line(READER) + t).encode())))
def test_no_file_raises_anything_undocumented(text: Any) -> None:
    refusals = []
    try:
        TokenFile(parse_lines(text))
    except ConfigError as exc:
        refusals.append(str(exc))
    assert not any(READER in refusal for refusal in refusals)
