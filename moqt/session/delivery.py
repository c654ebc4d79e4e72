"""Whom a data stream belongs to; and streams that came ahead of what they belong to."""

from collections.abc import Callable

from moqt.codepoints import StreamErrorCode, StreamType
from moqt.errors import DuplicateTrackAlias, ProtocolError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import ObjectReceived, RequestId, StreamDiscarded, Via
from moqt.session.intake import IGNORE, FetchOwner, Incoming, Intake, Sink
from moqt.session.sinks import FetchPieces, FetchSink, SubgroupPieces, SubgroupSink
from moqt.session.subscriber import Subscriber
from moqt.session.subscription import AliasDirectory
from moqt.wire.datagram import decode_datagram
from moqt.wire.fetchstream import FetchHeader
from moqt.wire.streamtype import classify_uni
from moqt.wire.subgroup import SubgroupHeader
from moqt.wire.varint import decode_vi64

#: Aliases of ended subscriptions that are remembered, so that late streams are known as such.
_DEAD_ALIASES = 4096


class Delivery(Intake, AliasDirectory):
    """The receiving side of all data streams of a session."""

    def __init__(
        self, context: Context, on_control: Callable[[StreamId, bytes, bool], None]
    ) -> None:
        super().__init__(context)
        self._on_control = on_control
        self._aliases: dict[int, list[Subscriber]] = {}
        self._dead_aliases: dict[int, None] = {}
        self._fetch_owners: dict[int, FetchOwner] = {}
        self._early: list[Incoming] = []  # streams ahead of the peer's SETUP, in order
        self._parked_octets = 0

    # -- doors -----------------------------------------------------------------------------------

    def receive(self, stream_id: StreamId, data: bytes, fin: bool) -> None:
        """Take octets of a unidirectional stream of the peer."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = Incoming(stream_id)
        stream.unreleased += len(data)
        if stream.sink is None:
            stream.buffer += data
            stream.fin |= fin
            self._try_bind(stream, len(data))
            return
        stream.sink.receive(stream, data, fin)
        self._after(stream, fin)

    def reset(self, stream_id: StreamId, code: int) -> None:
        """A unidirectional stream of the peer was reset."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self._unpark(stream)
        self._count_partial(stream, 0)
        self._context.release(stream_id, stream.unreleased)
        if stream.sink is not None:
            stream.sink.reset(stream, code)

    def datagram(self, data: bytes) -> None:
        """Take one QUIC DATAGRAM."""
        datagram = decode_datagram(data)
        if datagram is None:
            return  # padding
        owner = self._owner_of(datagram.track_alias)
        if owner is None:
            return  # an unknown alias, or one that is no longer wanted (MOQT, "Datagrams")
        location = Location(datagram.group_id, datagram.object_id)
        priority = datagram.publisher_priority
        self._deliver(
            owner,
            ObjectReceived(
                request_id=owner.request_id,
                via=Via.DATAGRAM,
                location=location,
                subgroup_id=None,
                publisher_priority=owner.default_priority if priority is None else priority,
                status=datagram.status,
                properties=datagram.properties,
                payload=datagram.payload,
                stream_id=None,
                octets=0,
            ),
        )
        if datagram.end_of_group and not owner.over:
            self._check(owner, owner.shape.group_ends_at(location.next()))

    def setup_done(self) -> None:
        """The peer's SETUP is through: look at the streams that came ahead of it."""
        early, self._early = self._early, []
        for stream in early:
            if stream.stream_id in self._streams and stream.sink is None:
                self._unpark(stream)
                self._try_bind(stream, 0)

    # -- AliasDirectory --------------------------------------------------------------------------

    def offer_alias(self, track_alias: int, track: FullTrackName) -> None:
        """A PUBLISH names an alias: its streams may come from now on, and are kept for it."""
        sharing = self._aliases.get(track_alias)
        if sharing and sharing[0].track != track:
            raise DuplicateTrackAlias(f"Track Alias {track_alias} is in use for another track")
        self._dead_aliases.pop(track_alias, None)

    def bind(self, track_alias: int, subscription: Subscriber) -> None:
        """Bind a Track Alias to an Established subscription."""
        sharing = self._aliases.setdefault(track_alias, [])
        if sharing and sharing[0].track != subscription.track:
            raise DuplicateTrackAlias(f"Track Alias {track_alias} is in use for another track")
        self._dead_aliases.pop(track_alias, None)
        # With one alias for two subscriptions of a Track nothing says which of them a stream
        # belongs to: the oldest that lives receives.
        sharing.append(subscription)

    def deliver_parked(self, track_alias: int) -> None:
        """Deliver what streams brought ahead of their alias, in order of arrival."""
        for stream in [s for s in self._streams.values() if s.waits_for == track_alias]:
            if stream.stream_id in self._streams:
                self._unpark(stream)
                self._try_bind(stream, 0)

    def refuse_alias(self, track_alias: int) -> None:
        """A PUBLISH was refused: what its publisher sent ahead of the answer is dropped."""
        if track_alias not in self._aliases:
            self._bury(track_alias)
            self.deliver_parked(track_alias)

    def expect_fetch_stream(self, request_id: RequestId, owner: FetchOwner) -> None:
        """A fetch stream with this Request ID belongs to ``owner``."""
        self._fetch_owners[request_id] = owner

    def stop_stream(self, stream_id: StreamId, code: StreamErrorCode) -> None:
        """Ask the peer to stop a data stream, and ignore what still comes on it."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._ignore(stream, code)

    def forget(self, owner: FetchOwner) -> None:
        """``owner`` is over: drop its alias and what is expected for it."""
        if isinstance(owner, Subscriber) and (alias := owner.track_alias) is not None:
            sharing = self._aliases.get(alias, [])
            if owner in sharing:
                sharing.remove(owner)
                if not sharing:
                    del self._aliases[alias]
                    self._bury(alias)
        for request_id in [k for k, v in self._fetch_owners.items() if v is owner]:
            del self._fetch_owners[request_id]

    def _owner_of(self, track_alias: int) -> Subscriber | None:
        sharing = self._aliases.get(track_alias)
        return sharing[0] if sharing else None

    def _bury(self, track_alias: int) -> None:
        self._dead_aliases[track_alias] = None
        if len(self._dead_aliases) > _DEAD_ALIASES:
            del self._dead_aliases[next(iter(self._dead_aliases))]

    # -- binding ---------------------------------------------------------------------------------

    def _try_bind(self, stream: Incoming, arrived: int) -> None:
        """Look at the header of a stream; bind it, park it, or wait for more of the header."""
        head = decode_vi64(stream.buffer)
        if head is None:
            self._header_incomplete(stream, arrived)
            return
        kind = classify_uni(head[0])
        if kind is StreamType.SETUP:
            del self._streams[stream.stream_id]
            self._unpark(stream)
            self._on_control(stream.stream_id, bytes(stream.buffer), stream.fin)
            return
        if self._context.peer_setup is None:
            if stream not in self._early:
                self._early.append(stream)
            self._park(stream, arrived, None)
        elif kind is StreamType.PADDING:
            self._bind(stream, IGNORE, len(stream.buffer))
        elif kind is StreamType.FETCH_HEADER:
            self._bind_fetch(stream, arrived)
        else:
            self._bind_subgroup(stream, arrived)

    def _header_incomplete(self, stream: Incoming, arrived: int) -> None:
        if stream.fin:
            raise ProtocolError("a data stream ended inside its header")
        self._park(stream, arrived, None)

    def _bind_subgroup(self, stream: Incoming, arrived: int) -> None:
        decoded = SubgroupHeader.decode(stream.buffer)
        if decoded is None:
            self._header_incomplete(stream, arrived)
            return
        header, size = decoded
        owner = self._owner_of(header.track_alias)
        if owner is not None:
            owner.stream_opened(stream.stream_id)
            kind = SubgroupPieces if owner.pieces else SubgroupSink
            self._bind(stream, kind(self, owner, header, self._limit), size)
        elif header.track_alias in self._dead_aliases:
            self._ignore(stream, StreamErrorCode.CANCELLED)
        else:
            self._park(stream, arrived, header.track_alias)

    def _bind_fetch(self, stream: Incoming, arrived: int) -> None:
        decoded = FetchHeader.decode(stream.buffer)
        if decoded is None:
            self._header_incomplete(stream, arrived)
            return
        header, size = decoded
        request_id = RequestId(header.request_id)
        owner = self._fetch_owners.pop(request_id, None)
        if owner is None:
            self._ignore(stream, StreamErrorCode.CANCELLED)
            return
        owner.stream_opened(stream.stream_id)
        order = owner.group_order_of(request_id)
        kind = FetchPieces if owner.pieces else FetchSink
        self._bind(stream, kind(self, owner, request_id, order, self._limit), size)

    @property
    def _limit(self) -> int:
        return self._context.config.max_object_octets

    def _bind(self, stream: Incoming, sink: Sink, header_octets: int) -> None:
        self._unpark(stream)
        stream.sink = sink
        rest = bytes(stream.buffer[header_octets:])
        stream.buffer = bytearray()
        sink.receive(stream, rest, stream.fin)
        self._after(stream, stream.fin)

    # -- parking ---------------------------------------------------------------------------------

    def _park(self, stream: Incoming, arrived: int, alias: int | None) -> None:
        config = self._context.config
        stream.waits_for = alias
        if not stream.parked:
            stream.parked = True
            arrived = len(stream.buffer)
            self._context.timers.start(_ParkTimer(self, stream.stream_id), config.park_timeout_s)
        stream.parked_octets += arrived
        self._parked_octets += arrived
        count = sum(s.parked for s in self._streams.values())
        if self._parked_octets > config.max_parked_octets or count > config.max_parked_streams:
            self.give_up_parked(stream.stream_id, "too much waits for its header or subscription")

    def _unpark(self, stream: Incoming) -> None:
        if stream.parked:
            stream.parked, stream.waits_for = False, None
            self._parked_octets -= stream.parked_octets
            stream.parked_octets = 0
            self._context.timers.stop(_ParkTimer(self, stream.stream_id))

    def _ignore(self, stream: Incoming, code: StreamErrorCode) -> None:
        self._unpark(stream)
        super()._ignore(stream, code)

    def give_up_parked(self, stream_id: StreamId, reason: str) -> None:
        """Stop a stream whose subscription has not come."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.parked:
            self._context.emit(StreamDiscarded(stream_id=stream_id, reason=reason))
            self._ignore(stream, StreamErrorCode.EXCESSIVE_LOAD)


class _ParkTimer:
    """Key of the timer of a parked stream."""

    __slots__ = ("_delivery", "_stream_id")

    def __init__(self, delivery: Delivery, stream_id: StreamId) -> None:
        self._delivery = delivery
        self._stream_id = stream_id

    def __hash__(self) -> int:
        return hash(self._stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ParkTimer) and other._stream_id == self._stream_id

    def timer_expired(self) -> None:
        """The subscription of the stream, or the rest of its header, has not come in time."""
        self._delivery.give_up_parked(
            self._stream_id, "its header or its subscription did not come in time"
        )
