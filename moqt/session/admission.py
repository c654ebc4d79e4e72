"""Which requests of the peer reach the application, and what the others are answered.

In this order: aliases of tokens that are not known, too many requests a second, what the authority
denies, what the peer has over all its sessions, the limits of this session, and what the draft
has refused whoever asks. So nothing that costs is done for one who asks too fast, and nothing is
looked up for one who may not ask.
"""

from typing import Any, cast

from moqt.authority import Denied
from moqt.codepoints import ParameterType as P
from moqt.codepoints import RequestErrorCode
from moqt.errors import ProtocolError
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.control import ControlStreams
from moqt.session.delivery import Delivery
from moqt.session.discovery import PeerNamespace, PeerNamespaceSubscription
from moqt.session.events import (
    Event,
    FetchReceived,
    PublishNamespaceReceived,
    PublishReceived,
    RequestId,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    Tokens,
    TrackStatusReceived,
)
from moqt.session.fetching import PeerFetch, PeerTrackStatus
from moqt.session.guard import REQUEST_CODES, Question
from moqt.session.guests import Busy
from moqt.session.publisher import PeerSubscription
from moqt.session.registry import Requests
from moqt.session.requests import PeerRequest, Refusal, RequestIds
from moqt.session.sendqueue import SendQueue
from moqt.session.subscriber import PeerPublication
from moqt.session.tokens import UnknownTokenAlias
from moqt.session.tracks import PeerTracks
from moqt.wire.filters import filter_defect
from moqt.wire.messages.base import Message
from moqt.wire.messages.fetch import Fetch
from moqt.wire.messages.namespace import PublishNamespace, SubscribeNamespace, SubscribeTracks
from moqt.wire.messages.publish import Publish
from moqt.wire.messages.subscribe import Subscribe, TrackStatus
from moqt.wire.pairs import mandatory_property
from moqt.wire.parameters import Parameters


