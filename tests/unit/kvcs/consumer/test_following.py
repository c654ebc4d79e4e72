"""A context that grows while it is retrieved: what is wanted, where it lies, when it is over."""

from collections.abc import Iterable, Sequence
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.assembler import Assembler, Contradicted, Expected
from kvcs.consumer.events import (
    Event,
    FailureReason,
    LayerReady,
    SegmentConfirmed,
    SegmentDiffers,
)
from kvcs.consumer.failures import lacking
from kvcs.consumer.selection import Wish
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import block_keys_sha256
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName

NAME = PublicationName(bytes(32), bytes(32), bytes(32), bytes(16))
LAYERS, SIZE, PREFIX = 2, 16, 4
COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=LAYERS,
    block_tokens=SIZE,
    dtype="bfloat16",
    k_shape=(2, 4),
    v_shape=(2, 4),
)
#: Block Keys of a context, as the publication has it.
KEYS = [sha256(bytes([block])).digest() for block in range(40)]
#: Those of one that goes on otherwise behind block 5.
OTHERS = [*KEYS[:6], *(sha256(b"other" + bytes([block])).digest() for block in range(6, 40))]

Key = tuple[DataTrack, int, int]


def manifest(*blocks: int, version: int = 0, complete: bool = False) -> Manifest:
    """One segment of so many blocks for each argument."""
    entries: list[SegmentEntry] = []
    first = 0
    for segment, count in enumerate(blocks):
        names = (DataTrack.parse(f"k.raw.s{segment}"), DataTrack.parse(f"v.raw.s{segment}"))
        entries.append(
            SegmentEntry(
                segment=segment,
                first_block=first,
                blocks=count,
                block_keys_sha256=block_keys_sha256(KEYS[first : first + count]),
                tracks=names,
                complete=complete,
            )
        )
        first += count
    return Manifest(compat=COMPAT, segments=tuple(entries), version=version)


def assembler(
    wish: Wish | None = None, *, blocks: int | None = PREFIX, known: int | None = PREFIX
) -> Assembler:
    return Assembler(
        NAME,
        wish=wish or Wish(follow=True),
        codecs=CodecRegistry(),
        signed=False,
        blocks=blocks,
        known_blocks=known,
    )


def objects(segment: int, blocks: int, layers: Iterable[int] = range(LAYERS)) -> list[Key]:
    return [
        (DataTrack.parse(f"{component}.raw.s{segment}"), layer, block)
        for layer in layers
        for component in "kv"
        for block in range(blocks)
    ]


def bring(to: Assembler, wanted: Iterable[Key]) -> list[Event]:
    events: list[Event] = []
    for key in wanted:
        digest = sha256(str(key).encode()).digest()
        if to.expects(*key) is Expected.EXAMINE and to.admit(*key, digest, 100):
            events += to.placed(*key)
    return events


def confirmed(events: Sequence[Event]) -> list[bool]:
    return [event.confirmed for event in events if isinstance(event, LayerReady)]


def test_what_is_appended_is_wanted_as_it_is_listed_and_lies_behind_what_was_there() -> None:
    subject = assembler()
    subject.accept(manifest(4), 0)
    bring(subject, objects(0, 4))
    assert subject.is_idle
    assert not subject.is_complete

    subject.accept(manifest(4, 1, 2, version=1), 1)

    assert subject.extent == range(7)
    assert not subject.is_idle
    assert [plan.context_blocks for plan in subject.plans] == [
        range(4), range(4, 5), range(5, 7)
    ]  # fmt: skip
    assert [subject.position(DataTrack.parse("v.raw.s2"), block) for block in (0, 1)] == [5, 6]
    bring(subject, [*objects(2, 2), *objects(1, 1)])
    assert subject.is_idle
    assert not subject.is_complete


def test_the_prefix_is_wanted_to_its_end_whatever_is_listed() -> None:
    subject = assembler()

    subject.accept(manifest(2), 0)
    bring(subject, objects(0, 2))

    assert subject.extent == range(PREFIX)
    assert subject.unlisted == range(2, PREFIX)
    assert not subject.is_idle


def test_stopping_wants_what_is_listed_and_nothing_that_comes_later() -> None:
    subject = assembler()
    subject.accept(manifest(4, 1), 0)

    subject.stop()
    subject.accept(manifest(4, 1, 1, version=1), 1)

    assert subject.extent == range(5)
    assert subject.expects(*objects(2, 1)[0]) is Expected.UNWANTED
    assert not subject.is_complete
    bring(subject, [*objects(0, 4), *objects(1, 1)])
    assert subject.is_complete


