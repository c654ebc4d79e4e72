"""The token of a client: read from its file, again in time, and never shown."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadToken, ConfigError
from kvcs.trust.tokenfile import TokenFile, token_from_octets, token_to_text
from tests.unit.kvcs.trust.vectors import NOW, token_with, valid

TOKEN = valid("consumer, EdDSA")
CTI = "00112233445566778899aabbccddeeff"


def put(path: Path, octets: bytes, *, mode: int = 0o600) -> Path:
    """Write a file anew, so that its time tells."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.touch(mode=0o600)
    path.write_bytes(octets)
    path.chmod(mode)
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return path


@pytest.mark.parametrize(
    "octets",
    [
        TOKEN,
        TOKEN[2:],
        token_to_text(TOKEN).encode(),
        b" \n" + token_to_text(TOKEN).encode() + b"=\n",
    ],
    ids=["as it is", "without tag 61", "text", "text with padding and white space"],
)
def test_a_token_is_read_in_every_form(octets: bytes, tmp_path: Path) -> None:
    held = TokenFile(put(tmp_path / "token", octets)).read(NOW)

    assert held.value in (TOKEN, TOKEN[2:])
    assert (held.expires_at, held.token_id.hex(), held.mark) == (NOW + 3600, CTI, "00112233")
    assert (held.to_show.token_type, held.to_show.value) == (1, held.value)


@given(st.binary(min_size=1, max_size=400).map(lambda rest: b"\xd8" + rest))
def test_text_and_octets_are_the_same_token(value: bytes) -> None:
    assert token_from_octets(value) == value
    assert token_from_octets(token_to_text(value).encode()) == value


@given(st.binary(max_size=80))
def test_only_bad_token_leaves_the_reader_of_noise(noise: bytes) -> None:
    try:
        assert isinstance(token_from_octets(noise), bytes)
    except BadToken as exc:
        assert str(exc) == "neither a token nor one in base64url"  # noqa: PT017


@pytest.mark.parametrize(
    ("octets", "mode", "says"),
    [
        (b"", 0o600, "token of 0 octets is not in the form"),
        (b"not a token!", 0o600, "neither a token nor one in base64url"),
        (token_to_text(TOKEN[:-1]).encode(), 0o600, "not in the form that is taken"),
        (TOKEN, 0o644, "has mode 0644, expected 0600"),
        (b"A" * 20_000, 0o600, "more than 16384 octets"),
        (token_with(exp_4=NOW - 31, iat_6=NOW - 60), 0o600, "the token expired 31 s ago"),
        (token_with(catu_312={}), 0o600, "claim 312 of the token: a restriction"),
    ],
    ids=["empty", "no text", "cut", "for others too", "too long", "expired", "restricted"],
)
def test_a_file_without_a_usable_token_is_named_and_never_shown(
    octets: bytes, mode: int, says: str, tmp_path: Path
) -> None:
    path = put(tmp_path / "token", octets, mode=mode)

    with pytest.raises(ConfigError, match=f"^token file {path}.*{says}") as caught:
        TokenFile(path).read(NOW)
    for shown in (octets.decode(errors="replace"), octets.hex()):
        assert not octets or shown not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(tmp_path / "nowhere").read(NOW)


def test_a_held_token_is_in_no_text_about_it(tmp_path: Path) -> None:
    held = TokenFile(put(tmp_path / "token", TOKEN)).read(NOW)

    for text in (repr(held), str(held), repr(held.to_show)):
        assert "value=" not in text
        assert TOKEN.hex() not in text


def test_a_file_that_changes_is_read_at_once(tmp_path: Path) -> None:
    path = put(tmp_path / "token", TOKEN)
    file = TokenFile(path)
    file.read(NOW)
    assert file.renewed(NOW + 1) is None
    other = token_with(exp_4=NOW + 7200)

    put(path, other)

    held = file.renewed(NOW + 2)
    assert held is not None
    assert held.value == other
    assert file.renewed(NOW + 3) is None


def test_a_file_that_is_written_anew_with_the_same_token_is_no_news(tmp_path: Path) -> None:
    path = put(tmp_path / "token", TOKEN)
    file = TokenFile(path)
    file.read(NOW)

    put(path, token_to_text(TOKEN).encode())

    assert file.renewed(NOW + 1) is None


def test_at_half_of_the_lifetime_the_file_is_read_whatever_its_time_says(tmp_path: Path) -> None:
    path = put(tmp_path / "token", TOKEN)
    file = TokenFile(path)
    file.read(NOW)
    found = path.stat()
    other = token_with(sub_2="decode-8")
    path.write_bytes(other)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert len(other) == len(TOKEN)

    assert file.renewed(NOW + 1799) is None
    held = file.renewed(NOW + 1800)

    assert held is not None
    assert held.value == other


def test_a_token_that_nobody_renews_is_looked_for_ever_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TokenFile(put(tmp_path / "token", TOKEN))
    file.read(NOW)
    looks: list[float] = []
    real = TokenFile.read

    def read(self: TokenFile, now: float) -> object:
        looks.append(now)
        return real(self, now)

    monkeypatch.setattr(TokenFile, "read", read)
    for second in range(1, 3600):
        assert file.renewed(NOW + second) is None

    assert looks[:4] == [NOW + 1800, NOW + 2700, NOW + 3150, NOW + 3375]
    assert len(looks) < 20


def test_a_renewal_that_cannot_be_read_is_told_once_and_the_next_one_is_found(
    tmp_path: Path,
) -> None:
    path = put(tmp_path / "token", TOKEN)
    file = TokenFile(path)
    file.read(NOW)
    put(path, b"half a tok")

    with pytest.raises(ConfigError, match="token file"):
        file.renewed(NOW + 10)
    assert file.renewed(NOW + 10.5) is None
    put(path, token_with(exp_4=NOW + 7200))
    assert file.renewed(NOW + 11) is not None
