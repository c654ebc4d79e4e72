"""Namespaces, track names and priorities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadName
from kvcs.profile.naming import (
    END_OF_TRACK_PRIORITY,
    MANIFEST,
    MANIFEST_COSE,
    MAX_SEGMENT,
    Component,
    DataTrack,
    PublicationName,
    new_publication_id,
    publisher_priority,
    short_hex,
)
from moqt.names import FullTrackName, TrackNamespace

NAME = PublicationName(b"s" * 32, b"c" * 32, b"a" * 32, b"p" * 16)
CODEC_NAMES = st.text("az09-", min_size=1, max_size=32)


def test_a_namespace_has_five_raw_fields_in_the_drafts_order() -> None:
    assert NAME.namespace == TrackNamespace((b"kvcs-1", b"s" * 32, b"c" * 32, b"a" * 32, b"p" * 16))
    assert NAME.prefix == TrackNamespace(NAME.namespace.fields[:4])
    assert NAME.scope_prefix == TrackNamespace(NAME.namespace.fields[:2])


@given(*(st.binary(min_size=n, max_size=n) for n in (32, 32, 32, 16)))
def test_names_and_namespaces_turn_into_each_other(
    scope: bytes, compatibility: bytes, anchor: bytes, publication: bytes
) -> None:
    name = PublicationName(scope, compatibility, anchor, publication)

    assert PublicationName.from_namespace(name.namespace) == name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ((), "0 fields, expected 5"),
        (NAME.prefix.fields, "4 fields, expected 5"),
        ((*NAME.namespace.fields, b"x"), "6 fields, expected 5"),
        ((b"kvcs-2", *NAME.namespace.fields[1:]), "begins with b'kvcs-2'"),
        ((b"KVCS-1", *NAME.namespace.fields[1:]), "begins with b'KVCS-1'"),
        ((b"kvcs-1", b"s" * 31, *NAME.namespace.fields[2:]), "Scope ID of 31 octets"),
        ((*NAME.namespace.fields[:2], b"c" * 64, b"a" * 32, b"p" * 16), "Compatibility ID of 64"),
        ((*NAME.namespace.fields[:3], b"a", b"p" * 16), "Anchor Key of 1 octets, expected 32"),
        ((*NAME.namespace.fields[:4], b"p" * 15), "Publication ID of 15 octets, expected 16"),
        ((*NAME.namespace.fields[:4], b"p" * 17), "Publication ID of 17 octets, expected 16"),
    ],
)
def test_any_other_namespace_is_refused_and_says_why(fields: tuple[bytes, ...], says: str) -> None:
    with pytest.raises(BadName, match=says):
        PublicationName.from_namespace(TrackNamespace(fields))


def test_logs_see_eight_digits_of_each_identifier() -> None:
    assert str(NAME) == "kvcs-1/73737373/63636363/61616161/70707070"
    assert short_hex(bytes.fromhex("00ff10203040")) == "00ff1020"


def test_tracks_of_a_publication_have_full_names() -> None:
    track = DataTrack(Component.K, "raw", 0)

    assert NAME.track(track) == FullTrackName(NAME.namespace, b"k.raw.s0")
    assert NAME.track(MANIFEST) == FullTrackName(NAME.namespace, b"manifest")
    assert NAME.track(MANIFEST_COSE).name == b"manifest.cose"


@pytest.mark.parametrize(
    ("name", "track"),
    [
        (b"k.raw.s0", DataTrack(Component.K, "raw", 0)),
        (b"v.raw.s10", DataTrack(Component.V, "raw", 10)),
        (b"kv.my-codec-2.s7", DataTrack(Component.KV, "my-codec-2", 7)),
        (b"kv.-.s4294967295", DataTrack(Component.KV, "-", MAX_SEGMENT)),
        (b"k." + b"z" * 32 + b".s1", DataTrack(Component.K, "z" * 32, 1)),
    ],
)
def test_track_names_follow_the_grammar_both_ways(name: bytes, track: DataTrack) -> None:
    assert DataTrack.parse(name) == DataTrack.parse(name.decode()) == track
    assert track.name == name


@given(st.sampled_from(Component), CODEC_NAMES, st.integers(0, 20) | st.integers(0, MAX_SEGMENT))
def test_every_track_that_can_be_made_can_be_read(
    component: Component, codec: str, segment: int
) -> None:
    track = DataTrack(component, codec, segment)

    assert DataTrack.parse(track.name) == track


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"manifest",
        b"manifest.cose",
        b"k.raw.s",
        b"k.raw.s00",
        b"k.raw.s01",
        b"k.raw.s-1",
        b"k.raw.s+1",
        b"k.raw.0",
        b"k.raw.S0",
        b"K.raw.s0",
        b"k.Raw.s0",
        b"k..s0",
        b"k." + b"z" * 33 + b".s0",
        b"vk.raw.s0",
        b"q.raw.s0",
        b"k.raw.s0 ",
        b"k.raw.s0\n",
        b" k.raw.s0",
        b"k.raw.s0.s0",
        b"k.r_w.s0",
        b"k.raw.s4294967296",
        b"k.raw.s" + b"9" * 5000,
        b"k.raw.s1\x00",
        "k.raw.s\u0661".encode(),
        "k.räw.s0".encode(),
    ],
)
def test_anything_else_is_not_a_data_track(name: bytes) -> None:
    with pytest.raises(BadName):
        DataTrack.parse(name)


@pytest.mark.parametrize("name", ["k.raw.s\u0661", "\ud800", "k.raw.s\u00b2"])
def test_text_beyond_ascii_is_not_a_data_track(name: str) -> None:
    with pytest.raises(BadName, match="not the name of a data track"):
        DataTrack.parse(name)


@given(st.binary(max_size=40) | st.text("kv.s019raw-\n", max_size=12).map(str.encode))
def test_what_is_read_is_written_back_octet_for_octet(name: bytes) -> None:
    try:
        track = DataTrack.parse(name)
    except BadName:
        return
    assert track.name == name


@pytest.mark.parametrize(("codec", "segment"), [("", 0), ("A", 0), ("raw", -1), ("raw", 2**32)])
def test_a_track_the_grammar_cannot_express_cannot_be_made(codec: str, segment: int) -> None:
    with pytest.raises(BadName):
        DataTrack(Component.K, codec, segment)


@pytest.mark.parametrize(
    ("layer", "layers", "priority"),
    [(0, 1, 0), (0, 32, 0), (1, 32, 4), (31, 32, 124), (60, 61, 125), (79, 80, 126), (1, 2, 64)],
)
def test_priorities_are_those_of_the_formula(layer: int, layers: int, priority: int) -> None:
    assert publisher_priority(layer, layers) == priority


@given(st.integers(1, 65_535))
def test_earlier_layers_are_never_less_urgent_and_the_end_of_track_comes_last(layers: int) -> None:
    sample = [publisher_priority(g, layers) for g in range(0, layers, max(1, layers // 50))]

    assert sample == sorted(sample)
    assert publisher_priority(layers - 1, layers) < END_OF_TRACK_PRIORITY


@pytest.mark.parametrize(("layer", "layers"), [(-1, 4), (4, 4), (0, 0)])
def test_a_layer_the_model_does_not_have_has_no_priority(layer: int, layers: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer} of {layers}"):
        publisher_priority(layer, layers)


def test_publication_ids_are_sixteen_octets_and_never_the_same() -> None:
    drawn = {new_publication_id() for _ in range(100)}

    assert len(drawn) == 100
    assert {len(octets) for octets in drawn} == {16}
