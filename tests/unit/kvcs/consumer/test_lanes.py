"""Which of several connections is left because it is silent."""

import asyncio
from typing import Any, cast

import pytest

from kvcs.consumer.lanes import Lanes, LocalLane
from kvcs.consumer.settings import RetrievalSettings

SETTINGS = RetrievalSettings(connections=2, silence_s=0.1)


class SilentLane:
    """Says at once that it is silent, as one does of which that is known."""

    is_apart = False
    is_usable = True
    max_ranges = 0
    end = "left"

    def __init__(self) -> None:
        self.times_asked = 0
        self.asked, self.left, self.silent = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.silent.set()

    @property
    def is_over(self) -> bool:
        return self.left.is_set()

    def is_good(self, silence_s: float) -> bool:
        return not self.silent.is_set()

    async def until_silent(self, silence_s: float) -> None:
        self.times_asked += 1
        assert self.times_asked < 1000, "the event loop has not been round since"
        self.asked.set()
        await self.silent.wait()

    def leave(self) -> None:
        self.left.set()


@pytest.mark.parametrize("heard", [0, 1])
async def test_while_nobody_is_heard_the_loop_goes_round_until_somebody_is(heard: int) -> None:
    both = SilentLane(), SilentLane()
    one, other = both[heard], both[1 - heard]

    async def dial() -> Any:
        return both[1]

    lanes = Lanes(
        "moqt://relay:4443/", cast(LocalLane, both[0]), SETTINGS, dial=dial, dial_apart=dial
    )
    async with asyncio.timeout(10):
        watching = asyncio.create_task(lanes.widen())
        await one.asked.wait()
        await other.asked.wait()
        assert not one.is_over
        assert not other.is_over

        one.silent.clear()
        await other.left.wait()
        assert not one.is_over

        one.leave()
        one.silent.set()
        await watching
