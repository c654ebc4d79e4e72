from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import ELEMENT_OCTETS, Descriptor
from kvcs.kvsp.keys import ScopeKey, block_keys_sha256
from kvcs.kvsp.layout import Component, Layout, Octets, layer_digest
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding, Segment
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import DataTrack, PublicationName
from kvcs.profile.payload import Block
from kvcs.profile.signing import ProducerKey, verify_manifest
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.session.budget import ByteBudget
from moqt.session.localobjects import LocalObject, LocalSubgroup
from moqt.session.localtrack import LocalTrack

SCOPE = ScopeKey(bytes(range(32)))
LAYERS, BLOCK_TOKENS, BLOCKS = 12, 4, 3


def descriptor(**changed: Any) -> Descriptor:
    members: dict[str, Any] = {
        "model": "tiny",
        "revision": "1",
        "layers": LAYERS,
        "block_tokens": BLOCK_TOKENS,
        "dtype": "bfloat16",
        "k_shape": (2, 8),
        "v_shape": (2, 4),
    }
    return Descriptor(**(members | changed))


def publication(about: Descriptor, keys: Sequence[bytes], **options: Any) -> Publication:
    name = PublicationName(
        SCOPE.scope_id, SCOPE.compatibility_id(about), keys[-1], bytes(range(16))
    )
    return Publication(name, about, **options)


def keys_of(about: Descriptor, blocks: int = BLOCKS) -> list[bytes]:
    return SCOPE.block_keys(about, range(blocks * about.block_tokens))


