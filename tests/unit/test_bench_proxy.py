"""The bench's proxy: what becomes of datagrams, and a stream that comes whole all the same."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.aio.tls import make_certificates

ROOT = Path(__file__).parents[2]
DATAGRAMS = [bytes([n % 256]) * 1000 for n in range(1000)]


@pytest.fixture(scope="module")
def part() -> Callable[[str], ModuleType]:
    """Import a module of benchcases by its name."""

    def imported(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "scripts")
            return importlib.import_module(f"benchcases.{name}")

    return imported


@pytest.fixture(scope="module")
def line(part: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """Make one direction of a path."""
    proxy = part("proxy")

    def made(direction: str = "down", **path: Any) -> Any:
        return proxy.Line(proxy.Path(**path), direction)

    return made


def numbered(count: int) -> list[bytes]:
    return [n.to_bytes(4, "big") * 250 for n in range(count)]


def test_a_path_that_does_nothing_lets_all_out_at_once_and_in_order(
    line: Callable[..., Any],
) -> None:
    path = line()
    path.put(5.0, DATAGRAMS)

    assert path.next_at == 5.0
    assert path.take(5.0) == DATAGRAMS
    assert path.next_at is None
    assert (path.passed, path.octets, path.lost, path.overflowed) == (1000, 1_000_000, 0, 0)


def test_the_same_seed_loses_the_same_datagrams_and_the_other_direction_others(
    line: Callable[..., Any],
) -> None:
    def survivors(direction: str, seed: int) -> Sequence[bytes]:
        path = line(direction, loss=0.1, seed=seed)
        path.put(0.0, numbered(2000))
        found: Sequence[bytes] = path.take(0.0)
        assert path.lost == 2000 - len(found) == pytest.approx(200, rel=0.25)
        return found

    assert survivors("down", 1) == survivors("down", 1)
    assert survivors("down", 1) != survivors("up", 1)
    assert survivors("down", 1) != survivors("down", 2)


def test_each_datagram_of_a_batch_is_lost_by_itself(line: Callable[..., Any]) -> None:
    at_once, singly = line(loss=0.3), line(loss=0.3)
    at_once.put(0.0, numbered(100))
    for datagram in numbered(100):
        singly.put(0.0, [datagram])

    assert at_once.take(0.0) == singly.take(0.0)
    assert 0 < at_once.lost < 100


def test_a_delay_is_a_delay_for_each(line: Callable[..., Any]) -> None:
    path = line(delay_s=0.01)
    path.put(1.0, [b"a"])
    path.put(1.004, [b"b"])

    assert path.next_at == pytest.approx(1.01)
    assert path.take(1.009) == []
    assert path.take(1.0101) == [b"a"]
    assert path.take(1.02) == [b"b"]


def test_a_link_takes_a_burst_and_then_its_rate(line: Callable[..., Any]) -> None:
    path = line(octets_per_s=1e6, burst_octets=10_000, queue_s=1.0)
    path.put(0.0, DATAGRAMS[:100])

    assert len(path.take(0.0001)) == 10
    assert len(path.take(0.0451)) == 45
    assert path.take(0.0891) == DATAGRAMS[55:99]
    assert path.take(0.0901) == DATAGRAMS[99:100]


def test_an_idle_link_saves_up_no_more_than_one_burst(line: Callable[..., Any]) -> None:
    path = line(octets_per_s=1e6, burst_octets=10_000, queue_s=1.0)
    path.put(0.0, DATAGRAMS[:1])
    path.take(0.0)
    path.put(60.0, DATAGRAMS[:100])

    assert len(path.take(60.0001)) == 10


def test_what_would_wait_too_long_for_the_link_is_dropped_and_then_there_is_room_again(
    line: Callable[..., Any],
) -> None:
    path = line(octets_per_s=1e6, burst_octets=1000, queue_s=0.0505)
    path.put(0.0, DATAGRAMS)

    assert path.overflowed == 1000 - 51  # one burst, and a datagram a millisecond
    assert len(path.take(0.051)) == 51
    path.put(0.051, [b"again"])
    assert path.take(0.06) == [b"again"]


def test_what_is_on_its_way_is_bounded(
    part: Callable[[str], ModuleType], line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part("proxy"), "HELD_OCTETS", 5000)
    path = line(delay_s=1.0)
    path.put(0.0, DATAGRAMS[:8])

    assert path.overflowed == 3
    assert path.take(1.0) == DATAGRAMS[:5]
    path.put(1.0, DATAGRAMS[:5])
    assert path.overflowed == 3


@given(
    batches=st.lists(
        st.tuples(st.floats(0, 0.05), st.lists(st.integers(1, 1452), max_size=20)), max_size=20
    ),
    loss=st.sampled_from([0.0, 0.2]),
    rate=st.sampled_from([None, 1e5, 1e7]),
    delay_s=st.sampled_from([0.0, 0.02]),
)
def test_every_datagram_comes_out_in_order_or_is_counted(
    line: Callable[..., Any],
    batches: list[tuple[float, list[int]]],
    loss: float,
    rate: float | None,
    delay_s: float,
) -> None:
    path = line(loss=loss, octets_per_s=rate, delay_s=delay_s)
    now, sent, came = 0.0, 0, []
    for pause, sizes in batches:
        now += pause
        path.put(now, [n.to_bytes(2, "big") + bytes(size) for n, size in enumerate(sizes, sent)])
        sent += len(sizes)
        came += path.take(now)
    while (at := path.next_at) is not None:
        assert at >= now
        now = at
        came += path.take(now)

    assert came == sorted(came, key=lambda datagram: datagram[:2])
    assert len(came) == path.passed == sent - path.lost - path.overflowed
    assert path.octets == sum(map(len, came))
    assert loss or not path.lost
    assert rate or not path.overflowed


@pytest.mark.network
async def test_a_raw_stream_comes_whole_over_a_path_that_loses(
    part: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    raw, proxy = part("raw"), part("proxy")
    place = part("ends").Place(make_certificates(tmp_path), b"", b"")
    path = proxy.Path(loss=0.05, delay_s=0.001, seed=7)
    async with AsyncExitStack() as stack:
        sender = raw.RawSenderEnd(place)
        await sender.start(stack)
        between = proxy.ProxyEnd(place, port=await sender.port(), path=path)
        await between.start(stack)
        receiver = raw.RawReceiverEnd(place, port=await between.port())

        found = await receiver.receive(1_000_000)
        counts = await between.counts()

    assert found["octets"] == 1_000_000
    assert counts["down"]["lost"] > 0
    assert counts["down"]["octets"] > 1_000_000
    assert counts["down"]["overflowed"] == counts["up"]["overflowed"] == 0
