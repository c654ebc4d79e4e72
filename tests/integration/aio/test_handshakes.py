"""Handshakes that are begun and not completed: what they cost those who come to stay."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from moqt.aio.aioquic.listener import Listener
from moqt.aio.errors import DialError
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import CertificateFiles
from tests.attack.first_packets import Sender
from tests.integration.aio.test_aioquic import dialled, listening

pytestmark = [pytest.mark.network, pytest.mark.aioquic]


@asynccontextmanager
async def attacked(
    certificates: CertificateFiles, settings: QuicSettings
) -> AsyncIterator[tuple[Listener, Sender]]:
    async with asyncio.timeout(30), listening(certificates, settings) as listener:
        sender = Sender(listener.address)
        try:
            yield listener, sender
        finally:
            sender.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a listener on this event loop is going to see."""
    turn = asyncio.Event()
    loop = asyncio.get_running_loop()
    while not condition():
        turn.clear()
        loop.call_later(0.001, turn.set)
        await turn.wait()


def kinds(datagrams: list[bytes]) -> set[QuicPacketType]:
    return {
        pull_quic_header(Buffer(data=d), host_cid_length=8).packet_type
        for d in datagrams
        if d[0] & 0x80
    }


async def test_from_some_handshakes_on_a_client_proves_its_address_and_gets_in(
    certificates: CertificateFiles,
) -> None:
    async with attacked(certificates, QuicSettings(retry_above=3)) as (listener, sender):
        sender.begin(3)
        await until(lambda: len(listener.transports) == 3)

        client = await dialled(listener, certificates)
        assert client.transport._connection._retry_count == 1
        client.transport.abandon()


async def test_who_does_not_come_back_with_the_proof_leaves_nothing(
    certificates: CertificateFiles,
) -> None:
    async with attacked(certificates, QuicSettings(retry_above=2)) as (listener, sender):
        answers: list[bytes] = []
        sender.begin(12)

        def answered() -> bool:
            answers.extend(sender.answers())
            return QuicPacketType.RETRY in kinds(answers)

        await until(answered)
        client = await dialled(listener, certificates)  # all that came before has been seen
        assert len(listener.transports) == 3
        client.transport.abandon()


async def test_one_peer_takes_a_quarter_of_the_places_and_others_get_in(
    certificates: CertificateFiles,
) -> None:
    settings = QuicSettings(retry_above=1000, max_handshakes=16)
    async with attacked(certificates, settings) as (listener, sender):
        sender.begin(12)
        client = await dialled(listener, certificates)

        assert len(listener.transports) == 5
        client.transport.abandon()


async def test_when_all_places_are_taken_a_client_is_refused_and_told_so(
    certificates: CertificateFiles,
) -> None:
    settings = QuicSettings(retry_above=1000, max_handshakes=4)
    async with attacked(certificates, settings) as (listener, _):
        senders = [Sender(listener.address, f"127.0.0.{100 + n}") for n in range(4)]
        for sender in senders:
            sender.begin()
        await until(lambda: len(listener.transports) == 4)

        with pytest.raises(DialError, match="CONNECTION_REFUSED"):
            await dialled(listener, certificates)
        for sender in senders:
            sender.close()


async def test_places_are_free_again_when_connections_are_over(
    certificates: CertificateFiles,
) -> None:
    settings = QuicSettings(max_connections_of_peer=1)
    async with asyncio.timeout(30), listening(certificates, settings) as listener:
        for _ in range(3):
            client = await dialled(listener, certificates)
            with pytest.raises(DialError, match="CONNECTION_REFUSED"):
                await dialled(listener, certificates)
            client.transport.close(0, "done")
            await client.transport.wait_closed()
            await until(lambda: not listener.transports)
        assert listener._door.handshakes == 0
