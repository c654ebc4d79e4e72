"""Downloading one publication: its manifest, its tracks, its Objects into the sink.

Shell, as :mod:`kvcs.consumer.retrieval` is, which finds the publication and the connection. All
state belongs to the event loop. The only thing that other threads do is to examine an Object or
a manifest that is large, which touches nothing but its arguments.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from kvcs.consumer.assembler import Assembler, Contradicted, Expected
from kvcs.consumer.events import Event, FailureReason, ObjectRejected, SegmentComplete
from kvcs.consumer.selection import SegmentPlan, Wish
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.trust import Examined, Expectations, check_manifest, examine
from kvcs.errors import BadManifest, BadObject, ConfigError, NotFound
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.profile.ending import End
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack, PublicationName
from kvcs.store.sink import BlockSink
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection, Subscription
from moqt.codepoints import ObjectStatus, ParameterType, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.location import Location
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter, RangeFilter

log = structlog.get_logger("kvcs.consumer")
T = TypeVar("T")

#: Subscriber Priority of the manifest track, ahead of all data.
MANIFEST_PRIORITY = 0
#: Octets from which a manifest is read in another thread.
LARGE_MANIFEST_OCTETS = 64 << 10
#: Octets from which a codec other than ``raw`` decodes in another thread.
LARGE_ENCODED_OCTETS = 16 << 10
#: Refusals that say nothing of the track, only that it cannot be had here and now.
NOT_NOW = (
    RequestErrorCode.INTERNAL_ERROR,
    RequestErrorCode.TIMEOUT,
    RequestErrorCode.GOING_AWAY,
    RequestErrorCode.EXCESSIVE_LOAD,
)


class Failure(NamedTuple):
    """Why something ended without all that was wanted."""

    reason: FailureReason
    text: str

    again: bool = False
    """Whether there may be more of it when it is asked for again, here or elsewhere."""

    lost: bool = False
    """Whether something that was there is lost: a connection, or a publisher behind it."""


class Refused(Exception):
    """A publication cannot be used, before anything of it was.

    Attributes:
        again: Whether it may be had later: it is not at fault itself.
    """

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class Opened(NamedTuple):
    """A publication whose manifest track is subscribed to and whose first manifest is good."""

    name: PublicationName
    track: bytes
    subscription: Subscription
    manifest: Manifest
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a retrieval shares with its downloads."""

    expected: Expectations
    wish: Wish
    settings: RetrievalSettings
    codecs: CodecRegistry
    sink: BlockSink

    pool: ThreadPoolExecutor
    """For what is large."""

    tell: Callable[[Event], None]
    """Takes every event, in order."""


async def open_publication(
    conn: MoqtConnection, name: PublicationName, job: Job, *, track: bytes | None = None
) -> Opened:
    """Subscribe to a publication's manifest and check the current version.

    ``manifest`` is tried only if ``manifest.cose`` does not exist, by that very code, and
    only if no signature is required: anything else would let whoever stands in between
    take the signature away (KVCS Section 5.2).

    Args:
        conn: The connection to ask on.
        name: The publication.
        job: The retrieval that wants it.
        track: Its manifest track, if that is known; no other one is tried then.

    Raises:
        Refused: If the publication cannot be used.
    """
    only, track = track, track or MANIFEST_COSE
    may_be_plain = only is None and not job.expected.require_signature
    try:
        subscription = await _subscribe_manifest(conn, name, track, job)
    except RequestRejected as exc:
        if exc.code != RequestErrorCode.DOES_NOT_EXIST or not may_be_plain:
            raise Refused(f"{track.decode()}: {exc}", again=True) from None
        track = MANIFEST
        try:
            subscription = await _subscribe_manifest(conn, name, track, job)
        except (MoqtError, TimeoutError) as again:
            raise Refused(f"manifest: {again}", again=True) from None
    except (MoqtError, TimeoutError) as exc:
        raise Refused(f"{track.decode()}: {exc}", again=True) from None
    may_come = True
    try:
        async with asyncio.timeout(job.settings.request_timeout_s):
            async for item in subscription:
                if isinstance(item, ObjectReceived) and item.status is ObjectStatus.NORMAL:
                    version = item.location.group
                    manifest = await _check_manifest(item.payload, track, name, version, job)
                    return Opened(name, track, subscription, manifest, version)
        ended = subscription.ended
        why = f"{ended.code!r} {ended.reason}" if ended is not None else ""
        text = f"{track.decode()}: ended without a manifest: {why}"
        may_come = ended is None or End.of(ended.code, ended.reason) is not End.ABANDONED
    except TimeoutError:
        text = f"{track.decode()}: none came within {job.settings.request_timeout_s:g} s"
    except BadManifest as exc:
        text, may_come = f"{track.decode()}: {exc}", False
    except MoqtError as exc:
        text = f"{track.decode()}: {exc}"
    except asyncio.CancelledError:
        subscription.cancel()
        raise
    subscription.cancel()
    raise Refused(text, again=may_come)


