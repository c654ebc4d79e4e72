"""What a Track comes to that has sources which break, overlap and contradict each other."""

import pytest

from moqt.codepoints import (
    ObjectStatus,
    PropertyType,
    PublishDoneCode,
    RangeMarkerKind,
    StreamErrorCode,
)
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.merge import QUIET_S, MalformedTrack, MergedTrack
from moqt.session.budget import ByteBudget
from moqt.session.commands import StreamId
from moqt.session.coverage import FIRST, Knowledge
from moqt.session.events import (
    FillEnded,
    ObjectBegan,
    ObjectPiece,
    RangeMarked,
    RequestId,
    SubgroupClosed,
    SubgroupOpened,
    Via,
)
from moqt.session.localobjects import LocalObject
from moqt.wire.pairs import Pairs

NAME = FullTrackName.of("a", "track")
REQUEST = RequestId(0)


class Feeding:
    """A Track, and what its sources bring, said shortly."""

    def __init__(self, properties: Pairs = ()) -> None:
        self.budget = ByteBudget(1 << 20)
        self.track = MergedTrack(NAME, properties=properties, budget=self.budget)
        self.now = 0.0

    def open(
        self, source: int, stream: int, group: int = 0, *, first: bool = True, end: bool = False
    ) -> None:
        self.track.take(
            source,
            SubgroupOpened(
                request_id=REQUEST, stream_id=StreamId(stream), group_id=group, subgroup_id=0,
                publisher_priority=7, end_of_group=end, first_object=first, has_properties=False,
            ),
            self.now,
        )  # fmt: skip

    def begin(
        self,
        source: int,
        stream: int,
        place: tuple[int, int],
        length: int,
        *,
        via: Via = Via.SUBGROUP,
        priority: int = 7,
        status: ObjectStatus = ObjectStatus.NORMAL,
    ) -> None:
        self.track.take(
            source,
            ObjectBegan(
                request_id=REQUEST, via=via, stream_id=StreamId(stream),
                location=Location(*place), subgroup_id=0, publisher_priority=priority,
                status=status, properties=(), length=length,
            ),
            self.now,
        )  # fmt: skip

    def piece(self, source: int, stream: int, data: bytes) -> None:
        event = ObjectPiece(request_id=REQUEST, stream_id=StreamId(stream), data=data)
        self.track.take(source, event, self.now)

    def whole(
        self,
        source: int,
        stream: int,
        place: tuple[int, int],
        data: bytes = b"payload",
        *,
        via: Via = Via.SUBGROUP,
    ) -> None:
        self.begin(source, stream, place, len(data), via=via)
        self.piece(source, stream, data)

    def close(self, source: int, stream: int, code: StreamErrorCode | None = None) -> None:
        event = SubgroupClosed(
            request_id=REQUEST, stream_id=StreamId(stream), fin=code is None, code=code
        )
        self.track.take(source, event, self.now)

    def fill_ended(self, source: int, *, complete: bool = True) -> None:
        event = FillEnded(request_id=REQUEST, fill_id=REQUEST, complete=complete, code=None)
        self.track.take(source, event, self.now)

    def held(self, group: int = 0) -> dict[int, bytes]:
        return {
            obj.object_id: b"".join(obj.parts)
            for _, obj in self.track.local.objects_of(group)
            if obj.status is ObjectStatus.NORMAL
        }

    def objects(self, group: int = 0) -> list[LocalObject]:
        return [obj for _, obj in self.track.local.objects_of(group)]

    def knows(self, group: int, number: int) -> Knowledge:
        return self.track.coverage[Location(group, number)]


@pytest.fixture
def feeding() -> Feeding:
    return Feeding()


def test_what_two_sources_bring_is_held_once(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7)
    for number in range(3):
        feeding.whole(one, 3, (0, number), b"%d" % number)
        feeding.whole(two, 7, (0, number), b"%d" % number)
    feeding.close(one, 3)
    feeding.close(two, 7)

    assert feeding.held() == {0: b"0", 1: b"1", 2: b"2"}
    assert feeding.budget.used == 3
    [(_, subgroup)] = feeding.track.local.subgroups_since(0)
    assert (subgroup.closed, subgroup.cut_code, subgroup.priority) == (True, None, 7)


@pytest.mark.parametrize("second", [b"payloae", b"longer payload"])
def test_two_payloads_for_one_object_are_malformed(feeding: Feeding, second: bytes) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7)
    feeding.whole(one, 3, (0, 0), b"payload")

    with pytest.raises(MalformedTrack, match="two"):
        feeding.whole(two, 7, (0, 0), second)
    feeding.track.end_malformed("two versions")
    assert feeding.track.local.ended is not None
    assert feeding.track.local.ended.code is PublishDoneCode.MALFORMED_TRACK
    assert not feeding.track.is_complete


