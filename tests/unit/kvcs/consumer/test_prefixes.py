from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.prefixes import QUESTIONS, Questions, Replica, prefix_lengths, spaced, unusable
from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.naming import PublicationName

COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=2,
    block_tokens=4,
    dtype="int8",
    k_shape=(1, 2),
    v_shape=(1, 2),
)
SCOPE = ScopeKey(bytes(range(32)))
EXPECTED = Expectations.of_tokens(SCOPE, COMPAT, list(range(40 * 4)))


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [
        ("longest", [4]),
        ("any", [4, 3, 2, 1]),
        ("auto", [4, 3, 2, 1]),
        ((1, 3, 3), [3, 1]),
    ],
)
def test_prefixes_are_looked_for_from_the_longest_on(prefixes: Any, lengths: list[int]) -> None:
    assert list(prefix_lengths(prefixes, 4)) == lengths


@pytest.mark.parametrize("prefixes", ["shortest", (), (0,), (5,), (True,), ("4",)])
def test_prefixes_that_do_not_exist_are_refused(prefixes: Any) -> None:
    with pytest.raises(ConfigError):
        list(prefix_lengths(prefixes, 4))


@given(st.integers(1, 100_000), st.integers(1, 12))
def test_a_few_lengths_begin_with_the_whole_and_go_down_by_ever_more(
    blocks: int, count: int
) -> None:
    lengths = spaced(blocks, count)

    assert lengths[0] == blocks
    assert len(lengths) == min(count, blocks)
    assert all(1 <= shorter < longer for longer, shorter in pairwise(lengths))
    if count > 1 and blocks > 1:
        assert lengths[1] == blocks - 1


def test_of_forty_blocks_seven_lengths_reach_far_down() -> None:
    assert spaced(40, 7) == [40, 39, 38, 37, 34, 28, 18]


class Peer:
    """Tells which lengths are published, as far as it answers at all, and counts questions."""

    def __init__(self, published: set[int], *, tells_all: bool, overlaps: bool = False) -> None:
        self.published = published
        self.tells_all = tells_all
        self.overlaps = overlaps
        self.questions = 0

    def all(self) -> set[int] | None:
        self.questions += 1
        return self.published if self.tells_all else None

    def has(self, length: int) -> bool:
        self.questions += 2 if self.overlaps else 1
        return length in self.published


def longest(peer: Peer, blocks: int, each: int) -> int | None:
    """Look for the longest prefix as a retrieval does."""
    questions = Questions(blocks)
    questions.for_all()
    if (told := peer.all()) is not None:
        return max(told, default=None)
    return max((n for n in questions.for_lengths(each=each) if peer.has(n)), default=None)


@given(st.sets(st.integers(1, 40), max_size=40))
def test_of_forty_boundaries_the_longest_is_found_with_one_question_where_all_are_told(
    published: set[int],
) -> None:
    peer = Peer(published, tells_all=True)

    assert longest(peer, 40, 1) == max(published, default=None)
    assert peer.questions == 1


@given(st.sets(st.integers(1, 40), max_size=40), st.sampled_from([1, 2]))
def test_where_they_are_not_it_is_the_longest_of_those_that_eight_questions_reach(
    published: set[int], each: int
) -> None:
    peer = Peer(published, tells_all=False, overlaps=each == 2)

    found = longest(peer, 40, each)

    asked = spaced(40, (QUESTIONS - 1) // each)
    assert found == max(published & set(asked), default=None)
    assert peer.questions <= QUESTIONS
    if 40 in published:
        assert found == 40


def test_a_question_is_counted_before_it_is_asked() -> None:
    questions = Questions(40)
    questions.for_all()
    lengths = questions.for_lengths(each=2)

    assert questions.asked == 1 + 2 * len(lengths) == 7


def replica(blocks: int = 3, scope: ScopeKey = SCOPE, **others: Any) -> Replica:
    compat = others.pop("compat", COMPAT)
    name = PublicationName(
        scope.scope_id, scope.compatibility_id(compat), bytes(32), bytes(range(16))
    )
    return Replica(publication=name, blocks=blocks, **others)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replica(), None),
        (replica(40, following=(bytes(32), bytes(32))), None),
        (replica(scope=ScopeKey(bytes(32))), "another scope"),
        (replica(compat=Descriptor.from_json({**COMPAT.members(), "revision": "x"})), "descriptor"),
        (replica(0), "0 blocks, the prompt has 40"),
        (replica(41), "41 blocks, the prompt has 40"),
        (replica(following=(bytes(31),)), "not 32 octets"),
        (replica(40, following=(bytes(32),) * (1 << 24)), "more Block Keys than 16777216"),
    ],
    ids=["good", "goes on", "scope", "descriptor", "none", "too many", "key", "limit"],
)
def test_what_an_index_tells_is_looked_at_before_it_is_tried(
    found: Replica, reason: str | None
) -> None:
    said = unusable(found, EXPECTED)

    if reason is None:
        assert said is None
    else:
        assert said is not None
        assert reason in said
