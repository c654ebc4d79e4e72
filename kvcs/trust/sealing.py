"""Sealing: Objects that nobody outside the scope can read or make (Secure Objects, draft -01).

Pure. The AEAD covers the payload, and with it the place of an Object: the full track name, Group
ID, Object ID, Publisher Priority and the Key ID. The nonce follows from the place, so that nothing
has to be sent or counted, and the same octets come by subscription, by FETCH, by fill, from a relay
or from a disk.

What is fatal is one nonce for two plaintexts. It cannot happen as long as a Publication ID names
one production run (decision 15) and a track takes one Object for each place, once; whoever has
sealed octets of a place sends those again.

The numbers are those of the draft; a later one changes this module alone. The property of the Key
ID has the number that MOQT gives to a delivery timeout. Zero, the only Key ID used here, is none.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvcs.errors import BadObject, ConfigError, Rejection
from kvcs.kvsp.layout import Octets
from kvcs.trust.scope import Padding, Scope, Suite
from moqt.codepoints import PropertyType
from moqt.errors import ProtocolError
from moqt.location import Location
from moqt.names import FullTrackName
from moqt.wire.pairs import Pairs, decode_pairs
from moqt.wire.reader import Reader
from moqt.wire.varint import decode_vi64
from moqt.wire.writer import Writer

#: Type of the property that carries the Key ID, inside of the immutable ones.
KEY_ID_PROPERTY = 0x02
#: Which key of a scope: it has one.
KEY_ID = 0
#: What the immutable properties of a sealed Object hold.
IMMUTABLE = bytes((KEY_ID_PROPERTY, KEY_ID))
#: The Object Properties of a sealed Object: ``0b 02 02 00``.
PROPERTIES: Pairs = ((PropertyType.IMMUTABLE_PROPERTIES, IMMUTABLE),)
#: Type of the list behind a payload, and of the padding in it.
_LIST, _PADDING = 0x0A, 0x32

#: Octets of the tag behind a sealed payload, and of the length in front of one that is opened.
TAG_OCTETS, PREFIX_OCTETS = 16, 4
#: Octets of a list that holds nothing but the head of its padding.
_LIST_OCTETS = 11
#: Greatest Object ID that the nonce has room for.
MAX_OBJECT_ID = (1 << 32) - 1
#: Cipher blocks of 16 octets under the key of one track, so that who sees all of them learns
#: anything with a probability of 2**-57 at most.
MAX_CIPHER_BLOCKS = 1 << 36

_LABEL = b"kvcs-1 object-key"
_KEY_LABEL = b"MOQ 1.0 Secure Objects Secret key "
_SALT_LABEL = b"MOQ 1.0 Secret salt "
_MASK_LABEL = b"kvcs-1 digest mask "
_NONCE_OCTETS = 12
#: 2**28 - 1, the most that a vi64 of four octets holds, behind the bits that say how long it is.
_MAX_PREFIXED, _FOUR_OCTETS = (1 << 28) - 1, 0xE0000000


class _Form(NamedTuple):
    hash: type[HashAlgorithm]
    hash_name: str
    hash_octets: int
    key_octets: int


_FORMS = {
    Suite.AES_128_GCM_SHA256_128: _Form(SHA256, "sha256", 32, 16),
    Suite.AES_256_GCM_SHA512_128: _Form(SHA512, "sha512", 64, 32),
}


class Cover(NamedTuple):
    """What an Object came with, besides its payload and its place."""

    priority: int
    """Publisher Priority."""

    properties: Pairs = ()


#: What an Object in clear comes with that says nothing.
BARE = Cover(0)


@dataclass(frozen=True, slots=True)
class TrackKey:
    """The key of one track: it opens and seals its Objects, and tells nothing of other tracks."""

    suite: Suite
    key: bytes = field(repr=False)
    """16 octets, or 32, as the suite says."""

    salt: bytes = field(repr=False)
    """12 octets."""

    padding: Padding = "auto"


class Opener(Protocol):
    """Turns what came as the payload of an Object of one track into its payload."""

    def longest(self, octets: int, *, fixed_length: bool) -> int:
        """Return how long that may be for a payload of so many octets at most.

        Args:
            octets: Of the payload.
            fixed_length: Whether the length of a payload tells nothing of what is in it.
        """

    def open(self, location: Location, cover: Cover, payload: Octets, longest: int) -> Octets:
        """Return the payload. Safe in any thread.

        Args:
            location: Where it came.
            cover: What it came with.
            payload: As it came.
            longest: Octets that it may have.

        Raises:
            BadObject: For a reason among :data:`~kvcs.errors.UNOPENED`. The Object counts as
                missing, and nobody outside may be able to tell that from its never having come.
        """


class _InClear:
    """Objects of a scope that does not seal."""

    def longest(self, octets: int, *, fixed_length: bool) -> int:
        return octets

    def open(self, location: Location, cover: Cover, payload: Octets, longest: int) -> Octets:
        if cover.properties and is_sealed(cover.properties):
            raise BadObject(Rejection.PROTECTED, "a sealed Object, the scope is in clear")
        return payload


#: Opens what is not sealed, and nothing that is.
IN_CLEAR: Opener = _InClear()


class SealedTrack:
    """Seals and opens the Objects of one track: one AEAD, to be kept as long as the track.

    Args:
        key: Of the track.

    Attributes:
        cipher_blocks: Blocks of 16 octets that were sealed.
    """

    def __init__(self, key: TrackKey) -> None:
        self.cipher_blocks = 0
        self._aead = AESGCM(key.key)
        self._salt = int.from_bytes(key.salt, "big")
        self._padding = key.padding

    def pads(self, *, fixed_length: bool) -> bool:
        """Whether payloads are padded; see :class:`~kvcs.trust.scope.Protection`."""
        return self._padding == "bucket" or (self._padding == "auto" and not fixed_length)

    def longest(self, octets: int, *, fixed_length: bool) -> int:
        """See :class:`Opener`."""
        return sealed_octets(octets, padded=self.pads(fixed_length=fixed_length))

    def seal_into(
        self,
        location: Location,
        priority: int,
        payload: Sequence[Octets],
        sealed: memoryview,
        *,
        padded: bool = False,
    ) -> None:
        """Seal the payload of one Object. Safe in any thread; each place once.

        Args:
            location: Where it will be published.
            priority: Publisher Priority that it will be published with.
            payload: The payload, in pieces.
            sealed: Where it goes: as many octets as :func:`sealed_octets` says.
            padded: Whether it is padded.

        Raises:
            ConfigError: If more would be sealed under one key than is safe. What is still to be
                published goes into a new publication.
            ValueError: If the Object ID is above what a nonce has room for.
        """
        if location.object > MAX_OBJECT_ID:  # or it would have the nonce of another place
            raise ValueError(f"Object ID {location.object}, limit {MAX_OBJECT_ID}")
        plaintext = _plaintext(payload, padded=padded)
        self.cipher_blocks += 1 - (-len(plaintext) // 16)  # and one for the tag
        if self.cipher_blocks > MAX_CIPHER_BLOCKS:
            raise ConfigError(
                f"{self.cipher_blocks} blocks of 16 octets sealed under the key of one track, "
                f"limit {MAX_CIPHER_BLOCKS}: begin a new publication"
            )
        self._aead.encrypt_into(
            self._nonce(location), plaintext, additional_data(location, priority, IMMUTABLE), sealed
        )

    def seal(
        self, location: Location, priority: int, *payload: Octets, padded: bool = False
    ) -> bytes:
        """Return the payload of one Object sealed; see :meth:`seal_into`."""
        sealed = bytearray(sealed_octets(sum(map(len, payload)), padded=padded))
        self.seal_into(location, priority, payload, memoryview(sealed), padded=padded)
        return bytes(sealed)

    def open(self, location: Location, cover: Cover, payload: Octets, longest: int) -> Octets:
        """See :class:`Opener`. What is returned is a view of a buffer of its own."""
        immutable = _immutable(cover.properties)
        if location.object > MAX_OBJECT_ID:
            raise BadObject(
                Rejection.TAG, f"Object ID {location.object}, none is sealed above {MAX_OBJECT_ID}"
            )
        if len(payload) > longest:
            raise BadObject(
                Rejection.TOO_LONG, f"{len(payload)} octets sealed, expected at most {longest}"
            )
        try:
            # Into a buffer that nobody sees before the tag was found right.
            plaintext = self._aead.decrypt(
                self._nonce(location),
                payload,
                additional_data(location, cover.priority, immutable),
            )
        except InvalidTag:
            raise BadObject(
                Rejection.TAG,
                "not sealed by a member of the scope, under this suite and for this place",
            ) from None
        return _payload_of(plaintext)

    def _nonce(self, location: Location) -> bytes:
        place = location.group << 32 | location.object
        return (self._salt ^ place).to_bytes(_NONCE_OCTETS, "big")


class Sealing:
    """The tracks of a scope that seals.

    Args:
        base: The track base key, secret.
        suite: What is sealed with.
        padding: Which Objects are padded.
        key_id: Which base key it is.
    """

    def __init__(
        self, base: bytes, suite: Suite, *, padding: Padding = "auto", key_id: int = KEY_ID
    ) -> None:
        form = _FORMS[suite]
        self._suite = suite
        self._padding = padding
        self._key_id = key_id
        #: HKDF-Extract without a salt.
        self._secret = hmac.digest(bytes(form.hash_octets), base, form.hash_name)

    @classmethod
    def of(cls, scope: Scope) -> Self | None:
        """Return how a scope seals; None: its Objects go in clear."""
        protection = scope.protection
        if protection is None:
            return None
        return cls(scope.key.derive(_LABEL), protection.suite, padding=protection.padding)

    def key(self, name: FullTrackName) -> TrackKey:
        """Return the key of a track."""
        return TrackKey(
            self._suite,
            self._expand(_KEY_LABEL, name, _FORMS[self._suite].key_octets),
            self._expand(_SALT_LABEL, name, _NONCE_OCTETS),
            self._padding,
        )

    def track(self, name: FullTrackName) -> SealedTrack:
        """Return what seals and opens the Objects of a track."""
        return SealedTrack(self.key(name))

    def mask(self, name: FullTrackName) -> "DigestMask":
        """Return what hides the digests of a track."""
        return DigestMask(self._expand(_MASK_LABEL, name, 32))

    def _expand(self, label: bytes, name: FullTrackName, octets: int) -> bytes:
        info = label + _tail(name, self._suite, self._key_id)
        return HKDFExpand(_FORMS[self._suite].hash(), octets, info).derive(self._secret)


class DigestMask:
    """Hides Data Digests where sealed Objects lie: they would tell whether a guess is right.

    Of one place there is one digest, since there is one Object, so what hides it is used once.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __call__(self, location: Location, digest: bytes) -> bytes:
        """Return a digest of 32 octets hidden, or a hidden one as it was."""
        place = location.group.to_bytes(8, "big") + location.object.to_bytes(8, "big")
        pad = hmac.digest(self._key, place, "sha256")
        return (int.from_bytes(pad, "big") ^ int.from_bytes(digest, "big")).to_bytes(32, "big")


