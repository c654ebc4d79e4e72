from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

#: A primitive, how it is put, how it is taken.
FIELDS: list[tuple[str, Any, Callable[[Writer], None], Callable[[Reader], Any]]] = [
    ("vi64", 300, lambda w: w.vi64(300), Reader.vi64),
    ("uint8", 200, lambda w: w.uint8(200), Reader.uint8),
    ("prefixed", b"abc", lambda w: w.prefixed(b"abc"), Reader.prefixed),
    ("text", "héh", lambda w: w.text("héh"), Reader.text),
    ("reason", "bye", lambda w: w.reason_phrase("bye"), Reader.reason_phrase),
    ("location", Location(3, 700), lambda w: w.location(Location(3, 700)), Reader.location),
    (
        "name",
        FullTrackName.of("kv", "acme", "k"),
        lambda w: w.full_track_name(FullTrackName.of("kv", "acme", "k")),
        Reader.full_track_name,
    ),
]


@pytest.mark.parametrize(("_", "value", "put", "take"), FIELDS, ids=[row[0] for row in FIELDS])
def test_a_field_round_trips_and_is_refused_at_every_cut(
    _: str, value: Any, put: Callable[[Writer], None], take: Callable[[Reader], Any]
) -> None:
    w = Writer()
    put(w)
    data = w.getvalue()
    r = Reader(data)

    assert take(r) == value
    r.expect_end()
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            take(Reader(data[:cut]))


def test_eight_bit_fields_are_no_integers_of_variable_length() -> None:
    w = Writer()
    w.uint8(200)

    assert w.getvalue() == b"\xc8"
    with pytest.raises(UsageError, match="256"):
        w.uint8(256)


def test_what_is_left_over_is_refused() -> None:
    r = Reader(b"\x01\x02")
    r.vi64()

    assert r.remaining == 1
    with pytest.raises(ProtocolError, match="1 octets after"):
        r.expect_end()


def test_a_declared_length_is_not_believed_before_the_octets_are_there() -> None:
    with pytest.raises(ProtocolError, match="left in the body"):
        Reader(bytes.fromhex("ffffffffffffffffff00")).prefixed()


def test_a_reason_phrase_has_1024_octets_at_most() -> None:
    w = Writer()
    w.reason_phrase("x" * 1024)

    assert Reader(w.getvalue()).reason_phrase() == "x" * 1024
    with pytest.raises(UsageError, match="1025 octets, limit 1024"):
        w.reason_phrase("é" * 512 + "x")
    w = Writer()
    w.prefixed(b"x" * 1025)
    with pytest.raises(ProtocolError, match="1025 octets, limit 1024"):
        Reader(w.getvalue()).reason_phrase()


def test_text_that_is_no_utf8_is_read_and_marked() -> None:
    assert Reader(b"\x02a\xff").reason_phrase() == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x21" + b"\x01a" * 33, "33 fields"),
        (b"\x01\x00", "empty field"),
        (b"\x01" + bytes.fromhex("9001") + b"n" * 4097, "4097 octets"),
        (bytes.fromhex("ffffffffffffffffff"), "fields, limit 32"),
    ],
)
def test_a_namespace_beyond_the_limits_is_the_peers_mistake(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Reader(data).track_namespace()


def test_a_full_name_beyond_the_limit_is_the_peers_mistake() -> None:
    w = Writer()
    w.track_namespace(TrackNamespace((b"n" * 4096,)))
    w.prefixed(b"x")

    with pytest.raises(ProtocolError, match="4097 octets"):
        Reader(w.getvalue()).full_track_name()


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=32), st.binary(max_size=300))
def test_names_of_any_octets_round_trip(fields: list[bytes], name: bytes) -> None:
    track = FullTrackName(TrackNamespace(tuple(fields)), name)
    w = Writer()
    w.full_track_name(track)

    assert Reader(w.getvalue()).full_track_name() == track
