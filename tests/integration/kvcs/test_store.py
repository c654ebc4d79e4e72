"""A store between a producer and consumers: what it holds is what was published, and stays."""

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs.consumer.events import Failed, PublicationComplete
from kvcs.consumer.retrieval import ConnectionSpec, consume
from kvcs.consumer.trust import Expectations
from kvcs.depot import following, keeping
from kvcs.depot.archive import Archive
from kvcs.depot.daemon import Store
from kvcs.depot.shelf import OBJECT_OCTETS
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer
from kvcs.profile.naming import MANIFEST, PROFILE, PublicationName
from kvcs.profile.signing import ProducerKey
from kvcs.telemetry import Counter
from moqt.aio import MoqtConnection, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import TrackNamespace
from moqt.session.events import NamespaceAppeared
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import (
    BLOCKS,
    COMPAT,
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    QUICK,
    SCOPE,
    TOKENS,
    CountingSink,
    assert_same_cache,
    corrupt,
    expectations,
    fill,
    filled,
    flip,
    hasty,
    missing,
    of_kind,
    on_stage,
    ready,
    run,
)
from tests.integration.kvcs.warehouse import Warehouse, published, warehouse
from tests.integration.relay.stage import relaying

pytestmark = pytest.mark.network

OBJECTS = 2 * LAYERS * BLOCKS


async def retrieved(spec: ConnectionSpec, expected: Expectations | None = None) -> None:
    """Retrieve everything, and see that it is right."""
    sink = CountingSink()
    events = await run(consume(expected or expectations(), [spec], sink, settings=QUICK))

    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sink.placed == EVERYTHING
    assert_same_cache(sink)


async def told_of(spec: ConnectionSpec) -> set[TrackNamespace]:
    """Return the namespaces of the scope that somebody tells of at first."""
    prefix = TrackNamespace((PROFILE, SCOPE.scope_id))
    found: set[TrackNamespace] = set()
    async with connect(spec.uri, tls=spec.tls) as conn:
        announcements = await conn.subscribe_namespace(prefix)
        try:
            async with asyncio.timeout(0.3):
                async for event in announcements:
                    assert isinstance(event, NamespaceAppeared)
                    found.add(event.namespace)
        except TimeoutError:
            pass
    return found


# -- the same octets under the same name ---------------------------------------------------------


@pytest.mark.parametrize("segments", [(BLOCKS,), (2, 3)], ids=["one segment", "two segments"])
async def test_what_is_kept_is_what_was_published_octet_for_octet(
    certificates: CertificateFiles, tmp_path: Path, segments: tuple[int, ...]
) -> None:
    async with warehouse(tmp_path / "store", certificates) as depot:
        async with on_stage(certificates) as scene:
            depot.follow(scene.spec)
            publication = await filled(scene.open(), segments)
            await depot.kept()
            expected = published(publication)

        assert await depot.contents(publication.name) == expected
        await retrieved(depot.spec)


