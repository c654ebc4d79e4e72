"""The QUIC engines there are, and how one is got by its name.

An engine is a package beside this file whose face is ``dial`` and ``listen``. ``aioquic`` is always
there. ``picoquic`` comes with the extra ``kvcs[picoquic]`` and is loaded when it is asked for.
"""

import importlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moqt.aio import aioquic
from moqt.aio.settings import EngineName
from moqt.aio.transport import QuicListener, QuicTransport

#: What carries a connection whose settings name no engine.
DEFAULT: EngineName = "aioquic"

#: The first Python for which there is an aiopquic.
PICOQUIC_PYTHON = (3, 12)


class EngineUnavailableError(ValueError):
    """A QUIC engine was asked for that cannot run here. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The face of an engine."""

    dial: Callable[..., Awaitable[QuicTransport]]
    listen: Callable[..., Awaitable[QuicListener]]


def engine_named(name: EngineName | None) -> Engine:
    """Return an engine, None for the default one.

    Raises:
        EngineUnavailableError: If it is not installed, or cannot run on this Python or with the
            version of its library that is installed.
    """
    if (name or DEFAULT) == "aioquic":
        return Engine(aioquic.dial, aioquic.listen)
    return _picoquic()


def check_engine(name: EngineName | None) -> None:
    """See whether an engine can be used, before anything starts.

    Raises:
        EngineUnavailableError: As :func:`engine_named` does.
    """
    engine_named(name)


def _picoquic() -> Engine:
    if sys.version_info < PICOQUIC_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        raise EngineUnavailableError(
            f"the QUIC engine picoquic needs Python 3.12 or later, this is {found}"
        )
    if importlib.util.find_spec("aiopquic") is None:
        raise EngineUnavailableError(
            "the QUIC engine picoquic is not installed: pip install 'kvcs[picoquic]'"
        )
    try:
        package = importlib.import_module("moqt.aio.picoquic")
    except ImportError as error:
        raise EngineUnavailableError(f"the QUIC engine picoquic cannot run: {error}") from error
    return Engine(package.dial, package.listen)
