"""What a store keeps is listed at an index, found there and had over both ways, producer or not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcs.config import StoreSettings
from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.retrieval import consume
from kvcs.consumer.services import HttpIndex, HttpSections
from kvcs.consumer.trust import Expectations
from kvcs.depot.blocks import StoredBlocks
from kvcs.depot.listing import StoreListing
from kvcs.kvsp.http.blockclient import BlockClient, LayerSections
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.records import Candidate, Holding, Runs
from kvcs.kvsp.http.registrar import Registrar
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Layout
from kvcs.producer.publication import Publication
from kvcs.store.sink import ArraySink
from kvcs.telemetry import Counter
from kvcs.trust.scope import Protection, Scope
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import READER, WRITER, Stage
from tests.integration.http.scene import on_stage as services_on_stage
from tests.integration.http.test_index_command import index_command
from tests.integration.http.test_produce_over_http import produce, until_listed
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.faults import copied, standing
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    PATIENCE_S,
    QUICK,
    SCOPE,
    TOKENS,
    CountingSink,
    expectations,
    filled,
    on_stage,
    run,
    tensors,
)
from tests.integration.kvcs.test_recovery import assert_whole
from tests.integration.kvcs.test_store_command import store as store_command
from tests.integration.kvcs.warehouse import Warehouse, warehouse

pytestmark = pytest.mark.network

COMPAT_ID = SCOPE.compatibility_id(COMPAT)
KEYS = SCOPE.block_keys(COMPAT, TOKENS)
LAYOUT = Layout.of(COMPAT)
EVERY_LAYER = Runs(((0, LAYERS - 1),))
#: Somebody whose prompt goes another way after three blocks: no name can be computed from it.
OTHER_WAY = [*TOKENS[: 3 * BLOCK_TOKENS], *range(900, 912)]


@asynccontextmanager
async def listing(
    held: Warehouse, stage: Stage, blocks: StoredBlocks | None = None
) -> AsyncIterator[Registrar]:
    """Have what a store holds listed at an index, as of its listener and of some block service."""
    found = StoredBlocks(held.store.depot.read) if blocks is None else blocks
    client = stage.index()
    async with Registrar(client) as registrar:
        made = StoreListing(
            held.store.depot,
            held.store.terms,
            index=client,
            registrar=registrar,
            blocks=found,
            sessions=[held.spec.uri],
            services=["https://store.example:8444/"],
        )
        task = asyncio.create_task(made.run())
        try:
            yield registrar
        finally:
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled(), "it runs until it is told to stop"


async def told(stage: Stage, true: Callable[[list[Candidate]], bool]) -> list[Candidate]:
    """Ask until what is listed of our prompt is so; each question waits for its answer."""
    async with asyncio.timeout(PATIENCE_S), stage.index(READER) as index:
        while True:
            found = list((await index.longest(COMPAT_ID, KEYS, following=True)).candidates)
            if true(found):
                return found


async def tell_of(
    stage: Stage, publication: Publication, keys: tuple[bytes, ...] | None = None
) -> None:
    """Have the producer's word be known, without a producer."""
    own = tuple(key for segment in publication.segments for key in segment.keys)
    uri = PublicationUri("moqt://gone.example:4443/", publication.name)
    async with stage.index(WRITER) as index:
        await index.register(
            COMPAT_ID,
            publication.name.publication_id,
            Holding(uri, keys or own, EVERY_LAYER),
            lease_s=3600,
        )


async def forget(stage: Stage, publication: Publication) -> None:
    async with stage.index(WRITER) as index:
        await index.withdraw(COMPAT_ID, publication.name.publication_id)


async def kept(
    held: Warehouse, files: CertificateFiles, stage: Stage, scope: Scope | ScopeKey = SCOPE
) -> Publication:
    """Keep a publication, of which the index knows; its producer is gone then."""
    async with on_stage(files, scope=scope) as scene:
        publication = await filled(scene.open(), (2, 3))
        await tell_of(stage, publication)
        held.follow(scene.spec)
        await held.kept()
    return publication


