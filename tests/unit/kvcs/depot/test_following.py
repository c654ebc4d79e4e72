"""What is done with what each upstream brings of a publication."""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import pytest

from kvcs.depot import following
from kvcs.depot.following import Following
from kvcs.depot.keeping import Outcome
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter, Counters
from tests.unit.kvcs.depot.goods import name

PATIENCE_S = 10.0
ONE = name(1)


class Shop:
    """Stands in for a depot that holds nothing."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.dropped: list[PublicationName] = []

    def holding(self, name: PublicationName) -> None:
        return None

    def was_evicted(self, name: PublicationName) -> bool:
        return False

    def drop(self, name: PublicationName, reason: str) -> None:
        self.dropped.append(name)


@dataclass(frozen=True)
class Connection:
    """Stands in for one that is open."""

    name: str
    closed: None = None


class Upstreams:
    """Connections by name, and what each brings of a publication, one time after the other.

    Who has nothing more to bring after a part announces it no more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outcomes: list[Outcome]) -> None:
        self.follower: Following | None = None
        self.asked: list[str] = []
        self.connections: dict[str, Any] = {name: Connection(name) for name in outcomes}
        upstreams = self

        class Keeper:
            def __init__(
                self, conn: Any, name: PublicationName, depot: Any, terms: Any, pool: Executor
            ) -> None:
                self._name = conn.name

            async def run(self) -> Outcome:
                upstreams.asked.append(self._name)
                outcome = outcomes[self._name].pop(0)
                if not outcomes[self._name] and outcome is Outcome.PARTIAL:
                    upstreams.withdraw(self._name)
                return outcome

        monkeypatch.setattr(following, "Keeper", Keeper)
        monkeypatch.setattr(following, "_FIRST_AGAIN_S", 0.01)

    def withdraw(self, name: str) -> None:
        """An upstream announces it no more."""
        assert self.follower is not None, "it has begun"
        self.follower.gone(self.connections[name], ONE)


async def brought(shop: Shop, upstreams: Upstreams) -> list[str]:
    """Have a publication brought; return who was asked for it."""
    follower = upstreams.follower = Following(
        shop,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        (),
        at_once=1,
    )
    for connection in upstreams.connections.values():
        follower.appeared(connection, ONE)
    [task] = follower._bringing.values()
    async with asyncio.timeout(PATIENCE_S):
        await task
    return upstreams.asked


async def test_one_upstream_that_says_a_publication_was_given_up_is_not_believed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    upstreams = Upstreams(monkeypatch, liar=[Outcome.GIVEN_UP], honest=[Outcome.KEPT])

    assert await brought(shop, upstreams) == ["liar", "honest"]
    assert not shop.dropped


async def test_what_all_upstreams_say_was_given_up_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    upstreams = Upstreams(monkeypatch, one=[Outcome.GIVEN_UP], other=[Outcome.GIVEN_UP])

    assert await brought(shop, upstreams) == ["one", "other"]
    assert shop.dropped == [ONE]
    assert shop.counters[Counter.PUBLICATIONS_REFUSED] == 1


async def test_an_upstream_with_a_part_is_asked_again_behind_one_that_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    upstreams = Upstreams(
        monkeypatch, part=[Outcome.PARTIAL, Outcome.KEPT], liar=[Outcome.GIVEN_UP]
    )

    assert await brought(shop, upstreams) == ["part", "liar", "part"]
    assert not shop.dropped


async def test_what_was_given_up_and_is_announced_by_nobody_any_more_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    upstreams = Upstreams(monkeypatch, one=[Outcome.GIVEN_UP], other=[Outcome.PARTIAL] * 3)

    assert (await brought(shop, upstreams))[:2] == ["one", "other"]
    assert shop.dropped == [ONE]
