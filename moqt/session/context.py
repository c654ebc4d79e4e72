"""What the parts of one session share: its outbox, its timers, its settings, its tables.

The parts know each other only through this; :mod:`moqt.session.core` puts them together.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from moqt.authority import Authority
from moqt.codepoints import StreamErrorCode
from moqt.session.commands import (
    Command,
    ReleaseCredit,
    ResetStream,
    SendStreamData,
    StopSending,
    StreamId,
)
from moqt.session.config import Role, SessionConfig
from moqt.session.events import Event, PeerLimited, RequestId
from moqt.session.guard import Guard
from moqt.session.guests import Guests, Visit
from moqt.session.pace import Pace
from moqt.session.sendqueue import OpenStreams
from moqt.session.streams import StreamIds
from moqt.session.tokens import TokenCache, Wallet
from moqt.wire.framing import encode_message
from moqt.wire.messages.base import Message
from moqt.wire.messages.setup import Setup

#: Key of the timer that has the authority asked again.
GUARD_TIMER = "guard"


class Timers:
    """Deadlines by key. Started relative, and made absolute the next time it is told the time.

    A verb of the application does not know the time; the drain that follows it does.
    """

    def __init__(self) -> None:
        self._fresh: dict[Hashable, float] = {}
        self._due: dict[Hashable, float] = {}

    def start(self, key: Hashable, seconds: float) -> None:
        """Start, or start again, the timer of ``key``."""
        self._due.pop(key, None)
        self._fresh[key] = seconds

    def stop(self, key: Hashable) -> None:
        """Forget the timer of ``key``, if there is one."""
        self._due.pop(key, None)
        self._fresh.pop(key, None)

    def fix(self, now: float) -> None:
        """Say what time it is for what was started since the last time."""
        for key, seconds in self._fresh.items():
            self._due[key] = now + seconds
        self._fresh.clear()

    def expired(self, now: float) -> list[Hashable]:
        """Return, and forget, what is due at ``now``."""
        self.fix(now)
        due = [key for key, at in self._due.items() if at <= now]
        for key in due:
            del self._due[key]
        return due

    def next_deadline(self) -> float | None:
        """Return when to ask :meth:`expired` again; None when nothing is running."""
        return min(self._due.values(), default=None)


def _no_clock() -> float:
    return 0.0


@dataclass(slots=True)
class Context:
    """Shared by the parts of one session."""

    role: Role
    config: SessionConfig
    stream_ids: StreamIds
    timers: Timers = field(default_factory=Timers)
    commands: list[Command] = field(default_factory=list)
    released: dict[StreamId, int] = field(default_factory=dict)
    """Octets by which the receive windows may move on, not told to the transport yet."""

    events: list[Event] = field(default_factory=list)
    peer_setup: Setup | None = None
    """The peer's SETUP, once it has come."""

    tokens: TokenCache = field(init=False)
    """Tokens that the peer registered."""

    open_streams: OpenStreams = field(init=False)
    """The data streams that we send on."""

    pace: Pace = field(init=False)
    """How fast the peer asks."""

    now: float = 0.0
    """The time, as it was told last."""

    ended: list[RequestId] = field(default_factory=list)
    """Requests that are over, for the session to forget."""

    authority: Authority | None = None
    """Says what the peer may do; None: everything."""

    wall_clock: Callable[[], float] = _no_clock
    """Seconds since the epoch, for the authority; not for timers."""

    guard: Guard = field(init=False)
    """Asks the authority, and remembers what goes on by its leave."""

    wallet: Wallet = field(default_factory=Wallet)
    """Tokens that we have shown, and what the peer keeps of them."""

    guests: Guests | None = None
    """Counts what each peer has of this endpoint, over all sessions."""

    visit: Visit = field(init=False)
    """What this session has of it."""

    wake: Callable[[], None] | None = None
    """Tells the shell that a shared Track has something to send, without a word from the wire."""

    def __post_init__(self) -> None:
        self.tokens = TokenCache(self.config.max_auth_token_cache_octets)
        self.open_streams = OpenStreams(self.config.max_data_streams)
        self.pace = Pace(self.config.max_requests_per_s)
        self.visit = Visit(self.guests)
        self.guard = Guard(
            self.authority,
            self.wall_clock,
            lambda seconds: self.timers.start(GUARD_TIMER, seconds),
            self.emit,
        )

    def emit(self, event: Event) -> None:
        """Tell the application."""
        self.events.append(event)

    def limited(self, reason: str) -> None:
        """Tell the application that the peer passed a limit."""
        self.emit(PeerLimited(who=self.guard.whose(), reason=reason))

    def send(self, stream_id: StreamId, message: Message, *, fin: bool = False) -> None:
        """Send one control message at once."""
        self.commands.append(SendStreamData(stream_id, encode_message(message), fin))

    def finish(self, stream_id: StreamId) -> None:
        """Close our direction of a stream: no more messages from us."""
        self.commands.append(SendStreamData(stream_id, b"", fin=True))

    def reset(
        self, stream_id: StreamId, code: StreamErrorCode | int, *, after_delivery: bool = False
    ) -> None:
        """Give up on our direction of a stream, at once or once what was sent has arrived."""
        self.commands.append(ResetStream(stream_id, code, after_delivery))

    def stop(self, stream_id: StreamId, code: StreamErrorCode) -> None:
        """Ask the peer to give up on its direction of a stream."""
        self.commands.append(StopSending(stream_id, code))

    def release(self, stream_id: StreamId, octets: int) -> None:
        """Let the receive windows move on by ``octets``."""
        if octets:
            self.released[stream_id] = self.released.get(stream_id, 0) + octets

    def take_commands(self) -> list[Command]:
        """Return, and forget, what the transport must do: windows first, once for each stream."""
        commands, self.commands = self.commands, []
        if self.released:
            released, self.released = self.released, {}
            commands[:0] = [ReleaseCredit(*each) for each in released.items()]
        return commands
