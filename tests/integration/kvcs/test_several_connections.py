"""One retrieval over several connections: each Object once, layer 0 first, whatever is lost."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvcs.consumer.events import (
    Failed,
    FailureReason,
    LayerReady,
    ManifestAccepted,
    PublicationComplete,
    PublicationFound,
    SegmentComplete,
    Summary,
)
from kvcs.consumer.retrieval import Retrieval
from kvcs.consumer.selection import Wish
from kvcs.consumer.sessions import Sessions
from kvcs.kvsp.layout import Component
from kvcs.producer.handler import ServingHandler
from kvcs.producer.segment import Encoding
from kvcs.profile.naming import MANIFEST, MANIFEST_COSE
from kvcs.profile.signing import ProducerKey
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection, QuicSettings, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ParameterType
from moqt.session.config import SessionConfig
from moqt.session.events import FetchReceived, SubscribeReceived
from tests.integration.kvcs.desk import Desk, started
from tests.integration.kvcs.scene import (
    BLOCKS,
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    CountingSink,
    Scene,
    assert_same_cache,
    expectations,
    fill,
    filled,
    hasty,
    in_halves,
    missing_places,
    of_kind,
    on_stage,
    ready,
    run,
)
from tests.integration.relay.stage import producing_behind, relaying, vanish

pytestmark = pytest.mark.network

SILENCE_S = 0.3
TWO, THREE = (hasty(connections=n, silence_s=SILENCE_S, deadline_s=30) for n in (2, 3))
SPREADS = pytest.mark.parametrize("settings", [TWO, THREE], ids=["two", "three"])


class Asked:
    """What each connection of a producer was asked for."""

    def __init__(self) -> None:
        self.requests: dict[MoqtConnection, list[tuple[bytes, range]]] = defaultdict(list)
        self.connections: list[MoqtConnection] = []
        self._changed = asyncio.Event()

    def note(self, connection: MoqtConnection, request: SubscribeReceived | FetchReceived) -> None:
        filters = request.parameters.get(ParameterType.OBJECTID_FILTER, ())
        blocks = range(BLOCKS)
        if filters:
            [(first, last)] = filters[0].ranges
            blocks = range(first, last + 1)
        self.requests[connection].append((request.track.name, blocks))
        self._changed.set()

    def connected(self, connection: MoqtConnection) -> None:
        self.connections.append(connection)
        self._changed.set()

    async def until(self, count: Callable[[], int], least: int) -> None:
        """Return when a number has become so large."""
        async with asyncio.timeout(PATIENCE_S):
            while count() < least:
                self._changed.clear()
                await self._changed.wait()

    def shares(self) -> int:
        """How many tracks, or parts of them, were asked for, manifests not counted."""
        return sum(len(self.data(connection)) for connection in list(self.requests))

    def data(self, connection: MoqtConnection) -> list[tuple[bytes, range]]:
        manifests = (MANIFEST, MANIFEST_COSE)
        return [asked for asked in self.requests[connection] if asked[0] not in manifests]

    @property
    def blocks(self) -> Counter[tuple[bytes, int]]:
        """How often each block of a track was asked for."""
        return Counter(
            (track, block)
            for connection in list(self.requests)
            for track, blocks in self.data(connection)
            for block in blocks
        )

    @property
    def carriers(self) -> list[MoqtConnection]:
        """The connections that were asked for data."""
        return [connection for connection in list(self.requests) if self.data(connection)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Note what producers are asked for."""
    noted, made = Asked(), ServingHandler.connection_made

    def noting(receive: Callable[..., None]) -> Callable[..., None]:
        def noted_first(handler: ServingHandler, connection: MoqtConnection, request: Any) -> None:
            noted.note(connection, request)
            receive(handler, connection, request)

        return noted_first

    def noting_connection(handler: ServingHandler, connection: MoqtConnection) -> None:
        noted.connected(connection)
        made(handler, connection)

    for name in ("subscribe_received", "fetch_received"):
        monkeypatch.setattr(ServingHandler, name, noting(getattr(ServingHandler, name)))
    monkeypatch.setattr(ServingHandler, "connection_made", noting_connection)
    return noted


EACH_BLOCK_ONCE = Counter((track, b) for track in (b"k.raw.s0", b"v.raw.s0") for b in range(BLOCKS))


