from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, GroupOrder, MessageType, RequestErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.framing import MESSAGES, REQUESTS, MessageBuffer, encode_message
from moqt.wire.messages.base import Context, Message
from moqt.wire.messages.fetch import Fetch, FetchOk
from moqt.wire.messages.namespace import (
    Namespace,
    NamespaceDone,
    PublishNamespace,
    PublishSkipped,
    SubscribeNamespace,
    SubscribeTracks,
)
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import Redirect, RequestError, RequestOk, RequestUpdate
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import (
    PublishDone,
    PublishStateNotify,
    Subscribe,
    SubscribeOk,
    TrackStatus,
)
from moqt.wire.pairs import Pairs
from moqt.wire.parameters import ALLOWED, OK_SCOPES, UPDATE_SCOPES, Parameters, Scope
from moqt.wire.token import AuthorizationToken
from moqt.wire.varint import encode_vi64

NUMBERS = st.integers(0, 200) | st.integers(0, MAX_VI64)
TEXT = st.text(max_size=40)
LOCATIONS = st.builds(Location, NUMBERS, NUMBERS)
NAMESPACES = st.lists(st.binary(min_size=1, max_size=12), max_size=6).map(
    lambda fields: TrackNamespace(tuple(fields))
)
TRACKS = st.builds(FullTrackName, NAMESPACES, st.binary(max_size=20))
TOKENS = st.builds(AuthorizationToken.register, NUMBERS, NUMBERS, st.binary(max_size=20))
FILTERS = st.one_of(
    st.just(LocationFilter.NEXT_OBJECT),
    st.builds(LocationFilter.relative, NUMBERS),
    st.builds(LocationFilter.absolute_start, NUMBERS, NUMBERS),
)
#: Track Properties without a range of their own.
PROPERTIES: st.SearchStrategy[Pairs] = st.lists(
    st.tuples(st.sampled_from([0x02, 0x04, 0x3800, 0x3802]), NUMBERS)
    | st.tuples(st.sampled_from([0x3801, 0x3FFF]), st.binary(max_size=20)),
    max_size=4,
).map(lambda pairs: tuple(sorted(pairs, key=lambda pair: pair[0])))


def ranges_of(type_: P) -> st.SearchStrategy[Any]:
    prop = 0x3800 if type_ in (P.OBJECT_PROPERTY_FILTER, P.TRACK_PROPERTY_FILTER) else None
    one = st.integers(0, 255).map(lambda s: RangeFilter(type_, s, prop, ((s, None),)))
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def value_of(type_: P) -> st.SearchStrategy[Any]:
    match type_:
        case P.AUTHORIZATION_TOKEN:
            return st.lists(TOKENS, min_size=1, max_size=2).map(tuple)
        case P.LARGEST_OBJECT:
            return LOCATIONS
        case P.LOCATION_FILTER:
            return FILTERS
        case P.FILL_PARAMETERS:
            return parameters_for(Scope.FILL).map(FillParameters)
        case P.GROUP_ORDER:
            return st.sampled_from(GroupOrder)
        case P.FORWARD | P.INCLUDE_PROPERTIES:
            return st.integers(0, 1)
        case P.SUBSCRIBER_PRIORITY:
            return st.integers(0, 255)
        case P.TRACK_NAMESPACE_PREFIX:
            return NAMESPACES
        case _ if type_.name.endswith("_FILTER"):
            return ranges_of(type_)
        case _:
            return NUMBERS


def parameters_for(scope: Scope) -> st.SearchStrategy[Parameters]:
    rows = {type_: value_of(type_) for type_ in sorted(ALLOWED[scope])}
    return st.fixed_dictionaries({}, optional=rows).map(Parameters)


def in_context(kind: MessageType, message: st.SearchStrategy[Message]) -> Any:
    return message.map(lambda made: (made, kind))


