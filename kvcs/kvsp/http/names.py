"""What a block is called in a path: Scope ID, Compatibility ID and Block Key, in hex.

One text for one name: lower-case hex, digits without leading zeros. Whatever else stands in a path
names nothing.
"""

import re
from dataclasses import dataclass
from typing import Self

from kvcs.errors import BadName
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.profile.naming import PUBLICATION_ID_OCTETS, short_hex

#: A holder registers under an identifier of its own choice, as long as a Publication ID.
HOLDER_ID_OCTETS = PUBLICATION_ID_OCTETS
#: Layers are numbered from 0 to one less (KVSP Section 2).
MAX_LAYERS = 65_535

_HEX = re.compile(r"(?:[0-9a-f]{2})*")


@dataclass(frozen=True, slots=True)
class BlockName:
    """Which block, of the caches of which model, of which scope.

    Raises:
        BadName: If an identifier does not have its 32 octets.
    """

    scope_id: bytes
    compatibility_id: bytes
    block_key: bytes

    def __post_init__(self) -> None:
        for what, octets in (
            ("Scope ID", self.scope_id),
            ("Compatibility ID", self.compatibility_id),
            ("Block Key", self.block_key),
        ):
            if len(octets) != ID_OCTETS:
                raise BadName(f"{what} of {len(octets)} octets, expected {ID_OCTETS}")

    @classmethod
    def parse(cls, scope: str, compatibility: str, key: str) -> Self:
        """Read the three parts of a path.

        Raises:
            BadName: If one of them is not 64 digits of lower-case hex.
        """
        return cls(
            from_hex("Scope ID", scope, ID_OCTETS),
            from_hex("Compatibility ID", compatibility, ID_OCTETS),
            from_hex("Block Key", key, ID_OCTETS),
        )

    def __str__(self) -> str:
        """For logs: the first digits of each identifier (decision 14)."""
        return "/".join(map(short_hex, (self.scope_id, self.compatibility_id, self.block_key)))


def from_hex(what: str, text: object, octets: int) -> bytes:
    """Read an identifier of so many octets.

    Args:
        what: What it should be, for the message.
        text: What was found in its place, of whatever type.
        octets: Its length.

    Raises:
        BadName: If it is anything but lower-case hex of that length.
    """
    if not isinstance(text, str):
        raise BadName(f"{what} is no text, expected {2 * octets} digits of lower-case hex")
    if len(text) != 2 * octets or not _HEX.fullmatch(text):
        found = f"{what} of {len(text)} characters"
        raise BadName(f"{found}, expected {2 * octets} digits of lower-case hex")
    return bytes.fromhex(text)
