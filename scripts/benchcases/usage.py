"""What a process costs, read from Linux's /proc, and that none is left behind."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int | str = "self") -> int:
    """Octets of memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def peak() -> int:
    """The most octets that this process has held since :func:`reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("no VmHWM in /proc/self/status")


def cpu_s() -> float:
    """CPU seconds of this process, and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def reset_peak() -> None:
    """Begin to look for the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def end_with_parent() -> None:
    """Have this process killed when the one that started it is gone, even while it is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
