"""What of a context is left to be computed when a retrieval is over (KVCS Section 5.4). Pure.

Blocks are those of the context, layers those of the model. What a layer-wise gap means for the one
who computes is said at :class:`~kvcs.consumer.events.TokenRange`.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import Gap, ReadyLayers, TokenRange
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations


class Lack(NamedTuple):
    """Blocks of which something is missing, in no layer below ``first_layer``."""

    start: int
    stop: int
    first_layer: int


def lacks(assembler: Assembler | None, wish: Wish, known_blocks: int | None) -> list[Lack]:
    """Return what is missing, ascending and without overlap.

    Args:
        assembler: How far the publication is; None: there is none, so everything is missing.
        wish: What is wanted.
        known_blocks: Whole blocks of the prompt; None: its tokens are not known.
    """
    lowest = 0 if wish.layers is None else wish.layers.start
    found: list[Lack] = []
    reached = 0 if wish.blocks is None else wish.blocks.start
    if assembler is not None and assembler.manifest is not None:
        found += _of_gaps(assembler, assembler.gaps())
        found += _of_gaps(assembler, assembler.unattested())
        if unlisted := assembler.unlisted:
            found.append(Lack(unlisted.start, unlisted.stop, lowest))
        reached = max(reached, unlisted.stop)
        if (extent := assembler.extent) is not None:
            reached = max(reached, extent.stop)
    wanted = known_blocks
    if wanted is not None and wish.blocks is not None:
        wanted = min(wanted, wish.blocks.stop)
    nothing_told = assembler is None or assembler.manifest is None
    # Of segments that are named, the manifest alone tells the blocks.
    if wanted is not None and reached < wanted and (wish.segments is None or nothing_told):
        found.append(Lack(reached, wanted, lowest))
    return list(_lowest(found))


def tokens_left(assembler: Assembler | None, wish: Wish, expected: Expectations) -> int | None:
    """Return how many tokens would have to be computed now; None: nobody knows.

    Args:
        assembler: How far the publication is, if there is one.
        wish: What is wanted.
        expected: What is known of the prompt.
    """
    known = expected.wanted_blocks or len(expected.block_keys) or None
    if known is None and (assembler is None or assembler.manifest is None):
        return None
    blocks = sum(lack.stop - lack.start for lack in lacks(assembler, wish, known))
    return blocks * expected.descriptor.block_tokens


def ranges(found: Iterable[Lack], block_tokens: int) -> tuple[TokenRange, ...]:
    """Return blocks as the tokens that they are of."""
    return tuple(
        TokenRange(
            token_start=lack.start * block_tokens,
            token_end=lack.stop * block_tokens,
            first_layer=lack.first_layer,
        )
        for lack in found
    )


def everything(assembler: Assembler | None, wish: Wish, known_blocks: int | None) -> list[Lack]:
    """Return all that is wanted, as if nothing of it were there; arguments as of :func:`lacks`."""
    lowest = 0 if wish.layers is None else wish.layers.start
    found = lacks(assembler, wish, known_blocks)
    if assembler is not None and (extent := assembler.extent) is not None:
        blocks = (plan.context_blocks for plan in assembler.plans)
        found += [Lack(run.start, min(run.stop, extent.stop), lowest) for run in blocks]
    return list(_lowest(Lack(lack.start, lack.stop, lowest) for lack in found))


def ready_layers(assembler: Assembler | None) -> tuple[ReadyLayers, ...]:
    """Return the layers that were told to be ready, segment by segment, in runs."""
    if assembler is None:
        return ()
    return tuple(
        ReadyLayers(segment=segment, first_layer=run.start, last_layer=run.stop - 1)
        for segment, runs in assembler.told_ready()
        for run in runs
    )


def _of_gaps(assembler: Assembler, gaps: Iterable[Gap]) -> Iterator[Lack]:
    for gap in gaps:
        first = assembler.entry(gap.track)[0].first_block
        yield Lack(first + gap.first_block, first + gap.last_block + 1, gap.first_layer)


def _lowest(found: Iterable[Lack]) -> Iterator[Lack]:
    """Cut what overlaps, keep the lowest layer of each block, and join what is alike.

    Costs n log n, and a step for each edge: blocks are never counted one by one.
    """
    waiting = sorted(lack for lack in found if lack.start < lack.stop)
    edges = sorted({edge for lack in waiting for edge in (lack.start, lack.stop)})
    open_: list[tuple[int, int]] = []  # first layer, end
    at, last = 0, None
    for start, stop in pairwise(edges):
        while at < len(waiting) and waiting[at].start <= start:
            heappush(open_, (waiting[at].first_layer, waiting[at].stop))
            at += 1
        while open_ and open_[0][1] <= start:
            heappop(open_)
        if not open_:
            continue
        layer = open_[0][0]
        if last is not None and last.stop == start and last.first_layer == layer:
            last = last._replace(stop=stop)
            continue
        if last is not None:
            yield last
        last = Lack(start, stop, layer)
    if last is not None:
        yield last
