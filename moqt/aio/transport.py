"""The seam between the MOQT shell and a QUIC engine.

:class:`QuicTransport` is what an engine offers for one connection, :class:`QuicReceiver` what it
calls, and :class:`QuicListener` what accepts connections. Everything above this file speaks these
and no QUIC library; everything below it knows one library and nothing of MOQT.

Times are seconds of :func:`time.monotonic`, everywhere: event loops disagree on the resolution of
theirs, and an engine that mixes two clocks computes ACK delays that cannot be encoded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moqt.aio.tls import ServerTls

#: What an engine closes with when its receiver raised (MOQT, "Session Termination").
INTERNAL_ERROR = 0x1


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What an engine knows about its path; for logs and measurements, not for decisions."""

    smoothed_rtt_s: float
    congestion_window: int
    octets_in_flight: int
    packets_sent: int
    packets_received: int
    packets_expected: int
    """Those that the peer has sent, by the highest number that came; 0 if that is not known."""
    packets_lost: int
    key_updates: int
    datagram_octets: int | None
    """UDP payload sent at most, as found or fixed; None where it is not known."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """Why a connection is over."""

    code: int
    """The application's close code when ``application``, else a QUIC transport error code."""

    reason: str
    application: bool
    by_peer: bool
    """False when this side closed it, or when it timed out."""


class QuicReceiver(Protocol):
    """Called by the engine, always on the event loop, never reentrantly from a transport method."""

    def connected(self) -> None:
        """The handshake is complete; data may be written."""

    def stream_data_received(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets arrived in order on a stream."""

    def stream_reset_received(self, stream_id: int, code: int) -> None:
        """The peer gave up sending on a stream."""

    def stop_sending_received(self, stream_id: int, code: int) -> None:
        """The peer wants no more of a stream. The engine has answered with a reset already."""

    def datagram_received(self, data: bytes) -> None:
        """A QUIC DATAGRAM arrived."""

    def flush(self) -> None:
        """A batch of events is over, or ``wake`` was called: write what there is to write.

        Called once per batch and not once per packet; the engine transmits afterwards.
        """

    def connection_lost(self, lost: ConnectionLost) -> None:
        """The connection is over. Always the last call, exactly once."""


class QuicTransport(Protocol):
    """One QUIC connection, as the session's shell sees it.

    No method blocks, and none raises for what the peer did: writing to a stream that the peer
    has stopped, or after the end of the connection, is a quiet no-op.
    """

    @property
    def alpn(self) -> str | None:
        """The protocol that was negotiated, once connected."""

    @property
    def peer_address(self) -> tuple[str, int]:
        """Address and UDP port of the peer."""

    @property
    def client_certificate(self) -> bytes | None:
        """DER of the certificate of the client, if one was asked for: it was verified then."""

    @property
    def peer_accepts_datagrams(self) -> bool:
        """Whether the DATAGRAM extension was negotiated (MOQT requires it)."""

    def send_stream_data(self, stream_id: int, data: bytes | memoryview, fin: bool = False) -> None:
        """Append to a stream, opening it if this is its first data. Copies ``data``."""

    def reset_stream(self, stream_id: int, code: int, *, after_delivery: bool = False) -> None:
        """Give up on a stream we were sending: at once, or once what was sent has arrived.

        Nothing can be added to it in either case. With ``after_delivery`` everything written is
        sent and acknowledged first; a reset at once, by us or because the peer stops the stream,
        still comes before that.
        """

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to give up on a stream it is sending."""

    def send_datagram(self, data: bytes) -> bool:
        """Send a QUIC DATAGRAM; False when it cannot fit, and then nothing was queued."""

    def wake(self) -> None:
        """Have ``flush`` called soon, once, however often this was called before."""

    def send_budget(self) -> int:
        """Octets worth handing over now: about one congestion window, less what waits already.

        Connection-level flow control is part of it, less a reserve for control messages.
        """

    def stream_credit(self, stream_id: int) -> int:
        """Octets that flow control lets us add to a stream now, beyond what was handed over.

        For a stream not opened yet: 0 when the peer grants no further stream.
        """

    def unread_octets(self) -> int:
        """Octets written to control and request streams that the peer has not acknowledged."""

    def consumed(self, stream_id: int, octets: int) -> None:
        """The application is done with received octets: the receive windows may move on.

        An engine opens no window for octets that were received and not consumed, so that a
        reader that stops stops the peer, and memory is bounded by the windows.
        """

    @property
    def heard_at(self) -> float:
        """When the peer gave the last sign of life: a packet that only it can have sent."""

    def ping(self) -> None:
        """Ask the peer for a sign of life."""

    def close(self, code: int, reason: str, *, drain_s: float = 0.0) -> None:
        """Close, once everything written has been acknowledged or ``drain_s`` has passed."""

    def abandon(self) -> None:
        """Forget the connection at once, telling the peer nothing (tests, crashes)."""

    async def wait_closed(self) -> None:
        """Return when the connection is over and its closing period has passed."""

    def stats(self) -> TransportStats:
        """Return the figures of the moment."""


#: Makes the receiver of a connection whose handshake is complete.
ReceiverFactory = Callable[[QuicTransport], QuicReceiver]


class QuicListener(Protocol):
    """A UDP port on which connections are accepted, each with a receiver of its own."""

    @property
    def address(self) -> tuple[str, int]:
        """Address and UDP port that are listened on."""

    def identify(self, tls: ServerTls) -> None:
        """Show another certificate to those who connect from now on, and believe these CAs.

        Raises:
            TlsSettingsError: If a file of ``tls`` cannot be used; then nothing changes.
        """

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; those there are go on."""

    def bar(self, host: str) -> None:
        """Refuse new connections from an address for some seconds, where that can be done."""

    def close(self) -> None:
        """Close what connections there are, with code 0, and then the socket."""

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
