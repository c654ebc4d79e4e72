"""Blocks over HTTP: whole ones, single layers, ranges of either, and many in one answer. Shell.

What HTTP demands of an answer is decided by :mod:`kvcs.kvsp.http.conditions`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web

from kvcs.errors import BadName
from kvcs.kvsp.http import frames
from kvcs.kvsp.http.conditions import Selection, Span, select
from kvcs.kvsp.http.digests import digest_field, entity_tag
from kvcs.kvsp.http.holder import BlockHolder, HeldBlock, SealedBlock, digest_of
from kvcs.kvsp.http.names import BlockName, from_hex
from kvcs.kvsp.http.problems import Problem, Refused
from kvcs.kvsp.http.questions import MAX_BATCH_KEYS, MAX_BATCH_SECTIONS, BatchQuestion
from kvcs.kvsp.http.records import BadRecord
from kvcs.kvsp.http.routes import Routes
from kvcs.kvsp.http.service import Call, Handler
from kvcs.kvsp.http.tokens import Right
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.kvsp.layout import Octets
from kvcs.profile.naming import PUBLICATION_ID_OCTETS
from kvcs.telemetry import Counter, Counters

#: Octets that are hashed on the event loop; more go to a thread.
_HASHED_AT_ONCE = 256 << 10
#: Octets that the peer must take within ``stall_s``.
_WRITTEN_AT_ONCE = 256 << 10
#: Digests that are remembered, at some 150 octets each.
_DIGESTS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLimits:
    """What one request may ask for."""

    max_keys: int = MAX_BATCH_KEYS
    max_sections: int = MAX_BATCH_SECTIONS
    """Layers times blocks."""

    max_body_octets: int = 1 << 20


class BlockService:
    """Serves what a holder holds.

    Args:
        holder: Who finds blocks.
        limits: What one request may ask for.
        counters: Where octets are counted.
    """

    def __init__(
        self,
        holder: BlockHolder,
        *,
        limits: BlockLimits | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._holder = holder
        self._limits = limits or BlockLimits()
        self._counters = Counters() if counters is None else counters
        self._digests: OrderedDict[tuple[bytes, int | None], bytes] = OrderedDict()

    @property
    def handlers(self) -> Mapping[Routes, Handler]:
        """Who answers at which path."""
        return {
            Routes.CONTAINER: self._container,
            Routes.LAYER: self._layer,
            Routes.BATCH: self._batch,
        }

    # -- one block -------------------------------------------------------------------------------

    async def _container(self, call: Call) -> web.StreamResponse:
        held = await self._find(call)
        return await self._serve(call, held, None)

    async def _layer(self, call: Call) -> web.StreamResponse:
        held = await self._find(call)
        return await self._serve(call, held, int(call.request.match_info["layer"]))

    async def _find(self, call: Call) -> HeldBlock:
        publication = _publication(call.request)
        name = BlockName(call.scope_id, call.compatibility_id, call.variable("key", ID_OCTETS))
        # Nothing is looked for that the token is not good for: it would show in the time it takes.
        if not call.bearer.may(Right.READ, name.scope_id, name.compatibility_id):
            raise Refused(Problem.NOT_FOUND)
        held = await self._holder.find(name, publication)
        if held is None:
            raise Refused(Problem.NOT_FOUND)
        return held

    async def _serve(self, call: Call, held: HeldBlock, layer: int | None) -> web.StreamResponse:
        """Answer GET and HEAD for a layer, or for all of them."""
        digest = await self._digest(held, layer)
        if digest is None:
            raise Refused(Problem.NOT_FOUND)
        layout = held.layout
        length = layout.container_octets if layer is None else layout.layer_octets
        request, etag = call.request, entity_tag(digest)
        selection = select(
            etag=etag,
            length=length,
            is_get=request.method == "GET",
            if_match=_field(request, "If-Match"),
            if_none_match=_field(request, "If-None-Match"),
            if_range=_field(request, "If-Range"),
            range_=_field(request, "Range"),
        )
        if selection.status == 412:
            raise Refused(Problem.PRECONDITION_FAILED, headers={"ETag": etag})
        if selection.status == 416:
            raise Refused(Problem.BAD_RANGE, headers={"Content-Range": f"bytes */{length}"})
        response = web.StreamResponse(
            status=selection.status,
            # Known to nobody but who has the token, and asked about again before it is used.
            headers={"ETag": etag, "Cache-Control": "private, no-cache"},
        )
        if selection.status == 304:
            await call.begin(response)
            return response
        response.headers["Accept-Ranges"] = "bytes"
        response.headers["Repr-Digest"] = digest_field(digest)
        response.content_type = "application/octet-stream"
        response.content_length = selection.span.octets
        if request.method == "HEAD":
            await call.begin(response)
            return response
        await self._send(call, response, held, layer, selection, length, digest)
        return response

    async def _send(
        self,
        call: Call,
        response: web.StreamResponse,
        held: HeldBlock,
        layer: int | None,
        selection: Selection,
        length: int,
        digest: bytes,
    ) -> None:
        if selection.status == 206:
            response.headers["Content-Range"] = selection.span.content_range(length)
            hashed = sha256()
            async for part in self._parts(held, layer, selection.span):
                hashed.update(part)
            digest = hashed.digest()
        response.headers["Content-Digest"] = digest_field(digest)
        await call.begin(response)
        async for part in self._parts(held, layer, selection.span):
            await self._write(call, response, part)
        await response.write_eof()

    async def _parts(
        self, held: HeldBlock, layer: int | None, span: Span
    ) -> AsyncIterator[memoryview]:
        """Yield the octets of a span, section by section.

        Raises:
            Refused: If a layer is gone; behind the header that cuts the answer off.
        """
        each = held.layout.layer_octets
        layers = range(held.layout.layers) if layer is None else (layer,)
        for index, number in enumerate(layers):
            at = index * each
            if at + each <= span.start or at >= span.stop:
                continue
            sections = await held.read(number)
            if sections is None:
                raise Refused(Problem.NOT_FOUND)
            for section in sections:
                start, stop = max(span.start - at, 0), min(span.stop - at, len(section))
                if start < stop:
                    yield memoryview(section)[start:stop]
                at += len(section)

    async def _digest(self, held: HeldBlock, layer: int | None) -> bytes | None:
        """Return the digest of a representation; ``None`` if not all of it is there."""
        layers = range(held.layout.layers) if layer is None else (layer,)
        if not all(map(held.has, layers)):
            return None
        key = None if held.identity is None else (held.identity, layer)
        if key is not None and (known := self._digests.get(key)) is not None:
            self._digests.move_to_end(key)
            return known
        hashed = sha256()
        for number in layers:
            sections = await held.read(number)
            if sections is None:
                return None
            for section in sections:
                if len(section) > _HASHED_AT_ONCE:
                    await asyncio.to_thread(hashed.update, section)
                else:
                    hashed.update(section)
        digest = hashed.digest()
        if key is not None:
            self._remember(key, digest)
        return digest

    def _remember(self, key: tuple[bytes, int | None], digest: bytes) -> None:
        self._digests[key] = digest
        if len(self._digests) > _DIGESTS:
            self._digests.popitem(last=False)

    # -- many blocks -----------------------------------------------------------------------------

    async def _batch(self, call: Call) -> web.StreamResponse:
        limits = self._limits
        body = await call.body(limits.max_body_octets)
        try:
            asked = BatchQuestion.parse(
                body, octets=limits.max_body_octets, max_keys=limits.max_keys
            )
        except BadRecord as exc:
            raise Refused(Problem.BAD_REQUEST, str(exc)) from None
        if asked.sections > limits.max_sections:
            found = f"{len(asked.keys)} blocks of {len(asked.layers)} layers"
            raise Refused(Problem.TOO_LARGE, f"{found}, limit {limits.max_sections} together")
        scope_id, compatibility_id = call.scope_id, call.compatibility_id
        held: list[HeldBlock | None] = [None] * len(asked.keys)
        if call.bearer.may(Right.READ, scope_id, compatibility_id):
            held = [
                await self._holder.find(
                    BlockName(scope_id, compatibility_id, key), asked.publication
                )
                for key in asked.keys
            ]
        response = web.StreamResponse(
            headers={"Content-Type": frames.CONTENT_TYPE, "Cache-Control": "private, no-store"}
        )
        response.enable_chunked_encoding()
        await call.begin(response)
        written = 0
        for layer, block in asked.order():
            written += await self._write(call, response, *await self._frame(held, layer, block))
            if written >= _WRITTEN_AT_ONCE:
                written = 0
                await asyncio.sleep(0)  # a peer that is quick would keep others waiting
        await self._write(call, response, frames.end(asked.sections))
        await response.write_eof()
        return response

    async def _frame(
        self, held: Sequence[HeldBlock | None], layer: int, block: int
    ) -> tuple[Octets, ...]:
        one = held[block]
        if one is None or not one.has(layer):
            return (frames.absent(block, layer),)
        sections: tuple[Octets, ...] | None
        if isinstance(one, SealedBlock):
            sealed, kind = await one.read_sealed(layer), frames.FrameKind.SEALED
            sections = None if sealed is None else sealed.parts()
        else:
            sections, kind = await one.read(layer), frames.FrameKind.SECTIONS
        if sections is None:
            return (frames.absent(block, layer),)
        octets = sum(map(len, sections))
        key = None if one.identity is None else (one.identity, layer)
        digest = None if key is None else self._digests.get(key)
        if digest is None:
            if octets > _HASHED_AT_ONCE:
                digest = await asyncio.to_thread(digest_of, sections)
            else:
                digest = digest_of(sections)
            if key is not None:
                self._remember(key, digest)
        header = frames.frame_header(kind, block, layer, octets, digest)
        return (header, *sections)

    async def _write(self, call: Call, response: web.StreamResponse, *parts: Octets) -> int:
        """Send octets, as fast as the peer takes them; return how many.

        Raises:
            TimeoutError: If it takes nothing for ``stall_s``.
        """
        octets = sum(map(len, parts))
        if octets <= _WRITTEN_AT_ONCE:
            # One chunk, one record: a copy costs less than a write.
            parts = (b"".join(parts),)
        for part in parts:
            view = memoryview(part)
            for at in range(0, len(view), _WRITTEN_AT_ONCE):
                async with asyncio.timeout(call.options.stall_s):
                    await response.write(view[at : at + _WRITTEN_AT_ONCE])
        self._counters.add(Counter.HTTP_OCTETS, octets)
        return octets


def _publication(request: web.Request) -> bytes | None:
    """Return the Publication ID that the query asks for, if it does.

    Raises:
        Refused: If it asks for anything else.
    """
    query = request.query
    if not query:
        return None
    if set(query) != {"publication"} or len(query) != 1:
        raise Refused(Problem.BAD_REQUEST, "expected no query but publication=ID, once")
    try:
        return from_hex("Publication ID", query["publication"], PUBLICATION_ID_OCTETS)
    except BadName as exc:
        raise Refused(Problem.BAD_REQUEST, str(exc)) from None


def _field(request: web.Request, name: str) -> str | None:
    """Return a field, its lines joined as one list."""
    lines = request.headers.getall(name, [])
    return ", ".join(lines) if lines else None
