"""Whether one publication may go on where another one ended (KVCS Section 5.4)."""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from kvcs.consumer.assembler import Assembler
from kvcs.consumer.events import Event, LayerReady, SegmentComplete
from kvcs.consumer.joining import Bond, CannotJoin
from kvcs.consumer.selection import Wish
from kvcs.errors import NotFound
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.layout import Component
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import DataTrack
from tests.unit.kvcs.consumer.recovering import (
    BLOCKS,
    LAYERS,
    SEGMENT_BLOCKS,
    SEGMENTS,
    Publication,
    content,
)

#: Two runs of the same prompt, in two segments of two blocks, of two layers each.
ONE = Publication(1, deterministic=False, blocks=BLOCKS, listed=LAYERS, segments=SEGMENTS)
OTHER = replace(ONE, number=2)
SAME = replace(ONE, number=3, deterministic=True)
SAME_AGAIN = replace(SAME, number=4)
LIVE = replace(SAME, number=5, listed=0)

SEGMENT_0 = [(layer, block) for layer in range(LAYERS) for block in range(SEGMENT_BLOCKS)]


def assembler(of: Publication, follows: Assembler | None = None, **others: Any) -> Assembler:
    options: dict[str, Any] = {"wish": Wish(), "signed": False, "blocks": of.blocks} | others
    return Assembler(
        of.name, codecs=CodecRegistry(), known_blocks=BLOCKS, follows=follows, **options
    )


def bring(to: Assembler, of: Publication, where: Iterable[tuple[int, int]]) -> list[Event]:
    """Bring K and V of some layers and blocks of the context."""
    events: list[Event] = []
    for layer, number in where:
        segment, block = divmod(number, SEGMENT_BLOCKS)
        for component in (Component.K, Component.V):
            track, data = DataTrack(component, "raw", segment), (component, layer, number)
            assert to.admit(track, layer, block, _digest(of, data), 32)
            events += to.placed(track, layer, block)
    return events


def _digest(of: Publication, place: tuple[Component, int, int]) -> bytes:
    return sha256(content(of.run, place)).digest()


def begun(of: Publication, where: Iterable[tuple[int, int]], **others: Any) -> Assembler:
    """A publication of which some of it is there."""
    subject = assembler(of, **others)
    subject.accept(of.manifest(0), 0)
    bring(subject, of, where)
    return subject


def ready(events: Iterable[Event]) -> list[tuple[int, int]]:
    return [(e.segment, e.layer) for e in events if isinstance(e, LayerReady)]


def missing(subject: Assembler) -> list[str]:
    return [str(gap) for gap in subject.gaps()]


#: The first layer of segment 0 is there, and one block of the second.
PART = [(0, 0), (0, 1), (1, 0)]


def test_two_that_are_deterministic_are_mixed_object_by_object() -> None:
    before = begun(SAME, PART)
    after = assembler(SAME_AGAIN, before)

    assert ready(after.accept(SAME_AGAIN.manifest(0), 0)) == []
    assert missing(after) == [
        "k.raw.s0 layer 1 block 1",
        "v.raw.s0 layer 1 block 1",
        "k.raw.s1 layers 0-1 blocks 0-1",
        "v.raw.s1 layers 0-1 blocks 0-1",
    ]
    events = bring(after, SAME_AGAIN, [(1, 1)])
    assert ready(events) == [(0, 1)]
    assert any(isinstance(event, SegmentComplete) for event in events)
    assert after.summary().objects == 8
    assert after.summary().attested == 8


def test_digests_that_are_listed_by_the_second_attest_objects_of_the_first() -> None:
    before = begun(LIVE, PART)
    after = assembler(SAME, before)
    assert before.summary().attested == 0

    after.accept(SAME.manifest(0), 0)

    assert after.summary().attested == 6


@pytest.mark.parametrize(
    ("first", "second"), [(ONE, OTHER), (SAME, ONE), (ONE, SAME)], ids=["neither", "one", "other"]
)
def test_a_segment_that_was_begun_keeps_others_out_where_not_both_are_deterministic(
    first: Publication, second: Publication
) -> None:
    why = refused(begun(first, PART), second, second.manifest(0))

    assert why == "segment 0 was begun, and not both are deterministic"


def test_a_segment_that_is_there_stays_and_another_one_is_had_from_elsewhere() -> None:
    after = assembler(OTHER, begun(ONE, SEGMENT_0))
    after.accept(OTHER.manifest(0), 0)

    assert after.is_segment_ready(0)
    events = bring(after, OTHER, [(layer, block) for layer in range(LAYERS) for block in (2, 3)])
    assert ready(events) == [(1, 0), (1, 1)]
    assert after.is_complete


def test_digests_of_a_segment_that_stays_are_not_those_of_the_second() -> None:
    before = begun(replace(ONE, listed=0), SEGMENT_0)  # which waits to be attested
    after = assembler(OTHER, before)

    assert ready(after.accept(OTHER.manifest(0), 0)) == []
    assert after.accept(OTHER.manifest(1), 1)
    assert after.summary().attested == 0


def test_what_the_second_lists_later_than_the_first_attests_its_objects_then() -> None:
    after = assembler(LIVE, begun(SAME, PART, signed=True), signed=True)
    after.accept(LIVE.manifest(0), 0)
    assert bring(after, LIVE, [(1, 1)]) == []

    assert ready(after.accept(replace(LIVE, listed=LAYERS).manifest(1), 1)) == [(0, 1)]


