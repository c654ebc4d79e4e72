"""A relay that asks for certificates and for no tokens: what they open, and for how long."""

import asyncio
import time
from pathlib import Path

import pytest

from kvcs.trust.certified import CertifiedAuthority
from moqt.aio import ClientTls, RequestHandler, ServerTls, connect, serve
from moqt.aio.tls import CertificateFiles
from moqt.errors import RequestRejected
from moqt.names import FullTrackName
from tests.pki import NOW, Ca, pem, uri

pytestmark = [pytest.mark.network, pytest.mark.aioquic]


async def test_a_session_lasts_no_longer_than_the_certificate_that_opened_it(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    ca = Ca()
    (tmp_path / "clients.pem").write_bytes(pem(ca.certificate))
    left_s = time.time() - NOW.timestamp() + 3.0
    pair = ca.write(tmp_path, "client", uri("spiffe://a/b"), until_days=left_s / 86_400)
    tls = ServerTls(
        certificates.certificate_file,
        certificates.key_file,
        client_ca_file=tmp_path / "clients.pem",
    )
    shown = ClientTls(certificates.ca_file, certificate_file=pair[0], key_file=pair[1])

    async with (
        asyncio.timeout(30),
        await serve(
            "127.0.0.1", 0, tls=tls, handler=RequestHandler(), authority=CertifiedAuthority()
        ) as server,
        connect(f"moqt://127.0.0.1:{server.address[1]}/", tls=shown) as connection,
    ):
        with pytest.raises(RequestRejected):  # which is an answer: there is no such track
            await connection.track_status(FullTrackName.of("no", "such"))
        await connection.wait_closed()

        assert connection.going_away is not None  # told in time, and so it went
        assert time.time() >= NOW.timestamp() + left_s / 2 - 1
