"""Whose turn it is of those that share a socket."""

from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.aioquic.inboxes import ROUND_OCTETS, Inboxes, Read

HERE = ("192.0.2.1", 443)


def read(octets: int, mark: int = 0) -> Read:
    return Read(bytes(octets), mark, HERE)


def test_whoever_brings_the_least_is_first() -> None:
    inboxes = Inboxes[str]()
    for _ in range(20):
        inboxes.put("much", read(60_000))
    inboxes.put("little", read(40))
    inboxes.put("something", read(60_000))

    assert inboxes.round() == ["little", "something", "much"]


def test_nobody_takes_much_more_than_a_round() -> None:
    inboxes = Inboxes[str]()
    for _ in range(20):
        inboxes.put("much", read(60_000))
    taken = sum(len(one.data) for one in inboxes.take("much"))

    assert ROUND_OCTETS <= taken < ROUND_OCTETS + 60_000
    assert inboxes.octets == 20 * 60_000 - taken
    assert inboxes.round() == ["much"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 65_536)), max_size=40))
def test_all_is_taken_once_and_of_each_connection_in_the_order_in_which_it_came(
    reads: list[tuple[int, int]],
) -> None:
    inboxes = Inboxes[int]()
    for number, (connection, octets) in enumerate(reads):
        inboxes.put(connection, read(octets, number))
    taken: dict[int, list[int]] = {}
    while inboxes:
        for connection in inboxes.round():
            taken.setdefault(connection, []).extend(one.size for one in inboxes.take(connection))

    expected: dict[int, list[int]] = {}
    for number, (connection, _) in enumerate(reads):
        expected.setdefault(connection, []).append(number)
    assert taken == expected
    assert inboxes.octets == 0
