"""Holders kept listed in the background, at an index that comes and goes."""

import asyncio
import time

import pytest

from kvcs.kvsp.http.directory import Directory, DirectoryLimits
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.registrar import Registrar
from kvcs.telemetry import Counter
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.integration.http.scene import COMPAT, PATIENCE_S, READER, SCOPE, Stage, on_stage
from tests.integration.http.test_index import ID, KEYS, publication
from tests.integration.kvcs.scene import Noticing

pytestmark = pytest.mark.network


async def covered(stage: Stage) -> list[int | None]:
    async with stage.index(READER) as index:
        longest = await index.longest(COMPAT, KEYS)
    return [one.covers for one in longest.candidates]


async def test_what_is_held_is_listed_and_what_is_released_is_not(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage:
        async with Registrar(stage.index()) as registrar:
            registrar.hold(COMPAT, ID, publication(3))
            registrar.hold(COMPAT, b"i" * 16, publication(5))
            assert await registrar.settled(PATIENCE_S)
            assert await covered(stage) == [5, 3]

            registrar.hold(COMPAT, ID, publication(7))
            registrar.release(COMPAT, b"i" * 16)
            assert await registrar.settled(PATIENCE_S)
            assert await covered(stage) == [7]
        # At the end of the block everything is withdrawn.
        assert await covered(stage) == []


async def test_a_lease_is_renewed_for_as_long_as_it_is_held(
    certificates: CertificateFiles,
) -> None:
    directory = Directory(DirectoryLimits(max_lease_s=0.3))
    async with (
        on_stage(certificates, directory=directory) as stage,
        Registrar(stage.index(), lease_s=60.0) as registrar,
    ):
        registrar.hold(COMPAT, ID, publication(3))
        # A registration, and the renewals of several leases.
        await stage.counters.reached(Counter.HTTP_REQUESTS, 9)

        assert await covered(stage) == [3]
        assert stage.counters[Counter.HOLDERS_EXPIRED] == 0


async def test_an_index_that_forgot_everything_is_told_again(
    certificates: CertificateFiles,
) -> None:
    directory = Directory(DirectoryLimits(max_lease_s=0.3))
    async with (
        on_stage(certificates, directory=directory) as stage,
        Registrar(stage.index(), lease_s=60.0) as registrar,
    ):
        registrar.hold(COMPAT, ID, publication(3))
        await stage.counters.reached(Counter.HOLDERS_REGISTERED, 1)
        [subject] = {ref[0] for ref in directory._entries}
        assert directory.withdraw(subject, ID, (SCOPE.scope_id, COMPAT))

        await stage.counters.reached(Counter.HOLDERS_REGISTERED, 2)
        assert await covered(stage) == [3]


async def test_a_dead_index_keeps_nobody_waiting(certificates: CertificateFiles) -> None:
    counters = Noticing()
    tls = ClientTls(ca_file=certificates.ca_file)
    client = IndexClient("https://127.0.0.1:1", "t" * 32, SCOPE.scope_id, tls=tls)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        async with Registrar(client, withdraw_s=0.1, counters=counters) as registrar:
            for n in range(1000):
                registrar.hold(COMPAT, n.to_bytes(16, "big"), publication(3))
            said = time.monotonic()
            assert not await registrar.settled(0.0)
            await counters.reached(Counter.INDEX_FAILURES, 2)

    assert said - began < 1.0
    # Asked rarely, however much there is to say: the second time after a pause.
    assert counters[Counter.INDEX_FAILURES] == 2


async def test_an_index_that_comes_back_is_told_what_was_said_meanwhile(
    certificates: CertificateFiles,
) -> None:
    counters = Noticing()
    async with on_stage(certificates) as first:
        host, port = first.base.removeprefix("https://").split(":")
        client = first.index()
    async with Registrar(client, counters=counters) as registrar:
        registrar.hold(COMPAT, ID, publication(3))
        await counters.reached(Counter.INDEX_FAILURES, 1)
        async with on_stage(certificates, port=int(port)) as stage:
            assert await registrar.settled(PATIENCE_S)
            assert await covered(stage) == [3]
            await stage.service.close(0.0)
    assert host == "127.0.0.1"


async def test_a_holder_that_the_index_never_takes_does_not_hold_up_the_others(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage, Registrar(stage.index()) as registrar:
        registrar.hold(b"another model".ljust(32), ID, publication(3))  # its URI says otherwise
        registrar.hold(COMPAT, b"i" * 16, publication(5))
        assert await registrar.settled(PATIENCE_S)
        assert await covered(stage) == [5]
