import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.assembler import Assembler, Contradicted, Expected
from kvcs.consumer.events import (
    Event,
    Gap,
    LayerReady,
    ManifestAccepted,
    ObjectRejected,
    SegmentComplete,
    Trust,
)
from kvcs.consumer.selection import Wish
from kvcs.errors import BadObject, NotFound, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName

NAME = PublicationName(bytes(32), bytes(32), bytes(32), bytes(16))
LAYERS, BLOCKS = 3, 4
COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=LAYERS,
    block_tokens=16,
    dtype="bfloat16",
    k_shape=(2, 4),
    v_shape=(2, 4),
)
Key = tuple[DataTrack, int, int]


def tracks(segment: int = 0) -> tuple[DataTrack, DataTrack]:
    return DataTrack.parse(f"k.raw.s{segment}"), DataTrack.parse(f"v.raw.s{segment}")


def digest(track: DataTrack, layer: int, block: int) -> bytes:
    return sha256(f"{track} {layer} {block}".encode()).digest()


def listing(track: DataTrack, layers: int) -> tuple[bytes, ...]:
    return tuple(
        b"".join(digest(track, layer, block) for block in range(BLOCKS)) for layer in range(layers)
    )


def manifest(*attested: int, version: int = 0, complete: bool = False) -> Manifest:
    """One segment for each argument, which tells of how many layers it lists the digests."""
    entries = tuple(
        SegmentEntry(
            segment=segment,
            first_block=segment * BLOCKS,
            blocks=BLOCKS,
            block_keys_sha256=bytes([segment]) * 32,
            tracks=tracks(segment),
            complete=complete,
            object_digests={track: listing(track, layers) for track in tracks(segment)}
            if layers
            else {},
        )
        for segment, layers in enumerate(attested)
    )
    return Manifest(compat=COMPAT, segments=entries, version=version)


def assembler(
    *,
    wish: Wish | None = None,
    signed: bool = False,
    blocks: int | None = BLOCKS,
    known: int | None = None,
    early: int = 1000,
) -> Assembler:
    return Assembler(
        NAME,
        wish=wish or Wish(),
        codecs=CodecRegistry(),
        signed=signed,
        blocks=blocks,
        known_blocks=known,
        early_octets=early,
    )


def keys(layers: Iterable[int] = range(LAYERS), segment: int = 0) -> list[Key]:
    return [
        (track, layer, block)
        for layer in layers
        for track in tracks(segment)
        for block in range(BLOCKS)
    ]


def bring(to: Assembler, *wanted: Key) -> list[Event]:
    """Take Objects through the assembler as a retrieval does."""
    events: list[Event] = []
    for key in wanted:
        if to.expects(*key) is Expected.EXAMINE and to.admit(*key, digest(*key), 100):
            events += to.placed(*key)
    return events


def objects(gaps: Iterable[Gap]) -> list[Key]:
    return [
        (gap.track, layer, block)
        for gap in gaps
        for layer in range(gap.first_layer, gap.last_layer + 1)
        for block in range(gap.first_block, gap.last_block + 1)
    ]


def ready(events: Iterable[Event]) -> list[tuple[int, int, Trust]]:
    return [(e.segment, e.layer, e.trust) for e in events if isinstance(e, LayerReady)]


# -- arrival, loss and repetition ----------------------------------------------------------------


@given(st.data())
def test_what_is_placed_and_the_gaps_are_together_what_was_wanted(data: st.DataObject) -> None:
    wanted = [*keys(segment=0), *keys(segment=1)]
    arriving = data.draw(st.lists(st.sampled_from(wanted), max_size=len(wanted) * 2))
    subject = assembler(blocks=2 * BLOCKS)
    subject.accept(manifest(0, 0), 0)

    bring(subject, *arriving)

    missing = objects(subject.gaps())
    assert len(missing) == len(set(missing))
    assert set(missing) | set(arriving) == set(wanted)
    assert not set(missing) & set(arriving)
    summary = subject.summary()
    assert summary.objects == len(set(arriving))
    assert summary.octets == 100 * len(set(arriving))
    assert summary.duplicates == len(arriving) - len(set(arriving))
    assert subject.is_complete == (not missing)


