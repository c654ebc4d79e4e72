"""Depot: an archive, its budget and its images, for who keeps and who serves. Shell.

One thread writes: what several publications have ready at a time is written and synced together.
Others read. What is to be served, and where it is announced, is told by two directories: one of
all that is served here, one of what is held whole, for relays.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypeVar

import structlog

from kvcs.audit import Outcome, note_publication
from kvcs.depot.archive import MAX_EVICTED, Archive, Batch, DiskFullError, Wanted
from kvcs.depot.gallery import Gallery
from kvcs.depot.images import Image, ShelvedTrack
from kvcs.depot.records import Entry, Item, TrackNote
from kvcs.depot.shelf import Holding, Shelf
from kvcs.errors import KvcsError, NotFound
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, PublicationName
from kvcs.telemetry import Counter, Counters, LogEvent
from kvcs.trust.sealing import Cover
from moqt.location import Location
from moqt.session.discovery import NamespaceDirectory
from moqt.session.localobjects import DeferredObject

log = structlog.get_logger("kvcs.depot")
T = TypeVar("T")

#: Octets that must be free on a disk that was full before it is written to again.
FREE_AGAIN_OCTETS = 64 << 20
#: Threads that read and check.
_READERS = 2
#: Seconds between looks at what is too old, and at what was used.
_HOUSEKEEPING_S = 10.0
#: Seconds for which room is short after somebody was refused for want of it. Longer than readers
#: may stand still, or they would outlast it.
_SHORT_S = 60.0


class NoRoomError(KvcsError):
    """The budget has no room, and nothing that may go for it.

    Attributes:
        for_ever: Whether there would be none if nothing else were held.
    """

    def __init__(self, text: str, *, for_ever: bool) -> None:
        super().__init__(text)
        self.for_ever = for_ever


class _Waiting(NamedTuple):
    """What waits to be written, and who waits for it."""

    batch: Batch
    kept: "asyncio.Future[None]"


class Depot:
    """Publications on disk. An asynchronous context manager.

    Args:
        folder: Where; see :mod:`kvcs.depot.archive`.
        budget_octets: Octets of disk that all publications may take.
        memory_octets: Octets of memory for payloads and for images.
        partial_s: Seconds that a publication of which something is missing is kept after the last
            Object of it came.
        counters: Where things are counted.
        clock: Seconds since the epoch.

    Attributes:
        shelf: What is held. Read it, and leave changes to the depot.
        served: The namespaces of what is served here.
        whole: The namespaces of what is held whole.
        counters: As given, or new.
        gallery: What is in memory, from the beginning of the block on.

    Raises:
        ConfigError: If the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_octets: int,
        memory_octets: int = 128 << 20,
        partial_s: float = 3600.0,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self.served = NamespaceDirectory()
        self.whole = NamespaceDirectory()
        self.shelf = Shelf(budget_octets)
        self._folder = folder
        self._memory_octets = memory_octets
        self._partial_s = partial_s
        self._clock = clock
        self._archive = Archive(folder)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvcs-write")
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kvcs-read")
        self._evicted = dict.fromkeys(self._archive.evicted())  # the first of them first
        self._told: set[PublicationName] = set()  # in ``served``
        self._told_whole: set[PublicationName] = set()
        self._lost: set[tuple[int, bytes, Location]] = set()  # damaged, by number
        self._used: set[Holding] = set()
        self._waiting: list[_Waiting] = []
        self._has_waiting = asyncio.Event()
        self._changed = asyncio.Event()
        self._changes = 0
        self._is_full = False
        self._short_at: float | None = None
        self._failure: BaseException | None = None
        for holding in self._archive.holdings():
            self.shelf.put(holding)
            self._tell_of(holding)

    # -- looking ---------------------------------------------------------------------------------

    def holding(self, name: PublicationName) -> Holding | None:
        """Return what is held of a publication."""
        return self.shelf.get(name)

    @property
    def is_short(self) -> bool:
        """Whether somebody was refused for want of room a short while ago."""
        now = asyncio.get_running_loop().time()
        return self._short_at is not None and now - self._short_at < _SHORT_S

    def is_served(self, name: PublicationName) -> bool:
        """Whether requests for a publication are answered; not while it comes for the first time.

        What is live is better asked for where it comes from.
        """
        return name in self._told

    def was_evicted(self, name: PublicationName) -> bool:
        """Whether a publication had to go for want of room, and was not begun again since.

        To bring it again because it is still announced would drive out what is used more.
        """
        return name in self._evicted

    async def wait_changed(self, seen: int) -> int:
        """Return once what is held has changed: begun, grown, whole, dropped, damaged.

        Args:
            seen: The last change that was seen, as returned here; 0 for none.

        Returns:
            The number of the last change.
        """
        while self._changes == seen:
            self._changed.clear()
            await self._changed.wait()
        return self._changes

    async def contents(
        self, name: PublicationName
    ) -> tuple[Mapping[bytes, TrackNote], Mapping[bytes, list[Entry]]]:
        """Return the Tracks of a publication, and their Objects, by Track Name.

        Raises:
            NotFound: If it is not held.
        """
        number = self._known(name).number
        return await self._write(lambda: self._contents(number))

    async def read(self, name: PublicationName, track: bytes, location: Location) -> bytes:
        """Return the payload of one Object, every octet of it checked.

        For who serves them by another way than MOQT.

        Raises:
            NotFound: If it is not held, or damaged.
        """
        holding = self._known(name)
        image = await self.image(name)
        shelved = image.tracks.get(track)
        at = None if shelved is None else shelved.find(location)
        if shelved is None or at is None:
            raise NotFound(f"{name} has no Object {location} of {track!r:.64} here")
        return await self._read(holding, shelved.wanted(at))

    async def manifest(self, name: PublicationName) -> tuple[bytes, int, bytes, Cover]:
        """Return the newest manifest: Track Name, version, payload, and what that came with.

        Every octet of it is as it was kept. It counts for no use of the publication.

        Raises:
            NotFound: If none is held, or it is damaged.
        """
        holding = self._known(name)
        for track in (MANIFEST_COSE, MANIFEST):
            look = partial(self._archive.last_entry, holding.number, track)
            if (entry := await self._write(look)) is not None:
                wanted = Wanted(
                    track,
                    entry.location,
                    entry.priority,
                    entry.properties,
                    entry.offset,
                    entry.length,
                    entry.seal,
                )
                payload = await self._read(holding, wanted)
                cover = Cover(entry.priority, entry.properties)
                return track, entry.location.group, payload, cover
        raise NotFound(f"{name} has no manifest here")

    async def chain(self, name: PublicationName) -> tuple[int, bytes] | None:
        """Return what was noted of the Block Keys of a publication; nobody has checked it since.

        Raises:
            NotFound: If it is not held.
        """
        return await self._write(partial(self._archive.chain, self._known(name).number))

    async def note_chain(self, name: PublicationName, first_block: int, keys: bytes) -> None:
        """Note the Block Keys of a publication, one behind the other.

        Raises:
            NotFound: If it is not held.
            DiskFullError: If the index has no room for them.
        """
        number = self._known(name).number
        await self._write(partial(self._archive.note_chain, number, first_block, keys))

    async def image(self, name: PublicationName) -> Image:
        """Return what is served of a publication.

        Raises:
            NotFound: If it is not held.
        """
        holding = self._known(name)
        self._use(holding)
        return await self.gallery.image(holding)

    def reading(self, name: PublicationName, change: int) -> None:
        """Count requests that are served from a publication: +1 for a new one, -1 at its end."""
        holding = self.shelf.get(name)
        if holding is not None:
            # What was dropped and came again has lost count of those who read it before.
            holding.readers = max(0, holding.readers + change)

    # -- keeping ---------------------------------------------------------------------------------

    async def begin(self, name: PublicationName) -> Holding:
        """Begin to write to a publication, which stays until :meth:`done`.

        Raises:
            DiskFullError: If the index has no room for another one.
        """
        holding = self.shelf.get(name)
        if holding is None:
            now = self._clock()
            number = await self._write(lambda: self._archive.open_publication(name, now))
            holding = Holding(name, number, kept_at=now, used_at=now)
            self.shelf.put(holding)
        holding.is_written = True
        self._evicted.pop(name, None)
        self._use(holding)
        self._note_change()
        return holding

    async def keep(
        self,
        name: PublicationName,
        items: Sequence[Item],
        notes: Mapping[bytes, TrackNote] = MappingProxyType({}),
    ) -> None:
        """Keep Objects that were examined; when it returns, they are on the disk for good.

        Args:
            name: A publication that was begun.
            items: The Objects, none of which is held.
            notes: What is known of Tracks, by Track Name.

        Raises:
            NoRoomError: If the budget has none. Nothing was kept.
            DiskFullError: If the disk has none. Nothing was kept.
            OSError: If the disk failed. The depot is of no use any more.
        """
        if self._failure is not None:
            raise self._failure
        holding = self._known(name)
        octets = sum(len(item.payload) for item in items)
        self._check_disk(octets)
        victims = self.shelf.room_for(octets, len(items))
        if victims is None:
            self._short_at = asyncio.get_running_loop().time()
            raise NoRoomError(
                f"no room for {octets} octets of {name}: {self.shelf.used} of "
                f"{self.shelf.limit} are in use",
                for_ever=not self.shelf.could_hold(
                    holding.octets + octets, holding.objects + len(items)
                ),
            )
        self.shelf.grow(holding, octets, len(items))
        for victim in victims:
            self._evicted[victim.name] = None
            if len(self._evicted) > MAX_EVICTED:
                del self._evicted[next(iter(self._evicted))]
            self.counters.add(Counter.PUBLICATIONS_EVICTED)
            self._let_go(victim, LogEvent.PUBLICATION_EVICTED, is_evicted=True)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settled(kept: "asyncio.Future[None]") -> None:
            if kept.cancelled() or kept.exception() is not None:
                self.shelf.grow(holding, -octets, -len(items))
                return
            holding.kept_at = self._clock()
            self._use(holding)
            self._note_change()
            self.gallery.outdated(name)  # whoever asks from now on is served with more
            self.counters.add(Counter.OBJECTS_KEPT, len(items))
            self.counters.add(Counter.OCTETS_KEPT, octets)

        kept.add_done_callback(settled)
        self._waiting.append(_Waiting(Batch(holding.number, items, notes), kept))
        self._has_waiting.set()
        await asyncio.shield(kept)

    async def finish(self, name: PublicationName, *, ended: bool) -> None:
        """Note that a publication is held whole, and announce it.

        Args:
            name: A publication that was begun.
            ended: Its publisher said that nothing will be added. Otherwise more is looked for
                when it is announced again.
        """
        holding = self._known(name)
        await self._write(lambda: self._archive.finish(holding.number, ended=ended))
        is_new = not holding.finished or holding.damaged
        holding.finished, holding.ended, holding.damaged = True, ended, False
        self.gallery.outdated(name)
        self._lost = {lost for lost in self._lost if lost[0] != holding.number}
        self._tell_of(holding)
        self._note_change()
        if not is_new:
            return
        self.counters.add(Counter.PUBLICATIONS_KEPT)
        log.info(
            LogEvent.PUBLICATION_KEPT,
            publication=str(name),
            objects=holding.objects,
            octets=holding.octets,
        )
        note_publication(name, Outcome.PUBLISHED)

    def done(self, name: PublicationName) -> None:
        """Nothing is written to a publication any more, for now; what there is of it is served."""
        holding = self.shelf.get(name)
        if holding is None:
            return
        holding.is_written = False
        self._note_change()
        if holding.objects:
            self._tell_of(holding)
        else:
            self._let_go(holding, LogEvent.PUBLICATION_DROPPED, reason="nothing of it came")

    def lose(self, name: PublicationName, track: bytes, entry: Entry) -> None:
        """Forget an Object of which the index says what cannot be."""
        self._damaged(self._known(name), track, entry.location, entry.length)

    def drop(self, name: PublicationName, reason: str) -> None:
        """Let go of a publication, whoever reads it: it cannot be relied on."""
        holding = self.shelf.get(name)
        if holding is not None:
            self._let_go(holding, LogEvent.PUBLICATION_DROPPED, reason=reason)

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.gallery = Gallery(
            lambda number: self._write(lambda: self._contents(number)),
            self._archive.read,
            self._pool,
            self._memory_octets,
            damaged=self._found_damaged,
            failed=self._read_failed,
        )
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._tidy())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self.gallery.close(), return_exceptions=True)
        for waiting in self._waiting:
            waiting.kept.cancel()
        if self._failure is None:
            await self._note_used()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._writer.shutdown)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._archive.close()

    # -- parts -----------------------------------------------------------------------------------

    async def _read(self, holding: Holding, wanted: Wanted) -> bytes:
        """Read a payload and check it.

        Raises:
            NotFound: If it is damaged.
        """
        name, track, location = holding.name, wanted.track, wanted.location
        self.reading(name, +1)
        try:
            loop = asyncio.get_running_loop()
            [payload] = await loop.run_in_executor(
                self._pool, self._archive.read, holding.number, [wanted]
            )
        finally:
            self.reading(name, -1)
        if payload is None:
            self._damaged(holding, track, location, wanted.length)
            raise NotFound(f"Object {location} of {track!r:.64} of {name} is damaged")
        return payload

    def _known(self, name: PublicationName) -> Holding:
        holding = self.shelf.get(name)
        if holding is None:
            raise NotFound(f"{name} is not held here")
        return holding

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.set()

    def _use(self, holding: Holding) -> None:
        """Note that a publication is used: read, or written to."""
        self.shelf.touch(holding, self._clock())
        self._used.add(holding)

    async def _write(self, work: Callable[[], T]) -> T:
        """Do something with the index, in the one thread that does."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    def _contents(self, number: int) -> tuple[dict[bytes, TrackNote], dict[bytes, list[Entry]]]:
        notes = self._archive.notes(number)
        return notes, {track: self._archive.entries(number, track) for track in notes}

    def _tell_of(self, holding: Holding) -> None:
        """Have a publication announced as far as it is held."""
        name = holding.name
        if holding.objects and name not in self._told:
            self._told.add(name)
            self.served.add(name.namespace)
        if holding.finished and name not in self._told_whole:
            self._told_whole.add(name)
            self.whole.add(name.namespace)

    def _let_go(
        self, holding: Holding, event: LogEvent, *, is_evicted: bool = False, **more: str
    ) -> None:
        name = holding.name
        self.shelf.remove(name)
        self._note_change()
        self._used.discard(holding)
        if name in self._told:
            self._told.discard(name)
            self.served.remove(name.namespace)
        if name in self._told_whole:
            self._told_whole.discard(name)
            self.whole.remove(name.namespace)
        self.gallery.forget(name)
        log.info(event, publication=str(name), octets=holding.octets, **more)
        note_publication(name, Outcome.WITHDRAWN, more.get("reason") or event.value)
        # In the order of what is written: nothing that comes after it is for this one.
        drop = partial(self._archive.drop, holding.number, evicted=name if is_evicted else None)
        dropping = asyncio.get_running_loop().run_in_executor(self._writer, drop)
        dropping.add_done_callback(self._index_changed)

    def _index_changed(self, done: "asyncio.Future[None]") -> None:
        """Note how a change of the index went that nobody waits for."""
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error(LogEvent.STORE_FAILED, error=str(error))

    def _check_disk(self, octets: int) -> None:
        """Refuse to write to a disk that was full until there is room again."""
        if not self._is_full:
            return
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize < octets + FREE_AGAIN_OCTETS:
            raise DiskFullError(f"store {self._folder}: the disk is full")

    async def _write_all(self) -> None:
        """Write what waits, as much at a time as there is, until cancelled."""
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            waiting, self._waiting = self._waiting, []
            write = partial(self._archive.write, [one.batch for one in waiting], self._clock())
            error: BaseException | None = None
            try:
                await asyncio.shield(self._write(write))
            except asyncio.CancelledError:
                self._waiting = waiting + self._waiting
                raise
            except DiskFullError as exc:
                if not self._is_full:
                    log.error(LogEvent.DISK_FULL, error=str(exc))
                self.counters.add(Counter.DISK_FULL)
                error = exc
            except Exception as exc:  # a disk that fails: nothing is known of what it holds
                log.error(LogEvent.STORE_FAILED, error=str(exc))
                self._failure = error = exc
            self._is_full = isinstance(error, DiskFullError)
            for one in waiting:
                if one.kept.done():
                    continue
                if error is None:
                    one.kept.set_result(None)
                else:
                    one.kept.set_exception(error)
                    one.kept.exception()  # whoever waited may be gone

    async def _tidy(self) -> None:
        """Let go of what nobody brings to its end, and note what is used, until cancelled."""
        while True:
            for holding in self.shelf.stale(self._clock(), self._partial_s):
                self.counters.add(Counter.PUBLICATIONS_EXPIRED)
                self._let_go(holding, LogEvent.PUBLICATION_EXPIRED)
            await self._note_used()
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _note_used(self) -> None:
        used, self._used = self._used, set()
        rows = [(holding.number, holding.used_at) for holding in used]
        if rows:
            try:
                await self._write(lambda: self._archive.note_used(rows))
            except (DiskFullError, OSError) as exc:  # an order that is a little wrong harms nobody
                log.warning(LogEvent.STORE_FAILED, error=str(exc))

    # -- damage ----------------------------------------------------------------------------------

    def _found_damaged(self, track: ShelvedTrack, obj: DeferredObject) -> None:
        holding = next((h for h in self.shelf if h.number == track.number), None)
        if holding is not None:
            self._damaged(holding, track.name, obj.location, obj.length)

    def _damaged(self, holding: Holding, track: bytes, location: Location, length: int) -> None:
        """Drop an Object that is not what it was when it was kept."""
        lost = holding.number, track, location
        if lost in self._lost:
            return  # another image has it, too
        self._lost.add(lost)
        self.gallery.outdated(holding.name)
        self.counters.add(Counter.OBJECTS_DAMAGED)
        log.error(
            LogEvent.OBJECT_DAMAGED,
            publication=str(holding.name),
            track=track.decode(errors="replace"),
            location=str(location),
        )
        holding.damaged = True
        self._note_change()
        self.shelf.grow(holding, -length, -1)
        forgetting = asyncio.get_running_loop().run_in_executor(
            self._writer, self._archive.forget, holding.number, track, location, length
        )
        forgetting.add_done_callback(self._index_changed)

    def _read_failed(self, error: BaseException) -> None:
        log.error(LogEvent.STORE_FAILED, error=str(error))
