"""A Track that a relay has to do with: what is held of it, who brings it, who wants it.

Here it is only known; who changes it is one of the files beside this one.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from moqt.aio import MoqtConnection, Subscription
from moqt.aio.tracks import TrackEvent
from moqt.codepoints import PublishDoneCode
from moqt.names import FullTrackName
from moqt.relay.merge import Brought, MalformedTrack, MergedTrack
from moqt.session.commands import StreamId
from moqt.session.events import (
    FetchReceived,
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    SubscribeReceived,
)

log = structlog.get_logger("moqt.relay")

#: A request that is answered once its Track is there.
Asked = SubscribeReceived | FetchReceived
Reader = tuple[MoqtConnection, RequestId]
#: What comes of a publisher but for the beginning and the end of streams.
_MOST = (ObjectPiece, ObjectBegan)


class Source:
    """A publisher's subscription that a Track is received by.

    Args:
        track: The Track.
        connection: The session with its publisher.
        is_own: It began with a SUBSCRIBE of ours, not with a PUBLISH.
    """

    def __init__(
        self, track: "RelayedTrack", connection: MoqtConnection, *, is_own: bool = True
    ) -> None:
        self.track = track
        self.connection = connection
        self.is_own = is_own
        self.subscription: Subscription | None = None
        self.number: int | None = None
        """Its number in the merged Track; None while nothing of it counts."""

        self.is_given_up = False
        self.is_paused = False
        """Its publisher was told that nothing is wanted now."""

        self.is_switching = False
        """Its publisher is being told to pause, or to go on."""

        self.is_filling = False
        """It is bringing the past of the Track."""

        self._early: list[TrackEvent] = []
        self._open: dict[StreamId, SubgroupOpened] = {}

    def sink(self, event: TrackEvent) -> None:
        """Take what the publisher sends."""
        if not isinstance(event, _MOST):
            if isinstance(event, SubgroupOpened):
                self._open[event.stream_id] = event
            elif isinstance(event, SubgroupClosed):
                self._open.pop(event.stream_id, None)
            elif isinstance(event, FillEnded):
                self.is_filling = False
        if self.number is not None:
            self.track.take_from(self.number, event)
        elif not self.is_paused:
            self._early.append(event)  # ahead of the answer being looked at

    def joined(self, number: int, *, filling: bool) -> None:
        """From now on its events are for this source of the Track."""
        early, self._early = self._early, []
        self.number = number
        self.is_filling = filling and not any(isinstance(event, FillEnded) for event in early)
        for event in early:
            self.track.take(self, event)

    def paused(self) -> int | None:
        """From now on nothing of it counts; return the number that it had."""
        number, self.number = self.number, None
        self.is_paused = True
        return number

    def resuming(self) -> None:
        """What comes from now on counts once it has joined anew.

        A stream that is open may go on then; it does not begin there.
        """
        self.is_paused = False
        self._early = [replace(opened, first_object=False) for opened in self._open.values()]

    def give_up(self) -> None:
        """Receive no more."""
        self.is_given_up = True
        if self.subscription is not None:
            self.subscription.cancel()


@dataclass(frozen=True, slots=True)
class Failure:
    """What subscribers are told when nobody brings a Track any more."""

    code: PublishDoneCode
    reason: str


@dataclass(eq=False)
class RelayedTrack:
    """A Track that the relay has to do with."""

    name: FullTrackName
    on_malformed: Callable[[FullTrackName, str], None] = lambda name, reason: None
    """Called when it contradicts itself."""

    merged: MergedTrack | None = None
    """None: nobody has said yet that it exists."""

    sources: list[Source] = field(default_factory=list)
    subscribers: set[Reader] = field(default_factory=set)
    """Subscriptions that are served, those that began with a PUBLISH of ours included."""

    fetches: set[Reader] = field(default_factory=set)
    waiting: dict[Reader, Asked] = field(default_factory=dict)
    """Requests that are not answered yet, in the order in which they came."""

    deadlines: dict[Reader, asyncio.TimerHandle] = field(default_factory=dict)
    """Until when those wait that said how long."""

    behind: set[Reader] = field(default_factory=set)
    """Readers that were too far behind when it was last looked."""

    standing: dict[Reader, tuple[int, float]] = field(default_factory=dict)
    """While there is no room: who waits to be sent more, at how many octets, and since when."""

    stalled: set[Reader] = field(default_factory=set)
    """Readers that take nothing, or take nothing elsewhere and have nothing to take here."""

    linger: asyncio.TimerHandle | None = None
    failure: Failure | None = None
    """Its last publisher was lost, and another one is waited for."""

    grace: asyncio.TimerHandle | None = None
    """Until when, if nobody is asked."""

    gave_up: set[MoqtConnection] = field(default_factory=set)
    """Publishers that ended it with an error: they are not asked again."""

    is_paused: bool = False
    """Its publishers are told to pause, since nobody wants more of it."""

    idle_since: float | None = None
    """Since when all its subscribers have been paused."""

    is_announced: bool = False
    """It is told of as something that can be had here."""

    mended_at: float = -math.inf
    """When publishers were last asked for what is missing of it."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is being sent, or waited for."""
        return bool(self.subscribers or self.fetches or self.waiting)

    @property
    def is_in_use(self) -> bool:
        """Whether it is being sent, or waited for, or a publisher keeps it here."""
        return self.is_wanted or bool(self.sources)

    @property
    def is_spare(self) -> bool:
        """Whether it is received only in case that somebody comes back to it."""
        return not self.is_wanted and all(source.is_own for source in self.sources)

    @property
    def is_stalled(self) -> bool:
        """Whether it is in use only by readers that take nothing."""
        return (
            bool(self.stalled)
            and not self.waiting
            and self.stalled >= self.subscribers | self.fetches
            and all(source.is_own for source in self.sources)
        )

    @property
    def expires_at(self) -> float | None:
        """When MAX_CACHE_DURATION has passed since an Object came."""
        merged = self.merged
        if merged is None or merged.max_age_s is None:
            return None
        return merged.changed_at + merged.max_age_s

    @property
    def is_served(self) -> bool:
        """Whether a request for it can be answered at once."""
        merged = self.merged
        return merged is not None and (merged.is_live or merged.is_complete)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added to it any more, however it ended."""
        return self.merged is not None and self.merged.local.ended is not None

    def is_all_from(self, connection: MoqtConnection) -> bool:
        """Whether nothing is known of it but what one session brings, or is asked for."""
        return (
            not (self.merged is not None and self.merged.is_complete)
            and bool(self.sources)
            and all(source.connection is connection for source in self.sources)
        )

    @property
    def askers(self) -> set[MoqtConnection]:
        """The sessions that want it: nobody is sent a request of its own."""
        return {connection for connection, _ in (*self.waiting, *self.subscribers, *self.fetches)}

    def take(self, source: Source, event: TrackEvent) -> None:
        """Take what a source brings; a Track that contradicts itself ends."""
        if source.number is not None:
            self.take_from(source.number, event)

    def take_from(self, number: int, event: Brought) -> None:
        """Take what the source of a number in the merged Track brings."""
        if self.merged is None:
            return
        try:
            self.merged.take(number, event, time.monotonic())
        except MalformedTrack as exc:
            log.warning("malformed track", track=str(self.name), reason=str(exc))
            self.on_malformed(self.name, str(exc))
            self.merged.end_malformed(str(exc))
            for other in list(self.sources):
                other.give_up()

    def goes_on(self) -> None:
        """A publisher brings it: who wants to go on may."""
        self.is_paused, self.idle_since = False, None
        if self.merged is not None:
            self.merged.local.wake()

    def stop_timers(self) -> None:
        """Nothing is to happen to it by itself any more."""
        for timer in (self.linger, self.grace, *self.deadlines.values()):
            if timer is not None:
                timer.cancel()
        self.linger = self.grace = None
        self.deadlines.clear()
