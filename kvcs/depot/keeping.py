"""Keeping: one publication is asked for over one connection, examined and written. Shell.

What is promised and what is held is the matter of :mod:`kvcs.depot.stock`. Here are the requests,
and the way of an Object from its stream to the disk: gathered with what comes at the same time,
examined in a thread, written and synced together, and only then counted as held.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum, auto
from functools import partial
from hashlib import sha256
from typing import NamedTuple, TypeVar

import structlog

from kvcs.audit import AuditEvent, note_publication
from kvcs.audit import Outcome as Became
from kvcs.consumer.tasks import Tasks, set_within, tasks
from kvcs.depot.archive import DiskFullError
from kvcs.depot.depot import Depot, NoRoomError
from kvcs.depot.records import MANIFESTS, DeclaredCodecs, Entry, Item, TrackNote, examine
from kvcs.depot.stock import Stock
from kvcs.depot.terms import Terms
from kvcs.errors import UNOPENED, BadManifest, BadObject, NotFound
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.profile.ending import End
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack, PublicationName
from kvcs.telemetry import Counter, LogEvent
from kvcs.trust.sealing import Cover, DigestMask, Opener
from kvcs.trust.unopened import Unopened
from moqt.aio import MoqtConnection, Subscription
from moqt.codepoints import ObjectStatus, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.location import Location
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter
from moqt.wire.pairs import Pairs

log = structlog.get_logger("kvcs.depot")
T = TypeVar("T")

#: Subscriber Priorities: manifests ahead of data.
_MANIFEST_PRIORITY, _DATA_PRIORITY = 0, 128
#: Octets that are gathered at most before nothing more is read.
_GATHERED_OCTETS = 8 << 20
#: Seconds that what came waits for what comes at the same time: a sync costs about as long.
_GATHER_S = 0.01
#: Times that a track is asked for without anything new, until it is left alone.
_ATTEMPTS = 2
#: Objects of a publication that may fail a check until it is left alone.
_MAX_REJECTED = 1000


class Outcome(Enum):
    """How the keeping of a publication ended."""

    #: All of it is held.
    KEPT = auto()
    #: Something is missing; it may be had later, or elsewhere.
    PARTIAL = auto()
    #: Whoever was asked says that its producer gave it up. Others say so, too, if it is true.
    GIVEN_UP = auto()
    #: It cannot be relied on, or not be held: nothing of it is, and it is not asked for again.
    REFUSED = auto()


class _Came(NamedTuple):
    """An Object as it came."""

    track: DataTrack
    location: Location
    priority: int
    properties: Pairs
    payload: bytes


class _Stop(Exception):  # no error: how a keeper is told to end
    """The keeping is over."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Keeper:
    """Brings one publication to the disk.

    Args:
        conn: The connection to ask on.
        name: The publication.
        depot: Where it is kept.
        terms: What is taken.
        pool: Threads that examine.
    """

    def __init__(
        self,
        conn: MoqtConnection,
        name: PublicationName,
        depot: Depot,
        terms: Terms,
        pool: Executor,
    ) -> None:
        self._conn = conn
        self._name = name
        self._depot = depot
        self._terms = terms
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._stock = Stock()
        self._codecs: CodecRegistry = terms.codecs
        self._versions: set[int] = set()
        self._manifest_track: bytes | None = None
        self._manifest_end: End | None = None
        self._came: list[_Came] = []
        self._came_octets = 0
        self._ready: list[Item] = []  # manifests, which were examined
        self._notes: dict[bytes, TrackNote] = {}
        self._readers: dict[DataTrack, asyncio.Task[None]] = {}
        self._attempts: dict[DataTrack, int] = {}
        self._openers: dict[DataTrack, Opener] = {}
        self._unopened = Unopened()
        self._rejected = 0
        self._is_resumed = False
        self._progress_at = self._loop.time()
        self._stop: _Stop | None = None
        self._wake = asyncio.Event()
        self._gathered = asyncio.Event()
        self._room = asyncio.Event()
        self._is_writing = False

    async def run(self) -> Outcome:
        """Keep what can be had of the publication; return how far that got.

        Raises:
            OSError: If the disk failed.
        """
        try:
            await self._depot.begin(self._name)
        except DiskFullError as exc:
            return self._told(_Stop(Outcome.PARTIAL, str(exc)))
        try:
            try:
                async with tasks() as group:
                    await self._restock()
                    subscription = await self._open_manifest()
                    group.start(self._read_manifests(subscription))
                    group.start(self._write())
                    await self._supervise(group)
            except _Stop as stop:
                return await self._ended(stop)
            raise AssertionError("a keeper ends by a _Stop")
        finally:
            self._depot.done(self._name)

    async def _ended(self, stop: _Stop) -> Outcome:
        if stop.outcome is Outcome.REFUSED:
            self._depot.counters.add(Counter.PUBLICATIONS_REFUSED)
            self._depot.drop(self._name, str(stop))
        elif stop.outcome is not Outcome.GIVEN_UP and self._stock.is_complete:
            try:
                await self._depot.finish(self._name, ended=self._manifest_end is End.ENDED)
            except DiskFullError as exc:
                return self._told(_Stop(Outcome.PARTIAL, str(exc)))
            return Outcome.KEPT
        return self._told(stop)

    def _told(self, stop: _Stop) -> Outcome:
        if stop.outcome in (Outcome.PARTIAL, Outcome.GIVEN_UP):
            log.info(LogEvent.PUBLICATION_PARTIAL, publication=str(self._name), reason=str(stop))
        return stop.outcome

    async def _restock(self) -> None:
        """Learn what is held already."""
        notes, contents = await self._depot.contents(self._name)
        for track in MANIFESTS & notes.keys():
            entries = contents[track]
            self._versions = {entry.location.group for entry in entries}
            if entries:
                self._manifest_track = track
                newest = entries[-1]
                version, cover = newest.location.group, Cover(newest.priority, newest.properties)
                try:
                    payload = await self._depot.read(self._name, track, newest.location)
                    manifest, _ = await self._read_manifest(track, payload, version, cover)
                    self._accept(manifest, version)
                    self._is_resumed = True
                except (BadManifest, BadObject, NotFound):
                    # What is damaged, or not believed any more, is asked for again.
                    self._versions.discard(version)
        for name in notes.keys() - MANIFESTS:
            hold = partial(self._hold_again, DataTrack.parse(name), contents[name])
            for entry in await self._in_thread(hold):
                self._depot.lose(self._name, name, entry)

    def _hold_again(self, track: DataTrack, entries: Sequence[Entry]) -> list[Entry]:
        """Note what is held of a track; return what the manifest says cannot be. In a thread."""
        bad: list[Entry] = []
        mask = self._terms.mask(self._name.track(track))
        for entry in entries:
            at, digest = entry.location, entry.digest
            try:
                self._stock.hold(track, [(at, digest if mask is None else mask(at, digest))])
            except BadManifest:  # it was checked when it was kept: the index is damaged
                bad.append(entry)
        return bad

    async def _supervise(self, group: Tasks) -> None:
        """Have tracks read until nothing more is to be had.

        Raises:
            _Stop: Always.
        """
        while True:
            self._wake.clear()
            if self._stop is not None:
                raise self._stop
            self._start_readers(group)
            is_idle = not self._has_gathered and all(t.done() for t in self._readers.values())
            if self._manifest_end is not None and is_idle:
                lost = self._conn.closed is not None
                raise _Stop(
                    Outcome.PARTIAL, "the connection was lost" if lost else "not all of it came"
                )
            if (track := self._given_up()) is not None:
                raise _Stop(Outcome.PARTIAL, f"not all of {track} can be had")
            left = self._progress_at + self._terms.stall_s - self._loop.time()
            if left <= 0:
                raise _Stop(
                    Outcome.PARTIAL, f"nothing new came for {self._terms.stall_s:g} seconds"
                )
            await set_within(self._wake, left)

    # -- manifests -------------------------------------------------------------------------------

    async def _open_manifest(self) -> Subscription:
        """Subscribe to the manifest track (KVCS Section 5.2), of which all versions are kept.

        Raises:
            _Stop: If there is none.
        """
        known = self._manifest_track
        names = [known] if known is not None else [MANIFEST_COSE, MANIFEST]
        if self._terms.require_signature and MANIFEST in names:
            names.remove(MANIFEST)
        first = max(self._versions, default=-1) + 1
        reason = "no manifest.cose is known, and a plain manifest is not taken"
        for track in names:
            try:
                subscription = await self._conn.subscribe(
                    self._name.track(track),
                    location_filter=LocationFilter.NEXT_OBJECT,
                    fill=LocationFilter.absolute_start(first, 0),
                    priority=_MANIFEST_PRIORITY,
                    timeout_s=self._terms.request_timeout_s,
                )
            except RequestRejected as exc:
                reason = f"{track.decode()}: {exc}"
                # Only this very code says that it is to be had under the other name.
                if exc.code != RequestErrorCode.DOES_NOT_EXIST:
                    break
            except (MoqtError, TimeoutError) as exc:
                reason = f"{track.decode()}: {exc}"
                break
            else:
                self._manifest_track = track
                self._note(track, TrackNote(properties=subscription.track_properties))
                return subscription
        raise _Stop(Outcome.PARTIAL, reason)

    async def _read_manifests(self, subscription: Subscription) -> None:
        track = self._manifest_track
        assert track is not None, "it was opened"
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                version = item.location.group
                if version in self._versions or item.location.object:
                    continue
                cover = Cover(item.publisher_priority, item.properties)
                try:
                    found = await self._read_manifest(track, item.payload, version, cover)
                except BadObject as exc:
                    self._note_unopened(track.decode(), item.location, exc)
                    continue
                manifest, digest = found
                self._accept(manifest, version)
                self._versions.add(version)
                self._ready.append(
                    Item(
                        track,
                        item.location,
                        item.publisher_priority,
                        item.properties,
                        item.payload,
                        digest,
                    )
                )
                self._came_octets += len(item.payload)
                self._gathered.set()
                self._wake.set()
                await self._keep_bound()
        except BadManifest as exc:
            # Who brings the rest may lie. What is held came with manifests that were good.
            outcome = Outcome.PARTIAL if self._is_resumed else Outcome.REFUSED
            self._end(outcome, f"manifest refused: {exc}")
            return
        except MoqtError as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=track.decode(), reason=str(exc))
        finally:
            subscription.cancel()
        ended = subscription.ended
        if ended is None:
            self._manifest_end = End.LOST
        else:
            self._manifest_end = End.of(ended.code, ended.reason)
            if self._manifest_end is End.ABANDONED:
                self._end(Outcome.GIVEN_UP, f"it was {ended.reason}")
        self._wake.set()

    async def _read_manifest(
        self, track: bytes, payload: bytes, version: int, cover: Cover
    ) -> tuple[Manifest, bytes]:
        """Check a version of the manifest; return it, and the SHA-256 over its payload."""
        return await self._in_thread(
            lambda: (
                self._terms.read_manifest(track, payload, self._name, version, cover),
                sha256(payload).digest(),
            )
        )

    def _accept(self, manifest: Manifest, version: int) -> None:
        if self._stock.accept(manifest, version):
            self._codecs = DeclaredCodecs(self._terms.codecs, manifest.codecs)
            self._progress_at = self._loop.time()

    # -- data tracks -----------------------------------------------------------------------------

    def _start_readers(self, group: Tasks) -> None:
        """Ask for tracks of which something is missing, each a few times."""
        if self._has_gathered or self._conn.closed is not None:
            return  # what is gathered may be what is missing
        for track in self._stock.tracks:
            reader = self._readers.get(track)
            if reader is not None and not reader.done():
                continue
            first = self._stock.first_missing(track)
            if first is None or self._attempts.get(track, 0) >= _ATTEMPTS:
                continue
            self._attempts[track] = self._attempts.get(track, 0) + 1
            self._readers[track] = group.start(self._read(track, first))

    def _given_up(self) -> DataTrack | None:
        """Return a track of which something is missing and that is not asked for any more."""
        if self._has_gathered:
            return None
        for track, attempts in self._attempts.items():
            if (
                attempts >= _ATTEMPTS
                and self._readers[track].done()
                and self._stock.first_missing(track) is not None
            ):
                return track
        return None

    def _fill(self, track: DataTrack, first: Location) -> LocationFilter:
        """Return what is asked for of the past of a track: up to the last that is missing."""
        manifest, last = self._stock.manifest, self._stock.last_missing_layer(track)
        if manifest is None or last is None or last == manifest.layers - 1:
            return LocationFilter.absolute_start(*first)
        return LocationFilter.group_end(*first, last)

    async def _read(self, track: DataTrack, first: Location) -> None:
        try:
            subscription = await self._conn.subscribe(
                self._name.track(track),
                location_filter=LocationFilter.NEXT_OBJECT,
                fill=self._fill(track, first),
                priority=_DATA_PRIORITY,
                timeout_s=self._terms.request_timeout_s,
            )
        except (MoqtError, TimeoutError) as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=str(track), reason=str(exc))
            self._wake.set()
            return
        manifest, entry = self._stock.manifest, self._stock.entry_of(track)
        assert manifest is not None, "a track is read once it is listed"
        assert entry is not None, "what is listed stays listed"
        note = TrackNote(
            manifest.layers, entry.blocks, subscription.track_properties, subscription.largest
        )
        self._note(track.name, note)
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived):
                    continue
                self._note(track.name, TrackNote(largest=item.location))
                if item.status is ObjectStatus.NORMAL and self._stock.wants(track, item.location):
                    await self._gather(track, item)
        except MoqtError as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=str(track), reason=str(exc))
        finally:
            subscription.cancel()
            self._wake.set()

    async def _gather(self, track: DataTrack, item: ObjectReceived) -> None:
        """Have an Object written with others; wait where too much is gathered."""
        self._came.append(
            _Came(track, item.location, item.publisher_priority, item.properties, item.payload)
        )
        self._came_octets += len(item.payload)
        self._gathered.set()
        await self._keep_bound()

    async def _keep_bound(self) -> None:
        """Wait while too much is gathered."""
        while self._came_octets > _GATHERED_OCTETS:
            self._room.clear()
            await self._room.wait()

    def _note(self, track: bytes, note: TrackNote) -> None:
        known = self._notes.get(track)
        self._notes[track] = note if known is None else known.merged(note)

    # -- writing ---------------------------------------------------------------------------------

    @property
    def _has_gathered(self) -> bool:
        """Whether something came that is not on the disk yet."""
        return bool(self._came or self._ready or self._is_writing)

    async def _write(self) -> None:
        """Write what was gathered, until cancelled."""
        try:
            while True:
                await self._gathered.wait()
                await asyncio.sleep(_GATHER_S)
                self._gathered.clear()
                came, self._came, self._came_octets = self._came, [], 0
                ready, self._ready = self._ready, []
                notes, self._notes = self._notes, {}
                self._room.set()
                self._is_writing = True
                await self._keep(came, ready, notes)
                self._is_writing = False
                self._wake.set()
        except NoRoomError as exc:
            outcome = Outcome.REFUSED if exc.for_ever else Outcome.PARTIAL
            self._end(outcome, str(exc))
        except DiskFullError as exc:
            self._end(Outcome.PARTIAL, str(exc))
        except BadManifest as exc:
            self._end(Outcome.REFUSED, str(exc))
        except NotFound:
            self._end(Outcome.REFUSED, "it was dropped meanwhile")

    async def _keep(
        self, came: Sequence[_Came], ready: Sequence[Item], notes: Mapping[bytes, TrackNote]
    ) -> None:
        found = await self._in_thread(partial(self._examine_all, came)) if came else []
        items = list(ready)
        held: dict[DataTrack, list[tuple[Location, bytes]]] = {}
        taken: set[tuple[DataTrack, Location]] = set()
        masks: dict[DataTrack, DigestMask | None] = {}
        for one, verdict in zip(came, found, strict=True):
            if isinstance(verdict, BadObject):
                self._reject(one, verdict)
                continue
            key = one.track, one.location
            if key in taken or not self._stock.wants(*key):
                continue  # it came twice
            taken.add(key)
            held.setdefault(one.track, []).append((one.location, verdict))
            if one.track not in masks:
                masks[one.track] = self._terms.mask(self._name.track(one.track))
            mask = masks[one.track]
            items.append(
                Item(
                    one.track.name,
                    one.location,
                    one.priority,
                    one.properties,
                    one.payload,
                    verdict if mask is None else mask(one.location, verdict),
                )
            )
        await self._depot.keep(self._name, items, notes)
        for track, locations in held.items():
            self._stock.hold(track, locations)
            self._attempts[track] = 0
            if self._stock.first_missing(track) is None and track in self._readers:
                self._readers[track].cancel()
        if items:
            self._progress_at = self._loop.time()

    def _examine_all(self, came: Sequence[_Came]) -> list[bytes | BadObject]:
        """Examine Objects; return the digest of each, or why it is refused. In a thread."""
        manifest = self._stock.manifest
        assert manifest is not None, "tracks are read once it is there"
        found: list[bytes | BadObject] = []
        for one in came:
            entry = self._stock.entry_of(one.track)
            assert entry is not None, "what is listed stays listed"
            try:
                found.append(
                    examine(
                        one.track,
                        one.location,
                        one.payload,
                        entry=entry,
                        descriptor=manifest.compat,
                        codecs=self._codecs,
                        max_data_octets=self._terms.max_data_octets,
                        opener=self._opener(one.track),
                        cover=Cover(one.priority, one.properties),
                    )
                )
            except BadObject as exc:
                found.append(exc)
        return found

    def _opener(self, track: DataTrack) -> Opener:
        """Return what opens the Objects of a track, the same one each time."""
        opener = self._openers.get(track)
        if opener is None:
            opener = self._openers[track] = self._terms.opener(self._name.track(track))
        return opener

    def _note_unopened(self, track: str, location: Location, why: BadObject) -> None:
        """Count an Object that could not be opened, which nobody outside is to notice."""
        self._depot.counters.add(Counter.OBJECTS_UNOPENED)
        if (count := self._unopened.note(why)) is not None:
            log.warning(
                LogEvent.OBJECT_UNOPENED,
                track=track,
                location=str(location),
                reason=str(why.reason),
                count=count,
                text=str(why),
            )

    def _reject(self, one: _Came, why: BadObject) -> None:
        self._rejected += 1
        self._depot.counters.add(Counter.OBJECTS_REJECTED)
        if why.reason in UNOPENED:
            self._note_unopened(str(one.track), one.location, why)
        else:
            log.warning(
                LogEvent.OBJECT_REJECTED,
                track=str(one.track),
                layer=one.location.group,
                block=one.location.object,
                reason=str(why.reason),
                text=str(why),
            )
        note_publication(self._name, Became.REJECTED, str(why.reason), event=AuditEvent.OBJECTS)
        if self._rejected >= _MAX_REJECTED:
            self._end(Outcome.REFUSED, f"{self._rejected} Objects were rejected")

    # -- parts -----------------------------------------------------------------------------------

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self._stop is None:
            self._stop = _Stop(outcome, reason)
        self._wake.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._pool, work)
