"""Holdings: what somebody holds, as an index is told and as it tells others. Values and JSON.

JSON from strangers is read strictly: no member that nobody knows, none twice, every number and text
within its bounds, and bounds on the whole before anything is built.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kvcs.errors import BadName
from kvcs.kvsp import strictjson
from kvcs.kvsp.http.names import MAX_LAYERS, from_hex
from kvcs.kvsp.http.uris import HolderUri, PublicationUri, parse_holder
from kvcs.kvsp.keys import ID_OCTETS
from kvcs.profile.naming import PUBLICATION_ID_OCTETS

#: Blocks of a context at most, as in manifests (decision 13).
MAX_BLOCKS = 1 << 24
#: Runs of layers in one list.
MAX_RUNS = 256
MAX_ENCODINGS = 16
#: Of JSON: an object, its holders, one of them, its layers, one run of them.
_DEPTH = 5

_ENCODING = re.compile(r"(?:kv\.)?[a-z0-9-]{1,32}")


class BadRecord(ValueError):
    """What was sent is no such JSON; the message says what was found and expected."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Layers, as runs of consecutive ones: ``(first, last)`` each, ascending and apart.

    Raises:
        BadRecord: If they are not.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self.runs) > MAX_RUNS:
            raise BadRecord(f"{len(self.runs)} runs of layers, limit {MAX_RUNS}")
        before = -1
        for first, last in self.runs:
            if not before < first <= last < MAX_LAYERS:
                raise BadRecord(
                    f"layers {first} to {last} after {before}, expected ascending runs below "
                    f"{MAX_LAYERS}"
                )
            before = last

    @classmethod
    def of(cls, layers: Iterable[int]) -> Self:
        """Return the runs of some layers.

        Raises:
            BadRecord: If there are more runs than one record may have.
        """
        runs: list[tuple[int, int]] = []
        for layer in sorted(set(layers)):
            if runs and layer == runs[-1][1] + 1:
                runs[-1] = runs[-1][0], layer
            else:
                runs.append((layer, layer))
        return cls(tuple(runs))

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read them from JSON: a list of pairs.

        Raises:
            BadRecord: If they are none.
        """
        if not isinstance(value, list) or len(value) > MAX_RUNS:
            raise BadRecord(f"layers are no list of at most {MAX_RUNS} runs")
        runs: list[tuple[int, int]] = []
        for pair in value:
            match pair:
                case [first, last]:
                    runs.append((_integer("layer", first), _integer("layer", last)))
                case _:
                    raise BadRecord("layers are not pairs [first, last]")
        return cls(tuple(runs))

    def json(self) -> list[list[int]]:
        """Return what :meth:`parse` reads."""
        return [[first, last] for first, last in self.runs]

    def __contains__(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.runs)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.runs:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one holder has of one chain of blocks: what is registered at an index.

    Raises:
        BadRecord: If a value is not within its bounds.
    """

    uri: HolderUri
    """Where it is: a publication over MOQT, or a block service over HTTP."""

    keys: tuple[bytes, ...] = field(repr=False)
    """The Block Keys of its blocks, one after the other."""

    layers: Runs
    """Which layers it has of every one of them; none yet at the beginning of a production."""

    first_block: int = 0
    """Index of its first block in the whole context."""

    encodings: tuple[str, ...] = ("raw",)
    """Forms in which it has them: ``CODEC``, or ``kv.CODEC``. Over HTTP it is ``raw``."""

    complete: bool = False
    """Whether nothing will be added any more."""

    publication: bytes | None = None
    """Publication ID of what a block service serves, where it is all of one. A MOQT URI has it."""

    def __post_init__(self) -> None:
        if not self.keys:
            raise BadRecord("no Block Key, expected at least one")
        if len(set(self.keys)) != len(self.keys):
            raise BadRecord("a Block Key stands there twice: no two blocks of a chain have one")
        _check_number("first_block", self.first_block, MAX_BLOCKS)
        if self.first_block + len(self.keys) > MAX_BLOCKS:
            raise BadRecord(f"blocks up to {self.first_block + len(self.keys)}, limit {MAX_BLOCKS}")
        if not 1 <= len(self.encodings) <= MAX_ENCODINGS:
            raise BadRecord(f"{len(self.encodings)} encodings, expected 1 to {MAX_ENCODINGS}")
        for text in self.encodings:
            if not _ENCODING.fullmatch(text):
                raise BadRecord(f"encoding {text[:40]!r}, expected CODEC or kv.CODEC")
        if isinstance(self.uri, PublicationUri) and self.publication is not None:
            raise BadRecord("publication beside a MOQT URI, which names it already")

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return len(self.keys)

    @property
    def publication_id(self) -> bytes | None:
        """Which publication all of it is of, if it says so."""
        if isinstance(self.uri, PublicationUri):
            return self.uri.name.publication_id
        return self.publication

    def json(self, lease_s: float) -> dict[str, Any]:
        """Return the body of a registration."""
        return {
            "uri": str(self.uri),
            "first_block": self.first_block,
            "keys": [key.hex() for key in self.keys],
            "layers": self.layers.json(),
            "encodings": list(self.encodings),
            "complete": self.complete,
            **({} if self.publication is None else {"publication": self.publication.hex()}),
            "lease_s": lease_s,
        }


