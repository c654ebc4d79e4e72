"""Store: a depot, whom it follows, and to whom it serves; the beginning and the end of it all."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from kvcs.config import StoreSettings
from kvcs.depot.depot import Depot
from kvcs.depot.following import Following, Upstream
from kvcs.depot.handler import DepotHandler
from kvcs.depot.terms import Terms
from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import standard_codecs
from kvcs.link import check_target
from kvcs.producer.serving import Serving
from kvcs.profile.naming import PROFILE
from kvcs.profile.signing import PublicKey
from kvcs.telemetry import Counters, LogEvent
from kvcs.trust.scope import Scope
from moqt.aio import ClientTls, QuicSettings
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig

log = structlog.get_logger("kvcs.depot")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a store can be told, but for keys and codecs."""

    budget_octets: int = 64 << 30
    """Octets of disk that publications may take, the index included."""

    memory_octets: int = 128 << 20
    """Octets of memory for what is being served."""

    partial_s: float = 3600.0
    """Seconds that a publication of which something is missing is kept after the last Object."""

    at_once: int = 16
    """Publications that are brought at the same time."""

    stall_s: float = 600.0
    """Seconds without anything new until a publication is left alone."""

    reader_stall_s: float = 10.0
    """Seconds that a consumer may take nothing of what it reads, while what is read leaves no room
    for what comes."""

    require_signature: bool = False
    """Take no plain manifest."""

    drain_s: float = 10.0
    """Seconds that consumers have to finish when the store stops."""

    connect_timeout_s: float = 10.0
    """Seconds until a peer must be reached."""

    request_timeout_s: float = 10.0
    """Seconds until a peer must answer."""

    @classmethod
    def of(cls, settings: StoreSettings) -> Self:
        """Take the options out of the settings of the command."""
        return cls(
            budget_octets=settings.budget_octets,
            memory_octets=settings.memory_octets,
            partial_s=settings.partial_s,
            at_once=settings.at_once,
            stall_s=settings.stall_timeout_s,
            reader_stall_s=settings.stall_s,
            require_signature=settings.require_signature,
            drain_s=settings.drain_s,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
        )


class Store(Serving):
    """Keeps the publications of a scope on disk and publishes them again (decision 15).

    An asynchronous context manager.

    Args:
        folder: Where they lie.
        scope: The scope, and whether its Objects are sealed; of a key alone they are not.
        options: Everything that has a default.
        trusted: Public keys of producers; if there are any, signed manifests are held to them.
        codecs: The codecs that this end knows; others are taken at the manifest's word.
        counters: Where things are counted.

    Attributes:
        depot: What is held.
        terms: What is taken.

    Raises:
        ConfigError: If the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        scope: Scope | ScopeKey,
        options: StoreOptions | None = None,
        *,
        trusted: Mapping[bytes, PublicKey] | None = None,
        codecs: CodecRegistry | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._options = options = options or StoreOptions()
        scope = Scope.of(scope)
        self._scope_key = scope.key
        self.terms = Terms(
            scope_key=scope.key,
            protection=scope.protection,
            trusted=trusted or {},
            require_signature=options.require_signature,
            codecs=standard_codecs() if codecs is None else codecs,
            request_timeout_s=options.request_timeout_s,
            stall_s=options.stall_s,
        )
        self.depot = Depot(
            folder,
            budget_octets=options.budget_octets,
            memory_octets=options.memory_octets,
            partial_s=options.partial_s,
            counters=counters,
        )
        self._handler = DepotHandler(self.depot, scope.key.scope_id, options.reader_stall_s)
        self._following: asyncio.Task[None] | None = None
        super().__init__(
            self._handler,
            self.depot.whole,
            self.depot.counters,
            connect_timeout_s=options.connect_timeout_s,
            request_timeout_s=options.request_timeout_s,
        )

    @property
    def scope_prefix(self) -> TrackNamespace:
        """The prefix of all publications of the scope."""
        return TrackNamespace((PROFILE, self._scope_key.scope_id))

    # -- ways to the outside ---------------------------------------------------------------------

    def follow(
        self,
        uris: Sequence[str],
        *,
        prefixes: Sequence[TrackNamespace] = (),
        tls: ClientTls | None = None,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
    ) -> None:
        """Keep what is announced at relays and producers from now on. Once.

        Args:
            uris: Where they are.
            prefixes: What of it; all of the scope by default.
            tls: Whom to believe.
            quic: Limits of the QUIC connections.
            config: Limits of the sessions.

        Raises:
            ConfigError: If a URI or a file of ``tls`` cannot be used, or a prefix is of another
                scope.
        """
        assert self._following is None, "follow() is called once"
        for prefix in prefixes:
            if not self.scope_prefix.is_prefix_of(prefix):
                raise ConfigError(f"prefix {prefix} is of another scope than {self.scope_prefix}")
        tls = tls or ClientTls()
        for uri in uris:
            check_target(uri, tls)
        upstreams = [
            Upstream(
                uri,
                tls=tls,
                quic=quic,
                config=config,
                connect_timeout_s=self._options.connect_timeout_s,
                request_timeout_s=self._options.request_timeout_s,
            )
            for uri in uris
        ]
        following = Following(
            self.depot,
            self.terms,
            prefixes or (self.scope_prefix,),
            at_once=self._options.at_once,
        )
        self._following = self._tasks.create_task(following.run(upstreams))

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self.depot.__aenter__()
        self._looking = self._tasks.create_task(self._handler.leave_stalled())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            try:
                await self._close(0.0 if kind is not None else self._options.drain_s)
            finally:
                try:
                    await self._tasks.__aexit__(kind, exc, traceback)
                finally:
                    await self.depot.__aexit__(None, None, None)
        except BaseExceptionGroup as group:
            # The task group wraps what the block raised. Callers want it as it was.
            if group.exceptions != (exc,):
                raise
        return None

    async def _close(self, drain_s: float) -> None:
        """Begin nothing new, let consumers finish, close everything."""
        log.info(LogEvent.STOPPING, drain_s=drain_s)
        self._handler.draining = True
        self._looking.cancel()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._stop_serving(drain_s)
        self._handler.close()
        log.info(LogEvent.STOPPED, counters=repr(self.depot.counters))
