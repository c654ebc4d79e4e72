"""Sealing against values that other programs computed, those of the draft among them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcs.errors import UNOPENED, BadObject
from kvcs.kvsp.keys import ScopeKey
from kvcs.trust.scope import Protection, Scope, Suite
from kvcs.trust.sealing import (
    IMMUTABLE,
    PROPERTIES,
    Cover,
    SealedTrack,
    Sealing,
    additional_data,
    sealed_octets,
)
from moqt.codepoints import PropertyType
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.pairs import Pairs, encode_pairs
from moqt.wire.writer import Writer

ALL: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "vectors" / "trust.json").read_text(encoding="utf-8")
)["secure_objects"]
SECTIONS = ("seal", "discard", "also_accept", "published")
#: Longer than anything in the file.
ANY_LENGTH = 1 << 16


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


def sealing(suite: int) -> Sealing:
    scope = Scope(ScopeKey(octets(ALL["scope_key"])), Protection(Suite(suite)))
    made = Sealing.of(scope)
    assert made is not None
    return made


def track_name(case: dict[str, Any]) -> FullTrackName:
    fields = [octets(field) for field in ALL["namespace"]]
    if "publication_id" in case:
        fields[-1] = octets(case["publication_id"])
    return FullTrackName(TrackNamespace(tuple(fields)), case["track"].encode())


def location(case: dict[str, Any]) -> Location:
    return Location(case["group_id"], case["object_id"])


def properties(immutable: bytes) -> Pairs:
    return ((PropertyType.IMMUTABLE_PROPERTIES, immutable),) if immutable else ()


def changed(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case of ``discard`` or ``also_accept``: one that is good, and what differs."""
    [base] = [one for one in ALL["seal"] if one["name"] == case["base"]]
    default = {"immutable_properties": ALL["immutable_properties"]}
    found: dict[str, Any] = base | default | case
    return found


def opened(case: dict[str, Any]) -> bytes:
    immutable = octets(case.get("immutable_properties", ALL["immutable_properties"]))
    return bytes(
        sealing(case["cipher_suite"])
        .track(track_name(case))
        .open(
            location(case),
            Cover(case["publisher_priority"], properties(immutable)),
            octets(case["ciphertext"]),
            ANY_LENGTH,
        )
    )


def test_the_file_holds_what_is_checked_here_and_nothing_else() -> None:
    assert set(SECTIONS) < set(ALL)
    assert [len(ALL[section]) for section in SECTIONS] == [6, 20, 4, 2]
    assert set(ALL) - set(SECTIONS) == {
        "scope_key", "namespace", "track_base_key",
        "immutable_properties", "object_properties",
    }  # fmt: skip


def test_a_sealed_object_has_the_properties_of_the_vectors() -> None:
    assert octets(ALL["immutable_properties"]) == IMMUTABLE
    assert octets(ALL["object_properties"]) == encode_pairs(PROPERTIES)


@pytest.mark.parametrize("case", ALL["seal"], ids=lambda case: case["name"])
def test_an_object_is_sealed_as_in_the_vector(case: dict[str, Any]) -> None:
    name, at, priority = track_name(case), location(case), case["publisher_priority"]
    scope = sealing(case["cipher_suite"])
    key, payload = scope.key(name), octets(case["payload"])
    writer = Writer()
    writer.full_track_name(name)
    track = SealedTrack(key)

    sealed = track.seal(at, priority, payload[:7], payload[7:], padded=case["padding"])

    assert writer.getvalue() == octets(case["full_track_name"])
    assert scope._secret == octets(case["moq_secret"])
    assert (key.key, key.salt) == (octets(case["moq_key"]), octets(case["moq_salt"]))
    assert track._nonce(at) == octets(case["nonce"])
    assert additional_data(at, priority, IMMUTABLE) == octets(case["aad"])
    assert sealed == octets(case["ciphertext"])
    assert len(sealed) == sealed_octets(len(payload), padded=case["padding"])


@pytest.mark.parametrize("case", ALL["seal"], ids=lambda case: case["name"])
def test_an_object_is_opened_as_in_the_vector(case: dict[str, Any]) -> None:
    assert opened(case) == octets(case["payload"])


@pytest.mark.parametrize("case", ALL["also_accept"], ids=lambda case: case["name"])
def test_what_others_may_send_is_opened(case: dict[str, Any]) -> None:
    assert opened(changed(case)) == octets(changed(case)["payload"])


@pytest.mark.parametrize("case", ALL["discard"], ids=lambda case: case["name"])
def test_what_is_to_be_discarded_is_not_opened(case: dict[str, Any]) -> None:
    with pytest.raises(BadObject) as caught:
        opened(changed(case))

    assert caught.value.reason in UNOPENED


@pytest.mark.parametrize("case", ALL["published"], ids=lambda case: f"suite {case['cipher_suite']}")
def test_keys_and_cipher_are_those_of_the_draft(case: dict[str, Any]) -> None:
    namespace = TrackNamespace(tuple(octets(field) for field in case["namespace"]))
    name = FullTrackName(namespace, octets(case["name"]))
    scope = Sealing(
        octets(case["track_base_key"]), Suite(case["cipher_suite"]), key_id=case["key_id"]
    )
    key, aad, at = scope.key(name), octets(case["aad"]), location(case)
    track = SealedTrack(key)

    assert scope._secret == octets(case["moq_secret"])
    assert (key.key, key.salt) == (octets(case["moq_key"]), octets(case["moq_salt"]))
    assert track._nonce(at) == octets(case["nonce"])
    assert track._nonce(Location(2**64 - 1, 2**32 - 1)) == octets(
        case.get("nonce_of_largest_ids", track._nonce(Location(2**64 - 1, 2**32 - 1)).hex())
    )
    assert additional_data(at, case["publisher_priority"], aad[13:]) == aad
    sealed = track._aead.encrypt(track._nonce(at), octets(case["plaintext"]), aad)
    assert sealed == octets(case["ciphertext"])
