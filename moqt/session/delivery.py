"""Data streams in, Objects out; and streams that came ahead of what they belong to.

Every octet that arrives on a data stream is accounted for: it is released to the receive window
when it was only a header, when the Object it belongs to, or the piece of it, was taken by the
application, or when it is thrown away. So what an application does not read stops the peer, and
nothing leaks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from moqt.codepoints import GroupOrder, ObjectStatus, StreamErrorCode, StreamType, known
from moqt.errors import DuplicateTrackAlias, ObjectTooLarge, ProtocolError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import (
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    RangeMarked,
    RequestId,
    StreamDiscarded,
    SubgroupClosed,
    SubgroupOpened,
    Via,
)
from moqt.session.subscriber import Subscriber
from moqt.session.subscription import AliasDirectory
from moqt.wire.datagram import decode_datagram
from moqt.wire.fetchstream import FetchHeader, FetchObject, FetchReader, RangeMarker
from moqt.wire.objects import Begun
from moqt.wire.streamtype import classify_uni
from moqt.wire.subgroup import SubgroupHeader, SubgroupObject, SubgroupReader
from moqt.wire.varint import decode_vi64

#: Octets of unfinished Objects, over all streams, from which on what comes is released at once.
#: Nobody can take an Object that is not whole, so holding back more could use up a receive window
#: for good: this is below the smallest one there can be. Only an application that has something
#: to take is waited for.
RELEASE_EARLY_ABOVE = 32 * 1024
#: Aliases of ended subscriptions that are remembered, so that late streams are known as such.
_DEAD_ALIASES = 4096


class FetchOwner(Protocol):
    """Who a fetch stream belongs to: a FETCH of ours, or a subscription that asked for a fill."""

    request_id: RequestId
    held: int
    """Payload octets of events that the application has not taken."""

    waits_for_application: bool
    """Octets of unfinished Objects are kept in the window because of what it has not taken."""

    pieces: bool
    """Objects are handed out as they come, and not when they are whole."""

    is_filtered: bool
    is_moving: bool
    """Something came on one of its streams since this was last set to False."""

    def group_order_of(self, request_id: RequestId) -> GroupOrder:
        """Return the Group Order that the stream is coded in."""

    def stream_opened(self, stream_id: StreamId) -> None:
        """The stream showed its header."""

    def fetch_stream_ended(
        self, stream_id: StreamId, request_id: RequestId, code: int | None
    ) -> None:
        """The stream is over: by FIN if ``code`` is None, else by a reset."""

    def malformed(self, reason: str) -> None:
        """The Track broke its own rules."""

    def too_far_behind(self) -> None:
        """The application does not take what comes."""

    def open_streams(self) -> Iterable[StreamId]:
        """Return the data streams that belong to it and have not ended."""


class _Incoming:
    """One unidirectional stream of the peer, from its first octet to its end."""

    __slots__ = (
        "alias", "buffer", "buffered", "fin", "parked", "sink", "stream_id", "unreleased",
        "waits_for",
    )  # fmt: skip

    def __init__(self, stream_id: StreamId) -> None:
        self.stream_id = stream_id
        self.buffer = bytearray()  # what came before the stream was bound
        self.fin = False
        self.parked = False
        self.alias: int | None = None
        self.waits_for: int | None = None
        self.sink: _Sink | None = None
        self.unreleased = 0
        """Octets that arrived and are neither released nor part of an event."""

        self.buffered = 0
        """Octets of an Object that is still arriving."""


class _Sink:
    """What a bound stream does with its octets."""

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        raise NotImplementedError

    def reset(self, stream: _Incoming, code: int) -> None:
        """The stream ended by a reset."""


class _Ignore(_Sink):
    """Padding, and whatever is not wanted any more."""

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        pass


_IGNORE = _Ignore()


class Delivery(AliasDirectory):
    """The receiving side of all data streams of a session."""

    def __init__(
        self, context: Context, on_control: Callable[[StreamId, bytes, bool], None]
    ) -> None:
        self._context = context
        self._on_control = on_control
        self._streams: dict[StreamId, _Incoming] = {}
        self._aliases: dict[int, list[Subscriber]] = {}
        self._dead_aliases: dict[int, None] = {}
        self._fetch_owners: dict[int, FetchOwner] = {}
        self._early: list[_Incoming] = []  # streams ahead of the peer's SETUP, in order
        self._parked_octets = 0
        self._partial_octets = 0

    # -- doors -----------------------------------------------------------------------------------

    def receive(self, stream_id: StreamId, data: bytes, fin: bool) -> None:
        """Take octets of a unidirectional stream of the peer."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Incoming(stream_id)
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

    def consumed(self, event: ObjectReceived | ObjectPiece, owner: FetchOwner | None) -> None:
        """The application took an Object, or a piece: its octets leave the receive window."""
        if isinstance(event, ObjectPiece):
            self._context.release(event.stream_id, len(event.data))
        elif event.stream_id is not None:
            self._context.release(event.stream_id, event.octets)
        if owner is None:
            return
        owner.held -= len(event.data if isinstance(event, ObjectPiece) else event.payload)
        if owner.waits_for_application and not owner.held:
            owner.waits_for_application = False
            for stream_id in owner.open_streams():
                if (stream := self._streams.get(stream_id)) is not None:
                    self._release_early(stream, owner)

    def setup_done(self) -> None:
        """The peer's SETUP is through: look at the streams that came ahead of it."""
        early, self._early = self._early, []
        for stream in early:
            if stream.stream_id in self._streams:
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

    def _try_bind(self, stream: _Incoming, arrived: int) -> None:
        """Look at the header of a stream; bind it, park it, or wait for more of the header."""
        head = decode_vi64(stream.buffer)
        if head is None:
            self._header_incomplete(stream)
            return
        kind = classify_uni(head[0])
        if kind is StreamType.SETUP:
            del self._streams[stream.stream_id]
            self._on_control(stream.stream_id, bytes(stream.buffer), stream.fin)
            return
        if self._context.peer_setup is None:
            if not stream.parked:
                self._early.append(stream)
            self._park(stream, arrived, None)
        elif kind is StreamType.PADDING:
            self._bind(stream, _IGNORE, len(stream.buffer))
        elif kind is StreamType.FETCH_HEADER:
            self._bind_fetch(stream)
        else:
            self._bind_subgroup(stream, arrived)

    def _header_incomplete(self, stream: _Incoming) -> None:
        if stream.fin:
            raise ProtocolError("a data stream ended inside its header")

    def _bind_subgroup(self, stream: _Incoming, arrived: int) -> None:
        decoded = SubgroupHeader.decode(stream.buffer)
        if decoded is None:
            self._header_incomplete(stream)
            return
        header, size = decoded
        owner = self._owner_of(header.track_alias)
        if owner is not None:
            owner.stream_opened(stream.stream_id)
            kind = _SubgroupPieces if owner.pieces else _SubgroupSink
            self._bind(stream, kind(self, owner, header, self._limit), size)
        elif header.track_alias in self._dead_aliases:
            self._ignore(stream, StreamErrorCode.CANCELLED)
        else:
            self._park(stream, arrived, header.track_alias)

    def _bind_fetch(self, stream: _Incoming) -> None:
        decoded = FetchHeader.decode(stream.buffer)
        if decoded is None:
            self._header_incomplete(stream)
            return
        header, size = decoded
        request_id = RequestId(header.request_id)
        owner = self._fetch_owners.pop(request_id, None)
        if owner is None:
            self._ignore(stream, StreamErrorCode.CANCELLED)
            return
        owner.stream_opened(stream.stream_id)
        order = owner.group_order_of(request_id)
        kind = _FetchPieces if owner.pieces else _FetchSink
        self._bind(stream, kind(self, owner, request_id, order, self._limit), size)

    @property
    def _limit(self) -> int:
        return self._context.config.max_object_octets

    def _bind(self, stream: _Incoming, sink: _Sink, header_octets: int) -> None:
        stream.sink = sink
        rest = bytes(stream.buffer[header_octets:])
        stream.buffer = bytearray()
        sink.receive(stream, rest, stream.fin)
        self._after(stream, stream.fin)

    # -- parking ---------------------------------------------------------------------------------

    def _park(self, stream: _Incoming, arrived: int, alias: int | None) -> None:
        config = self._context.config
        stream.waits_for = alias
        if not stream.parked:
            stream.parked = True
            arrived = len(stream.buffer)
            self._context.timers.start(_ParkTimer(self, stream.stream_id), config.park_timeout_s)
        self._parked_octets += arrived
        count = sum(s.parked for s in self._streams.values())
        if self._parked_octets > config.max_parked_octets or count > config.max_parked_streams:
            self.give_up_parked(stream.stream_id, "too much waits for its subscription")

    def _unpark(self, stream: _Incoming) -> None:
        if stream.parked:
            stream.parked, stream.waits_for = False, None
            self._parked_octets -= len(stream.buffer)
            self._context.timers.stop(_ParkTimer(self, stream.stream_id))

    def give_up_parked(self, stream_id: StreamId, reason: str) -> None:
        """Stop a stream whose subscription has not come."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.parked:
            self._context.emit(StreamDiscarded(stream_id=stream_id, reason=reason))
            self._ignore(stream, StreamErrorCode.EXCESSIVE_LOAD)

    # -- what sinks use --------------------------------------------------------------------------

    def object_arrived(self, stream: _Incoming, owner: FetchOwner, event: ObjectReceived) -> None:
        """Deliver one Object of a stream; its octets stay in the window until it is taken."""
        stream.unreleased -= event.octets
        self._deliver(owner, event)

    def object_began(self, owner: FetchOwner, event: ObjectBegan) -> bool:
        """Tell of an Object whose payload follows; return whether the Track is fine."""
        if isinstance(owner, Subscriber):
            problem = owner.shape.object_received(
                event.location,
                subgroup_id=event.subgroup_id,
                priority=event.publisher_priority,
                status=event.status,
            )
            if not self._check(owner, problem):
                return False
        self._context.emit(event)
        return True

    def piece_arrived(self, stream: _Incoming, owner: FetchOwner, data: bytes | memoryview) -> None:
        """Hand out octets of an Object; they stay in the window until they are taken."""
        stream.unreleased -= len(data)
        owner.held += len(data)
        self._context.emit(
            ObjectPiece(request_id=owner.request_id, stream_id=stream.stream_id, data=data)
        )
        self._check_held(owner, len(data))

    def available(self, stream: _Incoming, buffered: int) -> int:
        """Return the octets that belong to Objects which have arrived whole."""
        self._count_partial(stream, buffered)
        return max(0, stream.unreleased - buffered)

    def settle(self, stream: _Incoming, owner: FetchOwner) -> None:
        """After a batch of a stream: what is no Object's, and what would block, is released."""
        spare = stream.unreleased - stream.buffered
        if spare > 0:
            stream.unreleased -= spare
            self._context.release(stream.stream_id, spare)
        owner.is_moving = True
        self._release_early(stream, owner)
        limit = self._context.config.max_partial_octets
        if self._partial_octets > limit and stream.buffered:
            self.give_up(stream, f"{self._partial_octets} octets of unfinished Objects")

    def give_up(self, stream: _Incoming, reason: str) -> None:
        """Stop a stream at one of our limits; its owner sees it as reset."""
        self._context.emit(StreamDiscarded(stream_id=stream.stream_id, reason=reason))
        sink = stream.sink
        self._ignore(stream, StreamErrorCode.EXCESSIVE_LOAD)
        if sink is not None:
            sink.reset(stream, StreamErrorCode.EXCESSIVE_LOAD)

    def emit(self, event: RangeMarked | SubgroupOpened | SubgroupClosed) -> None:
        """Tell the application of a marker, or of the beginning or end of a stream."""
        self._context.emit(event)

    def check_shape(self, owner: Subscriber, problem: str | None) -> bool:
        """Leave the Track if it is malformed; return whether it is fine."""
        return self._check(owner, problem)

    # -- inside ----------------------------------------------------------------------------------

    def _deliver(self, owner: FetchOwner, event: ObjectReceived) -> None:
        if isinstance(owner, Subscriber):
            problem = owner.shape.object_received(
                event.location,
                subgroup_id=event.subgroup_id,
                priority=event.publisher_priority,
                status=event.status,
            )
            if not self._check(owner, problem):
                if event.stream_id is not None:
                    self._context.release(event.stream_id, event.octets)
                return
        owner.held += len(event.payload)
        self._context.emit(event)
        self._check_held(owner, len(event.payload))

    def _check_held(self, owner: FetchOwner, added: int) -> None:
        if (
            isinstance(owner, Subscriber)
            and owner.held > self._context.config.max_subscription_octets
            and owner.held > added
        ):
            owner.too_far_behind()

    def _check(self, owner: FetchOwner, problem: str | None) -> bool:
        if problem is not None:
            owner.malformed(problem)
        return problem is None

    def _release_early(self, stream: _Incoming, owner: FetchOwner) -> None:
        if not stream.unreleased or self._partial_octets <= RELEASE_EARLY_ABOVE:
            return
        if owner.held:
            owner.waits_for_application = True
            return
        self._context.release(stream.stream_id, stream.unreleased)
        stream.unreleased = 0

    def _count_partial(self, stream: _Incoming, buffered: int) -> None:
        self._partial_octets += buffered - stream.buffered
        stream.buffered = buffered

    def _ignore(self, stream: _Incoming, code: StreamErrorCode) -> None:
        self._unpark(stream)
        self._count_partial(stream, 0)
        stream.sink, stream.buffer = _IGNORE, bytearray()
        self._context.stop(stream.stream_id, code)
        self._after(stream, stream.fin)

    def _after(self, stream: _Incoming, fin: bool) -> None:
        if stream.sink is _IGNORE and stream.unreleased:
            self._context.release(stream.stream_id, stream.unreleased)
            stream.unreleased = 0
        if fin:
            self._streams.pop(stream.stream_id, None)


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
        """The subscription of the stream has not come in time."""
        self._delivery.give_up_parked(self._stream_id, "its subscription did not come in time")


