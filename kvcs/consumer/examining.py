"""The checks of an Object, which need no connection, and of keys that of its track alone. Pure.

No Object is used before :func:`examine` has passed (KVCS Section 3.5, decision 7).
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.codecs import RAW, CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Layout, Octets
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import HEADER_OCTETS, MAX_DATA_OCTETS, Block
from kvcs.trust.sealing import BARE, IN_CLEAR, Cover, Opener
from moqt.location import Location


@dataclass(frozen=True, slots=True)
class Examined:
    """An Object that passed every check."""

    digest: bytes
    """Its Data Digest."""

    octets: int
    """Length of its Data."""

    tensor: NDArray[Any] | Octets
    """What a sink takes: decoded, or for ``raw`` the octets as they came, not copied."""


def examine(
    payload: Octets,
    *,
    track: DataTrack,
    layer: int,
    block: int,
    entry: SegmentEntry,
    descriptor: Descriptor,
    codecs: CodecRegistry,
    max_data_octets: int = MAX_DATA_OCTETS,
    opener: Opener = IN_CLEAR,
    cover: Cover = BARE,
) -> Examined:
    """Open one Object, check it and decode it (KVCS Section 3.5, decision 7).

    Touches nothing but its arguments, so it may run in any thread. Costs one SHA-256 over the
    data, and the work of cipher and codec.

    Args:
        payload: The Object's payload, as it came.
        track: Track it came on.
        layer: Group ID it came under.
        block: Object ID it came under.
        entry: The manifest's entry of the track's segment.
        descriptor: The manifest's descriptor.
        codecs: The codecs that this end knows.
        max_data_octets: Limit on Data Length, and on the octets that are decoded from it.
        opener: Opens the Objects of the track.
        cover: What it came with.

    Raises:
        BadObject: If a check fails. Treat the Object as missing; others are unaffected.
    """
    longest = _longest(opener, track, descriptor, codecs, max_data_octets)
    payload = opener.open(Location(layer, block), cover, payload, longest)
    found = Block.decode(payload, group_id=layer, object_id=block, max_data=max_data_octets)
    found.check_against(entry, descriptor, track, codecs)
    codec = codecs[track.codec]
    if codec is RAW:
        return Examined(found.digest, len(found.data), found.data)
    layout = Layout.of(descriptor)
    # How much comes out of the Data is known before: what may not come raw may not come packed.
    if (octets := layout.section_octets(track.component)) > max_data_octets:
        raise BadObject(
            Rejection.LIMIT, f"{track} decodes to {octets} octets, limit {max_data_octets}"
        )
    shape = layout.shape(track.component)
    try:
        tensor = codec.decode(found.data, shape, layout.dtype)
        fits = tensor.shape == shape and tensor.dtype == layout.dtype
    except BadObject:
        raise
    except Exception as exc:
        # An application's own code, fed with what strangers send: whatever it raises says
        # that this Object cannot be used, and nothing about the others.
        raise BadObject(
            Rejection.DECODE, f"codec {codec.name!r} failed: {type(exc).__name__}: {exc}"
        ) from exc
    if not fits:
        raise BadObject(
            Rejection.DECODE,
            f"codec {codec.name!r} made {tensor.dtype} {tensor.shape} of the data, "
            f"expected {layout.dtype} {shape}",
        )
    return Examined(found.digest, len(found.data), tensor)


def _longest(
    opener: Opener,
    track: DataTrack,
    descriptor: Descriptor,
    codecs: CodecRegistry,
    max_data_octets: int,
) -> int:
    """Return how long a payload of a track may be before it is opened."""
    codec, octets = codecs.get(track.codec), max_data_octets
    is_fixed = codec is not None and codec.fixed_length
    if is_fixed:
        octets = min(octets, Layout.of(descriptor).section_octets(track.component))
    return opener.longest(HEADER_OCTETS + octets, fixed_length=is_fixed)
