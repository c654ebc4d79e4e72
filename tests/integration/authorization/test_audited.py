"""What an authority said is written down, at a relay and at a producer."""

import asyncio
import json
from pathlib import Path

import pytest

from kvcs.audit import auditing
from kvcs.cli.audited import Audited
from kvcs.trust.grants import Role
from moqt.aio import ClientTls, ServerTls, connect
from moqt.aio.tls import CertificateFiles
from moqt.errors import RequestRejected
from moqt.names import TrackNamespace
from moqt.relay.server import Relay
from moqt.session.config import SessionConfig
from tests.integration.authorization.desks import desk
from tests.integration.kvcs.scene import SCOPE
from tests.issuing import Issuer, Shows

pytestmark = pytest.mark.network
PREFIX = TrackNamespace((b"kvcs-1", SCOPE.scope_id))


def access_lines(path: Path) -> list[tuple[str, str, str, str]]:
    """Return what was decided, without repetitions."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (line["outcome"], line["action"], line["scope"], line["reason"])
        for line in lines
        if line["event"] == "access"
    ]


async def ask(uri: str, files: CertificateFiles, token: bytes) -> None:
    """Ask for the namespaces of the scope."""
    tls, config = ClientTls(ca_file=files.ca_file), SessionConfig(tokens=Shows(token))
    async with connect(uri, tls=tls, config=config, drain_s=0.2) as connection:
        try:
            await connection.subscribe_namespace(PREFIX)
        except RequestRejected:
            return


@pytest.mark.parametrize("kind", ["relay", "producer"])
async def test_who_was_let_in_and_who_was_not(
    kind: str, certificates: CertificateFiles, tmp_path: Path
) -> None:
    issuer, path = Issuer(), tmp_path / "audit"
    right, wrong = issuer.issue(), issuer.issue(Role.PRODUCER)
    async with asyncio.timeout(45):
        if kind == "producer":
            async with desk("producer", certificates, tmp_path, issuer) as place:
                with auditing(path):
                    for token in (right, wrong):
                        await ask(place.uri, certificates, token)
        else:
            async with Relay(authority=issuer.authority(), observer=Audited()) as relay:
                tls = ServerTls(certificates.certificate_file, certificates.key_file)
                _, port = await relay.listen("127.0.0.1", 0, tls=tls)
                with auditing(path):
                    for token in (right, wrong):
                        await ask(f"moqt://127.0.0.1:{port}/", certificates, token)

    scope = SCOPE.scope_id[:4].hex()
    what = "SUBSCRIBE_NAMESPACE"
    why = f"unauthorized: token does not allow {what}"
    assert access_lines(path) == [
        ("granted", "CLIENT_SETUP", "", ""),
        ("granted", what, scope, ""),
        ("granted", "CLIENT_SETUP", "", ""),
        ("refused", what, scope, why),
    ]
    text = path.read_text()
    assert "issuer.example/somebody" in text
    assert right.hex() not in text
