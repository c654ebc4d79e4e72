"""How values pass between a retrieval and its processes: as JSON, read strictly. Pure.

A process reads what strangers send, and its parent has the keys. So what comes out of the socket is
plain values, and frozen dataclasses, named tuples and enumerations of kvcs and moqt, made by their
own constructors; nothing else is called and nothing is imported. Pickle can promise neither that,
nor that memory stays in proportion to the octets.

A text, a boolean, a finite number and null are themselves. Octets are ``{"": hex}``, other floats
``{"float": text}``, a path is ``{"path": hex}``. Everything else is a list that begins with the
name of a class: the fields of a value, the value of an enumeration, the ends and the step of a
range, the elements of a tuple.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

#: Types that a field has to be of exactly, where it says so.
_PLAIN = (bool, bytes, int, str)
_OCTETS, _FLOAT, _PATH = "", "float", "path"
_RANGE, _TUPLE = "range", "tuple"


class Unpassable(ValueError):
    """What arrived is no value as it is passed, or a value cannot be passed."""


def dumps(value: object) -> bytes:
    """Return a value as it passes.

    Raises:
        Unpassable: If it, or a part of it, is of a type that does not: a mistake of the caller.
    """
    try:
        return orjson.dumps(_plain(value))
    except orjson.JSONEncodeError as exc:
        raise Unpassable(str(exc)) from None


def loads(octets: bytes) -> Any:
    """Return the value that passes as these octets.

    Raises:
        Unpassable: If there is none: no such JSON, or values that their class refuses.
    """
    try:
        return _value(orjson.loads(octets))
    except Unpassable:
        raise
    except Exception as exc:  # a constructor was given whatever came
        raise Unpassable(f"{type(exc).__name__}: {exc!s:.200}") from None


class _Class(NamedTuple):
    """How the values of a class pass."""

    name: str
    make: Callable[..., Any]
    """Makes one of as many values as it has fields."""

    get: Callable[[Any], Any]
    """Returns the values of the fields: of one field its value, of several a tuple."""

    fields: int | None
    """How many; None: as many as the constructor takes."""

    types: tuple[tuple[int, str, type], ...] = ()
    """Which fields have to be of a plain type: position, name and type."""


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, int, bool) or value is None:
        return value
    if kind is bytes:
        return {_OCTETS: value.hex()}
    if kind is tuple:
        return [_TUPLE, *map(_plain, value)]
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is range:
        return [_RANGE, value.start, value.stop, value.step]
    if isinstance(value, Path):
        return {_PATH: os.fsencode(value).hex()}
    if (known := _class_of(kind)) is None:
        raise Unpassable(f"a {kind.__name__} cannot be passed")
    if known.fields == 1:
        return [known.name, _plain(known.get(value))]
    return [known.name, *map(_plain, known.get(value))]


def _value(found: Any) -> Any:
    if type(found) is list:
        name, *parts = found
        if type(name) is not str:
            raise Unpassable("a list that begins with no name of a class")
        return _made(name, parts)
    if type(found) is dict:
        [(kind, text)] = found.items()
        match kind:
            case "":
                return bytes.fromhex(text)
            case "float":
                return float(text)
            case "path":
                return Path(os.fsdecode(bytes.fromhex(text)))
        raise Unpassable(f"an object of the kind {kind!r:.64}")
    return found


def _made(name: str, parts: list[Any]) -> Any:
    values = [_value(part) if type(part) in (list, dict) else part for part in parts]
    if name == _TUPLE:
        return tuple(values)
    if name == _RANGE:
        start, stop, step = values
        return range(start, stop, step)
    known = _NAMED.get(name) or _named(name)
    if known.fields is not None and len(values) != known.fields:
        raise Unpassable(f"{name} has {len(values)} fields, expected {known.fields}")
    for position, field, kind in known.types:
        if type(values[position]) is not kind:
            raise Unpassable(
                f"{field} of {name} is of type {type(values[position]).__name__}, "
                f"expected {kind.__name__}"
            )
    return known.make(*values)


#: Classes that were looked up by their name.
_NAMED: dict[str, _Class] = {}


def _named(name: str) -> _Class:
    """Return the class of a name, if there is one and its values may pass.

    It is not imported: whoever passes on values of ours has told what this program knows.
    """
    module, _, attribute = name.rpartition(".")
    found: object = None
    if module.partition(".")[0] in ("kvcs", "moqt"):
        found = getattr(sys.modules.get(module), attribute, None)
    known = _class_of(found) if isinstance(found, type) else None
    if known is None or known.name != name:
        raise Unpassable(f"{name!r:.64} is no class of values")
    return _NAMED.setdefault(name, known)


@cache
def _class_of(cls: Any) -> _Class | None:
    """Return how the values of a class pass; None if they do not."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if issubclass(cls, Enum):
        return _Class(name, cls, attrgetter("value"), 1)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _Class(name, cls, tuple, None)
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return None
    own = [field for field in fields(cls) if field.init]
    names = [field.name for field in own]
    return _Class(
        name,
        lambda *values: cls(**dict(zip(names, values, strict=True))),
        attrgetter(*names) if names else lambda _: (),
        len(names),
        tuple((at, f.name, f.type) for at, f in enumerate(own) if f.type in _PLAIN),
    )
