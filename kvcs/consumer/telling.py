"""Telling: the events of a retrieval, kept, called back, iterated over and waited for. Shell."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from kvcs.consumer.events import Event, Failed, LayerReady, PublicationComplete
from kvcs.consumer.failures import error_of
from kvcs.errors import Expired, NotFound

T = TypeVar("T")


class Telling:
    """What a retrieval has told so far, and who waits for more.

    Args:
        on_event: Called with every event, on the event loop.

    Attributes:
        crash: What the retrieval raised, if it ended by a mistake; whoever waits gets it raised.
        first_layer_s: Seconds from :meth:`start` until the first layer was ready.
        last_layer_s: Seconds until the last one that became ready was so.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.crash: BaseException | None = None
        self.first_layer_s: float | None = None
        self.last_layer_s: float | None = None
        self._on_event = on_event
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._ready: dict[tuple[int, int], LayerReady] = {}
        self._waiters: dict[tuple[int, int], asyncio.Future[LayerReady]] = {}
        self._started_at = 0.0

    def start(self) -> None:
        """Measure times from now on."""
        self._started_at = asyncio.get_running_loop().time()

    @property
    def last(self) -> Event | None:
        """The last event so far."""
        return self._events[-1] if self._events else None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be told."""
        return self.crash is not None or isinstance(self.last, PublicationComplete | Failed)

    def tell(self, event: Event) -> None:
        """Tell an event to everybody who waits."""
        self._events.append(event)
        if isinstance(event, LayerReady):
            self.last_layer_s = asyncio.get_running_loop().time() - self._started_at
            if self.first_layer_s is None:
                self.first_layer_s = self.last_layer_s
            key = event.segment, event.layer
            self._ready[key] = event
            if (waiter := self._waiters.pop(key, None)) is not None:
                waiter.set_result(event)
        self._news.set()
        if self._on_event is not None:
            self._on_event(event)

    def finish(self, crash: BaseException | None = None) -> None:
        """Tell those who wait for a layer that it will not come; the last event has been told."""
        self.crash = crash
        waiters, self._waiters = self._waiters, {}
        for (segment, layer), waiter in waiters.items():
            if not waiter.done():
                waiter.set_exception(self.error(f"layer {layer} of segment {segment}"))
                waiter.exception()  # the one who asked may be gone
        self._news.set()

    def error(self, what: str) -> BaseException:
        """Return what is raised after the end, for who waits for something."""
        if self.crash is not None:
            return self.crash
        if not isinstance(self.last, Failed):
            return NotFound(f"{what}: it was not wanted, or there is no such layer")
        return error_of(self.last, what)

    async def events(self) -> AsyncIterator[Event]:
        """Iterate over all events, from the first to the last."""
        at = 0
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.is_over:
                return
            self._news.clear()
            await self._news.wait()

    async def layer(self, layer: int, segment: int, timeout_s: float | None) -> LayerReady:
        """Wait until a layer is ready; see :meth:`Retrieval.layer`."""
        key = segment, layer
        if (event := self._ready.get(key)) is not None:
            return event
        if self.is_over:
            raise self.error(f"layer {layer} of segment {segment} is not ready")
        waiter = self._waiters.get(key)
        if waiter is None:
            waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiter)
        except TimeoutError:
            raise Expired(
                f"layer {layer} of segment {segment} was not ready within {timeout_s} s"
            ) from None

    async def until(self, look: Callable[[], T | None], what: str, timeout_s: float | None) -> T:
        """Look after each event until there is something to be seen, and return it.

        Raises:
            Expired: If it takes longer than so many seconds.
            KvcsError: If the retrieval ends without it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (found := look()) is None:
                    if self.is_over:
                        raise self.error(what)
                    self._news.clear()
                    await self._news.wait()
                return found
        except TimeoutError:
            raise Expired(f"{what} within {timeout_s} s") from None

    async def end(self) -> None:
        """Wait until nothing more will be told."""
        while not self.is_over:
            self._news.clear()
            await self._news.wait()
