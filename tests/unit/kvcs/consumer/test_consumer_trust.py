from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcs.consumer.examining import Examiner
from kvcs.consumer.trust import Expectations, check_manifest, examine
from kvcs.errors import BadManifest, BadObject, ConfigError, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey, block_keys_sha256
from kvcs.kvsp.layout import Component, Octets
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, PROFILE, DataTrack, PublicationName
from kvcs.profile.payload import Block
from kvcs.profile.signing import ProducerKey, sign_manifest
from kvcs.trust.scope import Padding, Protection, Scope
from kvcs.trust.sealing import PROPERTIES, Cover, Sealing
from moqt.location import Location

SCOPE = ScopeKey(bytes(range(32)))
COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=2,
    block_tokens=4,
    dtype="float16",
    k_shape=(1, 2),
    v_shape=(1, 2),
    extra={"rope": "10000"},
)
TOKENS = list(range(13))
KEYS = SCOPE.block_keys(COMPAT, TOKENS)
NAME = PublicationName(SCOPE.scope_id, SCOPE.compatibility_id(COMPAT), KEYS[2], b"p" * 16)
TRACKS = (DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0"))
ENTRY = SegmentEntry(
    segment=0,
    first_block=0,
    blocks=3,
    block_keys_sha256=block_keys_sha256(KEYS),
    tracks=TRACKS,
)
MANIFEST_0 = Manifest(
    compat=COMPAT, segments=(ENTRY,), publication=NAME.publication_id, anchor=KEYS[2], version=0
)


def expectations(**others: Any) -> Expectations:
    return Expectations.of_tokens(SCOPE, COMPAT, TOKENS, **others)


def check(
    manifest: Manifest,
    *,
    name: PublicationName = NAME,
    version: int = 0,
    expected: Expectations | None = None,
) -> Manifest:
    return check_manifest(
        manifest.to_json(),
        track=MANIFEST,
        name=name,
        version=version,
        expected=expected or expectations(),
    )


# -- expectations --------------------------------------------------------------------------------


def test_the_prefix_to_look_for_follows_from_descriptor_and_tokens() -> None:
    prefix = expectations().prefix(3)

    assert prefix.fields == (PROFILE, SCOPE.scope_id, SCOPE.compatibility_id(COMPAT), KEYS[2])
    assert prefix == NAME.prefix
    assert expectations().prefix(1).fields[3] == KEYS[0]


def test_the_anchor_key_tells_how_many_blocks_a_publication_has() -> None:
    assert expectations().blocks_of(NAME) == 3
    assert expectations().blocks_of(replace(NAME, anchor_key=KEYS[0])) == 1
    assert expectations().blocks_of(replace(NAME, anchor_key=bytes(32))) is None


def test_all_publications_of_a_model_have_a_prefix_in_common_with_that_of_a_prompt() -> None:
    assert expectations().model_prefix.is_prefix_of(expectations().prefix(2))
    assert len(expectations().model_prefix.fields) == 3


def test_what_is_known_and_what_is_wanted_of_a_publication_are_two_things() -> None:
    prompt, tail = expectations(), (b"x" * 32, b"y" * 32)
    longer = prompt.going_on(2, tail)
    name = replace(NAME, anchor_key=tail[1])

    assert (prompt.wanted_of(NAME), prompt.known_of(NAME)) == (3, 3)
    assert (prompt.wanted_of(name), prompt.known_of(name)) == (None, 3)
    assert (longer.wanted_of(name), longer.known_of(name)) == (2, 4)
    nothing = Expectations(scope_key=SCOPE, descriptor=COMPAT)
    assert (nothing.wanted_of(NAME), nothing.known_of(NAME)) == (None, None)


def test_a_longer_publication_is_confirmed_by_our_keys_and_the_ones_that_follow() -> None:
    tail = (b"x" * 32, b"y" * 32)
    chain = (*KEYS[:2], *tail)
    name = replace(NAME, anchor_key=tail[1])
    manifest = replace(
        MANIFEST_0,
        segments=(replace(ENTRY, blocks=4, block_keys_sha256=block_keys_sha256(chain)),),
        anchor=tail[1],
    )

    assert check(manifest, name=name, expected=expectations().going_on(2, tail)) == manifest
    with pytest.raises(BadManifest, match="other tokens"):
        check(manifest, name=name, expected=expectations().going_on(2, (tail[0], bytes(32))))
    # By where it ends the name says that the segment goes beyond what is known of it.
    assert expectations().going_on(2, (tail[1], tail[0])).known_of(name) == 3 < 4
    other = Expectations.of_tokens(SCOPE, COMPAT, [9, *TOKENS[1:]])
    with pytest.raises(BadManifest, match="other tokens"):
        check(manifest, name=name, expected=other.going_on(2, tail))


def test_a_prompt_without_a_whole_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 tokens, fewer than a block of 4"):
        Expectations.of_tokens(SCOPE, COMPAT, [1, 2, 3])


def test_requiring_signatures_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="no producer's key"):
        expectations(require_signature=True)


