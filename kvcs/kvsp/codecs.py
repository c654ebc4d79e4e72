"""The codec registry (KVSP Section 5): how the tensor of a block becomes the Data of an Object.

A codec is a small object. A registry begins with ``raw``; that of
:func:`kvcs.kvsp.standard.standard_codecs` has all that come with kvcs. An application adds its own
to the registry that it hands to producer and consumer, with values of the private range.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.layout import Component, Octets

#: Values that nobody assigns: an application's own codecs.
PRIVATE_USE = range(0x8000, 0x10000)

_NAME = re.compile(r"[a-z0-9-]{1,32}")


@runtime_checkable
class Codec(Protocol):
    """What the registry asks of a codec. It must not keep state between calls."""

    @property
    def name(self) -> str:
        """As in Track Names: 1 to 32 of ``a-z``, ``0-9`` and ``-``."""
        ...

    @property
    def value(self) -> int:
        """The Codec field of Objects, 16 bits."""
        ...

    @property
    def components(self) -> frozenset[Component]:
        """What it can carry."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether every bit that was encoded is decoded again. Manifests and events say it."""
        ...

    @property
    def fixed_length(self) -> bool:
        """Whether encoded Data always has the length of its raw section."""
        ...

    def encode(self, array: NDArray[Any]) -> bytes:
        """Turn one tensor into Data.

        Raises:
            ConfigError: If it cannot carry such a tensor: its element type, or its values.
        """
        ...

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Turn Data into a tensor of this shape and element type.

        Raises:
            BadObject: If the Data cannot be such a tensor. It comes from the network, so
                check before allocating, and allocate no more than the tensor takes.
        """
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """The octets as they are: C order, little-endian."""

    name: str = "raw"
    value: int = 0
    components: frozenset[Component] = frozenset(Component)
    lossless: bool = True
    fixed_length: bool = True

    def encode(self, array: NDArray[Any]) -> bytes:
        """Return the elements in C order, little-endian. Costs one copy."""
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

    def decode(self, data: Octets, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a view of ``data``, without copying; read-only where ``data`` is.

        Raises:
            BadObject: If the length of ``data`` is not that of the tensor.
        """
        expected = prod(shape) * dtype.itemsize
        if len(data) != expected:
            raise BadObject(
                Rejection.DATA_LENGTH,
                f"raw data of {len(data)} octets, expected {expected} for shape {tuple(shape)}",
            )
        return np.frombuffer(data, dtype=dtype).reshape(tuple(shape))


RAW = Raw()


class CodecRegistry:
    """The codecs that one producer or consumer knows, by name and by value.

    Begins with ``raw``. Each registry is its own: nothing is registered for the process.
    """

    def __init__(self, *codecs: Codec) -> None:
        self._by_name: dict[str, Codec] = {RAW.name: RAW}
        self._by_value: dict[int, Codec] = {RAW.value: RAW}
        self._unavailable: dict[str, str] = {}
        for codec in codecs:
            self.register(codec)

    def register(self, codec: Codec) -> None:
        """Add a codec of one's own.

        Raises:
            ConfigError: If the name does not follow the grammar, the value is not of the
                private range, no component is carried, or name or value are taken. Nothing
                was registered then.
        """
        if not isinstance(codec, Codec):
            raise ConfigError(f"{type(codec).__name__} is not a codec: see kvcs.kvsp.codecs.Codec")
        if not _NAME.fullmatch(codec.name):
            raise ConfigError(f"codec name {codec.name!r}: expected 1 to 32 of a-z, 0-9 and '-'")
        if codec.name in self._by_name:
            raise ConfigError(f"codec name {codec.name!r} is already registered")
        if type(codec.value) is not int or codec.value not in PRIVATE_USE:
            raise ConfigError(
                f"codec {codec.name!r} has value {codec.value!r}, expected one for private use: "
                f"{PRIVATE_USE[0]:#06x} to {PRIVATE_USE[-1]:#06x}"
            )
        if codec.value in self._by_value:
            taken = self._by_value[codec.value].name
            raise ConfigError(f"codec value {codec.value:#06x} is already that of {taken!r}")
        if not codec.components or not codec.components <= set(Component):
            raise ConfigError(f"codec {codec.name!r} carries no component of k, v and kv")
        self._by_name[codec.name] = codec
        self._by_value[codec.value] = codec

    def note_unavailable(self, name: str, why: str) -> None:
        """Note that a codec exists but cannot be used here; who asks for it is told why."""
        self._unavailable[name] = why

    def unavailable(self, name: str) -> str | None:
        """Return why a codec cannot be used here; ``None`` if it can, or is not known at all."""
        return self._unavailable.get(name) if name not in self._by_name else None

    def get(self, name: str) -> Codec | None:
        """Return the codec of that name, or ``None``."""
        return self._by_name.get(name)

    def by_value(self, value: int) -> Codec | None:
        """Return the codec of that value, or ``None``."""
        return self._by_value.get(value)

    def __getitem__(self, name: str) -> Codec:
        try:
            return self._by_name[name]
        except KeyError:
            if (why := self.unavailable(name)) is not None:
                raise ConfigError(f"codec {name!r} cannot be used here: {why}") from None
            known = ", ".join(self._by_name)
            raise ConfigError(f"no codec {name!r} is registered; known are {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Codec]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)
