"""Following: who has publications is dialled, and what is announced there is kept. Shell.

Each upstream, a relay or a producer, has one session, which is made again when it is lost. What it
announces is brought by keepers, a bounded number at a time, from whoever announces it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvcs.depot.depot import Depot
from kvcs.depot.keeping import Keeper, Outcome
from kvcs.depot.terms import Terms
from kvcs.errors import BadName
from kvcs.link import SILENCE_S, Backoff, why_not_there
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter, LogEvent
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    NamespaceSubscription,
    QuicSettings,
    open_connection,
)
from moqt.codepoints import SessionErrorCode
from moqt.errors import MoqtError
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.events import NamespaceAppeared

log = structlog.get_logger("kvcs.depot")

#: Seconds between attempts to reach an upstream, at first and at most.
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.25, 4.0
#: Seconds between attempts at a publication of which something is missing.
_FIRST_AGAIN_S, _LAST_AGAIN_S = 1.0, 60.0
#: Seconds until a prefix is asked for again that was refused.
_REFUSED_S = 10.0
#: A session that stood so many seconds makes the next pause a short one again.
_STEADY_S = 5.0
#: Seconds that keepers may go on over a session that is to be left, if its peer has not said.
_LEAVE_S = 60.0
_CLOSE_S = 1.0
#: Publications that wait to be brought at most, and that are remembered as refused. What more there
#: is has to be announced again.
MAX_ANNOUNCED = 16_384
_THREADS = 2


class Following:
    """Keeps what is announced.

    Args:
        depot: Where it is kept.
        terms: What is taken.
        prefixes: Namespaces whose publications are kept; five fields name a single one.
        at_once: Publications that are brought at the same time.
    """

    def __init__(
        self, depot: Depot, terms: Terms, prefixes: Sequence[TrackNamespace], *, at_once: int
    ) -> None:
        self.depot = depot
        self.terms = terms
        self.prefixes = tuple(prefixes)
        self._announced: dict[PublicationName, dict[MoqtConnection, None]] = {}
        self._bringing: dict[PublicationName, asyncio.Task[None]] = {}
        self._refused: dict[PublicationName, None] = {}
        self._at_once = asyncio.Semaphore(at_once)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcs-examine")
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._used: dict[MoqtConnection, int] = {}
        self._idle = asyncio.Event()

    async def run(self, upstreams: "Sequence[Upstream]") -> None:
        """Follow until cancelled.

        Raises:
            OSError: If the disk fails.
        """
        tasks = [asyncio.ensure_future(upstream.run(self)) for upstream in upstreams]
        try:
            await asyncio.wait([self._failed, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (self._failed, *tasks):
                if task.done():
                    task.result()
        finally:
            running = [*tasks, *self._bringing.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._failed.cancel()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def appeared(self, conn: MoqtConnection, name: PublicationName) -> None:
        """A connection announces a publication: have it brought, unless it is held."""
        holding = self.depot.holding(name)
        if holding is not None and holding.ended and not holding.damaged:
            return
        if name in self._refused or self.depot.was_evicted(name):
            return
        if name not in self._announced and len(self._announced) >= MAX_ANNOUNCED:
            return
        self._announced.setdefault(name, {})[conn] = None
        if name not in self._bringing:
            # Awaited, or cancelled, at the end of ``run``.
            self._bringing[name] = asyncio.create_task(self._bring(name))

    def gone(self, conn: MoqtConnection, name: PublicationName) -> None:
        """A connection does not announce a publication any more."""
        announcers = self._announced.get(name, {})
        announcers.pop(conn, None)
        if not announcers:
            self._announced.pop(name, None)

    def left(self, conn: MoqtConnection) -> None:
        """Ask for nothing more over a connection."""
        for name in list(self._announced):
            self.gone(conn, name)

    async def wait_unused(self, conn: MoqtConnection) -> None:
        """Return when no keeper uses a connection."""
        while self._used.get(conn):
            self._idle.clear()
            await self._idle.wait()

    async def _bring(self, name: PublicationName) -> None:
        backoff = Backoff(_FIRST_AGAIN_S, _LAST_AGAIN_S)
        was_given_up = False
        try:
            while (conn := next(iter(self._announced.get(name, ())), None)) is not None:
                objects = self._objects(name)
                async with self._at_once:
                    outcome = await self._bring_from(conn, name)
                if outcome is Outcome.GIVEN_UP:  # so it says, and may lie: the others are asked
                    was_given_up = True
                    self.gone(conn, name)
                    continue
                if outcome is Outcome.REFUSED:
                    self._refuse(name)
                if outcome is not Outcome.PARTIAL:
                    self._announced.pop(name, None)
                    return
                if self._objects(name) > objects:
                    backoff.reset()
                announcers = self._announced.get(name, {})
                if conn in announcers:  # the others first, next time
                    announcers[conn] = announcers.pop(conn)
                await asyncio.sleep(backoff.next_s())
            if was_given_up:
                self.depot.counters.add(Counter.PUBLICATIONS_REFUSED)
                self.depot.drop(name, "its producer gave it up")
                self._refuse(name)
        except OSError as exc:
            if not self._failed.done():
                self._failed.set_exception(exc)
        finally:
            del self._bringing[name]

    def _refuse(self, name: PublicationName) -> None:
        self._refused[name] = None
        if len(self._refused) > MAX_ANNOUNCED:
            del self._refused[next(iter(self._refused))]

    async def _bring_from(self, conn: MoqtConnection, name: PublicationName) -> Outcome:
        if conn.closed is not None:
            self.gone(conn, name)
            return Outcome.PARTIAL
        self._used[conn] = self._used.get(conn, 0) + 1
        try:
            return await Keeper(conn, name, self.depot, self.terms, self._pool).run()
        finally:
            self._used[conn] -= 1
            if not self._used[conn]:
                del self._used[conn]
            self._idle.set()

    def _objects(self, name: PublicationName) -> int:
        holding = self.depot.holding(name)
        return 0 if holding is None else holding.objects


class Upstream:
    """Who is followed: a relay, or a producer.

    Args:
        uri: Where it is.
        tls: Whom to believe.
        quic: Limits of the QUIC connection.
        config: Limits of the session.
        connect_timeout_s: Seconds until it must be reached.
        request_timeout_s: Seconds until it must answer.
    """

    def __init__(
        self,
        uri: str,
        *,
        tls: ClientTls,
        quic: QuicSettings | None,
        config: SessionConfig | None,
        connect_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self.uri = uri
        self._tls = tls
        self._quic = quic
        self._config = config
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._open: set[MoqtConnection] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self, following: Following) -> None:
        """Follow until cancelled."""
        loop = asyncio.get_running_loop()
        uri, backoff = self.uri, Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        conn: MoqtConnection | None = None
        try:
            while True:
                if conn is None:
                    conn = await self._dial(uri, following)
                if conn is None:
                    uri = self.uri
                else:
                    began, other = loop.time(), None
                    try:
                        other = await self._stand(conn, uri, following)
                    finally:
                        following.left(conn)
                        task = loop.create_task(self._leave(conn, following))
                        self._leaving.add(task)
                        task.add_done_callback(self._leaving.discard)
                    uri = self._next_uri(conn, uri)
                    conn = other
                    if loop.time() - began >= _STEADY_S:
                        backoff.reset()
                if conn is None:
                    await asyncio.sleep(backoff.next_s())
        finally:
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._leaving, return_exceptions=True)
            await asyncio.gather(*(self._close(conn) for conn in tuple(self._open)))

    async def _dial(self, uri: str, following: Following) -> MoqtConnection | None:
        counters = following.depot.counters
        try:
            conn = await open_connection(
                uri,
                tls=self._tls,
                quic=self._quic,
                config=self._config,
                timeout_s=self._connect_timeout_s,
            )
        except (OSError, ValueError, MoqtError) as exc:  # time-outs are among OSError
            counters.add(Counter.RELAY_FAILURES)
            log.warning(LogEvent.UPSTREAM_UNREACHABLE, uri=uri, error=str(exc))
            return None
        self._open.add(conn)
        counters.add(Counter.RELAY_CONNECTS)
        log.info(LogEvent.UPSTREAM_CONNECTED, uri=uri)
        return conn

    async def _stand(
        self, conn: MoqtConnection, uri: str, following: Following
    ) -> MoqtConnection | None:
        """Take note of what is announced until the session is over or to be left.

        A silent one is left only for another: its peer may be no more than busy. That one is
        returned, if there is one.
        """
        watching = [
            asyncio.ensure_future(self._watch(conn, prefix, following))
            for prefix in following.prefixes
        ]
        try:
            while await self._falls_silent(conn):
                heard_at = conn.heard_at
                other = await self._dial(uri, following)
                if conn.closed is None and (other is None or conn.heard_at != heard_at):
                    if other is not None:
                        await self._close(other)
                    continue
                log.warning(LogEvent.UPSTREAM_LOST, uri=uri, silent=True)
                return other
            if conn.going_away is None:
                log.warning(LogEvent.UPSTREAM_LOST, uri=uri, silent=False)
            return None
        finally:
            for job in watching:
                job.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _falls_silent(self, conn: MoqtConnection) -> bool:
        """Wait; return whether the peer gives no sign of life. Otherwise the session is over."""
        over = asyncio.ensure_future(conn.wait_going_away())
        silent = asyncio.ensure_future(conn.wait_silent(SILENCE_S))
        try:
            await asyncio.wait({over, silent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in (over, silent):
                job.cancel()
            await asyncio.gather(over, silent, return_exceptions=True)
        return conn.closed is None and conn.going_away is None

    async def _watch(
        self, conn: MoqtConnection, prefix: TrackNamespace, following: Following
    ) -> None:
        while conn.closed is None:
            try:
                announcements = await conn.subscribe_namespace(
                    prefix, timeout_s=self._request_timeout_s
                )
                await self._take_note(conn, prefix, announcements, following)
            except (MoqtError, TimeoutError) as exc:
                log.warning(LogEvent.REQUEST_REFUSED, uri=self.uri, reason=str(exc))
            await asyncio.sleep(_REFUSED_S)

    async def _take_note(
        self,
        conn: MoqtConnection,
        prefix: TrackNamespace,
        announcements: NamespaceSubscription,
        following: Following,
    ) -> None:
        try:
            async for event in announcements:
                try:
                    name = PublicationName.from_namespace(event.namespace)
                except BadName:
                    continue  # whatever it is, it is no publication
                if not prefix.is_prefix_of(name.namespace):
                    continue
                if isinstance(event, NamespaceAppeared):
                    following.appeared(conn, name)
                else:
                    following.gone(conn, name)
        finally:
            announcements.cancel()

    async def _leave(self, conn: MoqtConnection, following: Following) -> None:
        """Let keepers come to their end, and close."""
        if conn.closed is None and conn.going_away is not None:
            told_ms = conn.going_away.timeout_ms
            try:
                async with asyncio.timeout(told_ms / 1000 if told_ms else _LEAVE_S):
                    await following.wait_unused(conn)
            except TimeoutError:
                pass
        await self._close(conn)

    async def _close(self, conn: MoqtConnection) -> None:
        await conn.close(SessionErrorCode.NO_ERROR, "left", drain_s=0.0)
        self._open.discard(conn)

    def _next_uri(self, conn: MoqtConnection, current: str) -> str:
        """Return where to go after a session: where its peer sends us, or home."""
        if conn.going_away is None or not conn.going_away.new_session_uri:
            return self.uri
        uri = conn.going_away.new_session_uri
        if (reason := why_not_there(uri, current, self._tls)) is not None:
            log.warning(LogEvent.RELAY_MOVE_REFUSED, relay=current, reason=reason)
            return self.uri
        return uri
