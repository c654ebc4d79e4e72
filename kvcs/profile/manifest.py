"""The manifest: what a publication consists of, and what every Object of it hashes to.

A manifest is a value that is consistent in itself from the moment it is made (KVCS Section 3.6):

* ``layers`` and ``block_tokens`` are the descriptor's;
* segments are numbered 0, 1, 2, ... in the order they stand, and each begins at the block at
  which the one before it ends. Segment 0 may begin anywhere: a window layer holds the last
  blocks of its context only (decision 12);
* a segment has at least one block and one track, and every track belongs to the segment it is
  listed in;
* digests are listed for whole Groups, in Group order from 0, and for all of them in a segment
  that is complete;
* instead of its digests, a segment that is complete may name an earlier version that lists them:
  where a context grows for long, every version would repeat all of them;
* of each codec of its tracks a manifest of ours also says which value it has, and whether it is
  lossless: names and values for private use mean what those who use them agree on.

Whether it is *this* publication's manifest is asked separately: ``check_identity``,
``check_compatibility``, ``check_tokens``, ``check_follows``.
"""

from binascii import unhexlify
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Self

import orjson

from kvcs.errors import BadDescriptor, BadManifest, BadName
from kvcs.kvsp import strictjson
from kvcs.kvsp.descriptor import MAX_LAYERS, Descriptor
from kvcs.kvsp.keys import ScopeKey
from kvcs.profile.naming import ID_OCTETS, PUBLICATION_ID_OCTETS, DataTrack, PublicationName

#: The value of the member ``kvcs``.
VERSION = 1
#: SHA-256, in octets; twice as many hex digits.
DIGEST_OCTETS = 32
#: Token positions are 64 bits in the header of an Object.
_MAX_TOKENS = 1 << 64
#: Integers beyond this are not the same number to every JSON reader.
_MAX_INTEGER = (1 << 53) - 1

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLimits:
    """What a reader of manifests accepts (decision 13). Checked before anything is built."""

    octets: int = 64 << 20
    """Length of the manifest, in octets."""

    depth: int = 32
    """Nesting of JSON arrays and objects."""

    values: int = 1 << 21
    """JSON values, digests included: twice what fits 64 MiB if all of it were digests."""

    layers: int = MAX_LAYERS
    """L."""

    blocks: int = 1 << 24
    """Blocks of all segments together."""