def test_who_stops_ahead_of_the_manifest_gets_the_prefix() -> None:
    subject = assembler()

    subject.stop()
    subject.accept(manifest(4, 1), 0)

    assert subject.extent == range(PREFIX)
    bring(subject, objects(0, 4))
    assert subject.is_complete


def test_a_wish_for_blocks_bounds_what_is_followed() -> None:
    subject = assembler(Wish(follow=True, blocks=range(1, 6)))
    subject.accept(manifest(4), 0)
    assert subject.extent == range(1, 4)
    assert subject.is_following

    subject.accept(manifest(4, 1, 3, version=1), 1)

    assert subject.extent == range(1, 6)
    assert not subject.is_following
    bring(subject, [*objects(0, 4), *objects(1, 1), *objects(2, 3)])
    assert subject.is_complete
    assert subject.summary().objects == 2 * LAYERS * 5


def test_without_a_wish_to_follow_nothing_behind_the_prefix_is_wanted() -> None:
    subject = assembler(Wish())

    subject.accept(manifest(4, 1), 0)

    assert subject.extent == range(PREFIX)
    bring(subject, objects(0, 4))
    assert subject.is_complete


def test_what_is_appended_is_confirmed_by_the_tokens_that_are_told_later() -> None:
    subject = assembler()
    subject.accept(manifest(4, 2, 1), 0)
    assert confirmed(bring(subject, objects(0, 4))) == [True] * LAYERS
    assert confirmed(bring(subject, objects(1, 2))) == [False] * LAYERS

    assert subject.confirm(KEYS[:5]) == []
    events = subject.confirm(KEYS[:6])

    assert events == [SegmentConfirmed(segment=1, token_start=4 * SIZE, token_end=6 * SIZE)]
    assert subject.confirm(KEYS[:6]) == []
    subject.confirm(KEYS[:7])
    assert confirmed(bring(subject, objects(2, 1))) == [True] * LAYERS


def test_where_the_contexts_part_following_ends_and_what_is_before_stays() -> None:
    subject = assembler()
    subject.accept(manifest(4, 2, 1, 1), 0)
    bring(subject, [*objects(1, 2), *objects(2, 1, layers=[0])])

    events = subject.confirm(OTHERS[:7])

    assert events == [
        SegmentConfirmed(segment=1, token_start=4 * SIZE, token_end=6 * SIZE),
        SegmentDiffers(segment=2, token_start=6 * SIZE, token_end=7 * SIZE),
    ]
    assert subject.extent == range(6)
    assert not subject.is_following
    assert not subject.unlisted
    assert [gap.segment for gap in subject.gaps()] == [0, 0]
    assert subject.plan(DataTrack.parse("k.raw.s2")) is None
    # What is on its way for a segment that is not wanted any more changes nothing.
    for key in objects(2, 1, layers=[1]) + objects(3, 1):
        assert subject.expects(*key) is Expected.UNWANTED
        assert not subject.admit(*key, bytes(32), 100)
    subject.accept(manifest(4, 2, 1, 1, 1, version=1), 1)
    bring(subject, objects(0, 4))
    assert subject.is_complete


def test_contexts_that_part_within_the_prefix_leave_blocks_that_nobody_can_bring() -> None:
    # The manifest is held against the prefix, where a segment does not reach beyond it.
    subject = assembler(blocks=8, known=8)
    subject.accept(manifest(4, 2, 4), 0)
    bring(subject, [*objects(0, 4), *objects(1, 2)])

    [*_, differs] = subject.confirm(OTHERS[:10])

    assert isinstance(differs, SegmentDiffers)
    assert subject.unlisted == range(6, 8)
    assert not subject.is_complete
    assert lacking(subject) == (
        FailureReason.INCOMPLETE,
        "blocks 6 to 7 are in no segment that can be used",
    )


def test_a_publication_that_is_of_other_tokens_from_its_first_block_on_is_of_no_use() -> None:
    subject = assembler(blocks=None, known=None)
    subject.accept(manifest(4), 0)

    with pytest.raises(Contradicted, match="segment 0 covers other tokens"):
        subject.confirm(OTHERS[6:10])


def test_a_manifest_that_ends_does_not_end_the_publication() -> None:
    subject = assembler()
    subject.accept(manifest(4), 0)
    bring(subject, objects(0, 4))

    assert lacking(subject) == (
        FailureReason.INCOMPLETE,
        "the manifest ended, which does not end the publication",
    )


