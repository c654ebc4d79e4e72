"""Retention: how long what was published is kept, and what goes first when room is needed.

Pure: the time is an argument, in seconds of any steady clock.
"""

from dataclasses import dataclass, field

from kvcs.producer.publication import Publication


@dataclass(slots=True)
class _Kept:
    publication: Publication
    finished_at: float


@dataclass(slots=True)
class Retention:
    """The finished publications, oldest first. Unfinished ones are never let go.

    Args:
        ttl_s: Seconds that a publication is kept after it was finished. One that is being read
            when they are over is kept until nobody reads it, but not for longer than as much
            again: a reader that never comes to an end must not keep it for ever.
    """

    ttl_s: float
    _kept: dict[bytes, _Kept] = field(default_factory=dict)
    _readers: dict[bytes, int] = field(default_factory=dict)

    def finished(self, publication: Publication, now: float) -> None:
        """Note that a publication was finished."""
        self._kept[publication.name.publication_id] = _Kept(publication, now)

    def forget(self, publication: Publication) -> None:
        """Note that a publication is gone, for whatever reason."""
        self._kept.pop(publication.name.publication_id, None)
        self._readers.pop(publication.name.publication_id, None)

    def reading(self, publication_id: bytes, change: int) -> None:
        """Count requests that are served from a publication: +1 for a new one, -1 at its end."""
        count = self._readers.get(publication_id, 0) + change
        if count > 0:
            self._readers[publication_id] = count
        else:
            self._readers.pop(publication_id, None)

    def expired(self, now: float) -> list[Publication]:
        """Return the publications whose time is over, oldest first. They stay until forgotten."""
        return [k.publication for k in self._kept.values() if self._deadline(k) <= now]

    def next_deadline(self) -> float | None:
        """Return when the next one expires; ``None`` if nothing is kept.

        It may come earlier once a reader has ended.
        """
        return min(map(self._deadline, self._kept.values()), default=None)

    def _deadline(self, kept: _Kept) -> float:
        is_read = kept.publication.name.publication_id in self._readers
        return kept.finished_at + self.ttl_s * (2 if is_read else 1)

    def victim(self) -> Publication | None:
        """Return what should go first when room is needed; ``None`` if nothing may.

        The oldest one that nobody reads at the moment. Only if all are being read, the oldest
        of them: a reader that never comes to an end must not keep a producer from producing.
        """
        candidates = [k.publication for k in self._kept.values()]
        idle = [p for p in candidates if p.name.publication_id not in self._readers]
        return next(iter(idle or candidates), None)
