"""``kvcs fetch``: a part of a finished cache into a file, and what of it is not there."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvcs.cli.main import main
from kvcs.profile.naming import PublicationName
from tests.integration.kvcs.desk import Desk, started
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    PATIENCE_S,
    TOKENS,
    Scene,
    corrupt,
    filled,
    flip,
    on_stage,
    tensors,
)

pytestmark = pytest.mark.network


def port_of(scene: Scene) -> int:
    return int(scene.spec.uri.rsplit(":", 1)[1].rstrip("/"))


def in_hex(name: PublicationName) -> str:
    return "kvcs-1/" + "/".join(field.hex() for field in name.namespace.fields[1:])


async def run(command: list[str]) -> tuple[int, str, str]:
    """Run a command in a process; return exit status, standard output and standard error."""
    async with started(command) as process, asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def assert_part(found: dict[str, Any], layers: range, first: int, blocks: int) -> None:
    """The file has room for all layers, and these blocks of these."""
    assert len(found) == 2 * LAYERS
    for layer in layers:
        for name, expected in zip("kv", tensors(layer, first, blocks), strict=True):
            np.testing.assert_array_equal(found[f"{name}.{layer}"].view("u2"), expected.view("u2"))


@pytest.mark.parametrize(("blocks", "first", "count"), [("2", 0, 2), ("1-3", 1, 3), ("4-4", 4, 1)])
async def test_a_part_is_written_with_a_note_of_what_it_is(
    desk: Desk, blocks: str, first: int, count: int
) -> None:
    async with on_stage(desk.certificates) as scene:
        await filled(scene.open(), segments=(2, 3))
        status, out, err = await run(
            desk.fetch(
                *("--layers", "2-4", "--blocks", blocks, "--json"),
                *("--out", desk["part.safetensors"]),
                port=port_of(scene),
            )
        )

    assert status == 0, err
    last = events(out)[-1]
    assert last["event"] == "publication-complete"
    assert (last["summary"]["objects"], last["summary"]["unwanted"]) == (2 * 3 * count, 0)
    assert_part(load_file(desk["part.safetensors"]), range(2, 5), first, count)
    beside = json.loads((desk.folder / "part.json").read_text())
    assert beside["part"] == {"layers": [2, 4], "blocks": [first, first + count - 1]}
    assert beside["tokens"] == TOKENS[first * BLOCK_TOKENS : (first + count) * BLOCK_TOKENS]
    assert beside["descriptor"] == COMPAT.members()


async def test_one_segment_of_a_publication_is_found_by_its_name_without_tokens(
    desk: Desk,
) -> None:
    descriptor = desk.write("descriptor.json", json.dumps(COMPAT.members()))
    async with on_stage(desk.certificates) as scene:
        publication = await filled(scene.open(), segments=(2, 3))
        status, out, err = await run(
            desk.fetch(
                *("--publication", in_hex(publication.name), "--segment", "1"),
                *("--out", desk["part.safetensors"]),
                prompt=descriptor,
                port=port_of(scene),
            )
        )

    assert status == 0, err
    assert_part(load_file(desk["part.safetensors"]), range(LAYERS), 2, 3)
    beside = json.loads((desk.folder / "part.json").read_text())
    assert beside["part"] == {"segment": 1}
    assert "tokens" not in beside
    lines = out.splitlines()
    progress = [line for line in lines if line.startswith("layer ready: ")]
    assert len(progress) == LAYERS
    so_far = [int(line.split("objects=")[1].split()[0]) for line in progress]
    assert so_far == sorted(so_far)
    assert so_far[-1] == 2 * 3 * LAYERS


async def test_the_whole_cache_is_a_file_without_a_note(desk: Desk) -> None:
    async with on_stage(desk.certificates) as scene:
        await filled(scene.open())
        status, _, err = await run(
            desk.fetch("--out", desk["whole.safetensors"], port=port_of(scene))
        )

    assert status == 0, err
    assert_part(load_file(desk["whole.safetensors"]), range(LAYERS), 0, BLOCKS)
    beside = json.loads((desk.folder / "whole.json").read_text())
    assert sorted(beside) == ["descriptor", "tokens"]


async def test_what_is_not_there_is_told_line_by_line_and_no_file_is_written(desk: Desk) -> None:
    async with on_stage(desk.certificates) as scene:
        publication = await filled(scene.open())
        corrupt(publication, "k.raw.s0", 3, 4, flip(100))
        corrupt(publication, "v.raw.s0", 1, 0, flip(100))
        command = desk.fetch("--out", desk["cache.out"], port=port_of(scene))
        status, out, _ = await run(command)
        as_json = await run([*command, "--json"])

    assert status == as_json[0] == 8
    assert [line for line in out.splitlines() if line.startswith("not there: ")] == [
        "not there: what=k.raw.s0 layer 3 block 4",
        "not there: what=v.raw.s0 layer 1 block 0",
    ]
    assert len(events(as_json[1])[-1]["missing"]) == 2
    assert not (desk.folder / "cache.out").exists()


async def test_what_was_never_published_is_told_as_well(desk: Desk) -> None:
    descriptor = desk.write("descriptor.json", json.dumps(COMPAT.members()))
    async with on_stage(desk.certificates) as scene:
        publication = await filled(scene.open(), segments=(3,))
        status, out, _ = await run(
            desk.fetch(
                *("--publication", in_hex(publication.name), "--blocks", "1-4"),
                prompt=descriptor,
                port=port_of(scene),
            )
        )

    assert status == 8
    assert "not published: blocks=3-4" in out.splitlines()


async def test_another_publication_than_the_one_named_is_not_taken(desk: Desk) -> None:
    async with on_stage(desk.certificates) as scene:
        one = await filled(scene.open())
        named = PublicationName(
            one.name.scope_id, one.name.compatibility_id, one.name.anchor_key, bytes(16)
        )
        status, _, err = await run(desk.fetch("--publication", in_hex(named), port=port_of(scene)))

    assert status == 4
    assert "no such publication here" in err


HEX_NAME = "kvcs-1/" + "/".join(("00" * 32, "00" * 32, "00" * 32, "00" * 16))


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--layers", "4-6"], 2, "expected FIRST-LAST within 0-5"),
        (["--layers", "-3"], 2, "--layers"),
        (["--layers", "²"], 2, "--layers is '²'"),
        (["--blocks", "0"], 2, "--blocks is '0'"),
        (["--blocks", "3-2"], 2, "--blocks is '3-2'"),
        (["--blocks", "x"], 2, "--blocks is 'x'"),
        (["--blocks", "9" * 5000], 2, "--blocks"),
        (["--blocks", "6"], 2, "the prompt has 5 blocks"),
        (["--blocks", "4-5"], 2, "the prompt has 5 blocks"),
        (["--segment", "1-2"], 2, "--segment is '1-2'"),
        (["--segment", "one"], 2, "--segment is 'one'"),
        (["--publication", "kvcs-1/xx"], 7, "not hex"),
        (["--publication", "kvcs-1/00/00"], 7, "3 fields, expected 5"),
        (["--publication", f"{HEX_NAME}--k.raw.s0"], 7, "without a track"),
        (["--publication", HEX_NAME], 2, "another scope"),
        (["--fetch", "often"], 2, "fetch is 'often'"),
        (["--out", "no-such-folder/x"], 2, "no-such-folder"),
    ],
)
def test_what_fetch_cannot_use_is_named(
    desk: Desk,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    named: str,
) -> None:
    try:
        found = main(desk.fetch(*arguments))
    except SystemExit as exc:  # the parser's way
        found = int(exc.code or 0)

    out, err = capsys.readouterr()
    assert (found, out) == (status, "")
    [line] = [line for line in err.splitlines() if line.startswith("kvcs")]
    assert named in line
    assert "Traceback" not in err


def test_tokens_are_missed_unless_a_publication_is_named(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor = desk.write("descriptor.json", json.dumps(COMPAT.members()))

    assert main(desk.fetch(prompt=descriptor)) == 2
    assert "no member 'tokens'" in capsys.readouterr().err
