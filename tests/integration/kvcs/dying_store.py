"""A process that keeps Objects without end, says what is kept, and is killed in the middle of it.

``python -m tests.integration.kvcs.dying_store FOLDER FIRST``: publications are numbered from FIRST.
Each line on standard output is a number, a layer, and whether the publication is finished with it.
"""

import asyncio
import sys
from hashlib import sha256
from pathlib import Path

from kvcs.depot.depot import Depot
from kvcs.depot.records import Item, TrackNote
from kvcs.depot.shelf import OBJECT_OCTETS
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import MANIFEST, PublicationName
from kvcs.profile.payload import Block
from kvcs.telemetry import set_up_logging
from moqt.location import Location
from tests.integration.kvcs.scene import SCOPE

LAYERS, BLOCKS, OCTETS = 4, 8, 3000
TRACKS = {b"k.raw.s0": Component.K, b"v.raw.s0": Component.V}
#: What one publication takes, a little more rather than less.
COST = 2 * LAYERS * BLOCKS * (OCTETS + 68 + OBJECT_OCTETS) + 4096
#: How many of them there is room for.
ROOM = 12


def name(number: int) -> PublicationName:
    return PublicationName(SCOPE.scope_id, b"c" * 32, b"a" * 32, number.to_bytes(16, "big"))


def payload_of(number: int, track: bytes, at: Location) -> bytes:
    """Return the payload of an Object, of which no two are the same."""
    if track == MANIFEST:
        return b'{"number": %d, "version": %d}' % (number, at.group)
    seed = sha256(b"%d %s %d %d" % (number, track, *at)).digest()
    data = (seed * (OCTETS // 32 + 1))[:OCTETS]
    return Block(TRACKS[track], at.group, at.object, at.object * 16, 16, 0, data).encode()


def layer_of(number: int, layer: int) -> list[Item]:
    """Return what is kept at a time: a version of the manifest, and one layer of both tracks."""
    places = [(MANIFEST, Location(layer, 0))]
    places += [(track, Location(layer, block)) for track in TRACKS for block in range(BLOCKS)]
    items = []
    for track, at in places:
        payload = payload_of(number, track, at)
        digest = sha256(payload).digest() if track == MANIFEST else payload[36:68]
        items.append(Item(track, at, at.group, (), payload, digest))
    return items


async def keep_for_ever(folder: Path, first: int) -> None:
    """Keep several publications side by side."""
    notes = {track: TrackNote(LAYERS, BLOCKS) for track in TRACKS} | {MANIFEST: TrackNote()}
    numbers = iter(range(first, sys.maxsize))

    async def work(depot: Depot) -> None:
        for number in numbers:
            await depot.begin(name(number))
            for layer in range(LAYERS):
                await depot.keep(name(number), layer_of(number, layer), notes)
                print(number, layer, 0, flush=True)
            await depot.finish(name(number), ended=True)
            print(number, LAYERS - 1, 1, flush=True)
            depot.done(name(number))

    async with Depot(folder, budget_octets=ROOM * COST) as depot, asyncio.TaskGroup() as group:
        print("ready", flush=True)
        for _ in range(3):
            group.create_task(work(depot))


if __name__ == "__main__":
    set_up_logging(level="error")  # standard output is for what is told
    asyncio.run(keep_for_ever(Path(sys.argv[1]), int(sys.argv[2])))
