"""Who may issue tokens, and what was revoked: read from files, checked before it is used.

Issuers stand in TOML, a table for each key::

    [[issuers]]
    issuer = "cluster.example"          # what tokens of this key say in iss
    kid = "2026-11"                     # or kid_hex; left out: 8 octets of the key's thumbprint
    public_key = "d75a9801...707511a"   # hex, Ed25519 or P-256; or public_key_file = "issuer.pem"
    not_after = 2027-06-01T00:00:00Z    # from when on nothing is believed that it signed

A shared secret, for HMAC 256/256, is named with ``secret_file``. Whoever has it can mint tokens, so
it is for an issuer and verifier in one process, and for no relay.

Revoked tokens and keys stand in a text file, a line for each: ``cti HEX`` or ``kid HEX``.
"""

import datetime
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import fstat
from pathlib import Path
from typing import Self

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from kvcs.errors import ConfigError
from kvcs.trust.keys import (
    MAX_KID_OCTETS,
    MIN_SECRET_OCTETS,
    Algorithm,
    PublicKey,
    algorithm_of,
    default_kid,
)

#: What a file of issuers, and one of what is revoked, may have.
MAX_FILE_OCTETS = 4 << 20
MAX_ISSUERS = 256
MAX_REVOKED = 65_536
#: What ``cti`` of a token, and so a line of the revocation list, may have.
MAX_CTI_OCTETS = 64
_MAX_SECRET_OCTETS = 1024
_MAX_NAME = 256
#: The tables of issuers, in a file of their own or in any other one that has them.
TABLE = "issuers"
_MEMBERS = frozenset(
    {"issuer", "kid", "kid_hex", "public_key", "public_key_file", "secret_file", "not_after"}
)


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """A key whose tokens are believed.

    Raises:
        ConfigError: If the key identifier or the name is empty or too long, or the key unusable.
    """

    issuer: str
    """What tokens of this key must say in ``iss``."""

    kid: bytes
    """Key identifier, 1 to 64 octets."""

    key: PublicKey | bytes = field(repr=False)
    """The public key; octets are the shared secret of HMAC 256/256."""

    not_after: float | None = None
    """Wall clock, in seconds, from which on nothing is believed that it signed."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.kid) <= MAX_KID_OCTETS:
            raise ConfigError(f"kid of {len(self.kid)} octets, expected 1 to {MAX_KID_OCTETS}")
        if not 1 <= len(self.issuer) <= _MAX_NAME:
            found = f"issuer of {len(self.issuer)} characters"
            raise ConfigError(f"{found}, expected 1 to {_MAX_NAME}")
        if isinstance(self.key, bytes) and len(self.key) < MIN_SECRET_OCTETS:
            found = f"shared secret of {len(self.key)} octets"
            raise ConfigError(f"{found}, expected at least {MIN_SECRET_OCTETS}")
        _ = self.algorithm

    @property
    def algorithm(self) -> Algorithm:
        """The one algorithm that tokens of this key may name."""
        return Algorithm.HMAC_256 if isinstance(self.key, bytes) else algorithm_of(self.key)

    def is_trusted_at(self, now: float) -> bool:
        """Whether its tokens are believed at this time."""
        return self.not_after is None or now < self.not_after


class Issuers(Mapping[bytes, IssuerKey]):
    """The keys whose tokens are believed, by their identifiers.

    Raises:
        ConfigError: If there are too many, or two with one identifier.
    """

    def __init__(self, keys: Iterable[IssuerKey] = ()) -> None:
        listed = tuple(keys)
        if len(listed) > MAX_ISSUERS:
            raise ConfigError(f"{len(listed)} keys of issuers, limit {MAX_ISSUERS}")
        self._keys = {key.kid: key for key in listed}
        if len(self._keys) != len(listed):
            twice = next(k.kid for k in listed if self._keys[k.kid] is not k)
            raise ConfigError(f"two keys of issuers have the kid {shown_kid(twice)}")

    def __getitem__(self, kid: bytes) -> IssuerKey:
        return self._keys[kid]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True, slots=True)
class Revocations:
    """Tokens and keys that are believed no more."""

    token_ids: frozenset[bytes] = frozenset()
    """``cti`` of single tokens."""

    kids: frozenset[bytes] = frozenset()
    """Of keys, with every token that they signed."""

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read the lines of a list: ``cti HEX`` or ``kid HEX``, and comments behind ``#``.

        Raises:
            ConfigError: If a line is none; the message names it. Half a list is no list.
        """
        found: dict[str, set[bytes]] = {"cti": set(), "kid": set()}
        try:
            lines = text.decode("ascii").splitlines()
        except UnicodeDecodeError as exc:
            raise ConfigError(f"octet {exc.start} is not ASCII") from None
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                [kind, digits] = words
                found[kind].add(_revoked(kind, digits))
            except (ValueError, KeyError):
                raise ConfigError(
                    f"line {number} is {line.strip()[:40]!r}, expected `cti HEX` or `kid HEX`"
                ) from None
        if (listed := sum(map(len, found.values()))) > MAX_REVOKED:
            raise ConfigError(f"{listed} tokens and keys, limit {MAX_REVOKED}")
        return cls(frozenset(found["cti"]), frozenset(found["kid"]))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a list from a file.

        Raises:
            ConfigError: If it cannot be read, or is none; the message names the file.
        """
        try:
            return cls.parse(read_file(path))
        except ConfigError as exc:
            raise ConfigError(f"revocations file {path}: {exc}") from None


def issuers_from(tables: object, *, folder: str | Path = ".") -> Issuers:
    """Make issuers of tables, as TOML gives them.

    Args:
        tables: A list of tables with the members that stand on top of this module.
        folder: What the names of files in them are relative to.

    Raises:
        ConfigError: If one is none; the message says which, what was found and expected.
    """
    if not isinstance(tables, list | tuple):
        raise ConfigError(f"{TABLE} is {type(tables).__name__}, expected tables: [[{TABLE}]]")
    keys = []
    for number, table in enumerate(tables, start=1):
        try:
            keys.append(_issuer_from(table, Path(folder)))
        except ConfigError as exc:
            raise ConfigError(f"{TABLE} {number}: {exc}") from None
    return Issuers(keys)


def files_named_in(tables: object, *, folder: str | Path = ".") -> tuple[Path, ...]:
    """Return the files that tables of issuers name, which must be read again when they change."""
    return tuple(
        Path(folder) / name
        for table in (tables if isinstance(tables, list | tuple) else ())
        if isinstance(table, Mapping)
        for member in ("public_key_file", "secret_file")
        if isinstance(name := table.get(member), str)
    )


def shown_kid(kid: bytes) -> str:
    """Return a key identifier for people: as text if it is some, else in hex."""
    text = kid.decode("ascii", errors="replace")
    return text if text.isprintable() and kid.isascii() else kid.hex()


def public_key_from_hex(text: str) -> PublicKey:
    """Read a public key in hex: 32 octets of Ed25519, or a point of P-256 (SEC 1).

    Raises:
        ConfigError: If it is neither.
    """
    try:
        octets = bytes.fromhex(text)
        if len(octets) == 32:
            return Ed25519PublicKey.from_public_bytes(octets)
        if len(octets) in (33, 65):
            return EllipticCurvePublicKey.from_encoded_point(SECP256R1(), octets)
    except ValueError:
        raise ConfigError("public_key is not hex, or no key") from None
    raise ConfigError(
        f"public_key of {len(octets)} octets, expected 32 (Ed25519), or 33 or 65 (P-256)"
    )


def public_key_from_file(path: str | Path) -> PublicKey:
    """Read a public key from a PEM file.

    Raises:
        ConfigError: If it cannot be read, or holds another kind of key; the message names it.
    """
    try:
        key = load_pem_public_key(read_file(path))
    except (ValueError, UnsupportedAlgorithm, InternalError) as exc:
        raise ConfigError(f"public key file {path}: not a public key in PEM: {exc}") from None
    except ConfigError as exc:
        raise ConfigError(f"public key file {path}: {exc}") from None
    if not isinstance(key, Ed25519PublicKey | EllipticCurvePublicKey):
        found = type(key).__name__
        raise ConfigError(f"public key file {path}: {found}, expected Ed25519 or P-256")
    return key


def read_file(path: str | Path) -> bytes:
    """Read a file of issuers, keys or revocations, of 4 MiB at most.

    Raises:
        ConfigError: If it cannot be read, or is longer. Whoever asks says which file it was.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_OCTETS + 1)
    except (OSError, ValueError) as exc:  # ValueError: a name with a NUL in it
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(reason) from None
    if len(content) > MAX_FILE_OCTETS:
        raise ConfigError(f"more than {MAX_FILE_OCTETS} octets")
    return content


