"""Listing: what an index is told of what a store holds whole, and whose blocks are known. Shell.

A store cannot compute Block Keys. It asks the index for those of each publication, which its
producer has told, once; they are noted on disk, so that it lists the publication again after a
restart, whatever became of producer and index. Without its keys a publication is not listed, nor
served over HTTP, and is asked for again, ever more rarely.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import structlog

from kvcs.depot.archive import DiskFullError
from kvcs.depot.blocks import StoredBlocks
from kvcs.depot.chains import Chain, chain_of, held_segments, joined, parted
from kvcs.depot.depot import Depot
from kvcs.depot.shelf import Holding
from kvcs.depot.terms import Terms
from kvcs.errors import BadManifest, BadObject, ConfigError, KvcsError, NotFound
from kvcs.kvsp.http import records
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.names import HOLDER_ID_OCTETS
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.http.registrar import Registrar
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.kvsp.layout import Layout
from kvcs.link import Backoff
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter, LogEvent

log = structlog.get_logger("kvcs.depot")

#: Seconds between two looks at what is held.
_PAUSE_S = 0.5
#: Seconds until the keys of a publication are asked for again that the index does not know.
_FIRST_AGAIN_S, _LAST_AGAIN_S = 1.0, 60.0
#: Seconds until an index that failed is asked again.
_FIRST_BACK_S, _LAST_BACK_S = 0.5, 15.0


class _State(NamedTuple):
    """What of a publication was looked at."""

    objects: int
    ended: bool


@dataclass(slots=True)
class _Known:
    """A publication that was looked at."""

    state: _State
    chain: Chain | None = None
    again_at: float = 0.0
    """When its keys are asked for again, as long as they are not known."""

    pauses: Backoff | None = None
    """Between such questions; ``None``: there is nothing to ask, as long as it is what it is."""

    def is_settled(self, state: _State, now: float) -> bool:
        """Whether there is nothing to be done about it now."""
        return self.state == state and (
            self.chain is not None or self.pauses is None or now < self.again_at
        )


def _state(holding: Holding) -> _State:
    return _State(holding.objects, holding.ended)


class StoreListing:
    """Keeps what a store holds whole listed at an index, and known to its block service.

    Args:
        depot: What is held.
        terms: How its manifests are read.
        index: Who is asked for Block Keys; opened and closed by the caller, or with ``registrar``.
        registrar: Who tells the index.
        blocks: Who serves blocks over HTTP; they are found in any case.
        sessions: MOQT URIs under which publications can be had.
        services: URIs of block services that serve them.

    Raises:
        BadName: If a URI is none.
    """

    def __init__(
        self,
        depot: Depot,
        terms: Terms,
        *,
        index: IndexClient,
        registrar: Registrar,
        blocks: StoredBlocks,
        sessions: Sequence[str] = (),
        services: Sequence[str] = (),
    ) -> None:
        self._depot = depot
        self._terms = terms
        self._index = index
        self._registrar = registrar
        self._blocks = blocks
        self._sessions = tuple(sessions)
        self._services = tuple(map(ServiceUri.parse, services))
        self._known: dict[PublicationName, _Known] = {}
        self._index_again_at = 0.0
        self._index_pauses = Backoff(_FIRST_BACK_S, _LAST_BACK_S)
        # Another store, or a producer, may be known by the same token and name the same relay.
        self._salt = secrets.token_bytes(HOLDER_ID_OCTETS)
        self._is_full = False

    async def run(self) -> None:
        """List what there is, and what comes, until cancelled."""
        seen = 0
        while True:
            again_at = await self._look()
            await asyncio.sleep(_PAUSE_S)  # what changes meanwhile is looked at together
            try:
                async with asyncio.timeout_at(again_at):
                    seen = await self._depot.wait_changed(seen)
            except TimeoutError:
                pass

    # -- parts -----------------------------------------------------------------------------------

    async def _look(self) -> float | None:
        """See what has come and what is gone; return when to look again in any case."""
        held = {one.name: one for one in self._depot.shelf if one.finished}
        for name in self._known.keys() - held.keys():
            self._go(name)
        now = asyncio.get_running_loop().time()
        for name, holding in held.items():
            known = self._known.get(name)
            if known is None or not known.is_settled(_state(holding), now):
                await self._take_up(holding, known)
        waiting = [one.again_at for one in self._known.values() if one.chain is None and one.pauses]
        return max(min(waiting), self._index_again_at) if waiting else None

    async def _take_up(self, holding: Holding, before: _Known | None) -> None:
        """Find out the blocks of a publication, and list it."""
        name = holding.name
        known = _Known(_state(holding))
        self._known[name] = known
        try:
            manifest = await self._manifest(name)
            segments = held_segments(manifest, await self._depot.counts(name))
            if not segments:
                return
            known.chain = await self._chain(name, Layout.of(manifest.compat), segments)
        except (NotFound, BadManifest, BadObject) as exc:  # it is damaged, or gone by now
            log.debug(LogEvent.INDEX_REFUSED, publication=str(name), reason=str(exc))
            return
        if known.chain is None:
            known.pauses = (before and before.pauses) or Backoff(_FIRST_AGAIN_S, _LAST_AGAIN_S)
            known.again_at = asyncio.get_running_loop().time() + known.pauses.next_s()
            return
        is_found = self._blocks.put(known.chain)
        if not is_found and not self._is_full:
            self._is_full = True
            log.warning(LogEvent.BLOCKS_FULL, publication=str(name))
        for uri, listed in listed_of(
            known.chain,
            self._sessions,
            self._services if is_found else (),
            ended=holding.ended and len(segments) == len(manifest.segments),
        ):
            try:
                self._registrar.hold(name.compatibility_id, self._holder_id(name, uri), listed)
            except ConfigError as exc:
                log.warning(LogEvent.HOLDER_REFUSED, publication=str(name), error=str(exc))

    async def _manifest(self, name: PublicationName) -> Manifest:
        track, version, payload, cover = await self._depot.manifest(name)
        return await asyncio.to_thread(
            self._terms.read_manifest, track, payload, name, version, cover
        )

    async def _chain(
        self, name: PublicationName, layout: Layout, segments: Sequence[SegmentEntry]
    ) -> Chain | None:
        """Return the blocks of a publication, as noted here or as the index tells them."""
        if (noted := await self._depot.chain(name)) is not None:
            first_block, octets = noted
            chain = chain_of(name, layout, segments, first_block, parted(octets))
            if chain is not None:
                return chain
        loop = asyncio.get_running_loop()
        if loop.time() < self._index_again_at:
            return None
        try:
            told = await self._index.chain(name.compatibility_id, name.publication_id)
        except (KvcsError, OSError) as exc:
            self._index_again_at = loop.time() + self._index_pauses.next_s()
            self._depot.counters.add(Counter.INDEX_FAILURES)
            log.debug(LogEvent.INDEX_FAILED, reason=str(exc) or type(exc).__name__)
            return None
        self._index_pauses.reset()
        if told is None:
            return None
        chain = chain_of(name, layout, segments, told.first_block, told.keys)
        if chain is None:
            # More may have been appended than the index knows of yet; or somebody lies.
            log.debug(LogEvent.INDEX_REFUSED, publication=str(name), reason="other Block Keys")
            return None
        try:
            await self._depot.note_chain(name, chain.first_block, joined(chain.keys))
        except DiskFullError as exc:  # it is asked for again after a restart
            log.warning(LogEvent.DISK_FULL, error=str(exc))
        return chain

    def _go(self, name: PublicationName) -> None:
        del self._known[name]
        self._blocks.remove(name)
        for uri in (*self._sessions, *map(str, self._services)):
            self._registrar.release(name.compatibility_id, self._holder_id(name, uri))

    def _holder_id(self, name: PublicationName, uri: str) -> bytes:
        """Return what a publication under one URI is called at the index by this store."""
        octets = self._salt + name.publication_id + uri.encode()
        return sha256(octets).digest()[:HOLDER_ID_OCTETS]


def listed_of(
    chain: Chain, sessions: Sequence[str], services: Sequence[ServiceUri], *, ended: bool
) -> list[tuple[str, records.Holding]]:
    """Return what is to be said of a publication that is held whole, by the URI it is said for.

    Args:
        chain: Its blocks.
        sessions: MOQT URIs under which it can be had.
        services: Block services that serve it, if it has raw tensors.
        ended: Whether nothing will be added to it.
    """
    layers = Runs.of(range(chain.layout.layers))
    told = [
        (
            uri,
            records.Holding(
                PublicationUri(uri, chain.name),
                chain.keys,
                layers,
                first_block=chain.first_block,
                encodings=chain.encodings,
                complete=ended,
            ),
        )
        for uri in sessions
        if chain.encodings
    ]
    if all(part.tracks for part in chain.parts):
        told += [
            (
                str(service),
                records.Holding(
                    service,
                    chain.keys,
                    layers,
                    first_block=chain.first_block,
                    complete=ended,
                    publication=chain.name.publication_id,
                ),
            )
            for service in services
        ]
    return told
