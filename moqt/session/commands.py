"""What the transport must do. Values only; carried out in order.

Data for streams does not come this way: it is taken from
:meth:`~moqt.session.core.Session.data_to_send` as the transport has room for it.
"""

from dataclasses import dataclass
from typing import NewType

from moqt.codepoints import SessionErrorCode, StreamErrorCode
from moqt.values import hot_value

StreamId = NewType("StreamId", int)


@hot_value()
class SendStreamData:
    """Append to a stream, opening it if this is its first data."""

    stream_id: StreamId
    data: bytes | memoryview
    fin: bool = False


@dataclass(frozen=True, slots=True)
class ResetStream:
    """Give up on a stream we were sending."""

    stream_id: StreamId
    code: StreamErrorCode | int
    after_delivery: bool = False
    """Once everything that was handed over for it is acknowledged: a reset overtakes data, and
    what was sent before it is good."""


@dataclass(frozen=True, slots=True)
class StopSending:
    """Ask the peer to give up on a stream it is sending."""

    stream_id: StreamId
    code: StreamErrorCode


@hot_value()
class ReleaseCredit:
    """Received octets are done with: the stream's and the connection's windows may move on."""

    stream_id: StreamId
    octets: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close the connection. Always the last command."""

    code: SessionErrorCode | int
    reason: str


Command = SendStreamData | ResetStream | StopSending | ReleaseCredit | CloseSession
