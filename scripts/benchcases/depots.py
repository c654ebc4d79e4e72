"""A store on disk: how soon it serves after a restart, in how much memory, within its budget."""

import tempfile
import time
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchcases import usage
from benchcases.case import Case, Options
from benchcases.ends import Cache, End, Place, Role, engine
from benchcases.figures import Result, Target, mebibytes, megabytes
from benchcases.roles import ConsumerEnd
from benchcases.turns import say
from kvcs.depot.daemon import Store, StoreOptions
from kvcs.depot.depot import Depot
from kvcs.depot.records import MANIFESTS, Item, TrackNote
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PROFILE, PublicationName, new_publication_id
from moqt.aio import ClientTls, QuicSettings, ServerTls, connect
from moqt.codepoints import ObjectStatus
from moqt.names import TrackNamespace
from moqt.session.events import NamespaceAppeared, ObjectReceived
from moqt.wire.filters import LocationFilter

#: Of one publication. There are as many as it takes.
_PUBLICATION_OCTETS = 256e6
#: Consumers that retrieve at the same time while memory is looked at.
_CONSUMERS = 2
#: Where large temporary files go; others may lie in memory.
_ON_DISK = "/var/tmp"
#: Objects that are kept at a time.
_BATCH = 64


class DepotEnd(Role):
    """A store that listens; and before that, one that is filled."""

    def __init__(self, place: Place, *, folder: Path, budget_octets: int) -> None:
        super().__init__(place)
        self._folder = folder
        self._options = StoreOptions(budget_octets=budget_octets, drain_s=0.2)
        self._scope = ScopeKey(place.scope)

    async def start(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def fill(self, cache: Cache, count: int) -> dict[str, Any]:
        """Keep a cache under so many Publication IDs; return once the last of it is on disk."""
        octets = kept = 0
        async with Depot(self._folder, budget_octets=self._options.budget_octets) as depot:
            source = cache.source
            keys = self._scope.block_keys(source.descriptor, source.tokens)
            prepared = None
            began = time.monotonic()
            for number in range(count):
                name = PublicationName(
                    self._scope.scope_id,
                    self._scope.compatibility_id(source.descriptor),
                    keys[-1],
                    new_publication_id(),
                )
                publication = Publication(
                    name, source.descriptor, producer_key=self.place.producer_key
                )
                segment = publication.open_segment(keys)
                if prepared is None:  # the tensors of all are the same, their manifests are not
                    layers = source.layers(0, cache.blocks)
                    prepared = [segment.copy(*tensors).prepare() for tensors in layers]
                    began = time.monotonic()
                for layer in prepared:
                    publication.publish(layer)
                publication.finish()
                octets += await _keep(depot, publication)
                kept += 1
                say(f"depot: {number + 1} of {count} publications kept")
            return {
                "octets": octets,
                "publications": kept,
                "seconds": time.monotonic() - began,
                "held": len(depot.shelf),
                "used": depot.shelf.used,
                "limit": depot.shelf.limit,
            }

    async def open(self) -> dict[str, float]:
        """Serve what the folder holds; return when that began and when it listened."""
        usage.reset_peak()
        began = time.monotonic()
        store = await self._stack.enter_async_context(
            Store(self._folder, self._scope, self._options)
        )
        files = self.place.certificates
        _, port = await store.listen(
            "127.0.0.1",
            0,
            tls=ServerTls(files.certificate_file, files.key_file),
            quic=QuicSettings(max_datagram_octets=1452, engine=engine()),
        )
        return {"began": began, "listened": time.monotonic(), "port": port}


class VisitorEnd(Role):
    """Somebody who takes one Object."""

    async def first_object(self, port: int) -> float:
        """Ask for all there is, and for a track of it; return when its first Object came."""
        prefix = TrackNamespace((PROFILE, ScopeKey(self.place.scope).scope_id))
        tls = ClientTls(ca_file=self.place.certificates.ca_file)
        async with connect(f"moqt://127.0.0.1:{port}/", tls=tls) as conn:
            announced = await anext(aiter(await conn.subscribe_namespace(prefix)))
            assert isinstance(announced, NamespaceAppeared)
            name = PublicationName.from_namespace(announced.namespace)
            fetch = await conn.fetch(
                name.track(b"k.raw.s0"), location_filter=LocationFilter.absolute_start(0, 0)
            )
            async for item in fetch:
                if isinstance(item, ObjectReceived):
                    return time.monotonic()
        raise AssertionError("no Object came")


async def _keep(depot: Depot, publication: Publication) -> int:
    """Keep everything of a publication; return its octets."""
    name, octets = publication.name, 0
    await depot.begin(name)
    for track, local in publication.tracks.items():
        is_manifest = track in MANIFESTS
        blocks = publication.segments[0].blocks
        layers = publication.layout.layers
        note = TrackNote() if is_manifest else TrackNote(layers, blocks, largest=local.largest)
        items: list[Item] = []
        for group in local.group_ids(0, 1 << 62):
            for subgroup, obj in local.objects_of(group):
                if obj.status is not ObjectStatus.NORMAL:
                    continue
                payload = b"".join(obj.parts)
                digest = sha256(payload).digest() if is_manifest else payload[36:68]
                items.append(Item(track, obj.location, subgroup.priority, (), payload, digest))
                octets += len(payload)
                if len(items) == _BATCH:
                    await depot.keep(name, items, {track: note})
                    items = []
        await depot.keep(name, items, {track: note})
    await depot.finish(name, ended=True)
    depot.done(name)
    return octets


def _depot(case: Case, place: Place, options: Options) -> Result:
    total = options.octets(10 * (1 << 30))
    cache = Cache.of_octets(min(_PUBLICATION_OCTETS, total / 4))
    budget = round(total)
    # One more than fits, so that the budget is something that is kept to.
    count = int(total // cache.octets) + 2
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-", dir=_ON_DISK) as folder:
        where = {"folder": Path(folder) / "store", "budget_octets": budget}
        with End(DepotEnd, place, **where) as filling:
            filled = filling.ask("fill", cache, count, limit_s=3600.0)
        with End(VisitorEnd, place) as visitor, End(DepotEnd, place, **where) as depot:
            opened = depot.ask("open")
            first = visitor.ask("first_object", opened["port"]) - opened["began"]
            say(f"{case.name}: the first Object came after {first:.3f} s")
            consumers = [End(ConsumerEnd, place, port=opened["port"]) for _ in range(_CONSUMERS)]
            try:
                for consumer in consumers:
                    consumer.begin("consume", cache, "discard")
                runs = [consumer.answer() for consumer in consumers]
            finally:
                for consumer in consumers:
                    consumer.__exit__(None, None, None)
            used = depot.ask("usage")
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    figures = {
        "mb": megabytes(filled["octets"]),
        "publications": filled["publications"],
        "held": filled["held"],
        "objects": cache.objects * filled["held"],
        "kept_mb_per_s": round(filled["octets"] / filled["seconds"] / 1e6, 1),
        "open_s": round(opened["listened"] - opened["began"], 3),
        "first_object_s": round(first, 3),
        "served_mb_per_s": [round(run["octets"] / run["seconds"] / 1e6, 1) for run in runs],
        "rejected": sum(run["rejected"] for run in runs),
        "peak_mib": mebibytes(used["peak"]),
        "disk_mb": megabytes(on_disk),
    }
    ratios: dict[str, float | None] = {
        "used_to_budget": round(filled["used"] / filled["limit"], 4),
        "disk_to_budget": round(on_disk / filled["limit"], 4),
    }
    return Result(case.name, figures, ratios, case.targets)


CASES = (
    Case(
        "depot",
        "a store of 10 GiB: seconds from a restart to the first object, memory, what it keeps to",
        (
            Target("first_object_s", at_most=3.0),
            Target("peak_mib", at_most=256.0),
            Target("used_to_budget", at_most=1.0),
            Target("disk_to_budget", at_most=1.01),
        ),
        _depot,
        pairs=1,
    ),
)
