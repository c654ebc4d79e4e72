"""Our producer and our consumers, with our relay between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.telemetry import Counter
from moqt.aio import ClientTls, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.relay.server import Relay
from tests.integration.kvcs.scene import (
    EVERYTHING,
    LAYERS,
    CountingSink,
    Scene,
    assert_same_cache,
    fill,
    filled,
    on_stage,
    run,
)

pytestmark = pytest.mark.network


@asynccontextmanager
async def at_relay(files: CertificateFiles, relay: Relay) -> AsyncIterator[Scene]:
    """A producer that is announced at a relay, and retrievals that know only the relay."""
    tls = ServerTls(files.certificate_file, files.key_file)
    _, port = await relay.listen("127.0.0.1", 0, tls=tls)
    spec = ConnectionSpec(uri=f"moqt://127.0.0.1:{port}/", tls=ClientTls(ca_file=files.ca_file))
    async with on_stage(files) as scene:
        scene.spec = spec
        scene.producer.announce_at(spec.uri, tls=spec.tls)
        yield scene


async def retrieved(scene: Scene) -> None:
    sink = CountingSink()
    events = await run(scene.retrieve(sink))

    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sink.placed == EVERYTHING
    assert_same_cache(sink)


async def test_a_live_and_a_late_consumer_get_everything_once_and_the_producer_sends_it_once(
    certificates: CertificateFiles,
) -> None:
    async with Relay() as relay, at_relay(certificates, relay) as scene:
        handle = scene.open()
        await fill(handle, range(2))
        early = asyncio.create_task(retrieved(scene))
        await fill(handle, range(2, LAYERS // 2 + 1))
        late = asyncio.create_task(retrieved(scene))
        await fill(handle, range(LAYERS // 2 + 1, LAYERS))
        await handle.finish()
        await early
        await late
        await retrieved(scene)

        assert scene.counters[Counter.SESSIONS] == 1


async def test_a_publication_is_found_and_served_when_its_producer_is_gone(
    certificates: CertificateFiles,
) -> None:
    async with Relay() as relay:
        async with at_relay(certificates, relay) as scene:
            await filled(scene.open())
            await retrieved(scene)
        held = relay.octets_held

        await retrieved(scene)
        assert held == relay.octets_held > 0