@given(st.randoms(use_true_random=False), st.booleans())
def test_every_layer_is_told_once_in_any_order_of_arrival(
    order: random.Random, signed: bool
) -> None:
    wanted = keys() * 2
    order.shuffle(wanted)
    subject = assembler(signed=signed)
    events = subject.accept(manifest(0), 0)
    versions = iter(range(1, LAYERS + 1))

    for count, key in enumerate(wanted):
        events += bring(subject, key)
        if count % 10 == 9 and (version := next(versions, None)) is not None:
            events += subject.accept(manifest(version, version=version), version)
    for version in versions:
        events += subject.accept(manifest(version, version=version), version)

    assert sorted(layer for _, layer, _ in ready(events)) == list(range(LAYERS))
    assert [type(e) for e in events].count(SegmentComplete) == 1
    assert isinstance(events[-1], SegmentComplete | ManifestAccepted)
    assert subject.is_complete
    assert not list(subject.gaps())
    assert not list(subject.unattested())
    assert subject.summary().duplicates == len(keys())


def test_layers_become_ready_in_the_order_they_are_whole() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)

    events = bring(subject, *keys([0]), *keys([2]), *keys([1]))

    assert ready(events) == [(0, layer, Trust.VERIFIED) for layer in (0, 2, 1)]
    assert [type(event) for event in events][-1] is SegmentComplete
    assert isinstance(events[0], LayerReady)
    assert (events[0].token_start, events[0].token_end) == (0, BLOCKS * 16)


def test_gaps_of_many_layers_are_told_compactly() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)
    k, v = tracks()

    bring(subject, *((v, layer, block) for layer in range(LAYERS) for block in (0, 3)))

    assert [str(gap) for gap in subject.gaps()] == [
        "k.raw.s0 layers 0-2 blocks 0-3",
        "v.raw.s0 layers 0-2 blocks 1-2",
    ]
    assert [gap.objects for gap in subject.gaps()] == [12, 6]
    assert k is not v


def test_gaps_of_a_manifest_that_promises_too_much_cost_nothing() -> None:
    huge = Descriptor(
        model="m",
        revision="r",
        layers=65_535,
        block_tokens=1,
        dtype="int8",
        k_shape=(1, 1),
        v_shape=(1, 1),
    )
    entry = SegmentEntry(
        segment=0,
        first_block=0,
        blocks=1 << 24,
        block_keys_sha256=bytes(32),
        tracks=tracks(),
    )
    subject = assembler(blocks=None)
    subject.accept(Manifest(compat=huge, segments=(entry,)), 0)

    bring(subject, (tracks()[0], 65_534, (1 << 24) - 1))

    assert sum(gap.objects for gap in subject.gaps()) == 2 * 65_535 * (1 << 24) - 1
    assert len(list(subject.gaps())) == 3


def test_what_comes_in_excess_is_no_duplicate_although_it_is_there() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)
    bring(subject, keys()[0])
    subject.count_excess()

    summary = subject.summary()
    assert (summary.objects, summary.unwanted, summary.duplicates) == (1, 1, 0)
    assert subject.octets == summary.octets == 100


def test_a_segment_is_published_when_the_newest_manifest_says_so() -> None:
    subject = assembler(blocks=2 * BLOCKS)
    subject.accept(manifest(0, LAYERS), 0)
    assert not subject.is_published(0)
    subject.accept(manifest(LAYERS, LAYERS, complete=True, version=1), 1)

    assert subject.is_published(0)
    assert subject.is_published(1)


def test_objects_outside_the_wish_are_counted_and_not_examined() -> None:
    subject = assembler(wish=Wish(layers=range(1, 2), blocks=range(1, 3)))
    subject.accept(manifest(0), 0)
    k, _ = tracks()

    assert subject.expects(k, 0, 1) is Expected.UNWANTED
    assert subject.expects(k, 1, 0) is Expected.UNWANTED
    assert subject.expects(DataTrack.parse("k.raw.s9"), 0, 0) is Expected.UNWANTED
    assert subject.expects(k, 1, 1) is Expected.EXAMINE
    assert subject.summary().unwanted == 3


def test_objects_where_nothing_was_promised_are_examined_so_that_they_are_rejected() -> None:
    subject = assembler(wish=Wish(layers=range(1, 2), blocks=range(1, 3)))
    subject.accept(manifest(0), 0)

    assert subject.expects(tracks()[0], LAYERS, 0) is Expected.EXAMINE
    assert subject.expects(tracks()[0], 1, BLOCKS) is Expected.EXAMINE


def test_a_part_of_a_publication_is_complete_by_itself() -> None:
    subject = assembler(wish=Wish(layers=range(1, 2), blocks=range(1, 3)))
    subject.accept(manifest(0), 0)

    events = bring(subject, *((track, 1, block) for track in tracks() for block in (1, 2)))

    assert ready(events) == [(0, 1, Trust.VERIFIED)]
    assert subject.is_complete
    assert subject.extent == range(1, 3)
    assert subject.position(tracks()[0], 2) == 1


