from typing import Any

import pytest

from moqt.codepoints import GroupOrder, MessageType
from moqt.codepoints import ParameterType as P
from moqt.errors import KeyValueFormattingError, ProtocolError, UsageError
from moqt.location import Location
from moqt.names import TrackNamespace
from moqt.wire.filters import FillParameters, LocationFilter, RangeFilter
from moqt.wire.parameters import (
    ALLOWED,
    OK_SCOPES,
    REGISTRY,
    REPEATABLE,
    TOLERATED,
    UPDATE_SCOPES,
    Parameters,
    Scope,
    decode_parameters,
    encode_parameters,
    stray,
)
from moqt.wire.reader import Reader
from moqt.wire.token import AuthorizationToken
from moqt.wire.writer import Writer

#: Where each parameter may appear, copied once from the draft's per-message lists.
PINNED = {
    Scope.SUBSCRIBE: "02 03 04 06 10 20 21 22 23 25 26 27 28 32 35",
    Scope.SUBSCRIBE_OK: "08 09",
    Scope.PUBLISH: "02 03 06 08 09 10 20 21 22",
    Scope.PUBLISH_OK: "08",
    Scope.UPDATE_SUBSCRIPTION: "02 03 06 10 20 21 23 25 26 27 28 32",
    Scope.UPDATE_FETCH: "03 20",
    Scope.UPDATE_PUBLISH_NAMESPACE: "03",
    Scope.UPDATE_SUBSCRIBE_NAMESPACE: "03 34",
    Scope.UPDATE_SUBSCRIBE_TRACKS: "03 10 29 34",
    Scope.UPDATE_OK: "08 09",
    Scope.PUBLISH_STATE_NOTIFY: "09 10 21",
    Scope.FETCH: "03 0a 20 21 22 25 26 27 28 35",
    Scope.FETCH_OK: "",
    Scope.TRACK_STATUS: "03 35",
    Scope.TRACK_STATUS_OK: "09",
    Scope.PUBLISH_NAMESPACE: "03",
    Scope.SUBSCRIBE_NAMESPACE: "03",
    Scope.SUBSCRIBE_TRACKS: "03 10 22 25 26 27 28 29 35",
    Scope.NAMESPACE_OK: "08",
    Scope.FILL: "0a 20 21 22 25 26 27 28",
}

TOKEN = AuthorizationToken.use_value(0, b"secret")

#: One legal value of each parameter, and how it looks behind its type.
VALUES: dict[P, tuple[Any, str]] = {
    P.OBJECT_DELIVERY_TIMEOUT: (500, "81f4"),
    P.AUTHORIZATION_TOKEN: ((TOKEN,), "080300736563726574"),
    P.RENDEZVOUS_TIMEOUT: (500, "81f4"),
    P.SUBGROUP_DELIVERY_TIMEOUT: (0, "00"),
    P.EXPIRES: (30_000, "c07530"),
    P.LARGEST_OBJECT: (Location(0, 200), "0080c8"),
    P.FILL_TIMEOUT: (0, "00"),
    P.FORWARD: (1, "01"),
    P.SUBSCRIBER_PRIORITY: (200, "c8"),
    P.LOCATION_FILTER: (LocationFilter.NEXT_OBJECT, "05"),
    P.GROUP_ORDER: (GroupOrder.DESCENDING, "02"),
    P.FILL_PARAMETERS: (
        FillParameters(Parameters({P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)})),
        "050121020000",
    ),
    P.SUBGROUP_FILTER: ((RangeFilter(P.SUBGROUP_FILTER, 0, None, ((5, None),)),), "020005"),
    P.OBJECTID_FILTER: ((RangeFilter(P.OBJECTID_FILTER, 0, None, ((0, 9),)),), "03000009"),
    P.PRIORITY_FILTER: ((RangeFilter(P.PRIORITY_FILTER, 1, None, ((0, 255),)),), "04010080ff"),
    P.OBJECT_PROPERTY_FILTER: (
        (RangeFilter(P.OBJECT_PROPERTY_FILTER, 1, 0x3800, ((1, 4),)),),
        "0501b8000103",
    ),
    P.TRACK_PROPERTY_FILTER: (
        (RangeFilter(P.TRACK_PROPERTY_FILTER, 0, 0x10, ((1, 1),)),),
        "0400100100",
    ),
    P.NEW_GROUP_REQUEST: (500, "81f4"),
    P.TRACK_NAMESPACE_PREFIX: (TrackNamespace.of("kv"), "01026b76"),
    P.INCLUDE_PROPERTIES: (0, "00"),
}


