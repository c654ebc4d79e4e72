"""Both ends, each in a process of its own, told what to do over a pipe.

A process serves verbs: coroutines of its role's class. Whoever measures is a plain program that
asks one after the other, or begins one and asks another meanwhile.
"""

import asyncio
import multiprocessing
import os
import secrets
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import uvloop

from benchcases import usage
from kvcs.consumer.events import Event, LayerReady, ManifestAccepted
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component, Layout
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import MAX_MANIFEST_EVERY
from kvcs.profile.naming import PublicationName
from kvcs.profile.signing import ProducerKey
from kvcs.store.sink import ArraySink, BlockSink
from kvcs.store.source import SyntheticSource
from kvcs.telemetry import Counter, Counters, set_up_logging
from moqt.aio import ClientTls, MoqtConnection, QuicSettings, ServerTls, connect
from moqt.aio.settings import EngineName
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter

#: Seconds that anything may take that is not told a limit of its own.
LIMIT_S = 900.0
#: Tells the processes of the ends which QUIC engine to use.
ENGINE_VARIABLE = "BENCH_ENGINE"


def _engine() -> EngineName | None:
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
    def source(self) -> SyntheticSource:
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

    @property
    def producer_key(self) -> ProducerKey:
        return ProducerKey.from_pem(self.producer_pem)


class EndFailed(Exception):
    """A process could not do what it was asked. The message has its traceback."""


