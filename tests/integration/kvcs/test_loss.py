"""Whatever is lost, a consumer ends within its deadline and says exactly what is missing."""

import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    ManifestAccepted,
    PublicationComplete,
    PublicationFound,
    PublicationRefused,
)
from kvcs.consumer.retrieval import ConnectionSpec, Retrieval, consume
from kvcs.errors import Expired, KvcsError, PublicationFailed
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE
from kvcs.store.sink import SafetensorsSink
from moqt.aio import (
    ClientTls,
    MoqtConnection,
    QuicSettings,
    RequestHandler,
    ServerTls,
    engine,
    serve,
)
from moqt.aio.alpn import ALPN
from moqt.aio.engine import engine_named
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode
from moqt.names import FullTrackName
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import SubscribeNamespaceReceived, SubscribeReceived
from moqt.session.localtrack import LocalTrack
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    CountingSink,
    Place,
    Scene,
    assert_same_cache,
    expectations,
    fill,
    filled,
    hasty,
    in_halves,
    missing,
    missing_places,
    of_kind,
    on_stage,
    ready,
    run,
)

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[3]
#: Seconds beyond its deadline that a consumer may take to end: it closes its connection, and the
#: machine may be busy.
SLACK_S = 2.0


def placed_before(layers: int, objects: int) -> Counter[Place]:
    """Return the places of whole layers, and of some Objects of the next one."""
    return Counter(
        place
        for place in EVERYTHING
        if place[1] < layers or (place[1] == layers and place[2] < objects)
    )


@asynccontextmanager
async def dying_producer(
    files: CertificateFiles, layers: int, objects: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, ConnectionSpec]]:
    """Have a process produce so much; it is killed at the end of the block at the latest."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.kvcs.dying_producer",
        str(files.certificate_file), str(files.key_file), str(layers), str(objects),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while (line := (await process.stdout.readline()).decode()) != "":
                if line.startswith("moqt://"):
                    break
        yield process, ConnectionSpec(uri=line.strip(), tls=ClientTls(ca_file=files.ca_file))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended_within(seconds: float, retrieval: Retrieval) -> tuple[list[Event], Failed]:
    """Run a retrieval that must fail within so many seconds, and a little for closing."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    events = await run(retrieval)
    assert loop.time() - began < seconds + SLACK_S
    failed = events[-1]
    assert isinstance(failed, Failed)
    return events, failed


# -- a producer that dies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(hasty(deadline_s=1.5), FailureReason.EXPIRED, id="deadline"),
        pytest.param(hasty(stall_timeout_s=0.7), FailureReason.STALLED, id="stall"),
    ],
)
async def test_a_producer_killed_in_the_middle_of_a_layer_is_told_with_the_exact_list(
    certificates: CertificateFiles, settings: Any, reason: FailureReason
) -> None:
    sink, loop = CountingSink(), asyncio.get_running_loop()
    limit_s = min(settings.deadline_s, settings.stall_timeout_s)

    async with dying_producer(certificates, 2, 3) as (process, spec):
        retrieval = consume(expectations(), [spec], sink, settings=settings)
        async with asyncio.timeout(PATIENCE_S), retrieval:
            await sink.reached(placed_before(2, 3).total())
            process.kill()
            killed = loop.time()
            events = [event async for event in retrieval]
            ended = loop.time()

    [failed] = of_kind(events, Failed)
    assert ended - killed < limit_s + SLACK_S
    assert failed.reason is reason
    assert ready(events) == [0, 1]
    assert missing(failed) == [
        "k.raw.s0 layer 2 blocks 3-4",
        "k.raw.s0 layers 3-5 blocks 0-4",
        "v.raw.s0 layer 2 blocks 3-4",
        "v.raw.s0 layers 3-5 blocks 0-4",
    ]
    assert sink.placed == placed_before(2, 3)
    assert missing_places(failed) + sink.placed == EVERYTHING
    assert sink.calls == ["begin", "abandon"]
    assert_same_cache(sink, [0, 1])


async def test_silence_is_noticed_by_the_connection_too(certificates: CertificateFiles) -> None:
    sink = CountingSink()

    async with dying_producer(certificates, 1, 2) as (process, spec):
        impatient = ConnectionSpec(
            uri=spec.uri, tls=spec.tls, quic=QuicSettings(idle_timeout_s=0.6)
        )
        async with asyncio.timeout(PATIENCE_S):
            settings = hasty(deadline_s=2.5)
            async with consume(expectations(), [impatient], sink, settings=settings) as retrieval:
                await sink.reached(placed_before(1, 2).total())
                process.kill()
                events = [event async for event in retrieval]

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.EXPIRED
    assert "nobody listens" in failed.text  # so it has tried to come back
    assert missing_places(failed) + sink.placed == EVERYTHING


