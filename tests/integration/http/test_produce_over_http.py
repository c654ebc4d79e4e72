"""``kvcs produce --http --index`` with ``kvcs index`` beside it, as processes."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kvcs.errors import NotFound
from kvcs.kvsp.http.blockclient import BlockClient, LayerSections
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.questions import Longest
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.kvsp.layout import Layout
from moqt.aio import ClientTls
from tests.integration.http.scene import READER
from tests.integration.http.scene import on_stage as service_on_stage
from tests.integration.http.test_index_command import index_command
from tests.integration.http.test_retrieval_over_http import holder
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import BLOCKS, COMPAT, LAYERS, PATIENCE_S, SCOPE, TOKENS, tensors
from tests.integration.kvcs.test_recovery import beside

pytestmark = pytest.mark.network

LAYOUT = Layout.of(COMPAT)
COMPAT_ID = SCOPE.compatibility_id(COMPAT)
KEYS = SCOPE.block_keys(COMPAT, TOKENS)
#: Somebody whose prompt goes another way after three blocks.
CHAIN = SCOPE.block_keys(COMPAT, [*TOKENS[:12], *range(900, 912)])


def produce(desk: Desk, index_port: int, *more: str) -> list[str]:
    return [
        *desk.produce("--json", "--drain-s", "1", "--ca-file", str(desk.certificates.ca_file)),
        "--http", "127.0.0.1:0", "--tokens-file", desk["tokens"],
        "--index", f"https://127.0.0.1:{index_port}", "--index-token-file", desk["mine.token"],
        *more,
    ]  # fmt: skip


async def until_listed(index: IndexClient, holders: int, *, complete: bool) -> Longest:
    """Ask until so many holders are listed; each question waits for its answer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await index.longest(COMPAT_ID, CHAIN)
            told = found.candidates
            if len(told) == holders and all(one.complete is complete for one in told):
                return found


async def test_what_is_produced_is_found_at_the_index_and_had_over_http(desk: Desk) -> None:
    tls = ClientTls(ca_file=desk.certificates.ca_file)
    async with started(index_command(desk.certificates, Path(desk["tokens"]))) as index_process:
        index_port = (await event_of(index_process, "listening"))["port"]
        base = f"https://127.0.0.1:{index_port}"
        async with (
            IndexClient(base, READER, SCOPE.scope_id, tls=tls) as index,
            started(produce(desk, index_port)) as producer,
        ):
            session = await event_of(producer, "listening")
            served = await event_of(producer, "listening-http")
            opened = await event_of(producer, "publication-opened")
            found = await until_listed(index, 2, complete=True)
            [over_http] = [one for one in found.candidates if isinstance(one.uri, ServiceUri)]
            [over_moqt] = [one for one in found.candidates if isinstance(one.uri, PublicationUri)]
            async with BlockClient(str(over_http.uri), READER, tls=tls) as blocks:
                got = [
                    one
                    async for one in blocks.sections(
                        SCOPE.scope_id, COMPAT_ID, KEYS, Runs(((0, LAYERS - 1),)), LAYOUT,
                        publication=over_http.publication,
                    )
                ]  # fmt: skip
                with pytest.raises(NotFound):
                    await blocks.layer(BlockName(SCOPE.scope_id, COMPAT_ID, CHAIN[4]), 0, LAYOUT)
            producer.terminate()
            assert await asyncio.wait_for(producer.wait(), PATIENCE_S) == 0
            assert (await index.longest(COMPAT_ID, CHAIN)).candidates == ()

    publication = bytes.fromhex(opened["publication"])
    assert isinstance(over_moqt.uri, PublicationUri)
    assert over_moqt.uri.session == f"moqt://127.0.0.1:{session['port']}/"
    assert over_moqt.uri.name.publication_id == over_http.publication == publication
    assert str(over_http.uri) == f"https://127.0.0.1:{served['port']}"
    for one in (over_http, over_moqt):
        # Three of the blocks that were asked about, of five that it has.
        assert (one.covers, one.blocks, one.layers) == (3, BLOCKS, Runs(((0, LAYERS - 1),)))
    for layer in range(LAYERS):
        k, v = tensors(layer)
        parts = [one for one in got if isinstance(one, LayerSections) and one.layer == layer]
        assert b"".join(bytes(one.k) for one in parts) == k.tobytes()
        assert b"".join(bytes(one.v) for one in parts) == v.tobytes()


@pytest.mark.slow
async def test_it_is_listed_while_it_is_produced_and_withdrawn_when_it_stops(desk: Desk) -> None:
    tls = ClientTls(ca_file=desk.certificates.ca_file)
    async with started(index_command(desk.certificates, Path(desk["tokens"]))) as index_process:
        index_port = (await event_of(index_process, "listening"))["port"]
        slow = produce(desk, index_port, "--layer-interval-ms", "100000")
        async with (
            IndexClient(
                f"https://127.0.0.1:{index_port}", READER, SCOPE.scope_id, tls=tls
            ) as index,
            started(slow) as producer,
        ):
            found = await until_listed(index, 1, complete=False)
            producer.terminate()
            assert await asyncio.wait_for(producer.wait(), PATIENCE_S) == 0
            assert (await index.longest(COMPAT_ID, CHAIN)).candidates == ()

    [one] = found.candidates
    assert isinstance(one.uri, PublicationUri)
    assert len(one.layers) == 0


