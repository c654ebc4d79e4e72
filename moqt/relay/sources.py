"""Where a Track comes from: publishers are asked for it, lost, and replaced."""

import asyncio
import time
from collections.abc import Iterable

import structlog

from moqt.aio import MoqtConnection, Subscription
from moqt.codepoints import PublishDoneCode, RequestErrorCode
from moqt.errors import MoqtError, RequestRejected
from moqt.relay.holdings import Holdings
from moqt.relay.merge import MergedTrack
from moqt.relay.neighbours import Neighbours
from moqt.relay.options import RelayOptions
from moqt.relay.readers import Readers
from moqt.relay.tasks import Tasks
from moqt.relay.track import Failure, RelayedTrack, Source
from moqt.session.events import PublishReceived
from moqt.wire.filters import LocationFilter

log = structlog.get_logger("moqt.relay")

_FROM_START = LocationFilter.absolute_start(0, 0)


class Sources:
    """The publishers' subscriptions by which Tracks are received."""

    def __init__(
        self,
        options: RelayOptions,
        neighbours: Neighbours,
        holdings: Holdings,
        readers: Readers,
        tasks: Tasks,
    ) -> None:
        self._options = options
        self._neighbours = neighbours
        self._holdings = holdings
        self._readers = readers
        self._tasks = tasks

    # -- asking ----------------------------------------------------------------------------------

    def ask_all(self, track: RelayedTrack) -> None:
        """Ask every publisher that may have a Track and has not been asked."""
        besides = track.askers | track.gave_up
        self.ask(track, self._neighbours.publishers(track.name.namespace, besides=besides))

    def ask(self, track: RelayedTrack, publishers: Iterable[MoqtConnection]) -> None:
        """Ask publishers for a Track, those that have not been asked."""
        asked = {source.connection for source in track.sources}
        for connection in publishers:
            if connection not in asked:
                source = Source(track, connection)
                track.sources.append(source)
                self._tasks.spawn(self._subscribe(source))

    def offered(
        self, track: RelayedTrack, connection: MoqtConnection, request: PublishReceived
    ) -> Source | None:
        """Take what a publisher offers unasked; None if it gave that up meanwhile."""
        source = Source(track, connection, is_own=False)
        subscription = connection.accept_publish(request, pieces=True, sink=source.sink)
        if subscription is None:
            return None
        self._joined(source, subscription)
        return source

    async def _subscribe(self, source: Source) -> None:
        track = source.track
        try:
            subscription = await source.connection.subscribe(
                track.name,
                fill=_FROM_START,
                pieces=True,
                sink=source.sink,
                timeout_s=self._options.request_timeout_s,
            )
        except RequestRejected as exc:
            self._not_joined(source, exc.code, str(exc))
        except TimeoutError:
            self._not_joined(source, RequestErrorCode.TIMEOUT, "its publisher did not answer")
        except MoqtError as exc:
            self._not_joined(source, RequestErrorCode.INTERNAL_ERROR, str(exc))
        else:
            if source.is_given_up and not track.waiting:
                subscription.cancel()
                self._not_joined(source, RequestErrorCode.INTERNAL_ERROR, "")
            else:
                source.is_given_up = False  # somebody came while it was being given up
                self._joined(source, subscription)

    def _not_joined(self, source: Source, code: RequestErrorCode | int, reason: str) -> None:
        track = source.track
        if source in track.sources:
            track.sources.remove(source)
        if track.failure is not None:
            self._fail_unless_hoped_for(track)
        elif not track.sources and (track.merged is None or not track.merged.is_live):
            known = code if isinstance(code, RequestErrorCode) else RequestErrorCode.INTERNAL_ERROR
            self._readers.refuse_waiting(track, known, reason)
        self._holdings.tidy(track)

    def _joined(self, source: Source, subscription: Subscription) -> None:
        """A publisher serves a Track: so can we."""
        track = source.track
        source.subscription = subscription
        if source not in track.sources:
            track.sources.append(source)
        if track.merged is None:
            track.merged = MergedTrack(
                track.name,
                properties=subscription.track_properties,
                budget=self._holdings.budget,
            )
        track.failure = None
        if track.grace is not None:
            track.grace.cancel()
            track.grace = None
        number = track.merged.join(largest=subscription.largest, filling=subscription.fill_expected)
        source.joined(number, filling=subscription.fill_expected)
        track.goes_on()
        self._tasks.spawn(self._until_over(source, subscription))
        self._readers.serve_waiting(track)

    # -- losing ----------------------------------------------------------------------------------

    async def _until_over(self, source: Source, subscription: Subscription) -> None:
        await subscription.finished.wait()
        track, merged = source.track, source.track.merged
        assert merged is not None, "the source has joined"
        if source in track.sources:
            track.sources.remove(source)
        failure, ended = _failure_of(source, subscription), subscription.ended
        if source.number is not None:
            if ended is not None and failure is None:
                merged.leave(
                    source.number, PublishDoneCode.TRACK_ENDED, ended.reason, time.monotonic()
                )
            elif failure is not None:  # another one may go on with it
                merged.lose(source.number, time.monotonic())
            else:
                merged.leave(source.number, None, "", time.monotonic())
        if failure is not None and not merged.is_live and not track.has_ended:
            self._lost(source, failure, may_return=_may_return(subscription))
        if merged.is_complete:
            self._holdings.is_complete(track)
        self._holdings.tidy(track)
        self._holdings.has_room()

    def _lost(self, source: Source, failure: Failure, *, may_return: bool) -> None:
        """The last publisher of a Track is lost: somebody else may bring the rest of it."""
        track = source.track
        track.failure = failure
        if source.connection.closed is None:
            track.gave_up.add(source.connection)
        if track.is_wanted and failure.code is not PublishDoneCode.MALFORMED_TRACK:
            if not track.is_paused:
                self.ask_all(track)
            if may_return and self._options.publisher_grace_s > 0:
                track.grace = asyncio.get_running_loop().call_later(
                    self._options.publisher_grace_s, self._grace_over, track
                )
        self._fail_unless_hoped_for(track)

    def _grace_over(self, track: RelayedTrack) -> None:
        track.grace = None
        self._fail_unless_hoped_for(track)

    def _fail_unless_hoped_for(self, track: RelayedTrack) -> None:
        """End a Track that failed, unless a publisher is being asked or may come back."""
        failure, merged = track.failure, track.merged
        if failure is None or merged is None or track.grace is not None or track.sources:
            return
        log.info("track failed", track=str(track.name), reason=failure.reason)
        track.failure = None
        track.gave_up.clear()
        merged.fail(failure.code, failure.reason)
        self._readers.serve_waiting(track)  # with what there is of it
        self._holdings.tidy(track)


def _failure_of(source: Source, subscription: Subscription) -> Failure | None:
    """Say what is wrong with how a subscription ended; None: with the Track, or by our wish."""
    ended = subscription.ended
    if ended is None:
        if source.is_given_up:
            return None
        return Failure(PublishDoneCode.INTERNAL_ERROR, "its publisher was lost")
    if ended.code != PublishDoneCode.TRACK_ENDED:
        known = ended.code if isinstance(ended.code, PublishDoneCode) else None
        return Failure(known or PublishDoneCode.INTERNAL_ERROR, ended.reason)
    if not ended.complete:
        return Failure(PublishDoneCode.INTERNAL_ERROR, "not all of it came")
    return None


def _may_return(subscription: Subscription) -> bool:
    """Whether the publisher is lost, rather than that it said that the Track failed."""
    ended = subscription.ended
    return (
        ended is None
        or not ended.by_peer
        or ended.code in (PublishDoneCode.TRACK_ENDED, PublishDoneCode.GOING_AWAY)
    )
