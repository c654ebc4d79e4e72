"""What is probed, what is found, and what makes a size be given up, on paths of every kind."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.aioquic.pathmtu import (
    BASE,
    CEILING,
    LIKELY,
    MAX_PROBES,
    RAISE_S,
    RETREAT_S,
    BlackHole,
    PathMtu,
)

ceilings = st.integers(BASE, CEILING)
#: What a path takes: mostly what is just enough or just too little for a size that is tried.
limits = st.one_of(
    st.integers(BASE, 20_000),
    st.builds(lambda size, more: size + more, st.sampled_from(LIKELY), st.integers(-1, 1)),
)


@dataclass
class Path:
    """A path that takes so much, the system in front of it so much; it loses probes at times."""

    limit: int
    refuses_above: int = 1 << 16
    losses: list[bool] = field(default_factory=list)
    most_in_a_row: int = MAX_PROBES - 1
    probes: list[int] = field(default_factory=list)
    _in_a_row: dict[int, int] = field(default_factory=dict)

    def search(self, found: PathMtu, now: float = 0.0) -> PathMtu:
        """Probe until there is nothing to probe any more."""
        while (size := found.next_probe(now)) is not None:
            assert found.size < size
            assert len(self.probes) < 100
            self.probes.append(size)
            found.probe_sent(size)
            assert found.next_probe(now) is None  # one at a time
            if size > self.refuses_above:
                found.refused(size, now)
            elif size > self.limit or self._loses(size):
                found.probe_lost(size)
            else:
                found.probe_acked(size)
        return found

    def _loses(self, size: int) -> bool:
        count = self._in_a_row.get(size, 0)
        if count >= self.most_in_a_row or not (self.losses and self.losses.pop()):
            return False
        self._in_a_row[size] = count + 1
        return True


def best(ceiling: int, limit: int) -> int:
    """Return the largest size of those that are tried and pass."""
    return max(size for size in (BASE, *LIKELY, ceiling) if size <= min(limit, ceiling))


# The search


@given(limits, ceilings, limits, st.lists(st.booleans(), max_size=40))
def test_a_search_ends_at_the_largest_size_that_passes_whatever_is_lost(
    limit: int, ceiling: int, device: int, losses: list[bool]
) -> None:
    path = Path(limit, device, losses)
    found = path.search(PathMtu(ceiling))

    assert found.size == best(ceiling, min(limit, device))
    assert max(map(path.probes.count, path.probes), default=0) <= MAX_PROBES
    assert not [size for size in path.probes if size > ceiling]


@given(limits, ceilings, st.lists(st.booleans(), max_size=60))
def test_no_loss_makes_it_take_a_size_that_does_not_pass_or_go_on_for_ever(
    limit: int, ceiling: int, losses: list[bool]
) -> None:
    path = Path(limit, losses=losses, most_in_a_row=100)
    found = path.search(PathMtu(ceiling))

    assert BASE <= found.size <= max(BASE, min(limit, ceiling))
    assert len(path.probes) <= MAX_PROBES * (len(LIKELY) + 1)


@pytest.mark.parametrize(
    ("path", "probes"),
    [
        pytest.param(Path(65_507), [CEILING], id="loopback"),
        pytest.param(Path(1472, 1472), [CEILING, 1452, 1472, 8952], id="Ethernet"),
        pytest.param(
            Path(1472, 8972), [CEILING, 1452, 1472, 8952, 8952, 8952], id="Ethernet behind jumbo"
        ),
        pytest.param(
            Path(1400, 1472), [CEILING, *[1452] * 3, 1232, 1280, 1372, *[1412] * 3], id="a tunnel"
        ),
    ],
)
def test_the_likely_sizes_come_first(path: Path, probes: list[int]) -> None:
    path.search(PathMtu())

    assert path.probes == probes


def test_a_larger_size_is_tried_again_after_a_while() -> None:
    found = Path(1452).search(PathMtu())
    assert found.size == 1452
    assert found.resumes_at == RAISE_S
    assert found.next_probe(RAISE_S - 1) is None

    wider = Path(8972)
    wider.search(found, now=RAISE_S)

    assert found.size == 8972
    assert wider.probes[0] == CEILING
    assert found.resumes_at == 2 * RAISE_S


def test_who_has_found_the_ceiling_rests() -> None:
    found = Path(CEILING).search(PathMtu())

    assert found.size == CEILING
    assert found.resumes_at is None


def test_what_becomes_of_a_probe_that_nobody_waits_for_changes_nothing() -> None:
    found = Path(1452).search(PathMtu())
    found.probe_acked(8972)
    found.probe_lost(1472)

    assert found.size == 1452


# A size that no longer holds


def occasion(found: PathMtu, number: int, octets: int = 1452, now: float = 0.0) -> None:
    """Lose some packets, and hear of a small one after them."""
    found.lost(first=number, last=number + 3, octets=octets)
    found.heard(number + 4, now)


def test_a_path_that_takes_less_than_before_is_given_the_least_and_searched_again() -> None:
    found = Path(CEILING).search(PathMtu())
    for number in (10, 20, 30):
        assert found.size == CEILING
        occasion(found, number, now=7.0)

    assert found.size == BASE
    assert found.suspected == PathMtu().suspected
    assert found.next_probe(7.0) is None
    assert found.resumes_at == 7.0 + RETREAT_S
    assert Path(1400).search(found, now=7.0 + RETREAT_S).size == 1372


def test_every_further_retreat_waits_longer_until_a_size_has_held() -> None:
    found = Path(CEILING).search(PathMtu())
    now, waits = 0.0, []
    for held_s in [0.0] * 11 + [RAISE_S - 1, RAISE_S, 0.0]:
        found.refused(CEILING, now)
        assert found.resumes_at is not None
        waits.append(found.resumes_at - now)
        now = found.resumes_at
        Path(CEILING).search(found, now)
        now += held_s

    assert waits[:3] == [RETREAT_S, 2 * RETREAT_S, 4 * RETREAT_S]
    assert waits[10:] == [RAISE_S, RAISE_S, RAISE_S, RETREAT_S]


@pytest.mark.parametrize("octets", [1201, 1400, 1452])
def test_data_that_the_system_refuses_bring_it_back_to_the_least_at_once(octets: int) -> None:
    found = Path(1452).search(PathMtu())
    found.refused(octets, 3.0)

    assert found.size == BASE


@pytest.mark.parametrize("octets", [100, BASE, 8972])
def test_what_no_data_can_have_had_changes_nothing(octets: int) -> None:
    found = Path(1452).search(PathMtu())
    found.refused(octets, 3.0)

    assert found.size == 1452


def test_one_large_packet_that_arrives_clears_the_path() -> None:
    found = Path(CEILING).search(PathMtu())
    for number in range(10, 100, 10):
        occasion(found, number)
        found.arrived(number + 5)

    assert found.size == CEILING


def test_what_was_sent_before_the_first_loss_clears_nothing() -> None:
    found = Path(CEILING).search(PathMtu())
    for number in (10, 20, 30):
        occasion(found, number)
        found.arrived(9)

    assert found.size == BASE


def test_a_peer_that_is_silent_for_long_is_not_taken_for_a_black_hole() -> None:
    found = Path(CEILING).search(PathMtu())
    for number in range(10, 20):
        found.lost(first=number, last=number, octets=CEILING)
        found.heard(9, 1.0)
    found.heard(25, 2.0)

    assert found.size == CEILING


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
    st.integers(1201, CEILING),
)
def test_a_black_hole_is_found_by_so_many_occasions_and_by_no_fewer(
    steps: list[tuple[int, bool]], octets: int
) -> None:
    hole, number, occasions, silent = BlackHole(), 0, 0, False
    for losses, hears in steps:
        for _ in range(losses):
            number += 2
            hole.lost(number, number + 1, octets)
            occasions += not silent
            silent = True
        number += 2
        silent = silent and not hears
        # Who hears nothing new is reminded of what is old.
        certain = hole.is_certain(number if hears else 0)

        assert certain == (occasions >= BlackHole.OCCASIONS and not silent)
