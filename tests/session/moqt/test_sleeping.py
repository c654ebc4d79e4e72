"""Tracks whose publisher is paused: who wants to go on waits for its answer, and nobody else."""

import pytest

from moqt.codepoints import ParameterType as P
from moqt.codepoints import PublishDoneCode, SessionErrorCode
from moqt.location import Location
from moqt.session.config import SessionConfig
from moqt.session.events import (
    ObjectReceived,
    RequestId,
    SubscriptionEnded,
    TracksSubscribed,
    UpdateAccepted,
)
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import FillParameters, LocationFilter
from moqt.wire.messages.setup import Setup
from moqt.wire.parameters import Parameters
from tests.session.pair import NAME, Pair, locations, make_track, publish_group, whole

FROM_START = LocationFilter.absolute_start(0, 0)


class Sleeper:
    """A Track that sleeps, with a paused subscription to it, and how often it was wanted."""

    def __init__(self, **config: int) -> None:
        self.wanted = 0
        self.track = make_track(1, ended=False)
        self.pair = Pair(server=SessionConfig(**config))  # type: ignore[arg-type]
        self.pair.server.publish(self.track)
        self.request_id = self.subscribe(forward=False)
        self.track.sleep(self._want)

    def _want(self) -> None:
        self.wanted += 1

    def subscribe(self, *, forward: bool) -> RequestId:
        request_id = self.pair.client.session.subscribe(NAME, forward=forward)
        self.pair.settle()
        self.pair.client.take()
        return request_id

    def update(self, **values: object) -> RequestId:
        parameters = Parameters({P[name]: value for name, value in values.items()})
        update_id = self.pair.client.session.update(self.request_id, parameters)
        self.pair.settle()
        return update_id

    def answers(self) -> list[tuple[RequestId, Location | None]]:
        return [(e.update_id, e.largest) for e in self.pair.client.take(UpdateAccepted)]


def test_who_wants_to_go_on_is_answered_with_the_largest_object_of_the_time_it_does() -> None:
    sleeper = Sleeper()
    fill = FillParameters(Parameters({P.LOCATION_FILTER: FROM_START}))

    update_id = sleeper.update(FORWARD=1, FILL_PARAMETERS=fill)
    assert (sleeper.wanted, sleeper.answers()) == (1, [])
    publish_group(sleeper.track, 1, 4)  # what came as the past of it while it slept
    sleeper.track.wake()
    sleeper.pair.settle()
    publish_group(sleeper.track, 2, 4)
    sleeper.pair.settle()

    assert sleeper.answers() == [(update_id, Location(1, 3))]
    assert sorted(locations(sleeper.pair.client.take(ObjectReceived))) == whole(3, 4)


def test_an_update_that_comes_on_the_heels_of_a_change_is_answered_too() -> None:
    sleeper = Sleeper()
    pair, track = sleeper.pair, sleeper.track
    update_id = pair.client.session.update(sleeper.request_id, Parameters({P.FORWARD: 1}))
    pair.drain(pair.client)

    track.coverage_changed()  # which the session is told of and has not looked at
    assert pair.deliver_one()
    assert sleeper.wanted == 1
    track.coverage_changed()  # nor does this one wake the Track
    track.wake()
    pair.settle()

    assert sleeper.answers() == [(update_id, Location(0, 3))]


def test_updates_that_leave_it_paused_are_answered_at_once() -> None:
    sleeper = Sleeper()

    update_id = sleeper.update(SUBSCRIBER_PRIORITY=7)
    assert sleeper.answers() == [(update_id, Location(0, 3))]
    assert sleeper.wanted == 0
    assert not sleeper.track.is_wanted


def test_updates_are_answered_in_the_order_in_which_they_came() -> None:
    sleeper = Sleeper()

    ids = [sleeper.update(FORWARD=1), sleeper.update(SUBSCRIBER_PRIORITY=7)]
    assert sleeper.answers() == []
    assert sleeper.track.is_wanted
    ids.append(sleeper.update(FORWARD=0))
    sleeper.track.wake()
    sleeper.pair.settle()

    assert [update_id for update_id, _ in sleeper.answers()] == ids
    assert not sleeper.track.is_wanted


def test_more_updates_than_may_be_unanswered_close_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Setup, "max_request_updates", None)  # a peer that does not look
    sleeper = Sleeper(max_request_updates=2)

    for _ in range(2):
        sleeper.update(FORWARD=1)
    assert sleeper.pair.server.closed is None
    sleeper.update(FORWARD=1)
    assert sleeper.pair.server.closed is not None
    assert sleeper.pair.server.closed.code is SessionErrorCode.TOO_MANY_REQUEST_UPDATES


def test_who_subscribes_wants_it_unless_it_begins_paused() -> None:
    sleeper = Sleeper()

    sleeper.subscribe(forward=False)
    assert sleeper.wanted == 0
    sleeper.subscribe(forward=True)
    assert sleeper.wanted == 1
    assert sleeper.track.is_wanted


def test_whom_it_is_offered_to_wants_it() -> None:
    sleeper = Sleeper()

    sleeper.pair.client.session.subscribe_tracks(NAME.namespace)
    sleeper.pair.settle()
    assert sleeper.pair.client.take(TracksSubscribed)
    assert sleeper.wanted == 1


@pytest.mark.parametrize("code", [PublishDoneCode.TRACK_ENDED, PublishDoneCode.INTERNAL_ERROR])
def test_the_end_of_the_track_answers_and_ends_who_waits(code: PublishDoneCode) -> None:
    sleeper = Sleeper()
    update_id = sleeper.update(FORWARD=1)

    sleeper.track.end(code)
    sleeper.pair.settle()
    assert sleeper.answers() == [(update_id, Location(0, 3))]
    assert sleeper.pair.client.one(SubscriptionEnded).code is code
    assert not sleeper.track.is_asleep


def test_who_leaves_while_it_waits_is_not_waited_for() -> None:
    sleeper = Sleeper()
    sleeper.update(FORWARD=1)

    sleeper.pair.client.session.cancel(sleeper.request_id)
    sleeper.pair.settle()
    assert not sleeper.track.is_wanted
    sleeper.track.wake()
    sleeper.pair.settle()
    assert sleeper.pair.leave_behind() == []


def test_a_track_that_does_not_sleep_asks_nobody() -> None:
    track = LocalTrack(NAME)

    track.want()
    track.wake()
    assert not track.is_asleep
