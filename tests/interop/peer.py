"""aiomoqt, an independent implementation of MOQT draft-22, as the tests here use it.

It stands on another QUIC library than ours and needs Python 3.12, so it lives in an environment
of its own in the checkout, ``.venv-peer``, which is made when a test first needs it. Nothing here
imports it: its commands, and our ``peer_subscriber.py``, run as processes.
"""

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "aiomoqt==0.13.3"
#: The QUIC library below it, as it was tested.
CONSTRAINT: Final = "aiopquic==0.6.1"
INSTALL_DEADLINE_S: Final = 240.0
START_DEADLINE_S: Final = 20.0
STOP_DEADLINE_S: Final = 10.0

#: For every module of tests here. The first test may have to install the peer.
MARKS: Final = [pytest.mark.interop, pytest.mark.network, pytest.mark.timeout(300)]


class PeerUnavailable(Exception):
    """The peer cannot be had on this machine. The message says why, for the skip."""


def find_python() -> Path:
    """Return an interpreter that the peer can be installed for.

    Raises:
        PeerUnavailable: If there is none.
    """
    tried = []
    for candidate in _candidates():
        tried.append(str(candidate))
        try:
            done = subprocess.run(
                [candidate, "-c", "import sys, venv; print(sys.version_info[:2] == (3, 12))"],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.stdout.strip() == "True":
            return candidate
    raise PeerUnavailable(
        f"{PACKAGE} needs Python 3.12 with venv, which KVCS_PEER_PYTHON may name; "
        f"tried: {', '.join(tried) or 'nothing, none was found'}"
    )


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("KVCS_PEER_PYTHON"):
        yield Path(chosen)
        return  # that one or none
    if found := shutil.which("python3.12"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/3.12*/bin/python"), reverse=True)


def install(folder: Path) -> Path:
    """Make an environment with the peer in ``folder``, unless it is there.

    Test workers that come at the same time wait for the first.

    Returns:
        The folder of its commands.

    Raises:
        PeerUnavailable: If Python 3.12 is missing, or the package cannot be installed in time.
    """
    commands = folder / "bin"
    stamp = folder / "installed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever holds it has a deadline
        if not stamp.exists() or stamp.read_text() != PACKAGE:
            deadline = time.monotonic() + INSTALL_DEADLINE_S
            _step([find_python(), "-m", "venv", folder], deadline)
            _step(
                [commands / "python", "-m", "pip", "install", "--quiet", PACKAGE, CONSTRAINT],
                deadline,
            )
            stamp.write_text(PACKAGE)
    return commands


def _step(command: list[str | Path], deadline: float) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(deadline - time.monotonic(), 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(
            f"{PACKAGE} was not installed within {INSTALL_DEADLINE_S:.0f} s"
        ) from None
    if done.returncode != 0:
        last = (done.stdout.strip() or "no output").splitlines()[-1]
        raise PeerUnavailable(f"{PACKAGE} cannot be installed: {last}")


def free_port() -> int:
    """Return a UDP port that nobody has at the moment; the peer cannot choose one itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class PeerProcess:
    """A command, running. Its output is kept, line by line, both streams as one."""

    def __init__(self, command: Path, *arguments: str | Path, folder: Path) -> None:
        self.name = command.name
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [command, *arguments],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"{self.name} output", daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """All that it has printed."""
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, timeout_s: float = START_DEADLINE_S) -> str:
        """Return the first line with ``text`` in it, once it has been printed.

        Raises:
            AssertionError: If the process ends without it, or too much time passes.
        """
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if text in line:
                        return line
                seen = len(self.lines)
                if self._ended or not self._news.wait(deadline - time.monotonic()):
                    how = "ended" if self._ended else f"was {timeout_s} s"
                    raise AssertionError(f"{self.name} {how} without {text!r}:\n{self.output}")

    def wait(self, timeout_s: float) -> int:
        """Return the exit status, once the process has ended and all its output has been read.

        Raises:
            AssertionError: If that takes longer.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} runs after {timeout_s} s:\n{self.output}") from None
        self._reader.join(STOP_DEADLINE_S)
        return status

    async def line(self, text: str, timeout_s: float = START_DEADLINE_S) -> str:
        """As :meth:`wait_for_line`, while the event loop goes on."""
        return await asyncio.to_thread(self.wait_for_line, text, timeout_s)

    async def exit_status(self, timeout_s: float) -> int:
        """As :meth:`wait`, while the event loop goes on."""
        return await asyncio.to_thread(self.wait, timeout_s)

    def stop(self) -> None:
        """End it, if it has not ended: politely, then not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_DEADLINE_S)
        self._reader.join(STOP_DEADLINE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def _environment() -> Mapping[str, str]:
    # Its tools read settings from variables with plain names (DRAFT, VERBOSE, RELAY_URL).
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"}
