"""The COSE envelope of everything that is signed here (RFC 9052): manifests and tokens.

One reader for both, whichever library makes or checks the signature. It says what stands where and
believes nothing; who opens an envelope says which kinds it takes and how long the parts may be, and
what is longer is refused before it is copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import cbor2

from kvcs.trust.cbor import BadCbor, Cbor, read_map

#: The tag of a CBOR Web Token, around that of COSE (RFC 8392 Section 6).
CWT_TAG: Final = 61


class Kind(IntEnum):
    """What the third octet of an envelope says it is: its COSE tag (RFC 9052 Section 2)."""

    MAC0 = 17
    SIGN1 = 18


class Label(IntEnum):
    """Header parameters that somebody here understands (RFC 9052 Section 3.1, RFC 9596)."""

    ALG = 1
    CRIT = 2
    CONTENT_TYPE = 3
    KID = 4
    TYP = 16


#: What is authenticated begins with the kind of message (RFC 9052 Sections 4.4 and 6.3).
_CONTEXTS: Final = {Kind.SIGN1: "Signature1", Kind.MAC0: "MAC0"}


@dataclass(frozen=True, slots=True)
class Rules:
    """Which envelopes are opened."""

    kinds: tuple[Kind, ...]
    """The first one is meant where no tag is needed and none is there."""

    header_octets: int
    """What each of the headers may have."""

    payload_octets: int

    tag_needed: bool
    """Whether the COSE tag must stand there."""

    cwt_tag: bool
    """Whether tag 61 may stand before it."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands in an envelope. Nothing of it is checked but its form."""

    kind: Kind

    protected: bytes
    """The protected header as it came: what is signed."""

    header: Mapping[Any, Any]
    """The same, read."""

    unprotected: Mapping[Any, Any]
    payload: bytes

    signature: bytes = field(repr=False)
    """Signature, or tag of a MAC; of any length."""

    @property
    def to_be_signed(self) -> bytes:
        """What the signature is over, without external data."""
        return to_be_signed(self.kind, self.protected, self.payload)


def to_be_signed(kind: Kind, protected: bytes, payload: bytes) -> bytes:
    """Return the Sig_structure, or MAC_structure, of an envelope."""
    octets: bytes = cbor2.dumps([_CONTEXTS[kind], protected, b"", payload])
    return octets


def seal_envelope(kind: Kind, protected: bytes, payload: bytes, signature: bytes) -> bytes:
    """Return an envelope with its COSE tag and an empty unprotected header."""
    octets: bytes = cbor2.dumps(cbor2.CBORTag(kind, [protected, {}, payload, signature]))
    return octets


def open_envelope(octets: bytes, rules: Rules) -> Envelope:
    """Take an envelope apart.

    Raises:
        BadCbor: If it is none of those that the rules allow: another tag or none, parts missing or
            too many, octets after it, headers that are no maps of definite length with each key
            once, a payload that is detached, anything too long or nested too deep.
    """
    reader = Cbor(octets)
    kind, count = _kind_and_count(reader, rules)
    if count != 4:
        raise BadCbor("not an array of four elements")
    protected = reader.byte_string("the protected header", rules.header_octets)
    start = reader.at
    unprotected = reader.value()
    if not isinstance(unprotected, dict):
        raise BadCbor("the unprotected header is not a map")
    if reader.at - start > rules.header_octets:
        raise BadCbor(f"headers of more than {rules.header_octets} octets")
    payload = reader.byte_string("the payload", rules.payload_octets)
    signature = reader.byte_string("the signature", len(octets))
    reader.expect_end()
    # Empty octets are how RFC 9052 writes a protected header without parameters.
    header = read_map(protected, "the protected header") if protected else {}
    return Envelope(kind, protected, header, unprotected, payload, signature)


def _kind_and_count(reader: Cbor, rules: Rules) -> tuple[Kind, int]:
    """Read what stands before the parts; the count is 0 where no array is."""
    expected = " or ".join(str(int(kind)) for kind in rules.kinds)
    major, value = reader.head()
    if rules.cwt_tag and (major, value) == (Cbor.TAG, CWT_TAG):
        major, value = reader.head()
    kind = rules.kinds[0]
    if major == Cbor.TAG:
        if value not in [int(kind) for kind in rules.kinds]:
            raise BadCbor(f"tag {value}, expected {expected}")
        kind = Kind(value)
        major, value = reader.head()
    elif rules.tag_needed:
        raise BadCbor(f"no tag, expected {expected}")
    return kind, value if major == Cbor.ARRAY else 0
