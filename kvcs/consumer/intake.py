"""Intake: Objects are examined as they come, the large ones in threads, within a bound. Shell.

An examination touches nothing but its arguments; what follows from it is done on the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from kvcs.consumer.examining import Examined, Examiner
from kvcs.consumer.settings import RetrievalSettings
from kvcs.errors import BadObject
from kvcs.trust.sealing import Cover

#: Octets, encoded or decoded, from which a codec other than ``raw`` decodes in another thread.
LARGE_ENCODED_OCTETS = 16 << 10

#: What is taken in one turn of the event loop: a few milliseconds of work.
OBJECTS_PER_TURN = 64
OCTETS_PER_TURN = 1 << 20

#: Takes what came of an examination.
Judge = Callable[[Examined | BadObject], None]


class Intake:
    """Examines Objects.

    Args:
        pool: Threads for what is large.
        settings: From which length on, and how much at once.
        crashed: Called with what an examination, or what is done about it, raised unexpectedly.
        idle: Called when nothing is under examination any more.

    Attributes:
        pending: Octets under examination in threads, as they came or, if that is more, as they
            are decoded.
    """

    def __init__(
        self,
        pool: Executor,
        settings: RetrievalSettings,
        *,
        crashed: Callable[[BaseException], None],
        idle: Callable[[], None],
    ) -> None:
        self.pending = 0
        self._in_turn = 0
        self._octets_in_turn = 0
        self._pool = pool
        self._settings = settings
        self._crashed = crashed
        self._idle = idle
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def take(
        self,
        examiner: Examiner,
        payload: bytes,
        layer: int,
        block: int,
        cover: Cover,
        judge: Judge,
    ) -> None:
        """Examine one Object, and have ``judge`` called with what comes of it, now or later.

        Args:
            examiner: Of its track.
            payload: Its payload.
            layer: Group ID it came under.
            block: Object ID it came under.
            cover: What it came with.
            judge: Takes what comes of it.
        """
        octets, large = len(payload), self._settings.large_octets
        self._in_turn += 1
        self._octets_in_turn += octets
        if not examiner.is_raw:
            # What comes out counts as well: it may be many times as much.
            octets, large = max(octets, examiner.section_octets), LARGE_ENCODED_OCTETS
        if octets < large:
            try:
                verdict: Examined | BadObject = examiner.examine(payload, layer, block, cover)
            except BadObject as exc:
                verdict = exc
            judge(verdict)
            return
        self.pending += octets
        future = self._loop.run_in_executor(
            self._pool, examiner.examine, payload, layer, block, cover
        )
        future.add_done_callback(partial(self._examined, octets, judge))

    async def keep_bound(self) -> None:
        """Wait, where too much is under examination, until half of it is done.

        Of many that are there already, some at a time are taken, and others get their turn.
        """
        if self.pending > self._settings.pending_octets:
            await self.down_to(self._settings.pending_octets // 2)
        elif self._in_turn >= OBJECTS_PER_TURN or self._octets_in_turn >= OCTETS_PER_TURN:
            await asyncio.sleep(0)
        else:
            return
        self._in_turn = self._octets_in_turn = 0

    async def down_to(self, octets: int) -> None:
        """Wait until no more than that is under examination."""
        while self.pending > octets:
            self._room.clear()
            await self._room.wait()

    def _examined(self, octets: int, judge: Judge, future: "asyncio.Future[Examined]") -> None:
        self.pending -= octets
        try:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                judge(future.result())
            elif isinstance(error, BadObject):
                judge(error)
            else:
                self._crashed(error)
        except Exception as exc:
            # In a callback nobody would learn of it.
            self._crashed(exc)
        finally:
            self._room.set()
            if not self.pending:
                self._idle()
