"""What is asked of a block service for many blocks, and of an index; and what an index answers.

Bodies in JSON, read strictly (see :mod:`kvcs.kvsp.http.records`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from kvcs.kvsp.http.records import (
    MAX_BLOCKS,
    MAX_RUNS,
    BadRecord,
    Candidate,
    Runs,
    read_boolean,
    read_candidate,
    read_count,
    read_keys,
    read_lease,
    read_object,
    read_publication,
)

#: Keys of one question for many blocks, and layers times keys of it.
MAX_BATCH_KEYS = 4096
MAX_BATCH_SECTIONS = 65_536
#: Holders of one key, or candidates, that an answer tells at most.
MAX_TOLD = 64
#: What an answer tells where nothing else is asked for.
USUALLY_TOLD = 8


@dataclass(frozen=True, slots=True)
class BatchQuestion:
    """Some layers of some blocks, in one answer of frames."""

    keys: tuple[bytes, ...]
    layers: Runs
    publication: bytes | None = None

    @classmethod
    def parse(cls, text: bytes, *, octets: int, max_keys: int) -> Self:
        """Read a body.

        Raises:
            BadRecord: If it is none.
        """
        members = read_object(
            text,
            octets=octets,
            values=max_keys + 1024,
            required=("keys", "layers"),
            optional=("publication",),
        )
        layers = Runs.parse(members["layers"])
        if not layers:
            raise BadRecord("no layers, expected at least one run")
        return cls(
            read_keys(members["keys"], max_keys),
            layers,
            read_publication(members.get("publication")),
        )

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        members: dict[str, Any] = {
            "keys": [key.hex() for key in self.keys],
            "layers": self.layers.json(),
        }
        if self.publication is not None:
            members["publication"] = self.publication.hex()
        return orjson.dumps(members)

    @property
    def sections(self) -> int:
        """How many frames the answer has, but for the last."""
        return len(self.keys) * len(self.layers)

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield ``(layer, index of the key)`` in the order of the frames."""
        for layer in self.layers:
            for block in range(len(self.keys)):
                yield layer, block


