"""The ``.safetensors`` file: named tensors behind a JSON header, read and written in place.

The format is eight octets of header length, a JSON object, and the octets of the tensors. It is
read here and not by the library of the same name, because numpy has no bfloat16 and no float8 of
its own and the library does not take the ones of ``ml_dtypes``; and because a cache of gigabytes
is mapped, layer by layer, instead of being loaded.
"""

import json
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.layout import numpy_dtype

#: Octets of the header. A model of 65,535 layers takes less than a fifth of it.
MAX_HEADER_OCTETS = 64 << 20

_LENGTH = struct.Struct("<Q")
#: The format's names of element types, by the names that descriptors use.
FILE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
    }
)
_DESCRIPTOR_DTYPES = {name: dtype for dtype, name in FILE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type (by the name that descriptors use) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def octets(self) -> int:
        """Length of the tensor."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorFile:
    """A tensor file that is mapped into memory. Use it as a context manager, or close it.

    Attributes:
        path: Where it is; whoever may open it there maps the same memory.
        specs: What the header promises, by name.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        offsets: Mapping[str, int],
        *,
        writable: bool,
        memory: int | None = None,
    ) -> None:
        self.path = path
        self.specs = specs
        self._offsets = offsets
        mode: Literal["r+", "r"] = "r+" if writable else "r"
        self._map: NDArray[np.uint8] | None = np.memmap(path, np.uint8, mode)
        #: Closes the memory that is the file, if that is on no disk.
        self._release = None if memory is None else weakref.finalize(self, os.close, memory)

    @classmethod
    def open(cls, path: str | Path, *, writable: bool = False) -> Self:
        """Open a file that exists, for reading unless it is to be ``writable``.

        Raises:
            ConfigError: If it is missing, unreadable, or not such a file; the message names it.
        """
        file = Path(path)
        try:
            with file.open("rb") as stream:
                octets = os.fstat(stream.fileno()).st_size
                header = _read_header(stream.read(8), octets, stream.read)
        except OSError as exc:
            raise ConfigError(f"{file}: {exc.strerror or exc}") from None
        except ValueError as exc:
            raise ConfigError(f"{file} is not a .safetensors file: {exc}") from None
        return cls(file, *header, writable=writable)

    @classmethod
    def create(cls, path: str | Path, specs: Mapping[str, TensorSpec]) -> Self:
        """Make a new file of zeros for tensors that are to be filled in.

        Raises:
            ConfigError: If it exists, or cannot be made; the message names it.
        """
        file = Path(path)
        head, offsets, octets = _lay_out(specs)
        try:
            with file.open("xb") as stream:
                stream.write(head)
                stream.truncate(octets)
        except OSError as exc:
            raise ConfigError(f"{file}: {exc.strerror or exc}") from None
        return cls(file, dict(specs), offsets, writable=True)

    @classmethod
    def in_memory(cls, specs: Mapping[str, TensorSpec]) -> Self:
        """Make a file of zeros that is on no disk, for tensors that are to be filled in.

        Its path is good for processes of the same user, until it is closed. The memory goes back
        to the system when nobody has it mapped any more, however everybody ended.

        Raises:
            ConfigError: If the system has no such memory, or not enough of it.
        """
        head, offsets, octets = _lay_out(specs)
        try:
            memory = os.memfd_create("kvcs")
        except (AttributeError, OSError) as exc:
            raise ConfigError(f"no memory to share with other processes: {exc}") from None
        try:
            with open(memory, "wb", closefd=False) as stream:
                stream.write(head)
                stream.truncate(octets)
            path = Path(f"/proc/{os.getpid()}/fd/{memory}")
            return cls(path, dict(specs), offsets, writable=True, memory=memory)
        except OSError as exc:
            os.close(memory)
            raise ConfigError(f"{octets} octets of shared memory: {exc.strerror or exc}") from None

    def tensor(self, name: str) -> NDArray[Any]:
        """Return one tensor: a view of the file, writable if the file was created here.

        Raises:
            KeyError: If the file has no tensor of this name.
        """
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        spec, start = self.specs[name], self._offsets[name]
        flat = self._map[start : start + spec.octets].view(np.ndarray)
        return flat.view(numpy_dtype(spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        """Let go of the file. Tensors that were handed out stay valid as long as they live."""
        if isinstance(self._map, np.memmap):
            self._map.flush()
        self._map = None
        if self._release is not None:
            self._release()

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _lay_out(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return what a file begins with, where in it each tensor lies, and how long it is."""
    members: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name], end = end, end + spec.octets
        members[name] = {
            "dtype": FILE_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned in the file
    start = 8 + len(text)
    head = _LENGTH.pack(len(text)) + text
    return head, {name: start + at for name, at in offsets.items()}, start + end


def _read_header(
    prefix: bytes, octets: int, read: Callable[[int], bytes]
) -> tuple[dict[str, TensorSpec], dict[str, int]]:
    if len(prefix) < 8:
        raise ValueError(f"{octets} octets, at least 8 are needed")
    (length,) = _LENGTH.unpack(prefix)
    if length > min(octets - 8, MAX_HEADER_OCTETS):
        raise ValueError(f"header of {length} octets in a file of {octets}")
    try:
        members = json.loads(read(length))
    except (ValueError, RecursionError):
        raise ValueError("the header is not JSON") from None
    if not isinstance(members, dict):
        raise ValueError("the header is not a JSON object")
    start = 8 + length
    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, int] = {}
    for name, member in members.items():
        if name == "__metadata__":
            continue
        specs[name], (begin, end) = _read_member(name, member)
        if end - begin != specs[name].octets or not 0 <= begin <= end <= octets - start:
            raise ValueError(
                f"tensor {name!r}, {specs[name]}, at octets {begin} to {end} of {octets - start}"
            )
        offsets[name] = start + begin
    return specs, offsets


def _read_member(name: str, member: Any) -> tuple[TensorSpec, tuple[int, int]]:
    match member:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if dtype not in _DESCRIPTOR_DTYPES:
                known = ", ".join(_DESCRIPTOR_DTYPES)
                raise ValueError(f"tensor {name!r} is of type {dtype}, expected one of {known}")
            if all(type(size) is int and size >= 0 for size in shape):
                return TensorSpec(_DESCRIPTOR_DTYPES[dtype], tuple(shape)), (begin, end)
    raise ValueError(f"the header's entry of {name!r} lacks dtype, shape or data_offsets")
