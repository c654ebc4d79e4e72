"""The connection: all its parts together, and what the transport may ask of it."""

from collections import deque
from typing import Any

from aioquic.quic.connection import END_STATES, QuicConnectionState
from aioquic.quic.packet import QuicErrorCode

from moqt.aio.aioquic.clients import ClientCheck
from moqt.aio.aioquic.probing import Probing
from moqt.aio.aioquic.unpacking import Unpacking
from moqt.aio.settings import DATAGRAM_BACKLOG
from moqt.aio.transport import ConnectionLost, TransportStats


class Connection(Unpacking, Probing):
    """aioquic's connection with our flow control and our way of filling packets."""

    #: Who must show a certificate does so to this; set before the first packet, or never.
    client_check: ClientCheck | None = None

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if self.client_check is not None:
            self.client_check.attach(self.tls)

    @property
    def client_certificate(self) -> bytes | None:
        """DER of the certificate of the client, if one was asked for and is believed."""
        return None if self.client_check is None else self.client_check.certificate

    @property
    def is_stranger(self) -> bool:
        """Whether who is connected should have shown a certificate and did not."""
        return self.client_check is not None and self.client_check.certificate is None

    @property
    def pending_events(self) -> deque[Any]:
        """What happened and was not told: aioquic's events, and :class:`Inbound` with data."""
        return self._events

    @property
    def idle_timeout_s(self) -> float:
        """Silence that ends the connection, as both ends agreed."""
        return self._idle_timeout()

    @property
    def is_drained(self) -> bool:
        """Whether all that was written has been acknowledged, and every DATAGRAM sent."""
        return not self.unacked and not self._datagrams_pending

    @property
    def is_about_to_close(self) -> bool:
        """Whether the next datagrams to send are those with the CONNECTION_CLOSE."""
        return self._close_pending

    @property
    def is_terminated(self) -> bool:
        """Whether it is over and its closing period has passed."""
        return self._state is QuicConnectionState.TERMINATED

    @property
    def peer_accepts_datagrams(self) -> bool:
        """Whether the DATAGRAM extension was negotiated."""
        return bool(self._remote_max_datagram_frame_size)

    def expect_buffer(self, octets: int) -> None:
        """Send no more at once than what a socket buffer of this size holds at the peer."""
        self._loss.expect_buffer(octets)

    def queue_datagram(self, data: bytes) -> bool:
        """Queue a QUIC DATAGRAM; False, and nothing queued, if it is too large or many wait.

        aioquic 1.7.2 takes one that fits into no packet, and then sends none behind it.
        """
        if not self._fits(data) or len(self._datagrams_pending) >= DATAGRAM_BACKLOG:
            return False
        self.send_datagram_frame(data)
        return True

    def lost(self) -> ConnectionLost | None:
        """Say in our words why the connection is over, or return None while it is not.

        aioquic 1.7.2 calls an idle timeout INTERNAL_ERROR, which is also an application's code.
        """
        event, state = self._close_event, self._state
        if event is None or state not in END_STATES:
            return None
        if state is QuicConnectionState.TERMINATED and event.reason_phrase == "Idle timeout":
            reason = f"idle timeout: nothing was received for {self._idle_timeout():.1f} s"
            return ConnectionLost(QuicErrorCode.NO_ERROR, reason, application=False, by_peer=False)
        return ConnectionLost(
            event.error_code,
            event.reason_phrase,
            application=event.frame_type is None,
            by_peer=state is QuicConnectionState.DRAINING,
        )

    def stats(self) -> TransportStats:
        """Return the figures of the moment."""
        recovery = self._loss
        return TransportStats(
            smoothed_rtt_s=recovery._rtt_smoothed,
            congestion_window=recovery.congestion_window,
            octets_in_flight=recovery.bytes_in_flight,
            packets_sent=self._packet_number,
            packets_received=self.packets_received,
            packets_expected=self._space.largest_received_packet + 1,
            packets_lost=recovery.lost,
            key_updates=self.key_updates,
            datagram_octets=self.datagram_octets,
        )
