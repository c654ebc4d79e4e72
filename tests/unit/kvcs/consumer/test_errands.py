from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer.errands import (
    LENGTH_OCTETS,
    Accepted,
    Bad,
    Brought,
    Dial,
    Dialled,
    Dropped,
    Ended,
    Errand,
    HangUp,
    How,
    HungUp,
    Leaving,
    Misplaced,
    NotDialled,
    Ping,
    Placed,
    Placing,
    Pong,
    Ready,
    Run,
    Silent,
    Stop,
    TimedOut,
    Wanted,
    pack,
    unpack,
)
from kvcs.consumer.events import FailureReason
from kvcs.consumer.failures import Failure
from kvcs.consumer.sessions import ConnectionSpec
from kvcs.consumer.settings import RetrievalSettings
from kvcs.consumer.spreading import Rectangle
from kvcs.errors import Rejection
from kvcs.kvsp.descriptor import Descriptor
from kvcs.profile.naming import DataTrack
from moqt.codepoints import ParameterType
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.filters import LocationFilter, RangeFilter

COMPAT = Descriptor(
    model="m",
    revision="r",
    layers=6,
    block_tokens=16,
    dtype="bfloat16",
    k_shape=(2, 4),
    v_shape=(2, 4),
    extra={"rope": {"theta": "1"}},
)
TRACK = DataTrack.parse("v.raw.s3")
PLACING = Placing(
    track=TRACK,
    file="/somewhere",
    descriptor=COMPAT.to_json(),
    first_block=7,
    blocks=5,
    position=-2,
    places=3,
    missing=(Rectangle(range(1, 4), range(2, 5)),),
    max_data_octets=1 << 20,
)
ERRAND = Errand(
    track=FullTrackName(TrackNamespace((b"kvcs-1", b"scope")), b"v.raw.s3"),
    past=LocationFilter.group_end(1, 2, 3),
    range_filters=(RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((2, 4),)),),
    timeout_s=5.0,
    placing=PLACING,
)


@pytest.mark.parametrize(
    "message",
    [
        Dial(
            spec=ConnectionSpec(uri="moqt://relay/"),
            uri="moqt://other/",
            timeout_s=1.0,
            settings=RetrievalSettings(connections=3, processes=True),
        ),
        Run(4, ERRAND),
        Stop(4),
        HangUp(),
        Ping(),
        Ready(),
        Pong(),
        Dialled(16),
        NotDialled(Failure(FailureReason.UNREACHABLE, "nobody listens", again=True)),
        Silent(True),
        Leaving(),
        HungUp("idle"),
        Accepted(4),
        Brought(
            4,
            (
                Placed(1, 2, bytes(32), 4096),
                Bad(1, 3, Rejection.DIGEST, "found and expected"),
                Dropped(0, 0),
                Misplaced("no room"),
                TimedOut(),
            ),
        ),
        *(Ended(4, how, 3, "why") for how in How),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_comes_out_of_the_socket_as_it_went_in(message: Any) -> None:
    octets = pack(message)

    assert int.from_bytes(octets[:LENGTH_OCTETS], "big") == len(octets) - LENGTH_OCTETS
    assert unpack(octets[LENGTH_OCTETS:]) == message


def test_what_objects_are_examined_by_is_what_the_manifest_says() -> None:
    entry = PLACING.entry()

    assert (entry.segment, entry.first_block, entry.blocks) == (3, 7, 5)
    assert entry.tracks == (TRACK,)
    assert PLACING.compat() == COMPAT


runs = st.builds(
    lambda start, length: range(start, start + length), st.integers(0, 6), st.integers(0, 6)
)
places = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(
    st.lists(st.builds(Rectangle, runs, runs), max_size=4),
    st.lists(places, max_size=80),
)
def test_what_is_wanted_can_be_claimed_once_and_nothing_else_at_all(
    missing: list[Rectangle], came: list[tuple[int, int]]
) -> None:
    wanted = Wanted(missing)

    claimed = Counter(place for place in came if wanted.claim(*place))

    there = {(x, y) for part in missing for x in part.layers for y in part.blocks}
    assert claimed == Counter(there & set(came))
    assert all((place in wanted) == (place in there - set(came)) for place in {*came, (0, 0)})
