"""Pursuit: carrying out, step by step, what is to be tried for a publication. Shell.

Which step is next, whether another publication may take over and when it is over is decided by
:mod:`kvcs.consumer.recovery` and :mod:`kvcs.consumer.joining`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from kvcs.consumer.badlist import BadPublications
from kvcs.consumer.discovery import Discovery
from kvcs.consumer.download import Download
from kvcs.consumer.events import FailureReason, PublicationFound, PublicationRefused
from kvcs.consumer.failures import Failure, connection_lost, more_telling
from kvcs.consumer.joining import Bond
from kvcs.consumer.lanes import Lanes
from kvcs.consumer.moving import Bound, Moved, Movements
from kvcs.consumer.opening import Job, Opened, Refused, refused
from kvcs.consumer.prefixes import Index, Questions
from kvcs.consumer.processes import Processes
from kvcs.consumer.recovery import (
    Ask,
    AskBlocks,
    AskRelay,
    Pause,
    Recompute,
    Recovery,
    Standing,
    is_final,
    may_look_for_another,
)
from kvcs.consumer.replicas import Replicas
from kvcs.consumer.sections import SectionSource
from kvcs.consumer.sessions import Sessions
from kvcs.consumer.tasks import Tasks, tasks
from kvcs.consumer.ways import Way
from kvcs.link import Backoff
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection

log = structlog.get_logger("kvcs.consumer")

#: Relays and producers that are tried at most, those that an index names included.
MAX_WAYS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a retrieval may find what it wants."""

    ways: list[Way]
    """Relays and producers, in the caller's order; those that the index names come behind."""

    blocks: Sequence[SectionSource]
    """Block services, in the caller's order."""

    only: PublicationName | None
    """Exactly this publication, without discovery."""

    index: Index | None
    """Who is asked first which publications begin as the prompt does."""

    prefixes: tuple[int, ...]
    """Lengths in blocks of the prefixes that are looked for, if not as it turns out."""

    bad: BadPublications
    """Publications that discovery is not to choose."""


class _Looking(NamedTuple):
    """How publications are looked for over one connection."""

    discovery: Discovery
    bad: list[Failure]
    """Grows with each that was found and is known to be bad."""

    patience: float
    """Seconds that the first one is waited for."""


