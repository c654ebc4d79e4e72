"""Message Parameters: a table of rows, a table of who may carry them, and two loops.

Unlike Key-Value-Pairs, parameters are counted, and nothing on the wire tells the length of an
unknown one. So an unknown or misplaced parameter closes the session.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from moqt.codepoints import GroupOrder, MessageType, known
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.wire.filters import RANGE_FILTERS, FillParameters, LocationFilter, RangeFilter
from moqt.wire.reader import Reader
from moqt.wire.token import AuthorizationToken
from moqt.wire.writer import Writer

#: Parameters that may occur more than once in a message. Their value is a tuple.
REPEATABLE: Final = RANGE_FILTERS | {P.AUTHORIZATION_TOKEN}


class Parameters(Mapping[P, Any]):
    """The parameters of one message, immutable and hashable.

    Most values are an int, of GROUP_ORDER a :class:`~moqt.codepoints.GroupOrder`; of
    LARGEST_OBJECT it is a :class:`~moqt.location.Location`, of LOCATION_FILTER a
    :class:`~moqt.wire.filters.LocationFilter`, of FILL_PARAMETERS a
    :class:`~moqt.wire.filters.FillParameters`, of TRACK_NAMESPACE_PREFIX a
    :class:`~moqt.names.TrackNamespace`. AUTHORIZATION_TOKEN and the Range Filters may repeat:
    their value is a tuple, and one that is given alone is taken as a tuple of one.

    ``a | b`` is ``a`` as changed by ``b``, which is how an update applies.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[P, Any] | Iterable[tuple[P, Any]] = ()) -> None:
        self._values = {
            key: (value,) if key in REPEATABLE and not isinstance(value, tuple) else value
            for key, value in dict(values).items()
        }

    def __getitem__(self, key: P) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[P]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, changes: Mapping[P, Any]) -> "Parameters":
        return Parameters({**self._values, **changes})

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        inner = ", ".join(f"{key.name}: {value!r}" for key, value in self._values.items())
        return f"Parameters({{{inner}}})"


NO_PARAMETERS: Final = Parameters()


class Scope(Enum):
    """A place that has parameters of its own (MOQT, "Parameter Scope")."""

    SUBSCRIBE = auto()
    SUBSCRIBE_OK = auto()
    PUBLISH = auto()
    #: REQUEST_OK as the first answer to a PUBLISH.
    PUBLISH_OK = auto()
    UPDATE_SUBSCRIPTION = auto()
    UPDATE_FETCH = auto()
    UPDATE_PUBLISH_NAMESPACE = auto()
    UPDATE_SUBSCRIBE_NAMESPACE = auto()
    UPDATE_SUBSCRIBE_TRACKS = auto()
    #: REQUEST_OK as the answer to a REQUEST_UPDATE.
    UPDATE_OK = auto()
    PUBLISH_STATE_NOTIFY = auto()
    FETCH = auto()
    FETCH_OK = auto()
    TRACK_STATUS = auto()
    TRACK_STATUS_OK = auto()
    PUBLISH_NAMESPACE = auto()
    SUBSCRIBE_NAMESPACE = auto()
    SUBSCRIBE_TRACKS = auto()
    #: REQUEST_OK as the first answer to any of the three namespace requests.
    NAMESPACE_OK = auto()
    #: Inside FILL_PARAMETERS.
    FILL = auto()


