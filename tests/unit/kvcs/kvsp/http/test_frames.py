"""Frames: written and read at every cut, and nothing taken that was not asked for."""

from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.kvsp.http.frames import (
    HEADER_OCTETS,
    BadFrame,
    Frame,
    FrameKind,
    FrameReader,
    absent,
    end,
    frame_header,
)
from kvcs.kvsp.http.sealed import longest

OCTETS = 12
#: Two layers of two blocks; the second block lacks the second layer.
PLACES = [(3, 0), (3, 1), (7, 0), (7, 1)]
DATA = {place: bytes([n]) * OCTETS for n, place in enumerate(PLACES[:3])}


def frame(layer: int, block: int, data: bytes) -> bytes:
    digest = sha256(data).digest()
    return frame_header(FrameKind.SECTIONS, block, layer, len(data), digest) + data


def answer() -> bytes:
    parts = [
        frame(layer, block, DATA[layer, block]) if (layer, block) in DATA else absent(block, layer)
        for layer, block in PLACES
    ]
    return b"".join(parts) + end(4)


def read(octets: bytes, cuts: Sequence[int] = ()) -> tuple[list[Frame], bool]:
    reader, at = FrameReader(iter(PLACES), OCTETS), 0
    found: list[Frame] = []
    for cut in (*cuts, len(octets)):
        found += reader.feed(octets[at:cut])
        at = cut
    return found, reader.ended


def test_a_header_is_what_the_papers_say() -> None:
    digest = bytes(range(32))

    header = frame_header(FrameKind.SECTIONS, 0x01020304, 0x0506, 0x0708090A, digest)
    assert header.hex() == "4b56463101000506010203040708090a" + digest.hex()
    assert len(header) == HEADER_OCTETS == 48


@given(st.sets(st.integers(0, len(answer()))))
def test_however_it_is_cut_the_same_is_read(cuts: set[int]) -> None:
    found, ended = read(answer(), sorted(cuts))

    assert ended
    assert [(one.layer, one.block) for one in found] == PLACES
    assert [bytes(one.data) for one in found[:3]] == list(DATA.values())
    assert [one.kind for one in found] == [FrameKind.SECTIONS] * 3 + [FrameKind.ABSENT]
    assert found[0].digest == sha256(DATA[3, 0]).digest()


@pytest.mark.parametrize("length", range(len(answer())))
def test_what_breaks_off_has_not_ended(length: int) -> None:
    found, ended = read(answer()[:length])

    assert not ended
    assert len(found) < 5


@pytest.mark.parametrize("octet", range(len(answer())))
def test_no_flipped_octet_goes_unnoticed(octet: int) -> None:
    changed = bytearray(answer())
    changed[octet] ^= 0xFF

    with pytest.raises(BadFrame):
        read(bytes(changed))


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (frame(3, 1, bytes(OCTETS)), r"\(3, 1\), expected \(3, 0\)"),
        (frame(3, 0, bytes(OCTETS - 1)), "11 octets, expected 12"),
        (frame(3, 0, bytes(OCTETS + 1)), "13 octets, expected 12"),
        (frame_header(FrameKind.SECTIONS, 0, 3, 0xFFFFFFFF, bytes(32)), "4294967295 octets"),
        (frame_header(FrameKind.ABSENT, 0, 3, 1, bytes(32)) + b"x", "1 octets, expected 0"),
        (end(0), "the end after 0 frames, before all were there"),
        (answer() + b"x", "behind the frame of the end"),
        (answer()[:-HEADER_OCTETS] + end(3), "the end after 4 frames"),
        (answer()[:-HEADER_OCTETS] + absent(0, 8), "expected None"),
        (b"HTTP/1.1 500 Internal Server Error" + bytes(20), "begins with 485454502f31"),
    ],
)
def test_what_was_not_asked_for_is_refused(octets: bytes, says: str) -> None:
    with pytest.raises(BadFrame, match=says):
        read(octets)


def test_a_sealed_layer_is_read_up_to_the_length_that_it_can_have() -> None:
    octets = bytes(range(200))
    header = frame_header(FrameKind.SEALED, 0, 3, len(octets), sha256(octets).digest())

    [found], ended = read(header + octets)
    assert (found.kind, found.layer, found.block, found.data) == (FrameKind.SEALED, 3, 0, octets)
    assert not ended
    with pytest.raises(BadFrame, match="does not have its digest"):
        read(header + octets[:-1] + b"x")
    longer = frame_header(FrameKind.SEALED, 0, 3, longest(OCTETS) + 1, bytes(32))
    with pytest.raises(BadFrame, match=f"SEALED frame with .* limit {longest(OCTETS)}"):
        read(longer)


def test_what_came_before_is_handed_out_before_it_is_refused() -> None:
    reader = FrameReader(iter(PLACES), OCTETS)
    frames = reader.feed(answer()[: 2 * (HEADER_OCTETS + OCTETS)] + bytes(HEADER_OCTETS))

    assert [next(frames).block, next(frames).block] == [0, 1]
    with pytest.raises(BadFrame):
        next(frames)


@given(st.binary())
def test_no_octets_raise_anything_else(octets: bytes) -> None:
    for given_ in (octets, answer()[:100] + octets):
        try:
            read(given_)
        except BadFrame:
            continue
