"""How much memory there is in use, for tests that want it flat."""

import gc
from pathlib import Path
from resource import getpagesize

MIB = 1 << 20


def objects_alive() -> int:
    """Return how many objects that can refer to others there are."""
    gc.collect()
    return len(gc.get_objects())


def resident_octets() -> int:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
