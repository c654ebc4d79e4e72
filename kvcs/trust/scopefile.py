"""A scope in a file: TOML, of its owner alone.

::

    key = "5e…64 hex digits or more…"       # the scope key
    sealing = "sealed"                      # or "clear", which it is if this is left out
    protection = "secure-objects-01"        # which text says how
    suite = "aes-128-gcm"                   # or "aes-256-gcm"
    padding = "auto"                        # or "none", "bucket"

    [[producers]]                           # whose manifests are believed; if there are any, those
    name = "prefill-1"                      #   that nobody signed are not
    public_key = "d75a…64 hex digits…"      # hex, Ed25519 or P-256; or public_key_file = "a.pem"
    kid_hex = "5c84…"                       # as manifests name it; left out: from the key
    not_before = 2026-11-30T00:00:00Z
    not_after = 2027-11-30T00:00:00Z

    [[issuers]]                             # whose tokens are believed: see kvcs.trust.issuers

No error shows what is in the file, nor does its traceback, local variables included: it is raised
where there are none with secrets.
"""

import datetime
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcs.errors import ConfigError
from kvcs.kvsp.keys import MIN_OCTETS, ScopeKey
from kvcs.profile.signing import PublicKey, key_id
from kvcs.trust.identities import Identity
from kvcs.trust.issuers import (
    Issuers,
    issuers_from,
    public_key_from_file,
    public_key_from_hex,
    read_secret_file,
)
from kvcs.trust.policy import PolicyFiles
from kvcs.trust.producers import KnownProducer
from kvcs.trust.scope import SUITES, Padding, Protection, Scope

MAX_OCTETS = 1 << 20
MAX_PRODUCERS = 1024
#: The text that says how Objects are sealed: draft-ietf-moq-secure-objects-01.
PROTECTION = "secure-objects-01"

_MEMBERS = frozenset({"key", "sealing", "protection", "suite", "padding", "producers", "issuers"})
_OF_PRODUCERS = frozenset(
    {"name", "public_key", "public_key_file", "kid_hex", "not_before", "not_after"}
)
_NAME = re.compile(r"[a-z_]{1,32}")


def read_scope(path: str | Path) -> Scope:
    """Read a scope.

    Raises:
        ConfigError: If the file cannot be read, others than its owner may read it, or it is no
            scope; the message names the file and the member, and shows no secret.
    """
    scope, wrong = _try_to_read(Path(path))
    if scope is None:
        raise ConfigError(wrong)
    return scope


class ScopePolicy(PolicyFiles):
    """What an endpoint believes, of whom a scope file lists the issuers."""

    def _read_believed(self, file: Path) -> tuple[Issuers, tuple[Identity, ...]]:
        return read_scope(file).issuers, ()


def new_scope(path: str | Path, protection: Protection | None) -> Scope:
    """Make a scope with a new key, and write it to a new file of mode 0600.

    Args:
        path: Where to; nothing may be there.
        protection: How its Objects are sealed; None: they go in clear.

    Raises:
        ConfigError: If there is a file already, or it cannot be written.
    """
    scope, wrong = _try_to_make(Path(path), protection)
    if wrong:
        raise ConfigError(f"scope file {path}: {wrong}")
    return scope


def _try_to_make(path: Path, protection: Protection | None) -> tuple[Scope, str]:
    """Write a new scope; return it, or why it cannot be written."""
    secret = secrets.token_bytes(MIN_OCTETS)
    scope = Scope(ScopeKey(secret), protection)
    lines = [
        "# A scope of kvcs. Secret: who has this file can name, open and make its caches.",
        f"# Scope ID {scope.key.scope_id.hex()}",
        f'key = "{secret.hex()}"',
    ]
    if protection is None:
        lines.append('sealing = "clear"')
    else:
        [suite] = [name for name, suite in SUITES.items() if suite is protection.suite]
        lines += [
            'sealing = "sealed"',
            f'protection = "{PROTECTION}"',
            f'suite = "{suite}"',
            f'padding = "{protection.padding}"',
        ]
    return scope, _write_new(path, "\n".join(lines) + "\n")


def add_producer(path: str | Path, producer: KnownProducer) -> Scope:
    """Add a producer to a scope in a file, which is replaced as a whole.

    Raises:
        ConfigError: If the file is no scope, or lists the key already, or cannot be replaced; then
            it is as it was.
    """
    target = Path(path).resolve()
    scope = read_scope(target)
    if producer.kid in {one.kid for one in scope.producers}:
        raise ConfigError(f"scope file {path}: it lists the key {producer.kid.hex()[:8]} already")
    wrong = _append(target, _table_of(producer))
    if wrong:
        raise ConfigError(f"scope file {path}: {wrong}")
    return read_scope(target)


def _append(target: Path, table: str) -> str:
    """Add lines to a file, or say why not."""
    text = read_secret_file(target, limit=MAX_OCTETS, what="scope file").decode()
    # Beside it, so that it can take its place; and of one name, so that nobody else adds meanwhile.
    beside = target.with_name(f".{target.name}.new")
    if wrong := _write_new(beside, f"{text.rstrip()}\n\n{table}"):
        return f"{beside.name} beside it: {wrong}"
    try:
        read_scope(beside)
        beside.replace(target)
    except (ConfigError, OSError) as exc:
        beside.unlink(missing_ok=True)
        return f"nothing can be added: {exc}"
    return ""


