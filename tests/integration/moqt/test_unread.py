"""Answers that a peer asks for and does not read."""

import asyncio
from contextlib import suppress

import pytest

from moqt.aio import ClientTls, MoqtConnection, QuicSettings, RequestHandler, ServerTls, connect
from moqt.aio.server import serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import SessionErrorCode
from moqt.errors import SessionClosed
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import NamespaceAppeared, SubscribeNamespaceReceived
from tests.attack.attacks import never_consuming

pytestmark = pytest.mark.network

PREFIXES = TrackNamespace.of("many"), TrackNamespace.of("more")
NAMES = 3000


class Telling(RequestHandler):
    """Tells of many namespaces, of some 70 octets each."""

    def __init__(self) -> None:
        self.directory = NamespaceDirectory()
        for prefix in PREFIXES:
            for number in range(NAMES):
                self.directory.add(prefix + TrackNamespace((b"%064d" % number,)))

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        connection.session.accept_namespaces(request.request_id, self.directory)


@pytest.mark.parametrize("reads", [False, True])
async def test_who_reads_nothing_of_the_answers_is_closed_and_who_does_is_not(
    certificates: CertificateFiles, reads: bool
) -> None:
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    # One list may be on its way as a whole; two are too much.
    config = SessionConfig(max_unread_octets=300_000)
    server = await serve("127.0.0.1", 0, tls=tls, handler=Telling(), config=config)
    uri = f"moqt://127.0.0.1:{server.address[1]}/"
    window = QuicSettings(connection_window=1 << 16, stream_window=1 << 16)
    async with asyncio.timeout(30), server:
        async with connect(
            uri, tls=ClientTls(ca_file=certificates.ca_file), quic=window, drain_s=0.1
        ) as client:
            if reads:
                for prefix in PREFIXES:
                    listing = await client.subscribe_namespace(prefix)
                    for _ in range(NAMES):
                        assert isinstance(await anext(listing), NamespaceAppeared)
                assert client.closed is None
                return
            with never_consuming(client), suppress(SessionClosed):
                for prefix in PREFIXES:
                    await client.subscribe_namespace(prefix)
                await client.wait_closed()
        assert client.closed is not None
        assert client.closed.code is SessionErrorCode.CONTROL_MESSAGE_TIMEOUT
        assert client.closed.reason.endswith("octets were not taken")