class _SubgroupSink(_Sink):
    """Objects of one Subgroup, for a subscription."""

    def __init__(
        self, delivery: Delivery, owner: Subscriber, header: SubgroupHeader, limit: int
    ) -> None:
        self._delivery = delivery
        self._owner = owner
        self._group_id = header.group_id
        self._subgroup_id = header.subgroup_id
        self._priority = (
            owner.default_priority
            if header.publisher_priority is None
            else header.publisher_priority
        )
        self._holds_end = header.end_of_group
        self._last: int | None = None
        self._reader = SubgroupReader(limit, header)

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        delivery, owner, reader = self._delivery, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            objects: Sequence[SubgroupObject] = reader.feed(data)
        except ObjectTooLarge as exc:
            objects, too_large = exc.completed, exc
        available = delivery.available(stream, reader.buffered)
        for obj in objects:
            if self._subgroup_id is None:
                self._subgroup_id = obj.object_id
            # A status marks the end by itself; the bit speaks of the last real Object.
            self._last = obj.object_id if obj.status is ObjectStatus.NORMAL else None
            octets = min(len(obj.payload), available)
            available -= octets
            delivery.object_arrived(
                stream,
                owner,
                ObjectReceived(
                    request_id=owner.request_id,
                    via=Via.SUBGROUP,
                    location=Location(self._group_id, obj.object_id),
                    subgroup_id=self._subgroup_id,
                    publisher_priority=self._priority,
                    status=obj.status,
                    properties=obj.properties,
                    payload=obj.payload,
                    stream_id=stream.stream_id,
                    octets=octets,
                ),
            )
            if owner.over:
                return
        if too_large is not None:
            delivery.give_up(stream, str(too_large))
            return
        delivery.settle(stream, owner)
        if fin:
            self._finish(stream)

    def reset(self, stream: _Incoming, code: int) -> None:
        self._over(stream, code)

    def _finish(self, stream: _Incoming) -> None:
        """The stream ended by FIN, unless it was given up."""
        if stream.sink is not self:
            return
        owner = self._owner
        self._reader.finish()
        if self._holds_end and self._last is not None and not owner.is_filtered:
            end = Location(self._group_id, self._last).next()
            self._delivery.check_shape(owner, owner.shape.group_ends_at(end))
        self._over(stream, None)

    def _over(self, stream: _Incoming, code: int | None) -> None:
        """Nothing more comes: by FIN if ``code`` is None, else by a reset."""
        if not self._owner.over:
            self._owner.stream_ended(stream.stream_id)


