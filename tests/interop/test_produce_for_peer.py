"""`kvcs produce`, a process of its own, and the peer's clients at its port."""

import asyncio
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component
from kvcs.profile.naming import PublicationName
from kvcs.profile.payload import Block
from kvcs.store.source import SafetensorsSource
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import PublishDoneCode
from moqt.location import Location
from tests.interop.conftest import StartPeer
from tests.interop.peer import MARKS, PeerProcess
from tests.interop.taken import Taken

pytestmark = MARKS

CACHE = Path(__file__).parents[1] / "data" / "smollm2-128.safetensors"
LAYERS, BLOCKS, BLOCK_TOKENS = 30, 8, 16


@dataclass(frozen=True, slots=True)
class Producing:
    """The process, and what it has told of itself."""

    uri: str
    process: PeerProcess

    async def publication(self) -> PublicationName:
        """Return the name of what it publishes, once it has begun."""
        line = await self.process.line('{"event":"publication-opened"')
        told = json.loads(line)
        return PublicationName(
            scope_id=bytes.fromhex(told["scope"]),
            compatibility_id=bytes.fromhex(told["compatibility"]),
            anchor_key=bytes.fromhex(told["anchor"]),
            publication_id=bytes.fromhex(told["publication"]),
        )


@pytest.fixture
def producing(start_ours: StartPeer, certificates: CertificateFiles, tmp_path: Path) -> Producing:
    """A recorded cache, one layer after another, once a session has come."""
    ScopeKey.generate().to_file(tmp_path / "scope.key")
    process = start_ours(
        "kvcs",
        *("produce", CACHE, "--json", "--listen", "127.0.0.1:0"),
        *("--certificate-file", certificates.certificate_file),
        *("--key-file", certificates.key_file, "--scope-key-file", tmp_path / "scope.key"),
        *("--layer-interval-ms", "100", "--after-sessions", "1", "--drain-s", "1"),
    )
    told = json.loads(process.wait_for_line('{"event":"listening"'))
    return Producing(f"moqt://127.0.0.1:{told['port']}/", process)


def expected_digests() -> dict[Component, dict[Location, str]]:
    """Return the SHA-256 of every Object, computed from the cache itself."""
    source = SafetensorsSource(CACHE)
    expected: dict[Component, dict[Location, str]] = {Component.K: {}, Component.V: {}}
    for layer, *tensors in source.layers(0, BLOCKS):
        for component, tensor in zip((Component.K, Component.V), tensors, strict=True):
            for block in range(BLOCKS):
                start = block * BLOCK_TOKENS
                data = tensor[start : start + BLOCK_TOKENS].tobytes()
                whole = Block(component, layer, block, start, BLOCK_TOKENS, 0, data).encode()
                expected[component][Location(layer, block)] = sha256(whole).hexdigest()
    return expected


@pytest.mark.parametrize("case", ["setup-only", "subscribe-error"])
async def test_its_interop_client_finds_nothing_to_tolerate_in_a_producer(
    case: str, start_peer: StartPeer, producing: Producing
) -> None:
    client = start_peer(
        "moq-interop-client",
        *("-r", producing.uri, "--draft", "22", "--tls-disable-verify", "-t", case),
    )
    status = await client.exit_status(30)

    assert status == 0, client.output
    assert f"ok 1 - {case}" in client.lines
    assert "# COMPAT" not in client.output


async def test_its_subscribers_get_every_block_of_both_tracks_and_a_manifest(
    start_peer: StartPeer, producing: Producing, certificates: CertificateFiles
) -> None:
    publication = await producing.publication()

    def take(name: bytes) -> Taken:
        return Taken.start(start_peer, producing.uri, certificates, publication.track(name))

    manifest = take(b"manifest")
    await manifest.event("object")  # it names a segment, so that the segment's tracks exist
    k, v = take(b"k.raw.s0"), take(b"v.raw.s0")
    await asyncio.gather(*(taken.finish() for taken in (k, v, manifest)))

    expected = expected_digests()
    for component, taken in ((Component.K, k), (Component.V, v)):
        objects = taken.objects()
        assert {at: o["sha256"] for at, o in objects.items()} == expected[component]
        assert all(o["priority"] == 128 * at.group // LAYERS for at, o in objects.items())
        assert (await taken.event("done"))["status"] == PublishDoneCode.TRACK_ENDED
        assert (await taken.event("end"))["clean"]
    assert len(manifest.objects()) >= LAYERS // 8
