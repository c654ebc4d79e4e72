"""The event loop goes round while Objects of many mebibytes are hashed, sent and examined."""

import asyncio
import hashlib
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcs.consumer import opening
from kvcs.consumer.events import PublicationComplete
from kvcs.consumer.opening import LARGE_MANIFEST_OCTETS
from kvcs.consumer.trust import Expectations, check_manifest
from kvcs.producer.publication import ManifestDraft
from kvcs.profile import payload
from kvcs.store.sink import ArraySink
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import COMPAT, SCOPE, hasty, on_stage, run

pytestmark = pytest.mark.network

MIB = 1 << 20
#: One whole block, and the token behind it.
TOKENS = [1, 2, 3, 4, 5]
PATIENT = hasty(deadline_s=45, stall_timeout_s=20)


@pytest.mark.parametrize("mib", [4, pytest.param(64, marks=pytest.mark.slow)])
async def test_large_objects_are_hashed_while_the_loop_goes_round(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    threads: dict[str, int] = {}
    sha256 = hashlib.sha256

    def noting(data: Any = b"") -> Any:
        name = threading.current_thread().name
        threads[name] = max(threads.get(name, 0), memoryview(data).nbytes)
        return sha256(data)

    monkeypatch.setattr(payload, "sha256", noting)
    heads = mib * MIB // (4 * 256 * 2)
    compat = replace(COMPAT, layers=1, k_shape=(heads, 256), v_shape=(2, 4))
    k = np.arange(4 * heads * 256, dtype=np.uint16).view(np.float16).reshape(4, heads, 256)
    v = np.zeros((4, 2, 4), np.float16)
    sink = ArraySink()
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(compat, TOKENS)
        retrieval = scene.retrieve(
            sink,
            expected=Expectations.of_tokens(SCOPE, compat, TOKENS),
            settings=PATIENT,
        )
        retrieving = asyncio.create_task(run(retrieval, 50))
        await handle.add_layer(0, k, v, segment=await handle.add_segment(1))
        await handle.finish()
        events = await retrieving

    assert isinstance(events[-1], PublicationComplete), events[-1]
    np.testing.assert_array_equal(sink.k[0].view(np.uint16), k.view(np.uint16))
    # What is heavy was done elsewhere, the data alone by several threads.
    large = {name for name, octets in threads.items() if octets >= 1 << 20}
    assert {name.rpartition("_")[0] for name in large} == {"kvcs-hash", "kvcs-examine"}


async def test_large_manifests_are_written_and_read_while_the_loop_goes_round(
    certificates: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = 2000
    tokens = [number % 97 for number in range(4 * blocks)]
    threads: dict[str, set[str]] = {"written": set(), "read": set()}

    def noting_encode(draft: ManifestDraft) -> bytes:
        octets = encode(draft)
        if len(octets) >= LARGE_MANIFEST_OCTETS:
            threads["written"].add(threading.current_thread().name)
        return octets

    def noting_check(octets: bytes, **others: Any) -> Any:
        if len(octets) >= LARGE_MANIFEST_OCTETS:
            threads["read"].add(threading.current_thread().name)
        return check_manifest(octets, **others)

    encode = ManifestDraft.encode
    monkeypatch.setattr(ManifestDraft, "encode", noting_encode)
    monkeypatch.setattr(opening, "check_manifest", noting_check)
    compat = replace(COMPAT, layers=1)
    k, v = (
        np.zeros((len(tokens), *shape), np.float16) for shape in (compat.k_shape, compat.v_shape)
    )
    async with on_stage(certificates) as scene:
        handle = scene.producer.open(compat, tokens)
        await handle.add_layer(0, k, v, segment=await handle.add_segment(blocks))
        await handle.finish()
        events = await run(
            scene.retrieve(expected=Expectations.of_tokens(SCOPE, compat, tokens), settings=PATIENT)
        )

    assert isinstance(events[-1], PublicationComplete), events[-1]
    for what in ("written", "read"):
        assert threads[what], what
        assert "MainThread" not in threads[what]
