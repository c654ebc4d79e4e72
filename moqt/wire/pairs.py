"""Key-Value-Pairs: Setup Options, Track Properties, Object Properties (MOQT, "Key-Value-Pair").

An even type has an integer, an odd type has octets; that alone lets a receiver step over what it
does not know. Types are delta coded in ascending order, and the list ends where its enclosing
length says. What a known type means, and what it may not be, is checked here for Properties;
Setup Options have a home of their own (:mod:`moqt.wire.messages.setup`).
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Final

from moqt.codepoints import MANDATORY_PROPERTIES, MAX_VI64, GroupOrder
from moqt.codepoints import PropertyType as P
from moqt.errors import KeyValueFormattingError, ProtocolError, UsageError
from moqt.wire.reader import Reader
from moqt.wire.varint import encode_vi64

#: A type and its value: an int if the type is even, octets if it is odd.
Pair = tuple[int, int | bytes]
#: Pairs in ascending order of type. A type may repeat.
Pairs = tuple[Pair, ...]
#: Pairs that describe a Track or an Object.
Properties = Pairs

#: Octets of an odd type's value.
MAX_VALUE_OCTETS: Final = 0xFFFF

_BY_TYPE = itemgetter(0)


def encode_pairs(pairs: Pairs) -> bytes:
    """Return ``pairs`` on the wire, in ascending order of type; equal types keep their order.

    Raises:
        UsageError: If an even type has octets, an odd type has an integer or more than 65535
            octets, or a type or integer does not fit a vi64.
    """
    out = bytearray()
    previous = 0
    for number, value in sorted(pairs, key=_BY_TYPE):
        out += encode_vi64(number - previous)
        previous = number
        if number % 2 != isinstance(value, bytes):
            raise UsageError(f"pair of type {number:#x} with {type(value).__name__}")
        if isinstance(value, bytes):
            if len(value) > MAX_VALUE_OCTETS:
                raise UsageError(f"pair of {len(value)} octets, limit {MAX_VALUE_OCTETS}")
            out += encode_vi64(len(value))
            out += value
        else:
            out += encode_vi64(value)
    if previous > MAX_VI64:
        raise UsageError(f"pair of type {previous:#x} does not fit a vi64")
    return bytes(out)


def decode_pairs(r: Reader) -> Pairs:
    """Take pairs until the body ends."""
    pairs: list[Pair] = []
    number = 0
    while r.remaining:
        number += r.vi64()
        if number > MAX_VI64:
            raise ProtocolError("the type of a pair exceeds 2**64 - 1")
        pairs.append((number, r.prefixed(MAX_VALUE_OCTETS) if number % 2 else r.vi64()))
    return tuple(pairs)


def encode_object_properties(properties: Properties) -> bytes:
    """Return a Properties Length and the Object Properties behind it."""
    data = encode_pairs(properties)
    return encode_vi64(len(data)) + data


def decode_object_properties(data: bytes) -> Properties:
    """Return the Object Properties in ``data``, which is without its Properties Length.

    Raises:
        ProtocolError: If they do not fill ``data`` exactly.
        KeyValueFormattingError: If Immutable Properties are no list of pairs.
    """
    return _checked_nesting(decode_pairs(Reader(data)))


def decode_track_properties(r: Reader) -> Properties:
    """Take Track Properties: pairs until the body ends.

    Raises:
        ProtocolError: If a default Group Order or the dynamic-groups flag is out of range.
        KeyValueFormattingError: If a default priority does not fit an octet, or Immutable
            Properties are no list of pairs.
    """
    properties = _checked_nesting(decode_pairs(r))
    for number, value in _flat(properties):
        match number:
            case P.DEFAULT_PUBLISHER_GROUP_ORDER if value not in tuple(GroupOrder):
                raise ProtocolError(f"DEFAULT_PUBLISHER_GROUP_ORDER is {value!r}, not 1 or 2")
            case P.DYNAMIC_GROUPS if value not in (0, 1):
                raise ProtocolError(f"DYNAMIC_GROUPS is {value!r}, not 0 or 1")
            case P.DEFAULT_PUBLISHER_PRIORITY if value not in range(256):
                raise KeyValueFormattingError(f"DEFAULT_PUBLISHER_PRIORITY is {value!r}")
    return properties


def find_property(properties: Properties, number: int) -> int | bytes | None:
    """Return the first value of a type, in the open list or else among the immutable ones."""
    if not properties:
        return None
    return next(iter(property_values(properties, number)), None)


def property_values(properties: Properties, number: int) -> list[int | bytes]:
    """Return every value of a type: those in the open list, then the immutable ones."""
    return [value for kind, value in _flat(properties) if kind == number]


def mandatory_property(properties: Properties) -> int | None:
    """Return the first type that binds the receiver to know it, or None.

    This endpoint knows none of them, so a Track that has one must not be processed (MOQT,
    "Mandatory Track Properties"), and an Object that has one is malformed.
    """
    return next((kind for kind, _ in _flat(properties) if kind in MANDATORY_PROPERTIES), None)


def _flat(properties: Properties) -> Iterator[Pair]:
    yield from properties
    for number, value in properties:
        if number == P.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            yield from decode_pairs(Reader(value))


def _checked_nesting(properties: Properties) -> Properties:
    """Return ``properties`` after reading what is nested in them, so that later looks succeed."""
    try:
        for _ in _flat(properties):
            pass
    except ProtocolError as exc:
        raise KeyValueFormattingError(f"immutable properties: {exc}") from None
    return properties