def test_another_priority_is_another_version(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7)
    feeding.whole(one, 3, (0, 0))

    with pytest.raises(MalformedTrack):
        feeding.begin(two, 7, (0, 0), 7, priority=8)


def test_half_an_object_is_let_go_and_not_the_largest(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 0))
    feeding.begin(source, 3, (0, 1), 100)
    feeding.piece(source, 3, bytes(40))
    assert feeding.track.local.largest == Location(0, 1)
    feeding.close(source, 3, StreamErrorCode.DELIVERY_TIMEOUT)

    assert feeding.held() == {0: b"payload"}
    assert feeding.track.local.largest == Location(0, 0)
    assert feeding.budget.used == 7
    [(_, subgroup)] = feeding.track.local.subgroups_since(0)
    assert subgroup.cut_code is StreamErrorCode.DELIVERY_TIMEOUT


def test_a_subgroup_that_broke_goes_on_on_another_stream(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 0))
    feeding.close(source, 3, StreamErrorCode.CANCELLED)
    feeding.open(source, 7, first=False)
    feeding.whole(source, 7, (0, 4))
    feeding.close(source, 7)

    first, second = (subgroup for _, subgroup in feeding.track.local.subgroups_since(0))
    assert [obj.object_id for obj in first.objects] == [0]
    assert [obj.object_id for obj in second.objects] == [4]
    assert not second.first_object


def test_an_object_of_which_one_source_is_lost_is_finished_by_the_other(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7)
    for source, stream in ((one, 3), (two, 7)):
        feeding.begin(source, stream, (0, 0), 6)
        feeding.piece(source, stream, b"abc")
    feeding.track.leave(one, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)
    feeding.piece(two, 7, b"def")
    feeding.whole(two, 7, (0, 1), b"next")
    feeding.close(two, 7)

    assert feeding.held() == {0: b"abcdef", 1: b"next"}
    assert feeding.track.local.ended is None


def test_what_no_source_brings_any_more_is_not_said_to_be_absent(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7, first=False)
    feeding.whole(one, 3, (0, 0))
    feeding.whole(two, 7, (0, 2))  # not known to be the next one, and the first source is there
    feeding.track.leave(one, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)
    feeding.whole(two, 7, (0, 3))
    feeding.close(two, 7)
    feeding.track.tick(1.0 + QUIET_S)

    assert feeding.held() == {0: b"payload", 2: b"payload", 3: b"payload"}
    assert feeding.knows(0, 1) is Knowledge.UNKNOWN
    first, second = (subgroup for _, subgroup in feeding.track.local.subgroups_since(0))
    assert first.cut_code is StreamErrorCode.INTERNAL_ERROR
    assert [obj.object_id for obj in second.objects] == [2, 3]


def test_what_comes_of_the_past_is_stored_and_gaps_of_it_are_known(feeding: Feeding) -> None:
    source = feeding.track.join(largest=Location(1, 3), filling=True)
    assert feeding.track.local.largest == Location(1, 3)
    assert feeding.knows(0, 0) is Knowledge.PENDING
    feeding.whole(source, 11, (0, 1), via=Via.FILL)
    assert feeding.knows(0, 0) is Knowledge.COMPLETE
    feeding.track.take(
        source,
        RangeMarked(
            request_id=REQUEST, kind=RangeMarkerKind.UNKNOWN,
            start=Location(0, 2), end=Location(0, 5),
        ),
        0.0,
    )  # fmt: skip
    feeding.whole(source, 11, (1, 3), via=Via.FILL)
    feeding.fill_ended(source)

    assert feeding.knows(0, 2) is feeding.knows(0, 5) is Knowledge.UNKNOWN
    assert feeding.knows(0, 6) is feeding.knows(1, 2) is Knowledge.COMPLETE
    assert (feeding.held(0), feeding.held(1)) == ({1: b"payload"}, {3: b"payload"})


def test_what_a_broken_fill_did_not_bring_is_unknown_and_half_an_object_is_let_go(
    feeding: Feeding,
) -> None:
    source = feeding.track.join(largest=Location(0, 9), filling=True)
    feeding.whole(source, 11, (0, 0), via=Via.FILL)
    feeding.begin(source, 11, (0, 1), 100, via=Via.FILL)
    feeding.piece(source, 11, bytes(40))
    feeding.fill_ended(source, complete=False)

    assert feeding.held() == {0: b"payload"}
    assert feeding.knows(0, 1) is feeding.knows(0, 9) is Knowledge.UNKNOWN
    assert feeding.budget.used == 7


