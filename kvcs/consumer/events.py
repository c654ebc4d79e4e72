"""What a retrieval tells: facts in the past tense, as values.

An event is complete when it is told, and :meth:`Event.to_json` gives the object that ``kvcs
consume --json`` prints for it, one a line. Identifiers are lower-case hex there (decision 14).
Layers, blocks, segments and tokens count from 0. Nothing here holds a prompt, a key or a tensor.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar

from kvcs.errors import Rejection
from kvcs.profile.naming import DataTrack, PublicationName

__all__ = [
    "Event",
    "Failed",
    "FailureReason",
    "Gap",
    "LayerReady",
    "LayerSpan",
    "ManifestAccepted",
    "ObjectRejected",
    "PublicationComplete",
    "PublicationFound",
    "PublicationRefused",
    "ReadyLayers",
    "Rejection",
    "SegmentComplete",
    "SegmentConfirmed",
    "SegmentDiffers",
    "Summary",
    "TokenRange",
    "Trust",
]


class Trust(StrEnum):
    """How far the Objects of a layer were checked (decision 8)."""

    #: Every Object passed the checks of KVCS Section 3.5 and decision 7.
    VERIFIED = "verified"
    #: And every digest is listed in an accepted manifest.
    ATTESTED = "attested"


class FailureReason(StrEnum):
    """Why a retrieval ended without all that was wanted. The values are stable."""

    #: No relay and no producer could be reached, or all that were reached were lost.
    UNREACHABLE = "unreachable"
    #: Nobody announced a publication of a prefix that was asked for.
    NOT_FOUND = "not-found"
    #: Every publication found was refused before any Object of it was used.
    REFUSED = "refused"
    #: The publisher gave the publication up (decision 5).
    ABANDONED = "abandoned"
    #: A manifest contradicts an earlier one, or an Object that was already used (decision 8).
    CONTRADICTED = "contradicted"
    #: All that was to come has come, and something is missing.
    INCOMPLETE = "incomplete"
    #: Everything is there, but the manifest ended without attesting it (decision 8).
    UNATTESTED = "unattested"
    #: Nothing came for longer than the retrieval waits.
    STALLED = "stalled"
    #: The deadline of the whole retrieval passed.
    EXPIRED = "expired"
    #: Something the caller gave cannot be used: a sink without room, a certificate file.
    UNUSABLE = "unusable"
    #: The caller ended the retrieval.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Objects of one track that form a rectangle: some layers, and in each the same blocks."""

    segment: int

    track: DataTrack

    first_layer: int

    last_layer: int
    """Included."""

    first_block: int
    """Object ID, which counts within the segment."""

    last_block: int
    """Included."""

    @property
    def objects(self) -> int:
        """How many Objects it stands for."""
        return (self.last_layer - self.first_layer + 1) * (self.last_block - self.first_block + 1)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object: ranges as ``[first, last]``, both included."""
        return {
            "segment": self.segment,
            "track": str(self.track),
            "layers": [self.first_layer, self.last_layer],
            "blocks": [self.first_block, self.last_block],
        }

    def __str__(self) -> str:
        layers = _span("layer", self.first_layer, self.last_layer)
        return f"{self.track} {layers} {_span('block', self.first_block, self.last_block)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyLayers:
    """Consecutive layers of a segment that were told to be ready."""

    segment: int

    first_layer: int

    last_layer: int
    """Included."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object: the range as ``[first, last]``, both included."""
        return {"segment": self.segment, "layers": [self.first_layer, self.last_layer]}

    def __str__(self) -> str:
        return f"segment {self.segment} {_span('layer', self.first_layer, self.last_layer)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Tokens whose cache is to be computed, from some layer on.

    Of each of these tokens every wanted layer below ``first_layer`` is in the sink and may be used,
    and something of ``first_layer`` is not. What is above it counts as missing too, although some
    of it may be there: what goes into a layer is the outcome of the one below, which no cache has.
    So an engine runs these tokens through the model once more; the K and V that it makes below
    ``first_layer`` it may drop, and those from there on it keeps. Tokens in no range are there in
    every wanted layer.
    """

    token_start: int
    """The first token, as a position in the whole context; where a block begins."""

    token_end: int
    """Position after the last token; where a block ends."""

    first_layer: int
    """From 0; counted in the layers of the model."""

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.token_end - self.token_start

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; ``token_end`` is not included."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        tokens = _span("token", self.token_start, self.token_end - 1)
        return f"{tokens} from layer {self.first_layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a retrieval, whether it succeeded or not."""

    objects: int = 0
    """Objects that were verified and placed, each counted once."""

    octets: int = 0
    """Data of those Objects, without headers, as it was on the wire."""

    attested: int = 0
    """Those of them whose digest is listed in an accepted manifest."""

    duplicates: int = 0
    """Objects that came again, and were not placed again."""

    unwanted: int = 0
    """Objects that came without being wanted: of layers or blocks outside the wish, or because
    the peer sends no less."""

    rejected: int = 0
    """Objects that failed a check."""

    unopened: int = 0
    """Those of them that were not sealed by a member of the scope for their place, or are in clear
    where they must not be, or sealed where they must not be."""

    first_layer_s: float | None = None
    """Seconds from the start of the retrieval until the first layer was ready."""

    last_layer_s: float | None = None
    """Seconds until the last layer that became ready was so."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """How far a layer is ready, over all segments from the first wanted one on, without a gap."""

    layer: int

    token_start: int
    """First wanted token, as a position in the whole context."""

    token_end: int
    """Position after the last token that it is ready for; ``token_start`` if there is none."""

    whole: bool
    """Whether that is everything that is wanted and known: the prefix to its end, and each
    appended segment that is listed by now."""


class Event:
    """Base of everything that is told."""

    __slots__ = ()

    name: ClassVar[str]
    """The member ``event`` of its JSON form."""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
        members = {f.name: _json(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return {"event": self.name, **members}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationFound(Event):
    """A publication of a prefix that was asked for is announced."""

    name: ClassVar[str] = "publication-found"

    publication: PublicationName

    blocks: int | None
    """Blocks of the prefix it was found under; None where the tokens are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRefused(Event):
    """A publication is not used; nothing of it was handed out. Another one may follow."""

    name: ClassVar[str] = "publication-refused"

    publication: PublicationName

    text: str
    """Why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestAccepted(Event):
    """A version of the manifest passed every check and is newer than the ones before it."""

    name: ClassVar[str] = "manifest-accepted"

    publication: PublicationName

    version: int
    """Group ID it came under."""

    signed: bool
    """Whether it is a ``manifest.cose``, signed by a trusted producer."""

    layers: int

    segments: int
    """Segments listed so far."""

    complete: bool
    """Whether all segments listed are complete; more may still be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReady(Event):
    """A layer of a segment can be computed with: its tensors are in the sink.

    Told once for each segment and layer, when all its wanted blocks of all selected tracks are
    there and trusted as far as the manifest track allows (decision 8).
    """

    name: ClassVar[str] = "layer-ready"

    segment: int

    layer: int

    token_start: int
    """First token, as a position in the whole context."""

    token_end: int
    """Position after the last token."""

    trust: Trust

    codec: str = "raw"
    """Name of the codec that its tensors came in."""

    lossless: bool = True
    """Whether they are, bit by bit, those that were published."""

    confirmed: bool = False
    """Whether its blocks are known to be of the caller's tokens, by their keys (decision 6). Of
    what is appended behind the prefix that is not so until the caller tells the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRejected(Event):
    """One Object failed a check, was discarded and counts as missing (KVCS Section 3.5)."""

    name: ClassVar[str] = "object-rejected"

    track: DataTrack

    layer: int
    """Group ID it came under."""

    block: int
    """Object ID it came under."""

    reason: Rejection

    text: str
    """What was found and what was expected, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentComplete(Event):
    """Every wanted layer of a segment is ready."""

    name: ClassVar[str] = "segment-complete"

    segment: int

    layers: int
    """How many layers were wanted of it."""

    token_start: int

    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfirmed(Event):
    """An appended segment is of the tokens that the caller has told meanwhile."""

    name: ClassVar[str] = "segment-confirmed"

    segment: int

    token_start: int

    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDiffers(Event):
    """An appended segment covers other tokens than the caller's.

    Nothing of it and of what follows is wanted any more, and layers told of it are of no use to
    the caller: the contexts part here. What is before stays good.
    """

    name: ClassVar[str] = "segment-differs"

    segment: int

    token_start: int
    """Its first token; which of its tokens is the first to differ is not known."""

    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationComplete(Event):
    """Everything wanted is ready. Last event of a retrieval that succeeded."""

    name: ClassVar[str] = "publication-complete"

    publication: PublicationName

    token_end: int
    """Tokens of the context that are covered, from the first block retrieved on."""

    summary: Summary

    codecs: tuple[str, ...] = ("raw",)
    """Names of the codecs that the tensors came in; one, if all segments are offered alike."""

    lossless: bool = True
    """Whether all of them are, bit by bit, those that were published."""

    recompute: tuple[TokenRange, ...] = ()
    """What of the prompt is left to be computed, where the publication is of a shorter prefix.
    Tokens behind the last whole block of the prompt are never in a cache, and not in here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The retrieval ended without everything. Last event of one that did not succeed.

    Layers that were told to be ready stay usable, except after ``contradicted``.
    """

    name: ClassVar[str] = "failed"

    reason: FailureReason

    text: str
    """Why, for people."""

    publication: PublicationName | None
    """The publication it was retrieving; None if it had not come to one."""

    missing: tuple[Gap, ...]
    """Exactly the Objects that were wanted and are not there, as far as a manifest told."""

    unlisted: tuple[int, int] | None
    """First and last wanted block of the context that no segment was ever listed for; None if
    there is no such block, or no manifest to tell."""

    unattested: tuple[Gap, ...]
    """Objects that are there but keep a layer from being ready, for want of attestation."""

    summary: Summary

    ready: tuple[ReadyLayers, ...] = ()
    """The layers that were told to be ready, and may be used; none after ``contradicted``."""

    recompute: tuple[TokenRange, ...] = ()
    """Exactly what of the wanted tokens is left to be computed, ascending and without overlap.
    After ``contradicted`` that is all of them. Empty where neither a manifest nor the prompt tell
    how many tokens there are. Tokens behind the last whole block of the prompt are never in a
    cache, and not in here."""


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _json(value: object) -> Any:
    match value:
        case PublicationName():
            return {
                "scope": value.scope_id.hex(),
                "compatibility": value.compatibility_id.hex(),
                "anchor": value.anchor_key.hex(),
                "publication": value.publication_id.hex(),
            }
        case Summary() | Gap() | ReadyLayers() | TokenRange():
            return value.to_json()
        case DataTrack() | StrEnum():
            return str(value)
        case tuple():
            return [_json(item) for item in value]
    return value
