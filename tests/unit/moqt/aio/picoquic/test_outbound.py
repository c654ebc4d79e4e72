"""What is handed to picoquic: the same octets in the same order, and never much of them."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiopquic")

from moqt.aio.picoquic.library import stream_ctx_destroy
from moqt.aio.picoquic.outbound import (
    _LARGE,
    MOST_AHEAD,
    RING_OCTETS,
    SendQueues,
)
from moqt.aio.picoquic.streams import Stream
from moqt.aio.picoquic.worker import Worker

STREAM = 6
SIZES = st.sampled_from([1, 74, _LARGE - 1, _LARGE, 32 << 10, RING_OCTETS - 1, RING_OCTETS + 1])


class Context:
    """Stands for aiopquic's: the ring of one stream, from which nothing is taken unless told."""

    def __init__(self) -> None:
        self.handed: list[bytes] = []
        self.fins: list[bool] = []
        self.taken = 0

    def tx_data_ring_used(self, _: int) -> int:
        return sum(map(len, self.handed)) - self.taken

    def tx_data_ring_sent(self, _: int) -> int:
        return self.taken

    def tx_send_atomic(
        self, stream_id: int, data: bytes, fin: bool, connection: int, record: int, ring: int
    ) -> int:
        assert type(data) is bytes, "aiopquic takes nothing else"
        assert self.tx_data_ring_used(record) + len(data) <= ring
        self.handed.append(data)
        self.fins.append(fin)
        return 0


class Asked:
    """Stands for the worker, which has room for every command."""

    def __init__(self) -> None:
        self.context = Context()

    def hand_over(self) -> bool:
        return True

    def ask(self, *_: Any) -> None:
        pass


class Sending:
    """The queues of a client with one stream."""

    def __init__(self) -> None:
        asked = Asked()
        self.records: set[int] = set()
        self.context = asked.context
        self.queues = SendQueues(cast(Worker, asked), 1, True, self.records)
        self.stream = Stream(STREAM)

    def write(self, data: bytes | memoryview, fin: bool = False) -> None:
        self.queues.write(self.stream, data, fin)

    def close(self) -> None:
        for record in self.records:
            stream_ctx_destroy(record)


@pytest.fixture
def sending() -> Iterator[Sending]:
    made = Sending()
    yield made
    made.close()


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12))
def test_what_is_handed_over_is_what_was_written(pieces: list[tuple[int, bool]]) -> None:
    sending = Sending()
    context, written = sending.context, b""
    for index, (size, as_view) in enumerate(pieces):
        data = bytes([index + 1]) * size
        written += data
        sending.write(memoryview(data) if as_view else data, index == len(pieces) - 1)
    for _ in range(2 * len(pieces) + 2):  # each time the ring is full at most
        sending.queues.hand_over(0.0)
        context.taken = sum(map(len, context.handed))
    sending.queues.look(0.0, 0.0)
    sending.close()

    assert b"".join(context.handed) == written
    assert context.fins == [False] * (len(context.fins) - 1) + [True]
    assert sending.queues.is_empty


def test_a_large_piece_is_handed_over_as_it_is_and_small_ones_together(sending: Sending) -> None:
    large = bytes(_LARGE)
    for piece in (b"head", b" and more", large, b"next head", large):
        sending.write(piece)

    sending.queues.hand_over(0.0)

    handed = sending.context.handed
    assert handed == [b"head and more", large, b"next head", large]
    assert handed[1] is handed[3] is large


def test_memory_that_is_written_again_is_not_what_is_sent(sending: Sending) -> None:
    memory = bytearray(b"as it was")
    sending.write(memoryview(memory))
    memory[:] = bytes(len(memory))

    sending.queues.hand_over(0.0)

    assert sending.context.handed == [b"as it was"]


def test_whatever_the_congestion_window_little_waits_ahead_of_the_wire(sending: Sending) -> None:
    sending.queues.window_is(16 << 20)

    assert sending.queues.budget() == MOST_AHEAD <= RING_OCTETS
    sending.write(bytes(MOST_AHEAD))
    sending.queues.hand_over(0.0)
    assert sending.queues.budget() == 0
