"""From our settings to aioquic's: TLS, ALPN, limits."""

import ssl
from collections.abc import Sequence

from aioquic.quic.configuration import QuicConfiguration
from cryptography.hazmat.primitives.serialization import Encoding

from moqt.aio.aioquic.pathmtu import BASE
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import (
    ClientTls,
    Identity,
    ServerTls,
    load_cas,
    load_client_identity,
    load_identity,
)

#: How long a connection ID of ours is; what tells packets apart relies on it.
CONNECTION_ID_OCTETS = 8

#: The largest DATAGRAM frame that is accepted; more than any packet carries.
MAX_DATAGRAM_FRAME = 65_535


def client_configuration(
    settings: QuicSettings, tls: ClientTls, alpn: Sequence[str], host: str
) -> QuicConfiguration:
    """Return a configuration that dials ``host`` with ``tls`` and offers ``alpn``.

    Raises:
        TlsSettingsError: If the CA file is missing or is not PEM, or if a certificate of our own
            or its key cannot be used.
    """
    configuration = _configuration(settings, alpn, is_client=True)
    configuration.server_name = tls.server_name or host
    configuration.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
    cas = load_cas(tls)
    if cas is not None:
        # Written out again because aioquic's own parser wants exactly this form.
        configuration.cadata = b"".join(ca.public_bytes(Encoding.PEM) for ca in cas)
    identity = load_client_identity(tls)
    if identity is not None:
        _show(configuration, identity)
    return configuration


def server_configuration(
    settings: QuicSettings, tls: ServerTls, alpn: Sequence[str]
) -> QuicConfiguration:
    """Return a configuration that serves with ``tls`` and accepts ``alpn``.

    Raises:
        TlsSettingsError: If a file is missing, is not PEM, or has expired, or if the key is not
            the certificate's.
    """
    identity = load_identity(tls)
    configuration = _configuration(settings, alpn, is_client=False)
    _show(configuration, identity)
    return configuration


def _show(configuration: QuicConfiguration, identity: Identity) -> None:
    configuration.certificate = identity.certificate
    configuration.certificate_chain = list(identity.chain)
    configuration.private_key = identity.key


def _configuration(
    settings: QuicSettings, alpn: Sequence[str], *, is_client: bool
) -> QuicConfiguration:
    configuration = QuicConfiguration(is_client=is_client, alpn_protocols=list(alpn))
    configuration.connection_id_length = CONNECTION_ID_OCTETS
    configuration.idle_timeout = settings.idle_timeout_s
    configuration.max_data = settings.connection_window
    configuration.max_stream_data = settings.stream_window
    configuration.max_datagram_size = settings.max_datagram_octets or BASE
    configuration.max_datagram_frame_size = MAX_DATAGRAM_FRAME
    return configuration
