"""What is let go when room is needed, and what never is."""

from dataclasses import dataclass

from moqt.names import FullTrackName
from moqt.relay.cache import Cache
from moqt.session.budget import ByteBudget

MANY = 1000


@dataclass(eq=False)
class Held:
    name: FullTrackName
    octets: int = 10
    is_in_use: bool = False
    is_spare: bool = False
    is_stalled: bool = False
    expires_at: float | None = None


class Shelf:
    """A cache, and what it let go of."""

    def __init__(self, limit: int) -> None:
        self.budget = ByteBudget(limit)
        self.gone: list[str] = []
        self.cache: Cache[Held] = Cache(self.budget, self._release)

    def keep(self, publication: str, track: str = "t", **state: object) -> Held:
        held = Held(FullTrackName.of(publication, track), **state)  # type: ignore[arg-type]
        self.budget.take(held.octets)
        self.cache.keep(held)
        return held

    def _release(self, held: Held) -> None:
        self.budget.give_back(held.octets)
        self.gone.append(str(held.name))


def test_the_least_recently_used_publication_goes_first_and_as_a_whole() -> None:
    shelf = Shelf(40)
    shelf.keep("a", "k")
    shelf.keep("a", "v")
    shelf.keep("b")
    shelf.keep("c")
    shelf.cache.touch_if_held(FullTrackName.of("b", "t"))

    assert shelf.cache.make_room(MANY)
    assert shelf.gone == ["a--k", "a--v"]
    shelf.keep("d", octets=20)
    assert shelf.cache.make_room(MANY)
    assert shelf.gone[2:] == ["c--t"]


def test_a_publication_of_which_anything_is_sent_stays() -> None:
    shelf = Shelf(20)
    shelf.keep("a", "k")
    shelf.keep("a", "v", is_in_use=True)
    shelf.keep("b")

    assert shelf.cache.make_room(MANY) is False
    assert shelf.gone == ["b--t"]


def test_there_is_no_room_for_more_tracks_than_the_limit() -> None:
    shelf = Shelf(1000)
    first = shelf.keep("a", is_in_use=True)
    shelf.keep("b", is_in_use=True)

    assert not shelf.cache.make_room(2)
    first.is_in_use = False
    assert shelf.cache.make_room(2)
    assert shelf.gone == ["a--t"]


def test_what_is_too_old_goes_unless_it_is_being_sent() -> None:
    shelf = Shelf(1000)
    shelf.keep("a", expires_at=5.0)
    shelf.keep("b", expires_at=5.0, is_in_use=True)
    shelf.keep("c")

    shelf.cache.expire(4.9)
    assert shelf.gone == []
    shelf.cache.expire(5.0)
    assert shelf.gone == ["a--t"]


def test_a_track_that_is_not_held_any_more_is_not_let_go_of_twice() -> None:
    shelf = Shelf(1000)
    old = shelf.keep("a")
    new = shelf.keep("a")

    shelf.cache.drop(old)
    assert shelf.gone == []
    shelf.cache.drop(new)
    assert (shelf.gone, dict(shelf.cache)) == (["a--t"], {})


def test_what_is_kept_in_case_of_need_goes_when_nothing_else_does() -> None:
    shelf = Shelf(20)
    shelf.keep("a", is_in_use=True, is_spare=True)
    shelf.keep("b", is_in_use=True)
    shelf.keep("c")

    assert shelf.cache.make_room(MANY) is True
    assert shelf.gone == ["c--t", "a--t"]
    shelf.keep("d", is_in_use=True)
    assert shelf.cache.make_room(MANY) is False
    assert shelf.gone == ["c--t", "a--t"]


def test_those_who_take_nothing_are_parted_from_the_oldest_publication_that_they_alone_keep() -> (
    None
):
    shelf = Shelf(10)
    shelf.keep("a", "k", is_in_use=True, is_stalled=True)
    shelf.keep("a", "v", is_in_use=True)
    stalled = shelf.keep("b", "k", is_in_use=True, is_stalled=True)
    shelf.keep("b", "v", is_in_use=True, is_spare=True)
    shelf.keep("b", "manifest")
    shelf.keep("c", "k", is_in_use=True, is_stalled=True)

    assert shelf.cache.stalled() == [stalled]