class _FetchSink(_Sink):
    """Objects and markers of one fetch stream."""

    def __init__(
        self,
        delivery: Delivery,
        owner: FetchOwner,
        request_id: RequestId,
        order: GroupOrder,
        limit: int,
    ) -> None:
        self._delivery = delivery
        self._owner = owner
        self._request_id = request_id
        self._via = Via.FILL if isinstance(owner, Subscriber) else Via.FETCH
        self._reader = FetchReader(order, limit)
        self._last: Location | None = None

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        delivery, owner, reader = self._delivery, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            entries: Sequence[FetchObject | RangeMarker] = reader.feed(data)
        except ObjectTooLarge as exc:
            entries, too_large = exc.completed, exc
        available = delivery.available(stream, reader.buffered)
        for entry in entries:
            if isinstance(entry, RangeMarker):
                self._mark(entry)
                continue
            self._last = entry.location
            octets = min(len(entry.payload), available)
            available -= octets
            delivery.object_arrived(
                stream,
                owner,
                ObjectReceived(
                    request_id=owner.request_id,
                    via=self._via,
                    location=entry.location,
                    subgroup_id=entry.subgroup_id,
                    publisher_priority=entry.publisher_priority,
                    status=ObjectStatus.NORMAL,
                    properties=entry.properties,
                    payload=entry.payload,
                    stream_id=stream.stream_id,
                    octets=octets,
                ),
            )
            if stream.sink is not self:
                return  # the owner left while it was told
        if too_large is not None:
            delivery.give_up(stream, str(too_large))
            return
        delivery.settle(stream, owner)
        if fin and stream.sink is self:
            reader.finish()
            owner.fetch_stream_ended(stream.stream_id, self._request_id, None)

    def _mark(self, marker: RangeMarker) -> None:
        self._delivery.emit(
            RangeMarked(
                request_id=self._owner.request_id,
                kind=marker.kind,
                start=self._last.next() if self._last is not None else None,
                end=marker.location,
            )
        )
        self._last = marker.location

    def reset(self, stream: _Incoming, code: int) -> None:
        self._owner.fetch_stream_ended(stream.stream_id, self._request_id, code)


