"""Whatever is lost at whatever moment, a consumer ends in time, and what it says is right."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    ManifestAccepted,
    ObjectRejected,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
)
from kvcs.consumer.retrieval import BadPublications, Retrieval, consume
from kvcs.consumer.selection import Wish
from kvcs.errors import Incomplete, NotFound, Rejection
from kvcs.producer.publication import Publication
from kvcs.store.shared import SharedArraySink
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode, StreamErrorCode
from moqt.session.localtrack import LocalTrack
from tests.integration.kvcs.faults import (
    DATA,
    Blocks,
    Copy,
    Moment,
    copied,
    exactly,
    other_run,
    standing,
)
from tests.integration.kvcs.scene import (
    BLOCK_TOKENS,
    BLOCKS,
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    CountingSink,
    assert_same_cache,
    corrupt,
    expectations,
    fill,
    filled,
    flip,
    hasty,
    missing_places,
    of_kind,
    on_stage,
    ready,
)
from tests.integration.kvcs.test_loss import SLACK_S, dying_producer
from tests.integration.relay.test_comeback import places, producing_at

pytestmark = pytest.mark.network

TOKENS = BLOCKS * BLOCK_TOKENS
#: Computing everything takes a second.
ESTIMATE = float(TOKENS)
QUICK = hasty(silence_s=0.3, again_s=0.1, again_max_s=0.3, another_s=0.1)
#: A few rounds in the ordinary suite, each at another moment, and twenty in all.
ROUNDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 2 else []) for seed in range(20)]
moments = pytest.mark.parametrize("seed", ROUNDS)


async def rest_of(retrieval: Retrieval) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in retrieval]


def assert_whole(events: list[Event], sink: CountingSink) -> PublicationComplete:
    complete = events[-1]
    assert isinstance(complete, PublicationComplete), complete
    assert sorted(ready(events)) == list(range(LAYERS))
    assert sink.placed == EVERYTHING
    assert complete.recompute == ()
    assert complete.summary.objects == EVERYTHING.total()
    assert_same_cache(sink)
    return complete


def assert_exact(events: list[Event], sink: CountingSink) -> Failed:
    """What is there, what is missing and what is to be computed are together the cache."""
    failed = events[-1]
    assert isinstance(failed, Failed), failed
    told = [n for r in failed.ready for n in range(r.first_layer, r.last_layer + 1)]
    assert told == sorted(ready(events))
    assert_same_cache(sink, told)
    assert list(failed.recompute) == exactly(sink.placed)
    if failed.publication is not None and "begin" in sink.calls:
        assert missing_places(failed) + sink.placed == EVERYTHING
    return failed


# -- a relay, a producer -------------------------------------------------------------------------


@moments
async def test_a_relay_that_is_killed_costs_nothing_where_there_is_another_one(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink = Moment.at_random(seed), CountingSink()

    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        steps = await moment.produce(handle)
        specs = [first.spec, second.spec]
        settings = hasty(silence_s=0.3, deadline_s=PATIENCE_S, again_max_s=0.5)
        async with consume(expectations(), specs, sink, settings=settings) as retrieval:
            await sink.reached(moment.placed)
            await first.kill()
            await moment.finish(handle, steps)
            events = await rest_of(retrieval)

    assert_whole(events, sink)


@pytest.mark.slow
@moments
async def test_a_producer_that_is_killed_is_told_before_computing_would_have_taken_as_long(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink, loop = Moment.at_random(seed), CountingSink(), asyncio.get_running_loop()
    settings = hasty(
        deadline_s=PATIENCE_S, silence_s=0.3, again_s=0.1, recompute_tokens_per_s=ESTIMATE
    )

    async with (
        dying_producer(certificates, moment.layers, moment.objects) as (process, spec),
        consume(expectations(), [spec], sink, settings=settings) as retrieval,
    ):
        await sink.reached(moment.placed)
        process.kill()
        killed = loop.time()
        events = await rest_of(retrieval)
        ended = loop.time()

    failed = assert_exact(events, sink)
    # In silence for as long, and then in vain for as long again.
    assert ended - killed < 2 * TOKENS / ESTIMATE + SLACK_S
    if sink.placed:  # else it may never have been reached
        assert failed.reason is FailureReason.EXPIRED
        assert "not recovered within 1 s, in which it can be recomputed" in failed.text
    assert failed.recompute


@pytest.mark.slow
async def test_a_relay_that_takes_over_has_no_longer_than_computing_takes_either(
    certificates: CertificateFiles,
) -> None:
    sink, loop = CountingSink(), asyncio.get_running_loop()
    settings = hasty(silence_s=0.3, deadline_s=PATIENCE_S, stall_timeout_s=PATIENCE_S)

    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        await fill(handle, [0, 1])
        specs, bounded = [first.spec, second.spec], replace(settings, recompute_tokens_per_s=5.0)
        async with consume(expectations(), specs, sink, settings=bounded) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await first.kill()
            killed = loop.time()
            # It goes on: what comes is new, and still comes too late.
            for layer in range(2, LAYERS - 1):
                await fill(handle, [layer])
                await retrieval.layer(layer, timeout_s=PATIENCE_S)
            events = await rest_of(retrieval)
            ended = loop.time()

    failed = assert_exact(events, sink)
    assert failed.reason is FailureReason.EXPIRED
    assert "not recovered within 4 s" in failed.text
    assert ended - killed < TOKENS / 5.0 + SLACK_S
    assert ready(events) == list(range(LAYERS - 1))


@moments
async def test_when_everything_is_gone_what_is_to_be_computed_is_exactly_what_is_missing(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink, loop = Moment.at_random(seed), CountingSink(), asyncio.get_running_loop()
    settings = hasty(
        silence_s=0.3, again_s=0.1, again_max_s=0.3, recompute_tokens_per_s=2 * ESTIMATE
    )

    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        await moment.produce(scene.open())
        specs = [first.spec, second.spec]
        async with consume(expectations(), specs, sink, settings=settings) as retrieval:
            await sink.reached(moment.placed)
            await asyncio.gather(first.kill(), second.kill())
            killed = loop.time()
            events = await rest_of(retrieval)
            ended = loop.time()

    assert_exact(events, sink)
    assert ended - killed < TOKENS / ESTIMATE + SLACK_S


async def test_nobody_there_at_all_leaves_the_whole_prompt_to_be_computed(
    certificates: CertificateFiles,
) -> None:
    async with standing(certificates) as nobody:
        settings = hasty(discovery_timeout_s=0.1)
        wish = Wish(layers=range(2, 4), blocks=range(1, 3))
        retrieval = consume(
            expectations(), [nobody.spec], CountingSink(), wish=wish, settings=settings
        )
        async with retrieval:
            events = await rest_of(retrieval)

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.NOT_FOUND
    assert [str(one) for one in failed.recompute] == ["tokens 4-11 from layer 2"]


# -- a relay that lacks or damages something -----------------------------------------------------


def somewhere(seed: int) -> tuple[bytes, int, int]:
    """Return some track, layer and block."""
    moment = Moment.at_random(seed)
    return DATA[seed % 2], moment.layers, moment.objects


@asynccontextmanager
async def beside(
    certificates: CertificateFiles, whole: bool, **wrong: Any
) -> AsyncIterator[list[Any]]:
    """A stand-in with a copy that is wrong, and, if so, one with a copy that is whole."""
    async with on_stage(certificates) as scene:
        one = await filled(scene.open())
        wrong_copy, copy = copied(one, **wrong), copied(one)
    async with standing(certificates, wrong_copy) as bad, standing(certificates, copy) as good:
        yield [bad.spec, good.spec] if whole else [bad.spec]


@moments
async def test_an_object_that_one_relay_damages_is_had_from_the_next_one(
    certificates: CertificateFiles, seed: int
) -> None:
    sink, damaged = CountingSink(), somewhere(seed)

    async with (
        beside(certificates, True, damaged=damaged) as specs,
        consume(expectations(), specs, sink, settings=QUICK) as retrieval,
    ):
        events = await rest_of(retrieval)

    assert_whole(events, sink)
    [rejected] = of_kind(events, ObjectRejected)
    assert rejected.reason is Rejection.DIGEST
    assert (str(rejected.track).encode(), rejected.layer, rejected.block) == damaged


@moments
async def test_an_object_that_is_damaged_everywhere_costs_one_block_from_its_layer_on(
    certificates: CertificateFiles, seed: int
) -> None:
    sink, (track, layer, block) = CountingSink(), somewhere(seed)

    async with (
        beside(certificates, False, damaged=(track, layer, block)) as specs,
        consume(expectations(), specs, sink, settings=QUICK) as retrieval,
    ):
        events = await rest_of(retrieval)

    failed = assert_exact(events, sink)
    assert [(r.token_start, r.token_end, r.first_layer) for r in failed.recompute] == [
        (block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS, layer)
    ]
    assert sorted(ready(events)) == [n for n in range(LAYERS) if n != layer]


@moments
async def test_a_group_that_one_relay_has_let_go_is_had_from_the_next_one(
    certificates: CertificateFiles, seed: int
) -> None:
    sink, (track, layer, _) = CountingSink(), somewhere(seed)

    async with (
        beside(certificates, True, lacks=(track, layer)) as specs,
        consume(expectations(), specs, sink, settings=QUICK) as retrieval,
    ):
        events = await rest_of(retrieval)

    complete = assert_whole(events, sink)
    assert complete.summary.duplicates == 0


@moments
async def test_a_group_that_is_nowhere_any_more_is_to_be_computed_for_all_tokens(
    certificates: CertificateFiles, seed: int
) -> None:
    sink, (track, layer, _) = CountingSink(), somewhere(seed)

    async with (
        beside(certificates, False, lacks=(track, layer)) as specs,
        consume(expectations(), specs, sink, settings=QUICK) as retrieval,
    ):
        events = await rest_of(retrieval)

    failed = assert_exact(events, sink)
    assert [str(one) for one in failed.recompute] == [f"tokens 0-{TOKENS - 1} from layer {layer}"]


@moments
async def test_a_stream_that_is_reset_in_the_middle_of_an_object_costs_nothing(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink = Moment.at_random(seed), CountingSink()
    track = DATA[seed % 2]

    async with on_stage(certificates) as scene:
        copy = copied(await filled(scene.open()))
    async with standing(certificates, copy) as stand:
        whole = copy.tracks[track]
        broken = LocalTrack(whole.name)
        stand.handler.instead[track] = [broken]
        live = replace(QUICK, fetch="never")
        async with consume(expectations(), [stand.spec], sink, settings=live) as retrieval:
            for layer in range(moment.layers + 1):
                [subgroup] = whole._groups[layer]
                made = broken.open_subgroup(layer, 0, priority=0, holds_end_of_group=True)
                objects = subgroup.objects
                for obj in objects if layer < moment.layers else objects[: moment.objects]:
                    made.publish(obj.object_id, *obj.parts, status=obj.status)
                if layer < moment.layers:
                    made.close()
            payload = b"".join(objects[moment.objects].parts)
            half = made.begin(moment.objects, len(payload))
            made.extend(half, payload[: len(payload) // 2])
            # All of the other track, and what was published of this one.
            await sink.reached(LAYERS * BLOCKS + moment.placed // 2)
            made.cut(StreamErrorCode.INTERNAL_ERROR)
            broken.end(PublishDoneCode.INTERNAL_ERROR)
            events = await rest_of(retrieval)

    complete = assert_whole(events, sink)
    assert complete.summary.duplicates == 0
    assert stand.handler.asked[track] == 2


# -- two publications ----------------------------------------------------------------------------


@moments
async def test_where_both_are_deterministic_another_publication_goes_on_object_by_object(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink = Moment.at_random(seed, first_layer=1), CountingSink()

    async with (
        on_stage(certificates, deterministic=True) as first,
        on_stage(certificates, deterministic=True) as second,
    ):
        await moment.produce(first.open())
        other = await filled(second.open())
        async with consume(
            expectations(), [first.spec, second.spec], sink, settings=QUICK
        ) as retrieval:
            await sink.reached(moment.placed)
            await first.producer._servers[0].close(drain_s=0)
            events = await rest_of(retrieval)

    complete = assert_whole(events, sink)
    assert complete.publication == other.name
    assert sink.calls == ["begin", "done"]
    assert complete.summary.duplicates == 0


@pytest.mark.parametrize("deterministic", [(False, False), (True, False), (False, True)])
@moments
async def test_where_not_both_are_deterministic_nothing_is_mixed(
    certificates: CertificateFiles, seed: int, deterministic: tuple[bool, bool]
) -> None:
    moment, sink = Moment.at_random(seed, first_layer=1), CountingSink()
    one, other = deterministic

    async with (
        on_stage(certificates, deterministic=one) as first,
        on_stage(certificates, deterministic=other) as second,
    ):
        await moment.produce(first.open())
        await other_run(second.open())
        settings = hasty(silence_s=0.3, again_s=0.1, another_s=0.1, recompute_tokens_per_s=ESTIMATE)
        async with consume(
            expectations(), [first.spec, second.spec], sink, settings=settings
        ) as retrieval:
            await sink.reached(moment.placed)
            await first.producer._servers[0].close(drain_s=0)
            events = await rest_of(retrieval)

    failed = assert_exact(events, sink)
    assert sink.placed.total() == moment.placed
    assert failed.recompute


@moments
async def test_before_a_layer_was_told_another_publication_takes_its_place(
    certificates: CertificateFiles, seed: int
) -> None:
    moment, sink = Moment(0, Moment.at_random(seed).objects), CountingSink()

    async with on_stage(certificates) as first, on_stage(certificates) as second:
        await moment.produce(first.open())
        other = await filled(second.open())
        async with consume(
            expectations(), [first.spec, second.spec], sink, settings=QUICK
        ) as retrieval:
            await sink.reached(moment.placed)
            await first.producer._servers[0].close(drain_s=0)
            events = await rest_of(retrieval)

    assert assert_whole(events, sink).publication == other.name


async def test_a_segment_of_which_nothing_came_is_had_from_another_publication(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as first, on_stage(certificates) as second:
        handle = first.open()
        await fill(handle, segment=await handle.add_segment(2))
        other = await filled(second.open(), (2, 3))
        async with consume(
            expectations(), [first.spec, second.spec], sink, settings=QUICK
        ) as retrieval:
            await sink.reached(2 * 2 * LAYERS)
            await first.producer._servers[0].close(drain_s=0)
            events = await rest_of(retrieval)

    complete = events[-1]
    assert isinstance(complete, PublicationComplete)
    assert complete.publication == other.name
    assert sink.placed == EVERYTHING
    assert sink.calls == ["begin", "done"]
    assert len(of_kind(events, PublicationFound)) == 2
    assert_same_cache(sink)


async def test_so_it_is_with_connections_in_processes_of_their_own(
    certificates: CertificateFiles,
) -> None:
    moment = Moment(2, 3)

    sink, blocks = SharedArraySink(), Blocks()
    async with (
        on_stage(certificates, deterministic=True) as first,
        on_stage(certificates, deterministic=True) as scene,
    ):
        await moment.produce(first.open())
        copy = copied(await filled(scene.open()), lacks=(b"v.raw.s0", 4))
        settings = replace(QUICK, processes=True, connections=2, deadline_s=2 * PATIENCE_S)
        async with (
            standing(certificates, copy) as second,
            consume(
                expectations(),
                [first.spec, second.spec],
                sink,
                blocks=[blocks],
                settings=settings,
            ) as retrieval,
        ):
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await first.producer._servers[0].close(drain_s=0)
            async with asyncio.timeout(2 * PATIENCE_S):
                events = [event async for event in retrieval]

    complete = events[-1]
    assert isinstance(complete, PublicationComplete), complete
    assert complete.publication == copy.name
    assert complete.summary.objects == EVERYTHING.total()
    assert {key.layer for key in blocks.asked} == {4}
    assert_same_cache(sink)


# -- silence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [b"manifest.cose", b"k.raw.s0", b"namespaces", b"objects"])
async def test_a_relay_that_accepts_and_never_answers_costs_its_time_and_no_more(
    certificates: CertificateFiles, silent: bytes
) -> None:
    sink, loop = CountingSink(), asyncio.get_running_loop()
    limit_s = 0.4
    settings = hasty(
        discovery_timeout_s=limit_s, request_timeout_s=limit_s, stall_timeout_s=limit_s
    )

    async with on_stage(certificates) as scene:
        copy = copied(await filled(scene.open()))
    held = [] if silent == b"namespaces" else [copy]
    async with standing(certificates, *held) as mute, standing(certificates, copy) as good:
        if silent == b"objects":
            mute.handler.instead = {name: [LocalTrack(copy.tracks[name].name)] * 9 for name in DATA}
        else:
            mute.handler.silent = {silent}
        began = loop.time()
        async with consume(
            expectations(), [mute.spec, good.spec], sink, settings=settings
        ) as retrieval:
            events = await rest_of(retrieval)
        ended = loop.time()

    assert_whole(events, sink)
    assert ended - began < 2 * limit_s + SLACK_S


# -- block services ------------------------------------------------------------------------------


@moments
async def test_what_no_relay_has_any_more_is_brought_by_a_block_service(
    certificates: CertificateFiles, seed: int
) -> None:
    sink, (track, layer, _) = CountingSink(), somewhere(seed)
    blocks = Blocks()
    settings = replace(QUICK, large_octets=1) if seed % 3 else QUICK  # in threads

    async with (
        beside(certificates, False, lacks=(track, layer)) as specs,
        consume(expectations(), specs, sink, blocks=[blocks], settings=settings) as retrieval,
    ):
        events = await rest_of(retrieval)

    complete = assert_whole(events, sink)
    assert complete.summary.attested == EVERYTHING.total()
    assert [key.layer for key in blocks.asked] == [layer] * BLOCKS
    assert blocks.publications == {complete.publication.publication_id}


@pytest.mark.parametrize("fails", [NotFound("no"), Incomplete("no"), OSError("no")])
async def test_a_service_that_fails_is_left_with_what_it_has_given(
    certificates: CertificateFiles, fails: Exception
) -> None:
    sink, first, second = CountingSink(), Blocks(fails=fails), Blocks()

    async with (
        beside(certificates, False, lacks=(b"v.raw.s0", 3)) as specs,
        consume(expectations(), specs, sink, blocks=[first, second], settings=QUICK) as retrieval,
    ):
        events = await rest_of(retrieval)

    assert_whole(events, sink)
    assert [len(one.asked) for one in (first, second)] == [BLOCKS, BLOCKS - 1]


async def test_a_service_that_stalls_lacks_or_damages_something_is_left_for_the_next_one(
    certificates: CertificateFiles,
) -> None:
    sink, loop = CountingSink(), asyncio.get_running_loop()
    settings = hasty(request_timeout_s=0.4)
    stalls, rest = Blocks(stalls=True), Blocks()
    some = Blocks(lacks=frozenset({(3, 1)}), damages=frozenset({(3, 2)}))

    async with beside(certificates, False, lacks=(b"v.raw.s0", 3)) as specs:
        began = loop.time()
        services = [stalls, some, rest]
        async with consume(
            expectations(), specs, sink, blocks=services, settings=settings
        ) as retrieval:
            events = await rest_of(retrieval)
        ended = loop.time()

    assert_whole(events, sink)
    assert ended - began < 0.4 + SLACK_S
    assert [len(one.asked) for one in services] == [BLOCKS, BLOCKS, 2]
    [rejected] = of_kind(events, ObjectRejected)
    assert (rejected.layer, rejected.block, rejected.reason) == (3, 2, Rejection.DIGEST)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_what_the_manifest_does_not_list_is_taken_only_if_both_are_deterministic(
    certificates: CertificateFiles, deterministic: bool
) -> None:
    sink, moment = CountingSink(), Moment(2, 1)
    blocks = Blocks(deterministic=True)
    settings = hasty(silence_s=0.3, again_s=0.1, another_s=0.1, recompute_tokens_per_s=2 * ESTIMATE)

    async with on_stage(certificates, deterministic=deterministic) as scene:
        await moment.produce(scene.open())
        async with consume(
            expectations(), [scene.spec], sink, blocks=[blocks], settings=settings
        ) as retrieval:
            await sink.reached(moment.placed)
            await scene.producer._servers[0].close(drain_s=0)
            events = await rest_of(retrieval)

    if deterministic:
        assert_whole(events, sink)
    else:
        assert_exact(events, sink)
        assert blocks.asked == []


# -- what is bad ---------------------------------------------------------------------------------


async def test_one_that_was_proven_bad_is_not_chosen_again_by_whoever_knows_of_it(
    certificates: CertificateFiles,
) -> None:
    bad = BadPublications()
    async with on_stage(certificates) as scene:
        one = await filled(scene.open())
        corrupt(one, *_manifest(one), flip(40))  # inside of the Compatibility Descriptor
        other = await filled(scene.open())
        found: list[list[Event]] = []
        for _ in range(2):
            sink = CountingSink()
            async with scene.retrieve(sink, bad=bad, settings=QUICK) as retrieval:
                found.append(await rest_of(retrieval))
            assert assert_whole(found[-1], sink).publication == other.name

    first, second = (of_kind(events, PublicationRefused) for events in found)
    assert [event.publication for event in first + second] == [one.name, one.name]
    assert "known to be bad" not in first[0].text
    assert second[0].text.startswith("known to be bad: manifest: ")
    assert len(bad) == 1


async def test_one_that_contradicts_itself_before_anything_was_used_makes_way_for_another(
    certificates: CertificateFiles,
) -> None:
    sink, bad = CountingSink(), BadPublications()

    async with on_stage(certificates) as scene:
        one, other = copied(await filled(scene.open())), copied(await filled(scene.open()))
    track, _, _ = _manifest(one)
    [*_, (last, [subgroup])] = sorted(one.tracks[track.encode()]._groups.items())
    payload = b"".join(subgroup.objects[0].parts)
    live = one.tracks[track.encode()] = LocalTrack(one.tracks[track.encode()].name)
    publish(live, 0, payload.replace(f'"version":{last}'.encode(), b'"version":0'))
    for name in DATA:
        one.tracks[name] = LocalTrack(one.tracks[name].name)
    async with (
        standing(certificates, one) as first,
        standing(certificates, other) as second,
        consume(
            expectations(), [first.spec, second.spec], sink, bad=bad, settings=QUICK
        ) as retrieval,
    ):
        async for event in retrieval:
            if isinstance(event, ManifestAccepted):
                break
        lie = payload.replace(f'"version":{last}'.encode(), b'"version":1')
        publish(live, 1, lie.replace(b'"deterministic":false', b'"deterministic":true'))
        events = await rest_of(retrieval)

    assert assert_whole(events, sink).publication == other.name
    [refusal] = of_kind(events, PublicationRefused)
    assert refusal.publication == one.name
    assert "a later manifest changes deterministic" in refusal.text
    assert bad.why_bad(one.name, time.monotonic(), at=first.spec.uri) == refusal.text
    assert bad.why_bad(one.name, time.monotonic(), at=second.spec.uri) is None


def publish(track: LocalTrack, group: int, payload: bytes) -> None:
    subgroup = track.open_subgroup(group, 0, priority=0, holds_end_of_group=True)
    subgroup.publish(0, payload)
    subgroup.close()


def _manifest(one: Publication | Copy) -> tuple[str, int, int]:
    """Return where the newest manifest of a publication is."""
    [name] = [name for name in one.tracks if name.startswith(b"manifest")]
    return name.decode(), max(one.tracks[name]._groups), 0
