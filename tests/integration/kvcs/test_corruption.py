"""What is wrong is rejected with its reason, and costs what it must and nothing else."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    ManifestAccepted,
    ObjectRejected,
    PublicationComplete,
    PublicationRefused,
    SegmentComplete,
)
from kvcs.consumer.trust import Expectations
from kvcs.errors import Rejection
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, PublicationName, new_publication_id
from kvcs.profile.payload import HEADER_OCTETS
from kvcs.profile.signing import ProducerKey
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import (
    BLOCKS,
    COMPAT,
    EVERYTHING,
    LAYERS,
    SCOPE,
    TOKENS,
    CountingSink,
    Scene,
    assert_same_cache,
    corrupt,
    expectations,
    fill,
    filled,
    flip,
    hasty,
    missing,
    of_kind,
    on_stage,
    ready,
    run,
    tensors,
)

pytestmark = pytest.mark.network

#: First and last octet of each header field that is checked, and of the data (KVCS Section 3.5).
OCTETS = {
    "magic": ((0, 3), Rejection.MAGIC),
    "version": ((4, 4), Rejection.VERSION),
    "component": ((5, 5), Rejection.COMPONENT),
    "layer": ((8, 11), Rejection.LAYER),
    "block index": ((12, 15), Rejection.BLOCK_INDEX),
    "token start": ((16, 23), Rejection.TOKEN_START),
    "token count": ((24, 27), Rejection.TOKEN_COUNT),
    "codec": ((28, 29), Rejection.CODEC),
    "data length": ((32, 35), Rejection.LENGTH),
    "data digest": ((36, 67), Rejection.DIGEST),
    "data": ((68, -1), Rejection.DIGEST),
}
CHANGES = [
    pytest.param(octet, reason, id=f"{field}, octet {octet}")
    for field, (ends, reason) in OCTETS.items()
    for octet in dict.fromkeys(ends)
]


def trusting(*keys: ProducerKey | None) -> Expectations:
    """Expect one of these signatures, if there are keys."""
    trusted = {key.kid: key.public_key for key in keys if key is not None}
    return expectations(trusted=trusted, require_signature=bool(trusted))


def fresh_digest(payload: bytearray) -> None:
    """Change the data, and the digest in the header with it."""
    payload[100] ^= 1
    payload[36:HEADER_OCTETS] = sha256(payload[HEADER_OCTETS:]).digest()


def assert_one_object_is_lost(
    events: list[Event], sink: CountingSink, track: str, layer: int, block: int, reason: Rejection
) -> None:
    """Check that one Object was rejected, and that all but its layer is there and right.

    Threads that examine may be done with a layer before they are with the one ahead of it.
    """
    [rejected] = of_kind(events, ObjectRejected)
    assert (str(rejected.track), rejected.layer, rejected.block) == (track, layer, block)
    assert rejected.reason is reason
    assert sorted(ready(events)) == [other for other in range(LAYERS) if other != layer]
    assert not of_kind(events, SegmentComplete)
    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.INCOMPLETE
    assert missing(failed) == [f"{track} layer {layer} block {block}"]
    assert (failed.summary.rejected, failed.summary.duplicates) == (1, 0)
    component = Component.K if track.startswith("k.") else Component.V
    assert sink.placed == EVERYTHING - Counter([(component, layer, block)])
    assert_same_cache(sink, ready(events))


@pytest.mark.parametrize(("octet", "reason"), CHANGES)
async def test_one_changed_octet_costs_its_layer_and_nothing_else(
    certificates: CertificateFiles, octet: int, reason: Rejection
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        corrupt(await filled(scene.open()), "v.raw.s0", 2, 3, flip(octet))
        events = await run(scene.retrieve(sink))

    assert_one_object_is_lost(events, sink, "v.raw.s0", 2, 3, reason)


async def test_large_objects_are_rejected_by_the_threads_that_examine_them(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        corrupt(await filled(scene.open()), "k.raw.s0", 0, 0, flip(-1))
        events = await run(scene.retrieve(sink, settings=hasty(large_octets=1)))

    assert_one_object_is_lost(events, sink, "k.raw.s0", 0, 0, Rejection.DIGEST)


@pytest.mark.parametrize("octet", [6, 7, 30, 31])
async def test_flags_and_reserved_octets_are_ignored(
    certificates: CertificateFiles, octet: int
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        corrupt(await filled(scene.open()), "v.raw.s0", 2, 3, flip(octet))
        events = await run(scene.retrieve(sink))

    assert isinstance(events[-1], PublicationComplete)
    assert_same_cache(sink)


@pytest.mark.parametrize("change", [lambda p: p.append(0), lambda p: p.pop(), bytearray.clear])
async def test_an_object_of_another_length_is_rejected(
    certificates: CertificateFiles, change: Callable[[bytearray], None]
) -> None:
    sink = CountingSink()

    def resize(payload: bytearray) -> None:
        change(payload)

    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())
        corrupt(publication, "k.raw.s0", 0, 0, resize)
        [subgroup] = publication.tracks[b"k.raw.s0"]._groups[0]
        subgroup.objects[0].have = subgroup.objects[0].length = len(subgroup.objects[0].parts[0])
        events = await run(scene.retrieve(sink))

    assert_one_object_is_lost(events, sink, "k.raw.s0", 0, 0, Rejection.LENGTH)


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
async def test_data_that_fit_their_digest_but_not_the_manifest_are_rejected(
    certificates: CertificateFiles, signed: bool
) -> None:
    key = ProducerKey.generate() if signed else None
    sink = CountingSink()

    async with on_stage(certificates, producer_key=key) as scene:
        corrupt(await filled(scene.open()), "k.raw.s0", 5, 4, fresh_digest)
        events = await run(scene.retrieve(sink, expected=trusting(key)))

    assert_one_object_is_lost(events, sink, "k.raw.s0", 5, 4, Rejection.DIGEST)
    assert "the manifest lists" in of_kind(events, ObjectRejected)[0].text


async def test_with_a_signature_nothing_is_used_before_its_digest_is_attested(
    certificates: CertificateFiles,
) -> None:
    key = ProducerKey.generate()
    sink = CountingSink()

    async with on_stage(certificates, producer_key=key, manifest_every=3) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        corrupt(handle.publication, "k.raw.s0", 1, 3, fresh_digest)
        async with scene.retrieve(sink, expected=trusting(key)) as retrieval:
            await sink.reached(2 * 2 * BLOCKS)  # layer 1 is in place, and wrong
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = [event async for event in retrieval]

    # It is asked for once more, since it may have been another relay's, and is the same.
    rejected = of_kind(events, ObjectRejected)
    assert 1 <= len(rejected) <= 2
    assert {(one.layer, one.block, one.reason) for one in rejected} == {(1, 3, Rejection.DIGEST)}
    assert ready(events) == [0, 2, 3, 4, 5]
    assert missing(of_kind(events, Failed)[0]) == ["k.raw.s0 layer 1 block 3"]


async def test_a_changed_object_of_one_segment_leaves_the_other_segments_alone(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        corrupt(await filled(scene.open(), (2, 3)), "v.raw.s1", 4, 2, flip(-1))
        events = await run(scene.retrieve(sink))

    assert [event.segment for event in of_kind(events, SegmentComplete)] == [0]
    assert len(ready(events)) == 2 * LAYERS - 1
    [failed] = of_kind(events, Failed)
    assert missing(failed) == ["v.raw.s1 layer 4 block 2"]
    assert sink.placed == EVERYTHING - Counter([(Component.V, 4, 4)])


async def test_a_changed_object_of_the_joint_track_is_rejected(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, encodings=(Encoding(joint=True),)) as scene:
        corrupt(await filled(scene.open()), "kv.raw.s0", 3, 1, flip(-1))
        events = await run(scene.retrieve())

    assert ready(events) == [0, 1, 2, 4, 5]
    assert missing(of_kind(events, Failed)[0]) == ["kv.raw.s0 layer 3 block 1"]


async def test_the_same_is_true_for_whoever_is_there_from_the_start(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        handle = scene.open()
        segment = await handle.add_segment()
        async with scene.retrieve(sink) as retrieval:
            async for event in retrieval:
                if isinstance(event, ManifestAccepted):
                    break
            await fill(handle, range(2))
            await retrieval.layer(1, timeout_s=5)
            prepared = segment.copy(2, *tensors(2)).prepare()
            handle.publication.publish(_with_changed_data(prepared))
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            events = [event async for event in retrieval]

    assert_one_object_is_lost(events, sink, "k.raw.s0", 2, 1, Rejection.DIGEST)


def _with_changed_data(prepared: Any) -> Any:
    """Return a prepared layer with one octet of the second Object of K changed."""
    track, *others = prepared.tracks
    (header, data), rest = track.objects[1], track.objects[2:]
    changed = bytearray(data)
    changed[7] ^= 1
    objects = (track.objects[0], (header, bytes(changed)), *rest)
    return replace(prepared, tracks=(replace(track, objects=objects), *others))


# -- the manifest --------------------------------------------------------------------------------


async def assert_refused(scene: Scene, *complaints: str, **options: Any) -> None:
    """Check that the one publication there is gets refused, and that nothing of it is used."""
    sink = CountingSink()
    events = await run(scene.retrieve(sink, **options))

    [refused] = of_kind(events, PublicationRefused)
    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.REFUSED
    for complaint in complaints:
        assert complaint in refused.text
        assert complaint in failed.text
    assert sink.calls == []
    assert not of_kind(events, ManifestAccepted)


def manifest_of(publication: Publication) -> tuple[str, int]:
    """Return the track and the Group of the newest manifest."""
    return publication.manifest_name.decode(), publication.versions - 1


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
async def test_one_changed_octet_of_a_signed_manifest_refuses_the_publication(
    certificates: CertificateFiles, place: float
) -> None:
    key = ProducerKey.generate()

    async with on_stage(certificates, producer_key=key) as scene:
        publication = await filled(scene.open())

        def change(payload: bytearray) -> None:
            payload[round(place * (len(payload) - 1))] ^= 1

        corrupt(publication, *manifest_of(publication), 0, change)
        await assert_refused(scene, "manifest.cose", expected=trusting(key))


async def test_a_plain_manifest_that_is_cut_refuses_the_publication(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())

        def change(payload: bytearray) -> None:
            payload[-1:] = b" "

        corrupt(publication, *manifest_of(publication), 0, change)
        await assert_refused(scene, "manifest: ")


async def test_a_changed_digest_in_a_plain_manifest_costs_its_object_alone(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    def change(payload: bytearray) -> None:
        members = json.loads(bytes(payload))
        listed = members["segments"][0]["object_digests"]["v.raw.s0"][2]
        listed[3] = sha256(b"another").hexdigest()
        payload[:] = json.dumps(members, separators=(",", ":")).encode()

    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())
        corrupt(publication, *manifest_of(publication), 0, change)
        [subgroup] = publication.tracks[MANIFEST]._groups[publication.versions - 1]
        subgroup.objects[0].have = subgroup.objects[0].length = len(subgroup.objects[0].parts[0])
        events = await run(scene.retrieve(sink))

    assert_one_object_is_lost(events, sink, "v.raw.s0", 2, 3, Rejection.DIGEST)


async def test_a_signature_by_a_key_that_is_not_trusted_refuses_the_publication(
    certificates: CertificateFiles,
) -> None:
    trusted, other = ProducerKey.generate(), ProducerKey.generate()

    async with on_stage(certificates, producer_key=other) as scene:
        await filled(scene.open())
        text = f"signed by {other.kid.hex()}, which is not trusted"
        await assert_refused(scene, "manifest.cose", text, expected=trusting(trusted))


async def test_a_forged_signature_under_a_trusted_key_identifier_refuses_the_publication(
    certificates: CertificateFiles,
) -> None:
    trusted = ProducerKey.generate()
    forger = ProducerKey.generate(kid=trusted.kid)

    async with on_stage(certificates, producer_key=forger) as scene:
        await filled(scene.open())
        await assert_refused(scene, "manifest.cose", "signature", expected=trusting(trusted))


async def test_no_signature_refuses_the_publication_where_one_is_required(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        await assert_refused(scene, "manifest.cose", expected=trusting(ProducerKey.generate()))


@pytest.mark.parametrize("which", ["publication", "version"])
async def test_a_good_signature_cannot_be_passed_off_for_another_manifest(
    certificates: CertificateFiles, which: str
) -> None:
    key = ProducerKey.generate()

    async with on_stage(certificates, producer_key=key) as scene:
        other, publication = await filled(scene.open()), await filled(scene.open())
        source = other if which == "publication" else publication
        group = publication.versions - 1 if which == "publication" else 0
        [theirs] = source.tracks[MANIFEST_COSE]._groups[group]
        [ours] = publication.tracks[MANIFEST_COSE]._groups[publication.versions - 1]
        mine, good = ours.objects[0], theirs.objects[0]
        mine.parts, mine.length, mine.have = good.parts, good.length, good.have
        scene.producer.answers.remove(other, "out of the way")
        await assert_refused(scene, f"manifest of {which}", expected=trusting(key))


# -- the namespace -------------------------------------------------------------------------------

#: Each member of the descriptor, and a value that it does not have.
MEMBERS: dict[str, Any] = {
    "model": "another",
    "revision": "another",
    "layers": LAYERS + 1,
    "block_tokens": 8,
    "dtype": "bfloat16",
    "k_shape": [4, 4],
    "v_shape": [1, 8],
    "rope": {"theta": "500000.0"},
    "adapter": "one that only they have",
}


def differing_in(member: str) -> Descriptor:
    return Descriptor.from_json(COMPAT.members() | {member: MEMBERS[member]})


def announced_as_ours(scene: Scene, descriptor: Descriptor) -> Publication:
    """Open a publication of a descriptor under the name that ours would have."""
    name = PublicationName(
        scope_id=SCOPE.scope_id,
        compatibility_id=SCOPE.compatibility_id(COMPAT),
        anchor_key=SCOPE.block_keys(COMPAT, TOKENS)[-1],
        publication_id=new_publication_id(),
    )
    lying = Publication(name, descriptor)
    scene.producer.answers.add(lying)
    return lying


@pytest.mark.parametrize("member", MEMBERS)
async def test_a_descriptor_that_differs_in_one_member_is_refused_naming_it(
    certificates: CertificateFiles, member: str
) -> None:
    async with on_stage(certificates) as scene:
        announced_as_ours(scene, differing_in(member))
        others = [name for name in MEMBERS if name != member]

        await assert_refused(scene, "compat is not the descriptor expected", f"{member}: ")
        events = await run(scene.retrieve())

    text = of_kind(events, Failed)[0].text
    assert not [name for name in others if f"{name}: " in text]


@pytest.mark.parametrize("member", MEMBERS)
async def test_a_consumer_whose_own_descriptor_differs_is_told_the_member_if_it_can_be_known(
    certificates: CertificateFiles, member: str
) -> None:
    theirs = differing_in(member)
    other = Expectations.of_tokens(SCOPE, theirs, TOKENS)

    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())
        # The identifiers are keyed hashes: nothing of ours is found under theirs ...
        found = await run(scene.retrieve(expected=other, settings=hasty(discovery_timeout_s=0.1)))
        # ... but whoever was sent to the publication by name sees what differs.
        await assert_refused(scene, f"{member}: ", expected=other, publication=publication.name)
        right = await run(scene.retrieve())

    assert of_kind(found, Failed)[0].reason is FailureReason.NOT_FOUND
    assert isinstance(right[-1], PublicationComplete)


async def test_a_manifest_of_another_compatibility_id_than_its_namespace_is_refused(
    certificates: CertificateFiles,
) -> None:
    theirs = differing_in("revision")

    async with on_stage(certificates) as scene:
        lying = announced_as_ours(scene, theirs)
        # Whoever expects just that descriptor, and was sent there, is not deceived either.
        other = Expectations.of_tokens(SCOPE, theirs, TOKENS)
        await assert_refused(scene, "compat has the ID", expected=other, publication=lying.name)


async def test_block_keys_of_other_tokens_are_refused(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as scene:
        handle = scene.open()
        segment = handle.publication.open_segment([bytes(32)] * BLOCKS)
        await fill(handle, segment=segment)
        await handle.finish()

        await assert_refused(scene, "covers other tokens")


async def test_a_bad_publication_does_not_keep_a_good_one_from_being_used(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        announced_as_ours(scene, differing_in("model"))
        good = await filled(scene.open())
        events = await run(scene.retrieve(sink))

    assert of_kind(events, PublicationComplete)[0].publication == good.name
    assert_same_cache(sink)
