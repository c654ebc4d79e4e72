"""Listening: many connections on one UDP socket, told apart by connection ID."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from functools import partial

import structlog
from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import TRANSPORT_CLOSE_FRAME_CAPACITY
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.tls import AlertDescription

from moqt.aio.aioquic.clients import ClientCheck
from moqt.aio.aioquic.configuration import CONNECTION_ID_OCTETS, server_configuration
from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.inboxes import Inboxes, Read
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.aio.door import Door, Verdict
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ServerTls, load_client_verifier
from moqt.aio.transport import ConnectionLost, ReceiverFactory
from moqt.aio.udp import Address, UdpEndpoint, bound_socket, cut, spell
from moqt.certificates import ClientVerifier
from moqt.limits import peer_of

log = structlog.get_logger("moqt")

#: Octets that were read and may wait for their turn.
MAX_WAITING_OCTETS = 4 << 20


async def listen(
    host: str,
    port: int,
    settings: QuicSettings,
    tls: ServerTls,
    receiver_factory: ReceiverFactory,
    *,
    alpn: Sequence[str],
) -> "Listener":
    """Accept connections on a UDP port.

    Args:
        host: Name or address to bind; the first address of a name is taken.
        port: UDP port, 0 for any that is free.
        settings: Limits of each connection, and how many there may be.
        tls: The certificate to show.
        receiver_factory: Makes the receiver of each connection whose handshake is complete.
        alpn: Protocols accepted, the preferred one first.

    Raises:
        TlsSettingsError: If a file of ``tls`` cannot be used.
        OSError: If the address is not known or cannot be bound; the message names it.
    """
    configuration = server_configuration(settings, tls, alpn)
    clients = load_client_verifier(tls)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = bound_socket(family, address)
    except OSError as error:
        where = spell((host, port))
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error
    return Listener(sock, settings, configuration, clients, receiver_factory)


class Listener:
    """Many connections on one UDP socket, told apart by connection ID. Made by :func:`listen`."""

    def __init__(
        self,
        sock: socket.socket,
        settings: QuicSettings,
        configuration: QuicConfiguration,
        clients: ClientVerifier | None,
        receiver_factory: ReceiverFactory,
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._clients = clients
        self._receiver_factory = receiver_factory
        self._retry = QuicRetryTokenHandler()
        self._door = Door(settings)
        self._routes: dict[bytes, AioquicTransport] = {}
        self._transports: dict[AioquicTransport, set[bytes]] = {}
        self._inboxes = Inboxes[AioquicTransport]()
        self._turn: asyncio.Handle | None = None
        self._accepting = True
        self._closed = asyncio.Event()
        self._endpoint = UdpEndpoint(sock, self)
        self._address = self._endpoint.address

    @property
    def address(self) -> tuple[str, int]:
        """Address and UDP port that are listened on."""
        return self._address[0], self._address[1]

    @property
    def transports(self) -> tuple[AioquicTransport, ...]:
        """The connections of the moment, those in their handshake or closing included."""
        return tuple(self._transports)

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on, and believe these CAs.

        aioquic 1.7.2 keeps the configuration that a connection was made with, and takes the
        certificate from it with the first packet. So it is replaced as a whole, never changed.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """
        alpn = self._configuration.alpn_protocols or ()
        configuration, clients = (
            server_configuration(self._settings, tls, alpn),
            load_client_verifier(tls),
        )
        self._configuration, self._clients = configuration, clients

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; those there are go on."""
        self._accepting = False

    def bar(self, host: str) -> None:
        """Refuse new connections from an address for some seconds."""
        self._door.bar(peer_of(host), time.monotonic())

    def close(self) -> None:
        """Close what connections there are, with code 0, and then the socket."""
        self._accepting = False
        for transport in tuple(self._transports):
            transport.close(0, "listener closed")
        # After the turn in which the connections say so.
        asyncio.get_running_loop().call_soon(self._close_socket)

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
        await self._closed.wait()

    def _close_socket(self) -> None:
        for transport in tuple(self._transports):
            transport.abandon()
        self._endpoint.close()
        if self._turn is not None:
            self._turn.cancel()
        self._closed.set()

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        """Hand each datagram to its connection (called by the endpoint)."""
        if len(data) <= size or _is_of_one_connection(data, size):
            self._hand_over(data, size, address)
        else:
            for datagram in cut(data, size):
                self._hand_over(datagram, size, address)

    def _hand_over(self, data: bytes, size: int, address: Address) -> None:
        transport = self._route(data, address)
        if transport is not None:
            self._inboxes.put(transport, Read(data, size, address))

    def batch_received(self) -> None:
        """Let the connections take what was read, and answer (called by the endpoint)."""
        if self._turn is None or self._inboxes.octets > MAX_WAITING_OCTETS:
            self._run()

    def _run(self) -> None:
        """Let each connection take something, and answer, once; and again if there is more."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        inboxes = self._inboxes
        while inboxes:
            for transport in inboxes.round():
                for read in inboxes.take(transport):
                    transport.feed(*read)
                transport.answer()
            if inboxes.octets <= MAX_WAITING_OCTETS:
                break
        if inboxes:
            self._turn = asyncio.get_running_loop().call_soon(self._run)

    def error_received(self, error: OSError) -> None:
        """Errors of one peer are no concern of the others (called by the endpoint)."""

    def _route(self, data: bytes, address: Address) -> AioquicTransport | None:
        if not data:
            return None
        if not data[0] & 0x80:
            return self._routes.get(data[1 : 1 + CONNECTION_ID_OCTETS])
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CONNECTION_ID_OCTETS)
        except ValueError:
            return None
        if header.version not in self._configuration.supported_versions:
            # Never answer a Version Negotiation packet with another, and nothing that is
            # smaller than the answer could be (RFC 9000 Section 6.1).
            if header.packet_type is not QuicPacketType.VERSION_NEGOTIATION and len(data) >= 1200:
                answer = encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=self._configuration.supported_versions,
                )
                self._endpoint.send([answer], address)
            return None
        transport = self._routes.get(header.destination_cid)
        if transport is not None:
            return transport
        if header.packet_type is not QuicPacketType.INITIAL or len(data) < 1200:
            return None
        return self._accept(header, address)

    def _accept(self, header: QuicHeader, address: Address) -> AioquicTransport | None:
        """Make a connection for a client's first packet, or refuse it."""
        if not self._accepting:
            self._refuse(header, QuicErrorCode.CONNECTION_REFUSED, address)
            return None
        original, retried = header.destination_cid, None
        now = time.monotonic()
        if header.token:
            try:
                original = self._retry.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=now,
                )
                retried = header.destination_cid
            except ValueError:
                if self._door.asks_for_proof:
                    self._refuse(header, QuicErrorCode.INVALID_TOKEN, address)
                    return None
        peer = peer_of(address[0])
        verdict = self._door.asked(peer, now, proved=retried is not None)
        if verdict is Verdict.RETRY:
            self._send_retry(header, address)
            return None
        if verdict is Verdict.REFUSE:
            self._refuse(header, QuicErrorCode.CONNECTION_REFUSED, address)
            return None
        connection = Connection(
            self._settings,
            configuration=self._configuration,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
        )
        transport = AioquicTransport(
            connection, self._endpoint, self._settings, self._receiver_factory, remote=None
        )
        self._transports[transport] = set()
        if self._clients is not None:
            connection.client_check = ClientCheck(self._clients)
            transport.on_lost = partial(_log_stranger, transport)

        def note_id(octets: bytes, issued: bool) -> None:
            if issued:
                self._routes[octets] = transport
                self._transports[transport].add(octets)
            else:
                self._routes.pop(octets, None)
                self._transports[transport].discard(octets)

        established = False

        def note_established() -> None:
            nonlocal established
            established = True
            self._door.established(peer)

        def forget() -> None:
            for octets in self._transports.pop(transport, ()):
                self._routes.pop(octets, None)
            self._door.left(peer, established=established)

        transport.on_connected = note_established
        transport.on_connection_id = note_id
        transport.on_over = forget
        note_id(header.destination_cid, True)
        note_id(connection.host_cid, True)
        return transport

    def _send_retry(self, header: QuicHeader, address: Address) -> None:
        """Make a client prove that it is where it says (RFC 9000 Section 8.1.2)."""
        source_cid = os.urandom(CONNECTION_ID_OCTETS)
        retry = encode_quic_retry(
            version=header.version or 0,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=self._retry.create_token(
                address=address,
                original_destination_connection_id=header.destination_cid,
                retry_source_connection_id=source_cid,
                now=time.monotonic(),
            ),
        )
        self._endpoint.send([retry], address)

    def _refuse(self, header: QuicHeader, code: QuicErrorCode, address: Address) -> None:
        """Answer a client's first packet with CONNECTION_CLOSE, and keep nothing of it."""
        crypto = CryptoPair()
        crypto.setup_initial(
            cid=header.destination_cid, is_client=False, version=header.version or 0
        )
        builder = QuicPacketBuilder(
            host_cid=header.destination_cid,
            is_client=False,
            max_datagram_size=1200,
            peer_cid=header.source_cid,
            version=header.version or 0,
        )
        builder.start_packet(QuicPacketType.INITIAL, crypto)
        buf = builder.start_frame(
            QuicFrameType.TRANSPORT_CLOSE, capacity=TRANSPORT_CLOSE_FRAME_CAPACITY
        )
        buf.push_uint_var(code)
        buf.push_uint_var(QuicFrameType.PADDING)
        buf.push_uint_var(0)
        self._endpoint.send(builder.flush()[0], address)


def _log_stranger(transport: AioquicTransport, lost: ConnectionLost) -> None:
    """Say who was refused for want of a good certificate, and why."""
    alert = lost.code - QuicErrorCode.CRYPTO_ERROR
    if transport.client_certificate is None and not lost.by_peer and 0 <= alert < 256:
        try:
            name = AlertDescription(alert).name
        except ValueError:
            name = str(alert)
        log.warning("client refused", peer=transport.peer_address, alert=name, reason=lost.reason)


def _is_of_one_connection(data: bytes, size: int) -> bool:
    """Whether datagrams that came end to end have short headers and the same connection ID."""
    connection_id = data[1 : 1 + CONNECTION_ID_OCTETS]
    return not any(
        data[at] & 0x80 or data[at + 1 : at + 1 + CONNECTION_ID_OCTETS] != connection_id
        for at in range(0, len(data), size)
    )
