"""A retrieval whose connections are in processes of their own: the same cache, the same events."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from kvcs.consumer.events import (
    Event,
    Failed,
    FailureReason,
    ObjectRejected,
    PublicationComplete,
    PublicationFound,
    Summary,
)
from kvcs.consumer.failures import Failure
from kvcs.consumer.processes import Process
from kvcs.consumer.retrieval import ConnectionSpec, Retrieval, consume
from kvcs.consumer.selection import Wish
from kvcs.errors import ConfigError, Rejection
from kvcs.kvsp.codecs import CodecRegistry
from kvcs.producer.segment import Encoding
from kvcs.profile.signing import ProducerKey
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink, SafetensorsSink
from kvcs.telemetry import Counter, LogEvent
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    Scene,
    assert_same_cache,
    corrupt,
    expectations,
    fill,
    filled,
    flip,
    hasty,
    in_halves,
    missing,
    missing_places,
    of_kind,
    on_stage,
    ready,
    run,
    tensors,
)
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = pytest.mark.network

#: An interpreter takes its time to start on a machine that is busy.
APART = hasty(processes=True, connect_timeout_s=20, deadline_s=40, stall_timeout_s=20)
ONE, TWO, THREE = (replace(APART, connections=n) for n in (1, 2, 3))
PATIENT_S = 50.0


def pids(retrieval: Retrieval) -> list[int]:
    return [process._process.pid for process in retrieval._processes._all]


def carrying(retrieval: Retrieval) -> list[int]:
    """Return the two processes, which data come over; call it once a layer is there."""
    lanes = [process.lane for process in retrieval._processes._all]
    assert [lane is not None and bool(lane._errands) for lane in lanes] == [True, True]
    return pids(retrieval)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def told(pid: int) -> bytes:
    """What a process was started with: arguments and environment."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


async def the_rest(retrieval: Retrieval) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in retrieval]


def assert_whole(events: Sequence[Event], sink: ArraySink) -> Summary:
    """Everything came and was told once; return the figures."""
    assert isinstance(events[-1], PublicationComplete), events[-1]
    assert sorted(ready(events)) == list(range(LAYERS))
    assert len(of_kind(events, PublicationFound)) == 1
    summary = events[-1].summary
    assert (summary.objects, summary.rejected) == (EVERYTHING.total(), 0)
    assert_same_cache(sink)
    assert sink.complete
    return summary


# -- what should happen --------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [ONE, THREE], ids=["one", "three"])
async def test_a_finished_publication_is_told_as_by_one_process(
    certificates: CertificateFiles, settings: Any
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates) as scene:
        await filled(scene.open())
        alone = await run(scene.retrieve())
        events = await run(scene.retrieve(sink, settings=settings), PATIENT_S)

    summary = assert_whole(events, sink)
    assert [e.to_json() for e in events[:-1]] == [e.to_json() for e in alone[:-1]]
    assert (summary.duplicates, summary.unwanted) == (0, 0)
    assert summary.octets == of_kind(alone, PublicationComplete)[0].summary.octets


@pytest.mark.slow
async def test_what_is_produced_meanwhile_comes_layer_by_layer(
    certificates: CertificateFiles,
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates, manifest_every=2) as scene:
        handle = scene.open()
        await fill(handle, [0])
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            for layer in range(1, LAYERS):
                await retrieval.layer(layer - 1, timeout_s=PATIENCE_S)
                # What has been told is there, for the caller to compute with.
                k, _ = tensors(layer - 1)
                np.testing.assert_array_equal(sink.k[layer - 1].view("u2"), k.view("u2"))
                await fill(handle, [layer])
            await handle.finish()
            events = await the_rest(retrieval)

    summary = assert_whole(events, sink)
    assert ready(events) == list(range(LAYERS))
    assert summary.duplicates == 0


