"""A producer at relays: what is announced there, through losses, revocations and GOAWAY."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvcs.errors import ConfigError
from kvcs.producer import relay as producer_relay
from kvcs.profile.naming import PublicationName
from kvcs.telemetry import Counter
from moqt.aio import ClientTls, MoqtConnection, RequestHandler, Server, ServerTls, connect, serve
from moqt.aio.tls import CertificateFiles
from moqt.aio.tracks import Subscription
from moqt.codepoints import ObjectStatus, PublishDoneCode, RequestErrorCode, SessionErrorCode
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.events import (
    FillEnded,
    ObjectReceived,
    PeerRequestEnded,
    PublishNamespaceReceived,
    RequestId,
)
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import BLOCKS, LAYERS, fill, filled, on_stage

pytestmark = pytest.mark.network

EVERY_OBJECT = [Location(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]
NOBODY_LISTENS = "moqt://127.0.0.1:9/"


class RelayStandIn(RequestHandler):
    """A relay that takes note of namespaces, and can refuse and revoke them."""

    def __init__(self) -> None:
        self.server: Server
        self.present: dict[tuple[MoqtConnection, RequestId], TrackNamespace] = {}
        self.connections: list[MoqtConnection] = []
        self.had_none: list[MoqtConnection] = []
        """The sessions that took the last announcement away."""

        self.refuse = 0
        self.retry_ms: int | None = 1
        self._changed = asyncio.Event()

    @property
    def uri(self) -> str:
        return f"moqt://127.0.0.1:{self.server.address[1]}"

    def connection_made(self, connection: MoqtConnection) -> None:
        self.connections.append(connection)
        self._changed.set()

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        if self.refuse:
            self.refuse -= 1
            connection.session.reject(
                request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "no", retry_ms=self.retry_ms
            )
            return
        connection.session.accept_namespace(request.request_id)
        self.present[connection, request.request_id] = request.prefix
        self._changed.set()

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        self._remove((connection, event.request_id))

    def connection_closed(self, connection: MoqtConnection) -> None:
        for key in [key for key in self.present if key[0] is connection]:
            self._remove(key)
        self._changed.set()

    def _remove(self, key: tuple[MoqtConnection, RequestId]) -> None:
        if self.present.pop(key, None) is not None and not self.present:
            self.had_none.append(key[0])
        self._changed.set()

    async def until(self, *names: PublicationName) -> None:
        """Return when exactly these are announced, once each."""
        wanted = sorted(name.namespace for name in names)
        while sorted(self.present.values()) != wanted:
            self._changed.clear()
            await self._changed.wait()

    async def session(self, number: int) -> MoqtConnection:
        """Return a session by its number, once it has come."""
        while len(self.connections) <= number:
            self._changed.clear()
            await self._changed.wait()
        return self.connections[number]

    async def until_only(self, session: int, *names: PublicationName) -> MoqtConnection:
        """Return when all that is announced is these, over the session of that number."""
        connection = await self.session(session)
        while {holder for holder, _ in self.present} != {connection}:
            self._changed.clear()
            await self._changed.wait()
        await self.until(*names)
        return connection


@asynccontextmanager
async def relaying(files: CertificateFiles) -> AsyncIterator[RelayStandIn]:
    relay = RelayStandIn()
    tls = ServerTls(files.certificate_file, files.key_file)
    relay.server = await serve("127.0.0.1", 0, tls=tls, handler=relay)
    async with relay.server:
        yield relay


async def subscribed(connection: MoqtConnection, track: FullTrackName) -> Subscription:
    return await connection.subscribe(track, fill=LocationFilter.absolute_start(0, 0))


async def read(subscription: Subscription) -> list[Location]:
    """Return the Objects of a track in their order, once it has ended as it should."""
    found = []
    async for event in subscription:
        if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
            found.append(event.location)
        assert not isinstance(event, FillEnded) or event.complete
    assert subscription.ended is not None
    assert subscription.ended.code == PublishDoneCode.TRACK_ENDED
    return sorted(found)


async def test_publications_are_announced_and_served_through_the_session(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        before = scene.open()
        link = scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await link.wait_announced(5)
        after = scene.open()
        await link.wait_announced(5)
        await relay.until(before.name, after.name)
        await filled(after)
        [connection] = relay.server.connections
        assert await read(await subscribed(connection, after.name.track(b"v.raw.s0"))) == (
            EVERY_OBJECT
        )
        await before.abandon("no longer wanted")
        await relay.until(after.name)


async def test_a_lost_relay_is_dialled_again_and_told_the_same_publications(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        handle = scene.open()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await relay.until(handle.name)
        await relay.connections[0].close(reason="restarting")
        await relay.until()
        await relay.until(handle.name)

        assert len(relay.connections) == 2
        assert scene.counters[Counter.RELAY_CONNECTS] == 2


def deaf(relay: RelayStandIn) -> Any:
    """Have all that is sent to a relay get lost, for as long as the block lasts."""
    return mock.patch.object(relay.server._listener, "_route", return_value=None)


@pytest.mark.aioquic
async def test_a_relay_that_is_gone_without_a_word_is_dialled_again(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_relay, "SILENCE_S", 0.2)
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        handle = scene.open()
        link = scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await relay.until(handle.name)
        lost = link.connection
        relay.connections[0]._transport.abandon()
        await relay.until_only(1, handle.name)
        await link.wait_announced(5)

        assert link.connection is not lost


@pytest.mark.aioquic
async def test_a_relay_that_was_only_deaf_for_a_while_is_not_left(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_relay, "SILENCE_S", 0.2)
    async with (
        on_stage(certificates, connect_timeout_s=0.2) as scene,
        relaying(certificates) as relay,
    ):
        before = scene.open()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await relay.until(before.name)
        with deaf(relay):
            await scene.counters.reached(Counter.RELAY_FAILURES, 1)
        after = scene.open()
        await relay.until(before.name, after.name)

        assert {holder for holder, _ in relay.present} == {relay.connections[0]}


async def test_a_namespace_that_was_refused_or_revoked_is_announced_again(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        relay.refuse = 1
        handle = scene.open()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await relay.until(handle.name)
        [(connection, request_id)] = relay.present
        connection.session.cancel(request_id)
        connection.wake()
        relay.present.clear()
        await relay.until(handle.name)

        assert len(relay.connections) == 1


async def test_a_relay_that_is_not_there_does_not_keep_the_producer_from_working(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, connect_timeout_s=0.2) as scene:
        link = scene.producer.announce_at(NOBODY_LISTENS, tls=scene.spec.tls)
        handle = scene.open()
        async with connect(scene.spec.uri, tls=scene.spec.tls) as consumer:
            await filled(handle)
            subscription = await subscribed(consumer, handle.name.track(b"k.raw.s0"))
            assert await read(subscription) == EVERY_OBJECT
        with pytest.raises(TimeoutError):
            await link.wait_announced(0.3)
        assert scene.counters[Counter.RELAY_FAILURES] >= 1


async def test_an_unusable_relay_uri_or_ca_file_is_named_at_once(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with on_stage(certificates) as scene:
        with pytest.raises(ConfigError, match="http://x"):
            scene.producer.announce_at("http://x")
        with pytest.raises(ConfigError, match=r"missing\.pem"):
            scene.producer.announce_at("moqt://x:1", tls=ClientTls(tmp_path / "missing.pem"))


# -- GOAWAY --------------------------------------------------------------------------------------


async def test_a_relay_that_goes_away_is_left_once_another_session_stands_and_nobody_is_cut_off(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        handle = scene.open()
        await handle.add_segment()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        old = await relay.until_only(0, handle.name)
        track = handle.name.track(b"k.raw.s0")
        served = await subscribed(old, track)
        await fill(handle, range(2))
        old.goaway(timeout_ms=20_000)
        new = await relay.until_only(1, handle.name)

        assert relay.had_none == []
        assert old.closed is None
        await fill(handle, range(2, LAYERS))
        await handle.finish()
        assert await read(served) == EVERY_OBJECT
        await old.wait_closed()
        assert old.closed is not None
        assert (old.closed.code, old.closed.by_peer) == (SessionErrorCode.NO_ERROR, True)
        assert await read(await subscribed(new, track)) == EVERY_OBJECT
        assert scene.counters[Counter.RELAY_GOAWAYS] == 1


async def test_a_relay_can_send_the_producer_elsewhere_and_a_loss_there_brings_it_home(
    certificates: CertificateFiles,
) -> None:
    async with (
        on_stage(certificates) as scene,
        relaying(certificates) as home,
        relaying(certificates) as elsewhere,
    ):
        handle = scene.open()
        link = scene.producer.announce_at(home.uri, tls=scene.spec.tls)
        old = await home.until_only(0, handle.name)
        old.goaway(elsewhere.uri, 20_000)
        there = await elsewhere.until_only(0, handle.name)
        await home.until()
        await old.wait_closed()
        assert link.connection is not None
        assert link.connection.peer_address == elsewhere.server.address
        assert link.announced == {handle.name.namespace}

        await there.close(reason="restarting")
        await home.until_only(1, handle.name)


async def test_the_old_session_stands_until_there_is_another_and_follows_what_is_withdrawn(
    certificates: CertificateFiles,
) -> None:
    async with (
        on_stage(certificates, connect_timeout_s=0.3) as scene,
        relaying(certificates) as relay,
    ):
        kept, given_up = scene.open(), scene.open()
        link = scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        await relay.until(kept.name, given_up.name)
        old = relay.connections[0]
        old.goaway(NOBODY_LISTENS, 20_000)
        await scene.counters.reached(Counter.RELAY_GOAWAYS, 1)
        await given_up.abandon("no longer wanted")
        await relay.until_only(0, kept.name)
        added = scene.open()
        await scene.counters.reached(Counter.RELAY_FAILURES, 1)
        await relay.until_only(1, kept.name, added.name)
        await link.wait_announced(5)

        assert relay.had_none == []
        await old.wait_closed()


async def test_a_place_where_it_may_not_be_sent_makes_the_producer_come_back(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        handle = scene.open()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        old = await relay.until_only(0, handle.name)
        old.goaway("https://relay.example/", 20_000)
        await relay.until_only(1, handle.name)

        assert scene.counters[Counter.RELAY_FAILURES] == 0


async def test_a_relay_where_nothing_is_announced_is_left_and_dialled_again(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        old = await relay.session(0)
        old.goaway()
        await old.wait_closed()
        handle = scene.open()
        await relay.until_only(1, handle.name)


async def test_what_was_refused_while_the_old_session_had_it_is_soon_announced_again(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene, relaying(certificates) as relay:
        handle = scene.open()
        scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
        old = await relay.until_only(0, handle.name)
        relay.refuse, relay.retry_ms = 1, None
        old.goaway(timeout_ms=20_000)
        async with asyncio.timeout(10):
            await relay.until_only(1, handle.name)


async def test_a_producer_that_stops_closes_the_session_it_is_leaving_too(
    certificates: CertificateFiles,
) -> None:
    async with relaying(certificates) as relay:
        async with on_stage(certificates, drain_s=5.0) as scene:
            handle = scene.open()
            await handle.add_segment()
            scene.producer.announce_at(relay.uri, tls=scene.spec.tls)
            old = await relay.until_only(0, handle.name)
            served = await subscribed(old, handle.name.track(b"k.raw.s0"))
            old.goaway(timeout_ms=20_000)
            await relay.until_only(1, handle.name)
        assert [event async for event in served] == []
        assert served.ended is not None
        assert served.ended.code == PublishDoneCode.INTERNAL_ERROR
        for connection in relay.connections:
            await connection.wait_closed()
            assert connection.closed is not None
            assert connection.closed.code == SessionErrorCode.NO_ERROR
