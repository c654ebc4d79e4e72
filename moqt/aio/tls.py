"""What this end shows of itself, and whom it believes: TLS settings, for any QUIC engine.

Verification is on unless a caller says ``verify=False``. Files are read when a listener or a
connection is made, so that a wrong one is refused before anything starts. Which clients are
believed, :mod:`moqt.certificates` decides.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moqt.certificates import UNREADABLE, ClientVerifier


class TlsSettingsError(ValueError):
    """A certificate, key or CA file cannot be used. The message names the file and says why."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a listener identifies itself with."""

    certificate_file: Path
    """PEM; the certificate of this server first, then the chain towards the CA."""

    key_file: Path
    """PEM, unencrypted; the key of the first certificate."""

    client_ca_file: Path | None = None
    """PEM with the CAs of clients; then who shows no certificate of theirs is refused during the
    handshake. None: nobody is asked for one."""

    client_names: tuple[str, ...] = ()
    """Names of clients that may connect, URIs (SPIFFE IDs) or DNS names, each whole or with ``/*``
    at its end; empty: whomever those CAs vouch for."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client believes, and what it shows if it is asked who it is."""

    ca_file: Path | None = None
    """PEM with the CAs to believe; None for the public ones."""

    verify: bool = True
    """False believes anybody: for measurements and tests, never for data that matter."""

    server_name: str | None = None
    """The name the certificate must show, if it is not the host that is dialled."""

    certificate_file: Path | None = None
    """PEM; the certificate of this client first, then the chain towards the CA. Read at each
    dialling."""

    key_file: Path | None = None
    """PEM, unencrypted; the key of that certificate. Set if, and only if, that is."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where :func:`make_certificates` put things, all PEM."""

    ca_file: Path
    certificate_file: Path
    key_file: Path
    client_certificate_file: Path | None = None
    client_key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate, its chain and its key, read and found to fit together."""

    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    """From the issuer of the certificate towards the CA; may be empty."""

    key: PrivateKeyTypes


def check_server_tls(tls: ServerTls) -> None:
    """See whether a listener could serve with ``tls``.

    Raises:
        TlsSettingsError: As :func:`load_identity` and :func:`load_client_verifier` do.
    """
    load_identity(tls)
    load_client_verifier(tls)


def check_client_tls(tls: ClientTls) -> None:
    """See whether a connection could be dialled with ``tls``.

    Raises:
        TlsSettingsError: As :func:`load_cas` and :func:`load_client_identity` do.
    """
    load_cas(tls)
    load_client_identity(tls)


def load_client_verifier(tls: ServerTls) -> ClientVerifier | None:
    """Read whom a listener takes for a client; None: nobody is asked (for an engine).

    Raises:
        TlsSettingsError: If the CA file is missing or is not PEM, or no CA in it is valid today,
            or if there are names and no CAs.
    """
    if tls.client_ca_file is None:
        if tls.client_names:
            raise TlsSettingsError(
                "client_names are set and client_ca_file is not, expected the CAs of those clients"
            )
        return None
    roots, now = _certificates(tls.client_ca_file), _utc_now()
    if not any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in roots):
        raise TlsSettingsError(
            f"{tls.client_ca_file}: no CA in it is valid on {now:%Y-%m-%d %H:%M}Z, expected one"
        )
    return ClientVerifier(roots, tls.client_names)


def load_client_identity(tls: ClientTls) -> Identity | None:
    """Read what a client shows of itself; None: nothing (for an engine).

    Raises:
        TlsSettingsError: As :func:`load_identity` does, or if only one of both files is named.
    """
    if tls.certificate_file is None and tls.key_file is None:
        return None
    if tls.certificate_file is None or tls.key_file is None:
        raise TlsSettingsError(
            "a client's certificate_file and key_file belong together, only one of them is set"
        )
    return load_identity(ServerTls(tls.certificate_file, tls.key_file))


def load_identity(tls: ServerTls) -> Identity:
    """Read the certificates and the key of ``tls`` (for an engine).

    Raises:
        TlsSettingsError: If a file is missing, is not PEM, is not valid today, if the key is
            not the certificate's, or if the chain does not follow from it.
    """
    chain = _certificates(tls.certificate_file)
    for number, one in enumerate(chain, start=1):
        _check_readable(tls.certificate_file, number, one)
    _check_dates(tls.certificate_file, chain)
    key = _private_key(tls.key_file)
    if key is None:  # raised here, where no variable holds what is in the file
        raise TlsSettingsError(f"{tls.key_file}: not an unencrypted PEM key")
    _check_key(tls, key, chain[0])
    _check_chain(tls.certificate_file, chain)
    return Identity(chain[0], tuple(chain[1:]), key)


def _private_key(file: Path) -> PrivateKeyTypes | None:
    pem = _read(file)
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        return None


def _check_readable(file: Path, number: int, one: x509.Certificate) -> None:
    """Refuse a certificate that was damaged: its parts are only read when they are asked for."""
    try:
        one.public_key()
        one.subject.rfc4514_string()
        one.issuer.rfc4514_string()
        _ = one.not_valid_before_utc, one.not_valid_after_utc
    except UNREADABLE as error:
        raise TlsSettingsError(f"{file}: certificate {number} cannot be read: {error}") from None


def _check_dates(file: Path, chain: Sequence[x509.Certificate]) -> None:
    now = _utc_now()
    for one in chain:
        since, until = one.not_valid_before_utc, one.not_valid_after_utc
        name = one.subject.rfc4514_string()
        if now > until:
            raise TlsSettingsError(
                f"{file}: {name} expired on {until:%Y-%m-%d %H:%M}Z, "
                f"expected one that is valid on {now:%Y-%m-%d %H:%M}Z"
            )
        if now < since:
            raise TlsSettingsError(
                f"{file}: {name} is valid from {since:%Y-%m-%d %H:%M}Z, "
                f"expected one that is valid on {now:%Y-%m-%d %H:%M}Z"
            )


def _check_key(tls: ServerTls, key: PrivateKeyTypes, certificate: x509.Certificate) -> None:
    if key.public_key() != certificate.public_key():
        raise TlsSettingsError(
            f"{tls.key_file}: does not belong to the certificate in {tls.certificate_file}, "
            "expected the key of the first one there"
        )


def _check_chain(file: Path, chain: Sequence[x509.Certificate]) -> None:
    """Refuse a chain of which one certificate was not issued by the next."""
    for number, (one, issuer) in enumerate(pairwise(chain), start=1):
        try:
            one.verify_directly_issued_by(issuer)
        except (*UNREADABLE, InvalidSignature):
            raise TlsSettingsError(
                f"{file}: certificate {number} was issued by {one.issuer.rfc4514_string()}, which "
                f"certificate {number + 1}, {issuer.subject.rfc4514_string()}, is not; expected "
                "the chain in order"
            ) from None


def load_cas(tls: ClientTls) -> list[x509.Certificate] | None:
    """Read the CAs that ``tls`` believes, None for the public ones (for an engine).

    Raises:
        TlsSettingsError: If the CA file is missing or is not PEM.
    """
    return None if tls.ca_file is None else _certificates(tls.ca_file)


def make_certificates(
    folder: Path,
    names: Sequence[str] = ("localhost", "127.0.0.1"),
    *,
    days: float = 30,
    client: str | None = None,
) -> CertificateFiles:
    """Make a throwaway CA and a server certificate from it, for loopback and for tests.

    Args:
        folder: Where the files go; made if missing. Keys are readable by their owner only.
        names: Host names and IP addresses the certificate is good for, at least one.
        days: How long it is valid, from an hour ago.
        client: A URI, such as a SPIFFE ID: make a certificate for a client of this name as well.

    Returns:
        The paths. The key of the CA is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = _utc_now() - datetime.timedelta(hours=1)
    end = start + datetime.timedelta(days=days)

    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "throwaway CA")])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )

    def issue(
        shown: str, alternative: list[x509.GeneralName], usage: x509.ObjectIdentifier, to: str
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, shown)])
        certificate = (
            _builder(name, ca_name, key.public_key(), start, end)
            .add_extension(x509.SubjectAlternativeName(alternative), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
            .sign(ca_key, hashes.SHA256())
        )
        certificate_file, key_file = folder / f"{to}certificate.pem", folder / f"{to}key.pem"
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate_file, key_file

    ca_file = folder / "ca.pem"
    ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    server = issue(names[0], list(map(_general_name, names)), ExtendedKeyUsageOID.SERVER_AUTH, "")
    if client is None:
        return CertificateFiles(ca_file, *server)
    uri = x509.UniformResourceIdentifier(client)
    theirs = issue("client", [uri], ExtendedKeyUsageOID.CLIENT_AUTH, "client-")
    return CertificateFiles(ca_file, *server, *theirs)


#: What the key of a CA is for.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificates(file: Path) -> list[x509.Certificate]:
    pem = _read(file)
    try:
        return x509.load_pem_x509_certificates(pem)
    except UNREADABLE as error:
        raise TlsSettingsError(f"{file}: no PEM certificate in it") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsSettingsError(f"{file}: {error.strerror}") from error


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