async def test_what_is_kept_is_found_at_the_index_when_its_producer_is_long_gone(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    sink = ArraySink()
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates) as held,
        listing(held, stage),
    ):
        publication = await kept(held, certificates, stage)
        await told(stage, lambda found: len(found) == 3)
        await forget(stage, publication)
        found = await told(stage, lambda found: len(found) == 2)
        async with standing(certificates) as nobody, stage.index(READER) as index:
            events = await run(
                consume(
                    Expectations.of_tokens(SCOPE, COMPAT, OTHER_WAY),
                    [nobody.spec],
                    sink,
                    index=HttpIndex(index),
                    settings=QUICK,
                )
            )

    session, service = sorted(found, key=lambda one: str(one.uri), reverse=True)
    assert session.uri == PublicationUri(held.spec.uri, publication.name)
    assert service.uri == ServiceUri("https://store.example:8444")
    assert service.publication == publication.name.publication_id
    for one in found:
        assert (one.covers, one.blocks, one.layers) == (BLOCKS, BLOCKS, EVERY_LAYER)
        assert (one.encodings, one.complete) == (("raw",), True)
    complete = events[-1]
    assert isinstance(complete, PublicationComplete), complete
    assert complete.publication == publication.name
    for layer in range(LAYERS):
        for got, expected in zip((sink.k[layer], sink.v[layer]), tensors(layer, 0, 3), strict=True):
            assert got.tobytes() == expected.tobytes()


async def test_it_is_listed_again_after_a_restart_by_what_lies_on_its_disk(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with services_on_stage(certificates) as stage:
        async with warehouse(tmp_path, certificates) as held, listing(held, stage):
            publication = await kept(held, certificates, stage)
            await told(stage, lambda found: len(found) == 3)
        await forget(stage, publication)
        assert await told(stage, lambda found: not found) == []  # it has withdrawn itself
    # An index that was never told anything.
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates) as held,
        listing(held, stage),
    ):
        found = await told(stage, lambda found: len(found) == 2)

    assert {one.covers for one in found} == {BLOCKS}


async def test_keys_that_the_manifest_does_not_bear_out_are_not_listed_and_are_asked_for_again(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates) as held,
    ):
        publication = await kept(held, certificates, stage)
        wrong = (*KEYS[:4], b"x" * 32, b"y" * 32)  # a chain that is longer is told instead
        await tell_of(stage, publication, keys=wrong)
        before = stage.counters[Counter.HTTP_REQUESTS]
        async with listing(held, stage):
            await stage.counters.reached(Counter.HTTP_REQUESTS, before + 2)
            assert len(await told(stage, bool)) == 1
            assert await held.store.depot.chain(publication.name) is None
            await tell_of(stage, publication)
            found = await told(stage, lambda found: len(found) == 3)

    assert {one.covers for one in found} == {BLOCKS}


async def test_what_a_store_lets_go_is_listed_no_more(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    blocks: list[StoredBlocks] = []
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates) as held,
    ):
        blocks.append(StoredBlocks(held.store.depot.read))
        async with listing(held, stage, blocks[0]):
            publication = await kept(held, certificates, stage)
            await told(stage, lambda found: len(found) == 3)
            name = BlockName(SCOPE.scope_id, COMPAT_ID, KEYS[0])
            assert await blocks[0].find(name, None) is not None
            held.store.depot.drop(publication.name, "a test")
            [left] = await told(stage, lambda found: len(found) == 1)
            assert str(left.uri).startswith("moqt://gone.example")
            assert await blocks[0].find(name, None) is None


async def test_of_what_was_damaged_the_segments_before_it_are_listed(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates) as held,
        listing(held, stage),
    ):
        publication = await kept(held, certificates, stage)
        await told(stage, lambda found: len(found) == 3)
        await forget(stage, publication)
        _, tracks = await held.store.depot.contents(publication.name)
        [lost, *_] = tracks[b"v.raw.s1"]
        held.store.depot.lose(publication.name, b"v.raw.s1", lost)
        # Its second segment begins at the third block.
        found = await told(stage, lambda found: {one.blocks for one in found} == {2})

    assert len(found) == 2
    assert not any(one.complete for one in found)


