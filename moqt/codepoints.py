"""Every number MOQT puts on the wire, one enum per registry.

Values follow the draft named by ``moqt.DRAFT``. Nowhere else in the package is a code point
written as a literal, so a draft bump changes this file and the test that pins it.
"""

from enum import IntEnum
from typing import Final, TypeVar

E = TypeVar("E", bound=IntEnum)

#: The greatest value a vi64 can carry, and so the greatest ID, count and code there is.
MAX_VI64: Final = 2**64 - 1


class MessageType(IntEnum):
    """Control messages (MOQT, "Control Messages")."""

    #: Change the parameters of a request.
    REQUEST_UPDATE = 0x02
    #: Ask for future Objects of a Track. First message of a request stream.
    SUBSCRIBE = 0x03
    #: Accept a SUBSCRIBE and bind its Track Alias.
    SUBSCRIBE_OK = 0x04
    #: Refuse any request.
    REQUEST_ERROR = 0x05
    #: Tell that there are Tracks under a prefix. First message of a request stream.
    PUBLISH_NAMESPACE = 0x06
    #: Accept any request that has no answer of its own kind.
    REQUEST_OK = 0x07
    #: A namespace under the prefix that was asked about appeared.
    NAMESPACE = 0x08
    #: Last message of an established subscription.
    PUBLISH_DONE = 0x0B
    #: Ask what a SUBSCRIBE would be told. First message of a request stream.
    TRACK_STATUS = 0x0D
    #: A namespace under the prefix that was asked about is gone.
    NAMESPACE_DONE = 0x0E
    #: A matching Track that will not be published to this subscriber.
    PUBLISH_SKIPPED = 0x0F
    #: Go elsewhere: the session, or one request.
    GOAWAY = 0x10
    #: Ask for past Objects of a Track. First message of a request stream.
    FETCH = 0x16
    #: Accept a FETCH and tell where it ends.
    FETCH_OK = 0x18
    #: Offer a Track to a subscriber. First message of a request stream.
    PUBLISH = 0x1D
    #: The publisher's side of a subscription changed.
    PUBLISH_STATE_NOTIFY = 0x22
    #: Ask which namespaces there are under a prefix. First message of a request stream.
    SUBSCRIBE_NAMESPACE = 0x50
    #: Ask for a PUBLISH of every Track under a prefix. First message of a request stream.
    SUBSCRIBE_TRACKS = 0x51
    #: First message on each control stream; its number is the stream's type as well.
    SETUP = 0x2F00


class SetupOption(IntEnum):
    """Setup Options (MOQT, "SETUP")."""

    #: Path and query of the connection URI; from a client over native QUIC only.
    PATH = 0x01
    #: An Authorization Token. The only option that may repeat.
    AUTHORIZATION_TOKEN = 0x03
    #: Octets of registered tokens the sender stores for its peer.
    MAX_AUTH_TOKEN_CACHE_SIZE = 0x04
    #: Authority of the connection URI; from a client over native QUIC only.
    AUTHORITY = 0x05
    #: Ranges the sender accepts in the Range Filters of one request.
    MAX_FILTER_RANGES = 0x06
    #: Name and version of the implementation, for people.
    MOQT_IMPLEMENTATION = 0x07
    #: Unanswered REQUEST_UPDATEs the sender accepts on one request stream.
    MAX_REQUEST_UPDATES = 0x08


class ParameterType(IntEnum):
    """Message Parameters (MOQT, "Message Parameters")."""

    #: Milliseconds after which an Object is no longer worth sending.
    OBJECT_DELIVERY_TIMEOUT = 0x02
    #: An Authorization Token; may repeat.
    AUTHORIZATION_TOKEN = 0x03
    #: Milliseconds a request may wait for a publisher to appear.
    RENDEZVOUS_TIMEOUT = 0x04
    #: Milliseconds after which a whole Subgroup is no longer worth sending.
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    #: Milliseconds until the request ends by itself.
    EXPIRES = 0x08
    #: The greatest Location the publisher knows.
    LARGEST_OBJECT = 0x09
    #: Milliseconds a fetch or fill may wait upstream, in total.
    FILL_TIMEOUT = 0x0A
    #: 1: Objects flow. 0: paused.
    FORWARD = 0x10
    #: Importance of the request to the subscriber; 0 first.
    SUBSCRIBER_PRIORITY = 0x20
    #: Which Locations are wanted.
    LOCATION_FILTER = 0x21
    #: Which of two Groups leaves first.
    GROUP_ORDER = 0x22
    #: Ask a subscription for past Objects on a stream of their own.
    FILL_PARAMETERS = 0x23
    #: Ranges of Subgroup IDs; may repeat.
    SUBGROUP_FILTER = 0x25
    #: Ranges of Object IDs; may repeat.
    OBJECTID_FILTER = 0x26
    #: Ranges of Publisher Priorities; may repeat.
    PRIORITY_FILTER = 0x27
    #: Ranges of values of one Object Property; may repeat.
    OBJECT_PROPERTY_FILTER = 0x28
    #: Ranges of values of one Track Property; may repeat.
    TRACK_PROPERTY_FILTER = 0x29
    #: Ask the Original Publisher to begin a Group: largest known Group ID + 1, or 0.
    NEW_GROUP_REQUEST = 0x32
    #: The new prefix of a namespace request.
    TRACK_NAMESPACE_PREFIX = 0x34
    #: 0: leave Track Properties out of the answer.
    INCLUDE_PROPERTIES = 0x35