class Admission:
    """Makes a request of the message that opens its stream, and tells of it or refuses it.

    Args:
        context: Of the session.
        ids: Its Request IDs.
        requests: Where requests stand while they are alive.
        control: Says whether we are going away.
        delivery: Where the Objects of a PUBLISH come.
        queue: What is served leaves through it.
    """

    def __init__(
        self,
        context: Context,
        ids: RequestIds,
        requests: Requests,
        control: ControlStreams,
        delivery: Delivery,
        queue: SendQueue,
    ) -> None:
        self._context = context
        self._ids = ids
        self._requests = requests
        self._control = control
        self._delivery = delivery
        self._queue = queue

    def take(self, stream_id: StreamId, message: Message) -> PeerRequest:
        """Take the first message of a stream; return its request, which may be over already.

        Raises:
            ProtocolError: If the message opens no stream, or breaks a rule that ends the session.
        """
        parameters: Parameters = cast(Any, message).parameters
        request_id = self._ids.take(cast(Any, message).request_id)
        tokens, unknown_alias = self._tokens_of(parameters)
        shown = tokens or self._context.guard.session_tokens
        request, event = self._made(stream_id, request_id, message, shown)
        self._requests.add(request)
        too_fast_ms = self._context.pace.request(self._context.now)
        if unknown_alias is not None:
            request.reject(RequestErrorCode.MALFORMED_AUTH_TOKEN, unknown_alias)
        elif too_fast_ms is not None:  # ahead of signatures, which cost most
            reason = f"more than {self._context.config.max_requests_per_s:g} requests a second"
            request.reject(RequestErrorCode.EXCESSIVE_LOAD, reason, retry_ms=too_fast_ms)
            self._context.limited(reason)
        elif (denied := self._denied(request, message, tokens)) is not None:
            # Nothing was looked at yet, so nothing of what there is can be seen in the answer.
            after_s = denied.retry_after_s
            retry_ms = None if after_s is None else max(0, round(after_s * 1000))
            request.reject(REQUEST_CODES[denied.why], "", retry_ms=retry_ms)
        elif (busy := self._busy(request_id)) is not None:
            request.reject(RequestErrorCode.EXCESSIVE_LOAD, busy.reason, retry_ms=busy.retry_ms)
            self._context.limited(busy.reason)
        elif (refusal := self._refusal(request, message, parameters)) is not None:
            request.reject(*refusal)
            if refusal[0] is RequestErrorCode.EXCESSIVE_LOAD:
                self._context.limited(refusal[1])
        else:
            self._context.emit(event)
        return request

    def _made(
        self, stream_id: StreamId, request_id: RequestId, message: Message, tokens: Tokens
    ) -> tuple[PeerRequest, Event]:
        """Return the request that a message makes, and what tells the application of it."""
        parameters: Parameters = cast(Any, message).parameters
        args = self._context, request_id, stream_id, self._ids
        told: Any = {"request_id": request_id, "parameters": parameters, "tokens": tokens}
        overlaps_another = self._requests.overlaps_another
        request: PeerRequest
        match message:
            case Subscribe(track=track):
                request = PeerSubscription(
                    *args, track=track, parameters=parameters, queue=self._queue
                )
                return request, SubscribeReceived(track=track, **told)
            case Fetch(track=track):
                request = PeerFetch(*args, parameters=parameters, queue=self._queue)
                return request, FetchReceived(track=track, **told)
            case TrackStatus(track=track):
                request = PeerTrackStatus(*args, parameters=parameters)
                return request, TrackStatusReceived(track=track, **told)
            case PublishNamespace(prefix=prefix):
                return PeerNamespace(*args), PublishNamespaceReceived(prefix=prefix, **told)
            case SubscribeNamespace(prefix=prefix):
                request = PeerNamespaceSubscription(*args, prefix=prefix, overlaps=overlaps_another)
                return request, SubscribeNamespaceReceived(prefix=prefix, **told)
            case SubscribeTracks(prefix=prefix):
                request = PeerTracks(
                    *args, prefix=prefix, parameters=parameters, overlaps=overlaps_another
                )
                return request, SubscribeTracksReceived(prefix=prefix, **told)
            case Publish(track=track, track_alias=alias, track_properties=properties):
                self._delivery.offer_alias(alias, track)
                request = PeerPublication(
                    *args,
                    message=message,
                    is_filtered=self._requests.may_filter(track),
                    directory=self._delivery,
                )
                event = PublishReceived(
                    track=track, track_alias=alias, track_properties=properties, **told
                )
                return request, event
            case _:
                raise ProtocolError(f"{message.type.name} opens a request stream")

    def _tokens_of(self, parameters: Parameters) -> tuple[Tokens, str | None]:
        """Return what a request is judged by, or what is wrong with its aliases."""
        try:
            own = self._context.tokens.resolve(parameters.get(P.AUTHORIZATION_TOKEN, ()))
        except UnknownTokenAlias as exc:
            return (), str(exc)
        return own, None

    def _denied(self, request: PeerRequest, message: Message, own: Tokens) -> Denied | None:
        match message:
            case Subscribe(track=names) | Fetch(track=names) | TrackStatus(track=names):
                question = Question.about(request.kind, names)
            case Publish(track=names):
                question = Question.about(request.kind, names)
            case PublishNamespace(prefix=prefix) | SubscribeNamespace(prefix=prefix):
                question = Question.about(request.kind, prefix)
            case _:
                question = Question.about(request.kind, cast(SubscribeTracks, message).prefix)
        return self._context.guard.admit(request.request_id, question, own)

    def _busy(self, request_id: RequestId) -> Busy | None:
        """Say why a request is not taken now: the peer has enough, in all its sessions together."""
        context = self._context
        return context.visit.ask(request_id, context.guard.whose(request_id), context.now)

    def _refusal(
        self, request: PeerRequest, message: Message, parameters: Parameters
    ) -> Refusal | None:
        """Say why a request that is allowed is refused before the application hears of it."""
        if self._control.goaway_sent:
            return RequestErrorCode.GOING_AWAY, ""
        config, requests = self._context.config, self._requests
        limit = config.max_requests
        if len(requests.by_id) > limit and requests.of_peer > limit:
            return RequestErrorCode.EXCESSIVE_LOAD, f"{limit} requests are open"
        defect = filter_defect(parameters, config.max_filter_ranges)
        if defect is not None:
            return RequestErrorCode.INVALID_FILTER, defect
        match message:
            case (
                Subscribe(track=track)
                | Fetch(track=track)
                | TrackStatus(track=track)
                | Publish(track=track)
            ) if track.namespace.is_local:
                return RequestErrorCode.DOES_NOT_EXIST, "no session-level tracks"
            case Publish(track_properties=properties):
                if (kind := mandatory_property(properties)) is not None:
                    return RequestErrorCode.UNSUPPORTED_EXTENSION, f"unknown property {kind:#x}"
            case PublishNamespace(prefix=prefix) if prefix.is_local:
                return RequestErrorCode.DOES_NOT_EXIST, "no session-level namespaces"
            case SubscribeNamespace(prefix=prefix) | SubscribeTracks(prefix=prefix):
                if requests.overlaps_another(request, prefix):
                    return RequestErrorCode.PREFIX_OVERLAP, f"{prefix} overlaps another"
        return None
