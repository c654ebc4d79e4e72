from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.candidates import Candidates, Offer, Pace, rank
from kvcs.consumer.selection import Wish
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName

COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=2,
    block_tokens=4,
    dtype="int8",
    k_shape=(1, 2),
    v_shape=(1, 2),
)


def name(number: int) -> PublicationName:
    return PublicationName(bytes(32), bytes(32), bytes(32), number.to_bytes(16, "big"))


def candidates(*announced: tuple[int, int]) -> Candidates:
    found = Candidates()
    for number, blocks in announced:
        found.appeared(name(number), blocks)
    return found


def test_the_longest_prefix_is_best_and_of_it_the_newest() -> None:
    found = candidates((1, 4), (2, 3), (3, 4), (4, 2))

    assert found.best(9) == [name(3), name(1)]
    assert found.best(1) == [name(3)]


def test_what_was_tried_is_not_offered_again_even_if_it_is_announced_again() -> None:
    found = candidates((1, 4), (2, 4))
    found.tried(name(2))

    assert not found.appeared(name(2), 4)
    assert found.best(9) == [name(1)]


def test_what_was_withdrawn_is_not_offered_and_the_others_remain() -> None:
    found = candidates((1, 4), (2, 4))
    found.gone(name(2))
    found.gone(name(7))

    assert found.best(9) == [name(1)]
    assert found.appeared(name(2), 4)
    assert found.best(9) == [name(2), name(1)]


def test_a_shorter_prefix_is_offered_when_the_longer_ones_were_tried() -> None:
    found = candidates((1, 4), (2, 3))
    found.tried(name(1))

    assert found.best(9) == [name(2)]
    found.tried(name(2))
    assert found.best(9) == []


def test_shorter_prefixes_follow_the_longest_where_they_may_be_better() -> None:
    found = candidates((1, 4), (2, 3), (3, 4), (4, 2))

    assert found.best(9, shorter=True) == [name(3), name(1), name(2), name(4)]
    assert found.best(3, shorter=True) == [name(3), name(1), name(2)]


def manifest(*blocks: int, layers: int = 0, complete: bool = False) -> Manifest:
    entries, first = [], 0
    for segment, count in enumerate(blocks):
        track = DataTrack.parse(f"kv.raw.s{segment}")
        entries.append(
            SegmentEntry(
                segment=segment,
                first_block=first,
                blocks=count,
                block_keys_sha256=bytes(32),
                tracks=(track,),
                complete=complete,
                object_digests={track: (bytes(32 * count),) * layers},
            )
        )
        first += count
    return Manifest(compat=COMPAT, segments=tuple(entries))


def offer(found: Manifest, version: Any = 0, **others: Any) -> Offer:
    known: dict[str, Any] = {"blocks": None, "wish": Wish(), "codecs": standard_codecs()}
    return Offer(manifest=found, version=version, **(known | others))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((manifest(2, layers=2, complete=True), 0), (manifest(2, 9, layers=2), 9)),
        ((manifest(2, 1), 0), (manifest(2, layers=2), 9)),
        ((manifest(2, layers=1), 0), (manifest(2), 9)),
        ((manifest(2), 3), (manifest(2), 2)),
        ((manifest(2), 0), (manifest(), 9)),
    ],
    ids=["complete", "reach", "groups", "version", "anything"],
)
def test_of_one_prefix_the_publication_that_promises_most_ranks_highest(
    better: Sequence[Any], worse: Sequence[Any]
) -> None:
    assert rank(offer(*better, blocks=11)) > rank(offer(*worse, blocks=11))


def test_a_longer_prefix_is_worth_more_than_a_finished_shorter_one() -> None:
    longer = offer(manifest(2, 9), blocks=11)
    shorter = offer(manifest(2, 8, layers=2, complete=True), blocks=10)

    assert rank(longer) > rank(shorter)


def test_what_is_offered_in_no_codec_that_is_wanted_comes_last() -> None:
    wanted = Wish(codecs=("int8",))

    assert rank(offer(manifest(2), wish=wanted)) < rank(offer(manifest(1)))


