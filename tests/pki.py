"""A certificate authority for tests: it issues whatever it is asked for, good or bad."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.UTC)
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
KeyPair = tuple[Path, Path]


def uri(name: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(name)


def dns(name: str) -> x509.GeneralName:
    return x509.DNSName(name)


class Ca:
    """A CA, perhaps one that another one vouches for."""

    def __init__(self, name: str = "test CA", *, above: "Ca | None" = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = above or self
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
             "key_agreement", "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        self.certificate = (
            self._builder(self.name, issuer, self.key.public_key(), -1, 30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
            .sign(issuer.key, hashes.SHA256())
        )

    def issue(
        self,
        *names: x509.GeneralName,
        since_days: float = -1,
        until_days: float = 30,
        usage: x509.ObjectIdentifier | None = CLIENT,
        key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None,
        subject: str = "somebody",
    ) -> x509.Certificate:
        """Issue a certificate; by default a good one of a client."""
        of = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)] if subject else [])
        public = (key or self.key).public_key()
        made = self._builder(of, self, public, since_days, until_days)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=not subject)
        if usage is not None:
            made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        return made.sign(self.key, hashes.SHA256())

    def write(self, folder: Path, name: str, *names: x509.GeneralName, **how: object) -> KeyPair:
        """Issue a certificate with a key of its own, and write both, the chain included."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.issue(*names, key=key, **how)  # type: ignore[arg-type]
        files = folder / f"{name}.pem", folder / f"{name}.key"
        files[0].write_bytes(pem(certificate))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _builder(
        self,
        subject: x509.Name,
        issuer: "Ca",
        key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
        since_days: float,
        until_days: float,
    ) -> x509.CertificateBuilder:
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + since_days * day)
            .not_valid_after(NOW + until_days * day)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()),
                critical=False,
            )
        )


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)
