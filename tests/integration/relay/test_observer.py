"""What a relay tells who observes it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from moqt.aio import ClientTls, MoqtConnection, ServerTls, connect
from moqt.aio.tls import CertificateFiles
from moqt.errors import RequestRejected
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.observer import Peer, RelayObserver
from moqt.relay.server import Relay
from moqt.session.config import SessionConfig
from moqt.session.guests import GuestLimits, Guests
from moqt.session.localtrack import LocalTrack
from tests.session.pair import payload_of

pytestmark = pytest.mark.network

HERE = Peer("127.0.0.1", "127.0.0.1")
NAMESPACE = TrackNamespace.of("seen", "here")


class Notes(RelayObserver):
    """Notes what it is told, and who waits for it."""

    def __init__(self) -> None:
        self._told = asyncio.Queue[tuple[object, ...]]()

    def namespace_announced(self, peer: Peer, prefix: TrackNamespace) -> None:
        self._told.put_nowait(("announced", peer, prefix))

    def namespace_withdrawn(self, peer: Peer, prefix: TrackNamespace) -> None:
        self._told.put_nowait(("withdrawn", peer, prefix))

    def track_offered(self, peer: Peer, track: FullTrackName) -> None:
        self._told.put_nowait(("offered", peer, track))

    def track_malformed(self, track: FullTrackName, reason: str) -> None:
        self._told.put_nowait(("malformed", track))

    def peer_limited(self, peer: Peer, reason: str) -> None:
        self._told.put_nowait(("limited", peer, reason))

    async def next(self) -> tuple[object, ...]:
        return await self._told.get()


@asynccontextmanager
async def observed(
    files: CertificateFiles,
    *,
    sessions: int = 1,
    config: SessionConfig | None = None,
    guests: Guests | None = None,
) -> AsyncIterator[tuple[Notes, list[MoqtConnection]]]:
    notes = Notes()
    async with (
        asyncio.timeout(30),
        Relay(config=config, guests=guests, observer=notes) as relay,
        AsyncExitStack() as stack,
    ):
        tls = ServerTls(files.certificate_file, files.key_file)
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        uri, client = f"moqt://127.0.0.1:{port}/", ClientTls(ca_file=files.ca_file)
        yield (
            notes,
            [
                await stack.enter_async_context(connect(uri, tls=client, drain_s=0.1))
                for _ in range(sessions)
            ],
        )


async def test_what_is_announced_is_told_and_that_it_was_withdrawn(
    certificates: CertificateFiles,
) -> None:
    async with observed(certificates) as (notes, [publisher]):
        announced = await publisher.publish_namespace(NAMESPACE)
        assert await notes.next() == ("announced", HERE, NAMESPACE)
        announced.withdraw()
        assert await notes.next() == ("withdrawn", HERE, NAMESPACE)


async def test_what_a_lost_session_had_announced_is_withdrawn(
    certificates: CertificateFiles,
) -> None:
    async with observed(certificates) as (notes, [publisher]):
        for name in ("a", "b"):
            await publisher.publish_namespace(TrackNamespace.of(name))
            await notes.next()
        await publisher.close(drain_s=0.1)
        assert [await notes.next() for _ in "ab"] == [
            ("withdrawn", HERE, TrackNamespace.of(name)) for name in ("a", "b")
        ]


async def test_a_track_that_contradicts_itself_is_told(certificates: CertificateFiles) -> None:
    name = FullTrackName(NAMESPACE, b"track")
    tracks = [LocalTrack(name) for _ in range(2)]
    async with observed(certificates, sessions=2) as (notes, publishers):
        for number, (publisher, track) in enumerate(zip(publishers, tracks, strict=True)):
            publisher.offer(track)
            assert await notes.next() == ("offered", HERE, name)
            payload = payload_of(Location(0, 0))
            track.open_subgroup(0).publish(0, payload if number == 0 else payload[::-1])
            publisher.wake()
        assert await notes.next() == ("malformed", name)


@pytest.mark.parametrize(
    ("config", "guests", "reason"),
    [
        (SessionConfig(max_requests_per_s=0.25), None, "more than 0.25 requests a second"),
        (
            None,
            Guests(GuestLimits(max_requests_per_s_of_peer=0.25)),
            "more than 0.25 requests a second",
        ),
        (None, Guests(GuestLimits(max_requests_of_peer=1)), "1 requests are open"),
        (SessionConfig(max_requests=1), None, "1 requests are open"),
    ],
    ids=["rate of a session", "rate of a peer", "requests of a peer", "requests of a session"],
)
async def test_who_is_at_a_limit_is_told(
    certificates: CertificateFiles,
    config: SessionConfig | None,
    guests: Guests | None,
    reason: str,
) -> None:
    async with observed(certificates, config=config, guests=guests) as (notes, [peer]):
        await peer.publish_namespace(TrackNamespace.of("first"))
        assert (await notes.next())[0] == "announced"
        with pytest.raises(RequestRejected, match="EXCESSIVE_LOAD"):
            await peer.publish_namespace(TrackNamespace.of("second"))
        assert await notes.next() == ("limited", HERE, reason)


async def test_requests_are_counted_over_all_sessions_of_a_peer(
    certificates: CertificateFiles,
) -> None:
    guests = Guests(GuestLimits(max_requests_of_peer=2))
    async with observed(certificates, sessions=2, guests=guests) as (_, [one, other]):
        for number, peer in enumerate((one, other)):
            await peer.publish_namespace(TrackNamespace.of(str(number)))
        with pytest.raises(RequestRejected, match="EXCESSIVE_LOAD"):
            await one.publish_namespace(TrackNamespace.of("third"))
        await other.close(drain_s=0.1)
        while guests.sessions_of("127.0.0.1") > 1:  # noqa: ASYNC110  # a turn of the loop each
            await asyncio.sleep(0)
        await one.publish_namespace(TrackNamespace.of("third"))
