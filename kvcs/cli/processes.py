"""What the demonstrations share: a place for keys, and processes that tell their events."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import orjson

from kvcs.errors import ConfigError
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.signing import ProducerKey
from moqt.aio.tls import CertificateFiles, make_certificates


class Prefill(NamedTuple):
    """How a prompt is cut into passes over the layers."""

    segments: int
    segment_blocks: int

    @classmethod
    def of(cls, blocks: int, segments: int) -> Self:
        """Cut so many blocks into so many segments, or into fewer where that does not come out.

        Raises:
            ConfigError: If there are not as many blocks.
        """
        if not 1 <= segments <= blocks:
            raise ConfigError(f"--segments is {segments}, expected 1 to {blocks}, a block each")
        segment_blocks = -(-blocks // segments)
        return cls(-(-blocks // segment_blocks), segment_blocks)


@dataclass
class Workplace:
    """Certificates and keys in a folder that will be thrown away."""

    folder: Path
    certificates: CertificateFiles = field(init=False)
    scope_key: Path = field(init=False)
    producer_key: Path = field(init=False)
    trusted_key: Path = field(init=False)

    def __post_init__(self) -> None:
        self.certificates = make_certificates(self.folder)
        self.scope_key = self.folder / "scope.key"
        ScopeKey.generate().to_file(self.scope_key)
        key = ProducerKey.generate()
        self.producer_key = self.folder / "producer.pem"
        self.trusted_key = self.folder / "producer.pub.pem"
        self.producer_key.write_bytes(key.private_pem())
        self.producer_key.chmod(0o600)
        self.trusted_key.write_bytes(key.public_pem())


@asynccontextmanager
async def process(arguments: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``kvcs`` with ``arguments``; end it, and wait for it, at the end of the block."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvcs", *arguments,
        stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def events_of(
    started: asyncio.subprocess.Process, *names: str
) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON lines of a process, of these events or of all, until it closes its output."""
    assert started.stdout is not None, "process() asks for it"
    while line := await started.stdout.readline():
        event: dict[str, Any] = orjson.loads(line)
        if not names or event["event"] in names:
            yield event
