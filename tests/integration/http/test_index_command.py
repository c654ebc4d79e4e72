"""``kvcs index`` as a process."""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from kvcs.errors import ServiceFailed, ServiceFault
from kvcs.kvsp.http.indexclient import IndexClient
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import COMPAT, READER, SCOPE, TOKENS, WRITER
from tests.integration.http.test_index import ID, KEYS, publication
from tests.integration.kvcs.desk import event_of, started
from tests.integration.kvcs.scene import PATIENCE_S

pytestmark = pytest.mark.network


def tokens_file(folder: Path, text: str = TOKENS, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def index_command(files: CertificateFiles, tokens: Path, *more: str) -> list[str]:
    return [
        "index", "--json", "--listen", "127.0.0.1:0", "--drain-s", "1",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
        "--tokens-file", str(tokens), *more,
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no kvcs.toml is


def client(files: CertificateFiles, port: int, token: str = WRITER) -> IndexClient:
    tls = ClientTls(ca_file=files.ca_file)
    return IndexClient(f"https://127.0.0.1:{port}", token, SCOPE.scope_id, tls=tls)


async def test_it_tells_what_it_was_told_and_ends_with_status_0(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    command = index_command(certificates, tokens_file(tmp_path))
    async with started(command) as process:
        port = (await event_of(process, "listening"))["port"]
        async with client(certificates, port) as index:
            await index.register(COMPAT, ID, publication(7), lease_s=60)
            found = await index.longest(COMPAT, KEYS[:5])
        process.terminate()
        stopped = await event_of(process, "stopped")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    assert [(one.covers, one.blocks) for one in found.candidates] == [(5, 7)]
    assert stopped["kvcs_http_requests_total"] == 2
    assert stopped["kvcs_index_holders_registered_total"] == 1


async def test_tokens_are_read_again_when_it_is_told_to(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    tokens = tokens_file(tmp_path)
    async with started(index_command(certificates, tokens)) as process:
        port = (await event_of(process, "listening"))["port"]
        async with client(certificates, port, READER) as reader:
            await reader.longest(COMPAT, KEYS)
            # Others may read it: this file is not taken, and what was there before counts.
            tokens_file(tmp_path, f"{SCOPE.scope_id.hex()} read {WRITER}\n", 0o644)
            process.send_signal(signal.SIGHUP)
            await _line_with(process, "tokens refused")
            await reader.longest(COMPAT, KEYS)
            tokens_file(tmp_path, f"{SCOPE.scope_id.hex()} read {WRITER}\n")
            process.send_signal(signal.SIGHUP)
            await _line_with(process, "tokens taken")
            with pytest.raises(ServiceFailed) as refused:
                await reader.longest(COMPAT, KEYS)

    assert refused.value.fault is ServiceFault.UNAUTHORIZED


async def _line_with(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while text.encode() not in await process.stderr.readline():
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--tokens-file", None, "tokens_file is not set (--tokens-file or KVCS_TOKENS_FILE)"),
        ("--tokens-file", "none", "tokens file none: No such file or directory"),
        ("--certificate-file", "none", "none: No such file or directory"),
        ("--listen", "here", "listen is 'here' (from --listen), expected HOST:PORT"),
        ("--max-keys", "0", "max_keys is '0' (from --max-keys), expected greater than"),
    ],
)
async def test_what_it_cannot_work_with_is_said_in_one_line(
    certificates: CertificateFiles, tmp_path: Path, flag: str, value: str | None, says: str
) -> None:
    command = index_command(certificates, tokens_file(tmp_path))
    with contextlib.suppress(ValueError):
        at = command.index(flag)
        del command[at : at + 2]
    command += [] if value is None else [flag, value]
    async with started(command) as process, asyncio.timeout(PATIENCE_S):
        _, err = await process.communicate()

    assert process.returncode == 2
    assert says in err.decode()
    assert err.count(b"\n") == 1
