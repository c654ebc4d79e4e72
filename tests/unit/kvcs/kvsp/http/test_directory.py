"""The directory: leases, look-ups, bounds, and a model that it must agree with."""

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcs.kvsp.http.directory import LISTED_AT_ONCE, Directory, DirectoryLimits, Full
from kvcs.kvsp.http.questions import Chain
from kvcs.kvsp.http.records import Holding, Runs
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.profile.naming import PublicationName

SHELF, OTHER_SHELF = (b"s" * 32, b"c" * 32), (b"s" * 32, b"d" * 32)
LAYERS = Runs(((0, 3),))
PUBLICATIONS = (b"p" * 16, b"q" * 16)


def key(n: int, chain: int = 0) -> bytes:
    return bytes([chain, n]) * 16


def chain(blocks: int, number: int = 0) -> list[bytes]:
    return [key(n, number) for n in range(blocks)]


def holding(keys: Sequence[bytes], name: str = "host", **others: object) -> Holding:
    made = Holding(ServiceUri(f"https://{name}"), tuple(keys), LAYERS)
    return replace(made, **others)  # type: ignore[arg-type]


def made(**limits: float) -> Directory:
    return Directory(DirectoryLimits(**limits))  # type: ignore[arg-type]


def listed(
    directory: Directory, holder: Holding, n: int = 0, *, subject: str = "a", lease_s: float = 10.0,
    now: float = 0.0, shelf: tuple[bytes, bytes] = SHELF,
) -> tuple[bool, float]:  # fmt: skip
    return directory.register(subject, bytes([n]) * 16, shelf, holder, lease_s=lease_s, now=now)


def names(directory: Directory, keys: Sequence[bytes], now: float = 1.0, limit: int = 8) -> list[
    list[str]
]:  # fmt: skip
    found = directory.look_up(SHELF, keys, limit=limit, now=now)
    return [[str(one.uri)[8:] for one in found.of(n)] for n in range(len(keys))]


# -- looking up ----------------------------------------------------------------------------------


def test_each_block_is_told_with_those_who_hold_it() -> None:
    directory = made()
    listed(directory, holding(chain(3), "long"), 0)
    listed(directory, holding(chain(1), "short"), 1)

    assert names(directory, [key(0), key(2), key(9), key(0)]) == [
        ["short", "long"], ["long"], [], ["short", "long"],
    ]  # fmt: skip
    found = directory.look_up(SHELF, [key(0)], limit=8, now=4.0)
    assert [one.blocks for one in found.holders] == [1, 3]
    assert [one.expires_s for one in found.holders] == [6.0, 6.0]


def test_complete_holders_come_first_then_the_newest() -> None:
    directory = made()
    for n, (name, complete) in enumerate([("a", True), ("b", False), ("c", True), ("d", False)]):
        listed(directory, holding(chain(1), name, complete=complete), n)

    assert names(directory, [key(0)]) == [["c", "a", "d", "b"]]
    assert names(directory, [key(0)], limit=2) == [["c", "a"]]


def test_nothing_of_another_scope_or_model_is_told() -> None:
    directory = made()
    listed(directory, holding(chain(2)))

    assert directory.look_up(OTHER_SHELF, chain(2), limit=8, now=1.0).holders == ()
    assert directory.longest(OTHER_SHELF, chain(2), limit=8, now=1.0).candidates == ()


# -- the longest prefix --------------------------------------------------------------------------


def covered(directory: Directory, keys: Sequence[bytes], limit: int = 8) -> list[tuple[str, int]]:
    answer = directory.longest(SHELF, keys, limit=limit, now=1.0)
    return [(str(one.uri)[8:], one.covers or 0) for one in answer.candidates]


