"""Serving: where what a process holds can be had, at its listeners and through relays. Shell.

What a producer and a store have in common, whatever it is that they hold.
"""

import asyncio
from collections.abc import Callable

import structlog

from kvcs.errors import ConfigError
from kvcs.link import check_target
from kvcs.producer.handler import CountingHandler
from kvcs.producer.relay import CLOSE_S, Relay
from kvcs.telemetry import Counters, LogEvent
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    Server,
    ServerTls,
    TlsSettingsError,
    serve,
)
from moqt.authority import Authority
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.guests import Guests

log = structlog.get_logger("kvcs.producer")


class Serving:
    """Listeners and relays, and the tasks that belong to them.

    Args:
        handler: Answers requests.
        directory: What relays are kept told of.
        counters: Where things are counted.
        connect_timeout_s: Seconds until a relay must be reached.
        request_timeout_s: Seconds until it must answer.
    """

    def __init__(
        self,
        handler: CountingHandler,
        directory: NamespaceDirectory,
        counters: Counters,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._answering = handler
        self._announcing = directory
        self._counting = counters
        self._timeouts = connect_timeout_s, request_timeout_s
        self._servers: list[Server] = []
        self._relays: list[Relay] = []
        self._tasks = asyncio.TaskGroup()

    async def listen(
        self,
        host: str,
        port: int,
        *,
        tls: ServerTls,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
        on_connection: Callable[[MoqtConnection], None] | None = None,
        authority: Authority | None = None,
        guests: Guests | None = None,
    ) -> tuple[str, int]:
        """Accept sessions of consumers and relays.

        ``on_connection`` is called with each new one, ahead of its SETUP; for figures.
        ``authority`` is asked about each session and each request; None: everything is allowed.
        ``guests`` counts what each peer has; by default one with the limits that it comes with.

        Returns:
            Address and UDP port, for ``port`` 0 the one that was free.

        Raises:
            ConfigError: If the address cannot be bound or a certificate file cannot be used;
                the message names it.
        """
        try:
            server = await serve(
                host,
                port,
                tls=tls,
                handler=self._answering,
                quic=quic,
                config=config,
                on_connection=on_connection,
                authority=authority,
                guests=guests,
            )
        except (OSError, TlsSettingsError) as exc:
            raise ConfigError(f"cannot listen on {host} port {port}: {exc}") from None
        self._servers.append(server)
        log.info(LogEvent.LISTENING, host=server.address[0], port=server.address[1])
        return server.address

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on; sessions go on.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """
        for server in self._servers:
            server.identify(tls)

    def ask_again(self) -> None:
        """Have the authority asked again about all that goes on: something was revoked, perhaps."""
        for server in self._servers:
            server.ask_again()

    def announce_at(
        self,
        uri: str,
        *,
        tls: ClientTls | None = None,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
    ) -> Relay:
        """Dial a relay, and keep announced there from now on what can be had here.

        The connection is made in the background, and made again whenever it is lost.

        Raises:
            ConfigError: If the URI or a file of ``tls`` cannot be used; the message names it.
        """
        tls = tls or ClientTls()
        check_target(uri, tls)
        connect_timeout_s, request_timeout_s = self._timeouts
        relay = Relay(
            uri,
            self._announcing,
            self._answering,
            self._counting,
            tls=tls,
            quic=quic,
            config=config,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
        )
        self._relays.append(relay)
        relay.start(self._tasks)
        return relay

    async def _stop_serving(self, drain_s: float) -> None:
        """Close all sessions, once consumers are done or ``drain_s`` seconds have passed."""
        await asyncio.gather(
            *(
                server.close(goaway_timeout_s=drain_s, drain_s=min(drain_s, CLOSE_S))
                for server in self._servers
            ),
            *(relay.close(drain_s) for relay in self._relays),
        )