def test_a_track_that_is_received_again_asks_for_what_it_lacks(feeding: Feeding) -> None:
    source = feeding.track.join(largest=Location(0, 1), filling=True)
    feeding.whole(source, 11, (0, 0), via=Via.FILL)
    feeding.track.leave(source, None, "", 1.0)
    assert feeding.track.local.ended is None
    assert feeding.knows(0, 1) is Knowledge.UNKNOWN
    again = feeding.track.join(largest=Location(0, 2), filling=True)

    assert feeding.knows(0, 1) is Knowledge.PENDING
    for number in range(3):
        feeding.whole(again, 15, (0, number), via=Via.FILL)
    feeding.fill_ended(again)
    feeding.track.leave(again, PublishDoneCode.TRACK_ENDED, "", 2.0)
    assert feeding.held() == dict.fromkeys(range(3), b"payload")
    assert feeding.track.is_complete


def test_the_end_of_a_track_settles_everything(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 2))
    feeding.close(source, 3)
    feeding.track.leave(source, PublishDoneCode.TRACK_ENDED, "done", 1.0)

    assert feeding.track.is_complete
    assert [known for _, _, known in feeding.track.coverage.runs()] == [Knowledge.COMPLETE]


def test_a_source_that_fails_ends_the_track_with_its_error_and_leaves_nothing_pending(
    feeding: Feeding,
) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 2))
    feeding.track.leave(source, PublishDoneCode.GOING_AWAY, "leaving", 1.0)

    assert feeding.track.local.ended is not None
    assert feeding.track.local.ended.code is PublishDoneCode.GOING_AWAY
    assert not feeding.track.is_complete
    known = {known for _, _, known in feeding.track.coverage.runs(FIRST)}
    assert Knowledge.PENDING not in known
    [(_, subgroup)] = feeding.track.local.subgroups_since(0)
    assert subgroup.cut_code is StreamErrorCode.INTERNAL_ERROR


def test_a_track_ends_well_if_one_source_saw_it_to_its_end(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.whole(one, 3, (0, 0))
    feeding.close(one, 3)
    feeding.track.leave(one, PublishDoneCode.TRACK_ENDED, "", 1.0)
    assert feeding.track.local.ended is None
    feeding.track.leave(two, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)

    assert feeding.track.is_complete


def test_a_group_of_which_nothing_comes_any_more_is_known(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3, 0)
    feeding.whole(source, 3, (0, 0))
    feeding.close(source, 3)
    feeding.open(source, 7, 4)
    feeding.whole(source, 7, (4, 0))
    for place in ((0, 1), (2, 0)):
        assert feeding.knows(*place) is Knowledge.PENDING

    feeding.track.tick(QUIET_S)
    for place in ((0, 1), (2, 0)):
        assert feeding.knows(*place) is Knowledge.COMPLETE


def test_a_group_whose_end_is_seen_is_known_at_once(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3, end=True)
    feeding.whole(source, 3, (0, 0))
    feeding.begin(source, 3, (0, 1), 0, status=ObjectStatus.END_OF_GROUP)
    feeding.close(source, 3)

    assert feeding.knows(0, 1) is Knowledge.COMPLETE
    assert feeding.knows(1, 0) is Knowledge.PENDING
    assert [obj.status for obj in feeding.objects()][-1] is ObjectStatus.END_OF_GROUP


def test_what_a_source_that_is_gone_still_brings_is_ignored(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.track.leave(source, None, "", 1.0)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 0))

    assert feeding.held() == {}


def test_how_long_it_may_be_kept_is_what_its_publisher_says() -> None:
    assert Feeding(((0x04, 1500),)).track.max_age_s == 1.5
    assert Feeding().track.max_age_s is None


def test_who_is_whole_is_not_held_up_by_who_stalls(feeding: Feeding) -> None:
    stalled, quick = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(stalled, 3)
    feeding.open(quick, 7)
    feeding.begin(stalled, 3, (0, 0), 6)
    feeding.piece(stalled, 3, b"ab")
    feeding.whole(quick, 7, (0, 0), b"abcdef")
    feeding.whole(quick, 7, (0, 1), b"next")
    assert feeding.held() == {0: b"abcdef", 1: b"next"}

    with pytest.raises(MalformedTrack):
        feeding.piece(stalled, 3, b"cx")


