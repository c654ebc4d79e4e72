"""A server of what a producer has that answers as a test wants, and notes what it is asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from kvcs.consumer.retrieval import ConnectionSpec
from moqt.aio import MoqtConnection, RequestHandler, ServerTls, serve
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import GroupOrder, ParameterType, RequestErrorCode, StreamErrorCode
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.coverage import Coverage, Knowledge
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    FetchReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
)
from moqt.session.fetching import PeerFetch
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.integration.kvcs.scene import PATIENCE_S, Scene

Asked = tuple[str, LocationFilter, list[tuple[int, int | None]]]
Lost = tuple[str, int, int]
Answer = Callable[[MoqtConnection, FetchReceived, LocalTrack], None]

K, V = "k.raw.s0", "v.raw.s0"


def in_full(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
    connection.session.accept_fetch(request.request_id, track)


def refused(code: RequestErrorCode) -> Answer:
    def answer(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
        connection.session.reject(request.request_id, code, "as the test wants")

    return answer


def without(*lost: Lost, known: Knowledge = Knowledge.COMPLETE) -> Answer:
    """Serve a track of which some Objects are not there; ``known`` is what is known of them."""

    def answer(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
        name, coverage = request.track.name.decode(), Coverage()
        copy = LocalTrack(request.track, coverage=coverage)
        for _, subgroup in track.subgroups_since(0):
            made = copy.open_subgroup(subgroup.group_id, priority=subgroup.priority)
            for obj in subgroup.objects:
                if (name, subgroup.group_id, obj.object_id) in lost:
                    coverage.mark(obj.location, obj.location, known)
                else:
                    made.publish(obj.object_id, *obj.parts, status=obj.status)
            made.close()
        connection.session.accept_fetch(request.request_id, copy)

    return answer


def unanswered(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
    """Leave a FETCH without an answer."""


def standing_still(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
    """Accept a FETCH, and then send nothing, as one does whose own upstream is silent."""
    pending = LocalTrack(request.track, coverage=Coverage(Knowledge.PENDING))
    assert track.largest is not None
    pending.raise_largest(track.largest)
    connection.session.accept_fetch(request.request_id, pending)


def breaking_off(code: StreamErrorCode) -> Answer:
    """Serve K as it should be, and nothing of V before its stream is reset."""

    def answer(connection: MoqtConnection, request: FetchReceived, track: LocalTrack) -> None:
        connection.session.accept_fetch(request.request_id, track)
        if request.track.name == V.encode():
            fetch = connection.session._requests.find(request.request_id, PeerFetch)
            assert fetch is not None
            assert fetch._flow is not None
            fetch._flow.give_up(code)

    return answer


class Server(RequestHandler):
    """Serves a producer's publications, FETCH as a test wants it, and notes what it is asked."""

    def __init__(self, scene: Scene, answer: Answer) -> None:
        self.fetches: list[FetchReceived] = []
        self.subscribed: list[str] = []
        self.subscriptions: list[tuple[MoqtConnection, SubscribeReceived]] = []
        self.prefixes: list[TrackNamespace] = []
        self.refuse: Callable[[TrackNamespace], RequestErrorCode | None] = lambda _: None
        self.answer = answer
        self.has_room = True
        """Whether subscriptions are accepted; if not, they are refused for now."""

        self._asked = asyncio.Event()
        self._answers = scene.producer.answers

    @property
    def asked(self) -> list[Asked]:
        """What was fetched, in the order of tracks."""
        found: list[Asked] = []
        for request in self.fetches:
            assert request.parameters[ParameterType.GROUP_ORDER] == GroupOrder.ASCENDING
            filters = request.parameters.get(ParameterType.OBJECTID_FILTER, ())
            ranges = [run for one in filters for run in one.ranges]
            location = request.parameters[ParameterType.LOCATION_FILTER]
            found.append((request.track.name.decode(), location, ranges))
        return sorted(found, key=str)

    async def subscribed_to(self, count: int) -> None:
        """Return when it has been asked for so many subscriptions."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.subscribed) < count:
                self._asked.clear()
                await self._asked.wait()

    async def prefix_asked(self) -> None:
        """Return when it has been asked for namespaces."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.prefixes:
                self._asked.clear()
                await self._asked.wait()

    async def fetched(self, count: int) -> None:
        """Return when it has been asked for so many fetches."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.fetches) < count:
                self._asked.clear()
                await self._asked.wait()

    @property
    def data_subscribed(self) -> list[str]:
        return [name for name in self.subscribed if not name.startswith("manifest")]

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        self.prefixes.append(request.prefix)
        self._asked.set()
        if (code := self.refuse(request.prefix)) is not None:
            connection.session.reject(request.request_id, code, "as the test wants")
            return
        directory = self._answers.namespaces(request.prefix)
        assert isinstance(directory, NamespaceDirectory)
        connection.session.accept_namespaces(request.request_id, directory)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        self.subscribed.append(request.track.name.decode())
        self.subscriptions.append((connection, request))
        self._asked.set()
        if not self.has_room:
            connection.session.reject(request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "full")
        elif (track := self._find(connection, request)) is not None:
            connection.session.accept_subscribe(request.request_id, track)

    def fetch_received(self, connection: MoqtConnection, request: FetchReceived) -> None:
        self.fetches.append(request)
        self._asked.set()
        if (track := self._find(connection, request)) is not None:
            self.answer(connection, request, track)

    def _find(
        self, connection: MoqtConnection, request: SubscribeReceived | FetchReceived
    ) -> LocalTrack | None:
        track = self._answers.track(request.track)
        if isinstance(track, LocalTrack):
            return track
        connection.session.reject(request.request_id, track.code, track.reason)
        return None


@asynccontextmanager
async def serving(
    scene: Scene, files: CertificateFiles, answer: Answer = in_full, *, filters: int = 64
) -> AsyncIterator[tuple[Server, ConnectionSpec]]:
    """Have a server listen that serves what a producer has."""
    handler = Server(scene, answer)
    listener = await serve(
        "127.0.0.1",
        0,
        tls=ServerTls(files.certificate_file, files.key_file),
        handler=handler,
        config=SessionConfig(max_filter_ranges=filters),
    )
    try:
        spec = replace(scene.spec, uri=f"moqt://127.0.0.1:{listener.address[1]}/")
        yield handler, spec
    finally:
        await listener.close(drain_s=0)
