"""What a producer and a store do over HTTP: serve blocks, and be listed at an index."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Self

import structlog

from kvcs.audit import AuditEvent, Outcome, note
from kvcs.cli.clients import index_client
from kvcs.cli.output import Output
from kvcs.config import (
    Address,
    ProducerSettings,
    StoreSettings,
)
from kvcs.consumer.tasks import tasks
from kvcs.depot.blocks import StoredBlocks
from kvcs.depot.daemon import Store
from kvcs.depot.listing import StoreListing
from kvcs.errors import ConfigError
from kvcs.kvsp.http.blockservice import BlockService
from kvcs.kvsp.http.holder import BlockHolder
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.registrar import Registrar
from kvcs.kvsp.http.service import HttpService, ServiceOptions
from kvcs.kvsp.http.tokens import TokenFile
from kvcs.link import server_tls
from kvcs.producer.blocks import PublishedBlocks
from kvcs.producer.daemon import Producer
from kvcs.producer.listing import Listing
from kvcs.telemetry import Counters, LogEvent
from moqt.aio import ServerTls

log = structlog.get_logger("kvcs")


#: Keeps what is held listed while its block runs: told the index, who tells it, and the URIs of
#: sessions and of block services.
Listed = Callable[
    [IndexClient, Registrar, Sequence[str], Sequence[str]], AbstractAsyncContextManager[None]
]


class OverHttp:
    """The part of a producer or store that speaks HTTP.

    Args:
        settings: What it was told.
        scope_id: Of the scope.
        counters: Where things are counted.
        holder: Who finds blocks.
        relays: Relays where it announces.
        listed: Keeps what it holds listed.

    Raises:
        ConfigError: If a file or URI cannot be used; the message names it.
    """

    def __init__(
        self,
        settings: ProducerSettings | StoreSettings,
        *,
        scope_id: bytes,
        counters: Counters,
        holder: BlockHolder,
        relays: Sequence[str],
        listed: Listed,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._relays = relays
        self._listed = listed
        self._service: HttpService | None = None
        if settings.http_listen is not None:
            assert settings.tokens_file is not None, "the settings see to that"
            self._service = HttpService(
                [BlockService(holder, counters=counters)],
                TokenFile.read(settings.tokens_file),
                options=ServiceOptions(
                    max_connections=settings.max_connections,
                    request_timeout_s=settings.request_timeout_s,
                    idle_timeout_s=settings.idle_timeout_s,
                ),
                counters=counters,
            )
        self._client = index_client(settings, scope_id)

    @classmethod
    def of_producer(cls, producer: Producer, settings: ProducerSettings) -> Self:
        """Return that of a producer, which lists publications from their first segment on."""
        answers = producer.answers

        @asynccontextmanager
        async def listed(
            index: IndexClient,
            registrar: Registrar,
            sessions: Sequence[str],
            services: Sequence[str],
        ) -> AsyncIterator[None]:
            listing = Listing(answers, registrar, sessions=sessions, services=services)
            listing.start()
            try:
                yield
            finally:
                listing.stop()

        return cls(
            settings,
            scope_id=producer.scope_key.scope_id,
            counters=producer.counters,
            holder=PublishedBlocks(answers),
            relays=settings.connect,
            listed=listed,
        )

    @classmethod
    def of_store(cls, store: Store, settings: StoreSettings) -> Self:
        """Return that of a store, which lists what it holds whole."""
        depot = store.depot
        blocks = StoredBlocks(depot.read, sealed=store.terms.protection is not None)

        @asynccontextmanager
        async def listed(
            index: IndexClient,
            registrar: Registrar,
            sessions: Sequence[str],
            services: Sequence[str],
        ) -> AsyncIterator[None]:
            listing = StoreListing(
                depot,
                store.terms,
                index=index,
                registrar=registrar,
                blocks=blocks,
                sessions=sessions,
                services=services,
            )
            async with tasks() as group:
                group.start(listing.run())
                yield

        return cls(
            settings,
            scope_id=store.terms.scope_key.scope_id,
            counters=depot.counters,
            holder=blocks,
            relays=settings.announce,
            listed=listed,
        )

    @asynccontextmanager
    async def serving(self, address: tuple[str, int] | None, output: Output) -> AsyncIterator[None]:
        """Serve and be listed while the block runs.

        Args:
            address: Where it listens for sessions, if it does.
            output: Told where blocks are served.
        """
        settings = self._settings
        async with AsyncExitStack() as stack:
            served: tuple[str, int] | None = None
            if self._service is not None and settings.http_listen is not None:
                served = await self._service.listen(*settings.http_listen, tls=server_tls(settings))
                stack.push_async_callback(self._service.close, settings.drain_s)
                output.tell("listening-http", host=served[0], port=served[1])
            if self._client is not None:
                sessions, services = self._places(address, served)
                registrar = Registrar(self._client, counters=self._counters)
                await stack.enter_async_context(registrar)
                await stack.enter_async_context(
                    self._listed(self._client, registrar, sessions, services)
                )
            yield

    def renewing(self, identify: Callable[[ServerTls], None]) -> Callable[[ServerTls], None]:
        """Return what reads files again: that, the same for HTTPS, and the tokens read again."""

        def renew(tls: ServerTls) -> None:
            if self._service is not None and self._settings.tokens_file is not None:
                renew_tokens(self._service, self._settings.tokens_file)
                self._service.identify(tls)
            identify(tls)

        return renew

    def _places(
        self, address: tuple[str, int] | None, served: tuple[str, int] | None
    ) -> tuple[list[str], list[str]]:
        """Return the URIs to be listed under: of sessions, and of block services."""
        told = self._settings.reached_at
        sessions = [uri for uri in told if uri.startswith("moqt:")]
        services = [uri for uri in told if uri.startswith("https:")]
        if not sessions:
            sessions = [*self._relays]
            if address is not None and not _is_every(address[0]):
                sessions.append(f"moqt://{Address(*address)}/")
        if not services and served is not None and not _is_every(served[0]):
            services = [f"https://{Address(*served)}"]
        if not sessions and not services:
            raise ConfigError(
                "reached_at is not set, expected where others reach us: neither a relay nor an "
                "address of this machine alone is known"
            )
        return sessions, services


def renew_tokens(service: HttpService, path: object) -> None:
    """Read the tokens of a service again; those that were read before stay if that fails."""
    try:
        service.authorizer = TokenFile.read(str(path))
    except ConfigError as exc:
        log.warning(LogEvent.TOKENS_REFUSED, error=str(exc))
        note(AuditEvent.KEY, Outcome.REFUSED, reason=str(exc))
    else:
        log.info(LogEvent.TOKENS_TAKEN, file=str(path))
        note(AuditEvent.KEY, Outcome.TAKEN, reason=f"tokens of {path}")


def _is_every(host: str) -> bool:
    return host in ("::", "0.0.0.0")
