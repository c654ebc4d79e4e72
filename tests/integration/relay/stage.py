"""Relays on loopback, chains of them, and a count of what the producer behind them sends."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from kvcs.consumer.retrieval import ConnectionSpec
from moqt.aio import ClientTls, MoqtConnection, QuicSettings, RequestHandler, ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.relay.server import Relay, RelayOptions
from moqt.session.commands import Command, SendStreamData
from moqt.session.config import SessionConfig
from moqt.session.events import SubscribeReceived
from moqt.session.localtrack import LocalTrack
from tests.integration.kvcs.scene import Scene, on_stage


@dataclass
class Stage:
    """Relays, each asking at the one before it, and the way to the last one of them."""

    relays: list[Relay] = field(default_factory=list)
    specs: list[ConnectionSpec] = field(default_factory=list)

    @property
    def nearest(self) -> ConnectionSpec:
        """Where consumers go."""
        return self.specs[-1]

    @property
    def farthest(self) -> ConnectionSpec:
        """Where producers go."""
        return self.specs[0]


@asynccontextmanager
async def relaying(
    files: CertificateFiles,
    *,
    hops: int = 1,
    options: RelayOptions | None = None,
    quic: QuicSettings | None = None,
    config: SessionConfig | None = None,
) -> AsyncIterator[Stage]:
    """Have so many relays listen, one behind the other."""
    stage = Stage()
    tls = ServerTls(files.certificate_file, files.key_file)
    try:
        for _ in range(hops):
            relay = await Relay(options, quic=quic, config=config).__aenter__()
            stage.relays.append(relay)
            _, port = await relay.listen("127.0.0.1", 0, tls=tls)
            if stage.specs:
                relay.ask_at(stage.nearest.uri, tls=stage.nearest.tls)
            uri = f"moqt://127.0.0.1:{port}/"
            stage.specs.append(ConnectionSpec(uri=uri, tls=ClientTls(ca_file=files.ca_file)))
        yield stage
    finally:
        for relay in reversed(stage.relays):
            await relay.close()


@asynccontextmanager
async def producing_behind(
    stage: Stage, files: CertificateFiles, **options: Any
) -> AsyncIterator[Scene]:
    """A producer that is announced at the farthest relay; retrievals know the nearest only."""
    async with on_stage(files, **options) as scene:
        scene.spec = stage.nearest
        scene.producer.announce_at(stage.farthest.uri, tls=stage.farthest.tls)
        yield scene


@contextmanager
def counting_sent_octets() -> Iterator[Counter[MoqtConnection]]:
    """Count the octets that each session hands to its transport, control messages included."""
    sent: Counter[MoqtConnection] = Counter()
    carry_out = MoqtConnection._carry_out

    def count(connection: MoqtConnection, command: Command) -> None:
        if isinstance(command, SendStreamData):
            sent[connection] += len(command.data)
        carry_out(connection, command)

    with mock.patch.object(MoqtConnection, "_carry_out", count):
        yield sent


class Serving(RequestHandler):
    """Publishes one Track, and can be waited for until somebody asks for it."""

    def __init__(self, track: LocalTrack) -> None:
        self.track = track
        self.asked = asyncio.Event()

    def subscribe_received(self, connection: MoqtConnection, request: SubscribeReceived) -> None:
        connection.session.accept_subscribe(request.request_id, self.track)
        self.asked.set()


def vanish(connection: MoqtConnection) -> None:
    """Have a peer hear nothing more of a connection, as if its process had been killed."""
    connection._transport.abandon()