def refused(before: Assembler, of: Publication, manifest: Manifest, **others: Any) -> str:
    """Return why a publication cannot go on; what there is stays as it was."""
    as_it_was = missing(before), before.summary(), before.bond
    with pytest.raises((CannotJoin, NotFound)) as caught:
        assembler(of, before, **others).accept(manifest, 0)
    assert (missing(before), before.summary(), before.bond) == as_it_was
    return str(caught.value)


def test_two_that_differ_in_a_digest_are_not_mixed_whatever_they_say() -> None:
    why = refused(begun(SAME, PART), SAME_AGAIN, SAME_AGAIN.manifest(0, lies=True))

    assert why == "both are deterministic, but differ in k.raw.s0 layer 0"


def test_an_object_whose_digest_is_listed_otherwise_keeps_them_apart() -> None:
    why = refused(begun(LIVE, PART), SAME, SAME.manifest(0, lies=True))

    assert why == "both are deterministic, but differ in k.raw.s0 layer 0 block 0"


def test_one_that_has_other_tracks_has_other_objects() -> None:
    manifest = SAME_AGAIN.manifest(0)
    joint = (DataTrack(Component.KV, "raw", 0),)
    entry = replace(manifest.segments[0], tracks=joint, object_digests={})
    changed = replace(manifest, segments=(entry, manifest.segments[1]))

    why = refused(begun(SAME, PART), SAME_AGAIN, changed)
    assert why == "segment 0 does not have the tracks k.raw.s0, v.raw.s0"


def test_one_that_lists_no_more_than_is_there_brings_nothing() -> None:
    short = replace(SAME_AGAIN, segments=1)

    why = refused(begun(replace(SAME, segments=1), SEGMENT_0), short, short.manifest(0))
    assert why == "it lists nothing of what is missing"


def test_a_signature_is_never_taken_away_nor_added() -> None:
    why = refused(begun(SAME, PART, signed=True), SAME_AGAIN, SAME_AGAIN.manifest(0))
    assert why == "its manifest is not signed, that of what is there is signed"

    why = refused(begun(SAME, PART), SAME_AGAIN, SAME_AGAIN.manifest(0), signed=True)
    assert why == "its manifest is signed, that of what is there is not"


def test_another_compatibility_id_is_another_cache() -> None:
    strange = assembler(SAME_AGAIN, begun(SAME, PART))
    strange.publication = replace(SAME_AGAIN.name, compatibility_id=bytes([9]) * 32)

    with pytest.raises(CannotJoin, match="another scope or Compatibility ID"):
        strange.accept(SAME_AGAIN.manifest(0), 0)


def test_one_that_does_not_list_all_that_is_there_cannot_go_on() -> None:
    both = [(0, 0), (0, 1), (0, 2), (0, 3)]
    short = replace(SAME_AGAIN, segments=1)

    why = refused(begun(SAME, both), short, short.manifest(0))
    assert why == "it does not list segment 1, of which something is there"


def test_segments_that_were_cut_otherwise_do_not_fit() -> None:
    manifest = SAME_AGAIN.manifest(0)
    first, second = manifest.segments
    longer = replace(first, blocks=3, object_digests={})
    shorter = replace(second, first_block=3, blocks=1, object_digests={})

    why = refused(begun(SAME, PART), SAME_AGAIN, replace(manifest, segments=(longer, shorter)))
    assert why == "segment 0 has other blocks: 0 to 2, or other keys, expected 0 to 1"


def test_other_block_keys_are_other_tokens() -> None:
    manifest = SAME_AGAIN.manifest(0)
    first, second = manifest.segments
    changed = replace(manifest, segments=(replace(first, block_keys_sha256=bytes(32)), second))

    assert "or other keys" in refused(begun(SAME, PART), SAME_AGAIN, changed)


def test_one_of_a_shorter_prefix_does_not_fit_the_sink() -> None:
    short = replace(SAME_AGAIN, blocks=SEGMENT_BLOCKS, segments=1)

    why = refused(begun(SAME, PART), short, short.manifest(0))
    assert why == "it has blocks range(0, 2), expected range(0, 4)"


# -- who else may go on --------------------------------------------------------------------------

ALL = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]
FIRST_LAYER = [(0, block) for block in range(BLOCKS)]


@pytest.mark.parametrize(
    ("of", "where", "bond"),
    [
        pytest.param(ONE, [], Bond.FREE, id="nothing"),
        pytest.param(ONE, [(0, 0)], Bond.FREE, id="nothing told"),
        pytest.param(ONE, FIRST_LAYER, Bond.BOUND, id="all segments begun"),
        pytest.param(SAME, FIRST_LAYER, Bond.JOINABLE, id="deterministic"),
        pytest.param(ONE, PART, Bond.BOUND, id="a segment begun"),
        pytest.param(ONE, SEGMENT_0, Bond.JOINABLE, id="a segment untouched"),
        pytest.param(replace(ONE, segments=1), SEGMENT_0, Bond.JOINABLE, id="a segment unlisted"),
        pytest.param(SAME, ALL, Bond.BOUND, id="everything"),
    ],
)
def test_who_may_go_on_depends_on_what_was_handed_out(
    of: Publication, where: list[tuple[int, int]], bond: Bond
) -> None:
    assert begun(of, where).bond is bond


def test_before_a_manifest_anybody_may() -> None:
    assert assembler(ONE).bond is Bond.FREE