def read_secret_file(path: str | Path, *, limit: int, what: str) -> bytes:
    """Read a file that is for its owner alone.

    Args:
        path: The file.
        limit: Octets that it may have.
        what: What messages call it.

    Raises:
        ConfigError: If it cannot be read, is longer, or others than its owner may read it. The
            message never shows what is in it.
    """
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(fstat(file.fileno()).st_mode)
            # No variable holds a secret where an error is raised below.
            content = b"" if mode & 0o077 else file.read(limit + 1)
    except (OSError, ValueError) as exc:  # ValueError: a name with a NUL in it
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(f"{what} {path}: {reason}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{what} {path} has mode {mode:04o}, expected 0600: it is for its owner alone"
        )
    if len(content) > limit:
        content = b""
        raise ConfigError(f"{what} {path} has more than {limit} octets")
    return content


def _issuer_from(table: object, folder: Path) -> IssuerKey:
    if not isinstance(table, Mapping):
        raise ConfigError(f"a {type(table).__name__}, expected a table")
    if unknown := sorted(set(table) - _MEMBERS):
        known = ", ".join(sorted(_MEMBERS))
        raise ConfigError(f"{unknown[0]} is not known, expected some of {known}")
    key = _key_from(table, folder)
    return IssuerKey(_text(table, "issuer"), _kid_from(table, key), key, _not_after_from(table))


