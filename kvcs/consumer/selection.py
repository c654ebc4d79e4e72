"""From a manifest and a wish to tracks, layers and blocks (KVCS Sections 3.2 and 5.1 to 5.3).

Pure: what is wanted of one segment follows from its entry, the descriptor, the codecs that this
end knows, and how far the context reaches that is wanted. An entry never changes what it says
of these (:meth:`kvcs.profile.manifest.Manifest.check_follows`), so a plan is made once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvcs.errors import ConfigError, NotFound
from kvcs.kvsp.codecs import Codec, CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.profile.manifest import CodecEntry, SegmentEntry
from kvcs.profile.naming import DataTrack


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller wants of a publication. The default is everything that it has.

    Raises:
        ConfigError: If a range is empty, has a step, or begins below 0.
    """

    segments: frozenset[int] | None = None
    """Segments by number; None: those that hold wanted blocks."""

    layers: range | None = None
    """Consecutive layers; None: all of them."""

    blocks: range | None = None
    """Consecutive blocks, counted from the start of the context; None: all of them."""

    codecs: tuple[str, ...] | None = None
    """Names of codecs, the one liked best first; None: all lossless ones that are registered, in
    the order of their registration, ``raw`` first. One that is lossy is taken only if named."""

    require_lossless: bool = False
    """Insist on tensors that are, bit by bit, those that were published: no lossy codec is taken,
    and none may be named."""

    follow: bool = False
    """Want what is appended behind the prefix as well, while it is, until the publication ends. The
    sink must be one that can grow (:class:`~kvcs.store.sink.GrowingSink`). A publication that an
    index knows to go on otherwise than the prompt is not followed."""

    def __post_init__(self) -> None:
        for name, wanted in (("layers", self.layers), ("blocks", self.blocks)):
            if wanted is not None and (wanted.step != 1 or wanted.start < 0 or not wanted):
                raise ConfigError(f"wanted {name} are {wanted}, expected a range such as 0 to 7")
        if self.segments is not None and (not self.segments or min(self.segments) < 0):
            raise ConfigError(f"wanted segments are {sorted(self.segments)}, expected some from 0")
        if self.codecs is not None and not self.codecs:
            raise ConfigError("no codec is wanted: name one, such as raw")

    def check(self, descriptor: Descriptor, codecs: CodecRegistry) -> None:
        """Refuse a wish that no publication of this model can fulfil.

        Raises:
            ConfigError: If it wants layers that the model does not have, or a codec that is
                not registered, or lossy where lossless is required.
        """
        if self.layers is not None and self.layers.stop > descriptor.layers:
            raise ConfigError(
                f"layers up to {self.layers.stop - 1} are wanted, the model has "
                f"{descriptor.layers}, from 0"
            )
        for name in self.codecs or ():
            if self.require_lossless and not codecs[name].lossless:
                raise ConfigError(f"codec {name!r} is lossy, but lossless codecs are required")
            codecs[name]

    def names(self, codecs: CodecRegistry) -> tuple[str, ...]:
        """Return the names of the codecs that are accepted, the one liked best first."""
        if self.codecs is not None:
            return self.codecs
        return tuple(codec.name for codec in codecs if codec.lossless)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """What is wanted of one segment."""

    segment: int

    tracks: tuple[DataTrack, ...]
    """The pair of K and V of one codec, its KV alone, or the one that has anything in it."""

    layers: range
    """Group IDs."""

    blocks: range
    """Object IDs, which count within the segment."""

    first_block: int
    """Index, in the whole context, of the segment's first block."""

    block_tokens: int

    @property
    def codec(self) -> str:
        """Name of the codec of its tracks."""
        return self.tracks[0].codec

    @property
    def context_blocks(self) -> range:
        """The wanted blocks, counted from the start of the context."""
        return range(self.first_block + self.blocks.start, self.first_block + self.blocks.stop)

    @property
    def token_start(self) -> int:
        """Position in the context of the first wanted token."""
        return self.context_blocks.start * self.block_tokens

    @property
    def token_end(self) -> int:
        """Position in the context after the last wanted token."""
        return self.context_blocks.stop * self.block_tokens

    @property
    def objects_per_layer(self) -> int:
        """Wanted Objects of one layer, over all tracks."""
        return len(self.tracks) * len(self.blocks)


