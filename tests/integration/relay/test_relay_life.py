"""The life of ``kvcs relay``, as a process: its certificate is renewed, and it is told to end."""

import asyncio
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moqt.aio import ClientTls, MoqtConnection, connect, open_connection
from moqt.aio.tls import make_certificates
from moqt.codepoints import PublishDoneCode, SessionErrorCode
from moqt.errors import MoqtError
from moqt.session.events import ObjectReceived
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.relay.stage import Serving
from tests.session.pair import NAME, publish_group, whole

pytestmark = pytest.mark.network

PATIENCE_S = 20.0
FROM_START = LocationFilter.absolute_start(0, 0)
ELSEWHERE = "moqt://elsewhere.example:4443/"


@pytest.fixture
def desk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    monkeypatch.chdir(folder)  # where no kvcs.toml is
    return Desk(folder, make_certificates(folder / "certificates"))


def relay_command(desk: Desk, *more: str) -> list[str]:
    files = desk.certificates
    return [
        "relay", "--json", "--listen", "127.0.0.1:0", *more,
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip


@asynccontextmanager
async def running(
    desk: Desk, command: list[str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, ClientTls]]:
    """Run a command that listens; yield how to reach it, too."""
    async with asyncio.timeout(PATIENCE_S), started(command) as process:
        port = (await event_of(process, "listening"))["port"]
        yield process, f"moqt://127.0.0.1:{port}/", ClientTls(ca_file=desk.certificates.ca_file)


async def log_line(process: asyncio.subprocess.Process, text: str) -> dict[str, str]:
    """Return the next log line of a text."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        found: dict[str, str] = json.loads(line)
        if found["event"] == text:
            return found
    raise AssertionError(f"the process ended before it said: {text}")


async def is_believed(uri: str, ca_file: Path) -> bool:
    try:
        async with connect(uri, tls=ClientTls(ca_file=ca_file)):
            return True
    except (OSError, MoqtError):
        return False


# -- SIGHUP --------------------------------------------------------------------------------------


@pytest.mark.aioquic
@pytest.mark.parametrize("which", ["relay", "produce"])
async def test_on_sighup_the_certificate_is_read_again_and_taken_if_it_can_be_used(
    desk: Desk, which: str
) -> None:
    command = relay_command(desk) if which == "relay" else desk.produce("--json")
    shown, other = desk.certificates, make_certificates(desk.folder / "other")
    old_ca = shutil.copy(shown.ca_file, desk.folder / "old-ca.pem")
    async with running(desk, command) as (process, uri, tls):
        there = await open_connection(uri, tls=tls)
        shutil.copy(other.certificate_file, shown.certificate_file)  # its key is not there yet
        process.send_signal(signal.SIGHUP)
        refused = await log_line(process, "certificate refused")
        assert refused["level"] == "warning"
        assert str(shown.key_file) in refused["error"]
        assert "expected the key of the first one" in refused["error"]
        assert await is_believed(uri, Path(old_ca))

        shutil.copy(other.key_file, shown.key_file)
        process.send_signal(signal.SIGHUP)
        assert (await log_line(process, "certificate taken"))["level"] == "info"
        assert await is_believed(uri, other.ca_file)
        assert not await is_believed(uri, Path(old_ca))
        assert there.closed is None
        await there.close(drain_s=0.1)


# -- SIGTERM -------------------------------------------------------------------------------------


@asynccontextmanager
async def half_a_track(
    uri: str, tls: ClientTls
) -> AsyncIterator[tuple[LocalTrack, MoqtConnection, MoqtConnection]]:
    """Half a Track that passes through the relay; yield its two sessions."""
    track = LocalTrack(NAME)
    publisher = await open_connection(uri, tls=tls, handler=Serving(track))
    consumer = await open_connection(uri, tls=tls)
    await publisher.publish_namespace(NAME.namespace)
    publish_group(track, 0, 3)
    try:
        yield track, publisher, consumer
    finally:
        for connection in (publisher, consumer):
            await connection.close(drain_s=0.1)


async def test_on_sigterm_a_publication_that_is_on_its_way_comes_to_its_end(desk: Desk) -> None:
    command = relay_command(desk, "--drain-s", "60", "--new-session-uri", ELSEWHERE)
    async with running(desk, command) as (relay, uri, tls):
        async with half_a_track(uri, tls) as (track, publisher, consumer):
            idle = await open_connection(uri, tls=tls)
            subscription = await consumer.subscribe(NAME, fill=FROM_START)
            received = [await anext(subscription) for _ in range(3)]
            relay.terminate()
            for connection in (publisher, consumer, idle):
                await connection.wait_going_away()
                assert connection.going_away is not None
                assert connection.going_away.new_session_uri == ELSEWHERE
            await idle.wait_closed()  # it has nothing to finish
            publish_group(track, 1, 3)
            track.end()
            received += [event async for event in subscription]

            objects = [e.location for e in received if isinstance(e, ObjectReceived) and e.payload]
            assert Counter(objects) == Counter(whole(2, 3))
            assert subscription.ended is not None
            assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
            await consumer.wait_closed()
            assert consumer.closed is not None
            assert consumer.closed.code is SessionErrorCode.NO_ERROR
        assert await relay.wait() == 0


async def test_who_does_not_leave_in_time_is_closed(desk: Desk) -> None:
    drain_s = 0.3
    async with (
        running(desk, relay_command(desk, "--drain-s", str(drain_s))) as (relay, uri, tls),
        half_a_track(uri, tls) as (_, publisher, consumer),
    ):
        await consumer.subscribe(NAME, fill=FROM_START)
        began = time.monotonic()
        relay.terminate()
        for connection in (publisher, consumer):
            await connection.wait_closed()
            assert connection.going_away is not None
            assert connection.going_away.new_session_uri == ""
            assert connection.closed is not None
            assert connection.closed.by_peer
            assert connection.closed.code in (
                SessionErrorCode.GOAWAY_TIMEOUT, SessionErrorCode.NO_ERROR,
            )  # fmt: skip
        assert time.monotonic() - began >= drain_s
        assert await relay.wait() == 0


async def test_the_second_sigterm_ends_it_at_once(desk: Desk) -> None:
    async with (
        running(desk, relay_command(desk, "--drain-s", "60")) as (relay, uri, tls),
        half_a_track(uri, tls) as (_, _, consumer),
    ):
        await consumer.subscribe(NAME, fill=FROM_START)
        relay.terminate()
        await consumer.wait_going_away()
        assert relay.returncode is None
        relay.terminate()

        assert await relay.wait() == -signal.SIGTERM
