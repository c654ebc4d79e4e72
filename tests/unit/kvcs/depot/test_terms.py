"""Terms: which manifests a store takes that knows the scope and no prompt."""

from dataclasses import replace

import pytest

from kvcs.depot.archive import MAX_GROUP_ID
from kvcs.depot.terms import Terms
from kvcs.errors import BadManifest
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.manifest import Manifest, ManifestLimits
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE, PublicationName
from kvcs.profile.signing import ProducerKey, sign_manifest

SCOPE = ScopeKey(bytes(range(32)))
COMPAT = Descriptor(
    model="m", revision="r", layers=3, block_tokens=4, dtype="float16",
    k_shape=(1, 2), v_shape=(1, 2),
)  # fmt: skip
NAME = PublicationName(SCOPE.scope_id, SCOPE.compatibility_id(COMPAT), b"a" * 32, b"p" * 16)
GOOD = Manifest(compat=COMPAT, publication=NAME.publication_id, anchor=NAME.anchor_key, version=2)
TERMS = Terms(scope_key=SCOPE)
MINE, THEIRS = ProducerKey.generate(), ProducerKey.generate()
TRUSTING = Terms(scope_key=SCOPE, trusted={MINE.kid: MINE.public_key})


@pytest.mark.parametrize("terms", [TERMS, TRUSTING])
def test_a_good_one_is_taken_plain_or_signed(terms: Terms) -> None:
    text = GOOD.to_json()

    assert terms.read_manifest(MANIFEST, text, NAME, 2) == GOOD
    assert terms.read_manifest(MANIFEST_COSE, sign_manifest(text, MINE), NAME, 2) == GOOD


def test_whose_signature_it_has_counts_only_for_who_was_told_whom_to_believe() -> None:
    signed = sign_manifest(GOOD.to_json(), THEIRS)

    assert TERMS.read_manifest(MANIFEST_COSE, signed, NAME, 2) == GOOD
    with pytest.raises(BadManifest):
        TRUSTING.read_manifest(MANIFEST_COSE, signed, NAME, 2)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replace(GOOD, publication=b"q" * 16), "manifest of publication"),
        (replace(GOOD, anchor=b"b" * 32), "manifest of anchor"),
        (replace(GOOD, version=3), "manifest of version 3, expected 2"),
        (replace(GOOD, compat=replace(COMPAT, model="other")), "compat has the ID"),
    ],
)
def test_one_that_is_of_something_else_is_refused(found: Manifest, reason: str) -> None:
    with pytest.raises(BadManifest, match=reason):
        TERMS.read_manifest(MANIFEST, found.to_json(), NAME, 2)


@pytest.mark.parametrize("payload", [b"", b"{", b"\x84", b"[]"])
@pytest.mark.parametrize("track", [MANIFEST, MANIFEST_COSE])
def test_what_is_no_manifest_is_refused(track: bytes, payload: bytes) -> None:
    with pytest.raises(BadManifest):
        TERMS.read_manifest(track, payload, NAME, 2)


def test_limits_hold() -> None:
    tight = replace(TERMS, limits=ManifestLimits(octets=100))

    with pytest.raises(BadManifest, match="limit 100"):
        tight.read_manifest(MANIFEST, GOOD.to_json(), NAME, 2)
    with pytest.raises(BadManifest, match=f"limit {MAX_GROUP_ID}"):
        TERMS.read_manifest(MANIFEST, GOOD.to_json(), NAME, MAX_GROUP_ID + 1)
