from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.consumer.selection import SegmentPlan, Wish, plan_segment, select_tracks
from kvcs.errors import ConfigError, NotFound
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Octets
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import CodecEntry, SegmentEntry
from kvcs.profile.naming import DataTrack


def descriptor(k_shape: tuple[int, int] = (2, 4), v_shape: tuple[int, int] = (2, 4)) -> Descriptor:
    return Descriptor(
        model="m",
        revision="r",
        layers=6,
        block_tokens=16,
        dtype="bfloat16",
        k_shape=k_shape,
        v_shape=v_shape,
    )


def entry(*tracks: str, segment: int = 0, first_block: int = 0, blocks: int = 8) -> SegmentEntry:
    return SegmentEntry(
        segment=segment,
        first_block=first_block,
        blocks=blocks,
        block_keys_sha256=bytes(32),
        tracks=tuple(DataTrack.parse(name) for name in tracks),
    )


@dataclass(frozen=True)
class Squeeze:
    name: str = "squeeze"
    value: int = 0x8001
    components: frozenset[Component] = frozenset(Component)
    lossless: bool = True
    fixed_length: bool = False

    def encode(self, array: NDArray[Any]) -> bytes:
        return array.tobytes()

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(data, dtype).reshape(tuple(shape))


CODECS = CodecRegistry(Squeeze())


def names(tracks: tuple[DataTrack, ...]) -> list[str]:
    return [str(track) for track in tracks]


def test_k_and_v_of_one_codec_are_taken_together() -> None:
    offered = entry("v.raw.s0", "k.raw.s0", "kv.squeeze.s0")

    tracks = select_tracks(offered, descriptor(), Wish(), CODECS)

    assert names(tracks) == ["k.raw.s0", "v.raw.s0"]


def test_the_codec_liked_best_decides() -> None:
    offered = entry("v.raw.s0", "k.raw.s0", "kv.squeeze.s0")

    tracks = select_tracks(offered, descriptor(), Wish(codecs=("squeeze", "raw")), CODECS)

    assert names(tracks) == ["kv.squeeze.s0"]


def test_the_joint_track_is_taken_where_there_is_no_pair() -> None:
    tracks = select_tracks(entry("k.raw.s0", "kv.raw.s0"), descriptor(), Wish(), CODECS)

    assert names(tracks) == ["kv.raw.s0"]


def test_k_of_one_codec_is_never_paired_with_v_of_another() -> None:
    with pytest.raises(NotFound, match=r"k\.raw\.s0, v\.squeeze\.s0"):
        select_tracks(entry("k.raw.s0", "v.squeeze.s0"), descriptor(), Wish(), CODECS)


def test_a_codec_that_nobody_registered_is_not_taken() -> None:
    with pytest.raises(NotFound, match="raw, squeeze"):
        select_tracks(entry("kv.zstd.s0"), descriptor(), Wish(), CODECS)


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "expected"),
    [((1, 576), (0, 0), "k.raw.s0"), ((0, 0), (2, 4), "v.raw.s0")],
)
def test_of_an_empty_section_no_track_is_needed(
    k_shape: tuple[int, int], v_shape: tuple[int, int], expected: str
) -> None:
    tracks = select_tracks(entry(expected), descriptor(k_shape, v_shape), Wish(), CODECS)

    assert names(tracks) == [expected]


def plan(offered: SegmentEntry, wish: Wish, end_block: int | None = None) -> SegmentPlan | None:
    return plan_segment(offered, descriptor(), wish, CODECS, end_block)


def test_by_default_the_whole_segment_is_wanted() -> None:
    found = plan(entry("k.raw.s1", "v.raw.s1", segment=1, first_block=8), Wish())

    assert found is not None
    assert (found.layers, found.blocks) == (range(6), range(8))
    assert (found.token_start, found.token_end) == (128, 256)
    assert found.objects_per_layer == 16


def test_wanted_blocks_count_from_the_start_of_the_context() -> None:
    offered = entry("kv.raw.s1", segment=1, first_block=8)

    found = plan(offered, Wish(blocks=range(4, 11), layers=range(2, 4)))

    assert found is not None
    assert (found.layers, found.blocks) == (range(2, 4), range(3))
    assert found.context_blocks == range(8, 11)


def test_what_lies_behind_the_prefix_is_not_wanted() -> None:
    offered = entry("kv.raw.s1", segment=1, first_block=8)

    assert plan(offered, Wish(), end_block=8) is None
    assert plan(offered, Wish(segments=frozenset({0, 2}))) is None
    assert plan(offered, Wish(blocks=range(8))) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": range(3, 3)},
        {"layers": range(0, 8, 2)},
        {"blocks": range(-1, 4)},
        {"segments": frozenset()},
        {"segments": frozenset({-1})},
        {"codecs": ()},
    ],
    ids=str,
)
def test_a_wish_for_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Wish(**wrong)


