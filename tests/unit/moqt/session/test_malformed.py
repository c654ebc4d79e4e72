"""When a Track breaks its own rules, and when it only looks like it."""

import pytest

from moqt.codepoints import ObjectStatus
from moqt.location import Location
from moqt.session.malformed import TrackShape

NORMAL, EOG, EOT = ObjectStatus.NORMAL, ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK
Seen = tuple[int, int, int | None, int, ObjectStatus]


def note(shape: TrackShape, *seen: Seen) -> str | None:
    """Note Objects (group, object, subgroup, priority, status); return the first complaint."""
    for group, object_, subgroup, priority, status in seen:
        problem = shape.object_received(
            Location(group, object_), subgroup_id=subgroup, priority=priority, status=status
        )
        if problem is not None:
            return problem
    return None


FINE: list[list[Seen]] = [
    [(0, 0, 0, 5, NORMAL), (0, 1, 0, 5, NORMAL), (0, 2, 0, 5, EOG)],
    [(0, 0, 0, 5, NORMAL), (1, 0, 0, 9, NORMAL)],  # a Subgroup belongs to one Group
    [(0, 0, 0, 5, NORMAL), (0, 1, 1, 9, NORMAL)],
    [(0, 1, 0, 5, EOG), (0, 0, 0, 5, NORMAL)],  # on another stream, later
    [(0, 2, 0, 5, EOG), (0, 2, 0, 5, EOG)],
    [(0, 2, 0, 5, EOG), (1, 0, 0, 128, EOT)],
    [(0, 2, 0, 5, NORMAL), (0, 3, 0, 5, EOT)],
    [(1, 0, 0, 128, EOT), (0, 5, 0, 5, NORMAL), (1, 0, 0, 128, EOT)],
    [(0, 0, None, 5, NORMAL), (0, 1, None, 6, NORMAL)],  # datagrams have no Subgroup
    [(5, 0, 0, 5, NORMAL), (3, 0, 0, 5, NORMAL)],
    [(0, 0, 0, 5, NORMAL), (0, 0, 0, 5, NORMAL)],  # twice: by fill and live
]
BROKEN: list[tuple[str, list[Seen]]] = [
    ("priority 6, Subgroup 0 had 5", [(0, 0, 0, 5, NORMAL), (0, 1, 0, 6, NORMAL)]),
    ("past the end of its Group", [(0, 2, 0, 5, EOG), (0, 2, 0, 5, NORMAL)]),
    ("past the end of its Group", [(0, 2, 0, 5, EOG), (0, 7, 1, 5, NORMAL)]),
    ("past the end of its Group", [(0, 2, 0, 5, EOG), (0, 3, 0, 5, EOT)]),
    ("ends at 3 and at 5", [(0, 5, 0, 5, EOG), (0, 3, 0, 5, EOG)]),
    ("below its Object 7", [(0, 7, 0, 5, NORMAL), (0, 3, 1, 5, EOG)]),
    ("past the End of Track", [(3, 0, 0, 5, EOT), (3, 0, 0, 5, NORMAL)]),
    ("past the End of Track", [(3, 0, 0, 5, EOT), (4, 0, 0, 5, NORMAL)]),
    ("past the End of Track", [(3, 0, 0, 5, EOT), (4, 0, 0, 5, EOT)]),
    ("Track ends at", [(3, 0, 0, 5, EOT), (2, 0, 0, 5, EOT)]),
    ("below its Object", [(3, 1, 0, 5, NORMAL), (3, 0, 1, 5, EOT)]),
]


@pytest.mark.parametrize("seen", FINE)
def test_this_is_no_offence(seen: list[Seen]) -> None:
    assert note(TrackShape(100), *seen) is None


@pytest.mark.parametrize(("complaint", "seen"), BROKEN)
def test_this_is_malformed(complaint: str, seen: list[Seen]) -> None:
    shape = TrackShape(100)

    assert note(shape, *seen[:-1]) is None
    problem = note(shape, seen[-1])
    assert problem is not None
    assert complaint in problem


def test_the_end_that_a_stream_promised_counts_like_a_status() -> None:
    shape = TrackShape(100)
    assert note(shape, (0, 4, 0, 5, NORMAL)) is None

    assert shape.group_ends_at(Location(0, 5)) is None
    assert note(shape, (0, 5, 0, 5, NORMAL)) is not None


def test_the_oldest_groups_are_forgotten_and_then_nothing_is_wrong_with_them() -> None:
    shape = TrackShape(2)
    note(shape, (0, 1, 0, 5, EOG), (1, 0, 0, 5, NORMAL), (0, 0, 0, 5, NORMAL))
    note(shape, (2, 0, 0, 5, NORMAL))  # forgets 1, which was touched least recently

    assert note(shape, (1, 1, 0, 9, NORMAL)) is None
    assert len(shape._groups) == 2
    assert note(shape, (0, 9, 0, 5, NORMAL)) is None  # and that forgot 0
