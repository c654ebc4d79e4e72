"""How often, and how many of: what the limits of sessions and listeners are made of.

Pure: the time is an argument, in seconds of any steady clock, never less than before. Every table
has a bound, since whoever is limited here would fill it.
"""

import ipaddress
from collections.abc import Hashable
from functools import lru_cache
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Of how many an account is kept at once; all others share one.
MAX_KEYS = 65_536


class Rate:
    """So many a second on average, and so many at once.

    Kept as the time at which the allowance is whole again, which is all there is to know.

    Args:
        per_s: How many a second.
        burst: How many at once, if there were none for long.

    Raises:
        ValueError: If one of them is not above 0.
    """

    __slots__ = ("_burst_s", "_each_s", "_whole_at")

    def __init__(self, per_s: float, burst: float) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(
                f"{per_s} a second and {burst} at once, expected above 0 and 1 or more"
            )
        self._each_s = 1.0 / per_s
        self._burst_s = burst * self._each_s
        self._whole_at = float("-inf")

    def take(self, now: float) -> float:
        """Take one; return 0, or the seconds until there is one to take."""
        whole_at = max(self._whole_at, now) + self._each_s
        # Less than one unit of rounding is no reason to refuse the last of a burst.
        wait_s = whole_at - now - self._burst_s
        if wait_s > 1e-6 * self._each_s + 1e-14 * abs(now):
            return wait_s
        self._whole_at = whole_at
        return 0.0

    def is_whole(self, now: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return self._whole_at <= now


class Rates(Generic[K]):
    """A rate for each of many.

    Args:
        per_s: How many a second.
        burst: How many at once.
        rest: Who stands for all others while there is no room to tell them apart.
        max_keys: How many are told apart.
    """

    def __init__(self, per_s: float, burst: float, *, rest: K, max_keys: int = MAX_KEYS) -> None:
        self._per_s, self._burst = per_s, burst
        self._rest = rest
        self._max_keys = max_keys
        self._rates: dict[K, Rate] = {}
        self._swept_at = float("-inf")

    def __len__(self) -> int:
        return len(self._rates)

    def take(self, who: K, now: float) -> float:
        """Take one on the account of ``who``; return 0, or the seconds until there is one."""
        return self._of(who, now).take(now)

    def _of(self, who: K, now: float) -> Rate:
        rate = self._rates.get(who)
        if rate is None:
            if len(self._rates) >= self._max_keys:
                self._sweep(now)
            if len(self._rates) >= self._max_keys and (rate := self._rates.get(self._rest)):
                return rate
            if len(self._rates) >= self._max_keys:
                who = self._rest
            rate = self._rates[who] = Rate(self._per_s, self._burst)
        return rate

    def _sweep(self, now: float) -> None:
        """Forget those that lose nothing by it; not with each one that comes."""
        if now - self._swept_at >= self._burst / self._per_s / 4:
            self._swept_at = now
            self._rates = {who: rate for who, rate in self._rates.items() if not rate.is_whole(now)}


class Tally(Generic[K]):
    """How many each of many has of something, and no more than a limit.

    Args:
        limit: How many one may have.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[K, int] = {}

    def __getitem__(self, who: K) -> int:
        return self._counts.get(who, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def take(self, who: K) -> bool:
        """Count one more of ``who``; False, and nothing counted, if that would be too many."""
        count = self._counts.get(who, 0)
        if count >= self._limit:
            return False
        self._counts[who] = count + 1
        return True

    def give_back(self, who: K) -> None:
        """Count one less of ``who``."""
        left = self._counts[who] - 1
        if left:
            self._counts[who] = left
        else:
            del self._counts[who]


class FailedTokens:
    """Counts tokens that were refused, by whom they came from.

    Ask :meth:`wait_s` before a token is looked at, and tell :meth:`failed` when it was no good:
    whoever guesses, or replays what is over, costs no signature checks after a while. A good token
    costs nothing.

    Args:
        per_s: How many a second one peer may fail on average.
        burst: How many at once.
        max_keys: Of how many peers is known what they did.
    """

    def __init__(
        self, per_s: float = 1.0, burst: float = 32.0, *, max_keys: int = MAX_KEYS
    ) -> None:
        self._rates = Rates(per_s, burst, rest="", max_keys=max_keys)
        self._until: dict[str, float] = {}
        self._max_keys = max_keys

    def failed(self, address: str, now: float) -> None:
        """Note that a token which came from ``address`` was refused."""
        peer = peer_of(address)
        wait_s = self._rates.take(peer, now)
        if wait_s > 0 and (peer in self._until or len(self._until) < self._max_keys):
            self._until[peer] = now + wait_s

    def wait_s(self, address: str, now: float) -> float:
        """Return for how many seconds tokens from ``address`` are refused unseen; 0: look."""
        peer = peer_of(address)
        until = self._until.get(peer)
        if until is None:
            return 0.0
        if until <= now:
            del self._until[peer]
            return 0.0
        return until - now


@lru_cache(maxsize=1024)
def peer_of(address: str) -> str:
    """Return what stands for the peer at an address where it is not known who it is.

    An IPv4 address is one peer. Of IPv6, whoever has one address has the other 2**64 of its
    network, too.
    """
    try:
        host = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(host, ipaddress.IPv6Address):
        if host.ipv4_mapped is not None:
            return str(host.ipv4_mapped)
        return str(ipaddress.ip_network((int(host), 64), strict=False))
    return str(host)
