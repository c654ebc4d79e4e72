"""Object payloads: every octet of the header, every check, no copy of the data."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadObject
from kvcs.kvsp.codecs import RAW, CodecRegistry, Raw
from kvcs.kvsp.descriptor import Descriptor
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import (
    HEADER_OCTETS,
    MAX_DATA_OCTETS,
    Block,
    Component,
    Header,
    Rejection,
)

DATA = bytes(range(64))
BLOCK = Block(
    component=Component.K,
    layer=3,
    block_index=5,
    token_start=4 * 12,
    token_count=4,
    codec=0,
    data=DATA,
)

#: Name, first octet and length of each field; what a decoder says when it is wrong.
FIELDS: dict[str, tuple[int, int, Rejection | None]] = {
    "Magic": (0, 4, Rejection.MAGIC),
    "Version": (4, 1, Rejection.VERSION),
    "Component": (5, 1, Rejection.COMPONENT),
    # Ignored on receipt (KVCS Section 3.5).
    "Flags": (6, 2, None),
    "Layer": (8, 4, Rejection.LAYER),
    "Block Index": (12, 4, Rejection.BLOCK_INDEX),
    # Only the manifest tells (decision 7).
    "Token Start": (16, 8, None),
    "Token Count": (24, 4, None),
    "Codec": (28, 2, None),
    # Ignored on receipt.
    "Reserved": (30, 2, None),
    "Data Length": (32, 4, Rejection.LENGTH),
    "Data Digest": (36, 32, Rejection.DIGEST),
}
#: What the manifest makes of those that the decoder lets pass.
LATER: dict[str, Rejection | None] = {
    "Flags": None,
    "Token Start": Rejection.TOKEN_START,
    "Token Count": Rejection.TOKEN_COUNT,
    "Codec": Rejection.CODEC,
    "Reserved": None,
}
OCTETS = [
    pytest.param(name, start + i, id=f"{name} {i}")
    for name, (start, length, _) in FIELDS.items()
    for i in range(length)
]

DESCRIPTOR = Descriptor(
    model="m",
    revision="r",
    layers=4,
    block_tokens=4,
    dtype="float16",
    k_shape=(2, 4),
    v_shape=(1, 4),
)
TRACK = DataTrack(Component.K, "raw", 1)
ENTRY = SegmentEntry(
    segment=1,
    first_block=7,
    blocks=6,
    block_keys_sha256=bytes(32),
    tracks=(
        TRACK,
        DataTrack(Component.V, "raw", 1),
        DataTrack(Component.KV, "raw", 1),
        DataTrack(Component.K, "zip", 1),
        DataTrack(Component.V, "zip", 1),
    ),
)
ZIP = Raw(name="zip", value=0x8001, components=frozenset({Component.K}), fixed_length=False)
CODECS = CodecRegistry(ZIP)


def decode(payload: bytes | bytearray | memoryview, **where: int) -> Block:
    return Block.decode(payload, **{"group_id": 3, "object_id": 5, **where})


def test_the_fields_listed_here_are_the_whole_header() -> None:
    at = 0
    for start, length, _ in FIELDS.values():
        assert start == at
        at += length
    assert at == HEADER_OCTETS == 68


@pytest.mark.parametrize(("name", "octet"), OCTETS)
def test_a_flipped_octet_is_noticed_in_every_field_that_can_be_checked(
    name: str, octet: int
) -> None:
    payload = bytearray(BLOCK.encode())
    payload[octet] ^= 0xFF
    expected = FIELDS[name][2]

    if expected is None:
        decode(payload)
        return
    with pytest.raises(BadObject) as caught:
        decode(payload)
    # A length of 4 GiB is refused for its size, before it is compared with anything.
    allowed = {expected, Rejection.LIMIT} if name == "Data Length" else {expected}
    assert caught.value.reason in allowed


@pytest.mark.parametrize(("name", "octet"), [p for p in OCTETS if p.values[0] in LATER])
def test_what_the_decoder_lets_pass_the_manifest_catches_unless_it_is_ignored(
    name: str, octet: int
) -> None:
    payload = bytearray(BLOCK.encode())
    payload[octet] ^= 0xFF
    block = decode(payload)

    if LATER[name] is None:
        assert block == BLOCK
        block.check_against(ENTRY, DESCRIPTOR, TRACK, CODECS)
    else:
        with pytest.raises(BadObject) as caught:
            block.check_against(ENTRY, DESCRIPTOR, TRACK, CODECS)
        assert caught.value.reason is LATER[name]


@pytest.mark.parametrize("octet", range(len(DATA)))
def test_a_flipped_octet_of_the_data_is_noticed(octet: int) -> None:
    payload = bytearray(BLOCK.encode())
    payload[HEADER_OCTETS + octet] ^= 1

    with pytest.raises(BadObject) as caught:
        decode(payload)
    assert caught.value.reason is Rejection.DIGEST


@pytest.mark.parametrize("cut", range(HEADER_OCTETS + len(DATA)))
def test_a_payload_cut_anywhere_is_refused(cut: int) -> None:
    with pytest.raises(BadObject, match="octets") as caught:
        decode(BLOCK.encode()[:cut])
    assert caught.value.reason is Rejection.LENGTH


def test_octets_after_the_data_are_refused() -> None:
    with pytest.raises(BadObject, match="Data Length is 64, expected 65 octets") as caught:
        decode(BLOCK.encode() + b"x")
    assert caught.value.reason is Rejection.LENGTH


@pytest.mark.parametrize(
    ("where", "reason", "says"),
    [
        ({"group_id": 4}, Rejection.LAYER, "Layer is 3, expected the Group ID, 4"),
        ({"object_id": 6}, Rejection.BLOCK_INDEX, "Block Index is 5, expected the Object ID, 6"),
        ({"group_id": 2**62}, Rejection.LAYER, "Layer is 3"),
        ({"max_data": 63}, Rejection.LIMIT, "Data Length of 64 octets, limit 63"),
    ],
)
def test_a_block_that_is_not_where_it_belongs_is_refused(
    where: dict[str, int], reason: Rejection, says: str
) -> None:
    with pytest.raises(BadObject, match=says) as caught:
        decode(BLOCK.encode(), **where)
    assert caught.value.reason is reason


def test_the_limit_on_data_is_checked_before_the_length() -> None:
    header = bytearray(BLOCK.encode())
    header[32:36] = (MAX_DATA_OCTETS + 1).to_bytes(4, "big")

    with pytest.raises(BadObject, match="limit 67108864") as caught:
        decode(header)
    assert caught.value.reason is Rejection.LIMIT


def test_reasons_are_stable_words() -> None:
    assert {str(reason) for reason in Rejection} == {
        "magic",
        "version",
        "component",
        "layer",
        "block-index",
        "length",
        "limit",
        "digest",
        "codec",
        "token-count",
        "token-start",
        "out-of-range",
        "data-length",
        "decode",
        "unprotected",
        "protected",
        "key-id",
        "too-long",
        "tag",
        "plaintext",
    }


@given(
    st.builds(
        Block,
        component=st.sampled_from(Component),
        layer=st.integers(0, 2**32 - 1),
        block_index=st.integers(0, 2**32 - 1),
        token_start=st.integers(0, 2**64 - 1),
        token_count=st.integers(0, 2**32 - 1),
        codec=st.integers(0, 2**16 - 1),
        data=st.binary(max_size=50),
    )
)
def test_every_block_comes_back_as_it_was(block: Block) -> None:
    payload = block.encode()

    back = Block.decode(payload, group_id=block.layer, object_id=block.block_index)

    assert back == block
    assert back.digest == block.digest == sha256(block.data).digest()
    assert back.encode() == payload


@given(st.binary(max_size=200))
def test_only_bad_object_leaves_the_decoder(payload: bytes) -> None:
    with pytest.raises(BadObject):
        decode(payload)


@given(st.binary(max_size=40), st.integers(0, HEADER_OCTETS - 1))
def test_only_bad_object_leaves_the_decoder_for_damaged_headers(noise: bytes, at: int) -> None:
    payload = bytearray(BLOCK.encode())
    payload[at : at + len(noise)] = noise
    try:
        block = decode(payload)
        block.check_against(ENTRY, DESCRIPTOR, TRACK, CODECS)
    except BadObject:
        return
    assert block == BLOCK


def test_data_is_not_copied_on_the_way_out() -> None:
    buffer = bytearray(DATA)
    block = replace(BLOCK, data=memoryview(buffer))

    header, data = block.encode_parts()

    assert isinstance(data, memoryview)
    assert data.obj is buffer
    assert header + DATA == BLOCK.encode()
    assert block.header() == header


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_data_is_not_copied_on_the_way_in_and_is_read_only(kind: Any) -> None:
    payload = kind(BLOCK.encode())

    block = decode(payload)

    assert isinstance(block.data, memoryview)
    assert block.data.readonly
    assert block.data.obj is (payload.obj if kind is memoryview else payload)
    assert block == BLOCK


def test_views_of_wider_elements_are_counted_in_octets() -> None:
    block = replace(BLOCK, data=memoryview(DATA).cast("H"))

    assert decode(block.encode()) == BLOCK
    assert decode(memoryview(BLOCK.encode()).cast("H")) == BLOCK


@pytest.mark.parametrize(
    "changes",
    [{"layer": 2**32}, {"block_index": -1}, {"token_start": 2**64}, {"codec": 2**16}],
)
def test_a_field_that_does_not_fit_the_header_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not fit the header"):
        replace(BLOCK, **changes).encode()  # type: ignore[arg-type]


def test_the_text_of_a_block_does_not_show_its_data() -> None:
    assert "data" not in repr(BLOCK)
    assert "layer=3" in repr(BLOCK)


@pytest.mark.parametrize(
    ("changes", "track", "reason", "says"),
    [
        ({"component": Component.V}, TRACK, Rejection.COMPONENT, "Component is V, expected K"),
        ({}, ENTRY.tracks[2], Rejection.COMPONENT, "Component is K, expected KV"),
        ({"codec": 0x8001}, TRACK, Rejection.CODEC, "0x8001, expected 0x0000, 'raw'"),
        ({}, ENTRY.tracks[3], Rejection.CODEC, "0x0000, expected 0x8001, 'zip'"),
        (
            {"component": Component.V, "codec": 0x8001},
            ENTRY.tracks[4],
            Rejection.CODEC,
            "codec 'zip' of v.zip.s1 is not one for V",
        ),
        ({"layer": 4}, TRACK, Rejection.OUT_OF_RANGE, "Layer is 4, expected below 4"),
        ({"block_index": 6}, TRACK, Rejection.OUT_OF_RANGE, "Block Index is 6, expected below 6"),
        ({"token_count": 3}, TRACK, Rejection.TOKEN_COUNT, "Token Count is 3, expected 4"),
        ({"token_start": 20}, TRACK, Rejection.TOKEN_START, "Token Start is 20, expected 48"),
        ({"block_index": 4}, TRACK, Rejection.TOKEN_START, "Token Start is 48, expected 44"),
        ({"data": DATA[1:]}, TRACK, Rejection.DATA_LENGTH, "Data Length is 63, expected 64"),
        ({"data": b""}, TRACK, Rejection.DATA_LENGTH, "Data Length is 0, expected 64"),
    ],
)
def test_a_block_that_is_not_what_the_manifest_promises_is_refused(
    changes: dict[str, Any], track: DataTrack, reason: Rejection, says: str
) -> None:
    with pytest.raises(BadObject, match=says) as caught:
        replace(BLOCK, **changes).check_against(ENTRY, DESCRIPTOR, track, CODECS)
    assert caught.value.reason is reason


def test_a_codec_that_is_not_known_here_is_a_reason() -> None:
    with pytest.raises(BadObject, match=r"codec 'zip' of k\.zip\.s1 is not known here") as caught:
        replace(BLOCK, codec=0x8001).check_against(
            ENTRY, DESCRIPTOR, ENTRY.tracks[3], CodecRegistry()
        )
    assert caught.value.reason is Rejection.CODEC


@pytest.mark.parametrize(
    ("track", "codec", "octets"),
    [
        (ENTRY.tracks[0], RAW, 64),
        (ENTRY.tracks[1], RAW, 32),
        (ENTRY.tracks[2], RAW, 96),
        (ENTRY.tracks[3], ZIP, 1),
        (ENTRY.tracks[3], ZIP, 1000),
    ],
)
def test_what_the_manifest_promises_passes(track: DataTrack, codec: Raw, octets: int) -> None:
    block = replace(BLOCK, component=track.component, codec=codec.value, data=bytes(octets))

    block.check_against(ENTRY, DESCRIPTOR, track, CODECS)
    for layer in range(4):
        for index in range(6):
            replace(
                block, layer=layer, block_index=index, token_start=4 * (7 + index)
            ).check_against(ENTRY, DESCRIPTOR, track, CODECS)


def test_an_empty_section_is_an_object_without_data() -> None:
    descriptor = replace(DESCRIPTOR, v_shape=(0, 0))
    track = ENTRY.tracks[1]
    block = replace(BLOCK, component=Component.V, data=b"")

    decode(block.encode()).check_against(ENTRY, descriptor, track, CODECS)


def test_a_track_of_another_segment_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"k\.raw\.s0 is not a track of segment 1"):
        BLOCK.check_against(ENTRY, DESCRIPTOR, DataTrack(Component.K, "raw", 0), CODECS)


def test_a_header_is_read_unchecked_and_field_by_field() -> None:
    payload = bytearray(BLOCK.encode())
    for at, length, _ in FIELDS.values():
        payload[at : at + length] = bytes([at]) * length

    header = Header.read(payload)
    expected = [bytes([at]) * length for at, length, _ in FIELDS.values()]
    for found, octets in zip(header, expected, strict=True):
        assert found == (octets if isinstance(found, bytes) else int.from_bytes(octets, "big"))


def test_a_payload_without_a_whole_header_has_none() -> None:
    with pytest.raises(BadObject, match="67 octets, expected at least the 68") as caught:
        Header.read(BLOCK.encode()[:67])

    assert caught.value.reason is Rejection.LENGTH
