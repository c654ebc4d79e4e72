"""What subgroup and fetch streams share: a header, so many octets of payload, and again.

An Object is tens of kibibytes and arrives in packet-sized pieces, so ``feed`` is called some
thirty times per Object. Three rules keep that cheap:

* While a payload is under way, a piece costs one subtraction and one append: nothing is parsed.
* Pieces are kept as they arrived and joined once. A payload that arrived in one piece is cut out
  of it, or is that piece.
* A header that is cut is looked at again only when enough is here for another look to succeed.
"""

from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from moqt.errors import ObjectTooLarge, ProtocolError
from moqt.values import hot_value
from moqt.wire.pairs import Properties, decode_object_properties
from moqt.wire.varint import decode_vi64

T = TypeVar("T")

#: Longest header without Properties: at most five vi64 and a priority.
_HEADER_OCTETS: Final = 64
#: Pieces smaller than this are gathered in one buffer, lest each costs more than it holds.
_SMALL_OCTETS: Final = 256


@hot_value()
class Begun(Generic[T]):
    """An Object whose header is all here, and whose payload follows in pieces."""

    item: T
    """The Object, or a marker, without payload."""

    length: int
    """Octets of payload that follow; 0: it is whole."""


#: What comes of a stream that is taken in pieces.
Piece = bytes | memoryview


class ObjectReader(ABC, Generic[T]):
    """Turns the octets of one data stream into whole Objects, however they were chunked.

    Subclasses read one header: :meth:`_read_header` leaves the length of the payload in
    ``_length``, or None if what it read is no item of the stream, and :meth:`_item` makes the
    item once its payload is whole.

    Any error leaves the reader useless: drop it with its stream.
    """

    __slots__ = ("_head", "_length", "_max_object_octets", "_missing", "_need", "_pieces")

    def __init__(self, max_object_octets: int) -> None:
        self._max_object_octets = max_object_octets
        #: A header that is not all here, from its first octet.
        self._head = bytearray()
        #: Octets of the header under way that must be here before another look can succeed.
        self._need = 0
        #: Octets of payload announced by the last header.
        self._length: int | None = None
        #: Octets of payload still to come; 0 between Objects.
        self._missing = 0
        self._pieces: list[bytes | bytearray | memoryview] = []

    def feed(self, data: bytes) -> list[T]:
        """Add octets as they come; return what they completed, in order.

        Args:
            data: Kept, not copied, until the Object it belongs to is whole.

        Raises:
            ProtocolError: If the stream breaks a rule. The session closes.
            ObjectTooLarge: If an Object announces more than ``max_object_octets`` of Properties
                and payload. Nothing of it was kept; what ``data`` completed before it is in
                the exception's ``completed``.
        """
        missing = self._missing - len(data)
        if missing > 0:
            self._missing = missing
            if len(data) >= _SMALL_OCTETS:
                self._pieces.append(data)
            elif isinstance(last := self._pieces[-1] if self._pieces else None, bytearray):
                last += data
            else:
                self._pieces.append(bytearray(data))
            return []
        return self._advance(data)

    def feed_in_pieces(self, data: bytes) -> list[Begun[T] | Piece]:
        """Add octets as they come; return what they hold of Objects, whole or not.

        Each Object is a :class:`Begun` and then its payload, as many pieces as it came in, which
        are views of ``data``: nothing is kept but a header that is cut. For whoever passes an
        Object on before it is whole. Not to be mixed with :meth:`feed` on one stream.

        Raises:
            ProtocolError: As :meth:`feed`.
            ObjectTooLarge: As :meth:`feed`; ``completed`` is what went before.
        """
        missing = self._missing
        if missing and len(data) <= missing:
            self._missing = missing - len(data)
            return [data] if data else []
        found: list[Begun[T] | Piece] = []
        at = missing
        if missing:
            found.append(memoryview(data)[:at])
            self._missing = 0
        try:
            while at < len(data):
                end = self._resume(data, at) if self._head else self._read_header(data, at)
                if end is None:
                    if not self._head:
                        self._head += data[at:]
                    break
                self._need, at = 0, end
                if self._length is None:
                    continue
                found.append(Begun(self._item(b""), self._length))
                at = min(end + self._length, len(data))
                self._missing = end + self._length - at
                if at > end:
                    found.append(memoryview(data)[end:at])
        except ObjectTooLarge as exc:
            exc.completed = found
            raise
        return found

    def finish(self) -> None:
        """Take note that the stream ended with FIN.

        Raises:
            ProtocolError: If it ended inside an Object or a header.
        """
        if self._missing:
            raise ProtocolError(f"stream ended {self._missing} octets before the end of an Object")
        if self._head:
            raise ProtocolError("stream ended inside a header")

    @property
    def buffered(self) -> int:
        """Octets held for an Object that is not whole."""
        return len(self._head) + ((self._length or 0) - self._missing if self._missing else 0)

    @property
    def header_held(self) -> int:
        """Octets held of a header that is cut; of a stream taken in pieces nothing else is."""
        return len(self._head)

    @abstractmethod
    def _read_header(self, data: bytes | bytearray, offset: int) -> int | None:
        """Read the header at ``offset`` and return the offset after it; None if it is cut."""

    @abstractmethod
    def _item(self, payload: bytes) -> T:
        """Return what the last header announced, now that its payload is whole."""

    def _advance(self, data: bytes) -> list[T]:
        """Complete the payload under way, then go through whatever follows it."""
        items: list[T] = []
        at = 0
        if self._missing:
            at = self._missing
            # A view, so that the join below stays the only copy.
            self._pieces.append(memoryview(data)[:at])
            self._missing = 0
            pieces, self._pieces = self._pieces, []
            whole = len(pieces) == 1 and at == len(data)
            items.append(self._item(data if whole else b"".join(pieces)))
        try:
            self._go_through(data, at, items)
        except ObjectTooLarge as exc:
            exc.completed = items
            raise
        return items

    def _go_through(self, data: bytes, at: int, items: list[T]) -> None:
        """Take headers and payloads from ``at`` on; add what is whole to ``items``."""
        while at < len(data):
            end = self._resume(data, at) if self._head else self._read_header(data, at)
            if end is None:
                if not self._head:
                    self._head += data[at:]
                return
            self._need = 0
            if self._length is None:
                at = end
                continue
            at = end + self._length
            if at <= len(data):
                items.append(self._item(data[end:at]))
            else:
                self._missing = at - len(data)
                if end < len(data):
                    self._pieces.append(memoryview(data)[end:])

    def _resume(self, data: bytes, at: int) -> int | None:
        """Go on with a header whose front is in ``_head``; return where in ``data`` it ends."""
        head = self._head
        while at < len(data):
            held = len(head)
            taken = data[at : at + max(_HEADER_OCTETS, self._need - held)]
            head += taken
            if len(head) >= self._need and (end := self._read_header(head, 0)) is not None:
                head.clear()
                return at + end - held
            at += len(taken)
        return None

    def _read_properties(
        self, data: bytes | bytearray, start: int, at: int
    ) -> tuple[Properties, int, int] | None:
        """Read Object Properties behind their length, in a header that begins at ``start``.

        Returns:
            The Properties, their octets, and the offset after them; None if they are cut.
        """
        if (got := decode_vi64(data, at)) is None:
            return None
        length, at = got
        self._check_size(length)
        end = at + length
        if end > len(data):
            self._need = end - start
            return None
        return decode_object_properties(bytes(data[at:end])), length, end

    def _check_size(self, octets: int) -> None:
        if octets > self._max_object_octets:
            raise ObjectTooLarge(f"Object of {octets} octets, limit {self._max_object_octets}")
