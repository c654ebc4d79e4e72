"""A publication that is sealed: what leaves it, octet for octet, and what never does."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcs.errors import ConfigError
from kvcs.kvsp.http.holder import SealedBlock
from kvcs.kvsp.http.names import BlockName
from kvcs.producer import sealed as sealing_of_publications
from kvcs.producer.answers import Answers
from kvcs.producer.blocks import PublishedBlocks
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import MANIFEST_COSE
from kvcs.profile.signing import ProducerKey, verify_manifest
from kvcs.trust.scope import Padding, Protection, Scope
from kvcs.trust.sealing import PROPERTIES, Cover, Sealing, sealed_octets
from moqt.codepoints import ObjectStatus
from moqt.location import Location
from moqt.session.localobjects import LocalObject, LocalSubgroup
from moqt.wire.fetchstream import FetchHeader, FetchWriter
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object
from tests.unit.kvcs.producer.test_publication import (
    BLOCKS,
    LAYERS,
    SCOPE,
    produce,
    started,
    tensors,
)
from tests.unit.kvcs.trust.test_sealing_vectors import ALL

LONG = 1 << 20


def sealing(padding: Padding = "auto") -> Sealing:
    found = Sealing.of(Scope(SCOPE, Protection(padding=padding)))
    assert found is not None
    return found


def produced(**options: Any) -> Publication:
    made, segment = started(**options)
    produce(made, segment)
    made.finish()
    return made


def everything(made: Publication) -> Iterator[tuple[bytes, LocalSubgroup, LocalObject]]:
    for name, track in made.tracks.items():
        for group in track.group_ids(0, 1 << 62):
            for subgroup, obj in track.objects_of(group):
                yield name, subgroup, obj


def opened(made: Publication, name: bytes, subgroup: LocalSubgroup, obj: LocalObject) -> bytes:
    [payload] = obj.parts
    cover = Cover(subgroup.priority, obj.properties)
    return bytes(sealing().track(made.name.track(name)).open(obj.location, cover, payload, LONG))


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
@pytest.mark.parametrize("encoding", ["raw", "kv.raw", "shuffle-zstd"])
def test_every_object_and_every_manifest_opens_to_what_it_is_in_clear(
    encoding: str, signed: bool
) -> None:
    key = ProducerKey.generate() if signed else None
    options: dict[str, Any] = {"encodings": (Encoding.parse(encoding),), "producer_key": key}
    clear, sealed = produced(**options), produced(**options, sealing=sealing())

    assert sealed.is_sealed
    assert not clear.is_sealed
    pairs = list(zip(everything(clear), everything(sealed), strict=True))
    assert len(pairs) > LAYERS * BLOCKS
    for (name, _, plain), (_, subgroup, obj) in pairs:
        assert (obj.location, obj.status) == (plain.location, plain.status)
        assert subgroup.has_properties
        assert obj.properties == (PROPERTIES if obj.status is ObjectStatus.NORMAL else ())
        if obj.status is not ObjectStatus.NORMAL:
            assert obj.length == 0
        elif name != MANIFEST_COSE:
            assert opened(sealed, name, subgroup, obj) == b"".join(plain.parts)
        else:
            assert key is not None
            texts = [
                verify_manifest(payload, {key.kid: key.public_key})
                for payload in (opened(sealed, name, subgroup, obj), b"".join(plain.parts))
            ]
            assert texts[0] == texts[1]


def test_the_room_that_is_reserved_is_the_room_that_is_taken() -> None:
    made = produced(sealing=sealing())
    data = sum(obj.length for name, _, obj in everything(made) if not name.startswith(b"man"))

    assert data == made.octets_of(BLOCKS)
    assert data == made.segments[0].layer_octets * LAYERS


@pytest.mark.parametrize(
    ("padding", "encoding", "padded"),
    [
        ("auto", "raw", False),
        ("auto", "shuffle-zstd", True),
        ("bucket", "raw", True),
        ("none", "shuffle-zstd", False),
    ],
)
def test_what_is_padded_has_the_length_of_its_bucket(
    padding: Padding, encoding: str, padded: bool
) -> None:
    options: dict[str, Any] = {"encodings": (Encoding(encoding),)}
    clear, sealed = produced(**options), produced(**options, sealing=sealing(padding))

    for (name, _, plain), (_, _, obj) in zip(everything(clear), everything(sealed), strict=True):
        if obj.status is ObjectStatus.NORMAL and not name.startswith(b"manifest"):
            assert obj.length == sealed_octets(plain.length, padded=padded)


def test_one_place_never_leaves_sealed_twice() -> None:
    made, segment = started(sealing=sealing())
    k, v = tensors(made.descriptor, 0, segment.tokens)
    made.add_layer(segment, 0, k, v)
    before = {(name, obj.location): b"".join(obj.parts) for name, _, obj in everything(made)}

    with pytest.raises(ConfigError, match=r"layer 0 .* out of order"):
        made.add_layer(segment, 0, k[::-1], v[::-1])

    after = {(name, obj.location): b"".join(obj.parts) for name, _, obj in everything(made)}
    assert after == before


def test_the_same_octets_of_another_publication_are_sealed_to_others() -> None:
    one, segment = started(sealing=sealing())
    produce(one, segment, 1)
    name = replace(one.name, publication_id=bytes(16))
    other = Publication(name, one.descriptor, sealing=sealing())
    produce(other, other.open_segment(segment.keys), 1)

    pairs = zip(everything(one), everything(other), strict=True)
    assert all(a.parts != b.parts for (*_, a), (*_, b) in pairs if a.length)


def test_the_objects_of_a_layer_lie_in_one_buffer_that_nobody_can_change() -> None:
    made, segment = started(sealing=sealing())

    prepared = segment.copy(0, *tensors(made.descriptor, 0, segment.tokens)).prepare()

    for part in prepared.tracks:
        views = [view for payload in part.objects for view in payload]
        assert all(isinstance(view, memoryview) and view.readonly for view in views)
        assert len({id(view.obj) for view in views if isinstance(view, memoryview)}) == 1


def test_a_segment_that_is_too_large_for_one_key_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing_of_publications, "MAX_CIPHER_BLOCKS", 100)

    with pytest.raises(
        ConfigError, match=r"3 blocks of k\.raw\.s0 .* limit 100 .* segments smaller"
    ):
        started(sealing=sealing())
    started()  # in clear there is no such limit


async def test_a_block_service_has_it_sealed_and_nothing_in_clear() -> None:
    answers = Answers(SCOPE.scope_id)
    made = produced(sealing=sealing())
    answers.add(made)
    names = [
        BlockName(SCOPE.scope_id, made.name.compatibility_id, key) for key in made.segments[0].keys
    ]

    for index, name in enumerate(names):
        found = await PublishedBlocks(answers).find(name, None)
        assert isinstance(found, SealedBlock)
        assert await found.read(1) is None
        sealed = await found.read_sealed(1)
        assert sealed is not None
        tracks = [made.tracks[track.name] for track in sealed.tracks]
        published = [dict(enumerate(track.objects_of(1)))[index][1] for track in tracks]
        assert sealed.objects == tuple(obj.parts[0] for obj in published)


def test_a_sealed_object_goes_out_as_the_reference_shows() -> None:
    octets = bytes.fromhex(ALL["seal"][0]["ciphertext"])
    header = SubgroupHeader(1, 0, 0, 0, has_properties=True, end_of_group=True, first_object=True)
    writer = FetchWriter()

    assert header.encode().hex() == "59010000"
    assert (
        encode_subgroup_object(None, 0, properties=PROPERTIES, payload_length=len(octets)).hex()
        == "00040b02020080d8"
    )
    assert (
        encode_subgroup_object(
            0, 1, properties=(), payload_length=0, status=ObjectStatus.END_OF_GROUP
        ).hex()
        == "00000003"
    )
    fetched = FetchHeader(0).encode() + writer.object_header(
        Location(0, 0),
        subgroup_id=0,
        publisher_priority=0,
        properties=PROPERTIES,
        payload_length=len(octets),
    )
    assert fetched.hex() == "05003c000000040b02020080d8"


def test_what_is_sealed_may_be_read_in_place() -> None:
    made, segment = started(sealing=sealing())
    produce(made, segment, 1)
    [_, obj], *_ = made.tracks[b"k.raw.s0"].objects_of(0)
    payload = (
        sealing()
        .track(made.name.track(b"k.raw.s0"))
        .open(obj.location, Cover(0, PROPERTIES), obj.parts[0], LONG)
    )
    tensor = np.frombuffer(payload, np.uint8, offset=68)

    # Behind 4 octets of length and 68 of header, the tensor begins at a multiple of 8.
    assert tensor.ctypes.data % 8 == 0
    assert isinstance(obj.parts[0], memoryview)
    assert obj.parts[0].readonly