def test_a_wish_that_the_model_cannot_fulfil_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers up to 6 are wanted, the model has 6"):
        Wish(layers=range(7)).check(descriptor(), CODECS)
    with pytest.raises(ConfigError, match="zstd"):
        Wish(codecs=("zstd",)).check(descriptor(), CODECS)

    Wish(layers=range(6), codecs=("raw", "squeeze")).check(descriptor(), CODECS)


# -- lossless and lossy --------------------------------------------------------------------------

STANDARD = standard_codecs()
INT8 = ("k.int8.s0", "v.int8.s0")
ZSTD = ("k.shuffle-zstd.s0", "v.shuffle-zstd.s0")
DECLARED = {c.name: CodecEntry(value=c.value, lossless=c.lossless) for c in STANDARD}


def select(*tracks: str, declared: Any = DECLARED, **wish: Any) -> list[str]:
    return names(select_tracks(entry(*tracks), descriptor(), Wish(**wish), STANDARD, declared))


def test_a_wish_that_names_no_codec_takes_every_lossless_one_and_no_other() -> None:
    assert Wish().names(STANDARD) == ("raw", "shuffle-zstd", "shuffle-lz4")
    assert select(*INT8, *ZSTD) == list(ZSTD)
    assert select("kv.shuffle-lz4.s0", *INT8) == ["kv.shuffle-lz4.s0"]


def test_what_is_lossy_is_taken_when_it_is_named() -> None:
    assert select(*INT8, *ZSTD, codecs=("int8", "shuffle-zstd")) == list(INT8)
    assert select(*INT8, *ZSTD, codecs=("shuffle-zstd", "int8")) == list(ZSTD)


@pytest.mark.parametrize("wish", [{}, {"require_lossless": True}])
def test_what_is_lossy_is_refused_with_what_was_found_and_expected(wish: dict[str, Any]) -> None:
    expected = (
        "segment 0 is offered as k.int8.s0, v.int8.s0: not what is needed in any of the codecs "
        "raw, shuffle-zstd, shuffle-lz4; int8 is lossy, expected a lossless codec"
    )

    with pytest.raises(NotFound) as caught:
        select(*INT8, **wish)
    assert str(caught.value) == expected


def test_who_requires_lossless_codecs_may_not_name_another() -> None:
    wish = Wish(codecs=("raw", "int8"), require_lossless=True)

    with pytest.raises(NotFound, match="int8 is lossy"):
        select(*INT8, codecs=wish.codecs, require_lossless=True)
    with pytest.raises(ConfigError, match="codec 'int8' is lossy, but lossless codecs are requir"):
        wish.check(descriptor(), STANDARD)
    Wish(codecs=("raw", "shuffle-lz4"), require_lossless=True).check(descriptor(), STANDARD)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (CodecEntry(value=0xC003, lossless=True), "0xc003, lossless there, expected 0xc003, lossy"),
        (CodecEntry(value=0x9999, lossless=False), "0x9999, lossy there, expected 0xc003, lossy"),
    ],
)
def test_a_codec_that_the_manifest_says_is_another_is_not_taken(
    said: CodecEntry, text: str
) -> None:
    with pytest.raises(NotFound, match=f"; int8 is {text}$"):
        select(*INT8, declared={"int8": said}, codecs=("int8",))
    # Where the manifest says nothing, the Codec field of each Object still must be right.
    assert select(*INT8, declared={}, codecs=("int8",)) == list(INT8)
    assert select(*INT8, *ZSTD, declared={"int8": said}, codecs=("int8", "shuffle-zstd")) == list(
        ZSTD
    )


def test_a_codec_that_lacks_its_library_is_named_with_what_it_lacks() -> None:
    codecs = CodecRegistry()
    codecs.note_unavailable("shuffle-zstd", "it needs the package zstandard")

    with pytest.raises(NotFound, match="; shuffle-zstd cannot be read: it needs the package zsta"):
        select_tracks(entry(*ZSTD), descriptor(), Wish(), codecs)
    with pytest.raises(ConfigError, match="it needs the package zstandard"):
        Wish(codecs=("shuffle-zstd",)).check(descriptor(), codecs)
    with pytest.raises(NotFound, match="; shuffle-lz4 is not known here"):
        select_tracks(entry("kv.shuffle-lz4.s0"), descriptor(), Wish(), codecs)
