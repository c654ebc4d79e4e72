"""Track Namespaces, Track Names and priorities of the profile (KVCS Sections 3.1 to 3.4)."""

import re
import secrets
from dataclasses import dataclass
from typing import Self

from kvcs.errors import BadName
from kvcs.kvsp.layout import Component
from moqt.names import FullTrackName, TrackNamespace

__all__ = [
    "MANIFEST",
    "MANIFEST_COSE",
    "PROFILE",
    "Component",
    "DataTrack",
    "PublicationName",
    "new_publication_id",
    "publisher_priority",
    "short_hex",
]

#: Field 0 of every namespace of the profile.
PROFILE = b"kvcs-1"
#: Track Name of a manifest that is plain JSON.
MANIFEST = b"manifest"
#: Track Name of a manifest that is signed.
MANIFEST_COSE = b"manifest.cose"
#: Publisher Priority of the manifest track.
MANIFEST_PRIORITY = 0
#: Publisher Priority of the End of Track Object (decision 2): behind every layer.
END_OF_TRACK_PRIORITY = 128

ID_OCTETS = 32
PUBLICATION_ID_OCTETS = 16
#: The grammar sets no bound; this keeps hostile names from becoming hostile integers.
MAX_SEGMENT = (1 << 32) - 1

_COMPONENTS = {"k": Component.K, "v": Component.V, "kv": Component.KV}
_COMPONENT_NAMES = {component: name for name, component in _COMPONENTS.items()}
_CODEC = re.compile(r"[a-z0-9-]{1,32}")
# ABNF text in quotes matches either case, but Track Names are compared octet by octet:
# only lower case is taken, as it is written in the draft.
_DATA_TRACK = re.compile(rb"(k|v|kv)\.([a-z0-9-]{1,32})\.s(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True)
class PublicationName:
    """What a namespace says: whose cache of which prefix, and which production of it.

    Raises:
        BadName: If an identifier does not have its length: 32, 32, 32 and 16 octets.
    """

    scope_id: bytes
    compatibility_id: bytes
    anchor_key: bytes
    publication_id: bytes

    def __post_init__(self) -> None:
        _check_length("Scope ID", self.scope_id, ID_OCTETS)
        _check_length("Compatibility ID", self.compatibility_id, ID_OCTETS)
        _check_length("Anchor Key", self.anchor_key, ID_OCTETS)
        _check_length("Publication ID", self.publication_id, PUBLICATION_ID_OCTETS)

    @classmethod
    def from_namespace(cls, namespace: TrackNamespace) -> Self:
        """Read a Track Namespace of exactly five fields (KVCS Section 3.1).

        Raises:
            BadName: If it is not one of the profile.
        """
        fields = namespace.fields
        if len(fields) != 5:
            raise BadName(f"namespace of {len(fields)} fields, expected 5")
        if fields[0] != PROFILE:
            raise BadName(f"namespace begins with {fields[0][:32]!r}, expected {PROFILE!r}")
        return cls(*fields[1:])

    @property
    def namespace(self) -> TrackNamespace:
        """The Track Namespace: all five fields."""
        return TrackNamespace((*self.prefix.fields, self.publication_id))

    @property
    def prefix(self) -> TrackNamespace:
        """The four fields that all publications of this token prefix have in common."""
        return TrackNamespace((PROFILE, self.scope_id, self.compatibility_id, self.anchor_key))

    @property
    def scope_prefix(self) -> TrackNamespace:
        """The two fields that all publications of the scope have in common."""
        return TrackNamespace((PROFILE, self.scope_id))

    def track(self, name: "DataTrack | bytes") -> FullTrackName:
        """Return the Full Track Name of one of the publication's tracks."""
        track_name = name.name if isinstance(name, DataTrack) else name
        return FullTrackName(self.namespace, track_name)

    def __str__(self) -> str:
        """For logs: the first digits of each identifier (decision 14)."""
        parts = (self.scope_id, self.compatibility_id, self.anchor_key, self.publication_id)
        return "/".join(("kvcs-1", *(short_hex(part) for part in parts)))


@dataclass(frozen=True, slots=True, order=True)
class DataTrack:
    """A data track: which tensors, in which codec, of which segment (KVCS Section 3.2).

    Raises:
        BadName: If the codec name or the segment is not one that the grammar can express.
    """

    component: Component
    codec: str
    segment: int

    def __post_init__(self) -> None:
        if not _CODEC.fullmatch(self.codec):
            raise BadName(f"codec name {self.codec!r}: expected 1 to 32 of a-z, 0-9 and '-'")
        if type(self.segment) is not int or not 0 <= self.segment <= MAX_SEGMENT:
            raise BadName(f"segment is {self.segment!r}, expected 0 to {MAX_SEGMENT}")

    @classmethod
    def parse(cls, name: bytes | str) -> Self:
        """Read the Track Name of a data track.

        Raises:
            BadName: If it does not follow the grammar, as the names of manifests do not.
        """
        octets = name if isinstance(name, bytes) else name.encode(errors="backslashreplace")
        match = _DATA_TRACK.fullmatch(octets)
        if match is None:
            raise BadName(f"{octets[:64]!r} is not the name of a data track, such as 'k.raw.s0'")
        component, codec, segment = match.groups()
        return cls(_COMPONENTS[component.decode()], codec.decode(), int(segment))

    @property
    def name(self) -> bytes:
        """The Track Name, as it is on the wire."""
        return str(self).encode()

    def __str__(self) -> str:
        return f"{_COMPONENT_NAMES[self.component]}.{self.codec}.s{self.segment}"


def publisher_priority(layer: int, layers: int) -> int:
    """Return the Publisher Priority of a layer: 0 for the first, below 128 for the last.

    Implements floor(128 * g / L) of KVCS Section 3.4.

    Raises:
        ValueError: If there is no such layer.
    """
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} of {layers}")
    return 128 * layer // layers


def new_publication_id() -> bytes:
    """Return a Publication ID for one production run, never to be used for another.

    16 octets from the operating system's generator (decision 15).
    """
    return secrets.token_bytes(PUBLICATION_ID_OCTETS)


def short_hex(octets: bytes) -> str:
    """Return the first 8 hex digits, which is what logs show of an identifier."""
    return octets[:4].hex()


def _check_length(what: str, octets: bytes, expected: int) -> None:
    if len(octets) != expected:
        raise BadName(f"{what} of {len(octets)} octets, expected {expected}")