def read_registration(text: bytes, *, octets: int, max_keys: int) -> tuple[Holding, float]:
    """Read the body of a registration: a holding, and the lease that is wished for in seconds.

    Raises:
        BadRecord: If it is none.
    """
    members = read_object(
        text,
        octets=octets,
        values=max_keys + 4 * MAX_RUNS,
        required=("uri", "first_block", "keys", "layers", "encodings", "complete", "lease_s"),
        optional=("publication",),
    )
    try:
        holding = Holding(
            uri=parse_holder(members["uri"]),
            first_block=_natural("first_block", members["first_block"]),
            keys=read_keys(members["keys"], max_keys),
            layers=Runs.parse(members["layers"]),
            encodings=_texts("encodings", members["encodings"], MAX_ENCODINGS),
            complete=read_boolean("complete", members["complete"]),
            publication=read_publication(members.get("publication")),
        )
    except BadName as exc:
        raise BadRecord(str(exc)) from None
    return holding, read_lease(members["lease_s"])


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an index says of a holder. It may be wrong: what is had from there is verified."""

    uri: HolderUri
    first_block: int
    blocks: int
    layers: Runs
    encodings: tuple[str, ...]
    complete: bool
    publication: bytes | None
    expires_s: float
    """Seconds until its lease is over."""

    covers: int | None = None
    """Blocks of the chain that was asked about, from its first one on; in an answer about the
    longest prefix."""

    following: tuple[bytes, ...] | None = field(default=None, repr=False)
    """Block Keys of all its blocks behind those, where they were asked for and there was room."""

    def json(self) -> dict[str, Any]:
        """Return what :func:`read_candidate` reads."""
        members: dict[str, Any] = {
            "uri": str(self.uri),
            "first_block": self.first_block,
            "blocks": self.blocks,
            "layers": self.layers.json(),
            "encodings": list(self.encodings),
            "complete": self.complete,
            "expires_s": round(self.expires_s, 3),
        }
        if self.publication is not None:
            members["publication"] = self.publication.hex()
        if self.covers is not None:
            members["covers"] = self.covers
        if self.following is not None:
            members["following"] = [key.hex() for key in self.following]
        return members


def read_candidate(value: object) -> Candidate:
    """Read one candidate of an answer.

    Raises:
        BadRecord: If it is none.
    """
    members = _members(
        value,
        ("uri", "first_block", "blocks", "layers", "encodings", "complete", "expires_s"),
        ("publication", "covers", "following"),
    )
    covers, following = members.get("covers"), members.get("following")
    try:
        return Candidate(
            uri=parse_holder(members["uri"]),
            first_block=_natural("first_block", members["first_block"]),
            blocks=_natural("blocks", members["blocks"]),
            layers=Runs.parse(members["layers"]),
            encodings=_texts("encodings", members["encodings"], MAX_ENCODINGS),
            complete=read_boolean("complete", members["complete"]),
            publication=read_publication(members.get("publication")),
            expires_s=read_lease(members["expires_s"], least=0.0),
            covers=None if covers is None else _natural("covers", covers),
            following=read_keys(following, MAX_BLOCKS, least=0) if following is not None else None,
        )
    except BadName as exc:
        raise BadRecord(str(exc)) from None


# -- parts, for this module and for questions ----------------------------------------------------


def read_object(
    text: bytes, *, octets: int, values: int, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a JSON object with these members and no others.

    Raises:
        BadRecord: If it is none, or beyond a bound.
    """
    try:
        value = strictjson.loads(text, octets=octets, depth=_DEPTH, values=values)
    except strictjson.StrictJsonError as exc:
        raise BadRecord(f"not acceptable JSON: {exc}") from None
    return _members(value, required, optional)


