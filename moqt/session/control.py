"""The pair of control streams: SETUP first, GOAWAY, nothing else, and never closed.

(MOQT, "Session initialization", "SETUP", "GOAWAY".)
"""

from moqt.codepoints import TokenAliasType
from moqt.errors import (
    InvalidAuthority,
    InvalidPath,
    ProtocolError,
    SetupRefused,
    TooManySessions,
    UnknownAuthTokenAlias,
)
from moqt.session.commands import StreamId
from moqt.session.config import Role
from moqt.session.context import Context
from moqt.session.events import GoawayReceived, SessionEstablished
from moqt.session.guard import SESSION_CODES
from moqt.session.tokens import UnknownTokenAlias
from moqt.wire.framing import MessageBuffer
from moqt.wire.messages.base import Message
from moqt.wire.messages.setup import Goaway, Setup

#: Key of the timer that waits for the peer's SETUP, and of the one that follows our GOAWAY.
SETUP_TIMER = "setup"
GOAWAY_TIMER = "goaway"
#: Of the one after which a session whose right has ended is closed.
FAREWELL_TIMER = "farewell"


class ControlStreams:
    """Ours and the peer's."""

    def __init__(self, context: Context) -> None:
        self.goaway_sent = False
        self.goaway_received = False
        self._context = context
        self._own: StreamId | None = None
        self._peer: StreamId | None = None
        self._buffer = MessageBuffer()

    def open(self) -> None:
        """Open our control stream and send SETUP; the peer's is not waited for."""
        context, config = self._context, self._context.config
        self._own = context.stream_ids.uni()
        is_client = context.role is Role.CLIENT
        context.send(
            self._own,
            Setup.of(
                path=config.path if is_client and config.authority else None,
                authority=config.authority or None if is_client else None,
                implementation=config.implementation or None,
                max_filter_ranges=config.max_filter_ranges,
                max_request_updates=config.max_request_updates,
                max_auth_token_cache_size=config.max_auth_token_cache_octets,
                tokens=tuple(config.tokens()),
            ),
        )
        context.timers.start(SETUP_TIMER, config.setup_timeout_s)

    def goaway(self, new_session_uri: str, timeout_ms: int) -> None:
        """Ask the peer to leave. The second call does nothing."""
        if not self.goaway_sent and self._own is not None:
            self._context.send(self._own, Goaway(new_session_uri, timeout_ms))
            self.goaway_sent = True
            if timeout_ms:
                self._context.timers.start(GOAWAY_TIMER, timeout_ms / 1000)

    def is_peer_stream(self, stream_id: StreamId) -> bool:
        """Whether ``stream_id`` is the peer's control stream."""
        return stream_id == self._peer

    def is_own_stream(self, stream_id: StreamId) -> bool:
        """Whether ``stream_id`` is our control stream."""
        return stream_id == self._own

    def receive(self, stream_id: StreamId, data: bytes, fin: bool) -> bool:
        """Take octets of the peer's control stream; return whether SETUP came with them."""
        if self._peer is None:
            self._peer = stream_id
        elif self._peer != stream_id:
            raise ProtocolError("second control stream")
        was_up = self._context.peer_setup is not None
        self._buffer.feed(data)
        for message in self._buffer.messages():
            self._message_received(message)
        if fin:
            # Closing it is forbidden while the session lives (MOQT, "Session initialization").
            raise ProtocolError("control stream closed")
        return not was_up and self._context.peer_setup is not None

    def _message_received(self, message: Message) -> None:
        if self._context.peer_setup is None:
            if not isinstance(message, Setup):
                raise ProtocolError(f"{message.type.name} ahead of SETUP")
            self._setup_received(message)
        elif isinstance(message, Goaway):
            self._goaway_received(message)
        else:
            raise ProtocolError(f"{message.type.name} on the control stream")

    def _setup_received(self, setup: Setup) -> None:
        context = self._context
        if context.role is Role.CLIENT:
            if setup.path is not None:
                raise InvalidPath("PATH from a server")
            if setup.authority is not None:
                raise InvalidAuthority("AUTHORITY from a server")
        elif any(
            token.alias_type in (TokenAliasType.DELETE, TokenAliasType.USE_ALIAS)
            for token in setup.tokens
        ):
            raise ProtocolError("a token alias is used in the client's SETUP")
        try:
            tokens = context.tokens.resolve(setup.tokens, in_setup=True)
        except UnknownTokenAlias as exc:
            raise UnknownAuthTokenAlias(str(exc)) from None
        context.wallet.peer_keeps(setup.max_auth_token_cache_size)
        # A server that was dialled proved by its certificate who it is.
        denied = context.guard.setup(tokens, asked=context.role is Role.SERVER)
        if denied is not None:
            raise SetupRefused(SESSION_CODES[denied.why])
        if not context.visit.enter(context.guard.whose()):
            raise TooManySessions("as many sessions as one peer may have")
        context.peer_setup = setup
        context.timers.stop(SETUP_TIMER)
        context.emit(SessionEstablished(peer_setup=setup))

    def _goaway_received(self, message: Goaway) -> None:
        if self.goaway_received:
            raise ProtocolError("second GOAWAY on a stream")
        if self._context.role is Role.SERVER and message.new_session_uri:
            raise ProtocolError("GOAWAY with a URI from a client")
        self.goaway_received = True
        self._context.emit(
            GoawayReceived(
                request_id=None,
                new_session_uri=message.new_session_uri,
                timeout_ms=message.timeout_ms,
            )
        )
