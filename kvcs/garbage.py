"""Full collections of garbage, kept out of the way of an event loop.

Python looks for cycles of objects that nobody can reach any more, and stands still meanwhile: a
full collection looks at every object that it keeps track of, 150 ns each on a fast machine. A
publication has four for each of its Objects, so one of 200,000 Objects would stop its producer for
a tenth of a second and longer, whenever the interpreter thinks fit, in the middle of a layer for
example.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from kvcs.telemetry import LogEvent

log = structlog.get_logger("kvcs.garbage")

#: Seconds from one look at what there is to do to the next.
LOOK_S = 1.0
#: A collection that takes no longer disturbs nobody.
CHEAP_S = 0.01
#: One that takes longer waits until nothing goes on, and some time after the one before.
IDLE_AFTER_S = 5.0
#: Nothing goes on where the processor is used for less than this share of the time.
IDLE_SHARE = 0.1
#: Where there is always something going on, it is done after so long all the same.
AT_LATEST_S = 300.0
#: For each object: what is expected of those that have never been looked at.
OBJECT_S = 150e-9

#: So many collections of the young never come.
_NEVER = 1 << 30


def is_due(*, new: int, last_s: float, since_s: float, busy: float) -> bool:
    """Say whether a full collection is to be done now.

    Args:
        new: Objects that have become old since the last one, at most.
        last_s: Seconds that the last one took.
        since_s: Seconds since the last one.
        busy: Share of the time for which the process was using a processor.
    """
    if not new:
        return False
    if last_s + new * OBJECT_S <= CHEAP_S:
        return True
    return since_s >= (IDLE_AFTER_S if busy < IDLE_SHARE else AT_LATEST_S)


@asynccontextmanager
async def collected_aside() -> AsyncIterator[None]:
    """Have full collections done when they are cheap or when nothing goes on, while the block runs.

    For a program's outermost block: it changes what holds for the whole process, and changes it
    back. What is there when it begins, modules above all, is not looked at.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], _NEVER)
    # Ended below.
    task = asyncio.create_task(_collect_aside(before[0] * before[1]), name="kvcs garbage")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect_aside(each: int) -> None:
    """Look every so often; ``each`` is what becomes old at a time, at most."""
    last_s, collected_at = 0.0, time.monotonic()
    looked_at, used_s = collected_at, time.process_time()
    while True:
        await asyncio.sleep(LOOK_S)
        now, used = time.monotonic(), time.process_time()
        busy, looked_at, used_s = (used - used_s) / (now - looked_at), now, used
        new = gc.get_count()[2] * each
        if is_due(new=new, last_s=last_s, since_s=now - collected_at, busy=busy):
            gc.collect()
            collected_at = time.monotonic()
            last_s = collected_at - now
            if last_s > CHEAP_S:
                log.debug(LogEvent.GARBAGE_COLLECTED, seconds=round(last_s, 3))
