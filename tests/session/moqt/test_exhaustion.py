"""What a session does with a peer that asks too fast, begins and does not end, or skips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.authority import Granted
from moqt.codepoints import MessageType, RequestErrorCode, SessionErrorCode, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import InvalidRequestId
from moqt.session.commands import ResetStream, StopSending, StreamId
from moqt.session.config import Role, SessionConfig
from moqt.session.events import (
    PeerLimited,
    PeerRequestEnded,
    RequestId,
    StreamDiscarded,
    SubscribeReceived,
)
from moqt.session.guests import GuestLimits, Guests
from moqt.session.pace import BURST_S
from moqt.session.requests import RequestIds
from moqt.wire.framing import encode_message
from moqt.wire.messages.request import RequestError, RequestUpdate
from moqt.wire.messages.setup import Setup
from moqt.wire.messages.subscribe import Subscribe
from moqt.wire.parameters import Parameters
from tests.session.lone import NAME, Lone
from tests.session.pair import make_track

PER_S = 10.0
BURST = int(PER_S * BURST_S)


def slow(**limits: float) -> Lone:
    """Return a session that takes few requests a second."""
    lone = Lone(config=SessionConfig(max_requests_per_s=PER_S, **limits))  # type: ignore[arg-type]
    lone.later(1000.0)
    return lone


def answer_to(lone: Lone, stream_id: StreamId) -> RequestError | None:
    messages = lone.messages(stream_id, MessageType.SUBSCRIBE)
    assert all(isinstance(m, RequestError) for m in messages)
    return messages[0] if messages else None  # type: ignore[return-value]  # as asserted


def codes(lone: Lone, stream_id: StreamId, kind: type[ResetStream | StopSending]) -> list[int]:
    return [c.code for c in lone.commands if isinstance(c, kind) and c.stream_id == stream_id]


# -- requests a second ---------------------------------------------------------------------------


def test_one_request_too_many_is_told_when_to_come_again_and_is_taken_then() -> None:
    lone = slow()
    for _ in range(BURST):
        assert answer_to(lone, lone.ask()) is None
    refused = answer_to(lone, lone.ask())

    assert refused is not None
    assert refused.error_code == RequestErrorCode.EXCESSIVE_LOAD
    assert refused.reason == "more than 10 requests a second"
    assert refused.retry_ms == 100
    assert len(lone.seen(SubscribeReceived)) == BURST, "the application hears nothing of it"
    lone.later(0.1)
    assert answer_to(lone, lone.ask()) is None


def test_the_time_is_told_ahead_of_what_comes_after_a_pause() -> None:
    """The last drain may be long ago, and says nothing of how fast requests come now."""
    lone = slow()
    for _ in range(BURST):
        lone.ask()
    lone.session.tell_time(lone.now + 60.0)

    assert answer_to(lone, lone.ask()) is None


def test_who_goes_on_in_spite_of_refusals_is_closed() -> None:
    lone = slow()
    for _ in range(2 * BURST):
        lone.ask()
    assert lone.close is None
    lone.ask()

    assert lone.close is not None
    assert lone.close.code == SessionErrorCode.INTERNAL_ERROR
    assert lone.close.reason == "more than 10 requests a second in spite of refusals"
    assert lone.session.terminated is not None
    assert lone.session.terminated.flooded


def test_one_update_too_many_closes_the_session() -> None:
    lone = slow()
    stream_id = lone.ask()
    [asked] = lone.seen(SubscribeReceived)
    lone.session.accept_subscribe(asked.request_id, make_track(1, ended=False))
    update = Parameters({P.SUBSCRIBER_PRIORITY: 7})
    for _ in range(BURST):
        lone.say(stream_id, RequestUpdate(lone.request_id(), update))
    assert lone.close is None
    lone.say(stream_id, RequestUpdate(lone.request_id(), update))

    assert lone.close is not None
    assert lone.close.code == SessionErrorCode.TOO_MANY_REQUEST_UPDATES


# -- messages that do not end --------------------------------------------------------------------


def test_a_first_message_that_does_not_end_in_time_costs_its_stream() -> None:
    lone, whole = slow(), encode_message(Subscribe(0, NAME, Parameters({})))
    stream_id = lone.bidi()
    lone.data(stream_id, whole[:1])
    lone.later(9.0)
    lone.data(stream_id, whole[1:5])
    assert not codes(lone, stream_id, ResetStream)
    lone.later(1.0)

    assert codes(lone, stream_id, ResetStream) == [StreamErrorCode.EXCESSIVE_LOAD]
    assert codes(lone, stream_id, StopSending) == [StreamErrorCode.EXCESSIVE_LOAD]
    lone.data(stream_id, whole[5:], fin=True)
    assert not lone.seen(SubscribeReceived)
    lone.assert_alive()


def test_an_update_that_does_not_end_in_time_costs_its_request() -> None:
    lone = slow(answer_timeout_s=100.0)
    stream_id = lone.ask()
    lone.data(stream_id, encode_message(RequestUpdate(2, Parameters({})))[:2])
    lone.later(10.0)

    assert lone.seen(PeerRequestEnded)
    assert codes(lone, stream_id, ResetStream)
    assert not len(lone.session._arrivals.half)
    lone.assert_alive()


def test_a_message_that_comes_to_its_end_is_waited_for_no_more() -> None:
    lone, whole = slow(answer_timeout_s=100.0), encode_message(Subscribe(0, NAME, Parameters({})))
    stream_id = lone.bidi()
    lone.data(stream_id, whole[:4])
    lone.later(9.0)
    lone.data(stream_id, whole[4:])
    lone.later(20.0)

    assert not codes(lone, stream_id, ResetStream)
    assert len(lone.seen(SubscribeReceived)) == 1


def test_half_messages_hold_no_more_than_their_limit() -> None:
    lone = slow(max_half_octets=1000)
    beginning = bytes.fromhex("03ffff") + bytes(397)  # of a SUBSCRIBE of 65,535 octets
    streams = [lone.bidi() for _ in range(3)]
    for stream_id in streams:
        lone.data(stream_id, beginning)

    assert [codes(lone, s, ResetStream) for s in streams] == [
        [],
        [],
        [StreamErrorCode.EXCESSIVE_LOAD],
    ]
    lone.assert_alive()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.floats(0, 6)), max_size=30))
def test_half_messages_are_never_lost_count_of(steps: list[tuple[int, int, float]]) -> None:
    lone = Lone(config=SessionConfig(max_half_octets=120, answer_timeout_s=1e6))
    streams = [lone.bidi() for _ in range(4)]
    octets = {
        s: encode_message(Subscribe(lone.request_id(), NAME, Parameters({})))
        + encode_message(RequestUpdate(lone.request_id(), Parameters({})))
        for s in streams
    }
    for which, count, pause_s in steps:
        stream_id = streams[which]
        piece, octets[stream_id] = octets[stream_id][:count], octets[stream_id][count:]
        if piece:
            lone.data(stream_id, piece)
        lone.later(pause_s)
        session = lone.session
        held = sum(buffer.pending for buffer, _ in session._arrivals.opening.values()) + sum(
            request.half_octets for request in session._requests.by_stream.values()
        )
        half = session._arrivals.half
        assert half._total == sum(half._octets.values()) == held <= 120
    lone.later(10.0)
    assert not len(lone.session._arrivals.half)
    assert lone.close is None


@pytest.mark.parametrize("begun", ["d0", "10", "05"])
def test_a_data_stream_whose_header_does_not_end_is_stopped(begun: str) -> None:
    lone = slow()
    stream_id = lone.uni()
    lone.data(stream_id, bytes.fromhex(begun))
    lone.later(9.9)
    assert not codes(lone, stream_id, StopSending)
    lone.later(0.1)

    assert codes(lone, stream_id, StopSending) == [StreamErrorCode.EXCESSIVE_LOAD]
    assert len(lone.seen(StreamDiscarded)) == 1
    lone.assert_alive()


def test_more_headers_that_do_not_end_than_there_is_room_for_are_stopped_at_once() -> None:
    lone = slow(max_parked_streams=2)
    streams = [lone.uni() for _ in range(3)]
    for stream_id in streams:
        lone.data(stream_id, b"\xd0")

    assert [len(codes(lone, s, StopSending)) for s in streams] == [0, 0, 1]
    lone.assert_alive()


# -- Request IDs ---------------------------------------------------------------------------------


def test_ids_that_are_skipped_for_ever_take_no_memory() -> None:
    ids = RequestIds(Role.SERVER)
    for number in range(100_000):
        ids.take(4 * number)

    assert len(ids._seen) <= 4096
    ids.take(4 * 100_000 - 2)  # just skipped
    with pytest.raises(InvalidRequestId, match="used twice"):
        ids.take(4 * 100_000 - 2)
    with pytest.raises(InvalidRequestId, match="used twice"):
        ids.take(2)  # long ago


# -- what a peer has in all its sessions together ------------------------------------------------


def visiting(guests: Guests, address: str = "192.0.2.1", who: str = "") -> Lone:
    class Naming:
        def decide(self, *asked: object) -> Granted:
            return Granted(who=who)

    lone = Lone(
        established=False, guests=guests, authority=Naming() if who else None, address=address
    )
    lone.say(lone.control, Setup.of())
    return lone


def test_one_session_too_many_of_a_peer_is_closed() -> None:
    guests = Guests(GuestLimits(max_sessions_of_peer=1))
    first, second = visiting(guests), visiting(guests)

    assert first.close is None
    assert second.close is not None
    assert second.close.code == SessionErrorCode.INTERNAL_ERROR
    assert second.close.reason == "as many sessions as one peer may have"
    assert visiting(guests, "192.0.2.2").close is None
    first.session.close()
    assert visiting(guests).close is None


def test_a_peer_is_who_the_authority_says_wherever_it_comes_from() -> None:
    guests = Guests(GuestLimits(max_sessions_of_peer=1))

    assert visiting(guests, "192.0.2.1", "team").close is None
    assert visiting(guests, "192.0.2.2", "team").close is not None
    assert visiting(guests, "192.0.2.1", "others").close is None


def test_one_request_too_many_of_a_peer_is_refused_until_another_one_is_over() -> None:
    guests = Guests(GuestLimits(max_requests_of_peer=1))
    first, second = visiting(guests), visiting(guests)
    open_stream = first.ask()

    refused = answer_to(second, second.ask())
    assert refused is not None
    assert refused.error_code == RequestErrorCode.EXCESSIVE_LOAD
    assert refused.reason == "1 requests are open"
    [limited] = second.seen(PeerLimited)
    assert (limited.who, limited.reason) == ("192.0.2.1", "1 requests are open")
    first.reset(open_stream)
    assert answer_to(second, second.ask()) is None


def test_what_is_refused_takes_no_place() -> None:
    guests = Guests()
    lone = visiting(guests)
    for _ in range(10):
        lone.ask()
        lone.session.reject(
            lone.seen(SubscribeReceived)[-1].request_id, RequestErrorCode.DOES_NOT_EXIST
        )
        lone.drain()
    assert guests.requests_of("192.0.2.1") == 0
    lone.ask()
    lone.session.close()
    lone.drain()
    assert guests.requests_of("192.0.2.1") == guests.sessions_of("192.0.2.1") == 0


def test_who_goes_on_talking_on_the_stream_of_a_request_that_is_over_is_asked_once_to_stop() -> (
    None
):
    lone = Lone()
    stream_id = lone.ask()
    lone.session.reject(RequestId(0), RequestErrorCode.DOES_NOT_EXIST)
    for _ in range(3):
        lone.data(stream_id, bytes(100))

    assert codes(lone, stream_id, StopSending) == [StreamErrorCode.CANCELLED]
    assert lone.session.terminated is None


def test_who_is_refused_at_once_is_not_asked_to_stop_before_it_goes_on() -> None:
    lone = slow()
    streams = [lone.ask() for _ in range(BURST + 1)]

    assert answer_to(lone, streams[-1]) is not None
    assert codes(lone, streams[-1], StopSending) == []


def test_who_ends_the_stream_of_a_request_that_is_over_is_not_asked_to_stop() -> None:
    lone = Lone()
    stream_id = lone.ask()
    lone.session.reject(RequestId(0), RequestErrorCode.DOES_NOT_EXIST)
    lone.data(stream_id, b"", fin=True)

    assert codes(lone, stream_id, StopSending) == []