def tensors(about: Descriptor, layer: int, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    layout = Layout.of(about)
    noise = np.random.Generator(np.random.PCG64(layer))
    k, v = (
        noise.integers(0, 256, (tokens, *shape[1:-1], shape[-1] * layout.element_octets), np.uint8)
        .view(layout.dtype)
        .reshape(tokens, *shape[1:])
        for shape in (layout.k_shape, layout.v_shape)
    )
    return k, v


def produce(made: Publication, segment: Segment, layers: int = LAYERS) -> None:
    for layer in range(layers):
        made.add_layer(segment, layer, *tensors(made.descriptor, layer, segment.tokens))


def started(**options: Any) -> tuple[Publication, Segment]:
    about = descriptor()
    keys = keys_of(about)
    made = publication(about, keys, **options)
    return made, made.open_segment(keys)


def everything(track: LocalTrack) -> list[tuple[LocalSubgroup, LocalObject]]:
    groups = track.group_ids(0, 1 << 40)
    return [pair for group in groups for pair in track.objects_of(group)]


def payload(obj: LocalObject) -> bytes:
    return b"".join(bytes(part) for part in obj.parts)


def manifests(made: Publication) -> list[Manifest]:
    track = made.tracks[made.manifest_name]
    return [Manifest.from_json(payload(obj)) for _, obj in everything(track)]


# -- Objects -------------------------------------------------------------------------------------


def test_every_object_carries_its_block_and_its_location() -> None:
    made, segment = started()
    produce(made, segment)

    for component, which in ((Component.K, 0), (Component.V, 1)):
        track = made.tracks[DataTrack(component, "raw", 0).name]
        for layer in range(LAYERS):
            expected = tensors(made.descriptor, layer, segment.tokens)[which]
            for index in range(BLOCKS):
                obj = [o for _, o in track.objects_of(layer)][index]
                block = Block.decode(payload(obj), group_id=layer, object_id=index)
                part = expected[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                assert bytes(block.data) == part.tobytes()
                assert block.component is component
                assert block.token_start == index * BLOCK_TOKENS
                assert block.token_count == BLOCK_TOKENS


def test_each_group_is_one_subgroup_that_ends_with_end_of_group_and_is_closed() -> None:
    made, segment = started()
    produce(made, segment, layers=2)

    for name in (b"k.raw.s0", b"v.raw.s0"):
        for layer in range(2):
            pairs = list(made.tracks[name].objects_of(layer))
            assert [o.object_id for _, o in pairs] == [0, 1, 2, 3]
            assert pairs[-1][1].status is ObjectStatus.END_OF_GROUP
            assert {s.subgroup_id for s, _ in pairs} == {0}
            assert all(s.holds_end_of_group and s.closed for s, _ in pairs)


def test_a_track_ends_with_end_of_track_in_a_subgroup_of_its_own() -> None:
    made, segment = started()
    produce(made, segment)

    for name in (b"k.raw.s0", b"v.raw.s0"):
        track = made.tracks[name]
        [(subgroup, obj)] = track.objects_of(LAYERS)
        assert (obj.object_id, obj.status) == (0, ObjectStatus.END_OF_TRACK)
        assert (subgroup.priority, subgroup.closed) == (128, True)
        assert subgroup.holds_end_of_group
        assert track.largest == Location(LAYERS, 0)
        assert track.ended is not None
        assert track.ended.code is PublishDoneCode.TRACK_ENDED


def test_no_track_ends_before_its_last_layer() -> None:
    made, segment = started()
    produce(made, segment, layers=LAYERS - 1)

    assert all(track.ended is None for track in made.tracks.values())


def test_earlier_layers_are_more_urgent() -> None:
    made, segment = started()
    produce(made, segment)

    track = made.tracks[b"k.raw.s0"]
    priorities = [next(iter(track.objects_of(layer)))[0].priority for layer in range(LAYERS)]
    assert priorities == [128 * layer // LAYERS for layer in range(LAYERS)]


def test_k_and_v_of_a_block_are_published_together() -> None:
    made, segment = started()
    order: list[str] = []
    for name in ("k.raw.s0", "v.raw.s0"):
        track = made.tracks[name.encode()]
        track.watch(lambda name=name, track=track: order.append(f"{name[0]}{track.largest}"))  # type: ignore[misc]
    made.add_layer(segment, 0, *tensors(made.descriptor, 0, segment.tokens))

    firsts = list(dict.fromkeys(order))
    assert [text[0] for text in firsts[:6]] == ["k", "v", "k", "v", "k", "v"]


def test_a_joint_track_and_a_pair_of_one_layer_protect_the_same_content() -> None:
    made, segment = started(encodings=(Encoding(), Encoding(joint=True)))
    produce(made, segment, layers=1)

    data = {}
    for name, group in ((n, made.tracks[n].objects_of(0)) for n in (b"k.raw.s0", b"v.raw.s0")):
        data[name] = [
            Block.decode(payload(o), group_id=0, object_id=o.object_id)
            for _, o in group
            if o.status is ObjectStatus.NORMAL
        ]
    for _, obj in made.tracks[b"kv.raw.s0"].objects_of(0):
        if obj.status is ObjectStatus.NORMAL:
            joint = Block.decode(payload(obj), group_id=0, object_id=obj.object_id)
            k, v = (data[name][obj.object_id] for name in (b"k.raw.s0", b"v.raw.s0"))
            assert joint.component is Component.KV
            assert bytes(joint.data) == bytes(k.data) + bytes(v.data)
            assert joint.digest == layer_digest(k.data, v.data)


def test_an_empty_section_has_a_track_of_objects_without_data() -> None:
    about = descriptor(v_shape=(0, 0), layers=1)
    keys = keys_of(about)
    made = publication(about, keys)
    segment = made.open_segment(keys)
    made.add_layer(segment, 0, tensors(about, 0, segment.tokens)[0])

    for index, (_, obj) in enumerate(made.tracks[b"v.raw.s0"].objects_of(0)):
        if index < BLOCKS:
            assert Block.decode(payload(obj), group_id=0, object_id=index).data == b""


class Flipped:
    """Every octet inverted: for private use."""

    name, value, lossless, fixed_length = "flip", 0x8001, True, True
    components = frozenset({Component.K, Component.V})

    def encode(self, array: NDArray[Any]) -> bytes:
        return bytes(255 - octet for octet in array.tobytes())

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(bytes(255 - octet for octet in data), dtype).reshape(tuple(shape))


def test_a_registered_codec_has_tracks_of_its_own_beside_raw() -> None:
    made, segment = started(
        encodings=(Encoding(), Encoding("flip")), codecs=CodecRegistry(Flipped())
    )
    produce(made, segment, layers=1)

    (_, raw), (_, flipped) = (
        next(iter(made.tracks[name].objects_of(0))) for name in (b"k.raw.s0", b"k.flip.s0")
    )
    block = Block.decode(payload(flipped), group_id=0, object_id=0)
    assert block.codec == 0x8001
    assert bytes(255 - octet for octet in block.data) == payload(raw)[68:]


@pytest.mark.parametrize(
    ("encodings", "text"),
    [
        ((), "at least one"),
        ((Encoding(), Encoding()), "twice"),
        ((Encoding("zstd"),), "zstd"),
        ((Encoding("flip", joint=True),), "does not carry KV"),
    ],
)
def test_encodings_that_cannot_be_are_refused(encodings: Any, text: str) -> None:
    about = descriptor()

    with pytest.raises(ConfigError, match=text):
        publication(about, keys_of(about), encodings=encodings, codecs=CodecRegistry(Flipped()))


def test_encodings_have_a_text_form() -> None:
    for encoding in (Encoding(), Encoding("zstd"), Encoding("raw", joint=True)):
        assert Encoding.parse(str(encoding)) == encoding


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_layer_out_of_order_is_refused_and_nothing_of_it_is_published(layer: int) -> None:
    made, segment = started()
    produce(made, segment, layers=1)
    before = made.octets

    with pytest.raises(ConfigError, match=f"layer {layer} .*expected layer 1"):
        made.add_layer(segment, layer, *tensors(made.descriptor, layer, segment.tokens))
    assert made.octets == before
    assert made.tracks[b"k.raw.s0"].largest == Location(0, BLOCKS)


def test_nothing_follows_the_last_layer() -> None:
    made, segment = started()
    produce(made, segment)

    with pytest.raises(ConfigError, match="complete"):
        made.add_layer(segment, 0, *tensors(made.descriptor, 0, segment.tokens))


def test_a_segment_follows_the_blocks_of_the_one_before() -> None:
    about = descriptor()
    keys = keys_of(about, 5)
    made = publication(about, keys)
    first, second = made.open_segment(keys[:3]), made.open_segment(keys[3:])
    produce(made, first)
    produce(made, second)

    obj = next(iter(made.tracks[b"k.raw.s1"].objects_of(0)))[1]
    assert Block.decode(payload(obj), group_id=0, object_id=0).token_start == 3 * BLOCK_TOKENS
    entries = manifests(made)[-1].segments
    assert [(e.segment, e.first_block, e.blocks) for e in entries] == [(0, 0, 3), (1, 3, 2)]
    assert [e.block_keys_sha256 for e in entries] == [
        block_keys_sha256(keys[:3]),
        block_keys_sha256(keys[3:]),
    ]


def test_passes_may_overlap_since_their_tracks_are_apart() -> None:
    about = descriptor(layers=2)
    keys = keys_of(about, 2)
    made = publication(about, keys)
    first, second = made.open_segment(keys[:1]), made.open_segment(keys[1:])
    for segment, layer in ((first, 0), (second, 0), (first, 1), (second, 1)):
        made.add_layer(segment, layer, *tensors(about, layer, BLOCK_TOKENS))

    assert manifests(made)[-1].complete


def test_a_window_begins_after_the_start_of_the_context() -> None:
    about = descriptor(layers=1)
    keys = keys_of(about, 5)
    made = publication(about, keys, first_block=3)
    segment = made.open_segment(keys[3:])
    made.add_layer(segment, 0, *tensors(about, 0, segment.tokens))

    obj = next(iter(made.tracks[b"k.raw.s0"].objects_of(0)))[1]
    assert Block.decode(payload(obj), group_id=0, object_id=0).token_start == 3 * BLOCK_TOKENS


# -- manifests -----------------------------------------------------------------------------------


def test_a_manifest_stands_before_anything_else_is_published() -> None:
    about = descriptor()
    made = publication(about, keys_of(about))

    [first] = manifests(made)
    assert (first.compat, first.version, first.segments) == (about, 0, ())


def test_no_object_is_published_before_a_manifest_lists_its_segment() -> None:
    made, segment = started()
    track = made.tracks[b"k.raw.s0"]
    listed: list[int] = []
    track.watch(lambda: listed.append(len(manifests(made)[-1].segments)))

    made.publish(segment.copy(0, *tensors(made.descriptor, 0, segment.tokens)).prepare())
    assert set(listed) == {1}


@pytest.mark.parametrize("every", [1, 5, 8])
def test_manifests_follow_as_often_as_was_asked_and_when_a_segment_is_complete(every: int) -> None:
    made, segment = started(manifest_every=every)
    produce(made, segment)

    counts = [e.groups(e.tracks[0]) for m in manifests(made) for e in m.segments]
    assert counts == sorted({0, *range(every, LAYERS + 1, every), LAYERS})
    assert [m.segments[0].complete for m in manifests(made)[1:]] == [False] * (len(counts) - 1) + [
        True
    ]


def test_each_version_is_object_0_of_the_next_group_and_says_whose_it_is() -> None:
    made, segment = started(manifest_every=1)
    produce(made, segment)

    pairs = everything(made.tracks[b"manifest"])
    assert [(s.group_id, o.object_id) for s, o in pairs] == [(n, 0) for n in range(len(pairs))]
    assert all(s.priority == 0 and s.closed and s.holds_end_of_group for s, _ in pairs)
    for version, manifest in enumerate(manifests(made)):
        manifest.check_identity(made.name, version)
        manifest.check_compatibility(SCOPE, made.name.compatibility_id)
        assert (manifest.publication, manifest.version) == (made.name.publication_id, version)


def test_versions_only_ever_add() -> None:
    made, segment = started(manifest_every=3)
    produce(made, segment)

    found = manifests(made)
    for before, after in pairwise(found):
        after.check_follows(before)


def test_the_last_manifest_lists_the_digest_of_every_object() -> None:
    made, segment = started(encodings=(Encoding(), Encoding(joint=True)))
    produce(made, segment)

    [entry] = manifests(made)[-1].segments
    assert {str(track) for track in entry.tracks} == {"k.raw.s0", "v.raw.s0", "kv.raw.s0"}
    for track in entry.tracks:
        for subgroup, obj in everything(made.tracks[track.name]):
            if obj.status is ObjectStatus.NORMAL:
                digest = entry.digest(track, subgroup.group_id, obj.object_id)
                assert digest == sha256(payload(obj)[68:]).digest()


def test_with_a_key_there_is_a_signed_manifest_and_no_plain_one() -> None:
    key = ProducerKey.generate()
    made, segment = started(producer_key=key)
    produce(made, segment)

    assert b"manifest" not in made.tracks
    for _, obj in everything(made.tracks[b"manifest.cose"]):
        Manifest.from_json(verify_manifest(payload(obj), {key.kid: key.public_key}))


def test_a_draft_that_was_overtaken_leaves_a_version_due() -> None:
    made, segment = started(manifest_every=1)
    made.publish_manifest()
    draft = made.draft_manifest()
    made.publish(segment.copy(0, *tensors(made.descriptor, 0, segment.tokens)).prepare())
    made.publish_manifest(draft, draft.encode())

    assert made.manifest_due
    assert manifests(made)[-1].segments[0].groups(segment.tracks[0]) == 0


def test_a_draft_cannot_be_published_twice() -> None:
    made, _ = started()
    draft = made.draft_manifest()
    made.publish_manifest(draft)

    with pytest.raises(ConfigError, match="version 1, expected 2"):
        made.publish_manifest(draft)


@pytest.mark.parametrize("every", [0, 9])
def test_manifests_are_not_rarer_than_every_eight_layers(every: int) -> None:
    with pytest.raises(ConfigError, match="manifest_every"):
        started(manifest_every=every)


# -- ends ----------------------------------------------------------------------------------------


def test_a_finished_publication_is_kept_and_its_manifest_track_has_no_end_of_track() -> None:
    made, segment = started()
    produce(made, segment)
    made.finish()

    track = made.tracks[b"manifest"]
    assert track.ended is not None
    assert track.ended.code is PublishDoneCode.TRACK_ENDED
    assert not track.end_of_track
    assert {o.status for _, o in everything(track)} == {ObjectStatus.NORMAL}
    assert made.octets > segment.layer_octets * LAYERS
    with pytest.raises(ConfigError, match="is finished"):
        made.open_segment([bytes(32)])


def test_a_segment_without_all_its_layers_cannot_be_finished() -> None:
    made, segment = started()
    produce(made, segment, layers=3)

    with pytest.raises(ConfigError, match="segment 0 has 3 of 12 layers"):
        made.finish()
    assert not made.ended


def test_an_abandoned_publication_ends_every_open_track_with_an_error_and_holds_nothing() -> None:
    budget = ByteBudget(1 << 30)
    made, segment = started(budget=budget)
    produce(made, segment, layers=3)
    made.abandon("the engine failed")

    for track in made.tracks.values():
        assert track.ended is not None
        assert track.ended.code is PublishDoneCode.INTERNAL_ERROR
    assert made.abandoned == "the engine failed"
    assert (made.octets, budget.used) == (0, 0)
    with pytest.raises(ConfigError, match="was abandoned"):
        made.add_layer(segment, 3, *tensors(made.descriptor, 3, segment.tokens))


def test_octets_held_are_counted_in_the_budget() -> None:
    budget = ByteBudget(1 << 30)
    made, segment = started(budget=budget)
    produce(made, segment)
    data = sum(t.octets for n, t in made.tracks.items() if n != b"manifest")

    assert budget.used == made.octets
    assert data == made.octets_of(BLOCKS) == segment.layer_octets * LAYERS
    made.finish()
    made.drop()
    assert budget.used == 0


# -- tensors -------------------------------------------------------------------------------------


def test_the_callers_memory_is_free_after_the_copy() -> None:
    made, segment = started()
    k, v = tensors(made.descriptor, 0, segment.tokens)
    expected = k.tobytes()
    copied = segment.copy(0, k, v)
    k.view(np.uint16)[:] = 0
    v.view(np.uint16)[:] = 0
    made.publish(copied.prepare())

    objects = [o for _, o in made.tracks[b"k.raw.s0"].objects_of(0)][:BLOCKS]
    assert b"".join(payload(o)[68:] for o in objects) == expected


def test_arrays_buffers_blocks_strides_and_joint_octets_give_the_same_objects() -> None:
    _, segment = started()
    k, v = tensors(descriptor(), 0, segment.tokens)
    heads_first = np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2)
    blocks = [a.reshape(BLOCKS, BLOCK_TOKENS, *a.shape[1:]) for a in (k, v)]
    joint = b"".join(a.tobytes() + b.tobytes() for a, b in zip(*blocks, strict=True))
    longer = np.concatenate([k, k[: BLOCK_TOKENS - 1]])

    expected = segment.copy(0, k, v).store.tobytes()
    assert not heads_first.flags.c_contiguous
    for given_k, given_v, given_kv in (
        (k.tobytes(), bytearray(v.tobytes()), None),
        (memoryview(k.tobytes()), v, None),
        (heads_first, v, None),
        (*blocks, None),
        (longer, v, None),
        (None, None, joint),
        (None, None, np.frombuffer(joint, np.uint8).reshape(BLOCKS, -1)),
    ):
        assert segment.copy(0, given_k, given_v, kv=given_kv).store.tobytes() == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda k, v: (k[:-1], v), r"k of layer 0 .*bfloat16 \[11, 2, 8\].*\[12, 2, 8\]"),
        (lambda k, v: (np.concatenate([k, k]), v), r"k of layer 0 .*\[24, 2, 8\]"),
        (lambda k, v: (k, v.astype(np.float32)), r"v of layer 0 .*float32 .*expected bfloat16"),
        (lambda k, v: (k, v.view(np.uint16)), r"v of layer 0 .*uint16 .*expected bfloat16"),
        (lambda k, v: (v, k), r"k of layer 0 .*\[12, 2, 4\].*\[12, 2, 8\]"),
        (lambda k, v: (k, None), "v is missing"),
        (lambda k, v: (k.tobytes()[:-1], v), "k of layer 0 .*383 octets"),
        (lambda k, v: (k.reshape(4, 3, 2, 8), v), "k of layer 0"),
    ],
)
def test_tensors_that_contradict_the_descriptor_are_refused_with_both_shapes(
    change: Any, text: str
) -> None:
    _, segment = started()

    with pytest.raises(ConfigError, match=text):
        segment.copy(0, *change(*tensors(descriptor(), 0, segment.tokens)))


