"""The archive: what was told as kept is there, whatever was cut, filled or locked."""

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcs.depot.archive import FORMAT, LONGEST, Archive, Batch, DiskFullError, listing
from kvcs.depot.records import Item, TrackNote
from kvcs.errors import ConfigError
from kvcs.profile.naming import MANIFEST
from moqt.location import Location
from tests.unit.kvcs.depot.goods import (
    K,
    contents,
    expected,
    item,
    keep,
    manifest_item,
    name,
    noted,
    wanted,
)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    made = Archive(tmp_path / "store")
    yield made
    made.close()


def reopened(archive: Archive) -> Archive:
    archive.close()
    return Archive(archive.folder)


# -- what is kept --------------------------------------------------------------------------------


def test_what_was_kept_is_read_octet_for_octet_also_after_it_was_opened_again(
    tmp_path: Path,
) -> None:
    archive = Archive(tmp_path / "store")
    number = archive.open_publication(name(1), now=5.0)
    items = [manifest_item(0), item(0, 0), item(0, 1), item(1, 0), manifest_item(1, b"[]")]
    keep(archive, number, *items[:2])
    keep(archive, number, *items[2:], now=6.0)

    assert contents(archive, number) == expected(*items)
    archive = reopened(archive)
    assert contents(archive, number) == expected(*items)
    [held] = archive.holdings()
    assert (held.name, held.number, held.objects) == (name(1), number, 5)
    assert held.octets == sum(len(one.payload) for one in items)
    assert (held.kept_at, held.used_at, held.finished) == (6.0, 5.0, False)
    archive.close()


def test_priorities_properties_and_digests_are_kept_with_an_object(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    one = manifest_item(3)
    keep(archive, number, one)

    [entry] = archive.entries(number, one.track)
    assert (entry.location, entry.priority, entry.properties) == (Location(3, 0), 0, ((2, 5),))
    assert (entry.digest, entry.seal) == (one.digest, one.seal)


def test_what_is_known_of_a_track_grows_and_is_not_taken_back(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    far = Location(1 << 63, 1)
    archive.write([Batch(number, [], {K: TrackNote(4, 2, ((2, 9),), far)})], 1.0)
    archive.write([Batch(number, [], {K: TrackNote(largest=Location(4, 0))})], 1.0)

    assert archive.notes(number) == {K: TrackNote(4, 2, ((2, 9),), far)}


def test_publications_are_listed_by_their_last_use(archive: Archive) -> None:
    numbers = [archive.open_publication(name(n), float(n)) for n in range(3)]
    archive.note_used([(numbers[0], 9.0)])

    assert [held.name for held in archive.holdings()] == [name(1), name(2), name(0)]


def test_what_is_dropped_leaves_neither_rows_nor_a_file_nor_its_number(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0))
    archive.drop(number)

    assert archive.holdings() == []
    assert contents(archive, number) == {}
    assert list((archive.folder / "objects").iterdir()) == []
    assert archive.open_publication(name(1), 2.0) != number


def test_what_went_for_want_of_room_is_known_until_it_is_begun_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    for n in (3, 1, 2, 4):
        number = archive.open_publication(name(n), 1.0)
        keep(archive, number, item(0, 0))
        archive.drop(number, evicted=None if n == 4 else name(n))

    archive = reopened(archive)
    assert archive.evicted() == [name(3), name(1), name(2)]
    archive.open_publication(name(1), 2.0)
    assert archive.evicted() == [name(3), name(2)]
    archive._index.execute("UPDATE evicted SET scope = 'x' WHERE publication = ?", (bytes(16),))
    archive._index.execute("UPDATE evicted SET scope = NULL OR 7 WHERE serial = 1")
    assert archive.evicted() == [name(2)]
    archive.close()


def test_of_very_much_that_went_the_first_is_forgotten(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcs.depot.archive.MAX_EVICTED", 3)
    for n in (1, 2, 3, 1, 4):
        archive.drop(archive.open_publication(name(n), 1.0), evicted=name(n))

    assert archive.evicted() == [name(3), name(1), name(4)]


def test_block_keys_are_kept_with_their_publication_and_go_with_it(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0))
    assert archive.chain(number) is None
    archive.note_chain(number, 0, b"k" * 32)
    archive.note_chain(number, 2, b"k" * 96)

    archive = reopened(archive)
    assert archive.chain(number) == (2, b"k" * 96)
    archive._index.execute("UPDATE chains SET keys = 'text'")
    assert archive.chain(number) is None
    archive.drop(number)
    assert archive._index.execute("SELECT count(*) FROM chains").fetchone() == (0,)
    archive.close()


def test_the_last_object_of_a_track_is_had_without_the_others(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, *(manifest_item(version) for version in (2, 0, 11)))

    assert archive.counts(number) == {MANIFEST: 3}
    assert archive.last_entry(number, MANIFEST) == archive.entries(number, MANIFEST)[-1]
    assert archive.last_entry(number, K) is None


def test_finishing_is_kept_and_undoes_damage(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0), item(0, 1))
    archive.forget(number, K, Location(0, 1), len(item(0, 1).payload))

    [held] = archive.holdings()
    assert (held.damaged, held.objects, held.octets) == (True, 1, len(item(0, 0).payload))
    archive.finish(number, ended=True)
    archive = reopened(archive)
    [held] = archive.holdings()
    assert (held.damaged, held.finished, held.ended) == (False, True, True)
    archive.close()