@pytest.mark.slow
async def test_who_joins_through_a_relay_in_the_middle_of_a_layer_gets_each_object_once(
    certificates: CertificateFiles,
) -> None:
    sink = SharedArraySink()
    async with relaying(certificates) as stage, producing_behind(stage, certificates) as scene:
        handle = scene.open()
        segment = await handle.add_segment()
        await fill(handle, [0, 1])
        halves = in_halves(handle.publication, segment, 2)
        for _ in range(11):
            next(halves)
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            for _ in halves:
                await asyncio.sleep(0)
            await fill(handle, range(3, LAYERS))
            await handle.finish()
            events = await the_rest(retrieval)

    summary = assert_whole(events, sink)
    assert summary.duplicates == 0


@pytest.mark.slow
async def test_a_file_is_written_by_several_processes(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    path = tmp_path / "cache.safetensors"
    async with on_stage(certificates) as scene:
        await filled(scene.open(), segments=(2, 3))
        events = await run(scene.retrieve(SafetensorsSink(path), settings=TWO), PATIENT_S)

    assert isinstance(events[-1], PublicationComplete)
    found = load_file(path)
    for layer in range(LAYERS):
        for name, expected in zip("kv", tensors(layer), strict=True):
            np.testing.assert_array_equal(found[f"{name}.{layer}"].view("u2"), expected.view("u2"))
    assert sorted(os.listdir(tmp_path)) == ["cache.json", "cache.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["kv.raw", "shuffle-zstd"])
async def test_other_codecs_and_forms_are_decoded_there(
    certificates: CertificateFiles, encoding: str
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates, encodings=(Encoding.parse(encoding),)) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, settings=TWO), PATIENT_S)

    assert isinstance(events[-1], PublicationComplete)
    assert_same_cache(sink)


@pytest.mark.slow
async def test_a_part_is_placed_where_it_belongs(certificates: CertificateFiles) -> None:
    sink, wish = SharedArraySink(), Wish(layers=range(2, 4), blocks=range(1, 4))
    async with on_stage(certificates) as scene:
        await filled(scene.open(), segments=(2, 3))
        events = await run(scene.retrieve(sink, wish=wish, settings=TWO), PATIENT_S)

    assert sorted(ready(events)) == [2, 2, 3, 3]
    for layer in (2, 3):
        k, v = tensors(layer, first=1, blocks=3)
        np.testing.assert_array_equal(sink.k[layer].view("u2"), k.view("u2"))
        np.testing.assert_array_equal(sink.v[layer].view("u2"), v.view("u2"))


@pytest.mark.slow
async def test_with_a_signed_manifest_layers_wait_to_be_attested(
    certificates: CertificateFiles,
) -> None:
    key, sink = ProducerKey.generate(), SharedArraySink()
    expected = expectations(trusted={key.kid: key.public_key}, require_signature=True)
    async with on_stage(certificates, producer_key=key) as scene:
        await filled(scene.open())
        events = await run(scene.retrieve(sink, expected=expected, settings=TWO), PATIENT_S)

    summary = assert_whole(events, sink)
    assert summary.attested == EVERYTHING.total()


# -- Objects that are wrong ----------------------------------------------------------------------


def forge(payload: bytearray) -> None:
    """Change data and digest, which only a manifest can tell."""
    payload[100] ^= 1
    payload[36:68] = sha256(payload[68:]).digest()


@pytest.mark.slow
@pytest.mark.parametrize("change", [flip(100), forge], ids=["changed", "forged"])
async def test_one_changed_octet_costs_its_layer_and_nothing_else(
    certificates: CertificateFiles, change: Any
) -> None:
    async with on_stage(certificates) as scene:
        publication = await filled(scene.open())
        corrupt(publication, "v.raw.s0", 2, 3, change)
        events = await run(scene.retrieve(SharedArraySink(), settings=TWO), PATIENT_S)

    rejected = of_kind(events, ObjectRejected)
    assert {(str(e.track), e.layer, e.block, e.reason) for e in rejected} == {
        ("v.raw.s0", 2, 3, Rejection.DIGEST)
    }
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.INCOMPLETE
    assert missing(failed) == ["v.raw.s0 layer 2 block 3"]
    assert sorted(ready(events)) == [0, 1, 3, 4, 5]


