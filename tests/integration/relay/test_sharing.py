"""Many consumers behind relays: each gets every Object once, and the producer sends one copy."""

import asyncio
import random
from dataclasses import replace

import pytest

from kvcs.consumer.events import Event, PublicationComplete
from kvcs.producer.publication import Publication
from kvcs.telemetry import Counter
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs import scene as scenes
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    CountingSink,
    assert_same_cache,
    hasty,
    in_halves,
    of_kind,
    run,
)
from tests.integration.relay.stage import counting_sent_octets, producing_behind, relaying

pytestmark = pytest.mark.network

CONSUMERS = 16
PATIENT = hasty(deadline_s=50, stall_timeout_s=50, request_timeout_s=30, discovery_timeout_s=30)


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("hops", "seed"),
    [
        pytest.param(1, 1, id="one relay"),
        pytest.param(2, 2, id="two relays"),
        # Of its two tracks one is joined just at the end of a Group: the gap up to the next one
        # has to be closed for those who want the past, although no stream shows where it ends.
        pytest.param(1, 18, id="one relay, joined at the end of a group"),
    ],
)
async def test_sixteen_that_join_at_any_moment_get_everything_once_of_one_copy(
    certificates: CertificateFiles, hops: int, seed: int
) -> None:
    moments = random.Random(seed)
    steps = 3 * 2 * LAYERS * BLOCKS
    # One from the start, and a few of the others after the end.
    chosen = [0, *sorted(moments.randrange(steps * 10 // 9) for _ in range(CONSUMERS - 1))]
    sinks: list[CountingSink] = []
    tasks: list[asyncio.Task[list[Event]]] = []
    joined_half_sent = 0

    with counting_sent_octets() as sent:
        async with (
            relaying(certificates, hops=hops) as stage,
            producing_behind(stage, certificates) as scene,
        ):
            handle = scene.open()
            publication = handle.publication
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
                    sink = CountingSink()
                    sinks.append(sink)
                    retrieval = scene.retrieve(sink, settings=PATIENT)
                    tasks.append(group.create_task(run(retrieval, 55)))
                    joined_half_sent += half_sent(publication)
                    # Production goes on once the new one has got as far as chance will have it.
                    await sink.reached(moments.randint(0, whole_objects(publication)))
                for _ in production:
                    pass
                if not publication.ended:
                    await handle.finish()
            [connection] = (link.connection for link in scene.producer._relays)
            assert connection is not None
            copies = sent[connection] / octets_of(publication)
            sessions = scene.counters[Counter.SESSIONS]

    for task, sink in zip(tasks, sinks, strict=True):
        [complete] = of_kind(task.result(), PublicationComplete)
        assert sink.placed == EVERYTHING
        assert sink.calls == ["begin", "done"]
        assert (complete.summary.duplicates, complete.summary.unwanted) == (0, 0)
        assert_same_cache(sink)
    assert joined_half_sent > CONSUMERS // 4
    assert sessions == 1
    assert 1.0 <= copies <= 1.02
