"""``manifest.cose``: a manifest inside COSE_Sign1 (KVCS Section 3.6, RFC 9052, RFC 9053).

The only module that knows which COSE library is used. What strangers send does not reach it
before :mod:`kvcs.trust.envelope` has read it: CBOR has many forms that a general decoder expands
into objects, and a signed manifest needs none of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pycose.algorithms import EdDSA, Es256
from pycose.exceptions import CoseException
from pycose.headers import KID
from pycose.headers import Algorithm as AlgorithmHeader
from pycose.keys.curves import P256, Ed25519
from pycose.keys.ec2 import EC2Key
from pycose.keys.okp import OKPKey
from pycose.messages.sign1message import Sign1Message

from kvcs.errors import BadManifest, ConfigError
from kvcs.profile.manifest import DEFAULT_LIMITS, ManifestLimits
from kvcs.trust.cbor import BadCbor
from kvcs.trust.envelope import Envelope, Kind, Label, Rules, open_envelope

#: What reading a PEM raises that holds no key, or a damaged one, or is encrypted.
NO_KEY = (ValueError, TypeError, UnsupportedAlgorithm, InternalError)

PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
PublicKey = Ed25519PublicKey | EllipticCurvePublicKey


class SigningAlgorithm(IntEnum):
    """The COSE algorithms that KVCS allows, with their numbers (RFC 9053)."""

    #: ECDSA on P-256 with SHA-256.
    ES256 = -7
    #: Here always with Ed25519.
    EDDSA = -8


#: Header parameters that are understood here (RFC 9052 Section 3.1).
_UNDERSTOOD = (Label.ALG, Label.CRIT, Label.CONTENT_TYPE, Label.KID)
_COSE_ALGORITHMS = {SigningAlgorithm.ES256: Es256, SigningAlgorithm.EDDSA: EdDSA}
#: Both algorithms sign with 64 octets.
_SIGNATURE_OCTETS = 64
#: What headers may take. Ours take less than a hundred octets.
_MAX_HEADER_OCTETS = 16_384
_MAX_KID_OCTETS = 256
_KID_OCTETS = 16


@dataclass(frozen=True, slots=True)
class ProducerKey:
    """The key a producer signs its manifests with, and the identifier readers find it by.

    The default is Ed25519. ES256 is there for those who must; its signatures are made in
    interpreted code, which is slower and not guarded against timing measurements.
    """

    private_key: PrivateKey
    """Secret."""

    kid: bytes
    """Key identifier. By default :func:`key_id` of the public key."""

    def __post_init__(self) -> None:
        _algorithm_of(self.private_key.public_key())
        _check_kid(self.kid)

    @classmethod
    def generate(
        cls, algorithm: SigningAlgorithm = SigningAlgorithm.EDDSA, *, kid: bytes | None = None
    ) -> Self:
        """Make a new key."""
        private: PrivateKey
        if algorithm is SigningAlgorithm.EDDSA:
            private = Ed25519PrivateKey.generate()
        else:
            private = generate_private_key(SECP256R1())
        return cls(private, key_id(private.public_key()) if kid is None else kid)

    @classmethod
    def from_pem(cls, pem: bytes, *, kid: bytes | None = None) -> Self:
        """Read a private key that is not encrypted.

        Raises:
            ConfigError: If it is not one of Ed25519 or of P-256.
        """
        try:
            private = load_pem_private_key(pem, password=None)
        except NO_KEY as exc:
            raise ConfigError(f"not a private key in PEM without a password: {exc}") from None
        if not isinstance(private, Ed25519PrivateKey | EllipticCurvePrivateKey):
            kind = type(private).__name__
            raise ConfigError(f"the key is a {kind}, expected Ed25519 or P-256")
        return cls(private, key_id(private.public_key()) if kid is None else kid)

    @classmethod
    def from_file(cls, path: str | Path, *, kid: bytes | None = None) -> Self:
        """Read a PEM file.

        Raises:
            ConfigError: If it cannot be read, or for what it holds; the message names it.
        """
        # Raised where no variable holds a secret: some programs print those of a traceback.
        try:
            return cls.from_pem(Path(path).read_bytes(), kid=kid)
        except OSError as exc:
            wrong = exc.strerror or str(exc)
        except ConfigError as exc:
            wrong = str(exc)
        raise ConfigError(f"producer key file {path}: {wrong}")

    def to_file(self, path: str | Path) -> None:
        """Write it to a new PEM file, not encrypted, readable by its owner alone.

        Raises:
            ConfigError: If the file exists already, or cannot be written.
        """
        try:
            target = Path(path)
            target.touch(mode=0o600, exist_ok=False)
            target.write_bytes(self.private_pem())
        except OSError as exc:
            raise ConfigError(f"producer key file {path}: {exc.strerror or exc}") from None

    @property
    def algorithm(self) -> SigningAlgorithm:
        """What it signs with."""
        return _algorithm_of(self.public_key)

    @property
    def public_key(self) -> PublicKey:
        """What the members of the scope are given."""
        return self.private_key.public_key()

    def private_pem(self) -> bytes:
        """Return the private key, not encrypted (PKCS #8). Secret."""
        return self.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def public_pem(self) -> bytes:
        """Return the public key."""
        return self.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def __repr__(self) -> str:
        return f"ProducerKey(<secret>, {self.algorithm.name}, kid={self.kid.hex()})"


def key_id(public_key: PublicKey) -> bytes:
    """Return the default key identifier: 16 octets of SHA-256 over the public key (DER)."""
    der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(der).digest()[:_KID_OCTETS]


def trusted_keys(paths: Iterable[str | Path]) -> dict[bytes, PublicKey]:
    """Read the PEM files of producers' public keys, by their default key identifiers.

    Raises:
        ConfigError: If a file cannot be read or holds no such key; the message names it.
    """
    trusted: dict[bytes, PublicKey] = {}
    for path in paths:
        try:
            public = load_pem_public_key(Path(path).read_bytes())
        except OSError as exc:
            raise ConfigError(f"public key file {path}: {exc.strerror or exc}") from None
        except NO_KEY as exc:
            raise ConfigError(f"public key file {path}: not a public key in PEM: {exc}") from None
        if not isinstance(public, Ed25519PublicKey | EllipticCurvePublicKey):
            kind = type(public).__name__
            raise ConfigError(f"public key file {path}: {kind}, expected Ed25519 or P-256")
        try:
            _algorithm_of(public)
        except ConfigError as exc:
            raise ConfigError(f"public key file {path}: {exc}") from None
        trusted[key_id(public)] = public
    return trusted


def sign_manifest(text: bytes, key: ProducerKey) -> bytes:
    """Sign the JSON text of a manifest.

    Returns:
        COSE_Sign1 with its CBOR tag, algorithm and key identifier both in the protected header.
    """
    message = Sign1Message(
        phdr={AlgorithmHeader: _COSE_ALGORITHMS[key.algorithm], KID: key.kid},
        payload=bytes(text),
    )
    message.key = _cose_private(key.private_key)
    signed: bytes = message.encode()
    return signed


class SignedManifest(NamedTuple):
    """What a COSE_Sign1 says of itself. Nothing of it is checked."""

    kid: bytes | None
    """Key identifier, from either header; ``None`` if there is none."""

    algorithm: int | str | None
    """The protected header's; of those that are allowed, the name."""

    text: bytes
    """The payload."""


def read_unverified(
    payload: bytes | bytearray | memoryview, limits: ManifestLimits = DEFAULT_LIMITS
) -> SignedManifest:
    """Look into a ``manifest.cose`` Object without believing it: to show it, never to use it.

    Raises:
        BadManifest: If it is not COSE_Sign1, or too large.
    """
    envelope = _open(payload, limits)
    kid = envelope.header.get(Label.KID, envelope.unprotected.get(Label.KID))
    algorithm = envelope.header.get(Label.ALG)
    if type(algorithm) is int and algorithm in SigningAlgorithm._value2member_map_:
        algorithm = SigningAlgorithm(algorithm).name
    return SignedManifest(
        kid if isinstance(kid, bytes) else None,
        algorithm if isinstance(algorithm, int | str) else None,
        envelope.payload,
    )


def verify_manifest(
    payload: bytes | bytearray | memoryview,
    trusted: Mapping[bytes, PublicKey],
    limits: ManifestLimits = DEFAULT_LIMITS,
) -> bytes:
    """Check the payload of a ``manifest.cose`` Object and return the JSON text in it.

    Args:
        payload: COSE_Sign1, with its CBOR tag or without.
        trusted: Public keys of the producers that are believed, by key identifier.
        limits: Of which ``octets`` is applied, to the JSON text.

    Returns:
        What was signed, octet for octet; for :meth:`Manifest.from_json`.

    Raises:
        BadManifest: If it is not COSE_Sign1; if its algorithm is not ES256 or EdDSA, stands
            outside the protected header or is not that of the key; if its key identifier is
            missing or not among ``trusted``; if it marks a header as critical that is not
            understood here; or if the signature is wrong. Nothing of it can be believed.
    """
    envelope = _open(payload, limits)
    header, unprotected = envelope.header, envelope.unprotected
    algorithm = _check_algorithm(header, unprotected)
    _check_critical(header, unprotected)
    key = _find_key(_check_key_id(header, unprotected), trusted)
    if _algorithm_of(key) is not algorithm:
        wanted = _algorithm_of(key).name
        raise BadManifest(f"manifest signed with {algorithm.name}, but its key is for {wanted}")
    if (octets := len(envelope.signature)) != _SIGNATURE_OCTETS:
        raise BadManifest(f"signature of {octets} octets, expected {_SIGNATURE_OCTETS}")
    if not _signature_is_good(envelope, algorithm, key):
        raise BadManifest("the signature of the manifest is wrong")
    return envelope.payload


def _open(payload: bytes | bytearray | memoryview, limits: ManifestLimits) -> Envelope:
    allowed = limits.octets + 2 * _MAX_HEADER_OCTETS
    if len(payload) > allowed:
        raise BadManifest(f"signed manifest of {len(payload)} octets, limit {allowed}")
    rules = Rules(
        kinds=(Kind.SIGN1,),
        header_octets=_MAX_HEADER_OCTETS,
        payload_octets=limits.octets,
        tag_needed=False,
        cwt_tag=False,
    )
    try:
        return open_envelope(bytes(payload), rules)
    except BadCbor as exc:
        raise BadManifest(f"manifest.cose is not COSE_Sign1 as it is taken: {exc}") from None


def _check_algorithm(header: Mapping[Any, Any], unprotected: Mapping[Any, Any]) -> SigningAlgorithm:
    if Label.ALG in unprotected:
        raise BadManifest("the algorithm stands outside the protected header")
    value = header.get(Label.ALG)
    if type(value) is not int or value not in SigningAlgorithm._value2member_map_:
        raise BadManifest(f"algorithm is {value!r:.64}, expected -7 (ES256) or -8 (EdDSA)")
    return SigningAlgorithm(value)


def _check_critical(header: Mapping[Any, Any], unprotected: Mapping[Any, Any]) -> None:
    if Label.CRIT in unprotected:
        raise BadManifest("crit stands outside the protected header")
    if Label.CRIT not in header:
        return
    labels = header[Label.CRIT]
    if not isinstance(labels, list) or not labels:
        raise BadManifest("crit is not an array of labels")
    for label in labels:
        if type(label) is not int or label not in _UNDERSTOOD:
            raise BadManifest(f"the critical header {label!r:.64} is not understood")
        if label not in header:
            raise BadManifest(f"the critical header {label} is not in the protected header")


def _check_key_id(header: Mapping[Any, Any], unprotected: Mapping[Any, Any]) -> bytes:
    if Label.KID in header and Label.KID in unprotected:
        raise BadManifest("the key identifier stands in both headers")
    kid = header.get(Label.KID, unprotected.get(Label.KID))
    if kid is None:
        raise BadManifest("the manifest names no key identifier")
    if not isinstance(kid, bytes) or not 1 <= len(kid) <= _MAX_KID_OCTETS:
        raise BadManifest(f"the key identifier is not 1 to {_MAX_KID_OCTETS} octets")
    return kid


def _find_key(kid: bytes, trusted: Mapping[bytes, PublicKey]) -> PublicKey:
    try:
        return trusted[kid]
    except KeyError:
        raise BadManifest(f"the manifest is signed by {kid.hex()}, which is not trusted") from None


def _signature_is_good(envelope: Envelope, algorithm: SigningAlgorithm, key: PublicKey) -> bool:
    try:
        # Only what is signed goes to the library; of the protected header it needs the octets.
        message = Sign1Message(
            phdr_encoded=envelope.protected, payload=envelope.payload, key=_cose_public(key)
        )
        # The library also takes names for labels. It must not see another algorithm than we do.
        if message.get_attr(AlgorithmHeader) is not _COSE_ALGORITHMS[algorithm]:
            raise BadManifest("the protected header has two algorithms")
        message.signature = envelope.signature
        good: bool = message.verify_signature()
    except (CoseException, ValueError, TypeError) as exc:
        # Headers that are none of ours, of a type that the library does not expect.
        raise BadManifest(f"the headers of the manifest are malformed: {exc}") from None
    return good


def _algorithm_of(key: PublicKey) -> SigningAlgorithm:
    if isinstance(key, Ed25519PublicKey):
        return SigningAlgorithm.EDDSA
    if not isinstance(key.curve, SECP256R1):
        raise ConfigError(f"the key is on {key.curve.name}, expected Ed25519 or P-256")
    return SigningAlgorithm.ES256


def _check_kid(kid: bytes) -> None:
    if not 1 <= len(kid) <= _MAX_KID_OCTETS:
        raise ConfigError(f"key identifier of {len(kid)} octets, expected 1 to {_MAX_KID_OCTETS}")


def _cose_public(key: PublicKey) -> OKPKey | EC2Key:
    if isinstance(key, Ed25519PublicKey):
        return OKPKey(crv=Ed25519, x=key.public_bytes_raw())
    numbers = key.public_numbers()
    return EC2Key(crv=P256, x=numbers.x.to_bytes(32, "big"), y=numbers.y.to_bytes(32, "big"))


def _cose_private(key: PrivateKey) -> OKPKey | EC2Key:
    if isinstance(key, Ed25519PrivateKey):
        return OKPKey(crv=Ed25519, d=key.private_bytes_raw())
    return EC2Key(crv=P256, d=key.private_numbers().private_value.to_bytes(32, "big"))
