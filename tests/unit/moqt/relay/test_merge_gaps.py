"""A gap that nobody will fill does not stay open for ever."""

from moqt.codepoints import ObjectStatus
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.relay.merge import QUIET_S, MergedTrack
from moqt.session.commands import StreamId
from moqt.session.coverage import FIRST, Knowledge
from moqt.session.events import FillEnded, ObjectBegan, RequestId, SubgroupOpened, Via

REQUEST = RequestId(0)


def live(track: MergedTrack, source: int, location: Location, now: float) -> None:
    """Have an empty Object come on a stream of its own, which stays open."""
    stream_id = StreamId(3 + 4 * location.group)
    opened = SubgroupOpened(
        request_id=REQUEST, stream_id=stream_id, group_id=location.group, subgroup_id=0,
        publisher_priority=128, end_of_group=True, first_object=True, has_properties=False,
    )  # fmt: skip
    began = ObjectBegan(
        request_id=REQUEST, via=Via.SUBGROUP, stream_id=stream_id, location=location, subgroup_id=0,
        publisher_priority=128, status=ObjectStatus.NORMAL, properties=(), length=0,
    )  # fmt: skip
    track.take(source, opened, now)
    track.take(source, began, now)


def test_the_rest_of_a_group_that_was_over_at_the_start_is_known_soon_after_the_next() -> None:
    track = MergedTrack(FullTrackName.of("a", "track"))
    source = track.join(largest=Location(0, 5), filling=True)
    track.take(
        source, FillEnded(request_id=REQUEST, fill_id=REQUEST, complete=True, code=None), 0.0
    )
    live(track, source, Location(1, 0), 1.0)
    gap = Location(0, 6)
    assert track.coverage[gap] is Knowledge.PENDING

    track.tick(1.0 + QUIET_S / 2)
    assert track.coverage[gap] is Knowledge.PENDING
    track.tick(1.0 + QUIET_S)
    [(_, last, known)] = track.coverage.runs(FIRST, Location(0, 1 << 40))
    assert (last, known) == (Location(0, 1 << 40), Knowledge.COMPLETE)


def test_it_stays_open_while_a_stream_of_that_group_is() -> None:
    track = MergedTrack(FullTrackName.of("a", "track"))
    source = track.join(largest=Location(0, 5), filling=True)
    track.take(
        source, FillEnded(request_id=REQUEST, fill_id=REQUEST, complete=True, code=None), 0.0
    )
    live(track, source, Location(0, 6), 1.0)
    live(track, source, Location(1, 0), 1.0)

    track.tick(1.0 + 2 * QUIET_S)
    assert track.coverage[Location(0, 7)] is Knowledge.PENDING
