"""Certificates that change while there is much to do: every listener, and no object lost."""

import asyncio
import contextlib
import shutil
import signal
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.retrieval import ConnectionSpec, consume
from moqt.aio import ClientTls, ServerTls, connect
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.errors import MoqtError
from moqt.relay.server import Relay
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    QUICK,
    CountingSink,
    assert_same_cache,
    expectations,
    fill,
    on_stage,
    run,
)

pytestmark = [pytest.mark.network, pytest.mark.aioquic]


class Shown:
    """The files that a listener shows, of which there is one set after the other."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._number = folder, 0
        self.files = CertificateFiles(*(folder / f"{n}.pem" for n in ("ca", "certificate", "key")))
        self.before = self.files
        self.change()

    def change(self) -> None:
        """Put another certificate there, of another CA; key and certificate one by one."""
        self._number += 1
        new = make_certificates(self._folder / str(self._number))
        self.before = replace(self.files, ca_file=self._folder / f"{self._number - 1}" / "ca.pem")
        shutil.copy(new.ca_file, self.files.ca_file)
        shutil.copy(new.certificate_file, self.files.certificate_file)
        shutil.copy(new.key_file, self.files.key_file)

    @property
    def tls(self) -> ServerTls:
        return ServerTls(self.files.certificate_file, self.files.key_file)


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path / "shown")


@pytest.fixture
def desk(tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, shown.files)


# -- under load ----------------------------------------------------------------------------------


async def test_certificates_that_change_under_load_cost_nobody_an_object(shown: Shown) -> None:
    """Producer and relay change theirs before every layer, and somebody comes each time."""
    with_old = ClientTls(ca_file=shown.files.ca_file)
    async with asyncio.TaskGroup() as group, on_stage(shown.files) as scene, Relay() as relay:
        host, port = await relay.listen("127.0.0.1", 0, tls=shown.tls)
        scene.producer.announce_at(f"moqt://{host}:{port}/", tls=with_old)
        places = [scene.spec.uri, f"moqt://{host}:{port}/"]
        handle = scene.open()
        await handle.add_segment()
        retrievals = []
        for layer in range(LAYERS):
            shown.change()
            scene.producer.identify(shown.tls)
            relay.identify(shown.tls)
            believed = shutil.copy(
                shown.files.ca_file, shown.files.ca_file.with_name(f"ca-{layer}.pem")
            )
            for place in places:
                sink = CountingSink()
                spec = ConnectionSpec(uri=place, tls=ClientTls(ca_file=Path(believed)))
                retrieval = consume(expectations(), [spec], sink, settings=QUICK)
                retrievals.append((sink, group.create_task(run(retrieval))))
            await fill(handle, [layer])
            for sink, _ in retrievals:  # it is there, and so are those that came before
                await sink.reached(len(EVERYTHING) // LAYERS * (layer + 1))
        await handle.finish()
        for _, task in retrievals:
            await task

    assert len(retrievals) == 2 * LAYERS
    for sink, task in retrievals:
        assert isinstance(task.result()[-1], PublicationComplete)
        assert sink.placed == EVERYTHING
        assert_same_cache(sink)


# -- every listener ------------------------------------------------------------------------------


def commands(desk: Desk) -> dict[str, list[str]]:
    files = desk.certificates
    (desk.folder / "tokens").write_text(f"{'00' * 32} read {'t' * 32}\n")
    (desk.folder / "tokens").chmod(0o600)
    listening = [
        "--json", "--listen", "127.0.0.1:0", "--watch-s", "0.02", "--log-format", "json",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip
    scope = ["--scope-key-file", desk["scope.key"]]
    http = ["--http", "127.0.0.1:0", "--tokens-file", desk["tokens"]]
    return {
        "relay": ["relay", *listening],
        "produce": ["produce", desk["cache.safetensors"], *listening, *scope],
        "produce --http": ["produce", desk["cache.safetensors"], *listening, *scope, *http],
        "store": ["store", desk["kept"], *listening, *scope],
        "index": ["index", *listening, "--tokens-file", desk["tokens"]],
    }


async def believes(port: int, ca_file: Path, *, over_http: bool) -> bool:
    """Whether who believes one CA gets through to who listens there."""
    try:
        if not over_http:
            async with connect(
                f"moqt://127.0.0.1:{port}/", tls=ClientTls(ca_file=ca_file), drain_s=0.0
            ):
                return True
        context = ssl.create_default_context(cafile=str(ca_file))
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    except (OSError, MoqtError):
        return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        "relay",
        pytest.param("produce", marks=pytest.mark.slow),
        "produce --http",
        pytest.param("store", marks=pytest.mark.slow),
        pytest.param("index", marks=pytest.mark.slow),
    ],
)
async def test_every_listener_takes_what_changed_and_nothing_else(
    desk: Desk, shown: Shown, name: str
) -> None:
    over_http = name in ("produce --http", "index")
    async with started(commands(desk)[name]) as process:
        told = "listening-http" if name == "produce --http" else "listening"
        port = (await event_of(process, told))["port"]
        assert await believes(port, shown.files.ca_file, over_http=over_http)

        shown.change()  # key and certificate fit each other again once both are there
        async with asyncio.timeout(PATIENCE_S):
            while await believes(port, shown.before.ca_file, over_http=over_http):
                pass
        assert await believes(port, shown.files.ca_file, over_http=over_http)

        shown.files.key_file.write_text("nothing")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"certificate refused" not in await process.stderr.readline():
                pass
        assert await believes(port, shown.files.ca_file, over_http=over_http)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
