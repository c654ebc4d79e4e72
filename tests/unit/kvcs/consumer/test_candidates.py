from collections.abc import Sequence
from typing import Any

import pytest

from kvcs.consumer.candidates import Candidates, prefix_lengths, rank
from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
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


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [("longest", [4]), ("any", [4, 3, 2, 1]), ((1, 3, 3), [3, 1])],
)
def test_prefixes_are_looked_for_from_the_longest_on(prefixes: Any, lengths: list[int]) -> None:
    assert list(prefix_lengths(prefixes, 4)) == lengths


@pytest.mark.parametrize("prefixes", ["shortest", (), (0,), (5,), (True,), ("4",)])
def test_prefixes_that_do_not_exist_are_refused(prefixes: Any) -> None:
    with pytest.raises(ConfigError):
        list(prefix_lengths(prefixes, 4))


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
def test_the_publication_that_promises_most_ranks_highest(
    better: Sequence[Any], worse: Sequence[Any]
) -> None:
    assert rank(*better) > rank(*worse)