def test_a_rejected_object_leaves_its_layer_and_nothing_else() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)
    bad = (tracks()[1], 1, 2)
    events = bring(subject, *(key for key in keys() if key != bad))

    told = subject.reject(*bad, BadObject(Rejection.DIGEST, "why"))

    assert told == ObjectRejected(
        track=bad[0], layer=1, block=2, reason=Rejection.DIGEST, text="why"
    )
    assert [layer for _, layer, _ in ready(events)] == [0, 2]
    assert objects(subject.gaps()) == [bad]
    assert subject.summary().rejected == 1


def test_of_two_copies_under_examination_the_slower_is_a_duplicate() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)
    key = keys()[0]
    assert subject.expects(*key) is subject.expects(*key) is Expected.EXAMINE

    assert subject.admit(*key, digest(*key), 100)
    assert not subject.admit(*key, digest(*key), 100)
    assert subject.summary().duplicates == 1


# -- trust ---------------------------------------------------------------------------------------


def test_with_a_plain_manifest_a_layer_is_ready_when_it_is_verified() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)

    assert ready(bring(subject, *keys([0]))) == [(0, 0, Trust.VERIFIED)]
    assert ready(subject.accept(manifest(1, version=1), 1)) == []
    assert subject.summary().attested == 2 * BLOCKS


def test_a_layer_that_was_listed_before_it_came_is_attested_at_once() -> None:
    subject = assembler()
    subject.accept(manifest(1), 0)

    assert ready(bring(subject, *keys([0]))) == [(0, 0, Trust.ATTESTED)]


def test_with_a_signed_manifest_a_layer_waits_to_be_attested() -> None:
    subject = assembler(signed=True)
    subject.accept(manifest(0), 0)

    assert ready(bring(subject, *keys([0, 1]))) == []
    assert not [gap for gap in subject.gaps() if gap.first_layer < 2]
    assert [str(gap) for gap in subject.unattested()] == [
        "k.raw.s0 layers 0-1 blocks 0-3",
        "v.raw.s0 layers 0-1 blocks 0-3",
    ]
    assert ready(subject.accept(manifest(1, version=1), 1)) == [(0, 0, Trust.ATTESTED)]
    assert [gap.first_layer for gap in subject.unattested()] == [1, 1]


def contradicting(layer: int = 0, block: int = 1) -> Manifest:
    track = tracks()[0]
    good = manifest(1, version=1)
    groups = list(listing(track, 1))
    at = 32 * block
    groups[layer] = groups[layer][:at] + bytes(32) + groups[layer][at + 32 :]
    entry = good.segments[0]
    return Manifest(
        compat=COMPAT,
        version=1,
        segments=(
            SegmentEntry(
                segment=0,
                first_block=0,
                blocks=BLOCKS,
                block_keys_sha256=entry.block_keys_sha256,
                tracks=entry.tracks,
                object_digests={track: tuple(groups), tracks()[1]: listing(tracks()[1], 1)},
            ),
        ),
    )


def test_a_plain_manifest_that_contradicts_an_object_ends_the_publication() -> None:
    subject = assembler()
    subject.accept(manifest(0), 0)
    bring(subject, *keys([0]))

    with pytest.raises(Contradicted, match=r"k\.raw\.s0 layer 0 block 1"):
        subject.accept(contradicting(), 1)


def test_a_signed_manifest_that_contradicts_an_object_takes_it_back() -> None:
    subject = assembler(signed=True)
    subject.accept(manifest(0), 0)
    bring(subject, *keys([0]))

    events = subject.accept(contradicting(), 1)

    [rejected] = [event for event in events if isinstance(event, ObjectRejected)]
    assert (rejected.block, rejected.reason) == (1, Rejection.DIGEST)
    assert ready(events) == []
    assert (tracks()[0], 0, 1) in objects(subject.gaps())
    assert subject.summary().objects == 2 * BLOCKS - 1
    assert subject.summary().octets == 100 * (2 * BLOCKS - 1)


def test_an_object_that_is_taken_back_can_come_again() -> None:
    subject = assembler(signed=True)
    subject.accept(manifest(0), 0)
    bring(subject, *keys([0]))
    subject.accept(contradicting(), 1)
    key = (tracks()[0], 0, 1)

    assert subject.expects(*key) is Expected.EXAMINE
    assert subject.admit(*key, bytes(32), 100)
    assert ready(subject.placed(*key)) == [(0, 0, Trust.ATTESTED)]


