"""The requests of one session that are alive, and what is asked of all of them together."""

from typing import TypeVar

from moqt.errors import UsageError
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.commands import StreamId
from moqt.session.discovery import PeerNamespaceSubscription
from moqt.session.events import RequestId
from moqt.session.publisher import PeerSubscription, Publisher
from moqt.session.requests import PeerRequest, RequestStream, overlaps
from moqt.session.tracks import OwnTracks, PeerTracks

R = TypeVar("R", bound=RequestStream)


class Requests:
    """Requests of both sides, by Request ID and by stream.

    A request that is over stands here until the session has told of it, and its stream until
    nothing can come on it any more.
    """

    def __init__(self) -> None:
        self.by_id: dict[RequestId, RequestStream] = {}
        self.by_stream: dict[StreamId, RequestStream] = {}
        self.is_closed = False
        """Whether the session is over: then nothing is found here."""

    def add(self, request: RequestStream) -> None:
        """Take a request that begins."""
        self.by_id[request.request_id] = request
        self.by_stream[request.stream_id] = request

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is over."""
        request = self.by_id.pop(request_id, None)
        if request is not None:
            self.forget_stream(request)

    def forget_stream(self, request: RequestStream) -> None:
        """Forget the stream of a request once nothing can come on it any more."""
        if request.over and request.got_fin:
            self.by_stream.pop(request.stream_id, None)

    # -- one of them -----------------------------------------------------------------------------

    def find(self, request_id: RequestId, kind: type[R]) -> R | None:
        """Return a request of a kind that goes on; None if there is none."""
        if self.is_closed:
            return None
        request = self.by_id.get(request_id)
        return request if isinstance(request, kind) and not request.over else None

    def served(self, request_id: RequestId) -> Publisher | None:
        """Return a subscription that we serve; None if there is none."""
        request = self.find(request_id, Publisher)
        return request if request is not None and request.is_served else None

    def unanswered(self, request_id: RequestId, kind: type[R]) -> R | None:
        """Return a request of the peer that waits for its answer; None if it is gone.

        Raises:
            UsageError: If it is of another kind, or has been answered.
        """
        request = self.by_id.get(request_id)
        if request is None or request.over or self.is_closed:
            return None
        if not isinstance(request, kind):
            raise UsageError(f"request {request_id} is a {request.kind.name}")
        if getattr(request, "answered", False):
            raise UsageError(f"request {request_id} has been answered")
        return request

    # -- all of them -----------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        """Requests of both sides that go on."""
        return sum(not request.over for request in self.by_id.values())

    @property
    def of_peer(self) -> int:
        """Requests of the peer that go on."""
        return sum(isinstance(r, PeerRequest) and not r.over for r in self.by_id.values())

    def awaits(self, track: FullTrackName) -> bool:
        """Whether a SUBSCRIBE of the peer for a Track waits for its answer."""
        return any(
            isinstance(r, PeerSubscription) and not (r.answered or r.over) and r.track == track
            for r in self.by_id.values()
        )

    def may_filter(self, track: FullTrackName) -> bool:
        """Whether a SUBSCRIBE_TRACKS of ours may be why the peer leaves out Objects of a Track."""
        return any(isinstance(r, OwnTracks) and r.may_filter(track) for r in self.by_id.values())

    def overlaps_another(self, request: PeerRequest, prefix: TrackNamespace) -> bool:
        """Whether a request of the same kind is about a prefix of ``prefix``, or one it begins."""
        return any(
            isinstance(other, PeerNamespaceSubscription | PeerTracks)
            and other.kind is request.kind
            and other is not request
            and not other.over
            and overlaps(other.prefix, prefix)
            for other in self.by_id.values()
        )
