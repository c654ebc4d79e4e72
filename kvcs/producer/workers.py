"""Workers: threads for what takes long, so that the event loop goes on serving."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: Work on fewer octets is done on the event loop: a thread costs more than it saves.
THREAD_OCTETS = 256 << 10
_THREADS = 2


class Workers:
    """A few threads. Hashing, encoding and reading files release the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcs-hash")

    async def do(self, work: Callable[[], T], octets: int = THREAD_OCTETS) -> T:
        """Do work on ``octets`` octets: in a thread, unless that costs more than it saves."""
        if octets < THREAD_OCTETS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Begin nothing more; what has begun goes on by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