def batches(
    wanted: Iterable[tuple[bytes, int]],
    *,
    publication: bytes | None = None,
    max_keys: int = MAX_BATCH_KEYS,
    max_sections: int = MAX_BATCH_SECTIONS,
) -> list[BatchQuestion]:
    """Return few questions that ask for these layers of these blocks, each once, and no others.

    Args:
        wanted: Block Key and layer of each, in any order.
        publication: A Publication ID that all must be of, if given.
        max_keys: Keys of one question at most.
        max_sections: Layers times keys of one question at most.

    Returns:
        Those for the lowest layers first. Layers of which the same blocks are wanted share one.
    """
    by_layer: dict[int, dict[bytes, None]] = {}
    for key, layer in sorted(wanted, key=lambda pair: pair[1]):
        by_layer.setdefault(layer, {})[key] = None
    questions: list[BatchQuestion] = []
    same: list[int] = []
    layers = list(by_layer)
    for number, layer in enumerate(layers):
        same.append(layer)
        keys = tuple(by_layer[layer])
        following = layers[number + 1 : number + 2]
        is_full = (
            len(Runs.of(same).runs) == MAX_RUNS
            or (len(same) + 1) * min(len(keys), max_keys) > max_sections
        )
        if following and not is_full and by_layer[following[0]].keys() == by_layer[layer].keys():
            continue
        each = min(max_keys, max_sections // len(same))
        questions += [
            BatchQuestion(keys[at : at + each], Runs.of(same), publication)
            for at in range(0, len(keys), each)
        ]
        same = []
    return questions


@dataclass(frozen=True, slots=True)
class LookupQuestion:
    """Who holds these blocks? Either each by itself, or as a chain from its first block on."""

    keys: tuple[bytes, ...]
    limit: int = USUALLY_TOLD
    """Holders of each key, or candidates in all, at most."""

    following: bool = False
    """Whether the Block Keys are wanted that a candidate has behind those of the chain. With them a
    manifest can be checked that lists more blocks than the prompt has."""

    @classmethod
    def parse(cls, text: bytes, *, octets: int, max_keys: int) -> Self:
        """Read a body.

        Raises:
            BadRecord: If it is none.
        """
        members = read_object(
            text,
            octets=octets,
            values=max_keys + 16,
            required=("keys",),
            optional=("limit", "following"),
        )
        return cls(
            read_keys(members["keys"], max_keys),
            read_count("limit", members.get("limit", USUALLY_TOLD), MAX_TOLD),
            read_boolean("following", members.get("following", False)),
        )

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        return orjson.dumps(
            {
                "keys": [key.hex() for key in self.keys],
                "limit": self.limit,
                "following": self.following,
            }
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a look-up of keys, each by itself."""

    holders: tuple[Candidate, ...]
    """Each holder once."""

    by_key: tuple[tuple[int, ...], ...]
    """For each key that was asked about, indices into ``holders``, the best first."""

    def of(self, index: int) -> list[Candidate]:
        """Return the holders of the key at an index of the question."""
        return [self.holders[number] for number in self.by_key[index]]

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        return orjson.dumps(
            {
                "holders": [holder.json() for holder in self.holders],
                "by_key": [list(numbers) for numbers in self.by_key],
            }
        )

    @classmethod
    def parse(cls, text: bytes, *, octets: int, keys: int) -> Self:
        """Read an answer about so many keys.

        Raises:
            BadRecord: If it is none.
        """
        members = read_object(
            text,
            octets=octets,
            values=octets,  # each has an octet at least
            required=("holders", "by_key"),
        )
        holders = _candidates(members["holders"], keys * MAX_TOLD)
        by_key = members["by_key"]
        if not isinstance(by_key, list) or len(by_key) != keys:
            raise BadRecord(f"by_key is no list of {keys}")
        for numbers in by_key:
            if not isinstance(numbers, list) or not all(
                type(n) is int and 0 <= n < len(holders) for n in numbers
            ):
                raise BadRecord("by_key has what is no index of a holder")
        return cls(holders, tuple(map(tuple, by_key)))


@dataclass(frozen=True, slots=True)
class Longest:
    """The answer to a chain of keys: who covers the longest beginning of it."""

    candidates: tuple[Candidate, ...]
    """Those that cover most blocks first; ``covers`` of each says how many."""

    @property
    def blocks(self) -> int:
        """Blocks of the longest beginning that anybody has from its first block on; 0: none."""
        return max((one.covers or 0 for one in self.candidates if not one.first_block), default=0)

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        return orjson.dumps(
            {"blocks": self.blocks, "candidates": [one.json() for one in self.candidates]}
        )

    @classmethod
    def parse(cls, text: bytes, *, octets: int, keys: int) -> Self:
        """Read an answer about a chain of so many keys.

        Raises:
            BadRecord: If it is none, or says more than was asked about.
        """
        members = read_object(text, octets=octets, values=octets, required=("blocks", "candidates"))
        candidates = _candidates(members["candidates"], MAX_TOLD)
        for one in candidates:
            if one.covers is None or not 1 <= one.covers <= keys:
                raise BadRecord(f"a candidate covers {one.covers} blocks, expected 1 to {keys}")
        answer = cls(candidates)
        if members["blocks"] != answer.blocks:
            raise BadRecord("blocks is not what the candidates cover at most")
        return answer


@dataclass(frozen=True, slots=True)
class Chain:
    """The answer to which blocks a publication has, as one of its holders says."""

    first_block: int
    """Index of its first block in the whole context."""

    keys: tuple[bytes, ...] = field(repr=False)
    """The Block Keys of its blocks, one after the other."""

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        return orjson.dumps(
            {"first_block": self.first_block, "keys": [key.hex() for key in self.keys]}
        )

    @classmethod
    def parse(cls, text: bytes, *, octets: int, max_keys: int) -> Self:
        """Read an answer.

        Raises:
            BadRecord: If it is none.
        """
        members = read_object(
            text, octets=octets, values=max_keys + 16, required=("first_block", "keys")
        )
        first_block = read_count("first_block", members["first_block"], MAX_BLOCKS, least=0)
        return cls(first_block, read_keys(members["keys"], max_keys))


@dataclass(frozen=True, slots=True)
class Lease:
    """For how long an index lists a holder."""

    lease_s: float

    def body(self) -> bytes:
        """Return what :meth:`parse` reads."""
        return orjson.dumps({"lease_s": self.lease_s})

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read one, as a wish or as an answer.

        Raises:
            BadRecord: If it is none.
        """
        members = read_object(text, octets=1024, values=8, required=("lease_s",))
        return cls(read_lease(members["lease_s"]))


def _candidates(value: object, limit: int) -> tuple[Candidate, ...]:
    if not isinstance(value, list) or len(value) > min(limit, MAX_BLOCKS):
        raise BadRecord(f"no list of at most {limit} holders")
    return tuple(read_candidate(one) for one in value)
