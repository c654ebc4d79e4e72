"""What aioquic is told of our settings."""

import ssl
from pathlib import Path

import pytest

from moqt.aio.aioquic.configuration import client_configuration, server_configuration
from moqt.aio.aioquic.pathmtu import CEILING
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import CertificateFiles, ClientTls, ServerTls, make_certificates

SETTINGS = QuicSettings(
    max_datagram_octets=1452,
    connection_window=3 << 20,
    stream_window=2 << 20,
    idle_timeout_s=7.0,
)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return make_certificates(tmp_path / "made")


def test_a_server_shows_its_certificate_and_accepts_its_protocols(files: CertificateFiles) -> None:
    configuration = server_configuration(
        SETTINGS, ServerTls(files.certificate_file, files.key_file), ["moqt-22"]
    )

    assert configuration.alpn_protocols == ["moqt-22"]
    assert configuration.certificate is not None
    assert configuration.private_key is not None
    assert configuration.certificate_chain == []


def test_a_client_verifies_unless_told_not_to(files: CertificateFiles) -> None:
    believing = client_configuration(SETTINGS, ClientTls(verify=False), ["x"], "example.org")
    public = client_configuration(SETTINGS, ClientTls(), ["x"], "example.org")
    private = client_configuration(SETTINGS, ClientTls(files.ca_file), ["x"], "example.org")

    assert believing.verify_mode == ssl.CERT_NONE
    assert public.verify_mode == private.verify_mode == ssl.CERT_REQUIRED
    assert public.cadata is None
    assert private.cadata == files.ca_file.read_bytes()


def test_the_name_to_verify_is_the_host_unless_another_is_given() -> None:
    dialled = client_configuration(SETTINGS, ClientTls(), ["x"], "10.0.0.1")
    named = client_configuration(SETTINGS, ClientTls(server_name="kv.example"), ["x"], "10.0.0.1")

    assert dialled.server_name == "10.0.0.1"
    assert named.server_name == "kv.example"


def test_a_ca_file_without_a_final_newline_is_read(files: CertificateFiles) -> None:
    files.ca_file.write_bytes(files.ca_file.read_bytes().rstrip())

    configuration = client_configuration(SETTINGS, ClientTls(files.ca_file), ["x"], "h")

    assert configuration.cadata is not None
    assert configuration.cadata.endswith(b"-----END CERTIFICATE-----\n")


def test_the_limits_are_taken_over() -> None:
    configuration = client_configuration(SETTINGS, ClientTls(), ["x"], "h")

    assert configuration.max_datagram_size == 1452
    assert configuration.max_data == 3 << 20
    assert configuration.max_stream_data == 2 << 20
    assert configuration.idle_timeout == 7.0


def test_datagrams_are_always_accepted() -> None:
    configuration = client_configuration(QuicSettings(), ClientTls(), ["x"], "h")

    assert configuration.max_datagram_frame_size is not None
    assert configuration.max_datagram_frame_size > CEILING


def test_a_size_that_is_to_be_found_begins_with_what_every_path_takes() -> None:
    configuration = client_configuration(QuicSettings(), ClientTls(), ["x"], "h")

    assert configuration.max_datagram_size == 1200
