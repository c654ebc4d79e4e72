"""Relays further up: dialled, dialled again when lost, and told what can be had here."""

import asyncio
import random
from collections.abc import Callable

import structlog

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    NamespacePublication,
    QuicSettings,
    RequestHandler,
    open_connection,
)
from moqt.errors import MoqtError
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import NamespaceAppeared

log = structlog.get_logger("moqt.relay")

#: Seconds between attempts, doubled each time and shortened at random.
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 30.0


class Upstream:
    """A relay that Tracks are asked of which nobody publishes here.

    What it tells of itself is not announced to it: it has a publisher, and would ask here for
    what is received from there. It is announced once nobody has it there any more.

    Args:
        uri: Where it is.
        handler: Serves its requests.
        own: Namespaces that can be had here; it is told of those that it does not tell of.
        found: Namespaces that it tells of are added here.
        tls: Whom to believe.
        quic: Limits of the QUIC connection.
        config: Limits of the session.
        timeout_s: Seconds for the connection, and for each answer.
    """

    def __init__(
        self,
        uri: str,
        handler: RequestHandler,
        *,
        own: NamespaceDirectory,
        found: NamespaceDirectory,
        tls: ClientTls | None = None,
        quic: QuicSettings | None = None,
        config: SessionConfig | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.uri = uri
        self._handler = handler
        self._own = own
        self._found = found
        self._tls = tls
        self._quic = quic
        self._config = config
        self._timeout_s = timeout_s
        self._there: set[TrackNamespace] = set()  # what it tells of, ours among it
        self._changed = asyncio.Event()
        self.connection: MoqtConnection | None = None
        """The session, while there is one."""

    async def run(self, on_change: Callable[[], None]) -> None:
        """Keep the session up, until cancelled; ``on_change`` is called when there is a new one."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                connection = await open_connection(
                    self.uri,
                    tls=self._tls,
                    quic=self._quic,
                    config=self._config,
                    handler=self._handler,
                    timeout_s=self._timeout_s,
                )
            except (OSError, MoqtError) as exc:  # TimeoutError is an OSError
                log.warning("upstream unreachable", uri=self.uri, error=str(exc) or repr(exc))
            else:
                backoff = _FIRST_BACKOFF_S
                self.connection = connection
                on_change()
                try:
                    await self._use(connection)
                finally:
                    self.connection = None
                    await connection.close(drain_s=0.5)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _LAST_BACKOFF_S)

    async def _use(self, connection: MoqtConnection) -> None:
        asked = asyncio.Event()
        tasks = [
            asyncio.ensure_future(self._discover(connection, asked)),
            asyncio.ensure_future(self._announce(connection, asked)),
        ]
        try:
            await connection.wait_going_away()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce(self, connection: MoqtConnection, asked: asyncio.Event) -> None:
        """Keep told what can be had here and not there, once it was asked what there is."""
        await asked.wait()
        announced: dict[TrackNamespace, NamespacePublication] = {}
        self._own.watch(self._changed.set)
        try:
            while True:
                self._changed.clear()
                wanted = self._own.matching(TrackNamespace())
                for namespace in announced.keys() - wanted:
                    announced.pop(namespace).withdraw()
                for namespace in wanted - announced.keys():
                    if namespace in self._there:
                        continue
                    try:
                        announced[namespace] = await connection.publish_namespace(
                            namespace, timeout_s=self._timeout_s
                        )
                    except (MoqtError, TimeoutError) as exc:
                        log.warning("not announced", uri=self.uri, error=str(exc))
                await self._changed.wait()
        finally:
            self._own.unwatch(self._changed.set)

    async def _discover(self, connection: MoqtConnection, asked: asyncio.Event) -> None:
        """Take note of what can be had there."""
        try:
            found = await connection.subscribe_namespace(
                TrackNamespace(), timeout_s=self._timeout_s
            )
            asked.set()
            async for event in found:
                if isinstance(event, NamespaceAppeared):
                    self._there.add(event.namespace)
                    self._found.add(event.namespace)
                else:
                    self._there.discard(event.namespace)
                    self._found.remove(event.namespace)
                    self._changed.set()
        except (MoqtError, TimeoutError) as exc:
            log.warning("no discovery", uri=self.uri, error=str(exc))
        finally:
            for namespace in self._there:
                self._found.remove(namespace)
            self._there.clear()
            self._changed.set()
            asked.set()