REDIRECTS = st.builds(
    RequestError,
    st.just(RequestErrorCode.REDIRECT),
    NUMBERS,
    TEXT,
    st.builds(Redirect, TEXT, TRACKS),
)
S = Scope
#: Any message, with a request on whose stream it may travel.
MESSAGE_IN_CONTEXT: st.SearchStrategy[tuple[Message, Context]] = st.one_of(
    st.tuples(
        st.one_of(
            st.builds(Setup.of, implementation=TEXT, max_filter_ranges=NUMBERS),
            st.builds(Goaway, TEXT, NUMBERS),
            st.builds(RequestError, st.sampled_from([0x1, 0x10, 0x9D]), NUMBERS, TEXT),
            REDIRECTS,
            st.builds(Subscribe, NUMBERS, TRACKS, parameters_for(S.SUBSCRIBE)),
            st.builds(SubscribeOk, NUMBERS, parameters_for(S.SUBSCRIBE_OK), PROPERTIES),
            st.builds(Publish, NUMBERS, TRACKS, NUMBERS, parameters_for(S.PUBLISH), PROPERTIES),
            st.builds(PublishDone, NUMBERS, NUMBERS, TEXT),
            st.builds(PublishStateNotify, parameters_for(S.PUBLISH_STATE_NOTIFY)),
            st.builds(Fetch, NUMBERS, TRACKS, parameters_for(S.FETCH)),
            st.builds(FetchOk, st.booleans(), LOCATIONS, st.just(Parameters()), PROPERTIES),
            st.builds(TrackStatus, NUMBERS, TRACKS, parameters_for(S.TRACK_STATUS)),
            st.builds(PublishNamespace, NUMBERS, NAMESPACES, parameters_for(S.PUBLISH_NAMESPACE)),
            st.builds(
                SubscribeNamespace, NUMBERS, NAMESPACES, parameters_for(S.SUBSCRIBE_NAMESPACE)
            ),
            st.builds(Namespace, NAMESPACES),
            st.builds(NamespaceDone, NAMESPACES),
            st.builds(SubscribeTracks, NUMBERS, NAMESPACES, parameters_for(S.SUBSCRIBE_TRACKS)),
            st.builds(PublishSkipped, NAMESPACES, st.binary(max_size=20)),
        ),
        st.none(),
    ),
    *(
        st.tuples(st.builds(RequestUpdate, NUMBERS, parameters_for(scope)), st.just(kind))
        for kind, scope in UPDATE_SCOPES.items()
    ),
    *(
        st.tuples(st.builds(RequestOk, parameters_for(scope)), st.just(kind))
        for kind, scope in OK_SCOPES.items()
    ),
)


def decode_all(data: bytes, context: Context = None, step: int = 1 << 20) -> list[Message]:
    buffer, messages = MessageBuffer(), []
    for at in range(0, len(data), step):
        buffer.feed(data[at : at + step])
        messages += list(buffer.messages(context))
    buffer.finish()
    return messages


@given(MESSAGE_IN_CONTEXT)
def test_any_message_round_trips(case: tuple[Message, Context]) -> None:
    message, context = case
    data = encode_message(message, context)

    assert decode_all(data, context) == [message]
    assert encode_message(message) == data
    assert hash(message) == hash(decode_all(data, context)[0])


@given(MESSAGE_IN_CONTEXT, st.sampled_from([1, 2, 3, 7]))
def test_messages_come_out_however_they_were_chunked(
    case: tuple[Message, Context], step: int
) -> None:
    message, context = case
    data = encode_message(message, context) * 3

    assert decode_all(data, context, step) == [message] * 3


@given(MESSAGE_IN_CONTEXT, st.data())
def test_a_cut_message_is_waited_for_until_the_stream_ends(
    case: tuple[Message, Context], data: st.DataObject
) -> None:
    message, context = case
    encoded = encode_message(message, context)
    cut = data.draw(st.integers(1, len(encoded) - 1))
    buffer = MessageBuffer()
    buffer.feed(encoded[:cut])

    assert list(buffer.messages(context)) == []
    assert buffer.pending == cut
    with pytest.raises(ProtocolError, match=f"{cut} octets into a message"):
        buffer.finish()
    buffer.feed(encoded[cut:])
    assert list(buffer.messages(context)) == [message]
    assert buffer.pending == 0
    buffer.finish()


@given(MESSAGE_IN_CONTEXT, st.integers(1, 3))
def test_a_body_is_never_read_past_its_length(case: tuple[Message, Context], extra: int) -> None:
    message, context = case
    encoded = encode_message(message, context)
    head = 4 if message.type is MessageType.SETUP else 3
    body = encoded[head:]
    # Neither an integer nor the whole of anything else, wherever it stands.
    longer = body + b"\xff" * extra
    data = encoded[: head - 2] + len(longer).to_bytes(2, "big") + longer

    with pytest.raises(ProtocolError):
        decode_all(data, context)


@given(MESSAGE_IN_CONTEXT)
def test_a_length_that_is_too_short_is_refused(case: tuple[Message, Context]) -> None:
    message, context = case
    encoded = encode_message(message, context)
    head = 4 if message.type is MessageType.SETUP else 3
    if len(encoded) == head:
        return  # an empty SETUP has nothing to lose
    for length in range(len(encoded) - head):
        data = encoded[: head - 2] + length.to_bytes(2, "big") + encoded[head : head + length]
        try:
            [shorter] = decode_all(data, context)
        except ProtocolError:
            continue
        # Only a list of pairs can end early and still be one.
        assert message.type in (
            MessageType.SETUP,
            MessageType.SUBSCRIBE_OK,
            MessageType.PUBLISH,
            MessageType.FETCH_OK,
        )
        assert encode_message(shorter, context) == data