#: What each place may carry, as the draft lists it.
ALLOWED: Final[Mapping[Scope, frozenset[P]]] = {
    Scope.SUBSCRIBE: frozenset(
        {
            P.OBJECT_DELIVERY_TIMEOUT,
            P.AUTHORIZATION_TOKEN,
            P.RENDEZVOUS_TIMEOUT,
            P.SUBGROUP_DELIVERY_TIMEOUT,
            P.FORWARD,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
            P.FILL_PARAMETERS,
            P.SUBGROUP_FILTER,
            P.OBJECTID_FILTER,
            P.PRIORITY_FILTER,
            P.OBJECT_PROPERTY_FILTER,
            P.NEW_GROUP_REQUEST,
            P.INCLUDE_PROPERTIES,
        }
    ),
    Scope.SUBSCRIBE_OK: frozenset({P.EXPIRES, P.LARGEST_OBJECT}),
    Scope.PUBLISH: frozenset(
        {
            P.OBJECT_DELIVERY_TIMEOUT,
            P.AUTHORIZATION_TOKEN,
            P.SUBGROUP_DELIVERY_TIMEOUT,
            P.EXPIRES,
            P.LARGEST_OBJECT,
            P.FORWARD,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
        }
    ),
    Scope.PUBLISH_OK: frozenset({P.EXPIRES}),
    Scope.UPDATE_SUBSCRIPTION: frozenset(
        {
            P.OBJECT_DELIVERY_TIMEOUT,
            P.AUTHORIZATION_TOKEN,
            P.SUBGROUP_DELIVERY_TIMEOUT,
            P.FORWARD,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.FILL_PARAMETERS,
            P.SUBGROUP_FILTER,
            P.OBJECTID_FILTER,
            P.PRIORITY_FILTER,
            P.OBJECT_PROPERTY_FILTER,
            P.NEW_GROUP_REQUEST,
        }
    ),
    Scope.UPDATE_FETCH: frozenset({P.AUTHORIZATION_TOKEN, P.SUBSCRIBER_PRIORITY}),
    Scope.UPDATE_PUBLISH_NAMESPACE: frozenset({P.AUTHORIZATION_TOKEN}),
    Scope.UPDATE_SUBSCRIBE_NAMESPACE: frozenset({P.AUTHORIZATION_TOKEN, P.TRACK_NAMESPACE_PREFIX}),
    Scope.UPDATE_SUBSCRIBE_TRACKS: frozenset(
        {P.AUTHORIZATION_TOKEN, P.FORWARD, P.TRACK_PROPERTY_FILTER, P.TRACK_NAMESPACE_PREFIX}
    ),
    Scope.UPDATE_OK: frozenset({P.EXPIRES, P.LARGEST_OBJECT}),
    Scope.PUBLISH_STATE_NOTIFY: frozenset({P.LARGEST_OBJECT, P.FORWARD, P.LOCATION_FILTER}),
    Scope.FETCH: frozenset(
        {
            P.AUTHORIZATION_TOKEN,
            P.FILL_TIMEOUT,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
            P.SUBGROUP_FILTER,
            P.OBJECTID_FILTER,
            P.PRIORITY_FILTER,
            P.OBJECT_PROPERTY_FILTER,
            P.INCLUDE_PROPERTIES,
        }
    ),
    Scope.FETCH_OK: frozenset(),
    Scope.TRACK_STATUS: frozenset({P.AUTHORIZATION_TOKEN, P.INCLUDE_PROPERTIES}),
    Scope.TRACK_STATUS_OK: frozenset({P.LARGEST_OBJECT}),
    Scope.PUBLISH_NAMESPACE: frozenset({P.AUTHORIZATION_TOKEN}),
    Scope.SUBSCRIBE_NAMESPACE: frozenset({P.AUTHORIZATION_TOKEN}),
    Scope.SUBSCRIBE_TRACKS: frozenset(
        {
            P.AUTHORIZATION_TOKEN,
            P.FORWARD,
            P.GROUP_ORDER,
            P.SUBGROUP_FILTER,
            P.OBJECTID_FILTER,
            P.PRIORITY_FILTER,
            P.OBJECT_PROPERTY_FILTER,
            P.TRACK_PROPERTY_FILTER,
            P.INCLUDE_PROPERTIES,
        }
    ),
    Scope.NAMESPACE_OK: frozenset({P.EXPIRES}),
    Scope.FILL: frozenset(
        {
            P.FILL_TIMEOUT,
            P.SUBSCRIBER_PRIORITY,
            P.LOCATION_FILTER,
            P.GROUP_ORDER,
            P.SUBGROUP_FILTER,
            P.OBJECTID_FILTER,
            P.PRIORITY_FILTER,
            P.OBJECT_PROPERTY_FILTER,
        }
    ),
}

#: What is accepted beyond that and never sent: the draft's lists for SUBSCRIBE_TRACKS and its
#: updates disagree with what it says about the subscriptions they cause.
TOLERATED: Final[Mapping[Scope, frozenset[P]]] = {
    Scope.SUBSCRIBE_TRACKS: ALLOWED[Scope.SUBSCRIBE],
    Scope.UPDATE_SUBSCRIBE_TRACKS: RANGE_FILTERS,
}

