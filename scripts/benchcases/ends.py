"""Ends, each in a process of its own, told what to do over a pipe.

A process serves verbs: coroutines of its role's class (see ``roles``). Whoever measures is a plain
program that asks one after the other, or begins one and asks another meanwhile.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop

from benchcases import usage
from benchcases.environments import CHECKOUT, python_with
from benchcases.ticking import Ticking
from kvcs.garbage import collected_aside
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey
from kvcs.store.source import BlockSource, SyntheticSource
from kvcs.telemetry import set_up_logging
from kvcs.trust.scope import Protection, Scope
from moqt.aio.settings import EngineName
from moqt.aio.tls import CertificateFiles, make_certificates

#: Seconds that anything may take that is not told a limit of its own.
LIMIT_S = 900.0
#: Tells the processes of the ends which QUIC engine to use.
ENGINE_VARIABLE = "BENCH_ENGINE"


def engine() -> EngineName | None:
    """Return what ``scripts/bench --engine`` said, in the process of an end too."""
    name = os.environ.get(ENGINE_VARIABLE)
    return "picoquic" if name == "picoquic" else None


@dataclass(frozen=True)
class Cache:
    """What is transferred. Both ends make the same tokens of it."""

    blocks: int
    layers: int = 32
    heads: int = 8
    dim: int = 128
    block_tokens: int = 16
    seed: int = 0

    @property
    def source(self) -> BlockSource:
        shape = (self.heads, self.dim)
        descriptor = Descriptor(
            model="synthetic/bench",
            revision=f"seed-{self.seed}",
            layers=self.layers,
            block_tokens=self.block_tokens,
            dtype="bfloat16",
            k_shape=shape,
            v_shape=shape,
        )
        return SyntheticSource(descriptor, self.blocks * self.block_tokens, seed=self.seed)

    @property
    def object_octets(self) -> int:
        """Data of one Object."""
        return self.block_tokens * self.heads * self.dim * 2

    @property
    def objects(self) -> int:
        """Objects of the two tracks, K and V."""
        return 2 * self.layers * self.blocks

    @property
    def octets(self) -> int:
        """Data of all Objects."""
        return self.objects * self.object_octets

    @classmethod
    def of_objects(cls, objects: int, **shape: int) -> Self:
        """Return a cache of at least so many Objects."""
        layers = shape.get("layers", 32)
        return cls(blocks=max(1, -(-objects // (2 * layers))), **shape)

    @classmethod
    def of_octets(cls, octets: float) -> Self:
        """Return one of Llama 3.1 8B's shape, of at least so many octets."""
        one = cls(blocks=1)
        return cls(blocks=max(1, -(-int(octets) // one.octets)))


@dataclass(frozen=True)
class Place:
    """Keys and certificates of one run."""

    certificates: CertificateFiles
    scope: bytes = field(repr=False)
    producer_pem: bytes = field(repr=False)
    protection: Protection | None = None
    """How Objects are sealed; None: they go in clear."""

    issuer: bytes | None = field(default=None, repr=False)
    """Seed of the key that tokens are issued with, 32 octets: everybody is asked for one, and for
    a client's certificate. None: nobody is asked for anything."""

    @property
    def shared(self) -> Scope:
        """The scope that both ends are of."""
        return Scope(ScopeKey(self.scope), self.protection)

    @property
    def producer_key(self) -> ProducerKey:
        return ProducerKey.from_pem(self.producer_pem)


class EndFailed(Exception):
    """A process could not do what it was asked. The message has its traceback."""


class End:
    """One end, as whoever measures sees it. It runs in the Python that its role asks for."""

    def __init__(self, role: type["Role"], place: Place, **options: Any) -> None:
        python = role.python()
        self._pipe, theirs = Pipe()
        self._what = role.__name__
        self._is_frozen = False
        paths = [str(CHECKOUT / "scripts"), str(CHECKOUT), os.environ.get("PYTHONPATH")]
        with theirs:
            self._process = subprocess.Popen(
                # -P: whatever folder this is run in, it is not another checkout that is measured.
                [python, "-P", "-m", "benchcases", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        try:
            self._send((role, place, options))
            self.answer()  # it is up
        except BaseException:
            self._end()
            raise

    def ask(self, verb: str, *args: Any, limit_s: float = LIMIT_S, **options: Any) -> Any:
        """Have something done, and return what came of it.

        Raises:
            EndFailed: If the process fails at it, ends, or takes longer.
        """
        self.begin(verb, *args, **options)
        return self.answer(limit_s=limit_s)

    def begin(self, verb: str, *args: Any, **options: Any) -> None:
        """Have something done; :meth:`answer` must follow."""
        self._send((verb, args, options))

    def answer(self, *, limit_s: float = LIMIT_S) -> Any:
        """Wait for what :meth:`begin` asked for."""
        if not self._pipe.poll(limit_s):
            raise EndFailed(f"{self._what}: no answer within {limit_s:g} s")
        try:
            failed, found = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EndFailed(f"{self._what}: its process ended") from None
        if failed:
            raise EndFailed(f"{self._what}: {found}")
        return found

    def freeze(self) -> None:
        """Stop the process where it is. It can only be left then."""
        self._process.send_signal(signal.SIGSTOP)
        self._is_frozen = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _send(self, what: Any) -> None:
        try:
            self._pipe.send(what)
        except BrokenPipeError:
            raise EndFailed(f"{self._what}: its process ended") from None

    def _end(self) -> None:
        self._pipe.close()  # which tells the process to end
        if self._is_frozen:
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def made_place() -> Iterator[Place]:
    """Make keys and certificates in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        pem = ProducerKey.generate().private_pem()
        certificates = make_certificates(Path(folder), client="spiffe://bench.example/consumer")
        yield Place(certificates, secrets.token_bytes(32), pem)


# -- in the processes ----------------------------------------------------------------------------


class Role:
    """What a process does: coroutines by name."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place = place
        self._ticking = Ticking()

    @staticmethod
    def python() -> str:
        """Return what it runs in: this Python, or one that has the engine that it is to use."""
        return python_with(engine())

    async def start(self, stack: AsyncExitStack) -> None:
        """Get ready."""

    async def usage(self) -> dict[str, float]:
        return {"cpu_s": time.process_time(), "rss": usage.resident(), "peak": usage.peak()}

    async def reset_peak(self) -> int:
        usage.reset_peak()
        return usage.resident()

    async def watch(self) -> None:
        """Look out for pauses of the event loop from now on."""
        self._ticking.begin()

    async def watched(self) -> dict[str, float]:
        """Return the longest pause since, see :class:`Ticking`; look no longer."""
        return self._ticking.end()

    async def pid(self) -> int:
        return os.getpid()

    async def pin(self, cores: Collection[int]) -> None:
        """Stay on some cores from now on, with all threads."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def be_an_end(descriptor: int) -> None:
    """Be what the other side of a pipe says, until it is closed (called by ``__main__``)."""
    usage.end_with_parent()
    set_up_logging(level="error")
    pipe = Connection(descriptor)
    try:
        role, place, options = pipe.recv()
    except EOFError:
        return
    uvloop.run(_serve(role(place, **options), pipe))


async def _serve(role: Role, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    async with collected_aside(), AsyncExitStack() as stack:  # as kvcs does
        try:
            await role.start(stack)
            pipe.send((False, None))
            while True:
                verb, args, options = await loop.run_in_executor(None, pipe.recv)
                try:
                    found = await getattr(role, verb)(*args, **options)
                except Exception:
                    # Whatever it is belongs to whoever asked.
                    pipe.send((True, traceback.format_exc()))
                else:
                    pipe.send((False, found))
        except (EOFError, BrokenPipeError):
            pass  # the other side is done with us
        except Exception:
            pipe.send((True, traceback.format_exc()))
