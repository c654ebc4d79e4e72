"""Readers: who asks which connection for which part of a publication's tracks. Shell.

What to ask for, and how much of it at a time, is decided by :mod:`kvcs.consumer.spreading`,
:mod:`kvcs.consumer.waves` and :mod:`kvcs.consumer.fetching`.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import structlog

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.course import Course
from kvcs.consumer.errands import Errand, Report, TimedOut
from kvcs.consumer.events import Gap
from kvcs.consumer.fetching import Awaited, cut
from kvcs.consumer.landing import Landing
from kvcs.consumer.lanes import Lane, Lanes
from kvcs.consumer.opening import Job
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
from kvcs.consumer.tasks import Tasks, tasks
from kvcs.consumer.waves import LAST, clipped, first_wave, stop_of
from kvcs.profile.naming import DataTrack
from kvcs.telemetry import LogEvent
from kvcs.trust.sealing import Cover
from moqt.codepoints import ObjectStatus, RangeMarkerKind, RequestErrorCode, StreamErrorCode
from moqt.errors import MoqtError, RequestRejected
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


class Readers:
    """Asks for what is missing, for one attempt at a publication.

    Args:
        job: The retrieval.
        landing: Where the Objects go.
        assembler: How far the publication is.
        course: The attempt.
        lanes: The connections.
        dealer: Deals out what is wanted.
    """

    def __init__(
        self,
        job: Job,
        landing: Landing,
        assembler: Assembler,
        course: Course,
        lanes: Lanes,
        dealer: Dealer,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._landing = landing
        self._assembler = assembler
        self._course = course
        self._lanes = lanes
        self._dealer = dealer
        self._loop = asyncio.get_running_loop()
        self._readers: dict[DataTrack, dict[Share, asyncio.Task[None]]] = {}
        """Who reads what, or has read it for as long as anything came."""

        self._cannot_fetch = False  # they do not know FETCH
        self._wave: int | None = None  # None: nothing has been asked for
        self._waves: dict[Share, int | None] = {}  # in which each share was asked for last

    # -- who reads -------------------------------------------------------------------------------

    @property
    def are_busy(self) -> bool:
        """Whether anything is being read."""
        return any(not task.done() for _, task in self._shares())

    @property
    def is_broken_off(self) -> bool:
        """Whether a track has lost its publisher and is not being asked for again already."""
        gone, readers = self._course.gone, dict(self._shares())
        return None in gone or any(
            share in readers and readers[share].done() for share in gone if share is not None
        )

    @property
    def are_waiting(self) -> bool:
        """Whether something is not asked for yet because not all of it has been published."""
        return any(self._waits_for_all(plan) for plan in self._assembler.plans)

    def drop_segments_from(self, first: int) -> None:
        """Read no more of a segment and of those behind it, which differ from what is wanted."""
        for share, task in self._shares():
            if share.track.segment >= first:
                task.cancel()

    def drop_segment(self, segment: int) -> None:
        """Forget who read a segment of which everything is there.

        Nobody asks for anything of it again: of hundreds of segments most are like that.
        """
        for track in [track for track in self._readers if track.segment == segment]:
            for task in self._readers.pop(track).values():
                task.cancel()

    def start_eagerly(self, group: Tasks) -> None:
        """Ask for what there is most likely, before there is a manifest to tell."""
        for name in ("k.raw.s0", "v.raw.s0"):
            share = Share(DataTrack.parse(name), None)
            self._start_reader(self._lanes.for_data[0], share, group)

    def drop_in_vain(self) -> bool:
        """End what was begun eagerly and is not wanted, and have begun anew what ended.

        Returns whether there was anything.
        """
        in_vain = [
            (share, task)
            for share, task in self._shares()
            if task.done() or self._assembler.plan(share.track) is None
        ]
        for share, task in in_vain:
            task.cancel()
            del self._readers[share.track][share]
        return bool(in_vain)

    def start(self, group: Tasks) -> None:
        """Ask for tracks of which something is missing, of so many segments at once."""
        if not self._landing.has_begun:
            return
        if self._wave is None:
            plans = (plan for plan in self._assembler.plans if plan.tracks)
            fetched = (plan for plan in plans if self._is_fetched(Share(plan.tracks[0], None)))
            left = sum(not self._assembler.is_segment_ready(plan.segment) for plan in fetched)
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
        for plan in self._assembler.plans:
            if self._assembler.is_segment_ready(plan.segment) or self._waits_for_all(plan):
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
        plan = self._assembler.plan(share.track)
        if plan is None or self._wave is None or not self._is_fetched(share):
            return False
        gaps = clipped(self._assembler.gaps(share.track), stop_of(plan.layers, self._wave))
        return not any(missing_of(share, gaps))

    def _gaps(self, share: Share) -> Iterator[Gap]:
        """Yield what is missing of the track of a share and was asked for in its wave."""
        gaps, plan = self._assembler.gaps(share.track), self._assembler.plan(share.track)
        wave = self._waves.get(share, self._wave)
        if plan is None or wave is None or not self._is_fetched(share):
            return gaps
        return clipped(gaps, stop_of(plan.layers, wave))

    def _waits_for_all(self, plan: SegmentPlan) -> bool:
        """Whether a segment is asked for once all of it has been published."""
        return self._settings.fetch == "always" and not self._assembler.is_published(plan.segment)

    # -- one reader ------------------------------------------------------------------------------

    async def _read(self, lane: Lane, share: Share) -> None:
        """Read a share until nothing is missing of it, or nothing more comes."""
        try:
            for _ in range(1 + self._settings.resubscribe):
                if not await self._read_once(lane, share):
                    break
        except RequestRejected as exc:
            self._course.not_now |= exc.code in NOT_NOW
            log.debug(LogEvent.REQUEST_REFUSED, track=str(share.track), reason=str(exc))
        except MoqtError as exc:
            if lane.is_over and not self._lanes.is_lost:
                # As if it had never been asked for: those that are left are asked for the rest.
                self._readers.get(share.track, {}).pop(share, None)
                self._course.gone.pop(share, None)
            else:
                self._course.lost(exc)
        except TimeoutError:
            pass  # SUBSCRIBE was not answered: what it would have brought stays missing
        finally:
            self._course.wake.set()

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
        fetch, plan = self._settings.fetch, self._assembler.plan(share.track)
        if fetch == "never" or self._cannot_fetch or plan is None:
            return False
        return fetch == "always" or self._assembler.is_published(plan.segment)

    async def _fetch(self, lane: Lane, share: Share) -> bool:
        """Fetch what is missing of a share, and nothing else if the peer lets us (Section 5.3)."""
        track, assembler = share.track, self._assembler
        blocks = assembler.entry(track)[0].blocks
        missing = worth_asking(share, self._gaps(share), self._course.rejected)
        if not (bands := cut(missing, blocks, max_ranges=lane.max_ranges)):
            return False
        errands = [
            Errand(
                track=self._assembler.publication.track(track),
                past=band.location_filter,
                range_filters=band.range_filters(blocks),
                is_live=False,
                timeout_s=self._settings.request_timeout_s,
                placing=self._landing.placing(track, band.missing) if lane.is_apart else None,
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
            self._course.ended(share, task.result())
        return self._course.failure is None

    async def _subscribe(self, lane: Lane, share: Share) -> bool:
        """Subscribe to a share, with a fill from the first Object that is missing (Section 5.2)."""
        track, plan = share.track, self._assembler.plan(share.track)
        first, filters, missing = Location(0, 0), tuple[RangeFilter, ...](), tuple[Rectangle, ...]()
        if plan is not None:
            if (found := self._first_missing(share)) is None:
                return False
            first = found
            blocks = self._assembler.entry(track)[0].blocks
            filters = block_filters(share, blocks, may_cut=lane.max_ranges > 0)
            missing = tuple(missing_of(share, self._assembler.gaps(track)))
        errand = Errand(
            track=self._assembler.publication.track(track),
            past=fill_from(first, plan, self._job.expected.descriptor.layers),
            range_filters=filters,
            timeout_s=self._settings.request_timeout_s,
            placing=self._landing.placing(track, missing) if lane.is_apart else None,
        )
        ended = await self._bring(lane, share, errand)
        if self._assembler.plan(track) is None or self._first_missing(share) is None:
            return False
        self._course.ended(share, ended)
        return ended is not None and self._course.failure is None

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
        self._course.gone.pop(share, None)
        timed_out = False
        try:
            async for item in bringing:
                if isinstance(item, ObjectReceived):
                    # What announces an end is a hint (decision 9).
                    if item.status is not ObjectStatus.NORMAL:
                        continue
                    group, number = item.location
                    if awaited is not None and (group, number) not in awaited:
                        self._assembler.count_excess()
                        continue
                    cover = Cover(item.publisher_priority, item.properties)
                    if not self._landing.take(share.track, group, number, item.payload, cover):
                        return None  # ahead of the manifest and out of room
                    await self._landing.intake.keep_bound()
                elif isinstance(item, RangeMarked):
                    timed_out |= item.kind is RangeMarkerKind.TIMED_OUT
                elif isinstance(item, TimedOut):
                    timed_out = True
                elif isinstance(item, Report):
                    self._landing.note(share.track, item, awaited)
        finally:
            await bringing.stop()
        await self._landing.intake.down_to(0)
        ended = bringing.ended
        if timed_out and isinstance(ended, FetchEnded):
            return replace(ended, complete=False, code=StreamErrorCode.DELIVERY_TIMEOUT)
        return ended

    def _first_missing(self, share: Share) -> Location | None:
        return first_missing(share, self._gaps(share), self._course.rejected)

    def _start_reader(self, lane: Lane, share: Share, group: Tasks) -> None:
        self._waves[share] = self._wave
        reader = group.start(self._read(lane, share))
        self._readers.setdefault(share.track, {})[share] = reader

    def _shares(self) -> Iterator[tuple[Share, asyncio.Task[None]]]:
        """Yield what was asked for, and who reads it or has read it."""
        for readers in self._readers.values():
            yield from readers.items()
