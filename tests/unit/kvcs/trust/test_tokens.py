"""Tokens: what is believed, as other programs make it, and everything that is not."""

from dataclasses import replace
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import BadToken
from kvcs.trust.claims import Claims
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.issuers import IssuerKey, Issuers
from kvcs.trust.keys import Algorithm, PublicKey, algorithm_of, is_signed
from kvcs.trust.tokens import (
    MAX_TOKEN_OCTETS,
    SigningKey,
    Token,
    issue,
    read_token,
    read_unverified,
)
from moqt.authority import Denial
from tests.unit.kvcs.trust.vectors import (
    AUDIENCE,
    CONSUMER,
    ED25519,
    ISSUER,
    ISSUERS,
    NOW,
    PRIVATE,
    SECRET,
    TOKENS,
    signed,
    token_with,
    valid,
)

SCOPE = bytes.fromhex("74a7a6fc6da8c20ea5a7eeebe4539768bd8f93ae174652389b977ac3f08ee3d1")
CTI = bytes.fromhex("00112233445566778899aabbccddeeff")
CONSUMER_CLAIMS = Claims(
    issuer=ISSUER,
    audience=(AUDIENCE,),
    expires_at=NOW + 3600,
    subject="decode-7",
    issued_at=NOW,
    token_id=CTI,
    permissions=permissions_of(Role.CONSUMER, [SCOPE]),
    revalidate_s=60.0,
)
KEY = SigningKey(ISSUER, b"issuer-1", PRIVATE)
VALID = pytest.mark.parametrize("case", TOKENS["valid"], ids=lambda case: case["name"])


def read(token: bytes, now: float = NOW, thumbprint: bytes | None = None) -> Token:
    """Check a token as an endpoint does."""
    found = read_token(token, ISSUERS, [AUDIENCE])
    found.check_bearer(thumbprint)
    found.check_time(now)
    return found


@VALID
def test_every_valid_token_of_the_vectors_is_believed(case: dict[str, Any]) -> None:
    token = read(bytes.fromhex(case["token"]))

    assert token.claims.who == f"{ISSUER}/decode-7"
    assert token.claims.token_id == CTI
    assert token.claims.revalidate_s == 60.0


def test_the_claims_are_those_of_the_vectors() -> None:
    assert read(valid("consumer, EdDSA")).claims == CONSUMER_CLAIMS
    assert read(valid("consumer, ES256")).claims == CONSUMER_CLAIMS
    assert read(valid("consumer, HMAC")).claims == CONSUMER_CLAIMS


@pytest.mark.parametrize(
    "case",
    [case for case in TOKENS["refused"] if case["name"] != "no moqt claim"],
    ids=lambda case: case["name"],
)
def test_every_refused_token_of_the_vectors_is_refused_with_its_code(case: dict[str, Any]) -> None:
    with pytest.raises(BadToken) as caught:
        read(bytes.fromhex(case["token"]))

    assert case["error"].startswith(caught.value.why.name)
    assert (caught.value.retry_after_s is not None) is (case["name"] == "not yet valid")


def test_all_of_the_vectors_are_there() -> None:
    assert len(TOKENS["valid"]) == 7
    assert len(TOKENS["refused"]) == 30


def test_a_token_without_a_claim_of_moqt_is_valid_and_allows_nothing() -> None:
    [case] = [case for case in TOKENS["refused"] if case["name"] == "no moqt claim"]

    assert read(bytes.fromhex(case["token"])).claims.permissions == ()


@VALID
def test_a_token_with_any_bit_flipped_is_refused(case: dict[str, Any]) -> None:
    token = bytes.fromhex(case["token"])

    for at in range(len(token)):
        for bit in range(8):
            flipped = bytearray(token)
            flipped[at] ^= 1 << bit
            with pytest.raises(BadToken) as caught:
                read(bytes(flipped))
            assert caught.value.why is Denial.MALFORMED


@VALID
def test_a_token_cut_at_any_length_is_refused(case: dict[str, Any]) -> None:
    token = bytes.fromhex(case["token"])

    for length in range(len(token)):
        with pytest.raises(BadToken) as caught:
            read(token[:length])
        assert caught.value.why is Denial.MALFORMED


# -- the envelope ----------------------------------------------------------------------------------


