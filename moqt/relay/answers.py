"""Which request for a Track gets which answer, and when."""

from moqt.aio import MoqtConnection
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode
from moqt.errors import MoqtError
from moqt.relay.holdings import Holdings
from moqt.relay.mending import Mending
from moqt.relay.neighbours import Neighbours
from moqt.relay.options import RelayOptions
from moqt.relay.pausing import Pausing
from moqt.relay.readers import Readers
from moqt.relay.sources import Sources
from moqt.relay.tasks import Tasks
from moqt.relay.track import Asked, RelayedTrack
from moqt.session.events import FetchReceived, SubscribeReceived, TrackStatusReceived
from moqt.session.localtrack import LocalTrack


class Answers:
    """Serves requests from what is held; what is not is asked for first."""

    def __init__(
        self,
        options: RelayOptions,
        neighbours: Neighbours,
        holdings: Holdings,
        readers: Readers,
        sources: Sources,
        pausing: Pausing,
        mending: Mending,
        tasks: Tasks,
    ) -> None:
        self._options = options
        self._neighbours = neighbours
        self._holdings = holdings
        self._readers = readers
        self._sources = sources
        self._pausing = pausing
        self._mending = mending
        self._tasks = tasks

    def asked(self, connection: MoqtConnection, request: Asked) -> None:
        """Answer a SUBSCRIBE or a FETCH, now or once a publisher has answered."""
        self._holdings.touch(request.track)
        track = self._holdings.get(request.track)
        if track is not None and track.is_all_from(connection):
            # Who is asked for it asks back. Two relays must not wait for, or feed, each other.
            self._readers.refuse(connection, request.request_id)
        elif track is not None and track.is_paused and not _wants_nothing_now(request):
            self._wait(track, connection, request)
            self._pausing.resume(track)
        elif track is not None and (track.is_served or track.is_paused):
            self._mending.mend(track)
            self._readers.serve(track, connection, request)
        elif track is not None and track.failure is not None:
            self._wait(track, connection, request)
            self._sources.ask_all(track)
        elif track is not None and track.waiting and track.sources:
            self._wait(track, connection, request)  # it is being asked for
        elif self._neighbours.publishers(request.track.namespace, besides={connection}):
            received = self._holdings.to_receive(request.track)
            if received is None:
                self._refuse_for_want_of_room(connection, request)
            else:
                self._wait(received, connection, request)
                self._sources.ask_all(received)
        elif (
            track is not None
            and track.merged is not None
            and (isinstance(request, FetchReceived) or track.has_ended)
        ):
            self._readers.serve(track, connection, request)  # what there is of it
        else:
            self._rendezvous(connection, request)

    def status_asked(self, connection: MoqtConnection, request: TrackStatusReceived) -> None:
        """Answer a TRACK_STATUS, or pass it on."""
        track = self._holdings.get(request.track)
        if track is not None and track.is_served and track.merged is not None:
            connection.session.accept_track_status(request.request_id, track.merged.local)
            return
        publishers = self._neighbours.publishers(request.track.namespace, besides={connection})
        if publishers:
            self._tasks.spawn(self._ask_status(connection, request, publishers))
        else:
            self._readers.refuse(connection, request.request_id)

    def publisher_came(self) -> None:
        """Somebody new may have Tracks that are waited for, or that others bring already."""
        for track in self._holdings:
            if track.is_wanted and not track.has_ended and not track.is_paused:
                self._sources.ask_all(track)

    def _wait(self, track: RelayedTrack, connection: MoqtConnection, request: Asked) -> None:
        self._readers.wait(track, connection, request)
        patience_ms = request.parameters.get(P.FILL_TIMEOUT)
        if isinstance(request, FetchReceived) and patience_ms is not None:
            reader = connection, request.request_id

            def give_up() -> None:
                if track.merged is not None:  # what it has not is told as timed out
                    self._readers.serve(track, connection, request)
                else:
                    self._readers.refuse(
                        *reader, RequestErrorCode.TIMEOUT, "no publisher has answered"
                    )

            self._readers.wait_at_most(patience_ms / 1000, track, reader, give_up)

    def _rendezvous(self, connection: MoqtConnection, request: Asked) -> None:
        """Have a SUBSCRIBE wait for a publisher to come, as long as it says."""
        patience_ms = 0
        if isinstance(request, SubscribeReceived):
            patience_ms = request.parameters.get(P.RENDEZVOUS_TIMEOUT, 0)
        if not patience_ms:
            self._readers.refuse(connection, request.request_id)
            return
        track = self._holdings.to_receive(request.track)
        if track is None:
            self._refuse_for_want_of_room(connection, request)
            return
        reader = connection, request.request_id

        def give_up() -> None:
            if not track.sources:
                self._readers.refuse(*reader, RequestErrorCode.TIMEOUT, "no publisher has come")

        self._readers.wait(track, connection, request)
        patience_s = min(patience_ms / 1000, self._options.max_rendezvous_s)
        self._readers.wait_at_most(patience_s, track, reader, give_up)

    def _refuse_for_want_of_room(self, connection: MoqtConnection, request: Asked) -> None:
        self._readers.refuse(
            connection, request.request_id, RequestErrorCode.EXCESSIVE_LOAD, "the cache is in use"
        )

    async def _ask_status(
        self,
        connection: MoqtConnection,
        request: TrackStatusReceived,
        publishers: list[MoqtConnection],
    ) -> None:
        code, reason = RequestErrorCode.DOES_NOT_EXIST, "nobody publishes it"
        for publisher in publishers:
            try:
                status = await publisher.track_status(
                    request.track, timeout_s=self._options.request_timeout_s
                )
            except TimeoutError:
                code, reason = RequestErrorCode.TIMEOUT, "its publisher did not answer"
            except MoqtError as exc:
                reason = str(exc)
            else:
                local = LocalTrack(request.track, properties=status.track_properties)
                if status.largest is not None:
                    local.raise_largest(status.largest)
                connection.session.accept_track_status(request.request_id, local)
                connection.wake()
                return
        self._readers.refuse(connection, request.request_id, code, reason)


def _wants_nothing_now(request: Asked) -> bool:
    """Whether a request begins paused."""
    return isinstance(request, SubscribeReceived) and not request.parameters.get(P.FORWARD, 1)
