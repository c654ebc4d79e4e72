"""Tasks that live as long as a block, and waits that end in time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Starts tasks that live as long as the block of :func:`tasks`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._started: set[asyncio.Task[Any]] = set()

    def start(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; if it raises, the block is cancelled and raises the same."""
        task = self._group.create_task(job)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    def cancel(self) -> None:
        """End all that still runs."""
        for task in tuple(self._started):
            task.cancel()


@asynccontextmanager
async def tasks() -> AsyncIterator[Tasks]:
    """Run tasks side by side; all of them end with the block."""
    try:
        async with asyncio.TaskGroup() as group:
            started = Tasks(group)
            try:
                yield started
            finally:
                started.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def in_any_case(job: Coroutine[Any, Any, None]) -> None:
    """Do something to its end, also if that is to be cancelled meanwhile; it must end soon."""
    task, cancelled = asyncio.ensure_future(job), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
