"""RelayObserver: what an operator of a relay wants to be told of, whatever is done with it."""

from dataclasses import dataclass

from moqt.authority import Action, Denied, Granted
from moqt.names import FullTrackName, TrackNamespace


@dataclass(frozen=True, slots=True)
class Peer:
    """Who did it."""

    address: str
    """Host that the session comes from."""

    who: str
    """Whose session it is: who was granted it, else what stands for its address."""


class RelayObserver:
    """Override what is of interest.

    Every method is called on the event loop, while the relay works, and returns soon.
    """

    def namespace_announced(self, peer: Peer, prefix: TrackNamespace) -> None:
        """A namespace was announced, and taken."""

    def namespace_withdrawn(self, peer: Peer, prefix: TrackNamespace) -> None:
        """It was withdrawn, or its session is over."""

    def track_offered(self, peer: Peer, track: FullTrackName) -> None:
        """A Track was published to the relay with PUBLISH, and taken."""

    def track_malformed(self, track: FullTrackName, reason: str) -> None:
        """What publishers brought of a Track contradicts itself: it was ended, for everybody."""

    def access_decided(
        self, peer: Peer, action: Action, namespace: TrackNamespace | None, answer: Granted | Denied
    ) -> None:
        """The authority said whether a peer may do something; of a SETUP there is no namespace."""

    def peer_limited(self, peer: Peer, reason: str) -> None:
        """A peer was at a limit of its session or of the relay, and was told so."""
