"""Dialling a MOQT server: ``connect()`` is an asynchronous context manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from moqt.aio.alpn import ALPN
from moqt.aio.connection import MoqtConnection, RequestHandler
from moqt.aio.engine import engine_named
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ClientTls
from moqt.aio.transport import QuicTransport
from moqt.session.config import Role, SessionConfig

DEFAULT_PORT = 443


@dataclass(frozen=True, slots=True)
class MoqtUri:
    """``moqt://authority path-abempty [?query] [#fragment]`` (MOQT, "MOQT URI")."""

    host: str
    port: int
    authority: str
    path: str
    """Path and query, as PATH carries them."""

    @classmethod
    def parse(cls, text: str) -> "MoqtUri":
        """Take a URI apart.

        Raises:
            ValueError: If it is none; the message says what is wrong with it.
        """
        parts = urlsplit(text)
        if parts.scheme != "moqt":
            raise ValueError(f"{text!r} is no moqt:// URI")
        if not parts.hostname:
            raise ValueError(f"{text!r} names no host")
        try:
            port = parts.port if parts.port is not None else DEFAULT_PORT
        except ValueError:
            raise ValueError(f"{text!r} has a port that is not 0 to 65535") from None
        if parts.username is not None:
            raise ValueError(f"{text!r} carries user information, which is never sent")
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, port, parts.netloc, path)


@asynccontextmanager
async def connect(
    uri: str,
    *,
    tls: ClientTls | None = None,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
    handler: RequestHandler | None = None,
    timeout_s: float = 10.0,
    drain_s: float = 5.0,
) -> AsyncIterator[MoqtConnection]:
    """Open a session and close it at the end of the block.

    Args:
        uri: ``moqt://host:port/path``.
        tls: Whom to believe; by default the system's certificates.
        quic: Limits of the QUIC connection, and the engine that carries it.
        config: Limits of the session; ``path`` and ``authority`` are taken from ``uri``.
        handler: Serves the peer's requests; by default none is.
        timeout_s: For the handshake and both SETUPs together.
        drain_s: How long closing waits for what was sent to be acknowledged.

    Raises:
        ValueError: If ``uri`` is none.
        EngineUnavailableError: If the engine that ``quic`` names cannot run here.
        TlsSettingsError: If a file of ``tls`` cannot be used.
        ConnectionError: If the connection cannot be made; the message says why.
        TimeoutError: If it takes too long.
        SessionClosed: If the peer closed the session during its set-up.
    """
    connection = await open_connection(
        uri, tls=tls, quic=quic, config=config, handler=handler, timeout_s=timeout_s
    )
    try:
        yield connection
    finally:
        await connection.close(drain_s=drain_s)


async def open_connection(
    uri: str,
    *,
    tls: ClientTls | None = None,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
    handler: RequestHandler | None = None,
    timeout_s: float = 10.0,
) -> MoqtConnection:
    """Open a session that the caller closes; see :func:`connect`."""
    target = MoqtUri.parse(uri)
    config = replace(config or SessionConfig(), path=target.path, authority=target.authority)
    made: list[MoqtConnection] = []

    def receiver(transport: QuicTransport) -> MoqtConnection:
        made.append(MoqtConnection(transport, Role.CLIENT, config, handler or RequestHandler()))
        return made[-1]

    quic = quic or QuicSettings()
    await engine_named(quic.engine).dial(
        target.host,
        target.port,
        quic,
        tls or ClientTls(),
        receiver,
        alpn=[ALPN],
        timeout_s=timeout_s,
    )
    [connection] = made
    try:
        await connection.wait_established(timeout_s)
    except BaseException:
        await connection.close(drain_s=0.0)
        raise
    return connection
