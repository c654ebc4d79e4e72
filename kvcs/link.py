"""What both ends of a link share.

From settings to what connections and listeners are told; and, when a relay was lost or goes away,
when to dial again and where.
"""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

import structlog

from kvcs.config import (
    IndexSettings,
    ListeningSettings,
    ProducerSettings,
    RelaySettings,
    Settings,
    StoreSettings,
)
from kvcs.errors import ConfigError
from kvcs.telemetry import LogEvent
from kvcs.trust.prefixes import discoverable
from kvcs.trust.tokenfile import HeldToken, TokenFile
from kvcs.trust.tokens import read_unverified
from moqt.aio import ClientTls, EngineUnavailableError, MoqtUri, QuicSettings, ServerTls
from moqt.aio.engine import check_engine
from moqt.aio.tls import check_client_tls
from moqt.names import TrackNamespace
from moqt.session.config import SessionConfig
from moqt.session.guests import GuestLimits, Guests
from moqt.wire.token import AuthorizationToken

log = structlog.get_logger("kvcs")

#: Seconds that a peer may give no sign of life, although it is asked for one, until another
#: session is made beside the one with it. It is not closed for that: an event loop may stand still.
SILENCE_S = 3.0
#: Octets of requests that may have arrived and not been read: more than all of them together have
#: that a peer can have open.
SERVING_WINDOW = 1 << 20
#: Seconds for a session that takes the place of a lost one. Who dials asks ever more rarely, and a
#: relay that is started again meanwhile would wait for the next time.
REDIAL_S = 5.0


class Backoff:
    """Pauses between attempts: doubled each time, and shortened at random.

    All those whom one loss concerns would come back at once otherwise.

    Args:
        first_s: The first pause at most, in seconds.
        last_s: A pause at most.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._last_s = last_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return how long to wait now."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._last_s)
        return pause_s


def why_not_there(uri: str, current: str, tls: ClientTls) -> str | None:
    """Say why a relay may not send us to a URI; ``None`` if it may (MOQT, "GOAWAY").

    Where certificates are verified, it may send us to whoever has a good one. Where they are not,
    nobody could tell who answers at another host.
    """
    try:
        target = MoqtUri.parse(uri)
    except ValueError as exc:
        return str(exc)
    if not tls.verify and target.host != MoqtUri.parse(current).host:
        return f"{target.host} is another host, and certificates are not verified"
    return None


def check_target(uri: str, tls: ClientTls) -> None:
    """See whether an endpoint can be dialled at all.

    Raises:
        ConfigError: If the URI is none, or a file of ``tls`` cannot be used.
    """
    try:
        MoqtUri.parse(uri)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    try:
        check_client_tls(tls)
    except ValueError as exc:
        raise ConfigError(f"{uri}: {exc}") from None


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
        congestion_control=settings.congestion_control,
        engine=settings.engine,
    )
    if isinstance(settings, ListeningSettings):
        return replace(
            limits,
            max_connections=settings.max_connections,
            max_connections_of_peer=settings.max_connections_of_peer,
            max_handshakes=settings.max_handshakes,
            max_handshakes_per_s_of_peer=settings.max_handshakes_per_s_of_peer,
            retry_above=settings.retry_above,
        )
    return limits


def serving_quic(settings: ListeningSettings) -> QuicSettings:
    """Return the limits of connections that come to who publishes and takes nothing.

    Nobody has data to send there, so the receive windows, which a peer can fill and leave, are no
    larger than requests need.

    Raises:
        ConfigError: As :func:`quic_settings` does.
    """
    limits = quic_settings(settings)
    return replace(
        limits,
        connection_window=min(limits.connection_window, SERVING_WINDOW),
        stream_window=min(limits.stream_window, SERVING_WINDOW),
    )


def session_config(settings: ListeningSettings) -> SessionConfig:
    """Return the limits of the sessions of a listener."""
    return SessionConfig(
        max_requests=settings.max_requests,
        max_requests_per_s=settings.max_requests_per_s,
        max_request_updates=settings.max_request_updates,
        max_filter_ranges=settings.max_filter_ranges,
        max_unread_octets=settings.max_unread_octets,
    )


def guests(settings: ListeningSettings) -> Guests:
    """Return what counts the sessions and requests of each peer of a listener."""
    return Guests(
        GuestLimits(
            max_sessions_of_peer=settings.max_sessions_of_peer,
            max_requests_of_peer=settings.max_requests_of_peer,
            max_requests_per_s_of_peer=settings.max_requests_per_s_of_peer,
        )
    )


def client_tls(settings: Settings) -> ClientTls:
    """Return whom to believe when dialling, and what to show to who asks."""
    return ClientTls(
        ca_file=settings.ca_file,
        verify=not settings.insecure_skip_verify,
        server_name=settings.server_name,
        certificate_file=settings.client_certificate_file,
        key_file=settings.client_key_file,
    )


def client_config(settings: Settings) -> SessionConfig:
    """Return what sessions that we dial are told: the token that we show there.

    Raises:
        ConfigError: If the token file cannot be used; the message names it.
    """
    if settings.token_file is None:
        return SessionConfig()
    return SessionConfig(tokens=ShownToken.read(settings.token_file))


class ShownToken:
    """Gives the token of a file, read again for each session.

    A file that is not good any more costs a log line: the token that was good is shown.
    """

    def __init__(self, path: Path, held: HeldToken) -> None:
        self._path = path
        self._held = held

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file for the first time.

        Raises:
            ConfigError: If it cannot be used; the message names it.
        """
        return cls(path, TokenFile(path).read(time.time()))

    def __call__(self) -> tuple[AuthorizationToken, ...]:
        """Return what to show now."""
        try:
            self._held = TokenFile(self._path).read(time.time())
        except ConfigError as exc:
            log.warning(LogEvent.TOKEN_REFUSED, error=str(exc))
        return (self._held.to_show,)

    @property
    def prefixes(self) -> tuple[TrackNamespace, ...]:
        """What may be discovered with the token, as far as it says so itself."""
        return discoverable(read_unverified(self._held.value).claims.permissions)


def upstream_prefixes(settings: Settings) -> tuple[TrackNamespace, ...]:
    """Return what a relay may ask for at its upstream; without a token: everything.

    Raises:
        ConfigError: If the token file cannot be used, or nothing may be discovered with it.
    """
    if settings.token_file is None:
        return (TrackNamespace(),)
    if not (prefixes := ShownToken.read(settings.token_file).prefixes):
        raise ConfigError(
            f"token file {settings.token_file}: the token allows no SUBSCRIBE_NAMESPACE, expected "
            "one of role relay"
        )
    return prefixes


def server_tls(
    settings: ProducerSettings | RelaySettings | StoreSettings | IndexSettings,
) -> ServerTls:
    """Return what to identify oneself with when listening.

    Raises:
        ConfigError: If a file is not set; the message names the setting.
    """
    if settings.certificate_file is None or settings.key_file is None:
        missing = "certificate_file" if settings.certificate_file is None else "key_file"
        raise ConfigError(f"{missing} is not set, expected a PEM file to listen with")
    return ServerTls(
        settings.certificate_file,
        settings.key_file,
        client_ca_file=settings.client_ca_file,
        client_names=settings.client_names,
    )
