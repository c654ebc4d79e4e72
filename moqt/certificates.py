"""Certificates of clients: whether one is believed, and whose it is. Pure; the time is an argument.

TLS proves that the peer has the key of the certificate that it shows; everything else is decided
here: that the chain leads to one of our CAs and is valid now, that the certificate is for clients
(RFC 5280 Section 4.2.1.12), and that its name may come in. A name is that of the Subject
Alternative Name: a URI, such as a SPIFFE ID, or a DNS name. The Subject is never looked at.
"""

import datetime
from collections.abc import Iterable, Sequence
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

#: Why a client is refused, as RFC 8446 Section 6.2 names it.
ClientAlert = Literal[
    "access_denied",
    "bad_certificate",
    "certificate_expired",
    "certificate_required",
    "unknown_ca",
    "unsupported_certificate",
]

#: Certificates between the client's own and the CA's, at most.
MAX_DEPTH = 8

#: A name that ends so stands for every name that begins with what is before.
ANY_BELOW = "/*"

_SPIFFE = "spiffe://"
_PURPOSES = {
    ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth",
    ExtendedKeyUsageOID.CODE_SIGNING: "codeSigning",
    ExtendedKeyUsageOID.EMAIL_PROTECTION: "emailProtection",
}
_NO_CANDIDATE = "all candidates exhausted with no interior errors"


#: What reading a part of a certificate raises that is damaged, or that nobody can read.
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InternalError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


class ClientRefused(Exception):
    """A client's certificate is not believed. The message says what was found and expected."""

    def __init__(self, alert: ClientAlert, message: str) -> None:
        super().__init__(message)
        self.alert: ClientAlert = alert


class ClientVerifier:
    """Whom a listener takes for a client.

    Args:
        roots: CAs that are believed, at least one. They are for this alone: the public ones vouch
            for anybody.
        names: Names that may come in, each whole or with ``/*`` at its end; none: every name that
            a CA vouches for.

    Raises:
        ValueError: If there are no CAs.
    """

    def __init__(self, roots: Sequence[x509.Certificate], names: Iterable[str] = ()) -> None:
        self._store = Store(list(roots))
        self.names = tuple(names)

    def verify(self, chain: Sequence[x509.Certificate], now: datetime.datetime) -> bytes:
        """Check what a client shows.

        Args:
            chain: Its certificate, then what it says leads to a CA, in any order.
            now: With a time zone.

        Returns:
            Its certificate, DER.

        Raises:
            ClientRefused: If it is not believed.
        """
        if not chain:
            raise ClientRefused(
                "certificate_required", "no client certificate, expected one of the CAs for clients"
            )
        try:
            return self._verified(chain, now)
        except UNREADABLE as error:  # its parts are only read when they are asked for
            raise ClientRefused(
                "bad_certificate", f"client certificate cannot be read: {_shown(str(error))}"
            ) from None

    def _verified(self, chain: Sequence[x509.Certificate], now: datetime.datetime) -> bytes:
        certificate, *between = chain
        if len(between) > MAX_DEPTH:
            raise ClientRefused(
                "bad_certificate", f"client shows {len(chain)} certificates, limit {MAX_DEPTH + 1}"
            )
        _check_dates(certificate, now)
        _check_purpose(certificate)
        policy = PolicyBuilder().store(self._store).time(now).max_chain_depth(MAX_DEPTH)
        try:
            policy.build_client_verifier().verify(certificate, between)
        except VerificationError as error:
            if _NO_CANDIDATE in str(error):
                raise ClientRefused(
                    "unknown_ca",
                    f"client certificate is of {_shown(certificate.issuer.rfc4514_string())}, "
                    "which no CA for clients vouches for",
                ) from None
            raise ClientRefused(
                "bad_certificate", f"client certificate is not believed: {_shown(str(error), 300)}"
            ) from None
        self._check_name(certificate)
        return certificate.public_bytes(Encoding.DER)

    def _check_name(self, certificate: x509.Certificate) -> None:
        names = _names(certificate)
        if not names:
            raise ClientRefused(
                "bad_certificate", "client certificate has no name, expected a URI or a DNS name"
            )
        if names[0].startswith(_SPIFFE) and sum("://" in name for name in names) > 1:
            # X.509-SVID Section 2: one URI, or nobody knows who it is.
            raise ClientRefused(
                "bad_certificate", "client certificate has several URIs, expected one SPIFFE ID"
            )
        if self.names and not any(_fits(name, wanted) for name in names for wanted in self.names):
            raise ClientRefused(
                "access_denied", f"client is {_shown(names[0])}, which may not connect here"
            )


def names_of(certificate: bytes) -> tuple[str, ...]:
    """Return the names in a certificate (DER), URIs first; of nobody knows whom, none.

    Whether it is believed was decided before: this only reads.
    """
    try:
        return _names(x509.load_der_x509_certificate(certificate))
    except (*UNREADABLE, ClientRefused):
        return ()


def subject_of(certificate: bytes) -> str:
    """Return whom limits and logs know the bearer of a certificate (DER) by; empty: nobody.

    That is its SPIFFE ID or another URI, else its first DNS name.
    """
    return next(iter(names_of(certificate)), "")


def _check_dates(certificate: x509.Certificate, now: datetime.datetime) -> None:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > until:
        raise ClientRefused(
            "certificate_expired", f"client certificate expired on {until:%Y-%m-%d %H:%M}Z"
        )
    if now < since:
        raise ClientRefused(
            "bad_certificate", f"client certificate is valid from {since:%Y-%m-%d %H:%M}Z only"
        )


def _check_purpose(certificate: x509.Certificate) -> None:
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # for anything; the verifier says whether that will do
    allowed = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
    if not allowed & set(usage):
        found = ", ".join(_PURPOSES.get(one, one.dotted_string) for one in usage)
        raise ClientRefused(
            "unsupported_certificate", f"client certificate is for {found}, expected clientAuth"
        )


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_oid(
            ExtensionOID.SUBJECT_ALTERNATIVE_NAME
        ).value
    except x509.ExtensionNotFound:
        return ()
    assert isinstance(found, x509.SubjectAlternativeName), "that is what was asked for"
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = found.get_values_for_type(x509.DNSName)
    # A DNS name in the form of a URI could pass for one.
    return (*uris, *(host for host in hosts if "/" not in host))


def _fits(name: str, wanted: str) -> bool:
    if wanted.endswith(ANY_BELOW):
        prefix = wanted.removesuffix("*")
        return name.startswith(prefix) and len(name) > len(prefix)
    return name == wanted


def _shown(text: str, limit: int = 160) -> str:
    """Return what a stranger wrote, fit for one line of a log."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= limit else plain[:limit] + "..."