class End:
    """One end, as whoever measures sees it."""

    def __init__(self, role: type["_Role"], place: Place, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process's memory
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(role, theirs, place, options), daemon=True
        )
        self._process.start()
        theirs.close()
        self._what = role.__name__
        self.answer()  # it is up

    def ask(self, verb: str, *args: Any, limit_s: float = LIMIT_S, **options: Any) -> Any:
        """Have something done, and return what came of it.

        Raises:
            EndFailed: If the process fails at it, ends, or takes longer.
        """
        self.begin(verb, *args, **options)
        return self.answer(limit_s=limit_s)

    def begin(self, verb: str, *args: Any, **options: Any) -> None:
        """Have something done; :meth:`answer` must follow."""
        self._pipe.send((verb, args, options))

    def answer(self, *, limit_s: float = LIMIT_S) -> Any:
        """Wait for what :meth:`begin` asked for."""
        if not self._pipe.poll(limit_s):
            raise EndFailed(f"{self._what}: no answer within {limit_s:g} s")
        try:
            failed, found = self._pipe.recv()
        except EOFError:
            raise EndFailed(f"{self._what}: its process ended") from None
        if failed:
            raise EndFailed(f"{self._what}: {found}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()  # which tells the process to end
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def made_place() -> Iterator[Place]:
    """Make keys and certificates in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        pem = ProducerKey.generate().private_pem()
        yield Place(make_certificates(Path(folder)), secrets.token_bytes(32), pem)


# -- in the processes ----------------------------------------------------------------------------


class _Role:
    """What a process does: coroutines by name."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place = place

    async def start(self, stack: AsyncExitStack) -> None:
        """Get ready."""

    async def usage(self) -> dict[str, float]:
        return {"cpu_s": time.process_time(), "rss": usage.resident(), "peak": usage.peak()}

    async def reset_peak(self) -> int:
        usage.reset_peak()
        return usage.resident()

    async def pid(self) -> int:
        return os.getpid()


def _main(role: type[_Role], pipe: Connection, place: Place, options: dict[str, Any]) -> None:
    set_up_logging(level="error")
    uvloop.run(_serve(role(place, **options), pipe))


async def _serve(role: _Role, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
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


class _Noticing(Counters):
    """Counters that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def add(self, counter: Counter, amount: int = 1) -> None:
        super().add(counter, amount)
        self._changed.set()

    async def changed(self) -> None:
        """Return once something has been counted after this was called."""
        self._changed.clear()
        await self._changed.wait()


class ProducerEnd(_Role):
    """A producer that listens."""

    def __init__(
        self,
        place: Place,
        *,
        datagram: int = 1452,
        ttl_s: float = 3600.0,
        manifest_every: int = MAX_MANIFEST_EVERY,
    ) -> None:
        super().__init__(place)
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=_engine())
        self._options = ProducerOptions(ttl_s=ttl_s, drain_s=0.2, manifest_every=manifest_every)
        self._counters = _Noticing()
        self._layers_at: list[float] = []
        self._producing: asyncio.Task[None] | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        scope, key = ScopeKey(self.place.scope), self.place.producer_key
        self._producer = await stack.enter_async_context(
            Producer(scope, self._options, producer_key=key, counters=self._counters)
        )
        files = self.place.certificates
        _, self._port = await self._producer.listen(
            "127.0.0.1",
            0,
            tls=ServerTls(files.certificate_file, files.key_file),
            quic=self._quic,
        )

    async def port(self) -> int:
        return self._port

    async def publish(self, cache: Cache) -> dict[str, Any]:
        """Publish a cache whole."""
        began = time.monotonic()
        handle = self._open(cache)
        await handle.feed(cache.source)
        seconds = time.monotonic() - began
        return {"seconds": seconds, "octets": handle.publication.octets}

    async def produce(self, cache: Cache, interval_s: float, lead_s: float) -> None:
        """Begin to publish a cache layer by layer, some time after the next session began."""
        self._layers_at = []
        handle = self._open(cache)
        await handle.add_segment()
        self._producing = asyncio.create_task(self._produce(handle, cache, interval_s, lead_s))

    async def reached(self, layers: int) -> None:
        """Return when so many layers have been handed over."""
        while len(self._layers_at) < layers:
            await self._counters.changed()

    async def produced(self) -> list[float]:
        """Wait for the end; return when each layer was handed over, by the monotonic clock."""
        assert self._producing is not None
        await self._producing
        return self._layers_at

    async def name(self) -> PublicationName:
        """The publication opened last."""
        return self._name

    async def left(self, wait_s: float) -> dict[str, int]:
        """Return what is still held when nothing should be, after a while at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._producer.octets_held:
                    await self._counters.changed()
        return {
            "publications": len(tuple(self._producer.answers.publications)),
            "octets": self._producer.octets_held,
        }

    def _open(self, cache: Cache) -> PublicationHandle:
        source = cache.source
        handle = self._producer.open(source.descriptor, source.tokens)
        self._name = handle.name
        return handle

    async def _produce(
        self, handle: PublicationHandle, cache: Cache, interval_s: float, lead_s: float
    ) -> None:
        layers = list(cache.source.layers(0, cache.blocks))
        before = self._counters[Counter.SESSIONS]
        while self._counters[Counter.SESSIONS] == before:
            await self._counters.changed()
        await asyncio.sleep(lead_s)
        for layer in layers:
            self._layers_at.append(time.monotonic())
            await handle.add_layer(*layer)
            await asyncio.sleep(interval_s)
        await handle.finish()


class DiscardingSink:
    """Takes verified tensors and keeps none of them; looks around every so often."""

    def __init__(self, every: int, look: Callable[[int], None]) -> None:
        self.placed = 0
        self._every = every
        self._look = look

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        self._look(0)

    def place(self, component: Component, layer: int, block: int, tensor: Any) -> None:
        self.placed += 1
        if self._every and not self.placed % self._every:
            self._look(self.placed)

    def done(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class ConsumerEnd(_Role):
    """A consumer. Everything it takes is verified, against signed manifests."""

    def __init__(self, place: Place, *, port: int, datagram: int = 1452) -> None:
        super().__init__(place)
        self._uri = f"moqt://127.0.0.1:{port}/"
        self._tls = ClientTls(ca_file=place.certificates.ca_file)
        self._quic = QuicSettings(max_datagram_octets=datagram, engine=_engine())
        key = place.producer_key
        self._trusted = {key.kid: key.public_key}
        self._stalled: MoqtConnection | None = None
        self._stack = AsyncExitStack()

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._stack)

    async def consume(
        self,
        cache: Cache,
        sink: str = "arrays",
        *,
        eager: bool = False,
        every: int = 0,
        other: int | None = None,
    ) -> dict[str, Any]:
        """Retrieve a cache once, over a connection of its own.

        Args:
            cache: Which.
            sink: ``arrays`` that are there already, as an engine has them; ``allocate`` them;
                or ``discard``.
            eager: See :class:`RetrievalSettings`.
            every: Note the memory of both ends every so many Objects; for ``discard``.
            other: Process id of the producer.
        """
        samples: list[tuple[int, int, int]] = []

        def look(objects: int) -> None:
            if other is not None:
                samples.append((objects, usage.resident(), usage.resident(other)))

        source = cache.source
        where: BlockSink = (
            DiscardingSink(every, look) if sink == "discard" else _arrays(cache, sink == "arrays")
        )
        expected = Expectations.of_tokens(
            ScopeKey(self.place.scope),
            source.descriptor,
            source.tokens,
            trusted=self._trusted,
            require_signature=True,
        )
        spec = ConnectionSpec(uri=self._uri, tls=self._tls, quic=self._quic)
        times: dict[str, list[float]] = {"ready": [], "manifest": []}
        settings = RetrievalSettings(deadline_s=LIMIT_S, eager=eager)
        before = await self.reset_peak()
        cpu, began = time.process_time(), time.monotonic()
        async with consume(
            expected, [spec], where, settings=settings, on_event=partial(_note, times)
        ) as retrieval:
            complete = await retrieval.result()
            seconds = time.monotonic() - began
        summary = complete.summary
        return {
            "seconds": seconds,
            "octets": summary.octets,
            "objects": summary.objects,
            "attested": summary.attested,
            "duplicates": summary.duplicates,
            "rejected": summary.rejected,
            "cpu_s": time.process_time() - cpu,
            "rss_before": before,
            "peak": usage.peak(),
            "began": began,
            "ready_at": times["ready"],
            "manifest_s": times["manifest"][0] - began,
            "samples": samples,
        }

    async def stall(self, name: PublicationName, objects: int) -> int:
        """Subscribe to the data tracks of segment 0, take some Objects of each, and no more."""
        connection = await self._stack.enter_async_context(
            connect(self._uri, tls=self._tls, quic=self._quic)
        )
        self._stalled = connection
        taken = 0
        for track in ("k.raw.s0", "v.raw.s0"):
            subscription = await connection.subscribe(
                name.track(track.encode()), fill=LocationFilter.absolute_start(0, 0)
            )
            for _ in range(objects):
                item = await anext(subscription)
                taken += isinstance(item, ObjectReceived)
        return taken

    async def is_stalled(self) -> bool:
        """Whether that connection is still there."""
        return self._stalled is not None and self._stalled.closed is None


def _note(times: dict[str, list[float]], event: Event) -> None:
    if isinstance(event, LayerReady):
        times["ready"].append(time.monotonic())
    elif isinstance(event, ManifestAccepted):
        times["manifest"].append(time.monotonic())


def _arrays(cache: Cache, at_hand: bool) -> ArraySink:
    if not at_hand:
        return ArraySink()
    layout = Layout.of(cache.source.descriptor)
    tokens = cache.blocks * cache.block_tokens
    k, v = (
        [np.full((tokens, *shape[1:]), 0, layout.dtype) for _ in range(layout.layers)]
        for shape in (layout.k_shape, layout.v_shape)
    )
    return ArraySink(k, v)