async def _subscribe_manifest(
    conn: MoqtConnection, name: PublicationName, track: bytes, job: Job
) -> Subscription:
    return await conn.subscribe(
        name.track(track),
        location_filter=LocationFilter.NEXT_OBJECT,
        fill=LocationFilter.relative(1),
        priority=MANIFEST_PRIORITY,
        timeout_s=job.settings.request_timeout_s,
    )


async def _check_manifest(
    payload: bytes, track: bytes, name: PublicationName, version: int, job: Job
) -> Manifest:
    """Check a manifest, in a thread if it is large."""
    check = partial(
        check_manifest, payload, track=track, name=name, version=version, expected=job.expected
    )
    if len(payload) < LARGE_MANIFEST_OCTETS:
        return check()
    return await asyncio.get_running_loop().run_in_executor(job.pool, check)


class Download:
    """The retrieval of one publication, over one connection after the other.

    Args:
        name: The publication.
        job: What is shared with the retrieval that it is part of.

    Attributes:
        name: The publication.
        assembler: How far it is.
        manifest_track: The track its manifests come on; None before the first.
    """

    def __init__(self, name: PublicationName, job: Job) -> None:
        expected, settings = job.expected, job.settings
        self.name = name
        blocks = expected.blocks_of(name)
        self.assembler = Assembler(
            name,
            wish=job.wish,
            codecs=job.codecs,
            signed=False,  # until its manifest track is known
            blocks=blocks,
            known_blocks=blocks or len(expected.block_keys) or None,
            early_octets=settings.early_octets,
        )
        self._job = job
        self._settings = settings
        self._sink = job.sink
        self._loop = asyncio.get_running_loop()
        self.manifest_track: bytes | None = None
        self._sink_began = False
        self._rejected: set[tuple[DataTrack, int, int]] = set()
        self._pending = 0  # payload octets under examination in threads
        self._room = asyncio.Event()
        self._reset()

    def _reset(self) -> None:
        """Begin anew on a connection."""
        self._wake = asyncio.Event()
        self._failure: Failure | None = None
        self._crash: BaseException | None = None
        self._readers: dict[DataTrack, asyncio.Task[None]] = {}
        self._manifest_ended = False
        self._gone: dict[DataTrack | None, str] = {}
        """Tracks whose publisher was lost, and how; None is the manifest's."""

        self._not_now = False  # a track was refused that may be had later
        self._closed = False
        self._progress_at = self._loop.time()

    async def run(self, conn: MoqtConnection, opened: Opened | None) -> Failure | None:
        """Retrieve what is missing over ``conn``; return None when everything is there.

        Args:
            conn: The connection.
            opened: The publication's manifest, if it has been opened there already.

        Raises:
            Refused: If the manifest cannot be used.
        """
        self._reset()
        try:
            async with tasks() as group:
                if opened is None:
                    if self._settings.eager and self.assembler.manifest is None:
                        self._start_eagerly(conn, group)
                    opened = await open_publication(
                        conn, self.name, self._job, track=self.manifest_track
                    )
                if self.manifest_track not in (None, opened.track):
                    raise Refused("signed at one relay, not signed at another")
                self.manifest_track = opened.track
                self.assembler.signed = opened.track == MANIFEST_COSE
                if (failure := self._accept(opened.manifest, opened.version)) is not None:
                    return failure
                self._drop_readers_in_vain()
                group.start(self._read_manifests(opened.subscription, opened.track))
                if (failure := await self._supervise(conn, group)) is not None:
                    return failure
            return await self._close_sink()
        finally:
            self._closed = True
            if opened is not None:
                opened.subscription.cancel()

    async def _supervise(self, conn: MoqtConnection, group: "Tasks") -> Failure | None:
        while True:
            self._wake.clear()
            if self._crash is not None:
                raise self._crash
            if self.assembler.is_complete:
                return None
            if self._failure is not None and not self._pending:
                return self._failure
            if self._failure is None:
                self._start_readers(conn, group)
                if (failure := self._exhausted()) is not None:
                    return failure
            left = self._progress_at + self._settings.stall_timeout_s - self._loop.time()
            if left <= 0:
                stall_s = self._settings.stall_timeout_s
                return Failure(FailureReason.STALLED, f"nothing new came for {stall_s:g} s")
            if self._is_broken_off and not self._pending:
                # What still comes on other tracks is taken first.
                left = self._progress_at + self._settings.again_s - self._loop.time()
                if left <= 0:
                    return self._incomplete(FailureReason.INCOMPLETE, "not everything came")
            await set_within(self._wake, left)

    @property
    def _is_broken_off(self) -> bool:
        """Whether a track has lost its publisher and is not being asked for again already."""
        readers = (self._readers.get(track) for track in self._gone if track is not None)
        return None in self._gone or any(r is not None and r.done() for r in readers)

    def _incomplete(self, reason: FailureReason, text: str) -> Failure:
        lost = bool(self._gone)
        if lost:
            text = f"{text}: {next(iter(self._gone.values()))}"
        return Failure(reason, text, again=lost or self._not_now, lost=lost)

    def _exhausted(self) -> Failure | None:
        """Say what is wrong if nothing more can come; decision 9: hints alone do not count."""
        assembler = self.assembler
        if self._pending or any(not task.done() for task in self._readers.values()):
            return None
        may_grow = bool(assembler.unlisted) or assembler.extent is None
        may_attest = any(True for _ in assembler.unattested())
        if not self._manifest_ended and (may_grow or may_attest):
            return None
        if (gap := next(assembler.gaps(), None)) is not None:
            more = sum(other.objects for other in assembler.gaps()) - gap.objects
            rest = f", and {more} more Objects" if more else ""
            return self._incomplete(FailureReason.INCOMPLETE, f"{gap} did not come{rest}")
        if unlisted := assembler.unlisted:
            text = f"blocks {unlisted[0]} to {unlisted[-1]} are in no segment that can be used"
            return self._incomplete(FailureReason.INCOMPLETE, text)
        if may_attest:
            gap = next(assembler.unattested())
            text = f"the manifest ended without the digests of {gap}"
            return self._incomplete(FailureReason.UNATTESTED, text)
        text = "the manifest lists nothing that is wanted"
        return self._incomplete(FailureReason.INCOMPLETE, text)

    # -- the manifest ----------------------------------------------------------------------------

    async def _read_manifests(self, subscription: Subscription, track: bytes) -> None:
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                version = item.location.group
                if version <= self.assembler.version:
                    continue
                manifest = await _check_manifest(item.payload, track, self.name, version, self._job)
                if (failure := self._accept(manifest, version)) is not None:
                    self._fail(failure)
                    return
        except BadManifest as exc:
            self._fail(Failure(FailureReason.CONTRADICTED, f"manifest refused: {exc}"))
            return
        except MoqtError as exc:
            self._lost(exc)
            return
        self._note_end(None, subscription)
        self._manifest_ended = True
        self._wake.set()

    def _note_end(self, track: DataTrack | None, subscription: Subscription) -> None:
        """Note what the end of a subscription says of the publication or of who serves it."""
        ended = subscription.ended
        if ended is None:
            return
        name = "manifest" if track is None else str(track)
        match End.of(ended.code, ended.reason):
            case End.ABANDONED:
                self._fail(Failure(FailureReason.ABANDONED, f"{name} was {ended.reason}"))
            case End.LOST:
                self._gone[track] = f"{name} broke off: {ended.reason or repr(ended.code)}"

    def _accept(self, manifest: Manifest, version: int) -> Failure | None:
        assembler = self.assembler
        try:
            events = assembler.accept(manifest, version)
        except Contradicted as exc:
            return Failure(FailureReason.CONTRADICTED, str(exc))
        except NotFound as exc:
            used = assembler.any_ready
            return Failure(FailureReason.INCOMPLETE if used else FailureReason.REFUSED, str(exc))
        if events:
            self._progress_at = self._loop.time()
            log.debug(LogEvent.MANIFEST_ACCEPTED, publication=str(self.name), version=version)
        if not self._sink_began and (extent := assembler.extent) is not None:
            self._sink_began = True  # also if it fails: it may have begun something
            try:
                self._sink.begin(self._job.expected.descriptor, len(extent))
            except ConfigError as exc:
                return Failure(FailureReason.UNUSABLE, str(exc))
        for event in events:
            self._tell(event)
        if self._sink_began:
            for early in assembler.release():
                self._take(early.track, early.layer, early.block, early.payload)
        self._wake.set()
        return None

    # -- data tracks -----------------------------------------------------------------------------

    def _start_eagerly(self, conn: MoqtConnection, group: "Tasks") -> None:
        for name in ("k.raw.s0", "v.raw.s0"):
            track = DataTrack.parse(name)
            self._readers[track] = group.start(self._read(conn, track))

    def _drop_readers_in_vain(self) -> None:
        """End what was begun eagerly and is not wanted, and have begun anew what ended."""
        for track, task in list(self._readers.items()):
            if task.done() or self.assembler.plan(track) is None:
                task.cancel()
                del self._readers[track]

    def _start_readers(self, conn: MoqtConnection, group: "Tasks") -> None:
        """Subscribe to tracks of which something is missing, of so many segments at once."""
        if not self._sink_began:
            return
        active = {track.segment for track, task in self._readers.items() if not task.done()}
        for plan in self.assembler.plans:
            if self.assembler.is_segment_ready(plan.segment):
                continue
            for track in plan.tracks:
                if track in self._readers:
                    continue
                if len(active | {plan.segment}) > self._settings.segments_at_once:
                    return
                active.add(plan.segment)
                self._readers[track] = group.start(self._read(conn, track))

    async def _read(self, conn: MoqtConnection, track: DataTrack) -> None:
        """Read one track until nothing is missing of it, or nothing more comes."""
        try:
            for _ in range(1 + self._settings.resubscribe):
                if not await self._read_once(conn, track):
                    break
        except RequestRejected as exc:
            self._not_now |= exc.code in NOT_NOW
            log.debug(LogEvent.REQUEST_REFUSED, track=str(track), reason=str(exc))
        except MoqtError as exc:
            self._lost(exc)
        except TimeoutError:
            pass  # SUBSCRIBE was not answered: what it would have brought stays missing
        finally:
            self._wake.set()

    async def _read_once(self, conn: MoqtConnection, track: DataTrack) -> bool:
        """Subscribe once; return whether it is worth trying again."""
        first, blocks, plan = Location(0, 0), 0, self.assembler.plan(track)
        if plan is not None:
            blocks = self.assembler.entry(track)[0].blocks
            if (missing := self._first_missing(track)) is None:
                return False
            first = missing
        subscription = await conn.subscribe(
            self.name.track(track),
            location_filter=LocationFilter.NEXT_OBJECT,
            fill=_fill(first, plan, self._job.expected.descriptor.layers),
            range_filters=_block_filter(conn, plan, blocks),
            timeout_s=self._settings.request_timeout_s,
        )
        self._gone.pop(track, None)
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue  # what announces an end is a hint (decision 9)
                group, number = item.location
                if not self._take(track, group, number, item.payload):
                    return False  # ahead of the manifest and out of room
                if self._pending > self._settings.pending_octets:
                    await self._examined_down_to(self._settings.pending_octets // 2)
        finally:
            subscription.cancel()
        await self._examined_down_to(0)
        if self.assembler.plan(track) is None or self._first_missing(track) is None:
            return False
        self._note_end(track, subscription)
        return self._failure is None

    def _first_missing(self, track: DataTrack) -> Location | None:
        """Return where something is missing first, in a layer of which not all was rejected."""
        for gap in self.assembler.gaps(track):
            width = gap.last_block - gap.first_block + 1
            rejected = Counter(
                layer
                for of, layer, block in self._rejected
                if of == track and gap.first_block <= block <= gap.last_block
            )
            for layer in range(gap.first_layer, gap.last_layer + 1):
                if rejected[layer] < width:
                    return Location(layer, gap.first_block)
        return None

    async def _examined_down_to(self, octets: int) -> None:
        """Wait until no more than that is under examination in threads."""
        while self._pending > octets:
            self._room.clear()
            await self._room.wait()

    # -- Objects ---------------------------------------------------------------------------------

    def _take(self, track: DataTrack, layer: int, block: int, payload: bytes) -> bool:
        """Examine and place one Object, or see to it; return False if there is no room yet."""
        match self.assembler.expects(track, layer, block):
            case Expected.EXAMINE:
                pass
            case Expected.EARLY:
                return self.assembler.hold(track, layer, block, payload)
            case _:
                return True
        if self._closed or self._failure is not None:
            return True
        settings = self._settings
        entry, descriptor = self.assembler.entry(track)
        work = partial(
            examine,
            payload,
            track=track,
            layer=layer,
            block=block,
            entry=entry,
            descriptor=descriptor,
            codecs=self._job.codecs,
            max_data_octets=self._job.expected.max_data_octets,
        )
        large = settings.large_octets if track.codec == "raw" else LARGE_ENCODED_OCTETS
        if len(payload) < large:
            try:
                examined = work()
            except BadObject as exc:
                self._reject(track, layer, block, exc)
            else:
                self._place(track, layer, block, examined)
            return True
        self._pending += len(payload)
        future = self._loop.run_in_executor(self._job.pool, work)
        future.add_done_callback(partial(self._examined, track, layer, block, len(payload)))
        return True

    def _examined(
        self,
        track: DataTrack,
        layer: int,
        block: int,
        octets: int,
        future: "asyncio.Future[Examined]",
    ) -> None:
        """Go on with an Object that was examined in a thread."""
        self._pending -= octets
        try:
            if future.cancelled() or self._closed:
                return
            error = future.exception()
            if error is None:
                self._place(track, layer, block, future.result())
            elif isinstance(error, BadObject):
                self._reject(track, layer, block, error)
            else:
                self._crash = error
        except Exception as exc:
            # In a callback nobody would learn of it; the supervisor raises it.
            self._crash = exc
        finally:
            self._room.set()
            if not self._pending or self._crash is not None:
                self._wake.set()

    def _place(self, track: DataTrack, layer: int, block: int, examined: Examined) -> None:
        assembler = self.assembler
        try:
            if not assembler.admit(track, layer, block, examined.digest, examined.octets):
                return
        except BadObject as exc:
            self._reject(track, layer, block, exc)
            return
        try:
            self._sink.place(
                track.component, layer, assembler.position(track, block), examined.tensor
            )
        except (ValueError, ConfigError) as exc:
            self._fail(Failure(FailureReason.UNUSABLE, f"{track} layer {layer}: {exc}"))
            return
        self._progress_at = self._loop.time()
        for event in assembler.placed(track, layer, block):
            self._tell(event)

    def _reject(self, track: DataTrack, layer: int, block: int, why: BadObject) -> None:
        self._tell(self.assembler.reject(track, layer, block, why))

    def _tell(self, event: Event) -> None:
        if isinstance(event, ObjectRejected):
            self._rejected.add((event.track, event.layer, event.block))
            log.warning(
                LogEvent.OBJECT_REJECTED,
                track=str(event.track),
                layer=event.layer,
                block=event.block,
                reason=str(event.reason),
                text=event.text,
            )
            rejected = self.assembler.summary().rejected
            if rejected >= self._settings.max_rejected:
                text = f"{rejected} Objects were rejected"
                self._fail(Failure(FailureReason.INCOMPLETE, text))
        elif isinstance(event, SegmentComplete):
            for track, task in self._readers.items():
                if track.segment == event.segment:
                    task.cancel()
            self._wake.set()
        self._job.tell(event)

    def abandon(self) -> None:
        """Let go of what was retrieved; nothing more will be placed."""
        self._closed = True
        if self._sink_began:
            self._sink_began = False
            self._sink.abandon()

    # -- ends ------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake.set()

    def _lost(self, error: MoqtError) -> None:
        text = f"connection lost: {error}"
        self._fail(Failure(FailureReason.UNREACHABLE, text, again=True, lost=True))

    async def _close_sink(self) -> Failure | None:
        # In a thread, since a file takes as long as its disk.
        done = self._loop.run_in_executor(self._job.pool, self._sink.done)
        try:
            await asyncio.shield(done)
        except ConfigError as exc:
            return Failure(FailureReason.UNUSABLE, str(exc))
        except asyncio.CancelledError:
            await asyncio.wait([done])  # a sink is used by one thread at a time
            raise
        return None


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


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def connection_lost(conn: MoqtConnection) -> Failure:
    """Return the failure that a closed session is."""
    closed = conn.closed
    why = "" if closed is None else closed.reason or f"{closed.code!r}"
    return Failure(FailureReason.UNREACHABLE, f"connection lost: {why}", again=True, lost=True)


def _fill(first: Location, plan: SegmentPlan | None, layers: int) -> LocationFilter:
    """Return what to be filled with, from the first Object that is missing on."""
    if plan is None or plan.layers.stop == layers:
        return LocationFilter.absolute_start(*first)
    return LocationFilter.group_end(*first, plan.layers.stop - 1)


def _block_filter(
    conn: MoqtConnection, plan: SegmentPlan | None, blocks: int
) -> tuple[RangeFilter, ...]:
    """Return a filter for the wanted blocks, if the peer takes one (KVCS Section 5.3)."""
    setup = conn.session.peer_setup
    if plan is None or len(plan.blocks) == blocks or setup is None or not setup.max_filter_ranges:
        return ()  # what is not wanted is discarded on arrival
    ranges = ((plan.blocks.start, plan.blocks.stop - 1),)
    return (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges),)
