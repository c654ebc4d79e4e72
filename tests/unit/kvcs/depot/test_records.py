"""Records: what may come in, and how every change of it is noticed later."""

from typing import Any

import pytest

from kvcs.depot.records import DeclaredCodecs, TrackNote, examine, is_intact, seal
from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component
from kvcs.kvsp.standard import standard_codecs
from kvcs.profile.manifest import CodecEntry, SegmentEntry
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, DataTrack
from kvcs.profile.payload import HEADER_OCTETS, Block
from kvcs.trust.scope import Suite
from kvcs.trust.sealing import BARE, Cover, Sealing
from kvcs.trust.sealing import PROPERTIES as SEALED
from moqt.location import Location
from moqt.names import FullTrackName

COMPAT = Descriptor(
    model="m", revision="r", layers=3, block_tokens=4, dtype="float16",
    k_shape=(1, 2), v_shape=(1, 2),
)  # fmt: skip
AT = Location(1, 0)
PROPERTIES = ((2, 7),)


def block(codec: int = 0, octets: int = 16, component: Component = Component.K) -> bytes:
    return Block(component, AT.group, AT.object, 0, 4, codec, bytes(range(octets))).encode()


def entry(track: DataTrack, listed: bytes | None = None) -> SegmentEntry:
    groups = () if listed is None else (b"0" * 32, listed)
    return SegmentEntry(
        segment=0, first_block=0, blocks=1, block_keys_sha256=b"k" * 32, tracks=(track,),
        object_digests={track: groups},
    )  # fmt: skip


@pytest.mark.parametrize("track", [b"k.raw.s0", MANIFEST, MANIFEST_COSE])
def test_no_flipped_octet_goes_unnoticed_reserved_ones_included(track: bytes) -> None:
    payload = block()
    sealed = seal(track, AT, 5, PROPERTIES, payload)
    assert is_intact(track, AT, 5, PROPERTIES, payload, sealed)

    for octet in range(len(payload)):
        changed = bytearray(payload)
        changed[octet] ^= 0x80
        assert not is_intact(track, AT, 5, PROPERTIES, bytes(changed), sealed), octet


@pytest.mark.parametrize("octets", [0, 1, HEADER_OCTETS - 1, HEADER_OCTETS])
def test_what_was_cut_is_not_intact(octets: int) -> None:
    payload = block()

    sealed = seal(b"k.raw.s0", AT, 5, PROPERTIES, payload)
    assert not is_intact(b"k.raw.s0", AT, 5, PROPERTIES, payload[:octets], sealed)


@pytest.mark.parametrize("track", [b"k.raw.s0", MANIFEST])
def test_what_goes_with_an_object_is_sealed_too(track: bytes) -> None:
    payload = block()
    sealed = seal(track, AT, 5, PROPERTIES, payload)

    assert not is_intact(b"k.raw.s1", AT, 5, PROPERTIES, payload, sealed)
    assert not is_intact(track, Location(1, 1), 5, PROPERTIES, payload, sealed)
    assert not is_intact(track, AT, 6, PROPERTIES, payload, sealed)
    assert not is_intact(track, AT, 5, ((2, 8),), payload, sealed)
    assert not is_intact(track, AT, 5, (), payload, sealed)


def test_a_good_object_is_taken_and_its_digest_told() -> None:
    track, payload = DataTrack.parse("k.raw.s0"), block()
    digest = payload[36:68]
    for listed in (None, digest):
        found = examine(
            track, AT, payload, entry=entry(track, listed), descriptor=COMPAT,
            codecs=standard_codecs(),
        )  # fmt: skip
        assert found == digest


@pytest.mark.parametrize(
    ("payload", "listed", "reason"),
    [
        (block(octets=14), None, Rejection.DATA_LENGTH),
        (block(component=Component.V), None, Rejection.COMPONENT),
        (block(codec=2), None, Rejection.CODEC),
        (block()[:-1] + b"x", None, Rejection.DIGEST),
        (block(), b"x" * 32, Rejection.DIGEST),
        (b"KVO1", None, Rejection.LENGTH),
    ],
)
def test_what_fails_a_check_is_not_kept(
    payload: bytes, listed: bytes | None, reason: Rejection
) -> None:
    track = DataTrack.parse("k.raw.s0")
    with pytest.raises(BadObject) as caught:
        examine(
            track, AT, payload, entry=entry(track, listed), descriptor=COMPAT,
            codecs=standard_codecs(),
        )  # fmt: skip
    assert caught.value.reason is reason


def test_a_codec_that_nobody_here_knows_is_taken_at_the_manifests_word() -> None:
    track = DataTrack.parse("k.secret.s0")
    codecs = DeclaredCodecs(standard_codecs(), {"secret": CodecEntry(value=0x8123, lossless=True)})
    arguments = {"entry": entry(track), "descriptor": COMPAT, "codecs": codecs}

    examine(track, AT, block(codec=0x8123, octets=3), **arguments)  # type: ignore[arg-type]
    with pytest.raises(BadObject, match="Codec is 0x8124"):
        examine(track, AT, block(codec=0x8124), **arguments)  # type: ignore[arg-type]


def test_a_declaration_does_not_change_a_codec_that_is_known() -> None:
    known = standard_codecs()
    codecs = DeclaredCodecs(known, {"raw": CodecEntry(value=9, lossless=False)})

    assert codecs.get("raw") is known.get("raw")
    assert codecs.get("nobody-declared-it") is None


def test_what_is_known_of_a_track_is_put_together() -> None:
    early = TrackNote(largest=Location(2, 1))
    late = TrackNote(4, 2, ((2, 1),), Location(1, 0))

    assert early.merged(late) == TrackNote(4, 2, ((2, 1),), Location(2, 1))
    assert late.merged(early) == TrackNote(4, 2, ((2, 1),), Location(2, 1))


# -- sealed by their producer ----------------------------------------------------------------------

SEALING = Sealing(bytes(32), Suite.AES_128_GCM_SHA256_128)
NAME = FullTrackName.of(b"kvcs-1", bytes(32), bytes(32), bytes(32), bytes(16), b"k.raw.s0")
K0 = DataTrack.parse("k.raw.s0")


def test_no_flipped_octet_of_what_is_kept_sealed_goes_unnoticed_without_a_key() -> None:
    payload = SEALING.track(NAME).seal(AT, 5, block())
    sealed = seal(b"k.raw.s0", AT, 5, SEALED, payload)
    assert is_intact(b"k.raw.s0", AT, 5, SEALED, payload, sealed)

    for octet in range(len(payload)):
        changed = bytearray(payload)
        changed[octet] ^= 0x80
        assert not is_intact(b"k.raw.s0", AT, 5, SEALED, bytes(changed), sealed), octet
    assert not is_intact(b"k.raw.s0", AT, 5, (), payload, sealed)


def test_what_is_sealed_is_opened_before_it_is_examined() -> None:
    payload = block()
    track = SEALING.track(NAME)
    known: dict[str, Any] = {
        "entry": entry(K0), "descriptor": COMPAT, "codecs": standard_codecs(), "opener": track,
    }  # fmt: skip

    found = examine(K0, AT, track.seal(AT, 5, payload), **known, cover=Cover(5, SEALED))
    assert found == payload[36:68]
    for cover, reason in ((Cover(6, SEALED), Rejection.TAG), (BARE, Rejection.UNPROTECTED)):
        with pytest.raises(BadObject) as caught:
            examine(K0, AT, track.seal(AT, 5, payload), **known, cover=cover)
        assert caught.value.reason is reason