class Pursuit:
    """The attempts of one retrieval, from the first relay to the last resort.

    Args:
        job: The retrieval.
        sources: Where to look.
        sessions: Those that the retrieval has opened.
        processes: Those of its own.

    Attributes:
        current: The download that there is; None before the first, and between two.
        recovery: What has been tried.
    """

    def __init__(
        self, job: Job, sources: Sources, sessions: Sessions, processes: Processes
    ) -> None:
        settings = job.settings
        self.current: Download | None = None
        self._loop = asyncio.get_running_loop()
        self.recovery = Recovery(
            settings,
            relays=len(sources.ways),
            services=len(sources.blocks),
            pauses=Backoff(settings.again_s, settings.again_max_s),
            now=self._loop.time(),
        )
        self._job = replace(job, proven_bad=self._proven_bad)
        self._settings = settings
        self._sources = sources
        self._sessions = sessions
        self._replicas = Replicas(self._job)
        self._moves = Movements(
            sources.ways, self._job, self.recovery, sessions, processes, self._bound_to
        )
        self._block_keys: Sequence[bytes] = job.expected.block_keys
        self._is_stopped = False
        self._known: set[PublicationName] = set()  # that were told of
        self._refused: set[PublicationName] = set()  # that were told to be refused

    def extend(self, block_keys: Sequence[bytes]) -> None:
        """Hold what is appended against all Block Keys of the caller's that are known by now."""
        self._block_keys = block_keys
        if self.current is not None:
            self.current.extend(block_keys)

    def stop(self) -> None:
        """Want nothing that is not listed yet."""
        self._is_stopped = True
        if self.current is not None:
            self.current.stop()

    async def run(self, until: Callable[[float], None]) -> Failure | None:
        """Try one thing after the other; return None when everything is there.

        Args:
            until: Told of the time at which it ends at the latest, whenever that changes.
        """
        await self._ask_index()
        recovery, opened = self.recovery, None
        while True:
            match step := recovery.next_step():
                case Recompute(failure):
                    return failure
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                    continue
                case AskRelay(number, which):
                    found = await self._ask_relay(self._sources.ways[number], opened, which)
                case AskBlocks(number):
                    found = await self._ask_blocks(self._sources.blocks[number])
            opened = None
            if isinstance(found, Moved):
                recovery.moved(self._sources.ways.index(found.way))
                opened = found.opened
                if found.lost:
                    recovery.begin(self._standing, self._loop.time())
                    until(recovery.until)
                continue
            if found is None:
                return None
            recovery.tried(step, found, self._standing, self._loop.time())
            until(recovery.until)

    async def _ask_index(self) -> None:
        """Add the relays and producers that the index names to those of the caller."""
        index, ways = self._sources.index, self._sources.ways
        if index is not None and self._sources.only is None:
            await self._replicas.ask(index)
            found = self._replicas.ways([way.spec for way in ways], MAX_WAYS)
            ways += map(Way, found)
            self.recovery.found_relays(len(found))

    @property
    def _standing(self) -> Standing:
        current = self.current
        if current is None:
            return Standing(tokens=self._job.tokens_left(None))
        assembler, expected = current.assembler, self._job.expected
        return Standing(
            objects=assembler.summary().objects,
            tokens=self._job.tokens_left(assembler),
            bond=assembler.bond if self._sources.only is None else Bond.BOUND,
            told=assembler.any_ready,
            blocks_may_help=assembler.manifest is not None and bool(expected.block_keys),
        )

    def _bound_to(self) -> Bound | None:
        """Return the publication that another way has to have."""
        if (current := self.current) is None:
            return None
        if not current.assembler.any_ready and self._sources.only is None:
            return None
        return Bound(current.name, current.manifest_track, current.job)

    # -- relays ----------------------------------------------------------------------------------

    async def _ask_relay(
        self, way: Way, opened: Opened | None, which: Ask
    ) -> Failure | Moved | None:
        """Retrieve over one way for as long as it stands."""
        had = await self._moves.lanes_of(way)
        if isinstance(had, Failure):
            return had
        lanes, stood = had
        async with tasks() as group:
            if self._settings.is_spread:
                group.start(lanes.widen())
            work = group.start(self._retrieve(lanes, opened if stood else None, which))
            leave = group.start(self._moves.another_way(way, lanes))
            await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_whole and (moved := leave.result()) is not None:
                log.info(LogEvent.WAY_TAKEN, uri=moved.way.spec.uri, instead_of=way.spec.uri)
                lanes.leave()
                return moved
            found = await work
        if found is None or found.reason is FailureReason.ABANDONED:
            return found
        if not lanes.is_good and not found.barred:
            way.sent_to = way.where_sent(lanes.lead)
            return found._replace(again=True, lost=True)
        return found

    @property
    def _is_whole(self) -> bool:
        """Whether everything is there, and only the sink is still busy with it."""
        return self.current is not None and self.current.assembler.is_complete

    async def _retrieve(self, lanes: Lanes, opened: Opened | None, which: Ask) -> Failure | None:
        """Retrieve over the connections of one way; return None when everything is there."""
        while True:
            lead = await lanes.next_lead() or lanes.lead
            failure = await self._retrieve_over(lead, lanes, opened, which)
            opened = None
            if failure is None or is_final(failure, self._standing):
                return failure
            if failure.reason is FailureReason.ABANDONED:
                return failure
            if lead.closed is None or await lanes.next_lead() is None:
                return failure
            # Another connection is the lead now.

    async def _retrieve_over(
        self, lead: MoqtConnection, lanes: Lanes, opened: Opened | None, which: Ask
    ) -> Failure | None:
        failure = None
        if which is Ask.SAME and (current := self.current) is not None:
            # Another relay may have what is missing of the publication that was begun.
            failure = await self._run_publication(lead, lanes, current, opened)
            if failure is None or lead.closed is not None:
                return failure
            if not may_look_for_another(failure, self._standing, which):
                return failure
        if (only := self._sources.only) is not None:
            blocks = self._job.expected.blocks_of(only)
            self._job.tell(PublicationFound(publication=only, blocks=blocks))
            self.current = self._download(only, self._job)
            return await self._run_publication(lead, lanes, self.current, None)
        async with tasks() as group:
            return await self._discover(lead, lanes, group, which, failure)

    # -- block services --------------------------------------------------------------------------

    async def _ask_blocks(self, source: SectionSource) -> Failure | None:
        assert self.current is not None, "a manifest says what is missing"
        return await self.current.fill(source)

    # -- publications ----------------------------------------------------------------------------

    async def _discover(
        self,
        lead: MoqtConnection,
        lanes: Lanes,
        group: Tasks,
        which: Ask,
        failure: Failure | None,
    ) -> Failure | None:
        """Find publications and try one after the other; ``failure`` is that of the current one."""
        found = self._discovery(lead, lanes, which)
        discovery, patience = found.discovery, found.patience
        has_asked = False
        while True:
            names = discovery.best()
            if not names and not has_asked:
                has_asked = True
                nobody = await self._look_for(discovery, group)
                if nobody is not None:  # is left to tell of a publication
                    failure = more_telling(failure, nobody)
                    over = lead.closed is not None
                    return more_telling(failure, connection_lost(lead.closed)) if over else failure
                continue
            if not names:
                if found.bad:
                    failure, patience = failure or found.bad[-1], self._settings.another_s
                if lead.closed is not None:
                    return more_telling(failure, connection_lost(lead.closed))
                if not await discovery.appears(patience):
                    text = f"no publication appeared within {patience:g} s"
                    return failure or Failure(FailureReason.NOT_FOUND, text)
                continue
            patience = self._settings.another_s
            opened = None
            if not self._job.is_eager or len(names) > 1 or self._may_join:
                opened, refusal = await discovery.choose(self._note_refusal)
                if opened is None:
                    failure = refusal or failure
                    continue
            name = names[0] if opened is None else opened.name
            discovery.tried(name)
            current = self._take_up(name, opened, failure)
            if isinstance(current, Failure):
                failure = failure or current
                continue
            failure = await self._run_publication(lead, lanes, current, opened)
            if failure is None or not may_look_for_another(failure, self._standing, which):
                return failure

    def _discovery(self, lead: MoqtConnection, lanes: Lanes, which: Ask) -> _Looking:
        """Begin to look for publications over a connection, knowing what the index told."""
        lost = self.recovery.something_lost
        bad: list[Failure] = []

        def found(name: PublicationName, blocks: int) -> None:
            self._tell_found(name, blocks)
            why = self._sources.bad.why_bad(name, self._loop.time(), at=lanes.uri)
            if why is not None:
                discovery.tried(name)
                bad.append(Failure(FailureReason.REFUSED, f"known to be bad: {why}"))
                self._tell_refused(name, bad[-1].text)

        discovery = Discovery(
            lead,
            self._job,
            found,
            job_of=self._replicas.job_of,
            octets_per_s=lanes.pace.octets_per_s or self._settings.octets_per_s,
            deadline_at=self.recovery.until,
        )
        if self.current is not None and (which is Ask.ANOTHER or not lost):
            discovery.tried(self.current.name)
        for replica in self._replicas:
            discovery.noted(replica.publication, replica.blocks)
        patience = self._settings.discovery_timeout_s
        if (lost or which is Ask.ANOTHER) and self.current is not None:
            patience = self._settings.another_s
        return _Looking(discovery, bad, patience)

    async def _look_for(self, discovery: Discovery, group: Tasks) -> Failure | None:
        if self._settings.prefixes == "auto":
            questions = Questions(len(self._job.expected.block_keys))
            return await discovery.look_through(questions, group)
        return await discovery.look_for(self._sources.prefixes, group)

    @property
    def _may_join(self) -> bool:
        """Whether a publication that is found may be able to go on for the one that was begun."""
        if (current := self.current) is None:
            return False
        return current.assembler.any_ready or current.assembler.is_worth_joining

    def _take_up(
        self, name: PublicationName, opened: Opened | None, why: Failure | None
    ) -> Download | Failure:
        """Return the download of a publication that was found, which is the current one then."""
        current = self.current
        if current is not None and current.name == name:  # it has come back
            return current
        if current is not None and opened is not None and self._may_join:
            joining = self._download(name, self._replicas.job_of(name), current)
            failure = joining.joins(opened)
            if failure is None:
                log.info(
                    LogEvent.PUBLICATION_JOINED,
                    publication=str(name),
                    instead_of=str(current.name),
                )
                self.current = joining
                return joining
            if current.assembler.any_ready:
                opened.subscription.cancel()
                self._tell_refused(name, failure.text)
                # It hides nothing of what the other one failed for.
                return Failure(FailureReason.NOT_FOUND, failure.text)
        self._drop_current(why)
        self.current = self._download(name, self._replicas.job_of(name))
        return self.current

    def _download(
        self, name: PublicationName, job: Job, follows: Download | None = None
    ) -> Download:
        download = Download(name, job, follows)
        download.extend(self._block_keys)
        if self._is_stopped:
            download.stop()
        return download

    async def _run_publication(
        self,
        lead: MoqtConnection,
        lanes: Lanes,
        publication: Download,
        opened: Opened | None,
    ) -> Failure | None:
        try:
            failure = await publication.run(lanes, opened)
        except Refused as exc:
            if lead.closed is not None:
                return connection_lost(lead.closed)
            failure = refused(exc)
        if failure is None:
            return None
        if failure.reason is FailureReason.REFUSED:
            self._note_refusal(publication.name, failure)
        if failure.reason is FailureReason.CONTRADICTED:
            self._note_bad(publication.name, failure.text, lanes.uri)
            if not is_final(failure, self._standing):
                self._drop_current(failure)
        return failure

    def _note_refusal(self, name: PublicationName, failure: Failure) -> None:
        """Tell of a publication that cannot be used, unless it may come back."""
        if not ((self.recovery.something_lost or failure.lost) and failure.again):
            self._tell_refused(name, failure.text)

    def _proven_bad(self, conn: MoqtConnection, name: PublicationName, why: str) -> None:
        if (uri := self._sessions.uri_of(conn)) is not None:
            self._note_bad(name, why, uri)

    def _note_bad(self, name: PublicationName, why: str, uri: str) -> None:
        log.warning(LogEvent.PUBLICATION_BAD, publication=str(name), uri=uri, reason=why)
        self._sources.bad.add(name, why, self._loop.time(), at=uri)

    def _tell_found(self, name: PublicationName, blocks: int) -> None:
        if name not in self._known:
            self._known.add(name)
            self._job.tell(PublicationFound(publication=name, blocks=blocks))

    def _tell_refused(self, name: PublicationName, text: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._job.tell(PublicationRefused(publication=name, text=text))

    def _drop_current(self, why: Failure | None) -> None:
        """Make way for another publication."""
        if (current := self.current) is None:
            return
        self._tell_refused(current.name, why.text if why is not None else "another one was found")
        current.abandon()
        self.current = None