class _SubgroupPieces(_SubgroupSink):
    """Objects of one Subgroup as they come, for a subscription that takes them in pieces."""

    def __init__(
        self, delivery: Delivery, owner: Subscriber, header: SubgroupHeader, limit: int
    ) -> None:
        super().__init__(delivery, owner, header, limit)
        self._header = header
        self._opened = False

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        delivery, owner, reader = self._delivery, self._owner, self._reader
        if self._subgroup_id is not None:
            self._open(stream, self._subgroup_id)
        too_large: ObjectTooLarge | None = None
        try:
            found = reader.feed_in_pieces(data)
        except ObjectTooLarge as exc:
            found, too_large = list(exc.completed), exc
        delivery.available(stream, reader.header_held)
        for part in found:
            if isinstance(part, Begun):
                obj = part.item
                if self._subgroup_id is None:
                    self._subgroup_id = obj.object_id
                self._open(stream, self._subgroup_id)
                # A status marks the end by itself; the bit speaks of the last real Object.
                self._last = obj.object_id if obj.status is ObjectStatus.NORMAL else None
                fine = delivery.object_began(
                    owner,
                    ObjectBegan(
                        request_id=owner.request_id,
                        via=Via.SUBGROUP,
                        stream_id=stream.stream_id,
                        location=Location(self._group_id, obj.object_id),
                        subgroup_id=self._subgroup_id,
                        publisher_priority=self._priority,
                        status=obj.status,
                        properties=obj.properties,
                        length=part.length,
                    ),
                )
                if not fine:
                    return
            else:
                delivery.piece_arrived(stream, owner, part)
                if owner.over:
                    return
        if too_large is not None:
            delivery.give_up(stream, str(too_large))
            return
        delivery.settle(stream, owner)
        if fin:
            self._finish(stream)

    def _open(self, stream: _Incoming, subgroup_id: int) -> None:
        if not self._opened:
            self._opened = True
            header = self._header
            self._delivery.emit(
                SubgroupOpened(
                    request_id=self._owner.request_id,
                    stream_id=stream.stream_id,
                    group_id=header.group_id,
                    subgroup_id=subgroup_id,
                    publisher_priority=self._priority,
                    end_of_group=header.end_of_group,
                    first_object=header.first_object,
                    has_properties=header.has_properties,
                )
            )

    def _over(self, stream: _Incoming, code: int | None) -> None:
        if self._opened and not self._owner.over:
            self._delivery.emit(
                SubgroupClosed(
                    request_id=self._owner.request_id,
                    stream_id=stream.stream_id,
                    fin=code is None,
                    code=code if code is None else known(StreamErrorCode, code),
                )
            )
        super()._over(stream, code)