def test_the_longest_prefix_is_found_and_those_that_are_longer_than_the_prompt() -> None:
    directory = made()
    listed(directory, holding(chain(3), "3"), 0)
    listed(directory, holding(chain(40), "40"), 1)
    listed(directory, holding(chain(17), "17"), 2)
    listed(directory, holding(chain(40, 1), "another-prompt"), 3)

    assert covered(directory, chain(20)) == [("40", 20), ("17", 17), ("3", 3)]
    assert covered(directory, chain(60)) == [("40", 40), ("17", 17), ("3", 3)]
    assert covered(directory, chain(20), limit=1) == [("40", 20)]
    assert directory.longest(SHELF, chain(20), limit=1, now=1.0).blocks == 20


def test_a_prompt_that_diverges_is_covered_up_to_there() -> None:
    directory = made()
    listed(directory, holding(chain(10)))

    assert covered(directory, [*chain(4), *(key(n, 1) for n in range(4, 9))]) == [("host", 4)]
    assert covered(directory, chain(9, 1)) == []


def test_a_holder_of_the_last_blocks_alone_comes_behind_all_that_begin_at_the_first() -> None:
    directory = made()
    listed(directory, holding(chain(8)[5:], "window", first_block=5), 0)
    listed(directory, holding(chain(2), "beginning"), 1)

    assert covered(directory, chain(8)) == [("beginning", 2), ("window", 8)]
    assert directory.longest(SHELF, chain(8), limit=8, now=1.0).blocks == 2
    assert covered(directory, chain(8), limit=1) == [("beginning", 2)]


def test_the_keys_behind_the_chain_are_told_to_who_asks_all_or_none() -> None:
    directory = made(max_following_told=25)
    listed(directory, holding(chain(20), "a"), 0)
    listed(directory, holding(chain(40), "b"), 1)
    listed(directory, holding(chain(15), "c"), 2)
    listed(directory, holding(chain(20)[5:], "window", first_block=5), 3)

    answer = directory.longest(SHELF, chain(10), limit=8, now=1.0, following=True)
    assert (
        {str(one.uri)[8:]: one.following for one in answer.candidates}
        == {
            "a": tuple(chain(20)[10:]),
            "b": None,  # more than there is room for
            "c": tuple(chain(15)[10:]),
            "window": tuple(chain(20)[10:]),
        }
    )
    unasked = directory.longest(SHELF, chain(10), limit=8, now=1.0)
    assert [one.following for one in unasked.candidates] == [None] * 4
    whole = directory.longest(SHELF, chain(16), limit=1, now=1.0, following=True)
    assert [one.following for one in whole.candidates] == [tuple(chain(40)[16:])]


def test_a_record_that_puts_a_block_where_it_cannot_be_is_passed_over() -> None:
    directory = made()
    listed(directory, holding(chain(8), "wrong", first_block=1), 0)

    assert covered(directory, chain(8)) == []


# -- leases --------------------------------------------------------------------------------------


def test_a_lease_ends_unless_it_is_renewed() -> None:
    directory = made()
    assert listed(directory, holding(chain(2))) == (True, 10.0)
    assert directory.next_deadline() == 10.0

    assert directory.renew("a", bytes(16), SHELF, lease_s=10.0, now=9.0) == 10.0
    assert names(directory, [key(0)], now=18.9) == [["host"]]
    assert names(directory, [key(0)], now=19.0) == [[]]
    assert directory.expire(18.0) == 0
    assert directory.expire(19.0) == 1
    assert (directory.holders, directory.keys) == (0, 0)
    assert directory.renew("a", bytes(16), SHELF, lease_s=10.0, now=19.0) is None


def test_a_lease_is_no_longer_than_is_allowed() -> None:
    directory = made(max_lease_s=5.0)

    assert listed(directory, holding(chain(1)), lease_s=100.0) == (True, 5.0)
    assert directory.renew("a", bytes(16), SHELF, lease_s=100.0, now=1.0) == 5.0


def test_what_is_said_anew_takes_the_place_of_what_was_said() -> None:
    directory = made()
    assert listed(directory, holding(chain(2), "old"))[0] is True
    assert listed(directory, holding(chain(3)[1:], "new"))[0] is False

    assert names(directory, chain(3)) == [[], ["new"], ["new"]]
    assert (directory.holders, directory.keys) == (1, 2)


