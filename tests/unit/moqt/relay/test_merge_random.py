"""Whatever breaks, stalls or overtakes: what one source brings to its end is held, once, and right.

Several publishers have the same Track. Each has got somewhere when it is asked, brings what it has
in a fill and the rest on live streams, and any of them but the last is lost at any moment. Streams
overtake each other as they like.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.merge import Brought, MergedTrack
from moqt.session.budget import ByteBudget
from moqt.session.commands import StreamId
from moqt.session.events import (
    FetchEnded,
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    Via,
)
from moqt.session.localobjects import StoredSubgroup

NAME = FullTrackName.of("a", "track")
REQUEST = RequestId(0)


@dataclass(frozen=True)
class Made:
    """An Object as its publishers made it."""

    location: Location
    subgroup_id: int
    payload: bytes
    is_first: bool
    is_last: bool


def made_at_random(rng: random.Random) -> list[Made]:
    """Make a Track, in the order of its Locations."""
    made = []
    for group_id in range(rng.randint(1, 3)):
        ids = sorted(rng.sample(range(12), rng.randint(1, 8)))
        subgroups = [rng.randrange(rng.choice((1, 1, 3))) for _ in ids]
        for at, (object_id, subgroup_id) in enumerate(zip(ids, subgroups, strict=True)):
            made.append(
                Made(
                    Location(group_id, object_id),
                    subgroup_id,
                    rng.randbytes(rng.choice((0, 1, 3, 9))),
                    is_first=subgroup_id not in subgroups[:at],
                    is_last=subgroup_id not in subgroups[at + 1 :],
                )
            )
    return made


def pieces_of(rng: random.Random, stream_id: StreamId, one: Made, via: Via) -> list[Brought]:
    """Return what comes of an Object, in pieces."""
    events: list[Brought] = [
        ObjectBegan(
            request_id=REQUEST, via=via, stream_id=stream_id, location=one.location,
            subgroup_id=one.subgroup_id, publisher_priority=7, status=ObjectStatus.NORMAL,
            properties=(), length=len(one.payload),
        )
    ]  # fmt: skip
    at = 0
    while at < len(one.payload):
        size = rng.randint(1, len(one.payload) - at)
        data = one.payload[at : at + size]
        events.append(ObjectPiece(request_id=REQUEST, stream_id=stream_id, data=data))
        at += size
    return events


@dataclass
class Publisher:
    """A source of the Track, and what it has yet to bring, stream by stream."""

    number: int
    streams: list[list[Brought]] = field(default_factory=list)

    def next(self, rng: random.Random) -> Brought | None:
        """Take the next event of any stream."""
        self.streams = [stream for stream in self.streams if stream]
        return rng.choice(self.streams).pop(0) if self.streams else None


class Scene:
    """The Track at a relay, its publishers, and what its subscribers were promised."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.made = made_at_random(rng)
        self.budget = ByteBudget(1 << 20)
        self.track = MergedTrack(NAME, budget=self.budget)
        self.ids: Iterator[int] = iter(range(3, 1 << 20, 4))
        self.publishers: list[Publisher] = []
        self.promised: list[Location] = []
        """Where subscribers of ours are live from."""

    def join(self) -> None:
        """A publisher that has got somewhere is asked."""
        rng, at = self.rng, self.rng.randint(0, len(self.made))
        largest = self.made[at - 1].location if at else None
        publisher = Publisher(self.track.join(largest=largest, filling=at > 0))
        if at:
            stream_id = StreamId(next(self.ids))
            past: list[Brought] = []
            for one in self.made[:at]:
                past += pieces_of(rng, stream_id, one, Via.FILL)
            past.append(FillEnded(request_id=REQUEST, fill_id=REQUEST, complete=True, code=None))
            publisher.streams.append(past)
        live: dict[tuple[int, int], list[Brought]] = {}
        for one in self.made[at:]:
            place = one.location.group, one.subgroup_id
            if place not in live:
                stream_id = StreamId(next(self.ids))
                live[place] = [
                    SubgroupOpened(
                        request_id=REQUEST, stream_id=stream_id, group_id=place[0],
                        subgroup_id=place[1], publisher_priority=7, end_of_group=False,
                        first_object=one.is_first, has_properties=False,
                    )
                ]  # fmt: skip
            opened = live[place][0]
            assert isinstance(opened, SubgroupOpened)
            live[place] += pieces_of(rng, opened.stream_id, one, Via.SUBGROUP)
            if one.is_last:
                live[place].append(
                    SubgroupClosed(
                        request_id=REQUEST, stream_id=opened.stream_id, fin=True, code=None
                    )
                )
        publisher.streams += live.values()
        self.publishers.append(publisher)

    def go_on(self, publisher: Publisher) -> bool:
        """Have the next event of a publisher come; return whether there was one."""
        event = publisher.next(self.rng)
        if event is not None:
            self.track.take(publisher.number, event, 0.0)
        return event is not None

    def finish(self, publisher: Publisher) -> None:
        """A publisher brings all that it has, and the end of the Track."""
        while self.go_on(publisher):
            pass
        self.track.leave(publisher.number, PublishDoneCode.TRACK_ENDED, "", 0.0)

    def subscribe(self) -> None:
        """Somebody subscribes: what comes after the Largest Object is to be live for it."""
        self.promised.append(self.track.local.largest or Location(0, -1))

    def check(self) -> None:
        """All is there, and what was promised came on live streams."""
        local = self.track.local
        assert self.track.is_complete
        held = {
            Location(group_id, obj.object_id): (subgroup, b"".join(obj.parts))
            for group_id in {one.location.group for one in self.made}
            for subgroup, obj in local.objects_of(group_id)
        }
        expected = {one.location: one.payload for one in self.made}
        assert {at: payload for at, (_, payload) in held.items()} == expected
        assert self.budget.used == sum(map(len, expected.values()))
        for at in (one.location for one in self.made):
            if any(at > start for start in self.promised):
                assert not isinstance(held[at][0], StoredSubgroup)
        last = {(m.location.group, m.subgroup_id): m.location.object for m in self.made}
        for _, subgroup in local.subgroups_since(0):
            assert subgroup.closed
            if subgroup.cut_code is None:
                ended_at = subgroup.objects[-1].object_id
                assert ended_at == last[subgroup.group_id, subgroup.subgroup_id]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 40))
