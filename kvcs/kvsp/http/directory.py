"""Directory: who holds which blocks, for how long, and who may say so. Pure.

The time is an argument, in seconds of any steady clock. Every table has a bound, for all together
and for each subject, so that whoever registers most takes nobody's place.

What is told may be wrong, since holders say it of themselves: who believes it loses time, never
correctness, because what is had from a holder is verified.

What takes long is done in turns: methods that end in ``_in_turns`` are generators that yield
between two, so that whoever runs an event loop can let others go on; the others do all at once.
What is told is right between any two turns. A holder that is being registered has some of its
blocks told before the others; one that is gone is told no more at once, and taken off the lists of
its blocks later.

A key says where in its context a block stands, since each key is made from the one before. So a
holder that has the block of a key has, from its first block on, all those before it.
"""

import heapq
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvcs.kvsp.http.questions import Chain, Found, Longest
from kvcs.kvsp.http.records import Candidate, Holding

K = TypeVar("K")
T = TypeVar("T")

#: Keys that are looked up, and that are listed or taken off lists, in one turn.
ASKED_AT_ONCE, LISTED_AT_ONCE = 256, 4096

#: A scope and a model: what keys are looked up in.
Shelf = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """How much a directory takes. All are counts, but for leases."""

    max_holders: int = 65_536
    max_holders_of_subject: int = 16_384
    max_keys: int = 1_000_000
    """Keys of all holders together; about 300 octets of memory each."""

    max_keys_of_subject: int = 500_000
    max_keys_of_holder: int = 65_536
    max_holders_of_key: int = 64
    """Those that were registered first are not told any more beyond that."""

    max_holders_told: int = 1024
    """In one answer."""

    max_following_told: int = 65_536
    """Keys behind those of the chain, in one answer. A candidate is told with all or none."""

    max_lease_s: float = 3600.0


class Full(Exception):
    """There is no room for a holder; the message says which limit it is."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A holder that is registered."""

    ref: tuple[str, bytes, Shelf]
    holding: Holding
    expires_at: float
    serial: int
    is_gone: bool = False
    """Whether it is told no more: withdrawn, said anew, or its lease was seen to be over."""

    def is_told(self, now: float) -> bool:
        """Whether it is told to who asks now."""
        return not self.is_gone and self.expires_at > now


@dataclass(slots=True)
class _Use:
    """What one subject has registered."""

    holders: int = 0
    keys: int = 0


