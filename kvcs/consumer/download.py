"""Downloading one publication: its manifest, its tracks, its Objects into the sink.

Shell, as :mod:`kvcs.consumer.retrieval` is, which finds the publication and the connections. All
state belongs to the event loop.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import structlog

from kvcs.audit import AuditEvent, Outcome, note_publication
from kvcs.consumer.assembler import Assembler, Contradicted, Expected
from kvcs.consumer.errands import (
    Bad,
    Dropped,
    Errand,
    Misplaced,
    Placed,
    Placing,
    Report,
    TimedOut,
)
from kvcs.consumer.events import (
    Event,
    FailureReason,
    Gap,
    ObjectRejected,
    SegmentComplete,
    SegmentDiffers,
)
from kvcs.consumer.examining import Examined, Examiner
from kvcs.consumer.failures import Failure, lacking
from kvcs.consumer.fetching import Awaited, cut
from kvcs.consumer.filling import fill
from kvcs.consumer.intake import Intake
from kvcs.consumer.joining import CannotJoin
from kvcs.consumer.lanes import Lane, Lanes
from kvcs.consumer.opening import (
    Job,
    Opened,
    Refused,
    earlier_manifests,
    open_publication,
    read_manifest,
)
from kvcs.consumer.ranges import runs
from kvcs.consumer.recovery import recompute_s
from kvcs.consumer.sections import SectionSource
from kvcs.consumer.selection import SegmentPlan
from kvcs.consumer.spreading import (
    Dealer,
    Rectangle,
    Share,
    block_filters,
    fill_from,
    first_missing,
    missing_of,
    not_asked_for,
    worth_asking,
)
from kvcs.consumer.tasks import Tasks, set_within, tasks
from kvcs.consumer.waves import LAST, clipped, first_wave, stop_of
from kvcs.errors import UNOPENED, BadManifest, BadObject, ConfigError, NotFound
from kvcs.profile.ending import End
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST_COSE, DataTrack, PublicationName
from kvcs.store.shared import SharedSink
from kvcs.store.sink import GrowingSink
from kvcs.telemetry import LogEvent
from kvcs.trust.sealing import Cover
from moqt.aio import Subscription
from moqt.codepoints import ObjectStatus, RangeMarkerKind, RequestErrorCode, StreamErrorCode
from moqt.errors import MoqtError, RequestRejected, SessionClosed
from moqt.location import Location
from moqt.session.events import FetchEnded, ObjectReceived, RangeMarked, SubscriptionEnded
from moqt.wire.filters import RangeFilter

log = structlog.get_logger("kvcs.consumer")

#: Refusals that say nothing of the track, only that it cannot be had here and now.
NOT_NOW = (
    RequestErrorCode.INTERNAL_ERROR,
    RequestErrorCode.TIMEOUT,
    RequestErrorCode.GOING_AWAY,
    RequestErrorCode.EXCESSIVE_LOAD,
)


class Download:
    """The retrieval of one publication, over connections to one relay or producer after the other.

    Args:
        name: The publication.
        job: What is shared with the retrieval that it is part of.
        follows: The download of another publication that this one is to go on for; see
            :meth:`joins`.

    Attributes:
        name: The publication.
        job: As given.
        assembler: How far it is.
        manifest_track: The track its manifests come on; None before the first.
    """

    def __init__(self, name: PublicationName, job: Job, follows: "Download | None" = None) -> None:
        expected, settings = job.expected, job.settings
        self.name = name
        # One that is known to go on otherwise than the prompt is not followed there.
        parts = expected.wanted_blocks is not None
        wish = replace(job.wish, follow=False) if parts else job.wish
        self.assembler: Assembler = Assembler(
            name,
            wish=wish,
            codecs=job.codecs,
            signed=False,  # until its manifest track is known
            blocks=expected.wanted_of(name),
            known_blocks=expected.known_of(name),
            early_octets=settings.early_octets,
            follows=None if follows is None else follows.assembler,
        )
        self.job = job
        self._settings = settings
        self._sink = job.sink
        self._loop = asyncio.get_running_loop()
        self.manifest_track: bytes | None = None
        self._sink_began = False
        self._places = 0  # blocks that the sink has been told of
        self._is_growing = wish.follow
        self._block_keys: Sequence[bytes] = expected.block_keys
        self._follows = follows
        self._intake = Intake(
            job.pool, settings, crashed=self._crashed, idle=lambda: self._wake.set()
        )
        self._examiners: dict[DataTrack, Examiner] = {}
        self._dealer = Dealer()
        self._reset()

    def _reset(self) -> None:
        """Begin anew, over other connections."""
        self._wake = asyncio.Event()
        self._failure: Failure | None = None
        self._crash: BaseException | None = None
        self._readers: dict[DataTrack, dict[Share, asyncio.Task[None]]] = {}
        """Who reads what, or has read it for as long as anything came."""

        self._may_begin = False  # the connections that are to be read over are there
        self._manifest_ended = False
        self._earlier: dict[int, asyncio.Task[None]] = {}
        """Who fetches which earlier version of the manifest, or has tried to."""

        self._gone: dict[Share | None, str] = {}
        """Shares whose publisher was lost, and how; None is the manifest."""

        self._rejected: set[tuple[DataTrack, int, int]] = set()
        """What would come as bad again over these connections."""

        self._not_now = False  # a track was refused that may be had later
        self._cannot_fetch = False  # they do not know FETCH
        self._wave: int | None = None  # None: nothing has been asked for
        self._waves: dict[Share, int | None] = {}  # in which each share was asked for last
        self._closed = False
        self._progress_at = self._loop.time()

    def joins(self, opened: Opened) -> Failure | None:
        """Go on for the publication that it follows; say why not, if it cannot.

        From then on that one must not be run or abandoned any more.
        """
        assert self._follows is not None, "it is to follow one"
        self._note_track(opened)
        before, self._follows = self._follows, None
        self._sink_began, self._places = before.has_begun, before.places
        if (failure := self._accept(opened.manifest, opened.version)) is None:
            before.leave_sink()
        return failure

    @property
    def has_begun(self) -> bool:
        """Whether the sink was told to begin, and is this download's."""
        return self._sink_began

    @property
    def places(self) -> int:
        """Blocks that the sink was told of."""
        return self._places

    def leave_sink(self) -> None:
        """Leave the sink as it is to another download."""
        self._closed, self._sink_began = True, False

    async def run(self, lanes: Lanes, opened: Opened | None) -> Failure | None:
        """Retrieve what is missing over ``lanes``; return None when everything is there.

        Args:
            lanes: The connections.
            opened: The publication's manifest, if it has been opened there already.

        Raises:
            Refused: If the manifest cannot be used.
        """
        self._reset()
        self._lanes = lanes
        try:
            async with tasks() as group:
                if opened is None:
                    if self.job.is_eager and self.assembler.manifest is None:
                        self._start_eagerly(group)
                    opened = await open_publication(
                        lanes.lead, self.name, self.job, track=self.manifest_track
                    )
                if self.manifest_track not in (None, opened.track):
                    raise Refused("signed at one relay, not signed at another")
                self._note_track(opened)
                if (failure := self._accept(opened.manifest, opened.version)) is not None:
                    return failure
                if self._drop_readers_in_vain():
                    # What they brought is counted before anything is asked for again.
                    await self._intake.down_to(0)
                group.start(self._follow(opened))
                group.start(self._begin_when_settled())
                if (failure := await self._supervise(group)) is not None:
                    return failure
            return await self._close_sink()
        finally:
            self._closed = True
            if opened is not None:
                opened.subscription.cancel()

    async def fill(self, source: SectionSource) -> Failure | None:
        """Retrieve what is missing from a block service; return None when everything is there."""
        self._reset()
        try:
            failure = await fill(source, self.assembler, self.job, self._judge)
            if self._failure is not None or self.assembler.is_complete:
                return self._failure or await self._close_sink()
            return failure
        finally:
            self._closed = True

    def _note_track(self, opened: Opened) -> None:
        self.manifest_track = opened.track
        self.assembler.signed = opened.track == MANIFEST_COSE

    async def _begin_when_settled(self) -> None:
        """Have data wait for the connections that are still being made, but not for long."""
        settings = self._settings
        wait_s = settings.connect_timeout_s if settings.processes else settings.spread_wait_s
        await set_within(self._lanes.settled, wait_s)
        self._may_begin = True
        self._progress_at = self._loop.time()
        self._wake.set()

    async def _supervise(self, group: Tasks) -> Failure | None:
        while True:
            self._wake.clear()
            if self._crash is not None:
                raise self._crash
            if self.assembler.is_complete:
                return None
            if self._failure is not None and not self._intake.pending:
                return self._failure
            if not self._may_begin:  # which it soon may
                await self._wake.wait()
                continue
            if self._failure is None:
                self._fetch_digests(group)
                self._start_readers(group)
                if (failure := self._exhausted()) is not None:
                    return failure
            if self.assembler.is_idle:  # nobody owes us anything
                self._progress_at = self._loop.time()
                await set_within(self._wake, self._settings.stall_timeout_s)
                continue
            stall_s = self._stall_s
            left = self._progress_at + stall_s - self._loop.time()
            if left <= 0:
                return Failure(FailureReason.STALLED, f"nothing new came for {stall_s:g} s")
            if self._is_broken_off and not self._intake.pending:
                # What still comes on other tracks is taken first.
                left = self._progress_at + self._settings.again_s - self._loop.time()
                if left <= 0:
                    return self._incomplete(FailureReason.INCOMPLETE, "not everything came")
            await set_within(self._wake, left)

    @property
    def _stall_s(self) -> float:
        """How long to wait for anything new: never longer than computing all of it takes."""
        settings, stall_s = self._settings, self._settings.stall_timeout_s
        if settings.recompute_tokens_per_s is None:
            return stall_s
        return min(stall_s, recompute_s(self.job.tokens_left(self.assembler), settings))

    @property
    def _is_broken_off(self) -> bool:
        """Whether a track has lost its publisher and is not being asked for again already."""
        readers = dict(self._shares())
        return None in self._gone or any(
            share in readers and readers[share].done() for share in self._gone if share is not None
        )

    def _incomplete(self, reason: FailureReason, text: str) -> Failure:
        lost = bool(self._gone)
        if lost:
            text = f"{text}: {next(iter(self._gone.values()))}"
        return Failure(reason, text, again=lost or self._not_now, lost=lost)

    def _exhausted(self) -> Failure | None:
        """Say what is wrong if nothing more can come; decision 9: hints alone do not count."""
        assembler = self.assembler
        busy = [task for _, task in self._shares()] + list(self._earlier.values())
        if self._intake.pending or any(not task.done() for task in busy):
            return None
        may_grow = bool(assembler.unlisted) or assembler.extent is None or assembler.is_following
        may_grow |= any(self._is_awaited(plan) for plan in assembler.plans)
        may_attest = any(True for _ in assembler.unattested())
        if not self._manifest_ended and (may_grow or may_attest):
            return None
        return self._incomplete(*lacking(assembler))

    # -- the manifest ----------------------------------------------------------------------------

    async def _follow(self, opened: Opened) -> None:
        """Read the manifests, over another connection when the one they come on is lost."""
        while True:
            try:
                await self._read_manifests(opened.subscription, opened.track)
                return
            except SessionClosed as exc:
                lost = exc
            except MoqtError as exc:
                self._lost(exc)
                return
            finally:
                opened.subscription.cancel()
            again = await self._open_again()
            if again is None:
                self._lost(lost)
                return
            opened = again
            if (failure := self._accept(opened.manifest, opened.version)) is not None:
                self._fail(failure)
                return

    async def _open_again(self) -> Opened | None:
        """Open the manifest over a connection that is left; None: there is none.

        Raises:
            Refused: If the manifest cannot be used there.
        """
        while (lead := await self._lanes.next_lead()) is not None:
            try:
                return await open_publication(lead, self.name, self.job, track=self.manifest_track)
            except Refused:
                if lead.closed is None:
                    raise
        return None

    async def _read_manifests(self, subscription: Subscription, track: bytes) -> None:
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                version = item.location.group
                if version <= self.assembler.version:
                    continue
                manifest = await read_manifest(item, track, self.name, self.job)
                if manifest is None:
                    continue
                if (failure := self._accept(manifest, version)) is not None:
                    self._fail(failure)
                    return
        except BadManifest as exc:
            self._fail(self._manifest_refused(exc))
            return
        self._note_end(None, subscription.ended)
        self._manifest_ended = True
        # What is appended cannot be counted (decision 9): that it has ended is only announced.
        ended, listed = subscription.ended, self.assembler.manifest
        is_over = ended is not None and End.of(ended.code, ended.reason) is End.ENDED
        if is_over and listed is not None and listed.complete:
            self.assembler.stop()
        self._wake.set()

    def _fetch_digests(self, group: Tasks) -> None:
        """Fetch earlier versions whose digests the newest one leaves out, each once."""
        for versions in runs(self.assembler.digests_in - self._earlier.keys()):
            task = group.start(self._fetch_versions(versions))
            self._earlier.update(dict.fromkeys(versions, task))

    async def _fetch_versions(self, versions: range) -> None:
        """Fetch some versions. What does not come, a later version lists again."""
        track = self.manifest_track
        assert track is not None
        lead = self._lanes.lead
        try:
            earlier = earlier_manifests(lead, self.name, track, versions, self.job)
            async with aclosing(earlier):
                async for manifest in earlier:
                    self._tell_of_manifest(self.assembler.supply(manifest))
        except BadManifest as exc:
            self._fail(self._manifest_refused(exc))
        except Contradicted as exc:
            self._fail(Failure(FailureReason.CONTRADICTED, f"manifest refused: {exc}"))
        except (MoqtError, TimeoutError) as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=track.decode(), reason=str(exc))
        finally:
            self._wake.set()

    def _manifest_refused(self, why: BadManifest) -> Failure:
        """Say what a version that cannot be this publication's means.

        Where manifests are signed, the producer did not send it: whoever is asked lies, and what
        was told before is as good as its signature. Where they are not, it may all be a lie.
        """
        text = f"manifest refused: {why}"
        if not self.assembler.signed:
            return Failure(FailureReason.CONTRADICTED, text)
        self.job.proven_bad(self._lanes.lead, self.name, text)
        return Failure(FailureReason.INCOMPLETE, text)

    def _tell_of_manifest(self, events: Iterable[Event]) -> None:
        """Tell what follows from a manifest: layers are attested, or Objects turn out to be bad.

        Those were placed before their digests were listed, perhaps of another relay. So they are
        asked for here; what comes as bad again is known at once then, and not asked for a third
        time.
        """
        for event in events:
            self._tell(event)
            if isinstance(event, ObjectRejected):
                self._rejected.discard((event.track, event.layer, event.block))

    def _note_end(self, share: Share | None, ended: SubscriptionEnded | FetchEnded | None) -> None:
        """Note what the end of a request says of the publication or of who serves it."""
        name = "manifest" if share is None else str(share.track)
        match ended:
            case SubscriptionEnded(code=code, reason=reason):
                match End.of(code, reason):
                    case End.ABANDONED:
                        self._fail(Failure(FailureReason.ABANDONED, f"{name} was {reason}"))
                    case End.LOST:
                        self._gone[share] = f"{name} broke off: {reason or repr(code)}"
            case FetchEnded(complete=False, code=code):
                # Who does not know what became of something has not lost it.
                if code != StreamErrorCode.UNKNOWN_OBJECT_STATUS:
                    self._gone[share] = f"{name} broke off: {code!r}"

    def _accept(self, manifest: Manifest, version: int) -> Failure | None:
        assembler = self.assembler
        try:
            events = assembler.accept(manifest, version)
            events += self._confirm()
        except Contradicted as exc:
            return Failure(FailureReason.CONTRADICTED, str(exc))
        except CannotJoin as exc:
            return Failure(FailureReason.REFUSED, str(exc))
        except NotFound as exc:
            used = assembler.any_ready
            return Failure(FailureReason.INCOMPLETE if used else FailureReason.REFUSED, str(exc))
        if events:
            self._progress_at = self._loop.time()
            log.debug(LogEvent.MANIFEST_ACCEPTED, publication=str(self.name), version=version)
        try:
            self._make_room()
        except ConfigError as exc:
            return Failure(FailureReason.UNUSABLE, str(exc))
        self._tell_of_manifest(events)
        if self._sink_began:
            for early in assembler.release():
                self._take(early.track, early.layer, early.block, early.payload, early.cover)
        self._wake.set()
        return None

    def _make_room(self) -> None:
        """Tell the sink what is to come: all of it at first, then what is appended."""
        if (extent := self.assembler.extent) is None:
            return
        if not self._sink_began:
            self._sink_began = True  # also if it fails: it may have begun something
            self._places = len(extent)
            self._sink.begin(self.job.expected.descriptor, self._places)
        elif len(extent) > self._places:
            assert isinstance(self._sink, GrowingSink), "or nothing would be followed"
            self._places = len(extent)
            self._sink.grow(self._places)

    # -- a context that grows --------------------------------------------------------------------

    def extend(self, block_keys: Sequence[bytes]) -> None:
        """Hold what is appended against more Block Keys of the caller's."""
        self._block_keys = block_keys
        if self.assembler.manifest is None or self._closed or self._failure is not None:
            return
        try:
            events = self._confirm()
        except Contradicted as exc:
            self._fail(Failure(FailureReason.CONTRADICTED, str(exc)))
            return
        for event in events:
            self._tell(event)
        self._wake.set()

    def stop(self) -> None:
        """Want nothing that is not listed yet."""
        self.assembler.stop()
        self._wake.set()

    def _confirm(self) -> list[Event]:
        return self.assembler.confirm(self._block_keys) if self._is_growing else []

    # -- data tracks -----------------------------------------------------------------------------

    def _shares(self) -> Iterator[tuple[Share, asyncio.Task[None]]]:
        """Yield what was asked for, and who reads it or has read it."""
        for readers in self._readers.values():
            yield from readers.items()

    def _start_reader(self, lane: Lane, share: Share, group: Tasks) -> None:
        self._waves[share] = self._wave
        reader = group.start(self._read(lane, share))
        self._readers.setdefault(share.track, {})[share] = reader

    def _start_eagerly(self, group: Tasks) -> None:
        for name in ("k.raw.s0", "v.raw.s0"):
            share = Share(DataTrack.parse(name), None)
            self._start_reader(self._lanes.for_data[0], share, group)

    def _drop_readers_in_vain(self) -> bool:
        """End what was begun eagerly and is not wanted, and have begun anew what ended.

        Returns whether there was anything.
        """
        in_vain = [
            (share, task)
            for share, task in self._shares()
            if task.done() or self.assembler.plan(share.track) is None
        ]
        for share, task in in_vain:
            task.cancel()
            del self._readers[share.track][share]
        return bool(in_vain)

    def _start_readers(self, group: Tasks) -> None:
        """Ask for tracks of which something is missing, of so many segments at once."""
        if not self._sink_began:
            return
        if self._wave is None:
            plans = (plan for plan in self.assembler.plans if plan.tracks)
            fetched = (plan for plan in plans if self._is_fetched(Share(plan.tracks[0], None)))
            left = sum(not self.assembler.is_segment_ready(plan.segment) for plan in fetched)
            self._wave = first_wave(left, self._settings.segments_at_once)
        while not self._start_wave(group, self._wave) and self._wave < LAST:
            self._wave += 1

    def _start_wave(self, group: Tasks, wave: int) -> bool:
        """Ask for what nobody is asked for yet; return whether there was anything."""
        for share, task in list(self._shares()):
            asked_in = self._waves.get(share)
            if task.done() and asked_in is not None and asked_in < wave:
                del self._readers[share.track][share]  # of later layers nobody has asked it
        lanes = self._lanes.for_data
        may_cut = all(lane.max_ranges for lane in lanes)
        active = {share.track.segment for share, task in self._shares() if not task.done()}
        has_begun = False
        for plan in self.assembler.plans:
            if self.assembler.is_segment_ready(plan.segment) or self._is_awaited(plan):
                continue
            for track in plan.tracks:
                asked = self._readers.get(track, {})
                for blocks in list(not_asked_for(plan.blocks, asked)):
                    if self._is_in_later_wave(Share(track, blocks)):
                        continue
                    has_begun = True
                    if len(active | {plan.segment}) > self._settings.segments_at_once:
                        return has_begun
                    active.add(plan.segment)
                    dealt = self._dealer.deal(track, blocks, len(lanes), may_cut=may_cut)
                    for number, share in dealt:
                        self._start_reader(lanes[number], share, group)
        return has_begun

    def _is_in_later_wave(self, share: Share) -> bool:
        """Whether of a share that is fetched nothing is missing that this wave asks for."""
        plan = self.assembler.plan(share.track)
        if plan is None or self._wave is None or not self._is_fetched(share):
            return False
        gaps = clipped(self.assembler.gaps(share.track), stop_of(plan.layers, self._wave))
        return not any(missing_of(share, gaps))

    def _gaps(self, share: Share) -> Iterator[Gap]:
        """Yield what is missing of the track of a share and was asked for in its wave."""
        gaps, plan = self.assembler.gaps(share.track), self.assembler.plan(share.track)
        wave = self._waves.get(share, self._wave)
        if plan is None or wave is None or not self._is_fetched(share):
            return gaps
        return clipped(gaps, stop_of(plan.layers, wave))

    def _is_awaited(self, plan: SegmentPlan) -> bool:
        """Whether a segment is asked for once all of it has been published."""
        return self._settings.fetch == "always" and not self.assembler.is_published(plan.segment)

    async def _read(self, lane: Lane, share: Share) -> None:
        """Read a share until nothing is missing of it, or nothing more comes."""
        try:
            for _ in range(1 + self._settings.resubscribe):
                if not await self._read_once(lane, share):
                    break
        except RequestRejected as exc:
            self._not_now |= exc.code in NOT_NOW
            log.debug(LogEvent.REQUEST_REFUSED, track=str(share.track), reason=str(exc))
        except MoqtError as exc:
            if lane.is_over and not self._lanes.is_lost:
                # As if it had never been asked for: those that are left are asked for the rest.
                self._readers.get(share.track, {}).pop(share, None)
                self._gone.pop(share, None)
            else:
                self._lost(exc)
        except TimeoutError:
            pass  # SUBSCRIBE was not answered: what it would have brought stays missing
        finally:
            self._wake.set()

    async def _read_once(self, lane: Lane, share: Share) -> bool:
        """Ask for what is missing of a share; return whether it is worth trying again."""
        if self._is_fetched(share):
            try:
                return await self._fetch(lane, share)
            except (RequestRejected, TimeoutError) as exc:
                code = exc.code if isinstance(exc, RequestRejected) else None
                if self._settings.fetch == "always" or code in NOT_NOW:
                    raise
                self._cannot_fetch |= code == RequestErrorCode.NOT_SUPPORTED
                log.debug(LogEvent.REQUEST_REFUSED, track=str(share.track), reason=f"FETCH: {exc}")
        return await self._subscribe(lane, share)

    def _is_fetched(self, share: Share) -> bool:
        """Whether a share is asked for with FETCH: nothing of it is still to be published."""
        fetch, plan = self._settings.fetch, self.assembler.plan(share.track)
        if fetch == "never" or self._cannot_fetch or plan is None:
            return False
        return fetch == "always" or self.assembler.is_published(plan.segment)

    async def _fetch(self, lane: Lane, share: Share) -> bool:
        """Fetch what is missing of a share, and nothing else if the peer lets us (Section 5.3)."""
        track, assembler = share.track, self.assembler
        blocks = assembler.entry(track)[0].blocks
        missing = worth_asking(share, self._gaps(share), self._rejected)
        if not (bands := cut(missing, blocks, max_ranges=lane.max_ranges)):
            return False
        errands = [
            Errand(
                track=self.name.track(track),
                past=band.location_filter,
                range_filters=band.range_filters(blocks),
                is_live=False,
                timeout_s=self._settings.request_timeout_s,
                placing=self._placing(share, band.missing) if lane.is_apart else None,
            )
            for band in bands
        ]
        pace = self._lanes.pace
        pace.begin(self._loop.time(), assembler.octets)
        try:
            async with tasks() as group:
                fetching = [
                    group.start(self._bring(lane, share, errand, Awaited(band.missing)))
                    for errand, band in zip(errands, bands, strict=True)
                ]
                await asyncio.wait(fetching)
        finally:
            pace.end(self._loop.time(), assembler.octets)
        if self._first_missing(share) is None:
            return False
        for task in fetching:
            self._note_end(share, task.result())
        return self._failure is None

    async def _subscribe(self, lane: Lane, share: Share) -> bool:
        """Subscribe to a share, with a fill from the first Object that is missing (Section 5.2)."""
        track, plan = share.track, self.assembler.plan(share.track)
        first, filters, missing = Location(0, 0), tuple[RangeFilter, ...](), tuple[Rectangle, ...]()
        if plan is not None:
            if (found := self._first_missing(share)) is None:
                return False
            first = found
            blocks = self.assembler.entry(track)[0].blocks
            filters = block_filters(share, blocks, may_cut=lane.max_ranges > 0)
            missing = tuple(missing_of(share, self.assembler.gaps(track)))
        errand = Errand(
            track=self.name.track(track),
            past=fill_from(first, plan, self.job.expected.descriptor.layers),
            range_filters=filters,
            timeout_s=self._settings.request_timeout_s,
            placing=self._placing(share, missing) if lane.is_apart else None,
        )
        ended = await self._bring(lane, share, errand)
        if self.assembler.plan(track) is None or self._first_missing(share) is None:
            return False
        self._note_end(share, ended)
        return ended is not None and self._failure is None

    async def _bring(
        self, lane: Lane, share: Share, errand: Errand, awaited: Awaited | None = None
    ) -> SubscriptionEnded | FetchEnded | None:
        """Run an errand to its end; return how it ended, None if it was given up.

        Args:
            lane: The connection.
            share: What it is for.
            errand: The request.
            awaited: What is not in it came in excess, and is not looked at. None: whatever comes
                may be wanted.
        """
        bringing = await lane.run(errand)
        self._gone.pop(share, None)
        timed_out = False
        try:
            async for item in bringing:
                if isinstance(item, ObjectReceived):
                    # What announces an end is a hint (decision 9).
                    if item.status is not ObjectStatus.NORMAL:
                        continue
                    group, number = item.location
                    if awaited is not None and (group, number) not in awaited:
                        self.assembler.count_excess()
                        continue
                    cover = Cover(item.publisher_priority, item.properties)
                    if not self._take(share.track, group, number, item.payload, cover):
                        return None  # ahead of the manifest and out of room
                    await self._intake.keep_bound()
                elif isinstance(item, RangeMarked):
                    timed_out |= item.kind is RangeMarkerKind.TIMED_OUT
                elif isinstance(item, TimedOut):
                    timed_out = True
                elif isinstance(item, Report):
                    self._note(share.track, item, awaited)
        finally:
            await bringing.stop()
        await self._intake.down_to(0)
        ended = bringing.ended
        if timed_out and isinstance(ended, FetchEnded):
            return replace(ended, complete=False, code=StreamErrorCode.DELIVERY_TIMEOUT)
        return ended

    def _placing(self, share: Share, missing: tuple[Rectangle, ...]) -> Placing:
        """Return what another process has to know to place what is missing of a share."""
        assembler, expected = self.assembler, self.job.expected
        entry, descriptor = assembler.entry(share.track)
        extent, sink, sealing = assembler.extent, self._sink, expected.sealing
        assert extent is not None, "the sink has begun"
        assert isinstance(sink, SharedSink), "or there were no processes"
        return Placing(
            track=share.track,
            file=str(sink.share()),
            descriptor=descriptor.to_json(),
            first_block=entry.first_block,
            blocks=entry.blocks,
            position=assembler.position(share.track, 0),
            places=len(extent),
            missing=missing,
            max_data_octets=expected.max_data_octets,
            key=None if sealing is None else sealing.key(self.name.track(share.track)),
        )

    def _first_missing(self, share: Share) -> Location | None:
        return first_missing(share, self._gaps(share), self._rejected)

    # -- Objects ---------------------------------------------------------------------------------

    def _take(self, track: DataTrack, layer: int, block: int, payload: bytes, cover: Cover) -> bool:
        """Examine and place one Object, or see to it; return False if there is no room yet."""
        match self.assembler.expects(track, layer, block):
            case Expected.EXAMINE:
                pass
            case Expected.EARLY:
                return self.assembler.hold(track, layer, block, payload, cover)
            case _:
                return True
        if self._closed or self._failure is not None:
            return True
        examiner = self._examiners.get(track) or self._examiner(track)
        self._intake.take(
            examiner, payload, layer, block, cover, partial(self._judge, track, layer, block)
        )
        return True

    def _examiner(self, track: DataTrack) -> Examiner:
        entry, descriptor = self.assembler.entry(track)
        expected = self.job.expected
        made = Examiner(
            track,
            entry,
            descriptor,
            self.job.codecs,
            expected.max_data_octets,
            expected.opener(self.name.track(track)),
        )
        self._examiners[track] = made
        return made

    def _judge(
        self, track: DataTrack, layer: int, block: int, verdict: Examined | BadObject
    ) -> None:
        """Go on with an Object that was examined."""
        if self._closed:
            return
        if isinstance(verdict, BadObject):
            self._reject(track, layer, block, verdict)
            return
        if not self._admit(track, layer, block, verdict.digest, verdict.octets):
            return
        try:
            self._sink.place(
                track.component, layer, self.assembler.position(track, block), verdict.tensor
            )
        except (ValueError, ConfigError) as exc:
            self._fail(Failure(FailureReason.UNUSABLE, f"{track} layer {layer}: {exc}"))
            return
        self._placed(track, layer, block)

    def _note(self, track: DataTrack, report: Report, awaited: Awaited | None) -> None:
        """Go on with an Object that another process has examined, and placed if it is good."""
        if self._closed or self._failure is not None:
            return
        match report:
            case Placed(layer, block, digest, octets):
                # It is in its place before it is admitted. If it is not, it is missing like any
                # other, and nobody is told that its layer is ready.
                if self.assembler.expects(track, layer, block) is Expected.EXAMINE and self._admit(
                    track, layer, block, digest, octets
                ):
                    self._placed(track, layer, block)
            case Bad(layer, block, reason, text):
                self._reject(track, layer, block, BadObject(reason, text))
            case Dropped(layer, block) if awaited is not None and (layer, block) not in awaited:
                self.assembler.count_excess()
            case Dropped(layer, block):
                self.assembler.expects(track, layer, block)  # which counts it
            case Misplaced(text):
                self._fail(Failure(FailureReason.UNUSABLE, text))

    def _admit(self, track: DataTrack, layer: int, block: int, digest: bytes, octets: int) -> bool:
        try:
            return self.assembler.admit(track, layer, block, digest, octets)
        except BadObject as exc:
            self._reject(track, layer, block, exc)
            return False

    def _placed(self, track: DataTrack, layer: int, block: int) -> None:
        self._progress_at = self._loop.time()
        for event in self.assembler.placed(track, layer, block):
            self._tell(event)

    def _reject(self, track: DataTrack, layer: int, block: int, why: BadObject) -> None:
        self._tell(self.assembler.reject(track, layer, block, why))

    def _tell(self, event: Event) -> None:
        if isinstance(event, ObjectRejected):
            self._note_rejected(event)
            note_publication(
                self.name, Outcome.REJECTED, str(event.reason), event=AuditEvent.OBJECTS
            )
            rejected = self.assembler.summary().rejected
            if rejected >= self._settings.max_rejected:
                text = f"{rejected} Objects were rejected"
                self._fail(Failure(FailureReason.INCOMPLETE, text))
        elif isinstance(event, SegmentDiffers):
            for share, task in self._shares():
                if share.track.segment >= event.segment:
                    task.cancel()
            self._wake.set()
        elif isinstance(event, SegmentComplete):
            # Nobody asks for anything of it again: of hundreds of segments most are like that.
            for track in [track for track in self._readers if track.segment == event.segment]:
                for task in self._readers.pop(track).values():
                    task.cancel()
            self._wake.set()
        self.job.tell(event)

    def _note_rejected(self, event: ObjectRejected) -> None:
        if event.reason in UNOPENED:
            # It may be asked for again, as what never came is: who looks on learns nothing.
            why = BadObject(event.reason, event.text)
            self.job.note_unopened(str(event.track), Location(event.layer, event.block), why)
            return
        self._rejected.add((event.track, event.layer, event.block))
        log.warning(
            LogEvent.OBJECT_REJECTED,
            track=str(event.track),
            layer=event.layer,
            block=event.block,
            reason=str(event.reason),
            text=event.text,
        )

    def abandon(self) -> None:
        """Let go of what was retrieved; nothing more will be placed."""
        self._closed = True
        if self._sink_began:
            self._sink_began = False
            self._sink.abandon()

    # -- ends ------------------------------------------------------------------------------------

    def _crashed(self, error: BaseException) -> None:
        """Have the supervisor raise what nobody else would learn of."""
        self._crash = error
        self._wake.set()

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake.set()

    def _lost(self, error: MoqtError) -> None:
        text = f"connection lost: {error}"
        self._fail(Failure(FailureReason.UNREACHABLE, text, again=True, lost=True))

    async def _close_sink(self) -> Failure | None:
        # In a thread, since a file takes as long as its disk.
        done = self._loop.run_in_executor(self.job.pool, self._sink.done)
        try:
            await asyncio.shield(done)
        except ConfigError as exc:
            return Failure(FailureReason.UNUSABLE, str(exc))
        except asyncio.CancelledError:
            await asyncio.wait([done])  # a sink is used by one thread at a time
            raise
        return None
