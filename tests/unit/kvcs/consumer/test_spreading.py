from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.events import Gap
from kvcs.consumer.selection import SegmentPlan
from kvcs.consumer.spreading import (
    Dealer,
    Share,
    block_filters,
    fill_from,
    first_missing,
    missing_of,
    not_asked_for,
    worth_asking,
)
from kvcs.profile.naming import DataTrack
from moqt.location import Location
from moqt.wire.filters import LocationFilter, passes

K, V = DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")

runs = st.builds(
    lambda start, length: range(start, start + length), st.integers(0, 9), st.integers(1, 40)
)
ways = st.integers(1, 16)


def blocks_of(shares: list[tuple[int, Share]]) -> Counter[int]:
    return Counter(block for _, share in shares for block in share.blocks or ())


@given(runs, ways, st.booleans(), st.integers(0, 20))
def test_each_block_is_asked_for_on_exactly_one_connection(
    blocks: range, ways: int, may_cut: bool, before: int
) -> None:
    dealer = Dealer()
    for _ in range(before):
        dealer.deal(K, range(3), ways, may_cut=may_cut)

    dealt = dealer.deal(V, blocks, ways, may_cut=may_cut)

    assert blocks_of(dealt) == Counter(blocks)
    assert {share.track for _, share in dealt} == {V}
    numbers = [number for number, _ in dealt]
    assert len(set(numbers)) == len(numbers) <= ways
    assert set(numbers) <= set(range(ways))


@given(st.lists(runs, min_size=1, max_size=12), ways)
def test_no_connection_is_asked_for_more_than_one_block_more_than_another(
    tracks: list[range], ways: int
) -> None:
    dealer, loads = Dealer(), Counter(dict.fromkeys(range(ways), 0))
    for blocks in tracks:
        for number, share in dealer.deal(K, blocks, ways, may_cut=True):
            loads[number] += len(share.blocks or ())

    assert max(loads.values()) - min(loads.values()) <= 1


@given(st.integers(1, 40), ways)
def test_tracks_that_cannot_be_cut_are_dealt_out_in_turn(tracks: int, ways: int) -> None:
    dealer, loads = Dealer(), Counter(dict.fromkeys(range(ways), 0))
    for _ in range(tracks):
        [(number, share)] = dealer.deal(K, range(2, 7), ways, may_cut=False)
        loads[number] += 1
        assert share == Share(K, range(2, 7))

    assert max(loads.values()) - min(loads.values()) <= 1


@given(
    st.lists(runs, min_size=1, max_size=4),
    ways,
    st.booleans(),
    st.lists(st.integers(0, 15), max_size=20),
)
def test_whatever_is_lost_each_block_is_asked_for_on_exactly_one_connection_that_is_left(
    tracks: list[range], ways: int, may_cut: bool, losses: list[int]
) -> None:
    wanted = {DataTrack(K.component, "raw", number): run for number, run in enumerate(tracks)}
    dealer, left = Dealer(), list(range(ways))
    asked: dict[DataTrack, dict[Share, int]] = {track: {} for track in wanted}

    def ask() -> None:
        for track, blocks in wanted.items():
            for run in list(not_asked_for(blocks, asked[track])):
                for number, share in dealer.deal(track, run, len(left), may_cut=may_cut):
                    asked[track][share] = left[number]

    ask()
    for lost in losses:
        if lost in left and len(left) > 1:
            left.remove(lost)
            for shares in asked.values():
                for share in [share for share, on in shares.items() if on == lost]:
                    del shares[share]
            ask()
        for track, shares in asked.items():
            assert Counter(b for s in shares for b in s.blocks or ()) == Counter(wanted[track])
            assert set(shares.values()) <= set(left)


@given(runs, st.lists(runs, max_size=6))
def test_what_is_not_asked_for_and_what_is_are_together_what_is_wanted(
    blocks: range, asked: list[range]
) -> None:
    found = list(not_asked_for(blocks, [Share(K, run) for run in asked]))

    covered = {block for run in asked for block in run}
    assert [block for run in found for block in run] == [b for b in blocks if b not in covered]


def test_a_share_of_all_that_a_track_brings_leaves_nothing_to_ask_for() -> None:
    assert list(not_asked_for(range(5), [Share(K, None)])) == []


