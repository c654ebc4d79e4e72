"""Type, Length, Body: the one door from code points to message classes."""

from collections.abc import Iterator, Mapping
from typing import Final

from moqt.codepoints import MessageType
from moqt.errors import ProtocolError, UsageError
from moqt.wire.messages.base import Context, Message
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.namespace import (
    Namespace,
    NamespaceDone,
    PublishNamespace,
    PublishSkipped,
    SubscribeNamespace,
    SubscribeTracks,
)
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import (
    PublishDone,
    PublishStateNotify,
    Subscribe,
    SubscribeOk,
    TrackStatus,
)
from moqt.wire.reader import Reader
from moqt.wire.varint import decode_vi64, encode_vi64
from moqt.wire.writer import Writer

#: Octets of a body; its Length has 16 bits.
MAX_BODY_OCTETS: Final = 0xFFFF

#: The one place where a code point becomes a class.
MESSAGES: Final[Mapping[int, type[Message]]] = {
    cls.type: cls
    for cls in (
        Setup,
        Goaway,
        RequestOk,
        RequestError,
        RequestUpdate,
        Subscribe,
        SubscribeOk,
        Publish,
        PublishDone,
        PublishStateNotify,
        Fetch,
        FetchOk,
        TrackStatus,
        PublishNamespace,
        SubscribeNamespace,
        Namespace,
        NamespaceDone,
        SubscribeTracks,
        PublishSkipped,
    )
}

#: Messages that may come first on a request stream.
REQUESTS: Final = frozenset(
    {
        MessageType.SUBSCRIBE,
        MessageType.PUBLISH,
        MessageType.FETCH,
        MessageType.TRACK_STATUS,
        MessageType.PUBLISH_NAMESPACE,
        MessageType.SUBSCRIBE_NAMESPACE,
        MessageType.SUBSCRIBE_TRACKS,
    }
)


def encode_message(message: Message, context: Context = None) -> bytes:
    """Frame one control message: Type (vi64), Length (16 bits), Body.

    Args:
        message: What to send.
        context: The request whose stream it goes out on. None leaves unchecked what depends on
            it: the parameters of REQUEST_OK and REQUEST_UPDATE, and the name in a redirect.

    Raises:
        UsageError: If a value has no form on the wire, or the rules forbid it.
    """
    w = Writer(context)
    message.encode_body(w)
    body = w.getvalue()
    if len(body) > MAX_BODY_OCTETS:
        raise UsageError(f"{message.type.name} of {len(body)} octets, limit {MAX_BODY_OCTETS}")
    return encode_vi64(message.type) + len(body).to_bytes(2, "big") + body


class MessageBuffer:
    """Cut a control or request stream into messages, however it was chunked.

    Drain it with :meth:`messages` after every :meth:`feed`; what then stays is at most one
    message that is not all here, so less than 64 KiB.
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def pending(self) -> int:
        """Octets of a message that is not all here."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Add octets as they come; those of the stream type of a control stream too."""
        self._data += data

    def messages(self, context: Context = None) -> Iterator[Message]:
        """Yield complete messages. A partial one stays buffered: that is not an error.

        Args:
            context: The request whose stream this is. None on a control stream, and on a request
                stream whose request is yet to come: once that is yielded, what follows it in
                this call is read in its context.

        Raises:
            ProtocolError: If a message has an unknown type, is not as long as it says, or breaks
                a rule of its own. The buffer is of no use afterwards.
        """
        while (header := decode_vi64(self._data)) is not None:
            number, start = header
            if (cls := MESSAGES.get(number)) is None:
                raise ProtocolError(f"unknown message type {number:#x}")
            end = start + 2 + int.from_bytes(self._data[start : start + 2], "big")
            if len(self._data) < max(start + 2, end):
                return
            body = Reader(bytes(self._data[start + 2 : end]), context)
            del self._data[:end]
            message = cls.decode_body(body)
            body.expect_end()
            if context is None and message.type in REQUESTS:
                context = message.type
            yield message

    def finish(self) -> None:
        """Take note that the stream ended.

        Raises:
            ProtocolError: If it ended inside a message.
        """
        if self._data:
            raise ProtocolError(f"stream ended {len(self._data)} octets into a message")