def test_what_one_source_brings_to_its_end_is_held_and_live(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(rng)
    scene.join()
    while rng.random() < 0.97:
        move = rng.random()
        if move < 0.05 and len(scene.publishers) < 4:
            scene.join()
        elif move < 0.08:
            scene.subscribe()
        elif move < 0.10 and len(scene.publishers) > 1:
            lost = scene.publishers.pop(rng.randrange(len(scene.publishers)))
            scene.track.leave(lost.number, PublishDoneCode.INTERNAL_ERROR, "lost", 0.0)
        elif not scene.go_on(rng.choice(scene.publishers)):
            break
    survivor = scene.publishers.pop(rng.randrange(len(scene.publishers)))
    for lost in scene.publishers:
        scene.track.leave(lost.number, PublishDoneCode.INTERNAL_ERROR, "lost", 0.0)
    scene.finish(survivor)
    scene.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 40))
def test_a_track_goes_on_with_a_publisher_that_comes_after_all_were_lost(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(rng)
    for _ in range(rng.randint(1, 4)):
        scene.join()
        scene.subscribe()
        for _ in range(rng.randint(0, 40)):
            scene.go_on(scene.publishers[0])
        scene.track.lose(scene.publishers.pop().number, 0.0)
    scene.join()
    scene.finish(scene.publishers[0])
    scene.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 40))
def test_what_was_lost_is_missing_until_a_fetch_has_brought_it(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(rng)
    scene.join()
    for _ in range(rng.randint(1, 30)):
        scene.go_on(scene.publishers[0])
    scene.track.lose(scene.publishers.pop().number, 0.0)
    largest = scene.made[-1].location
    keeper = scene.track.join(largest=largest, filling=False)
    for first, last in scene.track.missing():
        number = scene.track.ask(first, last)
        stream_id = StreamId(next(scene.ids))
        for one in scene.made:
            if first <= one.location <= last:
                for event in pieces_of(rng, stream_id, one, Via.FETCH):
                    scene.track.take(number, event, 0.0)
        ended = FetchEnded(request_id=REQUEST, complete=True, code=None)
        scene.track.take(number, ended, 0.0)
        scene.track.leave(number, None, "", 0.0)
    assert not scene.track.missing()
    scene.track.leave(keeper, PublishDoneCode.TRACK_ENDED, "", 0.0)
    scene.check()
