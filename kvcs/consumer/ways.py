"""Ways: the relays and producers of a caller's list. Shell."""

from dataclasses import dataclass

import structlog

from kvcs.consumer.lanes import Lanes
from kvcs.consumer.sessions import ConnectionSpec
from kvcs.link import why_not_there
from kvcs.telemetry import LogEvent
from moqt.aio import MoqtConnection

log = structlog.get_logger("kvcs.consumer")


@dataclass(slots=True, eq=False)
class Way:
    """A relay or a producer of the caller's list."""

    spec: ConnectionSpec

    lanes: Lanes | None = None
    """The sessions with it, if there are any, whatever became of them."""

    sent_to: str | None = None
    """Where its GOAWAY sends us. It is dialled there once; whatever is lost there, we go home."""

    @property
    def usable(self) -> Lanes | None:
        """The sessions with it, if requests can be made over one of them."""
        return self.lanes if self.lanes is not None and self.lanes.is_usable else None

    def where_sent(self, conn: MoqtConnection) -> str | None:
        """Return the URI of a session's GOAWAY, if there is one and we may be sent there."""
        uri = conn.going_away.new_session_uri if conn.going_away is not None else ""
        if not uri:
            return None
        if (reason := why_not_there(uri, self.spec.uri, self.spec.tls)) is not None:
            log.warning(LogEvent.RELAY_MOVE_REFUSED, relay=self.spec.uri, reason=reason)
            return None
        return uri
