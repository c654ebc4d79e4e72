"""Relay: one that is dialled, and at which every publication is kept announced.

There is one session, or none while it is made again. Only a relay that goes away, or is silent,
has two for a time: what is announced over the new one is withdrawn from the old one, which is
closed when nobody is served over it any more.
"""

import asyncio
from dataclasses import dataclass

import structlog

from kvcs.link import REDIAL_S, SILENCE_S, Backoff, why_not_there
from kvcs.producer.handler import CountingHandler
from kvcs.profile.naming import short_hex
from kvcs.telemetry import Counter, Counters, LogEvent
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    NamespacePublication,
    QuicSettings,
    open_connection,
)
from moqt.codepoints import SessionErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory

log = structlog.get_logger("kvcs.producer")

#: Seconds that what was sent may take to be acknowledged when a session is closed.
CLOSE_S = 2.0
#: Seconds between attempts to reach a relay, at first and at most. Consumers wait for who is late,
#: and none may have more than ten seconds.
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 4.0
#: Seconds until a namespace is announced again that a relay refused without saying when.
_REFUSED_S = 30.0
#: A session that stood so many seconds makes the next pause a short one again. One that did not
#: may be of relays that send us to each other.
_STEADY_S = 5.0
#: Seconds that consumers may be served over a session that is to be left, if the relay has not
#: said how long.
_LEAVE_S = 600.0


