"""Who may do what at a daemon: the authority that its settings ask for, as its files have it."""

import asyncio
from collections.abc import Callable

import structlog

from kvcs.config import Access, ListeningSettings
from kvcs.telemetry import LogEvent
from kvcs.trust.authority import TokenAuthority
from kvcs.trust.certified import CertifiedAuthority
from kvcs.trust.policy import Policy, PolicyFiles
from kvcs.trust.scopefile import ScopePolicy
from kvcs.trust.watching import PolicyKeeper
from moqt.aio import ServerTls
from moqt.authority import Authority

log = structlog.get_logger("kvcs")


def policy_files(settings: ListeningSettings) -> PolicyFiles | None:
    """Return where it stands whom to believe; None: no token is asked for."""
    if settings.issuers_file is not None:
        return PolicyFiles(settings.issuers_file, settings.revocations_file)
    if settings.issuers_in_scope is not None:
        return ScopePolicy(settings.issuers_in_scope, settings.revocations_file)
    return None


class _Telling(TokenAuthority):
    """Has what runs looked at again as soon as something else is believed."""

    on_change: Callable[[], None] | None = None

    def take(self, policy: Policy) -> None:
        super().take(policy)
        if self.on_change is not None:
            self.on_change()


class Authorizing:
    """The authority of a daemon, if its settings ask for one.

    Args:
        settings: Whom to believe, and where that stands.
        ask_again: Of the daemon: looks again at all that goes on.

    Attributes:
        authority: For ``listen``; None: nobody is asked.

    Raises:
        ConfigError: If a file cannot be used; the message names it.
    """

    def __init__(self, settings: ListeningSettings, ask_again: Callable[[], None]) -> None:
        self.authority: Authority | None = None
        self._keeper: PolicyKeeper | None = None
        files = policy_files(settings)
        if files is not None:
            authority = _Telling(files.read(), settings.audience)
            authority.on_change = ask_again
            self.authority = authority
            self._keeper = PolicyKeeper(files, authority)
        elif settings.access is Access.CERTIFIED:
            self.authority = CertifiedAuthority()
        if settings.access is Access.EVERYBODY:
            log.warning(LogEvent.OPEN_TO_EVERYBODY, listen=str(settings.listen))

    async def keep(self, stopping: asyncio.Event) -> None:
        """Watch the files until told to stop; a job beside the daemon."""
        if self._keeper is None:
            await stopping.wait()
        else:
            await self._keeper.run(stopping)

    def renewing(self, identify: Callable[[ServerTls], None]) -> Callable[[ServerTls], None]:
        """Return ``identify`` that has the files of the authority read again as well."""

        def renew(tls: ServerTls) -> None:
            if self._keeper is not None:
                self._keeper.reload()
            identify(tls)

        return renew