def test_only_wanted_layers_count_as_held() -> None:
    all_of_it = offer(manifest(2, 3, layers=2))
    part = offer(manifest(2, 3, layers=2), wish=Wish(layers=range(1, 2)))
    one = offer(manifest(2, 3, layers=1), wish=Wish(layers=range(1, 2)))
    first = offer(manifest(2, 3, layers=2), wish=Wish(blocks=range(2)))

    assert [rank(o).held for o in (all_of_it, part, one, first)] == [4, 2, 0, 2]


#: Octets of a block in one layer: 4 tokens of 1 x 2 of K and of V, an octet each.
BLOCK_OCTETS = 16


def test_a_longer_prefix_that_cannot_come_in_time_is_worth_less_than_one_that_can() -> None:
    speed = {"octets_per_s": 2.0 * 10 * BLOCK_OCTETS, "left_s": 1.0}  # ten blocks of both layers
    longer = offer(manifest(11, layers=2, complete=True), blocks=11, **speed)
    shorter = offer(manifest(10, layers=2, complete=True), blocks=10, **speed)

    assert rank(longer).is_in_time is False
    assert rank(shorter).is_in_time is True
    assert rank(shorter) > rank(longer)


def test_of_those_that_cannot_come_in_time_the_least_late_ranks_highest() -> None:
    speed = {"octets_per_s": 1.0, "left_s": 1.0}

    assert rank(offer(manifest(5), blocks=5, **speed)) > rank(offer(manifest(6), blocks=6, **speed))


@pytest.mark.parametrize("wish", [Wish(layers=range(1)), Wish(blocks=range(3, 8))])
def test_what_is_not_wanted_takes_no_time(wish: Wish) -> None:
    speed = {"octets_per_s": 10.0 * BLOCK_OCTETS, "left_s": 1.0}

    assert rank(offer(manifest(10), blocks=10, wish=wish, **speed)).is_in_time


@pytest.mark.parametrize("known", [{"octets_per_s": 1.0}, {"left_s": 0.0}, {}])
def test_without_a_speed_or_a_deadline_nothing_is_late(known: dict[str, Any]) -> None:
    assert rank(offer(manifest(9), blocks=9, **known)).is_in_time


offers = st.builds(
    offer,
    st.sampled_from([manifest(), manifest(1), manifest(3, 3, layers=2, complete=True)]),
    st.integers(0, 3),
    blocks=st.sampled_from([None, 1, 6]),
    octets_per_s=st.sampled_from([None, 1.0, 100.0]),
    left_s=st.sampled_from([None, -1.0, 5.0]),
    wish=st.sampled_from([Wish(), Wish(codecs=("int8",)), Wish(blocks=range(4, 5))]),
)


@given(st.lists(offers, max_size=6))
def test_what_is_offered_and_comes_in_time_is_ahead_of_all_that_does_not(
    found: list[Offer],
) -> None:
    ranks = [rank(one) for one in sorted(found, key=rank, reverse=True)]

    assert [(r.is_offered, r.is_in_time) for r in ranks] == sorted(
        ((r.is_offered, r.is_in_time) for r in ranks), reverse=True
    )


def test_the_pace_is_that_of_what_came_while_anything_was_asked_for() -> None:
    pace, mib = Pace(), 1 << 20
    pace.begin(10.0, 0)
    pace.begin(10.5, mib)
    pace.end(11.0, 3 * mib)
    assert pace.octets_per_s is None  # the other one is not through
    pace.end(12.0, 4 * mib)
    assert pace.octets_per_s == 2 * mib
    pace.begin(100.0, 4 * mib)
    pace.end(101.0, 9 * mib)

    assert pace.octets_per_s == 3 * mib


def test_a_few_octets_are_no_measure_of_a_pace() -> None:
    pace = Pace()
    pace.begin(0.0, 0)
    pace.end(1.0, 1000)

    assert pace.octets_per_s is None
