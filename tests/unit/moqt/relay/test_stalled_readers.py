"""Who takes nothing at a relay while others are refused for want of room."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from moqt.codepoints import PublishDoneCode, StreamErrorCode
from moqt.names import FullTrackName
from moqt.relay.holdings import Holdings
from moqt.relay.neighbours import Neighbours
from moqt.relay.options import RelayOptions
from moqt.relay.readers import Readers
from moqt.relay.track import RelayedTrack
from moqt.session.events import RequestId

STALL_S = 10.0


@dataclass(eq=False)
class Reading:
    """A session with a consumer, and its connection: what waits, and what was ended."""

    waits: dict[int, int | None] = field(default_factory=dict)
    """Octets that each request was sent; None: nothing waits for it."""

    ended: list[tuple[int, PublishDoneCode | StreamErrorCode]] = field(default_factory=list)
    subscriptions: set[int] = field(default_factory=set)
    woken: int = 0
    closed: None = None

    @property
    def session(self) -> "Reading":
        return self

    def waits_at(self, request_id: int) -> int | None:
        return self.waits[request_id]

    def end_subscription(self, request_id: int, code: PublishDoneCode, reason: str) -> None:
        if request_id in self.subscriptions:
            self.ended.append((request_id, code))

    def end_fetch(self, request_id: int, code: StreamErrorCode) -> None:
        if request_id not in self.subscriptions:
            self.ended.append((request_id, code))

    def wake(self) -> None:
        self.woken += 1


class House:
    """A relay that has room for one octet, and no more."""

    def __init__(self) -> None:
        options = RelayOptions(cache_octets=1)
        self.holdings = Holdings(options, Neighbours())
        self.readers = Readers(self.holdings, max_behind_octets=1, stall_s=STALL_S)

    def keep(self, publication: str, track: str = "k") -> RelayedTrack:
        kept = self.holdings.to_receive(FullTrackName.of(publication, track))
        assert kept is not None
        return kept

    def fill(self) -> None:
        self.holdings.budget.take(1)

    def refuse(self) -> None:
        assert self.holdings.to_receive(FullTrackName.of("another", "k")) is None

    def reads(
        self, track: RelayedTrack, who: Any, number: int, at: int | None, *, is_fetch: bool = False
    ) -> None:
        who.waits[number] = at
        if not is_fetch:
            who.subscriptions.add(number)
        self.readers.began(track, (who, RequestId(number)), is_fetch=is_fetch)


@pytest.fixture
def house() -> House:
    return House()


def test_who_takes_nothing_is_ended_once_another_one_is_refused(house: House) -> None:
    still = Reading()
    house.reads(house.keep("a", "k"), still, 0, 500)
    house.reads(house.keep("a", "v"), still, 2, 0, is_fetch=True)
    house.fill()

    for now in (0.0, 100.0):
        house.readers.leave_stalled(now)
    assert still.ended == []
    house.refuse()
    house.readers.leave_stalled(100.1)
    assert sorted(still.ended) == [
        (0, PublishDoneCode.TOO_FAR_BEHIND),
        (2, StreamErrorCode.TOO_FAR_BEHIND),
    ]
    assert still.woken == 2


def test_nobody_is_ended_who_takes_something_from_time_to_time(house: House) -> None:
    slow = Reading()
    house.reads(house.keep("a"), slow, 0, 0)
    house.fill()
    house.refuse()

    for turn in range(10):
        slow.waits[0] = turn
        house.readers.leave_stalled(turn * (STALL_S - 0.1))
    house.readers.leave_stalled(9 * (STALL_S - 0.1) + STALL_S - 0.1)
    assert slow.ended == []
    house.readers.leave_stalled(9 * (STALL_S - 0.1) + STALL_S)
    assert slow.ended == [(0, PublishDoneCode.TOO_FAR_BEHIND)]


def test_nobody_is_ended_where_that_would_make_no_room(house: House) -> None:
    still, healthy = Reading(), Reading()
    house.reads(house.keep("a", "k"), still, 0, 500)
    house.reads(house.keep("a", "v"), healthy, 0, None)
    house.fill()
    house.refuse()

    for now in (0.0, 100.0):
        house.readers.leave_stalled(now)
    assert still.ended == []
    house.readers.ended((healthy, RequestId(0)))  # type: ignore[arg-type]
    house.readers.leave_stalled(100.1)
    assert [number for number, _ in still.ended] == [0]


def test_what_has_nothing_to_take_is_no_reason_to_keep_what_its_consumer_has_left(
    house: House,
) -> None:
    still = Reading()
    house.reads(house.keep("a", "manifest"), still, 0, None)
    house.reads(house.keep("a", "k"), still, 2, 500)
    house.fill()
    house.refuse()

    for now in (0.0, STALL_S):
        house.readers.leave_stalled(now)
    assert sorted(number for number, _ in still.ended) == [0, 2]


def test_one_publication_is_left_at_a_time_and_none_once_there_is_room(house: House) -> None:
    one, other = Reading(), Reading()
    house.reads(house.keep("a"), one, 0, 500)
    house.reads(house.keep("b"), other, 0, 500)
    house.fill()
    house.refuse()

    for now in (0.0, STALL_S):
        house.readers.leave_stalled(now)
    assert (len(one.ended), len(other.ended)) == (1, 0)
    house.holdings.budget.give_back(1)
    house.holdings.tick(STALL_S)
    house.readers.leave_stalled(STALL_S + 0.1)
    house.fill()
    house.refuse()
    house.readers.leave_stalled(STALL_S + 0.2)  # from here on the time counts anew
    assert other.ended == []