# -- processes that are lost ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 2], ids=["one of two", "both"])
async def test_what_a_killed_process_lacked_is_taken_over(
    certificates: CertificateFiles, killed: int
) -> None:
    sink = SharedArraySink()
    with capture_logs() as lines:
        async with on_stage(certificates) as scene:
            handle = scene.open()
            segment = await handle.add_segment()
            await fill(handle, [0, 1])
            async with scene.retrieve(sink, settings=TWO) as retrieval:
                await retrieval.layer(1, timeout_s=PATIENCE_S)
                halves = in_halves(handle.publication, segment, 2)
                for _ in range(11):
                    next(halves)
                for pid in carrying(retrieval)[:killed]:
                    os.kill(pid, signal.SIGKILL)
                for _ in halves:
                    pass
                await fill(handle, range(3, LAYERS))
                await handle.finish()
                events = await the_rest(retrieval)

    assert_whole(events, sink)
    lost = [line for line in lines if line["event"] == LogEvent.LANE_LOST]
    assert [line["reason"] for line in lost] == ["its process ended with status -9"] * killed


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 2], ids=["one of two", "both"])
async def test_what_a_process_that_stands_still_lacked_is_taken_over(
    certificates: CertificateFiles, stopped: int
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        settings = replace(TWO, silence_s=1.0)
        async with scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            standing_still = carrying(retrieval)[:stopped]
            for pid in standing_still:
                os.kill(pid, signal.SIGSTOP)
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            await retrieval.result()
            # It was ended before anybody else was asked for what it lacked.
            assert not any(is_there(pid) for pid in standing_still)
            events = await the_rest(retrieval)

    assert_whole(events, sink)


@pytest.mark.slow
async def test_what_no_process_brought_is_an_exact_list_when_the_publication_is_given_up(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1])
        async with scene.retrieve(SharedArraySink(), settings=TWO) as retrieval:
            for layer in (0, 1):
                await retrieval.layer(layer, timeout_s=PATIENCE_S)
            for pid in carrying(retrieval):
                os.kill(pid, signal.SIGKILL)
            await handle.abandon("the engine failed")
            events = await the_rest(retrieval)

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.ABANDONED
    assert sorted(ready(events)) == [0, 1]
    assert missing_places(failed).total() + failed.summary.objects == EVERYTHING.total()


@pytest.mark.slow
async def test_the_manifest_is_followed_over_another_connection_when_its_own_is_lost(
    certificates: CertificateFiles,
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0, 1], await handle.add_segment(2))
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            await retrieval.layer(1, timeout_s=PATIENCE_S)
            carrying(retrieval)
            retrieval._sessions.open[0]._transport.abandon()
            await fill(handle, range(2, LAYERS))
            await fill(handle, segment=await handle.add_segment(3))
            await handle.finish()
            events = await the_rest(retrieval)

    assert isinstance(events[-1], PublicationComplete)
    assert events[-1].summary.objects == EVERYTHING.total()
    assert_same_cache(sink)
    # Nothing that was under way had to begin anew: the lead alone was made again.
    assert scene.counters[Counter.SESSIONS] == 4


async def test_a_process_that_cannot_be_started_is_done_without_and_told_in_one_line(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcs.consumer.processes._PROGRAM", "raise SystemExit(3)")
    sink = SharedArraySink()
    with capture_logs() as lines:
        async with on_stage(certificates) as scene:
            await filled(scene.open())
            events = await run(scene.retrieve(sink, settings=TWO), PATIENT_S)

    assert_whole(events, sink)
    [line] = [line for line in lines if line["event"] == LogEvent.LANES_MISSING]
    assert (line["wanted"], line["found"]) == (2, 0)
    assert "status 3" in line["reason"]


async def test_a_process_that_ended_before_it_was_needed_is_told_of_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcs.consumer.processes._PROGRAM", "raise SystemExit(3)")
    process = await Process.start()
    async with asyncio.timeout(PATIENT_S):
        await process._reading
    spec = ConnectionSpec(uri="moqt://127.0.0.1:1/")
    dialling = asyncio.create_task(process.dial(spec, spec.uri, 3600.0, TWO))
    async with asyncio.timeout(PATIENT_S):
        failure = await dialling
    await process.close()

    assert isinstance(failure, Failure)
    assert "status 3" in failure.text


@pytest.mark.slow
@pytest.mark.parametrize("end", ["complete", "left"])
async def test_however_it_ends_a_retrieval_leaves_no_process_and_no_memory_behind(
    certificates: CertificateFiles, end: str
) -> None:
    sink = SharedArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, range(LAYERS) if end == "complete" else [0])
        async with scene.retrieve(sink, settings=TWO) as retrieval:
            if end == "complete":
                await retrieval.result()
            else:
                await retrieval.layer(0, timeout_s=PATIENCE_S)
                carrying(retrieval)
            found = pids(retrieval)

    assert len(found) == 2
    assert [pid for pid in found if is_there(pid)] == []
    with pytest.raises(ValueError, match="after the end"):
        sink.share()


