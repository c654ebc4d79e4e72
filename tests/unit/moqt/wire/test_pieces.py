"""Streams that are taken in pieces say the same as streams that are taken whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import GroupOrder, RangeMarkerKind
from moqt.errors import ObjectTooLarge, ProtocolError
from moqt.location import Location
from moqt.wire.fetchstream import FetchReader, FetchWriter, RangeMarker
from moqt.wire.objects import Begun, ObjectReader
from moqt.wire.subgroup import SubgroupHeader, SubgroupReader, encode_subgroup_object

SIZES = st.lists(st.sampled_from([0, 1, 5, 63, 255, 256, 300, 900]), max_size=6)
STEPS = st.lists(st.sampled_from([1, 2, 3, 63, 64, 65, 256, 700]), min_size=1)
HEADER = SubgroupHeader(1, 2, 0, 128, has_properties=True)
PROPERTIES = ((0x3801, b"p" * 70),)


def payload(number: int, size: int) -> bytes:
    return bytes((number + n) % 251 for n in range(size))


def subgroup(sizes: list[int]) -> bytes:
    data, previous = b"", None
    for number, size in enumerate(sizes):
        data += encode_subgroup_object(
            previous, number * 2, properties=PROPERTIES[: number % 2], payload_length=size
        )
        data += payload(number, size)
        previous = number * 2
    return data


def fetch(sizes: list[int]) -> bytes:
    writer, data = FetchWriter(), b""
    for number, size in enumerate(sizes):
        at = Location(number // 2, number * 2)
        data += writer.object_header(
            at, subgroup_id=number % 3, publisher_priority=number, payload_length=size
        )
        data += payload(number, size)
        if number % 2:
            data += writer.marker(RangeMarkerKind.UNKNOWN, at.next())
    return data


def readers(kind: str) -> tuple[ObjectReader[Any], ObjectReader[Any]]:
    if kind == "subgroup":
        return SubgroupReader(1000, HEADER), SubgroupReader(1000, HEADER)
    order = GroupOrder.ASCENDING
    return FetchReader(order, 1000), FetchReader(order, 1000)


def put_together(found: list[Begun[Any] | bytes | memoryview]) -> list[tuple[Any, bytes]]:
    """Return the items, each with its payload, and check the lengths that were told."""
    items: list[tuple[Any, bytearray, int]] = []
    for part in found:
        if isinstance(part, Begun):
            assert not items or len(items[-1][1]) == items[-1][2]
            items.append((part.item, bytearray(), part.length))
        else:
            assert part, "no piece is empty"
            items[-1][1].extend(part)
    return [(item, bytes(data)) for item, data, _ in items]


@pytest.mark.parametrize("kind", ["subgroup", "fetch"])
@given(sizes=SIZES, steps=STEPS, data=st.data())
def test_pieces_together_are_the_objects_at_every_cut(
    kind: str, sizes: list[int], steps: list[int], data: st.DataObject
) -> None:
    octets = (subgroup if kind == "subgroup" else fetch)(sizes)
    whole, pieces = readers(kind)
    objects, found = [], []
    at = turn = 0
    while at < len(octets):
        chunk = octets[at : at + steps[turn % len(steps)]]
        objects += whole.feed(chunk)
        found += pieces.feed_in_pieces(chunk)
        at, turn = at + len(chunk), turn + 1

    expected = [
        (item, b"") if isinstance(item, RangeMarker) else (item, item.payload) for item in objects
    ]
    assert [data for _, data in put_together(found)] == [data for _, data in expected]
    for (began, _), (item, _) in zip(put_together(found), expected, strict=True):
        if isinstance(item, RangeMarker):
            assert began == item
        else:
            assert all(
                getattr(began, name) == getattr(item, name)
                for name in type(item).__slots__
                if name != "payload"
            )
    pieces.finish()

    end = data.draw(st.integers(0, len(octets)))
    cut_whole, cut_pieces = readers(kind)
    cut_whole.feed(octets[:end])
    cut_pieces.feed_in_pieces(octets[:end])
    for reader in (cut_whole, cut_pieces):
        try:
            reader.finish()
            fine = True
        except ProtocolError:
            fine = False
        assert fine is (cut_whole._missing == 0 and not cut_whole._head)


def test_a_piece_is_a_view_of_what_came_and_is_not_copied() -> None:
    reader = SubgroupReader(1000, HEADER)
    reader.feed_in_pieces(subgroup([900])[:100])
    middle = bytes(300)
    [piece] = reader.feed_in_pieces(middle)

    assert piece is middle
    assert reader.header_held == 0


def test_what_went_before_an_object_that_is_too_large_is_handed_out() -> None:
    reader = SubgroupReader(1000, HEADER)
    with pytest.raises(ObjectTooLarge) as caught:
        reader.feed_in_pieces(subgroup([5]) + bytes([0, 0, 0x87, 0xD0]))

    assert [data for _, data in put_together(list(caught.value.completed))] == [payload(0, 5)]
