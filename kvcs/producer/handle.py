"""PublicationHandle: one publication in the hands of whoever produces it.

What is published is decided by :mod:`kvcs.producer.publication`. Here it is put in order in time:
layers that wait for their turn and for room, and threads that hash.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import structlog

from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.memory import give_back_freed
from kvcs.producer.holdings import Holdings
from kvcs.producer.publication import Publication
from kvcs.producer.segment import CopiedLayer, PreparedLayer, Segment, Tensor
from kvcs.producer.workers import Workers
from kvcs.profile.naming import PublicationName
from kvcs.store.source import BlockSource
from kvcs.telemetry import Counter, Counters, LogEvent

log = structlog.get_logger("kvcs.producer")


class PublicationHandle:
    """One publication of a producer, to be filled layer after layer.

    Made by :meth:`Producer.open <kvcs.producer.daemon.Producer.open>`.

    As an asynchronous context manager it finishes the publication at the end of the block, and
    abandons it if the block fails.

    Attributes:
        publication: What is published; read it, and leave changes to the handle.
        tokens: The tokens that the cache is of.
    """

    def __init__(
        self,
        publication: Publication,
        tokens: Sequence[int],
        *,
        extra: Sequence[bytes],
        first_block: int,
        scope_key: ScopeKey,
        holdings: Holdings,
        workers: Workers,
        counters: Counters,
    ) -> None:
        self.publication = publication
        self.tokens = tokens
        self._extra = extra
        self._scope_key = scope_key
        self._holdings = holdings
        self._workers = workers
        self._counters = counters
        self._keys = tuple(scope_key.block_keys(publication.descriptor, tokens, extra))
        self._next_block = first_block
        self._lock = asyncio.Lock()  # asyncio's locks are fair: layers keep the callers' order

    @property
    def name(self) -> PublicationName:
        """Its namespace, and the Publication ID in it."""
        return self.publication.name

    @property
    def usable_tokens(self) -> int:
        """Tokens in whole blocks. Those after them are not published, and are recomputed."""
        return len(self._keys) * self.publication.descriptor.block_tokens

    @property
    def blocks_left(self) -> int:
        """Whole blocks that no segment covers yet."""
        return len(self._keys) - self._next_block

    async def add_segment(
        self, blocks: int | None = None, *, appended: Sequence[int] = ()
    ) -> Segment:
        """Begin a pass over the layers, for the next blocks.

        Args:
            blocks: How many; all that are left by default. One pass of a chunked prefill is
                one segment.
            appended: Tokens that follow all those known so far. The Anchor Key stays that of
                the tokens that the publication was opened with.

        Raises:
            ConfigError: If there are not as many blocks, or if the publication would not fit
                the store even if it were the only one.
        """
        publication = self.publication
        async with self._lock:
            if appended:
                self._know(*self._with(appended))
            count = self.blocks_left if blocks is None else blocks
            if not 1 <= count <= self.blocks_left:
                raise ConfigError(f"a segment of {count} blocks, {self.blocks_left} are left")
            self._holdings.check_fits(publication, count)
            keys = self._keys[self._next_block : self._next_block + count]
            segment = publication.open_segment(keys)
            self._next_block += count
            await self._publish_manifest()
        self._log_opened(segment)
        return segment

    async def append(
        self, tokens: Sequence[int], layers: Iterable[tuple[Tensor, Tensor | None]]
    ) -> Segment:
        """Publish the blocks that have filled up while the context grew, as one whole segment.

        For decoding, where blocks fill one by one and have all of their layers then. It takes one
        version of the manifest, which lists all segments before as well: where the context is
        long, hand over several blocks at once.

        Args:
            tokens: Tokens that follow all those known so far; with what was left over before, at
                least one block of them. The Anchor Key stays that of the tokens that the
                publication was opened with.
            layers: K and V of each layer in order, as for :meth:`add_layer`, for all blocks that
                no segment covers yet. The memory is the caller's again when this returns.

        Raises:
            ConfigError: If no block is full, the tensors do not fit, or the publication has ended.
                Nothing was published, and the tokens were not taken.
            Expired: If there was no room in time; so it is then.
        """
        publication = self.publication
        async with self._lock:
            known, keys = self._with(tokens)
            fresh = keys[self._next_block :]
            self._holdings.check_fits(publication, len(fresh))
            segment = publication.next_segment(fresh)
            octets = segment.layer_octets * publication.layout.layers
            await self._holdings.reserve(octets)
            try:
                prepared = await self._workers.do(
                    lambda: [
                        segment.copy(layer, k, v).prepare() for layer, (k, v) in enumerate(layers)
                    ],
                    segment.layer_work * publication.layout.layers,
                )
                draft = publication.draft_append(segment, prepared)
                payload = await self._workers.do(draft.encode, draft.octets_estimate)
            finally:
                self._holdings.unreserve(octets)
            publication.append(segment, prepared, draft, payload)
            self._know(known, keys)
            self._next_block += segment.blocks
            self._counters.add(Counter.MANIFESTS_PUBLISHED)
            for layer in prepared:
                self._count(segment, layer)
        self._log_opened(segment)
        return segment

    def add_layer(
        self,
        layer: int,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        kv: Tensor | None = None,
        segment: Segment | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Hand over one layer.

        Copies at once, in the calling thread, before it returns: the memory is the caller's
        again. What it returns must be awaited, on the producer's event loop
        (``asyncio.run_coroutine_threadsafe`` from another thread); that encodes, hashes and
        publishes. Layers are published in the order in which they are awaited.

        Args:
            layer: From 0, in order.
            k: ``[tokens, heads, dim]`` of the descriptor's element type, or raw octets; see
                :meth:`Segment.copy <kvcs.producer.segment.Segment.copy>`.
            v: The same for V.
            kv: Instead of both: the raw octets of K and V for each block.
            segment: Which pass; the one begun last by default.

        Raises:
            ConfigError: If a tensor does not fit or, when awaited, if the layer is out of
                order. Nothing was published.
            Expired: When awaited, if there was no room in time. Nothing was published.
        """
        segments = self.publication.segments
        if segment is None:
            if not segments:
                raise ConfigError("add_layer() before add_segment()")
            segment = segments[-1]
        return self._add(segment.copy(layer, k, v, kv=kv))

    async def feed(
        self,
        source: BlockSource,
        *,
        segment_blocks: int | None = None,
        append_blocks: int = 1,
        append_interval_s: float = 0.0,
    ) -> None:
        """Publish everything that a source has, at its pace, and finish.

        What it has beyond the tokens that the publication was opened with is appended, as an
        engine does while it decodes. Abandons the publication if that fails or is cancelled.

        Args:
            source: A cache of the tokens that the publication was opened with, or of more.
            segment_blocks: Blocks of one segment of those tokens; all in one by default.
            append_blocks: Blocks of one segment that is appended.
            append_interval_s: Seconds from one such segment to the next.

        Raises:
            ConfigError: If the source is of another descriptor, or does not fit.
            Expired: If there was no room in time.
        """
        if differing := self.publication.descriptor.differences(source.descriptor):
            raise ConfigError(f"the source has another descriptor: {'; '.join(differing)}")
        try:
            while self.blocks_left:
                first = self._next_block
                segment = await self.add_segment(
                    min(self.blocks_left, segment_blocks or self.blocks_left)
                )
                await self._feed_segment(source, segment, first)
            await self._append_all(source, append_blocks, append_interval_s)
            await self.finish()
        except BaseException as exc:
            await self.abandon(f"production failed: {type(exc).__name__}")
            raise

    async def finish(self) -> None:
        """End the publication. It is served on for the producer's time to live.

        Raises:
            ConfigError: If a segment lacks layers, or the publication has ended.
        """
        async with self._lock:
            self.publication.conclude()
            await self._publish_manifest()
            self.publication.finish()
        self._holdings.finished(self.publication)
        octets = self.publication.octets
        await self._workers.do(lambda: give_back_freed(octets), octets)

    async def abandon(self, reason: str) -> None:
        """Give the publication up (decision 5). To try again, open a new one.

        Does nothing if it has ended.
        """
        self._holdings.abandoned(self.publication, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            await self.abandon(f"production failed: {kind.__name__}")
        elif not self.publication.ended:
            try:
                await self.finish()
            except ConfigError:
                await self.abandon("production ended early")
                raise

    # -- parts -----------------------------------------------------------------------------------

    def _with(self, appended: Sequence[int]) -> tuple[list[int], tuple[bytes, ...]]:
        """Return the tokens and the Block Keys that there are with more tokens behind."""
        tokens = [*self.tokens, *appended]
        done = len(self._keys)
        keys = self._scope_key.block_keys(
            self.publication.descriptor,
            tokens[done * self.publication.descriptor.block_tokens :],
            self._extra[done:],
            after=self._keys[-1],
        )
        return tokens, (*self._keys, *keys)

    def _know(self, tokens: Sequence[int], keys: tuple[bytes, ...]) -> None:
        self.tokens, self._keys = tokens, keys

    def _count(self, segment: Segment, layer: PreparedLayer) -> None:
        self._counters.add(Counter.LAYERS_PUBLISHED)
        self._counters.add(Counter.OBJECTS_PUBLISHED, segment.blocks * len(layer.tracks))
        self._counters.add(Counter.OCTETS_PUBLISHED, layer.octets)

    def _log_opened(self, segment: Segment) -> None:
        log.debug(
            LogEvent.SEGMENT_OPENED,
            publication=str(self.name),
            segment=segment.number,
            blocks=segment.blocks,
        )

    async def _add(self, copied: CopiedLayer) -> None:
        publication, segment = self.publication, copied.segment
        octets = segment.layer_octets
        async with self._lock:
            await self._holdings.reserve(octets)
            try:
                prepared = await self._workers.do(copied.prepare, segment.layer_work)
            finally:
                self._holdings.unreserve(octets)
            # Nothing runs between giving the reservation back and taking it for good.
            publication.publish(prepared)
            self._count(segment, prepared)
            await self._publish_manifest()
        log.debug(
            LogEvent.LAYER_PUBLISHED,
            publication=str(self.name),
            segment=segment.number,
            layer=copied.layer,
        )

    async def _publish_manifest(self) -> None:
        """Publish the version that is due, if one is. The lock is held."""
        publication = self.publication
        if publication.ended or not publication.manifest_due:
            return
        draft = publication.draft_manifest()
        payload = await self._workers.do(draft.encode, draft.octets_estimate)
        if not publication.ended:  # abandoned meanwhile
            publication.publish_manifest(draft, payload)
            self._counters.add(Counter.MANIFESTS_PUBLISHED)

    async def _append_all(
        self, source: BlockSource, append_blocks: int, append_interval_s: float
    ) -> None:
        loop, size = asyncio.get_running_loop(), self.publication.descriptor.block_tokens
        due = loop.time()
        while count := min(append_blocks, len(source.tokens) // size - self._next_block):
            due += append_interval_s
            await asyncio.sleep(due - loop.time())
            first, known = self._next_block, len(self.tokens)
            tokens = source.tokens[known : (first + count) * size]
            await self.append(tokens, ((k, v) for _, k, v in source.layers(first, count)))

    async def _feed_segment(self, source: BlockSource, segment: Segment, first: int) -> None:
        loop = asyncio.get_running_loop()
        start, layers = loop.time(), source.layers(first, segment.blocks)

        def take() -> CopiedLayer | None:
            # Reading a mapped file waits for the disk, so it happens in the thread, too.
            tensors = next(layers, None)
            return None if tensors is None else segment.copy(*tensors)

        while (copied := await self._workers.do(take)) is not None:
            if source.ready_at_s:
                await asyncio.sleep(start + source.ready_at_s[copied.layer] - loop.time())
            await self._add(copied)
