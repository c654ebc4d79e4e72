"""What may be published where, what is kept, and who is told."""

from collections.abc import Callable

import pytest

from moqt.codepoints import ObjectStatus, PublishDoneCode
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.budget import ByteBudget
from moqt.session.coverage import Knowledge
from moqt.session.localobjects import LocalSubgroup
from moqt.session.localtrack import LocalTrack

EOG, EOT = ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK


@pytest.fixture
def track() -> LocalTrack:
    return LocalTrack(FullTrackName.of("kvcs-1", "x"))


def test_largest_moves_with_the_first_octet_of_a_greater_object(track: LocalTrack) -> None:
    assert track.largest is None
    first, second = track.open_subgroup(1), track.open_subgroup(0)
    begun = first.begin(3, 10)
    assert track.largest == Location(1, 3)

    second.publish(9, b"x")
    first.extend(begun, bytes(10))

    assert track.largest == Location(1, 3)
    assert track.octets == 11


def refused(match: str, act: Callable[[], object], track: LocalTrack) -> None:
    before = (track.largest, track.octets, track.opened, track.end_of_track)
    with pytest.raises(UsageError, match=match):
        act()
    assert (track.largest, track.octets, track.opened, track.end_of_track) == before


def test_what_would_make_the_track_malformed_is_refused(track: LocalTrack) -> None:
    first = track.open_subgroup(0)
    first.publish(5, b"x")
    refused("after Object 5", lambda: first.publish(5, b"y"), track)
    refused("after Object 5", lambda: first.publish(4, b"y"), track)
    refused("exists", lambda: track.open_subgroup(0), track)
    refused("0 to 255", lambda: track.open_subgroup(1, priority=256), track)
    refused("no payload", lambda: first.publish(6, b"y", status=EOG), track)
    refused("without properties", lambda: first.publish(6, b"y", properties=((2, 1),)), track)
    second = track.open_subgroup(0, 1)
    refused("not after", lambda: second.publish(5, status=EOG), track)
    refused("not after", lambda: second.publish(3, status=EOT), track)
    first.publish(6, status=EOG)
    refused("past the end of its Group", lambda: second.publish(7, b"y"), track)
    refused("past the end of its Group", lambda: first.publish(7, status=EOT), track)
    second.publish(4, b"below the end")
    last = track.open_subgroup(3)
    last.publish(0, status=EOT)
    refused("past the End of Track", lambda: last.publish(1, b"y"), track)
    beyond = track.open_subgroup(4)
    refused("past the End of Track", lambda: beyond.publish(0, b"y"), track)


def test_what_could_not_be_sent_is_refused(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0, has_properties=True)
    refused("Group ID -1", lambda: track.open_subgroup(-1), track)
    refused("Subgroup ID", lambda: track.open_subgroup(1, 1 << 64), track)
    refused("Object ID", lambda: subgroup.publish(1 << 64, b"x"), track)
    refused("pair of type", lambda: subgroup.publish(1, b"x", properties=((3, 4),)), track)
    refused("pair of type", lambda: LocalTrack(track.name, properties=((2, b""),)), track)


def test_an_unfinished_object_is_the_last_of_its_subgroup_until_it_is_whole(
    track: LocalTrack,
) -> None:
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 4)
    refused("not whole", lambda: subgroup.publish(1, b"x"), track)
    refused("not whole", subgroup.close, track)
    refused("5 octets for an Object of 4", lambda: subgroup.extend(begun, b"12345"), track)

    subgroup.extend(begun, b"1234")

    subgroup.close()
    refused("is closed", lambda: subgroup.publish(1, b"x"), track)


def test_nothing_can_be_added_to_a_track_that_ended(track: LocalTrack) -> None:
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 4)
    track.end(PublishDoneCode.EXPIRED, "first")
    track.end(PublishDoneCode.TRACK_ENDED, "second")

    assert track.ended is not None
    assert (track.ended.code, track.ended.reason) == (PublishDoneCode.EXPIRED, "first")
    refused("ended: EXPIRED", lambda: track.open_subgroup(1), track)
    refused("ended: EXPIRED", lambda: subgroup.extend(begun, b"1234"), track)


def test_a_payload_is_kept_in_its_pieces_and_not_copied(track: LocalTrack) -> None:
    head, data = b"h" * 68, memoryview(bytearray(1000))
    subgroup = track.open_subgroup(0)
    subgroup.publish(0, head, data)

    [obj] = subgroup.objects
    assert obj.parts[0] is head
    assert obj.parts[1] is data
    assert (obj.length, obj.have, obj.is_whole) == (1068, 1068, True)


