"""Clients known by their certificates: what is read of one, and whom a table means."""

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ConfigError
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.identities import MAX_IDENTITIES, Identity, identities_from, read_certificate
from kvcs.trust.keys import thumbprint
from tests.unit.kvcs.trust.certificates import certificate
from tests.unit.kvcs.trust.vectors import NOW, PRIVATE

DECODE = "spiffe://cluster.example/decode/7"
SCOPE = bytes(range(32))
TABLE: dict[str, Any] = {"uri": DECODE, "role": "consumer", "scopes": [SCOPE.hex()]}


def test_of_a_certificate_its_uris_its_end_and_its_key_are_read() -> None:
    found = read_certificate(certificate([DECODE, "https://x.example/"], key=PRIVATE))

    assert found.uris == (DECODE, "https://x.example/")
    assert found.expires_at == NOW + 1000
    assert found.thumbprint == thumbprint(PRIVATE.public_key())


def test_a_certificate_without_names_has_no_uris() -> None:
    assert read_certificate(certificate(None)).uris == ()
    assert read_certificate(certificate([])).uris == ()


def test_only_keys_that_a_token_can_be_bound_to_have_a_thumbprint() -> None:
    p256 = generate_private_key(SECP256R1())

    assert read_certificate(certificate(key=p256)).thumbprint == thumbprint(p256.public_key())
    assert read_certificate(certificate(key=generate_private_key(SECP384R1()))).thumbprint is None
    assert read_certificate(certificate(key=generate_rsa(65537, 2048))).thumbprint is None


def test_a_name_that_no_log_could_show_is_left_out() -> None:
    assert read_certificate(certificate(["spiffe://x/a\nb", DECODE])).uris == (DECODE,)


@given(st.binary(max_size=60))
def test_what_is_no_certificate_is_refused(noise: bytes) -> None:
    with pytest.raises(ConfigError, match="the client's certificate cannot be read"):
        read_certificate(noise)


def test_tables_read_as_they_are_written() -> None:
    model = bytes(32)
    [one, other] = identities_from(
        [TABLE, TABLE | {"uri": "spiffe://x/*", "role": "relay", "compatibility": model.hex()}]
    )

    assert one == Identity(DECODE, permissions_of(Role.CONSUMER, [SCOPE]))
    assert other == Identity("spiffe://x/*", permissions_of(Role.RELAY, [SCOPE], model))


@pytest.mark.parametrize(
    ("pattern", "uri", "expected"),
    [
        (DECODE, DECODE, True),
        (DECODE, DECODE + "/x", False),
        (DECODE, DECODE.upper(), False),
        ("spiffe://cluster.example/*", DECODE, True),
        ("spiffe://cluster.example/decode/*", DECODE, True),
        ("spiffe://cluster.example/decode/*", "spiffe://cluster.example/decode/", False),
        ("spiffe://cluster.example/decode/*", "spiffe://cluster.example/decode", False),
        ("spiffe://cluster.example/decode/*", "spiffe://cluster.example/decoder", False),
        ("spiffe://cluster/*", DECODE, False),
    ],
)
def test_a_uri_is_meant_whole_or_by_what_is_above_it(
    pattern: str, uri: str, expected: bool
) -> None:
    assert Identity(pattern, ()).fits(uri) is expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"uri": None}, "uri is not set"),
        ({"uri": "*"}, r"uri is '\*', expected SCHEME://NAME/PATH"),
        ({"uri": "spiffe:///*"}, "expected SCHEME://NAME/PATH"),
        ({"uri": "spiffe://*/decode"}, "expected SCHEME://NAME/PATH"),
        ({"uri": "decode-7"}, "expected SCHEME://NAME/PATH"),
        ({"uri": "spiffe://x/" + "y" * 2048}, "expected SCHEME://NAME/PATH"),
        ({"role": None}, "role is None, expected consumer, producer, relay"),
        ({"role": "admin"}, "role is 'admin', expected consumer"),
        ({"role": ["consumer"]}, "role is"),
        ({"scopes": None}, "scopes are not set"),
        ({"scopes": SCOPE.hex()}, "scopes are not set, expected an array"),
        ({"scopes": []}, "0 scopes, expected 1 to 63"),
        ({"scopes": ["00"]}, "identifier of 1 octets, expected 32"),
        ({"scopes": ["zz"]}, "a Scope ID is 'zz', expected hex"),
        ({"scopes": [5]}, "a Scope ID is 5, expected hex"),
        ({"compatibility": "00"}, "identifier of 1 octets"),
        ({"compatibility": 5}, "compatibility is 5, expected hex"),
        ({"scope": "x"}, "scope is not known, expected compatibility, role"),
    ],
)
def test_a_table_that_is_none_is_named(change: dict[str, Any], says: str) -> None:
    table = {name: value for name, value in (TABLE | change).items() if value is not None}

    with pytest.raises(ConfigError, match=f"^identities 2: .*{says}"):
        identities_from([TABLE, table])


def test_tables_that_are_none_are_refused() -> None:
    for tables, says in (
        ("x", "identities is str, expected tables"),
        ([5], "identities 1: a int, expected a table"),
        ([TABLE] * (MAX_IDENTITIES + 1), f"limit {MAX_IDENTITIES}"),
    ):
        with pytest.raises(ConfigError, match=says):
            identities_from(tables)
