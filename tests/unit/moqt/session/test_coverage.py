"""What is known of Locations, and the way of a fetch stream through it, in both Group Orders."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, GroupOrder, RangeMarkerKind
from moqt.errors import UsageError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.config import Role, SessionConfig
from moqt.session.context import Context
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge, before
from moqt.session.events import RequestId
from moqt.session.fetchflow import FetchFlow
from moqt.session.localtrack import LocalTrack
from moqt.session.publishing import Selection
from moqt.session.streams import StreamIds
from moqt.wire.fetchstream import FetchHeader, FetchObject, FetchReader, RangeMarker
from moqt.wire.filters import LocationRange

COMPLETE, UNKNOWN = Knowledge.COMPLETE, Knowledge.UNKNOWN
TIMED_OUT, PENDING = Knowledge.TIMED_OUT, Knowledge.PENDING
GROUPS, OBJECTS = 4, 5
PLACES = [Location(g, o) for g in range(GROUPS) for o in range(OBJECTS)]
#: Ends of ranges: also those that lie between the places, at the end of a Group or of all.
CUTS = sorted({*PLACES, *(Location(g, MAX_VI64) for g in range(GROUPS)), LAST})
RANGES = st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)).map(sorted)
MARKS = st.lists(st.tuples(RANGES, st.sampled_from(Knowledge), st.booleans()), max_size=12)


@given(st.sampled_from(Knowledge), MARKS)
def test_the_last_mark_of_each_location_counts_and_neighbours_are_merged(
    otherwise: Knowledge, marks: list[tuple[list[Location], Knowledge, bool]]
) -> None:
    coverage = Coverage(otherwise)
    model = dict.fromkeys(CUTS, otherwise)
    for (first, last), knowledge, only_pending in marks:
        (coverage.settle if only_pending else coverage.mark)(first, last, knowledge)
        for at in CUTS:
            if first <= at <= last and (not only_pending or model[at] is PENDING):
                model[at] = knowledge

    assert {at: coverage[at] for at in CUTS} == model
    runs = coverage.runs()
    assert (runs[0][0], runs[-1][1]) == (FIRST, LAST)
    assert len(runs) == len(coverage)
    for (_, end, left), (start, _, right) in pairwise(runs):
        assert end.next() == start
        assert left is not right


@given(MARKS)
def test_at_the_bound_what_is_forgotten_is_unknown(
    marks: list[tuple[list[Location], Knowledge, bool]],
) -> None:
    coverage, whole = Coverage(limit=3), Coverage()
    for (first, last), knowledge, _ in marks:
        coverage.mark(first, last, knowledge)
        whole.mark(first, last, knowledge)
        assert len(coverage) <= 3

    for at in CUTS:
        assert coverage[at] in (whole[at], UNKNOWN)


def test_a_mark_that_changes_nothing_is_no_change() -> None:
    coverage = Coverage()
    coverage.mark(Location(1, 0), Location(2, 5), PENDING)
    revision = coverage.revision
    coverage.mark(Location(1, 3), Location(2, 0), PENDING)
    coverage.settle(Location(3, 0), LAST, UNKNOWN)

    assert coverage.revision == revision
    assert coverage.runs(Location(1, 3), Location(3, 0)) == [
        (Location(1, 3), Location(2, 5), PENDING),
        (Location(2, 6), Location(3, 0), COMPLETE),
    ]


def test_what_is_no_range_is_refused() -> None:
    with pytest.raises(UsageError, match="no range"):
        Coverage().mark(Location(1, 0), Location(0, 5), PENDING)
    with pytest.raises(UsageError, match="runs"):
        Coverage(limit=2)


def test_before_is_the_other_way_of_next() -> None:
    for at in (Location(0, 0), Location(3, 4), Location(3, MAX_VI64)):
        assert before(at.next()) == at


# -- the walk --------------------------------------------------------------------------------------


class Reading:
    """A fetch stream, read by the rules of its reader: what it says of each place."""

    def __init__(self, track: LocalTrack, wanted: LocationRange, order: GroupOrder) -> None:
        context = Context(Role.SERVER, SessionConfig(), StreamIds(Role.SERVER))
        self._flow = FetchFlow(
            context, Selection(wanted, (), 128, order), track, request_id=RequestId(0)
        )
        self._reader = FetchReader(order, 1 << 20)
        self._head: bytes | None = b""
        # The order in which a reader expects the Locations.
        self._sign = -1 if order is GroupOrder.DESCENDING else 1
        self._expected = sorted([at for at in CUTS if at in wanted], key=self._key)
        self.found: dict[Location, object] = {}
        self.finished = False

    def pump(self, limit: int = 1 << 20) -> None:
        """Take what the flow would send now."""
        while self._flow.has_data():
            commands, _ = self._flow.pull(limit)
            data = b"".join(bytes(c.data) for c in commands)
            if self._head is not None:
                self._head += data
                header = FetchHeader.decode(self._head)
                if header is None:
                    continue
                data, self._head = self._head[header[1] :], None
            for entry in self._reader.feed(data):
                self._take(entry)
            if self._flow.finished:
                self._reader.finish()
                self._silent(len(self._expected))
                self.finished = True

    def _take(self, entry: FetchObject | RangeMarker) -> None:
        if isinstance(entry, FetchObject):
            self._silent(self._expected.index(entry.location))
            self.found[self._expected.pop(0)] = entry.payload
        else:
            upto = self._key(entry.location)
            while self._expected and self._key(self._expected[0]) <= upto:
                self.found[self._expected.pop(0)] = entry.kind

    def _key(self, at: Location) -> tuple[int, int]:
        return self._sign * at.group, at.object

    def _silent(self, count: int) -> None:
        for at in self._expected[:count]:
            self.found[at] = RangeMarkerKind.NON_EXISTENT
        del self._expected[:count]


SAYS = {
    COMPLETE: RangeMarkerKind.NON_EXISTENT,
    UNKNOWN: RangeMarkerKind.UNKNOWN,
    TIMED_OUT: RangeMarkerKind.TIMED_OUT,
}
NAME = FullTrackName.of("kvcs-1", "x")


def payload(at: Location) -> bytes:
    return bytes(at)


@given(
    st.sampled_from(GroupOrder),
    RANGES,
    st.sets(st.sampled_from(PLACES)),
    MARKS,
    st.permutations(PLACES),
    st.data(),
)
def test_a_fetch_says_of_each_location_what_became_of_it_and_waits_where_it_is_pending(
    order: GroupOrder,
    wanted: list[Location],
    held: set[Location],
    marks: list[tuple[list[Location], Knowledge, bool]],
    arrival: list[Location],
    data: st.DataObject,
) -> None:
    coverage = Coverage(data.draw(st.sampled_from(Knowledge)))
    for (first, last), knowledge, _ in marks:
        coverage.mark(first, last, knowledge)
    track = LocalTrack(NAME, coverage=coverage)
    track.raise_largest(LAST)
    late = {at for at in held if coverage[at] is PENDING}

    def store(at: Location) -> None:
        track.store_subgroup(at.group, at.object % 2).publish(at.object, payload(at))

    for at in held - late:
        store(at)
    reading = Reading(track, LocationRange(*wanted), order)
    reading.pump()
    inside = [at for at in CUTS if at in LocationRange(*wanted)]
    assert reading.finished is all(known is not PENDING for _, _, known in coverage.runs(*wanted))

    # The rest comes in any order, Location by Location; then what is still pending is given up.
    for at in arrival:
        if at in late:
            store(at)
        coverage.settle(at, at, COMPLETE)
        track.coverage_changed()
        reading.pump()
    end = data.draw(st.sampled_from([COMPLETE, UNKNOWN, TIMED_OUT]))
    for first, last, knowledge in coverage.runs():
        if knowledge is PENDING:
            coverage.settle(first, last, end)
    track.coverage_changed()
    reading.pump()

    assert reading.finished
    for at in inside:
        expected: object = payload(at) if at in held else SAYS[coverage[at]]
        assert reading.found[at] == expected, at


@given(st.sampled_from(GroupOrder), RANGES, st.sets(st.sampled_from(PLACES)))
def test_of_a_track_that_is_all_known_only_objects_are_sent(
    order: GroupOrder, wanted: list[Location], held: set[Location]
) -> None:
    track = LocalTrack(NAME)
    for at in sorted(held):
        track.open_subgroup(at.group, at.object).publish(at.object, payload(at))
    reading = Reading(track, LocationRange(*wanted), order)
    reading.pump(7)

    assert reading.finished
    for at, said in reading.found.items():
        assert said == (payload(at) if at in held else RangeMarkerKind.NON_EXISTENT)
