import asyncio

import pytest

from kvcs.consumer.tasks import in_any_case, set_within, tasks


async def test_what_is_done_in_any_case_ends_however_often_it_is_cancelled() -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def job() -> None:
        await may_end.wait()
        ended.set()

    task = asyncio.create_task(in_any_case(job()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_is_done_in_any_case_raises_what_it_raised() -> None:
    async def job() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await in_any_case(job())


async def test_a_task_that_fails_ends_the_block_with_its_error() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def block() -> None:
        async with tasks() as group:
            group.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await block()


async def test_tasks_end_with_their_block() -> None:
    async with tasks() as group:
        task = group.start(asyncio.Event().wait())

    assert task.cancelled()


@pytest.mark.parametrize("came", [True, False])
async def test_a_wait_says_whether_the_event_came_in_time(came: bool) -> None:
    event = asyncio.Event()
    if came:
        event.set()

    assert await set_within(event, 0.01) is came