@dataclass(slots=True)
class Directory:
    """Holders, by the blocks that they hold.

    Args:
        limits: How much it takes.
    """

    limits: DirectoryLimits = field(default_factory=DirectoryLimits)
    _entries: dict[tuple[str, bytes, Shelf], _Entry] = field(default_factory=dict)
    # Those of one key in order of registration. Each list is bounded.
    _by_key: dict[Shelf, dict[bytes, list[_Entry]]] = field(default_factory=dict)
    # Those of one publication likewise.
    _by_publication: dict[tuple[Shelf, bytes], list[_Entry]] = field(default_factory=dict)
    _uses: dict[str, _Use] = field(default_factory=dict)
    _expiries: list[tuple[float, int, _Entry]] = field(default_factory=list)
    # Those that are gone, and how many of their keys were taken off the lists.
    _leaving: deque[tuple[_Entry, int]] = field(default_factory=deque)
    _keys: int = 0
    _serial: int = 0

    @property
    def holders(self) -> int:
        """Holders that are registered, those among them whose lease is over but was not seen."""
        return len(self._entries)

    @property
    def keys(self) -> int:
        """Keys of all of them together."""
        return self._keys

    # -- registering -----------------------------------------------------------------------------

    def register(
        self,
        subject: str,
        holder_id: bytes,
        shelf: Shelf,
        holding: Holding,
        *,
        lease_s: float,
        now: float,
    ) -> tuple[bool, float]:
        """Register a holder, or say anew what one holds.

        Args:
            subject: Who says so. Identifiers of different subjects never meet.
            holder_id: How the subject calls the holder.
            shelf: Scope and model.
            holding: Where it is, and what it has.
            lease_s: Seconds for which it is listed, if it is not renewed.
            now: The time.

        Returns:
            Whether it is a new one, and the seconds that it got.

        Raises:
            Full: If there is no room. What was registered before stays as it was.
        """
        return _at_once(
            self.register_in_turns(subject, holder_id, shelf, holding, lease_s=lease_s, now=now)
        )

    def register_in_turns(
        self,
        subject: str,
        holder_id: bytes,
        shelf: Shelf,
        holding: Holding,
        *,
        lease_s: float,
        now: float,
    ) -> Generator[None, None, tuple[bool, float]]:
        """As :meth:`register`. Run it to its end, or not all blocks are told."""
        yield from self._expire_in_turns(now)
        ref = subject, holder_id, shelf
        before = self._entries.get(ref)
        self._check_room(subject, before, holding)
        if before is not None:
            self._remove(before)
        lease_s = min(lease_s, self.limits.max_lease_s)
        self._serial += 1
        entry = _Entry(ref, holding, now + lease_s, self._serial)
        self._entries[ref] = entry
        self._keys += holding.blocks
        use = self._uses.setdefault(subject, _Use())
        use.holders += 1
        use.keys += holding.blocks
        self._note_expiry(entry)
        if (publication := holding.publication_id) is not None:
            self._list(self._by_publication.setdefault((shelf, publication), []), entry)
        for start in range(0, holding.blocks, LISTED_AT_ONCE):
            if entry.is_gone:
                break  # what is listed of it by now is taken off the lists again
            by_key = self._by_key.setdefault(shelf, {})
            for key in holding.keys[start : start + LISTED_AT_ONCE]:
                self._list(by_key.setdefault(key, []), entry)
            yield
        yield from self._unlist_in_turns()
        return before is None, lease_s

    def renew(
        self, subject: str, holder_id: bytes, shelf: Shelf, *, lease_s: float, now: float
    ) -> float | None:
        """Have a holder listed for longer; return the seconds, ``None`` if it is not registered."""
        entry = self._entries.get((subject, holder_id, shelf))
        if entry is None or not entry.is_told(now):
            return None
        lease_s = min(lease_s, self.limits.max_lease_s)
        entry.expires_at = now + lease_s
        self._note_expiry(entry)
        return lease_s

    def withdraw(self, subject: str, holder_id: bytes, shelf: Shelf) -> bool:
        """List a holder no more; return whether it was listed."""
        return _at_once(self.withdraw_in_turns(subject, holder_id, shelf))

    def withdraw_in_turns(
        self, subject: str, holder_id: bytes, shelf: Shelf
    ) -> Generator[None, None, bool]:
        """As :meth:`withdraw`."""
        entry = self._entries.get((subject, holder_id, shelf))
        if entry is None:
            return False
        self._remove(entry)
        yield from self._unlist_in_turns()
        return True

    def expire(self, now: float) -> int:
        """Let go of those whose lease is over; return how many."""
        return _at_once(self.expire_in_turns(now))

    def expire_in_turns(self, now: float) -> Generator[None, None, int]:
        """As :meth:`expire`."""
        gone = yield from self._expire_in_turns(now)
        yield from self._unlist_in_turns()
        return gone

    def next_deadline(self) -> float | None:
        """Return when there may be something to let go of; ``None`` if nothing is listed."""
        return self._expiries[0][0] if self._expiries else None

    # -- asking ----------------------------------------------------------------------------------

    def look_up(self, shelf: Shelf, keys: Sequence[bytes], *, limit: int, now: float) -> Found:
        """Say who holds each of some blocks, complete holders first, then the newest."""
        return _at_once(self.look_up_in_turns(shelf, keys, limit=limit, now=now))

    def look_up_in_turns(
        self, shelf: Shelf, keys: Sequence[bytes], *, limit: int, now: float
    ) -> Generator[None, None, Found]:
        """As :meth:`look_up`."""
        numbers: dict[_Entry, int] = {}
        told: dict[bytes, tuple[int, ...]] = {}
        for count, key in enumerate(dict.fromkeys(keys)):
            if count and not count % ASKED_AT_ONCE:
                yield
            listed = self._by_key.get(shelf, {}).get(key, ())
            live = [entry for entry in listed if entry.is_told(now)]
            best = heapq.nsmallest(limit, live, key=_preference) if len(live) > 1 else live
            for entry in best:
                if len(numbers) < self.limits.max_holders_told:
                    numbers.setdefault(entry, len(numbers))
            told[key] = tuple(numbers[entry] for entry in best if entry in numbers)
        return Found(
            tuple(_candidate(entry, now) for entry in numbers), tuple(told[key] for key in keys)
        )

    def longest(
        self,
        shelf: Shelf,
        keys: Sequence[bytes],
        *,
        limit: int,
        now: float,
        following: bool = False,
    ) -> Longest:
        """Say who covers the longest beginning of a chain, those that cover most first.

        Holders of anything that begins with it are among them, however much longer it is. Those
        whose blocks begin later than the chain come last, with how far they reach.

        Args:
            shelf: Scope and model.
            keys: The chain, from the first block of the context on.
            limit: How many candidates at most.
            now: The time.
            following: Whether to tell the keys that each has behind those of the chain.
        """
        return _at_once(
            self.longest_in_turns(shelf, keys, limit=limit, now=now, following=following)
        )

    def longest_in_turns(
        self,
        shelf: Shelf,
        keys: Sequence[bytes],
        *,
        limit: int,
        now: float,
        following: bool = False,
    ) -> Generator[None, None, Longest]:
        """As :meth:`longest`."""
        covers: dict[_Entry, int] = {}
        found = [0, 0]  # that begin with the chain, and that begin later
        for index in range(len(keys) - 1, -1, -1):
            if found[0] >= limit:
                break
            if index and not index % ASKED_AT_ONCE:
                yield
            # Of those that begin later, too, the first that are found are the ones that cover most.
            has_room = found[1] < limit
            for entry in self._by_key.get(shelf, {}).get(keys[index], ()):
                begins_later = entry.holding.first_block > 0
                if (
                    entry.is_told(now)
                    and (has_room or not begins_later)
                    and entry not in covers
                    and _is_at(entry, keys, index)
                ):
                    covers[entry] = index + 1
                    found[begins_later] += 1
        best = sorted(
            covers,
            key=lambda one: (one.holding.first_block > 0, -covers[one], *_preference(one)),
        )[:limit]
        room = self.limits.max_following_told if following else -1
        told = []
        for entry in best:
            behind = entry.holding.keys[covers[entry] - entry.holding.first_block :]
            is_told = len(behind) <= room
            room -= len(behind) if is_told else 0
            told.append(_candidate(entry, now, covers[entry], behind if is_told else None))
        return Longest(tuple(told))

    def chain(self, shelf: Shelf, publication_id: bytes, *, now: float) -> Chain | None:
        """Say which blocks a publication has; ``None`` if nobody has said so.

        Of several holders one that begins first is believed, of those one that has most blocks.
        """
        entries = self._by_publication.get((shelf, publication_id), ())
        live = [entry.holding for entry in entries if entry.is_told(now)]
        best = min(live, key=lambda one: (one.first_block, -one.blocks), default=None)
        return None if best is None else Chain(best.first_block, best.keys)

    # -- parts -----------------------------------------------------------------------------------

    def _check_room(self, subject: str, before: _Entry | None, holding: Holding) -> None:
        limits, use = self.limits, self._uses.get(subject, _Use())
        holders, keys = (0, 0) if before is None else (1, before.holding.blocks)
        for what, wanted, limit in (
            ("keys of one holder", holding.blocks, limits.max_keys_of_holder),
            ("holders", len(self._entries) - holders + 1, limits.max_holders),
            ("holders of one token", use.holders - holders + 1, limits.max_holders_of_subject),
            ("keys", self._keys - keys + holding.blocks, limits.max_keys),
            ("keys of one token", use.keys - keys + holding.blocks, limits.max_keys_of_subject),
        ):
            if wanted > limit:
                raise Full(f"limit of {limit} {what}")

    def _list(self, listed: list[_Entry], entry: _Entry) -> None:
        if len(listed) == self.limits.max_holders_of_key:
            # One that is gone first.
            del listed[next((at for at, one in enumerate(listed) if one.is_gone), 0)]
        listed.append(entry)

    def _expire_in_turns(self, now: float) -> Generator[None, None, int]:
        """Tell those no more whose lease is over; return how many."""
        gone = seen = 0
        while self._expiries and self._expiries[0][0] <= now:
            _, _, entry = heapq.heappop(self._expiries)
            if self._entries.get(entry.ref) is entry and entry.expires_at <= now:
                self._remove(entry)
                gone += 1
            seen += 1
            if not seen % LISTED_AT_ONCE:
                yield
        return gone

    def _unlist_in_turns(self) -> Generator[None, None, None]:
        """Take those that are gone off the lists of their blocks."""
        while self._leaving:
            room = LISTED_AT_ONCE
            while self._leaving and room > 0:
                entry, at = self._leaving.popleft()
                shelf, keys = entry.ref[2], entry.holding.keys
                by_key = self._by_key.get(shelf, {})
                for key in keys[at : at + room]:
                    _unlist(by_key, key, entry)
                if not by_key:
                    self._by_key.pop(shelf, None)
                if at + room < len(keys):
                    self._leaving.appendleft((entry, at + room))
                room -= max(len(keys) - at, 1)
            yield

    def _note_expiry(self, entry: _Entry) -> None:
        self._serial += 1
        heapq.heappush(self._expiries, (entry.expires_at, self._serial, entry))
        # Renewals leave their old times behind. They are dropped once they are most of the heap.
        if len(self._expiries) > 2 * len(self._entries) + 64:
            self._expiries = [(e.expires_at, e.serial, e) for e in self._entries.values()]
            heapq.heapify(self._expiries)

    def _remove(self, entry: _Entry) -> None:
        """Tell a holder no more, and make room for others."""
        subject, _, shelf = entry.ref
        entry.is_gone = True
        del self._entries[entry.ref]
        self._leaving.append((entry, 0))
        if (publication := entry.holding.publication_id) is not None:
            _unlist(self._by_publication, (shelf, publication), entry)
        self._keys -= entry.holding.blocks
        use = self._uses[subject]
        use.holders -= 1
        use.keys -= entry.holding.blocks
        if not use.holders:
            del self._uses[subject]


