"""The clients, at services that fail, lie, stall and redirect: a typed end within the deadline."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from kvcs.errors import (
    BadName,
    BadObject,
    ConfigError,
    Expired,
    KvcsError,
    NotFound,
    ServiceFailed,
    ServiceFault,
)
from kvcs.kvsp.http import frames
from kvcs.kvsp.http.blockclient import BlockClient, LayerSections
from kvcs.kvsp.http.client import ClientOptions
from kvcs.kvsp.http.indexclient import IndexClient
from kvcs.kvsp.http.names import BlockName
from kvcs.kvsp.http.records import Runs
from kvcs.kvsp.layout import Component
from moqt.aio import ClientTls
from moqt.aio.tls import CertificateFiles, make_certificates
from tests.integration.http.scene import (
    COMPAT,
    LAYOUT,
    READER,
    SCOPE,
    container,
    octets,
    on_stage,
    section,
)

pytestmark = pytest.mark.network

NAME = BlockName(SCOPE.scope_id, COMPAT, b"k" * 32)
RIGHT = octets(0, 0)
#: Long enough for a handshake on a machine that does much else, short enough to be waited for.
OPTIONS = ClientOptions(connect_timeout_s=10, request_timeout_s=10, stall_timeout_s=10)
HASTY = ClientOptions(connect_timeout_s=0.3, request_timeout_s=0.5, stall_timeout_s=0.3)

Writer = asyncio.StreamWriter
Script = Callable[[Writer], Awaitable[None]]


def digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256(content).digest()).decode()}:"


def answer(status: str = "200 OK", content: bytes = RIGHT, **fields: str) -> bytes:
    fields = {"Content-Length": str(len(content)), "Repr-Digest": digest(content)} | {
        name.replace("_", "-"): value for name, value in fields.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + content


@asynccontextmanager
async def answering(
    files: CertificateFiles, script: bytes | Script, options: ClientOptions = OPTIONS
) -> AsyncIterator[tuple[BlockClient, list[bytes]]]:
    """Have a client ask a service that answers every request by a script."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while True:
                asked.append(await reader.readuntil(b"\r\n\r\n"))
                if isinstance(script, bytes):
                    writer.write(script)
                    await writer.drain()
                else:
                    await script(writer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate_file, files.key_file)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    tls = ClientTls(ca_file=files.ca_file)
    try:
        async with asyncio.timeout(20):
            client = BlockClient(f"https://127.0.0.1:{port}", READER, tls=tls, options=options)
            async with client:
                yield client, asked
    finally:
        server.close()


async def refused(client: BlockClient) -> KvcsError:
    with pytest.raises(KvcsError) as found:
        await client.layer(NAME, 0, LAYOUT)
    assert READER not in str(found.value)
    assert "\n" not in str(found.value)
    return found.value


# -- what a service may answer -------------------------------------------------------------------


async def test_the_scripted_service_is_believed_where_it_is_right(
    certificates: CertificateFiles,
) -> None:
    async with answering(certificates, answer()) as (client, asked):
        layer = await client.layer(NAME, 0, LAYOUT)

    assert bytes(layer.k) + bytes(layer.v) == RIGHT
    [request] = asked
    assert f"Authorization: Bearer {READER}\r\n".encode() in request
    assert b"Accept-Encoding: identity\r\n" in request


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (answer(content=RIGHT[:-1]), "octets, expected"),
        (answer(content=RIGHT + b"x"), "octets, limit"),
        (answer(content=b""), "0 octets, expected"),
        (answer(Repr_Digest=""), "without the SHA-256 of Repr-Digest"),
        (answer(Repr_Digest="sha-512=:AAAA:"), "without the SHA-256"),
        (answer(Repr_Digest="sha-256=:AAAA:"), "Repr-Digest: digest of 3 octets"),
        (answer("204 No Content", b"", Content_Length=""), "status 204 where octets"),
        (answer("302 Found", b"", Location="https://elsewhere/"), "answered 302"),
        (answer("304 Not Modified", b"", Content_Length=""), "answered 304"),
        (answer(Content_Length="99999999999"), "octets, limit"),
        (answer(Content_Length="", Transfer_Encoding="chunked", content=b"")
         + b"ffff\r\n" + bytes(0xFFFF) + b"\r\n", "answer of more than"),
    ],
)  # fmt: skip
async def test_what_no_such_service_answers_is_a_bad_answer(
    certificates: CertificateFiles, script: bytes, says: str
) -> None:
    async with answering(certificates, script) as (client, asked):
        failed = await refused(client)

        assert isinstance(failed, ServiceFailed)
        assert failed.fault is ServiceFault.BAD_ANSWER
        assert says in str(failed)
        assert len(asked) == 1, "no redirect is followed"


