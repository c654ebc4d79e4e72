"""The baseline beside which goodput is measured: one raw QUIC stream, aioquic's own shell."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "KVCS_BENCH_BASELINE"
#: The UDP port that the script always uses.
PORT = 47431
#: Seconds that another run of the script may keep that port.
_PORT_WAIT_S = 120.0
#: Seconds after which it gives up.
_LIMIT_S = 600


class BaselineFailed(Exception):
    """The baseline did not give a figure."""


def script(checkout: Path) -> Path | None:
    """Return where the baseline's script is, or None."""
    told = os.environ.get(VARIABLE)
    path = Path(told) if told else checkout.parent / "shared" / "bench" / "raw_quic.py"
    return path if path.is_file() else None


def missing() -> str:
    """Say what is missing where :func:`script` finds nothing."""
    return f"no baseline: expected ../shared/bench/raw_quic.py beside the checkout, or {VARIABLE}"


def measure(path: Path, megabytes: int, datagram: int) -> dict[str, Any]:
    """Run its case ``aioquic`` once.

    Raises:
        BaselineFailed: With the last line that it wrote.
    """
    command = [
        sys.executable, str(path), "aioquic",
        "--mb", str(megabytes), "--datagram", str(datagram), "--limit", str(_LIMIT_S),
    ]  # fmt: skip
    with _alone():
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S + 30, check=False
            )
        except subprocess.TimeoutExpired:
            raise BaselineFailed(f"it did not end within {_LIMIT_S} s") from None
    if done.returncode:
        raise BaselineFailed((done.stderr.strip().splitlines() or ["no output"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until nobody else runs the script: its port is fixed."""
    deadline = time.monotonic() + _PORT_WAIT_S
    lock = Path(tempfile.gettempdir()) / f"kvcs-bench-{os.getuid()}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # by another bench; the socket tells of all others
        while not _is_free():
            if time.monotonic() > deadline:
                raise BaselineFailed(f"UDP port {PORT} is in use")
            time.sleep(0.5)
        yield


def _is_free() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return False
    return True