def test_kv_goes_with_neither_k_nor_v() -> None:
    _, segment = started()
    k, v = tensors(descriptor(), 0, segment.tokens)

    with pytest.raises(ConfigError, match="together with"):
        segment.copy(0, k, None, kv=k.tobytes() + v.tobytes())
    with pytest.raises(ConfigError, match=r"kv of layer 0 .* 5 octets, expected 192"):
        segment.copy(0, kv=b"12345")


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    _, segment = started()

    with pytest.raises(ConfigError, match="the model has 12 layers"):
        segment.copy(LAYERS, *tensors(descriptor(), 0, segment.tokens))


def test_a_segment_needs_a_whole_block() -> None:
    made, _ = started()

    with pytest.raises(ConfigError, match="whole block of 4 tokens"):
        made.open_segment([])


def test_a_block_beyond_the_data_length_limit_is_refused() -> None:
    about = descriptor(block_tokens=65_536, k_shape=(8, 128), dtype="float32")

    with pytest.raises(ConfigError, match="make block_tokens smaller"):
        publication(about, [bytes(32)])


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ELEMENT_OCTETS)),
    k_shape=st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 64, 80])),
    v_shape=st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 4), st.integers(1, 9))),
    layers=st.integers(1, 3),
    size=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_any_shape_in_any_segments_comes_out_as_it_went_in(
    dtype: str,
    k_shape: tuple[int, int],
    v_shape: tuple[int, int],
    layers: int,
    size: int,
    cuts: list[int],
) -> None:
    about = descriptor(
        dtype=dtype, k_shape=k_shape, v_shape=v_shape, layers=layers, block_tokens=size
    )
    keys = keys_of(about, sum(cuts))
    made = publication(about, keys, encodings=(Encoding(), Encoding(joint=True)))
    first = 0
    for count in cuts:
        segment = made.open_segment(keys[first : first + count])
        for layer in range(layers):
            made.add_layer(segment, layer, *tensors(about, layer, segment.tokens))
        for layer in range(layers):
            k, v = (a.tobytes() for a in tensors(about, layer, segment.tokens))
            for component, expected in ((Component.K, k), (Component.V, v)):
                track = made.tracks[DataTrack(component, "raw", segment.number).name]
                objects = [o for _, o in track.objects_of(layer)][:-1]
                assert b"".join(payload(o)[68:] for o in objects) == expected
        first += count
    made.finish()

    assert manifests(made)[-1].check_tokens(keys) == tuple(range(len(cuts)))
    assert made.octets_of(sum(cuts)) == sum(
        t.octets for n, t in made.tracks.items() if n != b"manifest"
    )


