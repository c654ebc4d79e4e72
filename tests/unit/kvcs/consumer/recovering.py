"""A world of relays, publications and block services, and a retrieval in it: no network, no time.

What a retrieval does about its connections, this does by drawing lots; everything else is the code
that decides. Objects are real octets, so what is mixed, or told without being there, can be seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from kvcs.consumer.assembler import Assembler, Contradicted, Expected
from kvcs.consumer.events import Event, FailureReason, LayerReady, TokenRange
from kvcs.consumer.failures import Failure
from kvcs.consumer.joining import CannotJoin
from kvcs.consumer.recomputing import lacks, ranges
from kvcs.consumer.recovery import (
    Ask,
    AskBlocks,
    AskRelay,
    Pause,
    Recompute,
    Recovery,
    Standing,
    is_final,
    may_look_for_another,
)
from kvcs.consumer.sections import Found, Section, check_section, wanted_sections
from kvcs.consumer.selection import Wish
from kvcs.consumer.settings import RetrievalSettings
from kvcs.errors import BadObject, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component
from kvcs.profile.manifest import Manifest, SegmentEntry
from kvcs.profile.naming import DataTrack, PublicationName

LAYERS, SEGMENTS, SEGMENT_BLOCKS = 2, 2, 2
BLOCKS = SEGMENTS * SEGMENT_BLOCKS
OBJECTS = 2 * LAYERS * BLOCKS
BLOCK_TOKENS = 1
#: K and V of a block are 32 octets each: a hash of where they are of.
COMPAT = Descriptor(
    model="m", revision="r", layers=LAYERS, block_tokens=BLOCK_TOKENS, dtype="uint8",
    k_shape=(1, 32), v_shape=(1, 32),
)  # fmt: skip
KEYS = tuple(bytes([block]) * 32 for block in range(BLOCKS))

#: Component, layer, block of the context.
Place = tuple[Component, int, int]
EVERYTHING: frozenset[Place] = frozenset(
    (component, layer, block)
    for component in (Component.K, Component.V)
    for layer in range(LAYERS)
    for block in range(BLOCKS)
)


def content(run: str, place: Place) -> bytes:
    """Return the Data that one run of a model, or all that are deterministic, has in a place."""
    return sha256(f"{run} {place}".encode()).digest()


@dataclass(frozen=True)
class Publication:
    """What somebody published."""

    number: int
    deterministic: bool
    blocks: int
    """Of the prefix that it is of."""

    listed: int
    """Layers of each segment of which the manifest has digests."""

    segments: int
    """Segments that the manifest lists."""

    @property
    def run(self) -> str:
        return "every" if self.deterministic else f"run {self.number}"

    @property
    def name(self) -> PublicationName:
        return PublicationName(
            bytes(32), bytes(32), KEYS[self.blocks - 1], bytes([self.number]) * 16
        )

    def manifest(self, version: int, *, lies: bool = False) -> Manifest:
        run = "a lie" if lies else self.run
        entries = tuple(self._entry(segment, run) for segment in range(self.segments))
        return Manifest(
            compat=COMPAT, deterministic=self.deterministic, segments=entries, version=version
        )

    def _entry(self, segment: int, run: str) -> SegmentEntry:
        first = segment * SEGMENT_BLOCKS
        tracks = tuple(DataTrack(c, "raw", segment) for c in (Component.K, Component.V))
        blocks = range(first, first + SEGMENT_BLOCKS)
        digests = {
            track: tuple(
                b"".join(
                    sha256(content(run, (track.component, layer, block))).digest()
                    for block in blocks
                )
                for layer in range(self.listed)
            )
            for track in tracks
        }
        return SegmentEntry(
            segment=segment,
            first_block=first,
            blocks=SEGMENT_BLOCKS,
            block_keys_sha256=sha256(b"".join(KEYS[b] for b in blocks)).digest(),
            tracks=tracks,
            object_digests=digests if self.listed else {},
        )


@dataclass
class Relay:
    """Who has publications, or parts of them."""

    has: dict[Publication, frozenset[Place]]


@dataclass(frozen=True)
class Service:
    """Who has blocks."""

    run: str
    deterministic: bool
    has: frozenset[Place]
    bad: frozenset[Place]


class Luck(NamedTuple):
    """What happens at one attempt."""

    seconds: float
    reached: bool = True
    objects: int = OBJECTS
    """How many come until it ends."""

    bad: frozenset[Place] = frozenset()
    """Places whose Objects come damaged."""

    lies: bool = False
    """Whether a manifest comes that lists other digests."""

    end: FailureReason = FailureReason.INCOMPLETE
    """How it ends if not everything came."""

    lost: bool = False


@dataclass
class Evenly:
    """Pauses as long as each other."""

    seconds: float = 1.0

    def reset(self) -> None: ...

    def next_s(self) -> float:
        return self.seconds


@dataclass
class World:
    """A retrieval, and what there is to retrieve."""

    relays: list[Relay]
    services: list[Service]
    settings: RetrievalSettings
    now: float = 0.0
    current: Assembler | None = None
    publication: Publication | None = None
    end: Failure | None = None
    complete: bool = False
    sink: dict[Place, bytes] = field(default_factory=dict)
    told: list[tuple[int, int]] = field(default_factory=list)
    began_at: float | None = None
    bound_s: float = math.inf
    joined: int = 0
    """How often another publication has gone on."""

    def __post_init__(self) -> None:
        self.recovery = Recovery(
            self.settings,
            relays=len(self.relays),
            services=len(self.services),
            pauses=Evenly(),
            now=self.now,
        )

    @property
    def over(self) -> bool:
        return self.complete or self.end is not None

    # -- one step --------------------------------------------------------------------------------

    def step(self, luck: Luck) -> AskRelay | AskBlocks | Pause | Recompute:
        """Do what is to be done next, or be cut off while it is done."""
        match step := self.recovery.next_step():
            case Recompute(failure):
                self.end = failure
                return step
            case Pause(seconds):
                self._wait(seconds)
                return step
            case AskRelay(number, which):
                found = self._ask_relay(self.relays[number], which, luck)
            case AskBlocks(number):
                found = self._ask_blocks(self.services[number], luck)
        self._wait(luck.seconds)
        if self.end is not None:
            return step
        if found is None:
            self.complete = True
            return step
        if self.began_at is None:
            self.began_at = self.now
            if (rate := self.settings.recompute_tokens_per_s) is not None:
                self.bound_s = sum(r.tokens for r in self.to_recompute()) / rate
        self.recovery.tried(step, found, self.standing, self.now)
        self._wait(0.0)
        return step

    def _wait(self, seconds: float) -> None:
        """Let time pass, up to the end."""
        self.now = min(self.now + seconds, self.recovery.until)
        if self.now >= self.recovery.until:
            self.end = self.recovery.expired

    @property
    def standing(self) -> Standing:
        current = self.current
        tokens = sum(r.tokens for r in self.to_recompute())
        if current is None:
            return Standing(tokens=tokens)
        return Standing(
            objects=current.summary().objects,
            tokens=tokens,
            bond=current.bond,
            told=current.any_ready,
            blocks_may_help=current.manifest is not None,
        )

    def to_recompute(self) -> tuple[TokenRange, ...]:
        return ranges(lacks(self.current, Wish(), BLOCKS), BLOCK_TOKENS)

    # -- relays ----------------------------------------------------------------------------------

    def _ask_relay(self, relay: Relay, which: Ask, luck: Luck) -> Failure | None:
        if not luck.reached:
            return Failure(FailureReason.UNREACHABLE, "nobody there", again=True)
        failure = None
        if which is Ask.SAME and self.publication is not None:
            failure = self._run(relay, self.publication, luck)
            if failure is None or luck.lost:
                return failure
            if not may_look_for_another(failure, self.standing, which):
                return failure
        for publication in relay.has:
            if self.publication is not None and publication == self.publication:
                continue
            if not self._take_up(publication):
                continue
            failure = self._run(relay, publication, luck)
            if failure is None or not may_look_for_another(failure, self.standing, which):
                return failure
        return failure or Failure(FailureReason.NOT_FOUND, "nothing there")

    def _take_up(self, publication: Publication) -> bool:
        """Make a publication the current one, joined or alone; return whether it may be."""
        before = self.current
        if before is not None and (before.any_ready or before.is_worth_joining):
            joining = self._assembler(publication, follows=before)
            try:
                self._tell(joining.accept(publication.manifest(0), 0))
            except CannotJoin:
                if before.any_ready:
                    return False
            else:
                self.current, self.publication = joining, publication
                self.joined += 1
                return True
        self._drop()
        self.current, self.publication = self._assembler(publication), publication
        return True

    def _assembler(self, publication: Publication, follows: Assembler | None = None) -> Assembler:
        return Assembler(
            publication.name,
            wish=Wish(),
            codecs=CodecRegistry(),
            signed=False,
            blocks=publication.blocks,
            known_blocks=BLOCKS,
            follows=follows,
        )

    def _drop(self) -> None:
        self.current = self.publication = None
        self.sink.clear()
        assert not self.told, "what was told is taken away"

    def _run(self, relay: Relay, publication: Publication, luck: Luck) -> Failure | None:
        assert self.current is not None
        if publication not in relay.has:
            return Failure(FailureReason.REFUSED, "no such track", again=True)
        try:
            version = self.current.version
            if luck.lies:
                self._tell(self.current.accept(publication.manifest(0), 0))
                lie = publication.manifest(version + 2, lies=True)
                self._tell(self.current.accept(lie, version + 2))
            else:
                self._tell(self.current.accept(publication.manifest(max(version, 0)), 0))
        except Contradicted as exc:
            failure = Failure(FailureReason.CONTRADICTED, str(exc))
            if not is_final(failure, self.standing):
                self._drop()
            return failure
        coming = sorted(self._missing(), key=lambda one: one[0][1])  # the lowest layers first
        for place, track, block in coming[: luck.objects]:
            if place not in relay.has[publication]:
                continue
            if place in luck.bad:
                self.current.reject(track, place[1], block, BadObject(Rejection.DIGEST, "damaged"))
            else:
                self._bring(track, block, place, content(publication.run, place))
        if self.current.is_complete:
            return None
        return Failure(luck.end, "it ended", again=luck.lost, lost=luck.lost)

    def _missing(self) -> Iterator[tuple[Place, DataTrack, int]]:
        assert self.current is not None
        for plan in self.current.plans:
            if self.current.is_segment_ready(plan.segment):
                continue
            for track in plan.tracks:
                for gap in self.current.gaps(track):
                    for layer in range(gap.first_layer, gap.last_layer + 1):
                        for block in range(gap.first_block, gap.last_block + 1):
                            place = track.component, layer, plan.first_block + block
                            yield place, track, block

    # -- block services --------------------------------------------------------------------------

    def _ask_blocks(self, service: Service, luck: Luck) -> Failure | None:
        current = self.current
        assert current is not None
        if not luck.reached:
            return Failure(FailureReason.UNREACHABLE, "it stalls", again=True)
        wanted = wanted_sections(current, KEYS, deterministic=service.deterministic)
        for key, places in list(wanted.items())[: luck.objects]:
            at = key.layer, KEYS.index(key.block_key)
            if not {(c, *at) for c in (Component.K, Component.V)} <= service.has:
                continue
            k, v = (self._section(service, (c, *at)) for c in (Component.K, Component.V))
            for one in check_section(Section(key=key, k=k, v=v), places, current):
                if isinstance(one, Found):
                    track, layer, block = one.place
                    self._bring(track, block, (track.component, layer, at[1]), bytes(one.data))
                else:
                    current.reject(*one[0], one[1])
        if current.is_complete:
            return None
        return Failure(FailureReason.NOT_FOUND, "not all of it")

    def _section(self, service: Service, place: Place) -> bytes:
        return content("damaged" if place in service.bad else service.run, place)

    # -- Objects ---------------------------------------------------------------------------------

    def _bring(self, track: DataTrack, block: int, place: Place, data: bytes) -> None:
        current, layer = self.current, place[1]
        assert current is not None
        assert current.expects(track, layer, block) is Expected.EXAMINE
        try:
            admitted = current.admit(track, layer, block, sha256(data).digest(), len(data))
        except BadObject as exc:
            current.reject(track, layer, block, exc)
            return
        if admitted:
            assert place not in self.sink, f"{place} is placed twice"
            self.sink[place] = data
            self._tell(current.placed(track, layer, block))

    def _tell(self, events: list[Event]) -> None:
        self.told += [(e.segment, e.layer) for e in events if isinstance(e, LayerReady)]

    # -- what must hold --------------------------------------------------------------------------

    def check(self, runs: list[str]) -> None:
        """See whether anything is mixed, told too early, or said to be missing wrongly."""
        for segment in range(SEGMENTS):
            blocks = range(segment * SEGMENT_BLOCKS, (segment + 1) * SEGMENT_BLOCKS)
            held = {place: data for place, data in self.sink.items() if place[2] in blocks}
            assert any(
                all(data == content(run, place) for place, data in held.items()) for run in runs
            ), f"segment {segment} is mixed"
            for layer in range(LAYERS):
                if (segment, layer) in self.told:
                    assert {p for p in EVERYTHING if p[1] == layer and p[2] in blocks} <= set(held)
        assert len(self.told) == len(set(self.told)), "a layer is told twice"
        first_missing = {
            block: min(place[1] for place in EVERYTHING - set(self.sink) if place[2] == block)
            for block in range(BLOCKS)
            if any(place[2] == block for place in EVERYTHING - set(self.sink))
        }
        said = {
            token: r.first_layer
            for r in self.to_recompute()
            for token in range(r.token_start, r.token_end)
        }
        assert said == first_missing
