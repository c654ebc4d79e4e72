"""Landing: what comes of a publication is examined, and placed in the sink if it is good. Shell.

What an Object is good for, the assembler decides; all of its state belongs to the event loop.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from kvcs.consumer.assembler import Assembler, Expected
from kvcs.consumer.course import Course
from kvcs.consumer.errands import Bad, Dropped, Misplaced, Placed, Placing, Report
from kvcs.consumer.events import Event, FailureReason
from kvcs.consumer.examining import Examined, Examiner
from kvcs.consumer.failures import Failure
from kvcs.consumer.fetching import Awaited
from kvcs.consumer.intake import Intake
from kvcs.consumer.opening import Job
from kvcs.consumer.spreading import Rectangle
from kvcs.errors import BadObject, ConfigError
from kvcs.profile.naming import DataTrack
from kvcs.store.shared import SharedSink
from kvcs.store.sink import GrowingSink
from kvcs.trust.sealing import Cover


class Landing:
    """Where the Objects of one publication come in, whoever brings them.

    Args:
        job: The retrieval.
        assembler: How far the publication is.
        tell: Takes what follows from an Object.

    Attributes:
        course: The attempt that is made now.
        intake: What is under examination.
        has_begun: Whether the sink was told to begin, and is this landing's.
        places: Blocks that the sink was told of.
    """

    def __init__(self, job: Job, assembler: Assembler, tell: Callable[[Event], None]) -> None:
        self.course = Course()
        self.has_begun = False
        self.places = 0
        self._job = job
        self._assembler = assembler
        self._tell = tell
        self._sink = job.sink
        self._examiners: dict[DataTrack, Examiner] = {}
        self.intake = Intake(
            job.pool,
            job.settings,
            crashed=lambda error: self.course.crashed(error),
            idle=lambda: self.course.wake.set(),
        )

    # -- the sink --------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Tell the sink what is to come: all of it at first, then what is appended.

        Raises:
            ConfigError: If it cannot take that.
        """
        if (extent := self._assembler.extent) is None:
            return
        if not self.has_begun:
            self.has_begun = True  # also if it fails: it may have begun something
            self.places = len(extent)
            self._sink.begin(self._job.expected.descriptor, self.places)
        elif len(extent) > self.places:
            assert isinstance(self._sink, GrowingSink), "or nothing would be followed"
            self.places = len(extent)
            self._sink.grow(self.places)

    def go_on_for(self, before: "Landing") -> None:
        """Take over what the sink holds of another publication; see :meth:`leave_sink`."""
        self.has_begun, self.places = before.has_begun, before.places

    def leave_sink(self) -> None:
        """Leave the sink as it is to another landing."""
        self.course.is_over, self.has_begun = True, False

    def abandon(self) -> None:
        """Let go of what was retrieved; nothing more will be placed."""
        self.course.is_over = True
        if self.has_begun:
            self.has_begun = False
            self._sink.abandon()

    async def close(self) -> Failure | None:
        """Have the sink done with it; say why it is not, if so."""
        # In a thread, since a file takes as long as its disk.
        done = asyncio.get_running_loop().run_in_executor(self._job.pool, self._sink.done)
        try:
            await asyncio.shield(done)
        except ConfigError as exc:
            return Failure(FailureReason.UNUSABLE, str(exc))
        except asyncio.CancelledError:
            await asyncio.wait([done])  # a sink is used by one thread at a time
            raise
        return None

    # -- Objects ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Take what was held back until there was a manifest and room."""
        if self.has_begun:
            for early in self._assembler.release():
                self.take(early.track, early.layer, early.block, early.payload, early.cover)

    def take(self, track: DataTrack, layer: int, block: int, payload: bytes, cover: Cover) -> bool:
        """Examine and place one Object, or see to it; return False if there is no room yet."""
        match self._assembler.expects(track, layer, block):
            case Expected.EXAMINE:
                pass
            case Expected.EARLY:
                return self._assembler.hold(track, layer, block, payload, cover)
            case _:
                return True
        if not self.course.takes_objects:
            return True
        examiner = self._examiners.get(track) or self._examiner(track)
        self.intake.take(
            examiner, payload, layer, block, cover, partial(self.judge, track, layer, block)
        )
        return True

    def judge(
        self, track: DataTrack, layer: int, block: int, verdict: Examined | BadObject
    ) -> None:
        """Go on with an Object that was examined."""
        if self.course.is_over:
            return
        if isinstance(verdict, BadObject):
            self._reject(track, layer, block, verdict)
            return
        if not self._admit(track, layer, block, verdict.digest, verdict.octets):
            return
        try:
            self._sink.place(
                track.component, layer, self._assembler.position(track, block), verdict.tensor
            )
        except (ValueError, ConfigError) as exc:
            text = f"{track} layer {layer}: {exc}"
            self.course.fail(Failure(FailureReason.UNUSABLE, text))
            return
        self._placed(track, layer, block)

    def note(self, track: DataTrack, report: Report, awaited: Awaited | None) -> None:
        """Go on with an Object that another process has examined, and placed if it is good."""
        if not self.course.takes_objects:
            return
        match report:
            case Placed(layer, block, digest, octets):
                # It is in its place before it is admitted. If it is not, it is missing like any
                # other, and nobody is told that its layer is ready.
                if self._assembler.expects(track, layer, block) is Expected.EXAMINE and self._admit(
                    track, layer, block, digest, octets
                ):
                    self._placed(track, layer, block)
            case Bad(layer, block, reason, text):
                self._reject(track, layer, block, BadObject(reason, text))
            case Dropped(layer, block) if awaited is not None and (layer, block) not in awaited:
                self._assembler.count_excess()
            case Dropped(layer, block):
                self._assembler.expects(track, layer, block)  # which counts it
            case Misplaced(text):
                self.course.fail(Failure(FailureReason.UNUSABLE, text))

    def placing(self, track: DataTrack, missing: tuple[Rectangle, ...]) -> Placing:
        """Return what another process has to know to place what is missing of a track."""
        assembler, expected = self._assembler, self._job.expected
        entry, descriptor = assembler.entry(track)
        extent, sink, sealing = assembler.extent, self._sink, expected.sealing
        assert extent is not None, "the sink has begun"
        assert isinstance(sink, SharedSink), "or there were no processes"
        return Placing(
            track=track,
            file=str(sink.share()),
            descriptor=descriptor.to_json(),
            first_block=entry.first_block,
            blocks=entry.blocks,
            position=assembler.position(track, 0),
            places=len(extent),
            missing=missing,
            max_data_octets=expected.max_data_octets,
            key=None if sealing is None else sealing.key(assembler.publication.track(track)),
        )

    def _examiner(self, track: DataTrack) -> Examiner:
        entry, descriptor = self._assembler.entry(track)
        expected = self._job.expected
        made = Examiner(
            track,
            entry,
            descriptor,
            self._job.codecs,
            expected.max_data_octets,
            expected.opener(self._assembler.publication.track(track)),
        )
        self._examiners[track] = made
        return made

    def _admit(self, track: DataTrack, layer: int, block: int, digest: bytes, octets: int) -> bool:
        try:
            return self._assembler.admit(track, layer, block, digest, octets)
        except BadObject as exc:
            self._reject(track, layer, block, exc)
            return False

    def _placed(self, track: DataTrack, layer: int, block: int) -> None:
        self.course.moved()
        for event in self._assembler.placed(track, layer, block):
            self._tell(event)

    def _reject(self, track: DataTrack, layer: int, block: int, why: BadObject) -> None:
        self._tell(self._assembler.reject(track, layer, block, why))
