"""Certificates and keys that can be used, and those that cannot."""

import base64
import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from moqt.aio import tls
from moqt.aio.tls import (
    CertificateFiles,
    ClientTls,
    ServerTls,
    TlsSettingsError,
    check_client_tls,
    check_server_tls,
    load_cas,
    load_client_identity,
    load_client_verifier,
    load_identity,
    make_certificates,
)
from moqt.certificates import subject_of
from tests.pki import NOW, SERVER, Ca, dns, pem, uri


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


def test_a_chain_that_is_not_in_order_is_refused_naming_what_does_not_follow(
    tmp_path: Path,
) -> None:
    root = Ca("root")
    between = Ca("between", above=root)
    certificate, key = between.write(tmp_path, "own", dns("here.example"), usage=SERVER)
    own = certificate.read_bytes()
    certificate.write_bytes(own + pem(between.certificate, root.certificate))
    check_server_tls(ServerTls(certificate, key))

    certificate.write_bytes(own + pem(root.certificate, between.certificate))
    with pytest.raises(TlsSettingsError, match=r"certificate 1 was issued by CN=between, which "):
        check_server_tls(ServerTls(certificate, key))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"key_file": None}, "only one of them is set"),
        ({"certificate_file": None}, "only one of them is set"),
        ({"certificate_file": "server.pem"}, "does not belong"),
        ({"key_file": "none"}, "none: No such file"),
    ],
)
def test_what_a_client_shows_must_fit_together(
    tmp_path: Path, changed: dict[str, str | None], says: str
) -> None:
    ca = Ca()
    certificate, key = ca.write(tmp_path, "own", uri("spiffe://kvcs.example/a"))
    ca.write(tmp_path, "server", dns("a"))
    good = ClientTls(certificate_file=certificate, key_file=key)
    check_client_tls(good)

    paths: dict[str, Any] = {n: None if to is None else tmp_path / to for n, to in changed.items()}
    with pytest.raises(TlsSettingsError, match=says):
        check_client_tls(replace(good, **paths))


def test_cas_of_clients_must_be_some_and_one_must_be_valid(tmp_path: Path) -> None:
    server = Ca().write(tmp_path, "server", dns("a"), usage=SERVER)
    asking = ServerTls(*server, client_ca_file=tmp_path / "cas.pem")
    with pytest.raises(TlsSettingsError, match=r"cas\.pem: No such file"):
        check_server_tls(asking)
    old = Ca().issue(dns("old"), until_days=-0.5)
    (tmp_path / "cas.pem").write_bytes(pem(old))
    with pytest.raises(TlsSettingsError, match="no CA in it is valid"):
        check_server_tls(asking)
    (tmp_path / "cas.pem").write_bytes(pem(old, Ca().certificate))
    check_server_tls(asking)


def test_a_throwaway_certificate_for_a_client_is_believed_by_its_ca(tmp_path: Path) -> None:
    name = "spiffe://kvcs.example/decode/7"
    files = make_certificates(tmp_path, client=name)
    server = ServerTls(files.certificate_file, files.key_file, client_ca_file=files.ca_file)
    verifier = load_client_verifier(server)
    shown = load_client_identity(
        ClientTls(certificate_file=files.client_certificate_file, key_file=files.client_key_file)
    )

    assert verifier is not None
    assert shown is not None
    assert subject_of(verifier.verify([shown.certificate], NOW)) == name
    assert files.client_key_file is not None
    assert files.client_key_file.stat().st_mode & 0o777 == 0o600


def test_a_certificate_whose_octets_were_changed_anywhere_is_refused_or_good(
    files: CertificateFiles, tmp_path: Path
) -> None:
    """Of a certificate that is damaged some parts are only read when somebody asks for them."""
    whole = x509.load_pem_x509_certificate(files.certificate_file.read_bytes())
    der = whole.public_bytes(Encoding.DER)
    changed = tmp_path / "changed.pem"
    refused = set()

    for at in range(len(der)):
        octets = bytearray(der)
        octets[at] ^= 0x15
        text = base64.encodebytes(octets).decode()
        changed.write_text(f"-----BEGIN CERTIFICATE-----\n{text}-----END CERTIFICATE-----\n")
        try:
            check_server_tls(ServerTls(changed, files.key_file))
        except TlsSettingsError as exc:
            refused.add(str(exc).split(":")[1].strip()[:30])

    assert "certificate 1 cannot be read" in refused
