"""What the application accepts and the session must refuse: told to both ends, once."""

import pytest

from moqt.codepoints import RequestErrorCode
from moqt.names import TrackNamespace
from moqt.session import discovery
from moqt.session.events import PeerRequestEnded, RequestRefused
from moqt.session.localtrack import LocalTrack
from moqt.wire.filters import LocationFilter
from tests.session.pair import NAME, Pair


def published(objects: int) -> LocalTrack:
    track = LocalTrack(NAME)
    if objects:
        subgroup = track.open_subgroup(0)
        for object_id in range(objects):
            subgroup.publish(object_id, b"x")
        subgroup.close()
    return track


@pytest.mark.parametrize(
    ("objects", "wanted"),
    [
        (0, LocationFilter.none()),
        (2, LocationFilter.absolute_start(0, 2)),
        (2, LocationFilter.absolute_start(1, 0)),
    ],
)
def test_a_fetch_of_nothing_is_over_for_who_accepted_it(
    objects: int, wanted: LocationFilter
) -> None:
    pair = Pair()
    pair.server.publish(published(objects))
    request_id = pair.client.session.fetch(NAME, location_filter=wanted)
    pair.settle()

    assert pair.client.one(RequestRefused).code == RequestErrorCode.INVALID_RANGE
    assert pair.server.take(PeerRequestEnded) == [
        PeerRequestEnded(request_id=request_id, cancelled=False)
    ]
    assert pair.leave_behind() == []


def test_a_fetch_that_the_application_rejects_itself_is_not_told_again() -> None:
    pair = Pair()
    pair.client.session.fetch(NAME, location_filter=LocationFilter.none())
    pair.settle()

    assert pair.client.one(RequestRefused).code == RequestErrorCode.DOES_NOT_EXIST
    assert pair.server.take(PeerRequestEnded) == []


def test_too_many_namespaces_are_over_for_who_accepted_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "MAX_MATCHES", 1)
    pair = Pair()
    for name in ("a", "b"):
        pair.server.directory.add(TrackNamespace.of("kvcs-1", name))
    request_id = pair.client.session.subscribe_namespace(TrackNamespace.of("kvcs-1"))
    pair.settle()

    assert pair.client.one(RequestRefused).code == RequestErrorCode.NAMESPACE_TOO_LARGE
    assert pair.server.take(PeerRequestEnded) == [
        PeerRequestEnded(request_id=request_id, cancelled=False)
    ]
