"""Relays that are killed, go away or lose their publisher: both ends come back by themselves."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    LayerReady,
    PublicationComplete,
    PublicationFound,
)
from kvcs.consumer.retrieval import ConnectionSpec, Retrieval, consume
from kvcs.producer import relay as producer_relay
from moqt.aio import ClientTls, MoqtConnection, QuicSettings, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.relay.server import Relay, RelayOptions
from tests.integration.kvcs import scene as scenes
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
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
)

pytestmark = pytest.mark.network

#: Seconds after a relay is there again in which everybody has come back and is done.
BACK_S = 10.0
SILENCE_S = 0.3
QUICK = hasty(deadline_s=PATIENCE_S, silence_s=SILENCE_S, again_max_s=0.5)


class Noticing(Relay):
    """Tells at once of a publisher it lost, and can be waited for until sessions have come."""

    def __init__(self) -> None:
        super().__init__(RelayOptions(publisher_grace_s=0.0))
        self.sessions = asyncio.Semaphore(0)

    def connection_made(self, connection: MoqtConnection) -> None:
        super().connection_made(connection)
        self.sessions.release()


@dataclass
class Place:
    """A UDP port where a relay listens, or has listened, or will."""

    files: CertificateFiles
    port: int = 0
    relay: Noticing | None = None

    @property
    def spec(self) -> ConnectionSpec:
        uri = f"moqt://127.0.0.1:{self.port}/"
        return ConnectionSpec(uri=uri, tls=ClientTls(ca_file=self.files.ca_file))

    async def start(self) -> None:
        """Have a relay listen that knows nothing of one before it."""
        self.relay = await Noticing().__aenter__()
        tls = ServerTls(self.files.certificate_file, self.files.key_file)
        _, self.port = await self.relay.listen("127.0.0.1", self.port, tls=tls)

    async def kill(self) -> None:
        """End it so that nobody hears of it, as when its process is killed."""
        if self.relay is not None:
            relay, self.relay = self.relay, None
            for server in relay._servers:
                server._listener._close_socket()  # type: ignore[union-attr]
            relay._servers.clear()
            await relay.close()

    async def leave(self, uri: str = "") -> None:
        """End it as SIGTERM does: sessions are asked to go, and have a while for it."""
        assert self.relay is not None
        relay, self.relay = self.relay, None
        await relay.close(drain_s=0.5, new_session_uri=uri)


@asynccontextmanager
async def places(files: CertificateFiles, count: int = 1) -> AsyncIterator[list[Place]]:
    """Relays that know nothing of each other."""
    made = [Place(files) for _ in range(count)]
    try:
        for place in made:
            await place.start()
        yield made
    finally:
        for place in made:
            await place.kill()


@asynccontextmanager
async def producing_at(files: CertificateFiles, *at: Place) -> AsyncIterator[Scene]:
    """A producer that is announced at these places, and that consumers do not reach."""
    async with on_stage(files) as scene:
        for place in at:
            scene.producer.announce_at(place.spec.uri, tls=place.spec.tls)
        yield scene


def retrieving(sink: CountingSink, *at: Place, **options: Any) -> Retrieval:
    return consume(expectations(), [p.spec for p in at], sink, **({"settings": QUICK} | options))


async def the_rest(retrieval: Retrieval) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in retrieval]


def assert_whole(events: Sequence[Event], sink: CountingSink, found: int = 1) -> None:
    """Everything came, was used once and was told once."""
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sorted(ready(events)) == list(range(LAYERS))
    assert len(of_kind(events, PublicationFound)) == found
    assert sink.placed == EVERYTHING
    assert events[-1].summary.rejected == 0
    assert_same_cache(sink)


@pytest.fixture(autouse=True)
def _impatient_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_relay, "SILENCE_S", SILENCE_S)


# -- a relay is killed ---------------------------------------------------------------------------


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_relay_killed_during_production_costs_nobody_a_layer(
    certificates: CertificateFiles, kills: int, consumers: int
) -> None:
    sinks = [CountingSink() for _ in range(consumers)]
    async with (
        places(certificates) as [place],
        producing_at(certificates, place) as scene,
        AsyncExitStack() as stack,
    ):
        handle = scene.open()
        await fill(handle, [0])
        retrievals = [await stack.enter_async_context(retrieving(sink, place)) for sink in sinks]
        for kill in range(kills):
            for retrieval in retrievals:
                await retrieval.layer(kill, timeout_s=PATIENCE_S)
            await place.kill()
            await fill(handle, [kill + 1])
            await place.start()
            began = time.monotonic()
        await fill(handle, range(kills + 1, LAYERS))
        await handle.finish()
        found = [await the_rest(retrieval) for retrieval in retrievals]
        took_s = time.monotonic() - began

    assert took_s < BACK_S
    for events, sink in zip(found, sinks, strict=True):
        assert_whole(events, sink)
        assert events[-1].publication == handle.name  # type: ignore[attr-defined]


async def test_a_relay_killed_while_it_sends_what_was_finished_is_asked_for_the_rest(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = replace(scenes.COMPAT, k_shape=(16, 256), v_shape=(16, 128))
    monkeypatch.setattr(scenes, "COMPAT", wide)
    sink = CountingSink()
    async with places(certificates) as [place], producing_at(certificates, place) as scene:
        await filled(scene.open())
        narrow = replace(
            place.spec, quic=QuicSettings(connection_window=1 << 16, stream_window=1 << 16)
        )
        killing: list[asyncio.Task[None]] = []

        def kill_early(event: Event) -> None:
            if isinstance(event, LayerReady) and not killing:
                killing.append(asyncio.create_task(place.kill()))

        retrieval = consume(expectations(), [narrow], sink, settings=QUICK, on_event=kill_early)
        async with retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            await killing[0]
            assert sink.placed != EVERYTHING
            await place.start()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


async def test_a_relay_killed_before_anything_was_found_is_asked_again(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        places(certificates) as [place],
        producing_at(certificates, place) as scene,
        retrieving(sink, place) as retrieval,
    ):
        assert place.relay is not None
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                await place.relay.sessions.acquire()
        await place.kill()
        await place.start()
        await filled(scene.open())
        events = await the_rest(retrieval)

    assert_whole(events, sink)


async def test_a_relay_that_never_comes_back_is_an_exact_list_at_the_deadline(
    certificates: CertificateFiles,
) -> None:
    sink, settings = CountingSink(), replace(QUICK, deadline_s=1.0)
    async with places(certificates) as [place], producing_at(certificates, place) as scene:
        await fill(scene.open(), [0, 1])
        began = time.monotonic()
        async with retrieving(sink, place, settings=settings) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await place.kill()
            events = await the_rest(retrieval)
        took_s = time.monotonic() - began

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.EXPIRED
    assert missing_places(failed) + sink.placed == EVERYTHING
    assert took_s < 1.0 + 2.0


async def test_the_next_relay_of_the_list_goes_on_where_one_was_killed(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        await fill(handle, [0, 1])
        async with retrieving(sink, first, second) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await first.kill()
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


async def test_the_first_relay_of_the_list_is_asked_again_when_the_next_one_is_killed_too(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        await fill(handle, [0])
        async with retrieving(sink, first, second) as retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            await first.kill()
            await fill(handle, [1, 2])
            await retrieval.layer(2, timeout_s=PATIENCE_S)
            await first.start()
            await second.kill()
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


# -- a publisher is lost behind a relay ----------------------------------------------------------


async def test_a_publisher_that_a_relay_lost_is_waited_for_and_not_taken_for_one_that_gave_up(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with places(certificates) as [place], producing_at(certificates, place) as scene:
        [link] = scene.producer._relays
        handle = scene.open()
        await fill(handle, [0, 1])
        async with retrieving(sink, place) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            assert link.connection is not None
            await link.connection.close(reason="a cable was pulled", drain_s=0)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


async def cut(link: producer_relay.Relay) -> None:
    """Take the session with a relay away from a producer, for good."""
    for task in link._running:
        task.cancel()
    assert link.connection is not None
    await link.connection.close(reason="a cable was pulled", drain_s=0)


async def test_another_relay_that_has_the_publisher_still_goes_on(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        await fill(handle, [0, 1])
        async with retrieving(sink, first, second) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await cut(scene.producer._relays[0])
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


async def test_a_publisher_that_stays_lost_is_an_exact_list_at_the_deadline(
    certificates: CertificateFiles,
) -> None:
    sink, settings = CountingSink(), replace(QUICK, deadline_s=1.0)
    async with places(certificates) as [place], AsyncExitStack() as stack:
        scene = await stack.enter_async_context(producing_at(certificates, place))
        [link] = scene.producer._relays
        await fill(scene.open(), [0, 1])
        began = time.monotonic()
        retrieval = await stack.enter_async_context(retrieving(sink, place, settings=settings))
        await retrieval.layer(1, timeout_s=PATIENCE_S)
        await cut(link)
        events = await the_rest(retrieval)
        took_s = time.monotonic() - began

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.EXPIRED
    assert ready(events) == [0, 1]
    assert missing_places(failed) + sink.placed == EVERYTHING
    assert took_s < 1.0 + 2.0


async def test_another_publication_is_taken_if_nothing_was_used_of_one_whose_publisher_was_lost(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with (
        places(certificates) as [place],
        producing_at(certificates, place) as scene,
        producing_at(certificates, place) as other,
    ):
        [link] = scene.producer._relays
        handle = scene.open()
        segment = await handle.add_segment()
        # Two Objects of each track of the first layer, and half of the next one.
        for _ in islice(in_halves(handle.publication, segment, 0), 3 * 2 * 2 + 2):
            pass
        async with retrieving(sink, place) as retrieval:
            await sink.reached(4)
            await cut(link)
            second = await filled(other.open())
            events = await the_rest(retrieval)

    assert_whole(events, sink, found=2)
    assert events[-1].publication == second.name  # type: ignore[attr-defined]


async def test_a_publication_given_up_behind_a_relay_is_told_at_once(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with places(certificates) as [place], producing_at(certificates, place) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        async with retrieving(sink, place) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await handle.abandon("the engine failed")
            began = time.monotonic()
            events = await the_rest(retrieval)
            took_s = time.monotonic() - began

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.ABANDONED
    assert "the engine failed" in failed.text
    assert took_s < 2.0


# -- a relay goes away ---------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [True, False], ids=["to a URI", "nowhere"])
async def test_a_relay_that_goes_away_is_left_for_where_it_sends_us_or_the_next_one(
    certificates: CertificateFiles, sent: bool
) -> None:
    sink = CountingSink()
    async with (
        places(certificates, 2) as [first, second],
        producing_at(certificates, first, second) as scene,
    ):
        handle = scene.open()
        await fill(handle, [0, 1])
        listed = [first] if sent else [first, second]
        async with retrieving(sink, *listed) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await first.leave(second.spec.uri if sent else "")
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    assert_whole(events, sink)


async def test_a_relay_that_goes_away_and_comes_back_is_gone_back_to_by_both_ends(
    certificates: CertificateFiles,
) -> None:
    sink = CountingSink()
    async with places(certificates) as [place], producing_at(certificates, place) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        async with retrieving(sink, place) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            await place.leave()
            await place.start()
            began = time.monotonic()
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)
            took_s = time.monotonic() - began

    assert_whole(events, sink)
    assert took_s < BACK_S


# -- processes -----------------------------------------------------------------------------------

MODEL_LAYERS, MODEL_TOKENS = 24, 192
MODEL = ["--synthetic", "gpt-oss-20b", "--tokens", str(MODEL_TOKENS)]


@pytest.fixture
def desk(
    tmp_path_factory: pytest.TempPathFactory,
    certificates: CertificateFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    monkeypatch.chdir(folder)  # where no kvcs.toml is
    return Desk(folder, certificates)


def relay_command(desk: Desk, port: int) -> list[str]:
    files = desk.certificates
    return [
        "relay", "--json", "--listen", f"127.0.0.1:{port}", "--drain-s", "0",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip


def produce_command(desk: Desk, port: int, interval_ms: int) -> list[str]:
    return [
        "produce", *MODEL, "--connect", f"moqt://127.0.0.1:{port}/", "--json", "--drain-s", "0",
        "--layer-interval-ms", str(interval_ms), "--scope-key-file", desk["scope.key"],
        "--ca-file", str(desk.certificates.ca_file),
    ]  # fmt: skip


async def events_of(
    process: asyncio.subprocess.Process, on_event: Callable[[dict[str, Any]], None]
) -> None:
    """Hand on what a process tells, until it ends."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        on_event(json.loads(line))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("interval_ms", [0, 150], ids=["finished", "in production"])
