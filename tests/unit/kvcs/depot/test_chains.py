"""Whose Block Keys are believed, and which blocks of a store are found by them."""

from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.depot.blocks import StoredBlocks
from kvcs.depot.chains import Chain, chain_of, joined, parted
from kvcs.depot.listing import listed_of
from kvcs.errors import NotFound
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.http.uris import PublicationUri, ServiceUri
from kvcs.kvsp.layout import Component, Layout
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName
from kvcs.profile.payload import Block
from moqt.location import Location

COMPAT = Descriptor(
    model="m", revision="r", layers=3, block_tokens=4, dtype="float16",
    k_shape=(1, 2), v_shape=(1, 3),
)  # fmt: skip
LAYOUT = Layout.of(COMPAT)
KEYS = [bytes([n]) * 32 for n in range(1, 8)]
APART, JOINT = ("k.raw", "v.raw"), ("kv.raw",)


def name(number: int = 0) -> PublicationName:
    return PublicationName(b"s" * 32, b"c" * 32, KEYS[-1], bytes([number]) * 16)


def manifest(segments: Sequence[int] = (3, 2), first: int = 0, tracks: Sequence[str] = APART) -> (
    Manifest
):  # fmt: skip
    """Return a manifest of segments of so many blocks, whose keys are KEYS."""
    entries, at = [], 0
    for number, blocks in enumerate(segments):
        keys = KEYS[at : at + blocks]
        entries.append(
            SegmentEntry(
                segment=number,
                first_block=first + at,
                blocks=blocks,
                block_keys_sha256=sha256(b"".join(keys)).digest(),
                tracks=tuple(DataTrack.parse(f"{track}.s{number}") for track in tracks),
            )
        )
        at += blocks
    return Manifest(compat=COMPAT, segments=tuple(entries))


def known(number: int = 0, **options: object) -> Chain:
    chain = chain_of(name(number), manifest(**options), 0, KEYS)  # type: ignore[arg-type]
    assert chain is not None
    return chain


# -- what is believed ----------------------------------------------------------------------------


def test_keys_that_have_the_digests_of_all_segments_are_believed() -> None:
    chain = known()

    assert chain.keys == tuple(KEYS[:5])
    assert (chain.first_block, chain.encodings) == (0, ("raw",))
    places = [chain.part_of(index) for index in range(5)]
    assert [(part.first_block, object_id) for part, object_id in places] == [
        (0, 0), (0, 1), (0, 2), (3, 0), (3, 1),
    ]  # fmt: skip


def test_those_of_a_context_that_begins_later_may_come_with_others_before_them() -> None:
    later = manifest((2, 1), first=4)
    before = [b"x" * 32, b"y" * 32]

    chain = chain_of(name(), later, 2, [*before, *KEYS])
    assert chain is not None
    assert (chain.first_block, chain.keys) == (4, tuple(KEYS[:3]))
    assert chain_of(name(), later, 5, KEYS[1:]) is None


@given(st.lists(st.integers(0, 6), max_size=7), st.integers(0, 3))
def test_no_other_keys_are_believed(numbers: list[int], first: int) -> None:
    keys = [KEYS[n] for n in numbers]
    is_right = first == 0 and keys[:5] == KEYS[:5]

    assert (chain_of(name(), manifest(), first, keys) is not None) == is_right


def test_a_manifest_without_segments_has_no_blocks() -> None:
    assert chain_of(name(), Manifest(compat=COMPAT), 0, KEYS) is None


@given(st.binary(max_size=100))
def test_what_was_noted_comes_back_as_keys_whatever_became_of_it(octets: bytes) -> None:
    keys = parted(octets)

    assert octets.startswith(joined(keys))
    assert {len(key) for key in keys} <= {32}


# -- what is listed ------------------------------------------------------------------------------


def test_only_forms_that_every_segment_has_are_listed() -> None:
    mixed = manifest((3, 2), tracks=("k.raw", "v.raw", "kv.int8", "k.fp8"))
    chain = chain_of(name(), mixed, 0, KEYS)
    assert chain is not None
    told = listed_of(chain, ["moqt://store:4443/"], [ServiceUri("https://store")], ended=True)

    assert [(uri, one.encodings) for uri, one in told] == [
        ("moqt://store:4443/", ("raw", "kv.int8")), ("https://store", ("raw",)),
    ]  # fmt: skip
    session, service = (one for _, one in told)
    assert session.uri == PublicationUri("moqt://store:4443/", name())
    assert (session.publication, service.publication) == (None, name().publication_id)
    for one in (session, service):
        assert (one.keys, one.layers, one.complete) == (tuple(KEYS[:5]), Runs(((0, 2),)), True)


