"""The shelf: the budget holds, the least recently used go first, and none that is in use."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcs.depot.shelf import OBJECT_OCTETS, Holding, Shelf
from tests.unit.kvcs.depot.goods import name


def test_the_oldest_go_first_and_no_more_of_them_than_must() -> None:
    shelf = Shelf(1000 + 3 * OBJECT_OCTETS)
    for n in range(3):
        shelf.put(Holding(name(n), n, octets=300, objects=1))
    shelf.touch(next(iter(shelf)), now=9.0)

    assert shelf.room_for(100, 0) == []
    victims = shelf.room_for(101, 0)
    assert victims is not None
    assert [victim.name for victim in victims] == [name(1)]


def test_what_is_in_use_stays_even_if_there_is_no_room() -> None:
    shelf = Shelf(1000)
    shelf.put(Holding(name(0), 0, octets=600, readers=1))
    shelf.put(Holding(name(1), 1, octets=400, is_written=True))

    assert shelf.room_for(1, 0) is None
    assert shelf.could_hold(1000, 0)
    assert not shelf.could_hold(1000, 1)


def test_a_publication_is_held_once() -> None:
    shelf = Shelf(1000)
    shelf.put(Holding(name(0), 0))

    with pytest.raises(ValueError, match="held already"):
        shelf.put(Holding(name(0), 1))


def test_only_what_is_unfinished_and_unused_goes_stale() -> None:
    shelf = Shelf(1000)
    kinds: list[dict[str, Any]] = [
        {}, {"finished": True}, {"readers": 1}, {"is_written": True}, {"kept_at": 5.0},
    ]  # fmt: skip
    for n, others in enumerate(kinds):
        shelf.put(Holding(name(n), n, **others))

    assert [held.name for held in shelf.stale(now=10.0, partial_s=10.0)] == [name(0)]


class Keeping(RuleBasedStateMachine):
    """Drives a shelf as a depot does, against a list in order of use."""

    @initialize(limit=st.integers(OBJECT_OCTETS, 20 * OBJECT_OCTETS))
    def begin(self, limit: int) -> None:
        self.shelf = Shelf(limit)
        self.model: list[dict[str, Any]] = []
        self.now = 0.0

    def of(self, n: int) -> dict[str, Any] | None:
        return next((one for one in self.model if one["n"] == n), None)

    def holding(self, n: int) -> Holding:
        found = self.shelf.get(name(n))
        assert found is not None
        return found

    @rule(n=st.integers(0, 5))
    def opened(self, n: int) -> None:
        if self.of(n) is None:
            self.shelf.put(Holding(name(n), n, is_written=True))
            self.model.append({"n": n, "cost": 0, "readers": 0, "written": True})

    @rule(n=st.integers(0, 5), octets=st.integers(0, 500), objects=st.integers(0, 3))
    def kept(self, n: int, octets: int, objects: int) -> None:
        if (one := self.of(n)) is None:
            return
        one["written"] = self.holding(n).is_written = True
        cost = octets + OBJECT_OCTETS * objects
        free = self.shelf.limit - sum(other["cost"] for other in self.model)
        gone: list[int] = []
        for other in self.model:
            if free >= cost:
                break
            if not other["readers"] and not other["written"]:
                gone.append(other["n"])
                free += other["cost"]
        victims = self.shelf.room_for(octets, objects)

        if free < cost:
            assert victims is None
            return
        assert victims is not None
        assert [victim.number for victim in victims] == gone
        for victim in victims:
            assert self.shelf.remove(victim.name) is victim
        self.model = [other for other in self.model if other["n"] not in gone]
        self.shelf.grow(self.holding(n), octets, objects)
        one["cost"] += cost

    @rule(n=st.integers(0, 5))
    def closed(self, n: int) -> None:
        if (one := self.of(n)) is not None:
            one["written"] = self.holding(n).is_written = False

    @rule(n=st.integers(0, 5))
    def used(self, n: int) -> None:
        if (one := self.of(n)) is not None:
            self.now += 1
            self.shelf.touch(self.holding(n), self.now)
            self.model.remove(one)
            self.model.append(one)

    @rule(n=st.integers(0, 5), change=st.sampled_from([-1, 1]))
    def read(self, n: int, change: int) -> None:
        if (one := self.of(n)) is not None and one["readers"] + change >= 0:
            one["readers"] += change
            self.holding(n).readers += change

    @rule(n=st.integers(0, 5))
    def dropped(self, n: int) -> None:
        self.shelf.remove(name(n))
        self.model = [other for other in self.model if other["n"] != n]

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        if not hasattr(self, "shelf"):
            return
        assert [held.number for held in self.shelf] == [one["n"] for one in self.model]
        assert self.shelf.used == sum(one["cost"] for one in self.model)
        assert self.shelf.used <= self.shelf.limit


test_whatever_is_kept_used_and_dropped_the_budget_holds = Keeping.TestCase
