"""BlockClient: blocks from a block service, verified before anybody gets them. Shell.

What is verified here is that what was sent has the digest that was said with it, and the length
that the descriptor gives. Whether that is the block that was *meant*, only a digest from elsewhere
can tell: a manifest's, handed over as ``digest`` or compared by the caller.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from types import TracebackType
from typing import Self

from kvcs.errors import BadObject, NotFound, Rejection
from kvcs.kvsp.http import frames
from kvcs.kvsp.http.client import Answer, ClientOptions, HttpClient, bad_answer
from kvcs.kvsp.http.digests import parse_digest
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.questions import BatchQuestion, batches
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.http.routes import container_path, layer_path, model_path
from kvcs.kvsp.http.sealed import BadSealedLayer, SealedLayer
from kvcs.kvsp.http.uris import ServiceUri
from kvcs.kvsp.layout import Component, Layout
from moqt.aio import ClientTls


@dataclass(frozen=True, slots=True)
class LayerSections:
    """K and V of one layer of one block."""

    block_key: bytes
    layer: int
    k: memoryview = field(repr=False)
    """Raw: ``(block_tokens, heads, dim)``, C order, little-endian. Empty if there is no section."""

    v: memoryview = field(repr=False)
    digest: bytes
    """The layer digest: SHA-256 over K and then V (KVSP Section 4)."""


@dataclass(frozen=True, slots=True)
class SealedSections:
    """One layer of one block of a scope that seals: whoever has its key can open it."""

    block_key: bytes
    layer: int
    sealed: SealedLayer


@dataclass(frozen=True, slots=True)
class Absent:
    """A layer of a block that the service does not have."""

    block_key: bytes
    layer: int


class BlockClient:
    """Asks one block service. An asynchronous context manager.

    Args:
        uri: Where it is. Take a URI from an index only together with a token that may be shown to
            whoever stands behind it: an index may lie.
        token: What the service knows us by.
        tls: Whom to believe.
        options: Deadlines and limits.

    Raises:
        ConfigError: If a file of ``tls`` cannot be used.
        BadName: If ``uri`` is none of a service.
    """

    def __init__(
        self,
        uri: ServiceUri | str,
        token: str | None,
        *,
        tls: ClientTls | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self._http = HttpClient(uri, token, tls=tls, options=options)

    @property
    def uri(self) -> ServiceUri:
        """Where the service is."""
        return self._http.uri

    async def layer(
        self,
        name: BlockName,
        layer: int,
        layout: Layout,
        *,
        publication: bytes | None = None,
        digest: bytes | None = None,
        timeout_s: float | None = None,
    ) -> LayerSections:
        """Get one layer of one block.

        Args:
            name: Which block.
            layer: From 0.
            layout: The descriptor's; what has another length is refused.
            publication: A Publication ID that it must be of, if given.
            digest: The layer digest that it must have, if known.
            timeout_s: Seconds until it must be there; the client's by default.

        Raises:
            NotFound: If the service does not have it, or the token is not good for it.
            BadObject: If it is not what its digest says, or not what ``digest`` says.
            ServiceFailed: If the service did not do it, or answered what is none.
            Expired: If it took too long.
        """
        answer = await self._http.ask(
            "GET", _of(layer_path(name, layer), publication), limit=layout.layer_octets,
            timeout_s=timeout_s,
        )  # fmt: skip
        found = _verified(answer, layout.layer_octets, "Repr-Digest", digest)
        return LayerSections(name.block_key, layer, *layout.split(answer.body), found)

    async def section(
        self,
        name: BlockName,
        layer: int,
        component: Component,
        layout: Layout,
        *,
        publication: bytes | None = None,
        digest: bytes | None = None,
        timeout_s: float | None = None,
    ) -> memoryview:
        """Get K or V of one layer of one block alone, as a range; for ``KV`` both.

        Args and what is raised as for :meth:`layer`; ``digest`` is over what is returned, so it is
        the Data Digest of the raw Object that carries the same.
        """
        span = layout.span(0, component)
        octets = layout.section_octets(component)
        if not octets:
            return memoryview(b"")
        answer = await self._http.ask(
            "GET", _of(layer_path(name, layer), publication), limit=octets,
            headers={"Range": f"bytes={span.start}-{span.stop - 1}"}, timeout_s=timeout_s,
        )  # fmt: skip
        expected = f"bytes {span.start}-{span.stop - 1}/{layout.layer_octets}"
        if answer.status != 206 or answer.headers.get("Content-Range") != expected:
            raise bad_answer(f"{self.uri}: another range than was asked for, expected {expected}")
        _verified(answer, octets, "Content-Digest", digest)
        return memoryview(answer.body)

    async def container(
        self,
        name: BlockName,
        layout: Layout,
        *,
        publication: bytes | None = None,
        digest: bytes | None = None,
        timeout_s: float | None = None,
    ) -> list[LayerSections]:
        """Get all layers of one block at once. As :meth:`layer`, over the whole container."""
        answer = await self._http.ask(
            "GET", _of(container_path(name), publication), limit=layout.container_octets,
            timeout_s=timeout_s,
        )  # fmt: skip
        _verified(answer, layout.container_octets, "Repr-Digest", digest)
        found = []
        for layer in range(layout.layers):
            part = memoryview(answer.body)[layout.span(layer, Component.KV)]
            k, v = layout.split(part)
            found.append(LayerSections(name.block_key, layer, k, v, sha256(part).digest()))
        return found

    async def sections(
        self,
        scope_id: bytes,
        compatibility_id: bytes,
        keys: Sequence[bytes],
        layers: Runs,
        layout: Layout,
        *,
        publication: bytes | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[LayerSections | SealedSections | Absent, None]:
        """Get some layers of many blocks in one request, each as soon as it is there and verified.

        Layer by layer, and in each in the order of ``keys``. What is raised says nothing against
        what was yielded before. Close the iterator (``contextlib.aclosing``) to leave early.

        Args:
            scope_id: The scope.
            compatibility_id: The model.
            keys: The Block Keys; the service says how many it takes in one request (413).
            layers: Which layers.
            layout: The descriptor's.
            publication: A Publication ID that all must be of, if given.
            timeout_s: Seconds until the last one must be there.

        Raises:
            ServiceFailed: As for :meth:`layer`; also if one is not what its digest says.
            Expired: If it took too long.
        """
        asked = BatchQuestion(tuple(keys), layers, publication)
        reader = frames.FrameReader(asked.order(), layout.layer_octets)
        path = model_path(scope_id, compatibility_id) + "/blocks"
        async with self._http.stream(
            "POST", path, body=asked.body(), timeout_s=timeout_s
        ) as incoming:
            if incoming.content_type != frames.CONTENT_TYPE:
                raise bad_answer(f"{self.uri}: {incoming.content_type}, expected frames")
            async for data in incoming:
                try:
                    for frame in reader.feed(data):
                        yield _of_frame(frame, asked, layout)
                except (frames.BadFrame, BadSealedLayer) as exc:
                    raise bad_answer(f"{self.uri}: {exc}") from None
            if not reader.ended:
                raise bad_answer(f"{self.uri}: frames that break off")

    async def wanted(
        self,
        scope_id: bytes,
        compatibility_id: bytes,
        wanted: Iterable[tuple[bytes, int]],
        layout: Layout,
        *,
        publication: bytes | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[LayerSections | SealedSections, None]:
        """Get whichever layers of whichever blocks are wanted, the lowest layers first.

        In few requests, one after the other. What the service does not have is left out.

        Args:
            scope_id: The scope.
            compatibility_id: The model.
            wanted: Block Key and layer of each, in any order.
            layout: The descriptor's.
            publication: A Publication ID that all must be of, if given.
            timeout_s: Seconds until the last one of a request must be there.

        Raises:
            NotFound: At the end, if there was nothing of it, or the token is not good for it.
            ServiceFailed: As for :meth:`sections`.
            Expired: As for :meth:`sections`.
        """
        found = False
        for asked in batches(wanted, publication=publication):
            answer = self.sections(
                scope_id,
                compatibility_id,
                asked.keys,
                asked.layers,
                layout,
                publication=publication,
                timeout_s=timeout_s,
            )
            async with aclosing(answer) as sections:
                async for one in sections:
                    if not isinstance(one, Absent):
                        found = True
                        yield one
        if not found:
            raise NotFound(f"{self.uri}: nothing of what is wanted")

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, exc, traceback)


def _of(path: str, publication: bytes | None) -> str:
    return path if publication is None else f"{path}?publication={publication.hex()}"


def _of_frame(
    frame: frames.Frame, asked: BatchQuestion, layout: Layout
) -> LayerSections | SealedSections | Absent:
    key = asked.keys[frame.block]
    if frame.kind is frames.FrameKind.ABSENT:
        return Absent(key, frame.layer)
    if frame.kind is frames.FrameKind.SEALED:
        return SealedSections(key, frame.layer, SealedLayer.parse(frame.data))
    return LayerSections(key, frame.layer, *layout.split(frame.data), frame.digest)


def _verified(answer: Answer, octets: int, name: str, digest: bytes | None) -> bytes:
    """Return the digest of an answer, or refuse the answer."""
    if answer.status not in (200, 206):
        raise bad_answer(f"status {answer.status} where octets were asked for")
    if len(answer.body) != octets:
        raise bad_answer(f"{len(answer.body)} octets, expected {octets}")
    try:
        said = parse_digest(answer.headers.get(name, ""))
    except ValueError as exc:
        raise bad_answer(f"{name}: {exc}") from None
    if said is None:
        raise bad_answer(f"an answer without the SHA-256 of {name}")
    found = sha256(answer.body).digest()
    for expected, whose in ((said, name), (digest, "the digest that was expected")):
        if expected is not None and found != expected:
            raise BadObject(
                Rejection.DIGEST, f"digest is {found.hex()}, {whose} is {expected.hex()}"
            )
    return found
