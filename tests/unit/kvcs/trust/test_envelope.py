"""The COSE envelope: which ones are opened, and what is signed in them."""

from dataclasses import replace
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.trust.cbor import BadCbor
from kvcs.trust.envelope import (
    Kind,
    Rules,
    open_envelope,
    seal_envelope,
    to_be_signed,
)
from tests.unit.kvcs.trust.vectors import ALL, TOKENS

TOKEN = Rules(
    kinds=(Kind.SIGN1, Kind.MAC0),
    header_octets=1024,
    payload_octets=8192,
    tag_needed=True,
    cwt_tag=True,
)
MANIFEST = Rules(
    kinds=(Kind.SIGN1,), header_octets=64, payload_octets=64, tag_needed=False, cwt_tag=False
)
BODY: list[Any] = [b"\xa1\x01\x27", {}, b"text", b"signature"]


@pytest.mark.parametrize("case", TOKENS["valid"], ids=lambda case: case["name"])
def test_the_parts_of_every_token_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    octets = bytes.fromhex(case["token"])

    envelope = open_envelope(octets, TOKEN)

    assert envelope.kind is (Kind.MAC0 if case["alg"].startswith("HMAC") else Kind.SIGN1)
    assert envelope.protected.hex() == case["protected"]
    assert envelope.payload.hex() == case["claims"]
    assert envelope.to_be_signed.hex() == case["to_be_signed"]
    parts = (envelope.kind, envelope.protected, envelope.payload, envelope.signature)
    assert octets == b"\xd8\x3d" + seal_envelope(*parts)


def test_the_manifest_of_the_vectors_opens_as_well() -> None:
    octets = bytes.fromhex(ALL["manifest"]["cose_sign1"])
    wide = replace(MANIFEST, header_octets=1024, payload_octets=1024)

    assert open_envelope(octets, wide).payload.hex() == ALL["manifest"]["payload"]


def test_a_tag_is_needed_only_where_the_rules_say_so() -> None:
    bare = cbor2.dumps(BODY)

    assert open_envelope(bare, MANIFEST).kind is Kind.SIGN1
    with pytest.raises(BadCbor, match="no tag, expected 18 or 17"):
        open_envelope(bare, TOKEN)


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (b"\xd8\x3d" + cbor2.dumps(cbor2.CBORTag(18, BODY)), "tag 61, expected 18"),
        (cbor2.dumps(cbor2.CBORTag(17, BODY)), "tag 17, expected 18"),
        (cbor2.dumps([b"", {}, bytes(65), b""]), "the payload has 65 octets, limit 64"),
        (cbor2.dumps([bytes(65), {}, b"", b""]), "the protected header has 65 octets, limit 64"),
        (cbor2.dumps([b"", {9: bytes(64)}, b"", b""]), "headers of more than 64 octets"),
        (cbor2.dumps([b"", {}, None, b""]), "the payload is not a byte string"),
        (cbor2.dumps([b"", {}, b""]), "not an array of four"),
        (cbor2.dumps([b"", [], b"", b""]), "the unprotected header is not a map"),
        (cbor2.dumps([b"\x80", {}, b"", b""]), "the protected header is not a map"),
        (cbor2.dumps(BODY) + b"\0", "1 octets too many"),
    ],
)
def test_an_envelope_that_the_rules_do_not_allow_stays_shut(octets: bytes, says: str) -> None:
    with pytest.raises(BadCbor, match=says):
        open_envelope(octets, MANIFEST)


def test_tags_in_the_wrong_order_or_twice_are_refused() -> None:
    sealed = seal_envelope(Kind.SIGN1, *BODY[:1], *BODY[2:])
    for octets in (b"\xd8\x3d" * 2 + sealed, b"\xd2" + sealed, b"\xd2\xd8\x3d" + sealed[1:]):
        with pytest.raises(BadCbor):
            open_envelope(octets, TOKEN)
    assert open_envelope(b"\xd8\x3d" + sealed, TOKEN) == open_envelope(sealed, TOKEN)


@given(st.sampled_from(Kind), st.binary(max_size=300), st.binary(max_size=300))
def test_what_is_signed_is_what_rfc_9052_says(kind: Kind, protected: bytes, payload: bytes) -> None:
    context = {Kind.SIGN1: "Signature1", Kind.MAC0: "MAC0"}[kind]

    assert cbor2.loads(to_be_signed(kind, protected, payload)) == [
        context, protected, b"", payload,
    ]  # fmt: skip


@given(st.binary(max_size=80))
def test_only_bad_cbor_leaves_the_reader_of_noise(noise: bytes) -> None:
    for octets in (noise, b"\xd2\x84" + noise, b"\xd8\x3d\xd1\x84\x40" + noise):
        try:
            envelope = open_envelope(octets, TOKEN)
        except BadCbor:
            continue
        assert len(envelope.payload) <= len(octets)
