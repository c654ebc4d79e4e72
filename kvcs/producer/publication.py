"""Publication: what is published, in which order, and how urgently (KVCS Sections 3.2 to 3.6).

Pure: no sockets, no tasks, no clock. Objects go into LocalTracks, from which sessions serve them.

Work on a layer comes in three steps, so that the heavy one can be done in another thread:

1. ``Segment.copy`` checks the tensors and copies them, in whichever thread has them;
2. ``CopiedLayer.prepare`` encodes, hashes and seals, in any thread, as the first step a matter of
   :mod:`kvcs.producer.segment`;
3. :meth:`Publication.publish` puts the Objects into the tracks, on the event loop.

What holds always:

* the Objects of a layer are published after those of the layer before, in every track;
* no Object is published before a manifest that lists its segment;
* of a segment that is appended whole, the one version of the manifest that it takes and all of its
  Objects are published at once;
* each Group ends with End of Group, each data track with End of Track (decision 2), the
  manifest track with neither (decision 3);
* what was published is never changed;
* a publication is sealed as a whole, manifests included, or not at all; and of each place one
  sealed Object leaves at most, since a track takes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvcs.errors import ConfigError
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Layout
from kvcs.kvsp.standard import standard_codecs
from kvcs.producer.sealed import object_octets, seals_of
from kvcs.producer.segment import Encoding, PreparedLayer, Segment, Tensor
from kvcs.profile.ending import abandoned
from kvcs.profile.manifest import CodecEntry, Manifest, SegmentEntry
from kvcs.profile.naming import (
    END_OF_TRACK_PRIORITY,
    MANIFEST,
    MANIFEST_COSE,
    MANIFEST_PRIORITY,
    PublicationName,
    publisher_priority,
)
from kvcs.profile.payload import MAX_DATA_OCTETS
from kvcs.profile.signing import ProducerKey, sign_manifest
from kvcs.trust.sealing import PROPERTIES, SealedTrack, Sealing
from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.session.budget import ByteBudget
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.pairs import Pairs

#: Completed layers between two versions of the manifest, at most (KVCS Section 3.6).
MAX_MANIFEST_EVERY = 8

#: Octets of digests that every version of the manifest may repeat.
REPEATED_OCTETS = 64 << 10
#: Octets that a digest takes in a manifest: 64 digits, quotes and a comma.
_LISTED_OCTETS = 67


@dataclass(frozen=True, slots=True)
class ManifestDraft:
    """One version of the manifest, to be encoded in any thread and then published."""

    manifest: Manifest
    producer_key: ProducerKey | None
    seal: SealedTrack | None = None
    """Of the manifest track; None: it goes in clear."""

    @property
    def octets_estimate(self) -> int:
        """About how many octets its payload will have."""
        digests = sum(
            entry.blocks * len(groups)
            for entry in self.manifest.segments
            for groups in entry.object_digests.values()
        )
        return 4096 + 256 * len(self.manifest.segments) + _LISTED_OCTETS * digests

    @property
    def is_whole(self) -> bool:
        """Whether it lists all digests there are, and refers to no earlier version."""
        return all(entry.digests_in is None for entry in self.manifest.segments)

    def encode(self) -> bytes:
        """Return the payload: JSON, or COSE_Sign1 around it, and sealed if the publication is."""
        payload = self.manifest.to_json()
        if self.producer_key is not None:
            payload = sign_manifest(payload, self.producer_key)
        if self.seal is None:
            return payload
        version = self.manifest.version
        assert version is not None, "a draft has its version"
        return self.seal.seal(
            Location(version, 0),
            MANIFEST_PRIORITY,
            payload,
            padded=self.seal.pads(fixed_length=True),
        )


class Publication:
    """One production run of the cache of one token prefix.

    Args:
        name: Its namespace. The Publication ID must never have been used before.
        descriptor: The Compatibility Descriptor that the name was made from.
        encodings: In which forms every segment is offered.
        codecs: Where their codecs are registered; by default those that come with kvcs.
        producer_key: Signs the manifests, whose track is then ``manifest.cose``.
        deterministic: Promises that every run gives bit-identical Objects.
        manifest_every: Completed layers between two versions of the manifest, 1 to 8.
        budget: Where the octets held are counted.
        first_block: Index of the first block of segment 0; above 0 for a window layer, which
            holds the last blocks of its context only (decision 12).
        repeated_octets: How many octets of digests every version of the manifest may repeat. Once
            those of complete segments are more, they are listed once, and referred to by later
            versions, until these together are as long as one that lists everything again.
        sealing: Seals every Object and every manifest; by default they go in clear.

    Raises:
        ConfigError: If an encoding, the Data Length that follows from the descriptor or an
            option cannot be used.
    """

    def __init__(
        self,
        name: PublicationName,
        descriptor: Descriptor,
        *,
        encodings: Sequence[Encoding] = (Encoding(),),
        codecs: CodecRegistry | None = None,
        producer_key: ProducerKey | None = None,
        deterministic: bool = False,
        manifest_every: int = MAX_MANIFEST_EVERY,
        budget: ByteBudget | None = None,
        first_block: int = 0,
        repeated_octets: int = REPEATED_OCTETS,
        sealing: Sealing | None = None,
    ) -> None:
        if not 1 <= manifest_every <= MAX_MANIFEST_EVERY:
            raise ConfigError(f"manifest_every is {manifest_every}, expected 1 to 8")
        if first_block < 0:
            raise ConfigError(f"first_block is {first_block}, expected 0 or more")
        self.name = name
        self.descriptor = descriptor
        self.layout = Layout.of(descriptor)
        self._codecs = standard_codecs() if codecs is None else codecs
        self._encodings = tuple(encodings)
        self._check_encodings()
        self._declared = {
            codec.name: CodecEntry(value=codec.value, lossless=codec.lossless)
            for codec in (self._codecs[encoding.codec] for encoding in self._encodings)
        }
        self._producer_key = producer_key
        self._deterministic = deterministic
        self._manifest_every = manifest_every
        self._budget = budget
        self._next_block = first_block
        self._repeated_octets = repeated_octets
        self._referring: dict[int, SegmentEntry] = {}
        """By segment, what later versions say of one whose digests have been listed."""

        self._since_whole = (
            0  # octets of versions that refer to earlier ones, since one that did not
        )
        self._must_be_whole = False
        self._segments: list[Segment] = []
        self._announced = 0  # segments that a published manifest lists
        self._version = 0
        self._layers_since_manifest = 0
        self._manifest_due = True
        self._ended = False
        self.abandoned: str | None = None
        """Why it was given up, if it was."""

        self.manifest_name = MANIFEST if producer_key is None else MANIFEST_COSE
        self._sealing = sealing
        self._manifest_seal = (
            None if sealing is None else sealing.track(name.track(self.manifest_name))
        )
        self._tracks: dict[bytes, LocalTrack] = {}
        self._add_track(self.manifest_name)
        self.publish_manifest()

    # -- looking ---------------------------------------------------------------------------------

    @property
    def tracks(self) -> Mapping[bytes, LocalTrack]:
        """Its tracks by Track Name, the manifest track among them."""
        return MappingProxyType(self._tracks)

    @property
    def is_sealed(self) -> bool:
        """Whether its Objects can be read by members of the scope only."""
        return self._sealing is not None

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """The forms in which every segment is offered."""
        return self._encodings

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments opened so far."""
        return tuple(self._segments)

    @property
    def ended(self) -> bool:
        """Whether it was finished or abandoned: nothing more will be published."""
        return self._ended

    @property
    def octets(self) -> int:
        """Payload octets held."""
        return sum(track.octets for track in self._tracks.values())

    @property
    def versions(self) -> int:
        """Versions of the manifest published so far."""
        return self._version

    @property
    def manifest_due(self) -> bool:
        """Whether a new version of the manifest should be published now."""
        return self._manifest_due

    def octets_of(self, blocks: int) -> int:
        """Return the payload octets of ``blocks`` blocks in all layers, as if all were raw."""
        sections = [
            object_octets(self.layout, component, encoding.codec, self._codecs, self._manifest_seal)
            for encoding in self._encodings
            for component in encoding.components
        ]
        return self.layout.layers * blocks * sum(sections)

    # -- producing -------------------------------------------------------------------------------

    def open_segment(self, block_keys: Sequence[bytes]) -> Segment:
        """Add a segment for the blocks that follow those of the segment before.

        Makes a new version of the manifest due. If nobody publishes it before the segment's
        first layer, :meth:`publish` does.

        Args:
            block_keys: The Block Keys of its blocks, at least one.

        Raises:
            ConfigError: If there are none, the publication has ended, or more of a track would be
                sealed than is safe under one key.
        """
        segment = self.next_segment(block_keys)
        self._add_segment(segment)
        self._manifest_due = True
        return segment

    def next_segment(self, block_keys: Sequence[bytes]) -> Segment:
        """Return the segment that would be the next one, without adding it: for :meth:`append`.

        Raises:
            ConfigError: As :meth:`open_segment`.
        """
        self._check_open()
        if not block_keys:
            size = self.layout.block_tokens
            raise ConfigError(f"a segment needs at least one whole block of {size} tokens")
        number, layout, codecs = len(self._segments), self.layout, self._codecs
        tracks = [track for encoding in self._encodings for track in encoding.tracks(number)]
        seals = seals_of(self._sealing, self.name, tracks, len(block_keys), layout, codecs)
        return Segment(number, self._next_block, block_keys, layout, self._encodings, codecs, seals)

    def publish(self, prepared: PreparedLayer) -> None:
        """Publish one layer, and with the last one the end of its tracks.

        Afterwards :attr:`manifest_due` tells whether a version of the manifest should follow.

        Raises:
            ConfigError: If the layer is not the segment's next one, or the publication has
                ended. Nothing was published.
        """
        self._check_open()
        segment = self._segments[prepared.segment]
        if prepared.layer != segment.next_layer:
            expected = "none: it is complete" if segment.complete else f"layer {segment.next_layer}"
            raise ConfigError(
                f"layer {prepared.layer} of segment {segment.number} out of order, "
                f"expected {expected}"
            )
        if segment.number >= self._announced:
            self.publish_manifest()
        self._publish_objects(prepared, segment)
        segment.note(prepared)
        self._layers_since_manifest += 1
        if segment.complete:
            self._end_tracks(segment)
        if segment.complete or self._layers_since_manifest >= self._manifest_every:
            self._manifest_due = True

    def draft_append(self, segment: Segment, layers: Sequence[PreparedLayer]) -> ManifestDraft:
        """Return the version of the manifest that lists one more segment, with all of its layers.

        Args:
            segment: From :meth:`next_segment`; it belongs to this draft from now on.
            layers: All of its layers, in order.

        Raises:
            ConfigError: If layers are missing, or the publication has ended.
        """
        self._check_open()
        if len(layers) != self.layout.layers:
            raise ConfigError(
                f"{len(layers)} layers of segment {segment.number}, expected {self.layout.layers}"
            )
        for prepared in layers:
            segment.note(prepared)
        return self._draft((*self._segments, segment))

    def append(
        self,
        segment: Segment,
        layers: Sequence[PreparedLayer],
        draft: ManifestDraft,
        payload: bytes | None = None,
    ) -> None:
        """Publish a whole segment at once: one version of the manifest, then every Object.

        A segment that is opened first takes two versions and one for every few layers. Where a
        context grows block by block, each of them lists all that went before.

        Args:
            segment: From :meth:`next_segment`.
            layers: All of its layers, in order.
            draft: From :meth:`draft_append`.
            payload: What ``draft.encode()`` returned; encoded now if left out.

        Raises:
            ConfigError: If the publication has ended, or something else was published since the
                draft was made. Nothing was published.
        """
        self._check_open()
        if segment.number != len(self._segments):
            raise ConfigError(
                f"segment {segment.number} is appended, expected {len(self._segments)}"
            )
        self._check_next(draft)
        self._add_segment(segment)
        self.publish_manifest(draft, payload)
        for prepared in layers:
            self._publish_objects(prepared, segment)
        self._end_tracks(segment)

    def add_layer(
        self,
        segment: Segment,
        layer: int,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        kv: Tensor | None = None,
    ) -> None:
        """Copy, prepare and publish one layer, and the manifest if it is due, all at once.

        See :meth:`Segment.copy` for the tensors, and for what is raised.
        """
        self.publish(segment.copy(layer, k, v, kv=kv).prepare())
        if self._manifest_due:
            self.publish_manifest()

    def draft_manifest(self) -> ManifestDraft:
        """Return the next version of the manifest as things stand, to be encoded elsewhere.

        Until it is published, no other version may be.
        """
        return self._draft(self._segments)

    def publish_manifest(
        self, draft: ManifestDraft | None = None, payload: bytes | None = None
    ) -> None:
        """Publish a version of the manifest: Object 0 of its own Group (decision 3).

        Args:
            draft: From :meth:`draft_manifest`; made now if left out.
            payload: What ``draft.encode()`` returned; encoded now if left out.

        Raises:
            ConfigError: If the publication has ended or the draft is not the next version.
        """
        self._check_open()
        draft = self.draft_manifest() if draft is None else draft
        self._check_next(draft)
        payload = draft.encode() if payload is None else payload
        subgroup = self._open_subgroup(self.manifest_name, self._version, MANIFEST_PRIORITY)
        subgroup.publish(0, payload, properties=self._properties)
        subgroup.close()
        entries = draft.manifest.segments
        self._since_whole = 0 if draft.is_whole else self._since_whole + len(payload)
        for entry in entries:
            if entry.complete and entry.digests_in is None:
                self._referring[entry.segment] = entry.elsewhere(self._version)
        self._version += 1
        self._announced = len(entries)
        # What happened while the draft was being encoded waits for the next version.
        self._layers_since_manifest = sum(
            segment.next_layer - entry.groups(entry.tracks[0])
            for segment, entry in zip(self._segments, entries, strict=False)
            if not entry.complete
        )
        self._manifest_due = (
            len(self._segments) > len(entries)
            or self._layers_since_manifest >= self._manifest_every
            or any(
                segment.complete and not entry.complete
                for segment, entry in zip(self._segments, entries, strict=False)
            )
        )

    def conclude(self) -> None:
        """Make a version of the manifest due that lists everything, if the newest one does not.

        To be called before :meth:`finish`, by who encodes manifests elsewhere: those who come after
        the end then have all digests with the one manifest that they get.
        """
        self._must_be_whole = True
        self._manifest_due |= self._since_whole > 0

    def finish(self) -> None:
        """End the publication: every segment is complete, none will follow.

        Raises:
            ConfigError: If a segment lacks layers. Publish them, or abandon it.
        """
        self._check_open()
        for segment in self._segments:
            if not segment.complete:
                raise ConfigError(
                    f"segment {segment.number} has {segment.next_layer} of "
                    f"{self.layout.layers} layers"
                )
        self.conclude()
        if self._manifest_due:
            self.publish_manifest()
        self._ended = True
        self._tracks[self.manifest_name].end(PublishDoneCode.TRACK_ENDED)

    def abandon(self, reason: str) -> None:
        """Give the publication up: something in it is wrong, or it will not be completed.

        Every track that has not ended ends with INTERNAL_ERROR, and a reason by which consumers
        tell it from a publisher that a relay has lost (decision 5). What was held is
        let go, since nobody should use it. The caller withdraws the namespace, and starts anew
        under a new Publication ID. The second call changes nothing.
        """
        if self.abandoned is not None:
            return
        self.abandoned = reason
        self._ended = True
        for track in self._tracks.values():
            track.end(PublishDoneCode.INTERNAL_ERROR, abandoned(reason))
        self.drop()

    def drop(self) -> None:
        """Let go of every Object of a publication that has ended."""
        for track in self._tracks.values():
            if track.ended is None:
                track.end(PublishDoneCode.EXPIRED)
            track.drop()

    # -- parts -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._ended:
            how = "was abandoned" if self.abandoned is not None else "is finished"
            raise ConfigError(f"publication {self.name} {how}")

    def _check_next(self, draft: ManifestDraft) -> None:
        if draft.manifest.version != self._version:
            raise ConfigError(
                f"manifest of version {draft.manifest.version}, expected {self._version}"
            )

    def _draft(self, segments: Sequence[Segment]) -> ManifestDraft:
        # Every version as long as all before it would make as many octets as the square of what
        # there is. So they are listed again only once as many have been spent on leaving them out.
        listed = sum(s.digests for s in segments if s.number in self._referring)
        repeated = listed * _LISTED_OCTETS
        spare = repeated > max(self._repeated_octets, self._since_whole)
        entries = self._referring if spare and not self._must_be_whole else {}
        return ManifestDraft(
            Manifest(
                compat=self.descriptor,
                deterministic=self._deterministic,
                segments=tuple(entries.get(s.number) or s.entry() for s in segments),
                publication=self.name.publication_id,
                anchor=self.name.anchor_key,
                version=self._version,
                codecs=self._declared,
            ),
            self._producer_key,
            self._manifest_seal,
        )

    def _add_segment(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._next_block += segment.blocks
        for track in segment.tracks:
            self._add_track(track.name)

    def _check_encodings(self) -> None:
        if not self._encodings:
            raise ConfigError("a publication needs at least one encoding")
        if len(set(self._encodings)) != len(self._encodings):
            raise ConfigError("an encoding is listed twice")
        for encoding in self._encodings:
            codec = self._codecs[encoding.codec]
            for component in encoding.components:
                if component not in codec.components:
                    raise ConfigError(
                        f"codec {codec.name!r} does not carry {component.name}, "
                        f"which encoding {str(encoding)!r} needs"
                    )
                if (octets := self.layout.section_octets(component)) > MAX_DATA_OCTETS:
                    raise ConfigError(
                        f"{component.name} of one block takes {octets} octets, limit "
                        f"{MAX_DATA_OCTETS}: make block_tokens smaller"
                    )

    def _add_track(self, name: bytes) -> None:
        self._tracks[name] = LocalTrack(self.name.track(name), budget=self._budget)

    def _open_subgroup(self, track: bytes, group_id: int, priority: int) -> LocalSubgroup:
        # Subgroup 0 always holds the whole Group, so END_OF_GROUP is always true (decision 2).
        return self._tracks[track].open_subgroup(
            group_id,
            0,
            priority=priority,
            holds_end_of_group=True,
            has_properties=self._sealing is not None,
        )

    @property
    def _properties(self) -> Pairs:
        """What every Object goes with."""
        return () if self._sealing is None else PROPERTIES

    def _publish_objects(self, prepared: PreparedLayer, segment: Segment) -> None:
        layer = prepared.layer
        priority = publisher_priority(layer, self.layout.layers)
        subgroups = [
            self._open_subgroup(part.track.name, layer, priority) for part in prepared.tracks
        ]
        # Block by block over all tracks, so that K and V of a block leave together.
        for index in range(segment.blocks):
            for part, subgroup in zip(prepared.tracks, subgroups, strict=True):
                payload = [octets for octets in part.objects[index] if octets]
                subgroup.publish(index, *payload, properties=self._properties)
        for subgroup in subgroups:
            subgroup.publish(segment.blocks, status=ObjectStatus.END_OF_GROUP)
            subgroup.close()

    def _end_tracks(self, segment: Segment) -> None:
        for name in segment.tracks:
            track = self._tracks[name.name]
            last = self._open_subgroup(name.name, self.layout.layers, END_OF_TRACK_PRIORITY)
            last.publish(0, status=ObjectStatus.END_OF_TRACK)
            last.close()
            track.end(PublishDoneCode.TRACK_ENDED)
