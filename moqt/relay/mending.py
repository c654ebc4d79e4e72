"""What is missing of a Track that is received otherwise is asked for when somebody wants it.

A publisher that was lost in the middle leaves holes, and one that offers a Track in its middle has
a past that it was not asked for. Whoever fetches such a Track, or fills from it, would be told that
this is unknown; not so while there is a publisher who could tell (MOQT, "Fetch").
"""

import time
from collections.abc import Sequence

import structlog

from moqt.aio import MoqtConnection
from moqt.aio.tracks import TrackEvent
from moqt.codepoints import MAX_VI64
from moqt.errors import MoqtError
from moqt.location import Location
from moqt.relay.merge import MergedTrack
from moqt.relay.options import RelayOptions
from moqt.relay.tasks import Tasks
from moqt.relay.track import RelayedTrack
from moqt.session.events import FetchEnded
from moqt.wire.filters import LocationFilter

log = structlog.get_logger("moqt.relay")

#: Ranges asked for at once; if there are more, the last of them takes in all that are left.
_MAX_RANGES = 16

#: Seconds in which a Track is mended once: what could not be had is not asked for all the time.
_PAUSE_S = 1.0


class Mending:
    """Fetches what is missing of Tracks."""

    def __init__(self, options: RelayOptions, tasks: Tasks) -> None:
        self._options = options
        self._tasks = tasks

    def mend(self, track: RelayedTrack) -> None:
        """Ask the publishers of a Track for what is missing of it: before a request is served."""
        merged, now = track.merged, time.monotonic()
        if merged is None or not merged.is_live or now < track.mended_at + _PAUSE_S:
            return
        publishers = [s.connection for s in track.sources if s.number is not None]
        missing = merged.missing()
        if not missing or not publishers:
            return
        track.mended_at = now
        if len(missing) > _MAX_RANGES:
            missing[_MAX_RANGES - 1 :] = [(missing[_MAX_RANGES - 1][0], missing[-1][1])]
        for first, last in missing:
            number = merged.ask(first, last)
            self._tasks.spawn(self._fetch(track, merged, publishers, number, (first, last)))

    async def _fetch(
        self,
        track: RelayedTrack,
        merged: MergedTrack,
        publishers: Sequence[MoqtConnection],
        number: int,
        span: tuple[Location, Location],
    ) -> None:
        """Fetch a range from one publisher after the other, until nothing of it is missing."""
        first, last = span

        def take(event: TrackEvent) -> None:
            track.take_from(number, event)

        for connection in publishers:
            ended: FetchEnded | None = None
            try:
                fetch = await connection.fetch(
                    track.name,
                    location_filter=_exactly(first, last),
                    pieces=True,
                    sink=take,
                    timeout_s=self._options.request_timeout_s,
                )
                await fetch.finished.wait()
                ended = fetch.ended
            except (MoqtError, TimeoutError) as exc:
                log.info("not mended", track=str(track.name), error=str(exc) or repr(exc))
            if ended is not None:
                track.take_from(number, ended)
            merged.leave(number, None, "", time.monotonic())
            if merged.local.ended is not None or not merged.missing(first, last):
                return
            number = merged.ask(first, last)
        merged.leave(number, None, "", time.monotonic())


def _exactly(first: Location, last: Location) -> LocationFilter:
    if last.object == MAX_VI64:
        return LocationFilter.group_end(first.group, first.object, last.group)
    return LocationFilter.range(first.group, first.object, last.group, last.object)
