"""Signed manifests: what is believed, and everything that is not."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from pycose.messages import CoseMessage  # type: ignore[attr-defined]

from kvcs.errors import BadManifest, ConfigError
from kvcs.profile.manifest import ManifestLimits
from kvcs.profile.signing import (
    ProducerKey,
    SigningAlgorithm,
    key_id,
    read_unverified,
    sign_manifest,
    trusted_keys,
    verify_manifest,
)

TEXT = b'{"kvcs":1}'
EDDSA = ProducerKey.generate()
ES256 = ProducerKey.generate(SigningAlgorithm.ES256)
KEYS = pytest.mark.parametrize("key", [EDDSA, ES256], ids=lambda key: key.algorithm.name)
TRUSTED = {key.kid: key.public_key for key in (EDDSA, ES256)}


def named_by_text(value: bytes | str) -> str:
    """Name a case by its text: octets that hold a random key would name it anew in each run."""
    return value if isinstance(value, str) else "octets"


def signature_of(protected: bytes, text: bytes = TEXT, key: ProducerKey = EDDSA) -> bytes:
    """Sign as RFC 9052 Section 4.4 says, without the library that the code under test uses."""
    to_sign = cbor2.dumps(["Signature1", protected, b"", text])
    private: Any = key.private_key
    if key.algorithm is SigningAlgorithm.EDDSA:
        signed: bytes = private.sign(to_sign)
        return signed
    r, s = decode_dss_signature(private.sign(to_sign, ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def message(
    header: Any = None,
    unprotected: Any = None,
    *,
    key: ProducerKey = EDDSA,
    protected: bytes | None = None,
    tag: int | None = 18,
) -> bytes:
    """Build a rightly signed COSE_Sign1 around whatever headers a test is about."""
    if header is None:
        header = {1: int(key.algorithm), 4: key.kid}
    if protected is None:
        protected = cbor2.dumps(header)
    body = [protected, unprotected or {}, TEXT, signature_of(protected, key=key)]
    return cbor2.dumps(body if tag is None else cbor2.CBORTag(tag, body))


@KEYS
def test_what_is_signed_comes_back_octet_for_octet(key: ProducerKey) -> None:
    signed = sign_manifest(TEXT, key)

    assert verify_manifest(signed, TRUSTED) == TEXT
    assert verify_manifest(memoryview(bytearray(signed)), TRUSTED) == TEXT


@KEYS
def test_algorithm_and_key_identifier_are_protected(key: ProducerKey) -> None:
    tagged = cbor2.loads(sign_manifest(TEXT, key))
    protected, unprotected, text, signature = tagged.value

    assert tagged.tag == 18
    assert cbor2.loads(protected) == {1: int(key.algorithm), 4: key.kid}
    assert unprotected == {}
    assert text == TEXT
    assert len(signature) == 64


@KEYS
def test_signatures_made_by_another_program_are_accepted(key: ProducerKey) -> None:
    assert verify_manifest(message(key=key), TRUSTED) == TEXT
    assert verify_manifest(message(key=key, tag=None), TRUSTED) == TEXT


def test_another_program_reads_what_is_signed_here() -> None:
    [protected, _, text, signature] = cbor2.loads(sign_manifest(TEXT, EDDSA)).value
    public: Any = EDDSA.public_key

    public.verify(signature, cbor2.dumps(["Signature1", protected, b"", text]))
    assert CoseMessage.decode(sign_manifest(TEXT, EDDSA)).payload == TEXT


def test_the_key_identifier_may_stand_in_the_unprotected_header() -> None:
    assert verify_manifest(message({1: -8}, {4: EDDSA.kid}), TRUSTED) == TEXT


def test_headers_that_are_not_critical_are_ignored() -> None:
    header = {1: -8, 4: EDDSA.kid, 3: "application/json", 99: [1, {"x": None}], "y": True}

    assert verify_manifest(message(header, {15: {1: "issuer"}, -70000: b"x"}), TRUSTED) == TEXT


def test_critical_headers_that_are_understood_are_accepted() -> None:
    header = {1: -8, 2: [1, 3, 4], 3: "application/json", 4: EDDSA.kid}

    assert verify_manifest(message(header), TRUSTED) == TEXT


@KEYS
@pytest.mark.parametrize("part", [0, 2, 3], ids=["protected", "payload", "signature"])
def test_a_flipped_octet_in_what_is_signed_is_noticed(key: ProducerKey, part: int) -> None:
    tagged = cbor2.loads(sign_manifest(TEXT, key))
    original: bytes = tagged.value[part]
    # All of them for the fast algorithm, some for the other.
    step = 1 if key is EDDSA else 9

    for at in range(0, len(original), step):
        damaged = bytearray(original)
        damaged[at] ^= 1
        tagged.value[part] = bytes(damaged)
        with pytest.raises(BadManifest):
            verify_manifest(cbor2.dumps(tagged), TRUSTED)


def test_a_signature_by_a_key_that_is_not_trusted_names_the_key() -> None:
    stranger = ProducerKey.generate()

    with pytest.raises(BadManifest, match=f"signed by {stranger.kid.hex()}, which is not trusted"):
        verify_manifest(sign_manifest(TEXT, stranger), TRUSTED)
    with pytest.raises(BadManifest, match="not trusted"):
        verify_manifest(sign_manifest(TEXT, EDDSA), {})


def test_a_stranger_cannot_use_the_identifier_of_a_trusted_key() -> None:
    impostor = replace(ProducerKey.generate(), kid=EDDSA.kid)

    with pytest.raises(BadManifest, match="signature of the manifest is wrong"):
        verify_manifest(sign_manifest(TEXT, impostor), TRUSTED)


@pytest.mark.parametrize(
    ("header", "unprotected", "says"),
    [
        ({4: EDDSA.kid}, {}, "algorithm is None"),
        ({}, {1: -8, 4: EDDSA.kid}, "algorithm stands outside the protected header"),
        ({1: -8, 4: EDDSA.kid}, {1: -8}, "algorithm stands outside"),
        ({1: -7, 4: EDDSA.kid}, {}, "signed with ES256, but its key is for EDDSA"),
        ({1: -8, 4: ES256.kid}, {}, "signed with EDDSA, but its key is for ES256"),
        ({1: -35, 4: EDDSA.kid}, {}, "algorithm is -35, expected -7"),
        ({1: -37, 4: EDDSA.kid}, {}, "algorithm is -37"),
        ({1: 5, 4: EDDSA.kid}, {}, "algorithm is 5"),
        ({1: 0, 4: EDDSA.kid}, {}, "algorithm is 0"),
        ({1: "EdDSA", 4: EDDSA.kid}, {}, "algorithm is 'EdDSA'"),
        ({1: None, 4: EDDSA.kid}, {}, "algorithm is None"),
        ({1: [-8], 4: EDDSA.kid}, {}, r"algorithm is \[-8\]"),
        ({"alg": -8, 4: EDDSA.kid}, {}, "algorithm is None"),
        ({1: -8, "alg": -7, 4: EDDSA.kid}, {}, "two algorithms"),
        ({1: -8}, {}, "no key identifier"),
        ({1: -8, "kid": EDDSA.kid}, {}, "no key identifier"),
        ({1: -8, 4: EDDSA.kid}, {4: EDDSA.kid}, "key identifier stands in both"),
        ({1: -8, 4: EDDSA.kid.hex()}, {}, "key identifier is not 1 to 256 octets"),
        ({1: -8, 4: b""}, {}, "key identifier is not 1 to 256 octets"),
        ({1: -8, 4: b"x" * 257}, {}, "key identifier is not 1 to 256 octets"),
        ({1: -8, 4: 5}, {}, "key identifier is not"),
        ({1: -8, 2: [5], 4: EDDSA.kid}, {}, "critical header 5 is not understood"),
        ({1: -8, 2: ["x"], "x": 1, 4: EDDSA.kid}, {}, "critical header 'x' is not understood"),
        ({1: -8, 2: [True], 4: EDDSA.kid}, {}, "critical header True is not understood"),
        ({1: -8, 2: [], 4: EDDSA.kid}, {}, "crit is not an array of labels"),
        ({1: -8, 2: 1, 4: EDDSA.kid}, {}, "crit is not an array of labels"),
        ({1: -8, 2: [4]}, {4: EDDSA.kid}, "critical header 4 is not in the protected"),
        ({1: -8, 4: EDDSA.kid}, {2: [1]}, "crit stands outside"),
        ({1: -8, 4: EDDSA.kid, 5: "not octets"}, {}, "headers of the manifest are malformed"),
        ({1: -8, 4: EDDSA.kid, 3: b"not text"}, {}, "headers of the manifest are malformed"),
    ],
)
def test_headers_that_are_not_beyond_doubt_are_refused_though_the_signature_is_good(
    header: Any, unprotected: Any, says: str
) -> None:
    with pytest.raises(BadManifest, match=says):
        verify_manifest(message(header, unprotected), TRUSTED)


def bstr(octets: bytes) -> bytes:
    return cbor2.dumps(octets)


PROTECTED = cbor2.dumps({1: -8, 4: EDDSA.kid})
SIGNATURE = signature_of(PROTECTED)
KID = bstr(EDDSA.kid)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "ends where 1 more octets"),
        (TEXT, "not an array of four"),
        (b"\xd2", "ends where"),
        (b"\xd2\xd2\x84", "not an array of four"),
        (message(tag=98), "tag 98, expected 18"),
        (message(tag=17), "tag 17, expected 18"),
        (b"\xd2\x85" + bstr(PROTECTED) + b"\xa0" + bstr(TEXT) + bstr(SIGNATURE), "array of four"),
        (b"\xd2\x83" + bstr(PROTECTED) + b"\xa0" + bstr(TEXT), "array of four"),
        (b"\xd2\x9f" + bstr(PROTECTED), "indefinite length"),
        (b"\xd2\x84\xa0\xa0" + bstr(TEXT) + bstr(SIGNATURE), "protected header is not a byte"),
        (b"\xd2\x84" + bstr(PROTECTED) + b"\x80" + bstr(TEXT) + bstr(SIGNATURE), "not a map"),
        (b"\xd2\x84" + bstr(PROTECTED) + b"\xa0\xf6" + bstr(SIGNATURE), "payload is not a byte"),
        (b"\xd2\x84" + bstr(PROTECTED) + b"\xa0" + bstr(TEXT) + b"\xf6", "signature is not a"),
        (message() + b"\x00", "1 octets too many"),
        (message()[:-1], "ends where 64 more octets"),
        (message(protected=b"\x80"), "protected header is not a map"),
        (message(protected=b""), "algorithm is None"),
        (message(protected=PROTECTED + b"\x00"), "1 octets too many"),
        (message(protected=b"\xa2\x01\x27\x01\x27"), "two keys 1"),
        (message(protected=b"\xa3\x01\x27\x01\x26\x04" + KID), "two keys 1"),
        (message(protected=b"\xa2\xf5\x27\x04" + KID), "neither integer nor text"),
        (message(protected=b"\xbf\x01\x27\xff"), "indefinite length"),
        (message({1: -8, 4: EDDSA.kid, 9: 1.5}), "a float"),
        (message({1: -8, 4: EDDSA.kid, 9: cbor2.CBORTag(1, 5)}), "a tag"),
        (message({1: -8, 4: EDDSA.kid, 9: cbor2.CBORTag(35, "(a+)+$")}), "a tag"),
        (message({1: -8, 4: EDDSA.kid}, {9: cbor2.undefined}), "simple value 23"),
        (message(protected=b"\xa1\x09\x63\xff\xff\xff"), "not UTF-8"),
        (b"\xd2\x84\x5b" + b"\xff" * 8, "limit 16384"),
        (b"\xd2\x84\x40\xbb" + b"\xff" * 8, "values in the 0 octets left"),
        (b"\xd2\x84\x40\xa1\x09\x9b" + b"\xff" * 8, "values in the 0 octets left"),
        (b"\xd2\x84\x40\xa0\x5b" + b"\xff" * 8, "payload has 18446744073709551615 octets"),
        (b"\xd2\x84\x40\xa1\x09\x7a\xff\xff\xff\xff", "ends where 4294967295 more"),
        (b"\xd2\x84\x40\xa1\x09" + b"\x81" * 1_000_000, "nested deeper than the limit of 8"),
        (b"\x81" * 1_000_000, "not an array of four"),
        (b"\xd2" * 1_000_000, "not an array of four"),
        (message(protected=b"\x81" * 16_000), "nested deeper than the limit of 8"),
        (message({1: -8, 4: EDDSA.kid, 9: b"x" * 16_384}), "limit 16384"),
        (message({1: -8, 4: EDDSA.kid}, {9: b"x" * 16_384}), "headers of more than 16384"),
        (
            message({1: -8, 4: EDDSA.kid, 9: [0] * 3}).replace(b"\x83\x00\x00\x00", b"\x9c" * 4),
            "reserved",
        ),
    ],
    ids=named_by_text,
)
def test_cbor_that_is_not_plain_cose_sign1_is_refused(payload: bytes, says: str) -> None:
    with pytest.raises(BadManifest, match=says):
        verify_manifest(payload, TRUSTED)


@pytest.mark.parametrize("octets", [0, 63, 65])
def test_a_signature_of_another_length_is_refused(octets: int) -> None:
    body = cbor2.CBORTag(18, [PROTECTED, {}, TEXT, bytes(octets)])

    with pytest.raises(BadManifest, match=f"signature of {octets} octets, expected 64"):
        verify_manifest(cbor2.dumps(body), TRUSTED)


@KEYS
@pytest.mark.parametrize("octet", [0, 255])
def test_an_absurd_signature_is_only_wrong(key: ProducerKey, octet: int) -> None:
    protected = cbor2.dumps({1: int(key.algorithm), 4: key.kid})
    body = cbor2.CBORTag(18, [protected, {}, TEXT, bytes([octet]) * 64])

    with pytest.raises(BadManifest, match="signature of the manifest is wrong"):
        verify_manifest(cbor2.dumps(body), TRUSTED)


def test_the_limit_applies_to_the_text_and_is_named() -> None:
    signed = sign_manifest(b"x" * 101, EDDSA)

    assert verify_manifest(signed, TRUSTED, ManifestLimits(octets=101))
    with pytest.raises(BadManifest, match="payload has 101 octets, limit 100"):
        verify_manifest(signed, TRUSTED, ManifestLimits(octets=100))
    with pytest.raises(BadManifest, match="limit 32868"):
        verify_manifest(bytes(40_000), TRUSTED, ManifestLimits(octets=100))


def test_what_is_too_long_is_refused_before_anything_is_made_of_it() -> None:
    limits = ManifestLimits(octets=100)
    message = memoryview(bytearray(40_000_000))
    declared = b"\xd2\x84\x40\xa0\x5a" + (30_000).to_bytes(4, "big") + bytes(30_000)
    tracemalloc.start()
    try:
        for payload in (message, declared):
            with pytest.raises(BadManifest, match="limit"):
                verify_manifest(payload, TRUSTED, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < len(declared)


@given(st.binary(max_size=80))
def test_only_bad_manifest_leaves_the_reader_of_noise(payload: bytes) -> None:
    with pytest.raises(BadManifest):
        verify_manifest(payload, TRUSTED)


@given(st.binary(max_size=60))
def test_only_bad_manifest_leaves_the_reader_of_noise_in_the_headers(noise: bytes) -> None:
    with pytest.raises(BadManifest):
        verify_manifest(message(protected=noise), TRUSTED)
    with pytest.raises(BadManifest):
        verify_manifest(b"\xd2\x84" + bstr(PROTECTED) + noise, TRUSTED)


@given(
    st.integers(0, len(message()) - 1),
    st.integers(1, 255),
    st.integers(0, 4),
    st.binary(max_size=4),
)
def test_only_bad_manifest_leaves_the_reader_of_damaged_messages(
    at: int, flip: int, drop: int, noise: bytes
) -> None:
    signed = message()
    damaged = signed[:at] + bytes([signed[at] ^ flip]) + noise + signed[at + 1 + drop :]
    try:
        text = verify_manifest(damaged, TRUSTED)
    except BadManifest:
        return
    assert text == TEXT


CBOR_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.binary(max_size=8)
    | st.text("aé", max_size=3)
    | st.just(EDDSA.kid),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-9, 40) | st.sampled_from(["alg", "KID", "x"]), inner)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*range(13), 32, 33, 34, 35, "alg", "crit", "x"]), CBOR_VALUES),
    st.dictionaries(st.sampled_from([*range(13), 33, "alg"]), CBOR_VALUES),
    st.booleans(),
)
def test_only_bad_manifest_leaves_the_reader_of_odd_but_well_signed_headers(
    header: dict[Any, Any], unprotected: dict[Any, Any], usual: bool
) -> None:
    if usual:
        header |= {1: -8, 4: EDDSA.kid}
    try:
        text = verify_manifest(message(header, unprotected), TRUSTED)
    except BadManifest:
        return
    assert text == TEXT
    assert header[1] == -8


@KEYS
def test_keys_travel_in_pem_files(key: ProducerKey, tmp_path: Path) -> None:
    private, public = tmp_path / "producer.pem", tmp_path / "producer.pub.pem"
    private.write_bytes(key.private_pem())
    public.write_bytes(key.public_pem())

    loaded = ProducerKey.from_file(private)

    assert loaded.kid == key.kid == key_id(key.public_key)
    assert loaded.algorithm is key.algorithm
    assert verify_manifest(sign_manifest(TEXT, loaded), trusted_keys([public])) == TEXT


def test_a_key_may_have_an_identifier_of_ones_own() -> None:
    key = ProducerKey.from_pem(EDDSA.private_pem(), kid=b"rack-7")

    assert verify_manifest(sign_manifest(TEXT, key), {b"rack-7": key.public_key}) == TEXT
    assert ProducerKey.generate(kid=b"x").kid == b"x"
    with pytest.raises(ConfigError, match="key identifier of 0 octets"):
        ProducerKey.generate(kid=b"")


def test_the_private_key_is_in_no_text_about_it() -> None:
    assert repr(EDDSA) == f"ProducerKey(<secret>, EDDSA, kid={EDDSA.kid.hex()})"


def private_pem(key: Any, encryption: Any = None) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    return pem


@pytest.mark.parametrize(
    ("pem", "says"),
    [
        (b"", "not a private key in PEM"),
        (b"not pem", "not a private key in PEM"),
        pytest.param(
            # Of another algorithm than its length fits, as fuzzing found.
            b"-----BEGIN PRIVATE KEY-----\n"
            b"MC4CAQAwBQYDK2VxBCIEIJ6Jl+fFwJ0Egq9qMre8Gx3yI3Wa2gSGw/DMtTw9PrrR\n"
            b"-----END PRIVATE KEY-----\n",
            "not a private key in PEM",
            id="damaged",
        ),
        (EDDSA.public_pem(), "not a private key in PEM"),
        (
            private_pem(EDDSA.private_key, BestAvailableEncryption(b"x")),
            "without a password",
        ),
        (private_pem(Ed448PrivateKey.generate()), "expected Ed25519 or P-256"),
        (private_pem(generate_private_key(SECP384R1())), "secp384r1, expected Ed25519 or P-256"),
    ],
)
def test_a_file_that_holds_no_usable_key_is_named(pem: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "producer.pem"
    path.write_bytes(pem)

    with pytest.raises(ConfigError, match=says) as caught:
        ProducerKey.from_file(path)
    assert str(path) in str(caught.value)


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


@pytest.mark.parametrize(
    ("pem", "says"),
    [
        (b"not pem", "not a public key in PEM"),
        (EDDSA.private_pem(), "not a public key in PEM"),
        (public_pem(Ed448PrivateKey.generate()), "expected Ed25519 or P-256"),
        (public_pem(generate_private_key(SECP384R1())), "secp384r1"),
    ],
)
def test_a_file_that_holds_no_usable_public_key_is_named(
    pem: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "producer.pub.pem"
    path.write_bytes(pem)

    with pytest.raises(ConfigError, match=says) as caught:
        trusted_keys([path])
    assert str(path) in str(caught.value)


def test_missing_key_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem"):
        ProducerKey.from_file(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        trusted_keys([tmp_path / "none.pem"])


@KEYS
def test_what_a_signed_manifest_says_of_itself_can_be_shown_without_a_key(key: ProducerKey) -> None:
    signed = read_unverified(sign_manifest(TEXT, key))

    assert signed == (key.kid, key.algorithm.name, TEXT)


def test_only_bad_manifest_leaves_the_reader_that_believes_nothing() -> None:
    whole = sign_manifest(TEXT, EDDSA)
    for cut in range(len(whole)):
        with pytest.raises(BadManifest):
            read_unverified(whole[:cut])

    with pytest.raises(BadManifest, match="limit 5"):
        read_unverified(whole, ManifestLimits(octets=5))
