"""Whose certificate is believed, and what the others are told."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from moqt.certificates import (
    MAX_DEPTH,
    UNREADABLE,
    ClientRefused,
    ClientVerifier,
    names_of,
    subject_of,
)
from tests.pki import CLIENT, NOW, SERVER, Ca, der, dns, uri

SPIFFE = "spiffe://kvcs.example/decode/7"
CA = Ca()
OTHER = Ca("test CA")  # of the same name, with another key


def verifier(*names: str, roots: tuple[Ca, ...] = (CA,)) -> ClientVerifier:
    return ClientVerifier([root.certificate for root in roots], names)


@pytest.mark.parametrize("usage", [CLIENT, None])
@pytest.mark.parametrize("name", [uri(SPIFFE), dns("decode-7.example")])
@pytest.mark.parametrize("subject", ["somebody", ""])
def test_who_has_a_certificate_of_the_ca_is_believed(
    usage: x509.ObjectIdentifier | None, name: x509.GeneralName, subject: str
) -> None:
    certificate = CA.issue(name, usage=usage, subject=subject)

    assert verifier().verify([certificate], NOW) == der(certificate)


def test_the_chain_may_lead_over_others_in_any_order() -> None:
    upper = Ca("upper", above=CA)
    lower = Ca("lower", above=upper)
    certificate = lower.issue(uri(SPIFFE))

    chain = [certificate, upper.certificate, lower.certificate]
    assert verifier().verify(chain, NOW) == der(certificate)
    with pytest.raises(ClientRefused, match="no CA for clients vouches for") as caught:
        verifier().verify([certificate, upper.certificate], NOW)
    assert caught.value.alert == "unknown_ca"


REFUSED = [
    ([], "certificate_required", "no client certificate, expected one"),
    ([OTHER.issue(uri(SPIFFE))], "bad_certificate|unknown_ca", "not believed|vouches for"),
    ([CA.issue(uri(SPIFFE), until_days=-0.5)], "certificate_expired", "expired on"),
    ([CA.issue(uri(SPIFFE), since_days=1)], "bad_certificate", "valid from"),
    ([CA.issue(uri(SPIFFE), usage=SERVER)], "unsupported_certificate", "for serverAuth, expected"),
    ([CA.issue()], "bad_certificate", "Certificate is missing required extension"),
    ([CA.issue(uri(SPIFFE), uri("https://x"))], "bad_certificate", "several URIs"),
    ([CA.certificate], "bad_certificate", "not believed"),
    ([CA.issue(uri(SPIFFE))] * (MAX_DEPTH + 2), "bad_certificate", "limit 9"),
]


@pytest.mark.parametrize(("chain", "alert", "message"), REFUSED)
def test_nobody_else_is(chain: list[x509.Certificate], alert: str, message: str) -> None:
    with pytest.raises(ClientRefused, match=message) as caught:
        verifier().verify(chain, NOW)

    assert caught.value.alert in alert.split("|")


def test_a_certificate_is_good_from_its_first_moment_to_its_last() -> None:
    certificate = CA.issue(uri(SPIFFE), since_days=-1, until_days=1)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    second = datetime.timedelta(seconds=1)

    for now in (first, last):
        verifier().verify([certificate], now)
    for now in (first - second, last + second):
        with pytest.raises(ClientRefused):
            verifier().verify([certificate], now)


@pytest.mark.parametrize(
    ("wanted", "may"),
    [
        (SPIFFE, True),
        ("spiffe://kvcs.example/decode/*", True),
        ("spiffe://kvcs.example/*", True),
        ("spiffe://kvcs.example/decode", False),
        ("spiffe://kvcs.example/dec*", False),  # a star is for whole parts
        ("spiffe://kvcs.example/decode/7/*", False),
        ("spiffe://kvcs.example.evil/*", False),
        ("SPIFFE://KVCS.EXAMPLE/DECODE/7", False),
    ],
)
def test_of_those_only_whose_name_may_come_in(wanted: str, may: bool) -> None:
    certificate = CA.issue(uri(SPIFFE))

    if may:
        verifier("other.example", wanted).verify([certificate], NOW)
    else:
        with pytest.raises(ClientRefused, match="may not connect here") as caught:
            verifier("other.example", wanted).verify([certificate], NOW)
        assert caught.value.alert == "access_denied"


def test_a_dns_name_cannot_pass_for_a_uri() -> None:
    forged = CA.issue(dns(SPIFFE), dns("decode-7.example"))

    assert names_of(der(forged)) == ("decode-7.example",)
    with pytest.raises(ClientRefused):
        verifier(SPIFFE).verify([forged], NOW)


def test_the_subject_is_the_uri_and_else_the_first_dns_name() -> None:
    assert subject_of(der(CA.issue(dns("a.example"), uri(SPIFFE)))) == SPIFFE
    assert subject_of(der(CA.issue(dns("a.example"), dns("b.example")))) == "a.example"
    assert subject_of(der(CA.issue())) == ""
    assert subject_of(b"no certificate") == ""


def test_nobody_is_believed_without_cas() -> None:
    with pytest.raises(ValueError, match="empty"):
        ClientVerifier([])


def test_what_a_stranger_wrote_is_one_line_and_not_long() -> None:
    strange = Ca("x\n" + "y" * 60)
    key = ec.generate_private_key(ec.SECP256R1())

    with pytest.raises(ClientRefused) as caught:
        verifier().verify([strange.issue(uri(SPIFFE), key=key)], NOW)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_certificate_whose_octets_were_changed_anywhere_is_refused() -> None:
    whole, refused = der(CA.issue(uri(SPIFFE))), 0

    for at in range(len(whole)):
        octets = bytearray(whole)
        octets[at] ^= 0x15
        names_of(bytes(octets))
        try:
            changed = x509.load_der_x509_certificate(bytes(octets))
        except UNREADABLE:
            continue
        with pytest.raises(ClientRefused):
            verifier().verify([changed], NOW)
        refused += 1

    assert refused > 100, "nearly all of it is only read when somebody asks for it"
