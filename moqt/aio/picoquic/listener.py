"""Listening: one worker, one UDP port, many connections."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence

from moqt.aio.picoquic.library import Command
from moqt.aio.picoquic.transport import PicoquicTransport
from moqt.aio.picoquic.worker import Worker
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ServerTls, TlsSettingsError, load_identity
from moqt.aio.transport import ReceiverFactory
from moqt.aio.udp import Address, spell

#: What a client is closed with whom nobody accepts (RFC 9000 Section 20.1).
CONNECTION_REFUSED = 0x2

#: How long the thread may take to bind its socket.
BINDING_S = 5.0

#: How long connections have to say that they are closed before the socket is.
FAREWELL_S = 0.25


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

    The port is bound on every address of the family, since picoquic binds no other; clients that
    came in elsewhere than at ``host`` are refused when their handshake begins.

    Args:
        host: Name or address; the first address of a name is taken.
        port: UDP port, 0 for any that is free.
        settings: Limits of each connection, and how many there may be.
        tls: The certificate to show.
        receiver_factory: Makes the receiver of each connection whose handshake is complete.
        alpn: Protocols accepted, the preferred one first.

    Raises:
        TlsSettingsError: If a file of ``tls`` cannot be used.
        OSError: If the address is not known or cannot be bound; the message names it.
    """
    load_identity(tls)
    if tls.client_ca_file is not None or tls.client_names:
        raise TlsSettingsError(
            "client_ca_file is set, but the QUIC engine picoquic asks no client for a certificate: "
            "expected the engine aioquic"
        )
    loop = asyncio.get_running_loop()
    where = spell((host, port))
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        address = _free_address(family, address)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error
    listener = Listener(address, settings, receiver_factory)
    protocols = list(alpn)
    try:
        listener.worker.start(
            settings,
            family,
            port=address[1],
            is_client=False,
            cert_file=str(tls.certificate_file),
            key_file=str(tls.key_file),
            alpn=protocols[0] if len(protocols) == 1 else None,
            alpn_list=protocols if len(protocols) > 1 else None,
            max_connections=settings.max_connections,
            retry=settings.retry,
        )
    except RuntimeError as error:
        listener.worker.stop()
        if "thread" in str(error):
            raise OSError(errno.EADDRINUSE, f"cannot listen on {where}: {error}") from error
        raise TlsSettingsError(f"{tls.certificate_file}: picoquic cannot use it") from error
    try:
        async with asyncio.timeout(BINDING_S):
            await listener.worker.listening.wait()
    except BaseException as error:
        listener.worker.stop()
        if isinstance(error, TimeoutError):
            raise OSError(errno.EADDRINUSE, f"cannot listen on {where}") from error
        raise
    return listener


def _free_address(family: int, address: Address) -> Address:
    """Return ``address`` with a port that is free on every address, as picoquic binds it.

    Raises:
        OSError: If the address is not of this machine, or the port is in use.
    """
    with (
        socket.socket(family, socket.SOCK_DGRAM) as own,
        socket.socket(family, socket.SOCK_DGRAM) as every,
    ):
        own.bind(address)
        bound: Address = own.getsockname()
        own.close()
        if family == socket.AF_INET6:
            every.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        every.bind(("", bound[1]))
    return bound


class Listener:
    """Many connections of one worker. Made by :func:`listen`."""

    def __init__(
        self, address: Address, settings: QuicSettings, receiver_factory: ReceiverFactory
    ) -> None:
        self.worker = Worker(self._accept)
        self._address = address
        self._settings = settings
        self._receiver_factory = receiver_factory
        self._transports: dict[PicoquicTransport, None] = {}
        self._accepting = True
        self._closing = False
        self._closed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        host = ipaddress.ip_address(address[0].partition("%")[0])
        self._only = None if host.is_unspecified else host

    @property
    def address(self) -> tuple[str, int]:
        """Address and UDP port that are listened on."""
        return self._address[0], self._address[1]

    @property
    def transports(self) -> tuple[PicoquicTransport, ...]:
        """The connections of the moment, those in their handshake or closing included."""
        return tuple(self._transports)

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on: picoquic cannot.

        Raises:
            TlsSettingsError: Always. Nothing changes.
        """
        raise TlsSettingsError(
            f"{tls.certificate_file}: the QUIC engine picoquic keeps the certificate that it "
            "began with, restart to change it"
        )

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; those there are go on."""
        self._accepting = False

    def bar(self, host: str) -> None:
        """Do nothing: who has not come through the handshake is not told, and cannot be refused."""

    def close(self) -> None:
        """Close what connections there are, with code 0, and then the socket."""
        if self._closing:
            return
        self._closing = True
        self._accepting = False
        for transport in tuple(self._transports):
            transport.close(0, "listener closed")
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(FAREWELL_S, self._close_socket)
        if not self._transports:
            loop.call_soon(self._close_socket)

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
        await self._closed.wait()

    def _accept(self, connection: int) -> PicoquicTransport | None:
        local = self.worker.context.local_address(connection)
        elsewhere = (
            self._only is not None
            and local is not None
            and ipaddress.ip_address(local[0].partition("%")[0]) != self._only
        )
        if not self._accepting or elsewhere:
            self.worker.ask(Command.CLOSE, connection, code=CONNECTION_REFUSED)
            return None
        transport = PicoquicTransport(
            self.worker, connection, self._settings, self._receiver_factory, is_client=False
        )
        self._transports[transport] = None

        def forget() -> None:
            self._transports.pop(transport, None)
            if self._closing and not self._transports:
                asyncio.get_running_loop().call_soon(self._close_socket)

        transport.on_over = forget
        return transport

    def _close_socket(self) -> None:
        """End the thread and its socket; who is still connected is not told."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._deadline is not None:
            self._deadline.cancel()
        self.worker.stop()
        for transport in tuple(self._transports):
            transport.abandon()