async def test_one_flipped_octet_is_found(certificates: CertificateFiles) -> None:
    wrong = bytes([RIGHT[0] ^ 1]) + RIGHT[1:]
    async with answering(certificates, answer(content=wrong, Repr_Digest=digest(RIGHT))) as (
        client,
        _,
    ):
        assert isinstance(await refused(client), BadObject)


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ("401 Unauthorized", ServiceFault.UNAUTHORIZED),
        ("403 Forbidden", ServiceFault.UNAUTHORIZED),
        ("408 Request Timeout", ServiceFault.BUSY),
        ("429 Too Many Requests", ServiceFault.BUSY),
        ("503 Service Unavailable", ServiceFault.BUSY),
        ("400 Bad Request", ServiceFault.REFUSED),
        ("418 I'm a teapot", ServiceFault.REFUSED),
        ("500 Internal Server Error", ServiceFault.BROKEN),
        ("599 What", ServiceFault.BROKEN),
    ],
)
async def test_each_refusal_has_its_fault(
    certificates: CertificateFiles, status: str, fault: ServiceFault
) -> None:
    script = answer(status, b"<html>something</html>", Retry_After="7")
    async with answering(certificates, script) as (client, _):
        failed = await refused(client)

    assert isinstance(failed, ServiceFailed)
    assert (failed.fault, failed.retry_after_s) == (fault, 7.0)
    assert "html" not in str(failed)


@pytest.mark.parametrize("status", ["404 Not Found", "410 Gone"])
async def test_what_is_not_there_is_not_found(certificates: CertificateFiles, status: str) -> None:
    async with answering(certificates, answer(status, b"x")) as (client, _):
        assert isinstance(await refused(client), NotFound)


@pytest.mark.parametrize(
    ("value", "seconds"), [("", None), ("x", None), ("-1", None), ("1" * 300, 3600.0), ("0", 0.0)]
)
async def test_a_strange_time_to_come_again_is_no_harm(
    certificates: CertificateFiles, value: str, seconds: float | None
) -> None:
    script = answer("503 Busy", b"", Retry_After=value)
    async with answering(certificates, script) as (client, _):
        failed = await refused(client)

    assert isinstance(failed, ServiceFailed)
    assert failed.retry_after_s == seconds


async def test_what_a_refusal_says_is_one_printable_line(certificates: CertificateFiles) -> None:
    problem = (
        b'{"type":"/kvsp/1/problems/busy","title":"x","status":503,"detail":"a\\nb\\u001b[1m"}'
    )
    script = answer("503 Busy", problem, Content_Type="application/problem+json")
    async with answering(certificates, script) as (client, _):
        assert str(await refused(client)).endswith("answered 503, busy: a?b?[1m")
    script = answer("503 Busy", b"x" * 100_000, Content_Type="application/problem+json")
    async with answering(certificates, script) as (client, _):
        assert str(await refused(client)).endswith("answered 503")


# -- connections ---------------------------------------------------------------------------------


async def test_a_service_that_never_answers_costs_a_bounded_time(
    certificates: CertificateFiles,
) -> None:
    async def nothing(writer: Writer) -> None:
        pass

    async with answering(certificates, nothing, HASTY) as (client, _):
        assert isinstance(await refused(client), Expired)


