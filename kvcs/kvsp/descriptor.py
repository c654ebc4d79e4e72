"""The Compatibility Descriptor: what must match before a KV cache can be reused (KVSP Section 2).

Identifiers are computed over its canonical form, so everything that two JSON libraries could
print or read differently is refused when a descriptor is made, not when identifiers differ.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import rfc8785

from kvcs.errors import BadDescriptor
from kvcs.kvsp import strictjson

#: Version of KVSP that the member ``kvsp`` names.
VERSION = 1
#: The only layout: token-major ``[block_tokens, heads, dim]``, C order, little-endian.
LAYOUT = "NHD"
#: Element types of raw tensors and the octets of one element.
ELEMENT_OCTETS: Mapping[str, int] = MappingProxyType(
    {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)

MAX_LAYERS = 65_535
MAX_BLOCK_TOKENS = 65_536
#: Heads, and elements of one head. Far above any model; keeps the arithmetic in bounds.
MAX_DIMENSION = 1 << 20
#: Octets of K and V of one layer of a block: what the Data Length of an Object can say.
MAX_LAYER_OCTETS = (1 << 32) - 1
#: Octets of a descriptor. It is repeated in every manifest.
MAX_OCTETS = 1 << 16
#: Nesting of arrays and objects in a descriptor.
MAX_DEPTH = 32
#: Integers beyond this are not the same number to every JSON reader (RFC 8785).
MAX_INTEGER = (1 << 53) - 1

_MEMBERS = (
    "kvsp",
    "model",
    "revision",
    "layers",
    "block_tokens",
    "dtype",
    "k_shape",
    "v_shape",
    "layout",
)

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """A Compatibility Descriptor, checked when it is made.

    Compared and hashed by its canonical form, as the Compatibility ID is.

    Raises:
        BadDescriptor: If a member is missing, of the wrong type or out of its range, if a
            float, a number beyond 2**53 - 1 or text that is not Unicode is anywhere in it, or
            if it is longer than 64 KiB. The message names the member.
    """

    model: str
    """Name of the model."""

    revision: str
    """A digest or tag that pins its weights."""

    layers: int
    """L, 1 to 65,535."""

    block_tokens: int
    """Tokens of a block, 1 to 65,536."""

    dtype: str
    """Element type of the raw tensors, one of :data:`ELEMENT_OCTETS`."""

    k_shape: tuple[int, int]
    """Heads and elements per head of one token's K in one layer; (0, 0) says: no K section."""

    v_shape: tuple[int, int]
    """The same for V."""

    layout: str = LAYOUT

    kvsp: int = VERSION

    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other members, which must match as well. A copy; read it, do not change it."""

    _canonical: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "k_shape", _shape("k_shape", self.k_shape))
        object.__setattr__(self, "v_shape", _shape("v_shape", self.v_shape))
        _integer("kvsp", self.kvsp, VERSION, VERSION)
        _text("model", self.model)
        _text("revision", self.revision)
        _integer("layers", self.layers, 1, MAX_LAYERS)
        _integer("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        _text("dtype", self.dtype)
        if self.dtype not in ELEMENT_OCTETS:
            known = ", ".join(ELEMENT_OCTETS)
            raise BadDescriptor(f"dtype is {_shown(self.dtype)}, expected one of {known}")
        if self.layout != LAYOUT:
            raise BadDescriptor(f"layout is {_shown(self.layout)}, expected {LAYOUT!r}")
        self._check_size()
        if clash := sorted(set(self.extra) & set(_MEMBERS)):
            raise BadDescriptor(f"extra holds the member {clash[0]!r:.64}, which has its own field")
        _check_canonical(dict(self.extra), "", 1)
        object.__setattr__(self, "extra", MappingProxyType(copy.deepcopy(dict(self.extra))))
        canonical = rfc8785.dumps(self.members())
        if len(canonical) > MAX_OCTETS:
            raise BadDescriptor(f"descriptor of {len(canonical)} octets, limit {MAX_OCTETS}")
        object.__setattr__(self, "_canonical", canonical)

    def _check_size(self) -> None:
        elements = self.k_shape[0] * self.k_shape[1] + self.v_shape[0] * self.v_shape[1]
        if elements == 0:
            raise BadDescriptor("k_shape and v_shape are both [0, 0]: there is nothing to store")
        octets = elements * self.block_tokens * ELEMENT_OCTETS[self.dtype]
        if octets > MAX_LAYER_OCTETS:
            raise BadDescriptor(
                f"one layer of a block takes {octets} octets, limit {MAX_LAYER_OCTETS}: "
                "make block_tokens smaller"
            )

    @classmethod
    def from_json(cls, source: bytes | bytearray | memoryview | str | Mapping[str, Any]) -> Self:
        """Make a descriptor from JSON text, or from the object that was parsed from it.

        Args:
            source: UTF-8 text, or a mapping. In text, members that occur twice are refused.

        Raises:
            BadDescriptor: As for the class, and for what is not a JSON object.
        """
        if not isinstance(source, Mapping):
            try:
                source = strictjson.loads(
                    source, octets=MAX_OCTETS, depth=MAX_DEPTH, values=MAX_OCTETS
                )
            except strictjson.StrictJsonError as exc:
                raise BadDescriptor(f"descriptor is not JSON: {exc}") from None
        if not isinstance(source, Mapping):
            raise BadDescriptor(f"descriptor is {_kind(source)}, expected an object")
        if missing := [name for name in _MEMBERS if name not in source]:
            raise BadDescriptor(f"descriptor has no member {missing[0]!r}")
        known = {name: source[name] for name in _MEMBERS}
        extra = {name: value for name, value in source.items() if name not in known}
        return cls(**known, extra=extra)

    def canonical(self) -> bytes:
        """Return the form identifiers are computed over (RFC 8785)."""
        return self._canonical

    def members(self) -> dict[str, Any]:
        """Return the members as a JSON object, for embedding in another one."""
        known = {name: getattr(self, name) for name in _MEMBERS}
        known["k_shape"] = list(self.k_shape)
        known["v_shape"] = list(self.v_shape)
        return known | copy.deepcopy(dict(self.extra))

    def to_json(self) -> bytes:
        """Return indented JSON in UTF-8, for files and people."""
        return json.dumps(self.members(), ensure_ascii=False, indent=2).encode()

    def differences(self, other: "Descriptor") -> tuple[str, ...]:
        """Name the members that differ, each with both values: ours, then the other's."""
        ours, theirs = self.members(), other.members()
        found = []
        for name in ours | theirs:
            mine, his = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
            # Text, not values: to Python 1 and true are equal, to an identifier they are not.
            if (a := _shown(mine, None)) != (b := _shown(his, None)):
                found.append(f"{name}: {_clip(a)} and {_clip(b)}")
        return tuple(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descriptor) and self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self._canonical)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:
        raise BadDescriptor(f"{name} is {_kind(value)}, expected an integer")
    if not low <= value <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise BadDescriptor(f"{name} is {_shown(value)}, expected {wanted}")