def encode(parameters: Any, *scopes: Scope) -> bytes:
    w = Writer()
    encode_parameters(w, parameters, *scopes)
    return w.getvalue()


def decode(text: str, scope: Scope = Scope.SUBSCRIBE) -> Parameters:
    r = Reader(bytes.fromhex(text))
    found = decode_parameters(r, scope)
    r.expect_end()
    return found


def test_the_places_of_each_parameter_are_those_of_the_draft() -> None:
    written = {scope: " ".join(f"{p:02x}" for p in sorted(ALLOWED[scope])) for scope in Scope}

    assert written == PINNED


def test_every_parameter_has_a_row_and_a_value_here() -> None:
    assert set(REGISTRY) == set(P) == set(VALUES)
    assert {"25", "26", "27", "28", "29", "03"} == {f"{p:02x}" for p in REPEATABLE}


def test_every_request_has_an_answer_and_all_but_track_status_can_be_updated() -> None:
    requests = set(OK_SCOPES)

    assert len(requests) == 7
    assert requests - set(UPDATE_SCOPES) == {MessageType.TRACK_STATUS}


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("type_", P)
def test_a_parameter_is_read_and_sent_only_where_it_belongs(scope: Scope, type_: P) -> None:
    value, octets = VALUES[type_]
    wire = f"01{int(type_):02x}{octets}"
    given = Parameters({type_: value})

    if type_ in ALLOWED[scope]:
        assert encode(given, scope) == bytes.fromhex(wire)
    else:
        with pytest.raises(UsageError, match="misplaced"):
            encode(given, scope)
    if type_ in ALLOWED[scope] | TOLERATED.get(scope, frozenset()):
        assert decode(wire, scope) == given
    else:
        with pytest.raises(ProtocolError, match="not allowed"):
            decode(wire, scope)
    assert stray(given, scope) == (None if type_ in ALLOWED[scope] else type_)


@pytest.mark.parametrize("type_", P)
def test_only_tokens_and_range_filters_repeat(type_: P) -> None:
    scope = next(scope for scope in Scope if type_ in ALLOWED[scope])
    value, octets = VALUES[type_]
    twice = f"02{int(type_):02x}{octets}00{octets}"

    if type_ in REPEATABLE:
        assert decode(twice, scope) == Parameters({type_: value + value})
        assert encode({type_: value + value}, scope) == bytes.fromhex(twice)
    else:
        with pytest.raises(ProtocolError, match="twice"):
            decode(twice, scope)


@pytest.mark.parametrize("type_", P)
def test_every_cut_is_refused(type_: P) -> None:
    scope = next(scope for scope in Scope if type_ in ALLOWED[scope])
    wire = bytes.fromhex(f"01{int(type_):02x}{VALUES[type_][1]}")

    for cut in range(len(wire)):
        with pytest.raises(ProtocolError):
            decode_parameters(Reader(wire[:cut]), scope)


@pytest.mark.parametrize("type_", [P.FORWARD, P.GROUP_ORDER, P.INCLUDE_PROPERTIES])
def test_a_value_out_of_range_is_refused_both_ways(type_: P) -> None:
    legal = {P.GROUP_ORDER: {1, 2}}.get(type_, {0, 1})
    for value in range(256):
        wire = f"01{int(type_):02x}{value:02x}"
        if value in legal:
            assert decode(wire)[type_] == value
            continue
        with pytest.raises(ProtocolError, match=type_.name):
            decode(wire)
        with pytest.raises(UsageError, match=type_.name):
            encode({type_: value}, Scope.SUBSCRIBE)


def test_unknown_parameters_close_even_behind_an_overflow() -> None:
    with pytest.raises(ProtocolError, match="0x3f"):
        decode("01803f01")
    # 0x10, then 2**64 - 1 more: must not wrap round to 0x0f or anything known.
    with pytest.raises(ProtocolError, match="unknown parameter"):
        decode("021001ffffffffffffffffff00")


