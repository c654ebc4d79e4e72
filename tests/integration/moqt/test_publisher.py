"""TrackPublisher over loopback: what it serves, and that publishing waits for room."""

import asyncio
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    ServerTls,
    TrackPublisher,
    connect,
    serve,
)
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.errors import RequestRejected, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import NamespaceAppeared, NamespaceGone, ObjectReceived
from moqt.session.localobjects import LocalSubgroup
from moqt.wire.filters import LocationFilter

pytestmark = pytest.mark.network

NAME = FullTrackName.of("example", "one", "track")
EXAMPLES = Path(__file__).parents[3] / "examples"
OBJECT = bytes(64 << 10)
#: What a subscriber that reads nothing can be sent at most.
SMALL = QuicSettings(stream_window=64 << 10, connection_window=256 << 10)


@asynccontextmanager
async def session(
    publisher: TrackPublisher, certificates: CertificateFiles, quic: QuicSettings | None = None
) -> AsyncIterator[MoqtConnection]:
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    client = ClientTls(ca_file=certificates.ca_file)
    async with (
        asyncio.timeout(20),
        await serve("127.0.0.1", 0, tls=tls, handler=publisher) as server,
        connect(f"moqt://127.0.0.1:{server.address[1]}/", tls=client, quic=quic) as connection,
    ):
        yield connection


async def publish_until_full(publisher: TrackPublisher, group: LocalSubgroup) -> int:
    """Publish for as long as there is room; return how many Objects that were."""
    published = 0
    with suppress(TimeoutError):
        while True:
            await publisher.publish(group, published, OBJECT, timeout_s=0.2)
            published += 1
    return published


async def test_publishing_waits_until_subscribers_were_sent_what_is_held(
    certificates: CertificateFiles,
) -> None:
    publisher = TrackPublisher(budget_octets=8 * len(OBJECT))
    track = publisher.add(NAME)
    group = track.open_subgroup(0)
    count = 64
    async with session(publisher, certificates, SMALL) as connection:
        subscription = await connection.subscribe(NAME)
        published = await publish_until_full(publisher, group)
        held = publisher.octets_held

        async def publish_the_rest() -> None:
            for object_id in range(published, count):
                await publisher.publish(group, object_id, OBJECT)
            group.close()
            track.end()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_the_rest())
            received = [e.location.object async for e in subscription if type(e) is ObjectReceived]

    assert 8 <= published < count
    assert held == 8 * len(OBJECT)
    assert received == list(range(count))
    assert publisher.octets_held == 0


async def test_without_subscribers_a_track_that_keeps_nothing_never_waits() -> None:
    publisher = TrackPublisher(budget_octets=len(OBJECT))
    group = publisher.add(NAME).open_subgroup(0)

    async with asyncio.timeout(5):
        for object_id in range(100):
            await publisher.publish(group, object_id, OBJECT)

    assert publisher.octets_held == 0


async def test_a_full_publisher_says_so_and_publishes_nothing() -> None:
    publisher = TrackPublisher(budget_octets=1)
    track = publisher.add(NAME, retain=True)
    group = track.open_subgroup(0)
    await publisher.publish(group, 0, OBJECT)

    with pytest.raises(TimeoutError):
        await publisher.publish(group, 1, OBJECT, timeout_s=0.01)

    assert [obj.object_id for obj in group.objects] == [0]


async def test_tracks_and_their_namespaces_are_served_while_they_are_there(
    certificates: CertificateFiles,
) -> None:
    publisher = TrackPublisher()
    async with session(publisher, certificates) as connection:
        namespaces = await connection.subscribe_namespace(TrackNamespace.of("example"))
        track = publisher.add(NAME, retain=True)
        appeared = await anext(namespaces)
        group = track.open_subgroup(0)
        await publisher.publish(group, 0, b"one")
        group.close()
        track.end()
        status = await connection.track_status(NAME)
        fetch = await connection.fetch(NAME, location_filter=LocationFilter.none())
        fetched = [item.payload async for item in fetch if isinstance(item, ObjectReceived)]
        publisher.remove(track)
        gone = await anext(namespaces)
        with pytest.raises(RequestRejected) as refused:
            await connection.subscribe(NAME)

    assert appeared == NamespaceAppeared(request_id=namespaces.request_id, namespace=NAME.namespace)
    assert isinstance(gone, NamespaceGone)
    assert status.largest == (0, 0)
    assert fetched == [b"one"]
    assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST
    assert publisher.octets_held == 0


def test_a_track_is_added_once_and_removed_after_its_end() -> None:
    publisher = TrackPublisher()
    track = publisher.add(NAME)

    with pytest.raises(UsageError, match="published already"):
        publisher.add(NAME)
    with pytest.raises(UsageError, match="has not ended"):
        publisher.remove(track)
    track.end()
    publisher.remove(track)
    with pytest.raises(UsageError, match="not published here"):
        publisher.remove(track)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
async def test_the_examples_run_as_they_stand(path: Path) -> None:
    received = await runpy.run_path(str(path))["main"]()

    assert len(received) == 24
    assert received[0].startswith("00:00")
