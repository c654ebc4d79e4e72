"""``kvcs relay``, with the other commands around it, as processes."""

import asyncio

import pytest

from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import PATIENCE_S

pytestmark = pytest.mark.network


@pytest.fixture
def desk(
    tmp_path_factory: pytest.TempPathFactory,
    certificates: CertificateFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    monkeypatch.chdir(folder)  # where no kvcs.toml is
    return Desk(folder, certificates)


def relay_command(desk: Desk, *more: str) -> list[str]:
    files = desk.certificates
    return [
        "relay", "--json", "--listen", "127.0.0.1:0", "--drain-s", "5", *more,
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip


async def test_it_serves_what_its_producer_left_and_ends_with_status_0_when_told(
    desk: Desk,
) -> None:
    async with started(relay_command(desk)) as relay:
        port = (await event_of(relay, "listening"))["port"]
        produce = [
            *desk.without(desk.produce("--json", "--drain-s", "0"), "--listen"),
            "--connect", f"moqt://127.0.0.1:{port}/",
            "--ca-file", str(desk.certificates.ca_file),
        ]  # fmt: skip
        async with started(produce) as producer:
            await event_of(producer, "publication-finished")
            early = await consumed(desk, port)
            producer.terminate()
            assert await asyncio.wait_for(producer.wait(), PATIENCE_S) == 0
        late = await consumed(desk, port)
        relay.terminate()
        status = await asyncio.wait_for(relay.wait(), PATIENCE_S)

    assert (early, late, status) == (0, 0, 0)


async def consumed(desk: Desk, port: int) -> int:
    """Run a consumer to its end; return its exit status."""
    async with started(desk.consume(port=port)) as consumer, asyncio.timeout(PATIENCE_S):
        _, err = await consumer.communicate()
    assert consumer.returncode == 0, err.decode()
    return consumer.returncode


async def test_it_waits_for_its_sessions_no_longer_than_it_was_told(desk: Desk) -> None:
    async with started(relay_command(desk, "--drain-s", "0.2")) as relay:
        port = (await event_of(relay, "listening"))["port"]
        consume = desk.consume(port=port)
        async with started([*consume, "--discovery-timeout-s", "30", "--deadline-s", "30"]):
            relay.terminate()
            assert await asyncio.wait_for(relay.wait(), PATIENCE_S) == 0


async def test_what_it_cannot_work_with_is_said_in_one_line(desk: Desk) -> None:
    command = desk.without(relay_command(desk), "--listen")
    async with started(command) as relay, asyncio.timeout(PATIENCE_S):
        _, err = await relay.communicate()

    assert relay.returncode == 2
    assert err.decode().startswith("kvcs: listen is not set (--listen or KVCS_LISTEN)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--direct", "--codec", "shuffle-zstd"], ["--segments", "2", "--append", "2"]],
    ids=["through a relay", "direct and compressed", "in chunks and appended"],
)
async def test_the_demonstration_ends_well(desk: Desk, more: list[str]) -> None:
    command = ["demo", desk["cache.safetensors"], "--layer-interval-ms", "50", "--json", *more]
    async with started(command) as demo, asyncio.timeout(40):
        out, err = await demo.communicate()

    assert demo.returncode == 0, err.decode()
    assert out.decode().splitlines()[-1] == '{"event":"demo-complete"}'
