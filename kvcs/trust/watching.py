"""Has an authority believe what its files say: when they change, and when it is told to look."""

import asyncio

import structlog

from kvcs.errors import ConfigError
from kvcs.telemetry import LogEvent
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.policy import PolicyFiles

log = structlog.get_logger("kvcs")

#: Seconds between looks. With the time after which an authority has what runs asked about again,
#: a revocation counts within 5 s.
LOOK_S = 1.0


class PolicyKeeper:
    """Keeps the policy of an authority as its files have it.

    A file that cannot be read, or holds anything that is not understood, changes nothing: what was
    believed before is, and a log line says what is wrong.

    Args:
        files: Read once already, for the policy that the authority has.
        authority: Told of every other one.
        look_s: Seconds between looks.
    """

    def __init__(
        self, files: PolicyFiles, authority: TokenAuthority, *, look_s: float = LOOK_S
    ) -> None:
        self._files = files
        self._authority = authority
        self._look_s = look_s
        self._asked = asyncio.Event()

    def reload(self) -> None:
        """Have the files read now, changed or not; for SIGHUP."""
        self._asked.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Watch until told to stop: a job of :func:`kvcs.lifecycle.run_until_stopped`."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            await stopping.wait()
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._asked.wait()
            except TimeoutError:
                if not await asyncio.to_thread(self._files.have_changed):
                    continue
            self._asked.clear()
            await self._take()

    async def _take(self) -> None:
        try:
            policy = await asyncio.to_thread(self._files.read)
            self._authority.take(policy)
        except ConfigError as exc:
            log.warning(LogEvent.ISSUERS_REFUSED, error=str(exc))
            return
        revoked = policy.revocations
        log.info(
            LogEvent.ISSUERS_TAKEN,
            issuers=len(policy.issuers),
            identities=len(policy.identities),
            revoked=len(revoked.token_ids) + len(revoked.kids),
        )
