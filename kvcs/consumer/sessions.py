"""Sessions: what can be dialled, and every connection that was. Shell."""

import asyncio
from dataclasses import dataclass, field

from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure, session_refused
from kvcs.link import check_target
from moqt.aio import ClientTls, MoqtConnection, QuicSettings, open_connection
from moqt.errors import MoqtError, SessionClosed
from moqt.session.config import SessionConfig

#: Seconds that closing a connection waits for the last words to be acknowledged.
DRAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSpec:
    """A relay or a producer to retrieve from."""

    uri: str
    """``moqt://host:port/path``."""

    tls: ClientTls = field(default_factory=ClientTls)
    quic: QuicSettings = field(default_factory=QuicSettings)
    config: SessionConfig = field(default_factory=SessionConfig)

    def check(self) -> None:
        """See whether it can be dialled at all.

        Raises:
            ConfigError: If the URI is none, or a file of ``tls`` cannot be used.
        """
        check_target(self.uri, self.tls)


class Sessions:
    """Every session that a retrieval has opened; each is closed at its end, if not before.

    Attributes:
        open: Those that were not let go.
    """

    def __init__(self) -> None:
        self.open: list[MoqtConnection] = []
        self._uris: dict[MoqtConnection, str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def dial(
        self, spec: ConnectionSpec, uri: str, timeout_s: float
    ) -> MoqtConnection | Failure:
        """Open a session.

        Args:
            spec: What is dialled.
            uri: Where that is; a GOAWAY may have sent us there.
            timeout_s: How long it may take, handshakes included.
        """
        try:
            conn = await open_connection(
                uri, tls=spec.tls, quic=spec.quic, config=spec.config, timeout_s=timeout_s
            )
        except ValueError as exc:  # TlsSettingsError is one: the caller's files, not a peer
            return Failure(FailureReason.UNUSABLE, f"{uri}: {exc}")
        except SessionClosed as exc:
            refused = session_refused(exc)
            return refused or Failure(FailureReason.UNREACHABLE, f"{uri}: {exc}", again=True)
        except (OSError, TimeoutError, MoqtError) as exc:
            text = f"{uri}: {str(exc) or type(exc).__name__}"
            return Failure(FailureReason.UNREACHABLE, text, again=True)
        self.open.append(conn)
        self._uris[conn] = uri
        return conn

    def uri_of(self, conn: MoqtConnection) -> str | None:
        """Return where a session was dialled; None: it was let go."""
        return self._uris.get(conn)

    def let_go(self, conn: MoqtConnection) -> None:
        """Close a session, without waiting for that. Twice is once."""
        if conn in self.open:
            self.open.remove(conn)
            del self._uris[conn]
            # Awaited at the end of the retrieval.
            task = asyncio.create_task(conn.close(drain_s=0.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all that are left, and wait until every one is closed."""
        await asyncio.gather(*self._closing, *(conn.close(drain_s=DRAIN_S) for conn in self.open))
