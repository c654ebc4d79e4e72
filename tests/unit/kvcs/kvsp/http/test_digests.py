"""Digest fields, against the examples of RFC 9530."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.http.digests import digest_field, entity_tag, parse_digest

#: RFC 9530 Appendix B.1: {"hello": "world"} and a line feed.
HELLO = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"


def test_the_example_of_the_rfc_is_written_and_read() -> None:
    digest = sha256(b'{"hello": "world"}\n').digest()

    assert digest_field(digest) == HELLO
    assert parse_digest(HELLO) == digest


@given(st.binary(min_size=32, max_size=32))
def test_a_digest_is_read_as_it_was_written(digest: bytes) -> None:
    assert parse_digest(digest_field(digest)) == digest
    assert entity_tag(digest) == f'"{digest.hex()}"'


@pytest.mark.parametrize(
    "field",
    [
        f"sha-512=:{'A' * 86}==:, {HELLO}",
        f"{HELLO},sha-512=:AAAA:",
        f'{HELLO};param=1;other="text, with a comma"',
        f"  {HELLO}  ",
        f'a=1, b=?0, c=1.5, d=token/x, e, *f="\\"", {HELLO}',
        f"sha-256=:AAAA:, {HELLO}",  # of two the last one counts
    ],
)
def test_it_is_found_among_others(field: str) -> None:
    assert parse_digest(field) == parse_digest(HELLO)


@pytest.mark.parametrize("field", ["", "sha-512=:AAAA:", "md5=:AAAA:, unixsum=30637"])
def test_a_field_without_it_says_nothing(field: str) -> None:
    assert parse_digest(field) is None


@pytest.mark.parametrize(
    "field",
    [
        "sha-256=:AAAA:",  # 3 octets
        "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg:",  # no padding
        "sha-256=RK0qy18MlBSVnWgjwz6lZEWjPlF5HF9bvEF8FabDg",
        'sha-256="text"',
        "sha-256",
        "sha-256=?1",
        f"{HELLO},",
        f"{HELLO} {HELLO}",
        f",{HELLO}",
        "SHA-256=:AAAA:",
        "=:AAAA:",
        "sha-256=:AA AA:",
        "x" * 5000,
    ],
)
def test_what_is_none_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        parse_digest(field)


@given(st.text(st.characters(max_codepoint=255)))
def test_no_field_raises_anything_undocumented(text: str) -> None:
    for field in (text, HELLO + text, text + ", " + HELLO):
        try:
            found = parse_digest(field)
        except ValueError:
            continue
        assert found is None or len(found) == 32
