"""Registrar: keeps holders listed at an index, in the background. Shell.

What is asked next, and when, is decided by :mod:`kvcs.kvsp.http.leases`. A producer that says what
it holds never waits for the index: one that is dead costs a request with a deadline now and then.
"""

import asyncio
from types import TracebackType
from typing import Self

import structlog

from kvcs.errors import Expired, KvcsError, ServiceFailed, ServiceFault
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.leases import Errand, Leases, Task
from kvcs.kvsp.http.records import Holding
from kvcs.link import Backoff
from kvcs.telemetry import Counter, Counters, LogEvent

log = structlog.get_logger("kvcs.http")

#: Pauses after a failure, the first and the longest.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 15.0
#: Faults for which asking again does not help.
_FINAL = (ServiceFault.REFUSED,)


class Registrar:
    """Keeps holders listed. An asynchronous context manager; its block is its life.

    At the end of the block everything is withdrawn, as far as that is possible within
    ``withdraw_s``; the rest ends with its lease.

    Args:
        client: Who asks the index; opened and closed here.
        lease_s: Seconds of a lease that are asked for.
        withdraw_s: Seconds that withdrawing may take at the end.
        counters: Where failures are counted.
    """

    def __init__(
        self,
        client: IndexClient,
        *,
        lease_s: float = 60.0,
        withdraw_s: float = 2.0,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self._client = client
        self._withdraw_s = withdraw_s
        self._leases = Leases(lease_s)
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def hold(self, compatibility_id: bytes, holder_id: bytes, holding: Holding) -> None:
        """Have a holder listed, or what it holds said anew. Returns at once.

        Raises:
            ConfigError: If more are to be kept listed than may be.
        """
        self._leases.hold((compatibility_id, holder_id), holding)
        self._tell()

    def release(self, compatibility_id: bytes, holder_id: bytes) -> None:
        """Have a holder listed no more. Returns at once."""
        self._leases.release((compatibility_id, holder_id))
        self._tell()

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the index knows all that was said; return whether it did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        # Awaited in __aexit__; nothing that becomes of it may reach the producer as an error.
        self._task = asyncio.create_task(self._run_guarded())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None, "left without having been entered"
        try:
            self._leases.release_all()
            self._tell()
            await self.settled(self._withdraw_s)
        finally:
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._client.__aexit__(None, None, None)

    # -- parts -----------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._settled.clear()
        self._changed.set()

    async def _run_guarded(self) -> None:
        try:
            await self._run()
        except Exception:  # a mistake of ours: nothing is listed any more, all else goes on
            log.exception(LogEvent.INDEX_LOST, index=str(self._client.uri))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            errand = self._leases.next_errand(now)
            if errand is not None:
                await self._try(errand, now)
                continue
            if not self._leases.is_behind:
                self._settled.set()
            try:
                async with asyncio.timeout_at(self._leases.next_deadline()):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _try(self, errand: Errand, now: float) -> None:
        """Make one request; what becomes of it is noted, never raised."""
        loop = asyncio.get_running_loop()
        try:
            lease_s = await self._ask(errand)
        except ServiceFailed as exc:
            if exc.fault in _FINAL:
                log.warning(LogEvent.HOLDER_REFUSED, index=str(self._client.uri), error=str(exc))
                self._leases.refused(errand)
            else:
                self._lost(exc, loop.time(), exc.retry_after_s or 0.0)
        except (Expired, KvcsError) as exc:
            self._lost(exc, loop.time(), 0.0)
        else:
            self._backoff.reset()
            self._leases.done(errand, now, lease_s)
            if self._is_lost:
                self._is_lost = False
                log.info(LogEvent.INDEX_BACK, index=str(self._client.uri))

    async def _ask(self, errand: Errand) -> float | None:
        compatibility_id, holder_id = errand.ref
        client, lease_s = self._client, self._leases.lease_s
        match errand.task:
            case Task.REGISTER:
                assert errand.holding is not None, "what is registered is said with it"
                return await client.register(
                    compatibility_id, holder_id, errand.holding, lease_s=lease_s
                )
            case Task.RENEW:
                return await client.renew(compatibility_id, holder_id, lease_s=lease_s)
            case Task.WITHDRAW:
                await client.withdraw(compatibility_id, holder_id)
                return None

    def _lost(self, exc: KvcsError, now: float, at_least_s: float) -> None:
        self.counters.add(Counter.INDEX_FAILURES)
        self._leases.failed(now, max(self._backoff.next_s(), at_least_s))
        if not self._is_lost:
            self._is_lost = True
            log.warning(LogEvent.INDEX_LOST, index=str(self._client.uri), error=str(exc))
