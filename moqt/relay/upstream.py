"""Relays further up: dialled, dialled again when lost, and told what can be had here."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

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
_LAST_BACKOFF_S = 4.0

#: Seconds after which a relay that gives no sign of life is dialled a second time. One that was
#: killed says nothing, and its sessions would stand until they time out.
SILENCE_S = 3.0


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
        config: Limits of the session, and the tokens to show in it.
        prefixes: Of the namespaces that it is asked for; none a prefix of another.
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
        prefixes: Sequence[TrackNamespace] = (TrackNamespace(),),
        timeout_s: float = 10.0,
    ) -> None:
        self.uri = uri
        self._handler = handler
        self._own = own
        self._found = found
        self._tls = tls
        self._quic = quic
        self._config = config
        self._prefixes = tuple(prefixes)
        self._timeout_s = timeout_s
        self._there: set[TrackNamespace] = set()  # what it tells of, ours among it
        self._changed = asyncio.Event()
        self.connection: MoqtConnection | None = None
        """The session, while there is one."""

    async def run(self, on_change: Callable[[], None]) -> None:
        """Keep the session up, until cancelled; ``on_change`` is called when there is a new one."""
        backoff = _FIRST_BACKOFF_S
        while True:
            connection = await self._dial()
            if connection is not None:
                backoff = _FIRST_BACKOFF_S
            while connection is not None:
                self.connection = connection
                on_change()
                following = None
                try:
                    following = await self._use(connection)
                finally:
                    self.connection = None
                    await connection.close(drain_s=0.5 if following is None else 0.0)
                connection = following
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _LAST_BACKOFF_S)

    async def _dial(self) -> MoqtConnection | None:
        try:
            return await open_connection(
                self.uri,
                tls=self._tls,
                quic=self._quic,
                config=self._config,
                handler=self._handler,
                timeout_s=self._timeout_s,
            )
        except (OSError, MoqtError) as exc:  # TimeoutError is an OSError
            log.warning("upstream unreachable", uri=self.uri, error=str(exc) or repr(exc))
            return None

    async def _use(self, connection: MoqtConnection) -> MoqtConnection | None:
        """Use a session until it is over; return the one that takes its place, if one does."""
        asked = {prefix: asyncio.Event() for prefix in self._prefixes}
        tasks = [
            *(
                asyncio.ensure_future(self._discover(connection, prefix, event))
                for prefix, event in asked.items()
            ),
            asyncio.ensure_future(self._announce(connection, asked.values())),
        ]
        try:
            return await self._until_replaced(connection)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_replaced(self, connection: MoqtConnection) -> MoqtConnection | None:
        """Return when a session is over, or another one stands beside it since it is silent."""
        leaving = asyncio.ensure_future(connection.wait_going_away())
        try:
            while True:
                silence = asyncio.ensure_future(connection.wait_silent(SILENCE_S))
                try:
                    await asyncio.wait({leaving, silence}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    silence.cancel()
                if leaving.done() or connection.closed is not None:
                    return None
                log.warning("upstream silent", uri=self.uri)
                heard_at = connection.heard_at
                following = await self._dial()
                if following is not None and connection.heard_at == heard_at:
                    return following
                if following is not None:  # it was only busy
                    await following.close(drain_s=0.0)
        finally:
            leaving.cancel()

    async def _announce(self, connection: MoqtConnection, asked: Iterable[asyncio.Event]) -> None:
        """Keep told what can be had here and not there, once it was asked what there is."""
        for event in asked:
            await event.wait()
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

    async def _discover(
        self, connection: MoqtConnection, prefix: TrackNamespace, asked: asyncio.Event
    ) -> None:
        """Take note of what can be had there under a prefix."""
        there: set[TrackNamespace] = set()
        try:
            found = await connection.subscribe_namespace(prefix, timeout_s=self._timeout_s)
            asked.set()
            async for event in found:
                if isinstance(event, NamespaceAppeared):
                    there.add(event.namespace)
                    self._there.add(event.namespace)
                    self._found.add(event.namespace)
                else:
                    there.discard(event.namespace)
                    self._there.discard(event.namespace)
                    self._found.remove(event.namespace)
                    self._changed.set()
        except (MoqtError, TimeoutError) as exc:
            log.warning("no discovery", uri=self.uri, error=str(exc))
        finally:
            for namespace in there:
                self._found.remove(namespace)
            self._there -= there
            self._changed.set()
            asked.set()
