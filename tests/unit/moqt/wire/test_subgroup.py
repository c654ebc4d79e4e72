from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, ObjectStatus
from moqt.errors import ObjectTooLarge, ProtocolError, UsageError
from moqt.wire.pairs import Properties
from moqt.wire.subgroup import (
    SubgroupHeader,
    SubgroupObject,
    SubgroupReader,
    encode_subgroup_object,
    is_subgroup_type,
)

LIMIT = 1 << 20
NUMBERS = st.integers(0, 200) | st.integers(0, MAX_VI64)
HEADERS = st.builds(
    SubgroupHeader,
    NUMBERS,
    NUMBERS,
    st.none() | NUMBERS,
    st.none() | st.integers(0, 255),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
PROPERTIES: st.SearchStrategy[Properties] = st.lists(
    st.tuples(st.sampled_from([0x3800, 0x3802]), NUMBERS)
    | st.tuples(st.sampled_from([0x3801, 0x3803]), st.binary(max_size=200)),
    max_size=3,
).map(lambda pairs: tuple(sorted(pairs, key=lambda pair: pair[0])))


@st.composite
def streams(draw: st.DrawFn) -> tuple[SubgroupHeader, list[SubgroupObject]]:
    header = draw(HEADERS)
    objects = []
    for object_id in sorted(draw(st.sets(NUMBERS, max_size=5))):
        status = draw(st.sampled_from(ObjectStatus))
        normal = status is ObjectStatus.NORMAL
        properties = draw(PROPERTIES) if header.has_properties and normal else ()
        size = draw(st.sampled_from([0, 1, 5, 255, 256, 257, 700])) if normal else 0
        objects.append(SubgroupObject(object_id, status, properties, bytes(range(256)) * 3))
        objects[-1] = SubgroupObject(object_id, status, properties, objects[-1].payload[:size])
    return header, objects


def encode(header: SubgroupHeader, objects: list[SubgroupObject]) -> bytes:
    data, previous = header.encode(), None
    for obj in objects:
        data += encode_subgroup_object(
            previous,
            obj.object_id,
            properties=obj.properties if header.has_properties else None,
            payload_length=len(obj.payload),
            status=obj.status,
        )
        data += obj.payload
        previous = obj.object_id
    return data


def cut(data: bytes, steps: list[int]) -> Iterator[bytes]:
    at = turn = 0
    while at < len(data):
        step = steps[turn % len(steps)]
        yield data[at : at + step]
        at, turn = at + step, turn + 1


@given(HEADERS)
def test_a_header_round_trips_and_is_waited_for_at_every_cut(header: SubgroupHeader) -> None:
    data = header.encode()

    assert SubgroupHeader.decode(data) == (header, len(data))
    assert SubgroupHeader.decode(b"\x00" + data + b"\x07", 1) == (header, len(data) + 1)
    for end in range(len(data)):
        assert SubgroupHeader.decode(data[:end]) is None


def test_the_forms_of_a_subgroup_type_are_those_of_the_draft() -> None:
    # {1, 3, 5, 7} in the high digit, and all low digits whose two mode bits are not both set.
    forms = {high * 16 + low for high in (1, 3, 5, 7) for low in range(16) if low & 6 != 6}

    assert {number for number in range(0x3000) if is_subgroup_type(number)} == forms
    assert len(forms) == 48


@pytest.mark.parametrize("text", ["16", "20", "00", "8090", "05", "af00", "ff8000000000000010"])
def test_any_other_type_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="no subgroup"):
        SubgroupReader(LIMIT).feed(bytes.fromhex(text))


def test_a_type_in_a_longer_form_is_judged_by_its_value() -> None:
    assert SubgroupHeader.decode(bytes.fromhex("8010010280")) == (
        SubgroupHeader(1, 2, 0, 128),
        5,
    )


@given(streams(), st.lists(st.sampled_from([1, 2, 3, 63, 64, 65, 255, 256, 700]), min_size=1))
def test_objects_come_out_however_the_stream_was_chunked(
    case: tuple[SubgroupHeader, list[SubgroupObject]], steps: list[int]
) -> None:
    header, objects = case
    reader = SubgroupReader(LIMIT)
    found = [o for piece in cut(encode(header, objects), steps) for o in reader.feed(piece)]

    assert found == objects
    assert all(type(obj.payload) is bytes for obj in found)
    assert reader.header == header
    assert reader.buffered == 0
    assert reader.started is None
    reader.finish()


@given(streams())
def test_a_reader_that_is_told_the_header_reads_what_follows(
    case: tuple[SubgroupHeader, list[SubgroupObject]],
) -> None:
    header, objects = case
    reader = SubgroupReader(LIMIT, header)

    assert reader.feed(encode(header, objects)[len(header.encode()) :]) == objects


@given(streams(), st.data())
def test_an_end_inside_an_object_is_refused_and_between_objects_is_not(
    case: tuple[SubgroupHeader, list[SubgroupObject]], data: st.DataObject
) -> None:
    header, objects = case
    encoded = encode(header, objects)
    end = data.draw(st.integers(0, len(encoded)))
    reader = SubgroupReader(LIMIT)
    found = reader.feed(encoded[:end])

    assert found == objects[: len(found)]
    if encode(header, found) == encoded[:end]:
        reader.finish()
    else:
        with pytest.raises(ProtocolError, match="ended"):
            reader.finish()


def test_an_object_is_started_from_its_header_to_its_last_octet() -> None:
    header = SubgroupHeader(1, 0, 0, 128)
    data = encode(header, [SubgroupObject(7, ObjectStatus.NORMAL, (), b"abc")])
    reader = SubgroupReader(LIMIT)
    seen = []
    for at in range(len(data)):
        reader.feed(data[at : at + 1])
        seen.append((reader.started, reader.buffered))

    assert seen[len(header.encode()) - 1 :] == [
        (None, 0),
        (None, 1),
        (7, 0),
        (7, 1),
        (7, 2),
        (None, 0),
    ]


