"""The checks of an Object, which need no key and no connection. Pure.

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
from kvcs.profile.payload import MAX_DATA_OCTETS, Block


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
) -> Examined:
    """Check one Object and decode it (KVCS Section 3.5, decision 7).

    Touches nothing but its arguments, so it may run in any thread. Costs one SHA-256 over the
    data, and the codec's work.

    Args:
        payload: The Object's payload.
        track: Track it came on.
        layer: Group ID it came under.
        block: Object ID it came under.
        entry: The manifest's entry of the track's segment.
        descriptor: The manifest's descriptor.
        codecs: The codecs that this end knows.
        max_data_octets: Limit on Data Length, and on the octets that are decoded from it.

    Raises:
        BadObject: If a check fails. Treat the Object as missing; others are unaffected.
    """
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
