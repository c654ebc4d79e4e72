"""The archive: publications in a folder, so that a crash at any moment costs nothing that was told.

What lies in the folder::

    kvcs-store      the version of this form, one line
    lock            held by the process that writes
    index.sqlite    which Object lies where, its digest and its seal (SQLite, write-ahead log)
    objects/N       the payloads of publication N, one behind the other, only ever added to

An Object exists when the index says so, and the index says so after its payload is on the disk:
:meth:`Archive.write` syncs the files first and commits then. What a crash leaves behind the last
payload that the index knows is written over. Numbers are not used twice, so a file that the index
does not know is a left-over and is removed. Nothing is read at the start but the list of
publications.

Everything here blocks, and nothing here knows of threads: one caller at a time, but for
:meth:`Archive.read`, which touches the files only, and for :func:`listing`.
"""

import contextlib
import errno
import fcntl
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcs.depot.records import SEAL_OCTETS, Entry, Item, TrackNote, is_intact
from kvcs.depot.shelf import Holding
from kvcs.errors import BadName, ConfigError, KvcsError
from kvcs.profile.naming import PublicationName
from moqt.errors import ProtocolError
from moqt.location import Location
from moqt.wire.pairs import Pairs, decode_pairs, encode_pairs
from moqt.wire.reader import Reader

