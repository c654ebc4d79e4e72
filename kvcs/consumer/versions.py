"""The manifest track of a publication: newer versions as they come, and earlier ones. Shell."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing

import structlog

from kvcs.consumer.assembler import Assembler, Contradicted
from kvcs.consumer.course import Course
from kvcs.consumer.events import Event, FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.lanes import Lanes
from kvcs.consumer.opening import (
    Job,
    Opened,
    Refused,
    earlier_manifests,
    open_publication,
    read_manifest,
)
from kvcs.consumer.ranges import runs
from kvcs.consumer.tasks import Tasks
from kvcs.errors import BadManifest
from kvcs.profile.ending import End
from kvcs.profile.manifest import Manifest
from kvcs.telemetry import LogEvent
from moqt.aio import Subscription
from moqt.codepoints import ObjectStatus
from moqt.errors import MoqtError, SessionClosed
from moqt.session.events import ObjectReceived

log = structlog.get_logger("kvcs.consumer")


class Versions:
    """Reads the manifests of one publication, for one attempt at it.

    Args:
        job: The retrieval.
        assembler: How far the publication is.
        course: The attempt.
        lanes: The connections; the lead is asked.
        track: The Track Name of the manifests.
        accept: Takes each newer version; says why not, if it cannot be.
        tell: Takes what follows from an earlier version.

    Attributes:
        have_ended: Whether nothing more comes on the track.
    """

    def __init__(
        self,
        job: Job,
        assembler: Assembler,
        course: Course,
        lanes: Lanes,
        track: bytes,
        *,
        accept: Callable[[Manifest, int], Failure | None],
        tell: Callable[[Iterable[Event]], None],
    ) -> None:
        self.have_ended = False
        self._job = job
        self._assembler = assembler
        self._name = assembler.publication
        self._course = course
        self._lanes = lanes
        self._track = track
        self._accept = accept
        self._tell = tell
        self._earlier: dict[int, asyncio.Task[None]] = {}
        """Who fetches which earlier version, or has tried to."""

    @property
    def are_fetched(self) -> bool:
        """Whether earlier versions are being fetched."""
        return any(not task.done() for task in self._earlier.values())

    async def follow(self, opened: Opened) -> None:
        """Read newer versions, over another connection when the one they come on is lost."""
        while True:
            try:
                await self._read(opened.subscription)
                return
            except SessionClosed as exc:
                lost = exc
            except MoqtError as exc:
                self._course.lost(exc)
                return
            finally:
                opened.subscription.cancel()
            again = await self._open_again()
            if again is None:
                self._course.lost(lost)
                return
            opened = again
            if (failure := self._accept(opened.manifest, opened.version)) is not None:
                self._course.fail(failure)
                return

    def fetch_digests(self, group: Tasks) -> None:
        """Fetch earlier versions whose digests the newest one leaves out, each once."""
        for versions in runs(self._assembler.digests_in - self._earlier.keys()):
            task = group.start(self._fetch(versions))
            self._earlier.update(dict.fromkeys(versions, task))

    async def _open_again(self) -> Opened | None:
        """Open the manifest over a connection that is left; None: there is none.

        Raises:
            Refused: If the manifest cannot be used there.
        """
        while (lead := await self._lanes.next_lead()) is not None:
            try:
                return await open_publication(lead, self._name, self._job, track=self._track)
            except Refused:
                if lead.closed is None:
                    raise
        return None

    async def _read(self, subscription: Subscription) -> None:
        try:
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                version = item.location.group
                if version <= self._assembler.version:
                    continue
                manifest = await read_manifest(item, self._track, self._name, self._job)
                if manifest is None:
                    continue
                if (failure := self._accept(manifest, version)) is not None:
                    self._course.fail(failure)
                    return
        except BadManifest as exc:
            self._course.fail(self._refused(exc))
            return
        self._course.ended(None, subscription.ended)
        self.have_ended = True
        # What is appended cannot be counted (decision 9): that it has ended is only announced.
        ended, listed = subscription.ended, self._assembler.manifest
        is_over = ended is not None and End.of(ended.code, ended.reason) is End.ENDED
        if is_over and listed is not None and listed.complete:
            self._assembler.stop()
        self._course.wake.set()

    async def _fetch(self, versions: range) -> None:
        """Fetch some versions. What does not come, a later version lists again."""
        try:
            earlier = earlier_manifests(
                self._lanes.lead, self._name, self._track, versions, self._job
            )
            async with aclosing(earlier):
                async for manifest in earlier:
                    self._tell(self._assembler.supply(manifest))
        except BadManifest as exc:
            self._course.fail(self._refused(exc))
        except Contradicted as exc:
            self._course.fail(Failure(FailureReason.CONTRADICTED, f"manifest refused: {exc}"))
        except (MoqtError, TimeoutError) as exc:
            log.debug(LogEvent.REQUEST_REFUSED, track=self._track.decode(), reason=str(exc))
        finally:
            self._course.wake.set()

    def _refused(self, why: BadManifest) -> Failure:
        """Say what a version that cannot be this publication's means.

        Where manifests are signed, the producer did not send it: whoever is asked lies, and what
        was told before is as good as its signature. Where they are not, it may all be a lie.
        """
        text = f"manifest refused: {why}"
        if not self._assembler.signed:
            return Failure(FailureReason.CONTRADICTED, text)
        self._job.proven_bad(self._lanes.lead, self._name, text)
        return Failure(FailureReason.INCOMPLETE, text)
