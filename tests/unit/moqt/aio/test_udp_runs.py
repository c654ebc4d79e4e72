"""How datagrams are put together for one system call."""

from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.udp import MAX_RUN_OCTETS, MAX_SEGMENTS, runs


def sizes(*lengths: int) -> list[list[int]]:
    return [[len(d) for d in run] for run in runs([bytes(n) for n in lengths])]


def test_equal_sizes_go_together_and_a_shorter_one_ends_the_run() -> None:
    assert sizes(10, 10, 10, 4, 10, 10) == [[10, 10, 10, 4], [10, 10]]


def test_a_longer_one_begins_a_run() -> None:
    assert sizes(10, 11, 11) == [[10], [11, 11]]


def test_a_run_ends_where_the_kernel_would_refuse_it() -> None:
    assert [len(run) for run in sizes(*[100] * 130)] == [64, 64, 2]
    assert [len(run) for run in sizes(*[16_000] * 9)] == [4, 4, 1]


@given(st.lists(st.integers(1, 16_000), max_size=300))
def test_no_datagram_is_lost_or_moved_and_no_run_breaks_the_rules(lengths: list[int]) -> None:
    datagrams = [bytes(n) for n in lengths]
    found = [list(run) for run in runs(datagrams)]

    assert [d for run in found for d in run] == datagrams
    for run in found:
        assert len(run) <= MAX_SEGMENTS
        assert sum(map(len, run)) <= MAX_RUN_OCTETS
        assert all(len(d) == len(run[0]) for d in run[:-1])
        assert len(run[-1]) <= len(run[0])