def _text(name: str, value: object) -> None:
    if type(value) is not str:
        raise BadDescriptor(f"{name} is {_kind(value)}, expected a string")
    if not value:
        raise BadDescriptor(f"{name} is empty")
    _check_canonical(value, name, 1)


def _shape(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadDescriptor(f"{name} is {_shown(value)}, expected [heads, dim]")
    heads, dim = value
    if type(heads) is int and type(dim) is int and (heads, dim) == (0, 0):
        return (0, 0)
    _integer(f"{name}[0]", heads, 1, MAX_DIMENSION)
    _integer(f"{name}[1]", dim, 1, MAX_DIMENSION)
    return (heads, dim)


def _check_canonical(value: object, path: str, depth: int) -> None:
    """Refuse what has no canonical form, naming the path to it."""
    where = _clip(path, 200)  # names of members are as long as whoever wrote them likes
    if depth > MAX_DEPTH:
        raise BadDescriptor(f"{where} is nested deeper than the limit of {MAX_DEPTH}")
    match value:
        case None | bool():
            return
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise BadDescriptor(f"{where} is not Unicode text: half a surrogate pair") from None
        case int():
            if abs(value) > MAX_INTEGER:
                raise BadDescriptor(f"{where} is an integer beyond 2**53 - 1: write it as a string")
        case float():
            raise BadDescriptor(
                f'{where} is the float {value!r}: write it as a string, "{value!r}"; '
                "JSON libraries do not all print one float alike, and identifiers would differ"
            )
        case list() | tuple():
            for index, item in enumerate(value):
                _check_canonical(item, f"{path}[{index}]", depth + 1)
        case dict():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise BadDescriptor(f"{where or 'extra'} has a member name that is not text")
                inner = f"{path}.{name}" if path else name
                _check_canonical(name, "the name of a member", depth)
                _check_canonical(item, inner, depth + 1)
        case _:
            raise BadDescriptor(f"{where} is a {type(value).__name__}, which JSON does not have")


def _kind(value: object) -> str:
    """Say in JSON's words what a value is."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return f'the float {value!r} (write numbers like this as a string, "{value!r}")'
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case Mapping():
            return "an object"
    return f"a {type(value).__name__}"


def _shown(value: object, limit: int | None = 60) -> str:
    if value is _ABSENT:
        return "absent"
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        text = _kind(value)
    return text if limit is None else _clip(text, limit)


def _clip(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
