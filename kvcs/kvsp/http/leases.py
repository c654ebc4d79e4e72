"""Leases: what a holder has to tell an index next, and when. Pure; the time is an argument.

What should be listed is said with :meth:`Leases.hold` and :meth:`Leases.release`, at once and
without waiting for anybody. :meth:`Leases.next_errand` says what to ask the index; the answer comes
back by :meth:`Leases.done` or :meth:`Leases.failed`. After a failure nothing is asked for a while,
by nobody: an index that is dead has as many errands waiting for it as before, and no more.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum, auto

from kvcs.errors import ConfigError
from kvcs.kvsp.http.records import Holding

#: What identifies a holder at an index, beside scope and token: Compatibility ID and holder ID.
Ref = tuple[bytes, bytes]

#: A lease is renewed when this part of it is over: two attempts may fail.
_RENEWED_AT = 1 / 3


class Task(Enum):
    """What is asked of an index."""

    REGISTER = auto()
    RENEW = auto()
    WITHDRAW = auto()


@dataclass(frozen=True, slots=True)
class Errand:
    """One request to be made."""

    task: Task
    ref: Ref
    holding: Holding | None = None
    """What is registered; ``None`` for the others."""


@dataclass(slots=True)
class _Kept:
    holding: Holding | None
    """What should be listed; ``None`` if it should not be any more."""

    listed: Holding | None = None
    """What the index was last told and accepted."""

    due_at: float = 0.0
    """When it is to be renewed."""

    expires_at: float = 0.0
    """When the lease is over that the index gave."""

    lingers_until: float = 0.0
    """When the index lists it no more in any case, whatever became of what it was asked."""


@dataclass(slots=True)
class Leases:
    """What should be listed at one index, and what is.

    Args:
        lease_s: Seconds that are asked for. The index may give fewer.
        max_holders: How many are kept listed at once.
    """

    lease_s: float = 60.0
    max_holders: int = 16_384
    _kept: dict[Ref, _Kept] = field(default_factory=dict)
    # What is to be registered or withdrawn, what was said first first.
    _changed: dict[Ref, None] = field(default_factory=dict)
    _renewals: list[tuple[float, Ref]] = field(default_factory=list)
    _not_before: float = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def hold(self, ref: Ref, holding: Holding) -> None:
        """Have a holder listed, or what it holds said anew.

        Raises:
            ConfigError: If as many are listed as may be.
        """
        kept = self._kept.get(ref)
        if kept is None:
            if len(self._kept) >= self.max_holders:
                raise ConfigError(f"more than {self.max_holders} holders to keep listed")
            kept = self._kept[ref] = _Kept(holding)
        elif kept.holding == holding:
            return
        kept.holding = holding
        self._changed[ref] = None

    def release(self, ref: Ref) -> None:
        """Have a holder listed no more. Nothing happens if it never was."""
        kept = self._kept.get(ref)
        if kept is None:
            return
        kept.holding = None
        if kept.lingers_until:
            self._changed[ref] = None
        else:
            self._forget(ref)  # the index was never asked

    def release_all(self) -> None:
        """Have nothing listed any more."""
        for ref in tuple(self._kept):
            self.release(ref)

    @property
    def is_behind(self) -> bool:
        """Whether the index has still to be told something, leases that go on not counted."""
        return bool(self._changed)

    def next_errand(self, now: float) -> Errand | None:
        """Return what to ask now; ``None`` if nothing is due. It is due until it is done."""
        if now < self._not_before:
            return None
        for ref in tuple(self._changed):
            kept = self._kept[ref]
            if kept.holding is not None:
                kept.lingers_until = now + self.lease_s
                return Errand(Task.REGISTER, ref, kept.holding)
            if now < kept.lingers_until:
                return Errand(Task.WITHDRAW, ref)
            self._forget(ref)  # over by itself
        while self._renewals and self._renewals[0][0] <= now:
            due_at, ref = self._renewals[0]
            renewed = self._kept.get(ref)
            if renewed is None or renewed.due_at != due_at:
                heapq.heappop(self._renewals)
            elif now >= renewed.expires_at:
                heapq.heappop(self._renewals)
                self._changed[ref] = None
                return self.next_errand(now)
            else:
                renewed.lingers_until = now + self.lease_s
                return Errand(Task.RENEW, ref)
        return None

    def done(self, errand: Errand, now: float, lease_s: float | None) -> None:
        """Note what became of an errand. What was said meanwhile is not forgotten by it.

        Args:
            errand: As it was given out.
            now: The time at which it was asked: the lease does not reach further from there.
            lease_s: The seconds that the index gave; ``None`` if it does not know the holder, which
                is then registered anew.
        """
        ref = errand.ref
        kept = self._kept.get(ref)
        if kept is None:
            return
        if errand.task is Task.WITHDRAW:
            kept.listed, kept.lingers_until = None, 0.0
            if kept.holding is None:
                self._forget(ref)
            return
        if lease_s is None:
            kept.listed, kept.due_at = None, 0.0
            self._changed[ref] = None
            return
        if errand.task is Task.REGISTER:
            kept.listed = errand.holding
            if kept.holding is errand.holding:
                self._changed.pop(ref, None)
        kept.due_at = now + lease_s * _RENEWED_AT
        kept.expires_at = now + lease_s
        heapq.heappush(self._renewals, (kept.due_at, ref))

    def refused(self, errand: Errand) -> None:
        """Note that the index will never take this: it is not asked again until it is said anew."""
        kept = self._kept.get(errand.ref)
        if kept is None:
            return
        if errand.task is Task.RENEW:
            self.done(errand, 0.0, None)  # whether it takes the holder itself is still to be seen
        elif errand.task is Task.WITHDRAW or kept.holding is errand.holding:
            self._forget(errand.ref)

    def failed(self, now: float, pause_s: float) -> None:
        """Note that the index did not answer, or had no room: nothing is asked for a while."""
        self._not_before = now + pause_s

    def next_deadline(self) -> float | None:
        """Return when there is something to ask; ``None`` if nothing will be by itself."""
        if self._changed:
            return self._not_before
        if self._renewals:
            return max(self._not_before, self._renewals[0][0])
        return None

    def _forget(self, ref: Ref) -> None:
        del self._kept[ref]
        self._changed.pop(ref, None)
