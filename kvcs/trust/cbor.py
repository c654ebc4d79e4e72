"""The part of CBOR in which strangers may speak to us (RFC 8949): definite, bounded, unambiguous.

A general decoder expands many forms into objects, of which signed manifests and tokens need few:
a tag can stand for a date, a regular expression or a shared reference. What strangers send reaches
no library before it was read here.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_MAX_DEPTH: Final = 8


class BadCbor(ValueError):
    """Not CBOR as it is accepted here; the text says where it parts."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is well formed and means nothing here: a tag, or a simple value.

    Only in documents that may hold more than is understood. It equals nothing that could be meant.
    """

    what: str


class Cbor:
    """Reads one document, from its beginning to its end.

    Integers, strings, arrays, maps, booleans and null, of definite length, nested up to 8 deep.
    Indefinite lengths are refused, as are maps with two equal keys. A length is compared with what
    is left before anything is made of it, so reading takes time and memory in proportion to the
    input.

    Args:
        octets: The document.
        wide: Whether floats, tags and simple values may stand in it as well, and octets as keys of
            maps: in claims, of which those that are unknown are ignored.
    """

    UNSIGNED, NEGATIVE, BYTES, TEXT, ARRAY, MAP, TAG, SIMPLE = range(8)

    _SIMPLE_VALUES: Mapping[int, bool | None] = {20: False, 21: True, 22: None}
    #: By the additional information of their heads (RFC 8949 Section 3.3).
    _FLOATS: Mapping[int, struct.Struct] = {
        25: struct.Struct(">e"),
        26: struct.Struct(">f"),
        27: struct.Struct(">d"),
    }

    def __init__(self, octets: bytes, *, wide: bool = False) -> None:
        self._octets = octets
        self._wide = wide
        self.at = 0

    def head(self) -> tuple[int, int]:
        """Read one head: major type and argument."""
        first = self._take(1)[0]
        major, info = first >> 5, first & 0x1F
        if info < 24:
            return major, info
        if info > 27:
            raise BadCbor("an indefinite length or a reserved head")
        if major == self.SIMPLE:
            raise BadCbor("a float or an unassigned simple value")
        return major, int.from_bytes(self._take(1 << (info - 24)), "big")

    def byte_string(self, what: str, limit: int) -> bytes:
        """Read a byte string of at most ``limit`` octets; a longer one is refused unread."""
        major, length = self.head()
        if major != self.BYTES:
            raise BadCbor(f"{what} is not a byte string")
        if length > limit:
            raise BadCbor(f"{what} has {length} octets, limit {limit}")
        return self._take(length)

    def value(self, depth: int = 1) -> Any:
        """Read one value with all that is in it."""
        if depth > _MAX_DEPTH:
            raise BadCbor(f"nested deeper than the limit of {_MAX_DEPTH}")
        if self._wide and self._next_head() in _WIDE_HEADS:
            return self._float_or_simple()
        major, argument = self.head()
        match major:
            case self.UNSIGNED:
                return argument
            case self.NEGATIVE:
                return -1 - argument
            case self.BYTES:
                return self._take(argument)
            case self.TEXT:
                return self._text(argument)
            case self.ARRAY:
                self._check_room(argument)
                return [self.value(depth + 1) for _ in range(argument)]
            case self.MAP:
                return self._map(argument, depth)
            case self.SIMPLE if argument in self._SIMPLE_VALUES:
                return self._SIMPLE_VALUES[argument]
            case self.SIMPLE if self._wide:
                return Opaque(f"the simple value {argument}")
            case self.TAG if self._wide:
                self.value(depth + 1)
                return Opaque(f"tag {argument}")
        raise BadCbor("a tag" if major == self.TAG else f"the simple value {argument}")

    def expect_end(self) -> None:
        """Refuse octets after the value."""
        if left := len(self._octets) - self.at:
            raise BadCbor(f"{left} octets too many")

    def _map(self, pairs: int, depth: int) -> dict[Any, Any]:
        self._check_room(2 * pairs)
        kinds = (int, str, bytes) if self._wide else (int, str)
        read: dict[Any, Any] = {}
        for _ in range(pairs):
            key = self.value(depth + 1)
            if type(key) not in kinds:
                raise BadCbor("a map with a key that is neither integer nor text")
            if key in read:
                raise BadCbor(f"a map with two keys {key!r:.64}")
            read[key] = self.value(depth + 1)
        return read

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise BadCbor("text that is not UTF-8") from None

    def _next_head(self) -> int:
        return self._octets[self.at] if self.at < len(self._octets) else -1

    def _float_or_simple(self) -> float | Opaque:
        info = self._take(1)[0] & 0x1F
        if info in self._FLOATS:
            form = self._FLOATS[info]
            number: float = form.unpack(self._take(form.size))[0]
            return number
        [value] = self._take(1)
        if value < 32:  # these are written in one octet (RFC 8949 Section 3.3)
            raise BadCbor(f"the simple value {value} in two octets")
        return Opaque(f"the simple value {value}")

    def _check_room(self, values: int) -> None:
        if values > len(self._octets) - self.at:  # each takes an octet at least
            raise BadCbor(f"{values} values in the {len(self._octets) - self.at} octets left")

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self._octets):
            raise BadCbor(f"ends where {length} more octets were expected")
        taken = self._octets[self.at : end]
        self.at = end
        return taken


#: Simple values in two octets, and floats of 2, 4 and 8.
_WIDE_HEADS: Final = frozenset({0xF8, 0xF9, 0xFA, 0xFB})


def read_map(octets: bytes, what: str, *, wide: bool = False) -> dict[Any, Any]:
    """Read a document that is one map, and nothing after it.

    Raises:
        BadCbor: If it is not.
    """
    reader = Cbor(octets, wide=wide)
    found = reader.value()
    reader.expect_end()
    if not isinstance(found, dict):
        raise BadCbor(f"{what} is not a map")
    return found
