"""How long fetches and fills wait for what a Track does not know yet (MOQT, "FILL_TIMEOUT")."""

from typing import Any

import pytest

from moqt.codepoints import MAX_VI64, RangeMarkerKind, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.location import Location
from moqt.session.config import SessionConfig
from moqt.session.coverage import FIRST, Coverage, Knowledge
from moqt.session.events import (
    FetchEnded,
    FillEnded,
    ObjectReceived,
    RangeMarked,
    RequestId,
    SubscriptionEnded,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.parameters import Parameters
from tests.session.pair import NAME, Pair, payload_of

FROM_START = LocationFilter.absolute_start(0, 0)
LONG_S = 3600.0
LAST_ASKED = Location(2, MAX_VI64)


def passed_on() -> LocalTrack:
    """A Track as a relay has it: Groups 0 and 3 are here, 1 and 2 are asked for."""
    coverage = Coverage(Knowledge.COMPLETE)
    coverage.mark(Location(1, 0), LAST_ASKED, Knowledge.PENDING)
    track = LocalTrack(NAME, coverage=coverage)
    for group in (0, 3):
        subgroup = track.open_subgroup(group)
        subgroup.publish(0, payload_of(Location(group, 0)))
        subgroup.close()
    return track


def arrives(track: LocalTrack, group: int) -> None:
    """Have one Group of the past come, and nothing else of it."""
    at = Location(group, 0)
    stored = track.store_subgroup(group)
    stored.extend(stored.begin(0, 64), payload_of(at))
    assert track.coverage is not None
    track.coverage.settle(at, Location(group, MAX_VI64), Knowledge.COMPLETE)
    track.coverage_changed()


def asked(
    track: LocalTrack, *, stated_ms: int | None = None, limit_s: float | None = None
) -> tuple[Pair, RequestId]:
    """Have the client fetch all of a Track."""
    pair = Pair(server=SessionConfig(fill_timeout_s=limit_s))
    pair.server.publish(track)
    request_id = pair.client.session.fetch(
        NAME, location_filter=FROM_START, fill_timeout_ms=stated_ms
    )
    pair.settle()
    return pair, request_id


def told(pair: Pair) -> list[Any]:
    """Return what the client was told since: Locations of Objects, and ranges timed out."""
    found: list[Any] = []
    for event in pair.client.take():
        match event:
            case ObjectReceived():
                found.append(event.location)
            case RangeMarked(kind=RangeMarkerKind.TIMED_OUT):
                found.append((event.start, event.end))
            case RangeMarked():
                assert event.kind is RangeMarkerKind.NON_EXISTENT
            case FetchEnded() | FillEnded():
                found.append("end" if event.complete else "cut")
    return found


#: Two Groups are not there in time, and then the rest.
WITHOUT_THE_MIDDLE = [Location(0, 0), (Location(1, 0), LAST_ASKED), Location(3, 0), "end"]


def test_what_is_missing_when_the_time_stated_is_over_is_told_and_the_rest_is_sent() -> None:
    track = passed_on()
    pair, _ = asked(track, stated_ms=2000, limit_s=LONG_S)

    assert told(pair) == [Location(0, 0)]
    pair.advance(1.9)
    arrives(track, 1)
    pair.settle()
    assert told(pair) == [Location(1, 0)]
    pair.advance(0.2)  # in total: what came in between gives no further time
    assert told(pair) == [(Location(2, 0), LAST_ASKED), Location(3, 0), "end"]


def test_who_grants_no_time_gets_what_is_at_hand() -> None:
    pair, _ = asked(passed_on(), stated_ms=0)

    assert told(pair) == WITHOUT_THE_MIDDLE


def test_the_time_until_a_fetch_is_answered_counts() -> None:
    pair = Pair()
    pair.server.answers = False
    request_id = pair.client.session.fetch(NAME, location_filter=FROM_START, fill_timeout_ms=2000)
    pair.settle()
    pair.advance(2.1)

    pair.server.session.accept_fetch(request_id, passed_on())
    pair.settle()
    assert told(pair) == WITHOUT_THE_MIDDLE


def test_where_none_is_stated_only_the_time_counts_in_which_it_stands_still() -> None:
    track = passed_on()
    pair, _ = asked(track, limit_s=10.0)
    told(pair)

    pair.advance(9.9)
    arrives(track, 1)
    pair.settle()
    assert told(pair) == [Location(1, 0)]
    pair.advance(9.9)
    assert told(pair) == []
    pair.advance(0.2)
    assert told(pair) == [(Location(2, 0), LAST_ASKED), Location(3, 0), "end"]


def test_without_a_limit_it_waits() -> None:
    track = passed_on()
    pair, _ = asked(track)
    told(pair)

    pair.advance(LONG_S)
    assert told(pair) == []
    arrives(track, 1)
    arrives(track, 2)
    pair.settle()
    assert told(pair) == [Location(1, 0), Location(2, 0), Location(3, 0), "end"]


def test_a_fill_has_a_time_of_its_own_and_the_subscription_goes_on() -> None:
    track = passed_on()
    pair = Pair()
    pair.server.publish(track)
    fill = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START, P.FILL_TIMEOUT: 500}))
    pair.client.session.subscribe(NAME, fill=fill)
    pair.settle()
    told(pair)

    pair.advance(0.6)
    assert told(pair) == WITHOUT_THE_MIDDLE[1:]
    track.open_subgroup(4).publish(0, payload_of(Location(4, 0)))
    pair.settle()
    assert told(pair) == [Location(4, 0)]
    track.end()
    pair.settle()
    pair.client.one(SubscriptionEnded)


