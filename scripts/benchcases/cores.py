"""Which cores there are, which of them have nothing to do, and who is put on which."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Seconds over which cores are looked at.
LOOK_S = 0.5
#: Share of that time that a free core is idle.
IDLE_SHARE = 0.9


def permitted() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def free() -> list[int]:
    """Look for a moment which of them are idle; return those, whole cores first."""
    before = times(Path("/proc/stat").read_text())
    time.sleep(LOOK_S)
    after = times(Path("/proc/stat").read_text())
    found = [core for core in permitted() if is_idle(before[core], after[core])]
    return whole_first(found, {core: _siblings(core) for core in found})


def times(stat: str) -> dict[int, tuple[int, int]]:
    """Read what each core did: ticks without work, and all ticks.

    Args:
        stat: The text of ``/proc/stat``.
    """
    found: dict[int, tuple[int, int]] = {}
    for line in stat.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = list(map(int, columns[:8]))  # those after count what is in them already
            found[int(name.removeprefix("cpu"))] = (ticks[3] + ticks[4], sum(ticks))
    return found


def is_idle(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether a core had next to nothing to do between two looks at it."""
    idle, ticks = after[0] - before[0], after[1] - before[1]
    return idle >= IDLE_SHARE * ticks


def whole_first(cores: Sequence[int], siblings: Mapping[int, str]) -> list[int]:
    """Put those to the end that share a core with one before them."""
    seen: dict[str, int] = {}
    ranks: list[tuple[int, int]] = []
    for core in cores:
        rank = seen[siblings[core]] = seen.get(siblings[core], -1) + 1
        ranks.append((rank, core))
    return [core for _, core in sorted(ranks)]


def assigned(
    free: Sequence[int], permitted: Sequence[int], connections: int
) -> tuple[list[tuple[int, int]], str | None]:
    """Give each connection a core for its sender and one for its receiver.

    Returns:
        The cores; and why they tell nothing about connections side by side, if they do not.
    """
    needed = 2 * connections
    if len(free) >= needed:
        return list(zip(free[:needed:2], free[1:needed:2], strict=True)), None
    reason = (
        f"{connections} connections take {needed} cores, free are {len(free)} of {len(permitted)}"
    )
    given = [permitted[index % len(permitted)] for index in range(needed)]
    return list(zip(given[::2], given[1::2], strict=True)), reason


def _siblings(core: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(core)