def plan_segment(
    entry: SegmentEntry,
    descriptor: Descriptor,
    wish: Wish,
    codecs: CodecRegistry,
    end_block: int | None = None,
    declared: Mapping[str, CodecEntry] | None = None,
) -> SegmentPlan | None:
    """Say what is wanted of a segment.

    Args:
        entry: What the manifest says of the segment.
        descriptor: The manifest's Compatibility Descriptor.
        wish: What the caller wants.
        codecs: The codecs that this end knows.
        end_block: Block of the context before which everything wanted ends; None: no bound.
        declared: What the manifest says of codecs.

    Returns:
        The plan; None if nothing of the segment is wanted.

    Raises:
        NotFound: If the segment is wanted, but is not offered in any codec that is.
    """
    if wish.segments is not None and entry.segment not in wish.segments:
        return None
    start, stop = entry.first_block, entry.end_block
    if wish.blocks is not None:
        start, stop = max(start, wish.blocks.start), min(stop, wish.blocks.stop)
    if end_block is not None:
        stop = min(stop, end_block)
    if start >= stop:
        return None
    return SegmentPlan(
        segment=entry.segment,
        tracks=select_tracks(entry, descriptor, wish, codecs, declared or {}),
        layers=range(descriptor.layers) if wish.layers is None else wish.layers,
        blocks=range(start - entry.first_block, stop - entry.first_block),
        first_block=entry.first_block,
        block_tokens=descriptor.block_tokens,
    )


def select_tracks(
    entry: SegmentEntry,
    descriptor: Descriptor,
    wish: Wish,
    codecs: CodecRegistry,
    declared: Mapping[str, CodecEntry] = MappingProxyType({}),
) -> tuple[DataTrack, ...]:
    """Choose the tracks that together hold a segment (KVCS Section 3.2).

    For the codec liked best that the segment is offered in, K and V; or KV, if that is what
    there is. Of a model whose K or V section is empty, the other one is enough.

    Raises:
        NotFound: If the segment is not offered in any codec that is wanted and known, and that
            is what the manifest says it is. The message says what was found and expected.
    """
    layout = Layout.of(descriptor)
    apart = tuple(c for c in (Component.K, Component.V) if layout.section_octets(c))
    names = wish.names(codecs)
    for name in names:
        codec = codecs.get(name)
        if codec is None or not _is_acceptable(codec, wish, declared):
            continue
        for components in (apart, (Component.KV,)):
            tracks = tuple(DataTrack(c, name, entry.segment) for c in components)
            if codec.components.issuperset(components) and set(tracks) <= set(entry.tracks):
                return tracks
    told = "".join(f"; {why}" for why in _complaints(entry, wish, codecs, declared))
    raise NotFound(
        f"segment {entry.segment} is offered as {_listed(entry.tracks)}: "
        f"not what is needed in any of the codecs {', '.join(names)}{told}"
    )


def _is_acceptable(codec: Codec, wish: Wish, declared: Mapping[str, CodecEntry]) -> bool:
    said = declared.get(codec.name)
    return (said is None or said == _entry_of(codec)) and (
        codec.lossless or not wish.require_lossless
    )


def _entry_of(codec: Codec) -> CodecEntry:
    return CodecEntry(value=codec.value, lossless=codec.lossless)


def _complaints(
    entry: SegmentEntry, wish: Wish, codecs: CodecRegistry, declared: Mapping[str, CodecEntry]
) -> Iterator[str]:
    """Say of each codec that a segment is offered in what speaks against it, if there is more."""
    for name in dict.fromkeys(track.codec for track in entry.tracks):
        codec, said = codecs.get(name), declared.get(name)
        if codec is None:
            why = codecs.unavailable(name)
            yield f"{name} is not known here" if why is None else f"{name} cannot be read: {why}"
        elif said is not None and said != _entry_of(codec):
            yield f"{name} is {said} there, expected {_entry_of(codec)}"
        elif not codec.lossless and (wish.require_lossless or wish.codecs is None):
            yield f"{name} is lossy, expected a lossless codec"


def _listed(tracks: Iterable[DataTrack], limit: int = 8) -> str:
    names = [str(track) for track in tracks]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")
