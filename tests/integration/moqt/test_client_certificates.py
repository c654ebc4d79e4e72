"""A listener that asks its clients who they are: the right ones come in, and nobody else."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from aioquic import tls as library
from cryptography import x509

from moqt.aio import (
    ClientTls,
    MoqtConnection,
    RequestHandler,
    Server,
    ServerTls,
    TlsSettingsError,
    connect,
    serve,
)
from moqt.aio.aioquic.clients import ClientCheck
from moqt.aio.tls import CertificateFiles
from moqt.certificates import subject_of
from moqt.errors import MoqtError, RequestRejected, SessionClosed
from moqt.names import FullTrackName
from tests.pki import SERVER, Ca, KeyPair, dns, pem, uri

pytestmark = [pytest.mark.network, pytest.mark.aioquic]

DECODE = "spiffe://kvcs.example/decode/7"


class Door:
    """A server that asks for certificates, and clients that have some."""

    def __init__(self, folder: Path, certificates: CertificateFiles) -> None:
        self.folder, self.files = folder, certificates
        self.ca = Ca()
        self.believe(self.ca)
        self.uri = ""
        self.came: list[MoqtConnection] = []

    @property
    def ca_file(self) -> Path:
        return self.folder / "clients.pem"

    def believe(self, *cas: Ca) -> None:
        self.ca_file.write_bytes(pem(*(ca.certificate for ca in cas)))

    def tls(self, *names: str) -> ServerTls:
        own = self.files.certificate_file, self.files.key_file
        return ServerTls(*own, client_ca_file=self.ca_file, client_names=names)

    @asynccontextmanager
    async def open(self, *names: str) -> AsyncIterator[Server]:
        async with await serve(
            "127.0.0.1",
            0,
            tls=self.tls(*names),
            handler=RequestHandler(),
            on_connection=self.came.append,
        ) as server:
            self.uri = f"moqt://127.0.0.1:{server.address[1]}/"
            yield server

    async def knock(self, pair: KeyPair | None) -> bytes | None:
        """Connect and ask for something; return the certificate that the server knows us by."""
        shown = pair or (None, None)
        tls = ClientTls(self.files.ca_file, certificate_file=shown[0], key_file=shown[1])
        async with connect(self.uri, tls=tls) as connection:
            with pytest.raises(RequestRejected):  # which is an answer
                await connection.track_status(FullTrackName.of("no", "such"))
            return self.came[-1].client_certificate


@pytest.fixture
def door(tmp_path: Path, certificates: CertificateFiles) -> Door:
    return Door(tmp_path, certificates)


@pytest.mark.parametrize("name", [uri(DECODE), dns("decode-7.example")])
async def test_who_has_a_certificate_of_the_ca_comes_in_and_is_known_by_it(
    door: Door, name: x509.GeneralName
) -> None:
    async with door.open():
        known = await door.knock(door.ca.write(door.folder, "client", name))

    assert known is not None
    assert subject_of(known) == name.value


async def test_the_chain_may_be_of_several(door: Door) -> None:
    between = Ca("between", above=door.ca)
    certificate, key = between.write(door.folder, "client", uri(DECODE))
    certificate.write_bytes(certificate.read_bytes() + pem(between.certificate))

    async with door.open():
        assert subject_of(await door.knock((certificate, key)) or b"") == DECODE


def strangers(door: Door) -> dict[str, tuple[KeyPair | None, str, str]]:
    """Who must stay outside: what they show, the alert, and what the log says."""
    write = door.ca.write
    return {
        "none": (None, "certificate_required", "no client certificate"),
        "other root": (
            Ca("elsewhere").write(door.folder, "other", uri(DECODE)),
            "unknown_ca",
            "elsewhere, which no CA for clients vouches for",
        ),
        "expired": (
            write(door.folder, "old", uri(DECODE), since_days=-2, until_days=-1),
            "certificate_expired",
            "client certificate expired on",
        ),
        "other purpose": (
            write(door.folder, "server", uri(DECODE), usage=SERVER),
            "unsupported_certificate",
            "client certificate is for serverAuth, expected clientAuth",
        ),
        "other name": (
            write(door.folder, "name", uri("spiffe://kvcs.example/prefill/7")),
            "access_denied",
            "client is spiffe://kvcs.example/prefill/7, which may not connect here",
        ),
    }


@pytest.mark.parametrize("who", ["none", "other root", "expired", "other purpose", "other name"])
async def test_nobody_else_comes_in_and_the_log_says_why(
    door: Door, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, alert, reason = strangers(door)[who]
    if who == "expired":  # what this end would not show by itself
        monkeypatch.setattr("moqt.aio.tls._check_dates", lambda *_: None)

    with structlog.testing.capture_logs() as lines:
        async with door.open("spiffe://kvcs.example/decode/*"):
            with pytest.raises(SessionClosed, match="connection lost") as caught:
                await door.knock(pair)
        assert reason in caught.value.reason

    assert door.came == []
    [line] = [line for line in lines if line["event"] == "client refused"]
    assert line["alert"] == alert
    assert reason in line["reason"]
    assert line["log_level"] == "warning"
    assert line["peer"][0] == "127.0.0.1"


async def test_who_shows_the_certificate_of_another_has_not_its_key(door: Door) -> None:
    """The library checks that, and must go on doing so."""
    certificate, key = door.ca.write(door.folder, "client", uri(DECODE))
    stranger = door.ca.write(door.folder, "stranger", uri("spiffe://kvcs.example/evil"))[1]

    def lie(*_: Any) -> None:
        """Have this end take a key that does not fit."""

    async with door.open():
        with pytest.raises(TlsSettingsError, match="does not belong"):
            await door.knock((certificate, stranger))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moqt.aio.tls._check_key", lie)
            with pytest.raises((SessionClosed, OSError), match=r"lost|alert"):
                await door.knock((certificate, stranger))
        assert door.came == []
        assert await door.knock((certificate, key)) is not None


async def test_other_cas_are_believed_once_they_are_read(door: Door) -> None:
    other = Ca("other")
    old = door.ca.write(door.folder, "old", uri(DECODE))
    new = other.write(door.folder, "new", uri(DECODE))

    async with door.open() as server:
        assert await door.knock(old) is not None
        door.believe(other)
        server.identify(door.tls())

        assert await door.knock(new) is not None
        with pytest.raises(MoqtError):
            await door.knock(old)
        door.ca_file.write_text("nothing")
        with pytest.raises(TlsSettingsError, match="no PEM certificate"):
            server.identify(door.tls())
        assert await door.knock(new) is not None


async def test_a_certificate_is_read_again_at_each_dialling(door: Door) -> None:
    pair = door.ca.write(door.folder, "client", uri(DECODE))
    next_one = door.ca.write(door.folder, "next", uri(DECODE + "/next"))

    async with door.open():
        assert subject_of(await door.knock(pair) or b"") == DECODE
        for file, newer in zip(pair, next_one, strict=True):
            shutil.copy(newer, file)
        assert subject_of(await door.knock(pair) or b"") == DECODE + "/next"


async def test_who_is_not_asked_is_not_known(certificates: CertificateFiles, door: Door) -> None:
    pair = door.ca.write(door.folder, "client", uri(DECODE))
    own = ServerTls(certificates.certificate_file, certificates.key_file)

    async with await serve(
        "127.0.0.1", 0, tls=own, handler=RequestHandler(), on_connection=door.came.append
    ) as server:
        door.uri = f"moqt://127.0.0.1:{server.address[1]}/"
        assert await door.knock(pair) is None


# -- what is isolated in one module --------------------------------------------------------------


async def test_the_library_still_lets_in_anybody_by_itself(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it no longer does, `moqt/aio/aioquic/clients.py` is to be looked at again."""

    def only_ask(self: ClientCheck, context: library.Context) -> None:
        context._request_client_certificate = True
        self.certificate = b"anything"

    monkeypatch.setattr(ClientCheck, "attach", only_ask)
    async with door.open():
        assert await door.knock(None) is not None
        assert await door.knock(Ca("nobody").write(door.folder, "x", uri(DECODE))) is not None


async def test_who_gets_through_without_a_certificate_all_the_same_has_no_session(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that completes a handshake in a way that we do not know opens no door."""
    monkeypatch.setattr(ClientCheck, "attach", lambda self, context: None)
    with structlog.testing.capture_logs() as lines:
        async with door.open():
            async with asyncio.timeout(10):
                with pytest.raises(SessionClosed):
                    await door.knock(None)

    assert door.came == []
    assert "client without a certificate, closing" in {line["event"] for line in lines}


async def test_names_without_cas_are_refused_before_anything_starts(
    certificates: CertificateFiles,
) -> None:
    names = ServerTls(
        certificates.certificate_file, certificates.key_file, client_names=("spiffe://a/*",)
    )
    with pytest.raises(TlsSettingsError, match="client_ca_file is not, expected"):
        await serve("127.0.0.1", 0, tls=names, handler=RequestHandler())
