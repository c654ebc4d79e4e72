"""The baselines beside which goodput is measured: aioquic's own shell, and TLS over TCP."""

import fcntl
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchcases.ends import engine
from benchcases.environments import python_with
from benchcases.figures import Untold

VARIABLE = "KVCS_BENCH_BASELINE"
#: The port that the script always uses.
PORT = 47431
#: Seconds that another run of the script may keep that port.
_PORT_WAIT_S = 120.0
#: Seconds after which it gives up.
_LIMIT_S = 600


class BaselineFailed(Untold):
    """A baseline did not give a figure."""


def script(checkout: Path) -> Path | None:
    """Return where the baseline's script is, or None."""
    told = os.environ.get(VARIABLE)
    path = Path(told) if told else checkout.parent / "shared" / "bench" / "raw_quic.py"
    return path if path.is_file() else None


def missing() -> str:
    """Say what is missing where :func:`script` finds nothing."""
    return f"no baseline: expected ../shared/bench/raw_quic.py beside the checkout, or {VARIABLE}"


def needed(checkout: Path) -> Path:
    """Return where the baseline's script is.

    Raises:
        BaselineFailed: If it is not there.
    """
    path = script(checkout)
    if path is None:
        raise BaselineFailed(missing())
    return path


def aioquic(path: Path, octets: int, datagram: int) -> dict[str, Any]:
    """Send one raw QUIC stream between two aioquic shells.

    Raises:
        BaselineFailed: With the last line that it wrote.
    """
    return _measure(path, "aioquic", "--mb", round(octets / 1e6) or 1, "--datagram", datagram)


def tls(path: Path, octets: int) -> dict[str, Any]:
    """Send through one TLS connection between two asyncio shells.

    Raises:
        BaselineFailed: With the last line that it wrote.
    """
    return _measure(path, "tls", "--mb", round(octets / (1 << 20)) or 1)  # it counts in MiB


def _measure(path: Path, what: str, *arguments: str | int) -> dict[str, Any]:
    # In the same Python as the ends beside it.
    python = python_with(engine())
    command = [python, str(path), what, *map(str, arguments), "--limit", str(_LIMIT_S)]
    with _alone():
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S + 30, check=False
            )
        except subprocess.TimeoutExpired:
            raise BaselineFailed(f"the baseline did not end within {_LIMIT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BaselineFailed(f"the baseline failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until nobody else runs the script: its port is fixed."""
    deadline = time.monotonic() + _PORT_WAIT_S
    lock = Path(tempfile.gettempdir()) / f"kvcs-bench-{os.getuid()}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # by another bench; the socket tells of all others
        while not is_free(PORT):
            if time.monotonic() > deadline:
                raise BaselineFailed(f"the baseline's UDP port {PORT} is in use")
            time.sleep(0.5)
        yield


def is_free(port: int) -> bool:
    """Whether nobody has a UDP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
