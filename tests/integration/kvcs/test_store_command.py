"""``kvcs store``, with the other commands around it, as processes."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.main import main
from kvcs.depot.archive import Archive
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.naming import PublicationName
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import PATIENCE_S

pytestmark = pytest.mark.network


def store(desk: Desk, *more: str) -> list[str]:
    files = desk.certificates
    return [
        "store", desk["kept"], "--json", "--listen", "127.0.0.1:0", "--drain-s", "5",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
        "--scope-key-file", desk["scope.key"], "--ca-file", str(files.ca_file), *more,
    ]  # fmt: skip


async def output_of(command: Sequence[str], status: int = 0) -> list[dict[str, Any]]:
    """Run a command to its end, and return the events that it told."""
    async with started(command) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode == status, err.decode()
    return [json.loads(line) for line in out.splitlines()]


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
            [while_it_runs] = await output_of(["store", "--list", desk["kept"], "--json"])
            assert await stopped(first) == 0
        assert await stopped(producer) == 0
    async with started(store(desk)) as second:
        assert (await event_of(second, "opened"))["publications"] == 1
        port = (await event_of(second, "listening"))["port"]
        told = await output_of([*desk.consume("--json"), "--connect", f"moqt://127.0.0.1:{port}/"])
        assert await stopped(second) == 0
    [listed] = await output_of(["store", "--list", desk["kept"], "--json"])

    assert told[-1]["event"] == "publication-complete"
    assert kept["publication"] == finished["publication"] == listed["publication"]
    assert (listed["state"], listed["octets"]) == ("whole", finished["octets"])
    assert while_it_runs["publication"] == kept["publication"]


async def test_a_folder_in_use_is_refused_in_one_line(desk: Desk) -> None:
    async with started(store(desk)) as first:
        await event_of(first, "listening")
        async with started(store(desk)) as second, asyncio.timeout(PATIENCE_S):
            _, err = await second.communicate()

    assert second.returncode == 2
    assert err.decode() == f"kvcs: store {desk['kept']}: in use by another process\n"


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
async def test_what_cannot_be_used_is_said_in_one_line(
    desk: Desk, more: list[str], line: str
) -> None:
    async with started(store(desk, *more)) as process, asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()

    assert process.returncode == 2
    assert err.decode().startswith(f"kvcs: {line}")
    assert err.decode().count("\n") == 1


async def test_nothing_to_do_is_a_mistake(desk: Desk) -> None:
    command = desk.without(store(desk), "--listen")
    async with started(command) as process, asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()

    assert process.returncode == 2
    assert err.decode() == (
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