def read_keys(value: object, limit: int, *, least: int = 1) -> tuple[bytes, ...]:
    """Read a list of Block Keys.

    Raises:
        BadRecord: If it is none, shorter than ``least`` or longer than ``limit``.
    """
    if not isinstance(value, list):
        raise BadRecord("keys are no list")
    if not least <= len(value) <= limit:
        raise BadRecord(f"{len(value)} keys, expected {least} to {limit}")
    try:
        return tuple(from_hex("Block Key", key, ID_OCTETS) for key in value)
    except BadName as exc:
        raise BadRecord(str(exc)) from None


def read_publication(value: object) -> bytes | None:
    """Read a Publication ID that may be left out.

    Raises:
        BadRecord: If it is there and is none.
    """
    if value is None:
        return None
    try:
        return from_hex("Publication ID", value, PUBLICATION_ID_OCTETS)
    except BadName as exc:
        raise BadRecord(str(exc)) from None


def read_lease(value: object, *, least: float = 0.1) -> float:
    """Read seconds.

    Raises:
        BadRecord: If it is no number of ``least`` to a year.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRecord("lease is no number of seconds")
    if not least <= value <= 366 * 86_400:
        raise BadRecord(f"lease of {value} seconds, expected {least} to a year")
    return float(value)


def read_count(name: str, value: object, limit: int, *, least: int = 1) -> int:
    """Read an integer of ``least`` to ``limit``.

    Raises:
        BadRecord: If it is none.
    """
    count = _integer(name, value)
    if not least <= count <= limit:
        raise BadRecord(f"{name} is {count}, expected {least} to {limit}")
    return count


def _members(value: object, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRecord("no JSON object")
    if missing := [name for name in required if name not in value]:
        raise BadRecord(f"member {missing[0]!r} is missing")
    if unknown := [name for name in value if name not in (*required, *optional)]:
        raise BadRecord(f"member {unknown[0][:40]!r} is not known")
    return dict(value)


def _integer(name: str, value: object) -> int:
    """Read an integer; 1.0 is one, too, as JSON Schema has it."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise BadRecord(f"{name} is no integer")
    return value


def _natural(name: str, value: object) -> int:
    number = _integer(name, value)
    _check_number(name, number, MAX_BLOCKS)
    return number


def _check_number(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise BadRecord(f"{name} is {value}, expected 0 to {limit}")


def _texts(name: str, value: object, limit: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise BadRecord(f"{name} are no list of at most {limit}")
    if not all(isinstance(text, str) for text in value):
        raise BadRecord(f"{name} are not all text")
    return tuple(value)


def read_boolean(name: str, value: object) -> bool:
    """Read true or false.

    Raises:
        BadRecord: If it is neither.
    """
    if not isinstance(value, bool):
        raise BadRecord(f"{name} is neither true nor false")
    return value