def test_what_is_buffered_is_what_was_fed_and_not_returned() -> None:
    reader = SubgroupReader(LIMIT)
    reader.feed(bytes.fromhex("1001008000") + bytes.fromhex("87d0") + bytes(300))
    assert reader.buffered == 300
    reader.feed(bytes(1000))
    assert reader.buffered == 1300
    reader.feed(bytes(10))
    assert reader.buffered == 1310

    [obj] = reader.feed(bytes(690) + b"\x00")
    assert len(obj.payload) == 2000
    assert reader.buffered == 1


def test_a_payload_of_many_tiny_pieces_is_not_held_as_many_objects() -> None:
    reader = SubgroupReader(LIMIT)
    reader.feed(bytes.fromhex("1001008000c10000"))
    for _ in range(30_000):
        reader.feed(b"ab")

    assert reader.buffered == 60_000
    assert len(reader._pieces) == 1


def test_a_payload_that_arrives_alone_is_not_copied() -> None:
    reader = SubgroupReader(LIMIT)
    payload = bytes(2000)
    reader.feed(bytes.fromhex("100100800087d0"))

    [obj] = reader.feed(payload)
    assert obj.payload is payload


def test_a_last_piece_as_long_as_the_object_does_not_stand_for_it() -> None:
    # Four octets are wanted, two are here, and four more come: two of them are the next Object.
    reader = SubgroupReader(LIMIT)
    reader.feed(bytes.fromhex("10010080") + b"\x00\x04ab")

    [obj] = reader.feed(b"cd\x00\x01")
    assert obj.payload == b"abcd"
    assert reader.started == 1


@pytest.mark.parametrize(
    ("properties", "length"), [("", "65"), ("65", ""), ("0a" + "b80107" + "00" * 7, "5c")]
)
def test_an_object_beyond_the_limit_is_refused_by_its_announcement(
    properties: str, length: str
) -> None:
    flags = "11" if properties else "10"
    reader = SubgroupReader(100)

    with pytest.raises(ObjectTooLarge, match="limit 100"):
        reader.feed(bytes.fromhex(f"{flags}01008000{properties}{length}"))


def test_objects_whole_before_one_that_is_too_large_are_not_lost() -> None:
    reader = SubgroupReader(100)
    reader.feed(bytes.fromhex("10010080" + "0002aa"))

    with pytest.raises(ObjectTooLarge) as caught:
        reader.feed(bytes.fromhex("bb" + "0001cc" + "0065"))
    assert [obj.payload.hex() for obj in caught.value.completed] == ["aabb", "cc"]


def test_an_object_at_the_limit_is_taken() -> None:
    [obj] = SubgroupReader(100).feed(bytes.fromhex("100100800064") + bytes(100))

    assert len(obj.payload) == 100


def test_a_declared_length_of_any_size_allocates_nothing() -> None:
    with pytest.raises(ObjectTooLarge):
        SubgroupReader(LIMIT).feed(bytes.fromhex("1001008000ffffffffffffffffff"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10010080000001", "unknown Object Status 0x1"),
        ("100100800000" + "8081", "unknown Object Status 0x81"),
        ("110100800003b800070003", "END_OF_GROUP with Object Properties"),
        ("110100800003b800070004", "END_OF_TRACK with Object Properties"),
        ("10010080ffffffffffffffffff01610001", "exceeds"),
        ("110100800002b80001", "cut short"),
    ],
)
def test_what_the_draft_forbids_is_refused(text: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        SubgroupReader(LIMIT).feed(bytes.fromhex(text))


def test_a_status_with_an_empty_properties_block_is_legal() -> None:
    [obj] = SubgroupReader(LIMIT).feed(bytes.fromhex("1101008000000003"))

    assert obj == SubgroupObject(0, ObjectStatus.END_OF_GROUP, (), b"")


def test_the_subgroup_id_is_known_with_the_header_or_with_the_first_object() -> None:
    stated, first = SubgroupReader(LIMIT), SubgroupReader(LIMIT)
    stated.feed(bytes.fromhex("1401000980"))
    first.feed(bytes.fromhex("12010080"))

    assert (stated.subgroup_id, first.subgroup_id) == (9, None)
    first.feed(bytes.fromhex("05016102"))
    assert first.subgroup_id == 5


@pytest.mark.parametrize(
    ("previous", "object_id", "length", "status", "properties"),
    [
        (5, 5, 1, ObjectStatus.NORMAL, None),
        (5, 4, 1, ObjectStatus.NORMAL, None),
        (None, MAX_VI64 + 1, 1, ObjectStatus.NORMAL, None),
        (0, MAX_VI64 + 1, 1, ObjectStatus.NORMAL, None),
        (None, -1, 1, ObjectStatus.NORMAL, None),
        (None, 0, 1, ObjectStatus.END_OF_GROUP, None),
        (None, 0, 0, ObjectStatus.END_OF_TRACK, ((0x3800, 1),)),
    ],
)
def test_an_object_that_has_no_form_is_the_callers_mistake(
    previous: int | None,
    object_id: int,
    length: int,
    status: ObjectStatus,
    properties: Properties | None,
) -> None:
    with pytest.raises(UsageError):
        encode_subgroup_object(
            previous, object_id, properties=properties, payload_length=length, status=status
        )


@pytest.mark.parametrize("priority", [-1, 256])
def test_a_priority_is_one_octet(priority: int) -> None:
    with pytest.raises(UsageError, match="not 0 to 255"):
        SubgroupHeader(1, 0, 0, priority).encode()
