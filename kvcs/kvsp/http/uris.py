"""URIs of holders: where a publication, or a block service, is to be found.

A publication is named by the MOQT URI of whoever serves it, and the namespace in the fragment::

    moqt://relay.example:4443/path#kvcs-1:SCOPE/COMPATIBILITY/ANCHOR/PUBLICATION

A MOQT URI may end in ``#type:value``, which stays at the client (MOQT, "MOQT URI"). The type is
field 0 of the namespace, the value its other four fields in lower-case hex. What is before the
``#`` is dialled.

A block service is named by the ``https`` URI that its paths are appended to.

Both are read strictly: they come from an index, which takes them from anybody in the scope.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from kvcs.errors import BadName
from kvcs.kvsp.http.names import from_hex
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.profile.naming import PROFILE, PUBLICATION_ID_OCTETS, PublicationName

#: Characters of a URI at most; all of them are ASCII.
MAX_URI = 2048

_FRAGMENT_TYPE = PROFILE.decode()
_IDENTIFIERS = (
    ("Scope ID", ID_OCTETS),
    ("Compatibility ID", ID_OCTETS),
    ("Anchor Key", ID_OCTETS),
    ("Publication ID", PUBLICATION_ID_OCTETS),
)
# RFC 3986: what may stand in a path segment or query, and in the name of a host.
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"
)
_PATH = re.compile(rf"(?:/{_PCHAR}*)*")
_QUERY = re.compile(rf"(?:{_PCHAR}|[/?])*")


@dataclass(frozen=True, slots=True)
class PublicationUri:
    """A publication, and who serves it.

    Attributes:
        session: The MOQT URI to dial, without fragment.
        name: The publication.

    Raises:
        BadName: If ``session`` is no MOQT URI, has a fragment, or both together are too long.
    """

    session: str
    name: PublicationName

    def __post_init__(self) -> None:
        _check_length(str(self))
        _split(self.session, "moqt", query=True)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URI.

        Raises:
            BadName: If it is not of this form; the message says what was found and expected.
        """
        _check_length(text)
        session, mark, fragment = text.partition("#")
        kind, colon, value = fragment.partition(":")
        if not mark or not colon or kind != _FRAGMENT_TYPE:
            raise BadName(
                f"MOQT URI with the fragment {fragment[:40]!r}, expected #{_FRAGMENT_TYPE}:SCOPE/"
                "COMPATIBILITY/ANCHOR/PUBLICATION"
            )
        parts = value.split("/")
        if len(parts) != len(_IDENTIFIERS):
            raise BadName(f"namespace of {1 + len(parts)} fields, expected {1 + len(_IDENTIFIERS)}")
        return cls(
            session,
            PublicationName(
                *(from_hex(w, p, n) for (w, n), p in zip(_IDENTIFIERS, parts, strict=True))
            ),
        )

    def __str__(self) -> str:
        fields = self.name.namespace.fields[1:]
        return f"{self.session}#{_FRAGMENT_TYPE}:{'/'.join(field.hex() for field in fields)}"


@dataclass(frozen=True, slots=True)
class ServiceUri:
    """A service over HTTP: ``https://HOST:PORT/PATH``, to which its paths are appended.

    Attributes:
        base: The URI, without a slash at its end.

    Raises:
        BadName: If it is no such URI.
    """

    base: str

    def __post_init__(self) -> None:
        _check_length(self.base)
        _split(self.base, "https", query=False)
        if self.base.endswith("/"):
            raise BadName("URI of a service with a slash at its end, expected none")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a URI; slashes at its end make no difference.

        Raises:
            BadName: If it is no ``https`` URI, or has a query, a fragment or a user.
        """
        return cls(text.rstrip("/"))

    @property
    def host(self) -> str:
        """The host, an IPv6 address without its brackets."""
        return _split(self.base, "https", query=False)[0]

    @property
    def port(self) -> int:
        """The port, 443 where none is said."""
        return _split(self.base, "https", query=False)[1] or 443

    def __str__(self) -> str:
        return self.base


HolderUri = PublicationUri | ServiceUri


def parse_holder(text: object) -> HolderUri:
    """Read a URI of either kind.

    Raises:
        BadName: If it is of neither.
    """
    if not isinstance(text, str):
        raise BadName("URI of a holder is no text")
    scheme = text.partition("://")[0]
    if scheme == "moqt":
        return PublicationUri.parse(text)
    if scheme == "https":
        return ServiceUri.parse(text)
    raise BadName(f"URI of a holder begins with {scheme[:16]!r}, expected moqt:// or https://")


def _check_length(text: str) -> None:
    if len(text) > MAX_URI:
        raise BadName(f"URI of {len(text)} characters, limit {MAX_URI}")


def _split(text: str, scheme: str, *, query: bool) -> tuple[str, int | None]:
    """Return host and port of a URI without fragment, and refuse anything that is none."""
    begin = f"{scheme}://"
    if not text.startswith(begin):
        raise BadName(f"URI begins with {text[:16]!r}, expected {begin}")
    rest, mark, asked = text.removeprefix(begin).partition("?")
    if mark and not (query and _QUERY.fullmatch(asked)):
        raise BadName(f"{scheme} URI with a query that cannot be used")
    authority, slash, path = rest.partition("/")
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise BadName(f"{scheme} URI with the authority {authority[:64]!r}, expected HOST:PORT")
    if not _PATH.fullmatch(slash + path):
        raise BadName(f"{scheme} URI with a path that RFC 3986 does not allow")
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 1 <= port <= 65_535:
        raise BadName(f"{scheme} URI with port {port}, expected 1 to 65535")
    if (address := match["v6"]) is not None:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise BadName(f"{scheme} URI with the address [{address}], expected IPv6") from None
        return address, port
    host: str = match["host"]
    return host, port
