"""What a relay keeps: Tracks by publication, the least recently used let go first.

A publication is what has one Track Namespace. Of one that is half gone nobody could make anything,
so a publication is kept or let go as a whole. Pure: the time is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from moqt.names import FullTrackName, TrackNamespace
from moqt.session.budget import ByteBudget


class Entry(Protocol):
    """A Track that is kept."""

    @property
    def name(self) -> FullTrackName:
        """Its Full Track Name."""

    @property
    def is_in_use(self) -> bool:
        """Whether it is being received, sent or waited for, and must stay."""

    @property
    def is_spare(self) -> bool:
        """Whether it is in use only in case that somebody wants it soon."""

    @property
    def is_stalled(self) -> bool:
        """Whether it is in use only by those who take nothing."""

    @property
    def expires_at(self) -> float | None:
        """When it may no longer be served (MOQT, "MAX_CACHE_DURATION"); None: never."""


E = TypeVar("E", bound=Entry)


class Cache(dict[FullTrackName, E]):
    """Tracks by name, in publications that are ordered by use.

    Args:
        budget: What the payloads of all Tracks together may take.
        release: Called with each Track that is let go of.
    """

    def __init__(self, budget: ByteBudget, release: Callable[[E], None]) -> None:
        super().__init__()
        self.budget = budget
        self._release = release
        self._publications: OrderedDict[TrackNamespace, dict[FullTrackName, E]] = OrderedDict()

    def keep(self, entry: E) -> None:
        """Take a Track in; its publication is the most recently used one."""
        self[entry.name] = entry
        self._publications.setdefault(entry.name.namespace, {})[entry.name] = entry
        self._publications.move_to_end(entry.name.namespace)

    def touch_if_held(self, name: FullTrackName) -> None:
        """Note that a Track's publication is used, if the Track is held."""
        if name in self:
            self._publications.move_to_end(name.namespace)

    def drop(self, entry: E) -> None:
        """Let go of one Track."""
        if self.get(entry.name) is entry:
            del self[entry.name]
            publication = self._publications[entry.name.namespace]
            del publication[entry.name]
            if not publication:
                del self._publications[entry.name.namespace]
            self._release(entry)

    def make_room(self, limit: int) -> bool:
        """Let go of publications that nobody uses until there is room; return whether there is.

        Those go first that are not in use at all, then those that are only spare.

        Args:
            limit: Tracks that there may be, besides what the budget says of their payloads.
        """
        for spare_too in (False, True):
            for publication in list(self._publications.values()):
                if self._has_room(limit):
                    return True
                tracks = list(publication.values())
                if all(not entry.is_in_use or (spare_too and entry.is_spare) for entry in tracks):
                    for entry in tracks:
                        self.drop(entry)
        return self._has_room(limit)

    def stalled(self) -> list[E]:
        """Return what those are to be parted from who take nothing, so that there is more room.

        It is the least recently used publication that nobody else uses, those of its Tracks.
        """
        for publication in self._publications.values():
            tracks = publication.values()
            found = [entry for entry in tracks if entry.is_stalled]
            others = (entry for entry in tracks if not entry.is_stalled)
            if found and all(not entry.is_in_use or entry.is_spare for entry in others):
                return found
        return []

    def expire(self, now: float) -> None:
        """Let go of Tracks that may no longer be served and are not in use."""
        for entry in list(self.values()):
            at = entry.expires_at
            if at is not None and at <= now and not entry.is_in_use:
                self.drop(entry)

    def _has_room(self, limit: int) -> bool:
        return self.budget.has_room and len(self) < limit
