"""PUBLISH and SUBSCRIBE_TRACKS: the peer's publisher at our door, our publisher at its relay."""

import asyncio

from moqt.aio import ClientTls, MoqtConnection, RequestHandler, ServerTls, Subscription, serve
from moqt.aio.client import connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus, ParameterType, PublishDoneCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.events import FillEnded, ObjectReceived, PublishReceived, StateNotified, Via
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters
from tests.interop.conftest import Relay, StartPeer
from tests.interop.peer import MARKS, START_DEADLINE_S
from tests.interop.published import TrackMaker, binary_track

pytestmark = MARKS

OFFERED = FullTrackName.of("kvtest", "it offers", "t0")
GROUP = 8


class Taker(RequestHandler):
    """Takes every Track that is published to it."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[tuple[PublishReceived, Subscription]] = asyncio.Queue()

    def publish_received(self, connection: MoqtConnection, request: PublishReceived) -> None:
        if (subscription := connection.accept_publish(request)) is not None:
            self.taken.put_nowait((request, subscription))


async def test_what_it_publishes_comes_whole_with_a_fill_of_what_it_had(
    start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    taker = Taker()
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    taken: dict[Location, ObjectReceived] = {}
    fills: list[FillEnded] = []
    told: list[StateNotified] = []
    whole = [Location(group, object_id) for group in range(12) for object_id in range(GROUP)]
    async with await serve("127.0.0.1", 0, tls=tls, handler=taker) as server:
        start_peer(
            "moq-pub-bench",
            *(f"moqt://127.0.0.1:{server.address[1]}/", "-k", "--draft", "22", "-t", "30"),
            *("-N", "kvtest/it offers", "-T", "t0", "-s", "3000", "-g", str(GROUP), "-r", "400"),
            *("--prefill", "5", "--publish-update"),
        )
        async with asyncio.timeout(START_DEADLINE_S):
            request, subscription = await taker.taken.get()
        past = FillParameters(
            Parameters({ParameterType.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)})
        )
        wanted = {ParameterType.FORWARD: 1, ParameterType.FILL_PARAMETERS: past}
        await subscription.update(Parameters(wanted))
        missing = set(whole)
        async with asyncio.timeout(30):
            async for event in subscription:
                if isinstance(event, ObjectReceived):
                    assert event.location not in taken, f"{event.location} came twice"
                    taken[event.location] = event
                    missing.discard(event.location)
                elif isinstance(event, FillEnded):
                    fills.append(event)
                elif isinstance(event, StateNotified):
                    told.append(event)
                if not missing and fills and told:
                    break  # it does not end a Track that it published by itself
        subscription.cancel()

    assert (request.track, request.is_paused, request.largest) == (OFFERED, True, Location(4, 7))
    assert [fill.complete for fill in fills] == [True]
    assert {at.group for at in whole if taken[at].via is Via.FILL} >= set(range(5))
    assert {len(taken[at].payload) for at in whole} == {3000}


async def test_its_relay_takes_what_we_publish_and_offers_it_to_who_asks_for_tracks(
    relay: Relay, certificates: CertificateFiles
) -> None:
    name = binary_track("publish", b"k.raw")
    maker = TrackMaker(name)
    taker = Taker()
    tls = ClientTls(ca_file=certificates.ca_file)
    received: dict[Location, bytes] = {}
    async with (
        connect(relay.uri, tls=tls, handler=taker) as ours,
        connect(relay.uri, tls=tls) as publisher,
        asyncio.timeout(30),
    ):
        await ours.subscribe_tracks(name.namespace)
        publication = await publisher.publish(maker.track)
        request, subscription = await taker.taken.get()
        maker.publish_groups(range(4))
        maker.end()
        async for event in subscription:
            if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
                received[event.location] = event.payload
        await publication.finished.wait()

    assert request.track == name
    assert received == maker.expected
    assert publication.ended is not None
    assert publication.ended.code is PublishDoneCode.TRACK_ENDED


async def test_its_relay_wakes_a_paused_publication_for_who_subscribes(
    relay: Relay, certificates: CertificateFiles
) -> None:
    name = binary_track("paused", b"v.raw")
    maker = TrackMaker(name)
    tls = ClientTls(ca_file=certificates.ca_file)
    received: dict[Location, bytes] = {}
    async with (
        connect(relay.uri, tls=tls) as publisher,
        connect(relay.uri, tls=tls) as ours,
        asyncio.timeout(30),
    ):
        publication = await publisher.publish(maker.track, forward=False)
        subscription = await ours.subscribe(name)
        request = publisher.session._requests.by_id[publication.request_id]
        while not request._forward:  # type: ignore[attr-defined]
            await publisher.track_status(name)  # a round trip
        maker.publish_groups(range(3))
        maker.end()
        async for event in subscription:
            if isinstance(event, ObjectReceived) and event.status is ObjectStatus.NORMAL:
                received[event.location] = event.payload

    assert received == maker.expected
