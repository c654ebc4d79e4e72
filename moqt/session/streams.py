"""The stream IDs we open, and what a stream ID says of a stream (RFC 9000 Section 2.1)."""

from moqt.session.commands import StreamId
from moqt.session.config import Role


def is_unidirectional(stream_id: StreamId) -> bool:
    """Whether only its opener sends on the stream."""
    return bool(stream_id & 2)


def is_opened_by(stream_id: StreamId, role: Role) -> bool:
    """Whether ``role`` opened the stream."""
    return (stream_id & 1 == 0) == (role is Role.CLIENT)


class StreamIds:
    """Hands out the IDs of the streams that we open, in order. Nobody else does."""

    def __init__(self, role: Role) -> None:
        low = 0 if role is Role.CLIENT else 1
        self._bidi = low
        self._uni = low | 2

    def bidi(self) -> StreamId:
        """Open a bidirectional stream."""
        self._bidi += 4
        return StreamId(self._bidi - 4)

    def uni(self) -> StreamId:
        """Open a unidirectional stream."""
        self._uni += 4
        return StreamId(self._uni - 4)

    def next_uni(self) -> StreamId:
        """Return the ID that :meth:`uni` would hand out."""
        return StreamId(self._uni)
