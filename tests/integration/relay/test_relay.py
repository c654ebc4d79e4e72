"""The relay between sessions over real QUIC: sharing, faults, limits, and its own end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    ServerTls,
    Subscription,
    connect,
    open_connection,
)
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.server import Relay, RelayOptions
from moqt.session.events import (
    FillEnded,
    NamespaceAppeared,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    PeerRequestEnded,
    RangeMarked,
    RequestId,
    SubgroupClosed,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter

pytestmark = pytest.mark.network

NAME = FullTrackName.of("kvcs-1", b"\x00scope/", "k.raw.s0")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0


class Origin(RequestHandler):
    """A publisher of some Tracks, which counts what is asked of it."""

    def __init__(self, *tracks: LocalTrack) -> None:
        self.tracks = {track.name: track for track in tracks}
        self.subscribed: list[SubscribeReceived] = []
        self.ended: list[RequestId] = []
        self.news = asyncio.Event()

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        self.subscribed.append(request)
        track = self.tracks.get(request.track)
        if track is None:
            super().subscribe_received(connection, request)
        else:
            connection.session.accept_subscribe(request.request_id, track)
        self.news.set()

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        self.ended.append(event.request_id)
        self.news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


@dataclass
class Stage:
    """A relay, and how to reach it."""

    relay: Relay
    uri: str
    tls: ClientTls

    def client(self, handler: RequestHandler | None = None, **options: Any) -> Any:
        return connect(self.uri, tls=self.tls, handler=handler, drain_s=1.0, **options)

    @asynccontextmanager
    async def origin(self, *tracks: LocalTrack) -> AsyncIterator[Origin]:
        handler = Origin(*tracks)
        async with self.client(handler) as connection:
            for namespace in {track.name.namespace for track in tracks}:
                await connection.publish_namespace(namespace)
            yield handler


@asynccontextmanager
async def staged(files: CertificateFiles, **options: Any) -> AsyncIterator[Stage]:
    async with asyncio.timeout(50), Relay(RelayOptions(**options)) as relay:
        tls = ServerTls(files.certificate_file, files.key_file)
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        yield Stage(relay, f"moqt://127.0.0.1:{port}/", ClientTls(ca_file=files.ca_file))


def payload(group: int, number: int, octets: int = 3000) -> bytes:
    return bytes([group % 251, number % 251]) * (octets // 2)


def publish(track: LocalTrack, group: int, count: int = 4, octets: int = 3000) -> None:
    subgroup = track.open_subgroup(group, 0, holds_end_of_group=True)
    for number in range(count):
        subgroup.publish(number, payload(group, number, octets))
    subgroup.close()


async def everything(connection: MoqtConnection, track: FullTrackName) -> Counter[Location]:
    """Return how often each Object of a Track came, to its end."""
    subscription = await connection.subscribe(track, fill=FROM_START)
    return await rest_of(subscription)


async def rest_of(subscription: Subscription) -> Counter[Location]:
    found: Counter[Location] = Counter()
    async with asyncio.timeout(PATIENCE_S):
        async for event in subscription:
            if isinstance(event, ObjectReceived):
                found[event.location] += 1
                expected = payload(*_place(event.location), len(event.payload))
                assert event.payload == expected
    return found


def _place(location: Location) -> tuple[int, int]:
    return location.group, location.object


def once(groups: int, count: int = 4) -> Counter[Location]:
    return Counter(Location(group, number) for group in range(groups) for number in range(count))


async def test_sixteen_subscribers_share_one_upstream_subscription(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates) as stage, stage.origin(track) as origin:
        connections = [await open_connection(stage.uri, tls=stage.tls) for _ in range(16)]
        publish(track, 0)
        tasks = [asyncio.create_task(everything(c, NAME)) for c in connections[:8]]
        await origin.until(lambda: origin.subscribed)
        for group in range(1, 5):
            publish(track, group)
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(everything(c, NAME)) for c in connections[8:]]
        publish(track, 5)
        track.end()
        results = await asyncio.gather(*tasks)
        for connection in connections:
            await connection.close(drain_s=0.1)

    assert all(found == once(6) for found in results)
    assert len(origin.subscribed) == 1


async def test_the_first_octets_of_an_object_are_passed_on_before_the_last_have_come(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates) as stage, stage.origin(track), stage.client() as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START, pieces=True)
        subgroup = track.open_subgroup(0, 0)
        obj = subgroup.begin(0, 6000)
        subgroup.extend(obj, bytes(2000))
        got = 0
        async for event in subscription:
            got += len(event.data) if isinstance(event, ObjectPiece) else 0
            if got == 2000:
                break
        subgroup.extend(obj, bytes(4000))
        subgroup.close()
        track.end()
        async for event in subscription:
            got += len(event.data) if isinstance(event, ObjectPiece) else 0

    assert got == 6000
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED


async def test_a_publisher_lost_in_the_middle_of_an_object_is_a_reset_and_an_error(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates) as stage, stage.client() as connection:
        origin = await open_connection(stage.uri, tls=stage.tls, handler=Origin(track))
        await origin.publish_namespace(NAME.namespace)
        subscription = await connection.subscribe(NAME, fill=FROM_START, pieces=True)
        subgroup = track.open_subgroup(0, 0)
        subgroup.publish(0, payload(0, 0))
        obj = subgroup.begin(1, 6000)
        subgroup.extend(obj, bytes(2000))
        events = []
        async for event in subscription:
            events.append(event)
            half = sum(len(e.data) for e in events if isinstance(e, ObjectPiece)) == 5000
            if half and origin.closed is None:
                await origin.close(drain_s=0)
        began = [event.location for event in events if isinstance(event, ObjectBegan)]
        [closed] = [event for event in events if isinstance(event, SubgroupClosed)]

        assert began == [Location(0, 0), Location(0, 1)]
        assert not closed.fin
        assert closed.code is StreamErrorCode.INTERNAL_ERROR
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.INTERNAL_ERROR
        # What came whole can still be fetched, and what did not is not said to be absent.
        fetch = await connection.fetch(NAME, location_filter=FROM_START)
        found = [e.location async for e in fetch if isinstance(e, ObjectReceived)]
        assert found == [Location(0, 0)]


async def test_a_finished_track_is_served_when_its_publisher_is_gone(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates) as stage, stage.client() as connection:
        async with stage.origin(track):
            publish(track, 0)
            publish(track, 1)
            track.end()
            assert await everything(connection, NAME) == once(2)
        found = await connection.subscribe_namespace(NAME.namespace)

        assert await anext(found) == NamespaceAppeared(
            request_id=found.request_id, namespace=NAME.namespace
        )
        assert await everything(connection, NAME) == once(2)
        fetch = await connection.fetch(NAME, location_filter=FROM_START)
        fetched = [event async for event in fetch]
        assert not [event for event in fetched if isinstance(event, RangeMarked)]
        assert Counter(e.location for e in fetched if isinstance(e, ObjectReceived)) == once(2)


async def test_a_track_is_received_no_more_a_while_after_its_last_subscriber_left(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with (
        staged(certificates, linger_s=0.05) as stage,
        stage.origin(track) as origin,
        stage.client() as connection,
    ):
        publish(track, 0)
        subscription = await connection.subscribe(NAME, fill=FROM_START)
        async for event in subscription:
            if isinstance(event, FillEnded):
                break
        subscription.cancel()
        await origin.until(lambda: origin.ended)
        publish(track, 1)
        track.end()

        assert await everything(connection, NAME) == once(2)
    assert len(origin.subscribed) == 2


async def test_a_subscription_waits_for_its_publisher_as_long_as_it_says(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    publish(track, 0)
    track.end()
    async with staged(certificates) as stage, stage.client() as connection:
        with pytest.raises(RequestRejected) as at_once:
            await connection.subscribe(NAME)
        with pytest.raises(RequestRejected) as later:
            await waiting_subscribe(connection, 100)
        waits = asyncio.create_task(waiting_subscribe(connection, 20_000))
        await asyncio.sleep(0)
        async with stage.origin(track):
            subscription = await waits
            assert await rest_of(subscription) == once(1)

    assert at_once.value.code is RequestErrorCode.DOES_NOT_EXIST
    assert later.value.code is RequestErrorCode.TIMEOUT


async def waiting_subscribe(connection: MoqtConnection, patience_ms: int) -> Subscription:
    """Subscribe with RENDEZVOUS_TIMEOUT, which no argument of ours states."""
    session: Any = connection.session
    inner = session._checked

    def checked(values: dict[P, Any], *others: Any) -> Any:
        return inner({**values, P.RENDEZVOUS_TIMEOUT: patience_ms}, *others)

    session._checked = checked
    try:
        task = asyncio.ensure_future(connection.subscribe(NAME, fill=FROM_START))
        await asyncio.sleep(0)
    finally:
        session._checked = inner
    return await task


async def test_a_namespace_of_two_publishers_is_withdrawn_with_the_last(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    async with staged(certificates) as stage, stage.client() as connection:
        found = await connection.subscribe_namespace(TrackNamespace())
        async with stage.origin(track):
            async with stage.origin(track):
                assert isinstance(await anext(found), NamespaceAppeared)
            async with stage.client() as other:  # a round trip later nothing has been told
                await other.publish_namespace(TrackNamespace.of("other"))
                assert await anext(found) == NamespaceAppeared(
                    request_id=found.request_id, namespace=TrackNamespace.of("other")
                )
        gone = {(await anext(found)).namespace for _ in range(2)}
        assert gone == {NAME.namespace, TrackNamespace.of("other")}


async def test_a_second_version_of_an_object_makes_the_track_malformed_and_nothing_else(
    certificates: CertificateFiles,
) -> None:
    one, two = LocalTrack(NAME), LocalTrack(NAME)
    sound = LocalTrack(FullTrackName.of("sound", "t"))
    async with (
        staged(certificates) as stage,
        stage.client() as connection,
        stage.origin(one, sound) as first,
        stage.origin(two) as second,
    ):
        subscription = await connection.subscribe(NAME, fill=FROM_START)
        await first.until(lambda: first.subscribed)
        await second.until(lambda: second.subscribed)
        subgroup, other = one.open_subgroup(0, 0), two.open_subgroup(0, 0)
        subgroup.publish(0, b"one version")
        async for event in subscription:
            if isinstance(event, ObjectReceived):
                other.publish(0, b"two version")
        assert subscription.ended is not None
        assert subscription.ended.code is PublishDoneCode.MALFORMED_TRACK
        publish(sound, 0)
        sound.end()
        assert await everything(connection, sound.name) == once(1)


async def test_the_oldest_publication_makes_room(certificates: CertificateFiles) -> None:
    tracks = [LocalTrack(FullTrackName.of("p", str(number), "t")) for number in range(3)]
    async with (
        staged(certificates, cache_octets=20_000, linger_s=0) as stage,
        stage.origin(*tracks),
        stage.client() as connection,
    ):
        for track in tracks:
            publish(track, 0)
            track.end()
            assert await everything(connection, track.name) == once(1)

        assert stage.relay.octets_held <= 24_000


async def test_who_falls_too_far_behind_is_cut_off_and_delays_nobody(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    small = QuicSettings(stream_window=1 << 16, connection_window=1 << 17)
    async with (
        staged(certificates, max_behind_octets=300_000) as stage,
        stage.origin(track),
        stage.client(quic=small) as slow,
        stage.client() as quick,
    ):
        lazy = await slow.subscribe(NAME)
        eager = await quick.subscribe(NAME)
        for group in range(20):
            publish(track, group, octets=30_000)
            for number in range(4):
                event = await anext(eager)
                assert isinstance(event, ObjectReceived)
                assert event.location == Location(group, number)
        await lazy.finished.wait()
        track.end()
        assert await rest_of(eager) == Counter()

    assert lazy.ended is not None
    assert lazy.ended.code is PublishDoneCode.TOO_FAR_BEHIND


async def test_more_namespaces_than_a_session_may_announce_are_refused(
    certificates: CertificateFiles,
) -> None:
    async with staged(certificates, max_namespaces=1) as stage, stage.client() as connection:
        announced = await connection.publish_namespace(TrackNamespace.of("a"))
        with pytest.raises(RequestRejected) as refused:
            await connection.publish_namespace(TrackNamespace.of("b"))

    assert refused.value.code is RequestErrorCode.EXCESSIVE_LOAD
    assert announced.gone.is_set()  # with the session


async def test_a_relay_asks_another_one_for_what_nobody_publishes_here(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    publish(track, 0)
    track.end()
    async with staged(certificates) as upper, staged(certificates) as lower, upper.origin(track):
        lower.relay.ask_at(upper.uri, tls=upper.tls)
        async with lower.client() as connection:
            found = await connection.subscribe_namespace(TrackNamespace())
            assert isinstance(await anext(found), NamespaceAppeared)
            assert await everything(connection, NAME) == once(1)
        # And the other way round: what is published below is found above.
        own = LocalTrack(FullTrackName.of("below", "t"))
        publish(own, 0)
        own.end()
        async with lower.origin(own), upper.client() as connection:
            found = await connection.subscribe_namespace(own.name.namespace)
            assert isinstance(await anext(found), NamespaceAppeared)
            assert await everything(connection, own.name) == once(1)


async def test_a_relay_that_stops_sends_its_sessions_elsewhere(
    certificates: CertificateFiles,
) -> None:
    async with staged(certificates) as stage, stage.client() as connection:
        closing = asyncio.create_task(
            stage.relay.close(drain_s=5.0, new_session_uri="moqt://other:4443/")
        )
        await connection.wait_going_away()
        assert connection.going_away is not None
        assert connection.going_away.new_session_uri == "moqt://other:4443/"
        await connection.close()
        async with asyncio.timeout(4.0):
            await closing


async def test_who_leaves_before_the_publisher_has_answered_is_in_nobodys_way(
    certificates: CertificateFiles,
) -> None:
    track = LocalTrack(NAME)
    publish(track, 0)
    track.end()
    held: list[tuple[MoqtConnection, SubscribeReceived]] = []

    class Slow(Origin):
        def subscribe_received(
            self, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            self.subscribed.append(request)
            held.append((connection, request))
            self.news.set()

    slow = Slow(track)
    async with staged(certificates, linger_s=0) as stage, stage.client(slow) as origin:
        await origin.publish_namespace(NAME.namespace)
        async with stage.client() as hasty:
            task = asyncio.create_task(hasty.subscribe(NAME))
            await slow.until(lambda: held)
            task.cancel()
        async with stage.client() as patient:
            waits = asyncio.create_task(everything(patient, NAME))
            with pytest.raises(RequestRejected):  # a round trip later it waits at the relay
                await patient.subscribe(FullTrackName.of("no", "such"))
            for connection, request in held:
                connection.session.accept_subscribe(request.request_id, track)
                connection.wake()
            assert await waits == once(1)
