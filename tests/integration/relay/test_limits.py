"""The limits of a relay: what is answered at each of them, and that nobody else feels it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    ServerTls,
    connect,
    open_connection,
)
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.errors import MoqtError, RequestRejected, UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.options import RelayOptions
from moqt.relay.server import Relay
from moqt.session.config import Role, SessionConfig
from moqt.session.core import Session
from moqt.session.events import RequestId
from moqt.session.localtrack import LocalTrack
from moqt.session.publisher import Publisher
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.messages.request import RequestUpdate
from moqt.wire.messages.setup import Setup
from moqt.wire.parameters import Parameters
from tests.integration.relay.stage import Serving
from tests.session.pair import NAME, make_track

pytestmark = pytest.mark.network

FROM_START = LocationFilter.absolute_start(0, 0)
PATIENCE_S = 20.0


@dataclass
class Stage:
    relay: Relay
    uri: str
    tls: ClientTls

    async def session(self, stack: AsyncExitStack, **options: Any) -> MoqtConnection:
        """Return a session, which goes on until the end of the stack."""
        client = connect(self.uri, tls=self.tls, drain_s=0.1, **options)
        return await stack.enter_async_context(client)


@asynccontextmanager
async def staged(
    files: CertificateFiles,
    options: RelayOptions | None = None,
    *,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
) -> AsyncIterator[tuple[Stage, AsyncExitStack]]:
    tls = ServerTls(files.certificate_file, files.key_file)
    async with (
        asyncio.timeout(PATIENCE_S),
        Relay(options, quic=quic, config=config) as relay,
        AsyncExitStack() as stack,
    ):
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        yield (
            Stage(relay, f"moqt://127.0.0.1:{port}/", ClientTls(ca_file=files.ca_file)),
            stack,
        )


async def is_answered(connection: MoqtConnection) -> bool:
    """Whether a session goes on, and requests on it are answered."""
    with pytest.raises(RequestRejected) as refused:
        await connection.track_status(FullTrackName.of("no", "such"))
    return refused.value.code is RequestErrorCode.DOES_NOT_EXIST


async def refusal(connection: MoqtConnection, track: FullTrackName) -> RequestErrorCode | int:
    """Return what a SUBSCRIBE is refused with."""
    with pytest.raises(RequestRejected) as refused:
        await connection.subscribe(track)
    return refused.value.code


async def test_one_session_too_many_is_refused_during_the_handshake(
    certificates: CertificateFiles,
) -> None:
    async with staged(certificates, quic=QuicSettings(max_connections=2)) as (stage, stack):
        first = await stage.session(stack)
        second = await open_connection(stage.uri, tls=stage.tls)
        with pytest.raises(OSError, match="CONNECTION_REFUSED"):
            await open_connection(stage.uri, tls=stage.tls)
        assert await is_answered(first)

        await second.close(drain_s=0.1)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # its place is free once its closing period has passed
                try:
                    third = await stage.session(stack)
                except OSError:
                    continue
                break
        assert await is_answered(third)


async def test_one_request_too_many_is_refused_and_the_session_goes_on(
    certificates: CertificateFiles,
) -> None:
    async with staged(certificates, config=SessionConfig(max_requests=2)) as (stage, stack):
        greedy, other = await stage.session(stack), await stage.session(stack)
        for number in range(2):
            held = await greedy.publish_namespace(TrackNamespace.of("a", str(number)))

        assert await refusal(greedy, NAME) is RequestErrorCode.EXCESSIVE_LOAD
        assert await is_answered(other)
        held.withdraw()
        assert await refusal(greedy, NAME) is RequestErrorCode.DOES_NOT_EXIST


async def test_one_namespace_too_many_is_refused_until_another_is_withdrawn(
    certificates: CertificateFiles,
) -> None:
    async with staged(certificates, RelayOptions(max_namespaces=1)) as (stage, stack):
        greedy, other = await stage.session(stack), await stage.session(stack)
        held = await greedy.publish_namespace(TrackNamespace.of("a"))
        with pytest.raises(RequestRejected) as refused:
            await greedy.publish_namespace(TrackNamespace.of("b"))
        assert refused.value.code is RequestErrorCode.EXCESSIVE_LOAD

        await other.publish_namespace(TrackNamespace.of("b"))
        held.withdraw()
        await greedy.publish_namespace(TrackNamespace.of("c"))


async def test_a_filter_of_too_many_ranges_is_refused_and_the_session_goes_on(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SessionConfig(max_filter_ranges=2)
    several = RangeFilter(P.OBJECTID_FILTER, ranges=((0, 1), (3, 4), (6, 7)))
    async with staged(certificates, config=config) as (stage, stack):
        connection = await stage.session(stack)
        with pytest.raises(UsageError, match="the peer would refuse"):  # it was told
            await connection.subscribe(NAME, range_filters=(several,))
        monkeypatch.setattr(Session, "_check_filters", lambda *_: None)
        with pytest.raises(RequestRejected) as refused:
            await connection.subscribe(NAME, range_filters=(several,))

        assert refused.value.code is RequestErrorCode.INVALID_FILTER
        assert await is_answered(connection)


async def test_too_many_updates_without_an_answer_end_the_session_and_no_other(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = make_track(1, ended=False)
    asleep, sleep = asyncio.Event(), LocalTrack.sleep

    def noting(held: LocalTrack, on_wanted: Callable[[], None]) -> None:
        sleep(held, on_wanted)
        asleep.set()

    received = Publisher.update_received

    def ignoring(publisher: Publisher, update_id: RequestId, message: RequestUpdate) -> None:
        if publisher._context.role is Role.SERVER or not message.parameters[P.FORWARD]:
            received(publisher, update_id, message)

    monkeypatch.setattr(LocalTrack, "sleep", noting)
    # While the publisher does not answer, it is not known how the Track stands.
    monkeypatch.setattr(Publisher, "update_received", ignoring)
    async with staged(
        certificates,
        RelayOptions(pause_after_s=0.05),
        config=SessionConfig(max_request_updates=2),
    ) as (stage, stack):
        publisher = await stage.session(stack, handler=Serving(track))
        await publisher.publish_namespace(NAME.namespace)
        greedy, other = await stage.session(stack), await stage.session(stack)
        subscription = await greedy.subscribe(NAME, forward=False)
        await asleep.wait()
        monkeypatch.setattr(Setup, "max_request_updates", None)  # who does not look at the limit
        updates = [
            asyncio.create_task(subscription.update(Parameters({P.FORWARD: 1}))) for _ in range(3)
        ]
        await greedy.wait_closed()

        assert greedy.closed is not None
        assert greedy.closed.code is SessionErrorCode.TOO_MANY_REQUEST_UPDATES
        assert await is_answered(other)
        results = await asyncio.gather(*updates, return_exceptions=True)
        assert all(isinstance(result, MoqtError) for result in results)


@pytest.mark.parametrize("way", ["SUBSCRIBE", "PUBLISH"])
async def test_a_track_too_many_is_refused_until_another_is_not_used_any_more(
    certificates: CertificateFiles, way: str
) -> None:
    tracks = [make_track(1, name=FullTrackName.of("many", str(n), "t")) for n in range(3)]
    live = [LocalTrack(track.name) for track in tracks]
    options = RelayOptions(max_tracks=2, linger_s=0)
    async with staged(certificates, options) as (stage, stack):
        publisher = await stage.session(stack, handler=Several(live))
        await publisher.publish_namespace(TrackNamespace.of("many"))
        consumer = await stage.session(stack)
        used = [await consumer.subscribe(track.name) for track in live[:2]]

        if way == "SUBSCRIBE":
            assert await refusal(consumer, live[2].name) is RequestErrorCode.EXCESSIVE_LOAD
        else:
            with pytest.raises(RequestRejected) as refused:
                await publisher.publish(live[2])
            assert refused.value.code is RequestErrorCode.EXCESSIVE_LOAD
        assert stage.relay.tracks_held == 2
        live[0].end()
        async for _ in used[0]:
            pass
        assert await is_answered(await stage.session(stack))  # a round trip later it is seen
        again = await consumer.subscribe(live[2].name)
        assert not again.finished.is_set()
        assert not used[1].finished.is_set()
        assert stage.relay.tracks_held == 2


class Several(Serving):
    """Publishes several Tracks."""

    def __init__(self, tracks: list[LocalTrack]) -> None:
        super().__init__(tracks[0])
        self.tracks = {track.name: track for track in tracks}

    def subscribe_received(self, connection: MoqtConnection, request: Any) -> None:
        connection.session.accept_subscribe(request.request_id, self.tracks[request.track])
