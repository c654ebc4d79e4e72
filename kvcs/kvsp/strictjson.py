"""JSON from strangers: one reading of each text, and bounds that hold before anything is built.

The parser of the standard library takes the last of two equal keys, ``NaN``, and any nesting.
Two readers that differ in such things disagree about identifiers and signatures, so all of
them are refused here.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

#: A string, whole or cut off by the end of the text. Possessive, so that hostile text costs
#: one pass: there is nothing to backtrack into.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class StrictJsonError(ValueError):
    """The text is not JSON as this project accepts it; the message says why."""


def loads(
    text: bytes | bytearray | memoryview | str, *, octets: int, depth: int, values: int
) -> Any:
    """Parse one JSON text in UTF-8.

    Args:
        text: The whole text.
        octets: Limit on its length.
        depth: Limit on the nesting of arrays and objects.
        values: Limit on the number of values in it, which bounds the memory it takes.

    Returns:
        What :func:`json.loads` returns for it.

    Raises:
        StrictJsonError: If it is not JSON in UTF-8, exceeds a limit (the message names it),
            or has two members of one name in an object.
    """
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise StrictJsonError("text that cannot be written in UTF-8") from None
    if len(raw) > octets:
        raise StrictJsonError(f"{len(raw)} octets, limit {octets}")
    _check_shape(raw, depth, values)
    try:
        return json.loads(raw.decode(), object_pairs_hook=_members, parse_constant=_refuse_constant)
    except StrictJsonError:
        raise
    except UnicodeDecodeError as exc:
        raise StrictJsonError(f"octet {exc.start} is not UTF-8") from None
    except ValueError as exc:  # also an integer of thousands of digits
        raise StrictJsonError(str(exc)) from None
    except RecursionError:  # a depth limit beyond what the interpreter can do
        raise StrictJsonError("nested too deeply for the interpreter") from None


def _check_shape(raw: bytes, depth: int, values: int) -> None:
    """Bound nesting and number of values by looking at brackets and commas alone."""
    # Splitting is three times faster, and nearly every manifest is without escapes.
    outside = _STRING.sub(b"", raw) if b"\\" in raw else b"".join(raw.split(b'"')[::2])
    found = 1 + sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    if found > values:
        raise StrictJsonError(f"about {found} values, limit {values}")
    brackets = bytes(outside).translate(_TO_SQUARE, _NOT_BRACKETS)
    # Each pass takes away the innermost pairs, hence one level of nesting.
    for _ in range(depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise StrictJsonError(f"nested deeper than the limit of {depth}, or unbalanced brackets")


_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise StrictJsonError(f"member {name!r:.64} occurs twice")
            seen.add(name)
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name} is not JSON")