async def test_a_service_that_stalls_in_the_middle_costs_a_bounded_time(
    certificates: CertificateFiles,
) -> None:
    async def half(writer: Writer) -> None:
        writer.write(answer()[:-10])

    async with answering(certificates, half, HASTY) as (client, _):
        assert isinstance(await refused(client), Expired)


async def test_a_service_that_trickles_is_held_to_the_deadline(
    certificates: CertificateFiles,
) -> None:
    """Never still for long enough to be called stalled, and never done."""

    async def trickle(writer: Writer) -> None:
        writer.write(answer("200 OK", b"", Content_Length=str(LAYOUT.layer_octets)))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    options = ClientOptions(request_timeout_s=0.4, stall_timeout_s=5)
    async with answering(certificates, trickle, options) as (client, _):
        assert isinstance(await refused(client), Expired)


async def test_who_takes_its_time_between_two_sections_is_not_broken_off(
    certificates: CertificateFiles,
) -> None:
    """The deadline strikes where something is waited for, and not in what the caller does."""
    loop = asyncio.get_running_loop()
    async with on_stage(certificates) as stage:
        client = BlockClient(
            stage.base, READER, tls=stage.tls, options=ClientOptions(request_timeout_s=0.5)
        )
        async with client:
            # Far more than is read at once, so that there is something left to wait for.
            keys = [stage.names[0].block_key] * 4000
            asked = client.sections(SCOPE.scope_id, COMPAT, keys, Runs(((0, 2),)), LAYOUT)
            first = await anext(asked)
            over = loop.create_future()
            loop.call_later(0.6, over.set_result, None)
            await over  # longer than the deadline
            with pytest.raises(Expired):
                async for _ in asked:
                    pass

    assert isinstance(first, LayerSections)


@pytest.mark.parametrize("kept", [0, 10, len(answer()) - 1])
async def test_a_connection_that_breaks_off_is_a_lost_service(
    certificates: CertificateFiles, kept: int
) -> None:
    async def cut(writer: Writer) -> None:
        writer.write(answer()[:kept])
        writer.close()

    async with answering(certificates, cut) as (client, _):
        failed = await refused(client)

    assert isinstance(failed, ServiceFailed)
    assert failed.fault is ServiceFault.UNREACHABLE


async def test_what_is_no_http_is_a_lost_service(certificates: CertificateFiles) -> None:
    async with answering(certificates, b"SSH-2.0-OpenSSH_9.9\r\n\r\n") as (client, _):
        failed = await refused(client)

    assert isinstance(failed, ServiceFailed)
    assert failed.fault is ServiceFault.UNREACHABLE


async def test_nobody_at_the_address_is_told_in_one_line(certificates: CertificateFiles) -> None:
    tls = ClientTls(ca_file=certificates.ca_file)
    async with BlockClient("https://127.0.0.1:1", READER, tls=tls, options=HASTY) as client:
        failed = await refused(client)

    assert isinstance(failed, ServiceFailed)
    assert failed.fault is ServiceFault.UNREACHABLE
    assert "https://127.0.0.1:1" in str(failed)


