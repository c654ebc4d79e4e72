"""What an endpoint believes: issuers, client certificates, and what was revoked; and its files."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcs.errors import ConfigError
from kvcs.trust import identities as clients
from kvcs.trust import issuers as keys
from kvcs.trust.identities import Identity, identities_from
from kvcs.trust.issuers import Issuers, Revocations, files_named_in, issuers_from, read_file

#: What is known of a file without reading it; None: it is not there.
Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Policy:
    """Whom to believe. A value: a new one takes its place as a whole."""

    issuers: Issuers = field(default_factory=Issuers)
    identities: tuple[Identity, ...] = ()
    revocations: Revocations = field(default_factory=Revocations)


class PolicyFiles:
    """The files that a policy is read from, and whether they changed since.

    Args:
        issuers_file: TOML with tables ``[[issuers]]``, ``[[identities]]``, or both.
        revocations_file: Lines ``cti HEX`` and ``kid HEX``.
    """

    def __init__(
        self, issuers_file: str | Path, revocations_file: str | Path | None = None
    ) -> None:
        self._issuers_file = Path(issuers_file)
        self._revocations_file = None if revocations_file is None else Path(revocations_file)
        self._watched: tuple[Path, ...] = (self._issuers_file,)
        if self._revocations_file is not None:
            self._watched += (self._revocations_file,)
        self._stamps: dict[Path, Stamp] = {}

    def read(self) -> Policy:
        """Read everything, or nothing.

        Raises:
            ConfigError: If one file cannot be read, or holds something else; the message names it.
        """
        # Before they are read, so that whatever is written meanwhile counts as a change.
        self._stamps = {path: stamp_of(path) for path in self._watched}
        try:
            issuers, identities = self._read_believed(self._issuers_file)
            if not issuers and not identities:
                raise ConfigError(f"nobody is believed, expected a table [[{keys.TABLE}]] at least")
        except ConfigError as exc:
            raise ConfigError(f"issuers file {self._issuers_file}: {exc}") from None
        revocations = Revocations()
        if self._revocations_file is not None:
            revocations = Revocations.from_file(self._revocations_file)
        return Policy(issuers, identities, revocations)

    def _read_believed(self, file: Path) -> tuple[Issuers, tuple[Identity, ...]]:
        """Read who is believed, and note the files that this names."""
        members = _members(file)
        tables = members.get(keys.TABLE, [])
        named = files_named_in(tables, folder=file.parent)
        self._stamps |= {path: stamp_of(path) for path in named}
        return issuers_from(tables, folder=file.parent), identities_from(
            members.get(clients.TABLE, [])
        )

    def have_changed(self) -> bool:
        """Whether any file is another than when it was read last, found good or not."""
        return any(stamp_of(path) != stamp for path, stamp in self._stamps.items())


def stamp_of(path: Path) -> Stamp:
    """Return what a file is known by; None if it is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _members(path: Path) -> dict[str, Any]:
    try:
        members = tomllib.loads(read_file(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"not TOML: {exc}") from None
    known = {keys.TABLE, clients.TABLE}
    if unknown := sorted(set(members) - known):
        tables = " and ".join(f"[[{name}]]" for name in sorted(known))
        raise ConfigError(f"{unknown[0]} is not known, expected tables {tables}")
    return members
