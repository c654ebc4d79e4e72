"""What a block service finds among the publications of a producer."""

from typing import Any

import pytest

from kvcs.kvsp.http.holder import HeldBlock
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.layout import Layout
from kvcs.producer.answers import Answers
from kvcs.producer.blocks import PublishedBlocks
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import PublicationName
from tests.unit.kvcs.producer.test_publication import (
    BLOCK_TOKENS,
    LAYERS,
    SCOPE,
    descriptor,
    keys_of,
    tensors,
)

ABOUT = descriptor()
LAYOUT = Layout.of(ABOUT)
COMPAT = SCOPE.compatibility_id(ABOUT)
KEYS = keys_of(ABOUT, 5)


def name(block: int) -> BlockName:
    return BlockName(SCOPE.scope_id, COMPAT, KEYS[block])


def opened(answers: Answers, number: int = 0, **options: Any) -> Publication:
    publication_id = bytes([number]) * 16
    made = Publication(
        PublicationName(SCOPE.scope_id, COMPAT, KEYS[-1], publication_id), ABOUT, **options
    )
    answers.add(made)
    return made


def produce(made: Publication, segments: list[int], layers: int = LAYERS, seed: int = 0) -> None:
    """Publish so many layers of so many blocks in each segment."""
    first = 0
    for blocks in segments:
        segment = made.open_segment(KEYS[first : first + blocks])
        for layer in range(layers):
            made.add_layer(segment, layer, *expected(layer, first, blocks, seed))
        first += blocks


def expected(layer: int, first: int, blocks: int, seed: int = 0) -> tuple[Any, Any]:
    k, v = tensors(ABOUT, layer + 100 * seed, 5 * BLOCK_TOKENS)
    part = slice(first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS)
    return k[part], v[part]


async def octets(held: HeldBlock | None, layer: int) -> tuple[bytes, bytes]:
    assert held is not None
    assert held.has(layer)
    sections = await held.read(layer)
    assert sections is not None
    k, v = sections
    return bytes(k), bytes(v)


@pytest.mark.parametrize("encodings", [("raw",), ("kv.raw",), ("shuffle-zstd", "kv.raw")])
async def test_every_block_of_every_segment_is_found_as_it_was_published(
    encodings: tuple[str, ...],
) -> None:
    answers = Answers(SCOPE.scope_id)
    made = opened(answers, encodings=tuple(map(Encoding.parse, encodings)))
    produce(made, [3, 2])

    for block in range(5):
        held = await PublishedBlocks(answers).find(name(block), None)
        for layer in (0, 7, LAYERS - 1):
            k, v = expected(layer, block, 1)
            assert await octets(held, layer) == (k.tobytes(), v.tobytes())
        assert held is not None
        assert held.layout == LAYOUT
        assert not held.has(LAYERS)
        assert not held.has(-1)


async def test_a_layer_is_found_while_the_others_are_still_produced() -> None:
    answers = Answers(SCOPE.scope_id)
    produce(opened(answers), [5], layers=4)

    held = await PublishedBlocks(answers).find(name(4), None)
    assert held is not None
    assert [held.has(layer) for layer in range(6)] == [True] * 4 + [False] * 2
    assert await held.read(4) is None


async def test_what_is_offered_in_no_raw_form_is_not_found() -> None:
    answers = Answers(SCOPE.scope_id)
    produce(opened(answers, encodings=(Encoding("shuffle-zstd"),)), [5])

    assert await PublishedBlocks(answers).find(name(0), None) is None


async def test_nothing_else_is_found() -> None:
    answers = Answers(SCOPE.scope_id)
    produce(opened(answers), [3])
    blocks = PublishedBlocks(answers)

    assert await blocks.find(name(2), None) is not None
    assert await blocks.find(name(3), None) is None  # of no segment yet
    assert await blocks.find(BlockName(SCOPE.scope_id, b"?" * 32, KEYS[0]), None) is None
    assert await blocks.find(BlockName(b"?" * 32, COMPAT, KEYS[0]), None) is None
    assert await blocks.find(name(2), b"?" * 16) is None


async def test_the_publication_with_most_layers_is_taken_and_of_equal_ones_the_newest() -> None:
    answers = Answers(SCOPE.scope_id)
    for number, layers in enumerate((2, 7, 7, 3)):
        produce(opened(answers, number), [5], layers=layers, seed=number)
    blocks = PublishedBlocks(answers)

    def first(seed: int) -> bytes:
        found: bytes = expected(0, 0, 1, seed)[0].tobytes()
        return found

    assert (await octets(await blocks.find(name(0), None), 0))[0] == first(2)
    for number in range(4):
        held = await blocks.find(name(0), bytes([number]) * 16)
        assert (await octets(held, 0))[0] == first(number)


async def test_different_blocks_and_publications_have_different_identities() -> None:
    answers = Answers(SCOPE.scope_id)
    for number in range(2):
        produce(opened(answers, number), [3, 2])
    blocks = PublishedBlocks(answers)

    found = [await blocks.find(name(b), bytes([n]) * 16) for b in range(5) for n in range(2)]
    assert len({held.identity for held in found if held is not None}) == 10


async def test_what_was_let_go_is_gone_and_what_was_read_stays() -> None:
    answers = Answers(SCOPE.scope_id)
    made = opened(answers)
    produce(made, [5])
    made.finish()
    held = await PublishedBlocks(answers).find(name(0), None)
    assert held is not None
    sections = await held.read(0)
    assert sections is not None
    answers.remove(made, "expired")
    made.drop()

    assert await held.read(0) is None
    assert await PublishedBlocks(answers).find(name(0), None) is None
    k, v = expected(0, 0, 1)
    assert (bytes(sections[0]), bytes(sections[1])) == (k.tobytes(), v.tobytes())


async def test_a_section_that_the_model_does_not_have_is_empty() -> None:
    about = descriptor(v_shape=(0, 0))
    keys = SCOPE.block_keys(about, range(2 * BLOCK_TOKENS))
    answers = Answers(SCOPE.scope_id)
    made = Publication(
        PublicationName(SCOPE.scope_id, SCOPE.compatibility_id(about), keys[-1], bytes(16)), about
    )
    answers.add(made)
    segment = made.open_segment(keys)
    k, _ = tensors(about, 0, 2 * BLOCK_TOKENS)
    made.add_layer(segment, 0, k)

    where = BlockName(SCOPE.scope_id, made.name.compatibility_id, keys[1])
    held = await PublishedBlocks(answers).find(where, None)
    assert await octets(held, 0) == (k[BLOCK_TOKENS:].tobytes(), b"")
