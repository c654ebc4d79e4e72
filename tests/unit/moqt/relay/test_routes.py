"""Who is asked for a Track, and until when a namespace is told of."""

import pytest

from moqt.errors import UsageError
from moqt.names import TrackNamespace
from moqt.relay.routes import Routes
from moqt.session.discovery import NamespaceDirectory

A = TrackNamespace.of("a")
AB = TrackNamespace.of("a", "b")
ABC = TrackNamespace.of("a", "b", "c")
ALL = TrackNamespace()


@pytest.fixture
def directory() -> NamespaceDirectory:
    return NamespaceDirectory()


@pytest.fixture
def routes(directory: NamespaceDirectory) -> Routes[str]:
    return Routes(directory)


def test_every_publisher_of_the_longest_prefix_is_asked_and_no_other(routes: Routes[str]) -> None:
    routes.add("short", 0, A)
    routes.add("one", 0, AB)
    routes.add("two", 0, AB)

    assert routes.publishers_of(ABC) == ["one", "two"]
    assert routes.publishers_of(TrackNamespace.of("a", "x")) == ["short"]


def test_prefixes_are_of_whole_fields(routes: Routes[str]) -> None:
    routes.add("one", 0, TrackNamespace.of("foo"))

    assert routes.publishers_of(TrackNamespace.of("foobar")) == []
    assert routes.publishers_of(TrackNamespace.of("fo")) == []


def test_nobody_is_asked_for_what_it_asks_for_itself(routes: Routes[str]) -> None:
    routes.add("short", 0, A)
    routes.add("one", 0, AB)

    assert routes.publishers_of(AB, lambda holder: holder != "one") == ["short"]


def test_who_announced_everything_is_asked_for_everything(routes: Routes[str]) -> None:
    routes.add("one", 0, ALL)

    assert routes.publishers_of(ABC) == ["one"]


def test_a_namespace_of_two_publishers_is_gone_with_the_last(
    routes: Routes[str], directory: NamespaceDirectory
) -> None:
    routes.add("one", 0, A)
    routes.add("two", 0, A)

    routes.forget("one")
    assert directory.matching(ALL) == {A}
    assert routes.remove("two", 0)
    assert directory.matching(ALL) == set()
    assert not routes.remove("two", 0)


def test_a_publisher_that_announced_twice_is_asked_once_until_both_are_withdrawn(
    routes: Routes[str],
) -> None:
    routes.add("one", 0, A)
    routes.add("one", 2, A)
    with pytest.raises(UsageError, match="stands already"):
        routes.add("one", 2, AB)

    assert (routes.count_of("one"), len(routes)) == (2, 2)
    assert routes.publishers_of(A) == ["one"]
    routes.remove("one", 0)
    assert routes.publishers_of(A) == ["one"]
    routes.remove("one", 2)
    assert routes.publishers_of(A) == []
