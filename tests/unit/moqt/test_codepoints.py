"""The wire numbers, copied once from the draft, so that a slip in ``codepoints`` shows."""

from enum import IntEnum

import pytest

from moqt import DRAFT, codepoints
from moqt.codepoints import (
    MANDATORY_PROPERTIES,
    MAX_VI64,
    DatagramFlag,
    DatagramType,
    FetchFlag,
    GroupOrder,
    LocationFilterType,
    MessageType,
    ObjectStatus,
    ParameterType,
    PropertyType,
    PublishDoneCode,
    RangeMarkerKind,
    RequestErrorCode,
    SessionErrorCode,
    SetupOption,
    StreamErrorCode,
    StreamType,
    SubgroupFlag,
    TokenAliasType,
    known,
)

PINNED: dict[type[IntEnum], dict[str, int]] = {
    MessageType: {
        "REQUEST_UPDATE": 0x02,
        "SUBSCRIBE": 0x03,
        "SUBSCRIBE_OK": 0x04,
        "REQUEST_ERROR": 0x05,
        "PUBLISH_NAMESPACE": 0x06,
        "REQUEST_OK": 0x07,
        "NAMESPACE": 0x08,
        "PUBLISH_DONE": 0x0B,
        "TRACK_STATUS": 0x0D,
        "NAMESPACE_DONE": 0x0E,
        "PUBLISH_SKIPPED": 0x0F,
        "GOAWAY": 0x10,
        "FETCH": 0x16,
        "FETCH_OK": 0x18,
        "PUBLISH": 0x1D,
        "PUBLISH_STATE_NOTIFY": 0x22,
        "SUBSCRIBE_NAMESPACE": 0x50,
        "SUBSCRIBE_TRACKS": 0x51,
        "SETUP": 0x2F00,
    },
    SetupOption: {
        "PATH": 0x01,
        "AUTHORIZATION_TOKEN": 0x03,
        "MAX_AUTH_TOKEN_CACHE_SIZE": 0x04,
        "AUTHORITY": 0x05,
        "MAX_FILTER_RANGES": 0x06,
        "MOQT_IMPLEMENTATION": 0x07,
        "MAX_REQUEST_UPDATES": 0x08,
    },
    ParameterType: {
        "OBJECT_DELIVERY_TIMEOUT": 0x02,
        "AUTHORIZATION_TOKEN": 0x03,
        "RENDEZVOUS_TIMEOUT": 0x04,
        "SUBGROUP_DELIVERY_TIMEOUT": 0x06,
        "EXPIRES": 0x08,
        "LARGEST_OBJECT": 0x09,
        "FILL_TIMEOUT": 0x0A,
        "FORWARD": 0x10,
        "SUBSCRIBER_PRIORITY": 0x20,
        "LOCATION_FILTER": 0x21,
        "GROUP_ORDER": 0x22,
        "FILL_PARAMETERS": 0x23,
        "SUBGROUP_FILTER": 0x25,
        "OBJECTID_FILTER": 0x26,
        "PRIORITY_FILTER": 0x27,
        "OBJECT_PROPERTY_FILTER": 0x28,
        "TRACK_PROPERTY_FILTER": 0x29,
        "NEW_GROUP_REQUEST": 0x32,
        "TRACK_NAMESPACE_PREFIX": 0x34,
        "INCLUDE_PROPERTIES": 0x35,
    },
    PropertyType: {
        "OBJECT_DELIVERY_TIMEOUT": 0x02,
        "MAX_CACHE_DURATION": 0x04,
        "SUBGROUP_DELIVERY_TIMEOUT": 0x06,
        "IMMUTABLE_PROPERTIES": 0x0B,
        "DEFAULT_PUBLISHER_PRIORITY": 0x0E,
        "DEFAULT_PUBLISHER_GROUP_ORDER": 0x22,
        "DYNAMIC_GROUPS": 0x30,
        "PRIOR_GROUP_ID_GAP": 0x3C,
        "PRIOR_OBJECT_ID_GAP": 0x3E,
    },
    SessionErrorCode: {
        "NO_ERROR": 0x0,
        "INTERNAL_ERROR": 0x1,
        "UNAUTHORIZED": 0x2,
        "PROTOCOL_VIOLATION": 0x3,
        "INVALID_REQUEST_ID": 0x4,
        "DUPLICATE_TRACK_ALIAS": 0x5,
        "KEY_VALUE_FORMATTING_ERROR": 0x6,
        "INVALID_PATH": 0x8,
        "MALFORMED_PATH": 0x9,
        "GOAWAY_TIMEOUT": 0x10,
        "CONTROL_MESSAGE_TIMEOUT": 0x11,
        "DATA_STREAM_TIMEOUT": 0x12,
        "AUTH_TOKEN_CACHE_OVERFLOW": 0x13,
        "DUPLICATE_AUTH_TOKEN_ALIAS": 0x14,
        "MALFORMED_AUTH_TOKEN": 0x16,
        "UNKNOWN_AUTH_TOKEN_ALIAS": 0x17,
        "EXPIRED_AUTH_TOKEN": 0x18,
        "INVALID_AUTHORITY": 0x19,
        "MALFORMED_AUTHORITY": 0x1A,
        "TOO_MANY_REQUEST_UPDATES": 0x1B,
    },
    RequestErrorCode: {
        "INTERNAL_ERROR": 0x0,
        "UNAUTHORIZED": 0x1,
        "TIMEOUT": 0x2,
        "NOT_SUPPORTED": 0x3,
        "MALFORMED_AUTH_TOKEN": 0x4,
        "EXPIRED_AUTH_TOKEN": 0x5,
        "GOING_AWAY": 0x6,
        "EXCESSIVE_LOAD": 0x9,
        "DOES_NOT_EXIST": 0x10,
        "INVALID_RANGE": 0x11,
        "MALFORMED_TRACK": 0x12,
        "UNINTERESTED": 0x20,
        "PREFIX_OVERLAP": 0x30,
        "NAMESPACE_TOO_LARGE": 0x31,
        "UNSUPPORTED_EXTENSION": 0x33,
        "REDIRECT": 0x34,
        "CONFLICTING_FILTERS": 0x35,
        "INVALID_FILTER": 0x36,
    },
    PublishDoneCode: {
        "INTERNAL_ERROR": 0x0,
        "UNAUTHORIZED": 0x1,
        "TRACK_ENDED": 0x2,
        "GOING_AWAY": 0x4,
        "TOO_FAR_BEHIND": 0x5,
        "EXPIRED": 0x6,
        "UPDATE_FAILED": 0x8,
        "EXCESSIVE_LOAD": 0x9,
        "MALFORMED_TRACK": 0x12,
    },
    StreamErrorCode: {
        "INTERNAL_ERROR": 0x0,
        "CANCELLED": 0x1,
        "DELIVERY_TIMEOUT": 0x2,
        "SESSION_CLOSED": 0x3,
        "GOING_AWAY": 0x4,
        "TOO_FAR_BEHIND": 0x5,
        "UNKNOWN_OBJECT_STATUS": 0x6,
        "EXPIRED_AUTH_TOKEN": 0x7,
        "EXCESSIVE_LOAD": 0x9,
        "MALFORMED_TRACK": 0x12,
    },
    StreamType: {
        "FETCH_HEADER": 0x05,
        "SUBGROUP_HEADER": 0x10,
        "SETUP": 0x2F00,
        "PADDING": 0x132B3E28,
    },
    DatagramType: {"PADDING": 0x132B3E29},
    SubgroupFlag: {
        "PROPERTIES": 0x01,
        "SUBGROUP_ID_MODE": 0x06,
        "FIRST_OBJECT_ID": 0x02,
        "EXPLICIT_ID": 0x04,
        "END_OF_GROUP": 0x08,
        "SUBGROUP_HEADER": 0x10,
        "DEFAULT_PRIORITY": 0x20,
        "FIRST_OBJECT": 0x40,
    },
    FetchFlag: {
        "SUBGROUP_ID_MODE": 0x03,
        "PRIOR_SUBGROUP": 0x01,
        "NEXT_SUBGROUP": 0x02,
        "EXPLICIT_SUBGROUP": 0x03,
        "OBJECT_ID_DELTA": 0x04,
        "GROUP_ID_DELTA": 0x08,
        "PRIORITY": 0x10,
        "PROPERTIES": 0x20,
        "DATAGRAM": 0x40,
    },
    DatagramFlag: {
        "PROPERTIES": 0x01,
        "END_OF_GROUP": 0x02,
        "ZERO_OBJECT_ID": 0x04,
        "DEFAULT_PRIORITY": 0x08,
        "STATUS": 0x20,
    },
    RangeMarkerKind: {"NON_EXISTENT": 0x8C, "UNKNOWN": 0x10C, "TIMED_OUT": 0x20C},
    ObjectStatus: {"NORMAL": 0x0, "END_OF_GROUP": 0x3, "END_OF_TRACK": 0x4},
    GroupOrder: {"ASCENDING": 1, "DESCENDING": 2},
    LocationFilterType: {
        "NONE": 0,
        "RELATIVE_START": 1,
        "ABSOLUTE_START": 2,
        "ABSOLUTE_START_GROUP_END": 3,
        "ABSOLUTE_RANGE": 4,
        "NEXT_OBJECT": 5,
    },
    TokenAliasType: {"DELETE": 0, "REGISTER": 1, "USE_ALIAS": 2, "USE_VALUE": 3},
}


@pytest.mark.parametrize("registry", PINNED, ids=lambda registry: registry.__name__)
def test_a_registry_has_exactly_the_numbers_of_the_draft(registry: type[IntEnum]) -> None:
    # __members__ lists aliases too, so two names of one number cannot hide.
    assert {name: int(m) for name, m in registry.__members__.items()} == PINNED[registry]


def test_no_registry_is_left_unpinned() -> None:
    registries = {
        value
        for value in vars(codepoints).values()
        if isinstance(value, type) and issubclass(value, IntEnum) and value is not IntEnum
    }

    assert registries == set(PINNED)


def test_the_draft_and_its_bounds_are_pinned() -> None:
    assert DRAFT == 22
    assert MAX_VI64 == 18_446_744_073_709_551_615
    assert (MANDATORY_PROPERTIES[0], MANDATORY_PROPERTIES[-1]) == (0x4000, 0x7FFF)


def test_known_names_what_is_registered_and_keeps_what_is_not() -> None:
    assert known(RequestErrorCode, 0x10) is RequestErrorCode.DOES_NOT_EXIST
    assert known(RequestErrorCode, 0x9D) == 0x9D
    assert not isinstance(known(RequestErrorCode, 0x9D), RequestErrorCode)
