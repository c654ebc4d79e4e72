"""Files with secrets: an issuer's private key, and tokens; for their owner alone."""

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from kvcs.errors import ConfigError
from kvcs.trust.issuers import read_secret_file
from kvcs.trust.keys import PrivateKey, algorithm_of

_MAX_PEM_OCTETS: Final = 65_536
_MODE: Final = 0o600


def private_key_from_file(path: str | Path) -> PrivateKey:
    """Read the private key of an issuer, in PEM and without a password.

    Raises:
        ConfigError: If it cannot be read, others than its owner may read it, or it holds another
            kind of key; the message names the file and never shows what is in it.
    """
    # Raised where no variable holds the key: some programs print those of a traceback.
    key, wrong = _try_to_read(path, "issuer key file")
    if key is None:
        raise ConfigError(wrong)
    return key


def _try_to_read(path: str | Path, what: str) -> tuple[PrivateKey | None, str]:
    """Return the key, or what is wrong with the file."""
    try:
        key = load_pem_private_key(
            read_secret_file(path, limit=_MAX_PEM_OCTETS, what=what), password=None
        )
    except (ValueError, UnsupportedAlgorithm, InternalError):
        return None, f"{what} {path}: not a private key in PEM"
    except TypeError:  # how the library says that it is encrypted
        return None, f"{what} {path}: expected a key without a password"
    except ConfigError as exc:
        return None, str(exc)
    if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey):
        return None, f"{what} {path}: {type(key).__name__}, expected Ed25519 or P-256"
    try:
        algorithm_of(key.public_key())
    except ConfigError as exc:
        return None, f"{what} {path}: {exc}"
    return key, ""


def private_key_to_pem(key: PrivateKey) -> bytes:
    """Return a private key in PEM, without a password."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_new_secret(path: str | Path, octets: bytes, *, what: str) -> None:
    """Write a file that must not be there yet, readable by its owner alone from the beginning.

    Raises:
        ConfigError: If it is there, or cannot be written.
    """
    try:
        _write(Path(path), octets)
    except OSError as exc:
        raise ConfigError(f"{what} {path}: {exc.strerror or exc}") from None


def replace_secret(path: str | Path, octets: bytes, *, what: str) -> None:
    """Write a file in place of one that may be there: who reads it finds the one or the other.

    Raises:
        ConfigError: If it cannot be written.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        try:
            _write(beside, octets)
            beside.replace(target)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise ConfigError(f"{what} {path}: {exc.strerror or exc}") from None


def _write(path: Path, octets: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with open(descriptor, "wb") as file:
        file.write(octets)
        file.flush()
        os.fsync(file.fileno())
