"""Scope keys, and the identifiers that are derived from them (KVSP Sections 1 to 3).

A scope key is a secret: nothing here prints it, and errors tell lengths, never octets.
"""

import hmac
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from kvcs.errors import ConfigError
from kvcs.kvsp.descriptor import MAX_BLOCK_TOKENS, Descriptor

#: The least a scope key may have.
MIN_OCTETS = 32
#: The most; a longer file is something else.
MAX_OCTETS = 1024
#: Octets of every identifier that is derived from a scope key.
ID_OCTETS = 32
MAX_TOKEN = (1 << 32) - 1

_SALT = b"kvsp-1"
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class ScopeKey:
    """The secret that the members of a scope share; every identifier is keyed with it.

    Args:
        secret: At least 32 octets.

    Raises:
        ConfigError: If it is too short or too long.
    """

    __slots__ = ("_block_key", "_compat_key", "_scope_id", "_secret")

    def __init__(self, secret: bytes) -> None:
        _check_length("scope key", len(secret))
        self._secret = bytes(secret)
        self._scope_id = self.derive(b"kvsp-1 scope-id")
        self._compat_key = self.derive(b"kvsp-1 compat-id")
        self._block_key = self.derive(b"kvsp-1 block-key")

    @classmethod
    def generate(cls) -> Self:
        """Make a new key of 32 octets with the operating system's generator."""
        return cls(secrets.token_bytes(MIN_OCTETS))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a key from a file that holds it raw, or in hex with white space around it.

        A file that consists of hex digits is always read as hex. Anything else is taken octet
        for octet, a newline at its end included.

        Raises:
            ConfigError: If the file cannot be read or the key is too short or too long; the
                message names the file and the length found.
        """
        # Raised where no variable holds a secret: some programs print those of a traceback.
        key, wrong = cls._try_to_read(path)
        if key is None:
            raise ConfigError(f"scope key file {path}{wrong}")
        return key

    @classmethod
    def _try_to_read(cls, path: str | Path) -> tuple[Self | None, str]:
        """Return the key, or what is wrong with the file."""
        try:
            with Path(path).open("rb") as file:
                # Twice, for hex, and some for white space around it.
                content = file.read(2 * MAX_OCTETS + 64)
        except OSError as exc:
            return None, f": {exc.strerror or exc}"
        text = content.strip()
        form = "raw"
        if text and _HEX_DIGITS.issuperset(text):
            if len(text) % 2:
                return None, ": an odd number of hex digits"
            content, form = bytes.fromhex(text.decode()), "in hex"
        try:
            _check_length(f" ({form})", len(content))
        except ConfigError as exc:
            return None, str(exc)
        return cls(content), ""

    @property
    def scope_id(self) -> bytes:
        """The Scope ID, 32 octets. Not secret."""
        return self._scope_id

    def derive(self, info: bytes, *, octets: int = 32) -> bytes:
        """Derive a key of one's own with HKDF-SHA256, under the salt of KVSP Section 1."""
        hkdf = HKDF(algorithm=SHA256(), length=octets, salt=_SALT, info=info)
        return hkdf.derive(self._secret)

    def to_file(self, path: str | Path) -> None:
        """Write the key to a new file in hex, readable by its owner alone.

        Raises:
            ConfigError: If the file exists already, or cannot be written.
        """
        try:
            target = Path(path)
            target.touch(mode=0o600, exist_ok=False)
            target.write_text(self._secret.hex() + "\n")
        except OSError as exc:
            raise ConfigError(f"scope key file {path}: {exc.strerror or exc}") from None

    def compatibility_id(self, descriptor: Descriptor) -> bytes:
        """Return the Compatibility ID of a descriptor, 32 octets (KVSP Section 2)."""
        return hmac.digest(self._compat_key, descriptor.canonical(), "sha256")

    def block_keys(
        self,
        descriptor: Descriptor | bytes,
        tokens: Sequence[int] | NDArray[Any],
        extra: Sequence[bytes] = (),
        *,
        block_tokens: int | None = None,
        after: bytes | None = None,
    ) -> list[bytes]:
        """Return the Block Keys of all full blocks of a prompt (KVSP Section 3).

        Or, of a context that grows, those of the blocks that follow: the chain goes on from any
        key of it, without what is before.

        Args:
            descriptor: The descriptor, or a Compatibility ID already computed from it.
            tokens: Token ids of the whole prompt, unsigned 32-bit; a list, or a
                one-dimensional integer array.
            extra: Extra key material of block i at index i, for blocks whose tokens stand for
                something that is not text; empty, or left out at the end, for the others.
            block_tokens: Tokens of a block. Needed with a Compatibility ID, which does not
                tell; with a descriptor it must be left out or be the descriptor's.
            after: Block Key of the block that the tokens follow; None: they are the first ones.

        Returns:
            One key of 32 octets for each full block; none for a prompt shorter than a block.

        Raises:
            ConfigError: If a token is not an unsigned 32-bit integer, or an argument does not
                fit the others.
        """
        if isinstance(descriptor, Descriptor):
            if block_tokens not in (None, descriptor.block_tokens):
                raise ConfigError(
                    f"block_tokens is {block_tokens}, the descriptor's {descriptor.block_tokens}"
                )
            size, compatibility_id = descriptor.block_tokens, self.compatibility_id(descriptor)
        else:
            if block_tokens is None or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
                raise ConfigError(
                    f"block_tokens is {block_tokens}, expected 1 to {MAX_BLOCK_TOKENS}"
                )
            if len(descriptor) != ID_OCTETS:
                found = f"Compatibility ID of {len(descriptor)} octets"
                raise ConfigError(f"{found}, expected {ID_OCTETS}")
            size, compatibility_id = block_tokens, bytes(descriptor)
        if after is not None and len(after) != ID_OCTETS:
            raise ConfigError(f"Block Key of {len(after)} octets, expected {ID_OCTETS}")
        return self._chain(compatibility_id, _u32be(tokens), 4 * size, extra, after)

    def _chain(
        self,
        compatibility_id: bytes,
        octets: memoryview,
        stride: int,
        extra: Sequence[bytes],
        after: bytes | None,
    ) -> list[bytes]:
        begun = -(-len(octets) // stride)
        if len(extra) > begun:
            raise ConfigError(f"extra material for {len(extra)} blocks, the prompt has {begun}")
        # Copying a keyed context is what keeps one key at about three microseconds.
        keyed = hmac.new(self._block_key, digestmod="sha256")

        def link(*parts: bytes | memoryview) -> bytes:
            context = keyed.copy()
            for part in parts:
                context.update(part)
            return context.digest()

        previous = link(b"root", compatibility_id) if after is None else after
        keys: list[bytes] = []
        for index, start in enumerate(range(0, len(octets) - stride + 1, stride)):
            material = extra[index] if index < len(extra) else b""
            previous = link(b"block" + previous, octets[start : start + stride], material)
            keys.append(previous)
        return keys

    def __repr__(self) -> str:
        return f"ScopeKey(<secret>, scope_id={self._scope_id.hex()[:8]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScopeKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self._scope_id)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A pickle is a way for a secret to leave unseen.
        raise TypeError("a scope key cannot be pickled")


def anchor_key(block_keys: Sequence[bytes]) -> bytes | None:
    """Return the Anchor Key of a prefix, the key of its last block; ``None`` without a block."""
    return block_keys[-1] if block_keys else None


def block_keys_sha256(block_keys: Sequence[bytes]) -> bytes:
    """Return SHA-256 over the keys, concatenated: what a manifest says of a segment."""
    return sha256(b"".join(block_keys)).digest()


def _check_length(what: str, octets: int) -> None:
    if octets < MIN_OCTETS:
        raise ConfigError(f"{what} has {octets} octets, at least {MIN_OCTETS} are needed")
    if octets > MAX_OCTETS:
        raise ConfigError(f"{what} has more than {MAX_OCTETS} octets")


def _u32be(tokens: Sequence[int] | NDArray[Any]) -> memoryview:
    """Encode tokens big-endian, four octets each."""
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as exc:
        raise ConfigError(f"tokens: {exc}") from None
    if array.ndim != 1:
        raise ConfigError(f"tokens have {array.ndim} dimensions, expected 1")
    if array.size == 0:
        return memoryview(b"")
    if array.dtype.kind == "O":  # integers beyond 64 bits, or not integers at all
        raise ConfigError(f"tokens must be integers of 0 to {MAX_TOKEN}")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"tokens are of type {array.dtype}, expected integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN:
        wrong = low if low < 0 else high
        position = int(np.flatnonzero(array == wrong)[0])
        raise ConfigError(f"token {position} is {wrong}, expected 0 to {MAX_TOKEN}")
    return memoryview(array.astype(">u4").tobytes())
