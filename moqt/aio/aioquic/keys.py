"""Keys are updated before the AEAD's limit (RFC 9001 Section 6)."""

from typing import Any

from aioquic._crypto import AEAD

from moqt.aio.aioquic.base import BaseConnection
from moqt.aio.settings import QuicSettings


class KeyUpdates(BaseConnection):
    """A connection that changes its keys in time, and still reads what the last ones protect."""

    def __init__(self, settings: QuicSettings, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._key_update_packets = settings.key_update_packets
        self._phase_start = 0  # first packet number under the present key
        self._known_aead: AEAD | None = None
        self._previous_aead: AEAD | None = None
        self.key_updates = 0

    def _update_keys_if_due(self) -> None:
        """Change the keys after so many packets; aioquic 1.7.2 never does by itself."""
        sent = self._packet_number - self._phase_start
        if (
            sent >= self._key_update_packets
            and self._handshake_confirmed
            # An update must not follow another before that was acknowledged (RFC 9001 6.1).
            and self._space.largest_acked_packet >= self._phase_start
        ):
            self._crypto._update_key("local_update")
            self._note_keys()

    def _note_keys(self) -> None:
        """Notice that keys changed, and keep the last ones for packets that were under way.

        aioquic 1.7.2 forgets them at once, and so loses what the peer sent within the last round
        trip (RFC 9001 Section 6.5).
        """
        if not self._handshake_confirmed:
            return
        aead = self._crypto.recv.aead
        if aead is not self._known_aead:
            if self._known_aead is not None:
                self._previous_aead = self._known_aead
                self._phase_start = self._packet_number
                self.key_updates += 1
            self._known_aead = aead
