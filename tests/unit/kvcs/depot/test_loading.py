"""Loading: what streams come to is brought, ahead of them and within the memory."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from kvcs.depot.archive import Wanted
from kvcs.depot.images import ShelvedTrack
from kvcs.depot.loading import Loader
from kvcs.depot.records import Entry, TrackNote
from kvcs.depot.shelf import Holding
from moqt.location import Location
from moqt.session.localobjects import DeferredObject
from tests.unit.kvcs.depot.goods import K, name

LENGTH = 100
GROUPS, BLOCKS = 4, 8


class ByHand(Executor):
    """Threads that do nothing until they are told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, work: Any, /, *arguments: Any, **more: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.jobs.append((future, work, arguments))
        return future

    async def do_one(self) -> None:
        """Do what was asked for first, and let the loop take note of it."""
        future, work, arguments = self.jobs.pop(0)
        try:
            future.set_result(work(*arguments))
        except OSError as exc:
            future.set_exception(exc)
        for _ in range(3):  # from the thread to the loop, to the callbacks
            await asyncio.sleep(0)

    async def do_all(self) -> None:
        while self.jobs:
            await self.do_one()


class Desk:
    """A Track on disk, a loader, and what it reads."""

    def __init__(self, memory_octets: int, *, length: int = LENGTH) -> None:
        self.pool = ByHand()
        self.read: list[Location] = []
        self.bad: set[Location] = set()
        self.error: OSError | None = None
        self.damaged: list[Location] = []
        self.failed: list[BaseException] = []
        self.loader = Loader(
            self._read,
            self.pool,
            memory_octets,
            damaged=lambda track, obj: self.damaged.append(obj.location),
            failed=self.failed.append,
        )
        self.track = self.made(length)

    def made(self, length: int = LENGTH, *, without: Sequence[Location] = ()) -> ShelvedTrack:
        places = [Location(group, block) for group in range(GROUPS) for block in range(BLOCKS)]
        entries = [
            Entry(at, n * length, length, 5, (), b"d" * 32, b"%02d" % n * 8)
            for n, at in enumerate(places)
            if at not in without
        ]
        note = TrackNote(GROUPS, BLOCKS, largest=Location(GROUPS, 0))
        return ShelvedTrack(
            Holding(name(1), 1, finished=True), K, note, entries, self.loader.wanted
        )

    def _read(self, number: int, wanted: Sequence[Wanted]) -> list[bytes | None]:
        if self.error is not None:
            raise self.error
        self.read += [one.location for one in wanted]
        return [None if one.location in self.bad else bytes(one.length) for one in wanted]

    def obj(self, group: int, block: int) -> DeferredObject:
        return self.track.objects[group * BLOCKS + block]

    def at_hand(self) -> list[int]:
        return [n for n, obj in enumerate(self.track.objects) if obj.parts]


async def test_some_are_read_ahead_and_more_when_a_reader_is_half_through_them() -> None:
    desk = Desk(16 * 8 * LENGTH)  # eight Objects ahead
    assert not desk.obj(0, 0).at_hand()
    await desk.pool.do_all()

    assert desk.at_hand() == list(range(8))
    for block in range(4):
        assert desk.obj(0, block).at_hand()
        assert desk.pool.jobs == []
    assert desk.obj(0, 4).at_hand()
    await desk.pool.do_all()
    assert desk.at_hand() == list(range(16))
    assert len(desk.read) == len(set(desk.read))


async def test_asking_twice_reads_once() -> None:
    desk = Desk(1 << 20)
    for _ in range(3):
        desk.obj(1, 0).at_hand()

    assert len(desk.pool.jobs) == 1


async def test_what_was_read_first_goes_first_when_there_is_no_room() -> None:
    desk = Desk(16 * LENGTH)  # one Object ahead
    for group in range(GROUPS):
        for block in range(BLOCKS):
            desk.obj(group, block).at_hand()
            await desk.pool.do_all()
            assert desk.obj(group, block).parts
            assert desk.loader.loaded <= 16 * LENGTH

    assert desk.at_hand() == list(range(16, 32))


async def test_an_object_larger_than_the_memory_is_brought_all_the_same() -> None:
    desk = Desk(LENGTH // 2)
    for block in range(3):
        desk.obj(0, block).at_hand()
        await desk.pool.do_all()
        assert desk.at_hand() == [block]


async def test_many_readers_wait_for_each_other_instead_of_filling_the_memory() -> None:
    desk = Desk(4 * LENGTH)
    for group in range(GROUPS):
        desk.obj(group, 0).at_hand()
    assert len(desk.pool.jobs) == 2  # half of it is on its way
    await desk.pool.do_all()

    assert {0, 8, 16, 24} >= set(desk.at_hand())
    assert sorted(desk.read) == [Location(group, 0) for group in range(GROUPS)]


async def test_a_damaged_one_is_lost_and_told_and_the_others_are_brought() -> None:
    desk = Desk(16 * 8 * LENGTH)
    desk.bad.add(Location(0, 3))
    seen = desk.track.local.revision
    desk.obj(0, 0).at_hand()
    await desk.pool.do_all()

    assert desk.at_hand() == [0, 1, 2, 4, 5, 6, 7]
    assert desk.damaged == [Location(0, 3)]
    assert desk.obj(0, 3).dropped
    assert desk.track.local.revision > seen
    desk.obj(0, 3).at_hand()
    assert desk.pool.jobs == []


async def test_a_disk_that_fails_is_told_and_nobody_waits_for_ever() -> None:
    desk = Desk(16 * 8 * LENGTH)
    desk.error = OSError("gone")
    desk.obj(0, 0).at_hand()
    await desk.pool.do_all()

    assert [str(error) for error in desk.failed] == ["gone"]
    assert desk.obj(0, 0).dropped
    assert desk.damaged == []


async def test_what_is_let_go_takes_no_memory_and_can_be_had_again() -> None:
    desk = Desk(1 << 20)
    desk.obj(0, 0).at_hand()
    await desk.pool.do_all()
    desk.loader.let_go(desk.track)

    assert (desk.loader.loaded, desk.at_hand()) == (0, [])
    desk.obj(0, 0).at_hand()
    await desk.pool.do_all()
    assert desk.obj(0, 0).parts


@pytest.mark.parametrize("gap", [Location(0, 0), Location(1, 3), Location(3, 7)])
async def test_objects_are_found_beside_those_that_are_missing(gap: Location) -> None:
    desk = Desk(1 << 20)
    track = desk.made(without=[gap])

    for at, obj in enumerate(track.objects):
        assert track.position(obj) == at
        assert track.wanted(at).location == obj.location
        assert track.wanted(at).offset == LENGTH * (
            obj.location.group * BLOCKS + obj.location.object
        )
    assert not track.is_whole
