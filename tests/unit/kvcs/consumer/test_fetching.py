from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.fetching import MAX_REQUESTS, Awaited, Band, cut
from kvcs.consumer.spreading import Rectangle
from moqt.codepoints import ParameterType
from moqt.location import Location
from moqt.wire.filters import LocationFilter, passes

BLOCKS = 24


def runs(limit: int) -> st.SearchStrategy[range]:
    bounds = st.tuples(st.integers(0, limit - 1), st.integers(1, limit))
    return bounds.map(lambda b: range(b[0], min(b[0] + b[1], limit)))


rectangles = st.lists(st.builds(Rectangle, runs(20), runs(BLOCKS)), max_size=12)
ranges = st.integers(0, 5)

Place = tuple[int, int]


def places(parts: list[Rectangle]) -> set[Place]:
    return {(layer, block) for part in parts for layer in part.layers for block in part.blocks}


def asked(band: Band) -> list[Place]:
    return [(layer, block) for layer in band.layers for run in band.blocks for block in run]


def sent(band: Band) -> set[Place]:
    """What a publisher sends that does what is asked of it."""
    span = band.location_filter.resolve_fetch(Location(99, 0))
    filters = band.range_filters(BLOCKS)
    assert span is not None
    assert span.end is not None
    return {
        (layer, block)
        for layer in range(99)
        for block in range(BLOCKS)
        if span.start <= Location(layer, block) <= span.end
        and passes(filters, subgroup_id=0, object_id=block, priority=0)
    }


@given(rectangles, ranges, st.integers(1, 6))
def test_all_that_is_missing_is_asked_for_once_in_few_requests(
    missing: list[Rectangle], max_ranges: int, max_requests: int
) -> None:
    bands = cut(missing, BLOCKS, max_ranges=max_ranges, max_requests=max_requests)

    found = Counter(place for band in bands for place in asked(band))
    assert places(missing) <= set(found)
    assert set(found.values()) <= {1}
    assert len(bands) <= max_requests
    assert [b.layers.start for b in bands] == sorted(b.layers.start for b in bands)
    for band in bands:
        assert band.objects == len(asked(band))
        assert set(asked(band)) == sent(band)
        assert sum(len(f.ranges) for f in band.range_filters(BLOCKS)) <= max_ranges


@given(rectangles, ranges, st.integers(1, 6))
def test_what_a_request_is_for_is_told_apart_from_what_comes_in_excess(
    missing: list[Rectangle], max_ranges: int, max_requests: int
) -> None:
    bands = cut(missing, BLOCKS, max_ranges=max_ranges, max_requests=max_requests)

    needed: Counter[Place] = Counter()
    for band in bands:
        awaited = Awaited(band.missing)
        needed.update(place for place in asked(band) if place in awaited)
        assert not any((layer, BLOCKS) in awaited for layer in band.layers)
    assert needed == Counter(places(missing))


@given(rectangles)
def test_nothing_else_is_asked_for_where_requests_and_filters_allow(
    missing: list[Rectangle],
) -> None:
    bands = cut(missing, BLOCKS, max_ranges=BLOCKS, max_requests=20)

    assert Counter(place for band in bands for place in asked(band)) == Counter(places(missing))


@given(rectangles, st.integers(1, 6))
def test_without_filters_whole_layers_are_asked_for_and_no_others_if_requests_allow(
    missing: list[Rectangle], max_requests: int
) -> None:
    bands = cut(missing, BLOCKS, max_ranges=0, max_requests=20)

    assert {layer for layer, _ in places(missing)} == {x for band in bands for x in band.layers}
    assert all(band.range_filters(BLOCKS) == () for band in bands)


@pytest.mark.parametrize(
    ("layers", "blocks", "location", "ranges"),
    [
        (range(8, 16), range(BLOCKS), LocationFilter.group_end(8, 0, 15), []),
        (range(8, 16), range(10), LocationFilter.group_end(8, 0, 15), [((0, 9),)]),
        (range(3, 4), range(5, 6), LocationFilter.group_end(3, 0, 3), [((5, 5),)]),
    ],
    ids=["whole layers", "first blocks", "one object"],
)
def test_a_rectangle_is_one_request_as_the_draft_says(
    layers: range, blocks: range, location: LocationFilter, ranges: list[object]
) -> None:
    missing = [Rectangle(layers, blocks)]

    [band] = cut(missing, BLOCKS, max_ranges=1)

    assert band.location_filter == location
    assert [(f.type, f.ranges) for f in band.range_filters(BLOCKS)] == [
        (ParameterType.OBJECTID_FILTER, found) for found in ranges
    ]


def test_neighbours_between_which_least_lies_share_a_request() -> None:
    missing = [
        Rectangle(range(0, 1), range(0, 4)),
        Rectangle(range(1, 2), range(0, 5)),
        Rectangle(range(9, 10), range(0, 4)),
    ]

    bands = cut(missing, BLOCKS, max_ranges=4, max_requests=2)

    assert [(band.layers, band.blocks) for band in bands] == [
        (range(0, 2), (range(0, 5),)),
        (range(9, 10), (range(0, 4),)),
    ]
    assert Counter(asked(bands[0])).total() == 10


def test_ranges_beyond_the_limit_are_joined_across_the_smallest_gaps() -> None:
    missing = [Rectangle(range(1), range(at, at + 1)) for at in (0, 2, 9, 11, 20)]

    [band] = cut(missing, BLOCKS, max_ranges=3)

    assert band.blocks == (range(0, 3), range(9, 12), range(20, 21))


def test_a_comb_of_many_layers_is_cut_into_as_few_requests_as_there_may_be() -> None:
    comb = [Rectangle(range(layer, layer + 1), range(layer % 3, 9)) for layer in range(128)]

    bands = cut(comb, BLOCKS, max_ranges=16)

    assert len(bands) == MAX_REQUESTS
    assert places(comb) <= {place for band in bands for place in asked(band)}
    assert sum(band.objects for band in bands) <= 128 * 9


def test_nothing_missing_is_no_request() -> None:
    assert cut([], BLOCKS, max_ranges=3) == []
    assert cut([Rectangle(range(3), range(0))], BLOCKS, max_ranges=3) == []
