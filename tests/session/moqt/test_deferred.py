"""Objects whose payload lies elsewhere: brought when a stream comes to them, or told as unknown."""

import pytest

from moqt.codepoints import PublishDoneCode, RangeMarkerKind
from moqt.errors import UsageError
from moqt.location import Location
from moqt.session.coverage import FIRST, LAST, Coverage, Knowledge
from moqt.session.events import (
    FetchEnded,
    FillEnded,
    ObjectReceived,
    RangeMarked,
    SubscriptionEnded,
)
from moqt.session.localobjects import DeferredObject
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.session.pair import NAME, Pair, locations, payload_of

EVERYTHING = LocationFilter.absolute_start(0, 0)
PLACES = [(group, number) for group in range(2) for number in range(3)]


class Shelf:
    """A Track whose payloads are elsewhere, and who asks for them."""

    def __init__(self, *, whole: bool = True) -> None:
        self.track = LocalTrack(NAME, coverage=Coverage(Knowledge.UNKNOWN))
        self.track.raise_largest(Location(2, 0))
        self.wanted: list[DeferredObject] = []
        self.objects = {
            (group, number): self.track.store_subgroup(group, priority=group + 1).defer(
                number, 20, self.wanted.append
            )
            for group, number in PLACES
        }
        if whole and self.track.coverage is not None:
            self.track.coverage.mark(FIRST, LAST, Knowledge.COMPLETE)
        self.track.end(PublishDoneCode.TRACK_ENDED)

    def asked(self) -> list[tuple[int, int]]:
        """Return, and forget, which Objects are to be brought."""
        away = [obj for obj in self.wanted if not obj.parts and not obj.dropped]
        found = dict.fromkeys((obj.location.group, obj.location.object) for obj in away)
        self.wanted.clear()
        return list(found)

    def bring(self, *places: tuple[int, int]) -> None:
        for group, number in places:
            self.objects[group, number].bring(payload_of(Location(group, number), 20))
        self.track.changed(0)


def brought(pair: Pair) -> list[Location]:
    return locations(e for e in pair.client.seen if isinstance(e, ObjectReceived))


def fetching(shelf: Shelf) -> Pair:
    pair = Pair(chunk=7)
    pair.server.publish(shelf.track)
    pair.client.session.fetch(NAME, location_filter=EVERYTHING)
    pair.settle()
    return pair


def test_a_fetch_waits_for_each_object_and_asks_for_one_at_a_time() -> None:
    shelf = Shelf()
    pair = fetching(shelf)

    for at, place in enumerate(PLACES):
        assert shelf.asked() == [place]
        assert len(brought(pair)) == at
        shelf.bring(place)
        pair.settle()
    assert brought(pair) == PLACES
    assert pair.leave_behind() == []


def test_what_is_at_hand_already_is_sent_at_once() -> None:
    shelf = Shelf()
    shelf.bring(*PLACES)
    pair = fetching(shelf)

    assert brought(pair) == PLACES
    assert pair.client.one(FetchEnded).complete


def test_a_fill_is_served_alike_and_the_subscription_ends_after_it() -> None:
    shelf = Shelf()
    pair = Pair()
    pair.server.publish(shelf.track)
    pair.client.session.subscribe(NAME, fill=EVERYTHING)
    pair.settle()
    assert pair.client.take(SubscriptionEnded) == []
    while places := shelf.asked():
        shelf.bring(*places)
        pair.settle()

    assert brought(pair) == PLACES
    assert pair.client.one(FillEnded).complete
    assert pair.client.one(SubscriptionEnded).code is PublishDoneCode.TRACK_ENDED


def test_what_was_put_away_is_asked_for_again() -> None:
    shelf = Shelf()
    shelf.bring(*PLACES)
    for obj in shelf.objects.values():
        obj.put_away()
    pair = fetching(shelf)

    assert brought(pair) == []
    assert shelf.asked() == [PLACES[0]]


def test_what_is_put_away_while_it_is_sent_arrives_whole() -> None:
    shelf = Shelf()
    shelf.bring(*PLACES)
    pair = Pair()
    pair.server.publish(shelf.track)
    pair.server.budget = 15  # a step ends in the middle of an Object
    pair.client.session.fetch(NAME, location_filter=EVERYTHING)
    pair.drain(pair.client)
    while not [d for s, d in pair.server.outgoing.items() if s % 4 == 3 and s > 3]:
        pair.deliver_one()
        pair.drain(pair.server)
    for obj in shelf.objects.values():
        obj.put_away()
    pair.settle()

    assert brought(pair) == PLACES[:1]


@pytest.mark.parametrize("lost", PLACES)
def test_what_is_lost_before_it_is_sent_is_told_as_unknown_and_costs_no_stream(
    lost: tuple[int, int],
) -> None:
    shelf = Shelf()
    pair = fetching(shelf)
    while places := shelf.asked():
        if places == [lost]:
            shelf.objects[lost].lose()
            shelf.track.coverage_changed()
        else:
            shelf.bring(*places)
        pair.settle()

    assert brought(pair) == [place for place in PLACES if place != lost]
    [marked] = pair.client.take(RangeMarked)
    assert (marked.kind, marked.end) == (RangeMarkerKind.UNKNOWN, Location(*lost))
    assert pair.client.one(FetchEnded).complete


def test_what_is_not_held_is_unknown_beside_what_is() -> None:
    shelf = Shelf(whole=False)
    shelf.bring(*PLACES)
    pair = fetching(shelf)

    assert brought(pair) == PLACES
    kinds = {marked.kind for marked in pair.client.take(RangeMarked)}
    assert kinds == {RangeMarkerKind.UNKNOWN}


def test_a_reader_that_leaves_while_it_waits_is_asked_for_no_more() -> None:
    shelf = Shelf()
    pair = Pair()
    pair.server.publish(shelf.track)
    request_id = pair.client.session.fetch(NAME, location_filter=EVERYTHING)
    pair.settle()
    pair.client.session.cancel(request_id)
    pair.settle()
    shelf.asked()
    shelf.bring(PLACES[0])
    pair.settle()

    assert shelf.asked() == []
    assert not shelf.track.is_watched


def test_objects_are_deferred_where_they_could_be_stored() -> None:
    shelf = Shelf()
    subgroup = shelf.track.store_subgroup(1, priority=2)

    with pytest.raises(UsageError, match="there is an Object at"):
        subgroup.defer(2, 10, shelf.wanted.append)
    with pytest.raises(UsageError, match="past the Largest Object"):
        shelf.track.store_subgroup(3).defer(0, 10, shelf.wanted.append)


def test_those_that_come_out_of_order_are_held_in_order() -> None:
    shelf = Shelf()
    shelf.track.raise_largest(Location(9, 9))
    subgroup = shelf.track.store_subgroup(5)
    for number in (4, 0, 2):
        subgroup.defer(number, 1, shelf.wanted.append, properties=((2, number),))

    assert [obj.object_id for obj in subgroup.objects] == [0, 2, 4]
    assert subgroup.objects[1].properties == ((2, 2),)


def test_a_payload_of_another_length_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="19 octets for an Object of 20"):
        Shelf().objects[0, 0].bring(bytes(19))


def test_an_object_without_octets_is_at_hand() -> None:
    shelf = Shelf()
    shelf.track.raise_largest(Location(9, 9))
    obj = shelf.track.store_subgroup(5).defer(0, 0, shelf.wanted.append)

    assert obj.at_hand()