def test_neither_keys_nor_block_keys_are_printed() -> None:
    text = repr(expectations())

    assert KEYS[0].hex() not in text
    assert repr(KEYS[0]) not in text
    assert repr(bytes(range(32))) not in text


# -- manifests -----------------------------------------------------------------------------------


def test_a_manifest_that_is_what_was_expected_is_accepted() -> None:
    assert check(MANIFEST_0) == MANIFEST_0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model": "n"}, 'model: "m" and "n"'),
        ({"revision": "s"}, 'revision: "r" and "s"'),
        ({"layers": 3}, "layers: 2 and 3"),
        ({"block_tokens": 8}, "block_tokens: 4 and 8"),
        ({"dtype": "bfloat16"}, 'dtype: "float16" and "bfloat16"'),
        ({"k_shape": (2, 2)}, "k_shape"),
        ({"v_shape": (1, 4)}, "v_shape"),
        ({"extra": {"rope": "500000"}}, "rope"),
        ({"extra": {}}, "rope"),
    ],
    ids=str,
)
def test_a_descriptor_that_differs_is_refused_naming_the_member(
    change: dict[str, Any], names: str
) -> None:
    with pytest.raises(BadManifest, match=names):
        check(replace(MANIFEST_0, compat=replace(COMPAT, **change)))


def test_a_manifest_of_another_publication_prefix_or_version_is_refused() -> None:
    with pytest.raises(BadManifest, match="publication"):
        check(replace(MANIFEST_0, publication=b"q" * 16))
    with pytest.raises(BadManifest, match="anchor"):
        check(replace(MANIFEST_0, anchor=KEYS[1]))
    with pytest.raises(BadManifest, match="version"):
        check(MANIFEST_0, version=1)


@pytest.mark.parametrize("extra", [(), (b"image", b"", b"", b"sound")], ids=["text", "more"])
def test_tokens_that_are_told_later_give_the_keys_that_they_would_have_given_at_once(
    extra: tuple[bytes, ...],
) -> None:
    more = [*TOKENS, *range(100, 120)]
    whole = tuple(SCOPE.block_keys(COMPAT, more, extra))

    expected = Expectations.of_tokens(SCOPE, COMPAT, np.array(TOKENS), extra)
    for tokens in (more[13:15], [], more[15:16], np.array(more[16:])):
        expected = expected.extended(tokens)

    assert expected.block_keys == whole
    assert expected.rest == (119,)
    assert expected.blocks_of(NAME) == (3 if not extra else None)


def test_tokens_may_be_told_where_none_were_known() -> None:
    expected = Expectations(scope_key=SCOPE, descriptor=COMPAT).extended(TOKENS)

    assert expected.block_keys == tuple(KEYS)
    with pytest.raises(ConfigError, match="expected 0 to"):
        expected.extended([-1])


def test_a_namespace_of_another_scope_or_model_is_refused() -> None:
    with pytest.raises(BadManifest, match="scope"):
        check(MANIFEST_0, name=replace(NAME, scope_id=bytes(32)))
    with pytest.raises(BadManifest, match="compat"):
        check(MANIFEST_0, name=replace(NAME, compatibility_id=bytes(32)))


def test_a_segment_of_other_tokens_is_refused() -> None:
    with pytest.raises(BadManifest, match="other tokens"):
        check(replace(MANIFEST_0, segments=(replace(ENTRY, block_keys_sha256=bytes(32)),)))


def test_what_was_appended_behind_the_prefix_may_go_on_otherwise() -> None:
    name = replace(NAME, anchor_key=KEYS[1])
    prefix = replace(ENTRY, blocks=2, block_keys_sha256=block_keys_sha256(KEYS[:2]))
    appended = SegmentEntry(
        segment=1,
        first_block=2,
        blocks=1,
        block_keys_sha256=bytes(32),
        tracks=(DataTrack.parse("kv.raw.s1"),),
    )

    assert check(
        replace(MANIFEST_0, anchor=KEYS[1], segments=(prefix, appended)), name=name
    ).segments[1:] == (appended,)


