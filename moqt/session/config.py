"""SessionConfig: the limits of a session, and what it says of itself in SETUP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from moqt.wire.token import AuthorizationToken

#: Gives the tokens to show: other ones from time to time, since they are good for a while only.
TokenSource = Callable[[], Sequence[AuthorizationToken]]


def no_tokens() -> Sequence[AuthorizationToken]:
    """Show none."""
    return ()


class Role(Enum):
    """Which side opened the QUIC connection. Either may publish, subscribe, or both."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Limits and Setup Options of one session. Each limit says what happens at it."""

    path: str = ""
    """PATH of the client's SETUP: path-abempty, with ``?query`` if there is one."""

    authority: str = ""
    """AUTHORITY of the client's SETUP. A client without one does not send the option."""

    implementation: str = "kvcs"
    """MOQT_IMPLEMENTATION. Seen by the peer: nothing about models, prompts or hosts."""

    max_filter_ranges: int = 64
    """Ranges accepted for each request; more is answered REQUEST_ERROR INVALID_FILTER."""

    max_request_updates: int = 32
    """Unanswered REQUEST_UPDATEs accepted for each request; more closes the session."""

    tokens: TokenSource = no_tokens
    """Called for the Authorization Tokens to show in SETUP, with their values. They count for the
    whole session, whoever of the two asks for something."""

    max_auth_token_cache_octets: int = 16 * 1024
    """What the peer may register as token aliases; more closes the session."""

    max_requests: int = 4096
    """Requests of the peer alive at once; one more is answered EXCESSIVE_LOAD."""

    max_requests_per_s: float = 1000.0
    """Requests of the peer in a second, on average, and four times as many at once. One more is
    answered EXCESSIVE_LOAD, with a Retry Interval; who goes on as fast nevertheless, for as many
    again, is closed INTERNAL_ERROR. So it is with updates, which are counted apart and of which one
    more closes the session TOO_MANY_REQUEST_UPDATES: refused, it would end its request anyway."""

    max_half_octets: int = 1024 * 1024
    """Octets of messages of the peer on request streams that are not whole yet; the request that
    passes it is given up, as with ``message_timeout_s``."""

    max_unread_octets: int = 16 * 1024 * 1024
    """Octets on control and request streams that the peer has not acknowledged; more closes the
    session CONTROL_MESSAGE_TIMEOUT. A list of namespaces can be some megabytes."""

    max_object_octets: int = 66 * 1024 * 1024 + 4096
    """Largest Object received; a longer one costs its stream, not the session."""

    max_partial_octets: int = 256 * 1024 * 1024
    """Octets of Objects that are still arriving, over all streams. The stream that would pass
    it is stopped with EXCESSIVE_LOAD, and counts as reset."""

    max_subscription_octets: int = 16 * 1024 * 1024
    """Octets of whole Objects that the application has not taken from one subscription.
    At the limit the subscription is cancelled and ends TOO_FAR_BEHIND. One stream alone cannot
    reach it: its receive window stops the peer before; a FETCH is one stream. Nor can anybody
    while the window of the whole connection is not larger: then who does not read stops the peer,
    and with it the other requests of the connection."""

    max_parked_streams: int = 64
    """Streams held that came ahead of SETUP, of their Track Alias or of their group order;
    one more is stopped."""

    max_parked_octets: int = 4 * 1024 * 1024
    """Octets held on such streams; the stream that would pass it is stopped."""

    max_malformed_groups: int = 4096
    """Groups whose ends are remembered to notice malformed Tracks; the oldest are forgotten."""

    max_data_streams: int = 32
    """Subgroup streams kept open at once; a more urgent one may exceed it. Each open stream
    costs the QUIC stack time on every packet."""

    write_quantum: int = 64 * 1024
    """Octets handed over from one stream before another of equal rank gets its turn."""

    setup_timeout_s: float = 10.0
    """How long the peer's SETUP may take; then the session closes CONTROL_MESSAGE_TIMEOUT."""

    park_timeout_s: float = 10.0
    """How long a data stream waits for its SUBSCRIBE_OK, or its header for its end; then it is
    stopped."""

    message_timeout_s: float = 10.0
    """How long a message on a request stream may take from its first octet to its last; then the
    request is given up: its stream is reset, EXCESSIVE_LOAD if it was the first message."""

    answer_timeout_s: float = 30.0
    """How long the application may take to answer a request; then TIMEOUT is sent."""

    fill_timeout_s: float | None = None
    """How long a FETCH or a fill without FILL_TIMEOUT may stand still for want of what its Track
    does not know yet; then that is told as timed out. None: for ever. An Object of which the rest
    does not come for so long costs its stream."""

    done_timeout_s: float = 10.0
    """How long nothing may come of the streams that are due after PUBLISH_DONE; then the
    subscription ends incomplete. So does a FETCH whose request stream ended so long ago, if its
    data stream has not shown itself: a reset can take the head of a stream with it."""
