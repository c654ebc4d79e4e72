"""The machine that was measured on, and what else it was doing."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

#: What the figures depend on.
PACKAGES = ("aioquic", "aiopquic", "cryptography", "numpy", "orjson", "uvloop", "zstandard", "lz4")
#: Seconds that the machine is watched for before a measurement.
WATCH_S = 1.0


def describe(checkout: Path) -> dict[str, Any]:
    """Return what figures can be understood with. No names, no paths."""
    return {
        "commit": _commit(checkout),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _line("/proc/cpuinfo", "model name"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def busy_cores() -> float:
    """Return how many cores' worth of work the machine does while nobody measures."""
    before, began = _busy_s(), time.monotonic()
    time.sleep(WATCH_S)
    return round((_busy_s() - before) / (time.monotonic() - began), 2)


def _busy_s() -> float:
    """Processor seconds of all cores since the start, idle ones aside; stolen ones count."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _line(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return " ".join(value.split())
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    """Return which commit this is, and whether files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
