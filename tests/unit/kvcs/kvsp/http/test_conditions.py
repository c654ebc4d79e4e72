"""Preconditions and ranges, against the examples and rules of RFC 9110."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.http.conditions import Selection, Span, matches, parse_range, select

ETAG = '"xyzzy"'
LENGTH = 10_000


def chosen(**fields: str | bool) -> Selection:
    return select(**{"etag": ETAG, "length": LENGTH, **fields})  # type: ignore[arg-type]


# -- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "start", "stop"),
    [
        # The examples of RFC 9110 Section 14.1.2, for a representation of 10,000 octets.
        ("bytes=0-499", 0, 500),
        ("bytes=500-999", 500, 1000),
        ("bytes=-500", 9500, 10_000),
        ("bytes=9500-", 9500, 10_000),
        ("bytes=0-0", 0, 1),
        ("bytes=-1", 9999, 10_000),
        ("bytes=0-10000", 0, 10_000),
        ("bytes=9999-99999999", 9999, 10_000),
        ("bytes=-20000", 0, 10_000),
        ("BYTES=0-", 0, 10_000),
        ("bytes= 5-6 ,", 5, 7),
    ],
)
def test_one_range_is_taken(field: str, start: int, stop: int) -> None:
    assert parse_range(field, LENGTH) == Span(start, stop)
    assert chosen(range_=field) == Selection(206, Span(start, stop))


@pytest.mark.parametrize(
    "field",
    [
        "bytes=10000-", "bytes=10000-10001", "bytes=-0", "bytes=5-4", "bytes=", "bytes", "=0-1",
        "bytes=0-1,5-6", "bytes=a-b", "bytes=0", "bytes=--1", "bytes=0-1-2", "bytes=0x1-2",
        "bytes=+1-2", "bytes=\u0660-\u0661", "bytes=" + "9" * 30 + "-", "",
    ],
)  # fmt: skip
def test_what_is_no_single_range_within_the_representation_is_refused(field: str) -> None:
    assert chosen(range_=field).status == 416


def test_nothing_of_what_is_empty_can_be_asked_for() -> None:
    assert select(etag=ETAG, length=0, range_="bytes=0-0").status == 416
    assert select(etag=ETAG, length=0).status == 200


@pytest.mark.parametrize("field", ["pages=1-2", "x-unit=whatever, it says"])
def test_a_range_of_another_unit_is_ignored(field: str) -> None:
    assert parse_range(field, LENGTH) is None
    assert chosen(range_=field) == Selection(200, Span(0, LENGTH))


@given(st.integers(1, 1 << 40), st.data())
def test_a_range_is_what_slicing_would_give(length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(start, 2 * length))

    span = parse_range(f"bytes={start}-{last}", length)
    assert span == Span(start, min(last + 1, length))
    assert span.content_range(length) == f"bytes {start}-{span.stop - 1}/{length}"
    assert span.octets == span.stop - span.start > 0


@given(st.text(), st.integers(0, 100))
def test_no_field_raises_anything_undocumented(field: str, length: int) -> None:
    for text in (field, "bytes=" + field):
        try:
            span = parse_range(text, length)
        except ValueError:
            continue
        assert span is None or 0 <= span.start < span.stop <= length


# -- preconditions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "strong", "weak"),
    [
        # RFC 9110 Sections 13.1.1 and 13.1.2.
        ('"xyzzy"', True, True),
        ('"xyzzy", "r2d2xxxx", "c3piozzzz"', True, True),
        ('"r2d2xxxx" , "xyzzy"', True, True),
        ("*", True, True),
        ('W/"xyzzy"', False, True),
        ('W/"xyzzy", "xyzzy"', True, True),
        ('"other"', False, False),
        ('"a,b","xyzzy"', True, True),
        ('"XYZZY"', False, False),
        ("xyzzy", False, False),
        ('"xyzzy', False, False),
        ('w/"xyzzy"', False, False),
        ('nonsense, "xyzzy"', False, False),
        ("", False, False),
        (", ,", False, False),
    ],
)
def test_a_list_of_tags_is_compared_as_it_must_be(field: str, strong: bool, weak: bool) -> None:
    assert matches(field, ETAG, strong=True) is strong
    assert matches(field, ETAG, strong=False) is weak
    assert chosen(if_match=field).status == (200 if strong else 412)
    assert chosen(if_none_match=field).status == (304 if weak else 200)


def test_a_list_of_very_many_tags_is_not_read_to_its_end() -> None:
    assert not matches(", ".join(['"no"'] * 1000 + [ETAG]), ETAG, strong=True)


@given(st.text())
def test_no_list_of_tags_raises(field: str) -> None:
    matches(field, ETAG, strong=True)


@pytest.mark.parametrize(
    ("if_range", "status"),
    [(ETAG, 206), (f" {ETAG} ", 206), ('"other"', 200), (f"W/{ETAG}", 200), ("", 200),
     ("Tue, 15 Nov 1994 12:45:26 GMT", 200)],
)  # fmt: skip
def test_a_range_is_sent_only_of_the_representation_that_was_meant(
    if_range: str, status: int
) -> None:
    assert chosen(if_range=if_range, range_="bytes=0-1").status == status


def test_what_decides_first_is_in_the_order_of_the_rfc() -> None:
    other, range_ = '"other"', "bytes=99999-"

    assert chosen(if_match=other, if_none_match=ETAG, range_=range_).status == 412
    assert chosen(if_match=ETAG, if_none_match=ETAG, range_=range_).status == 304
    assert chosen(if_match=ETAG, if_none_match=other, range_=range_).status == 416
    assert chosen(if_range=other, range_=range_).status == 200


def test_head_knows_no_ranges() -> None:
    assert chosen(is_get=False, range_="bytes=0-1") == Selection(200, Span(0, LENGTH))
    assert chosen(is_get=False, if_none_match=ETAG).status == 304
