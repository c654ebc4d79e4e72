"""The consumer of ``kvcs bench``: it retrieves a cache again and again, and measures."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn

from kvcs.cli.bench_cache import BenchCache
from kvcs.config import BenchSettings
from kvcs.consumer.events import Event, LayerReady
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError, Expired, NotFound
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Layout
from kvcs.measurement import Measurement, Retrieved, Setting
from kvcs.profile.naming import PROFILE
from kvcs.store.sink import ArraySink
from kvcs.trust.scope import Scope
from moqt.aio import connect
from moqt.aio.engine import DEFAULT as DEFAULT_ENGINE
from moqt.names import TrackNamespace

#: Requests of which the quickest answer is the round trip.
_REQUESTS = 5
#: Packets of a handshake that share a datagram with another one, and are not lost for that.
_COALESCED = 2


@dataclass(frozen=True, slots=True)
class Served:
    """What the other end tells of a session that is over."""

    datagrams: int
    lost: int
    datagram_octets: int | None
    cpu_s: float
    """Of its process, from its start."""


#: Waits for what the other end tells of the session that ended last; None where it does not.
Asking = Callable[[], Awaitable[Served | None]]


async def nobody_to_ask() -> Served | None:
    """Stand for an other end that tells nothing here."""
    return None


class Bench:
    """Retrieves a cache again and again, over a connection each time, and measures.

    Args:
        cache: What is there to be retrieved.
        spec: Where from, and over what.
        scope: That it is published in.
        settings: Deadlines.
        seconds: No retrieval begins that much later than the first.
        board: Is told how far it is.
        ask: Asks the other end what a session cost.
    """

    def __init__(
        self,
        cache: BenchCache,
        spec: ConnectionSpec,
        scope: Scope | ScopeKey,
        settings: BenchSettings,
        *,
        seconds: float,
        board: "Board",
        ask: Asking = nobody_to_ask,
    ) -> None:
        self._cache = cache
        self._spec = spec
        self._settings = settings
        self._seconds = seconds
        self._board = board
        self._ask = ask
        self._expected = Expectations.of_tokens(scope, cache.descriptor, cache.source().tokens)
        if cache.octets > settings.max_cache_octets:
            raise ConfigError(
                f"the cache takes {cache.octets} octets, max_cache_octets is "
                f"{settings.max_cache_octets}: make --mb smaller"
            )
        layout = Layout.of(cache.descriptor)
        # Memory that has been touched, as an engine has it: first use is no part of the figures.
        self._k, self._v = (
            [np.ones((cache.tokens, *shape[1:]), layout.dtype) for _ in range(layout.layers)]
            for shape in (layout.k_shape, layout.v_shape)
        )
        self._datagram_octets: int | None = settings.max_datagram_octets

    async def run(self) -> Measurement:
        """Measure until the time is over, or the deadline has passed.

        Raises:
            Expired: If not even one retrieval was complete by then.
            NotFound: If the other end has no such cache.
            KvcsError: If a retrieval fails.
            OSError: If nobody is reached.
        """
        began = time.monotonic()
        deadline = began + self._settings.deadline_s
        try:
            async with asyncio.timeout(self._settings.deadline_s) as limit:
                rtt_s = await self._round_trip()
        except TimeoutError:
            if not limit.expired():
                raise
            raise Expired(f"no round trip within {self._settings.deadline_s:g} s") from None
        at_start = served = await self._ask()
        began, runs = time.monotonic(), list[Retrieved]()
        while not runs or time.monotonic() - began < self._seconds:
            try:
                run = await self._retrieve(deadline - time.monotonic())
            except Expired:
                if not runs:
                    raise
                break  # what was measured before is a result
            served = await self._ask()
            if served is not None:
                run = replace(run, datagrams_sent=served.datagrams, datagrams_lost=served.lost)
            self._board.retrieved(run)
            runs.append(run)
        cpu_s = None
        if at_start is not None and served is not None:
            cpu_s = served.cpu_s - at_start.cpu_s
        return Measurement.of(self._setting(served), runs, rtt_s=rtt_s, producer_cpu_s=cpu_s)

    def _setting(self, served: Served | None) -> Setting:
        cache, settings = self._cache, self._settings
        layout = Layout.of(cache.descriptor)
        return Setting(
            uri=self._spec.uri,
            engine=settings.engine or DEFAULT_ENGINE,
            codec=cache.codec.name,
            lossless=cache.codec.lossless,
            model=cache.model,
            layers=layout.layers,
            tokens=cache.tokens,
            cache_octets=cache.octets,
            object_octets=layout.k_octets,
            datagram_octets=(self._datagram_octets if served is None else served.datagram_octets),
        )

    async def _round_trip(self) -> float:
        """Return the least time in which a request is answered."""
        settings = self._settings
        ours = self._expected.prefix(len(self._expected.block_keys)).fields[:3]
        assert ours[0] == PROFILE
        times: list[float] = []
        async with connect(
            self._spec.uri,
            tls=self._spec.tls,
            quic=self._spec.quic,
            config=self._spec.config,
            timeout_s=settings.connect_timeout_s,
            drain_s=0.0,
        ) as connection:
            for _ in range(_REQUESTS):
                # Which publications of a prompt there are that nobody has.
                prefix = TrackNamespace((*ours, os.urandom(32)))
                began = time.monotonic()
                answer = await connection.subscribe_namespace(
                    prefix, timeout_s=settings.request_timeout_s
                )
                times.append(time.monotonic() - began)
                answer.cancel()
        return min(times)

    async def _retrieve(self, deadline_s: float) -> Retrieved:
        """Retrieve the cache once."""
        cache, settings = self._cache, self._settings
        if deadline_s <= 0:
            raise Expired("the deadline passed before anything was retrieved")
        ready_s: list[float] = []

        def note(event: Event) -> None:
            if isinstance(event, LayerReady):
                ready_s.append(time.monotonic() - began)
                self._board.ready(len(ready_s))

        retrieval = consume(
            self._expected,
            [self._spec],
            ArraySink(self._k, self._v),
            wish=Wish(codecs=(cache.codec.name,)),
            settings=RetrievalSettings(
                deadline_s=deadline_s,
                connect_timeout_s=settings.connect_timeout_s,
                request_timeout_s=settings.request_timeout_s,
                discovery_timeout_s=settings.request_timeout_s,
            ),
            on_event=note,
        )
        self._board.begun()
        cpu_s, began = time.process_time(), time.monotonic()
        try:
            async with retrieval:
                complete = await retrieval.result()
                cpu_s = time.process_time() - cpu_s
                stats = retrieval.stats()
        except NotFound as exc:
            raise NotFound(
                f"{exc}; the other end must be told the same --model, --mb, --block-tokens and "
                "--codec, and have the same scope key"
            ) from None
        except Expired as exc:
            layers = cache.descriptor.layers
            raise Expired(
                f"{exc}; {len(ready_s)} of {layers} layers came: make --mb smaller, or "
                "--deadline-s larger"
            ) from None
        # Of those that this end sends: it looks for the size on the same path.
        self._datagram_octets = max(
            (one.datagram_octets for one in stats if one.datagram_octets is not None),
            default=self._settings.max_datagram_octets,
        )
        came, sent = (
            sum(getattr(one, name) for one in stats)
            for name in ("packets_received", "packets_expected")
        )
        return Retrieved(
            seconds=ready_s[-1],
            first_layer_s=ready_s[0],
            data_octets=complete.summary.octets,
            cpu_s=cpu_s,
            datagrams=came,
            datagrams_sent=sent,
            datagrams_lost=max(0, sent - came - _COALESCED),
        )


class Board:
    """Shows on standard error how far it is, until the block ends.

    A line for each retrieval, and on a terminal a bar for the one that is under way.

    Args:
        cache: What is retrieved.
    """

    def __init__(self, cache: BenchCache) -> None:
        self._cache = cache
        self._layers = cache.descriptor.layers
        self._console = Console(stderr=True, highlight=False)
        self._number = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("connecting", total=cache.octets)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begun(self) -> None:
        """A retrieval begins."""
        self._number += 1
        self._progress.reset(self._task, description=f"retrieval {self._number}")

    def ready(self, layers: int) -> None:
        """So many layers of it are ready."""
        self._progress.update(self._task, completed=self._cache.octets * layers / self._layers)

    def retrieved(self, run: Retrieved) -> None:
        """It is complete."""
        octets = self._cache.octets
        self._console.print(
            f"retrieval {self._number}: {octets / 1e6:,.1f} MB in {run.seconds:.3f} s, "
            f"{octets / run.seconds / 1e6:,.1f} MB/s"
        )