class PropertyType(IntEnum):
    """Properties of Tracks and Objects (MOQT, "Properties")."""

    #: Milliseconds, on a Track or on the first Object of a Subgroup.
    OBJECT_DELIVERY_TIMEOUT = 0x02
    #: Milliseconds an Object may be served from a cache.
    MAX_CACHE_DURATION = 0x04
    #: Milliseconds, on a Track or on the first Object of a Subgroup.
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    #: A list of Properties that nobody may alter on the way.
    IMMUTABLE_PROPERTIES = 0x0B
    #: Publisher Priority where a stream or datagram states none.
    DEFAULT_PUBLISHER_PRIORITY = 0x0E
    #: Group Order where the subscriber states none.
    DEFAULT_PUBLISHER_GROUP_ORDER = 0x22
    #: 1: the Track honours NEW_GROUP_REQUEST.
    DYNAMIC_GROUPS = 0x30
    #: How many Groups just before this one never exist.
    PRIOR_GROUP_ID_GAP = 0x3C
    #: How many Objects just before this one never exist.
    PRIOR_OBJECT_ID_GAP = 0x3E


#: Property types in this range bind whoever processes the Track to know them.
MANDATORY_PROPERTIES: Final = range(0x4000, 0x8000)


class SessionErrorCode(IntEnum):
    """Why a session was closed (MOQT, "Session Termination Error Codes")."""

    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    UNAUTHORIZED = 0x2
    PROTOCOL_VIOLATION = 0x3
    INVALID_REQUEST_ID = 0x4
    DUPLICATE_TRACK_ALIAS = 0x5
    KEY_VALUE_FORMATTING_ERROR = 0x6
    INVALID_PATH = 0x8
    MALFORMED_PATH = 0x9
    GOAWAY_TIMEOUT = 0x10
    CONTROL_MESSAGE_TIMEOUT = 0x11
    DATA_STREAM_TIMEOUT = 0x12
    AUTH_TOKEN_CACHE_OVERFLOW = 0x13
    DUPLICATE_AUTH_TOKEN_ALIAS = 0x14
    MALFORMED_AUTH_TOKEN = 0x16
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    EXPIRED_AUTH_TOKEN = 0x18
    INVALID_AUTHORITY = 0x19
    MALFORMED_AUTHORITY = 0x1A
    TOO_MANY_REQUEST_UPDATES = 0x1B


class RequestErrorCode(IntEnum):
    """Why a request was refused (MOQT, "REQUEST_ERROR Codes")."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    #: The other side of a relay did not answer, or nobody came to publish.
    TIMEOUT = 0x2
    #: The endpoint does not implement this kind of request.
    NOT_SUPPORTED = 0x3
    MALFORMED_AUTH_TOKEN = 0x4
    EXPIRED_AUTH_TOKEN = 0x5
    GOING_AWAY = 0x6
    #: Come back after the Retry Interval.
    EXCESSIVE_LOAD = 0x9
    DOES_NOT_EXIST = 0x10
    #: A FETCH begins after the Largest Object.
    INVALID_RANGE = 0x11
    MALFORMED_TRACK = 0x12
    #: Nobody here wants what was offered.
    UNINTERESTED = 0x20
    PREFIX_OVERLAP = 0x30
    NAMESPACE_TOO_LARGE = 0x31
    #: The Track has a mandatory Property that this endpoint does not know.
    UNSUPPORTED_EXTENSION = 0x33
    #: Ask elsewhere; the message says where.
    REDIRECT = 0x34
    CONFLICTING_FILTERS = 0x35
    INVALID_FILTER = 0x36


class PublishDoneCode(IntEnum):
    """Why a subscription ended (MOQT, "PUBLISH_DONE Codes")."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    #: The normal end of a finished Track.
    TRACK_ENDED = 0x2
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    EXPIRED = 0x6
    UPDATE_FAILED = 0x8
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class StreamErrorCode(IntEnum):
    """Codes of RESET_STREAM and STOP_SENDING (MOQT, "Data Stream Reset Error Codes")."""

    INTERNAL_ERROR = 0x0
    CANCELLED = 0x1
    DELIVERY_TIMEOUT = 0x2
    SESSION_CLOSED = 0x3
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    UNKNOWN_OBJECT_STATUS = 0x6
    EXPIRED_AUTH_TOKEN = 0x7
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class StreamType(IntEnum):
    """First vi64 of a unidirectional stream (MOQT, "Unidirectional Streams")."""

    FETCH_HEADER = 0x05
    #: The lowest of the form 0b0XX1XXXX; the bits left open are :class:`SubgroupFlag`.
    SUBGROUP_HEADER = 0x10
    #: A control stream. The type is the first octets of its SETUP message, not a copy of them.
    SETUP = 0x2F00
    PADDING = 0x132B3E28