#: The version of the form on disk.
FORMAT = "kvcs-store 1\n"
_FORMAT_FILE, _LOCK_FILE, _INDEX_FILE, _OBJECTS = "kvcs-store", "lock", "index.sqlite", "objects"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS publications (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope BLOB NOT NULL, compat BLOB NOT NULL, anchor BLOB NOT NULL, publication BLOB NOT NULL,
    finished INTEGER NOT NULL DEFAULT 0, ended INTEGER NOT NULL DEFAULT 0,
    damaged INTEGER NOT NULL DEFAULT 0,
    end INTEGER NOT NULL DEFAULT 0, octets INTEGER NOT NULL DEFAULT 0,
    objects INTEGER NOT NULL DEFAULT 0,
    kept_at REAL NOT NULL, used_at REAL NOT NULL,
    UNIQUE (scope, compat, anchor, publication)
);
CREATE TABLE IF NOT EXISTS tracks (
    publication INTEGER NOT NULL, name BLOB NOT NULL,
    groups INTEGER NOT NULL, blocks INTEGER NOT NULL, properties BLOB NOT NULL,
    largest_group BLOB, largest_object BLOB,
    PRIMARY KEY (publication, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    publication INTEGER NOT NULL, track BLOB NOT NULL,
    layer INTEGER NOT NULL, object INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL, priority INTEGER NOT NULL,
    properties BLOB NOT NULL, digest BLOB NOT NULL, seal BLOB NOT NULL,
    PRIMARY KEY (publication, track, layer, object)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chains (
    publication INTEGER PRIMARY KEY, first_block INTEGER NOT NULL, keys BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS evicted (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    scope BLOB NOT NULL, compat BLOB NOT NULL, anchor BLOB NOT NULL, publication BLOB NOT NULL,
    UNIQUE (scope, compat, anchor, publication)
);
"""
_PUBLICATIONS = """
SELECT number, scope, compat, anchor, publication, finished, ended, damaged, octets, objects,
    kept_at, used_at
FROM publications ORDER BY used_at, number
"""
_OBJECTS_OF = """
SELECT layer, object, offset, length, priority, properties, digest, seal FROM objects
WHERE publication = ? AND track = ?
"""
#: What SQLite fails with. Of a damaged index not even its message need be text.
_SQL_FAILURES = (sqlite3.Error, UnicodeDecodeError)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Group IDs that the index can keep; SQLite's integers end there.
MAX_GROUP_ID = (1 << 63) - 1
#: Octets of the longest payload; no session takes so long a one. A longer one was never kept.
LONGEST = 128 << 20
#: Publications that went for want of room and are remembered.
MAX_EVICTED = 16_384


class DiskFullError(KvcsError):
    """The disk has no room. What was kept before is as good as ever; nothing of this was kept."""


@dataclass(slots=True)
class Batch:
    """What is to be kept of one publication at a time."""

    number: int
    items: Sequence[Item]
    notes: Mapping[bytes, TrackNote] = field(default_factory=lambda: MappingProxyType({}))
    """What is known of Tracks, by Track Name."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A payload that is to be read."""

    track: bytes
    location: Location
    priority: int
    properties: Pairs
    offset: int
    length: int
    seal: bytes


class Archive:
    """A folder that holds publications, open for writing.

    Args:
        folder: Made if there is none; must be empty or an archive.
        max_index_pages: Pages that the index may have at most; for tests of a full disk.

    Raises:
        ConfigError: If the folder is in use, of another version, something else or unusable.
    """

    def __init__(self, folder: Path, *, max_index_pages: int | None = None) -> None:
        self.folder = folder
        self._objects = folder / _OBJECTS
        self._ends: dict[int, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
        except OSError as exc:
            raise ConfigError(f"store {folder}: {exc.strerror or exc}") from None
        try:
            _check_format(folder)
            self._objects.mkdir(exist_ok=True)
            self._index = _opened(folder, "rwc")
            if max_index_pages is not None:
                self._index.execute(f"PRAGMA max_page_count = {max_index_pages}")
            self._index.executescript(_SCHEMA)
            self._remove_left_overs()
            for path in (folder, folder.parent):  # or what was made just now could be gone
                _sync_folder(path)
        except (OSError, *_SQL_FAILURES) as exc:
            os.close(self._lock)
            raise ConfigError(f"store {folder}: {_reason(exc)}") from None
        except ConfigError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Close the index and let others have the folder."""
        self._index.close()
        os.close(self._lock)

    # -- looking ---------------------------------------------------------------------------------

    def holdings(self) -> list[Holding]:
        """Return every publication that is held, the least recently used first.

        A row that cannot be one of ours was damaged; its publication is missing.

        Raises:
            OSError: If the index cannot be read.
        """
        with self._reading():
            return _holdings(self._index)

    def notes(self, number: int) -> dict[bytes, TrackNote]:
        """Return what is known of a publication's Tracks, by Track Name.

        Of a Track whose row cannot be one of ours nothing is known.

        Raises:
            OSError: If the index cannot be read.
        """
        with self._reading():
            rows = self._index.execute(
                "SELECT name, groups, blocks, properties, largest_group, largest_object "
                "FROM tracks WHERE publication = ? ORDER BY name",
                (number,),
            ).fetchall()
        return {name: _note(row) for name, *row in rows if type(name) is bytes}

    def entries(self, number: int, track: bytes) -> list[Entry]:
        """Return the Objects of one Track that are held, by Location.

        A row that cannot be one of ours was damaged; its Object is missing.

        Raises:
            OSError: If the index cannot be read.
        """
        with self._reading():
            rows = self._index.execute(
                f"{_OBJECTS_OF} ORDER BY layer, object", (number, track)
            ).fetchall()
        found = [_entry(row) for row in rows]
        return [entry for entry in found if entry is not None]

    def last_entry(self, number: int, track: bytes) -> Entry | None:
        """Return the last Object of one Track that is held; None: there is none, or it is damaged.

        Of a manifest track that is the newest version.
        """
        with self._reading():
            rows = self._index.execute(
                f"{_OBJECTS_OF} ORDER BY layer DESC, object DESC LIMIT 1", (number, track)
            ).fetchall()
        return _entry(rows[0]) if rows else None

    def counts(self, number: int) -> dict[bytes, int]:
        """Return how many Objects of each Track are held, by Track Name."""
        return dict(
            self._index.execute(
                "SELECT track, count(*) FROM objects WHERE publication = ? GROUP BY track",
                (number,),
            ).fetchall()
        )

    def chain(self, number: int) -> tuple[int, bytes] | None:
        """Return what was noted of a publication's Block Keys, as :meth:`note_chain` was told.

        Nobody has checked it since.
        """
        with self._reading():
            rows = self._index.execute(
                "SELECT first_block, keys FROM chains WHERE publication = ?", (number,)
            ).fetchall()
        for first_block, keys in rows:
            if type(first_block) is int and type(keys) is bytes:
                return first_block, keys
        return None

    def evicted(self) -> list[PublicationName]:
        """Return what went for want of room, the first of it first."""
        with self._reading():
            rows = self._index.execute(
                "SELECT scope, compat, anchor, publication FROM evicted ORDER BY serial"
            ).fetchall()
        names = []
        for row in rows:
            if all(type(identifier) is bytes for identifier in row):
                with contextlib.suppress(BadName):  # a row that was damaged
                    names.append(PublicationName(*row))
        return names

    def read(self, number: int, wanted: Iterable[Wanted]) -> list[bytes | None]:
        """Read payloads and check every octet of them; None stands for a damaged one.

        Any number of threads may do so at the same time.
        """
        try:
            file = os.open(self._objects / str(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [None for _ in wanted]
        try:
            return [_read_one(file, one) for one in wanted]
        finally:
            os.close(file)

    # -- changing --------------------------------------------------------------------------------

    def open_publication(self, name: PublicationName, now: float) -> int:
        """Return the number of a publication, a new one if it is not held yet.

        That it once went for want of room is forgotten.

        Raises:
            DiskFullError: If the index has no room to note it.
            OSError: If the disk fails.
        """
        identifiers = _identifiers(name)
        with self._changing():
            self._index.execute(
                "DELETE FROM evicted "
                "WHERE scope = ? AND compat = ? AND anchor = ? AND publication = ?",
                identifiers,
            )
            self._index.execute(
                "INSERT INTO publications (scope, compat, anchor, publication, kept_at, used_at) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (*identifiers, now, now),
            )
        return self._number(
            "SELECT number FROM publications "
            "WHERE scope = ? AND compat = ? AND anchor = ? AND publication = ?",
            identifiers,
        )

    def write(self, batches: Sequence[Batch], now: float) -> None:
        """Keep Objects; when it returns, they are on the disk for good.

        None of them may be held already.

        Raises:
            DiskFullError: If there is no room. Nothing of it was kept.
            OSError: If the disk fails. Nothing of it may be relied on.
        """
        ends = {batch.number: self._end_of(batch.number) for batch in batches}
        before = ends.copy()
        try:
            rows = list(self._write_payloads(batches, ends))
            with self._changing():
                self._index.executemany(
                    "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
                )
                for batch in batches:
                    self._note_tracks(batch)
                    self._index.execute(
                        "UPDATE publications SET end = ?, octets = octets + ?, "
                        "objects = objects + ?, kept_at = ? WHERE number = ?",
                        (
                            ends[batch.number],
                            sum(len(item.payload) for item in batch.items),
                            len(batch.items),
                            now,
                            batch.number,
                        ),
                    )
        except BaseException as exc:
            self._cut_back(before)
            if isinstance(exc, OSError) and exc.errno in _NO_ROOM:
                raise DiskFullError(f"store {self.folder}: {exc.strerror}") from None
            raise
        self._ends |= ends

    def finish(self, number: int, *, ended: bool) -> None:
        """Note that everything of a publication is held, and whether nothing will be added."""
        with self._changing():
            self._index.execute(
                "UPDATE publications SET finished = 1, ended = ?, damaged = 0 WHERE number = ?",
                (ended, number),
            )

    def forget(self, number: int, track: bytes, location: Location, length: int) -> None:
        """Forget one Object, which turned out to be damaged."""
        with self._changing():
            gone = self._index.execute(
                "DELETE FROM objects WHERE publication = ? AND track = ? AND layer = ? "
                "AND object = ?",
                (number, track, *location),
            )
            if gone.rowcount:
                self._index.execute(
                    "UPDATE publications SET damaged = 1, octets = octets - ?, "
                    "objects = objects - 1 WHERE number = ?",
                    (length, number),
                )

    def note_chain(self, number: int, first_block: int, keys: bytes) -> None:
        """Note the Block Keys of a publication, one behind the other, instead of earlier ones."""
        with self._changing():
            self._index.execute(
                "INSERT OR REPLACE INTO chains VALUES (?, ?, ?)", (number, first_block, keys)
            )

    def drop(self, number: int, *, evicted: PublicationName | None = None) -> None:
        """Let go of a publication, and give its room back.

        Args:
            number: Which one.
            evicted: Its name, if it is to be remembered that it went for want of room.

        Raises:
            DiskFullError: If not even that leaves the index room to note it. Its payloads are gone.
        """
        path = self._objects / str(number)
        try:
            self._forget_all(number, evicted)
        except DiskFullError:
            # The index needs room to make room. Without its file a publication is damaged, and is
            # forgotten at the next start at the latest.
            path.unlink(missing_ok=True)
            self._forget_all(number, evicted)
        self._ends.pop(number, None)
        path.unlink(missing_ok=True)

    def _forget_all(self, number: int, evicted: PublicationName | None = None) -> None:
        with self._changing():
            for table, column in (
                ("objects", "publication"), ("tracks", "publication"), ("chains", "publication"),
                ("publications", "number"),
            ):  # fmt: skip
                self._index.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))
            if evicted is not None:
                self._index.execute(
                    "INSERT OR REPLACE INTO evicted (scope, compat, anchor, publication) "
                    "VALUES (?, ?, ?, ?)",
                    _identifiers(evicted),
                )
                self._index.execute(
                    "DELETE FROM evicted WHERE serial <= (SELECT max(serial) FROM evicted) - ?",
                    (MAX_EVICTED,),
                )

    def note_used(self, used: Iterable[tuple[int, float]]) -> None:
        """Note when publications were used last."""
        with self._changing():
            self._index.executemany(
                "UPDATE publications SET used_at = ? WHERE number = ?",
                [(at, number) for number, at in used],
            )

    # -- parts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say of an index that cannot be read what is said of a disk that fails."""
        try:
            yield
        except _SQL_FAILURES as exc:
            raise OSError(errno.EIO, f"index of the store: {_reason(exc)}") from exc

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the index, all of it or nothing, and have it on the disk afterwards."""
        try:
            self._index.execute("BEGIN IMMEDIATE")
            yield
            self._index.execute("COMMIT")
        except _SQL_FAILURES as exc:
            if self._index.in_transaction:
                self._index.execute("ROLLBACK")
            if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise DiskFullError(f"store {self.folder}: {exc}") from None
            raise OSError(errno.EIO, f"index of the store: {_reason(exc)}") from exc
        except BaseException:
            if self._index.in_transaction:
                self._index.execute("ROLLBACK")
            raise

    def _end_of(self, number: int) -> int:
        if number not in self._ends:
            self._ends[number] = self._number(
                "SELECT end FROM publications WHERE number = ?", (number,)
            )
        return self._ends[number]

    def _number(self, query: str, values: Sequence[object]) -> int:
        """Return the one number that is asked for.

        Raises:
            OSError: If the index cannot be read, or has no such number.
        """
        with self._reading():
            row = self._index.execute(query, values).fetchone()
        if row is None or type(row[0]) is not int or row[0] < 0:
            raise OSError(errno.EIO, "index of the store: a row of its publications is damaged")
        return row[0]

    def _write_payloads(
        self, batches: Sequence[Batch], ends: dict[int, int]
    ) -> Iterator[tuple[object, ...]]:
        """Have payloads on the disk; yield the rows of the index, and move the ends."""
        for batch in batches:
            if not batch.items:
                continue
            path, offset = self._objects / str(batch.number), ends[batch.number]
            is_new = not path.exists()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for item in batch.items:
                    yield (
                        batch.number, item.track, *item.location, offset, len(item.payload),
                        item.priority, encode_pairs(item.properties), item.digest, item.seal,
                    )  # fmt: skip
                    _write_at(file, item.payload, offset)
                    offset += len(item.payload)
                os.fsync(file)
            finally:
                os.close(file)
            if is_new:
                _sync_folder(self._objects)
            ends[batch.number] = offset

    def _cut_back(self, ends: Mapping[int, int]) -> None:
        """Give back the room of payloads that were not kept. What stays is written over."""
        for number, end in ends.items():
            path = self._objects / str(number)
            with contextlib.suppress(OSError):
                if path.stat().st_size > end:
                    os.truncate(path, end)

    def _note_tracks(self, batch: Batch) -> None:
        if not batch.notes:
            return
        known = self.notes(batch.number)
        for name, note in batch.notes.items():
            now = known[name].merged(note) if name in known else note
            group, object_ = (None, None) if now.largest is None else map(_octets, now.largest)
            self._index.execute(
                "INSERT OR REPLACE INTO tracks VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    batch.number, name, now.groups, now.blocks, encode_pairs(now.properties),
                    group, object_,
                ),
            )  # fmt: skip

    def _remove_left_overs(self) -> None:
        """Remove files that no publication has, and publications without a file or an Object.

        Such were cut off when they were let go, or before anything of them was kept.
        """
        known = dict(self._index.execute("SELECT number, objects FROM publications").fetchall())
        files = {path.name for path in self._objects.iterdir()}
        for name in files - set(map(str, known)):
            (self._objects / name).unlink()
        for number, objects in known.items():
            if not objects or str(number) not in files:
                with contextlib.suppress(DiskFullError):  # then at another start
                    self._forget_all(number)


def listing(folder: Path) -> list[Holding]:
    """Return what a folder holds, the least recently used first; also while it is written to.

    Raises:
        ConfigError: If it is no archive, or of another version.
    """
    if not (folder / _FORMAT_FILE).exists():
        raise ConfigError(f"store {folder}: nothing is kept there, expected a file {_FORMAT_FILE}")
    _check_format(folder)
    try:
        with contextlib.closing(_opened(folder, "ro")) as index:
            return _holdings(index)
    except _SQL_FAILURES as exc:
        raise ConfigError(f"store {folder}: {_reason(exc)}") from None


def _reason(exc: Exception) -> str:
    """Say why the index or its folder failed."""
    return "its index is damaged" if isinstance(exc, UnicodeDecodeError) else str(exc)


def _holdings(index: sqlite3.Connection) -> list[Holding]:
    found = [_holding(row) for row in index.execute(_PUBLICATIONS).fetchall()]
    return [holding for holding in found if holding is not None]


def _holding(row: Sequence[Any]) -> Holding | None:
    """Read a row of publications, whatever became of it on the disk."""
    number, *identifiers, finished, ended, damaged, octets, objects, kept_at, used_at = row
    counts, times = (number, octets, objects), (kept_at, used_at)
    if not all(type(identifier) is bytes for identifier in identifiers):
        return None
    if not all(type(count) is int and count >= 0 for count in counts):
        return None
    if not all(isinstance(at, int | float) and math.isfinite(at) for at in times):
        return None
    try:
        name = PublicationName(*identifiers)
    except BadName:
        return None
    return Holding(
        name,
        number,
        octets,
        objects,
        finished=bool(finished),
        ended=bool(ended),
        damaged=bool(damaged),
        kept_at=kept_at,
        used_at=used_at,
    )


def _note(row: Sequence[Any]) -> TrackNote:
    """Read what a row says of a Track, whatever became of it on the disk."""
    groups, blocks, properties, group, object_ = row
    if not all(type(count) is int and count >= 0 for count in (groups, blocks)):
        return TrackNote()
    largest = None
    if type(group) is bytes and type(object_) is bytes and len(group) == len(object_) == 8:
        largest = Location(_number(group), _number(object_))
    try:
        more = _properties(properties) if type(properties) is bytes else ()
    except ProtocolError:
        more = ()
    return TrackNote(groups, blocks, more, largest)


def _identifiers(name: PublicationName) -> tuple[bytes, bytes, bytes, bytes]:
    return name.scope_id, name.compatibility_id, name.anchor_key, name.publication_id


def _locked(folder: Path) -> int:
    """Return the open lock of a folder."""
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"store {folder}: in use by another process") from None
    return lock


def _check_format(folder: Path) -> None:
    """Make sure that a folder is an archive of this version, or make an empty one an archive."""
    path = folder / _FORMAT_FILE
    try:
        with path.open("rb") as file:
            found = file.read(100)
    except FileNotFoundError:
        others = sorted(p.name for p in folder.iterdir() if p.name not in (_LOCK_FILE, ".new"))
        if others:
            raise ConfigError(
                f"store {folder}: holds {others[0]!r:.100} and is no store of kvcs, "
                "expected an empty folder"
            ) from None
        fresh = folder / ".new"
        with fresh.open("w") as file:
            file.write(FORMAT)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        _sync_folder(folder)
        return
    except OSError as exc:
        raise ConfigError(f"store {folder}: {exc.strerror or exc}") from None
    if found != FORMAT.encode():
        raise ConfigError(
            f"store {folder}: of version {found.decode(errors='replace').strip()!r:.100}, "
            f"expected {FORMAT.strip()!r}"
        )


def _opened(folder: Path, mode: str) -> sqlite3.Connection:
    uri = f"{(folder / _INDEX_FILE).absolute().as_uri()}?mode={mode}"
    index = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    if mode != "ro":
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = FULL")
    index.execute("PRAGMA busy_timeout = 5000")
    return index


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_at(file: int, payload: bytes, offset: int) -> None:
    view = memoryview(payload)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _read_one(file: int, wanted: Wanted) -> bytes | None:
    try:
        if wanted.offset + wanted.length > os.fstat(file).st_size:
            return None
        payload = os.pread(file, wanted.length, wanted.offset)
    except OSError:  # a sector that cannot be read
        return None
    if len(payload) != wanted.length:
        return None
    good = is_intact(
        wanted.track, wanted.location, wanted.priority, wanted.properties, payload, wanted.seal
    )
    return payload if good else None


def _entry(row: Sequence[Any]) -> Entry | None:
    """Read a row of Objects, whatever became of it on the disk."""
    layer, number, offset, length, priority, properties, digest, sealed = row
    integers, octets = (layer, number, offset, length, priority), (properties, digest, sealed)
    if not all(type(found) is int and found >= 0 for found in integers) or priority > 255:
        return None
    if not all(type(found) is bytes for found in octets) or len(sealed) != SEAL_OCTETS:
        return None
    if length > LONGEST:
        return None
    try:
        more = _properties(properties)
    except ProtocolError:
        return None
    return Entry(Location(layer, number), offset, length, priority, more, digest, sealed)


def _properties(octets: bytes) -> Pairs:
    return decode_pairs(Reader(octets)) if octets else ()


def _octets(number: int) -> bytes:
    return number.to_bytes(8, "big")  # SQLite's integers end at 2**63 - 1, those of MOQT later


def _number(octets: bytes) -> int:
    return int.from_bytes(octets, "big")
