"""How often the events of picoquic's thread are read, with a thread that tells what it is told."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("aiopquic")

from moqt.aio.picoquic import worker as module
from moqt.aio.picoquic.library import Event
from moqt.aio.picoquic.worker import MUCH_OCTETS, REST_WINDOWS, Told, Worker
from moqt.aio.settings import QuicSettings

PATIENCE_S = 20.0
#: So long that nobody could take it for a turn of the event loop.
REST_S = 0.05
SETTINGS = QuicSettings(stream_window=8 << 20)
CONNECTION = 7


class Context:
    """Stands for aiopquic's: what is told is readable until it was read, all in one batch."""

    def __init__(self, **_: Any) -> None:
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.started = False
        self._waiting: deque[int] = deque()

    def start(self, **_: Any) -> None:
        self.started = True

    def stop(self, _: float) -> None:
        os.close(self.eventfd)

    def tell(self, octets: int) -> None:
        """Tell of so many octets of a stream."""
        self._waiting.append(octets)
        os.eventfd_write(self.eventfd, 1)

    def drain_rx_callback(self, take: Callable[..., None]) -> None:
        while self._waiting:
            data = memoryview(bytes(self._waiting.popleft()))
            take(Event.STREAM_DATA, 3, data, 0, 0, CONNECTION, 0, 0)
        with suppress(BlockingIOError):  # it is read although nothing was told
            os.eventfd_read(self.eventfd)


class Reader:
    """Takes the events of the connection, and notes when they came."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, int]] = []
        self._octets = 0
        self._news = asyncio.Event()

    def tell(self, told: Told) -> None:
        assert told.data is not None
        self._octets += len(told.data)

    def answer(self) -> None:
        self.batches.append((asyncio.get_running_loop().time(), self._octets))
        self._octets = 0
        self._news.set()

    async def until(self, batches: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.batches) < batches:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def working(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Worker, Context, Reader]]:
    monkeypatch.setattr(module, "TransportContext", Context)
    monkeypatch.setattr(module, "REST_S", REST_S)
    reader = Reader()
    worker = Worker(lambda connection: reader)
    worker.start(SETTINGS, 0)
    try:
        yield worker, worker.context, reader
    finally:
        worker.stop()


async def test_after_much_nothing_is_read_for_a_while_and_then_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with working(monkeypatch) as (_, context, reader):
        context.tell(MUCH_OCTETS)
        await reader.until(1)
        context.tell(1)
        context.tell(2)
        await reader.until(2)
        context.tell(3)
        await reader.until(3)

    (first, much), (second, rest), (_, last) = reader.batches
    assert (much, rest, last) == (MUCH_OCTETS, 3, 3)
    assert second - first >= REST_S - 0.001  # clocks of event loops count in milliseconds


@pytest.mark.parametrize("octets", [MUCH_OCTETS - 1, SETTINGS.stream_window // REST_WINDOWS + 1])
async def test_after_little_and_after_more_than_its_share_of_a_window_the_next_is_read_at_once(
    octets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(monkeypatch) as (worker, context, reader):
        context.tell(octets)
        await reader.until(1)

        assert worker._resting is None


async def test_a_worker_that_rests_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with working(monkeypatch) as (worker, context, reader):
        context.tell(MUCH_OCTETS)
        await reader.until(1)
        resting = worker._resting

        assert resting is not None
        worker.stop()
        assert resting.cancelled()
