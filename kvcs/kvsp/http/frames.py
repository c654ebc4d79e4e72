"""Many sections in one answer: a frame for each layer of each block that was asked for.

A frame is a header of 48 octets, big-endian, and the K and then the V section, raw; or, in a scope
that seals, the layer as :mod:`kvcs.kvsp.http.sealed` describes it::

    0   4  Magic         "KVF1"
    4   1  Kind          1 sections, 2 absent, 3 end, 4 sealed
    5   1  Reserved      0
    6   2  Layer
    8   4  Block         index in the list of Block Keys that was asked for
    12  4  Data Length   octets that follow; 0 for kinds 2 and 3
    16  32 Layer Digest  SHA-256 of what follows; zeros for kinds 2 and 3

Layer by layer, and in each block by block, so that the first layer can be computed while the others
are on their way. What is not held has a frame of kind 2, so nothing is waited for in vain. The last
frame is of kind 3, with the number of frames before it as Block: an answer without it was cut off.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

from kvcs.kvsp.http.sealed import longest
from kvcs.kvsp.layout import Octets

MAGIC = b"KVF1"
CONTENT_TYPE = "application/vnd.kvcs.frames"
_HEADER = struct.Struct(">4sBBHII32s")
HEADER_OCTETS = _HEADER.size  # 48
_NO_DIGEST = bytes(32)


class FrameKind(IntEnum):
    """What a frame says."""

    SECTIONS = 1
    ABSENT = 2
    END = 3
    SEALED = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """What one frame says of one layer of one block."""

    kind: FrameKind
    block: int
    """Index in the list of Block Keys that was asked for; of the end, the number of frames."""

    layer: int
    data: Octets = field(default=b"", repr=False)
    """K and then V, raw; or a sealed layer."""

    digest: bytes = field(default=_NO_DIGEST, repr=False)
    """SHA-256 of the data, and found right."""


class BadFrame(ValueError):
    """What arrived is not a sequence of frames as it was asked for."""


def frame_header(kind: FrameKind, block: int, layer: int, octets: int, digest: bytes) -> bytes:
    """Return the header of a frame; the sections follow it.

    Raises:
        struct.error: If a number does not fit: a mistake of the caller.
    """
    return _HEADER.pack(MAGIC, kind, 0, layer, block, octets, digest)


def absent(block: int, layer: int) -> bytes:
    """Return the frame for what is not held."""
    return frame_header(FrameKind.ABSENT, block, layer, 0, _NO_DIGEST)


def end(frames: int) -> bytes:
    """Return the last frame, after ``frames`` others."""
    return frame_header(FrameKind.END, frames, 0, 0, _NO_DIGEST)


class FrameReader:
    """Turns the octets of an answer into frames, however they were cut.

    Args:
        order: ``(layer, block)`` of every frame that was asked for, in their order.
        section_octets: What K and V of one layer of one block take.
    """

    def __init__(self, order: Iterator[tuple[int, int]], section_octets: int) -> None:
        self._order = order
        self._octets = section_octets
        self._buffer = bytearray()
        self._need = HEADER_OCTETS
        self._frames = 0
        self.ended = False
        """Whether the frame of the end has come."""

    def feed(self, data: Octets) -> Iterator[Frame]:
        """Add octets as they come; yield the frames that they complete, the end not among them.

        Raises:
            BadFrame: If something else comes than was asked for, or a digest is wrong. Nothing
                more can be read then; what was yielded before is right.
        """
        self._buffer += data
        while len(self._buffer) >= self._need:
            if self.ended:
                raise BadFrame("octets behind the frame of the end")
            frame = self._read()
            if frame is None:
                continue
            if frame.kind is FrameKind.END:
                self.ended = True
                self._need = 1
                continue
            self._frames += 1
            yield frame

    def _read(self) -> Frame | None:
        """Read one frame; ``None`` if its sections have still to come."""
        magic, number, reserved, layer, block, octets, digest = _HEADER.unpack_from(self._buffer)
        if magic != MAGIC or reserved:
            raise BadFrame(f"frame begins with {bytes(self._buffer[:6]).hex()}, expected KVF1")
        try:
            kind = FrameKind(number)
        except ValueError:
            raise BadFrame(f"frame of kind {number}, expected 1 to 4") from None
        if kind is FrameKind.SEALED:
            if octets > (limit := longest(self._octets)):
                raise BadFrame(f"SEALED frame with {octets} octets, limit {limit}")
        elif octets != (expected := self._octets if kind is FrameKind.SECTIONS else 0):
            raise BadFrame(f"{kind.name} frame with {octets} octets, expected {expected}")
        if len(self._buffer) < HEADER_OCTETS + octets:
            self._need = HEADER_OCTETS + octets
            return None
        if kind is FrameKind.END:
            if (layer, block) != (0, self._frames) or next(self._order, None) is not None:
                raise BadFrame(f"the end after {self._frames} frames, before all were there")
        elif (layer, block) != (place := next(self._order, None)):
            raise BadFrame(f"frame of (layer, block) {(layer, block)}, expected {place}")
        carries = kind in (FrameKind.SECTIONS, FrameKind.SEALED)
        if not carries and digest != _NO_DIGEST:
            raise BadFrame(f"{kind.name} frame with a digest, expected zeros")
        data = bytes(self._buffer[HEADER_OCTETS : HEADER_OCTETS + octets])
        del self._buffer[: HEADER_OCTETS + octets]
        self._need = HEADER_OCTETS
        if carries and sha256(data).digest() != digest:
            raise BadFrame(f"layer {layer} of block {block} does not have its digest")
        return Frame(kind, block, layer, data, digest)
