"""Clients known by their TLS certificates: what is read of one, and what it may do.

Identities stand in TOML, a table for each URI that a certificate may have as a subject alternative
name, such as SPIFFE gives to workloads::

    [[identities]]
    uri = "spiffe://cluster.example/decode/*"  # /* at the end: whatever is below
    role = "consumer"                          # or producer, relay
    scopes = ["74a7a6fc...e3d1"]               # Scope IDs in hex
    compatibility = "49db976d...8649"          # left out: every model

Whether a certificate is to be believed was decided before: by its chain, when the session began.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcs.errors import ConfigError
from kvcs.trust.grants import BadPermission, Permission, Role, permissions_of
from kvcs.trust.keys import thumbprint

#: The tables, in a file beside those of issuers.
TABLE: Final = "identities"
MAX_IDENTITIES: Final = 4096
#: URIs of one certificate that are looked at.
MAX_URIS: Final = 16
_MAX_URI: Final = 2048
_BELOW: Final = "/*"
_MEMBERS: Final = frozenset({"uri", "role", "scopes", "compatibility"})


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """What is used of a client's certificate."""

    uris: tuple[str, ...]
    """Its subject alternative names that are URIs."""

    expires_at: float
    """Wall clock, in seconds."""

    thumbprint: bytes | None
    """Of its public key (RFC 9679); None for kinds of keys that no token can be bound to."""


def read_certificate(der: bytes) -> ClientCertificate:
    """Read a certificate.

    Raises:
        ConfigError: If it is none.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        public_key = certificate.public_key()
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        uris = ()
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as exc:
        raise ConfigError(f"the client's certificate cannot be read: {exc}") from None
    is_usable = isinstance(public_key, Ed25519PublicKey) or (
        isinstance(public_key, EllipticCurvePublicKey) and public_key.curve.name == "secp256r1"
    )
    return ClientCertificate(
        uris=tuple(uri for uri in uris if uri.isprintable())[:MAX_URIS],
        expires_at=certificate.not_valid_after_utc.timestamp(),
        thumbprint=thumbprint(public_key) if is_usable else None,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Who has one of these URIs may do this.

    Raises:
        ConfigError: If it is no URI, or would fit all that there are.
    """

    uri: str
    """The whole URI; with ``/*`` at its end, any below."""

    permissions: tuple[Permission, ...]

    def __post_init__(self) -> None:
        scheme, separator, rest = self.uri.removesuffix(_BELOW).partition("://")
        if not (scheme and separator and rest) or "*" in scheme + rest or len(self.uri) > _MAX_URI:
            raise ConfigError(
                f"uri is {self.uri!r:.100}, expected SCHEME://NAME/PATH, or with /* at its end"
            )

    def fits(self, uri: str) -> bool:
        """Say whether this URI is meant, character by character."""
        if self.uri.endswith(_BELOW):
            begin = self.uri.removesuffix("*")
            return uri.startswith(begin) and len(uri) > len(begin)
        return uri == self.uri


def identities_from(tables: object) -> tuple[Identity, ...]:
    """Make identities of tables, as TOML gives them.

    Raises:
        ConfigError: If one is none; the message says which, what was found and expected.
    """
    if not isinstance(tables, list | tuple):
        raise ConfigError(f"{TABLE} is {type(tables).__name__}, expected tables: [[{TABLE}]]")
    if len(tables) > MAX_IDENTITIES:
        raise ConfigError(f"{len(tables)} {TABLE}, limit {MAX_IDENTITIES}")
    identities = []
    for number, table in enumerate(tables, start=1):
        try:
            identities.append(_identity_from(table))
        except (ConfigError, BadPermission) as exc:
            raise ConfigError(f"{TABLE} {number}: {exc}") from None
    return tuple(identities)


def role_from(text: object) -> Role:
    """Read a role.

    Raises:
        ConfigError: If it is none.
    """
    try:
        return Role(text)  # type: ignore[arg-type]
    except ValueError:
        raise ConfigError(f"role is {text!r:.60}, expected {', '.join(Role)}") from None


def _identity_from(table: object) -> Identity:
    if not isinstance(table, Mapping):
        raise ConfigError(f"a {type(table).__name__}, expected a table")
    if unknown := sorted(set(table) - _MEMBERS):
        raise ConfigError(f"{unknown[0]} is not known, expected {', '.join(sorted(_MEMBERS))}")
    uri, scopes = table.get("uri"), table.get("scopes")
    if not isinstance(uri, str):
        raise ConfigError("uri is not set, expected text")
    if not isinstance(scopes, list):
        raise ConfigError("scopes are not set, expected an array of Scope IDs in hex")
    compatibility = table.get("compatibility")
    permissions = permissions_of(
        role_from(table.get("role")),
        [_octets("a Scope ID", scope) for scope in scopes],
        None if compatibility is None else _octets("compatibility", compatibility),
    )
    return Identity(uri, permissions)


def _octets(what: str, text: object) -> bytes:
    try:
        return bytes.fromhex(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is {text!r:.80}, expected hex") from None