@pytest.mark.parametrize("number", [0x01, 0x20, 0x21, 0x40, 0x41, 0x1E, 0x7E, 0x3F, MAX_VI64])
def test_an_unknown_type_is_refused_before_its_body_arrives(number: int) -> None:
    buffer = MessageBuffer()
    buffer.feed(encode_vi64(number))

    with pytest.raises(ProtocolError, match=f"unknown message type {number:#x}"):
        list(buffer.messages())


def test_a_type_in_a_longer_form_is_the_same_type() -> None:
    subscribe = Subscribe(0, FullTrackName.of("kv", "k"))

    assert decode_all(b"\x80" + encode_message(subscribe)) == [subscribe]


def test_what_waits_is_less_than_the_length_field_can_say() -> None:
    biggest = Goaway("u" * 8192, MAX_VI64)
    buffer = MessageBuffer()
    for _ in range(50):
        for at in range(0, len(data := encode_message(biggest)), 1000):
            buffer.feed(data[at : at + 1000])
            list(buffer.messages())
            assert buffer.pending < 3 + 0xFFFF

    assert buffer.pending == 0


def test_a_message_beyond_the_length_field_is_the_callers_mistake() -> None:
    properties: Pairs = ((0x3801, b"x" * 40_000), (0x3803, b"x" * 40_000))

    with pytest.raises(UsageError, match="limit 65535"):
        encode_message(SubscribeOk(1, track_properties=properties))


def test_a_request_sets_the_context_of_what_follows_it() -> None:
    buffer = MessageBuffer()
    update = RequestUpdate(2, Parameters({P.SUBSCRIBER_PRIORITY: 3}))
    buffer.feed(encode_message(Fetch(0, FullTrackName.of("kv", "k"))) + encode_message(update))
    messages = buffer.messages()

    assert isinstance(next(messages), Fetch)
    assert next(messages) == update
    buffer.feed(encode_message(RequestUpdate(4, Parameters({P.FORWARD: 1}))))
    with pytest.raises(ProtocolError, match="UPDATE_FETCH"):
        list(buffer.messages(MessageType.FETCH))


def test_every_message_type_has_its_class_and_seven_begin_a_stream() -> None:
    assert set(MESSAGES) == set(MessageType)
    assert all(cls.type == number for number, cls in MESSAGES.items())
    assert {cls.type for cls in MESSAGES.values() if "request_id" in cls.__slots__} == {
        *REQUESTS,
        MessageType.REQUEST_UPDATE,
    }


@pytest.mark.parametrize(
    ("text", "message", "context"),
    [
        (
            "03002002 03026b760461636d6503733432 076c617965722d30 02 2105 0205 0121020000",
            Subscribe(
                2,
                FullTrackName.of("kv", "acme", "s42", "layer-0"),
                Parameters(
                    {
                        P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT,
                        P.FILL_PARAMETERS: FillParameters(
                            Parameters({P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)})
                        ),
                    }
                ),
            ),
            None,
        ),
        (
            "16001e04 03026b760461636d6503733432 076c617965722d30 02 2103000001 0101",
            Fetch(
                4,
                FullTrackName.of("kv", "acme", "s42", "layer-0"),
                Parameters(
                    {P.LOCATION_FILTER: LocationFilter.group_end(0, 0, 1), P.GROUP_ORDER: 1}
                ),
            ),
            None,
        ),
        (
            "03001f06 03026b760461636d6503733432 076c617965722d30 02 2105 0504 000003 05",
            Subscribe(
                6,
                FullTrackName.of("kv", "acme", "s42", "layer-0"),
                Parameters(
                    {
                        P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT,
                        P.OBJECTID_FILTER: RangeFilter(
                            P.OBJECTID_FILTER, 0, None, ((0, 3), (8, None))
                        ),
                    }
                ),
            ),
            None,
        ),
        ("18 0004 00 0101 00", FetchOk(False, Location(1, 1)), None),
        ("07 0001 00", RequestOk(), MessageType.SUBSCRIBE_NAMESPACE),
        ("10 0003 00 9388", Goaway("", 5000), None),
    ],
)
def test_the_worked_example_of_the_reference_reads_and_writes(
    text: str, message: Message, context: Context
) -> None:
    data = bytes.fromhex(text)

    assert decode_all(data, context) == [message]
    assert encode_message(message, context) == data
