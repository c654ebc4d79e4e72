"""RelayOptions: the limits of a relay, and how patient it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """Limits of a relay. Each limit says what happens at it."""

    cache_octets: int = 4 << 30
    """Payload octets held. Above it, publications that nobody uses are let go, and if that does
    not help, new Tracks are refused EXCESSIVE_LOAD. See ``stall_s``, too."""

    linger_s: float = 5.0
    """How long a Track is still received after its last subscriber has left."""

    max_tracks: int = 65_536
    """Tracks held; when there are more, as with ``cache_octets``."""

    max_namespaces: int = 4096
    """Namespaces that one session may announce; one more is refused EXCESSIVE_LOAD."""

    max_behind_octets: int = 256 << 20
    """What a subscriber may be behind what is live; then it is ended TOO_FAR_BEHIND."""

    stall_s: float = 10.0
    """How long a subscriber may take nothing of what waits for it while another one is refused for
    want of room: then what is kept for it alone is let go, and it is ended TOO_FAR_BEHIND."""

    request_timeout_s: float = 10.0
    """How long a publisher may take to answer; then TIMEOUT is passed on."""

    max_rendezvous_s: float = 25.0
    """How long a SUBSCRIBE may wait for a publisher, whatever it asks for; then TIMEOUT."""

    publisher_grace_s: float = 2.0
    """How long a Track waits for a publisher when its last one was lost; then its subscribers
    are told the error. 0: they are told at once, unless another publisher is connected."""

    fill_timeout_s: float = 30.0
    """How long a fetch or a fill without FILL_TIMEOUT may stand still for want of what upstream
    has not brought; then that is told as timed out."""

    pause_after_s: float = 1.0
    """How long all subscribers of a Track must be paused before its publishers are."""
