"""Answers: which request about which name gets which answer (KVCS Section 5).

Pure: it looks names up among the publications that a producer holds. Sending the answer is the
session's business, filters and ranges are the session's and the track's.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvcs.errors import BadName
from kvcs.producer.publication import Publication
from kvcs.profile.naming import PROFILE, PublicationName
from moqt.codepoints import RequestErrorCode
from moqt.names import FullTrackName, TrackNamespace
from moqt.session.discovery import NamespaceDirectory
from moqt.session.localtrack import LocalTrack

#: Publications that are gone and of which the reason is still told.
MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Refusal:
    """REQUEST_ERROR: the code, and a reason for people that tells nothing of other scopes."""

    code: RequestErrorCode
    reason: str


class Answers:
    """The publications of one producer, by name.

    Args:
        scope_id: The scope that the producer publishes in; no other is answered for.

    Attributes:
        directory: The namespaces of the publications, for SUBSCRIBE_NAMESPACE.
        draining: Set when the producer stops: what is under way goes on, nothing new begins.
    """

    def __init__(self, scope_id: bytes) -> None:
        self.directory = NamespaceDirectory()
        self.draining = False
        self._scope_id = scope_id
        self._publications: dict[TrackNamespace, Publication] = {}
        self._gone: OrderedDict[TrackNamespace, str] = OrderedDict()

    def add(self, publication: Publication) -> None:
        """Answer for a publication from now on, and let it be discovered.

        Raises:
            ValueError: If its name is taken, or of another scope: a mistake of the caller.
        """
        namespace = publication.name.namespace
        if publication.name.scope_id != self._scope_id:
            raise ValueError(f"{publication.name} is of another scope")
        if namespace in self._publications or namespace in self._gone:
            raise ValueError(f"Publication ID of {publication.name} was used before")
        self._publications[namespace] = publication
        self.directory.add(namespace)

    def remove(self, publication: Publication, why: str) -> None:
        """Withdraw a publication: it is not discovered any more, and requests are refused.

        Args:
            publication: One that was added; otherwise nothing happens.
            why: Told to those who ask for it later, as long as it is remembered.
        """
        namespace = publication.name.namespace
        if self._publications.pop(namespace, None) is None:
            return
        self.directory.remove(namespace)
        self._gone[namespace] = why
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    @property
    def publications(self) -> tuple[Publication, ...]:
        """The publications answered for, in the order in which they were added."""
        return tuple(self._publications.values())

    def track(self, name: FullTrackName) -> LocalTrack | Refusal:
        """Answer SUBSCRIBE, FETCH and TRACK_STATUS: the track, or why not.

        A track that does not exist is refused DOES_NOT_EXIST. Of ``manifest`` and
        ``manifest.cose`` exactly one exists, and a consumer may fall back from one to the other
        only because of this very code (KVCS Section 5.2).
        """
        if self.draining:
            return Refusal(RequestErrorCode.GOING_AWAY, "the producer is stopping")
        if (publication := self._publications.get(name.namespace)) is None:
            return missing(self._why_not(name.namespace))
        if (track := publication.tracks.get(name.name)) is None:
            return missing("the publication has no such track")
        return track

    def namespaces(self, prefix: TrackNamespace) -> NamespaceDirectory | Refusal:
        """Answer SUBSCRIBE_NAMESPACE: the directory, or why not.

        A prefix must name the scope at least: who does not know it learns nothing of it.
        """
        if self.draining:
            return Refusal(RequestErrorCode.GOING_AWAY, "the producer is stopping")
        return check_prefix(prefix, self._scope_id) or self.directory

    def published_namespace(self) -> Refusal:
        """Answer PUBLISH_NAMESPACE: a producer takes nothing from others."""
        return Refusal(RequestErrorCode.UNINTERESTED, "a producer does not subscribe")

    def _why_not(self, namespace: TrackNamespace) -> str:
        if namespace.is_reserved:
            return "nothing is published under reserved names"
        try:
            name = PublicationName.from_namespace(namespace)
        except BadName as exc:
            return f"not a namespace of KVCS: {exc}"
        if name.scope_id != self._scope_id:
            return "no such scope here"
        return self._gone.get(namespace, "no such publication here")


def check_prefix(prefix: TrackNamespace, scope_id: bytes) -> Refusal | None:
    """Return why a SUBSCRIBE_NAMESPACE is refused where one scope is served; None: it is not."""
    fields = prefix.fields
    if fields[:1] and fields[0] != PROFILE:
        return missing("not a namespace of KVCS")
    if len(fields) < 2:
        return Refusal(RequestErrorCode.UNAUTHORIZED, "the prefix must name a scope")
    if fields[1] != scope_id:
        return missing("no such scope here")
    return None


def missing(reason: str) -> Refusal:
    """Return the refusal of what there is not."""
    return Refusal(RequestErrorCode.DOES_NOT_EXIST, reason)