async def test_a_service_is_only_believed_with_its_certificate(
    certificates: CertificateFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_certificates(tmp_path_factory.mktemp("other"))
    async with on_stage(certificates) as stage:
        stranger = BlockClient(stage.base, READER, tls=ClientTls(ca_file=other.ca_file))
        async with stranger as client:
            failed = await refused(client)
        misnamed = ClientTls(ca_file=certificates.ca_file, server_name="another.example")
        async with BlockClient(stage.base, READER, tls=misnamed) as client:
            also_failed = await refused(client)
        named = ClientTls(ca_file=certificates.ca_file, server_name="localhost")
        async with BlockClient(stage.base, READER, tls=named) as client:
            await client.layer(stage.names[0], 0, LAYOUT)
        async with BlockClient(stage.base, READER, tls=ClientTls(verify=False)) as client:
            await client.layer(stage.names[0], 0, LAYOUT)

    for one in (failed, also_failed):
        assert isinstance(one, ServiceFailed)
        assert "certificate is not believed" in str(one)


async def test_what_cannot_be_used_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(BadName, match="expected https"):
        BlockClient("http://host", READER)
    with pytest.raises(ConfigError, match="none: No such file"):
        IndexClient("https://host", READER, SCOPE.scope_id, tls=ClientTls(ca_file=_none()))
    with pytest.raises(ConfigError, match="not open"):
        await BlockClient("https://host", READER).layer(NAME, 0, LAYOUT)


# -- ranges and frames ---------------------------------------------------------------------------


async def test_another_range_than_was_asked_for_is_refused(certificates: CertificateFiles) -> None:
    k = section(0, 0, Component.K)
    right = f"bytes 0-{LAYOUT.k_octets - 1}/{LAYOUT.layer_octets}"
    for fields, is_right in (
        ({"Content_Range": right, "Content_Digest": digest(k)}, True),
        ({"Content_Range": right.replace("0-", "1-"), "Content_Digest": digest(k)}, False),
        ({"Content_Digest": digest(k)}, False),
        ({"Content_Range": right}, False),
    ):
        script = answer("206 Partial Content", k, **fields)
        async with answering(certificates, script) as (client, _):
            if is_right:
                assert await client.section(NAME, 0, Component.K, LAYOUT) == k
            else:
                with pytest.raises(ServiceFailed):
                    await client.section(NAME, 0, Component.K, LAYOUT)
    async with answering(certificates, answer(content=k, Content_Digest=digest(k))) as (client, _):
        with pytest.raises(ServiceFailed, match="another range"):
            await client.section(NAME, 0, Component.K, LAYOUT)


async def test_frames_that_break_off_or_lie_end_with_what_was_right(
    certificates: CertificateFiles,
) -> None:
    first = frames.frame_header(
        frames.FrameKind.SECTIONS, 0, 0, len(RIGHT), sha256(RIGHT).digest()
    ) + RIGHT  # fmt: skip
    for rest, says in (
        (b"", "frames that break off"),
        (b"KVF2" + bytes(44), "begins with 4b564632"),
        (first, r"expected \(1, 0\)"),
    ):
        script = answer(content=first + rest, Content_Type=frames.CONTENT_TYPE)
        async with answering(certificates, script) as (client, _):
            found = []
            with pytest.raises(ServiceFailed, match=says):  # noqa: PT012
                async for one in client.sections(
                    SCOPE.scope_id, COMPAT, [NAME.block_key], Runs(((0, 1),)), LAYOUT
                ):
                    found.append(one)  # noqa: PERF401 - what came before the error counts
            assert len(found) == 1
    script = answer(content=first, Content_Type="text/html")
    async with answering(certificates, script) as (client, _):
        asked = client.sections(SCOPE.scope_id, COMPAT, [NAME.block_key], Runs(((0, 0),)), LAYOUT)
        with pytest.raises(ServiceFailed, match="text/html, expected frames"):
            await anext(asked)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"blocks":9,"candidates":[]}',
        b'{"blocks":0,"candidates":[{}]}',
        b'{"blocks":0,"candidates":[],"more":1}',
        b"[" * 10_000,
    ],
)
async def test_an_index_that_answers_nonsense_is_not_believed(
    certificates: CertificateFiles, content: bytes
) -> None:
    async with answering(certificates, answer(content=content)) as (client, _):
        tls = ClientTls(ca_file=certificates.ca_file)
        async with IndexClient(client.uri, READER, SCOPE.scope_id, tls=tls) as index:
            with pytest.raises(ServiceFailed) as failed:
                await index.longest(COMPAT, [b"k" * 32])

    assert failed.value.fault is ServiceFault.BAD_ANSWER


async def test_a_container_is_taken_apart_where_its_layers_are(
    certificates: CertificateFiles,
) -> None:
    async with answering(certificates, answer(content=container(0))) as (client, _):
        found = await client.container(NAME, LAYOUT)

    assert [one.digest for one in found] == [sha256(octets(n, 0)).digest() for n in range(3)]


def _none() -> Path:
    return Path("none")
