"""When garbage is collected, and that it is."""

import asyncio
import gc
import weakref

import pytest

from kvcs import garbage
from kvcs.garbage import AT_LATEST_S, CHEAP_S, IDLE_AFTER_S, OBJECT_S, collected_aside, is_due

#: So many that to look at them is not cheap.
MANY = int(2 * CHEAP_S / OBJECT_S)


@pytest.mark.parametrize(
    ("new", "last_s", "since_s", "busy", "due"),
    [
        (0, 0.0, AT_LATEST_S, 0.0, False),  # nothing to find
        (1000, 0.0, 0.0, 1.0, True),  # cheap
        (1000, CHEAP_S, 0.0, 1.0, False),  # it was not, the last time
        (MANY, 0.0, 0.0, 0.0, False),  # nothing goes on, but it has only just been done
        (MANY, 0.0, IDLE_AFTER_S, 0.0, True),
        (MANY, 0.0, IDLE_AFTER_S, 0.5, False),  # something goes on
        (MANY, 0.0, AT_LATEST_S, 1.0, True),
    ],
)
def test_what_takes_long_waits_until_nothing_goes_on(
    new: int, last_s: float, since_s: float, busy: float, due: bool
) -> None:
    assert is_due(new=new, last_s=last_s, since_s=since_s, busy=busy) is due


class Knot:
    def __init__(self) -> None:
        self.itself = self


async def test_a_cycle_that_has_become_old_is_collected_by_and_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    async with collected_aside():
        knot = Knot()
        weakref.finalize(knot, lambda: loop.call_soon_threadsafe(gone.set))
        gc.collect(1)  # it is old now
        assert gc.get_count()[2]
        del knot
        async with asyncio.timeout(10):
            await gone.wait()


async def test_no_collection_of_the_old_happens_by_itself_and_all_is_as_before_afterwards() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()

    async with collected_aside():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1_000_000
        assert gc.get_freeze_count() > frozen

    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
