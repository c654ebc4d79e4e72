"""A scope that seals: members get everything by every way, and nobody in between reads of it."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvcs.consumer.events import (
    Failed,
    FailureReason,
    ObjectRejected,
    PublicationComplete,
)
from kvcs.consumer.retrieval import ConnectionSpec, RetrievalSettings, consume
from kvcs.consumer.selection import Wish
from kvcs.consumer.trust import Expectations
from kvcs.errors import Rejection
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.standard import standard_codecs
from kvcs.producer.publication import Publication
from kvcs.producer.segment import Encoding
from kvcs.profile.signing import ProducerKey
from kvcs.store.shared import SharedArraySink
from kvcs.store.sink import ArraySink
from kvcs.telemetry import Counter, LogEvent
from kvcs.trust.scope import Protection, Scope, Suite
from kvcs.trust.sealing import sealed_octets
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import ObjectStatus
from moqt.session.localobjects import LocalObject
from tests.integration.kvcs import growing
from tests.integration.kvcs.desk import Desk, event_of, started
from tests.integration.kvcs.scene import (
    BLOCKS,
    COMPAT,
    EVERYTHING,
    LAYERS,
    PATIENCE_S,
    QUICK,
    SCOPE,
    TOKENS,
    CountingSink,
    assert_same_cache,
    corrupt,
    expectations,
    fill,
    filled,
    flip,
    hasty,
    of_kind,
    on_stage,
    ready,
    run,
    tensors,
)
from tests.integration.kvcs.warehouse import published, warehouse
from tests.integration.relay.stage import producing_behind, relaying

pytestmark = pytest.mark.network

SEALED = Scope(SCOPE, Protection())
#: Tokens that are nowhere by chance.
PROMPT = random.Random(0).sample(range(1 << 24), len(TOKENS))
STRONG = Scope(SCOPE, Protection(Suite.AES_256_GCM_SHA512_128))
#: Every way to ask for what there is, and for what comes.
WAYS: dict[str, RetrievalSettings] = {
    "by fill": hasty(fetch="never"),
    "by FETCH": hasty(fetch="always"),
    "over two connections": hasty(connections=2),
    "eagerly": hasty(eager=True),
}


def secrets(publication: Publication) -> dict[str, bytes]:
    """Return what nobody in between may see: of tensors, the model, tokens and digests."""
    found = {
        "model": b'"model":"model"',
        "revision": b'"revision":"revision"',
        "manifest": b'"block_keys_sha256":"',
        "list of digests": b'"object_digests":{',
        "header": b"KVO1\x01",
        "tokens": np.array(PROMPT, ">u4").tobytes(),
        "tokens, little-endian": np.array(PROMPT, "<u4").tobytes(),
        "tokens, 64 bits": np.array(PROMPT, "<u8").tobytes(),
    }
    for layer in range(LAYERS):
        for name, part in zip("kv", tensors(layer), strict=True):
            octets = np.ascontiguousarray(part).tobytes()
            found[f"{name} of layer {layer}"] = octets[:32]
            found[f"end of {name} of layer {layer}"] = octets[-32:]
    for track, groups in publication.segments[0].entry().object_digests.items():
        for layer, group in enumerate(groups):
            # By which a guess at a tensor could be confirmed.
            found[f"digest in layer {layer} of {track}"] = group[:32]
            found[f"digest in hex in layer {layer} of {track}"] = group[-32:].hex().encode()
    return found


def expecting(scope: Scope, **others: Any) -> Expectations:
    """Return what is expected of the prompt whose tokens are looked for."""
    return Expectations.of_tokens(scope, COMPAT, PROMPT, **others)


def objects(publication: Publication) -> Iterator[LocalObject]:
    for track in publication.tracks.values():
        for group in track.group_ids(0, 1 << 62):
            yield from (obj for _, obj in track.objects_of(group))


def verdict(events: Any) -> tuple[int, int]:
    """Return how many Objects were verified and how many were not opened, of a whole cache."""
    assert isinstance(events[-1], PublicationComplete), events[-1]
    summary = events[-1].summary
    return summary.objects, summary.unopened


# -- everything comes, by every way --------------------------------------------------------------


@pytest.mark.parametrize("scope", [SEALED, STRONG], ids=["128 bits", "256 bits"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_member_has_the_cache_by_every_way(
    certificates: CertificateFiles, scope: Scope, way: str
) -> None:
    key = ProducerKey.generate()
    async with on_stage(certificates, scope=scope, producer_key=key) as scene:
        publication = await filled(scene.producer.open(COMPAT, PROMPT), (3, 2))
        sink = CountingSink()
        expected = expecting(scope, trusted={key.kid: key.public_key}, require_signature=True)
        events = await run(scene.retrieve(sink, expected=expected, settings=WAYS[way]))

    assert verdict(events) == (EVERYTHING.total(), 0)
    assert_same_cache(sink)
    octets = sent(publication)
    assert not [name for name, one in secrets(publication).items() if one in octets]


def sent(publication: Publication) -> bytes:
    return b"".join(bytes(part) for obj in objects(publication) for part in obj.parts)


async def test_who_reads_while_a_layer_is_made_has_it_live(certificates: CertificateFiles) -> None:
    async with on_stage(certificates, scope=SEALED) as scene:
        handle = scene.open()
        await fill(handle, [0])
        sink = CountingSink()
        async with asyncio.timeout(PATIENCE_S), scene.retrieve(sink) as retrieval:
            for layer in range(1, LAYERS):
                await retrieval.layer(layer - 1)
                await fill(handle, [layer])
            await handle.finish()
            complete = await retrieval.result()

    assert (complete.summary.objects, complete.summary.unopened) == (EVERYTHING.total(), 0)
    assert_same_cache(sink)


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("way", WAYS)
async def test_relays_pass_on_what_they_cannot_read(
    certificates: CertificateFiles, hops: int, way: str
) -> None:
    async with (
        relaying(certificates, hops=hops) as stage,
        producing_behind(stage, certificates, scope=SEALED) as scene,
    ):
        handle = scene.open()
        live = asyncio.create_task(run(scene.retrieve(first := CountingSink())))
        await fill(handle, range(3))
        await first.reached(2 * BLOCKS)
        await fill(handle, range(3, LAYERS))
        await handle.finish()
        assert verdict(await live) == (EVERYTHING.total(), 0)
        later = await run(scene.retrieve(second := CountingSink(), settings=WAYS[way]))

    assert verdict(later) == (EVERYTHING.total(), 0)
    assert_same_cache(first)
    assert_same_cache(second)


@pytest.mark.parametrize("codec", [c.name for c in standard_codecs() if c.lossless])
@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
async def test_every_codec_is_sealed_and_those_of_variable_length_are_padded(
    certificates: CertificateFiles, codec: str, joint: bool
) -> None:
    async with on_stage(
        certificates, scope=SEALED, encodings=(Encoding(codec, joint=joint),)
    ) as scene:
        publication = await filled(scene.open())
        sink = CountingSink()
        events = await run(scene.retrieve(sink))

    assert isinstance(events[-1], PublicationComplete)
    assert_same_cache(sink)
    data = [track for name, track in publication.tracks.items() if not name.startswith(b"man")]
    lengths = {
        obj.length
        for track in data
        for layer in range(LAYERS)
        for _, obj in track.objects_of(layer)
        if obj.status is ObjectStatus.NORMAL
    }
    possible = {sealed_octets(octets, padded=codec != "raw") for octets in range(1 << 12)}
    assert lengths <= possible


async def test_processes_open_with_the_keys_of_their_tracks(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = b"what only the members of it know"
    scope = Scope(ScopeKey(secret), Protection())
    secrets = [secret, scope.key.derive(b"kvcs-1 object-key")]
    monkeypatch.setenv("KVCS_SCOPE_KEY", secret.hex())
    settings = hasty(
        processes=True, connections=2, connect_timeout_s=20, deadline_s=40, stall_timeout_s=20
    )
    async with on_stage(certificates, scope=scope) as scene:
        handle = scene.open()
        await fill(handle, [0])
        sink = SharedArraySink()
        async with asyncio.timeout(50), scene.retrieve(sink, settings=settings) as retrieval:
            await retrieval.layer(0)
            pids = [process._process.pid for process in retrieval._processes._all]
            for pid in pids:
                assert found_in(pid, [*secrets, scene.spec.uri.encode()]) == {
                    scene.spec.uri.encode()
                }
            await fill(handle, range(1, LAYERS))
            await handle.finish()
            complete = await retrieval.result()

    assert len(pids) == 2
    assert (complete.summary.objects, complete.summary.unopened) == (EVERYTHING.total(), 0)
    assert_same_cache(sink)


async def test_what_is_appended_is_sealed_too(certificates: CertificateFiles) -> None:
    async with on_stage(certificates, scope=SEALED) as scene:
        handle = scene.producer.open(growing.GROWING, growing.PROMPT)
        async for _ in growing.prefill(handle):
            pass
        sink = ArraySink()
        async with (
            asyncio.timeout(PATIENCE_S),
            scene.retrieve(
                sink,
                expected=growing.expectations(SEALED),
                wish=Wish(follow=True),
                settings=growing.PATIENT,
            ) as retrieval,
        ):
            appended = [growing.token(at) for at in range(len(growing.PROMPT), 4 * 15)]
            layers = [growing.kv(layer, growing.PREFIX, 3) for layer in range(growing.LAYERS)]
            await handle.append(appended, layers)
            await handle.finish()
            await retrieval.result()

    growing.assert_positions(sink, 15)


# -- either, never both --------------------------------------------------------------------------

WRONG = {
    "a member with another suite": (SEALED, STRONG, "tag"),
    "one who expects what is sealed of a scope in clear": (Scope(SCOPE), SEALED, "unprotected"),
    "one who expects what is in clear of a scope that seals": (SEALED, Scope(SCOPE), "protected"),
}


@pytest.mark.parametrize("who", WRONG)
async def test_nothing_is_used_but_what_the_scope_says(
    certificates: CertificateFiles, who: str
) -> None:
    published_in, expected_in, reason = WRONG[who]
    sink = CountingSink()
    settings = hasty(deadline_s=3, request_timeout_s=1, another_s=0.1)
    async with on_stage(certificates, scope=published_in) as scene:
        await filled(scene.open())
        expected = expectations(expected_in)
        events = await run(scene.retrieve(sink, expected=expected, settings=settings))

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert f"what could not be opened: 1 {reason}" in failed.text
    assert not sink.calls


async def test_data_in_clear_under_a_sealed_manifest_is_not_used(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, scope=SEALED) as scene:
        publication = await filled(scene.open())
        # As they would be without a seal: whoever knows the tensors could send them.
        in_clear = Publication(publication.name, COMPAT)
        segment = in_clear.open_segment(publication.segments[0].keys)
        in_clear.add_layer(segment, 0, *tensors(0))
        for name in (b"k.raw.s0", b"v.raw.s0"):
            pairs = zip(
                publication.tracks[name].objects_of(0),
                in_clear.tracks[name].objects_of(0),
                strict=True,
            )
            for (_, obj), (_, other) in pairs:
                obj.parts, obj.properties = other.parts, ()
                obj.length = obj.have = other.length
        events = await run(scene.retrieve(settings=hasty(deadline_s=3)))

    assert isinstance(events[-1], Failed)
    assert sorted(ready(events)) == [1, 2, 3, 4, 5]
    assert {event.reason for event in of_kind(events, ObjectRejected)} == {Rejection.UNPROTECTED}


# -- what does not open is missing, and nobody learns of it --------------------------------------


async def test_a_changed_object_costs_its_layer_and_is_asked_for_as_if_it_had_not_come(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, scope=SEALED) as scene:
        publication = await filled(scene.open())
        corrupt(publication, "k.raw.s0", 2, 3, flip(100))
        sink = CountingSink()
        with capture_logs() as logs:
            settings = hasty(deadline_s=5, fetch="never", eager=False)
            events = await run(scene.retrieve(sink, settings=settings))

    failed = events[-1]
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.INCOMPLETE
    assert sorted(ready(events)) == [0, 1, 3, 4, 5]
    assert_same_cache(sink, [0, 1, 3, 4, 5])
    assert failed.summary.unopened == failed.summary.rejected == 2  # asked for once more
    told = [line for line in logs if line["event"] == LogEvent.OBJECT_UNOPENED]
    assert [(line["reason"], line["count"]) for line in told] == [("tag", 1)]
    assert not [line for line in logs if line["event"] == LogEvent.OBJECT_REJECTED]


def withhold(publication: Publication) -> None:
    """Have one Object never come."""
    [subgroup] = publication.tracks[b"k.raw.s0"]._groups[2]
    del subgroup.objects[3]


def spoil(publication: Publication) -> None:
    """Have the same Object come, and not open."""
    corrupt(publication, "k.raw.s0", 2, 3, flip(100))


@pytest.mark.parametrize("way", WAYS)
async def test_who_serves_cannot_tell_what_did_not_open_from_what_did_not_come(
    certificates: CertificateFiles, way: str
) -> None:
    seen: list[tuple[int, int]] = []
    for wrong in (withhold, spoil):
        async with on_stage(certificates, scope=SEALED) as scene:
            wrong(await filled(scene.open()))
            settings = replace(WAYS[way], deadline_s=10, stall_timeout_s=10)
            events = await run(scene.retrieve(CountingSink(), settings=settings))
            assert isinstance(events[-1], Failed)
            assert sorted(ready(events)) == [0, 1, 3, 4, 5]
            counters = scene.counters
            seen.append((counters[Counter.SESSIONS], counters[Counter.REQUESTS]))

    assert seen[0] == seen[1]


async def test_objects_that_changed_places_are_both_missing(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, scope=SEALED) as scene:
        publication = await filled(scene.open())
        one, other = (
            obj
            for _, obj in publication.tracks[b"v.raw.s0"].objects_of(4)
            if obj.object_id in (1, 2)
        )
        one.parts, other.parts = other.parts, one.parts
        events = await run(scene.retrieve(settings=hasty(deadline_s=5)))

    assert isinstance(events[-1], Failed)
    assert sorted(ready(events)) == [0, 1, 2, 3, 5]
    assert {event.reason for event in of_kind(events, ObjectRejected)} == {Rejection.TAG}


async def test_a_changed_version_of_the_manifest_ends_nothing(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, scope=SEALED, manifest_every=1) as scene:
        handle = scene.open()
        await fill(handle, [0])
        sink = CountingSink()
        async with asyncio.timeout(PATIENCE_S), scene.retrieve(sink) as retrieval:
            await retrieval.layer(0)
            # Published and changed before the event loop serves it.
            publication = handle.publication
            publication.add_layer(publication.segments[0], 1, *tensors(1))
            corrupt(publication, "manifest", publication.versions - 1, 0, flip(5))
            await fill(handle, range(2, LAYERS))
            await handle.finish()
            complete = await retrieval.result()

    assert complete.summary.objects == EVERYTHING.total()
    assert_same_cache(sink)


# -- what lies between -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, ProducerKey.generate()], ids=["plain", "signed"])
async def test_a_store_keeps_what_is_sealed_as_it_is_and_serves_it_after_a_restart(
    certificates: CertificateFiles, tmp_path: Path, key: ProducerKey | None
) -> None:
    folder = tmp_path / "store"
    trusted = {} if key is None else {key.kid: key.public_key}
    async with (
        warehouse(folder, certificates, scope=SEALED, trusted=trusted) as depot,
        on_stage(certificates, scope=SEALED, producer_key=key) as scene,
    ):
        handle = scene.producer.open(COMPAT, PROMPT)
        await fill(handle, range(2))
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.OBJECTS_KEPT, 4 * BLOCKS)
        await fill(handle, range(2, LAYERS))
        await handle.finish()
        await depot.kept()
        assert await depot.contents(handle.name) == published(handle.publication)
    async with warehouse(folder, certificates, scope=SEALED) as depot:
        sink = CountingSink()
        expected = expecting(SEALED, trusted=trusted, require_signature=key is not None)
        events = await run(consume(expected, [depot.spec], sink, settings=QUICK))

    assert verdict(events) == (EVERYTHING.total(), 0)
    assert_same_cache(sink)
    disk = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert handle.name.publication_id in disk  # it is what was looked through
    assert not [name for name, one in secrets(handle.publication).items() if one in disk]


async def test_a_store_goes_on_with_what_it_has_of_a_sealed_publication(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    async with on_stage(certificates, scope=SEALED) as scene:
        handle = scene.open()
        await fill(handle, range(2))
        async with warehouse(folder, certificates, scope=SEALED) as depot:
            depot.follow(scene.spec)
            await depot.counters.reached(Counter.OBJECTS_KEPT, 4 * BLOCKS)
        await fill(handle, range(2, LAYERS))
        await handle.finish()
        async with warehouse(folder, certificates, scope=SEALED) as depot:
            depot.follow(scene.spec)
            await depot.kept()
            assert await depot.contents(handle.name) == published(handle.publication)
            # Nothing was brought twice.
            objects_kept = depot.counters[Counter.OBJECTS_KEPT]
            assert objects_kept <= len(published(handle.publication)) - 4 * BLOCKS


async def test_a_store_does_not_keep_what_it_cannot_open(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    async with (
        warehouse(tmp_path / "store", certificates, scope=SEALED) as depot,
        on_stage(certificates, scope=SEALED) as scene,
    ):
        publication = await filled(scene.open())
        corrupt(publication, "k.raw.s0", 3, 2, flip(-1))
        depot.follow(scene.spec)
        await depot.counters.reached(Counter.OBJECTS_UNOPENED, 2)  # asked for once more
        [held] = depot.store.depot.shelf
        await depot.until(lambda: not held.is_written)

        assert len(await depot.contents(publication.name)) == len(published(publication)) - 1
        assert not held.finished


def found_in(pid: int, wanted: list[bytes]) -> set[bytes]:
    """Return what of it is in the memory of a process."""
    found: set[bytes] = set()
    maps = Path(f"/proc/{pid}/maps").read_text()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps.splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ \S+ *(.*)", line)
            if match is None or match[3] in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
                continue
            start, stop = int(match[1], 16), int(match[2], 16)
            try:
                memory.seek(start)
                octets = memory.read(stop - start)
            except (OSError, OverflowError, ValueError):
                continue  # pages that nobody may read
            found |= {one for one in wanted if one in octets}
    return found


@asynccontextmanager
async def relay_process(desk: Desk) -> AsyncIterator[tuple[int, ConnectionSpec]]:
    """A relay that is told no scope, in a process whose memory can be looked at."""
    files = desk.certificates
    command = [
        "relay", "--listen", "127.0.0.1:0", "--json", "--drain-s", "0",
        "--certificate-file", str(files.certificate_file), "--key-file", str(files.key_file),
    ]  # fmt: skip
    async with started(command) as process:
        port = (await event_of(process, "listening"))["port"]
        spec = ConnectionSpec(uri=f"moqt://127.0.0.1:{port}/", tls=ClientTls(ca_file=files.ca_file))
        yield process.pid, spec


@pytest.mark.slow
@pytest.mark.parametrize("scope", [SEALED, Scope(SCOPE)], ids=["sealed", "in clear"])
async def test_nothing_of_a_cache_is_in_the_memory_of_a_relay(desk: Desk, scope: Scope) -> None:
    async with (
        relay_process(desk) as (pid, spec),
        on_stage(desk.certificates, scope=scope) as scene,
    ):
        scene.producer.announce_at(spec.uri, tls=spec.tls)
        scene.spec = spec
        handle = scene.producer.open(COMPAT, PROMPT)
        expected = expecting(scope)
        live = asyncio.create_task(run(scene.retrieve(CountingSink(), expected=expected)))
        await filled(handle)
        assert verdict(await live) == (EVERYTHING.total(), 0)
        for way in ("by fill", "by FETCH"):
            settings = WAYS[way]
            events = await run(scene.retrieve(CountingSink(), expected=expected, settings=settings))
            assert verdict(events) == (EVERYTHING.total(), 0)
        names = {octets: name for name, octets in secrets(handle.publication).items()}
        publication_id = handle.name.publication_id
        names[publication_id] = "publication"
        found = {names[one] for one in found_in(pid, list(names))}

    if scope is SEALED:
        assert found == {"publication"}
    else:
        # It would have been found. Tokens are never sent.
        assert {name for name in names.values() if "tokens" not in name} - found == set()


@pytest.mark.slow
async def test_the_commands_seal_and_open(desk: Desk) -> None:
    sealed = ("--sealing", "sealed", "--suite", "aes-256-gcm")
    async with started(desk.produce("--json", "--drain-s", "0", *sealed)) as producer:
        port = (await event_of(producer, "listening"))["port"]
        await event_of(producer, "publication-finished")
        async with started(desk.consume("--json", *sealed, port=port)) as consumer:
            complete = await event_of(consumer, "publication-complete")
        async with started(desk.consume("--json", port=port)) as stranger:
            failed = await event_of(stranger, "failed")

    assert complete["summary"]["objects"] == EVERYTHING.total()
    assert "protected" in failed["text"]
