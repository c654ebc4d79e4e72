"""Sessions over real QUIC on loopback: what sessions back to back cannot show."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    Server,
    ServerTls,
    Subscription,
    connect,
    engine,
    open_connection,
    serve,
)
from moqt.aio import client as client_module
from moqt.aio import tracks as tracks_module
from moqt.aio.errors import AlpnMismatchError, TlsAlertError
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.codepoints import (
    ObjectStatus,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
)
from moqt.codepoints import ParameterType as P
from moqt.errors import RequestRejected, SessionClosed, UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    FillEnded,
    NamespaceAppeared,
    NamespaceGone,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    PeerRequestEnded,
    PublishNamespaceReceived,
    PublishReceived,
    SubgroupClosed,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
    TracksUpdated,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters
from tests.session.pair import make_track, payload_of, publish_group, whole

pytestmark = pytest.mark.network

NAME = FullTrackName.of("kvcs-1", "scope", "k.raw.s0")
OTHER = FullTrackName.of("kvcs-1", "scope", "other")
FROM_START = LocationFilter.absolute_start(0, 0)
FILL_FROM_START = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START}))
PATIENCE_S = 20.0
SMALL = QuicSettings(stream_window=64 << 10, connection_window=256 << 10)


class Host(RequestHandler):
    """Serves what it is given, and notes what happens."""

    def __init__(self) -> None:
        self.tracks: dict[FullTrackName, LocalTrack] = {}
        self.directory = NamespaceDirectory()
        self.silent = False
        self.raises = False
        self.announced: set[TrackNamespace] = set()
        self.ended: list[PeerRequestEnded] = []
        self.closed: list[MoqtConnection] = []
        self.asked: list[SubscribeReceived] = []
        self.offered: list[Subscription] = []
        self.wishes: list[SubscribeTracksReceived | TracksUpdated] = []
        self._news = asyncio.Event()
        self._announcements: dict[int, TrackNamespace] = {}

    def publish(self, track: LocalTrack) -> LocalTrack:
        self.tracks[track.name] = track
        return track

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that a call of this handler brings about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def _track(self, connection: MoqtConnection, request: Any) -> LocalTrack | None:
        self._news.set()
        if self.raises:
            raise RuntimeError("the handler fails")
        track = self.tracks.get(request.track)
        if track is None and not self.silent:
            connection.session.reject(request.request_id, RequestErrorCode.DOES_NOT_EXIST)
        return None if self.silent else track

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        self.asked.append(request)
        if (track := self._track(connection, request)) is not None:
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        if (track := self._track(connection, request)) is not None:
            connection.session.accept_fetch(request.request_id, track)

    def track_status_received(
        self, connection: MoqtConnection, request: TrackStatusReceived
    ) -> None:
        if (track := self._track(connection, request)) is not None:
            connection.session.accept_track_status(request.request_id, track)

    def publish_received(self, connection: MoqtConnection, request: PublishReceived) -> None:
        if not self.silent and (offered := connection.accept_publish(request)) is not None:
            self.offered.append(offered)
        self._news.set()

    def subscribe_tracks_received(
        self, connection: MoqtConnection, request: SubscribeTracksReceived
    ) -> None:
        connection.session.accept_tracks(request.request_id)
        self.wishes.append(request)
        for track in self.tracks.values():
            if connection.session.wants_track(request.request_id, track):
                connection.session.publish(track, wanted_by=request.request_id)
        self._news.set()

    def tracks_updated(self, connection: MoqtConnection, event: TracksUpdated) -> None:
        self.wishes.append(event)
        self._news.set()

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        if not self.silent:
            connection.session.accept_namespaces(request.request_id, self.directory)

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        if not self.silent:
            self.announced.add(request.prefix)
            self._announcements[request.request_id] = request.prefix
            connection.session.accept_namespace(request.request_id)
        self._news.set()

    def request_ended(self, connection: MoqtConnection, event: PeerRequestEnded) -> None:
        self.ended.append(event)
        self.announced.discard(self._announcements.get(event.request_id, TrackNamespace()))
        self._news.set()

    def connection_closed(self, connection: MoqtConnection) -> None:
        self.closed.append(connection)
        self._news.set()


Dial = Callable[..., AbstractAsyncContextManager[MoqtConnection]]


class Bench:
    """A server, its handler, and a way to dial it."""

    def __init__(self, server: Server, host: Host, certificates: CertificateFiles) -> None:
        self.server = server
        self.host = host
        self.tls = ClientTls(ca_file=certificates.ca_file)

    @property
    def uri(self) -> str:
        return f"moqt://localhost:{self.server.address[1]}/kv?tenant=a"

    def dial(self, **options: Any) -> AbstractAsyncContextManager[MoqtConnection]:
        return connect(self.uri, tls=self.tls, **options)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def serving(
    certificates: CertificateFiles, *, port: int = 0, host: Host | None = None, **options: Any
) -> AsyncIterator[Bench]:
    host = host or Host()
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    async with await serve("127.0.0.1", port, tls=tls, handler=host, **options) as server:
        yield Bench(server, host, certificates)


@pytest_asyncio.fixture
async def bench(certificates: CertificateFiles) -> AsyncIterator[Bench]:
    async with serving(certificates) as made:
        yield made


async def patiently(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def objects(stream: Any, count: int | None = None) -> list[Location]:
    """Iterate to the end, or until ``count`` Objects have come; return where they stand."""
    found: list[Location] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if isinstance(event, ObjectReceived):
                if event.status is ObjectStatus.NORMAL:
                    assert event.payload == payload_of(event.location, len(event.payload))
                    found.append(event.location)
                if len(found) == count:
                    break
    return found


# -- end to end ------------------------------------------------------------------------------------


async def test_a_subscription_brings_each_object_once_while_they_are_made(bench: Bench) -> None:
    track = bench.host.publish(make_track(3, 20, octets=30_000, ended=False, name=NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START)
        assert (subscription.largest, subscription.fill_expected) == (Location(2, 19), True)
        reading = asyncio.create_task(objects(subscription))
        for group in range(3, 8):
            publish_group(track, group, 20, octets=30_000)
            await asyncio.sleep(0)
        track.end()

        assert sorted(await reading) == whole(8, 20)
        assert subscription.ended is not None
        assert subscription.ended.complete
        assert subscription.finished.is_set()


async def test_an_object_is_passed_on_in_pieces_before_it_is_whole(bench: Bench) -> None:
    track = bench.host.publish(make_track(1, 2, octets=30_000, ended=False, name=NAME))
    async with bench.dial(quic=SMALL) as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START, pieces=True)
        subgroup = track.open_subgroup(1)
        payload = payload_of(Location(1, 0), 1_000_000)
        begun = subgroup.begin(0, len(payload))
        subgroup.extend(begun, payload[:50_000])
        found: dict[int, bytearray] = {}
        ends: list[bool] = []
        half = False
        async with asyncio.timeout(PATIENCE_S):
            async for event in subscription:
                match event:
                    case ObjectBegan():
                        found[event.stream_id] = found.get(event.stream_id, bytearray())
                    case ObjectPiece():
                        found[event.stream_id] += event.data
                    case SubgroupClosed():
                        ends.append(event.fin)
                if not half and any(len(data) == 50_000 for data in found.values()):
                    half = True  # the rest is made once the first part has come
                    subgroup.extend(begun, payload[50_000:])
                    subgroup.close()
                    track.end()

    past = payload_of(Location(0, 0), 30_000) + payload_of(Location(0, 1), 30_000)
    assert sorted(map(bytes, found.values())) == sorted([past, payload])
    assert (ends, half) == ([True], True)
    assert subscription.ended is not None
    assert subscription.ended.complete


async def test_a_sink_is_called_for_every_event_and_nothing_is_queued(bench: Bench) -> None:
    bench.host.publish(make_track(2, 50, octets=10_000, name=NAME))
    seen: list[Any] = []
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START, sink=seen.append)
        await patiently(subscription.finished.wait())

    assert [e.location for e in seen if isinstance(e, ObjectReceived)] == whole(2, 50)
    assert [e.complete for e in seen if isinstance(e, FillEnded)] == [True]


async def test_a_fetch_brings_its_range_and_tells_its_end(bench: Bench) -> None:
    bench.host.publish(make_track(5, 10, octets=5_000, name=NAME))
    async with bench.dial() as connection:
        fetch = await connection.fetch(NAME, location_filter=LocationFilter.group_end(1, 5, 2))

        assert await objects(fetch) == whole(5, 10)[15:30]
        assert (fetch.end_location, fetch.end_of_track) == (Location(2, 9), False)
        assert fetch.ended is not None
        assert fetch.ended.complete
        with pytest.raises(RequestRejected) as refused:
            await connection.fetch(NAME, location_filter=LocationFilter.absolute_start(9, 0))
        assert refused.value.code == RequestErrorCode.INVALID_RANGE


async def test_a_track_can_be_asked_about_without_subscribing(bench: Bench) -> None:
    bench.host.publish(make_track(2, 3, name=NAME, properties=((0x3800, 7),)))
    async with bench.dial() as connection:
        status = await connection.track_status(NAME)
        with pytest.raises(RequestRejected) as refused:
            await connection.track_status(OTHER)

    assert (status.largest, status.track_properties) == (Location(1, 2), ((0x3800, 7),))
    assert refused.value.code == RequestErrorCode.DOES_NOT_EXIST


async def test_namespaces_appear_and_go(bench: Bench) -> None:
    bench.host.directory.add(NAME.namespace)
    async with bench.dial() as connection:
        found = await connection.subscribe_namespace(TrackNamespace.of("kvcs-1"))
        first = await patiently(anext(found))
        bench.host.directory.remove(NAME.namespace)
        second = await patiently(anext(found))
        found.cancel()
        assert [e async for e in found] == []

    assert isinstance(first, NamespaceAppeared)
    assert isinstance(second, NamespaceGone)
    assert first.namespace == second.namespace == NAME.namespace


async def test_an_announcement_is_withdrawn_or_revoked_or_lost(bench: Bench) -> None:
    host = bench.host
    async with bench.dial() as connection:
        first = await connection.publish_namespace(TrackNamespace.of("a"))
        second = await connection.publish_namespace(TrackNamespace.of("b"))
        await connection.publish_namespace(TrackNamespace.of("c"))
        assert len(host.announced) == 3
        first.withdraw()
        await host.until(lambda: len(host.announced) == 2)
        [served] = bench.server.connections
        served.session.cancel(second.request_id)
        served.wake()
        await patiently(second.gone.wait())
    await host.until(lambda: host.closed)

    assert host.closed == [served]


async def test_a_published_track_is_a_subscription_for_who_takes_it(bench: Bench) -> None:
    track = make_track(2, 5, octets=20_000, ended=False, name=NAME)
    async with bench.dial() as connection:
        publication = await connection.publish(track, forward=False)
        [taken] = bench.host.offered
        assert (taken.largest, publication.ended) == (Location(1, 4), None)
        reading = asyncio.create_task(objects(taken))
        await taken.update(Parameters({P.FORWARD: 1, P.FILL_PARAMETERS: FILL_FROM_START}))
        for group in (2, 3):
            publish_group(track, group, 5, octets=20_000)
        track.end()

        assert sorted(await reading) == whole(4, 5)
        await patiently(publication.finished.wait())
    assert publication.ended is not None
    assert publication.ended.code is PublishDoneCode.TRACK_ENDED
    assert taken.ended is not None
    assert taken.ended.complete


async def test_either_side_ends_a_publication(bench: Bench) -> None:
    async with bench.dial() as connection:
        first = await connection.publish(LocalTrack(NAME))
        second = await connection.publish(LocalTrack(OTHER))
        third = await connection.publish(LocalTrack(OTHER))
        taken = bench.host.offered
        taken[0].cancel()
        await patiently(first.finished.wait())
        second.end(PublishDoneCode.EXPIRED, "enough")
        await patiently(second.finished.wait())
        third.cancel()
        assert [e async for e in taken[1]] == [e async for e in taken[2]] == []

    assert first.ended is not None
    assert first.ended.code is None
    assert second.ended is not None
    assert second.ended.code is PublishDoneCode.EXPIRED
    assert [getattr(t.ended, "code", None) for t in taken] == [
        None,
        PublishDoneCode.EXPIRED,
        PublishDoneCode.INTERNAL_ERROR,
    ]


async def test_a_publish_is_refused_or_times_out(certificates: CertificateFiles) -> None:
    host = Host()
    host.silent = True
    refusing = RequestHandler()
    track = LocalTrack(NAME)
    async with serving(certificates, host=host) as bench, bench.dial() as connection:
        with pytest.raises(TimeoutError, match="PUBLISH was not answered"):
            await connection.publish(track, timeout_s=0.2)
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    async with (
        await serve("127.0.0.1", 0, tls=tls, handler=refusing) as server,
        connect(
            f"moqt://localhost:{server.address[1]}/", tls=ClientTls(ca_file=certificates.ca_file)
        ) as connection,
    ):
        with pytest.raises(RequestRejected) as refused:
            await connection.publish(track)
        with pytest.raises(RequestRejected) as unsupported:
            await connection.subscribe_tracks(NAME.namespace)

    assert refused.value.code == RequestErrorCode.UNINTERESTED
    assert unsupported.value.code == RequestErrorCode.NOT_SUPPORTED
    assert not track.is_watched


async def test_tracks_under_a_prefix_are_published_or_skipped(bench: Bench) -> None:
    track = bench.host.publish(make_track(1, 3, ended=False, name=NAME))
    mine = Host()
    async with bench.dial(handler=mine) as connection:
        wish = await connection.subscribe_tracks(TrackNamespace.of("kvcs-1"))
        await mine.until(lambda: mine.offered)
        reading = asyncio.create_task(objects(mine.offered[0]))
        publish_group(track, 1, 3)
        track.end()
        assert await reading == whole(2, 3)[3:]
        [served] = bench.server.connections
        served.session.publish_skipped(wish.request_id, LocalTrack(OTHER))
        served.wake()
        skipped = await patiently(anext(wish))
        await wish.update(Parameters({P.TRACK_NAMESPACE_PREFIX: TrackNamespace.of("b")}))
        assert [str(w.prefix) for w in bench.host.wishes] == ["kvcs.2d1", "b"]
        served.session.cancel(wish.request_id)
        served.wake()
        assert [e async for e in wish] == []

    assert skipped.track == OTHER
    assert wish.ended is not None


async def test_each_side_may_serve_the_other(certificates: CertificateFiles) -> None:
    made: list[MoqtConnection] = []
    mine = Host()
    mine.publish(make_track(2, 5, octets=20_000, name=NAME))
    async with (
        serving(certificates, on_connection=made.append) as bench,
        bench.dial(handler=mine),
    ):
        subscription = await made[0].subscribe(NAME, fill=FROM_START)

        assert await objects(subscription) == whole(2, 5)


async def test_a_server_learns_where_the_client_wanted_to_go(bench: Bench) -> None:
    async with bench.dial() as connection:
        await connection.track_status(bench.host.publish(LocalTrack(NAME)).name)
        [served] = bench.server.connections

    setup = served.session.peer_setup
    assert setup is not None
    assert (setup.path, setup.authority) == ("/kv?tenant=a", bench.uri.split("/")[2])


# -- updates and cancels ---------------------------------------------------------------------------


async def test_a_subscription_can_be_paused_and_resumed(bench: Bench) -> None:
    track = bench.host.publish(LocalTrack(NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME)
        await subscription.update(Parameters({P.FORWARD: 0}))
        publish_group(track, 0, 2)
        answer = await subscription.update(Parameters({P.FORWARD: 1}))
        assert answer.largest == Location(0, 1)
        publish_group(track, 1, 2)
        track.end()

        assert await objects(subscription) == [(1, 0), (1, 1)]
        with pytest.raises(UsageError):
            await subscription.update(Parameters({}))


async def test_an_update_fails_promptly_when_its_subscription_is_cancelled(bench: Bench) -> None:
    bench.host.publish(LocalTrack(NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME)
        updating = asyncio.create_task(subscription.update(Parameters({})))
        await asyncio.sleep(0)
        subscription.cancel()

        with pytest.raises(UsageError, match="the subscription ended"):
            await patiently(updating)


async def test_a_cancelled_subscription_stops_its_publisher_and_gives_its_window_back(
    certificates: CertificateFiles,
) -> None:
    async with serving(certificates) as bench, bench.dial(quic=SMALL) as connection:
        bench.host.publish(make_track(8, 1, octets=100_000, name=NAME))
        bench.host.publish(make_track(1, 20, octets=50_000, name=OTHER))
        for _ in range(3):
            subscription = await connection.subscribe(NAME, fill=FROM_START)
            await patiently(anext(subscription))
            subscription.cancel()
        await bench.host.until(lambda: len(bench.host.ended) == 3)

        other = await connection.subscribe(OTHER, fill=FROM_START)
        assert await objects(other) == whole(1, 20)


async def test_what_was_not_read_of_an_ended_subscription_can_be_dropped(
    certificates: CertificateFiles,
) -> None:
    async with serving(certificates) as bench, bench.dial(quic=SMALL) as connection:
        bench.host.publish(make_track(3, 1, octets=15_000, name=NAME))
        bench.host.publish(make_track(1, 20, octets=50_000, name=OTHER))
        for _ in range(8):  # together more than the window of the connection
            subscription = await connection.subscribe(NAME, fill=FROM_START)
            await patiently(subscription.finished.wait())
            subscription.cancel()

        other = await connection.subscribe(OTHER, fill=FROM_START)
        assert await objects(other) == whole(1, 20)


async def test_objects_of_a_request_cancelled_by_another_ones_sink_are_given_back(
    certificates: CertificateFiles,
) -> None:
    async with serving(certificates) as bench, bench.dial(quic=SMALL) as connection:
        victims: list[Subscription] = []

        def cancel_all(event: object) -> None:
            while victims:
                victims.pop().cancel()

        one = bench.host.publish(LocalTrack(NAME))
        two = bench.host.publish(LocalTrack(OTHER))
        subscription = await connection.subscribe(NAME, sink=cancel_all)
        for _ in range(30):
            victims.append(await connection.subscribe(OTHER))
            group = one.opened
            publish_group(one, group, 1, octets=500)
            publish_group(two, two.opened, 1, octets=15_000)
            await bench.host.until(lambda: not victims)
        bench.host.publish(make_track(1, 20, octets=50_000, name=(third := OTHER.of("third", "x"))))
        read = await objects(await connection.subscribe(third, fill=FROM_START))

        assert read == whole(1, 20)
        assert subscription.ended is None


# -- backpressure ----------------------------------------------------------------------------------


async def test_a_reader_that_does_not_read_stops_its_publisher_and_nobody_else(
    certificates: CertificateFiles,
) -> None:
    async with (
        serving(certificates) as bench,
        bench.dial(quic=SMALL) as slow,
        bench.dial(quic=SMALL) as fast,
    ):
        track = bench.host.publish(make_track(20, 10, octets=10_000, name=NAME))
        stalled = await slow.subscribe(NAME, fill=FROM_START)
        reading = await fast.subscribe(NAME, fill=FROM_START)
        assert await objects(reading) == whole(20, 10)
        served = bench.server.connections[0]

        held = sum(len(e.payload) for e in stalled._queue if isinstance(e, ObjectReceived))
        assert held <= SMALL.connection_window
        assert not stalled.finished.is_set()
        assert served.session.has_data_waiting
        assert track.octets == 2_000_000

        assert await objects(stalled) == whole(20, 10)


async def test_two_subscriptions_of_one_connection_share_its_window_fairly(
    certificates: CertificateFiles,
) -> None:
    async with serving(certificates) as bench, bench.dial(quic=SMALL) as connection:
        bench.host.publish(make_track(1, 50, octets=20_000, name=NAME))
        bench.host.publish(make_track(1, 50, octets=20_000, name=OTHER))
        stalled = await connection.fetch(NAME, location_filter=LocationFilter.none())
        reading = await connection.fetch(OTHER, location_filter=LocationFilter.none())

        # One stream that nobody reads holds a quarter of the connection's window.
        assert await objects(reading) == whole(1, 50)
        assert not stalled.finished.is_set()
        assert await objects(stalled) == whole(1, 50)


async def test_who_falls_behind_by_many_streams_loses_its_subscription_alone(
    certificates: CertificateFiles,
) -> None:
    config = SessionConfig(max_subscription_octets=100_000)
    async with serving(certificates) as bench, bench.dial(quic=SMALL, config=config) as connection:
        track = bench.host.publish(LocalTrack(NAME))
        bench.host.publish(make_track(1, 50, octets=20_000, name=OTHER))
        stalled = await connection.subscribe(NAME)
        for group in range(50):
            publish_group(track, group, 1, octets=10_000)
        await patiently(stalled.finished.wait())
        assert stalled.ended is not None
        assert stalled.ended.code == PublishDoneCode.TOO_FAR_BEHIND

        other = await connection.subscribe(OTHER, fill=FROM_START)
        assert await objects(other) == whole(1, 50)
        assert len(await objects(stalled)) == 11


async def test_small_objects_that_nobody_reads_are_bounded_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracks_module, "MAX_WAITING_EVENTS", 100)
    bench.host.publish(make_track(1, 500, octets=0, name=NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START)
        await patiently(subscription.finished.wait())
        fetch = await connection.fetch(NAME, location_filter=LocationFilter.none())
        await patiently(fetch.finished.wait())

        assert subscription.ended is not None
        assert subscription.ended.code == PublishDoneCode.TOO_FAR_BEHIND
        assert len(await objects(subscription)) == 100
        assert fetch.ended is not None
        assert not fetch.ended.complete


@pytest.mark.parametrize("octets", [300_000, 2_000_000])
async def test_an_object_larger_than_the_windows_arrives(
    certificates: CertificateFiles, octets: int
) -> None:
    async with serving(certificates) as bench, bench.dial() as connection:
        quic = QuicSettings(stream_window=1 << 20, connection_window=1 << 20)
        bench.host.publish(make_track(2, 2, octets=octets, name=NAME))
        async with bench.dial(quic=quic) as narrow:
            for reader in (narrow, connection):
                subscription = await reader.subscribe(NAME, fill=FROM_START)
                assert await objects(subscription) == whole(2, 2)


# -- the end ---------------------------------------------------------------------------------------


async def test_closing_right_after_publishing_loses_nothing(certificates: CertificateFiles) -> None:
    for _ in range(5):
        async with serving(certificates) as bench:
            track = bench.host.publish(LocalTrack(NAME))
            connection = await open_connection(bench.uri, tls=bench.tls)
            subscription = await connection.subscribe(NAME)
            for group in range(20):
                publish_group(track, group, 10, octets=10_000)
            track.end()
            closing = asyncio.create_task(bench.server.close(drain_s=PATIENCE_S))

            assert sorted(await objects(subscription)) == whole(20, 10)
            assert subscription.ended is not None
            assert subscription.ended.complete
            await patiently(closing)
            await connection.close()
            assert connection.closed is not None
            assert connection.closed.code == SessionErrorCode.NO_ERROR


async def test_a_publisher_that_is_told_to_go_away_loses_nothing(
    certificates: CertificateFiles,
) -> None:
    made: list[MoqtConnection] = []
    mine = Host()
    async with serving(certificates, on_connection=made.append) as bench:
        track = mine.publish(LocalTrack(NAME))
        connection = await open_connection(bench.uri, tls=bench.tls, handler=mine)
        subscription = await made[0].subscribe(NAME)
        made[0].goaway(timeout_ms=20_000)
        await mine.until(lambda: True)
        for group in range(20):
            publish_group(track, group, 10, octets=10_000)
        track.end()

        assert sorted(await objects(subscription)) == whole(20, 10)
        assert subscription.ended is not None
        assert subscription.ended.complete
        await patiently(connection.wait_closed())
        assert connection.closed is not None
        assert connection.closed.code == SessionErrorCode.NO_ERROR
        assert connection.going_away is not None
        await connection.close()


async def test_a_server_that_stops_lets_its_peers_finish(certificates: CertificateFiles) -> None:
    async with serving(certificates) as bench:
        track = bench.host.publish(LocalTrack(NAME))
        async with bench.dial() as connection:
            subscription = await connection.subscribe(NAME)
            stopping = asyncio.create_task(bench.server.close(goaway_timeout_s=PATIENCE_S))
            publish_group(track, 0, 3)
            track.end()

            assert await objects(subscription) == whole(1, 3)
            await patiently(stopping)
            await patiently(connection.wait_closed())
            assert connection.going_away is not None


async def test_a_handler_that_raises_closes_the_session_and_all_that_waits_fails(
    bench: Bench,
) -> None:
    bench.host.publish(LocalTrack(NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME)
        bench.host.raises = True
        waiting = [asyncio.create_task(connection.track_status(NAME)) for _ in range(3)]
        iterating = asyncio.create_task(patiently(anext(subscription)))
        results = await patiently(asyncio.gather(*waiting, iterating, return_exceptions=True))

    assert [type(r) for r in results] == [SessionClosed] * 4
    assert {r.code for r in results} == {SessionErrorCode.INTERNAL_ERROR}
    assert {r.by_peer for r in results} == {True}
    assert len(bench.host.closed) == 1


async def test_a_sink_that_raises_closes_its_own_session(bench: Bench) -> None:
    bench.host.publish(make_track(1, 1, name=NAME))

    def sink(event: object) -> None:
        raise RuntimeError("the sink fails")

    async with bench.dial() as connection:
        with suppress(SessionClosed):  # the Object may come before or after the answer is read
            await connection.subscribe(NAME, fill=FROM_START, sink=sink)
        await patiently(connection.wait_closed())
        assert connection.closed is not None
        assert connection.closed.code == SessionErrorCode.INTERNAL_ERROR
    await bench.host.until(lambda: bench.host.closed)


@pytest.mark.aioquic
async def test_who_does_not_stop_asking_is_closed_and_not_let_in_again_at_once(
    certificates: CertificateFiles,
) -> None:
    async with serving(certificates, config=SessionConfig(max_requests_per_s=1.0)) as bench:
        async with bench.dial() as connection:
            asking = [connection.track_status(NAME) for _ in range(20)]
            await patiently(asyncio.gather(*asking, return_exceptions=True))
            await patiently(connection.wait_closed())
            assert connection.closed is not None
            assert connection.closed.code == SessionErrorCode.INTERNAL_ERROR
        with pytest.raises(ConnectionError, match="CONNECTION_REFUSED"):
            async with bench.dial():
                raise AssertionError("it was let in")


async def test_fifty_pending_requests_fail_promptly_when_the_session_closes(bench: Bench) -> None:
    bench.host.silent = True
    async with bench.dial() as connection:
        asks: Iterable[Awaitable[Any]] = [
            *(connection.subscribe(NAME) for _ in range(10)),
            *(connection.fetch(NAME, location_filter=FROM_START) for _ in range(10)),
            *(connection.track_status(NAME) for _ in range(10)),
            *(connection.subscribe_namespace(TrackNamespace.of(str(n))) for n in range(10)),
            *(connection.publish_namespace(TrackNamespace.of(str(n))) for n in range(10)),
        ]
        waiting = asyncio.gather(*asks, return_exceptions=True)
        await bench.host.until(lambda: len(bench.host.asked) == 10)
        [served] = bench.server.connections
        await served.close(SessionErrorCode.UNAUTHORIZED, "go away", drain_s=0.0)
        results = await patiently(waiting)

    assert [type(r) for r in results] == [SessionClosed] * 50
    # picoquic does not carry reasons.
    reason = "go away" if engine.DEFAULT == "aioquic" else ""
    assert {(r.code, r.reason, r.by_peer) for r in results} == {
        (SessionErrorCode.UNAUTHORIZED, reason, True)
    }
    with pytest.raises(UsageError):
        await connection.subscribe(NAME)


async def test_an_answer_that_does_not_come_is_a_timeout_and_the_request_is_cancelled(
    bench: Bench,
) -> None:
    bench.host.silent = True
    async with bench.dial() as connection:
        with pytest.raises(TimeoutError, match=r"SUBSCRIBE was not answered within 0\.05 s"):
            await connection.subscribe(NAME, timeout_s=0.05)
        await bench.host.until(lambda: bench.host.ended)

        assert bench.host.ended[0].cancelled
        assert connection.session.open_requests == 0
        assert connection.closed is None


async def test_a_waiting_task_that_is_cancelled_cancels_its_request(bench: Bench) -> None:
    bench.host.silent = True
    async with bench.dial() as connection:
        waiting = asyncio.create_task(connection.subscribe(NAME))
        await bench.host.until(lambda: bench.host.asked)
        waiting.cancel()
        await bench.host.until(lambda: bench.host.ended)

        assert bench.host.ended[0].cancelled


async def test_two_tasks_cannot_iterate_over_one_subscription(bench: Bench) -> None:
    bench.host.publish(LocalTrack(NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME)
        first = asyncio.create_task(patiently(anext(subscription)))
        await asyncio.sleep(0)

        with pytest.raises(UsageError, match="two tasks"):
            await anext(subscription)
        subscription.cancel()
        with pytest.raises(StopAsyncIteration):
            await first


async def test_objects_that_came_are_handed_out_before_the_end_of_the_session(
    bench: Bench,
) -> None:
    bench.host.publish(make_track(1, 3, ended=False, name=NAME))
    async with bench.dial() as connection:
        subscription = await connection.subscribe(NAME, fill=FROM_START)
        first = await patiently(anext(subscription))
        [served] = bench.server.connections
        await served.close()
        await patiently(connection.wait_closed())
        rest = [await anext(subscription) for _ in range(3)]

        assert [getattr(e, "location", None) for e in (first, *rest)] == [*whole(1, 3), None]
        for _ in range(2):
            with pytest.raises(SessionClosed):
                await anext(subscription)


# -- dialling --------------------------------------------------------------------------------------


async def test_another_draft_is_refused_in_the_handshake(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ALPN", "moqt-18")
    with pytest.raises(AlpnMismatchError):
        async with bench.dial():
            pass

    assert bench.server.connections == ()


async def test_a_certificate_nobody_vouches_for_is_refused(bench: Bench, tmp_path: Path) -> None:
    stranger = make_certificates(tmp_path)
    with pytest.raises(TlsAlertError):
        async with connect(bench.uri, tls=ClientTls(ca_file=stranger.ca_file)):
            pass


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("https://host/x", "no moqt:// URI"),
        ("moqt:///x", "names no host"),
        ("moqt://host:70000", "port"),
        ("moqt://user@host", "user information"),
    ],
)
async def test_a_uri_that_is_none_is_named(uri: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        async with connect(uri):
            pass


async def test_a_client_that_comes_back_is_served_at_once(certificates: CertificateFiles) -> None:
    host = Host()
    host.publish(make_track(1, 3, name=NAME))
    async with serving(certificates, host=host) as bench:
        lost = await open_connection(bench.uri, tls=bench.tls)
        await lost.publish_namespace(NAME.namespace)
        lost._transport.abandon()  # as if its process had been killed
        await patiently(lost.wait_closed())
        async with bench.dial() as connection:
            await connection.publish_namespace(NAME.namespace)
            assert await objects(await connection.subscribe(NAME, fill=FROM_START)) == whole(1, 3)
            assert NAME.namespace in host.announced


async def test_a_server_that_comes_back_on_its_port_is_found_again(
    certificates: CertificateFiles,
) -> None:
    host = Host()
    host.publish(make_track(1, 3, name=NAME))
    port = 0
    for _ in range(2):
        async with serving(certificates, host=host, port=port) as bench:
            port = bench.server.address[1]
            async with bench.dial() as connection:
                subscription = await connection.subscribe(NAME, fill=FROM_START)
                assert await objects(subscription) == whole(1, 3)
