"""What is sealed is opened in its place by members of the scope, and by nobody and nowhere else."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import UNOPENED, BadObject, ConfigError, Rejection
from kvcs.kvsp.keys import ScopeKey
from kvcs.trust import sealing
from kvcs.trust.scope import Padding, Protection, Scope, Suite
from kvcs.trust.sealing import (
    BARE,
    IMMUTABLE,
    IN_CLEAR,
    PROPERTIES,
    Cover,
    SealedTrack,
    Sealing,
    is_sealed,
    opener,
    opener_with,
    sealed_octets,
)
from kvcs.trust.unopened import Unopened
from moqt.codepoints import PropertyType
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.wire.pairs import Pairs

NAME = FullTrackName.of(b"kvcs-1", bytes(32), bytes(32), bytes(32), bytes(16), b"k.raw.s0")
OTHER = FullTrackName.of(b"kvcs-1", bytes(32), bytes(32), bytes(32), bytes(16), b"v.raw.s0")
AT, COVER = Location(3, 5), Cover(7, PROPERTIES)
LONG = 1 << 20

payloads = st.binary(max_size=300)
locations = st.builds(Location, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))


def made(
    suite: Suite = Suite.AES_128_GCM_SHA256_128, padding: Padding = "auto", secret: int = 0
) -> Sealing:
    found = Sealing.of(Scope(ScopeKey(bytes([secret]) * 32), Protection(suite, padding)))
    assert found is not None
    return found


def track(**others: Any) -> SealedTrack:
    return made(**others).track(NAME)


def reason(of: SealedTrack, payload: bytes, at: Location = AT, cover: Cover = COVER) -> Rejection:
    with pytest.raises(BadObject) as caught:
        of.open(at, cover, payload, LONG)
    return caught.value.reason


@given(locations, st.integers(0, 255), payloads, st.booleans(), st.sampled_from(Suite))
def test_what_is_sealed_is_opened_where_it_was_sealed_for(
    at: Location, priority: int, payload: bytes, padded: bool, suite: Suite
) -> None:
    sealed = track(suite=suite).seal(at, priority, payload, padded=padded)

    assert len(sealed) == sealed_octets(len(payload), padded=padded)
    assert track(suite=suite).open(at, Cover(priority, PROPERTIES), sealed, len(sealed)) == payload


@given(payloads, st.data())
def test_no_octet_can_be_changed(payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(track().seal(AT, COVER.priority, payload))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))

    assert reason(track(), bytes(sealed)) is Rejection.TAG


@given(locations, st.integers(0, 255))
def test_it_is_opened_nowhere_else(at: Location, priority: int) -> None:
    sealed = track().seal(AT, COVER.priority, b"payload")

    if (at, priority) != (AT, COVER.priority):
        assert reason(track(), sealed, at, Cover(priority, PROPERTIES)) is Rejection.TAG


def test_others_cannot_open_it() -> None:
    sealed = track().seal(AT, COVER.priority, b"payload")

    assert reason(made().track(OTHER), sealed) is Rejection.TAG
    assert reason(track(secret=1), sealed) is Rejection.TAG
    assert reason(track(suite=Suite.AES_256_GCM_SHA512_128), sealed) is Rejection.TAG


@given(st.binary(max_size=200), locations)
def test_whatever_comes_is_opened_or_counts_as_missing(payload: bytes, at: Location) -> None:
    with pytest.raises(BadObject) as caught:
        track().open(at, COVER, payload, LONG)
    assert caught.value.reason in UNOPENED


@given(st.binary(max_size=40))
def test_whatever_a_member_sealed_is_a_payload_or_counts_as_missing(plaintext: bytes) -> None:
    mine = track()
    aad = sealing.additional_data(AT, COVER.priority, IMMUTABLE)
    sealed = mine._aead.encrypt(mine._nonce(AT), plaintext, aad)

    try:
        found = bytes(mine.open(AT, COVER, sealed, LONG))
    except BadObject:
        assert reason(mine, sealed) is Rejection.PLAINTEXT
    else:
        assert found in plaintext


@given(st.binary(max_size=12))
def test_whatever_the_properties_say_it_is_opened_or_counts_as_missing(immutable: bytes) -> None:
    properties: Pairs = ((PropertyType.IMMUTABLE_PROPERTIES, immutable),)
    sealed = track().seal(AT, COVER.priority, b"payload")

    if immutable != IMMUTABLE:
        found = reason(track(), sealed, cover=Cover(COVER.priority, properties))
        assert found in UNOPENED


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ((), Rejection.UNPROTECTED),
        (((PropertyType.MAX_CACHE_DURATION, 5),), Rejection.UNPROTECTED),
        (((PropertyType.IMMUTABLE_PROPERTIES, b""),), Rejection.UNPROTECTED),
        (((PropertyType.IMMUTABLE_PROPERTIES, b"\x02\x01"),), Rejection.KEY_ID),
        (((PropertyType.IMMUTABLE_PROPERTIES, b"\x02\x00\x00\x00"),), Rejection.KEY_ID),
        (((PropertyType.IMMUTABLE_PROPERTIES, b"\x02"),), Rejection.KEY_ID),
        (PROPERTIES * 2, Rejection.KEY_ID),
    ],
)
def test_it_says_that_it_is_sealed_with_the_key_of_the_scope(
    properties: Pairs, why: Rejection
) -> None:
    sealed = track().seal(AT, COVER.priority, b"payload")

    assert reason(track(), sealed, cover=Cover(COVER.priority, properties)) is why


def test_mutable_properties_that_a_relay_adds_change_nothing() -> None:
    sealed = track().seal(AT, COVER.priority, b"payload")
    more = (*PROPERTIES, (PropertyType.PRIOR_OBJECT_ID_GAP, 2))

    assert track().open(AT, Cover(COVER.priority, more), sealed, LONG) == b"payload"


def test_what_is_longer_than_it_can_be_is_not_opened() -> None:
    sealed = track().seal(AT, COVER.priority, b"payload")

    with pytest.raises(BadObject, match="27 octets sealed, expected at most 26") as caught:
        track().open(AT, COVER, sealed, 26)
    assert caught.value.reason is Rejection.TOO_LONG


@given(st.integers(0, 1 << 26))
def test_a_bucket_is_at_most_an_eighth_larger_and_holds_many_lengths(octets: int) -> None:
    padded = sealed_octets(octets, padded=True)

    assert octets + 31 <= padded <= (octets + 15) * 1.12 + 32
    assert sealed_octets(padded - 31, padded=True) == padded


def test_objects_of_similar_lengths_cannot_be_told_apart() -> None:
    lengths = {sealed_octets(octets, padded=True) for octets in range(30_000, 34_000)}

    assert len(lengths) <= 5


@pytest.mark.parametrize(
    ("padding", "fixed", "variable"),
    [("auto", False, True), ("none", False, False), ("bucket", True, True)],
)
def test_what_is_padded_is_a_matter_of_the_scope(
    padding: Padding, fixed: bool, variable: bool
) -> None:
    mine = track(padding=padding)

    assert mine.pads(fixed_length=True) is fixed
    assert mine.pads(fixed_length=False) is variable
    assert mine.longest(1000, fixed_length=True) == sealed_octets(1000, padded=fixed)


def test_nothing_is_sealed_for_a_place_whose_nonce_would_be_that_of_another() -> None:
    with pytest.raises(ValueError, match="Object ID 4294967296, limit 4294967295"):
        track().seal(Location(0, 1 << 32), 0, b"payload")


@given(locations, locations)
def test_no_two_places_have_the_same_nonce(one: Location, other: Location) -> None:
    mine = track()

    assert (mine._nonce(one) == mine._nonce(other)) is (one == other)


def test_a_place_is_sealed_to_the_same_octets_each_time() -> None:
    assert track().seal(AT, 0, b"pay", b"load") == track().seal(AT, 0, b"payload")


def test_no_more_is_sealed_under_one_key_than_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_CIPHER_BLOCKS", 10)
    mine = track()
    mine.seal(Location(0, 0), 0, bytes(60))  # four blocks, and one for the tag
    mine.seal(Location(0, 1), 0, bytes(60))

    with pytest.raises(ConfigError, match=r"12 blocks of 16 octets .* limit 10"):
        mine.seal(Location(0, 2), 0, b"")


def test_the_key_of_a_track_is_all_that_another_process_needs_and_is_in_no_text() -> None:
    key = made().key(NAME)
    sealed = track().seal(AT, COVER.priority, b"payload")

    there = pickle.loads(pickle.dumps(key))

    assert opener_with(there).open(AT, COVER, sealed, LONG) == b"payload"
    assert key.key.hex() not in repr(key)
    assert repr(key.key) not in repr(key)
    assert repr(key.salt) not in repr(key)


def test_a_scope_in_clear_takes_nothing_that_is_sealed_and_the_rest_as_it_is() -> None:
    mine = opener(Sealing.of(Scope(ScopeKey(bytes(32)))), NAME)

    assert mine is IN_CLEAR is opener_with(None)
    assert mine.open(AT, BARE, b"payload", 0) == b"payload"
    assert mine.longest(1000, fixed_length=False) == 1000
    with pytest.raises(BadObject) as caught:
        mine.open(AT, COVER, b"payload", LONG)
    assert caught.value.reason is Rejection.PROTECTED


def test_whether_an_object_is_sealed_is_told_by_its_properties() -> None:
    other_key: Pairs = ((PropertyType.IMMUTABLE_PROPERTIES, b"\x02\x07"),)

    assert is_sealed(PROPERTIES)
    assert is_sealed(other_key)
    assert not is_sealed(())
    assert not is_sealed(((PropertyType.IMMUTABLE_PROPERTIES, b"\x02"),))
    assert not is_sealed(((2, 0),))


@given(locations, st.binary(min_size=32, max_size=32))
def test_a_digest_is_hidden_and_found_again(at: Location, digest: bytes) -> None:
    mask = made().mask(NAME)

    assert mask(at, mask(at, digest)) == digest
    assert mask(at, digest) != digest
    assert mask(at, digest) != made().mask(OTHER)(at, digest)
    assert mask(at, digest) != mask(Location(at.group, at.object ^ 1), digest)


def test_a_digest_that_begins_with_zeros_stays_as_long_as_it_is() -> None:
    mask = made().mask(NAME)

    assert mask(AT, mask(AT, bytes(32))) == bytes(32)


def test_what_could_not_be_opened_is_counted_and_seldom_worth_a_line() -> None:
    unopened = Unopened()
    why, other = BadObject(Rejection.TAG, ""), BadObject(Rejection.UNPROTECTED, "")

    told = [unopened.note(why) for _ in range(1200)] + [unopened.note(other)]

    assert [count for count in told if count is not None] == [1, 10, 100, 1000, 1]
    assert str(unopened) == "1200 tag, 1 unprotected"
    with pytest.raises(ValueError, match="digest"):
        unopened.note(BadObject(Rejection.DIGEST, ""))
