"""Which prefixes of a prompt are looked for, and with how many questions (KVCS Section 5.1). Pure.

An Anchor Key stands for one length. Of 40 blocks, 40 lengths can be published, and that there is
none of 17 says nothing of 16: whoever asks for one length after the other needs 40 questions to
know the longest. But all publications of a scope and a model have the first three fields of their
names in common. So ``auto`` asks for those, once, and picks out of the answer the names that end on
a block of the prompt. Where that is not answered, or with more than can be gone through, it asks
for as many lengths as there are questions left, the denser the nearer to the whole; what it finds
then is the longest of those, and nothing more.

An :class:`Index` is asked once as well, and knows what no name tells: publications that go on where
the prompt ends or does otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvcs.consumer.trust import Expectations
from kvcs.errors import ConfigError
from kvcs.profile.naming import ID_OCTETS, PublicationName

#: Which prefixes of a prompt are looked for: the whole, all of them from the longest on, the
#: longest that a few questions find, or those of so many blocks.
Prefixes = Literal["longest", "any", "auto"] | Sequence[int]

#: Questions that ``auto`` asks of one peer at most.
QUESTIONS = 8
#: Publications of one model that are gone through for those of the prompt.
MAX_LISTED = 4096
#: Publications that are taken from an index.
MAX_REPLICAS = 64


def prefix_lengths(prefixes: Prefixes, blocks: int) -> Iterator[int]:
    """Yield the lengths to look for one by one, in blocks, the longest first.

    Args:
        prefixes: What the caller decided; for ``auto``, the lengths that are asked for where
            nobody tells of all.
        blocks: Whole blocks of the prompt.

    Raises:
        ConfigError: If it is not one of the words, or a length is not 1 to ``blocks``.
    """
    if prefixes == "longest":
        yield blocks
    elif prefixes == "any":
        yield from range(blocks, 0, -1)
    elif prefixes == "auto":
        yield from spaced(blocks, QUESTIONS - 1)
    elif not prefixes or not all(type(length) is int for length in prefixes):
        raise ConfigError(
            f"prefixes are {prefixes!r}, expected longest, any, auto, or lengths in blocks"
        )
    else:
        for length in sorted(set(prefixes), reverse=True):
            if not 1 <= length <= blocks:
                raise ConfigError(f"a prefix of {length} blocks, the prompt has {blocks}")
            yield length


def spaced(blocks: int, count: int) -> list[int]:
    """Return so many lengths at most, the whole first, the denser the nearer to it.

    A prompt is most often another one that went on by a little; what is left out grows by the
    same factor from one to the next.
    """
    if blocks <= count:
        return list(range(blocks, 0, -1))
    lengths = [blocks]
    for step in range(1, count):
        cut = round(blocks ** ((step - 1) / (count - 1)))
        # Always a shorter one than the last, and room for those that are still to come.
        lengths.append(max(min(blocks - cut, lengths[-1] - 1), count - step))
    return lengths


class Questions:
    """Counts the questions of ``auto``, and says which lengths are worth one.

    Args:
        blocks: Whole blocks of the prompt.
        limit: Questions at most, at least two.
    """

    def __init__(self, blocks: int, limit: int = QUESTIONS) -> None:
        self.asked = 0
        """Questions asked so far."""

        self._blocks = blocks
        self._limit = limit

    def for_all(self) -> None:
        """Ask for all publications of the model."""
        self.asked += 1

    def for_lengths(self, *, each: int = 1) -> list[int]:
        """Ask for single lengths, the longest first.

        Args:
            each: Questions that one length may take: two, where the peer may not yet have heard
                that the question before is taken back, which overlaps.
        """
        lengths = spaced(self._blocks, (self._limit - self.asked) // each)
        self.asked += len(lengths) * each
        return lengths


# -- an index ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A publication of which an index says that it begins as the prompt does."""

    publication: PublicationName

    blocks: int
    """Blocks of the prompt, from the first one on, that it holds."""

    following: tuple[bytes, ...] = ()
    """Block Keys of the publication behind those, as far as the index tells. With them a segment
    that goes beyond what is shared can be confirmed; without them it is not used."""

    uris: tuple[str, ...] = ()
    """Where it is, ``moqt://host:port/path``; they are tried after those that the caller knows."""


class Index(Protocol):
    """Who knows which publications hold which Block Keys: a KVSP Index Service."""

    async def lookup(
        self, scope_id: bytes, compatibility_id: bytes, block_keys: Sequence[bytes]
    ) -> Sequence[Replica]:
        """Return what holds the first of these blocks, in one question.

        Args:
            scope_id: Scope ID, 32 octets.
            compatibility_id: Compatibility ID, 32 octets.
            block_keys: Block Keys of the prompt, from its first block on.

        Raises:
            KvcsError: If it cannot be asked, or its answer not be read; so may OSError and
                TimeoutError. The retrieval then goes on without it.
        """


def unusable(replica: Replica, expected: Expectations) -> str | None:
    """Say why what an index told cannot be used; None: it can be tried.

    It is a hint and nothing more: what it says of blocks is held against the manifest.
    """
    name, known = replica.publication, len(expected.block_keys)
    if name.scope_id != expected.scope_key.scope_id:
        return f"{name} is of another scope"
    if name.compatibility_id != expected.scope_key.compatibility_id(expected.descriptor):
        return f"{name} is of another descriptor"
    if not 1 <= replica.blocks <= known:
        return f"{name} is said to hold {replica.blocks} blocks, the prompt has {known}"
    if any(len(key) != ID_OCTETS for key in replica.following):
        return f"{name} comes with a Block Key that has not {ID_OCTETS} octets"
    if replica.blocks + len(replica.following) > expected.limits.blocks:
        return f"{name} comes with more Block Keys than {expected.limits.blocks}"
    return None
