"""Services over TLS on loopback, what they serve, and who may ask them."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvcs.kvsp.http.blockclient import BlockClient
from kvcs.kvsp.http.blockservice import BlockLimits, BlockService
from kvcs.kvsp.http.client import ClientOptions
from kvcs.kvsp.http.directory import Directory
from kvcs.kvsp.http.holder import BlockHolder, MemoryHolder
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.indexservice import IndexService
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.service import HttpService, ServiceOptions
from kvcs.kvsp.http.tokens import TokenFile, parse_lines
from kvcs.kvsp.keys import ScopeKey
from kvcs.kvsp.layout import Component, Layout
from kvcs.store.source import SyntheticSource
from moqt.aio import ClientTls, ServerTls
from moqt.aio.tls import CertificateFiles
from tests.integration.kvcs.scene import Noticing

SCOPE, OTHER_SCOPE = ScopeKey(bytes(range(32))), ScopeKey(bytes(range(1, 33)))
READER, WRITER, FOREIGNER = "reader-" + "r" * 32, "writer-" + "w" * 32, "foreigner-" + "f" * 32
TOKENS = f"""
{SCOPE.scope_id.hex()} read {READER}
{SCOPE.scope_id.hex()} read,write {WRITER}
{OTHER_SCOPE.scope_id.hex()} read,write {FOREIGNER}
"""
#: K and V of different lengths, so that one taken for the other is found out.
SOURCE = SyntheticSource.of_model("3,2,8,float16", 14, block_tokens=4)
LAYOUT = Layout.of(SOURCE.descriptor)
COMPAT = SCOPE.compatibility_id(SOURCE.descriptor)
#: Seconds that any one wait of a test may take.
PATIENCE_S = 20.0


def octets(layer: int, block: int) -> bytes:
    """K and then V of a block, as the source has them."""
    [(_, k, v)] = [one for one in SOURCE.layers(block, 1) if one.layer == layer]
    return k.tobytes() + v.tobytes()


def container(block: int) -> bytes:
    return b"".join(octets(layer, block) for layer in range(LAYOUT.layers))


def section(layer: int, block: int, component: Component) -> bytes:
    return octets(layer, block)[LAYOUT.span(0, component)]


@dataclass
class Stage:
    """A service, and everything that it takes to ask it."""

    service: HttpService
    directory: Directory
    names: list[BlockName]
    base: str
    files: CertificateFiles
    counters: Noticing

    @property
    def tls(self) -> ClientTls:
        return ClientTls(ca_file=self.files.ca_file)

    @property
    def model(self) -> str:
        return f"/kvsp/1/{SCOPE.scope_id.hex()}/{COMPAT.hex()}"

    def path(self, block: int = 0, layer: int | None = None) -> str:
        path = f"{self.model}/blocks/{self.names[block].block_key.hex()}"
        return path if layer is None else f"{path}/layers/{layer}"

    def blocks(self, token: str | None = READER, **options: Any) -> BlockClient:
        return BlockClient(self.base, token, tls=self.tls, options=ClientOptions(**options))

    def index(
        self, token: str | None = WRITER, scope: ScopeKey = SCOPE, **options: Any
    ) -> IndexClient:
        return IndexClient(
            self.base, token, scope.scope_id, tls=self.tls, options=ClientOptions(**options)
        )

    @asynccontextmanager
    async def browser(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A client that knows nothing of us."""
        context = ssl.create_default_context(cafile=str(self.files.ca_file))
        async with aiohttp.ClientSession(
            self.base, connector=aiohttp.TCPConnector(ssl=context), auto_decompress=False
        ) as session:
            yield session


def authorized(token: str = READER, **fields: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} | {
        name.replace("_", "-"): value for name, value in fields.items()
    }


@asynccontextmanager
async def on_stage(
    files: CertificateFiles,
    *,
    holder: BlockHolder | None = None,
    limits: BlockLimits | None = None,
    directory: Directory | None = None,
    patience_s: float = 60.0,
    port: int = 0,
    tls: ServerTls | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """Have both services listen; what the test does with them may take so many seconds."""
    memory, counters = MemoryHolder(), Noticing()
    names = memory.add_source(SCOPE, SOURCE)
    index = IndexService(directory or Directory(), counters=counters)
    blocks = BlockService(holder or memory, limits=limits, counters=counters)
    service = HttpService(
        [blocks, index],
        TokenFile(parse_lines(TOKENS.encode())),
        options=ServiceOptions(**options),
        counters=counters,
    )
    async with asyncio.timeout(patience_s), service:
        host, port = await service.listen("127.0.0.1", port, tls=tls or server_tls(files))
        base = f"https://{host}:{port}"
        yield Stage(service, index.directory, names, base, files, counters)


def server_tls(files: CertificateFiles) -> ServerTls:
    return ServerTls(Path(files.certificate_file), Path(files.key_file))
