"""Who serves publications badly, or blocks: what is missing, damaged, or never answered."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

from kvcs.consumer.events import TokenRange
from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.consumer.sections import Section, SectionKey
from kvcs.kvsp.layout import Component, Layout
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PublicationName
from moqt.aio import ClientTls, MoqtConnection, RequestHandler, Server, ServerTls, serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPAT,
    LAYERS,
    Place,
    expectations,
    fill,
    in_halves,
    tensors,
)

#: Tracks that a publication of the scene has.
DATA = (b"k.raw.s0", b"v.raw.s0")


@dataclass
class Moment:
    """A place in a production: so many whole layers, and so many Objects of the next one."""

    layers: int
    objects: int

    @classmethod
    def at_random(cls, seed: int, first_layer: int = 0) -> "Moment":
        draw = random.Random(seed)
        return cls(draw.randint(first_layer, LAYERS - 1), draw.randint(0, BLOCKS - 1))

    @property
    def placed(self) -> int:
        """Tensors that a consumer has then."""
        return 2 * (self.layers * BLOCKS + self.objects)

    async def produce(self, handle: PublicationHandle) -> Iterator[None]:
        """Produce up to here; what is returned goes on with the layer, in halves of Objects."""
        segment = await handle.add_segment()
        await fill(handle, range(self.layers))
        steps = in_halves(handle.publication, segment, self.layers)
        # Three for each Object, in two tracks; and one half more.
        for _ in islice(steps, 3 * 2 * self.objects + 2):
            pass
        return steps

    async def finish(self, handle: PublicationHandle, steps: Iterator[None]) -> None:
        """Produce the rest."""
        for _ in steps:
            pass
        await fill(handle, range(self.layers + 1, LAYERS))
        await handle.finish()


async def other_run(handle: PublicationHandle) -> Publication:
    """Publish what another run of the model makes of the prompt: not bit by bit the same."""
    segment = await handle.add_segment()
    for layer in range(LAYERS):
        await handle.add_layer(layer, *(-part for part in tensors(layer)), segment=segment)
    await handle.finish()
    return handle.publication


def exactly(placed: Counter[Place]) -> list[TokenRange]:
    """Return what is to be recomputed if this is there, block by block."""
    found: list[TokenRange] = []
    for block in range(BLOCKS):
        lacking = [
            layer
            for layer in range(LAYERS)
            if any((part, layer, block) not in placed for part in (Component.K, Component.V))
        ]
        if not lacking:
            continue
        start, first = block * BLOCK_TOKENS, lacking[0]
        if found and found[-1].token_end == start and found[-1].first_layer == first:
            start = found.pop().token_start
        end = (block + 1) * BLOCK_TOKENS
        found.append(TokenRange(token_start=start, token_end=end, first_layer=first))
    return found


@dataclass
class Copy:
    """What somebody else holds of a publication."""

    name: PublicationName
    tracks: dict[bytes, LocalTrack]


def copied(
    one: Publication,
    *,
    lacks: tuple[bytes, int] | None = None,
    damaged: tuple[bytes, int, int] | None = None,
) -> Copy:
    """Copy a finished publication.

    Args:
        one: The publication.
        lacks: Track and Group that are not there.
        damaged: Track, Group and Object of which an octet is changed.
    """
    tracks: dict[bytes, LocalTrack] = {}
    for name, track in one.tracks.items():
        tracks[name] = copy = LocalTrack(track.name)
        for layer, subgroups in track._groups.items():
            if (name, layer) == lacks:
                continue
            for subgroup in subgroups:
                made = copy.open_subgroup(
                    layer,
                    0,
                    priority=subgroup.priority,
                    holds_end_of_group=True,
                    has_properties=subgroup.has_properties,
                )
                for obj in subgroup.objects:
                    payload = bytearray(b"".join(obj.parts))
                    if (name, layer, obj.object_id) == damaged:
                        payload[-1] ^= 1
                    made.publish(
                        obj.object_id,
                        bytes(payload),
                        status=obj.status,
                        properties=obj.properties,
                    )
                made.close()
        copy.end()
    return Copy(one.name, tracks)


class StandIn(RequestHandler):
    """Serves copies, and is silent about some tracks."""

    def __init__(self, *held: Copy) -> None:
        self.silent: set[bytes] = set()
        self.instead: dict[bytes, list[LocalTrack]] = {}
        self.asked: Counter[bytes] = Counter()
        self._held = {copy.name.namespace: copy for copy in held}
        self._directory = NamespaceDirectory()
        for namespace in self._held:
            self._directory.add(namespace)

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        connection.session.accept_namespaces(request.request_id, self._directory)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        if (found := self._find(connection, request)) is not None:
            connection.session.accept_subscribe(request.request_id, found)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        if (found := self._find(connection, request)) is not None:
            connection.session.accept_fetch(request.request_id, found)

    def _find(
        self, connection: MoqtConnection, request: SubscribeReceived | FetchReceived
    ) -> LocalTrack | None:
        track = request.track
        self.asked[track.name] += 1
        if track.name in self.silent:
            return None
        copy = self._held.get(track.namespace)
        found = copy.tracks.get(track.name) if copy is not None else None
        if self.instead.get(track.name):
            found = self.instead[track.name].pop(0)
        if found is None:
            code = RequestErrorCode.DOES_NOT_EXIST
            connection.session.reject(request.request_id, code, "no such track")
        return found


@dataclass
class Standing:
    """A stand-in that listens."""

    handler: StandIn
    server: Server
    spec: ConnectionSpec


@asynccontextmanager
async def standing(
    files: CertificateFiles, *held: Copy, handler: StandIn | None = None
) -> AsyncIterator[Standing]:
    handler = handler or StandIn(*held)
    tls = ServerTls(files.certificate_file, files.key_file)
    server = await serve("127.0.0.1", 0, tls=tls, handler=handler)
    try:
        uri = f"moqt://127.0.0.1:{server.address[1]}/"
        yield Standing(
            handler, server, ConnectionSpec(uri=uri, tls=ClientTls(ca_file=files.ca_file))
        )
    finally:
        await server.close(drain_s=0)


@dataclass
class Blocks:
    """A block service that has every block of the scene."""

    name: str = "blocks"
    deterministic: bool = False
    stalls: bool = False
    fails: Exception | None = None
    """What it raises once it has given one section."""

    lacks: frozenset[tuple[int, int]] = frozenset()
    """Layers and blocks that it does not have."""

    damages: frozenset[tuple[int, int]] = frozenset()
    asked: list[SectionKey] = field(default_factory=list)
    publications: set[bytes] = field(default_factory=set)
    """Whose Objects were missing."""

    async def sections(
        self,
        scope_id: bytes,
        compatibility_id: bytes,
        wanted: Sequence[SectionKey],
        layout: Layout,
        publication_id: bytes,
    ) -> AsyncGenerator[Section, None]:
        expected = expectations()
        assert scope_id == expected.scope_key.scope_id
        assert compatibility_id == expected.scope_key.compatibility_id(COMPAT)
        self.asked += wanted
        self.publications.add(publication_id)
        for key in wanted:
            if self.stalls:
                await asyncio.Event().wait()
            block = expected.block_keys.index(key.block_key)
            if (key.layer, block) in self.lacks:
                continue
            k, v = (part.tobytes() for part in tensors(key.layer, block, 1))
            digest = sha256(k + v).digest()
            if (key.layer, block) in self.damages:
                v = bytes(len(v))
            yield Section(key=key, k=k, v=v, layer_digest=digest)
            if self.fails is not None:
                raise self.fails