# -- a layer over all segments -------------------------------------------------------------------


def span(subject: Assembler, layer: int) -> tuple[int, int, bool]:
    found = subject.span(layer)
    assert found is not None
    assert found.layer == layer
    return found.token_start // SIZE, found.token_end // SIZE, found.whole


def test_a_layer_is_whole_when_it_is_ready_in_every_segment_of_a_chunked_prefill() -> None:
    subject = assembler(Wish(), blocks=6, known=6)
    assert subject.span(0) is None
    subject.accept(manifest(2, 2), 0)
    assert span(subject, 0) == (0, 0, False)

    bring(subject, objects(1, 2, layers=[0]))
    assert span(subject, 0) == (0, 0, False)
    bring(subject, objects(0, 2, layers=[0]))
    assert span(subject, 0) == (0, 4, False)
    subject.accept(manifest(2, 2, 2, version=1), 1)
    assert span(subject, 0) == (0, 4, False)
    bring(subject, objects(2, 2, layers=[0]))

    assert span(subject, 0) == (0, 6, True)
    assert span(subject, 1) == (0, 0, False)


def test_a_layer_that_was_whole_is_so_again_when_what_was_appended_is_there() -> None:
    subject = assembler(Wish(follow=True, blocks=range(1, 40)))
    subject.accept(manifest(4), 0)
    bring(subject, objects(0, 4))
    assert span(subject, 1) == (1, 4, True)

    subject.accept(manifest(4, 2, version=1), 1)
    assert span(subject, 1) == (1, 4, False)
    bring(subject, objects(1, 2))
    assert span(subject, 1) == (1, 6, True)


def test_a_span_ends_where_the_contexts_part() -> None:
    subject = assembler()
    subject.accept(manifest(4, 2, 1), 0)
    bring(subject, [*objects(0, 4), *objects(1, 2), *objects(2, 1)])
    assert span(subject, 0) == (0, 7, True)

    subject.confirm(OTHERS)

    assert span(subject, 0) == (0, 6, True)


@given(st.data())
def test_however_a_context_grows_each_block_has_its_place_and_comes_once(
    data: st.DataObject,
) -> None:
    chunks = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6), label="prefix")
    appended = data.draw(st.lists(st.integers(1, 2), max_size=8), label="appended")
    segments = [*chunks, *appended]
    prefix = sum(chunks)
    listed = data.draw(
        st.lists(st.integers(0, len(segments)), min_size=1, max_size=6).map(sorted), label="listed"
    )
    stop_at = data.draw(st.integers(0, 2 * len(listed)), label="stops")
    subject = assembler(blocks=prefix, known=prefix)
    placed: list[tuple[str, int, int]] = []
    told: list[tuple[int, int]] = []
    wanted = 0

    for version, count in enumerate([*listed, len(segments)]):
        subject.accept(manifest(*segments[:count], version=version), version)
        if version <= stop_at:
            wanted = max(wanted, count)
        if version == stop_at:
            subject.stop()
        coming = [key for number in range(count) for key in objects(number, segments[number])]
        for key in data.draw(st.permutations(coming).map(lambda keys: keys[: len(keys) * 2 // 3])):
            if subject.expects(*key) is Expected.EXAMINE:
                position = subject.position(key[0], key[2])
                placed.append((str(key[0].component), key[1], position))
                assert position == sum(segments[: key[0].segment]) + key[2]
                told += [
                    (event.segment, event.layer)
                    for event in bring(subject, [key])
                    if isinstance(event, LayerReady)
                ]
    for number, blocks in enumerate(segments):
        for key in objects(number, blocks):
            if subject.expects(*key) is Expected.EXAMINE:
                placed.append((str(key[0].component), key[1], subject.position(key[0], key[2])))
                told += [
                    (event.segment, event.layer)
                    for event in bring(subject, [key])
                    if isinstance(event, LayerReady)
                ]

    reach = max(len(chunks), wanted if stop_at <= len(listed) else len(segments))
    end = sum(segments[:reach])
    assert subject.extent == range(end)
    assert len(placed) == len(set(placed)) == 2 * LAYERS * end
    assert sorted(told) == [(s, layer) for s in range(reach) for layer in range(LAYERS)]
    assert subject.is_complete is (stop_at <= len(listed))
    assert all(span(subject, layer) == (0, end, True) for layer in range(LAYERS))
