import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.lifecycle import Watch, on_change, on_hangup, run_until_stopped


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


@given(st.lists(st.integers(0, 2), max_size=20))
def test_files_that_changed_and_stand_still_are_told_of_once(looks: list[int]) -> None:
    watch, taken, last = Watch(0), 0, 0
    for seen in looks:
        told = watch.look(seen)

        assert told == (seen == last != taken)
        taken, last = (seen if told else taken), seen


async def test_who_watches_files_is_called_when_one_is_another_one(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text("1")
    acted = asyncio.Semaphore(0)

    def replaced() -> None:  # of the same size, and perhaps of the same time
        (tmp_path / "new").write_text("1")
        (tmp_path / "new").replace(files[0])

    def made() -> None:
        files[1].write_text("it was not there before")

    changes: list[Callable[[], None]] = [made, replaced, files[1].unlink]
    with on_change(files, acted.release, 0.005):
        async with asyncio.timeout(10):
            for change in changes:
                change()
                await acted.acquire()
    assert acted.locked(), "called once for each change"


async def test_nobody_looks_at_files_who_was_told_not_to(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", None)  # whoever set a timer would fail
        with on_change([tmp_path / "a"], lambda: None, 0.0), on_change([], lambda: None, 1.0):
            pass
