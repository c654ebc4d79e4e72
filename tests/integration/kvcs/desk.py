"""A folder with everything that the commands need, and the commands as processes."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    PATIENCE_S,
    TOKENS,
    tensors,
)

ROOT = Path(__file__).parents[3]


@dataclass
class Desk:
    """A folder with good files, and the command lines that use them."""

    folder: Path
    certificates: CertificateFiles

    def __post_init__(self) -> None:
        self.write("scope.key", bytes(range(32)).hex())
        self.write("cache.json", self.side())
        save_file(self.arrays(), self.folder / "cache.safetensors")

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def side(self, **changed: Any) -> str:
        return json.dumps({"descriptor": COMPAT.members(), "tokens": TOKENS} | changed)

    def arrays(self) -> dict[str, Any]:
        found = {}
        tail = np.zeros((len(TOKENS) - BLOCKS * BLOCK_TOKENS, 2, 8), np.float16)
        for layer in range(LAYERS):
            k, v = tensors(layer)
            found[f"k.{layer}"] = np.concatenate([k, tail])
            found[f"v.{layer}"] = np.concatenate([v, tail[..., :4]])
        return found

    def produce(self, *changed: str, cache: str | None = None) -> list[str]:
        files = self.certificates
        return [
            "produce", cache or self["cache.safetensors"], "--listen", "127.0.0.1:0",
            "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
            "--scope-key-file", self["scope.key"], *changed,
        ]  # fmt: skip

    def consume(self, *changed: str, prompt: str | None = None, port: int = 9) -> list[str]:
        return [
            "consume", prompt or self["cache.json"], "--connect", f"moqt://127.0.0.1:{port}/",
            "--ca-file", str(self.certificates.ca_file), "--scope-key-file", self["scope.key"],
            "--connect-timeout-s", "1", "--deadline-s", "5", *changed,
        ]  # fmt: skip

    def fetch(self, *changed: str, prompt: str | None = None, port: int = 9) -> list[str]:
        return ["fetch", *self.consume(*changed, prompt=prompt, port=port)[1:]]

    def without(self, command: list[str], flag: str) -> list[str]:
        at = command.index(flag)
        return command[:at] + command[at + 2 :]


@asynccontextmanager
async def started(arguments: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``kvcs`` in a process, which is killed at the end of the block at the latest."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvcs", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, limit=1 << 24,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def event_of(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    """Return the next event of a name that a process tells on standard output."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := await process.stdout.readline():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
    raise AssertionError(f"the process ended before {name}")
