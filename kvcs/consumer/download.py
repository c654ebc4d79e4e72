"""Downloading one publication: its manifest, its tracks, its Objects into the sink.

Shell, as :mod:`kvcs.consumer.retrieval` is, which finds the publication and the connections. All
state belongs to the event loop. Who does what: :mod:`kvcs.consumer.versions` reads the manifests,
:mod:`kvcs.consumer.readers` asks for data, :mod:`kvcs.consumer.landing` takes what comes, and
:mod:`kvcs.consumer.course` knows how the attempt goes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from kvcs.audit import AuditEvent, Outcome, note_publication
from kvcs.consumer.assembler import Assembler, Contradicted
from kvcs.consumer.course import Course
from kvcs.consumer.events import (
    Event,
    FailureReason,
    ObjectRejected,
    SegmentComplete,
    SegmentDiffers,
)
from kvcs.consumer.failures import Failure, lacking
from kvcs.consumer.filling import fill
from kvcs.consumer.joining import CannotJoin
from kvcs.consumer.landing import Landing
from kvcs.consumer.lanes import Lanes
from kvcs.consumer.opening import Job, Opened, Refused, open_publication
from kvcs.consumer.readers import Readers
from kvcs.consumer.recovery import recompute_s
from kvcs.consumer.sections import SectionSource
from kvcs.consumer.spreading import Dealer
from kvcs.consumer.tasks import Tasks, set_within, tasks
from kvcs.consumer.versions import Versions
from kvcs.errors import UNOPENED, BadObject, ConfigError, NotFound
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST_COSE, PublicationName
from kvcs.telemetry import LogEvent
from moqt.location import Location

log = structlog.get_logger("kvcs.consumer")


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
        landing: Where its Objects go.
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
        self.manifest_track: bytes | None = None
        self._settings = settings
        self._is_growing = wish.follow
        self._block_keys: Sequence[bytes] = expected.block_keys
        self._follows = follows
        self.landing = Landing(job, self.assembler, self._tell)
        self._dealer = Dealer()
        self._readers: Readers | None = None

    @property
    def _course(self) -> Course:
        return self.landing.course

    def _reset(self) -> None:
        """Begin anew, over other connections."""
        self.landing.course = Course()
        self._readers = None

    def joins(self, opened: Opened) -> Failure | None:
        """Go on for the publication that it follows; say why not, if it cannot.

        From then on that one must not be run or abandoned any more.
        """
        assert self._follows is not None, "it is to follow one"
        self._note_track(opened)
        before, self._follows = self._follows.landing, None
        self.landing.go_on_for(before)
        if (failure := self._accept(opened.manifest, opened.version)) is None:
            before.leave_sink()
        return failure

    async def run(self, lanes: Lanes, opened: Opened | None) -> Failure | None:
        """Retrieve what is missing over ``lanes``; return None when everything is there.

        Args:
            lanes: The connections.
            opened: The publication's manifest, if it has been opened there already.

        Raises:
            Refused: If the manifest cannot be used.
        """
        self._reset()
        readers = self._readers = Readers(
            self.job, self.landing, self.assembler, self._course, lanes, self._dealer
        )
        try:
            async with tasks() as group:
                if opened is None:
                    if self.job.is_eager and self.assembler.manifest is None:
                        readers.start_eagerly(group)
                    opened = await open_publication(
                        lanes.lead, self.name, self.job, track=self.manifest_track
                    )
                if self.manifest_track not in (None, opened.track):
                    raise Refused("signed at one relay, not signed at another")
                self._note_track(opened)
                if (failure := self._accept(opened.manifest, opened.version)) is not None:
                    return failure
                if readers.drop_in_vain():
                    # What they brought is counted before anything is asked for again.
                    await self.landing.intake.down_to(0)
                versions = Versions(
                    self.job,
                    self.assembler,
                    self._course,
                    lanes,
                    opened.track,
                    accept=self._accept,
                    tell=self._tell_of_manifest,
                )
                group.start(versions.follow(opened))
                group.start(self._settle(lanes))
                if (failure := await self._supervise(group, readers, versions)) is not None:
                    return failure
            return await self.landing.close()
        finally:
            self._course.is_over = True
            if opened is not None:
                opened.subscription.cancel()

    async def fill(self, source: SectionSource) -> Failure | None:
        """Retrieve what is missing from a block service; return None when everything is there."""
        self._reset()
        try:
            failure = await fill(source, self.assembler, self.job, self.landing.judge)
            if self._course.failure is not None or self.assembler.is_complete:
                return self._course.failure or await self.landing.close()
            return failure
        finally:
            self._course.is_over = True

    def abandon(self) -> None:
        """Let go of what was retrieved; nothing more will be placed."""
        self.landing.abandon()

    # -- supervision -----------------------------------------------------------------------------

    async def _settle(self, lanes: Lanes) -> None:
        """Have data wait for the connections that are still being made, but not for long."""
        settings = self._settings
        wait_s = settings.connect_timeout_s if settings.processes else settings.spread_wait_s
        await set_within(lanes.settled, wait_s)
        self._course.settled()

    async def _supervise(
        self, group: Tasks, readers: Readers, versions: Versions
    ) -> Failure | None:
        assembler, course, intake = self.assembler, self._course, self.landing.intake
        while True:
            course.wake.clear()
            if course.crash is not None:
                raise course.crash
            if assembler.is_complete:
                return None
            if course.failure is not None and not intake.pending:
                return course.failure
            if not course.is_settled:  # which it soon is
                await course.wake.wait()
                continue
            if course.failure is None:
                versions.fetch_digests(group)
                readers.start(group)
                if (failure := self._exhausted(readers, versions)) is not None:
                    return failure
            if assembler.is_idle:  # nobody owes us anything
                course.moved()
                await set_within(course.wake, self._settings.stall_timeout_s)
                continue
            stall_s = self._stall_s
            left = course.left_of(stall_s)
            if left <= 0:
                return Failure(FailureReason.STALLED, f"nothing new came for {stall_s:g} s")
            if readers.is_broken_off and not intake.pending:
                # What still comes on other tracks is taken first.
                left = course.left_of(self._settings.again_s)
                if left <= 0:
                    return course.incomplete(FailureReason.INCOMPLETE, "not everything came")
            await set_within(course.wake, left)

    @property
    def _stall_s(self) -> float:
        """How long to wait for anything new: never longer than computing all of it takes."""
        settings, stall_s = self._settings, self._settings.stall_timeout_s
        if settings.recompute_tokens_per_s is None:
            return stall_s
        return min(stall_s, recompute_s(self.job.tokens_left(self.assembler), settings))

    def _exhausted(self, readers: Readers, versions: Versions) -> Failure | None:
        """Say what is wrong if nothing more can come; decision 9: hints alone do not count."""
        assembler = self.assembler
        if self.landing.intake.pending or readers.are_busy or versions.are_fetched:
            return None
        may_grow = bool(assembler.unlisted) or assembler.extent is None or assembler.is_following
        may_attest = any(True for _ in assembler.unattested())
        if not versions.have_ended and (may_grow or readers.are_waiting or may_attest):
            return None
        return self._course.incomplete(*lacking(assembler))

    # -- the manifest ----------------------------------------------------------------------------

    def _note_track(self, opened: Opened) -> None:
        self.manifest_track = opened.track
        self.assembler.signed = opened.track == MANIFEST_COSE

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
            self._course.moved()
            log.debug(LogEvent.MANIFEST_ACCEPTED, publication=str(self.name), version=version)
        try:
            self.landing.make_room()
        except ConfigError as exc:
            return Failure(FailureReason.UNUSABLE, str(exc))
        self._tell_of_manifest(events)
        self.landing.release()
        self._course.wake.set()
        return None

    def _tell_of_manifest(self, events: Iterable[Event]) -> None:
        """Tell what follows from a manifest: layers are attested, or Objects turn out to be bad.

        Those were placed before their digests were listed, perhaps of another relay. So they are
        asked for here; what comes as bad again is known at once then, and not asked for a third
        time.
        """
        for event in events:
            self._tell(event)
            if isinstance(event, ObjectRejected):
                self._course.rejected.discard((event.track, event.layer, event.block))

    # -- a context that grows --------------------------------------------------------------------

    def extend(self, block_keys: Sequence[bytes]) -> None:
        """Hold what is appended against more Block Keys of the caller's."""
        self._block_keys = block_keys
        if self.assembler.manifest is None or not self._course.takes_objects:
            return
        try:
            events = self._confirm()
        except Contradicted as exc:
            self._course.fail(Failure(FailureReason.CONTRADICTED, str(exc)))
            return
        for event in events:
            self._tell(event)
        self._course.wake.set()

    def stop(self) -> None:
        """Want nothing that is not listed yet."""
        self.assembler.stop()
        self._course.wake.set()

    def _confirm(self) -> list[Event]:
        return self.assembler.confirm(self._block_keys) if self._is_growing else []

    # -- what is told ----------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if isinstance(event, ObjectRejected):
            self._note_rejected(event)
            note_publication(
                self.name, Outcome.REJECTED, str(event.reason), event=AuditEvent.OBJECTS
            )
            rejected = self.assembler.summary().rejected
            if rejected >= self._settings.max_rejected:
                text = f"{rejected} Objects were rejected"
                self._course.fail(Failure(FailureReason.INCOMPLETE, text))
        elif isinstance(event, SegmentDiffers):
            if self._readers is not None:
                self._readers.drop_segments_from(event.segment)
            self._course.wake.set()
        elif isinstance(event, SegmentComplete):
            if self._readers is not None:
                self._readers.drop_segment(event.segment)
            self._course.wake.set()
        self.job.tell(event)

    def _note_rejected(self, event: ObjectRejected) -> None:
        if event.reason in UNOPENED:
            # It may be asked for again, as what never came is: who looks on learns nothing.
            why = BadObject(event.reason, event.text)
            self.job.note_unopened(str(event.track), Location(event.layer, event.block), why)
            return
        self._course.rejected.add((event.track, event.layer, event.block))
        log.warning(
            LogEvent.OBJECT_REJECTED,
            track=str(event.track),
            layer=event.layer,
            block=event.block,
            reason=str(event.reason),
            text=event.text,
        )