# -- segments that are appended whole ------------------------------------------------------------


def appended(made: Publication, keys: Sequence[bytes]) -> Segment:
    segment = made.next_segment(keys)
    layers = [
        segment.copy(layer, *tensors(made.descriptor, layer, segment.tokens)).prepare()
        for layer in range(LAYERS)
    ]
    made.append(segment, layers, made.draft_append(segment, layers))
    return segment


def test_a_segment_that_is_appended_whole_takes_one_version_of_the_manifest() -> None:
    made, first = started()
    produce(made, first)
    before = made.versions

    segment = appended(made, keys_of(made.descriptor, BLOCKS + 2)[BLOCKS:])

    assert made.versions == before + 1
    assert not made.manifest_due
    [*_, last] = manifests(made)
    entry = last.segments[1]
    assert (entry.first_block, entry.blocks, entry.complete) == (BLOCKS, 2, True)
    for name in segment.tracks:
        track = made.tracks[name.name]
        assert entry.groups(name) == LAYERS
        assert track.end_of_track
        objects = [obj for _, obj in everything(track) if obj.status is ObjectStatus.NORMAL]
        assert len(objects) == 2 * LAYERS
        assert b"".join(entry.object_digests[name]) == b"".join(
            sha256(payload(obj)[68:]).digest() for obj in objects
        )
    made.finish()
    assert made.versions == before + 1


