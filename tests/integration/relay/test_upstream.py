"""What a relay tells the one it asks at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from moqt.aio import ClientTls, MoqtConnection, RequestHandler, ServerTls, connect, serve
from moqt.aio.tls import CertificateFiles
from moqt.names import TrackNamespace
from moqt.relay.server import Relay
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import PublishNamespaceReceived, SubscribeNamespaceReceived

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
