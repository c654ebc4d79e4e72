"""Media over QUIC Transport (MOQT): a session layer without I/O, and an asyncio shell for it.

This module holds the public names that need no I/O. The shell is :mod:`moqt.aio`.
"""

from moqt.errors import (
    MoqtError,
    ObjectTooLarge,
    ProtocolError,
    RequestRejected,
    SessionClosed,
    UsageError,
)
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace

__all__ = [
    "DRAFT",
    "FullTrackName",
    "Location",
    "MoqtError",
    "ObjectTooLarge",
    "ProtocolError",
    "RequestRejected",
    "SessionClosed",
    "TrackNamespace",
    "UsageError",
    "__version__",
]

#: The draft of MOQT spoken here; the ALPN is ``moqt-22``.
DRAFT = 22

__version__ = "0.1.0"