# -- half an Object ------------------------------------------------------------------------------


def half_an_object() -> tuple[LocalTrack, Any, Any]:
    """A Track whose second Object is half here."""
    track = LocalTrack(NAME, coverage=Coverage(Knowledge.COMPLETE))
    subgroup = track.open_subgroup(0)
    subgroup.publish(0, payload_of(FIRST))
    obj = subgroup.begin(1, 9000)
    subgroup.extend(obj, bytes(3000))
    return track, subgroup, obj


def test_half_an_object_that_was_not_begun_when_the_time_is_over_is_not_sent() -> None:
    track, _, _ = half_an_object()
    pair, _ = asked(track, stated_ms=0)

    [first, (_, last), end] = told(pair)
    assert (first, last, end) == (FIRST, Location(0, 1), "end")


@pytest.mark.parametrize("stated_ms", [None, 2000])
def test_an_object_that_was_begun_may_end_but_not_stand_still(stated_ms: int | None) -> None:
    track, subgroup, obj = half_an_object()
    pair, request_id = asked(track, stated_ms=stated_ms, limit_s=10.0)
    told(pair)

    pair.advance(9.0)
    subgroup.extend(obj, bytes(3000))
    pair.settle()
    pair.advance(9.0)
    assert told(pair) == []
    pair.advance(1.1)
    assert pair.client.take() == [
        FetchEnded(request_id=request_id, complete=False, code=StreamErrorCode.DELIVERY_TIMEOUT)
    ]


# -- what is left --------------------------------------------------------------------------------


def timers_of(pair: Pair) -> int:
    timers = pair.server.session._context.timers
    return len(timers._due) + len(timers._fresh)


@pytest.mark.parametrize("way", ["served", "refused", "cancelled", "stopped", "closed"])
def test_a_request_that_is_over_has_no_time_left(way: str) -> None:
    track = passed_on()
    pair = Pair()
    pair.server.publish(track)
    before = timers_of(pair)
    wanted = LocationFilter.absolute_start(9, 0) if way == "refused" else FROM_START
    request_id = pair.client.session.fetch(
        NAME, location_filter=wanted, fill_timeout_ms=(1 << 62) - 1
    )
    fill = FillParameters(Parameters({P.LOCATION_FILTER: wanted, P.FILL_TIMEOUT: (1 << 62) - 1}))
    subscription = pair.client.session.subscribe(NAME, fill=fill)
    pair.settle()
    if way in ("cancelled", "stopped", "closed"):
        assert timers_of(pair) > before
    if way == "served":
        for group in (1, 2):
            arrives(track, group)
    elif way == "cancelled":
        pair.client.session.cancel(request_id)
        pair.client.session.cancel(subscription)
    elif way == "stopped":
        for stream_id in pair.data_streams(pair.server):
            pair.stop(pair.client, stream_id)
    elif way == "closed":
        track.end()
        for group in (1, 2):
            arrives(track, group)
    pair.settle()

    assert timers_of(pair) == before
