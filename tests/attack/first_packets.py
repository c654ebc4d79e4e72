"""First packets of handshakes that are never completed, from any loopback address."""

import contextlib
import socket
import ssl
import time

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from moqt.aio.alpn import ALPN

#: Loopback addresses that are not the one of everybody else: they count as other peers.
ATTACKER, ANOTHER = "127.0.0.66", "127.0.0.67"


def first_packet(server: tuple[str, int]) -> bytes:
    """Return an Initial packet of a new client, as it goes into a datagram."""
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=[ALPN], verify_mode=ssl.CERT_NONE
    )
    client = QuicConnection(configuration=configuration)
    client.connect(server, now=time.monotonic())
    return client.datagrams_to_send(now=time.monotonic())[0][0]


class Sender:
    """A UDP socket at a loopback address of choice, that sends and does not care.

    Args:
        server: Where to.
        source: From which address; the port is any.
    """

    def __init__(self, server: tuple[str, int], source: str = ATTACKER) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((source, 0))
        self._sock.connect(server)
        self._sock.setblocking(False)
        self._server = server

    def begin(self, count: int = 1) -> None:
        """Begin handshakes."""
        for _ in range(count):
            self.send(first_packet(self._server))

    def send(self, datagram: bytes) -> None:
        """Send one datagram, if there is room."""
        with contextlib.suppress(BlockingIOError):
            self._sock.send(datagram)

    def answers(self) -> list[bytes]:
        """Return what has come back."""
        found = []
        try:
            while True:
                found.append(self._sock.recv(65_536))
        except (BlockingIOError, ConnectionRefusedError):
            return found

    def close(self) -> None:
        """Free the port."""
        self._sock.close()