def test_what_is_appended_is_the_same_as_if_it_had_been_opened_and_filled() -> None:
    keys = keys_of(descriptor(), BLOCKS + 1)
    made, first = started()
    produce(made, first)
    other, other_first = started()
    produce(other, other_first)

    appended(made, keys[BLOCKS:])
    produce(other, other.open_segment(keys[BLOCKS:]))

    assert made.segments[1].entry() == other.segments[1].entry()
    for name, track in other.tracks.items():
        if name != other.manifest_name:
            assert [
                (group.group_id, obj.object_id, obj.status, payload(obj))
                for group, obj in everything(made.tracks[name])
            ] == [
                (group.group_id, obj.object_id, obj.status, payload(obj))
                for group, obj in everything(track)
            ]


def test_nothing_is_appended_by_a_draft_that_is_not_the_next_version_or_lacks_layers() -> None:
    made, first = started()
    produce(made, first)
    keys = keys_of(made.descriptor, BLOCKS + 2)
    segment = made.next_segment(keys[BLOCKS : BLOCKS + 1])
    layers = [
        segment.copy(layer, *tensors(made.descriptor, layer, segment.tokens)).prepare()
        for layer in range(LAYERS)
    ]
    with pytest.raises(ConfigError, match=f"11 layers of segment 1, expected {LAYERS}"):
        made.draft_append(segment, layers[1:])
    draft = made.draft_append(segment, layers)
    version = made.versions
    made.publish_manifest()

    with pytest.raises(ConfigError, match=f"version {version}, expected {version + 1}"):
        made.append(segment, layers, draft)
    assert len(made.segments) == 1
    appended(made, keys[BLOCKS : BLOCKS + 1])
    with pytest.raises(ConfigError, match="segment 1 is appended, expected 2"):
        made.append(segment, layers, draft)


