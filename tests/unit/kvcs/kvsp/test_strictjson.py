"""JSON from strangers: equal to the standard parser where it accepts, bounded everywhere."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.strictjson import StrictJsonError, loads

#: Brackets and escapes, which matter here, and half a surrogate pair.
TEXT = st.text('a"\\[]{},:\n\x00é😀\ud800', max_size=10)
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def read(text: bytes | str, *, depth: int = 32, values: int = 1 << 16) -> Any:
    return loads(text, octets=1 << 20, depth=depth, values=values)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(ANY_JSON, st.booleans())
def test_reads_what_the_standard_library_writes(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(StrictJsonError, match="UTF-8"):
            read(text)
    else:
        assert read(text) == json.loads(text)
        assert read(text.encode()) == json.loads(text)


@given(ANY_JSON, st.integers(1, 4))
def test_the_depth_limit_is_exact_whatever_strings_contain(value: Any, limit: int) -> None:
    text = json.dumps([value, '[[[[{{{{"\\'])

    if depth_of([value]) <= limit:
        read(text, depth=limit)
    else:
        with pytest.raises(StrictJsonError, match=f"limit of {limit}"):
            read(text, depth=limit)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":1,"b":2,"a":3}', "member 'a' occurs twice"),
        ('[{"x":{"":1,"":1}}]', "member '' occurs twice"),
        ("NaN", "NaN is not JSON"),
        ("[Infinity]", "Infinity is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("", "Expecting value"),
        ("[1,]", "Illegal trailing comma|Expecting value"),
        ("[1}", "delimiter"),
        ("[1]]", "unbalanced"),
        ('"open', "Unterminated"),
        ('"a\nb"', "control character"),
        ("\ufeff[]", "BOM"),
        ("1" * 5000, "digits"),
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_refused(text: str, says: str) -> None:
    with pytest.raises(StrictJsonError, match=says):
        read(text)


def test_the_limits_are_named() -> None:
    with pytest.raises(StrictJsonError, match="1048577 octets, limit 1048576"):
        read(b" " * (1 << 20) + b"1")
    with pytest.raises(StrictJsonError, match="11 values, limit 10"):
        read("[" + ",".join("1" * 10) + "]", values=10)
    assert read('[",,,,,,,,,,,,,,,,[[[[{{{{"]', values=3, depth=1)


@given(st.binary(max_size=100) | st.text('[]{}":,\\ntu1e-.0', max_size=60).map(str.encode))
def test_only_its_own_error_leaves_the_parser(text: bytes) -> None:
    try:
        value = read(text)
    except StrictJsonError:
        return
    assert value == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 1_000_000,
        b"[" * 500_000 + b"]" * 500_000,
        b'{"a":' * 200_000,
        b'"' + b'\\"' * 500_000,
        b'"' * 999_999,
        b"[],[]," * 160_000,
        b"\\" * 1_000_000,
    ],
    ids=["open", "deep", "objects", "escapes", "quotes", "siblings", "backslashes"],
)
def test_hostile_text_is_refused_in_time_proportional_to_its_length(text: bytes) -> None:
    start = time.process_time()

    with pytest.raises(StrictJsonError):
        read(text)
    assert time.process_time() - start < 2