def test_an_object_is_put_together_of_what_each_source_was_first_with(feeding: Feeding) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.open(two, 7)
    feeding.begin(one, 3, (0, 0), 9)
    feeding.begin(two, 7, (0, 0), 9)
    for source, stream, data in (
        (one, 3, b"abc"), (two, 7, b"ab"), (two, 7, b"cdef"), (one, 3, b"defg"), (two, 7, b"gh"),
    ):  # fmt: skip
        feeding.piece(source, stream, data)
    feeding.track.leave(one, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)
    feeding.piece(two, 7, b"i")

    assert feeding.held() == {0: b"abcdefghi"}
    assert feeding.budget.used == 9


def test_half_an_object_waits_a_while_for_a_source_that_has_not_begun_with_it(
    feeding: Feeding,
) -> None:
    one, two = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(one, 3)
    feeding.begin(one, 3, (0, 0), 6)
    feeding.piece(one, 3, b"abc")
    feeding.track.leave(one, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)
    feeding.track.tick(1.0 + QUIET_S / 2)
    [(_, subgroup)] = feeding.track.local.subgroups_since(0)
    assert subgroup.cut_code is None
    feeding.track.tick(1.0 + QUIET_S)
    assert subgroup.cut_code is StreamErrorCode.INTERNAL_ERROR

    feeding.open(two, 7)
    feeding.whole(two, 7, (0, 0), b"abcdef")
    feeding.close(two, 7)
    assert feeding.held() == {0: b"abcdef"}