def test_where_the_tokens_are_not_known_they_are_not_checked() -> None:
    expected = Expectations(scope_key=SCOPE, descriptor=COMPAT)
    other = replace(MANIFEST_0, segments=(replace(ENTRY, block_keys_sha256=bytes(32)),))

    assert check(other, expected=expected) == other


def test_a_signed_manifest_is_taken_from_a_trusted_producer_only() -> None:
    key = ProducerKey.generate()
    payload = sign_manifest(MANIFEST_0.to_json(), key)
    trusting = expectations(trusted={key.kid: key.public_key})

    def signed(expected: Expectations, octets: bytes = payload) -> Manifest:
        return check_manifest(octets, track=MANIFEST_COSE, name=NAME, version=0, expected=expected)

    assert signed(trusting) == MANIFEST_0
    with pytest.raises(BadManifest):
        signed(expectations())
    with pytest.raises(BadManifest):
        signed(trusting, MANIFEST_0.to_json())
    with pytest.raises(BadManifest):
        check_manifest(payload, track=MANIFEST, name=NAME, version=0, expected=trusting)


# -- Objects -------------------------------------------------------------------------------------


def payload(track: DataTrack, codec: int = 0, data: bytes = bytes(range(16))) -> bytes:
    return Block(
        component=track.component,
        layer=1,
        block_index=2,
        token_start=8,
        token_count=4,
        codec=codec,
        data=data,
    ).encode()


def look(octets: Octets, track: DataTrack, codecs: CodecRegistry | None = None) -> Any:
    return examine(
        octets,
        track=track,
        layer=1,
        block=2,
        entry=replace(ENTRY, tracks=(track,)),
        descriptor=COMPAT,
        codecs=codecs or CodecRegistry(),
    )


def test_raw_data_are_handed_on_as_they_came_and_not_copied() -> None:
    octets = payload(TRACKS[0])

    found = look(octets, TRACKS[0])

    assert bytes(found.tensor) == bytes(range(16))
    assert found.tensor.obj is octets
    assert found.octets == 16
    assert found.digest == octets[36:68]


