"""What is left to be computed, in tokens and layers."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import ReadyLayers, TokenRange
from kvcs.consumer.recomputing import Lack, _lowest, everything, lacks, ranges, ready_layers
from kvcs.consumer.selection import Wish
from tests.unit.kvcs.consumer.recovering import BLOCKS, LAYERS, SEGMENT_BLOCKS
from tests.unit.kvcs.consumer.test_joining import ONE, OTHER, assembler, begun

ALL = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]


def left(subject: Assembler | None, wish: Wish | None = None, known: int | None = BLOCKS) -> object:
    return [tuple(lack) for lack in lacks(subject, wish or Wish(), known)]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 5)), max_size=12))
def test_each_block_is_said_once_with_the_lowest_of_its_layers(
    found: list[tuple[int, int, int]],
) -> None:
    lowest: dict[int, int] = {}
    for start, stop, layer in found:
        for block in range(start, stop):
            lowest[block] = min(layer, lowest.get(block, layer))

    said = list(_lowest(Lack(*one) for one in found))

    assert {b: lack.first_layer for lack in said for b in range(lack.start, lack.stop)} == lowest
    assert sum(lack.stop - lack.start for lack in said) == len(lowest)
    assert said == sorted(said)
    # As few as there can be.
    for one, other in pairwise(said):
        assert one.stop < other.start or one.first_layer != other.first_layer


def test_a_gap_in_a_layer_is_its_blocks_from_that_layer_on() -> None:
    subject = begun(ONE, [place for place in ALL if place not in ((1, 1), (0, 3), (1, 3))])

    assert left(subject) == [(1, 2, 1), (3, 4, 0)]


def test_one_half_of_a_block_is_no_block() -> None:
    subject = begun(ONE, [place for place in ALL if place != (1, 2)])
    [gap] = [gap for gap in subject.gaps() if str(gap.track) == "k.raw.s1"]
    track = gap.track
    digest = ONE.manifest(0).segments[1].digest(track, 1, 0)
    assert digest is not None
    assert subject.admit(track, 1, 0, digest, 32)

    assert left(subject) == [(2, 3, 1)]


def test_everything_there_is_nothing_to_compute() -> None:
    assert left(begun(ONE, ALL)) == []


def test_blocks_beyond_a_shorter_prefix_are_left_too() -> None:
    subject = begun(ONE, ALL[:2], blocks=SEGMENT_BLOCKS)

    assert left(subject) == [(0, 2, 1), (2, 4, 0)]


@pytest.mark.parametrize("subject", [None, assembler(OTHER)], ids=["no publication", "no manifest"])
def test_without_a_manifest_everything_that_is_wanted_of_the_prompt_is_left(
    subject: Assembler | None,
) -> None:
    assert left(subject) == [(0, 4, 0)]
    assert left(subject, Wish(layers=range(1, 2), blocks=range(1, 3))) == [(1, 3, 1)]
    assert left(subject, known=None) == []


def test_what_waits_to_be_attested_cannot_be_used_yet() -> None:
    live = replace(ONE, listed=1)
    subject = begun(live, ALL, signed=True)

    assert ready_layers(subject) == (
        ReadyLayers(segment=0, first_layer=0, last_layer=0),
        ReadyLayers(segment=1, first_layer=0, last_layer=0),
    )
    assert left(subject) == [(0, 4, 1)]


def test_after_a_contradiction_all_that_is_wanted_is_left() -> None:
    subject = begun(ONE, ALL)

    assert everything(subject, Wish(), BLOCKS) == [Lack(0, 4, 0)]


def test_ranges_are_tokens_and_read_as_people_count() -> None:
    [one] = ranges([Lack(1, 3, 2)], 16)

    assert one == TokenRange(token_start=16, token_end=48, first_layer=2)
    assert one.tokens == 32
    assert str(one) == "tokens 16-47 from layer 2"
    assert one.to_json() == {"token_start": 16, "token_end": 48, "first_layer": 2}
