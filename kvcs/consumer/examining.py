"""The checks of an Object, which need no connection, and of keys that of its track alone. Pure.

No Object is used before an :class:`Examiner` has passed it (KVCS Section 3.5, decision 7).
"""

from typing import Any

from numpy.typing import NDArray

from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.codecs import RAW, CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Layout, Octets
from kvcs.profile.manifest import SegmentEntry
from kvcs.profile.naming import DataTrack
from kvcs.profile.payload import HEADER_OCTETS, MAX_DATA_OCTETS, Block, read_as_promised
from kvcs.trust.sealing import BARE, IN_CLEAR, Cover, Opener
from moqt.location import Location
from moqt.values import hot_value


@hot_value()
class Examined:
    """An Object that passed every check."""

    digest: bytes
    """Its Data Digest."""

    octets: int
    """Length of its Data."""

    tensor: NDArray[Any] | Octets
    """What a sink takes: decoded, or for ``raw`` the octets as they came, not copied."""


class Examiner:
    """Checks the Objects of one track and decodes them (KVCS Section 3.5, decision 7).

    Changes nothing once it is made, so it may be used in any threads.

    Args:
        track: The track.
        entry: The manifest's entry of its segment; of any version, since what counts here stays.
        descriptor: The manifest's descriptor.
        codecs: The codecs that this end knows.
        max_data_octets: Limit on Data Length, and on the octets that are decoded from it.
        opener: Opens the Objects of the track.

    Attributes:
        section_octets: Length of the tensor of one Object, decoded.
        is_raw: Whether nothing is to be decoded.
    """

    __slots__ = (
        "_codecs", "_descriptor", "_entry", "_limit", "_longest", "_opener", "_track", "is_raw",
        "section_octets",
    )  # fmt: skip

    def __init__(
        self,
        track: DataTrack,
        entry: SegmentEntry,
        descriptor: Descriptor,
        codecs: CodecRegistry,
        max_data_octets: int = MAX_DATA_OCTETS,
        opener: Opener = IN_CLEAR,
    ) -> None:
        if track not in entry.tracks:
            raise ValueError(f"{track} is not a track of segment {entry.segment}")
        self.section_octets = Layout.of(descriptor).section_octets(track.component)
        self.is_raw = codecs.get(track.codec) is RAW
        self._track = track
        self._entry = entry
        self._descriptor = descriptor
        self._codecs = codecs
        self._limit = max_data_octets
        self._opener = opener
        codec, octets = codecs.get(track.codec), max_data_octets
        is_fixed = codec is not None and codec.fixed_length
        if is_fixed:
            octets = min(octets, self.section_octets)
        self._longest = opener.longest(HEADER_OCTETS + octets, fixed_length=is_fixed)

    def examine(self, payload: Octets, layer: int, block: int, cover: Cover = BARE) -> Examined:
        """Open one Object, check it and decode it.

        Costs one SHA-256 over the data, and the work of cipher and codec.

        Args:
            payload: The Object's payload, as it came.
            layer: Group ID it came under.
            block: Object ID it came under.
            cover: What it came with.

        Raises:
            BadObject: If a check fails. Treat the Object as missing; others are unaffected.
        """
        opened = self._opener.open(Location(layer, block), cover, payload, self._longest)
        found = None
        if self.is_raw and not isinstance(opened, bytearray):
            found = self._as_promised(opened, layer, block)
        return self._examine(opened, layer, block) if found is None else found

    def _as_promised(self, payload: Octets, layer: int, block: int) -> Examined | None:
        """Return what a good raw Object is, as nearly all are; None: look at it step by step."""
        entry, descriptor, octets = self._entry, self._descriptor, self.section_octets
        if octets > self._limit or not (layer < descriptor.layers and block < entry.blocks):
            return None
        tokens = descriptor.block_tokens
        found = read_as_promised(
            payload,
            component=self._track.component,
            layer=layer,
            block_index=block,
            token_start=(entry.first_block + block) * tokens,
            token_count=tokens,
            codec=RAW.value,
            octets=octets,
        )
        if found is None:
            return None
        data, digest = found
        return Examined(digest, octets, data)

    def _examine(self, payload: Octets, layer: int, block: int) -> Examined:
        track, descriptor = self._track, self._descriptor
        found = Block.decode(payload, group_id=layer, object_id=block, max_data=self._limit)
        found.check_against(self._entry, descriptor, track, self._codecs)
        codec = self._codecs[track.codec]
        if self.is_raw:
            return Examined(found.digest, len(found.data), found.data)
        layout = Layout.of(descriptor)
        # How much comes out of the Data is known before: what may not come raw may not come packed.
        if (octets := self.section_octets) > self._limit:
            raise BadObject(
                Rejection.LIMIT, f"{track} decodes to {octets} octets, limit {self._limit}"
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
    """Open a single Object, check it and decode it: see :class:`Examiner`.

    Raises:
        BadObject: As :meth:`Examiner.examine` does.
        ValueError: If the track is not one of the entry: a mistake of the caller.
    """
    return Examiner(track, entry, descriptor, codecs, max_data_octets, opener).examine(
        payload, layer, block, cover
    )
