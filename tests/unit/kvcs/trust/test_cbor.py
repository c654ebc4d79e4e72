"""Strict CBOR: what is read is what another library reads, and every ambiguity is refused."""

import math
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.trust.cbor import BadCbor, Cbor, Opaque, read_map


def read(octets: bytes, *, wide: bool = False) -> Any:
    reader = Cbor(octets, wide=wide)
    value = reader.value()
    reader.expect_end()
    return value


NARROW = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-(2**64), 2**64 - 1) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def depth_of(value: Any) -> int:
    """Depth as the limit counts it."""
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, [*value, *value.values()]), default=0)
    return 1


@given(NARROW)
def test_what_another_library_writes_is_read_as_it_was(value: Any) -> None:
    octets = cbor2.dumps(value)
    if depth_of(value) > 8:
        with pytest.raises(BadCbor, match="nested deeper than the limit of 8"):
            read(octets)
    else:
        assert read(octets) == value
        assert read(octets, wide=True) == value


@given(st.floats())
def test_floats_are_read_only_where_they_may_stand(number: float) -> None:
    for octets in (cbor2.dumps(number), cbor2.dumps(number, canonical=True)):
        found = read(octets, wide=True)
        assert type(found) is float
        assert found == number or (math.isnan(found) and math.isnan(number))
        with pytest.raises(BadCbor, match="a float"):
            read(octets)


@pytest.mark.parametrize(
    ("octets", "what"),
    [
        ("c11a514b67b0", "tag 1"),
        ("d83d01", "tag 61"),
        ("f7", "the simple value 23"),
        ("e0", "the simple value 0"),
        ("f8ff", "the simple value 255"),
    ],
)
def test_what_means_nothing_here_is_kept_apart_from_what_does(octets: str, what: str) -> None:
    assert read(bytes.fromhex(octets), wide=True) == Opaque(what)
    with pytest.raises(BadCbor):
        read(bytes.fromhex(octets))


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        ("9fff", "indefinite"),
        ("bfff", "indefinite"),
        ("5fff", "indefinite"),
        ("7fff", "indefinite"),
        ("c19fff", "indefinite"),
        ("ff", "indefinite"),
        ("1c", "reserved"),
        ("f818", "simple value 24 in two octets"),
        ("f8", "ends where 1 more"),
        ("fb00", "ends where 8 more"),
        ("f9", "ends where 2 more"),
        ("", "ends where 1 more"),
        ("a2f500f500", "a key that is neither"),
        ("a1f9000000", "a key that is neither"),
        ("a18000", "a key that is neither"),
        ("a2413100413100", "two keys b'1'"),
        ("a2010001f5", "two keys 1"),
        ("a2010018012a", "two keys 1"),
        ("0000", "1 octets too many"),
        ("8181818181818181" + "00", "nested deeper than the limit of 8"),
        ("c1" * 8 + "00", "nested deeper than the limit of 8"),
        ("9bffffffffffffffff", "values in the 0 octets left"),
        ("bbffffffffffffffff", "values in the 0 octets left"),
        ("61ff", "not UTF-8"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(octets: str, says: str) -> None:
    with pytest.raises(BadCbor, match=says):
        read(bytes.fromhex(octets), wide=True)


@given(st.binary(max_size=64), st.booleans())
def test_only_bad_cbor_leaves_the_reader_of_noise(noise: bytes, wide: bool) -> None:
    try:
        value = read(noise, wide=wide)
    except BadCbor:
        return
    assert depth_of(value) <= 8


@given(NARROW, st.data())
def test_a_document_cut_anywhere_is_refused(value: Any, data: st.DataObject) -> None:
    octets = cbor2.dumps(value)
    cut = data.draw(st.integers(0, len(octets) - 1))

    with pytest.raises(BadCbor):
        read(octets[:cut], wide=True)


def test_a_map_alone_is_a_map() -> None:
    assert read_map(b"\xa1\x01\x02", "the header") == {1: 2}
    with pytest.raises(BadCbor, match="the header is not a map"):
        read_map(b"\x80", "the header")
    with pytest.raises(BadCbor, match="1 octets too many"):
        read_map(b"\xa0\x00", "the header")
