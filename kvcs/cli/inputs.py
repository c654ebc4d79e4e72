"""What subcommands read: files or standard input, descriptors, tokens, names.

Every refusal names the file. Nothing here is read without a bound.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.errors import BadDescriptor, BadName, ConfigError
from kvcs.kvsp import strictjson
from kvcs.kvsp.descriptor import Descriptor
from kvcs.kvsp.keys import MAX_TOKEN
from kvcs.profile.naming import PROFILE
from moqt.errors import UsageError
from moqt.names import FullTrackName, TrackNamespace

#: What stands for standard input.
STDIN = "-"
#: What a name begins with whose other fields are in hex.
HEX_NAME = f"{PROFILE.decode()}/"
#: Above every manifest and every Object that is accepted by default.
MAX_OCTETS = (64 << 20) + (1 << 16)
MAX_VALUES = 1 << 23
MAX_DEPTH = 32


def read_octets(path: str) -> bytes:
    """Read a whole file, or standard input for ``-``.

    Raises:
        ConfigError: If it cannot be read, or is larger than anything that is accepted.
    """
    try:
        if path == STDIN:
            octets = sys.stdin.buffer.read(MAX_OCTETS + 1)
        else:
            with Path(path).open("rb") as file:
                octets = file.read(MAX_OCTETS + 1)
    except (OSError, ValueError) as exc:  # ValueError: a name with a NUL in it
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(f"{shown_name(path)}: {reason}") from None
    if len(octets) > MAX_OCTETS:
        raise ConfigError(f"{shown_name(path)}: more than {MAX_OCTETS} octets")
    return octets


def shown_name(path: str) -> str:
    """Return what messages call a file."""
    return "standard input" if path == STDIN else os.fsencode(path).decode(errors="replace")


def parse_json(octets: bytes, name: str) -> Any:
    """Parse JSON.

    Raises:
        ConfigError: If it is none.
    """
    try:
        return strictjson.loads(octets, octets=MAX_OCTETS, depth=MAX_DEPTH, values=MAX_VALUES)
    except strictjson.StrictJsonError as exc:
        raise ConfigError(f"{name}: not JSON: {exc}") from None


def descriptor_and_tokens(value: object, name: str) -> tuple[Descriptor, object | None]:
    """Take a Compatibility Descriptor out of parsed JSON.

    Args:
        value: A descriptor, or an object with the members ``descriptor`` and ``tokens``, such as
            lies beside a ``.safetensors`` cache.
        name: Of the file, for messages.

    Returns:
        The descriptor, and the member ``tokens`` as it is, if there is one.

    Raises:
        BadDescriptor: If it is none.
    """
    tokens: object | None = None
    if isinstance(value, Mapping) and "descriptor" in value and "kvsp" not in value:
        tokens, value = value.get("tokens"), value["descriptor"]
    if not isinstance(value, Mapping):
        raise BadDescriptor(f"{name}: not a JSON object with the members of a descriptor")
    try:
        return Descriptor.from_json(value), tokens
    except BadDescriptor as exc:
        raise BadDescriptor(f"{name}: {exc}") from None


def tokens_from(value: object, name: str) -> NDArray[np.uint32]:
    """Take token ids out of parsed JSON: an array of integers.

    Raises:
        ConfigError: If it is not one, or if an integer is not an unsigned 32-bit one.
    """
    if not isinstance(value, list):
        raise ConfigError(f"{name}: tokens are not an array of integers")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise ConfigError(
                f"{name}: token {position} is {token!r:.40}, expected an integer of 0 to "
                f"{MAX_TOKEN}"
            )
    return np.array(value, dtype=np.uint32)


def parse_tokens(octets: bytes, name: str) -> NDArray[np.uint32]:
    """Read token ids: JSON, or integers with white space or commas between them.

    As JSON, an array of integers, or an object with such a member ``tokens``.

    Raises:
        ConfigError: If it is neither; the message names the file and the token.
    """
    if octets.lstrip()[:1] in (b"[", b"{"):
        value = parse_json(octets, name)
        if isinstance(value, Mapping):
            if "tokens" not in value:
                raise ConfigError(f"{name}: no member 'tokens'")
            value = value["tokens"]
        return tokens_from(value, name)
    words = octets.replace(b",", b" ").split()
    for position, word in enumerate(words):
        if not word.isdigit() or len(word) > len(str(MAX_TOKEN)):
            shown = word[:40].decode(errors="replace")
            raise ConfigError(f"{name}: token {position} is {shown!r}, expected an integer")
    return tokens_from([int(word) for word in words], name)


def parse_name(text: str) -> tuple[TrackNamespace, bytes | None]:
    """Read a namespace: kvcs-1/HEX/..., or as logs of MOQT print it.

    Returns:
        The namespace, and the Track Name if ``--`` and one follow.

    Raises:
        BadName: If it is neither. It need not be a name of the profile.
    """
    try:
        if text.startswith(HEX_NAME):
            fields, separator, track = text.partition("--")
            octets = [bytes.fromhex(part) for part in fields.removeprefix(HEX_NAME).split("/")]
            return TrackNamespace((PROFILE, *octets)), track.encode() if separator else None
        if "--" in text:
            full = FullTrackName.parse(text)
            return full.namespace, full.name
        return TrackNamespace.parse(text), None
    except UsageError as exc:
        raise BadName(str(exc)) from None
    except ValueError:
        raise BadName(f"{text[:80]!r}: a field is not hex") from None
