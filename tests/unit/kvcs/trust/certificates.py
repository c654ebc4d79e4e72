"""Client certificates, as an authority is shown them."""

import datetime
from collections.abc import Sequence
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tests.unit.kvcs.trust.vectors import NOW


def certificate(
    uris: Sequence[str] | None = (),
    *,
    expires_at: float = NOW + 1000,
    key: Any = None,
) -> bytes:
    """Return a certificate in DER, signed by nobody in particular; None: without any name."""
    own = Ed25519PrivateKey.generate() if key is None else key
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    end = datetime.datetime.fromtimestamp(expires_at, datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(own.public_key())
        .serial_number(1)
        .not_valid_before(end - datetime.timedelta(days=1))
        .not_valid_after(end)
    )
    if uris is not None:
        names = [x509.DNSName("client.example"), *map(x509.UniformResourceIdentifier, uris)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    digest = None if isinstance(own, Ed25519PrivateKey) else SHA256()
    return builder.sign(own, digest).public_bytes(Encoding.DER)
