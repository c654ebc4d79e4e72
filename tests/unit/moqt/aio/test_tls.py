"""Certificates and keys that can be used, and those that cannot."""

import datetime
import ssl
from pathlib import Path

import pytest

from moqt.aio import tls
from moqt.aio.tls import (
    CertificateFiles,
    ClientTls,
    ServerTls,
    TlsSettingsError,
    client_configuration,
    make_certificates,
    server_configuration,
)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificates(tmp_path / "made")


def test_made_certificates_can_be_served(files: CertificateFiles) -> None:
    configuration = server_configuration(
        ServerTls(files.certificate_file, files.key_file), ["moqt-22"]
    )

    assert configuration.alpn_protocols == ["moqt-22"]
    assert configuration.private_key is not None


def test_the_key_is_readable_by_its_owner_only(files: CertificateFiles) -> None:
    assert files.key_file.stat().st_mode & 0o077 == 0


def test_a_client_verifies_unless_told_not_to(files: CertificateFiles) -> None:
    believing = client_configuration(ClientTls(verify=False), ["x"], "example.org")
    public = client_configuration(ClientTls(), ["x"], "example.org")
    private = client_configuration(ClientTls(files.ca_file), ["x"], "example.org")

    assert believing.verify_mode == ssl.CERT_NONE
    assert public.verify_mode == private.verify_mode == ssl.CERT_REQUIRED
    assert public.cadata is None
    assert private.cadata == files.ca_file.read_bytes()


def test_the_name_to_verify_is_the_host_unless_another_is_given() -> None:
    dialled = client_configuration(ClientTls(), ["x"], "10.0.0.1")
    named = client_configuration(ClientTls(server_name="kv.example"), ["x"], "10.0.0.1")

    assert dialled.server_name == "10.0.0.1"
    assert named.server_name == "kv.example"


def test_a_ca_file_without_a_final_newline_is_read(files: CertificateFiles) -> None:
    files.ca_file.write_bytes(files.ca_file.read_bytes().rstrip())

    configuration = client_configuration(ClientTls(files.ca_file), ["x"], "h")

    assert configuration.cadata is not None
    assert configuration.cadata.endswith(b"-----END CERTIFICATE-----\n")


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
        server_configuration(ServerTls(files.certificate_file, files.key_file), ["x"])

    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"nonsense", "PEM")])
def test_an_unusable_ca_file_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(TlsSettingsError, match=why) as caught:
        client_configuration(ClientTls(file), ["x"], "h")

    assert str(file) in str(caught.value)


def test_a_key_of_another_certificate_is_refused(files: CertificateFiles, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")

    with pytest.raises(TlsSettingsError, match="does not belong") as caught:
        server_configuration(ServerTls(files.certificate_file, other.key_file), ["x"])

    assert str(other.key_file) in str(caught.value)


def test_an_expired_certificate_is_refused(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=31)
    monkeypatch.setattr(tls, "_utc_now", lambda: later)

    with pytest.raises(TlsSettingsError, match="expired on") as caught:
        server_configuration(ServerTls(files.certificate_file, files.key_file), ["x"])

    assert str(files.certificate_file) in str(caught.value)
