"""The payload of an Object: a header of 68 octets, and the tensor of one block in one layer.

Checks come in two steps. What the payload itself and its Location tell is checked when it is
decoded (KVCS Section 3.5). What only the manifest tells, by :meth:`Block.check_against`
(decision 7), because Objects may arrive before it. Both leave an Object to be treated as missing.
"""

import struct
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple, Self

from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack

__all__ = [
    "HEADER_OCTETS",
    "MAGIC",
    "MAX_DATA_OCTETS",
    "VERSION",
    "Block",
    "Component",
    "Header",
    "Rejection",
    "read_as_promised",
]

MAGIC = b"KVO1"
VERSION = 1
#: Default limit on Data Length (decision 13).
MAX_DATA_OCTETS = 64 << 20

#: Magic, Version, Component, Flags, Layer, Block Index, Token Start, Token Count, Codec,
#: Reserved, Data Length, Data Digest.
_HEADER = struct.Struct(">4sBBHIIQIHHI32s")
HEADER_OCTETS = _HEADER.size  # 68

_COMPONENTS = {int(component): component for component in Component}


class Header(NamedTuple):
    """The header of a payload as it stands there, unchecked: for looking at broken Objects."""

    magic: bytes
    version: int
    component: int
    flags: int
    layer: int
    block_index: int
    token_start: int
    token_count: int
    codec: int
    reserved: int
    data_length: int
    data_digest: bytes

    @classmethod
    def read(cls, payload: Octets) -> "Header":
        """Read the first 68 octets.

        Raises:
            BadObject: If there are fewer.
        """
        if len(payload) < HEADER_OCTETS:
            raise _too_short(len(payload))
        return cls._make(_HEADER.unpack_from(payload))


