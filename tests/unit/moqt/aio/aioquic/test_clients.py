"""What a client shows that nobody can read ends its handshake, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
from aioquic import tls
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from moqt.aio.aioquic.clients import ClientCheck
from moqt.certificates import ClientVerifier
from tests.pki import Ca

CLIENTS = ClientVerifier([Ca().certificate])


@pytest.mark.parametrize(
    "door", ["_server_handle_certificate", "_server_handle_certificate_verify"]
)
@pytest.mark.parametrize(
    "error", [x509.InvalidVersion("23", 23), UnsupportedAlgorithm("?"), ValueError("?")], ids=repr
)
def test_a_certificate_that_the_library_cannot_read_is_a_bad_one(
    door: str, error: Exception
) -> None:
    def fails(message: object) -> None:
        raise error

    context: Any = SimpleNamespace(
        _server_handle_certificate=fails, _server_handle_certificate_verify=fails
    )
    ClientCheck(CLIENTS).attach(context)

    with pytest.raises(tls.Alert, match="cannot be read") as caught:
        getattr(context, door)(object())
    assert caught.value.description is tls.AlertDescription.bad_certificate


def test_what_the_library_refuses_by_itself_stays_as_it_is() -> None:
    def refuses(message: object) -> None:
        raise tls.AlertDecryptError("its own words")

    context: Any = SimpleNamespace(
        _server_handle_certificate=refuses, _server_handle_certificate_verify=refuses
    )
    ClientCheck(CLIENTS).attach(context)

    with pytest.raises(tls.AlertDecryptError, match="its own words"):
        context._server_handle_certificate(object())