def _key_from(table: Mapping[str, object], folder: Path) -> PublicKey | bytes:
    given = [name for name in ("public_key", "public_key_file", "secret_file") if name in table]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ConfigError(
            f"found {found} of public_key, public_key_file, secret_file, expected one"
        )
    [name] = given
    text = _text(table, name)
    if name == "public_key":
        return public_key_from_hex(text)
    if name == "public_key_file":
        return public_key_from_file(folder / text)
    octets = read_secret_file(folder / text, limit=2 * _MAX_SECRET_OCTETS, what="secret file")
    try:
        return bytes.fromhex(octets.strip().decode("ascii"))
    except ValueError:
        raise ConfigError(f"secret file {folder / text}: not in hex") from None


def _kid_from(table: Mapping[str, object], key: PublicKey | bytes) -> bytes:
    if "kid" in table and "kid_hex" in table:
        raise ConfigError("kid and kid_hex are both set, expected one of them")
    if "kid" in table:
        return _text(table, "kid").encode()
    if "kid_hex" in table:
        try:
            return bytes.fromhex(_text(table, "kid_hex"))
        except ValueError:
            raise ConfigError("kid_hex is not hex") from None
    if isinstance(key, bytes):
        raise ConfigError("kid is not set, which a shared secret must have")
    return default_kid(key)


def _not_after_from(table: Mapping[str, object]) -> float | None:
    value = table.get("not_after")
    if value is None:
        return None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        raise ConfigError(
            f"not_after is {str(value)!r:.60}, expected a time with its zone: 2027-06-01T00:00:00Z"
        )
    return value.timestamp()


def _text(table: Mapping[str, object], name: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        found = "not set" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{name} is {found}, expected text")
    return value


def _revoked(kind: str, digits: str) -> bytes:
    octets = bytes.fromhex(digits)
    if not 1 <= len(octets) <= (MAX_CTI_OCTETS if kind == "cti" else MAX_KID_OCTETS):
        raise ValueError("of another length")
    return octets
