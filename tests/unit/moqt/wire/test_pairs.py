import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64
from moqt.codepoints import PropertyType as P
from moqt.errors import KeyValueFormattingError, ProtocolError, UsageError
from moqt.wire.pairs import (
    Pair,
    decode_object_properties,
    decode_pairs,
    decode_track_properties,
    encode_object_properties,
    encode_pairs,
    find_property,
    mandatory_property,
    property_values,
)
from moqt.wire.reader import Reader

NUMBERS = st.integers(0, MAX_VI64)
PAIRS = st.lists(
    st.one_of(
        st.tuples(NUMBERS.map(lambda n: n & ~1), NUMBERS),
        st.tuples(NUMBERS.map(lambda n: n | 1), st.binary(max_size=40)),
    ),
    max_size=8,
)


@given(PAIRS)
def test_pairs_round_trip_in_ascending_order_and_equal_types_keep_theirs(pairs: list[Pair]) -> None:
    expected = tuple(sorted(pairs, key=lambda pair: pair[0]))

    assert decode_pairs(Reader(encode_pairs(tuple(pairs)))) == expected


@given(PAIRS, st.data())
def test_a_cut_is_a_shorter_list_or_refused(pairs: list[Pair], data: st.DataObject) -> None:
    encoded = encode_pairs(tuple(pairs))
    cut = data.draw(st.integers(0, len(encoded)))
    try:
        found = decode_pairs(Reader(encoded[:cut]))
    except ProtocolError:
        return

    assert encode_pairs(found) == encoded[:cut]


@pytest.mark.parametrize("pair", [(2, b"x"), (3, 1), (-2, 0), (MAX_VI64 + 1, 0), (2, -1)])
def test_a_pair_that_has_no_form_is_the_callers_mistake(pair: Pair) -> None:
    with pytest.raises(UsageError):
        encode_pairs((pair,))


def test_a_value_has_65535_octets_at_most() -> None:
    most = ((3, b"x" * 65_535),)

    assert decode_pairs(Reader(encode_pairs(most))) == most
    with pytest.raises(UsageError, match="65536"):
        encode_pairs(((3, b"x" * 65_536),))
    with pytest.raises(ProtocolError, match="65536 octets, limit 65535"):
        decode_pairs(Reader(bytes.fromhex("03c10000") + b"x" * 65_536))


def test_a_type_beyond_64_bits_does_not_wrap_round() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        decode_pairs(Reader(bytes.fromhex("fffffffffffffffffe000400")))


def test_a_property_is_found_in_the_open_list_and_among_the_immutable() -> None:
    nested = encode_pairs(((0x3800, 7), (0x3C, 2)))
    properties = ((P.IMMUTABLE_PROPERTIES, nested), (P.PRIOR_GROUP_ID_GAP, 1))

    assert find_property(properties, 0x3800) == 7
    assert find_property(properties, P.PRIOR_GROUP_ID_GAP) == 1
    assert property_values(properties, P.PRIOR_GROUP_ID_GAP) == [1, 2]
    assert find_property(properties, 0x3802) is None


@pytest.mark.parametrize("place", ["open", "immutable"])
@pytest.mark.parametrize(
    ("number", "found"), [(0x3FFE, None), (0x4000, 0x4000), (0x7FFE, 0x7FFE), (0x8000, None)]
)
def test_a_mandatory_property_is_told_wherever_it_stands(
    place: str, number: int, found: int | None
) -> None:
    properties: tuple[Pair, ...] = ((number, 1),)
    if place == "immutable":
        properties = ((P.IMMUTABLE_PROPERTIES, encode_pairs(properties)),)

    assert mandatory_property(properties) == found


@pytest.mark.parametrize(
    ("pair", "refusal"),
    [
        ((P.DEFAULT_PUBLISHER_GROUP_ORDER, 0), ProtocolError),
        ((P.DEFAULT_PUBLISHER_GROUP_ORDER, 3), ProtocolError),
        ((P.DYNAMIC_GROUPS, 2), ProtocolError),
        ((P.DEFAULT_PUBLISHER_PRIORITY, 256), KeyValueFormattingError),
        ((P.IMMUTABLE_PROPERTIES, b"\x02"), KeyValueFormattingError),
        ((P.DEFAULT_PUBLISHER_GROUP_ORDER, 2), None),
        ((P.DYNAMIC_GROUPS, 1), None),
        ((P.DEFAULT_PUBLISHER_PRIORITY, 255), None),
        ((0x3801, b"anything"), None),
    ],
)
def test_known_track_properties_have_a_range(
    pair: Pair, refusal: type[ProtocolError] | None
) -> None:
    r = Reader(encode_pairs((pair,)))
    if refusal is None:
        assert decode_track_properties(r) == (pair,)
        return
    with pytest.raises(ProtocolError) as caught:
        decode_track_properties(r)

    assert type(caught.value) is refusal


def test_object_properties_stand_behind_their_length() -> None:
    assert encode_object_properties(()) == b"\x00"
    assert encode_object_properties(((0x3800, 7),)) == bytes.fromhex("03b80007")
    assert decode_object_properties(bytes.fromhex("b80007")) == ((0x3800, 7),)
    with pytest.raises(KeyValueFormattingError, match="immutable"):
        decode_object_properties(bytes.fromhex("0b0102"))
