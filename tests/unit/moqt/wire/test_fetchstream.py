from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, GroupOrder, RangeMarkerKind
from moqt.errors import ObjectTooLarge, ProtocolError, UsageError
from moqt.location import Location
from moqt.wire.fetchstream import FetchHeader, FetchObject, FetchReader, FetchWriter, RangeMarker
from moqt.wire.pairs import Properties

LIMIT = 1 << 20
NUMBERS = st.integers(0, 6) | st.integers(0, MAX_VI64)
UP, DOWN = GroupOrder.ASCENDING, GroupOrder.DESCENDING
Entry = FetchObject | RangeMarker
PROPERTIES: st.SearchStrategy[Properties] = st.sampled_from(
    [(), ((0x3800, 7),), ((0x3800, 1), (0x3801, b"x" * 90))]
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[GroupOrder, list[Entry]]:
    order = draw(st.sampled_from(GroupOrder))
    sign = -1 if order is DOWN else 1
    places = draw(st.sets(st.builds(Location, NUMBERS, NUMBERS), max_size=7))
    entries: list[Entry] = []
    for location in sorted(places, key=lambda at: (sign * at.group, at.object)):
        if draw(st.integers(0, 3)) == 0:
            entries.append(RangeMarker(draw(st.sampled_from(RangeMarkerKind)), location))
            continue
        subgroup_id = draw(st.none() | NUMBERS)
        priority = draw(st.sampled_from([0, 128, 255]))
        payload = bytes(draw(st.sampled_from([0, 1, 300])))
        entries.append(FetchObject(location, subgroup_id, priority, draw(PROPERTIES), payload))
    return order, entries


def encode(order: GroupOrder, entries: list[Entry]) -> bytes:
    writer, data = FetchWriter(order), b""
    for entry in entries:
        if isinstance(entry, RangeMarker):
            data += writer.marker(entry.kind, entry.location)
            continue
        data += writer.object_header(
            entry.location,
            subgroup_id=entry.subgroup_id,
            publisher_priority=entry.publisher_priority,
            properties=entry.properties,
            payload_length=len(entry.payload),
        )
        data += entry.payload
    return data


def cut(data: bytes, step: int) -> Iterator[bytes]:
    return (data[at : at + step] for at in range(0, len(data), step))


def read(text: str, order: GroupOrder = UP) -> list[Entry]:
    reader = FetchReader(order, LIMIT)
    found = reader.feed(bytes.fromhex(text))
    reader.finish()
    return found


@given(streams(), st.sampled_from([1, 2, 7, 64, 65, 1 << 20]))
def test_a_stream_round_trips_however_it_was_chunked(
    case: tuple[GroupOrder, list[Entry]], step: int
) -> None:
    order, entries = case
    reader = FetchReader(order, LIMIT)

    assert [e for piece in cut(encode(order, entries), step) for e in reader.feed(piece)] == entries
    assert (reader.started, reader.buffered) == (None, 0)
    reader.finish()


@given(streams(), st.data())
def test_an_end_inside_an_entry_is_refused_and_between_entries_is_not(
    case: tuple[GroupOrder, list[Entry]], data: st.DataObject
) -> None:
    order, entries = case
    encoded = encode(order, entries)
    end = data.draw(st.integers(0, len(encoded)))
    reader = FetchReader(order, LIMIT)
    found = reader.feed(encoded[:end])

    assert found == entries[: len(found)]
    if encode(order, found) == encoded[:end]:
        reader.finish()
    else:
        with pytest.raises(ProtocolError, match="ended"):
            reader.finish()


@given(st.integers(0, MAX_VI64))
def test_the_header_round_trips_and_is_waited_for_at_every_cut(request_id: int) -> None:
    data = FetchHeader(request_id).encode()

    assert FetchHeader.decode(data + b"\x1c") == (FetchHeader(request_id), len(data))
    assert all(FetchHeader.decode(data[:end]) is None for end in range(len(data)))
    with pytest.raises(ProtocolError, match="no fetch"):
        FetchHeader.decode(b"\x10" + data)


def test_reads_the_worked_example_of_the_reference() -> None:
    found = read("1c00008002" + "6161" + "0002" + "6262" + "0c000002" + "6363")

    assert found == [
        FetchObject(Location(0, 0), 0, 128, (), b"aa"),
        FetchObject(Location(0, 1), 0, 128, (), b"bb"),
        FetchObject(Location(1, 0), 0, 128, (), b"cc"),
    ]
    assert encode(UP, found).hex() == "1c0000800261610002" + "62620c0000026363"


@pytest.mark.parametrize(
    ("second", "order", "location"),
    [
        ("0001", UP, (5, 8)),  # nothing stated: prior plus one
        ("040101", UP, (5, 8)),  # a delta of 1 is the next Object
        ("040501", UP, (5, 12)),
        ("080001", UP, (6, 8)),  # a new Group alone: the Object ID goes on
        ("0c000001", UP, (6, 0)),  # a new Group: the Object ID is absolute
        ("0c020901", UP, (8, 9)),
        ("0c000001", DOWN, (4, 0)),
        ("0c040001", DOWN, (0, 0)),
        ("080101", DOWN, (3, 8)),
    ],
)
def test_the_place_of_an_object_follows_from_the_one_before(
    second: str, order: GroupOrder, location: tuple[int, int]
) -> None:
    found = read("1c05078001aa" + second + "bb", order)

    assert found[1].location == location


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("080001aa", "does not say where"),
        ("14008001aa", "does not say where"),
        ("1800800100", "does not say where"),
        ("0001aa", "does not say where"),
        ("1d00008001aa", "Subgroup of one before"),
        ("1e00008001aa", "Subgroup of one before"),
        ("0c000001aa", "priority of one before"),
        ("8080", "no Object and no marker"),
        ("808d", "no Object and no marker"),
        ("ffffffffffffffffff", "no Object and no marker"),
        ("1cffffffffffffffffff008001aa" + "080001", "outside"),
        ("1c00ffffffffffffffffff8001aa" + "0001", "outside"),
        ("1c00018001aa" + "04ffffffffffffffffff01", "outside"),
        ("1f00ffffffffffffffffff008001aa" + "0201", "exceeds"),
        ("808c0304" + "0401" + "01aa", "priority of one before"),
        ("808c0304" + "0001aa", "priority of one before"),
        ("1c00ffffffffffffffffff8001aa" + "0000", "outside"),
        ("808c0304" + "110001aa", "Subgroup of one before"),
        ("5c00008001aa" + "0101", "Subgroup of one before"),
        ("3c00008002b80001", "cut short"),
    ],
)  # fmt: skip
def test_what_the_draft_forbids_is_refused(text: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        FetchReader(UP, LIMIT).feed(bytes.fromhex(text))


def test_a_group_below_0_is_refused() -> None:
    with pytest.raises(ProtocolError, match="outside"):
        read("1c05008001aa" + "0c050001bb", DOWN)


@pytest.mark.parametrize("kind", RangeMarkerKind)
def test_a_marker_states_its_place_and_nothing_else(kind: RangeMarkerKind) -> None:
    writer = FetchWriter()

    assert writer.marker(kind, Location(2, 4)).hex()[4:] == "0204"
    assert read(f"{0x8000 | kind:04x}0204") == [RangeMarker(kind, Location(2, 4))]


def test_after_a_marker_places_count_from_it_and_the_rest_from_the_last_object() -> None:
    first, marker, after = read("1f0109028040" + "" + "aa" * 64 + "820c0204" + "0101bb")

    assert isinstance(first, FetchObject)
    assert isinstance(marker, RangeMarker)
    assert after == FetchObject(Location(2, 5), 9, 128, (), b"\xbb")


def test_a_marker_first_gives_a_place_to_count_from() -> None:
    [_, obj] = read("808c0304" + "100001aa")

    assert obj == FetchObject(Location(3, 5), 0, 0, (), b"\xaa")


def test_a_datagram_object_has_no_subgroup_and_its_mode_bits_mean_nothing() -> None:
    for flags in ("5c", "5d", "5e", "5f"):
        assert read(f"{flags}03008001aa") == [FetchObject(Location(3, 0), None, 128, (), b"\xaa")]


def test_the_subgroup_before_a_datagram_object_stays_the_prior_one() -> None:
    found = read("1f0309008001aa" + "4001bb" + "0101cc")

    assert isinstance(found[2], FetchObject)
    assert found[2].subgroup_id == 9


def test_a_writer_refers_to_no_subgroup_across_a_datagram_or_a_marker() -> None:
    data = encode(
        UP,
        [
            FetchObject(Location(0, 0), 9, 1, (), b""),
            FetchObject(Location(0, 1), None, 1, (), b""),
            FetchObject(Location(0, 2), 9, 1, (), b""),
            RangeMarker(RangeMarkerKind.UNKNOWN, Location(0, 5)),
            FetchObject(Location(0, 6), 9, 1, (), b""),
        ],
    )

    assert data.hex() == "1f0009000100" + "4000" + "030900" + "810c0005" + "13090100"


@pytest.mark.parametrize(
    ("order", "second"),
    [
        (UP, Location(3, 5)),
        (UP, Location(3, 4)),
        (UP, Location(2, 9)),
        (DOWN, Location(4, 0)),
        (DOWN, Location(3, 4)),
        (UP, Location(MAX_VI64 + 1, 0)),
        (UP, Location(3, MAX_VI64 + 1)),
    ],
)
def test_entries_out_of_order_are_the_callers_mistake(order: GroupOrder, second: Location) -> None:
    writer = FetchWriter(order)
    writer.object_header(Location(3, 5), subgroup_id=0, publisher_priority=1, payload_length=1)

    with pytest.raises(UsageError):
        writer.object_header(second, subgroup_id=0, publisher_priority=1, payload_length=1)
    with pytest.raises(UsageError):
        writer.marker(RangeMarkerKind.UNKNOWN, second)
    # A refusal changes nothing: the next Object still follows the first.
    assert writer.object_header(
        Location(3, 6), subgroup_id=0, publisher_priority=1, payload_length=1
    ) == bytes.fromhex("0001")


def test_an_object_is_started_from_its_header_to_its_last_octet() -> None:
    reader = FetchReader(UP, LIMIT)
    reader.feed(bytes.fromhex("1c05078003aa"))

    assert (reader.started, reader.buffered) == (Location(5, 7), 1)
    assert len(reader.feed(b"bc")) == 1
    assert (reader.started, reader.buffered) == (None, 0)


@pytest.mark.parametrize("text", ["1c00008065", "3c0000800ab801070000000000000065", "3c00008065"])
def test_an_object_beyond_the_limit_is_refused_by_its_announcement(text: str) -> None:
    with pytest.raises(ObjectTooLarge, match="limit 100"):
        FetchReader(UP, 100).feed(bytes.fromhex(text))