#: The scope of a REQUEST_UPDATE, by the request it changes. A TRACK_STATUS cannot be changed.
UPDATE_SCOPES: Final[Mapping[MessageType, Scope]] = {
    MessageType.SUBSCRIBE: Scope.UPDATE_SUBSCRIPTION,
    MessageType.PUBLISH: Scope.UPDATE_SUBSCRIPTION,
    MessageType.FETCH: Scope.UPDATE_FETCH,
    MessageType.PUBLISH_NAMESPACE: Scope.UPDATE_PUBLISH_NAMESPACE,
    MessageType.SUBSCRIBE_NAMESPACE: Scope.UPDATE_SUBSCRIBE_NAMESPACE,
    MessageType.SUBSCRIBE_TRACKS: Scope.UPDATE_SUBSCRIBE_TRACKS,
}

#: The scope of a REQUEST_OK, by the request it answers. Whether it answers the request itself or
#: an update cannot be seen in the message, so this is the wider scope of the two; whoever knows
#: that it is a first answer can ask :func:`stray` about the narrower one.
OK_SCOPES: Final[Mapping[MessageType, Scope]] = {
    MessageType.SUBSCRIBE: Scope.UPDATE_OK,
    MessageType.PUBLISH: Scope.UPDATE_OK,
    MessageType.FETCH: Scope.UPDATE_OK,
    MessageType.TRACK_STATUS: Scope.TRACK_STATUS_OK,
    MessageType.PUBLISH_NAMESPACE: Scope.UPDATE_OK,
    MessageType.SUBSCRIBE_NAMESPACE: Scope.UPDATE_OK,
    MessageType.SUBSCRIBE_TRACKS: Scope.UPDATE_OK,
}


class Coding(NamedTuple):
    """One of the value encodings the draft defines."""

    read: Callable[[Reader], Any]
    write: Callable[[Writer, Any], None]


def _read_token(r: Reader) -> AuthorizationToken:
    return AuthorizationToken.decode(r.prefixed())


def _write_token(w: Writer, token: AuthorizationToken) -> None:
    w.prefixed(token.encode())


def _read_fill(r: Reader) -> FillParameters:
    """Take FILL_PARAMETERS with or without a count: implementations differ, the text allows both.

    No parameter of a fill has a type below FILL_TIMEOUT, so a smaller first octet is a count.
    """
    value = r.prefixed()
    if not value:
        return FillParameters(NO_PARAMETERS)
    try:
        return FillParameters(_read_whole(value, counted=True))
    except ProtocolError:
        if value[0] < P.FILL_TIMEOUT:
            raise
    return FillParameters(_read_whole(value, counted=False))


def _read_whole(value: bytes, *, counted: bool) -> Parameters:
    r = Reader(value)
    parameters = _decode(r, Scope.FILL, r.vi64() if counted else None)
    r.expect_end()
    return parameters


def _write_fill(w: Writer, fill: FillParameters) -> None:
    inner = Writer()
    encode_parameters(inner, fill.parameters, Scope.FILL)
    w.prefixed(inner.getvalue())


def _range_filter(type_: P) -> Coding:
    def write(w: Writer, value: RangeFilter) -> None:
        if value.type is not type_:
            raise UsageError(f"a {value.type.name} among the values of {type_.name}")
        value.encode(w)

    return Coding(lambda r: RangeFilter.decode(type_, r), write)


UINT8: Final = Coding(Reader.uint8, Writer.uint8)
ORDER: Final = Coding(lambda r: known(GroupOrder, r.uint8()), Writer.uint8)
VI64: Final = Coding(Reader.vi64, Writer.vi64)
LOCATION: Final = Coding(Reader.location, Writer.location)
NAMESPACE: Final = Coding(Reader.track_namespace, Writer.track_namespace)
TOKEN: Final = Coding(_read_token, _write_token)
FILTER: Final = Coding(LocationFilter.decode, lambda w, value: value.encode(w))
FILL: Final = Coding(_read_fill, _write_fill)


@dataclass(frozen=True, slots=True)
class Spec:
    """One row: how the value is coded, and which values are legal."""

    type: P
    coding: Coding
    allowed: range | None = None