def test_nobody_touches_what_another_has_registered() -> None:
    directory = made()
    listed(directory, holding(chain(1), "of-a"), subject="a")
    listed(directory, holding(chain(1), "of-b"), subject="b")

    assert not directory.withdraw("c", bytes(16), SHELF)
    assert directory.renew("c", bytes(16), SHELF, lease_s=1.0, now=0.0) is None
    assert directory.withdraw("b", bytes(16), SHELF)
    assert names(directory, [key(0)]) == [["of-a"]]


def test_renewing_for_ever_takes_no_more_room() -> None:
    directory = made()
    listed(directory, holding(chain(1)))
    for n in range(5000):
        directory.renew("a", bytes(16), SHELF, lease_s=10.0, now=n / 1000)

    assert len(directory._expiries) < 100
    assert names(directory, [key(0)], now=14.9) == [["host"]]
    assert directory.expire(15.0) == 1


# -- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_holders": 2}, "limit of 2 holders"),
        ({"max_holders_of_subject": 2}, "limit of 2 holders of one token"),
        ({"max_keys": 7}, "limit of 7 keys"),
        ({"max_keys_of_subject": 7}, "limit of 7 keys of one token"),
        ({"max_keys_of_holder": 3}, "limit of 3 keys of one holder"),
    ],
)
def test_who_finds_no_room_is_refused_and_changes_nothing(
    limits: dict[str, float], says: str
) -> None:
    directory = made(**limits)
    listed(directory, holding(chain(3), "a"), 0)
    listed(directory, holding(chain(3), "b"), 1)
    before = names(directory, chain(4))

    with pytest.raises(Full, match=f"^{says}$"):
        listed(directory, holding(chain(4), "c"), 2)

    assert names(directory, chain(4)) == before
    # What takes the place of something smaller must find room, too; what is smaller does.
    with pytest.raises(Full) if "keys" in next(iter(limits)) else nullcontext():
        listed(directory, holding(chain(5), "b"), 1)
    listed(directory, holding(chain(2), "b"), 1)


def test_whose_lease_is_over_makes_room() -> None:
    directory = made(max_holders=1)
    listed(directory, holding(chain(1), "old"))

    assert listed(directory, holding(chain(1), "new"), 1, now=10.0)[0] is True


def test_of_very_many_holders_of_one_block_the_first_are_told_no_more() -> None:
    directory = made(max_holders_of_key=3)
    for n in range(5):
        listed(directory, holding(chain(2)[: 1 + n % 2], str(n)), n)

    assert names(directory, chain(2)) == [["4", "3", "2"], ["3", "1"]]
    for n in range(5):
        assert directory.withdraw("a", bytes([n]) * 16, SHELF)
    assert directory._by_key == {}


def test_an_answer_names_no_more_holders_than_it_may() -> None:
    directory = made(max_holders_told=2)
    for n in range(4):
        listed(directory, holding([key(n)], str(n)), n)

    assert names(directory, chain(4)) == [["0"], ["1"], [], []]


def test_what_a_publication_has_is_told_whoever_has_it() -> None:
    directory = made()
    session = PublicationUri("moqt://host/", PublicationName(*SHELF, key(2), PUBLICATIONS[0]))
    listed(directory, replace(holding(chain(3)), uri=session), 0)
    listed(directory, holding(chain(2), publication=PUBLICATIONS[1]), 1, lease_s=5)

    assert directory.chain(SHELF, PUBLICATIONS[0], now=1) == Chain(0, tuple(chain(3)))
    assert directory.chain(SHELF, PUBLICATIONS[1], now=1) == Chain(0, tuple(chain(2)))
    assert directory.chain(SHELF, PUBLICATIONS[1], now=6) is None
    assert directory.chain(OTHER_SHELF, PUBLICATIONS[0], now=1) is None
    directory.withdraw("a", bytes(16), SHELF)
    assert directory.chain(SHELF, PUBLICATIONS[0], now=1) is None