async def test_a_publication_that_is_being_made_is_followed_to_its_end(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with warehouse(tmp_path / "store", certificates) as depot:
        async with on_stage(certificates, manifest_every=2) as scene:
            depot.follow(scene.spec)
            handle = scene.open()
            await fill(handle, range(2))
            await depot.counters.reached(Counter.OBJECTS_KEPT, 4 * BLOCKS)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            await depot.kept()
            expected = published(handle.publication)

        found = await depot.contents(handle.name)
        assert found == expected
        assert (
            len([track for track, _ in found if track == MANIFEST]) == handle.publication.versions
        )
        await retrieved(depot.spec)


async def test_it_serves_after_a_restart_what_its_producer_signed(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    key = ProducerKey.generate()
    trusted = {key.kid: key.public_key}
    async with (
        warehouse(tmp_path / "store", certificates, trusted=trusted) as depot,
        on_stage(certificates, producer_key=key) as scene,
    ):
        depot.follow(scene.spec)
        publication = await filled(scene.open())
        await depot.kept()
    async with warehouse(tmp_path / "store", certificates) as depot:
        assert await told_of(depot.spec) == {publication.name.namespace}
        expected = expectations(trusted=trusted, require_signature=True)
        await retrieved(depot.spec, expected)


async def test_relays_bring_it_and_relays_pass_it_on(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    """Two relays apart: at the second one, nobody but the store has it."""
    async with (
        relaying(certificates) as before,
        relaying(certificates) as behind,
        warehouse(tmp_path / "store", certificates) as depot,
    ):
        depot.follow(before.nearest)
        announced = depot.store.announce_at(behind.farthest.uri, tls=behind.farthest.tls)
        async with on_stage(certificates) as scene:
            scene.producer.announce_at(before.farthest.uri, tls=before.farthest.tls)
            publication = await filled(scene.open())
            await depot.kept()
        await announced.wait_announced(PATIENCE_S)

        assert announced.announced == {publication.name.namespace}
        await retrieved(behind.nearest)


async def test_it_follows_the_relay_that_it_is_announced_at_and_does_not_go_round_in_circles(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        relaying(certificates) as stage,
        warehouse(tmp_path / "store", certificates) as depot,
    ):
        depot.follow(stage.nearest)
        announced = depot.store.announce_at(stage.nearest.uri, tls=stage.nearest.tls)
        async with on_stage(certificates) as scene:
            scene.producer.announce_at(stage.nearest.uri, tls=stage.nearest.tls)
            publication = await filled(scene.open())
            await depot.kept()
            await announced.wait_announced(PATIENCE_S)
        kept = depot.counters[Counter.OBJECTS_KEPT]
        await retrieved(stage.nearest)

        assert (
            depot.counters[Counter.OBJECTS_KEPT]
            == kept
            == len(await depot.contents(publication.name))
        )


async def test_only_what_is_wanted_of_a_scope_is_kept(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        others = await filled(scene.open())
        handle = scene.producer.open(COMPAT, TOKENS[: 2 * 4])
        await handle.abandon("only its name is needed")
        wanted = scene.producer.open(COMPAT, TOKENS)
        depot.follow(scene.spec, prefixes=[wanted.name.namespace])
        await fill(wanted)
        await wanted.finish()
        await depot.kept()

        assert [held.name for held in depot.store.depot.shelf] == [wanted.name]
        assert others.name != wanted.name


# -- what is not taken, or not held on to --------------------------------------------------------


async def test_an_abandoned_publication_is_dropped(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        handle = scene.open()
        await fill(handle, range(2))
        await depot.counters.reached(Counter.OBJECTS_KEPT, 4 * BLOCKS)
        await handle.abandon("the tensors were wrong")
        await depot.counters.reached(Counter.PUBLICATIONS_REFUSED, 1)

        assert len(depot.store.depot.shelf) == 0
        assert await told_of(depot.spec) == set()


async def test_an_object_that_is_not_what_the_manifest_lists_is_not_kept(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        publication = await filled(scene.open())
        corrupt(publication, "k.raw.s0", 3, 2, flip(-1))
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.OBJECTS_REJECTED, 2)  # asked for once more
        [held] = depot.store.depot.shelf
        await depot.until(lambda: not held.is_written)

        found = await depot.contents(publication.name)
        assert (b"k.raw.s0", Location(3, 2)) not in found
        assert len(found) == len(published(publication)) - 1
        assert not held.finished


async def test_a_plain_manifest_is_not_taken_where_a_signature_is_required(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    key = ProducerKey.generate()
    async with (
        warehouse(
            tmp_path / "store", certificates, trusted={key.kid: key.public_key},
            require_signature=True,
        ) as depot,
        on_stage(certificates) as plain,
        on_stage(certificates, producer_key=key) as signed,
    ):  # fmt: skip
        await filled(plain.open())
        publication = await filled(signed.open())
        depot.store.follow([plain.spec.uri, signed.spec.uri], tls=plain.spec.tls)
        await depot.kept()

        assert [h.name for h in depot.store.depot.shelf if h.finished] == [publication.name]


async def test_a_manifest_that_nobody_trusted_has_signed_is_refused(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    trusted = ProducerKey.generate()
    async with (
        warehouse(
            tmp_path / "store", certificates, trusted={trusted.kid: trusted.public_key}
        ) as depot,
        on_stage(certificates, producer_key=ProducerKey.generate()) as scene,
    ):
        await filled(scene.open())
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.PUBLICATIONS_REFUSED, 1)

        assert len(depot.store.depot.shelf) == 0


# -- the budget ----------------------------------------------------------------------------------


def cost() -> int:
    """Octets that a publication of the scene takes, a little more than less."""
    objects = OBJECTS + 3
    return LAYERS * BLOCKS * (2 * 68 + 128 + 64) + 12_000 + objects * OBJECT_OCTETS


async def test_the_least_recently_used_goes_when_the_budget_is_used_up(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    names: list[PublicationName] = []
    async with (
        warehouse(tmp_path / "store", certificates, budget_octets=2 * cost()) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        for count in range(3):
            if count == 2:  # the first one is used: it is the second that goes
                await depot.contents(names[0])
                await depot.store.depot.image(names[0])
            names.append((await filled(scene.open())).name)
            await depot.kept(count + 1)

        shelf = depot.store.depot.shelf
        assert {held.name for held in shelf} == {names[0], names[2]}
        assert shelf.used <= shelf.limit
        assert depot.counters[Counter.PUBLICATIONS_EVICTED] == 1
        assert len(list((tmp_path / "store" / "objects").iterdir())) <= 3


async def test_what_went_for_want_of_room_does_not_come_back_because_it_is_announced_again(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates, budget_octets=2 * cost()) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        names = []
        for count in range(3):
            names.append((await filled(scene.open())).name)
            await depot.kept(count + 1)
        scene.producer._servers[0].connections[0]._transport.close(0, "")
        await depot.counters.reached(Counter.RELAY_CONNECTS, 2)
        names.append((await filled(scene.open())).name)  # announced after the others
        await depot.kept(4)

        assert {held.name for held in depot.store.depot.shelf} == set(names[2:])


async def test_nor_does_it_after_a_restart(certificates: CertificateFiles, tmp_path: Path) -> None:
    names: list[PublicationName] = []
    folder, budget = tmp_path / "store", 2 * cost()
    async with on_stage(certificates) as scene:
        async with warehouse(folder, certificates, budget_octets=budget) as depot:
            depot.follow(scene.spec)
            for count in range(3):
                names.append((await filled(scene.open())).name)
                await depot.kept(count + 1)
        names.append((await filled(scene.open())).name)
        async with warehouse(folder, certificates, budget_octets=budget) as depot:
            depot.follow(scene.spec)
            await depot.kept()

            assert {held.name for held in depot.store.depot.shelf} == set(names[2:])


async def test_what_is_being_read_does_not_go_and_what_does_not_fit_is_left(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates, budget_octets=cost() * 3 // 2) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        first = await filled(scene.open())
        await depot.kept()
        depot.store.depot.reading(first.name, +1)
        await filled(scene.open())
        shelf = depot.store.depot.shelf
        await depot.until(lambda: len(shelf) == 2)
        await depot.until(lambda: not any(held.is_written for held in shelf))

        assert shelf.get(first.name) is not None
        assert depot.store.depot.is_short, "who reads and takes nothing is looked for"
        assert depot.counters[Counter.PUBLICATIONS_KEPT] == 1
        assert shelf.used <= shelf.limit
        depot.store.depot.reading(first.name, -1)
        await depot.kept(2)  # asked for again, now that there is room


async def test_what_would_never_fit_is_dropped_and_not_asked_for_again(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates, budget_octets=8_000) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        await filled(scene.open())
        await depot.counters.reached(Counter.PUBLICATIONS_REFUSED, 1)

        assert len(depot.store.depot.shelf) == 0


# -- interruptions -------------------------------------------------------------------------------


async def cut_short(depot: Warehouse, files: CertificateFiles) -> PublicationName:
    """Have a producer vanish after three layers, which are kept."""
    async with on_stage(files) as scene:
        depot.follow(scene.spec)
        handle = scene.open()
        await fill(handle, range(3))
        await depot.counters.reached(Counter.OBJECTS_KEPT, 6 * BLOCKS)
        for connection in scene.producer._servers[0].connections:
            connection._transport.close(0, "")  # without a word of what it has
        [held] = depot.store.depot.shelf
        await depot.until(lambda: not held.is_written)
        await depot.store.depot.contents(handle.name)
        return handle.name


async def test_what_its_producer_did_not_finish_is_served_as_far_as_it_goes(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with warehouse(tmp_path / "store", certificates) as depot:
        name = await cut_short(depot, certificates)
        settings = hasty(deadline_s=2, discovery_timeout_s=1)
        events = await run(consume(expectations(), [depot.spec], CountingSink(), settings=settings))
        assert sorted(ready(events)) == [0, 1, 2]
        [failed] = of_kind(events, Failed)
        assert missing(failed) == [
            "k.raw.s0 layers 3-5 blocks 0-4",
            "v.raw.s0 layers 3-5 blocks 0-4",
        ]
        whole = depot.store.depot.whole.matching(TrackNamespace())

    assert whole == set()  # relays are told of what is whole
    async with warehouse(tmp_path / "store", certificates, partial_s=0.001) as depot:
        await depot.until(lambda: depot.store.depot.holding(name) is None)
        assert depot.counters[Counter.PUBLICATIONS_EXPIRED] == 1


async def test_what_a_store_lacks_when_it_is_started_again_is_all_that_it_asks_for(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, range(3))
        async with warehouse(tmp_path / "store", certificates) as depot:
            depot.follow(scene.spec)
            await depot.counters.reached(Counter.OBJECTS_KEPT, 6 * BLOCKS + 2)
            first = depot.counters[Counter.OBJECTS_KEPT]
        await fill(handle, range(3, LAYERS))
        await handle.finish()
        async with warehouse(tmp_path / "store", certificates) as depot:
            depot.follow(scene.spec)
            await depot.kept()

            second = depot.counters[Counter.OBJECTS_KEPT]
            assert first + second == len(published(handle.publication))
            assert await depot.contents(handle.name) == published(handle.publication)


async def test_a_lost_upstream_is_dialled_again_and_what_is_missing_is_asked_for(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        handle = scene.open()
        await fill(handle, range(3))
        await depot.counters.reached(Counter.OBJECTS_KEPT, 6 * BLOCKS)
        for connection in scene.producer._servers[0].connections:
            connection._transport.close(0, "")
        await fill(handle, range(3, LAYERS))
        await handle.finish()
        await depot.kept()

        assert depot.counters[Counter.OBJECTS_KEPT] == len(published(handle.publication))


async def test_an_upstream_that_goes_away_is_followed_where_it_says(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
        relaying(certificates) as first,
        relaying(certificates) as second,
    ):
        depot.follow(first.nearest)
        await depot.counters.reached(Counter.RELAY_CONNECTS, 1)
        leaving = asyncio.create_task(
            first.relays[0].close(drain_s=5.0, new_session_uri=second.nearest.uri)
        )
        await depot.counters.reached(Counter.RELAY_CONNECTS, 2)
        await leaving
        scene.producer.announce_at(second.farthest.uri, tls=second.farthest.tls)
        publication = await filled(scene.open())
        await depot.kept()

        assert await depot.contents(publication.name) == published(publication)


async def test_a_silent_upstream_is_left_for_another_session_and_not_before(
    certificates: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENCE_S", 0.1)
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.RELAY_CONNECTS, 1)
        [connection] = scene.producer._servers[0].connections
        connection._transport.abandon()  # without a word
        await depot.counters.reached(Counter.RELAY_CONNECTS, 2)
        publication = await filled(scene.open())
        await depot.kept()

        assert await depot.contents(publication.name) == published(publication)


# -- disks ---------------------------------------------------------------------------------------


def flip_on_disk(folder: Path, octets: bytes) -> None:
    """Change one bit of where some octets lie in the one file of a store."""
    [path] = (folder / "objects").iterdir()
    found = bytearray(path.read_bytes())
    at = found.index(octets)
    found[at + len(octets) // 2] ^= 4
    path.write_bytes(found)


async def test_one_damaged_object_costs_its_layer_and_nothing_else_and_is_mended_later(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    async with on_stage(certificates) as scene:
        async with warehouse(folder, certificates) as depot:
            depot.follow(scene.spec)
            publication = await filled(scene.open())
            await depot.kept()
        good = published(publication)
        flip_on_disk(folder, good[b"v.raw.s0", Location(2, 1)])
        async with warehouse(folder, certificates) as depot:
            settings = hasty(deadline_s=2, discovery_timeout_s=1)
            for _ in range(2):
                events = await run(
                    consume(expectations(), [depot.spec], CountingSink(), settings=settings)
                )
                assert sorted(ready(events)) == [0, 1, 3, 4, 5]
                [failed] = of_kind(events, Failed)
                assert missing(failed) == ["v.raw.s0 layer 2 block 1"]
            assert depot.counters[Counter.OBJECTS_DAMAGED] == 1

            depot.follow(scene.spec)
            await depot.kept()
            assert depot.counters[Counter.OBJECTS_KEPT] == 1
            await retrieved(depot.spec)
            assert await depot.contents(publication.name) == good


async def test_an_index_that_says_what_the_manifest_denies_costs_one_object_and_no_publication(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with on_stage(certificates, manifest_every=1) as scene:
        handle = scene.open()
        await fill(handle, range(3))
        async with warehouse(tmp_path / "store", certificates) as depot:
            depot.follow(scene.spec)
            await depot.counters.reached(Counter.OBJECTS_KEPT, 6 * BLOCKS + 5)
        index = sqlite3.connect(tmp_path / "store" / "index.sqlite")
        with index:
            index.execute(
                "UPDATE objects SET digest = zeroblob(32) "
                "WHERE track = ? AND layer = 1 AND object = 2",
                (b"v.raw.s0",),
            )
        index.close()
        await fill(handle, range(3, LAYERS))
        await handle.finish()
        async with warehouse(tmp_path / "store", certificates) as depot:
            depot.follow(scene.spec)
            await depot.kept()

            assert depot.counters[Counter.OBJECTS_DAMAGED] == 1
            assert await depot.contents(handle.name) == published(handle.publication)


async def test_a_full_disk_loses_nothing_and_is_written_to_again_when_there_is_room(
    certificates: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, is_full = os.pwrite, False

    def filling(file: int, data: Any, offset: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        first = await filled(scene.open())
        await depot.kept()
        is_full = True
        second = await filled(scene.open())
        await depot.counters.reached(Counter.DISK_FULL, 1)
        assert await depot.contents(first.name) == published(first)
        is_full = False
        await depot.kept(2)

        assert await depot.contents(second.name) == published(second)


async def test_of_a_track_that_lacks_one_object_only_its_layer_is_asked_for_again(
    certificates: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LocationFilter] = []
    fill_of = keeping.Keeper._fill

    def noting(*arguments: Any) -> LocationFilter:
        asked.append(fill_of(*arguments))
        return asked[-1]

    monkeypatch.setattr(keeping.Keeper, "_fill", noting)
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        publication = await filled(scene.open())
        good = published(publication)[b"k.raw.s0", Location(3, 2)]
        corrupt(publication, "k.raw.s0", 3, 2, flip(-1))
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.OBJECTS_REJECTED, 2)
        await depot.counters.reached(Counter.OBJECTS_REJECTED, 3)
        corrupt(publication, "k.raw.s0", 3, 2, flip(-1))
        await depot.kept()

        assert (await depot.contents(publication.name))[b"k.raw.s0", Location(3, 2)] == good
    everything, one = LocationFilter.absolute_start(0, 0), LocationFilter.group_end(3, 2, 3)
    assert asked[:2] == [everything] * 2
    assert len(asked) >= 4
    assert set(asked[2:]) == {one}


async def test_a_disk_that_fails_ends_the_store_and_not_in_silence(
    certificates: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def follow(spec: ConnectionSpec) -> None:
        async with warehouse(tmp_path / "store", certificates) as depot:
            monkeypatch.setattr(os, "fsync", failing)
            depot.follow(spec)
            await asyncio.Event().wait()

    async with on_stage(certificates) as scene:
        await filled(scene.open())
        with pytest.raises(ExceptionGroup) as caught:
            await follow(scene.spec)
        monkeypatch.undo()

    assert caught.value.subgroup(OSError) is not None
    async with warehouse(tmp_path / "store", certificates) as depot:
        assert len(depot.store.depot.shelf) == 0


# -- requests ------------------------------------------------------------------------------------


Ask = Callable[[MoqtConnection, PublicationName], Any]


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda conn, name: conn.subscribe(name.track(b"q.raw.s0")), "DOES_NOT_EXIST"),
        (lambda conn, name: conn.track_status(name.track(b"manifest.cose")), "DOES_NOT_EXIST"),
        (lambda conn, name: conn.subscribe_namespace(TrackNamespace((b"kvcs-1",))), "UNAUTHORIZED"),
        (
            lambda conn, name: conn.subscribe_namespace(TrackNamespace((b"kvcs-1", b"x" * 32))),
            "DOES_NOT_EXIST",
        ),
        (lambda conn, name: conn.publish_namespace(name.namespace), "UNINTERESTED"),
    ],
)
async def test_what_there_is_not_is_refused_by_the_code_that_says_so(
    certificates: CertificateFiles, tmp_path: Path, ask: Ask, code: str
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        publication = await filled(scene.open())
        await depot.kept()
        async with connect(depot.spec.uri, tls=depot.spec.tls) as conn:
            with pytest.raises(RequestRejected) as caught:
                await ask(conn, publication.name)

    assert caught.value.code is RequestErrorCode[code]


async def test_another_scope_is_not_served_nor_told_of(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    other = ScopeKey(bytes(range(1, 33)))
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        await filled(scene.open())
        await depot.kept()
        expected = Expectations.of_tokens(other, COMPAT, TOKENS)
        settings = hasty(deadline_s=1, discovery_timeout_s=0.5)
        events = await run(consume(expected, [depot.spec], CountingSink(), settings=settings))

    assert isinstance(events[-1], Failed)


async def test_what_comes_for_the_first_time_is_not_served_before_it_is_there(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        handle = scene.open()
        await fill(handle, range(2))
        await depot.counters.reached(Counter.OBJECTS_KEPT, 4 * BLOCKS)

        assert await told_of(depot.spec) == set()


# -- memory and time -----------------------------------------------------------------------------


async def test_payloads_stay_within_the_memory_that_is_given(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    """Many consumers at once, and room for no more than a manifest."""
    room = 12_000
    async with (
        warehouse(tmp_path / "store", certificates, memory_octets=room) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        await filled(scene.open())
        await depot.kept()
        await asyncio.gather(*(retrieved(depot.spec) for _ in range(4)))
        loader = depot.store.depot.gallery.loader

    assert loader.loaded <= room


async def test_everything_that_is_slow_happens_in_threads(
    certificates: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def note(where: Any, name: str) -> None:
        method = getattr(where, name)

        def noting(*arguments: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return method(*arguments, **more)

        monkeypatch.setattr(where, name, noting)

    for name in ("write", "read", "entries", "notes", "finish", "open_publication", "drop"):
        note(Archive, name)
    note(keeping, "examine")
    async with (
        warehouse(tmp_path / "store", certificates) as depot,
        on_stage(certificates) as scene,
    ):
        depot.follow(scene.spec)
        await filled(scene.open())
        await depot.kept()
        await retrieved(depot.spec)

    assert {name.rpartition("_")[0] for name in threads} == {
        "kvcs-write", "kvcs-read", "kvcs-examine",
    }  # fmt: skip


async def test_a_store_that_fails_to_listen_lets_go_of_its_folder(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="as it was"):
        async with Store(tmp_path / "store", SCOPE):
            raise RuntimeError("as it was")

    async with Store(tmp_path / "store", SCOPE), Producer(SCOPE):
        pass
