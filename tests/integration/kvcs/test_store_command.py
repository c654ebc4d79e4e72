"""``kvcs store``, with the other commands around it, as processes."""

import asyncio
from pathlib import Path

import pytest

from kvcs.cli.main import main
from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.retrieval import ConnectionSpec, consume
from kvcs.depot.archive import Archive, listing
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.naming import PublicationName
from moqt.aio import ClientTls
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    BLOCKS,
    PATIENCE_S,
    QUICK,
    CountingSink,
    assert_same_cache,
    expectations,
    run,
)

pytestmark = pytest.mark.network


def store(desk: Desk, *more: str) -> list[str]:
    files = desk.certificates
    return [
        "store", desk["kept"], "--json", "--listen", "127.0.0.1:0", "--drain-s", "5",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
        "--scope-key-file", desk["scope.key"], "--ca-file", str(files.ca_file), *more,
    ]  # fmt: skip


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.terminate()
    return await asyncio.wait_for(process.wait(), PATIENCE_S)


async def test_what_a_producer_left_is_kept_listed_and_served_by_the_next_process(
    desk: Desk,
) -> None:
    async with started(desk.produce("--json", "--drain-s", "0")) as producer:
        port = (await event_of(producer, "listening"))["port"]
        finished = await event_of(producer, "publication-finished")
        async with started(store(desk, "--connect", f"moqt://127.0.0.1:{port}/")) as first:
            assert (await event_of(first, "opened"))["publications"] == 0
            kept = await event_of(first, "publication-kept")
            [while_it_runs] = listing(Path(desk["kept"]))
            assert await stopped(first) == 0
        assert await stopped(producer) == 0
    async with started(store(desk)) as second:
        assert (await event_of(second, "opened"))["publications"] == 1
        port = (await event_of(second, "listening"))["port"]
        spec = ConnectionSpec(
            uri=f"moqt://127.0.0.1:{port}/", tls=ClientTls(ca_file=desk.certificates.ca_file)
        )
        sink = CountingSink()
        events = await run(consume(expectations(), [spec], sink, settings=QUICK))
        assert await stopped(second) == 0

    assert isinstance(events[-1], PublicationComplete)
    assert_same_cache(sink)
    assert kept["publication"] == finished["publication"]
    assert kept["publication"] == while_it_runs.name.publication_id.hex()
    assert (kept["state"], kept["octets"]) == ("whole", finished["octets"])
    assert (while_it_runs.finished, while_it_runs.octets) == (True, finished["octets"])


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3])
async def test_one_that_is_killed_while_a_cache_is_made_has_all_of_it_in_the_end(
    desk: Desk, after: int
) -> None:
    produce = desk.produce("--json", "--drain-s", "0", "--layer-interval-ms", "400")
    async with started([*produce, "--after-sessions", "1"]) as producer:
        port = (await event_of(producer, "listening"))["port"]
        command = store(desk, "--connect", f"moqt://127.0.0.1:{port}/")
        async with started(command) as first:
            await event_of(first, "listening")
            while (await event_of(first, "publication-progress"))["objects"] < after * 2 * BLOCKS:
                pass
            first.kill()
            await first.wait()
        [left] = listing(Path(desk["kept"]))
        async with started(command) as second:
            assert (await event_of(second, "opened"))["octets"] > 0
            kept = await event_of(second, "publication-kept")
            finished = await event_of(producer, "publication-finished")
            assert await stopped(second) == 0
        await stopped(producer)

    assert not left.finished
    assert left.name.publication_id.hex() == kept["publication"] == finished["publication"]
    assert kept["octets"] == finished["octets"]


def test_a_folder_in_use_is_refused_in_one_line(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Archive(Path(desk["kept"]))
    status = main(store(desk))
    archive.close()

    assert status == 2
    assert capsys.readouterr().err == f"kvcs: store {desk['kept']}: in use by another process\n"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            ["--only", "abcd"],
            "only is 'abcd', expected COMPATIBILITY[/ANCHOR[/PUBLICATION]]: 64, 64 and 32 hex ",
        ),
        (["--budget-octets", "1k"], "budget_octets is '1k' (from --budget-octets), "),
        (["--connect", "relay:1"], "connect is ['relay:1'] (from --connect), expected moqt://"),
        (["--require-signature"], "trust is not set, expected a public key since "),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    desk: Desk, capsys: pytest.CaptureFixture[str], more: list[str], line: str
) -> None:
    assert main(store(desk, *more)) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"kvcs: {line}")
    assert told.count("\n") == 1


def test_nothing_to_do_is_a_mistake(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(desk.without(store(desk), "--listen")) == 2
    assert capsys.readouterr().err == (
        "kvcs: none of connect, listen and announce is set, expected one at least\n"
    )


def test_what_is_held_is_listed_for_people(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    archive = Archive(Path(desk["kept"]))
    scope_id = ScopeKey(bytes(range(32))).scope_id
    name = PublicationName(scope_id, b"c" * 32, b"a" * 32, b"p" * 16)
    archive.open_publication(name, now=1e9)
    archive.close()

    assert main(["store", "--list", desk["kept"]]) == 0
    assert capsys.readouterr().out == (
        f"publication: scope={scope_id.hex()[:8]} compatibility=63636363 anchor=61616161 "
        "publication=70707070 state=partial objects=0 octets=0 kept_at=2001-09-09T01:46:40Z "
        "used_at=2001-09-09T01:46:40Z\n"
    )


def test_what_is_no_store_cannot_be_listed(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--list", desk["nothing"]]) == 2
    assert capsys.readouterr().err == (
        f"kvcs: store {desk['nothing']}: nothing is kept there, expected a file kvcs-store\n"
    )
