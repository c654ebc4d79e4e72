"""A store between producers and consumers, and ways to look at what it holds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.depot.daemon import Store, StoreOptions
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter
from kvcs.trust.scope import Scope
from moqt.aio import ClientTls, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus
from moqt.location import Location
from tests.integration.kvcs.scene import PATIENCE_S, SCOPE, Noticing

#: Objects of a publication, by Track Name and Location.
Contents = dict[tuple[bytes, Location], bytes]


@dataclass
class Warehouse:
    """A store that listens, and what is needed to reach it."""

    store: Store
    counters: Noticing
    spec: ConnectionSpec
    files: CertificateFiles

    def follow(self, spec: ConnectionSpec, **more: Any) -> None:
        self.store.follow([spec.uri], tls=spec.tls, **more)

    async def kept(self, count: int = 1) -> None:
        """Return when so many publications are held whole."""
        await self.counters.reached(Counter.PUBLICATIONS_KEPT, count)

    async def until(self, true: Callable[[], bool]) -> None:
        """Return when something is true of what is held."""
        seen = 0
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                seen = await self.store.depot.wait_changed(seen)

    async def contents(self, name: PublicationName) -> Contents:
        """Return everything that is held of a publication, read and checked."""
        _, tracks = await self.store.depot.contents(name)
        return {
            (track, entry.location): await self.store.depot.read(name, track, entry.location)
            for track, entries in tracks.items()
            for entry in entries
        }


@asynccontextmanager
async def warehouse(
    folder: Path,
    files: CertificateFiles,
    *,
    scope: Scope | ScopeKey = SCOPE,
    trusted: Any = None,
    **options: Any,
) -> AsyncIterator[Warehouse]:
    """Have a store listen; what the test does with it may take a minute."""
    counters = Noticing()
    made = Store(
        folder,
        scope,
        StoreOptions(**({"drain_s": 0.0, "budget_octets": 1 << 30} | options)),
        trusted=trusted,
        counters=counters,
    )
    async with asyncio.timeout(60), made as store:
        host, port = await store.listen(
            "127.0.0.1", 0, tls=ServerTls(files.certificate_file, files.key_file)
        )
        spec = ConnectionSpec(uri=f"moqt://{host}:{port}/", tls=ClientTls(ca_file=files.ca_file))
        yield Warehouse(store, counters, spec, files)


def published(publication: Publication) -> Contents:
    """Return every Object of a publication, ends not counted."""
    return {
        (name, obj.location): b"".join(obj.parts)
        for name, track in publication.tracks.items()
        for group in track.group_ids(0, 1 << 62)
        for _, obj in track.objects_of(group)
        if obj.status is ObjectStatus.NORMAL
    }
