import asyncio
import os
import signal

import pytest

from kvcs.lifecycle import on_hangup, run_until_stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_jobs_are_told_of_a_signal_and_return(number: signal.Signals) -> None:
    done = []

    async def job(stopping: asyncio.Event) -> None:
        await stopping.wait()
        done.append(1)

    async def asks(stopping: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stopping.wait()

    async with asyncio.timeout(5):
        await run_until_stopped(job, job, asks, grace=5)
    assert done == [1, 1]


async def test_the_first_job_that_ends_stops_the_others() -> None:
    async def job(stopping: asyncio.Event) -> None:
        await stopping.wait()

    async def short(stopping: asyncio.Event) -> None:
        pass

    async with asyncio.timeout(5):
        await run_until_stopped(job, short, grace=5)


async def test_who_does_not_stop_within_the_grace_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def stubborn(stopping: asyncio.Event) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def short(stopping: asyncio.Event) -> None:
        pass

    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await run_until_stopped(stubborn, short, grace=0.01)
    assert cancelled.is_set()


async def test_a_job_that_fails_cancels_the_others_and_is_reported() -> None:
    cancelled = asyncio.Event()

    async def other(stopping: asyncio.Event) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def failing(stopping: asyncio.Event) -> None:
        raise ValueError("broken")

    async with asyncio.timeout(5):
        with pytest.raises(ExceptionGroup) as failed:
            await run_until_stopped(other, failing, grace=5)
    assert failed.group_contains(ValueError, match="broken")
    assert cancelled.is_set()


async def test_signals_do_what_they_did_before_once_it_is_over() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def short(stopping: asyncio.Event) -> None:
        pass

    await run_until_stopped(short, grace=1)
    assert signal.getsignal(signal.SIGTERM) == before


async def test_each_hangup_is_acted_on_and_stops_nothing() -> None:
    acted = asyncio.Semaphore(0)
    with on_hangup(acted.release):
        async with asyncio.timeout(5):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await acted.acquire()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
