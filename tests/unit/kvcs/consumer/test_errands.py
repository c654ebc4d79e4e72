import contextlib
import math
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.consumer import passing
from kvcs.consumer.errands import (
    LENGTH_OCTETS,
    MAX_OCTETS,
    Accepted,
    Bad,
    BadErrand,
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
    Message,
    Misplaced,
    NotDialled,
    Ping,
    Placed,
    Placing,
    Pong,
    Ready,
    Run,
    Shown,
    Silent,
    Stop,
    TimedOut,
    Wanted,
    length_of,
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
from moqt.codepoints import MAX_VI64, ParameterType
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.config import SessionConfig
from moqt.wire.filters import LocationFilter, RangeFilter
from moqt.wire.token import AuthorizationToken

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
            spec=ConnectionSpec(
                uri="moqt://relay/",
                config=SessionConfig(tokens=Shown((AuthorizationToken.use_value(1, b"t"),))),
            ),
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


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"null",
        b'"text"',
        b"[]",
        b"[1]",
        b"{}",
        b'{"":"xy"}',
        b'["tuple",1]',
        b'["range",0,1,0]',
        b'["os.system","true"]',
        b'["subprocess.Popen",["tuple","true"]]',
        b'["builtins.exec","raise SystemExit"]',
        b'["kvcs.consumer.errands.pack",1]',
        b'["kvcs.consumer.errands.BadErrand","a class, and none of values"]',
        b'["kvcs.kvsp.keys.ScopeKey",{"":"00"}]',
        b'["kvcs.consumer.errands.Stop"]',
        b'["kvcs.consumer.errands.Stop",1,2]',
        b'["kvcs.consumer.errands.Stop","1"]',
        b'["kvcs.consumer.errands.Stop",true]',
        b'["kvcs.consumer.errands.How",99]',
        b'["kvcs.consumer.errands.Rectangle",["range",0,1,1],["range",0,1,1]]',
        b'["kvcs.consumer.errands.Ping"] ["kvcs.consumer.errands.Ping"]',
        b"[" * 2_000,
        pickle.dumps(Ping()),
    ],
    ids=lambda octets: octets[:40].decode(errors="replace"),
)
def test_octets_of_anything_but_a_message_make_nothing_and_call_nobody(octets: bytes) -> None:
    with pytest.raises(BadErrand) as caught:
        unpack(octets)

    assert len(str(caught.value)) < 400


def test_no_module_is_imported_because_a_message_names_it() -> None:
    name = "moqt.aio.picoquic.library"
    hidden = sys.modules.pop(name, None)
    try:
        with pytest.raises(BadErrand, match="no class of values"):
            unpack(b'["moqt.aio.picoquic.library.Library"]')
        assert name not in sys.modules
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1.5, 1, MAX_VI64, True, None, Path("/a b")])
def test_plain_values_come_out_as_what_they_were(value: Any) -> None:
    [found] = passing.loads(passing.dumps((value,)))

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [object(), [1], {1: 2}, {1}, 1 << 64, "\ud800", bytearray(1)])
def test_what_cannot_be_passed_is_a_mistake_of_who_tries(value: Any) -> None:
    with pytest.raises(passing.Unpassable):
        passing.dumps((value,))


@given(st.data())
def test_what_was_cut_or_changed_is_a_message_or_refused(data: st.DataObject) -> None:
    octets = bytearray(pack(Run(4, ERRAND))[LENGTH_OCTETS:])
    at = data.draw(st.integers(0, len(octets) - 1))
    octets[at] ^= data.draw(st.integers(0, 255))

    with contextlib.suppress(BadErrand):
        assert isinstance(unpack(bytes(octets)), Message)
    with pytest.raises(BadErrand):
        unpack(bytes(octets[:at]))


def test_no_message_is_waited_for_that_is_longer_than_one_can_be() -> None:
    longest = Brought(1, tuple(Bad(1 << 15, n, Rejection.DIGEST, "x" * 80) for n in range(1 << 16)))
    assert length_of(pack(longest)[:LENGTH_OCTETS]) < MAX_OCTETS

    assert length_of(MAX_OCTETS.to_bytes(LENGTH_OCTETS, "big")) == MAX_OCTETS
    with pytest.raises(BadErrand, match="limit 67108864"):
        length_of((MAX_OCTETS + 1).to_bytes(LENGTH_OCTETS, "big"))


def test_the_tokens_of_a_connection_are_those_that_were_given_when_it_was_made() -> None:
    token = AuthorizationToken.use_value(1, b"t")

    assert Shown((token,))() == (token,)
    with pytest.raises(passing.Unpassable, match="a function cannot be passed"):
        pack(ConnectionSpec(uri="moqt://relay/", config=SessionConfig(tokens=lambda: ())))


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
