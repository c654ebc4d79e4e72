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


def sealed_payloads(
    seal: SealedTrack,
    layout: Layout,
    layer: int,
    payloads: Sequence[tuple[Payload, ...]],
    *,
    padded: bool,
) -> list[tuple[Payload, ...]]:
    """Seal the payloads of a layer in one track, all into one buffer. Safe in any thread."""
    priority = publisher_priority(layer, layout.layers)
    lengths = [sealed_octets(sum(map(len, parts)), padded=padded) for parts in payloads]
    store: memoryview = np.empty(sum(lengths), np.uint8).data
    octets = store.toreadonly()
    sealed: list[tuple[Payload, ...]] = []
    start = 0
    for index, (parts, length) in enumerate(zip(payloads, lengths, strict=True)):
        stop = start + length
        seal.seal_into(Location(layer, index), priority, parts, store[start:stop], padded=padded)
        sealed.append((octets[start:stop],))
        start = stop
    return sealed
