"""A relay, a producer and a store with the same publication, each of which asks for tokens."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcs.consumer.retrieval import ConnectionSpec
from kvcs.profile.naming import PublicationName
from kvcs.trust.grants import Role
from moqt.aio import ClientTls, RequestHandler, ServerTls, connect
from moqt.aio.connection import MoqtConnection
from moqt.aio.tls import CertificateFiles
from moqt.authority import Authority
from moqt.relay.server import Relay
from moqt.session.config import SessionConfig
from tests.integration.kvcs.scene import Scene, filled, on_stage
from tests.integration.kvcs.warehouse import warehouse
from tests.issuing import Issuer, Shows

KINDS = ("relay", "producer", "store")


@dataclass
class Desk:
    """Somebody who serves a publication to those who may have it."""

    uri: str
    tls: ClientTls
    name: PublicationName
    endpoint: Any
    """The relay, producer or store."""

    def dial(
        self, token: bytes | None = None, handler: RequestHandler | None = None
    ) -> Any:  # an asynchronous context manager
        """Open a session that shows a token in SETUP, or none."""
        config = SessionConfig() if token is None else SessionConfig(tokens=Shows(token))
        return connect(self.uri, tls=self.tls, config=config, handler=handler, drain_s=0.2)

    def spec(self, token: bytes | None) -> ConnectionSpec:
        """Return what a retrieval dials."""
        config = SessionConfig() if token is None else SessionConfig(tokens=Shows(token))
        return ConnectionSpec(uri=self.uri, tls=self.tls, config=config)


@asynccontextmanager
async def desk(
    kind: str,
    files: CertificateFiles,
    folder: Path,
    issuer: Issuer,
    authority: Authority | None = None,
) -> AsyncIterator[Desk]:
    """Have one of the three serve a finished publication."""
    asked = authority or issuer.authority()
    server = ServerTls(files.certificate_file, files.key_file)
    client = ClientTls(ca_file=files.ca_file)
    async with AsyncExitStack() as stack:
        scene: Scene = await stack.enter_async_context(on_stage(files))
        publication = await filled(scene.open())
        if kind == "producer":
            endpoint: Any = scene.producer
            _, port = await scene.producer.listen("127.0.0.1", 0, tls=server, authority=asked)
        elif kind == "store":
            house = await stack.enter_async_context(warehouse(folder / "kept", files))
            endpoint = house.store
            house.follow(scene.spec)
            await house.kept()
            _, port = await house.store.listen("127.0.0.1", 0, tls=server, authority=asked)
        else:
            endpoint = await stack.enter_async_context(Relay(authority=asked))
            _, port = await endpoint.listen("127.0.0.1", 0, tls=server)
            link = scene.producer.announce_at(
                f"moqt://127.0.0.1:{port}/",
                tls=client,
                config=SessionConfig(tokens=Shows(issuer.issue(Role.PRODUCER))),
            )
            await link.wait_announced(10.0)
        yield Desk(f"moqt://127.0.0.1:{port}/", client, publication.name, endpoint)


async def closed_with(connection: MoqtConnection) -> int:
    """Return what a session was closed with, once it is."""
    await connection.wait_closed()
    assert connection.closed is not None
    return connection.closed.code