@pytest.mark.parametrize("kills", [1, 2])
async def test_a_relay_process_killed_under_load_is_back_with_everybody_in_ten_seconds(
    desk: Desk, kills: int, interval_ms: int, consumers: int
) -> None:
    told: list[list[dict[str, Any]]] = [[] for _ in range(consumers)]
    news = asyncio.Event()

    def listener(number: int) -> Callable[[dict[str, Any]], None]:
        def listen(event: dict[str, Any]) -> None:
            told[number].append(event)
            news.set()

        return listen

    def layers(number: int) -> list[int]:
        return [event["layer"] for event in told[number] if event["event"] == "layer-ready"]

    async def all_have(count: int) -> None:
        while min(len(layers(number)) for number in range(consumers)) < count:
            news.clear()
            await news.wait()

    async with started(["produce", *MODEL, "--prompt-to", desk["prompt.json"]]) as writing:
        assert await writing.wait() == 0
    async with asyncio.timeout(150), AsyncExitStack() as stack:
        relay = await stack.enter_async_context(started(relay_command(desk, 0)))
        port = (await event_of(relay, "listening"))["port"]
        producer = await stack.enter_async_context(
            started(produce_command(desk, port, interval_ms))
        )
        opened = await event_of(producer, "publication-opened")
        listeners = [asyncio.create_task(events_of(producer, lambda event: None))]
        for number in range(consumers):
            command = [
                *desk.consume(prompt=desk["prompt.json"], port=port), "--json",
                "--deadline-s", "90", "--discovery-timeout-s", "20",
                "--connection-window", "524288", "--stream-window", "262144",
            ]  # fmt: skip
            process = await stack.enter_async_context(started(command))
            listeners.append(asyncio.create_task(events_of(process, listener(number))))
        for kill in range(kills):
            await all_have(2 + 3 * kill)
            relay.send_signal(signal.SIGKILL)
            await relay.wait()
            relay = await stack.enter_async_context(started(relay_command(desk, port)))
            await event_of(relay, "listening")
            back = time.monotonic()
        await asyncio.gather(*listeners[1:])
        took_s = time.monotonic() - back
        listeners[0].cancel()

    print(f"{took_s:.2f} s; layers at the end: {[len(layers(n)) for n in range(consumers)]}")
    for number in range(consumers):
        last = told[number][-1]
        assert last["event"] == "publication-complete", last
        assert last["publication"]["publication"] == opened["publication"]
        assert sorted(layers(number)) == list(range(MODEL_LAYERS))
        assert last["summary"]["rejected"] == 0
        assert last["summary"]["objects"] == MODEL_LAYERS * 2 * MODEL_TOKENS // 16
    assert took_s < BACK_S


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_relay_process_that_only_stands_still_is_not_left(desk: Desk) -> None:
    async with asyncio.timeout(100), AsyncExitStack() as stack:
        relay = await stack.enter_async_context(started(relay_command(desk, 0)))
        port = (await event_of(relay, "listening"))["port"]
        produce = desk.without(desk.produce("--json"), "--listen")
        uri = ["--connect", f"moqt://127.0.0.1:{port}/"]
        ca = ["--ca-file", str(desk.certificates.ca_file)]
        producer = await stack.enter_async_context(
            started([*produce, *uri, *ca, "--layer-interval-ms", "1500"])
        )
        await event_of(producer, "publication-opened")
        consumer = await stack.enter_async_context(
            started([*desk.consume(port=port), "--json", "--deadline-s", "60"])
        )
        await event_of(consumer, "layer-ready")
        relay.send_signal(signal.SIGSTOP)
        for process, line in ((consumer, b"connection in doubt"), (producer, b"relay silent")):
            assert process.stderr is not None
            await process.stderr.readuntil(line)
        relay.send_signal(signal.SIGCONT)
        out, err = await consumer.communicate()
        producer.kill()
        _, said = await producer.communicate()

    assert consumer.returncode == 0, err.decode()
    assert out.decode().splitlines()[-1].startswith('{"event":"publication-complete"')
    assert "another connection taken" not in err.decode()
    assert "relay left" not in said.decode()