def test_an_object_that_is_taken_back_while_it_is_placed_does_not_count() -> None:
    subject = assembler(signed=True)
    subject.accept(manifest(0), 0)
    bring(subject, *(key for key in keys([0]) if key != (tracks()[0], 0, 1)))
    key = (tracks()[0], 0, 1)
    assert subject.admit(*key, digest(*key), 100)

    subject.accept(contradicting(), 1)

    assert subject.placed(*key) == []
    assert key in objects(subject.gaps())
    assert subject.summary().objects == 2 * BLOCKS - 1


@pytest.mark.parametrize("signed", [False, True])
def test_an_object_that_contradicts_the_manifest_before_it_is_rejected(signed: bool) -> None:
    subject = assembler(signed=signed)
    subject.accept(manifest(1), 0)
    key = keys()[0]

    with pytest.raises(BadObject, match="the manifest lists") as caught:
        subject.admit(*key, bytes(32), 100)

    assert caught.value.reason is Rejection.DIGEST
    assert key in objects(subject.gaps())
    assert subject.admit(*key, digest(*key), 100)


class Model:
    """Decision 8, said as plainly as it can be said."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.placed: set[Key] = set()
        self.listed = 0
        self.told: set[int] = set()

    def step(self) -> list[tuple[int, int, Trust]]:
        news = []
        for layer in range(LAYERS):
            whole = set(keys([layer])) <= self.placed
            attested = whole and layer < self.listed
            if layer not in self.told and (attested if self.signed else whole):
                self.told.add(layer)
                news.append((0, layer, Trust.ATTESTED if attested else Trust.VERIFIED))
        return news


@given(st.booleans(), st.lists(st.one_of(st.sampled_from(keys()), st.none()), max_size=120))
def test_readiness_follows_the_rule_of_trust(signed: bool, steps: list[Key | None]) -> None:
    subject, model = assembler(signed=signed), Model(signed=signed)
    subject.accept(manifest(0), 0)
    version = 0

    for step in steps:
        if step is None:
            version += 1
            model.listed = min(model.listed + 1, LAYERS)
            events = subject.accept(manifest(model.listed, version=version), version)
        else:
            model.placed.add(step)
            events = bring(subject, step)

        assert ready(events) == model.step()
    assert subject.is_complete == (len(model.told) == LAYERS)
    assert subject.any_ready == bool(model.told)


# -- manifests -----------------------------------------------------------------------------------


def test_an_older_manifest_changes_nothing() -> None:
    subject = assembler()
    subject.accept(manifest(2, version=5), 5)

    assert subject.accept(manifest(0, version=4), 4) == []
    assert subject.accept(manifest(2, version=5), 5) == []
    assert subject.version == 5


@pytest.mark.parametrize(
    "later",
    [
        lambda: Manifest(compat=COMPAT, version=1),
        lambda: manifest(0, version=1),
        lambda: contradicting(),
    ],
    ids=["segment gone", "digests gone", "digest changed"],
)
def test_a_manifest_that_takes_something_back_ends_the_publication(
    later: Callable[[], Manifest],
) -> None:
    subject = assembler()
    subject.accept(manifest(1), 0)

    with pytest.raises(Contradicted):
        subject.accept(later(), 1)


def elsewhere(whole: Manifest, version: int, listed_in: int) -> Manifest:
    """Leave out the digests of all segments, which an earlier version lists."""
    entries = tuple(entry.elsewhere(listed_in) for entry in whole.segments)
    return replace(whole, segments=entries, version=version)


def test_digests_that_a_later_manifest_leaves_out_are_those_that_were_listed() -> None:
    whole = manifest(LAYERS, version=1, complete=True)
    subject = assembler(signed=True)
    subject.accept(whole, 1)
    subject.accept(elsewhere(whole, 2, 1), 2)

    assert subject.digests_in == set()
    assert len(ready(bring(subject, *keys()))) == LAYERS
    changed = manifest(LAYERS, version=3, complete=True)
    entry = changed.segments[0]
    listed = {**entry.object_digests, tracks()[0]: (bytes(32 * BLOCKS),) * LAYERS}
    with pytest.raises(Contradicted, match="contradicts or omits digests"):
        subject.accept(replace(changed, segments=(replace(entry, object_digests=listed),)), 3)


def test_digests_that_the_first_manifest_leaves_out_can_be_had_from_an_earlier_one() -> None:
    whole = manifest(LAYERS, version=1, complete=True)
    subject = assembler(signed=True)
    subject.accept(elsewhere(whole, 2, 1), 2)
    assert subject.digests_in == {1}
    assert ready(bring(subject, *keys(layers=[0, 1]))) == []

    events = subject.supply(whole)

    assert [layer for _, layer, _ in ready(events)] == [0, 1]
    assert subject.digests_in == set()
    assert ready(bring(subject, *keys(layers=[2]))) == [(0, 2, Trust.ATTESTED)]
    subject.accept(elsewhere(whole, 3, 1), 3)
    assert subject.is_complete


def test_digests_that_are_left_out_are_of_no_matter_without_a_signature() -> None:
    subject = assembler(signed=False)
    subject.accept(elsewhere(manifest(LAYERS, version=1, complete=True), 2, 1), 2)

    assert subject.digests_in == set()
    assert len(ready(bring(subject, *keys()))) == LAYERS


def test_an_earlier_manifest_of_something_else_contradicts_the_one_that_refers_to_it() -> None:
    whole = manifest(LAYERS, version=1, complete=True)
    other = replace(whole.segments[0], block_keys_sha256=bytes([9]) * 32)
    subject = assembler(signed=True)
    subject.accept(elsewhere(whole, 2, 1), 2)

    with pytest.raises(Contradicted, match="changes block_keys_sha256"):
        subject.supply(replace(whole, segments=(other,)))


def test_segments_that_are_added_are_planned_as_they_come() -> None:
    subject = assembler(blocks=2 * BLOCKS)
    subject.accept(Manifest(compat=COMPAT, version=0), 0)
    assert subject.plans == []
    assert subject.unlisted == range(2 * BLOCKS)

    subject.accept(manifest(0, version=1), 1)
    bring(subject, *keys())
    assert [plan.segment for plan in subject.plans] == [0]
    assert subject.unlisted == range(BLOCKS, 2 * BLOCKS)
    assert not subject.is_complete

    subject.accept(manifest(1, 0, version=2), 2)
    bring(subject, *keys(segment=1))
    assert [plan.segment for plan in subject.plans] == [0, 1]
    assert not subject.unlisted
    assert subject.extent == range(2 * BLOCKS)
    assert subject.position(tracks(1)[0], 1) == BLOCKS + 1
    assert subject.is_complete


def test_segments_behind_the_prefix_are_left_alone() -> None:
    subject = assembler(blocks=BLOCKS)

    subject.accept(manifest(0, 0), 0)

    assert [plan.segment for plan in subject.plans] == [0]
    assert subject.expects(*keys(segment=1)[0]) is Expected.UNWANTED


def test_a_segment_whose_tokens_are_not_all_known_is_never_used() -> None:
    subject = assembler(blocks=2 * BLOCKS, known=2 * BLOCKS - 1)

    subject.accept(manifest(0, 0), 0)

    assert [plan.segment for plan in subject.plans] == [0]
    assert subject.unlisted == range(BLOCKS, 2 * BLOCKS)
    bring(subject, *keys())
    assert not subject.is_complete


def test_without_a_known_prefix_the_first_manifest_says_where_it_ends() -> None:
    subject = assembler(blocks=None)
    subject.accept(manifest(0), 0)
    subject.accept(manifest(0, 0, version=1), 1)

    bring(subject, *keys())

    assert subject.extent == range(BLOCKS)
    assert subject.is_complete


def test_a_wish_for_a_later_segment_waits_for_it() -> None:
    subject = assembler(blocks=None, wish=Wish(segments=frozenset({1})))
    subject.accept(manifest(0), 0)
    assert subject.extent is None
    assert not subject.is_complete

    subject.accept(manifest(0, 0, version=1), 1)
    bring(subject, *keys(segment=1))

    assert subject.extent == range(BLOCKS, 2 * BLOCKS)
    assert subject.position(tracks(1)[0], 0) == 0
    assert subject.is_complete


def test_a_segment_that_is_offered_in_no_known_codec_is_an_error() -> None:
    subject = assembler(wish=Wish(codecs=("raw",)))
    entry = SegmentEntry(
        segment=0,
        first_block=0,
        blocks=BLOCKS,
        block_keys_sha256=bytes(32),
        tracks=(DataTrack.parse("kv.zstd.s0"),),
    )

    with pytest.raises(NotFound, match=r"kv\.zstd\.s0"):
        subject.accept(Manifest(compat=COMPAT, segments=(entry,)), 0)


# -- ahead of the manifest -----------------------------------------------------------------------


def test_objects_ahead_of_the_manifest_are_kept_within_bounds_and_in_order() -> None:
    subject = assembler(early=250)
    first, second, third = keys()[:3]
    assert subject.expects(*first) is Expected.EARLY

    assert subject.hold(*first, bytes(100))
    assert subject.hold(*second, bytes(150))
    assert not subject.hold(*third, b"x")

    released = [(obj.track, obj.layer, obj.block) for obj in subject.release()]
    assert released == [first, second]
    assert list(subject.release()) == []
    assert subject.hold(*third, bytes(250))
