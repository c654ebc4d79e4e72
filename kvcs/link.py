"""From settings to what connections and listeners are told."""

from dataclasses import replace

from kvcs.config import ProducerSettings, RelaySettings, Settings
from kvcs.errors import ConfigError
from moqt.aio import ClientTls, EngineUnavailableError, QuicSettings, ServerTls
from moqt.aio.engine import check_engine


def quic_settings(settings: Settings) -> QuicSettings:
    """Return the limits of QUIC connections, and the engine that carries them.

    Raises:
        ConfigError: If that engine cannot be used here; the message says why.
    """
    try:
        check_engine(settings.engine)
    except EngineUnavailableError as error:
        raise ConfigError(f"engine is {settings.engine}, which cannot be used: {error}") from error
    limits = QuicSettings(
        max_datagram_octets=settings.max_datagram_octets,
        connection_window=settings.connection_window,
        stream_window=settings.stream_window,
        idle_timeout_s=settings.idle_timeout_s,
        engine=settings.engine,
    )
    if isinstance(settings, ProducerSettings | RelaySettings):
        return replace(limits, max_connections=settings.max_connections)
    return limits


def client_tls(settings: Settings) -> ClientTls:
    """Return whom to believe when dialling."""
    return ClientTls(
        ca_file=settings.ca_file,
        verify=not settings.insecure_skip_verify,
        server_name=settings.server_name,
    )


def server_tls(settings: ProducerSettings | RelaySettings) -> ServerTls:
    """Return what to identify oneself with when listening.

    Raises:
        ConfigError: If a file is not set; the message names the setting.
    """
    if settings.certificate_file is None or settings.key_file is None:
        missing = "certificate_file" if settings.certificate_file is None else "key_file"
        raise ConfigError(f"{missing} is not set, expected a PEM file to listen with")
    return ServerTls(settings.certificate_file, settings.key_file)
