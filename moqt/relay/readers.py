"""Who waits for a Track, and who is served with it."""

import asyncio
from collections.abc import Callable

import structlog

from moqt.aio import MoqtConnection
from moqt.codepoints import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.relay.holdings import Holdings
from moqt.relay.track import Asked, Reader, RelayedTrack
from moqt.session.events import RequestId, SubscribeReceived

log = structlog.get_logger("moqt.relay")


class Readers:
    """Requests for Tracks, and subscriptions that began with a PUBLISH of ours.

    Args:
        holdings: Told of Tracks that are wanted, or are not any more.
        max_behind_octets: See :class:`moqt.relay.options.RelayOptions`.
        stall_s: See there.
    """

    def __init__(self, holdings: Holdings, *, max_behind_octets: int, stall_s: float) -> None:
        self._holdings = holdings
        self._max_behind = max_behind_octets
        self._stall_s = stall_s
        self._is_watching = False
        self._tracks: dict[Reader, RelayedTrack] = {}
        self._of: dict[MoqtConnection, set[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._tracks)

    def wait(self, track: RelayedTrack, connection: MoqtConnection, request: Asked) -> None:
        """Keep a request until its Track is there."""
        reader = connection, request.request_id
        track.waiting[reader] = request
        self._note(reader, track)

    def wait_at_most(
        self, seconds: float, track: RelayedTrack, reader: Reader, then: Callable[[], None]
    ) -> None:
        """Have ``then`` called, if a request still waits after so many seconds."""

        def due() -> None:
            track.deadlines.pop(reader, None)
            if reader in track.waiting:
                then()

        track.deadlines[reader] = asyncio.get_running_loop().call_later(seconds, due)

    def serve(self, track: RelayedTrack, connection: MoqtConnection, request: Asked) -> None:
        """Answer a request from what is held of its Track, and what will come."""
        assert track.merged is not None, "somebody has said that it exists"
        local, reader = track.merged.local, (connection, request.request_id)
        self._waits_no_more(track, reader)
        if isinstance(request, SubscribeReceived):
            served = connection.session.accept_subscribe(request.request_id, local)
        else:
            served = connection.session.accept_fetch(request.request_id, local)
        if served:
            self.began(track, reader, is_fetch=not isinstance(request, SubscribeReceived))
        else:
            self.ended(reader)
        connection.wake()

    def serve_waiting(self, track: RelayedTrack) -> None:
        """Answer all that wait for a Track."""
        for (connection, _), request in list(track.waiting.items()):
            self.serve(track, connection, request)

    def refuse(
        self,
        connection: MoqtConnection,
        request_id: RequestId,
        code: RequestErrorCode = RequestErrorCode.DOES_NOT_EXIST,
        reason: str = "nobody publishes it",
    ) -> None:
        """Answer a request REQUEST_ERROR, whether it waits or not."""
        connection.session.reject(request_id, code, reason)
        connection.wake()
        self.ended((connection, request_id))

    def refuse_waiting(self, track: RelayedTrack, code: RequestErrorCode, reason: str) -> None:
        """Refuse those that wait for a Track and did not say for how long."""
        for (connection, request_id), request in list(track.waiting.items()):
            is_patient = isinstance(request, SubscribeReceived) and (
                (connection, request_id) in track.deadlines  # somebody else may come
            )
            if not is_patient:
                self.refuse(connection, request_id, code, reason)

    def began(self, track: RelayedTrack, reader: Reader, *, is_fetch: bool = False) -> None:
        """A request is served."""
        self._note(reader, track)
        (track.fetches if is_fetch else track.subscribers).add(reader)
        self._holdings.used(track)

    def ended(self, reader: Reader) -> None:
        """A request is over, served or not."""
        track = self._tracks.pop(reader, None)
        if track is None:
            return
        connection, request_id = reader
        numbers = self._of[connection]
        numbers.discard(request_id)
        if not numbers:
            del self._of[connection]
        track.subscribers.discard(reader)
        track.fetches.discard(reader)
        self._waits_no_more(track, reader)
        self._holdings.tidy(track)

    def left(self, connection: MoqtConnection) -> None:
        """A session is over, and all its requests."""
        for request_id in sorted(self._of.get(connection, ())):
            self.ended((connection, request_id))

    def leave_behind(self, track: RelayedTrack) -> None:
        """End who is too far behind. It can still fetch what is held."""
        limit = self._max_behind
        behind = {
            (connection, request_id)
            for connection, request_id in track.subscribers
            if connection.session.backlog(request_id) > limit
        }
        late, track.behind = behind & track.behind, behind  # for longer than a burst
        for connection, request_id in late:
            if connection.closed is None:
                connection.session.end_subscription(
                    request_id, PublishDoneCode.TOO_FAR_BEHIND, f"{limit} octets behind"
                )
                connection.wake()

    def leave_stalled(self, now: float) -> None:
        """End who takes nothing, if others are refused for what is kept for them alone.

        A fill or a fetch is never behind what is live, and would keep its publication for as long
        as its session stands. Call it a few times a second.
        """
        if self._holdings.is_full:
            self._watch(now)
            self._is_watching = True
        elif self._is_watching:
            self._is_watching = False
            for track in self._holdings:
                track.standing, track.stalled = {}, set()
        for track in self._holdings.stalled():
            log.info("stalled readers ended", track=str(track.name), count=len(track.stalled))
            reason = f"nothing was taken for {self._stall_s:g} s, and there is no room"
            for connection, request_id in track.stalled:
                if connection.closed is None:
                    session = connection.session
                    session.end_subscription(request_id, PublishDoneCode.TOO_FAR_BEHIND, reason)
                    session.end_fetch(request_id, StreamErrorCode.TOO_FAR_BEHIND)
                    connection.wake()

    def _watch(self, now: float) -> None:
        """Note who takes nothing of what waits."""
        still: set[MoqtConnection] = set()
        for track in self._holdings:
            before, track.standing, track.stalled = track.standing, {}, set()
            for reader in track.subscribers | track.fetches:
                connection, request_id = reader
                at = connection.session.waits_at(request_id)
                if at is None:
                    continue
                seen_at, since = before.get(reader, (at, now))
                since = since if seen_at == at else now
                track.standing[reader] = at, since
                if now - since >= self._stall_s:
                    track.stalled.add(reader)
                    still.add(connection)
        for track in self._holdings if still else ():
            # Nor does it want what it has nothing to take of, as the manifest of what it left.
            track.stalled |= {
                reader
                for reader in track.subscribers | track.fetches
                if reader[0] in still and reader not in track.standing
            }

    def _note(self, reader: Reader, track: RelayedTrack) -> None:
        self._tracks[reader] = track
        self._of.setdefault(reader[0], set()).add(reader[1])

    def _waits_no_more(self, track: RelayedTrack, reader: Reader) -> None:
        track.waiting.pop(reader, None)
        timer = track.deadlines.pop(reader, None)
        if timer is not None:
            timer.cancel()
