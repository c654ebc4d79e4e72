"""Which publication to try next (KVCS Section 5.1). Pure.

Publications appear and go while a retrieval is under way. One that was tried is not tried again:
its Objects are never mixed with those of another (KVCS Section 5.4).
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from kvcs.errors import ConfigError
from kvcs.profile.manifest import Manifest
from kvcs.profile.naming import PublicationName

#: Which prefixes of a prompt are looked for: the whole, all of them from the longest on, or
#: those of so many blocks.
Prefixes = Literal["longest", "any"] | Sequence[int]


def prefix_lengths(prefixes: Prefixes, blocks: int) -> Iterator[int]:
    """Yield the lengths to look for, in blocks, the longest first.

    Args:
        prefixes: What the caller decided.
        blocks: Whole blocks of the prompt.

    Raises:
        ConfigError: If it is not one of the words, or a length is not 1 to ``blocks``.
    """
    if prefixes == "longest":
        yield blocks
    elif prefixes == "any":
        yield from range(blocks, 0, -1)
    elif not prefixes or not all(type(length) is int for length in prefixes):
        raise ConfigError(f"prefixes are {prefixes!r}, expected longest, any, or lengths in blocks")
    else:
        for length in sorted(set(prefixes), reverse=True):
            if not 1 <= length <= blocks:
                raise ConfigError(f"a prefix of {length} blocks, the prompt has {blocks}")
            yield length


class Candidates:
    """The publications that are announced, and which of them were tried."""

    def __init__(self) -> None:
        self._announced: dict[PublicationName, int] = {}  # to blocks, in order of appearance
        self._tried: set[PublicationName] = set()

    def appeared(self, name: PublicationName, blocks: int) -> bool:
        """Note an announcement; return whether the publication is a new one.

        Args:
            name: The publication.
            blocks: Blocks of the prefix it was found under.
        """
        is_new = name not in self._announced and name not in self._tried
        self._announced.pop(name, None)  # announced again: it counts as the newest
        self._announced[name] = blocks
        return is_new

    def gone(self, name: PublicationName) -> None:
        """Note that a publication was withdrawn. The others remain."""
        self._announced.pop(name, None)

    def tried(self, name: PublicationName) -> None:
        """Note that a publication need not be tried again."""
        self._tried.add(name)

    def best(self, count: int) -> list[PublicationName]:
        """Return those worth a look: untried, of the longest prefix, the newest first."""
        open_ = {n: b for n, b in self._announced.items() if n not in self._tried}
        longest = max(open_.values(), default=0)
        return [name for name, blocks in reversed(open_.items()) if blocks == longest][:count]


def rank(manifest: Manifest, version: int) -> tuple[bool, int, int, int]:
    """Return a key by which the publication that promises most is the greatest.

    Complete ones first, then those that reach furthest into the context, then those that list
    most finished Groups, then those with the most versions.
    """
    segments = manifest.segments
    reach = segments[-1].end_block if segments else 0
    groups = sum(entry.groups(track) for entry in segments for track in entry.tracks)
    return manifest.complete, reach, groups, version
