"""A part of a finished cache through the peer's relay: FETCH, and what it costs on the wire.

With the end of a Track the peer's relay forgets what it held of it, its 8 latest Groups or 32 MiB.
So it fetches of the producer, whoever has been there before: whole Groups, of which it passes on
what was asked for.
"""

import asyncio
from dataclasses import replace

import pytest

from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.consumer.selection import Wish
from kvcs.producer.daemon import Producer, ProducerOptions
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.parts import (
    BLOCKS,
    LAYERS,
    PART,
    assert_is,
    payload_octets,
    publish_all,
    retrieve,
)
from tests.integration.kvcs.scene import SCOPE
from tests.integration.relay.stage import counting_sent_octets
from tests.interop.conftest import StartPeer, start_relay
from tests.interop.peer import MARKS

pytestmark = [*MARKS, pytest.mark.aioquic]


@pytest.mark.parametrize("before", [False, True], ids=["nothing", "what it has passed on"])
@pytest.mark.parametrize("blocks", [10, BLOCKS], ids=["ten blocks", "all blocks"])
async def test_a_part_costs_what_it_is(
    start_peer: StartPeer, certificates: CertificateFiles, before: bool, blocks: int
) -> None:
    relay, tls = start_relay(start_peer, certificates), ClientTls(ca_file=certificates.ca_file)
    spec, wish = ConnectionSpec(uri=relay.uri, tls=tls), replace(PART, blocks=range(blocks))
    async with asyncio.timeout(60), Producer(SCOPE, ProducerOptions(drain_s=0)) as producer:
        await producer.announce_at(relay.uri, tls=tls).wait_announced(10)
        if before:
            async with asyncio.TaskGroup() as group:
                live = group.create_task(retrieve(spec, wish=Wish()))
                await publish_all(producer)
            assert live.result().summary.objects == 2 * LAYERS * BLOCKS
        else:
            await publish_all(producer)
        with counting_sent_octets() as sent:
            taken = await retrieve(spec, wish=wish)

    assert_is(taken.sink, wish)
    summary = taken.summary
    asked = payload_octets(8, blocks)
    assert (summary.duplicates, summary.rejected) == (0, 0)
    assert asked < taken.streams <= 1.03 * asked
    assert sum(sent.values()) <= 1.05 * payload_octets(8, BLOCKS)  # with the manifest
