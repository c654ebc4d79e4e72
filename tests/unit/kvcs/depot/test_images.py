"""Images: what a Track made of an index says of every Location."""

from collections.abc import Sequence

import pytest

from kvcs.depot.images import ShelvedTrack
from kvcs.depot.records import Entry, TrackNote
from kvcs.depot.shelf import Holding
from kvcs.profile.ending import End
from kvcs.profile.naming import MANIFEST
from moqt.codepoints import MAX_VI64, PublishDoneCode
from moqt.location import Location
from moqt.session.coverage import FIRST, LAST, Knowledge
from tests.unit.kvcs.depot.goods import K, name

GROUPS, BLOCKS = 3, 2
ALL = [Location(group, block) for group in range(GROUPS) for block in range(BLOCKS)]


def image(
    places: Sequence[Location],
    *,
    track: bytes = K,
    note: TrackNote | None = None,
    finished: bool = True,
) -> ShelvedTrack:
    entries = [Entry(at, 0, 10, at.group, (), b"d" * 32, b"s" * 16) for at in places]
    note = TrackNote(GROUPS, BLOCKS, largest=Location(GROUPS, 0)) if note is None else note
    return ShelvedTrack(
        Holding(name(1), 1, finished=finished), track, note, entries, lambda track, obj: None
    )


def end_of(made: ShelvedTrack) -> End:
    assert made.local.ended is not None
    return End.of(made.local.ended.code, made.local.ended.reason)


def test_of_a_whole_track_everything_is_known_and_it_ended() -> None:
    made = image(ALL)

    assert made.is_whole
    assert made.local.coverage is not None
    assert made.local.coverage.runs() == [(FIRST, LAST, Knowledge.COMPLETE)]
    assert end_of(made) is End.ENDED
    assert made.local.largest == Location(GROUPS, 0)
    assert [obj.location for _, obj in made.local.objects_of(1)] == ALL[2:4]


@pytest.mark.parametrize("gap", ALL)
def test_where_one_is_missing_its_group_is_unknown_and_the_track_is_lost(gap: Location) -> None:
    made = image([at for at in ALL if at != gap])
    coverage = made.local.coverage

    assert coverage is not None
    assert not made.is_whole
    assert end_of(made) is End.LOST
    for at in ALL:
        known = Knowledge.UNKNOWN if at.group == gap.group else Knowledge.COMPLETE
        assert coverage[at] is known
        assert coverage[Location(at.group, MAX_VI64)] is known
    assert coverage[Location(GROUPS, 0)] is Knowledge.UNKNOWN


def test_nothing_is_known_of_a_track_of_which_nothing_is_held() -> None:
    made = image([], note=TrackNote(GROUPS, BLOCKS))

    assert made.local.largest is None
    assert end_of(made) is End.LOST


def test_the_largest_is_what_is_held_where_nobody_told_more() -> None:
    assert image(ALL[:3], note=TrackNote(GROUPS, BLOCKS)).local.largest == ALL[2]


@pytest.mark.parametrize("finished", [True, False])
def test_versions_of_a_manifest_that_are_missing_are_unknown_and_the_others_are_not(
    finished: bool,
) -> None:
    made = image(
        [Location(2, 0), Location(3, 0)], track=MANIFEST, note=TrackNote(), finished=finished
    )

    assert made.local.coverage is not None
    known = [made.local.coverage[Location(version, 0)] for version in range(5)]
    unknown = Knowledge.UNKNOWN
    assert known == [unknown, unknown, Knowledge.COMPLETE, Knowledge.COMPLETE, unknown]
    assert made.local.largest == Location(3, 0)
    assert end_of(made) is (End.ENDED if finished else End.LOST)
    assert made.local.ended is not None
    assert made.local.ended.code is not PublishDoneCode.MALFORMED_TRACK


def test_one_of_another_priority_than_its_group_is_left_out() -> None:
    entries = [
        Entry(at, 0, 10, 9 if at == ALL[3] else 1, (), b"d" * 32, b"s" * 16)
        for at in sorted((*ALL, Location(1, 2)))
    ]
    made = ShelvedTrack(
        Holding(name(1), 1), K, TrackNote(GROUPS, BLOCKS), entries, lambda track, obj: None
    )

    assert [obj.location for obj in made.objects] == [*ALL[:3], Location(1, 2), *ALL[4:]]
    for position, obj in enumerate(made.objects):
        assert made.wanted(position).location == obj.location
        assert made.wanted(position).priority == 1


def test_priorities_and_properties_are_those_that_objects_came_with() -> None:
    made = image(ALL, note=TrackNote(GROUPS, BLOCKS, ((0x0E, 5),)))

    assert made.local.properties == ((0x0E, 5),)
    assert {sub.priority for sub, _ in made.local.objects_of(2)} == {2}
