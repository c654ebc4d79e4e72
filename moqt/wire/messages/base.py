"""What every control message has."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from moqt.codepoints import MessageType
from moqt.wire.reader import Reader
from moqt.wire.writer import Writer

#: The request whose stream a message travels on; None on a control stream, or where no request
#: has been seen yet.
Context = MessageType | None


class Message(ABC):
    """One control message: a value that can put its body down and take it up again.

    A body is without Type and Length, which are the same for all (:mod:`moqt.wire.framing`).
    ``decode_body`` leaves octets it has no use for in the reader; framing sees them.
    """

    __slots__ = ()

    type: ClassVar[MessageType]

    @abstractmethod
    def encode_body(self, w: Writer) -> None:
        """Put the fields in wire order.

        Raises:
            UsageError: If a value has no form on the wire, or the rules forbid it.
        """

    @classmethod
    @abstractmethod
    def decode_body(cls, r: Reader) -> Self:
        """Take the fields in wire order.

        Raises:
            ProtocolError: If the body breaks a rule of its chapter of the draft.
        """
