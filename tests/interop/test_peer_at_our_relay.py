"""The peer's clients, at our relay: all that its interop client knows, and nothing to tolerate."""

import pytest

from moqt.aio import ServerTls
from moqt.aio.tls import CertificateFiles
from moqt.relay.server import Relay
from tests.interop.conftest import StartPeer
from tests.interop.peer import MARKS

pytestmark = MARKS

CASES = (
    "setup-only",
    "announce-only",
    "publish-namespace-done",
    "subscribe-error",
    "rendezvous-timeout",
    "announce-subscribe",
    "subscribe-before-announce",
    "data-subgroup-basic",
    "namespace-discovery",
    "subscribe-namespace-lifecycle",
    "publish-track-only",
    "publish-track-subscribe",
    "fetch",
    "join",
)


@pytest.mark.parametrize("case", CASES)
async def test_its_interop_client_finds_nothing_to_tolerate_in_our_relay(
    case: str, start_peer: StartPeer, certificates: CertificateFiles
) -> None:
    tls = ServerTls(certificates.certificate_file, certificates.key_file)
    async with Relay() as relay:
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        client = start_peer(
            "moq-interop-client",
            *("-r", f"moqt://127.0.0.1:{port}/", "--draft", "22"),
            *("--tls-disable-verify", "-v", "-t", case),
        )
        status = await client.exit_status(40)

    assert status == 0, client.output
    assert f"ok 1 - {case}" in client.lines
    assert "# COMPAT" not in client.output  # "tolerated, not right"
