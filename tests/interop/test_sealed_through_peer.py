"""Sealed Objects through the peer's relay: live, by fill and by FETCH, to the last verified one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.settings import Fetching
from kvcs.consumer.trust import Expectations
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.producer.segment import Encoding
from kvcs.profile.signing import ProducerKey
from kvcs.store.sink import ArraySink
from kvcs.store.source import SafetensorsSource
from kvcs.trust.scope import Protection, Scope, Suite
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.interop.conftest import Relay
from tests.interop.peer import MARKS

pytestmark = MARKS

DATA = Path(__file__).parents[1] / "data" / "smollm2-128.safetensors"
#: K and V of 30 layers, in 8 blocks.
OBJECTS = 2 * 30 * 8


@pytest.mark.parametrize(
    ("suite", "codec"),
    [
        (Suite.AES_128_GCM_SHA256_128, "raw"),
        (Suite.AES_256_GCM_SHA512_128, "raw"),
        (Suite.AES_128_GCM_SHA256_128, "shuffle-zstd"),
    ],
    ids=["128 bits", "256 bits", "padded"],
)
async def test_a_sealed_cache_comes_through_whole_live_by_fill_and_by_fetch(
    relay: Relay, certificates: CertificateFiles, suite: Suite, codec: str
) -> None:
    scope, key = Scope(ScopeKey.generate(), Protection(suite)), ProducerKey.generate()
    source, tls = SafetensorsSource(DATA), ClientTls(ca_file=certificates.ca_file)
    expected = Expectations.of_tokens(
        scope,
        source.descriptor,
        source.tokens,
        trusted={key.kid: key.public_key},
        require_signature=True,
    )
    sinks: list[ArraySink] = []
    is_live = asyncio.Event()

    async def retrieve(fetch: Fetching) -> None:
        settings = RetrievalSettings(deadline_s=60, fetch=fetch)
        sink = ArraySink()
        where = [ConnectionSpec(uri=relay.uri, tls=tls)]
        async with consume(expected, where, sink, settings=settings) as retrieval:
            await retrieval.layer(0)
            is_live.set()
            complete = await retrieval.result()
        summary = complete.summary
        assert (summary.objects, summary.attested) == (OBJECTS, OBJECTS)
        assert (summary.unopened, summary.rejected) == (0, 0)  # what is live may come twice here
        sinks.append(sink)

    options = ProducerOptions(drain_s=2, encodings=(Encoding(codec),), manifest_every=1)
    async with (
        asyncio.timeout(120),
        Producer(scope, options, producer_key=key) as producer,
        asyncio.TaskGroup() as consumers,
    ):
        handle = producer.open(source.descriptor, source.tokens)
        await producer.announce_at(relay.uri, tls=tls).wait_announced(10)
        consumers.create_task(retrieve("auto"))
        await handle.add_segment()
        for layer, k, v in source.layers(0, 8):
            await handle.add_layer(layer, k, v)
            if layer == 0:
                await is_live.wait()
            if layer == 15:
                consumers.create_task(retrieve("never"))
        await handle.finish()
        await retrieve("never")
        await retrieve("always")

    assert len(sinks) == 4
    for sink in sinks:
        for layer, k, v in source.layers(0, 8):
            assert np.array_equal(sink.k[layer].view(np.uint16), k.view(np.uint16))
            assert np.array_equal(sink.v[layer].view(np.uint16), v.view(np.uint16))