class _FetchPieces(_FetchSink):
    """Objects, as they come, and markers of one fetch stream."""

    def receive(self, stream: _Incoming, data: bytes, fin: bool) -> None:
        delivery, owner, reader = self._delivery, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            found = reader.feed_in_pieces(data)
        except ObjectTooLarge as exc:
            found, too_large = list(exc.completed), exc
        delivery.available(stream, reader.header_held)
        for part in found:
            if not isinstance(part, Begun):
                delivery.piece_arrived(stream, owner, part)
            elif isinstance(part.item, RangeMarker):
                self._mark(part.item)
            else:
                obj = part.item
                self._last = obj.location
                delivery.object_began(
                    owner,
                    ObjectBegan(
                        request_id=owner.request_id,
                        via=self._via,
                        stream_id=stream.stream_id,
                        location=obj.location,
                        subgroup_id=obj.subgroup_id,
                        publisher_priority=obj.publisher_priority,
                        status=ObjectStatus.NORMAL,
                        properties=obj.properties,
                        length=part.length,
                    ),
                )
            if stream.sink is not self:
                return  # the owner left while it was told
        if too_large is not None:
            delivery.give_up(stream, str(too_large))
            return
        delivery.settle(stream, owner)
        if fin and stream.sink is self:
            reader.finish()
            owner.fetch_stream_ended(stream.stream_id, self._request_id, None)
