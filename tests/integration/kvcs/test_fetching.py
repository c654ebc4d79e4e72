"""Finished segments come with FETCH: what is missing and nothing else (KVCS Section 5.3)."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ManifestAccepted,
    PublicationComplete,
    PublicationFound,
    Summary,
)
from kvcs.consumer.retrieval import ConnectionSpec, Retrieval, consume
from kvcs.consumer.selection import Wish
from kvcs.kvsp.layout import Component
from kvcs.store.shared import SharedArraySink
from moqt.aio import MoqtConnection
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.session.coverage import Knowledge
from moqt.session.events import (
    FetchReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import (
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
    missing,
    of_kind,
    on_stage,
    ready,
    run,
    tensors,
)
from tests.integration.kvcs.served import (
    K,
    Lost,
    V,
    breaking_off,
    in_full,
    refused,
    serving,
    standing_still,
    unanswered,
    without,
)
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = pytest.mark.network

#: Data are not asked for before the manifest says that they are finished.
QUICK = hasty(eager=False, again_s=0.05, again_max_s=0.1)


def retrieve(sink: CountingSink, *specs: ConnectionSpec, **options: Any) -> Retrieval:
    return consume(expectations(), specs, sink, **({"settings": QUICK} | options))


def layers(first: int, last: int) -> LocationFilter:
    return LocationFilter.group_end(first, 0, last)


def complete(events: list[Event]) -> Summary:
    [event] = of_kind(events, PublicationComplete)
    found: Summary = event.summary
    return found


# -- what is asked for ---------------------------------------------------------------------------


async def test_a_finished_publication_comes_with_one_fetch_for_each_track(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        await filled(scene.open())
        events = await run(retrieve(sink, spec))

    assert server.asked == [(K, layers(0, 5), []), (V, layers(0, 5), [])]
    assert server.data_subscribed == []
    assert ready(events) == list(range(LAYERS))
    assert sink.placed == EVERYTHING
    summary = complete(events)
    assert (summary.duplicates, summary.unwanted, summary.rejected) == (0, 0, 0)
    assert summary.attested == EVERYTHING.total()
    assert_same_cache(sink)


@pytest.mark.parametrize("filters", [1, 0], ids=["filters", "no filters"])
async def test_of_a_part_nothing_else_is_looked_at(
    certificates: CertificateFiles, filters: int
) -> None:
    sink = CountingSink()
    wish = Wish(layers=range(2, 5), blocks=range(3))
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, filters=filters) as (server, spec),
    ):
        publication = await filled(scene.open())
        # Were it examined, it would be rejected.
        corrupt(publication, K, 3, 4, flip(100))
        events = await run(retrieve(sink, spec, wish=wish))

    ranges = [(0, 2)] if filters else []
    assert server.asked == [(K, layers(2, 4), ranges), (V, layers(2, 4), ranges)]
    assert sorted(ready(events)) == [2, 3, 4]
    assert sink.placed.total() == 2 * 3 * 3
    summary = complete(events)
    assert (summary.duplicates, summary.rejected) == (0, 0)
    # The last layer of the last track is left when the wanted part of it has come.
    excess = 0 if filters else 2 * 3 * (BLOCKS - 3)
    assert excess - 2 * (BLOCKS - 3) <= summary.unwanted <= excess


async def test_what_is_produced_meanwhile_is_subscribed_to_and_fetched_once_it_is_complete(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        handle = scene.open()
        await fill(handle, segment=await handle.add_segment(2))
        await fill(handle, [0], await handle.add_segment(3))
        async with retrieve(sink, spec) as retrieval:
            await retrieval.layer(0, 1, timeout_s=PATIENCE_S)
            await fill(handle, range(1, LAYERS))
            await handle.finish()
            async with asyncio.timeout(PATIENCE_S):
                await retrieval.result()

    assert server.asked == [(K, layers(0, 5), []), (V, layers(0, 5), [])]
    assert sorted(server.data_subscribed) == ["k.raw.s1", "v.raw.s1"]
    assert sink.placed == EVERYTHING
    assert retrieval.summary.duplicates == 0
    assert_same_cache(sink)


async def test_who_wants_no_fetch_subscribes(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, settings=replace(QUICK, fetch="never")))

    assert complete(events).objects == EVERYTHING.total()
    assert server.fetches == []
    assert sorted(server.data_subscribed) == [K, V]


async def test_who_wants_nothing_but_fetch_waits_until_a_segment_is_complete(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        handle = scene.open()
        await fill(handle, range(LAYERS - 1))
        settings = replace(QUICK, fetch="always")
        async with retrieve(sink, spec, settings=settings) as retrieval:
            async for event in retrieval:
                if isinstance(event, ManifestAccepted) and event.segments:
                    break
            assert server.fetches == []
            await fill(handle, [LAYERS - 1])
            await handle.finish()
            async with asyncio.timeout(PATIENCE_S):
                await retrieval.result()

    assert server.asked == [(K, layers(0, 5), []), (V, layers(0, 5), [])]
    assert server.data_subscribed == []
    assert sink.placed == EVERYTHING


async def test_over_several_connections_each_is_asked_for_its_part_of_every_layer(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, settings=replace(QUICK, connections=2)))

    assert server.asked == [
        (K, layers(0, 5), [(0, 2)]),
        (K, layers(0, 5), [(3, 4)]),
        (V, layers(0, 5), [(0, 2)]),
        (V, layers(0, 5), [(3, 4)]),
    ]
    assert sink.placed == EVERYTHING
    summary = complete(events)
    assert (summary.duplicates, summary.unwanted) == (0, 0)


@pytest.mark.parametrize("filters", [64, 0], ids=["filters", "no filters"])
async def test_processes_fetch_as_well(certificates: CertificateFiles, filters: int) -> None:
    sink = SharedArraySink()
    wish = Wish(layers=range(2, 5), blocks=range(3))
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, filters=filters) as (server, spec),
    ):
        publication = await filled(scene.open())
        corrupt(publication, K, 3, 4, flip(100))
        settings = replace(QUICK, processes=True, deadline_s=40)
        retrieval = consume(expectations(), [spec], sink, wish=wish, settings=settings)
        events = await run(retrieval, 40)

    ranges = [(0, 2)] if filters else []
    assert server.asked == [(K, layers(2, 4), ranges), (V, layers(2, 4), ranges)]
    assert sorted(ready(events)) == [2, 3, 4]
    summary = complete(events)
    assert (summary.objects, summary.duplicates, summary.rejected) == (2 * 3 * 3, 0, 0)
    for layer in (2, 3, 4):
        k, _ = tensors(layer, blocks=3)
        np.testing.assert_array_equal(sink.k[layer].view("u2"), k.view("u2"))


# -- when something is missing -------------------------------------------------------------------

#: Objects that one server lacks: one of K, and in two layers the last two of V.
LOST: tuple[Lost, ...] = ((K, 4, 1), *((V, layer, block) for layer in (1, 2) for block in (3, 4)))
FEW_PLACES = [(K, layers(4, 4), [(1, 1)]), (V, layers(1, 2), [(3, 4)])]


@pytest.mark.parametrize("known", [Knowledge.COMPLETE, Knowledge.UNKNOWN, Knowledge.TIMED_OUT])
@pytest.mark.parametrize("filters", [64, 0], ids=["filters", "no filters"])
async def test_another_relay_is_asked_for_what_is_missing_and_nothing_else(
    certificates: CertificateFiles, known: Knowledge, filters: int
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, without(*LOST, known=known)) as (_, first),
        serving(scene, certificates, filters=filters) as (server, second),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, first, second, settings=replace(QUICK, resubscribe=0)))

    narrow = [(track, where, ranges if filters else []) for track, where, ranges in FEW_PLACES]
    assert server.asked == narrow
    assert sink.placed == EVERYTHING
    summary = complete(events)
    assert (summary.duplicates, summary.rejected) == (0, 0)
    assert summary.unwanted == 0 if filters else summary.unwanted <= 4 + 2 * 3
    assert_same_cache(sink)


async def test_processes_ask_another_relay_for_what_is_missing_and_nothing_else(
    certificates: CertificateFiles,
) -> None:
    sink = SharedArraySink()
    lost = (*LOST, (K, 0, 0))  # of K now two parts of two layers, so two requests
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, without(*lost)) as (_, first),
        serving(scene, certificates) as (server, second),
    ):
        await filled(scene.open())
        settings = replace(QUICK, processes=True, resubscribe=0, deadline_s=40)
        retrieval = consume(expectations(), [first, second], sink, settings=settings)
        events = await run(retrieval, 40)

    assert server.asked == sorted([*FEW_PLACES, (K, layers(0, 0), [(0, 0)])], key=str)
    summary = complete(events)
    assert (summary.objects, summary.duplicates, summary.unwanted) == (EVERYTHING.total(), 0, 0)
    assert_same_cache(sink)


async def test_the_same_one_is_asked_again_for_what_is_missing_and_nothing_else(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, without(*LOST)) as (server, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec))

    assert server.asked == sorted(
        [(K, layers(0, 5), []), (V, layers(0, 5), []), *FEW_PLACES], key=str
    )
    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.INCOMPLETE
    assert missing(failed) == [f"{K} layer 4 block 1", f"{V} layers 1-2 blocks 3-4"]
    assert sorted(ready(events)) == [0, 3, 5]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (StreamErrorCode.INTERNAL_ERROR, FailureReason.EXPIRED),
        (StreamErrorCode.UNKNOWN_OBJECT_STATUS, FailureReason.INCOMPLETE),
    ],
    ids=["lost", "not known"],
)
async def test_a_stream_that_is_reset_leaves_its_objects_missing(
    certificates: CertificateFiles, code: StreamErrorCode, reason: FailureReason
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, breaking_off(code)) as (_, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, settings=replace(QUICK, deadline_s=1.5)))

    [failed] = of_kind(events, Failed)
    assert failed.reason is reason
    assert missing(failed) == [f"{V} layers 0-5 blocks 0-4"]
    assert {component for component, _, _ in sink.placed} == {Component.K}


async def test_what_broke_off_is_asked_for_again_until_it_comes(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, breaking_off(StreamErrorCode.INTERNAL_ERROR)) as (
            server,
            spec,
        ),
    ):
        await filled(scene.open())
        async with retrieve(sink, spec) as retrieval:
            await server.fetched(4)
            server.answer = in_full
            async with asyncio.timeout(PATIENCE_S):
                await retrieval.result()

    assert sink.placed == EVERYTHING
    assert [name for name, *_ in server.asked].count(K) == 1


@pytest.mark.parametrize(
    "code",
    [
        RequestErrorCode.NOT_SUPPORTED,
        RequestErrorCode.DOES_NOT_EXIST,
        RequestErrorCode.INVALID_RANGE,
        RequestErrorCode.INVALID_FILTER,
    ],
)
async def test_who_refuses_a_fetch_is_subscribed_to(
    certificates: CertificateFiles, code: RequestErrorCode
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, refused(code)) as (server, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec))

    assert complete(events).objects == EVERYTHING.total()
    assert sink.placed == EVERYTHING
    assert sorted(server.data_subscribed) == [K, V]


async def test_who_does_not_know_fetch_is_not_asked_for_it_again(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    settings = replace(QUICK, segments_at_once=1)
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, refused(RequestErrorCode.NOT_SUPPORTED)) as (server, spec),
    ):
        await filled(scene.open(), segments=(2, 1, 2))
        events = await run(retrieve(sink, spec, settings=settings))

    assert complete(events).objects == EVERYTHING.total()
    assert sorted(name for name, *_ in server.asked) == [K, V]
    assert len(server.data_subscribed) == 6


async def test_of_more_segments_than_are_asked_for_at_a_time_early_layers_come_first(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    settings = replace(QUICK, segments_at_once=2)
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates) as (server, spec),
    ):
        await filled(scene.open(), segments=[1] * BLOCKS)
        events = await run(retrieve(sink, spec, settings=settings))

    told = [event.layer for event in of_kind(events, LayerReady)]
    assert sorted(told[:BLOCKS]) == [0] * BLOCKS
    assert sorted(told[BLOCKS : 3 * BLOCKS]) == [1] * BLOCKS + [2] * BLOCKS
    assert len(told) == LAYERS * BLOCKS
    assert sink.placed == EVERYTHING
    assert complete(events).duplicates == 0
    waves = [layers(0, 0), layers(1, 2), layers(3, LAYERS - 1)]
    names = [f"{part}.raw.s{segment}" for part in "kv" for segment in range(BLOCKS)]
    found = [(name, location) for name, location, _ in server.asked]
    assert sorted(found, key=str) == sorted(
        ((name, wave) for name in names for wave in waves), key=str
    )


async def test_what_one_lacks_of_an_early_layer_keeps_no_later_one_from_coming(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    settings = replace(QUICK, segments_at_once=2)
    lost: Lost = ("k.raw.s1", 0, 0)
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, without(lost)) as (server, spec),
    ):
        await filled(scene.open(), segments=[1] * BLOCKS)
        # A second one has it all, and is asked for no more than that.
        async with serving(scene, certificates) as (other, more):
            events = await run(retrieve(sink, spec, more, settings=settings))

    assert sink.placed == EVERYTHING
    assert complete(events).duplicates == 0
    assert [(name, location) for name, location, _ in other.asked] == [("k.raw.s1", layers(0, 0))]
    assert layers(3, LAYERS - 1) in [location for _, location, _ in server.asked]


async def test_who_has_no_room_for_a_fetch_is_not_asked_for_more_but_for_it_again(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    refusals = 0

    def full_at_first(
        connection: MoqtConnection, request: FetchReceived, track: LocalTrack
    ) -> None:
        nonlocal refusals
        refusals += 1
        answer = refused(RequestErrorCode.EXCESSIVE_LOAD) if refusals < 3 else in_full
        answer(connection, request, track)

    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, full_at_first) as (server, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, spec))

    assert complete(events).objects == EVERYTHING.total()
    assert server.data_subscribed == []


async def test_who_never_answers_a_fetch_is_subscribed_to(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, unanswered) as (server, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, settings=replace(QUICK, request_timeout_s=0.3)))

    assert complete(events).objects == EVERYTHING.total()
    assert sorted(server.data_subscribed) == [K, V]


async def test_a_fetch_that_stands_still_is_given_up_in_time(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates) as scene,
        serving(scene, certificates, standing_still) as (_, spec),
    ):
        await filled(scene.open())
        events = await run(retrieve(sink, spec, settings=replace(QUICK, stall_timeout_s=0.3)))

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.STALLED
    assert missing(failed) == [f"{track} layers 0-5 blocks 0-4" for track in (K, V)]


async def test_what_a_broken_subscription_lacked_is_fetched_once_it_is_complete(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene, serving(scene, certificates) as (server, spec):
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        async with retrieve(sink, spec) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            [(connection, broken)] = [
                asked for asked in server.subscriptions if asked[1].track.name == V.encode()
            ]
            server.has_room = False
            before = len(server.subscribed)
            connection.session.end_subscription(
                broken.request_id, PublishDoneCode.INTERNAL_ERROR, "lost"
            )
            connection.wake()
            await server.subscribed_to(before + 1)
            await fill(handle, range(2, LAYERS), segment)
            await handle.finish()
            server.has_room = True
            async with asyncio.timeout(PATIENCE_S):
                await retrieval.result()

    assert [asked for asked in server.asked if asked[0] == V] == [(V, layers(2, 5), [])]
    assert server.data_subscribed.count(V) >= 2  # while some of it was to come
    assert sink.placed == EVERYTHING
    summary = retrieval.summary
    assert (summary.duplicates, summary.unwanted, summary.rejected) == (0, 0, 0)
    assert_same_cache(sink)


# -- relays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2])
async def test_relays_that_hold_nothing_ask_for_what_is_fetched_of_them(
    certificates: CertificateFiles, hops: int
) -> None:
    sink = CountingSink()
    wish = Wish(layers=range(1, 4), blocks=range(1, 3))
    async with (
        relaying(certificates, hops=hops) as stage,
        producing_behind(stage, certificates) as scene,
    ):
        await filled(scene.open())
        events = await run(scene.retrieve(sink, wish=wish))

    assert sorted(ready(events)) == [1, 2, 3]
    summary = complete(events)
    assert (summary.objects, summary.unwanted, summary.duplicates) == (2 * 3 * 2, 0, 0)


async def test_a_relay_serves_fetches_of_what_it_has_kept_when_its_producer_is_gone(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with relaying(certificates) as stage:
        async with producing_behind(stage, certificates) as scene:
            await filled(scene.open())
            before = await run(scene.retrieve(CountingSink()))
            [found] = of_kind(before, PublicationFound)
        wish = Wish(layers=range(2, 4))
        events = await run(
            consume(expectations(), [stage.nearest], sink, wish=wish, settings=QUICK,
                    publication=found.publication)
        )  # fmt: skip

    assert sorted(ready(events)) == [2, 3]
    assert complete(events).unwanted == 0
