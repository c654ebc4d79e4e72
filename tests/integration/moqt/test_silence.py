"""A peer that gives no sign of life is noticed, and one that has nothing to say is not."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    Server,
    ServerTls,
    connect,
    serve,
)
from moqt.aio.aioquic.listener import Listener
from moqt.aio.tls import CertificateFiles

# picoquic sends PINGs by itself, too rarely for so short a silence.
pytestmark = [pytest.mark.network, pytest.mark.aioquic]

PATIENCE_S = 10.0
SILENCE_S = 0.4
#: Connections that send nothing unasked, as they do where they find the size of datagrams.
QUIET = QuicSettings(max_datagram_octets=1200)


@asynccontextmanager
async def session(files: CertificateFiles) -> AsyncIterator[tuple[Server, MoqtConnection]]:
    tls = ServerTls(files.certificate_file, files.key_file)
    server = await serve("127.0.0.1", 0, tls=tls, handler=RequestHandler(), quic=QUIET)
    uri = f"moqt://127.0.0.1:{server.address[1]}/"
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            connect(uri, tls=ClientTls(files.ca_file), quic=QUIET, drain_s=0) as client,
        ):
            yield server, client
    finally:
        await server.close(drain_s=0)


def listener_of(server: Server) -> Listener:
    listener = server._listener
    assert isinstance(listener, Listener)
    return listener


async def test_a_peer_that_vanished_is_silent_within_the_time(
    certificates: CertificateFiles,
) -> None:
    async with session(certificates) as (server, client):
        listener_of(server).transports[0].abandon()
        began, heard_at = time.monotonic(), client.heard_at
        await client.wait_silent(SILENCE_S)
        took_s = time.monotonic() - began

        assert client.closed is None
        assert client.heard_at == heard_at
    assert SILENCE_S / 2 < took_s < SILENCE_S + 1.0


async def test_a_peer_that_only_has_nothing_to_say_is_not_silent(
    certificates: CertificateFiles,
) -> None:
    async with session(certificates) as (_, client):
        heard_at = client.heard_at
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * SILENCE_S):
                await client.wait_silent(SILENCE_S)

        assert client.heard_at > heard_at


async def test_what_anybody_could_have_sent_is_no_sign_of_life(
    certificates: CertificateFiles,
) -> None:
    async with session(certificates) as (server, client):
        listener = listener_of(server)
        transport = listener.transports[0]
        address = transport.peer_address
        transport.abandon()
        silence = asyncio.create_task(client.wait_silent(SILENCE_S))
        heard_at = client.heard_at
        while not silence.done():  # as a peer that has lost its memory answers
            listener._endpoint.send([b"\x40" + bytes(39)], address)
            await asyncio.wait({silence}, timeout=SILENCE_S / 10)

        assert client.heard_at == heard_at


async def test_the_wait_ends_with_the_session(certificates: CertificateFiles) -> None:
    async with session(certificates) as (server, client):
        silence = asyncio.create_task(client.wait_silent(PATIENCE_S * 10))
        await server.close(drain_s=0)
        await silence

        assert client.closed is not None
