"""Runs a Python program, and looks every so often what its main thread is doing.

    sampler.py OUT MODULE|FILE.py [ARGUMENT ...]

Writes to OUT, as JSON, for how many seconds of processor time each function was the innermost
one, while an event loop ran: what is imported before it does not count. A process that the program
forks writes to OUT.child. What C does counts for the Python that called it. On SIGUSR1 it begins
anew; what was before is forgotten.
"""

import asyncio
import atexit
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType

#: Processor time between two looks, at least: the kernel's timer may be coarser.
EVERY_S = 0.002


class Sampler:
    """Notes where a process is, and the processor time since it looked the last time."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._seen: dict[tuple[str, str], float] = {}
        self._looked_at = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._looked_at = time.process_time()
        signal.signal(signal.SIGPROF, self._look)
        signal.signal(signal.SIGUSR1, lambda *_: self._seen.clear())
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def follow(self) -> None:
        """Do the same in a process that was forked off; it is ended by SIGTERM."""
        self._out = self._out.with_name(f"{self._out.name}.child")
        self._seen.clear()
        signal.signal(signal.SIGTERM, self._end)
        self.start()

    def write(self) -> None:
        """Say what was seen."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        rows = [
            {"file": file, "function": function, "cpu_s": round(cpu_s, 4)}
            for (file, function), cpu_s in sorted(self._seen.items(), key=lambda row: -row[1])
        ]
        self._out.write_text(json.dumps(rows))

    def _look(self, _number: int, frame: FrameType | None) -> None:
        now = time.process_time()
        spent_s, self._looked_at = now - self._looked_at, now
        if frame is not None and _in_event_loop(frame):
            key = frame.f_code.co_filename, frame.f_code.co_qualname
            self._seen[key] = self._seen.get(key, 0.0) + spent_s

    def _end(self, *_: object) -> None:
        self.write()
        os._exit(0)


def _in_event_loop(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is asyncio.Runner.run.__code__:
            return True
        frame = frame.f_back
    return False


def main() -> None:
    out, program, *arguments = sys.argv[1:]
    sampler = Sampler(Path(out))
    atexit.register(sampler.write)
    os.register_at_fork(after_in_child=sampler.follow)
    sys.argv = [program, *arguments]
    sampler.start()
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
