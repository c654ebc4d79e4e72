"""What a relay does beside its sessions, in one place, so that it can end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger("moqt.relay")


class Tasks:
    """Tasks that run until they are done, or until the relay ends. One that fails is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin with ``work``."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """End them all, and return when they have ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a task of the relay failed", exc_info=exc)