def test_an_object_that_has_become_whole_is_one_piece_for_who_reads_it_from_then_on(
    track: LocalTrack,
) -> None:
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 6)
    subgroup.extend(begun, b"ab")
    inside = begun.parts
    subgroup.extend(begun, memoryview(b"cd"))
    assert begun.parts == [b"ab", b"cd"]
    subgroup.extend(begun, b"ef")

    assert begun.parts == [b"abcdef"]
    assert inside == [b"ab", b"cd", b"ef"]


def test_who_looks_for_itself_is_told_once_until_it_asks_again(track: LocalTrack) -> None:
    told: list[str] = []

    def reader() -> None:
        told.append("reader")

    track.when_changed(reader)
    track.when_changed(reader)
    track.watch(lambda: told.append("watcher"))
    subgroup = track.open_subgroup(0)
    begun = subgroup.begin(0, 2)
    subgroup.extend(begun, b"x")
    assert told == ["reader", "watcher", "watcher"]

    track.when_changed(reader)
    subgroup.extend(begun, b"y")
    assert told[3:] == ["reader", "watcher"]

    track.when_changed(reader)
    track.unwatch(reader)
    subgroup.close()
    assert told[5:] == ["watcher"]


def test_watchers_are_told_of_every_change_and_may_leave_while_they_are_told(
    track: LocalTrack,
) -> None:
    told: list[str] = []

    def once() -> None:
        told.append("once")
        track.unwatch(once)

    def always() -> None:
        told.append("always")

    track.watch(once)
    track.watch(always)
    subgroup = track.open_subgroup(0)
    subgroup.publish(0, b"x")
    subgroup.close()
    track.end()
    track.unwatch(always)
    track.unwatch(always)

    assert told == ["once", "always", "always", "always"]


def test_objects_of_a_group_are_merged_by_their_ids(track: LocalTrack) -> None:
    one, two = track.open_subgroup(7, 1), track.open_subgroup(7, 0)
    for object_id in (0, 3, 4):
        one.publish(object_id, b"1")
    for object_id in (1, 2, 9):
        two.publish(object_id, b"2")

    assert [obj.object_id for _, obj in track.objects_of(7)] == [0, 1, 2, 3, 4, 9]
    assert track.last_of(7) == Location(7, 9)
    assert track.last_of(8) is None
    assert list(track.objects_of(8)) == []
    assert track.group_ids(0, 6) == []
    assert track.group_ids(7, 7) == [7]


def test_the_last_real_object_is_found_behind_the_ends(track: LocalTrack) -> None:
    assert track.last_object() is None
    group = track.open_subgroup(2)
    group.publish(3, b"x")
    group.publish(4, status=EOG)
    track.open_subgroup(5).publish(0, status=EOT)

    assert track.last_object() == Location(2, 3)
    assert track.end_of_track


class Reader:
    """A reader that has sent so many Objects of every Subgroup."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_running = True

    def needs_from(self, subgroup: LocalSubgroup, position: int) -> int:
        return min(self.sent, len(subgroup.objects))


def test_the_slowest_reader_decides_what_is_kept() -> None:
    budget = ByteBudget(1000)
    track = LocalTrack(FullTrackName.of("kvcs-1", "x"), retain=False, budget=budget)
    slow, fast = Reader(), Reader()
    track.attach(slow)
    track.attach(fast)
    subgroup = track.open_subgroup(0)
    for object_id in range(4):
        subgroup.publish(object_id, bytes(100))
    fast.sent, slow.sent = 4, 1
    track.trim()
    assert (track.octets, budget.used) == (300, 300)

    slow.sent = 3
    track.detach(fast)
    assert track.octets == 100
    subgroup.close()
    track.detach(slow)

    assert (track.octets, budget.used) == (0, 0)
    assert track.lost_before == Location(0, 4)
    assert track.run_at(Location(0, 3))[2] is Knowledge.UNKNOWN
    assert track.run_at(Location(0, 4))[2] is Knowledge.COMPLETE
    assert track.largest == Location(0, 3)


def test_dropping_a_track_gives_its_octets_back_once() -> None:
    budget = ByteBudget(10)
    track = LocalTrack(FullTrackName.of("kvcs-1", "x"), budget=budget)
    told: list[int] = []
    track.open_subgroup(0).publish(0, bytes(30))
    track.open_subgroup(1).publish(0, bytes(30))
    budget.when_room(lambda: told.append(1))
    track.end()

    track.drop()
    track.drop()

    assert (track.octets, budget.used, told) == (0, 0, [1])
