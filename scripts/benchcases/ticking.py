"""How long an event loop does nothing else: the longest pause between two of its turns."""

import asyncio
import time

#: Seconds from one look at the clocks to the next; uvloop's timers are no finer.
_EVERY_S = 0.001


class Ticking:
    """Looks at the clocks every millisecond, from within the loop.

    A pause is what a look comes late by. It counts what the loop is busy with, what it waits for
    (the interpreter's lock, a disk), and what the machine takes away from it; of these, only the
    first is in the thread's own CPU time.
    """

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None
        self._wall = self._cpu = 0.0
        self._longest = self._busiest = 0.0

    def begin(self) -> None:
        """Begin anew, on the running loop."""
        self.end()
        self._longest = self._busiest = 0.0
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._look_later()

    def end(self) -> dict[str, float]:
        """Stop looking; return the longest pause and the most CPU time of one, in milliseconds."""
        if self._handle is not None:
            self._look()
            self._handle.cancel()
            self._handle = None
        return {"stall_ms": 1e3 * self._longest, "stall_cpu_ms": 1e3 * self._busiest}

    def _look_later(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def _tick(self) -> None:
        self._look()
        self._look_later()

    def _look(self) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self._longest = max(self._longest, wall - self._wall - _EVERY_S)
        self._busiest = max(self._busiest, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