def test_of_very_many_holders_of_one_publication_the_first_are_told_no_more() -> None:
    directory = made(max_holders_of_key=3)
    for n in range(5):
        listed(directory, holding(chain(5 - n, n), publication=PUBLICATIONS[0]), n)

    assert directory.chain(SHELF, PUBLICATIONS[0], now=1) == Chain(0, tuple(chain(3, 2)))


# -- in turns ------------------------------------------------------------------------------------


def turns_of(steps: Generator[None, None, Any]) -> int:
    return sum(1 for _ in steps)


def test_nothing_that_is_large_is_done_in_one_turn() -> None:
    directory, many = made(), [n.to_bytes(32, "big") for n in range(65_536)]
    asked = many[:16_384]

    register = partial(directory.register_in_turns, "a", bytes(16), SHELF, lease_s=10, now=0)
    assert turns_of(register(holding(many))) >= len(many) / LISTED_AT_ONCE
    assert turns_of(directory.look_up_in_turns(SHELF, asked, limit=8, now=1)) == 63
    assert turns_of(directory.longest_in_turns(SHELF, [*asked, key(1)], limit=8, now=1)) == 64
    assert turns_of(directory.expire_in_turns(11)) >= len(many) / LISTED_AT_ONCE
    assert directory.look_up(SHELF, asked, limit=8, now=1).holders == ()


def test_of_very_many_that_begin_later_the_best_are_told_without_a_look_at_all_of_them() -> None:
    directory = made()
    for n in range(30):
        listed(directory, holding([key(n)], str(n), first_block=n), n)

    told = directory.longest(SHELF, chain(30), limit=4, now=1).candidates
    assert [one.covers for one in told] == [1, 30, 29, 28]


