"""Moving: which sessions a retrieval has with its relays, and how it comes to others. Shell.

A session that is silent or is asked to go is left once another one stands; one that is lost is made
again when its relay is tried again, which :mod:`kvcs.consumer.recovery` decides.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.lanes import Lane, Lanes, LocalLane
from kvcs.consumer.opening import Job, Opened, Refused, open_publication
from kvcs.consumer.processes import Processes
from kvcs.consumer.recovery import Recovery
from kvcs.consumer.sessions import ConnectionSpec, Sessions
from kvcs.consumer.tasks import tasks
from kvcs.consumer.ways import Way
from kvcs.link import REDIAL_S, Backoff
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection

log = structlog.get_logger("kvcs.consumer")


class Moved(NamedTuple):
    """Another way that stands, for one that does not or that is to be left."""

    way: Way
    opened: Opened | None
    """The publication being retrieved, as it was opened there."""

    lost: bool
    """Whether the one that is left gives no sign of life; if not, it has asked us to go."""


class Bound(NamedTuple):
    """The publication that a retrieval is bound to."""

    name: PublicationName
    track: bytes | None
    """Its manifest track, if that is known."""

    job: Job
    """What it is retrieved with."""


class Movements:
    """The sessions with relays and producers of one retrieval.

    Args:
        ways: The relays and producers, in the caller's order.
        job: The retrieval.
        recovery: What it has come to.
        sessions: Those that it has opened.
        processes: Those of its own.
        bound: Returns the publication that another way has to have; None: anything else will do.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        job: Job,
        recovery: Recovery,
        sessions: Sessions,
        processes: Processes,
        bound: Callable[[], Bound | None],
    ) -> None:
        self._ways = ways
        self._settings = job.settings
        self._recovery = recovery
        self._sessions = sessions
        self._processes = processes
        self._bound = bound

    async def lanes_of(self, way: Way) -> tuple[Lanes, bool] | Failure:
        """Return the sessions with a relay, and whether they were there already."""
        if (lanes := way.usable) is not None:
            return lanes, True
        uri, way.sent_to = way.sent_to or way.spec.uri, None
        dialled = await self._dial(way.spec, uri)
        if isinstance(dialled, Failure):
            return dialled
        return self._adopt(way, uri, dialled), False

    async def _dial(self, spec: ConnectionSpec, uri: str) -> MoqtConnection | Failure:
        timeout_s = self._settings.connect_timeout_s
        if self._recovery.something_lost:
            timeout_s = min(timeout_s, REDIAL_S)
        return await self._sessions.dial(spec, uri, timeout_s)

    def _adopt(self, way: Way, uri: str, conn: MoqtConnection) -> Lanes:
        """Make a session the first of a way; what it had before is of no use any more."""

        async def dial() -> LocalLane | Failure:
            made = await self._dial(way.spec, uri)
            return made if isinstance(made, Failure) else LocalLane(made, self._sessions.let_go)

        async def dial_apart() -> Lane | Failure:
            return await self._processes.dial(way.spec, uri, self._settings.connect_timeout_s)

        if way.lanes is not None:
            way.lanes.leave()
        first = LocalLane(conn, self._sessions.let_go)
        way.lanes = Lanes(uri, first, self._settings, dial=dial, dial_apart=dial_apart)
        return way.lanes

    async def another_way(self, way: Way, lanes: Lanes) -> Moved | None:
        """Return another way once it stands, after this one is silent or is to be left.

        Until then this one stands on: a relay that was only busy is not left, and one that goes
        away serves on for a while. Returns None when its sessions are over.
        """
        made: dict[tuple[Way, str], MoqtConnection] = {}
        backoff = Backoff(self._settings.again_s, self._settings.again_max_s)
        try:
            while True:
                await lanes.until_in_doubt()
                if lanes.is_lost:
                    return None
                self._recovery.something_lost = True
                conn = lanes.lead
                reason = "silent" if conn.going_away is None else "goes away"
                log.info(LogEvent.WAY_IN_DOUBT, uri=way.spec.uri, reason=reason)
                while lanes.is_in_doubt:
                    for other, uri in self._elsewhere(way, conn):
                        found = await self._make(made, other, uri)
                        if isinstance(found, Failure):
                            self._recovery.last = found
                        elif lanes.is_in_doubt:
                            self._adopt(other, uri, made.pop((other, uri)))
                            other.sent_to = None
                            return Moved(other, found, lost=conn.going_away is None)
                    await asyncio.sleep(backoff.next_s())
                self._let_go_all(made)
        finally:
            self._let_go_all(made)

    def _let_go_all(self, made: dict[tuple[Way, str], MoqtConnection]) -> None:
        while made:
            self._sessions.let_go(made.popitem()[1])

    async def _make(
        self, made: dict[tuple[Way, str], MoqtConnection], way: Way, uri: str
    ) -> Opened | Failure | None:
        """Make a session beside those in use, and open there what is being retrieved.

        Where nothing has been used yet, it need not be there: anything else will do.
        """
        session = made.get((way, uri))
        if session is None or session.closed is not None or session.going_away is not None:
            dialled = await self._dial(way.spec, uri)
            if isinstance(dialled, Failure):
                return dialled
            session = made[way, uri] = dialled
        if (bound := self._bound()) is None:
            return None
        try:
            async with tasks() as group:
                opening = group.start(
                    open_publication(session, bound.name, bound.job, track=bound.track)
                )
                silence = group.start(session.wait_silent(self._settings.silence_s))
                await asyncio.wait({opening, silence}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    return opening.result()
        except Refused as exc:
            return Failure(FailureReason.REFUSED, str(exc))
        self._sessions.let_go(made.pop((way, uri)))
        return Failure(FailureReason.UNREACHABLE, f"{uri}: silent")

    def _elsewhere(self, way: Way, conn: MoqtConnection) -> list[tuple[Way, str]]:
        """Return where else to go: where a GOAWAY sends us, the other ways, and at last home."""
        at = self._ways.index(way)
        others = [*self._ways[at + 1 :], *self._ways[:at]]
        found = [(other, other.spec.uri) for other in others]
        if (uri := way.where_sent(conn)) is not None:
            found.insert(0, (way, uri))
        return [*found, (way, way.spec.uri)]
