"""Windows and memory over real QUIC: peers that stop reading, padding, and what it costs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import FrameType
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
    engine,
    serve,
)
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, RequestErrorCode
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    NamespaceAppeared,
    ObjectReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.parameters import Parameters
from moqt.wire.streamtype import padding_stream
from tests.memory import MIB, resident_octets
from tests.session.pair import make_track, payload_of

pytestmark = pytest.mark.network

NAME = FullTrackName.of("windows", "track")
OTHER = FullTrackName.of("windows", "other")
FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0
#: 64 KiB and no more, for a connection that reads nothing.
NARROWEST = QuicSettings(stream_window=64 << 10, connection_window=64 << 10)
SMALL = QuicSettings(stream_window=64 << 10, connection_window=256 << 10)


class Host(RequestHandler):
    """Serves its Tracks and tells their namespaces."""

    def __init__(self, *tracks: LocalTrack) -> None:
        self.tracks = {track.name: track for track in tracks}
        self.directory = NamespaceDirectory()
        self.connections: list[MoqtConnection] = []
        for name in self.tracks:
            self.directory.add(name.namespace)

    def connection_made(self, connection: MoqtConnection) -> None:
        self.connections.append(connection)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        if (track := self.tracks.get(request.track)) is None:
            super().subscribe_received(connection, request)
        else:
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        connection.session.accept_fetch(request.request_id, self.tracks[request.track])

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        connection.session.accept_namespaces(request.request_id, self.directory)


@asynccontextmanager
async def dialled(
    files: CertificateFiles, host: Host, **options: Any
) -> AsyncIterator[tuple[MoqtConnection, MoqtConnection]]:
    """A session with a host: the subscriber's end of it, and the host's."""
    tls = ServerTls(files.certificate_file, files.key_file)
    async with (
        asyncio.timeout(50),
        await serve("127.0.0.1", 0, tls=tls, handler=host) as server,
        connect(
            f"moqt://127.0.0.1:{server.address[1]}/",
            tls=ClientTls(ca_file=files.ca_file),
            drain_s=0.1,
            **options,
        ) as connection,
    ):
        yield connection, server.connections[-1]


def stands_still(transport: Any) -> bool:
    """Whether all that may be sent has been sent, and acknowledged where that is known."""
    if engine.DEFAULT == "aioquic":
        return not transport.send_budget() and not transport._connection.unacked
    active = transport._outbound._active
    return bool(active) and all(stream.blocked for stream in active)


async def stall(sender: MoqtConnection, receiver: MoqtConnection) -> None:
    """Return when all that may be sent has been sent and acknowledged, and more waits."""
    turned = asyncio.Event()
    transport: Any = sender._transport
    flush = sender.flush

    def noting() -> None:
        flush()
        turned.set()

    sender.flush = noting  # type: ignore[method-assign]
    try:
        while not stands_still(transport):
            turned.clear()
            with suppress(TimeoutError):  # a stream may be found to stand still in no turn
                async with asyncio.timeout(0.05):
                    await turned.wait()
    finally:
        sender.flush = flush  # type: ignore[method-assign]
    assert sender.session.has_data_waiting
    assert receiver.closed is None


def a_gibibyte() -> LocalTrack:
    """A Track of 1 GiB that takes a mebibyte: its Objects share one payload."""
    track, payload = LocalTrack(NAME), payload_of(Location(0, 0), MIB)
    subgroup = track.open_subgroup(0)
    for number in range(1024):
        subgroup.publish(number, payload)
    subgroup.close()
    track.end()
    assert track.octets == 1 << 30
    return track


# -- readers that stop ---------------------------------------------------------------------------


@pytest.mark.aioquic  # picoquic does not hold the window of the connection
async def test_a_gibibyte_for_a_peer_that_grants_64_kib_and_stops_stays_where_it_is(
    certificates: CertificateFiles,
) -> None:
    track = a_gibibyte()
    async with dialled(certificates, Host(track), quic=NARROWEST) as (peer, host):
        before = resident_octets()
        # What it was granted is used up by an Object that is handed out in pieces to nobody.
        stopped = await peer.subscribe(NAME, fill=FROM_START, pieces=True)
        await stall(host, peer)
        transport: Any = host._transport

        assert transport._connection.unacked == 0
        assert sum(len(data) for data in waiting(transport)) <= NARROWEST.connection_window
        assert resident_octets() - before < 16 * MIB
        # Neither side has given up: it goes on when it is read again.
        assert stopped.ended is None
        await anext(stopped)
        with pytest.raises(RequestRejected):
            await peer.subscribe(OTHER)


def waiting(transport: Any) -> list[bytes]:
    """Return what a transport was given and has not sent, stream by stream."""
    return [
        bytes(stream.sender._buffer)
        for stream in transport._connection._streams.values()
        if stream.sender is not None
    ]


async def test_a_consumer_that_sleeps_holds_no_more_than_its_windows(
    certificates: CertificateFiles,
) -> None:
    quic = QuicSettings(stream_window=2 * MIB, connection_window=4 * MIB)
    async with dialled(certificates, Host(a_gibibyte()), quic=quic) as (peer, host):
        before = resident_octets()
        asleep = [
            await peer.fetch(NAME, location_filter=LocationFilter.none(), pieces=True)
            for _ in range(3)
        ]
        await stall(host, peer)
        assert resident_octets() - before < quic.connection_window + 16 * MIB
        for one in asleep:
            assert one.ended is None
            await anext(one)  # it can be woken at any time


async def test_a_consumer_that_sleeps_over_many_streams_loses_what_it_does_not_take(
    certificates: CertificateFiles,
) -> None:
    payload = payload_of(Location(0, 0), 100_000)
    track, other = LocalTrack(NAME), make_track(1, 20, octets=50_000, name=OTHER)
    limit = 2 * MIB
    config = SessionConfig(max_subscription_octets=limit)
    async with dialled(certificates, Host(track, other), config=config) as (peer, host):
        asleep = await peer.subscribe(NAME)
        before = resident_octets()
        for group in range(1000):  # far more than the limit, and more than the windows
            subgroup = track.open_subgroup(group)
            subgroup.publish(0, payload)
            subgroup.close()
        async with asyncio.timeout(PATIENCE_S):
            await asleep.finished.wait()
        assert asleep.ended is not None
        assert asleep.ended.code is PublishDoneCode.TOO_FAR_BEHIND
        held = [event async for event in asleep if isinstance(event, ObjectReceived)]
        assert limit <= sum(len(event.payload) for event in held) <= limit + 2 * len(payload)
        assert resident_octets() - before < limit + 32 * MIB
        # The session goes on, and all of its window is there.
        reading = await peer.subscribe(OTHER, fill=FROM_START)
        assert await objects(reading) == 20
        assert not host.session.has_data_waiting


async def objects(subscription: Subscription) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return sum([isinstance(event, ObjectReceived) async for event in subscription])


# -- control beside data -------------------------------------------------------------------------


async def test_requests_are_answered_while_data_have_used_up_the_window(
    certificates: CertificateFiles,
) -> None:
    track = make_track(4, 10, octets=100_000, name=NAME)
    host = Host(track)
    async with dialled(certificates, host, quic=SMALL) as (peer, serving):
        stopped = [await peer.subscribe(NAME, fill=FROM_START) for _ in range(8)]
        await stall(serving, peer)

        async with asyncio.timeout(PATIENCE_S):
            # Answers need credit of the connection that the data have used up.
            for subscription in stopped:
                for priority in (1, 200, 3):
                    await subscription.update(Parameters({P.SUBSCRIBER_PRIORITY: priority}))
            with pytest.raises(RequestRejected) as refused:
                await peer.subscribe(OTHER)
            found = await peer.subscribe_namespace(TrackNamespace())
            assert isinstance(await anext(found), NamespaceAppeared)
        assert refused.value.code is RequestErrorCode.DOES_NOT_EXIST
        # Nothing was read meanwhile.
        assert serving.session.has_data_waiting
        for subscription in stopped[1:]:
            subscription.cancel()
        assert await objects(stopped[0]) == 40


# -- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "octets", [4 * MIB, pytest.param(64 * MIB, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
async def test_padding_of_many_windows_leaves_all_of_them_for_the_data_behind_it(
    certificates: CertificateFiles, octets: int
) -> None:
    length = 64 << 10
    track = make_track(octets // (16 * length), 16, octets=length, name=NAME)
    async with dialled(certificates, Host(track), quic=SMALL) as (peer, host):
        session: Any = host.session
        transport: Any = host._transport
        stream_id = session._context.stream_ids.uni()
        transport.send_stream_data(stream_id, padding_stream(octets), True)
        host.wake()
        subscription = await peer.subscribe(NAME, fill=FROM_START)
        async with asyncio.timeout(45):
            found = sum([isinstance(event, ObjectReceived) async for event in subscription])
        assert found == octets // length
        receiving: Any = peer._transport
        # The last of the padding may still be on its way.
        if engine.DEFAULT == "aioquic":
            assert receiving._connection._consumed > 2 * octets - SMALL.connection_window


# -- streams that stay open ----------------------------------------------------------------------


async def lines_for(connection: MoqtConnection, count: int) -> int:
    """Return how many lines of Python are run while so many Objects are fetched."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fetch = await connection.fetch(OTHER, location_filter=LocationFilter.none())
        async with asyncio.timeout(PATIENCE_S):
            found = sum([isinstance(event, ObjectReceived) async for event in fetch])
    finally:
        sys.settrace(before)
    assert found == count
    return lines


async def test_streams_that_are_open_and_idle_make_no_packet_dearer(
    certificates: CertificateFiles,
) -> None:
    many = 100
    track, other = LocalTrack(NAME), make_track(1, 4, octets=100_000, name=OTHER)
    async with dialled(certificates, Host(track, other)) as (peer, host):
        few = min([await lines_for(peer, 4) for _ in range(3)])
        subscription = await peer.subscribe(NAME)
        for group in range(many):
            track.open_subgroup(group).publish(0, payload_of(Location(group, 0)))
        for _ in range(many):
            assert isinstance(await anext(subscription), ObjectReceived)
        session: Any = host.session
        served = session._requests.by_id[subscription.request_id]
        assert sum(flow.stream_id is not None for _, flow in served._live) == many
        assert min([await lines_for(peer, 4) for _ in range(3)]) < 1.2 * few
