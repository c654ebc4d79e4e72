"""Names of Tracks: limits, prefixes, and the text form for logs.

A name is octets, compared octet by octet; no character set is assumed anywhere. Both classes
refuse what the draft forbids with :exc:`~moqt.errors.UsageError`. Reading names off the wire
(:mod:`moqt.wire.reader`) turns that into a :exc:`~moqt.errors.ProtocolError`, since there it is
the peer's mistake.
"""

import re
from dataclasses import dataclass
from typing import Final, Self

from moqt.errors import UsageError

#: Fields of a Track Namespace (MOQT, "Track Namespace Structure").
MAX_FIELDS: Final = 32
#: Octets of all fields together, and of all fields and the Track Name together.
MAX_NAME_OCTETS: Final = 4096

_LITERAL = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_PRINTABLE = [chr(o) if o in _LITERAL else f".{o:02x}" for o in range(256)]
_TOKEN = re.compile(r"([A-Za-z0-9_])|\.([0-9a-f]{2})")


def _show(octets: bytes) -> str:
    return "".join([_PRINTABLE[octet] for octet in octets])


def _read(text: str) -> bytes:
    octets = bytearray()
    at = 0
    while at < len(text):
        if (token := _TOKEN.match(text, at)) is None:
            raise UsageError(f"{text!r:.100} is no printable name: unexpected text at {at}")
        octet = ord(token[1]) if token[1] else int(token[2], 16)
        if token[2] and octet in _LITERAL:
            raise UsageError(f"{text!r:.100} is no printable name: {token[0]} is not escaped")
        octets.append(octet)
        at = token.end()
    return bytes(octets)


@dataclass(frozen=True, slots=True, order=True)
class TrackNamespace:
    """Up to 32 non-empty fields; also a prefix or a suffix of one (MOQT, "Track Namespace").

    Raises:
        UsageError: If there are more than 32 fields, an empty one, or more than 4096 octets.
    """

    fields: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len(self.fields) > MAX_FIELDS:
            raise UsageError(f"namespace of {len(self.fields)} fields, limit {MAX_FIELDS}")
        if not all(self.fields):
            raise UsageError("namespace with an empty field")
        if self.octets > MAX_NAME_OCTETS:
            raise UsageError(f"namespace of {self.octets} octets, limit {MAX_NAME_OCTETS}")

    @classmethod
    def of(cls, *fields: bytes | str) -> Self:
        """Return a namespace from fields in order; text stands for its UTF-8 octets."""
        return cls(tuple(f.encode() if isinstance(f, str) else f for f in fields))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the namespace whose ``str()`` is ``text``; the empty text has no fields.

        Raises:
            UsageError: If ``text`` is not exactly what ``str()`` prints.
        """
        return cls(tuple(_read(part) for part in text.split("-")) if text else ())

    @property
    def octets(self) -> int:
        """Octets of all fields together."""
        return sum(map(len, self.fields))

    @property
    def is_reserved(self) -> bool:
        """Whether it begins with a field set aside for the protocol: one that starts with `.`.

        An application publishes nothing here (MOQT, "Reserved Namespaces").
        """
        return bool(self.fields) and self.fields[0].startswith(b".")

    @property
    def is_local(self) -> bool:
        """Whether requests end at this hop: the first field is `.` or `.session`.

        The MOQT layer answers them by itself; neither an application nor another hop ever
        hears of them (MOQT, "Session-Level Tracks").
        """
        return bool(self.fields) and self.fields[0] in (b".", b".session")

    def is_prefix_of(self, other: "TrackNamespace") -> bool:
        """Whether ``other`` begins with these fields, whole and exactly, or equals them."""
        return other.fields[: len(self.fields)] == self.fields

    def suffix(self, prefix: "TrackNamespace") -> "TrackNamespace":
        """Return what follows ``prefix``; empty when they are equal.

        Raises:
            UsageError: If this namespace does not begin with ``prefix``.
        """
        if not prefix.is_prefix_of(self):
            raise UsageError(f"{self} does not begin with {prefix}")
        return TrackNamespace(self.fields[len(prefix.fields) :])

    def __add__(self, suffix: "TrackNamespace") -> "TrackNamespace":
        """Return this prefix and ``suffix`` as one namespace.

        Raises:
            UsageError: If both together exceed the limits. Each half may have come from a
                peer and be legal by itself.
        """
        return TrackNamespace(self.fields + suffix.fields)

    def __str__(self) -> str:
        """Fields joined by `-`; letters, digits and `_` as they are, other octets as `.hh`."""
        return "-".join(map(_show, self.fields))


@dataclass(frozen=True, slots=True, order=True)
class FullTrackName:
    """A Track Namespace and a Track Name, which may be empty (MOQT, "Full Track Name").

    Raises:
        UsageError: If namespace and name together exceed 4096 octets.
    """

    namespace: TrackNamespace
    name: bytes

    def __post_init__(self) -> None:
        octets = self.namespace.octets + len(self.name)
        if octets > MAX_NAME_OCTETS:
            raise UsageError(f"full track name of {octets} octets, limit {MAX_NAME_OCTETS}")

    @classmethod
    def of(cls, *fields_and_name: bytes | str) -> Self:
        """Return a name from the fields and, last, the Track Name; text stands for UTF-8."""
        *fields, name = fields_and_name
        return cls(TrackNamespace.of(*fields), name.encode() if isinstance(name, str) else name)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the Full Track Name whose ``str()`` is ``text``.

        Raises:
            UsageError: If ``text`` is not exactly what ``str()`` prints.
        """
        namespace, separator, name = text.partition("--")
        if not separator:
            raise UsageError(f"{text!r:.100} is no printable track name: no -- before the name")
        return cls(TrackNamespace.parse(namespace), _read(name))

    def __str__(self) -> str:
        """The namespace, `--`, and the name, both in the form of :class:`TrackNamespace`."""
        return f"{self.namespace}--{_show(self.name)}"
