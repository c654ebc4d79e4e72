"""What a part of a finished cache costs on the wire: little more than it is (KVCS Section 5.3)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvcs.consumer.retrieval import ConnectionSpec
from moqt.aio import ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.session.config import SessionConfig
from tests.integration.kvcs.parts import (
    BLOCKS,
    assert_is,
    payload_octets,
    publish_all,
    retrieve,
)
from tests.integration.kvcs.scene import on_stage
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = [pytest.mark.network, pytest.mark.aioquic]

FILTERS = pytest.mark.parametrize("filters", [True, False], ids=["filters", "no filters"])


@asynccontextmanager
async def at_producer(files: CertificateFiles, *, filters: bool) -> AsyncIterator[ConnectionSpec]:
    """A producer that has the whole cache."""
    config = SessionConfig() if filters else SessionConfig(max_filter_ranges=0)
    async with on_stage(files) as scene:
        tls = ServerTls(files.certificate_file, files.key_file)
        host, port = await scene.producer.listen("127.0.0.1", 0, tls=tls, config=config)
        await publish_all(scene.producer)
        yield replace(scene.spec, uri=f"moqt://{host}:{port}/")


@asynccontextmanager
async def at_relay(files: CertificateFiles, *, filters: bool) -> AsyncIterator[ConnectionSpec]:
    """A relay that asks the producer behind it."""
    config = SessionConfig() if filters else SessionConfig(max_filter_ranges=0)
    async with (
        relaying(files, config=config) as stage,
        producing_behind(stage, files) as scene,
    ):
        await publish_all(scene.producer)
        yield stage.nearest


PLACES = pytest.mark.parametrize("place", [at_producer, at_relay], ids=["direct", "relay"])


@PLACES
@FILTERS
async def test_a_part_costs_what_it_is_or_what_the_peer_sends_at_least(
    certificates: CertificateFiles, place: Any, filters: bool
) -> None:
    async with place(certificates, filters=filters) as spec:
        taken = await retrieve(spec)

    assert_is(taken.sink)
    # Without filters at the peer there are no less than whole Groups to be had, of which the last
    # one is left when what is wanted of it has come.
    blocks = 10 if filters else BLOCKS
    most = payload_octets(8, blocks)
    assert taken.summary.unwanted <= 2 * 8 * (blocks - 10)
    assert (taken.summary.duplicates, taken.summary.rejected) == (0, 0)
    assert payload_octets(8, 10) < taken.streams <= 1.03 * most
    assert taken.datagrams <= 1.1 * most  # some of it twice, where a machine is busy
