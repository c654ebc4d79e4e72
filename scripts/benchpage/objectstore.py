"""How fast Mooncake's transfer engine reads memory of another process, over TCP on loopback.

    objectstore.py --mb 100 [--object 32768]

One JSON object on a line. Run by a Python that has the package ``mooncake``; it needs libibverbs of
the system, although no such device. Each read names an address at the other end: nothing is
encrypted, and nothing is checked but by this program, once, when the time has been taken.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

#: Reads that are asked for at once.
BATCH = 512
#: Seconds that the other end may take to be there.
START_S = 30.0
#: What an object has in it, over and over.
PATTERN = 251


def engine() -> tuple[Any, str]:
    """Return a transfer engine on loopback, and what others call it."""
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    made = TransferEngine()
    # Nobody but the two ends: no metadata server.
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("mooncake: the transfer engine cannot be initialized")
    return made, f"127.0.0.1:{made.get_rpc_port()}"


def memory(made: Any, octets: int) -> Any:
    """Return memory that the engine may read and write."""
    import numpy as np

    array = np.ones(octets, np.uint8)
    if made.register_memory(array.ctypes.data, octets):
        raise SystemExit("mooncake: memory cannot be registered")
    return array


def serve(octets: int) -> None:
    """Have memory that others read, until standard input is closed."""
    import numpy as np

    made, session = engine()
    array = memory(made, octets)
    array[:] = np.arange(octets, dtype=np.uint64) % PATTERN
    print(json.dumps({"session": session, "address": array.ctypes.data}), flush=True)
    sys.stdin.read()


def read(octets: int, size: int | None, told: dict[str, Any]) -> dict[str, Any]:
    """Read it all: as one object, or as many of one size."""
    import numpy as np

    made, _ = engine()
    array = memory(made, octets)
    session, theirs, ours = told["session"], told["address"], array.ctypes.data
    made.transfer_sync_read(session, ours, theirs, 1)  # which connects
    cpu_s, began = time.process_time(), time.monotonic()
    if size is None:
        failed = made.transfer_sync_read(session, ours, theirs, octets)
    else:
        starts = range(0, octets - octets % size, size)
        failed = 0
        for at in range(0, len(starts), BATCH):
            part = starts[at : at + BATCH]
            failed |= made.batch_transfer_sync_read(
                session, [ours + s for s in part], [theirs + s for s in part], [size] * len(part)
            )
        octets = len(starts) * size
    seconds = time.monotonic() - began
    cpu_s = time.process_time() - cpu_s
    if failed or not np.array_equal(
        array[:octets], (np.arange(octets, dtype=np.uint64) % PATTERN).astype(np.uint8)
    ):
        raise SystemExit("mooncake: what was read is not what was there")
    return {
        "mb": round(octets / 1e6, 1),
        "object_octets": size or octets,
        "seconds": round(seconds, 4),
        "mb_per_s": round(octets / seconds / 1e6, 1),
        "receiver_cpu_s": round(cpu_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=100, help="MB that are read")
    parser.add_argument("--object", type=int, help="octets of an object; left out: one for all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    octets = args.mb * 1_000_000
    if args.serve:
        serve(octets)
        return
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", "--mb", str(args.mb)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout is not None
            told = next((line for line in other.stdout if line.startswith('{"session"')), None)
            if told is None:
                raise SystemExit("mooncake: the other end ended before it served")
            print(json.dumps(read(octets, args.object, json.loads(told))), flush=True)
        finally:
            other.kill()


if __name__ == "__main__":
    main()
