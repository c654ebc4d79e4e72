"""A store that is killed at random moments: what it told as kept is there, and nothing is wrong."""

import asyncio
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moqt.aio import MoqtConnection, connect
from moqt.aio.tls import CertificateFiles
from moqt.location import Location
from moqt.session.events import ObjectReceived
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.desk import ROOT
from tests.integration.kvcs.dying_store import (
    BLOCKS,
    COST,
    LAYERS,
    ROOM,
    TRACKS,
    layer_of,
    name,
    payload_of,
)
from tests.integration.kvcs.scene import PATIENCE_S
from tests.integration.kvcs.warehouse import Warehouse, warehouse

pytestmark = [pytest.mark.network, pytest.mark.slow]

#: How often it is killed; more by the environment.
KILLS = int(os.environ.get("KVCS_STORE_KILLS", "8"))


@dataclass
class Told:
    """What a store has told as kept."""

    layers: dict[int, int] = field(default_factory=dict)
    """How many layers, by the number of the publication."""

    finished: set[int] = field(default_factory=set)

    def take(self, lines: bytes) -> None:
        # The last line may be cut, like everything else.
        for line in lines.decode().splitlines(keepends=True):
            if line.endswith("\n") and line != "ready\n":
                number, layer, is_finished = map(int, line.split())
                self.layers[number] = max(self.layers.get(number, 0), layer + 1)
                if is_finished:
                    self.finished.add(number)


async def killed(folder: Path, first: int, after_s: float) -> bytes:
    """Have a process keep Objects, and kill it so many seconds later; return what it told."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.kvcs.dying_store", str(folder), str(first),
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await process.stdout.readline() == b"ready\n"
        try:
            async with asyncio.timeout(after_s):
                await process.wait()
        except TimeoutError:
            process.kill()
        told = await process.stdout.read()
        assert await process.wait() == -9
    return told


async def fetched(conn: MoqtConnection, number: int, track: bytes) -> dict[Location, bytes]:
    fetch = await conn.fetch(
        name(number).track(track), location_filter=LocationFilter.absolute_start(0, 0)
    )
    return {
        event.location: event.payload async for event in fetch if isinstance(event, ObjectReceived)
    }


async def check_served(depot: Warehouse, told: Told) -> None:
    """See that everything that was told is served, and that everything served is right."""
    shelf = depot.store.depot.shelf
    held = {int.from_bytes(one.name.publication_id, "big"): one for one in shelf}
    kept = [number for number in told.layers if number in held]
    gone = [number for number in told.layers if number not in held]
    # Only what is older than what is held has gone, and only for want of room.
    assert not gone or max(gone) - 3 <= min(kept)
    assert len(kept) >= min(len(told.layers), ROOM - 4)
    assert shelf.used <= shelf.limit
    async with connect(depot.spec.uri, tls=depot.spec.tls) as conn:
        for number, one in held.items():
            for track in TRACKS:
                found = await fetched(conn, number, track)
                assert found == {at: payload_of(number, track, at) for at in found}
                promised = told.layers.get(number, 0)
                places = {Location(g, o) for g in range(promised) for o in range(BLOCKS)}
                assert places <= found.keys(), (number, promised)
            if number in told.finished:
                assert one.finished
                assert len(found) == LAYERS * BLOCKS
            octets = sum(
                len(item.payload)
                for layer in range(len(found) // BLOCKS)
                for item in layer_of(number, layer)
            )
            assert one.octets == octets


@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("seed", [1])
async def test_whatever_was_told_as_kept_is_served_after_any_death(
    certificates: CertificateFiles, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    told, first = Told(), 0
    for _ in range(KILLS):
        told.take(await killed(tmp_path / "store", first, rng.uniform(0.0, 0.6)))
        first = max(told.layers, default=first) + 10
        async with warehouse(
            tmp_path / "store", certificates, budget_octets=ROOM * COST, partial_s=1e9
        ) as depot:
            await check_served(depot, told)
    assert len(told.layers) > KILLS, "it was killed before it could keep anything"