def opener(sealing: Sealing | None, name: FullTrackName) -> Opener:
    """Return what opens the Objects of a track."""
    return IN_CLEAR if sealing is None else sealing.track(name)


def opener_with(key: TrackKey | None) -> Opener:
    """Return the same of who has the key of the track alone; None: its Objects are in clear."""
    return IN_CLEAR if key is None else SealedTrack(key)


def is_sealed(properties: Pairs) -> bool:
    """Whether an Object with these Object Properties says that it is sealed."""
    if properties == PROPERTIES:
        return True
    try:
        return bool(_key_ids(properties))
    except ProtocolError:
        return False


def sealed_octets(octets: int, *, padded: bool = False) -> int:
    """Return how long a payload of so many octets is when it is sealed."""
    if not padded:
        return PREFIX_OCTETS + octets + TAG_OCTETS
    return _bucket(PREFIX_OCTETS + octets + _LIST_OCTETS) + TAG_OCTETS


def additional_data(location: Location, priority: int, immutable: bytes) -> bytes:
    """Return what is authenticated with a payload: its place, priority and properties."""
    place = location.group << 32 | location.object
    return place.to_bytes(_NONCE_OCTETS, "big") + bytes((priority,)) + immutable


def _tail(name: FullTrackName, suite: Suite, key_id: int) -> bytes:
    writer = Writer()
    writer.full_track_name(name)
    return writer.getvalue() + suite.to_bytes(2, "big") + key_id.to_bytes(8, "big")


