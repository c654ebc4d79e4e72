"""Dialling: from a name to a connection whose handshake is complete, or to the reason why not."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence

from moqt.aio.errors import AlpnMismatchError, DialError, TlsAlertError
from moqt.aio.picoquic.transport import PicoquicTransport
from moqt.aio.picoquic.worker import Worker
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ClientTls, TlsSettingsError, load_cas
from moqt.aio.transport import ConnectionLost, ReceiverFactory
from moqt.aio.udp import Address, UdpEndpoint, connected_socket, spell

#: Transport error codes that end a handshake (RFC 9000 Section 20.1).
CONNECTION_REFUSED = 0x2
_ERRORS = {0x1: "INTERNAL_ERROR", CONNECTION_REFUSED: "CONNECTION_REFUSED", 0xB: "INVALID_TOKEN"}

#: TLS alerts are errors from here on (RFC 9001 Section 4.8).
CRYPTO_ERROR = 0x100
NO_APPLICATION_PROTOCOL = 120

#: A UDP payload that no QUIC server answers: neither header form has its fixed bit clear.
_KNOCK = b"\0"


async def dial(
    host: str,
    port: int,
    settings: QuicSettings,
    tls: ClientTls,
    receiver_factory: ReceiverFactory,
    *,
    alpn: Sequence[str],
    timeout_s: float,
) -> PicoquicTransport:
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
    load_cas(tls)
    if tls.certificate_file is not None or tls.key_file is not None:
        raise TlsSettingsError(
            "client_certificate_file is set, but the QUIC engine picoquic shows no certificate of "
            "a client: expected the engine aioquic"
        )
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
        attempt = _Attempt(tls.server_name or host, family, address, settings, receiver_factory)
        try:
            return await attempt.run(tls, alpn, share)
        except TlsAlertError:
            raise  # somebody answered: another address is no better
        except OSError as error:
            failure = error
    raise failure


class _Attempt:
    """One address being dialled, and afterwards the worker of that connection."""

    def __init__(
        self,
        name: str,
        family: int,
        address: Address,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
    ) -> None:
        self._name = name
        self._family = family
        self._address = address
        self._where = spell(address)
        self._settings = settings
        self._receiver_factory = receiver_factory
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._worker = Worker(self._made)
        self._transport: PicoquicTransport | None = None

    async def run(self, tls: ClientTls, alpn: Sequence[str], timeout_s: float) -> PicoquicTransport:
        try:
            knocking = UdpEndpoint(connected_socket(self._family, self._address), self)
        except OSError as error:
            raise DialError(f"cannot reach {self._where}: {error.strerror}") from error
        knocking.send([_KNOCK], None)
        protocols = list(alpn)
        try:
            self._worker.start(
                self._settings,
                self._family,
                is_client=True,
                verify_peer=tls.verify,
                ca_file=None if tls.ca_file is None else str(tls.ca_file),
                alpn=protocols[0] if len(protocols) == 1 else None,
                alpn_list=protocols if len(protocols) > 1 else None,
            )
            self._worker.context.create_client_connection(
                self._address[0],
                self._address[1],
                sni=self._name,
                alpn=protocols[0] if len(protocols) == 1 else None,
            )
            async with asyncio.timeout(timeout_s):
                await self._ready
        except BaseException as error:
            if self._transport is not None:
                self._transport.abandon()
            self._worker.stop()
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"no answer from {self._where} within {timeout_s:.1f} s"
                ) from None
            raise
        finally:
            knocking.close()
        assert self._transport is not None, "it is what became ready"
        return self._transport

    def datagrams_received(self, data: bytes, size: int, address: Address) -> None:
        """Nobody answers a knock."""

    def batch_received(self) -> None:
        """Nobody answers a knock."""

    def error_received(self, error: OSError) -> None:
        if isinstance(error, ConnectionRefusedError):
            self._give_up(DialError(f"nobody listens on {self._where}"))

    def _made(self, connection: int) -> PicoquicTransport | None:
        if self._transport is not None:
            return None
        self._transport = transport = PicoquicTransport(
            self._worker, connection, self._settings, self._receiver_factory, is_client=True
        )
        transport.on_connected = self._connected
        transport.on_lost = self._lost
        transport.on_over = self._over
        return transport

    def _over(self) -> None:
        # Not amid a batch of events, nor while the worker is asked something.
        asyncio.get_running_loop().call_soon(self._worker.stop)

    def _connected(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _lost(self, lost: ConnectionLost) -> None:
        self._give_up(_dial_error(self._where, self._name, lost))

    def _give_up(self, error: OSError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)


def _dial_error(where: str, name: str, lost: ConnectionLost) -> DialError:
    alert = lost.code - CRYPTO_ERROR
    if lost.application or (lost.code and not 0 <= alert < 256):
        spelt = _ERRORS.get(lost.code, f"code {lost.code}")
        return DialError(f"{where} ended the handshake with {spelt}")
    if not lost.by_peer:
        return TlsAlertError(
            f"TLS with {where} failed, this end sent an alert such as bad_certificate: "
            f"what it showed is not believed, has expired, or is not for {name}",
            "bad_certificate",
        )
    if alert == NO_APPLICATION_PROTOCOL:
        return AlpnMismatchError(
            f"{where} speaks none of the protocols offered", "no_application_protocol"
        )
    spelt = str(alert)
    with contextlib.suppress(ValueError):
        spelt = ssl.AlertDescription(alert).name.removeprefix("ALERT_DESCRIPTION_").lower()
    return TlsAlertError(f"TLS with {where} failed, {where} sent the alert {spelt}", spelt)
