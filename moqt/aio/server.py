"""Listening for MOQT sessions: one UDP port, many connections, one handler."""

import asyncio
from collections.abc import Callable

from moqt.aio.alpn import ALPN
from moqt.aio.connection import MoqtConnection, RequestHandler
from moqt.aio.engine import engine_named
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ServerTls
from moqt.aio.transport import QuicListener, QuicTransport
from moqt.authority import Authority
from moqt.codepoints import SessionErrorCode
from moqt.session.config import Role, SessionConfig
from moqt.session.events import SessionTerminated
from moqt.session.guests import Guests


class Server:
    """A listening endpoint. Made by :func:`serve`; also an asynchronous context manager."""

    def __init__(
        self,
        config: SessionConfig,
        handler: RequestHandler,
        on_connection: Callable[[MoqtConnection], None] | None,
        authority: Authority | None = None,
        guests: Guests | None = None,
    ) -> None:
        self._config = config
        self._guests = guests or Guests()
        self._authority = authority
        self._handler = handler
        self._on_connection = on_connection
        self._connections: dict[MoqtConnection, None] = {}
        self._listener: QuicListener | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address and UDP port that are listened on."""
        assert self._listener is not None, "serve() has set it"
        return self._listener.address

    @property
    def connections(self) -> tuple[MoqtConnection, ...]:
        """The sessions that are alive."""
        self._connections = {c: None for c in self._connections if c.closed is None}
        return tuple(self._connections)

    def listening(self, listener: QuicListener) -> None:
        """Note what was bound (called once, by :func:`serve`)."""
        self._listener = listener

    def receiver(self, transport: QuicTransport) -> MoqtConnection:
        """Make the session of a new connection (called by the engine)."""
        connection = MoqtConnection(
            transport, Role.SERVER, self._config, self._handler, self._authority, self._guests
        )
        connection.on_terminated = self._ended
        _ = self.connections  # forget those that ended
        self._connections[connection] = None
        if self._on_connection is not None:
            self._on_connection(connection)
        return connection

    def _ended(self, connection: MoqtConnection, event: SessionTerminated) -> None:
        if event.flooded and self._listener is not None:
            self._listener.bar(connection.peer_address[0])

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on; sessions go on.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """
        assert self._listener is not None, "serve() has set it"
        self._listener.identify(tls)

    def ask_again(self) -> None:
        """Have the authority asked again about all that goes on: something was revoked, perhaps."""
        for connection in self.connections:
            connection.ask_again()

    async def close(
        self, *, goaway_timeout_s: float = 0.0, new_session_uri: str = "", drain_s: float = 2.0
    ) -> None:
        """Stop accepting, ask everybody to leave, close what is left, free the port.

        Args:
            goaway_timeout_s: How long peers have to finish after GOAWAY; 0 sends none.
            new_session_uri: Where they are told to go.
            drain_s: How long closing waits for what was sent to be acknowledged.
        """
        assert self._listener is not None, "serve() has set it"
        self._listener.stop_accepting()
        if goaway_timeout_s > 0 and self.connections:
            for connection in self.connections:
                connection.goaway(new_session_uri, round(goaway_timeout_s * 1000))
            waiting = [asyncio.ensure_future(c.wait_closed()) for c in self.connections]
            _, late = await asyncio.wait(waiting, timeout=goaway_timeout_s)
            for task in late:
                task.cancel()
        await asyncio.gather(
            *(
                connection.close(SessionErrorCode.NO_ERROR, "server stopped", drain_s=drain_s)
                for connection in self.connections
            )
        )
        self._listener.close()
        await self._listener.wait_closed()

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def serve(
    host: str,
    port: int,
    *,
    tls: ServerTls,
    handler: RequestHandler,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
    on_connection: Callable[[MoqtConnection], None] | None = None,
    authority: Authority | None = None,
    guests: Guests | None = None,
) -> Server:
    """Listen for sessions.

    Args:
        host: Name or address to bind.
        port: UDP port; 0 for any that is free, which ``address`` then tells.
        tls: The certificate to show.
        handler: Serves the requests of all sessions.
        quic: Limits of the QUIC connections, and the engine that carries them.
        config: Limits of the sessions.
        on_connection: Called with each new session, ahead of its SETUP.
        authority: Asked about each SETUP and each request, before the handler hears of it; None:
            everything is allowed.
        guests: Counts what each peer has; by default one of this listener alone, with the limits
            that it comes with.

    Raises:
        EngineUnavailableError: If the engine that ``quic`` names cannot run here.
        TlsSettingsError: If a file of ``tls`` cannot be used.
        OSError: If the address cannot be bound; the message names it.
    """
    server = Server(config or SessionConfig(), handler, on_connection, authority, guests)
    quic = quic or QuicSettings()
    listen = engine_named(quic.engine).listen
    server.listening(await listen(host, port, quic, tls, server.receiver, alpn=[ALPN]))
    return server
