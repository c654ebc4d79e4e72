"""Sections of a scope that seals: from a producer's block service to the Data of Objects."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.sections import Found, Section, SectionKey, check_section, wanted_sections
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.http.holder import SealedBlock
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.sealed import BadSealedLayer, SealedLayer
from kvcs.kvsp.standard import standard_codecs
from kvcs.producer.answers import Answers
from kvcs.producer.blocks import PublishedBlocks
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import PublicationName
from kvcs.trust.scope import Protection, Scope
from kvcs.trust.sealing import Cover, Sealing
from tests.unit.kvcs.producer.test_publication import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    SCOPE,
    descriptor,
    keys_of,
    produce,
    tensors,
)

ABOUT = descriptor()
KEYS = keys_of(ABOUT)
SEALED = Scope(SCOPE, Protection())
EXPECTED = Expectations.of_tokens(SEALED, ABOUT, range(BLOCKS * BLOCK_TOKENS))
#: Begins with one block that is the prompt's.
OTHER_KEYS = [KEYS[0], *SCOPE.block_keys(ABOUT, [7] * 2 * BLOCK_TOKENS, after=KEYS[0])]


def publication(
    keys: Sequence[bytes] = KEYS, *, number: int = 1, encoding: str = "raw"
) -> Publication:
    name = PublicationName(
        SCOPE.scope_id, SCOPE.compatibility_id(ABOUT), keys[-1], bytes([number]) * 16
    )
    sealing = Sealing.of(SEALED)
    made = Publication(name, ABOUT, encodings=(Encoding.parse(encoding),), sealing=sealing)
    produce(made, made.open_segment(keys))
    made.finish()
    return made


def following(one: Publication, *, listed: bool = True) -> Assembler:
    """An assembler of which everything is missing."""
    track = one.tracks[one.manifest_name]
    [(subgroup, obj)] = track.objects_of(one.versions - 1)
    opener = EXPECTED.opener(track.name)
    cover = Cover(subgroup.priority, obj.properties)
    payload = opener.open(obj.location, cover, obj.parts[0], 1 << 20)
    manifest = Manifest.from_json(payload)
    if not listed:
        entries = [replace(entry, object_digests={}) for entry in manifest.segments]
        manifest = replace(manifest, segments=tuple(entries))
    made = Assembler(
        one.name, wish=Wish(), codecs=standard_codecs(), signed=False,
        blocks=BLOCKS, known_blocks=BLOCKS,
    )  # fmt: skip
    made.accept(manifest, one.versions - 1)
    return made


async def served(one: Publication, layer: int, block: int, key: bytes | None = None) -> SealedLayer:
    answers = Answers(SCOPE.scope_id)
    answers.add(one)
    key = one.segments[0].keys[block] if key is None else key
    name = BlockName(SCOPE.scope_id, one.name.compatibility_id, key)
    found = await PublishedBlocks(answers).find(name, None)
    assert isinstance(found, SealedBlock)
    assert found.has(layer)
    assert await found.read(layer) is None  # nothing in clear
    sealed = await found.read_sealed(layer)
    assert sealed is not None
    return SealedLayer.parse(b"".join(sealed.parts()))


def checked(
    subject: Assembler, sealed: SealedLayer, layer: int, block: int, expected: Any = EXPECTED
) -> list[Any]:
    section = Section(key=SectionKey(KEYS[block], layer), sealed=sealed)
    wanted = wanted_sections(subject, KEYS, deterministic=True)
    places = (
        wanted.get(section.key)
        or wanted_sections(following(publication()), KEYS, deterministic=True)[section.key]
    )
    return check_section(section, places, subject, expected)


def reasons(found: list[Any]) -> set[Rejection]:
    assert all(isinstance(one, tuple) and isinstance(one[1], BadObject) for one in found), found
    return {one[1].reason for one in found}


@pytest.mark.parametrize("encoding", ["raw", "kv.raw"])
async def test_what_a_producer_serves_sealed_is_the_data_of_its_objects(encoding: str) -> None:
    one = publication(encoding=encoding)
    for layer in (0, LAYERS - 1):
        for block in range(BLOCKS):
            found = checked(following(one), await served(one, layer, block), layer, block)

            rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            k, v = (part[rows].tobytes() for part in tensors(ABOUT, layer, BLOCKS * BLOCK_TOKENS))
            assert all(isinstance(part, Found) for part in found)
            assert b"".join(part.data for part in found) == k + v


async def test_it_is_taken_for_no_other_layer_and_no_other_block() -> None:
    one = publication()
    sealed = await served(one, 1, 1)

    assert reasons(checked(following(one), sealed, 2, 1)) == {Rejection.TAG}
    assert reasons(checked(following(one), sealed, 1, 0)) == {Rejection.TOKEN_START}
    moved = replace(sealed, index=0)
    assert reasons(checked(following(one), moved, 1, 0)) == {Rejection.TAG}


async def test_a_changed_octet_refuses_both_halves() -> None:
    one = publication()
    sealed = await served(one, 1, 1)
    k, v = map(bytes, sealed.objects)
    changed = replace(sealed, objects=(k, v[:-1] + bytes([v[-1] ^ 1])))

    assert reasons(checked(following(one), changed, 1, 1)) == {Rejection.TAG}


async def test_either_is_taken_and_never_both() -> None:
    one = publication()
    sealed = await served(one, 1, 1)
    in_clear = Expectations.of_tokens(SCOPE, ABOUT, range(BLOCKS * BLOCK_TOKENS))

    for expected in (None, in_clear):
        assert reasons(checked(following(one), sealed, 1, 1, expected)) == {Rejection.PROTECTED}
    section = Section(key=SectionKey(KEYS[1], 1), k=bytes(128), v=bytes(64))
    wanted = wanted_sections(following(one), KEYS, deterministic=True)
    found = check_section(section, wanted[section.key], following(one), EXPECTED)
    assert reasons(found) == {Rejection.UNPROTECTED}


async def test_what_is_not_listed_must_be_of_the_same_prompt() -> None:
    one = publication()
    again, other = publication(number=2), publication(OTHER_KEYS, number=3)
    subject = following(one, listed=False)

    ours = checked(subject, await served(again, 1, 1), 1, 1)
    assert all(isinstance(part, Found) for part in ours)
    assert reasons(checked(subject, await served(other, 1, 1), 1, 1)) == {Rejection.DIGEST}


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_sealed_layer_or_none(octets: bytes) -> None:
    try:
        found = SealedLayer.parse(octets)
    except BadSealedLayer:
        return
    assert b"".join(found.parts()) == octets


@pytest.mark.parametrize(
    "octets", [b"", bytes(63), bytes(64), bytes(57) + b"\x01\x00\x01" + bytes(4)]
)
def test_what_is_no_sealed_layer_is_refused(octets: bytes) -> None:
    with pytest.raises(BadSealedLayer, match=r"expected|there"):
        SealedLayer.parse(octets)
