"""Lanes: the connections to one relay or producer that a retrieval is spread over. Shell.

The publication is found, and its manifest followed, over one of them, the lead; data come over all,
or, where there are any in processes of their own, over those. Who loses one goes on over the
others: the retrieval is only lost with the last.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

import structlog

from kvcs.consumer.candidates import Pace
from kvcs.consumer.errands import Errand, Report
from kvcs.consumer.failures import Failure
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.tasks import Tasks, tasks
from kvcs.telemetry import LogEvent
from moqt.aio import Fetch, MoqtConnection, Subscription
from moqt.aio.tracks import TrackEvent
from moqt.codepoints import GroupOrder
from moqt.session.events import FetchEnded, SubscriptionEnded
from moqt.wire.filters import LocationFilter

log = structlog.get_logger("kvcs.consumer")


class Bringing(Protocol):
    """What comes of an errand: iterate over it, and stop it in any case."""

    @property
    def ended(self) -> SubscriptionEnded | FetchEnded | None:
        """How its subscription or its fetch ended, once it has."""

    def __aiter__(self) -> AsyncIterator[TrackEvent | Report]:
        """Yield Objects, and what goes with them, or what has become of Objects already.

        Raises:
            MoqtError: From the iteration, if the connection is lost.
        """

    async def stop(self) -> None:
        """Bring nothing more; when this returns, nobody places anything any more."""


class Lane(Protocol):
    """One of the connections."""

    @property
    def is_apart(self) -> bool:
        """Whether it is in a process of its own, which examines and places what comes."""

    @property
    def is_over(self) -> bool:
        """Whether it is gone, and every errand on it with it."""

    @property
    def is_usable(self) -> bool:
        """Whether it takes errands."""

    @property
    def max_ranges(self) -> int:
        """Ranges of a filter that the peer takes; 0: it cannot be asked for a part of a Group."""

    @property
    def end(self) -> str:
        """Why it is gone, once it is."""

    def is_good(self, silence_s: float) -> bool:
        """Whether it takes errands, and its peer has given a sign of life in so many seconds."""

    async def run(self, errand: Errand) -> Bringing:
        """Ask for something.

        Raises:
            RequestRejected: If the peer refuses.
            TimeoutError: If it does not answer in time.
            MoqtError: If the connection is lost.
        """

    async def until_silent(self, silence_s: float) -> None:
        """Return when its peer gives no sign of life any more, or it is gone."""

    async def until_in_doubt(self, silence_s: float) -> None:
        """Return when its peer is silent or goes away, or it is gone."""

    def leave(self) -> None:
        """Close it, without waiting for that."""


class LocalBringing:
    """A request of this process."""

    def __init__(self, request: Subscription | Fetch) -> None:
        self._request = request

    @property
    def ended(self) -> SubscriptionEnded | FetchEnded | None:
        """See :class:`Bringing`."""
        return self._request.ended

    def __aiter__(self) -> AsyncIterator[TrackEvent]:
        """See :class:`Bringing`."""
        return aiter(self._request)

    async def stop(self) -> None:
        """See :class:`Bringing`."""
        self._request.cancel()


class LocalLane:
    """A connection of this process.

    Args:
        conn: The connection.
        let_go: Closes it, without waiting for that.
    """

    is_apart = False

    def __init__(self, conn: MoqtConnection, let_go: Callable[[MoqtConnection], None]) -> None:
        self.conn = conn
        self._let_go = let_go

    @property
    def is_over(self) -> bool:
        """See :class:`Lane`."""
        return self.conn.closed is not None

    @property
    def is_usable(self) -> bool:
        """See :class:`Lane`."""
        return not self.is_over and self.conn.going_away is None

    @property
    def max_ranges(self) -> int:
        """See :class:`Lane`."""
        return max_ranges(self.conn)

    @property
    def end(self) -> str:
        """See :class:`Lane`."""
        closed = self.conn.closed
        return "" if closed is None else closed.reason or f"{closed.code!r}"

    def is_good(self, silence_s: float) -> bool:
        """See :class:`Lane`."""
        return self.is_usable and time.monotonic() - self.conn.heard_at < silence_s

    async def run(self, errand: Errand) -> LocalBringing:
        """See :class:`Lane`."""
        return LocalBringing(await ask(self.conn, errand))

    async def until_silent(self, silence_s: float) -> None:
        """See :class:`Lane`."""
        await self.conn.wait_silent(silence_s)

    async def until_in_doubt(self, silence_s: float) -> None:
        """See :class:`Lane`."""
        async with tasks() as group:
            waits = (self.conn.wait_silent(silence_s), self.conn.wait_going_away())
            started = [group.start(wait) for wait in waits]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)

    def leave(self) -> None:
        """See :class:`Lane`."""
        self._let_go(self.conn)


def max_ranges(conn: MoqtConnection) -> int:
    """Return how many ranges of a filter a peer takes (MAX_FILTER_RANGES)."""
    setup = conn.session.peer_setup
    return 0 if setup is None else setup.max_filter_ranges


async def ask(conn: MoqtConnection, errand: Errand) -> Subscription | Fetch:
    """Send the request of an errand."""
    if not errand.is_live:
        return await conn.fetch(
            errand.track,
            location_filter=errand.past,
            range_filters=errand.range_filters,
            group_order=GroupOrder.ASCENDING,
            timeout_s=errand.timeout_s,
        )
    return await conn.subscribe(
        errand.track,
        location_filter=LocationFilter.NEXT_OBJECT,
        fill=errand.past,
        range_filters=errand.range_filters,
        timeout_s=errand.timeout_s,
    )


class Lanes:
    """The connections to one relay or producer.

    Args:
        uri: Where they go to.
        first: The first of them, which stands.
        settings: How many there are to be, and what counts as silence.
        dial: Makes another one in this process.
        dial_apart: Makes one in a process of its own.

    Attributes:
        uri: As given.
        settled: Set when all stand that are to be, or could not be had.
        pace: How fast finished Objects come over them.
    """

    def __init__(
        self,
        uri: str,
        first: LocalLane,
        settings: RetrievalSettings,
        *,
        dial: Callable[[], Awaitable[LocalLane | Failure]],
        dial_apart: Callable[[], Awaitable[Lane | Failure]],
    ) -> None:
        self.uri = uri
        self.settled = asyncio.Event()
        self.pace = Pace()
        self._lanes: list[Lane] = [first]
        self._lead = first
        self._settings = settings
        self._dial = dial
        self._dial_apart = dial_apart
        self._told_missing = False
        self._watchers: Tasks | None = None
        self._watching: set[asyncio.Task[None]] = set()
        if not settings.is_spread:
            self.settled.set()

    @property
    def lead(self) -> MoqtConnection:
        """The connection of this process that is asked for all but data; it may be lost."""
        return self._lead.conn

    @property
    def for_data(self) -> list[Lane]:
        """Those to be asked for data, at least one."""
        usable = [lane for lane in self._lanes if lane.is_usable]
        return _apart(usable) or usable or self._standing or [self._lead]

    @property
    def is_usable(self) -> bool:
        """Whether there is one that can be the lead."""
        return any(lane.is_usable for lane in self._lanes if isinstance(lane, LocalLane))

    @property
    def is_lost(self) -> bool:
        """Whether all of them are gone."""
        return not self._standing

    @property
    def is_good(self) -> bool:
        """Whether there is one that stands, is to stay, and is not silent."""
        return any(lane.is_good(self._settings.silence_s) for lane in self._lanes)

    @property
    def is_in_doubt(self) -> bool:
        """Whether some still stand, but had all better be replaced."""
        return not self.is_lost and not self.is_good

    async def until_in_doubt(self) -> None:
        """Return when all that stand are silent or are to be left, or when none stands."""
        silence_s = self._settings.silence_s
        while good := [lane for lane in self._lanes if lane.is_good(silence_s)]:
            await good[0].until_in_doubt(silence_s)

    async def next_lead(self) -> MoqtConnection | None:
        """Return a lead that can be asked: the one there is, another one, or one made now.

        None: there is none, and none to be had or nothing that it would be the lead of.
        """
        if self._lead.is_usable:
            return self.lead
        for lane in self._lanes:
            if isinstance(lane, LocalLane) and lane.is_usable:
                self._lead = lane
                return self.lead
        if not _apart(self._standing):
            return None
        made = await self._dial()
        if isinstance(made, Failure):
            return None
        self._lead = made
        self._add(made)
        return self.lead

    async def widen(self) -> None:
        """Make the connections that are missing, and watch over all; return when none stands.

        What cannot be had is done without. A connection that falls silent while others are heard
        is left, so that whoever waits for it turns to them.
        """
        settings, reason = self._settings, ""
        self._lanes, self._watching = self._standing or self._lanes, set()
        dial = self._dial_apart if settings.processes else self._dial
        async with tasks() as group:
            self._watchers = group
            for lane in self._lanes:
                self._watch(lane)
            missing = settings.connections - len(self._carriers)
            dialling = [group.start(_awaited(dial)) for _ in range(missing)]
            if dialling:
                self.settled.clear()
            for attempt in asyncio.as_completed(dialling):
                made = await attempt
                if isinstance(made, Failure):
                    reason = made.text
                else:
                    self._add(made)
            if reason and not self._told_missing:
                self._told_missing = True
                log.warning(
                    LogEvent.LANES_MISSING,
                    uri=self.uri,
                    wanted=settings.connections,
                    found=len(self._carriers),
                    reason=reason,
                )
            self.settled.set()
            while self._watching:
                await asyncio.wait(self._watching)

    def leave(self) -> None:
        """Close all of them, without waiting for that."""
        for lane in self._lanes:
            lane.leave()

    @property
    def _standing(self) -> list[Lane]:
        return [lane for lane in self._lanes if not lane.is_over]

    @property
    def _carriers(self) -> list[Lane]:
        """Those that stand of those that data are to come over."""
        return _apart(self._standing) if self._settings.processes else self._standing

    def _add(self, lane: Lane) -> None:
        self._lanes.append(lane)
        self._watch(lane)

    def _watch(self, lane: Lane) -> None:
        if self._watchers is not None:
            watching = self._watchers.start(self._watch_over(lane))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)

    async def _watch_over(self, lane: Lane) -> None:
        silence_s = self._settings.silence_s
        while True:
            await lane.until_silent(silence_s)
            others = [other for other in self._standing if other is not lane]
            if lane.is_over:
                reason = lane.end
                break
            if any(other.is_good(silence_s) for other in others):
                reason = "silent"
                lane.leave()
                break
            # Nobody is heard. Who is known to be silent says so at once, and so again and again.
            await asyncio.sleep(silence_s / 4)
        if others:
            log.info(LogEvent.LANE_LOST, uri=self.uri, reason=reason, left=len(others))


def _apart(lanes: Iterable[Lane]) -> list[Lane]:
    return [lane for lane in lanes if lane.is_apart]


async def _awaited(dial: Callable[[], Awaitable[Lane | Failure]]) -> Lane | Failure:
    return await dial()
