"""What README.md says is run: its Python, its commands, its tables."""

import asyncio
import math
import os
import re
import shlex
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvcs.advice import CODECS
from kvcs.cli.exits import EXIT_CODES, EXIT_INTERNAL
from kvcs.cli.main import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    SUBCOMMANDS,
    main,
    make_parser,
)
from kvcs.config import SETTINGS
from kvcs.kvsp.standard import standard_codecs
from moqt.aio.tls import make_certificates

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def shell_lines(papers: str = "README.md") -> Iterator[list[str]]:
    """Yield the commands of the shell blocks as words, without comments or where they write."""
    text = (ROOT / papers).read_text()
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words[: words.index(">")] if ">" in words else words


def rows(first_cell: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with ``first_cell``."""
    head = next(line for line in README.splitlines() if line.startswith(f"| {first_cell} |"))
    table = README[README.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) == 3
    assert len(list(shell_lines())) >= 6
    assert len(list(shell_lines("CONTRIBUTING.md"))) == 2


@pytest.mark.parametrize("papers", ["README.md", "CONTRIBUTING.md"])
def test_scripts_exist_and_can_be_executed(papers: str) -> None:
    named = {words[0] for words in shell_lines(papers) if words[0].startswith("./")}

    assert named
    assert [name for name in named if not os.access(ROOT / name, os.X_OK)] == []


def test_every_shown_command_is_one_that_the_parser_takes() -> None:
    shown = [words[1:] for words in shell_lines() if words[0] == "kvcs"]

    assert {argv[0] for argv in shown} >= {"keys", "produce", "consume"}
    for argv in shown:
        assert isinstance(make_parser().parse_args(argv), Namespace)


def test_the_commands_are_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    named = [row[0].strip("`").removeprefix("kvcs ") for row in rows("command")]

    assert sorted(named) == sorted(SUBCOMMANDS)
    for name in named:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
    assert capsys.readouterr().out


def test_every_exit_status_is_there() -> None:
    codes = {int(cell) for row in rows("exit status") for cell in row[::2] if cell}

    signals = {EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE}
    assert codes == {0, *EXIT_CODES.values(), EXIT_INTERNAL, *signals}


def test_every_codec_is_there_and_says_whether_it_is_lossless() -> None:
    told = [(name.strip("`"), kept) for name, kept, *_ in rows("codec")]

    assert told == [(c.name, "lossless" if c.lossless else "lossy") for c in standard_codecs()]


def test_the_figures_of_codecs_are_those_that_the_advice_counts_with() -> None:
    told = {name.strip("`"): (left, decoded) for name, _, left, _, decoded in rows("codec")}

    assert told == {
        name: (f"{ratio:.2f}", "" if decoded == math.inf else f"{decoded / 1e6:g}")
        for name, (ratio, decoded) in CODECS.items()
    }


#: Who has a setting, where saying it one by one would be tedious.
USERS = {
    ("produce", "consume"): "both",
    ("produce", "consume", "relay", "store"): "all",
    ("produce", "consume", "relay", "store", "index"): "every",
}


def shown_defaults(name: str) -> set[str]:
    """Return what the table may say of a setting's default."""
    fields = [cls.model_fields[name] for cls in SETTINGS if name in cls.model_fields]
    return {_shown(name, None if f.is_required() else f.get_default()) for f in fields}


def _shown(name: str, value: Any) -> str:
    match value:
        case None | ():
            left_out = {
                "ca_file": "public CAs",
                "server_name": "the host",
                "encodings": "every lossless one",
                "max_datagram_octets": "`auto`",
            }
            return left_out.get(name, "")
        case bool():
            return "yes" if value else "no"
        case tuple():
            return f"`{','.join(value)}`"
        case str():
            return f"`{value}`"
        case int() if value >= 1 << 30:
            return f"{value >> 30} GiB"
        case int() if value >= 1 << 20:
            return f"{value >> 20} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_every_setting_is_there_with_its_default() -> None:
    told: dict[str, tuple[str, str]] = {}
    for names, of, default, _ in rows("setting"):
        parts = names.split(", ")
        values = default.split(", ") if len(parts) > 1 and default else [default] * len(parts)
        told |= {n.strip("`"): (of, v) for n, v in zip(parts, values, strict=True)}

    assert set(told) == {name for cls in SETTINGS for name in cls.model_fields}
    for name, (of, default) in told.items():
        tables = [cls.table for cls in SETTINGS if name in cls.model_fields]
        assert of == USERS.get(tuple(tables), ", ".join(tables)), name
        assert set(default.split("; ")) == shown_defaults(name), name


# -- the Python ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_identifiers_are_computed_as_shown() -> None:
    exec(compile(blocks("python")[2], "README.md", "exec"), {})


@pytest.mark.network
async def test_the_producer_and_the_consumer_work_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await asyncio.to_thread(main, ["keys", "--new", "scope.key"]) == 0
    make_certificates(tmp_path / "certs")
    names: dict[str, Any] = {}
    port = str(free_port())
    for block in blocks("python"):
        exec(compile(block.replace("4443", port), "README.md", "exec"), names)
    descriptor, tokens = names["descriptor"], list(range(40))
    rng = np.random.default_rng(1)
    layers = [
        tuple(rng.random((32, 8, 128)).astype(ml_dtypes.bfloat16) for _ in "kv")
        for _ in range(descriptor.layers)
    ]
    computed: dict[int, tuple[Any, Any]] = {}
    listening, until = asyncio.Event(), asyncio.Event()

    def handed_over() -> Iterator[Any]:
        listening.set()  # the producer asks for the first layer once it can be reached
        yield from layers

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(names["produce"](descriptor, tokens, handed_over(), until))
        await listening.wait()
        complete = await names["retrieve"](
            descriptor, tokens, lambda n, k, v: computed.update({n: (k, v)})
        )
        until.set()

    assert complete.summary.duplicates == 0
    assert sorted(computed) == [0, 1]
    for number, published in enumerate(layers):
        received = computed[number]
        assert [tensor.tobytes() for tensor in received] == [t.tobytes() for t in published]