DEFAULT_LIMITS = ManifestLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEntry:
    """What a manifest says of a codec.

    Raises:
        BadManifest: If the value is none of 16 bits.
    """

    value: int
    """The Codec field of Objects."""

    lossless: bool
    """Whether what is decoded is, bit by bit, what was encoded."""

    def __post_init__(self) -> None:
        _integer("value of a codec", self.value, 0, (1 << 16) - 1)
        _boolean("lossless of a codec", self.lossless)

    def __str__(self) -> str:
        return f"{self.value:#06x}, {'lossless' if self.lossless else 'lossy'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEntry:
    """What a manifest says of one segment.

    Raises:
        BadManifest: If its parts do not fit each other, as the module describes.
    """

    segment: int
    """Its number, from 0."""

    first_block: int
    """Index, in the whole context, of its first block."""

    blocks: int
    """How many blocks it has, at least 1."""

    block_keys_sha256: bytes
    """SHA-256 over the segment's Block Keys, concatenated; 32 octets."""

    tracks: tuple[DataTrack, ...]
    """Its data tracks, each once."""

    complete: bool = False
    """Whether everything of it has been published."""

    object_digests: Mapping[DataTrack, tuple[bytes, ...]] = field(default_factory=dict)
    """For each track, one element per completed Group, in Group order: the Data Digests of the
    Group's Objects in Object order, raw and concatenated, ``32 * blocks`` octets."""

    digests_in: int | None = None
    """Where its digests are left out: an earlier version of the manifest that lists all of them."""

    _text: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"segment {self.segment}"
        _integer("segment", self.segment, 0, _MAX_INTEGER)
        _integer(f"first_block of {where}", self.first_block, 0, _MAX_INTEGER)
        _integer(f"blocks of {where}", self.blocks, 1, _MAX_INTEGER)
        _octets(f"block_keys_sha256 of {where}", self.block_keys_sha256, DIGEST_OCTETS)
        _boolean(f"complete of {where}", self.complete)
        object.__setattr__(self, "tracks", tuple(self.tracks))
        if not self.tracks:
            raise BadManifest(f"{where} has no tracks")
        if len(set(self.tracks)) != len(self.tracks):
            raise BadManifest(f"{where} lists a track twice")
        for track in self.tracks:
            if track.segment != self.segment:
                raise BadManifest(f"track {track} is listed in {where}")
        digests = {track: tuple(groups) for track, groups in self.object_digests.items()}
        for track, groups in digests.items():
            if track not in self.tracks:
                raise BadManifest(f"digests of {track}, which is not a track of {where}")
            for group_id, group in enumerate(groups):
                if len(group) != DIGEST_OCTETS * self.blocks:
                    raise BadManifest(
                        f"layer {group_id} of {track} has digests of {len(group)} octets, "
                        f"expected {DIGEST_OCTETS} for each of {self.blocks} blocks"
                    )
        object.__setattr__(self, "object_digests", MappingProxyType(digests))
        if self.digests_in is not None:
            _integer(f"digests_in of {where}", self.digests_in, 0, _MAX_INTEGER)
            if not self.complete or digests:
                raise BadManifest(
                    f"digests_in of {where}, expected only of one that is complete and lists none"
                )

    @property
    def end_block(self) -> int:
        """Index, in the whole context, of the block after its last."""
        return self.first_block + self.blocks

    def to_json(self) -> bytes:
        """Return its JSON text, which is made once.

        Of a segment that is complete it is the same in every version that follows, and of a context
        that grows there are hundreds of both.
        """
        if self._text is None:
            object.__setattr__(self, "_text", orjson.dumps(_entry_to_object(self)))
        assert self._text is not None
        return self._text

    def elsewhere(self, version: int) -> "SegmentEntry":
        """Return the entry with its digests left out, since an earlier version lists them."""
        return replace(self, object_digests={}, digests_in=version)

    def groups(self, track: DataTrack) -> int:
        """Return for how many Groups of a track, from Group 0 on, digests are listed."""
        return len(self.object_digests.get(track, ()))

    def digest(self, track: DataTrack, layer: int, block: int) -> bytes | None:
        """Return the Data Digest listed for one Object; ``None`` where none is.

        Args:
            track: One of the segment's tracks.
            layer: Group ID.
            block: Object ID, which counts within the segment.
        """
        groups = self.object_digests.get(track, ())
        if not (0 <= layer < len(groups) and 0 <= block < self.blocks):
            return None
        start = DIGEST_OCTETS * block
        return groups[layer][start : start + DIGEST_OCTETS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of a publication's manifest.

    Raises:
        BadManifest: If its parts do not fit each other, as the module describes.
    """

    compat: Descriptor
    """The Compatibility Descriptor; ``layers`` and ``block_tokens`` are its."""

    deterministic: bool = False
    """Whether every publication of the same content has bit-identical Objects."""

    segments: tuple[SegmentEntry, ...] = ()

    publication: bytes | None = None
    """Publication ID, 16 octets (decision 16)."""

    anchor: bytes | None = None
    """Anchor Key, 32 octets (decision 16)."""

    version: int | None = None
    """Group ID of the Object that carries this version (decision 16)."""

    codecs: Mapping[str, CodecEntry] = field(default_factory=dict)
    """What it says of codecs, by name; other publishers may say nothing."""

    def __post_init__(self) -> None:
        _boolean("deterministic", self.deterministic)
        if self.publication is not None:
            _octets("publication", self.publication, PUBLICATION_ID_OCTETS)
        if self.anchor is not None:
            _octets("anchor", self.anchor, ID_OCTETS)
        if self.version is not None:
            _integer("version", self.version, 0, _MAX_INTEGER)
        object.__setattr__(self, "codecs", MappingProxyType(dict(self.codecs)))
        object.__setattr__(self, "segments", tuple(self.segments))
        expected = self.segments[0].first_block if self.segments else 0
        for position, entry in enumerate(self.segments):
            if entry.segment != position:
                raise BadManifest(f"segment {entry.segment} where {position} was expected")
            if entry.first_block != expected:
                raise BadManifest(
                    f"segment {position} begins at block {entry.first_block}, expected {expected}"
                )
            expected = entry.end_block
            self._check_digests(entry)
            later = self.version is not None and (entry.digests_in or 0) >= self.version
            if entry.digests_in is not None and later:
                raise BadManifest(
                    f"the digests of segment {position} are in version {entry.digests_in}, "
                    f"expected one before {self.version}"
                )
        if expected * self.block_tokens > _MAX_TOKENS:
            raise BadManifest(f"blocks up to {expected} have token positions beyond 64 bits")

    def _check_digests(self, entry: SegmentEntry) -> None:
        for track, groups in entry.object_digests.items():
            if len(groups) > self.layers:
                raise BadManifest(
                    f"{track} has digests of {len(groups)} layers, the model has {self.layers}"
                )
            if entry.complete and len(groups) < self.layers:
                raise BadManifest(
                    f"{track} is complete but has digests of {len(groups)} layers, "
                    f"expected {self.layers}"
                )

    @property
    def layers(self) -> int:
        """L, the number of Groups of every data track."""
        return self.compat.layers

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.compat.block_tokens

    @property
    def complete(self) -> bool:
        """Whether there are segments and all of them are complete; more may still be added."""
        return bool(self.segments) and all(entry.complete for entry in self.segments)

    @classmethod
    def from_json(
        cls, text: bytes | bytearray | memoryview | str, limits: ManifestLimits = DEFAULT_LIMITS
    ) -> Self:
        """Read a manifest from a stranger. Members that are not known are ignored.

        Args:
            text: The JSON text, in UTF-8; of ``manifest.cose``, what the signature covers.
            limits: What to accept.

        Raises:
            BadManifest: If it is not JSON, lacks a member, has one of a wrong type, exceeds a
                limit (the message names it) or contradicts itself. Nothing of it can be used.
        """
        try:
            parsed = strictjson.loads(
                text, octets=limits.octets, depth=limits.depth, values=limits.values
            )
        except strictjson.StrictJsonError as exc:
            raise BadManifest(f"manifest is not acceptable JSON: {exc}") from None
        members = _object("manifest", parsed)
        _integer("kvcs", _member("manifest", members, "kvcs"), VERSION, VERSION)
        try:
            compat = Descriptor.from_json(_object("compat", _member("manifest", members, "compat")))
        except BadDescriptor as exc:
            raise BadManifest(f"compat: {exc}") from None
        _same("layers", _member("manifest", members, "layers"), compat.layers)
        _same("block_tokens", _member("manifest", members, "block_tokens"), compat.block_tokens)
        if compat.layers > limits.layers:
            raise BadManifest(f"{compat.layers} layers, limit {limits.layers}")
        entries = _array("segments", _member("manifest", members, "segments"))
        _check_blocks(entries, limits.blocks)
        publication, anchor, version = (
            members.get(name, _ABSENT) for name in ("publication", "anchor", "version")
        )
        return cls(
            compat=compat,
            deterministic=_member("manifest", members, "deterministic"),
            segments=tuple(
                _entry_from_object(entry, position, compat.layers)
                for position, entry in enumerate(entries)
            ),
            publication=None
            if publication is _ABSENT
            else _from_hex("publication", publication, PUBLICATION_ID_OCTETS),
            anchor=None if anchor is _ABSENT else _from_hex("anchor", anchor, ID_OCTETS),
            version=None if version is _ABSENT else _integer("version", version, 0, _MAX_INTEGER),
            codecs={
                name: _codec_from_object(f"codecs.{name:.64}", entry)
                for name, entry in _object("codecs", members.get("codecs", {})).items()
            },
        )

    def to_json(self) -> bytes:
        """Return the JSON text: the payload of a ``manifest`` Object, or what is signed."""
        members: dict[str, Any] = {
            "kvcs": VERSION,
            "compat": self.compat.members(),
            "layers": self.layers,
            "block_tokens": self.block_tokens,
            "deterministic": self.deterministic,
        }
        if self.publication is not None:
            members["publication"] = self.publication.hex()
        if self.anchor is not None:
            members["anchor"] = self.anchor.hex()
        if self.version is not None:
            members["version"] = self.version
        if self.codecs:
            members["codecs"] = {
                name: {"value": codec.value, "lossless": codec.lossless}
                for name, codec in self.codecs.items()
            }
        members["segments"] = [orjson.Fragment(entry.to_json()) for entry in self.segments]
        return orjson.dumps(members)

    def check_identity(self, name: PublicationName, version: int) -> None:
        """Check that the manifest says it is the one it was received as (decision 16).

        What it does not say is not checked.

        Args:
            name: The publication whose manifest track it arrived on.
            version: The Group ID it arrived under.

        Raises:
            BadManifest: If it names another publication, prefix or version. Then somebody
                passed off a manifest for another one.
        """
        if self.publication is not None and self.publication != name.publication_id:
            found, expected = self.publication.hex(), name.publication_id.hex()
            raise BadManifest(f"manifest of publication {found}, expected {expected}")
        if self.anchor is not None and self.anchor != name.anchor_key:
            found, expected = self.anchor.hex(), name.anchor_key.hex()
            raise BadManifest(f"manifest of anchor {found}, expected {expected}")
        if self.version is not None and self.version != version:
            raise BadManifest(f"manifest of version {self.version}, expected {version}")

    def check_compatibility(self, scope_key: ScopeKey, compatibility_id: bytes) -> None:
        """Check that the descriptor is the one the namespace was made from.

        Raises:
            BadManifest: If its Compatibility ID is another one. Discard the publication.
        """
        found = scope_key.compatibility_id(self.compat)
        if found != compatibility_id:
            expected = compatibility_id.hex()
            raise BadManifest(f"compat has the ID {found.hex()}, the namespace {expected}")

    def check_tokens(self, block_keys: Sequence[bytes]) -> tuple[int, ...]:
        """Check that segments cover the tokens of a consumer's own prompt.

        Args:
            block_keys: The Block Keys of the prompt, from its first block on.

        Returns:
            The segments that were confirmed. A segment that reaches beyond the known keys can
            be neither confirmed nor refuted, and is not among them.

        Raises:
            BadManifest: If a segment covers other tokens.
        """
        confirmed = []
        for entry in self.segments:
            if entry.end_block > len(block_keys):
                break
            keys = b"".join(block_keys[entry.first_block : entry.end_block])
            if sha256(keys).digest() != entry.block_keys_sha256:
                raise BadManifest(
                    f"segment {entry.segment}, blocks {entry.first_block} to "
                    f"{entry.end_block - 1}, covers other tokens than the prompt"
                )
            confirmed.append(entry.segment)
        return tuple(confirmed)

    def with_digests_of(self, other: "Manifest") -> "Manifest":
        """Return it with the digests that it leaves out, as far as another version lists them.

        Raises:
            BadManifest: If the other one says something else of such a segment.
        """
        entries = list(self.segments)
        for number, (entry, found) in enumerate(zip(entries, other.segments, strict=False)):
            if entry.digests_in is not None and found.complete and found.object_digests:
                _check_entry_follows(found, entry)
                entries[number] = found
        return replace(self, segments=tuple(entries))

    def check_follows(self, previous: "Manifest") -> None:
        """Check that this version only adds to an earlier one of the same publication.

        Raises:
            BadManifest: If it takes back or changes what the earlier one said. Since Objects
                are never modified (KVCS Section 3.4), the publication cannot be relied on.
        """
        if differing := previous.compat.differences(self.compat):
            raise BadManifest(f"a later manifest has another compat: {'; '.join(differing)}")
        if previous.deterministic != self.deterministic:
            raise BadManifest("a later manifest changes deterministic")
        for name, codec in previous.codecs.items():
            if self.codecs.get(name) != codec:
                raise BadManifest(f"a later manifest changes or omits codec {name!r:.64}")
        last = -1 if previous.version is None else previous.version
        if self.version is not None and self.version <= last:
            raise BadManifest(f"version {self.version} after version {last}")
        if len(self.segments) < len(previous.segments):
            count = len(previous.segments)
            raise BadManifest(f"a later manifest has {len(self.segments)} of {count} segments")
        for before, after in zip(previous.segments, self.segments, strict=False):
            _check_entry_follows(before, after)


def _entry_to_object(entry: SegmentEntry) -> dict[str, Any]:
    members: dict[str, Any] = {
        "segment": entry.segment,
        "first_block": entry.first_block,
        "blocks": entry.blocks,
        "block_keys_sha256": entry.block_keys_sha256.hex(),
        "tracks": [str(track) for track in entry.tracks],
        "complete": entry.complete,
    }
    if entry.digests_in is not None:
        members["digests_in"] = entry.digests_in
    if entry.object_digests:
        members["object_digests"] = {
            str(track): [_hex_digests(group) for group in groups]
            for track, groups in entry.object_digests.items()
        }
    return members


def _entry_from_object(entry: object, position: int, layers: int) -> SegmentEntry:
    where = f"segments[{position}]"
    members = _object(where, entry)
    blocks = _integer(f"{where}.blocks", _member(where, members, "blocks"), 1, _MAX_INTEGER)
    names = _array(f"{where}.tracks", _member(where, members, "tracks"))
    listed = _object(f"{where}.object_digests", members.get("object_digests", {}))
    return SegmentEntry(
        segment=_member(where, members, "segment"),
        first_block=_member(where, members, "first_block"),
        blocks=blocks,
        block_keys_sha256=_from_hex(
            f"{where}.block_keys_sha256",
            _member(where, members, "block_keys_sha256"),
            DIGEST_OCTETS,
        ),
        tracks=tuple(_track(where, name) for name in names),
        complete=_member(where, members, "complete"),
        object_digests={
            _track(where, name): _raw_groups(f"{where}, {name:.64}", groups, layers, blocks)
            for name, groups in listed.items()
        },
        digests_in=members.get("digests_in"),
    )


def _codec_from_object(where: str, codec: object) -> CodecEntry:
    members = _object(where, codec)
    return CodecEntry(
        value=_member(where, members, "value"), lossless=_member(where, members, "lossless")
    )


def _check_entry_follows(before: SegmentEntry, after: SegmentEntry) -> None:
    where = f"segment {before.segment}"
    if before is after:
        return
    for name in ("first_block", "blocks", "block_keys_sha256", "tracks"):
        if getattr(before, name) != getattr(after, name):
            raise BadManifest(f"a later manifest changes {name} of {where}")
    if before.complete and not after.complete:
        raise BadManifest(f"a later manifest takes back that {where} is complete")
    if after.digests_in is not None:
        return  # which says where they are
    for track, groups in before.object_digests.items():
        if after.object_digests.get(track, ())[: len(groups)] != groups:
            raise BadManifest(f"a later manifest contradicts or omits digests of {track}")


def _check_blocks(entries: list[Any], limit: int) -> None:
    blocks = 0
    for position, entry in enumerate(entries):
        where = f"segments[{position}]"
        members = _object(where, entry)
        count = _member(where, members, "blocks")
        blocks += _integer(f"{where}.blocks", count, 1, _MAX_INTEGER)
    if blocks > limit:
        raise BadManifest(f"{blocks} blocks, limit {limit}")


def _hex_digests(group: bytes) -> list[str]:
    digits, width = group.hex(), 2 * DIGEST_OCTETS
    return [digits[start : start + width] for start in range(0, len(digits), width)]


def _raw_groups(where: str, value: object, layers: int, blocks: int) -> tuple[bytes, ...]:
    groups = _array(f"digests of {where}", value)
    if len(groups) > layers:
        raise BadManifest(f"digests of {where}: {len(groups)} layers, the model has {layers}")
    return tuple(
        _raw_group(f"digests of {where}, layer {layer}", group, blocks)
        for layer, group in enumerate(groups)
    )


def _raw_group(where: str, value: object, blocks: int) -> bytes:
    group = _array(where, value)
    if len(group) != blocks:
        raise BadManifest(f"{where}: {len(group)} digests, expected {blocks}")
    width = 2 * DIGEST_OCTETS
    # Per-element conversion takes ten times as long, and there are hundreds of thousands.
    if set(map(type, group)) != {str} or set(map(len, group)) != {width}:
        raise BadManifest(f"{where}: not all are strings of {width} hex digits")
    try:
        return unhexlify("".join(group))
    except ValueError:
        raise BadManifest(f"{where}: not all are strings of {width} hex digits") from None


def _member(where: str, members: Mapping[str, Any], name: str) -> Any:
    if name not in members:
        raise BadManifest(f"{where} has no member {name!r}")
    return members[name]


def _same(name: str, found: object, expected: int) -> None:
    if type(found) is not int or found != expected:
        raise BadManifest(f"{name} is {found!r:.64}, but compat says {expected}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int:
        raise BadManifest(f"{name} is {_kind(value)}, expected an integer")
    if not low <= value <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise BadManifest(f"{name} is {value!r:.64}, expected {wanted}")
    return value


def _boolean(name: str, value: object) -> None:
    if type(value) is not bool:
        raise BadManifest(f"{name} is {_kind(value)}, expected true or false")


def _octets(name: str, value: object, expected: int) -> None:
    if not isinstance(value, bytes):
        raise BadManifest(f"{name} is {_kind(value)}, expected bytes")
    if len(value) != expected:
        raise BadManifest(f"{name} of {len(value)} octets, expected {expected}")


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadManifest(f"{name} is {_kind(value)}, expected an object")
    return value


def _array(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise BadManifest(f"{name} is {_kind(value)}, expected an array")
    return value


def _from_hex(name: str, value: object, octets: int) -> bytes:
    if not isinstance(value, str):
        raise BadManifest(f"{name} is {_kind(value)}, expected a string")
    if len(value) != 2 * octets:
        raise BadManifest(f"{name} of {len(value)} characters, expected {2 * octets} hex digits")
    try:
        return unhexlify(value)
    except ValueError:
        raise BadManifest(f"{name} is not hex") from None


def _track(where: str, name: object) -> DataTrack:
    if not isinstance(name, str):
        raise BadManifest(f"a track of {where} is {_kind(name)}, expected a string")
    try:
        return DataTrack.parse(name)
    except BadName as exc:
        raise BadManifest(f"a track of {where}: {exc}") from None


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"
