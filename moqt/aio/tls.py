"""What this end shows of itself, and whom it believes: TLS settings, for any QUIC engine.

Verification is on unless a caller says ``verify=False``. Files are read when a listener or a
connection is made, so that a wrong one is refused before anything starts.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class TlsSettingsError(ValueError):
    """A certificate, key or CA file cannot be used. The message names the file and says why."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a listener identifies itself with."""

    certificate_file: Path
    """PEM; the certificate of this server first, then the chain towards the CA."""

    key_file: Path
    """PEM, unencrypted; the key of the first certificate."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client believes."""

    ca_file: Path | None = None
    """PEM with the CAs to believe; None for the public ones."""

    verify: bool = True
    """False believes anybody: for measurements and tests, never for data that matter."""

    server_name: str | None = None
    """The name the certificate must show, if it is not the host that is dialled."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where :func:`make_certificates` put things, all PEM."""

    ca_file: Path
    certificate_file: Path
    key_file: Path


@dataclass(frozen=True, slots=True)
class Identity:
    """What :class:`ServerTls` names, read and found to fit together."""

    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    """From the issuer of the certificate towards the CA; may be empty."""

    key: PrivateKeyTypes


def check_server_tls(tls: ServerTls) -> None:
    """See whether a listener could serve with ``tls``.

    Raises:
        TlsSettingsError: As :func:`load_identity` does.
    """
    load_identity(tls)


def check_client_tls(tls: ClientTls) -> None:
    """See whether a connection could be dialled with ``tls``.

    Raises:
        TlsSettingsError: As :func:`load_cas` does.
    """
    load_cas(tls)


def load_identity(tls: ServerTls) -> Identity:
    """Read the certificates and the key of ``tls`` (for an engine).

    Raises:
        TlsSettingsError: If a file is missing, is not PEM, is not valid today, or if the key is
            not the certificate's.
    """
    chain = _certificates(tls.certificate_file)
    certificate = chain[0]
    now = _utc_now()
    for one in chain:
        since, until = one.not_valid_before_utc, one.not_valid_after_utc
        name = one.subject.rfc4514_string()
        if now > until:
            raise TlsSettingsError(
                f"{tls.certificate_file}: {name} expired on {until:%Y-%m-%d %H:%M}Z, "
                f"expected one that is valid on {now:%Y-%m-%d %H:%M}Z"
            )
        if now < since:
            raise TlsSettingsError(
                f"{tls.certificate_file}: {name} is valid from {since:%Y-%m-%d %H:%M}Z, "
                f"expected one that is valid on {now:%Y-%m-%d %H:%M}Z"
            )
    pem = _read(tls.key_file)
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise TlsSettingsError(f"{tls.key_file}: not an unencrypted PEM key") from error
    if key.public_key() != certificate.public_key():
        raise TlsSettingsError(
            f"{tls.key_file}: does not belong to the certificate in {tls.certificate_file}, "
            "expected the key of the first one there"
        )
    return Identity(certificate, tuple(chain[1:]), key)


def load_cas(tls: ClientTls) -> list[x509.Certificate] | None:
    """Read the CAs that ``tls`` believes, None for the public ones (for an engine).

    Raises:
        TlsSettingsError: If the CA file is missing or is not PEM.
    """
    return None if tls.ca_file is None else _certificates(tls.ca_file)


def make_certificates(
    folder: Path, names: Sequence[str] = ("localhost", "127.0.0.1"), *, days: float = 30
) -> CertificateFiles:
    """Make a throwaway CA and a server certificate from it, for loopback and for tests.

    Args:
        folder: Where the files go; made if missing. The key is readable by its owner only.
        names: Host names and IP addresses the certificate is good for, at least one.
        days: How long it is valid, from an hour ago.

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
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    certificate = (
        _builder(name, ca_name, key.public_key(), start, end)
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(ca_key, hashes.SHA256())
    )
    files = CertificateFiles(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    files.ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    files.certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key_file.touch(mode=0o600)
    files.key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


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
    except ValueError as error:
        raise TlsSettingsError(f"{file}: no PEM certificate in it") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsSettingsError(f"{file}: {error.strerror}") from error


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
