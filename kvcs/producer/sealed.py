"""How the Objects of a publication are sealed, and how long they are then. Pure."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.layout import Component, Layout
from kvcs.profile.naming import DataTrack, PublicationName, publisher_priority
from kvcs.profile.payload import HEADER_OCTETS
from kvcs.trust.sealing import MAX_CIPHER_BLOCKS, SealedTrack, Sealing, sealed_octets
from moqt.location import Location
from moqt.session.localobjects import Payload


def object_octets(
    layout: Layout,
    component: Component,
    codec: str,
    codecs: CodecRegistry,
    seal: SealedTrack | None,
) -> int:
    """Return the octets of an Object's payload; what a codec makes counts as if it were raw."""
    octets = HEADER_OCTETS + layout.section_octets(component)
    if seal is None:
        return octets
    return seal.longest(octets, fixed_length=codecs[codec].fixed_length)


def seals_of(
    sealing: Sealing | None,
    name: PublicationName,
    tracks: Iterable[DataTrack],
    blocks: int,
    layout: Layout,
    codecs: CodecRegistry,
) -> dict[DataTrack, SealedTrack]:
    """Return what seals the tracks of a segment; nothing where Objects go in clear.

    Raises:
        ConfigError: If the segment is so large that more of a track would be sealed than is safe
            under its key.
    """
    seals: dict[DataTrack, SealedTrack] = {}
    for track in () if sealing is None else tracks:
        assert sealing is not None
        seal = seals[track] = sealing.track(name.track(track))
        octets = object_octets(layout, track.component, track.codec, codecs, seal)
        cipher_blocks = layout.layers * blocks * (octets // 16 + 2)
        if cipher_blocks > MAX_CIPHER_BLOCKS:
            raise ConfigError(
                f"{blocks} blocks of {track} take {cipher_blocks} cipher blocks, limit "
                f"{MAX_CIPHER_BLOCKS} under one key: make segments smaller"
            )
    return seals


class LayerSealer:
    """Seals the Objects of a layer in one track one after the other, all into one buffer.

    Args:
        seal: Of the track.
        layout: Of the model.
        layer: Which.
        octets: Of the payload of each Object.
        padded: Whether they are padded.
    """

    def __init__(
        self, seal: SealedTrack, layout: Layout, layer: int, octets: Sequence[int], *, padded: bool
    ) -> None:
        self._seal = seal
        self._layer = layer
        self._priority = publisher_priority(layer, layout.layers)
        self._padded = padded
        self._lengths = [sealed_octets(each, padded=padded) for each in octets]
        self._store: memoryview = np.empty(sum(self._lengths), np.uint8).data
        self._sealed = self._store.toreadonly()
        self._index = self._start = 0

    def add(self, payload: Sequence[Payload]) -> memoryview:
        """Seal the payload of the next Object, in pieces; return it sealed.

        Soon after it was hashed it is still in the cache of the processor.
        """
        start, stop = self._start, self._start + self._lengths[self._index]
        at = Location(self._layer, self._index)
        into = self._store[start:stop]
        self._seal.seal_into(at, self._priority, payload, into, padded=self._padded)
        self._index, self._start = self._index + 1, stop
        return self._sealed[start:stop]
