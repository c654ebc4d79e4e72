"""Retrieving a publication: discover, subscribe, verify, deliver (KVCS Sections 5.1, 5.2, 5.4).

The shell of the consumer, as the caller sees it: one retrieval, its events, its deadline and its
end. What is tried for it is carried out by :mod:`kvcs.consumer.pursuit`; what is wanted, ready,
missing or trusted is decided by the pure modules beside it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import structlog
from numpy.typing import NDArray

from kvcs.consumer.badlist import BadPublications
from kvcs.consumer.download import Download
from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    LayerSpan,
    PublicationComplete,
    Summary,
)
from kvcs.consumer.failures import Failure, Unreachable, last_event
from kvcs.consumer.opening import Job
from kvcs.consumer.prefixes import Index, prefix_lengths
from kvcs.consumer.processes import Processes
from kvcs.consumer.pursuit import Pursuit, Sources
from kvcs.consumer.sections import SectionSource
from kvcs.consumer.selection import Wish
from kvcs.consumer.sessions import ConnectionSpec, Sessions
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.telling import Telling
from kvcs.consumer.trust import Expectations
from kvcs.consumer.ways import Way
from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.naming import PublicationName
from kvcs.store.shared import SharedSink
from kvcs.store.sink import BlockSink, GrowingSink
from kvcs.telemetry import LogEvent
from moqt.aio.transport import TransportStats

__all__ = [
    "BadPublications",
    "ConnectionSpec",
    "Expectations",
    "Retrieval",
    "RetrievalSettings",
    "Unreachable",
    "Wish",
    "consume",
]

log = structlog.get_logger("kvcs.consumer")


def consume(
    expected: Expectations,
    connections: Sequence[ConnectionSpec],
    sink: BlockSink,
    *,
    wish: Wish | None = None,
    settings: RetrievalSettings | None = None,
    codecs: CodecRegistry | None = None,
    publication: PublicationName | None = None,
    index: Index | None = None,
    blocks: Sequence[SectionSource] = (),
    bad: BadPublications | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> "Retrieval":
    """Retrieve one publication; see :class:`Retrieval`.

    ::

        async with consume(expected, [ConnectionSpec(uri="moqt://relay:4443")], sink) as retrieval:
            await retrieval.layer(0)
            ...
            complete = await retrieval.result()
    """
    return Retrieval(
        expected,
        connections,
        sink,
        wish=wish,
        settings=settings,
        codecs=codecs,
        publication=publication,
        index=index,
        blocks=blocks,
        bad=bad,
        on_event=on_event,
    )


class Retrieval:
    """One retrieval, from discovery to the last layer. An asynchronous context manager.

    It runs from the start of the block, and is ended with the block. Events can be had in three
    ways, also at once: iterate over the retrieval (from the first event on, by any number of
    tasks), pass ``on_event`` (called on the event loop, must not block), or await
    :meth:`layer`, :meth:`whole_layer` and :meth:`result`.

    With ``Wish(follow=True)`` it goes on behind the prefix for as long as something is appended
    there, and is complete when the publication ends or the caller says so (:meth:`stop`). What is
    appended is of the publication whose prefix was confirmed, but the caller's tokens may have
    gone on otherwise: tell them (:meth:`extend`), and it is confirmed as well.

    Args:
        expected: What a publication is held against.
        connections: Relays and producers, to be tried in order, each over as many connections
            as ``settings`` say. If one is lost or lacks something, the next one goes on with the
            same publication; and if none has more of it, another publication does, where Objects
            of both may be in one cache (:mod:`kvcs.consumer.joining`). Once something was lost
            that had been there, a connection or a publisher behind a relay, all are tried again
            and again, until everything is there or the time is up.
        sink: Where tensors land. It is told of ``begin`` when the first manifest is accepted;
            where a publication fails before any of its layers was ready, ``abandon`` and another
            ``begin`` may follow.
        wish: What is wanted; by default everything.
        settings: How long to wait for what.
        codecs: The codecs that this end knows; by default those that come with kvcs.
        publication: Retrieve exactly this one, without discovery.
        index: Asked once, ahead of everybody else, which publications begin as the prompt does;
            those that do for longest are tried first.
        blocks: Block services, to be asked in order for what no relay brings.
        bad: Publications that discovery is not to choose; those that are found to be bad are
            added. Retrievals of one process may share it.
        on_event: Called with every event.

    Raises:
        ConfigError: If the arguments do not fit each other, or a file of ``tls`` cannot be used.
    """

    def __init__(
        self,
        expected: Expectations,
        connections: Sequence[ConnectionSpec],
        sink: BlockSink,
        *,
        wish: Wish | None = None,
        settings: RetrievalSettings | None = None,
        codecs: CodecRegistry | None = None,
        publication: PublicationName | None = None,
        index: Index | None = None,
        blocks: Sequence[SectionSource] = (),
        bad: BadPublications | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._expected = expected
        self._settings = settings or RetrievalSettings()
        self._telling = Telling(on_event)
        self._job = Job(
            expected=expected,
            wish=wish or Wish(),
            settings=self._settings,
            codecs=standard_codecs() if codecs is None else codecs,
            sink=sink,
            pool=ThreadPoolExecutor(self._settings.workers, "kvcs-examine"),
            tell=self._telling.tell,
        )
        self._job.wish.check(expected.descriptor, self._job.codecs)
        if self._job.wish.follow and not isinstance(sink, GrowingSink):
            raise ConfigError(
                f"{type(sink).__name__} cannot grow, so it takes nothing that is followed"
            )
        if self._settings.processes:
            if not isinstance(sink, SharedSink):
                raise ConfigError(f"{type(sink).__name__} cannot be shared with other processes")
            if codecs is not None:
                raise ConfigError("codecs of one's own cannot be had in other processes")
        if not connections:
            raise ConfigError("no relay and no producer to retrieve from")
        for spec in connections:
            spec.check()
        self._ways = [Way(spec) for spec in connections]
        self._sessions = Sessions()
        self._processes = Processes(self._settings)
        prefixes: tuple[int, ...] = ()
        if publication is None:
            if not expected.block_keys:
                raise ConfigError("neither the tokens nor the publication are known")
            prefixes = tuple(prefix_lengths(self._settings.prefixes, len(expected.block_keys)))
        self._sources = Sources(
            ways=self._ways,
            blocks=blocks,
            only=publication,
            index=index,
            prefixes=prefixes,
            bad=BadPublications() if bad is None else bad,
        )
        self._pursuit: Pursuit | None = None
        self._known_tokens = expected  # and those that the caller has told since
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    # -- for the caller --------------------------------------------------------------------------

    @property
    def complete(self) -> PublicationComplete | None:
        """The last event, if the retrieval succeeded."""
        last = self._telling.last
        return last if isinstance(last, PublicationComplete) else None

    @property
    def failed(self) -> Failed | None:
        """The last event, if the retrieval failed: why, and exactly what is missing."""
        last = self._telling.last
        return last if isinstance(last, Failed) else None

    @property
    def summary(self) -> Summary:
        """The figures so far."""
        if (current := self._current) is None:
            return Summary()
        telling = self._telling
        return current.assembler.summary(telling.first_layer_s, telling.last_layer_s)

    def stats(self) -> tuple[TransportStats, ...]:
        """Return the figures of its connections; of those that it has left, none."""
        return tuple(conn.stats() for conn in self._sessions.open)

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ConfigError("a retrieval runs once")
        # Awaited by __aexit__.
        self._task = asyncio.create_task(self._run(), name="kvcs retrieval")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        # If it is over, it closes its connections, which nothing may cut short.
        if not self._telling.is_over:
            self._task.cancel()
        await asyncio.wait([self._task])
        if error is None and self._telling.crash is not None:
            raise self._telling.crash

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over all events, from the first to the last."""
        self._check_started()
        async for event in self._telling.events():
            yield event

    async def layer(
        self, layer: int, segment: int = 0, *, timeout_s: float | None = None
    ) -> LayerReady:
        """Wait until a layer is ready.

        Args:
            layer: From 0.
            segment: From 0.
            timeout_s: How long at most; None: as long as the retrieval lasts, which is bounded.

        Raises:
            Expired: If it takes longer.
            KvcsError: If the retrieval ends without it; see :meth:`result`.
        """
        self._check_started()
        return await self._telling.layer(layer, segment, timeout_s)

    async def whole_layer(
        self, layer: int, *, token_end: int | None = None, timeout_s: float | None = None
    ) -> LayerSpan:
        """Wait until a layer is ready over all segments: what an engine computes with next.

        Args:
            layer: From 0.
            token_end: Up to which token, as a position in the context; with a wish to follow also
                one that nobody has come to yet. None: everything wanted that is known by then, the
                prefix to its end and each appended segment that is listed.
            timeout_s: How long at most; None: as long as the retrieval lasts, which is bounded.

        Returns:
            How far it is ready by now, from the first wanted token on.

        Raises:
            Expired: If it takes longer.
            KvcsError: If the retrieval ends without it; see :meth:`result`.
        """
        self._check_started()

        def look() -> LayerSpan | None:
            span = None if self._current is None else self._current.assembler.span(layer)
            if span is None:
                return None
            enough = span.whole if token_end is None else span.token_end >= token_end
            return span if enough else None

        end = "" if token_end is None else f" up to token {token_end}"
        what = f"layer {layer} was not ready in all segments{end}"
        return await self._telling.until(look, what, timeout_s)

    def extend(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Tell tokens that follow all those known so far, as the caller comes to know them.

        What is appended behind the prefix is then held against them: a segment that they cover is
        told to be confirmed, or to differ, after which nothing more is followed. With a wish to
        follow alone; without it nothing behind the prefix is wanted.

        Raises:
            ConfigError: If a token is not one.
        """
        self._known_tokens = self._known_tokens.extended(tokens)
        if self._pursuit is not None:
            self._pursuit.extend(self._known_tokens.block_keys)

    def stop(self) -> None:
        """Follow no further: the retrieval is complete with what is listed by now.

        That still comes, the prefix to its end; who does not want to wait for it leaves the block.
        """
        self._is_stopped = True
        if self._pursuit is not None:
            self._pursuit.stop()

    async def result(self) -> PublicationComplete:
        """Wait for the end.

        Returns:
            The last event, with the figures of the retrieval.

        Raises:
            NotFound: If no publication was found.
            Unreachable: If no connection could be made, or all were lost.
            BadManifest: If every publication found was refused.
            PublicationFailed: If the publication was abandoned or contradicts itself.
            Incomplete: If something is missing, or not attested.
            Expired: If a deadline passed; :attr:`failed` tells what is missing.
            ConfigError: If the sink cannot take what comes.
            KvcsError: If the retrieval was ended by the caller.
        """
        self._check_started()
        await self._telling.end()
        if (complete := self.complete) is not None:
            return complete
        raise self._telling.error("the retrieval failed")

    def _check_started(self) -> None:
        if self._task is None:
            raise ConfigError("the retrieval has not been started: use it with async with")

    # -- the life of a retrieval -----------------------------------------------------------------

    @property
    def _current(self) -> Download | None:
        """The publication that is being retrieved."""
        return None if self._pursuit is None else self._pursuit.current

    async def _run(self) -> None:
        self._telling.start()
        if self._settings.processes:
            self._processes.start()
        self._pursuit = Pursuit(self._job, self._sources, self._sessions, self._processes)
        self._pursuit.extend(self._known_tokens.block_keys)
        if self._is_stopped:
            self._pursuit.stop()
        recovery = self._pursuit.recovery
        failure: Failure | None = Failure(FailureReason.CANCELLED, "ended by the caller")
        limit = asyncio.timeout_at(recovery.until)
        try:
            try:
                async with limit:
                    failure = await self._pursuit.run(partial(_reschedule, limit))
            except TimeoutError:
                if not limit.expired():
                    raise
                failure = recovery.expired
            except asyncio.CancelledError:
                pass  # by __aexit__ alone: nobody else has the task
            self._finish(failure)
        except Exception as exc:
            # The outermost line of the task. Whoever waits, or leaves the block, gets it raised.
            if (current := self._current) is not None:
                current.abandon()
            self._telling.finish(crash=exc)
            log.warning(LogEvent.RETRIEVAL_FAILED, reason="crashed", text=type(exc).__name__)
        finally:
            self._job.pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.gather(self._sessions.close(), self._processes.close())

    def _finish(self, failure: Failure | None) -> None:
        """Tell the last event."""
        current, summary = self._current, self.summary
        if failure is None and current is not None:
            extent = current.assembler.extent
            assert extent is not None
            tokens = extent.stop * self._expected.descriptor.block_tokens
            codecs = current.assembler.used_codecs
            self._job.tell(
                PublicationComplete(
                    publication=current.name,
                    token_end=tokens,
                    summary=summary,
                    codecs=tuple(codecs),
                    lossless=all(codecs.values()),
                    recompute=self._job.left_to_compute(current.assembler),
                )
            )
            log.info(
                LogEvent.RETRIEVAL_COMPLETE, publication=str(current.name), **summary.to_json()
            )
        else:
            assert failure is not None
            if current is not None:
                current.abandon()
            assembler = current.assembler if current is not None else None
            wish, expected = self._job.wish, self._expected
            self._job.tell(last_event(failure, assembler, summary, wish, expected))
            log.warning(
                LogEvent.RETRIEVAL_FAILED,
                publication=str(current.name) if current is not None else None,
                reason=str(failure.reason),
                text=failure.text,
            )
        self._telling.finish()


def _reschedule(limit: asyncio.Timeout, until: float) -> None:
    if not limit.expired():  # which is only about to be told
        limit.reschedule(until)
