"""Dialling: from a name to a connection whose handshake is complete, or to the reason why not."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription

from moqt.aio.aioquic.configuration import client_configuration
from moqt.aio.aioquic.connection import Connection
from moqt.aio.aioquic.transport import AioquicTransport
from moqt.aio.errors import AlpnMismatchError, DialError, TlsAlertError
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ClientTls
from moqt.aio.transport import ConnectionLost, ReceiverFactory
from moqt.aio.udp import Address, UdpEndpoint, connected_socket, spell


async def dial(
    host: str,
    port: int,
    settings: QuicSettings,
    tls: ClientTls,
    receiver_factory: ReceiverFactory,
    *,
    alpn: Sequence[str],
    timeout_s: float,
) -> AioquicTransport:
    """Connect to a server and complete the handshake.

    Args:
        host: Name or address; every address of a name is tried in turn.
        port: UDP port.
        settings: Limits of the connection.
        tls: Whom to believe.
        receiver_factory: Makes the receiver, when the handshake is complete; its ``connected``
            has been called when this returns.
        alpn: Protocols to offer, the preferred one first.
        timeout_s: For all of it.

    Raises:
        TlsSettingsError: If a file of ``tls`` cannot be used.
        AlpnMismatchError: If the server speaks none of ``alpn``.
        TlsAlertError: If the handshake failed otherwise, as for a certificate not believed.
        DialError: If the host is not known or not reachable, or refused the connection.
        TimeoutError: If nobody answered in time.
    """
    configuration = client_configuration(settings, tls, alpn, host)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except TimeoutError:
        raise TimeoutError(f"no address for {host!r} within {timeout_s} s") from None
    except (OSError, UnicodeError) as error:
        raise DialError(f"no address for {host!r}: {error}") from error
    failure: OSError = DialError(f"no address for {host!r}")
    for index, (family, _, _, _, address) in enumerate(found):
        share = (deadline - loop.time()) / (len(found) - index)
        attempt = _Attempt(spell(address))
        try:
            return await attempt.run(
                family, address, settings, configuration, receiver_factory, share
            )
        except TlsAlertError:
            raise  # somebody answered: another address is no better
        except OSError as error:
            failure = error
    raise failure


class _Attempt:
    """One address being dialled, and afterwards the socket of that connection."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: Address = ()
        self._transport: AioquicTransport | None = None

    async def run(
        self,
        family: int,
        address: Address,
        settings: QuicSettings,
        configuration: QuicConfiguration,
        receiver_factory: ReceiverFactory,
        timeout_s: float,
    ) -> AioquicTransport:
        try:
            sock = connected_socket(family, address)
        except OSError as error:
            raise DialError(f"cannot reach {self._where}: {error.strerror}") from error
        endpoint = UdpEndpoint(sock, self)
        connection = Connection(settings, configuration=configuration)
        transport = AioquicTransport(
            connection, endpoint, settings, receiver_factory, remote=address
        )
        self._transport, self._remote = transport, address
        transport.on_connected = self._connected
        transport.on_lost = self._lost
        transport.on_over = endpoint.close
        transport.start(address)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except BaseException as error:
            transport.abandon()
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"no answer from {self._where} within {timeout_s:.1f} s"
                ) from None
            raise
        return transport

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        # The socket is connected, so no other address can be in ``address``.
        if self._transport is not None:
            self._transport.feed(data, size, self._remote)

    def batch_received(self) -> None:
        if self._transport is not None:
            self._transport.answer()

    def error_received(self, error: OSError) -> None:
        if isinstance(error, ConnectionRefusedError):
            self._give_up(DialError(f"nobody listens on {self._where}"))

    def _connected(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _lost(self, lost: ConnectionLost) -> None:
        self._give_up(_dial_error(self._where, lost))

    def _give_up(self, error: OSError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)


def _dial_error(where: str, lost: ConnectionLost) -> DialError:
    alert = lost.code - QuicErrorCode.CRYPTO_ERROR
    if lost.application or not 0 <= alert < 256:
        with contextlib.suppress(ValueError):
            name = QuicErrorCode(lost.code).name
            return DialError(f"{where} ended the handshake with {name}: {lost.reason or '-'}")
        return DialError(f"{where} ended the handshake with code {lost.code}: {lost.reason or '-'}")
    who = where if lost.by_peer else "this end"
    try:
        name = AlertDescription(alert).name
    except ValueError:
        name = str(alert)
    if name == "no_application_protocol":
        return AlpnMismatchError(f"{where} speaks none of the protocols offered", name)
    return TlsAlertError(
        f"TLS with {where} failed, {who} sent the alert {name}: {lost.reason or '-'}", name
    )