def test_what_a_manifest_says_of_a_segment_that_is_complete_is_made_once() -> None:
    made, first = started()
    produce(made, first)

    entry, text = first.entry(), first.entry().to_json()
    appended(made, keys_of(made.descriptor, BLOCKS + 1)[BLOCKS:])

    assert first.entry() is entry
    assert first.entry().to_json() is text
    assert manifests(made)[-1].segments[0] == entry


# -- what many versions of the manifest list -----------------------------------------------------


def grown(blocks: int, **options: Any) -> Publication:
    about = descriptor(k_shape=(1, 1), v_shape=(0, 0))
    keys = keys_of(about, BLOCKS + blocks)
    made = publication(about, keys[:BLOCKS], **options)
    first = made.open_segment(keys[:BLOCKS])
    produce(made, first)
    for block in range(BLOCKS, BLOCKS + blocks):
        segment = made.next_segment(keys[block : block + 1])
        layers = [
            segment.copy(layer, *tensors(about, layer, BLOCK_TOKENS)).prepare()
            for layer in range(LAYERS)
        ]
        made.append(segment, layers, made.draft_append(segment, layers))
    return made


def test_each_version_refers_only_to_earlier_ones_that_list_what_it_leaves_out() -> None:
    made = grown(60, repeated_octets=1000)

    versions = manifests(made)
    referring = [version for version in versions if any(e.digests_in for e in version.segments)]
    assert len(versions) // 2 < len(referring) < len(versions) - 3
    for version in versions:
        whole = version
        wanted = {e.digests_in for e in version.segments if e.digests_in is not None}
        for number in sorted(wanted):
            whole = whole.with_digests_of(versions[number])
        assert (
            whole.segments
            == tuple(segment.entry() for segment in made.segments[: len(version.segments)])
            or not version.segments[-1].complete
        )