REGISTRY: Final[Mapping[int, Spec]] = {
    spec.type: spec
    for spec in (
        Spec(P.OBJECT_DELIVERY_TIMEOUT, VI64),
        Spec(P.AUTHORIZATION_TOKEN, TOKEN),
        Spec(P.RENDEZVOUS_TIMEOUT, VI64),
        Spec(P.SUBGROUP_DELIVERY_TIMEOUT, VI64),
        Spec(P.EXPIRES, VI64),
        Spec(P.LARGEST_OBJECT, LOCATION),
        Spec(P.FILL_TIMEOUT, VI64),
        Spec(P.FORWARD, UINT8, range(2)),
        Spec(P.SUBSCRIBER_PRIORITY, UINT8),
        Spec(P.LOCATION_FILTER, FILTER),
        Spec(P.GROUP_ORDER, ORDER, range(min(GroupOrder), max(GroupOrder) + 1)),
        Spec(P.FILL_PARAMETERS, FILL),
        Spec(P.SUBGROUP_FILTER, _range_filter(P.SUBGROUP_FILTER)),
        Spec(P.OBJECTID_FILTER, _range_filter(P.OBJECTID_FILTER)),
        Spec(P.PRIORITY_FILTER, _range_filter(P.PRIORITY_FILTER)),
        Spec(P.OBJECT_PROPERTY_FILTER, _range_filter(P.OBJECT_PROPERTY_FILTER)),
        Spec(P.TRACK_PROPERTY_FILTER, _range_filter(P.TRACK_PROPERTY_FILTER)),
        Spec(P.NEW_GROUP_REQUEST, VI64),
        Spec(P.TRACK_NAMESPACE_PREFIX, NAMESPACE),
        Spec(P.INCLUDE_PROPERTIES, UINT8, range(2)),
    )
}


def decode_parameters(r: Reader, scope: Scope) -> Parameters:
    """Take a counted parameter list.

    Raises:
        ProtocolError: If a parameter is unknown, misplaced, wrongly repeated, or out of range.
        KeyValueFormattingError: If an Authorization Token cannot be read.
    """
    return _decode(r, scope, r.vi64())


def encode_parameters(w: Writer, parameters: Mapping[P, Any], *scopes: Scope) -> None:
    """Put a counted parameter list, in ascending order of type.

    Args:
        w: Where to put it.
        parameters: What to put.
        scopes: The place it is put; several if the message alone does not tell.

    Raises:
        UsageError: If none of ``scopes`` allows a parameter, or a value is not legal.
    """
    entries: list[tuple[Spec, Any]] = []
    for type_, value in sorted(Parameters(parameters).items()):
        if not any(type_ in ALLOWED[scope] for scope in scopes):
            raise UsageError(f"{type_.name} in {' or '.join(s.name for s in scopes)}: misplaced")
        values = value if type_ in REPEATABLE else (value,)
        entries += [(REGISTRY[type_], each) for each in values]
    w.vi64(len(entries))
    previous = 0
    for spec, value in entries:
        if spec.allowed is not None and value not in spec.allowed:
            raise UsageError(f"{spec.type.name} is {value}, not in {spec.allowed}")
        w.vi64(spec.type - previous)
        previous = spec.type
        spec.coding.write(w, value)


def stray(parameters: Mapping[P, Any], scope: Scope) -> P | None:
    """Return the first parameter that ``scope`` does not allow, or None."""
    return next((type_ for type_ in parameters if type_ not in ALLOWED[scope]), None)


def _decode(r: Reader, scope: Scope, count: int | None) -> Parameters:
    """Take ``count`` parameters, or all there are in the body."""
    found: dict[P, Any] = {}
    number = 0
    while r.remaining if count is None else count > 0:
        number += r.vi64()  # types are delta coded, in ascending order
        spec = REGISTRY.get(number)
        if spec is None:
            raise ProtocolError(f"unknown parameter {number:#x} in {scope.name}")
        type_ = spec.type
        if type_ not in ALLOWED[scope] and type_ not in TOLERATED.get(scope, ()):
            raise ProtocolError(f"{type_.name} is not allowed in {scope.name}")
        value = spec.coding.read(r)
        if spec.allowed is not None and value not in spec.allowed:
            raise ProtocolError(f"{type_.name} is {value}, not in {spec.allowed}")
        if type_ in REPEATABLE:
            found.setdefault(type_, []).append(value)
        elif type_ in found:
            raise ProtocolError(f"{type_.name} twice in {scope.name}")
        else:
            found[type_] = value
        count = None if count is None else count - 1
    return Parameters({t: tuple(v) if t in REPEATABLE else v for t, v in found.items()})
