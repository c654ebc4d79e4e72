"""What a producer and its certificate leave in the audit file."""

import asyncio
import json
import os
import signal
from pathlib import Path

from kvcs.audit import auditing
from kvcs.cli.renewal import renewing_certificate
from kvcs.config import Address, RelaySettings
from kvcs.kvsp.keys import ScopeKey
from kvcs.producer.daemon import Producer
from kvcs.store.source import SyntheticSource
from moqt.aio import ServerTls
from moqt.aio.tls import CertificateFiles, TlsSettingsError

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
