"""Which layers are ready, and what is missing (KVCS Section 5.4, decisions 6, 8 and 9).

Pure: no sockets, no tensors, no time. An Object goes through it like this:

1. :meth:`Assembler.expects` says whether it is worth examining;
2. the caller examines it (:func:`kvcs.consumer.trust.examine`), where and when it likes;
3. :meth:`Assembler.admit` claims its place, once, or :meth:`Assembler.reject` counts it;
4. the caller puts the tensor in place, and says so with :meth:`Assembler.placed`.

Memory grows with what has been admitted, never with what a manifest promises.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvcs.consumer.events import (
    Event,
    Gap,
    LayerReady,
    LayerSpan,
    ManifestAccepted,
    ObjectRejected,
    SegmentComplete,
    SegmentConfirmed,
    SegmentDiffers,
    Summary,
    Trust,
)
from kvcs.consumer.joining import Bond, CannotJoin, Estate, Held, Joint, bond_of, join
from kvcs.consumer.ledger import Row, Segment, Track, missing, rectangles
from kvcs.consumer.ranges import runs
from kvcs.consumer.selection import SegmentPlan, Wish, plan_segment
from kvcs.errors import UNOPENED, BadManifest, BadObject, KvcsError, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import block_keys_sha256
from kvcs.profile.manifest import DIGEST_OCTETS, Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName
from kvcs.trust.sealing import BARE, Cover

#: Payload octets of Objects that are kept until the first manifest is accepted (decision 6).
EARLY_OCTETS = 16 << 20


class Contradicted(KvcsError):
    """A manifest contradicts an earlier one, or an Object that was already used.

    The publication cannot be relied on, whatever of it was retrieved.
    """


class Expected(Enum):
    """What to do with an Object that came."""

    #: Examine it.
    EXAMINE = auto()
    #: It is there already: drop it.
    DUPLICATE = auto()
    #: Nobody asked for it: drop it.
    UNWANTED = auto()
    #: No manifest yet: hand it to :meth:`Assembler.hold`.
    EARLY = auto()


@dataclass(frozen=True, slots=True)
class EarlyObject:
    """An Object that came ahead of the manifest."""

    track: DataTrack
    layer: int
    block: int
    payload: bytes = field(repr=False)
    cover: Cover = BARE


class Assembler:
    """Keeps account of one publication while it is retrieved.

    Args:
        publication: Its name.
        wish: What is wanted of it.
        codecs: The codecs that this end knows.
        signed: Whether its manifest track is ``manifest.cose``: layers then wait to be attested.
        blocks: Blocks of the prefix that it was found under: everything wanted ends there.
            None: at the end of the last segment that the first manifest lists, if the wish
            does not say.
        known_blocks: Blocks whose keys every manifest is held against; a segment that reaches
            beyond them cannot be confirmed by that, and is never used unless the wish is to
            follow what is appended (decision 6). None: the tokens are not known.
        early_octets: Payload octets kept until a manifest is accepted.
        follows: The publication that this one is to go on for, of which nothing more will come;
            its first manifest decides whether it can. Both share what there is from then on.
    """

    def __init__(
        self,
        publication: PublicationName,
        *,
        wish: Wish,
        codecs: CodecRegistry,
        signed: bool,
        blocks: int | None = None,
        known_blocks: int | None = None,
        early_octets: int = EARLY_OCTETS,
        follows: "Assembler | None" = None,
    ) -> None:
        self.publication = publication
        self.signed = signed
        """May be set until the first manifest is accepted."""

        self.manifest: Manifest | None = None
        self.version = -1
        """Group ID of the newest manifest accepted; -1 before the first."""

        self._wish = wish
        self._codecs = codecs
        self._known = known_blocks
        self._prefix = _least(blocks, wish.blocks.stop if wish.blocks is not None else None)
        self._end = self._prefix
        self._is_following = wish.follow
        self._parting: int | None = None  # the segment from which on other tokens are covered
        self._segments: dict[int, Segment] = {}
        self._order: list[Segment] = []  # the same, as they lie in the context
        self._spans: dict[int, int] = {}  # by layer, of how many of them it is ready without a gap
        self._tracks: dict[DataTrack, Track] = {}
        self._planned = 0  # entries of the manifest that were looked at
        self._early: list[EarlyObject] = []
        self._early_room = early_octets
        self._objects = self._octets = self._attested = 0
        self._duplicates = self._unwanted = self._rejected = self._unopened = 0
        self._follows = follows
        self._kept: set[int] = set()  # segments that are there, of another publication

    # -- the manifest ----------------------------------------------------------------------------

    def accept(self, manifest: Manifest, version: int) -> list[Event]:
        """Take a manifest that passed :func:`~kvcs.consumer.trust.check_manifest`.

        An older one than the newest accepted changes nothing: versions may overtake each other.

        Args:
            manifest: What it says.
            version: Group ID it came under.

        Returns:
            What follows from it, in order.

        Raises:
            Contradicted: If it takes back what an earlier one said; or, for a plain manifest,
                lists another digest for an Object that was already used (decision 8).
            NotFound: If a wanted segment is not offered in any codec that is wanted.
            CannotJoin: If it cannot go on for the publication that it is to follow, which has
                not been touched then.
        """
        if version <= self.version:
            return []
        if self.manifest is not None:
            try:
                manifest.check_follows(self.manifest)
                manifest = manifest.with_digests_of(self.manifest)
            except BadManifest as exc:
                raise Contradicted(str(exc)) from None
        self.manifest, self.version = manifest, version
        self._plan_new_segments(manifest)
        if self._follows is not None:
            before, self._follows = self._follows, None
            self._take_over(before, manifest)
        events: list[Event] = [
            ManifestAccepted(
                publication=self.publication,
                version=version,
                signed=self.signed,
                layers=manifest.layers,
                segments=len(manifest.segments),
                complete=manifest.complete,
            )
        ]
        events += self._compare(manifest)
        return events

    @property
    def digests_in(self) -> set[int]:
        """Earlier versions of the manifest whose digests keep layers from being ready."""
        if not self.signed:
            return set()
        found = {segment.entry.digests_in for segment in self._order if segment.unready}
        return {version for version in found if version is not None}

    def supply(self, earlier: Manifest) -> list[Event]:
        """Take the digests that the newest manifest leaves out from an earlier version.

        Args:
            earlier: A version that passed :func:`~kvcs.consumer.trust.check_manifest` as well.

        Returns:
            What follows from it, in order.

        Raises:
            Contradicted: If the two say different things.
        """
        assert self.manifest is not None, "or nothing would be left out"
        try:
            self.manifest.check_follows(earlier)
            self.manifest = self.manifest.with_digests_of(earlier)
        except BadManifest as exc:
            raise Contradicted(str(exc)) from None
        return list(self._compare(self.manifest))

    def _compare(self, manifest: Manifest) -> Iterator[Event]:
        """Compare what is listed of each segment by now with what came of it."""
        for segment in self._order:
            if segment.plan.segment in self._kept:
                continue  # its digests are another publication's
            segment.entry = manifest.segments[segment.plan.segment]
            yield from self._attest(segment)

    def _plan_new_segments(self, manifest: Manifest) -> None:
        self._end = self._reach(manifest.segments)
        for entry in manifest.segments[self._planned :]:
            self._planned += 1
            if not self._is_usable(entry):
                continue
            plan = plan_segment(
                entry, manifest.compat, self._wish, self._codecs, self._end, manifest.codecs
            )
            if plan is not None:
                confirmed = self._known is not None and entry.end_block <= self._known
                segment = self._segments[plan.segment] = Segment(plan, entry, confirmed=confirmed)
                self._order.append(segment)
                self._tracks.update((track.name, track) for track in segment.tracks)

    def _take_over(self, before: "Assembler", manifest: Manifest) -> None:
        """Go on with what there is of another publication; all checks come first."""
        estate = before.estate
        if estate is None:
            return
        joints = join(estate, self.publication, manifest, signed=self.signed)
        if lost := [number for number in joints if number not in self._segments]:
            raise CannotJoin(f"nothing is wanted of its segment {lost[0]}")
        if before.extent not in (None, self.extent):
            raise CannotJoin(f"it has blocks {self.extent}, expected {before.extent}")
        if all(joints.get(number) is Joint.KEPT for number in self._segments):
            raise CannotJoin("it lists nothing of what is missing")
        for number, joint in joints.items():
            self._segments[number] = before.hand_over(number)
            if joint is Joint.KEPT:
                self._kept.add(number)
        self._order = list(self._segments.values())
        tracks = (track for segment in self._order for track in segment.tracks)
        self._tracks = {track.name: track for track in tracks}
        self._count_on(before.summary())

    def hand_over(self, segment: int) -> Segment:
        """Return what there is of a segment, to the publication that goes on for this one."""
        return self._segments[segment]

    def _count_on(self, so_far: Summary) -> None:
        self._objects, self._octets = so_far.objects, so_far.octets
        self._attested, self._duplicates = so_far.attested, so_far.duplicates
        self._unwanted, self._rejected = so_far.unwanted, so_far.rejected
        self._unopened = so_far.unopened

    def _reach(self, listed: Sequence[SegmentEntry]) -> int | None:
        """Return where everything wanted ends, as far as the segments listed tell."""
        end, wished = self._end, self._wish.segments
        if end is not None and not self._is_following:
            return end
        last = len(listed) - 1 if wished is None else max(wished)
        if self._is_following:
            last = min(last, len(listed) - 1)
        if not 0 <= last < len(listed):
            return end
        bound = self._wish.blocks.stop if self._wish.blocks is not None else None
        return _least(max(listed[last].end_block, end or 0), bound)

    def _is_usable(self, entry: SegmentEntry) -> bool:
        """Whether a segment may be used at all; not whether anything of it is wanted."""
        if self._parting is not None and entry.segment >= self._parting:
            return False
        return self._wish.follow or self._known is None or entry.end_block <= self._known

    def confirm(self, keys: Sequence[bytes]) -> list[Event]:
        """Hold what was appended behind the prefix against Block Keys that are known by now.

        Where the caller's context and the publication part, following ends: nothing of that
        segment or behind it is wanted any more.

        Args:
            keys: Block Keys of the caller's whole context, from its first block on.

        Returns:
            What follows from it, in order.

        Raises:
            Contradicted: If already the first wanted segment covers other tokens.
        """
        events: list[Event] = []
        for segment in self._order:
            if segment.confirmed:
                continue
            entry, plan = segment.entry, segment.plan
            if entry.end_block > len(keys):
                break
            found = block_keys_sha256(keys[entry.first_block : entry.end_block])
            if found != entry.block_keys_sha256:
                if segment is self._order[0]:
                    raise Contradicted(f"segment {plan.segment} covers other tokens than expected")
                self._part_at(segment)
                events.append(
                    SegmentDiffers(
                        segment=plan.segment,
                        token_start=plan.token_start,
                        token_end=plan.token_end,
                    )
                )
                break
            segment.confirmed = True
            events.append(
                SegmentConfirmed(
                    segment=plan.segment, token_start=plan.token_start, token_end=plan.token_end
                )
            )
        return events

    def _part_at(self, segment: Segment) -> None:
        at = self._order.index(segment)
        for dropped in self._order[at:]:
            del self._segments[dropped.plan.segment]
            for track in dropped.tracks:
                del self._tracks[track.name]
        del self._order[at:]
        self._spans = {layer: min(count, at) for layer, count in self._spans.items()}
        self._parting, self._is_following = segment.plan.segment, False
        # What the prefix reaches beyond this block is still wanted, and then known to be missing.
        self._end = max(segment.plan.context_blocks.start, self._prefix or 0)

    def stop(self) -> None:
        """Follow no further: what is listed by now, and the prefix, is all that is wanted."""
        self._is_following = False

    def _attest(self, segment: Segment) -> Iterator[Event]:
        """Compare the digests that are newly listed with those of the Objects that came."""
        touched: set[int] = set()
        for track in segment.tracks:
            groups = segment.entry.object_digests.get(track.name, ())
            for layer in range(track.listed, len(groups)):
                row = track.rows.get(layer)
                if row is not None and row.waiting:
                    touched.add(layer)
                    yield from self._attest_row(track, layer, row, groups[layer])
            track.listed = len(groups)
        for layer in sorted(touched):
            yield from self._ready(segment, layer)

    def _attest_row(self, track: Track, layer: int, row: Row, listed: bytes) -> Iterator[Event]:
        state = track.segment.layer(layer)
        for block, (found, octets) in row.waiting.items():
            expected = listed[DIGEST_OCTETS * block : DIGEST_OCTETS * (block + 1)]
            if found == expected:
                state.unattested -= 1
                self._attested += 1
                continue
            text = _contradiction(found, expected)
            if not self.signed:
                raise Contradicted(f"{track.name} layer {layer} block {block}: {text}")
            # A layer that waits for attestation has not been reported: take the Object back.
            row.have.discard(block)
            self._octets -= octets
            if block in row.placing:
                row.placing.discard(block)
            else:
                state.remaining += 1
                self._objects -= 1
            yield self.reject(track.name, layer, block, BadObject(Rejection.DIGEST, text))
        row.waiting.clear()

    # -- Objects ---------------------------------------------------------------------------------

    def expects(self, track: DataTrack, layer: int, block: int) -> Expected:
        """Say what to do with an Object, by where it came. Counts those that are dropped."""
        if self.manifest is None:
            return Expected.EARLY
        state = self._tracks.get(track)
        if state is not None:
            plan = state.segment.plan
            if layer in plan.layers and block in plan.blocks:
                row = state.rows.get(layer)
                if row is None or block not in row.have:
                    return Expected.EXAMINE
                self._duplicates += 1
                return Expected.DUPLICATE
            if layer >= self.manifest.layers or block >= state.segment.entry.blocks:
                return Expected.EXAMINE  # which finds it to be where nothing was promised
        self._unwanted += 1
        return Expected.UNWANTED

    def count_excess(self) -> None:
        """Count an Object that nobody asked for but that came with those that were."""
        self._unwanted += 1

    def hold(
        self, track: DataTrack, layer: int, block: int, payload: bytes, cover: Cover = BARE
    ) -> bool:
        """Keep an Object that came ahead of the manifest; return whether there was room.

        If there was none, read no further before a manifest is accepted.
        """
        if len(payload) > self._early_room:
            return False
        self._early_room -= len(payload)
        self._early.append(EarlyObject(track, layer, block, payload, cover))
        return True

    def release(self) -> Iterable[EarlyObject]:
        """Return, and forget, what was kept, in the order it came."""
        early, self._early = self._early, []
        self._early_room += sum(len(obj.payload) for obj in early)
        return early

    def admit(self, track: DataTrack, layer: int, block: int, digest: bytes, octets: int) -> bool:
        """Claim the place of an Object that passed its examination.

        Args:
            track: A track that is wanted.
            layer: A layer that is wanted.
            block: A block that is wanted.
            digest: Its Data Digest.
            octets: Length of its Data.

        Returns:
            Whether it is to be placed: False if another copy was faster.

        Raises:
            BadObject: If the manifest lists another digest. It counts as missing.
        """
        if (state := self._tracks.get(track)) is None:
            self._unwanted += 1  # by now: the contexts part there
            return False
        if (row := state.rows.get(layer)) is None:
            row = state.rows[layer] = Row()
        if block in row.have:
            self._duplicates += 1
            return False
        listed = state.segment.entry.digest(track, layer, block)
        if listed is None:
            row.waiting[block] = digest, octets
        elif listed != digest:
            raise BadObject(Rejection.DIGEST, _contradiction(digest, listed))
        else:
            state.segment.layer(layer).unattested -= 1
            self._attested += 1
        row.have.add(block)
        row.placing.add(block)
        self._octets += octets
        return True

    def placed(self, track: DataTrack, layer: int, block: int) -> list[Event]:
        """Note that the tensor of an admitted Object is in place; return what follows."""
        state = self._tracks[track]
        placing = state.rows[layer].placing
        if block not in placing:
            return []  # taken back in the meantime: a manifest lists another digest
        placing.discard(block)
        self._objects += 1
        segment = state.segment
        progress = segment.layer(layer)
        progress.remaining -= 1
        return [] if progress.remaining else list(self._ready(segment, layer))

    def reject(self, track: DataTrack, layer: int, block: int, why: BadObject) -> ObjectRejected:
        """Count an Object that failed a check, and return what to tell of it."""
        self._rejected += 1
        self._unopened += why.reason in UNOPENED
        return ObjectRejected(
            track=track, layer=layer, block=block, reason=why.reason, text=str(why)
        )

    def _ready(self, segment: Segment, layer: int) -> Iterator[Event]:
        state = segment.layer(layer)
        if state.reported or state.remaining or (self.signed and state.unattested):
            return
        state.reported = True
        segment.unready -= 1
        plan = segment.plan
        yield LayerReady(
            segment=plan.segment,
            layer=layer,
            token_start=plan.token_start,
            token_end=plan.token_end,
            trust=Trust.VERIFIED if state.unattested else Trust.ATTESTED,
            codec=plan.codec,
            lossless=self._codecs[plan.codec].lossless,
            confirmed=segment.confirmed,
        )
        if not segment.unready:
            yield SegmentComplete(
                segment=plan.segment,
                layers=len(plan.layers),
                token_start=plan.token_start,
                token_end=plan.token_end,
            )

    # -- how it stands ---------------------------------------------------------------------------

    @property
    def plans(self) -> list[SegmentPlan]:
        """What is wanted of each segment listed so far, in order."""
        return [segment.plan for segment in self._segments.values()]

    @property
    def extent(self) -> range | None:
        """Blocks of the context that a sink has to have room for; None before it is known."""
        first = next(iter(self._segments.values()), None)
        if first is None or self._end is None:
            return None
        return range(first.plan.context_blocks.start, self._end)

    @property
    def unlisted(self) -> range:
        """Wanted blocks of the context that no segment has been listed for yet; may be empty.

        Segments that the wish leaves out are not counted.
        """
        end, wished = self._end or 0, self._wish.segments
        listed = self.manifest.segments if self.manifest is not None else ()
        if wished is not None and listed and max(wished) < len(listed):
            return range(end, end)
        usable = [entry.end_block for entry in listed if self._is_usable(entry)]
        start = max(usable, default=self._wish.blocks.start if self._wish.blocks else 0)
        return range(min(start, end), end)

    @property
    def is_complete(self) -> bool:
        """Whether everything wanted is ready. Counted, not announced (decision 9)."""
        return not self.is_following and self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether everything that is wanted of what is known is ready; more may be appended."""
        return (
            self.extent is not None
            and not self.unlisted
            and all(segment.unready == 0 for segment in self._segments.values())
        )

    @property
    def is_following(self) -> bool:
        """Whether segments that are not listed yet are wanted, however many may come."""
        if not self._is_following:
            return False
        wish, listed = self._wish, self.manifest.segments if self.manifest is not None else ()
        if wish.segments is not None and max(wish.segments) < len(listed):
            return False
        return wish.blocks is None or not listed or listed[-1].end_block < wish.blocks.stop

    def span(self, layer: int) -> LayerSpan | None:
        """Say how far a layer is ready without a gap; None before anything is known to be wanted.

        Cheap to ask again and again: it goes on from where it came to the last time.
        """
        extent, order = self.extent, self._order
        if extent is None:
            return None
        count = self._spans.get(layer, 0)
        while count < len(order):
            state = order[count].layers.get(layer)
            if state is None or not state.reported:
                break
            count += 1
        self._spans[layer] = count
        size = order[0].plan.block_tokens
        return LayerSpan(
            layer=layer,
            token_start=extent.start * size,
            token_end=order[count - 1].plan.token_end if count else extent.start * size,
            whole=count == len(order) and not self.unlisted,
        )

    @property
    def used_codecs(self) -> dict[str, bool]:
        """The codecs of what is wanted, by name, and whether each is lossless."""
        return {plan.codec: self._codecs[plan.codec].lossless for plan in self.plans}

    @property
    def octets(self) -> int:
        """Octets of Data of the Objects that were admitted."""
        return self._octets

    def is_published(self, segment: int) -> bool:
        """Whether all of a planned segment has been published, as the newest manifest says."""
        return self._segments[segment].entry.complete

    def is_segment_ready(self, segment: int) -> bool:
        """Whether every wanted layer of a planned segment is ready."""
        return self._segments[segment].unready == 0

    def told_ready(self) -> Iterator[tuple[int, tuple[range, ...]]]:
        """Yield each segment of which layers were reported, and those in ascending runs."""
        for number, segment in self._segments.items():
            told = tuple(runs(n for n, layer in segment.layers.items() if layer.reported))
            if told:
                yield number, told

    @property
    def estate(self) -> Estate | None:
        """What there is, for another publication to go on with; None: no manifest was accepted."""
        if self.manifest is None:
            return None
        return Estate(
            name=self.publication,
            manifest=self.manifest,
            signed=self.signed,
            segments={
                number: Held(
                    plan=segment.plan,
                    entry=segment.entry,
                    begun=any(row.have for track in segment.tracks for row in track.rows.values()),
                    complete=segment.unready == 0,
                    unlisted=tuple(
                        (track.name, layer, block, digest)
                        for track in segment.tracks
                        for layer, row in track.rows.items()
                        for block, (digest, _) in row.waiting.items()
                    ),
                )
                for number, segment in self._segments.items()
            },
        )

    @property
    def is_worth_joining(self) -> bool:
        """Whether there is something that another publication might be mixed with."""
        return bool(self._objects) and self.manifest is not None and self.manifest.deterministic

    @property
    def bond(self) -> Bond:
        """Who else may bring what is missing."""
        return bond_of(self.estate, told=self.any_ready, unlisted=bool(self.unlisted))

    def plan(self, track: DataTrack) -> SegmentPlan | None:
        """Return the plan that a track is part of; None if it is not wanted, or not yet."""
        state = self._tracks.get(track)
        return None if state is None else state.segment.plan

    @property
    def any_ready(self) -> bool:
        """Whether a layer has been reported, so that another publication cannot take over."""
        return any(
            segment.unready < len(segment.plan.layers) for segment in self._segments.values()
        )

    def entry(self, track: DataTrack) -> tuple[SegmentEntry, Descriptor]:
        """Return what :func:`~kvcs.consumer.trust.examine` needs to know of a wanted track."""
        assert self.manifest is not None
        return self._tracks[track].segment.entry, self.manifest.compat

    def position(self, track: DataTrack, block: int) -> int:
        """Return where a sink has the block: its number, counted from the first wanted one."""
        first = next(iter(self._segments.values()))
        start = first.plan.context_blocks.start
        return self._tracks[track].segment.plan.first_block + block - start

    def gaps(self, track: DataTrack | None = None) -> Iterator[Gap]:
        """Yield exactly what was promised, is wanted, and has not been admitted, compactly.

        One :class:`Gap` for consecutive layers with the same blocks missing.

        Args:
            track: Look at this one alone; None: at all.
        """
        one = self._tracks.get(track) if track is not None else None
        for state in list(self._tracks.values()) if track is None else [one]:
            if state is not None:
                yield from rectangles(state.name, missing(state))

    def unattested(self) -> Iterator[Gap]:
        """Yield what is there but keeps a layer from being ready, for want of attestation."""
        for segment in self._order if self.signed else ():
            if not segment.unready:
                continue
            for track in segment.tracks:
                rows = sorted(track.rows.items())
                yield from rectangles(
                    track.name,
                    ((range(layer, layer + 1), tuple(runs(row.waiting))) for layer, row in rows),
                )

    def summary(
        self, first_layer_s: float | None = None, last_layer_s: float | None = None
    ) -> Summary:
        """Return the figures so far; the times are the caller's to measure."""
        return Summary(
            objects=self._objects,
            octets=self._octets,
            attested=self._attested,
            duplicates=self._duplicates,
            unwanted=self._unwanted,
            rejected=self._rejected,
            unopened=self._unopened,
            first_layer_s=first_layer_s,
            last_layer_s=last_layer_s,
        )


def _contradiction(found: bytes, listed: bytes) -> str:
    return f"the data has the digest {found.hex()}, the manifest lists {listed.hex()}"


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