# -- damage --------------------------------------------------------------------------------------


def test_no_flipped_octet_of_an_object_leaves_the_disk(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    items = [item(0, 0), manifest_item(0), item(0, 1)]
    keep(archive, number, *items)
    path = archive.folder / "objects" / str(number)
    good = path.read_bytes()

    for octet in range(len(good)):
        path.write_bytes(good[:octet] + bytes([good[octet] ^ 1]) + good[octet + 1 :])
        found = contents(archive, number)
        bad = [key for key, payload in found.items() if payload is None]
        assert len(bad) == 1, octet
        assert found == expected(*items) | {bad[0]: None}


def test_what_the_index_says_of_the_wrong_place_is_not_believed(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0), item(0, 1))
    first, second = archive.entries(number, K)
    swapped = [wanted(K, first._replace(location=second.location)), wanted(K, second)]

    assert archive.read(number, swapped) == [None, item(0, 1).payload]


#: What may become of a row of the index on a disk, by column.
ROWS: dict[str, list[object]] = {
    "offset": [0, 1, -1, 1 << 62, None, "x", b"x"],
    "length": [0, 1, -1, 1 << 62, None, 1.5],
    "priority": [0, 255, 256, -1, None],
    "properties": [b"\x02\x07", b"\xff", b"\x01", None, 3],
    "seal": [b"", b"s" * 16, b"s" * 32, None, 5],
    "object": [9, -1, b"z"],
    "layer": [9, -1, b"z"],
    "track": [b"v.raw.s0", b"", b"\xff"],
}


@pytest.mark.parametrize(("column", "value"), [(c, v) for c, vs in ROWS.items() for v in vs])
def test_a_row_of_the_index_that_was_changed_brings_nothing_that_is_wrong(
    archive: Archive, column: str, value: object
) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0), item(0, 1))
    before = archive.entries(number, K)
    archive._index.executescript(
        "DROP TABLE IF EXISTS copy; CREATE TABLE copy AS SELECT * FROM objects;"
    )
    archive._index.executescript("DROP TABLE objects; ALTER TABLE copy RENAME TO objects;")
    archive._index.execute(f"UPDATE objects SET {column} = ? WHERE object = 0", (value,))

    found = contents(archive, number)
    good = {key: payload for key, payload in found.items() if payload is not None}
    assert good.items() <= expected(item(0, 0), item(0, 1)).items()
    assert (K, Location(0, 1)) in good
    assert len(good) == 1 or archive.entries(number, K) == before


def test_a_file_that_is_gone_is_damage_and_no_failure(archive: Archive) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0))
    (archive.folder / "objects" / str(number)).unlink()

    assert contents(archive, number) == {(K, Location(0, 0)): None}


# -- crashes -------------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    """Copy what lies in a folder at this moment, as a crash would leave it."""
    shutil.copytree(folder, to)
    (to / "index.sqlite-shm").unlink(missing_ok=True)  # memory of the machine, gone with it
    return to


