"""Joining a production at any moment: each Object comes exactly once, live and fill together."""

import asyncio
import random
from typing import Any

import pytest

from kvcs.consumer.events import Event, LayerReady, PublicationComplete, Trust
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.layout import Component
from kvcs.producer.handle import PublicationHandle
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.signing import ProducerKey
from kvcs.telemetry import Counter
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    CountingSink,
    Scene,
    assert_same_cache,
    expectations,
    hasty,
    in_halves,
    of_kind,
    on_stage,
    run,
)

pytestmark = pytest.mark.network

JOINS = 50
PATIENT = hasty(deadline_s=50, stall_timeout_s=50, request_timeout_s=30, discovery_timeout_s=30)
JOINT = {
    (Component.KV, layer, block): 1 for layer in range(LAYERS) for block in range(BLOCKS)
}  # fmt: skip


class Joins:
    """Consumers that join one after the other, and what became of them."""

    def __init__(self, scene: Scene, group: asyncio.TaskGroup, expected: Expectations) -> None:
        self.sinks: list[CountingSink] = []
        self.tasks: list[asyncio.Task[list[Event]]] = []
        self._scene = scene
        self._group = group
        self._expected = expected

    def join(self) -> None:
        sink = CountingSink()
        retrieval = self._scene.retrieve(sink, expected=self._expected, settings=PATIENT)
        self.sinks.append(sink)
        self.tasks.append(self._group.create_task(run(retrieval, 55)))


def half_sent(publication: Publication) -> bool:
    """Whether the Object with the largest Location of some track is not whole."""
    return any(
        subgroup.objects and not subgroup.objects[-1].is_whole
        for track in publication.tracks.values()
        for _, subgroup in track.subgroups_since(0)
    )


async def produce(handle: PublicationHandle, segments: tuple[int, ...]) -> Any:
    """Produce everything, half an Object at a time; yields at each of these moments."""
    for blocks in segments:
        segment = await handle.add_segment(blocks)
        for layer in range(LAYERS):
            for _ in in_halves(handle.publication, segment, layer):
                yield
    await handle.finish()
    while True:
        yield


@pytest.mark.parametrize(
    ("encodings", "segments", "signed", "seed"),
    [
        pytest.param(("raw",), (BLOCKS,), False, 1, id="k and v"),
        pytest.param(("raw",), (BLOCKS,), True, 2, id="k and v, signed", marks=pytest.mark.slow),
        pytest.param(("raw",), (2, 1, 2), False, 3, id="three segments", marks=pytest.mark.slow),
        pytest.param(("kv.raw",), (2, 3), True, 4, id="joint, two segments, signed"),
    ],
)
async def test_whoever_joins_at_any_moment_gets_each_object_exactly_once(
    certificates: CertificateFiles,
    encodings: tuple[str, ...],
    segments: tuple[int, ...],
    signed: bool,
    seed: int,
) -> None:
    moments = random.Random(seed)
    key = ProducerKey.generate() if signed else None
    expected = expectations()
    if key is not None:
        expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)
    tracks = sum(len(Encoding.parse(text).components) for text in encodings)
    steps = 3 * tracks * LAYERS * BLOCKS
    # A tenth of them after the end.
    chosen = sorted(moments.randrange(steps * 10 // 9) for _ in range(JOINS))
    joined_half_sent = joined_after_the_end = 0

    async with on_stage(
        certificates,
        producer_key=key,
        manifest_every=2,
        encodings=tuple(Encoding.parse(text) for text in encodings),
    ) as scene:
        handle = scene.open()
        production = produce(handle, segments)
        async with asyncio.TaskGroup() as group:
            joins = Joins(scene, group, expected)
            moment = 0
            for join_at in chosen:
                while moment < join_at:
                    await anext(production)
                    moment += 1
                before = scene.counters[Counter.REQUESTS]
                joins.join()
                # Production goes on when the consumer has got as far as chance will have it, at
                # most to its first data track: so the moments fall on every part of joining.
                asked = moments.randrange(5)
                if asked:
                    await scene.counters.reached(Counter.REQUESTS, before + asked)
                joined_half_sent += half_sent(handle.publication)
                joined_after_the_end += handle.publication.ended
            while not handle.publication.ended:
                await anext(production)

    for task, sink in zip(joins.tasks, joins.sinks, strict=True):
        events = task.result()
        [complete] = of_kind(events, PublicationComplete)
        assert sink.placed == (EVERYTHING if tracks == 2 else JOINT)
        assert sink.calls == ["begin", "done"]
        assert complete.summary.objects == len(sink.placed)
        assert (complete.summary.duplicates, complete.summary.unwanted) == (0, 0)
        assert_same_cache(sink)
        told = of_kind(events, LayerReady)
        assert sorted((event.segment, event.layer) for event in told) == [
            (segment, layer) for segment in range(len(segments)) for layer in range(LAYERS)
        ]
        assert not signed or {event.trust for event in told} == {Trust.ATTESTED}
    assert joined_half_sent > JOINS // 4
    assert joined_after_the_end > 0
