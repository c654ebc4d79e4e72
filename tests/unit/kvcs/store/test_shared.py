"""Sinks that other processes place into: the same places, and memory that goes back."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.layout import Component, Layout
from kvcs.store.shared import SharedArraySink, SharedPlaces, SharedSink
from kvcs.store.sink import ArraySink, SafetensorsSink
from kvcs.store.source import SafetensorsSource

ROOT = Path(__file__).parents[4]
BLOCKS = 3
COMPAT = Descriptor(
    model="tiny",
    revision="1",
    layers=2,
    block_tokens=4,
    dtype="bfloat16",
    k_shape=(2, 8),
    v_shape=(1, 4),
)
LAYOUT = Layout.of(COMPAT)


def section(component: Component, layer: int, block: int) -> bytes:
    octets = LAYOUT.section_octets(component)
    return bytes((layer * 64 + block * 8 + component + at) % 256 for at in range(octets))


EVERY_PLACE = [
    (component, layer, block)
    for component in (Component.K, Component.V)
    for layer in range(COMPAT.layers)
    for block in range(BLOCKS)
]


def fill(places: Any, which: Any) -> None:
    for component, layer, block in which:
        places(component, layer, block, section(component, layer, block))


def assert_whole(k: Any, v: Any) -> None:
    for component, arrays in ((Component.K, k), (Component.V, v)):
        for layer, array in enumerate(arrays):
            expected = b"".join(section(component, layer, block) for block in range(BLOCKS))
            assert array.tobytes() == expected


def test_what_is_placed_through_the_file_is_in_the_arrays() -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)
    others = [SharedPlaces(sink.share(), COMPAT, BLOCKS) for _ in range(2)]

    fill(sink.place, EVERY_PLACE[::3])
    fill(others[0].put, EVERY_PLACE[1::3])
    fill(others[1].put, EVERY_PLACE[2::3])
    for other in others:
        other.close()
    sink.done()

    assert sink.complete
    assert_whole(sink.k, sink.v)
    assert sink.k[0].shape == (BLOCKS * 4, 2, 8)
    assert sink.k[0].dtype == LAYOUT.dtype


def test_what_another_process_places_is_there() -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)
    program = (
        "from tests.unit.kvcs.store.test_shared import *\n"
        f"places = SharedPlaces({str(sink.share())!r}, COMPAT, BLOCKS)\n"
        "fill(places.put, EVERY_PLACE)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert_whole(sink.k, sink.v)


def test_a_file_is_written_through_its_path(tmp_path: Path) -> None:
    sink = SafetensorsSink(tmp_path / "cache.safetensors", tokens=range(BLOCKS * 4))
    sink.begin(COMPAT, BLOCKS)
    other = SharedPlaces(sink.share(), COMPAT, BLOCKS)
    fill(other.put, EVERY_PLACE)
    other.close()
    sink.done()

    source = SafetensorsSource(tmp_path / "cache.safetensors")
    found = [(k, v) for _, k, v in source.layers(0, BLOCKS)]
    assert_whole([k for k, _ in found], [v for _, v in found])


def test_sinks_say_whether_they_can_be_shared(tmp_path: Path) -> None:
    assert isinstance(SharedArraySink(), SharedSink)
    assert isinstance(SafetensorsSink(tmp_path / "x.safetensors"), SharedSink)
    assert not isinstance(ArraySink(), SharedSink)


@pytest.mark.parametrize("end", ["done", "abandon"])
def test_it_can_be_shared_from_its_beginning_to_its_end(end: str) -> None:
    sink = SharedArraySink()
    with pytest.raises(ValueError, match="before begin"):
        sink.share()
    sink.begin(COMPAT, BLOCKS)
    path = sink.share()
    fill(sink.place, EVERY_PLACE)

    getattr(sink, end)()

    assert not path.exists()
    with pytest.raises(ValueError, match="after the end"):
        sink.share()
    assert_whole(sink.k, sink.v)  # which stay valid


def test_another_beginning_is_another_memory() -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)
    other = SharedPlaces(sink.share(), COMPAT, BLOCKS)
    sink.abandon()
    sink.begin(COMPAT, BLOCKS)

    fill(other.put, EVERY_PLACE)
    other.close()

    assert not any(np.count_nonzero(array.view(np.uint16)) for array in (*sink.k, *sink.v))


def memories() -> int:
    """How many memories without a disk this process has open or mapped."""
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is(fd)]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:kvcs" in line for line in (*opened, *mapped))


def _is(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_memory_goes_back_with_the_last_who_has_it() -> None:
    before = memories()
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)
    assert memories() > before

    del sink
    gc.collect()

    assert memories() == before


def test_more_than_the_limit_is_refused_before_anything_is_allocated() -> None:
    before = memories()
    with pytest.raises(ConfigError, match="limit 100"):
        SharedArraySink(limit_octets=100).begin(COMPAT, BLOCKS)
    assert memories() == before


def test_a_file_of_another_cache_is_refused(tmp_path: Path) -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)

    with pytest.raises(ConfigError, match="not the file of a cache of 4 blocks"):
        SharedPlaces(sink.share(), COMPAT, BLOCKS + 1)
    with pytest.raises(ConfigError, match="nothing"):
        SharedPlaces(tmp_path / "nothing", COMPAT, BLOCKS)


def test_what_does_not_fit_is_refused() -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)
    other = SharedPlaces(sink.share(), COMPAT, BLOCKS)

    with pytest.raises(ValueError, match="layer 2, block 0"):
        other.put(Component.K, 2, 0, section(Component.K, 0, 0))
    with pytest.raises(ValueError, match="section of 1 octets"):
        other.put(Component.K, 0, 0, b"x")
    other.close()


def test_shared_memory_grows_up_to_what_was_reserved_and_stays_where_it_is() -> None:
    sink = SharedArraySink(reserve_blocks=BLOCKS)
    sink.begin(COMPAT, 1)
    path = sink.share()
    early = SharedPlaces(path, COMPAT, 1)
    fill(early.put, [place for place in EVERY_PLACE if place[2] == 0])

    sink.grow(BLOCKS)
    assert sink.share() == path
    late = SharedPlaces(path, COMPAT, BLOCKS)
    fill(late.put, [place for place in EVERY_PLACE if place[2] > 0])
    early.close()
    late.close()

    assert_whole(sink.k, sink.v)
    with pytest.raises(ConfigError, match=f"room for {BLOCKS} blocks, more are needed"):
        sink.grow(BLOCKS + 1)
    sink.done()


def test_a_file_of_fewer_blocks_than_expected_is_refused() -> None:
    sink = SharedArraySink()
    sink.begin(COMPAT, BLOCKS)

    with pytest.raises(ConfigError, match=f"not the file of a cache of {BLOCKS + 1} blocks"):
        SharedPlaces(sink.share(), COMPAT, BLOCKS + 1)
    sink.done()
