"""Loading: payloads are read when a stream comes to them, checked, and kept for a while. Shell.

Reading and checking happen in threads, some Objects ahead of each reader, so that a stream finds
the next one at hand. What was read stays as long as there is room: the payloads that were read
first go first, and streams that carry one keep it until they have sent it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from kvcs.depot.archive import Wanted
from kvcs.depot.images import ShelvedTrack
from moqt.session.localobjects import DeferredObject

#: Octets that are read at once, and so many more when a reader is half through them.
AHEAD_OCTETS = 1 << 20

#: Reads payloads of a publication by its number; blocks. None stands for a damaged one.
Read = Callable[[int, Sequence[Wanted]], list[bytes | None]]


class Loader:
    """Brings payloads into the memory, within a budget.

    Args:
        read: Reads payloads; called in threads.
        pool: The threads.
        memory_octets: Payloads in memory at most, but for those that streams are about to send,
            and for one Object that is larger.
        damaged: Called with the Track and the Object of a payload that was not as it was kept.
        failed: Called with what reading raised unexpectedly.

    Attributes:
        loaded: Octets of payloads in memory.
    """

    def __init__(
        self,
        read: Read,
        pool: Executor,
        memory_octets: int,
        *,
        damaged: Callable[[ShelvedTrack, DeferredObject], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.loaded = 0
        self._read = read
        self._pool = pool
        self._limit = memory_octets
        self._ahead = min(AHEAD_OCTETS, memory_octets // 16)
        self._damaged = damaged
        self._failed = failed
        self._kept: dict[DeferredObject, int] = {}  # in the order in which they were read
        self._pending: set[DeferredObject] = set()
        self._in_flight = 0
        self._waiting: deque[tuple[ShelvedTrack, int]] = deque()
        self._loop = asyncio.get_running_loop()

    def wanted(self, track: ShelvedTrack, obj: DeferredObject) -> None:
        """A stream has come to an Object: see to it that it is, or will be, at hand."""
        position = track.position(obj)
        if obj.parts:
            position = self._half_ahead(track, position)
        if position < len(track) and self._is_away(track.objects[position]):
            self._request(track, position)

    def let_go(self, track: ShelvedTrack) -> None:
        """Keep nothing of a Track any more."""
        for obj in track.objects:
            self._put_away(obj)

    def _half_ahead(self, track: ShelvedTrack, position: int) -> int:
        """Return the place of the Object that should be on its way when one is sent."""
        octets = track.objects[position].length or 1
        return position + max(1, self._ahead // 2 // octets)

    def _is_away(self, obj: DeferredObject) -> bool:
        return not obj.parts and not obj.dropped and obj not in self._pending

    def _request(self, track: ShelvedTrack, position: int) -> None:
        if self._in_flight and self._in_flight >= self._limit // 2:
            self._waiting.append((track, position))
            self._pending.add(track.objects[position])
            return
        self._begin(track, position)

    def _begin(self, track: ShelvedTrack, position: int) -> None:
        """Read an Object, and what follows it."""
        objects: list[DeferredObject] = []
        wanted: list[Wanted] = []
        octets = 0
        while position < len(track) and (not objects or octets < self._ahead):
            obj = track.objects[position]
            if objects and not self._is_away(obj):
                break
            objects.append(obj)
            wanted.append(track.wanted(position))
            octets += obj.length
            position += 1
        self._pending.update(objects)
        self._in_flight += octets
        reading = self._loop.run_in_executor(self._pool, self._read, track.number, wanted)
        reading.add_done_callback(partial(self._read_done, track, objects, octets))

    def _read_done(
        self,
        track: ShelvedTrack,
        objects: list[DeferredObject],
        octets: int,
        reading: "asyncio.Future[list[bytes | None]]",
    ) -> None:
        self._in_flight -= octets
        self._pending.difference_update(objects)
        error = None if reading.cancelled() else reading.exception()
        if error is not None:
            self._failed(error)
            payloads: list[bytes | None] = [None] * len(objects)
        elif reading.cancelled():
            return
        else:
            payloads = reading.result()
        lost, brought = False, 0
        for obj, payload in zip(objects, payloads, strict=True):
            if payload is not None:
                obj.bring(payload)
                self._kept[obj] = obj.length
                brought += 1
                self.loaded += obj.length
            elif not obj.dropped:
                lost = True
                obj.lose()
                if error is None:
                    self._damaged(track, obj)
        track.local.coverage_changed() if lost else track.local.changed(0)
        # Not what was just brought: streams come for it in the next turn of the loop.
        while self.loaded > self._limit and len(self._kept) > brought:
            self._put_away(next(iter(self._kept)))
        while self._waiting and self._in_flight < self._limit // 2:
            other, position = self._waiting.popleft()
            self._pending.discard(other.objects[position])
            if self._is_away(other.objects[position]):
                self._begin(other, position)

    def _put_away(self, obj: DeferredObject) -> None:
        octets = self._kept.pop(obj, None)
        if octets is not None:
            self.loaded -= octets
            obj.put_away()