def test_a_count_larger_than_the_body_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="cut short"):
        decode("ffffffffffffffffff1001")


def test_a_body_full_of_repeats_is_read() -> None:
    count = 16_000
    body = "be80" + "2600" + "0000" * (count - 1)

    assert len(decode(body, Scope.SUBSCRIBE)[P.OBJECTID_FILTER]) == count


def test_an_unreadable_token_has_its_own_code() -> None:
    with pytest.raises(KeyValueFormattingError):
        decode("0103020700")


FROM_START = FillParameters(Parameters({P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0)}))


@pytest.mark.parametrize(
    ("wire", "inner"),
    [
        ("2105020501" + "21020000", FROM_START),  # counted, as we send it
        ("21050204" + "21020000", FROM_START),  # bare
        ("2105020100", FillParameters(Parameters())),  # counted and empty
        ("21050200", FillParameters(Parameters())),  # no octets at all
    ],
)
def test_a_fill_is_read_with_and_without_a_count(wire: str, inner: FillParameters) -> None:
    found = decode("02" + wire)

    assert found == {P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT, P.FILL_PARAMETERS: inner}


def test_a_bare_fill_of_several_parameters_is_read() -> None:
    found = decode("01230a" + "0a05" + "1640" + "01020000" + "0101")

    assert found[P.FILL_PARAMETERS].parameters == {
        P.FILL_TIMEOUT: 5,
        P.SUBSCRIBER_PRIORITY: 64,
        P.LOCATION_FILTER: LocationFilter.absolute_start(0, 0),
        P.GROUP_ORDER: 1,
    }


@pytest.mark.parametrize(
    "fill",
    [
        "0401230100",  # a fill inside a fill
        "050103020201",  # a token inside
        "03013500",  # INCLUDE_PROPERTIES inside
        "0601" + "2102000000",  # an octet too many
        "03012102",  # cut
        "0111",  # neither a count nor a parameter
    ],
)
def test_a_fill_with_anything_else_in_it_is_refused(fill: str) -> None:
    with pytest.raises(ProtocolError):
        decode("0123" + fill)


def test_a_fill_is_sent_counted_in_a_scope_of_its_own() -> None:
    asked = Parameters(
        {P.LOCATION_FILTER: LocationFilter.NEXT_OBJECT, P.FILL_PARAMETERS: FROM_START}
    )

    assert encode(asked, Scope.SUBSCRIBE).hex() == "022105020501" + "21020000"
    with pytest.raises(UsageError, match="FORWARD in FILL"):
        encode({P.FILL_PARAMETERS: FillParameters(Parameters({P.FORWARD: 1}))}, Scope.SUBSCRIBE)


def test_order_of_mention_does_not_matter() -> None:
    a = Parameters({P.FORWARD: 1, P.EXPIRES: 5})
    b = Parameters({P.EXPIRES: 5, P.FORWARD: 1})

    assert a == b
    assert hash(a) == hash(b)
    assert encode(b, Scope.PUBLISH) == encode(a, Scope.PUBLISH) == bytes.fromhex("0208050801")


def test_an_update_replaces_what_it_states_and_keeps_the_rest() -> None:
    before = Parameters({P.FORWARD: 0, P.SUBSCRIBER_PRIORITY: 7})

    after = before | {P.FORWARD: 1}

    assert after == {P.FORWARD: 1, P.SUBSCRIBER_PRIORITY: 7}
    assert before[P.FORWARD] == 0


def test_one_token_or_filter_alone_is_a_tuple_of_one() -> None:
    assert Parameters({P.AUTHORIZATION_TOKEN: TOKEN})[P.AUTHORIZATION_TOKEN] == (TOKEN,)
    assert encode({P.AUTHORIZATION_TOKEN: TOKEN}, Scope.FETCH)[:2] == b"\x01\x03"


def test_a_filter_under_the_wrong_type_is_the_callers_mistake() -> None:
    f = RangeFilter(P.OBJECTID_FILTER, 0, None, ((0, 1),))

    with pytest.raises(UsageError, match="OBJECTID_FILTER among"):
        encode({P.SUBGROUP_FILTER: f}, Scope.SUBSCRIBE)
