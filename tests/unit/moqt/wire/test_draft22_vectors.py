"""Every vector of ``tests/vectors/draft22.json``: octets that nobody here made up.

Each vector is one test, named after it. A kind without a runner fails, and so does a file that
lost vectors, so nothing passes because it was never run.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moqt.codepoints import GroupOrder, LocationFilterType, ObjectStatus, TokenAliasType
from moqt.codepoints import MessageType as M
from moqt.codepoints import ParameterType as P
from moqt.codepoints import SetupOption as O
from moqt.codepoints import SubgroupFlag as F
from moqt.errors import ProtocolError, UsageError
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.wire.datagram import (
    ObjectDatagram,
    decode_datagram,
    encode_datagram,
    padding_datagram,
)
from moqt.wire.fetchstream import FetchHeader, FetchObject, FetchReader, FetchWriter
from moqt.wire.filters import LocationFilter, LocationRange, RangeFilter, filter_defect
from moqt.wire.framing import MESSAGES, MessageBuffer, encode_message
from moqt.wire.messages.base import Context, Message
from moqt.wire.messages.fetch import FetchOk
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.request import Redirect, RequestError, RequestOk
from moqt.wire.messages.setup import Goaway, Setup
from moqt.wire.messages.subscribe import PublishDone, SubscribeOk
from moqt.wire.pairs import (
    Pairs,
    decode_object_properties,
    decode_pairs,
    encode_object_properties,
    encode_pairs,
)
from moqt.wire.parameters import (
    ALLOWED,
    Parameters,
    Scope,
    decode_parameters,
    encode_parameters,
)
from moqt.wire.reader import Reader
from moqt.wire.streamtype import classify_uni, padding_stream
from moqt.wire.subgroup import (
    SubgroupHeader,
    SubgroupObject,
    SubgroupReader,
    encode_subgroup_object,
)
from moqt.wire.token import AuthorizationToken
from moqt.wire.varint import decode_vi64, encode_vi64
from moqt.wire.writer import Writer

Fields = dict[str, Any]
Runner = Callable[[bytes, Fields], None]

ALL: list[Fields] = json.loads((Path(__file__).parents[3] / "vectors" / "draft22.json").read_text())

LIMIT = 1 << 20

#: Parsed but never sent: the draft does not settle whether it is allowed there.
DECODE_ONLY = {"playa_subscribe_tracks_next_object_group_order_descending"}


# --- From the words of the vectors to our values ------------------------------------------------


def namespace(fields: list[str]) -> TrackNamespace:
    return TrackNamespace.of(*fields)


def full_name(fields: Fields) -> FullTrackName:
    return FullTrackName(namespace(fields["track_namespace"]), fields["track_name"].encode())


def pairs(listed: list[Any]) -> Pairs:
    return tuple((t, bytes.fromhex(v) if isinstance(v, str) else v) for t, v in listed)


def token(fields: Fields) -> AuthorizationToken:
    return AuthorizationToken(
        TokenAliasType[fields["alias_type"]],
        fields.get("alias"),
        fields.get("token_type"),
        bytes.fromhex(fields.get("value_hex", "")),
    )


def location_filter(fields: Fields) -> LocationFilter:
    names = ("start_group", "start_object", "end_group_delta", "end_object")
    given = {name: fields[name] for name in names if name in fields}
    return LocationFilter(LocationFilterType(fields["filter_type"]), **given)


def parameter_value(type_: P, value: Any) -> Any:
    match type_:
        case P.AUTHORIZATION_TOKEN:
            return token(value)
        case P.LARGEST_OBJECT:
            return Location(*value)
        case P.LOCATION_FILTER:
            return location_filter(value)
        case P.TRACK_NAMESPACE_PREFIX:
            return namespace(value)
        case _ if not isinstance(value, dict):
            return value
        case _ if value.get("remove"):
            return RangeFilter.removal(type_)
        case _:
            ranges = tuple((start, end) for start, end in value["ranges"])
            return RangeFilter(type_, value["set_id"], value.get("property_type"), ranges)


def parameters(listed: list[Fields]) -> Parameters:
    values: dict[P, Any] = {}
    for entry in listed:
        type_ = P[entry["param"]]
        assert type_ == entry["type"]
        value = parameter_value(type_, entry["value"])
        if isinstance(value, RangeFilter | AuthorizationToken):
            value = (*values.get(type_, ()), value)
        values[type_] = value
    return Parameters(values)


def setup_option(entry: Fields) -> tuple[int, int | bytes]:
    number = entry["type"]
    if number == O.AUTHORIZATION_TOKEN:
        return number, token(entry["value"]).encode()
    if "value_hex" in entry:
        return number, bytes.fromhex(entry["value_hex"])
    value = entry["value"]
    return number, value.encode() if isinstance(value, str) else value


def message(fields: Fields) -> Message:
    number = M[fields["message"]]
    assert number == fields["type"]
    match number:
        case M.SETUP:
            return Setup(tuple(map(setup_option, fields["options"])))
        case M.GOAWAY:
            return Goaway(fields["new_session_uri"], fields["timeout_ms"])
        case M.REQUEST_OK:
            return RequestOk(parameters(fields["parameters"]), pairs(fields["track_properties"]))
        case M.REQUEST_ERROR:
            to = fields.get("redirect")
            return RequestError(
                fields["error_code"],
                fields["retry_interval"],
                fields["reason"],
                Redirect(to["connect_uri"], full_name(to)) if to else None,
            )
        case M.SUBSCRIBE_OK:
            return SubscribeOk(
                fields["track_alias"],
                parameters(fields["parameters"]),
                pairs(fields["track_properties"]),
            )
        case M.PUBLISH:
            return Publish(
                fields["request_id"],
                full_name(fields),
                fields["track_alias"],
                parameters(fields["parameters"]),
                pairs(fields["track_properties"]),
            )
        case M.PUBLISH_DONE:
            return PublishDone(fields["status_code"], fields["stream_count"], fields["reason"])
        case M.FETCH_OK:
            return FetchOk(
                bool(fields["end_of_track"]),
                Location(*fields["end_location"]),
                parameters(fields["parameters"]),
                pairs(fields["track_properties"]),
            )
    given: Fields = {}
    if "request_id" in fields:
        given["request_id"] = fields["request_id"]
    if "track_namespace" in fields:
        given["track"] = full_name(fields)
    if "track_namespace_prefix" in fields:
        given["prefix"] = namespace(fields["track_namespace_prefix"])
    if "track_namespace_suffix" in fields:
        given["suffix"] = namespace(fields["track_namespace_suffix"])
        if "track_name" in fields:
            given["name"] = fields["track_name"].encode()
    if "parameters" in fields:
        given["parameters"] = parameters(fields["parameters"])
    return MESSAGES[number](**given)


def context_of(fields: Fields) -> Context:
    """Say on whose stream an answer or a change came; the vectors leave that open."""
    match M[fields["message"]]:
        case M.REQUEST_OK:
            return M.TRACK_STATUS if fields["track_properties"] else M.SUBSCRIBE
        case M.REQUEST_UPDATE:
            prefix = any(p["param"] == "TRACK_NAMESPACE_PREFIX" for p in fields["parameters"])
            return M.SUBSCRIBE_NAMESPACE if prefix else M.SUBSCRIBE
    return None


def decode_whole(data: bytes, context: Context = None) -> Message:
    buffer = MessageBuffer()
    buffer.feed(data)
    [decoded] = buffer.messages(context)
    buffer.finish()
    return decoded


def scope_of(types: set[P]) -> Scope:
    """Return a place that may carry all of these."""
    return next(scope for scope in ALLOWED if types <= ALLOWED[scope])


# --- One runner per kind ------------------------------------------------------------------------


def run_vi64(data: bytes, fields: Fields) -> None:
    assert len(data) == fields["length"]
    assert decode_vi64(data) == (fields["value"], len(data))
    assert decode_vi64(b"\xff" + data + b"\xff", 1) == (fields["value"], len(data) + 1)
    assert (encode_vi64(fields["value"]) == data) == fields["minimal"]


def run_location(data: bytes, fields: Fields) -> None:
    r, w = Reader(data), Writer()
    location = Location(fields["group"], fields["object"])
    w.location(location)

    assert r.location() == location
    r.expect_end()
    assert w.getvalue() == data


def run_track_namespace(data: bytes, fields: Fields) -> None:
    r, w = Reader(data), Writer()
    w.track_namespace(namespace(fields["fields"]))

    assert r.track_namespace() == namespace(fields["fields"])
    r.expect_end()
    assert w.getvalue() == data


def run_reason_phrase(data: bytes, fields: Fields) -> None:
    r, w = Reader(data), Writer()
    w.reason_phrase(fields["text"])

    assert r.reason_phrase() == fields["text"]
    r.expect_end()
    assert w.getvalue() == data


def run_auth_token(data: bytes, fields: Fields) -> None:
    assert AuthorizationToken.decode(data) == token(fields)
    assert token(fields).encode() == data


def listed_pairs(fields: Fields) -> Pairs:
    return pairs([(p["type"], p.get("value", p.get("value_hex"))) for p in fields["pairs"]])


def run_key_value_pairs(data: bytes, fields: Fields) -> None:
    assert decode_pairs(Reader(data)) == listed_pairs(fields)
    assert encode_pairs(listed_pairs(fields)) == data


def run_object_properties(data: bytes, fields: Fields) -> None:
    r = Reader(data)
    block = r.prefixed()
    r.expect_end()

    assert len(block) == fields["length"]
    assert decode_object_properties(block) == listed_pairs(fields)
    assert encode_object_properties(listed_pairs(fields)) == data


def run_param(data: bytes, fields: Fields) -> None:
    run_param_list(b"\x01" + data, {"count": 1, "parameters": [fields]})


def run_param_list(data: bytes, fields: Fields) -> None:
    expected = parameters(fields["parameters"])
    scope = scope_of(set(expected))
    r, w = Reader(data), Writer()
    encode_parameters(w, expected, scope)

    assert data[0] == fields["count"]
    assert decode_parameters(r, scope) == expected
    r.expect_end()
    assert w.getvalue() == data


def run_control(data: bytes, fields: Fields) -> None:
    expected, context = message(fields), context_of(fields)

    assert decode_whole(data, context) == expected
    if fields.get("decode_only"):
        with pytest.raises(UsageError):
            encode_message(expected, context)
    else:
        assert encode_message(expected, context) == data
        assert encode_message(expected) == data


def subgroup_header(fields: Fields) -> SubgroupHeader:
    subgroup_id, priority = fields["subgroup_id"], fields["publisher_priority"]
    return SubgroupHeader(
        track_alias=fields["track_alias"],
        group_id=fields["group_id"],
        subgroup_id=None if subgroup_id == "first object id" else subgroup_id,
        publisher_priority=None if priority == "track default" else priority,
        has_properties=fields["properties"],
        end_of_group=fields["end_of_group"],
        first_object=fields["first_object"],
    )


def run_subgroup_header(data: bytes, fields: Fields) -> None:
    header = subgroup_header(fields)

    assert classify_uni(fields["type"]).name == "SUBGROUP_HEADER"
    assert data[0] == fields["type"]
    assert SubgroupHeader.decode(data) == (header, len(data))
    assert header.encode() == data
    assert (header.subgroup_id is None) == (fields["subgroup_id_mode"] == 1)
    assert bool(data[0] & F.EXPLICIT_ID) == (fields["subgroup_id_mode"] == 2)


def subgroup_object(fields: Fields) -> SubgroupObject:
    return SubgroupObject(
        fields["object_id"],
        ObjectStatus(fields.get("status", 0)),
        pairs(fields.get("properties", [])),
        bytes.fromhex(fields["payload_hex"]),
    )


def run_subgroup_stream(data: bytes, fields: Fields) -> None:
    header = subgroup_header(fields["header"])
    objects = [subgroup_object(o) for o in fields["objects"]]
    written, previous = header.encode(), None
    for obj in objects:
        written += encode_subgroup_object(
            previous,
            obj.object_id,
            properties=obj.properties if header.has_properties else None,
            payload_length=len(obj.payload),
            status=obj.status,
        )
        written += obj.payload
        previous = obj.object_id

    for step in (1, 2, 7, len(data)):
        reader = SubgroupReader(LIMIT)
        assert [o for piece in cut(data, step) for o in reader.feed(piece)] == objects
        reader.finish()
        assert reader.header == header
    assert written == data


def cut(data: bytes, step: int) -> Iterator[bytes]:
    return (data[at : at + step] for at in range(0, len(data), step))


def run_fetch_header(data: bytes, fields: Fields) -> None:
    assert classify_uni(fields["type"]).name == "FETCH_HEADER"
    assert FetchHeader.decode(data) == (FetchHeader(fields["request_id"]), len(data))
    assert FetchHeader(fields["request_id"]).encode() == data


def run_fetch_stream(data: bytes, fields: Fields) -> None:
    objects = [
        FetchObject(
            Location(o["group_id"], o["object_id"]),
            None if o["subgroup_id"] == "datagram" else o["subgroup_id"],
            o["publisher_priority"],
            pairs(o.get("properties", [])),
            bytes.fromhex(o["payload_hex"]),
        )
        for o in fields["objects"]
    ]
    order = GroupOrder[fields["group_order"].upper()]
    header = FetchHeader(fields["request_id"])
    written, writer = header.encode(), FetchWriter(order)
    for obj, listed in zip(objects, fields["objects"], strict=True):
        head = writer.object_header(
            obj.location,
            subgroup_id=obj.subgroup_id,
            publisher_priority=obj.publisher_priority,
            properties=obj.properties,
            payload_length=len(obj.payload),
        )
        assert head[0] == listed["flags"]
        written += head + obj.payload

    read = FetchHeader.decode(data)
    assert read is not None
    assert read[0] == header
    for step in (1, 2, 7, len(data)):
        reader = FetchReader(order, LIMIT)
        pieces = cut(data[read[1] :], step)
        assert [o for piece in pieces for o in reader.feed(piece)] == objects
        reader.finish()
    assert written == data


def run_datagram(data: bytes, fields: Fields) -> None:
    priority = fields["publisher_priority"]
    expected = ObjectDatagram(
        track_alias=fields["track_alias"],
        group_id=fields["group_id"],
        object_id=fields["object_id"],
        publisher_priority=None if priority == "track default" else priority,
        end_of_group=fields["end_of_group"],
        properties=pairs(fields.get("properties", [])),
        status=ObjectStatus(fields.get("status", 0)),
        payload=bytes.fromhex(fields.get("payload_hex", "")),
    )
    shortest = fields["zero_object_id"] == (fields["object_id"] == 0)

    assert data[0] == fields["type"]
    assert decode_datagram(data) == expected
    # Object 0 may be spelled out; what we send leaves it out.
    assert (encode_datagram(expected) == data) == shortest
    assert decode_datagram(encode_datagram(expected)) == expected


def run_padding_stream(data: bytes, fields: Fields) -> None:
    assert classify_uni(fields["type"]).name == "PADDING"
    assert padding_stream(fields["zero_bytes"]) == data


def run_padding_datagram(data: bytes, fields: Fields) -> None:
    assert decode_datagram(data) is None
    assert padding_datagram(fields["zero_bytes"]) == data


def read_filter(data: bytes) -> LocationFilter:
    """Read a LOCATION_FILTER parameter, type included."""
    found = decode_parameters(Reader(b"\x01" + data), Scope.SUBSCRIBE)[P.LOCATION_FILTER]
    assert isinstance(found, LocationFilter)
    return found


def run_location_filter_eval(data: bytes, fields: Fields) -> None:
    asked = read_filter(data)
    largest = Location(*fields["largest_object"]) if fields["largest_object"] else None
    end = fields["end_inclusive"]
    expected = LocationRange(Location(*fields["start"]), Location(*end) if end else None)

    assert asked == location_filter(fields["filter"])
    assert (expected.end is None) == fields["open_ended"]
    if fields["context"] == "SUBSCRIBE":
        assert asked.resolve(largest) == expected
    else:
        assert fields["context"] == "FETCH"
        assert asked.resolve_fetch(largest) == expected


def run_fill_range_eval(data: bytes, fields: Fields) -> None:
    inner, outer = fields["fill_filter"], fields["subscription_filter"]
    if inner is not None:
        assert read_filter(data) == location_filter(inner)
    else:
        assert data == b""
    stated = inner or outer
    effective = location_filter(stated) if stated else LocationFilter.none()
    found = effective.resolve_fetch(Location(*fields["largest_object"]))

    assert fields["forward"] == 1
    assert (found is not None) == fields["opens_fill_stream"]
    if found is not None:
        assert found.end is not None
        assert [list(found.start), list(found.end)] == fields["fill_range"]


def run_invalid(data: bytes, fields: Fields) -> None:
    if fields["of"] == "vi64":
        assert decode_vi64(data) is None
        with pytest.raises(ProtocolError):
            Reader(data).vi64()
        return
    if "INVALID_FILTER" in fields["error"]:
        assert fields["of"] == "param_list"
        decoded = decode_parameters(Reader(data), Scope.SUBSCRIBE)
        assert filter_defect(decoded, max_ranges=100) is not None
        return
    with pytest.raises(ProtocolError) as caught:
        REFUSING[fields["of"]](data, fields)
    code = caught.value.code.name
    named = "PROTOCOL_VIOLATION" if "unknown stream type" in fields["error"] else fields["error"]
    assert named.startswith(code), fields["why"]


def refuse_control(data: bytes, fields: Fields) -> None:
    # The context in which the rest of the message would be legal.
    contexts: dict[int, M] = {M.REQUEST_OK: M.TRACK_STATUS, M.REQUEST_UPDATE: M.SUBSCRIBE}
    context = contexts.get(data[0])
    decode_whole(data, context)


def refuse_subgroup(data: bytes, fields: Fields) -> None:
    reader = SubgroupReader(LIMIT)
    reader.feed(data)
    reader.finish()


def refuse_fetch(data: bytes, fields: Fields) -> None:
    read = FetchHeader.decode(data)
    assert read is not None
    order = GroupOrder.DESCENDING if "descending" in fields["why"] else GroupOrder.ASCENDING
    reader = FetchReader(order, LIMIT)
    reader.feed(data[read[1] :])
    reader.finish()


def refuse_datagram(data: bytes, fields: Fields) -> None:
    decode_datagram(data)


def refuse_token(data: bytes, fields: Fields) -> None:
    AuthorizationToken.decode(data)


REFUSING: dict[str, Runner] = {
    "control": refuse_control,
    "subgroup_stream": refuse_subgroup,
    "fetch_stream": refuse_fetch,
    "datagram": refuse_datagram,
    "auth_token": refuse_token,
}

RUNNERS: dict[str, Runner] = {
    "vi64": run_vi64,
    "location": run_location,
    "track_namespace": run_track_namespace,
    "reason_phrase": run_reason_phrase,
    "auth_token": run_auth_token,
    "key_value_pairs": run_key_value_pairs,
    "object_properties": run_object_properties,
    "param": run_param,
    "param_list": run_param_list,
    "control": run_control,
    "subgroup_header": run_subgroup_header,
    "subgroup_stream": run_subgroup_stream,
    "fetch_header": run_fetch_header,
    "fetch_stream": run_fetch_stream,
    "datagram": run_datagram,
    "padding_stream": run_padding_stream,
    "padding_datagram": run_padding_datagram,
    "location_filter_eval": run_location_filter_eval,
    "fill_range_eval": run_fill_range_eval,
    "invalid": run_invalid,
}


@pytest.mark.parametrize("case", ALL, ids=[case["name"] for case in ALL])
def test_agrees_with_the_vector(case: Fields) -> None:
    fields = dict(case["fields"])
    if case["name"] in DECODE_ONLY:
        fields["decode_only"] = True

    RUNNERS[case["kind"]](bytes.fromhex(case["hex"]), fields)


def test_no_vector_was_lost_and_every_kind_has_a_runner() -> None:
    assert len(ALL) == 380
    assert set(Counter(case["kind"] for case in ALL)) == set(RUNNERS)
    assert {case["name"] for case in ALL} >= DECODE_ONLY


def test_every_message_has_a_vector() -> None:
    seen = {case["fields"]["type"] for case in ALL if case["kind"] == "control"}

    assert seen == set(MESSAGES)
