"""A Track that turns out to be malformed while it is served: nothing more is sent of it."""

import pytest

from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.location import Location
from moqt.session.commands import ResetStream
from moqt.session.events import (
    FetchEnded,
    FillEnded,
    ObjectReceived,
    RequestRefused,
    SubscriptionEnded,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.session.pair import NAME, Pair, make_track, payload_of

MALFORMED = StreamErrorCode.MALFORMED_TRACK
FROM_START = LocationFilter.absolute_start(0, 0)


def served() -> tuple[Pair, LocalTrack]:
    pair = Pair()
    track = pair.server.publish(make_track(3, 4, octets=1000, ended=False))
    half = track.open_subgroup(3)
    half.extend(half.begin(0, 1000), payload_of(Location(3, 0), 1000)[:300])
    return pair, track


def handed_over(pair: Pair) -> int:
    """Return the octets of data streams that the publisher sent."""
    return sum(pair.server.outgoing[s].handed_over for s in pair.data_streams(pair.server))


def resets(pair: Pair) -> list[int]:
    return [c.code for end, c in pair.log if end is pair.server and isinstance(c, ResetStream)]


@pytest.mark.parametrize("budget", [0, 2000, 1 << 20], ids=["at once", "midway", "at the end"])
def test_its_fetches_are_reset_malformed_wherever_they_are(budget: int) -> None:
    pair, track = served()
    pair.server.budget = budget
    pair.client.session.fetch(NAME, location_filter=LocationFilter.range(0, 0, 3, 0))
    for _ in range(4):
        for end in pair.ends:
            pair.drain(end)
        while pair.deliver_one():
            pass
    before = handed_over(pair)
    track.end(PublishDoneCode.MALFORMED_TRACK, "two versions")
    pair.server.budget = 1 << 20
    pair.settle()
    pair.advance(11.0)

    ended = pair.client.one(FetchEnded)
    assert not ended.complete
    # The reset of one that has not begun may take with it whose stream it is.
    assert ended.code == MALFORMED or not before
    assert resets(pair) == [MALFORMED]
    header = 2
    assert handed_over(pair) in (before, header)
    assert pair.leave_behind() == []


def test_its_subscriptions_end_malformed_with_their_fills() -> None:
    pair, track = served()
    pair.server.budget = 3000
    pair.client.session.subscribe(NAME, fill=FROM_START)
    for _ in range(2):
        pair.drain(pair.client)
        pair.deliver_one()
        pair.drain(pair.server)
    assert pair.data_streams(pair.server)
    track.end(PublishDoneCode.MALFORMED_TRACK, "two versions")
    pair.server.budget = 1 << 20
    pair.settle()
    pair.advance(11.0)

    assert pair.client.one(SubscriptionEnded).code is PublishDoneCode.MALFORMED_TRACK
    assert set(resets(pair)) == {MALFORMED}
    assert not [event for event in pair.client.take(FillEnded) if event.complete]
    assert len(pair.client.take(ObjectReceived)) < 12
    assert pair.leave_behind() == []


def test_nothing_of_it_can_be_fetched_any_more() -> None:
    pair, track = served()
    track.end(PublishDoneCode.MALFORMED_TRACK, "two versions")
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()

    assert pair.client.one(RequestRefused).code is RequestErrorCode.MALFORMED_TRACK
    assert pair.leave_behind() == []


@pytest.mark.parametrize("code", [PublishDoneCode.TRACK_ENDED, PublishDoneCode.INTERNAL_ERROR])
def test_of_a_track_that_ended_otherwise_the_rest_is_sent(code: PublishDoneCode) -> None:
    pair = Pair()
    track = pair.server.publish(make_track(3, 4, ended=False))
    pair.server.budget = 0
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()
    track.end(code)
    pair.server.budget = 1 << 20
    pair.settle()

    assert len(pair.client.take(ObjectReceived)) == 12
    assert pair.client.one(FetchEnded).complete
