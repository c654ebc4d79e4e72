"""One session whose peer is a script: octets of any kind go in, commands and events come out."""

from collections.abc import Mapping
from typing import Any

from moqt.authority import Authority
from moqt.codepoints import MessageType, RequestErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import UsageError
from moqt.names import FullTrackName
from moqt.session.commands import CloseSession, Command, SendStreamData, StreamId
from moqt.session.config import Role, SessionConfig
from moqt.session.core import Session
from moqt.session.events import Event, RequestId, SubscribeReceived
from moqt.session.guests import Guests
from moqt.wire.framing import MessageBuffer, encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.request import RequestError
from moqt.wire.messages.setup import Setup
from moqt.wire.messages.subscribe import Subscribe, SubscribeOk
from moqt.wire.parameters import Parameters

UNKNOWN = FullTrackName.of("nobody", "has this")
NAME = FullTrackName.of("kvcs-1", "scope", "k.raw.s0")


class Lone:
    """A session under test, and the peer's stream IDs."""

    def __init__(
        self,
        role: Role = Role.SERVER,
        *,
        config: SessionConfig | None = None,
        established: bool = True,
        peer_setup: Setup | None = None,
        guests: Guests | None = None,
        authority: Authority | None = None,
        address: str = "",
    ) -> None:
        self.role = role
        self.session = Session(role, config or SessionConfig(), guests=guests, authority=authority)
        self.session.start(address=address)
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.now = 0.0
        peer_is_client = role is Role.SERVER
        self.control = StreamId(2 if peer_is_client else 3)
        self._uni = self.control
        self._bidi = StreamId((0 if peer_is_client else 1) - 4)
        self._request_id = (0 if peer_is_client else 1) - 2
        self.drain()
        self.commands.clear()
        if established:
            setup = peer_setup or Setup.of(max_filter_ranges=16, max_request_updates=4)
            self.data(self.control, encode_message(setup))
            self.commands.clear()
            self.events.clear()

    # -- IDs of the peer -------------------------------------------------------------------------

    def uni(self) -> StreamId:
        """Return a fresh unidirectional stream of the peer."""
        self._uni = StreamId(self._uni + 4)
        return self._uni

    def bidi(self) -> StreamId:
        """Return a fresh bidirectional stream of the peer."""
        self._bidi = StreamId(self._bidi + 4)
        return self._bidi

    def request_id(self) -> int:
        """Return a fresh Request ID of the peer."""
        self._request_id += 2
        return self._request_id

    # -- what the peer does ----------------------------------------------------------------------

    def data(self, stream_id: int, data: bytes, *, fin: bool = False) -> None:
        """Octets arrive on a stream."""
        self.session.receive_stream_data(StreamId(stream_id), data, fin=fin)
        self.drain()

    def reset(self, stream_id: int, code: int = 0) -> None:
        """A reset arrives."""
        self.session.receive_reset(StreamId(stream_id), code)
        self.drain()

    def stop(self, stream_id: int, code: int = 0) -> None:
        """A STOP_SENDING arrives."""
        self.session.receive_stop_sending(StreamId(stream_id), code)
        self.drain()

    def say(self, stream_id: int, *messages: Message, fin: bool = False) -> None:
        """Messages arrive on a stream."""
        self.data(stream_id, b"".join(map(encode_message, messages)), fin=fin)

    def ask(self, *more: Message, parameters: Mapping[P, Any] | None = None) -> StreamId:
        """Send a SUBSCRIBE, and perhaps more, on a stream of its own; return the stream."""
        stream_id = self.bidi()
        request = Subscribe(self.request_id(), NAME, Parameters(parameters or {}))
        self.say(stream_id, request, *more)
        return stream_id

    def subscribed(self, alias: int = 7, **options: Any) -> tuple[RequestId, StreamId]:
        """Have the session subscribe and accept it; return Request ID and stream."""
        request_id = self.session.subscribe(NAME, **options)
        self.drain()
        stream_id = self.last_stream()
        self.say(stream_id, SubscribeOk(alias))
        return request_id, stream_id

    def drain(self) -> None:
        self.session.handle_timer(self.now)
        self.commands += self.session.data_to_send()
        self.events += self.session.events()

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.drain()

    # -- what came of it -------------------------------------------------------------------------

    def last_stream(self) -> StreamId:
        """Return the stream that the session wrote to last."""
        return [c for c in self.commands if isinstance(c, SendStreamData)][-1].stream_id

    def sent(self, stream_id: int) -> bytes:
        """Return what the session wrote to a stream."""
        return b"".join(
            bytes(c.data)
            for c in self.commands
            if isinstance(c, SendStreamData) and c.stream_id == stream_id
        )

    def messages(self, stream_id: int, kind: MessageType | None = None) -> list[Message]:
        """Return the messages that the session sent on a request stream, of a request ``kind``."""
        buffer = MessageBuffer()
        buffer.feed(self.sent(stream_id))
        return list(buffer.messages(kind))

    @property
    def close(self) -> CloseSession | None:
        """Why the session closed, if it did."""
        return next((c for c in self.commands if isinstance(c, CloseSession)), None)

    def seen(self, kind: type[Event]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def assert_alive(self) -> None:
        """Check that the session still serves: an unknown Track is refused DOES_NOT_EXIST."""
        assert self.close is None, self.close
        stream_id = self.bidi()
        self.events.clear()
        self.say(stream_id, Subscribe(self.request_id(), UNKNOWN))
        [asked] = self.seen(SubscribeReceived)
        self.session.reject(asked.request_id, RequestErrorCode.DOES_NOT_EXIST)
        self.drain()
        [answer] = self.messages(stream_id, MessageType.SUBSCRIBE)
        assert isinstance(answer, RequestError)
        assert answer.error_code == RequestErrorCode.DOES_NOT_EXIST
        try:
            self.session.track_status(UNKNOWN)
        except UsageError as exc:
            raise AssertionError(f"the session asks no more: {exc}") from None
