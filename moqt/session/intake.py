"""What arrived on data streams and is still held, octet by octet.

Every octet that arrives on a data stream is accounted for: it is released to the receive window
when it was only a header, when the Object it belongs to, or the piece of it, was taken by the
application, or when it is thrown away. So what an application does not read stops the peer, and
nothing leaks.
"""

from collections.abc import Iterable
from typing import Protocol

from moqt.codepoints import GroupOrder, StreamErrorCode
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
)
from moqt.session.subscriber import Subscriber

#: Octets of unfinished Objects, over all streams, from which on what comes is released at once.
#: Nobody can take an Object that is not whole, so holding back more could use up a receive window
#: for good: this is below the smallest one there can be. Only an application that has something
#: to take is waited for.
RELEASE_EARLY_ABOVE = 32 * 1024


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


class Incoming:
    """One unidirectional stream of the peer, from its first octet to its end."""

    __slots__ = (
        "buffer", "buffered", "fin", "parked", "parked_octets", "sink", "stream_id", "unreleased",
        "waits_for",
    )  # fmt: skip

    def __init__(self, stream_id: StreamId) -> None:
        self.stream_id = stream_id
        self.buffer = bytearray()  # what came before the stream was bound
        self.fin = False
        self.parked = False
        self.parked_octets = 0  # counted as such
        self.waits_for: int | None = None
        self.sink: Sink | None = None
        self.unreleased = 0
        """Octets that arrived and are neither released nor part of an event."""

        self.buffered = 0
        """Octets of an Object that is still arriving."""


class Sink:
    """What a bound stream does with its octets."""

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        """Take the next octets of the stream, ``fin`` with the last ones."""
        raise NotImplementedError

    def reset(self, stream: Incoming, code: int) -> None:
        """The stream ended by a reset."""


class _Ignore(Sink):
    """Padding, and whatever is not wanted any more."""

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        pass


IGNORE = _Ignore()


class Intake:
    """The data streams of the peer, and the octets of them that are not released yet."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._streams: dict[StreamId, Incoming] = {}
        self._partial_octets = 0

    def consumed(self, event: ObjectReceived | ObjectPiece, owner: FetchOwner | None) -> None:
        """The application took an Object, or a piece: its octets leave the receive window."""
        if isinstance(event, ObjectPiece):
            taken = len(event.data)
            self._context.release(event.stream_id, taken)
        else:
            taken = len(event.payload)
            if event.stream_id is not None:
                self._context.release(event.stream_id, event.octets)
        if owner is None:
            return
        owner.held -= taken
        if owner.waits_for_application and not owner.held:
            owner.waits_for_application = False
            for stream_id in owner.open_streams():
                if (stream := self._streams.get(stream_id)) is not None:
                    self._release_early(stream, owner)

    # -- what sinks use --------------------------------------------------------------------------

    def object_arrived(self, stream: Incoming, owner: FetchOwner, event: ObjectReceived) -> None:
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

    def piece_arrived(self, stream: Incoming, owner: FetchOwner, data: bytes | memoryview) -> None:
        """Hand out octets of an Object; they stay in the window until they are taken."""
        stream.unreleased -= len(data)
        owner.held += len(data)
        self._context.emit(
            ObjectPiece(request_id=owner.request_id, stream_id=stream.stream_id, data=data)
        )
        self._check_held(owner, len(data))

    def available(self, stream: Incoming, buffered: int) -> int:
        """Return the octets that belong to Objects which have arrived whole."""
        self._count_partial(stream, buffered)
        return max(0, stream.unreleased - buffered)

    def settle(self, stream: Incoming, owner: FetchOwner) -> None:
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

    def give_up(self, stream: Incoming, reason: str) -> None:
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

    def _release_early(self, stream: Incoming, owner: FetchOwner) -> None:
        if not stream.unreleased or self._partial_octets <= RELEASE_EARLY_ABOVE:
            return
        if owner.held:
            owner.waits_for_application = True
            return
        self._context.release(stream.stream_id, stream.unreleased)
        stream.unreleased = 0

    def _count_partial(self, stream: Incoming, buffered: int) -> None:
        self._partial_octets += buffered - stream.buffered
        stream.buffered = buffered

    def _ignore(self, stream: Incoming, code: StreamErrorCode) -> None:
        self._count_partial(stream, 0)
        stream.sink, stream.buffer = IGNORE, bytearray()
        self._context.stop(stream.stream_id, code)
        self._after(stream, stream.fin)

    def _after(self, stream: Incoming, fin: bool) -> None:
        if stream.sink is IGNORE and stream.unreleased:
            self._context.release(stream.stream_id, stream.unreleased)
            stream.unreleased = 0
        if fin:
            self._streams.pop(stream.stream_id, None)