def test_too_much_does_not_wait_for_what_comes_before_it(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moqt.relay.placing.MAX_WAITING", 10)
    slow, quick = (feeding.track.join(largest=None, filling=False) for _ in range(2))
    feeding.open(slow, 3)
    feeding.whole(slow, 3, (0, 0))
    feeding.open(quick, 7, first=False)
    feeding.whole(quick, 7, (0, 5), b"12345")
    assert feeding.held() == {0: b"payload"}
    feeding.whole(quick, 7, (0, 6), b"123456")
    assert feeding.held() == {0: b"payload", 5: b"12345", 6: b"123456"}

    feeding.whole(slow, 3, (0, 1))
    assert feeding.held()[1] == b"payload"


def test_what_a_slow_fill_is_still_to_bring_is_not_absent_because_its_group_is_over(
    feeding: Feeding,
) -> None:
    source = feeding.track.join(largest=Location(0, 3), filling=True)
    feeding.open(source, 3, first=False)
    feeding.whole(source, 3, (0, 4))
    feeding.close(source, 3)
    feeding.track.tick(10 * QUIET_S)
    assert feeding.knows(0, 2) is Knowledge.PENDING

    for number in range(4):
        feeding.whole(source, 11, (0, number), via=Via.FILL)
    feeding.fill_ended(source)
    feeding.track.tick(10 * QUIET_S)
    assert sorted(feeding.held()) == [0, 1, 2, 3, 4]
    assert feeding.track.missing() == []


def test_what_a_fill_of_one_source_brings_is_live_if_it_was_not_past_for_the_first(
    feeding: Feeding,
) -> None:
    behind = feeding.track.join(largest=Location(0, 0), filling=True)
    ahead = feeding.track.join(largest=Location(0, 2), filling=True)
    feeding.open(ahead, 7, first=False)
    feeding.whole(ahead, 7, (0, 3))
    assert feeding.held() == {}  # what comes before it is on its way

    for number in range(3):
        feeding.whole(ahead, 15, (0, number), via=Via.FILL)
    [(_, subgroup)] = feeding.track.local.subgroups_since(0)
    assert [obj.object_id for obj in subgroup.objects] == [1, 2, 3]
    feeding.track.leave(behind, PublishDoneCode.INTERNAL_ERROR, "lost", 1.0)
    assert not subgroup.closed


def test_a_lost_track_goes_on_with_the_next_source_or_fails(feeding: Feeding) -> None:
    source = feeding.track.join(largest=Location(0, 9), filling=True)
    feeding.whole(source, 11, (0, 0), via=Via.FILL)
    feeding.begin(source, 11, (0, 1), 100, via=Via.FILL)
    feeding.track.lose(source, 1.0)
    assert (feeding.track.is_live, feeding.track.local.ended) == (False, None)
    assert feeding.knows(0, 9) is Knowledge.PENDING

    feeding.track.fail(PublishDoneCode.INTERNAL_ERROR, "nobody has come")
    assert feeding.track.local.ended is not None
    assert feeding.knows(0, 1) is feeding.knows(0, 9) is Knowledge.UNKNOWN
    assert feeding.held() == {0: b"payload"}
    feeding.track.fail(PublishDoneCode.GOING_AWAY, "twice")
    assert feeding.track.local.ended.reason == "nobody has come"


def test_a_gap_is_known_at_once_if_its_publisher_says_so(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    event = SubgroupOpened(
        request_id=REQUEST, stream_id=StreamId(3), group_id=0, subgroup_id=0,
        publisher_priority=7, end_of_group=False, first_object=True, has_properties=True,
    )  # fmt: skip
    feeding.track.take(source, event, 0.0)
    began = ObjectBegan(
        request_id=REQUEST, via=Via.SUBGROUP, stream_id=StreamId(3), location=Location(0, 5),
        subgroup_id=0, publisher_priority=7, status=ObjectStatus.NORMAL,
        properties=((PropertyType.PRIOR_OBJECT_ID_GAP, 3),), length=0,
    )  # fmt: skip
    feeding.track.take(source, began, 0.0)

    assert [feeding.knows(0, n) for n in range(1, 5)] == [Knowledge.PENDING] + 3 * [
        Knowledge.COMPLETE
    ]


def test_a_gap_in_a_group_is_known_when_no_other_stream_has_shown_itself(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3)
    feeding.whole(source, 3, (0, 0))
    feeding.whole(source, 3, (0, 3))
    assert feeding.knows(0, 2) is Knowledge.PENDING
    feeding.track.tick(QUIET_S)
    assert feeding.knows(0, 1) is feeding.knows(0, 2) is Knowledge.COMPLETE
    assert feeding.knows(0, 4) is Knowledge.PENDING


def test_a_malformed_track_takes_nothing_more_and_holds_no_half_object(feeding: Feeding) -> None:
    source = feeding.track.join(largest=Location(0, 0), filling=True)
    feeding.begin(source, 11, (0, 0), 9, via=Via.FILL)
    feeding.open(source, 3, 1)
    feeding.begin(source, 3, (1, 0), 9)
    feeding.piece(source, 3, b"abc")
    feeding.track.end_malformed("two versions")
    feeding.piece(source, 3, b"def")

    assert feeding.held(0) == feeding.held(1) == {}
    assert feeding.budget.used == 0


def test_what_was_said_not_to_exist_is_not_taken_from_the_past_of_another(
    feeding: Feeding,
) -> None:
    one = feeding.track.join(largest=Location(0, 2), filling=True)
    for number in (0, 2):
        feeding.whole(one, 11, (0, number), via=Via.FILL)
    feeding.fill_ended(one)
    two = feeding.track.join(largest=Location(0, 2), filling=True)
    for number in range(3):
        feeding.whole(two, 15, (0, number), via=Via.FILL)
    feeding.fill_ended(two)

    assert sorted(feeding.held()) == [0, 2]
    assert feeding.knows(0, 1) is Knowledge.COMPLETE


def test_the_end_of_a_group_says_nothing_of_other_subgroups_below_it(feeding: Feeding) -> None:
    source = feeding.track.join(largest=None, filling=False)
    feeding.open(source, 3, end=True)
    feeding.whole(source, 3, (0, 2))
    feeding.close(source, 3)
    assert feeding.knows(0, 3) is Knowledge.COMPLETE
    assert feeding.knows(0, 1) is Knowledge.PENDING
    feeding.track.tick(QUIET_S)
    assert feeding.knows(0, 1) is Knowledge.COMPLETE


def test_an_object_is_let_go_when_it_may_not_be_kept_any_longer() -> None:
    feeding = Feeding(((0x04, 1000),))
    source = feeding.track.join(largest=Location(0, 0), filling=True)
    feeding.whole(source, 11, (0, 0), via=Via.FILL)
    feeding.fill_ended(source)
    feeding.open(source, 3, 1)
    feeding.now = 0.5
    feeding.whole(source, 3, (1, 0))
    feeding.begin(source, 3, (1, 1), 7)
    feeding.track.tick(1.2)
    assert [obj.dropped for obj in (*feeding.objects(0), *feeding.objects(1))] == [
        True, False, False,
    ]  # fmt: skip

    feeding.track.tick(1.7)
    assert [obj.dropped for obj in feeding.objects(1)] == [True, False]  # one is not whole
    feeding.piece(source, 3, b"payload")
    assert feeding.budget.used == 7
    feeding.track.tick(1.8)
    assert feeding.budget.used == 0
    feeding.close(source, 3)
    feeding.track.leave(source, PublishDoneCode.TRACK_ENDED, "", 1.9)
    assert not feeding.track.is_complete
    feeding.track.local.drop()
    assert feeding.budget.used == 0
