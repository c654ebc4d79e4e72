"""A listener that is given another certificate: new connections see it, sessions go on."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moqt.aio import (
    ClientTls,
    RequestHandler,
    Server,
    ServerTls,
    TlsSettingsError,
    connect,
    open_connection,
    serve,
)
from moqt.aio.tls import CertificateFiles, make_certificates
from moqt.errors import MoqtError, RequestRejected
from moqt.names import FullTrackName

pytestmark = pytest.mark.network


class Shown:
    """The files that a listener shows, and two pairs of certificate and key to put there."""

    def __init__(self, folder: Path) -> None:
        self.old = make_certificates(folder / "old")
        self.new = make_certificates(folder / "new")
        self.tls = ServerTls(folder / "certificate.pem", folder / "key.pem")
        self.put(self.old, self.old)

    def put(self, certificate: CertificateFiles, key: CertificateFiles) -> None:
        shutil.copy(certificate.certificate_file, self.tls.certificate_file)
        shutil.copy(key.key_file, self.tls.key_file)


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


@asynccontextmanager
async def listening(shown: Shown) -> AsyncIterator[tuple[Server, str]]:
    async with await serve("127.0.0.1", 0, tls=shown.tls, handler=RequestHandler()) as server:
        yield server, f"moqt://127.0.0.1:{server.address[1]}/"


async def is_believed(uri: str, files: CertificateFiles) -> bool:
    """Whether who believes one CA gets a session."""
    try:
        async with connect(uri, tls=ClientTls(ca_file=files.ca_file)):
            return True
    except (OSError, MoqtError):
        return False


@pytest.mark.aioquic
async def test_who_connects_is_shown_the_new_certificate_and_who_is_there_stays(
    shown: Shown,
) -> None:
    async with listening(shown) as (server, uri):
        there = await open_connection(uri, tls=ClientTls(ca_file=shown.old.ca_file))
        shown.put(shown.new, shown.new)
        assert await is_believed(uri, shown.old)  # nothing is read before it is told to
        server.identify(shown.tls)

        assert await is_believed(uri, shown.new)
        assert not await is_believed(uri, shown.old)
        with pytest.raises(RequestRejected):  # which is an answer
            await there.track_status(FullTrackName.of("no", "such"))
        await there.close(drain_s=0.1)


@pytest.mark.aioquic
async def test_a_certificate_that_cannot_be_used_changes_nothing(shown: Shown) -> None:
    async with listening(shown) as (server, uri):
        shown.put(shown.new, shown.old)
        with pytest.raises(TlsSettingsError, match="expected the key of the first one") as caught:
            server.identify(shown.tls)
        assert str(shown.tls.key_file) in str(caught.value)
        assert await is_believed(uri, shown.old)
        shown.put(shown.new, shown.new)
        server.identify(shown.tls)
        assert await is_believed(uri, shown.new)