def _at_once(turns: Generator[None, None, T]) -> T:
    """Do in one turn what could be done in several."""
    while True:
        try:
            next(turns)
        except StopIteration as done:
            found: T = done.value
            return found


def _unlist(lists: dict[K, list[_Entry]], key: K, entry: _Entry) -> None:
    """List a holder no more: it may have been displaced there, and the others be gone by now."""
    if listed := [other for other in lists.get(key, ()) if other is not entry]:
        lists[key] = listed
    else:
        lists.pop(key, None)


def _preference(entry: _Entry) -> tuple[bool, int]:
    """Complete ones first, then those of whom was heard last."""
    return not entry.holding.complete, -entry.serial


def _is_at(entry: _Entry, keys: Sequence[bytes], index: int) -> bool:
    """Say whether a holder has the key where the chain has it: otherwise its record is wrong."""
    at = index - entry.holding.first_block
    return 0 <= at < entry.holding.blocks and entry.holding.keys[at] == keys[index]


def _candidate(
    entry: _Entry,
    now: float,
    covers: int | None = None,
    following: tuple[bytes, ...] | None = None,
) -> Candidate:
    holding = entry.holding
    return Candidate(
        uri=holding.uri,
        first_block=holding.first_block,
        blocks=holding.blocks,
        layers=holding.layers,
        encodings=holding.encodings,
        complete=holding.complete,
        publication=holding.publication,
        expires_s=entry.expires_at - now,
        covers=covers,
        following=following,
    )
