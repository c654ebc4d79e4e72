"""Segment: one pass over the layers for some blocks, copied, encoded, hashed and sealed. Pure.

:meth:`Segment.copy` takes the tensors of a layer out of the caller's memory, in whichever thread
has them, and :meth:`CopiedLayer.prepare` makes Objects of them, in any thread. What becomes of
those is :mod:`kvcs.producer.publication`'s business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.keys import block_keys_sha256
from kvcs.kvsp.layout import Component, Layout, Octets
from kvcs.producer.sealed import LayerSealer, object_octets
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import HEADER_OCTETS, Block
from kvcs.trust.sealing import SealedTrack
from moqt.session.localobjects import Payload

#: How many times as long as hashing it takes to encode, with a codec other than ``raw``.
ENCODING_WORK = 16

#: A tensor: an array, or its raw octets.
Tensor = NDArray[Any] | Octets


@dataclass(frozen=True, slots=True)
class Encoding:
    """One form in which a segment is offered: a codec, K and V apart or together.

    In text ``CODEC``, or ``kv.CODEC`` for one joint track.
    """

    codec: str = "raw"
    joint: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Whether the codec exists is the registry's business."""
        joint = text.startswith("kv.")
        return cls(text.removeprefix("kv."), joint)

    @property
    def components(self) -> tuple[Component, ...]:
        """What its tracks carry."""
        return (Component.KV,) if self.joint else (Component.K, Component.V)

    def tracks(self, segment: int) -> tuple[DataTrack, ...]:
        """Return its data tracks of one segment: a pair, or one.

        A section that is empty has its track all the same, with Objects of no Data: a consumer
        selects a pair or a joint track (KVCS Section 3.2), and need not know of a third case.
        """
        return tuple(DataTrack(component, self.codec, segment) for component in self.components)

    def __str__(self) -> str:
        return f"kv.{self.codec}" if self.joint else self.codec


@dataclass(frozen=True, slots=True)
class PreparedTrack:
    """The Objects of one layer in one track, ready to be published."""

    track: DataTrack
    objects: tuple[tuple[Payload, ...], ...]
    """The payload of each, in Object order: header and Data, or in one piece if it is sealed."""

    digests: bytes
    """Their Data Digests, concatenated."""


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """One layer of a segment, encoded and hashed."""

    segment: int
    layer: int
    tracks: tuple[PreparedTrack, ...]

    @property
    def octets(self) -> int:
        """Payload octets that it adds to the publication."""
        return sum(
            len(part) for track in self.tracks for payload in track.objects for part in payload
        )


@dataclass(frozen=True, slots=True)
class CopiedLayer:
    """One layer of a segment, copied out of the caller's memory."""

    segment: "Segment"
    layer: int
    store: NDArray[np.uint8]
    """``[blocks, octets of K and V]``: what a container holds of the layer, for each block."""

    def prepare(self) -> PreparedLayer:
        """Encode, hash and seal every block. Heavy, and safe in any thread."""
        return PreparedLayer(
            self.segment.number,
            self.layer,
            tuple(self._prepare_track(track) for track in self.segment.tracks),
        )

    def _prepare_track(self, track: DataTrack) -> PreparedTrack:
        segment = self.segment
        size = segment.layout.block_tokens
        codec = segment.codecs[track.codec]
        objects: list[tuple[Payload, ...]] = []
        digests: list[bytes] = []
        # Slices of one view: an array for each Object would hold as much again as its header.
        octets: memoryview = self.store.reshape(-1).data.toreadonly()
        encoded = [self._data(track, index, octets) for index in range(segment.blocks)]
        sealer = self._sealer(track, encoded)
        for index, data in enumerate(encoded):
            block = Block(
                component=track.component,
                layer=self.layer,
                block_index=index,
                token_start=(segment.first_block + index) * size,
                token_count=size,
                codec=codec.value,
                data=data,
            )
            payload = block.header(), data
            objects.append(payload if sealer is None else (sealer.add(payload),))
            digests.append(block.digest)
        return PreparedTrack(track, tuple(objects), b"".join(digests))

    def _sealer(self, track: DataTrack, encoded: Sequence[Payload]) -> LayerSealer | None:
        """Return what seals the Objects with these Data; None: they go in clear."""
        segment = self.segment
        if (seal := segment.seals.get(track)) is None:
            return None
        padded = seal.pads(fixed_length=segment.codecs[track.codec].fixed_length)
        octets = [HEADER_OCTETS + len(data) for data in encoded]
        return LayerSealer(seal, segment.layout, self.layer, octets, padded=padded)

    def _data(self, track: DataTrack, index: int, octets: memoryview) -> Payload:
        layout = self.segment.layout
        start, stop = index * layout.layer_octets, (index + 1) * layout.layer_octets
        if track.component is Component.K:
            stop = start + layout.k_octets
        elif track.component is Component.V:
            start += layout.k_octets
        if track.codec == "raw":
            return octets[start:stop]  # the Data is the copy itself
        array = self.store.reshape(-1)[start:stop].view(layout.dtype)
        return self.segment.codecs[track.codec].encode(array.reshape(layout.shape(track.component)))