def test_the_tag_of_a_web_token_may_be_left_out_and_typ_as_well() -> None:
    assert read(valid("consumer, EdDSA")[2:]).claims == CONSUMER_CLAIMS
    assert read(signed(CONSUMER, header={1: -8, 4: b"issuer-1"})).claims == CONSUMER_CLAIMS
    header = {1: -8, 4: b"issuer-1", 3: 60, "x": [1]}
    assert read(signed(CONSUMER, header=header, unprotected={33: b"x"})).claims == CONSUMER_CLAIMS


@pytest.mark.parametrize(
    ("header", "unprotected", "says"),
    [
        ({1: -8}, {}, "without a kid"),
        ({1: -8}, {4: b"issuer-1"}, "without a kid"),
        ({1: -8, 4: "issuer-1"}, {}, "without a kid"),
        ({1: -8, 4: b""}, {}, "without a kid"),
        ({1: -8, 4: bytes(65)}, {}, "without a kid of 1 to 64 octets"),
        ({4: b"issuer-1"}, {}, "another algorithm"),
        ({1: True, 4: b"issuer-1"}, {}, "another algorithm"),
        ({1: "EdDSA", 4: b"issuer-1"}, {}, "another algorithm"),
        ({1: -35, 4: b"issuer-1"}, {}, "another algorithm"),
        ({1: 5, 4: b"issuer-3"}, {}, "an algorithm of another kind of message"),
        ({1: -8, 4: b"issuer-1"}, {1: -8}, "outside the protected"),
        ({1: -8, 4: b"issuer-1"}, {4: b"issuer-1"}, "outside the protected"),
        ({1: -8, 4: b"issuer-1"}, {2: [4]}, "critical"),
        ({1: -8, 2: [4], 4: b"issuer-1"}, {}, "critical"),
        ({1: -8, 4: b"issuer-1", 16: 61}, {}, "another type than CAT"),
        ({1: -8, 4: b"issuer-9"}, {}, "key issuer-9, which is not trusted"),
        ({1: -8, 4: b"issuer-2"}, {}, "key issuer-2 with another algorithm than ES256"),
        ({1: -8, 4: b"\x00\xff"}, {}, "key 00ff, which is not trusted"),
    ],
)
def test_headers_that_leave_a_doubt_are_refused_though_the_signature_is_good(
    header: dict[Any, Any], unprotected: dict[Any, Any], says: str
) -> None:
    with pytest.raises(BadToken, match=says) as caught:
        read(signed(CONSUMER, header=header, unprotected=unprotected))
    assert caught.value.why is Denial.MALFORMED


def test_a_mac_is_believed_only_of_a_key_that_is_configured_as_a_secret() -> None:
    """The public key is known to everybody, so nobody's MAC under it is worth anything."""
    protected = cbor2.dumps({1: 5, 4: b"issuer-1", 16: "CAT"})
    forged = SigningKey(ISSUER, b"issuer-1", ED25519.public_bytes_raw())

    for token in (issue(CONSUMER_CLAIMS, forged),):
        assert protected in token
        with pytest.raises(BadToken, match="another algorithm than EDDSA"):
            read(token)


def test_a_payload_that_is_no_map_alone_is_refused() -> None:
    for payload in (
        b"",
        cbor2.dumps([1]),
        cbor2.dumps(CONSUMER) + b"\0",
        b"\xbf" + cbor2.dumps(CONSUMER)[1:] + b"\xff",
        cbor2.dumps({**CONSUMER, 900: [[[[[[[[1]]]]]]]]}),
    ):
        with pytest.raises(BadToken, match="not in the form that is taken"):
            read(signed(None, payload=payload))


def test_a_token_that_is_too_long_is_refused_by_its_length() -> None:
    room = MAX_TOKEN_OCTETS - len(token_with(x_900=b"")) - 3  # lengths take more octets then
    assert len(token_with(x_900=bytes(room))) == MAX_TOKEN_OCTETS
    read(token_with(x_900=bytes(room)))

    with pytest.raises(BadToken, match="token of 8193 octets, limit 8192"):
        read(token_with(x_900=bytes(room + 1)))