def test_who_comes_at_any_time_needs_no_more_than_twice_what_there_is_to_list() -> None:
    made = grown(80, repeated_octets=1000)

    versions = manifests(made)
    sizes = [len(version.to_json()) for version in versions]
    for version, size in zip(versions, sizes, strict=True):
        earlier = sorted({e.digests_in for e in version.segments if e.digests_in is not None})
        listed = sum(segment.entry().blocks for segment in made.segments[: len(version.segments)])
        # Those from the first one that is referred to on, which are fetched in one piece.
        fetched = sum(sizes[earlier[0] : version.version]) if earlier else 0
        everything = listed * 2 * LAYERS * 67 + 256 * len(version.segments)
        assert size + fetched < 2 * (1000 + everything)


def test_digests_are_not_listed_as_often_as_there_are_versions() -> None:
    blocks = 96

    every = grown(blocks, repeated_octets=1 << 30)
    once = grown(blocks, repeated_octets=0)

    # What every version has to say of a segment, and each digest once.
    least = sum(
        len(replace(version, segments=tuple(e.elsewhere(0) for e in complete)).to_json())
        for version in manifests(every)[1:]
        if (complete := [entry for entry in version.segments if entry.complete])
    ) + 67 * sum(segment.digests for segment in every.segments)
    assert once.tracks[once.manifest_name].octets < 2.2 * least
    assert once.tracks[once.manifest_name].octets < every.tracks[every.manifest_name].octets / 2


@pytest.mark.parametrize("blocks", [1, 2, 30, 31, 32, 33])
def test_the_last_version_lists_everything(blocks: int) -> None:
    made = grown(blocks, repeated_octets=0)
    assert any(e.digests_in is not None for e in manifests(made)[-1].segments) or blocks > 2

    made.finish()

    assert manifests(made)[-1].segments == tuple(segment.entry() for segment in made.segments)
    assert not made.manifest_due


def test_a_publication_of_one_segment_never_refers_to_earlier_versions() -> None:
    made, segment = started(repeated_octets=0)
    produce(made, segment)
    made.finish()

    assert all(e.digests_in is None for version in manifests(made) for e in version.segments)
    assert made.versions == 4  # empty, opened, eight layers, all twelve
