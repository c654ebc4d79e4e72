"""What a relay leaves in the audit."""

from kvcs.audit import AuditEvent, Outcome, Subject, note, note_access, scope_of
from moqt.authority import Action, Denied, Granted
from moqt.names import FullTrackName, TrackNamespace
from moqt.relay.observer import Peer, RelayObserver


class Audited(RelayObserver):
    """Writes what a relay tells of."""

    def namespace_announced(self, peer: Peer, prefix: TrackNamespace) -> None:
        """A publication came."""
        _note(Outcome.PUBLISHED, peer, prefix, Action.PUBLISH_NAMESPACE)

    def namespace_withdrawn(self, peer: Peer, prefix: TrackNamespace) -> None:
        """A publication is gone."""
        _note(Outcome.WITHDRAWN, peer, prefix, Action.PUBLISH_NAMESPACE)

    def track_offered(self, peer: Peer, track: FullTrackName) -> None:
        """A track came."""
        _note(Outcome.PUBLISHED, peer, track.namespace, Action.PUBLISH)

    def track_malformed(self, track: FullTrackName, reason: str) -> None:
        """A track ended for what was in it; its objects are named in no line."""
        note(
            AuditEvent.OBJECTS,
            Outcome.REJECTED,
            scope=scope_of(track.namespace),
            reason="a track contradicts itself",
        )

    def access_decided(
        self, peer: Peer, action: Action, namespace: TrackNamespace | None, answer: Granted | Denied
    ) -> None:
        """Somebody was let in, or was not."""
        note_access(peer.address, action, namespace, answer)

    def peer_limited(self, peer: Peer, reason: str) -> None:
        """A peer had enough."""
        note(AuditEvent.LIMIT, Outcome.REFUSED, who=_subject(peer), reason=reason)


def _subject(peer: Peer) -> Subject:
    return Subject(sub=peer.who, address=peer.address)


def _note(outcome: Outcome, peer: Peer, namespace: TrackNamespace, action: Action) -> None:
    note(
        AuditEvent.PUBLICATION,
        outcome,
        who=_subject(peer),
        action=action,
        scope=scope_of(namespace),
    )
