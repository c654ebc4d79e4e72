"""The life of a listener: certificates, limits, silence, stopping."""

import asyncio
import contextlib
import json
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from kvcs.errors import ConfigError, ServiceFailed, ServiceFault
from kvcs.kvsp.http.blockclient import BlockClient
from kvcs.kvsp.http.holder import HeldBlock, MemoryHolder
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.tokens import TokenFile, parse_lines
from kvcs.store.source import SyntheticSource
from kvcs.telemetry import Counter
from moqt.aio import ClientTls, TlsSettingsError
from moqt.aio.tls import CertificateFiles, make_certificates
from tests.integration.http.scene import (
    LAYOUT,
    PATIENCE_S,
    READER,
    SCOPE,
    TOKENS,
    WRITER,
    authorized,
    on_stage,
    server_tls,
)
from tests.pki import Ca, KeyPair, pem, uri

pytestmark = pytest.mark.network


class Slow(MemoryHolder):
    """Finds nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = asyncio.Event(), asyncio.Event()

    async def find(self, name: BlockName, publication: bytes | None) -> HeldBlock | None:
        self.asked.set()
        await self.told.wait()
        return await super().find(name, publication)


async def test_who_is_being_served_is_served_to_the_end_and_nobody_else_is(
    certificates: CertificateFiles,
) -> None:
    holder = Slow()
    async with on_stage(certificates, holder=holder) as stage, stage.browser() as browser:
        name = stage.names[0]
        holder.add(name, LAYOUT, 0, bytes(LAYOUT.k_octets), bytes(LAYOUT.v_octets))
        # A second connection that is kept alive: its next request comes too late.
        async with browser.get("/", headers=authorized()) as response:
            await response.read()

        async def ask() -> int:
            async with browser.get(stage.path(0, 0), headers=authorized()) as response:
                await response.read()
                return response.status

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            asking = group.create_task(ask())
            await holder.asked.wait()
            closing = group.create_task(stage.service.close(drain_s=PATIENCE_S))
            await asyncio.sleep(0)
            with pytest.raises(aiohttp.ClientConnectionError):
                async with aiohttp.ClientSession() as other:
                    await other.get(stage.base, ssl=_context(stage.files))
            assert not closing.done()
            holder.told.set()
        assert asking.result() == 200


async def test_a_request_that_comes_while_it_stops_is_told_so(
    certificates: CertificateFiles,
) -> None:
    holder = Slow()
    async with on_stage(certificates, holder=holder) as stage, stage.browser() as browser:
        reader, writer = await _connect(stage.base, stage.files)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:

            async def ask() -> None:
                async with browser.get(stage.path(0, 0), headers=authorized()) as response:
                    await response.read()

            # This one stands, so that the listener has to wait.
            writer.write(_request("/"))
            assert b"404" in await reader.readline()
            group.create_task(ask())
            await holder.asked.wait()
            group.create_task(stage.service.close(drain_s=PATIENCE_S))
            await asyncio.sleep(0)
            await reader.readuntil(b"}")
            writer.write(_request("/"))
            head = await reader.readuntil(b"\r\n\r\n")
            holder.told.set()
        writer.close()

    assert b"503" in head
    assert b"Retry-After: 1" in head
    assert b"Connection: close" in head


async def test_it_waits_no_longer_than_it_was_told(certificates: CertificateFiles) -> None:
    holder = Slow()
    async with (
        on_stage(certificates, holder=holder) as stage,
        stage.blocks() as client,
        asyncio.timeout(PATIENCE_S),
        asyncio.TaskGroup() as group,
    ):
        asking = group.create_task(_fault_of(client, stage.names[0]))
        await holder.asked.wait()
        await stage.service.close(drain_s=0.1)

    assert asking.result() is ServiceFault.UNREACHABLE


async def test_more_requests_at_once_than_are_served_are_refused(
    certificates: CertificateFiles,
) -> None:
    holder = Slow()
    async with (
        on_stage(certificates, holder=holder, max_requests=1) as stage,
        stage.blocks() as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(_fault_of(client, stage.names[0]))
        await holder.asked.wait()
        with pytest.raises(ServiceFailed, match="503, busy") as refused:
            await client.layer(stage.names[1], 0, LAYOUT)
        holder.told.set()

    assert refused.value.fault is ServiceFault.BUSY
    assert refused.value.retry_after_s == 1


async def test_more_connections_at_once_than_are_taken_are_closed(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates, max_connections=1) as stage:
        reader, writer = await _connect(stage.base, stage.files)
        writer.write(_request("/"))
        assert b"404" in await reader.readline()
        async with stage.blocks() as client:
            assert await _fault_of(client, stage.names[0]) is ServiceFault.UNREACHABLE
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"], ids=["nothing", "half a header"])
async def test_who_asks_nothing_is_not_waited_for(
    certificates: CertificateFiles, sent: bytes
) -> None:
    async with on_stage(certificates, request_timeout_s=0.1) as stage:
        reader, writer = await _connect(stage.base, stage.files)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(certificates: CertificateFiles) -> None:
    async with on_stage(certificates, request_timeout_s=0.1) as stage:
        reader, writer = await _connect(stage.base, stage.files)
        fields = "Content-Type: application/json\r\nContent-Length: 10\r\n"
        writer.write(_request(f"{stage.model}/longest", "POST", fields) + b"{")
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"/kvsp/1/problems/timed-out" in answer


async def test_who_takes_nothing_is_cut_off(certificates: CertificateFiles) -> None:
    """An answer of 100 MB, far more than socket buffers hold, to somebody who reads none of it."""
    holder, source = MemoryHolder(), SyntheticSource.of_model("1,8,128,float16", 16)
    [name] = holder.add_source(SCOPE, source)
    async with on_stage(certificates, holder=holder, stall_s=0.2) as stage:
        reader, writer = await _connect(stage.base, stage.files)
        # Reading stops at the limit of the stream; nothing here takes what it holds.
        body = json.dumps({"keys": [name.block_key.hex()] * 1600, "layers": [[0, 0]]})
        path = f"/kvsp/1/{SCOPE.scope_id.hex()}/{name.compatibility_id.hex()}/blocks"
        fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(_request(path, "POST", fields) + body.encode())
        await stage.counters.reached(Counter.HTTP_ANSWERS_CUT, 1)

        found = b""
        with contextlib.suppress(OSError):  # reset
            async with asyncio.timeout(PATIENCE_S):
                while data := await reader.read(1 << 20):
                    found += data
        writer.close()

    assert found.startswith(b"HTTP/1.1 200")
    assert len(found) < 50_000_000
    assert not found.endswith(b"0\r\n\r\n"), "it must not look as if it were whole"


async def test_a_new_certificate_is_shown_to_those_who_come_later(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path / "other")
    async with on_stage(certificates) as stage:
        with pytest.raises(TlsSettingsError):
            stage.service.identify(server_tls(CertificateFiles(*[tmp_path / "none"] * 3)))
        async with stage.blocks() as before:
            await before.layer(stage.names[0], 0, LAYOUT)
            stage.service.identify(server_tls(other))
            await before.layer(stage.names[0], 1, LAYOUT)  # over the connection that stands
            believing = BlockClient(stage.base, READER, tls=ClientTls(ca_file=other.ca_file))
            async with believing as later:
                await later.layer(stage.names[0], 0, LAYOUT)
        async with stage.blocks() as unbelieving:
            with pytest.raises(ServiceFailed, match="certificate is not believed"):
                await unbelieving.layer(stage.names[0], 0, LAYOUT)


async def test_who_shows_no_certificate_of_the_cas_for_clients_is_not_served(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    ca, other = Ca(), Ca("other")
    (tmp_path / "clients.pem").write_bytes(pem(ca.certificate))
    tls = replace(server_tls(certificates), client_ca_file=tmp_path / "clients.pem")
    one = ca.write(tmp_path, "one", uri("spiffe://kvcs.example/decode/7"))
    two = other.write(tmp_path, "two", uri("spiffe://kvcs.example/decode/7"))

    async with on_stage(certificates, tls=tls) as stage:

        async def ask(pair: KeyPair | tuple[None, None]) -> None:
            shown = ClientTls(certificates.ca_file, certificate_file=pair[0], key_file=pair[1])
            async with BlockClient(stage.base, READER, tls=shown) as client:
                await client.layer(stage.names[0], 0, LAYOUT)

        await ask(one)
        for pair in (two, (None, None)):
            with pytest.raises(ServiceFailed):
                await ask(pair)
        (tmp_path / "clients.pem").write_bytes(pem(other.certificate))
        stage.service.identify(tls)
        await ask(two)
        with pytest.raises(ServiceFailed):
            await ask(one)


async def test_other_tokens_count_from_the_next_request_on(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage, stage.blocks(READER) as client:
        await client.layer(stage.names[0], 0, LAYOUT)
        left = TOKENS.replace(f"{SCOPE.scope_id.hex()} read {READER}", "")
        stage.service.authorizer = TokenFile(parse_lines(left.encode()))
        with pytest.raises(ServiceFailed, match="unauthorized"):
            await client.layer(stage.names[0], 0, LAYOUT)
        async with stage.blocks(WRITER) as other:
            await other.layer(stage.names[0], 0, LAYOUT)


async def test_an_address_that_is_taken_is_named(certificates: CertificateFiles) -> None:
    async with on_stage(certificates) as stage:
        host, port = _address(stage.base)
        with pytest.raises(ConfigError, match=f"cannot listen on {host} port {port}: "):
            await stage.service.listen(host, port, tls=server_tls(certificates))
        files = CertificateFiles(*[Path("none")] * 3)
        with pytest.raises(ConfigError, match="none: No such file"):
            await stage.service.listen(host, 0, tls=server_tls(files))


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
async def test_it_listens_on_ipv4_and_ipv6_where_it_is_told_every_address(
    certificates: CertificateFiles,
) -> None:
    async with on_stage(certificates) as stage:
        _, port = await stage.service.listen("::", 0, tls=server_tls(certificates))
        for host in ("127.0.0.1", "localhost"):
            client = BlockClient(f"https://{host}:{port}", READER, tls=stage.tls)
            async with client:
                await client.layer(stage.names[0], 0, LAYOUT)


# -- parts ---------------------------------------------------------------------------------------


async def _fault_of(client: BlockClient, name: BlockName) -> ServiceFault | str:
    try:
        await client.layer(name, 0, LAYOUT)
    except ServiceFailed as exc:
        return exc.fault
    except Exception as exc:
        return type(exc).__name__
    return "none"


def _context(files: CertificateFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.ca_file))


def _address(base: str) -> tuple[str, int]:
    host, _, port = base.removeprefix("https://").partition(":")
    return host, int(port)


async def _connect(
    base: str, files: CertificateFiles
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*_address(base), ssl=_context(files))


def _request(path: str, method: str = "GET", fields: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {READER}\r\n"
    return f"{head}{fields}\r\n".encode()
