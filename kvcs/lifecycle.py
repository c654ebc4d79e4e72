"""The life of a daemon: it runs until it is told to stop, and stops within bounds."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

Job = Callable[[asyncio.Event], Awaitable[None]]


async def run_until_stopped(*jobs: Job, grace: float) -> None:
    """Run jobs side by side until SIGINT, SIGTERM, or the first of them ends.

    A job that fails cancels the rest: a daemon with half its tasks dead must not look alive.
    The second signal does what the system does by default, so that nobody has to wait.

    Args:
        jobs: Each gets ``stopping`` and returns soon after it is set.
        grace: Seconds after which whoever still runs is cancelled.

    Raises:
        TimeoutError: If somebody had to be cancelled.
        ExceptionGroup: If jobs failed, with what they failed with.
    """
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        stopping.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        async with asyncio.timeout(None) as deadline, asyncio.TaskGroup() as group:
            for job in jobs:
                task = group.create_task(_run(job, stopping))
                task.add_done_callback(lambda _: stopping.set())
            await stopping.wait()
            deadline.reschedule(loop.time() + grace)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Have SIGHUP call ``act`` on the event loop, each time it comes, while the block runs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


class Watch:
    """Tells when files have changed and stand still again. Knows no clock and no files.

    Args:
        seen: What they look like now: anything that can be compared.
    """

    def __init__(self, seen: object) -> None:
        self._taken = self._last = seen

    def look(self, seen: object) -> bool:
        """Note what they look like; return whether that is new, and was so at the last look.

        Who writes several files has time to finish: what changes from look to look is not taken.
        """
        still = seen == self._last
        self._last = seen
        if not still or seen == self._taken:
            return False
        self._taken = seen
        return True


@contextmanager
def on_change(files: Iterable[Path], act: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call ``act`` on the event loop when one of the files is another one, while the block runs.

    That is told by time, size and inode, so files that are replaced whole are noticed as well, and
    so are links. One that is not there is waited for. With ``every_s`` 0 nobody looks.
    """
    names, loop = tuple(files), asyncio.get_running_loop()
    if not every_s or not names:
        yield
        return
    watch, timer = Watch(_stamps(names)), [loop.call_later(every_s, lambda: look())]

    def look() -> None:
        timer[0] = loop.call_later(every_s, look)
        if watch.look(_stamps(names)):
            act()

    try:
        yield
    finally:
        timer[0].cancel()


def _stamps(files: Iterable[Path]) -> list[tuple[int, ...] | None]:
    stamps: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return stamps


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Have SIGTERM cancel the task that runs the block, so that it cleans up behind itself.

    Ctrl-C does so already. The second signal does what the system does by default.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "called from a coroutine"

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _run(job: Job, stopping: asyncio.Event) -> None:
    await job(stopping)
