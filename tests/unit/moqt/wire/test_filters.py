from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64
from moqt.codepoints import LocationFilterType as L
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.wire.filters import (
    RANGE_FILTERS,
    FillParameters,
    LocationFilter,
    LocationRange,
    RangeFilter,
    filter_defect,
    passes,
    range_filters,
    track_passes,
)
from moqt.wire.pairs import encode_pairs
from moqt.wire.parameters import Parameters
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

NUMBERS = st.integers(0, 20) | st.integers(MAX_VI64 - 5, MAX_VI64)


@st.composite
def location_filters(draw: st.DrawFn) -> LocationFilter:
    kind = draw(st.sampled_from(L))
    count = [0, 1, 2, 3, 4, 0][kind]
    fields = [draw(NUMBERS) for _ in range(count)]
    if count > 2:
        fields[2] = min(fields[2], MAX_VI64 - fields[0])
    return LocationFilter(kind, *fields)


def put(f: LocationFilter | RangeFilter) -> bytes:
    w = Writer()
    f.encode(w)
    return w.getvalue()


@given(location_filters())
def test_a_location_filter_round_trips_and_is_refused_at_every_cut(f: LocationFilter) -> None:
    data = put(f)
    r = Reader(data)

    assert LocationFilter.decode(r) == f
    r.expect_end()
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            LocationFilter.decode(Reader(data[:cut]))


@pytest.mark.parametrize(
    ("f", "wire"),
    [
        (LocationFilter.none(), "00"),
        (LocationFilter.relative(1), "0101"),
        (LocationFilter.absolute_start(12, 5), "020c05"),
        (LocationFilter.group_end(12, 5, 15), "030c0503"),
        (LocationFilter.range(12, 5, 15, 7), "040c050307"),
        (LocationFilter.NEXT_OBJECT, "05"),
    ],
)
def test_each_constructor_makes_the_form_of_its_name(f: LocationFilter, wire: str) -> None:
    assert put(f).hex() == wire


@pytest.mark.parametrize(
    "fields",
    [(L.NONE, 1), (L.NEXT_OBJECT, 0, 1), (L.RELATIVE_START, 1, 1), (L.ABSOLUTE_START, -1, 0),
     (L.ABSOLUTE_START_GROUP_END, MAX_VI64, 0, 1), (L.ABSOLUTE_RANGE, 0, 0, 0, MAX_VI64 + 1)],
)  # fmt: skip
def test_a_location_filter_that_has_no_form_is_the_callers_mistake(fields: Any) -> None:
    with pytest.raises(UsageError):
        LocationFilter(*fields)


def test_an_end_group_before_the_start_has_no_form() -> None:
    with pytest.raises(UsageError, match="no vi64"):
        LocationFilter.group_end(5, 0, 4)


@pytest.mark.parametrize("wire", ["06", "803f", "03ffffffffffffffffff0001"])
def test_a_location_filter_that_makes_no_sense_closes(wire: str) -> None:
    with pytest.raises(ProtocolError):
        LocationFilter.decode(Reader(bytes.fromhex(wire)))


LAST = Location(MAX_VI64, MAX_VI64)


@pytest.mark.parametrize(
    ("f", "largest", "start"),
    [
        (LocationFilter.relative(0), Location(MAX_VI64, 3), Location(MAX_VI64, 0)),
        (LocationFilter.relative(0), None, Location(0, 0)),
        (LocationFilter.relative(1), None, Location(0, 0)),
        (LocationFilter.relative(4), Location(3, 7), Location(0, 0)),
        (LocationFilter.relative(MAX_VI64), Location(3, 7), Location(0, 0)),
        (LocationFilter.NEXT_OBJECT, Location(3, MAX_VI64), Location(4, 0)),
    ],
)
def test_a_start_is_clamped_at_both_ends(
    f: LocationFilter, largest: Location | None, start: Location
) -> None:
    assert f.resolve(largest) == LocationRange(start)


def test_nothing_follows_the_last_location_there_can_be() -> None:
    assert LAST not in LocationFilter.NEXT_OBJECT.resolve(LAST)


def test_a_subscription_may_ask_for_nothing_and_a_fetch_may_not() -> None:
    nothing = LocationFilter.range(3, 5, 3, 4)

    assert nothing.resolve(Location(9, 9)) == LocationRange(Location(3, 5), Location(3, 4))
    assert nothing.resolve_fetch(Location(9, 9)) is None


@pytest.mark.parametrize(
    ("f", "largest"),
    [
        (LocationFilter.none(), None),
        (LocationFilter.NEXT_OBJECT, Location(3, 7)),
        (LocationFilter.relative(0), Location(3, 7)),
        (LocationFilter.absolute_start(3, 8), Location(3, 7)),
    ],
)
def test_a_fetch_of_what_is_not_there_yet_is_no_range(
    f: LocationFilter, largest: Location | None
) -> None:
    assert f.resolve_fetch(largest) is None