def test_what_has_no_raw_form_is_not_listed_over_http() -> None:
    chain = known(tracks=("kv.int8",))

    told = listed_of(chain, ["moqt://store:4443/"], [ServiceUri("https://store")], ended=False)
    assert [uri for uri, _ in told] == ["moqt://store:4443/"]
    assert not told[0][1].complete


# -- what is served ------------------------------------------------------------------------------


def sections(layer: int, index: int, number: int = 0) -> tuple[bytes, bytes]:
    k = bytes([number, layer, index, 1]) * (LAYOUT.k_octets // 4)
    return k, bytes([number, layer, index, 2]) * (LAYOUT.v_octets // 4)


class Disk:
    """Has the Objects of every publication; some of them are damaged."""

    def __init__(self) -> None:
        self.damaged: set[tuple[bytes, Location]] = set()

    async def read(self, held: PublicationName, track: bytes, location: Location) -> bytes:
        if (track, location) in self.damaged:
            raise NotFound("damaged")
        parsed = DataTrack.parse(track)
        layer, block = location
        index = block + (0, 3)[parsed.segment]
        k, v = sections(layer, index, held.publication_id[0])
        data = {Component.K: k, Component.V: v, Component.KV: k + v}[parsed.component]
        return Block(
            component=parsed.component, layer=layer, block_index=block, token_start=4 * index,
            token_count=4, codec=0, data=data,
        ).encode()  # fmt: skip


def asked(index: int, scope: bytes = b"s", compat: bytes = b"c") -> BlockName:
    return BlockName(scope * 32, compat * 32, KEYS[index])


@pytest.mark.parametrize("tracks", [APART, JOINT, ("k.int8", "v.int8", "kv.raw")])
async def test_every_block_is_found_by_its_key_and_read_layer_by_layer(
    tracks: Sequence[str],
) -> None:
    blocks = StoredBlocks(Disk().read)
    assert blocks.put(known(tracks=tracks))

    identities = set()
    for index in range(5):
        held = await blocks.find(asked(index), None)
        assert held is not None
        identities.add(held.identity)
        for layer in range(3):
            assert held.has(layer)
            read = await held.read(layer)
            assert read is not None
            assert tuple(map(bytes, read)) == sections(layer, index)
        assert not held.has(3)
        assert not held.has(-1)
    assert len(identities) == 5
    for other in (asked(5), asked(0, scope=b"x"), asked(0, compat=b"x")):
        assert await blocks.find(other, None) is None


async def test_of_several_publications_the_one_that_is_asked_for_is_served() -> None:
    blocks = StoredBlocks(Disk().read)
    for number in (1, 2):
        assert blocks.put(known(number))

    for publication, number in ((None, 2), (bytes([1]) * 16, 1), (bytes([2]) * 16, 2)):
        held = await blocks.find(asked(3), publication)
        assert held is not None
        read = await held.read(0)
        assert read is not None
        assert tuple(map(bytes, read)) == sections(0, 3, number)
    assert await blocks.find(asked(3), b"?" * 16) is None
    blocks.remove(name(2))
    assert await blocks.find(asked(3), bytes([2]) * 16) is None
    blocks.remove(name(1))
    blocks.remove(name(1))
    assert await blocks.find(asked(3), None) is None


async def test_what_is_damaged_or_has_no_raw_form_is_not_served() -> None:
    disk = Disk()
    disk.damaged.add((b"v.raw.s1", Location(1, 0)))
    blocks = StoredBlocks(disk.read)
    blocks.put(known())

    held = await blocks.find(asked(3), None)
    assert held is not None
    assert await held.read(0) is not None
    assert await held.read(1) is None
    blocks.put(known(tracks=("kv.int8",)))
    assert await blocks.find(asked(3), None) is None


async def test_there_is_room_for_so_many_blocks_and_no_more() -> None:
    blocks = StoredBlocks(Disk().read, max_blocks=9)

    assert blocks.put(known(1))
    assert blocks.put(known(1))  # in place of itself
    assert not blocks.put(known(2))
    assert await blocks.find(asked(0), bytes([2]) * 16) is None
    blocks.remove(name(1))
    assert blocks.put(known(2))