async def test_a_file_is_not_left_behind_by_a_retrieval_that_failed(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    sink = SafetensorsSink(tmp_path / "cache.safetensors")

    async with dying_producer(certificates, 1, 2) as (process, spec):
        settings = hasty(stall_timeout_s=0.4)
        async with asyncio.timeout(PATIENCE_S):
            async with consume(expectations(), [spec], sink, settings=settings) as retrieval:
                await retrieval.layer(0)
                process.kill()
                with pytest.raises(Expired):
                    await retrieval.result()

    assert os.listdir(tmp_path) == []


async def test_a_second_producer_takes_over_if_nothing_was_used_of_the_first(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with (
        dying_producer(certificates, 0, 3) as (process, spec),
        on_stage(certificates) as scene,
    ):
        second = await filled(scene.open())
        settings = hasty(stall_timeout_s=0.4, another_s=0.1)
        retrieval = consume(expectations(), [spec, scene.spec], sink, settings=settings)
        async with asyncio.timeout(PATIENCE_S), retrieval:
            await sink.reached(placed_before(0, 3).total())
            process.kill()
            complete = await retrieval.result()
            events = [event async for event in retrieval]

    assert complete.publication == second.name
    assert sink.calls == ["begin", "abandon", "begin", "done"]
    assert sink.placed == EVERYTHING  # of the second one alone: begin() has cleared it
    assert ready(events) == list(range(LAYERS))
    assert_same_cache(sink)


async def test_objects_of_two_publications_are_never_combined(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with (
        dying_producer(certificates, 2, 3) as (process, spec),
        on_stage(certificates) as scene,
    ):
        await filled(scene.open())
        retrieval = consume(
            expectations(), [spec, scene.spec], sink, settings=hasty(stall_timeout_s=0.4)
        )
        async with asyncio.timeout(PATIENCE_S), retrieval:
            await sink.reached(placed_before(2, 3).total())
            process.kill()
            events = [event async for event in retrieval]

    [failed] = of_kind(events, Failed)
    assert len(of_kind(events, PublicationFound)) == 1
    assert ready(events) == [0, 1]
    assert missing_places(failed) + sink.placed == EVERYTHING


async def test_another_way_to_the_same_publication_brings_the_rest(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        host, port = await scene.producer.listen(
            "127.0.0.1", 0, tls=ServerTls(certificates.certificate_file, certificates.key_file)
        )
        other = ConnectionSpec(uri=f"moqt://{host}:{port}/", tls=scene.spec.tls)
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        steps = in_halves(handle.publication, segment, 2)
        for _ in range(3 * 2 * 2 + 2):
            next(steps)
        async with asyncio.timeout(PATIENCE_S), scene.retrieve(sink, more=[other]) as retrieval:
            await sink.reached(placed_before(2, 2).total())
            # The first way ends with an Object half sent, which the second brings again, whole.
            await scene.producer._servers[0].close(drain_s=0)
            for _ in steps:
                pass
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            complete = await retrieval.result()

    assert sink.placed == EVERYTHING
    assert complete.summary.duplicates == 0
    assert_same_cache(sink)


# -- a producer that gives up --------------------------------------------------------------------


async def test_a_publication_given_up_in_the_middle_of_a_layer_is_an_error_at_once(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with on_stage(certificates) as scene:
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        steps = in_halves(handle.publication, segment, 2)
        for _ in range(3 * 2 * 3 + 2):
            next(steps)
        async with asyncio.timeout(PATIENCE_S), scene.retrieve(sink) as retrieval:
            await sink.reached(placed_before(2, 3).total())
            await handle.abandon("the engine failed")
            with pytest.raises(PublicationFailed, match="the engine failed"):
                await retrieval.result()
            with pytest.raises(PublicationFailed):
                await retrieval.layer(2)
            events = [event async for event in retrieval]

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.ABANDONED
    assert ready(events) == [0, 1]
    assert missing_places(failed) + sink.placed == EVERYTHING


async def test_a_producer_that_stops_in_the_middle_of_a_layer_is_told_at_once(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()

    async with AsyncExitStack() as stack:
        scene = await stack.enter_async_context(on_stage(certificates))
        handle = scene.open()
        await handle.add_segment()
        await fill(handle, [0, 1])
        retrieval = await stack.enter_async_context(scene.retrieve(sink))
        await sink.reached(placed_before(2, 0).total())
        async with asyncio.timeout(PATIENCE_S):
            closing = asyncio.create_task(scene.producer._close(0.0))
            with pytest.raises(KvcsError):
                await retrieval.result()
            await closing

    assert retrieval.failed is not None
    assert retrieval.failed.reason in (FailureReason.ABANDONED, FailureReason.UNREACHABLE)
    assert missing_places(retrieval.failed) + sink.placed == EVERYTHING


# -- silence -------------------------------------------------------------------------------------


class Mute(RequestHandler):
    """Answers requests of a real producer's publications, but for some, which it ignores."""

    def __init__(self, scene: Scene, ignored: Callable[[str], bool]) -> None:
        self._answers = scene.producer.answers
        self._ignored = ignored

    def subscribe_namespace_received(
        self, connection: MoqtConnection, request: SubscribeNamespaceReceived
    ) -> None:
        answer = self._answers.namespaces(request.prefix)
        if not self._ignored("namespaces") and isinstance(answer, NamespaceDirectory):
            connection.session.accept_namespaces(request.request_id, answer)

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        if self._ignored(request.track.name.decode()):
            return
        track = self._answers.track(request.track)
        if self._ignored("objects"):
            # Accepted, and then nothing: what a relay does whose own upstream is silent.
            track = LocalTrack(FullTrackName(request.track.namespace, request.track.name))
        if isinstance(track, LocalTrack):
            connection.session.accept_subscribe(request.request_id, track)
        else:
            code = RequestErrorCode.DOES_NOT_EXIST
            connection.session.reject(request.request_id, code, "no such track")


@asynccontextmanager
async def mute(
    certificates: CertificateFiles, ignored: Callable[[str], bool]
) -> AsyncIterator[ConnectionSpec]:
    """Have a server that leaves some requests without an answer."""
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        tls = ServerTls(certificates.certificate_file, certificates.key_file)
        server = await serve("127.0.0.1", 0, tls=tls, handler=Mute(scene, ignored))
        try:
            yield ConnectionSpec(uri=f"moqt://127.0.0.1:{server.address[1]}/", tls=scene.spec.tls)
        finally:
            await server.close(drain_s=0)


@pytest.mark.parametrize(
    ("ignored", "found"),
    [
        pytest.param({"namespaces"}, 0, id="discovery"),
        pytest.param({MANIFEST_COSE.decode()}, 1, id="the signed manifest"),
        pytest.param({MANIFEST.decode()}, 1, id="the manifest"),
        pytest.param({"objects"}, 1, id="every Object"),
    ],
)
@pytest.mark.parametrize("by", ["deadline", "request"])
async def test_a_relay_that_never_answers_before_the_first_manifest_is_left_in_time(
    certificates: CertificateFiles, ignored: set[str], found: int, by: str
) -> None:
    # Time for a handshake on a machine that does other work too, which it must not run out on.
    settings = hasty(deadline_s=1.5) if by == "deadline" else hasty(request_timeout_s=0.3)
    sink = CountingSink()

    async with mute(certificates, ignored.__contains__) as spec:
        retrieval = consume(expectations(), [spec], sink, settings=settings)
        events, failed = await ended_within(1.5 if by == "deadline" else 0.6, retrieval)

    assert len(of_kind(events, PublicationFound)) == found
    assert not of_kind(events, ManifestAccepted)
    assert sink.calls == []
    assert failed.reason is not FailureReason.CANCELLED


async def test_who_is_refused_for_want_of_room_asks_again_until_there_is_some(
    certificates: CertificateFiles,
) -> None:
    class Full(Mute):
        """Has no room for a publication the first three times that it is asked for it."""

        refusals = 3

        def subscribe_received(
            self, connection: MoqtConnection, request: SubscribeReceived
        ) -> None:
            if self.refusals:
                Full.refusals -= 1
                code = RequestErrorCode.EXCESSIVE_LOAD
                connection.session.reject(request.request_id, code, "the cache is in use")
            else:
                super().subscribe_received(connection, request)

    sink = CountingSink()
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        tls = ServerTls(certificates.certificate_file, certificates.key_file)
        handler = Full(scene, frozenset().__contains__)
        server = await serve("127.0.0.1", 0, tls=tls, handler=handler)
        spec = ConnectionSpec(uri=f"moqt://127.0.0.1:{server.address[1]}/", tls=scene.spec.tls)
        try:
            events = await run(
                consume(expectations(), [spec], sink, settings=hasty(deadline_s=15.0))
            )
        finally:
            await server.close(drain_s=0)

    assert isinstance(events[-1], PublicationComplete)
    assert not of_kind(events, PublicationRefused)
    assert Full.refusals == 0


@pytest.mark.parametrize(
    "settings",
    [hasty(deadline_s=0.6), hasty(request_timeout_s=0.3), hasty(stall_timeout_s=0.4)],
    ids=["deadline", "request", "stall"],
)
async def test_a_relay_that_never_answers_for_one_track_leaves_that_track_missing(
    certificates: CertificateFiles, settings: Any
) -> None:
    sink = CountingSink()

    async with mute(certificates, "v.raw.s0".__eq__) as spec:
        retrieval = consume(expectations(), [spec], sink, settings=settings)
        events, failed = await ended_within(0.6, retrieval)

    assert ready(events) == []
    assert missing(failed) == ["v.raw.s0 layers 0-5 blocks 0-4"]
    assert sink.placed.total() == LAYERS * BLOCKS
    assert {component for component, _, _ in sink.placed} == {Component.K}


async def test_a_session_that_is_never_set_up_is_left_in_time(
    certificates: CertificateFiles,
) -> None:
    class Deaf:
        """A QUIC peer that speaks no MOQT."""

        def connected(self) -> None: ...
        def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None: ...
        def stream_reset_received(self, stream_id: int, code: int) -> None: ...
        def stop_sending_received(self, stream_id: int, code: int) -> None: ...
        def datagram_received(self, data: bytes) -> None: ...
        def connection_lost(self, lost: Any) -> None: ...
        def flush(self) -> None: ...

    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    listener = await engine_named(None).listen(
        "127.0.0.1", 0, QuicSettings(), tls, lambda transport: Deaf(), alpn=[ALPN]
    )
    try:
        spec = ConnectionSpec(
            uri=f"moqt://127.0.0.1:{listener.address[1]}/",
            tls=ClientTls(ca_file=certificates.ca_file),
        )
        settings = hasty(connect_timeout_s=0.5)
        retrieval = consume(expectations(), [spec], CountingSink(), settings=settings)
        _, failed = await ended_within(0.5, retrieval)
    finally:
        listener.close()

    assert failed.reason is FailureReason.UNREACHABLE


async def test_an_address_that_swallows_everything_is_left_in_time(
    certificates: CertificateFiles,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        spec = ConnectionSpec(
            uri=f"moqt://127.0.0.1:{hole.getsockname()[1]}/",
            tls=ClientTls(ca_file=certificates.ca_file),
        )
        settings = hasty(connect_timeout_s=0.5)
        retrieval = consume(expectations(), [spec], CountingSink(), settings=settings)
        _, failed = await ended_within(0.5, retrieval)

    assert failed.reason is FailureReason.UNREACHABLE


async def test_the_whole_deadline_covers_every_connection_that_is_tried(
    certificates: CertificateFiles,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind(("127.0.0.1", 0))
        uri = f"moqt://127.0.0.1:{hole.getsockname()[1]}/"
        specs = [ConnectionSpec(uri=uri, tls=ClientTls(ca_file=certificates.ca_file))] * 20
        settings = hasty(connect_timeout_s=0.4, deadline_s=0.8)
        retrieval = consume(expectations(), specs, CountingSink(), settings=settings)
        _, failed = await ended_within(0.8, retrieval)

    assert failed.reason is FailureReason.EXPIRED


@pytest.mark.parametrize("wait", ["layer", "result", "iteration"])
async def test_no_wait_outlasts_the_retrieval(certificates: CertificateFiles, wait: str) -> None:
    async with on_stage(certificates) as scene:
        await fill(scene.open(), [0])
        async with scene.retrieve(settings=hasty(deadline_s=0.5)) as retrieval:

            async def iterate() -> None:
                async for _ in retrieval:
                    pass

            waits: dict[str, Callable[[], Awaitable[Any]]] = {
                "layer": lambda: retrieval.layer(3),
                "result": retrieval.result,
                "iteration": iterate,
            }
            async with asyncio.timeout(0.5 + SLACK_S):
                with contextlib.nullcontext() if wait == "iteration" else pytest.raises(Expired):
                    await waits[wait]()

    assert retrieval.failed is not None


@pytest.mark.parametrize("end", ["complete", "left", "callback"])
async def test_however_it_ends_a_retrieval_leaves_no_connection_behind(
    certificates: CertificateFiles, end: str
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, LayerReady):
            raise ZeroDivisionError

    async with on_stage(certificates) as scene:
        await filled(scene.open())
        retrieval = scene.retrieve(on_event=fail if end == "callback" else None)
        with pytest.raises(ZeroDivisionError) if end == "callback" else contextlib.nullcontext():
            async with asyncio.timeout(PATIENCE_S), retrieval:
                if end != "left":
                    await retrieval.result()
                else:
                    await retrieval.layer(0)

        [connection] = retrieval._sessions.open
        transport: Any = connection._transport
        await transport.wait_closed()
        if engine.DEFAULT == "aioquic":
            assert transport._endpoint.closed
        else:
            assert not transport._worker.context.started


async def test_a_producer_that_goes_on_after_a_pause_is_waited_for(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0])
        async with scene.retrieve(settings=hasty(stall_timeout_s=2.0)) as retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            with pytest.raises(Expired):
                await retrieval.layer(1, timeout_s=0.5)
            await fill(handle, range(1, LAYERS))
            await handle.finish()
            complete = await retrieval.result()

    assert isinstance(complete, PublicationComplete)
