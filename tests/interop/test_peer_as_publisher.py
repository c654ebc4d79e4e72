"""Subscribers of ours, at the peer's publishers: one that listens, one that dials."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.aio import ClientTls, MoqtConnection, RequestHandler, ServerTls, connect, serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import (
    GroupOrder,
    ObjectStatus,
    ParameterType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
)
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.events import (
    FillEnded,
    NamespaceAppeared,
    ObjectReceived,
    PublishNamespaceReceived,
    Via,
)
from moqt.wire.filters import LocationFilter
from moqt.wire.parameters import Parameters
from tests.interop.conftest import StartPeer
from tests.interop.peer import MARKS, START_DEADLINE_S, PeerProcess, free_port

pytestmark = MARKS

OCTETS = 40_000
GROUP = 8


async def publisher(start_peer: StartPeer, certificates: CertificateFiles) -> str:
    """Start its publisher, which begins with Group 0 when somebody subscribes; return its URI."""
    port = free_port()
    process: PeerProcess = start_peer(
        "moq-pub-server",
        *("--bind", "127.0.0.1", "-p", str(port), "-Q", "--draft", "22"),
        *("-N", "kvtest/its own", "-T", "t0", "-s", str(OCTETS), "-g", str(GROUP), "-r", "200"),
        *("--cert", certificates.certificate_file, "--key", certificates.key_file),
    )
    await process.line("ready on")
    return f"moqt://127.0.0.1:{port}/"


async def test_its_objects_come_in_order_and_none_is_lost(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    uri = await publisher(start_peer, certificates)
    wanted = [Location(group, object_id) for group in range(20) for object_id in range(GROUP)]
    taken: dict[int, list[ObjectReceived]] = defaultdict(list)
    async with connect(uri, tls=ClientTls(ca_file=certificates.ca_file)) as connection:
        subscription = await connection.subscribe(FullTrackName.of("kvtest", "its own", "t0"))
        missing = set(wanted)
        async with asyncio.timeout(30):
            async for event in subscription:
                assert isinstance(event, ObjectReceived)
                taken[event.location.group].append(event)
                missing.discard(event.location)
                if not missing:
                    break  # it never ends by itself
        subscription.cancel()

    objects = [
        event
        for group in range(20)
        for event in taken[group]
        if event.status is ObjectStatus.NORMAL
    ]
    assert [event.location for event in objects] == wanted
    assert {len(event.payload) for event in objects} == {OCTETS}
    assert {event.via for event in objects} == {Via.SUBGROUP}
    assert connection.closed is not None
    assert connection.closed.code == SessionErrorCode.NO_ERROR


DIALLED = FullTrackName.of("kvtest", "it dials", "t0")


class Door(RequestHandler):
    """Lets publishers in, and hands out the session of each that announces a namespace."""

    def __init__(self) -> None:
        self.announced: asyncio.Queue[tuple[MoqtConnection, TrackNamespace]] = asyncio.Queue()

    def publish_namespace_received(
        self, connection: MoqtConnection, request: PublishNamespaceReceived
    ) -> None:
        connection.session.accept_namespace(request.request_id)
        self.announced.put_nowait((connection, request.prefix))


@asynccontextmanager
async def dialled_by_it(
    start_peer: StartPeer, certificates: CertificateFiles, *options: str
) -> AsyncIterator[MoqtConnection]:
    """Listen, and let its publisher dial; it has five Groups of eight Objects already."""
    door = Door()
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    config = SessionConfig(done_timeout_s=2)
    async with await serve("127.0.0.1", 0, tls=tls, config=config, handler=door) as server:
        start_peer(
            "moq-pub-bench",
            *(f"moqt://127.0.0.1:{server.address[1]}/", "-k", "--draft", "22", "-t", "30"),
            *("-N", "kvtest/it dials", "-T", "t0", "-s", "3000", "-g", str(GROUP), "-r", "400"),
            *("--pub-ns", "--prefill", "5", *options),
        )
        async with asyncio.timeout(START_DEADLINE_S):
            connection, prefix = await door.announced.get()
        assert prefix == DIALLED.namespace
        yield connection


async def test_its_fill_and_its_live_objects_make_each_object_exactly_once(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    taken: dict[Location, ObjectReceived] = {}
    fills: list[FillEnded] = []
    options = ("--end-after", "1", "--goaway-after", "0.3", "--padding", "5000", "--track-status")
    async with dialled_by_it(start_peer, certificates, *options) as connection:
        subscription = await connection.subscribe(DIALLED, fill=LocationFilter.absolute_start(0, 0))
        async with asyncio.timeout(30):
            async for event in subscription:
                if isinstance(event, ObjectReceived):
                    assert event.location not in taken, f"{event.location} came twice"
                    taken[event.location] = event
                elif isinstance(event, FillEnded):
                    fills.append(event)

    normal = sorted(at for at, event in taken.items() if event.status is ObjectStatus.NORMAL)
    assert subscription.largest == Location(4, 7)
    assert [fill.complete for fill in fills] == [True]
    assert {at.group for at in normal if taken[at].via is Via.FILL} == set(range(5))
    assert normal[-1] > Location(5, 0)
    # Without a gap from the first to the last: eight in every Group, but for the last Group.
    assert normal == [Location(n // GROUP, n % GROUP) for n in range(len(normal))]
    assert {len(taken[at].payload) for at in normal} == {3000}
    assert subscription.ended is not None
    assert subscription.ended.code is PublishDoneCode.TRACK_ENDED
    # Not ``complete``: it resets the stream it is on, and counts it even if nothing of it has left.
    assert connection.going_away is not None


async def test_it_answers_every_other_request_as_the_draft_says(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    held = [Location(group, object_id) for group in range(5) for object_id in range(GROUP)]
    part = LocationFilter.range(1, 2, 3, 4)
    whole_groups = LocationFilter.group_end(2, 0, 3)
    async with dialled_by_it(start_peer, certificates) as connection, asyncio.timeout(30):
        status = await connection.track_status(DIALLED)
        ascending = await connection.fetch(DIALLED, location_filter=part)
        some = [e.location async for e in ascending if isinstance(e, ObjectReceived)]
        descending = await connection.fetch(
            DIALLED, location_filter=whole_groups, group_order=GroupOrder.DESCENDING
        )
        groups = [e.location async for e in descending if isinstance(e, ObjectReceived)]
        with pytest.raises(RequestRejected) as beyond:
            await connection.fetch(DIALLED, location_filter=LocationFilter.absolute_start(99, 0))
        with pytest.raises(RequestRejected) as unknown:
            await connection.subscribe(FullTrackName(DIALLED.namespace, b"none"))
        namespaces = await connection.subscribe_namespace(TrackNamespace.of("kvtest"))
        found = await anext(namespaces)
        subscription = await connection.subscribe(DIALLED)
        urgent = Parameters({ParameterType.SUBSCRIBER_PRIORITY: 3})
        updated = await subscription.update(urgent)
        subscription.cancel()

    assert status.largest == Location(4, 7)
    assert some == [at for at in held if Location(1, 2) <= at <= Location(3, 4)]
    assert ascending.end_location == Location(3, 4)
    assert groups == [at for group in (3, 2) for at in held if at.group == group]
    assert beyond.value.code is RequestErrorCode.INVALID_RANGE
    assert unknown.value.code is RequestErrorCode.DOES_NOT_EXIST
    assert isinstance(found, NamespaceAppeared)
    assert found.namespace == DIALLED.namespace
    assert updated.request_id == subscription.request_id
    for fetch in (ascending, descending):
        assert fetch.ended is not None
        assert fetch.ended.complete
        assert not fetch.end_of_track