@pytest.fixture
def torn(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder before its last write, and the same one after it."""
    archive = Archive(tmp_path / "store")
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0), item(0, 1))
    before = copied(archive.folder, tmp_path / "before")
    keep(archive, number, item(1, 0))
    after = copied(archive.folder, tmp_path / "after")
    archive.close()
    return before, after


def after_a_crash(folder: Path, *, go_on: bool) -> dict[Any, Any]:
    """Return what is held after a crash, and see whether it goes on from there."""
    archive = Archive(folder)
    [held] = archive.holdings()
    found = contents(archive, held.number)
    if not go_on:
        archive.close()
        return found
    new = [one for one in (item(1, 0), item(1, 1)) if (K, one.location) not in found]
    keep(archive, held.number, *new)
    assert contents(archive, held.number) == expected(
        item(0, 0), item(0, 1), item(1, 0), item(1, 1)
    )
    archive.close()
    return found


def test_a_crash_at_any_octet_of_the_payload_costs_only_what_was_being_written(
    torn: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = torn
    [path] = (after / "objects").iterdir()
    octets, old = path.read_bytes(), len(item(0, 0).payload) * 2

    folder = tmp_path / "cut"
    shutil.copytree(before, folder)
    for cut in range(old, len(octets) + 1):
        for garbage in (b"", b"\x00" * 200):
            (folder / "objects" / path.name).write_bytes(octets[:cut] + garbage)

            assert after_a_crash(folder, go_on=False) == expected(item(0, 0), item(0, 1))
    for cut in range(old, len(octets) + 1, 20):
        shutil.copytree(before, folder / f"{cut}")
        (folder / f"{cut}" / "objects" / path.name).write_bytes(octets[:cut])

        found = after_a_crash(folder / f"{cut}", go_on=True)
        assert found == expected(item(0, 0), item(0, 1))


def test_a_crash_at_any_octet_of_the_index_costs_only_what_was_being_written(
    torn: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = torn
    log = "index.sqlite-wal"
    octets, old = (after / log).read_bytes(), (before / log).stat().st_size
    assert old < len(octets)
    outcomes = set()

    # At every octet near the edges of what was added, and at some in between.
    cuts = {*range(old, old + 40), *range(len(octets) - 40, len(octets) + 1)}
    for cut in sorted(cuts | set(range(old, len(octets), 397))):
        folder = tmp_path / f"{cut}"
        shutil.copytree(after, folder)
        (folder / log).write_bytes(octets[:cut])

        found = after_a_crash(folder, go_on=cut % 40 == 0)
        assert found in (
            expected(item(0, 0), item(0, 1)), expected(item(0, 0), item(0, 1), item(1, 0))
        )  # fmt: skip
        outcomes.add(len(found))
        shutil.rmtree(folder)
    assert outcomes == {2, 3}


def test_a_file_that_the_index_does_not_know_is_removed(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    left = archive.folder / "objects" / "77"
    left.write_bytes(b"left by a crash between the index and the file")

    archive = reopened(archive)
    assert not left.exists()
    archive.close()


# -- a full disk ---------------------------------------------------------------------------------


def test_a_disk_that_is_full_in_the_middle_of_a_payload_loses_nothing_that_was_good(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0))
    path = archive.folder / "objects" / str(number)
    size, pwrite = path.stat().st_size, os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        if offset >= size + 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data[:50], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match="No space left"):
        keep(archive, number, item(0, 1))

    assert contents(archive, number) == expected(item(0, 0))
    assert path.stat().st_size == size  # what was not kept takes no room
    monkeypatch.undo()
    keep(archive, number, item(0, 1))
    assert contents(archive, number) == expected(item(0, 0), item(0, 1))


def test_an_index_that_is_full_loses_nothing_that_was_good(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store", max_index_pages=16)
    number = archive.open_publication(name(1), 1.0)
    kept: list[Item] = []

    def fill_up() -> None:
        for layer in range(1000):
            batch = [item(layer, block) for block in range(20)]
            keep(archive, number, *batch)
            kept.extend(batch)

    with pytest.raises(DiskFullError, match="full"):
        fill_up()
    assert len(kept) >= 20
    archive = reopened(archive)
    assert contents(archive, number) == expected(*kept)
    archive.close()


def test_room_can_be_made_on_a_disk_that_is_so_full_that_the_index_cannot_note_it(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [archive.open_publication(name(n), 1.0) for n in range(2)]
    for number in numbers:
        keep(archive, number, item(0, 0))
    path, changing = archive.folder / "objects" / str(numbers[0]), archive._changing

    def full() -> Any:
        if path.exists():
            raise DiskFullError("database or disk is full")
        return changing()

    monkeypatch.setattr(archive, "_changing", full)
    archive.drop(numbers[0], evicted=name(0))

    assert [held.number for held in archive.holdings()] == [numbers[1]]
    assert contents(archive, numbers[1]) == expected(item(0, 0))
    assert archive.evicted() == [name(0)]


def test_a_publication_whose_file_is_gone_is_forgotten_at_the_start(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    numbers = [archive.open_publication(name(n), 1.0) for n in range(2)]
    for number in numbers:
        keep(archive, number, item(0, 0))
    (archive.folder / "objects" / str(numbers[0])).unlink()

    archive = reopened(archive)
    assert [held.number for held in archive.holdings()] == [numbers[1]]
    archive.close()


def test_a_disk_that_fails_is_told_as_what_it_is(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = archive.open_publication(name(1), 1.0)

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        keep(archive, number, item(0, 0))
    assert contents(archive, number) == {}


# -- folders -------------------------------------------------------------------------------------


def test_a_folder_is_used_by_one_process(archive: Archive) -> None:
    code = (
        "import sys; from pathlib import Path; from kvcs.depot.archive import Archive\n"
        "Archive(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(archive.folder)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=Path(__file__).parents[4],
    )

    last = done.stderr.splitlines()[-1]
    assert last == f"kvcs.errors.ConfigError: store {archive.folder}: in use by another process"


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvcs-store").write_text("kvcs-store 2\n")

    with pytest.raises(ConfigError, match="of version 'kvcs-store 2', expected 'kvcs-store 1'"):
        Archive(tmp_path)
    with pytest.raises(ConfigError, match="of version 'kvcs-store 2', expected 'kvcs-store 1'"):
        listing(tmp_path)


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")

    with pytest.raises(ConfigError, match=r"holds 'thesis.txt' and is no store of kvcs"):
        Archive(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "words"
    with pytest.raises(ConfigError, match="nothing is kept there"):
        listing(tmp_path)


def test_what_was_refused_may_be_used_once_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "kvcs-store").write_text("kvcs-store 2\n")
    with pytest.raises(ConfigError):
        Archive(tmp_path)
    (tmp_path / "kvcs-store").write_text(FORMAT)

    Archive(tmp_path).close()


def test_an_index_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    Archive(tmp_path / "store").close()
    (tmp_path / "store" / "index.sqlite").write_bytes(b"not a database at all" * 100)

    with pytest.raises(ConfigError, match="file is not a database"):
        Archive(tmp_path / "store")


def test_an_index_of_which_sqlite_can_tell_nothing_in_text_is_refused_in_words(
    tmp_path: Path,
) -> None:
    Archive(tmp_path).close()
    index = tmp_path / "index.sqlite"
    octets = index.read_bytes()
    row = b"tablechainschains"  # of the schema: type, name, table
    assert row in octets
    # SQLite quotes the name of what it stumbled over.
    octets = octets.replace(row, b"tablech\xffinschains")
    index.write_bytes(octets.replace(b"CREATE TABLE chains", b"CREATE TABEL chains"))

    with pytest.raises(ConfigError, match="its index is damaged"):
        listing(tmp_path)
    with pytest.raises(ConfigError, match="its index is damaged"):
        Archive(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"store .*file: File exists"):
        Archive(tmp_path / "file")


def test_it_is_listed_while_it_is_written_to_and_afterwards(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    number = archive.open_publication(name(1), 1.0)
    keep(archive, number, item(0, 0))

    while_open = listing(archive.folder)
    archive.close()
    assert [held.objects for held in while_open] == [1]
    assert [held.objects for held in listing(archive.folder)] == [1]


def test_listing_changes_nothing(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    archive.close()
    listing(archive.folder)

    index = sqlite3.connect(archive.folder / "index.sqlite")
    assert index.execute("SELECT count(*) FROM publications").fetchone() == (0,)
    index.close()


def test_publications_written_together_do_not_mix(archive: Archive) -> None:
    numbers = [archive.open_publication(name(n), 1.0) for n in range(2)]
    archive.write(
        [
            Batch(numbers[0], [item(0, 0)], noted()),
            Batch(numbers[1], [item(3, 1)], noted()),
        ],
        1.0,
    )

    assert contents(archive, numbers[0]) == expected(item(0, 0))
    assert contents(archive, numbers[1]) == expected(item(3, 1))


@pytest.mark.parametrize("value", [None, -1, 1 << 40, 0.5, "text", b"\x80", b"x" * 8], ids=repr)
@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("publications", "scope"),
        ("publications", "publication"),
        ("publications", "octets"),
        ("publications", "used_at"),
        ("tracks", "name"),
        ("tracks", "groups"),
        ("tracks", "properties"),
        ("tracks", "largest_group"),
        ("tracks", "largest_object"),
    ],
)
def test_a_row_about_a_publication_or_a_track_that_was_changed_is_left_out(
    tmp_path: Path, table: str, column: str, value: object
) -> None:
    with contextlib.closing(Archive(tmp_path)) as archive:
        number = archive.open_publication(name(1), 1.0)
        keep(archive, number, item(0, 0))
        # What a damaged file may have, whatever the schema says.
        archive._index.execute("PRAGMA ignore_check_constraints = ON")
        with contextlib.suppress(sqlite3.IntegrityError):
            archive._index.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (value,))

        for holding in archive.holdings():
            assert holding.name.scope_id == b"s" * 32
        for track in archive.notes(number):
            assert isinstance(track, bytes)
            assert archive.entries(number, track) or track != K


def test_an_index_that_cannot_be_read_is_said_to_be_a_disk_that_fails(tmp_path: Path) -> None:
    with contextlib.closing(Archive(tmp_path)) as archive:
        number = archive.open_publication(name(1), 1.0)
        keep(archive, number, item(0, 0))
        archive._index.execute("DROP TABLE objects")
        archive._index.execute("DROP TABLE tracks")
        archive._index.execute("DROP TABLE publications")

        for read in (
            archive.holdings,
            lambda: archive.notes(number),
            lambda: archive.entries(number, K),
        ):
            with pytest.raises(OSError, match="index of the store: no such table"):
                read()


@pytest.mark.parametrize("end", ["text", b"", 0.5, -1])
def test_nothing_is_written_to_a_publication_of_which_the_end_is_not_known(
    tmp_path: Path, end: object
) -> None:
    with contextlib.closing(Archive(tmp_path)) as archive:
        number = archive.open_publication(name(1), 1.0)
        keep(archive, number, item(0, 0))
    with contextlib.closing(Archive(tmp_path)) as archive:
        archive._index.execute("UPDATE publications SET end = ?", (end,))
        with pytest.raises(OSError, match="a row of its publications is damaged"):
            keep(archive, number, item(0, 1))

        assert contents(archive, number) == expected(item(0, 0))


def test_a_length_that_no_object_has_is_damage_however_long_the_file_is(tmp_path: Path) -> None:
    with contextlib.closing(Archive(tmp_path)) as archive:
        number = archive.open_publication(name(1), 1.0)
        keep(archive, number, item(0, 0), item(0, 1))
        os.truncate(tmp_path / "objects" / str(number), 1 << 40)  # a sparse one
        archive._index.execute("UPDATE objects SET length = ? WHERE object = 1", (LONGEST + 1,))

        assert contents(archive, number) == expected(item(0, 0))


def test_what_is_given_back_after_a_failure_never_makes_a_file_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Archive(tmp_path)) as archive:
        number = archive.open_publication(name(1), 1.0)
        keep(archive, number, item(0, 0))
        archive._index.execute("UPDATE publications SET end = ?", (1 << 40,))
    with contextlib.closing(Archive(tmp_path)) as archive:

        def fail(file: int, payload: bytes, offset: int) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr("kvcs.depot.archive._write_at", fail)
        with pytest.raises(OSError, match="broken"):
            keep(archive, number, item(0, 1))

        assert (tmp_path / "objects" / str(number)).stat().st_size == len(item(0, 0).payload)