@asynccontextmanager
async def listening(
    files: CertificateFiles,
    *,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
) -> AsyncIterator[Scene]:
    """A producer that listens with limits of its own."""
    async with on_stage(files) as scene:
        tls = ServerTls(files.certificate_file, files.key_file)
        host, port = await scene.producer.listen("127.0.0.1", 0, tls=tls, quic=quic, config=config)
        scene.spec = replace(scene.spec, uri=f"moqt://{host}:{port}/")
        yield scene


async def the_rest(retrieval: Retrieval) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in retrieval]


def assert_whole(events: list[Any], sink: CountingSink) -> Summary:
    """Everything came, was placed once and told once; return the figures."""
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sorted(ready(events)) == list(range(LAYERS))
    assert len(of_kind(events, PublicationFound)) == 1
    assert sink.placed == EVERYTHING
    assert sink.calls == ["begin", "done"]
    summary = events[-1].summary
    assert (summary.rejected, summary.objects) == (0, EVERYTHING.total())
    assert_same_cache(sink)
    return summary


# -- what should happen --------------------------------------------------------------------------


@SPREADS
async def test_a_finished_publication_comes_over_all_connections_and_in_order(
    certificates: CertificateFiles, asked: Asked, settings: Any
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, settings=settings))

    summary = assert_whole(events, sink)
    assert [type(event) for event in events] == [
        PublicationFound,
        ManifestAccepted,
        *[LayerReady] * LAYERS,
        SegmentComplete,
        PublicationComplete,
    ]
    assert (summary.duplicates, summary.unwanted) == (0, 0)
    assert len(asked.carriers) == settings.connections
    assert asked.blocks == EACH_BLOCK_ONCE


@SPREADS
async def test_each_connection_is_asked_for_a_part_of_every_layer(
    certificates: CertificateFiles, asked: Asked, settings: Any
) -> None:
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        await run(scene.retrieve(settings=settings))

    loads = [sum(len(blocks) for _, blocks in asked.data(c)) for c in asked.carriers]
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == 2 * BLOCKS


@SPREADS
async def test_what_is_produced_meanwhile_comes_layer_by_layer(
    certificates: CertificateFiles, asked: Asked, settings: Any
) -> None:
    sink = CountingSink()
    async with (
        on_stage(certificates, manifest_every=2) as scene,
        scene.retrieve(sink, settings=settings) as retrieval,
    ):
        handle = scene.open()
        for layer in range(LAYERS):
            await fill(handle, [layer])
            assert (await retrieval.layer(layer, timeout_s=PATIENCE_S)).layer == layer
        await handle.finish()
        events = await the_rest(retrieval)

    summary = assert_whole(events, sink)
    assert ready(events) == list(range(LAYERS))
    assert summary.duplicates == 0
    assert len(asked.carriers) == settings.connections


@SPREADS
@pytest.mark.parametrize("steps", [0, 11, 40])
async def test_who_joins_in_the_middle_of_a_layer_gets_each_object_once(
    certificates: CertificateFiles, settings: Any, steps: int
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        production = (
            None
            for layer in range(2, LAYERS)
            for _ in in_halves(handle.publication, segment, layer)
        )
        for _ in range(steps):
            next(production)
        async with scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            for _ in production:
                await asyncio.sleep(0)
            await handle.finish()
            events = await the_rest(retrieval)

    summary = assert_whole(events, sink)
    assert (summary.duplicates, summary.unwanted) == (0, 0)


async def test_with_a_signed_manifest_layers_wait_to_be_attested(
    certificates: CertificateFiles,
) -> None:
    key, sink = ProducerKey.generate(), CountingSink()
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)
    async with on_stage(certificates, producer_key=key) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, expected=expected, settings=THREE))

    summary = assert_whole(events, sink)
    assert summary.attested == EVERYTHING.total()


async def test_several_segments_are_spread_alike(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        await filled(scene.open(), segments=(1, 2, 1, 1))
        events = await run(scene.retrieve(sink, settings=THREE))

    assert sink.placed == EVERYTHING
    assert isinstance(events[-1], PublicationComplete)
    loads = [sum(1 for _ in asked.data(c)) for c in asked.carriers]
    assert len(loads) == 3
    assert_same_cache(sink)


async def test_one_track_of_both_is_spread_alike(certificates: CertificateFiles) -> None:
    sink = CountingSink()
    async with on_stage(certificates, encodings=(Encoding.parse("kv.raw"),)) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, settings=THREE))

    assert isinstance(events[-1], PublicationComplete)
    assert sink.placed == Counter(
        (Component.KV, layer, block) for layer in range(LAYERS) for block in range(BLOCKS)
    )
    assert_same_cache(sink)


