"""A context that grows: a prefill in four segments, then block after block that is appended."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.consumer.trust import Expectations
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component
from kvcs.producer.handle import PublicationHandle
from kvcs.store.sink import ArraySink
from kvcs.trust.scope import Scope
from tests.integration.kvcs.scene import BLOCK_TOKENS, COMPAT, SCOPE, Place, hasty

LAYERS = 3
#: Blocks of each segment of the prefill.
CHUNKS = (4, 3, 3, 2)
PREFIX = sum(CHUNKS)
GROWING = replace(COMPAT, layers=LAYERS)
#: Tokens of the prompt; the last ones do not fill a block, and belong to the first appended one.
PROMPT = list(range(1000, 1000 + PREFIX * BLOCK_TOKENS + 3))
#: Whoever joins waits for those who joined before, on a machine that is busy.
PATIENT = hasty(deadline_s=100, stall_timeout_s=50, request_timeout_s=30, discovery_timeout_s=30)


def token(position: int) -> int:
    """Return the token at a position of the whole context."""
    return 1000 + position


def kv(layer: int, first: int, blocks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return K and V of some blocks, from which layer and position of each token can be told."""
    start, stop = first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS
    numbers = np.arange(start, stop, dtype=np.uint16) * LAYERS + layer
    k, v = (
        np.broadcast_to(side + numbers[:, None, None], (stop - start, *shape)).view(np.float16)
        for side, shape in ((np.uint16(0), GROWING.k_shape), (np.uint16(1 << 15), GROWING.v_shape))
    )
    return k, v


def expectations(scope: Scope | ScopeKey = SCOPE, **others: Any) -> Expectations:
    return Expectations.of_tokens(scope, GROWING, PROMPT, **others)


def places(blocks: int) -> Counter[Place]:
    """Every tensor of so many blocks, once."""
    return Counter(
        (component, layer, block)
        for component in (Component.K, Component.V)
        for layer in range(LAYERS)
        for block in range(blocks)
    )


def assert_positions(sink: ArraySink, blocks: int) -> None:
    """Each token of each layer has its position, and there are no others."""
    for layer in range(LAYERS):
        for found, expected in zip(
            (sink.k[layer], sink.v[layer]), kv(layer, 0, blocks), strict=True
        ):
            np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def wavefront() -> Iterator[tuple[int, int]]:
    """Yield segment and layer as passes over them overlap: one begins before the last one ends."""
    for step in range(len(CHUNKS) + LAYERS - 1):
        for segment in range(len(CHUNKS)):
            if 0 <= step - segment < LAYERS:
                yield segment, step - segment


async def prefill(handle: PublicationHandle) -> AsyncIterator[None]:
    """Publish the prompt in segments that are in flight at once; yields after each layer."""
    segments = [await handle.add_segment(CHUNKS[0])]
    for number, layer in wavefront():
        if number == len(segments):
            segments.append(await handle.add_segment(CHUNKS[number]))
        segment = segments[number]
        k, v = kv(layer, segment.first_block, segment.blocks)
        await handle.add_layer(layer, k, v, segment=segment)
        yield


async def decode(
    handle: PublicationHandle,
    blocks: int,
    chance: random.Random,
    at_once: Sequence[int] = (1, 1, 1, 2),
) -> AsyncIterator[None]:
    """Append so many blocks, one or a few at a time; yields after each time."""
    left = blocks
    while left:
        count = min(left, chance.choice(at_once))
        known = len(handle.tokens)
        first = known // BLOCK_TOKENS
        tokens = [token(position) for position in range(known, (first + count) * BLOCK_TOKENS)]
        await handle.append(tokens, [kv(layer, first, count) for layer in range(LAYERS)])
        left -= count
        yield


async def produce(
    handle: PublicationHandle,
    appended: int,
    chance: random.Random,
    at_once: Sequence[int] = (1, 1, 1, 2),
) -> AsyncIterator[None]:
    """Produce everything and finish; yields whenever something was published, and for ever."""
    async for _ in prefill(handle):
        yield
    async for _ in decode(handle, appended, chance, at_once):
        yield
    await handle.finish()
    while True:
        yield
