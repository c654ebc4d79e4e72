"""What a relay tells the one it asks at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest

from moqt.aio import ClientTls, MoqtConnection, RequestHandler, ServerTls, connect, serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode
from moqt.names import TrackNamespace
from moqt.relay.server import Relay
from moqt.relay.upstream import Upstream
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    ObjectReceived,
    PublishNamespaceReceived,
    SubscribeNamespaceReceived,
)
from moqt.wire.filters import LocationFilter
from tests.integration.relay.origin import publishing
from tests.integration.relay.stage import relaying, vanish
from tests.session.pair import NAME, make_track, publish_group, whole

pytestmark = pytest.mark.network

HERE, BOTH = TrackNamespace.of("here"), TrackNamespace.of("both")


class Above(RequestHandler):
    """A relay further up, as far as namespaces go: what it tells of, and what it is told."""

    def __init__(self, *there: TrackNamespace) -> None:
        self.directory = NamespaceDirectory()
        for namespace in there:
            self.directory.add(namespace)
        self.announced: asyncio.Queue[TrackNamespace] = asyncio.Queue()

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        connection.session.accept_namespace(request.request_id)
        self.directory.add(request.prefix)  # and it is told so, too
        self.announced.put_nowait(request.prefix)

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        connection.session.accept_namespaces(request.request_id, self.directory)


@asynccontextmanager
async def asking(
    files: CertificateFiles, above: Above, *published: TrackNamespace
) -> AsyncIterator[MoqtConnection]:
    """A relay that has a publisher of these when it begins to ask; yields the publisher's."""
    tls = ServerTls(files.certificate_file, files.key_file)
    trust = ClientTls(ca_file=files.ca_file)
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        server = await serve("127.0.0.1", 0, tls=tls, handler=above)
        stack.push_async_callback(server.close)
        relay = await stack.enter_async_context(Relay())
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        async with connect(f"moqt://127.0.0.1:{port}/", tls=trust) as publisher:
            for namespace in published:
                await publisher.publish_namespace(namespace)
            relay.ask_at(f"moqt://127.0.0.1:{server.address[1]}/", tls=trust)
            yield publisher


async def test_what_can_be_had_further_up_is_announced_there_once_it_is_gone_there(
    certificates: CertificateFiles,
) -> None:
    above = Above(BOTH)
    async with asking(certificates, above, BOTH, HERE) as publisher:
        assert await above.announced.get() == HERE
        late = TrackNamespace.of("late")
        await publisher.publish_namespace(late)
        assert await above.announced.get() == late
        above.directory.remove(BOTH)
        assert await above.announced.get() == BOTH

        assert above.announced.empty()


async def test_a_relay_above_that_falls_silent_is_dialled_again_and_nobody_sees_an_end(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moqt.relay.upstream.SILENCE_S", 0.4)
    track = make_track(1, ended=False)
    async with (
        asyncio.timeout(20),
        relaying(certificates, hops=2) as stage,
        publishing(stage, track) as origin,
        connect(stage.nearest.uri, tls=stage.nearest.tls) as consumer,
    ):
        subscription = await consumer.subscribe(NAME, fill=LocationFilter.absolute_start(0, 0))
        received = [await anext(subscription) for _ in range(4)]
        above, below = stage.relays
        [upstream] = below._neighbours._upstreams
        before = upstream.connection
        # What the relay above knows of the session is gone, as if it had been killed; it listens.
        sessions = {c for t in above._tracks for c, _ in t.subscribers}
        for session in sessions:
            vanish(session)
        publish_group(track, 1, 4)
        while upstream.connection in (None, before):
            received.append(await anext(subscription))
        track.end()
        received += [event async for event in subscription]

        objects = [event for event in received if isinstance(event, ObjectReceived)]
        assert sorted(event.location for event in objects) == whole(2, 4)
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
        assert len(origin.subscribed) == 1


class Line:
    """A session with a relay above that is silent once, and then heard again or not."""

    closed: object = None

    def __init__(self) -> None:
        self.heard_at = 0.0
        self.asked = 0
        self.is_over = asyncio.Event()
        self.was_closed = False

    async def wait_going_away(self) -> None:
        await self.is_over.wait()

    async def wait_silent(self, seconds: float) -> None:
        self.asked += 1
        if self.asked > 1:
            await asyncio.Event().wait()

    async def close(self, *, drain_s: float) -> None:
        self.was_closed = True


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "gone"])
async def test_a_relay_above_that_is_only_busy_is_kept(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    directory = NamespaceDirectory()
    upstream = Upstream("moqt://above/", RequestHandler(), own=directory, found=directory)
    first, second = Line(), Line()

    async def dial() -> Line:
        first.heard_at += is_busy
        first.is_over.set()
        return second

    monkeypatch.setattr(upstream, "_dial", dial)
    async with asyncio.timeout(5):
        kept: object = await upstream._until_replaced(cast(MoqtConnection, first))
    assert kept is (None if is_busy else second)
    assert second.was_closed is is_busy
