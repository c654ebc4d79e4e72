"""What a producer and its certificate leave in the audit file."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from kvcs.audit import auditing
from kvcs.cli.renewal import renewing_certificate
from kvcs.config import Address, RelaySettings
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer, ProducerOptions
from kvcs.store.source import SyntheticSource
from kvcs.telemetry import Counter
from moqt.aio import ClientTls, ServerTls, connect
from moqt.aio.tls import CertificateFiles, TlsSettingsError
from moqt.codepoints import RequestErrorCode
from moqt.errors import RequestRejected
from moqt.names import FullTrackName
from moqt.session.config import SessionConfig

pytestmark = pytest.mark.network

SCOPE = ScopeKey(bytes(range(32)))


def written(path: Path) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["event"], line["outcome"], line["reason"]) for line in lines]


async def test_a_publication_is_published_finished_and_withdrawn(tmp_path: Path) -> None:
    path, source = tmp_path / "audit", SyntheticSource.of_model("2,1,8", 64)
    with auditing(path):
        async with Producer(SCOPE) as producer:
            handle = await producer.publish(source)

    text = f"publication {handle.name.publication_id[:4].hex()}"
    assert written(path) == [
        ("publication", "published", text),
        ("publication", "finished", text),
        ("publication", "withdrawn", f"{text}: the producer has stopped"),
    ]
    scopes = {json.loads(line)["scope"] for line in path.read_text().splitlines()}
    assert scopes == {SCOPE.scope_id[:4].hex()}
    assert handle.name.publication_id.hex() not in path.read_text()


async def test_a_certificate_is_taken_or_refused(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    settings = RelaySettings(
        listen=Address("127.0.0.1", 4443),
        certificate_file=certificates.certificate_file,
        key_file=certificates.key_file,
    )
    path, asked = tmp_path / "audit", asyncio.Queue[ServerTls]()
    answers = iter([None, TlsSettingsError("cert.pem: no certificate")])

    def identify(tls: ServerTls) -> None:
        asked.put_nowait(tls)
        if (error := next(answers)) is not None:
            raise error

    with auditing(path), renewing_certificate(settings, identify):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(10):
                await asked.get()

    assert written(path) == [
        ("certificate", "taken", str(certificates.certificate_file)),
        ("certificate", "refused", "cert.pem: no certificate"),
    ]


async def test_who_is_at_a_limit_of_a_producer_is_counted_and_written_down(
    tmp_path: Path, certificates: CertificateFiles
) -> None:
    path = tmp_path / "audit"
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    config = SessionConfig(max_requests_per_s=0.25)
    async with asyncio.timeout(30):
        with auditing(path):
            async with Producer(SCOPE, ProducerOptions(drain_s=0.0)) as producer:
                _, port = await producer.listen("127.0.0.1", 0, tls=tls, config=config)
                client = ClientTls(ca_file=certificates.ca_file)
                async with connect(f"moqt://127.0.0.1:{port}/", tls=client, drain_s=0.1) as peer:
                    codes = []
                    for _ in range(2):
                        with pytest.raises(RequestRejected) as refused:
                            await peer.track_status(FullTrackName.of("no", "such"))
                        codes.append(refused.value.code)
                    retry_ms = refused.value.retry_ms

    assert codes == [RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.EXCESSIVE_LOAD]
    assert retry_ms is not None
    assert 0 < retry_ms <= 4000
    assert written(path) == [("limit", "refused", "more than 0.25 requests a second")]
    assert json.loads(path.read_text())["peer"] == "127.0.0.1"
    assert producer.counters[Counter.REQUESTS_REFUSED] == 2