@given(location_filters(), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_fetch_gets_what_the_subscription_would_up_to_the_largest(
    f: LocationFilter, g: int, o: int, lg: int, lo: int
) -> None:
    location, largest = Location(g, o), Location(lg, lo)
    fetched = f.resolve_fetch(largest)

    wanted = location in f.resolve(largest) and location <= largest
    assert wanted == (fetched is not None and location in fetched)
    if fetched is not None:
        assert fetched.end is not None
        assert fetched.start <= fetched.end <= largest


# --- Range Filters ------------------------------------------------------------------------------


@st.composite
def range_filter_values(draw: st.DrawFn) -> RangeFilter:
    type_ = draw(st.sampled_from(sorted(RANGE_FILTERS)))
    top = 255 if type_ is P.PRIORITY_FILTER else MAX_VI64
    bounds = sorted(draw(st.lists(st.integers(0, top), min_size=1, max_size=8)))
    ranges: list[tuple[int, int | None]] = list(zip(bounds[::2], bounds[1::2], strict=False))
    if len(bounds) % 2:
        ranges.append((bounds[-1], None))
    kept = type_ in (P.OBJECT_PROPERTY_FILTER, P.TRACK_PROPERTY_FILTER)
    property_type = draw(st.integers(0, 1 << 20)) * 2 if kept else None
    return RangeFilter(type_, draw(st.integers(0, 255)), property_type, tuple(ranges))


@given(range_filter_values())
def test_a_range_filter_round_trips_and_has_no_defect(f: RangeFilter) -> None:
    r = Reader(put(f))

    assert RangeFilter.decode(f.type, r) == f
    r.expect_end()
    assert f.defect() is None


@given(range_filter_values(), NUMBERS)
def test_a_value_matches_if_it_lies_in_a_range(f: RangeFilter, value: int) -> None:
    inside = [e for e in f.ranges if e[0] <= value <= (MAX_VI64 if e[1] is None else e[1])]

    assert f.matches([value]) == bool(inside)
    assert not f.matches([])


def test_a_removal_is_a_length_of_0() -> None:
    gone = RangeFilter.removal(P.OBJECTID_FILTER)

    assert put(gone) == b"\x00"
    assert RangeFilter.decode(P.OBJECTID_FILTER, Reader(b"\x00")) == gone
    assert gone.is_removal
    assert range_filters(Parameters({P.OBJECTID_FILTER: gone})) == ()


@pytest.mark.parametrize(
    ("type_", "wire", "why"),
    [
        (P.OBJECTID_FILTER, "0100", "without a range"),
        (P.OBJECT_PROPERTY_FILTER, "020002", "without a range"),
        (P.OBJECTID_FILTER, "0b00ffffffffffffffffff01", "past 2**64"),
        (P.OBJECTID_FILTER, "0c0000ffffffffffffffffff01", "past 2**64"),
        (P.PRIORITY_FILTER, "04008100" + "00", "above 255"),
        (P.PRIORITY_FILTER, "03008100", "above 255"),
        (P.OBJECT_PROPERTY_FILTER, "0400030101", "odd"),
        (P.TRACK_PROPERTY_FILTER, "0400030101", "odd"),
    ],
)
def test_a_filter_that_makes_no_sense_fails_its_request_only(type_: P, wire: str, why: str) -> None:
    r = Reader(bytes.fromhex(wire))
    f = RangeFilter.decode(type_, r)
    r.expect_end()

    defect = filter_defect(Parameters({type_: f}), max_ranges=16)
    assert defect is not None
    assert why in defect
    with pytest.raises(UsageError):
        f.encode(Writer())


@pytest.mark.parametrize(
    ("type_", "wire"),
    [
        (P.OBJECTID_FILTER, "020080"),
        (P.OBJECTID_FILTER, "0300"),
        (P.OBJECT_PROPERTY_FILTER, "0100"),
    ],
)
def test_a_filter_whose_fields_are_cut_closes(type_: P, wire: str) -> None:
    with pytest.raises(ProtocolError):
        RangeFilter.decode(type_, Reader(bytes.fromhex(wire)))


@pytest.mark.parametrize(
    "f",
    [
        RangeFilter(P.OBJECTID_FILTER, 256, None, ((0, 1),)),
        RangeFilter(P.OBJECTID_FILTER, 0, None, ((5, 4),)),
        RangeFilter(P.OBJECTID_FILTER, 0, None, ((5, None), (9, 10))),
        RangeFilter(P.OBJECTID_FILTER, 0, None, ((5, 9), (4, 10))),
        RangeFilter(P.OBJECTID_FILTER, 0, None, ((0, MAX_VI64 + 1),)),
        RangeFilter(P.OBJECTID_FILTER, 0, 2, ((0, 1),)),
        RangeFilter(P.OBJECT_PROPERTY_FILTER, 0, None, ((0, 1),)),
        RangeFilter(P.OBJECT_PROPERTY_FILTER, 0, 3, ((0, 1),)),
        RangeFilter(P.PRIORITY_FILTER, 0, None, ((0, 256),)),
    ],
)
def test_a_range_filter_that_has_no_form_is_the_callers_mistake(f: RangeFilter) -> None:
    with pytest.raises(UsageError):
        put(f)


def objects(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(P.OBJECTID_FILTER, set_id, None, ranges)


def subgroups(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(P.SUBGROUP_FILTER, set_id, None, ranges)


def test_the_limit_counts_the_ranges_of_all_filters_together() -> None:
    asked = Parameters(
        {P.OBJECTID_FILTER: objects((0, 1), (3, 4)), P.SUBGROUP_FILTER: subgroups((0, 0))}
    )

    assert filter_defect(asked, max_ranges=3) is None
    assert filter_defect(asked, max_ranges=2) == "3 filter ranges, limit 2"
    assert filter_defect(Parameters(), max_ranges=0) is None


def test_a_filter_of_one_set_may_not_come_twice_but_of_another_may() -> None:
    twice = Parameters({P.OBJECTID_FILTER: (objects((0, 1)), objects((3, 4)))})
    apart = Parameters({P.OBJECTID_FILTER: (objects((0, 1)), objects((3, 4), set_id=1))})

    assert filter_defect(twice, max_ranges=9) == "OBJECTID_FILTER with SetID 0 twice"
    assert filter_defect(apart, max_ranges=9) is None


def test_a_fill_is_judged_with_what_it_inherits() -> None:
    inner = FillParameters(Parameters({P.SUBGROUP_FILTER: subgroups((0, 1), (3, 4))}))
    asked = Parameters({P.OBJECTID_FILTER: objects((0, 1)), P.FILL_PARAMETERS: inner})

    assert filter_defect(asked, max_ranges=3) is None
    assert filter_defect(asked, max_ranges=2) == "3 filter ranges, limit 2"


def check(*filters: RangeFilter, **object_: Any) -> bool:
    given: dict[str, Any] = {"subgroup_id": 0, "object_id": 0, "priority": 128}
    return passes(filters, **(given | object_))


def test_no_filter_passes_all() -> None:
    assert check()


def test_ranges_are_alternatives() -> None:
    assert [i for i in range(12) if check(objects((0, 3), (8, None)), object_id=i)] == [
        0, 1, 2, 3, 8, 9, 10, 11,
    ]  # fmt: skip


def test_filters_of_one_set_must_all_pass_and_of_sets_one() -> None:
    both = (objects((0, 3)), subgroups((1, 1)))
    either = (objects((0, 3)), subgroups((1, 1), set_id=7))

    assert check(*both, object_id=2, subgroup_id=1)
    assert not check(*both, object_id=2, subgroup_id=0)
    assert not check(*both, object_id=5, subgroup_id=1)
    assert check(*either, object_id=2, subgroup_id=0)
    assert check(*either, object_id=5, subgroup_id=1)
    assert not check(*either, object_id=5, subgroup_id=0)


def test_a_datagram_fails_a_subgroup_filter() -> None:
    assert not check(subgroups((0, None)), subgroup_id=None)


def test_a_priority_is_judged_by_its_number() -> None:
    urgent = RangeFilter(P.PRIORITY_FILTER, 0, None, ((0, 127),))

    assert check(urgent, priority=127)
    assert not check(urgent, priority=128)


def test_a_property_counts_wherever_it_stands_and_its_absence_fails() -> None:
    f = RangeFilter(P.OBJECT_PROPERTY_FILTER, 0, 0x3800, ((5, 9),))

    assert check(f, properties=((0x3800, 5),))
    assert check(f, properties=((0x0B, encode_pairs(((0x3800, 9),))),))
    assert not check(f, properties=((0x3800, 10),))
    assert not check(f, properties=((0x3802, 5),))
    assert not check(f)


def test_a_track_property_selects_tracks_and_their_objects() -> None:
    f = RangeFilter(P.TRACK_PROPERTY_FILTER, 0, 0x10, ((1, 1),))

    assert track_passes([f], ((0x10, 1),))
    assert not track_passes([f], ((0x10, 2),))
    assert not track_passes([f, objects((0, 1))], ())
    assert track_passes([f, objects((0, 1), set_id=1)], ())
    assert track_passes([], ())
    assert check(f, track_properties=((0x10, 1),))
    assert not check(f, track_properties=())
