"""Which namespaces exist, and telling of them (MOQT, "Namespace Discovery").

A :class:`NamespaceDirectory` holds what this program knows; it is shared by its sessions as a
LocalTrack is, and tells its watchers of every change. The four requests follow, both roles.
"""

from collections import Counter
from collections.abc import Callable

from moqt.codepoints import MessageType, RequestErrorCode, StreamErrorCode
from moqt.codepoints import ParameterType as P
from moqt.errors import ProtocolError, UsageError
from moqt.names import TrackNamespace
from moqt.session.commands import StreamId
from moqt.session.context import Context
from moqt.session.events import (
    NamespaceAppeared,
    NamespaceGone,
    NamespacePublished,
    NamespaceRevoked,
    NamespacesEnded,
    NamespacesSubscribed,
    RequestId,
)
from moqt.session.requests import OwnRequest, PeerRequest, RequestIds
from moqt.wire.messages.base import Message
from moqt.wire.messages.namespace import Namespace, NamespaceDone
from moqt.wire.messages.request import RequestError, RequestOk, RequestUpdate
from moqt.wire.parameters import Parameters, Scope, stray

#: Namespaces told of to one SUBSCRIBE_NAMESPACE; more is answered NAMESPACE_TOO_LARGE.
MAX_MATCHES = 65_536