@dataclass(frozen=True, slots=True)
class Block:
    """The tensor of one token block in one layer: what one Object carries."""

    component: Component

    layer: int
    """Equal to the Group ID."""

    block_index: int
    """Index within the segment, from 0; equal to the Object ID."""

    token_start: int
    """Position in the whole context of the block's first token."""

    token_count: int
    """Tokens of the block: the descriptor's ``block_tokens``."""

    codec: int
    """Value of the codec that ``data`` is encoded with."""

    data: Octets = field(repr=False)
    """Encoded tensor. For ``raw`` and K or V: ``(token_count, heads, dim)``, C order,
    little-endian. Whoever hands over a buffer must not change it as long as the block lives."""

    _digest: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.data, memoryview) and self.data.itemsize != 1:
            # The length of a view counts elements; everything here counts octets.
            object.__setattr__(self, "data", self.data.cast("B"))

    @property
    def digest(self) -> bytes:
        """Data Digest, SHA-256 over ``data``. Computed once, or known from decoding."""
        if self._digest is None:
            object.__setattr__(self, "_digest", sha256(self.data).digest())
        assert self._digest is not None
        return self._digest

    def header(self) -> bytes:
        """Return the 68 octets that go before ``data`` on the wire.

        For sending header and data one after the other, so that the tensor is not copied.

        Raises:
            ValueError: If a field does not fit the header.
        """
        try:
            return _HEADER.pack(
                MAGIC, VERSION, self.component, 0, self.layer, self.block_index, self.token_start,
                self.token_count, self.codec, 0, len(self.data), self.digest,
            )  # fmt: skip
        except struct.error as exc:
            raise ValueError(f"{self!r} does not fit the header: {exc}") from None

    def encode_parts(self) -> tuple[bytes, Octets]:
        """Return header and data as two buffers; the data is not copied."""
        return self.header(), self.data

    def encode(self) -> bytes:
        """Return the whole payload. Costs one copy of the data."""
        return b"".join(self.encode_parts())

    @classmethod
    def decode(
        cls, payload: Octets, *, group_id: int, object_id: int, max_data: int = MAX_DATA_OCTETS
    ) -> Self:
        """Check one Object payload and take it apart (KVCS Section 3.5).

        Args:
            payload: The whole payload.
            group_id: Group ID the Object arrived under; must equal the Layer field.
            object_id: Object ID it arrived under; must equal the Block Index field.
            max_data: Limit on Data Length, in octets.

        Returns:
            The block. ``data`` is a read-only view of ``payload``, still encoded; it keeps all
            of ``payload`` in memory. Flags and Reserved are ignored.

        Raises:
            BadObject: If a check fails. Treat the Object as missing; the session and the other
                Objects are unaffected.

        Costs one SHA-256 over the data and no copy.
        """
        view = memoryview(payload).toreadonly().cast("B")
        octets = len(view)
        if octets < HEADER_OCTETS:
            raise _too_short(octets)
        (
            magic, version, component, _flags, layer, block_index, token_start,
            token_count, codec, _reserved, data_length, digest,
        ) = _HEADER.unpack_from(view)  # fmt: skip
        if magic != MAGIC:
            raise _rejected(Rejection.MAGIC, "Magic", magic.hex(), MAGIC.hex())
        if version != VERSION:
            raise _rejected(Rejection.VERSION, "Version", version, VERSION)
        if component not in _COMPONENTS:
            raise _rejected(Rejection.COMPONENT, "Component", component, "1, 2 or 3")
        if layer != group_id:
            raise _rejected(Rejection.LAYER, "Layer", layer, f"the Group ID, {group_id}")
        if block_index != object_id:
            raise _rejected(
                Rejection.BLOCK_INDEX, "Block Index", block_index, f"the Object ID, {object_id}"
            )
        if data_length > max_data:
            raise BadObject(
                Rejection.LIMIT, f"Data Length of {data_length} octets, limit {max_data}"
            )
        if data_length != octets - HEADER_OCTETS:
            raise _rejected(
                Rejection.LENGTH, "Data Length", data_length, f"{octets - HEADER_OCTETS} octets"
            )
        data = view[HEADER_OCTETS:]
        found = sha256(data).digest()
        if found != digest:
            raise _rejected(Rejection.DIGEST, "digest of the data", found.hex(), digest.hex())
        block = cls(
            _COMPONENTS[component], layer, block_index, token_start, token_count, codec, data
        )
        object.__setattr__(block, "_digest", found)
        return block

    def check_against(
        self,
        entry: SegmentEntry,
        descriptor: Descriptor,
        track: DataTrack,
        codecs: CodecRegistry,
    ) -> None:
        """Check what only the manifest can tell (decision 7).

        Args:
            entry: The manifest's entry of the segment that the track belongs to.
            descriptor: The manifest's Compatibility Descriptor.
            track: The track that the Object arrived on.
            codecs: The codecs that this end knows.

        Raises:
            BadObject: If the block is not what the manifest promises there. Treat the Object
                as missing; the session and the other Objects are unaffected.
            ValueError: If the track is not one of the entry: a mistake of the caller.
        """
        if track not in entry.tracks:
            raise ValueError(f"{track} is not a track of segment {entry.segment}")
        if self.component is not track.component:
            raise _rejected(
                Rejection.COMPONENT, "Component", self.component.name, track.component.name
            )
        codec = codecs.get(track.codec)
        if codec is None or track.component not in codec.components:
            why = "not known here" if codec is None else f"not one for {track.component.name}"
            raise BadObject(Rejection.CODEC, f"codec {track.codec!r} of {track} is {why}")
        if self.codec != codec.value:
            expected = f"{codec.value:#06x}, {codec.name!r}"
            raise _rejected(Rejection.CODEC, "Codec", f"{self.codec:#06x}", expected)
        if self.layer >= descriptor.layers:
            raise _rejected(
                Rejection.OUT_OF_RANGE, "Layer", self.layer, f"below {descriptor.layers}"
            )
        if self.block_index >= entry.blocks:
            raise _rejected(
                Rejection.OUT_OF_RANGE, "Block Index", self.block_index, f"below {entry.blocks}"
            )
        if self.token_count != descriptor.block_tokens:
            raise _rejected(
                Rejection.TOKEN_COUNT, "Token Count", self.token_count, descriptor.block_tokens
            )
        start = (entry.first_block + self.block_index) * descriptor.block_tokens
        if self.token_start != start:
            raise _rejected(Rejection.TOKEN_START, "Token Start", self.token_start, start)
        if codec.fixed_length:
            expected_octets = Layout.of(descriptor).section_octets(self.component)
            if len(self.data) != expected_octets:
                raise _rejected(
                    Rejection.DATA_LENGTH, "Data Length", len(self.data), f"{expected_octets}"
                )


def read_as_promised(
    payload: Octets, *, component: Component, layer: int, block_index: int, token_start: int,
    token_count: int, codec: int, octets: int,
) -> tuple[Octets, bytes] | None:  # fmt: skip
    """Return the data of a payload, not copied, and their digest, if it is all that is promised.

    Which is that it says of itself what the arguments do, and that its digest is right. None says
    that it is not; :meth:`Block.decode` and :meth:`Block.check_against` say why. They cost some
    microseconds more than the SHA-256, this hardly any.

    Args:
        payload: The whole payload.
        component: As the header should have it, and so the others.
        layer: Group ID it arrived under.
        block_index: Object ID it arrived under.
        token_start: Position of the block's first token.
        token_count: Tokens of a block.
        codec: Value of the codec.
        octets: Length of the data.
    """
    if len(payload) != HEADER_OCTETS + octets:
        return None
    head = _HEADER.unpack_from(payload)
    if (
        head[:3] != (MAGIC, VERSION, component)  # Flags are ignored, and Reserved below
        or head[4:9] != (layer, block_index, token_start, token_count, codec)
        or head[10] != octets
    ):
        return None
    data = memoryview(payload)[HEADER_OCTETS:]
    digest = sha256(data).digest()
    return (data, digest) if digest == head[11] else None


def _too_short(octets: int) -> BadObject:
    return BadObject(
        Rejection.LENGTH,
        f"payload of {octets} octets, expected at least the {HEADER_OCTETS} of a header",
    )


def _rejected(reason: Rejection, what: str, found: object, expected: object) -> BadObject:
    return BadObject(reason, f"{what} is {found}, expected {expected}")
