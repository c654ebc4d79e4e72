"""Pausing publishers whose Track nobody wants at the moment, and having them go on.

While any subscription to a Track runs, so do those that bring it; when all are paused, so are
these (MOQT, "Relays"). A publisher that is paused is a source no longer, and joins anew when it
goes on: what it published meanwhile is asked of it as a fill. Until then an update by which a
subscriber goes on is not answered, lest it be told a Largest Object that was passed long ago.

To pause waits until nobody has wanted the Track for a while, to go on does not: whoever changes
their mind all the time costs two updates in that time.
"""

import time

import structlog

from moqt.codepoints import ParameterType as P
from moqt.errors import MoqtError, UsageError
from moqt.location import Location
from moqt.relay.merge import MergedTrack
from moqt.relay.options import RelayOptions
from moqt.relay.readers import Readers
from moqt.relay.sources import Sources
from moqt.relay.tasks import Tasks
from moqt.relay.track import RelayedTrack, Source
from moqt.session.coverage import FIRST, Knowledge
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters

log = structlog.get_logger("moqt.relay")


class Pausing:
    """Tells publishers to pause and to go on."""

    def __init__(
        self, options: RelayOptions, sources: Sources, readers: Readers, tasks: Tasks
    ) -> None:
        self._options = options
        self._sources = sources
        self._readers = readers
        self._tasks = tasks

    def look(self, track: RelayedTrack, now: float) -> None:
        """See whether a Track is wanted. Call it a few times a second."""
        if not _is_idle(track):
            track.idle_since = None
        elif track.idle_since is None:
            track.idle_since = now
        elif now - track.idle_since >= self._options.pause_after_s:
            self._pause(track)
        if not track.is_paused:
            self._tell(track)

    def resume(self, track: RelayedTrack) -> None:
        """A Track is wanted again: ask those that pause, and those that came meanwhile."""
        if not track.is_paused:
            return
        track.is_paused, track.idle_since = False, None
        if any(source.number is not None for source in track.sources):
            track.goes_on()  # none of them was told yet
        self._sources.ask_all(track)
        self._tell(track)

    def began_paused(self, source: Source) -> None:
        """A publisher offered a Track and sends nothing until it is told to."""
        track, merged = source.track, source.track.merged
        assert merged is not None, "the source has joined"
        _leave(source, merged)
        if not merged.is_live:
            self._sleep(track, merged)

    def _pause(self, track: RelayedTrack) -> None:
        assert track.merged is not None, "it is live"
        log.debug("pausing publishers", track=str(track.name))
        self._sleep(track, track.merged)
        self._tell(track)

    def _sleep(self, track: RelayedTrack, merged: MergedTrack) -> None:
        track.is_paused, track.idle_since = True, None
        merged.local.sleep(lambda: self.resume(track))

    def _tell(self, track: RelayedTrack) -> None:
        for source in track.sources:
            if source.is_paused is not track.is_paused and not source.is_switching:
                source.is_switching = True
                self._tasks.spawn(self._switch(source))

    async def _switch(self, source: Source) -> None:
        """Have a publisher do what is wanted of it; one update at a time."""
        track, merged, subscription = source.track, source.track.merged, source.subscription
        try:
            while source in track.sources and source.is_paused is not track.is_paused:
                if merged is None or subscription is None:
                    return  # it has not answered yet
                if track.is_paused:
                    _leave(source, merged)
                    await subscription.update(
                        Parameters({P.FORWARD: 0}), timeout_s=self._options.request_timeout_s
                    )
                else:
                    await self._join_anew(source, merged)
        except (MoqtError, TimeoutError) as exc:
            log.warning("publisher given up", track=str(track.name), error=str(exc))
            if subscription is not None:
                subscription.cancel()  # then it is lost like any other
        finally:
            source.is_switching = False

    async def _join_anew(self, source: Source, merged: MergedTrack) -> None:
        subscription = source.subscription
        assert subscription is not None, "it has been paused"
        missing = _first_not_known(merged)
        fill = FillParameters(
            Parameters(
                {P.LOCATION_FILTER: LocationFilter.absolute_start(missing.group, missing.object)}
            )
        )
        source.resuming()
        answer = await subscription.update(
            Parameters({P.FORWARD: 1, P.FILL_PARAMETERS: fill}),
            timeout_s=self._options.request_timeout_s,
        )
        if answer.largest is None and merged.local.largest is not None:
            raise UsageError("it does not say up to where it has published")
        if source not in source.track.sources:
            return  # lost meanwhile
        number = merged.join(largest=answer.largest, filling=answer.fill_expected)
        source.joined(number, filling=answer.fill_expected)
        source.track.goes_on()
        self._readers.serve_waiting(source.track)


def _is_idle(track: RelayedTrack) -> bool:
    """Whether a Track is received, and everybody who has it is paused."""
    merged = track.merged
    return (
        merged is not None
        and merged.is_live
        and not track.is_paused
        and not track.has_ended
        and bool(track.subscribers)
        and not track.fetches
        and not track.waiting
        and not any(source.is_filling or source.is_switching for source in track.sources)
        and all(source.number is not None for source in track.sources)
        and not merged.local.is_wanted
    )


def _leave(source: Source, merged: MergedTrack) -> None:
    number = source.paused()
    if number is not None:
        merged.leave(number, None, "", time.monotonic())


def _first_not_known(merged: MergedTrack) -> Location:
    return next(
        (
            first
            for first, _, knowledge in merged.coverage.runs()
            if knowledge is not Knowledge.COMPLETE
        ),
        FIRST,
    )
