"""Client certificates where an authority is asked: instead of tokens, and as what binds them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from kvcs.trust.authority import TokenAuthority
from kvcs.trust.grants import Role, permissions_of
from kvcs.trust.identities import Identity
from kvcs.trust.keys import thumbprint
from moqt.aio import ClientTls, ServerTls, connect
from moqt.aio.tls import CertificateFiles
from moqt.codepoints import RequestErrorCode, SessionErrorCode
from moqt.errors import RequestRejected, SessionClosed
from moqt.names import TrackNamespace
from moqt.relay.server import Relay
from moqt.session.config import SessionConfig
from tests.integration.kvcs.scene import SCOPE
from tests.issuing import AUDIENCE, Issuer, Shows
from tests.pki import Ca, KeyPair, pem, uri

pytestmark = [pytest.mark.network, pytest.mark.aioquic]
PREFIX = TrackNamespace((b"kvcs-1", SCOPE.scope_id))
DECODE = "spiffe://kvcs.example/decode/7"


async def asked_as(
    address: str, files: CertificateFiles, pair: KeyPair, token: bytes | None = None
) -> int | None:
    """Ask for the namespaces of the scope; return the code of a refusal, None if there is none."""
    tls = ClientTls(files.ca_file, certificate_file=pair[0], key_file=pair[1])
    config = SessionConfig() if token is None else SessionConfig(tokens=Shows(token))
    try:
        async with connect(address, tls=tls, config=config, drain_s=0.2) as connection:
            await connection.subscribe_namespace(PREFIX)
    except (RequestRejected, SessionClosed) as exc:
        return exc.code
    return None


async def test_a_certificate_allows_what_its_identity_does_and_binds_tokens(
    certificates: CertificateFiles, tmp_path: Path
) -> None:
    ca, issuer = Ca(), Issuer()
    (tmp_path / "clients.pem").write_bytes(pem(ca.certificate))
    ours, other = (ca.write(tmp_path, name, uri(f"{DECODE}/{name}")) for name in ("a", "b"))
    policy = replace(
        issuer.policy,
        identities=(Identity(DECODE + "/a", permissions_of(Role.CONSUMER, [SCOPE.scope_id])),),
    )
    key = x509.load_pem_x509_certificate(ours[0].read_bytes()).public_key()
    bound = issuer.issue(thumbprint=thumbprint(key))  # type: ignore[arg-type]
    tls = ServerTls(
        certificates.certificate_file,
        certificates.key_file,
        client_ca_file=tmp_path / "clients.pem",
    )
    async with (
        asyncio.timeout(45),
        Relay(authority=TokenAuthority(policy, [AUDIENCE])) as relay,
    ):
        _, port = await relay.listen("127.0.0.1", 0, tls=tls)
        address = f"moqt://127.0.0.1:{port}/"

        assert await asked_as(address, certificates, ours) is None
        assert await asked_as(address, certificates, other) == SessionErrorCode.UNAUTHORIZED
        # Who shows a token is judged by it alone.
        assert await asked_as(address, certificates, other, issuer.issue()) is None
        narrow = issuer.issue(None)
        refused = await asked_as(address, certificates, ours, narrow)
        assert refused == RequestErrorCode.UNAUTHORIZED
        assert await asked_as(address, certificates, ours, bound) is None
        stolen = await asked_as(address, certificates, other, bound)
        assert stolen == SessionErrorCode.MALFORMED_AUTH_TOKEN
