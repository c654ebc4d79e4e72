"""Digests in header fields (RFC 9530), and the entity tags that are made of them.

``Repr-Digest`` is over the whole representation, whatever part of it an answer carries,
``Content-Digest`` over what this answer carries. Both are dictionaries of structured fields (RFC
9651) with a byte sequence for each algorithm; here it is SHA-256 that is sent and looked at.
"""

import base64
import binascii
import re
from typing import Final

SHA256_OCTETS: Final = 32
_ALGORITHM = "sha-256"
#: A field that is longer is not looked at.
_MAX_FIELD = 4096

_KEY = r"[a-z*][a-z0-9_.*-]*"
_BARE = (
    r":[A-Za-z0-9+/=]*:"  # a byte sequence
    r"|\"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\[\\\"])*+\""  # a string
    r"|-?[0-9]{1,15}(?:\.[0-9]{1,3})?"
    r"|\?[01]"
    r"|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*+"  # a token
)
_PARAMETERS = rf"(?:;\x20*(?:{_KEY})(?:=(?:{_BARE}))?)*"
_MEMBER = re.compile(rf"(?P<key>{_KEY})(?:=(?P<value>{_BARE}))?{_PARAMETERS}")


def digest_field(sha256: bytes) -> str:
    """Return the value of Repr-Digest or Content-Digest for a SHA-256 of 32 octets."""
    return f"{_ALGORITHM}=:{base64.b64encode(sha256).decode()}:"


def parse_digest(field: str) -> bytes | None:
    """Return the SHA-256 that a field carries; ``None`` if it carries others only.

    Raises:
        ValueError: If it is no dictionary of structured fields, or its SHA-256 is none.
    """
    if len(field) > _MAX_FIELD:
        raise ValueError(f"digest field of {len(field)} characters, limit {_MAX_FIELD}")
    found: str | None = None
    text, at = field.strip(" "), 0
    while at < len(text):
        match = _MEMBER.match(text, at)
        if match is None:
            raise ValueError("digest field is no dictionary")
        if match["key"] == _ALGORITHM:  # of several the last one counts (RFC 9651 Section 4.2.2)
            found = match["value"] or "?1"
        at = match.end()
        comma = re.compile(r"[ \t]*,[ \t]*").match(text, at)
        if comma is None:
            if at < len(text):
                raise ValueError("digest field is no dictionary")
            break
        at = comma.end()
        if at == len(text):
            raise ValueError("digest field ends with a comma")
    if found is None:
        return None
    if not found.startswith(":"):
        raise ValueError("digest is no byte sequence")
    try:
        octets = base64.b64decode(found.strip(":"), validate=True)
    except binascii.Error:
        raise ValueError("digest is not base64") from None
    if len(octets) != SHA256_OCTETS:
        raise ValueError(f"digest of {len(octets)} octets, expected {SHA256_OCTETS}")
    return octets


def entity_tag(sha256: bytes) -> str:
    """Return the strong entity tag of a representation with this digest, in its quotes."""
    return f'"{sha256.hex()}"'