@given(st.lists(st.tuples(st.sampled_from("rwstx"), st.integers(0, 3), st.integers(0, 9))))
def test_however_turns_fall_what_is_listed_in_the_end_is_what_was_said_last(
    said: list[tuple[str, int, int]],
) -> None:
    """Registered, withdrawn and expired in turns of one key, begun in this order, mixed up."""
    mixed, whole = made(max_holders_of_key=100), made(max_holders_of_key=100)
    running: list[Generator[None, None, Any]] = []
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcs.kvsp.http.directory.LISTED_AT_ONCE", 1)
        for what, n, more in said:
            ref = "a", bytes([n]) * 16, SHELF
            one = holding(chain(1 + more % 5), str(n), first_block=more // 5)
            list(mixed._expire_in_turns(now))  # so that the first turn is the one that counts
            if what == "r":
                running.append(mixed.register_in_turns(*ref, one, lease_s=3, now=now))
                next(running[-1], None)
                whole.register(*ref, one, lease_s=3, now=now)
            elif what == "w":
                running.append(mixed.withdraw_in_turns(*ref))
                next(running[-1], None)
                whole.withdraw(*ref)
            elif what == "x":
                now += more / 2
                mixed.expire(now)
                whole.expire(now)
            elif running:
                next(running[(n + more) % len(running)], None)
        for steps in running:
            for _ in steps:
                pass

    assert names(mixed, chain(5), now) == names(whole, chain(5), now)
    assert (mixed.holders, mixed.keys) == (whole.holders, whole.keys)
    assert {k: len(v) for k, v in mixed._by_key.get(SHELF, {}).items()} == {
        k: len(v) for k, v in whole._by_key.get(SHELF, {}).items()
    }
    assert not mixed._leaving


# -- against a model -----------------------------------------------------------------------------


class AgainstAModel(RuleBasedStateMachine):
    """The same said to a directory and to a list that is searched from one end to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = made(max_holders_of_key=100, max_keys=30, max_holders=6)
        self.model: dict[tuple[str, int], tuple[Holding, float, int]] = {}
        self.now = 0.0
        self.serial = 0

    def _live(self) -> dict[tuple[str, int], tuple[Holding, float, int]]:
        return {ref: row for ref, row in self.model.items() if row[1] > self.now}

    @rule(
        subject=st.sampled_from("ab"), n=st.integers(0, 3), first=st.integers(0, 3),
        blocks=st.integers(1, 5), lease=st.integers(1, 5), complete=st.booleans(),
        fork=st.integers(0, 5), of=st.sampled_from([None, *PUBLICATIONS]),
    )  # fmt: skip
    def register(
        self, subject: str, n: int, first: int, blocks: int, lease: int, complete: bool, fork: int,
        of: bytes | None,
    ) -> None:  # fmt: skip
        keys = [key(b, int(b >= fork)) for b in range(first, first + blocks)]
        one = holding(
            keys, f"{subject}{n}", first_block=first, complete=complete, publication=of
        )  # fmt: skip
        others = {ref: row for ref, row in self._live().items() if ref != (subject, n)}
        fits = len(others) < 6 and sum(r[0].blocks for r in others.values()) + blocks <= 30
        self.serial += 1
        try:
            is_new, _ = listed(self.directory, one, n, subject=subject, lease_s=lease, now=self.now)
        except Full:
            assert not fits
            return
        assert fits
        assert is_new == ((subject, n) not in self._live())
        self.model = others | {(subject, n): (one, self.now + lease, self.serial)}

    @rule(subject=st.sampled_from("ab"), n=st.integers(0, 3), lease=st.integers(1, 5))
    def renew(self, subject: str, n: int, lease: int) -> None:
        got = self.directory.renew(subject, bytes([n]) * 16, SHELF, lease_s=lease, now=self.now)

        assert (got is not None) == ((subject, n) in self._live())
        if got is not None:
            one, _, serial = self.model[subject, n]
            self.model[subject, n] = one, self.now + lease, serial

    @rule(subject=st.sampled_from("ab"), n=st.integers(0, 3))
    def withdraw(self, subject: str, n: int) -> None:
        known = self.directory.withdraw(subject, bytes([n]) * 16, SHELF)

        assert known or (subject, n) not in self._live()
        self.model.pop((subject, n), None)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.directory.expire(self.now)

        assert self.directory.holders == len(self._live())
        assert self.directory.keys == sum(row[0].blocks for row in self._live().values())

    @invariant()
    def every_block_is_told_with_those_who_hold_it(self) -> None:
        asked = [key(b, c) for b in range(9) for c in range(2)]
        found = self.directory.look_up(SHELF, asked, limit=64, now=self.now)
        for n, wanted in enumerate(asked):
            rows = [row for row in self._live().values() if wanted in row[0].keys]
            rows.sort(key=lambda row: (not row[0].complete, -row[2]))
            assert [one.uri for one in found.of(n)] == [row[0].uri for row in rows]

    @invariant()
    def the_longest_prefix_is_the_longest(self) -> None:
        asked = chain(8)
        answer = self.directory.longest(SHELF, asked, limit=64, now=self.now)
        expected = {
            row[0].uri: max(
                row[0].first_block + at + 1 for at, k in enumerate(row[0].keys) if k in asked
            )
            for row in self._live().values()
            if set(row[0].keys) & set(asked)
        }
        assert {one.uri: one.covers for one in answer.candidates} == expected

    @invariant()
    def a_publication_has_the_blocks_that_a_holder_of_it_says(self) -> None:
        for publication in PUBLICATIONS:
            told = self.directory.chain(SHELF, publication, now=self.now)
            rows = [row[0] for row in self._live().values() if row[0].publication == publication]
            if not rows:
                assert told is None
                continue
            assert told is not None
            best = min((row.first_block, -row.blocks) for row in rows)
            assert (told.first_block, -len(told.keys)) == best
            assert (told.first_block, told.keys) in [(row.first_block, row.keys) for row in rows]


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30)