@dataclass(frozen=True)
class Doubling:
    """Each element twice, so that what it makes has another length."""

    result: Any = None
    name: str = "doubling"
    value: int = 0x8002
    components: frozenset[Component] = frozenset(Component)
    lossless: bool = True
    fixed_length: bool = False

    def encode(self, array: NDArray[Any]) -> bytes:
        return array.tobytes() * 2

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        if self.result is not None:
            if isinstance(self.result, BaseException):
                raise self.result
            made: NDArray[Any] = self.result
            return made
        return np.frombuffer(data[: len(data) // 2], dtype).reshape(tuple(shape))


DOUBLED = DataTrack.parse("k.doubling.s0")


def test_encoded_data_become_the_tensor_they_were() -> None:
    tensor = np.arange(8, dtype=np.float16).reshape(4, 1, 2)
    octets = payload(DOUBLED, 0x8002, Doubling().encode(tensor))

    found = look(octets, DOUBLED, CodecRegistry(Doubling()))

    np.testing.assert_array_equal(found.tensor, tensor)
    assert found.octets == 32


@pytest.mark.parametrize(
    "result",
    [
        ValueError("bad stream"),
        MemoryError(),
        np.zeros((4, 1, 3), np.float16),
        np.zeros((4, 1, 2), np.float32),
        b"no array at all",
    ],
    ids=lambda result: type(result).__name__,
)
def test_whatever_a_codec_does_wrong_costs_only_its_object(result: Any) -> None:
    octets = payload(DOUBLED, 0x8002)

    with pytest.raises(BadObject) as caught:
        look(octets, DOUBLED, CodecRegistry(Doubling(result)))

    assert caught.value.reason is Rejection.DECODE


def test_what_a_codec_says_is_bad_keeps_its_reason() -> None:
    why = BadObject(Rejection.DATA_LENGTH, "too short")

    with pytest.raises(BadObject) as caught:
        look(payload(DOUBLED, 0x8002), DOUBLED, CodecRegistry(Doubling(why)))

    assert caught.value.reason is Rejection.DATA_LENGTH


def test_what_comes_out_of_data_is_bounded_as_data_are() -> None:
    tensor = np.arange(8, dtype=np.float16).reshape(4, 1, 2)
    data = Doubling().encode(tensor)[:2]  # however short it is

    with pytest.raises(
        BadObject, match=r"k\.doubling\.s0 decodes to 16 octets, limit 15"
    ) as caught:
        examine(
            payload(DOUBLED, 0x8002, data),
            track=DOUBLED,
            layer=1,
            block=2,
            entry=replace(ENTRY, tracks=(DOUBLED,)),
            descriptor=COMPAT,
            codecs=CodecRegistry(Doubling(AssertionError("decoded"))),
            max_data_octets=15,
        )
    assert caught.value.reason is Rejection.LIMIT


#: Octets of a payload that nobody looks at: Flags, and Reserved.
_IGNORED = (*range(6, 8), *range(30, 32))


@pytest.mark.parametrize("at", range(68 + 16))
@pytest.mark.parametrize("bit", [0, 7])
def test_no_flipped_bit_of_a_raw_object_goes_unnoticed(at: int, bit: int) -> None:
    octets = bytearray(payload(TRACKS[0]))
    octets[at] ^= 1 << bit

    if at in _IGNORED:
        assert bytes(look(bytes(octets), TRACKS[0]).tensor) == bytes(range(16))
        return
    with pytest.raises(BadObject) as caught:
        look(bytes(octets), TRACKS[0])
    # Whoever looks step by step finds the same.
    with pytest.raises(BadObject) as slowly:
        look(octets, TRACKS[0])
    assert str(caught.value) == str(slowly.value)


@pytest.mark.parametrize(("layer", "block"), [(2, 2), (1, 3), (0, 2), (1, 1), (7, 9)])
def test_a_raw_object_is_good_in_its_own_place_alone(layer: int, block: int) -> None:
    examiner = Examiner(TRACKS[0], ENTRY, COMPAT, CodecRegistry())

    assert examiner.examine(payload(TRACKS[0]), 1, 2).octets == 16
    with pytest.raises(BadObject):
        examiner.examine(payload(TRACKS[0]), layer, block)


def test_where_nothing_was_promised_nothing_is_good() -> None:
    beyond = replace(ENTRY, blocks=2)
    fewer = replace(COMPAT, layers=1)

    for entry, descriptor in ((beyond, COMPAT), (ENTRY, fewer)):
        with pytest.raises(BadObject) as caught:
            Examiner(TRACKS[0], entry, descriptor, CodecRegistry()).examine(
                payload(TRACKS[0]), 1, 2
            )
        assert caught.value.reason is Rejection.OUT_OF_RANGE


def test_raw_data_are_bounded_as_well() -> None:
    with pytest.raises(BadObject) as caught:
        Examiner(TRACKS[0], ENTRY, COMPAT, CodecRegistry(), max_data_octets=15).examine(
            payload(TRACKS[0]), 1, 2
        )
    assert caught.value.reason is Rejection.LIMIT


# -- sealed ----------------------------------------------------------------------------------------


def opened(sealed: bytes, *, padding: Padding = "auto", track: DataTrack = TRACKS[0]) -> Any:
    scope = Scope(SCOPE, Protection(padding=padding))
    expected = Expectations.of_tokens(scope, COMPAT, TOKENS)
    return examine(
        sealed,
        track=track,
        layer=1,
        block=2,
        entry=ENTRY,
        descriptor=COMPAT,
        codecs=CodecRegistry(),
        opener=expected.opener(NAME.track(track)),
        cover=Cover(64, PROPERTIES),
    )


def sealed(octets: bytes, *, padded: bool = False) -> bytes:
    made = Sealing.of(Scope(SCOPE, Protection()))
    assert made is not None
    return made.track(NAME.track(TRACKS[0])).seal(Location(1, 2), 64, octets, padded=padded)


def test_a_sealed_object_is_opened_and_then_checked_like_any_other() -> None:
    found = opened(sealed(payload(TRACKS[0])))

    assert bytes(found.tensor) == bytes(range(16))
    assert found.digest == payload(TRACKS[0])[36:68]


def test_a_raw_object_is_sealed_to_the_length_that_it_must_have() -> None:
    octets = sealed(payload(TRACKS[0]), padded=True)

    with pytest.raises(BadObject, match="expected at most 104") as caught:
        opened(octets)
    assert caught.value.reason is Rejection.TOO_LONG
    assert opened(octets, padding="bucket").octets == 16


def test_the_scope_of_expectations_is_in_clear_where_a_key_alone_is_given() -> None:
    plain = Expectations.of_tokens(SCOPE, COMPAT, TOKENS)
    protected = Expectations.of_tokens(Scope(SCOPE, Protection()), COMPAT, TOKENS)

    assert (plain.protection, plain.sealing) == (None, None)
    assert protected.scope_key == plain.scope_key
    assert protected.block_keys == plain.block_keys
    assert protected.extended([1, 2, 3, 4]).protection == Protection()
    assert protected.going_on(1, KEYS[1:]).sealing is not None
