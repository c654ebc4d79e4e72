"""Opening a publication: its manifest track, and the manifests on it that are good. Shell."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import structlog

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import Event, FailureReason, TokenRange
from kvcs.consumer.failures import Failure
from kvcs.consumer.recomputing import lacks, ranges, tokens_left
from kvcs.consumer.selection import Wish
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.trust import Expectations, check_manifest
from kvcs.errors import BadManifest, BadObject
from kvcs.kvsp.codecs import RAW, CodecRegistry
from kvcs.profile.ending import End
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, PublicationName
from kvcs.store.sink import BlockSink
from kvcs.telemetry import LogEvent
from kvcs.trust.sealing import Cover
from kvcs.trust.unopened import Unopened
from moqt.aio import MoqtConnection, Subscription
from moqt.codepoints import ObjectStatus, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.location import Location
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter

log = structlog.get_logger("kvcs.consumer")

#: Subscriber Priority of the manifest track, ahead of all data.
MANIFEST_PRIORITY = 0
#: Octets from which a manifest is read in another thread.
LARGE_MANIFEST_OCTETS = 64 << 10


class Refused(Exception):
    """A publication cannot be used, before anything of it was.

    Attributes:
        again: Whether it may be had later: it is not at fault itself.
        busy: Whether it was there, and whoever has it had no room to serve it.
    """

    def __init__(self, text: str, *, again: bool = False, busy: bool = False) -> None:
        super().__init__(text)
        self.again = again
        self.busy = busy


def refused(why: Refused) -> Failure:
    """Return what becomes of a retrieval of that publication.

    Who has no room now has it later, until the deadline, like one that was lost.
    """
    return Failure(FailureReason.REFUSED, str(why), again=why.again, lost=why.busy)


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

    unopened: Unopened = field(default_factory=Unopened)
    """What came and could not be opened."""

    proven_bad: Callable[[MoqtConnection, PublicationName, str], None] = lambda *_: None
    """Takes each publication whose manifest cannot be its, and why."""

    @property
    def is_eager(self) -> bool:
        """Whether data are asked for together with the manifest.

        They are if all that a publication has is wanted, and there is reason to think that it is
        there in the form that is liked best.
        """
        settings, wish = self.settings, self.wish
        whole = wish.segments is None and wish.layers is None and wish.blocks is None
        return (
            settings.eager
            and not settings.is_spread
            and settings.fetch != "always"
            and whole
            and self.expected.wanted_blocks is None
            and wish.names(self.codecs)[0] == RAW.name
        )

    def note_unopened(self, track: str, location: Location, why: BadObject) -> None:
        """Count an Object that could not be opened, which nobody outside is to notice."""
        if (count := self.unopened.note(why)) is not None:
            log.warning(
                LogEvent.OBJECT_UNOPENED,
                track=track,
                location=str(location),
                reason=str(why.reason),
                count=count,
                text=str(why),
            )

    def tokens_left(self, assembler: Assembler | None) -> int | None:
        """Return how many tokens would have to be computed now; None: nobody knows."""
        return tokens_left(assembler, self.wish, self.expected)

    def left_to_compute(self, assembler: Assembler) -> tuple[TokenRange, ...]:
        """Return what would have to be computed now, in tokens and layers."""
        found = lacks(assembler, self.wish, len(self.expected.block_keys) or None)
        return ranges(found, self.expected.descriptor.block_tokens)


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
            raise Refused(f"{track.decode()}: {exc}", again=True, busy=_is_busy(exc)) from None
        track = MANIFEST
        try:
            subscription = await _subscribe_manifest(conn, name, track, job)
        except (MoqtError, TimeoutError) as plain:
            raise Refused(f"manifest: {plain}", again=True, busy=_is_busy(plain)) from None
    except (MoqtError, TimeoutError) as exc:
        raise Refused(f"{track.decode()}: {exc}", again=True) from None
    may_come, unopened = True, ""
    try:
        async with asyncio.timeout(job.settings.request_timeout_s):
            async for item in subscription:
                if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                    continue
                if (manifest := await read_manifest(item, track, name, job)) is not None:
                    return Opened(name, track, subscription, manifest, item.location.group)
                unopened = f"; what could not be opened: {job.unopened}"
        ended = subscription.ended
        why = f"{ended.code!r} {ended.reason}" if ended is not None else ""
        text = f"{track.decode()}: ended without a manifest: {why}{unopened}"
        may_come = ended is None or End.of(ended.code, ended.reason) is not End.ABANDONED
    except TimeoutError:
        within = f"within {job.settings.request_timeout_s:g} s"
        text = f"{track.decode()}: none came {within}{unopened}"
    except BadManifest as exc:
        text, may_come = f"{track.decode()}: {exc}", False
        job.proven_bad(conn, name, text)
    except MoqtError as exc:
        text = f"{track.decode()}: {exc}"
    except asyncio.CancelledError:
        subscription.cancel()
        raise
    subscription.cancel()
    raise Refused(text, again=may_come)


async def read_manifest(
    item: ObjectReceived, track: bytes, name: PublicationName, job: Job
) -> Manifest | None:
    """Check a version of a manifest, in a thread if it is large.

    Returns:
        The manifest; None if it could not be opened, which is as if it had not come.

    Raises:
        BadManifest: As :func:`~kvcs.consumer.trust.check_manifest` does.
    """
    check = partial(_open_and_check, item, track, name, job.expected)
    try:
        if len(item.payload) < LARGE_MANIFEST_OCTETS:
            return check()
        return await asyncio.get_running_loop().run_in_executor(job.pool, check)
    except BadObject as exc:
        job.note_unopened(track.decode(), item.location, exc)
        return None


def _open_and_check(
    item: ObjectReceived, track: bytes, name: PublicationName, expected: Expectations
) -> Manifest:
    opener = expected.opener(name.track(track))
    payload = opener.open(
        item.location,
        Cover(item.publisher_priority, item.properties),
        item.payload,
        opener.longest(expected.limits.octets, fixed_length=False),
    )
    version = item.location.group
    return check_manifest(payload, track=track, name=name, version=version, expected=expected)


async def earlier_manifests(
    conn: MoqtConnection, name: PublicationName, track: bytes, versions: range, job: Job
) -> AsyncGenerator[Manifest, None]:
    """Fetch earlier versions of a manifest, for the digests that a later one leaves out.

    Args:
        conn: The connection to ask on.
        name: The publication.
        track: Its manifest track.
        versions: Which; those that whoever is asked does not have are left out.
        job: The retrieval that wants them.

    Raises:
        BadManifest: As :func:`read_manifest` does.
        MoqtError: If the request is refused, or the connection is lost.
        TimeoutError: If it is not answered in time.
    """
    fetch = await conn.fetch(
        name.track(track),
        location_filter=LocationFilter.group_end(versions.start, 0, versions.stop - 1),
        priority=MANIFEST_PRIORITY,
        timeout_s=job.settings.request_timeout_s,
    )
    try:
        async for item in fetch:
            if not isinstance(item, ObjectReceived) or item.status is not ObjectStatus.NORMAL:
                continue
            if (manifest := await read_manifest(item, track, name, job)) is not None:
                yield manifest
    finally:
        fetch.cancel()


def _is_busy(refusal: Exception) -> bool:
    return isinstance(refusal, RequestRejected) and refusal.code == RequestErrorCode.EXCESSIVE_LOAD


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