@pytest.mark.slow
async def test_processes_end_with_the_one_that_started_them_however_that_ends(desk: Desk) -> None:
    async with on_stage(desk.certificates) as scene:
        await fill(scene.open(), [0])
        async with started(command(scene, desk)) as process:
            await event_of(process, "layer-ready")
            ended = [watched(pid) for pid in children(process.pid)]
            process.kill()
            async with asyncio.timeout(PATIENCE_S):
                for one in ended:
                    await one.wait()

    assert len(ended) == 2


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def watched(pid: int) -> asyncio.Event:
    """Return an event that is set when a process has ended."""
    loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)

    def note() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        ended.set()

    loop.add_reader(fd, note)
    return ended


# -- what goes where -----------------------------------------------------------------------------


async def test_no_key_is_in_the_arguments_or_the_environment_of_a_process(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = bytes(range(32)).hex()  # the one of SCOPE
    monkeypatch.setenv("KVCS_SCOPE_KEY", secret)
    async with on_stage(certificates) as scene:
        handle = scene.open()
        await fill(handle, [0])
        async with scene.retrieve(SharedArraySink(), settings=TWO) as retrieval:
            await retrieval.layer(0, timeout_s=PATIENCE_S)
            for pid in carrying(retrieval):
                assert b"worker" in told(pid)
                assert secret.encode() not in told(pid)
                assert b"KVCS_" not in told(pid)


def test_a_sink_that_cannot_be_shared_is_refused_by_its_name(nobody: ConnectionSpec) -> None:
    with pytest.raises(ConfigError, match="ArraySink cannot be shared with other processes"):
        consume(expectations(), [nobody], ArraySink(), settings=TWO)


def test_codecs_that_other_processes_do_not_have_are_refused(nobody: ConnectionSpec) -> None:
    with pytest.raises(ConfigError, match="other processes"):
        consume(expectations(), [nobody], SharedArraySink(), settings=TWO, codecs=CodecRegistry())


@pytest.fixture
def nobody(certificates: CertificateFiles) -> ConnectionSpec:
    return ConnectionSpec(uri="moqt://127.0.0.1:9/", tls=ClientTls(ca_file=certificates.ca_file))


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("out", [True, False], ids=["to a file", "discarded"])
async def test_the_command_reads_in_processes_of_their_own(desk: Desk, out: bool) -> None:
    async with on_stage(desk.certificates) as scene:
        await filled(scene.open())
        to = ["--out", desk["out.safetensors"]] if out else []
        async with started(command(scene, desk, *to)) as process, asyncio.timeout(PATIENT_S):
            found, _ = await process.communicate()

    lines = [json.loads(line) for line in found.splitlines()]
    assert process.returncode == 0, lines
    assert lines[-1]["event"] == "publication-complete"
    assert lines[-1]["summary"]["objects"] == EVERYTHING.total()
    told = [line["layer"] for line in lines if line["event"] == "layer-ready"]
    assert told == list(range(LAYERS))
    if out:
        assert load_file(desk["out.safetensors"]).keys() == desk.arrays().keys()


def command(scene: Scene, desk: Desk, *changed: str) -> list[str]:
    port = int(scene.spec.uri.rsplit(":", 1)[1].rstrip("/"))
    apart = ["--json", "--connections", "2", "--processes", "--deadline-s", "40"]
    return desk.consume(*apart, "--connect-timeout-s", "20", *changed, port=port)