class DatagramType(IntEnum):
    """Datagram types that are not a set of :class:`DatagramFlag` (MOQT, "Datagrams")."""

    PADDING = 0x132B3E29


class SubgroupFlag(IntEnum):
    """Bits of a subgroup stream's type (MOQT, "Subgroup Header")."""

    PROPERTIES = 0x01
    #: Two bits: :attr:`FIRST_OBJECT_ID`, :attr:`EXPLICIT_ID`, both clear for Subgroup 0.
    SUBGROUP_ID_MODE = 0x06
    FIRST_OBJECT_ID = 0x02
    EXPLICIT_ID = 0x04
    END_OF_GROUP = 0x08
    SUBGROUP_HEADER = 0x10
    DEFAULT_PRIORITY = 0x20
    FIRST_OBJECT = 0x40


class FetchFlag(IntEnum):
    """Serialization Flags of an Object on a fetch stream (MOQT, "Fetch Objects")."""

    #: Two bits: Subgroup ID 0, that of the Object before, one more than that, or stated.
    SUBGROUP_ID_MODE = 0x03
    PRIOR_SUBGROUP = 0x01
    NEXT_SUBGROUP = 0x02
    EXPLICIT_SUBGROUP = 0x03
    OBJECT_ID_DELTA = 0x04
    GROUP_ID_DELTA = 0x08
    PRIORITY = 0x10
    PROPERTIES = 0x20
    DATAGRAM = 0x40


class RangeMarkerKind(IntEnum):
    """Serialization Flags that end a range and carry no Object (MOQT, "End of Range")."""

    NON_EXISTENT = 0x8C
    UNKNOWN = 0x10C
    #: Not obtained within the FILL_TIMEOUT.
    TIMED_OUT = 0x20C


class DatagramFlag(IntEnum):
    """Bits of an Object Datagram's type (MOQT, "Object Datagram")."""

    PROPERTIES = 0x01
    END_OF_GROUP = 0x02
    ZERO_OBJECT_ID = 0x04
    DEFAULT_PRIORITY = 0x08
    STATUS = 0x20


class ObjectStatus(IntEnum):
    """What an Object without payload means (MOQT, "Object Status")."""

    NORMAL = 0x0
    #: Nothing exists in this Group at this Object ID or above.
    END_OF_GROUP = 0x3
    #: Nothing exists in this Track at this Location or above.
    END_OF_TRACK = 0x4


class GroupOrder(IntEnum):
    """Which of two Groups leaves first (MOQT, "GROUP_ORDER")."""

    ASCENDING = 0x1
    DESCENDING = 0x2


class LocationFilterType(IntEnum):
    """Forms of a Location Filter (MOQT, "LOCATION_FILTER")."""

    NONE = 0x00
    RELATIVE_START = 0x01
    ABSOLUTE_START = 0x02
    ABSOLUTE_START_GROUP_END = 0x03
    ABSOLUTE_RANGE = 0x04
    NEXT_OBJECT = 0x05


class TokenAliasType(IntEnum):
    """What an Authorization Token asks of the receiver's cache (MOQT, "Authorization Token")."""

    DELETE = 0x0
    REGISTER = 0x1
    USE_ALIAS = 0x2
    USE_VALUE = 0x3


def known(registry: type[E], value: int) -> E | int:
    """Return the registered member, or ``value`` itself when nobody registered it."""
    return registry(value) if value in registry._value2member_map_ else value