def _bucket(octets: int) -> int:
    """Return the length that an opened payload is padded to: Padme's, 12 % more at most."""
    exponent = octets.bit_length() - 1
    step = 1 << exponent - exponent.bit_length()
    return -(-octets // step) * step


def _plaintext(payload: Sequence[Octets], *, padded: bool) -> bytes:
    octets = sum(map(len, payload))
    if octets > _MAX_PREFIXED:
        raise ConfigError(f"a payload of {octets} octets is sealed, limit {_MAX_PREFIXED}")
    prefix = (_FOUR_OCTETS | octets).to_bytes(PREFIX_OCTETS, "big")
    if not padded:
        return b"".join((prefix, *payload))
    zeros = sealed_octets(octets, padded=True) - TAG_OCTETS - PREFIX_OCTETS - octets - _LIST_OCTETS
    head = b"".join(
        (
            _LIST.to_bytes(2, "big"),
            (_FOUR_OCTETS | 5 + zeros).to_bytes(4, "big"),
            bytes((_PADDING,)),
            zeros.to_bytes(4, "big"),
        )
    )
    return b"".join((prefix, *payload, head, bytes(zeros)))


def _payload_of(plaintext: bytes) -> memoryview:
    """Take the payload out of what was opened. What is in a list behind it is not looked at."""
    if (found := decode_vi64(plaintext)) is None:
        raise BadObject(Rejection.PLAINTEXT, "opened, and there is no length in it")
    octets, start = found
    stop = start + octets
    if stop > len(plaintext):
        raise BadObject(
            Rejection.PLAINTEXT, f"opened, and {octets} octets announced of {len(plaintext)}"
        )
    if stop < len(plaintext):
        listed = decode_vi64(plaintext, stop + 2) if len(plaintext) > stop + 2 else None
        kind = int.from_bytes(plaintext[stop : stop + 2], "big")
        if listed is None or kind != _LIST or sum(listed) != len(plaintext):
            raise BadObject(
                Rejection.PLAINTEXT, "opened, and what follows the payload is no list of properties"
            )
    return memoryview(plaintext)[start:stop]


def _immutable(properties: Pairs) -> bytes:
    """Return the immutable properties of a sealed Object, as they came.

    Raises:
        BadObject: If it does not say that it is sealed with the scope's key.
    """
    if properties == PROPERTIES:
        return IMMUTABLE
    try:
        ids = _key_ids(properties)
    except ProtocolError as exc:
        raise BadObject(Rejection.KEY_ID, f"properties cannot be read: {exc}") from None
    if not ids:
        raise BadObject(Rejection.UNPROTECTED, "an Object in clear, the scope seals")
    found = _blocks_of(properties)
    if ids != [KEY_ID] or len(found) != 1:
        raise BadObject(Rejection.KEY_ID, f"Key IDs {ids}, expected one that is {KEY_ID}")
    return found[0]


def _key_ids(properties: Pairs) -> list[int | bytes]:
    return [
        value
        for block in _blocks_of(properties)
        for number, value in decode_pairs(Reader(block))
        if number == KEY_ID_PROPERTY
    ]


def _blocks_of(properties: Pairs) -> list[bytes]:
    return [
        value
        for number, value in properties
        if number == PropertyType.IMMUTABLE_PROPERTIES and isinstance(value, bytes)
    ]
