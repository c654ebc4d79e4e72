"""MOQT over asyncio and QUIC: dial with :func:`connect`, listen with :func:`serve`."""

from moqt.aio.client import MoqtUri, connect, open_connection
from moqt.aio.connection import MoqtConnection, RequestHandler
from moqt.aio.engine import EngineUnavailableError
from moqt.aio.publisher import TrackPublisher
from moqt.aio.server import Server, serve
from moqt.aio.settings import QuicSettings
from moqt.aio.tls import ClientTls, ServerTls, TlsSettingsError
from moqt.aio.tracks import (
    Fetch,
    NamespacePublication,
    NamespaceSubscription,
    Publication,
    Subscription,
    TracksSubscription,
)

__all__ = [
    "ClientTls",
    "EngineUnavailableError",
    "Fetch",
    "MoqtConnection",
    "MoqtUri",
    "NamespacePublication",
    "NamespaceSubscription",
    "Publication",
    "QuicSettings",
    "RequestHandler",
    "Server",
    "ServerTls",
    "Subscription",
    "TlsSettingsError",
    "TrackPublisher",
    "TracksSubscription",
    "connect",
    "open_connection",
    "serve",
]
