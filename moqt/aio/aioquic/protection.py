"""Packet protection of many 1-RTT packets at a time (RFC 9001 Sections 5.3 and 5.4).

aioquic 1.7.2 protects each packet through two calls of wrappers around ``cryptography``, which
cost about as much as the encryption itself. Here ``cryptography`` is called directly, and once
for the header protection of a whole batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from aioquic.quic.crypto import CryptoContext
from cryptography.exceptions import InvalidTag

SAMPLE = 16
"""Octets that a header protection mask is made from, and octets from one mask to the next."""


class Protection:
    """The keys of one direction and phase.

    Attributes:
        phase: The key phase bit, where it stands in the first octet.
        seal: AEAD encryption of ``(nonce, payload, header)``.
        open: The reverse; raises ``InvalidTag``.
        iv: What a packet number is combined with to make a nonce of 12 octets.
    """

    __slots__ = ("_hp", "iv", "open", "phase", "seal")

    def __init__(self, context: CryptoContext) -> None:
        aead: Any = context.aead
        self.phase = context.key_phase << 2
        self.seal: Callable[[bytes, bytes, bytes], bytes] = aead._aead.encrypt
        self.open: Callable[[bytes, bytes | memoryview, bytes], bytes] = aead._aead.decrypt
        self.iv: int = aead._iv
        self._hp: Any = context.hp

    def masks(self, samples: Sequence[bytes]) -> bytes:
        """Return the masks of samples; each begins where its sample does in all of them joined."""
        hp = self._hp
        if hp._is_chacha20:
            return b"".join([hp._mask(sample).ljust(SAMPLE, b"\0") for sample in samples])
        masks: bytes = hp._encryptor.update(b"".join(samples))
        return masks


__all__ = ["SAMPLE", "InvalidTag", "Protection"]
