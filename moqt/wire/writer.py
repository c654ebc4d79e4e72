"""The mirror image of :class:`~moqt.wire.reader.Reader`: puts fields down in wire order."""

from moqt.codepoints import MessageType
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.reader import MAX_REASON_OCTETS
from moqt.wire.varint import encode_vi64


class Writer:
    """Collects the octets of one body.

    Every method raises :exc:`~moqt.errors.UsageError` for a value that has no form on the wire.

    Args:
        context: The request whose stream the body goes out on; None if that is not known, and
            then what depends on it is not checked.
    """

    __slots__ = ("_data", "context")

    def __init__(self, context: MessageType | None = None) -> None:
        self._data = bytearray()
        self.context = context

    def getvalue(self) -> bytes:
        """Return all that has been put down."""
        return bytes(self._data)

    def vi64(self, value: int) -> None:
        """Put one variable-length integer, in its shortest form."""
        self._data += encode_vi64(value)

    def uint8(self, value: int) -> None:
        """Put one octet."""
        if not 0 <= value <= 0xFF:
            raise UsageError(f"{value} does not fit one octet")
        self._data.append(value)

    def octets(self, data: bytes) -> None:
        """Put octets as they are."""
        self._data += data

    def prefixed(self, data: bytes) -> None:
        """Put the length of ``data``, then ``data``."""
        self._data += encode_vi64(len(data))
        self._data += data

    def text(self, text: str, limit: int | None = None) -> None:
        """Put text as UTF-8 behind its length, which must not exceed ``limit`` octets."""
        data = text.encode(errors="replace")
        if limit is not None and len(data) > limit:
            raise UsageError(f"text of {len(data)} octets, limit {limit}")
        self.prefixed(data)

    def reason_phrase(self, text: str) -> None:
        """Put a Reason Phrase (MOQT, "Reason Phrase Structure")."""
        self.text(text, MAX_REASON_OCTETS)

    def location(self, location: Location) -> None:
        """Put a Location: Group ID, Object ID."""
        group, object_ = location
        self.vi64(group)
        self.vi64(object_)

    def track_namespace(self, namespace: TrackNamespace) -> None:
        """Put a Track Namespace, or a prefix or suffix (MOQT, "Track Namespace Structure")."""
        self.vi64(len(namespace.fields))
        for field in namespace.fields:
            self.prefixed(field)

    def full_track_name(self, track: FullTrackName) -> None:
        """Put a Track Namespace and a Track Name."""
        self.track_namespace(track.namespace)
        self.prefixed(track.name)
