"""What a QUIC connection can be told before it starts, and limits that cannot be told otherwise.

Both are the same whichever engine carries it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

#: The QUIC engines there are; ``moqt/aio/engine.py`` says how each is got.
EngineName = Literal["aioquic", "picoquic"]

#: What decides how much may be on its way.
CongestionControl = Literal["reno", "bbr"]

#: Connection-level flow control credit that data streams leave to control and request streams.
CONTROL_RESERVE = 16 << 10

#: What may always be written while nothing is in flight.
IDLE_BUDGET = 16 << 10

#: QUIC DATAGRAMs kept at most while the congestion window is full.
DATAGRAM_BACKLOG = 4096

#: A server forgets a connection whose handshake takes longer.
HANDSHAKE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class QuicSettings:
    """What a connection can be told before it starts.

    Raises:
        ValueError: If a value is out of its range; the message names it.
    """

    max_datagram_octets: int | None = None
    """UDP payload sent at most. None: the largest that the path takes, found by probing, within
    1200 to 16000. A number of that range fixes it, and the path must take it."""

    connection_window: int = 16 << 20
    """Octets that may have arrived and not been consumed, over all streams."""

    stream_window: int = 8 << 20
    """The same for one stream."""

    idle_timeout_s: float = 30.0
    """Silence that ends a connection; the smaller one of both ends counts."""

    keepalive: bool = True
    """Whether to break the silence, at a third of the idle timeout."""

    key_update_packets: int = 1 << 22
    """Packets under one key; AES-GCM is safe for 2**23 (RFC 9001 Section 6.6)."""

    congestion_control: CongestionControl | None = None
    """``reno`` halves its window at every loss, ``bbr`` follows a model of the path, of our own on
    ``aioquic``; None: ``reno``."""

    retry: bool = False
    """Whether a listener makes clients prove their address first, at the cost of a round trip."""

    retry_above: int = 32
    """Handshakes under way from which on it does so without ``retry``. Only on ``aioquic``, as
    the limits that follow: picoquic does not tell what has not come through its handshake."""

    max_handshakes: int = 128
    """Handshakes under way at one listener, a quarter of them with one peer; more are refused.
    One that takes longer than 10 s is forgotten."""

    max_handshakes_per_s_of_peer: float = 100.0
    """Handshakes that one peer may begin in a second, on average, and four times as many at once;
    more are refused. A peer is an IPv4 address, or an IPv6 network of 64 bits."""

    max_connections_of_peer: int = 512
    """Connections of one listener with one peer; more are refused."""

    max_connections: int = 1024
    """Connections of one listener; more are refused."""

    engine: EngineName | None = None
    """What carries it; None: the default one, ``aioquic``."""

    def __post_init__(self) -> None:
        octets = self.max_datagram_octets
        if octets is not None and not 1200 <= octets <= 16_000:
            # The length of a STREAM frame is written in two octets, which cannot say more.
            raise ValueError(f"max_datagram_octets is {octets}, not 1200..16000, nor None")
        if self.stream_window < 1 << 16 or self.connection_window < self.stream_window:
            raise ValueError(
                f"stream_window {self.stream_window} must be 65536 or more and not above "
                f"connection_window {self.connection_window}"
            )
        if self.idle_timeout_s <= 0:
            raise ValueError(f"idle_timeout_s is {self.idle_timeout_s}, not above 0")
        if not 1 <= self.key_update_packets <= 1 << 23:
            raise ValueError(f"key_update_packets is {self.key_update_packets}, not 1..2**23")
        if self.congestion_control not in (None, *get_args(CongestionControl)):
            raise ValueError(f"congestion_control {self.congestion_control!r} is not known")
        if self.engine not in (None, *get_args(EngineName)):
            raise ValueError(f"engine {self.engine!r} is not known")
        for name in ("max_connections", "max_connections_of_peer", "max_handshakes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not 1 or more")
        if self.max_handshakes_per_s_of_peer <= 0:
            raise ValueError(
                f"max_handshakes_per_s_of_peer is {self.max_handshakes_per_s_of_peer}, not above 0"
            )
        if self.retry_above < 0:
            raise ValueError(f"retry_above is {self.retry_above}, not 0 or more")