class Segment:
    """One pass over the layers for some blocks. Made by :meth:`Publication.open_segment`.

    Attributes:
        number: From 0.
        first_block: Index of its first block in the whole context.
        blocks: How many.
        keys: Their Block Keys.
        next_layer: The layer that is to be published next; ``layers`` when it is complete.
    """

    def __init__(
        self,
        number: int,
        first_block: int,
        keys: Sequence[bytes],
        layout: Layout,
        encodings: Sequence[Encoding],
        codecs: CodecRegistry,
        seals: Mapping[DataTrack, SealedTrack] = MappingProxyType({}),
    ) -> None:
        self.number = number
        self.first_block = first_block
        self.blocks = len(keys)
        self.keys = tuple(keys)
        self._indices = {key: index for index, key in enumerate(self.keys)}
        self.layout = layout
        self.codecs = codecs
        self.seals = seals
        """What seals the Objects of its tracks; empty where they go in clear."""

        self.tracks: tuple[DataTrack, ...] = tuple(
            track for encoding in encodings for track in encoding.tracks(number)
        )
        self.next_layer = 0
        self._keys_sha256 = block_keys_sha256(keys)
        self._entry: SegmentEntry | None = None  # once it is complete, and changes no more
        self._digests: dict[DataTrack, list[bytes]] = {track: [] for track in self.tracks}

    @property
    def complete(self) -> bool:
        """Whether every layer has been published."""
        return self.next_layer == self.layout.layers

    @property
    def tokens(self) -> int:
        """Tokens of its blocks."""
        return self.blocks * self.layout.block_tokens

    @property
    def layer_octets(self) -> int:
        """Payload octets of one layer; what a codec makes of it counts as if it were raw."""
        return self.blocks * sum(
            object_octets(
                self.layout, track.component, track.codec, self.codecs, self.seals.get(track)
            )
            for track in self.tracks
        )

    @property
    def digests(self) -> int:
        """Objects of all layers and tracks: what a manifest lists of it once it is complete."""
        return self.blocks * self.layout.layers * len(self.tracks)

    @property
    def layer_work(self) -> int:
        """What it takes to prepare a layer, as the octets that can be hashed meanwhile."""
        is_raw = all(track.codec == "raw" for track in self.tracks)
        return self.layer_octets * (1 if is_raw else ENCODING_WORK)

    def index_of(self, key: bytes) -> int | None:
        """Return which of its blocks has a Block Key, from 0; ``None`` if none has."""
        return self._indices.get(key)

    def copy(
        self,
        layer: int,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        kv: Tensor | None = None,
    ) -> CopiedLayer:
        """Check and copy the tensors of one layer; the caller's memory is free afterwards.

        Args:
            layer: From 0.
            k: ``[tokens, heads, dim]`` of the descriptor's element type, in any strides, or its
                raw octets in C order. ``tokens`` may also be split into blocks:
                ``[blocks, block_tokens, heads, dim]``. Tokens after the last whole block of
                the segment are left out.
            v: The same for V; may be left out if the descriptor has no V section.
            kv: Instead of both: for each block the raw octets of K and then of V, as
                ``[blocks, octets]`` or flat.

        Raises:
            ConfigError: If a tensor does not fit; the message says what was found and expected.
        """
        layout = self.layout
        where = f"layer {layer} of segment {self.number}"
        if not 0 <= layer < layout.layers:
            raise ConfigError(f"{where}: the model has {layout.layers} layers")
        store = np.empty((self.blocks, layout.layer_octets), np.uint8)
        if kv is not None:
            if k is not None or v is not None:
                raise ConfigError(f"{where}: kv was given together with k or v")
            store[:] = _joint(f"kv of {where}", kv, self.blocks, layout.layer_octets)
            return CopiedLayer(self, layer, store)
        for name, tensor, shape, start in (
            ("k", k, layout.k_shape, 0),
            ("v", v, layout.v_shape, layout.k_octets),
        ):
            if not prod(shape):
                continue
            if tensor is None:
                raise ConfigError(f"{where}: {name} is missing")
            blocks = _blocks(f"{name} of {where}", tensor, self.blocks, shape, layout)
            heads = shape[2] * layout.element_octets
            strides = (layout.layer_octets, shape[1] * heads, heads, layout.element_octets)
            # Copied as integers: bits stay as they are, and numpy is quick at it.
            integer = np.dtype(f"u{layout.element_octets}")
            place: NDArray[Any] = np.ndarray(
                (self.blocks, *shape), integer, store.data, start, strides
            )
            place[:] = blocks.view(integer)
        return CopiedLayer(self, layer, store)

    def note(self, prepared: PreparedLayer) -> None:
        """Count a layer as published. Called by the publication."""
        for part in prepared.tracks:
            self._digests[part.track].append(part.digests)
        self.next_layer += 1

    def entry(self) -> SegmentEntry:
        """Return what the manifest says of the segment now."""
        if self._entry is not None:
            return self._entry
        entry = SegmentEntry(
            segment=self.number,
            first_block=self.first_block,
            blocks=self.blocks,
            block_keys_sha256=self._keys_sha256,
            tracks=self.tracks,
            complete=self.complete,
            object_digests={track: tuple(groups) for track, groups in self._digests.items()},
        )
        if self.complete:
            self._entry = entry
        return entry