async def test_a_part_is_spread_without_the_rest(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    wish = Wish(layers=range(2, 4), blocks=range(1, 4))
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, wish=wish, settings=TWO))

    assert sorted(ready(events)) == [2, 3]
    assert sink.placed.total() == 2 * 2 * 3
    assert set(sink.placed.values()) == {1}
    assert of_kind(events, PublicationComplete)[0].summary.unwanted == 0
    assert {block for _, block in asked.blocks} == {1, 2, 3}


@SPREADS
async def test_through_a_relay_it_is_the_same(
    certificates: CertificateFiles, settings: Any
) -> None:
    sink = CountingSink()
    async with relaying(certificates) as stage, producing_behind(stage, certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        async with scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    summary = assert_whole(events, sink)
    assert summary.duplicates == 0


# -- peers that set limits -----------------------------------------------------------------------


async def test_a_peer_that_takes_no_filters_is_asked_for_whole_tracks(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with listening(certificates, config=SessionConfig(max_filter_ranges=0)) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, settings=THREE))

    assert_whole(events, sink)
    assert asked.blocks == EACH_BLOCK_ONCE
    # K over one connection, V over another; there is nothing for the third.
    assert sorted(asked.data(c) for c in asked.carriers) == [
        [(b"k.raw.s0", range(BLOCKS))],
        [(b"v.raw.s0", range(BLOCKS))],
    ]


@pytest.mark.parametrize("limit", [1, 2])
async def test_connections_that_are_refused_are_done_without_and_told_in_one_line(
    certificates: CertificateFiles, asked: Asked, limit: int
) -> None:
    sink = CountingSink()
    with capture_logs() as lines:
        async with listening(certificates, quic=QuicSettings(max_connections=limit)) as scene:
            await filled(scene.open())
            events = await run(scene.retrieve(sink, settings=replace(THREE, connections=4)))

    assert_whole(events, sink)
    assert len(asked.carriers) == limit
    [line] = [line for line in lines if line["event"] == LogEvent.LANES_MISSING]
    assert (line["wanted"], line["found"]) == (4, limit)
    assert line["reason"]


# -- connections that are lost -------------------------------------------------------------------


def cut_here(retrieval: Retrieval, asked: Asked, number: int) -> None:
    """End a connection at the consumer's side."""
    retrieval._sessions.open[number]._transport.abandon()


def cut_there(retrieval: Retrieval, asked: Asked, number: int) -> None:
    """End a connection so that the consumer hears nothing more of it."""
    vanish(asked.connections[number])


Cut = Callable[[Retrieval, Asked, int], None]
CUTS = pytest.mark.parametrize("cut", [cut_here, cut_there], ids=["closed", "silent"])


@CUTS
@SPREADS
@pytest.mark.parametrize("number", [0, 1], ids=["the lead", "another"])
async def test_the_others_take_over_what_a_lost_connection_lacked(
    certificates: CertificateFiles, asked: Asked, settings: Any, number: int, cut: Cut
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        async with scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            before = asked.shares()
            # In the middle of a layer, and of an Object.
            halves = in_halves(handle.publication, segment, 2)
            for _ in range(BLOCKS * 3 + 2):
                next(halves)
            cut(retrieval, asked, number)
            await asked.until(asked.shares, before + 2)
            for _ in halves:
                pass
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)
    assert len(asked.connections) == settings.connections  # none was made again


@CUTS
async def test_one_after_the_other_may_be_lost(
    certificates: CertificateFiles, asked: Asked, cut: Cut
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0])
        async with scene.retrieve(sink, settings=THREE) as retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            if cut is cut_here:
                sessions = list(retrieval._sessions.open)
                for layer, session in enumerate(sessions[:2], start=1):
                    session._transport.abandon()
                    await fill(handle, [layer])
                    await retrieval.layer(layer, timeout_s=PATIENCE_S)
            else:
                for layer, connection in enumerate(asked.connections[:2], start=1):
                    vanish(connection)
                    await fill(handle, [layer])
                    await retrieval.layer(layer, timeout_s=PATIENCE_S)
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)
    assert len(asked.connections) == 3


