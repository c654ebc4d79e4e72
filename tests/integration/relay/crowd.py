"""Consumers that join at any moment of a production, and what came of it."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvcs.consumer.events import Event
from kvcs.kvsp.descriptor import Descriptor
from kvcs.producer.publication import Publication
from kvcs.telemetry import Counter
from tests.integration.kvcs import scene as scenes
from tests.integration.kvcs.scene import (
    BLOCKS,
    LAYERS,
    PATIENCE_S,
    CountingSink,
    Scene,
    hasty,
    in_halves,
    run,
)

CONSUMERS = 16
PATIENT = hasty(deadline_s=50, stall_timeout_s=50, request_timeout_s=30, discovery_timeout_s=30)


def enlarge_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Objects of some KiB, so that what goes around them does not count for much."""
    wide = replace(scenes.COMPAT, k_shape=(16, 64), v_shape=(16, 32))
    monkeypatch.setattr(scenes, "COMPAT", wide)


def octets_of(publication: Publication) -> int:
    """Return the payload octets of all its tracks, every version of the manifest included."""
    return sum(track.octets for track in publication.tracks.values())


def whole_objects(publication: Publication) -> int:
    """Return how many tensors of the cache have been published whole so far."""
    return sum(
        obj.is_whole and obj.length > 0
        for name, track in publication.tracks.items()
        if not name.startswith(b"manifest")
        for _, subgroup in track.subgroups_since(0)
        for obj in subgroup.objects
    )


def half_sent(publication: Publication) -> bool:
    return any(
        subgroup.objects and not subgroup.objects[-1].is_whole
        for track in publication.tracks.values()
        for _, subgroup in track.subgroups_since(0)
    )


async def subscribed_to(scene: Scene, publication: Publication) -> None:
    """Return once somebody is subscribed to each of its tracks that hold tensors."""
    tracks = [
        track for name, track in publication.tracks.items() if not name.startswith(b"manifest")
    ]
    while not all(track._readers for track in tracks):
        asked = scene.counters[Counter.REQUESTS]
        await scene.counters.reached(Counter.REQUESTS, asked + 1)


class Joiner(CountingSink):
    """Tells, too, that a manifest has come."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()

    def begin(self, descriptor: Descriptor, blocks: int) -> None:
        super().begin(descriptor, blocks)
        self.began.set()


@dataclass
class Crowd:
    """Those who joined, in that order."""

    publication: Publication
    sinks: list[Joiner] = field(default_factory=list)
    events: list[list[Event]] = field(default_factory=list)
    """What each was told, once it is over."""

    joined_half_sent: int = 0
    """How many joined while an Object was half sent."""


async def produce_for_crowd(
    scene: Scene, *, seed: int, gently: bool = False, **options: Any
) -> Crowd:
    """Produce a publication while consumers join at moments of chance; return when all are done.

    Args:
        scene: Where.
        seed: Of the chance.
        gently: Production begins once somebody is subscribed, and does not rest for long while
            an Object is half sent.
        options: For each retrieval.
    """
    moments = random.Random(seed)
    steps = 3 * 2 * LAYERS * BLOCKS
    # One from the start, and a few of the others after the end.
    chosen = [0, *sorted(moments.randrange(steps * 10 // 9) for _ in range(CONSUMERS - 1))]
    handle = scene.open()
    publication = handle.publication
    crowd = Crowd(publication)
    tasks: list[asyncio.Task[list[Event]]] = []
    segment = await handle.add_segment()
    production = (
        step for layer in range(LAYERS) for step in in_halves(publication, segment, layer)
    )
    async with asyncio.TaskGroup() as group:
        moment = 0
        for join_at in chosen:
            while moment < min(join_at, steps):
                next(production)
                moment += 1
            if moment == steps and not publication.ended:
                next(production, None)
                await handle.finish()
            sink = Joiner()
            crowd.sinks.append(sink)
            retrieval = scene.retrieve(sink, **({"settings": PATIENT} | options))
            tasks.append(group.create_task(run(retrieval, 55)))
            if half_sent(publication):
                crowd.joined_half_sent += 1
                if gently:
                    async with asyncio.timeout(PATIENCE_S):
                        await sink.began.wait()
                    while half_sent(publication):
                        next(production)
                        moment += 1
            if gently and not moment:
                await subscribed_to(scene, publication)
            # Production goes on once the new one has got as far as chance will have it.
            await sink.reached(moments.randint(0, whole_objects(publication)))
        for _ in production:
            pass
        if not publication.ended:
            await handle.finish()
    crowd.events = [task.result() for task in tasks]
    return crowd