async def test_an_index_that_is_dead_costs_a_store_nothing_but_its_listing(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with warehouse(tmp_path, certificates) as held:
        async with services_on_stage(certificates) as stage:
            publication = await kept(held, certificates, stage)
        port = int(stage.base.rpartition(":")[2])
        async with listing(held, stage):
            await held.counters.reached(Counter.INDEX_FAILURES, 2)
            # It serves meanwhile, and is listed once the index is back and told.
            assert await held.contents(publication.name)
            async with services_on_stage(certificates, port=port) as back:
                await tell_of(back, publication)
                found = await told(back, lambda found: len(found) == 3)

    assert {one.covers for one in found} == {BLOCKS}


async def test_what_a_store_cannot_open_any_more_keeps_nothing_else_from_being_listed(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with services_on_stage(certificates) as stage:
        async with warehouse(tmp_path, certificates, scope=Scope(SCOPE, Protection())) as held:
            sealed = await kept(held, certificates, stage, Scope(SCOPE, Protection()))
        async with warehouse(tmp_path, certificates) as held, listing(held, stage):
            publication = await kept(held, certificates, stage)
            found = await told(stage, lambda found: len(found) == 4)

    listed = [one.uri for one in found if not str(one.uri).startswith("moqt://gone.example")]
    assert len(listed) == 2
    assert any(publication.name.publication_id.hex() in str(uri) for uri in listed)
    assert not any(sealed.name.publication_id.hex() in str(uri) for uri in listed)


@pytest.mark.parametrize("scope", [SCOPE, Scope(SCOPE, Protection())], ids=["clear", "sealed"])
async def test_what_no_relay_has_is_brought_by_a_store_over_https(
    certificates: CertificateFiles, tmp_path: Path, scope: Scope | ScopeKey
) -> None:
    sink, is_sealed = CountingSink(), scope is not SCOPE
    async with (
        services_on_stage(certificates) as stage,
        warehouse(tmp_path, certificates, scope=scope) as held,
    ):
        blocks = StoredBlocks(held.store.depot.read, sealed=is_sealed)
        async with (
            listing(held, stage, blocks),
            services_on_stage(certificates, holder=blocks) as service,
            service.blocks() as client,
            on_stage(certificates, scope=scope) as scene,
            standing(
                certificates, copied(await filled(scene.open()), lacks=(b"v.raw.s0", 3))
            ) as lacking,
        ):
            await kept(held, certificates, stage, scope)
            await told(stage, lambda found: len(found) == 3)
            sections = [HttpSections(client)]
            events = await run(
                consume(expectations(scope), [lacking.spec], sink, blocks=sections, settings=QUICK)
            )

    assert_whole(events, sink)


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_command_serves_blocks_over_https_and_lists_them(desk: Desk) -> None:
    tls = ClientTls(ca_file=desk.certificates.ca_file)
    async with started(index_command(desk.certificates, Path(desk["tokens"]))) as index_process:
        index_port = (await event_of(index_process, "listening"))["port"]
        base = f"https://127.0.0.1:{index_port}"
        told_of = ["--index", base, "--index-token-file", desk["mine.token"]]
        served_by = ["--http", "127.0.0.1:0", "--tokens-file", desk["tokens"]]
        async with started(produce(desk, index_port)) as producer:
            port = (await event_of(producer, "listening"))["port"]
            finished = await event_of(producer, "publication-finished")
            follow = ["--connect", f"moqt://127.0.0.1:{port}/"]
            async with started(
                [*store_command(desk, *follow, *told_of, *served_by), "--drain-s", "0"]
            ) as kept_by:
                session = await event_of(kept_by, "listening")
                service = await event_of(kept_by, "listening-http")
                await event_of(kept_by, "publication-kept")
                async with IndexClient(base, READER, SCOPE.scope_id, tls=tls) as index:
                    await until_listed(index, 4, complete=True)
                    producer.terminate()
                    assert await asyncio.wait_for(producer.wait(), PATIENCE_S) == 0
                    found = await until_listed(index, 2, complete=True)
                    uris = {str(one.uri).partition("#")[0] for one in found.candidates}
                    async with BlockClient(
                        f"https://127.0.0.1:{service['port']}", READER, tls=tls
                    ) as blocks:
                        got = [
                            one
                            async for one in blocks.wanted(
                                SCOPE.scope_id,
                                COMPAT_ID,
                                [(key, layer) for key in KEYS for layer in range(LAYERS)],
                                LAYOUT,
                                publication=bytes.fromhex(finished["publication"]),
                            )
                        ]
                    kept_by.terminate()
                    assert await asyncio.wait_for(kept_by.wait(), PATIENCE_S) == 0
                    assert (await index.longest(COMPAT_ID, KEYS)).candidates == ()

    assert uris == {
        f"moqt://127.0.0.1:{session['port']}/", f"https://127.0.0.1:{service['port']}",
    }  # fmt: skip
    assert len(got) == BLOCKS * LAYERS
    for one in got:
        assert isinstance(one, LayerSections)
        k, v = tensors(one.layer, KEYS.index(one.block_key), 1)
        assert (bytes(one.k), bytes(one.v)) == (k.tobytes(), v.tobytes())


def test_blocks_are_served_only_where_an_index_knows_their_keys(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "connect": ("moqt://relay:4443/",), "http_listen": ("127.0.0.1", 0),
        "tokens_file": tmp_path / "tokens", "certificate_file": certificates.certificate_file,
        "key_file": certificates.key_file,
    }  # fmt: skip
    with pytest.raises(ValueError, match="index_uri is not set, expected an index"):
        StoreSettings(**given)
