"""What happens again and again is told once, and then counted: log lines that an attacker cannot
make as many of as it likes.

Pure: the time is an argument.
"""  # noqa: D205  # one sentence

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Kinds that are told apart at once; what is of yet another kind is told each time it can be.
MAX_KINDS = 1024


@dataclass(slots=True)
class _Burst:
    ends_at: float
    count: int = 0


class Repeats(Generic[K]):
    """Tells the first of a kind at once, and how many followed when its window is over.

    Args:
        window_s: Seconds in which what is of one kind is counted.
        max_kinds: Kinds that are told apart at once. While so many windows are open, whatever is
            of another kind counts as ``rest``.
        rest: The kind that stands for all others.
    """

    def __init__(self, window_s: float, *, rest: K, max_kinds: int = MAX_KINDS) -> None:
        self._window_s = window_s
        self._max_kinds = max_kinds
        self._rest = rest
        self._bursts: dict[K, _Burst] = {}

    def __len__(self) -> int:
        return len(self._bursts)

    @property
    def next_end(self) -> float | None:
        """When a window is over next; ``None`` if none is open."""
        # Windows are all of one length, so the oldest one ends first.
        return next((burst.ends_at for burst in self._bursts.values()), None)

    def add(self, kind: K, now: float, count: int = 1) -> K | None:
        """Count; return the kind to tell now, ``None`` if it is told later.

        Args:
            kind: What happened.
            now: Seconds of any steady clock, never less than before.
            count: How often.
        """
        if kind not in self._bursts and len(self._bursts) >= self._max_kinds:
            kind = self._rest
        burst = self._bursts.get(kind)
        if burst is not None:
            burst.count += count
            return None
        self._bursts[kind] = _Burst(now + self._window_s)
        return kind

    def over(self, now: float | None = None) -> Mapping[K, int]:
        """Return, and forget, the windows that are over, with what they counted after the first.

        Args:
            now: Seconds of the same clock; ``None``: all of them.
        """
        done = {
            kind: burst.count
            for kind, burst in self._bursts.items()
            if now is None or burst.ends_at <= now
        }
        for kind in done:
            del self._bursts[kind]
        return {kind: count for kind, count in done.items() if count}