def _write_new(path: Path, text: str) -> str:
    """Write a new file of its owner alone, or say why not."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _table_of(producer: KnownProducer) -> str:
    lines = ["[[producers]]"]
    if producer.name:
        escaped = producer.name.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'name = "{escaped}"')
    lines.append(f'public_key = "{_octets_of(producer.key).hex()}"')
    if producer.kid != key_id(producer.key):
        lines.append(f'kid_hex = "{producer.kid.hex()}"')
    for name in ("not_before", "not_after"):
        if (at := getattr(producer, name)) is not None:
            when = datetime.datetime.fromtimestamp(at, datetime.UTC)
            lines.append(f"{name} = {when:%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines) + "\n"


def _octets_of(key: PublicKey) -> bytes:
    if isinstance(key, Ed25519PublicKey):
        return key.public_bytes_raw()
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def _try_to_read(path: Path) -> tuple[Scope | None, str]:
    """Return the scope, or why there is none: not an exception, which would keep its frames."""
    try:
        content = read_secret_file(path, limit=MAX_OCTETS, what="scope file")
    except ConfigError as exc:
        return None, str(exc)
    try:
        return _scope_from(content, path.parent), ""
    except ConfigError as exc:
        return None, f"scope file {path}: {exc}"


def _scope_from(content: bytes, folder: Path) -> Scope:
    try:
        members = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        where = str(exc) if isinstance(exc, tomllib.TOMLDecodeError) else type(exc).__name__
        raise ConfigError(f"not TOML: {where}") from None
    _check_members(members, _MEMBERS)
    return Scope(
        _key_from(members),
        _protection_from(members),
        _producers_from(members.get("producers", []), folder),
        issuers_from(members.get("issuers", []), folder=folder),
    )


def _check_members(members: Mapping[str, object], known: frozenset[str]) -> None:
    for name in sorted(set(members) - known):
        # Who pastes a secret where a name belongs is not to see it in a log.
        shown = name if _NAME.fullmatch(name) else "a member"
        raise ConfigError(f"{shown} is not known, expected some of {', '.join(sorted(known))}")


def _key_from(members: Mapping[str, object]) -> ScopeKey:
    value = members.get("key")
    if not isinstance(value, str):
        found = "not set" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"key is {found}, expected the scope key in hex")
    try:
        octets = bytes.fromhex(value)
    except ValueError:
        raise ConfigError("key is not hex") from None
    return ScopeKey(octets)


def _protection_from(members: Mapping[str, object]) -> Protection | None:
    sealing = _choice(members, "sealing", ("sealed", "clear"), "clear")
    if sealing == "clear":
        for name in ("protection", "suite", "padding"):
            if name in members:
                raise ConfigError(f"{name} is set, expected sealing to be sealed then")
        return None
    _choice(members, "protection", (PROTECTION,), PROTECTION)
    padding: Any = _choice(members, "padding", get_args(Padding), "auto")
    return Protection(SUITES[_choice(members, "suite", tuple(SUITES), "aes-128-gcm")], padding)


def _choice(
    members: Mapping[str, object], name: str, choices: tuple[str, ...], default: str
) -> str:
    value = members.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {value!r:.40}, expected {' or '.join(choices)}")
    return value


def _producers_from(tables: object, folder: Path) -> tuple[KnownProducer, ...]:
    if not isinstance(tables, list):
        raise ConfigError(f"producers is a {type(tables).__name__}, expected tables: [[producers]]")
    if len(tables) > MAX_PRODUCERS:
        raise ConfigError(f"{len(tables)} producers, limit {MAX_PRODUCERS}")
    found: dict[bytes, KnownProducer] = {}
    for number, table in enumerate(tables, start=1):
        try:
            one = _producer_from(table, folder)
            if one.kid in found:
                raise ConfigError(f"the key {one.kid.hex()[:8]} is listed before")
        except ConfigError as exc:
            raise ConfigError(f"producers {number}: {exc}") from None
        found[one.kid] = one
    return tuple(found.values())


def _producer_from(table: object, folder: Path) -> KnownProducer:
    if not isinstance(table, Mapping):
        raise ConfigError(f"a {type(table).__name__}, expected a table")
    _check_members(table, _OF_PRODUCERS)
    given = [name for name in ("public_key", "public_key_file") if name in table]
    if len(given) != 1:
        raise ConfigError(
            f"found {' and '.join(given) or 'none'} of public_key and public_key_file, expected one"
        )
    [name] = given
    text = _text(table, name)
    key = public_key_from_hex(text) if name == "public_key" else public_key_from_file(folder / text)
    try:
        kid = bytes.fromhex(_text(table, "kid_hex")) if "kid_hex" in table else b""
    except ValueError:
        raise ConfigError("kid_hex is not hex") from None
    return KnownProducer(
        key,
        kid,
        _text(table, "name") if "name" in table else "",
        _time_from(table, "not_before"),
        _time_from(table, "not_after"),
    )


def _text(table: Mapping[str, object], name: str) -> str:
    value = table[name]
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a {type(value).__name__}, expected text")
    return value


def _time_from(table: Mapping[str, object], name: str) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        raise ConfigError(
            f"{name} is {str(value)!r:.60}, expected a time with its zone: 2027-06-01T00:00:00Z"
        )
    return value.timestamp()
