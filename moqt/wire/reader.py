"""A cursor over one complete body. Running out of octets here is the peer's mistake."""

from typing import Final

from moqt.codepoints import MessageType
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.names import MAX_FIELDS, FullTrackName, TrackNamespace
from moqt.wire.varint import decode_vi64

#: Octets of a Reason Phrase (MOQT, "Reason Phrase Structure").
MAX_REASON_OCTETS: Final = 1024


class Reader:
    """Takes fields from the front of a body, in wire order.

    Every method raises :exc:`~moqt.errors.ProtocolError` when the body ends too early.

    Args:
        data: The whole body.
        context: The request whose stream the body came on; None on a control stream. Messages
            that answer or change a request differ by it.
    """

    __slots__ = ("_at", "_data", "context")

    def __init__(self, data: bytes, context: MessageType | None = None) -> None:
        self._data = data
        self._at = 0
        self.context = context

    @property
    def remaining(self) -> int:
        """Octets not taken yet."""
        return len(self._data) - self._at

    def vi64(self) -> int:
        """Take one variable-length integer."""
        if (got := decode_vi64(self._data, self._at)) is None:
            raise ProtocolError(f"an integer is cut short by the end of its body at {self._at}")
        value, self._at = got
        return value

    def uint8(self) -> int:
        """Take one octet as a number; not a vi64."""
        return self.octets(1)[0]

    def octets(self, count: int) -> bytes:
        """Take ``count`` octets."""
        if count > self.remaining:
            raise ProtocolError(f"{count} octets announced, {self.remaining} left in the body")
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def rest(self) -> bytes:
        """Take everything that is left."""
        return self.octets(self.remaining)

    def prefixed(self, limit: int | None = None) -> bytes:
        """Take a Length and so many octets; a Length above ``limit`` is a violation."""
        length = self.vi64()
        if limit is not None and length > limit:
            raise ProtocolError(f"field of {length} octets, limit {limit}")
        return self.octets(length)

    def text(self, limit: int | None = None) -> str:
        """Take a Length and so many octets of UTF-8. What is not UTF-8 becomes U+FFFD."""
        return self.prefixed(limit).decode(errors="replace")

    def reason_phrase(self) -> str:
        """Take a Reason Phrase (MOQT, "Reason Phrase Structure")."""
        return self.text(MAX_REASON_OCTETS)

    def location(self) -> Location:
        """Take a Location: Group ID, Object ID."""
        return Location(self.vi64(), self.vi64())

    def track_namespace(self) -> TrackNamespace:
        """Take a Track Namespace, or a prefix or suffix (MOQT, "Track Namespace Structure")."""
        count = self.vi64()
        if count > MAX_FIELDS:
            raise ProtocolError(f"namespace of {count} fields, limit {MAX_FIELDS}")
        try:
            return TrackNamespace(tuple([self.prefixed() for _ in range(count)]))
        except UsageError as exc:
            raise ProtocolError(str(exc)) from None

    def full_track_name(self) -> FullTrackName:
        """Take a Track Namespace and a Track Name."""
        namespace, name = self.track_namespace(), self.prefixed()
        try:
            return FullTrackName(namespace, name)
        except UsageError as exc:
            raise ProtocolError(str(exc)) from None

    def expect_end(self) -> None:
        """Raise unless everything has been taken."""
        if self.remaining:
            raise ProtocolError(f"{self.remaining} octets after the last field")
