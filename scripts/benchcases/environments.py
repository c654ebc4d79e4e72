"""Environments beside the one that a case runs in, each made when it is first needed.

Whatever stands on picoquic asks for Python 3.12. An environment lies in the checkout, with a note
of what it was made of; it is made again when that changes.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchcases.figures import Untold
from benchcases.turns import say
from moqt.aio.engine import EngineUnavailableError, check_engine
from moqt.aio.settings import EngineName

CHECKOUT = Path(__file__).resolve().parents[2]
#: Names the Python that environments are made with.
VARIABLE = "KVCS_PEER_PYTHON"
INSTALL_LIMIT_S = 300.0


@dataclass(frozen=True)
class Environment:
    """What is installed in a folder of the checkout."""

    name: str
    requirements: tuple[str, ...]
    stamp: str
    """What is written beside it once it is whole."""

    any_python: bool = False
    """Whether it is made with the Python that runs this, of whatever version."""

    limit_s: float = INSTALL_LIMIT_S
    """Seconds that making it may take."""

    def made(self) -> Path:
        """Return the folder of its commands. Who comes while it is being made waits for it.

        Raises:
            Untold: If there is no Python for it, or something cannot be installed in time.
        """
        folder = CHECKOUT / self.name
        stamp = folder / "installed"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever holds it has a deadline
            if not stamp.exists() or stamp.read_text() != self.stamp:
                python = Path(sys.executable) if self.any_python else find_python()
                say(f"making {self.name}, with {self.requirements[-1]}: a minute or two")
                deadline = time.monotonic() + self.limit_s
                self._step([python, "-m", "venv", folder], deadline)
                install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                self._step([folder / "bin" / "python", *install, *self.requirements], deadline)
                stamp.write_text(self.stamp)
        return folder / "bin"

    def _step(self, command: list[str | Path], deadline: float) -> None:
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
            raise Untold(f"{self.name} was not made within {self.limit_s:g} s") from None
        if done.returncode:
            last = (done.stdout.strip() or "no output").splitlines()[-1]
            raise Untold(f"{self.name} cannot be made: {last}")


#: An independent implementation of MOQT, as the tests of interoperation install it, too.
PEER = Environment(".venv-peer", ("aiomoqt==0.13.3", "aiopquic==0.6.1"), stamp="aiomoqt==0.13.3")


def picoquic() -> Environment:
    """Return the one of ends on picoquic: what kvcs needs, and that engine."""
    needed = _needed("picoquic")
    return Environment(".venv-picoquic", needed, stamp="\n".join(needed))


def model() -> Environment:
    """Return the one of an end that runs a model: what kvcs needs, and what runs that."""
    needed = _needed("transformers")
    return Environment(
        ".venv-model", needed, stamp="\n".join(needed), any_python=True, limit_s=900.0
    )


def _needed(extra: str) -> tuple[str, ...]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return (*project["dependencies"], *project["optional-dependencies"][extra])


@cache
def python_with(engine: EngineName | None) -> str:
    """Return a Python for ends on an engine: this one, if it has that.

    Raises:
        Untold: If there is none, and none can be made.
    """
    try:
        check_engine(engine)
    except EngineUnavailableError:
        return str(picoquic().made() / "python")
    return sys.executable


def find_python() -> Path:
    """Return a Python 3.12.

    Raises:
        Untold: If there is none.
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
    raise Untold(
        f"no Python 3.12 with venv, which {VARIABLE} may name; "
        f"tried: {', '.join(tried) or 'nothing, none was found'}"
    )


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get(VARIABLE):
        yield Path(chosen)
        return  # that one or none
    if found := shutil.which("python3.12"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob("versions/3.12*/bin/python"), reverse=True)
