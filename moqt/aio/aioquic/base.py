"""aioquic's connection, and what those who extend it leave for each other.

The connection is put together from classes of which each changes for one reason::

    BaseConnection            what they share
      InboundStreams          streams we receive on, and the receive windows
      OutboundStreams         streams we send on, and the order in which they leave
      KeyUpdates              when keys change
        Unpacking             datagrams to frames
        DataPackets           whole packets of stream data
          Packing             frames to datagrams; serves both kinds of streams
            Probing           how large datagrams are
              Connection      all of it, and what the transport may ask
"""

from typing import Any

from aioquic import tls
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from moqt.aio.aioquic.congestion import Recovery, recovery_for
from moqt.aio.settings import QuicSettings

ONE_RTT = tls.Epoch.ONE_RTT

#: Octets that authenticate a packet, at its end.
AEAD_TAG = 16


class BaseConnection(QuicConnection):
    """aioquic's connection with our recovery, and the notes its parts leave for each other."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loss: Recovery = recovery_for(self, settings)
        self._signals: dict[int, QuicStream] = {}  # STOP_SENDING or RESET_STREAM to send
        self._ended: list[QuicStream] = []  # perhaps over in both directions
        self._unanswered = 0  # ack-eliciting packets since the last ACK

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self._crypto: CryptoPair = self._cryptos[ONE_RTT]
        self._space: QuicPacketSpace = self._spaces[ONE_RTT]

    def _is_open(self) -> bool:
        return self._state is QuicConnectionState.CONNECTED and not self._close_pending


def id_of(stream: QuicStream) -> int:
    """Return the ID of a stream of ours or of the peer's."""
    stream_id: Any = stream.stream_id  # None only for what carries the handshake
    return int(stream_id)
