from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcs.depot.handler import DepotHandler
from kvcs.depot.stalls import Stalls
from kvcs.profile.naming import PROFILE
from kvcs.telemetry import Counters
from moqt.codepoints import PublishDoneCode, StreamErrorCode
from moqt.names import FullTrackName, TrackNamespace


def test_who_waits_at_one_place_for_too_long_is_told_of() -> None:
    stalls = Stalls[str](10.0)

    assert stalls.look({"a": 5, "b": 7}, 0.0) == []
    assert stalls.look({"a": 5, "b": 8}, 9.0) == []
    assert stalls.look({"a": 5, "b": 8}, 10.0) == ["a"]
    assert stalls.look({"a": 6, "b": 8}, 11.0) == []
    assert stalls.look({"a": 6, "b": 8}, 19.0) == ["b"]


def test_who_has_nothing_to_take_is_not_standing_still() -> None:
    stalls = Stalls[str](10.0)
    stalls.look({"a": 5}, 0.0)

    assert stalls.look({"a": None}, 9.0) == []
    assert stalls.look({"a": 5}, 20.0) == []


def test_those_whom_nobody_looked_at_meanwhile_begin_anew() -> None:
    stalls = Stalls[str](10.0)
    stalls.look({"a": 5}, 0.0)
    stalls.forget()

    assert stalls.look({"a": 5}, 100.0) == []


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.none())
        )
    )
)
def test_nobody_is_told_of_who_moved_within_the_time(
    looks: list[tuple[float, dict[str, int | None]]],
) -> None:
    stalls, now = Stalls[str](5.0), 0.0
    seen: list[tuple[float, dict[str, int | None]]] = []
    for pause_s, places in looks:
        now += pause_s
        seen.append((now, places))
        for reader in stalls.look(places, now):
            recent = [p.get(reader) for at, p in seen if at >= now - 5.0]
            assert set(recent) == {places[reader]}
            assert places[reader] is not None


class Session:
    """A session, as far as a handler looks at it."""

    peer_name = "192.0.2.1"

    def __init__(self, places: dict[int, int | None]) -> None:
        self.places = places
        self.ended: list[tuple[int, Any]] = []

    def waits_at(self, request_id: int) -> int | None:
        return self.places[request_id]

    def end_subscription(self, request_id: int, code: PublishDoneCode, reason: str) -> None:
        self.ended.append((request_id, code))

    def end_fetch(self, request_id: int, code: StreamErrorCode) -> None:
        self.ended.append((request_id, code))


class Connection:
    """Its connection."""

    peer_address = ("192.0.2.1", 1)

    def __init__(self, session: Session) -> None:
        self.session = session

    def wake(self) -> None:
        pass


def test_a_store_ends_who_takes_nothing_and_nobody_else() -> None:
    session = Session({0: 100, 2: 200, 4: None})
    connection: Any = Connection(session)
    depot: Any = SimpleNamespace(counters=Counters(), reading=lambda name, change: None)
    handler = DepotHandler(depot, bytes(32), stall_s=10.0)
    namespace = TrackNamespace((PROFILE, bytes(32), bytes(32), bytes(32), bytes(16)))
    for request_id in session.places:
        handler._begin_read(connection, request_id, FullTrackName(namespace, b"k.raw.s0"))  # type: ignore[arg-type]

    handler.look(0.0)
    session.places[2] = 201
    handler.look(10.0)

    assert session.ended == [
        (0, PublishDoneCode.TOO_FAR_BEHIND),
        (0, StreamErrorCode.TOO_FAR_BEHIND),
    ]
