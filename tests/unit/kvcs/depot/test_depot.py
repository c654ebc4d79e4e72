"""A depot: what is used stays, what was kept is told, and what nobody finished goes."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcs.depot.depot import Depot, NoRoomError
from kvcs.depot.images import ShelvedTrack
from kvcs.depot.shelf import OBJECT_OCTETS
from kvcs.errors import NotFound
from kvcs.profile.naming import MANIFEST, PublicationName
from kvcs.telemetry import Counter
from moqt.location import Location
from moqt.names import TrackNamespace
from tests.unit.kvcs.depot.goods import K, item, manifest_item, name, noted

COST = 2 * (len(item(0, 0).payload) + OBJECT_OCTETS)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Depot]:
    given: dict[str, Any] = {"budget_octets": 1 << 20, "partial_s": 1e9, "clock": Clock()}
    async with asyncio.timeout(20), Depot(folder, **(given | options)) as depot:
        yield depot


async def kept(depot: Depot, publication: PublicationName, *, finished: bool = True) -> None:
    await depot.begin(publication)
    await depot.keep(publication, [item(0, 0), item(0, 1)], noted())
    if finished:
        await depot.finish(publication, ended=True)
    depot.done(publication)


async def test_what_is_begun_again_counts_as_used(tmp_path: Path) -> None:
    async with opened(tmp_path, budget_octets=2 * COST) as depot:
        await kept(depot, name(1), finished=False)
        await kept(depot, name(2))
        await depot.begin(name(1))
        depot.done(name(1))
        await kept(depot, name(3))

        assert {held.name for held in depot.shelf} == {name(1), name(3)}


async def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock=clock) as depot:
        for number in range(3):
            await kept(depot, name(number))
        await depot.image(name(0))
    async with opened(tmp_path, clock=clock) as depot:
        assert [held.name for held in depot.shelf] == [name(1), name(2), name(0)]


async def test_what_went_for_want_of_room_is_known_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path, budget_octets=2 * COST) as depot:
        for number in range(4):
            await kept(depot, name(number))
        depot.drop(name(3), "a test")
    async with opened(tmp_path, budget_octets=2 * COST) as depot:
        gone = [number for number in range(4) if depot.was_evicted(name(number))]
        assert gone == [0, 1]
        await kept(depot, name(1))
        assert not depot.was_evicted(name(1))


async def test_the_newest_manifest_is_had_by_itself_and_never_a_damaged_one(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as depot:
        await kept(depot, name(1))
        with pytest.raises(NotFound, match="no manifest"):
            await depot.manifest(name(1))
        texts = [b"[%d]" % version for version in range(3)]
        items = [manifest_item(version, text) for version, text in enumerate(texts)]
        await depot.keep(name(1), items, noted())
        used = [held.used_at for held in depot.shelf]

        assert (await depot.manifest(name(1)))[:3] == (MANIFEST, 2, texts[2])
        assert [held.used_at for held in depot.shelf] == used
        path = tmp_path / "objects" / str(depot.holding(name(1)).number)  # type: ignore[union-attr]
        path.write_bytes(path.read_bytes().replace(texts[2], b"[9]"))
        with pytest.raises(NotFound, match="is damaged"):
            await depot.manifest(name(1))
        assert depot.counters[Counter.OBJECTS_DAMAGED] == 1


async def test_what_was_begun_and_cut_off_is_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path) as depot:
        await depot.begin(name(1))
    async with opened(tmp_path) as depot:
        assert len(depot.shelf) == 0


async def test_nothing_of_a_publication_is_told_of_before_it_is_done(tmp_path: Path) -> None:
    everything = TrackNamespace()
    async with opened(tmp_path) as depot:
        await depot.begin(name(1))
        await depot.keep(name(1), [item(0, 0)], noted())
        assert not depot.is_served(name(1))
        depot.done(name(1))
        assert depot.served.matching(everything) == {name(1).namespace}
        assert depot.whole.matching(everything) == set()
        await depot.finish(name(1), ended=False)
        assert depot.whole.matching(everything) == {name(1).namespace}

        depot.drop(name(1), "a test")
        assert depot.served.matching(everything) == depot.whole.matching(everything) == set()
        with pytest.raises(NotFound):
            await depot.image(name(1))


async def test_what_several_keep_at_a_time_is_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as depot:
        sizes: list[int] = []
        write = depot._archive.write

        def noting(batches: Any, now: float) -> None:
            sizes.append(len(batches))
            write(batches, now)

        monkeypatch.setattr(depot._archive, "write", noting)
        for number in range(4):
            await depot.begin(name(number))
        await asyncio.gather(
            *(depot.keep(name(number), [item(0, 0)], noted()) for number in range(4))
        )

        assert sizes == [4]
        assert depot.counters[Counter.OBJECTS_KEPT] == 4


async def test_what_has_no_room_says_whether_it_ever_will(tmp_path: Path) -> None:
    async with opened(tmp_path, budget_octets=COST) as depot:
        await kept(depot, name(1))
        depot.reading(name(1), +1)
        await depot.begin(name(2))
        with pytest.raises(NoRoomError) as caught:
            await depot.keep(name(2), [item(0, 0)], noted())
        assert not caught.value.for_ever
        depot.reading(name(1), -1)
        await depot.keep(name(2), [item(0, 0), item(0, 1)], noted())
        with pytest.raises(NoRoomError) as caught:
            await depot.keep(name(2), [item(1, 0)], noted())
        assert caught.value.for_ever
        assert depot.shelf.used == COST


async def test_one_who_gives_up_while_it_is_written_has_kept_it_all_the_same(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as depot:
        await depot.begin(name(1))
        keeping = asyncio.create_task(depot.keep(name(1), [item(0, 0)], noted()))
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait([keeping])
        await depot.keep(name(1), [item(0, 1)], noted())

        _, entries = await depot.contents(name(1))
        assert len(entries[K]) == 2
        [held] = depot.shelf
        assert (held.objects, depot.counters[Counter.OBJECTS_KEPT]) == (2, 2)


async def test_who_asks_at_the_same_time_waits_for_one_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as depot:
        await kept(depot, name(1))
        images = await asyncio.gather(*(depot.image(name(1)) for _ in range(3)))

        assert images[0] is images[1] is images[2]
        assert await depot.image(name(1)) is images[0]


async def test_images_go_when_there_are_too_many_but_not_those_that_are_read(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, memory_octets=4 * 400 * (16 + 2 + 0) * 2) as depot:
        for number in range(4):
            await kept(depot, name(number))
        depot.reading(name(0), +1)
        first = await depot.image(name(0))
        for number in (1, 2, 3):
            await depot.image(name(number))

        assert depot.gallery.names == {name(0), name(3)}
        assert await depot.image(name(0)) is first


async def test_what_nobody_finishes_goes_in_time_and_what_is_finished_stays(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock=clock) as depot:
        await kept(depot, name(1), finished=False)
        await kept(depot, name(2))
    clock.now += 50
    async with opened(tmp_path, clock=clock, partial_s=40.0) as depot:
        seen = 0
        while depot.holding(name(1)) is not None:
            seen = await depot.wait_changed(seen)

        assert [held.name for held in depot.shelf] == [name(2)]
        assert depot.counters[Counter.PUBLICATIONS_EXPIRED] == 1


@pytest.mark.parametrize("place", [(b"v.raw.s0", Location(0, 0)), (K, Location(7, 7))])
async def test_what_is_not_held_is_not_found(tmp_path: Path, place: tuple[bytes, Location]) -> None:
    async with opened(tmp_path) as depot:
        await kept(depot, name(1))

        assert await depot.read(name(1), K, Location(0, 1)) == item(0, 1).payload
        with pytest.raises(NotFound, match="has no Object"):
            await depot.read(name(1), *place)
        with pytest.raises(NotFound, match="is not held here"):
            await depot.read(name(2), *place)


async def test_no_garbage_is_looked_for_while_images_are_made_and_it_is_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []
    make = ShelvedTrack.__init__

    def noting(*arguments: Any, **more: Any) -> None:
        enabled.append(gc.isenabled())
        make(*arguments, **more)

    monkeypatch.setattr(ShelvedTrack, "__init__", noting)
    async with opened(tmp_path) as depot:
        for number in range(2):
            await kept(depot, name(number))
        await asyncio.gather(*(depot.image(name(number)) for number in range(2)))

    assert enabled == [False] * 4
    assert gc.isenabled()


async def test_an_image_that_something_was_added_to_meanwhile_is_not_the_next_one(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as depot:
        await depot.begin(name(1))
        await depot.keep(name(1), [item(0, 0)], noted())
        asked = asyncio.create_task(depot.image(name(1)))
        await asyncio.sleep(0)  # it is looked up in the index now
        await depot.keep(name(1), [item(0, 1)], noted())
        early, late = await asked, await depot.image(name(1))

        assert len(early.tracks[K]) <= len(late.tracks[K]) == 2
