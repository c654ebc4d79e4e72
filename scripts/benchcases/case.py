"""A case, and what the command line says about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchcases.ends import Place
from benchcases.figures import Result, Target
from moqt.aio.settings import EngineName

#: MiB that an end may hold beyond the octets of the cache: session windows (16 MiB), what the
#: QUIC stack holds of what is not acknowledged, manifests, the interpreter's own slack.
GROWTH_MIB = 64.0
#: MiB by which memory may rise for each 100 publications: 5 KiB each. What a publication holds
#: at the least (one connection, one manifest, one set of Objects) is thirty times that.
PUBLICATIONS_SLOPE_MIB = 0.5


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    mb: int | None = None
    objects: int | None = None
    publications: int | None = None
    visits: int | None = None
    pairs: int = 3
    checkout: Path = Path()

    def octets(self, otherwise: float) -> float:
        return otherwise if self.mb is None else self.mb * 1e6


@dataclass(frozen=True)
class Case:
    """One measurement."""

    name: str
    what: str
    targets: tuple[Target, ...]
    run: Callable[["Case", Place, Options], Result]
    pairs: int = 3
    """How often it is measured where the command line does not say."""

    engine: EngineName | None = None
    """What its ends are about, whatever the command line says; None: what that says."""