@given(runs, st.integers(0, 60))
def test_the_filter_lets_the_blocks_of_a_share_pass_and_nothing_else(
    blocks: range, block: int
) -> None:
    filters = block_filters(Share(K, blocks), 100, may_cut=True)

    assert passes(filters, subgroup_id=0, object_id=block, priority=0) == (block in blocks)


@pytest.mark.parametrize(
    ("share", "may_cut"),
    [(Share(K, None), True), (Share(K, range(8)), True), (Share(K, range(3)), False)],
    ids=["not known", "everything", "no filters"],
)
def test_where_there_is_nothing_to_filter_or_nobody_who_would_there_is_no_filter(
    share: Share, may_cut: bool
) -> None:
    assert block_filters(share, 8, may_cut=may_cut) == ()


def gaps_of(missing: set[tuple[int, int]]) -> list[Gap]:
    """What an assembler would say is missing, layer by layer and block by block."""
    return [
        Gap(segment=0, track=K, first_layer=x, last_layer=x, first_block=y, last_block=y)
        for x, y in sorted(missing)
    ]


places = st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)))
shares = st.one_of(st.just(Share(K, None)), runs.map(lambda run: Share(K, run)))


@given(places, places, shares)
def test_a_share_is_asked_for_from_the_first_object_that_is_missing_and_may_be_good(
    missing: set[tuple[int, int]], rejected: set[tuple[int, int]], share: Share
) -> None:
    found = first_missing(share, gaps_of(missing), [(K, *place) for place in rejected])

    mine = {place for place in missing if share.blocks is None or place[1] in share.blocks}
    hopeful = mine - rejected
    if not hopeful:
        assert found is None
    else:
        assert found in mine
        assert found <= min(hopeful)
        assert found.group == min(hopeful)[0]


@given(places, places, shares)
def test_what_is_worth_asking_for_is_all_that_is_missing_but_layers_that_came_bad(
    missing: set[tuple[int, int]], rejected: set[tuple[int, int]], share: Share
) -> None:
    parts = worth_asking(share, gaps_of(missing), [(K, *place) for place in rejected])

    found = [(x, y) for part in parts for x in part.layers for y in part.blocks]
    mine = {place for place in missing if share.blocks is None or place[1] in share.blocks}
    assert sorted(found) == sorted(mine - rejected)


def test_a_layer_of_which_not_all_came_bad_is_asked_for_whole() -> None:
    gap = Gap(segment=0, track=K, first_layer=1, last_layer=4, first_block=0, last_block=1)
    rejected = [(K, 2, 0), (K, 2, 1), (K, 3, 0), (V, 4, 0), (V, 4, 1)]

    parts = list(worth_asking(Share(K, None), [gap], rejected))

    assert [part.layers for part in parts] == [range(1, 2), range(3, 5)]
    assert {part.blocks for part in parts} == {range(2)}


def test_objects_of_another_track_that_were_rejected_do_not_count() -> None:
    assert first_missing(Share(K, None), gaps_of({(1, 2)}), [(V, 1, 2)]) == Location(1, 2)
    assert first_missing(Share(K, None), gaps_of({(1, 2)}), [(K, 1, 2)]) is None


@given(places, shares)
def test_what_is_missing_of_a_share_is_what_is_missing_and_in_it(
    missing: set[tuple[int, int]], share: Share
) -> None:
    parts = missing_of(share, gaps_of(missing))

    found = [(x, y) for part in parts for x in part.layers for y in part.blocks]
    assert found == sorted(p for p in missing if share.blocks is None or p[1] in share.blocks)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (range(6), LocationFilter.absolute_start(2, 1)),
        (range(1, 6), LocationFilter.absolute_start(2, 1)),
        (range(1, 4), LocationFilter.group_end(2, 1, 3)),
    ],
)
def test_the_fill_ends_with_the_last_wanted_layer(layers: range, expected: LocationFilter) -> None:
    plan = SegmentPlan(
        segment=0, tracks=(K, V), layers=layers, blocks=range(4), first_block=0, block_tokens=16
    )

    assert fill_from(Location(2, 1), plan, 6) == expected
    assert fill_from(Location(2, 1), None, 6) == LocationFilter.absolute_start(2, 1)


def test_a_share_says_for_people_what_it_is() -> None:
    assert [str(Share(K, None)), str(Share(V, range(2, 5)))] == ["k.raw.s0", "v.raw.s0 blocks 2-4"]
