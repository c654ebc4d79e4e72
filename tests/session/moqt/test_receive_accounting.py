"""Every octet that arrives leaves the receive windows exactly once, whatever happens.

And what an application does not take stops the peer, but never for good.
"""

import os
import random

import pytest

from moqt.codepoints import GroupOrder, StreamErrorCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session import intake
from moqt.session.commands import ReleaseCredit
from moqt.session.config import Role, SessionConfig
from moqt.session.events import ObjectReceived, RequestId, SubscriptionEnded
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from moqt.wire.streamtype import padding_stream
from tests.session.lone import Lone
from tests.session.pair import NAME, Pair, locations, make_track, payload_of, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)
EARLY = 2000  # stands for RELEASE_EARLY_ABOVE, so that small Objects show what large ones do


@pytest.fixture(autouse=True)
def _release_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RELEASE_EARLY_ABOVE", EARLY)


class Scenario:
    """A random life of a pair: requests, Objects, cancels, resets, an application that dawdles."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pair = Pair(
            client=SessionConfig(
                max_subscription_octets=rng.choice([5_000, 1 << 20]),
                max_object_octets=rng.choice([900, 1 << 20]),
                max_partial_octets=rng.choice([3_000, 1 << 20]),
                max_parked_octets=rng.choice([500, 1 << 20]),
                max_parked_streams=rng.choice([2, 64]),
            ),
            server=SessionConfig(max_data_streams=rng.choice([2, 32]), write_quantum=256),
            chunk=rng.choice([7, 60, 500]),
            rng=rng,
            stream_window=rng.choice([4_000, 1 << 20]),
            connection_window=rng.choice([8_000, 1 << 20]),
        )
        self.pair.client.consumes = False
        self.pair.server.budget = rng.choice([50, 5_000])
        self.tracks = [
            self.pair.server.publish(
                LocalTrack(FullTrackName.of("kvcs-1", str(n)), retain=rng.random() < 0.7)
            )
            for n in range(3)
        ]
        self.open: list[LocalSubgroup] = []
        self.requests: list[RequestId] = []
        self.untaken: list[ObjectReceived] = []
        self.held: set[int] = set()
        self.pair.held = lambda end, stream_id: stream_id in self.held

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choice(self.DEEDS)(self)
            for end in self.pair.ends:
                self.pair.drain(end)
            self.untaken += self.pair.client.take(ObjectReceived)
            for _ in range(self.rng.randrange(6)):
                self.pair.deliver_one()

    def finish(self) -> None:
        """Let everything come to its end."""
        self.held.clear()
        for track in self.tracks:
            track.end()
        for _ in range(100):
            self.take_all()
            self.pair.advance(11.0)
            self.untaken += self.pair.client.take(ObjectReceived)
            if not self.untaken and not any(e.session.open_requests for e in self.pair.ends):
                return
        raise AssertionError(f"still open: {self.pair.client.session._requests.by_id}")

    # -- deeds ------------------------------------------------------------------------------------

    def publish(self) -> None:
        track = self.rng.choice(self.tracks)
        group = track.opened
        subgroup = track.open_subgroup(group, priority=self.rng.choice([0, 7]))
        for object_id in range(self.rng.randrange(1, 5)):
            subgroup.publish(object_id, bytes(self.rng.choice([0, 1, 40, 1200, 2500])))
        self.open.append(subgroup)

    def extend(self) -> None:
        if self.open:
            subgroup = self.rng.choice(self.open)
            if not subgroup.closed:
                subgroup.publish(len(subgroup.objects), bytes(self.rng.choice([3, 800])))
                if self.rng.random() < 0.5:
                    subgroup.close()

    def subscribe(self) -> None:
        track, rng = self.rng.choice(self.tracks), self.rng
        self.requests.append(
            self.pair.client.session.subscribe(
                track.name,
                fill=rng.choice([None, FROM_START]),
                priority=rng.choice([1, 128]),
                group_order=rng.choice(list(GroupOrder)),
            )
        )

    def offer(self) -> None:
        self.pair.client.answers = self.rng.random() < 0.7
        self.requests.append(self.pair.server.session.publish(self.rng.choice(self.tracks)))

    def fetch(self) -> None:
        self.requests.append(
            self.pair.client.session.fetch(
                self.rng.choice(self.tracks).name, location_filter=LocationFilter.none()
            )
        )

    def cancel(self) -> None:
        if self.requests:
            self.pair.client.session.cancel(self.rng.choice(self.requests))

    def stop(self) -> None:
        streams = self.pair.data_streams(self.pair.server)
        if streams:
            self.pair.stop(self.pair.client, self.rng.choice(streams), StreamErrorCode.CANCELLED)

    def take(self) -> None:
        for _ in range(min(len(self.untaken), self.rng.randrange(5))):
            event = self.untaken.pop(self.rng.randrange(len(self.untaken)))
            self.pair.client.session.consumed(event)

    def take_all(self) -> None:
        for event in self.untaken:
            self.pair.client.session.consumed(event)
        self.untaken.clear()

    def hold(self) -> None:
        if self.held and self.rng.random() < 0.5:
            self.held.clear()
        else:
            self.held |= set(self.rng.sample(range(0, 60), 3))

    DEEDS = (publish, publish, extend, subscribe, offer, fetch, cancel, stop, take, take_all, hold)


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVCS_TEST_SEEDS", "40"))))
def test_every_octet_is_released_exactly_once_in_the_end(seed: int) -> None:
    scenario = Scenario(random.Random(seed))
    scenario.run(60)
    assert scenario.pair.client.closed is None
    scenario.finish()

    assert scenario.pair.client.closed is None
    assert scenario.pair.server.closed is None
    assert scenario.pair.leave_behind() == []
    assert scenario.pair.unreleased(scenario.pair.client) == 0


def test_heads_are_released_at_once_and_payloads_when_they_are_taken() -> None:
    peer = Lone(Role.CLIENT)
    peer.subscribed(7)
    stream_id = peer.uni()
    peer.data(stream_id, bytes.fromhex("10 07 00 80 00 03 616161 00 02 62"))
    assert [c for c in peer.commands if isinstance(c, ReleaseCredit)][-1] == ReleaseCredit(
        stream_id, 4 + 2 + 2
    )

    peer.session.consumed(peer.seen(ObjectReceived)[0])
    peer.drain()
    assert peer.commands[-1] == ReleaseCredit(stream_id, 3)
    peer.data(stream_id, b"b", fin=True)
    peer.session.consumed(peer.seen(ObjectReceived)[1])
    peer.drain()
    assert peer.commands[-1] == ReleaseCredit(stream_id, 2)


def test_the_windows_are_moved_once_for_all_that_was_taken_of_a_stream() -> None:
    peer = Lone(Role.CLIENT)
    peer.subscribed(7)
    first, second = peer.uni(), peer.uni()
    peer.data(first, bytes.fromhex("10 07 00 80 00 03 616161 00 02 6262"))
    peer.data(second, bytes.fromhex("10 07 01 80 00 04 63636363"))
    peer.commands.clear()
    for event in peer.seen(ObjectReceived):
        peer.session.consumed(event)
    peer.drain()

    assert peer.commands == [ReleaseCredit(first, 5), ReleaseCredit(second, 4)]


def test_padding_is_released_as_it_comes() -> None:
    peer = Lone(Role.CLIENT)
    stream_id = peer.uni()
    for octets in (padding_stream(10_000), bytes(10_000)):
        peer.data(stream_id, octets)
        assert peer.commands[-1] == ReleaseCredit(stream_id, len(octets))


# -- backpressure ----------------------------------------------------------------------------------


def test_an_application_that_takes_nothing_stops_the_peer_and_goes_on_where_it_stopped() -> None:
    pair = Pair(stream_window=10_000, connection_window=20_000)
    pair.server.publish(make_track(1, 200, octets=1000))
    pair.client.consumes = False
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()
    first = pair.client.take(ObjectReceived)
    assert 5 <= len(first) <= 10

    received = list(first)
    while first:
        for event in first:
            pair.client.session.consumed(event)
        pair.settle()
        first = pair.client.take(ObjectReceived)
        received += first

    assert locations(received) == whole(1, 200)
    assert pair.leave_behind() == []


def test_what_is_held_is_bounded_by_the_windows_over_many_streams() -> None:
    pair = Pair(stream_window=10_000, connection_window=20_000)
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.consumes = False
    pair.client.session.subscribe(NAME)
    pair.settle()
    for group in range(50):
        publish_group(track, group, 1, octets=1000)
    pair.settle()
    held = pair.client.take(ObjectReceived)

    assert sum(len(e.payload) for e in held) <= 20_000
    assert pair.client.take(SubscriptionEnded) == []
    while held:
        for event in held:
            pair.client.session.consumed(event)
        pair.settle()
        held = pair.client.take(ObjectReceived)
    assert pair.unreleased(pair.client) == 0


@pytest.mark.parametrize("taken_at_once", [True, False])
def test_an_object_larger_than_the_window_arrives(taken_at_once: bool) -> None:
    pair = Pair(stream_window=10_000, connection_window=10_000)
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.consumes = taken_at_once
    pair.client.session.subscribe(NAME)
    pair.settle()
    subgroup = track.open_subgroup(0)
    sizes = (100, 50_000, 100)
    for object_id, size in enumerate(sizes):
        subgroup.publish(object_id, payload_of(Location(0, object_id), size))

    received: list[int] = []
    for _ in sizes:
        pair.settle()
        for event in pair.client.take(ObjectReceived):
            received.append(len(event.payload))
            if not taken_at_once:
                pair.client.session.consumed(event)

    assert received == list(sizes)
    pair.settle()
    assert pair.unreleased(pair.client) == 0


def test_an_object_that_waits_for_another_stream_to_be_taken_goes_on_then() -> None:
    pair = Pair(stream_window=10_000, connection_window=40_000)
    track = pair.server.publish(LocalTrack(NAME))
    pair.client.consumes = False
    pair.client.session.subscribe(NAME)
    pair.settle()
    publish_group(track, 0, 1, octets=500)
    pair.settle()
    publish_group(track, 1, 1, octets=30_000)
    pair.settle()
    [small] = pair.client.take(ObjectReceived)  # its stream is over by now

    pair.client.session.consumed(small)
    pair.settle()

    assert len(pair.client.one(ObjectReceived).payload) == 30_000


def test_many_unfinished_objects_do_not_use_up_the_connection_window() -> None:
    # Twenty requests take turns, each Object a third of what all of them may have under way.
    pair = Pair(
        stream_window=8_000, connection_window=10_000, server=SessionConfig(write_quantum=100)
    )
    for number in range(20):
        track = LocalTrack(FullTrackName.of("kvcs-1", str(number)))
        publish_group(track, 0, 2, octets=3000)
        track.end()
        pair.server.publish(track)
        pair.client.session.subscribe(track.name, fill=FROM_START)

    pair.settle()

    assert len(pair.client.take(ObjectReceived)) == 40
    assert pair.leave_behind() == []


def test_a_datagram_takes_no_window_and_still_counts_as_unread() -> None:
    peer = Lone(Role.CLIENT, config=SessionConfig(max_subscription_octets=1000))
    peer.subscribed(7)
    for number in range(3):
        peer.session.receive_datagram(bytes([0, 7, 0, number, 128]) + bytes(400))
    peer.drain()

    assert len(peer.seen(ObjectReceived)) == 3
    assert len(peer.seen(SubscriptionEnded)) == 1
    for event in peer.seen(ObjectReceived):
        peer.session.consumed(event)
    peer.drain()
    assert not [c for c in peer.commands if isinstance(c, ReleaseCredit) and c.stream_id & 2]
