"""Which waiting octets leave next: priorities, turns, flow control, and how many streams.

Here the server's budget is one write at a time, so that the order of commands is the order of
decisions.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moqt.codepoints import GroupOrder, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import SendStreamData, StreamId
from moqt.session.config import SessionConfig
from moqt.session.events import (
    FetchEnded,
    ObjectReceived,
    PeerRequestEnded,
    RequestId,
    SubscribeAccepted,
)
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.session.sendqueue import RESERVED_STREAMS, OpenStreams
from moqt.session.streams import is_unidirectional
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters
from tests.session.pair import DESCENDING, Pair, make_track, payload_of

FROM_START = LocationFilter.absolute_start(0, 0)
QUANTUM = 1000


def quanta(pair: Pair, count: int, credit: Any = None) -> list[tuple[StreamId, int]]:
    """Let the server send, one quantum a time; return which streams sent how many octets."""
    sent: list[tuple[StreamId, int]] = []
    for _ in range(count):
        session = pair.server.session
        options = {} if credit is None else {"credit": credit}
        for command in session.data_to_send(QUANTUM, **options):
            pair._carry_out(pair.server, command)
            if isinstance(command, SendStreamData) and is_unidirectional(command.stream_id):
                sent.append((command.stream_id, len(command.data)))
    return sent


def name(text: str) -> FullTrackName:
    return FullTrackName.of("kvcs-1", text)


def serving(pair: Pair, *names: str, **options: Any) -> list[LocalTrack]:
    tracks = [pair.server.publish(LocalTrack(name(text))) for text in names]
    for track in tracks:
        pair.client.session.subscribe(track.name, **options)
    pair.settle()
    pair.client.take()
    return tracks


def put(
    track: LocalTrack, group: int, *, count: int = 1, octets: int = 64, **options: Any
) -> LocalSubgroup:
    subgroup = track.open_subgroup(group, **options)
    for object_id in range(count):
        subgroup.publish(object_id, payload_of(Location(group, object_id), octets))
    return subgroup


def order_of_arrival(pair: Pair) -> list[tuple[bytes, Location]]:
    """Return the Track Names and Locations of Objects in the order in which they left."""
    events = pair.client.take(ObjectReceived)
    tracks = {0: b"a", 2: b"b", 4: b"c", 6: b"d"}
    return [(tracks[e.request_id], e.location) for e in events]


def settle_one_by_one(pair: Pair) -> None:
    pair.server.budget = 1
    pair.settle()


# -- priorities ------------------------------------------------------------------------------------


def test_subscriber_priority_comes_before_publisher_priority() -> None:
    pair = Pair()
    pair.server.budget = 0
    low, high = (pair.server.publish(LocalTrack(name(text))) for text in "ab")
    pair.client.session.subscribe(low.name, priority=10)
    pair.client.session.subscribe(high.name, priority=9)
    pair.settle()
    put(low, 0, priority=0)
    put(high, 0, priority=255)

    settle_one_by_one(pair)

    assert [track for track, _ in order_of_arrival(pair)] == [b"b", b"a"]


def test_publisher_priority_comes_before_group_order() -> None:
    pair = Pair()
    [track] = serving(pair, "a")
    for group, priority in ((0, 30), (1, 10), (2, 20)):
        put(track, group, priority=priority)

    settle_one_by_one(pair)

    assert [at.group for _, at in order_of_arrival(pair)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("order", "groups"), [(GroupOrder.ASCENDING, [0, 1, 2]), (DESCENDING, [2, 1, 0])]
)
def test_groups_of_equal_priority_leave_in_group_order(
    order: GroupOrder, groups: list[int]
) -> None:
    pair = Pair()
    [track] = serving(pair, "a", group_order=order)
    for group in range(3):
        put(track, group)

    settle_one_by_one(pair)

    assert [at.group for _, at in order_of_arrival(pair)] == groups


def test_subgroups_of_a_group_leave_in_order_of_their_ids() -> None:
    pair = Pair()
    [track] = serving(pair, "a")
    for subgroup_id in (5, 0, 3):
        subgroup = track.open_subgroup(0, subgroup_id)
        subgroup.publish(subgroup_id, payload_of(Location(0, subgroup_id)))

    settle_one_by_one(pair)

    assert [at.object for _, at in order_of_arrival(pair)] == [0, 3, 5]


def test_a_fill_leaves_before_what_is_live_in_its_group_and_after_lower_groups_only() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(2, 2, ended=False, name=name("a")))
    current = put(track, 2)
    pair.server.budget = 0
    pair.client.session.subscribe(track.name, fill=FROM_START)
    pair.settle()
    current.publish(1, payload_of(Location(2, 1)))

    settle_one_by_one(pair)

    assert [at for _, at in order_of_arrival(pair)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


def test_a_fill_of_another_group_order_leaves_after_what_is_live() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(2, 1, ended=False, name=name("a")))
    pair.server.budget = 0
    fill = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START, P.GROUP_ORDER: 2}))
    pair.client.session.subscribe(track.name, fill=fill)
    pair.settle()
    put(track, 2)

    settle_one_by_one(pair)

    assert [at.group for _, at in order_of_arrival(pair)] == [2, 1, 0]


def test_a_fill_can_be_less_urgent_than_its_subscription() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(2, 1, ended=False, name=name("a")))
    pair.server.budget = 0
    inner = Parameters({P.LOCATION_FILTER: FROM_START, P.SUBSCRIBER_PRIORITY: 200})
    pair.client.session.subscribe(track.name, fill=FillParameters(inner))
    pair.settle()
    put(track, 2, priority=255)

    settle_one_by_one(pair)

    assert [at.group for _, at in order_of_arrival(pair)] == [2, 0, 1]


def test_a_new_urgent_object_overtakes_what_is_being_sent() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    slow, urgent = serving(pair, "a", "b")
    put(slow, 0, octets=200_000, priority=127)
    before = quanta(pair, 5)

    put(urgent, 0, octets=1500, priority=0)
    after = quanta(pair, 5)

    [big] = {stream_id for stream_id, _ in before}
    urgent_octets = [octets for stream_id, octets in after if stream_id != big]
    assert sum(urgent_octets) >= 1500
    assert [stream_id for stream_id, _ in after].index(big) == len(urgent_octets)


def test_a_change_of_priority_takes_effect_at_the_next_write() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    first, second = serving(pair, "a", "b")
    put(first, 0, octets=200_000, priority=10)
    put(second, 0, octets=200_000, priority=20)
    [(stream_a, _), *_] = quanta(pair, 3)

    pair.client.session.update(RequestId(2), Parameters({P.SUBSCRIBER_PRIORITY: 0}))
    pair.drain(pair.client)
    while pair.deliver_one():
        pass

    assert {stream_id for stream_id, _ in quanta(pair, 5)}.isdisjoint({stream_a})


# -- turns -----------------------------------------------------------------------------------------


def test_requests_of_equal_priority_take_turns() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    for track in serving(pair, "a", "b", "c"):
        put(track, 0, octets=100_000)

    sent = quanta(pair, 60)

    octets = {s: sum(n for t, n in sent if t == s) for s, _ in sent}
    assert len(octets) == 3
    assert max(octets.values()) - min(octets.values()) <= 2 * QUANTUM


def test_two_fetches_of_equal_priority_end_at_about_the_same_time() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    for text in "ab":
        track = make_track(1, 50, octets=1000, name=name(text))
        pair.server.publish(track)
        pair.client.session.fetch(track.name, location_filter=LocationFilter.none())
    pair.drain(pair.client)
    while pair.deliver_one():
        pass
    for event in pair.server.session.events():
        pair.server.handle(event)

    sent = quanta(pair, 100)

    halves = [stream_id for stream_id, _ in sent[: len(sent) // 2]]
    assert 0.4 < halves.count(halves[0]) / len(halves) < 0.6


def test_one_that_comes_back_gets_no_more_than_its_turn() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    steady, bursty = serving(pair, "a", "b")
    put(steady, 0, octets=1_000_000)
    quanta(pair, 100)
    put(bursty, 0, octets=100_000)

    sent = [stream_id for stream_id, n in quanta(pair, 40) if n > 100]

    assert 0.3 < sent.count(sent[0]) / len(sent) < 0.7


# -- flow control ----------------------------------------------------------------------------------


class Credit:
    """Flow control that a test says."""

    def __init__(self, allowed: Callable[[StreamId], int]) -> None:
        self._allowed = allowed

    def stream(self, stream_id: StreamId) -> int:
        return self._allowed(stream_id)


def test_a_blocked_stream_is_skipped_and_comes_back_with_its_credit() -> None:
    pair = Pair(server=SessionConfig(write_quantum=QUANTUM))
    urgent, other = serving(pair, "a", "b")
    put(urgent, 0, octets=50_000, priority=0)
    [(blocked, _)] = quanta(pair, 1)[:1]
    put(other, 0, octets=5_000, priority=200)

    frozen = Credit(lambda stream_id: 0 if stream_id == blocked else 1 << 20)
    skipped = quanta(pair, 5, frozen)
    resumed = quanta(pair, 1)

    assert blocked not in {s for s, _ in skipped}
    assert len(skipped) >= 5
    assert pair.server.session.has_data_waiting
    assert {s for s, _ in resumed} == {blocked}


def test_the_budget_and_the_credit_of_a_stream_are_kept() -> None:
    pair = Pair(server=SessionConfig(write_quantum=1 << 16))
    [track] = serving(pair, "a")
    put(track, 0, count=50, octets=10_000)
    session = pair.server.session

    for budget, credit, most in ((5000, 1 << 20, 5000), (1 << 20, 700, 700), (0, 1 << 20, 0)):
        allowed = {"left": credit}
        octets = 0
        for command in session.data_to_send(budget, Credit(lambda s, a=allowed: a["left"])):  # type: ignore[misc]
            pair._carry_out(pair.server, command)
            if isinstance(command, SendStreamData):
                octets += len(command.data)
                allowed["left"] -= len(command.data)
        assert octets <= most + 64  # the head of an Object is not cut

    assert session.has_data_waiting


def test_small_objects_leave_as_one_piece_and_a_large_one_is_not_copied() -> None:
    pair = Pair(server=SessionConfig(write_quantum=1 << 16))
    [track] = serving(pair, "a")
    subgroup, large = track.open_subgroup(0), bytes(1 << 15)
    for object_id in range(4):
        subgroup.publish(object_id, b"h" * 68, bytes(3000))
    subgroup.publish(4, large)
    small, whole = (
        command.data
        for command in pair.server.session.data_to_send()
        if isinstance(command, SendStreamData)
    )

    assert len(small) > 4 * 3068
    assert whole is large


def test_a_fin_and_small_objects_make_progress_with_the_smallest_budget() -> None:
    pair = Pair()
    [track] = serving(pair, "a")
    put(track, 0, count=20).close()
    track.end()
    pair.server.budget = 1
    pair.settle()

    assert len(pair.client.take(ObjectReceived)) == 20
    assert pair.leave_behind() == []


def test_control_messages_never_wait_for_the_budget() -> None:
    pair = Pair()
    track = pair.server.publish(make_track(1, name=name("a")))
    pair.server.budget = 0
    pair.client.session.subscribe(track.name, fill=FROM_START)
    pair.settle()

    assert pair.client.one(SubscribeAccepted).fill_expected
    assert pair.client.take(ObjectReceived) == []


def test_nothing_waits_where_nothing_can_come() -> None:
    pair = Pair()
    [track] = serving(pair, "a")
    put(track, 0)
    pair.settle()

    assert not pair.server.session.has_data_waiting


# -- how many streams are open ---------------------------------------------------------------------


LIMIT = 4


def crowded(pair: Pair, *, octets: int = 100_000) -> LocalTrack:
    """Return a Track with many Groups, of which as many are being sent as may be."""
    [track] = serving(pair, "a")
    for group in range(40):
        put(track, group, octets=octets, priority=100)
    return track


def streams_of(sent: list[tuple[StreamId, int]]) -> list[StreamId]:
    return list(dict.fromkeys(stream_id for stream_id, _ in sent))


def test_few_streams_are_open_while_they_have_something_to_send() -> None:
    config = SessionConfig(max_data_streams=LIMIT, write_quantum=QUANTUM)
    pair = Pair(server=config)
    tracks = serving(pair, *"abcd")
    for track in tracks:
        for group in range(10):
            put(track, group, octets=20_000, priority=100)

    sent = quanta(pair, 60)

    assert len(streams_of(sent)) == LIMIT


def test_an_urgent_stream_is_opened_beyond_the_limit() -> None:
    pair = Pair(server=SessionConfig(max_data_streams=LIMIT, write_quantum=QUANTUM))
    tracks = serving(pair, *"abcd")
    for track in tracks:
        put(track, 0, octets=50_000, priority=100)
    before = streams_of(quanta(pair, 8))
    put(tracks[0], 1, octets=500, priority=50)

    after = streams_of(quanta(pair, 1))

    assert len(before) == LIMIT
    assert after[0] not in before


def test_idle_streams_keep_no_other_from_being_opened() -> None:
    pair = Pair(server=SessionConfig(max_data_streams=LIMIT))
    track = crowded(pair, octets=64)  # every Group stays open, and has nothing more to send

    pair.settle()

    assert len(pair.client.take(ObjectReceived)) == 40
    assert track.largest == Location(39, 0)


def test_blocked_streams_keep_no_other_from_being_opened() -> None:
    pair = Pair(server=SessionConfig(max_data_streams=LIMIT, write_quantum=QUANTUM))
    crowded(pair)
    blocked: set[StreamId] = set()

    def allowed(stream_id: StreamId) -> int:
        return 0 if stream_id in blocked else 1 << 20

    for _ in range(10):
        blocked |= set(streams_of(quanta(pair, 1, Credit(allowed))))

    assert len(blocked) == 10


def test_a_reserve_of_streams_is_kept_for_what_is_urgent_and_for_the_past() -> None:
    pair = Pair(server=SessionConfig(max_data_streams=LIMIT), max_streams=LIMIT + 30)
    past = pair.server.publish(make_track(1, 1, name=name("past")))
    manifest = pair.server.publish(LocalTrack(name("manifest")))
    pair.client.session.subscribe(manifest.name)
    [track] = serving(pair, "a")
    for group in range(60):
        put(track, group, priority=100)
    pair.settle()
    opened = len(pair.data_streams(pair.server))
    assert LIMIT < opened <= LIMIT + 30 - RESERVED_STREAMS

    put(manifest, 0, priority=0)
    pair.client.session.fetch(past.name, location_filter=LocationFilter.none())
    pair.settle()

    assert len(pair.data_streams(pair.server)) == opened + 2


def test_streams_that_end_in_any_way_make_room_for_others() -> None:
    pair = Pair(server=SessionConfig(max_data_streams=LIMIT, write_quantum=QUANTUM))
    for round_ in range(10):
        track = pair.server.publish(LocalTrack(name(f"track {round_}")))
        request_id = pair.client.session.subscribe(track.name)
        pair.settle()
        subgroups = [put(track, group, octets=5000) for group in range(LIMIT)]
        quanta(pair, 6)
        match round_ % 4:
            case 0:
                pair.client.session.cancel(request_id)
            case 1:
                for stream_id in pair.data_streams(pair.server)[-LIMIT:]:
                    pair.stop(pair.client, stream_id)
            case 2:
                track.end()
            case 3:
                for subgroup in subgroups:
                    subgroup.close()
                track.end()
        pair.settle()
        if round_ % 4 == 1:
            pair.client.session.cancel(request_id)
        pair.advance(11.0)  # some streams were reset before anybody saw whose they are

    assert len(pair.server.session._context.open_streams) == 0
    assert pair.leave_behind() == []


def test_without_a_stream_from_the_peer_nothing_is_opened() -> None:
    streams = OpenStreams(2)

    urgent: Any = SimpleNamespace(serves_past=True, rank=lambda: (0,) * 6)

    assert not streams.may_open(urgent, StreamId(7), Credit(lambda s: 0))
    assert streams.may_open(urgent, StreamId(7), Credit(lambda s: 1))


# -- who takes nothing -----------------------------------------------------------------------------


def test_a_request_waits_where_its_reader_stands_and_nowhere_once_it_has_everything() -> None:
    pair = Pair(stream_window=1000)
    session = pair.server.session
    track = pair.server.publish(make_track(1, 3, octets=900))
    pair.client.consumes = False
    pair.client.session.subscribe(track.name, fill=FROM_START)
    pair.client.session.fetch(track.name, location_filter=FROM_START)
    pair.settle()

    stands_at = session.waits_at(RequestId(0))
    assert stands_at is not None
    assert 1000 <= stands_at < 1900  # headers need no reader
    assert session.waits_at(RequestId(2)) == stands_at
    assert session.waits_at(RequestId(4)) is None
    pair.client.consumes = True
    for event in pair.client.take(ObjectReceived):
        pair.client.session.consumed(event)
    pair.settle()
    assert [session.waits_at(RequestId(number)) for number in (0, 2)] == [None, None]


@pytest.mark.parametrize("max_streams", [1, 128])
def test_a_fetch_that_is_served_can_be_ended_by_a_reset(max_streams: int) -> None:
    pair = Pair(stream_window=1000, max_streams=max_streams)
    track = pair.server.publish(make_track(1, 3, octets=900))
    pair.client.consumes = False
    request_id = pair.client.session.fetch(track.name, location_filter=FROM_START)
    pair.settle()

    assert pair.server.session.end_fetch(request_id, StreamErrorCode.TOO_FAR_BEHIND)
    pair.settle()
    ended = pair.client.one(FetchEnded)
    assert (ended.complete, ended.code) == (False, StreamErrorCode.TOO_FAR_BEHIND)
    assert pair.server.one(PeerRequestEnded).request_id == request_id
    assert not pair.server.session.end_fetch(request_id, StreamErrorCode.TOO_FAR_BEHIND)
    for event in pair.client.take(ObjectReceived):
        pair.client.session.consumed(event)
    pair.settle()
    assert pair.leave_behind() == []
