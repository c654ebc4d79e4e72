"""A publication that has been through a chain of relays is kept by each of them."""

import asyncio

import pytest

from kvcs.consumer.events import Failed, FailureReason, PublicationComplete
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import (
    EVERYTHING,
    CountingSink,
    Scene,
    assert_same_cache,
    filled,
    hasty,
    run,
)
from tests.integration.relay.stage import counting_sent_octets, producing_behind, relaying

pytestmark = pytest.mark.network


async def retrieved(scene: Scene) -> None:
    """Retrieve everything, once."""
    sink = CountingSink()
    events = await run(scene.retrieve(sink))
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sink.placed == EVERYTHING
    assert (events[-1].summary.duplicates, events[-1].summary.unwanted) == (0, 0)
    assert_same_cache(sink)


async def test_a_relay_serves_a_publication_when_all_behind_it_are_gone(
    certificates: CertificateFiles,
) -> None:
    async with relaying(certificates, hops=2) as stage:
        async with producing_behind(stage, certificates) as scene:
            await filled(scene.open())
            await retrieved(scene)
        far, near = stage.relays
        assert far.octets_held == near.octets_held > 0
        # The producer is gone: each of the two relays has all of it.
        scene.spec = stage.farthest
        await retrieved(scene)
        scene.spec = stage.nearest
        with counting_sent_octets() as sent:
            await retrieved(scene)
            assert sent.total() > near.octets_held
            asked = sum(sent[connection] for connection in far._servers[0].connections)
            assert asked < 100  # that there is no signed manifest, and nothing that is held
        await far.close()
        await asyncio.gather(*(retrieved(scene) for _ in range(4)))
        held = near.octets_held
    assert held > 0


async def test_nothing_is_found_of_what_no_relay_was_asked_for(
    certificates: CertificateFiles,
) -> None:
    async with relaying(certificates, hops=2) as stage:
        async with producing_behind(stage, certificates) as scene:
            await filled(scene.open())
        events = await run(scene.retrieve(settings=hasty(discovery_timeout_s=0.5)))

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.NOT_FOUND