async def test_with_the_last_connection_all_of_them_are_made_anew(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0])
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            for session in list(retrieval._sessions.open):
                session._transport.abandon()
            await fill(handle, range(1, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)
    assert len(asked.connections) == 4


async def test_when_all_are_lost_for_good_it_says_at_the_deadline_exactly_what_is_missing(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        settings = replace(THREE, deadline_s=1.5)
        async with scene.retrieve(sink, settings=settings) as retrieval:
            for layer in (0, 1):
                await retrieval.layer(layer, timeout_s=PATIENCE_S)
            await scene.producer._servers[0].close(drain_s=0)
            events = await the_rest(retrieval)

    [failed] = of_kind(events, Failed)
    assert failed.reason is FailureReason.EXPIRED
    assert sorted(ready(events)) == [0, 1]
    assert missing_places(failed) + sink.placed == EVERYTHING


async def test_another_relay_goes_on_over_as_many_connections(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        tls = ServerTls(certificates.certificate_file, certificates.key_file)
        host, port = await scene.producer.listen("127.0.0.1", 0, tls=tls)
        other = replace(scene.spec, uri=f"moqt://{host}:{port}/")
        handle = scene.open()
        await fill(handle, [0, 1])
        async with scene.retrieve(sink, more=[other], settings=TWO) as retrieval:
            for layer in (0, 1):
                await retrieval.layer(layer, timeout_s=PATIENCE_S)
            await scene.producer._servers[0].close(drain_s=0)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)
    assert len(asked.connections) == 4


async def test_a_relay_that_goes_away_is_left_with_all_connections(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        tls = ServerTls(certificates.certificate_file, certificates.key_file)
        host, port = await scene.producer.listen("127.0.0.1", 0, tls=tls)
        uri = f"moqt://{host}:{port}/"
        handle = scene.open()
        await fill(handle, [0, 1])
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            leaving = list(asked.connections)
            for connection in leaving:
                connection.goaway(uri)
            await asked.until(lambda: len(asked.connections), 4)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)
        for connection in leaving:
            await connection.wait_closed()

    assert_whole(events, sink)


async def test_one_connection_that_is_to_be_left_is_not_asked_for_more(
    certificates: CertificateFiles, asked: Asked
) -> None:
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1], await handle.add_segment(2))
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            asked.connections[1].goaway()
            await fill(handle, range(2, LAYERS))
            await retrieval.layer(LAYERS - 1, timeout_s=PATIENCE_S)
            before = asked.data(asked.connections[1])
            await fill(handle, segment=await handle.add_segment(3))
            await handle.finish()
            events = await the_rest(retrieval)

    assert isinstance(events[-1], PublicationComplete)
    assert sink.placed == EVERYTHING
    assert asked.data(asked.connections[1]) == before
    assert len(asked.connections) == 2


# -- connections that are late -------------------------------------------------------------------


async def test_data_do_not_wait_long_for_connections_that_are_late(
    certificates: CertificateFiles, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_come, dials = asyncio.Event(), 0
    dial = Sessions.dial

    async def late(sessions: Sessions, *args: Any) -> Any:
        nonlocal dials
        dials += 1
        if dials > 1:
            await may_come.wait()
        return await dial(sessions, *args)

    monkeypatch.setattr(Sessions, "dial", late)
    sink = CountingSink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, segment=await handle.add_segment(2))
        settings = replace(TWO, spread_wait_s=0.05)
        async with scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(LAYERS - 1, timeout_s=PATIENCE_S)
            first = asked.carriers
            may_come.set()
            await asked.until(lambda: len(asked.connections), 2)
            lanes = retrieval._ways[0].lanes
            assert lanes is not None
            async with asyncio.timeout(PATIENCE_S):
                await lanes.settled.wait()
            await fill(handle, segment=await handle.add_segment(3))
            await handle.finish()
            events = await the_rest(retrieval)

    assert isinstance(events[-1], PublicationComplete)
    assert sink.placed == EVERYTHING
    assert first == asked.connections[:1]
    assert asked.carriers == asked.connections  # the late one took its part of what came later


# -- the command ---------------------------------------------------------------------------------


async def test_the_command_retrieves_over_as_many_connections_as_it_is_told(
    desk: Desk, asked: Asked
) -> None:
    async with on_stage(desk.certificates) as scene:
        await filled(scene.open())
        port = int(scene.spec.uri.rsplit(":", 1)[1].rstrip("/"))
        command = desk.consume("--json", "--connections", "3", "--deadline-s", "20", port=port)
        async with started(command) as process, asyncio.timeout(PATIENCE_S):
            out, _ = await process.communicate()

    lines = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0
    assert lines[-1]["event"] == "publication-complete"
    assert lines[-1]["summary"]["objects"] == EVERYTHING.total()
    assert len(asked.carriers) == 3
    assert asked.blocks == EACH_BLOCK_ONCE
