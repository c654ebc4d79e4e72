"""Chunked prefill and appended blocks: whoever joins has every block once, in its place."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

import pytest

from kvcs.consumer import versions
from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ManifestAccepted,
    PublicationComplete,
    PublicationFound,
    SegmentComplete,
    SegmentConfirmed,
    SegmentDiffers,
    Trust,
)
from kvcs.consumer.opening import Job, earlier_manifests
from kvcs.consumer.retrieval import Retrieval
from kvcs.consumer.selection import Wish
from kvcs.errors import ConfigError, Expired
from kvcs.kvsp.layout import Layout
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import PublicationName
from kvcs.profile.signing import ProducerKey
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink, SafetensorsSink
from moqt.aio import MoqtConnection
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.growing import (
    CHUNKS,
    GROWING,
    LAYERS,
    PATIENT,
    PREFIX,
    PROMPT,
    assert_positions,
    decode,
    expectations,
    kv,
    places,
    prefill,
    produce,
    token,
)
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    PATIENCE_S,
    CountingSink,
    Scene,
    of_kind,
    on_stage,
    run,
)
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = [pytest.mark.network, pytest.mark.timeout(120)]

FOLLOW = Wish(follow=True)
APPENDED = 200
BLOCKS = PREFIX + APPENDED


def follower(scene: Scene, sink: ArraySink | None = None, **options: object) -> Retrieval:
    options = {"expected": expectations(), "wish": FOLLOW, "settings": PATIENT} | options
    return scene.retrieve(sink, **options)  # type: ignore[arg-type]


def check_whole(events: list[Event], sink: CountingSink, blocks: int) -> None:
    """Everything came, once, to its place, and was told once."""
    [complete] = of_kind(events, PublicationComplete)
    assert complete.token_end == blocks * BLOCK_TOKENS
    assert sink.placed == places(blocks)
    assert sink.calls == ["begin", "done"]
    assert complete.summary.objects == len(places(blocks))
    assert (complete.summary.duplicates, complete.summary.unwanted) == (0, 0)
    assert_positions(sink, blocks)
    told = of_kind(events, LayerReady)
    segments = [event.segment for event in of_kind(events, SegmentComplete)]
    assert sorted(segments) == list(range(len(segments)))
    assert sorted((event.segment, event.layer) for event in told) == [
        (segment, layer) for segment in range(len(segments)) for layer in range(LAYERS)
    ]
    spans = {(event.segment, event.token_start, event.token_end) for event in told}
    ends = [0, *(end for _, _, end in sorted(spans))]
    assert [start for _, start, _ in sorted(spans)] == ends[:-1]


async def joining(retrieval: Retrieval, until: type[Event], reached: asyncio.Event) -> list[Event]:
    """Run a retrieval; tell when it has come as far as some event."""
    events: list[Event] = []
    async with asyncio.timeout(105), retrieval:
        async for event in retrieval:
            events.append(event)
            if isinstance(event, until):
                reached.set()
    return events


async def join_at(
    scene: Scene,
    group: asyncio.TaskGroup,
    moments: list[int],
    chance: random.Random,
    at_once: Sequence[int] = (1,),
) -> list[tuple[CountingSink, asyncio.Task[list[Event]]]]:
    """Produce; at each of these moments somebody joins, and gets as far as chance will have it."""
    handle = scene.producer.open(GROWING, PROMPT)
    production = produce(handle, APPENDED, chance, at_once)
    joined: list[tuple[CountingSink, asyncio.Task[list[Event]]]] = []
    for moment in range(max(moments) + 1):
        for _ in range(moments.count(moment)):
            stages = [PublicationFound, ManifestAccepted, LayerReady, SegmentComplete]
            until = chance.choice(stages[: 2 if moment == 0 else 3 if moment < LAYERS else 4])
            sink, reached = CountingSink(), asyncio.Event()
            retrieval = follower(scene, sink)
            joined.append((sink, group.create_task(joining(retrieval, until, reached))))
            await asyncio.wait_for(reached.wait(), 2 * PATIENCE_S)
        await anext(production)
    while not handle.publication.ended:
        await anext(production)
    return joined


def moments_of(chance: random.Random) -> list[int]:
    """One before, one in each segment of the prefill, some while appending, one after the end."""
    layers = LAYERS * len(CHUNKS)
    in_segments = [
        chance.randrange(LAYERS * number, LAYERS * (number + 1)) for number in range(len(CHUNKS))
    ]
    appending = [chance.randrange(layers, layers + APPENDED // 4) for _ in range(2)]
    return [0, *in_segments, *appending, layers + APPENDED + 2]


@pytest.mark.slow
async def test_whoever_joins_at_any_moment_has_every_block_once_and_in_its_place(
    certificates: CertificateFiles,
) -> None:
    chance = random.Random(1)
    async with (
        on_stage(certificates, patience_s=110) as scene,
        asyncio.TaskGroup() as group,
    ):
        # With a few blocks at once here and there; the test with a relay has each by itself.
        joined = await join_at(scene, group, moments_of(chance), chance, (1, 2, 4, 4))

    assert len(joined) == 8
    for sink, task in joined:
        check_whole(task.result(), sink, BLOCKS)


@pytest.mark.slow
async def test_so_it_is_through_a_relay(certificates: CertificateFiles) -> None:
    chance = random.Random(2)
    moments = [LAYERS + 1, LAYERS * len(CHUNKS) + 40, LAYERS * len(CHUNKS) + APPENDED + 2]
    async with (
        relaying(certificates) as stage,
        producing_behind(stage, certificates, patience_s=110) as scene,
        asyncio.TaskGroup() as group,
    ):
        joined = await join_at(scene, group, moments, chance)

    for sink, task in joined:
        check_whole(task.result(), sink, BLOCKS)


@pytest.mark.parametrize("repeated", [0, 1000, 1 << 20], ids=["none", "few", "all"])
async def test_with_signed_manifests_all_that_is_appended_is_attested(
    certificates: CertificateFiles, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking: list[Job] = []  # who asked for earlier versions of the manifest

    def noted(
        conn: MoqtConnection, name: PublicationName, track: bytes, wanted: range, job: Job
    ) -> AsyncGenerator[Manifest, None]:
        asking.append(job)
        return earlier_manifests(conn, name, track, wanted, job)

    monkeypatch.setattr(versions, "earlier_manifests", noted)
    key = ProducerKey.generate()
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)
    sinks = [CountingSink() for _ in range(5)]
    tasks, fetched = list[asyncio.Task[list[Event]]](), list[bool]()
    may_leave_out = repeated < 1 << 20
    async with (
        on_stage(certificates, producer_key=key, repeated_octets=repeated) as scene,
        asyncio.TaskGroup() as group,
    ):
        handle = scene.producer.open(GROWING, PROMPT)
        production = produce(handle, 40, random.Random(3))
        for sink, until in zip(sinks, (12, 8, 11, 13, 1000), strict=True):
            # All but the first and the last come while the newest manifest leaves digests out.
            publication = handle.publication
            while tasks and may_leave_out and not (publication._since_whole or publication.ended):
                await anext(production)
            reached = asyncio.Event()
            retrieval = follower(scene, sink, expected=expected)
            tasks.append(group.create_task(joining(retrieval, ManifestAccepted, reached)))
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
            while until and not handle.publication.ended:
                await anext(production)
                until -= 1
            if not handle.publication.ended:
                # Also of those that come while versions of the manifest leave out what is listed
                # in earlier ones, everything is attested at once, and not by the last version.
                segment = handle.publication.segments[-1].number
                done = retrieval.layer(LAYERS - 1, segment, timeout_s=PATIENCE_S)
                assert (await done).trust is Trust.ATTESTED
                await retrieval.whole_layer(LAYERS - 1, timeout_s=PATIENCE_S)
                current = retrieval._current
                fetched.append(any(current and job is current.job for job in asking))

    # Who was there from the start has been told.
    assert fetched == [False, *[may_leave_out] * (len(fetched) - 1)]
    assert len(fetched) > 2
    for sink, task in zip(sinks, tasks, strict=True):
        events = task.result()
        check_whole(events, sink, PREFIX + 40)
        assert {event.trust for event in of_kind(events, LayerReady)} == {Trust.ATTESTED}


async def test_a_layer_can_be_awaited_over_all_segments_of_a_chunked_prefill(
    certificates: CertificateFiles,
) -> None:
    sink = ArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async with follower(scene, sink, wish=Wish()) as retrieval:
            steps = 0
            first = asyncio.create_task(retrieval.whole_layer(0, timeout_s=PATIENCE_S))
            async for _ in prefill(handle):
                steps += 1
                if steps < 7:
                    assert not first.done()
                if steps == 10:  # by then it is there in all segments, the last one in none
                    span = await first
                    assert (span.token_start, span.token_end) == (0, PREFIX * BLOCK_TOKENS)
                    assert span.whole
                    half = await retrieval.whole_layer(1, token_end=CHUNKS[0] * BLOCK_TOKENS)
                    assert half.token_end >= CHUNKS[0] * BLOCK_TOKENS
                    with pytest.raises(Expired, match="layer 2 was not ready in all segments"):
                        await retrieval.whole_layer(2, timeout_s=0.01)
            await handle.finish()
            await retrieval.result()
            assert (await retrieval.whole_layer(LAYERS - 1)).whole

    assert_positions(sink, PREFIX)


async def test_a_follower_that_tells_its_tokens_has_what_is_appended_confirmed(
    certificates: CertificateFiles,
) -> None:
    sink, events = ArraySink(), list[Event]()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async with follower(scene, sink, on_event=events.append) as retrieval:
            async for _ in prefill(handle):
                pass
            appending = decode(handle, 6, random.Random(4))
            known = len(PROMPT)
            async for _ in appending:
                end = len(handle.tokens)
                span = await retrieval.whole_layer(0, token_end=end, timeout_s=PATIENCE_S)
                assert span.token_end == end
                # Token by token, as whoever decodes along comes to know them.
                for position in range(known, end):
                    retrieval.extend([token(position)])
                known = end
            await handle.finish()
            await retrieval.result()

    appended = len(handle.publication.segments) - len(CHUNKS)
    confirmed = of_kind(events, SegmentConfirmed)
    assert [event.segment for event in confirmed] == list(
        range(len(CHUNKS), len(CHUNKS) + appended)
    )
    assert confirmed[-1].token_end == (PREFIX + 6) * BLOCK_TOKENS
    for event in of_kind(events, LayerReady):
        assert event.confirmed or event.segment >= len(CHUNKS)
    assert_positions(sink, PREFIX + 6)


async def test_tokens_that_were_told_ahead_confirm_what_comes(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        retrieval = follower(scene)
        retrieval.extend([token(position) for position in range(len(PROMPT), 80)])
        async for _ in prefill(handle):
            pass
        async for _ in decode(handle, 3, random.Random(5)):
            pass
        await handle.finish()
        events = await run(retrieval)

    assert {event.confirmed for event in of_kind(events, LayerReady)} == {True}
    assert isinstance(events[-1], PublicationComplete)


async def test_where_the_contexts_part_the_retrieval_is_complete_with_what_is_before(
    certificates: CertificateFiles,
) -> None:
    sink = ArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async with follower(scene, sink) as retrieval:
            async for _ in prefill(handle):
                pass
            async for _ in decode(handle, 4, random.Random(6)):
                end = len(handle.tokens)
                await retrieval.whole_layer(LAYERS - 1, token_end=end, timeout_s=PATIENCE_S)
            same = [token(position) for position in range(len(PROMPT), (PREFIX + 2) * BLOCK_TOKENS)]
            retrieval.extend([*same, 7, 7, 7, 7])
            complete = await retrieval.result()
            events = [event async for event in retrieval]
        assert not handle.publication.ended

    [differs] = of_kind(events, SegmentDiffers)
    assert complete.token_end == differs.token_start <= (PREFIX + 2) * BLOCK_TOKENS
    for layer in range(LAYERS):
        k, _ = kv(layer, 0, complete.token_end // BLOCK_TOKENS)
        assert sink.k[layer][: complete.token_end].tobytes() == k.tobytes()


async def test_who_stops_has_what_was_listed_by_then(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async for _ in prefill(handle):
            pass
        async with follower(scene, sink) as retrieval:
            async for _ in decode(handle, 3, random.Random(7)):
                await retrieval.whole_layer(0, token_end=len(handle.tokens), timeout_s=PATIENCE_S)
            retrieval.stop()
            complete = await retrieval.result()
            async for _ in decode(handle, 2, random.Random(7)):
                pass

    assert complete.token_end == (PREFIX + 3) * BLOCK_TOKENS
    assert sink.placed == places(PREFIX + 3)
    assert_positions(sink, PREFIX + 3)


async def test_a_silence_between_blocks_is_no_stall_while_nothing_is_owed(
    certificates: CertificateFiles,
) -> None:
    settings = replace(PATIENT, stall_timeout_s=0.5, deadline_s=3.0)
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async for _ in prefill(handle):
            pass
        events = await run(follower(scene, settings=settings))

    last = events[-1]
    assert isinstance(last, Failed)
    assert last.reason is FailureReason.EXPIRED
    assert not last.missing
    assert last.unlisted is None


async def test_a_part_of_several_segments_is_retrieved_as_one_piece(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    wish = Wish(blocks=range(2, PREFIX - 1), layers=range(1, LAYERS))
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async for _ in prefill(handle):
            pass
        await handle.finish()
        events = await run(follower(scene, sink, wish=wish))

    [complete] = of_kind(events, PublicationComplete)
    blocks = len(wish.blocks or ())
    assert sink.placed == {place: 1 for place in places(blocks) if place[1] >= 1}
    assert complete.summary.objects == 2 * (LAYERS - 1) * blocks
    for layer in range(1, LAYERS):
        assert sink.k[layer].tobytes() == kv(layer, 2, blocks)[0].tobytes()


async def test_following_goes_on_over_another_connection_when_its_own_is_lost(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async with follower(scene, sink, more=[scene.spec]) as retrieval:
            async for _ in prefill(handle):
                pass
            appended = 0
            async for _ in decode(handle, 12, random.Random(8)):
                appended += 1
                if appended in (3, 6):
                    await retrieval.whole_layer(
                        LAYERS - 1, token_end=len(handle.tokens), timeout_s=PATIENCE_S
                    )
                    [conn] = [c for c in retrieval._sessions.open if c.closed is None]
                    conn._transport.abandon()
            await handle.finish()
            async with asyncio.timeout(PATIENCE_S):
                events = [event async for event in retrieval]

    check_whole(events, sink, PREFIX + 12)


# -- sinks ---------------------------------------------------------------------------------------


async def test_a_sink_that_cannot_grow_is_refused_before_anything_is_asked(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        with pytest.raises(ConfigError, match="SafetensorsSink cannot grow"):
            scene.retrieve(SafetensorsSink("never.safetensors"), wish=FOLLOW)


async def test_a_sink_without_room_ends_the_retrieval_and_keeps_what_it_has(
    certificates: CertificateFiles,
) -> None:
    sink = ArraySink(limit_octets=(PREFIX + 1) * Layout.of(GROWING).container_octets)
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        async with follower(scene, sink) as retrieval:
            async for _ in prefill(handle):
                pass
            async for _ in decode(handle, 2, random.Random(9)):
                pass
            with pytest.raises(ConfigError, match="limit"):
                await retrieval.result()

    assert retrieval.failed is not None
    assert retrieval.failed.reason is FailureReason.UNUSABLE


async def steps(production: AsyncIterator[None], count: int) -> None:
    for _ in range(count):
        await anext(production)


async def test_processes_follow_into_memory_that_was_reserved(
    certificates: CertificateFiles,
) -> None:
    sink = SharedArraySink(reserve_blocks=PREFIX + 8)
    settings = replace(PATIENT, processes=True, connections=2, connect_timeout_s=20)
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(GROWING, PROMPT)
        production = produce(handle, 8, random.Random(10))
        async with follower(scene, sink, settings=settings) as retrieval:
            await steps(production, 4)
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            while not handle.publication.ended:
                await anext(production)
            complete = await retrieval.result()

    assert complete.summary.objects == len(places(PREFIX + 8))
    assert_positions(sink, PREFIX + 8)