@pytest.mark.parametrize(
    "token",
    [
        signed(CONSUMER)[:-1] + b"\0",
        signed(CONSUMER, header={1: -8, 4: b"nobody"}),
        signed(CONSUMER, header={1: -8, 4: b"issuer-2"}),
        issue(CONSUMER_CLAIMS, SigningKey(ISSUER, b"nobody", generate_private_key(SECP256R1()))),
        issue(CONSUMER_CLAIMS, SigningKey(ISSUER, b"nobody", SECRET)),
    ],
    ids=["wrong signature", "unknown kid", "kid of another kind", "unknown ES256", "unknown HMAC"],
)
def test_whatever_is_wrong_one_signature_is_checked_of_the_kind_that_the_token_names(
    token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no clock tells which keys there are."""
    checked: list[Algorithm] = []

    def counted(key: PublicKey | bytes, message: bytes, signature: bytes) -> bool:
        checked.append(Algorithm.HMAC_256 if isinstance(key, bytes) else algorithm_of(key))
        return is_signed(key, message, signature)

    monkeypatch.setattr("kvcs.trust.tokens.is_signed", counted)

    with pytest.raises(BadToken):
        read(token)
    assert checked == [read_unverified(token).algorithm]


def test_nothing_of_an_unsigned_token_is_told_but_its_length_and_kid() -> None:
    secret = "who-i-am"
    twice = b"\xa2" + 2 * (cbor2.dumps(secret) + b"\0")
    stranger = SigningKey(ISSUER, b"issuer-1", Ed25519PrivateKey.generate())
    forged = issue(replace(CONSUMER_CLAIMS, subject=secret), stranger)

    for token in (signed(None, payload=twice), forged, token_with(sub_2=secret)[:-1]):
        with pytest.raises(BadToken) as caught:
            read(token)
        assert secret not in str(caught.value)


# -- the claims ------------------------------------------------------------------------------------


def test_claims_that_say_more_are_ignored() -> None:
    more = {
        "catv_310": 1,
        "x_900": cbor2.CBORTag(0, "2027-01-01T00:00:00Z"),
        "x_901": cbor2.undefined,
        "x_902": {b"k": 1.5},
        "x_-70000": None,
    }

    assert read(token_with(**more)).claims == CONSUMER_CLAIMS
    assert read(signed(CONSUMER | {"moqt": 5, b"x": 1})).claims == CONSUMER_CLAIMS


@pytest.mark.parametrize("claim", [c for c in range(308, 327) if c != 310])
def test_every_restriction_of_cat_is_refused(claim: int) -> None:
    with pytest.raises(BadToken, match=f"claim {claim} of the token: a restriction"):
        read(token_with(**{f"x_{claim}": 1}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iss_1": None}, "iss of the token: not printable text"),
        ({"iss_1": b"x"}, "iss of the token"),
        ({"iss_1": "x" * 257}, "iss of the token"),
        ({"iss_1": "other"}, "token of 'other', its key is of"),
        ({"aud_3": []}, "aud of the token"),
        ({"aud_3": [AUDIENCE, 5]}, "aud of the token"),
        ({"aud_3": AUDIENCE.encode()}, "aud of the token"),
        ({"aud_3": AUDIENCE.upper()}, "expected moqt://relay"),
        ({"aud_3": AUDIENCE + "/"}, "expected moqt://relay"),
        ({"sub_2": "a\nb"}, "sub of the token: not printable text"),
        ({"sub_2": "x" * 257}, "sub of the token"),
        ({"sub_2": 5}, "sub of the token"),
        ({"exp_4": "1800003600"}, "exp of the token: not a finite number"),
        ({"exp_4": float("inf")}, "exp of the token"),
        ({"exp_4": cbor2.CBORTag(1, 1800003600)}, "exp of the token"),
        ({"nbf_5": True}, "nbf of the token"),
        ({"nbf_5": float("-inf")}, "nbf of the token"),
        ({"iat_6": "now"}, "iat of the token"),
        ({"cti_7": "x"}, "cti of the token: not 1 to 64 octets"),
        ({"cti_7": b""}, "cti of the token"),
        ({"cti_7": bytes(65)}, "cti of the token"),
        ({"cnf_8": {}}, "cnf of the token: not a thumbprint alone"),
        ({"cnf_8": {3: bytes(32)}}, "cnf of the token: not a thumbprint alone"),
        ({"cnf_8": {1: {1: 1}, 5: bytes(32)}}, "cnf of the token: not a thumbprint alone"),
        ({"cnf_8": {5: bytes(31)}}, "cnf of the token: not a thumbprint of 32"),
        ({"cnf_8": bytes(32)}, "cnf of the token: not a thumbprint alone"),
        ({"moqt_327": None, "x_327": 5}, "moqt of the token"),
        ({"reval_328": -1}, "moqt-reval of the token: -1 s"),
        ({"reval_328": 0.999}, "moqt-reval of the token"),
        ({"reval_328": float("nan")}, "moqt_reval of the token: not a finite number"),
        ({"reval_328": "60"}, "moqt_reval of the token"),
    ],
)
def test_a_claim_of_another_form_makes_the_token_malformed(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadToken, match=says) as caught:
        read(token_with(**changes))
    assert caught.value.why is Denial.MALFORMED


def test_claims_may_be_left_out_that_are_not_needed() -> None:
    claims = read(token_with(sub_2=None, iat_6=None, cti_7=None, reval_328=None)).claims

    assert (claims.subject, claims.issued_at, claims.token_id) == ("", None, b"")
    assert claims.revalidate_s == 0.0
    assert claims.who == ISSUER
    assert read(token_with(reval_328=0)).claims.revalidate_s == 0.0
    assert read(token_with(reval_328=1)).claims.revalidate_s == 1.0


def test_one_of_several_audiences_is_enough_on_both_sides() -> None:
    read(token_with(aud_3=["moqt://other.example", AUDIENCE]))
    read_token(valid("consumer, EdDSA"), ISSUERS, ["moqt://x.example", AUDIENCE])
    with pytest.raises(BadToken, match="this endpoint has no name"):
        read_token(valid("consumer, EdDSA"), ISSUERS, [])


# -- the time --------------------------------------------------------------------------------------


def test_a_token_is_good_until_its_leeway_is_over() -> None:
    token = valid("consumer, EdDSA")

    read(token, NOW + 3600 + 29.9)
    with pytest.raises(BadToken, match="expired 30 s ago") as caught:
        read(token, NOW + 3600 + 30)
    assert caught.value.why is Denial.EXPIRED


def test_a_token_is_good_from_its_leeway_before_and_says_how_long_to_wait() -> None:
    token = token_with(nbf_5=NOW + 100)

    read(token, NOW + 70)
    with pytest.raises(BadToken, match="not valid for another 20 s") as caught:
        read(token, NOW + 50)
    assert caught.value.why is Denial.UNAUTHORIZED
    assert caught.value.retry_after_s == 20.0


def test_a_token_that_lives_too_long_is_refused_with_and_without_iat() -> None:
    read(token_with(exp_4=NOW + 86_400))
    with pytest.raises(BadToken, match="token for 86401 s, limit 86400") as caught:
        read(token_with(exp_4=NOW + 86_401))
    assert caught.value.why is Denial.MALFORMED
    with pytest.raises(BadToken, match="limit 86400"):
        read(token_with(exp_4=NOW + 86_401, iat_6=None))
    # Nor does a date of issue that is ahead make it any younger.
    for ahead in (31, 10**9):
        with pytest.raises(BadToken, match="limit 86400"):
            read(token_with(exp_4=NOW + 86_400 + ahead, iat_6=NOW + ahead))
    read(token_with(exp_4=NOW + 86_430, iat_6=NOW + 30))
    read_token(token_with(exp_4=NOW + 90_000), ISSUERS, [AUDIENCE]).check_time(
        NOW, max_lifetime_s=90_000
    )


def test_nothing_is_believed_of_a_key_whose_time_is_over() -> None:
    issuers = Issuers([IssuerKey(ISSUER, b"issuer-1", ED25519, not_after=NOW + 10)])
    token = read_token(valid("consumer, EdDSA"), issuers, [AUDIENCE])

    token.check_time(NOW + 9)
    with pytest.raises(BadToken, match="key issuer-1 of the token is trusted no more") as caught:
        token.check_time(NOW + 10)
    assert caught.value.why is Denial.MALFORMED


# -- who shows it ----------------------------------------------------------------------------------


def test_a_bound_token_is_good_only_with_the_key_that_it_is_bound_to() -> None:
    token = token_with(cnf_8={5: bytes(range(32))})

    read(token, thumbprint=bytes(range(32)))
    for other, says in ((None, "there is none"), (bytes(32), "another one is shown")):
        with pytest.raises(BadToken, match=f"bound to a client certificate, and {says}") as caught:
            read(token, thumbprint=other)
        assert caught.value.why is Denial.MALFORMED
    read(valid("consumer, EdDSA"), thumbprint=bytes(32))


# -- issuing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        ("consumer, EdDSA", CONSUMER_CLAIMS),
        (
            "producer, EdDSA",
            replace(
                CONSUMER_CLAIMS,
                expires_at=NOW + 86_400,
                permissions=permissions_of(Role.PRODUCER, [SCOPE]),
            ),
        ),
        (
            "relay, EdDSA",
            replace(
                CONSUMER_CLAIMS,
                expires_at=NOW + 86_400,
                permissions=permissions_of(Role.RELAY, [SCOPE]),
            ),
        ),
    ],
)
def test_what_is_issued_is_octet_for_octet_what_others_make(name: str, claims: Claims) -> None:
    assert issue(claims, KEY) == valid(name)


def test_what_is_issued_with_a_shared_secret_is_what_others_make() -> None:
    assert issue(CONSUMER_CLAIMS, SigningKey(ISSUER, b"issuer-3", SECRET)) == valid(
        "consumer, HMAC"
    )


def test_a_token_signed_with_es256_is_read_by_whoever_has_the_public_key() -> None:
    key = SigningKey(ISSUER, b"p", generate_private_key(SECP256R1()))

    found = read_token(issue(CONSUMER_CLAIMS, key), Issuers([key.verifier]), [AUDIENCE])
    assert found.claims == CONSUMER_CLAIMS


@pytest.mark.parametrize(
    "change",
    [
        {"issuer": "other"},
        {"audience": ()},
        {"subject": "a\nb"},
        {"expires_at": float("inf")},
        {"revalidate_s": 0.5},
        {"token_id": bytes(65)},
        {"thumbprint": b"short"},
        {"audience": ("x" * 9000,)},
    ],
)
def test_what_no_server_would_believe_is_not_issued(change: dict[str, Any]) -> None:
    with pytest.raises(BadToken):
        issue(replace(CONSUMER_CLAIMS, **change), KEY)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=20)
CLAIMS = st.builds(
    Claims,
    issuer=st.just(ISSUER),
    audience=st.lists(TEXTS, max_size=2).map(lambda names: (AUDIENCE, *names)),
    expires_at=st.floats(NOW - 20, NOW + 3600) | st.integers(int(NOW), int(NOW) + 3600).map(float),
    subject=TEXTS,
    not_before=st.none() | st.floats(NOW - 3600, NOW + 29),
    issued_at=st.none() | st.floats(NOW - 3600, NOW),
    token_id=st.binary(max_size=64),
    thumbprint=st.none() | st.just(bytes(32)),
    permissions=st.just(()) | st.just(permissions_of(Role.RELAY, [SCOPE])),
    revalidate_s=st.just(0.0) | st.floats(1, 1e6),
)


@given(CLAIMS)
def test_claims_come_back_as_they_were_issued(claims: Claims) -> None:
    token = issue(claims, KEY)

    assert read(token, thumbprint=bytes(32)).claims == claims
    looked = read_unverified(token)
    assert (looked.claims, looked.kid, looked.algorithm.name) == (claims, b"issuer-1", "EDDSA")


def test_the_signing_key_is_in_no_text_about_it() -> None:
    assert SECRET.hex() not in repr(SigningKey(ISSUER, b"k", SECRET))
    assert "\\x01" not in repr(SigningKey(ISSUER, b"k", SECRET))


# -- whatever comes --------------------------------------------------------------------------------


@given(st.binary(max_size=80))
def test_only_bad_token_leaves_the_reader_of_noise(noise: bytes) -> None:
    for token in (noise, b"\xd8\x3d\xd2\x84" + noise, b"\xd1\x84\x43\xa1\x01\x05" + noise):
        with pytest.raises(BadToken):
            read(token)
        with pytest.raises(BadToken):
            read_unverified(token)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=33)
    | st.text(max_size=4)
    | st.just(AUDIENCE),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*range(1, 9), 310, 327, 328, 900, "x"]), VALUES, max_size=4)
)
def test_only_bad_token_leaves_the_reader_of_odd_but_well_signed_claims(
    claims: dict[Any, Any],
) -> None:
    try:
        found = read(signed(CONSUMER | claims)).claims
    except BadToken:
        return
    assert found.issuer == ISSUER
    assert AUDIENCE in found.audience


@given(st.dictionaries(st.sampled_from([1, 2, 3, 4, 5, 16, "alg", "crit"]), VALUES, max_size=4))
def test_only_bad_token_leaves_the_reader_of_odd_headers(header: dict[Any, Any]) -> None:
    try:
        read(signed(CONSUMER, header={1: -8, 4: b"issuer-1"} | header))
    except BadToken:
        return
    assert header.get(1, -8) == -8
    assert header.get(4, b"issuer-1") == b"issuer-1"
    assert 2 not in header
