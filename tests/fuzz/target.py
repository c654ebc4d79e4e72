"""What a fuzz target is: a parser, what may leave it, and inputs that get deep into it.

A target takes octets of any kind. Whatever they are, it returns, or raises one of the exceptions
that the parser documents; anything else is a mistake of ours. It may check more by itself, such as
that octets mean the same however they are cut.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

#: Characters of a refusal at most. It ends in a log, and who wrote the octets chooses their number.
MAX_TEXT = 2_000

#: What parsers trip over: ends of ranges, lengths that are not there, marks of text formats.
_WORDS = (
    b"\x00", b"\x01", b"\x7f", b"\x80", b"\xc0", b"\xfe", b"\xff", b"\xff" * 8, b"\xff" * 9,
    b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"\xc0" + b"\x00" * 7, b'"', b"{", b"[", b"]", b"}", b",",
    b"null", b"1e999", b"-1", b"\\u0000", b"\\ud800", b"NaN", b" ", b"\n", b"=", b"%00",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser, and what is expected of it."""

    name: str

    run: Callable[[bytes], object]
    """Parse, and look at what came of it."""

    documented: tuple[type[Exception], ...] = ()
    """What it may raise, as its docstring says."""

    seeds: Callable[[], Iterable[bytes]] = field(repr=False)
    """Inputs to begin with; together they reach every branch that valid input can."""

    max_octets: int = 1024
    """Longer inputs are not tried: they take long, and reach nothing new."""

    def outcome(self, data: bytes) -> type[Exception] | None:
        """Run it; return what it raised, if that is documented, and None if it returned.

        Raises:
            Exception: Whatever else left it: a finding.
            AssertionError: If what it says is so long that a peer could fill a log with it.
        """
        try:
            self.run(data)
        except self.documented as exc:
            text = str(exc)
            assert len(text) <= MAX_TEXT, f"a refusal of {len(text)} characters: {text[:80]}"
            return type(exc)
        return None


def spoilt(seeds: list[bytes], rng: random.Random) -> bytes:
    """Return one of ``seeds`` with a few octets changed, dropped, doubled or put in."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                del data[at : at + rng.randint(1, 8)]
            case 3:
                data[at:at] = rng.choice(_WORDS)
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 5:
                del data[at:]
            case _:
                other = rng.choice(seeds)
                cut = rng.randrange(len(other) + 1)
                data[at:] = other[cut : cut + rng.randint(1, 200)]
    return bytes(data)