class Relay:
    """A relay that is dialled, and at which every publication is kept announced.

    Made by :meth:`Producer.announce_at <kvcs.producer.daemon.Producer.announce_at>`. When the
    connection is lost, it is made again, with growing pauses, and all is announced again under
    the same Publication IDs. When the relay sends GOAWAY, a new connection is made first, to the
    URI that it names or else to the same one. So it is when the relay gives no sign of life any
    more: one that was killed says nothing, and one that is only busy must not be left.

    Args:
        uri: Where it is.
        directory: What is kept announced.
        handler: Serves the relay's requests.
        counters: Where things are counted.
        tls: Whom to believe.
        quic: Limits of the QUIC connection.
        config: Limits of the session.
        connect_timeout_s: Seconds until the relay must be reached.
        request_timeout_s: Seconds until it must answer.

    Attributes:
        uri: As given. After a connection is lost, this is where it is made again.
    """

    def __init__(
        self,
        uri: str,
        directory: NamespaceDirectory,
        handler: CountingHandler,
        counters: Counters,
        *,
        tls: ClientTls,
        quic: QuicSettings | None,
        config: SessionConfig | None,
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self.uri = uri
        self._directory = directory
        self._handler = handler
        self._counters = counters
        self._tls = tls
        self._quic = quic
        self._config = config
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._link: _Link | None = None  # the one that publications are announced over
        self._links: set[_Link] = set()  # all that are not closed
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._updated = asyncio.Event()

    @property
    def connection(self) -> MoqtConnection | None:
        """The session that publications are announced over, while there is one."""
        if self._link is None or self._link.connection.closed is not None:
            return None
        return self._link.connection

    @property
    def announced(self) -> frozenset[TrackNamespace]:
        """The namespaces that the relay has taken and not revoked."""
        return frozenset() if self._link is None else self._link.announced

    async def wait_announced(self, timeout_s: float) -> None:
        """Return when the relay has taken every publication that there is.

        Raises:
            TimeoutError: If that takes longer.
        """
        async with asyncio.timeout(timeout_s):
            while not self.announced >= self._directory.matching(TrackNamespace()):
                self._updated.clear()
                await self._updated.wait()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Dial, in a task of the producer's group. For the producer."""
        self._tasks = tasks
        self._running.add(tasks.create_task(self._run()))

    async def close(self, drain_s: float) -> None:
        """Let the relay finish what it reads, then close. For the producer."""
        for task in self._running:
            task.cancel()
        for link in self._links:
            if drain_s > 0:
                link.connection.goaway("", round(drain_s * 1000))
        await asyncio.gather(
            *(self._let_finish(link, drain_s, "producer stopped") for link in self._links)
        )

    # -- parts -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        uri, backoff = self.uri, Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        timeout_s = self._connect_timeout_s
        silent: _Link | None = None
        while True:
            link = await self._dial(uri, timeout_s)
            uri, timeout_s = self.uri, min(self._connect_timeout_s, REDIAL_S)
            if silent is not None:
                link = await self._instead_of(silent, link)
                silent = silent if link is None and silent in self._links else None
            if link is not None:
                began = loop.time()
                if await self._stand(link):
                    silent = link
                uri = self._next_uri(link)
                if loop.time() - began >= _STEADY_S:
                    backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _dial(self, uri: str, timeout_s: float) -> "_Link | None":
        try:
            connection = await open_connection(
                uri,
                tls=self._tls,
                quic=self._quic,
                config=self._config,
                handler=self._handler,
                timeout_s=timeout_s,
            )
        except (OSError, ValueError, MoqtError) as exc:  # time-outs are among OSError
            self._counters.add(Counter.RELAY_FAILURES)
            log.warning(LogEvent.RELAY_UNREACHABLE, relay=uri, error=str(exc))
            return None
        self._counters.add(Counter.RELAY_CONNECTS)
        log.info(LogEvent.RELAY_CONNECTED, relay=uri)
        link = _Link(uri, connection, self._directory, self._request_timeout_s)
        self._links.add(link)
        return link

    async def _instead_of(self, silent: "_Link", link: "_Link | None") -> "_Link | None":
        """Return which session to stand on, now that one beside a silent one was dialled for.

        None: neither. The silent one is kept then, unless it is gone.
        """
        if silent.connection.closed is not None:
            if self._link is silent:
                self._link = None
            await self._close(silent, "", 0.0)
            return link
        if not silent.is_heard_again:
            return link
        if link is not None:
            await self._close(link, "not needed", 0.0)
        return silent

    async def _stand(self, link: "_Link") -> bool:
        """Keep everything announced over a session until it is lost or is to be left.

        If it is to be left, it stands on: until there is another one, it is better than none. So
        it does if the relay is silent, which is what is returned.
        """
        keeping = asyncio.ensure_future(self._keep_announced(link))
        silence = asyncio.ensure_future(link.connection.wait_silent(SILENCE_S))
        try:
            await asyncio.wait({keeping, silence}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (keeping, silence):
                task.cancel()
            await asyncio.wait({keeping, silence})
        if not keeping.cancelled():
            keeping.result()  # raises what it raised
        elif link.connection.closed is None and not link.is_leaving:
            link.fell_silent()
            log.warning(LogEvent.RELAY_SILENT, relay=link.uri)
            return True
        if not link.is_leaving:
            if link.connection.going_away is None:
                log.warning(LogEvent.RELAY_LOST, relay=link.uri)
            if self._link is link:
                self._link = None
            await self._close(link, "", 0.0)
        elif self.connection is None:
            self._move_to(link)
        elif self._link is not link:
            self._leave(link)
        return False

    async def _keep_announced(self, link: "_Link") -> None:
        """Announce what is new, and withdraw what is gone, until the session is over."""
        if await link.update():
            self._move_to(link)
            while await link.wait_changed() and await link.update():
                self._updated.set()

    def _move_to(self, link: "_Link") -> None:
        """Have a session take the place of the one there was."""
        previous, self._link = self._link, link
        if previous is not None and previous is not link:
            self._leave(previous)
            link.retry_soon()  # perhaps it was refused because the old one had it
        self._updated.set()

    def _next_uri(self, link: "_Link") -> str:
        """Return where to go after a session: where its relay sends us, or home."""
        goaway = link.connection.going_away
        if goaway is None:
            return self.uri
        uri = goaway.new_session_uri or link.uri
        self._counters.add(Counter.RELAY_GOAWAYS)
        log.info(
            LogEvent.RELAY_GOES_AWAY, relay=link.uri, goes_to=uri, timeout_ms=goaway.timeout_ms
        )
        if (reason := why_not_there(uri, link.uri, self._tls)) is not None:
            log.warning(LogEvent.RELAY_MOVE_REFUSED, relay=link.uri, reason=reason)
            return link.uri
        return uri

    def _leave(self, link: "_Link") -> None:
        """Withdraw everything from a session, and close it when nobody is served any more."""
        assert self._tasks is not None, "start() has set it"
        link.withdraw_all()
        goaway = link.connection.going_away
        limit_s = goaway.timeout_ms / 1000 if goaway and goaway.timeout_ms else _LEAVE_S
        task = self._tasks.create_task(self._let_finish(link, limit_s, "going away"))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _let_finish(self, link: "_Link", limit_s: float, reason: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._handler.wait_idle(link.connection)
        except TimeoutError:
            pass
        await self._close(link, reason, min(limit_s, CLOSE_S))
        log.info(LogEvent.RELAY_LEFT, relay=link.uri)

    async def _close(self, link: "_Link", reason: str, drain_s: float) -> None:
        link.release()
        await link.connection.close(SessionErrorCode.NO_ERROR, reason, drain_s=drain_s)
        self._links.discard(link)


@dataclass(slots=True)
class _Announcement:
    publication: NamespacePublication
    watch: asyncio.Task[None]


class _Link:
    """One session with a relay, and what is announced over it.

    Attributes:
        uri: Where it was made to.
        connection: The session.
    """

    def __init__(
        self,
        uri: str,
        connection: MoqtConnection,
        directory: NamespaceDirectory,
        request_timeout_s: float,
    ) -> None:
        self.uri = uri
        self.connection = connection
        self._directory = directory
        self._request_timeout_s = request_timeout_s
        self._announced: dict[TrackNamespace, _Announcement] = {}
        self._retry_at: dict[TrackNamespace, float] = {}
        self._changed = asyncio.Event()
        self._silent_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.ensure_future(connection.wait_going_away())
        self._over.add_done_callback(lambda _: self._changed.set())
        directory.watch(self._directory_changed)

    @property
    def announced(self) -> frozenset[TrackNamespace]:
        """The namespaces that the relay has taken and not revoked."""
        return frozenset(self._announced)

    @property
    def is_leaving(self) -> bool:
        """Whether the relay has asked to be left, and the session stands still."""
        return self.connection.closed is None and self.connection.going_away is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing can be announced any more."""
        return self.connection.closed is not None or self.connection.going_away is not None

    def fell_silent(self) -> None:
        """Note that the relay gave no sign of life."""
        self._silent_since = self.connection.heard_at

    @property
    def is_heard_again(self) -> bool:
        """Whether it gave one since."""
        return self.connection.heard_at != self._silent_since

    async def wait_changed(self) -> bool:
        """Return when there may be something to announce; False if nothing can be any more."""
        seconds = None
        if self._retry_at:
            seconds = max(0.0, min(self._retry_at.values()) - self._loop.time())
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        return not self.is_over

    async def update(self) -> bool:
        """Announce what is new; return whether the session can go on."""
        self._changed.clear()
        self._withdraw_gone()
        now = self._loop.time()
        for namespace in sorted(self._directory.matching(TrackNamespace())):
            if namespace in self._announced or self._retry_at.get(namespace, now) > now:
                continue
            if self.is_over:
                return False
            try:
                publication = await self.connection.publish_namespace(
                    namespace, timeout_s=self._request_timeout_s
                )
            except RequestRejected as exc:
                # It may be taken later: a relay can be overloaded, or know a ghost of ours.
                retry_s = _REFUSED_S if exc.retry_ms is None else exc.retry_ms / 1000
                self._retry_at[namespace] = now + max(retry_s, _FIRST_BACKOFF_S)
                log.warning(LogEvent.ANNOUNCE_FAILED, relay=self.uri, error=str(exc))
                continue
            except (MoqtError, TimeoutError) as exc:
                log.warning(LogEvent.ANNOUNCE_FAILED, relay=self.uri, error=str(exc))
                return False
            self._announced[namespace] = _Announcement(
                publication, asyncio.ensure_future(self._watch(namespace, publication))
            )
            self._retry_at.pop(namespace, None)
            log.info(LogEvent.ANNOUNCED, relay=self.uri, publication=_short(namespace))
        return not self.is_over

    def retry_soon(self) -> None:
        """Announce again, after the shortest pause, what was refused."""
        soon = self._loop.time() + _FIRST_BACKOFF_S
        self._retry_at = {namespace: min(at, soon) for namespace, at in self._retry_at.items()}

    def withdraw_all(self) -> None:
        """Withdraw everything, and announce nothing more."""
        for namespace in self.announced:
            self._withdraw(namespace)
        self.release()

    def release(self) -> None:
        """Follow the directory and the relay no more. Twice is once."""
        self._directory.unwatch(self._directory_changed)
        self._over.cancel()
        for announcement in self._announced.values():
            announcement.watch.cancel()
        self._announced.clear()
        self._retry_at.clear()

    def _directory_changed(self) -> None:
        self._withdraw_gone()
        self._changed.set()

    def _withdraw_gone(self) -> None:
        wanted = self._directory.matching(TrackNamespace())
        for namespace in self.announced - wanted:
            self._withdraw(namespace)
        self._retry_at = {n: at for n, at in self._retry_at.items() if n in wanted}

    def _withdraw(self, namespace: TrackNamespace) -> None:
        announcement = self._announced.pop(namespace)
        announcement.watch.cancel()
        announcement.publication.withdraw()
        log.debug(LogEvent.WITHDRAWN, relay=self.uri, publication=_short(namespace))

    async def _watch(self, namespace: TrackNamespace, publication: NamespacePublication) -> None:
        """Have a namespace announced again, after a pause, that the relay revoked."""
        await publication.gone.wait()
        del self._announced[namespace]
        self._retry_at[namespace] = self._loop.time() + _FIRST_BACKOFF_S
        self._changed.set()


def _short(namespace: TrackNamespace) -> str:
    return "/".join(("kvcs-1", *(short_hex(octets) for octets in namespace.fields[1:])))
