"""What the application is told. Values only, complete when they leave the session.

Events of one request carry its Request ID. Those that answer a request of ours come first here,
then Objects, then what the peer asks of us, then the session itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from moqt.authority import Action, Denied, Granted
from moqt.codepoints import (
    ObjectStatus,
    ParameterType,
    PublishDoneCode,
    RangeMarkerKind,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.location import Location
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import StreamId
from moqt.values import hot_value
from moqt.wire.messages.request import Redirect
from moqt.wire.messages.setup import Setup
from moqt.wire.pairs import Pairs
from moqt.wire.parameters import Parameters
from moqt.wire.token import AuthorizationToken

RequestId = NewType("RequestId", int)
Tokens = tuple[AuthorizationToken, ...]


class Via(Enum):
    """The kind of stream an Object came on."""

    SUBGROUP = "subgroup"
    DATAGRAM = "datagram"
    FILL = "fill"
    FETCH = "fetch"


# -- answers to our requests ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """REQUEST_ERROR: the peer refused this one request. Everything else goes on."""

    request_id: RequestId
    code: RequestErrorCode | int
    reason: str
    retry_ms: int | None
    """Milliseconds after which a retry makes sense; None: do not retry."""

    redirect: Redirect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeAccepted:
    """SUBSCRIBE_OK: the subscription is Established."""

    request_id: RequestId
    largest: Location | None
    """Largest Object as the publisher saw it; None when nothing was published yet."""

    fill_expected: bool
    """Whether a fill was asked for and its range is not empty, so that a stream will come."""

    expires_ms: int
    track_properties: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAccepted:
    """REQUEST_OK for a REQUEST_UPDATE of ours."""

    request_id: RequestId
    update_id: RequestId
    largest: Location | None
    fill_expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRefused:
    """REQUEST_ERROR for a REQUEST_UPDATE of ours. The subscription ends too; that event follows."""

    request_id: RequestId
    update_id: RequestId
    code: RequestErrorCode | int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNotified:
    """PUBLISH_STATE_NOTIFY: the publisher tells its Largest Object or a changed filter."""

    request_id: RequestId
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionEnded:
    """Last event of a subscription that was Established, whoever ended it."""

    request_id: RequestId
    code: PublishDoneCode | int
    reason: str
    complete: bool
    """Every stream that the publisher counted has been seen to its end by FIN or reset. A hint:
    what was published is known to the application, not to the session."""

    by_peer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchAccepted:
    """FETCH_OK. Objects may have come before it."""

    request_id: RequestId
    end_of_track: bool
    end_location: Location
    track_properties: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """Last event of a FETCH that was not refused."""

    request_id: RequestId
    complete: bool
    """True after FIN of the data stream and FETCH_OK; False after a reset or a cancel: what had
    not come by then is unknown."""

    code: StreamErrorCode | int | None
    """What a stream was reset with; None after FIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackStatusAccepted:
    """REQUEST_OK for TRACK_STATUS."""

    request_id: RequestId
    largest: Location | None
    track_properties: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePublished:
    """REQUEST_OK for PUBLISH_NAMESPACE: the peer knows that we have Tracks there."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRevoked:
    """The peer no longer takes our PUBLISH_NAMESPACE."""

    request_id: RequestId
    code: StreamErrorCode | int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesSubscribed:
    """REQUEST_OK for SUBSCRIBE_NAMESPACE: matches follow, and later ones as they appear."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAppeared:
    """NAMESPACE: there are Tracks under ``namespace`` (whole, not the suffix)."""

    request_id: RequestId
    namespace: TrackNamespace


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceGone:
    """NAMESPACE_DONE for a namespace that had appeared."""

    request_id: RequestId
    namespace: TrackNamespace


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesEnded:
    """The namespace subscription is over; all that had appeared is gone with it."""

    request_id: RequestId
    code: StreamErrorCode | int
    by_peer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishAccepted:
    """REQUEST_OK for PUBLISH: the subscription is Established. Objects may have left before."""

    request_id: RequestId
    expires_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationEnded:
    """Last event of a PUBLISH of ours that was not refused and that we have not cancelled."""

    request_id: RequestId
    code: PublishDoneCode | None
    """What PUBLISH_DONE said; None: the subscriber gave the subscription up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracksSubscribed:
    """REQUEST_OK for SUBSCRIBE_TRACKS: a PublishReceived follows for each Track that matches."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSkipped:
    """PUBLISH_SKIPPED: a Track matches, and no PUBLISH of it will come. Subscribe to it instead."""

    request_id: RequestId
    track: FullTrackName


