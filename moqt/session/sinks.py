"""What becomes of the octets of a data stream: Objects, whole or in pieces as they come."""

from collections.abc import Sequence

from moqt.codepoints import GroupOrder, ObjectStatus, StreamErrorCode, known
from moqt.errors import ObjectTooLarge
from moqt.location import Location
from moqt.session.events import (
    ObjectBegan,
    ObjectReceived,
    RangeMarked,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    Via,
)
from moqt.session.intake import FetchOwner, Incoming, Intake, Sink
from moqt.session.subscriber import Subscriber
from moqt.wire.fetchstream import FetchObject, FetchReader, RangeMarker
from moqt.wire.objects import Begun
from moqt.wire.subgroup import SubgroupHeader, SubgroupObject, SubgroupReader


class SubgroupSink(Sink):
    """Objects of one Subgroup, for a subscription."""

    def __init__(
        self, intake: Intake, owner: Subscriber, header: SubgroupHeader, limit: int
    ) -> None:
        self._intake = intake
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

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        """Hand on what the next octets of the stream bring."""
        intake, owner, reader = self._intake, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            objects: Sequence[SubgroupObject] = reader.feed(data)
        except ObjectTooLarge as exc:
            objects, too_large = exc.completed, exc
        available = intake.available(stream, reader.buffered)
        for obj in objects:
            if self._subgroup_id is None:
                self._subgroup_id = obj.object_id
            # A status marks the end by itself; the bit speaks of the last real Object.
            self._last = obj.object_id if obj.status is ObjectStatus.NORMAL else None
            octets = min(len(obj.payload), available)
            available -= octets
            intake.object_arrived(
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
            intake.give_up(stream, str(too_large))
            return
        intake.settle(stream, owner)
        if fin:
            self._finish(stream)

    def reset(self, stream: Incoming, code: int) -> None:
        """The stream ended by a reset."""
        self._over(stream, code)

    def _finish(self, stream: Incoming) -> None:
        """The stream ended by FIN, unless it was given up."""
        if stream.sink is not self:
            return
        owner = self._owner
        self._reader.finish()
        if self._holds_end and self._last is not None and not owner.is_filtered:
            end = Location(self._group_id, self._last).next()
            self._intake.check_shape(owner, owner.shape.group_ends_at(end))
        self._over(stream, None)

    def _over(self, stream: Incoming, code: int | None) -> None:
        """Nothing more comes: by FIN if ``code`` is None, else by a reset."""
        if not self._owner.over:
            self._owner.stream_ended(stream.stream_id)


class FetchSink(Sink):
    """Objects and markers of one fetch stream."""

    def __init__(
        self,
        intake: Intake,
        owner: FetchOwner,
        request_id: RequestId,
        order: GroupOrder,
        limit: int,
    ) -> None:
        self._intake = intake
        self._owner = owner
        self._request_id = request_id
        self._via = Via.FILL if isinstance(owner, Subscriber) else Via.FETCH
        self._reader = FetchReader(order, limit)
        self._last: Location | None = None

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        """Hand on what the next octets of the stream bring."""
        intake, owner, reader = self._intake, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            entries: Sequence[FetchObject | RangeMarker] = reader.feed(data)
        except ObjectTooLarge as exc:
            entries, too_large = exc.completed, exc
        available = intake.available(stream, reader.buffered)
        for entry in entries:
            if isinstance(entry, RangeMarker):
                self._mark(entry)
                continue
            self._last = entry.location
            octets = min(len(entry.payload), available)
            available -= octets
            intake.object_arrived(
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
            intake.give_up(stream, str(too_large))
            return
        intake.settle(stream, owner)
        if fin and stream.sink is self:
            reader.finish()
            owner.fetch_stream_ended(stream.stream_id, self._request_id, None)

    def _mark(self, marker: RangeMarker) -> None:
        self._intake.emit(
            RangeMarked(
                request_id=self._owner.request_id,
                kind=marker.kind,
                start=self._last.next() if self._last is not None else None,
                end=marker.location,
            )
        )
        self._last = marker.location

    def reset(self, stream: Incoming, code: int) -> None:
        """The stream ended by a reset."""
        self._owner.fetch_stream_ended(stream.stream_id, self._request_id, code)


class SubgroupPieces(SubgroupSink):
    """Objects of one Subgroup as they come, for a subscription that takes them in pieces."""

    def __init__(
        self, intake: Intake, owner: Subscriber, header: SubgroupHeader, limit: int
    ) -> None:
        super().__init__(intake, owner, header, limit)
        self._header = header
        self._opened = False

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        """Hand on what the next octets of the stream bring."""
        intake, owner, reader = self._intake, self._owner, self._reader
        if self._subgroup_id is not None:
            self._open(stream, self._subgroup_id)
        too_large: ObjectTooLarge | None = None
        try:
            found = reader.feed_in_pieces(data)
        except ObjectTooLarge as exc:
            found, too_large = list(exc.completed), exc
        intake.available(stream, reader.header_held)
        for part in found:
            if isinstance(part, Begun):
                obj = part.item
                if self._subgroup_id is None:
                    self._subgroup_id = obj.object_id
                self._open(stream, self._subgroup_id)
                # A status marks the end by itself; the bit speaks of the last real Object.
                self._last = obj.object_id if obj.status is ObjectStatus.NORMAL else None
                fine = intake.object_began(
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
                intake.piece_arrived(stream, owner, part)
                if owner.over:
                    return
        if too_large is not None:
            intake.give_up(stream, str(too_large))
            return
        intake.settle(stream, owner)
        if fin:
            self._finish(stream)

    def _open(self, stream: Incoming, subgroup_id: int) -> None:
        if not self._opened:
            self._opened = True
            header = self._header
            self._intake.emit(
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

    def _over(self, stream: Incoming, code: int | None) -> None:
        if self._opened and not self._owner.over:
            self._intake.emit(
                SubgroupClosed(
                    request_id=self._owner.request_id,
                    stream_id=stream.stream_id,
                    fin=code is None,
                    code=code if code is None else known(StreamErrorCode, code),
                )
            )
        super()._over(stream, code)


class FetchPieces(FetchSink):
    """Objects, as they come, and markers of one fetch stream."""

    def receive(self, stream: Incoming, data: bytes, fin: bool) -> None:
        """Hand on what the next octets of the stream bring."""
        intake, owner, reader = self._intake, self._owner, self._reader
        too_large: ObjectTooLarge | None = None
        try:
            found = reader.feed_in_pieces(data)
        except ObjectTooLarge as exc:
            found, too_large = list(exc.completed), exc
        intake.available(stream, reader.header_held)
        for part in found:
            if not isinstance(part, Begun):
                intake.piece_arrived(stream, owner, part)
            elif isinstance(part.item, RangeMarker):
                self._mark(part.item)
            else:
                obj = part.item
                self._last = obj.location
                intake.object_began(
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
            intake.give_up(stream, str(too_large))
            return
        intake.settle(stream, owner)
        if fin and stream.sink is self:
            reader.finish()
            owner.fetch_stream_ended(stream.stream_id, self._request_id, None)
