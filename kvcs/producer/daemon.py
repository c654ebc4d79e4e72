"""Producer: publications served to any number of consumers, over connections of both directions.

Its parts, each in a file of its own: the handle that fills a publication, what is held, the
answers to requests, and relays. Here are the listener, and the beginning and the end of it all.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import structlog

from kvcs.config import ProducerSettings
from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import standard_codecs
from kvcs.producer.answers import Answers
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.handler import ServingHandler
from kvcs.producer.holdings import Holdings
from kvcs.producer.publication import MAX_MANIFEST_EVERY, REPEATED_OCTETS, Publication
from kvcs.producer.segment import Encoding
from kvcs.producer.serving import Serving
from kvcs.producer.workers import Workers
from kvcs.profile.naming import PublicationName, new_publication_id
from kvcs.profile.signing import ProducerKey
from kvcs.store.source import BlockSource
from kvcs.telemetry import Counters, LogEvent
from kvcs.trust.scope import Scope
from kvcs.trust.sealing import Sealing

log = structlog.get_logger("kvcs.producer")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """What a producer can be told, but for keys and codecs."""

    encodings: tuple[Encoding, ...] = (Encoding(),)
    """Forms in which every segment is offered."""

    deterministic: bool = False
    """Promise that every run gives bit-identical Objects."""

    manifest_every: int = MAX_MANIFEST_EVERY
    """Completed layers between two versions of the manifest, 1 to 8."""

    repeated_octets: int = REPEATED_OCTETS
    """Octets of digests that every version of the manifest may repeat; see
    :class:`~kvcs.producer.publication.Publication`."""

    store_octets: int = 4 << 30
    """Payload octets that are held, over all publications. A layer that is being added counts
    from the moment it gets its turn; its copy before that does not."""

    ttl_s: float = 3600.0
    """Seconds that a finished publication is kept."""

    store_wait_s: float = 30.0
    """Seconds that a layer waits for room."""

    drain_s: float = 10.0
    """Seconds that consumers have to finish when the producer stops."""

    connect_timeout_s: float = 10.0
    """Seconds until a relay must be reached."""

    request_timeout_s: float = 10.0
    """Seconds until a relay must answer."""

    @classmethod
    def of(cls, settings: ProducerSettings) -> Self:
        """Take the options out of the settings of a command."""
        return cls(
            encodings=tuple(Encoding.parse(text) for text in settings.encodings),
            deterministic=settings.deterministic,
            manifest_every=settings.manifest_every,
            store_octets=settings.store_octets,
            ttl_s=settings.ttl_s,
            store_wait_s=settings.store_wait_s,
            drain_s=settings.drain_s,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
        )


class Producer(Serving):
    """Publishes caches and serves them. An asynchronous context manager.

    Args:
        scope: That is published in, and whether Objects are sealed there; of a key alone they are
            not.
        options: Everything that has a default.
        producer_key: Signs manifests; without it they are plain.
        codecs: The codecs that this end knows; by default those that come with kvcs.
        counters: Where things are counted.

    Attributes:
        scope: As given.
        counters: As given, or new.
        answers: What requests are answered from.
    """

    def __init__(
        self,
        scope: Scope | ScopeKey,
        options: ProducerOptions | None = None,
        *,
        producer_key: ProducerKey | None = None,
        codecs: CodecRegistry | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.scope = Scope.of(scope)
        self.counters = Counters() if counters is None else counters
        self.answers = Answers(self.scope_key.scope_id)
        self._sealing = Sealing.of(self.scope)
        self._options = options = options or ProducerOptions()
        self._producer_key = producer_key
        self._codecs = standard_codecs() if codecs is None else codecs
        for encoding in self._options.encodings:
            _ = self._codecs[encoding.codec]  # one that is not known is refused here
        self._holdings = Holdings(
            self.answers,
            self.counters,
            store_octets=options.store_octets,
            ttl_s=options.ttl_s,
            store_wait_s=options.store_wait_s,
        )
        self._handler = ServingHandler(self._holdings, self.counters)
        self._workers = Workers()
        self._stack = AsyncExitStack()
        super().__init__(
            self._handler,
            self.answers.directory,
            self.counters,
            connect_timeout_s=options.connect_timeout_s,
            request_timeout_s=options.request_timeout_s,
        )

    @property
    def scope_key(self) -> ScopeKey:
        """The key of the scope."""
        return self.scope.key

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """The forms in which every segment is offered."""
        return self._options.encodings

    @property
    def octets_held(self) -> int:
        """Payload octets held, and reserved for layers that are being added."""
        return self._holdings.budget.used

    # -- publishing ------------------------------------------------------------------------------

    def open(
        self,
        descriptor: Descriptor,
        tokens: Sequence[int],
        *,
        extra: Sequence[bytes] = (),
        first_block: int = 0,
    ) -> PublicationHandle:
        """Begin a publication under a new Publication ID, and let it be discovered.

        Args:
            descriptor: What must match before the cache can be used.
            tokens: All tokens of the prefix; the last whole block gives the Anchor Key.
            extra: Extra key material of block i at index i (KVSP Section 3).
            first_block: The first block that will be published; above 0 for window layers.

        Raises:
            ConfigError: If the tokens do not fill a block, an argument cannot be used, or the
                producer is stopping.
        """
        if self.answers.draining:
            raise ConfigError("the producer is stopping: nothing new can be published")
        keys = self.scope_key.block_keys(descriptor, tokens, extra)
        if first_block >= len(keys) or first_block < 0:
            raise ConfigError(
                f"{len(tokens)} tokens have {len(keys)} whole blocks of "
                f"{descriptor.block_tokens}, expected at least {first_block + 1}"
            )
        name = PublicationName(
            scope_id=self.scope_key.scope_id,
            compatibility_id=self.scope_key.compatibility_id(descriptor),
            anchor_key=keys[-1],
            publication_id=new_publication_id(),
        )
        publication = Publication(
            name,
            descriptor,
            encodings=self._options.encodings,
            codecs=self._codecs,
            producer_key=self._producer_key,
            deterministic=self._options.deterministic,
            manifest_every=self._options.manifest_every,
            budget=self._holdings.budget,
            first_block=first_block,
            repeated_octets=self._options.repeated_octets,
            sealing=self._sealing,
        )
        self._holdings.opened(publication)
        log.info(
            LogEvent.PUBLICATION_OPENED,
            publication=str(name),
            model=descriptor.model,
            layers=descriptor.layers,
            blocks=len(keys) - first_block,
        )
        return PublicationHandle(
            publication,
            tokens,
            extra=extra,
            first_block=first_block,
            scope_key=self.scope_key,
            holdings=self._holdings,
            workers=self._workers,
            counters=self.counters,
        )

    async def publish(
        self, source: BlockSource, *, segment_blocks: int | None = None
    ) -> PublicationHandle:
        """Open a publication for a source and feed it to its end. See the handle's ``feed``."""
        handle = self.open(source.descriptor, source.tokens)
        await handle.feed(source, segment_blocks=segment_blocks)
        return handle

    async def heavy(self, octets: int, work: Callable[[], T]) -> T:
        """Do work on ``octets`` octets in a thread, if that pays; for who has no handle do it."""
        return await self._workers.do(work, octets)

    # -- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._stack.callback(self._workers.close)
        await self._stack.enter_async_context(self._tasks)
        self._expiry = self._tasks.create_task(self._holdings.expire())
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
                await self._stack.__aexit__(kind, exc, traceback)
        except BaseExceptionGroup as group:
            # The task group wraps what the block raised. Callers want it as it was.
            if group.exceptions != (exc,):
                raise
        return None

    async def _close(self, drain_s: float) -> None:
        """Begin nothing new, let consumers finish, close everything."""
        begun = bool(self._servers or self._relays)
        if begun:
            log.info(LogEvent.STOPPING, drain_s=drain_s)
        self._holdings.stop()
        self._expiry.cancel()
        await self._stop_serving(drain_s)
        self._holdings.drop_all()
        if begun:
            log.info(LogEvent.STOPPED, counters=repr(self.counters))