def _joint(what: str, kv: Tensor, blocks: int, octets: int) -> NDArray[np.uint8]:
    flat = _flat(what, kv)
    if flat.size != blocks * octets:
        raise ConfigError(
            f"{what} has {flat.size} octets, expected {octets} for each of {blocks} blocks"
        )
    return flat.reshape(blocks, octets)


def _blocks(
    what: str, tensor: Tensor, blocks: int, shape: tuple[int, int, int], layout: Layout
) -> NDArray[Any]:
    """Return a view of the tensor's whole blocks, ``[blocks, block_tokens, heads, dim]``."""
    tokens = blocks * shape[0]
    if not isinstance(tensor, np.ndarray):
        flat = _flat(what, tensor)
        token_octets = prod(shape[1:]) * layout.element_octets
        count, rest = divmod(flat.size, token_octets)
        if rest or not tokens <= count < tokens + shape[0]:
            raise ConfigError(
                f"{what} has {flat.size} octets, expected {token_octets} for each of "
                f"{tokens} tokens"
            )
        tensor = flat[: tokens * token_octets].view(layout.dtype).reshape(tokens, *shape[1:])
    found = f"{what} is {tensor.dtype} {list(tensor.shape)}"
    expected = f"expected {layout.dtype} {[tokens, *shape[1:]]}"
    if tensor.dtype != layout.dtype:
        raise ConfigError(f"{found}, {expected}")
    if tensor.shape == (blocks, *shape):
        return tensor
    if tensor.ndim != 3 or tensor.shape[1:] != shape[1:]:
        raise ConfigError(f"{found}, {expected}")
    # Fewer than one block may follow: a prompt seldom ends where a block does.
    if not tokens <= tensor.shape[0] < tokens + shape[0]:
        raise ConfigError(f"{found}, {expected}")
    # Splitting the first axis is a view, whatever the strides are.
    return tensor[:tokens].reshape(blocks, *shape)


def _flat(what: str, tensor: Tensor) -> NDArray[np.uint8]:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(tensor, np.uint8)
    except (BufferError, ValueError, TypeError) as exc:
        raise ConfigError(f"{what}: {exc}") from None
