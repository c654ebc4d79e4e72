"""Client certificates (RFC 8446 Section 4.4.2): asked for, checked, kept.

aioquic 1.7.2 has the messages, and asks for a certificate under a private switch, "for test
purposes only". It checks that a client has the key of what it shows; who shows nothing is let in,
and no chain is ever looked at. Both are added here, to the one TLS context of a connection, and
before the handshake completes: who is refused never has a session. Nothing else touches these
parts of aioquic.
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

from aioquic import tls
from aioquic._buffer import Buffer

from moqt.certificates import UNREADABLE, ClientRefused, ClientVerifier


class ClientCheck:
    """What one accepted connection knows of its client.

    Args:
        verifier: Whom to let in.
    """

    def __init__(self, verifier: ClientVerifier) -> None:
        self._verifier = verifier
        self.certificate: bytes | None = None
        """DER, once it is believed."""

    def attach(self, context: tls.Context) -> None:
        """Have the handshake ask for a certificate, and fail for want of a good one.

        Methods of this one context are replaced, since aioquic makes it by its own class.
        """
        context._request_client_certificate = True
        take, prove = context._server_handle_certificate, context._server_handle_certificate_verify

        def certificate(message: Buffer) -> None:
            with _refusing_what_cannot_be_read():
                take(message)
            if context._peer_certificate is None:
                self._examine(context)

        def certificate_verify(message: Buffer) -> None:
            with _refusing_what_cannot_be_read():
                prove(message)
            self._examine(context)

        setattr(context, "_server_handle_certificate", certificate)  # noqa: B010 - see above
        setattr(context, "_server_handle_certificate_verify", certificate_verify)  # noqa: B010

    def _examine(self, context: tls.Context) -> None:
        own = context._peer_certificate
        chain = [] if own is None else [own, *context._peer_certificate_chain]
        try:
            self.certificate = self._verifier.verify(chain, datetime.datetime.now(datetime.UTC))
        except ClientRefused as refused:
            raise _Alert(refused) from None


@contextmanager
def _refusing_what_cannot_be_read() -> Iterator[None]:
    """Have a damaged certificate end the handshake: aioquic 1.7.2 expects ValueError alone."""
    try:
        yield
    except tls.Alert:
        raise
    except UNREADABLE as error:
        text = f"client certificate cannot be read: {type(error).__name__}"
        raise _Alert(ClientRefused("bad_certificate", text)) from None


class _Alert(tls.Alert):
    """A refusal, as aioquic carries it to the peer."""

    def __init__(self, refused: ClientRefused) -> None:
        super().__init__(str(refused))
        self.description = tls.AlertDescription[refused.alert]
