"""Lengths that a peer declares: nothing is set aside for what has not come."""

import tracemalloc
from collections.abc import Iterator

import pytest

from moqt.codepoints import StreamErrorCode
from moqt.location import Location
from moqt.session.commands import StopSending, StreamId
from moqt.session.config import Role
from moqt.session.events import (
    FetchEnded,
    ObjectPiece,
    ObjectReceived,
    StreamDiscarded,
    SubscriptionEnded,
)
from moqt.wire.filters import LocationFilter
from moqt.wire.messages.fetch import FetchOk
from tests.session.lone import NAME, Lone

TEN = "00010203040506070809"
#: Object 0 of Group 0: its fields up to the length of 2**56 - 1, 2**60 and 2**64 - 1 octets.
LENGTHS = ["feffffffffffffff", "ff1000000000000000", "ffffffffffffffffff"]


@pytest.fixture(autouse=True)
def _allocates_little() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def discarded(peer: Lone, stream_id: StreamId) -> None:
    """Check that a stream was stopped for what it declares, and nothing came of it."""
    assert [event.stream_id for event in peer.seen(StreamDiscarded)] == [stream_id]
    assert StopSending(stream_id, StreamErrorCode.EXCESSIVE_LOAD) in peer.commands
    assert not peer.seen(ObjectReceived)
    assert not peer.seen(ObjectPiece)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_object_of_any_declared_length_costs_its_subgroup_stream(
    length: str, pieces: bool
) -> None:
    peer = Lone(Role.CLIENT)
    peer.subscribed(7, pieces=pieces)
    stream_id = peer.uni()
    peer.data(stream_id, bytes.fromhex("10 07 00 80 00" + length + TEN))

    discarded(peer, stream_id)
    assert not peer.seen(SubscriptionEnded)
    peer.assert_alive()


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_object_of_any_declared_length_costs_its_fetch(length: str, pieces: bool) -> None:
    peer = Lone(Role.CLIENT)
    request_id = peer.session.fetch(NAME, location_filter=LocationFilter.none(), pieces=pieces)
    peer.drain()
    peer.say(peer.last_stream(), FetchOk(False, Location(0, 0)))
    stream_id = peer.uni()
    peer.data(stream_id, bytes([5, request_id]) + bytes.fromhex("1c 00 00 80" + length + TEN))

    discarded(peer, stream_id)
    assert [event.complete for event in peer.seen(FetchEnded)] == [False]
    peer.assert_alive()


@pytest.mark.parametrize("length", LENGTHS)
def test_properties_of_any_declared_length_allocate_nothing(length: str) -> None:
    peer = Lone(Role.CLIENT)
    peer.subscribed(7)
    stream_id = peer.uni()
    peer.data(stream_id, bytes.fromhex("11 07 00 80 00" + length + TEN))

    assert not peer.seen(ObjectReceived)
