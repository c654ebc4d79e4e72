"""Certificates and keys that can be used, and those that cannot."""

import datetime
from pathlib import Path

import pytest

from moqt.aio import tls
from moqt.aio.tls import (
    CertificateFiles,
    ClientTls,
    ServerTls,
    TlsSettingsError,
    check_client_tls,
    check_server_tls,
    load_cas,
    load_identity,
    make_certificates,
)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificates(tmp_path / "made")


def test_made_certificates_can_be_used(files: CertificateFiles) -> None:
    check_server_tls(ServerTls(files.certificate_file, files.key_file))
    check_client_tls(ClientTls(files.ca_file))


def test_the_public_cas_need_no_file() -> None:
    check_client_tls(ClientTls())

    assert load_cas(ClientTls()) is None


def test_the_first_certificate_is_the_servers_and_the_others_its_chain(
    files: CertificateFiles,
) -> None:
    alone = load_identity(ServerTls(files.certificate_file, files.key_file))
    assert alone.chain == ()

    both = files.certificate_file.read_bytes() + files.ca_file.read_bytes()
    files.certificate_file.write_bytes(both)
    chained = load_identity(ServerTls(files.certificate_file, files.key_file))

    assert chained.certificate == alone.certificate
    assert list(chained.chain) == load_cas(ClientTls(files.ca_file))


def test_the_key_is_readable_by_its_owner_only(files: CertificateFiles) -> None:
    assert files.key_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("which", ["certificate_file", "key_file"])
@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"nonsense", "PEM"), (b"", "PEM")]
)
def test_an_unusable_server_file_is_named(
    files: CertificateFiles, which: str, content: bytes | None, why: str
) -> None:
    file: Path = getattr(files, which)
    file.unlink()
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(TlsSettingsError, match=why) as caught:
        check_server_tls(ServerTls(files.certificate_file, files.key_file))

    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"nonsense", "PEM")])
def test_an_unusable_ca_file_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(TlsSettingsError, match=why) as caught:
        check_client_tls(ClientTls(file))

    assert str(file) in str(caught.value)


def test_a_key_of_another_certificate_is_refused(files: CertificateFiles, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")

    with pytest.raises(TlsSettingsError, match="does not belong") as caught:
        check_server_tls(ServerTls(files.certificate_file, other.key_file))

    assert str(other.key_file) in str(caught.value)


def test_an_expired_certificate_is_refused(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=31)
    monkeypatch.setattr(tls, "_utc_now", lambda: later)

    with pytest.raises(TlsSettingsError, match="expired on") as caught:
        check_server_tls(ServerTls(files.certificate_file, files.key_file))

    assert str(files.certificate_file) in str(caught.value)


@pytest.mark.parametrize(
    ("days", "why"),
    [(-1, r"is valid from .* expected one that is valid on"), (2, "CN=throwaway CA expired on")],
    ids=["not valid yet", "one of the chain expired"],
)
def test_every_certificate_of_the_chain_must_be_valid_today(
    files: CertificateFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, why: str
) -> None:
    brief = make_certificates(tmp_path / "brief", days=1)
    with files.certificate_file.open("ab") as chain:
        chain.write(brief.ca_file.read_bytes())
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(tls, "_utc_now", lambda: then)

    with pytest.raises(TlsSettingsError, match=why) as caught:
        check_server_tls(ServerTls(files.certificate_file, files.key_file))

    assert str(files.certificate_file) in str(caught.value)