@pytest.mark.slow
async def test_a_dead_index_does_not_keep_it_from_producing(desk: Desk) -> None:
    async with started(produce(desk, 1)) as producer:
        await event_of(producer, "publication-finished")
        producer.terminate()
        assert await asyncio.wait_for(producer.wait(), PATIENCE_S) == 0
        assert producer.stderr is not None
        lines = (await producer.stderr.read()).decode().splitlines()

    told = [line for line in lines if "index does not answer" in line]
    assert len(told) == 1
    assert "https://127.0.0.1:1" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "more", "says"),
    [
        ("--tokens-file", [], "tokens_file is not set, expected a file since http_listen is"),
        ("--index-token-file", [], "index_token_file is not set, expected a file"),
        ("--index", ["--index", "http://host"], "expected https://HOST:PORT/PATH"),
        ("--http", ["--http", "host"], "http_listen is 'host' (from --http"),
        (None, ["--reached-at", "ftp://host"], "expected moqt://HOST:PORT/PATH instead of 'ftp"),
        ("--tokens-file", ["--tokens-file", "cache.json"], "expected 0600"),
        ("--index-token-file", ["--index-token-file", "none"], "token file none: No such file"),
    ],
)
async def test_what_it_cannot_work_with_is_said_in_one_line(
    desk: Desk, without: str | None, more: list[str], says: str
) -> None:
    command = produce(desk, 1)
    with contextlib.suppress(ValueError):
        command = desk.without(command, without or "")
    async with started([*command, *more]) as producer, asyncio.timeout(PATIENCE_S):
        _, err = await producer.communicate()

    assert producer.returncode == 2
    assert says in err.decode()
    assert err.count(b"\n") == 1


@pytest.mark.slow
async def test_a_prompt_that_diverges_is_served_by_what_the_index_tells(desk: Desk) -> None:
    """Three of five blocks are the prompt's; no name of the publication can be computed from it."""
    prompt = desk.write("prompt.json", desk.side(tokens=[*TOKENS[:12], *range(900, 912)]))
    async with started(index_command(desk.certificates, Path(desk["tokens"]))) as index_process:
        index_port = (await event_of(index_process, "listening"))["port"]
        base = f"https://127.0.0.1:{index_port}"
        tls = ClientTls(ca_file=desk.certificates.ca_file)
        async with (
            IndexClient(base, READER, SCOPE.scope_id, tls=tls) as index,
            started(produce(desk, index_port)) as producer,
        ):
            port = (await event_of(producer, "listening"))["port"]
            await until_listed(index, 2, complete=True)
            told = ["--index", base, "--index-token-file", desk["mine.token"], "--json"]
            out = desk["out.safetensors"]
            asked = desk.consume("--out", out, *told, prompt=prompt, port=port)
            async with started(asked) as consumer, asyncio.timeout(PATIENCE_S):
                complete = await event_of(consumer, "publication-complete")
                assert await consumer.wait() == 0
            # Without the index there is nothing that it could find.
            alone = desk.consume("--discovery-timeout-s", "0.5", prompt=prompt, port=port)
            async with started(alone) as consumer, asyncio.timeout(PATIENCE_S):
                assert await consumer.wait() == 3

    assert complete["token_end"] == 12
    received = load_file(out)
    for layer in range(LAYERS):
        k, v = tensors(layer, 0, 3)
        assert received[f"k.{layer}"].tobytes() == k.tobytes()
        assert received[f"v.{layer}"].tobytes() == v.tobytes()


@pytest.mark.slow
async def test_a_dead_index_costs_a_consumer_a_log_line(desk: Desk) -> None:
    async with started(desk.produce("--json", "--drain-s", "1")) as producer:
        port = (await event_of(producer, "listening"))["port"]
        await event_of(producer, "publication-finished")
        told = ["--index", "https://127.0.0.1:1", "--index-token-file", desk["mine.token"]]
        async with started(desk.consume(*told, port=port)) as consumer:
            async with asyncio.timeout(PATIENCE_S):
                _, err = await consumer.communicate()

    assert consumer.returncode == 0
    assert b"index" in err


@pytest.mark.slow
async def test_a_consumer_asks_a_block_service_for_what_no_relay_has(desk: Desk) -> None:
    """Here no relay has anything of one layer, and the block service all of it."""
    async with (
        service_on_stage(desk.certificates, holder=holder()) as stage,
        beside(desk.certificates, False, lacks=(b"k.raw.s0", 2)) as specs,
    ):
        [port] = [int(spec.uri.rstrip("/").rpartition(":")[2]) for spec in specs]
        told = ["--block-services", stage.base, "--block-token-file", desk["mine.token"]]
        out = desk["out.safetensors"]
        consume = desk.consume("--out", out, "--json", *told, port=port)
        async with started(consume) as consumer, asyncio.timeout(PATIENCE_S):
            _, err = await consumer.communicate()
            assert consumer.returncode == 0, err.decode()
        without = desk.consume("--deadline-s", "2", port=port)
        async with started(without) as consumer, asyncio.timeout(PATIENCE_S):
            await consumer.communicate()
            assert consumer.returncode in (8, 10)  # incomplete, or the deadline passed

    received = load_file(out)
    for layer in range(LAYERS):
        k, v = tensors(layer)
        assert received[f"k.{layer}"].tobytes() == k.tobytes()
        assert received[f"v.{layer}"].tobytes() == v.tobytes()