@dataclass(frozen=True, slots=True, kw_only=True)
class TracksEnded:
    """The SUBSCRIBE_TRACKS is over. Subscriptions that came of it go on."""

    request_id: RequestId
    code: StreamErrorCode | int | None
    """What the stream was reset with; None after FIN."""


# -- Objects -------------------------------------------------------------------------------------


@hot_value(kw_only=True)
class ObjectReceived:
    """A whole Object arrived on a subscription, a fill or a FETCH.

    In stream order within a subgroup or a fetch stream; streams interleave. The octets count
    against the receive windows until ``Session.consumed`` is told of the event.
    """

    request_id: RequestId
    """The SUBSCRIBE, PUBLISH or FETCH this Object belongs to."""

    via: Via
    location: Location
    subgroup_id: int | None
    """None for an Object whose Delivery Mode is Datagram."""

    publisher_priority: int
    status: ObjectStatus
    """Anything but NORMAL has an empty payload and marks an end (MOQT, "Object Status")."""

    properties: Pairs
    payload: bytes
    stream_id: StreamId | None
    octets: int
    """What the Object took of the receive window; 0 for a datagram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgroupOpened:
    """A stream of a subscription that is taken in pieces: its Objects follow, in ascending order.

    Told once the Subgroup ID is known, which may be with the first Object.
    """

    request_id: RequestId
    stream_id: StreamId
    group_id: int
    subgroup_id: int
    publisher_priority: int
    end_of_group: bool
    """If the stream ends by FIN, nothing is in the Group above its last Object."""

    first_object: bool
    """Its first Object is the first that was ever published in the Subgroup."""

    has_properties: bool


@hot_value(kw_only=True)
class ObjectBegan:
    """The header of an Object is here; ``length`` octets of payload follow as ObjectPieces.

    Of a subscription, a fill or a FETCH that is taken in pieces. All of the payload comes before
    the next Object of the stream, unless the stream ends before that.
    """

    request_id: RequestId
    via: Via
    stream_id: StreamId
    location: Location
    subgroup_id: int | None
    """None for an Object whose Delivery Mode is Datagram."""

    publisher_priority: int
    status: ObjectStatus
    properties: Pairs
    length: int


@hot_value(kw_only=True)
class ObjectPiece:
    """The next octets of the Object that began last on the stream.

    They count against the receive windows until ``Session.consumed`` is told of the event.
    """

    request_id: RequestId
    stream_id: StreamId
    data: bytes | memoryview
    """As it came, not copied: hold on to it and the whole packet stays in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgroupClosed:
    """A stream that was told of with SubgroupOpened is over.

    Not told of streams that are open when the subscription ends before them.
    """

    request_id: RequestId
    stream_id: StreamId
    fin: bool
    """False: it was reset. An Object that is not whole by then will not become whole here."""

    code: StreamErrorCode | int | None
    """What it was reset with; None after FIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeMarked:
    """An end-of-range marker on a fetch stream: what became of the Locations up to ``end``."""

    request_id: RequestId
    kind: RangeMarkerKind
    start: Location | None
    """First Location of the range; None: from the start of what was asked for."""

    end: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class FillEnded:
    """The fetch stream of a fill is over. The subscription goes on."""

    request_id: RequestId
    fill_id: RequestId
    """The SUBSCRIBE or REQUEST_UPDATE that asked for the fill."""

    complete: bool
    """True after FIN; False after a reset, which leaves what had not come unknown."""

    code: StreamErrorCode | int | None
    """What the stream was reset with; None after FIN."""


# -- what the peer asks of us --------------------------------------------------------------------
#
# Each was allowed by the Authority, where there is one, before it is told of. ``tokens`` are what
# the peer showed for it, with values: those of the request if it has any, else those of SETUP.


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeReceived:
    """The peer asks for a Track: answer with ``accept_subscribe`` or ``reject``."""

    request_id: RequestId
    track: FullTrackName
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReceived:
    """The peer asks for past Objects: answer with ``accept_fetch`` or ``reject``."""

    request_id: RequestId
    track: FullTrackName
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackStatusReceived:
    """The peer asks how a Track stands: answer with ``accept_track_status`` or ``reject``."""

    request_id: RequestId
    track: FullTrackName
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishNamespaceReceived:
    """The peer has Tracks under ``prefix``: answer with ``accept_namespace`` or ``reject``."""

    request_id: RequestId
    prefix: TrackNamespace
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeNamespaceReceived:
    """The peer asks which namespaces exist: ``accept_namespaces`` or ``reject``."""

    request_id: RequestId
    prefix: TrackNamespace
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReceived:
    """The peer offers a Track: answer with ``accept_publish`` or ``reject`` (UNINTERESTED).

    What it sends ahead of the answer is kept, within the limits of parked streams.
    """

    request_id: RequestId
    track: FullTrackName
    track_alias: int
    parameters: Parameters
    track_properties: Pairs
    tokens: Tokens = ()

    @property
    def largest(self) -> Location | None:
        """Largest Object as the publisher saw it; None when nothing was published yet."""
        largest: Location | None = self.parameters.get(ParameterType.LARGEST_OBJECT)
        return largest

    @property
    def is_paused(self) -> bool:
        """Whether nothing flows until an update sets FORWARD to 1."""
        return not self.parameters.get(ParameterType.FORWARD, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeTracksReceived:
    """The peer asks for a PUBLISH of every Track under ``prefix``, now and from now on.

    Answer with ``accept_tracks`` or ``reject``; then ``publish`` what ``wants_track`` lets pass,
    or say ``publish_skipped``.
    """

    request_id: RequestId
    prefix: TrackNamespace
    parameters: Parameters
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracksUpdated:
    """The peer changed its SUBSCRIBE_TRACKS: other Tracks may match from now on."""

    request_id: RequestId
    prefix: TrackNamespace
    parameters: Parameters
    """All that are in force."""


PeerRequest = (
    SubscribeReceived
    | FetchReceived
    | TrackStatusReceived
    | PublishReceived
    | PublishNamespaceReceived
    | SubscribeNamespaceReceived
    | SubscribeTracksReceived
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequestEnded:
    """A request of the peer is over, and not because the application said so. Nothing to answer.

    It was cancelled by the peer, served to its end, or refused by the session: for want of an
    answer in time, or because what was accepted could not be served.
    """

    request_id: RequestId
    cancelled: bool


# -- the session ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEstablished:
    """Both SETUPs are through."""

    peer_setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class GoawayReceived:
    """The peer wants to be left: no new requests, move what there is."""

    request_id: RequestId | None
    """The one request that is to move; None: the whole session."""

    new_session_uri: str
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDecided:
    """The authority said whether the peer may do something; for the log, nothing is left to do.

    Told of a SETUP and of each request ahead of its own event, if there is one, and when what was
    granted loses its right; not each time that it is asked about again.
    """

    action: Action
    """What it was about; of several that a request needs, the first."""

    namespace: TrackNamespace | None
    """Of the Track, or the prefix; None: the session."""

    answer: Granted | Denied

    is_running: bool
    """Whether it had been granted before, and was refused when it was asked about again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimited:
    """The peer was at one of our limits, and was told so; nothing is left to do."""

    who: str
    """Whose it was: who was granted it, else where it comes from."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDiscarded:
    """Data of the peer was dropped at one of our limits; for the log.

    Nothing is lost silently: the request it belonged to, if any, learns it by its own events.
    """

    stream_id: StreamId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerminated:
    """Always the last event, fired exactly once, whoever closed and why."""

    code: SessionErrorCode | int
    reason: str
    by_peer: bool
    flooded: bool = False
    """Whether we closed it because the peer goes on asking although it was told to wait."""


Event = (
    RequestRefused
    | SubscribeAccepted
    | UpdateAccepted
    | UpdateRefused
    | StateNotified
    | SubscriptionEnded
    | FetchAccepted
    | FetchEnded
    | TrackStatusAccepted
    | NamespacePublished
    | NamespaceRevoked
    | NamespacesSubscribed
    | NamespaceAppeared
    | NamespaceGone
    | NamespacesEnded
    | PublishAccepted
    | PublicationEnded
    | TracksSubscribed
    | TrackSkipped
    | TracksEnded
    | ObjectReceived
    | SubgroupOpened
    | ObjectBegan
    | ObjectPiece
    | SubgroupClosed
    | RangeMarked
    | FillEnded
    | PeerRequest
    | PeerRequestEnded
    | TracksUpdated
    | SessionEstablished
    | GoawayReceived
    | AccessDecided
    | PeerLimited
    | StreamDiscarded
    | SessionTerminated
)
Events = Sequence[Event]
