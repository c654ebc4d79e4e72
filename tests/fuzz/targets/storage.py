"""Targets of :mod:`kvcs.depot`: what is read from the disk of a store, whatever became of it."""

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kvcs.depot.archive import Archive, DiskFullError, Wanted, listing
from kvcs.depot.records import SEAL_OCTETS, examine, is_intact, seal
from kvcs.errors import BadObject, ConfigError
from moqt.location import Location
from tests.fuzz.choices import Octets
from tests.fuzz.target import Target
from tests.fuzz.targets import profile
from tests.unit.kvcs.depot.goods import K, item, keep, manifest_item, name

INDEX = "index.sqlite"


def read_object(data: bytes) -> None:
    """An Object on its way in, and what of it comes off a disk where an octet was changed."""
    choices = Octets(data)
    location = Location(choices.below(3), choices.below(3))
    track = choices.pick((profile.K, profile.V))
    at, change = choices.below(100), choices.byte()
    payload = choices.rest()
    examine(
        track,
        location,
        payload,
        entry=profile.entry(),
        descriptor=profile.COMPAT,
        codecs=profile.CODECS,
        max_data_octets=4096,
    )
    sealed = seal(track.name, location, 5, (), payload)
    assert is_intact(track.name, location, 5, (), payload, sealed)
    changed = bytearray(payload)
    changed[at % len(payload)] ^= change
    assert is_intact(track.name, location, 5, (), bytes(changed), sealed) == (change == 0)


class Shop:
    """A store's folder, in memory where there is such a file system, and how to mend it."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() else None
        self._made = tempfile.TemporaryDirectory(prefix="kvcs-fuzz-", dir=place)
        self.path = Path(self._made.name)
        archive = Archive(self.path)
        for number in range(2):
            held = archive.open_publication(name(number), 1.0)
            keep(archive, held, item(0, 0), item(0, 1), manifest_item(0))
            archive.note_chain(held, 0, b"k" * 64)
        gone = archive.open_publication(name(2), 1.0)
        keep(archive, gone, item(0, 0))
        archive.drop(gone, evicted=name(2))
        archive.finish(1, ended=True)
        archive.close()
        objects = self.path / "objects"
        self._objects = {path: path.read_bytes() for path in objects.iterdir()}
        self.index = (self.path / INDEX).read_bytes()

    def mend(self, index: bytes) -> Path:
        """Have everything as it was, but for the index."""
        for left in self.path.glob(f"{INDEX}*"):
            left.unlink()
        (self.path / INDEX).write_bytes(index)
        for path, octets in self._objects.items():
            path.write_bytes(octets)  # it was written to, or is gone
        return self.path


@cache
def shop() -> Shop:
    return Shop()


def read_all(archive: Archive) -> None:
    """Read everything that the index tells of; what is damaged is missing, and never wrong."""
    for evicted in archive.evicted():
        assert isinstance(evicted.scope_id, bytes)
    for holding in archive.holdings():
        archive.chain(holding.number)
        for track in archive.notes(holding.number):
            archive.last_entry(holding.number, track)
            entries = archive.entries(holding.number, track)
            wanted = [
                Wanted(track, e.location, e.priority, e.properties, e.offset, e.length, e.seal)
                for e in entries
            ]
            for one, payload in zip(wanted, archive.read(holding.number, wanted), strict=True):
                assert payload is None or (
                    seal(one.track, one.location, one.priority, one.properties, payload) == one.seal
                )


def write_more(archive: Archive) -> None:
    """Keep something more, and let something go, as far as an index lets one."""
    number = archive.open_publication(name(1), 2.0)
    keep(archive, number, item(1, 1))
    archive.finish(number, ended=True)
    archive.forget(number, K, Location(0, 0), 40)
    archive.drop(number, evicted=name(1))


def read_index(data: bytes) -> None:
    """An index of which pages were changed: a change is where, how long, and of what."""
    index, choices = bytearray(shop().index), Octets(data)
    octets = len(index)
    while not choices.is_exhausted:
        at = choices.below(octets // 4096) * 4096 + choices.below(4096)
        change = choices.octets(16)
        index[at : at + len(change)] = change
    path = shop().mend(bytes(index[:octets]))
    listing(path)
    archive = Archive(path)
    try:
        read_all(archive)
        write_more(archive)
    finally:
        archive.close()


#: What may stand in a column, whatever its type says: SQLite keeps to none of them.
_VALUES: tuple[Any, ...] = (
    None, 0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), 0.5, float("inf"), "", "text", b"",
    b"\x00", b"\xff" * 8, bytes(SEAL_OCTETS), bytes(32), K, b"\x02\x07", b"\x80",
)  # fmt: skip


def read_rows(data: bytes) -> None:
    """Rows of which a value was changed, of any type."""
    path, choices = shop().mend(shop().index), Octets(data)
    archive = Archive(path)
    try:
        index: sqlite3.Connection = archive._index
        while not choices.is_exhausted:
            table = choices.pick(("publications", "tracks", "objects", "chains", "evicted"))
            columns = [row[1] for row in index.execute(f"PRAGMA table_info({table})")]
            column, value = choices.pick(columns), choices.pick(_VALUES)
            try:
                index.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (value,))
            except sqlite3.Error:
                continue  # a constraint keeps it out; only a damaged file could have it
        read_all(archive)
        with contextlib.suppress(OSError, DiskFullError):
            write_more(archive)
    finally:
        archive.close()
    listing(path)


def object_seeds() -> Iterable[bytes]:
    for place in (b"\x00\x00", b"\x01\x01"):
        for track, seed in enumerate(profile.payload_seeds()):
            yield place + bytes([track % 2, 5, 1]) + seed[2:]


TARGETS = (
    Target(name="store_object", run=read_object, documented=(BadObject,), seeds=object_seeds),
    Target(
        name="store_index",
        run=read_index,
        documented=(ConfigError, DiskFullError, OSError),
        seeds=lambda: [b"", b"\x00\x10\x01\xff", b"\x02\x00\x04abcd"],
        max_octets=256,
    ),
    Target(
        name="store_rows",
        run=read_rows,
        seeds=lambda: [b"", b"\x00\x05\x01", b"\x01\x02\x05\x02\x03\x07", b"\x01\x04\x09"],
        max_octets=64,
    ),
)
