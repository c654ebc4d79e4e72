"""An independent implementation of MOQT, measured by its own tools over loopback.

It counts Objects and octets and nothing else: no digests, no latencies. Its server listens on all
addresses of the machine, which it cannot do otherwise; nobody but the client here is told of it.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchcases import usage
from benchcases.baseline import is_free
from benchcases.ends import Place
from benchcases.figures import Untold

#: Seconds beyond those that it measures for.
_PATIENCE_S = 30.0
_THROUGHPUT = re.compile(r"^\s*Throughput:\s+([\d.]+) Mbps", re.MULTILINE)


class PeerFailed(Untold):
    """The peer did not give a figure."""


def loopback(commands: Path, place: Place, object_octets: int, seconds: int) -> float:
    """Return the MB/s of its loopback bench, both ends in one process.

    Raises:
        PeerFailed: With the last line that it wrote.
    """
    return _measure(
        commands / "moq-loopback-bench",
        *("--quic", "--draft", "22", "--no-stats", "--insecure"),
        *_offer(place, object_octets, _free_port()),
        *("--duration", str(seconds)),
        seconds=seconds,
    )


def two_processes(commands: Path, place: Place, object_octets: int, seconds: int) -> float:
    """Return the MB/s from its publishing server to its subscriber, a process each.

    Raises:
        PeerFailed: With the last line that one of them wrote.
    """
    port = _free_port()
    track = ("--namespace", "bench", "--trackname", "track")
    server = [
        str(commands / "moq-pub-server"),
        *("--quic", "--draft", "22", "--bind", "127.0.0.1"),
        *_offer(place, object_octets, port),
        *track,
    ]
    with _running(server, port):
        return _measure(
            commands / "moq-sub-bench",
            f"moqt://127.0.0.1:{port}/",
            *("--draft", "22", "--no-stats", "--insecure", "--duration", str(seconds)),
            *track,
            seconds=seconds,
        )


def throughput(text: str) -> float:
    """Read the MB/s out of what its tools print.

    Raises:
        PeerFailed: If they do not say.
    """
    found = _THROUGHPUT.search(text)
    if found is None:
        last = (text.strip().splitlines() or ["no output"])[-1].strip()
        raise PeerFailed(f"the peer told no throughput, but: {last}")
    return float(found[1]) / 8


def _measure(command: Path, *arguments: str, seconds: int) -> float:
    try:
        done = subprocess.run(
            [command, *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds + _PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"{command.name} did not end after its {seconds} s") from None
    return throughput(done.stdout)


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """Have a server run that has bound its port."""
    process = subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=usage.end_with_parent,
    )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while is_free(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise PeerFailed(f"the peer's server did not bind UDP port {port}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _offer(place: Place, object_octets: int, port: int) -> tuple[str, ...]:
    """Say what its publisher is to send, as fast as it can, and where it is to listen."""
    files = place.certificates
    return (
        *("--object-size", str(object_octets), "--rate", "0", "--port", str(port)),
        *("--cert", str(files.certificate_file), "--key", str(files.key_file)),
    )


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _environment() -> Mapping[str, str]:
    # Its tools read settings from variables with plain names.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"LC_ALL": "C.UTF-8"}
