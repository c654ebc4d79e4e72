"""The Tracks that a relay has to do with, and when each of them is let go of."""

import asyncio
from collections.abc import Callable, Iterator

from moqt.codepoints import PublishDoneCode
from moqt.names import FullTrackName
from moqt.relay.cache import Cache
from moqt.relay.neighbours import Neighbours
from moqt.relay.options import RelayOptions
from moqt.relay.track import RelayedTrack
from moqt.session.budget import ByteBudget


class Holdings:
    """Tracks by name, within the limits of the relay.

    Args:
        options: Those limits.
        neighbours: Who is told of Tracks that can be had here although nobody publishes them.
        on_malformed: Called with a Track that contradicts itself, and how.
    """

    def __init__(
        self,
        options: RelayOptions,
        neighbours: Neighbours,
        on_malformed: Callable[[FullTrackName, str], None] = lambda name, reason: None,
    ) -> None:
        self._on_malformed = on_malformed
        self._options = options
        self._neighbours = neighbours
        self.budget = ByteBudget(options.cache_octets)
        self._tracks: Cache[RelayedTrack] = Cache(self.budget, self._released)
        self.is_short = False
        """Somebody was refused for want of room, and there has been none since."""

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[RelayedTrack]:
        """Go through the Tracks of the moment; they may change meanwhile."""
        return iter(list(self._tracks.values()))

    def get(self, name: FullTrackName) -> RelayedTrack | None:
        """Return a Track, if it is held."""
        return self._tracks.get(name)

    def touch(self, name: FullTrackName) -> None:
        """Note that a Track is asked for."""
        self._tracks.touch_if_held(name)

    def to_receive(self, name: FullTrackName) -> RelayedTrack | None:
        """Return the Track that a publisher is to bring; None if there is no room for it."""
        track = self._tracks.get(name)
        if track is not None and track.has_ended:
            self._tracks.drop(track)  # it failed; somebody else begins anew
            track = None
        if track is None and self.has_room():
            track = RelayedTrack(name, self._on_malformed)
            self._tracks.keep(track)
        self.is_short |= track is None
        return track

    def has_room(self) -> bool:
        """Make room for one Track; return whether there is any."""
        return self._tracks.make_room(self._options.max_tracks)

    @property
    def is_full(self) -> bool:
        """Whether there is no room unless something is let go."""
        return not self.budget.has_room or len(self._tracks) >= self._options.max_tracks

    def stalled(self) -> list[RelayedTrack]:
        """Return Tracks that somebody is refused for, and that are kept for who takes nothing."""
        return self._tracks.stalled() if self.is_short else []

    def is_complete(self, track: RelayedTrack) -> None:
        """A Track is here from its beginning to its end: from now on it can be had here."""
        if not track.is_announced:
            track.is_announced = True
            self._neighbours.announce(track.name.namespace)

    def used(self, track: RelayedTrack) -> None:
        """Somebody reads a Track."""
        if track.linger is not None:
            track.linger.cancel()
            track.linger = None

    def tidy(self, track: RelayedTrack) -> None:
        """Look at what is to become of a Track that may be in use no more."""
        if track.is_wanted:
            return
        if track.merged is None and not track.sources:
            self._tracks.drop(track)
        elif track.sources and track.linger is None:
            track.linger = asyncio.get_running_loop().call_later(
                self._options.linger_s, self._lingered, track
            )
        elif track.merged is not None:
            ended = track.merged.local.ended
            if ended is not None and ended.code is PublishDoneCode.MALFORMED_TRACK:
                self._tracks.drop(track)

    def tick(self, now: float) -> None:
        """Let go of what is too old, and of what has no room."""
        self._tracks.expire(now)
        if self.is_short or not self.budget.has_room:
            self.is_short &= not self.has_room()

    def close(self) -> None:
        """Nothing is to happen to the Tracks by itself any more."""
        for track in self:
            track.stop_timers()

    def _lingered(self, track: RelayedTrack) -> None:
        track.linger = None
        if not track.is_wanted:
            for source in list(track.sources):
                if source.is_own:  # what was offered unasked is the offerer's to end
                    source.give_up()

    def _released(self, track: RelayedTrack) -> None:
        """A Track is let go of."""
        track.stop_timers()
        for source in track.sources:
            source.give_up()
        if track.is_announced:
            track.is_announced = False
            self._neighbours.withdraw(track.name.namespace)
        if track.merged is not None and not (track.subscribers or track.fetches):
            track.merged.local.end(PublishDoneCode.EXPIRED)
            track.merged.local.drop()
