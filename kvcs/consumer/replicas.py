"""Replicas: what an index knows of publications that begin as a prompt does. Shell.

What it tells are hints: where to look, and Block Keys that a manifest has to bear out.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace

import structlog

from kvcs.consumer.opening import Job
from kvcs.consumer.prefixes import MAX_REPLICAS, Index, Replica, unusable
from kvcs.consumer.sessions import ConnectionSpec
from kvcs.errors import KvcsError
from kvcs.link import why_not_there
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import LogEvent

log = structlog.get_logger("kvcs.consumer")


class Replicas:
    """The publications that an index told of.

    Args:
        job: The retrieval that they are for.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[PublicationName, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._found.values())

    async def ask(self, index: Index) -> None:
        """Have the index tell; where it cannot, go on without."""
        expected = self._job.expected
        try:
            async with asyncio.timeout(self._job.settings.request_timeout_s):
                told = await index.lookup(
                    expected.scope_key.scope_id,
                    expected.scope_key.compatibility_id(expected.descriptor),
                    expected.block_keys,
                )
        except (KvcsError, OSError) as exc:  # TimeoutError is an OSError
            log.warning(LogEvent.INDEX_FAILED, reason=str(exc) or type(exc).__name__)
            return
        for replica in told[:MAX_REPLICAS]:
            if (reason := unusable(replica, expected)) is not None:
                log.warning(LogEvent.INDEX_REFUSED, reason=reason)
            else:
                self._found[replica.publication] = replica

    def ways(self, known: Iterable[ConnectionSpec], limit: int) -> list[ConnectionSpec]:
        """Return where else publications are, dialled as the first of those that are known.

        Args:
            known: The caller's relays and producers, at least one.
            limit: How many there may be with those.
        """
        specs = list(known)
        first, uris = specs[0], {spec.uri for spec in specs}
        for uri in dict.fromkeys(uri for replica in self for uri in replica.uris):
            if (reason := why_not_there(uri, first.uri, first.tls)) is not None:
                log.warning(LogEvent.INDEX_REFUSED, uri=uri, reason=reason)
            elif uri not in uris and len(specs) < limit:
                specs.append(replace(first, uri=uri))
        return specs[len(uris) :]

    def job_of(self, name: PublicationName) -> Job:
        """Return what a publication is retrieved with: it may go on where the prompt ends."""
        replica = self._found.get(name)
        if replica is None:
            return self._job
        expected = self._job.expected.going_on(replica.blocks, replica.following)
        return replace(self._job, expected=expected)
