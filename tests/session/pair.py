"""Two sessions back to back: the whole protocol without a network and without a clock.

The wire between them carries what QUIC carries, stream by stream: octets in pieces of any size,
FIN, resets, STOP_SENDING (which a transport answers with a reset by itself) and credit. Streams
can be held back, so that one overtakes another; time moves only when a test says so.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moqt.authority import Authority
from moqt.codepoints import GroupOrder, RequestErrorCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import (
    CloseSession,
    Command,
    ReleaseCredit,
    ResetStream,
    SendStreamData,
    StopSending,
    StreamId,
)
from moqt.session.config import Role, SessionConfig
from moqt.session.core import Session
from moqt.session.discovery import NamespaceDirectory
from moqt.session.events import (
    Event,
    FetchReceived,
    ObjectReceived,
    PublishNamespaceReceived,
    PublishReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from moqt.session.localtrack import LocalTrack
from moqt.session.streams import is_opened_by, is_unidirectional

T = TypeVar("T")
NAME = FullTrackName.of("kvcs-1", "scope", "k.raw.s0")
UNLIMITED = 1 << 62
Where = tuple["End", StreamId]


@dataclass
class Direction:
    """One direction of one stream, from its sender to its receiver."""

    waiting: deque[bytes] = field(default_factory=deque)
    fin: bool = False
    reset: int | None = None
    handed_over: int = 0
    arrived: int = 0
    released: int = 0
    told_fin: bool = False
    told_reset: bool = False

    @property
    def closed(self) -> bool:
        """Whether its sender can add nothing."""
        return self.fin or self.reset is not None

    @property
    def over(self) -> bool:
        """Whether its receiver knows that nothing will follow."""
        return self.told_fin or self.told_reset

    @property
    def has_news(self) -> bool:
        return not self.over and bool(self.waiting or self.fin or self.reset is not None)


class End:
    """One of the two sessions, with what a shell would keep for it."""

    def __init__(
        self,
        role: Role,
        config: SessionConfig,
        authority: Authority | None = None,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.session = Session(
            role, config, wake=self._woken, authority=authority, wall_clock=wall_clock
        )
        self.role = role
        self.config = config
        self.seen: list[Event] = []
        self.closed: CloseSession | None = None
        self.consumes = True
        """Whether Objects are taken as soon as they are told of."""

        self.tracks: dict[FullTrackName, LocalTrack] = {}
        self.directory = NamespaceDirectory()
        self.answers = True
        """Whether requests of the peer are answered from ``tracks`` and ``directory``."""

        self.on_event: Callable[[Event], None] = lambda event: None
        self.budget = UNLIMITED
        self.outgoing: dict[StreamId, Direction] = {}
        self.woken = False

    def publish(self, track: LocalTrack) -> LocalTrack:
        """Serve a Track."""
        self.tracks[track.name] = track
        return track

    def take(self, kind: type[T] | None = None) -> list[Any]:
        """Return, and forget, the events seen; with ``kind`` only those, and keep the rest."""
        wanted = [e for e in self.seen if kind is None or isinstance(e, kind)]
        self.seen = [e for e in self.seen if kind is not None and not isinstance(e, kind)]
        return wanted

    def one(self, kind: type[T]) -> T:
        """Return the only event of a kind, and forget it."""
        [event] = self.take(kind)
        return event  # type: ignore[no-any-return]

    def _woken(self) -> None:
        self.woken = True

    def handle(self, event: Event) -> None:
        self.seen.append(event)
        if isinstance(event, ObjectReceived) and self.consumes:
            self.session.consumed(event)
        if self.answers:
            self._answer(event)
        self.on_event(event)

    def _answer(self, event: Event) -> None:
        session = self.session
        match event:
            case SubscribeReceived() | FetchReceived() | TrackStatusReceived():
                track = self.tracks.get(event.track)
                if track is None:
                    session.reject(event.request_id, RequestErrorCode.DOES_NOT_EXIST, "unknown")
                elif isinstance(event, SubscribeReceived):
                    session.accept_subscribe(event.request_id, track)
                elif isinstance(event, FetchReceived):
                    session.accept_fetch(event.request_id, track)
                else:
                    session.accept_track_status(event.request_id, track)
            case SubscribeNamespaceReceived():
                session.accept_namespaces(event.request_id, self.directory)
            case PublishNamespaceReceived():
                session.accept_namespace(event.request_id)
            case PublishReceived():
                session.accept_publish(event.request_id)
            case SubscribeTracksReceived():
                session.accept_tracks(event.request_id)
                for track in self.tracks.values():
                    if session.wants_track(event.request_id, track):
                        with suppress(UsageError):  # we may be going away
                            session.publish(track, wanted_by=event.request_id)


class Credit:
    """What flow control would let one end send."""

    def __init__(self, pair: "Pair", sender: End) -> None:
        self._pair = pair
        self._sender = sender

    def stream(self, stream_id: StreamId) -> int:
        pair, outgoing = self._pair, self._sender.outgoing
        if stream_id in pair.frozen:
            return 0
        direction = outgoing.get(stream_id)
        if direction is None:
            opened = sum(is_unidirectional(s) and not d.over for s, d in outgoing.items())
            ahead = (stream_id - pair.next_uni(self._sender)) // 4
            if opened + ahead >= pair.max_streams:
                return 0
            return pair.stream_window
        return pair.stream_window + direction.released - direction.handed_over


class Pair:
    """A client and a server session with a wire between them.

    Args:
        client: Settings of the client's session.
        server: Settings of the server's session.
        chunk: Octets a piece has when it arrives, at most.
        rng: Chooses which stream arrives next and cuts pieces by chance; None: in order.
        stream_window: Octets that may be on the way or unread on one data stream.
        connection_window: The same over all data streams of one direction.
        max_streams: Unidirectional streams open at once, control streams included.
        start: Whether to exchange SETUPs at once.
        authority: What the server asks; the time of both is the wall clock.
    """

    def __init__(
        self,
        *,
        client: SessionConfig | None = None,
        server: SessionConfig | None = None,
        chunk: int = 1 << 20,
        rng: random.Random | None = None,
        stream_window: int = UNLIMITED,
        connection_window: int = UNLIMITED,
        max_streams: int = 128,
        start: bool = True,
        authority: Authority | None = None,
    ) -> None:
        self.client = End(
            Role.CLIENT, client or SessionConfig(authority="relay.example", path="/kv")
        )
        self.server = End(
            Role.SERVER, server or SessionConfig(), authority, wall_clock=lambda: self.now
        )
        self.chunk = chunk
        self.stream_window = stream_window
        self.connection_window = connection_window
        self.max_streams = max_streams
        self.now = 1000.0
        self.held: Callable[[End, StreamId], bool] = lambda sender, stream_id: False
        self.frozen: set[StreamId] = set()
        """Streams on which flow control lets nothing be sent."""

        self.log: list[tuple[End, Command]] = []
        """Every command, in order, but the release of credit."""

        self._rng = rng
        if start:
            self.client.session.start()
            self.server.session.start()
            self.settle()
            self.client.take()
            self.server.take()
            self.log.clear()

    @property
    def ends(self) -> tuple[End, End]:
        return self.client, self.server

    def peer(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def next_uni(self, end: End) -> StreamId:
        first = 2 if end.role is Role.CLIENT else 3
        own = [s for s in end.outgoing if is_unidirectional(s)]
        return StreamId(max(own, default=first - 4) + 4)

    # -- carrying --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry everything both ways until nobody has more to say."""
        for _ in range(1_000_000):
            moved = [self.drain(end) for end in self.ends]
            carried = self.deliver_one()
            if not any(moved) and not carried:
                return
        raise AssertionError("the sessions never come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, and settle."""
        self.now += seconds
        self.settle()

    def drain(self, end: End) -> bool:
        """Do once what a shell does after every call; return whether there was anything."""
        session = end.session
        end.woken = False
        session.handle_timer(self.now)
        credit = Credit(self, end)
        room = self.connection_window - sum(
            d.handed_over - d.released
            for s, d in end.outgoing.items()
            if is_unidirectional(s) and d.reset is None  # a reset gives its credit back
        )
        commands = 0
        for command in session.data_to_send(max(0, min(end.budget, room)), credit):
            commands += 1
            self._carry_out(end, command)
        events = session.events()
        for event in events:
            end.handle(event)
        return bool(commands or events)

    def deliver_one(self) -> bool:
        """Let one piece arrive somewhere; return whether there was any."""
        ready = [
            (end, stream_id)
            for end in self.ends
            for stream_id, direction in end.outgoing.items()
            if direction.has_news and not self.held(end, stream_id)
        ]
        if not ready:
            return False
        self._arrive(*(self._rng.choice(ready) if self._rng is not None else ready[0]))
        return True

    def stop(self, receiver: End, stream_id: StreamId, code: int = 1) -> None:
        """STOP_SENDING, as a transport carries it: the sender's transport answers with a reset."""
        sender = self.peer(receiver)
        direction = sender.outgoing.setdefault(stream_id, Direction())
        if direction.told_fin or direction.reset is not None:
            return
        direction.reset = code
        sender.session.receive_stop_sending(stream_id, code)

    def reset(self, sender: End, stream_id: StreamId, code: int = 0) -> None:
        """A reset that the session does not know of, as if its process had lost the stream."""
        sender.outgoing[stream_id].reset = code

    def _arrive(self, sender: End, stream_id: StreamId) -> None:
        direction = sender.outgoing[stream_id]
        receiver = self.peer(sender)
        if direction.reset is not None and (self._rng is None or self._rng.random() < 0.5):
            direction.waiting.clear()  # a reset takes with it what has not arrived
        if not direction.waiting and direction.reset is not None:
            direction.told_reset = True
            receiver.session.receive_reset(stream_id, direction.reset)
            return
        piece = b"".join(direction.waiting)
        size = self.chunk if self._rng is None else self._rng.randint(1, max(1, self.chunk))
        rest = piece[size:]
        direction.waiting = deque([rest] if rest else [])
        fin = direction.fin and not rest and direction.reset is None
        direction.told_fin = fin
        direction.arrived += len(piece) - len(rest)
        receiver.session.receive_stream_data(stream_id, piece[:size], fin=fin)

    def _carry_out(self, end: End, command: Command) -> None:
        if not isinstance(command, ReleaseCredit):
            self.log.append((end, command))
        match command:
            case SendStreamData(stream_id, data, fin):
                direction = end.outgoing.setdefault(stream_id, Direction())
                assert not direction.fin, f"data after FIN on stream {stream_id}"
                if direction.reset is None:  # a transport ignores what comes after a reset
                    if data:
                        direction.waiting.append(bytes(data))
                    direction.handed_over += len(data)
                    direction.fin = fin
            case ResetStream(stream_id, code):
                direction = end.outgoing.setdefault(stream_id, Direction())
                if not direction.over and direction.reset is None:
                    direction.reset = code
            case StopSending(stream_id, code):
                self.stop(end, stream_id, code)
            case ReleaseCredit(stream_id, octets):
                direction = self.peer(end).outgoing[stream_id]
                direction.released += octets
                assert direction.released <= direction.arrived, "more released than arrived"
            case CloseSession():
                end.closed = command
                self.peer(end).session.receive_connection_lost(
                    command.code, command.reason, by_peer=True
                )

    # -- what tests ask --------------------------------------------------------------------------

    def unreleased(self, receiver: End) -> int:
        """Octets that arrived and have not left the receive windows."""
        return sum(d.arrived - d.released for d in self.peer(receiver).outgoing.values())

    def data_streams(self, sender: End) -> list[StreamId]:
        """Return the unidirectional streams that an end opened, its control stream excepted."""
        control = 2 if sender.role is Role.CLIENT else 3
        return [s for s in sender.outgoing if is_unidirectional(s) and s != control]

    def open_streams(self) -> list[tuple[Role, StreamId]]:
        """Return the directions that are not over, the control streams excepted."""
        return [
            (end.role, stream_id)
            for end in self.ends
            for stream_id, direction in end.outgoing.items()
            if not direction.over and stream_id not in (2, 3)
        ]

    def leave_behind(self) -> list[str]:
        """Return what is left over although no request is alive: there must be nothing."""
        found = []
        for end in self.ends:
            session: Any = end.session
            name = end.role.name
            if session._requests.by_id or session._requests.by_stream or session._arrivals.opening:
                found.append(
                    f"{name}: requests {session._requests.by_id} {session._requests.by_stream}"
                )
            delivery = session._delivery
            if delivery._streams or delivery._fetch_owners or delivery._aliases:
                found.append(f"{name}: streams {delivery._streams} {delivery._fetch_owners}")
            if delivery._parked_octets or delivery._partial_octets:
                found.append(f"{name}: octets counted of streams that are over")
            if len(session._context.open_streams):
                found.append(f"{name}: sending {session._context.open_streams._streams}")
            if session.has_data_waiting or session.next_deadline() is not None:
                found.append(f"{name}: waits until {session.next_deadline()}")
            if self.unreleased(end):
                found.append(f"{name}: {self.unreleased(end)} octets never released")
        return found


# -- Tracks ------------------------------------------------------------------------------------


def payload_of(location: Location, octets: int = 64) -> bytes:
    """Return the payload that an Object of these tests has: it says where it belongs."""
    text = f"{location.group}/{location.object} ".encode()
    return (text * (octets // len(text) + 1))[:octets]


def make_track(
    groups: int = 0,
    objects: int = 4,
    *,
    octets: int = 64,
    ended: bool = True,
    name: FullTrackName = NAME,
    **options: Any,
) -> LocalTrack:
    """Return a Track of so many Groups of one closed Subgroup each, with their ends marked."""
    track = LocalTrack(name, **options)
    for group_id in range(groups):
        publish_group(track, group_id, objects, octets=octets)
    if ended and groups:
        track.end()
    return track


def publish_group(track: LocalTrack, group_id: int, objects: int, *, octets: int = 64) -> None:
    """Publish a whole Group: its Objects, End of Group, and the end of its Subgroup."""
    subgroup = track.open_subgroup(group_id, holds_end_of_group=True)
    for object_id in range(objects):
        subgroup.publish(object_id, payload_of(Location(group_id, object_id), octets))
    subgroup.close()


def locations(events: Iterable[ObjectReceived]) -> list[Location]:
    """Return where Objects stand, in the order they came, and check what they carry."""
    found = []
    for event in events:
        if event.payload:
            assert event.payload == payload_of(event.location, len(event.payload))
        found.append(event.location)
    return found


def whole(groups: int, objects: int) -> list[Location]:
    """Return the Locations of a Track of :func:`make_track`."""
    return [Location(g, o) for g in range(groups) for o in range(objects)]


DESCENDING = GroupOrder.DESCENDING
__all__ = [
    "DESCENDING",
    "NAME",
    "UNLIMITED",
    "Credit",
    "Direction",
    "End",
    "Pair",
    "is_opened_by",
    "locations",
    "make_track",
    "payload_of",
    "publish_group",
    "whole",
]
