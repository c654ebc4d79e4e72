"""A producer announced at the peer's relay, and consumers that find and read it there."""

import asyncio
from pathlib import Path

import numpy as np

from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.profile.signing import ProducerKey
from kvcs.store.sink import ArraySink
from kvcs.store.source import SafetensorsSource
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.interop.conftest import Relay
from tests.interop.peer import MARKS

pytestmark = MARKS

DATA = Path(__file__).parents[1] / "data" / "smollm2-128.safetensors"


async def test_a_recorded_cache_comes_through_whole_before_during_and_after_production(
    relay: Relay, certificates: CertificateFiles
) -> None:
    scope, key = ScopeKey.generate(), ProducerKey.generate()
    source, tls = SafetensorsSource(DATA), ClientTls(ca_file=certificates.ca_file)
    expected = Expectations.of_tokens(
        scope,
        source.descriptor,
        source.tokens,
        trusted={key.kid: key.public_key},
        require_signature=True,
    )

    async def retrieve() -> ArraySink:
        sink = ArraySink()
        where = [ConnectionSpec(uri=relay.uri, tls=tls)]
        async with consume(
            expected, where, sink, settings=RetrievalSettings(deadline_s=30)
        ) as retrieval:
            await retrieval.result()
        return sink

    producer = Producer(scope, ProducerOptions(drain_s=2), producer_key=key)
    async with asyncio.timeout(60), producer, asyncio.TaskGroup() as consumers:
        handle = producer.open(source.descriptor, source.tokens)
        await producer.announce_at(relay.uri, tls=tls).wait_announced(10)
        tasks = [consumers.create_task(retrieve())]
        for first, blocks in ((0, 5), (5, 3)):
            await handle.add_segment(blocks)
            for layer, k, v in source.layers(first, blocks):
                await handle.add_layer(layer, k, v)
                if layer == 15:
                    tasks.append(consumers.create_task(retrieve()))
        await handle.finish()
        tasks.append(consumers.create_task(retrieve()))
        sinks = [await task for task in tasks]

    for sink in sinks:
        for layer, k, v in source.layers(0, 8):
            assert np.array_equal(sink.k[layer].view(np.uint16), k.view(np.uint16))
            assert np.array_equal(sink.v[layer].view(np.uint16), v.view(np.uint16))
