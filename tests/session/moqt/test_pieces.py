"""Objects that are handed out as they come: the same octets, the same ends, the same windows."""

import random
from dataclasses import dataclass, field

import pytest

from moqt.codepoints import (
    GroupOrder,
    ObjectStatus,
    PublishDoneCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.location import Location
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    Event,
    FetchEnded,
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    ObjectReceived,
    PublishReceived,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    SubscriptionEnded,
    Via,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.subgroup import SubgroupHeader, encode_subgroup_object
from tests.session.lone import Lone
from tests.session.pair import NAME, Pair, make_track, payload_of, publish_group

FROM_START = LocationFilter.absolute_start(0, 0)


@dataclass
class Taken:
    """What an application puts together from pieces."""

    began: dict[int, tuple[ObjectBegan, bytearray]] = field(default_factory=dict)
    whole: list[tuple[ObjectBegan, bytes]] = field(default_factory=list)
    open: dict[int, SubgroupOpened] = field(default_factory=dict)
    closed: list[SubgroupClosed] = field(default_factory=list)
    objects: list[ObjectReceived] = field(default_factory=list)

    def take(self, event: Event) -> None:
        match event:
            case SubgroupOpened():
                assert event.stream_id not in self.open
                self.open[event.stream_id] = event
            case ObjectBegan():
                if event.via is Via.SUBGROUP:
                    opened = self.open[event.stream_id]
                    assert (opened.group_id, opened.subgroup_id) == (
                        event.location.group,
                        event.subgroup_id,
                    )
                assert event.stream_id not in self.began
                self.began[event.stream_id] = event, bytearray()
                self._check(event.stream_id)
            case ObjectPiece():
                self.began[event.stream_id][1].extend(event.data)
                self._check(event.stream_id)
            case SubgroupClosed():
                del self.open[event.stream_id]
                if event.fin:
                    assert event.stream_id not in self.began
                self.began.pop(event.stream_id, None)
                self.closed.append(event)
            case ObjectReceived():
                self.objects.append(event)

    def _check(self, stream_id: int) -> None:
        event, data = self.began[stream_id]
        if len(data) == event.length:
            del self.began[stream_id]
            self.whole.append((event, bytes(data)))


def taking(pair: Pair) -> Taken:
    """Have the client of a pair put together what it gets, and take each piece at once."""
    taken = Taken()

    def on_event(event: Event) -> None:
        taken.take(event)
        if isinstance(event, ObjectPiece) and pair.client.consumes:
            pair.client.session.consumed(event)

    pair.client.on_event = on_event
    return taken


def as_whole(event: ObjectReceived) -> tuple[object, ...]:
    return (
        event.request_id, event.via, event.location, event.subgroup_id, event.publisher_priority,
        event.status, event.properties, event.payload,
    )  # fmt: skip


def as_pieces(entry: tuple[ObjectBegan, bytes]) -> tuple[object, ...]:
    event, data = entry
    return (
        event.request_id, event.via, event.location, event.subgroup_id, event.publisher_priority,
        event.status, event.properties, data,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_pieces_are_exactly_the_objects_that_come_whole(seed: int) -> None:
    results: list[list[tuple[object, ...]]] = []
    for pieces in (False, True):
        rng = random.Random(seed)
        pair = Pair(
            chunk=rng.choice([3, 17, 100, 5000]), stream_window=rng.choice([40_000, 1 << 20])
        )
        taken = taking(pair)
        track = pair.server.publish(LocalTrack(NAME))
        session = pair.client.session
        for step in range(8):
            if step in (0, 3, 5):
                order = rng.choice(list(GroupOrder))
                session.subscribe(NAME, fill=FROM_START, group_order=order, pieces=pieces)
                session.fetch(
                    NAME, location_filter=LocationFilter.none(), group_order=order, pieces=pieces
                )
            subgroup = track.open_subgroup(step, has_properties=True, holds_end_of_group=True)
            for object_id in range(rng.randrange(4)):
                octets = rng.choice([0, 1, 64, 300, 1500])
                properties = ((0x3801, b"p" * rng.randrange(90)),) if rng.random() < 0.5 else ()
                payload = payload_of(Location(step, object_id), octets)
                subgroup.publish(object_id, payload, properties=properties)
            if rng.random() < 0.5:
                subgroup.publish(9, status=ObjectStatus.END_OF_GROUP)
            subgroup.close()
            if rng.random() < 0.7:
                pair.settle()
        track.end()
        pair.settle()
        if pieces:
            assert taken.objects == []
            assert (taken.began, taken.open) == ({}, {})
            assert all(closed.fin for closed in taken.closed)
            results.append(sorted(map(as_pieces, taken.whole), key=repr))
        else:
            assert taken.whole == []
            results.append(sorted(map(as_whole, taken.objects), key=repr))
        assert all(e.complete for e in pair.client.take(SubscriptionEnded))
        assert all(e.complete for e in pair.client.take(FetchEnded))
        assert all(e.complete for e in pair.client.take(FillEnded))
        assert pair.leave_behind() == []

    assert results[0] == results[1]
    assert results[0]


def test_an_object_is_told_of_before_it_is_whole() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    taken = taking(pair)
    pair.client.session.subscribe(NAME, pieces=True)
    pair.settle()
    subgroup = track.open_subgroup(3, 5, priority=9)
    begun = subgroup.begin(2, 1000)
    pair.settle()
    subgroup.extend(begun, b"first")
    pair.settle()

    [(stream_id, (event, data))] = taken.began.items()
    assert (event.location, event.length, bytes(data)) == (Location(3, 2), 1000, b"first")
    opened = taken.open[stream_id]
    assert (opened.group_id, opened.subgroup_id, opened.publisher_priority) == (3, 5, 9)
    assert (opened.first_object, opened.end_of_group, opened.has_properties) == (True, False, False)


def test_a_reset_in_the_middle_closes_the_stream_with_its_code() -> None:
    pair = Pair()
    track = pair.server.publish(LocalTrack(NAME))
    taken = taking(pair)
    pair.client.session.subscribe(NAME, pieces=True)
    pair.settle()
    subgroup = track.open_subgroup(0)
    half = subgroup.begin(0, 1000)
    subgroup.extend(half, bytes(300))
    pair.settle()
    subgroup.cut(StreamErrorCode.DELIVERY_TIMEOUT)
    track.end()
    pair.settle()

    [closed] = taken.closed
    assert (closed.fin, closed.code) == (False, StreamErrorCode.DELIVERY_TIMEOUT)
    assert taken.whole == []
    assert pair.client.one(SubscriptionEnded).code == PublishDoneCode.TRACK_ENDED
    assert pair.leave_behind() == []


STREAM = SubgroupHeader(7, 0, None, 128, first_object=True).encode() + b"".join(
    encode_subgroup_object(previous, object_id, payload_length=5) + b"octet"
    for previous, object_id in ((None, 4), (4, 5))
)
FIRST_ENDS, HEAD = len(STREAM) - 7, 4


def lone() -> tuple[Lone, Taken, RequestId]:
    peer = Lone(Role.CLIENT)
    request_id, _ = peer.subscribed(7, pieces=True)
    return peer, Taken(), request_id


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_fin_or_a_reset_at_every_octet(cut: int) -> None:
    for reset in (False, True):
        peer, taken, _ = lone()
        stream_id = peer.uni()
        peer.data(stream_id, STREAM[:cut], fin=not reset)
        if reset:
            peer.reset(stream_id, 0x77)
        for event in peer.events:
            taken.take(event)
        if reset or cut in (HEAD, FIRST_ENDS, len(STREAM)):
            assert peer.close is None
            # Whose stream it is is known with the Subgroup ID: that of the first Object.
            assert [e.fin for e in taken.closed] == [not reset] * (cut > HEAD + 1)
            assert len(taken.whole) == (cut >= FIRST_ENDS) + (cut == len(STREAM))
            for event in peer.seen(ObjectPiece):
                peer.session.consumed(event)
            peer.assert_alive()
        else:
            assert peer.close is not None
            assert peer.close.code == SessionErrorCode.PROTOCOL_VIOLATION


def test_the_subgroup_id_is_that_of_the_first_object_where_the_header_says_so() -> None:
    peer, _, request_id = lone()
    peer.data(peer.uni(), STREAM, fin=True)
    [opened] = peer.seen(SubgroupOpened)

    assert (opened.request_id, opened.subgroup_id, opened.first_object) == (request_id, 4, True)


def test_a_track_that_is_published_to_us_can_be_taken_in_pieces() -> None:
    pair = Pair()
    pair.client.answers = False
    taken = taking(pair)
    track = make_track(0)
    pair.server.session.publish(track)
    publish_group(track, 0, 2, octets=500)
    pair.settle()
    [offered] = pair.client.take(PublishReceived)
    pair.client.session.accept_publish(offered.request_id, pieces=True)
    track.end()
    pair.settle()

    assert [event.location for event, _ in taken.whole] == [Location(0, 0), Location(0, 1)]
    assert [e.fin for e in taken.closed] == [True]
    assert (taken.objects, pair.unreleased(pair.client)) == ([], 0)


# -- windows ---------------------------------------------------------------------------------------


def test_pieces_that_are_not_taken_stop_the_peer_and_taking_them_goes_on() -> None:
    pair = Pair(stream_window=10_000, connection_window=20_000)
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.consumes = False
    taken = taking(pair)
    pair.client.session.subscribe(NAME, pieces=True)
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none(), pieces=True)
    pair.settle()
    publish_group(track, 0, 3, octets=50_000)
    pair.settle()
    waiting = pair.client.take(ObjectPiece)
    assert 5_000 <= sum(len(e.data) for e in waiting) <= 10_000

    while waiting:
        for event in waiting:
            pair.client.session.consumed(event)
        pair.settle()
        waiting = pair.client.take(ObjectPiece)
        assert sum(len(e.data) for e in waiting) <= 10_000
    assert [len(data) for _, data in taken.whole] == [50_000] * 3
    assert pair.unreleased(pair.client) == 0


def test_who_takes_no_pieces_falls_too_far_behind() -> None:
    pair = Pair(client=SessionConfig(max_subscription_octets=10_000))
    pair.server.publish(make_track(1, 5, octets=4000))
    pair.client.consumes = False
    taking(pair)
    pair.client.session.subscribe(NAME, fill=FROM_START, pieces=True)
    pair.settle()

    assert pair.client.one(SubscriptionEnded).code == PublishDoneCode.TOO_FAR_BEHIND
    for event in pair.client.take(ObjectPiece):
        pair.client.session.consumed(event)
    pair.settle()
    assert pair.unreleased(pair.client) == 0


def test_an_object_beyond_the_limit_costs_its_stream_alone() -> None:
    pair = Pair(client=SessionConfig(max_object_octets=1000))
    track = pair.server.publish(LocalTrack(NAME))
    taken = taking(pair)
    pair.client.session.subscribe(NAME, pieces=True)
    pair.settle()
    publish_group(track, 0, 1, octets=2000)
    publish_group(track, 1, 1, octets=500)
    pair.settle()

    assert [(e.fin, e.code) for e in taken.closed] == [
        (False, StreamErrorCode.EXCESSIVE_LOAD), (True, None),
    ]  # fmt: skip
    assert [event.location for event, _ in taken.whole] == [Location(1, 0)]
    assert pair.unreleased(pair.client) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_octet_is_released_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(
        chunk=rng.choice([20, 60, 900]), rng=rng, stream_window=4000, connection_window=9000
    )
    pair.server.budget = rng.choice([200, 5000])
    track = pair.server.publish(LocalTrack(NAME))
    taking(pair)
    pair.client.consumes = rng.random() < 0.5
    requests: list[RequestId] = []
    untaken: list[ObjectPiece] = []
    session = pair.client.session
    for group in range(30):
        match rng.randrange(6):
            case 0:
                requests.append(session.subscribe(NAME, fill=FROM_START, pieces=True))
            case 1:
                everything = LocationFilter.none()
                requests.append(session.fetch(NAME, location_filter=everything, pieces=True))
            case 2 if requests:
                session.cancel(rng.choice(requests))
            case 3 if pair.data_streams(pair.server):
                pair.stop(pair.client, rng.choice(pair.data_streams(pair.server)))
            case 4:
                subgroup = track.open_subgroup(group)
                subgroup.extend(subgroup.begin(0, 2000), bytes(900))
                for _ in range(rng.randrange(20)):
                    pair.drain(pair.server)
                    pair.deliver_one()
                subgroup.cut(StreamErrorCode.DELIVERY_TIMEOUT)
            case _:
                publish_group(track, group, rng.randrange(3), octets=rng.choice([0, 70, 2500]))
        for _ in range(rng.randrange(8)):
            pair.drain(pair.client)
            pair.drain(pair.server)
            pair.deliver_one()
    track.end()
    for _ in range(300):
        pair.advance(11.0)
        if not pair.client.consumes:
            untaken = pair.client.take(ObjectPiece)
            for event in untaken:
                session.consumed(event)
        if session.open_requests == 0 and not untaken:
            break
    pair.settle()

    assert pair.client.closed is None
    assert pair.leave_behind() == []