class NamespaceDirectory:
    """Namespaces that exist, each as often as it was added."""

    def __init__(self) -> None:
        self._namespaces: Counter[TrackNamespace] = Counter()
        self._watchers: dict[Callable[[], None], None] = {}

    def add(self, namespace: TrackNamespace) -> None:
        """Note one holder of ``namespace`` more."""
        self._namespaces[namespace] += 1
        self._tell()

    def remove(self, namespace: TrackNamespace) -> None:
        """Note one holder less; with the last one the namespace is gone.

        Raises:
            UsageError: If nobody held it.
        """
        if namespace not in self._namespaces:
            raise UsageError(f"{namespace} was not added")
        self._namespaces[namespace] -= 1
        if not self._namespaces[namespace]:
            del self._namespaces[namespace]
        self._tell()

    def matching(self, prefix: TrackNamespace) -> set[TrackNamespace]:
        """Return the namespaces that begin with ``prefix``, field by field."""
        return {namespace for namespace in self._namespaces if prefix.is_prefix_of(namespace)}

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have ``watcher`` called after every change, until :meth:`unwatch`."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling ``watcher``."""
        self._watchers.pop(watcher, None)

    def _tell(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()


# -- PUBLISH_NAMESPACE ---------------------------------------------------------------------------


class OwnNamespace(OwnRequest):
    """A PUBLISH_NAMESPACE of ours; it stands as long as its stream does."""

    kind = MessageType.PUBLISH_NAMESPACE

    def message_received(self, message: Message) -> None:
        """Take the one answer."""
        match message:
            case RequestOk() if not self.answered:
                _check_first_answer(message)
                self.answered = True
                self._context.emit(NamespacePublished(request_id=self.request_id))
            case RequestError() if not self.answered:
                self.refused(message)
            case _ if self.renewal_answered(message):
                pass
            case _:
                raise self.unexpected(message)

    def stop_received(self, code: int) -> None:
        """After its answer the peer has only this direction left to revoke by."""
        super().stop_received(code)
        if self.answered and not self.over:
            self.cancelled(code)

    def cancelled(self, code: int) -> None:
        """The peer does not take it any more, or never did."""
        if not self.answered:
            super().cancelled(code)
            return
        self._context.emit(NamespaceRevoked(request_id=self.request_id, code=code))
        self.abort(StreamErrorCode.CANCELLED)


class PeerNamespace(PeerRequest):
    """A PUBLISH_NAMESPACE of the peer; its end is told as PeerRequestEnded."""

    kind = MessageType.PUBLISH_NAMESPACE

    def accept(self) -> None:
        """Take it."""
        self.send(RequestOk(Parameters(self.expires())))
        self.mark_answered()

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Only its token could change."""
        self.send(RequestOk(Parameters(self.expires())))


def _check_first_answer(message: RequestOk) -> None:
    """Refuse parameters that only the answer to an update may carry."""
    if (misplaced := stray(message.parameters, Scope.NAMESPACE_OK)) is not None:
        raise ProtocolError(f"{misplaced.name} in the answer to a namespace request")


# -- SUBSCRIBE_NAMESPACE -------------------------------------------------------------------------


class OwnNamespaceSubscription(OwnRequest):
    """A SUBSCRIBE_NAMESPACE of ours."""

    kind = MessageType.SUBSCRIBE_NAMESPACE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        *,
        prefix: TrackNamespace,
    ) -> None:
        super().__init__(context, request_id, stream_id)
        self.prefix = prefix
        self._present: set[TrackNamespace] = set()
        self._last_gone: TrackNamespace | None = None

    def message_received(self, message: Message) -> None:
        """The answer must come first; what follows is relative to the prefix."""
        match message:
            case RequestOk() if not self.answered:
                _check_first_answer(message)
                self.answered = True
                self._context.emit(NamespacesSubscribed(request_id=self.request_id))
            case RequestError() if not self.answered:
                self.refused(message)
            case Namespace() if self.answered:
                self._appeared(self._whole(message.suffix))
            case NamespaceDone() if self.answered:
                self._gone(self._whole(message.suffix))
            case _ if self.renewal_answered(message):
                pass
            case _:
                raise self.unexpected(message)

    def fin_received(self) -> None:
        """The publisher will tell no more: what it told of counts as gone."""
        if not self.answered:
            super().fin_received()
            return
        self._finish(StreamErrorCode.INTERNAL_ERROR, by_peer=True)

    def cancelled(self, code: int) -> None:
        """The publisher gave up."""
        if not self.answered:
            super().cancelled(code)
            return
        self._finish(code, by_peer=True)

    def _whole(self, suffix: TrackNamespace) -> TrackNamespace:
        try:
            return self.prefix + suffix
        except UsageError as exc:
            raise ProtocolError(str(exc)) from None

    def _appeared(self, namespace: TrackNamespace) -> None:
        if namespace not in self._present:
            if len(self._present) >= MAX_MATCHES:
                self._finish(StreamErrorCode.EXCESSIVE_LOAD, by_peer=False)
                return
            self._present.add(namespace)
            self._context.emit(NamespaceAppeared(request_id=self.request_id, namespace=namespace))

    def _gone(self, namespace: TrackNamespace) -> None:
        if namespace not in self._present:
            # Ahead of its NAMESPACE it is a violation (MOQT, "Namespace Discovery"). Said twice
            # it is not ahead of it, and relays do say so twice of a publisher that is lost.
            if namespace == self._last_gone:
                return
            raise ProtocolError("NAMESPACE_DONE ahead of its NAMESPACE")
        self._present.remove(namespace)
        self._last_gone = namespace
        self._context.emit(NamespaceGone(request_id=self.request_id, namespace=namespace))

    def _finish(self, code: int, *, by_peer: bool) -> None:
        self._context.emit(NamespacesEnded(request_id=self.request_id, code=code, by_peer=by_peer))
        self.abort(StreamErrorCode.CANCELLED)


class PeerNamespaceSubscription(PeerRequest):
    """A SUBSCRIBE_NAMESPACE of the peer, served from a NamespaceDirectory."""

    kind = MessageType.SUBSCRIBE_NAMESPACE

    def __init__(
        self,
        context: Context,
        request_id: RequestId,
        stream_id: StreamId,
        ids: RequestIds,
        *,
        prefix: TrackNamespace,
        overlaps: Callable[["PeerNamespaceSubscription", TrackNamespace], bool],
    ) -> None:
        super().__init__(context, request_id, stream_id, ids)
        self.prefix = prefix
        self._overlaps = overlaps
        self._directory: NamespaceDirectory | None = None
        self._told: set[TrackNamespace] = set()

    def accept(self, directory: NamespaceDirectory) -> None:
        """Send REQUEST_OK and every match there is; later ones follow as they come."""
        if len(directory.matching(self.prefix)) > MAX_MATCHES:
            self.decline(RequestErrorCode.NAMESPACE_TOO_LARGE, f"more than {MAX_MATCHES} matches")
            return
        self._directory = directory
        self.send(RequestOk(Parameters(self.expires())))
        directory.watch(self._changed)
        self._tell()
        self.mark_answered()

    def update_received(self, update_id: RequestId, message: RequestUpdate) -> None:
        """Move the prefix. What was told under the old one and not the new is done with."""
        prefix: TrackNamespace = message.parameters.get(P.TRACK_NAMESPACE_PREFIX, self.prefix)
        if self._overlaps(self, prefix):
            self.refuse_update(RequestErrorCode.PREFIX_OVERLAP, f"{prefix} overlaps another")
            return
        assert self._directory is not None, "updates wait until the request is answered"
        if len(self._directory.matching(prefix)) > MAX_MATCHES:
            self.refuse_update(
                RequestErrorCode.NAMESPACE_TOO_LARGE, f"more than {MAX_MATCHES} matches"
            )
            return
        self.send(RequestOk(Parameters(self.expires())))
        if prefix != self.prefix:
            # Suffixes are relative to the new prefix from here on, so all are told afresh.
            self.prefix, self._told = prefix, set()
            self._tell()

    def stopped_by_peer(self) -> None:
        """Stop watching."""
        if self._directory is not None:
            self._directory.unwatch(self._changed)

    def _changed(self) -> None:
        self._tell()
        if self._context.wake is not None:
            self._context.wake()

    def _tell(self) -> None:
        assert self._directory is not None
        matching = self._directory.matching(self.prefix)
        for namespace in sorted(self._told - matching):
            self.send(NamespaceDone(namespace.suffix(self.prefix)))
        for namespace in sorted(matching - self._told):
            self.send(Namespace(namespace.suffix(self.prefix)))
        self._told = matching
