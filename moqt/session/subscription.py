"""Subscriptions: their states, and what both sides of one share (MOQT, "Subscriptions").

A subscription is begun by its subscriber (SUBSCRIBE) or by its publisher (PUBLISH). What follows
is the same: :mod:`moqt.session.subscriber` has the side that Objects flow to,
:mod:`moqt.session.publisher` the side that they come from. Both obey the draft's state diagram,
which is a table here; nothing else changes a state.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Protocol

from moqt.codepoints import ParameterType as P
from moqt.codepoints import StreamErrorCode
from moqt.errors import ProtocolError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.session.commands import StreamId
from moqt.session.events import RequestId
from moqt.wire.filters import (
    FillParameters,
    LocationFilter,
    LocationRange,
    RangeFilter,
    range_filters,
)


class State(Enum):
    """Where a subscription stands."""

    IDLE = auto()
    PENDING_SUBSCRIBER = auto()
    PENDING_PUBLISHER = auto()
    ESTABLISHED = auto()
    TERMINATED = auto()


class Input(Enum):
    """What can happen to it."""

    SUBSCRIBE = auto()
    PUBLISH = auto()
    ACCEPTED = auto()  # SUBSCRIBE_OK, or REQUEST_OK answering a PUBLISH
    REJECTED = auto()  # REQUEST_ERROR
    UPDATED = auto()  # REQUEST_UPDATE
    CANCELLED = auto()  # STOP_SENDING or a reset by the subscriber
    DONE = auto()  # PUBLISH_DONE
    LOST = auto()  # the stream ended where a message was due


#: The state diagram of the draft. What is not a row is a protocol violation.
TRANSITIONS: Mapping[tuple[State, Input], State] = {
    (State.IDLE, Input.SUBSCRIBE): State.PENDING_SUBSCRIBER,
    (State.IDLE, Input.PUBLISH): State.PENDING_PUBLISHER,
    (State.PENDING_SUBSCRIBER, Input.ACCEPTED): State.ESTABLISHED,
    (State.PENDING_SUBSCRIBER, Input.REJECTED): State.TERMINATED,
    (State.PENDING_SUBSCRIBER, Input.CANCELLED): State.TERMINATED,
    (State.PENDING_SUBSCRIBER, Input.LOST): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.ACCEPTED): State.ESTABLISHED,
    (State.PENDING_PUBLISHER, Input.REJECTED): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.DONE): State.TERMINATED,
    (State.PENDING_PUBLISHER, Input.LOST): State.TERMINATED,
    (State.ESTABLISHED, Input.UPDATED): State.ESTABLISHED,
    (State.ESTABLISHED, Input.CANCELLED): State.TERMINATED,
    (State.ESTABLISHED, Input.DONE): State.TERMINATED,
    (State.ESTABLISHED, Input.LOST): State.TERMINATED,
}


def advance(state: State, event: Input) -> State:
    """Return the next state, or raise :exc:`ProtocolError` naming both."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ProtocolError(f"{event.name} is not allowed in {state.name}") from None


def replaced(filters: tuple[RangeFilter, ...], by: Mapping[P, Any]) -> tuple[RangeFilter, ...]:
    """Return ``filters`` as changed by the parameters of an update or of a fill.

    A type that is present replaces all filters of its type; an empty one removes them.
    """
    return (*[f for f in filters if f.type not in by], *range_filters(by))


def fill_range(
    fill: FillParameters, outer: LocationFilter | None, largest: Location | None
) -> LocationRange | None:
    """Return what a fill covers, or None when it is empty and no stream is opened.

    The inner LOCATION_FILTER counts, else the subscription's, else the whole Track; judged by the
    rules of a FETCH (MOQT, "FILL_PARAMETERS").
    """
    wanted: LocationFilter = (
        fill.parameters.get(P.LOCATION_FILTER) or outer or LocationFilter.none()
    )
    return wanted.resolve_fetch(largest)


class AliasDirectory(Protocol):
    """What a subscription asks of the place where data streams arrive.

    Implemented by :class:`moqt.session.delivery.Delivery`; here so that the two files need not
    know each other's insides.
    """

    def offer_alias(self, track_alias: int, track: FullTrackName) -> None:
        """A PUBLISH names an alias; raises DuplicateTrackAlias if another Track has it."""

    def refuse_alias(self, track_alias: int) -> None:
        """A PUBLISH was refused: what its publisher sent ahead of the answer is dropped."""

    def bind(self, track_alias: int, subscription: Any) -> None:
        """Bind a Track Alias; raises DuplicateTrackAlias if another Track has it."""

    def deliver_parked(self, track_alias: int) -> None:
        """Deliver what streams brought ahead of their alias."""

    def expect_fetch_stream(self, request_id: RequestId, owner: Any) -> None:
        """A fetch stream with this Request ID belongs to ``owner``."""

    def stop_stream(self, stream_id: StreamId, code: StreamErrorCode) -> None:
        """Ask the peer to stop a data stream, and ignore what still comes on it."""

    def forget(self, owner: Any) -> None:
        """``owner`` is over: drop its alias and what is expected for it."""
